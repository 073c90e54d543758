#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times decode attention of one token, layer after layer, here and in other engines, by turns.

    tools/bench-peers.py --python ort=/venv1/bin/python --python vllm=/venv2/bin/python
    tools/bench-peers.py --rows kvq:f16,kvq:kvq2/fast,torch:bf16/grouped --tokens 4096 --threads 1

Each peer is a process of its own, with an interpreter of its own (`--python`), over the same random
tokens. A row has so many layers, each in memory of its own, that a walk over them reads four times
the last level cache, or one layer where that is larger. A row that would need more than 256 layers
for that is named below the tables: what it reads may come from the processor's cache. In a round
every row has a turn: one walk that is not timed, and walks for `--seconds`. Times are medians over
the rounds, ratios medians of each round's. A peer or a row that is not there is in the tables with
the reason.

`error`: of the query head that is off the most, the distance from attention in double precision
over the values before they were quantized, over the output's length. Values are normal numbers,
which few bits hold badly.

Rows, as PEER:TYPE:

  kvq:FORMAT[/PATH]          kvq in this process over a kvqd's memory; exact unless PATH is fast
  ggml:TYPE[/fa][@heads]     llama.cpp's ggml: f16, q8_0, q4_0; /fa: its flash attention, else K
                             has the type and V is f16; each token's heads lie in one piece, with
                             @heads each head's tokens
  ik:TYPE[/fa][@heads]       the same in ik_llama.cpp's ggml
  ort:TYPE[/tensor]          ONNX Runtime's GroupQueryAttention: f32, f16, int8, int4; scales for
                             each channel, with /tensor one; calls also store the new token
  torch:TYPE[/grouped]       PyTorch's SDPA: f32, f16, bf16; a head's queries by enable_gqa, or
                             with /grouped as the tokens of one head
  vllm:TYPE                  vLLM for CPUs: bf16, fp8
"""
import argparse
import glob
import json
import os
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "engines"), os.path.join(HERE, "peers")]
import table  # noqa: E402
from process import Process  # noqa: E402

ROWS = ("kvq:f16,kvq:int8,kvq:kivi4,kvq:kivi4/fast,kvq:oscar4,kvq:oscar4/fast,kvq:oscar3,"
        "kvq:oscar3/fast,kvq:oscar2,kvq:oscar2/fast,kvq:kvq2,kvq:kvq2/fast,"
        "ggml:f16,ggml:f16/fa,ggml:f16/fa@heads,ggml:q8_0,ggml:q8_0/fa,ggml:q8_0/fa@heads,"
        "ggml:q4_0/fa,ggml:q4_0/fa@heads,"
        "ik:f16,ik:f16/fa,ik:f16/fa@heads,ik:q8_0/fa,ik:q8_0/fa@heads,ik:q4_0/fa,ik:q4_0/fa@heads,"
        "ort:f32,ort:f16,ort:int8,ort:int8/tensor,ort:int4,"
        "torch:f32/grouped,torch:bf16,torch:bf16/grouped,vllm:bf16,vllm:fp8")
SHAPES = "32/8/128,9/3/64"
FIELDS = ("q_heads", "kv_heads", "head_dim")
REST = 0.02  # seconds between turns: other threads that wait awake go to sleep
WALKS = 4    # times the last level cache


def numbers(text):
    """Of a list with commas."""
    values = [int(x) for x in text.split(",")]
    if min(values) < 1:
        raise ValueError
    return values


def shapes(text):
    """Of a list of QUERY/KV/DIM."""
    found = []
    for one in text.split(","):
        values = numbers(one.replace("/", ","))
        if len(values) != 3 or values[0] % values[1]:
            raise ValueError
        found.append({"name": one, **dict(zip(FIELDS, values))})
    return found


def arguments():
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS, metavar="R,..", help="what to time (all above)")
    parser.add_argument("--shapes", type=shapes, default=SHAPES, metavar="Q/KV/DIM,..",
                        help="query heads, KV heads, head_dim (%(default)s)")
    parser.add_argument("--tokens", type=numbers, default="4096,32768", metavar="N,..",
                        help="in the cache (%(default)s)")
    parser.add_argument("--threads", type=numbers, default="1,2", metavar="N,..",
                        help="that attend (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=0.05, metavar="S",
                        help="of a turn, at least (%(default)s)")
    parser.add_argument("--walk", type=int, metavar="MIB",
                        help="that a walk reads at least (4 times the last level cache)")
    parser.add_argument("--base", default="torch:bf16/grouped,kvq:f16", metavar="R,..",
                        help="rows that others are held against (%(default)s)")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH",
                        help="a peer's interpreter (the one that runs this)")
    parser.add_argument("--ggml", metavar="FOLDER", help="of libggml*.so (llama-cpp-python's)")
    parser.add_argument("--ik", metavar="FOLDER", help="of libggml.so (ik-llama-cpp-python's)")
    parser.add_argument("--json", metavar="FILE", help="write what was measured there as well")
    given = parser.parse_args()
    given.rows, given.base = given.rows.split(","), given.base.split(",")
    given.python = dict(x.partition("=")[::2] for x in given.python)
    unknown = {*map(table.peer_of, given.rows), *given.python} - set(table.INSTALL)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is no peer; there are "
                     + ", ".join(table.INSTALL))
    unknown = [base for base in given.base if base not in given.rows]
    if unknown and ",".join(given.base) != parser.get_default("base"):
        parser.error(f"--base {unknown[0]} is none of the rows: {', '.join(given.rows)}")
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: expected 1 or more")
    if not given.walk:
        given.walk = WALKS * last_level_cache() >> 20
    return given


def last_level_cache():
    """Bytes; 32 MiB where the system does not say."""
    sizes = [32 << 20]
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes)


def start(peer, given):
    """A peer's process."""
    most = max(given.threads)
    environment = os.environ | {"OMP_NUM_THREADS": str(most),
                                "KVQ_BENCH_GGML": given.ggml or "", "KVQ_BENCH_IK": given.ik or ""}
    script = os.path.join(HERE, "peers", "serve.py")
    return Process([given.python.get(peer, sys.executable), script, peer], environment,
                   threads=most)


def start_all(given, missing):
    """{peer: process} of those that are there. Rows of the others are missing."""
    peers = {}
    for peer in dict.fromkeys(map(table.peer_of, given.rows)):
        process = start(peer, given)
        print(f"{peer}: {process.what or process.error}", file=sys.stderr, flush=True)
        if not process.error:
            peers[peer] = process
            continue
        process.stop()
        missing |= {row: table.absent(row, process.error) for row in given.rows
                    if table.peer_of(row) == peer}
    return peers


def fill(given, peers, shape):
    """{row: what it is} of those that could be opened, and {row: why} of those that could not."""
    opened, failed = {}, {}
    for row in given.rows:
        peer = peers.get(table.peer_of(row))
        if not peer:
            continue
        print(f"  filling {row}", file=sys.stderr, flush=True)
        answer = peer.ask(do="open", name=row, shape=shape, walk=given.walk << 20)
        if "error" in answer and "bits" not in answer:
            failed[row] = "cannot: " + answer["error"]
        else:
            opened[row] = answer
    return opened, failed


def turns(given, peers, opened, threads, failed):
    """{row: what it is, with "us"}, after all rounds. A row that fails is closed, and goes from
    those that are opened to those that have failed."""
    rows = {row: {**what, "us": []} for row, what in opened.items()}
    for number in range(given.rounds):
        print(f"  round {number + 1} of {given.rounds}", file=sys.stderr, flush=True)
        for row in list(rows):
            time.sleep(REST)
            answer = peers[table.peer_of(row)].ask(do="step", name=row, threads=threads,
                                                   seconds=given.seconds)
            if "error" in answer:
                failed[row] = "cannot: " + answer["error"]
                peers[table.peer_of(row)].ask(do="close", name=row)
                del rows[row], opened[row]
            else:
                rows[row]["us"].append(answer["us"])
    return rows


def measure(given, peers):
    """Cases, for table.py."""
    cases = []
    for shape in given.shapes:
        for tokens in given.tokens:
            numbers_of = {**{n: shape[n] for n in FIELDS}, "tokens": tokens}
            print(f"{shape['name']}, {tokens} tokens", file=sys.stderr, flush=True)
            opened, failed = fill(given, peers, numbers_of)
            for threads in given.threads:
                cases.append({"shape": shape, "tokens": tokens, "threads": threads,
                              "rows": turns(given, peers, opened, threads, failed),
                              "failed": dict(failed)})
            for row in opened:
                peers[table.peer_of(row)].ask(do="close", name=row)
    return cases


def main():
    """Exit status: 0, or 1 if a row could not be measured."""
    given, missing = arguments(), {}
    peers = start_all(given, missing)
    what = {name: peer.what for name, peer in peers.items()}
    cases = measure(given, peers)
    for peer in peers.values():
        peer.stop()
    print("; ".join(what.values()) + "\n")
    print("\n".join(table.report(cases, given.rows, given.base, missing,
                                 given.walk << 20)))
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"peers": what, "missing": missing, "cases": cases}, file, indent=1)
    return 1 if missing or any(case["failed"] for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
