# SPDX-License-Identifier: Apache-2.0
"""A prompt is attended in full precision until it has ended, so its outputs do not depend on the
pieces that it comes in; where room is short it is packed as it comes, and nobody is refused."""
import threading
import unittest

import numpy as np

from e2e_rig import BACKEND, BOUND, MIB, Test, Tokens, kvq, less, long_emulated, read_all
from e2e_storage import Stored

PROMPT, MORE = less(512, 384), 131
PIECES = (PROMPT, 64, 100, 7, 1) if BACKEND == "cpu" else (PROMPT, 64, 100)
# A GPU multiplies in fp16 and adds up in fp32, in tiles of 64 tokens, and calls with few queries
# have a kernel of their own: pieces that are no multiple of 64 tokens have sums in another order,
# in raw formats as well. Of the largest output, measured at most: 2.3e-4 (pieces of 7).
GPU_ROUNDING = 1e-3
# With KVQ_CPU_MASK=amx a CPU may have another loop for calls of 64 query rows or more to a KV head,
# which is as good as fp32 and not the same to the bit. Pieces of 64 tokens all take it.
AMX_ROUNDING = 1e-5


def formats_of(daemon):
    return {f["name"] for f in daemon.ctl("format", "list")}


class Outputs:
    """Outputs and LSE of a session's tokens, in the order of the tokens."""

    def __init__(self, layers=2):
        self.steps, self.layers = [], layers

    def add(self, step):
        self.steps.append(step)

    def array(self):
        return np.concatenate([np.concatenate([np.asarray(s[layer][0], np.float32).reshape(
            len(s[layer][0]), -1) for s in self.steps]) for layer in range(self.layers)], axis=1)


class Prompts:
    """What tests of prompts share. self.client and self.queue are a test's."""

    def tokens(self, **options):
        return Tokens(12, PROMPT + MORE, q_heads=4, dim=64, **options)

    def feed_to(self, session, tokens, until, piece, out, queue=None):
        while session.tokens < until:
            out.add(tokens.feed(queue or self.queue, session, min(piece, until - session.tokens)))

    def assert_alike(self, got, want, piece, what):
        got, want = got.array(), want.array()
        self.assertEqual(got.shape, want.shape, what)
        if BACKEND != "cpu":
            rounding = GPU_ROUNDING
        else:
            rounding = AMX_ROUNDING if self.client.info()["isa"] == "amx" else 0
        if rounding and piece % 64:
            self.assertLess(np.abs(got - want).max() / np.abs(want).max(), rounding, what)
        else:
            self.assertTrue(got.tobytes() == want.tobytes(), f"{what}, pieces of {piece}")

    def finish(self, session, tokens):
        """Goes on behind the prompt. What is stored then, and what of it is packed."""
        tokens.feed(self.queue, session, 130)
        stored = read_all(self.queue, session, tokens.layers)  # packs what is due
        tokens.feed(self.queue, session, 1)  # and its raw blocks are given back
        info = session.info()
        return (stored, info["packed_bytes"], info["window_bytes"], info["full_precision_tokens"])

    def whole(self, tokens, rows=None, format="oscar2", **options):
        """Outputs of a prompt in one step, and what is stored of it when it was packed as it
        comes, which is no matter in one step."""
        out = Outputs(tokens.layers)
        with self.client.session(rows or tokens.rows, format, prompt_tokens=PROMPT,
                                 packed_prompt=True, **options) as session:
            self.feed_to(session, tokens, PROMPT, PROMPT, out)
            return out, self.finish(session, tokens)


class Pieces(Test, Prompts):
    def check(self, format="oscar2", rows=None, pieces=PIECES, **options):
        tokens = self.tokens()
        want, stored = self.whole(tokens, rows, format, **options)
        for piece in pieces:
            out = Outputs()
            with self.client.session(rows or tokens.rows, format, prompt_tokens=PROMPT,
                                     **options) as session:
                self.assertEqual(session.info()["exact_tokens"], PROMPT)
                self.feed_to(session, tokens, PROMPT, piece, out)
                self.assert_alike(out, want, piece, format)
                self.assertTrue(self.finish(session, tokens) == stored,
                                f"{format}: stored of pieces of {piece}")

    def test_every_format(self):
        """Outputs to the bit, and bytes, memory and window behind them."""
        tokens = self.tokens()
        tried = 0
        formats = formats_of(self.daemon) if BACKEND == "cpu" else {"f16", "oscar2"}
        formats -= less(set(), {"f16"})
        for format in sorted(formats):
            dtype = "bf16" if format == "bf16" else "f16"
            try:
                self.client.session(tokens.rows, format).close()  # its own dtype
            except kvq.Error as error:  # needs a codebook
                self.assertEqual(error.code, kvq.Code.E_FORMAT, format)
                continue
            self.check(format, pieces=(64, 100), dtype=dtype)
            tried += 1
        self.assertGreater(tried, 15 if BACKEND == "cpu" else 0)

    @long_emulated
    def test_small_pieces(self):
        """Formats that learn, that keep outliers or sinks, and that have neither."""
        for format in sorted(formats_of(self.daemon) & {"oscar2", "innerq-base", "ott2", "kivi2"}):
            self.check(format)

    @long_emulated
    def test_windows(self):
        """With layers that forget what lies behind a window."""
        layer = kvq.Layer(4, 2, 64)
        self.check(rows=[layer, kvq.Layer(4, 2, 64, window=200)])

    def test_whole_prompt_in_one_call(self):
        """Thousands of queries go into one call on the host, 512 on a GPU."""
        most, n = 512, 3001
        tokens = Tokens(12, n, q_heads=4, dim=64)
        with self.client.session(tokens.rows, "oscar2", prompt_tokens=n) as session:
            if BACKEND != "cpu":
                self.fails(kvq.Code.E_LIMIT, tokens.feed, self.queue, session, most + 1,
                           text=("513 query tokens", "512", "GPU"))
                return
            whole, pieces = Outputs(), Outputs()
            whole.add(tokens.feed(self.queue, session, n))
        with self.client.session(tokens.rows, "oscar2", prompt_tokens=n) as session:
            self.feed_to(session, tokens, n, most, pieces)
        self.assertTrue(whole.array().tobytes() == pieces.array().tobytes())

    def test_opt_out(self):
        """Packed as it comes outputs do depend on the pieces: the tests here can fail. So they do
        where nobody says how long the prompt is."""
        tokens = self.tokens()
        want, stored = self.whole(tokens)
        for options in ({"prompt_tokens": PROMPT, "packed_prompt": True}, {}):
            out = Outputs()
            with self.client.session(tokens.rows, "oscar2", **options) as session:
                self.assertEqual(session.info()["exact_tokens"], 0)
                self.feed_to(session, tokens, PROMPT, 64, out)
                self.assertFalse(out.array().tobytes() == want.array().tobytes())
                self.assertTrue(self.finish(session, tokens) == stored)
        self.fails(kvq.Code.E_INVALID, self.client.session, tokens.rows, "oscar2",
                   exact_prompt=True, text="prompt_tokens")
        self.fails(kvq.Code.E_INVALID, self.client.session, tokens.rows, "oscar2",
                   prompt_tokens=PROMPT, exact_prompt=True, packed_prompt=True, text="exclude")

    @long_emulated
    def test_too_long(self):
        """A prompt that would take more than half of the memory is packed as it comes."""
        with self.client.session(self.tokens().rows, "oscar2", prompt_tokens=1 << 20) as session:
            self.assertEqual(session.info()["exact_tokens"], 0)

    @long_emulated
    def test_rollback(self):
        """Going back within the prompt, and over its end."""
        tokens = self.tokens()
        want, stored = self.whole(tokens, max_rollback=20)
        for piece in PIECES[1:]:
            out = Outputs()
            with self.client.session(tokens.rows, "oscar2", prompt_tokens=PROMPT,
                                     max_rollback=20) as session:
                self.feed_to(session, tokens, 320, piece, out)
                tokens.feed(self.queue, session, 15)
                self.queue.truncate([session], [320])
                self.feed_to(session, tokens, PROMPT, piece, out)
                tokens.feed(self.queue, session, 11)
                self.queue.truncate([session], [PROMPT])
                self.assert_alike(out, want, piece, "rollback")
                self.assertTrue(self.finish(session, tokens) == stored, "after a rollback")

    @long_emulated
    def test_forks(self):
        """Forks in the middle of a prompt, at a page's end and within one, go on in full
        precision, and so does what they were made of."""
        tokens = self.tokens()
        want, stored = self.whole(tokens)
        for at in (256, 300):
            for piece in PIECES[1:3]:
                out, fork_out = Outputs(), Outputs()
                with self.client.session(tokens.rows, "oscar2", prompt_tokens=PROMPT) as session:
                    self.feed_to(session, tokens, at, piece if BACKEND == "cpu" else at, out)
                    fork, = self.queue.fork([session], [at])
                    with fork:
                        self.assertEqual(fork.info()["exact_tokens"], PROMPT)
                        fork_out.steps = list(out.steps)
                        self.feed_to(fork, tokens, PROMPT, piece, fork_out)
                        self.feed_to(session, tokens, PROMPT, piece, out)
                        same = piece if at % 64 == 0 else 1
                        self.assert_alike(fork_out, want, same, f"fork at {at}")
                        self.assert_alike(out, want, same, f"forked at {at}")
                        self.assertTrue(self.finish(fork, tokens) == stored)
                        self.assertTrue(self.finish(session, tokens) == stored)

    def client_array(self, values):
        array = self.client.array(values.shape)
        array[...] = values
        return array

    @unittest.skipUnless(BACKEND == "cpu", "buckets on a GPU: test_local_gpu")
    def test_in_context(self):
        """Attention in the engine's own context reads the same."""
        tokens = self.tokens()
        want, stored = self.whole(tokens)
        data = {n: self.client_array(getattr(tokens, n)) for n in "kvq"}
        for piece in PIECES[1:]:
            out = Outputs()
            with self.client.session(tokens.rows, "oscar2", prompt_tokens=PROMPT) as session, \
                    self.queue.local(max_tokens=1024, require=True) as local:
                local.add(session)
                while session.tokens < PROMPT:
                    n = min(piece, PROMPT - session.tokens)
                    at = slice(session.tokens, session.tokens + n)
                    with local.step([session], [n]) as step:
                        out.add([step.attend(layer, **{n: x[layer, at] for n, x in data.items()})
                                 for layer in range(2)])
                self.assert_alike(out, want, piece, "in context")
                local.remove(session)
                self.assertTrue(self.finish(session, tokens) == stored)

    @long_emulated
    def test_prefixes(self):
        """A session that begins with what another has packed: its outputs do not depend on its
        own pieces."""
        tokens = self.tokens()
        ids = np.arange(PROMPT + MORE, dtype=np.int32)
        options = {"format": "oscar2", "model": "prompts", "prompt_tokens": PROMPT}
        with self.client.session(tokens.rows, **options) as first:
            with self.queue.step([first], [PROMPT + 130], ids=[ids[:PROMPT + 130]]) as step:
                for layer in range(2):
                    step.append(layer, tokens.k[layer, :PROMPT + 130],
                                tokens.v[layer, :PROMPT + 130])
            read_all(self.queue, first, 2)
            seen = {}
            for piece in PIECES:
                out = Outputs()
                with self.client.session(tokens.rows, prefix=ids[:300], **options) as session:
                    begin = session.tokens
                    self.assertEqual(begin, 256)
                    while session.tokens < PROMPT:
                        out.add(tokens.feed(self.queue, session,
                                            min(piece, PROMPT - session.tokens)))
                    seen[piece] = out, self.finish(session, tokens)
                self.assert_alike(seen[piece][0], seen[PROMPT][0], piece, "behind a prefix")
                self.assertTrue(seen[piece][1] == seen[PROMPT][1])

    @long_emulated
    def test_shards(self):
        """Shards of a session, each with its heads."""
        seen = {}
        both = [Tokens(20 + i, PROMPT + MORE, q_heads=2, kv_heads=1, dim=64) for i in range(2)]
        for piece in PIECES[:3]:
            outs = [Outputs(), Outputs()]
            shards = [self.client.session(both[i].rows, "oscar2", name="sharded", shard=i,
                                          shards=2, prompt_tokens=PROMPT) for i in range(2)]
            while shards[0].tokens < PROMPT:
                n = min(piece, PROMPT - shards[0].tokens)
                for i, step in enumerate(self.step_both(shards, both, n)):
                    outs[i].add(step)
            self.step_both(shards, both, 130)
            seen[piece] = [read_all(self.queue, s, 2) for s in shards]
            for i in range(2):
                self.assertEqual(shards[i].info()["exact_tokens"], PROMPT)
                seen[piece, i] = outs[i]
                self.assert_alike(outs[i], seen[PROMPT, i], piece, f"shard {i}")
            self.assertTrue(seen[piece] == seen[PROMPT])
            shards[0].drop()  # and with it the other

    def step_both(self, shards, both, n):
        """One step of both shards. Returns what each has answered."""
        at = slice(shards[0].tokens, shards[0].tokens + n)
        results = [[], []]
        with self.queue.step(shards, [n, n]) as step:
            for layer in range(2):
                k, v, q = (np.concatenate([getattr(t, x)[layer, at] for t in both]) for x in "kvq")
                out, lse = step.append_attend(layer, k, v, q)
                for i in range(2):
                    results[i].append((out[i * n:(i + 1) * n], lse[i * n:(i + 1) * n]))
        return results


class Kept(Stored, Prompts):
    def setUp(self):
        super().setUp()
        self.data = self.tokens()
        self.want, self.stored = self.whole(self.data)

    def check(self, between):
        """A prompt with something in its middle that is to change nothing."""
        for piece in PIECES[1:3]:
            out = Outputs()
            name = f"middle {piece}"
            session = self.client.session(self.data.rows, "oscar2", prompt_tokens=PROMPT,
                                          name=name)
            self.feed_to(session, self.data, 320, 64, out)
            session = between(session, name)
            self.assertEqual(session.info()["exact_tokens"], PROMPT)
            self.feed_to(session, self.data, PROMPT, piece, out)
            self.assert_alike(out, self.want, piece, "with a stay on disk")
            self.assertTrue(self.finish(session, self.data) == self.stored)
            session.drop()

    def test_parked(self):
        def park(session, _):
            session.park()
            return session
        self.check(park)

    @long_emulated
    def test_saved_and_restored(self):
        def save(session, name):
            session.save()
            session.close()
            self.again()
            return self.client.session(name=name, must_exist=True)
        self.check(save)

    @long_emulated
    def test_saved_under_way(self):
        def save(session, _):
            session.save()
            return session
        self.check(save)


def feed_piece(queue, tokens, session, n):
    """A piece of a prompt of which only the last token asks."""
    at = slice(session.tokens, session.tokens + n)
    with queue.step([session], [n]) as step:
        for layer in range(tokens.layers):
            step.append(layer, tokens.k[layer, at], tokens.v[layer, at])
            step.attend(layer, tokens.q[layer, at][-1:], 1)


class Short(Test, Prompts):
    """Room for all that is asked for here if prompts are packed, and not if they are not."""
    SESSIONS, LONG = 6, 4096 if BACKEND == "cpu" else 1280
    DAEMON = {"pool_bytes": "20mb" if BACKEND == "cpu" else "6mb", "extent_bytes": "2mb"}

    def prompts(self, **options):
        """As many prompts at once, in pieces of 256. How many sessions were packed early."""
        tokens = [Tokens(30 + i, self.LONG + 200, q_heads=4, dim=64)
                  for i in range(self.SESSIONS)]
        sessions = [self.client.session(t.rows, "oscar2", prompt_tokens=self.LONG, **options)
                    for t in tokens]
        for _ in range(self.LONG // 256):
            for t, s in zip(tokens, sessions):
                feed_piece(self.queue, t, s, 256)
        infos = [s.info() for s in sessions]
        for t, s in zip(tokens, sessions):
            t.feed(self.queue, s, 130, attend=False)
        stored = [read_all(self.queue, s, 2) for s in sessions]
        for s in sessions:
            s.close()
        return [i["exact_tokens"] for i in infos], stored

    def test_gives_way(self):
        """Nobody is refused; the daemon says how many were packed, and what is stored is the
        same."""
        before = self.daemon.status()
        exact, want = self.prompts(packed_prompt=True)
        self.assertEqual(exact, [0] * self.SESSIONS)
        now = self.daemon.status()
        for name in ("prompts_packed", "parked_room", "refused_for_room"):
            self.assertEqual(now["counters"][name], before["counters"][name])
        exact, stored = self.prompts()
        self.assertTrue(stored == want)
        status = self.daemon.status()
        packed = (status["counters"]["prompts_packed"] -
                  before["counters"]["prompts_packed"])
        self.assertGreater(packed, 0)
        self.assertEqual(exact.count(0), packed)
        self.assertEqual(set(exact) - {0}, {self.LONG} if packed < self.SESSIONS else set())
        self.assertEqual(status["counters"]["refused_requests"],
                         before["counters"]["refused_requests"])
        self.assertGreater(status["counters"]["prompts_packed_bytes"], MIB)

    @long_emulated
    def test_beside_others(self):
        """Prompts of two clients at once, and a session that only decodes."""
        failures = []

        def engine(seed):
            try:
                with self.daemon.client() as client, client.queue() as queue:
                    tokens = Tokens(seed, self.LONG + 8, q_heads=4, dim=64)
                    for _ in range(3):
                        with client.session(tokens.rows, "oscar2",
                                            prompt_tokens=self.LONG) as session:
                            while session.tokens < self.LONG:
                                feed_piece(queue, tokens, session,
                                           min(512, self.LONG - session.tokens))
            except Exception as error:  # noqa: BLE001: told by the test
                failures.append(error)
        threads = [threading.Thread(target=engine, args=(50 + i,)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        self.assertEqual(failures, [])
