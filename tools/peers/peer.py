# SPDX-License-Identifier: Apache-2.0
"""What the workers of bench-peers.py share: rows, each many layers of one cache, whose attention is
timed layer after layer. Requests and answers are those of tools/engines/worker.py."""
import time

import data
import worker


class Row:
    """One engine's cache and attention over it."""
    bits = None     # of a value of K or V, with scales
    layout = None   # in words
    append = False  # whether a call also stores the newest token
    layers = 0

    def threads(self, number):
        """Attends on so many from now on."""
        raise NotImplementedError

    def walk(self):
        """Attends to every layer, one after the other."""
        raise NotImplementedError

    def out(self):
        """Of the first layer: an array of [q_heads][head_dim] in that order."""
        raise NotImplementedError

    def close(self):
        """Gives the cache back."""


class Peer(worker.Worker):
    """Rows over the same tokens. Subclasses have make(name, tokens): the Row of a name without its
    engine; `tokens` is a data.Data, and `walk` how many bytes a walk reads at least."""

    def __init__(self, threads):
        super().__init__(threads)
        self.shape, self.tokens, self.bytes = None, None, 0

    def make(self, name, tokens):
        raise NotImplementedError

    def open(self, name, shape, walk):
        """Fills a cache, attends once, and says what it is."""
        if shape != self.shape:
            self.shape, self.tokens = shape, data.Data(**shape)
        self.bytes = walk
        row = self.rows[name] = self.make(name.partition(":")[2], self.tokens)
        try:
            row.threads(self.threads)
            row.walk()
        except BaseException:
            self.close(name)
            raise
        return {"bits": row.bits, "layout": row.layout, "append": row.append,
                "layers": row.layers, "error": self.tokens.error(row.out()),
                "walk": int(row.layers * self.tokens.values * row.bits / 8)}

    def step(self, name, threads, seconds):
        """A turn: walks for so long. The first, which wakes threads and finds the processor's
        caches as others left them, is not timed."""
        row = self.rows[name]
        row.threads(threads)
        row.walk()
        walks, began = 0, time.perf_counter()
        while not walks or time.perf_counter() < began + seconds:
            row.walk()
            walks += 1
        return {"us": 1e6 * (time.perf_counter() - began) / (walks * row.layers)}
