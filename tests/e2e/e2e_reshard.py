# SPDX-License-Identifier: Apache-2.0
"""Sessions that are saved with one number of shards and opened with another."""
import os

from e2e_rig import Tokens, feed, kvq, long_emulated, read_all
from e2e_storage import Stored

HEADS, RATIO, DIM, LAYERS = 8, 2, 64, 2


class Part(Tokens):
    """One shard's part of a model's tokens, by KV heads."""

    def __init__(self, whole, shard, shards):
        n = HEADS // shards
        own = slice(shard * n, (shard + 1) * n)
        queries = slice(own.start * RATIO, own.stop * RATIO)
        self.n, self.layers = whole.n, whole.layers
        self.rows = [kvq.Layer(n * RATIO, n, whole.k.shape[-1], repeat=LAYERS)]
        self.k, self.v, self.q = whole.k[:, :, own], whole.v[:, :, own], whole.q[:, :, queries]


class Deal:
    """All shards of one session."""

    def __init__(self, test, whole, format, name, shards, **options):
        self.queue = test.queue
        self.parts = [Part(whole, i, shards) for i in range(shards)]
        self.sessions = [
            test.client.session(p.rows, format, name=name, shard=i, shards=shards, **options)
            for i, p in enumerate(self.parts)]

    @property
    def tokens(self):
        return self.sessions[0].tokens

    def feed(self, n):
        """A step of n tokens. Returns its attention, as bytes."""
        results = feed(self.queue, self.parts, self.sessions, [n] * len(self.sessions))
        for s in self.sessions:
            s.refresh()
        return b"".join(a.tobytes() for pair in results for a in pair)

    def read(self):
        """K and V of all shards as attention sees them."""
        return [read_all(self.queue, s, LAYERS) for s in self.sessions]

    def save(self):
        self.sessions[0].save()

    def drop(self):
        self.sessions[0].drop()

    def close(self):
        for s in self.sessions:
            s.close()


class Shards(Stored):
    def whole(self, seed, n=800):
        return Tokens(seed, n, LAYERS, HEADS * RATIO, HEADS, DIM)

    def goes_on(self, a, b):
        """Two that have as many shards hold the same, and go on alike."""
        for n in (1, 150):
            self.assertEqual(a.tokens, b.tokens)
            self.assertTrue(a.read() == b.read())
            self.assertTrue(a.feed(n) == b.feed(n))

    def listed(self, name):
        return [(e["shard"], e["shards"]) for e in self.daemon.ctl("storage", "list")
                if e["name"] == name]

    @long_emulated
    def test_numbers(self):
        """Saved with 2, the daemon killed with -9, opened with 1, 4 and 8."""
        for number, format in ((1, "oscar2"), (4, "kivi-sink2"), (8, "innerq-hybrid")):
            whole = self.whole(number)
            before = Deal(self, whole, format, "it", 2)
            before.feed(400)
            before.save()
            self.again()
            after = Deal(self, whole, format, "it", number)
            self.daemon.wait_log(f"session_restored .*shard 0 of {number}, of 2 saved")
            twin = Deal(self, whole, format, "twin", number)
            twin.feed(400)
            self.goes_on(after, twin)
            self.assertEqual(self.listed("it"), [(0, 2), (1, 2)])
            after.save()
            self.assertEqual(self.listed("it"), [(i, number) for i in range(number)])
            after.drop()
            twin.drop()
            self.assertEqual(self.listed("it"), [])

    @long_emulated
    def test_layers(self):
        """A pipeline's stages: two of one layer each become one of two."""
        whole = Tokens(5, 600, 2, 4, 2, DIM)
        parts = []
        for i in range(2):
            part = Tokens(5, 600, 1, 4, 2, DIM)
            part.k, part.v, part.q = (getattr(whole, x)[i:i + 1] for x in "kvq")
            parts.append(part)
        stages = [self.client.session(p.rows, "oscar2", name="it", shard=i, shards=2)
                  for i, p in enumerate(parts)]
        feed(self.queue, parts, stages, [400, 400])
        stages[0].save()
        self.again()
        one = self.client.session(whole.rows, "oscar2", name="it")
        twin = self.client.session(whole.rows, "oscar2")
        whole.feed(self.queue, twin, 400)
        self.assertEqual(one.tokens, 400)
        saved = self.daemon.ctl("session", "save", "it")  # the blocks are those of the stages
        self.assertGreater(saved["kept_blocks"], saved["written_blocks"])
        self.assertEqual(self.listed("it"), [(0, 1)])
        self.daemon.ctl("storage", "compact")
        self.assertEqual(self.daemon.ctl("storage", "verify")["damaged_bytes"], 0)
        self.again()
        one = self.client.session(whole.rows, "oscar2", name="it")
        twin = self.client.session(whole.rows, "oscar2")
        whole.feed(self.queue, twin, 400)
        self.same(one, twin, whole)

    @long_emulated
    def test_while_in_memory(self):
        """It makes way when it is saved and closed, and not before."""
        whole = self.whole(6)
        two = Deal(self, whole, "oscar2", "it", 2)
        two.feed(300)
        text = ("exists with 2 shards, 1 are asked for", "kvqctl session save")
        options = {"name": "it", "layers": Part(whole, 0, 1).rows, "format": "oscar2"}
        self.fails(kvq.Code.E_EXISTS, self.client.session, text=text, **options)
        two.save()
        self.fails(kvq.Code.E_EXISTS, self.client.session, text=text, **options)
        two.close()
        with Deal(self, whole, "oscar2", "it", 1).sessions[0] as one:
            self.assertEqual(one.tokens, 300)
        # Now it is in memory with one, which is not how it is stored.
        self.fails(kvq.Code.E_EXISTS, self.client.session, text=("1 shards, 8 are asked for",),
                   **dict(options, shards=8))
        self.daemon.ctl("session", "save", "it")
        self.daemon.ctl("session", "restore", "it", "--shards", "4")
        self.assertEqual(len([s for s in self.daemon.ctl("session", "list")
                              if s["name"] == "it"]), 4)
        self.client.restore("it", shard=3, shards=4)
        self.fails(kvq.Code.E_EXISTS, self.client.restore, "it", shards=2,
                   text=("4 shards, 2 are asked for",))
        self.fails(kvq.Code.E_INVALID, self.client.restore, "it", shard=2, shards=2,
                   text=("shard 2 of 2",))
        four = Deal(self, whole, "oscar2", "it", 4)
        four.feed(10)
        self.assertEqual(four.tokens, 310)

    def test_by_several(self):
        """Each rank of the new number comes when it comes, with a client of its own."""
        whole = self.whole(11, 300)
        two = Deal(self, whole, "kivi2", "it", 2)
        two.feed(200)
        two.save()
        self.again()
        ranks = [self.daemon.client() for _ in range(4)]
        sessions = []
        for i, client in enumerate(ranks):
            part = Part(whole, i, 4)
            queue = client.queue()
            session = client.session(part.rows, "kivi2", name="it", shard=i, shards=4)
            self.assertEqual(session.tokens, 200)
            if i < 3:
                self.fails(kvq.Code.E_NO_SESSION, part.feed, queue, session, 1, attend=False,
                           text=(f"shard {i + 1} of this session",))
            sessions.append((queue, session, part))
        for queue, session, part in sessions:
            part.feed(queue, session, 10, attend=False)
        for queue, session, _ in sessions:
            session.refresh()
            self.assertEqual(session.tokens, 210)
        twin = Deal(self, whole, "kivi2", "twin", 4)
        twin.feed(210)
        self.assertEqual([read_all(queue, session, LAYERS) for queue, session, _ in sessions],
                         twin.read())
        for client in ranks:
            client.close()

    def test_as_it_is(self):
        """Who asks for nothing gets a shard of as many as there are in memory."""
        whole = self.whole(9, 300)
        two = Deal(self, whole, "oscar2", "it", 2)
        two.feed(200)
        two.save()
        self.again()
        self.fails(kvq.Code.E_NO_SESSION, self.client.session, name="it", shard=5)
        self.fails(kvq.Code.E_NO_SESSION, self.client.restore, "it", shard=5)
        self.daemon.ctl("session", "restore", "it", "--shards", "8", "--shard", "0")
        with self.client.session(name="it", shard=5) as one:
            info = one.info()
            self.assertEqual((info["shards"], info["tokens"]), (8, 200))
        self.client.restore("it", shard=7)
        eight = Deal(self, whole, "oscar2", "it", 8)
        eight.feed(10)
        self.assertEqual(eight.tokens, 210)

    def test_refusals(self):
        whole = self.whole(7, 300)
        two = Deal(self, whole, "oscar2-xh", "xh", 2)
        two.feed(200)
        two.save()
        plain = Deal(self, whole, "oscar2", "plain", 2)
        plain.feed(200)
        plain.save()
        self.again()
        options = {"name": "xh", "layers": Part(whole, 0, 1).rows, "format": "oscar2-xh"}
        self.fails(kvq.Code.E_EXISTS, self.client.session,
                   text=("oscar2-xh", "over all KV heads", "open it with 2"), **options)
        self.fails(kvq.Code.E_EXISTS, self.client.session, text=("cannot share equally",),
                   name="plain", layers=options["layers"], format="oscar2", shards=3)
        self.fails(kvq.Code.E_EXISTS, self.client.session, text=("5 layers are asked for",),
                   name="plain", layers=[kvq.Layer(2, 1, DIM, repeat=5)], format="oscar2")
        self.assertEqual(Deal(self, whole, "oscar2-xh", "xh", 2).tokens, 200)

    def spoil(self, part):
        """Changes a byte of where these values stand on disk."""
        folder = os.path.join(self.folder, "store")
        path = [os.path.join(folder, f) for f in sorted(os.listdir(folder)) if "seg" in f][-1]
        with open(path, "r+b") as file:
            at = file.read().find(part.astype("float16").tobytes())
            self.assertGreater(at, 0)
            file.seek(at)
            file.write(b"\xff\x00")

    @long_emulated
    def test_damage_beneath(self):
        """What is in memory does not make way for less."""
        whole = self.whole(10)
        two = Deal(self, whole, "f16", "it", 2)
        two.feed(400)
        two.save()
        two.close()
        self.spoil(whole.k[1, 200, 0])
        self.assertEqual(self.daemon.ctl("storage", "verify", check=False)[0], 7)
        self.fails(kvq.Code.E_EXISTS, self.client.session, name="it", format="f16",
                   layers=Part(whole, 0, 1).rows)
        two = Deal(self, whole, "f16", "it", 2)
        self.assertEqual(two.tokens, 400)
        self.daemon.ctl("session", "save", "it", "--again")
        two.close()
        one = Deal(self, whole, "f16", "it", 1)
        self.assertEqual(one.tokens, 400)
        self.assertTrue(one.read()[0])

    @long_emulated
    def test_damage(self):
        """What is damaged in one shard is lost to all, whatever their number."""
        whole = self.whole(8)
        two = Deal(self, whole, "f16", "it", 2)
        two.feed(300)
        two.feed(300)
        two.save()
        self.spoil(whole.k[1, 300, HEADS - 1])  # page 2 of layer 1 of the second shard
        self.again()
        with self.client.session(name="it", layers=Part(whole, 0, 4).rows, format="f16",
                                 shards=4) as first:
            self.assertEqual(first.tokens, 600)  # nobody has looked yet
            read_all(self.queue, first, LAYERS)  # it has none of those heads
            options = {"name": "it", "layers": Part(whole, 3, 4).rows, "format": "f16",
                       "shards": 4, "shard": 3}
            last = self.client.session(**options)
            self.fails(kvq.Code.E_DAMAGED, read_all, self.queue, last, LAYERS)
            last.close()
        four = Deal(self, whole, "f16", "it", 4)
        self.assertEqual(four.tokens, 256)
        twin = Deal(self, whole, "f16", "twin", 4)
        twin.feed(256)
        self.assertTrue(four.read() == twin.read())
        four.feed(20)
