# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch on the CPU as K, V, Q and outputs; transformers_test.py runs these."""
import sys
import tracemalloc
import unittest.mock

from e2e_rig import Test, Tokens, kvq, np
from transformers_rig import torch

import kvq.local
from kvq import fresh

N = 50  # tokens of a step
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


class Staged(np.ndarray):
    """Room in the staging buffer, which counts what is copied to it."""
    writes = 0

    def __setitem__(self, at, values):
        Staged.writes += 1
        super().__setitem__(at, values)


class TensorsOnTheHost(Test):
    """Tensors in a buffer's memory are used where they lie, others are copied once."""

    def setUp(self):
        super().setUp()
        self.tokens = Tokens(1, N)
        self.session = self.client.session(self.tokens.rows, "oscar2")
        self.told = []
        call = kvq.Queue.call

        def watched(queue, operation, entries, **fields):
            self.told.append(fields)
            return call(queue, operation, entries, **fields)
        self.patch(kvq.Queue, "call", watched)

    def patch(self, where, name, value):
        patched = unittest.mock.patch.object(where, name, value)
        patched.start()
        self.addCleanup(patched.stop)

    def values(self, dtype):
        """K, V and Q as tensors of their own."""
        return {x: torch.from_numpy(getattr(self.tokens, x)[0].astype(np.float32)).to(dtype)
                for x in "kvq"}

    def as_arrays(self, tensors):
        """Copies for NumPy, as they would come without PyTorch."""
        return {n: (t.contiguous().view(torch.int16).numpy().view(np.uint16)
                    if t.dtype == torch.bfloat16 else t.contiguous().numpy()).copy()
                for n, t in tensors.items()}

    def outputs(self, out, **given):
        """Of one layer's step, which is left uncommitted: bytes, and the LSE."""
        with self.queue.step([self.session], N) as step:
            got, lse = step.append_attend(0, out=out, **given)
            self.assertIs(got, out)
            step.abort()
        if isinstance(out, torch.Tensor):
            out = self.as_arrays({"out": out})["out"]
        return out.tobytes(), lse.tobytes()

    def laid_out(self, buffer, dtype):
        """K, V, Q and an output in a buffer, with strides as a model may have them."""
        wide = buffer.torch((N, 6, 256), dtype)                       # parts of rows
        by_head = buffer.torch((2, N, 128), dtype, 1 << 19)           # [heads][tokens][dim]
        flat = buffer.torch((N + 3, 8, 128), dtype, 2 << 19)          # not from the beginning on
        return {"k": wide[:, 1:5:2, 64:192], "v": by_head.transpose(0, 1), "q": flat[3:],
                "out": buffer.torch((N, 8, 128), dtype, 3 << 19)}

    def test_in_place(self):
        """The library is given addresses inside the buffer, nothing is staged, and outputs are
        those of arrays, to the bit."""
        for name, dtype in DTYPES.items():
            values = self.values(dtype)
            with self.client.buffer(1 << 22, daemon_made=name == "f16") as buffer:
                made = self.laid_out(buffer, dtype if name != "f32" else name)
                for x, value in values.items():
                    made[x].copy_(value)
                with self.client.queue() as queue, queue.step([self.session], N) as step:
                    got, _ = step.append_attend(0, lse=False, **made)
                    step.abort()
                    self.assertIsNone(queue._staging)
                self.assertIs(got, made["out"])
                got = self.as_arrays(made)["out"].tobytes()
                fields = self.told[-1]
                for x, tensor in made.items():
                    self.assertEqual(
                        (fields[x].buffer, fields[x].offset, fields[x].token_stride,
                         fields[x].head_stride, fields[x].dtype),
                        (buffer.pointer.value, tensor.data_ptr() - buffer.address,
                         *(n * dtype.itemsize for n in tensor.stride()[:2]),
                         {"f16": kvq.F16, "bf16": kvq.BF16, "f32": kvq.F32}[name]))
                    self.assertIs(self.client.find_buffer(tensor), buffer)
                    self.assertIsNone(self.client.find_buffer(tensor.clone()))
                arrays = self.as_arrays(values)
                want, _ = self.outputs(np.zeros((N, 8, 128), arrays["q"].dtype), **arrays)
                self.assertTrue(got == want, name)
                del made, tensor  # the daemon's memory ends with the buffer

    def test_one_copy(self):
        """K, V and Q that lie elsewhere are copied to the staging buffer, the output and its LSE
        from there, and NumPy holds no copy of its own meanwhile."""
        array = kvq.Buffer.array
        self.patch(kvq.Buffer, "array", lambda *given: array(*given).view(Staged))
        for dtype in DTYPES.values():
            values = self.values(dtype)
            out = torch.full((N, 8, 128), 7, dtype=dtype)
            want = self.outputs(out.clone(), **values)  # makes the staging buffer
            Staged.writes = 0
            tracemalloc.start()
            try:
                self.outputs_of(values, out)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            self.assertEqual(Staged.writes, 3)
            self.assertLess(peak, min(t.nbytes for t in values.values()))
            self.assertTrue(self.as_arrays({"out": out})["out"].tobytes() == want[0])
            strided = torch.zeros(8, N, 256, dtype=dtype).transpose(0, 1)[:, :, ::2]
            self.assertTrue(self.outputs(strided, **values) == want)

    def outputs_of(self, values, out):
        with self.queue.step([self.session], N) as step:
            step.append_attend(0, out=out, lse=False, **values)
            step.abort()

    def test_other_calls(self):
        """A Local, a whole step, a paged cache and attention without a step take them as well."""
        values = self.values(torch.bfloat16)
        arrays = self.as_arrays(values)
        buffer = self.client.buffer(1 << 22)
        made = self.laid_out(buffer, "bf16")
        for x, value in values.items():
            made[x].copy_(value)
        k, v, q, out = (made[x] for x in ("k", "v", "q", "out"))
        sessions = [self.client.session(self.tokens.rows, "oscar2") for _ in range(4)]
        for session, pair in zip(sessions, ((arrays["k"], arrays["v"]), (k, v))):
            with self.queue.step([session], N) as step:
                for layer in range(2):
                    step.append(layer, *pair)
        self.queue.step_whole([sessions[2]], N, [k, k], [v, v])
        pages = buffer.torch((3, N, 2, 128), torch.bfloat16, 4 << 19)
        pages[2], pages[0] = k, v
        with self.queue.step([sessions[3]], N) as step:
            for layer in range(2):
                step.append(layer, pages=kvq.Pages(pages[2:], pages[:1], [[0]]))
        want, want_lse = self.queue.attend(sessions[:1], 0, arrays["q"], N)
        for session in sessions[1:]:
            got, lse = self.queue.attend([session], 0, q, N)
            self.assertTrue((got == want).all() and (lse == want_lse).all())
        with self.queue.local(require=True, max_tokens=1024) as local:
            local.add(self.session)
            with local.step([self.session], N) as step:
                for layer in range(2):
                    step.attend(layer, q, k=k, v=v, out=out)
                with self.assertRaisesRegex(ValueError, "must lie in a buffer"):
                    step.attend(0, q, k=k.clone(), v=v)
        want = np.zeros((N, 8, 128), np.uint16)
        with self.client.session(self.tokens.rows, "oscar2") as session, \
                self.queue.step([session], N) as step:
            step.append_attend(1, out=want, **arrays)
            step.abort()
        self.assertTrue(self.as_arrays({"out": out})["out"].tobytes() == want.tobytes())

    def test_rows_of_a_session_that_fails(self):
        """The other session's are there, and its own as they were, in a buffer or not."""
        sessions = [self.client.session(self.tokens.rows, "f16") for _ in range(2)]
        given = {x: torch.cat([t, t]) for x, t in self.values(torch.float32).items()}
        given["k"][N + 1, 0, 5] = float("nan")
        own = self.client.buffer(1 << 22).torch((2 * N, 8, 128))
        for out in (torch.empty(2 * N, 8, 128), own):
            out.fill_(7)
            with self.queue.step(sessions, N) as step:
                with self.assertRaises(kvq.Error) as caught:
                    step.append_attend(0, out=out, **given)
                self.assertEqual(list(caught.exception.entries["status"]),
                                 [0, kvq.Code.E_NONFINITE])
                step.abort()
            self.assertTrue(bool((out[N:] == 7).all()) and not bool((out[:N] == 7).any()))

    def test_refusals(self):
        """Each with a sentence, and nothing is committed."""
        good = self.values(torch.float32)
        out = torch.zeros(N, 8, 128)
        grad = good["k"].clone().requires_grad_()
        turned = torch.complex(good["k"], good["k"]).conj().imag
        closed = self.client.buffer(1 << 16)
        wrong = [
            ("k", good["k"].to("meta"), TypeError, "k is Tensor on meta; expected .* on the CPU"),
            ("k", good["k"].to_sparse(), TypeError, "layout torch.sparse_coo"),
            ("k", good["k"].double(), TypeError, "k has dtype torch.float64; expected a tensor of"),
            ("v", good["v"].to(torch.int16), TypeError, "v has dtype torch.int16"),
            ("v", good["v"][:, :1], ValueError, r"^v has shape \(50, 1, 128\); expected \(50, 2,"),
            ("q", good["q"].transpose(0, 1), ValueError, "^q has shape"),
            ("k", grad, ValueError, r"k requires gradients.*k\.detach\(\)"),
            ("k", turned, ValueError, r"k\.resolve_neg\(\)"),
            ("out", out[:, :, :64], ValueError, "^out has shape"),
            ("out", out[:1].expand(N, 8, 128), ValueError, "out has strides .* overlap"),
            ("out", out.to("meta"), TypeError, "out is Tensor on meta"),
            ("k", self.elsewhere(2), ValueError, "strides may not be negative|contiguous")]
        for name, tensor, error, text in wrong:
            with self.queue.step([self.session], N) as step:
                with self.assertRaisesRegex(error, text):
                    step.append_attend(0, **{**good, "out": out, name: tensor})
                step.abort()
        bf16 = good["q"].to(torch.bfloat16)
        with self.queue.step([self.session], N) as step:
            with self.assertRaisesRegex(TypeError, "dtype 'f16' of q, which is torch.bfloat16"):
                step.attend(0, bf16, dtype="f16")
            step.abort()
        for dtype, error in ((torch.float64, TypeError), ("nonsense", TypeError), (5, TypeError)):
            with self.assertRaises(error):
                closed.tensor(closed.torch((2, 2, 8), dtype))
        self.assertEqual(closed.torch((0, 4), "bf16").shape, (0, 4))
        tensor = closed.torch((2, 2, 64), "bf16")
        closed.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            closed.torch(4)
        self.assertIsNone(self.client.find_buffer(tensor))
        tensor.fill_(3)  # its memory stays
        self.assertEqual(self.session.refresh(), 0)

    def elsewhere(self, step):
        """K in a buffer, with gaps between the values of a head."""
        return self.client.buffer(1 << 20).torch((N, 2, 128 * step), "f32")[:, :, ::step]


class TensorsOfALayer(Test):
    """Attention in this process with tensors like those of the layer's last call."""

    def setUp(self):
        super().setUp()
        self.session = self.client.session(Tokens(1, 1, layers=1).rows, "oscar2")
        self.local = self.queue.local(max_tokens=1024, require=True)
        self.local.add(self.session)

    def given(self, dtype, inside):
        """Tensors of a token, with other values and in another place each time."""
        made = {}
        for name, heads in (("k", 2), ("v", 2), ("q", 8), ("out", 8)):
            values = torch.randn(1, heads, 128).to(dtype)
            made[name] = values
            if inside or name in "kv":
                made[name] = self.client.buffer(1 << 13).torch(values.shape, dtype, 1 << 8)
                made[name].copy_(values)
        return made

    def anew(self, step, given):
        """What the same call says if it is checked from the beginning."""
        self.local._prepared.clear()
        try:
            out, lse = step.attend(0, **given)
            return out.clone(), lse
        except (TypeError, ValueError) as error:
            return type(error), str(error)

    def test_same_answers(self):
        """In buffers or not, of each dtype; not checked from the beginning but the first."""
        for inside in (True, False):
            for dtype in DTYPES.values():
                with self.local.step([self.session], 1) as step:
                    self.anew(step, self.given(dtype, inside))
                    for _ in range(3):
                        given = self.given(dtype, inside)
                        with unittest.mock.patch.object(kvq.local, "ask") as ask:
                            got, lse = step.attend(0, **given)
                            ask.assert_not_called()
                        self.assertIs(got, given["out"])
                        want, want_lse = self.anew(step, {**given, "out": got.clone()})
                        self.anew(step, given)
                        self.assertTrue(torch.equal(got, want))
                        np.testing.assert_array_equal(lse, want_lse)
                    step.abort()

    def test_what_is_not_alike_is_refused(self):
        """As by a first call, with the same words: also where the tensor is that of the last call,
        which was changed."""
        given = self.given(torch.bfloat16, False)
        negative = torch._neg_view(given["q"])
        wrong = [("q", given["q"].to("meta")), ("q", given["q"].to_sparse()), ("q", negative),
                 ("q", given["q"].double()), ("q", given["q"][:, :4]), ("out", given["q"]),
                 ("out", given["out"][:, :1].expand(1, 8, 128)), ("k", given["k"].clone())]
        with self.local.step([self.session], 1) as step:
            for name, tensor in wrong:
                self.anew(step, given)
                step.attend(0, **given)
                with self.assertRaises((TypeError, ValueError)) as caught:
                    step.attend(0, **{**given, name: tensor})
                self.assertEqual((type(caught.exception), str(caught.exception)),
                                 self.anew(step, {**given, name: tensor}))
            for change, text in ((given["q"].requires_grad_, "requires gradients"),
                                 (lambda: given["out"].resize_(1, 4, 128), "out has shape")):
                step.attend(0, **given)
                change()
                self.assertRaisesRegex(ValueError, text, step.attend, 0, **given)
                given["q"].requires_grad_(False)
            step.abort()


class AtHand(unittest.TestCase):
    """A prompt's attention to its own tokens, as PyTorch does it and by logits made in full."""

    @staticmethod
    def in_double(query, key, value, scale, window, softcap):
        heads, n, _ = query.shape
        key, value = (x.double().repeat_interleave(heads // key.shape[0], 0) for x in (key, value))
        logits = query.double() @ key.transpose(1, 2) * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(key.shape[1] - n, key.shape[1])[:, None]
        keys = torch.arange(key.shape[1])
        logits[:, (keys > at) | (keys <= at - (window or key.shape[1]))] = -torch.inf
        return logits.softmax(-1) @ value, logits.logsumexp(-1)

    def check(self, dtype, bound, heads, kv_heads, n, past, dim, window=0, softcap=0.0):
        torch.manual_seed(3)
        given = [torch.randn(h, n + p, dim).to(dtype)
                 for h, p in ((heads, 0), (kv_heads, past), (kv_heads, past))]
        asked = dict(scale=0.3, window=window, softcap=softcap)
        want, want_lse = self.in_double(*given, **asked)
        with self.subTest(dtype=dtype, heads=heads, n=n, past=past, **asked):
            for want_sums in (True, False):
                out, lse = fresh.causal(*given, **asked, want_lse=want_sums)
                self.assertEqual((out.dtype, out.shape), (dtype, given[0].shape))
                self.assertLess((out - want).abs().max(), bound)
                if want_sums:
                    self.assertEqual(lse.dtype, torch.float32)
                    self.assertLess((lse - want_lse).abs().max(), bound / 10)

    def check_all(self):
        for dtype, bound in ((torch.float32, 3e-5), (torch.bfloat16, 3e-2)):
            for heads, kv_heads in ((6, 2), (3, 3), (4, 1)):
                self.check(dtype, bound, heads, kv_heads, 300, 0, 32)
            self.check(dtype, bound, 4, 2, 450, 0, 64, window=100)
            self.check(dtype, bound, 4, 2, 450, 99, 64, window=100)
            self.check(dtype, bound, 4, 2, 450, 37, 64, window=100)
            self.check(dtype, bound, 4, 2, 450, 0, 64, window=450)
            self.check(dtype, bound, 2, 1, 200, 1, 64, window=4000)
            self.check(dtype, bound, 4, 2, 250, 9, 64, window=10, softcap=5.0)
            self.check(dtype, bound, 4, 2, 250, 0, 64, softcap=5.0)

    def test_by_pytorch(self):
        self.assertTrue(fresh._FLASH, "this PyTorch has no such operator: prompts take longer")
        self.check_all()

    def test_by_logits(self):
        with unittest.mock.patch.object(fresh, "_FLASH", None):
            self.check_all()


class WithoutTorch(unittest.TestCase):
    def test_not_imported(self):
        """The package alone does not bring PyTorch in."""
        import os
        import subprocess
        done = subprocess.run(
            [sys.executable, "-c", "import sys, kvq; print('torch' in sys.modules)"],
            capture_output=True, text=True, check=True, env=dict(
                os.environ, PYTHONPATH=os.path.dirname(os.path.dirname(kvq.__file__))))
        self.assertEqual(done.stdout.strip(), "False")
