# SPDX-License-Identifier: Apache-2.0
"""Errors for mutate-gpu.py to plant: name, the test that must fail, and what is changed. The text
to be replaced must stand in its file exactly once."""
import collections

Mutation = collections.namedtuple("Mutation", "name test changes")
CUDA = "kernels/cuda/"
EMU = "kernels/emu/"


def one(name, test, path, old, new):
    return Mutation(name, test, ((path, old, new),))


def attend(name, path, old, new):
    return one("attend-" + name, "test_gpu_attend", CUDA + path, old, new)


def pack(name, path, old, new):
    return one("pack-" + name, "test_gpu_pack", CUDA + path, old, new)


def emu(name, test, path, old, new):
    return one("emu-" + name, "test_gpu_" + test, EMU + path, old, new)


MUTATIONS = [
    # Affine codes: scales, places, zeros, stages.
    attend("wrong-scale-position", "attend_affine.h", "scale.v[i & 3]", "scale.v[(i & 3) ^ 1]"),
    attend("wrong-power-of-a-place", "attend_affine.h", "(float)(1 << (24 - 2 * s))",
           "(float)(1 << (24 - s))"),
    attend("zeros-of-another-channel-group", "attend_affine.h",
           "gpu::shuffle(zeros, 4 * (t >> 1) + l.j)", "gpu::shuffle(zeros, 4 * (t >> 2) + l.j)"),
    attend("missing-warp-sync", "attend_affine.h",
           "    gpu::copy_wait<KVQ_GPU_STAGES - 2>();\n    gpu::warp_sync();\n",
           "    gpu::copy_wait<KVQ_GPU_STAGES - 2>();\n"),
    attend("stale-stage", "attend_affine.h", "gpu::copy_wait<KVQ_GPU_STAGES - 2>();",
           "gpu::copy_wait<KVQ_GPU_STAGES - 1>();"),
    one("attend-stage-filled-too-soon", "test_gpu_long", CUDA + "attend_affine.h",
        "    pipe.fill = pipe.use;\n",
        "    pipe.fill = pipe.fill == stages ? pipe.use : stages;\n"),
    attend("soft-cap-lost", "attend_affine.h", "        if (cap != 0)\n", "        if (cap < 0)\n"),
    attend("whole-groups-only", "attend_item.h", "const bool partly = g.packed != ~0u || rel",
           "const bool partly = rel"),

    # Tiles of rows: votes, sums, bf16's second parts, norms.
    attend("divergent-lane", "attend_tile.h", "if (!gpu::any(passed))",
           "if (gpu::lane() != 7 && !gpu::any(passed))"),
    attend("sum-not-shrunk", "attend_tile.h", "        sums.l[nt][n] *= shrink;\n", ""),
    attend("rest-of-queries-lost", "attend_tile.h",
           "                kvq_gpu_mma<BF16>(s[nt], k[1], q[2], q[3]);\n            }\n",
           "            }\n"),
    attend("norms-lost", "attend_any.h", "has_norms ? kvq__f16_to_f32(norms[t]) : 1",
           "has_norms ? 1 : 1"),
    attend("tile-read-too-soon", "attend_any.h",
           "        gpu::warp_sync();\n        kvq_gpu_tile_attend",
           "        kvq_gpu_tile_attend"),

    # Codebooks with one table.
    one("attend-code-of-a-neighbour", "test_gpu_long", CUDA + "attend_book.h",
        "(uint32_t)i << 4)", "(uint32_t)(i ^ 1) << 4)"),
    attend("wrong-half-of-a-product", "attend_book.h",
           "first[nt][x][n] + second[nt][x][2 + n]", "first[nt][x][n] + second[nt][x][n]"),
    attend("table-of-the-first-head", "attend_book.h", "a.book.k + head * a.book.k_head",
           "a.book.k + 0 * head"),

    # InnerQ.
    attend("innerq-scale-of-other-channels", "attend_innerq.h", "2 * half + (j >> 1);",
           "2 * half + (j & 1);"),
    attend("innerq-scale-of-a-neighbour", "attend_innerq.h", "i & 1 ? 0x3232 : 0x1010",
           "i & 1 ? 0x1010 : 0x3232"),
    attend("innerq-codes-off-by-one", "attend_innerq.h", "0xd440d440u", "0xd430d430u"),
    attend("innerq-tiles-swapped", "attend_innerq.h", "slab + i + 4 * x, own,",
           "slab + i + 4 * (D == 64 ? 0 : 1 - x), own,"),
    attend("innerq-sign-of-a-scale", "attend_innerq.h", "G::V_SCALES, 0x7fff7fffu);",
           "G::V_SCALES, ~0u);"),
    attend("innerq-zeros-without-sign", "attend_innerq.h", "G::V_ZEROS, ~0u);",
           "G::V_ZEROS, 0x7fff7fffu);"),
    attend("innerq-sum-of-all-groups", "attend_innerq.h",
           "o[nt][i] = HYBRID ? 0 : sum[nt][i & 1]", "o[nt][i] = HYBRID ? 0 : l.total[nt][i & 1]"),

    # Classic dequantization, to compare with.
    one("classic-wrong-place", "test_gpu_classic", CUDA + "attend_classic.h",
        "thousand, down[s], off[s]);", "thousand, down[s], off[0]);"),
    one("classic-zeros-of-other-tokens", "test_gpu_classic", CUDA + "attend_classic.h",
        "zero.v[2 * m + (i >> 1)]);", "zero.v[2 * m]);"),

    # Many query rows.
    attend("wide-read-too-soon", "attend_wide.h",
           "            kvq_gpu_bring_packed<D, R>(a, h, step, own);\n        gpu::block_sync();\n",
           "            kvq_gpu_bring_packed<D, R>(a, h, step, own);\n"),
    attend("wide-filled-too-soon", "attend_wide.h",
           "        kvq_gpu_wide_attend<D, false>(r, counts, step);\n        gpu::block_sync();\n",
           "        kvq_gpu_wide_attend<D, false>(r, counts, step);\n"),
    attend("wide-rest-of-queries-lost", "attend_wide.h",
           "        kvq_gpu_wide_products<D, BF16>(counts, step, first, r.rest, s);\n",
           "        (void)r.rest;\n"),
    attend("wide-maximum-of-half", "attend_wide.h", "        for (int d = 1; d < 4; d *= 2)\n"
           "            most[i]", "        for (int d = 1; d < 2; d *= 2)\n            most[i]"),
    attend("wide-value-not-shrunk", "attend_wide.h",
           "            r.o[t][2 * i + 1] *= shrink;\n", ""),

    # What is seen, and where it lies.
    attend("unmasked-short-block", "attend_item.h", "kvq_gpu_bits(0, page.tokens - at)",
           "kvq_gpu_bits(0, 32)"),
    attend("own-token-unseen", "attend_item.h", "s.past_tokens : position + 1;",
           "s.past_tokens : position;"),
    attend("window-one-too-long", "attend_item.h",
           "position + 1 > window ? position + 1 - window : 0",
           "position > window ? position - window : 0"),
    attend("past-only-ignored", "attend_item.h", "s.flags & KVQ_ATTEND_PAST_ONLY ? s.past_tokens",
           "s.flags & 0 ? s.past_tokens"),
    attend("outlier-counted-twice", "attend_item.h",
           "            g.packed &= ~(1u << (p - position));\n", "            (void)p;\n"),
    attend("sinks-of-k-for-v", "attend_raw.h", "(v ? r.extras.sink_v : r.extras.sink_k)",
           "(v ? r.extras.sink_k : r.extras.sink_v)"),
    attend("fresh-tail-shifted", "attend_raw.h", "(int64_t)(position - s.fresh_start);",
           "(int64_t)(position - s.fresh_start + 1) % s.fresh_tokens;"),
    attend("raw-stage-stale", "attend_raw.h",
           "            gpu::copy_wait<(STAGES > 1 ? STAGES - 2 : 0)>();\n",
           "            gpu::copy_wait<(STAGES > 1 ? STAGES - 1 : 0)>();\n"),

    # Splits, merging, output.
    attend("split-left-out", "attend_sums.h", "for (int i = 0; i < some; i++)",
           "for (int i = 0; i + 1 < some; i++)"),
    attend("merge-lost", "attend_sums.h", "gpu::fetch_count(counter, n) + n == splits;",
           "gpu::fetch_count(counter, n) + n > splits;"),
    attend("merge-too-soon", "attend_kernel.h",
           "    gpu::block_sync(); // all rows are handed over\n", ""),
    attend("arrival-orders-nothing", "attend_sums.h", "gpu::fetch_count(counter, n)",
           "gpu::fetch_add(counter, n)"),
    attend("sums-of-the-split-before", "attend_kernel.h",
           "    gpu::block_sync(); // nobody reads stages or sums that these sums are "
           "written over\n", ""),
    attend("ahead-into-raw-stages", "attend_kernel.h",
           "    if (raw == 0)\n        return h.splits - 1;\n",
           "    if (raw != ~0u)\n        return h.splits - 1;\n"),
    attend("partials-of-one-split", "attend_sums.h", "(size_t)split * words.v[2];", "(size_t)0;"),
    attend("wrong-head-of-the-group", "attend_sums.h",
           "const uint32_t q_head = head * a.gqa + row % a.gqa;",
           "const uint32_t q_head = head * a.gqa + (row + 1) % a.gqa;"),
    attend("values-stay-rotated", "attend_sums.h",
           "        kvq_gpu_rotate<D>(a.recipe, rotation, x, true);\n", ""),
    attend("lse-in-powers-of-two", "attend_sums.h", "m * 0.693147181f + logf(l)", "m + logf(l)"),
    attend("queries-not-scaled-back", "attend_query.h", "return gpu::as_float(exponent);",
           "return 1;"),
    attend("wrong-head-of-the-cache", "attend_item.h",
           "g.at = page.packed + (size_t)head * a.recipe.layout.record_bytes",
           "g.at = page.packed + (size_t)(head / 2) * a.recipe.layout.record_bytes"),
    attend("too-much-shared", "attend.c", "uint32_t to = (uint32_t)(tokens / s.split_tokens);",
           "uint32_t to = (uint32_t)(tokens / s.split_tokens) + 1;"),
    one("attend-items-of-the-bucket", "test_gpu_replay", CUDA + "attend.c",
        "header.narrow_items = w.used.narrow_items;",
        "header.narrow_items = limits->narrow_items;"),
    one("attend-counter-stays", "test_gpu_replay", CUDA + "attend_sums.h",
        "            gpu::stg32(counter, 0); // for the next launch\n", "            (void)0;\n"),

    # Storing, packing, reading.
    pack("norm-not-as-stored", "pack.cu", "1.0f / kvq__f16_to_f32(stored)", "1.0f / norm"),
    pack("other-order-of-sums", "rows.h",
         "    for (int half = KVQ_GPU_TEAM / 2; half > 0; half /= 2)\n        x +=",
         "    for (int half = 1; half < KVQ_GPU_TEAM; half *= 2)\n        x +="),
    pack("missing-block-sync", "pack.cu", "p.width, at);\n    gpu::block_sync();\n",
         "p.width, at);\n"),
    pack("raw-tokens-in-the-mean", "pack.cu",
         "            if (gpu::lds32(p.flags + 4 * t))\n                continue;\n", ""),
    pack("sinks-not-kept", "pack.cu", "    kvq_gpu_keep_sinks<D>(p);\n", ""),
    pack("hybrid-unmarked", "quant.h", "    a.params.scale |= KVQ__HYBRID_AFFINE;\n", ""),
    pack("slots-of-k-for-v", "read.cu", "kvq_gpu_token_slot(b.v, set, t)",
         "kvq_gpu_token_slot(false, set, t)"),
    pack("pool-full-too-soon", "extras.cu", "count + entering > r.pool_room",
         "count + entering >= r.pool_room"),
    pack("learned-tokens-compete", "extras.cu", " || start < u.learned)", ")"),
    pack("one-page-short", "extras.cu", "t < p.lesson.tokens; t++)",
         "t + KVQ_BLOCK_TOKENS < p.lesson.tokens; t++)"),
    pack("saturated-not-counted", "store.cu", "kvq_gpu_count(&job.counts->saturated",
         "kvq_gpu_count(&job.counts->nonfinite"),
    pack("outliers-widen-scales", "pack.cu", "raw |= pool->position[i] == position;", "raw |= 0;"),
    pack("last-sink-forgotten", "pack.cu",
         "uint32_t raw = position < p.recipe.sink_tokens;",
         "uint32_t raw = position + 1 < p.recipe.sink_tokens;"),
    pack("mean-over-all", "pack.cu",
         "mean = others ? mean / (float)others : 0.0f;",
         "mean = others ? mean / (float)p.tokens : 0.0f;"),
    pack("norms-before-or-after", "pack.cu",
         "scale == KVQ_SCALE_L2_HEAD ? KVQ_GPU_DIVIDED : KVQ_GPU_ROTATED",
         "scale == KVQ_SCALE_L2_HEAD ? KVQ_GPU_ROTATED : KVQ_GPU_DIVIDED"),
    pack("norms-of-replaced-keys", "pack.cu",
         "const bool replaced = gpu::lds32(p.flags + 4 * (from + t));",
         "const bool replaced = false;"),
    pack("norm-without-a-head", "pack.cu",
         "for (uint32_t h = 0; h < p.recipe.kv_heads; h++)",
         "for (uint32_t h = 1; h < p.recipe.kv_heads; h++)"),
    pack("norms-of-the-first-group", "pack.cu",
         "kvq_gpu_norms<D>(p, from, KVQ_GPU_DIVIDED);",
         "kvq_gpu_norms<D>(p, 0, KVQ_GPU_DIVIDED);"),
    pack("slab-of-another", "pack.cu",
         "kvq_gpu_at(p.rows, t, c0 + c)",
         "kvq_gpu_at(p.rows, t, c)"),
    pack("one-part-too-many-of-k", "pack.cu",
         "const bool v = index >= of_k;",
         "const bool v = index > of_k;"),
    pack("another-head-dim", "pack.cu",
         "if (!unit.recipe || unit.recipe->dim != D ||",
         "if (!unit.recipe ||"),
    pack("narrow-levels-for-wide", "quant.h", "side.levels[wide]", "side.levels[0]"),
    pack("scales-of-v-in-order-of-k", "quant.h", "(v ? kvq_v_slot(t) : t)", "t"),
    pack("hybrid-tie", "quant.h",
         "if (kvq_gpu_error_of(x, a.params, a.grid) > ",
         "if (kvq_gpu_error_of(x, a.params, a.grid) >= "),
    pack("integer-minimums", "quant.h", "row.zero == KVQ_ZERO_INTEGER)", "true)"),
    pack("book-bits-overlap", "quant.h", "<< width * k;", "<< k;"),
    pack("wrong-pairs", "quant.h",
         "const uint32_t run = kvq__run_of(v, D),",
         "const uint32_t run = kvq__run_of(!v, D),"),
    pack("signs-swapped", "rows.h", "r.signs[!back]", "r.signs[back]"),
    pack("factors-not-inverse", "rows.h",
         "const float factor = back ? own : 1.0f / own;",
         "const float factor = own;"),
    pack("transform-without-sync", "rows.h",
         "kvq_gpu_butterflies<16>(x);\n"
         "        KVQ_UNROLL\n"
         "        for (int i = 0; i < 16; i++)\n"
         "            kvq_gpu_put(at + 4 * i, x[i]);\n"
         "    }\n"
         "    gpu::block_sync();",
         "kvq_gpu_butterflies<16>(x);\n"
         "        KVQ_UNROLL\n"
         "        for (int i = 0; i < 16; i++)\n"
         "            kvq_gpu_put(at + 4 * i, x[i]);\n"
         "    }"),
    pack("lesson-competes", "extras.cu",
         "start < u.learned)",
         "start + r.unit_tokens < u.learned)"),
    pack("never-freezes", "extras.cu", "if (frozen)\n            e.pool->frozen_at = start;", ""),
    pack("shared-ranks", "extras.cu",
         "rank += kvq__wins(other.score, other.position, own.score, own.position);",
         "rank += other.score < own.score;"),
    pack("factors-of-sinks", "extras.cu",
         "for (uint32_t t = p.r.sink_tokens; t < p.lesson.tokens; t++)",
         "for (uint32_t t = 0; t < p.lesson.tokens; t++)"),
    pack("best-forgotten", "extras.cu",
         "if (mine)\n            kvq_gpu_put_candidate(gpu::thread(), own.score, own.position);",
         ""),
    pack("read-sinks-packed", "read.cu",
         "if (t >= p.packed || r.is_raw || sink)",
         "if (t >= p.packed || r.is_raw)"),
    pack("read-neighbour", "read.cu", "entry = 1 + i;", "entry = i;"),
    pack("read-unpublished", "read.cu",
         "p.job.pool ? p.job.pool[p.head] : pool->count",
         "pool->count"),
    pack("read-beyond-page", "read.cu", "asked < held ? asked : held", "asked"),
    pack("read-negative-scale", "read.cu",
         "fabsf(kvq__f16_to_f32(gpu::ldg16(b.at.scales + i)))",
         "kvq__f16_to_f32(gpu::ldg16(b.at.scales + i))"),
    pack("read-first-norm", "read.cu", "gpu::ldg16(norms + i / D)", "gpu::ldg16(norms)"),
    pack("read-rotated-on", "read.cu",
         "kvq_gpu_rotate<D>(p.r, side.rotation, p.rows, true);",
         "kvq_gpu_rotate<D>(p.r, side.rotation, p.rows, false);"),
    pack("v-not-stored", "store.cu", "const bool v = n & 1;", "const bool v = false;"),
    pack("slots-from-start", "store.cu",
         "kvq_raw_at(&r.raw, head, position % KVQ_BLOCK_TOKENS, v)",
         "kvq_raw_at(&r.raw, head, token % KVQ_BLOCK_TOKENS, v)"),
    pack("lse-race", "store.cu", "gpu::warp_sync(); // lse may be one of the inputs", ""),
    pack("lse-of-one-side", "store.cu", "gpu::as_bits(m.lse)", "gpu::as_bits(lse_b)"),

    # The emulator itself.
    emu("warp-sync-orders-nothing", "emu", "collectives.cpp",
        "    emu_merge(warp() * WARP, WARP);\n", ""),
    emu("votes-order", "emu", "collectives.cpp",
        "    compute(w);\n", "    compute(w);\n    emu_merge(first, WARP);\n"),
    emu("bulk-lands-at-once", "emu", "async.cpp", "    emu_machine->flights.push_back(c);\n",
        "    emu_machine->flights.push_back(c);\n    emu_flights_land();\n"),
    emu("readers-forgotten", "emu", "shared.cpp", "if (!w.many && !emu_ordered(w.reader)) {",
        "if (false) {"),
    emu("blocks-see-all", "emu", "global.cpp",
        "return found != others->end() && found->second[w.by.thread] >= w.by.time;",
        "return true;"),
    emu("one-order", "emu", "emu.cpp", "m.random = shape.seed * 2 + 1;", "m.random = 1;"),
    emu("no-end-of-memory", "emu", "global.cpp",
        "        if (bytes <= p.bytes - offset)\n", "        if (bytes)\n"),
    emu("spills-unseen", "driver", "global.cpp", "            if (at[i] == CANARY)\n",
        "            if (at[i] <= CANARY)\n"),
    emu("matrix-transposed", "words", "collectives.cpp",
        "x.b[2 * j + 8 * r][g] = lo(w.in[l][4 + r]);",
        "x.b[2 * j + 8 * r][g] = hi(w.in[l][4 + r]);"),
    emu("sums-not-cut", "words", "collectives.cpp", "if (emu_machine->truncate)", "if (false)"),
]
