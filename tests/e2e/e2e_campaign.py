# SPDX-License-Identifier: Apache-2.0
"""A campaign: engines on a GPU whose streams share hardware queues. They open, step, fork, take
each other's sessions, signal late or never, close and are killed, as a seed draws it. One of them,
the victim, only works: every output of it is held against attention on the host, and it has to get
on whatever the others do.

KVQ_CAMPAIGN_SECONDS says for how long (6, under KVQ_FULL=1 60), KVQ_SEED what is drawn (1). A run
cannot be repeated to the letter, for the processes run side by side; what each of them does can.
"""
import os
import random
import time
import unittest
from unittest import mock

from e2e_chaos import NEAR
from e2e_rig import BACKEND, BOUND, Child, Daemon, Test

FULL = os.environ.get("KVQ_FULL") == "1"
SECONDS = float(os.environ.get("KVQ_CAMPAIGN_SECONDS") or (60 if FULL else 6))
LONG = FULL or SECONDS > 30
SEED = int(os.environ.get("KVQ_SEED") or 1)
CLIENTS = 16 if LONG else 6
ROUNDS = 6  # at least, however slow the machine is


@unittest.skipIf(BACKEND == "cpu", "engines on GPUs")
class Campaign(Test):
    DAEMON = {"pool_bytes": "64mb"}

    def start(self, seed):
        child = Child("gpu_chaos", self.stage.directory, seed)
        self.started += 1
        return child

    def end_one(self, child, how):
        """A chaos client ends: killed, at any moment, or when it next looks. One that stands still
        is killed later."""
        if how == "kill":
            child.kill()
            self.killed += 1
            return
        child.process.stdin.close()
        try:
            child.process.wait(BOUND)
        except Exception:  # not as it should be: nobody signals for it any more
            child.process.kill()
            raise
        status = child.process.returncode
        said = child.process.stdout.read()
        child.process.stdout.close()
        self.assertEqual(status, 0, f"seed {SEED}: a client ended with {status}: {said}")
        self.closed += 1

    def look(self, children):
        """A client that ended by itself found something wrong, or the daemon cut it off."""
        for child in children:
            status = child.process.poll()
            if status is not None:
                self.fail(f"seed {SEED}: a client ended with {status}: "
                          f"{child.process.stdout.read()}\n" + "\n".join(self.stage.lines[-20:]))

    def round(self, victim, done):
        victim.tell()
        said = victim.hear()
        self.assertLess(said["error"], NEAR, f"seed {SEED}: the victim's output is wrong")
        self.assertGreater(said["done"], done)
        return said["done"]

    def campaign(self, queues):
        rng = random.Random(SEED * 100 + queues)
        self.started = self.killed = self.closed = 0
        with mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}), \
                Daemon(**self.DAEMON) as self.stage:
            victim = Child("gpu_victim", self.stage.directory, SEED)
            victim.hear()
            children = [self.start(rng.randrange(1 << 30)) for _ in range(CLIENTS - 1)]
            until, done, rounds = time.monotonic() + SECONDS, 0, 0
            while time.monotonic() < until or rounds < ROUNDS:
                done = self.round(victim, done)
                rounds += 1
                self.look(children)
                if rng.random() < 0.5:
                    at = rng.randrange(len(children))
                    self.end_one(children[at], rng.choice(("kill", "kill", "close")))
                    children[at] = self.start(rng.randrange(1 << 30))
            for child in children:
                child.kill()
            done = self.round(victim, done)  # and when all are gone
            victim.process.stdin.close()
            victim.process.stdout.close()
            victim.process.wait(BOUND)
            client = self.stage.client()
            for name in [x["name"] for x in self.stage.ctl("session", "list") if x["name"]]:
                client.session(name=name, must_exist=True).drop()
            client.close()
            status = self.stage.status()
            self.assertEqual(status["sessions"], 0)
            self.assertEqual(status["pool_used_bytes"], 0)
        print(f"{queues} queues, seed {SEED}: {self.started} clients, {self.killed} killed, "
              f"{self.closed} closed; the victim committed {done} tokens in {rounds} rounds")

    def test_on_2_queues(self):
        """No client has a stream that waits for it."""
        self.campaign(2)

    @unittest.skipUnless(LONG, "like test_on_2_queues; KVQ_FULL=1 runs it")
    def test_on_9_queues(self):
        """Some clients have one, and others have not."""
        self.campaign(9)
