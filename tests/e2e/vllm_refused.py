# SPDX-License-Identifier: Apache-2.0
"""What kvq.vllm refuses when an engine starts, which is not needed for it; vllm_test.py runs
this."""
import os
import sys
import unittest
import unittest.mock
from types import SimpleNamespace

import kvq.vllm
from kvq.vllm import checks
from kvq.vllm.worker import Table


def config(**changes):
    """As much of vLLM's configuration as is looked at; changes by "part.name"."""
    made = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=kvq.vllm.CONNECTOR,
                                           kv_connector_extra_config={}),
        model_config=SimpleNamespace(use_mla=False, is_encoder_decoder=False,
                                     is_multimodal_model=False, enable_prompt_embeds=False,
                                     runner_type="generate"),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1,
                                        data_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=False, max_num_batched_tokens=2048,
                                         max_num_seqs=64),
        speculative_config=None, lora_config=None)
    for name, value in changes.items():
        *parts, last = name.split("__")
        part = made
        for p in parts:
            part = getattr(part, p)
        setattr(part, last, value)
    return made


LAYER = {"head_size": 64, "alibi_slopes": None, "sinks": None, "sliding_window": None,
         "kv_cache_dtype": "auto", "attn_type": "decoder", "kv_sharing_target_layer_name": None}


class Refused(unittest.TestCase):
    """Each with a sentence that names what was asked for."""

    def test_nothing_of_what_is_served(self):
        checks.check_config(config())
        checks.check_layer(LAYER)

    def test_configurations(self):
        for name, value, says in (
                ("kv_transfer_config", None, "kv_transfer_config"),
                ("kv_transfer_config__kv_connector", "Other", "kv_transfer_config"),
                ("cache_config__enable_prefix_caching", True, "enable_prefix_caching=False"),
                ("parallel_config__tensor_parallel_size", 2, "tensor_parallel_size=2"),
                ("parallel_config__pipeline_parallel_size", 2, "pipeline_parallel_size=2"),
                ("parallel_config__data_parallel_size", 2, "data_parallel_size=2"),
                ("speculative_config", object(), "speculative"),
                ("lora_config", object(), "LoRA"),
                ("model_config__use_mla", True, "MLA"),
                ("model_config__is_encoder_decoder", True, "encoder-decoder"),
                ("model_config__is_multimodal_model", True, "multimodal"),
                ("model_config__enable_prompt_embeds", True, "enable_prompt_embeds"),
                ("model_config__runner_type", "pooling", "pooling"),
                ("scheduler_config__async_scheduling", True, "async_scheduling"),
                ("scheduler_config__max_num_batched_tokens", 40000, "40000"),
                ("scheduler_config__max_num_seqs", 1025, "1025")):
            with self.subTest(name), self.assertRaisesRegex(NotImplementedError, says):
                checks.check_config(config(**{name: value}))

    def test_layers(self):
        for name, value, says in (
                ("head_size", 320, "320"), ("alibi_slopes", [1.0], "ALiBi"),
                ("sinks", object(), "sinks"), ("sliding_window", 4096, "4096"),
                ("kv_cache_dtype", "fp8", "'fp8'.* kv_cache_dtype=\"bfloat16\" .*checkpoint"),
                ("attn_type", "encoder_only", "encoder_only"),
                ("kv_sharing_target_layer_name", "l", "other layers")):
            with self.subTest(name), self.assertRaisesRegex(NotImplementedError, says):
                checks.check_layer({**LAYER, name: value})
        for dtype in ("auto", "float16", "bfloat16"):
            checks.check_layer({**LAYER, "kv_cache_dtype": dtype})

    def test_kinds_of_layers(self):
        """Only attention of vLLM's own class, by kvq, with keys and values of one size."""
        class Attention(SimpleNamespace):
            head_size_v = 64

        class Chunked(Attention):
            pass

        class Impl(SimpleNamespace):
            num_heads, num_kv_heads, head_size, scale, softcap = 4, 2, 64, 0.125, 0.0
        modules = {"vllm.model_executor.layers.attention": SimpleNamespace(Attention=Attention),
                   "vllm.model_executor.models.utils": SimpleNamespace(
                       extract_layer_index=lambda name: int(name[-1])),
                   "kvq.vllm.backend": SimpleNamespace(KvqImpl=Impl)}
        with unittest.mock.patch.dict(sys.modules, modules):
            for layer, says in (
                    (Attention(impl=Impl()), None), (Chunked(impl=Impl()), "layer.1, a Chunked"),
                    (None, "layer.1, a NoneType"),
                    (Attention(impl=SimpleNamespace()), "is SimpleNamespace: .* CPUs alone"),
                    (Attention(impl=Impl(), head_size_v=128), "64 dimensions and values of 128"),
                    (Attention(impl=Impl(num_heads=8)), "other numbers of heads")):
                made = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={
                    "layer.0": Attention(impl=Impl()), "layer.1": layer}))
                with self.subTest(says):
                    if says is None:
                        self.assertEqual(len(Table(made, ["layer.0", "layer.1"]).rows()), 2)
                        continue
                    with self.assertRaisesRegex(NotImplementedError, says):
                        Table(made, ["layer.0", "layer.1"])

    def test_options(self):
        made = config()
        made.kv_transfer_config.kv_connector_extra_config = {"format": "f16", "fromat": "f16"}
        with self.assertRaisesRegex(NotImplementedError, "fromat"):
            checks.options(made)
        for name, value, says in (("prefix", "false", "prefix='false'.* takes true or false"),
                                  ("prefix", 0, "prefix=0"),
                                  ("threads", "2", "an integer or \"torch\""),
                                  ("threads", True, "threads=True"), ("model", 7, "takes a text"),
                                  ("format", None, "format=None.* 'oscar4'")):
            made.kv_transfer_config.kv_connector_extra_config = {name: value}
            with self.assertRaisesRegex(NotImplementedError, says):
                checks.options(made)
        told = {"prefix": False, "threads": 2, "model": "mine", "namespace": None}
        made.kv_transfer_config.kv_connector_extra_config = told
        self.assertEqual({n: getattr(checks.options(made), n) for n in told}, told)
        told["threads"] = "torch"
        self.assertEqual(checks.options(made).threads, "torch")

    def test_unasked(self):
        """An installed plug-in changes nothing."""
        for value in (None, "", "0"):
            changed = {} if value is None else {"KVQ_VLLM": value}
            with unittest.mock.patch.dict(os.environ, changed):
                if value is None:
                    os.environ.pop("KVQ_VLLM", None)
                with unittest.mock.patch.dict(sys.modules, {"vllm": None}):  # cannot be imported
                    kvq.vllm.register()
