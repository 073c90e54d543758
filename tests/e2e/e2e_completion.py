# SPDX-License-Identifier: Apache-2.0
"""Completion of kvqctl's command lines in real shells, each on a terminal of its own."""
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import tempfile
import termios
import time

from e2e_rig import BIN, BOUND, Test, Tokens, take_terminal

ROWS = Tokens(1, 1).rows
# How each shell is started without anybody's settings, and how it takes the script in.
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set bell-style none'; source {}"),
    "zsh": (["zsh", "-f", "-i"],
            "bindkey -e; autoload -U compinit; compinit -u -D; source {}"),
    "fish": (["fish", "--no-config", "-i"], "source {}"),
}


class Shell:
    """An interactive shell that has kvqctl's completion."""

    def __init__(self, name, daemon, folder, patient):
        words, take_in = SHELLS[name]
        script = os.path.join(folder, name)
        with open(script, "wb") as file:
            subprocess.run([os.path.join(BIN, "kvqctl"), "completion", name], stdout=file,
                           check=True)
        self.name, self.seen = name, b""
        path = BIN + ":" + os.environ["PATH"]
        if patient:  # on a busy machine an answer takes longer than who presses a key waits
            path = os.path.join(folder, ".patient") + ":" + path
            os.makedirs(os.path.join(folder, ".patient"), exist_ok=True)
            with open(os.path.join(folder, ".patient", "kvqctl"), "w", encoding="utf-8") as file:
                file.write(f"#!/bin/sh\nexec {BIN}/kvqctl --timeout {BOUND * 1000:.0f} \"$@\"\n")
            os.chmod(file.name, 0o755)
        self.fd, inside = pty.openpty()
        termios.tcsetwinsize(inside, (50, 200))
        self.process = subprocess.Popen(
            words, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
            cwd=folder, preexec_fn=take_terminal,
            env={**os.environ, "PATH": path, "HOME": folder, "TERM": "xterm", "PS1": "$ ",
                 "KVQ_RUNTIME_DIR": daemon.directory})
        os.close(inside)
        self.type(take_in.format(script) + "; printf '<%s>\\n' ready\n")
        self.wait("<ready>")

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait(self, text):
        """What the shell has printed, up to the text."""
        end = time.monotonic() + BOUND
        while text.encode() not in self.seen:
            if not select.select([self.fd], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"no {text!r} came: {self.seen!r}")
            try:
                self.seen += os.read(self.fd, 65536)
            except OSError as error:  # it has ended
                raise AssertionError(f"{self.name} ended: {self.seen!r}") from error
        before, _, self.seen = self.seen.partition(text.encode())
        return before.decode(errors="replace")

    def complete(self, typed):
        """The words of the command line after these keys, the last of which may be tabs. The line
        is not run: another command is put before it."""
        self.type(typed + " end\x01printf '<%s>\\n' \n")
        return re.findall("<([^<>%]*)>", self.wait("<end>"))

    def end(self):
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


PACKAGING = os.path.join(os.path.dirname(__file__), "..", "..", "packaging", "completion")
OF_KVQD = {"bash": "kvqd.bash", "zsh": "_kvqd", "fish": "kvqd.fish"}


class Completion(Test):
    def shells(self, patient=True):
        """One of each kind that is installed, and of bash in any case."""
        folder = tempfile.mkdtemp(prefix="kvq-shell-")
        self.addCleanup(shutil.rmtree, folder)
        for name in SHELLS:
            if name == "bash" or shutil.which(name):
                shell = Shell(name, self.daemon, folder, patient)
                try:
                    yield shell
                finally:
                    shell.end()

    def test_commands_and_names(self):
        """Commands, names of sessions with whatever is in them, options, columns; no daemon asked
        in vain holds a shell up."""
        for name in ("chat-with-ada", "story of a \"cat\"", "other"):
            self.client.session(ROWS, "f16", name=name).close()
        self.client.session(ROWS, "f16", name="elsewhere", ns="uid-4711").close()
        for shell in self.shells():
            for typed, words in (
                    ("kvqctl sess\tsho\tcha\t", ["session", "show", "chat-with-ada"]),
                    ("kvqctl session drop st\t", ["session", "drop", "story of a \"cat\""]),
                    ("kvqctl --json stor\tver\t", ["--json", "storage", "verify"]),
                    ("kvqctl --tim\t100 pin\t", ["--timeout", "100", "ping"]),
                    ("kvqctl session pin else\t --namespace uid-4711",
                     ["session", "pin", "elsewhere", "--namespace", "uid-4711"]),
                    ("kvqctl quota get uid-47\t", ["quota", "get", "uid-4711"]),
                    ("kvqctl comp\tfi\t", ["completion", "fish"]),
                    ("kvqctl session drop nothing-like-it\t",
                     ["session", "drop", "nothing-like-it"])):
                self.assertEqual(shell.complete(typed), ["kvqctl", *words], shell.name)

    def test_names_that_bash_takes_apart(self):
        """And such as are escaped already, and such as look like options: these are left out."""
        for name in ("user:1", "a@b", "x@long", "with space", "with spoon", "--json", "key=7"):
            self.client.session(ROWS, "f16", name=name).close()
        shells = self.shells()  # the first is bash; it ends with its generator
        shell = next(shells)
        for typed, words in (("session show user:\t", ["session", "show", "user:1"]),
                             ("session show a@\t", ["session", "show", "a@b"]),
                             ("session show x@lo\t", ["session", "show", "x@long"]),
                             ("session show key=\t", ["session", "show", "key=7"]),
                             ("session show wi\ta\t", ["session", "show", "with space"]),
                             ("session list --columns=compr\t",
                              ["session", "list", "--columns=compression"]),
                             (f"--runtime-dir={self.daemon.directory} session show us\t",
                              [f"--runtime-dir={self.daemon.directory}", "session", "show",
                               "user:1"])):
            self.assertEqual(shell.complete("kvqctl " + typed), ["kvqctl", *words])
        shells.close()
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory,
                               "completion", "session show"], capture_output=True, text=True,
                              check=True)
        self.assertNotIn("--json", done.stdout)

    def test_daemon_that_is_silent(self):
        """Names are done without, and nothing is printed in between."""
        for shell in self.shells(patient=False):
            self.daemon.pause()
            try:
                words = shell.complete("kvqctl session drop any\t")
            finally:
                self.daemon.process.send_signal(signal.SIGCONT)
            self.assertEqual(words, ["kvqctl", "session", "drop", "any"], shell.name)

    def offered(self, shell, line):
        """What bash offers for a line that ends at the cursor."""
        shell.type(f"COMP_LINE='{line}' COMP_WORDS=({line}) "
                   f"COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); compopt() {{ :; }}; _kvqctl kvqctl; "
                   "printf '<%s>\\n' \"${COMPREPLY[@]}\" 'the'' end'\n")
        return set(re.findall("<([^<>%]*)>", shell.wait("<the end>")))

    def test_own_options(self):
        """Options of the command that was typed, of a group, and of all before there is one."""
        common = {"--runtime-dir", "--connect", "--key", "--json", "--timeout", "--help",
                  "--version"}
        shells = self.shells()  # the first is bash; it ends with its generator
        shell = next(shells)
        for line, own in (("session drop", {"--namespace", "--exact", "--dry-run"}),
                          ("session drop x", {"--namespace", "--exact", "--dry-run"}),
                          ("ping", set()), ("key make x", {"--server"}),
                          ("storage verify", {"--offline"}),
                          ("drain", {"--wait", "--dry-run"})):
            self.assertEqual(self.offered(shell, f"kvqctl {line} --"), common | own, line)
        group = self.offered(shell, "kvqctl storage --")
        self.assertLess({"--offline", "--sort"}, group)
        self.assertNotIn("--layers", group)
        self.assertLess(group, self.offered(shell, "kvqctl --"))
        shells.close()
        for shell in self.shells():
            for typed, words in (("session drop --ex\t", ["session", "drop", "--exact"]),
                                 ("session drop --lay\t", ["session", "drop", "--lay"]),
                                 ("session drop x --dr\t", ["session", "drop", "x", "--dry-run"]),
                                 ("storage --off\t", ["storage", "--offline"]),
                                 ("ping --exa\t", ["ping", "--exa"]),
                                 ("--lay\t", ["--layers"])):
                self.assertEqual(shell.complete("kvqctl " + typed), ["kvqctl", *words], shell.name)

    def test_values(self):
        """Options of the configuration, kinds of events, formats, namespaces."""
        self.client.session(ROWS, "f16", name="elsewhere", ns="uid-4711").close()
        for shell in self.shells():
            for typed, words in (
                    ("config get drain\t", ["config", "get", "drain_ms"]),
                    ("config set prefix_k\t", ["config", "set", "prefix_keep_seconds"]),
                    ("events --kind storage_dam\t", ["events", "--kind", "storage_damaged"]),
                    ("events --kind draining,gpu_r\t",
                     ["events", "--kind", "draining,gpu_refused"]),
                    ("size --format quarot\t3", ["size", "--format", "quarot3"]),
                    ("size --format osca\t2", ["size", "--format", "oscar2"]),
                    ("session list --namespace uid-47\t",
                     ["session", "list", "--namespace", "uid-4711"]),
                    ("session pull x --from uid-47\t",
                     ["session", "pull", "x", "--from", "uid-4711"])):
                self.assertEqual(shell.complete("kvqctl " + typed), ["kvqctl", *words], shell.name)

    def test_kvqd(self):
        """Flags of the daemon, and files behind those that take a path."""
        for shell in self.shells():
            shell.type(f"source {os.path.join(os.path.realpath(PACKAGING), OF_KVQD[shell.name])}; "
                       "mkdir -p files; touch files/one.conf; printf '<%s>\\n' taken\n")
            shell.wait("<taken>")
            for typed, words in (("--print-c\t", ["--print-config"]),
                                 ("--drain\t", ["--drain-ms"]),
                                 ("--conf\tfiles/on\t", ["--config", "files/one.conf"]),
                                 ("-c files/on\t", ["-c", "files/one.conf"]),
                                 ("--storage-dir fil\tone\t", ["--storage-dir", "files/one.conf"]),
                                 ("--workers fil\t", ["--workers", "fil"]),
                                 ("--pool-b\t1gb --log-f\tfiles/o\t",
                                  ["--pool-bytes", "1gb", "--log-file", "files/one.conf"])):
                self.assertEqual(shell.complete("kvqd " + typed), ["kvqd", *words], shell.name)

    def test_columns(self):
        """Columns of the list that was typed."""
        for shell in self.shells():
            if shell.name == "fish":
                continue
            self.assertEqual(shell.complete("kvqctl session list --columns compr\t"),
                             ["kvqctl", "session", "list", "--columns", "compression"])
            self.assertEqual(shell.complete("kvqctl client list --columns name,conn\t"),
                             ["kvqctl", "client", "list", "--columns", "name,connected"])
            self.assertEqual(shell.complete("kvqctl storage list --sort -form\t"),
                             ["kvqctl", "storage", "list", "--sort", "-formats"])
            self.assertEqual(shell.complete("kvqctl top --so\t-compr\t"),
                             ["kvqctl", "top", "--sort", "-compression"])
