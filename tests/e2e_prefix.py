# SPDX-License-Identifier: Apache-2.0
"""Prefixes: engines that begin with the same tokens share the blocks of these."""
import kvq
import numpy as np

from e2e_rig import MIB, Test

LAYERS, HEADS, DIM, STEP = 2, 2, 64, 512
LONG = 8192


class Engine:
    """A connection with buffers that K and V of one step fit into. K and V of a token depend on its
    position and seed alone, as the ids do."""

    def __init__(self, daemon, seed=0):
        self.client = client = daemon.client()
        self.queue = client.queue()
        self.rows = [kvq.Layer(4, HEADS, DIM, repeat=LAYERS)]
        self.seed = seed
        self.k = [client.array((STEP, HEADS, DIM)) for _ in range(LAYERS)]
        self.v = [client.array((STEP, HEADS, DIM)) for _ in range(LAYERS)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def ids(self, tokens):
        return (np.arange(tokens) * 7 + self.seed) % 50021

    def open(self, tokens=0, **options):
        options.setdefault("model", "m")
        return self.client.session(self.rows, "oscar2", prefix=self.ids(tokens), **options)

    def lookup(self, tokens, **options):
        options.setdefault("model", "m")
        return self.client.lookup(self.rows, "oscar2", prefix=self.ids(tokens), **options)

    def feed(self, session, to):
        """Appends tokens until the session has so many."""
        while session.tokens < to:
            at, n = session.tokens, min(STEP, to - session.tokens)
            random = np.random.default_rng(self.seed + at)
            for layer in range(LAYERS):
                self.k[layer][:n] = random.standard_normal((n, HEADS, DIM), np.float32)
                self.v[layer][:n] = random.standard_normal((n, HEADS, DIM), np.float32)
            self.queue.step_whole([session], n, self.k, self.v, ids=self.ids(at + n)[at:])


class Prefixes(Test):
    DAEMON = {"pool_bytes": "512mb"}

    def test_two_engines_share_8k_tokens(self):
        with Engine(self.daemon) as first, Engine(self.daemon) as second:
            self.share(first, second)

    def share(self, first, second):
        before = self.prefix_status()
        one = first.open()
        first.feed(one, LONG)
        alone = one.info()
        self.assertEqual(alone["shared_bytes"], alone["packed_bytes"])  # the index has them, too
        used = self.daemon.status()["pool_used_bytes"]
        self.assertEqual(second.lookup(LONG), LONG)
        two = second.open(LONG)
        self.assertEqual(two.tokens, LONG)
        # Not one block more than one engine has: what two sessions list is there once.
        self.assertEqual(self.daemon.status()["pool_used_bytes"], used)
        info = two.info()
        self.assertEqual(info["packed_bytes"], alone["packed_bytes"])
        self.assertEqual(info["shared_bytes"], info["packed_bytes"])
        self.assertEqual(info["prefix_tokens"], LONG)
        self.assertEqual(info["window_bytes"], 0)
        self.assertLess(info["table_bytes"], MIB // 4)
        shown = self.daemon.ctl("session", "show", f"#{info['id']}")
        self.assertEqual(shown["shared_bytes"], info["packed_bytes"])
        status = {k: v - before.get(k, 0) for k, v in self.prefix_status().items()}
        self.assertEqual(status["pages"], LONG // 128)
        self.assertEqual(status["bytes"], info["packed_bytes"])
        self.assertEqual(status["idle_bytes"], 0)
        self.assertEqual(status["hit_tokens"], LONG)
        # Both read the same, and go on alone.
        a = first.queue.read(one, 1, LONG - 300)
        b = second.queue.read(two, 1, LONG - 300)
        np.testing.assert_array_equal(a, b)
        second.feed(two, LONG + 128)
        self.assertEqual(one.refresh(), LONG)
        two.close()
        one.close()
        self.assertEqual(first.lookup(LONG), LONG)  # it outlives both

    def prefix_status(self):
        """Of the only namespace; empty before anybody has told ids."""
        found = self.daemon.ctl("prefix", "status")
        return {k: v for k, v in found[0].items() if k != "namespace"} if found else {}

    def test_other_tokens_and_other_meanings(self):
        image = (200, 90, bytes(range(32)))
        with Engine(self.daemon, seed=3) as engine, engine.open(spans=[image]) as session:
            engine.feed(session, 1024)
            self.assertEqual(engine.lookup(1024, spans=[image]), 1024)
            self.assertEqual(engine.lookup(1024), 128)
            self.assertEqual(engine.lookup(1024, spans=[(200, 90, bytes(32))]), 128)
            for other in ({"model": "n"}, {"salt": "s"}, {"adapter": "lora"}):
                self.assertEqual(engine.lookup(1024, spans=[image], **other), 0)
            engine.seed = 4
            self.assertEqual(engine.lookup(1024, spans=[image]), 0)

    def test_refusals(self):
        rows = [kvq.Layer(4, HEADS, DIM)]
        with self.assertRaises(kvq.Error) as caught:
            self.client.lookup(rows, "innerq-base", prefix=[1] * 200, model="m")
        self.assertEqual(caught.exception.code, kvq.Code.E_UNSUPPORTED)
        self.assertIn("fork", str(caught.exception))
        with self.assertRaises(kvq.Error) as caught:
            self.client.lookup(rows, "oscar2", prefix=[1] * 200)
        self.assertEqual(caught.exception.code, kvq.Code.E_UNSUPPORTED)
        with self.client.session(rows, "oscar2") as session, self.assertRaises(kvq.Error) as caught:
            session.tell_spans([(1 << 30, 5, bytes(32))])
        self.assertEqual(caught.exception.code, kvq.Code.E_INVALID)
