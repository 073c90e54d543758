# SPDX-License-Identifier: Apache-2.0
"""Caches with names and prefixes; transformers_test.py runs these."""
import contextlib
import copy
import functools
import gc
import inspect
import io
import json
import os
import runpy
import tempfile
import unittest
import unittest.mock
import warnings
from concurrent.futures import ThreadPoolExecutor

import e2e_rig
from e2e_rig import kvq
from transformers_rig import Case, models, prompt

import torch
import transformers
try:
    import peft
except ImportError:
    peft = None
from kvq.transformers import KvqCache, attach, cache_name


class Sessions(Case):
    """Sessions that outlive their cache, and beginnings that sessions have in common."""
    DAEMON = {"attention": "exact"}

    def setUp(self):
        super().setUp()
        self.model = models("llama")[1]

    def test_name(self):
        """The second turn in another cache, of another connection."""
        ids, more = prompt(300), prompt(20, 5)
        with self.cache(self.model, name="chat") as cache:
            first = self.model.generate(ids, past_key_values=cache, max_new_tokens=6,
                                        do_sample=False)
        turn = torch.cat([first, more], 1)
        with self.daemon.client() as client, \
                KvqCache(self.model, "16bit", client=client, name="chat") as cache:
            self.assertEqual(cache.get_seq_length(), 305)
            got = self.model.generate(turn, past_key_values=cache, max_new_tokens=9,
                                      do_sample=False)
            cache.crop(-3)
            self.assertEqual(cache.get_seq_length(), got.shape[1] - 4)
            eager = models("llama")[0]
            want = eager.generate(turn, max_new_tokens=9, do_sample=False)
            self.same_tokens(eager, want, got)
            cache.reset()
        with self.cache(self.model, name="chat") as cache:
            self.assertEqual(cache.get_seq_length(), 0)

    def test_a_prompt_that_is_there_already(self):
        """Of no more tokens than the session has: it is not appended again."""
        ids = prompt(300, 21)
        with self.cache(self.model, name="again") as cache:
            self.model(ids, past_key_values=cache)
        for n in (200, 300):
            with self.assertRaisesRegex(NotImplementedError, f"300 tokens .*, and prefix {n} ids"):
                self.cache(self.model, name="again", prefix=ids[:, :n])
            mask = torch.ones(1, n, dtype=torch.long)
            with self.cache(self.model, name="again") as cache:
                for options in ({}, {"attention_mask": mask}):
                    if transformers.__version__ < "5":  # says nothing of use, but appends nothing
                        with self.assertRaises(IndexError):
                            self.model.generate(ids[:, :n], past_key_values=cache, **options)
                        continue
                    with self.assertRaisesRegex(NotImplementedError, f"300 tokens, .* to {n}: "):
                        self.model.generate(ids[:, :n], past_key_values=cache, **options)
                with self.assertRaisesRegex(NotImplementedError, f"300 tokens, .* to {n}: "):
                    self.model(ids[:, :n], past_key_values=cache, attention_mask=torch.ones(
                        1, 300 + n), position_ids=torch.arange(n)[None])
                self.assertEqual(cache.get_seq_length(), 300)
        more = torch.cat([ids, prompt(3, 4)], 1)
        with self.cache(self.model, name="again", prefix=more) as cache:
            self.model.generate(more, past_key_values=cache, max_new_tokens=4, do_sample=False)
            self.assertEqual(cache.get_seq_length(), 306)
            self.model(ids[:, :2], past_key_values=cache)  # without positions, they go on
            cache.crop(-8)
            self.model(ids[:, :2], past_key_values=cache, position_ids=torch.tensor([[300, 301]]))
            cache.reset()
            self.model(ids[:, :2], past_key_values=cache, position_ids=torch.arange(2)[None])
            cache.reset()

    def test_prompt_tokens(self):
        """What the daemon is told of a prompt that may come in pieces."""
        ids = prompt(700, 23)
        for options, want in (({"name": "told"}, [0]), ({"prefix": ids}, [512]),
                              ({"prefix": ids[:, :9]}, [8]), ({}, [512]), ({"name": "told",
                              "prompt_tokens": 77}, [77])):
            with unittest.mock.patch.object(self.client, "session",
                                            side_effect=self.client.session) as opened:
                with self.cache(self.model, **options) as cache:
                    if not options:
                        self.model(ids, past_key_values=cache)
                    told = [call.kwargs["prompt_tokens"] for call in opened.call_args_list]
                    self.assertEqual(told, want)
                    cache.reset()

    def test_place(self):
        """On the host, where the model is, also of a daemon that would choose a GPU."""
        with unittest.mock.patch.object(self.client, "session",
                                        side_effect=self.client.session) as opened:
            with self.cache(self.model) as cache:
                self.model(prompt(300), past_key_values=cache)
                self.model(prompt(1), past_key_values=cache)
                self.assertEqual(cache.sessions[0].info()["place"], "host")
        self.assertEqual([call.kwargs["place"] for call in opened.call_args_list], ["host"])

    def test_names_that_do_not_fit(self):
        """Other weights do not go on with a session, nor does another writer beside the first."""
        with self.cache(self.model, name="one") as cache:
            self.model(prompt(9), past_key_values=cache)
        self.fails(kvq.Code.E_NO_NAMESPACE, self.cache, self.model, name="one", namespace="others")
        other = copy.deepcopy(self.model)
        other.model.layers[1].mlp.up_proj.weight.data += 0.01
        error = self.fails(kvq.Code.E_EXISTS, self.cache, other, name="one")
        if hasattr(error, "add_note"):
            self.assertIn("all values of all parameters", error.__notes__[0])
        cache = self.cache(self.model, name="one")
        self.assertEqual(cache.get_seq_length(), 9)
        self.fails(kvq.Code.E_BUSY, self.cache, self.model, name="one",
                   namespace=f"uid-{os.getuid()}")
        with self.assertRaises(NotImplementedError):
            self.model(prompt(3, rows=2), past_key_values=cache)

    def test_configurations(self):
        """What K and V depend on is in the fingerprint; the version of transformers and what
        concerns generate() are not."""
        seen, model = kvq.transformers.table.fingerprint, copy.deepcopy(self.model)
        before = seen(model)
        with unittest.mock.patch.object(transformers.configuration_utils, "__version__", "9.9"):
            self.assertIn("9.9", model.config.to_json_string())
            self.assertEqual(seen(model), before)
        for name, value in (("pad_token_id", 5), ("max_length", 77), ("id2label", {0: "no"}),
                            ("new_in_a_release", None)):
            setattr(model.config, name, value)
            self.assertEqual(seen(model), before)
        for name, value in (("rms_norm_eps", 0.5), ("new_in_a_release", 2)):
            setattr(model.config, name, value)
            self.assertNotEqual(seen(model), before)
            before = seen(model)

    def test_a_few_weights(self):
        """One value, also where PyTorch does not count that it is written, and what changes its
        place with another, make another model; all as it was is the same one."""
        seen, model = kvq.transformers.table.fingerprint, copy.deepcopy(self.model)
        before, table = seen(model), model.get_input_embeddings().weight
        was = table.detach().clone()
        for rows, columns in (([77], [3]), ([77, 78], [3]), ([77], [3, 5]), ([77], [2, 3]),
                              ([77], range(1, 128, 2))):
            with self.subTest(rows=rows, columns=columns):
                at = torch.meshgrid(torch.tensor(rows), torch.tensor(columns), indexing="ij")
                values = table.data[at].flatten()
                changed = values.roll(1) if len(values) > 1 else values + 1e-3
                table.data[at] = changed.reshape(at[0].shape)
                self.assertNotEqual(seen(model), before)
                table.data.copy_(was)
                self.assertEqual(seen(model), before)
                table.data[at] *= -1  # the highest bits of some words alone
                self.assertNotEqual(seen(model), before)
                table.data.copy_(was)
        model.half()
        halves = seen(model)
        model.lm_head.weight.data[-1, -1] *= 2  # of bytes that are no whole sum, too
        self.assertNotEqual(seen(model), halves)

    def test_adapters_and_quantized_weights(self):
        """Models tell what they compute K and V with: an adapter that is switched, switched off or
        weakened, and weights that are buffers. The same state again is the same model."""
        class Adapted(torch.nn.Linear):  # as PEFT's layers have it
            _active_adapter, _disable_adapters = "one", False

        def seen():
            found, = {kvq.transformers.table.fingerprint(copy.deepcopy(model)) for _ in range(2)}
            return found
        model = copy.deepcopy(self.model)
        mlp = model.model.layers[1].mlp
        mlp.up_proj = Adapted(128, 128, bias=False)
        mlp.up_proj.scaling, mlp.up_proj.merged_adapters = {"one": 2.0, "two": 1.0}, []
        mlp.up_proj.register_buffer("qweight", torch.zeros(9, dtype=torch.int32))
        before = seen()
        for name, value in (("_active_adapter", ["two"]), ("_disable_adapters", True),
                            ("merged_adapters", ["one"]), ("scaling", {"one": 1.0, "two": 1.0}),
                            ("qweight", torch.ones(9, dtype=torch.int32))):
            with self.subTest(name):
                was = getattr(mlp.up_proj, name)
                setattr(mlp.up_proj, name, value)
                self.assertNotEqual(seen(), before)
                setattr(mlp.up_proj, name, was)
                self.assertEqual(seen(), before)
        mlp.up_proj._active_adapter = ["one"]
        mlp.up_proj.scaling = {"two": 1.0, "one": 2.0}
        model.model.rotary_emb.inv_freq += 1  # which a longer prompt may do
        self.assertEqual(seen(), before)

    @unittest.skipUnless(peft, "PEFT is not installed")
    def test_adapters_of_peft(self):
        """Another adapter, or none, finds nothing of the first one's; the first one does."""
        model, ids = copy.deepcopy(self.model), prompt(300, 17)
        config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config, "one")
        model.add_adapter("two", config)

        def found():
            with self.cache(model, prefix=ids) as cache:
                tokens = cache.get_seq_length()
                model(ids[:, tokens:], past_key_values=cache)
                return tokens
        self.assertEqual([found(), found()], [0, 256])
        with self.cache(model, prefix=ids) as cache:
            model.set_adapter("two")
            with self.assertRaisesRegex(NotImplementedError, "other adapters are active"):
                model(ids[:, 256:], past_key_values=cache)
        self.assertEqual([found(), found()], [0, 256])
        with model.disable_adapter():
            self.assertEqual([found(), found()], [0, 256])
        model.set_adapter("one")
        self.assertEqual(found(), 256)
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("one", 3.0)
        self.assertEqual(found(), 0)

    @unittest.skipUnless(peft, "PEFT is not installed")
    def test_adapters_that_come_and_go(self):
        """A cache that was made before an adapter was put in, or with one that was taken out, is
        refused: others would find K and V of another model under this one's name."""
        config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
        for how in ("put in", "taken out", "its wrapper gone"):
            model, ids = copy.deepcopy(self.model), prompt(300, 23)
            wrapped = None if how == "put in" else peft.get_peft_model(model, config, "one").eval()
            with self.cache(wrapped or model, prefix=ids) as cache:
                if how == "put in":
                    wrapped = peft.get_peft_model(model, config, "one").eval()
                    plain = wrapped
                else:
                    plain = wrapped.unload()
                    if how == "its wrapper gone":
                        del wrapped
                        gc.collect()
                with self.assertRaisesRegex(NotImplementedError, "other adapters are active"):
                    plain(ids, past_key_values=cache)
                self.assertEqual(cache.get_seq_length(), 0)

    @unittest.skipUnless(peft, "PEFT is not installed")
    def test_adapters_that_a_call_chooses(self):
        """Share nothing with the active one's, and are refused by caches that would."""
        model, ids = copy.deepcopy(self.model), prompt(300, 18)
        config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
        attach(model, "16bit", client=self.client)
        adapted = peft.get_peft_model(model, config, "one").eval()
        adapted.add_adapter("two", config)
        steps = {"max_new_tokens": 2, "do_sample": False}

        def begun(**options):
            with unittest.mock.patch.object(self.client, "session",
                                            side_effect=self.client.session) as opened:
                adapted.generate(input_ids=ids, **steps, **options)
            return "prefix" in opened.call_args.kwargs
        self.assertTrue(begun())
        self.assertFalse(begun(adapter_names=["two"]))
        self.assertFalse(begun(alora_offsets=[5]))
        self.assertTrue(begun())
        for options in ({"name": "of one"}, {"prefix": ids}):
            with self.cache(model, **options) as cache:
                seen = cache.get_seq_length()
                for asked in ({"adapter_names": ["two"]}, {"alora_offsets": [5]}):
                    with self.assertRaisesRegex(NotImplementedError, next(iter(asked))):
                        adapted(input_ids=ids[:, seen:], past_key_values=cache, **asked)
                    for module in adapted.modules():  # PEFT leaves them where a forward raises
                        if hasattr(module, "_active_adapter"):
                            module._forward_pre_hooks.clear()
                self.assertEqual(cache.get_seq_length(), seen)
                adapted(input_ids=ids[:, seen:], past_key_values=cache)
        with self.cache(model) as cache:  # is nobody else's
            adapted(input_ids=ids, past_key_values=cache, adapter_names=["two"])

    @unittest.skipUnless(peft, "PEFT is not installed")
    def test_a_prompt_that_peft_has_learned(self):
        """Stands before each call's: an attached model shares nothing of such a call, though its
        weights and ids are those of calls without."""
        ids, config = prompt(300, 24), peft.PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=5)
        eager, tuned = (peft.get_peft_model(copy.deepcopy(model), config).eval()
                        for model in models("llama"))
        tuned.load_state_dict(eager.state_dict())
        plain = tuned.get_base_model()
        attach(plain, "16bit", client=self.client, salt="learned")
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8,
                "do_sample": False}
        for _ in range(2):
            self.same_tokens(eager.get_base_model(), eager.get_base_model().generate(**call),
                             plain.generate(**call))
            self.assertEqual(eager.generate(**call).tolist(), tuned.generate(**call).tolist())
        with self.assertRaisesRegex(NotImplementedError, "prefix, of a model whose prompt PEFT"):
            self.cache(tuned, prefix=ids)
        with self.cache(tuned) as cache:
            got = tuned.generate(**call, **{cache_name(tuned): cache})
            self.assertEqual(eager.generate(**call).tolist(), got.tolist())

    @unittest.skipUnless(peft, "PEFT is not installed")
    def test_keys_that_peft_has_learned(self):
        """Come in a cache of PEFT's, beside or instead of kvq's."""
        model, ids = copy.deepcopy(self.model), prompt(40, 25)
        tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
        attach(model, "16bit", client=self.client)
        for call in (lambda: self.cache(tuned), lambda: attach(tuned, "16bit"),
                     lambda: tuned.generate(input_ids=ids, max_new_tokens=2)):
            with self.assertRaisesRegex(NotImplementedError, r"learned \(PREFIX_TUNING\)"):
                call()
        with tuned.disable_adapter():
            self.assertEqual(tuned.generate(input_ids=ids, max_new_tokens=2).shape, (1, 42))

    def test_prefix(self):
        """What one cache has computed the next finds; so does a fork's, and one after a crop."""
        for family in ("llama", "mistral", "gemma3"):
            with self.subTest(family):
                eager, model = models(family)
                ids = torch.cat([prompt(400, 7), prompt(30)], 1)
                with self.cache(model, prefix=ids) as cache:
                    self.assertEqual(cache.get_seq_length(), 0)
                    model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False,
                                   prompt_lookup_num_tokens=3, eos_token_id=2)
                other = torch.cat([ids[:, :390], prompt(60, 2)], 1)
                with self.cache(model, prefix=other[0].tolist()) as cache:
                    found = cache.get_seq_length()
                    self.assertEqual(found, 384)
                    got = model.generate(other, past_key_values=cache, max_new_tokens=12,
                                         do_sample=False)
                    want = eager.generate(other, max_new_tokens=12, do_sample=False)
                    self.same_tokens(eager, want, got)
                with self.cache(model, prefix=ids, salt="another tenant") as cache:
                    self.assertEqual(cache.get_seq_length(), 0)

    def test_prefix_of_short_steps(self):
        """Ids are told by steps of this process as well, by pieces and by a copy."""
        ids = prompt(400, 11)
        with self.cache(self.model, prefix=ids) as cache:
            for at in range(0, 200, 50):
                self.model(ids[:, at:at + 50], past_key_values=cache)
            fork = copy.deepcopy(cache)
        for at in range(200, 400, 50):
            self.model(ids[:, at:at + 50], past_key_values=fork)
        fork.close()
        self.begin_with(384, self.model, prefix=ids)

    def begin_with(self, tokens, *arguments, **options):
        """A cache that begins with so many tokens: what has been closed is packed in the
        background."""
        for _ in range(1000):
            cache = self.cache(*arguments, **options)
            if cache.get_seq_length() == tokens:
                return cache
            cache.close()
        raise AssertionError(f"no cache began with {tokens} tokens")

    def test_prefix_in_other_calls(self):
        """Ids are told too where the cache comes by position, where a wrapper calls the model's
        forward past its hooks, as PEFT does, and where the decoder is called by itself."""
        class Wrapper(torch.nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner, self.config, self.dtype = inner, inner.config, inner.dtype

            def forward(self, *arguments, **options):
                return self.inner.forward(*arguments, **options)

        def by_position(model, ids, cache):
            at = list(inspect.signature(llama.forward).parameters).index(cache_name(llama))
            return model(ids, *[None] * (at - 1), cache)  # LlamaModel's begins with the same ones

        def by_name(model, ids, cache):
            return model(ids, **{cache_name(model): cache})
        llama, wrapped = self.model, Wrapper(self.model)
        calls = [(llama, llama, by_position), (llama, wrapped, by_name),
                 (wrapped, wrapped, by_name), (llama, wrapped, by_position),
                 (llama, llama.model, by_name), (llama, llama.model, by_position)]
        for n, (made_with, called, call) in enumerate(calls):
            with self.subTest(n), warnings.catch_warnings():
                warnings.simplefilter("error")
                ids = prompt(400, 30 + n)
                with self.cache(made_with, prefix=ids, salt=f"call {n}") as cache:
                    call(called, ids, cache)
                self.begin_with(384, made_with, prefix=ids, salt=f"call {n}").close()

    def test_nothing_to_tell(self):
        """Forwards whose ids cannot be known end the telling, with one warning."""
        embedded = self.model.get_input_embeddings()(prompt(300, 13))
        for n, first in enumerate((
                lambda cache: self.model(inputs_embeds=embedded, past_key_values=cache),
                lambda cache: self.model.model.forward(prompt(300, 13), past_key_values=cache))):
            ids = prompt(300, 13)
            with self.cache(self.model, prefix=ids, salt=f"nothing {n}") as cache:
                with self.assertWarnsRegex(UserWarning, "will not find them"):
                    first(cache)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    self.model(ids[:, :200], **{cache_name(self.model): cache})
            cache = self.cache(self.model, prefix=ids, salt=f"nothing {n}")
            self.assertEqual(cache.get_seq_length(), 0)


    def test_more_than_ids(self):
        """Tokens whose K is another than their ids say are nobody else's: GPT-2 adds something for
        their types, and positions are the caller's. Pads, and positions that are told, are no
        such thing."""
        torch.manual_seed(1)
        gpt2 = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(
            n_embd=256, n_layer=2, n_head=4, vocab_size=256, n_positions=512, bos_token_id=1,
            eos_token_id=None), attn_implementation="kvq").eval()
        ids = prompt(300, 14)
        at = torch.arange(300)[None]
        padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), ids], 1)
        mask = torch.ones_like(padded)
        mask[0, :9] = 0
        types = [(gpt2, {"token_type_ids": torch.full_like(ids, 7)}, 0), (gpt2, {}, 256)]
        if not hasattr(gpt2.transformer.h[0].attn, "scaling"):  # of transformers 4: not served
            types = []
        for n, (model, options, found) in enumerate((
                *types, (self.model, {"position_ids": at * 2}, 0),
                (self.model, {"position_ids": at + 1}, 0), (self.model, {"position_ids": at}, 256),
                (self.model, {"input_ids": padded, "attention_mask": mask}, 0),
                (self.model, {"input_ids": padded, "attention_mask": mask,
                              "position_ids": (mask.cumsum(1) - 1).clamp(0)}, 256))):
            with self.subTest(n), warnings.catch_warnings():
                warnings.simplefilter("error" if found else "ignore")
                name = cache_name(model)
                with self.cache(model, prefix=ids, salt=f"more {n}") as cache:
                    model(**{"input_ids": ids, **options, name: cache})
                with self.cache(model, prefix=ids, salt=f"more {n}") as cache:
                    self.assertEqual(cache.get_seq_length(), found)

    def test_a_prompt_that_comes_again(self):
        """Behind what a cache with a prefix has: assisted decoding of transformers 5.24 hands all
        of the prompt over, and generate() a prompt of no more tokens than there are."""
        ids = prompt(300, 19)
        with self.cache(self.model, prefix=ids) as cache:
            self.model(ids, past_key_values=cache)
        for given, options in ((ids, {"prompt_lookup_num_tokens": 3}), (ids[:, :256], {})):
            with self.cache(self.model, prefix=ids) as cache:
                self.assertEqual(cache.get_seq_length(), 256)
                options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 2, **options}
                try:
                    got = self.model.generate(given, past_key_values=cache, **options)
                except (NotImplementedError, IndexError) as error:  # transformers 4 says nothing
                    if isinstance(error, NotImplementedError):
                        self.assertIn("made with a prefix, has 256 tokens", str(error))
                    self.assertEqual(cache.get_seq_length(), 256)
                    continue
                eager = models("llama")[0]
                self.same_tokens(eager, eager.generate(given, **options), got)

    def test_a_name_that_somebody_else_took(self):
        """Between a cache's reset and its next forward: its positions are not behind those tokens,
        so the forward is refused, and the cache goes on with the session that is there."""
        ids = prompt(40, 15)
        cache = self.cache(self.model, name="taken")
        self.model(ids[:, :9], past_key_values=cache)
        cache.reset()
        with self.cache(self.model, name="taken") as other:
            self.model(ids[:, :20], past_key_values=other)
        with self.assertRaisesRegex(NotImplementedError, "'taken' is there, with 20 tokens"):
            self.model(ids[:, :9], past_key_values=cache)
        self.assertEqual((cache.get_seq_length(), cache.sessions[0].refresh()), (20, 20))
        got = self.model(ids[:, 20:], past_key_values=cache).logits
        self.same_logits(self.logits("llama", ids)[:, 20:], got)
        cache.reset()

    def test_a_client_that_is_attached_again(self):
        """Sessions are closed then: the cache says so until it is reset, and begins anew."""
        ids, want = prompt(9, 16), self.logits("llama", prompt(9, 16))
        for step, reset in ((9, False), (300, False), (9, True)):
            cache = self.cache(self.model)
            self.model(prompt(step), past_key_values=cache)
            self.model(prompt(3), past_key_values=cache)
            if reset:
                cache.reset()
            self.client.reattach()
            if not reset:
                for call in (lambda: self.model(ids, past_key_values=cache),
                             lambda: cache.crop(-1), lambda: copy.deepcopy(cache)):
                    with self.assertRaisesRegex(ValueError, r"reattach\(\): reset\(\) the cache"):
                        call()
                cache.reset()
            for _ in range(2):
                self.same_logits(want, self.model(ids, past_key_values=cache).logits)
                cache.reset()
            cache.close()


class Shared(Case):
    """The client of caches that are given none."""

    def test_its_daemon_ended(self):
        """Caches that are made afterwards have a new client, of the next daemon; its own goes on
        saying so to those before."""
        daemon, model, ids = e2e_rig.Daemon(), models("llama")[1], prompt(9)
        with unittest.mock.patch.object(kvq.transformers.clients, "_shared", None), \
                unittest.mock.patch.dict(os.environ, KVQ_RUNTIME_DIR=daemon.directory):
            first, other = KvqCache(model, "16bit"), KvqCache(model, "16bit")
            model(ids, past_key_values=first)
            self.assertIs(first.state.rows.client, other.state.rows.client)
            daemon.stop()
            again = functools.partial(model, ids, past_key_values=first)
            for call in (again, again, lambda: first.crop(-1)):
                error = self.fails(kvq.Code.E_DISCONNECTED, call)
                self.assertRegex(str(error), "; a new KvqCache connects again$")
                # Whose user has neither.
                self.assertNotRegex(str(error), "reattach|Local")
            os.environ["KVQ_RUNTIME_DIR"] = self.daemon.directory
            made = [KvqCache(model, "16bit") for _ in range(2)]
            for cache in made:
                self.same_logits(self.logits("llama", ids),
                                 model(ids, past_key_values=cache).logits)
            new, = {cache.state.rows.client for cache in made}
            self.assertIsNot(new, first.state.rows.client)
            new.close()
            # The ended daemon's memory goes with the last cache of it.
            self.fails(kvq.Code.E_DISCONNECTED, first.close)
            self.assertTrue(other.state.rows.client.pointer)
            other.close()
            self.assertFalse(other.state.rows.client.pointer)
            with self.assertRaises(kvq.Error):  # a client that is given is not replaced
                client = self.daemon.client()
                with unittest.mock.patch.object(client, "queue", side_effect=kvq.Error(
                        kvq.Code.E_DISCONNECTED, "gone")):
                    KvqCache(model, "16bit", client=client)
            client.close()

    def test_an_answer_whose_daemon_is_gone(self):
        """An answer that is there is given, and an exception that is under way goes on; that the
        cache could not be given back is a warning."""
        for ends in (True, False):
            daemon, model, ids = e2e_rig.Daemon(), copy.deepcopy(models("llama")[1]), prompt(9)

            def kill(*_, ends=ends, daemon=daemon, **__):
                daemon.kill()
                daemon.stop()
                if not ends:
                    raise KeyboardInterrupt
                return torch.ones(1, dtype=torch.bool)
            with daemon.client() as client:
                attach(model, "16bit", client=client, reuse=False)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    with contextlib.nullcontext() if ends else self.assertRaises(KeyboardInterrupt):
                        answer = model.generate(ids, max_new_tokens=5, do_sample=False,
                                                stopping_criteria=[kill])
                        self.assertEqual(answer.shape[1], 10)
                self.assertTrue(any("could not be given back" in str(w.message) for w in said),
                                [str(w.message) for w in said])
            gc.collect()

    def test_a_forked_process(self):
        """Has a client of its own, cannot use its parent's cache, and ends nothing of it."""
        model, ids = models("llama")[1], prompt(9)
        with unittest.mock.patch.object(kvq.transformers.clients, "_shared", None), \
                unittest.mock.patch.dict(os.environ, KVQ_RUNTIME_DIR=self.daemon.directory):
            cache = KvqCache(model, "16bit")
            model(ids, past_key_values=cache)
            child = os.fork()
            if not child:
                try:
                    own = KvqCache(model, "16bit").state.rows
                    own.open(1, torch.float32)
                    self.assertIsNot(own.client, cache.state.rows.client)
                    self.assertEqual(own.sessions[0].refresh(), 0)
                    self.assertRaisesRegex(ValueError, "was forked from", cache.reset)
                    cache.close()
                    del cache
                    gc.collect()
                    os._exit(0)
                finally:
                    os._exit(1)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(cache.sessions[0].refresh(), 9)
            cache.close()
            cache.state.rows.client.close()


class Examples(unittest.TestCase):
    """Programs of examples/, without a model."""

    def test_a_file_in_the_current_folder(self):
        """A .gguf is looked for in its folder, also where its name comes without one."""
        asked = {}

        def from_pretrained(name, gguf_file=None, **_):
            asked["model"] = name, gguf_file
            raise ZeroDivisionError
        for name, rest in (("chat", []), ("session", ["nobody", "?"])):
            path = os.path.join(e2e_rig.ROOT, "examples", f"transformers_{name}.py")
            main = runpy.run_path(path)["main"]
            with unittest.mock.patch.object(transformers.AutoTokenizer, "from_pretrained",
                                            from_pretrained):
                for given, want in (("m.gguf", (os.getcwd(), "m.gguf")), ("org/m", ("org/m", None)),
                                    ("/a/m.gguf", ("/a", "m.gguf"))):
                    self.assertRaises(ZeroDivisionError, main, given, *rest)
                    self.assertEqual(asked["model"], want)


class Letters:
    """A tokenizer whose ids are letters; "|" ends a turn. Each id that a model gives is a letter of
    its own."""
    eos_token_id = 2

    def __call__(self, text, **_):
        return {"input_ids": [2 if c == "|" else ord(c) % 256 for c in text]}

    def decode(self, ids, **_):
        return "".join(chr(256 + i) for i in ids if i != 2)

    def apply_chat_template(self, said, add_generation_prompt=False, **_):
        turns = "".join(f"{turn['role']}: {turn['content']}|" for turn in said)
        return turns + "assistant: " * add_generation_prompt


class Thinking(Letters):
    """Its template shows the thinking of the answer alone that ends the chat."""

    def apply_chat_template(self, said, **options):
        last = len(said) - 1
        return super().apply_chat_template(
            [{**turn, "content": "hm, hm, hm, hm. " * (i == last and turn["role"] == "assistant") +
              turn["content"]} for i, turn in enumerate(said)], **options)


class Saved(Case):
    """Sessions on disk."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvq-")
        cls.daemon = e2e_rig.Daemon(storage_dir=cls.folder.name)

    @classmethod
    def tearDownClass(cls):
        super().tearDownClass()
        cls.folder.cleanup()

    def ask(self, tokenizer, name, *questions):
        """Asks the example, one call a question. The file where the chat is, and with which ids
        each call opened its cache."""
        main = runpy.run_path(os.path.join(e2e_rig.ROOT, "examples",
                                           "transformers_session.py"))["main"]
        name, came = os.path.join(self.folder.name, name), []

        def cache(model, *arguments, **options):
            came.append(list(options["prefix"]))
            return KvqCache(model, *arguments, **options, client=self.client)
        with unittest.mock.patch.object(transformers.AutoTokenizer, "from_pretrained",
                                        lambda *_, **__: tokenizer), \
                unittest.mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained",
                                           lambda *_, **__: models("llama")[1]), \
                unittest.mock.patch.object(kvq.transformers, "KvqCache", cache), \
                contextlib.redirect_stdout(io.StringIO()):
            for question in questions:
                main("letters", name, question)
        return f"{name}.json", came

    def test_the_example_of_a_chat(self):
        """A turn whose answer was cut stands behind the mark that ends an answer."""
        tokenizer = Letters()
        path, came = self.ask(tokenizer, "alice", "When?", "And on Sundays?")
        with open(path, encoding="utf-8") as kept:
            ids, said = json.load(kept)
        self.assertEqual(ids[-1], tokenizer.eos_token_id)
        self.assertEqual(ids, tokenizer(tokenizer.apply_chat_template(said))["input_ids"])
        text = tokenizer.apply_chat_template(said[:-1], add_generation_prompt=True)
        self.assertEqual(came[1], tokenizer(text)["input_ids"])

    def test_the_example_with_a_template_that_changes_turns(self):
        """It says so instead of losing the question, and leaves the chat as it was."""
        path, _ = self.ask(Thinking(), "bob", "When?")
        with open(path, encoding="utf-8") as file:
            kept = file.read()
        with self.assertRaisesRegex(SystemExit, "bob cannot go on: this model's chat template"):
            self.ask(Thinking(), "bob", "And on Sundays?")
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read(), kept)

    def test_nothing_to_save(self):
        """A save of nothing is told of, whatever the reason; so is one from another thread while a
        forward is under way."""
        model, ids = models("llama")[1], prompt(9)
        unnamed = self.cache(model)
        self.assertRaisesRegex(ValueError, "has no name", unnamed.save)
        model(ids, past_key_values=unnamed)
        self.assertRaisesRegex(ValueError, "has no name", unnamed.save)
        cache = self.cache(model, name="not saved", on_detach="drop")
        model(ids, past_key_values=cache)
        cache.state.owner.take()
        with self.assertRaises(RuntimeError), ThreadPoolExecutor() as other:
            other.submit(cache.save).result()
        cache.state.owner.leave()
        cache.save()
        cache.reset()
        self.assertRaisesRegex(ValueError, "no session 'not saved' since", cache.save)
        model(ids, past_key_values=cache)
        cache.sessions[0].close()
        self.assertRaisesRegex(ValueError, "sessions of this cache are closed", cache.save)
        cache.close()
        self.assertRaisesRegex(ValueError, "the cache, or .* is closed", cache.save)

    def test_another_daemon_goes_on(self):
        eager, model = models("llama")
        ids = prompt(300)
        with self.cache(model, name="saved", on_detach="save") as cache:
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=6, do_sample=False)
            cache.save()
        self.client.close()
        self.daemon.stop()
        type(self).daemon = e2e_rig.Daemon(storage_dir=self.folder.name)
        with self.daemon.client() as client:
            cache = KvqCache(model, "16bit", client=client, name="saved")
            self.assertEqual(cache.get_seq_length(), 305)
            got = model.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
        self.same_tokens(eager, eager.generate(ids, max_new_tokens=9, do_sample=False), got)
