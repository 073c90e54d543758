# SPDX-License-Identifier: Apache-2.0
"""Sessions of several shards, each with a process of its own, and sessions that move between the
places of a daemon while engines use them."""
import json
import threading
import unittest

from e2e_rig import BACKEND, Child, Test, Tokens, kvq, read_all

LAYERS = 2


class Ranks(Test):
    """Two processes write one session's two shards."""

    def ranks(self, name, steps):
        """Both, with their shards open."""
        both = [Child("rank", self.daemon.directory, name, shard, 10 + shard, steps)
                for shard in range(2)]
        for child in both:
            self.assertEqual(child.hear(), "open")
        return both

    def check_shards(self, name, tokens):
        """Each shard holds what it was given, as if it had been alone."""
        shown = self.daemon.ctl("session", "show", name)
        self.assertEqual((shown["shards"], shown["group_tokens"]), (2, tokens))
        self.assertEqual([s["tokens"] for s in shown["shard_list"]], [tokens] * 2)
        for shard in range(2):
            own = Tokens(10 + shard, 400, layers=LAYERS)
            with self.client.session(own.rows, "oscar2", name=name, shard=shard, shards=2,
                                     read_only=True) as session, \
                    self.client.session(own.rows, "oscar2") as twin:
                while twin.tokens < tokens:
                    own.feed(self.queue, twin, 10, attend=False)
                self.assertEqual(session.tokens, tokens)
                self.assertTrue(read_all(self.queue, session, LAYERS)
                                == read_all(self.queue, twin, LAYERS))

    def test_two_processes(self):
        """Steps of both commit together; one is dropped with the other."""
        both = self.ranks("pair", 30)
        for child in both:
            child.tell()
        for child in both:
            self.assertEqual(child.hear(), 300)
            child.end()
        self.check_shards("pair", 300)
        listed = [s for s in self.daemon.ctl("session", "list") if s["name"] == "pair"]
        self.assertEqual(sorted(s["shard"] for s in listed), [0, 1])
        self.daemon.ctl("session", "drop", "pair")
        self.fails(kvq.Code.E_NO_SESSION, self.client.session, name="pair", shard=1,
                   must_exist=True)

    def test_killed_in_a_step(self):
        """kill -9 of one: the other, which has ended its step, is told and goes back."""
        for where in (0, LAYERS):
            name = f"torn-{where}"
            one, two = self.ranks(name, 3)
            one.tell()
            two.tell()
            self.assertEqual((one.hear(), two.hear()), (30, 30))
            victim = Child("stop_at_shard", self.daemon.directory, name, 1, 11, where)
            two.end()
            self.assertEqual(victim.hear(), "there")
            one.tell()  # one more step, and the beginning of another
            self.assertEqual(one.hear(), 40)
            victim.kill()
            told = one.hear()
            self.assertEqual((told["code"], told["tokens"]), (int(kvq.Code.E_CANCELLED), 30))
            self.assertIn("shard 1 left the step", told["text"])
            again = Child("rank", self.daemon.directory, name, 1, 11, 1)
            self.assertEqual(again.hear(), "open")
            again.tell()
            one.tell()
            self.assertEqual((one.hear(), again.hear()), (40, 40))
            one.end()
            again.end()
            self.check_shards(name, 40)
            self.daemon.ctl("session", "drop", name)

    def test_one_shard_missing(self):
        tokens = Tokens(1, 10, layers=LAYERS)
        with self.client.session(tokens.rows, "f16", name="half", shards=2) as session:
            self.fails(kvq.Code.E_NO_SESSION, tokens.feed, self.queue, session, 5,
                       text="shard 1 of this session does not exist")
            self.fails(kvq.Code.E_EXISTS, self.client.session, tokens.rows, "f16", name="half",
                       shards=4, shard=1, text="2 shards, 4 are asked for")
            self.assertEqual(session.info()["group_tokens"], 0)
            session.drop()


@unittest.skipUnless(BACKEND == "emu", "there is one place only")
class Moves(Test):

    def places(self):
        return ["host"] + [g["place"] for g in self.daemon.ctl("status")["gpus"]]

    def used(self):
        """Bytes in blocks, place by place."""
        status = self.daemon.ctl("status")
        return ([status["pool_used_bytes"]] + [g["used_bytes"] for g in status["gpus"]])

    def test_round_trip(self):
        """By kvqctl and by the engine: the same bits when back, and memory where it says."""
        tokens = Tokens(5, 700)
        places = self.places()
        session = self.client.session(tokens.rows, "oscar2", name="nomad", place=places[1])
        tokens.feed(self.queue, session, 620, attend=False)  # a whole newest block
        q = tokens.q[0, :1]
        before = read_all(self.queue, session, 2), self.queue.attend([session], 0, q)[0].tobytes()
        bytes_there = self.used()[1]
        moved = self.daemon.ctl("session", "move", "nomad", "host")
        self.assertEqual((moved["status"], moved["phase"], moved["moved_bytes"]),
                         (0, "done", bytes_there))
        self.assertEqual(self.daemon.ctl("session", "show", "nomad")["place"], "host")
        self.assertEqual(self.used()[:2], [bytes_there, 0])
        self.queue.attend([session], 0, q)  # it works there
        session.move(places[1])
        self.assertEqual(session.info()["place"], places[1])
        self.assertEqual(self.used()[:2], [0, bytes_there])
        after = read_all(self.queue, session, 2), self.queue.attend([session], 0, q)[0].tobytes()
        self.assertTrue(before == after)
        self.daemon.wait_log('event=session_moved .*session="?nomad.* text="?to GPU-')
        status, _, complaint = self.daemon.ctl("session", "move", "nomad", "GPU-none", check=False)
        self.assertEqual(status, 1)
        self.assertIn("kvqctl status lists its places", complaint)
        self.fails(kvq.Code.E_INVALID, session.move, "attic", text="attic")
        session.drop()

    def test_in_a_step(self):
        """Waits for the step's end, and gives up in the end."""
        tokens = Tokens(6, 40)
        session = self.client.session(tokens.rows, "f16", name="busy")
        step = self.queue.step([session], 5)
        status, printed, complaint = self.daemon.ctl("session", "move", "busy", "host", "--wait",
                                                     "50", check=False)
        self.assertEqual((status, json.loads(printed)["phase"]), (1, "failed"))
        self.assertIn("was in a step", complaint)
        step.abort()
        session.move("host")
        session.drop()

    def test_while_it_works(self):
        """An engine goes on step by step while its session is moved to and fro."""
        tokens = Tokens(7, 400)
        places = self.places()
        session = self.client.session(tokens.rows, "oscar2", name="busy", place=places[1])
        moved, done = [], threading.Event()

        def carry():
            while not done.is_set():
                for place in ("host", places[1]):
                    moved.append(self.daemon.ctl("session", "move", "busy", place)["status"])

        carrier = threading.Thread(target=carry)
        carrier.start()
        try:
            while session.tokens < 400 or len(moved) < 4:
                if session.tokens < 400:
                    tokens.feed(self.queue, session, 5)
        finally:
            done.set()
            carrier.join()
        self.assertEqual(set(moved), {0})
        session.move("host")
        with self.client.session(tokens.rows, "oscar2", place="host") as twin:
            tokens.feed(self.queue, twin, 400, attend=False)
            self.assertTrue(read_all(self.queue, session, 2) == read_all(self.queue, twin, 2))
        session.drop()
