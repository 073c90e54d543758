# SPDX-License-Identifier: Apache-2.0
"""The attention backend: what vLLM calls for each layer of a forward.

vLLM's own pages are a stub: they count tokens for its scheduler and hold nothing. The metadata of a
forward says, for each request in it, its first page, by which the connector knows the request, and
how many tokens it has and gets.
"""
from dataclasses import dataclass, replace
from typing import Any, ClassVar, List

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.attention.backend import (AttentionBackend, AttentionImpl, AttentionMetadata,
                                       AttentionMetadataBuilder, AttentionType, MultipleOf)

from .checks import check_config, check_layer, refuse


@dataclass
class KvqMetadata(AttentionMetadata):
    """Of a forward; all layers share it."""
    pages: List[int]    # of each request, its first page
    starts: List[int]   # of each request, its first row; and their end
    lengths: List[int]  # of each request, with this forward's tokens
    step: Any = None    # under way, from the first layer to the last


class KvqMetadataBuilder(AttentionMetadataBuilder):
    """Reads the forward's batch once, for all layers."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        n = common.num_reqs
        if common.causal is not True:
            refuse("attention that is not causal", "kvqd's attention is causal",
                   "serve this model without KVQ_VLLM")
        return KvqMetadata(common.block_table_tensor[:n, 0].tolist(),
                           common.query_start_loc_cpu[:n + 1].tolist(),
                           common.seq_lens[:n].tolist())


class KvqImpl(AttentionImpl):
    """Of one layer."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes=None,
                 sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
                 attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None,
                 **other):
        if other:
            refuse(f"attention with {', '.join(sorted(other))}", "kvq does not know what it "
                   "changes", "serve this model without KVQ_VLLM")
        check_config(get_current_vllm_config())
        check_layer({"head_size": head_size, "alibi_slopes": alibi_slopes, "sinks": sinks,
                     "sliding_window": sliding_window, "kv_cache_dtype": kv_cache_dtype,
                     "attn_type": attn_type,
                     "kv_sharing_target_layer_name": kv_sharing_target_layer_name})
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.kv_cache_dtype = kv_cache_dtype
        self.scale = float(scale)
        self.softcap = float(logits_soft_cap or 0)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):
        """Attention of a layer, for rows [tokens][heads][dim], into `output`."""
        if attn_metadata is None:  # vLLM warms up: nobody's tokens
            return output.zero_()
        if output_scale is not None or output_block_scale is not None:
            refuse("attention whose output is quantized", "kvqd gives 16 or 32 bits",
                   "start without the fusion of attention and quantization")
        step = attn_metadata.step
        if step is None:
            if not has_kv_transfer_group():
                raise RuntimeError("kvq: a forward came without the connector")
            step = get_kv_transfer_group().begin(attn_metadata, key.dtype)
            attn_metadata.step = step
        step.attend(layer.layer_name, query, key, value, output)
        return output


class KvqBackend(AttentionBackend):
    """Stands in the place of vLLM's CPU_ATTN, and has its name, which vLLM looks up."""
    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name():
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls():
        return KvqImpl

    @staticmethod
    def get_builder_cls():
        return KvqMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec):
        """A page with one value for each token, instead of all K and V."""
        return replace(spec, num_head_slots=1, state_content_bytes=spec.dtype.itemsize)
