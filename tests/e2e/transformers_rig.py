# SPDX-License-Identifier: Apache-2.0
"""Models of all families with random weights, each with eager attention and with kvq's, and what
tests do with both. Importing this ends the program well where PyTorch or transformers is missing.
"""
import copy
import sys

from e2e_rig import Test

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"kvq.transformers is not tested: {missing}")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

from kvq.transformers import KvqCache  # noqa: E402

TIE = 0.02    # tokens whose logits, from -3 to 3, are as near may change places: the cache is f16
NEAR = 5e-3   # between logits over an f16 cache and eager's over keys and values rounded alike
WINDOW = 16   # of layers with a sliding window

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256,
         "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": None,
         "pad_token_id": 0, "initializer_range": 0.08}
FAMILIES = {  # the class of the configuration, and what differs from SIZES
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"hidden_size": 256, "head_dim": None}),
    "qwen2_window": ("Qwen2Config", {"hidden_size": 256, "head_dim": None, "max_window_layers": 1,
                                     "use_sliding_window": True, "sliding_window": WINDOW}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "query_pre_attn_scalar": 48,
                                "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "query_pre_attn_scalar": 48,
                                    "head_dim": 256, "sliding_window_pattern": 2}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": WINDOW, "num_local_experts": 4,
                                 "num_experts_per_tok": 2}),
    "smollm3": ("SmolLM3Config", {}),
    "phi3": ("Phi3Config", {"hidden_size": 256, "head_dim": None, "sliding_window": WINDOW}),
    "phi3_mini": ("Phi3Config", {"hidden_size": 384, "head_dim": None,     # heads of 96 dimensions
                                 "initializer_range": 0.05}),
    "phi": ("PhiConfig", {"hidden_size": 320, "head_dim": None}),          # of 80
    "gemma_small": ("Gemma3TextConfig", {"sliding_window": WINDOW, "head_dim": 48,
                                         "query_pre_attn_scalar": 48,
                                         "sliding_window_pattern": 2}),
    "exaone4": ("Exaone4Config", {"sliding_window": WINDOW, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}),
    "gpt_neox": ("GPTNeoXConfig", {"hidden_size": 256, "head_dim": None,
                                   "num_key_value_heads": None}),
}


def config_of(family):
    name, changes = FAMILIES[family]
    sizes = {n: v for n, v in {**SIZES, **changes}.items() if v is not None or n == "eos_token_id"}
    return getattr(transformers, name)(**sizes)


_models = {}


def models(family, dtype=torch.float32):
    """The same model twice: with eager attention, and with kvq's."""
    if (family, dtype) not in _models:
        torch.manual_seed(1)
        made = []
        for kind in ("eager", "kvq"):
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config_of(family)), attn_implementation=kind)
            made.append(model.eval())
        for name, tensor in made[0].named_parameters():  # sinks and norms are made as 0 or 1
            if tensor.ndim == 1:
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
                tensor.data -= int(family.startswith("gemma"))  # whose norms add 1 to it
        made[1].load_state_dict(made[0].state_dict())
        if dtype != torch.float32:  # not .to(): that would cast RoPE's frequencies
            made = [_with_dtype(m, dtype) for m in made]
        _models[family, dtype] = made
    return _models[family, dtype]


def _with_dtype(model, dtype):
    for tensor in model.parameters():
        tensor.data = tensor.data.to(dtype)
    model.config.dtype = dtype
    return model


class Rounded(transformers.DynamicCache):
    """Keys and values as a session of f16 stores them."""

    def update(self, key_states, value_states, *rest, **options):
        return super().update(key_states.half().float(), value_states.half().float(), *rest,
                              **options)


def prompt(n, seed=0, rows=1):
    torch.manual_seed(seed)
    return torch.randint(3, 256, (rows, n))


class Case(Test):
    """Tests with models."""

    def setUp(self):
        super().setUp()
        torch.set_grad_enabled(False)

    def cache(self, model, format="16bit", **options):
        return KvqCache(model, format, client=self.client, **options)

    def same_tokens(self, eager, want, got, mask=None):
        """Equal; or, where they part for the first time, a tie of eager's."""
        self.assertEqual(want.shape, got.shape)
        for row in range(len(want)):
            different = (want[row] != got[row]).nonzero()
            if not len(different):
                continue
            at = int(different[0])
            given = None if mask is None else torch.nn.functional.pad(
                mask[row:row + 1], (0, at - mask.shape[1]), value=1)
            logits = eager(want[row:row + 1, :at], attention_mask=given).logits[0, -1]
            gap = float(logits[want[row, at]] - logits[got[row, at]])
            self.assertLess(abs(gap), TIE, f"row {row}, token {at}: {want[row]} {got[row]}")

    def logits(self, family, ids, **options):
        """Eager's, over rounded keys and values."""
        return models(family)[0](ids, past_key_values=Rounded(), **options).logits

    def same_logits(self, want, got, near=NEAR):
        self.assertEqual(want.shape, got.shape)
        self.assertLess(float((want.float() - got.float()).abs().max()), near)

    def generate(self, family, ids, count=24, mask=None, cache=None, **options):
        """By eager and by kvq; both the same."""
        eager, model = models(family)
        options = {"max_new_tokens": count, "do_sample": False,
                   "attention_mask": torch.ones_like(ids) if mask is None else mask, **options}
        want = eager.generate(ids, **options)
        cache = cache or self.cache(model)
        got = model.generate(ids, past_key_values=cache, **options)
        return eager, want, got, cache
