# SPDX-License-Identifier: Apache-2.0
"""The tokens that all rows of bench-peers.py hold, and what attention to them is."""
import functools
import math

import numpy as np

MAX_LAYERS = 256  # of a session of kvq, and so of every row


class Data:
    """K and V, [tokens][kv_heads][head_dim], and the queries of one token, [q_heads][head_dim]:
    normal numbers, rounded to bfloat16, which float16 holds as well; as float32. All layers of a
    row hold the same values, in memory of their own."""

    def __init__(self, q_heads, kv_heads, head_dim, tokens):
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.tokens, self.scale = tokens, 1 / math.sqrt(head_dim)
        self.values = 2 * tokens * kv_heads * head_dim  # of a layer
        rng = np.random.default_rng(1)
        self.k, self.v, self.q = (rounded(rng.standard_normal((n, heads, head_dim), np.float32))
                                  for n, heads in ((tokens, kv_heads), (tokens, kv_heads),
                                                   (1, q_heads)))

    def layers(self, walk, nbytes):
        """So many of so many bytes that a walk over them reads `walk` bytes, or as many as there
        may be."""
        return min(-(-walk // nbytes), MAX_LAYERS)

    def by_heads(self):
        """K and V with each head's tokens in one piece, [kv_heads][tokens][head_dim]."""
        return tuple(np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (self.k, self.v))

    @functools.cached_property
    def exact(self):
        """Attention in double precision, [q_heads][head_dim]."""
        out = np.empty((self.q_heads, self.head_dim))
        group = self.q_heads // self.kv_heads
        for head in range(self.kv_heads):
            rows = slice(head * group, (head + 1) * group)
            logits = self.q[0, rows].astype(np.float64) @ self.k[:, head].T.astype(np.float64)
            logits *= self.scale
            weights = np.exp(logits - logits.max(1, keepdims=True))
            out[rows] = weights @ self.v[:, head].astype(np.float64)
            out[rows] /= weights.sum(1, keepdims=True)
        return out

    def error(self, out):
        """Of the query head that is off the most: the distance from `exact` over its length."""
        off = np.asarray(out, np.float64).reshape(self.exact.shape) - self.exact
        worst = np.linalg.norm(off, axis=1) / np.linalg.norm(self.exact, axis=1)
        return float(worst.max()) if np.isfinite(worst).all() else math.inf


def rounded(values):
    """To the nearest bfloat16, as float32."""
    words = values.view(np.uint32)
    words = words + 0x7fff + (words >> 16 & 1)
    return (words & np.uint32(0xffff0000)).view(np.float32)


def words16(values):
    """Of float32 values that bfloat16 holds, their bfloat16 as uint16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
