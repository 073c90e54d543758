# SPDX-License-Identifier: Apache-2.0
"""What the workers of bench-engines.py share: requests as lines of JSON on the standard input, an
answer for each on what the standard output was at the start. Everything else goes to the error
output.

"""
import ctypes
import json
import os
import resource
import sys
import time

SHAPE = {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 128,
         "intermediate": 6144, "vocabulary": 32000}  # 1.07 billion weights
TIMED = 2     # steps of a turn
SPARE = 1 << 30  # bytes of the machine's memory that no row may take
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


def available():
    """Bytes of memory that the machine has left, but for SPARE."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return 1024 * int(fields["MemAvailable"].split()[0]) - SPARE


def limit_memory():
    """What this process cannot have it is refused, so that a cache which does not fit is an error,
    and nothing that the system must kill. Returns the bytes that it can have."""
    with open("/proc/self/status", encoding="ascii") as file:
        has = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmData:"))
    left = max(available(), 0)
    resource.setrlimit(resource.RLIMIT_DATA,
                       (has + left, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return left


def check_room(nbytes):
    """Raises unless the machine has so many bytes of memory left."""
    if nbytes > available():
        raise MemoryError(f"{nbytes / 1e9:.1f} GB are needed")


def check_tokens(daemon, tokens):
    """Raises unless the sessions of kvqd have grown to so many tokens: an engine that never found
    kvq decodes as well, over a cache of its own."""
    held = daemon.session_tokens()
    if held < tokens:
        raise RuntimeError(f"the engine does not run over kvq: kvqd's sessions have {held} tokens, "
                           f"and {tokens} were decoded")


class Row:
    """A full cache of as many sequences as the batch has."""
    daemon = None  # a kvqd of its own, or None

    def step(self):
        """Decodes one token of each sequence."""
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

    def make(self, name, tokens, batch):
        """A row of that name, with a batch of sequences of so many tokens each."""
        raise NotImplementedError

    def _resident(self):
        ctypes.CDLL(None).malloc_trim(0)  # what filling used and freed counts for nobody
        return resident([os.getpid(), *(pid for row in self.rows.values() for pid in row.pids())])

    def _fill(self, name, tokens, batch):
        """A row, in what memory there is."""
        left = limit_memory()
        try:
            return self.make(name, tokens, batch)
        except (MemoryError, RuntimeError) as error:
            text = f"{error} ({left / 1e9:.1f} GB of memory were left for it)"
            raise RuntimeError(text) from error

    def open(self, name, tokens, batch):
        """Fills a cache and takes a turn, behind which a daemon has packed the prompt's last
        tokens, too."""
        before = self._resident()
        row = self.rows[name] = self._fill(name, tokens, batch)
        try:
            self.step(name)
            if row.daemon:
                check_tokens(row.daemon, batch * (tokens + 1 + TIMED))
            row.settle()
        except BaseException:
            self.close(name)
            raise
        return {"bytes": row.nbytes(),
                "resident": None if self.with_model else self._resident() - before}

    def step(self, name):
        """A turn: steps one after another, as an engine decodes. The first one, which finds
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
