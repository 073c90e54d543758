#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the quality report from what kvq-bench quality measured.

    tools/quality/report.py --results FILE --out docs/quality/small-model.md --plots docs/quality

Markdown goes to --out, the same tables as plain text to standard output with --text, everything
that was computed to --json. Standard library only.
"""
import argparse
import json
import math
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
sys.path.append(os.path.join(HERE, "..", "..", "client", "python", "kvq", "eval"))  # svg
import claims  # noqa: E402
import svg  # noqa: E402
from results import CONTROLS, FULL, Results  # noqa: E402

NOTHING = "does not rank formats: they do not stand clearly between f16 and the controls"


def cell(x):
    if x is None or isinstance(x, float) and math.isnan(x):
        return "-"
    if isinstance(x, float):
        if x == 0 or 0.001 <= abs(x) < 1000:
            return f"{x:.3g}" if abs(x) < 1 else f"{x:.3f}".rstrip("0").rstrip(".")
        return f"{x:.2e}"
    return str(x)


class Report:
    """Headings, sentences and tables, as Markdown and as plain text."""

    def __init__(self):
        self.parts = []

    def heading(self, level, text):
        self.parts.append(("heading", level, text))

    def say(self, text):
        self.parts.append(("text", text))

    def table(self, columns, rows):
        self.parts.append(("table", columns, [[cell(x) for x in row] for row in rows]))

    def image(self, path, text):
        self.parts.append(("image", path, text))

    def markdown(self):
        out = []
        for part in self.parts:
            if part[0] == "heading":
                out.append("#" * part[1] + " " + part[2])
            elif part[0] == "text":
                out.append(part[1])
            elif part[0] == "image":
                out.append(f"![{part[2]}]({part[1]})")
            else:
                lines = ["| " + " | ".join(part[1]) + " |", "|---" * len(part[1]) + "|"]
                out.append("\n".join(lines + ["| " + " | ".join(row) + " |" for row in part[2]]))
        return "\n\n".join(out) + "\n"

    def plain(self):
        out = []
        for part in self.parts:
            if part[0] == "heading":
                out.append(part[2] + "\n" + "=-~"[min(part[1], 3) - 1] * len(part[2]))
            elif part[0] == "text":
                out.append(part[1])
            elif part[0] == "table":
                widths = [max(len(row[i]) for row in [part[1], *part[2]])
                          for i in range(len(part[1]))]
                out.append("\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip()
                                     for row in [part[1], *part[2]]))
        return "\n\n".join(out) + "\n"


def by_bits(results, methods):
    """Controls first, then by bits a value, f16 last."""
    return sorted(methods, key=lambda m: (m not in CONTROLS, results.bits(m), m))


def mark(report, results, values, what):
    """Says where a ranking is no evidence, and which formats are worse than no cache at all."""
    state = results.says_something(values)
    if state is False:
        report.say(f"**{what} {NOTHING}.**")
    worse = results.worse_than_dropped(values)
    if worse:
        report.say(f"**Worse than `dropped` ({cell(values['dropped'])}), which throws away what a "
                   "format would pack:** " +
                   ", ".join(f"`{m}` ({cell(values[m])})" for m in worse) + ".")
    return state


# ---- Sections ----

def section_claims(report, results, out):
    report.heading(2, "What the papers say, and what this shows")
    report.say("Each verdict is computed from the tables below: `reproduced` if every comparison "
               "holds, `in part` if some do. A comparison of models holds if it is beyond twice "
               "the standard error. Variants of the model that do not rank formats are shown and "
               "do not count for a verdict; where methods are worse there than dropping the cache, "
               "that is said below their table.")
    done = [make(results) for make in claims.ALL]
    report.table(["claim", "verdict", "comparisons that hold"],
                 [[c.name, c.verdict, f"{sum(f is True for _, f in c.facts)} of {len(c.facts)}"]
                  for c in done])
    for c in done:
        report.heading(3, f"{c.name}: {c.verdict}")
        report.say(c.paper)
        if c.rows:
            report.table(c.columns, c.rows)
        report.say("\n".join(f"- {'yes' if holds else 'not measured' if holds is None else 'no'}: "
                             f"{words}" for words, holds in c.facts))
        for note in c.notes:
            report.say(note)
    out["claims"] = [{"name": c.name, "verdict": c.verdict,
                      "facts": [{"fact": w, "holds": h} for w, h in c.facts]} for c in done]


def section_formats(report, results, out):
    report.heading(2, "Bits and bytes")
    report.say("Bits a value with all parameters, and kilobytes of one KV head (K and V) in a "
               "session of so many tokens: whole blocks of 128 tokens, packed ones and those of "
               "the newest tokens, and what the format keeps besides.")
    rows = []
    for m in by_bits(results, results.formats):
        f = results.formats[m]
        rows.append([f"`{m}`", f["bits"], f["bytes"], f["sink"], f["recent"], f["unit"],
                     *(round(f["at"][n] / 1000) for n in ("1024", "4096", "32768", "131072"))])
    report.table(["format", "bits a value", "bytes a token", "first", "newest", "unit", "1K", "4K",
                  "32K", "128K"], rows)
    out["formats"] = results.formats


def section_models(report, results, plots, out):
    for v in claims.variants(results):
        lines = results.perplexity.get(v, {})
        if not lines:
            continue
        f16 = lines.get("f16", {})
        report.heading(2, "The model" if v == 1 else f"The model with outliers x{v:g}")
        if v == 1:
            tokens = int(f16.get("tokens", 0))
            report.say(f"Teacher-forced over {tokens:,} tokens of held-out text."
                       " KL is the mean divergence of the next token's distribution from f16's; "
                       "the last column is the difference of log-likelihood to f16 with its "
                       "standard error, by blocks of 128 tokens.")
        else:
            base = results.model(1, "f16", "perplexity")
            moved = abs(f16.get("perplexity", math.nan) / base - 1)
            report.say(f"Two RoPE pairs of channels of each key head and four channels of each "
                       f"value head are {v:g} times as large, what reads them as much smaller: the "
                       f"function is the same. f16's perplexity over the same text moves by "
                       f"{moved:.1e} (relative)." if not math.isnan(moved) else
                       f"Channels of K and V are {v:g} times as large; the function is the same.")
        values = {m: x["kl"] for m, x in lines.items()}
        mark(report, results, values, "This text")
        worse = set(results.worse_than_dropped(values))
        report.table(["format", "bits a value", "perplexity", "KL", "+-", "same likeliest token",
                      "log-likelihood", "+-"],
                     [[f"`{m}`", results.bits(m), lines[m]["perplexity"],
                       cell(lines[m]["kl"]) + (", worse than dropped" if m in worse else ""),
                       lines[m].get("kl_error"), lines[m]["same_top"], lines[m]["gain"],
                       lines[m]["gain_error"]] for m in by_bits(results, lines)])
        name = f"kl-x{v:g}.svg"
        series = {m: [(results.bits(m), x["kl"])] for m, x in lines.items()
                  if m not in FULL and results.bits(m) > 0 and ":" not in m}
        ordered = dict(sorted(series.items(), key=lambda item: item[1][0][1]))
        if svg.plot(os.path.join(plots, name), f"KL from f16 by bits a value, K and V x{v:g}",
                    "bits a value", "mean KL", ordered, log_y=True):
            report.image(name, f"KL by bits, K and V x{v:g}")
    out["model"] = {f"{v:g}": lines for v, lines in results.perplexity.items()}


def section_recall(report, results, plots, out):
    if not results.recall:
        return
    report.heading(2, "Recall by distance")
    distances = sorted({d for x in results.recall.values() for d in x})
    far = distances[-1]
    report.say("Facts (\"The code of ... is 48213.\") asked for again so many bytes later, three "
               "other facts in between: the share of digits that are the likeliest token, and bits "
               "a digit. From 512 bytes on the fact is outside every format's windows.")
    values = {m: x[far]["bits"] for m, x in results.recall.items() if far in x}
    mark(report, results, values, f"The distance of {far}")
    rows = []
    for m in by_bits(results, results.recall):
        x = results.recall[m]
        rows.append([f"`{m}`", *(x.get(d, {}).get("right") for d in distances),
                     *(x.get(d, {}).get("bits") for d in distances)])
    report.table(["format", *(f"right at {d}" for d in distances),
                  *(f"bits at {d}" for d in distances)], rows)
    series = {m: sorted((d, x[d]["bits"]) for d in x) for m, x in results.recall.items()}
    if svg.plot(os.path.join(plots, "recall.svg"), "Bits a digit by distance", "bytes back",
                "bits a digit", series, log_x=True):
        report.image("recall.svg", "Recall by distance")
    out["recall"] = results.recall


FIELDS = [("k", "K"), ("k_token", "K, key by key"), ("v", "V"), ("logits", "logits"),
          ("out_k", "output, V exact"), ("out", "output"), ("out_windows", "output, equal windows"),
          ("out_bytes", "output, equal bytes")]
READING = ("Relative errors (2-norm of the difference over 2-norm). K, V and logits over packed "
           "tokens alone, logits without their common shift. The output three times: with the "
           "format's own windows, with the same windows for all (32 first, 128 newest tokens), and "
           "with as many newest tokens in full precision as 3.5 bits a value pay for in a session "
           "with this cache (`-`: the format takes more).")


def section_captured(report, results, out):
    layers = results.layers()
    if not layers:
        return
    report.heading(2, "Keys and values of the model")
    report.say(f"K, V and the model's own queries of {len(layers)} layers, captured from held-out "
               f"text. " + READING)
    methods = {m for k, x in results.caches.items() if k[0] == "captured" for m in x}
    values = {m: results.captured(m, "out_windows") for m in methods}
    mark(report, results, values, "This capture")
    report.table(["format", "bits a value", *(words for _, words in FIELDS)],
                 [[f"`{m}`", results.bits(m), *(results.captured(m, f) for f, _ in FIELDS)]
                  for m in by_bits(results, methods)])
    report.heading(3, "Output by layer, equal windows")
    report.table(["format", *layers, "aimed at keys, all layers"],
                 [[f"`{m}`", *(results.value(("captured", layer, 0), m, "out_windows")
                               for layer in layers), results.captured(m, "out_windows", 0.5)]
                  for m in by_bits(results, methods)])
    out["captured"] = {m: {f: results.captured(m, f) for f, _ in FIELDS} for m in methods}


def section_synthetic(report, results, plots, out):
    sets = results.synthetic()
    if not sets:
        return
    report.heading(2, "Synthetic caches")
    report.say("Made by `kvq-bench quality synthetic`, seeded. " + READING + " Queries are aimed "
               "at a random key and stretched until the likeliest token holds 10%, 50% or 90%; the "
               "tables show 50%, the first one the output at equal windows for all three.")
    methods = by_bits(results, {m for k, x in results.caches.items() if k[0] == "synthetic"
                                for m in x})
    aims = sorted({k[2] for k in results.caches if k[0] == "synthetic"})
    rows, said = [], {}
    for s in sets:
        for aim in aims:
            values = {m: results.value(("synthetic", s, aim), m, "out_windows") for m in methods}
            said[(s, aim)] = results.says_something(values)
    shown = [s for s in sets if not s.startswith("imbalance")]
    for m in methods:
        rows.append([f"`{m}`", *(" / ".join(cell(results.value(("synthetic", s, aim), m,
                                                               "out_windows")) for aim in aims)
                                 for s in shown)])
    rows.append(["says something", *(" / ".join("yes" if said[(s, a)] else "**no**" for a in aims)
                                     for s in shown)])
    report.table(["format", *shown], rows)
    for s in sets:
        report.heading(3, s)
        mark(report, results, {m: results.value(("synthetic", s, 0.5), m, "out_windows")
                               for m in methods}, "At 50% this")
        report.table(["format", *(words for _, words in FIELDS)],
                     [[f"`{m}`", *(results.value(("synthetic", s, 0.5), m, f) for f, _ in FIELDS)]
                      for m in methods])
    for field, words in (("k_token", "error key by key"), ("out", "output error")):
        series = {m: [(float(s.split("-")[1]), results.value(("synthetic", s, 0.5), m, field))
                      for s in sets if s.startswith("imbalance")]
                  for m in ("kivi2", "oscar2-noscale", "oscar2", "quarot2", "innerq-hybrid",
                            "int2-token")}
        series = {m: p for m, p in series.items() if not any(math.isnan(y) for _, y in p)}
        if svg.plot(os.path.join(plots, f"imbalance-{field}.svg"),
                    f"Token norms that drift apart: {words}", "sigma of log norms", words, series,
                    log_y=True):
            report.image(f"imbalance-{field}.svg", f"Imbalance: {words}")
    out["synthetic"] = {f"{s} {a:g}": {m: {f: results.value(("synthetic", s, a), m, f)
                                           for f, _ in FIELDS} for m in methods}
                        for s in sets for a in aims}
    out["says_something"] = {f"{s} {a:g}": x for (s, a), x in said.items()}


def clean(x):
    """NaN has no place in JSON; five digits are enough."""
    if isinstance(x, dict):
        return {str(k): clean(v) for k, v in x.items()}
    if isinstance(x, list):
        return [clean(v) for v in x]
    if not isinstance(x, float):
        return x
    return None if math.isnan(x) else float(f"{x:.5g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", required=True, help="what kvq-bench quality wrote")
    parser.add_argument("--out", help="Markdown file")
    parser.add_argument("--plots", required=True, help="folder for SVG files")
    parser.add_argument("--json", help="file for all numbers that were computed")
    parser.add_argument("--text", action="store_true", help="plain text to standard output")
    parser.add_argument("--note", default="", help="a sentence about where and when")
    args = parser.parse_args()
    os.makedirs(args.plots, exist_ok=True)
    results, report, out = Results(args.results), Report(), {}
    report.heading(1, "Formats on the small model")
    report.say("Written by `tools/quality.sh`; do not edit. " + args.note)
    report.say("Two controls stand in every table: `dropped`, where what a format would pack is "
               "gone, and `int2-token`, plain 2-bit rounding with one scale for each token and "
               "head. Where formats do not stand clearly between f16 and the better control (the "
               "best of up to 3.6 bits has more than 0.7 of its error, or fewer than half are "
               "below it), their order there is no evidence of which is better, and the table says "
               "so. Formats that are worse than `dropped` are named above each table: for such "
               "data they are worse than no cache beyond the window.")
    report.say("The model is the small one in [tools/model](../../tools/model/README.md), if no "
               "other is named above. It is no large language model; what it shows about outliers "
               "comes from outliers that were put into its weights. Methods with a colon are a "
               "format with stages changed ([formats.md](../formats.md#names)).")
    if os.path.exists(os.path.join(args.plots, "search.md")):
        report.say("Compositions of all stages were searched for a better one: "
                   "[search.md](search.md).")
    section_claims(report, results, out)
    section_formats(report, results, out)
    section_models(report, results, args.plots, out)
    section_recall(report, results, args.plots, out)
    section_captured(report, results, out)
    section_synthetic(report, results, args.plots, out)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(report.markdown())
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(clean(out), file, indent=0)
            file.write("\n")
    if args.text:
        print(report.plain(), end="")


if __name__ == "__main__":
    main()
