# SPDX-License-Identifier: Apache-2.0
"""A capture of a model's keys, values and queries: what kvq-codebook makes codebooks of, and
kvq-bench quality measures formats on. docs/captures.md has the file."""
from __future__ import annotations

from ctypes import byref
from typing import Any, List, Sequence

import torch

import kvq
from kvq._ffi import lib
from kvq.errors import check
from kvq.transformers import KvqCache, cache_name
from kvq.plugin import NEAR_ROWS

from .models import Models
from .score import say


def _watch(cache: Any, capture: kvq.Capture) -> None:
    """Has every attention of the cache's steps written down. A step of few tokens has its K, V and
    Q in buffers, with the work and the entries that a capture takes."""
    rows = cache.state.rows
    ask = rows._ask

    def asks(step: Any, layer: int) -> None:
        ask(step, layer)
        check(lib.kvq_capture_append(capture.pointer, byref(step.desk.work[layer]), step.pointer,
                                     len(step.rows)))
    rows._ask = asks


def write(models: Models, windows: Sequence[List[int]], step: int, path: str,
          client: kvq.Client) -> int:
    """Writes K, V and Q of windows of ids, each a sequence of its own, as the model hands them over
    with a cache of 16 bits. Returns the number of tokens."""
    step = min(step, NEAR_ROWS)
    with kvq.Capture(path, models.table.rows(), f"{models.name} {models.id}", queries=True
                     ) as capture:
        for number, ids in enumerate(windows):
            say(f"capture: window {number + 1} of {len(windows)}")
            with KvqCache(models.over_kvq, "16bit", client=client, max_rollback=0) as cache:
                _watch(cache, capture)
                given, named = torch.tensor([ids]), {cache_name(models.over_kvq): cache}
                for at in range(0, len(ids), step):
                    models.over_kvq(given[:, at:at + step], **named)
        return capture.tokens
