#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loops within loops, as tools/gpu/sass.py and tools/cubin-count.py find them in code made here.

    gpu_counts.py
"""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import gpu_code as code
import sass

TOOL = Path(__file__).resolve().parent.parent.parent / "tools" / "cubin-count.py"
LANE = code.make("S2R", d=1)


def kernel_of(words):
    return sass.Kernel(sass.decode(code.code_of(words)))


def passes(**shape):
    return list(kernel_of(code.nest(**shape)).passes().values())


def tool(words, *options):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.cubin({"made": words}))
        file.flush()
        return subprocess.run([sys.executable, TOOL, file.name, "--tokens", "1", *options],
                              capture_output=True, text=True, timeout=60)


class Passes(unittest.TestCase):
    def test_counter_from_a_constant(self):
        self.assertEqual(passes(limit=64, step=8), [8])
        self.assertEqual(passes(limit=3, step=1), [3])

    def test_counter_from_the_lane(self):
        """Some start below the step: the number is known if it is that of all such starts."""
        self.assertEqual(passes(limit=64, step=32, start=LANE), [2])
        self.assertEqual(passes(limit=70, step=32, start=LANE), [None])
        self.assertEqual(passes(limit=8, step=1, start=LANE), [None])

    def test_way_out_before_an_unconditional_branch(self):
        words = code.nest()
        at = next(i for i, (low, _) in enumerate(words) if low & 0x1ff == 0x147)
        body = sass.decode(code.code_of(words))[at].target
        words = [words[0], *words[1:at], code.branch(at, at + 2, guard=0),
                 code.branch(at + 1, body), *words[at + 1:-2],
                 code.branch(len(words) - 1, 1, guard=1), words[-1]]
        self.assertEqual(list(kernel_of(words).passes().values()), [8])

    def test_counter_that_something_else_writes(self):
        words = code.nest()
        words[3] = code.make("LOP3", d=1, a=1, b=30)
        self.assertEqual(list(kernel_of(words).passes().values()), [None])

    def test_start_that_is_not_the_loop_s(self):
        """One that is written under a guard, or that a branch goes around, or ends before."""
        guarded = code.make("MOV", d=1, constant=32, guard=3)
        plain = code.make("MOV", d=1, constant=32)
        self.assertEqual(passes(limit=70, step=8, before=[plain]), [5])
        self.assertEqual(passes(limit=70, step=8, before=[guarded]), [None])
        around = [code.branch(3, 5, guard=3), plain]
        self.assertEqual(passes(limit=70, step=8, before=around), [None])
        self.assertEqual(passes(limit=70, step=8, before=[*around, code.make("NOP")]), [None])
        skips = [code.branch(3, 5, guard=3), code.make("NOP"), plain]
        self.assertEqual(passes(limit=70, step=8, before=skips), [5])

    def test_stub_behind_the_end_is_no_loop(self):
        """A branch back into code that other ways lead to as well."""
        words = [code.branch(0, 3, guard=0), code.make("MOV", d=1, constant=0),
                 code.make("EXIT"), code.branch(3, 1)]
        self.assertEqual(kernel_of(words).loops, [])


class Counts(unittest.TestCase):
    def test_inner_loop_as_often_as_it_is_gone_through(self):
        kernel = kernel_of(code.nest(limit=64, step=8, inner=5))
        found = kernel.longest(kernel.passes())
        self.assertEqual(found.total(), 2 + 8 * 8 + 3)
        self.assertEqual(found["LOP3"], 40)
        self.assertEqual(kernel.main.first, 1)

    def test_longest_way(self):
        """Of two ways the longer; without loops of many passes, the other."""
        words = code.nest(limit=64, step=8, inner=5)
        inner = words[3:11]
        words = [*words[:2], code.branch(2, 18, guard=2), words[2], *inner[:-1],
                 code.branch(11, 4, guard=0, negated=True), code.branch(12, 20),
                 *[code.make("NOP")] * 5, code.make("FADD"), code.make("FADD"),
                 code.make("IADD3", d=2, a=2, constant=1),
                 code.compare(2, code.LESS, 100, predicate=1), code.branch(22, 1, guard=1),
                 code.make("EXIT")]
        kernel = kernel_of(words)
        found = kernel.passes()
        self.assertEqual(list(found.values()), [8])
        self.assertEqual(kernel.longest(found)["LOP3"], 40)
        self.assertEqual(kernel.longest(found, most=4)["FADD"], 2)
        self.assertEqual(kernel.longest(found, most=4)["LOP3"], 0)


class Tool(unittest.TestCase):
    """A pass of the loop takes 69 instructions; with the inner loop once it would take 13."""

    def test_budget(self):
        self.assertEqual(tool(code.nest(), "--at-most", "69").returncode, 0)
        done = tool(code.nest(), "--at-most", "68")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("69.00 instructions", done.stdout)

    def test_passes_that_nobody_knows(self):
        words = code.nest(limit=70, step=32, start=LANE)
        done = tool(words, "--at-most", "1000")
        self.assertEqual(done.returncode, 1)
        self.assertIn("--passes", done.stdout)
        self.assertEqual(tool(words).returncode, 0)  # no budget
        self.assertEqual(tool(words, "--at-most", "29", "--passes", "1=3").returncode, 0)
        self.assertEqual(tool(words, "--at-most", "28", "--passes", "1=3").returncode, 1)

    def test_registers(self):
        self.assertEqual(tool(code.nest(), "--registers", "40").returncode, 0)
        self.assertEqual(tool(code.nest(), "--registers", "39").returncode, 1)


if __name__ == "__main__":
    unittest.main()
