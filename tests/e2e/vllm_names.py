# SPDX-License-Identifier: Apache-2.0
"""What tells models and salts apart under vLLM, which is not needed for it; vllm_test.py runs
this."""
import json
import os
import tempfile
import unittest
import unittest.mock
from types import SimpleNamespace

import torch

from kvq.vllm import checks
from kvq.vllm.plan import Planner


class Names(unittest.TestCase):
    """What tells models apart whose K and V differ."""

    def name(self, longest=4096, told="m", **changes):
        said = {"model_type": "phi3", "vocab_size": 50, **changes}
        model = SimpleNamespace(hf_config=SimpleNamespace(to_json_string=lambda: json.dumps(said)),
                                dtype=torch.bfloat16, quantization=None, max_model_len=longest)
        return checks.model_name(SimpleNamespace(model_config=model), told)

    def test_configurations(self):
        """Not the version of transformers, nor what concerns generate() alone."""
        self.assertEqual(self.name(), self.name(transformers_version="9.9", eos_token_id=3))
        self.assertEqual(self.name(text={"model_type": "m", "dtype": "float32"}),
                         self.name(text={"model_type": "m"}))
        self.assertNotEqual(self.name(experts={"dtype": "fp8"}), self.name(experts={}))
        self.assertNotEqual(self.name(), self.name(rope_theta=5e5))
        self.assertNotEqual(self.name(text={"a": 1}), self.name(text={"a": 2}))

    def loaded(self, where, load_format="auto", download_dir=None, **changes):
        """The name of a model that is loaded from a folder, or by its name on the hub."""
        model = SimpleNamespace(model=where, revision=None, dtype=torch.bfloat16,
                                quantization=None, max_model_len=64,
                                hf_config=SimpleNamespace(to_json_string=lambda: "{}"), **changes)
        load = SimpleNamespace(load_format=load_format, download_dir=download_dir)
        return checks.model_name(SimpleNamespace(model_config=model, load_config=load), None)

    def of_weights(self, write):
        """The name of a model whose folder write(path) fills."""
        with tempfile.TemporaryDirectory() as folder:
            write(os.path.join(folder, "model.safetensors"))
            return self.loaded(folder)

    def folder(self, *names, seed="a"):
        """A folder with such files of weights."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name in names:
            path = os.path.join(folder.name, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(f"{name} {seed}" if name != "models--o--m/refs/main" else "abc")
        return folder.name

    def test_formats(self):
        """The files that load_format takes are looked at, and nothing where it takes others."""
        one = self.folder("model.safetensors", "model.pt")
        for format, name, same in (("auto", "model.pt", True), ("safetensors", "model.pt", True),
                                   ("pt", "model.pt", False), ("pt", "model.safetensors", True)):
            other = self.folder("model.safetensors", "model.pt")
            with self.subTest(format=format, name=name):
                with open(os.path.join(other, name), "w") as file:
                    file.write("other weights")
                told = [self.loaded(folder, format) for folder in (one, other)]
                self.assertEqual(told[0] == told[1], same)
                self.assertNotIn(None, told)
        both = self.folder("model.safetensors", "consolidated.safetensors")
        self.assertEqual(self.loaded(both), self.loaded(both, "mistral"))
        self.assertNotEqual(self.loaded(both), self.loaded(both, "hf"))
        for format in ("tensorizer", "modelexpress", "ipc_cache", "runai_streamer", "npcache",
                       "dummy", "of another plug-in"):
            self.assertIsNone(self.loaded(one, format))

    def test_download_dir(self):
        """vLLM loads from there, whatever the hub's own cache has."""
        try:
            from huggingface_hub import constants
        except ImportError as missing:
            self.skipTest(str(missing))
        files = "models--o--m/refs/main", "models--o--m/snapshots/abc/model.safetensors"
        old, new = self.folder(*files), self.folder(*files, seed="b")
        with unittest.mock.patch.object(constants, "HF_HUB_CACHE", old):
            told = [self.loaded("o/m", download_dir=folder) for folder in (None, old, new)]
            self.assertIsNotNone(told[0])
            self.assertEqual(told[0], told[1])
            self.assertNotEqual(told[1], told[2])
            with unittest.mock.patch.dict(os.environ, VLLM_USE_MODELSCOPE="True"):
                self.assertIsNone(self.loaded("o/m"))

    def test_quantization_of_the_engine(self):
        folder = self.folder("model.safetensors")
        told = [self.loaded(folder, quantization_config=how)
                for how in (None, {"linear": "fp8"}, {"linear": "mxfp8"})]
        self.assertEqual(len(set(told)), 3)
        self.assertEqual(told[0], self.loaded(folder))

    def test_weights(self):
        """A change of one small tensor between large ones, as of a norm or a bias, or of a few
        values of a large one, is another model, and so is what has changed its place."""
        def saved(changed, at=-1):
            def write(path):
                header, data = {}, b""
                for i in range(9):
                    piece = bytes([i]) * (40 if i % 2 else 300000)
                    if i == changed:
                        piece = bytearray(piece)
                        piece[at] = ord("x")
                    header[f"t{i}"] = {"dtype": "U8", "shape": [len(piece)],
                                       "data_offsets": [len(data), len(data) + len(piece)]}
                    data += piece
                told = json.dumps(header).encode()
                with open(path, "wb") as file:
                    file.write(len(told).to_bytes(8, "little") + told + data)
            return write

        def other(tail):
            def write(path):
                with open(path, "wb") as file:
                    file.write((1 << 40).to_bytes(8, "little") + bytes(5 << 20) + tail)
            return write
        names = [self.of_weights(saved(i)) for i in (None, 0, 1, 3, 7, 8)]
        names += [self.of_weights(other(tail)) for tail in (b"a", b"b")]
        names += [self.of_weights(saved(2, at)) for at in (70000, 70001, 70008)]
        self.assertEqual(len(set(names)), len(names))
        self.assertEqual(names[0], self.of_weights(saved(None)))

    def test_salts(self):
        """Are of any length and any characters; kvqd's have limits."""
        salts = [None, "a", "a" * 10000, "b" * 10000, "a\nb", "a\0b", "\ud800"]
        told = [Planner._salt(None, SimpleNamespace(cache_salt=salt)) for salt in salts]
        self.assertEqual(len(set(told)), len(salts))
        self.assertTrue(all(x is None or len(x) == 64 for x in told))

    def test_long_rope(self):
        """vLLM chooses its frequencies by max_model_len, for the first token as for the last."""
        long = {"rope_scaling": {"type": "longrope", "long_factor": [2.0]}}
        self.assertEqual(self.name(**long), self.name(**long))
        self.assertNotEqual(self.name(**long), self.name(9000, **long))
        nested = {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}
        self.assertNotEqual(self.name(**nested), self.name(9000, **nested))
        self.assertEqual(self.name(), self.name(9000))
