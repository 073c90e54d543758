# SPDX-License-Identifier: Apache-2.0
"""attach(), and `transformers serve` over it; transformers_test.py runs these."""
import contextlib
import copy
import inspect
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock
import urllib.error
import urllib.request
import warnings

import e2e_rig
from e2e_rig import kvq
from transformers_rig import SIZES, Case, models, prompt

import torch
import transformers
from kvq.eval.sides import Side
from kvq.transformers import KvqCache, attach, detach, serve
from kvq.transformers.generate import _Asked as Asked

STEPS = {"max_new_tokens": 8, "do_sample": False}


class Attached(Case):
    """generate() of an attached model, without a cache of the caller's."""
    DAEMON = {"attention": "exact"}

    def setUp(self):
        super().setUp()
        self.eager, self.model = models("llama")
        attach(self.model, "16bit", client=self.client, salt=self.id())
        self.addCleanup(detach, self.model)

    def found(self):
        """Tokens that sessions have begun with so far."""
        return sum(p["hit_tokens"] for p in self.daemon.ctl("prefix", "status"))

    def check(self, ids, **options):
        options = {**STEPS, **options}
        got = self.model.generate(ids, **options)
        self.same_tokens(self.eager, self.eager.generate(ids, **options), got,
                         options.get("attention_mask"))
        return got

    def test_begins_with_what_is_there(self):
        """The second call computes what is new, and its tokens are the same."""
        ids = prompt(300)
        before = self.found()
        first = self.check(ids)
        self.assertEqual(self.found() - before, 0)
        self.check(ids)
        self.assertEqual(self.found() - before, 256)
        self.check(torch.cat([first, prompt(9, 3)], 1))
        self.assertEqual(self.found() - before, 512)

    def test_without_reuse(self):
        attach(self.model, "16bit", reuse=False, client=self.client)
        ids, before = prompt(300), self.found()
        for _ in range(2):
            self.check(ids)
        self.assertEqual(self.found(), before)

    def test_rows_and_beams(self):
        """Calls of several rows have caches without a prefix."""
        ids, mask = prompt(200, rows=2), torch.ones(2, 200, dtype=torch.long)
        mask[0, :5] = 0
        self.check(ids, attention_mask=mask)
        self.check(ids[:1], num_beams=2)
        self.check(ids[:1], attention_mask=mask[:1])
        self.check(ids[:1], num_return_sequences=2, num_beams=2)
        config = transformers.GenerationConfig(num_beams=2, max_new_tokens=4, do_sample=False)
        self.assertEqual(self.model.generate(ids[:1], config).shape, (1, 204))

    def test_closes_its_caches(self):
        """But for the one that the output holds."""
        ids, before = prompt(40), len(self.daemon.ctl("session", "list"))
        self.model.generate(ids, **STEPS)
        held = self.model.generate(ids, return_dict_in_generate=True, **STEPS)
        self.assertIsInstance(held.past_key_values, KvqCache)
        self.assertEqual(len(self.daemon.ctl("session", "list")), before + 1)

        def fail(*_, **__):
            raise ZeroDivisionError
        with self.assertRaises(ZeroDivisionError):
            self.model.generate(ids, stopping_criteria=[fail], **STEPS)
        self.assertEqual(len(self.daemon.ctl("session", "list")), before + 1)
        held.past_key_values.close()
        self.assertEqual(len(self.daemon.ctl("session", "list")), before)

    def test_a_cache_of_the_callers(self):
        """Is used as it is; one by another name is refused as ever, each time, and leaves nothing
        in the model."""
        ids, model = prompt(40), copy.deepcopy(self.model)
        with self.cache(self.model) as cache:
            self.check_with(ids, cache)
            self.assertEqual(cache.get_seq_length(), 47)
        for _ in range(2):
            for text, options in (("use_cache=False", {"use_cache": False}),
                                  ("cache_implementation='static'",
                                   {"cache_implementation": "static"}),
                                  ("guidance_scale=1.5", {"guidance_scale": 1.5})):
                with self.assertRaisesRegex(NotImplementedError,
                                            f"{text}, of a model that attach|{text}: classifier"):
                    model.generate(ids, **STEPS, **options)
        self.same_tokens(self.eager, self.eager.generate(ids, **STEPS),
                         model.generate(ids, guidance_scale=1.0, **STEPS))
        model.set_attn_implementation("eager")
        for options in ({"use_cache": False}, {"cache_implementation": "static"}):
            self.same_tokens(self.eager, self.eager.generate(ids, **STEPS),
                             model.generate(ids, **STEPS, **options))

    def test_a_name_that_stands_for_no_cache(self):
        """Configurations of Gemma on the hub name the cache "hybrid", and assisted decoding of
        transformers 4 asks assistants for one by another name. attach() passes over these in the
        model's configuration and in a call's, as pipelines hand it over, and in its options."""
        ids = prompt(40, 8)
        want = self.eager.generate(ids, **STEPS)
        with unittest.mock.patch.object(self.model.generation_config, "cache_implementation",
                                        "hybrid"):
            self.same_tokens(self.eager, want, self.model.generate(ids, **STEPS))
        for name in ("hybrid", "dynamic_full"):
            config = transformers.GenerationConfig(**STEPS, pad_token_id=0)
            config.cache_implementation = name
            self.same_tokens(self.eager, want, self.model.generate(ids, config))
            self.assertEqual(config.cache_implementation, name)  # it is the caller's
            self.same_tokens(self.eager, want, self.model.generate(
                ids, **STEPS, cache_implementation=name))

    def test_assisted(self):
        """A call that drafts has the whole prompt computed, whatever is there of it, and its tokens
        are the same each time. Prompt lookup of transformers 4 goes past max_new_tokens where all
        of a draft at the end is right, with any cache: by up to 2 of a draft's 3 tokens."""
        ids = prompt(300, 10)
        assistant = copy.deepcopy(self.model)  # is attached, and has prefixes of its own
        for tensor in assistant.parameters():
            tensor.data += torch.randn_like(tensor) * 0.004
        self.check(ids)
        greedy, lookup = self.eager.generate(ids, **STEPS), {"prompt_lookup_num_tokens": 3,
                                                             "eos_token_id": 2}
        looked_up = self.eager.generate(ids, **STEPS, **lookup)
        self.same_tokens(self.eager, greedy, looked_up[:, :308])
        self.assertIn(looked_up.shape[1] - 308,
                      (0, 1, 2) if transformers.__version__ < "5" else (0,))
        for want, options in ((looked_up, lookup), (greedy, {"assistant_model": assistant})):
            for _ in range(2):
                before = self.found()
                self.same_tokens(self.eager, want, self.model.generate(ids, **STEPS, **options))
                self.assertLessEqual(self.found() - before, 256)  # the assistant's

    def test_an_early_exit(self):
        """Drafts of the model's own first layers are served, and where one fails, the model has
        all of its layers again, which transformers does not see to."""
        ids, options = prompt(40, 11), {**STEPS, "assistant_early_exit": 1}
        want = self.eager.generate(ids, **STEPS)
        for cache in ({}, {"past_key_values": self.cache(self.model)}):
            self.same_tokens(self.eager, want, self.model.generate(ids, **options, **cache))
        with unittest.mock.patch.object(self.model.model.layers[0], "forward",
                                        side_effect=ZeroDivisionError):
            self.assertRaises(ZeroDivisionError, self.model.generate, ids, **options)
        self.assertEqual(self.model.config.num_hidden_layers, SIZES["num_hidden_layers"])
        self.check(ids)

    def test_more_than_ids(self):
        """A call whose tokens have another K than their ids say, because of positions, types or
        images, begins with nothing and leaves nothing for others."""
        ids, before = prompt(300, 9), self.found()
        for name, value in (("position_ids", torch.arange(300)[None] + 7),
                            ("token_type_ids", torch.ones_like(ids)),
                            ("pixel_values", torch.ones(1, 3, 8, 8)),
                            ("mm_encoder_outputs", {"image": {"pooler_output": ids}})):
            asked = Asked(self.model, ids, None, {name: value})
            self.assertIsNone(asked.prompt(), name)
        for given in ({}, {"eos_token_id": torch.tensor([2])}, {"attention_mask": ids > 0},
                      {"mm_encoder_outputs": {}, "streamer": None}):
            self.assertIs(Asked(self.model, ids, None, given).prompt(), ids)
        self.model.generate(ids, position_ids=torch.arange(300)[None] + 7, **STEPS)
        self.check(ids)
        self.assertEqual(self.found(), before)

    def test_no_cache_of_the_callers(self):
        """One that is given as None, by any of its names, is none."""
        for names in (["past_key_values"], ["cache"], ["cache", "past_key_values"]):
            ids = prompt(40, len(names))
            got = self.model.generate(ids, **STEPS, **dict.fromkeys(names))
            self.same_tokens(self.eager, self.eager.generate(ids, **STEPS), got)

    def test_the_name_of_the_cache(self):
        """Calls of ours and of the examples use the name that this transformers has."""
        ids, names = prompt(40), inspect.signature(type(self.eager).forward).parameters
        name = kvq.transformers.cache_name(self.model)
        self.assertIn(name, names)
        self.assertEqual(name == "cache", "past_key_values" not in names)
        side = Side(unittest.mock.Mock(reference=self.eager))
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            self.model.generate(ids, **STEPS)
            side.begin()
            self.assertEqual(side.forward(ids[0]).shape[0], 40)

    def test_an_interrupt(self):
        """In a forward: an attached model's generate() leaves the caller's cache as it was, and
        free for other threads; so does abort() behind a forward."""
        cache, ids, refused = self.cache(self.model), prompt(40), []
        eager = self.eager(ids).logits

        def interrupt(*_):
            raise KeyboardInterrupt

        def other():
            try:
                cache.crop(0)
            except RuntimeError as error:
                refused.append(str(error))

        def in_a_thread():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return len(refused)
        named = {kvq.transformers.cache_name(self.model): cache}
        hook = self.model.model.layers[1].mlp.register_forward_hook(interrupt)
        self.assertRaises(KeyboardInterrupt, self.model.generate, ids, **STEPS, **named)
        self.assertEqual((in_a_thread(), cache.state.rows.step), (0, None))
        self.assertRaises(KeyboardInterrupt, self.model, ids, **named)
        self.assertEqual(in_a_thread(), 1)
        self.assertIn("abort()", refused[0])
        cache.abort()
        self.assertEqual((in_a_thread(), cache.state.rows.step), (1, None))
        self.assertRaises(KeyboardInterrupt, self.model.generate, ids, **STEPS)
        hook.remove()
        self.assertEqual(cache.get_seq_length(), 0)
        self.same_logits(eager, self.model(ids, **named).logits)
        cache.abort()  # of what is no forward, nothing
        self.assertEqual(cache.get_seq_length(), 40)

    def check_with(self, ids, cache):
        got = self.model.generate(ids, past_key_values=cache, **STEPS)
        self.same_tokens(self.eager, self.eager.generate(ids, **STEPS), got)

    def test_a_copy(self):
        """Of an attached model generates by its own weights, also when the model is detached."""
        twin = copy.deepcopy(self.model)
        twin.lm_head.weight.data.neg_()
        eager = copy.deepcopy(self.eager)
        eager.lm_head.weight.data.neg_()
        detach(self.model)
        ids = prompt(40)
        self.same_tokens(eager, eager.generate(ids, **STEPS), twin.generate(ids, **STEPS))
        self.assertEqual(type(twin).__name__, type(self.model).__name__)

    def test_detach(self):
        attach(self.model, "oscar2", client=self.client)  # in place of the first
        detach(self.model)
        self.assertIs(type(self.model), type(self.eager))
        with self.assertRaises(NotImplementedError):
            self.model.generate(prompt(4), **STEPS)
        detach(self.model)

    def test_refused(self):
        for text, options in (("'name'", {"name": "x"}), ("'prefix'", {"prefix": [1]}),
                              ("colour", {"colour": 1})):
            with self.assertRaises(TypeError) as caught:
                attach(self.model, "16bit", **options)
            self.assertIn(text, str(caught.exception))
        with self.assertRaises(NotImplementedError):
            attach(self.eager, "16bit")
        attach(self.model, "innerq-base", client=self.client)
        with self.assertRaises(kvq.Error) as caught:
            self.model.generate(prompt(200), **STEPS)
        if hasattr(caught.exception, "__notes__"):
            self.assertIn("reuse=False", caught.exception.__notes__[0])
        attach(self.model, "innerq-base", reuse=False, client=self.client)
        self.assertEqual(self.model.generate(prompt(200), **STEPS).shape, (1, 208))


def save_model(folder):
    """A model whose tokens are bytes, and a tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models as kinds, pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(kinds.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n" \
                              "{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {**SIZES, "vocab_size": len(words), "eos_token_id": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**sizes), attn_implementation="eager").eval()
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    return model, tokenizer


def has_server():
    try:
        import fastapi, openai, uvicorn  # noqa: F401, E401
        from transformers.cli.serving import model_manager  # noqa: F401
        return True
    except ImportError:
        return False


class Interrupted(Case):
    """Ctrl-C within the calls of the library that begin and commit a step, before or behind what
    they do: the cache goes on with the tokens that are stored."""

    def interrupting(self, name, behind, end=lambda: None):
        """Patches a function of the library's."""
        function = getattr(kvq._ffi.lib, name)

        def call(*arguments):
            if behind:
                end()
                function(*arguments)
            raise KeyboardInterrupt
        return unittest.mock.patch.object(kvq._ffi.lib, name, call)

    def goes_on(self, model, cache, ids, seen):
        cache.abort()
        self.assertEqual(cache.get_seq_length(), seen)
        got = model(ids[:, seen:seen + 5], past_key_values=cache).logits
        self.same_logits(self.logits("llama", ids[:, :seen + 5])[:, seen:], got)
        self.assertEqual([s.refresh() for s in cache.sessions], [seen + 5] * len(ids))

    def test_begin_and_commit(self):
        model, ids = models("llama")[1], prompt(900)
        for rows, names, n in ((1, ("kvq_local_begin", "kvq_local_end"), 3),
                               (2, ("kvq_local_begin", "kvq_local_end"), 3),
                               (1, ("kvq_step_begin", "kvq_step_end"), 300)):
            for name in names:
                for behind in (False, True):
                    with self.subTest(name, rows=rows, behind=behind), self.cache(model) as cache:
                        some = ids.repeat(rows, 1)
                        model(some[:, :10], past_key_values=cache)
                        with self.interrupting(name, behind):
                            self.assertRaises(KeyboardInterrupt, model, some[:, 10:10 + n],
                                              past_key_values=cache)
                        stored = behind and name.endswith("end")
                        self.goes_on(model, cache, some, 10 + n if stored else 10)

    def test_begin_with_ids(self):
        model, ids = models("llama")[1], prompt(900, 3)
        for behind in (False, True):
            with self.cache(model, prefix=ids[:, :600]) as cache:
                with self.interrupting("kvq_step_begin_ids", behind):
                    self.assertRaises(KeyboardInterrupt, model, ids[:, :600],
                                      past_key_values=cache)
                self.assertEqual(cache.get_seq_length(), 0)
                self.goes_on(model, cache, ids, 0)

    def test_behind_the_commit(self):
        """When the cache has taken the columns in, some of which are pads, and while it settles."""
        model, ids = models("llama")[1], prompt(60, rows=2)
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[0, :4] = 0
        rows = kvq.transformers.rows.Rows
        count, settle = rows._count, rows._settle

        def then(function):
            def call(*arguments):
                function(*arguments)
                raise KeyboardInterrupt
            return call
        want = self.logits("llama", ids, attention_mask=mask)[:, 30:]
        for patches in ({"_count": then(count)},
                        {"_count": then(count), "_settle": then(settle)}):
            with self.cache(model) as cache:
                model(ids[:, :10], past_key_values=cache, attention_mask=mask[:, :10])
                with unittest.mock.patch.multiple(rows, **patches):
                    self.assertRaises(KeyboardInterrupt, model, ids[:, 10:30],
                                      past_key_values=cache, attention_mask=mask[:, :30])
                cache.abort()
                self.assertEqual(cache.get_seq_length(), 30)
                got = model(ids[:, 30:], past_key_values=cache, attention_mask=mask).logits
                self.same_logits(want, got)

    def test_some_rows_have_committed(self):
        """These go back."""
        model, ids = models("llama")[1], prompt(60, rows=2)
        cache = self.cache(model)
        model(ids[:, :10], past_key_values=cache)
        other = cache.sessions[1].handle
        with self.interrupting("kvq_local_end", True, lambda: self.client.control(
                kvq._ffi.lib.kvq_session_close, other)):
            self.assertRaises(KeyboardInterrupt, model, ids[:, 10:14], past_key_values=cache)
        cache.abort()
        self.assertEqual((cache.get_seq_length(), cache.sessions[0].refresh()), (10, 10))
        cache.batch_select_indices(torch.tensor([0]))
        self.goes_on(model, cache, ids[:1], 10)


@unittest.skipUnless(has_server(), "transformers[serving] of version 5 is not installed")
class Server(Case):
    """Chats over HTTP have eager's tokens, and a chat's next turn begins with the last one's."""
    DAEMON = {"attention": "exact"}

    def setUp(self):
        super().setUp()
        self.process = None
        self.folder = tempfile.mkdtemp(prefix="kvq-")
        self.eager, self.tokenizer = save_model(self.folder)

    def tearDown(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            self.process.stderr.close()
        shutil.rmtree(self.folder)
        super().tearDown()

    def start(self, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "KVQ_RUNTIME_DIR": self.daemon.directory,
                       "HF_HUB_OFFLINE": "1",
                       "PYTHONPATH": os.path.join(e2e_rig.ROOT, "client", "python")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvq.transformers.serve", self.folder, "--host", "127.0.0.1",
             "--port", str(port), "--log-level", "info", *options], env=environment,
            stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=e2e_rig.die_with_parent)
        self.said, running = [], threading.Event()

        def read():
            for line in self.process.stderr:
                self.said.append(line)
                if "Uvicorn running on" in line:
                    running.set()
        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        self.assertTrue(running.wait(5 * e2e_rig.BOUND), "".join(self.said))
        self.address = f"http://127.0.0.1:{port}/v1/chat/completions"

    def ask(self, messages, tokens=12):
        body = {"model": self.folder, "messages": messages, "temperature": 0,
                "max_tokens": tokens, "stream": False}
        request = urllib.request.Request(self.address, json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=e2e_rig.BOUND) as answer:
                return json.load(answer)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            self.fail(f"{error}\n{''.join(self.said)}")

    def should(self, messages, tokens=12):
        ids = self.tokenizer.apply_chat_template(messages, return_tensors="pt",
                                                 add_generation_prompt=True)
        ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
        done = self.eager.generate(ids, max_new_tokens=tokens, do_sample=False)
        return self.tokenizer.decode(done[0, ids.shape[1]:], skip_special_tokens=True)

    def test_chat(self):
        self.start("--kvq-format", "16bit")
        messages = [{"role": "user", "content": "Say in many words what a cache is. " * 12}]
        for _ in range(2):
            answer = self.ask(messages)
            self.assertEqual(answer, self.should(messages))
            messages += [{"role": "assistant", "content": answer},
                         {"role": "user", "content": "And then?"}]
        found = self.daemon.ctl("prefix", "status")
        self.assertEqual(sum(p["hit_tokens"] for p in found), 384)

    def test_words(self):
        """What cannot be is refused before a model is loaded."""
        for words, text in (("--continuous-batching", "leave it out"),
                            ("--attn-implementation=sdpa", "attention is kvq's"),
                            ("--kvq-attention slow", "invalid choice")):
            said = io.StringIO()
            with contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as ended:
                serve.parse(["model", *words.split()])
            self.assertIn(text, said.getvalue())
            self.assertEqual(ended.exception.code, 2)
        ours, rest = serve.parse("model --kvq-format oscar2 --port 80".split())
        self.assertEqual((ours.kvq_format, ours.kvq_no_reuse), ("oscar2", False))
        self.assertEqual(rest, ["model", "--port", "80", "--device", "cpu"])
        self.assertEqual(serve.parse(["--device=cuda"])[1], ["--device=cuda"])

    def test_another_server(self):
        """A transformers whose server has another inside."""
        with unittest.mock.patch.dict(sys.modules,
                                      {"transformers.cli.serving.model_manager": None}), \
                self.assertRaises(SystemExit) as ended:
            serve.main(["model"])
        self.assertIn("transformers[serving]==5.23", str(ended.exception))
