# SPDX-License-Identifier: Apache-2.0
"""A name has one order of events, in memory and in the store together: whoever drops, opens and
saves it at the same time, what was acknowledged holds, also after kill -9."""
import os
import subprocess
import threading
import time

from e2e_rig import BACKEND, BIN, BOUND, Tokens, feed, kvq, long_emulated
from e2e_storage import FULL, Stored

MANY = 1500 if BACKEND == "cpu" else 200  # the order of names is the same on a GPU
ROUNDS = int(os.environ.get("KVQ_ROUNDS") or (MANY if FULL else 60))


class Names(Stored):
    def drop_while_opening(self, name, tokens):
        """Drops a saved session while another client opens it again and again. Returns what that
        client has in the end, opened after the drop was acknowledged."""
        session = self.client.session(tokens.rows, "f16", name=name)
        tokens.feed(self.queue, session, 128, attend=False)
        session.save()
        dropped = threading.Event()

        def drop():
            try:
                session.drop()
            finally:
                dropped.set()
        dropper = threading.Thread(target=drop)
        with self.daemon.client() as other:
            dropper.start()
            while not dropped.is_set():
                try:
                    other.session(tokens.rows, "f16", name=name).close()
                except kvq.Error as error:  # it has a writer as yet
                    self.assertEqual(error.code, kvq.Code.E_BUSY, error.text)
            dropper.join(BOUND)
        return self.client.session(tokens.rows, "f16", name=name)

    @long_emulated
    def test_drops_beside_opens(self):
        """What is opened after an acknowledged drop is new, or what others made of it since; a save
        of it that was acknowledged is there after kill -9."""
        tokens = Tokens(1, 400)
        saved = {}
        for i in range(ROUNDS):
            session = self.drop_while_opening(f"it{i}", tokens)
            self.assertEqual(session.tokens, 0, "a session that was dropped is there again")
            tokens.feed(self.queue, session, 1 + i % 200, attend=False)
            session.save()
            saved[f"it{i}"] = session.tokens
            session.close()
        self.again()
        stored = {x["name"]: x["tokens"] for x in self.daemon.ctl("storage", "list")}
        self.assertEqual(stored, saved)
        for name, n in list(saved.items())[:10]:
            self.assertEqual(self.client.session(name=name, must_exist=True).tokens, n)

    def test_long_names(self):
        """What is called by a name that is longer than names can be is refused: its front is the
        name of another, which stays."""
        tokens, name = Tokens(1, 400), "n" * 127
        session = self.client.session(tokens.rows, "f16", name=name)
        tokens.feed(self.queue, session, 128, attend=False)
        session.save()
        session.close()
        own = f"uid-{os.geteuid()}"
        for words in (("drop", name + "MORE"), ("restore", name + "MORE"), ("save", name + "MORE"),
                      ("drop", name, "--namespace", own + "n" * 128)):
            status, _, complaint = self.daemon.ctl("session", *words, check=False)
            self.assertNotEqual(status, 0)
            self.assertIn("127 at most", complaint)
        self.again()
        self.assertEqual([(x["name"], x["tokens"]) for x in self.daemon.ctl("storage", "list")],
                         [(name, 128)])
        self.assertEqual(self.client.session(name=name, must_exist=True).tokens, 128)

    def begin(self, *arguments):
        """A command that may wait: its process."""
        return subprocess.Popen([os.path.join(BIN, "kvqctl"), "--runtime-dir",
                                 self.daemon.directory, *arguments, "--json"],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def uneven(self, client, queue, tokens):
        """A session whose shards stand at different counts, so that it cannot be saved."""
        shards = [client.session(tokens.rows, "f16", name="uneven", shard=i, shards=2,
                                 max_rollback=64) for i in range(2)]
        feed(queue, [tokens, tokens], shards, [100, 100], attend=False)
        queue.truncate(shards[:1], 90)
        return shards

    @long_emulated
    def test_saves_beside_drops(self):
        """A save that was acknowledged is not undone by a drop that was asked for before it, also
        if one save after the other waits."""
        tokens = Tokens(2, 400)
        with self.daemon.client() as other, other.queue() as queue:
            shards = self.uneven(other, queue, tokens)
            session = self.client.session(tokens.rows, "f16", name="it")
            tokens.feed(self.queue, session, 128, attend=False)
            session.save()
            commands = [self.begin("session", "save", "uneven")]
            self.wait_queued(commands, 1)
            commands.append(self.begin("session", "save", "it"))
            self.wait_queued(commands, 2)
            commands.append(self.begin("session", "drop", "it"))
            self.daemon.wait_log('event=session_dropped .*session="?it')
            session = self.client.session(tokens.rows, "f16", name="it")
            tokens.feed(self.queue, session, 17, attend=False)
            queue.truncate(shards[1:], 90)
            session.save()
            for command in commands:
                command.communicate(timeout=BOUND)
        self.again()
        stored = {x["name"]: x["tokens"] for x in self.daemon.ctl("storage", "list")}
        self.assertEqual(stored.get("it"), 17)

    def ends_beside(self, what):
        """Whether what() can end while somebody waits to save a session that cannot be saved. That
        somebody gives up in time, so a slow machine has several tries."""
        for _ in range(5):
            waits = self.begin("session", "save", "uneven")
            self.wait_queued([waits], 1)
            what()
            beside = waits.poll() is None
            _, complaint = waits.communicate(timeout=BOUND)
            self.assertIn("shards stand at different counts", complaint)
            if beside:
                return True
        return False

    @long_emulated
    def test_a_save_that_waits_alone(self):
        """A session that cannot be saved as long as its client likes keeps nobody waiting: others
        save, drop, park and fetch meanwhile."""
        tokens = Tokens(4, 400)

        def make():
            session = self.client.session(tokens.rows, "f16", name="it")
            tokens.feed(self.queue, session, 128, attend=False)
            return session

        def save_and_drop():
            session = make()
            session.save()
            session.drop()

        def park_and_drop():
            session = make()
            session.park()
            tokens.feed(self.queue, session, 1, attend=False)
            session.drop()
        with self.daemon.client() as other, other.queue() as queue:
            shards = self.uneven(other, queue, tokens)
            for what in (save_and_drop, park_and_drop):
                self.assertTrue(self.ends_beside(what), "others waited for it")
            queue.truncate(shards[1:], 90)  # the daemon's end need not wait for it

    def wait_queued(self, commands, n):
        """Waits until so many are being saved, or wait for that; or the last command has ended."""
        end = time.monotonic() + BOUND
        while commands[-1].poll() is None:
            status = self.daemon.ctl("storage", "status")
            if status["queued"] + (status["working"] != "") >= n:
                return
            self.assertLess(time.monotonic(), end)

    @long_emulated
    def test_imports_beside_opens(self):
        """What is in memory and what is stored are one session, also if somebody imports another
        under its name: who is in memory first stays."""
        tokens = Tokens(3, 400)
        files = {}
        for n in (100, 200):
            session = self.client.session(tokens.rows, "f16", name=f"of{n}")
            tokens.feed(self.queue, session, n, attend=False)
            session.save()
            files[n] = os.path.join(self.folder, f"{n}.kvq")
            self.daemon.ctl("session", "export", f"of{n}", files[n])
        self.daemon.ctl("session", "import", files[100], "--as", "it")
        now = 100
        for i in range(max(6, ROUNDS // 10)):
            n = (200, 100)[i % 2]
            result = []
            importer = threading.Thread(target=lambda n=n, result=result: result.append(
                self.daemon.ctl("session", "import", files[n], "--as", "it", "--replace",
                                check=False)))
            importer.start()
            session = None
            while importer.is_alive():
                if session:
                    session.close()
                session = self.client.session(name="it", on_detach="drop", take_over=True)
            importer.join(BOUND)
            status, _, complaint = result[0]
            if status:
                self.assertIn("is in memory", complaint)
            else:
                now = n
            session.close()
            self.assertEqual({x["name"]: x["tokens"] for x in self.daemon.ctl("storage", "list")
                              if x["name"] == "it"}, {"it": now})
            self.assertEqual(self.client.session(name="it", must_exist=True).tokens, now)
            self.daemon.ctl("session", "drop", "it")
            self.daemon.ctl("session", "import", files[now], "--as", "it")
