# SPDX-License-Identifier: Apache-2.0
"""More sessions than memory holds: they make room for each other, and come back when used."""
import contextlib
import os
import sqlite3

from e2e_rig import BACKEND, Child, Test, Tokens, kvq, long_emulated, read_all
from e2e_storage import Stored

# Three pages of 128 tokens of two layers take 768 KiB as f16: five such sessions fit.
SMALL = {"pool_bytes": "4mb", "extent_bytes": "2mb", "evict_idle_ms": 0, "evict_above": 0}
TOKENS = 360  # of three blocks, all but some tokens of the last


class Evicts(Stored):
    def start(self, **options):
        return super().start(**{**SMALL, **options})

    def fed(self, seed, n=TOKENS, **options):
        tokens = Tokens(seed, n + 100)
        session = self.client.session(tokens.rows, "f16", **options)
        tokens.feed(self.queue, session, n, attend=False)
        return tokens, session

    def eviction(self):
        return self.daemon.status()["counters"]

    @long_emulated
    def test_two_engines_in_turns(self):
        """Fourteen sessions of two engines where five fit (ten with the host's memory): every
        output is right, and nobody is refused."""
        rounds = 3 if BACKEND == "cpu" else 1
        engines = [Child("takes_turns", self.daemon.directory, i, 7, rounds) for i in range(2)]
        for engine in engines:
            self.assertEqual(engine.hear(), "ready")
        for engine in engines:
            engine.tell()
        for engine in engines:
            said = engine.hear()
            self.assertEqual(said["tokens"], [TOKENS + 2 * rounds] * 7)
            self.assertLess(said["error"], 2e-3)
        status = self.daemon.status()
        evicted = status["counters"]
        self.assertEqual(evicted["refused_for_room"], 0)
        self.assertEqual(status["counters"]["refused_requests"], 0)
        self.assertGreater(evicted["parked_room"], 3)
        self.assertGreater(evicted["fetched"], 3)
        self.assertEqual(evicted["parked_room"] + evicted["parked_quota"],
                         evicted["fetched"] + evicted["offloaded_now"])
        self.assertGreater(evicted["parked_room_bytes"], 3 * (500 << 10))
        if BACKEND != "cpu":
            self.assertGreater(evicted["demoted"], 3)
            self.assertGreater(evicted["promoted"], 0)
        self.daemon.wait_log("event=session_parked .*for room")
        for engine in engines:
            engine.tell()
            engine.end()
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)

    def test_in_one_transaction(self):
        """Eight sessions make room for one request: they are written in one transaction, and all of
        them come back."""
        self.again(pool_bytes="8mb")
        held = [self.fed(i, place="host") for i in range(10)]
        before = [read_all(self.queue, session, 2) for _, session in held]
        path = os.path.join(self.folder, "store", "catalog.db")

        def transactions():
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as catalog:
                return catalog.execute("SELECT last_transaction FROM store").fetchone()[0]
        first = transactions()
        self.fed(11, 8 * 384, place="host")[1].drop()
        self.assertEqual(self.eviction()["parked_room"], 8)
        self.assertEqual(transactions() - first, 1)
        for (_, session), was in zip(held, before):
            self.assertTrue(read_all(self.queue, session, 2) == was)

    def test_some_have_no_room_on_disk(self):
        """Of eight that are to be written in one transaction a limit lets some in: these go, the
        others stay, and nothing is lost."""
        self.again(pool_bytes="8mb")
        held = [self.fed(i, place="host") for i in range(10)]
        before = [read_all(self.queue, session, 2) for _, session in held]
        self.daemon.ctl("quota", "set", f"uid-{os.getuid()}", "--disk-bytes", "3mb")
        self.fails(kvq.Code.E_NO_MEMORY, self.fed, 11, 8 * 384, place="host")
        evicted = self.eviction()
        self.assertIn(evicted["parked_room"], (3, 4))
        self.assertEqual(evicted["evictions_failed"], 8 - evicted["parked_room"])
        self.assertEqual(sum(s.info()["tier"] == "disk" for _, s in held), evicted["parked_room"])
        for (_, session), was in zip(held, before):
            self.assertTrue(read_all(self.queue, session, 2) == was)

    def test_quota(self):
        """At its namespace's limit a session makes room for another one of that namespace."""
        limit = "host_bytes" if BACKEND == "cpu" else "device_bytes"
        self.again(pool_bytes="32mb", **{limit: "1mb"})
        _, first = self.fed(1)
        before = read_all(self.queue, first, 2)
        self.fed(2)
        self.assertTrue(read_all(self.queue, first, 2) == before)
        evicted = self.eviction()
        if BACKEND == "cpu":
            self.assertEqual((evicted["parked_quota"], evicted["parked_room"]), (2, 0))
        else:
            self.assertEqual(evicted["demoted"], 2)
        self.assertEqual(evicted["refused_for_room"], 0)

    def test_pinned_and_in_use(self):
        """They stay, who needs the room is refused, and the log says what is in the way."""
        held = [self.fed(i) for i in range(5)]
        for _, session in held[1:]:
            session.pin()
        step = self.queue.step([held[0][1]], [1])
        tokens = Tokens(9, 400)
        last = self.client.session(tokens.rows, "f16")
        other = self.client.queue()
        self.fails(kvq.Code.E_NO_MEMORY, tokens.feed, other, last, TOKENS, attend=False,
                   text="wait_for_room")
        self.daemon.wait_log("event=memory_full .*1 are in use, 4 pinned")
        self.assertEqual(self.eviction()["refused_for_room"], 1)
        # Waits for it to the end of its patience.
        other.wait_for_room(0.2)
        self.fails(kvq.Code.E_DEADLINE, tokens.feed, other, last, TOKENS, attend=False)
        # And until there is some.
        other.wait_for_room(60)
        entries = kvq.make_entries([last])
        entries["append"] = [TOKENS]
        ticket = other.submit("step_begin", entries)
        self.assertEqual(self.eviction()["waiting_for_room_now"], 1)
        step.abort()
        held[0][1].drop()
        ticket.wait()
        self.assertEqual(entries["status"][0], 0)
        self.assertEqual(sum(s.info()["tier"] == "disk" for _, s in held[1:]), 0)

    def test_before_anybody_asks(self):
        """Above evict_above, and after park_idle_seconds, sessions go unasked."""
        self.again(evict_above=50, evict_idle_ms=1)
        held = [self.fed(i) for i in range(4)]
        self.daemon.wait_log("event=session_(parked|moved) ")
        self.assertTrue(all(s.info()["tokens"] == TOKENS for _, s in held))
        self.assertEqual(self.eviction()["waited_for_room"], 0)
        self.again(park_idle_seconds=1, evict_idle_ms=1, pool_bytes="32mb")
        _, session = self.fed(7)
        before = read_all(self.queue, session, 2)
        self.daemon.wait_log("event=session_parked .*nobody used it")
        self.assertEqual(session.info()["tier"], "disk")
        self.assertEqual(self.eviction()["parked_idle"], 1)
        self.assertTrue(read_all(self.queue, session, 2) == before)

    def test_restore_makes_room(self):
        """One that is only on disk is opened while memory is full of idle ones."""
        tokens, session = self.fed(1, name="it")
        before = read_all(self.queue, session, 2)
        session.save()
        self.again()
        held = [self.fed(i) for i in range(2, 7)]
        session = self.client.session(tokens.rows, "f16", name="it", must_exist=True)
        self.assertTrue(read_all(self.queue, session, 2) == before)
        for other, it in held:
            self.assertEqual(it.info()["tokens"], TOKENS)
            other.feed(self.queue, it, 1)
        self.assertEqual(self.eviction()["refused_for_room"], 0)


class NoStorage(Test):
    """Without storage_dir: GPUs' sessions go to the host's memory, and the host's stay."""
    DAEMON = SMALL

    def test_host_is_full(self):
        held = []
        for i in range(10):
            tokens = Tokens(i, 400)
            session = self.client.session(tokens.rows, "f16", place="host")
            try:
                tokens.feed(self.queue, session, TOKENS, attend=False)
            except kvq.Error as error:
                self.assertEqual(error.code, kvq.Code.E_NO_MEMORY)
                self.assertIn("storage_dir", error.text)
                break
            held.append(session)
        self.assertEqual(len(held), 5)
        self.daemon.wait_log("event=memory_full .*set storage_dir")
        for one in held:
            one.drop()
