# SPDX-License-Identifier: Apache-2.0
"""The mask function: what transformers wants to hide, as the attention function needs it.

Causality and windows are the daemon's. What is left of a mask are pad tokens, told as a tensor
[batch][columns], False at pads; one without elements if there are none. The tensor's kvq_window is
the window of the mask, 0 for none: the attention function holds it against the layer's. All other
masks are refused here, before anything is computed.
"""
from __future__ import annotations

from typing import Dict

import torch
from transformers.masking_utils import causal_mask_function

from .table import check_dropped, refuse

# What forwards of a decoder are given that does not change what K its tokens have.
_BY_IDS = frozenset((
    "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "cache_position",
    "logits_to_keep", "num_items_in_batch"))

_no_pads: Dict[int, torch.Tensor] = {}  # by window


def _window(function):
    """The window of a mask that is causal, maybe with a sliding window, 0 for none; None for one
    with another rule."""
    if function is None or function is causal_mask_function:
        return 0
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if len(parts) != 1 or not isinstance(parts[0], tuple) or len(parts[0]) != 2 \
            or not function.__qualname__.startswith("and_masks."):
        return None
    overlay, causal = parts[0]
    if causal is not causal_mask_function or "sliding_window_overlay" not in overlay.__qualname__:
        return None
    (window,) = overlay.__closure__
    return int(window.cell_contents)


def kvq_mask(batch_size, kv_length, mask_function=None, attention_mask=None, config=None, **_):
    """Called by transformers once for each kind of mask in a forward."""
    window = _window(mask_function)
    if window is None:
        refuse("this forward has a mask that is neither causal nor a sliding window (packed "
               "sequences, bidirectional spans, chunked attention, or no KvqCache): such masks "
               "are not served")
    if attention_mask is None:
        return _without_pads(window)
    if getattr(attention_mask, "kvq_window", None) == window:
        return attention_mask  # generate() has had it made before the forward
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size:
        refuse(f"attention_mask has shape {tuple(attention_mask.shape)}; one number for each token "
               f"of the batch of {batch_size} is served")
    if attention_mask.shape[1] != kv_length:
        check_dropped(config, attention_mask.shape[1])
        refuse(f"attention_mask has {attention_mask.shape[1]} columns, the cache and new tokens "
               f"{kv_length}: the mask is not of this cache, or the cache is no KvqCache, or a "
               "forward before this one was left early")
    if attention_mask.all():
        return _without_pads(window)
    mask = attention_mask != 0  # a copy, since the tag is this mask's alone
    mask.kvq_window = window
    return mask


def _without_pads(window):
    if window not in _no_pads:
        mask = torch.empty(0, 0, dtype=torch.bool)
        mask.kvq_window = window
        _no_pads[window] = mask
    return _no_pads[window]


def _one_of(mask):
    """A mask, or one of a dict with one for each kind of layer, whose pads are the same."""
    return next(iter(mask.values()), None) if isinstance(mask, dict) else mask


def check_places(places, seen):
    """Refuses a cache_position [columns] that does not begin behind the cache's `seen` columns:
    transformers 4 rotates K by it where no position_ids come, and masks go by it."""
    if isinstance(places, torch.Tensor) and places.ndim == 1 and places.numel() \
            and not torch.equal(places.cpu(), torch.arange(seen, seen + len(places))):
        refuse(f"cache_position goes from {int(places[0])} to {int(places[-1])}, and this cache "
               f"has {seen} columns: new ones come behind them; leave cache_position out, or "
               f"give torch.arange({seen}, {seen + len(places)})")


def check_positions(positions, attention_mask):
    """Refuses positions [rows][columns] that begin anew within a row: several sequences in one,
    each of which is to see itself alone."""
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] < 2:
        return
    rows, attention_mask = positions, _one_of(attention_mask)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 \
            and attention_mask.shape[1] >= positions.shape[1]:  # pads have any position
        shown = attention_mask[:, -positions.shape[1]:] != 0
        if not shown.all():
            rows = [of[keep] for of, keep in zip(positions.expand(len(shown), -1), shown)]
    for i, row in enumerate(rows):
        again = (row[1:] <= row[:-1]).nonzero()
        if len(again):
            at = int(again[0])
            refuse(f"position_ids of row {i} go from {int(row[at])} to {int(row[at + 1])}: packed "
                   "sequences, which would see each other; give each a row of its own")


def check_goes_on(name, seen, positions, attention_mask):
    """Refuses positions [1][columns] without pads that do not begin behind the tokens which the
    cache, of a session of that name or of none, has: generate() appends a prompt of no more tokens
    than these again, and assisted decoding of transformers 5.24 any prompt."""
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or not positions.numel():
        return
    masks = attention_mask.values() if isinstance(attention_mask, dict) else [attention_mask]
    if any(isinstance(mask, torch.Tensor) and not mask.all() for mask in masks):
        return
    first = int(positions[0, 0])
    if first != seen:
        what = f"the session {name!r}" if name else "this cache, which was made with a prefix,"
        refuse(f"{what} has {seen} tokens, and by its position_ids this forward has "
               f"those from {first} to {first + positions.shape[1]}: give the ids of all the "
               f"session's tokens and new ones behind them, more than {seen}; or crop() or reset() "
               "the cache first. Assisted decoding and prompt lookup may hand over the whole "
               "prompt, whatever the cache has: give them one without name and prefix")


def tensors_besides(given, known):
    """The first of a call's arguments that holds tensors, as a dict may, and is not known; None."""
    for name, value in given.items():
        parts = value.values() if isinstance(value, dict) else [value]
        if name not in known and any(isinstance(part, (torch.Tensor, dict)) for part in parts):
            return name
    return None


def beside_ids(given, tokens, seen):
    """Why a forward's tokens may have another K than their ids [rows][columns] say in the places
    behind `tokens` of each row and `seen` columns; None: they have that."""
    name = tensors_besides(given, _BY_IDS)
    if name:
        return f"this forward came with {name} beside its ids"
    ids, mask, positions = (given.get(n) for n in ("input_ids", "attention_mask", "position_ids"))
    columns = ids.shape[1]
    if positions is None:
        positions = torch.arange(seen, seen + columns)[None]
    mask = _one_of(mask)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.numel():
        shown = mask[:, -columns:] != 0
    else:
        shown = torch.ones_like(ids, dtype=torch.bool)
    if positions.ndim != 2 or any(
            bool((of[keep] != torch.arange(first, first + int(keep.sum()))).any())
            for of, keep, first in zip(positions.expand(len(ids), -1), shown, tokens)):
        return "this forward's tokens have other positions than those that they come in"
    return None
