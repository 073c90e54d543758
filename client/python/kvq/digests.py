# SPDX-License-Identifier: Apache-2.0
"""What tells weights apart, all of which is looked at: a change of a few rows of an embedding
changes the K of the tokens whose rows these are."""
from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ._ffi import lib

PIECE = 1 << 22  # bytes that have a digest of their own, so that several threads can work
BYTES = 16


def digest(data: Any) -> bytes:
    """kvq_digest (client/kvq/prefix.h) of bytes, or of an array that lies in one piece. Python's
    other threads run meanwhile."""
    raw = np.frombuffer(data, np.uint8)
    found = ctypes.create_string_buffer(BYTES)
    lib.kvq_digest(raw.ctypes.data, raw.nbytes, found)
    return found.raw
