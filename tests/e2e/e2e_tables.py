# SPDX-License-Identifier: Apache-2.0
"""kvqctl's lists as tables: columns, order, filters and comma-separated values, of each list."""
import csv
import io
import os
import subprocess

from e2e_rig import BIN, BOUND, Tokens
from e2e_storage import Stored

# Each list, and a column of its that --sort and --filter take here.
LISTS = {
    ("session", "list"): "tokens", ("client", "list"): "queues", ("prefix", "status"): "bytes",
    ("quota", "list"): "tables", ("storage", "list"): "bytes", ("format", "list"): "bits",
    ("remote", "list"): "bytes",
}
# What no name may hold is refused by the daemon; all else stays in its cell.
NAMES = ["plain", "with blanks and, commas", 'with "quotes"', "x" * 127, "名前は日本語", "é" * 60]


class Tables(Stored):
    def ask(self, *arguments):
        """Exit status, output and complaint, without --json."""
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory,
                               *arguments], capture_output=True, text=True, timeout=BOUND,
                              stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout, done.stderr

    def rows(self, *arguments):
        """A list as comma-separated values, as objects."""
        status, out, complaint = self.ask(*arguments, "--csv")
        self.assertEqual((status, complaint), (0, ""))
        return list(csv.DictReader(io.StringIO(out, newline="")))

    def make(self):
        for i, name in enumerate(NAMES):
            session = self.client.session(Tokens(1, 1).rows, "f16", name=name)
            if i % 2:
                Tokens(1, i).feed(self.queue, session, i, attend=False)
            session.save()

    def test_names(self):
        """Whatever a name holds, it is one value and one line, and --json says the same."""
        self.make()
        rows = self.rows("session", "list")
        self.assertEqual({row["name"] for row in rows}, set(NAMES))
        told = {s["name"]: s["tokens"] for s in self.daemon.ctl("session", "list")}
        self.assertEqual({row["name"]: int(row["tokens"]) for row in rows}, told)
        for words in ("session", "storage"):
            lines = self.ask(words, "list", "--columns", "name,tokens")[1].splitlines()
            self.assertEqual(len(lines), 1 + len(NAMES))
            for line in lines[1:]:
                self.assertIn(line[:line.rindex(" ")].strip(), NAMES)

    def test_chosen(self):
        """Columns, order and filters, for people and as JSON; all filters hold at once."""
        self.make()
        status, out, _ = self.ask("session", "list", "--columns", "tokens,name", "--sort",
                                  "-tokens", "--filter", "tokens>0", "--filter", "name~x")
        self.assertEqual(status, 0)
        self.assertEqual(out.splitlines()[1:], ["        3 " + "x" * 127])
        listed = self.daemon.ctl("session", "list", "--sort", "-tokens", "--filter", "tokens>0")
        self.assertEqual([s["tokens"] for s in listed], [5, 3, 1])
        status, out, _ = self.ask("session", "list", "--filter", "memory>2tb")
        self.assertEqual((status, out), (0, "none of 6 sessions passes the filters\n"))
        self.assertEqual(self.rows("session", "list", "--filter", "memory>2tb"), [])

    def test_each_list(self):
        """Each list has all of it, and refuses a column that it does not have before it asks."""
        self.make()
        for words, column in LISTS.items():
            status, _, complaint = self.ask(*words, "--columns", "nonsense")
            self.assertEqual(status, 2)
            self.assertIn("no column 'nonsense'; the nearest is '", complaint)
            self.assertRegex(complaint, rf"The columns are: .*\b{column}\b")
            self.assertIn(f" {column}", self.ask(*words, "--help")[1])
            if words == ("remote", "list"):  # no remote store is configured
                continue
            rows = self.rows(*words, "--sort", "-" + column, "--filter", column + ">0")
            values = [float(row[column]) for row in rows]
            self.assertEqual(values, sorted(values, reverse=True), words)
            self.assertEqual(self.ask(*words, "--sort", column)[0], 0)

    def test_columns_stay(self):
        """Answers to other filters have the same columns, also where all that is left says no."""
        heading = self.ask("format", "list")[1].splitlines()[0]
        for words in ("FAST", "GPU", "PREFIX"):
            self.assertIn(f" {words} ", heading)
        for column in ("fast", "gpu", "prefix"):
            for value in ("yes", "no"):
                lines = self.ask("format", "list", "--filter", f"{column}={value}")[1].splitlines()
                self.assertEqual(lines[0].split(), heading.split())
                self.assertGreater(len(lines), 1)

    def test_times(self):
        """A time as it is shown finds what was then."""
        self.make()
        shown = {line.split()[-1]: " ".join(line.split()[:2]) for line in self.ask(
            "storage", "list", "--columns", "saved,bytes,tokens,used,name")[1].splitlines()[1:]}
        when = shown["plain"]
        for value in (when, when.split()[0], when.replace(" ", "T")):
            found = {row["name"] for row in self.rows("storage", "list", "--filter",
                                                      f"saved={value}")}
            self.assertIn("plain", found)
            for beside in "<>":
                self.assertNotIn("plain", {row["name"] for row in self.rows(
                    "storage", "list", "--filter", f"saved{beside}{value}")})
            self.assertEqual(self.rows("storage", "list", "--filter", f"saved={value}",
                                       "--filter", f"saved!={value}"), [])
        self.assertEqual(self.rows("storage", "list", "--filter", "saved=2001-01-01"), [])

    def test_refused(self):
        """What is no list, and what cannot be together."""
        for arguments, text in (
                (("session", "drop", "x", "--csv"), "--csv is for lists, not for session drop"),
                (("status", "--filter", "a=b"), "--filter is for lists, not for status"),
                (("top", "--filter", "a=b"), "--filter is for lists, not for top"),
                (("top", "--sort", "name", "--columns", "name"), "--columns is for lists, not for"),
                (("status", "--interval", "3"), "--interval is for top, not for status"),
                (("session", "drop", "x", "--shard", "0"), "is for session move, session restore"),
                (("session", "list", "--json", "--csv"), "--json prints all fields"),
                (("session", "list", "--filter", "idle>x"), "idle is a duration"),
                (("session", "list", *["--filter", "tokens=1"] * 17), "at most 16 times")):
            status, out, complaint = self.ask(*arguments)
            self.assertEqual((status, out), (2, ""))
            self.assertIn(text, complaint)
