# SPDX-License-Identifier: Apache-2.0
"""Heads of other dimensions than those that are stored: the same bits as with zeros behind."""
import json
import os
import subprocess
import unittest

import e2e_reshard
import e2e_storage
import numpy as np
from e2e_rig import BIN, BOUND, BACKEND, Tokens, kvq, read_all

DIMS = {96: 128, 80: 128, 100: 128, 20: 64, 200: 256}  # and what they are stored as
FORMATS = "f16", "oscar2", "kvq2", "innerq-hybrid"
LENGTH, MORE = 300, 3


def padded(tokens, stored):
    """The same tokens with zeros behind Q, K and V, and the scale of what they had."""
    wide = Tokens(0, 1, layers=tokens.layers, dim=stored)
    dim = tokens.k.shape[-1]
    wide.n = tokens.n
    for name in "kvq":
        rows = getattr(tokens, name)
        setattr(wide, name, np.pad(rows, ((0, 0),) * 3 + ((0, stored - dim),)))
    wide.rows = scaled_as(dim, stored)
    return wide


def scaled_as(dim, stored):
    """Two layers with heads of `stored`, and the softmax scale of heads of `dim`."""
    return [kvq.Layer(8, 2, stored, scale=float(np.float32(1) / np.sqrt(np.float32(dim))),
                      repeat=2)]


class Dims(e2e_storage.Stored):
    def assert_same(self, narrow, wide, dim):
        """Outputs and log-sum-exps of a step."""
        for (out, lse), (want, want_lse) in zip(narrow, wide):
            self.assertEqual(out.shape[-1], dim)
            np.testing.assert_array_equal(out, want[..., :dim])
            np.testing.assert_array_equal(lse, want_lse)
            self.assertTrue(np.isfinite(out).all() and out.any())

    def opened(self, tokens, form, **options):
        return self.client.session(tokens.rows, form, place="host", **options)

    def test_same_as_padded(self):
        """Prompt, decode steps and what is read back, through the daemon."""
        for dim, stored in DIMS.items():
            narrow = Tokens(dim, LENGTH + MORE, dim=dim)
            wide = padded(narrow, stored)
            for form in FORMATS:
                name = f"{form} {dim}"
                with self.subTest(name), self.opened(narrow, form, name=name) as one, \
                        self.opened(wide, form) as other:
                    for n in (LENGTH,) + (1,) * MORE:
                        self.assert_same(narrow.feed(self.queue, one, n),
                                         wide.feed(self.queue, other, n), dim)
                    for layer in range(2):
                        for a, b in zip(self.queue.read(one, layer), self.queue.read(other, layer)):
                            self.assertEqual(a.shape[-1], dim)
                            np.testing.assert_array_equal(a, b[..., :dim])
                    info, info_wide = one.info(), other.info()
                    self.assertEqual(info["packed_bytes"], info_wide["packed_bytes"])
                    self.assertEqual(self.daemon.ctl("session", "show", name)["head_dim"], dim)

    def test_in_context(self):
        """Attention in the engine's own context."""
        for dim, form in ((96, "kvq2"), (100, "oscar2")):
            tokens = Tokens(dim, LENGTH + MORE, dim=dim)
            with self.opened(tokens, form) as one, self.opened(tokens, form) as other:
                for s in (one, other):
                    tokens.feed(self.queue, s, LENGTH, attend=False)
                want = [tokens.feed(self.queue, one, 1) for _ in range(MORE)]
                with self.queue.local(max_tokens=1024, require=True) as local:
                    local.add(other)
                    data = {n: self.own(getattr(tokens, n)) for n in "kvq"}
                    for i in range(MORE):
                        at = slice(LENGTH + i, LENGTH + i + 1)
                        with local.step([other], [1]) as step:
                            got = [step.attend(layer, **{n: x[layer, at] for n, x in data.items()})
                                   for layer in range(2)]
                        self.assert_same(got, want[i], dim)
                    local.remove(other)

    def own(self, values):
        """An array in a buffer of the client's."""
        array = self.client.array(values.shape)
        array[...] = values
        return array

    def test_saved_and_restored(self):
        """A session outlives the daemon; other dims that are stored alike are another shape."""
        tokens = Tokens(7, LENGTH, dim=96)
        ids = np.arange(LENGTH, dtype=np.int32)
        with self.opened(tokens, "kvq2", name="it", model="m") as session:
            with self.queue.step([session], [LENGTH], ids=[ids]) as step:
                for layer in range(2):
                    step.append(layer, tokens.k[layer], tokens.v[layer])
            stored = read_all(self.queue, session, 2)
            session.save()
        self.again()
        with self.opened(tokens, "kvq2", name="it", model="m") as session:
            self.assertEqual(session.tokens, LENGTH)
            self.assertTrue(read_all(self.queue, session, 2) == stored)
        for dim in (112, 128):
            other = Tokens(7, LENGTH, dim=dim)
            self.fails(kvq.Code.E_EXISTS, self.opened, other, "kvq2", name="it", model="m",
                       text=(f"head_dim in layer 0 (96 there, {dim} asked for)",))

    def test_prefix_and_fork(self):
        """Sessions of one shape share blocks; those of another head_dim find nothing."""
        tokens, ids = Tokens(7, 600, dim=96), np.arange(256, dtype=np.int32)
        with self.opened(tokens, "kvq2", model="m") as first, \
                self.opened(tokens, "kvq2") as twin:
            with self.queue.step([first], [256], ids=[ids]) as step:
                for layer in range(2):
                    step.append(layer, tokens.k[layer, :256], tokens.v[layer, :256])
            tokens.feed(self.queue, twin, 256, attend=False)
            for dim, found in ((96, 256), (100, 0), (128, 0)):
                self.assertEqual(self.client.lookup(scaled_as(96, dim), "kvq2", prefix=ids,
                                                    model="m", place="host"), found, dim)
            with self.opened(tokens, "kvq2", prefix=ids, model="m") as second:
                self.assertEqual(second.info()["prefix_tokens"], 256)
                self.same(second, twin, tokens)
            fork, = self.queue.fork([twin])
            with fork:
                self.same(fork, twin, tokens)

    def test_parked(self):
        """On disk and back, a session goes on with the same bits."""
        tokens = Tokens(8, 700, dim=96)
        with self.opened(tokens, "kvq2") as one, self.opened(tokens, "kvq2") as twin:
            for session in (one, twin):
                tokens.feed(self.queue, session, LENGTH, attend=False)
            one.park()
            self.assertEqual(one.info()["tier"], "disk")
            self.same(one, twin, tokens)

    def test_shards(self):
        """Saved with 2 shards, opened with 4."""
        whole = Tokens(9, 500, 2, 16, 8, 96)
        before = e2e_reshard.Deal(self, whole, "kvq2", "it", 2, place="host")
        before.feed(LENGTH)
        before.save()
        self.again()
        after, twin = (e2e_reshard.Deal(self, whole, "kvq2", name, 4, place="host")
                       for name in ("it", "twin"))
        self.assertEqual(after.tokens, LENGTH)
        twin.feed(LENGTH)
        self.assertTrue(after.read() == twin.read())
        self.assertTrue(after.feed(1) == twin.feed(1))

    def captured(self, tokens, path):
        """A capture of K and V of all tokens."""
        with self.client.session(tokens.rows, "f16", place="host") as session, \
                kvq.Capture(path, tokens.rows, model="m") as capture:
            step = self.queue.step([session], tokens.n)
            for layer in range(tokens.layers):
                k, v = self.own(tokens.k[layer]), self.own(tokens.v[layer])
                tensors = {name: self.client.find_buffer(array).tensor(array)
                           for name, array in (("k", k), ("v", v))}
                capture.append(self.queue.call("append", step.entries, step=step.number,
                                               layer=layer, **tensors))
            step.end()

    @unittest.skipUnless(os.path.exists(os.path.join(BIN, "kvq-codebook")),
                         "kvq-codebook is not built")
    def test_codebook(self):
        """Made of a capture of such heads, it fits them."""
        tokens = Tokens(9, 2048, dim=96)
        path = os.path.join(self.folder, "kv.capture")
        self.captured(tokens, path)
        subprocess.run([os.path.join(BIN, "kvq-codebook"), "make", "--capture", path, "--format",
                        "vecinfer-2", "--out", os.path.join(self.folder, "own.kvqbook")],
                       check=True, capture_output=True, timeout=BOUND)
        self.again(kill=False, codebook_dir=self.folder)
        with self.opened(tokens, "f16") as exact, self.opened(tokens, "vecinfer-2@own") as session:
            wanted, got = (tokens.feed(self.queue, s, 512) for s in (exact, session))
            wanted, got = (tokens.feed(self.queue, s, 8) for s in (exact, session))
        for (out, _), (want, _) in zip(got, wanted):
            self.assertLess(np.linalg.norm(out - want), 0.7 * np.linalg.norm(want))
        with self.opened(tokens, "vecinfer-2@own", name="it") as session:
            tokens.feed(self.queue, session, 512)
            session.save()
        self.imports_without_codebook()

    def imports_without_codebook(self):
        """A dry run of the import says that nobody could open the session then."""
        path = os.path.join(self.folder, "exported")
        look = ("session", "import", path, "--as", "other", "--dry-run")
        self.daemon.ctl("session", "export", "it", path)
        self.assertEqual(self.daemon.ctl(*look)["would"][0]["note"], "512 tokens")
        self.again(kill=False)
        note = self.daemon.ctl(*look)["would"][0]["note"]
        self.assertRegex(note, "^512 tokens; it could not be opened: layer 0: format .*; set "
                               "codebook_dir$")
        os.rename(os.path.join(self.folder, "own.kvqbook"), os.path.join(self.folder, "gone"))
        self.again(kill=False, codebook_dir=self.folder)
        note = self.daemon.ctl(*look)["would"][0]["note"]
        self.assertIn("; it could not be opened: layer 0: ", note)
        self.assertIn("own.kvqbook", note)
        look = ("session", "import", path, "--dry-run")  # "it" is saved
        status, out, complaint = self.daemon.ctl(*look, check=False)
        self.assertEqual(status, 1, complaint)
        would = json.loads(out)["would"]
        self.assertEqual([w["action"] for w in would], ["not import", "not open"])
        self.assertRegex(would[1]["note"], "^were it imported: layer 0: .*own.kvqbook")

    @unittest.skipUnless(BACKEND == "emu", "a GPU, be it in software")
    def test_gpus_refuse(self):
        tokens, gpu = Tokens(7, LENGTH, dim=96), self.daemon.status()["gpus"][0]["place"]
        self.fails(kvq.Code.E_SHAPE, self.client.session, tokens.rows, "kvq2", place=gpu,
                   text=("head_dim 96 is served on the host alone", "rows of 128"))
        with self.client.session(tokens.rows, "kvq2") as session:  # without being asked, the host
            tokens.feed(self.queue, session, LENGTH)
            self.assertEqual(session.info()["place"], "host")
            self.fails(kvq.Code.E_SHAPE, session.move, gpu, text=("head_dim of 96",))

    def test_refused(self):
        for dim in (0, 257, 300):
            self.fails(kvq.Code.E_SHAPE, self.client.session, [kvq.Layer(8, 2, dim)], "kvq2",
                       text=(f"head_dim {dim}", "1 to 256"))
        self.fails(kvq.Code.E_SHAPE, self.client.session, [kvq.Layer(8, 2, 96)], "oscar2",
                   v_rotation="engine", place="host", text=("not 96", "let the daemon do it"))
