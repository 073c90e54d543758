# SPDX-License-Identifier: Apache-2.0
"""Prefixes: engines that begin with the same tokens share the blocks of these."""
import os
import stat
import threading
import unittest.mock

import e2e_storage
import kvq
import numpy as np

from e2e_http import metrics_of, wait_times
from e2e_rig import MIB, Test, long_emulated

LAYERS, HEADS, DIM, STEP = 2, 2, 64, 512
LONG = 8192


class Engine:
    """A connection with buffers that K and V of one step fit into. K and V of a token depend on its
    position and seed alone, as the ids do."""

    def __init__(self, daemon, seed=0, format="oscar2"):
        self.format = format
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
        return self.client.session(self.rows, self.format, prefix=self.ids(tokens), **options)

    def lookup(self, tokens, **options):
        options.setdefault("model", "m")
        return self.client.lookup(self.rows, self.format, prefix=self.ids(tokens), **options)

    def fill(self, at, n):
        """K and V of so many tokens."""
        random = np.random.default_rng(self.seed + at)
        for layer in range(LAYERS):
            self.k[layer][:n] = random.standard_normal((n, HEADS, DIM), np.float32)
            self.v[layer][:n] = random.standard_normal((n, HEADS, DIM), np.float32)

    def feed(self, session, to):
        """Appends tokens until the session has so many."""
        while session.tokens < to:
            at, n = session.tokens, min(STEP, to - session.tokens)
            self.fill(at, n)
            self.queue.step_whole([session], n, *self.rows_of(n), ids=self.ids(at + n)[at:])

    def rows_of(self, n):
        """K and V of all layers, of a step of n tokens."""
        return [k[:n] for k in self.k], [v[:n] for v in self.v]


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
        self.assertEqual(status["asked_tokens"], LONG)  # lookups are not sessions that begin
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

    @long_emulated
    def test_in_context(self):
        """Engines that attend in their own context tell ids at the step's end."""
        for seed, through in ((5, None), (6, "daemon")):
            with self.subTest(through), Engine(self.daemon, seed) as engine:
                self.tell_in_context(engine, through)

    def tell_in_context(self, engine, through):
        with unittest.mock.patch.dict(os.environ, {"KVQ_LOCAL": through} if through else {}):
            local = engine.queue.local()
        self.assertEqual(local.why is None, through is None, local.why)
        session = engine.open(place="host")
        local.add(session)
        q = np.ones((STEP, 4, DIM), np.float32)
        for at in range(0, 1024, STEP):
            engine.fill(at, STEP)
            with local.step([session], STEP, ids=engine.ids(at + STEP)[at:]) as step:
                for layer in range(LAYERS):
                    step.attend(layer, q, k=engine.k[layer], v=engine.v[layer])
        self.assertEqual(session.tokens, 1024)
        for _ in range(10000):  # units may be packed after the step has ended
            if engine.lookup(2048, place="host") == 1024:
                break
        twin = engine.open(2048, place="host")
        self.assertEqual(twin.tokens, 1024)
        local.add(twin)  # what it shares can be seen here as well
        want, _ = engine.queue.attend([twin], 0, q[:1])
        with local.step([twin], 0) as step:
            got, _ = step.attend(0, q[:1])
        np.testing.assert_array_equal(got, want)

    def test_closed_at_once(self):
        """A prompt with a short answer, whose session or client ends with the last step."""
        with Engine(self.daemon) as other:
            for other.seed in range(30, 36):
                with Engine(self.daemon, other.seed) as engine:
                    session = engine.open(max_rollback=32, prompt_tokens=400, place="host")
                    engine.feed(session, 404)
                    if other.seed % 2:
                        session.close()
                self.found(other, 404, 384)
                longer = other.open(salt="longer", place="host")
                other.feed(longer, 404)
                other.feed(longer, 512)
                with other.open(404, place="host") as twin, longer:
                    self.assertEqual(twin.tokens, 384)
                    read = [other.queue.read(s, 1, 0) for s in (twin, longer)]
                for got, want in zip(*read):
                    np.testing.assert_array_equal(got, want[:384])

    def found(self, engine, ask, tokens):
        """Sessions that have ended are packed in the background."""
        for _ in range(10000):
            if engine.lookup(ask, place="host") == tokens:
                return
        self.fail(f"{tokens} tokens of {ask} are not there")

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

    def test_as_many_spans_and_layers_as_can_be(self):
        spans = [(2 * i, 1, i.to_bytes(32, "little")) for i in range(1024)]
        with Engine(self.daemon) as engine:
            engine.rows = [kvq.Layer(4, HEADS, DIM) for _ in range(256)]
            self.assertEqual(engine.lookup(2048, spans=spans), 0)
            with engine.open(2048, spans=spans) as session:
                session.tell_spans(spans)
                self.assertEqual(session.tokens, 0)
            with self.assertRaises(kvq.Error) as caught:
                engine.open(2048, spans=[*spans, (2048, 1, bytes(32))])
            self.assertEqual(caught.exception.code, kvq.Code.E_LIMIT)

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


class Stored(e2e_storage.Stored):
    """Prefixes outlive the daemon with the sessions that are saved."""
    TOKENS = 2048

    def again(self, **options):
        super().again(**options)
        self.engine = Engine(self.daemon)

    def save(self, tokens=TOKENS, **options):
        """A session that is saved, and its daemon killed; what it read before."""
        with Engine(self.daemon) as engine:
            session = engine.open(name="it", **options)
            engine.feed(session, tokens)
            rows = engine.queue.read(session, 1, 0)
            session.save()
        self.again()
        return rows

    def open_all(self, n):
        """Engines that open at the same time."""
        engines, sessions = [Engine(self.daemon) for _ in range(n)], [None] * n

        def run(i):
            sessions[i] = engines[i].open(self.TOKENS)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return engines, sessions

    @long_emulated
    def test_found_after_a_restart(self):
        rows = self.save()
        self.assertEqual(self.engine.lookup(self.TOKENS), self.TOKENS)
        self.assertEqual(self.engine.lookup(self.TOKENS - 1), self.TOKENS - 128)
        self.assertEqual(self.daemon.status()["sessions"], 0)  # to look up reads nothing
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)
        engines, sessions = self.open_all(3)
        self.daemon.wait_log("event=prefix_restored .*2048 tokens")
        packed = sessions[0].info()["packed_bytes"]
        for engine, session in zip(engines, sessions):
            self.assertEqual(session.tokens, self.TOKENS)
            self.assertEqual(session.info()["prefix_tokens"], self.TOKENS)
            np.testing.assert_array_equal(engine.queue.read(session, 1, 0), rows)
        self.assertEqual(self.daemon.status()["pool_used_bytes"], packed)  # once
        self.assertEqual(len(self.daemon.ctl("session", "list")), 3)
        read = [line for line in self.daemon.lines if "event=prefix_restored" in line]
        self.assertEqual(len(read), 1, read)
        wait_times(self.daemon, {"prefix": 1})
        # They go on, and the longer one is found as well.
        engines[0].feed(sessions[0], self.TOKENS + 256)
        self.assertEqual(engines[1].lookup(self.TOKENS + 256), self.TOKENS + 256)
        for engine in engines:
            engine.client.close()
        # What no session has goes, and is read again.
        self.daemon.wait_log("event=client_gone", 3)
        dropped = self.daemon.ctl("prefix", "drop")
        self.assertEqual(dropped["pages"], (self.TOKENS + 256) // 128)
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)
        self.daemon.wait_log("event=prefix_evicted .*2304 dropped")
        evicted = sum(s["evicted"] for s in self.daemon.ctl("prefix", "status"))
        self.assertGreaterEqual(evicted, dropped["pages"])
        self.assertEqual(evicted, sum(value for name, value in metrics_of(self.daemon).items()
                                      if name.startswith("kvqd_prefix_evicted_pages_total")))
        self.assertEqual(self.engine.open(self.TOKENS).tokens, self.TOKENS)

    @long_emulated
    def test_ends_at_once(self):
        """Sessions that share a prefix, saved in one transaction when the daemon ends: what they
        share is written once, though none of them was saved before."""
        self.save()
        alone = self.daemon.ctl("storage", "status")["live_bytes"]
        # Also where the blocks were saved once, and what was saved is gone.
        session = self.engine.client.session(name="it", must_exist=True)
        self.daemon.wait_log("event=session_restored")
        session.drop()
        with Engine(self.daemon) as engine:
            trunk = engine.open(name="trunk")
            engine.feed(trunk, self.TOKENS)
            for i in range(5):
                self.assertEqual(engine.open(self.TOKENS, name=f"{i}").tokens, self.TOKENS)
        self.again(kill=False)
        self.assertEqual(len(self.daemon.ctl("storage", "list")), 6)
        # Those of trunk, and those of "it", which the index had first.
        self.assertLess(self.daemon.ctl("storage", "status")["live_bytes"], 2.5 * alone)

    @long_emulated
    def test_side_by_side(self):
        """Different prefixes, of several namespaces, asked for at one time: each session has the
        bits that were saved, whichever was read first."""
        path = os.path.join(self.folder, "kvqd.conf")
        with open(path, "w", encoding="ascii") as file:
            for ns in "ab":
                file.write(f"[namespace {ns}]\nuids = {os.getuid()}\n")
        self.again(config=path)
        rows = {}
        for seed, ns in enumerate("ababab"):
            with Engine(self.daemon, seed) as engine:
                session = engine.open(name=f"it{seed}", ns=ns)
                engine.feed(session, 1024)
                rows[seed, ns] = engine.queue.read(session, 1, 0)
                session.save()
        self.again(config=path)
        engines = {key: Engine(self.daemon, key[0]) for key in rows}
        found = {}

        def run(key):
            session = engines[key].open(1024, ns=key[1])
            found[key] = session.tokens, engines[key].queue.read(session, 1, 0)

        threads = [threading.Thread(target=run, args=(key,)) for key in engines]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for key, (tokens, read) in found.items():
            self.assertEqual(tokens, 1024)
            np.testing.assert_array_equal(read, rows[key])
        self.assertEqual(len(found), 6)
        for engine in engines.values():
            engine.client.close()

    @long_emulated
    def test_part_of_it(self):
        self.save()
        session = self.engine.open(1000)
        self.assertEqual(session.tokens, 896)
        # No more was read than that.
        self.assertEqual(self.daemon.status()["pool_used_bytes"], session.info()["packed_bytes"])
        self.assertEqual(self.engine.lookup(1000), 896)
        for layer in range(LAYERS):  # waits: pages on their way from the disk are not shared
            self.engine.queue.read(session, layer, 0)
        longer = self.engine.open(self.TOKENS)  # the rest is read, the beginning shared
        self.assertEqual(longer.tokens, self.TOKENS)
        # What was read twice, where the poller had yet to see that all was there, goes again.
        self.daemon.wait_status("pool_used_bytes", longer.info()["packed_bytes"])

    def test_damage_of_the_oldest(self):
        """Two sessions have the same beginning on disk, and that of the older one is damaged: the
        younger one's is found."""
        with Engine(self.daemon, format="f16") as engine:
            for name in ("older", "younger"):
                session = engine.open(name=name)
                engine.feed(session, 1024)
                session.save()
            rows = engine.queue.read(session, 1, 0)
            engine.fill(0, STEP)
            row = engine.k[0][10, 0].astype(np.float16).tobytes()
        self.again()
        folder = os.path.join(self.folder, "store")
        path, = (os.path.join(folder, name) for name in os.listdir(folder) if "segment" in name)
        with open(path, "r+b") as file:
            data = file.read()
            self.assertEqual(data.count(row), 2)
            file.seek(data.find(row))
            file.write(bytes(8))
        self.assertEqual(self.daemon.ctl("storage", "verify", check=False)[0], 7)
        with Engine(self.daemon, format="f16") as engine:
            self.assertEqual(engine.lookup(1024), 1024)
            session = engine.open(1024)
            self.assertEqual(session.tokens, 1024)
            np.testing.assert_array_equal(engine.queue.read(session, 1, 0), rows)

    @long_emulated
    def test_ids_come_back(self):
        """The session itself is restored: others share its blocks."""
        self.save()
        session = self.engine.open(name="it")
        self.assertEqual(session.tokens, self.TOKENS)
        self.engine.queue.read(session, 1, 0)
        self.assertEqual(self.engine.lookup(self.TOKENS), self.TOKENS)
        used = self.daemon.status()["pool_used_bytes"]
        self.assertEqual(self.engine.open(self.TOKENS).tokens, self.TOKENS)
        self.assertEqual(self.daemon.status()["pool_used_bytes"], used)
        self.engine.feed(session, self.TOKENS + 128)
        self.assertEqual(self.engine.lookup(self.TOKENS + 128), self.TOKENS + 128)

    @long_emulated
    def test_other_meanings(self):
        self.save()
        others = [{"model": "n"}, {"salt": "s"}, {"adapter": "lora"}]
        for other in others + [{"ns": "uid-7"}] * (os.getuid() == 0):
            self.assertEqual(self.engine.lookup(self.TOKENS, **other), 0)
            self.assertEqual(self.engine.open(self.TOKENS, **other).tokens, 0)
        self.engine.seed = 1
        self.assertEqual(self.engine.lookup(self.TOKENS), 0)

    @long_emulated
    def test_shards(self):
        """Shards begin with what all of them have on disk."""
        half = STEP // 2
        with Engine(self.daemon) as engine:
            pair = [engine.open(name="pair", shard=i, shards=2) for i in range(2)]
            for at in range(0, 4 * half, half):
                engine.fill(at, 2 * half)
                ids = engine.ids(at + half)[at:]
                engine.queue.step_whole(pair, half, engine.k, engine.v, np.tile(ids, 2))
            rows = [engine.queue.read(s, 1, 0) for s in pair]
            pair[0].save()
        self.again()
        self.assertEqual(self.engine.lookup(2048), 0)  # of one shard there is none
        self.assertEqual(self.engine.lookup(2048, shard=1, shards=2), 1024)
        for name in ("once", "again"):
            pair = [self.engine.open(2048, name=name, shard=i, shards=2) for i in range(2)]
            for i, session in enumerate(pair):
                self.assertEqual(session.tokens, 1024)
                np.testing.assert_array_equal(self.engine.queue.read(session, 1, 0), rows[i])
        self.daemon.wait_log("event=prefix_restored", 2)
        self.assertEqual(sum("event=prefix_restored" in line for line in self.daemon.lines), 2)

    @long_emulated
    def test_other_namespaces(self):
        """Only those that the configuration shares with find anything, and have it as their own."""
        path = os.path.join(self.folder, "kvqd.conf")
        with open(path, "w", encoding="ascii") as file:
            for name, more in (("a", "share_prefixes_with = b\n"), ("b", ""), ("c", "")):
                file.write(f"[namespace {name}]\nuids = {os.getuid()}\n{more}")
        self.again(config=path)
        with Engine(self.daemon) as engine:
            session = engine.open(name="it", ns="a")
            engine.feed(session, self.TOKENS)
            session.save()
        self.again(config=path)
        for ns, found in (("a", self.TOKENS), ("b", self.TOKENS), ("c", 0), (None, 0)):
            self.assertEqual(self.engine.lookup(self.TOKENS, ns=ns), found, ns)
        for ns in ("c", None):
            self.assertEqual(self.engine.open(self.TOKENS, ns=ns).tokens, 0)
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)
        session = self.engine.open(self.TOKENS, ns="b")
        self.assertEqual(session.tokens, self.TOKENS)
        kept = {p["namespace"]: p["pages"] for p in self.daemon.ctl("prefix", "status")}
        self.assertEqual((kept.get("a", 0), kept["b"]), (0, self.TOKENS // 128))

    def test_other_namespace_has_none(self):
        """Another namespace knows more of the tokens, whose window is gone: nobody can begin with
        these, and what is read is one's own."""
        path = os.path.join(self.folder, "kvqd.conf")
        with open(path, "w", encoding="ascii") as file:
            for name, more in (("a", ""), ("b", "share_prefixes_with = a\n")):
                file.write(f"[namespace {name}]\nuids = {os.getuid()}\n{more}")
        rows = [kvq.Layer(4, HEADS, DIM), kvq.Layer(4, HEADS, DIM, window=256)]
        self.again(config=path)
        for ns, tokens in (("a", 512), ("b", self.TOKENS)):
            with Engine(self.daemon) as engine:
                engine.rows = rows
                session = engine.open(name=f"of-{ns}", ns=ns)
                engine.feed(session, tokens)
                session.save()
        self.again(config=path)
        self.engine.rows = rows
        self.assertEqual(self.engine.lookup(self.TOKENS, ns="b"), self.TOKENS)
        self.assertEqual(self.engine.lookup(1024, ns="b"), 0)
        self.assertEqual(self.engine.open(1024, ns="a").tokens, 512)
        line = self.daemon.wait_log("event=prefix_restored")
        self.assertIn('namespace="a" session="of-a"', line)

    @long_emulated
    def test_damage_of_one_shard(self):
        """No shard begins with more than is good of the others."""
        half, options = STEP // 2, {"model": "m", "shards": 2}
        with Engine(self.daemon) as engine:
            pair = [engine.client.session(engine.rows, "f16", name="pair", shard=i, **options)
                    for i in range(2)]
            for at in range(0, 4 * half, half):
                engine.fill(at, 2 * half)
                ids = engine.ids(at + half)[at:]
                engine.queue.step_whole(pair, half, engine.k, engine.v, np.tile(ids, 2))
            row = engine.k[1][half + 10, 0].astype(np.float16).tobytes()  # token 778, shard 1
            pair[0].save()
        self.again()
        engine, folder = self.engine, os.path.join(self.folder, "store")
        ask = dict(options, prefix=engine.ids(2048))
        self.assertEqual(engine.client.lookup(engine.rows, "f16", **ask), 1024)
        path, = (os.path.join(folder, name) for name in os.listdir(folder) if "segment" in name)
        with open(path, "r+b") as file:
            at = file.read().find(row)
            self.assertGreater(at, 0)
            file.seek(at)
            file.write(bytes(8))
        self.daemon.ctl("storage", "verify", check=False)
        for shard in range(2):
            self.assertEqual(engine.client.lookup(engine.rows, "f16", shard=shard, **ask), 768)
            session = engine.client.session(engine.rows, "f16", shard=shard, **ask)
            self.assertEqual(session.tokens, 768)

    @long_emulated
    def test_export(self):
        """Ids travel with a session; what it is found by only where the key is the same."""
        self.save()
        path = os.path.join(self.folder, "it.kvq")
        self.daemon.ctl("session", "export", "it", path)
        self.again()
        self.daemon.ctl("session", "drop", "it")
        os.remove(os.path.join(self.folder, "store", "prefix.key"))
        self.again()
        self.daemon.ctl("session", "import", path, "--as", "twin")
        self.assertEqual(self.engine.lookup(self.TOKENS), 0)
        session = self.engine.open(name="twin")
        self.engine.queue.read(session, 1, 0)
        self.assertEqual(self.engine.lookup(self.TOKENS), self.TOKENS)
        self.daemon.ctl("session", "save", "twin", "--again")
        self.again()
        self.assertEqual(self.engine.lookup(self.TOKENS), self.TOKENS)

    @long_emulated
    def test_key(self):
        """A secret of the store's: without it nothing that is stored is found."""
        path = os.path.join(self.folder, "store", "prefix.key")
        self.save()
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        with open(path, "rb") as file:
            key = file.read()
        for spoilt in (None, b"", key[:-1], key[:20] + b"x" + key[21:], key + b"x"):
            os.remove(path)
            if spoilt is not None:
                with open(path, "wb") as file:
                    file.write(spoilt)
            self.again()
            self.assertEqual(self.engine.lookup(self.TOKENS), 0)
            self.assertEqual(self.engine.open(self.TOKENS).tokens, 0)
            with open(path, "rb") as file:
                self.assertEqual(len(file.read()), len(key))
        with open(path, "wb") as file:
            file.write(key)
        os.chmod(path, 0o644)
        self.again()
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        self.assertEqual(self.engine.lookup(self.TOKENS), self.TOKENS)

    @long_emulated
    def test_catalog_made_anew(self):
        self.save()
        self.client.close()
        self.daemon.stop()
        os.remove(os.path.join(self.folder, "store", "catalog.db"))
        self.daemon = self.start()
        self.client = self.daemon.client()
        with Engine(self.daemon) as engine:
            self.assertEqual(engine.lookup(self.TOKENS), self.TOKENS)
            self.assertEqual(engine.open(self.TOKENS).tokens, self.TOKENS)

    @long_emulated
    def test_damage(self):
        """What cannot be read is computed anew. The open may have answered before the damage was
        found: then its requests fail, and another open has what is before."""
        self.save()
        self.client.close()
        self.daemon.stop()
        folder = os.path.join(self.folder, "store")
        for name in os.listdir(folder):
            if not name.startswith(("catalog", "lock", "prefix")):
                with open(os.path.join(folder, name), "r+b") as file:
                    file.seek(40000)
                    file.write(b"spoilt" * 10000)
        self.daemon = self.start()
        self.client = self.daemon.client()
        with Engine(self.daemon) as engine:
            first = engine.open(self.TOKENS)
            if first.tokens == self.TOKENS:
                self.fails(kvq.Code.E_DAMAGED, engine.queue.read, first, 1, 0)
                first = engine.open(self.TOKENS)
            self.assertLess(first.tokens, self.TOKENS)
            self.assertGreater(first.tokens, 0)
            self.daemon.wait_log("event=storage_damaged")
            engine.feed(first, self.TOKENS)
            self.assertEqual(engine.lookup(self.TOKENS), self.TOKENS)
