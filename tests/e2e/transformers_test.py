#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq.transformers: models of all families, made here with random weights, against the same
models with transformers' own eager attention and its own cache.

    tests/e2e/transformers_test.py [NAME]...

Needs PyTorch and transformers; says so and ends well where they are missing. KVQ_BIN_DIR says where
kvqd is, KVQ_SMOLLM2 where a GGUF file of SmolLM2-135M-Instruct is.
"""
import contextlib
import copy
import gc
import os
import subprocess
import sys
import threading
import unittest
import unittest.mock

import e2e_rig
from e2e_rig import kvq
from python_hints import faults
from transformers_rig import (  # before torch: says if it is missing
    FAMILIES, TIE, Case, models, prompt)
from transformers_generate import Attached, Interrupted, Server
from transformers_refused import Refused
from transformers_sessions import Examples, Saved, Sessions, Shared
from transformers_torch import AtHand, TensorsOfALayer, TensorsOnTheHost, WithoutTorch

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from kvq.openmp import torch_threads
from kvq.transformers import KvqCache

SMOLLM2 = os.environ.get("KVQ_SMOLLM2")


class Families(Case):
    """Each family in each mode; see the functions below, named mode_*."""


def mode_greedy(test, family):
    eager, want, got, cache = test.generate(family, prompt(12), count=40)
    test.same_tokens(eager, want, got)
    test.assertEqual(cache.get_seq_length(), want.shape[1] - 1)
    test.assertEqual(cache.sessions[0].refresh(), want.shape[1] - 1)


def mode_left_padding(test, family):
    """Pads are no tokens: sessions are as long as their rows without them."""
    ids, mask = prompt(22, rows=3), torch.ones(3, 22, dtype=torch.long)
    for row, pads in ((0, 9), (2, 20)):
        mask[row, :pads] = 0
        ids[row, :pads] = 0
    eager, want, got, cache = test.generate(family, ids, mask=mask)
    test.same_tokens(eager, want, got, mask)
    test.assertEqual([s.tokens for s in cache.sessions], [36, 45, 25])


def mode_beams(test, family):
    eager, want, got, cache = test.generate(family, prompt(12), num_beams=3)
    if not torch.equal(want, got):  # a tie between beams is one between their sums
        scores = [float(eager(x).logits[0, :-1].log_softmax(-1).gather(
            1, x[0, 1:, None])[11:].sum()) for x in (want, got)]
        test.assertLess(abs(scores[0] - scores[1]), TIE)
    test.assertEqual(len(cache.sessions), 3)


def mode_prompt_lookup(test, family):
    ids = prompt(9).repeat(1, 3)
    eager, want, got, _ = test.generate(family, ids, prompt_lookup_num_tokens=3, eos_token_id=2)
    test.same_tokens(eager, want, got)


def mode_chunked_prefill(test, family):
    eager, want, got, _ = test.generate(family, prompt(45), prefill_chunk_size=7)
    test.same_tokens(eager, want, got)


def mode_second_turn(test, family):
    eager, _, got, cache = test.generate(family, prompt(12))
    ids = torch.cat([got, prompt(9, 5)], 1)
    eager, want, got, _ = test.generate(family, ids, cache=cache)
    test.same_tokens(eager, want, got)


def mode_crop(test, family):
    """What is cropped is as if it had never been."""
    _, model = models(family)
    ids, other = prompt(40), prompt(14, 3)
    cache = test.cache(model)
    model(ids, past_key_values=cache)
    cache.crop(tokens=-9)
    test.assertEqual(cache.get_seq_length(), 31)
    got = model(other, past_key_values=cache).logits
    want = test.logits(family, torch.cat([ids[:, :31], other], 1))[:, 31:]
    test.same_logits(want, got)


def mode_deepcopy(test, family):
    """A copy is a fork: both go on by themselves."""
    _, model = models(family)
    ids = prompt(40)
    cache = test.cache(model)
    model(ids, past_key_values=cache)
    fork = copy.deepcopy(cache)
    for seed, one in ((1, cache), (2, fork), (3, cache)):
        more = prompt(10, seed)
        mine = torch.cat([ids, prompt(10, 1), more], 1) if seed == 3 else torch.cat([ids, more], 1)
        got = model(more, past_key_values=one).logits
        test.same_logits(test.logits(family, mine)[:, -10:], got)


def mode_long(test, family):
    """Prompts of more than 512 tokens, with and without tokens before them, and a batch of two."""
    _, model = models(family)
    for rows, pieces in ((1, (600, 1, 530)), (2, (20, 300, 3))):
        ids = prompt(sum(pieces), rows=rows)
        mask = torch.ones_like(ids)
        mask[0, :7 * (rows - 1)] = 0
        want, cache, at = test.logits(family, ids, attention_mask=mask), test.cache(model), 0
        for n in pieces:
            got = model(ids[:, at:at + n], attention_mask=mask[:, :at + n],
                        past_key_values=cache).logits
            shown = mask[:, at:at + n].bool()
            test.same_logits(want[:, at:at + n][shown], got[shown])
            at += n


def _add_modes():
    for family in FAMILIES:
        for name, mode in list(globals().items()):
            if name.startswith("mode_"):
                def test(self, family=family, mode=mode):
                    if not hasattr(transformers, FAMILIES[family][0]):
                        self.skipTest(f"this transformers has no {FAMILIES[family][0]}")
                    mode(self, family)
                test.__doc__ = mode.__doc__
                setattr(Families, f"test_{family}_{name[5:]}", test)


_add_modes()


class Llama(Case):
    """What does not depend on the family."""

    def test_dtypes(self):
        """Models in 16 bits: logits as near to eager's as their own rounding."""
        for dtype, near in ((torch.float16, 0.02), (torch.bfloat16, 0.15)):
            eager, model = models("llama", dtype)
            ids = prompt(60)
            cache = self.cache(model)
            got = [model(ids[:, :50], past_key_values=cache).logits]
            got += [model(ids[:, i:i + 1], past_key_values=cache).logits for i in range(50, 60)]
            self.same_logits(eager(ids).logits, torch.cat(got, 1), near)
            self.assertEqual(cache.sessions[0].info()["format"],
                             {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype])

    def test_quantized(self):
        """A format of few bits is what the session has, and its logits are near."""
        for family in ("llama", "phi3_mini"):
            for form, near in (("oscar4", 0.995), ("oscar2", 0.9)):
                with self.subTest(family=family, form=form):
                    self.quantized(family, form, near)

    def quantized(self, family, form, near):
        eager, model = models(family)
        ids = prompt(700)
        want = eager(ids).logits[:, 600:]
        cache = self.cache(model, form)
        model(ids[:, :600], past_key_values=cache)
        got = torch.cat([model(ids[:, i:i + 1], past_key_values=cache).logits
                         for i in range(600, 700)], 1)
        alike = float(torch.corrcoef(torch.stack([want.flatten(), got.flatten()]))[0, 1])
        self.assertGreater(alike, near)
        self.assertLess(alike, 0.99999, "nothing was quantized")
        self.assertLess(cache.sessions[0].info()["bits_per_value"], 7)  # 6.75: 96 stored as 128

    def test_a_failed_forward(self):
        """Leaves no step open, and the cache as it was."""
        _, model = models("llama")
        ids = prompt(900)
        for first, n in ((10, 3), (10, 600)):
            cache = self.cache(model)
            model(ids[:, :first], past_key_values=cache)

            def fail(*_):
                raise ZeroDivisionError
            hook = model.model.layers[1].mlp.register_forward_hook(fail)
            with self.assertRaises(ZeroDivisionError):
                model(ids[:, first:first + n], past_key_values=cache)
            hook.remove()
            self.assertEqual(cache.get_seq_length(), first)
            session = cache.sessions[0]
            with self.queue.step([session], 1) as step:  # nobody else has one open
                step.abort()
            got = model(ids[:, first:first + n], past_key_values=cache).logits
            self.same_logits(self.logits("llama", ids[:, :first + n])[:, first:], got)

    def test_pads_in_the_middle(self):
        """The second turn of a batch may have pads of its own."""
        _, model = models("llama")
        ids, mask = prompt(20, rows=2), torch.ones(2, 20, dtype=torch.long)
        mask[0, 10:14] = 0
        positions = (mask.cumsum(1) - 1).clamp(0)
        want = self.logits("llama", ids, attention_mask=mask, position_ids=positions)
        cache = self.cache(model)
        for at, end in ((0, 10), (10, 12), (12, 20)):
            got = model(ids[:, at:end], attention_mask=mask[:, :end],
                        position_ids=positions[:, at:end], past_key_values=cache).logits
            shown = mask[:, at:end].bool()
            self.same_logits(want[:, at:end][shown], got[shown])
        cache.crop(-9)
        self.assertEqual([s.tokens for s in cache.sessions], [10, 11])

    def test_no_memory_for_a_prompt(self):
        """The cache goes on with what it had."""
        _, model = models("llama")
        ids, cache = prompt(300), self.cache(model)
        model(ids[:, :3], past_key_values=cache)
        with unittest.mock.patch.object(cache.state.rows.client, "buffer", side_effect=MemoryError):
            self.assertRaises(MemoryError, model, ids[:, 3:203], past_key_values=cache)
            self.assertRaises(MemoryError, model, ids[:, 3:103], past_key_values=cache)
        client = cache.state.rows.client
        for kind, method in ((kvq.Buffer, "torch"), (kvq.memory.Area, "take")):
            before = set(client._buffers)
            with unittest.mock.patch.object(kind, method, side_effect=KeyboardInterrupt):
                self.assertRaises(KeyboardInterrupt, model, ids[:, 3:103], past_key_values=cache)
            cache.abort()
            self.assertLessEqual(set(client._buffers), before)  # none that nobody has
        got = model(ids[:, 3:6], past_key_values=cache).logits
        self.same_logits(self.logits("llama", ids[:, :6])[:, 3:], got)

    def test_uneven_crop(self):
        """Rows of which one cannot go back so far: none of them does."""
        _, model = models("llama")
        ids, mask = prompt(30, rows=2), torch.ones(2, 30, dtype=torch.long)
        mask[0, 20:25] = 0
        cache = self.cache(model, max_rollback=6)
        for at, end in ((0, 20), (20, 30)):
            model(ids[:, at:end], attention_mask=mask[:, :end], past_key_values=cache)
        with self.assertRaises(kvq.Error):
            cache.crop(-9)
        self.assertEqual([s.refresh() for s in cache.sessions], [25, 30])
        self.assertEqual(cache.get_seq_length(), 30)

    def test_a_row_that_fails_at_the_end(self):
        """No row has the tokens of such a step, and the cache goes on."""
        _, model = models("llama")
        ids, cache = prompt(20, rows=2), self.cache(model)
        model(ids[:, :10], past_key_values=cache)

        def spoil(_module, _arguments, out):
            out = out.clone()
            out[1] = float("nan")
            return out
        hook = model.model.embed_tokens.register_forward_hook(spoil)
        with self.assertRaises(kvq.Error) as raised:
            model(ids[:, 10:13], past_key_values=cache)
        hook.remove()
        self.assertEqual(raised.exception.code, kvq.Code.E_NONFINITE)
        self.assertEqual([s.refresh() for s in cache.sessions], [10, 10])
        got = model(ids[:, 10:12], past_key_values=cache).logits
        self.same_logits(self.logits("llama", ids[:, :12])[:, 10:], got)

    def test_a_row_that_fails_where_nothing_can_be_taken_back(self):
        """No row has the step's token, and the error is that row's: with max_rollback 0 as well,
        where the other one's block of 128 tokens would be full."""
        _, model = models("llama")
        ids = prompt(130, rows=2)

        def spoil(_module, _arguments, out):
            out = out.clone()
            out[1] = float("nan")
            return out
        for form in ("16bit", "oscar2"):
            cache = self.cache(model, form, max_rollback=0)
            model(ids[:, :127], past_key_values=cache)
            hook = model.model.embed_tokens.register_forward_hook(spoil)
            error = self.fails(kvq.Code.E_NONFINITE, model, ids[:, 127:128], past_key_values=cache)
            hook.remove()
            self.assertNotIn("truncate", error.text)
            self.assertEqual([s.refresh() for s in cache.sessions], [127, 127])
            got = model(ids[:, 127:128], past_key_values=cache).logits
            if form == "16bit":
                self.same_logits(self.logits("llama", ids[:, :128])[:, 127:], got)
            self.assertEqual(cache.get_seq_length(), 128)

    def test_a_row_that_fails_at_the_end_of_a_long_step(self):
        """Steps of more tokens than could be cropped are taken by all rows or by none."""
        _, model = models("llama")
        ids = prompt(560, rows=2)

        def spoil(_module, _arguments, out):
            out = out.clone()
            out[1] = float("nan")
            return out
        append = kvq._ffi.lib.kvq_append

        def forget(queue, work, entries, n):  # the last row's K and V of the last layer
            return append(queue, work, entries, n - int(work._obj.layer == 2))
        for first, n, code in ((10, 100, kvq.Code.E_NONFINITE), (0, 90, kvq.Code.E_NONFINITE),
                               (10, 300, kvq.Code.E_NONFINITE), (0, 300, kvq.Code.E_INCOMPLETE),
                               (10, 550, kvq.Code.E_INCOMPLETE)):
            with self.subTest(first=first, tokens=n, code=code):
                cache = self.cache(model, "oscar4")
                if first:
                    model(ids[:, :first], past_key_values=cache)
                    was = [s.tokens for s in cache.sessions]
                hook = model.model.embed_tokens.register_forward_hook(spoil)
                if code == kvq.Code.E_INCOMPLETE:
                    hook.remove()
                    kvq._ffi.lib.kvq_append = forget
                error = self.fails(code, model, ids[:, first:first + n], past_key_values=cache)
                hook.remove()
                kvq._ffi.lib.kvq_append = append
                self.assertTrue(error.text)
                self.assertEqual(cache.get_seq_length(), first)
                self.assertEqual([s.refresh() for s in cache.sessions], [first] * 2)
                got = model(ids[:, first:first + n], past_key_values=cache).logits
                again = self.cache(model, "oscar4")
                if first:
                    self.assertEqual(was, [first] * 2)
                    model(ids[:, :first], past_key_values=again)
                self.assertTrue(torch.equal(
                    got, model(ids[:, first:first + n], past_key_values=again).logits))

    def test_nonfinite_prompt(self):
        """The reason is told, and not what came of it."""
        _, model = models("llama")

        def spoil(_module, _arguments, out):
            return out * float("nan")
        hook = model.model.embed_tokens.register_forward_hook(spoil)
        with self.assertRaises(kvq.Error) as raised:
            model(prompt(400), past_key_values=self.cache(model))
        hook.remove()
        self.assertEqual(raised.exception.code, kvq.Code.E_NONFINITE)

    def test_pads_that_went(self):
        """A row without pads that is left alone needs no mask."""
        _, model = models("llama")
        ids, mask = prompt(12, rows=2), torch.ones(2, 12, dtype=torch.long)
        mask[0, :4] = 0
        cache = self.cache(model)
        model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
        cache.batch_select_indices(torch.tensor([1]))
        got = model(ids[1:, 10:], past_key_values=cache).logits
        self.same_logits(self.logits("llama", ids[1:])[:, 10:], got)

    def test_threads(self):
        """As many as are asked for, kvq's own or PyTorch's, give the same."""
        _, model = models("llama")
        ids, logits = prompt(40), []
        for threads in (1, 3, "torch"):
            cache = self.cache(model, threads=threads)
            model(ids[:, :30], past_key_values=cache)
            logits.append(model(ids[:, 30:], past_key_values=cache).logits)
        for other in logits[1:]:
            self.assertTrue(torch.equal(logits[0], other))

    def test_threads_of_torch(self):
        """Unless told, attention runs on the threads that PyTorch has, and starts none."""
        _, model = models("llama")
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        self.addCleanup(torch.set_num_threads, before)
        number, runtime = torch_threads()
        self.assertEqual(number, 3)
        self.assertIsNotNone(runtime)
        torch.ones(1 << 20).add_(1)  # a region, so that they are there
        for options, more in (({}, 0), ({"threads": 4}, 3)):
            cache = self.cache(model, **options)
            count = len(os.listdir("/proc/self/task"))
            model(prompt(30), past_key_values=cache)
            self.assertEqual(len(os.listdir("/proc/self/task")) - count, more)
            self.assertEqual(cache.state.rows.threads, options.get("threads", "torch"))

    def test_rows_that_are_chosen(self):
        _, model = models("llama")
        ids, more = prompt(10, rows=2), prompt(4, 2, rows=4)
        cache = self.cache(model)
        model(ids, past_key_values=cache)
        cache.batch_repeat_interleave(repeats=2)
        all_ids = torch.cat([ids.repeat_interleave(2, 0), more], 1)
        self.same_logits(self.logits("llama", all_ids)[:, 10:],
                         model(more, past_key_values=cache).logits)
        cache.batch_select_indices(indices=torch.tensor([3, 1]))
        all_ids = torch.cat([ids[[1, 0]], more[[3, 1]], more[:2]], 1)
        self.same_logits(self.logits("llama", all_ids)[:, 14:],
                         model(more[:2], past_key_values=cache).logits)
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        self.same_logits(self.logits("llama", ids), model(ids, past_key_values=cache).logits)

    def test_more_caches_than_a_client_has(self):
        """Those that nothing but themselves refers to are collected first; then it is said."""
        model, made = models("llama")[1], []
        gc.collect()
        with self.daemon.client() as client:
            def make():
                return KvqCache(model, "16bit", client=client)
            gc.disable()
            try:
                for _ in range(64):
                    cache = make()
                    cache.itself = cache
                del cache
                made = [make() for _ in range(64)]
            finally:
                gc.enable()
            self.assertEqual(len(client._queues), 64)
            self.fails(kvq.Code.E_LIMIT, make, text=("64 queues", "close() caches", "kvq.Client()"))
            made.pop().close()
            made.append(make())
            self.assertEqual(len(client._queues), 64)

    def test_rows_that_are_not_there(self):
        """Before anything is forked: the rows are as they were, each with a session of its own. Nor
        can a cache be left without rows, whose next forward would begin with wrong positions."""
        _, model = models("llama")
        ids, more = prompt(10, rows=2), prompt(4, 2, rows=2)
        cache = self.cache(model)
        model(ids, past_key_values=cache)
        before = [s.handle for s in cache.sessions]
        for wrong in ([1, -1], [0, 2], [0.0, 1.0], [True, False]):
            with self.assertRaisesRegex(IndexError, "has 2 rows, 0 to 1"):
                cache.reorder_cache(torch.tensor(wrong))
        for call, rows in ((cache.reorder_cache, torch.tensor([])),
                           (cache.batch_repeat_interleave, 0), (cache.batch_repeat_interleave, -1),
                           (cache.batch_select_indices, torch.tensor([False, False]))):
            self.assertRaisesRegex(ValueError, "none of the cache's 2 rows would stay", call, rows)
        self.assertEqual([s.handle for s in cache.sessions], before)
        cache.batch_select_indices(torch.tensor([-2, -1]))  # as of any tensor: the first two
        self.same_logits(self.logits("llama", torch.cat([ids, more], 1))[:, 10:],
                         model(more, past_key_values=cache).logits)
        for session in cache.sessions:
            session.close()
        cache.state.rows.sessions = []
        self.assertRaisesRegex(ValueError, "14 tokens and no session", model, more,
                               past_key_values=cache)

    def test_assistant(self):
        """Another model drafts, by eager attention and with a cache of transformers' own."""
        eager, _ = models("llama")
        assistant = copy.deepcopy(eager)
        torch.manual_seed(3)
        for tensor in assistant.parameters():
            tensor.data += torch.randn_like(tensor) * 0.004
        ids = prompt(12)
        eager, want, got, _ = self.generate("llama", ids, assistant_model=assistant)
        self.same_tokens(eager, want, got)

    def test_closed(self):
        """A cache whose connection is closed says so, also in the middle of a step."""
        _, model = models("llama")
        for n in (3, 600):
            client = self.daemon.client()
            cache = KvqCache(model, "16bit", client=client)
            model(prompt(9), past_key_values=cache)
            hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: client.close())
            with self.assertRaises(ValueError):
                model(prompt(n), past_key_values=cache)
            hook.remove()
            for call in (lambda: model(prompt(2), past_key_values=cache), lambda: cache.crop(-1)):
                with self.assertRaises(ValueError):
                    call()
            cache.close()

    def test_closed_by_another_thread(self):
        """Within any of the library's calls of a forward, closing and attaching the connection
        again are refused, and the forward is none the worse."""
        _, model = models("llama")
        library, ids, said = kvq._ffi.lib, prompt(1190), {}

        def fail(*_):
            raise ZeroDivisionError

        def other(name):
            for end in (self.client.close, self.client.reattach):
                try:
                    end()
                except RuntimeError as error:
                    said.setdefault(name, set()).add(str(error))

        def watched(name, function):
            def call(*arguments):
                thread = threading.Thread(target=other, args=(name,))
                thread.start()
                thread.join()
                return function(*arguments)
            return call
        names = ("local_add", "local_begin", "local_attend", "local_end", "local_abort", "append",
                 "attend", "append_attend", "step_begin", "step_end", "step_abort", "local_why")
        cache = self.cache(model)
        with contextlib.ExitStack() as stack:
            for name in ["kvq_" + n for n in names]:
                stack.enter_context(unittest.mock.patch.object(
                    library, name, watched(name, getattr(library, name))))
            got, at = [], 0
            for n in (3, 300, 3, 600, 284):
                hook = model.model.layers[1].mlp.register_forward_hook(fail)
                self.assertRaises(ZeroDivisionError, model, ids[:, at:at + n],
                                  past_key_values=cache)
                hook.remove()
                got.append(model(ids[:, at:at + n], past_key_values=cache).logits)
                at += n
            self.assertIsNone(cache.why)
        self.same_logits(self.logits("llama", ids), torch.cat(got, 1))
        self.assertEqual(set(said), {"kvq_" + n for n in names})
        for text in set().union(*said.values()):
            self.assertIn("another thread is using this queue", text)

    def test_a_fork_that_fails(self):
        """Of rows that are forked together, none is if one cannot be; the others stay."""
        _, model = models("llama")
        for call in (lambda cache: cache.batch_repeat_interleave(2), copy.deepcopy,
                     lambda cache: self.queue.fork(cache.sessions)):
            cache = self.cache(model)
            model(prompt(10, rows=2), past_key_values=cache)
            self.client.control(kvq._ffi.lib.kvq_session_close, cache.sessions[1].handle)
            self.assertEqual(len(self.daemon.ctl("session", "list")), 1)
            error = self.fails(kvq.Code.E_STALE, call, cache)
            self.assertIn("session", error.text)
            self.assertEqual(len(self.daemon.ctl("session", "list")), 1)
            cache.batch_select_indices(torch.tensor([0]))
            got = model(prompt(3, 1), past_key_values=cache).logits
            want = self.logits("llama", torch.cat([prompt(10, rows=2)[:1], prompt(3, 1)], 1))
            self.same_logits(want[:, 10:], got)
            cache.close()

    def test_a_row_that_is_gone(self):
        """Its session was ended by somebody else: the others end with the cache all the same."""
        _, model = models("llama")
        for end in (KvqCache.reset, KvqCache.close):
            cache = self.cache(model)
            model(prompt(10, rows=2), past_key_values=cache)
            self.client.control(kvq._ffi.lib.kvq_session_close, cache.sessions[0].handle)
            self.fails(kvq.Code.E_STALE, model, prompt(1, rows=2), past_key_values=cache)
            end(cache)
            self.assertEqual(self.daemon.ctl("session", "list"), [])
            if end is KvqCache.reset:
                self.same_logits(self.logits("llama", prompt(9)),
                                 model(prompt(9), past_key_values=cache).logits)
                cache.close()
        self.assertEqual(self.client._buffers, [])

    def test_operations_of_a_token(self):
        """What PyTorch is asked for in a layer's attention to one token: Q, K and V are copied to
        the daemon's buffers, and the output from there."""
        counted, inside = [], []

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, call, _types, arguments=(), options=None):
                if inside:
                    counted[-1].append(call.name())
                return call(*arguments, **(options or {}))
        attend = kvq.transformers.cache.State.attend

        def watched(*arguments):
            counted.append([])
            inside.append(True)
            try:
                return attend(*arguments)
            finally:
                inside.pop()
        _, model = models("llama")
        cache = self.cache(model)
        model(prompt(10), past_key_values=cache)
        model(prompt(1), past_key_values=cache)
        with unittest.mock.patch.object(kvq.transformers.cache.State, "attend", watched), \
                Count():
            model(prompt(1), past_key_values=cache)
        self.assertEqual(counted, [["aten::copy_"] * 3 + ["aten::clone"]] * 3)

    def test_two_threads(self):
        """A thread that comes into another's forward is told so, and the forward is none the
        worse; after it, or after the end of its thread, the cache serves any thread."""
        model = copy.deepcopy(models("llama")[1])
        ids, got = prompt(900), {}
        inside, done = threading.Event(), threading.Event()

        def wait(*_):
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                done.wait()
                if "stop" in got:
                    raise KeyboardInterrupt

        def forward(cache, first, n):
            try:
                with torch.no_grad():
                    got["logits"] = model(ids[:, first:first + n], past_key_values=cache).logits
            except KeyboardInterrupt:
                got["stopped"] = True
        model.model.layers[1].mlp.register_forward_hook(wait)
        for called in (model, model.model.forward):  # with and without the decoder's hooks
            cache = self.cache(model)
            called(ids[:, :10], past_key_values=cache)
            for first, n in ((10, 3), (13, 600)):
                inside.clear(), done.clear()
                other = threading.Thread(target=forward, args=(cache, first, n), name="the other")
                other.start()
                inside.wait()
                try:
                    for call in (lambda: called(ids[:, :2], past_key_values=cache),
                                 lambda: cache.crop(-1), lambda: copy.deepcopy(cache), cache.reset,
                                 cache.close, lambda: cache.batch_repeat_interleave(2)):
                        with self.assertRaisesRegex(RuntimeError, "'the other' is in a forward"):
                            call()
                finally:
                    done.set()
                    other.join()
                want = self.logits("llama", ids[:, :first + n])[:, first:]
                self.same_logits(want, got["logits"])
            got["stop"] = True
            other = threading.Thread(target=forward, args=(cache, 613, 3))
            other.start()
            other.join()
            self.assertTrue(got.pop("stop") and got.pop("stopped"))
            self.same_logits(self.logits("llama", ids[:, :620])[:, 613:],
                             model(ids[:, 613:620], past_key_values=cache).logits)

    def test_buffers_of_a_long_prompt(self):
        """They have K and V of all its tokens in one layer; Q and the output of few at a time."""
        _, model = models("llama")
        sizes, ids, cache = [], prompt(3200), self.cache(model)
        made = self.client.buffer
        with unittest.mock.patch.object(self.client, "buffer", side_effect=lambda nbytes, **options:
                                        sizes.append(nbytes) or made(nbytes, **options)):
            model(ids[:, :2500], past_key_values=cache, logits_to_keep=1)
            model(ids[:, 2500:2503], past_key_values=cache)  # of this process: all layers, 4 rows
            got = model(ids[:, 2503:], past_key_values=cache).logits
            self.same_logits(self.logits("llama", ids)[:, 2503:], got)
        key, query, rows = 2 * 64 * 4, 4 * 64 * 4, 4096
        self.assertEqual(len(sizes), 2)
        self.assertLessEqual(sizes[0], rows * (2 * key + 4) + 512 * (2 * query + 4 * 4) + 512)

    def test_what_is_left(self):
        """Sessions and buffers go with the cache."""
        _, model = models("llama")
        for _ in range(3):
            cache = self.cache(model)
            model(prompt(600), past_key_values=cache)
            model(prompt(3), past_key_values=cache)
            self.assertEqual(len(self.daemon.ctl("session", "list")), 1)
            self.assertEqual(len(self.client._buffers), 2)
            del cache
            self.assertEqual(self.client._buffers, [])
        self.assertEqual(self.daemon.ctl("session", "list"), [])


class Hints(unittest.TestCase):
    def test_everything_public_has_hints(self):
        self.assertEqual(faults(kvq.transformers), [])


@unittest.skipUnless(SMOLLM2, "needs the weights of SmolLM2-135M-Instruct: KVQ_SMOLLM2=FILE.gguf")
class Weights(Case):
    """A real model: its own text goes on as with eager attention, and with few bits nearly so."""
    COUNT = 64

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder, file = os.path.split(SMOLLM2)
        torch.set_grad_enabled(False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        cls.eager, cls.model = (transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, attn_implementation=kind, dtype=torch.float32)
            for kind in ("eager", "kvq"))
        # A text that stays as it is, so that the figures in docs/engines.md can be repeated.
        with open(os.path.join(e2e_rig.ROOT, "LICENSE"), encoding="utf-8") as text:
            cls.ids = tokenizer(text.read(6000), return_tensors="pt")["input_ids"][:, :1200]
        cls.want = cls.eager.generate(cls.ids, max_new_tokens=cls.COUNT, do_sample=False)

    def test_f16(self):
        with self.cache(self.model) as cache:
            got = self.model.generate(self.ids, past_key_values=cache, do_sample=False,
                                      max_new_tokens=self.COUNT)
        self.assertEqual(self.want.tolist(), got.tolist())

    def test_few_bits(self):
        """Of each of eager's tokens: how far the distribution is from eager's, on the mean."""
        new = self.want[:, self.ids.shape[1]:]
        should = self.eager(self.want).logits[:, self.ids.shape[1]:].log_softmax(-1)
        for form, most in (("oscar4", 0.01), ("oscar2", 0.2)):
            with self.cache(self.model, form) as cache:
                self.model(self.ids, past_key_values=cache)
                got = torch.cat([self.model(new[:, i:i + 1], past_key_values=cache).logits
                                 for i in range(self.COUNT)], 1).log_softmax(-1)
                bits = cache.sessions[0].info()["bits_per_value"]
            kl = float((should.exp() * (should - got)).sum(-1).mean())
            print(f"{form}: KL {kl:.4f}, {bits:.2f} bits a value; ", end="")
            self.assertLess(kl, most)
            self.assertLess(bits, {"oscar4": 5.5, "oscar2": 3.5}[form])

    def test_example(self):
        program = os.path.join(e2e_rig.ROOT, "examples", "transformers_chat.py")
        paths = [os.path.join(e2e_rig.ROOT, "client", "python"), os.environ.get("PYTHONPATH", "")]
        done = subprocess.run(
            [sys.executable, program, SMOLLM2, "oscar4", "What is the capital of France?"],
            capture_output=True, text=True, check=True, env=dict(
                os.environ, KVQ_RUNTIME_DIR=self.daemon.directory,
                PYTHONPATH=os.pathsep.join(filter(None, paths))))
        self.assertIn("Paris", done.stdout)
        self.assertRegex(done.stdout, r"\n\d+ tokens in oscar4, \d\.\d\d bits per packed value\n$")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(e2e_rig.run([Families, Llama, Hints, Sessions, Saved, Shared, Examples, Weights,
                          Refused, Attached, Interrupted, Server, TensorsOnTheHost,
                          TensorsOfALayer, AtHand, WithoutTorch], __doc__))
