# SPDX-License-Identifier: Apache-2.0
"""Formats of the configuration file, from the file to the bits of an answer."""
import os
import subprocess
import tempfile
import unittest

from e2e_rig import BIN, BOUND, Daemon, Tokens, kvq

LAYERS = 4
CONFIG = """
[format first]
base = oscar4
recent = 20
[format mymix]
k = oscar2-g64
v = innerq-hybrid
sink = 64
layers = 0:first, 2:k8v4
"""
# The same, layer by layer, by names that every daemon knows.
SAME = ["oscar4:recent=20", "oscar2-g64+innerq-hybrid:sink=64", "k8v4",
        "oscar2-g64+innerq-hybrid:sink=64"]


class OwnFormats(unittest.TestCase):
    def config(self, text):
        file = tempfile.NamedTemporaryFile("w", suffix=".conf")
        self.addCleanup(file.close)
        file.write(text)
        file.flush()
        return file.name

    def test_layers_have_what_the_file_says(self):
        tokens = Tokens(8, 700, layers=LAYERS, q_heads=4, kv_heads=2)
        with Daemon(config=self.config(CONFIG)) as daemon, daemon.client() as client, \
                client.queue() as queue:
            rows = [kvq.Layer(4, 2, 128, format=name) for name in SAME]
            mine, same = client.session(tokens.rows, "mymix", name="m"), client.session(rows)
            answers = []
            for session in (mine, same):
                tokens.feed(queue, session, 650, attend=False)
                answers.append([x.tobytes() for pair in tokens.feed(queue, session, 50)
                                for x in pair])
            self.assertEqual(answers[0], answers[1])
            shown = daemon.ctl("session", "show", "m")
            self.assertEqual(shown["format"], "mymix")
            self.assertEqual(shown["layer_formats"], "0:first, 1:mymix, 2:k8v4, 3:mymix")
            self.assertEqual(client.session(name="m", read_only=True).info()["format"], "mymix")
            listed = [f for f in daemon.ctl("format", "list") if f["own"]]
            self.assertEqual([(f["name"], f["layers"], f["row"]) for f in listed],
                             [("first", "", "first"), ("mymix", "0", "first"),
                              ("mymix", "2", "k8v4"), ("mymix", "others", "mymix")])
            self.assertEqual(listed[3]["source"], "oscar2-g64+innerq-hybrid:sink=64")
            self.assertEqual(listed[3]["sink_tokens"], 64)
            told = {f["name"]: f for f in daemon.ctl("format", "list") if not f["own"]}
            self.assertEqual(list(told)[:4], ["kvq2", "oscar3", "kivi4", "oscar4"])
            self.assertEqual([name for name, f in told.items() if f["recommended"]],
                             list(told)[:4])
            traits = ("fast", "gpu_loop", "shares_prefix", "needs")
            for name, values in (("kvq2", [True, True, True, ""]),
                                 ("ott2", [False, True, False, ""]),
                                 ("vecinfer-4", [False, False, True, "codebook"])):
                self.assertEqual([told[name][trait] for trait in traits], values, name)

    def test_a_wrong_file_is_refused_before_anything_starts(self):
        path = self.config("[format a]\nbase = oscar2\n\nk_rotation = odd\n")
        done = subprocess.run([os.path.join(BIN, "kvqd"), "--print-config", "--config", path],
                              capture_output=True, text=True, timeout=BOUND)
        self.assertEqual(done.returncode, 2)
        self.assertIn(f"{path}:4: stage k_rotation cannot be \"odd\"; it can be none, hadamard, "
                      "signed", done.stderr)

    def test_print_config_gives_a_file_that_means_the_same(self):
        printed = []
        path = self.config(CONFIG)
        for _ in range(2):
            done = subprocess.run([os.path.join(BIN, "kvqd"), "--print-config", "--config", path],
                                  capture_output=True, text=True, timeout=BOUND, check=True)
            printed.append([x for x in done.stdout.splitlines() if not x.startswith("#")])
            path = self.config(done.stdout)
        self.assertEqual(printed[0], printed[1])
        self.assertIn("layers = 0-0:first", printed[0])
