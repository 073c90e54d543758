#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes golden.json: logits of the shipped weights that another implementation must reproduce.

All is computed in fp32 from the bf16 weights.  The file holds the token ids of a prompt, the
largest logits after some of its tokens, the greedy continuation, and the mean negative
log-likelihood of the first window of the held-out text.
"""
import argparse
import json
import os

import torch

import model

PROMPT = b"Transactions are groups of statements that succeed or fail as a "
POSITIONS = (0, 1, 7, 31, 64)  # index into ids, so 0 is the logits after BOS
TOP, CONTINUATION, WINDOW = 16, 32, 4095


def top_logits(logits):
    values, ids = logits.topk(TOP)
    return {"ids": ids.tolist(), "logits": [round(v, 5) for v in values.tolist()]}


def greedy(weights, ids, count):
    cache, step, out = [], torch.tensor([ids]), []
    for _ in range(count):
        step = model.forward(weights, step, cache)[:, -1].argmax(-1, keepdim=True)
        out.append(step.item())
    return out


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=os.path.join(here, "kvq-bytes"))
    parser.add_argument("--text", default=os.path.join(here, "heldout.txt"))
    parser.add_argument("--out", default=os.path.join(here, "golden.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    weights = model.load(args.model)
    ids = [model.BOS, *PROMPT]
    logits = model.forward(weights, torch.tensor([ids]))[0]
    with open(args.text, "rb") as f:
        text = torch.tensor(list(f.read(WINDOW)))
    window = torch.cat((torch.tensor([model.BOS]), text[:-1]))[None]
    loss = torch.nn.functional.cross_entropy(model.forward(weights, window)[0], text)
    golden = {
        "prompt": PROMPT.decode(),
        "ids": ids,
        "positions": {str(p): top_logits(logits[p]) for p in POSITIONS},
        "greedy": greedy(weights, ids, CONTINUATION),
        "heldout": {"bytes": WINDOW, "nats_per_byte": round(loss.item(), 6)},
    }
    with open(args.out, "w", encoding="ascii") as f:
        json.dump(golden, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
