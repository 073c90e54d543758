#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq-run on random models of every supported family's shape, against NumPy.

One class of shapes each: head counts, head_dim, rope and norms as the family's models have them;
width and depth small. The cache is f16, so the logits agree to its rounding; a run with oscar4
must come close too. Each row of docs/models.md that says "works" has its line here.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import llama_reference as reference  # noqa: E402
from e2e_rig import BIN, Daemon, run  # noqa: E402

TOKENS = 700  # two prefill steps, several blocks of 128


def config(family, q_heads, kv_heads, head_dim, **more):
    return {"model_type": family, "hidden_size": 96, "intermediate_size": 160,
            "num_hidden_layers": 2, "num_attention_heads": q_heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": 300,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "hidden_act": "silu", "max_position_embeddings": 4096} | more


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}

# docs/models.md name: (config, make_model options)
WORKS = {
    "Llama 2 7B": (config("llama", 32, 32, 128), {"dtype": "F16"}),
    "Llama 3.1 8B": (config("llama", 32, 8, 128, rope_theta=500000.0, rope_scaling=LLAMA3), {}),
    "Llama 3.1 70B": (config("llama", 64, 8, 128, rope_theta=500000.0, rope_scaling=LLAMA3),
                      {"shards": 3}),
    "Llama 3.1 405B": (config("llama", 128, 8, 128, rope_theta=500000.0, rope_scaling=LLAMA3), {}),
    "Llama 3.2 1B": (config("llama", 32, 8, 64, rope_theta=500000.0, rope_scaling=LLAMA3,
                            tie_word_embeddings=True), {}),
    "TinyLlama 1.1B": (config("llama", 32, 4, 64), {"dtype": "F32"}),
    "SmolLM2 135M": (config("llama", 9, 3, 64, tie_word_embeddings=True), {}),
    "Yi 34B": (config("llama", 56, 8, 128, rope_theta=5000000.0), {}),
    "Mistral 7B": (config("mistral", 32, 8, 128, sliding_window=200), {}),
    "Qwen2.5 7B": (config("qwen2", 28, 4, 128, rope_theta=1000000.0, sliding_window=200,
                          use_sliding_window=False), {"bias": True}),
    "Qwen2.5 0.5B": (config("qwen2", 14, 2, 64, tie_word_embeddings=True), {"bias": True}),
    "Qwen2.5 with windows": (config("qwen2", 28, 4, 128, sliding_window=200, max_window_layers=1,
                                    use_sliding_window=True), {"bias": True}),
    "Qwen3 8B": (config("qwen3", 32, 8, 128, rope_theta=1000000.0, rope_scaling=YARN),
                 {"qk_norm": True}),
    "Qwen3 0.6B": (config("qwen3", 16, 8, 128, tie_word_embeddings=True), {"qk_norm": True}),
    "linear RoPE": (config("llama", 8, 1, 128, rope_scaling={"type": "linear",
                                                             "rope_type": "linear",
                                                             "factor": 2.0}), {}),
    "Llama with biases": (config("llama", 32, 8, 128, attention_bias=True, mlp_bias=True),
                          {"bias": "all"}),
    "head_dim 256": (config("llama", 8, 1, 256), {}),
    "head_dim 96": (config("llama", 32, 32, 96), {}),
}

# What is refused, and a piece of the sentence that says why.
REFUSED = {
    "Gemma 2": (config("gemma2", 8, 4, 256), "model_type 'gemma2' is not supported"),
    "Phi-3": (config("phi3", 32, 32, 96), "model_type 'phi3' is not supported"),
    "Mixtral": (config("mixtral", 32, 8, 128), "model_type 'mixtral' is not supported"),
    "DeepSeek V3": (config("deepseek_v3", 128, 128, 128), "model_type 'deepseek_v3'"),
    "dynamic RoPE": (config("llama", 8, 8, 128, rope_scaling={"type": "dynamic", "factor": 2.0}),
                     "'dynamic' is not supported"),
}


class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(pool_bytes="1gb", backend="cpu", attention="fast")
        cls.folder = tempfile.TemporaryDirectory(prefix="kvq-models-")

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()
        cls.folder.cleanup()

    def run_logits(self, model, ids, cache_format, *more):
        return subprocess.run(
            [os.path.join(BIN, "kvq-run"), "logits", "--model", model, "--ids",
             ",".join(map(str, ids)), "--format", cache_format, "--json", "--top", "300",
             "--runtime-dir", self.daemon.directory, *more],
            capture_output=True, text=True, timeout=300, check=False)

    def logits(self, model, ids, cache_format, *more):
        done = self.run_logits(model, ids, cache_format, *more)
        self.assertEqual(done.returncode, 0, done.stderr)
        out = np.zeros(300)
        for entry in json.loads(done.stdout)["top"]:
            out[entry["id"]] = entry["logit"]
        return out

    def check(self, name):
        settings, options = WORKS[name]
        model = os.path.join(self.folder.name, name.replace(" ", "-"))
        tensors = reference.make_model(model, settings, **options)
        ids = np.random.default_rng(7).integers(0, 300, TOKENS)
        want = reference.logits(settings, tensors, ids)[-1]
        spread = want.std()
        folds = settings["head_dim"] in (64, 128, 256)
        for rotation in ("none", "engine" if folds else "daemon"):  # engine: in W_V, its bias, W_O
            got = self.logits(model, ids, "f16", "--v-rotation", rotation)
            self.assertLess(np.abs(got - want).max() / spread, 0.02, f"{name}, f16, {rotation}")
        coarse = self.logits(model, ids, "oscar4") - want
        self.assertLess(np.sqrt((coarse ** 2).mean()) / spread, 0.5, f"{name}, oscar4")

    def refuse(self, name):
        settings, sentence = REFUSED[name]
        model = os.path.join(self.folder.name, name.replace(" ", "-"))
        reference.make_model(model, settings)
        done = self.run_logits(model, [1, 2, 3], "oscar2")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(sentence, done.stderr)

    def test_cut_file(self):
        """A checkpoint cut short is refused by name and size, not read past its end."""
        model = pathlib.Path(self.folder.name) / "cut"
        reference.make_model(model, WORKS["SmolLM2 135M"][0])
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        done = self.run_logits(str(model), [1], "f16")
        self.assertEqual(done.returncode, 1)
        self.assertIn("cut short", done.stderr)

    def test_no_daemon(self):
        model = os.path.join(self.folder.name, "none")
        reference.make_model(model, WORKS["SmolLM2 135M"][0])
        done = subprocess.run([os.path.join(BIN, "kvq-run"), "logits", "--model", model,
                               "--ids", "1", "--runtime-dir", self.folder.name],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 3, done.stderr)


def add_cases():
    for table, method in ((WORKS, "check"), (REFUSED, "refuse")):
        for name in table:
            word = "".join(c if c.isalnum() else "_" for c in name)
            setattr(Models, f"test_{method}_{word}",
                    lambda self, n=name, m=method: getattr(self, m)(n))


add_cases()

if __name__ == "__main__":
    sys.exit(run([Models], __doc__))
