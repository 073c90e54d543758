# SPDX-License-Identifier: Apache-2.0
"""kvqd under Hugging Face transformers: an unmodified model whose KV cache lies in the daemon.

    import kvq.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvq")
    cache = kvq.transformers.KvqCache(model, "oscar4")
    model.generate(**inputs, past_key_values=cache)    # from transformers 5.24 on: cache=cache

or, where other people's code calls generate():

    kvq.transformers.attach(model, "oscar4")

Importing this package registers "kvq" as an attention implementation. docs/engines.md says which
models and modes of generation are served, and what is refused.
"""
try:
    import torch  # noqa: F401
    from transformers import AttentionInterface, AttentionMaskInterface
except ImportError as error:
    raise ImportError("kvq.transformers needs PyTorch and transformers 4.57 or newer "
                      f"(pip install 'kvq[transformers]'): {error}") from None

from .attention import kvq_attention
from .cache import KvqCache, cache_name
from .generate import attach, detach
from .masks import kvq_mask

__all__ = ["KvqCache", "attach", "cache_name", "detach"]

AttentionInterface.register("kvq", kvq_attention)
AttentionMaskInterface.register("kvq", kvq_mask)
