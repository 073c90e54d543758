# SPDX-License-Identifier: Apache-2.0
"""Users who take all that there is: connections, queues, descriptors. Meanwhile others are served.

As root the floods come from a user of their own, and so do those who must not notice; otherwise all
are the daemon's own user, whose commands are still answered.
"""
import os
import resource
import socket
import subprocess
import unittest

import numpy as np

from e2e_rig import BOUND, ROUNDING, Child, Daemon, emulated, everybodys_kvqctl, kvq

LIMITS = [int(x) for x in os.environ.get("KVQ_FLOOD_LIMITS", "72 256 2048").split()]
FULL = os.environ.get("KVQ_FULL") == "1"
ROOT = os.geteuid() == 0
FLOODER, VICTIM = (60001, 60002) if ROOT else (os.geteuid(), os.geteuid())


def ask_as(daemon, user, *arguments):
    """kvqctl of that user: exit status, output and complaint."""
    done = subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory, "--timeout",
                           str(1000 * BOUND), *arguments],
                          capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL,
                          user=user if ROOT else None, extra_groups=[] if ROOT else None)
    return done.returncode, done.stdout, done.stderr


def resident(daemon):
    """Bytes of memory that the daemon has."""
    with open(f"/proc/{daemon.process.pid}/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def passes_rights():
    """Whether sockets of this kernel can refuse descriptors (SO_PASSRIGHTS)."""
    with socket.socket(socket.AF_UNIX) as plain:
        try:
            return plain.getsockopt(socket.SOL_SOCKET, 83) == 1
        except OSError:
            return False


class Floods(unittest.TestCase):
    """Each test has daemons of its own, with limits of descriptors of their own."""

    def start(self, limit, **options):
        files = (limit, limit)
        daemon = Daemon(runtime_mode="755", pool_bytes="32mb",
                        before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files), **options)
        self.addCleanup(daemon.stop)
        return daemon

    def victim(self, daemon):
        """Somebody at work: tell() has it make a step, whose output it checks and says."""
        child = Child("step_when_told", daemon.directory, VICTIM if ROOT else None)
        self.addCleanup(child.end)
        child.hear()
        return child

    def flood(self, function, daemon, *arguments):
        """A flood that stands: what it said once it got no further. It ends with the test."""
        child = Child(function, daemon.directory, FLOODER if ROOT else None, *arguments)
        self.addCleanup(self.end_flood, child)
        return child, child.hear()

    def end_flood(self, child):
        if not child.process.stdout.closed:
            child.kill()

    def look(self, daemon, victim):
        """The daemon is there, its commands are answered, and the victim's numbers are right."""
        for user in (0, VICTIM) if ROOT else (VICTIM,):
            status, _, complaint = ask_as(daemon, user, "status")
            self.assertEqual((status, complaint), (0, ""), f"user {user}")
        victim.tell()
        self.assertLess(victim.hear(), 1e-3 * ROUNDING)

    def settle(self, daemon, child, before):
        """The flood goes, and nothing of it is left."""
        child.kill()
        daemon.wait_fds(before)

    def test_plain_connections_to_the_control_socket(self):
        for limit in LIMITS:
            with self.subTest(limit):
                daemon = self.start(limit)
                victim = self.victim(daemon)
                self.look(daemon, victim)
                before = daemon.settled_fds()
                child, said = self.flood("connect_plainly", daemon, "control.sock", limit + 100)
                self.look(daemon, victim)
                self.assertLess(said["standing"], limit // 4)
                self.assertGreater(said["refused"], limit // 2)
                self.settle(daemon, child, before)

    def test_connections_that_say_nothing_in_the_log(self):
        """Their ends are counted, not written down one by one; those of clients are."""
        daemon = self.start(256)
        child, said = self.flood("connect_one_by_one", daemon, "attach.sock", 1000)
        self.assertEqual(said, 1000)
        child.kill()
        with daemon.client() as client:
            number = client.info()["client_id"]
        daemon.wait_log(f"event=connection_end client={number} ")
        with daemon.news:
            lines = [x for x in daemon.lines if "event=connection_end client=0 " in x]
        self.assertGreater(len(lines), 0)
        self.assertLess(len(lines), 500)

    def test_plain_connections_to_the_attach_socket(self):
        for limit in LIMITS:
            with self.subTest(limit):
                daemon = self.start(limit)
                victim = self.victim(daemon)
                self.look(daemon, victim)
                before = daemon.settled_fds()
                child, said = self.flood("connect_plainly", daemon, "attach.sock", limit + 100)
                self.look(daemon, victim)
                self.assertGreater(said["refused"], 0)
                self.settle(daemon, child, before)

    def test_queues(self):
        for limit in LIMITS:
            with self.subTest(limit):
                daemon = self.start(limit)
                victim = self.victim(daemon)
                self.look(daemon, victim)
                before = daemon.settled_fds()
                child, said = self.flood("open_queues", daemon, 64, 64)
                self.assertRegex(said["why"], r"descriptors|queues|connections|clients")
                self.look(daemon, victim)
                if ROOT:  # somebody else still gets what one needs to work
                    other = Child("open_queues", daemon.directory, 60003, 1, 1)
                    self.assertEqual(other.hear()["queues"], 1 if limit > 72 else 0)
                    other.tell()
                    self.assertEqual(other.close(), 0)
                self.settle(daemon, child, before)

    @unittest.skipUnless(ROOT, "needs users besides the daemon's own, whom nothing is shared with")
    def test_nobody_takes_all_queues(self):
        """Where descriptors are no limit, the number of queues and connections is."""
        daemon = self.start(resource.getrlimit(resource.RLIMIT_NOFILE)[1],
                            max_clients=256 if FULL else 32)
        victim = self.victim(daemon)
        clients = 64 if FULL else 4
        child, said = self.flood("open_queues", daemon, 64 if FULL else 40, 64 if FULL else 1)
        self.assertLess(said["clients" if not FULL else "queues"], 17 if not FULL else 2049)
        self.look(daemon, victim)
        other = Child("open_queues", daemon.directory, 60003, clients, 2)
        self.assertGreater(other.hear()["queues"], 1)
        other.tell()
        self.assertEqual(other.close(), 0)
        child.kill()

    def test_a_flood_that_never_ends(self):
        """Connections come and go as fast as somebody can make them; some speak a little ZMTP."""
        daemon = self.start(72)
        victim = self.victim(daemon)
        child, _ = self.flood("come_and_go", daemon)
        for _ in range(emulated(100, 300) if FULL else 10):
            self.look(daemon, victim)
        self.assertIsNone(child.process.poll())
        child.kill()
        self.look(daemon, victim)

    @unittest.skipUnless(passes_rights(), "Linux before 6.16 takes descriptors beside all bytes")
    def test_no_descriptors_beside_bytes(self):
        """Closing one could keep the daemon for as long as its sender likes."""
        daemon = self.start(256)
        for name in "control.sock", "http.sock":
            with socket.socket(socket.AF_UNIX) as plain, open(os.devnull, "rb") as null:
                plain.connect(os.path.join(daemon.directory, name))
                with self.assertRaises(PermissionError):
                    socket.send_fds(plain, [b"x"], [null.fileno()])
        self.assertEqual(daemon.ctl("status")["clients"], 0)

    def test_messages_without_an_end(self):
        """ZeroMQ keeps the parts of a message until the last has come; the daemon does not wait for
        that. An empty part is the worst: two bytes on the way, 64 in ZeroMQ."""
        for flags, size in (("03", 60000), ("03", 0)):
            with self.subTest(size):
                daemon = self.start(256)
                victim = self.victim(daemon)
                self.look(daemon, victim)
                before, files = resident(daemon), daemon.settled_fds()
                frame = {"flags": flags, "bytes": size}
                child, said = self.flood("send_frames", daemon, frame, 256 << 20)
                self.assertTrue(said["ended"])
                self.assertLess(said["sent"], 8 << 20)
                self.look(daemon, victim)
                self.assertLess(resident(daemon) - before, 96 << 20)
                daemon.wait_log("control_refused .*a request has no end")
                self.settle(daemon, child, files)

    def test_many_messages_are_no_flood(self):
        """Whole messages, faster than they are taken: they wait, and their sender stays."""
        daemon = self.start(256)
        child, said = self.flood("send_frames", daemon, {"flags": "02", "bytes": 60000}, 64 << 20)
        self.assertFalse(said["ended"])
        child.kill()

    def test_forks_of_a_long_session(self):
        """Forks share what is long; what they take is counted, and its limit ends them."""
        limit, tokens = (32 << 20, 1 << 20) if FULL else (8 << 20, 1 << 18)
        daemon = self.start(256, table_bytes=limit)
        victim = self.victim(daemon)
        self.look(daemon, victim)
        with daemon.client(name="forks") as client, client.queue() as queue:
            session = client.session([kvq.Layer(1, 1, 64, window=128)], "f16")
            rows = client.buffer(4 * 16384 * 64).array((16384, 1, 64), np.float32)
            rows[:] = 1
            while session.tokens < tokens:
                queue.step_whole([session], 16384, [rows], [rows],
                                 ids=np.arange(16384, dtype=np.int32) + session.tokens)
            del rows
            before, forks, error = resident(daemon), 0, None
            while error is None and forks < 4000:
                try:
                    queue.fork([session] * 256)
                    forks += 256
                except kvq.Error as caught:
                    error = caught
                self.look(daemon, victim)
            self.assertEqual(error.code, kvq.Code.E_QUOTA)
            self.assertGreater(forks, 255)
            self.assertLess(resident(daemon) - before, 4 * limit)
        self.look(daemon, victim)
