# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values at hand, in PyTorch: of a prompt's own tokens.

A prompt goes through here, and what was there before it is merged by LSE (kvq.merge_states does the
same).
"""
import torch
import torch.nn.functional as F

_BLOCK = 1 << 24  # logits of fp32 that are held at a time


def causal(query, key, value, scale, window=0, softcap=0.0, want_lse=True):
    """Queries [q_heads][n][dim] that stand behind all but the last n - 1 of the keys
    [kv_heads][tokens][dim]. Returns out [q_heads][n][dim] and its LSE, fp32 [q_heads][n]."""
    n, tokens = query.shape[1], key.shape[1]
    seen = min(window or tokens, tokens)
    if not softcap and not want_lse and n == tokens and seen == tokens:
        return F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale,
            enable_gqa=query.shape[0] != key.shape[0])[0], None
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    step = max(_BLOCK // (query.shape[0] * tokens), 1)
    for at in range(0, n, step):
        end = min(at + step, n)
        first = tokens - n + at                     # the key at the block's first query
        low = max(first - seen + 1, 0)
        high = tokens - n + end
        part = slice(low, high)
        out[:, at:end], lse[:, at:end] = _block(query[:, at:end], key[:, part], value[:, part],
                                                first - low, scale, seen, softcap)
    return out, lse


def _block(query, key, value, first, scale, seen, softcap):
    """The same for few enough queries; the first of them stands at key `first`."""
    heads, n, dim = query.shape
    grouped = query.float().reshape(key.shape[0], -1, dim)
    logits = (grouped @ key.float().transpose(1, 2)).mul_(scale).view(heads, n, -1)
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    at = torch.arange(first, first + n)[:, None]
    keys = torch.arange(key.shape[1])[None]
    logits.masked_fill_((keys > at) | (keys <= at - seen), -torch.inf)
    lse = logits.logsumexp(-1)
    weights = logits.sub_(lse[..., None]).exp_()
    out = weights.view(key.shape[0], -1, key.shape[1]) @ value.float()
    return out.view(heads, n, dim).to(query.dtype), lse


def merge(out, lse, past, past_lse):
    """Two attentions over different keys, as one: out [..., dim] and lse [...]."""
    both = torch.logaddexp(lse, past_lse)
    own, other = (torch.exp(part - both)[..., None] for part in (lse, past_lse))
    return out.float() * own + past.float() * other, both
