#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Puts what kvq.eval measured of several models into one page, between its two marks, and copies
each model's own report beside it.

    tools/eval/page.py --page docs/quality.md --models NAME=FOLDER.. [--claims NAME=FOLDER..]

FOLDER is what `python -m kvq.eval --out` wrote, or several of these with commas between; NAME is
how the page calls the model. Claims of the papers are judged by the folders of --claims: a
comparison holds on a model if it does by more than twice its standard error.
"""
import argparse
import json
import math
import os
import re
import shutil
import sys

BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
CLAIMS = (  # what a paper says, and pairs of formats of which the first is to lose less
    ("OScaR, table 1: better than KIVI", (("oscar2", "kivi2"),)),
    ("OScaR, table 1: better than OTT", (("oscar2", "ott2"),)),
    ("OScaR, table 1: better than TurboQuant", (("oscar2", "turboquant3"),)),
    ("OScaR, table 9: rotation", (("oscar2-noscale", "oscar2-norot-noscale"),)),
    ("OScaR, table 9: token scaling on top of it", (("oscar2", "oscar2-noscale"),)),
    ("OScaR, table 9: token scaling alone harms", (("oscar2-norot-noscale", "oscar2-norot"),)),
    ("OScaR, table 10: L2 better than the largest value", (("oscar2", "oscar2-max"),)),
    ("OScaR, table 10: L2 level with mean-abs", (("oscar2", "oscar2-mean"),)),
    ("OTT: outlier tokens apart, over KIVI", (("ott2", "kivi2-g128"),)),
    ("InnerQ, table 7: V hybrid over symmetric",
     (("innerq-hybrid", "innerq-small"), ("innerq-hybrid-full", "innerq-small-full"))),
    ("VecInfer, table 4: smoothing and rotation", (("vecinfer-2", "vecinfer-2-norot-nosmooth"),)),
    ("VecInfer, table 4: rotation on top of smoothing", (("vecinfer-2", "vecinfer-2-norot"),)),
    ("VecInfer, table 4: smoothing on top of rotation", (("vecinfer-2", "vecinfer-2-nosmooth"),)),
)


def percent(score):
    """How much the perplexity is above the reference's, and its standard error."""
    over = math.exp(-score["gain"]) - 1
    error = math.exp(-score["gain"]) * score["gain_error"]
    if over > 9.99:
        return f"x{over + 1:,.0f}"
    digits = 2 if error < 0.0005 else 1 if error < 0.005 else 0
    return f"{100 * over:+.{digits}f}% ± {100 * error:.{digits}f}"


def table(head, rows):
    """Lines of Markdown."""
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head),
            *("| " + " | ".join(row) + " |" for row in rows), ""]


class Model:
    """A model's report; the rows of further folders come behind the first one's."""

    def __init__(self, told):
        self.name, _, folders = told.partition("=")
        self.folder, *more = folders.split(",")
        self.report = self.read(self.folder)
        self.rows = {self.key(row): row for folder in [self.folder, *more]
                     for row in self.read(folder)["rows"]}
        self.file = self.report["model"].removesuffix(".gguf") + ".md"

    @staticmethod
    def read(folder):
        """What kvq.eval wrote there."""
        with open(os.path.join(folder, "report.json"), encoding="utf-8") as file:
            return json.load(file)

    @staticmethod
    def key(row):
        """A row's name in all models: 16 bits are f16 in one, bf16 in another."""
        path = "" if row["path"] != "fast" else ", fast path"
        return (row["kind"], row["name"], path)

    def score(self, key):
        """What was measured on text, or None."""
        return self.rows.get(key, {}).get("score")

    def windows(self):
        """In how many windows rows were measured."""
        counts = sorted({row["score"]["windows"] for row in self.rows.values() if "score" in row})
        return f"{' or '.join(str(n) for n in counts)} for {self.name}"

    def about(self):
        """How much was measured."""
        s, some = self.report["settings"], self.rows[self.key(self.report["rows"][0])]["score"]
        return (f"{self.name}: {some['windows']} windows of {s['context']:,} tokens, weights and "
                f"reference in {s['dtype']}, perplexity {some['perplexity']:.2f}, standard errors "
                f"by {some['errors_by']}; [all numbers](quality/{self.file})")


def keys_of(models):
    """Of all rows but the reference, in the first model's order."""
    every = dict.fromkeys(key for model in models for key in model.rows)
    return [key for key in every if key[0] != "reference"]


def text(models):
    """Perplexity and KL of all models."""
    rows = []
    for key in keys_of(models):
        cells = [f"`{key[1]}`{key[2]}"]
        for model in models:
            score = model.score(key)
            cells += [f"{score['sizes']['bits']:.2f}", percent(score),
                      f"{score['kl']:.4f}" if score["kl"] < 1 else f"{score['kl']:.1f}"
                      ] if score else ["-", "-", "-"]
        rows.append(cells)
    head = ["cache"]
    for model in models:
        head += [f"{model.name}: bits", "perplexity", "KL"]
    return [*table(head, rows), *(f"- {model.about()}." for model in models), ""]


def found(row):
    """Needles that were found, of all distances, and Wilson's interval of their share."""
    told = row["needles"]["all"]
    low, high = (round(100 * told[f"right_{end}"]) for end in ("low", "high"))
    return f"{round(told['right'] * told['items'])} of {told['items']} ({low} to {high}%)"


def asked(models):
    """Needles and long answers."""
    with_some = [m for m in models if any("needles" in row for row in m.rows.values())]
    if not with_some:
        return []
    rows, head = [], ["cache"]
    for model in with_some:
        head += [f"{model.name}: needles", "tokens before an answer parts"]
    for key in dict.fromkeys(key for model in with_some for key in model.rows):
        cells = [f"`{key[1]}`{key[2]}" if key[0] != "reference" else "reference"]
        for model in with_some:
            row = model.rows.get(key, {})
            cells.append(found(row) if "needles" in row else "-")
            told = row.get("answers")
            cells.append(f"{told['same']:.0f} of {told['tokens']}" if told else "-")
        rows.append(cells)
    return table(head, rows)


def judge(claim, pairs, models):
    """A row: what holds on which model."""
    cells = [claim, "<br>".join(f"`{better}`, `{worse}`" for better, worse in pairs)]
    for model in models:
        by_name = {key[1].partition("@")[0]: row["score"] for key, row in model.rows.items()
                   if "score" in row and not key[2]}
        verdicts = []
        for better, worse in pairs:
            if better not in by_name or worse not in by_name:
                continue
            a, b = by_name[better], by_name[worse]
            if a["windows"] != b["windows"]:
                continue  # not of the same text
            error = math.hypot(a["kl_error"], b["kl_error"])
            holds = "yes" if b["kl"] - a["kl"] > 2 * error else "no" if (
                a["kl"] - b["kl"] > 2 * error) else "level"
            verdicts.append(f"{holds}: {a['kl']:.3g} to {b['kl']:.3g}")
        cells.append("<br>".join(verdicts) or "-")
    return cells


def main():
    """Exit status: 0, or 2 if the page has no marks."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", required=True, help="the file whose marks are filled")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--claims", nargs="+", default=[], metavar="NAME=FOLDER")
    given = parser.parse_args()
    models, claims = ([Model(told) for told in some] for some in (given.models, given.claims))
    lines = [*text(models), *asked(models)]
    if claims:
        lines += ["### What the papers say, on these models", "",
                  "A cell has the mean KL of the first format `to` that of the second, both from "
                  "the same windows. `yes`: the first is smaller, as the claim would have it, by "
                  "more than two standard errors; `no`: it is larger by as much; `level`: neither. "
                  "Windows: "
                  f"{', '.join(model.windows() for model in claims)}.", "",
                  *table(["claim", "formats", *(model.name for model in claims)],
                         [row for row in (judge(claim, pairs, claims) for claim, pairs in CLAIMS)
                          if set(row[2:]) != {"-"}])]
    with open(given.page, encoding="utf-8") as file:
        page = file.read()
    if BEGIN not in page or END not in page:
        print(f"{given.page} has no lines {BEGIN} and {END}", file=sys.stderr)
        return 2
    told = "\n".join([BEGIN, "", *lines, END])
    page = re.sub(f"{BEGIN}.*{END}", lambda _: told, page, flags=re.S)
    with open(given.page, "w", encoding="utf-8") as file:
        file.write(page)
    beside = os.path.join(os.path.dirname(given.page), "quality")
    for model in models:
        with open(os.path.join(model.folder, "report.md"), encoding="utf-8") as file:
            own = file.read()
        for _, plot in model.report.get("plots", ()):
            name = f"{model.file.removesuffix('.md')}-{plot}"
            shutil.copyfile(os.path.join(model.folder, plot), os.path.join(beside, name))
            own = own.replace(f"({plot})", f"({name})")
        with open(os.path.join(beside, model.file), "w", encoding="utf-8") as file:
            file.write(own)
    return 0


if __name__ == "__main__":
    sys.exit(main())
