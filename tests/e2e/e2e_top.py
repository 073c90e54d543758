# SPDX-License-Identifier: Apache-2.0
"""kvqctl top on a terminal: what it shows, its keys, and that the terminal is left as it was."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time

from e2e_rig import BIN, BOUND, Daemon, Test, Tokens, take_terminal

ROWS = Tokens(1, 1).rows
N = 40
UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END = ("\x1b[A", "\x1b[B", "\x1b[5~", "\x1b[6~", "\x1b[H",
                                           "\x1b[F")
ENTER, LEAVE = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"


class Top:
    """A top that looks once an hour: what it draws answers a key or a new size."""

    def __init__(self, directory, *arguments, rows=20, columns=100, interval="3600"):
        self.fd, self.inside = pty.openpty()
        termios.tcsetwinsize(self.fd, (rows, columns))
        self.before = termios.tcgetattr(self.inside)
        self.seen = b""
        self.process = subprocess.Popen(
            [os.path.join(BIN, "kvqctl"), "--runtime-dir", directory, "top", "--interval",
             interval, *arguments], stdin=self.inside, stdout=self.inside, stderr=self.inside,
            start_new_session=True, preexec_fn=take_terminal)

    def read(self):
        if not select.select([self.fd], [], [], BOUND)[0]:
            raise AssertionError(f"top says nothing: {self.seen!r}")
        self.seen += os.read(self.fd, 65536)

    def frame(self):
        """The lines of the next drawing."""
        while b"\x1b[J" not in self.seen:
            self.read()
        drawn, _, self.seen = self.seen.partition(b"\x1b[J")
        text = drawn.partition(b"\x1b[H")[2].decode()
        return [line.removeprefix("\x1b[K") for line in text.split("\r\n")]

    def press(self, key):
        os.write(self.fd, key.encode())
        return self.frame()

    def resize(self, rows, columns):
        termios.tcsetwinsize(self.fd, (rows, columns))
        return self.frame()

    def end(self, act=lambda top: None):
        """What it printed behind the other screen, and its exit status. Its terminal is whole."""
        act(self)
        end = time.monotonic() + BOUND
        while self.process.poll() is None or select.select([self.fd], [], [], 0)[0]:
            if select.select([self.fd], [], [], 0.01)[0]:
                self.seen += os.read(self.fd, 65536)
            if time.monotonic() > end:
                raise AssertionError("top does not end")
        after = termios.tcgetattr(self.inside)
        os.close(self.inside)
        os.close(self.fd)
        if after != self.before:
            raise AssertionError(f"the terminal was {self.before} and is {after}")
        before, left, rest = self.seen.rpartition(LEAVE)
        if not left or LEAVE in before:
            raise AssertionError(f"the screen is not left once: {self.seen!r}")
        return rest.decode(), self.process.returncode


def names(frame):
    return re.findall(r" (s\d\d) ", "\n".join(frame))


class TopOnTerminal(Test):
    def setUp(self):
        super().setUp()
        for i in range(N):
            with self.client.session(ROWS, "f16", name=f"s{i:02}") as session:
                Tokens(1, 1 + i).feed(self.queue, session, 1 + i, attend=False)

    def tearDown(self):
        for i in range(N):
            self.daemon.ctl("session", "drop", f"s{i:02}")
        super().tearDown()

    def test_keys(self):
        """Head and headings stay, sessions scroll, s and r sort, q quits."""
        top = Top(self.daemon.directory)
        frame = top.frame()
        self.assertEqual(len(frame), 20)
        self.assertTrue(all(len(line) <= 100 for line in frame))
        self.assertRegex(frame[0], "^kvqd ")
        self.assertRegex(frame[5], "^NAMESPACE +NAME ")
        self.assertRegex(frame[-1], f"^1 to 13 of {N} by memory, largest first   q: quit ")
        frame = top.press("r")
        self.assertIn("by memory, smallest first", frame[-1])
        column = "memory"
        while column != "name":
            frame = top.press("s")
            column = re.search(r" by ([\w-]+), ", frame[-1])[1]
        self.assertEqual(names(frame), [f"s{i:02}" for i in range(13)])
        for key, first in ((DOWN, 1), (PAGE_DOWN, 14), (UP, 13), (END, 27), (DOWN, 27),
                           (PAGE_UP, 14), (HOME, 0), (UP, 0), (PAGE_DOWN, 13)):
            frame = top.press(key)
            self.assertEqual(names(frame), [f"s{i:02}" for i in range(first, first + 13)], key)
            self.assertRegex(frame[5], "^NAMESPACE +NAME ")
        frame = top.press("r")
        self.assertEqual(names(frame)[0], f"s{N - 1 - 13:02}")
        rest, status = top.end(lambda t: os.write(t.fd, b"q"))
        self.assertEqual((rest, status), ("", 0))

    def test_help(self):
        """What the head does not count is told."""
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "top", "--help"], text=True,
                              capture_output=True, timeout=BOUND)
        self.assertIn("engines that attend in their own context", done.stdout)

    def test_sort(self):
        """--sort says what is on top at first; a column that is else not shown is shown then."""
        for option, first, words in (("name", 0, "name, smallest"), ("-tokens", N - 1,
                                                                     "tokens, largest"),
                                     ("id", 0, "id, smallest")):
            top = Top(self.daemon.directory, "--sort", option, columns=140)
            frame = top.frame()
            self.assertRegex(frame[-1], f" by {words} first ")
            self.assertEqual(names(frame)[0], f"s{first:02}")
            self.assertEqual(frame[5].endswith(" ID"), option == "id")
            frame = top.press("s")
            self.assertRegex(frame[-1], {"name": " by tokens,", "-tokens": " by format,",
                                         "id": " by namespace,"}[option])
            self.assertNotIn(" ID", frame[5])
            if option == "id":
                self.comes_back(top)
            self.assertEqual(top.end(lambda t: os.write(t.fd, b"q")), ("", 0))
        asked = [os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory, "top",
                 "--count", "1", "--sort"]
        for option, listed in (("name", range(20)), ("-name", range(N - 1, N - 21, -1))):
            done = subprocess.run([*asked, option], capture_output=True, text=True, timeout=BOUND)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertEqual(names(done.stdout.splitlines()), [f"s{i:02}" for i in listed])
        done = subprocess.run([*asked, "-name", "--json"], capture_output=True, text=True,
                              timeout=BOUND)
        self.assertEqual([s["name"] for s in json.loads(done.stdout)["sessions"]],
                         [f"s{i:02}" for i in range(N - 1, -1, -1)])
        done = subprocess.run([*asked, "colour"], capture_output=True, text=True, timeout=BOUND)
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertRegex(done.stderr, "no column 'colour'; the nearest is .*\nThe columns are: "
                         "namespace, .*, pinned\n")

    def comes_back(self, top):
        """A column that --sort has added is there while sessions are sorted by it, and is one of
        those that s goes through."""
        sorts = []
        while not sorts or sorts[-1] != "namespace":
            frame = top.press("s")
            sorts.append(re.search(r" by ([\w-]+), ", frame[-1])[1])
            self.assertEqual(frame[5].endswith(" ID"), sorts[-1] == "id", sorts)
        self.assertEqual(sorts[-2:], ["id", "namespace"])

    def test_size(self):
        """It is drawn anew for another size, whatever that is, and never beyond it."""
        top = Top(self.daemon.directory)
        top.frame()
        for rows, columns in ((50, 200), (10, 40), (7, 20), (3, 10), (1, 1), (24, 80)):
            frame = top.resize(rows, columns)
            self.assertEqual(len(frame), min(rows, 7 + N), (rows, columns))
            self.assertLessEqual(max(map(len, frame)), columns)
        self.assertEqual(len(names(frame)), 24 - 7)
        self.assertRegex(frame[5], "^NAMESPACE +NAME +TOKENS +FORMAT +BITS/VAL +MEMORY$")
        self.assertRegex(frame[-1], "r: reverse$")
        frame = top.resize(24, 200)
        self.assertRegex(frame[5], " MEMORY +SHARED +COMPR. +STATE$")
        self.assertEqual(top.end(lambda t: os.write(t.fd, b"q")), ("", 0))

    def test_long_name(self):
        """One long name pushes no column of the others off the screen."""
        name = "n" * 127
        with self.client.session(ROWS, "f16", name=name) as session:
            Tokens(1, 999).feed(self.queue, session, 999, attend=False)
            top = Top(self.daemon.directory, columns=80)
            frame = top.frame()
            self.assertRegex(frame[5], "^NAMESPACE +NAME +TOKENS +FORMAT +BITS/VAL +MEMORY$")
            self.assertRegex(frame[6], r" n{10,}~ +999 +f16 .* [KM]iB$")
            self.assertEqual({len(line) for line in frame[5:-1]}, {80})
            self.assertIn(f" {name} ", top.resize(24, 300)[6])
            self.assertEqual(top.end(lambda t: os.write(t.fd, b"q")), ("", 0))
            session.drop()

    def test_signals(self):
        """Signals that end it leave the terminal as it was; Ctrl-Z does nothing."""
        for act in (lambda t: t.process.send_signal(signal.SIGTERM),
                    lambda t: t.process.send_signal(signal.SIGINT),
                    lambda t: t.process.send_signal(signal.SIGHUP),
                    lambda t: t.process.send_signal(signal.SIGQUIT),
                    lambda t: os.write(t.fd, b"\x03")):
            top = Top(self.daemon.directory)
            top.frame()
            self.assertEqual(top.end(act), ("", 0))
        top = Top(self.daemon.directory)
        top.frame()
        self.assertEqual(len(top.press("\x1ar")), 20)
        self.assertEqual(top.end(lambda t: os.write(t.fd, b"q")), ("", 0))

    def test_so_many_looks(self):
        """They are printed one after the other, for reading afterwards."""
        top = Top(self.daemon.directory, "--count", "1")
        with self.assertRaisesRegex(AssertionError, "the screen is not left") as caught:
            top.end()
        self.assertIn("NAMESPACE      NAME", str(caught.exception))

    def test_daemon_goes(self):
        """What went wrong is printed when the terminal is back."""
        with Daemon() as daemon:
            top = Top(daemon.directory, "--timeout", "200", interval="0.1")
            top.frame()
        rest, status = top.end()
        # Whether it still finds the socket is a matter of moments.
        self.assertIn(status, (3, 4))
        self.assertRegex(rest, "did not answer within 200 ms|no daemon answers")
        rest, status = Top("/nonexistent").end()
        self.assertEqual(status, 3)
        self.assertIn("no daemon answers", rest)

    def test_no_terminal(self):
        """Without one it prints, as it always did."""
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir",
                               self.daemon.directory, "top", "--count", "2", "--interval", "0.1"],
                              capture_output=True, text=True, timeout=BOUND)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertNotIn("\x1b", done.stdout)
        self.assertEqual(done.stdout.count("NAMESPACE"), 2)
        self.assertEqual(len(names(done.stdout.splitlines())), 2 * 20)
