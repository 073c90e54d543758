# SPDX-License-Identifier: Apache-2.0
"""First tokens that stay raw, wherever a session's first page goes."""
import e2e_storage
import numpy as np
from e2e_prefix import Engine
from e2e_rig import Test, Tokens, kvq

# And the same without them.
FORMATS = {"kivi-sink2": "kivi2:unit=32:recent=96", "kvq2": "kvq2-s0",
           "kivi2:sink=96:unit=32": "kivi2:unit=32"}


class Sinks(Test):
    def opened(self, rows, tokens, format, **options):
        session = self.client.session(rows, format, **options)
        tokens.feed(self.queue, session, tokens.n, attend=False)
        for layer in range(tokens.layers):
            self.queue.read(session, layer)  # all that is due is packed
        return session

    def same(self, one, other, tokens):
        """Both begin with the same K and V, in all layers."""
        for layer in range(2):
            for a, b in zip(*(self.queue.read(s, layer, 0, tokens) for s in (one, other))):
                np.testing.assert_array_equal(a, b)

    def test_forks_within_the_first_page(self):
        """Of a session whose first page is packed and no longer raw."""
        tokens = Tokens(7, 600)
        for format in (*FORMATS, "innerq-base"):
            session = self.opened(tokens.rows, tokens, format, prompt_tokens=256)
            for at in (128, 96, 64, 32):
                try:
                    fork, = self.queue.fork([session], at)
                except kvq.Error as e:  # of what the format packs or learns from at once
                    self.assertIn((format, e.code), [("innerq-base", kvq.Code.E_ROLLBACK),
                                                     ("kvq2", kvq.Code.E_ROLLBACK)])
                    continue
                self.same(session, fork, at)
                fork.close()
            session.close()

    def test_forks_share_them(self):
        tokens = Tokens(8, 600)
        for format, bare in FORMATS.items():
            with self.opened(tokens.rows, tokens, format) as session, \
                    self.opened(tokens.rows, tokens, bare) as other:
                sinks = session.info()["packed_bytes"] - other.info()["packed_bytes"]
                self.assertGreater(sinks, 0)
                fork, twin = self.queue.fork([session, other], 384)
                self.same(session, fork, 256)
                shared = [s.info()["shared_bytes"] for s in (fork, twin)]
                self.assertEqual(shared[0] - shared[1], sinks)
                fork.close()
                twin.close()

    def test_behind_a_window_nothing_is_kept(self):
        """What a window of 200 tokens has let go of are blocks and sinks."""
        rows = [kvq.Layer(8, 2, 128, window=200, repeat=2)]
        tokens = Tokens(9, 1024)
        for format, bare in FORMATS.items():
            sizes = []
            for name in (format, bare):
                with self.opened(rows, tokens, name) as session:
                    info = session.info()
                    sizes.append((info["packed_bytes"], info["window_bytes"]))
            self.assertEqual(*sizes)


class Stored(e2e_storage.Stored):
    def test_prefixes_are_shared_and_stored(self):
        for format in FORMATS:
            with Engine(self.daemon, format=format) as one, \
                    Engine(self.daemon, format=format) as other:
                session = one.open(name="it")
                one.feed(session, 700)
                found = other.lookup(700)
                self.assertEqual(found, 512 if format == "kivi-sink2" else 640)
                shared = other.open(700)
                self.assertEqual(shared.tokens, found)
                rows = [one.queue.read(session, layer, 0, found) for layer in range(2)]
                for layer in range(2):
                    np.testing.assert_array_equal(other.queue.read(shared, layer), rows[layer])
                session.save()
            self.again()
            with Engine(self.daemon, format=format) as one:
                self.assertEqual(one.lookup(700), found)
                shared = one.open(700)
                self.assertEqual(shared.tokens, found)
                for layer in range(2):
                    np.testing.assert_array_equal(one.queue.read(shared, layer), rows[layer])
                whole = one.open(name="it")
                self.assertEqual(whole.tokens, 700)
                for layer in range(2):
                    np.testing.assert_array_equal(one.queue.read(whole, layer, 0, found),
                                                  rows[layer])
                shared.close()
                whole.drop()
