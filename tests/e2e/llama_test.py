#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq's backend of ggml in a llama.cpp as it is installed, against the same llama.cpp without it.

    tests/e2e/llama_test.py [NAME]...

Needs llama-cpp-python, gguf, and the backend in lib/ beside KVQ_BIN_DIR, or where KVQ_GGML_BACKEND
says; says so and ends well where these are missing. What the backend does with graphs of all kinds
is test_ggml's subject."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import e2e_rig

BACKEND = os.environ.get("KVQ_GGML_BACKEND") or os.path.join(
    os.environ.get("KVQ_BIN_DIR", ""), "..", "lib", "libkvq-ggml.so")
WORDS = 512  # ids from 0 to this
TEXT = np.random.default_rng(5).integers(0, WORDS, 1200).tolist()


class Engine:
    """A llama.cpp."""

    def __init__(self, model, **environment):
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(e2e_rig.HERE, "llama_engine.py"), model], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment})
        self.errors = None

    def ask(self, *request):
        """The answer."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self):
        """What it wrote on stderr."""
        if self.errors is None:
            _, self.errors = self.process.communicate()
        return self.errors


def logs(logits):
    """Log-probabilities."""
    logits = np.array(logits, np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


class Llama(e2e_rig.Test):
    """One model with random weights."""
    CHANGES = {}
    TYPES = "1", "8"  # of K and V in llama.cpp's own cache: f16, q8_0

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["KVQ_BENCH_SMALL"] = "1"
        sys.path.insert(0, os.path.join(e2e_rig.ROOT, "tools", "engines"))
        import llama_files
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.model = os.path.join(cls.folder.name, "model.gguf")
        llama_files.write_model(cls.model, **cls.CHANGES)
        cls.file = os.path.join(cls.folder.name, "state")

    def engine(self, **environment):
        return self.started(**{
            "GGML_BACKEND_PATH": BACKEND, "KVQ_RUNTIME_DIR": self.daemon.directory,
            "KVQ_LLAMA_FORMAT": "f16", "KVQ_LLAMA_ATTENTION": "exact", **environment})

    def started(self, **environment):
        engine = Engine(self.model, **environment)
        self.engines.append(engine)
        return engine

    def setUp(self):
        super().setUp()
        self.engines = []

    def tearDown(self):
        for engine in self.engines:
            engine.end()
        for session in self.daemon.ctl("session", "list"):
            self.daemon.ctl("session", "drop", session["name"])
        super().tearDown()

    def near(self, ours, stock, most):
        """KL divergence in nats."""
        self.assertIsNotNone(ours)
        p, q = logs(stock), logs(ours)
        self.assertLess(float((np.exp(p) * (p - q)).sum()), most)

    def follow(self, ours, most):
        """A prompt, decoding, other ends of the same text, another sequence."""
        stock = self.started()
        at = 0
        for what in (300, 1, 1, 40, 200, 1, ("cut", 540), 3, ("cut", 100), 20, 1,
                     ("clear",), 90, 1):
            if isinstance(what, tuple):
                at = what[1] if what[0] == "cut" else 0
                self.assertEqual([e.ask(*what) for e in (ours, stock)], [True, True])
                continue
            # After a cut other tokens follow than before.
            ids = TEXT[at + 500:at + 500 + what] if what in (3, 20) else TEXT[at:at + what]
            told = [e.ask("decode", ids) for e in (ours, stock)]
            self.near(*told, most)
            at += what

    def test_same_logits_in_f16(self):
        ours = self.engine()
        self.follow(ours, 1e-5)
        self.assertEqual([s["format"] for s in self.daemon.ctl("session", "list")], ["f16"])
        self.assertEqual(ours.end(), "")

    def test_kvq2_is_near(self):
        self.follow(self.engine(KVQ_LLAMA_FORMAT="kvq2", KVQ_LLAMA_ATTENTION="fast"), 1e-2)

    def test_what_llama_restores_is_refused(self):
        ours = self.engine()
        ours.ask("decode", TEXT[:50])
        self.assertGreater(ours.ask("save", self.file), 0)
        ours.ask("clear")
        ours.ask("decode", TEXT[100:170])
        self.assertGreater(ours.ask("restore", self.file, 50), 0)
        self.assertIsNone(ours.ask("decode", TEXT[50:51]))
        ours.ask("clear")
        self.assertIsNotNone(ours.ask("decode", TEXT[:5]))
        self.assertIn("restored, copied or shifted", ours.end())

    def test_a_shift_is_refused(self):
        """Where llama.cpp turns keys in place, and where it takes them out of the cache for it; it
        goes on itself."""
        for kind in self.TYPES:
            with self.subTest(kind):
                ours = self.engine(KVQ_TEST_TYPE=kind)
                self.assertIsNotNone(ours.ask("decode", TEXT[:50]))
                ours.ask("shift", 30)
                self.assertIsNone(ours.ask("decode", TEXT[50:51]))
                ours.ask("clear")
                self.assertIsNotNone(ours.ask("decode", TEXT[:5]))
                self.assertIn("context shift", ours.end())
                self.assertEqual(ours.end().count("have no effect: kvqd holds K and V in f16"),
                                 int(kind != "1"))

    def test_without_flash_attention_it_says_so(self):
        """Off, and left to llama.cpp, which turns it off."""
        for flash in "0", "-1":
            with self.subTest(flash):
                ours = self.engine(KVQ_TEST_FLASH=flash)
                self.assertIsNotNone(ours.ask("decode", TEXT[:50]))
                self.assertIsNotNone(ours.ask("decode", TEXT[50:51]))
                self.assertEqual(self.daemon.ctl("session", "list"), [])
                self.assertEqual(ours.end().count("flash attention is off; set it (-fa on"), 1)

    def test_a_format_that_is_none_makes_no_context(self):
        errors = self.engine(KVQ_LLAMA_FORMAT="kvq3").end()
        self.assertIn('KVQ_LLAMA_FORMAT is "kvq3"', errors)
        self.assertIn("did you mean", errors)
        self.assertIn("no context", errors)

    def test_it_goes_on_after_a_restart_of_kvqd(self):
        stock = self.started()
        with tempfile.TemporaryDirectory() as folder:
            with e2e_rig.Daemon(folder) as daemon:
                ours = self.engine(KVQ_RUNTIME_DIR=folder)
                self.assertIsNotNone(ours.ask("decode", TEXT[:50]))
                daemon.kill()
                self.assertIsNone(ours.ask("decode", TEXT[50:51]))
            with e2e_rig.Daemon(folder):
                self.assertIsNone(ours.ask("decode", TEXT[50:51]))
                self.assertEqual([e.ask("clear") for e in (ours, stock)], [True, True])
                for ids in TEXT[:300], TEXT[300:301]:
                    self.near(*(e.ask("decode", ids) for e in (ours, stock)), 1e-5)
                errors = ours.end()
        self.assertEqual(errors.count("the next prompt that begins at the first token goes on"), 2)
        self.assertEqual(errors.count("connected again: kvqd was restarted"), 1)

    def test_a_session_outlives_its_engine(self):
        """llama.cpp's own state says which cells are in use; K and V are in kvqd."""
        ours, stock = self.engine(KVQ_LLAMA_SESSION="chat"), self.started()
        for engine in ours, stock:
            engine.ask("decode", TEXT[:200])
        ours.ask("save", self.file)
        ours.end()
        self.assertEqual([(s["name"], s["tokens"]) for s in self.daemon.ctl("session", "list")],
                         [("chat", 200)])
        ours = self.engine(KVQ_LLAMA_SESSION="chat")
        ours.ask("restore", self.file, 200)
        self.near(*(e.ask("decode", TEXT[200:220]) for e in (ours, stock)), 1e-5)
        ours.ask("clear")
        ours.ask("decode", TEXT[:1])  # another sequence, as when llama.cpp warms up
        tokens = {s["name"]: s["tokens"] for s in self.daemon.ctl("session", "list")}
        self.assertEqual(tokens, {"chat": 220, "": 1})


class OtherHeads(Llama):
    """Heads of other dimensions than those that are stored."""
    CHANGES = {"head_dim": 96}
    TYPES = ("1",)  # llama-cpp-python 0.3.36 makes no context with the other, without kvq either


if __name__ == "__main__":
    for module in ("llama_cpp", "gguf"):
        if not importlib.util.find_spec(module):
            print(f"kvq under llama.cpp is not tested: no {module}")
            print("0 passed, 0 failed, 1 skipped")
            sys.exit(0)
    if not os.path.exists(BACKEND):
        print(f"kvq under llama.cpp is not tested: no {BACKEND}")
        print("0 passed, 0 failed, 1 skipped")
        sys.exit(0)
    sys.exit(e2e_rig.run([Llama, OtherHeads], __doc__))
