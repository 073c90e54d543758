# SPDX-License-Identifier: Apache-2.0
"""Caches to judge formats by, in the engine and in full precision but for what they are there for.

dropped     what oscar2 would pack is gone: a format that is worse than this harms
int2-token  what oscar2 would pack is rounded to 2 bits, the smallest value as zero, with one scale
            for each token and head, both in full precision: the simplest thing to do

The same controls as in kvq-bench quality.
"""
from __future__ import annotations

from typing import Any, Dict, Optional

import torch
import transformers

from .sides import Side

UNIT = 128  # tokens that oscar2 packs at once; it has no window besides


def packed_of(tokens: int) -> int:
    """How many of so many tokens are packed."""
    return tokens // UNIT * UNIT


class Dropped(Side):
    """Attends to the unit that is being filled, and to the forward's own tokens."""
    kind = "control"

    def hidden(self, tokens: int) -> Optional[torch.Tensor]:
        """A mask that hides what was packed before this forward."""
        mask = torch.ones(1, tokens, dtype=torch.long)
        mask[:, :packed_of(self.tokens)] = 0
        return mask

    def nbytes(self) -> int:
        """Of the tokens that are not gone, in 16 bits, as formats have theirs in full."""
        return self.models.values_at(self.in_full()) * 2

    def in_full(self) -> int:
        """The unit that is being filled."""
        return self.tokens - packed_of(self.tokens)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What [...][dim] becomes with 2 bits."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / 3
    codes = ((x - low) / torch.where(step > 0, step, torch.ones_like(step))).round()
    return low + step * codes


class _Int2Cache(transformers.DynamicCache):
    """What is packed at a forward's end is rounded before the next one."""

    def __init__(self):
        super().__init__()
        self.done: Dict[int, int] = {}

    def update(self, key_states, value_states, layer_idx, *rest, **options):
        if layer_idx < len(self.layers):
            layer = self.layers[layer_idx]
            first, end = self.done.get(layer_idx, 0), packed_of(layer.get_seq_length())
            if end > first:
                for kept in (layer.keys, layer.values):
                    kept[:, :, first:end] = rounded(kept[:, :, first:end].float()).to(kept.dtype)
                self.done[layer_idx] = end
        return super().update(key_states, value_states, layer_idx, *rest, **options)


class Int2(Side):
    """2 bits for each number, without anything that formats do to need no more."""
    kind = "control"

    def make(self) -> Any:
        """A cache of the engine that rounds."""
        return _Int2Cache()

    def in_full(self) -> int:
        """The unit that is being filled."""
        return self.tokens - packed_of(self.tokens)

    def sizes(self) -> Dict[str, Any]:
        """As if it were packed: 2 bits a number, and two numbers of 16 bits for each token and
        head."""
        bits = 2 + 32 / self.models.table.head_dim
        packed, full = self.tokens - self.in_full(), self.in_full()
        share = full / max(self.tokens, 1)
        mean = share * 16 + (1 - share) * bits
        return {"tokens": self.tokens, "bits": mean, "bits_packed": bits, "in_full": full,
                "bytes": round(self.models.values_at(self.tokens) * mean / 8) if packed or full
                else 0}


CONTROLS = {"dropped": Dropped, "int2-token": Int2}
