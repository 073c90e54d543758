# SPDX-License-Identifier: Apache-2.0
"""What tells weights apart, all of which is looked at: a change of a few rows of an embedding
changes the K of the tokens whose rows these are."""
from __future__ import annotations

from typing import Any

import numpy as np

PIECE = 1 << 22   # bytes that are summed at a time
_WORDS = 256      # of 8 bytes, that go into one sum
# Odd, and each another one: whatever one word is replaced by, the sum is another.
_FACTORS = np.arange(1, 2 * _WORDS, 2, dtype=np.uint64) * np.uint64(0x9e3779b97f4a7c15)


def sums(data: Any) -> bytes:
    """Of all bytes of an array of uint8, or of bytes, about 1 in 256: for each 2 KiB the sum,
    modulo 2^64, of its words of 8 bytes times factors, and the rest as it is. Upper bits count in
    lower places, too: a word's highest bit alone, the sign of a float, would count the same
    whatever the factor is, and two of them nothing. Nobody is kept from making other bytes with the
    same sums."""
    raw = np.frombuffer(data, np.uint8)
    whole = raw.nbytes // (8 * _WORDS) * (8 * _WORDS)
    words = raw[:whole].view(np.uint64).reshape(-1, _WORDS)
    mixed = words ^ (words >> np.uint64(29))
    return np.einsum("ij,j->i", mixed, _FACTORS).tobytes() + raw[whole:].tobytes()
