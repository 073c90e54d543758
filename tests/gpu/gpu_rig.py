#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tools/gpu-check.sh measures with, over the emulator: the rig's caches, attention over them
by its launches, packing; and every measuring part with its report. Whole decode steps, and what is
compared with FlashInfer, only where there is PyTorch.

    gpu_rig.py LIBRARY      exit status 77: no NumPy
"""
import json
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools" / "gpu"))
try:
    import numpy
except ImportError:
    print("no NumPy; skipped")
    sys.exit(77)
import check as parts  # noqa: E402
import flash_infer  # noqa: E402
import lab as labs  # noqa: E402
import report  # noqa: E402
import rig as rigs  # noqa: E402

LIMIT = 2e-3
FAILED = []


def check(good, what):
    if not good:
        print(f"FAILED: {what}")
        FAILED.append(what)


class Tensor:
    """Device memory with a NumPy array's numbers."""

    def __init__(self, rig, array):
        self.rig, self.shape, self.dtype = rig, array.shape, array.dtype
        self.at = rig.take(array.nbytes)
        rig.copy_in(self.at, numpy.ascontiguousarray(array))

    def back(self):
        return self.rig.copy_out(numpy.empty(self.shape, self.dtype), self.at)

    def free(self):
        self.rig.give(self.at)


def attend(q, k, v, first):
    """Double precision: q [tokens][heads][dim] from position `first` on, k, v [head][..][dim]."""
    out = numpy.empty(q.shape)
    group = q.shape[1] // k.shape[0]
    for t in range(q.shape[0]):
        seen = first + t + 1
        for h in range(q.shape[1]):
            logits = k[h // group, :seen] @ q[t, h] / numpy.sqrt(q.shape[2])
            p = numpy.exp(logits - logits.max())
            out[t, h] = p @ v[h // group, :seen] / p.sum()
    return out


def check_format(rig, name, tokens, q_tokens=1, fresh=0, head_dim=64, q_heads=4, kv_heads=2):
    random = numpy.random.default_rng(1)
    sessions = len(tokens)
    what = f"{name}, {tokens} tokens, {q_tokens} queries, {fresh} fresh"
    with rigs.Cache(rig, name, tokens, layers=2, q_heads=q_heads, kv_heads=kv_heads,
                    head_dim=head_dim, dtype=rigs.F16) as cache:
        q = random.standard_normal((sessions, q_tokens, q_heads, head_dim)).astype(numpy.float32)
        new = random.standard_normal((2, sessions, fresh, kv_heads, head_dim))
        new = new.astype(numpy.float16).astype(numpy.float32)
        tensors = [Tensor(rig, x) for x in (q, numpy.full_like(q, numpy.nan), new[0], new[1])]
        for layer in range(2):
            cache.bind(layer, tensors[0].at, tensors[1].at, q_tokens, rigs.F32,
                       fresh=(tensors[2].at, tensors[3].at, fresh))
            cache.attend(layer, blocks=7)
            got = tensors[1].back()
            for s, n in enumerate(tokens):
                empty = numpy.full((kv_heads, n, head_dim), numpy.nan, numpy.float32)
                rows = [Tensor(rig, empty), Tensor(rig, empty)]
                cache.read(layer, s, rows[0].at, rows[1].at)
                k, v = (numpy.concatenate([x.back(), new[i, s].swapaxes(0, 1)], axis=1)
                        .astype(numpy.float64) for i, x in enumerate(rows))
                want = attend(q[s].astype(numpy.float64), k, v, n + fresh - q_tokens)
                error = numpy.linalg.norm(got[s] - want) / numpy.linalg.norm(want)
                check(error <= LIMIT, f"{what}, layer {layer}, session {s}: {error:.2e} off")
                check(numpy.abs(k).max() > 1, f"{what}: a cache of small numbers")
                for x in rows:
                    x.free()
        if fresh:
            cache.store()
        for x in tensors:
            x.free()


def check_bytes(rig):
    with rigs.Cache(rig, "oscar2", [256, 200], q_heads=4, kv_heads=1, head_dim=128) as cache:
        # 98 bytes for each of 128 packed tokens (with the newest 128 of the other session raw)
        packed = 256 // 128 * 128 + 200 // 128 * 128
        check(cache.bytes() == packed * 98 + (456 - packed) * 512, f"{cache.bytes()} bytes")
        check(abs(cache.bits() - 3.0625) < 1e-9, f"{cache.bits()} bits")
        check(cache.pack() == 2 * 128 * 512, "raw bytes of what is packed")


def check_errors(rig):
    for wrong in ({"form": "oscar7"}, {"form": "oscar2", "head_dim": 65}):
        try:
            rigs.Cache(rig, tokens=[128], **wrong)
            check(False, f"{wrong} is taken")
        except rigs.RigError as error:
            check(str(error), "an error without words")


def torch_lab():
    """None without PyTorch."""
    try:
        return labs.TorchEmulator(sys.argv[1])
    except ImportError:
        print("no PyTorch: whole steps and FlashInfer's pages are not tried")
        return None


def check_parts(lab, with_torch):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check(report.write(folder) == 1, "a report of nothing")
        for part, measure in parts.PARTS.items():
            needs_torch = part.startswith(("steps", "batches"))
            of = with_torch if needs_torch and with_torch else lab
            rows = parts.Rows(part, of, folder / f"{part}.json")
            measure(of, rows)
            check(rows() or (needs_torch and not with_torch), f"{part}: no rows")
            rows.save(complete=part != "packing")
            for text in report.complaints(rows.result):
                check(False, f"{part}: {text}")
        check_resumed(lab, folder / "points-48.json")
        check(report.write(folder) == 0, "the report")
        text = (folder / "gpu-check.md").read_text()
        check("Without a GPU" in text and "| 2 x 300 | oscar2 |" in text, "the report's text")
        check("| 1 x 200, oscar4, classic |" in text, "the ablation's text")
        check(text.count("Stopped before its end") == 1, "a part that was stopped")
        if with_torch:
            check("| 2 x 140, SDPA flash |" in text, "the text of whole steps")
    row = {"us": 2.0, "bytes": 4000, "vs_16_bits": 1.0}
    text = report.attention_table({"p": {"kvq bf16": row, "x": None}}, 4.0)
    check("| p | a perfect reader of fp8 (computed) | 0.5 | 4 | 100% | 4.00 |" in text, text)
    check("| p | kvq bf16 | 2.0 | 2 | 50% | 1.00 |" in text, text)
    bad = {"part": "x", "rows": {"a": {"b": {"wrong": "error"}}, "1": {"same_bits": False}}}
    check(len(report.complaints(bad)) == 2, "complaints")


def check_resumed(lab, path):
    """Rows that stand in the file are not measured again, unless another device made them."""
    rows = parts.Rows("points-48", lab, path)
    point = list(rows())[0]
    before = json.dumps(rows(point, "oscar2"))
    check(json.dumps(rows.measure([point, "oscar2"], lambda: {})) == before, "measured again")
    check(rows.measure([point, "new"], lambda: {"us": 3.0}) == {"us": 3.0}, "a new row")
    stopped = json.loads(path.read_text())
    check(stopped["rows"][point]["new"] == {"us": 3.0}, "a row is in the file at once")
    check(not stopped["complete"], "a part that is not at its end")
    del rows(point)["new"]
    rows.save(complete=True)
    other = types.SimpleNamespace(name="another GPU", timed=True)
    check(parts.Rows("points-48", other, path)() == {}, "rows of another device")


# ---- FlashInfer ----

class PlainPages:
    """What FlashInfer's wrapper of this name does with the pages it is told of, in plain words."""

    def __init__(self, workspace, layout, use_tensor_cores):
        check(workspace.numel() > 1 << 20 and layout == "NHD" and use_tensor_cores, "its wrapper")

    def plan(self, starts, pages, last, q_heads, kv_heads, dim, size, **types_of):
        self.starts, self.pages, self.last = starts.tolist(), pages.tolist(), last.tolist()
        self.shape = (2, size, kv_heads, dim)
        self.q_shape = (len(self.last), q_heads, dim)
        check(types_of["pos_encoding_mode"] == "NONE", "its positions")

    def run(self, q, cache):
        check(tuple(cache.shape[1:]) == self.shape and tuple(q.shape) == self.q_shape, "shapes")
        out = q.clone()
        for s, last in enumerate(self.last):
            own = cache[self.pages[self.starts[s]:self.starts[s + 1]]].double().numpy()
            tokens = (len(own) - 1) * self.shape[1] + last
            k, v = (own[:, i].reshape(-1, *self.shape[2:])[:tokens].swapaxes(0, 1)
                    for i in range(2))
            got = attend(q[s:s + 1].double().numpy(), k, v, tokens - 1)
            out[s] = out.new_tensor(got[0])
        return out


def check_flash_infer(lab):
    check(flash_infer.ways(lab, lambda *_: 2) == {}, "ways without FlashInfer")
    sys.modules["flashinfer"] = types.SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=PlainPages)
    try:
        ways = flash_infer.ways(lab, lambda *_: 2)
        point = {"tokens": [33, 48, 7], "q_heads": 4, "kv_heads": 2, "head_dim": 64}
        for name, bits in (("FlashInfer bf16", 16), ("FlashInfer fp8", 8)):
            row = ways[name](point)
            check("refused" not in row, f"{name}: {row}")
            check(row.get("off", 1) < 1e-5 and row.get("bits") == bits, f"{name}: {row}")
            check(row.get("bytes") == 88 * 2 * 2 * 64 * bits // 8, f"{name}: {row}")
        refused = ways["FlashInfer fp8"]({**point, "tokens": []})
        check("Error" in refused.get("refused", ""), f"its errors are noted: {refused}")
    finally:
        del sys.modules["flashinfer"]


def main():
    rig = rigs.Rig(sys.argv[1])
    for name in ("f16", "bf16", "oscar2", "oscar4", "innerq-base", "vecinfer-2", "ott2", "kvq2"):
        check_format(rig, name, [300, 130])
    check_format(rig, "oscar2", [256], q_tokens=3, head_dim=128, q_heads=8)
    check_format(rig, "oscar2", [160, 256], q_tokens=2, fresh=2)
    check_format(rig, "kivi-sink2", [256])
    check_bytes(rig)
    check_errors(rig)
    rig.close()
    with_torch = torch_lab()
    check_parts(labs.Emulator(sys.argv[1]), with_torch)
    if with_torch:
        check_flash_infer(with_torch)
    print(f"{len(FAILED)} failed")
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
