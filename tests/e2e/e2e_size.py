# SPDX-License-Identifier: Apache-2.0
"""kvqctl size against sessions of real daemons: what it says beforehand is what there is."""
import dataclasses
import json
import os
import subprocess
import tempfile
import time
import unittest

from e2e_rig import BACKEND, BIN, BOUND, Daemon, Test, Tokens

SHORT, LONG = 300, 2115
BOOKS_SHARE = 0.5  # the daemon keeps at least this much of what size says of bookkeeping


def size(*arguments, name="oscar2", layers=4, heads=2, dim=128, tokens=SHORT):
    """Exit status, output and complaint of kvqctl size, without a daemon."""
    done = subprocess.run(
        [os.path.join(BIN, "kvqctl"), "--runtime-dir", "/nonexistent", "size", "--format", name,
         "--layers", str(layers), "--kv-heads", str(heads), "--head-dim", str(dim), "--tokens",
         str(tokens), *arguments], capture_output=True, text=True, timeout=BOUND)
    return done.returncode, done.stdout, done.stderr


def model_size(folder, *arguments):
    """The same for the model of a folder."""
    done = subprocess.run([os.path.join(BIN, "kvqctl"), "size", "--model", folder, *arguments],
                          capture_output=True, text=True, timeout=BOUND)
    return done.returncode, done.stdout, done.stderr


@unittest.skipIf(BACKEND != "cpu", "a GPU's newest raw blocks are whole ones")
class Size(Test):
    """kvqctl size."""

    def settled(self, session, expected, daemon=None):
        """What the daemon shows of it once what is due is packed, which it does when nothing else
        is to be done."""
        end = time.monotonic() + BOUND
        while True:
            shown = (daemon or self.daemon).ctl("session", "show", f"#{session.info()['id']}")
            if shown["window_bytes"] == expected or time.monotonic() > end:
                return shown

    def holds(self, name, length, rollback=0, window=0):
        tokens = Tokens(3, length, layers=4)
        rows = [dataclasses.replace(row, window=window) for row in tokens.rows]
        with self.client.session(rows, name, max_rollback=rollback) as session:
            while session.tokens < length:
                tokens.feed(self.queue, session, min(1000, length - session.tokens), attend=False)
            status, out, complaint = size("--json", "--rollback", str(rollback),
                                          *(["--window", str(window)] if window else []),
                                          name=name, tokens=length)
            self.assertEqual(status, 0, complaint)
            told = json.loads(out)
            shown = self.settled(session, told["window_bytes"])
            for field in ("packed_bytes", "window_bytes"):
                self.assertEqual(told[field], shown[field], (name, length, field))
            self.assertLessEqual(shown["table_bytes"], told["table_bytes"])
            self.assertGreaterEqual(shown["table_bytes"], BOOKS_SHARE * told["table_bytes"])
            self.assertEqual(told["bits_per_value"], shown["bits_per_value"])

    def test_raw(self):
        self.holds("f16", SHORT)
        self.holds("f16", LONG)

    def test_units(self):
        self.holds("oscar2", SHORT)
        self.holds("oscar2", LONG)

    def test_windows_and_extras(self):
        """A window of 128 tokens, outliers in all but the first layers, and a name of its own."""
        for name in ("ott2", "innerq-hybrid:sink=64"):
            self.holds(name, SHORT)
            self.holds(name, LONG)

    def test_rollback(self):
        self.holds("oscar2", SHORT, rollback=64)
        self.holds("oscar2", LONG, rollback=1000)

    def test_sliding_windows(self):
        """Blocks behind the window are free, but for what a rollback may need."""
        for name in ("f16", "oscar2"):
            self.holds(name, SHORT, window=1000)
            self.holds(name, LONG, window=200)
            self.holds(name, LONG, window=1024, rollback=100)

    def test_model(self):
        """Layers with and without a window, of a model's config.json."""
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump({"model_type": "gemma2", "num_hidden_layers": 4, "head_dim": 128,
                           "num_attention_heads": 4, "num_key_value_heads": 2,
                           "sliding_window": 200}, file)
            told = model_size(folder, "--format", "kvq2,f16", "--json", "--tokens", str(LONG))
            said = model_size(folder, "--format", "kvq2,f16", "--tokens", str(LONG))[1]
            missing = model_size(folder, "--format", "kvq2")
        self.assertIn("4 layers (2 with a window of 200 tokens), 2 KV heads of 128\n", said)
        self.assertEqual([line.split()[0] for line in said.split("\n")[3:6]],
                         ["FORMAT", "kvq2", "f16"])
        self.assertEqual(missing[0], 2)
        self.assertIn("size needs --tokens N\nAs in kvqctl size --model DIR --format kvq2",
                      missing[2])
        self.assertIn("the text_config in it", model_size(folder, "--help")[1])
        for answer in json.loads(told[1]):
            tokens = Tokens(3, LONG, layers=4)
            rows = [dataclasses.replace(tokens.rows[0], window=0 if i % 2 else 200, repeat=1)
                    for i in range(4)]
            with self.client.session(rows, answer["format"]) as session:
                tokens.feed(self.queue, session, LONG, attend=False)
                shown = self.settled(session, answer["window_bytes"])
            self.assertEqual((answer["sliding_layers"], answer["sliding_window"]), (2, 200))
            for field in ("packed_bytes", "window_bytes"):
                self.assertEqual(answer[field], shown[field], (answer["format"], field))
            self.assertLessEqual(shown["table_bytes"], answer["table_bytes"])

    def test_several_formats(self):
        """A row, or an element, for each; commas of the paper's spelling are none between them."""
        names = ["oscar2", "vecinfer-k<4,10>v<8,12>", "f16"]
        several = json.loads(size("--json", name=",".join(names))[1])
        self.assertEqual(several, [json.loads(size("--json", name=name)[1]) for name in names])
        status, out, complaint = size(name="oscar2,oscar9")
        self.assertEqual((status, out), (2, ""))
        self.assertIn("oscar9 is unknown", complaint)
        self.assertIn("more than 32 formats", size(name=",".join(["f16"] * 33))[2])
        self.assertEqual(size(name=",".join(["f16"] * 32))[0], 0)

    def test_next_page(self):
        """The most that a session takes while its next 128 tokens come."""
        for n in (70, 256):
            told = [json.loads(size("--json", tokens=n + i)[1]) for i in range(129)]
            self.assertEqual(told[0]["next_page_bytes"],
                             max(x["total_bytes"] for x in told) - told[0]["total_bytes"])

    def test_larger_than_f16(self):
        """A short session is larger than 16 bits a value, and size says so."""
        self.assertIn("times LARGER", size(tokens=70)[1])
        self.assertNotIn("LARGER", size(tokens=128)[1])
        self.assertNotIn("LARGER", size(tokens=4096)[1])
        self.assertTrue(json.loads(size("--json", tokens=70)[1])["larger_than_f16"])

    def test_many(self):
        """So many sessions take so many times as much."""
        told = json.loads(size("--json", "--sessions", "100")[1])
        self.assertEqual(told["all_block_bytes"],
                         100 * (told["packed_bytes"] + told["window_bytes"]))
        self.assertEqual(told["all_table_bytes"], 100 * told["table_bytes"])

    def test_codebooks(self):
        """They change no size, wherever they stand in the name."""
        for name in ("vecinfer-2@mine", "vecinfer-2@mine+oscar2", "oscar2+vecinfer-2@mine:sink=64"):
            told = json.loads(size("--json", name=name)[1])
            plain = json.loads(size("--json", name=name.replace("@mine", ""))[1])
            self.assertEqual(told.pop("format"), name)
            plain.pop("format")
            self.assertEqual(told, plain)

    def test_own_formats(self):
        """Of a format of the configuration, what the list of formats says of it is passed."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "kvqd.conf")
            with open(path, "w", encoding="utf-8") as file:
                file.write("[format mine]\nk = oscar4\nv = kivi2\nsink = 64\n")
            with Daemon(config=path) as daemon:
                mine, = [x for x in daemon.ctl("format", "list") if x["name"] == "mine"]
                status, _, complaint = size(name="mine")
                self.assertEqual(status, 2)
                self.assertIn("under IS, or else under SOURCE", complaint)
                told = json.loads(size("--json", name=mine["source"], tokens=LONG)[1])
                tokens = Tokens(3, LONG, layers=4)
                with daemon.client() as client, client.queue() as queue, \
                        client.session(tokens.rows, "mine") as session:
                    tokens.feed(queue, session, LONG, attend=False)
                    shown = self.settled(session, told["window_bytes"], daemon)
                self.assertEqual([told[x] for x in ("window_bytes", "packed_bytes")],
                                 [shown[x] for x in ("window_bytes", "packed_bytes")])

    def test_refused(self):
        for arguments, words in ((("--format", "oscar9"), "oscar9"),
                                 (("--head-dim", "257"), "1 to 256"),
                                 (("--sessions", "0"), "--sessions is at least 1"),
                                 (("--sessions", "none"), "--sessions is at least 1"),
                                 (("--sessions", str(10 ** 17)), "ask for fewer")):
            status, _, complaint = size(*arguments)
            self.assertEqual(status, 2)
            self.assertIn(words, complaint)
        for name, words in (("kvq2@foo", "kvq2 has no use for a codebook; leave out '@foo'"),
                            ("oscar2@a+kivi2@b:sink=64", "leave out '@a'"),
                            ("oscar2" * 11 + "@a", "is longer than")):
            status, out, complaint = size(name=name)
            self.assertEqual((status, out), (2, ""))
            self.assertIn(words, complaint)
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "size", "--format", "oscar2"],
                              capture_output=True, text=True, timeout=BOUND)
        self.assertEqual(done.returncode, 2)
        self.assertIn("size needs --layers N --kv-heads N --head-dim N --tokens N. --model DIR",
                      done.stderr)
        self.assertIn("\nkvqctl size --help says more.\n", done.stderr)
        said = size(heads=1, layers=1, tokens=1)[1]
        self.assertIn("1 token, 1 layer, 1 KV head of 128\n", said)
        self.assertIn("1 session: ", said)
