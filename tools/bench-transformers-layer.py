#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times kvq's Python under transformers: what a layer's update() and attention take beyond the
library's calls, while a model with random weights decodes a token at a time.

    tools/bench-transformers-layer.py --layers 12 --hidden 512 --heads 8 --kv-heads 2 --tokens 900

Microseconds a layer, as medians over the tokens: the forward, kvq's part of it, the library's part
of that, and the difference, with the clock's own reads in it. Weights are read between two layers,
and take the processor's caches from Python: the larger the model, the more a layer's Python costs.
Attention must run in the process; the machine should have nothing else to do.
"""
import argparse
import statistics
import time

import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import kvq.transformers
from kvq._ffi import lib
from kvq.transformers import cache as kvq_cache
from kvq.transformers.attention import kvq_attention

PIECE = 512  # tokens of the prompt at a time
CALLS = "kvq_local_begin", "kvq_local_attend", "kvq_local_end"  # of in-context mode, in a step


class Clock:
    """Seconds by name."""

    def __init__(self):
        self.spent = {}

    def around(self, name, function):
        """The function, with its time added to that name's."""
        def timed(*arguments, **options):
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.spent[name] = self.spent.get(name, 0) + time.perf_counter() - began
        return timed


def watch():
    """The clock of all that kvq does in a layer."""
    clock = Clock()
    for name in CALLS:
        setattr(lib, name, clock.around("library", getattr(lib, name)))
    kvq_cache.KvqCache.update = clock.around("kvq", kvq_cache.KvqCache.update)
    AttentionInterface.register("kvq", clock.around("kvq", kvq_attention))
    return clock


def make_model(given):
    """Random weights in bfloat16."""
    config = LlamaConfig(
        hidden_size=given.hidden, intermediate_size=2 * given.hidden, vocab_size=1000,
        num_hidden_layers=given.layers, num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads, head_dim=given.dim, attn_implementation="kvq",
        max_position_embeddings=given.tokens + 1024)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def arguments():
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 16), ("hidden", 128), ("heads", 2), ("kv-heads", 1),
                        ("dim", 64), ("tokens", 900), ("steps", 60)):
        parser.add_argument("--" + name, type=int, default=value, metavar="N",
                            help="(%(default)s)")
    parser.add_argument("--format", default="kvq2", help="(%(default)s)")
    return parser.parse_args()


def main():
    """Prints a line."""
    given = arguments()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, clock, measured = make_model(given), watch(), []
    one = torch.tensor([[5]])
    with kvq.transformers.KvqCache(model, given.format, attention="fast") as cache:
        named = {kvq.transformers.cache_name(model): cache}
        while cache.get_seq_length() < given.tokens:
            left = min(PIECE, given.tokens - cache.get_seq_length())
            model(torch.randint(0, 1000, (1, left)), **named)
        model(one, **named)
        if cache.why:
            raise SystemExit(f"attention is not in this process: {cache.why}")
        for _ in range(given.steps):
            clock.spent.clear()
            began = time.perf_counter()
            model(one, **named)
            whole = time.perf_counter() - began
            own, library = clock.spent["kvq"], clock.spent["library"]
            measured.append((whole, own, library, own - library))
    print("us a layer: forward {:.0f}, kvq {:.1f}, the library {:.1f}, Python {:.1f}".format(
        *(1e6 * statistics.median(column) / given.layers for column in zip(*measured))))


if __name__ == "__main__":
    main()
