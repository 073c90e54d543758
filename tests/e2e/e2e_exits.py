# SPDX-License-Identifier: Apache-2.0
"""Exit statuses of kvqctl, of every command that --help lists."""
import os
import re
import signal
import subprocess
import tempfile
import unittest

from e2e_rig import BIN, BOUND, everybodys_kvqctl
from e2e_storage import Stored

# What stands for an argument: something that there is not.
FILL = {"NAME": "nosuch", "PLACE": "host", "FILE": "/nosuch", "NS": "nobody", "ID": "99",
        "VALUE": "1", "SHELL": "bash"}
MORE = {"quota set": ["--sessions", "1"], "top": ["--count", "1"], "events": ["--count", "1"],
        "size": "--format oscar2 --layers 2 --kv-heads 2 --head-dim 64 --tokens 9".split()}
# Commands that need no daemon, or end in a way of their own without one.
ALONE = {"doctor": 7, "completion": 0, "size": 0, "key make": 1, "key show": 1}
# Commands that name a session, a client or a namespace, which a daemon without a remote store
# looks for.
NAMING = {"session save", "session restore", "session export", "session show", "session drop",
          "session move", "session park", "session prefetch", "session pin", "session unpin",
          "quota get", "quota set", "quota delete", "client kick"}
# Commands that take a role.
ADMIN = {"session export", "session import", "storage verify", "storage gc", "storage compact",
         "events", "quota set", "quota delete", "config get", "config set", "config reload",
         "client kick", "drain", "shutdown"}
# Commands that take a namespace, and do without a session: what is another's they do not show.
LISTS = {"session list", "session push", "session pull", "storage list", "remote list", "top",
         "remote remove", "completion"}
ENDS = {"drain", "shutdown"}  # the daemon


def commands():
    """{"session show": ["NAME"], ..}, as --help lists them."""
    done = subprocess.run([os.path.join(BIN, "kvqctl"), "--help"], capture_output=True, text=True,
                          check=True)
    rows = re.findall(r"^  ([a-z]+(?: [a-z]+)?)((?: \[?[A-Z]{2,}\]?)*) +[a-z]",
                      done.stdout.partition("\nOptions:")[0], re.M)
    return {words: arguments.split() for words, arguments in rows}


def line_of(words, arguments):
    """A command with its arguments, and what it is tried with besides."""
    filled = [FILL[a] for a in arguments if a[0] != "["]
    if words == "key make":
        filled = ["/nosuch/key"]  # it would make a file
    return [*words.split(), *filled, *MORE.get(words, [])]


class Exits(Stored):
    def run_all(self, directory, *more, kvqctl=None, but=(), **how):
        """The exit status of each command, with its complaint."""
        results = {}
        for words, arguments in commands().items():
            if words in but:
                continue
            done = subprocess.run([kvqctl or os.path.join(BIN, "kvqctl"), "--runtime-dir",
                                   directory, *line_of(words, arguments), *more],
                                  capture_output=True, text=True, timeout=BOUND,
                                  stdin=subprocess.DEVNULL, **how)
            results[words] = (done.returncode, done.stderr)
        return results

    def expect(self, results, expected):
        """expected: a function of the command's words; None: whatever."""
        self.assertGreater(len(results), 35)
        for words, (status, complaint) in results.items():
            if expected(words) is not None:
                self.assertEqual(status, expected(words), f"{words}: {complaint}")

    def test_no_daemon(self):
        with tempfile.TemporaryDirectory(prefix="kvq-e2e-") as folder:
            results = self.run_all(folder)
        self.expect(results, lambda words: ALONE.get(words, 3))

    def test_usage(self):
        """One argument too many, a missing one, an unknown option: said before anybody is asked."""
        self.expect(self.run_all("/nosuch", "one-more", "and-one-more"), lambda words: 2)
        self.expect(self.run_all("/nosuch", "--nosuch"), lambda words: 2)
        for words, arguments in commands().items():
            if arguments and arguments[0][0] != "[":
                done = subprocess.run([os.path.join(BIN, "kvqctl"), *words.split()],
                                      capture_output=True, timeout=BOUND)
                self.assertEqual(done.returncode, 2, words)

    def test_timeout(self):
        self.daemon.pause()
        try:
            results = self.run_all(self.daemon.directory, "--timeout", "50", but=ENDS)
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        self.expect(results, lambda words: ALONE.get(words, 4))

    def run_but_events(self, *more):
        """Events would be waited for."""
        before = MORE["events"]
        MORE["events"] = ["--kind", "nosuch"]
        try:
            return self.run_all(self.daemon.directory, *more, but=ENDS)
        finally:
            MORE["events"] = before

    def test_not_there(self):
        self.expect(self.run_but_events(), lambda words: 5 if words in NAMING else None)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_not_permitted(self):
        """Commands for administrators, and those about a namespace of somebody else's."""
        os.chmod(self.daemon.directory, 0o755)
        how = {"kvqctl": everybodys_kvqctl(), "user": 65534, "extra_groups": [], "cwd": "/"}
        self.expect(self.run_all(self.daemon.directory, **how),
                    lambda words: 6 if words in ADMIN else None)
        self.expect(self.run_all(self.daemon.directory, "--namespace", "uid-0", **how),
                    self.exit_in_namespace)

    @staticmethod
    def exit_in_namespace(words):
        """Of a command that is given a namespace of somebody else's."""
        if words in LISTS:
            return None
        takes = words.startswith(("session ", "prefix ")) or words == "events"
        return 6 if takes else 2
