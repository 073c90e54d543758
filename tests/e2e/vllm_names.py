# SPDX-License-Identifier: Apache-2.0
"""What tells models and salts apart under vLLM, which is not needed for it; vllm_test.py runs
this."""
import json
import os
import tempfile
import unittest
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

    def of_weights(self, write):
        """The name of a model whose folder write(path) fills."""
        with tempfile.TemporaryDirectory() as folder:
            write(os.path.join(folder, "model.safetensors"))
            model = SimpleNamespace(model=folder, revision=None, dtype=torch.bfloat16,
                                    quantization=None, max_model_len=64,
                                    hf_config=SimpleNamespace(to_json_string=lambda: "{}"))
            return checks.model_name(SimpleNamespace(
                model_config=model, load_config=SimpleNamespace(load_format="auto")), None)

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
