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
# A loop of six instructions, the branch back the last.
LOOP = [code.make("MOV", d=2, constant=0), code.make("HMMA", d=8, a=16, b=24, c=8),
        code.make("LOP3", d=30, a=30, b=30), code.make("LOP3", d=31, a=31, b=31),
        code.make("IADD3", d=2, a=2, constant=1), code.compare(2, code.LESS, 100, predicate=1),
        code.branch(6, 1, guard=1)]


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
        done = tool(code.nest(), "--registers", "39")
        self.assertEqual(done.returncode, 1)
        self.assertIn("made: 69.00 instructions per token and head (69 a pass", done.stdout)
        self.assertIn("40 registers, 0 spills, 0 elsewhere", done.stdout)

    def test_spills(self):
        """Loads and stores of local memory, in the main loop and outside, each with its budget."""
        for name in ("LDL", "STL"):
            words = LOOP[:2] + [code.make(name, d=30)] + LOOP[2:-1] + [code.branch(7, 1, guard=1)]
            inside = [*words, code.make(name), code.make(name), code.make("EXIT")]
            outside = [*LOOP, code.make(name), code.make("EXIT")]
            for made, options, status in ((inside, ("--spills", "1", "--elsewhere", "2"), 0),
                                          (inside, ("--elsewhere", "2"), 1),
                                          (inside, ("--spills", "1", "--elsewhere", "1"), 1),
                                          (outside, ("--elsewhere", "1"), 0),
                                          (outside, (), 1), ([*LOOP, code.make("EXIT")], (), 0)):
                done = tool(made, *options)
                self.assertEqual(done.returncode, status, done.stdout)
                there = "1 spills, 2 elsewhere" if made is inside else "0 spills, "
                self.assertIn(there, done.stdout)

    def test_conversions(self):
        """A budget allows none, however large; without one they are counted like others."""
        for name in ("I2F", "F2I"):
            words = LOOP[:2] + [code.make(name, d=30)] + LOOP[2:-1]
            words += [code.branch(7, 1, guard=1), code.make("EXIT")]
            done = tool(words, "--at-most", "1000")
            self.assertEqual(done.returncode, 1)
            self.assertIn("7.00 instructions per token and head (7 a pass", done.stdout)
            self.assertEqual(tool(words).returncode, 0)

    def test_rare_parts(self):
        """What a forward branch skips is counted apart, if it is long and has no product."""
        for size, product, says in ((16, False, "(7 a pass of the loop, rare parts of [16])"),
                                    (15, False, "(22 a pass of the loop, rare parts of [])"),
                                    (16, True, "(23 a pass of the loop, rare parts of [])")):
            skipped = [code.make("HMMA" if product and i == 3 else "FADD", d=30 + i)
                       for i in range(size)]
            words = [*LOOP[:2], code.branch(2, 3 + size, guard=2), *skipped, *LOOP[2:-1]]
            words += [code.branch(len(words), 1, guard=1), code.make("EXIT")]
            done = tool(words)
            self.assertIn(says, done.stdout)

    def test_guarded_steps(self):
        """A step of the counter that is not always made says nothing of passes."""
        words = code.nest()
        self.assertIn("loops in it of 8 passes", tool(words).stdout)
        at = next(i for i, at in enumerate(sass.decode(code.code_of(words))) if at.name == "VIADD")
        words[at] = code.make("VIADD", d=1, a=1, constant=8, guard=3)
        done = tool(words, "--at-most", "1000")
        self.assertEqual(done.returncode, 1)
        self.assertIn("not counted, loops in it of ? passes", done.stdout)

    def test_no_such_kernel(self):
        done = tool(code.nest(), "--kernel", "mode", "--at-most", "1000")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn('no kernel\'s name contains "mode"', done.stderr)
        self.assertEqual(tool(code.nest(), "--kernel", "mad").returncode, 0)


if __name__ == "__main__":
    unittest.main()
