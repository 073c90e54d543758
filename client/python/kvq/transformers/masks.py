# SPDX-License-Identifier: Apache-2.0
"""The mask function: what transformers wants to hide, as the attention function needs it.

Causality and windows are the daemon's. What is left of a mask are pad tokens, told as a tensor
[batch][columns], False at pads; None if there are none. All other masks are refused here, before
anything is computed.
"""
from transformers.masking_utils import causal_mask_function

from .table import refuse


def _is_plain(function):
    """Whether a mask is causal, maybe with a sliding window: with no other rule."""
    if function is None or function is causal_mask_function:
        return True
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if len(parts) != 1 or not isinstance(parts[0], tuple) or len(parts[0]) != 2:
        return False
    window, causal = parts[0]
    return causal is causal_mask_function and "sliding_window_overlay" in window.__qualname__ \
        and function.__qualname__.startswith("and_masks.")


def kvq_mask(batch_size, kv_length, mask_function=None, attention_mask=None, **_):
    """Called by transformers once for each kind of mask in a forward."""
    if not _is_plain(mask_function):
        refuse("this forward has a mask that is neither causal nor a sliding window (packed "
               "sequences, bidirectional spans, chunked attention, or no KvqCache): such masks "
               "are not served")
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size:
        refuse(f"attention_mask has shape {tuple(attention_mask.shape)}; one number for each token "
               f"of the batch of {batch_size} is served")
    if attention_mask.shape[1] != kv_length:
        refuse(f"attention_mask has {attention_mask.shape[1]} columns, the cache and new tokens "
               f"{kv_length}: the mask is not of this cache, or the cache is no KvqCache, or a "
               "forward before this one was left early")
    return None if attention_mask.all() else attention_mask.bool()
