# SPDX-License-Identifier: Apache-2.0
"""Starting and leaving: with every signal, with too little of everything, and never in silence."""
import fcntl
import functools
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from e2e_rig import BIN, BOUND, Daemon, Tokens, feed, kvq


class Pipe:
    """A log that stands still when it is full: a daemon that writes to it waits for its reader."""

    def __init__(self, folder):
        self.path = os.path.join(folder, "log")
        os.mkfifo(self.path)
        self.fd = os.open(self.path, os.O_RDWR)  # whoever comes to write finds a reader
        self.text = b""

    def read(self, pattern, most=65536):
        """Reads on, so much at a time, until a line matches; returns what it has read."""
        got, more, pattern = b"", b"", re.compile(pattern.encode() + rb".*\n")
        while b"\n" not in more or not pattern.search(got):
            if not select.select([self.fd], [], [], BOUND)[0]:
                raise AssertionError(f"the log never said {pattern}:\n{self.text.decode()}")
            more = os.read(self.fd, most)
            got += more
            self.text += more
        return got

    def narrow(self):
        """It holds as little as can be; returns how much."""
        return fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, 4096)

    def close(self):
        os.close(self.fd)


def ignored(process):
    """Which signals it ignores."""
    with open(f"/proc/{process.pid}/status", encoding="ascii") as file:
        mask = int(re.search(r"SigIgn:\s+(\w+)", file.read())[1], 16)
    return {number for number in signal.Signals if mask >> (number - 1) & 1}


class Life(unittest.TestCase):
    """Each test has daemons of its own."""

    def open_step(self, daemon):
        """A client in the middle of a step, which a drain waits for."""
        client = daemon.client()
        self.addCleanup(client.close)
        queue, tokens = client.queue(), Tokens(1, 10)
        step = queue.step([client.session(tokens.rows, "f16")], 10)
        return step, tokens

    def end_step(self, step, tokens):
        for layer in range(tokens.layers):
            step.append(layer, tokens.k[layer], tokens.v[layer])
        step.end()

    def left(self, daemon):
        """What a daemon that has gone leaves of its runtime directory."""
        return sorted(os.listdir(daemon.directory))

    def test_each_signal_drains(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            daemon = Daemon()
            step, tokens = self.open_step(daemon)
            daemon.process.send_signal(number)
            daemon.wait_log("event=draining")
            self.end_step(step, tokens)
            self.assertEqual(daemon.process.wait(BOUND), 0, number)
            daemon.wait_log("event=end")
            self.assertEqual(self.left(daemon), ["kvqd.lock"])
            daemon.stop()

    def test_ends_with_who_started_it(self):
        """A starter that is killed closes the pipe by that; bytes in the pipe mean nothing."""
        readable, writable = os.pipe()
        starter = subprocess.Popen(["sleep", "600"], pass_fds=[writable])
        self.addCleanup(starter.kill)
        with Daemon(lifetime_fd=readable, fds=[readable]) as daemon:
            os.close(readable)
            step, tokens = self.open_step(daemon)
            os.write(writable, b"still here")
            os.close(writable)
            daemon.status()
            self.assertNotIn("event=draining", "\n".join(daemon.lines))
            starter.kill()
            starter.wait(BOUND)
            daemon.wait_log("event=lifetime")
            daemon.wait_log("event=draining")
            self.end_step(step, tokens)
            self.assertEqual(daemon.process.wait(BOUND), 0)
            self.assertEqual(self.left(daemon), ["kvqd.lock"])
        with tempfile.TemporaryFile() as file:  # what cannot be watched is refused at the start
            daemon = Daemon(ready=False, lifetime_fd=file.fileno(), fds=[file.fileno()])
            self.assertEqual(daemon.process.wait(BOUND), 1)
            daemon.wait_log("lifetime-fd.*give the read end of a pipe")
            daemon.stop()

    def test_a_signal_told_twice_is_one(self):
        """As by timeout(1), which passes on what its whole process group gets."""
        with Daemon() as daemon:
            step, tokens = self.open_step(daemon)
            daemon.pause()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
                daemon.process.send_signal(number)
            daemon.wait_log("event=draining")
            self.end_step(step, tokens)
            self.assertEqual(daemon.process.wait(BOUND), 0)
            daemon.wait_log("event=drained complete=yes")

    def test_a_second_signal_quits(self):
        daemon = Daemon(drain_ms=600000)
        self.open_step(daemon)
        while daemon.process.poll() is None:
            daemon.process.terminate()
            try:
                daemon.process.wait(0.1)
            except subprocess.TimeoutExpired:
                pass
        daemon.wait_log('event=quit signal=15 reason="second signal"')
        self.assertEqual(daemon.process.returncode, 1)
        again = Daemon(daemon.directory)  # what it left behind does not matter
        again.stop()
        daemon.stop()

    def test_signals_while_it_closes(self):
        """They change nothing: it ends in order, with all saved. What it says while it closes is
        more than its log holds, so it stands still there until somebody reads."""
        ends = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        folder = tempfile.mkdtemp(prefix="kvq-e2e-")
        self.addCleanup(shutil.rmtree, folder)
        log, store = Pipe(folder), os.path.join(folder, "store")
        daemon = Daemon(log_file=log.path, storage_dir=store, backend="cpu",  # GPUs: 3 s to close
                        before=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
        self.addCleanup(daemon.stop)
        self.addCleanup(log.close)
        client = daemon.client()
        self.addCleanup(client.close)
        tokens, names = Tokens(1, 1), [f"{i:0100}" for i in range(40)]
        sessions = [client.session(tokens.rows, "f16", name=name) for name in names]
        feed(client.queue(), [tokens] * 40, sessions, [1] * 40, attend=False)
        log.read(f"event=session_opened .*{names[-1]}")
        self.assertEqual(ignored(daemon.process) & ends, set())
        size = log.narrow()
        daemon.process.terminate()
        log.read("event=all_saved", most=1)
        until = time.monotonic() + BOUND
        while not ends <= ignored(daemon.process):
            self.assertLess(time.monotonic(), until, "signals are not ignored")
        for number in ends:
            daemon.process.send_signal(number)
        self.assertIsNone(daemon.process.poll())
        rest = log.read("event=end")
        self.assertGreater(len(rest), 2 * size)  # so it was there when they came
        self.assertEqual(daemon.process.wait(BOUND), 0)
        self.assertEqual(log.text.count(b"event=signal "), 1)
        with Daemon(storage_dir=store) as again:
            saved = again.ctl("storage", "list")
            self.assertEqual({x["name"]: x["tokens"] for x in saved}, dict.fromkeys(names, 1))

    def test_hangup_is_ignored_where_it_was(self):
        with Daemon(before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as daemon:
            daemon.process.send_signal(signal.SIGHUP)
            daemon.client().close()
            self.assertFalse(daemon.status()["draining"])
            self.assertNotIn("signal=1", "\n".join(daemon.lines))

    def test_few_descriptors(self):
        """Too few are refused by name; with just enough, the next that is lacking is refused."""
        for limit in (8, 12, 16, 24, 32, 71):
            directory = tempfile.mkdtemp(prefix="kvq-e2e-")
            done = subprocess.run(
                [os.path.join(BIN, "kvqd"), "--runtime-dir", directory], capture_output=True,
                text=True, timeout=BOUND, stdin=subprocess.DEVNULL, preexec_fn=lambda:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
            shutil.rmtree(directory)
            self.assertEqual(done.returncode, 1, (limit, done.stderr))
            self.assertIn(f"{limit} files", done.stderr)
            self.assertIn("LimitNOFILE", done.stderr)
        lower = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (72, 72))
        with Daemon(before=lower) as daemon, daemon.client() as client:
            with self.assertRaises(kvq.Error) as caught:
                for _ in range(64):
                    client.queue()
            self.assertEqual(caught.exception.code, kvq.Code.E_LIMIT)
            self.assertIn("LimitNOFILE", caught.exception.text)
            client.info()

    def refused_directory(self, path, words, status=1, **flags):
        """kvqd does not start there, says why, and changes nothing of the directory."""
        before = os.stat(path)
        done = subprocess.run(
            [os.path.join(BIN, "kvqd"), "--runtime-dir", path, "--pool-bytes", "64mb",
             *[x for n, v in flags.items() for x in ("--" + n.replace("_", "-"), v)]],
            capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, status, done.stderr)
        self.assertRegex(done.stderr, words)
        after = os.stat(path)
        self.assertEqual((before.st_mode, before.st_uid, before.st_gid),
                         (after.st_mode, after.st_uid, after.st_gid))

    def test_directories_of_others_are_left_alone(self):
        """As /tmp and /etc are when root starts it there."""
        with tempfile.TemporaryDirectory() as path:
            for mode in (0o1777, 0o777, 0o1755):
                os.chmod(path, mode)
                self.refused_directory(path, "shared with other users")
            os.chmod(path, 0o755)
            with open(os.path.join(path, "passwd"), "w", encoding="utf-8"):
                pass
            self.refused_directory(path, "has files in it")
            self.assertEqual(os.listdir(path), ["passwd"])
            os.remove(os.path.join(path, "passwd"))
            self.refused_directory(path, "runtime_mode = 0770", 2, runtime_mode="0770")
            store = os.path.join(path, "store")
            os.mkdir(store)
            os.chmod(store, 0o1777)
            runtime = os.path.join(path, "run")
            os.mkdir(runtime, 0o750)
            self.refused_directory(runtime, "storage_dir: others", storage_dir=store)
            self.assertEqual(os.listdir(store), [])

    @unittest.skipUnless(os.geteuid() == 0, "only root can become somebody else")
    def test_a_directory_that_one_may_not_look_at(self):
        """As /run/kvqd of the service is to a plain user, or /run where there is none."""
        for inside in ("", "kvqd"):
            with tempfile.TemporaryDirectory() as path:
                os.chmod(path, 0o700 if inside else 0o755)
                folder = os.path.join(path, inside or "new")
                if inside:
                    os.mkdir(folder)
                done = subprocess.run(
                    [os.path.join(BIN, "kvqd"), "--runtime-dir", folder, "--pool-bytes", "64mb"],
                    capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL,
                    user=65534, group=65534, extra_groups=[])
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, "cannot (make|look at) the runtime directory "
                                 f"{re.escape(folder)}: Permission denied; name another one with "
                                 "--runtime-dir")

    def test_nobody_else_can_hold_the_lock(self):
        """Who may open kvqd.lock could keep the daemon from starting again."""
        with tempfile.TemporaryDirectory() as path:
            for _ in range(2):
                daemon = Daemon(path)
                daemon.stop()
                lock = os.path.join(path, "kvqd.lock")
                self.assertEqual(os.stat(lock).st_mode & 0o777, 0o600)
                os.chmod(lock, 0o640)  # as earlier daemons left it

    def test_required_huge_pages(self):
        """All that the machine has, which is never set aside: refused with the numbers."""
        directory = tempfile.mkdtemp(prefix="kvq-e2e-")
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 << 20)
        done = subprocess.run(
            [os.path.join(BIN, "kvqd"), "--runtime-dir", directory, "--pool-bytes",
             f"{2 * pages}mb", "--huge-pages", "require"], capture_output=True, text=True,
            timeout=BOUND, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(f"needs {pages} huge pages of 2 MiB", done.stderr)
        self.assertRegex(done.stderr, r"set vm.nr_hugepages to \d+")
        self.assertEqual(os.listdir(directory), ["kvqd.lock"])
        shutil.rmtree(directory)

    def test_small_files_only(self):
        """A limit on the size of files holds for shared memory too: an error, not the end."""
        lower = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with Daemon(before=lower) as daemon, daemon.client() as client:
            with self.assertRaises(kvq.Error) as caught:
                client.buffer(2 << 20, True)
            self.assertEqual(caught.exception.code, kvq.Code.E_SYSTEM)
            self.assertIn("2097152 bytes", caught.exception.text)
            client.buffer(1 << 20, True).close()

    def test_failing_to_start_is_logged(self):
        """On standard error, and in the log file where there is one."""
        with Daemon() as daemon:
            path = os.path.join(daemon.directory, "second.log")
            done = subprocess.run(
                [os.path.join(BIN, "kvqd"), "--runtime-dir", daemon.directory, "--log-file", path],
                capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL)
            self.assertEqual(done.returncode, 1)
            with open(path, encoding="utf-8") as file:
                log = file.read()
            for text in (done.stderr, log):
                self.assertIn(f"another kvqd (pid {daemon.process.pid})", text)
            self.assertIn("level=error event=failed status=E_BUSY", log)
            os.unlink(path)

    def test_closed_standard_descriptors(self):
        """The log must not go to whatever file took the place of standard error."""
        with Daemon(before=lambda: [os.close(fd) for fd in range(3)]) as daemon:
            daemon.client().close()
            with open(os.path.join(daemon.directory, "kvqd.lock"), encoding="ascii") as file:
                self.assertEqual(file.read(), f"{daemon.process.pid}\n")
            self.assertEqual(daemon.lines, [])

    def test_ready_on_standard_output(self):
        """It says so, gives the descriptor up, and nothing else gets that number."""
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                [os.path.join(BIN, "kvqd"), "--runtime-dir", os.path.join(folder, "run"),
                 "--ready-fd", "1", "--http-address", "", "--log-file",
                 os.path.join(folder, "log")], stdout=subprocess.PIPE)
            try:
                self.assertEqual(process.stdout.read(), b"ready\n")
                self.assertEqual(os.readlink(f"/proc/{process.pid}/fd/1"), "/dev/null")
                subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir",
                                os.path.join(folder, "run"), "ping"], check=True, timeout=BOUND,
                               stdout=subprocess.DEVNULL)
            finally:
                process.terminate()
                process.wait(BOUND)
                process.stdout.close()

    def test_idle_queues_cost_little(self):
        """Their scratch, over 12 MiB each, becomes real as it is used."""
        def resident(daemon):
            with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as file:
                return int(re.search(r"VmRSS:\s+(\d+) kB", file.read())[1])

        with Daemon() as daemon, daemon.client() as client:
            client.queue()
            before = resident(daemon)
            for _ in range(60):
                client.queue()
            self.assertLess(resident(daemon) - before, 60 * 1024)

    def test_coming_and_going(self):
        """On one directory, with a client each time that is still there at the end."""
        directory = tempfile.mkdtemp(prefix="kvq-e2e-")
        for _ in range(10):
            daemon = Daemon(directory)
            client = daemon.client()
            client.session(Tokens(1, 1).rows, "f16", name="kept")
            daemon.stop()
            self.assertTrue(any("event=end" in line for line in daemon.lines))
            client.close()
        shutil.rmtree(directory)
