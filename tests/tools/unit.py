#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The systemd unit: whether systemd takes it, how much it leaves open, and whether kvqd can live
with it; and the user and the folders that systemd makes.

    tests/tools/unit.py BUILD

Exit status 77 where there is no systemd-analyze (Debian's package `systemd`). What kvqd calls is
seen by strace, and skipped without it. Prints `N passed, M failed, K skipped`.
"""
import grp
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
BOUND = 120  # seconds
# The most that systemd-analyze may find open, in its own measure, 0 (nothing) to 10.
MOST_OPEN = {"kvqd": 3.0, "kvqd-cpu": 2.0}


class Failure(Exception):
    """A check that did not hold; its text says what was seen."""


class Skip(Exception):
    """A program that a check needs is not there."""


def read(*parts):
    with open(os.path.join(ROOT, *parts), encoding="utf-8") as file:
        return file.read()


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, **more)
    if done.returncode:
        raise Failure(f"{' '.join(command)} ended with {done.returncode}: "
                      f"{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done


class Unit:
    """The unit as it is installed, and with the drop-in for machines without GPUs."""

    def __init__(self, build, folder):
        self.build, self.folder = build, folder
        text = read("packaging", "kvqd.service.in")
        text = text.replace("@CMAKE_INSTALL_FULL_BINDIR@", os.path.join(build, "bin"))
        self.text = text.replace("@CMAKE_INSTALL_FULL_SYSCONFDIR@", "/etc")
        if "@" in re.sub(r"#.*|@[a-z-]+", "", self.text):
            raise Failure("the unit has more to be filled in than this test knows")
        settings = read("packaging", "kvqd-cpu.conf").split("[Service]\n")[1]
        self.nvidia = self.write("kvqd-nvidia", read("packaging", "kvqd-nvidia.service").replace(
            "/usr/bin/nvidia-modprobe -c", "/bin/true -c"))
        self.paths = {"kvqd": self.write("kvqd", self.text),
                      "kvqd-cpu": self.write("kvqd-cpu", self.text.replace(
                          "\n[Install]", settings + "\n[Install]"))}

    def write(self, name, text):
        path = os.path.join(self.folder, name + ".service")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def check_it_is_valid(self):
        """Unknown names and values are warnings to systemd."""
        for path in (self.nvidia, *self.paths.values()):
            done = run(["systemd-analyze", "verify", "--man=no", path])
            said = [x for x in done.stderr.splitlines() if os.path.basename(path) in x]
            if said:
                raise Failure("\n".join(said))

    def check_what_is_open(self):
        for name, path in self.paths.items():
            done = run(["systemd-analyze", "security", "--offline=true", "--no-pager",
                        f"--threshold={MOST_OPEN[name] * 10:.0f}", path])
            if "Overall exposure level" not in done.stdout:
                raise Failure(f"systemd-analyze has judged nothing: {done.stdout}{done.stderr}")

    def check_folders(self):
        """In a system of its own, where no user is yet."""
        if os.geteuid():
            raise Skip("makes a user in a folder: needs root")
        root = os.path.join(self.folder, "root")
        os.makedirs(os.path.join(root, "etc"))
        for tool, words, name in (("systemd-sysusers", (), "kvqd.sysusers"),
                                  ("systemd-tmpfiles", ("--create",), "kvqd.tmpfiles")):
            done = run([tool, f"--root={root}", *words, os.path.join(ROOT, "packaging", name)])
            if "Failed" in done.stderr or "nknown" in done.stderr:
                raise Failure(done.stderr)
        with open(os.path.join(root, "etc", "passwd"), encoding="utf-8") as file:
            uid = int(re.search(r"^kvqd:[^:]*:(\d+):", file.read(), re.M)[1])
        for path, mode in (("var/lib/kvqd", 0o700), ("var/log/kvqd", 0o750)):
            status = os.stat(os.path.join(root, path))
            if (status.st_uid, status.st_mode & 0o7777) != (uid, mode):
                raise Failure(f"{path} belongs to {status.st_uid}, mode {status.st_mode:o}")

    def allowed(self):
        """Names of the calls that SystemCallFilter lets through."""
        filters = re.findall(r"^SystemCallFilter=(.*)$", self.text, re.M)
        if len(filters) != 1 or filters[0].startswith("~"):
            raise Failure("this test knows one line of SystemCallFilter, with what is allowed")
        names, left = set(), filters[0].split()
        while left:
            name = left.pop()
            if name.startswith("@"):
                shown = run(["systemd-analyze", "syscall-filter", "--no-pager", name]).stdout
                left += re.findall(r"^    ([@\w-]+)$", shown, re.M)
            else:
                names.add(name)
        return names

    def check_what_kvqd_calls(self):
        """A daemon that serves, saves, fetches, reloads and ends; and what it called meanwhile."""
        if not shutil.which("strace"):
            raise Skip("no strace")
        trace = os.path.join(self.folder, "trace")
        work(self.build, self.folder, ["strace", "-f", "-qq", "-e", "signal=none", "-o", trace])
        with open(trace, encoding="utf-8", errors="replace") as file:
            called = set(re.findall(r"^\d+ +(\w+)\(", file.read(), re.M))
        if len(called) < 30:
            raise Skip("strace may not trace here")
        refused = called - self.allowed()
        if refused:
            raise Failure("SystemCallFilter refuses " + ", ".join(sorted(refused)))


def work(build, folder, before):
    """A kvqd of this build at work, begun by the words before it."""
    os.environ.update(KVQ_BIN_DIR=os.path.join(build, "bin"), KVQ_E2E_BACKEND="cpu",
                      KVQ_LIBRARY=os.path.join(build, "lib", "libkvq.so"))
    sys.path.insert(0, os.path.join(ROOT, "tests", "e2e"))
    import e2e_rig  # noqa: PLC0415 (it looks at the environment)
    with open(os.path.join(folder, "kvqd.conf"), "w", encoding="utf-8") as file:
        file.write("pin = yes\n")
    alive, ours = os.pipe()  # kvqd ends with it, whatever becomes of strace
    daemon = e2e_rig.Daemon(within=before, fds=[alive], lifetime_fd=alive,
                            http_address="127.0.0.1:0",
                            config=os.path.join(folder, "kvqd.conf"),
                            storage_dir=os.path.join(folder, "store"),
                            log_file=os.path.join(folder, "log"),
                            runtime_group=grp.getgrgid(os.getegid()).gr_name)
    try:
        with daemon.client() as client:
            queue, tokens = client.queue(), e2e_rig.Tokens(1, 300)
            session = client.session(tokens.rows, "oscar2", name="s")
            e2e_rig.feed(queue, [tokens], [session], [300])
            for words in (("session", "park", "s"), ("session", "prefetch", "s"), ("status",),
                          ("session", "save", "s", "--again"), ("storage", "verify"),
                          ("storage", "compact"), ("config", "reload"), ("doctor",)):
                daemon.ctl(*words, check=words != ("doctor",))
        daemon.ctl("drain")
        daemon.process.wait(BOUND)
    finally:
        os.close(ours)
        os.close(alive)
        daemon.stop()


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    if not shutil.which("systemd-analyze"):
        print("no systemd-analyze here")
        return 77
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    with tempfile.TemporaryDirectory(prefix="kvq-unit-") as folder:
        os.chmod(folder, 0o755)
        unit = Unit(os.path.abspath(sys.argv[1]), folder)
        for check in (unit.check_it_is_valid, unit.check_what_is_open, unit.check_folders,
                      unit.check_what_kvqd_calls):
            try:
                check()
                counts["passed"] += 1
            except Skip as why:
                print(f"{check.__name__}: skipped: {why}")
                counts["skipped"] += 1
            except (Failure, OSError, AssertionError, subprocess.SubprocessError) as error:
                print(f"{check.__name__}: {error}")
                counts["failed"] += 1
    print("unit: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
