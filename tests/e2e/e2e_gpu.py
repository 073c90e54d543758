# SPDX-License-Identifier: Apache-2.0
"""What becomes of clients and daemon when a GPU faults or has no memory left, on the software GPU
alone, which does so when it is told to. And programs that attend on the host, beside a GPU."""
import os
import subprocess
import unittest
from unittest import mock

from e2e_rig import BACKEND, BIN, BOUND, ROOT, Daemon, Test, Tokens, kvq


def daemon_where(variables, **options):
    """A daemon whose software GPU is as these variables of the environment say."""
    with mock.patch.dict(os.environ, variables):
        return Daemon(**options)


@unittest.skipUnless(BACKEND == "emu", "only the software GPU faults when it is told to")
class Faults(Test):

    def fill(self, queue, session, tokens, n):
        """Feeds until that fails, and returns the error."""
        with self.assertRaises(kvq.Error) as caught:
            while session.tokens < len(tokens.k[0]):
                tokens.feed(queue, session, n, attend=False)
        return caught.exception

    def test_a_kernel_faults(self):
        """The daemon says so and ends; started again it finds the GPU whole."""
        tokens = Tokens(1, 400)
        daemon = daemon_where({"KVQ_EMU_FAIL": "kernel:9:719"})
        client = daemon.client()
        error = self.fill(client.queue(), client.session(tokens.rows, "oscar2"), tokens, 4)
        self.assertIn(error.code, (kvq.Code.E_SYSTEM, kvq.Code.E_DISCONNECTED))
        self.assertEqual(daemon.process.wait(BOUND), 1)
        self.assertIn("remedy=", daemon.wait_log("event=gpu_fault place=GPU-"))
        client.close()
        again = Daemon(daemon.directory)
        client = again.client()
        with client.session(tokens.rows, "oscar2") as session:
            tokens.feed(client.queue(), session, 20)
            self.assertEqual(session.tokens, 20)
        client.close()
        again.stop()
        daemon.stop()

    def test_no_memory_left(self):
        """Less than the configuration promises: refused by steps, and nothing is lost."""
        tokens = Tokens(2, 12000)
        daemon = daemon_where({"KVQ_EMU_MEMORY": "100M"}, gpu_bytes="1gb")
        client = daemon.client()
        queue, session = client.queue(), client.session(tokens.rows, "f16")
        error = self.fill(queue, session, tokens, 512)
        self.assertEqual(error.code, kvq.Code.E_NO_MEMORY)
        full = session.refresh()
        self.assertGreater(full, 1000)
        other = daemon.client()  # its stream's memory is not to be had either
        with self.assertRaises(kvq.Error) as caught:
            other.session(tokens.rows, "f16")
        self.assertEqual(caught.exception.code, kvq.Code.E_NO_MEMORY)
        other.close()
        session.drop()
        with client.session(tokens.rows, "f16") as session:
            while session.tokens < full:
                tokens.feed(queue, session, 512, attend=False)
        client.close()
        daemon.stop()


@unittest.skipUnless(BACKEND != "cpu", "beside a daemon that has a GPU")
class OnTheHost(Test):
    """A daemon puts a session without a place on a GPU; programs that attend in their own threads
    ask for the host."""

    def ran(self, *command):
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=BOUND,
            env=dict(os.environ, KVQ_RUNTIME_DIR=self.daemon.directory))

    def test_a_session_that_did_not_ask(self):
        """The refusal says what to ask for."""
        session = self.client.session(Tokens(1, 1).rows, "f16")
        self.assertNotEqual(session.info()["place"], "host")
        with self.queue.local() as local:
            error = self.fails(kvq.Code.E_INVALID, local.add, session)
            self.assertIn('options.place = "host"', error.text)

    def test_kvq_run(self):
        program = os.path.join(BIN, "kvq-run")
        if not os.path.exists(program):
            self.skipTest("kvq-run is not here")
        done = self.ran(program, "generate", "--model",
                        os.path.join(ROOT, "tools", "model", "kvq-bytes"), "--prompt", "The ",
                        "--tokens", "3", "--in-context", "--session", "here", "--keep")
        self.assertNotIn("through the daemon", done.stderr)
        session, = self.daemon.ctl("session", "list")
        self.assertEqual(session["place"], "host")

    def test_example(self):
        program = os.path.join(os.path.dirname(BIN), "tests", "example_in_context")
        if not os.path.exists(program):
            self.skipTest("example_in_context was not built")
        self.assertRegex(self.ran(program).stdout, r"^304 and 305 tokens, output -?\d")
