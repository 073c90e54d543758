#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Searches compositions of stages for one that beats oscar2 on every data set at no more bytes.

    tools/quality/search.py --bench build/release/bin/kvq-bench --work FOLDER --out FILE.md

Training data are synthetic caches of seed 1, keys and values of the model (as it is, and with
outliers x10) from the first part of the held-out text, and the model itself over another part.

1. Every way to store K, with one V, by the output's error with V exact; every way to store V by
   V's error. Scores are mean logarithms of errors over oscar2's.
2. The best of both of every size, in all pairs of 84 bytes up to what oscar2 takes, by the
   model's KL from f16.
3. The best pairs on test data: other seeds, other parts of the text, outliers x30 as well. A pair
   wins if it beats oscar2 on every data set and in the KL of every variant of the model.

oscar2 and quarot2 are taken with V as it comes (vrot=none): rotation of V is one of the ways to
store V.
All have the same windows on average as oscar2: 63.5 of the newest tokens. Standard library only.
"""
import argparse
import itertools
import math
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from report import Report  # noqa: E402
from results import Results, mean  # noqa: E402

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.path.join(HERE, "../model/kvq-bytes")
TEXT = os.path.join(HERE, "../model/heldout.txt")
FORMAT = "oscar2"  # whose stages are changed
BASELINE = FORMAT + ":vrot=none"
OTHERS = ("kivi2", "innerq-small", "quarot2:vrot=none")
LIMIT = 98  # bytes of a token and KV head at head_dim 128, as oscar2 takes
BATCH = 100
K_KEPT, V_KEPT = 1, 2  # of one size that go on to pairs
LEAST = 84  # bytes of a pair: smaller ones are beaten by larger ones
UNIT_STAGES = {32: ":unit=32:recent=48", 64: ":unit=64:recent=32", 128: ""}
ROTATIONS, SCALES = ("none", "hadamard"), ("none", "l2")


def stages(**values):
    return "".join(f":{name}={value}" for name, value in values.items())


def k_sides():
    """(stages, tokens of a unit) of K; the first is oscar2's."""
    out = []
    for channel in ("none", "prompt"):
        for rot, scale in itertools.product(ROTATIONS[::-1], SCALES[::-1]):
            for zero in ("integer", "minimum"):
                out.append((stages(channel=channel, rot=rot, scale=scale, kzero=zero), 32))
            for group in (64, 128):
                out.append((stages(channel=channel, rot=rot, scale=scale, kzero="minimum", kbits=3,
                                   kgroup=group), group))
        for rot in ROTATIONS:
            plain = {"channel": channel, "rot": rot, "scale": "none", "kaxis": "token"}
            for group in (32, 64, 128):
                out.append((stages(**plain, kcodec="symmetric", kbits=3, kgroup=group, kfull=1),
                            32))
            out.append((stages(**plain, kzero="minimum", kgroup=32), 32))
            out.append((stages(**plain, kzero="minimum", kbits=3, kgroup=128), 32))
        for bits in (2, 3):
            out.append((stages(channel=channel, rot="signed", scale="none", kcodec="lloyd",
                               kbits=bits, kgroup=0, kaxis="token"), 32))
    return out


def v_sides():
    """(stages, tokens of a unit) of V; the first is oscar2's."""
    out = [("", 32)]
    for vrot, group in itertools.product(ROTATIONS, (32, 64, 128)):
        out.append((stages(vrot=vrot, vzero="minimum", vgroup=group), 32))
    out += [(stages(vaxis="channel", vzero="minimum", vgroup=g), g) for g in (32, 64, 128)]
    out += [(stages(vaxis="channel", vcodec=codec, vfull=1), 32)
            for codec in ("symmetric", "hybrid")]
    out.append((stages(vrot="hadamard", vzero="minimum", vbits=3, vgroup=128), 32))
    out += [(stages(vaxis="channel", vzero="minimum", vbits=3, vgroup=g), g) for g in (64, 128)]
    out += [(stages(vrot="signed", vcodec="lloyd", vbits=bits, vgroup=0), 32) for bits in (2, 3)]
    return out


def compose(k, v):
    """The method of a K side and a V side, in the smallest unit that holds both."""
    return FORMAT + k[0] + v[0] + UNIT_STAGES[max(k[1], v[1])]


class Bench:
    """Runs parts of kvq-bench quality, two at a time."""

    def __init__(self, program, results):
        self.program, self.results = program, results

    def run(self, methods, *jobs):
        for at in range(0, len(methods), BATCH):
            batch = list(dict.fromkeys([BASELINE, *methods[at:at + BATCH]]))
            commands = [[self.program, "quality", *map(str, job), "--results", self.results,
                         "--methods", ",".join(batch)] for job in jobs]
            for pair in range(0, len(commands), 2):
                running = [subprocess.Popen(c) for c in commands[pair:pair + 2]]
                if any([r.wait() for r in running]):
                    sys.exit("search.py: a measurement failed")
        return Results(self.results)


def caches(seed, start):
    """Jobs over synthetic caches of one seed and over the model's from a place in the text."""
    model = ["--model", MODEL, "--text", TEXT, "--from", start, "--tokens", 2112]
    return [["synthetic", "--seed", seed, "--seeds", 1, "--tokens", 2112, "--queries", 8],
            ["captured", *model, "--queries", 32],
            ["captured", *model, "--queries", 32, "--outliers", 10]]


def models(start, size, variants):
    return [["perplexity", "--model", MODEL, "--text", TEXT, "--from", start, "--bytes", size,
             "--outliers", v] for v in variants]


def ratios(results, method, field):
    """Errors over oscar2's by data set; root mean squares over queries' aims and layers."""
    groups = {}
    for key in results.caches:
        part, data, _ = key
        name = data if part == "synthetic" else "model's caches x" + data.split(" x")[-1]
        if not name.startswith("imbalance"):
            groups.setdefault(name, []).append(key)
    out = {}
    for name, keys in groups.items():
        a, b = ([results.value(k, m, field) for k in keys] for m in (method, BASELINE))
        out[name] = math.sqrt(mean(x * x for x in a) / mean(x * x for x in b))
    return out


def score(results, method, field):
    return mean(math.log(x) for x in ratios(results, method, field).values())


def kl_score(results, method, variants):
    return mean(math.log(results.model(v, method, "kl") / results.model(v, BASELINE, "kl"))
                for v in variants)


def best_of_each_size(results, names, field, count):
    """The best `count` methods of each number of bytes, and the scores of all."""
    scores = {m: score(results, m, field) for m in names}
    sizes = {}
    for m in sorted(names, key=scores.get):
        sizes.setdefault(results.formats[m]["bytes"], []).append(m)
    return [m for size in sorted(sizes) for m in sizes[size][:count]], scores


def rank_sides(train, report):
    """The best sides of each size: [(K side, ..)], [(V side, ..)]."""
    ks, vs = k_sides(), v_sides()
    k_names = {compose(k, vs[0]): k for k in ks}
    v_names = {compose(ks[0], v): v for v in vs}
    results = train.run([*k_names, *v_names], ["formats"], *caches(1, 0))
    kept = []
    for title, names, field, count in (("K", k_names, "out_k", K_KEPT),
                                       ("V", v_names, "v", V_KEPT)):
        best, scores = best_of_each_size(results, names, field, count)
        report.heading(3, f"Ways to store {title}")
        report.say(f"{len(names)} of them; the best {count} of each size went on. Score: " +
                   ("output's error with V exact" if field == "out_k" else "V's error") +
                   f" over `{BASELINE}`'s, mean logarithm.")
        report.table(["stages", "bytes with the other side as in oscar2", "score"],
                     [[f"`{names[m][0] or '(as in oscar2)'}`", results.formats[m]["bytes"],
                       scores[m]] for m in best])
        kept.append([names[m] for m in best])
    return kept


def rank_pairs(train, report, ks, vs, count):
    names = [compose(k, v) for k, v in itertools.product(ks, vs)]
    results = train.run(names, ["formats"])
    fitting = [m for m in names if LEAST <= results.formats[m]["bytes"] <= LIMIT]
    results = train.run(fitting, *models(50000, 4096, (1, 10)))
    best = sorted(fitting, key=lambda m: kl_score(results, m, (1, 10)))
    report.heading(3, "Pairs")
    report.say(f"{len(fitting)} pairs of at most {LIMIT} bytes a token and KV head, by the model's "
               "KL on training text; the score is the mean logarithm over oscar2's.")
    report.table(["composition", "bytes", "KL x1", "KL x10", "score"],
                 [[f"`{m}`", results.formats[m]["bytes"], results.model(1, m, "kl"),
                   results.model(10, m, "kl"), kl_score(results, m, (1, 10))]
                  for m in [*best[:15], BASELINE]])
    return best[:count]


def judge(tested, report, best):
    """The table of the test, and the winners."""
    variants = (1, 10, 30)
    names = list(ratios(tested, BASELINE, "out_windows"))
    rows, winners = [], []
    for m in [*best, *OTHERS, BASELINE]:
        errors = ratios(tested, m, "out_windows")
        kls = [tested.model(v, m, "kl") for v in variants]
        wins = all(x < 1 for x in errors.values()) and \
            all(kl < tested.model(v, BASELINE, "kl") for kl, v in zip(kls, variants)) and \
            tested.formats[m]["bytes"] <= LIMIT
        winners += [m] if wins else []
        rows.append([f"`{m}`", tested.formats[m]["bytes"], *kls, *errors.values(),
                     "yes" if wins else "no"])
    report.heading(3, "Test data")
    report.say("KL of the model from f16, and the output's error at equal windows over oscar2's.")
    report.table(["composition", "bytes", *(f"KL x{v}" for v in variants), *names,
                  "beats oscar2 everywhere"], rows)
    report.say("Better than oscar2 on every data set, at no more bytes: " +
               (", ".join(f"`{m}`" for m in winners) if winners else "none") + ".")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bench", required=True, help="kvq-bench")
    parser.add_argument("--work", required=True, help="folder for results")
    parser.add_argument("--out", help="Markdown file")
    parser.add_argument("--best", type=int, default=6, help="how many go on to the test (6)")
    args = parser.parse_args()
    os.makedirs(args.work, exist_ok=True)
    train = Bench(args.bench, os.path.join(args.work, "search-train.jsonl"))
    test = Bench(args.bench, os.path.join(args.work, "search-test.jsonl"))
    report = Report()
    report.heading(1, "Search for a better composition")
    report.say("Written by `tools/quality/search.py`; do not edit. What it found failed on real "
               "weights: [kvq2.md](kvq2.md).\n" + __doc__.split("\n\n", 2)[2])
    best = rank_pairs(train, report, *rank_sides(train, report), args.best)
    tested = test.run([*best, *OTHERS], ["formats"], *caches(101, 100000), *caches(102, 150000),
                      *models(200000, 8192, (1, 10, 30)))
    judge(tested, report, best)
    print(report.plain(), end="")
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            file.write(report.markdown())


if __name__ == "__main__":
    main()
