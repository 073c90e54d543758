# SPDX-License-Identifier: Apache-2.0
"""Attention over keys and values at hand, in PyTorch: of a prompt's own tokens.

A prompt goes through here, and what was there before it is merged by LSE (kvq.merge_states does the
same).
"""
import torch
import torch.nn.functional as F

_BLOCK = 1 << 24  # logits of fp32 that are held at a time
_QUERIES = 192    # that share the mask of a window; more multiply what none of them sees
# What scaled_dot_product_attention calls on a CPU, and the log-sum-exp with it. Not of PyTorch's
# public interface: without it, or with soft-caps, logits are made here in fp32.
_FLASH = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def causal(query, key, value, scale, window=0, softcap=0.0, want_lse=True):
    """Queries [q_heads][n][dim] that stand behind all but the last n - 1 of the keys
    [kv_heads][tokens][dim]. Returns out [q_heads][n][dim] and its LSE, fp32 [q_heads][n]."""
    n, tokens = query.shape[1], key.shape[1]
    seen = min(window or tokens, tokens)
    if not softcap and n == tokens == seen:
        if not want_lse:
            return F.scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=True, scale=scale,
                enable_gqa=query.shape[0] != key.shape[0])[0], None
        if _FLASH:
            return _flash(query, key, value, scale, is_causal=True)
    flash = _FLASH and not softcap
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    step = _QUERIES if flash else max(_BLOCK // (query.shape[0] * tokens), 1)
    for at in range(0, n, step):
        end = min(at + step, n)
        first = tokens - n + at                     # the key at the block's first query
        low = max(first - seen + 1, 0)
        part = slice(low, tokens - n + end)
        unseen = _unseen(end - at, part.stop - low, first - low, seen)
        given = query[:, at:end], key[:, part], value[:, part], scale
        if flash:
            mask = torch.zeros(unseen.shape, dtype=query.dtype).masked_fill_(unseen, -torch.inf)
            out[:, at:end], lse[:, at:end] = _flash(*given, attn_mask=mask)
        else:
            out[:, at:end], lse[:, at:end] = _block(*given, unseen, softcap)
    return out, lse


def _unseen(n, tokens, first, seen):
    """Which keys each of n queries does not see: those behind it, the first query standing at key
    `first`, and all but the last `seen` before."""
    at = torch.arange(first, first + n)[:, None]
    keys = torch.arange(tokens)[None]
    return (keys > at) | (keys <= at - seen)


def _flash(query, key, value, scale, **how):
    """A batch of the query heads of each KV head, which all have the same K and V."""
    group = query.shape[0] // key.shape[0]
    grouped = query.reshape(key.shape[0], group, *query.shape[1:])
    key, value = (x[:, None].expand(-1, group, -1, -1) for x in (key, value))
    out, lse = _FLASH(grouped, key, value, scale=scale, **how)
    return out.reshape(query.shape), lse.reshape(query.shape[:2])


def _block(query, key, value, scale, unseen, softcap):
    """The same for few enough queries."""
    heads, n, dim = query.shape
    grouped = query.float().reshape(key.shape[0], -1, dim)
    logits = (grouped @ key.float().transpose(1, 2)).mul_(scale).view(heads, n, -1)
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    logits.masked_fill_(unseen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = logits.sub_(lse[..., None]).exp_()
    out = weights.view(key.shape[0], -1, key.shape[1]) @ value.float()
    return out.view(heads, n, dim).to(query.dtype), lse


def merge(out, lse, past, past_lse):
    """Two attentions over different keys, as one: out [..., dim] and lse [...]."""
    both = torch.logaddexp(lse, past_lse)
    own, other = (torch.exp(part - both)[..., None] for part in (lse, past_lse))
    return out.float() * own + past.float() * other, both
