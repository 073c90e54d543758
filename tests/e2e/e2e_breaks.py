# SPDX-License-Identifier: Apache-2.0
"""What becomes of engines with streams on a GPU, and of their memory, when things break: processes
that are killed, containers that keep processes apart, what a machine does not have."""
import ctypes
import os
import subprocess
import threading
import time
import unittest
from unittest import mock

from e2e_rig import BACKEND, BOUND, LIBC, Child, Daemon, Test, Tokens, feed, long_emulated

NEW_MOUNTS, RECURSIVE, PRIVATE, READ_ONLY = 0x20000, 0x4000, 0x40000, 1
PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
NO_SHM = ("unshare", "--mount", "sh", "-c",
          'mount -t tmpfs -o ro,size=4k none /dev/shm && exec "$@"', "sh")
NEAR = 0.02  # of a relative error: outputs are held against tokens before they were stored


def works(*command):
    try:
        return not subprocess.run([*command, "true"], capture_output=True, timeout=BOUND).returncode
    except FileNotFoundError:
        return False


def hide_shm():
    """In a new process: it has a /dev/shm that nothing can be made in."""
    if (LIBC.unshare(NEW_MOUNTS) or
            LIBC.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None) or
            LIBC.mount(b"none", b"/dev/shm", b"tmpfs", READ_ONLY, b"size=4k")):
        raise OSError(ctypes.get_errno(), "no mount namespace")


def driver_files(daemon):
    """Descriptors of the software driver's that the daemon has open: memory, events."""
    folder, count = f"/proc/{daemon.process.pid}/fd", 0
    for name in os.listdir(folder):
        try:
            count += "kvq-emu-" in os.readlink(os.path.join(folder, name))
        except FileNotFoundError:
            pass
    return count


@unittest.skipIf(BACKEND == "cpu", "engines on GPUs")
class Breaks(Test):

    def until(self, what, expected):
        end = time.monotonic() + BOUND
        while (now := what()) != expected:
            if time.monotonic() > end:
                raise AssertionError(f"it stays {now}, not {expected}")

    def counts(self):
        status = self.daemon.status()
        return {key: status[key] for key in ("sessions", "tokens", "clients", "pool_used_bytes")}

    def kill_with_work(self, order, session, tokens):
        """An engine is killed while its stream, and the daemon's behind it, stand still."""
        quiet = self.counts()
        child = Child("gpu_stuck", self.daemon.directory, order)
        said = child.hear()
        self.assertEqual(said["order"], order)
        self.assertLess(said["error"], NEAR)
        self.assertGreater(self.counts()["pool_used_bytes"], quiet["pool_used_bytes"])
        tokens.feed(self.queue, session, 5)  # others do not notice
        quiet["tokens"] += 5
        child.kill()
        self.daemon.wait_gone(said["client"])
        left = self.client.session(name="stuck", must_exist=True)
        self.assertEqual(left.tokens, 20)  # its last commit
        left.drop()
        self.until(self.counts, quiet)

    def test_killed_with_work_in_flight(self):
        """Its memory, its imports and its buffers come back; nothing grows with every death."""
        tokens = Tokens(2, 100)
        with self.client.session(tokens.rows, "f16") as session:
            tokens.feed(self.queue, session, 20)
            for order in ("words", "events"):
                self.kill_with_work(order, session, tokens)
                files, fds = driver_files(self.daemon), self.daemon.settled_fds()
                self.kill_with_work(order, session, tokens)
                # Fewer, if the first one's imports had not all been let go of by then.
                self.until(lambda: self.daemon.settled_fds() <= fds, True)
                self.until(lambda: driver_files(self.daemon) <= files, True)

    def test_scribbler_on_its_timeline(self):
        """It can only keep what is its own, and that no longer than it lives."""
        tokens = Tokens(2, 100)
        with self.client.session(tokens.rows, "f16") as session:
            tokens.feed(self.queue, session, 20)
            quiet = self.counts()
            child = Child("gpu_scribbler", self.daemon.directory)
            said = child.hear()
            self.daemon.ctl("client", "kick", str(said["client"]))
            self.daemon.wait_gone(said["client"])
            tokens.feed(self.queue, session, 5)
            quiet["tokens"] += 5
            child.kill()
            left = self.client.session(name="stuck", must_exist=True)
            self.assertEqual(left.tokens, 20)
            left.drop()
            self.until(self.counts, quiet)

    @long_emulated  # waits for as long as the daemon does
    def test_stuck_client_does_not_hold_the_daemon(self):
        """Ordered by events nothing can let the daemon's stream go while that client lives."""
        daemon = Daemon(drain_ms=1)
        child = Child("gpu_stuck", daemon.directory, "events")
        said = child.hear()
        daemon.ctl("client", "kick", str(said["client"]))
        daemon.process.terminate()
        self.assertEqual(daemon.process.wait(BOUND), 1)
        daemon.wait_log("event=left_behind clients=1 .*remedy=")
        child.kill()
        with Daemon(daemon.directory):  # what it left there is no obstacle
            pass
        daemon.stop()

    def test_beside_a_stalled(self):
        """While one stream stands still others step, on streams of their own too, end, and read 400
        sessions; and all memory that they had comes back."""
        stuck = Child("gpu_stuck", self.daemon.directory, "words")
        bound = threading.Timer(BOUND, stuck.process.kill)
        bound.start()
        try:
            said = stuck.hear()
            self.work_beside(said)
            self.assertIsNone(stuck.process.poll(), "others went on when it was killed")
        finally:
            bound.cancel()
            stuck.kill()
        self.daemon.wait_gone(said["client"])
        left = self.client.session(name="stuck", must_exist=True)
        self.assertEqual(left.tokens, 20)  # its last commit
        left.drop()

    def work_beside(self, said):
        """What others do, while the one that said this stands still."""
        others, sessions, tokens = 5, 400, Tokens(1, 8)
        self.assertEqual(said["order"], "words")
        quiet = self.counts()
        engine = Child("gpu_engine", self.daemon.directory, "words")
        heard = engine.hear()
        self.check(heard, 10)
        clients = [self.daemon.client() for _ in range(others)]
        gone = [heard["client"], *(client.info()["client_id"] for client in clients)]
        for client in clients:
            with client.session(tokens.rows, "f16") as session:
                tokens.feed(client.queue(), session, 4)
        self.assertEqual(self.counts()["clients"], quiet["clients"] + others + 1)
        for client in clients:
            client.close()
        engine.tell()
        self.check(engine.hear(), 20)
        engine.tell()
        engine.end()
        for one in gone:
            self.daemon.wait_gone(one)
        self.until(self.counts, quiet)
        many = [self.client.session(tokens.rows, "f16") for _ in range(sessions)]
        feed(self.queue, [tokens] * sessions, many, [4] * sessions, attend=False)
        self.assertGreater(self.counts()["pool_used_bytes"], quiet["pool_used_bytes"])
        for session in many:
            k, _ = self.queue.read(session, 0)
            self.assertEqual(k.tobytes(), tokens.expect_stored(k, 0).tobytes())
            session.close()
        self.until(self.counts, quiet)
        self.daemon.wait_log(rf"event=client_stalled .*client={said['client']}\b")  # as ever

    def check(self, said, tokens):
        self.assertLess(said["error"], NEAR)
        self.assertEqual(said["tokens"], tokens)

    @unittest.skipUnless(works(*PIDS), "no pid namespaces here")
    def test_equal_pids_in_two_containers(self):
        """Two engines, both with pid 1: each is itself, and one's death is one's alone. Memory of
        their own cannot be imported by handle, and the refusal says why."""
        children = [Child("gpu_engine", self.daemon.directory, "words", within=PIDS)
                    for _ in range(2)]
        said = [child.hear() for child in children]
        for one in said:
            self.check(one, 10)
            self.assertEqual(one["pid"], 1)
            self.assertIn("different pid namespaces", one["refused"])
            self.assertIn("Client.buffer_on()", one["refused"])
        self.assertNotEqual(said[0]["client"], said[1]["client"])
        children[0].kill()
        self.daemon.wait_gone(said[0]["client"])
        children[1].tell()
        self.check(children[1].hear(), 20)
        children[1].tell()
        children[1].end()

    @unittest.skipUnless(BACKEND == "emu", "only the software driver takes a pid that it is given")
    def test_the_daemons_own_pid(self):
        """CUDA takes a handle with its own pid value for its own; that is said, and other memory
        works."""
        with mock.patch.dict(os.environ, {"KVQ_EMU_PID": str(self.daemon.process.pid)}):
            child = Child("gpu_engine", self.daemon.directory, "words")
        said = child.hear()
        self.check(said, 10)
        self.assertIn("201", said["refused"])
        child.kill()

    @unittest.skipUnless(works(*NO_SHM), "no mount namespaces here")
    def test_without_dev_shm(self):
        """Nothing of ours lies there."""
        with Daemon(before=hide_shm) as daemon:
            where = f"/proc/{daemon.process.pid}/root/dev/shm/x"
            with self.assertRaises(OSError):
                os.close(os.open(where, os.O_CREAT | os.O_WRONLY))
            child = Child("gpu_engine", daemon.directory, "words", within=NO_SHM)
            self.check(child.hear(), 10)
            child.tell()
            self.check(child.hear(), 20)
            child.tell()
            child.end()

    def test_queues_are_told(self):
        """For how many clients the GPU's hardware queues are enough, and what others do."""
        for queues, clients in (("", 13), ("32", 13), ("8", 1), ("2", 0)):
            environment = {"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {}
            with mock.patch.dict(os.environ, environment), Daemon() as daemon:
                found = [f for f in daemon.ctl("doctor") if f["check"] == "gpu_queues"]
                self.assertEqual(len(found), 1)
                self.assertEqual(found[0]["level"], 1)  # fewer than max_clients
                self.assertIn(f" has {queues or 32} hardware queues", found[0]["text"])
                self.assertIn(f"the requests of {clients} clients", found[0]["text"])
                self.assertIn("wait on the host", found[0]["text"])
                self.assertEqual("MAX_CONNECTIONS=32" in found[0]["remedy"],
                                 queues in ("8", "2"))

    @unittest.skipUnless(BACKEND == "emu", "only the software driver lacks what it is told to")
    def test_orders_are_told(self):
        """What streams can be ordered by is tried at the start, and kvqctl doctor tells it."""
        for lacks, texts in (("", ["other by timeline words;", "events between processes work"]),
                             ("memory_ops", ["other by events;", "timeline words do not work"]),
                             ("memory_ops,ipc_events", ["wait on the host", "processes do not"])):
            with mock.patch.dict(os.environ, {"KVQ_EMU_LACKS": lacks}), Daemon() as daemon:
                found = [f for f in daemon.ctl("doctor") if f["check"] == "gpu_order"]
                self.assertEqual(len(found), 1)
                self.assertEqual(found[0]["level"], 1 if lacks else 0)
                for text in texts:
                    self.assertIn(text, found[0]["text"])

    def test_without_mps(self):
        """It is said, and what a kill does with it; all tests here run without."""
        for folder, level, text in (("/nonexistent", 1, "does not seem to run"),
                                    (self.daemon.directory, 1, "kill -9 of one with work")):
            with mock.patch.dict(os.environ, {"CUDA_MPS_PIPE_DIRECTORY": folder}), \
                    Daemon() as daemon:
                found = [f for f in daemon.ctl("doctor") if f["check"] == "mps"]
                self.assertEqual(len(found), 1)
                self.assertEqual(found[0]["level"], level)
                self.assertIn(text, found[0]["text"])
