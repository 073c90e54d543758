# SPDX-License-Identifier: Apache-2.0
"""The byte-level Llama that kvq ships: configuration, forward pass, and its file format.

The weights are a plain dictionary from Hugging Face tensor names to tensors.  The conventions are
those of LlamaForCausalLM: RMSNorm, rotate-half RoPE, grouped-query attention, SwiGLU, tied head.
"""
import json
import os
import struct

import torch
import torch.nn.functional as F

BOS = 256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 257,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "use_cache": True,
}
BLOCK = 128  # query rows per step of the training attention


def shapes(cfg=None):
    """Tensor names and shapes, in the order of the file."""
    cfg = cfg or CONFIG
    d, ff, hd = cfg["hidden_size"], cfg["intermediate_size"], cfg["head_dim"]
    heads, kv = cfg["num_attention_heads"] * hd, cfg["num_key_value_heads"] * hd
    out = {"model.embed_tokens.weight": (cfg["vocab_size"], d)}
    for i in range(cfg["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = (d,)
        out[p + "self_attn.q_proj.weight"] = (heads, d)
        out[p + "self_attn.k_proj.weight"] = (kv, d)
        out[p + "self_attn.v_proj.weight"] = (kv, d)
        out[p + "self_attn.o_proj.weight"] = (d, heads)
        out[p + "post_attention_layernorm.weight"] = (d,)
        out[p + "mlp.gate_proj.weight"] = (ff, d)
        out[p + "mlp.up_proj.weight"] = (ff, d)
        out[p + "mlp.down_proj.weight"] = (d, ff)
    out["model.norm.weight"] = (d,)
    return out


def init(seed):
    """Random fp32 weights; the two projections into the residual stream start small."""
    gen = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        std = 0.05 if "embed" in name else 0.6 * shape[1] ** -0.5
        if "o_proj" in name or "down_proj" in name:
            std *= 0.3
        weights[name] = torch.randn(shape, generator=gen) * std
    return weights


def rope(length):
    """cos and sin, shape [length, 1, head_dim / 2], fp32."""
    half = CONFIG["head_dim"] // 2
    freq = CONFIG["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    return angle.cos().float()[:, None], angle.sin().float()[:, None]


def norm(x, weight):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
    return x * scale * weight


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def qkv(x, ln, wq, wk, wv, cos, sin):
    """Rotated queries and keys, and values, as [batch, length, heads, head_dim]."""
    h = norm(x, ln).to(wq.dtype)
    shape = (*h.shape[:2], -1, CONFIG["head_dim"])
    q, k, v = (F.linear(h, w).view(shape) for w in (wq, wk, wv))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def mlp(x, attended, wo, ln, gate, up, down):
    """The rest of a layer after attention; x is the fp32 residual stream."""
    x = x + F.linear(attended, wo).float()
    h = norm(x, ln).to(wo.dtype)
    return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down).float()


def head(x, ln, embed):
    return F.linear(norm(x, ln).to(embed.dtype), embed).float()


class BlockAttention(torch.autograd.Function):
    """Causal attention over blocks of query rows that recomputes the scores in the backward pass.

    Much faster on a CPU in bf16 than the stock kernel, because it is made of large matrix products
    and touches only the lower triangle.  q is [n, blocks, group * BLOCK, head_dim], already scaled;
    k and v are [n, length, head_dim], one row of n for each batch entry and KV head.
    """

    @staticmethod
    def scores(q, k, i):
        s = torch.bmm(q[:, i], k[:, : (i + 1) * BLOCK].transpose(1, 2))
        rows = torch.full((BLOCK, BLOCK), float("-inf"), dtype=s.dtype).triu_(1)
        s[:, :, i * BLOCK :] += rows.repeat(s.shape[1] // BLOCK, 1)
        return torch.softmax(s, -1)

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        for i in range(q.shape[1]):
            out[:, i] = torch.bmm(BlockAttention.scores(q, k, i), v[:, : (i + 1) * BLOCK])
        ctx.save_for_backward(q, k, v)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
        for i in range(q.shape[1]):
            end = (i + 1) * BLOCK
            p = BlockAttention.scores(q, k, i)
            dv[:, :end] += torch.bmm(p.transpose(1, 2), grad[:, i])
            dp = torch.bmm(grad[:, i], v[:, :end].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, i] = torch.bmm(ds, k[:, :end])
            dk[:, :end] += torch.bmm(ds.transpose(1, 2), q[:, i])
        return dq, dk.to(k.dtype), dv.to(v.dtype)


def block_attend(q, k, v):
    """The layout around BlockAttention; the length must be a multiple of BLOCK."""
    b, t, h, hd = q.shape
    kv, nb = k.shape[2], t // BLOCK
    q = (q * hd**-0.5).view(b, nb, BLOCK, kv, h // kv, hd).permute(0, 3, 1, 4, 2, 5)
    k, v = (x.transpose(1, 2).reshape(b * kv, t, hd) for x in (k, v))
    out = BlockAttention.apply(q.reshape(b * kv, nb, -1, hd), k, v)
    out = out.view(b, kv, nb, h // kv, BLOCK, hd).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(b, t, h * hd)


def attend(q, k, v, past=0):
    """Attention of the last rows of a sequence over all of it, for evaluation."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    mask = None
    if past:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril_(past)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(2)


def layer_weights(weights, i):
    p = f"model.layers.{i}."
    first = [p + "input_layernorm", *(p + f"self_attn.{c}_proj" for c in "qkv")]
    rest = [p + "self_attn.o_proj", p + "post_attention_layernorm"]
    rest += [p + f"mlp.{c}_proj" for c in ("gate", "up", "down")]
    return [weights[n + ".weight"] for n in first], [weights[n + ".weight"] for n in rest]


@torch.no_grad()
def forward(weights, ids, cache=None, keys=None):
    """fp32 logits of ids [batch, length].

    cache is a list that the caller keeps between calls (empty at first): K and V of each layer.
    If keys is a list, the rotated keys of each layer are appended to it.
    """
    past = cache[0][0].shape[1] if cache else 0
    cos, sin = (t[past:] for t in rope(past + ids.shape[1]))
    x = weights["model.embed_tokens.weight"][ids].float()
    for i in range(CONFIG["num_hidden_layers"]):
        first, rest = layer_weights(weights, i)
        q, k, v = qkv(x, *first, cos, sin)
        if cache is not None:
            if past:
                k, v = (torch.cat(pair, 1) for pair in zip(cache[i], (k, v)))
                cache[i] = (k, v)
            else:
                cache.append((k, v))
        if keys is not None:
            keys.append(k)
        x = mlp(x, attend(q, k, v, past), *rest)
    return head(x, weights["model.norm.weight"], weights["model.embed_tokens.weight"])


def save(weights, folder):
    """Writes config.json and model.safetensors (bf16) into folder."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="ascii") as f:
        json.dump(CONFIG, f, indent=2)
        f.write("\n")
    table, blobs, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name in shapes():
        tensor = weights[name].detach().to(torch.bfloat16).contiguous()
        blob = tensor.view(torch.uint16).numpy().astype("<u2").tobytes()
        shape = list(tensor.shape)
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # data starts on a multiple of 64 bytes
    with open(os.path.join(folder, "model.safetensors.new"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    os.replace(f.name, os.path.join(folder, "model.safetensors"))


def load(folder):
    """The weights of save(), as fp32."""
    with open(os.path.join(folder, "model.safetensors"), "rb") as f:
        (size,) = struct.unpack("<Q", f.read(8))
        table = json.loads(f.read(size))
        data = bytearray(f.read())
    weights = {}
    for name, shape in shapes().items():
        begin, end = table[name]["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.bfloat16)[begin // 2 : end // 2]
        weights[name] = flat.view(shape).float()
    return weights
