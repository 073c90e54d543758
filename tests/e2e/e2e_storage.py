# SPDX-License-Identifier: Apache-2.0
"""Sessions that outlive their daemon: saved, killed with it, restored, to the bit."""
import contextlib
import dataclasses
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
import unittest

import numpy as np

from e2e_rig import (BIN, BOUND, Daemon, Test, Tokens, emulated, feed, kvq, long_emulated,
                     read_all)

FULL = os.environ.get("KVQ_FULL") == "1"
KILLS = int(os.environ.get("KVQ_KILLS") or (200 if FULL else 20))


class Stored(Test):
    """A test with a folder of its own for what is saved."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvq-store-")
        self.daemon = self.start()
        super().setUp()

    def tearDown(self):
        self.client.close()
        self.daemon.stop()
        shutil.rmtree(self.folder)

    def start(self, **options):
        return Daemon(storage_dir=os.path.join(self.folder, "store"), **options)

    def again(self, kill=True, **options):
        """Another daemon on what the one before has saved."""
        self.client.close()
        if kill:
            self.daemon.kill()
            self.daemon.process.stderr.close()
            shutil.rmtree(self.daemon.directory, ignore_errors=True)
        else:
            self.daemon.stop()
        self.daemon = self.start(**options)
        self.client = self.daemon.client()
        self.queue = self.client.queue()

    def same(self, a, b, tokens):
        """Two sessions hold the same, and go on alike."""
        self.assertEqual(a.tokens, b.tokens)
        self.assertTrue(read_all(self.queue, a, 2) == read_all(self.queue, b, 2))
        for n in (1, 130):
            x, y = (tokens.feed(self.queue, s, n) for s in (a, b))
            for (out, lse), (out2, lse2) in zip(x, y):
                self.assertTrue(out.tobytes() == out2.tobytes() and lse.tobytes() == lse2.tobytes())


class Saves(Stored):
    @long_emulated
    def test_survives(self):
        """Saved, the daemon killed with -9, restored: as if it had never stopped."""
        tokens = Tokens(1, 1500)
        formats = emulated(["oscar2", "innerq-hybrid"], ["f16", "oscar2", "ott2", "innerq-hybrid"])
        for format in formats:
            session = self.client.session(tokens.rows, format, name=format)
            tokens.feed(self.queue, session, 1000, attend=False)
            session.save()
        self.again()
        self.assertEqual(self.daemon.status()["sessions"], 0)
        self.assertEqual(len(self.daemon.ctl("storage", "list")), len(formats))
        for format in formats:
            session = self.client.session(tokens.rows, format, name=format)
            with self.client.session(tokens.rows, format) as twin:
                tokens.feed(self.queue, twin, 1000, attend=False)
                self.same(session, twin, tokens)
            session.drop()
        self.assertEqual(self.daemon.ctl("storage", "list"), [])

    def test_only_what_is_new(self):
        tokens = Tokens(2, 1500)
        session = self.client.session(tokens.rows, "oscar2", name="it")
        tokens.feed(self.queue, session, 1200, attend=False)
        first = self.daemon.ctl("session", "save", "it")
        self.assertEqual(first["kept_blocks"], 0)
        self.assertTrue(self.daemon.ctl("session", "save", "it")["unchanged"])
        tokens.feed(self.queue, session, 1, attend=False)
        second = self.daemon.ctl("session", "save", "it")
        self.assertLess(second["written_bytes"], first["written_bytes"] / 2)
        self.assertGreater(second["kept_blocks"], second["written_blocks"])
        self.assertEqual(second["tokens"], 1201)

    def test_formats_of_layers(self):
        """The list tells each format of a session once, also one that begins another's name."""
        row = Tokens(18, 10).rows[0]
        formats = ("oscar2-xh", "oscar2", "oscar2-xh", "f16")
        rows = [dataclasses.replace(row, repeat=1, format=format) for format in formats]
        with self.client.session(rows, name="mixed") as session, self.queue.step([session], 5) as s:
            kv = np.ones((5, row.kv_heads, row.head_dim), np.float32)
            for layer in range(len(rows)):
                s.append(layer, kv, kv)
        self.daemon.ctl("session", "save", "mixed")
        stored, = self.daemon.ctl("storage", "list")
        self.assertEqual(stored["formats"], "oscar2-xh, oscar2, f16")

    def test_without_being_asked(self):
        """By on_detach, when idle, and when the daemon ends."""
        tokens = Tokens(3, 400)
        with self.client.session(tokens.rows, "oscar2", name="left", on_detach="save") as session:
            tokens.feed(self.queue, session, 300, attend=False)
        self.daemon.wait_log('event=session_saved .*session="?left')
        kept = self.client.session(tokens.rows, "oscar2", name="kept")
        tokens.feed(self.queue, kept, 200, attend=False)
        self.again(kill=False, save_idle_seconds=1)
        self.assertEqual(self.client.session(name="left").tokens, 300)
        kept = self.client.session(name="kept")
        self.assertEqual(kept.tokens, 200)
        kept = self.client.session(tokens.rows, "oscar2", name="idle")
        tokens.feed(self.queue, kept, 100, attend=False)
        self.daemon.wait_log('event=session_saved .*session="?idle')
        self.again()
        self.assertEqual(self.client.session(name="idle").tokens, 100)

    def test_dropped_and_saved(self):
        """on_detach = drop takes a session out of memory alone, and the log says so; a daemon that
        ends saves it while it is open, and it is there afterwards."""
        tokens = Tokens(17, 400)
        why = "nobody has it open any more, and on_detach is drop"
        for name, saves in (("bare", False), ("saved", True)):
            session = self.client.session(tokens.rows, "f16", name=name, on_detach="drop")
            tokens.feed(self.queue, session, 300, attend=False)
            if saves:
                session.save()
            session.close()
            gone = self.daemon.wait_log(f'event=session_dropped .*session="?{name}')
            self.assertIn(why, gone)
            self.assertEqual("what is saved of it stays on disk" in gone, saves, gone)
        session = self.client.session(tokens.rows, "f16", name="open", on_detach="drop")
        tokens.feed(self.queue, session, 300, attend=False)
        self.daemon.ctl("drain")
        self.daemon.stop()
        gone, = [line for line in self.daemon.lines
                 if "event=session_dropped" in line and "session=open" in line.replace('"', "")]
        self.assertIn(f"{why}; what is saved of it stays on disk", gone)
        self.client.close()
        self.daemon = self.start()
        self.client = self.daemon.client()
        self.assertEqual({e["name"] for e in self.daemon.ctl("storage", "list")},
                         {"saved", "open"})
        self.assertEqual(self.client.session(name="open", must_exist=True).tokens, 300)

    def test_kept_no_longer(self):
        """What nobody opens for keep_seconds is saved before it leaves memory; the log says why it
        went. Without a store it says what was lost."""
        tokens = Tokens(16, 400)
        self.again(keep_seconds=1)
        with self.client.session(tokens.rows, "f16", name="kept") as session:
            tokens.feed(self.queue, session, 300, attend=False)
        gone = self.daemon.wait_log('event=session_dropped .*session="?kept')
        self.assertIn("time that it is kept is over", gone)
        self.assertIn("is over; it is saved", gone)
        self.again()
        self.assertEqual(self.client.session(name="kept", must_exist=True).tokens, 300)
        with Daemon(keep_seconds=1) as daemon:
            with daemon.client() as client, client.queue() as queue:
                with client.session(tokens.rows, "f16", name="kept") as session:
                    tokens.feed(queue, session, 300, attend=False)
            gone = daemon.wait_log('event=session_dropped .*session="?kept')
            self.assertIn("time that it is kept is over; its 300 tokens were not saved", gone)

    def test_killed_in_an_export(self):
        """FILE is there as a whole or not at all; the next export to it removes what is left."""
        with self.client.session(Tokens(1, 1).rows, "f16", name="it") as session:
            Tokens(1, 16384).feed(self.queue, session, 16384, attend=False)
            session.save()
        out = os.path.join(self.folder, "out")
        os.mkdir(out)
        path = os.path.join(out, "it.kvq")
        words = [os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory, "session",
                 "export", "it", path]
        asking = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(asking.kill)
        end = time.monotonic() + BOUND
        while not os.listdir(out):
            self.assertLess(time.monotonic(), end)
        self.again()
        asking.kill()
        asking.wait()
        if os.path.exists(path):  # it was faster than the end, and is whole
            self.daemon.ctl("session", "import", path, "--as", "other")
            os.unlink(path)
        self.daemon.ctl("session", "export", "it", path)
        self.assertEqual(os.listdir(out), ["it.kvq"])

    @long_emulated
    def test_export_and_import(self):
        tokens = Tokens(4, 900)
        session = self.client.session(tokens.rows, "kivi2", name="it")
        tokens.feed(self.queue, session, 700, attend=False)
        session.save()
        path = os.path.join(self.folder, "it.kvq")
        for of_others in (path, path + "2.tmp", path + "22.tmp"):
            with open(of_others, "w", encoding="ascii") as file:
                file.write("precious")
        status, _, complaint = self.daemon.ctl("session", "export", "it", self.folder, check=False)
        self.assertEqual(status, 1, complaint)
        self.assertIn("is a folder", complaint)
        status, _, complaint = self.daemon.ctl("session", "export", "it", path, check=False)
        self.assertEqual(status, 1, complaint)
        self.assertIn(f"{path} is there already; give another name, or --replace", complaint)
        self.assertEqual(self.daemon.ctl("session", "export", "no", path + 2 * "2",
                                         check=False)[0], 5)
        self.assertFalse(os.path.exists(path + "22"))  # nor is its place taken
        self.daemon.ctl("session", "export", "it", path + "2")
        for of_others in (path, path + "2.tmp", path + "22.tmp"):
            with open(of_others, encoding="ascii") as file:
                self.assertEqual(file.read(), "precious")
        self.daemon.ctl("session", "export", "it", path, "--replace")
        self.assertFalse([x for x in os.listdir(self.folder) if ".kvq.tmp" in x])
        with open(path, "rb") as one, open(path + "2", "rb") as two:
            self.assertEqual(len(one.read()), len(two.read()))
        twin = self.daemon.ctl("session", "import", path, "--as", "twin")
        self.assertEqual((twin["name"], twin["tokens"]), ("twin", 700))
        self.assertGreater(twin["written_blocks"], 0)
        self.assertGreater(twin["written_bytes"], 0)
        again = self.daemon.ctl("session", "import", path, "--as", "twin", "--replace")
        self.assertEqual({**again, "ms": 0}, {**twin, "ms": 0})
        status, _, complaint = self.daemon.ctl("session", "import", path, "--as", "twin",
                                               check=False)
        self.assertEqual(status, 1, complaint)
        status, _, complaint = self.daemon.ctl("session", "import", path, "--replace", check=False)
        self.assertEqual(status, 1, complaint)
        self.assertIn("is in memory", complaint)
        self.client.restore("twin")
        self.daemon.wait_log('event=session_restored .*session="?twin')
        self.same(session, self.client.session(name="twin", layers=tokens.rows, format="kivi2"),
                  tokens)

    def test_shards(self):
        """Both shards of a session are saved at one count, and come back one by one."""
        tokens = Tokens(5, 600)
        shards = [self.client.session(tokens.rows, "oscar2", name="two", shard=i, shards=2)
                  for i in range(2)]
        feed(self.queue, [tokens, tokens], shards, [400, 400], attend=False)
        for s in shards:
            s.refresh()
        shards[0].save()
        feed(self.queue, [tokens, tokens], shards, [1, 1], attend=False)
        self.again()
        shards = [self.client.session(tokens.rows, "oscar2", name="two", shard=i, shards=2)
                  for i in range(2)]
        self.assertEqual([s.tokens for s in shards], [400, 400])
        feed(self.queue, [tokens, tokens], shards, [50, 50], attend=False)


class Tidy(Stored):
    """What the daemon does to what is saved by itself. With a cap of 16 MiB segments are of 2."""

    def alternate(self, tokens):
        """Sessions of 768 KiB with smaller ones in between, which are dropped again."""
        for i in range(10):
            for name, n in ((f"large{i}", 384), (f"small{i}", 128)):
                with self.client.session(tokens.rows, "f16", name=name) as session:
                    tokens.feed(self.queue, session, n, attend=False)
                    session.save()
        for i in range(10):
            self.daemon.ctl("session", "drop", f"small{i}")

    @long_emulated
    def test_room_for_a_save(self):
        """A save that meets the cap has what is dead between what is alive removed, and goes on."""
        self.again(storage_bytes="16mb")
        tokens = Tokens(12, 1500)
        self.alternate(tokens)
        before = self.daemon.ctl("storage", "status")
        self.assertGreater(before["dead_bytes"], 2 << 20)
        session = self.client.session(tokens.rows, "f16", name="new")
        tokens.feed(self.queue, session, 1280, attend=False)
        session.save()
        after = self.daemon.ctl("storage", "status")
        self.assertLess(after["dead_bytes"], before["dead_bytes"])
        self.assertLessEqual(after["physical_bytes"], 16 << 20)
        self.again(storage_bytes="16mb")
        a, b = (self.client.session(tokens.rows, "f16", name=f"large{i}") for i in (4, 5))
        self.same(a, b, tokens)
        self.assertEqual(self.client.session(name="new").tokens, 1280)

    @long_emulated
    def test_room_for_an_import(self):
        """So does an import."""
        tokens = Tokens(12, 1500)
        path = os.path.join(self.folder, "file")
        with Daemon(storage_dir=os.path.join(self.folder, "other")) as other:
            with other.client() as client, client.queue() as queue:
                session = client.session(tokens.rows, "f16", name="new")
                tokens.feed(queue, session, 1280, attend=False)
                session.save()
            other.ctl("session", "export", "new", path)
        self.again(storage_bytes="16mb")
        self.alternate(tokens)
        before = self.daemon.ctl("storage", "status")["dead_bytes"]
        self.daemon.ctl("session", "import", path)
        after = self.daemon.ctl("storage", "status")
        self.assertLess(after["dead_bytes"], before)
        self.assertLessEqual(after["physical_bytes"], 16 << 20)
        self.again(storage_bytes="16mb")
        self.assertEqual(self.client.session(name="new").tokens, 1280)

    @long_emulated
    def test_by_itself(self):
        self.again(storage_bytes="16mb")
        self.alternate(Tokens(13, 400))
        for i in range(0, 10, 2):
            self.daemon.ctl("session", "drop", f"large{i}")
        self.daemon.wait_log("event=compacted")
        self.again()
        for i in range(1, 10, 2):
            self.assertEqual(self.client.session(name=f"large{i}").tokens, 384)

    def test_used_at(self):
        """When a session was opened last is kept."""
        tokens = Tokens(14, 200)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 100, attend=False)
        session.save()
        for wait in (True, False):
            self.client.close()
            self.daemon.stop()
            path = os.path.join(self.folder, "store", "catalog.db")
            with contextlib.closing(sqlite3.connect(path)) as catalog, catalog:
                catalog.execute("UPDATE sessions SET used_at=1000")
            self.daemon = self.start()
            self.client = self.daemon.client()
            self.queue = self.client.queue()
            self.assertEqual(self.daemon.ctl("storage", "list")[0]["used_at"], 1000)
            self.client.session(name="it")
            end = time.monotonic() + BOUND
            while wait and self.daemon.ctl("storage", "list")[0]["used_at"] == 1000:
                self.assertLess(time.monotonic(), end)
        # Also of one that is found in memory, to the second.
        self.client.close()
        self.client = self.daemon.client()
        self.queue = self.client.queue()
        end, last = time.monotonic() + BOUND, 1000
        for opens in (False, True):  # the note of the open before comes first
            now = last
            while now <= last:
                self.assertLess(time.monotonic(), end)
                if opens:
                    self.client.session(name="it").close()
                now = self.daemon.ctl("storage", "list")[0]["used_at"]
            last = now
        self.again(kill=False)  # it is kept also if the daemon ends at once
        self.assertGreater(self.daemon.ctl("storage", "list")[0]["used_at"], 1000)

    def test_what_it_does(self):
        """`storage status` tells what is being saved."""
        tokens = Tokens(15, 1500)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 1500, attend=False)
        seen = threading.Event()

        def save():
            while not seen.is_set():
                self.daemon.ctl("session", "save", "it", "--again")
        saver = threading.Thread(target=save)
        saver.start()
        end = time.monotonic() + BOUND
        working = ""
        while not working and time.monotonic() < end:
            working = self.daemon.ctl("storage", "status")["working"]
        seen.set()
        saver.join()
        self.assertRegex(working, r"^saving \S+/it$")


class Killed(Stored):
    @long_emulated
    def test_while_it_saves(self):
        """kill -9 of a daemon that saves all the time: what it acknowledged is there, and right."""
        tokens = Tokens(6, 8000)
        chance = random.Random(7)
        session = self.client.session(tokens.rows, "oscar2", name="it")
        acknowledged = 0
        for _ in range(KILLS):
            kill = threading.Timer(chance.uniform(0.005, 0.12), self.daemon.process.kill)
            kill.start()
            tried = acknowledged
            try:
                while True:
                    tokens.feed(self.queue, session, 37 if session.tokens < 7000 else 1,
                                attend=False)
                    tried = session.tokens
                    session.save()
                    acknowledged = tried
            except kvq.Error as error:
                self.assertIn(error.code, (kvq.Code.E_DISCONNECTED, kvq.Code.E_PROTOCOL))
            kill.join()
            self.again()
            session = self.client.session(tokens.rows, "oscar2", name="it")
            self.assertGreaterEqual(session.tokens, acknowledged)
            self.assertLessEqual(session.tokens, tried)
            acknowledged = session.tokens
        self.assertGreater(acknowledged, 0)
        with self.client.session(tokens.rows, "oscar2") as twin:
            tokens.feed(self.queue, twin, acknowledged, attend=False)
            self.same(session, twin, tokens)
        self.assertEqual(self.daemon.ctl("storage", "verify")["damaged_bytes"], 0)


class Ends(Stored):
    """What an orderly end saves: many sessions in one transaction, whoever else cannot be saved."""

    def end(self):
        """Ends the daemon. What its log says of it, and the transactions that it took."""
        before = self.transactions()
        self.client.close()
        self.daemon.process.terminate()
        self.assertEqual(self.daemon.process.wait(BOUND), 0)
        self.daemon.reader.join(BOUND)
        return self.daemon.lines, self.transactions() - before

    def transactions(self):
        path = os.path.join(self.folder, "store", "catalog.db")
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as catalog:
            return catalog.execute("SELECT last_transaction FROM store").fetchone()[0]

    def make(self, n, tokens, name="s", count=None):
        sessions = [self.client.session(tokens.rows, "oscar2", name=f"{name}{i}")
                    for i in range(n)]
        feed(self.queue, [tokens] * n, sessions, [count or tokens.n] * n, attend=False)
        return sessions

    def test_many(self):
        """A transaction for each would be 200; all are there again, to the bit."""
        tokens = Tokens(17, 40, layers=2, q_heads=2, kv_heads=1, dim=64)
        for name in ("a", "b", "c", "d"):
            self.make(50, tokens, name)
        _, transactions = self.end()
        self.assertLessEqual(transactions, 4)
        self.again()
        self.assertEqual(len(self.daemon.ctl("storage", "list")), 200)
        first = read_all(self.queue, self.client.session(name="a0"), 2)
        for name in ("a49", "b7", "d49"):
            session = self.client.session(name=name)
            self.assertEqual(session.tokens, 40)
            self.assertTrue(read_all(self.queue, session, 2) == first)

    def test_some_cannot(self):
        """A namespace's limit stops who is above it. All others are saved, and each that is not is
        named with the reason."""
        tokens = Tokens(19, 1100)
        self.make(30, tokens, count=10)
        large = self.client.session(tokens.rows, "f16", name="a-large")
        tokens.feed(self.queue, large, 1100, attend=False)
        self.daemon.ctl("quota", "set", f"uid-{os.getuid()}", "--disk-bytes", "3mb")
        lines, transactions = self.end()
        self.assertLessEqual(transactions, 3)
        named = [x for x in lines if "event=not_saved" in x]
        self.assertEqual(len(named), 1, named)
        self.assertIn("a-large", named[0])
        self.assertIn("may keep", named[0])
        self.again()
        self.assertEqual(len(self.daemon.ctl("storage", "list")), 30)

    def test_shards_apart(self):
        """Shards at different counts can never be saved once no step begins: that is said, and the
        end does not wait for it."""
        tokens = Tokens(20, 600)
        shards = [self.client.session(tokens.rows, "oscar2", name="two", shard=i, shards=2,
                                      max_rollback=128) for i in range(2)]
        lonely = self.client.session(tokens.rows, "oscar2", name="lonely", shard=1, shards=2)
        feed(self.queue, [tokens, tokens], shards, [200, 200], attend=False)
        for s in shards:
            s.refresh()
        self.queue.truncate([shards[0]], 190)
        self.make(3, tokens, count=10)
        self.assertEqual(lonely.tokens, 0)
        lines, _ = self.end()
        named = [x for x in lines if "event=not_saved" in x]
        self.assertEqual(len(named), 1, named)
        self.assertIn("shard 0 of session", named[0])
        self.assertIn("at 190 tokens and shard 1 at 200", named[0])
        self.again()
        self.assertEqual(len(self.daemon.ctl("storage", "list")), 3)


class Trouble(Stored):
    def test_checked_after_a_kill(self):
        """All of the catalog is looked at after a kill, and not after an end in order."""
        tokens = Tokens(1, 40)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 10, attend=False)
        session.save()
        for kill, checked in (False, "no"), (True, "yes"), (False, "no"):
            self.again(kill=kill)
            self.daemon.wait_log("event=storage dir=.* checked=" + checked)
            session = self.client.session(tokens.rows, "f16", name="it", must_exist=True)
            tokens.feed(self.queue, session, 10, attend=False)
            session.save()

    def test_folder_with_blanks(self):
        """A folder's name does not read as further words of a line."""
        folder = self.folder
        store = os.path.join(folder, 'a "b" level=error')
        for created in ("yes", "no"):
            with Daemon(storage_dir=store) as daemon:
                told = daemon.wait_log("event=storage dir=.* created=" + created)
                self.assertIn(f'dir="{folder}/a \\"b\\" level=error" created', told)
            with open(os.path.join(store, "prefix.key"), "wb") as file:
                file.write(b"damaged")
        with Daemon(storage_dir=store) as daemon:
            self.assertIn(f'path="{folder}/', daemon.wait_log("event=prefix_key "))

    @unittest.skipUnless(os.geteuid() == 0, "needs root for a mount namespace")
    def test_folders_of_its_own(self):
        """The daemon exports into a folder that kvqctl sees otherwise, as with PrivateTmp=yes."""
        tokens = Tokens(1, 10)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 10, attend=False)
        session.save()
        hidden = os.path.join(self.folder, "hidden")
        os.mkdir(hidden)
        self.again(kill=False, within=("unshare", "--mount", "sh", "-c",
                                       f'mount -t tmpfs none {hidden} && exec "$0" "$@"'))
        status, out, complaint = self.daemon.ctl("session", "export", "it", f"{hidden}/it",
                                                 check=False)
        self.assertEqual((status, out), (1, ""), complaint)
        self.assertIn("is not there for you", complaint)
        status, _, complaint = self.daemon.ctl("session", "export", "it", f"{self.folder}/it",
                                               check=False)
        self.assertEqual((status, complaint), (0, ""))

    def segments(self):
        folder = os.path.join(self.folder, "store")
        return sorted(os.path.join(folder, x) for x in os.listdir(folder) if "seg" in x)

    def spoil(self, path, at):
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))

    def test_a_flipped_bit(self):
        """A session comes back up to what is good, and says so."""
        tokens = Tokens(7, 1500)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 1280, attend=False)
        before = read_all(self.queue, session, 2)
        session.save()
        other = self.client.session(tokens.rows, "oscar2", name="other")
        tokens.feed(self.queue, other, 300, attend=False)
        other.save()
        self.again()
        path = self.segments()[-1]
        with open(path, "rb") as file:  # the last but one page of layer 1
            data = file.read()
        block = tokens.k[1, 1100].astype("float16")[0].tobytes()
        self.assertGreater(data.find(block), 0)
        self.spoil(path, data.find(block))
        session = self.client.session(tokens.rows, "f16", name="it")
        if session.tokens == 1280:  # it is found when layer 1 is read
            with self.assertRaises(kvq.Error) as caught:
                read_all(self.queue, session, 2)
            self.assertEqual(caught.exception.code, kvq.Code.E_DAMAGED)
            session.close()
            session = self.client.session(tokens.rows, "f16", name="it")
        self.daemon.wait_log("event=storage_damaged")
        self.assertEqual(session.tokens, 1024)
        row = len(before) // 4 // 1280
        got = read_all(self.queue, session, 2)
        for i in range(4):
            self.assertTrue(got[i * row * 1024:(i + 1) * row * 1024] ==
                            before[i * row * 1280:i * row * 1280 + row * 1024])
        self.assertEqual(self.client.session(name="other").tokens, 300)
        status, out, _ = self.daemon.ctl("storage", "verify", check=False)
        self.assertEqual(status, 7)
        self.assertIn('"bad_blocks"', out)

    def test_shards_of_different_saves(self):
        """A catalog made anew finds an older form of a shard whose last manifest is damaged. Its
        K and V are not those that belong to the other shard's, so they are not put together."""
        tokens = Tokens(22, 600)
        shards = [self.client.session(tokens.rows, "f16", name="two", shard=i, shards=2)
                  for i in range(2)]
        for _ in range(2):
            feed(self.queue, [tokens, tokens], shards, [200, 200], attend=False)
            for s in shards:
                s.refresh()
            self.daemon.ctl("session", "save", "two")
        other = self.client.session(tokens.rows, "f16", name="other")
        tokens.feed(self.queue, other, 10, attend=False)
        other.save()  # it proves that the save before was whole
        self.daemon.kill()
        path = self.segments()[-1]
        with open(path, "rb") as file:
            self.spoil(path, file.read().rfind(b"two"))
        os.remove(os.path.join(self.folder, "store", "catalog.db"))
        self.again(kill=False)
        with self.assertRaises(kvq.Error) as caught:
            self.client.session(tokens.rows, "f16", name="two", shard=0, shards=2)
        self.assertEqual(caught.exception.code, kvq.Code.E_DAMAGED)
        self.assertIn("from different saves", str(caught.exception))
        self.assertEqual(self.daemon.ctl("session", "drop", "two", check=False)[0], 0)

    def test_damage_is_mended(self):
        """What is damaged on disk and still in memory is written again, behind the others."""
        tokens = Tokens(10, 1500)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 1280, attend=False)
        before = read_all(self.queue, session, 2)
        session.save()
        path = self.segments()[-1]
        with open(path, "rb") as file:  # page 1 of layer 1
            at = file.read().find(tokens.k[1, 200].astype("float16")[0].tobytes())
        self.assertGreater(at, 0)
        self.spoil(path, at)
        self.assertEqual(self.daemon.ctl("storage", "verify", check=False)[0], 7)
        self.daemon.ctl("session", "save", "it", "--again")
        self.again()
        session = self.client.session(tokens.rows, "f16", name="it")
        self.assertEqual(session.tokens, 1280)
        self.assertTrue(read_all(self.queue, session, 2) == before)

    def test_catalog(self):
        tokens = Tokens(8, 400)
        session = self.client.session(tokens.rows, "oscar2", name="it")
        tokens.feed(self.queue, session, 300, attend=False)
        session.save()
        self.client.close()
        self.daemon.stop()
        catalog = os.path.join(self.folder, "store", "catalog.db")
        with open(catalog, "r+b") as file:
            file.write(b"nonsense" * 100)
        self.daemon = self.start()
        self.daemon.wait_log("event=storage .*catalog")
        self.client = self.daemon.client()
        self.queue = self.client.queue()
        self.assertEqual(self.client.session(name="it").tokens, 300)

    @long_emulated
    def test_full(self):
        """A full store stops saving and says so; nothing is lost, the daemon goes on."""
        self.again(storage_bytes="20mb")
        tokens = Tokens(9, 9000)
        session = self.client.session(tokens.rows, "f16", name="it")
        saved = 0
        with self.assertRaises(kvq.Error) as caught:
            while session.tokens < 9000:
                tokens.feed(self.queue, session, 500, attend=False)
                session.save()
                saved = session.tokens
        self.assertEqual(caught.exception.code, kvq.Code.E_NO_SPACE)
        self.daemon.wait_log("event=storage_full")
        self.assertGreater(saved, 0)
        tokens.feed(self.queue, session, 1, attend=False)
        self.assertLessEqual(self.daemon.ctl("storage", "status")["physical_bytes"], 20 << 20)
        self.again(storage_bytes="20mb")
        self.assertEqual(self.client.session(name="it").tokens, saved)

    @long_emulated
    def test_cannot_be_saved(self):
        """Left to be saved, and too large for the storage: kept, told of once, in nobody's way."""
        self.again(storage_bytes="16mb")
        tokens = Tokens(16, 6500)
        with self.client.session(tokens.rows, "f16", name="large", on_detach="save") as session:
            tokens.feed(self.queue, session, 6500, attend=False)
        self.daemon.wait_log("event=storage_full")
        for i in range(4):  # of which each is found half a second after the one before
            name = f"small{i}"
            with self.client.session(tokens.rows, "f16", name=name, on_detach="save") as session:
                tokens.feed(self.queue, session, 10, attend=False)
            self.daemon.wait_log(f"event=session_saved .*{name}")
        self.assertEqual(sum("event=storage_full" in line for line in self.daemon.lines), 1)
        self.assertEqual(self.client.session(name="large").tokens, 6500)
        self.assertEqual(len(self.daemon.ctl("storage", "list")), 4)

    def test_cannot_be_deleted(self):
        """A drop says what it has left behind: the session is out of memory, and still on disk."""
        tokens = Tokens(21, 300)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 200, attend=False)
        session.save()
        resource.prlimit(self.daemon.process.pid, resource.RLIMIT_FSIZE, (0, 0))  # no file grows
        status, _, complaint = self.daemon.ctl("session", "drop", "it", check=False)
        self.assertNotEqual(status, 0)
        self.assertIn("out of memory, and what is saved of it is still on disk", complaint)
        self.assertEqual(self.daemon.status()["sessions"], 0)
        self.again()
        self.assertEqual(self.client.session(name="it", must_exist=True).tokens, 200)

    def test_namespace_that_is_gone(self):
        """What is saved of a namespace that the configuration has no more can be dropped, and an
        import into one that it never had is refused."""
        config, path = (os.path.join(self.folder, name) for name in ("config", "file"))
        with open(config, "w", encoding="ascii") as file:
            file.write(f"[namespace team]\nuids = {os.getuid()}\n")
        self.again(config=config)
        tokens = Tokens(22, 10)
        with self.client.session(tokens.rows, "f16", name="it", ns="team") as session:
            tokens.feed(self.queue, session, 10, attend=False)
            session.save()
        of_team = ("--namespace", "team")
        self.daemon.ctl("session", "export", "it", path, *of_team)
        self.again()
        status, _, complaint = self.daemon.ctl("session", "import", path, "--as", "x", check=False)
        self.assertEqual(status, 5, complaint)
        self.assertRegex(complaint, 'no namespace "team".*import it into another one')
        self.assertEqual([s["name"] for s in self.daemon.ctl("storage", "list")], ["it"])
        status, _, complaint = self.daemon.ctl("session", "drop", "no", *of_team, check=False)
        self.assertEqual(status, 5)
        self.assertIn('there is no namespace "team"', complaint)
        self.assertEqual(self.daemon.ctl("session", "drop", "it", *of_team), {"dropped": "it"})
        self.assertEqual(self.daemon.ctl("storage", "list"), [])
        self.daemon.ctl("session", "import", path, "--namespace", f"uid-{os.getuid()}")
        self.assertEqual(self.client.session(name="it").tokens, 10)

    def test_refusals(self):
        tokens = Tokens(10, 10)
        self.fails(kvq.Code.E_NO_SESSION, self.client.restore, "none")
        unnamed = self.client.session(tokens.rows, "f16")
        self.fails(kvq.Code.E_INVALID, unnamed.save)
        status, _, _ = self.daemon.ctl("session", "save", "none", check=False)
        self.assertEqual(status, 5)
        self.client.close()
        self.daemon.stop()
        blocked = os.path.join(self.folder, "store", "catalog.db")
        shutil.rmtree(os.path.join(self.folder, "store"))
        os.makedirs(blocked)  # a folder where a file must be
        daemon = Daemon(ready=False, storage_dir=os.path.join(self.folder, "store"))
        self.assertEqual(daemon.process.wait(60), 1)
        daemon.reader.join(60)
        self.assertIn("storage_dir", "\n".join(daemon.lines))
        daemon.process.stderr.close()
        shutil.rmtree(daemon.directory, ignore_errors=True)
        self.daemon = Daemon()
        self.client = self.daemon.client()
        self.queue = self.client.queue()
        named = self.client.session(tokens.rows, "f16", name="it")
        self.fails(kvq.Code.E_UNSUPPORTED, named.save)
        self.fails(kvq.Code.E_UNSUPPORTED, self.client.session, tokens.rows, "f16", name="x",
                   on_detach="save")

    def test_offline(self):
        tokens = Tokens(11, 400)
        session = self.client.session(tokens.rows, "oscar2", name="it")
        tokens.feed(self.queue, session, 300, attend=False)
        session.save()
        self.client.close()
        self.daemon.stop()
        where = os.path.join(self.folder, "store")
        code = os.spawnv(os.P_WAIT, os.path.join(BIN, "kvqctl"),
                         ["kvqctl", "storage", "verify", "--json", "--offline", where])
        self.assertEqual(code, 0)
        # What opening a copy has to give up counts, though nothing of it is left to be read.
        for how in ((), ("--json",)):
            copy = shutil.copytree(where, os.path.join(self.folder, f"copy{len(how)}"))
            for name in os.listdir(copy):
                if name.startswith("catalog.db"):
                    os.remove(os.path.join(copy, name))
                elif name.startswith("segment"):
                    with open(os.path.join(copy, name), "r+b") as file:
                        file.write(b"x")
            for status in (7, 0):  # the second time there is nothing that could be lost
                done = subprocess.run([os.path.join(BIN, "kvqctl"), "storage", "verify", *how,
                                       "--offline", copy], capture_output=True, text=True,
                                      timeout=BOUND)
                self.assertEqual(done.returncode, status, done.stdout)
                self.assertEqual("what was in them is lost" in done.stdout, status == 7)
        os.mkdir(empty := os.path.join(self.folder, "empty"))
        for wrong in (empty, os.path.join(self.folder, "stroe")):
            done = subprocess.run([os.path.join(BIN, "kvqctl"), "storage", "verify", "--offline",
                                   wrong], capture_output=True, text=True, timeout=BOUND)
            self.assertNotEqual(done.returncode, 0, done.stdout)
            self.assertIn("no store is there", done.stderr)
        self.assertEqual(os.listdir(empty), [])
        self.assertFalse(os.path.exists(os.path.join(self.folder, "stroe")))
        self.daemon = self.start()
        self.client = self.daemon.client()
        self.queue = self.client.queue()
