#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel where nothing of ours is and uses it as a stranger would.

    tests/e2e/wheel.py WHEEL        one that tools/wheel.sh has made

Prints `N passed, M failed`.
"""
import os
import subprocess
import sys
import tempfile
import unittest
import zipfile

LIMIT = 300  # seconds: a bound for hangs
PROGRAM = """
import kvq, numpy as np
folder = kvq.__path__[0]
assert kvq.program("kvqd").startswith(folder) and kvq._ffi.lib._name.startswith(folder)
with kvq.Client() as client, client.queue() as queue:
    with client.session([kvq.Layer(8, 2, 128)], "oscar2") as session:
        with queue.step([session], tokens=3) as step:
            k, v, q = (np.ones((3, heads, 128), np.float32) for heads in (2, 2, 8))
            out, lse = step.append_attend(0, k, v, q)
        print(session.tokens, out.shape, abs(out - 1).max() < 1e-2)
"""


class Wheel(unittest.TestCase):
    wheel = None

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvq-")
        cls.python = os.path.join(cls.folder.name, "venv", "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", os.path.dirname(os.path.dirname(cls.python))],
                       check=True, timeout=LIMIT)
        cls.run_bare("-m", "pip", "-q", "install", cls.wheel)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def run_bare(cls, *arguments, program=None):
        """With nothing in the environment that could name another library or program."""
        env = {k: v for k, v in os.environ.items()
               if k.startswith(("PIP_", "SSL_")) or k.lower().endswith("_proxy")}
        env.update(PATH="/usr/bin:/bin", XDG_RUNTIME_DIR=cls.folder.name, HOME=cls.folder.name)
        done = subprocess.run([program or cls.python, *arguments], capture_output=True, text=True,
                              env=env, cwd=cls.folder.name, timeout=LIMIT)
        if done.returncode:
            raise AssertionError(f"{arguments} ended with {done.returncode}: {done.stderr[-900:]}")
        return done.stdout

    def test_attends(self):
        """Without a daemon, from an empty environment."""
        self.assertEqual(self.run_bare("-c", PROGRAM).strip(), "3 (3, 8, 128) True")

    def test_programs(self):
        version = os.path.basename(self.wheel).split("-")[1]
        for name in ("kvqd", "kvqctl"):
            path = os.path.join(os.path.dirname(self.python), name)
            self.assertEqual(self.run_bare("--version", program=path).strip(), f"{name} {version}")

    def test_contents(self):
        """One wheel for all versions of Python, with types and licences, and no link."""
        names = zipfile.ZipFile(self.wheel).namelist()
        self.assertRegex(os.path.basename(self.wheel), r"^kvq-[0-9.]+-py3-none-manylinux_2_")
        for want in ("kvq/py.typed", "kvq/transformers/cache.py", "kvq/eval/__main__.py",
                     "kvq/bin/kvqd", "kvq/bin/kvqctl", "kvq/lib/libkvq.so.0"):
            self.assertIn(want, names)
        for want in ("LICENSE", "NOTICE"):
            self.assertTrue(any(n.endswith("/" + want) for n in names), want)

    def test_needs_nothing(self):
        """Every library that the programs name is in the wheel or in any Linux."""
        folder = self.run_bare("-c", "import kvq; print(kvq.__path__[0])").strip()
        own = os.path.dirname(folder)
        for name in ("bin/kvqd", "bin/kvqctl", "lib/libkvq.so.0"):
            found = subprocess.run(["ldd", os.path.join(folder, name)], capture_output=True,
                                   text=True, check=True, env={"PATH": "/usr/bin:/bin"}).stdout
            self.assertNotIn("not found", found)
            outside = {line.split()[0].split(".so")[0] for line in found.splitlines()
                       if "=>" in line and own not in line}
            self.assertLessEqual(outside, {"libc", "libm", "libgcc_s", "libstdc++", "libdl",
                                           "libpthread", "libresolv", "librt", "libexpat",
                                           "libz"}, name)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    Wheel.wheel = os.path.abspath(sys.argv[1])
    suite = unittest.TestLoader().loadTestsFromTestCase(Wheel)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    failed = len(result.failures) + len(result.errors)
    print(f"{max(0, result.testsRun - failed)} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
