# SPDX-License-Identifier: Apache-2.0
"""What one request's fault is to the others under kvq.vllm: values that are not finite, a pool that
is full, a session that is gone. vLLM is not needed for it; vllm_test.py runs this."""
import contextlib
import os
import unittest.mock

import torch

import e2e_rig
import kvq
from kvq import plugin
from kvq.plugin import NEAR_ROWS
from kvq.vllm.plan import Report
from vllm_steps import DIM, KV_HEADS, LAYERS, Engine, Tokens, ids

NEAR = 4e-3  # of outputs: those that are made without kvqd are of K and V that are not rounded


class Rig(e2e_rig.Test):
    """Engines over the test's daemon, or one of their own."""

    def setUp(self):
        super().setUp()
        self.tokens = Tokens()

    def tearDown(self):
        self.doCleanups()
        super().tearDown()

    def engine(self, directory=None, recompute=False, **options):
        engine = Engine(directory or self.daemon.directory, self.tokens, recompute, **options)
        self.addCleanup(engine.close)
        return engine

    def near(self, far):
        self.assertLess(far, NEAR)  # false for NaN as well

    def says(self, level="WARNING"):
        return self.assertLogs("vllm.kvq", level)


BLOCK = 32 * LAYERS * KV_HEADS * 2 * DIM * 2  # bytes that a session in 16 bits takes at a time


class Poisoned(Rig):
    """A request whose K or V are not finite, from some token on."""
    BAD = 2

    def poison(self, layer=LAYERS - 1):
        """The ids of "bad" are even, those of the others odd."""
        self.tokens.by_id[::2, layer, 0, 0, 7] = torch.nan

    @staticmethod
    def good(count, seed):
        return [i | 1 for i in ids(count, seed)]

    def bad(self, count, seed, at):
        some = self.good(count, seed)
        some[at] = self.BAD
        return some

    def both(self, count, at, recompute=False, first=20):
        """Steps with a poisoned request between two others; and what these have alone."""
        self.poison()
        runs = []
        for with_bad in (True, False):
            engine = self.engine(recompute=recompute, prefix=False)
            one = engine.ask("one", self.good(700, 1), first)
            two = engine.ask("two", self.good(700, 2), first)
            bad = engine.ask("bad", self.bad(700, 3, at), first)
            some = [one, bad, two] if with_bad else [one, two]
            steps = [[(r, None) for r in some], [(r, count) for r in some]]
            outputs = []
            for work in steps:
                engine.step(work)
                outputs.append({n: torch.stack(engine.outputs[n]) for n in ("one", "two")})
            runs.append((engine, outputs, one, two, bad))
        (engine, mixed, one, two, bad), (_, alone, *_) = runs
        for some, same in zip(mixed, alone):
            for name in some:
                self.assertTrue(torch.equal(some[name], same[name]), name)
        return engine, one, two, bad

    def test_fails_alone(self):
        """In a step that attends in this process, and in one through the daemon, the others have
        the bits that they have without it."""
        for count in (1, NEAR_ROWS):
            with self.subTest(count), self.says() as said:
                engine, one, two, _ = self.both(count, at=20)
                self.assertEqual(engine.failed, {"bad"})
                self.assertEqual(set(engine.worker.sessions), {"one", "two"})
                self.near(engine.step([(one, 2), (two, 2)]))
                self.assertEqual(len(said.output), 1)
                self.assertRegex(said.output[0], "request bad .*E_NONFINITE.*float32.*bfloat16")
                self.assertEqual(engine.worker.sessions["one"].refresh(), 22 + count)

    def test_goes_on_without_meaning(self):
        """Where lost requests begin anew, which would not help this one; until it ends."""
        for count in (1, NEAR_ROWS):
            with self.subTest(count), self.says("ERROR") as said:
                engine, one, two, bad = self.both(count, at=20, recompute=True)
                for _ in range(2):
                    engine.step([(one, 2), (bad, 2), (two, 2)])
                    self.assertEqual(engine.failed, set())
                    self.assertTrue(torch.stack(engine.outputs["bad"]).isnan().all())
                    for name in ("one", "two"):
                        self.assertFalse(torch.stack(engine.outputs[name]).isnan().any())
                self.near(engine.step([(one, 1), (two, 1)], finished=[bad]))
                self.assertEqual(len(said.output), 1)
                self.assertRegex(said.output[0], "request bad goes on without meaning: E_NONFINITE")
                self.assertEqual(engine.worker.void, set())

    def test_fails_behind_its_first_step(self):
        """vLLM takes that one's token, as a stock engine would, and is told behind the next."""
        for first in (20, NEAR_ROWS + 1):
            with self.subTest(first), self.says():
                self.poison()
                engine = self.engine(prefix=False)
                one = engine.ask("one", self.good(700, 1), 20)
                bad = engine.ask("bad", self.bad(700, 3, 9), first)
                engine.step([(one, None), (bad, None)])
                self.assertEqual(engine.failed, set())
                self.assertTrue(torch.stack(engine.outputs["bad"])[-1, -1].isnan().any())
                self.assertFalse(torch.stack(engine.outputs["bad"])[:, :9].isnan().any())
                self.assertEqual(set(engine.worker.sessions), {"one"})
                self.near(engine.step([(one, 1), (bad, 1)]))
                self.assertEqual(engine.failed, {"bad"})
                self.near(engine.step([(one, 1)], finished=[bad]))

    def test_nothing_of_it_is_found(self):
        """But for what was computed before."""
        for pieces, found in (((NEAR_ROWS + 144,), 0), ((130, 270), 128), ((130, 100, 170), 128)):
            for recompute in (False, True):
                with self.subTest(pieces=pieces, recompute=recompute), self.says():
                    self.poison()
                    prompt = self.bad(500, 10 * len(pieces) + recompute, 256)
                    engine = self.engine(recompute=recompute)
                    bad = engine.ask("bad", prompt, 400)
                    for count in pieces:
                        engine.step([(bad, count)])
                    for _ in range(2 if recompute else 0):
                        engine.step([(bad, 1)])
                    self.assertNotIn("bad", engine.worker.sessions)
                    alike = engine.ask("alike", prompt[:256] + self.good(40, 4))
                    self.near(engine.step([(alike, None)], finished=[bad]))
                    self.assertEqual(
                        engine.worker.sessions["alike"].info()["prefix_tokens"], found)


class Full(Rig):
    """A pool without room for all."""

    def cramped(self, **options):
        options = {"pool_bytes": "4mb", "extent_bytes": "2mb", **options}
        daemon = e2e_rig.Daemon(**options)
        self.addCleanup(daemon.stop)
        return daemon

    def play(self, engine, some, budget, stop=20000):
        """What vLLM's scheduler does with requests that all have pages: in each step as many tokens
        as there are, the oldest first. Returns who failed."""
        failed, steps, waiting, running = set(), 0, list(some), []
        while waiting or running:
            left, work, at = budget, [], 0
            while left and (at < len(running) or waiting):
                if at == len(running):  # the next that waits, if it may begin
                    if engine.planner.matched(waiting[0]) is None:
                        break
                    running.append(waiting.pop(0))
                r = running[at]
                work.append((r, min(r.known - r.done, left)))
                left -= work[-1][1]
                at += 1
            self.near(engine.step(work))
            if not engine.worker.recompute:
                failed |= engine.failed
            for r, _ in work:
                r.known += r.done == r.known
            for r in [r for r in running
                      if r.known > len(r.all_token_ids) or r.request_id in failed]:
                engine.finish(r)
                running.remove(r)
            steps += 1
            self.assertLess(steps, stop, "no progress")
        engine.worker.prepare(engine.plan([])[1])
        self.assertEqual(engine.worker.sessions, {})
        with open("/proc/self/maps") as maps:  # page tables, in this process
            self.assertEqual([line for line in maps if "kvq-table" in line], [])
        return failed

    def requests(self, engine, count, prompt, length):
        some = [engine.ask(str(i), ids(length, 50 + i), prompt) for i in range(count)]
        for r in some:
            r.known = prompt
        return some

    def test_all_end(self):
        """Where lost requests begin anew. Each output that vLLM takes is as with room for all, in
        steps that attend in this process and in longer ones; the oldest loses nothing."""
        for budget in (NEAR_ROWS, 1024):
            with self.subTest(budget), self.says() as said:
                engine = self.engine(self.cramped().directory, recompute=True, prefix=False)
                some = self.requests(engine, 6, 480, 510)
                self.assertEqual(self.play(engine, some, budget), set())
                self.assertEqual([r.known for r in some], [511] * 6)
                self.assertFalse([x for x in said.output if "request 0 " in x])
                self.assertRegex(said.output[0], "request . begins anew.*: E_NO_MEMORY: ")

    def test_some_fail_alone(self):
        """Where they do not; each with a line in the log."""
        for budget in (NEAR_ROWS, 1024):
            with self.subTest(budget), self.says() as said:
                engine = self.engine(self.cramped().directory, prefix=False)
                some = self.requests(engine, 6, 480, 510)
                failed = self.play(engine, some, budget)
                self.assertEqual({r.request_id for r in some if r.known <= 510}, failed)
                self.assertIn(len(failed), range(1, 4))
                self.assertNotIn("0", failed)
                for name in failed:
                    self.assertEqual(sum(f"request {name} ends with an error: E_NO_MEMORY: " in x
                                         for x in said.output), 1)

    def test_those_that_wait_go_on_waiting(self):
        """While those that run lack room: for a second, or until one of them has ended."""
        engine, now = self.engine(), [5.0]
        engine.planner.clock = lambda: now[0]
        one, two, other, three = (engine.ask(str(i), ids(60, i), 50) for i in range(4))
        engine.planner.heard(Report(True))
        self.assertEqual(engine.planner.matched(one), 0)  # nobody runs whose end there would be
        self.near(engine.step([(one, None)]))
        for now[0], waits in ((5.9, True), (6.1, False)):
            self.assertEqual(engine.planner.matched(two) is None, waits)
        self.near(engine.step([(one, 1), (other, None)]))
        engine.planner.heard(Report(True))
        self.assertIsNone(engine.planner.matched(two))
        engine.planner.over(three)  # that waits, and has no room to give
        self.assertIsNone(engine.planner.matched(two))
        engine.finish(one)
        self.assertEqual(engine.planner.matched(two), 0)  # though the other one runs
        engine.planner.heard(Report(True))  # of the step behind which the first one has ended
        self.assertEqual(engine.planner.matched(two), 0)
        self.near(engine.step([(other, 1)]))
        engine.planner.heard(Report(True))
        self.assertIsNone(engine.planner.matched(two))

    def pair(self, recompute, first):
        """Of requests at the end of their last block, the older first."""
        engine = self.engine(prefix=False, recompute=recompute)
        some = [engine.ask(n, ids(900, i), first) for i, n in enumerate(("old", "young"))]
        for r in some:
            self.near(engine.step([(r, None)]))
        return engine, some

    def test_the_younger_gives_up_its_room(self):
        """Whether it is in the step or not."""
        for count in (1, NEAR_ROWS + 1):
            for other in (0, 1, 200):
                with self.subTest(count=count, other=other), self.says() as said:
                    engine, (old, young) = self.pair(True, 512)
                    self.limited("host-bytes", more=0)
                    self.near(engine.step([(young, other)][:other] + [(old, count)]))
                    self.assertEqual((engine.failed, old.done), ({"young"}, 512 + count))
                    self.assertEqual(list(engine.worker.sessions), ["old"])
                    self.assertRegex(said.output[0], "request young begins anew.*E_QUOTA")
                    young.done = 0  # also where it was not in the step
                    self.near(engine.step([(old, 1), (young, 9)]))
                    self.assertEqual((engine.failed, young.done), (set(), 9))
                    engine.close()
                    self.doCleanups()

    def test_the_older_is_served_first(self):
        """Where there is room for one, whatever the batch's order."""
        for count in (1, NEAR_ROWS + 1):
            for turn in (1, -1):
                with self.subTest(count=count, turn=turn), self.says():
                    engine, some = self.pair(False, 256)
                    self.limited("host-bytes", more=BLOCK * -(-count // 32))
                    self.near(engine.step([(r, count) for r in some][::turn]))
                    self.assertEqual(engine.failed, {"young"})
                    engine.close()
                    self.doCleanups()

    def test_no_more_fail_than_must(self):
        """Of three that lack room at once the youngest fails, whose room is enough for two."""
        for count in (1, 90):  # in this process, and through the daemon
            with self.subTest(count=count), self.says():
                engine, some = self.pair(False, 256)
                some.append(engine.ask("youngest", ids(900, 7), 256))
                self.near(engine.step([(some[2], None)]))
                self.limited("host-bytes", more=0)
                self.near(engine.step([(r, count) for r in some]))
                self.assertEqual(engine.failed, {"youngest"})
                self.assertTrue(engine.worker.full)
                engine.close()
                self.doCleanups()

    def limited(self, limit, bytes=0, more=None):
        """Sets a limit of the namespace, or one of so much more than it uses."""
        if not self.daemon.ctl("quota", "list"):  # a namespace is there from its first session on
            first = self.engine(prefix=False)
            self.near(first.step([(first.ask("first", ids(9)), None)]))
            first.close()
        (quota,) = (q for q in self.daemon.ctl("quota", "list")
                    if q["namespace"] == f"uid-{os.getuid()}")
        if more is not None:
            bytes = quota["used"][limit.replace("-", "_")] + more
        change = ["quota", "set", quota["namespace"], f"--{limit}"]
        self.daemon.ctl(*change, str(bytes))
        self.addCleanup(self.daemon.ctl, *change, str(quota["limit"][limit.replace("-", "_")]))

    def test_no_room_for_a_session(self):
        """The request's first step has its outputs all the same."""
        self.limited("table-bytes", 1)
        for count in (40, NEAR_ROWS + 40):
            for recompute in (False, True):
                with self.subTest(count=count, recompute=recompute), self.says() as said:
                    engine = self.engine(prefix=False, recompute=recompute)
                    one = engine.ask("one", ids(count + 60, 1), count)
                    self.near(engine.step([(one, None)]))
                    self.assertEqual((engine.failed, one.done), (set(), count))
                    engine.step([(one, 1)])
                    self.assertEqual((engine.failed, one.done), ({"one"}, 0))
                    if recompute:
                        self.near(engine.step([(one, count + 1)]))
                        self.assertEqual((engine.failed, one.done), (set(), count + 1))
                    self.assertRegex(said.output[0], "request one .*E_QUOTA")

    def play_alone(self, engine, name, prompt=1000):
        """A request alone, in pieces, each four seconds behind the last one, until there is no
        hope for it. Returns when that was."""
        now = [0]
        engine.worker.clock = lambda: now[0]
        one = engine.ask(name, ids(prompt, 1))
        with self.says():
            for now[0] in range(0, 200, 4):
                engine.step([(one, min(NEAR_ROWS, prompt - one.done))])
                if engine.worker.void:
                    break
        self.assertEqual((engine.failed, engine.worker.lost), (set(), set()))
        engine.step([(one, 1)])
        self.assertTrue(torch.stack(engine.outputs[name]).isnan().all())
        return now[0]

    def test_no_room_at_all(self):
        """A request that never fits goes on without meaning, behind a minute; also where it is its
        session that cannot be opened."""
        for limit, bytes in (("host-bytes", 1 << 20), ("table-bytes", 1)):
            with self.subTest(limit):
                self.limited(limit, bytes)
                engine = self.engine(prefix=False, recompute=True)
                self.assertIn(self.play_alone(engine, "one"), range(60, 90))
                engine.close()
                self.doCleanups()

    @staticmethod
    def gone(engine, name):
        """kvqd has no longer a request's session."""
        session = engine.worker.sessions[name]
        handle = session.handle
        session.drop()
        session.handle = handle

    def test_patience_is_of_the_oldest(self):
        """A request is not given up while an older one has the room, nor at once behind that."""
        self.limited("host-bytes", 1 << 20)
        engine, now = self.engine(prefix=False, recompute=True), [5.0]
        engine.worker.clock = lambda: now[0]
        old, young = engine.ask("old", ids(20, 1)), engine.ask("young", ids(1000, 2))
        with self.says():
            self.near(engine.step([(old, None)]))
            for now[0] in range(0, 400, 8):
                work = [(young, min(NEAR_ROWS, 1000 - young.done))]
                engine.step(work, finished=[old] if now[0] == 200 else [])
                if engine.worker.void:
                    break
        self.assertIn(now[0], range(260, 290))

    def test_an_older_one_that_begins_anew_takes_the_room(self):
        """In the same step, so that it has no tokens in kvqd yet."""
        self.limited("host-bytes", 1 << 20)
        engine, now = self.engine(prefix=False, recompute=True), [5.0]
        engine.worker.clock = lambda: now[0]
        old, young = engine.ask("old", ids(900, 1), 500), engine.ask("young", ids(400, 2), 200)
        with self.says():
            for now[0] in range(0, 200, 8):
                self.near(engine.step([(old, 500 + now[0] // 4), (young, 200)]))
                self.assertEqual(list(engine.worker.sessions), ["old"])
                self.gone(engine, "old")
                engine.step([(old, 1), (young, 1)])
                self.assertEqual((engine.failed, engine.worker.void), ({"old", "young"}, set()))
            self.near(engine.step([(young, 200)], finished=[old]))
            self.near(engine.step([(young, 1)]))
            self.assertEqual(list(engine.worker.sessions), ["young"])

    @contextlib.contextmanager
    def unread(self, name, call):
        """What kvqd says of a session that lies on a disk which cannot be read, in calls of the
        step that are so named."""
        real = getattr(plugin.Step, call)

        def refused(step, *arguments):
            answer = real(step, *arguments)
            step.status[[part.name == name for part in step.live]] = kvq.Code.E_SYSTEM
            return answer
        with unittest.mock.patch.object(plugin.Step, call, refused):
            yield

    def test_a_disk_that_cannot_be_read(self):
        """Of a request's session: the others have their outputs."""
        for call in ("begin", "ask", "end"):
            for count in (1, NEAR_ROWS + 1):
                with self.subTest(call=call, count=count), self.says() as said:
                    engine = self.engine(prefix=False)
                    one, two = (engine.ask(str(n), ids(500, n), 40) for n in (1, 2))
                    self.near(engine.step([(one, None), (two, None)]))
                    with self.unread("1", call):
                        self.near(engine.step([(one, 1), (two, count)]))
                    self.assertEqual((engine.failed, engine.worker.full), ({"1"}, False))
                    self.assertRegex(said.output[0], "request 1 ends with an error: E_SYSTEM")
                    self.near(engine.step([(two, 1)], finished=[one]))

    def test_a_disk_that_is_never_read(self):
        """What begins anew in vain for a minute goes on without meaning."""
        engine = self.engine(prefix=False, recompute=True)
        with self.unread("one", "begin"):
            self.assertIn(self.play_alone(engine, "one"), range(60, 90))

    def test_a_session_that_is_not_opened(self):
        """Since the system refuses something: its request begins anew."""
        engine = self.engine(prefix=False, recompute=True)
        one, two = (engine.ask(str(n), ids(60, n), 40) for n in (1, 2))

        def refused(*_, **__):
            raise kvq.Error(kvq.Code.E_SYSTEM, "no")
        with self.says() as said:
            self.near(engine.step([(one, None)]))
            with unittest.mock.patch.object(engine.worker.client, "session", refused):
                self.near(engine.step([(one, 1), (two, None)]))
            engine.step([(one, 1), (two, 1)])
            self.assertEqual((engine.failed, engine.worker.full), ({"2"}, False))
            self.near(engine.step([(one, 1), (two, 41)]))
        self.assertRegex(said.output[0], "request 2 begins anew.*: E_SYSTEM")
        self.assertEqual(set(engine.worker.sessions), {"1", "2"})

    def test_a_session_that_is_gone(self):
        """As one whose blocks on disk are damaged."""
        for count in (1, NEAR_ROWS + 1):
            for recompute in (False, True):
                with self.subTest(count=count, recompute=recompute), self.says() as said:
                    engine = self.engine(prefix=False, recompute=recompute)
                    one, two = (engine.ask(str(n), ids(500, n), 40) for n in (1, 2))
                    self.near(engine.step([(one, None), (two, None)]))
                    self.gone(engine, "1")
                    self.near(engine.step([(one, 1), (two, count)]))
                    self.assertEqual(engine.failed, {"1"})
                    self.assertRegex(said.output[0], "request 1 .*: E_[A-Z_]+: ")
                    if recompute:
                        self.near(engine.step([(one, 42), (two, 1)]))
                    self.near(engine.step([(one, 1), (two, 1)] if recompute else [(two, 1)],
                                          finished=[] if recompute else [one]))


class Daemons:
    """As where the library cannot attend in this process: every step attends in the daemon, and a
    short one learns of values that are not finite in its middle."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        told = unittest.mock.patch.dict(os.environ, {"KVQ_LOCAL": "daemon"})
        told.start()
        cls.addClassCleanup(told.stop)

    def engine(self, *arguments, **options):
        engine = super().engine(*arguments, **options)
        self.assertIn("KVQ_LOCAL=daemon", engine.worker.local.why)
        return engine


class PoisonedInDaemon(Daemons, Poisoned):
    """Poisoned."""


class FullInDaemon(Daemons, Full):
    """Full."""
