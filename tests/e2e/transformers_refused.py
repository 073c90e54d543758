# SPDX-License-Identifier: Apache-2.0
"""What kvq.transformers does not serve; transformers_test.py runs these."""
import copy
import gc
import inspect
import unittest
import unittest.mock
import warnings

from e2e_rig import kvq
from transformers_rig import SIZES, WINDOW, Case, models, prompt

import torch
import transformers
from kvq.transformers import KvqCache, attach, detach
from kvq.transformers.masks import check_positions


class Refused(Case):
    """What is not served is refused with a sentence that says what is wrong, and the cache is as
    it was."""

    def setUp(self):
        super().setUp()
        self.ids = prompt(12)
        self.model = models("llama")[1]

    def refused(self, text, call, *arguments, **options):
        with self.assertRaises(NotImplementedError) as caught:
            call(*arguments, **options)
        self.assertIn(text, str(caught.exception))

    def still_serves(self, cache, model=None):
        self.assertEqual(cache.get_seq_length(), 0)
        self.same_logits(self.logits("llama", self.ids),
                         (model or self.model)(self.ids, past_key_values=cache).logits)

    def test_other_caches(self):
        for options in ({}, {"use_cache": False}):
            self.refused("KvqCache", self.model, self.ids, **options)
            self.refused("KvqCache", self.model.generate, self.ids, max_new_tokens=2, **options)
        self.refused("KvqCache", self.model, self.ids,
                     past_key_values=transformers.DynamicCache())

    def test_a_static_cache(self):
        """transformers 4 keeps it in the model, and where its first forward was refused, or failed
        for any reason in a stock model, it fails in all later calls without a sentence."""
        def fail(*_):
            raise ZeroDivisionError
        eager, model = (copy.deepcopy(m) for m in models("llama"))
        options = {"max_new_tokens": 2, "cache_implementation": "static"}
        self.refused("KvqCache", model.generate, self.ids, **options)
        hook = eager.model.layers[0].register_forward_pre_hook(fail)
        self.assertRaises(ZeroDivisionError, eager.generate, self.ids, **options)
        hook.remove()
        if transformers.__version__ >= "5":
            self.refused("KvqCache", model.generate, self.ids, **options)
            self.assertEqual(eager.generate(self.ids, **options).shape, (1, 14))
            return
        for one in (eager, model):
            with self.assertRaisesRegex(AttributeError, "StaticLayer.*max_batch_size"):
                one.generate(self.ids, **options)
        del model._cache
        self.refused("KvqCache", model.generate, self.ids, **options)

    @unittest.skipIf(transformers.__version__ < "5", "transformers 4 fails without a sentence")
    def test_continuous_batching(self):
        """transformers itself says that it takes other implementations alone."""
        with self.assertRaises(Exception) as caught:
            self.model.generate_batch([[5, 6, 7]], transformers.GenerationConfig(
                max_new_tokens=2, eos_token_id=2, pad_token_id=0))
        self.assertIn("kvq", str(caught.exception))

    def test_other_attention(self):
        for name in ("eager", "sdpa"):
            model = copy.deepcopy(self.model)
            cache = self.cache(model)
            model.set_attn_implementation(name)
            self.refused(f"attends by '{name}'", KvqCache, model)
            self.refused(f"attends by '{name}'", model, self.ids, past_key_values=cache)
            model.set_attn_implementation("kvq")
            self.still_serves(cache, model)

    def test_training(self):
        cache = self.cache(self.model)
        with torch.enable_grad():
            self.refused("torch.no_grad()", self.model, self.ids, past_key_values=cache)
        model = copy.deepcopy(self.model).train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        self.refused("model.eval()", model, self.ids, past_key_values=self.cache(model))
        self.still_serves(cache)

    def test_weights_of_attention(self):
        """Refused before transformers 4 replaces the layers' forward(), which it does not undo
        where a forward raises: copies of the model would compute with its own layers."""
        model = copy.deepcopy(self.model)
        cache = self.cache(model)
        for call in (model, model.model, model.generate):
            self.refused("output_attentions", call, self.ids, past_key_values=cache,
                         output_attentions=True)
        self.assertEqual([m for m in model.modules() if not inspect.ismethod(m.forward)], [])
        self.still_serves(cache, model)
        twin = copy.deepcopy(model)
        self.still_serves(self.cache(twin), twin)

    def test_unknown_keywords(self):
        """They may change attention, as head_mask does with eager in transformers 4."""
        _, model = models("gpt_neox")
        cache = self.cache(model)
        self.refused("the keyword 'head_mask'", model, self.ids, past_key_values=cache,
                     head_mask=torch.zeros(3, 4))
        self.assertEqual(cache.get_seq_length(), 0)
        self.same_logits(self.logits("gpt_neox", self.ids),
                         model(self.ids, past_key_values=cache, head_mask=None).logits)
        cache = self.cache(self.model)
        lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
        self.refused("the keyword 'cu_seq_lens_q'", self.model, self.ids, past_key_values=cache,
                     cu_seq_lens_q=lengths)
        self.still_serves(cache)

    def test_keywords_without_effect(self):
        """What concerns the output of the model, or was done before attention, is let through."""
        got = self.model(self.ids, past_key_values=self.cache(self.model), use_cache=True,
                         position_ids=torch.arange(12)[None], output_hidden_states=True,
                         num_items_in_batch=torch.tensor(1), logits_to_keep=0)
        self.same_logits(self.logits("llama", self.ids), got.logits)

    def test_shapes(self):
        sizes = {**SIZES, "head_dim": 320}
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**sizes), attn_implementation="kvq")
        self.refused("320 dimensions; up to 256 are served", KvqCache, model)
        double = copy.deepcopy(self.model).double()
        self.refused("float64", double, self.ids, past_key_values=self.cache(double))
        with self.assertRaises(TypeError):
            KvqCache(self.model.config)

    def test_models(self):
        config = transformers.T5Config(d_model=64, d_ff=64, num_layers=1, num_heads=1, d_kv=64,
                                       vocab_size=64)
        model = transformers.T5ForConditionalGeneration(config)
        model.config._attn_implementation = "kvq"
        self.refused("encoder-decoder", KvqCache, model)
        config = transformers.DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4}, kv_lora_rank=64, q_lora_rank=32, n_group=1,
            qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64, n_routed_experts=8,
            topk_group=1, num_experts_per_tok=2, moe_intermediate_size=64)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="kvq")
        self.refused("(MLA", KvqCache, model)
        if hasattr(transformers, "Gemma4TextConfig"):
            config = transformers.Gemma4TextConfig(
                **SIZES, global_head_dim=128, hidden_size_per_layer_input=0,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"])
            model = transformers.AutoModelForCausalLM.from_config(config,
                                                                  attn_implementation="kvq")
            self.refused("(4, 2, 64), (4, 2, 128)]", KvqCache, model)
        model = copy.deepcopy(self.model)
        model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
        self.refused("linear_attention", KvqCache, model)

    def test_prefixes_under_a_rope_of_many_lengths(self):
        """Whose frequencies depend on the prompt's: the same tokens have other keys in another one.
        Of all layers, or of those of one type."""
        factors = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
        for kind in ({"rope_type": "dynamic", "factor": 2.0},
                     {"rope_type": "longrope", "factor": 2.0, **factors},
                     {"full_attention": {"rope_type": "dynamic", "factor": 2.0},
                      "sliding_attention": {"rope_type": "default"}}):
            model = copy.deepcopy(self.model)
            setattr(model.config, "rope_parameters" if transformers.__version__ >= "5" else
                    "rope_scaling", kind)
            self.refused("RoPE is '", self.cache, model, prefix=self.ids)
            self.refused("reuse=False", attach, model, "16bit", reuse=True)
            with self.assertWarnsRegex(UserWarning, "RoPE is '(dynamic|longrope)'"):
                attach(model, "16bit", client=self.client)
            with unittest.mock.patch.object(self.client, "session",
                                            side_effect=self.client.session) as opened:
                model.generate(prompt(300), max_new_tokens=2, do_sample=False)
            self.assertNotIn("prefix", opened.call_args.kwargs)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                attach(model, "16bit", reuse=False, client=self.client)
            self.still_serves(self.cache(model), model)
        detach(model)

    def test_masks(self):
        cache = self.cache(self.model)
        mask = torch.zeros(1, 1, 12, 12)
        self.refused("a mask of one's own", self.model, self.ids, past_key_values=cache,
                     attention_mask=mask)
        self.refused("attention_mask has 11 columns", self.model, self.ids, past_key_values=cache,
                     attention_mask=torch.ones(1, 11, dtype=torch.long))
        self.still_serves(cache)
        mask = torch.ones(1, 13, dtype=torch.long)
        mask[0, 3] = 0
        self.refused("stays visible", self.model, self.ids[:, :1], past_key_values=cache,
                     attention_mask=mask)
        padded = self.cache(self.model)
        self.model(self.ids, past_key_values=padded, attention_mask=mask[:, :12])
        self.refused("pad tokens", self.model, self.ids[:, :1], past_key_values=padded)
        self.refused("has 1 rows, the forward 2", self.model, prompt(1, rows=2),
                     past_key_values=cache)

    def test_packed_sequences(self):
        """Positions that begin anew within a row: each of its sequences is to see itself alone."""
        cache = self.cache(self.model)
        packed = torch.tensor([[*range(7), *range(5)]])
        self.refused("row 0 go from 6 to 0: packed", self.model, self.ids, past_key_values=cache,
                     position_ids=packed)
        self.refused("row 0 go from 0 to 0", self.model, self.ids, past_key_values=cache,
                     position_ids=torch.zeros_like(packed))
        mask, padded = torch.ones(2, 12, dtype=torch.long), packed.repeat(2, 1)
        mask[0, :7] = 0
        self.refused("row 1 go from 6 to 0", self.model, prompt(12, rows=2), position_ids=padded,
                     past_key_values=cache, attention_mask=mask)
        self.still_serves(cache)
        cache = self.cache(self.model)  # the pads of a row have any position, its tokens go on
        self.model(self.ids, past_key_values=cache, position_ids=packed, attention_mask=mask[:1])
        self.model(self.ids[:, :3], past_key_values=cache, position_ids=torch.tensor([[5, 6, 9]]),
                   attention_mask=torch.cat([mask[:1], torch.ones(1, 3, dtype=torch.long)], 1))
        self.assertEqual(cache.sessions[0].tokens, 8)
        kinds = {"sliding_attention": mask[:1] != 0, "full_attention": mask[:1] != 0}
        check_positions(packed, kinds)  # masks that a model's wrapper has made
        kinds = dict.fromkeys(kinds, torch.empty(0, 0, dtype=torch.bool))
        self.refused("row 0 go from 6 to 0", check_positions, packed, kinds)

    def test_places_of_columns(self):
        """transformers 4 rotates K by cache_position where it is given no position_ids."""
        for options in ({}, {"name": "places"}, {"prefix": self.ids}):
            with self.cache(self.model, **options) as cache:
                self.refused("cache_position goes from 7 to 18, and this cache has 0 columns",
                             self.model, self.ids, past_key_values=cache,
                             cache_position=torch.arange(12) + 7)
                for at in (torch.arange(12), torch.arange(12, 24)):
                    self.model(self.ids, past_key_values=cache, cache_position=at)
                self.assertEqual(cache.get_seq_length(), 24)

    def test_windows_of_masks(self):
        """A layer whose mask has another window than its attention says: eager goes by the mask."""
        model = copy.deepcopy(models("gemma2")[1])
        cache = self.cache(model)
        kinds = ["full_attention"] * 3
        model.config.layer_types = kinds
        for layer, kind in zip(model.model.layers, kinds):
            layer.attention_type = kind
        self.refused(f"no window, but its attention and configuration say a window of {WINDOW}",
                     model, prompt(40), past_key_values=cache)
        mask = torch.ones(1, 40, dtype=torch.long)
        mask[0, 0] = 0
        self.refused("mask for layer 0 has no window", model, prompt(40), past_key_values=cache,
                     attention_mask=mask)
        self.assertEqual(cache.get_seq_length(), 0)

    @unittest.skipIf(transformers.__version__ < "5", "OLMoE of transformers 4 takes no attention "
                     "function")
    def test_a_window_that_the_mask_lacks(self):
        """OLMoE hands its attention a window of the configuration, and makes its masks without."""
        sizes = {**SIZES, "hidden_size": 256, "num_key_value_heads": 4, "num_experts": 8}
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.OlmoeConfig(**sizes, sliding_window=WINDOW), attn_implementation="kvq")
        self.refused("mask for layer 0 has no window", model, prompt(40),
                     past_key_values=self.cache(model.eval()))

    def test_a_cache_that_generate_drops(self):
        """As Phi-3's does where the tokens pass a number of its configuration's."""
        model = copy.deepcopy(models("phi3")[1])
        model.config.original_max_position_embeddings = 40
        if transformers.__version__ < "5":
            model.config.rope_scaling = {"rope_type": "default"}
        options = {"do_sample": False, "eos_token_id": None}
        for n, count in ((44, 2), (38, 8)):  # the prompt, and the answer
            cache = self.cache(model)
            self.refused("original_max_position_embeddings (40)", model.generate, prompt(n),
                         past_key_values=cache, max_new_tokens=count, **options)
            cache.close()
        got = model.generate(prompt(36), past_key_values=self.cache(model), max_new_tokens=5,
                             **options)
        self.assertEqual(got.shape[1], 41)
        self.refused("pass past_key_values", model, prompt(30))

    def test_early_exit(self):
        """Of a forward that leaves out the last layers nothing is kept."""
        model = copy.deepcopy(self.model)
        cache = self.cache(model)
        last = model.model.layers[-1:]
        model.model.layers = model.model.layers[:-1]
        model.config.num_hidden_layers -= 1
        self.refused("before its last layer", model, self.ids, past_key_values=cache)
        model.model.layers += last
        model.config.num_hidden_layers += 1
        self.still_serves(cache, model)

    def test_an_early_exit_of_generate(self):
        """transformers leaves the model with the layers of a draft that failed. Caches refuse it
        then: the answers would be those of fewer layers, and nobody would be told."""
        model = copy.deepcopy(self.model)
        self.refused("KvqCache", model.generate, self.ids, past_key_values=self.cache(model),
                     max_new_tokens=2, assistant_early_exit=1)
        self.assertEqual(model.config.num_hidden_layers, 1)
        self.refused("set num_hidden_layers back to 3", self.cache, model)
        self.refused("set num_hidden_layers back to 3", attach, model)
        model.config.num_hidden_layers = 3
        self.still_serves(self.cache(model), model)

    def test_another_model(self):
        _, model = models("llama")
        _, other = models("llama", torch.float16)
        cache = self.cache(model)
        self.refused("another model", other, prompt(5), past_key_values=cache)
        model(prompt(5), past_key_values=cache)

    def test_too_long(self):
        _, model = models("llama")
        cache = self.cache(model, max_tokens=64)
        self.refused("max_tokens=64", model, prompt(65), past_key_values=cache)

    def test_a_name_has_one_row(self):
        _, model = models("llama")
        cache = self.cache(model, name="one row")
        model(prompt(5), past_key_values=cache)
        self.refused("without one", cache.batch_repeat_interleave, 2)
        self.refused("destroy", cache.crop, -5)
        cache.reset()

    def test_formats_and_options(self):
        """What no session can have is refused where a cache is made, not by its first forward; and
        nothing of it is left."""
        error = self.fails(kvq.Code.E_FORMAT, self.cache, self.model, "kvq3")
        self.assertIn("did you mean 'kvq", error.text)
        for wrong, what, options in (
                (TypeError, "format is None", {"format": None}),
                (TypeError, "format is 4", {"format": 4}),
                (ValueError, "quick", {"attention": "quick"}),
                (ValueError, "keeps", {"on_detach": "keeps"}),
                (TypeError, "salt", {"salt": 7})):
            with self.assertRaisesRegex(wrong, what):
                self.cache(self.model, **options)
        gc.collect()
        self.assertEqual(len(self.client._queues), 1)  # the test's own
        before = self.daemon.ctl("session", "list")
        with unittest.mock.patch.object(self.client, "session",
                                        side_effect=self.client.session) as opened:
            for _ in range(2):
                self.cache(self.model, "kivi2").close()
        self.assertEqual(opened.call_count, 1)  # it is asked once
        self.assertEqual(self.daemon.ctl("session", "list"), before)

    def test_cropping_too_much(self):
        cache = self.cache(self.model, "oscar2", max_rollback=4)
        self.model(prompt(700), past_key_values=cache)
        error = self.fails(kvq.Code.E_ROLLBACK, cache.crop, -300)
        if hasattr(error, "__notes__"):
            self.assertIn("max_rollback=4", error.__notes__[0])
        self.assertEqual(cache.get_seq_length(), 700)
        self.assertEqual(cache.sessions[0].refresh(), 700)
        with self.assertRaises(ValueError):
            cache.crop(-701)
        self.refused("change together", cache.layers[0].crop, -1)
