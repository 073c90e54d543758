# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests stand on: a real daemon on a directory of its own, client processes,
attention in double precision, and a runner that counts.

Nothing here sleeps to wait. The daemon says when it is ready on a descriptor and what happens in
its log; processes say where they are on their standard output. Every wait has a bound.
"""
import atexit
import ctypes
import fcntl
import functools
import gc
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BIN = os.environ.get("KVQ_BIN_DIR") or os.path.join(ROOT, "build", "test", "bin")
os.environ.setdefault("KVQ_LIBRARY", os.path.join(os.path.dirname(BIN), "lib", "libkvq.so"))
sys.path.insert(0, os.path.join(ROOT, "client", "python"))

import kvq  # noqa: E402
import numpy as np  # noqa: E402

BOUND = 240  # seconds; no wait that works takes anywhere near it, on a machine that others load
# gpu, emu: sessions live on this machine's first GPU, or on the software GPU
BACKEND = os.environ.get("KVQ_E2E_BACKEND") or "cpu"
ROUNDING = 1 if BACKEND == "cpu" else 20  # GPUs multiply in fp16, the CPU's exact path in fp32
MIB = 1 << 20


# For tests that take long there, most of them because its GPU is emulated.
long_emulated = unittest.skipIf(BACKEND == "emu" and os.environ.get("KVQ_FULL") != "1",
                                "takes long on the software GPU; KVQ_FULL=1 runs it")


def emulated(some, all_of_it):
    """What to try: some of it on the software GPU, which computes a thousandth as fast as a GPU."""
    return some if BACKEND == "emu" else all_of_it


def less(all_of_it, some):
    """What to try: some of it where that takes long for the same reason."""
    return some if BACKEND == "emu" and os.environ.get("KVQ_FULL") != "1" else all_of_it


LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


@functools.cache
def everybodys_kvqctl():
    """A copy that any user may run: the build may lie where only its owner gets, as below /root.
    With others' libraries, if they came along (tools/gpu-check.sh --pack)."""
    folder = tempfile.mkdtemp(prefix="kvq-e2e-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chmod(folder, 0o755)
    shutil.copytree(os.path.join(os.path.dirname(BIN), "lib"), os.path.join(folder, "lib"),
                    ignore=shutil.ignore_patterns("*.a", "libkvq*"))
    os.mkdir(os.path.join(folder, "bin"), 0o755)
    return shutil.copy(os.path.join(BIN, "kvqctl"), os.path.join(folder, "bin"))


def die_with_parent():
    """In a new process: nothing stays behind, however the tests end."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def take_terminal():
    """In a new session: its standard input is its terminal."""
    die_with_parent()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Daemon:
    """A kvqd of this build. Options are its flags: Daemon(pool_bytes="64mb"). before: called in the
    new process, which has the descriptors of fds. within: a command that runs it."""

    def __init__(self, directory=None, ready=True, before=lambda: None, fds=(), within=(),
                 **options):
        self.own = directory is None
        self.directory = directory or tempfile.mkdtemp(prefix="kvq-e2e-")
        options.setdefault("pool_bytes", "256mb")
        options.setdefault("extent_bytes", "4mb")
        options.setdefault("backend", BACKEND)
        if options["backend"] != "cpu":
            options.setdefault("gpu_bytes", options["pool_bytes"])
        options.setdefault("http_address", "")  # others listen there
        options.setdefault("attention", "exact")  # held against double precision here
        flags = [x for name, value in options.items() if value is not None
                 for x in ("--" + name.replace("_", "-"), str(value))]
        readable, writable = os.pipe()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVQD_")}
        self.process = subprocess.Popen(
            [*within, os.path.join(BIN, "kvqd"), "--runtime-dir", self.directory, "--ready-fd",
             str(writable), *flags], pass_fds=[writable, *fds], stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, text=True, env=environment,
            preexec_fn=lambda: (die_with_parent(), before()))
        os.close(writable)
        self.lines = []
        self.news = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        try:
            if ready:
                self._wait_ready(readable)
        finally:
            os.close(readable)

    def _read(self):
        for line in self.process.stderr:
            with self.news:
                self.lines.append(line.rstrip("\n"))
                self.news.notify_all()

    def _wait_ready(self, fd):
        if not select.select([fd], [], [], BOUND)[0] or os.read(fd, 6) != b"ready\n":
            self.process.kill()
            self.process.wait()
            self.reader.join(BOUND)
            raise AssertionError("kvqd did not start:\n" + "\n".join(self.lines))

    def wait_log(self, pattern, count=1):
        """Waits until so many lines of the log match; returns the last of them."""
        with self.news:
            found = self.news.wait_for(
                lambda: [x for x in self.lines if re.search(pattern, x)][count - 1:], BOUND)
            if not found:
                raise AssertionError(f"the log never said {pattern!r}:\n" + "\n".join(self.lines))
            return found[0]

    def wait_gone(self, client_id):
        self.wait_log(rf"event=client_gone client={client_id}\b")

    def client(self, **options):
        return kvq.Client(self.directory, **options)

    def ctl(self, *arguments, check=True):
        """What kvqctl --json prints. With check=False: exit status, output and complaint. A save
        that comes too early, before a busy machine is through with what was packed, is tried
        again, as its refusal says."""
        end = time.monotonic() + BOUND
        while True:
            done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", self.directory,
                                   *arguments, "--json"], capture_output=True, text=True,
                                  timeout=BOUND, stdin=subprocess.DEVNULL)
            early = arguments[:2] == ("session", "save") and "try again (E_BUSY)" in done.stderr
            if not (check and early and time.monotonic() < end):
                break
        if not check:
            return done.returncode, done.stdout, done.stderr
        if done.returncode:
            raise AssertionError(f"kvqctl {arguments}: {done.returncode}: {done.stderr}")
        return json.loads(done.stdout)

    def status(self):
        """kvqctl's, with the memory of all places together: tests run on the host or on GPUs."""
        status = self.ctl("status")
        for gpu in status["gpus"]:
            status["pool_used_bytes"] += gpu["used_bytes"]
            status["pool_extent_bytes"] += gpu["extent_bytes"]
        return status

    def fds(self):
        """How many descriptors it has open, without its pool's extents, which it keeps a while, and
        without a GPU's, which its driver keeps: a client's stream is the next client's."""
        folder, count = f"/proc/{self.process.pid}/fd", 0
        for name in os.listdir(folder):
            try:
                where = os.readlink(os.path.join(folder, name))
                count += not any(x in where for x in ("kvq-extent", "kvq-emu-", "/dev/nvidia"))
            except FileNotFoundError:  # closed meanwhile
                pass
        return count

    def come_and_go(self):
        """A client connects and leaves, after which the daemon closes what it had of the last one.
        False where descriptors are so few that this one is refused until that is done."""
        try:
            self.client().close()
        except kvq.Error as error:
            if error.code != kvq.Code.E_LIMIT:
                raise
            return False
        return True

    def wait_status(self, field, expected):
        """The status, once this field of it has the value: a GPU gives memory back when it has come
        to the end of what it was given before."""
        end = time.monotonic() + BOUND
        while (status := self.status())[field] != expected:
            if time.monotonic() > end:
                raise AssertionError(f"{field} is {status[field]}, not {expected}")
        return status

    def wait_fds(self, expected):
        """Connections come and go until it has so many descriptors open: it closes those of the
        dead soon after it said that they are gone, and kvqctl's a little later."""
        end = time.monotonic() + BOUND
        while self.fds() != expected:
            if time.monotonic() > end:
                raise AssertionError(f"{self.fds()} descriptors are open, not {expected}")
            self.come_and_go()

    def settled_fds(self):
        """How many it has open when nothing has changed for some comings and goings."""
        self.status()  # libuv keeps one of its own from the first control connection on
        last, same, end = self.fds(), 0, time.monotonic() + BOUND
        while same < 20:
            if time.monotonic() > end:
                raise AssertionError(f"no end of changes: {last} descriptors are open")
            came = self.come_and_go()
            now = self.fds()
            last, same = now, same + 1 if came and now == last else 0
        return last

    def pause(self):
        """Stops all of its threads, and returns when they stand still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self):
        self.process.kill()
        self.process.wait(BOUND)

    def stop(self):
        """SIGTERM; the exit status must be 0."""
        if self.process.poll() is None:
            self.process.terminate()
            status = self.process.wait(BOUND)
        else:
            status = 0
        self.reader.join(BOUND)
        self.process.stderr.close()
        if self.own:
            shutil.rmtree(self.directory, ignore_errors=True)
        if status != 0:
            raise AssertionError(f"kvqd ended with {status}:\n" + "\n".join(self.lines[-30:]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class Child:
    """A client process: a function of e2e_child.py. It says things line by line, and goes on when
    it is told to. within: a command that runs it; variables: of its environment, None: without."""

    def __init__(self, function, *arguments, within=(), **variables):
        environment = {k: v for k, v in {**os.environ, **variables}.items() if v is not None}
        self.process = subprocess.Popen(
            [*within, sys.executable, os.path.join(HERE, "e2e_child.py"), function,
             *[json.dumps(a) for a in arguments]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment, preexec_fn=die_with_parent)

    def hear(self, bound=BOUND):
        """Its next line, as JSON."""
        if not select.select([self.process.stdout], [], [], bound)[0]:
            self.process.kill()
            raise AssertionError("a client process said nothing in time")
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"a client process ended with {self.process.wait(BOUND)}")
        return json.loads(line)

    def tell(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self):
        status = self.process.wait(BOUND)
        self.process.stdin.close()
        self.process.stdout.close()
        return status

    def end(self):
        """Waits for its good end."""
        self.process.stdin.close()
        rest = self.process.stdout.read()
        status = self.process.wait(BOUND)
        self.process.stdout.close()
        if status:
            raise AssertionError(f"a client process ended with {status}: {rest}")


# ---- Attention in double precision ----

def attend64(k, v, q, first, window=0, softcap=0.0, visible=None):
    """Attention of queries q [n][q_heads][dim] standing at positions first, first + 1, ... over
    keys k, v [tokens][kv_heads][dim] at positions 0, 1, ... visible: only keys below this
    position. Returns (out, lse)."""
    k, v, q = (np.asarray(x, np.float64) for x in (k, v, q))
    group = q.shape[1] // k.shape[1]
    positions = np.arange(len(k))
    out, lse = np.zeros((len(q), q.shape[1], v.shape[2])), np.full(q.shape[:2], -np.inf)
    for i in range(len(q)):
        seen = positions <= first + i if visible is None else positions < visible
        if window:
            seen &= positions > first + i - window
        if not seen.any():
            continue
        for h in range(q.shape[1]):
            logits = k[seen, h // group] @ q[i, h] / np.sqrt(k.shape[2])
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            top = logits.max()
            weights = np.exp(logits - top)
            out[i, h] = weights @ v[seen, h // group] / weights.sum()
            lse[i, h] = top + np.log(weights.sum())
    return out, lse


def relative_error(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


# ---- Sessions with random tokens ----

class Tokens:
    """Random K, V and Q of a session's tokens, the same for the same seed: layer by layer,
    [tokens][heads][dim] fp32 with a few strong channels, as keys of real models have."""

    def __init__(self, seed, n, layers=2, q_heads=8, kv_heads=2, dim=128):
        random = np.random.default_rng(seed)
        self.n, self.layers = n, layers
        self.rows = [kvq.Layer(q_heads, kv_heads, dim, repeat=layers)]
        channels = np.ones(dim, np.float32)
        channels[random.integers(0, dim, 4)] = 8
        self.k = random.standard_normal((layers, n, kv_heads, dim), np.float32) * channels
        self.v = random.standard_normal((layers, n, kv_heads, dim), np.float32)
        self.q = random.standard_normal((layers, n, q_heads, dim), np.float32)

    def feed(self, queue, session, n, attend=True):
        """A step with the session's next n tokens. Returns (out, lse) of each layer."""
        return feed(queue, [self], [session], [n], attend)

    def expect_stored(self, session_k, layer):
        """K as an f16 session gives it back."""
        return np.float32(np.float16(self.k[layer, :len(session_k)]))


def feed(queue, tokens, sessions, counts, attend=True):
    """One step over a batch: each session gets its next counts[i] of tokens[i]."""
    spans = [slice(s.tokens, s.tokens + n) for s, n in zip(sessions, counts)]
    results = []
    with queue.step(sessions, counts) as step:
        for layer in range(tokens[0].layers):
            k, v, q = (np.concatenate([getattr(t, x)[layer, at] for t, at in zip(tokens, spans)])
                       for x in "kvq")
            if attend:
                results.append(step.append_attend(layer, k, v, q))
            else:
                step.append(layer, k, v)
    return results


def read_all(queue, session, layers):
    """K and V of every layer, as bytes."""
    return b"".join(a.tobytes() for layer in range(layers) for a in queue.read(session, layer))


# ---- The runner ----

def own_fds():
    return len(os.listdir("/proc/self/fd"))


class Test(unittest.TestCase):
    """A test with a daemon of its own class; DAEMON are its options."""
    DAEMON = {}

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(**cls.DAEMON)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()

    def setUp(self):
        gc.collect()  # buffers of tests before, which are held in circles
        self.fds_before = own_fds()
        self.client = self.daemon.client()
        self.queue = self.client.queue()

    def tearDown(self):
        self.client.close()
        self.assertLessEqual(own_fds(), self.fds_before, "this process left descriptors open")
        # A client is taken down before its end of the connection closes: nothing may be left.
        self.assertEqual(self.daemon.process.poll(), None, "\n".join(self.daemon.lines[-30:]))

    def fails(self, code, call, *arguments, text=(), **options):
        """The call raises kvq.Error with the code, and its text holds every one of the parts."""
        with self.assertRaises(kvq.Error) as caught:
            call(*arguments, **options)
        error = caught.exception
        self.assertEqual(error.code, code, error.text)
        for part in [text] if isinstance(text, (str, int)) else text:
            self.assertIn(str(part), error.text)
        return error


class Timed(unittest.TextTestResult):
    """Says how long each test took."""

    def startTest(self, test):
        self.started = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        self.stream.writeln(f"      {time.monotonic() - self.started:.1f} s")
        super().stopTest(test)


class Claimed(unittest.TestSuite):
    """Tests of one class, which share a daemon. Of several processes with the same folder in
    KVQ_E2E_CLAIMS, the one that comes first runs them."""

    def run(self, result, debug=False):
        claims, first = os.environ.get("KVQ_E2E_CLAIMS"), next(iter(self), None)
        if claims and first is not None:
            try:
                os.mkdir(os.path.join(claims, unittest.util.strclass(type(first))))
            except FileExistsError:
                return result
        return super().run(result, debug)


def run(suites, about):
    """Runs them and prints "N passed, M failed, K skipped" last."""
    names = sys.argv[1:]
    if names in (["-h"], ["--help"]):
        print(about)
        return 0
    started = time.monotonic()
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(
        Claimed(t for t in loader.loadTestsFromTestCase(s)
                if not names or any(n in t.id() for n in names))
        for s in suites)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Timed).run(suite)
    failed = len({test.id() for test, _ in result.failures + result.errors})
    skipped = len(result.skipped)
    for test, why in result.skipped:
        print(f"skipped: {test.id()}: {why}")
    print(f"{time.monotonic() - started:.1f} s")
    passed = max(0, result.testsRun - failed - skipped)  # a class that fails has run no test
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or result.testsRun == 0 else 0
