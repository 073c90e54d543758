#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The quality report: verdicts follow the numbers, data that say nothing are marked, plots are
well-formed. And the page of pretrained models: its cells, its verdicts, and the script that
measures what it shows."""
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

HERE = os.path.dirname(os.path.abspath(__file__))
EVAL = os.path.join(HERE, "../../tools/eval")
sys.path[:0] = [os.path.join(HERE, "../../tools/quality"), EVAL]
import claims  # noqa: E402
import page  # noqa: E402
import report  # noqa: E402
import svg  # noqa: E402
from results import Results  # noqa: E402

ORDER = {"oscar2-norot-noscale": 0.02, "oscar2-norot": 0.03, "oscar2-noscale": 0.01,
         "oscar2": 0.005, "f16": 0.0, "dropped": 0.3, "int2-token": 0.1}


def format_line(method, bits=3.0):
    at = {n: 1000.0 for n in ("1024", "4096", "32768", "131072")}
    return {"part": "format", "method": method, "bits": bits, "bytes": bits * 32, "at": at,
            "sink": 0, "recent": 0, "unit": 128}


def model_line(method, kl, outliers=1):
    return {"part": "perplexity", "method": method, "outliers": outliers, "tokens": 1000,
            "perplexity": 2.0 + kl, "kl": kl, "kl_error": kl / 50, "same_top": 0.9, "gain": -kl,
            "gain_error": 0.001}


def cache_line(method, error, data="smooth", aim=0.5, part="synthetic"):
    fields = ("k", "v", "logits", "k_token", "out", "out_k", "out_windows", "out_bytes")
    return {"part": part, "data": data, "aim": aim, "seed": 1, "method": method,
            **{f: error for f in fields}}


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def results(self, lines, tail=""):
        with open(self.path("results.jsonl"), "w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
            file.write(tail)
        return Results(self.path("results.jsonl"))


class Verdicts(Folder):
    def order(self, kls):
        return claims.oscar_order(self.results([model_line(m, kl) for m, kl in kls.items()]))

    def test_order_holds(self):
        self.assertEqual(self.order(ORDER).verdict, claims.REPRODUCED)

    def test_order_turned_over(self):
        turned = dict(ORDER, **{"oscar2-norot-noscale": 0.001, "oscar2-norot": 0.0001,
                                "oscar2-noscale": 0.01, "oscar2": 0.02})
        self.assertEqual(self.order(turned).verdict, claims.NOT)

    def test_one_of_three(self):
        claim = self.order(dict(ORDER, oscar2=0.011))
        self.assertEqual(claim.verdict, claims.PARTLY)
        self.assertEqual([holds for _, holds in claim.facts], [True, False, True])

    def test_within_the_error_is_no(self):
        claim = self.order(dict(ORDER, oscar2=0.00999))
        self.assertFalse(claim.facts[1][1])

    def test_missing_is_not_measured(self):
        kls = dict(ORDER)
        del kls["oscar2-norot"]
        self.assertEqual(self.order(kls).verdict, claims.UNKNOWN)

    def test_what_says_nothing_does_not_count(self):
        """At x10 the order is turned over, but most formats are worse than a control there."""
        lines = [format_line(m) for m in ORDER] + [model_line(m, kl) for m, kl in ORDER.items()]
        lines += [model_line(m, 0.05 if m in ("dropped", "int2-token") else 1 - kl, 10)
                  for m, kl in ORDER.items()]
        claim = claims.oscar_order(self.results(lines))
        self.assertEqual((claim.verdict, len(claim.facts)), (claims.REPRODUCED, 3))
        self.assertEqual(claim.columns[1:], ["KL, K and V x1", "KL, K and V x10 (not counted)"])
        self.assertEqual(claim.rows[-1], ["cache dropped", 0.3, 0.05])
        self.assertEqual(claim.notes, ["**With K and V x10 these are worse than dropping the "
                                       "cache:** plain INT2, + scaling, + rotation, + rotation + "
                                       "scaling."])

    def test_imbalance(self):
        lines = []
        for i, sigma in enumerate(("0.00", "0.50", "1.00")):
            for m, error in (("kivi2", 0.3 * 2 ** i), ("oscar2-noscale", 0.3 * 3 ** i),
                             ("oscar2", 0.4)):
                lines.append(cache_line(m, error, "imbalance-" + sigma))
        self.assertEqual(claims.imbalance(self.results(lines)).verdict, claims.REPRODUCED)
        for line in lines:
            if line["method"] == "kivi2":
                line["k_token"] = 0.3
        self.assertEqual(claims.imbalance(self.results(lines)).verdict, claims.PARTLY)


class Reading(Folder):
    def test_says_something(self):
        base = [format_line(m) for m in ("oscar2", "kivi2")] + [format_line("int8", 8.5)]
        results = self.results(base)
        controls = {"dropped": 1.0, "int2-token": 0.5, "f16": 0.0, "int8": 0.01}
        self.assertTrue(results.says_something({**controls, "oscar2": 0.3, "kivi2": 0.4}))
        # The best is too near to the better control; int8 has more bits than what counts.
        self.assertFalse(results.says_something({**controls, "oscar2": 0.4, "kivi2": 0.45}))
        # Most are worse than a control.
        self.assertFalse(results.says_something({**controls, "oscar2": 0.7, "kivi2": 0.6}))
        self.assertIsNone(results.says_something({"oscar2": 0.3, "kivi2": 0.4}))

    def test_worse_than_dropping(self):
        results = self.results([format_line("oscar2")])
        values = {"dropped": 0.25, "int2-token": 0.5, "oscar2": 0.87, "kivi2": 0.11, "oscar3": 0.3}
        self.assertEqual(results.worse_than_dropped(values), ["oscar2", "oscar3"])
        del values["dropped"]
        self.assertEqual(results.worse_than_dropped(values), [])

    def test_means_and_broken_lines(self):
        lines = [cache_line("oscar2", 3.0), cache_line("oscar2", 4.0)]
        results = self.results(lines, '{"part": "synth')
        key = ("synthetic", "smooth", 0.5)
        self.assertAlmostEqual(results.value(key, "oscar2", "out"), math.sqrt(12.5))
        self.assertTrue(math.isnan(results.value(key, "kivi2", "out")))


    def test_no_error(self):
        """Less than two blocks of tokens have no standard error, and decide nothing."""
        lines = [model_line("oscar2", 0.1), {**model_line("kivi2", 0.9), "kl_error": None}]
        results = self.results(lines)
        self.assertIs(claims.kl_less(results, 1, "oscar2", "oscar2"), False)
        self.assertIsNone(claims.kl_less(results, 1, "oscar2", "kivi2"))

    def test_several_inputs(self):
        """Lines of two texts or two head_dims have no mean; lines that do not say are taken."""
        one = [{**cache_line("oscar2", 1.0), "head_dim": 64, "inputs": "a"}]
        self.results([cache_line("f16", 0.0)] + 2 * one)
        self.results(one + [{**model_line("oscar2", 1.0), "inputs": "b"}])
        for field, other in (("head_dim", 128), ("inputs", "b")):
            with self.assertRaisesRegex(ValueError, f"synthetic: lines of {field} "):
                self.results(one + [{**one[0], field: other}])


class Writing(Folder):
    def test_report(self):
        lines = [format_line(m) for m in ORDER]
        lines += [model_line(m, kl, v) for m, kl in ORDER.items() for v in (1, 10)]
        lines += [format_line("int8", 8.5), model_line("int8", 0.9)]
        lines += [cache_line(m, 0.1 + kl, data) for m, kl in ORDER.items()
                  for data in ("smooth", "imbalance-0.00", "imbalance-0.50")]
        lines += [cache_line(m, 0.5 + kl, "layer-0 x1", 0, "captured")
                  for m, kl in ORDER.items()]
        lines.append(cache_line("kivi2", 0.9, "layer-0 x1", 0, "captured"))
        lines += [{"part": "recall", "method": m, "distances": [
            {"distance": d, "items": 2, "right": 1 - kl, "whole": 1, "bits": kl * d}
            for d in (256, 512)]} for m, kl in ORDER.items()]
        self.results(lines)
        sys.argv = ["report.py", "--results", self.path("results.jsonl"), "--out",
                    self.path("q.md"), "--plots", self.path("plots"), "--json", self.path("q.json")]
        report.main()
        with open(self.path("q.md"), encoding="utf-8") as file:
            text = file.read()
        for part in ("| OScaR: rotation, then scaling | reproduced | 6 of 6 |",
                     "**This capture does not rank formats", "**Worse than `dropped` (0.8), which",
                     "| `oscar2` | 3 | 2.005 | 0.005 |",
                     "| `int8` | 8.5 | 2.9 | 0.9, worse than dropped |", "Recall by distance"):
            self.assertIn(part, text)
        for line in text.split("\n"):
            if line.startswith("|"):
                self.assertTrue(line.endswith("|"), line)
        with open(self.path("q.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["claims"][0]["verdict"], "reproduced")
        plots = os.listdir(self.path("plots"))
        self.assertIn("kl-x10.svg", plots)
        for name in plots:
            xml.etree.ElementTree.parse(os.path.join(self.path("plots"), name))

    def test_plot_of_nothing(self):
        self.assertFalse(svg.plot(self.path("none.svg"), "t", "x", "y", {"a": [(1, 0)]},
                                  log_y=True))
        self.assertTrue(svg.plot(self.path("one.svg"), "<t>", "x", "y", {"a & b": [(1, 1)]}))
        xml.etree.ElementTree.parse(self.path("one.svg"))

    def test_cells(self):
        for x, want in ((0.5, "0.5"), (1234.5, "1.23e+03"), (12.3456, "12.346"), (None, "-"),
                        (math.nan, "-"), (1e-5, "1.00e-05"), (0.0, "0"), ("a", "a")):
            self.assertEqual(report.cell(x), want)


def score(kl, gain=0.0, gain_error=0.001, windows=2):
    return {"kl": kl, "kl_error": 0.01, "gain": gain, "gain_error": gain_error,
            "windows": windows, "perplexity": 20.5, "errors_by": "windows",
            "sizes": {"bits": 2.875}}


def eval_row(name, kl, kind="kvq", path="exact", **more):
    return {"kind": kind, "name": name, "path": path, "score": score(kl, **more)}


class Page(Folder):
    """tools/eval/page.py over reports that were made up."""

    def model(self, folder, rows, model="one.gguf", plots=()):
        os.mkdir(self.path(folder))
        told = {"model": model, "rows": rows, "plots": [["KL", name] for name in plots],
                "settings": {"context": 2048, "dtype": "float32"}}
        with open(self.path(f"{folder}/report.json"), "w", encoding="utf-8") as file:
            json.dump(told, file)
        with open(self.path(f"{folder}/report.md"), "w", encoding="utf-8") as file:
            file.writelines(f"![KL]({name})\n" for name in plots)
        for name in plots:
            with open(self.path(f"{folder}/{name}"), "w", encoding="utf-8") as file:
                file.write("<svg/>")

    def make(self, *options, marks=f"{page.BEGIN} old {page.END}"):
        """Exit status, and the page."""
        os.makedirs(self.path("quality"), exist_ok=True)
        with open(self.path("page.md"), "w", encoding="utf-8") as file:
            file.write(f"before\n{marks}\nbehind\n")
        ran = subprocess.run([sys.executable, os.path.join(EVAL, "page.py"), "--page", "page.md",
                              *options], cwd=self.folder.name, capture_output=True, check=False)
        with open(self.path("page.md"), encoding="utf-8") as file:
            return ran.returncode, file.read()

    def test_cells(self):
        for gain, error, want in ((0.0, 0.0001, "+0.00% ± 0.01"), (-0.02371652, 0.003,
                                  "+2.4% ± 0.3"), (-0.3, 0.02, "+35% ± 3"), (-5.0, 1.0, "x148")):
            self.assertEqual(page.percent(score(0, gain, error)), want)

    def test_two_models(self):
        """A format that a model lacks has empty cells; plots are copied under the model's name."""
        self.model("a", [eval_row("sdpa", 0, "reference"), eval_row("kvq2", 0.0349, gain=-0.0237),
                         eval_row("kvq2", 1.25, path="fast")], plots=["kl.svg"])
        self.model("b", [eval_row("sdpa", 0, "reference"), eval_row("oscar2", 0.25)], "two.gguf")
        code, text = self.make("--models", "One=a", "Two=b")
        self.assertEqual(code, 0)
        for line in ("before", "behind", "| `kvq2` | 2.88 | +2.4% ± 0.1 | 0.0349 | - | - | - |",
                     "| `kvq2`, fast path | 2.88 | +0.0% ± 0.1 | 1.2 | - | - | - |",
                     "| `oscar2` | - | - | - | 2.88 | +0.0% ± 0.1 | 0.2500 |"):
            self.assertIn(line, text.split("\n"))
        self.assertNotIn("needles", text)
        self.assertNotIn("old", text)
        with open(self.path("quality/one.md"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "![KL](one-kl.svg)\n")
        self.assertTrue(os.path.exists(self.path("quality/one-kl.svg")))

    def test_needles(self):
        rows = [eval_row("sdpa", 0, "reference"), eval_row("kvq2", 0.1)]
        rows[1]["needles"] = {"all": {"items": 12, "right": 2 / 3, "right_low": 0.391,
                                      "right_high": 0.862}}
        rows[1]["answers"] = {"same": 4.6, "tokens": 96}
        self.model("a", rows)
        self.assertIn("| `kvq2` | 8 of 12 (39 to 86%) | 5 of 96 |",
                      self.make("--models", "One=a")[1])

    def test_claims(self):
        """Errors of 0.01 each: what is nearer than twice their sum in squares is level."""
        self.model("a", [eval_row("oscar2", 0.10), eval_row("kivi2", 0.13),
                         eval_row("ott2", 0.12), eval_row("oscar2-max", 0.05)])
        self.model("more", [eval_row("turboquant3@book", 0.5)])
        text = self.make("--models", "One=a", "--claims", "One=a,more")[1]
        for line in ("1: better than KIVI | `oscar2`, `kivi2` | yes: 0.1 to 0.13 |",
                     "1: better than OTT | `oscar2`, `ott2` | level: 0.1 to 0.12 |",
                     "1: better than TurboQuant | `oscar2`, `turboquant3` | yes: 0.1 to 0.5 |",
                     "largest value | `oscar2`, `oscar2-max` | no: 0.1 to 0.05 |"):
            self.assertIn(f"{line}\n", text)
        self.assertNotIn("InnerQ", text)
        self.assertIn("Windows: 2 for One.", text)

    def test_claims_of_other_text(self):
        """What was measured in other windows is not compared."""
        self.model("a", [eval_row("oscar2", 0.10), eval_row("ott2", 0.2)])
        self.model("more", [eval_row("kivi2", 0.5, windows=3)])
        text = self.make("--models", "One=a", "--claims", "One=a,more")[1]
        self.assertIn("better than OTT", text)
        self.assertNotIn("better than KIVI", text)

    def test_no_marks(self):
        self.model("a", [eval_row("sdpa", 0, "reference")])
        self.assertEqual(self.make("--models", "One=a", marks="none"),
                         (2, "before\nnone\nbehind\n"))


class Script(Folder):
    """tools/eval/quality.sh with programs that only write down how they were called."""

    FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
while [ $# -gt 1 ]; do
    [ "$1" != --out ] || { mkdir -p "$2"; touch "$2/report.json"; }
    shift
done
"""

    def run_script(self, *models):
        """What was called."""
        os.makedirs(self.path("bin"), exist_ok=True)
        for name in ("python", "kvq-codebook"):
            with open(self.path(f"bin/{name}"), "w", encoding="utf-8") as file:
                file.write(self.FAKE)
            os.chmod(self.path(f"bin/{name}"), 0o755)
        environment = dict(os.environ, LOG=self.path("log"), PYTHON=self.path("bin/python"),
                           KVQ_BIN_DIR=self.path("bin"), KVQ_EVAL_DIR=self.path("out"))
        ran = subprocess.run(["sh", os.path.join(EVAL, "quality.sh"), *models], text=True,
                             env=environment, capture_output=True, check=False)
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        with open(self.path("log"), encoding="utf-8") as file:
            return file.read().split("\n")

    def test_all(self):
        calls = self.run_script()
        self.assertEqual(sum("-m kvq.eval" in call for call in calls), 8)
        self.assertEqual(sum(call.startswith("kvq-codebook make") for call in calls), 4)
        claimed = next(call for call in calls if "--out claims-gemma3-270m" in call)
        for name in {name for _, pairs in page.CLAIMS for pair in pairs for name in pair}:
            if not name.startswith("vecinfer"):
                self.assertIn(name, claimed.partition("--formats ")[2].split()[0].split(","))
        self.assertIn("page.py", calls[-2])
        self.assertEqual(len({call.partition("--out ")[2].split()[0] for call in calls
                              if "--out " in call and "kvq.eval" in call}), 7)

    def test_in_parts(self):
        """The page is written when the last model is there, and no sooner."""
        self.assertFalse(any("page.py" in call for call in self.run_script("smollm2")))
        self.assertTrue(any("page.py" in call
                            for call in self.run_script("qwen-coder", "gemma3-270m")))


if __name__ == "__main__":
    unittest.main()
