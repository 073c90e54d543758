#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs the Debian packages in a Debian 12 of their own and lives through what happens to a
service there: boots, reloads, upgrades, a removal, a purge.

    tests/deb.py OLD NEW [--root FOLDER] [--keep]
    tests/deb.py --try                      whether that can be run here; exit status 0 or 2

OLD and NEW are folders of packages that tools/deb.sh has made, those in NEW of a higher version.
FOLDER keeps a bare Debian between runs (default: build/debian-12; debootstrap fills it, 300 MB).
The Debian runs in a container (systemd-nspawn) with a systemd, and without a network once all is
installed. Needs root. Prints `N passed, M failed`.
"""
import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

BOUND = 300  # seconds: for hangs alone
UNIT = "kvqd.service"
BARE = "systemd,systemd-sysv,dbus,python3,python3-numpy,curl"

# An engine: makes its session longer by 100 tokens, of values that anybody can make again.
ENGINE = """
import sys
import numpy as np
import kvq
name, ask = sys.argv[1], sys.argv[2]
def rows(n):
    return np.random.default_rng(7).standard_normal((n, 2, 128)).astype(np.float32)
with kvq.Client() as client, client.queue() as queue:
    session = client.session([kvq.Layer(8, 2, 128)], "oscar2", name=name)
    there = session.tokens
    values = rows(there + 100)[there:]
    with queue.step([session], tokens=100) as step:
        out, lse = step.append_attend(0, values, values, np.ones((100, 8, 128), np.float32))
    print(there, session.tokens, abs(out).mean(), flush=True)
    if ask == "stay":  # until told to go on, over a restart of the daemon
        sys.stdin.readline()
        client.reattach()
        session = client.session(name=name)
        print(session.tokens, flush=True)
    session.close()
"""


class Machine:
    """A Debian of its own: a folder, a container once it is booted."""

    def __init__(self, bare):
        self.folder = tempfile.mkdtemp(prefix="kvq-deb-")
        self.root = os.path.join(self.folder, "root")
        subprocess.run(["cp", "-a", "--reflink=auto", bare, self.root], check=True)
        self.container = None
        self.leader = None

    def inside(self, *command, **options):
        """Runs a command there: in the container, or in the folder while that is not booted."""
        enter = (["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-r", "-w"]
                 if self.leader else ["chroot", self.root])
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
               "DEBIAN_FRONTEND": "noninteractive", "KVQ_RUNTIME_DIR": "/run/kvqd"}
        return subprocess.Popen([*enter, *command], text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, env=env,
                                **{"stdin": subprocess.DEVNULL, **options})

    def try_run(self, *command):
        process = self.inside(*command)
        said, _ = process.communicate(timeout=BOUND)
        return process.returncode, said

    def run(self, *command):
        status, said = self.try_run(*command)
        if status:
            raise AssertionError(f"{' '.join(command)}: exit status {status}\n{said[-3000:]}")
        return said

    def boot(self, private=True):
        """private: without a network, but for a loopback address of its own."""
        log = open(os.path.join(self.folder, "console.log"), "ab")
        self.container = subprocess.Popen(
            ["systemd-nspawn", "-q", "--register=no", "--keep-unit",
             *(["--private-network"] if private else []), "--resolv-conf=off", "-D", self.root,
             "-b"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()
        self.wait("a systemd", self.find_leader)
        self.wait("the end of its start", lambda: self.try_run(
            "systemctl", "is-system-running")[1].strip() in ("running", "degraded"))

    def find_leader(self):
        """The first process in the container is a child of systemd-nspawn's."""
        if self.container.poll() is not None:
            with open(os.path.join(self.folder, "console.log"), errors="replace") as log:
                raise AssertionError(f"systemd-nspawn ended: {log.read()[-2000:]}")
        path = f"/proc/{self.container.pid}/task/{self.container.pid}/children"
        with open(path, encoding="ascii") as children:
            for pid in children.read().split():
                with open(f"/proc/{pid}/comm", encoding="ascii") as name:
                    if name.read().strip() == "systemd":
                        self.leader = int(pid)
        return self.leader

    @staticmethod
    def wait(what, holds):
        """Looks again and again: nothing of another system tells when it is so."""
        end = time.monotonic() + BOUND
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"{what} did not come within {BOUND} s")
            time.sleep(0.1)

    def halt(self):
        if self.container and self.container.poll() is None:
            self.try_run("systemctl", "poweroff", "--no-block")
            try:
                self.container.wait(60)
            except subprocess.TimeoutExpired:
                self.container.terminate()
                self.container.wait(BOUND)
        self.container = self.leader = None

    def close(self, keep):
        self.halt()
        if keep:
            print(f"kept: {self.folder}")
        else:
            shutil.rmtree(self.folder)


class Steps:
    """Steps on a machine, in an order in which each needs those before it, and what was seen."""

    def __init__(self, machine):
        self.machine, self.passed, self.failed = machine, 0, 0

    def check(self, what, holds, said=""):
        self.passed, self.failed = self.passed + bool(holds), self.failed + (not holds)
        print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)
        if not holds and said:
            print(said[-3000:])

    def run(self, steps, keep=False):
        """All steps, and the end of the machine. An exit status."""
        try:
            for step in steps:
                step()
        except (AssertionError, subprocess.SubprocessError, OSError) as error:
            self.check(f"the steps end: {error}", False)
        finally:
            self.machine.close(keep)
        print(f"{self.passed} passed, {self.failed} failed")
        return 1 if self.failed else 0


class Packages(Steps):
    """What happens to the packages."""

    def __init__(self, machine, options):
        super().__init__(machine)
        for name in ("old", "new"):
            os.mkdir(os.path.join(machine.root, name))
            for package in glob.glob(os.path.join(getattr(options, name), "*.deb")):
                shutil.copy(package, os.path.join(machine.root, name))
        with open(os.path.join(machine.root, "root", "engine.py"), "w", encoding="utf-8") as file:
            file.write(ENGINE)

    def install(self, folder, *options):
        names = sorted(os.path.basename(p) for p in glob.glob(f"{self.machine.root}/{folder}/*"))
        return self.machine.run("apt-get", "install", "-y", "--no-install-recommends", *options,
                                *[f"/{folder}/{name}" for name in names])

    def engine(self, name):
        """Tokens that were there, and are there now."""
        return self.machine.run("python3", "/root/engine.py", name, "go").split()[:2]

    def active(self):
        return self.machine.try_run("systemctl", "is-active", UNIT)[1].strip()

    def journal(self):
        return self.machine.run("journalctl", "-q", "--no-pager", "-u", UNIT)

    def there(self, path):
        return os.path.lexists(self.machine.root + path)

    def owner(self, path):
        return self.machine.run("stat", "-c", "%U:%G %a", path).strip()

    # ---- The steps ----

    def where_no_systemd_runs(self):
        """As when an image is made: nothing is started, and the service is enabled for later."""
        self.machine.run("apt-get", "update")
        said = self.install("old")
        self.check("installs where no systemd runs", "error" not in said.lower(), said)
        self.check("the service is enabled",
                   self.there(f"/etc/systemd/system/multi-user.target.wants/{UNIT}"))

    def first_boot(self):
        self.machine.boot()
        self.check("the service is active after a boot", self.active() == "active", self.journal())
        self.check("kvqctl is answered", "kvqd" in self.machine.run("kvqctl", "status"))
        self.check("its folder is its own", self.owner("/var/lib/kvqd") == "kvqd:kvqd 700",
                   self.owner("/var/lib/kvqd"))
        self.check("its group may enter", self.owner("/run/kvqd") == "kvqd:kvqd 750",
                   self.owner("/run/kvqd"))
        self.check("an engine works", self.engine("kept") == ["0", "100"])
        self.check("another user may not", self.machine.try_run(
            "setpriv", "--reuid", "65534", "--clear-groups", "kvqctl", "status")[0] != 0)
        page = self.machine.run("curl", "-sS", "http://127.0.0.1:9647/")
        self.check("the page is served", "<title>" in page, page)
        metrics = self.machine.run("curl", "-sS", "http://127.0.0.1:9647/metrics")
        self.check("metrics are", "\nkvqd_tokens 100\n" in metrics, metrics)

    def reload(self):
        self.machine.run("sed", "-i", "s/^#* *log_level *=.*/log_level = debug/",
                         "/etc/kvqd/kvqd.conf")
        self.machine.run("systemctl", "reload", UNIT)
        self.machine.wait("the reload", lambda: "event=reload" in self.journal())
        level = json.loads(self.machine.run("kvqctl", "config", "get", "log_level", "--json"))
        self.check("reload reads the configuration again", "debug" in json.dumps(level),
                   json.dumps(level))
        self.check("and ends nothing", self.active() == "active" and
                   self.engine("kept") == ["100", "200"])

    def stop_and_start(self):
        self.machine.run("systemctl", "stop", UNIT)
        self.check("a stop ends it in order", self.active() == "inactive", self.journal())
        self.machine.run("systemctl", "start", UNIT)
        self.check("a session goes on after stop and start", self.engine("kept") == ["200", "300"])

    def reboot(self):
        self.machine.halt()
        self.machine.boot()
        self.check("and after a boot", self.engine("kept") == ["300", "400"], self.journal())

    def upgrade(self):
        """With an engine at work, whose session is saved and which attaches again."""
        was = self.machine.run("dpkg-query", "-W", "-f", "${Version}", "kvqd")
        engine = self.machine.inside("python3", "/root/engine.py", "busy", "stay",
                                     stdin=subprocess.PIPE)
        engine.stdout.readline()
        said = self.install("new")
        now = self.machine.run("dpkg-query", "-W", "-f", "${Version}", "kvqd")
        self.check("the version rises", was != now, said)
        self.check("the configuration that was edited stays", self.machine.run(
            "grep", "-c", "^log_level = debug", "/etc/kvqd/kvqd.conf").strip() == "1", said)
        self.check("the new daemon runs", self.active() == "active", self.journal())
        out, _ = engine.communicate("\n", timeout=BOUND)
        self.check("an engine attaches again and finds its session",
                   (engine.returncode, out.strip()) == (0, "100"), out)
        self.check("sessions go on after an upgrade", self.engine("kept") == ["400", "500"])

    def downgrade(self):
        said = self.install("old", "--allow-downgrades")
        self.check("sessions go on after a downgrade", self.engine("kept") == ["500", "600"], said)

    def disabled(self):
        self.machine.run("systemctl", "disable", "--now", UNIT)
        self.install("new")
        self.check("an upgrade leaves a service that was disabled disabled", self.machine.try_run(
            "systemctl", "is-enabled", UNIT)[1].strip() == "disabled")
        self.check("and does not start it", self.active() == "inactive")
        self.machine.run("systemctl", "enable", "--now", UNIT)

    def remove(self):
        said = self.machine.run("apt-get", "remove", "-y", "kvqd")
        self.check("a removal ends the daemon", self.active() != "active", said)
        self.check("it keeps sessions and configuration",
                   self.there("/var/lib/kvqd/catalog.db") and self.there("/etc/kvqd/kvqd.conf"),
                   self.machine.run("ls", "-la", "/var/lib/kvqd", "/etc/kvqd"))
        self.install("new")
        self.check("which are there again afterwards", self.engine("kept") == ["600", "700"],
                   self.journal())

    def purge(self):
        said = self.machine.run("apt-get", "purge", "-y", "kvqd", "kvq-tools", "libkvq0",
                                "libkvq-dev", "python3-kvq")
        paths = ["/etc/kvqd", "/var/lib/kvqd", "/run/kvqd", "/usr/bin/kvqctl",
                 f"/etc/systemd/system/multi-user.target.wants/{UNIT}",
                 f"/etc/systemd/system/{UNIT}", "/usr/lib/python3/dist-packages/kvq",
                 f"/var/lib/systemd/deb-systemd-helper-enabled/{UNIT}.dsh-also"]
        left = [path for path in paths if self.there(path)]
        self.check("a purge leaves nothing", not left, f"{left}\n{said}")
        state = self.machine.run("dpkg", "-l")
        self.check("nor does dpkg know of it", "kvq" not in state, state)

    def whole(self):
        return (self.where_no_systemd_runs, self.first_boot, self.reload, self.stop_and_start,
                self.reboot, self.upgrade, self.downgrade, self.disabled, self.remove, self.purge)


def bare_debian(folder):
    """Made once. A folder that is half made is made again."""
    if not os.path.exists(os.path.join(folder, "made")):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={BARE}", "bookworm",
                        os.path.join(folder, "root")], check=True, stdout=sys.stderr)
        with open(os.path.join(folder, "made"), "w", encoding="ascii"):
            pass
    return os.path.join(folder, "root")


def can_run(folder):
    """Whether debootstrap gets its packages, and a container boots."""
    machine = None
    try:
        machine = Machine(bare_debian(folder))
        machine.boot()
        return True
    except (AssertionError, subprocess.SubprocessError, OSError) as error:
        print(f"deb.py: no Debian starts here: {error}", file=sys.stderr)
        return False
    finally:
        if machine:
            machine.close(False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("old", nargs="?")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--try", action="store_true", dest="only_try",
                        help="say whether a Debian starts here, and end")
    parser.add_argument("--root", default="build/debian-12")
    parser.add_argument("--keep", action="store_true", help="leave the Debian where it is")
    options = parser.parse_args()
    lacks = [name for name in ("debootstrap", "systemd-nspawn", "nsenter")
             if not shutil.which(name)]
    if lacks or os.geteuid() != 0:
        print(f"deb.py: needs root, and {', '.join(lacks) or 'nothing else'}", file=sys.stderr)
        return 2
    if options.only_try:
        return 0 if can_run(options.root) else 2
    if not options.new:
        parser.error("two folders of packages are needed")
    packages = Packages(Machine(bare_debian(options.root)), options)
    return packages.run(packages.whole(), options.keep)


if __name__ == "__main__":
    sys.exit(main())
