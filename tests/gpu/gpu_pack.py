#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The folder of tools/gpu-check.sh --pack: made of a build with -DKVQ_PORTABLE=ON, moved, and used
with nothing in the environment, over the software driver; what is missing in it is told, and what a
machine refuses is not run.

    gpu_pack.py BUILD       exit status 77: no NumPy
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The build that is tested may have kernels for more GPUs, and more libraries, than a pack has.
ROOMY = ("--limit", "200000000")
PACK = ROOT / "tools" / "gpu" / "pack.py"


def call(*command, good=True, **environment):
    """Runs with these variables alone; gives all that it prints."""
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, text=True, timeout=240,
                          stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                          env={"PATH": os.environ["PATH"], **environment})
    if (done.returncode == 0) != good:
        raise AssertionError(f"{command}: {done.returncode}: {done.stdout}")
    return done.stdout


class Pack(unittest.TestCase):
    """One folder for all tests; none changes it for good."""

    @classmethod
    def setUpClass(cls):
        cls.scratch = Path(tempfile.mkdtemp(prefix="kvq-pack-"))
        cls.made = call(sys.executable, PACK, *ROOMY, BUILD, cls.scratch / "made")
        cls.folder = cls.scratch / "moved"
        (cls.scratch / "made").rename(cls.folder)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.scratch)

    def daemon(self, *words, **environment):
        """The rows of the part `daemon` that have one of these words in their name."""
        out = self.scratch / "out.json"
        out.unlink(missing_ok=True)
        call(sys.executable, self.folder / "tools" / "gpu" / "daemon.py", self.folder, "--emulate",
             "--out", out, "--only", *words, **environment)
        result = json.loads(out.read_text())
        self.assertEqual((result["timed"], result["complete"]), (False, False))
        return result["rows"]

    def test_says_what_it_asks_for(self):
        text = (self.folder / "README.md").read_text()
        self.assertRegex(self.made, r"asks for .*\bGLIBC_2\.\d+")
        self.assertRegex(text, r"- GLIBC_2\.\d+\n")
        self.assertRegex(text, r"- libzmq\.so\.5: libzmq5 ")

    def test_whole_after_a_move(self):
        call(sys.executable, PACK, *ROOMY, "--check", self.folder)

    def test_a_missing_library_is_told(self):
        library = self.folder / "lib" / "libzmq.so.5"
        library.rename(self.scratch / "away")
        try:
            said = call(sys.executable, PACK, "--check", self.folder, good=False)
        finally:
            (self.scratch / "away").rename(library)
        self.assertIn("bin/kvqd needs libzmq.so.5, which is not in lib/", said)

    def test_a_program_that_looks_elsewhere_is_told(self):
        program = self.folder / "bin" / "kvqctl"
        bytes_of = program.read_bytes()
        self.assertEqual(bytes_of.count(b"$ORIGIN/../lib\0"), 1)
        program.write_bytes(bytes_of.replace(b"$ORIGIN/../lib\0", b"$ORIGIN/../bil\0"))
        try:
            said = call(sys.executable, PACK, "--check", self.folder, good=False)
        finally:
            program.write_bytes(bytes_of)
        self.assertIn("bin/kvqctl takes libzmq.so.5 from /", said)

    def test_too_big_is_told(self):
        filler = self.folder / "filler"
        with filler.open("wb") as file:
            file.truncate(60_000_000)
        try:
            said = call(sys.executable, PACK, "--check", self.folder, good=False)
        finally:
            filler.unlink()
        self.assertIn("more than 60,000,000", said)

    def test_does_not_clear_other_folders(self):
        other = self.scratch / "other"
        other.mkdir()
        (other / "thesis").write_text("x")
        said = call(sys.executable, PACK, BUILD, other, good=False)
        self.assertIn("holds something else", said)
        self.assertTrue((other / "thesis").exists())

    def test_runs(self):
        rows = self.daemon("doctor", "test_gpu_driver", "OwnFormats", "examples",
                           "test_soft_driver", "waits: cuMemFree", "waits: cuMemUnmap",
                           "waits: cuIpc")
        for name, row in rows["this machine"].items():
            self.assertEqual(row, {"works": True}, name)
        self.assertIn("software GPU", rows["doctor"]["what kvqd finds"]["gpu"])
        self.assertGreater(rows["kernel tests"]["test_gpu_driver"]["passed"], 0)
        waits = rows["beside a stream that waits"]
        self.assertEqual({name: row["comes_back"] for name, row in waits.items()},
                         {"cuMemFree_v2": False, "cuMemFreeHost": False, "cuMemUnmap": True,
                          "cuIpcOpenMemHandle_v2": True, "cuIpcCloseMemHandle": False})
        self.assertEqual(rows["end to end"]["e2e_formats.OwnFormats"],
                         {"passed": 3, "failed": 0, "skipped": 0})
        self.assertRegex(rows["examples"]["cuda_engine.c"]["says"], "^44 tokens on kvq's software")
        self.assertIn("tokens", rows["examples"]["minimal.py"]["says"])
        self.assertGreater(rows["software driver"]["test_soft_driver"]["passed"], 0)

    def test_hop(self):
        """By the command itself, from the folder alone, on the software driver."""
        out = self.scratch / "hop"
        call(self.folder / "tools" / "gpu-check.sh", "--packed", self.folder, "--out", out,
             "--emulate", "hop")
        rows = json.loads((out / "hop.json").read_text())["rows"]
        self.assertEqual(rows["without MPS"]["attend, 2 x 100, events"],
                         {"us": None, "host_us": None, "extra_us": None, "vs_local": None,
                          "MPS": "no"})
        self.assertIn("software driver", rows["with MPS"]["not_run"])
        self.assertIn("| without MPS, step, 2 x 100, words |", (out / "gpu-check.md").read_text())

    def test_another_folder_is_refused(self):
        said = call(self.folder / "tools" / "gpu-check.sh", "--packed", self.scratch, good=False)
        self.assertIn("is no folder that --pack made", said)

    def test_what_is_refused_is_not_run(self):
        rows = self.daemon("examples", KVQ_EMU_LACKS="legacy_ipc")
        self.assertIn("801", rows["this machine"]["memory by legacy IPC handle"]["not_run"])
        self.assertRegex(rows["examples"]["cuda_engine.c"]["not_run"],
                         "^memory by legacy IPC handle: cuIpcGetMemHandle: 801")
        self.assertIn("tokens", rows["examples"]["minimal.py"]["says"])

    def test_without_a_gpu(self):
        """By the command itself, from the folder alone."""
        out = self.scratch / "none"
        said = call(self.folder / "tools" / "gpu-check.sh", "--packed", self.folder, "--out", out)
        if "not run: this machine, GPU driver: " not in said:
            self.skipTest("there is a GPU")
        self.assertRegex(said, r"not run: end to end, e2e_main\.TwoEngines: GPU driver: ")
        text = (out / "gpu-check.md").read_text()
        self.assertIn("| kernel tests, test_gpu_attend |", text)
        self.assertIn("Stopped before its end", text)


if __name__ == "__main__":
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("no NumPy; skipped")
        sys.exit(77)
    BUILD = Path(sys.argv.pop(1)).resolve()
    unittest.main(verbosity=2)
