# SPDX-License-Identifier: Apache-2.0
"""Decode attention of the kernels, layer by layer, against PyTorch's and our own over 16 bits.

Every point is a set of sessions; every time is that of one layer out of a captured graph of many,
whose caches lie in different memory. Ratios are against the fastest 16-bit attention of the run."""
import numpy

import flash_infer
import rig as rigs

FORMATS = ("oscar2", "oscar3", "oscar4", "kivi2", "ott2", "innerq-base", "innerq-hybrid",
           "innerq-small", "vecinfer-2", "kvq2", "quarot2", "turboquant3", "int8", "k8v4")
LIMIT = 2e-3  # of the relative error
RAGGED = 48


def ragged(total):
    """Lengths from about 1K to 32K whose sum is `total`, the same in every run."""
    random = numpy.random.default_rng(48)
    share = random.pareto(1.2, RAGGED) + 0.25
    lengths = numpy.clip(share / share.sum() * total, 1024, 32768)
    lengths = (lengths * total / lengths.sum()).astype(int) // 64 * 64
    lengths[lengths.argmax()] += total - lengths.sum()
    return [int(n) for n in lengths]


POINTS = {
    "48 x 4K": {"tokens": [4096] * 48},
    "48 ragged": {"tokens": ragged(48 * 4096)},
    "1 x 4K": {"tokens": [4096]},
    "1 x 32K": {"tokens": [32768]},
    "1 x 128K": {"tokens": [131072]},
}
SHAPES = {  # at 48 x 4K, besides 32/8 heads and head_dim 128
    "8/8 heads": {"tokens": [4096] * 48, "q_heads": 8},
    "64/8 heads": {"tokens": [4096] * 48, "q_heads": 64},
    "head_dim 64": {"tokens": [4096] * 48, "head_dim": 64},
    "head_dim 256": {"tokens": [4096] * 48, "head_dim": 256},
}
TINY = {"2 x 300": {"tokens": [300, 300], "q_heads": 4, "kv_heads": 2, "head_dim": 64},
        "1 x 200": {"tokens": [200], "q_heads": 4, "kv_heads": 1, "head_dim": 128}}
WALK = 160 << 20  # bytes that a graph's caches have at least, beyond any cache
MOST_LAYERS = 36


def layers_for(cache_bytes, free):
    return max(1, min(MOST_LAYERS, -(-WALK // cache_bytes), int(0.6 * free / cache_bytes)))


def open_cache(lab, form, point, layers):
    return rigs.Cache(lab.rig, form, layers=layers, dtype=rigs.BF16, **point)


def relative(got, want):
    return float(numpy.linalg.norm(got - want) / numpy.linalg.norm(want))


def exact(q, k, v):
    """Double precision, q [heads][dim], k and v [KV head][tokens][dim]."""
    group = q.shape[0] // k.shape[0]
    out = numpy.empty_like(q)
    for h in range(q.shape[0]):
        logits = k[h // group] @ q[h] / numpy.sqrt(q.shape[1])
        p = numpy.exp(logits - logits.max())
        out[h] = p @ v[h // group] / p.sum()
    return out


def error_of(lab, cache, q, out):
    """Of the last session of layer 0, which has been attended to."""
    last = len(cache.tokens) - 1
    shape = (cache.kv_heads, cache.tokens[last], cache.head_dim)
    k, v = (lab.empty(*shape, dtype=lab.single()) for _ in range(2))
    cache.read(0, last, lab.at(k), lab.at(v), lab.now())
    k, v = lab.numbers(k), lab.numbers(v)
    return relative(lab.numbers(out)[last], exact(lab.numbers(q)[last], k, v))


def time_format(lab, form, point, blocks=0):
    """One row: microseconds, bytes and error."""
    with open_cache(lab, form, {**point, "tokens": point["tokens"][:1]}, 1) as one:
        share = one.bytes() / one.tokens[0]
    layers = layers_for(int(share * sum(point["tokens"])), lab.free_bytes())
    with open_cache(lab, form, point, layers) as cache:
        shape = (len(cache.tokens), cache.q_heads, cache.head_dim)
        q = [lab.normal(*shape) for _ in range(layers)]
        out = [lab.empty(*shape) for _ in range(layers)]
        for i in range(layers):
            cache.bind(i, lab.at(q[i]), lab.at(out[i]), dtype=lab.code)
        calls = [lambda i=i: cache.attend(i, lab.now(), blocks) for i in range(layers)]
        us = lab.time(calls)
        return {"us": min(us), "again": max(us), "bytes": cache.bytes(), "layers": layers,
                "bits": cache.bits(), "error": error_of(lab, cache, q[0], out[0])}


# ---- PyTorch ----

def sdpa_backends(lab):
    from torch.nn.attention import SDPBackend
    return {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


def time_sdpa(lab, backend, point, q_tokens=1):
    """None where this backend has no such attention: sessions of different lengths, say."""
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    tokens = point["tokens"]
    if len(set(tokens)) > 1:
        return None
    q_heads, kv_heads = point.get("q_heads", 32), point.get("kv_heads", 8)
    dim, n = point.get("head_dim", 128), len(tokens)
    one = 4 * n * kv_heads * tokens[0] * dim
    layers = layers_for(one, lab.free_bytes())
    q = lab.normal(n, q_heads, q_tokens, dim)
    kv = [[lab.normal(n, kv_heads, tokens[0], dim) for _ in range(2)] for _ in range(layers)]

    def call(k, v):
        with sdpa_kernel(backend):
            sdpa(q, k, v, enable_gqa=q_heads != kv_heads)
    try:
        us = lab.time([lambda k=k, v=v: call(k, v) for k, v in kv])
    except RuntimeError as error:
        torch.cuda.synchronize()
        return {"refused": str(error).strip().splitlines()[0][:120]}
    return {"us": min(us), "again": max(us), "bytes": one, "layers": layers}


def baselines(lab):
    """The other ways to attend: {name: function of a point}; None: no such attention there."""
    ways = {"kvq bf16": lambda point: time_format(lab, "bf16", point)}
    if lab.timed:
        for name, backend in sdpa_backends(lab).items():
            ways[name] = lambda point, backend=backend: time_sdpa(lab, backend, point)
    ways.update(flash_infer.ways(lab, layers_for))
    return ways


def measure_point(lab, rows, name, point, formats):
    ways = baselines(lab)
    ways.update((form, lambda p, form=form: time_format(lab, form, p)) for form in formats)
    for way, measure in ways.items():
        rows.measure([name, way], lambda: measure(point))
        lab.clear()
    compare(rows(name))
    rows.save()


def compare(ways):
    """What each way is against the fastest of 16 bits, and whether it is right."""
    found = {name: row for name, row in ways.items() if row and "us" in row}
    best = min(row["us"] for row in found.values() if row.get("bits", 16) == 16)
    for row in found.values():
        row["vs_16_bits"] = best / row["us"]
        if row.get("error", 0) > LIMIT:
            row["wrong"] = f"error {row['error']:.2e} is above {LIMIT}"


# ---- Parts ----

def points(sessions, lab, rows):
    """Those of one session, or of more."""
    formats = FORMATS if lab.timed else ("oscar2", "vecinfer-2")
    for name, point in (POINTS if lab.timed else TINY).items():
        if (len(point["tokens"]) == 1) == (sessions == 1):
            measure_point(lab, rows, name, point, formats)


def shapes(lab, rows):
    chosen = SHAPES if lab.timed else {"1 x 200": TINY["1 x 200"]}
    for name, point in chosen.items():
        measure_point(lab, rows, name, point, ("oscar2", "vecinfer-2"))


def ablation(lab, rows):
    """What leaving codes as they are saves: the same kernels with classic dequantization."""
    classic = lab.classic()
    for name in ("48 x 4K", "1 x 32K", "1 x 128K") if lab.timed else ("1 x 200",):
        point = (POINTS if lab.timed else TINY)[name]
        for form in ("oscar2", "oscar4"):
            own = rows.measure([f"{name}, {form}", "AND only"],
                               lambda: time_format(lab, form, point))
            other = rows.measure([f"{name}, {form}", "classic"],
                                 lambda: time_format(classic, form, point))
            for row in (own, other):
                row["vs_classic"] = other["us"] / row["us"]
                if row["error"] > LIMIT:
                    row["wrong"] = f"error {row['error']:.2e} is above {LIMIT}"
            lab.clear()
    rows.save()


def grids(lab, rows):
    """Equal bits whatever the grid; and what a grid that fits the device gains over others."""
    point = POINTS["48 ragged"] if lab.timed else TINY["2 x 300"]
    with open_cache(lab, "oscar2", point, 1) as cache:
        shape = (len(cache.tokens), cache.q_heads, cache.head_dim)
        q, first = lab.normal(*shape), None
        for blocks in (0, 1, 7, 132, 396):
            out = lab.empty(*shape)
            cache.bind(0, lab.at(q), lab.at(out), dtype=lab.code)
            us = lab.time([lambda b=blocks: cache.attend(0, lab.now(), b)])
            got = lab.numbers(out)
            first = got if first is None else first
            rows.measure([str(blocks) if blocks else "as many as fit"], lambda: {
                "us": min(us), "same_bits": bool(numpy.array_equal(got, first))})


def packing(lab, rows):
    """A block of each session and layer; 36 layers of 48 sessions are one step in 128."""
    sessions, layers = (48, 36) if lab.timed else (2, 2)

    def measure(form):
        with rigs.Cache(lab.rig, form, [256] * sessions, layers=layers, dtype=rigs.BF16) as cache:
            nbytes = [0]

            def call():
                nbytes[0] = cache.pack(lab.now())
            us = lab.time([call])
            return {"us": min(us), "raw_bytes": nbytes[0]}
    for form in ("oscar2", "oscar3", "oscar4", "kivi2", "innerq-base", "vecinfer-2", "kvq2"):
        rows.measure([form], lambda: measure(form))


def prefill(lab, rows):
    """New tokens over a cached prefix: every block is unpacked once for a tile of queries."""
    prefix, new = (32768, 512) if lab.timed else (300, 20)
    point = {"tokens": [prefix]} if lab.timed else {**TINY["2 x 300"], "tokens": [prefix]}

    def measure(form):
        with open_cache(lab, form, point, 4) as cache:
            q = lab.normal(new, cache.q_heads, cache.head_dim)
            out = lab.empty(new, cache.q_heads, cache.head_dim)
            kv = [lab.normal(new, cache.kv_heads, cache.head_dim) for _ in range(2)]
            for i in range(4):
                cache.bind(i, lab.at(q), lab.at(out), new, lab.code,
                           fresh=(lab.at(kv[0]), lab.at(kv[1]), new))
            us = lab.time([lambda i=i: cache.attend(i, lab.now()) for i in range(4)], 20)
            return {"us": min(us)}
    for form in ("bf16", "oscar2", "vecinfer-2"):
        rows.measure(["kvq " + form], lambda: measure(form))
    if lab.timed:
        for name, backend in sdpa_backends(lab).items():
            rows.measure([name], lambda: time_sdpa(lab, backend, {"tokens": [prefix + new]}, new))
