# SPDX-License-Identifier: Apache-2.0
"""Sessions that kvqctl is told by the beginning of their names."""
import os

from e2e_rig import Tokens, long_emulated
from e2e_remote import Remote
from e2e_storage import Stored

ROWS = Tokens(1, 1).rows
OWN = f"uid-{os.geteuid()}"


class Short(Stored):
    def names(self):
        return sorted(s["name"] for s in self.daemon.ctl("session", "list"))

    def make(self, *names, **options):
        for name in names:
            self.client.session(ROWS, "f16", name=name, **options).close()

    def test_one_begins_so(self):
        """It is meant, and what was done says its whole name."""
        self.make("chat-with-ada", "summary")
        self.assertEqual(self.daemon.ctl("session", "show", "ch")["name"], "chat-with-ada")
        self.assertEqual(self.daemon.ctl("session", "pin", "chat"), {"pinned": "chat-with-ada"})
        self.assertEqual(self.daemon.ctl("session", "unpin", "c"), {"unpinned": "chat-with-ada"})
        self.assertEqual(self.daemon.ctl("session", "save", "s")["name"], "summary")

    def test_a_drop_wants_all_of_it(self):
        self.make("chat-with-ada")
        status, _, complaint = self.daemon.ctl("session", "drop", "chat", check=False)
        self.assertEqual(status, 5)
        self.assertIn("and 1 name begins so: chat-with-ada; give the whole name", complaint)
        self.assertEqual(self.names(), ["chat-with-ada"])
        self.daemon.ctl("session", "drop", "chat-with-ada")
        self.assertEqual(self.names(), [])

    def test_exact_wins(self):
        """A whole name is that session, whatever else begins so; and --exact takes nothing else."""
        self.make("a", "ab", "abc")
        self.assertEqual(self.daemon.ctl("session", "drop", "a"), {"dropped": "a"})
        self.assertEqual(self.names(), ["ab", "abc"])
        status, _, complaint = self.daemon.ctl("session", "drop", "a", check=False)
        self.assertEqual(status, 5)
        self.assertIn('no session has the name "a", and 2 names begin so: ab, abc;', complaint)
        status, _, complaint = self.daemon.ctl("session", "drop", "abc-", check=False)
        self.assertEqual(status, 5)
        self.daemon.ctl("session", "drop", "ab")
        status, _, complaint = self.daemon.ctl("session", "drop", "ab", "--exact", check=False)
        self.assertEqual(status, 5)
        self.assertIn('no session "ab"', complaint)
        self.assertEqual(self.names(), ["abc"])
        self.assertNotEqual(self.daemon.ctl("session", "drop", "", check=False)[0], 0)
        self.assertEqual(self.names(), ["abc"])

    def test_several_begin_so(self):
        """At most five are named. Shards of one session are one name."""
        for shard in range(2):
            self.make("many-shards", shard=shard, shards=2)
        self.assertEqual(self.daemon.ctl("session", "show", "many")["name"], "many-shards")
        self.make(*[f"many-{i}" for i in range(7)])
        for command in ("show", "drop", "park", "prefetch", "pin", "unpin", "save", "restore"):
            if command == "restore":
                for i in range(7):
                    self.daemon.ctl("session", "save", f"many-{i}")
                    self.daemon.ctl("session", "park", f"many-{i}")
            status, out, complaint = self.daemon.ctl("session", command, "many-", check=False)
            self.assertEqual((status, out), (5, ""), command)
            self.assertRegex(complaint, r"begin so: many-0, many-1, many-2, many-3, many-4, and "
                             "[23] more; give more of the name")
        self.assertEqual(len(self.daemon.ctl("session", "list")), 9)

    def test_saved_alone(self):
        """Names of what is saved and not in memory count as well."""
        self.make("old-story")
        self.daemon.ctl("session", "save", "old-story")
        self.again()
        self.assertEqual(self.names(), [])
        path = os.path.join(self.folder, "file")
        self.daemon.ctl("session", "export", "old", path)
        self.assertEqual(self.daemon.ctl("session", "restore", "ol"), {"restored": "old-story"})
        self.assertEqual(self.names(), ["old-story"])
        self.again()
        self.assertEqual(self.daemon.ctl("session", "drop", "old-story"), {"dropped": "old-story"})
        self.assertEqual(self.daemon.ctl("storage", "list"), [])

    def test_namespace(self):
        """Only names of the namespace that the command is about."""
        self.make("here")
        self.make("her-own", ns="uid-4711")
        self.assertEqual(self.daemon.ctl("session", "show", "her")["name"], "here")
        shown = self.daemon.ctl("session", "show", "her", "--namespace", "uid-4711")
        self.assertEqual(shown["name"], "her-own")


class ShortRemote(Remote):
    @long_emulated
    def test_remote(self):
        """On the remote store, too."""
        one = self.start("one")
        with one.client() as client:
            for name in ("story", "store"):
                client.session(ROWS, "f16", name=name).close()
        self.assertEqual(one.ctl("session", "push", "story")["name"], "story")
        self.assertEqual(one.ctl("session", "push", "store")["name"], "store")
        two = self.start("two")
        self.refused(two, 5, "session", "pull", "sto", text="begin so: store, story;")
        self.assertEqual(two.ctl("session", "pull", "storyb", "--exact", check=False)[0], 5)
        self.assertEqual(two.ctl("remote", "remove", "store"), {"removed": "store"})
        self.assertEqual(two.ctl("session", "pull", "st")["name"], "story")
        self.refused(one, 5, "session", "push", "stories")
        self.assertEqual(one.ctl("session", "push", "storey", check=False)[0], 5)

    @long_emulated
    def test_nothing_is_begun_under_a_short_name(self):
        """No transfer is noted that failed, nor is one audited of a session that is not there."""
        one, two = self.start("one"), self.start("two")
        with one.client() as client:
            client.session(ROWS, "f16", name="story").close()
            client.session(ROWS, "f16", name="a").close()
            client.session(ROWS, "f16", name="ab").close()
        self.assertEqual(one.ctl("session", "push", "st")["name"], "story")
        self.assertEqual(two.ctl("session", "pull", "st")["name"], "story")
        one.ctl("session", "save", "a")
        one.ctl("session", "push", "a")  # a whole name that others begin with
        self.assertEqual(two.ctl("session", "pull", "a")["name"], "a")
        for daemon, want in ((one, ["a", "story"]), (two, ["a", "story"])):
            noted = daemon.ctl("remote", "status")["transfers"]
            named = sorted(t["name"] for t in noted if t["namespace"] == OWN)
            self.assertEqual(named, want)
            self.assertNotRegex("\n".join(daemon.lines), r'\b(session|name)="?st\b')
