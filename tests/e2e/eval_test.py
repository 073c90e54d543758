#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq.eval: its statistics against others' arithmetic, and the command over small models with
random weights.

    tests/e2e/eval_test.py [NAME]...

Needs PyTorch and transformers; says so and ends well where they are missing. KVQ_BIN_DIR says where
kvqd is."""
import contextlib
import io
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree

import e2e_rig
from e2e_rig import np
from eval_tools import BenchEngines, Fetched
from python_hints import faults
from transformers_rig import Case, models  # before torch: says if it is missing

import tokenizers
import torch
import transformers

import kvq.eval
from kvq.eval import (
    allocate, answers, command, needles, plots, report, results, score, stats, texts)
from kvq.eval.controls import Dropped, Int2, rounded
from kvq.eval.models import Failed, Models
from kvq.eval.sides import Format, Side

TEXT = os.path.join(e2e_rig.ROOT, "LICENSE")
CONTEXT, STEP = 320, 64


class Statistics(unittest.TestCase):
    """Means, and standard errors by clusters."""

    def test_blocks_of_one_size(self):
        """The error is that of the mean of the blocks' means."""
        rng = np.random.default_rng(1)
        windows = [rng.normal(size=4 * stats.BLOCK) for _ in range(2)]
        middle, error = stats.mean(windows)
        blocks = np.concatenate(windows).reshape(-1, stats.BLOCK).mean(1)
        self.assertAlmostEqual(middle, blocks.mean(), places=12)
        self.assertAlmostEqual(error, blocks.std(ddof=1) / math.sqrt(len(blocks)), places=12)

    def test_windows_are_the_clusters_where_there_are_many(self):
        """What all tokens of a window share does not average out within it."""
        rng = np.random.default_rng(2)
        shared = rng.normal(size=16)
        windows = [s + 0.1 * rng.normal(size=1000) for s in shared]
        _, error = stats.mean(windows)
        self.assertAlmostEqual(error, shared.std(ddof=1) / 4, delta=0.01)
        naive = np.concatenate(windows).std(ddof=1) / math.sqrt(16000)
        self.assertGreater(error, 20 * naive)

    def test_clusters_of_several_sizes(self):
        """Every token counts the same; the error is near what drawing clusters again gives."""
        rng = np.random.default_rng(3)
        windows = [rng.normal(rng.normal(), 1, size=n) for n in rng.integers(20, 400, size=40)]
        middle, error = stats.mean(windows)
        self.assertAlmostEqual(middle, np.concatenate(windows).mean(), places=12)
        drawn = [np.concatenate([windows[i] for i in rng.integers(0, 40, size=40)]).mean()
                 for _ in range(2000)]
        self.assertAlmostEqual(error, np.std(drawn), delta=0.15 * error)

    def test_one_cluster_has_no_error(self):
        middle, error = stats.mean([np.ones(5)])
        self.assertEqual((middle, math.isnan(error)), (1, True))

    def test_summary(self):
        kl = [np.arange(1, 201) / 100.0, np.zeros(100)]
        told = stats.summary([np.full(200, 2.0), np.full(100, 5.0)],
                             [np.full(200, -0.5), np.zeros(100)], kl,
                             [np.arange(200) < 150, np.ones(100, bool)])
        self.assertAlmostEqual(told["perplexity"], math.exp(3), places=9)
        self.assertAlmostEqual(told["gain"], -1 / 3, places=12)
        self.assertAlmostEqual(told["kl"], sum(range(1, 201)) / 100 / 300, places=12)
        self.assertAlmostEqual(told["kl_99"], 1.9701, places=9)  # of 300 numbers, not of windows
        self.assertAlmostEqual(told["same_top"], 250 / 300, places=12)
        self.assertEqual((told["tokens"], told["windows"], told["clusters"]), (300, 2, 3))
        self.assertEqual(told["errors_by"], "blocks of 128 tokens")


    def test_by_place(self):
        """Each part of the windows has its own mean; short windows are not told apart."""
        windows = [np.repeat([1.0, 2.0, 3.0, 4.0], 600)[:2399] + x for x in (0, 1)]
        told = stats.by_place(windows)
        self.assertEqual([(p["first"], p["last"], p["kl"]) for p in told],
                         [(1, 600, 1.5), (601, 1200, 2.5), (1201, 1800, 3.5), (1801, 2399, 4.5)])
        for place, at in zip(told, range(0, 2400, 600)):
            self.assertEqual(place["kl_error"], stats.mean([w[at:at + 600] for w in windows])[1])
        self.assertEqual(stats.by_place([w[:1600] for w in windows]), [])
        row = {"name": "f16", "path": "exact", "kind": "format", "score": {"by_place": told}}
        page = report.by_place({"rows": [row, {"name": "none", "kind": "format"}]})
        self.assertIn("| cache | path | KL, tokens 1 to 600 | KL, tokens 601 to 1,200 |", page[2])
        self.assertEqual(sum("`f16`" in line for line in page), 1)


class Kept(unittest.TestCase):
    """The file that measurements are kept in."""

    def test_a_line_that_was_cut(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.jsonl")
            kept = results.Results(path)
            kept.put("a", {"kl": results.rounded([1 / 3, 1e-9])})
            kept.put("b", {"same": "0110"})
            kept.close()
            with open(path, "r+", encoding="utf-8") as file:
                file.truncate(os.path.getsize(path) - 5)
            kept = results.Results(path)
            self.assertEqual(list(kept.lines), ["a"])
            kept.put("b", {"same": "0110"})
            kept.close()
            kept = results.Results(path)
            kept.close()
        self.assertEqual(results.array(kept.get("a"), "kl").tolist(), [0.3333333, 1e-9])
        self.assertEqual(results.array(kept.get("b"), "same").tolist(), [False, True, True, False])

    def test_numbers_in_tables(self):
        self.assertEqual([report.number(x) for x in (0, 1234.5, 12.34, 0.01234, 2.5e-7, math.nan)],
                         ["0", "1,234", "12.3", "0.0123", "2.5e-07", "-"])
        self.assertEqual(report.with_error(-0.012345, 0.00067), "-0.01235 ± 0.00067")
        self.assertEqual(report.with_error(4.08e-7, 3.14e-8), "4.1e-07 ± 3.1e-08")


def alphabet(folder):
    """A tokenizer whose tokens are the bytes."""
    symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    made.save_pretrained(folder)
    return made


class Command(Case):
    """python -m kvq.eval over a model in a folder."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory(prefix="kvq-eval-")
        cls.addClassCleanup(cls.folder.cleanup)
        cls.tokenizer = alphabet(cls.path("model"))
        models("llama")[0].save_pretrained(cls.path("model"))
        cls.both = Models(models("llama")[0], cls.tokenizer, "llama")

    @classmethod
    def path(cls, *names):
        return os.path.join(cls.folder.name, *names)

    def command(self, out, *more, status=0, model=None):
        """Runs it; the report."""
        said, errors = io.StringIO(), io.StringIO()
        arguments = [model or self.path("model"), "--text", TEXT, "--context", str(CONTEXT),
                     "--step", str(STEP), "--out", self.path(out), "--controls", "", "--peers", "",
                     "--needles", "0", "--answers", "0", *more]
        with unittest.mock.patch.dict(os.environ, KVQ_RUNTIME_DIR=self.daemon.directory), \
                contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            try:
                got = kvq.eval.main(arguments)
            except SystemExit as ended:
                got = ended.code
        torch.set_grad_enabled(False)
        self.assertEqual(got, status, errors.getvalue())
        self.said = errors.getvalue()
        if status == 2 or not os.path.exists(self.path(out, "report.json")):
            return None
        return json.loads(self.read(out, "report.json"))

    def read(self, out, name):
        with open(self.path(out, name), encoding="utf-8") as file:
            return file.read()

    def rows(self, made):
        return {row["name"] + "/" + row["path"]: row for row in made["rows"]}

    def test_scores(self):
        """The reference's perplexity is the model's; f16 is the reference; fewer bits are farther
        away, on both paths."""
        rows = self.rows(self.command(
            "scores", "--formats", "f16,oscar4,oscar2,oscar2/fast", "--windows", "2"))
        with open(TEXT, encoding="utf-8") as file:
            ids = self.tokenizer(file.read())["input_ids"][:2 * CONTEXT]
        losses = []
        for at in (0, CONTEXT):
            window = torch.tensor([ids[at:at + CONTEXT]])
            logits = models("llama")[0](window).logits[0, :-1].double()
            losses.append(torch.nn.functional.cross_entropy(logits, window[0, 1:]))
        reference = rows["reference/engine"]["score"]
        self.assertAlmostEqual(reference["perplexity"], float(torch.stack(losses).mean().exp()),
                               delta=1e-4 * reference["perplexity"])
        self.assertEqual((reference["kl"], reference["gain"], reference["same_top"]), (0, 0, 1))
        self.assertEqual(reference["tokens"], 2 * (CONTEXT - 1))
        self.assertEqual(reference["sizes"]["bits"], 32)
        f16, four, two, fast = (rows[name]["score"] for name in (
            "f16/exact", "oscar4/exact", "oscar2/exact", "oscar2/fast"))
        self.assertLess(f16["kl"], 1e-6)
        self.assertGreater(f16["same_top"], 0.99)
        self.assertAlmostEqual(f16["perplexity"], reference["perplexity"],
                               delta=1e-4 * reference["perplexity"])
        self.assertLess(30 * f16["kl"], four["kl"])
        self.assertLess(3 * four["kl"], two["kl"])
        self.assertLess(two["kl"], two["kl_99"])
        self.assertLess(two["kl_99"], two["kl_max"])
        self.assertNotEqual(two["kl"], fast["kl"])
        self.assertEqual(fast["sizes"]["attention"], "fast")
        self.assertAlmostEqual(fast["kl"], two["kl"], delta=0.3 * two["kl"])
        self.assertAlmostEqual(two["sizes"]["bits_packed"], 3.125)
        self.assertEqual(two["sizes"]["in_full"], CONTEXT % 128)

    def test_kl(self):
        """Against NumPy in double precision."""
        rng = np.random.default_rng(5)
        want, have = (rng.normal(0, 3, size=(37, 50)).astype(np.float32) for _ in range(2))
        have[:9] = want[:9]
        next_ids = rng.integers(0, 50, size=37)
        got = score.compare(*(torch.from_numpy(x) for x in (want, have, next_ids)))
        log_p, log_q = (x - np.log(np.exp(x).sum(1, keepdims=True))
                        for x in (want.astype(np.float64), have.astype(np.float64)))
        at = np.arange(37), next_ids
        for name, numbers in (("kl", (np.exp(log_p) * (log_p - log_q)).sum(1)),
                              ("nll", -log_q[at]), ("gain", log_q[at] - log_p[at]),
                              ("same", log_p.argmax(1) == log_q.argmax(1))):
            np.testing.assert_allclose(got[name], numbers, rtol=1e-9, atol=1e-12, err_msg=name)

    def test_controls(self):
        """Formats have to be better than what needs no format."""
        rows = self.rows(self.command("controls", "--formats", "oscar4,oscar2", "--windows", "1",
                                      "--controls", "dropped,int2-token"))
        four, two, gone, int2 = (rows[name]["score"] for name in (
            "oscar4/exact", "oscar2/exact", "dropped/engine", "int2-token/engine"))
        self.assertLess(5 * two["kl"], gone["kl"])
        self.assertLess(5 * four["kl"], int2["kl"])
        self.assertLess(int2["kl"], gone["kl"])
        self.assertEqual([x["sizes"]["in_full"] for x in (gone, int2, two)], [CONTEXT % 128] * 3)
        self.assertAlmostEqual(gone["sizes"]["bits"], 16 * (CONTEXT % 128) / CONTEXT)
        self.assertAlmostEqual(int2["sizes"]["bits_packed"], 2.5)

    def test_dropped(self):
        """As with a mask of one's own, of the whole window in one forward."""
        ids = torch.arange(CONTEXT) * 7 % 256
        side = Dropped(self.both, "dropped")
        self.assertEqual(side.nbytes(), 0)
        side.begin()
        got = torch.cat([side.forward(ids[at:at + STEP]) for at in range(0, CONTEXT, STEP)])
        at = torch.arange(CONTEXT)
        first = at // STEP * STEP // 128 * 128  # of what a token sees
        seen = (at <= at[:, None]) & (at >= first[:, None])
        mask = torch.zeros(CONTEXT, CONTEXT).masked_fill(~seen, torch.finfo(torch.float32).min)
        want = models("llama")[0](ids[None], attention_mask=mask[None, None]).logits[0]
        self.same_logits(want, got, 1e-4)
        self.assertGreater(float((want[-1] - models("llama")[0](ids[None]).logits[0, -1]).abs()
                                 .max()), 0.05, "nothing was dropped")

    def test_int2(self):
        """Whole units of 128 tokens have 4 values a head and token; the rest is as it came."""
        side = Int2(self.both, "int2-token")
        side.begin()
        for n in (100, 100, 100):
            side.forward(torch.arange(n))
            before = [layer.keys.clone() for layer in side.cache.layers]
        side.forward(torch.arange(1))
        for old, layer in zip(before, side.cache.layers):
            self.assertTrue(torch.equal(layer.keys[:, :, 256:300], old[:, :, 256:]))
            for row in layer.keys[0, :, :256].reshape(-1, 64):
                self.assertLessEqual(len(row.unique()), 4)
            self.assertEqual(len(layer.keys[0, 0, 256].unique()), 64)
        x = torch.tensor([[0.0, 0.9, 1.1, 2.4, 3.0], [5.0] * 5])
        self.assertEqual(rounded(x).tolist(), [[0, 1, 1, 2, 3], [5] * 5])

    def test_peers(self):
        """With numbers where their package is installed, with a row that says so where not."""
        rows = self.rows(self.command("peers", "--formats", "", "--windows", "1", "--peers",
                                      "quanto4,quanto2,hqq4,hqq2"))
        for backend, package in (("quanto", "optimum-quanto"), ("hqq", "hqq")):
            four, two = (rows[f"{backend}{bits}/engine"] for bits in (4, 2))
            if "failed" in four:
                self.assertIn(f"pip install {package}", four["failed"])
                self.assertNotIn("score", four)
                continue
            self.assertLess(3 * four["score"]["kl"], two["score"]["kl"])
            self.assertLess(two["score"]["sizes"]["bits"], four["score"]["sizes"]["bits"])
            self.assertLess(four["score"]["sizes"]["bits"], 8)

    def test_needles(self):
        """An item holds its needle at its distance; what is told is what the logits say."""
        with open(TEXT, encoding="utf-8") as file:
            text = file.read()
        items = needles.make(self.tokenizer, text, (100, 300), 2)
        self.assertEqual(items, needles.make(self.tokenizer, text, (100, 300), 2))
        self.assertEqual([item["distance"] for item in items], [100, 100, 300, 300])
        for item in items:
            words = self.tokenizer.decode(item["prompt"])
            answer = self.tokenizer.decode(item["answer"])
            question = words[words.rindex("\n\nThe secret number of "):]
            self.assertTrue(words.endswith(question))
            at = words.index(question + answer + ".\n\n") + len(question)
            self.assertEqual(len(words) - at, item["distance"])
            self.assertEqual(at - len(question), needles.LEAD)
        item = items[3]
        logits = models("llama")[0](torch.tensor([item["prompt"] + item["answer"]])).logits[0]
        told = logits[len(item["prompt"]) - 1:-1].double().log_softmax(-1)
        bits = -sum(float(told[i, t]) for i, t in enumerate(item["answer"])) / math.log(2)
        side = Side(self.both)
        self.assertAlmostEqual(needles.ask(side, item, STEP)["bits"], bits, delta=1e-4 * bits)
        item["answer"] = [int(told[0].argmax()), int(told[1].argmin())]
        self.assertEqual(needles.ask(side, item, STEP)["right"], "10")
        self.assertEqual(needles.ask(side, item, STEP)["outside"], 0)
        four = needles.ask(Format(self.both, "oscar4", "exact", client=self.client), item, STEP)
        n = len(item["prompt"]) - 1
        self.assertAlmostEqual(four["outside"], n // 128 * 128 / n, places=6)

    def test_recall(self):
        """By distance, and by what is outside; an item is right if all its tokens are."""
        lines = [{"distance": d, "right": right, "bits": bits, "outside": outside}
                 for d, right, bits, outside in ((64, "11", 1.0, 0), (64, "10", 3.0, 0.5),
                                                 (256, "11", 2.0, 0.51), (256, "11", 4.0, 1.0))]
        told = needles.summary(lines)
        self.assertEqual([(g["distance"], g["right"], g["tokens"], g["bits"])
                          for g in told["by_distance"]], [(64, 0.5, 0.75, 2), (256, 1, 1, 3)])
        self.assertEqual([(g["outside"], g["items"], g["right"]) for g in told["by_outside"]],
                         [("0%", 1, 1), ("up to 50%", 1, 0), ("50 to 90%", 1, 1),
                          ("90 to 100%", 1, 1)])
        self.assertEqual([f"{g['right_low']:.3f} {g['right_high']:.3f}"
                          for g in told["by_distance"]], ["0.095 0.905", "0.342 1.000"])
        self.assertEqual((told["all"]["items"], told["all"]["right"]), (4, 0.75))
        for right, n, low, high in ((0, 20, 0, 0.161), (7, 30, 0.118, 0.409), (20, 20, 0.839, 1)):
            got = stats.wilson(right, n)
            self.assertAlmostEqual(got[0], low, 3)
            self.assertAlmostEqual(got[1], high, 3)

    def test_answers(self):
        """The reference says what generate() says; others are followed to where they part."""
        prompt = [int(x) for x in torch.arange(200) * 7 % 256]
        side = Side(self.both)
        said = answers.answer(side, prompt, 40, STEP)["said"]
        want = models("llama")[0].generate(torch.tensor([prompt]), max_new_tokens=40,
                                           do_sample=False, attention_mask=torch.ones(1, 200))
        self.assertEqual(said, want[0, 200:].tolist())
        like = said[:7] + [said[7] ^ 1] + said[8:]
        short = answers.answer(side, prompt, 40, STEP, like)
        self.assertEqual(len(short["said"]), answers.TIMED + 1)
        self.assertEqual(answers.same(short["said"], like), 7)
        self.assertEqual(answers.same(said, said), 40)
        told = answers.summary([{"same": n, "tokens": 40} for n in (40, 7, 10)])
        self.assertEqual((told["same"], told["median"], told["whole"]), (19, 10, 1))
        self.assertAlmostEqual(told["same_error"], np.std([40, 7, 10], ddof=1) / math.sqrt(3))

    def test_all_parts(self):
        """Needles and answers in the report, and taken up again from what is kept."""
        arguments = ("--formats", "f16,oscar2", "--windows", "1", "--needles", "2", "--distances",
                     "100,300", "--answers", "2", "--answer-tokens", "20", "--prompt", "200")
        made = self.command("parts", *arguments)
        rows = self.rows(made)
        for row in rows.values():
            self.assertEqual([g["items"] for g in row["needles"]["by_distance"]], [2, 2])
            self.assertGreater(row["speed"]["decode_tokens_per_second"], 0)
        self.assertEqual(rows["f16/exact"]["answers"]["same"], 20)
        self.assertEqual(rows["f16/exact"]["needles"]["by_outside"][0]["outside"], "0%")
        self.assertEqual([g["outside"] for g in rows["oscar2/exact"]["needles"]["by_outside"]],
                         ["50 to 90%", "90 to 100%"])
        page = self.read("parts", "report.md")
        self.assertRegex(page, r"% \(\d+ to \d+%\) of 2, [\d.]+ bits")
        for words in ("## Needles", "300 tokens away", "50 to 90% outside", "## Long answers"):
            self.assertIn(words, page)
        self.assertEqual(self.command("parts", *arguments), made)
        self.assertNotRegex(self.said, "window|needles|answer", "something was measured again")
        for name, words in (("kl.svg", ("oscar2", "f16", "KL by bits")),
                            ("needles.svg", ("reference", "oscar2", "found, %")),
                            ("answers.svg", ("oscar2", "tokens like the reference"))):
            self.assertIn(f"]({name})", page)
            root = xml.etree.ElementTree.parse(self.path("parts", name)).getroot()
            told = " ".join(root.itertext())
            for word in words:
                self.assertIn(word, told)

    def test_plots(self):
        """Each cache stands at its bits and its KL; one that takes nothing has no place."""
        def row(name, bits, kl, kind="format", path="exact"):
            return {"name": name, "path": path, "kind": kind,
                    "score": {"kl": kl, "sizes": {"bits": bits}}}
        made = {"model": "m", "rows": [row("reference", 32, 0, "reference", "engine"),
                                       row("oscar2", 3, 0.1), row("oscar2", 3, 0.2, path="fast"),
                                       row("dropped", 0, 0.5, "control", "engine")]}
        self.assertEqual(plots.by_bits(made), {"oscar2": [(3, 0.1)], "oscar2/fast": [(3, 0.2)]})
        self.assertEqual([name for _, name in plots.write(made, self.path())], ["kl.svg"])

    def test_capture(self):
        """K and V of the file are those of the model's own cache, Q is there, and each window is a
        sequence."""
        path = self.path("kv.capture")
        self.command("captured", "--capture", path, "--windows", "2")
        with open(path, "rb") as file:
            data = file.read()
        header = struct.unpack_from("<8sQIIQQQ", data)
        self.assertEqual(header[0], b"KVQCAPT1")
        layers, chunks, tokens = header[2], header[4], header[6]
        self.assertEqual((layers, chunks, tokens), (3, 2 * 3 * CONTEXT // STEP, 2 * CONTEXT))
        self.assertEqual(header[3], 1, "no queries")
        at = 320 + layers * 8 + -(320 + layers * 8) % 64
        kept = {}
        for _ in range(chunks):
            _, layer, k, v, sequence, n, position, nbytes, _, q = struct.unpack_from(
                "<IHBBIIQQQB", data, at)
            self.assertEqual((k, v, q), (3, 3, 3))
            floats = np.frombuffer(data, np.float32, nbytes // 4, at + 64)
            self.assertEqual(len(floats), n * 64 * (2 + 2 + 4))
            kept.setdefault((sequence, layer), []).append(
                (position, floats[:2 * n * 64].reshape(2, n, 64),
                 floats[2 * n * 64:4 * n * 64].reshape(2, n, 64)))
            at += 64 + nbytes + -nbytes % 64
        self.assertEqual(at, len(data))
        with open(TEXT, encoding="utf-8") as file:
            ids = self.tokenizer(file.read())["input_ids"][CONTEXT:2 * CONTEXT]
        cache = transformers.DynamicCache()
        models("llama")[0](torch.tensor([ids]), past_key_values=cache)
        for layer in range(3):
            found = kept[1, layer]
            self.assertEqual([p for p, _, _ in found], list(range(0, CONTEXT, STEP)))
            for i, want in ((1, cache.layers[layer].keys), (2, cache.layers[layer].values)):
                got = np.concatenate([piece[i] for piece in found], 1)
                np.testing.assert_allclose(got, want[0].numpy(), atol=5e-3)

    @unittest.skipUnless(os.path.exists(os.path.join(e2e_rig.BIN, "kvq-codebook")),
                         "kvq-codebook is not built")
    def test_codebook(self):
        """From a capture to a row of a format that needs a codebook, as a user does it: with a
        daemon that the run starts for itself."""
        path = self.path("book.capture")
        self.command("captured", "--capture", path, "--windows", "2", "--skip", "2000")
        os.mkdir(self.path("books"))
        subprocess.run([os.path.join(e2e_rig.BIN, "kvq-codebook"), "make", "--quiet", "--capture",
                        path, "--format", "vecinfer-2", "--iterations", "3", "--out",
                        self.path("books", "mine.kvqbook")], check=True, timeout=300)
        env = {k: v for k, v in os.environ.items() if k != "KVQ_RUNTIME_DIR"}
        env.update(PYTHONPATH=os.path.join(e2e_rig.ROOT, "client", "python"),
                   KVQ_BIN_DIR=e2e_rig.BIN)
        done = subprocess.run(
            [sys.executable, "-m", "kvq.eval", self.path("model"), "--text", TEXT, "--context",
             str(CONTEXT), "--step", str(STEP), "--windows", "1", "--needles", "0", "--answers",
             "0", "--formats", "vecinfer-2@mine", "--controls", "dropped", "--peers", "", "--out",
             self.path("book"), "--daemon", "codebook_dir=" + self.path("books")], env=env,
            capture_output=True, text=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(self.path("book", "report.json"), encoding="utf-8") as file:
            rows = self.rows(json.load(file))
        score = rows["vecinfer-2@mine/exact"]["score"]
        self.assertAlmostEqual(score["sizes"]["bits_packed"], 2)
        self.assertLess(score["kl"], rows["dropped/engine"]["score"]["kl"])

    def test_choose(self):
        """The mix buys what takes away the most KL for a bit, within the budget; a jump over a
        level that is no help is made."""
        bits = {"two": 2.0, "three": 3.0, "four": 4.0}
        sensitive = [{"two": 1.0, "three": 0.1, "four": 0.0},
                     {"two": 0.2, "three": 0.19, "four": 0},
                     {"two": 5.0, "three": 5.0, "four": 0.0}]
        for budget, want in ((2.0, "two two two"), (2.4, "three two two"), (2.7, "two two four"),
                             (3.0, "three two four"), (4.0, "four four four")):
            self.assertEqual(" ".join(allocate.choose(sensitive, bits, budget)), want, budget)
        with self.assertRaisesRegex(ValueError, "less than two takes"):
            allocate.choose(sensitive, bits, 1.5)
        alike = {"two": 2.0, "other": 2.0}
        self.assertEqual(allocate.choose([{"two": 1.0, "other": 0.5}], alike, 2.0), ["other"])
        self.assertEqual(allocate.section("mix", "a", ["b", "b", "a", "c", "a", "b"]),
                         "[format mix]\nbase = a\nlayers = 0-1:b\nlayers = 3-3:c\n"
                         "layers = 5-5:b\n")

    def test_a_layer_is_not_judged_by_one_token(self):
        """A token that a cache lost by chance says nothing of the layer that was lowered."""
        rng = np.random.default_rng(4)
        top = [rng.exponential(0.001, 512) for _ in range(2)]
        felt = [kl + 0.0005 for kl in top]
        top[0][384] += 4.5
        added = allocate.without_tail(felt) - allocate.without_tail(top)
        self.assertAlmostEqual(added, 0.0005, delta=0.00005)

    def test_other_orders(self):
        """Controls have the mix's levels: turned round, the most bits first, and last."""
        bits = {"two": 2.0, "three": 3.0, "four": 4.0}
        sensitive = [{"two": x, "three": x / 9, "four": 0.0} for x in (0.2, 3.0, 0.1, 2.0, 1.0)]
        made = allocate.other_orders(["two", "four", "two", "four", "three"], sensitive, bits)
        self.assertEqual({name: " ".join(levels) for name, levels in made.items()}, {
            "reversed": "four two four two three", "first": "four four three two two",
            "last": "two two three four four"})

    def test_allocate(self):
        """The mix has a row, with the bits that were asked for and a KL between its levels', and a
        section that kvqd takes. It was chosen on other text, whatever the order of the levels."""
        made = self.command("mixed", "--formats", "", "--windows", "1", "--allocate", "3.8,4.5,4.5",
                            "--levels", "oscar4,oscar2", "--together", "12",
                            "--allocate-controls")
        rows = self.rows(made)
        mix, low, high = (rows[name] for name in ("mix-3.8/exact", "oscar2/exact", "oscar4/exact"))
        self.assertEqual(sorted(mix["levels"]), ["oscar2", "oscar2", "oscar4"])
        self.assertAlmostEqual(mix["score"]["sizes"]["bits_packed"], (2 * 3.125 + 5.125) / 3)
        self.assertLess(high["score"]["kl"], mix["score"]["kl"])
        self.assertLess(mix["score"]["kl"], low["score"]["kl"])
        chosen = made["allocation"]
        worst = max(range(3), key=lambda i: chosen["sensitivity"][i]["oscar2"])
        self.assertEqual(mix["levels"][worst], "oscar4")
        self.assertEqual((chosen["skip"], chosen["windows"], chosen["same_text"]),
                         (CONTEXT, 1, False))
        self.assertEqual(sorted(rows["mix-4.5/exact"]["levels"]), ["oscar2", "oscar4", "oscar4"])
        for name in ("reversed", "first", "last"):
            other = rows[f"mix-3.8-{name}/exact"]
            self.assertEqual(sorted(other["levels"]), sorted(mix["levels"]))
            self.assertEqual(other["score"]["sizes"]["bits_packed"],
                             mix["score"]["sizes"]["bits_packed"])
        page = self.read("mixed", "report.md")
        self.assertIn("| layer | `oscar2` adds | `mix-3.8` | `mix-3.8-reversed` |", page)
        self.assertIn("on other text than is measured above", page)
        done = subprocess.run(
            [os.path.join(e2e_rig.BIN, "kvqd"), "--print-config", "--config",
             self.path("mixed", "format.conf")], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("mix-3.8", done.stdout)
        self.assertIn("mix-4.5", done.stdout)

    def test_allocate_on_the_same_text(self):
        """Is done if it is asked for, and the page says so."""
        made = self.command("same", "--formats", "", "--windows", "1", "--allocate", "3.8",
                            "--levels", "oscar2,oscar4", "--together", "12", "--allocate-skip",
                            str(CONTEXT - 1))
        self.assertEqual(made["allocation"]["same_text"], True)
        self.assertIn("on text that they are measured on above", self.read("same", "report.md"))

    def test_allocate_refuses_before_it_measures(self):
        for words, arguments in (
                ("1 bits are less than oscar2 takes, 3.125", ("--allocate", "4,1")),
                ("oscar9", ("--allocate", "4", "--levels", "oscar9,oscar4"))):
            self.command("poor", "--formats", "", "--windows", "1", *arguments, status=1)
            self.assertIn(words, self.said)
            self.assertNotIn("window", self.said)

    def test_progress(self):
        """How much is done; what failed in the first window is not to come."""
        for formats, n, status in ("oscar4,oscar2", 2, 0), ("vecinfer-2,oscar2", 3, 1):
            self.command(f"progress-{n}", "--formats", formats, "--windows", str(n), "--together",
                         "1", status=status)
            self.assertEqual(re.findall(r"\((\d of \d) done, about \d+ more minutes?\)", self.said),
                             ["1 of 4", "2 of 4", "3 of 4"])

    def test_what_is_left(self):
        """A line of progress says how long the rest takes, if it takes as long as what was done."""
        now = [1000.0]
        left = score.Left(12, lambda: now[0])
        with contextlib.redirect_stderr(io.StringIO()) as said:  # a long window is not silent
            for done in (0, 64, 128, 192):
                left.midst(done, 256, 4)
                now[0] += 15
        self.assertEqual(said.getvalue(),
                         "  128 of 256 tokens (0 of 12 done, about 3 more minutes)\n")
        left.gone(3)
        now[0] += 30
        self.assertEqual(left.told(), " (3 of 12 done, about 5 more minutes)")
        left.gone(7)
        self.assertEqual(left.told(), " (10 of 12 done, about 1 more minute)")
        left.lost(2)
        self.assertEqual(left.told(), "")

    def test_goes_on(self):
        """A run that was ended says the same in the end as one that was not."""
        arguments = "--formats", "oscar4,oscar2", "--windows", "3", "--together", "1"
        whole = self.command("whole", *arguments)
        with open(self.path("whole", "results.jsonl"), encoding="utf-8") as file:
            lines = file.readlines()
        self.assertEqual(len(lines), 3 * 3)
        os.mkdir(self.path("ended"))
        with open(self.path("ended", "results.jsonl"), "w", encoding="utf-8") as file:
            file.write("".join(lines[:4]) + lines[4][:len(lines[4]) // 2])
        again = self.command("ended", *arguments)
        self.assertIn("window 2", self.said)
        self.assertNotIn("window 1", self.said)
        for row in whole["rows"] + again["rows"]:
            del row["speed"]
        self.assertEqual(whole, again)
        for more, speeds in (((), 3), (("--threads", "2"), 0)):  # a speed is of so many threads
            made = self.command("ended", *arguments, *more)
            self.assertNotIn("window", self.said, "it was measured once more")
            headings = self.read("ended", "report.md").count("## Speed on this machine")
            self.assertEqual((sum("speed" in r for r in made["rows"]), headings), (speeds, 1))

    def test_lines_of_other_versions(self):
        """Are taken, and the page says whose they are."""
        self.command("older", "--formats", "oscar4,oscar2", "--windows", "1")
        with open(self.path("older", "results.jsonl"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        for line in lines:
            if line["side"] == "oscar4/exact":
                line["taken"]["kvq"] = "0.0.9"
        with open(self.path("older", "results.jsonl"), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        made = self.command("older", "--formats", "oscar4,oscar2", "--windows", "1")
        self.assertEqual([r["name"] for r in made["rows"] if "other_versions" in r], ["oscar4"])
        self.assertRegex(self.read("older", "report.md"),
                         r"other versions than these:\*\* `oscar4` \(exact\) by kvq 0\.0\.9, tran")

    def test_the_version_of_a_checkout(self):
        """Another build is another version, as in development."""
        with unittest.mock.patch("importlib.metadata.version", side_effect=ImportError):
            told = command.kvq_version(self.client)
            self.assertRegex(told, r"^\d+\.\d+\.\d+ from a checkout, library [0-9a-f]{8}$")
            with unittest.mock.patch.object(command, "_build", return_value="of another build"):
                self.assertNotEqual(command.kvq_version(self.client), told)
        with unittest.mock.patch("importlib.metadata.version", return_value="1.2"):
            self.assertEqual(command.kvq_version(self.client), "1.2")

    def test_other_settings_are_other_measurements(self):
        first = self.command("settings", "--formats", "oscar2", "--windows", "1")
        other = self.command("settings", "--formats", "oscar2", "--windows", "1", "--skip", "50")
        self.assertIn("window 1", self.said)
        self.assertNotEqual(*(self.rows(x)["oscar2/exact"]["score"]["kl"] for x in (first, other)))

    def test_what_fails_is_told(self):
        """A format that cannot be measured has a row that says why; the others have numbers."""
        rows = self.rows(self.command("failing", "--formats", "oscar9,vecinfer-2,oscar4",
                                      "--windows", "1", status=1))
        self.assertIn("oscar9", rows["oscar9/exact"]["failed"])
        self.assertIn("codebook", rows["vecinfer-2/exact"]["failed"])
        self.assertIn("score", rows["oscar4/exact"])
        page = self.read("failing", "report.md")
        self.assertIn("## Not measured", page)
        self.assertRegex(page, r"\| `oscar9` \| exact \| .*oscar9")

    def test_a_model_that_fails_itself(self):
        """No cache is blamed for logits that are not finite before any cache had a part in them."""
        class Broken:
            key = "reference"

            def forward(self, piece):
                return torch.full((len(piece), 9), math.nan)
        failures = score.Failures()
        with self.assertRaisesRegex(Failed, "own logits are not finite .*tokens 4 to 8"):
            score.step_of(Broken(), [], torch.arange(12), 4, 4, failures, {})
        self.assertEqual(failures.why, {})

    def test_the_page(self):
        """Every table has as many cells in each line; exact and fast are told apart; speeds have a
        section of their own."""
        self.command("page", "--formats", "oscar4,oscar2/fast", "--windows", "1")
        text, speeds = self.read("page", "report.md").split("## Speed")
        for part in (text, speeds):
            table = [line for line in part.split("\n") if line.startswith("|")]
            self.assertEqual(len(table), 5)
            self.assertEqual(len({line.count("|") for line in table}), 1)
        self.assertNotIn("a second |", text)
        self.assertIn("| `oscar2` | fast |", text)
        self.assertIn("lower bounds", text)

    def test_bad_arguments(self):
        for words, arguments in (
                ("no format", ("--formats", "oscar4/quick")),
                ("there twice", ("--formats", "oscar4,oscar4/exact")),
                ("there twice", ("--controls", "dropped,dropped")),
                ("tokens, as in", ("--distances", "64,far")),
                ("an option of kvqd", ("--daemon", "codebook_dir")),
                ("--allocate many: bits a packed value", ("--allocate", "many")),
                ("--allocate 3,nan: bits a packed value", ("--allocate", "3,nan")),
                ("at least two --levels", ("--allocate", "3", "--levels", "oscar2")),
                ("no control; known are dropped", ("--controls", "lost")),
                ("no peer; known are quanto2, quanto4", ("--peers", "quanto3")),
                ("no such file", ("--text", "/nowhere/at.all")),
                ("less than --context", ("--step", str(CONTEXT))),
                ("whole number from 1", ("--windows", "0")),
                ("whole number from 1", ("--threads", "many"))):
            self.command("bad", *arguments, status=2)
            self.assertIn(words, self.said)
        for words, arguments, model in (
                ("fewer --windows", ("--windows", "999"), None),
                ("no such file", (), self.path("none.gguf")),
                ("no such folder", (), self.path("none")),
                ("cannot be loaded", (), self.path())):
            self.command("bad", *arguments, status=1, model=model)
            self.assertIn(words, self.said)

    def test_models_that_are_not_served(self):
        """Are refused with the sentence of kvq.transformers."""
        config = transformers.LlamaConfig(
            hidden_size=320, num_attention_heads=1, num_key_value_heads=1, head_dim=320,
            intermediate_size=64, num_hidden_layers=1, vocab_size=256)
        transformers.LlamaForCausalLM(config).save_pretrained(self.path("large"))
        alphabet(self.path("large"))
        self.command("large-out", status=1, model=self.path("large"))
        self.assertIn("320 dimensions; up to 256 are served", self.said)

    def test_weights_are_there_once(self):
        """Both models are over the same parameters."""
        for one, other in zip(self.both.reference.parameters(), self.both.over_kvq.parameters()):
            self.assertEqual(one.data_ptr(), other.data_ptr())
        self.assertEqual(self.both.reference.config._attn_implementation, "eager")
        self.assertEqual(self.both.over_kvq.config._attn_implementation, "kvq")

    def test_windows_count_what_is_seen(self):
        """Bits a value are of the numbers that attention can see: layers with a sliding window
        have no more than that."""
        both = Models(models("gemma2")[0], self.tokenizer, "gemma2")
        full, slid = sum(not w for w in both.table.windows), sum(map(bool, both.table.windows))
        self.assertTrue(full and slid)
        self.assertEqual(both.values_at(1000), 2 * 2 * 64 * (1000 * full + 16 * slid))
        self.assertEqual(both.values_at(10), 2 * 2 * 64 * 10 * (full + slid))

    def test_the_reference_holds_what_is_seen(self):
        """Layers with a sliding window keep no more than that, and the logits are the model's."""
        both = Models(models("gemma2")[0], self.tokenizer, "gemma2")
        ids = torch.arange(120) % 50 + 10
        side = Side(both)
        side.begin()
        made = torch.cat([side.forward(some) for some in ids.split(40)])
        torch.testing.assert_close(made, both.reference(ids[None]).logits[0], rtol=1e-4, atol=1e-4)
        self.assertGreater(side.sizes()["bits"], 31)  # a window's newest token is not kept
        self.assertLessEqual(side.sizes()["bits"], 32)

    def test_beginning(self):
        """<bos> stands before each window where the tokenizer puts it before a text."""
        text = "some words of a text that has enough of them"
        plain = texts.windows(self.tokenizer, text, 2, 16)
        self.assertEqual(plain[0] + plain[1], self.tokenizer(text)["input_ids"][:32])
        made = unittest.mock.Mock(bos_token_id=1, bos_token="<s>")
        made.side_effect = lambda t, add_special_tokens=True, **_: {
            "input_ids": [1] * add_special_tokens + [ord(c) for c in t]}
        with_bos = texts.windows(made, text, 2, 16, skip=3)
        self.assertEqual([w[0] for w in with_bos], [1, 1])
        self.assertEqual("".join(map(chr, with_bos[0][1:] + with_bos[1][1:])), text[3:33])
        self.assertEqual(report.beginning(texts.told_beginning(made)),
                         ", each window behind `<s>`")
        made.side_effect = lambda t: {"input_ids": [ord(c) for c in t]}
        self.assertRegex(report.beginning(texts.told_beginning(made)),
                         "^, no window behind `<s>`")
        made.bos_token_id = None
        self.assertEqual(report.beginning(texts.told_beginning(made)), "")


class Hints(unittest.TestCase):
    def test_everything_public_has_hints(self):
        self.assertEqual(faults(kvq.eval), [])


SUITES = [Statistics, Kept, Command, Fetched, BenchEngines, Hints]

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(e2e_rig.run(SUITES, __doc__))
