#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq-run on the shipped model, against what PyTorch computed from the same weights."""
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from e2e_rig import BIN, ROOT, Daemon, run  # noqa: E402

MODEL = os.path.join(ROOT, "tools/model/kvq-bytes")
with open(os.path.join(ROOT, "tools/model/golden.json"), encoding="utf-8") as golden:
    GOLDEN = json.load(golden)
HELDOUT = os.path.join(ROOT, "tools/model/heldout.txt")


def program(name):
    return os.path.join(BIN, name)


def start_daemon(**options):
    """With the attention that users have who choose none."""
    return Daemon(pool_bytes="1gb", backend="cpu", attention="fast", **options)


class KvqRun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = start_daemon()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.stop()

    def kvq_run(self, *arguments, status=0):
        done = subprocess.run(
            [program("kvq-run"), *map(str, arguments), "--model", MODEL, "--runtime-dir",
             self.daemon.directory],
            capture_output=True, timeout=300, check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def json(self, *arguments):
        return json.loads(self.kvq_run(*arguments, "--json").stdout)

    def test_logits(self):
        """The f16 cache gives PyTorch's fp32 logits to fp16's rounding."""
        for position, want in GOLDEN["positions"].items():
            ids = ",".join(map(str, GOLDEN["ids"][:int(position) + 1]))
            got = self.json("logits", "--ids", ids, "--format", "f16", "--top", 257)
            got = {entry["id"]: entry["logit"] for entry in got["top"]}
            for token, logit in zip(want["ids"], want["logits"]):
                self.assertAlmostEqual(got[token], logit, delta=0.02, msg=f"position {position}")

    def test_greedy(self):
        got = self.json("generate", "--ids", ",".join(map(str, GOLDEN["ids"])), "--format", "f16",
                        "--temperature", 0, "--tokens", len(GOLDEN["greedy"]))
        self.assertEqual(got["ids"], GOLDEN["greedy"])

    def test_perplexity_against_itself(self):
        """A format equals itself, and f16 has PyTorch's loss on the held-out window."""
        got = self.json("perplexity", "--format", "f16", "--text", HELDOUT, "--bytes",
                        GOLDEN["heldout"]["bytes"])
        self.assertEqual(got["kl_mean"], 0)
        self.assertEqual(got["same_top"], 1)
        self.assertEqual(got["log_likelihood_difference"], 0)
        self.assertAlmostEqual(math.log(got["perplexity"]), GOLDEN["heldout"]["nats_per_byte"],
                               delta=0.002)

    def test_perplexity_of_two_bits(self):
        """Two bits cost something, not much; nearly all was read packed."""
        got = self.json("perplexity", "--format", "oscar2", "--text", HELDOUT, "--bytes", 8192)
        self.assertGreater(got["packed_read_share"], 0.85)
        self.assertGreater(got["kl_mean"], 0)
        self.assertLess(got["kl_mean"], 0.5)
        self.assertLess(got["perplexity"], 1.5 * got["perplexity_against"])
        self.assertLess(got["bytes_per_token_head"], 98.001)

    def test_generation_streams_text(self):
        done = self.kvq_run("generate", "--prompt", "The ", "--tokens", 20, "--seed", 3)
        self.assertEqual(len(done.stdout.rstrip(b"\n")) <= 20, True)
        self.assertIn(b"tokens/s", done.stderr)
        self.assertIn(b"kvq2", done.stderr)  # the format unless another is named

    def test_same_seed_same_text(self):
        runs = [self.json("generate", "--prompt", "A table ", "--tokens", 200, "--seed", 5)["ids"]
                for _ in range(2)]
        self.assertEqual(runs[0], runs[1])

    def test_in_context(self):
        """Attention in kvq-run's own process gives the same tokens."""
        for format in ("oscar2", "innerq-hybrid"):
            runs = [self.json("generate", "--prompt", "The database file", "--tokens", 150,
                              "--seed", 9, "--format", format, *context)["ids"]
                    for context in ((), ("--in-context",))]
            self.assertEqual(runs[0], runs[1])
        done = self.kvq_run("generate", "--prompt", "The ", "--tokens", 5, "--in-context")
        self.assertNotIn(b"through the daemon", done.stderr)

    def test_bench_of_steps(self):
        """kvq-bench step compares the outputs of both ways itself."""
        done = subprocess.run([program("kvq-bench"), "step", "--format", "f16,kvq2", "--tokens",
                               "300", "--reps", "1", "--path", "fast", "--json"],
                              capture_output=True, check=True)
        rows = json.loads(done.stdout)
        self.assertEqual([(row["format"], row["tokens"]) for row in rows],
                         [("f16", 300), ("kvq2", 300)])
        self.assertEqual(rows[0]["path"], "exact")  # it has no other
        with open("/proc/cpuinfo", encoding="ascii") as file:
            if "avx2" in file.read() and "KVQ_CPU_MASK" not in os.environ:
                self.assertEqual(rows[1]["path"], "fast")
        for row in rows:
            self.assertGreater(row["context_us"], row["end_us"])
            self.assertAlmostEqual(row["ratio"], row["daemon_us"] / row["context_us"])

    def test_in_context_through_the_daemon(self):
        os.environ["KVQ_LOCAL"] = "daemon"
        try:
            done = self.kvq_run("generate", "--prompt", "The ", "--tokens", 5, "--in-context")
        finally:
            del os.environ["KVQ_LOCAL"]
        self.assertIn(b"through the daemon: KVQ_LOCAL=daemon", done.stderr)

    def test_named_session_goes_on(self):
        """A kept session continues as an unbroken one would."""
        whole = self.json("generate", "--prompt", "The database file", "--tokens", 64,
                          "--temperature", 0)
        half = self.json("generate", "--prompt", "The database file", "--tokens", 32,
                         "--temperature", 0, "--session", "half", "--keep")
        rest = self.json("generate", "--ids", whole["ids"][32], "--tokens", 31,
                         "--temperature", 0, "--session", "half")
        self.assertEqual(rest["tokens_found"], half["tokens_in_cache"])
        self.assertEqual(half["ids"] + [whole["ids"][32]] + rest["ids"], whole["ids"])

    def test_a_text_goes_on_without_another_beginning(self):
        """Behind a session's tokens the model's first token does not come once more."""
        runs, rest = [], ["--tokens", 8, "--temperature", 0, "--keep", "--session"]
        for name, words in (("text", ("--prompt", " of")), ("ids", ("--ids", "32,111,102"))):
            self.json("generate", "--prompt", "The database file", *rest, name)
            runs.append(self.json("generate", *words, *rest, name))
        self.assertEqual([r["prompt_tokens"] for r in runs], [3, 3])
        self.assertEqual(runs[0]["ids"], runs[1]["ids"])
        self.assertEqual(runs[0]["tokens_in_cache"], runs[1]["tokens_in_cache"])
        done = self.kvq_run("generate", *rest, "text", status=2)
        self.assertIn(b"goes on behind its tokens; give --prompt", done.stderr)

    def test_second_engine_skips_its_prefill(self):
        """Another process begins with the tokens that the first has left, and says the same."""
        ids = ",".join(str((7 * i + 3) % 250) for i in range(700))
        runs = [self.json("generate", "--ids", ids, "--tokens", 40, "--temperature", 0, "--prefix")
                for _ in range(2)]
        self.assertEqual([r["prefix_tokens"] for r in runs], [0, 640])
        self.assertEqual(runs[0]["ids"], runs[1]["ids"])
        done = self.kvq_run("generate", "--ids", ids, "--tokens", 1, "--prefix")
        self.assertIn(b"640 of 700 prompt tokens were there", done.stderr)
        # In their own context engines share just so.
        ids = ",".join(str((5 * i + 2) % 250) for i in range(700))
        runs = [self.json("generate", "--ids", ids, "--tokens", 9, "--temperature", 0, "--prefix",
                          *context) for context in (["--in-context"], ["--in-context"], [])]
        self.assertEqual([r["prefix_tokens"] for r in runs], [0, 640, 640])
        self.assertEqual(runs[0]["ids"], runs[1]["ids"])
        self.assertEqual(runs[0]["ids"], runs[2]["ids"])

    def test_capture(self):
        """A capture holds what the cache was given, up to its limit, and no more."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "kv.capture")
            self.json("perplexity", "--format", "f16", "--text", HELDOUT, "--bytes", 700,
                      "--context", 300, "--capture", path, "--capture-tokens", 500)
            with open(path, "rb") as file:
                magic, _, layers, flags, chunks, size, tokens = struct.unpack("<8sQIIQQQ",
                                                                              file.read(48))
                self.assertEqual(os.path.getsize(path), size)
        self.assertEqual((magic, layers, flags, tokens), (b"KVQCAPT1", 4, 1, 500))
        # 19 steps for each of the 300 tokens with BOS, then 13 for the 200 that were left.
        self.assertEqual(chunks, 4 * (19 + 13))
        self.assertIn(b"cannot capture", self.kvq_run(
            "generate", "--prompt", "a", "--capture", "/no/such/place", status=1).stderr)

    def test_bench_agrees(self):
        """kvq-bench quality, which needs no daemon, has the same model and the same formats."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.jsonl")
            subprocess.run([program("kvq-bench"), "quality", "perplexity",
                            "--results", path,
                            "--model", MODEL, "--text", HELDOUT, "--bytes", "2048", "--step", "16",
                            "--methods", "oscar2,oscar4"], check=True, timeout=300)
            with open(path, encoding="utf-8") as file:
                bench = {line["method"]: line for line in map(json.loads, file)}
        for name in ("oscar2", "oscar4"):
            got = self.json("perplexity", "--format", name, "--text", HELDOUT, "--bytes", 2048,
                            "--v-rotation", "daemon")
            self.assertAlmostEqual(got["perplexity"] / bench[name]["perplexity"], 1, delta=1e-3)
            self.assertAlmostEqual(got["perplexity_against"] / bench["f16"]["perplexity"], 1,
                                   delta=1e-6)
            self.assertAlmostEqual(got["kl_mean"] / bench[name]["kl"], 1, delta=0.05)
            error = got["log_likelihood_difference_stderr"]  # both by blocks of tokens
            self.assertAlmostEqual(error / bench[name]["gain_error"], 1, delta=0.2)
        one = self.json("perplexity", "--format", "f16", "--text", HELDOUT, "--bytes", 100)
        self.assertIsNone(one["log_likelihood_difference_stderr"])  # of a single block

    def logits(self, ids, *arguments):
        got = self.json("logits", "--ids", ids, "--top", 257, "--attention", "exact", *arguments)
        return [entry["logit"] for entry in sorted(got["top"], key=lambda entry: entry["id"])]

    def test_rotation_in_the_weights(self):
        """V rotated in the weights: the same model in f16, and in oscar2 what the daemon's own
        rotation gives but for what fp16 rounds in another basis. It is the default."""
        def apart(a, b):
            return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)) / len(a))
        with open(HELDOUT, "rb") as text:
            ids = ",".join(map(str, text.read(900)))
        plain = self.logits(ids, "--format", "f16")
        folded = self.logits(ids, "--format", "f16", "--v-rotation", "engine")
        self.assertNotEqual(plain, folded)
        self.assertLess(apart(plain, folded), 0.005)
        engine, daemon, none, default = (
            self.logits(ids, "--format", "oscar2", "--v-rotation", who)
            for who in ("engine", "daemon", "none", "default"))
        self.assertEqual(default, engine)
        self.assertNotEqual(daemon, engine)
        self.assertGreater(apart(daemon, none), 0.02)
        self.assertLess(apart(daemon, engine), apart(daemon, none) / 4)
        # Formats whose papers leave V alone are not rotated.
        kivi = [self.logits(ids, "--format", "kivi2", "--v-rotation", who)
                for who in ("default", "none")]
        self.assertEqual(*kivi)

    def test_rotation_of_a_session_that_is_there(self):
        """A session of V as it comes goes on as it is; who asks for another rotation is refused."""
        ask = ("generate", "--format", "oscar2", "--temperature", 0)
        whole = self.json(*ask, "--prompt", "The database file", "--tokens", 64,
                          "--v-rotation", "daemon")
        half = self.json(*ask, "--prompt", "The database file", "--tokens", 32,
                         "--session", "turned", "--keep", "--v-rotation", "daemon")
        refused = self.kvq_run(*ask, "--ids", whole["ids"][32], "--session", "turned",
                               "--v-rotation", "engine", status=1)
        self.assertIn(b"another v_rotation", refused.stderr)
        rest = self.json(*ask, "--ids", whole["ids"][32], "--tokens", 31, "--session", "turned")
        self.assertEqual(half["ids"] + [whole["ids"][32]] + rest["ids"], whole["ids"])

    def test_usage(self):
        for arguments, sentence in (
                (["generate", "--tokens", "-4"], b"--tokens -4: must be a whole number"),
                (["generate", "--no-such"], b"no such option"),
                (["perplexity"], b"--text FILE is missing"),
                (["generate", "--ids", "1,2,900"], b"'900' is no token id below 257"),
                (["generate", "--attention", "slow"], b"must be default, exact or fast"),
                (["generate", "--v-rotation", "me"], b"must be default, engine, daemon or none"),
                (["generate", "--v-rotation", "engine", "--capture", "x"], b"takes V as the model"),
                (["dance"], b"'dance' is no command")):
            self.assertIn(sentence, self.kvq_run(*arguments, status=2).stderr)

    def test_failures(self):
        for arguments, sentence in (
                (["generate", "--format", "int1"], b"format"),
                (["perplexity", "--text", "/no/such/file"], b"cannot open /no/such/file")):
            self.assertIn(sentence, self.kvq_run(*arguments, status=1).stderr)

    def test_no_model_there(self):
        with tempfile.TemporaryDirectory() as empty:
            done = subprocess.run([program("kvq-run"), "generate", "--model", empty],
                                  capture_output=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"config.json", done.stderr)


class Restart(unittest.TestCase):
    """The daemon is killed and started again; what was saved goes on as if nothing had been."""

    kvq_run, json = KvqRun.kvq_run, KvqRun.json

    def start(self, folder):
        self.daemon = start_daemon(storage_dir=folder)

    def test_text_goes_on_after_a_kill(self):
        ids = ",".join(str((7 * i + 3) % 250) for i in range(700))
        folder = tempfile.mkdtemp(prefix="kvq-store-")
        try:
            self.start(folder)
            whole = self.json("generate", "--ids", ids, "--tokens", 80, "--temperature", 0)
            half = self.json("generate", "--ids", ids, "--tokens", 40, "--temperature", 0,
                             "--session", "chat", "--keep")
            self.daemon.ctl("session", "save", "chat")
            self.daemon.kill()
            self.daemon.stop()
            self.start(folder)
            rest = self.json("generate", "--ids", whole["ids"][40], "--tokens", 39,
                             "--temperature", 0, "--session", "chat")
            self.assertEqual(rest["tokens_found"], half["tokens_in_cache"])
            self.assertEqual(half["ids"] + [whole["ids"][40]] + rest["ids"], whole["ids"])
        finally:
            self.daemon.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def test_prefill_is_skipped_after_a_kill(self):
        """Another engine begins with what the first one's session has left on disk."""
        tokens = 8200 if os.environ.get("KVQ_FULL") == "1" else 700
        ids = ",".join(str((7 * i + 3) % 250) for i in range(tokens))
        ask = ("generate", "--ids", ids, "--tokens", 9, "--temperature", 0, "--prefix")
        folder = tempfile.mkdtemp(prefix="kvq-store-")
        try:
            self.start(folder)
            first = self.json(*ask, "--session", "chat", "--keep")
            self.daemon.ctl("session", "save", "chat")
            self.daemon.kill()
            self.daemon.stop()
            self.start(folder)
            second = self.json(*ask)
            self.assertEqual(first["prefix_tokens"], 0)
            self.assertEqual(second["prefix_tokens"], tokens // 128 * 128)
            self.assertEqual(first["ids"], second["ids"])
            if tokens > 8000:
                print(f"{first['prefill_seconds']:.2f} s of prefill, then "
                      f"{second['open_seconds'] + second['prefill_seconds']:.2f} s from disk")
        finally:
            self.daemon.stop()
            shutil.rmtree(folder, ignore_errors=True)

    def test_perplexity_through_a_kill(self):
        """Saved, killed with -9, restored in the middle of the text: to the last digit the same."""
        folder, runtime = tempfile.mkdtemp(prefix="kvq-store-"), tempfile.mkdtemp(prefix="kvqd-")

        def start():
            return start_daemon(directory=runtime, storage_dir=folder)
        self.daemon = start()
        try:
            text = ("--text", HELDOUT, "--bytes", 900, "--step", 60, "--format", "oscar2")
            whole = self.json("perplexity", *text)
            self.assertGreater(whole["packed_read_share"], 0.3)
            self.daemon, halves = broken_in_two(self.daemon, start, *text[2:], "--pause-at", 600)
            for run in (whole, halves):
                for key in ("tokens_per_s", "tokens_per_s_against"):
                    del run[key]
            self.assertEqual(halves, whole)
            self.assertEqual(self.daemon.ctl("storage", "list"), [])  # it leaves nothing behind
        finally:
            self.daemon.stop()
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(runtime, ignore_errors=True)


def broken_in_two(daemon, restart, *arguments):
    """Perplexity with a pause, in which the daemon is killed with -9 and another one started."""
    process = subprocess.Popen(
        [program("kvq-run"), "perplexity", "--model", MODEL, "--text", HELDOUT, "--runtime-dir",
         daemon.directory, "--json", *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stderr:
        if b"paused" in line:
            break
    daemon.kill()
    daemon.stop()
    daemon = restart()
    out, complaint = process.communicate(b"\n", timeout=300)
    if process.returncode:
        raise AssertionError(complaint)
    return daemon, json.loads(out)


class Codebooks(unittest.TestCase):
    """From captured keys and values to attention over their codes."""

    def run_program(self, name, *arguments, status=0):
        done = subprocess.run([program(name), *map(str, arguments)], capture_output=True,
                              text=True, timeout=300, check=False)
        self.assertEqual(done.returncode, status, done.stderr)
        return done

    def perplexity(self, fmt, *arguments, status=0):
        return self.run_program("kvq-run", "perplexity", "--model", MODEL, "--runtime-dir",
                                self.daemon.directory, "--text", HELDOUT, "--bytes", 3000,
                                "--format", fmt, "--json", *arguments, status=status)

    def refused(self, fmt, words):
        done = self.perplexity(fmt, status=1)
        self.assertIn(words, done.stderr)

    def test_codebook(self):
        with tempfile.TemporaryDirectory() as folder:
            book, capture = os.path.join(folder, "own.kvqbook"), os.path.join(folder, "capture")
            runtime = os.path.join(folder, "run")

            def start():
                return start_daemon(directory=runtime, codebook_dir=folder,
                                    storage_dir=os.path.join(folder, "store"))
            self.daemon = start()
            try:
                self.perplexity("f16", "--capture", capture)
                self.run_program("kvq-codebook", "make", "--capture", capture, "--format",
                                 "vecinfer-2", "--out", book)
                got = json.loads(self.perplexity("vecinfer-2@own").stdout)
                self.assertEqual(got["bits_per_value"], 2)
                self.assertGreater(got["packed_read_share"], 0.85)
                self.assertGreater(got["kl_mean"], 0)
                self.assertLess(got["kl_mean"], 0.1)
                short = ("--bytes", 900, "--step", 60, "--format", "vecinfer-2@own")
                whole = json.loads(self.perplexity("vecinfer-2@own", *short).stdout)
                self.daemon, halves = broken_in_two(self.daemon, start, *short, "--pause-at", 600)
                self.assertEqual(halves["perplexity"], whole["perplexity"])
                self.assertEqual(halves["kl_mean"], whole["kl_mean"])
                self.refused("vecinfer-2", "vecinfer-2@NAME")
                self.refused("vecinfer-4@own",
                             "K of 8 bits for 4 channels; the format needs 8 for 2")
                self.refused("vecinfer-2@absent", "absent.kvqbook")
                self.refused("vecinfer-2@../own", "letters, digits")
                self.refused("oscar2@own", "no use for a codebook")
            finally:
                self.daemon.stop()


if __name__ == "__main__":
    sys.exit(run([KvqRun, Restart, Codebooks], __doc__))
