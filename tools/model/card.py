#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the shipped weights and writes the model card, README.md.

Every number of the card comes from here: from the bf16 weights (computed in fp32), from the
held-out text, and from training.json.  Takes some minutes on two cores.
"""
import argparse
import json
import lzma
import math
import os
import statistics

import torch
import torch.nn.functional as F

import model
import recall

HERE = os.path.dirname(os.path.abspath(__file__))
WINDOW = 4096
PROMPTS = (
    "A transaction is ",
    "The query planner ",
    "If the file does not exist, ",
)
SAMPLE_BYTES, TEMPERATURE = 500, 0.7


def encode(data):
    return torch.tensor([[model.BOS, *data]])


def losses(weights, data, keys=None):
    """Negative log-likelihood in nats of every byte of data, which follows a BOS."""
    ids = encode(data)
    logits = model.forward(weights, ids[:, :-1], keys=keys)[0]
    return F.cross_entropy(logits, ids[0, 1:], reduction="none"), logits.argmax(-1) == ids[0, 1:]


def windows(text):
    """Pieces of text that fill the context together with their BOS."""
    return [text[at : at + WINDOW - 1] for at in range(0, len(text), WINDOW - 1)]


def bits_per_byte(weights, text):
    """Over disjoint windows that each start with a BOS and nothing else."""
    nats = sum(losses(weights, w)[0].sum().item() for w in windows(text))
    return nats / (math.log(2) * len(text))


def xz_bits(path):
    with open(path, "rb") as f:
        data = f.read()
    packed = lzma.compress(data, format=lzma.FORMAT_XZ, preset=9)
    return data, len(packed), 8 * len(packed) / len(data)


def one_recall(weights, item):
    """Scores of an answer, with the whole prompt and blind: without the part that holds it."""
    prompt, answer = item["prompt"].encode(), item["answer"].encode()
    size = len(answer)
    after_source = len(prompt) - item["distance"] + size
    nats, right = (x[-size:] for x in losses(weights, prompt + answer))
    blind, blind_right = (x[-size:] for x in losses(weights, prompt[after_source:] + answer))
    bits = 1 / math.log(2)
    return {
        "exact": float(right.all()),
        "bytes": right.float().mean().item(),
        "bits": nats.mean().item() * bits,
        "blind_exact": float(blind_right.all()),
        "blind_bits": blind.mean().item() * bits,
    }


def recall_rows(weights, text, seed, count):
    table = {}
    for item in recall.evaluation(text, seed, count):
        table.setdefault((item["kind"], item["distance"]), []).append(one_recall(weights, item))
    return {where: {name: statistics.fmean(r[name] for r in rows) for name in rows[0]}
            for where, rows in table.items()}


def key_rows(weights, text, count):
    """Per layer: channel-outlier ratio of the rotated keys, and BOS norm against the median."""
    rows = []
    collected = []
    for piece in windows(text)[:count]:
        keys = []
        losses(weights, piece, keys)
        collected.append(keys)
    for layer in range(model.CONFIG["num_hidden_layers"]):
        k = torch.stack([keys[layer][0] for keys in collected])  # window, token, head, channel
        mean = k[:, 1:].abs().mean((0, 1))
        norms = k.norm(dim=-1)
        rows.append({
            "outlier": (mean.max() / mean.median()).item(),
            "bos": norms[:, 0].mean().item(),
            "median": norms[:, 1:].median().item(),
        })
    return rows


def sample(weights, prompt, seed):
    """SAMPLE_BYTES bytes after prompt, at TEMPERATURE, from the whole distribution."""
    gen = torch.Generator().manual_seed(seed)
    cache, step, out = [], encode(prompt.encode()), bytearray()
    while len(out) < SAMPLE_BYTES:
        p = torch.softmax(model.forward(weights, step, cache)[:, -1] / TEMPERATURE, -1)
        step = torch.multinomial(p, 1, generator=gen)
        if step.item() == model.BOS:
            break
        out.append(step.item())
    return prompt + out.decode("utf-8", "backslashreplace")


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def measure(args, weights):
    text, packed, xz = xz_bits(args.text)
    return {
        "bytes": len(text), "packed": packed, "xz": xz, "model": bits_per_byte(weights, text),
        "recall": recall_rows(weights, text, args.seed, args.count),
        "keys": key_rows(weights, text, 4),
        "samples": [sample(weights, p, i) for i, p in enumerate(PROMPTS)],
    }


def recall_tables(found):
    facts = [(d, f"{r['exact']:.2f}", f"{r['bytes']:.2f}", f"{r['blind_exact']:.2f}",
              f"{r['bits']:.2f}", f"{r['blind_bits']:.2f}")
             for (kind, d), r in found.items() if kind == "fact"]
    repeats = [(d, f"{r['exact']:.2f}", f"{r['bytes']:.2f}", f"{2 ** r['bits']:.2f}",
                f"{2 ** r['blind_bits']:.2f}")
               for (kind, d), r in found.items() if kind == "repeat"]
    first = table(("distance, bytes", "all 5 digits right", "digits right",
                   "all right, fact cut off", "bits per digit", "bits per digit, fact cut off"),
                  facts)
    second = table(("distance, bytes", "all 40 bytes right", "bytes right",
                    "perplexity per byte", "perplexity, first copy cut off"), repeats)
    return first, second


def render(args, found, training, parameters, size):
    with open(os.path.join(HERE, "card.in"), encoding="ascii") as f:
        template = f.read()
    facts, repeats = recall_tables(found["recall"])
    keys = [(i, f"{r['outlier']:.2f}", f"{r['bos']:.2f}", f"{r['median']:.2f}",
             f"{r['bos'] / r['median']:.3f}") for i, r in enumerate(found["keys"])]
    sources = [(s["package"], s["version"], s["licence"], f"{s['bytes']:,}")
               for s in training.get("sources", [])]
    values = {
        "PARAMETERS": f"{parameters:,}", "SIZE": f"{size:,}",
        "SOURCES": table(("Debian package", "version", "licence", "bytes of prose"), sources),
        "HELD": f"{found['bytes']:,}", "PACKED": f"{found['packed']:,}",
        "XZ": f"{found['xz']:.3f}", "MODEL": f"{found['model']:.3f}",
        "BELOW": f"{100 * (1 - found['model'] / found['xz']):.1f}",
        "STEPS": f"{training['step']:,}", "TOKENS": f"{training['tokens']:,}",
        "MINUTES": f"{training['seconds'] / 60:.0f}", "PROCESSOR": training["processor"],
        "TORCH": training["torch"], "COUNT": str(args.count), "SEED": str(args.seed),
        "FACTS": facts, "REPEATS": repeats,
        "KEYS": table(("layer", "channel-outlier ratio of K", "norm of BOS key",
                       "median key norm", "BOS / median"), keys),
        "TEMPERATURE": str(TEMPERATURE),
        "SAMPLES": "\n\n".join("```text\n" + s + "\n```" for s in found["samples"]),
    }
    for name, value in values.items():
        template = template.replace("@" + name + "@", value)
    return template


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=os.path.join(HERE, "kvq-bytes"))
    parser.add_argument("--text", default=os.path.join(HERE, "heldout.txt"))
    parser.add_argument("--training", default=os.path.join(HERE, "training.json"))
    parser.add_argument("--out", default=os.path.join(HERE, "README.md"))
    parser.add_argument("--count", type=int, default=16, help="recall items of a kind, a distance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weights = model.load(args.model)
    with open(args.training, encoding="ascii") as f:
        training = json.load(f)
    size = os.path.getsize(os.path.join(args.model, "model.safetensors"))
    parameters = sum(w.numel() for w in weights.values())
    text = render(args, measure(args, weights), training, parameters, size)
    with open(args.out, "w", encoding="utf-8") as f:
        f.write(text)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
