# SPDX-License-Identifier: Apache-2.0
"""Programs with a daemon of their own; python.py runs these."""
import fcntl
import os
import subprocess
import sys
import tempfile
import unittest

import e2e_rig
from e2e_rig import kvq


class Private(unittest.TestCase):
    """Programs that find no daemon."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvq-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ_RUN", "KVQD_"))}
        self.env.update(XDG_RUNTIME_DIR=self.folder, KVQ_BIN_DIR=os.path.abspath(e2e_rig.BIN),
                        KVQD_POOL_BYTES="64mb", KVQD_EXTENT_BYTES="4mb",
                        PYTHONPATH=os.path.dirname(os.path.dirname(kvq.__file__)))

    def start(self, code, **more):
        """A process that runs it and says what it prints."""
        return subprocess.Popen([sys.executable, "-c", "import kvq, os, sys, time\n" + code],
                                env={**self.env, **more}, stdin=subprocess.PIPE, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run_to_end(self, code, **more):
        process = self.start(code, **more)
        out, err = process.communicate(timeout=e2e_rig.BOUND)
        return process.returncode, out.strip(), err

    def wait_for_end(self, lock):
        """Returns when no daemon holds its lock any more."""
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

    def test_ends_with_the_program(self):
        """Two clients and a forked process share it, one line says so, and nothing is left."""
        code = """
layers = [kvq.Layer(q_heads=2, kv_heads=1, head_dim=64)]
a, b = kvq.Client(), kvq.Client()
a.session(layers, "f16", name="chat")
print(b.session(name="chat", must_exist=True, read_only=True).tokens, flush=True)
epoch = a.info()["epoch"]
if os.fork() == 0:
    with kvq.Client() as c:
        print(c.info()["epoch"] == epoch, flush=True)
    os._exit(0)
os.wait()
print(os.listdir(os.environ["XDG_RUNTIME_DIR"]))
"""
        status, out, err = self.run_to_end(code)
        self.assertEqual(status, 0, err)
        self.assertRegex(out, r"^0\nTrue\n\['kvq-private-[^']*'\]$")
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertIn("started one for this process alone", err)
        self.assertEqual(os.listdir(self.folder), [])

    def test_ends_with_a_killed_program(self):
        """In mid-step. The next one that starts a daemon, a minute later, removes the folder."""
        process = self.start("""
client = kvq.Client()
queue = client.queue()
step = queue.step([client.session([kvq.Layer(2, 1, 64)], "f16")], tokens=1)
print(kvq.private_daemon(), flush=True)
time.sleep(600)
""")
        directory = process.stdout.readline().strip()
        process.kill()
        process.communicate()
        lock = os.path.join(directory, "kvqd.lock")
        self.wait_for_end(lock)
        self.run_to_end("kvq.private_daemon()")
        self.assertEqual(os.listdir(self.folder),
                         [os.path.basename(os.path.dirname(directory))])
        os.utime(lock, (1, 1))
        self.run_to_end("kvq.private_daemon()")
        self.assertEqual(os.listdir(self.folder), [])

    def test_ends_while_a_step_is_open(self):
        """The program's end, which the daemon would wait for, closes the step's client first."""
        status, out, err = self.run_to_end("""
client = kvq.Client()
queue = client.queue()
step = queue.step([client.session([kvq.Layer(2, 1, 64)], "f16")], tokens=1)
stop = kvq.private._Daemon.stop
kvq.private._Daemon.stop = lambda daemon: (print(client.pointer), stop(daemon))
""")
        self.assertEqual((status, out), (0, "c_void_p(None)"), err)
        self.assertEqual(os.listdir(self.folder), [])

    def test_ends_before_a_forked_process(self):
        """Which holds the daemon: the program does not wait for its end, which would be a day."""
        program = self.start("""
kvq.private._END = 86400
print(kvq.private_daemon(), flush=True)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
""")
        lock = os.path.join(program.stdout.readline().strip(), "kvqd.lock")
        self.assertEqual(program.wait(e2e_rig.BOUND), 0)
        with open(lock, "rb") as file:
            self.assertRaises(OSError, fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        program.communicate()
        self.wait_for_end(lock)

    def test_one_that_was_killed(self):
        """Its client attaches again to another one in its place, with the options of the first.
        Other clients find it, too. Its folder may look left behind, or be gone."""
        code = """
import shutil
kvq.private_daemon(max_clients=2)
folder = kvq.private._running.folder
client = kvq.Client()
session = client.session([kvq.Layer(2, 1, 64)], "f16")
for again in (client.reattach, kvq.Client):
    os.utime(folder + "/run/kvqd.lock", (1, 1))
    kvq.private._running.process.kill()
    if again == kvq.Client:
        kvq.private._running.process.wait()
        shutil.rmtree(folder)
    try:
        while True:
            client.info(), session.info()
    except kvq.Error as error:
        print(error)
    print(again() if again == client.reattach else "a client")
    print(client.reattach(), session.handle)
    session = client.session([kvq.Layer(2, 1, 64)], "f16")
others = [kvq.Client()]
try:
    others.append(kvq.Client())
except kvq.Error as error:
    print(error.text)
"""
        status, out, err = self.run_to_end(code)
        self.assertEqual(status, 0, err)
        first, again, alike, second, other, restarted, limit = out.splitlines()
        for said in (first, second):
            self.assertRegex(said, r"^E_DISCONNECTED: .*; Client.reattach\(\) connects again$")
        self.assertEqual((again, alike), ("(True, 1)", "(False, 0) 0"))
        self.assertEqual((other, restarted), ("a client", "(True, 1) 0"))
        self.assertIn("max_clients", limit)
        self.assertEqual(err.count("has ended (status -9); starting another"), 2, err)
        self.assertEqual(os.listdir(self.folder), [])

    def test_who_gets_one(self):
        """A program that names a daemon, or says private=False, gets no daemon of its own."""
        for code, env in (("kvq.Client('/nowhere')", {}), ("kvq.Client(private=False)", {}),
                          ("kvq.Client()", {"KVQ_RUNTIME_DIR": "/nowhere"})):
            status, _, err = self.run_to_end(code, **env)
            self.assertEqual(status, 1)
            self.assertIn("E_NO_DAEMON", err)
            self.assertNotIn("started", err)
            self.assertEqual("unset KVQ_RUNTIME_DIR" in err, bool(env), err)
        self.assertEqual(self.run_to_end("kvq.Client('/nowhere', private=True)")[0], 1)

    def test_options(self):
        code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
held = [os.dup(0) for _ in range(1100)]  # a program with many descriptors
kvq.private_daemon(max_clients=1)
a = kvq.Client()
try:
    kvq.Client()
except kvq.Error as error:
    print(error.text)
try:
    kvq.private_daemon(max_clients=2)
except ValueError as error:
    print(error)
"""
        status, out, err = self.run_to_end(code)
        self.assertEqual(status, 0, err)
        limit, other = out.splitlines()
        self.assertIn("max_clients", limit)
        self.assertIn("ask before the first Client", other)
        status, _, err = self.run_to_end("kvq.private_daemon(pool_bites=1)")
        self.assertEqual(status, 1)
        self.assertIn("the nearest is --pool-bytes", err)
        self.assertEqual(os.listdir(self.folder), [])

    def test_without_a_program(self):
        status, _, err = self.run_to_end("kvq.Client()", KVQ_BIN_DIR="/nowhere")
        self.assertEqual(status, 1)
        self.assertIn("there is no kvqd to start", err)

    def test_a_program_that_does_not_start(self):
        """kvq.Error says why: the system's word, or the program's end."""
        for program, said in (("no program", "Exec format error"),
                              ("#!/bin/sh\nexit 3\n", "it ended with status 3 and said nothing")):
            with tempfile.TemporaryDirectory(prefix="kvq-") as folder:
                path = os.path.join(folder, "kvqd")
                with open(path, "w", encoding="ascii") as file:
                    file.write(program)
                os.chmod(path, 0o700)
                code = "try: kvq.Client()\nexcept kvq.Error as error: print(error)"
                status, out, err = self.run_to_end(code, KVQ_BIN_DIR=folder)
                self.assertEqual((status, err), (0, ""))
                self.assertRegex(out, f"E_NO_DAEMON: .*{said}")
