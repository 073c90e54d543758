# SPDX-License-Identifier: Apache-2.0
"""Starts and stops real daemons for end-to-end tests.

Programs are taken from $KVQ_BIN_DIR (ctest sets it), else from build/release/bin.
"""
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(os.environ.get("KVQ_BIN_DIR", SOURCE / "build/release/bin"))
READY_SECONDS = 60  # a bound for hangs, not a wait


def program(name):
    return str(BIN / name)


class Daemon:
    """A kvqd on a runtime directory of its own, ready when the constructor returns."""

    def __init__(self, *options, runtime_dir=None, env=None):
        self.own_dir = None if runtime_dir else tempfile.mkdtemp(prefix="kvqd-")
        self.runtime_dir = str(runtime_dir or self.own_dir)
        self.log = tempfile.TemporaryFile()
        read_end, write_end = os.pipe()
        command = [program("kvqd"), "--runtime-dir", self.runtime_dir, "--ready-fd",
                   str(write_end), *map(str, options)]
        self.process = subprocess.Popen(command, pass_fds=[write_end], stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=subprocess.STDOUT, env=env)
        os.close(write_end)
        try:
            ready, _, _ = select.select([read_end], [], [], READY_SECONDS)
            if not ready or not os.read(read_end, 64):
                raise RuntimeError(f"kvqd did not become ready:\n{self.output()}")
        except RuntimeError:
            self.stop()
            raise
        finally:
            os.close(read_end)

    @property
    def pid(self):
        return self.process.pid

    def output(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        return self.process.wait(READY_SECONDS)

    def stop(self):
        """Ends it in order; returns its exit status."""
        status = self.process.poll()
        if status is None:
            self.process.terminate()
            try:
                status = self.process.wait(READY_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                status = self.process.wait()
        self.log.close()
        if self.own_dir:
            shutil.rmtree(self.own_dir, ignore_errors=True)
        return status


def main():
    """Runs the tests of the calling script; the last line counts them."""
    result = unittest.main(module="__main__", exit=False).result
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
