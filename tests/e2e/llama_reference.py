# SPDX-License-Identifier: Apache-2.0
"""Random models of a given family and shape, and their logits in float64 NumPy.

Written from the papers' formulas alone, with no code in common with kvq-run, so that the two can
be held against each other.
"""
import json
import math
import pathlib
import struct

import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16}


def to_bf16(values):
    """Rounds float32 to bfloat16 (to nearest even), as its 16 bits."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def store(values, dtype):
    """The bytes of a tensor in a file of that dtype, and the values a reader sees."""
    if dtype == "BF16":
        bits = to_bf16(values)
        return bits.tobytes(), from_bf16(bits).reshape(values.shape)
    rounded = values.astype(DTYPES[dtype])
    return rounded.tobytes(), rounded.astype(np.float32)


def write_safetensors(path, tensors, dtype):
    """Writes tensors (name to float32 array); returns what a reader sees."""
    header, body, seen = {}, b"", {}
    for name, values in tensors.items():
        data, seen[name] = store(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape),
                        "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)
    return seen


def random_tensors(config, bias, qk_norm, rng):
    """bias: of q, k and v; "all": of every projection."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,),
              "self_attn.q_proj.weight": (q, hidden), "self_attn.k_proj.weight": (kv, hidden),
              "self_attn.v_proj.weight": (kv, hidden), "self_attn.o_proj.weight": (hidden, q),
              "mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden),
              "mlp.down_proj.weight": (hidden, inner)}
    if bias:
        shapes |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,),
                   "self_attn.v_proj.bias": (kv,)}
    if bias == "all":
        shapes |= {"self_attn.o_proj.bias": (hidden,), "mlp.gate_proj.bias": (inner,),
                   "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    if qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config["head_dim"],),
                   "self_attn.k_norm.weight": (config["head_dim"],)}
    names = {f"model.layers.{i}.{n}": s for i in range(config["num_hidden_layers"])
             for n, s in shapes.items()}
    names |= {"model.embed_tokens.weight": (config["vocab_size"], hidden),
              "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = (config["vocab_size"], hidden)
    out = {}
    for name, shape in names.items():
        if "norm" in name:
            out[name] = (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
        else:
            scale = 1.5 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.3
            out[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
    return out


def make_model(folder, config, dtype="BF16", bias=False, qk_norm=False, shards=1, seed=1):
    """Writes a random model; returns its tensors as a reader sees them."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, bias, qk_norm, np.random.default_rng(seed))
    if shards == 1:
        return write_safetensors(folder / "model.safetensors", tensors, dtype)
    names, seen, weight_map = sorted(tensors), {}, {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n] for n in names[i::shards]}
        seen |= write_safetensors(folder / file, part, dtype)
        weight_map |= {n: file for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return seen


def rope_frequencies(config):
    dim, theta = config["head_dim"], config.get("rope_theta", 10000.0)
    freq = theta ** (-np.arange(0, dim, 2) / dim)
    scaling = config.get("rope_scaling") or {}
    kind, factor = scaling.get("rope_type"), scaling.get("factor", 1)
    if kind == "linear":
        return freq / factor, 1.0
    if kind == "llama3":
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        blend = np.clip((turns - low) / (high - low), 0, 1)
        return blend * freq + (1 - blend) * freq / factor, 1.0
    if kind == "yarn":
        length = scaling["original_max_position_embeddings"]
        pair = lambda turns: dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
        high = min(math.ceil(pair(scaling.get("beta_slow", 1))), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        return freq * (1 - ramp) + freq / factor * ramp, 0.1 * math.log(factor) + 1
    return freq, 1.0


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, freq, gain):
    angle = np.arange(x.shape[0])[:, None, None] * freq
    a, b = np.split(x, 2, -1)
    c, s = gain * np.cos(angle), gain * np.sin(angle)
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def attention(q, k, v, window):
    """q [tokens][heads][dim], k and v [tokens][kv_heads][dim]. One head at a time, as products of
    matrices."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    at = np.arange(tokens)
    hidden = at[None, :] > at[:, None]
    if window:
        hidden |= at[None, :] <= at[:, None] - window
    out = np.empty_like(q)
    for h in range(heads):
        logits = q[:, h] @ k[:, h // group].T / math.sqrt(dim)
        logits[hidden] = -np.inf
        p = np.exp(logits - logits.max(-1, keepdims=True))
        out[:, h] = p / p.sum(-1, keepdims=True) @ v[:, h // group]
    return out


def logits(config, tensors, ids):
    """Logits of every position, float64 [tokens][vocab]."""
    t = {n: v.astype(np.float64) for n, v in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    freq, gain = rope_frequencies(config)
    x = t["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        w = lambda n: t[f"model.layers.{i}.{n}"]
        project = lambda h, n: h @ w(f"{n}.weight").T + t.get(f"model.layers.{i}.{n}.bias", 0)
        h = rms_norm(x, w("input_layernorm.weight"), eps)
        q = project(h, "self_attn.q_proj").reshape(-1, heads, dim)
        k = project(h, "self_attn.k_proj").reshape(-1, kv_heads, dim)
        v = project(h, "self_attn.v_proj").reshape(-1, kv_heads, dim)
        if f"model.layers.{i}.self_attn.q_norm.weight" in t:
            q = rms_norm(q, w("self_attn.q_norm.weight"), eps)
            k = rms_norm(k, w("self_attn.k_norm.weight"), eps)
        uses_window = config.get("use_sliding_window", config["model_type"] == "mistral")
        window = config.get("sliding_window") if uses_window else None
        if window and i < config.get("max_window_layers", 0):
            window = None
        o = attention(rotate(q, freq, gain), rotate(k, freq, gain), v, window)
        x = x + project(o.reshape(len(ids), -1), "self_attn.o_proj")
        h = rms_norm(x, w("post_attention_layernorm.weight"), eps)
        gate = project(h, "mlp.gate_proj")
        inner = gate / (1 + np.exp(-gate)) * project(h, "mlp.up_proj")
        x = x + project(inner, "mlp.down_proj")
    head = t["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms_norm(x, t["model.norm.weight"], eps) @ head.T
