# SPDX-License-Identifier: Apache-2.0
"""Client of kvqd, the daemon that owns quantized KV caches. NumPy arrays in and out.

    import kvq
    with kvq.Client() as client, client.queue() as queue:
        layers = [kvq.Layer(q_heads=8, kv_heads=2, head_dim=128, repeat=4)]
        with client.session(layers, "oscar2") as session:
            with queue.step([session], tokens=1) as step:
                for layer in range(4):
                    out, lse = step.append_attend(layer, k, v, q)

Failures raise kvq.Error with .code (a kvq.Code) and .text.
"""
from __future__ import annotations

from typing import Tuple

import numpy as np
import numpy.typing as npt

from ._ffi import ENTRY, lib
from .buffers import BF16, F16, F32, Buffer
from .capture import Capture
from .client import Client, Layer, Session
from .errors import Code, Error, strerror, version
from .gpu import DeviceBuffer
from .hints import Floats
from .local import Bucket, Local, LocalStep
from .private import private_daemon, program
from .steps import Step
from .work import PAST_ONLY, Pages, Queue, Ticket, make_entries

__all__ = ["BF16", "Bucket", "Buffer", "Capture", "Client", "Code", "DeviceBuffer", "ENTRY",
           "Error", "F16", "F32", "Layer", "Local", "LocalStep", "PAST_ONLY", "Pages", "Queue",
           "Session", "Step", "Ticket", "make_entries", "merge_states", "private_daemon",
           "program", "strerror", "version"]


def merge_states(out_a: npt.ArrayLike, lse_a: npt.ArrayLike, out_b: npt.ArrayLike,
                 lse_b: npt.ArrayLike) -> Tuple[Floats, Floats]:
    """Merges two attentions over disjoint keys by their LSE (natural logarithms): out [..., dim]
    and lse [...], array-likes of any float dtype, computed in float32. Returns new (out, lse)."""
    arrays = [np.asarray(a, np.float32, order="C") for a in (out_a, lse_a, out_b, lse_b)]
    if arrays[0].shape != arrays[2].shape or arrays[1].shape != arrays[3].shape \
            or arrays[0].shape[:-1] != arrays[1].shape:
        raise ValueError(f"shapes {[a.shape for a in arrays]}: out [..., dim] and lse [...] of "
                         "both sides must agree")
    out, lse = np.empty_like(arrays[0]), np.empty_like(arrays[1])
    lib.kvq_merge_states(*(a.ctypes.data for a in arrays), out.ctypes.data, lse.ctypes.data,
                         lse.size, out.shape[-1])
    return out, lse
