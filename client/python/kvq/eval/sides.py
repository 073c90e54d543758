# SPDX-License-Identifier: Apache-2.0
"""Caches that are measured, each with what runs a model over it: a format of kvq, or the engine's
own cache, which all are held against."""
from __future__ import annotations

import inspect
import time
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
import transformers

import kvq
from kvq.transformers import KvqCache, cache_name

from .models import Models

PATHS = ("exact", "fast")


class Side:
    """One row of the table. begin() makes an empty cache, forward() appends to it."""
    kind = "reference"
    path = "engine"

    def __init__(self, models: Models, name: str = "reference") -> None:
        self.models, self.name = models, name
        self.model = models.reference
        self.cache: Any = None
        self.seconds, self.forwards = 0.0, 0
        self.tokens = 0

    @property
    def key(self) -> str:
        """Tells sides apart: name and path."""
        return f"{self.name}/{self.path}"

    def make(self) -> Any:
        """A new cache, as generate() makes it: layers with a sliding window hold no more."""
        config = self.models.reference.config.get_text_config(decoder=True)
        return transformers.DynamicCache(config=config)

    def begin(self) -> None:
        """Begins with an empty cache."""
        self.end()
        self.cache, self.seconds, self.forwards, self.tokens = self.make(), 0.0, 0, 0

    def end(self) -> None:
        """Gives the cache back."""
        self.cache = None

    def hidden(self, tokens: int) -> Optional[torch.Tensor]:
        """None, or the mask [1][tokens] of what a forward that ends at so many tokens may see."""

    def forward(self, ids: torch.Tensor, last: Optional[int] = None) -> torch.Tensor:
        """Appends ids [n]; logits [n][vocabulary], or of the last tokens alone."""
        more: Dict[str, Any] = {cache_name(self.model): self.cache}
        mask = self.hidden(self.tokens + len(ids))
        if mask is not None:
            more["attention_mask"] = mask
        if last is not None and _takes_logits_to_keep(self.model):
            more["logits_to_keep"] = last
        began = time.perf_counter()
        out = self.model(ids[None], use_cache=True, **more).logits[0]
        self.seconds += time.perf_counter() - began
        self.forwards += 1
        self.tokens += len(ids)
        return out if last is None else out[-last:]

    def nbytes(self) -> int:
        """Bytes of the cache as it is now."""
        return sum(t.nbytes for layer in self.cache.layers for t in tensors_of(vars(layer)))

    def in_full(self) -> int:
        """The newest tokens that have their K and V as the model made them."""
        return self.tokens

    def sizes(self) -> Dict[str, Any]:
        """What the cache takes as it is now: bytes, and bits for each number that is held."""
        nbytes = self.nbytes()
        return {"tokens": self.tokens, "bytes": nbytes,
                "bits": 8 * nbytes / self.models.values_at(self.tokens),
                "in_full": self.in_full()}


def tensors_of(thing: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors that something holds, those inside of tensors of another kind as well."""
    if isinstance(thing, torch.Tensor):
        names = thing.__tensor_flatten__()[0] if hasattr(thing, "__tensor_flatten__") else ()
        if not names:
            yield thing
        for name in names:
            yield from tensors_of(getattr(thing, name), depth - 1)
    elif depth and isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, depth - 1)
    elif depth and isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_of(value, depth - 1)


def _takes_logits_to_keep(model):
    return "logits_to_keep" in inspect.signature(model.forward).parameters


class Format(Side):
    """A format of kvq, its attention in kvqd, exact or fast."""
    kind = "format"

    def __init__(self, models: Models, name: str, path: str,
                 client: Optional[kvq.Client] = None) -> None:
        super().__init__(models, name)
        self.path, self.client = path, client
        self.model = models.over_kvq

    def make(self) -> KvqCache:
        """A new cache; nothing can be taken back, so that only the format's window is in full."""
        return KvqCache(self.model, self.name, client=self.client, attention=self.path,
                        max_rollback=0)

    def end(self) -> None:
        """Gives the session back."""
        if self.cache is not None:
            self.cache.close()
        self.cache = None

    def info(self) -> Dict[str, Any]:
        """What the daemon says of the session."""
        return self.cache.sessions[0].info()

    def nbytes(self) -> int:
        """Bytes of the session: what is packed, and its window."""
        info = self.info()
        return info["packed_bytes"] + info["window_bytes"]

    def in_full(self) -> int:
        """Of the layer that has the most."""
        return min(self.info()["full_precision_tokens"], self.tokens)

    def sizes(self) -> Dict[str, Any]:
        """With what the daemon says of a packed number, and the path that it took."""
        info = self.info()
        return {**super().sizes(), "bits_packed": info["bits_per_value"],
                "attention": info["attention"], "isa": info["isa"]}


def parse_format(text: str, path: str) -> Tuple[str, str]:
    """A format and its path: NAME, or NAME/fast or NAME/exact."""
    name, slash, own = text.partition("/")
    if not name or (slash and own not in PATHS):
        raise ValueError(f"{text!r} is no format; say NAME, NAME/exact or NAME/fast")
    return name, own or path
