#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/bench-peers.py without any peer: its tables, its turns, and what it says of peers that are
not there. Workers are stood for by a script; the worker that starts real ones is asked for one
whose packages are missing."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TOOLS = os.path.join(HERE, "..", "..", "tools")
sys.path.insert(0, os.path.join(TOOLS, "peers"))
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

    def bench(self, *options):
        environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
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

    def test_what_cannot_be_meant(self):
        for options, says in ((("--rows", "sglang:x"), "sglang is no peer"),
                              (("--shapes", "9/2/64"), "invalid shapes value"),
                              (("--tokens", "0"), "invalid numbers value"),
                              (("--python", "ollama=x"), "ollama is no peer")):
            done = self.bench(*options)
            self.assertEqual(done.returncode, 2)
            self.assertIn(says, done.stderr)


if __name__ == "__main__":
    unittest.main()
