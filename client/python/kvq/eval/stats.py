# SPDX-License-Identifier: Apache-2.0
"""Means of tokens, and how sure they are.

Tokens of one window are no independent draws: what a cache lost harms all tokens behind it. So the
standard error of a mean comes from the sums of whole windows, or, with fewer than MANY windows, of
blocks of BLOCK tokens. Blocks of one window still depend on each other somewhat: an error that
comes from blocks is a lower bound.
"""
from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

PARTS = 4          # of a window, whose KL is told apart,
PART_TOKENS = 512  # if they have so many tokens each
MANY = 8           # windows; from so many on they are the clusters
BLOCK = 128        # tokens of a cluster where there are fewer windows


def clusters(windows: Sequence[np.ndarray]) -> List[np.ndarray]:
    """The tokens [n] of each window as clusters [n'], as the standard error goes by them."""
    if len(windows) >= MANY:
        return list(windows)
    return [w[at:at + BLOCK] for w in windows for at in range(0, len(w), BLOCK)]


def mean(windows: Sequence[np.ndarray]) -> Tuple[float, float]:
    """The mean over all tokens of all windows [n] each, and its standard error by clusters; NaN
    as the error of a single cluster."""
    every = clusters(windows)
    sums = np.array([c.sum(dtype=np.float64) for c in every])
    counts = np.array([len(c) for c in every], np.float64)
    total, n = counts.sum(), len(every)
    middle = sums.sum() / total
    if n < 2:
        return float(middle), float("nan")
    # The mean is a ratio of sums, so clusters may have different sizes.
    squares = ((sums - counts * middle) ** 2).sum() * n / (n - 1)
    return float(middle), float(np.sqrt(squares) / total)


def wilson(right: int, n: int) -> Tuple[float, float]:
    """Wilson's interval: between which shares the true one lies in 95 of 100 cases where `right` of
    n independent draws were right. It has a width at none and at all of them as well."""
    z = 1.959964
    p, wide = right / n, z * z / n
    middle, half = p + wide / 2, z * math.sqrt(p * (1 - p) / n + wide / (4 * n))
    return (max(0.0, (middle - half) / (1 + wide)) if right else 0.0,
            min(1.0, (middle + half) / (1 + wide)) if right < n else 1.0)


def summary(nll: Sequence[np.ndarray], gain: Sequence[np.ndarray], kl: Sequence[np.ndarray],
            same: Sequence[np.ndarray]) -> Dict[str, Any]:
    """What a table says of one cache, from arrays [tokens] of each window.

    nll   -log p of the token that came, with this cache
    gain  log p of it with this cache, less the reference's
    kl    KL divergence of the next token's distribution from the reference's, in nats
    same  whether the likeliest token is the reference's
    """
    tokens = sum(len(w) for w in nll)
    by_windows = len(nll) >= MANY
    loss, loss_error = mean(nll)
    gained, gain_error = mean(gain)
    divergence, kl_error = mean(kl)
    alike, same_error = mean([w.astype(np.float64) for w in same])
    every = np.concatenate(list(kl))
    return {
        "tokens": tokens, "windows": len(nll), "clusters": len(clusters(nll)),
        "errors_by": "windows" if by_windows else f"blocks of {BLOCK} tokens",
        "perplexity": float(np.exp(loss)), "nll": loss, "nll_error": loss_error,
        "gain": gained, "gain_error": gain_error,
        "kl": divergence, "kl_error": kl_error, "kl_99": float(np.quantile(every, 0.99)),
        "kl_max": float(every.max()), "same_top": alike, "same_top_error": same_error}


def by_place(kl: Sequence[np.ndarray]) -> List[Dict[str, Any]]:
    """The mean of the KL [tokens] of each window by the tokens' places, "first" to "last" counted
    from 1; empty where windows are too short to tell."""
    length = max(len(w) for w in kl)
    part = -(-length // PARTS)
    if min(len(w) for w in kl) < (PARTS - 1) * part + part // 2 or part < PART_TOKENS:
        return []
    made = []
    for at in range(0, length, part):
        middle, error = mean([w[at:at + part] for w in kl])
        made.append({"first": at + 1, "last": min(at + part, length), "kl": middle,
                     "kl_error": error})
    return made
