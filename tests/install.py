#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs a build into a temporary folder and uses it as a stranger would.

    tests/install.py BUILD

Compiles the client of README.md with pkg-config, in C and its headers in C++, runs it against the
installed daemon, and asks with the installed kvqctl. Prints `N passed, M failed`.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
INSTALLED = (
    "bin/kvqd", "bin/kvqctl", "bin/kvq-run", "bin/kvq-bench", "bin/kvq-codebook",
    "include/kvq.h",
    *(f"include/kvq/{name}" for name in sorted(os.listdir(os.path.join(ROOT, "client", "kvq")))),
    "lib/libkvq.so", "lib/libkvq.so.0", "lib/pkgconfig/kvq.pc",
    "lib/systemd/system/kvqd.service", "lib/systemd/system/kvqd-nvidia.service",
    "lib/sysusers.d/kvqd.conf", "lib/tmpfiles.d/kvqd.conf", "etc/logrotate.d/kvqd",
    "etc/kvqd/kvqd.conf", "share/kvqd/prometheus/kvqd.rules.yml",
    "share/kvqd/prometheus/kvqd.dashboard.json", "share/man/man1/kvqctl.1",
    "share/man/man1/kvq-run.1", "share/man/man1/kvq-bench.1", "share/man/man1/kvq-codebook.1",
    "share/man/man8/kvqd.8", "share/doc/kvqd/examples/kvqd-cpu.conf",
    *(f"share/doc/kvqd/{name}.md" for name in ("operations", "troubleshooting", "formats",
                                               "protocol", "sizing", "upgrading", "containers",
                                               "nodes", "gpus", "quality")),
    "share/man/man3/kvq.3", "share/man/man3/kvq_step.3", "share/man/man3/kvq_append_attend.3",
    "share/bash-completion/completions/kvqctl", "share/bash-completion/completions/kvqd",
    "share/zsh/site-functions/_kvqctl", "share/zsh/site-functions/_kvqd",
    "share/fish/vendor_completions.d/kvqctl.fish", "share/fish/vendor_completions.d/kvqd.fish",
)

SIZES = {"kvqctl": 1 << 20}  # formats and sizes of the kernels, and none of their loops
MOST = 16 << 20  # bytes of any other program or library

# Of a line of cmake_install.cmake: the folder, another name than the file's, the files.
INSTALLS = re.compile(r'file\(INSTALL DESTINATION "([^"]+)" TYPE \w+(?: RENAME "([^"]+)")? '
                      r'FILES((?:\s+"[^"]+")+)')


class Failure(Exception):
    """A check that did not hold; its text says what was seen."""


def run(command, limit=60, **more):
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, **more)
    if done.returncode:
        raise Failure(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-600:]}")
    return done.stdout


class Install:
    """One installed tree and what is tried with it, in order."""

    def __init__(self, build, prefix):
        self.build, self.prefix = build, prefix
        self.runtime = os.path.join(prefix, "run")
        self.env = dict(os.environ, KVQ_RUNTIME_DIR=self.runtime,
                        PKG_CONFIG_PATH=os.path.join(prefix, "lib", "pkgconfig"))
        self.daemon = None

    def path(self, *parts):
        return os.path.join(self.prefix, *parts)

    def check_files(self):
        run(["cmake", "--install", self.build, "--prefix", self.prefix])
        missing = [name for name in INSTALLED if not os.path.exists(self.path(name))]
        if missing:
            raise Failure("not installed: " + ", ".join(missing))

    def check_links(self):
        """Pages link to nothing that is not installed beside them."""
        folder = self.path("share", "doc", "kvqd")
        for page in (name for name in os.listdir(folder) if name.endswith(".md")):
            with open(os.path.join(folder, page), encoding="utf-8") as file:
                targets = re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", file.read())
            for target in targets:
                if not os.path.exists(os.path.join(folder, target)):
                    raise Failure(f"share/doc/kvqd/{page} links to {target}")

    def check_unit(self):
        """The unit finds what it names, whatever the prefix that was configured."""
        for prefix, etc in (("/usr", "/etc"), ("/opt/kvq", "/etc/opt/kvq"),
                            ("/usr/local", "/usr/local/etc")):
            build = self.path("configured", prefix.strip("/").replace("/", "-"))
            run(["cmake", "-S", ROOT, "-B", build, f"-DCMAKE_INSTALL_PREFIX={prefix}",
                 "-DKVQ_TESTS=OFF", "-DKVQ_EMU=OFF", "-DKVQ_CUDA=OFF"], limit=180)
            with open(os.path.join(build, "cmake_install.cmake"), encoding="utf-8") as file:
                script = file.read().replace("${CMAKE_INSTALL_PREFIX}", prefix)
            there = {os.path.join(folder, name or os.path.basename(path))
                     for folder, name, paths in INSTALLS.findall(script)
                     for path in re.findall('"([^"]+)"', paths)}
            with open(os.path.join(build, "kvqd.service"), encoding="utf-8") as file:
                unit = re.findall(r"^Exec\w+=(.*)", file.read(), re.M)
            named = {word for line in unit for word in line.split() if word.startswith("/")}
            wanted = named - {"/run/kvqd"} | {f"{etc}/kvqd/kvqd.conf", f"{etc}/logrotate.d/kvqd"}
            if not named or wanted - there:
                raise Failure(f"with the prefix {prefix} there would be no " +
                              ", ".join(sorted(wanted - there)))

    def check_stripped(self):
        for folder in ("bin", "lib"):
            for name in os.listdir(self.path(folder)):
                path = self.path(folder, name)
                if os.path.isdir(path) or os.path.islink(path):
                    continue
                if ".symtab" in run(["readelf", "-S", "-W", path]):
                    raise Failure(f"{folder}/{name} is not stripped")
                if os.path.getsize(path) > SIZES.get(name, MOST):
                    raise Failure(f"{folder}/{name} takes {os.path.getsize(path):,} bytes; at most "
                                  f"{SIZES.get(name, MOST):,} are meant")

    def flags(self):
        return run(["pkg-config", "--cflags", "--libs", "kvq"], env=self.env).split()

    def check_soname(self):
        dynamic = run(["readelf", "-d", self.path("lib", "libkvq.so")])
        if "[libkvq.so.0]" not in dynamic:
            raise Failure("the library's soname is not libkvq.so.0")

    def check_compiles(self):
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
            programs = re.findall(r"```c\n(.*?)```", file.read(), re.S)
        if len(programs) != 1:
            raise Failure(f"README.md has {len(programs)} C programs, 1 expected")
        with open(self.path("client.c"), "w", encoding="utf-8") as file:
            file.write(programs[0])
        run(["cc", "-std=c17", "-Wall", "-Wextra", "-Werror", self.path("client.c"), *self.flags(),
             "-Wl,-rpath," + self.path("lib"), "-o", self.path("client")])

    def check_cxx(self):
        flags = [f for f in self.flags() if f.startswith("-I")]
        for header in (name for name in INSTALLED if name.startswith("include/")):
            run(["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++",
                 *flags, self.path(header), "-Wno-pragma-once-outside-header"])

    def check_daemon_starts(self):
        reader, writer = os.pipe()
        self.daemon = subprocess.Popen(
            [self.path("bin", "kvqd"), "--runtime-dir", self.runtime, "--pool-bytes", "256mb",
             "--config", self.path("etc", "kvqd", "kvqd.conf"), "--ready-fd", str(writer)],
            pass_fds=[writer], stderr=subprocess.PIPE, text=True)
        os.close(writer)
        ready = os.read(reader, 64)
        os.close(reader)
        if not ready:
            raise Failure("kvqd did not become ready: " + self.daemon.stderr.read()[-600:])

    def check_client_runs(self):
        output = run([self.path("client")], env=self.env)
        if not output.startswith("1000 tokens, output[0] = "):
            raise Failure(f"README's client printed {output!r}")

    def check_completion(self):
        for program in ("kvqctl", "kvqd"):
            script = self.path("share", "bash-completion", "completions", program)
            rule = run(["bash", "-c", f"source '{script}' && complete -p {program}"])
            if rule != f"complete -F _{program} {program}\n":
                raise Failure(f"bash completes {program} by {rule!r}")

    def check_kvqctl(self):
        status = json.loads(run([self.path("bin", "kvqctl"), "status", "--json"], env=self.env))
        if status["sessions"] != 0 or status["pool_used_bytes"] != 0:
            raise Failure(f"the client's session was not returned: {status}")
        if status["counters"]["appended_tokens"] != 1000:
            raise Failure(f"{status['counters']['appended_tokens']} tokens appended, 1000 expected")

    def check_daemon_ends(self):
        self.daemon.terminate()
        try:
            _, errors = self.daemon.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            raise Failure("kvqd did not end within 20 seconds of SIGTERM") from None
        if self.daemon.returncode:
            raise Failure(f"kvqd ended with {self.daemon.returncode}: {errors[-600:]}")

    def close(self):
        if self.daemon and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.communicate()


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    prefix = tempfile.mkdtemp(prefix="kvq-install-")
    install = Install(os.path.abspath(sys.argv[1]), prefix)
    passed = failed = 0
    try:
        for check in (install.check_files, install.check_links, install.check_unit,
                      install.check_stripped, install.check_soname, install.check_compiles,
                      install.check_cxx, install.check_daemon_starts, install.check_client_runs,
                      install.check_kvqctl, install.check_completion,
                      install.check_daemon_ends):
            try:
                check()
                passed += 1
            except (Failure, OSError, ValueError, subprocess.TimeoutExpired) as error:
                print(f"{check.__name__}: {error}")
                failed += 1
                if check == install.check_daemon_starts:
                    break
    finally:
        install.close()
        shutil.rmtree(prefix)
    print(f"install: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
