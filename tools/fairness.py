#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a busy client's steps cost beside others, in pairs of short windows on the same machine.

  tools/fairness.py idle [SESSIONS]   beside no and beside so many idle sessions, of two daemons
  tools/fairness.py lookups           beside a neighbour that steps, and one that looks up 1M ids
  tools/fairness.py nops              the same with NOPs on 64 queues of one client
  tools/fairness.py forks             the same with three FORKs of 256 sessions of 1M tokens
  tools/fairness.py saves             beside nothing, and beside a save, and a park and the way back
                                      of a session of 64 layers and 8,192 tokens (360 MB)
  tools/fairness.py stored [SESSIONS] beside no and beside so many saved sessions of 16 tokens; how
                                      long a daemon takes to save them, and to its first answers
  tools/fairness.py evictions [N]     sessions of 256 KiB that go to disk in a second, where N are
                                      idle and requests need the room of half of them
  tools/fairness.py waiting [CLIENTS] empty requests beside no and beside so many clients that wait
                                      for room, of two daemons

KVQ_BIN_DIR and KVQ_LIBRARY say which build, as for tests/e2e/python.py. Figures are of the
moment: read the ratios of pairs, not the microseconds.
"""
import concurrent.futures
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

if "--help" in sys.argv[1:]:
    print(__doc__)
    sys.exit(0)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests", "e2e"), os.path.join(ROOT, "client", "python")]
import kvq  # noqa: E402
from e2e_rig import Daemon  # noqa: E402

PAIRS, WINDOW = int(os.environ.get("KVQ_PAIRS", "10")), 0.6
DIM, LONG = 64, 1 << 20
ROWS = [kvq.Layer(1, 1, DIM)]


class Steps:
    """A client that makes steps of one token, with attention."""

    def __init__(self, directory, name):
        self.client = kvq.Client(directory, name=name)
        self.queue = self.client.queue()
        self.session = self.client.session(ROWS, "f16", max_rollback=1024)
        self.rows = np.ones((1, 1, DIM), np.float32)

    def one(self):
        if self.session.tokens >= 1024:
            self.queue.truncate([self.session], 64)
        with self.queue.step([self.session], 1) as step:
            step.append_attend(0, self.rows, self.rows, self.rows)

    def window(self):
        """Latencies in microseconds."""
        end = time.perf_counter() + WINDOW
        return self.steps(lambda: time.perf_counter() < end)

    def during(self, work):
        """The same while a thread does something that takes its time elsewhere."""
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            future = threads.submit(work)
            taken = self.steps(lambda: not future.done())
            future.result()
            return taken

    def steps(self, go_on):
        taken = []
        while go_on():
            now = time.perf_counter()
            self.one()
            taken.append((time.perf_counter() - now) * 1e6)
        return np.array(taken)


class Nops(Steps):
    """The same with requests that do nothing."""

    def one(self):
        self.queue.nop([self.session])


def told(name, pairs):
    """A line for each of both sides, and the ratios with their spread."""
    for i, side in enumerate(name):
        rows = [[np.percentile(p[i], 50), np.percentile(p[i], 99), p[i].max()] for p in pairs]
        p50, p99, worst = np.median(rows, axis=0)
        print(f"{side:28} p50 {p50:8.0f} us  p99 {p99:8.0f} us  worst {worst:8.0f} us "
              f"(of all {max(r[2] for r in rows):.0f})")
    for q in (50, 99):
        ratios = sorted(np.percentile(b, q) / np.percentile(a, q) for a, b in pairs)
        print(f"ratio of p{q}: {np.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def rss(daemon):
    with open(f"/proc/{daemon.process.pid}/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmRSS"))


def idle(sessions="100000"):
    n, options = int(sessions), {"pool_bytes": "64mb", "max_sessions": 0, "keep_seconds": 3600,
                            "table_bytes": "1gb"}
    empty, full = Daemon(**options), Daemon(**options)
    storage = full.client()
    before, start = rss(full), time.perf_counter()
    for i in range(n):
        storage.session(ROWS, "f16", name=f"idle {i}").close()
    taken = time.perf_counter() - start
    print(f"{n} opens and closes: {n / taken:.0f} a second; "
          f"{(rss(full) - before) / n:.0f} bytes of RSS for each session")
    a, b = Steps(empty.directory, "a"), Steps(full.directory, "b")
    a.window(), b.window()
    told(("no idle session", f"{n} idle sessions"),
         [(a.window(), b.window()) for _ in range(PAIRS)])
    for d in (empty, full):
        d.process.kill()


def make_saved(options, n):
    """n sessions of 16 tokens each, which the daemon saves when it ends."""
    daemon, at_once, tokens = Daemon(**options), 256, 16
    client = daemon.client()
    queue = client.queue()
    rows = client.buffer(8 * at_once * tokens * DIM).array((at_once * tokens, 1, DIM), np.float16)
    rows[:] = 1
    start = time.perf_counter()
    for first in range(0, n, at_once):
        sessions = [client.session(ROWS, "f16", name=f"saved {i}", keep_seconds=3600)
                    for i in range(first, min(first + at_once, n))]
        count = tokens * len(sessions)
        queue.step_whole(sessions, tokens, [rows[:count]], [rows[:count]])
        for session in sessions:
            session.close()
    print(f"{n} sessions made in {time.perf_counter() - start:.1f} s")
    client.close()
    start = time.perf_counter()
    daemon.process.terminate()
    daemon.process.wait()
    print(f"saved, and ended, in {time.perf_counter() - start:.1f} s")


def stored(sessions="100000"):
    n, folder = int(sessions), tempfile.mkdtemp(prefix="kvq-fairness-")
    options = {"pool_bytes": "4gb", "max_sessions": 0, "table_bytes": "1gb", "max_clients": 8}
    saving = {"storage_dir": folder, "drain_ms": 600000, "storage_bytes": "16gb"}
    make_saved({**options, **saving}, n)
    starts = 3
    for i in range(starts):
        start = time.perf_counter()
        full = Daemon(**options, **saving)
        ready = time.perf_counter() - start
        client = full.client()
        connected = time.perf_counter() - start
        last = client.session(name=f"saved {n - 1}", must_exist=True)
        queue = client.queue()
        queue.read(last, 0, 0, 16)
        print(f"ready after {ready:.2f} s, a client connected {connected:.2f}, a session read "
              f"{time.perf_counter() - start:.2f}; {rss(full) / 2**20:.0f} MiB of RSS")
        if i < starts - 1:
            client.close()
            full.process.terminate()
            full.process.wait()
    empty = Daemon(**options)
    a, b = Steps(empty.directory, "a"), Steps(full.directory, "b")
    a.window(), b.window()
    told(("no saved session", f"{n} saved sessions"),
         [(a.window(), b.window()) for _ in range(PAIRS)])
    for d in (empty, full):
        d.process.kill()
    shutil.rmtree(folder)


EVICTED = [kvq.Layer(1, 1, DIM)] * 8  # 128 tokens as f16 take 256 KiB


def fed_session(client, queue, k, tokens):
    """One of so many tokens. Its queue waits for room."""
    session = client.session(EVICTED, "f16")
    queue.step_whole([session], tokens, [k[:tokens]] * len(EVICTED), [k[:tokens]] * len(EVICTED))
    return session


def transactions(store):
    with contextlib.closing(sqlite3.connect(f"file:{store}/catalog.db?mode=ro", uri=True)) as c:
        return c.execute("SELECT last_transaction FROM store").fetchone()[0]


def evictions(sessions="512"):
    n, store = int(sessions), tempfile.mkdtemp(prefix="kvq-fairness-")
    for threads, rooms in ((1, 1), (16, 1), (1, 32)):
        rates, sizes = [], []
        for _ in range(PAIRS):
            daemon = Daemon(pool_bytes=str(n << 18), extent_bytes="8mb", storage_dir=store,
                            evict_idle_ms=0, evict_above=0, max_sessions=0, save_on_drain="no")
            client = daemon.client()
            queues = [client.queue() for _ in range(threads)]
            k = client.buffer(2 * 128 * rooms * DIM).array((128 * rooms, 1, DIM), np.float16)
            k[:] = 1
            held = [fed_session(client, queues[0], k, 128) for _ in range(n)]
            start, before = time.perf_counter(), transactions(store)

            def some(queue):
                return [fed_session(client, queue, k, 128 * rooms)
                        for _ in range(n // 2 // rooms // threads)]
            with concurrent.futures.ThreadPoolExecutor(threads) as pool:
                held += pool.map(some, queues)
            taken = time.perf_counter() - start
            gone = daemon.status()["counters"]["parked_room"]
            rates.append(gone / taken)
            sizes.append(gone / (transactions(store) - before))
            daemon.process.kill()
            daemon.process.wait()
        print(f"{threads} requests at a time, each of the room of {rooms}: "
              f"{np.median(rates):.0f} sessions a second ({min(rates):.0f} to {max(rates):.0f}), "
              f"{np.median(sizes):.1f} in a transaction")
    shutil.rmtree(store)


def hold_all(client):
    """Steps that are left open and have all of the daemon's memory between them."""
    queue, steps, tokens = client.queue(), [], 1 << 18
    while tokens >= 128:
        try:
            steps.append(queue.step([client.session(ROWS, "f16")], tokens).__enter__())
        except kvq.Error:
            tokens //= 2
    return steps


def wait_for_room(directory, name):
    client = kvq.Client(directory, name=name)
    queue = client.queue()
    queue.wait_for_room(3600)
    session = client.session(ROWS, "f16")

    def ask():
        try:
            queue.step([session], 1000).__enter__()
        except kvq.Error:
            pass  # the daemon was killed
    threading.Thread(target=ask, daemon=True).start()
    return client


def waiting(clients="900"):
    options = {"pool_bytes": "64mb", "max_clients": 1024}
    quiet, full = Daemon(**options), Daemon(**options)
    a, b = Nops(quiet.directory, "a"), Nops(full.directory, "b")
    held = hold_all(full.client())
    asking = [wait_for_room(full.directory, f"waits {i}") for i in range(int(clients))]
    while full.ctl("status")["counters"]["waiting_for_room_now"] < len(asking):
        time.sleep(0.1)
    told(("nobody waits", f"{clients} clients wait"), [(a.window(), b.window())
                                                       for _ in range(PAIRS)])
    print(f"{len(held)} steps hold the memory")
    for d in (quiet, full):
        d.process.kill()
    os._exit(0)  # threads wait


# ---- Neighbours: processes that do something while they are told to ----

def stepping(directory):
    return Steps(directory, "neighbour").one


def lookups(directory):
    client = kvq.Client(directory, name="lookups")
    ids = np.arange(LONG, dtype=np.int32)
    return lambda: client.lookup(ROWS, "f16", prefix=ids, model="m")


def nops(directory):
    client = kvq.Client(directory, name="nops")
    queues = [client.queue() for _ in range(64)]

    def all_queues():
        with concurrent.futures.ThreadPoolExecutor(len(queues)) as threads:
            for done in threads.map(lambda q: [q.nop() for _ in range(20)], queues):
                assert len(done) == 20
    return all_queues


def forks(directory):
    client = kvq.Client(directory, name="forks")
    queue = client.queue()
    session = client.session([kvq.Layer(1, 1, DIM, window=128)], "f16")
    rows = client.buffer(4 * 16384 * DIM).array((16384, 1, DIM), np.float32)
    rows[:] = 1
    while session.tokens < LONG:
        queue.step_whole([session], 16384, [rows], [rows],
                         ids=np.arange(16384, dtype=np.int32) + session.tokens)

    def some():
        made = []
        try:
            for _ in range(3):
                made += queue.fork([session] * 256)
        except kvq.Error as error:
            print("refused:", error, file=sys.stderr)
        for fork in made:
            fork.close()
    return some


KINDS = {"stepping": stepping, "lookups": lookups, "nops": nops, "forks": forks}


def neighbour(kind, directory):
    """Works while it is told to, and answers each word: `ready`, or `failed` once its work has
    failed. What went wrong is on the error output."""
    work = KINDS[kind](directory)
    going = threading.Event()

    def loop():
        while True:
            going.wait()
            work()
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    print("ready", flush=True)
    for line in sys.stdin:
        going.set() if line == "go\n" else going.clear()
        print("ready" if thread.is_alive() else "failed", flush=True)


class Neighbour:
    def __init__(self, kind, directory):
        self.process = subprocess.Popen([sys.executable, __file__, "neighbour", kind, directory],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.kind = kind
        self.heard()

    def say(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.heard()

    def heard(self):
        """Ends the program unless the neighbour still works: beside none, steps are as fast as
        alone."""
        if self.process.stdout.readline() != "ready\n":
            sys.exit(f"fairness.py: the neighbour {self.kind} has failed; no figure counts")


def beside(kind):
    daemon = Daemon(pool_bytes="256mb", extent_bytes="16mb")
    victim = Steps(daemon.directory, "victim")
    others = [Neighbour("stepping", daemon.directory), Neighbour(kind, daemon.directory)]
    pairs, most = [], rss(daemon)
    for _ in range(PAIRS):
        pair = []
        for other in others:
            other.say("go")
            pair.append(victim.window())
            most = max(most, rss(daemon))
            other.say("stop")
            time.sleep(0.2)
        pairs.append(pair)
    told(("neighbour steps", f"neighbour: {kind}"), pairs)
    print(f"RSS at most {most / 2**20:.0f} MiB")
    for other in others:
        other.process.kill()
    daemon.process.kill()


def saves(layers="64", tokens="8192"):
    store = tempfile.mkdtemp(prefix="kvq-fairness-")
    daemon = Daemon(pool_bytes="4gb", extent_bytes="64mb", storage_dir=store)
    victim = Steps(daemon.directory, "victim")
    client = daemon.client()
    queue, rows = client.queue(), [kvq.Layer(8, 8, 128)] * int(layers)
    k = client.buffer(2 * 512 * 8 * 128).array((512, 8, 128), np.float16)
    k[:] = np.random.default_rng(1).standard_normal(k.shape)
    seen = {"a save": [], "a park and its way back": []}
    for i in range(PAIRS):
        session = client.session(rows, "kvq2", name=f"long {i}")
        while session.tokens < int(tokens):
            queue.step_whole([session], 512, [k] * len(rows), [k] * len(rows))
        seen["a save"].append((victim.window(), victim.during(session.save)))

        def there_and_back():
            session.park()
            queue.read(session, 0, 0, 1)
        seen["a park and its way back"].append((victim.window(), victim.during(there_and_back)))
        session.drop()
    for what, pairs in seen.items():
        told(("nothing beside", f"beside {what}"), pairs)
    daemon.process.kill()
    shutil.rmtree(store)


def main(what, *arguments):
    if what == "idle":
        idle(*arguments)
    elif what == "saves":
        saves(*arguments)
    elif what == "stored":
        stored(*arguments)
    elif what == "evictions":
        evictions(*arguments)
    elif what == "waiting":
        waiting(*arguments)
    elif what == "neighbour":
        neighbour(*arguments)
    elif what in KINDS:
        beside(what)
    else:
        sys.exit(f"fairness.py: {what} is none of idle, saves, stored, evictions, waiting, "
                 f"{', '.join(KINDS)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
