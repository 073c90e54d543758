# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-peers.py over PyTorch's scaled_dot_product_attention: TYPE[/grouped], of float32,
float16 or bfloat16. It gets a head's queries by enable_gqa, or with /grouped as tokens of one head,
which is the same where every query sees every token."""
import numpy as np
import torch

from data import words16
from peer import Peer, Row


def tensor(values, kind):
    """Of float32 values, in memory that NumPy asks huge pages for."""
    if kind == torch.bfloat16:
        return torch.from_numpy(words16(values)).view(kind)
    return torch.from_numpy(values.astype(np.float16 if kind == torch.float16 else np.float32))


class Cache(Row):
    """K and V of each layer."""
    layout = "each head's tokens in one piece"

    def __init__(self, worker, name, tokens):
        row, (name, _, how) = name, name.partition("/")
        kinds = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
        if name not in kinds or how not in ("", "grouped"):
            raise ValueError(f"{row!r} is no row; see --help")
        kind = kinds[name]
        self.bits = 8 * kind.itemsize
        self.layers = tokens.layers(worker.bytes, tokens.values * kind.itemsize)
        sides = tokens.by_heads()
        self.cache = [tuple(tensor(x, kind)[None] for x in sides) for _ in range(self.layers)]
        rows = (tokens.kv_heads, -1) if how == "grouped" else (tokens.q_heads, 1)
        self.q = tensor(tokens.q, kind).view(1, *rows, tokens.head_dim)
        self.options = {"enable_gqa": how != "grouped"}
        self.result = None

    def threads(self, number):
        """See peer.py."""
        torch.set_num_threads(number)

    def walk(self):
        """See peer.py."""
        attend = torch.nn.functional.scaled_dot_product_attention
        first = None
        for k, v in self.cache:
            result = attend(self.q, k, v, **self.options)
            first = result if first is None else first
        self.result = first

    def out(self):
        """See peer.py."""
        return self.result.float().numpy()

    def close(self):
        """See peer.py."""
        self.cache = None


class Torch(Peer):
    """Rows."""

    def __init__(self, threads):
        super().__init__(threads)
        torch.set_grad_enabled(False)
        self.what = f"torch {torch.__version__}"

    def make(self, name, tokens):
        return Cache(self, name, tokens)


make = Torch
