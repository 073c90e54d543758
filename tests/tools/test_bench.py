#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq-bench, command by command, with little to do: nothing is timed.

    test_bench.py KVQ-BENCH
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

# Stands for dd: runs it without flags that not every file system has, and says what it moved.
DD = """#!{python}
import os, re, subprocess, sys
words = [w for w in sys.argv[1:] if w not in ("status=none", "iflag=direct", "oflag=direct")]
done = subprocess.run([{dd!r}, *words], stderr=subprocess.PIPE, text=True)
with open({log!r}, "a") as log:
    log.write(re.search(r"(\\d+) bytes", done.stderr).group(1) + "\\n")
sys.exit(done.returncode)
"""


def bench(*options, **environment):
    return subprocess.run([sys.argv[1], *options], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "LC_ALL": "C", **environment})


class Storage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.at = folder.name

    def moved(self, size, block):
        """What the rows and each run of dd say that they moved."""
        log, dd = os.path.join(self.at, "log"), os.path.join(self.at, "dd")
        with open(dd, "w", encoding="utf-8") as file:
            file.write(DD.format(python=sys.executable, dd=shutil.which("dd"), log=log))
        os.chmod(dd, 0o700)
        done = bench("storage", "--dir", os.path.join(self.at, "work"), "--bytes", str(size),
                     "--block-bytes", str(block), "--reps", "1", "--json",
                     PATH=self.at + ":" + os.environ["PATH"])
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(log, encoding="utf-8") as file:
            ran = [int(line) for line in file]
        os.unlink(log)
        return [row["bytes"] for row in json.loads(done.stdout)], ran

    def test_same_bytes(self):
        for size, block, want in ((8 << 20, 65536, 8 << 20), (5 << 20, 300000, 5100000),
                                  (3 << 20, 3 << 20, 3 << 20), (9 << 20, 1000001, 9000009)):
            with self.subTest(size=size, block=block):
                self.assertEqual(self.moved(size, block), ([want, want], [want, want]))

    def test_less_than_a_block(self):
        done = bench("storage", "--bytes", str(1 << 20), "--block-bytes", str(2 << 20))
        self.assertEqual(done.returncode, 2)
        self.assertIn("is less than a block of 2097152", done.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    unittest.main(argv=sys.argv[:1])
