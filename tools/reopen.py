#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long a saved session takes to come back: each time a daemon that was just started.

  tools/reopen.py [RUNS [TOKENS]]   10 times, of 131072 tokens: 8 layers of 8 KV heads at head_dim
                                    128 in oscar2 (822 MB)

The files lie in the current folder, whose disk is measured, until the end.
KVQ_BIN_DIR and KVQ_LIBRARY say which build, as for tests/e2e/python.py.
"""
import os
import re
import shutil
import statistics
import sys
import tempfile
import time

import numpy as np

if "--help" in sys.argv[1:]:
    print(__doc__)
    sys.exit(0)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests", "e2e"), os.path.join(ROOT, "client", "python")]
import kvq  # noqa: E402
from e2e_rig import Daemon  # noqa: E402

LAYERS, PIECE = 8, 2048
ROWS = [kvq.Layer(32, 8, 128, repeat=LAYERS)]
FIELDS = ("open answered after", "bytes of layer 0 after", "first attention, of layer 0, after",
          f"that of layer {LAYERS - 1} after", "all bytes after")


def start(store):
    return Daemon(storage_dir=store, storage_bytes="0", pool_bytes="3gb", extent_bytes=None,
                  attention=None)


def save(store, tokens):
    daemon, numbers = start(store), np.random.default_rng(1)
    with daemon.client() as client, client.queue() as queue:
        session = client.session(ROWS, "oscar2", name="it")
        k, v = client.array((PIECE, 8, 128)), client.array((PIECE, 8, 128))
        for _ in range(0, tokens, PIECE):
            k[:] = numbers.standard_normal(k.shape, np.float32)
            v[:] = numbers.standard_normal(v.shape, np.float32)
            with queue.step([session], PIECE) as step:
                for layer in range(LAYERS):
                    step.append(layer, k, v)
    daemon.ctl("session", "save", "it")
    daemon.process.kill()
    daemon.process.wait()


def reopen(store):
    """Milliseconds, as FIELDS has them, and what attention gave."""
    daemon = start(store)
    with daemon.client() as client, client.queue() as queue:
        q = client.array((1, 32, 128))
        q[:] = np.random.default_rng(2).standard_normal(q.shape, np.float32)
        begun, times, outs = time.perf_counter(), [], []
        session = client.session(ROWS, "oscar2", name="it")
        times.append(time.perf_counter() - begun)
        for layer in (0, LAYERS - 1):
            outs.append(queue.attend([session], layer, q)[0].tobytes())
            times.append(time.perf_counter() - begun)
        line = daemon.wait_log("event=session_restored")
    daemon.process.kill()
    daemon.process.wait()
    first, last = re.search(r"first layer after ([\d.]+) ms, all after ([\d.]+)", line).groups()
    opened, first_attention, last_attention = (1e3 * t for t in times)
    return (opened, float(first), first_attention, last_attention, float(last)), outs


def main(runs="10", tokens="131072"):
    store, all_times, bits = tempfile.mkdtemp(prefix="kvq-reopen-", dir="."), [], []
    try:
        save(store, int(tokens))
        for _ in range(int(runs)):
            times, outs = reopen(store)
            all_times.append(times)
            bits.append(outs)
    finally:
        shutil.rmtree(store)
    if any(outs != bits[0] for outs in bits):
        sys.exit("reopen.py: the daemons gave different bits; no figure counts")
    for name, times in zip(FIELDS, zip(*all_times)):
        print(f"{name:36} {min(times):6.0f} to {max(times):5.0f} ms, "
              f"median {statistics.median(times):.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
