# SPDX-License-Identifier: Apache-2.0
"""Whole decode steps of 8B models with random bf16 weights, as one captured graph: PyTorch's flash
attention over 16-bit caches against the kernels over packed ones, all else alike.

A step embeds one token of each session, and for each layer normalizes, projects, rotates, attends,
projects back and runs the MLP; then the head's largest logit. With the kernels it also stores the
new K and V; packing comes once in 128 steps and is added as its 128th part."""
import gc

import rig as rigs

MODELS = {
    "qwen3": {"hidden": 4096, "layers": 36, "mlp": 12288, "vocabulary": 151936},
    "llama3": {"hidden": 4096, "layers": 32, "mlp": 14336, "vocabulary": 128256},
}
TINY = {"hidden": 256, "layers": 2, "mlp": 384, "vocabulary": 500}
Q_HEADS, KV_HEADS, DIM = 32, 8, 128
PAPERS = {  # what stands in the papers, on their machines
    ("qwen3", "1 x 128K", "oscar2"): "OScaR: 92.9 to 30.9 ms, 3.0 times (H20)",
    ("qwen3", "48 x 4K", "oscar2"): "OScaR: 4.1 times the tokens a second at batch 48 (H20)",
    ("llama3", "1 x 192K", "vecinfer-2"): "VecInfer: 8.3 times at 196K (H100)",
}
FORMATS = ("oscar2", "vecinfer-2")
LENGTHS = {"1 x 1K": (1, 1024), "1 x 4K": (1, 4096), "1 x 32K": (1, 32768),
           "1 x 128K": (1, 131072), "1 x 192K": (1, 196608), "48 x 4K": (48, 4096)}
TINY_LENGTHS = {"1 x 300": (1, 300), "2 x 140": (2, 140)}
RESERVE = 6 << 30  # bytes left for graphs and activations


class Model:
    """Weights, and a step whose attention is a function of (layer, q, k, v)."""

    def __init__(self, lab, shape):
        self.torch, self.lab, self.shape = lab.torch, lab, shape
        hidden, mlp = shape["hidden"], shape["mlp"]
        self.layers = [{"qkv": self.weight((Q_HEADS + 2 * KV_HEADS) * DIM, hidden),
                        "out": self.weight(hidden, Q_HEADS * DIM),
                        "up": self.weight(2 * mlp, hidden), "down": self.weight(hidden, mlp)}
                       for _ in range(shape["layers"])]
        self.head = self.weight(shape["vocabulary"], hidden)
        angles = self.torch.rand(DIM // 2, device=self.head.device)
        self.turn = (angles.cos().to(lab.dtype), angles.sin().to(lab.dtype))

    def weight(self, rows, columns):
        return self.lab.normal(rows, columns) * columns ** -0.5

    def rotate(self, x):
        a, b = x[..., :DIM // 2], x[..., DIM // 2:]
        cos, sin = self.turn
        return self.torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def norm(self, x):
        return self.torch.nn.functional.rms_norm(x, x.shape[-1:])

    def step(self, tokens, attention):
        x = self.head[tokens]
        for i, w in enumerate(self.layers):
            qkv = (self.norm(x) @ w["qkv"].T).view(len(tokens), -1, DIM)
            q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
            out = attention(i, self.rotate(self.norm(q)), self.rotate(self.norm(k)), v)
            x = x + out.reshape(len(tokens), -1) @ w["out"].T
            gate, up = (self.norm(x) @ w["up"].T).chunk(2, -1)
            x = x + (self.torch.nn.functional.silu(gate) * up) @ w["down"].T
        return (self.norm(x) @ self.head.T).argmax(-1)


class Flash:
    """PyTorch's flash attention; the new token is written behind the cache first."""

    def __init__(self, lab, layers, sessions, tokens):
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention
        self.backend, self.kernel = SDPBackend.FLASH_ATTENTION, sdpa_kernel
        self.sdpa = scaled_dot_product_attention
        self.kv = [[lab.normal(sessions, KV_HEADS, tokens + 1, DIM) for _ in range(2)]
                   for _ in range(layers)]

    def __call__(self, layer, q, k, v):
        cache_k, cache_v = self.kv[layer]
        cache_k[:, :, -1], cache_v[:, :, -1] = k, v
        with self.kernel(self.backend):
            return self.sdpa(q[:, :, None], cache_k, cache_v, enable_gqa=True)

    def after(self):
        pass

    def free(self):
        self.kv = None


class Kernels:
    """Our kernels; the new token is the fresh tail."""

    def __init__(self, lab, form, layers, sessions, tokens):
        self.lab = lab
        self.cache = rigs.Cache(lab.rig, form, [tokens] * sessions, layers=layers,
                                q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype=rigs.BF16)
        self.q, self.out = ([lab.empty(sessions, Q_HEADS, DIM) for _ in range(layers)]
                            for _ in range(2))
        self.k, self.v = ([lab.empty(sessions, KV_HEADS, DIM) for _ in range(layers)]
                          for _ in range(2))
        for i in range(layers):
            self.cache.bind(i, lab.at(self.q[i]), lab.at(self.out[i]), dtype=lab.code,
                            fresh=(lab.at(self.k[i]), lab.at(self.v[i]), 1))

    def __call__(self, layer, q, k, v):
        self.q[layer].copy_(q)
        self.k[layer].copy_(k)
        self.v[layer].copy_(v)
        self.cache.attend(layer, self.lab.now())
        return self.out[layer]

    def after(self):
        self.cache.store(self.lab.now())

    def free(self):
        self.cache.free()


def time_step(lab, model, attention, sessions):
    tokens = lab.torch.zeros(sessions, dtype=lab.torch.long, device=model.head.device)

    def call():
        model.step(tokens, attention)
        attention.after()
    row = {"ms": min(lab.time([call], 20)) / 1e3}
    if isinstance(attention, Kernels):
        row["packing_ms"] = min(lab.time([lambda: attention.cache.pack(lab.now())], 5)) / 1e3 / 128
        row["ms"] += row["packing_ms"]
    row["tokens_a_second"] = 1e3 * sessions / row["ms"]
    attention.free()
    gc.collect()
    lab.clear()
    return row


def attention_of(lab, name, layers, sessions, tokens):
    if name == "SDPA flash":
        return Flash(lab, layers, sessions, tokens)
    return Kernels(lab, name, layers, sessions, tokens)


def steps(name, lab, rows):
    """Milliseconds of a step of one model, {point: {attention: row}}."""
    if not lab.torch:
        return
    model = Model(lab, MODELS[name] if lab.timed else TINY)
    for point, (sessions, tokens) in (LENGTHS if lab.timed else TINY_LENGTHS).items():
        for way in ("SDPA flash", *FORMATS):
            rows.measure([point, way], lambda: time_step(
                lab, model, attention_of(lab, way, model.shape["layers"], sessions, tokens),
                sessions))
        for way, row in rows(point).items():
            row["vs_sdpa"] = rows(point)["SDPA flash"]["ms"] / row["ms"]
            if (name, point, way) in PAPERS:
                row["paper"] = PAPERS[name, point, way]
        rows.save()


def batches(name, lab, rows):
    """The largest batch of sessions of 4K tokens that fits, and a step of it."""
    if not lab.torch:
        return
    tokens = 4096 if lab.timed else 300
    model = Model(lab, MODELS[name] if lab.timed else TINY)
    free = lab.free_bytes() - RESERVE

    def measure(way):
        each = 4 * KV_HEADS * (tokens + 1) * DIM
        if way != "SDPA flash":
            with rigs.Cache(lab.rig, way, [tokens], dtype=rigs.BF16) as one:
                each = one.bytes() + 4 * KV_HEADS * DIM * 128  # and a window not quite full
        fit = int(free / (each * model.shape["layers"]))
        sessions = min(fit, 2048) if lab.timed else 2
        attention = attention_of(lab, way, model.shape["layers"], sessions, tokens)
        return {"sessions": sessions, **time_step(lab, model, attention, sessions)}
    for way in ("SDPA flash", *FORMATS):
        rows.measure([way], lambda: measure(way))
