# SPDX-License-Identifier: Apache-2.0
"""The attention function that transformers calls for each layer.

transformers does not hand it the cache: KvqLayer.update() tags the new K with itself.
"""
import torch

from .table import check_dropped, check_weights, refuse

# What models hand to their attention that does not change its result: the Q and K that come have
# their positions already, and the rest concerns what the model gives out.
HARMLESS = frozenset((
    "cache_position", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict",
    "token_type_ids", "tokenizer", "use_cache"))


def _check(query, dropout, asked):
    if torch.is_grad_enabled() and query.requires_grad:
        refuse("kvqd does not differentiate; generate(), or wrap the forward in torch.no_grad()")
    if dropout:
        refuse(f"dropout is {dropout}; kvqd attends without: call model.eval()")
    for name, value in asked.items():
        if value is not None and name not in HARMLESS:
            _check_keyword(name, value)


def _check_keyword(name, value):
    """One that is given, and not harmless."""
    if name == "output_attentions":
        check_weights(value)
    elif name == "is_causal":
        if not value:
            refuse("bidirectional attention is not served")
    elif name == "position_bias":
        refuse("a position bias added to the logits is not served")
    else:
        refuse(f"the model hands its attention the keyword {name!r}, which kvq does not know: it "
               "may change what is attended to; call the model without it")


def kvq_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                  sliding_window=None, softcap=None, s_aux=None, **asked):
    """Attention of one layer: (out [batch][columns][heads][dim], None)."""
    layer = getattr(key, "kvq_layer", None)
    if layer is None:
        check_dropped(getattr(module, "config", None), key.shape[2])
        refuse("attn_implementation=\"kvq\" attends to a KvqCache alone: pass "
               "past_key_values=kvq.transformers.KvqCache(model), or cache= from transformers 5.24 "
               "on (a static, quantized or paged cache is not served, nor use_cache=False, nor "
               "continuous batching, nor a model that attends to other keys than it gives its "
               "cache)")
    _check(query, dropout, asked)
    state, number = layer.state, layer.number
    state.table.check_module(number, module)
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            refuse(f"a mask of one's own with shape {tuple(attention_mask.shape)} is not served; "
                   "attention_mask can be [batch][tokens]")
        state.table.check_mask(number, getattr(attention_mask, "kvq_window", None))
        if not attention_mask.numel():
            attention_mask = None  # no pads
    out, lse = state.attend(number, query, key, value, attention_mask, scaling, sliding_window,
                            softcap, s_aux is not None)
    if s_aux is not None:  # a sink takes its part of the softmax, and has no value
        out = out * torch.sigmoid(lse - s_aux.float()).unsqueeze(-1).to(out.dtype)
    return out, None
