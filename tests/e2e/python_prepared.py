# SPDX-License-Identifier: Apache-2.0
"""Attention in this process with arrays like those of the layer's last call; python.py runs these
with arrays, transformers_test.py with tensors as well."""
import itertools
import threading
import unittest.mock
from contextlib import suppress

from e2e_rig import Test, Tokens, kvq, np
from python_interrupts import Interrupts

import kvq.local
import kvq.prepared

from kvq._ffi import lib

ROWS = {"k": 2, "v": 2, "q": 8, "out": 8}  # heads of each


class Prepared(Test):
    """Calls with arrays of the same layouts are checked once. Each is held against one that is
    checked from the beginning, in a Local of its own."""

    def setUp(self):
        super().setUp()
        layers = [kvq.Layer(8, 2, 128), kvq.Layer(8, 2, 128), kvq.Layer(8, 2, 128, kv_from=0)]
        self.tokens = Tokens(1, 40, layers=3)
        self.sessions = [self.client.session(layers, "oscar2") for _ in range(2)]
        feed = self.client.array((20, 2, 128))
        feed[...] = self.tokens.k[0, :20]
        self.queue.step_whole(self.sessions, 10, [feed, feed, None], [feed, feed, None])
        self.local = self.queue.local(max_tokens=1024, require=True)
        # Arrays of a call lie in several buffers.
        self.rooms = itertools.cycle([self.client.buffer(1 << 24) for _ in range(3)])
        self.checked = 0
        for session in self.sessions:
            self.local.add(session)
        ask = kvq.local.ask

        def counted(*arguments, **options):
            self.checked += 1
            return ask(*arguments, **options)
        self.patch(kvq.local, "ask", counted)

    def tearDown(self):
        self.client.close()
        super().tearDown()

    def patch(self, where, name, value):
        patched = unittest.mock.patch.object(where, name, value)
        patched.start()
        self.addCleanup(patched.stop)

    def make(self, name, rows, dtype=np.float32, inside=True):
        """An array of random values, or of the value 7 for the output."""
        shape, kind = (rows, ROWS[name], 128), np.dtype(dtype)
        made = next(self.rooms).take(shape, kind) if inside else np.empty(shape, kind)
        values = np.random.default_rng(self.checked).standard_normal(shape, np.float32)
        if kind == np.uint16:
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        made[...] = 7 if name == "out" else values
        return made

    def arrays(self, rows, dtype=np.float32, inside=True, out=True):
        """K, V and Q, and an output if one is wanted. K and V lie in buffers."""
        made = {n: self.make(n, rows, dtype, inside or n in "kv") for n in "kvq"}
        return {**made, "out": self.make("out", rows, dtype, inside)} if out else made

    def anew(self, step, *arguments, **options):
        """The same call, checked from the beginning."""
        with unittest.mock.patch.dict(self.local._prepared, clear=True):
            return step.attend(*arguments, **options)

    def same(self, step, layer, **options):
        """A call gives what it gives where it is checked from the beginning."""
        got, lse = step.attend(layer, **options)
        if options.get("out") is not None:
            self.assertIs(got, options["out"])
            options["out"] = options["out"].copy()
        want, want_lse = self.anew(step, layer, **options)
        np.testing.assert_array_equal(got, want)
        self.assertFalse((np.asarray(got) == 7).all())
        if options.get("lse", True):
            np.testing.assert_array_equal(lse, want_lse)
        else:
            self.assertIsNone(lse)

    def checks(self, times, call, *arguments, **options):
        """How often a call is checked from the beginning."""
        before = self.checked
        call(*arguments, **options)
        self.assertEqual(self.checked - before, times)

    def test_same_answers(self):
        """Whatever arrays there are, in buffers or not, with new values or elsewhere; the first of
        a layer is checked, those behind it are not."""
        for n, dtype, inside, out, more in itertools.product(
                (1, 3), (np.float32, np.float16, np.uint16), (True, False), (True, False),
                ({}, {"lse": False}, {"past_only": True, "out_dtype": "f16"})):
            if out and "out_dtype" in more:
                continue
            self.local._prepared.clear()
            for times in (1, 0, 0):
                with self.local.step(self.sessions, n) as step:
                    for layer in range(2):
                        self.checks(times + 1, self.same, step, layer,
                                    **self.arrays(2 * n, dtype, inside, out), **more)
                    given = self.arrays(2 * n, dtype, inside, out)
                    del given["k"], given["v"]  # of a layer that reads another one's
                    self.checks(times + 1, self.same, step, 2, **given, **more)
                    step.abort()

    def test_other_sessions_and_counts(self):
        """Are checked, as are other queries and options; then they are known."""
        one, both = self.sessions[:1], self.sessions
        given, less = self.arrays(2), self.arrays(1)
        with self.local.step(both, 1) as step:
            self.checks(1, step.attend, 0, **given)
            self.checks(0, step.attend, 0, **given)
            self.checks(1, step.attend, 0, lse=False, **given)
            self.checks(1, step.attend, 0, **given)
            self.checks(1, step.attend, 0, timeout=10, **given)
            self.checks(1, step.attend, 0, **given)
            self.checks(0, step.attend, 0, queries=1, **given)
            self.assertRaises(TypeError, step.attend, 0, queries=True, **given)
            for counts in (np.ones(2, np.uint16), [1, 1]):
                self.same(step, 0, queries=counts, **given)
            self.same(step, 0, lse=True, **given)
            self.assertRaises(TypeError, step.attend, 0, lse=1, **given)
            for _ in range(2):  # its deadline is another one
                self.checks(1, step.attend, 0, timeout=10, **given)
            step.abort()
        with self.local.step(one, 2) as step:  # of as many rows
            self.checks(1, step.attend, 0, **given)
            step.abort()
        with self.local.step(one, 1) as step:
            self.checks(1, step.attend, 0, **less)
            self.checks(0, step.attend, 0, **less)
            step.abort()
        with self.local.step([both[1]], 1) as step:
            self.checks(1, step.attend, 0, **less)
            self.checks(0, self.local._prepared[0]._is_for, self.queue, one, (1, 1), {})
            step.abort()

    def wrong(self, given):
        """What a call with these arrays refuses, by the argument; with what its text says."""
        yield "q", given["q"][:, :4], "q has shape"
        yield "q", given["q"].astype(np.float64), "q has dtype"
        yield "q", given["q"].astype(">f4"), "q has dtype"
        yield "q", [1, 2], "q is list"
        yield "q", None, ""
        yield "k", given["k"].copy(), "must lie in a buffer"
        yield "v", given["v"][:1], "v has shape"
        yield "k", self.client.array((2, 2, 256))[..., ::2], "last dimension"
        yield "k", given["k"][::-1], "may not be negative"
        locked = given["out"].view()
        locked.flags.writeable = False
        yield "out", locked, "out is read-only"
        yield "out", np.broadcast_to(given["out"][:1], (2, 8, 128)), ""
        yield "out", given["q"], "out overlaps q"
        yield "lse", 1, "lse is 1"
        yield "past_only", 0, "past_only is 0"
        yield "nonsense", True, "nonsense"
        yield "queries", [1, 2], ""
        yield "queries", True, ""
        edge = self.client.buffer(2 * 2 * 128 * 4)
        behind = np.lib.stride_tricks.as_strided(edge.array((2, 2, 128))[1:], (2, 2, 128))
        yield "k", behind, "must lie in a buffer"
        for name in ("k", "v"):
            closed = self.client.array((2, 2, 128))
            self.client.find_buffer(closed).close()
            yield name, closed, "must lie in a buffer"

    def test_what_is_not_alike_is_refused(self):
        """As by a first call, with the same words; the layer's next call is none the worse."""
        given = self.arrays(2)
        with self.local.step(self.sessions, 1) as step:
            for name, value, text in self.wrong(given):
                with self.subTest(name, text=text):
                    self.same(step, 0, **given)
                    said = []
                    for call in (step.attend, lambda *a, **o: self.anew(step, *a, **o)):
                        with self.assertRaises((TypeError, ValueError, kvq.Error)) as caught:
                            call(0, **{**given, name: value})
                        said.append((type(caught.exception), str(caught.exception)))
                    self.assertEqual(said[0], said[1])
                    self.assertIn(text, said[0][1])
            self.same(step, 0, **given)
            self.assertRaises(ValueError, step.attend, True, **given)
            self.assertRaises(kvq.Error, step.attend, 3, **given)
            step.abort()

    def test_a_buffer_that_is_closed_meanwhile(self):
        """Between the look for it and the library's call, as another thread may do."""
        given = {**self.arrays(2), "v": self.client.array((2, 2, 128))}
        with self.local.step(self.sessions, 1) as step:
            step.attend(1, **given)
            in_use, given["q"] = kvq.prepared.in_use, self.client.array((2, 8, 128))

            def late(*arguments):
                self.client.find_buffer(given["q"]).close()
                return in_use(*arguments)
            with unittest.mock.patch.object(kvq.prepared, "in_use", late), \
                    unittest.mock.patch.object(lib, "kvq_local_attend") as attend:
                self.assertRaisesRegex(ValueError, "is closed", step.attend, 1, **given)
                attend.assert_not_called()
            self.same(step, 1, **given)  # copied, by now
            self.same(step, 1, **{**given, "q": self.make("q", 2)})
            self.client.find_buffer(given["v"]).close()
            self.assertRaisesRegex(ValueError, "closed before the step's end", step.attend, 0,
                                   **self.arrays(2))
            step.abort()

    def test_a_buffer_that_a_later_layer_reads(self):
        """Cannot be closed meanwhile, nor before the step's end."""
        given = {n: self.client.array((2, heads, 128)) for n, heads in ROWS.items()}
        some, said = {"q": given["q"], "out": given["out"]}, []
        attend = lib.kvq_local_attend

        def during(*arguments):
            def close():
                for name in given:
                    with suppress(BufferError):
                        self.client.find_buffer(given[name]).close()
                        said.append(name)
            thread = threading.Thread(target=close)
            thread.start()
            thread.join()
            return attend(*arguments)
        for times in (1, 0):
            step = self.local.step(self.sessions, 1)
            self.checks(times, step.attend, 0, **given)
            with unittest.mock.patch.object(lib, "kvq_local_attend", during):
                self.checks(times, step.attend, 2, **some)
            if times:
                step.abort()
        self.assertEqual(said, [])
        self.client.find_buffer(given["k"]).close()
        self.assertRaisesRegex(ValueError, "closed before the step's end", step.attend, 2, **some)
        step.abort()

    def test_layouts(self):
        """Strides of all kinds, in buffers and copied; dtypes of one size."""
        with self.local.step(self.sessions, 3) as step:
            for inside, dtype in itertools.product((True, False), (np.float16, np.uint16) * 2):
                given = self.arrays(6, dtype, inside)
                wide = {n: self.make(n, 12, dtype, inside or n in "kv") for n in given}
                by_heads = self.make("q", 6, dtype, inside).reshape(8, 6, 128).transpose(1, 0, 2)
                for arrays in (given, {n: a[::2] for n, a in wide.items()},
                               {**given, "q": by_heads}, given):
                    for _ in range(2):
                        self.same(step, 0, **arrays)
            step.abort()

    def test_arrays_that_move(self):
        """From one buffer to another, and out of all of them, copied, and back."""
        with self.local.step(self.sessions, 1) as step:
            self.same(step, 0, **self.arrays(2))
            for inside in (True, False, False, True, True):
                given = self.arrays(2, inside=inside)
                self.checks(0 if inside else 1, step.attend, 0, **given)
                self.same(step, 0, **given)
                taken = self.client.buffer(1 << 16)
                for name, rows in (("q", 8), ("out", 8), ("k", 2)):
                    other = taken.take((2, rows, 128))
                    other[...] = given[name]
                    given[name] = other
                self.checks(0 if inside else 1, step.attend, 0, **given)
                self.same(step, 0, **given)
            step.abort()

    def test_a_session_that_fails(self):
        """Its rows stay as they were, the others' are there, and the error's entries are its own:
        the next call does not write to them."""
        for inside in (True, False):
            given = self.arrays(2, inside=inside)
            with self.local.step(self.sessions, 1) as step:
                step.attend(0, **given)
                want = given["out"].copy()
                handle, self.sessions[1].handle = self.sessions[1].handle, 12345
                given["out"][...] = 7
                before = self.checked
                error = self.fails(kvq.Code.E_STALE, step.attend, 0, **given)
                again = self.fails(kvq.Code.E_STALE, step.attend, 0, **given)
                self.assertFalse(np.shares_memory(error.entries, again.entries))
                self.assertEqual(self.checked, before)
                self.sessions[1].handle = handle
                np.testing.assert_array_equal(given["out"][:1], want[:1])
                self.assertTrue((given["out"][1:] == 7).all())
                self.assertEqual(error.entries["status"].tolist(), [0, kvq.Code.E_STALE])
                step.attend(0, **given)
                np.testing.assert_array_equal(given["out"], want)
                step.abort()

    def test_at_any_moment(self):
        """An interrupted call leaves nothing that makes the next one another."""
        places = [self.arrays(2, inside=True) for _ in range(2)]
        places[1]["q"] = places[1]["q"].copy()
        with self.local.step(self.sessions, 1) as step:
            step.attend(0, **places[0])
            which = itertools.cycle(places)
            for moment in Interrupts.moments(lambda: step.attend(0, **next(which))):
                self.assertEqual(kvq.buffers._in_use, {})
                for given in places:
                    self.same(step, 0, **given)
            self.assertGreater(moment, 30)
            step.abort()

    def test_nothing_is_held(self):
        """Of a Local that is closed, and of staging buffers that were given back."""
        given = self.arrays(2, inside=False)
        with self.local.step(self.sessions, 1) as step:
            step.attend(0, **given)
            staging = self.queue._staging
            self.queue._stage([staging.nbytes + 1])
            self.assertIsNone(staging._memory)
            self.checks(2, self.same, step, 0, **given)
            step.abort()
        self.local.close()
        self.assertEqual(self.local._prepared, {})
