# SPDX-License-Identifier: Apache-2.0
"""What the workers of bench-engines.py share: requests as lines of JSON on the standard input, an
answer for each on what the standard output was at the start. Everything else goes to the error
output.

"""
import ctypes
import json
import os
import sys
import time

SHAPE = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 128,
         "intermediate": 6144, "vocabulary": 32000}  # 1.07 billion weights
TIMED = 2     # tokens of a turn
SETTLES = 12  # seconds without a change, until memory counts as settled
if os.environ.get("KVQ_BENCH_SMALL"):
    SETTLES = 0
    SHAPE |= {"hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512}


def _memfds(pid):
    """{(device, inode): bytes of memory} of what a process has of shared memory."""
    found, folder = {}, f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        path = os.path.join(folder, number)
        try:
            if os.readlink(path).startswith("/memfd:"):
                about = os.stat(path)
                found[about.st_dev, about.st_ino] = 512 * about.st_blocks
        except FileNotFoundError:  # closed since
            pass
    return found


def resident(pids):
    """Bytes of memory in use by these processes, but for files; what they share counts once. kvqd
    has memory that no process has touched yet: an extent of its pool takes all of its pages at
    once."""
    anonymous, shared = 0, {}
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as rollup:
            fields = dict(line.split(":", 1) for line in rollup if ":" in line)
        anonymous += 1024 * int(fields["Pss_Anon"].split()[0])
        shared |= _memfds(pid)
    return anonymous + sum(shared.values())


def check_tokens(daemon, tokens):
    """Raises unless the sessions of kvqd have grown to so many tokens: an engine that never found
    kvq decodes as well, over a cache of its own."""
    held = daemon.session_tokens()
    if held < tokens:
        raise RuntimeError(f"the engine does not run over kvq: kvqd's sessions have {held} tokens, "
                           f"and {tokens} were decoded")


class Row:
    """A full cache."""
    daemon = None  # a kvqd of its own, or None

    def step(self):
        """Decodes one token."""
        raise NotImplementedError

    def nbytes(self):
        """The bytes that the cache takes, as its engine counts."""
        raise NotImplementedError

    def settle(self):
        """Returns when what filling left behind has been given back."""
        if self.daemon:
            self.daemon.settle()

    def pids(self):
        """Other processes whose memory counts."""
        return self.daemon.pids() if self.daemon else []

    def close(self):
        """Gives the cache back."""
        if self.daemon:
            self.daemon.stop()


class Worker:
    """The rows of an engine. Subclasses make them, and share a model among them."""
    what = "?"  # engine and versions
    with_model = False  # a row brings a model of its own, so that its memory says nothing

    def __init__(self, threads):
        self.threads, self.rows = threads, {}

    def make(self, name, tokens):
        """A row of that name."""
        raise NotImplementedError

    def _resident(self):
        ctypes.CDLL(None).malloc_trim(0)  # what filling used and freed counts for nobody
        return resident([os.getpid(), *(pid for row in self.rows.values() for pid in row.pids())])

    def open(self, name, tokens):
        """Fills a cache and decodes a token."""
        before = self._resident()
        row = self.rows[name] = self.make(name, tokens)
        try:
            row.step()
            if row.daemon:
                check_tokens(row.daemon, tokens + 1)
            row.settle()
        except BaseException:
            self.close(name)
            raise
        return {"bytes": row.nbytes(),
                "resident": None if self.with_model else self._resident() - before}

    def step(self, name):
        """A turn: tokens one after another, as an engine decodes them. The first one, which finds
        caches as the rows before it have left them, is not timed."""
        row = self.rows[name]
        row.step()
        began = time.perf_counter()
        for _ in range(TIMED):
            row.step()
        return {"ms": 1e3 * (time.perf_counter() - began) / TIMED}

    def close(self, name):
        """Gives a cache back."""
        self.rows.pop(name).close()
        return {}


def serve(make):
    """Answers until the input ends. make(threads) makes the worker, at the first request, `start`;
    the others are Worker's methods, with their arguments."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            if what == "start":
                worker = make(**request)
                answer = {"what": worker.what}
            else:
                answer = getattr(worker, what)(**request)
        except Exception as error:  # pylint: disable=broad-except
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
    for name in list(worker.rows if worker else ()):
        worker.close(name)
