#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Types what pages tell to type, and holds what is shown against what they show.

    tests/pages.py BUILD [PAGE]...

PAGE is a page of docs/ (default: all below; nodes.md only where there is rclone). Of a page, blocks
of `console` are typed into one shell in a new home directory: lines that begin with `$ ` are
commands, which must succeed, and what stands behind them is their output, in which `..` is any
text, a line of `..` any lines, and blanks are any number of blanks. The home has a folder `kvq`, as
a reader's checkout, which must still be there at the end. Blocks whose first line is `# NAME.py` or
`# NAME.conf` become that file in the directory where the shell stands. Other blocks are not run.
Programs are those of BUILD. Prints `N passed, M failed`.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
RCLONE = os.environ.get("KVQ_RCLONE") or os.path.join(ROOT, "build", "s3", "rclone", "bin",
                                                      "rclone-linux-amd64")
PAGES = ["tutorial.md", *(["nodes.md"] if os.access(RCLONE, os.X_OK) else [])]
MARK = "\x01end"
BOUND = 120  # seconds: for hangs alone


def blocks_of(page):
    """(language, lines) of each fenced block."""
    with open(os.path.join(ROOT, "docs", page), encoding="utf-8") as file:
        found = re.findall(r"^```(\w*)\n(.*?)^```$", file.read(), re.M | re.S)
    return [(language, text.splitlines()) for language, text in found]


def commands_in(lines):
    """(command, lines of its output) of a block of console."""
    commands = []
    for line in lines:
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def pattern_of(lines):
    """What an output must match."""
    parts = []
    for line in lines:
        words = ".*".join(r"\s+".join(map(re.escape, re.split(r"\s+", part)))
                          for part in line.split(".."))
        parts.append("(?:.*\n)*" if line == ".." else words + "\n")
    return "".join(parts)


class Shell:
    """One bash, in a home of its own; what it starts ends with it."""

    def __init__(self, build):
        self.home = tempfile.mkdtemp(prefix="kvq-page-")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVQ", "XDG"))}
        environment.update(
            HOME=self.home, no_proxy="127.0.0.1", NO_PROXY="127.0.0.1",
            PATH=":".join([os.path.join(build, "bin"), self.home, os.environ["PATH"]]),
            KVQ_LIBRARY=os.path.join(build, "lib", "libkvq.so"), KVQD_HTTP_ADDRESS="",
            PYTHONPATH=os.path.join(ROOT, "client", "python"), PYTHONDONTWRITEBYTECODE="1")
        os.symlink(RCLONE, os.path.join(self.home, "rclone"))
        self.checkout = os.path.join(self.home, "kvq")
        os.mkdir(self.checkout)
        self.process = subprocess.Popen(
            ["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=self.home,
            stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True)
        self.timer = threading.Timer(BOUND, self.kill)
        self.timer.start()

    def kill(self):
        """Ends the shell and all that it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def type(self, command):
        """Its exit status and output."""
        self.process.stdin.write(f"{command}\nprintf '\\n{MARK} %d %s\\n' $? \"$PWD\"\n")
        self.process.stdin.flush()
        output = []
        for line in self.process.stdout:
            if line.startswith(MARK):
                _, status, self.folder = line.split(None, 2)
                return int(status), "".join(output)[:-1]
            output.append(line)
        raise AssertionError(f"the shell ended in {command!r}:\n" + "".join(output))

    def write(self, name, lines):
        self.type(":")
        with open(os.path.join(self.folder.strip(), name), "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")

    def end(self):
        self.timer.cancel()
        self.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        shutil.rmtree(self.home, ignore_errors=True)


def run_page(shell, page):
    """Problems, one for each command."""
    for language, lines in blocks_of(page):
        name = re.fullmatch(r"# ([\w-]+\.(?:py|conf))", lines[0]) if lines else None
        if name:
            shell.write(name[1], lines)
        for command, shown in commands_in(lines) if language == "console" else []:
            status, output = shell.type(command)
            good = status == 0 and re.fullmatch(pattern_of(shown), output)
            yield None if good else (f"docs/{page}: $ {command}\nexit status {status}\n{output}"
                                     "--- the page shows\n" + "\n".join(shown))
    if not os.path.isdir(shell.checkout):
        yield f"docs/{page} removes ~/kvq, where readers have their checkout\n"


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    passed = failed = 0
    for page in sys.argv[2:] or PAGES:
        shell = Shell(os.path.abspath(sys.argv[1]))
        try:
            for problem in run_page(shell, page):
                print(problem or "", end="\n" if problem else "")
                passed += not problem
                failed += bool(problem)
        finally:
            shell.end()
    print(f"pages: {passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
