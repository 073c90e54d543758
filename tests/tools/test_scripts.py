#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The shell scripts in tools/, over programs that only note how they were called: what their
--help does. Nothing is built or installed."""
import os
import shutil
import subprocess
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "..", ".."))
# Stands for programs that would change something.
NOTED = """#!/bin/sh
echo "$(basename "$0") $*" >>"$NOTES"
exit "${NOTED_STATUS:-0}"
"""
WORK = ("apt-get", "cmake", "cpack", "ctest", "git", "ninja", "pip", "sudo")


class Scripts(unittest.TestCase):
    """A copy of the scripts in a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvq-scripts-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.tools = os.path.join(self.folder, "tools")
        os.mkdir(self.tools)
        os.mkdir(os.path.join(self.folder, "bin"))
        for name in os.listdir(os.path.join(ROOT, "tools")):
            if name.endswith(".sh"):
                shutil.copy(os.path.join(ROOT, "tools", name), self.tools)
        for name in WORK:
            self.program(name, NOTED)

    def program(self, name, text):
        path = os.path.join(self.folder, "bin", name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def run_script(self, *command, cwd=None, **environment):
        return subprocess.run(
            command, cwd=cwd or self.folder, capture_output=True, text=True, timeout=60,
            env={**os.environ, "PATH": os.path.join(self.folder, "bin") + ":" + os.environ["PATH"],
                 "NOTES": os.path.join(self.folder, "notes"), **environment})

    def notes(self):
        """What was called since the last time."""
        path = os.path.join(self.folder, "notes")
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
        os.unlink(path)
        return lines


class Help(Scripts):
    def test_help(self):
        """From every folder that one may stand in, and it does nothing else."""
        for name in ("compat", "deb", "deps", "loop", "test", "wheel"):
            for cwd, path in ((self.folder, f"tools/{name}.sh"), (self.tools, f"./{name}.sh"),
                              ("/", os.path.join(self.tools, f"{name}.sh"))):
                done = self.run_script(path, "--help", cwd=cwd, NOTED_STATUS="1")
                self.assertEqual((done.returncode, done.stderr), (0, ""), path)
                self.assertIn(f"tools/{name}.sh", done.stdout)
        self.assertEqual(self.notes(), [])


if __name__ == "__main__":
    unittest.main()
