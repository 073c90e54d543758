# SPDX-License-Identifier: Apache-2.0
"""kvqctl as people and scripts use it: what follows, repeats, completes and refuses."""
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from e2e_rig import BIN, BOUND, Child, Daemon, Test, Tokens, die_with_parent, everybodys_kvqctl

OWN = f"uid-{os.geteuid()}"
ROWS = Tokens(1, 1).rows


class Running:
    """A kvqctl that goes on until it is told to end; its lines are read one by one."""

    def __init__(self, daemon, *arguments):
        self.process = subprocess.Popen(
            [os.path.join(BIN, "kvqctl"), "--runtime-dir", daemon.directory, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent)
        self.rest = {self.process.stdout: b"", self.process.stderr: b""}

    def line(self, stream, bound=BOUND):
        """The stream's next line; None if none comes within the bound."""
        while b"\n" not in self.rest[stream]:
            if not select.select([stream], [], [], bound)[0]:
                return None
            more = os.read(stream.fileno(), 65536)
            if not more:
                raise AssertionError(f"kvqctl ended: {self.process.wait(BOUND)}, {self.rest}")
            self.rest[stream] += more
        line, _, self.rest[stream] = self.rest[stream].partition(b"\n")
        return line.decode()

    def out(self, bound=BOUND):
        return self.line(self.process.stdout, bound)

    def complaint(self):
        return self.line(self.process.stderr)

    def out_while(self, act):
        """The next line of output; meanwhile it is done again and again."""
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            act()
            line = self.out(0.02)
            if line is not None:
                return line
        raise AssertionError("kvqctl never said anything")

    def end(self, number=signal.SIGINT):
        """Ends it by a signal. Its exit status and what else it had to say."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self):
        out, complaint = self.process.communicate(timeout=BOUND)
        status = self.process.returncode
        return status, (self.rest[self.process.stdout] + out).decode(), complaint.decode()


def come_and_go(daemon, name):
    """A client makes a session of that name, which ends with it."""
    with daemon.client() as client, client.session(ROWS, "f16", name=name) as session:
        session.drop()


class Found(Test):
    """Clients that were told nothing, in a login of its own."""

    @unittest.skipUnless(os.geteuid() == 0, "needs root for a mount namespace")
    def test_the_service(self):
        """kvqctl and the library find it in /run/kvqd, unless the user has a daemon."""
        ask = """
"$0/kvqctl" --json status | grep -o '"pid":[^,]*'
"$1" -c 'import kvq; print("client", kvq.Client(private=False).info()["version"])'
"""
        python = os.path.join(os.path.dirname(__file__), "..", "..", "client", "python")
        with tempfile.TemporaryDirectory() as folder:
            own = Daemon(directory=folder + "/kvqd")
            try:
                for login, pid in ((self.daemon.directory, self.daemon.status()["pid"]),
                                   (folder, own.status()["pid"])):
                    env = {**os.environ, "XDG_RUNTIME_DIR": login, "PYTHONPATH": python}
                    env.pop("KVQ_RUNTIME_DIR", None)
                    done = subprocess.run(
                        ["unshare", "--mount", "sh", "-c",
                         "mount -t tmpfs none /run && mkdir /run/kvqd && "
                         f"mount --bind {self.daemon.directory} /run/kvqd && {ask}", BIN,
                         sys.executable], env=env, capture_output=True, text=True, timeout=BOUND)
                    self.assertRegex(done.stdout, rf"\"pid\":\s*{pid}\nclient \d", done.stderr)
            finally:
                own.stop()


class Absent(Test):
    """kvqctl where no daemon is."""

    def complaint(self, *arguments, **variables):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_", "XDG_"))}
        done = subprocess.run([os.path.join(BIN, "kvqctl"), *arguments, "status"],
                              env={**env, **variables}, capture_output=True, text=True,
                              timeout=BOUND)
        self.assertEqual(done.returncode, 3)
        return done.stderr

    def test_where_it_looked(self):
        """It says which of the option, the variable and the default was used; the service's
        command stands only where the service would be found."""
        for told, said in ((self.complaint("--runtime-dir", "/none"), "from --runtime-dir."),
                           (self.complaint(KVQ_RUNTIME_DIR="/none"), "from $KVQ_RUNTIME_DIR.")):
            self.assertIn(said, told)
            self.assertNotIn("systemctl", told)
        for variables in ({"XDG_RUNTIME_DIR": "/none"}, {"KVQ_RUNTIME_DIR": "/run/kvqd"}):
            if not os.path.exists("/run/kvqd"):
                self.assertIn("systemctl start kvqd", self.complaint(**variables))


class Ping(Test):
    """kvqctl ping."""

    def test_how_fast(self):
        """A script is told what people are, beside what the daemon says of itself."""
        begin = time.monotonic()
        told = self.daemon.ctl("ping")
        most = (time.monotonic() - begin) * 1e6
        self.assertEqual(told["pid"], self.daemon.status()["pid"])
        self.assertTrue(0 < told["round_trip_us"] < most, told)


class Doctor(Test):
    """What kvqctl doctor finds about engines, beside as many workers as there are CPUs."""
    CPUS = len(os.sched_getaffinity(0))
    DAEMON = {"backend": "cpu", "workers": CPUS}

    def told(self, in_context=False, daemon=None, user=None, **variables):
        """Its findings while an engine with OpenMP is a client, and which process that is. The
        variables of OpenMP that this process has are not the engine's."""
        theirs = dict.fromkeys(("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"), None)
        daemon = daemon or self.daemon
        child = Child("spins", daemon.directory, in_context,
                      **{**theirs, "OMP_NUM_THREADS": "3", **variables})
        pid = child.hear()
        if pid == "no libgomp":
            child.close()
            self.skipTest(pid)
        done = subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory, "doctor",
                               "--json"], capture_output=True, text=True, timeout=BOUND, user=user)
        child.tell()
        child.end()
        self.assertIn(done.returncode, (0, 7), done.stderr)
        return [x for x in json.loads(done.stdout) if x["check"] == "openmp"], pid

    def test_threads_that_spin(self):
        """Two numbers that are more together than a third one; and what to do."""
        (found,), pid = self.told()
        self.assertEqual(found["level"], 1)
        self.assertRegex(found["text"],
                         rf"^process {pid} has OpenMP \(libgomp\), up to 3 threads of which may "
                         rf"spin .* beside {self.CPUS} workers .* on {self.CPUS} usable CPUs")
        self.assertRegex(found["remedy"], r"OMP_WAIT_POLICY=passive .*threads=\"torch\".* workers")

    def test_threads_that_do_not(self):
        """Those that wait passively, that are one, or whose process attends by itself."""
        for variables in ({"OMP_WAIT_POLICY": "Passive"}, {"GOMP_SPINCOUNT": "0"},
                          {"OMP_NUM_THREADS": "1"}):
            self.assertEqual(self.told(**variables)[0], [], variables)
        self.assertEqual(self.told(in_context=True)[0], [])

    @unittest.skipUnless(os.geteuid() == 0, "asks as another user: needs root")
    def test_processes_of_others(self):
        """They are counted: who may not read them is told nothing of them."""
        with Daemon(backend="cpu", workers=self.CPUS, runtime_mode="0755",
                    admin_uids="65534") as daemon:
            (found,), _ = self.told(daemon=daemon, user=65534)
        self.assertEqual(found["level"], 0)
        self.assertRegex(found["text"], "^clients whose processes were not looked at: 1 ")


class Events(Test):
    """kvqctl events."""

    def touch(self):
        """Opens, closes and drops a session."""
        with self.client.session(ROWS, "f16", name="touched") as session:
            session.drop()

    def test_chosen_and_counted(self):
        """Only kinds and namespace that were asked for, as JSON, and so many."""
        ctl = Running(self.daemon, "events", "--json", "--count", "3", "--namespace", OWN, "--kind",
                      "session_opened,session_dropped")
        self.assertIn("following", ctl.complaint())
        lines = [json.loads(ctl.out_while(self.touch)) for _ in range(3)]
        status, rest, complaint = ctl.wait()
        self.assertEqual((status, rest, complaint), (0, "", ""))
        for event in lines:
            self.assertEqual((event["namespace"], event["session"]), (OWN, "touched"))
            self.assertIn(event["kind"], ("session_opened", "session_dropped"))
            self.assertLess(abs(event["unix_ms"] / 1000 - time.time()), BOUND)
        self.assertGreater(len({e["kind"] for e in lines}), 1)

    def test_another_namespace(self):
        """An event of another namespace is not shown; one without a namespace neither."""
        ctl = Running(self.daemon, "events", "--namespace", "uid-4711", "--json")
        ctl.complaint()
        with self.client.session(ROWS, "f16", ns="uid-4711", name="other"):
            pass

        def both():
            self.touch()
            with self.client.session(ROWS, "f16", ns="uid-4711", name="other") as session:
                session.drop()

        self.assertEqual(json.loads(ctl.out_while(both))["session"], "other")
        status, rest, _ = ctl.end(signal.SIGTERM)
        self.assertEqual(status, 0)
        for line in rest.splitlines():
            self.assertEqual(json.loads(line)["namespace"], "uid-4711")

    def test_restart(self):
        """It says that the daemon is gone and that one is back, and goes on; text for people."""
        folder = tempfile.mkdtemp(prefix="kvq-e2e-")
        self.addCleanup(shutil.rmtree, folder)
        daemon = Daemon(folder)
        ctl = Running(daemon, "events", "--kind", "session_opened")
        self.assertIn("following", ctl.complaint())
        line = ctl.out_while(lambda: come_and_go(daemon, "before"))
        self.assertRegex(line, r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}  session_opened +" + OWN +
                         " +before +client [0-9]+: created$")
        daemon.kill()
        daemon.reader.join(BOUND)
        daemon.process.stderr.close()
        self.assertIn("is gone", ctl.complaint())
        with Daemon(folder) as again:
            self.assertIn("there again", ctl.complaint())
            while " after " not in line:
                line = ctl.out_while(lambda: come_and_go(again, "after"))
            self.assertEqual(ctl.end()[0], 0)

    def test_namespaces(self):
        """One that is not there is told of, and asked for where it has no meaning it is refused."""
        for words in (("events",), ("events", "--no-follow"), ("prefix", "status"),
                      ("session", "list")):
            status, out, complaint = self.daemon.ctl(*words, "--namespace", "nope", check=False)
            self.assertEqual((status, out), (5, ""), words)
            self.assertIn('there is no namespace "nope"', complaint, words)
        for words in (("client", "list"), ("format", "list"), ("quota", "list"), ("status",)):
            status, out, complaint = self.daemon.ctl(*words, "--namespace", OWN, check=False)
            self.assertEqual((status, out), (2, ""), words)
            self.assertIn("--namespace is for sessions, prefixes and events, not for " +
                          " ".join(words), complaint)

    def test_empty_namespace(self):
        """A script's variable that is not set names no namespace: not all of them, nor uid-N."""
        for words in (("prefix", "drop"), ("prefix", "drop", "--dry-run"), ("prefix", "status"),
                      ("session", "list"), ("session", "drop", "x"), ("events", "--no-follow")):
            status, out, complaint = self.daemon.ctl(*words, "--namespace", "", check=False)
            self.assertEqual((status, out), (2, ""), words)
            self.assertIn("--namespace is a name, not the empty text", complaint, words)

    def test_refused(self):
        """A kind that is none, no daemon, and a user who may not."""
        status, _, complaint = self.daemon.ctl("events", "--kind", "sesion_saved", check=False)
        self.assertEqual(status, 2)
        self.assertIn("did you mean 'session_saved'?", complaint)
        status, _, complaint = self.daemon.ctl("events", "--kind", "nonsense", check=False)
        self.assertIn("quota_reached", complaint)
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", "/nonexistent",
                               "events"], capture_output=True, text=True, timeout=BOUND)
        self.assertEqual(done.returncode, 3, done.stderr)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_another_user(self):
        with Daemon(runtime_mode="0755") as daemon:
            os.chmod(daemon.directory, 0o755)
            done = subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory,
                                   "events"], capture_output=True, text=True, timeout=BOUND,
                                  user=65534, extra_groups=[], cwd="/")
        self.assertEqual(done.returncode, 6, done.stderr)
        self.assertIn("takes the role read", done.stderr)

    def test_since(self):
        """What has happened, as far as the daemon keeps it, without waiting for more."""
        with Daemon() as daemon:
            with daemon.client() as client:
                for i in range(300):  # two events each
                    client.session(ROWS, "f16", name=f"s{i}").drop()
            daemon.wait_log("event=session_dropped .*s299")
            last = self.events(daemon, "--since", "1h")
            self.assertEqual(len(last), 512)
            numbers = [e["number"] for e in last]
            self.assertEqual(numbers, list(range(numbers[0], numbers[0] + 512)))
            self.assertEqual(last[-1]["kind"], "client_gone")
            chosen = self.events(daemon, "--since", "1h", "--kind", "session_dropped", "--count",
                                 "7")
            self.assertEqual([e["kind"] for e in chosen], ["session_dropped"] * 7)
            self.assertEqual(self.events(daemon), last)  # all that there are
            self.assertEqual(self.events(daemon, "--count", "7"), last[:7])
            self.assertEqual(self.events(daemon, "--since", "0s"), [])
            ctl = (os.path.join(BIN, "kvqctl"), "--runtime-dir", daemon.directory)
            said = subprocess.run([*ctl, "events", "--no-follow", "--since", "0s"], check=True,
                                  capture_output=True, text=True, timeout=BOUND)
            self.assertEqual(said.stdout, "no events\n")
            with daemon.client(), daemon.client():
                said = subprocess.run([*ctl, "status"], check=True, capture_output=True, text=True,
                                      timeout=BOUND)
                self.assertIn(" sessions with 0 tokens, for 2 clients\n", said.stdout)
            with daemon.client() as client:
                client.session(ROWS, "f16", name="one")
                said = subprocess.run([*ctl, "status"], check=True, capture_output=True, text=True,
                                      timeout=BOUND)
                self.assertIn("1 session with 0 tokens, for 1 client\n", said.stdout)
            status, _, complaint = daemon.ctl("events", "--since", "yesterday", check=False)
            self.assertEqual(status, 2)
            self.assertIn("--since is a duration", complaint)

    def events(self, daemon, *words):
        status, out, complaint = daemon.ctl("events", "--no-follow", *words, check=False)
        self.assertEqual((status, complaint), (0, ""))
        return [json.loads(line) for line in out.splitlines()]

    def test_missing(self):
        """More than the daemon keeps between two looks: how many are not shown is said."""
        with Daemon() as daemon:
            ctl = Running(daemon, "events", "--kind", "client_gone", "--json")
            self.assertIn("following", ctl.complaint())
            ctl.process.send_signal(signal.SIGSTOP)
            os.waitpid(ctl.process.pid, os.WUNTRACED)
            with daemon.client() as client:
                for i in range(300):
                    client.session(ROWS, "f16", name=f"s{i}").drop()
            daemon.wait_log("event=client_gone")
            ctl.process.send_signal(signal.SIGCONT)
            self.assertRegex(ctl.complaint(), "[0-9]+ events? missed before the next one")
            self.assertEqual(json.loads(ctl.out())["kind"], "client_gone")
            self.assertEqual(ctl.end()[0], 0)


class Output(Test):
    """What cannot be printed."""
    ENDS = (["session", "list"], ["session", "list", "--json"], ["--version"], ["--help"])
    GO_ON = (["events", "--since", "1h"], ["events", "--since", "1h", "--json"],
             ["status", "--watch", "0.1"], ["client", "list", "--watch", "0.1", "--csv"],
             ["top", "--interval", "0.1"], ["top", "--interval", "0.1", "--json"])

    def ended(self, words, out, **how):
        """The exit status of a command that prints there, and its complaint."""
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory,
                               *words], stdout=out, stderr=subprocess.PIPE, text=True,
                              timeout=BOUND, stdin=subprocess.DEVNULL, **how)
        return done.returncode, done.stderr.replace(f"kvqctl: following the daemon in "
                                                    f"{self.daemon.directory}\n", "")

    def test_full_disk(self):
        """It is said once, and also a command that goes on ends."""
        come_and_go(self.daemon, "it")
        with open("/dev/full", "wb") as full:
            for words in (*self.ENDS, *self.GO_ON):
                self.assertEqual(self.ended(words, full),
                                 (1, "kvqctl: cannot write: No space left on device\n"), words)

    def test_closed_pipe(self):
        """Nobody reads any more: it ends without a word, also where the signal is ignored."""
        come_and_go(self.daemon, "it")
        readable, writable = os.pipe()
        os.close(readable)
        try:
            for words in (*self.ENDS, *self.GO_ON):
                self.assertEqual(self.ended(words, writable), (-signal.SIGPIPE, ""), words)
                self.assertEqual(self.ended(words, writable, restore_signals=False), (1, ""), words)
        finally:
            os.close(writable)


class Watch(Test):
    """--watch."""

    def test_repeats(self):
        """Again and again, with what has changed meanwhile; a signal ends it with status 0."""
        ctl = Running(self.daemon, "session", "list", "--watch", "0.1")
        for first in (True, False):
            self.assertTrue(first or ctl.out() == "")
            self.assertRegex(ctl.out(), r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$")
            self.assertEqual(ctl.out(), "no sessions")
        with self.client.session(ROWS, "f16", name="seen") as session:
            while " seen " not in ctl.out():
                pass
            session.drop()
        while ctl.out() != "no sessions":
            pass
        self.assertEqual(ctl.end()[0], 0)

    def wait_asking(self, pid):
        """Until it waits for a reply, and not for the next look: then it polls three descriptors,
        the daemon's, that of what happens to the connection, and that of signals."""
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
                words = file.read().split()
            if len(words) > 2 and words[2] == "0x3":
                return
        raise AssertionError("kvqctl asks no more")

    def test_ends_with_the_daemon(self):
        """Whatever keeps it from going on is its exit status."""
        with Daemon() as daemon:
            ctl = Running(daemon, "client", "list", "--watch", "0.1", "--timeout", "500")
            ctl.out()  # the time
            self.assertEqual(ctl.out(), "no clients")
        status, _, complaint = ctl.wait()
        self.assertIn(status, (3, 4), complaint)  # it asked before the daemon ended, or after

    def test_ends_while_it_waits(self):
        """Also while the daemon does not answer."""
        ctl = Running(self.daemon, "status", "--watch", "0.1", "--timeout", str(BOUND * 1000))
        ctl.out()
        self.daemon.pause()
        try:
            self.wait_asking(ctl.process.pid)
            self.assertEqual(ctl.end(signal.SIGTERM)[0], 0)
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)

    def test_refused(self):
        """Nothing that changes anything is repeated."""
        status, _, complaint = self.daemon.ctl("session", "drop", "x", "--watch", "1", check=False)
        self.assertEqual(status, 2)
        self.assertIn("--watch is for status and lists, not for session drop", complaint)
