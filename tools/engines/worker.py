# SPDX-License-Identifier: Apache-2.0
"""What the workers of bench-engines.py share: requests as lines of JSON on the standard input, an
answer for each on what the standard output was at the start. Everything else goes to the error
output.

A worker's class has
    open(row, tokens)  makes a full cache
    nbytes(row)        the bytes that it takes, as its engine counts
    step(row)          decodes one token
    close(row)         gives the cache back
    pids()             processes whose memory counts, this one among them
    settle(row)        returns when what filling left behind has been given back
"""
import json
import os
import statistics
import sys
import time

SHAPE = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 128,
         "intermediate": 6144, "vocabulary": 32000}  # 1.07 billion weights
SETTLES = 12  # seconds without a change, until memory counts as settled
if os.environ.get("KVQ_BENCH_SMALL"):
    SETTLES = 0
    SHAPE |= {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512}


def resident(pids):
    """Bytes of memory in use by these processes, but for files; what they share counts once."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
            fields = dict(line.split(":", 1) for line in rollup if ":" in line)
        total += 1024 * sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return total


def _answer(worker, request):
    kind, row = request["do"], request.get("row")
    if kind == "open":
        before = resident(worker.pids())
        worker.open(row, request["tokens"])
        worker.step(row)
        worker.settle(row)
        return {"bytes": worker.nbytes(row), "resident": resident(worker.pids()) - before}
    if kind == "step":
        times = []
        for _ in range(request["times"]):
            began = time.perf_counter()
            worker.step(row)
            times.append(1e3 * (time.perf_counter() - began))
        return {"ms": statistics.median(times)}
    if kind == "close":
        worker.close(row)
        return {}
    raise ValueError(f"{kind!r} is no request")


def serve(make):
    """Answers until the input ends. make(threads) makes the worker, at the first request."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "start":
                worker = make(request["threads"])
                answer = {"what": worker.what}
            else:
                answer = _answer(worker, request)
        except Exception as error:  # pylint: disable=broad-except
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
