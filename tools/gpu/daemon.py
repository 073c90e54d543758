#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The part `daemon` of tools/gpu-check.sh: kvqd on this machine's GPU with clients in processes of
their own, from a folder that pack.py made. What this machine refuses is tried first; what needs it
is then not run, and says so by name.

    daemon.py FOLDER --out FILE [--emulate] [--only WORD...]

--emulate takes the software driver in place of NVIDIA's; --only runs what has one of the words in
its name. Rows that the file has are not run again.
"""
import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check  # noqa: E402
import report  # noqa: E402
import sandbox  # noqa: E402
import waits  # noqa: E402

SECONDS = 280  # for one program
KERNEL_TESTS = ("test_gpu_driver", "test_gpu_attend", "test_gpu_long", "test_gpu_replay",
                "test_gpu_pack")
SOFT_TESTS = ("test_soft_driver", "test_soft_peers")
DRIVER, SERVES = ("GPU driver",), ("GPU driver", "memfd seals", "descriptors over sockets")
IMPORTS = (*SERVES, "memory by legacy IPC handle")


class NotRun(Exception):
    """Why something was not run."""


class Machine:
    """Where the packed programs run, on which driver, and what works there."""

    def __init__(self, folder, emulate):
        self.folder, self.emulate = folder, emulate
        self.driver = str(folder / "lib" / "libkvq-emu.so") if emulate else "libcuda.so.1"
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("KVQD_")}
        self.environment.update(
            KVQ_BIN_DIR=str(folder / "bin"), KVQ_LIBRARY=str(folder / "lib" / "libkvq.so.0"),
            KVQ_E2E_BACKEND="emu" if emulate else "gpu", KVQ_GPU_DRIVER=self.driver,
            PYTHONPATH=str(folder / "client" / "python"), PYTHONDONTWRITEBYTECODE="1")
        try:
            found = json.loads(self.run(sys.executable, sandbox.__file__, self.driver).stdout)
        except (ValueError, subprocess.TimeoutExpired):
            found = {"device": "no GPU", "reasons": dict.fromkeys(
                sandbox.NAMES, "trying it did not come to an end")}
        self.name, self.reasons = found["device"], found["reasons"]

    def run(self, *command, **more):
        environment = {**self.environment, **more}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=environment, timeout=SECONDS, stdin=subprocess.DEVNULL)
        print(f"$ {' '.join(map(str, command))}\n{done.stdout}", flush=True)
        return done

    def need(self, names):
        for name in names:
            if self.reasons[name] is not None:
                raise NotRun(f"{name}: {self.reasons[name]}")

    def library_path(self):
        """The file of the driver's library."""
        ctypes.CDLL(self.driver)
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/libcuda.so" in line or "/libkvq-emu.so" in line:
                return line[line.index("/"):]
        raise NotRun("the driver's library has no file")

    @contextlib.contextmanager
    def kvqd(self):
        """A running daemon on the GPU; gives its runtime directory."""
        folder = tempfile.mkdtemp(prefix="kvq-packed-")
        directory = os.path.join(folder, "run")  # kvqd's alone
        readable, writable = os.pipe()
        with open(os.path.join(folder, "log"), "w+", encoding="utf-8") as log:
            daemon = subprocess.Popen(
                [self.folder / "bin" / "kvqd", "--runtime-dir", directory, "--ready-fd",
                 str(writable), "--backend", self.environment["KVQ_E2E_BACKEND"], "--gpu-bytes",
                 "256mb", "--pool-bytes", "64mb", "--extent-bytes", "4mb"], pass_fds=[writable],
                stdout=log, stderr=log, env=self.environment)
            os.close(writable)
            try:
                if os.read(readable, 6) != b"ready\n":
                    log.seek(0)
                    raise RuntimeError("kvqd did not start: " + log.read()[-600:])
                yield directory
            finally:
                daemon.terminate()
                daemon.wait(SECONDS)
                os.close(readable)
                shutil.rmtree(folder)


# ---- Rows ----

def cmocka(machine, name, needs, **environment):
    machine.need(needs)
    done = machine.run(machine.folder / "tests" / name, **environment)
    passed = sum(map(int, re.findall(r"\[  PASSED  \] (\d+) test", done.stdout)))
    failed = re.findall(r"\[  FAILED  \] (test\w+)$", done.stdout, re.M)
    if done.returncode == 77:
        raise NotRun(done.stdout.strip().splitlines()[-1])
    row = {"passed": passed}
    if done.returncode or not passed:
        row["wrong"] = f"exit status {done.returncode}; " + (", ".join(failed) or
                                                             done.stdout[-300:])
    return row


def kernels(machine, name):
    return cmocka(machine, name, DRIVER, KVQ_GPU="0")


def soft(machine, name):
    """The software driver here, to tell a machine's refusals from a GPU's."""
    return cmocka(machine, name, ("memfd seals", "descriptors over sockets"),
                  KVQ_GPU_DRIVER=str(machine.folder / "lib" / "libkvq-emu.so"))


def beside_a_wait(machine, name):
    """Which calls of the driver come back while a stream waits, and what becomes of others."""
    machine.need(("GPU driver", "words on streams"))
    done = machine.run(sys.executable, waits.__file__, machine.driver, name)
    if done.returncode:
        return {"wrong": f"exit status {done.returncode}: {done.stdout[-300:]}"}
    return json.loads(done.stdout)[name]


def end_to_end(machine, suite):
    machine.need(SERVES + (("pidfd",) if ".Dead" in suite else ()))
    done = machine.run(sys.executable, machine.folder / "tests" / "e2e" / "e2e.py", suite)
    counted = re.search(r"(\d+) passed, (\d+) failed, (\d+) skipped\n$", done.stdout)
    if not counted:
        return {"wrong": f"exit status {done.returncode}: {done.stdout[-300:]}"}
    row = dict(zip(("passed", "failed", "skipped"), map(int, counted.groups())))
    if row["failed"] or done.returncode:
        row["wrong"] = ", ".join(re.findall(r"^(?:FAIL|ERROR): (\S+)", done.stdout, re.M))
    return row


def doctor(machine, _):
    machine.need(SERVES)
    with machine.kvqd() as directory:
        done = machine.run(machine.folder / "bin" / "kvqctl", "--runtime-dir", directory, "doctor")
    row = {line.split()[1].rstrip(":"): line.strip() for line in done.stdout.splitlines()
           if len(line.split()) > 2 and line.split()[1].startswith(("gpu", "mps", "backend"))}
    return row or {"wrong": f"nothing about a GPU: {done.stdout[-300:]}"}


def build_engine(machine, target):
    compiler = next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if not compiler:
        raise NotRun("no C compiler here")
    folder = machine.folder
    done = machine.run(compiler, "-std=c17", folder / "examples" / "cuda_engine.c", "-o", target,
                       f"-I{folder / 'client'}", folder / "lib" / "libkvq.so",
                       machine.library_path(), f"-Wl,-rpath,{folder / 'lib'}",
                       "-Wl,--unresolved-symbols=ignore-in-shared-libs")
    if done.returncode:
        raise RuntimeError(f"cuda_engine.c does not compile: {done.stdout[-300:]}")


def example(machine, name):
    machine.need(SERVES if name == "minimal.py" else IMPORTS)
    if name == "pytorch_engine.py" and machine.emulate:
        raise NotRun("PyTorch has no software GPU")
    with machine.kvqd() as directory, tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, machine.folder / "examples" / name]
        if name == "cuda_engine.c":
            command = [os.path.join(scratch, "cuda_engine")]
            if machine.emulate:
                command = [machine.folder / "tests" / "example_cuda_engine"]
            else:
                build_engine(machine, command[0])
        done = machine.run(*command, KVQ_RUNTIME_DIR=directory)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode and "needs PyTorch" in last:
        raise NotRun(last)
    good = done.returncode == 0 and re.search(r"\b\d+ tokens\b", last)
    if name == "cuda_engine.c":  # a mean of values between 1 and 2
        good = good and re.search(r", output 1\.\d+, streams ordered by", last)
    return {"says": last} if good else {"wrong": f"exit status {done.returncode}: {last}"}


def suites(folder):
    return re.findall(r"\be2e_\w+\.[A-Z]\w+", (folder / "tests" / "e2e" / "e2e.py").read_text())


def plan(folder):
    """(group, name, function) of all rows, in the order in which they run."""
    for group, names, function in (
            ("doctor", ("what kvqd finds",), doctor), ("kernel tests", KERNEL_TESTS, kernels),
            ("beside a stream that waits", waits.NAMES, beside_a_wait),
            ("end to end", suites(folder), end_to_end),
            ("examples", ("minimal.py", "cuda_engine.c", "pytorch_engine.py"), example),
            ("software driver", SOFT_TESTS, soft)):
        for name in names:
            yield group, name, function


def make(function, machine, name):
    started = time.monotonic()
    try:
        row = function(machine, name)
    except NotRun as why:
        row = {"not_run": str(why)}
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        row = {"wrong": str(error)}
    if "not_run" not in row and not machine.emulate:
        row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that pack.py made")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    o = parser.parse_args()
    machine = Machine(o.folder.resolve(), o.emulate)
    rows = check.Rows("daemon", types.SimpleNamespace(name=machine.name, timed=not o.emulate),
                      o.out)
    for name, why in machine.reasons.items():
        rows("this machine")[name] = {"works": True} if why is None else {"not_run": why}
    for group, name, function in plan(machine.folder):
        if any(word in f"{group}: {name}" for word in o.only):
            rows.measure([group, name], lambda f=function, n=name: make(f, machine, n))
    rows.save(complete=o.only == [""] and machine.reasons["GPU driver"] is None)
    for group, found in rows().items():
        for name, row in found.items():
            if "not_run" in row:
                print(f"not run: {group}, {name}: {row['not_run']}")
    wrong = report.complaints(rows.result)
    for text in wrong:
        print(f"daemon: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
