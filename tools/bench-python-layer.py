#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the Python package in attention of the engine's own context: what LocalStep.attend takes
beyond the library's call, for a session whose layers are given a token at a time.

    tools/bench-python-layer.py --arrays torch --heads 32 --kv-heads 8

Microseconds a layer, as medians over the steps, with the clock's own reads in Python's part.
"""
import argparse
import statistics
import time

import numpy as np


def arguments():
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrays", choices=("torch", "numpy"), default="torch",
                        help="K, V, Q and the output, in a buffer (%(default)s)")
    parser.add_argument("--copied", action="store_true",
                        help="Q lies in no buffer, and the output is a new array")
    for name, value in (("layers", 16), ("heads", 32), ("kv-heads", 8), ("dim", 128),
                        ("sessions", 1), ("tokens", 64), ("steps", 60)):
        parser.add_argument("--" + name, type=int, default=value, metavar="N",
                            help="(%(default)s)")
    return parser.parse_args()


class Layers:
    """Arrays of one token of each session for all layers, in bfloat16."""

    def __init__(self, client, given):
        self.given = given
        rows, dims = given.sessions, (given.kv_heads, given.heads)
        size = 2 * rows * given.dim * 2 * (given.layers * dims[0] + dims[1])
        self.buffer, self.used = client.buffer(size), 0
        self.kv = [[self.take(dims[0]) for _ in "kv"] for _ in range(given.layers)]
        self.q, out = self.take(dims[1]), self.take(dims[1])
        self.options = {"out": out}
        if given.copied:
            self.q, self.options = self.q.copy() if given.arrays == "numpy" else self.q.clone(), {}

    def take(self, heads):
        """One of random values."""
        shape, at = (self.given.sessions, heads, self.given.dim), self.used
        values = np.random.default_rng(1).standard_normal(shape, np.float32)
        made = self.buffer.array(shape, "bf16", at)
        made[...] = values.view(np.uint32) >> 16
        self.used += made.nbytes
        return made if self.given.arrays == "numpy" else self.buffer.torch(shape, "bf16", at)


def main():
    """Prints a line."""
    given, spent = arguments(), []
    import kvq  # behind --help, which needs no library
    from kvq._ffi import lib
    with kvq.Client() as client, client.queue() as queue, \
            queue.local(require=True) as local:
        rows = [kvq.Layer(given.heads, given.kv_heads, given.dim, repeat=given.layers)]
        sessions = [client.session(rows, "bf16", attention="fast") for _ in range(given.sessions)]
        for session in sessions:
            local.add(session)
        layers, attend = Layers(client, given), lib.kvq_local_attend

        def timed(*of):
            began = time.perf_counter()
            code = attend(*of)
            spent.append(time.perf_counter() - began)
            return code

        def step():
            spent.clear()
            with local.step(sessions, 1) as under_way:
                began = time.perf_counter()
                for layer, (k, v) in enumerate(layers.kv):
                    under_way.attend(layer, layers.q, k=k, v=v, **layers.options)
                return time.perf_counter() - began, sum(spent)
        lib.kvq_local_attend = timed
        for _ in range(given.tokens):
            step()
        measured = [step() for _ in range(given.steps)]
    whole, library = ([1e6 * part / given.layers for part in column] for column in zip(*measured))
    own = [a - b for a, b in zip(whole, library)]
    print(f"us a layer: the library {statistics.median(library):.1f}, Python "
          f"{statistics.median(own):.1f}, the least {min(own):.1f}")


if __name__ == "__main__":
    main()
