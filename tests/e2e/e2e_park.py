# SPDX-License-Identifier: Apache-2.0
"""Sessions that go to disk while engines have them open, and come back when they are used."""
import contextlib
import os
import resource
import sqlite3
import time

import numpy as np

from e2e_rig import BOUND, Child, Tokens, emulated, feed, kvq, long_emulated, read_all
from e2e_storage import Stored


class Parks(Stored):
    def park(self, session):
        session.park()
        self.assertEqual(session.info()["tier"], "disk")

    def fed(self, tokens, format, n, **options):
        session = self.client.session(tokens.rows, format, **options)
        tokens.feed(self.queue, session, n, attend=False)
        return session

    @long_emulated
    def test_there_and_back(self):
        """Open and idle, named and not: afterwards the same bits, and the same memory is free."""
        tokens = Tokens(1, 1500)
        tried = (("f16", "it"), ("oscar2", None), ("ott2", "it"), ("kivi2", None))
        for format, name in emulated(tried[1:3], tried):
            twin = self.fed(tokens, format, 1000)
            alone = self.daemon.status()["pool_used_bytes"]
            session = self.fed(tokens, format, 1000, name=name)
            self.park(session)
            self.assertLessEqual(self.daemon.status()["pool_used_bytes"], alone)
            self.assertEqual(session.info()["packed_bytes"], 0)
            self.same(session, twin, tokens)
            self.assertNotEqual(session.info()["tier"], "disk")
            self.park(session)
            session.prefetch()
            self.same(session, twin, tokens)
            session.drop()
            twin.drop()
        self.daemon.wait_log("event=session_parked")
        self.daemon.wait_log("event=session_fetched")
        self.assertEqual(self.daemon.ctl("storage", "list"), [])

    def test_other_engines(self):
        """A reader of another process is told nothing but the tokens; administration shows it."""
        tokens = Tokens(2, 900)
        session = self.fed(tokens, "oscar2", 700, name="it")
        before = read_all(self.queue, session, 2)
        reader = Child("reads", self.daemon.directory, "it", 2)
        self.assertEqual(reader.hear(), "ready")
        moved = self.daemon.ctl("session", "park", "it")
        self.assertEqual((moved["phase"], moved["place"]), ("done", "disk"))
        self.assertGreater(moved["moved_bytes"], 0)
        shown = self.daemon.ctl("session", "show", "it")
        self.assertEqual((shown["tier"], shown["tokens"]), ("disk", 700))
        reader.tell()
        self.assertEqual(reader.hear(), before.hex())
        reader.end()
        self.assertNotEqual(self.daemon.ctl("session", "show", "it")["tier"], "disk")
        self.daemon.ctl("session", "park", "it")
        back = self.daemon.ctl("session", "prefetch", "it")
        self.assertEqual((back["phase"], back["status"]), ("done", 0))
        self.assertNotEqual(session.info()["tier"], "disk")
        self.assertTrue(read_all(self.queue, session, 2) == before)

    def test_who_stays(self):
        tokens = Tokens(3, 400)
        session = self.fed(tokens, "oscar2", 300, name="it")
        with self.queue.step([session], [1]) as step:
            self.fails(kvq.Code.E_BUSY, session.park, text="step of client")
            for layer in range(2):
                step.append(layer, tokens.k[layer, 300:301], tokens.v[layer, 300:301])
        session.pin()
        self.assertEqual(session.info()["pinned"], 1)
        self.fails(kvq.Code.E_BUSY, session.park, text="pinned")
        status, _, complaint = self.daemon.ctl("session", "park", "it", check=False)
        self.assertNotEqual(status, 0)
        self.assertIn("unpin", complaint)
        self.daemon.ctl("session", "unpin", "it")
        self.park(session)
        self.daemon.ctl("session", "pin", "it")  # which brings it back
        self.daemon.wait_log("event=session_fetched")
        self.assertEqual(self.daemon.ctl("session", "park", "none", check=False)[0], 5)

    def test_in_own_context(self):
        """An engine that attends by itself takes a parked session in, and it then stays."""
        tokens = Tokens(13, 900)
        session, twin = (self.fed(tokens, "oscar2", 600, place="host") for _ in range(2))
        self.park(session)
        with self.queue.local(max_tokens=1024) as local:
            local.add(session)
            k, v, q = (self.client.array((100, *x.shape[2:]))
                       for x in (tokens.k, tokens.v, tokens.q))
            for to, x in zip((k, v, q), (tokens.k, tokens.v, tokens.q)):
                to[...] = x[0, 600:700]
            with local.step([session], 100) as mine, self.queue.step([twin], 100) as step:
                for layer in range(2):
                    out, _ = mine.attend(layer, q, k=k, v=v)
                    want, _ = step.append_attend(layer, k, v, q)
                    self.assertTrue(out.tobytes() == want.tobytes())
            if local.why is None:
                self.fails(kvq.Code.E_BUSY, session.park, text="own context")
            local.remove(session)
        self.park(session)
        self.same(session, twin, tokens)

    def test_groups(self):
        """Both shards or none, and both come back."""
        tokens = Tokens(4, 900)
        shards = [self.client.session(tokens.rows, "oscar2", name="group", shard=i, shards=2)
                  for i in range(2)]
        feed(self.queue, [tokens, tokens], shards, [700, 700], attend=False)
        before = [read_all(self.queue, s, 2) for s in shards]
        step = self.queue.step([shards[1]], [1])
        self.fails(kvq.Code.E_BUSY, shards[0].park, text="step")
        step.abort()
        self.park(shards[0])
        self.assertEqual(shards[1].info()["tier"], "disk")
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)
        self.assertTrue([read_all(self.queue, s, 2) for s in shards] == before)
        self.park(shards[1])
        feed(self.queue, [tokens, tokens], shards, [100, 100], attend=False)
        self.assertEqual([s.info()["tokens"] for s in shards], [800, 800])

    def test_saved_before(self):
        """What is saved already is not written again to be parked, with one shard or two."""
        tokens = Tokens(18, 900)
        for n in (1, 2):
            shards = [self.client.session(tokens.rows, "oscar2", name=f"of-{n}", shard=i, shards=n)
                      for i in range(n)]
            feed(self.queue, [tokens] * n, shards, [700] * n, attend=False)
            before = [read_all(self.queue, s, 2) for s in shards]
            self.daemon.ctl("session", "save", f"of-{n}")
            saved = self.daemon.ctl("storage", "status")
            self.park(shards[0])
            parked = self.daemon.ctl("storage", "status")
            for what in ("blocks", "live_bytes", "dead_bytes"):
                self.assertEqual(parked[what], saved[what])
            self.assertTrue([read_all(self.queue, s, 2) for s in shards] == before)

    @long_emulated
    def test_killed(self):
        """The daemon dies while they are parked: one with a name comes back from disk, of one
        without nothing is left."""
        tokens = Tokens(5, 900)
        session = self.fed(tokens, "oscar2", 700, name="it")
        unnamed = self.fed(tokens, "oscar2", 700)
        before = read_all(self.queue, session, 2)
        self.park(session)
        self.park(unnamed)
        self.assertEqual(self.daemon.ctl("storage", "status")["sessions"], 2)
        self.assertEqual(len(self.daemon.ctl("storage", "list")), 1)
        number = f"#{unnamed.info()['id']}"
        file = os.path.join(self.folder, "file")
        self.assertEqual(self.daemon.ctl("session", "export", number, file, check=False)[0], 1)
        self.daemon.ctl("session", "export", "it", file)
        self.assertEqual(
            self.daemon.ctl("session", "import", file, "--as", "#9", check=False)[0], 1)
        self.daemon.kill()  # before the client leaves
        self.again()
        self.daemon.wait_log("unnamed_sessions_deleted=1")
        self.assertEqual(self.daemon.ctl("storage", "status")["sessions"], 1)
        session = self.client.session(tokens.rows, "oscar2", name="it", must_exist=True)
        self.assertTrue(read_all(self.queue, session, 2) == before)

    def stored(self):
        return self.daemon.ctl("storage", "status")["sessions"]

    def wait_nothing_stored(self):
        end = time.monotonic() + BOUND
        while self.stored() and time.monotonic() < end:
            pass
        self.assertEqual(self.stored(), 0)

    def test_engine_is_killed(self):
        """What is stored of an unnamed session goes with the engine that had it."""
        engine = Child("parks", self.daemon.directory, 300)
        client = engine.hear()
        self.assertEqual(self.stored(), 1)
        engine.kill()
        self.daemon.wait_gone(client)
        self.wait_nothing_stored()
        self.assertEqual(self.daemon.status()["sessions"], 0)

    @long_emulated
    def test_closed_and_opened_again(self):
        """What is to be forgotten is not there, however soon somebody looks."""
        tokens = Tokens(12, 300)
        for _ in range(10):
            session = self.fed(tokens, "oscar2", 200, name="it", on_detach="drop")
            self.park(session)
            session.close()
            session = self.client.session(tokens.rows, "oscar2", name="it", on_detach="drop")
            self.assertEqual(session.tokens, 0)
            session.close()
        self.wait_nothing_stored()

    def test_not_deleted(self):
        """The disk fails while what is stored is to go: nobody gets it back, and it goes later."""
        tokens = Tokens(12, 300)
        session = self.fed(tokens, "oscar2", 200, name="it", on_detach="drop")
        self.park(session)
        process = self.daemon.process.pid
        before = resource.prlimit(process, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        session.close()
        self.daemon.wait_log("event=not_forgotten")
        self.assertEqual(self.stored(), 1)
        session = self.client.session(tokens.rows, "oscar2", name="it", on_detach="drop")
        self.assertEqual(session.tokens, 0)
        session.close()
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)
        self.wait_nothing_stored()

    def test_deleted_before_the_end(self):
        """Parked sessions with names that are to be dropped do not come back with the next
        daemon, however many end with this one."""
        tokens = Tokens(13, 140)
        sessions = [self.fed(tokens, "f16", 140, name=f"it-{i}", on_detach="drop")
                    for i in range(40)]
        for session in sessions:
            self.park(session)
        self.assertEqual(self.stored(), len(sessions))
        self.again(kill=False)
        self.assertEqual(self.stored(), 0)

    def exported(self, tokens, name="it", **options):
        """A file of a session that was written to park it, and the session."""
        session = self.fed(tokens, "oscar2", 200, name=name, **options)
        self.park(session)
        file = os.path.join(self.folder, "file")
        self.daemon.ctl("session", "export", name, file, "--replace")
        return file, session

    def test_imported_after_a_drop(self):
        """What is exported, dropped and imported stays, under its name or another, also when the
        daemon deletes at its end what was left to be deleted."""
        tokens = Tokens(14, 300)
        for name in ("it", "other"):
            file, session = self.exported(tokens)
            session.drop()
            self.daemon.ctl("session", "import", file, "--as", name)
            self.again(kill=False)
            self.assertEqual([e["name"] for e in self.daemon.ctl("storage", "list")], [name])
            session = self.client.session(name=name, must_exist=True)
            self.assertEqual(session.tokens, 200)
            session.drop()

    def test_imported_after_a_close(self):
        """The copy of a session that was closed has just been deleted: one that is imported then
        is there, and no open makes an empty session in its place."""
        tokens = Tokens(15, 300)
        for name in ("it", "other"):
            file, session = self.exported(tokens, on_detach="drop")
            session.close()
            end = time.monotonic() + BOUND
            while self.stored() and time.monotonic() < end:
                pass
            self.assertEqual(self.stored(), 0)
            self.daemon.ctl("session", "import", file, "--as", name)
            session = self.client.session(tokens.rows, "oscar2", name=name)
            self.assertEqual(session.tokens, 200)
            session.drop()

    def test_damage(self):
        """A block is damaged on disk: who uses it is told, and an open brings back the rest."""
        tokens = Tokens(6, 1500)
        session = self.fed(tokens, "f16", 1280, name="it")
        self.park(session)
        folder = os.path.join(self.folder, "store")
        path = max(os.path.join(folder, x) for x in os.listdir(folder) if "seg" in x)
        with open(path, "r+b") as file:  # the last but one page of layer 1
            at = file.read().find(tokens.k[1, 1100].astype("float16")[0].tobytes())
            self.assertGreater(at, 0)
            file.seek(at)
            file.write(b"\xff")
        self.fails(kvq.Code.E_DAMAGED, read_all, self.queue, session, 2)
        self.daemon.wait_log("event=session_fetched .*not back")
        self.fails(kvq.Code.E_DAMAGED, session.info, text="open the session again")
        session.close()
        session = self.client.session(name="it", must_exist=True)
        self.assertEqual(session.tokens, 1024)

    @long_emulated
    def test_damage_is_seen_before(self):
        """Saved, damaged since, and still in memory: parking writes it again."""
        tokens = Tokens(7, 1500)
        session = self.fed(tokens, "f16", 1280, name="it")
        before = read_all(self.queue, session, 2)
        session.save()
        folder = os.path.join(self.folder, "store")
        path = max(os.path.join(folder, x) for x in os.listdir(folder) if "seg" in x)
        with open(path, "r+b") as file:
            at = file.read().find(tokens.k[1, 200].astype("float16")[0].tobytes())
            file.seek(at)
            file.write(b"\xff")
        self.assertEqual(self.daemon.ctl("storage", "verify", check=False)[0], 7)
        self.park(session)
        self.assertTrue(read_all(self.queue, session, 2) == before)

    @long_emulated
    def test_read_back(self):
        """Without a name what is on disk is the only copy: it is read back before memory is given
        up. One bit of each kind of record is flipped while the session is in memory again; parked
        once more, nothing is lost."""
        tokens = Tokens(17, 1500)
        session = self.client.session(tokens.rows, "innerq-hybrid", model="m")
        ids = np.arange(1280)
        with self.queue.step([session], [1280], ids=ids) as step:
            for layer in range(2):
                step.append(layer, tokens.k[layer, :1280], tokens.v[layer, :1280])
        before = read_all(self.queue, session, 2)
        self.park(session)
        self.assertTrue(read_all(self.queue, session, 2) == before)
        folder = os.path.join(self.folder, "store")
        path = max(os.path.join(folder, x) for x in os.listdir(folder) if "seg" in x)
        with contextlib.closing(sqlite3.connect(f"file:{folder}/catalog.db?mode=ro",
                                                uri=True)) as catalog:
            blocks = catalog.execute("SELECT e.kind, min(b.offset) FROM entries e JOIN blocks b "
                                     "ON e.block=b.id GROUP BY e.kind").fetchall()
        self.assertEqual(sorted(kind for kind, _ in blocks), [1, 2, 3, 4])
        for _, at in blocks:
            with open(path, "r+b") as file:
                file.seek(at + 64 + 5)  # behind the record's head
                byte = file.read(1)
                file.seek(at + 64 + 5)
                file.write(bytes([byte[0] ^ 1]))
        self.park(session)
        self.assertTrue(read_all(self.queue, session, 2) == before)

    @long_emulated
    def test_no_space(self):
        """The disk is full: it stays in memory, and works on."""
        self.again(storage_bytes="20mb")
        tokens = Tokens(8, 9000)
        session = self.fed(tokens, "f16", 8800)
        self.fails(kvq.Code.E_NO_SPACE, session.park)
        self.assertNotEqual(session.info()["tier"], "disk")
        tokens.feed(self.queue, session, 1)
        self.daemon.wait_log("event=storage_full")
        small = self.fed(tokens, "f16", 300)
        self.park(small)
        tokens.feed(self.queue, small, 1)

    def test_no_storage(self):
        self.client.close()
        self.daemon.stop()
        self.daemon = type(self.daemon)()
        self.client = self.daemon.client()
        self.queue = self.client.queue()
        session = self.client.session(Tokens(9, 10).rows, "f16")
        self.fails(kvq.Code.E_UNSUPPORTED, session.park, text="storage_dir")
