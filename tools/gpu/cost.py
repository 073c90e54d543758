#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long decode attention should take on a GPU, from the machine code of its kernels: a model.

    tools/gpu/cost.py BUILD/kernels/cuda                 predictions, as Markdown; no GPU is used
    tools/gpu/cost.py BUILD/kernels/cuda --check         beside what was measured, and the error
    tools/gpu/cost.py BUILD/kernels/cuda --what-if kvq2  what single changes would give
    tools/gpu/cost.py BUILD/kernels/cuda --json          predictions and --check for programs

BUILD/kernels/cuda has cubins for sm_90a, as a build with KVQ_CUDA leaves them there.

A launch takes, in this model, START_US; then what the slowest block of threads does with its items;
then the merge of a row's splits. An item is a split of the keys: the loop over its groups, and
instructions outside of the loop, whose number is read off the code and whose cycles are
FIXED_CYCLES each. A run of items adds such instructions once, and reads that wait for each other.
The loop takes the cycles that warps.py finds for as many warps as a scheduler has, and memory takes
the bytes over the rate that the device can read at. As neither waits for the other all the time nor
never, both together take the square root of the sum of their squares.

Bytes and splits are those of kernels/cuda/attend.c, for up to 8 query rows to a KV head. Outliers,
factors of channels and codebooks are left out: no format of FORMATS has them.
"""
import argparse
import bisect
import collections
import json
import math
import sys
from pathlib import Path

import sass
import warps

# ---- Devices ----

Gpu = collections.namedtuple("Gpu", "name multiprocessors ghz read_gb_per_s registers shared")
# The clock is the one that NVIDIA's peak rates are for. Reading: measured on the H100
# (docs/benchmarks.md), and as large a share of the peak taken for granted on the H200.
H100 = Gpu("H100", 132, 1.83, 2991, 65536, 233472)
H200 = H100._replace(name="H200", read_gb_per_s=round(2991 * 4.8 / 3.35))
GPUS = (H100, H200)

# ---- Calibrated on the rows of CALIBRATED, and on nothing else ----

START_US = 7.0       # launch, first reads of descriptors and queries, last store
FIXED_CYCLES = 0.3   # of an instruction in the code around the loop, run or not
MERGE_US = 0.6       # of 8 splits of a row, whose sums are read at a time
CALIBRATED = "oscar2"

# Read off the sources, and assumed: cycles of a read of memory that is waited for; such reads, one
# after the other, of a run (items, tiles and sessions, pages, queries and first groups, the counter
# at its end), and of a tile of raw tokens (its page, its rows).
READ_CYCLES = 800
RUN_READS, TILE_READS = 5, 2

# ---- Formats ----

# K and V: bits, and tokens (K) or channels (V, 0: all) that share parameters; bytes of these.
Format = collections.namedtuple(
    "Format", "kernel k_bits k_tokens v_bits v_channels v_bytes norm first")
FORMATS = {
    "oscar2": Format("b2", 2, 32, 2, 32, 4, 2, 0),
    "oscar3": Format("b3", 3, 32, 3, 32, 4, 2, 0),
    "oscar4": Format("b4", 4, 32, 4, 32, 4, 2, 0),
    "kivi2": Format("b2", 2, 32, 2, 32, 4, 0, 0),
    "kivi4": Format("b4", 4, 32, 4, 32, 4, 0, 0),
    "kvq2": Format("s3", 3, 128, 2, 0, 2, 2, 32),
    "kvq2-fm-s0": Format("s3", 3, 128, 2, 0, 2, 2, 0),
}
RECOMMENDED = ("kvq2", "oscar2", "oscar3", "oscar4", "kivi4")
GROUP, BLOCK, WARPS = 32, 128, 4
RUN_TOKENS = 32 * BLOCK  # that a run of splits has at most
SPLIT_MIN, SPLIT_MAX, SPLITS = 512, 2048, 32


def token_bytes(form, dim):
    """Bytes of a token and KV head."""
    k = dim * form.k_bits / 8 + 4 * dim / form.k_tokens
    v = dim * form.v_bits / 8 + form.v_bytes * (dim // form.v_channels if form.v_channels else 1)
    return k + v + form.norm


def is_apart(dim):
    """Whether a split's groups are brought while the sums of the one before are handed over."""
    return dim < 256


def shared_bytes(form, dim, rows=8):
    """Shared memory of a block of threads, KVQ_GPU_NARROW_BYTES."""
    if form.kernel[0] == "b":
        stage = GROUP * dim * form.k_bits // 8 * 2 + 8 * dim + 2 * GROUP
    else:
        stage = (4 * dim + GROUP * dim * (form.k_bits + 2) // 8 +
                 (4 if form.k_bits == 3 else 6) * GROUP)
    stages = max(12 * stage, 4 * (64 * dim + 128))
    sums = 32 * rows + 16 * rows * (dim + 4)
    lists = 96 + 256 + 4 * 34 * 16 + 4 * 65 * 8
    head = (52 * rows + 128 + lists + 127) // 128 * 128 + 10 * rows * dim
    return head + (stages + sums if is_apart(dim) else max(stages, sums))


# ---- The host's cut, and the device's ----

def split_tokens(tokens):
    """split_of in attend.c, for sessions of few query rows."""
    split = SPLIT_MIN
    while split < SPLIT_MAX and split * SPLITS < tokens:
        split *= 2
    return split


# A split of a row of them: the rows of a session and KV head. `before`: what the items before it
# cost, in units of a group (cost_of in attend.c).
Item = collections.namedtuple("Item", "row split tokens most before")


def items_of(lengths, kv_heads, longer=1):
    """The items of sessions of these lengths, in the host's order. `longer`: times as long splits
    as the host's."""
    found, before = [], 0
    for session, tokens in enumerate(lengths):
        most = int(split_tokens(tokens) * longer)
        for head in range(kv_heads):
            for split in range(-(-tokens // most)):
                left = min(most, tokens - split * most)
                found.append(Item((session, head), split, left, most, before))
                before += (left + BLOCK) // GROUP
    return found, before


def stretches(items, cost, grid):
    """kvq_gpu_stretch: where each block's items begin, and the end."""
    n, splits = len(items), collections.Counter(item.row for item in items)
    if len(set(splits.values())) > 1:
        before = [item.before for item in items]
        return [bisect.bisect_left(before, cost * b // grid) for b in range(grid)] + [n]
    whole = splits[items[0].row]
    rows = n // whole
    most = -(-rows // grid) * whole
    if 8 * most <= 9 * -(-n // grid):
        return [rows * b // grid * whole for b in range(grid + 1)]
    return [n * b // grid for b in range(grid + 1)]


def runs_of(items):
    """Runs of a block's items, and how many rows begin in them."""
    runs = left = 0
    for i, item in enumerate(items):
        if left == 0 or items[i - 1].row != item.row:
            runs, left = runs + 1, RUN_TOKENS // item.most
        left -= 1
    return runs, sum(item.split == 0 for item in items)


# ---- Kernels ----

class Kernel:
    """What a kernel's code says of its cost."""

    def __init__(self, code, registers):
        self.kernel = sass.Kernel(code, "LOP3")
        self.registers, self.code = registers, [code[i] for i in self.kernel.common()]
        self.found = {}
        main = self.kernel.main
        around = [o for o in self.kernel.loops if main.blocks < o.blocks]
        split, run = around[-1], around[-2]
        inner = [o for o in self.kernel.loops
                 if o not in around and self.kernel.has(o, sass.MATRIX)]
        loops = {i for o in inner for i in o.indices(self.kernel.blocks)}
        of_split = set(split.indices(self.kernel.blocks))
        self.instructions = len(self.code)
        self.split = len(of_split - loops)
        self.run = len(set(run.indices(self.kernel.blocks)) - of_split)
        # Raw rows of 16 bits, bf16 the longer: loops over tiles of 16 tokens.
        self.raw = max(self.longest(o) for o in inner if o is not main)

    def longest(self, loop):
        """Instructions of a pass. Loops of unknown passes are not gone through: such are for rows
        that must be converted."""
        passes = {o: sass.passes_of(self.kernel.code, self.kernel.blocks, o) or 0
                  for o in self.kernel.inside(loop)}
        return self.kernel.longest(passes, loop=loop).total()

    def cycles(self, n, latency=None):
        """Of a group of 32 tokens, where n warps are on a scheduler."""
        key = n, tuple(sorted((latency or {}).items()))
        if key not in self.found:
            self.found[key] = warps.cycles(self.code, n, latency=latency)
        return self.found[key]

    def residents(self, gpu, form, dim):
        """Blocks of threads that a multiprocessor has at a time."""
        warp = -(-self.registers * 32 // 256) * 256
        return min(gpu.registers // warp // WARPS, gpu.shared // (shared_bytes(form, dim) + 1024))


def load(folder, arch="sm_90a", dims=(64, 128, 256)):
    """{(head_dim, kernel of FORMATS): Kernel} of a folder with cubins."""
    found, wanted = {}, {form.kernel for form in FORMATS.values()}
    for dim in dims:
        data = (Path(folder) / f"attend_d{dim}.{arch}.cubin").read_bytes()
        registers = sass.registers(data)
        for name, text in sass.kernels(data):
            kind = name.rsplit("_", 2)[-2]
            if name.endswith(f"d{dim}_{kind}_n1") and kind in wanted:
                found[dim, kind] = Kernel(sass.decode(text), registers[name])
    return found


# ---- The model ----

Point = collections.namedtuple("Point", "name lengths kv_heads dim", defaults=(8, 128))
# 48 sessions as tools/gpu/attend.py has them, together as long as 48 of 4,096.
RAGGED = (14144, 2304, 3904, 3200, 1024, 1088, 4224, 25728, 1024, 1024, 1024, 1024, 5504, 8640,
          1024, 2176, 1408, 2688, 2816, 1600, 1024, 1984, 1024, 1152, 1472, 1920, 3968, 1152,
          1088, 1344, 22592, 1024, 1024, 1664, 3392, 3776, 35840, 1024, 1024, 1408, 9920, 1024,
          1024, 1024, 1024, 4736, 1024, 2368)
POINTS = (Point("48 x 4,096", (4096,) * 48), Point("1 x 4,096", (4096,)),
          Point("1 x 32,768", (32768,)), Point("1 x 131,072", (131072,)))
DIMS = (Point("48 x 4,096, head_dim 64", (4096,) * 48, 8, 64),
        Point("48 x 4,096, head_dim 256", (4096,) * 48, 8, 256))
ALL_POINTS = (*POINTS, Point("48 ragged", RAGGED), *DIMS)

# What a change of the kernels would make of the model; see WHAT_IF.
Change = collections.namedtuple("Change",
                                "residents latency fixed start waits first overlap loop split",
                                defaults=(None, None, 1, 1, 1, 1, 2, 1, 1))


def both(a, b, change):
    return (a ** change.overlap + b ** change.overlap) ** (1 / change.overlap)


def phases(shares, multiprocessors):
    """Groups that all blocks with as many have still to do: (groups, blocks on the fullest
    multiprocessor, blocks) one after the other. Blocks go to multiprocessors by turns."""
    found, before = [], 0
    for groups in sorted(set(shares) - {0}):
        going = [b for b, n in enumerate(shares) if n >= groups]
        fullest = collections.Counter(b % multiprocessors for b in going).most_common(1)[0][1]
        found.append((groups - before, fullest, len(going)))
        before = groups
    return found


def predict(kernels, gpu, name, point, change=Change()):
    """A dictionary: microseconds of a launch, of its parts, and of the floor."""
    form, dim = FORMATS[name], point.dim
    kernel = kernels[dim, form.kernel]
    items, cost = items_of(point.lengths, point.kv_heads, change.split)
    residents = change.residents or kernel.residents(gpu, form, dim)
    grid = min(len(items), gpu.multiprocessors * residents)
    bounds = stretches(items, cost, grid)
    blocks = [items[bounds[b]:bounds[b + 1]] for b in range(grid)]
    each = 1e-3 / gpu.ghz  # us of a cycle
    fixed = FIXED_CYCLES * change.fixed * each
    read = READ_CYCLES * each
    bytes_ = token_bytes(form, dim)

    def alone(groups, n):
        return groups * each * kernel.cycles(n, change.latency) * change.loop

    def memory(tokens):
        return tokens * bytes_ / gpu.read_gb_per_s / 1e3

    shares = [sum(-(-item.tokens // BLOCK) for item in block) for block in blocks]
    steps = phases(shares, gpu.multiprocessors)
    loop = sum(both(alone(groups, n), memory(going * groups * BLOCK), change)
               for groups, n, going in steps)
    tokens = point.kv_heads * sum(point.lengths)
    mean = sum(shares) / (gpu.multiprocessors * residents)
    runs, begins = map(max, zip(*map(runs_of, blocks)))
    splits = max(map(len, blocks))
    # Raw first tokens: two tiles of one warp, one after the other; sums once more; then the
    # pipeline is empty.
    pace = kernel.cycles(1) / kernel.instructions
    raw = (2 * (kernel.raw * pace * each + TILE_READS * read) + kernel.split * fixed + read
           if form.first else 0)
    parts = {
        "start": START_US * change.start,
        "merge": MERGE_US * change.start * math.ceil((max(i.split for i in items) + 1) / 8),
        "splits": splits * (kernel.split * fixed + (0 if is_apart(dim) else read)),
        "runs": runs * (kernel.run * fixed + RUN_READS * read * change.waits),
        "first": begins * raw * change.first, "loop": loop}
    us, floor = sum(parts.values()), memory(tokens)
    return {"us": us, "floor_us": floor, "ratio": us / floor, **parts,
            "uneven": loop - both(alone(mean, residents), floor, change),
            "loop_cycles_us": sum(alone(groups, n) for groups, n, _ in steps),
            "issue_us": tokens / GROUP * kernel.instructions * each /
            (warps.SCHEDULERS * gpu.multiprocessors),
            "blocks": grid, "residents": residents, "bytes": bytes_}


# ---- What was measured ----

# On the H100 of docs/benchmarks.md: times as fast as the fastest 16-bit attention of the run, whose
# microseconds stand first.
MEASURED = {
    "48 x 4,096": (270, {"oscar2": 3.64, "oscar3": 2.55, "oscar4": 2.30, "kivi2": 3.70,
                         "kvq2-fm-s0": 2.66}),
    "1 x 4,096": (13.36, {"oscar2": 0.99, "oscar3": 0.89, "oscar4": 0.87, "kivi2": 1.00,
                          "kvq2-fm-s0": 0.97}),
    "1 x 32,768": (52.8, {"oscar2": 2.31, "oscar3": 2.05, "oscar4": 1.80, "kivi2": 2.34,
                          "kvq2-fm-s0": 2.17}),
    "1 x 131,072": (183.2, {"oscar2": 2.88, "oscar3": 2.60, "oscar4": 2.24, "kivi2": 3.04,
                            "kvq2-fm-s0": 2.99}),
}
# oscar2 in microseconds: other head_dims, if PyTorch's attention reads as fast there as at 128,
# which was not written down; and the way to the daemon, where no graph replays the launches.
OTHERS = {DIMS[0]: 135 / 2.98, DIMS[1]: 540 / 3.79, Point("16 x 4,096", (4096,) * 16): 42.5,
          Point("16 x 32,768", (32768,) * 16): 180.5}


def checked(kernels):
    """Rows of (point, format, microseconds measured, predicted)."""
    for point in POINTS:
        base, ratios = MEASURED[point.name]
        for name, ratio in ratios.items():
            yield point.name, name, base / ratio, predict(kernels, H100, name, point)["us"]
    for point, us in OTHERS.items():
        yield point.name, "oscar2", us, predict(kernels, H100, "oscar2", point)["us"]


def is_calibrated_on(point, name):
    return name == CALIBRATED and point in MEASURED


def errors(rows):
    """Of rows that the constants were not calibrated on: root mean square, and the worst, of
    predicted over measured."""
    ratios = [predicted / us for point, name, us, predicted in rows
              if not is_calibrated_on(point, name)]
    mean = math.exp(math.sqrt(sum(math.log(r) ** 2 for r in ratios) / len(ratios))) - 1
    return mean, max(ratios, key=lambda r: abs(math.log(r)))


# ---- What single changes would give ----

APART = {"HMMA": warps.MATRIX_CYCLES}
WHAT_IF = (
    ("as it is", Change()),
    ("three blocks of threads to a multiprocessor", Change(residents=3)),
    ("products that wait for no product before them", Change(latency=APART)),
    ("a quarter fewer cycles in the loop", Change(loop=0.75)),
    ("splits half as long", Change(split=0.5)),
    ("splits twice as long", Change(split=2)),
    ("half the instructions around the loop", Change(fixed=0.5)),
    ("the next run's reads while the last one is attended to", Change(waits=0)),
    ("raw first tokens beside the groups, at no cost", Change(first=0)),
    ("half the start and the merge", Change(start=0.5)),
    ("memory never waits for instructions, nor they for it", Change(overlap=16)),
    ("all of these except those of blocks and splits", Change(latency=APART, loop=0.75, fixed=0.5,
                                                           waits=0, first=0, start=0.5,
                                                           overlap=16)),
)


def what_if(kernels, name, gpu, point):
    for text, change in WHAT_IF:
        yield text, predict(kernels, gpu, name, point, change)


# ---- Output ----

def table(head, rows):
    rows = [head, ["---"] * len(head), *rows]
    lines = ["|" + "|".join(row) + "|" if row[0] == "---" else "| " + " | ".join(row) + " |"
             for row in rows]
    return "\n".join(lines)


def predicted_table(kernels, gpu):
    head = [gpu.name, "format", "us", "floor", "ratio", "start", "merge", "splits, runs",
            "first tokens", "loop, instructions alone", "uneven"]
    rows = []
    for point in ALL_POINTS:
        for name in RECOMMENDED:
            x = predict(kernels, gpu, name, point)
            rows.append([point.name, f"`{name}`", *(f"{n:.1f}" for n in (x["us"], x["floor_us"])),
                         f"{x['ratio']:.2f}", *(f"{n:.1f}" for n in (
                             x["start"], x["merge"], x["splits"] + x["runs"], x["first"],
                             x["loop_cycles_us"], x["uneven"]))])
    return table(head, rows)


def check_table(rows):
    text = table(["H100", "format", "measured, us", "model, us", "model / measured"],
                 [[point, f"`{name}`" + ", calibrated on" * is_calibrated_on(point, name),
                   f"{us:.1f}", f"{predicted:.1f}", f"{predicted / us:.2f}"]
                  for point, name, us, predicted in rows])
    mean, worst = errors(rows)
    return f"{text}\n\nRows that it was not calibrated on: {mean:.1%} off in the root mean " \
        f"square, {worst:.2f} at worst."


def what_if_table(kernels, name):
    points = [(gpu, point) for gpu in GPUS for point in (POINTS[0], POINTS[3])]
    columns = [list(what_if(kernels, name, gpu, point)) for gpu, point in points]
    rows = [[column[0][0], *(f"{x['us']:.1f} ({x['ratio']:.2f})" for _, x in column)]
            for column in zip(*columns)]
    return table([f"`{name}`", *(f"{gpu.name}, {point.name}" for gpu, point in points)], rows)


def everything(kernels):
    """All numbers, for programs."""
    rows = list(checked(kernels))
    return {"predictions": {gpu.name: {point.name: {name: predict(kernels, gpu, name, point)
                                                    for name in RECOMMENDED}
                                       for point in ALL_POINTS} for gpu in GPUS},
            "checked": [dict(zip(("point", "format", "measured_us", "us"), row)) for row in rows],
            "error": dict(zip(("root_mean_square", "worst"), errors(rows)))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", help="that has attend_d128.sm_90a.cubin and its like")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="beside what was measured")
    what.add_argument("--what-if", choices=FORMATS, help="single changes, for this format")
    what.add_argument("--json", action="store_true", help="predictions and --check for programs")
    options = parser.parse_args()
    kernels = load(options.folder)
    if options.json:
        print(json.dumps(everything(kernels), indent=2))
    elif options.check:
        print(check_table(list(checked(kernels))))
    elif options.what_if:
        print(what_if_table(kernels, options.what_if))
    else:
        print("\n\n".join(predicted_table(kernels, gpu) for gpu in GPUS))


if __name__ == "__main__":
    sys.exit(main())
