#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/gpu/cost.py, the model of what attention costs on a GPU: its parts on code made here, and
its cut of batches and bytes against the host's; or what docs/gpu-predictions.md says it predicts
against what it predicts from a build's cubins.

    gpu_cost.py PLAN             PLAN: the program gpu_cost_plan
    gpu_cost.py --table FOLDER   exit status 77: FOLDER has no cubins for sm_90a
"""
import json
import re
import subprocess
import sys
import unittest
from pathlib import Path

import gpu_code as code
import sass

import cost
import warps

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
CLOSE = 0.01  # that a prediction may be from what is written down


def walked(words, n=1, **options):
    return warps.cycles(sass.decode(code.code_of(words))[:-1], n, **options)


class Walk(unittest.TestCase):
    def test_waits_that_the_compiler_wrote(self):
        self.assertEqual(walked([code.make("MOV", wait=4)] * 10), 40)

    def test_result_that_is_waited_for(self):
        words = [code.make("LDS", d=1, sets=0), code.make("MOV", a=1, waits_for=1)]
        load = warps.SCHEDULERS + warps.LATENCY["LDS"]
        self.assertEqual(walked(words), load + 1)

    def test_products_that_add_to_the_same(self):
        same = [code.make("HMMA", d=8, a=16, b=24, c=8)] * 4
        apart = [code.make("HMMA", d=32 + 4 * i, a=16, b=24, c=32 + 4 * i) for i in range(4)]
        self.assertEqual(walked(same), 4 * warps.LATENCY["HMMA"])
        self.assertLess(walked(apart), walked(same) / 2)
        fast = {"HMMA": warps.MATRIX_CYCLES}
        self.assertAlmostEqual(walked(same, latency=fast), 4 * warps.MATRIX_CYCLES)

    def test_warps_share_a_scheduler(self):
        """One instruction a cycle; of logic one in two."""
        self.assertAlmostEqual(walked([code.make("MOV")] * 2000, 4), 8000, delta=80)
        self.assertAlmostEqual(walked([code.make("LOP3")] * 2000, 2), 8000, delta=80)

    def test_warps_that_wait_let_others_go(self):
        found = walked([code.make("MOV", wait=8)] * 1000, 3)
        self.assertLess(8000, found)
        self.assertLess(found, 8000 + warps.UNSTEADY)


class Cut(unittest.TestCase):
    def shares(self, lengths, grid):
        items, whole_cost = cost.items_of(lengths, 8)
        bounds = cost.stretches(items, whole_cost, grid)
        self.assertEqual((bounds[0], bounds[-1]), (0, len(items)))
        return [items[a:b] for a, b in zip(bounds, bounds[1:])]

    def test_stretches(self):
        """Whole rows if that makes no share larger by more than an eighth; else items."""
        self.assertEqual({len(s) for s in self.shares([4096], 8)}, {8})
        self.assertEqual({len(s) for s in self.shares([4096] * 48, 396)}, {0, 8})
        self.assertEqual({len(s) for s in self.shares([4096] * 48, 264)}, {11, 12})

    def test_stretches_of_equal_cost(self):
        """Where rows have different numbers of splits: a split costs 128 tokens more than it has,
        and no share much more than others."""
        costs = [sum((item.tokens + 128) // 32 for item in share)
                 for share in self.shares(cost.RAGGED, 396)]
        largest = (2048 + 128) // 32
        self.assertLess(max(costs), sum(costs) / 396 + largest)

    def test_runs(self):
        items, _ = cost.items_of([4096, 4096], 8)
        self.assertEqual(cost.runs_of(items[:8]), (1, 1))
        self.assertEqual(cost.runs_of(items[6:18]), (3, 2))
        items, _ = cost.items_of([131072], 8)
        self.assertEqual(cost.runs_of(items[:4]), (2, 1))  # 4,096 tokens each

    def test_phases(self):
        self.assertEqual(cost.phases([2, 1, 1, 1], 2), [(1, 2, 4), (1, 1, 1)])
        self.assertEqual(cost.phases([8] * 6, 2), [(8, 3, 6)])

    def test_host(self):
        """Splits, items, bytes and shared memory as attend.c and attend.h have them."""
        for lengths in ([4096] * 48, [4096], [32768], [131072], [700] * 3, [16384], [16385],
                        [700, 4096, 40000], cost.RAGGED):
            for dim in (64, 128, 256):
                command = [PLAN, ",".join(map(str, lengths)), "8", str(dim), *cost.FORMATS]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60,
                                      check=True)
                rows = list(map(json.loads, done.stdout.splitlines()))
                self.assertEqual([row["format"] for row in rows], list(cost.FORMATS))
                for row in rows:
                    self.check_row(row, cost.FORMATS[row["format"]], lengths, dim)

    def check_row(self, row, form, lengths, dim):
        items, whole_cost = cost.items_of(lengths, 8)
        rows = {item.row: item.split + 1 for item in items}
        self.assertEqual(row["split_tokens"], cost.split_tokens(lengths[0]))
        self.assertEqual((row["items"], row["rows"], row["cost"]), (len(items), 8, whole_cost))
        self.assertEqual(row["whole"], min(rows.values()) if len(set(rows.values())) == 1 else 0)
        self.assertEqual(row["record_bytes"], 128 * cost.token_bytes(form, dim), row)
        self.assertEqual(row["shared_bytes"], cost.shared_bytes(form, dim), row)
        self.assertEqual(row["first_tokens"], form.first)

    def test_ragged(self):
        """The lengths that tools/gpu-check.sh measures."""
        try:
            import attend
        except ImportError:
            self.skipTest("no NumPy")
        self.assertEqual(list(cost.RAGGED), attend.POINTS["48 ragged"]["tokens"])


class Fake:
    """A kernel of a loop and nothing else: 1,000 cycles a group, whatever else runs."""

    instructions, split, run, raw = 500, 0, 0, 0

    def cycles(self, n, latency=None):
        return 1000

    def residents(self, *_):
        return 3


class Model(unittest.TestCase):
    """Whole predictions, worked out by hand."""

    def predict(self, kernel, point, **change):
        change = {"waits": 0, "first": 0, "start": 0, **change}
        return cost.predict({(128, "b2"): kernel}, cost.H100, "oscar2", point,
                            cost.Change(**change))

    def test_loop(self):
        """384 rows on 396 places: 32 groups a warp, beside 154 MB."""
        found = self.predict(Fake(), cost.POINTS[0])
        instructions = 32 * 1000 / cost.H100.ghz / 1e3
        memory = 48 * 8 * 4096 * 98 / cost.H100.read_gb_per_s / 1e3
        self.assertAlmostEqual(found["floor_us"], memory)
        self.assertAlmostEqual(found["us"], (instructions ** 2 + memory ** 2) ** 0.5)
        self.assertAlmostEqual(found["ratio"], found["us"] / memory)

    def test_what_is_added(self):
        kernel, base = Fake(), self.predict(Fake(), cost.POINTS[0])["us"]
        kernel.split = 1000
        cycles = 8 * 1000 * cost.FIXED_CYCLES
        self.assertAlmostEqual(self.predict(kernel, cost.POINTS[0])["us"] - base,
                               cycles / cost.H100.ghz / 1e3)
        begun = self.predict(Fake(), cost.POINTS[0], start=1)["us"]
        self.assertAlmostEqual(begun - base, cost.START_US + cost.MERGE_US)

    def test_raw_first_tokens(self):
        """Two tiles, two reads each; sums once more; and a read until groups come again."""
        kernel, point = Fake(), cost.POINTS[1]
        kernel.raw, kernel.split = 300, 1000
        with_, without = (cost.predict({(128, "s3"): kernel}, cost.H100, name, point)["us"]
                          for name in ("kvq2", "kvq2-fm-s0"))
        cycles = 2 * (300 * 1000 / 500 + 2 * cost.READ_CYCLES) + 1000 * cost.FIXED_CYCLES
        self.assertAlmostEqual(with_ - without,
                               (cycles + cost.READ_CYCLES) / cost.H100.ghz / 1e3)

    def test_last_items(self):
        """512 items on 396 places: some blocks of threads have two."""
        found = self.predict(Fake(), cost.POINTS[3])
        self.assertAlmostEqual(found["loop_cycles_us"], 2 * 16 * 1000 / cost.H100.ghz / 1e3)
        self.assertGreater(found["uneven"], 1)

    def test_no_kernel_is_as_fast_as_the_floor(self):
        for point in cost.POINTS:
            for overlap in (2, 16):
                self.assertGreater(self.predict(Fake(), point, overlap=overlap)["ratio"], 1)

    def test_errors(self):
        rows = [("1 x 4,096", "oscar2", 10, 99), ("1 x 4,096", "kvq2-fm-s0", 10, 11),
                ("16 x 4,096", "oscar2", 11, 10)]
        mean, worst = cost.errors(rows)
        self.assertAlmostEqual(mean, 0.1)
        self.assertAlmostEqual(abs(worst - 1), 0.1, delta=0.01)


class Page(unittest.TestCase):
    """The tables of docs/gpu-predictions.md."""

    def text(self, part=None):
        text = (DOCS / "gpu-predictions.md").read_text()
        return re.search(rf"<!-- {part}: begin -->(.*)<!-- {part}: end -->", text,
                         re.S)[1] if part else " ".join(text.split())

    @staticmethod
    def rows(text):
        return [[cell.strip() for cell in line.strip("|").split("|")]
                for line in text.strip().splitlines() if line.startswith("|")]


class Table(Page):
    """What the documentation says that the model says."""

    def setUp(self):
        self.kernels = cost.load(FOLDER)

    def compare(self, what, written, predicted):
        """Figures as they are printed, and words."""
        try:
            number = float(predicted)
        except ValueError:
            self.assertEqual(written, predicted, what)
            return
        last = 10.0 ** -len(predicted.partition(".")[2])
        self.assertAlmostEqual(float(written), number, delta=CLOSE * abs(number) + last / 2,
                               msg=what)

    def compare_tables(self, written, predicted):
        self.assertEqual(len(written), len(predicted))
        for row, other in zip(written, predicted):
            self.assertEqual(len(row), len(other), row)
            for head, cell, new in zip(predicted[0], row, other):
                self.compare(f"{head} of {other[0]}, {other[1]}", cell, new)

    def test_predictions(self):
        """Whole rows: the parts as well as their sum."""
        made = "\n".join(cost.predicted_table(self.kernels, gpu) for gpu in cost.GPUS)
        self.compare_tables(self.rows(self.text("predictions")), self.rows(made))

    def test_checked(self):
        made = cost.check_table(list(cost.checked(self.kernels)))
        self.compare_tables(self.rows(self.text("checked")), self.rows(made))


class Sentence(Page):
    """What the page says of its own table."""

    def test_error(self):
        rows = [(point, name.split(",")[0].strip("`"), float(us), float(predicted))
                for point, name, us, predicted, _ in self.rows(self.text("checked"))[2:]]
        told = re.search(r"The ([\d.]+)% in the root mean square .*? 48 sessions of `kvq2-fm-s0`, "
                         r"which took ([\d.]+) times .*? and 16 sessions of 4,096 tokens, "
                         r"([\d.]+) times", self.text()).groups()
        off = {(point, name): us / predicted for point, name, us, predicted in rows}
        self.assertEqual(told, (f"{100 * cost.errors(rows)[0]:.1f}",
                                f"{off['48 x 4,096', 'kvq2-fm-s0']:.2f}",
                                f"{off['16 x 4,096', 'oscar2']:.2f}"))


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        FOLDER = sys.argv[2]
        if not (Path(FOLDER) / "attend_d128.sm_90a.cubin").exists():
            print("built without KVQ_CUDA, or for other GPUs; skipped")
            sys.exit(77)
        tests = [Table]
    else:
        PLAN, tests = sys.argv[1], [Walk, Cut, Model, Sentence]
    suite = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, tests))
    sys.exit(not unittest.TextTestRunner().run(suite).wasSuccessful())
