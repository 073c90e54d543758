# SPDX-License-Identifier: Apache-2.0
"""kvqctl --dry-run: it says what would go, and nothing goes; then the command takes just that."""
import json
import os
import re
import subprocess

from e2e_rig import BIN, BOUND, Tokens, long_emulated
from e2e_prefix import Engine
from e2e_remote import Remote
from e2e_storage import Stored

OWN = f"uid-{os.geteuid()}"
ROWS = Tokens(1, 1).rows


def told(answer):
    """The parts of a dry run's answer that name things."""
    assert answer["dry_run"] is True
    assert answer["bytes"] == sum(w["bytes"] for w in answer["would"])
    return [(w["action"], w["what"], w["namespace"], w["name"]) for w in answer["would"]]


class DryRun(Stored):
    def state(self):
        """All that a command could take away."""
        lists = [("session", "list"), ("storage", "list"), ("quota", "list"), ("client", "list")]
        changing = ("idle_ms", "keep_ms", "connected_ms", "used_at", "last_ms")
        return [[{k: v for k, v in row.items() if k not in changing}
                 for row in self.daemon.ctl(*words)] for words in lists]

    def dry(self, *arguments):
        """What a dry run tells. Nothing has changed, in either form of the answer."""
        before = self.state()
        answer = self.daemon.ctl(*arguments, "--dry-run")
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory,
                               *arguments, "--dry-run"], capture_output=True, text=True,
                              timeout=BOUND)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.state(), before)
        lines = done.stdout.splitlines()
        self.assertEqual(lines[-1], "this was a dry run: nothing was done")
        self.assertEqual(len(lines), 1 + max(1, len(answer["would"])))
        for line, would in zip(lines, answer["would"]):
            self.assertIn(f"would {would['action']} ", line)
            self.assertIn(would["name"], line)
            self.assertEqual(would["action"].startswith("not "), ", and fail: " in line)
            self.assertNotIn(": 0 B, and", line)
        return answer

    def make(self, name, n=128, **options):
        session = self.client.session(ROWS, "f16", name=name, **options)
        Tokens(1, n).feed(self.queue, session, n, attend=False)
        return session

    def test_drop(self):
        """A session in memory, what is saved of it, and one that is saved alone."""
        self.make("it").save()
        for shard in range(2):
            self.client.session(ROWS, "f16", name="sharded", shard=shard, shards=2).close()
        memory = ("drop", "session", OWN, "it")
        saved = ("drop", "saved session", OWN, "it")
        answer = self.dry("session", "drop", "it")
        self.assertEqual(told(answer), [memory, saved])
        self.assertGreaterEqual(answer["would"][0]["bytes"], 128 * 2 * 2 * 128 * 2)
        self.assertIn("128 tokens; client ", answer["would"][0]["note"])
        self.assertEqual(self.daemon.ctl("session", "drop", "i", "--dry-run", check=False)[0], 5)
        self.assertEqual(told(self.dry("session", "drop", "sharded")),
                         [("drop", "session", OWN, f"sharded {i}/2") for i in range(2)])
        self.again()
        answer = self.dry("session", "drop", "it")
        self.assertEqual(told(answer), [saved])
        self.assertEqual(answer["bytes"], self.daemon.ctl("storage", "list")[0]["bytes"])
        self.assertEqual(self.daemon.ctl("session", "drop", "it"), {"dropped": "it"})
        status, out, _ = self.daemon.ctl("session", "drop", "it", "--dry-run", check=False)
        self.assertEqual((status, out), (5, ""))

    def test_drop_of_many(self):
        """All shards go and what is saved of them, also where one is named by its number."""
        shards = [self.client.session(ROWS, "f16", name="it", shard=i, shards=8) for i in range(8)]
        self.daemon.ctl("session", "save", "it")
        goes = [("drop", "session", OWN, f"it {i}/8") for i in range(8)]
        saved = [("drop", "saved session", OWN, "it")] * 8
        self.assertEqual(told(self.dry("session", "drop", "it")), goes + saved)
        number = f"#{shards[5].info()['id']}"
        self.assertEqual(told(self.dry("session", "drop", number)), goes + saved)
        self.assertEqual(self.daemon.ctl("session", "drop", "#99", "--dry-run", check=False)[0], 5)
        self.daemon.ctl("session", "drop", number)
        self.assertEqual((self.daemon.ctl("session", "list"), self.daemon.ctl("storage", "list")),
                         ([], []))

    def test_end(self):
        """What a daemon that ends saves and loses is what it said it would."""
        self.make("written").save()
        self.make("unwritten")
        nameless = self.make(None)  # until it is closed
        lost = ("lose", "session", OWN)
        for words in (("drain",), ("shutdown",)):
            answer = told(self.dry(*words))
            self.assertIn(("save", "session", OWN, "unwritten"), answer)
            self.assertEqual([w[:3] for w in answer if w[3] != "unwritten"], [lost])
        answer = told(self.dry("shutdown", "--now"))
        self.assertEqual([w[:3] for w in answer], [lost, lost])
        nameless.close()
        self.daemon.ctl("drain")
        self.daemon.stop()
        self.daemon = self.start()
        self.assertEqual(sorted(e["name"] for e in self.daemon.ctl("storage", "list")),
                         ["unwritten", "written"])

    def test_end_without_saving(self):
        self.daemon.stop()
        self.daemon = self.start(save_on_drain="no")
        self.client = self.daemon.client()
        self.queue = self.client.queue()
        self.make("unwritten")
        for words in (("drain",), ("shutdown",)):
            self.assertEqual(told(self.dry(*words)), [("lose", "session", OWN, "unwritten")])

    @long_emulated
    def test_end_of_a_full_storage(self):
        """What it may have no room for is told, and what it cannot write at all is lost."""
        self.again(storage_bytes="16mb")
        self.make("small")
        large = self.make("large", 13000)
        would = {w["name"]: w for w in self.dry("drain")["would"]}
        self.assertEqual({w["action"] for w in would.values()}, {"save"})
        self.assertNotIn("may be lost", would["small"]["note"])
        self.assertRegex(would["large"]["note"], "it may be lost: the storage has room for [0-9.]+")
        large.close()
        self.assertEqual(self.daemon.ctl("drain", check=False)[0], 1)
        self.daemon.stop()
        self.assertTrue([x for x in self.daemon.lines if re.search("not_saved .*large", x)])
        if os.geteuid() != 0:
            return
        store = os.path.join(self.folder, "store")
        script = (f"mount --bind {store} {store} && mount -o remount,ro,bind {store} && "
                  "exec \"$0\" \"$@\"")
        self.daemon = self.start(within=("unshare", "--mount", "sh", "-c", script))
        self.client = self.daemon.client()
        self.queue = self.client.queue()
        self.make("new")
        self.assertEqual(told(self.dry("drain")), [("lose", "session", OWN, "new")])

    def saved_in_the_end(self):
        """Names on disk once the daemon has ended, and those that it could not save."""
        self.daemon.ctl("drain", check=False)
        self.daemon.stop()
        lost = {m[1] for m in (re.search('not_saved .*session="?([^" ]+)', line)
                               for line in self.daemon.lines) if m}
        self.daemon = self.start()
        return {e["name"] for e in self.daemon.ctl("storage", "list")}, lost

    def test_end_at_a_limit(self):
        """What a namespace's disk-bytes refuses, alone or together, is told beforehand."""
        for name in ("keepme", "other"):
            self.make(name, 300)
        size = max(s["packed_bytes"] + s["window_bytes"] + s["table_bytes"]
                   for s in self.daemon.ctl("session", "list"))
        why = "it may be lost: its namespace has room for .* on disk"
        for limit, may_be_lost in ((3 * size, False), (size, True), (10 << 10, True)):
            self.daemon.ctl("quota", "set", OWN, "--disk-bytes", str(limit))
            would = self.dry("drain")["would"]
            self.assertEqual({(w["action"], w["name"]) for w in would},
                             {("save", "keepme"), ("save", "other")})
            for w in would:
                if may_be_lost:
                    self.assertRegex(w["note"], why)
                else:
                    self.assertNotIn("lost", w["note"])
        self.assertEqual(self.saved_in_the_end(), (set(), {"keepme", "other"}))

    @long_emulated
    def test_end_of_a_nearly_full_storage(self):
        """The last MiB are the catalog's: what would be refused for that may be lost, it says."""
        self.again(storage_bytes="16mb")
        n = 0
        while n < 100:
            session = self.make(f"s{n}", 300)
            if self.daemon.ctl("session", "save", f"s{n}", check=False)[0]:
                break
            n += 1
        info = session.info()
        size = info["packed_bytes"] + info["window_bytes"] + info["table_bytes"]
        status = self.daemon.ctl("storage", "status")
        self.assertGreater(status["cap_bytes"] - status["physical_bytes"], size)
        one, = self.dry("drain")["would"]
        self.assertEqual((one["action"], one["name"]), ("save", f"s{n}"))
        self.assertRegex(one["note"], "it may be lost: the storage has room for ")
        names, lost = self.saved_in_the_end()
        self.assertEqual((len(names), lost), (n, {f"s{n}"}))

    def test_kick(self):
        """A client, and its sessions without a name; those with names stay."""
        self.make("named")
        unnamed = self.make(None)
        client, = self.daemon.ctl("client", "list")
        number = str(client["id"])
        answer = self.dry("client", "kick", number)
        self.assertEqual(told(answer)[0], ("kick", "client", "", client["name"]))
        self.assertEqual(told(answer)[1:], [("drop", "session", OWN, f"#{unnamed.info()['id']}")])
        self.assertEqual(self.daemon.ctl("client", "kick", "9999", "--dry-run", check=False)[0], 5)
        self.assertEqual(self.daemon.ctl("client", "kick", "x", "--dry-run", check=False)[0], 2)

    def test_quota(self):
        """Limits that would change, with what they are and would be."""
        change = ("change", "limit", OWN, "sessions")
        self.make("it")
        answer = self.dry("quota", "set", OWN, "--sessions", "7", "--host-bytes", "none")
        self.assertEqual(told(answer), [change])
        self.assertIn("to 7", answer["would"][0]["note"])
        self.daemon.ctl("quota", "set", OWN, "--sessions", "7")
        answer = self.dry("quota", "delete", OWN)
        self.assertEqual(told(answer), [change])
        self.assertIn("from 7 to ", answer["would"][0]["note"])
        self.assertEqual(self.daemon.ctl("quota", "set", OWN, "--dry-run", check=False)[0], 2)

    def test_storage(self):
        """The most that could go of the storage, and what an import would replace."""
        self.make("it").save()
        path = os.path.join(self.folder, "file")
        export = ("session", "export", "it", path)
        self.assertEqual(told(self.dry(*export)), [])
        self.assertEqual(told(self.dry(*export[:2], "i", path)), [])  # as the command takes it
        self.assertEqual(self.daemon.ctl(*export[:2], "no", path, "--dry-run", check=False)[0], 5)
        fresh = self.make("fresh")
        _, _, complaint = self.daemon.ctl(*export[:2], "fresh", path, check=False)
        self.assertIn("kvqctl session save", complaint)  # what is in memory alone is not exported
        fresh.drop()
        self.daemon.ctl(*export)
        self.assertEqual(told(self.dry(*export)), [("not overwrite", "the file", "", path)])
        self.assertEqual(told(self.dry(*export, "--replace")),
                         [("overwrite", "the file", "", path)])
        self.daemon.ctl("session", "import", path, "--as", "far", "--namespace", "uid-4711")
        far = (*export[:2], "far", path, "--replace")
        self.assertEqual(self.daemon.ctl(*far, check=False)[0], 5)
        self.assertEqual(self.daemon.ctl(*far, "--dry-run", check=False)[0], 5)
        self.assertEqual(told(self.dry(*far, "--namespace", "uid-4711")),
                         [("overwrite", "the file", "", path)])
        self.daemon.ctl("session", "drop", "far", "--namespace", "uid-4711")
        into = ("session", "import", path, "--as", "other")
        self.daemon.ctl(*into)
        self.assertEqual(told(self.dry(*into, "--replace")),
                         [("import", "session", OWN, "other"),
                          ("replace", "saved session", OWN, "other")])
        self.daemon.ctl("session", "drop", "other")
        self.daemon.ctl("session", "drop", "it")
        dead = self.daemon.ctl("storage", "status")["dead_bytes"]
        self.assertGreater(dead, 0)
        answer = self.dry("storage", "compact")
        self.assertEqual(answer["bytes"], dead)
        self.assertIn("at most", answer["would"][0]["note"])
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory,
                               "storage", "compact", "--dry-run"], capture_output=True, text=True,
                              timeout=BOUND)
        folder = self.daemon.ctl("storage", "status")["folder"]
        self.assertIn(f"would remove what no session needs in {folder}: ",
                      done.stdout)
        self.assertEqual(told(self.dry("storage", "gc")), [])  # the drop has done that
        self.assertEqual(self.daemon.ctl("storage", "gc")["freed_bytes"], 0)
        self.assertEqual(self.daemon.ctl("storage", "status")["dead_bytes"], dead)

    def refused_import(self, status, text, *arguments):
        """What stands in the way of an import; the import fails so, too."""
        import_ = ("session", "import", *arguments)
        said = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory,
                               *import_, "--dry-run"], capture_output=True, text=True,
                              timeout=BOUND)
        self.assertNotIn(": 0 B", said.stdout)
        before = self.state()
        status_, out, complaint = self.daemon.ctl(*import_, "--dry-run", check=False)
        self.assertEqual(status_, status, complaint)
        self.assertEqual(self.state(), before)
        status_, _, failure = self.daemon.ctl(*import_, check=False)
        self.assertEqual(status_, status, failure)
        if not out:
            self.assertIn(text, complaint)
            return None
        answer = json.loads(out)
        self.assertEqual(answer["bytes"], 0)
        self.assertEqual({w["action"] for w in answer["would"]}, {"not import"})
        self.assertIn(text, answer["would"][0]["note"])
        return [w["note"] for w in answer["would"]]

    def test_import(self):
        """The names that the session would get, and what stands in the way of it."""
        path = os.path.join(self.folder, "file")
        session = self.make("it")
        session.save()
        self.daemon.ctl("session", "export", "it", path)
        self.refused_import(1, "is in memory, or parked for it", path)
        notes = self.refused_import(1, "is in memory", path)
        self.assertIn(f"there is a session it of {OWN}", notes[1])
        self.assertEqual(len(notes), 2)
        session.close()
        self.daemon.ctl("session", "drop", "it")
        answer = self.dry("session", "import", path)
        self.assertEqual(told(answer), [("import", "session", OWN, "it")])
        self.assertEqual(answer["would"][0]["note"], "128 tokens")
        self.assertGreater(answer["bytes"], 0)
        self.assertEqual(told(self.dry("session", "import", path, "--as", "other")),
                         [("import", "session", OWN, "other")])
        self.assertEqual(told(self.dry("session", "import", path, "--namespace", "uid-4711")),
                         [("import", "session", "uid-4711", "it")])
        self.refused_import(5, "no namespace \"nobody\"", path, "--namespace", "nobody")
        self.daemon.ctl("quota", "set", OWN, "--disk-bytes", "1kb")
        self.refused_import(1, f"namespace {OWN} may keep 1024 bytes", path)
        self.daemon.ctl("quota", "delete", OWN)
        self.refused_import(1, "cannot be opened", path + "-not")
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) - 64)
        damaged = "it is damaged or cut off here"
        self.assertEqual(len(self.refused_import(1, damaged, path)), 1)
        notes = self.refused_import(5, "no namespace \"nobody\"", path, "--namespace", "nobody")
        self.assertIn(damaged, notes[1])
        with self.make("it"):
            notes = self.refused_import(1, "is in memory", path)
        self.assertIn(damaged, notes[1])

    def test_import_while_the_daemon_ends(self):
        self.again(drain_ms=60000)
        path = os.path.join(self.folder, "file")
        session = self.make("it")
        session.save()
        self.daemon.ctl("session", "export", "it", path)
        step = self.queue.step([session], 1)  # which the daemon waits for
        self.daemon.process.terminate()
        self.daemon.wait_log("event=draining")
        self.assertIsNone(self.refused_import(1, "nothing is imported", path))
        step.abort()
        self.assertEqual(self.daemon.process.wait(BOUND), 0)

    def test_prefix(self):
        """The bytes that are free afterwards, of one namespace or of all."""
        with Engine(self.daemon) as engine:
            session = engine.open()
            engine.feed(session, 1024)
            self.assertEqual(told(self.dry("prefix", "drop")), [])
            session.drop()
        answer = self.dry("prefix", "drop", "--namespace", OWN)
        self.assertEqual(told(answer), [("drop", "prefixes that no session has", "", OWN)])
        self.assertEqual(self.daemon.ctl("prefix", "drop")["bytes"], answer["bytes"])
        self.assertEqual(told(self.dry("prefix", "drop")), [])
        status, _, complaint = self.daemon.ctl("prefix", "drop", "--namespace", "nobody",
                                               "--dry-run", check=False)
        self.assertNotEqual(status, 0, complaint)

    def test_refused(self):
        """A command that takes nothing away."""
        for words in (("status",), ("session", "list"), ("session", "save", "x")):
            status, _, complaint = self.daemon.ctl(*words, "--dry-run", check=False)
            self.assertEqual(status, 2)
            self.assertIn("--dry-run is for commands that take something away", complaint)


class DryRunRemote(Remote):
    @long_emulated
    def test_remote(self):
        """What would be removed from the remote store, and what a pull would replace."""
        one = self.start("one")
        with one.client() as client:
            client.session(ROWS, "f16", name="it").close()
        size = one.ctl("session", "push", "it")["bytes"]
        answer = one.ctl("remote", "remove", "it", "--dry-run")
        self.assertEqual(told(answer), [("remove", "session on the remote store", OWN, "it")])
        self.assertGreaterEqual(size, answer["bytes"])
        self.assertEqual(len(one.ctl("remote", "list")), 1)
        answer = one.ctl("session", "pull", "i", "--replace", "--dry-run")
        self.assertEqual(told(answer), [("replace", "saved session", OWN, "it")])
        self.refused(one, 5, "remote", "remove", "other", "--dry-run", text="no session \"other\"")
