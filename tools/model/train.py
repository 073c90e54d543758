#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the byte-level model on a CPU by a given wall-clock time.

The learning rate and the sequence length follow the share of the time that has passed, so the run
ends on time whatever else the machine does.  A run that was stopped goes on from its checkpoint.
Every core has a process of its own with a share of the batch; they meet once a step, to add up the
gradients, which bears other jobs on the machine better than threads that meet at every operation.
Matrices are trained by Muon, embeddings and norms by AdamW, on fp32 masters of bf16 weights.
"""
import argparse
import json
import math
import os
import random
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import model
import recall

STEP_TOKENS, LONG = 8192, 4096

# until this share of the time: sequence length, the share of steps that are LONG all the same, the
# share of sequences with facts and with repeats, and bytes for each fact
PHASES = (
    (0.12, 512, 0.08, 0.30, 0.12, 200),
    (0.40, 512, 0.08, 0.50, 0.20, 100),
    (0.62, 1024, 0.20, 0.50, 0.20, 100),
    (1.01, LONG, 1.0, 0.45, 0.45, 150),
)
MOST_FACTS = 24
MUON_LR, MUON_DECAY = 0.012, 0.02
ADAM_LR = {"embed": 3e-3, "norm": 3e-3}
MOMENTUM, BETAS = 0.95, (0.9, 0.98)


@torch.compile(dynamic=False)
def compiled_qkv(*args):
    return model.qkv(*args)


@torch.compile(dynamic=False)
def compiled_mlp(*args):
    return model.mlp(*args)


@torch.compile(dynamic=False)
def compiled_loss(x, ln, embed, targets, loss_weights):
    losses = F.cross_entropy(model.head(x, ln, embed).flatten(0, 1), targets, reduction="none")
    return (losses * loss_weights).sum() / loss_weights.sum(), losses


def training_loss(weights, tables, ids, targets, loss_weights):
    cos, sin = (t[: ids.shape[1]] for t in tables)
    x = F.embedding(ids, weights["model.embed_tokens.weight"]).float()
    for i in range(model.CONFIG["num_hidden_layers"]):
        first, rest = model.layer_weights(weights, i)
        q, k, v = compiled_qkv(x, *first, cos, sin)
        x = compiled_mlp(x, model.block_attend(q, k, v), *rest)
    last = weights["model.norm.weight"], weights["model.embed_tokens.weight"]
    return compiled_loss(x, *last, targets.flatten(), loss_weights.flatten())


def orthogonalize(g):
    """Newton-Schulz iteration of Muon (Jordan et al. 2024), in bf16."""
    x = g.bfloat16()
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x if wide else x.T).float()


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the rest; plain dictionaries of state."""

    def __init__(self, masters):
        self.first = {n: torch.zeros_like(w) for n, w in masters.items()}
        self.second = {n: torch.zeros_like(w) for n, w in masters.items() if not self.is_muon(n)}
        self.steps = 0

    @staticmethod
    def is_muon(name):
        return "_proj" in name

    def step(self, masters, grads, scale):
        self.steps += 1
        for name, w in masters.items():
            g, m = grads[name], self.first[name]
            if self.is_muon(name):
                m.lerp_(g, 1 - MOMENTUM)
                update = orthogonalize(g.lerp(m, MOMENTUM))
                w.mul_(1 - scale * MUON_LR * MUON_DECAY)
                w.sub_(update, alpha=scale * MUON_LR * max(1, w.shape[0] / w.shape[1]) ** 0.5)
                continue
            v = self.second[name]
            m.lerp_(g, 1 - BETAS[0])
            v.lerp_(g * g, 1 - BETAS[1])
            mean = m / (1 - BETAS[0] ** self.steps)
            root = (v / (1 - BETAS[1] ** self.steps)).sqrt().add_(1e-8)
            rate = ADAM_LR["embed" if "embed" in name else "norm"]
            w.sub_(mean / root, alpha=scale * rate)


class Data:
    """Sequences of BOS and text; some with facts, some with repeats."""

    def __init__(self, path, seed):
        with open(path, "rb") as f:
            self.text = f.read()
        self.rng = random.Random(seed)
        self.starts = {}

    def window(self, size):
        """Text at a start that no earlier window of this size had, until all of them were had."""
        left = self.starts.setdefault(size, [])
        if not left:
            shift = self.rng.randrange(size)
            left += range(shift, len(self.text) - 2 * size, size)
            self.rng.shuffle(left)
        start = left.pop()
        return self.text[start : start + size]

    def sequence(self, length, facts, repeats, spacing):
        text, kind = self.window(length), self.rng.random()
        if kind < facts:
            count = self.rng.randint(1, min(MOST_FACTS, 1 + length // spacing))
            return recall.with_facts(self.rng, text, length, count)
        if kind < facts + repeats:
            count = self.rng.randint(1, 1 + length // 800)
            return recall.with_repeats(self.rng, text, length, count)
        return text, [1.0] * length

    def batch(self, share, is_long, tokens):
        """One batch; is_long is a number in [0, 1) that is the same for all processes."""
        _, length, long_share, *mix = next(p for p in PHASES if share < p[0])
        if is_long < long_share:
            length = LONG
        rows = [self.sequence(length, *mix) for _ in range(tokens // length)]
        targets = torch.tensor([list(text) for text, _ in rows])
        ids = torch.cat((torch.full((len(rows), 1), model.BOS), targets[:, :-1]), 1)
        return ids, targets, torch.tensor([weights for _, weights in rows])


def rate_scale(share):
    """Linear warm-up over the first 1.5% of the time, flat, linear decay to 0 from 35% on."""
    return max(0.0, min(1.0, share / 0.015, (1 - share) / 0.65))


def checkpoint(path, masters, optimizer, state):
    torch.save({"masters": masters, "first": optimizer.first, "second": optimizer.second,
                "steps": optimizer.steps, "state": state}, path + ".new")
    os.replace(path + ".new", path)


def restore(path, masters, optimizer):
    saved = torch.load(path)
    for name in masters:
        masters[name].copy_(saved["masters"][name])
    optimizer.first, optimizer.second = saved["first"], saved["second"]
    optimizer.steps = saved["steps"]
    return saved["state"]


def averaged(grads):
    """The mean of the gradients of all processes, in fp32."""
    flat = torch.cat([g.flatten().float() for g in grads.values()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([g.numel() for g in grads.values()])
    return {n: part.view(g.shape) for (n, g), part in zip(grads.items(), parts)}


def one_step(masters, optimizer, tables, batch, scale):
    """Forward, backward and update; returns the loss over text and over remembered digits."""
    weights = {n: (w.bfloat16() if w.dim() > 1 else w.clone()).requires_grad_()
               for n, w in masters.items()}
    loss, each = training_loss(weights, tables, *batch)
    loss.backward()
    with torch.no_grad():
        grads = averaged({n: w.grad for n, w in weights.items()})
        total = math.sqrt(sum(g.pow(2).sum().item() for g in grads.values()))
        if not math.isfinite(total):
            raise SystemExit("the gradient is not finite; start again from the last checkpoint")
        for name, g in grads.items():
            if not optimizer.is_muon(name):
                g.mul_(min(1.0, 1.0 / (total + 1e-6)))
        optimizer.step(masters, grads, scale)
        kind = batch[2].flatten()
        text, digits = each[kind == 1.0], each[kind == 4.0]
    nan = float("nan")
    return (text.mean().item() / math.log(2), digits.mean().item() if len(digits) else nan)


class Progress:
    """One line for every 50 steps: moving means, speed, time left."""

    def __init__(self, path):
        self.path, self.text, self.digits, self.at, self.tokens = path, None, None, time.time(), 0

    def add(self, state, text, digits, tokens, share, left):
        self.text = text if self.text is None else 0.96 * self.text + 0.04 * text
        if digits == digits:
            self.digits = digits if self.digits is None else 0.9 * self.digits + 0.1 * digits
        self.tokens += tokens
        if state["step"] % 50:
            return
        now = time.time()
        line = {"step": state["step"], "tokens": state["tokens"], "share": round(share, 4),
                "bits_per_byte": round(self.text, 4), "nats_per_digit": round(self.digits or 0, 4),
                "tokens_per_s": round(self.tokens / (now - self.at)), "left_s": round(left)}
        print(json.dumps(line), flush=True)
        with open(self.path, "a", encoding="ascii") as f:
            f.write(json.dumps(line) + "\n")
        self.at, self.tokens = now, 0


def agree(*numbers):
    """The numbers of the first process, in all of them."""
    told = torch.tensor(numbers, dtype=torch.float64)
    dist.broadcast(told, 0)
    return told.tolist()


def run(args, rank, masters, optimizer, state):
    """The loop; state counts steps, tokens and seconds of training over all starts."""
    data = Data(args.text, f"{args.seed} {state['step']} {rank}")
    tables = model.rope(LONG)
    progress = Progress(os.path.join(args.out, "progress.jsonl"))
    path = os.path.join(args.out, "checkpoint.pt")
    begun, before = time.time(), state["seconds"]
    whole = before + args.until - begun
    saved = begun
    while True:
        share = (before + time.time() - begun) / whole
        share, is_long = agree(share, data.rng.random())
        if share >= 1:
            break
        batch = data.batch(share, is_long, STEP_TOKENS // args.processes)
        text, digits = one_step(masters, optimizer, tables, batch, rate_scale(share))
        state["step"] += 1
        state["tokens"] += STEP_TOKENS
        state["seconds"] = before + time.time() - begun
        if rank:
            continue
        progress.add(state, text, digits, STEP_TOKENS, share, args.until - time.time())
        if time.time() - saved > args.save_every:
            checkpoint(path, masters, optimizer, state)
            saved = time.time()
    if rank == 0:
        checkpoint(path, masters, optimizer, state)
        print(f"done: {state}", flush=True)


def work(rank, args):
    """One of the processes; all hold the same weights and make the same updates."""
    torch.set_num_threads(1)
    meeting = os.path.join(os.path.abspath(args.out), f"meeting-{os.getppid()}")
    dist.init_process_group("gloo", "file://" + meeting, rank=rank, world_size=args.processes)
    masters = model.init(args.seed)
    optimizer = Optimizer(masters)
    state = {"step": 0, "tokens": 0, "seconds": 0.0}
    path = os.path.join(args.out, "checkpoint.pt")
    if os.path.exists(path):
        state = restore(path, masters, optimizer)
    run(args, rank, masters, optimizer, state)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", required=True, help="train.txt of corpus.py")
    parser.add_argument("--out", required=True, help="folder for checkpoint and progress")
    parser.add_argument("--until", type=float, required=True, help="end, in seconds since 1970")
    parser.add_argument("--processes", type=int, default=2, help="1 or 2, one for each core")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=180, help="seconds")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    mp.spawn(work, (args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
