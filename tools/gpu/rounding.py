#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What rounding to fp16 costs in the GPU's loop over affine codes: a model of its arithmetic.

    tools/gpu/rounding.py [--rows N] [--seed N]

kernels/cuda/attend_affine.h multiplies queries with K's scales, rounds the weights of tokens, and
multiplies these with V's scales; each product is rounded to fp16, everything else is added up in
fp32, which counts as exact here. Keys, values and queries are drawn from N(0, 1); `size` is the
standard deviation of a logit. Each column is the largest error of an output over the largest
output of its row, over all rows: with K's products rounded alone, with weights and V's products
rounded alone, with both, and with both where codes count from the middle of their range.
"""
import argparse

import numpy as np


def half(x):
    return x.astype(np.float16).astype(np.float64)


def affine(x, axis, bits):
    """Codes, scales and zeros along an axis, as the format has them."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale, zero = half((high - low) / (2**bits - 1)), half(low)
    return np.clip(np.round((x - zero) / scale), 0, 2**bits - 1), scale, zero


def row(random, tokens, dim, bits, size):
    """Errors of one query over so many tokens: of K, of V, of both, of both from the middle."""
    q = half(random.standard_normal(dim) * size)
    k, k_scale, k_zero = affine(random.standard_normal((tokens // 32, 32, dim)), 1, bits)
    v, v_scale, v_zero = affine(random.standard_normal((tokens, dim // 32, 32)), 2, bits)
    middle = 2 ** (bits - 1) - 0.5

    def logits(rounded, origin):
        products = half(q * k_scale) if rounded else q * k_scale
        zeros = (k_zero + origin * k_scale) * q
        return (((k - origin) * products).sum(2) + zeros.sum(2)).ravel() / np.sqrt(dim)

    def output(logits, rounded, origin):
        p = np.exp(logits - logits.max())[:, None, None]
        p = half(p) if rounded else p
        products = half(p * v_scale) if rounded else p * v_scale
        sums = ((v - origin) * products).sum(0) + ((v_zero + origin * v_scale) * p).sum(0)
        return sums.ravel() / p.sum()

    exact = output(logits(False, 0), False, 0)
    got = (output(logits(True, 0), False, 0), output(logits(False, 0), True, 0),
           output(logits(True, 0), True, 0), output(logits(True, middle), True, middle))
    return [np.abs(x - exact).max() / np.abs(exact).max() for x in got]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300, help="rows of each line (300)")
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    random = np.random.default_rng(o.seed)
    print(f"{'tokens':>6} {'size':>5} {'bits':>4} {'K':>8} {'V':>8} {'both':>8} {'middle':>8}")
    for tokens in (128, 1024):
        for size in (0.25, 1, 3):
            for bits in (2, 4):
                errors = np.max([row(random, tokens, 128, bits, size) for _ in range(o.rows)], 0)
                print(f"{tokens:6} {size:5} {bits:4} " + " ".join(f"{e:8.1e}" for e in errors))


if __name__ == "__main__":
    main()
