# SPDX-License-Identifier: Apache-2.0
"""Other quantized caches, as people have them today: transformers' QuantizedCache over quanto or
HQQ. Each of its updates dequantizes the whole cache, and attention runs in full precision."""
from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Tuple

import torch
import transformers

from .models import Models
from .sides import Side, tensors_of

BACKENDS = {"quanto": ("optimum-quanto", 0, (2, 4)), "hqq": ("hqq", 1, (2, 4, 8))}
# package, axis for K and V (transformers' documentation names these), bits
DEFAULT = "quanto4,quanto2,hqq4,hqq2"


def parse(name: str) -> Tuple[str, int]:
    """Backend and bits of a name such as quanto4."""
    found = re.fullmatch(r"([a-z]+)([0-9]+)", name)
    backend, bits = (found[1], int(found[2])) if found else ("", 0)
    if backend not in BACKENDS or bits not in BACKENDS[backend][2]:
        known = ", ".join(f"{b}{n}" for b, (_, _, all_bits) in BACKENDS.items() for n in all_bits)
        raise ValueError(f"{name!r} is no peer; known are {known}")
    return backend, bits


class Peer(Side):
    """Groups of 64, and the newest tokens, up to 128, in full: what transformers does unless it is
    told otherwise."""
    kind = "peer"

    def __init__(self, models: Models, name: str) -> None:
        super().__init__(models, name)
        self.backend, self.bits = parse(name)

    def make(self) -> Any:
        """A new cache; raises ImportError where the backend's package is missing."""
        package, axis, _ = BACKENDS[self.backend]
        try:
            return transformers.QuantizedCache(
                self.backend, self.models.reference.config.get_text_config(decoder=True),
                nbits=self.bits, axis_key=axis, axis_value=axis)
        except ImportError as error:
            raise ImportError(f"{package} is not installed: pip install {package} ({error})"
                              ) from None

    def in_full(self) -> int:
        """The tokens that wait to be quantized."""
        keys = getattr(self.cache.layers[0], "keys", None)
        return keys.shape[-2] if isinstance(keys, torch.Tensor) and keys.ndim == 4 else 0

    def nbytes(self) -> int:
        """Codes and scales, as they lie in memory, and the tokens that wait."""
        found: Dict[Tuple[int, int], int] = {}
        for layer in self.cache.layers:
            for tensor in self._held(layer):
                found[(tensor.data_ptr(), tensor.nbytes)] = tensor.nbytes
        return sum(found.values())

    @staticmethod
    def _held(layer: Any) -> Iterable[torch.Tensor]:
        names = ("keys", "values", "_quantized_keys", "_quantized_values")
        for name in names:
            yield from tensors_of(getattr(layer, name, None))
