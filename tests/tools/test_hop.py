#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq-bench hop on the software driver: every mode's outputs are those of the kernel that it
launches itself, what cannot be had says why, and nothing is timed.

    test_hop.py KVQ-BENCH DRIVER
"""
import json
import os
import subprocess
import sys
import unittest

SMALL = ["--layers", "2", "--q-heads", "4", "--kv-heads", "2", "--head-dim", "64", "--reps", "1"]


def hop(*options, **environment):
    return subprocess.run([sys.argv[1], "hop", "--driver", sys.argv[2], "--json", *options],
                          capture_output=True, text=True, timeout=60,
                          env={**os.environ, **environment})


class Hop(unittest.TestCase):
    def test_rows(self):
        done = hop(*SMALL, "--tokens", "90,200", "--sessions", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)
        through = ["words", "events", "host"]
        attend = ["local", *through, "in-context"]
        self.assertEqual([(r["request"], r["tokens"], r["mode"]) for r in rows],
                         [("least", 1, m) for m in through] +
                         [(request, tokens, m) for tokens in (90, 200)
                          for request, modes in (("attend", attend),
                                                 ("step", [*attend, "replayed"])) for m in modes])
        for row in rows:
            self.assertNotIn("not_run", row)
            self.assertIsNone(row["us"])  # not a GPU's
            self.assertIn(row["mps"], ("yes", "no"))

    def test_scales_over_heads(self):
        done = hop(*SMALL, "--tokens", "300", "--sessions", "1", "--format", "oscar2-xh")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_without_words(self):
        done = hop(*SMALL, "--tokens", "40", "--sessions", "1", "--format", "f16",
                   KVQ_EMU_LACKS="memory_ops")
        self.assertEqual(done.returncode, 0, done.stderr)
        why = {r["mode"]: r.get("not_run") for r in json.loads(done.stdout)}
        self.assertIn("no 64-bit stream memory operations", why["words"])
        self.assertIsNone(why["events"])

    def test_refused(self):
        for options, code, says in (
                (["--format", "ott2"], 1, "it must be one without codebooks, sinks"),
                (["--format", "nonsense"], 1, "--format nonsense"),
                (["--tokens", "0"], 2, '--tokens is "0"'), (["--layers", "x"], 2, "--layers"),
                (["--driver", "/nowhere/libcuda.so"], 77, "cannot be loaded")):
            done = hop(*options)
            self.assertEqual(done.returncode, code, done.stderr)
            self.assertIn(says, done.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    unittest.main(argv=sys.argv[:1])
