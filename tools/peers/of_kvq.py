# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-peers.py over kvq: FORMAT[/PATH], exact unless PATH is fast.

Attention is in this process, over the memory of a kvqd of its own, on kvq's own threads. Layers are
called as kvq's plug-ins call them: libkvq's functions with structures that were made before."""
import time
from ctypes import byref

import numpy as np

import kvq
from kvq._ffi import lib
from kvq.errors import check
from kvq.private import private_daemon
from kvq.work import make_entries, make_work
from peer import Peer, Row

AT_ONCE = 4096  # tokens of a step that fills
POOL = "8gb"
SETTLES = 0.3    # seconds without a change, until a session counts as packed


class Cache(Row):
    """A session."""
    layout = "blocks of 128 tokens of a head"

    def __init__(self, worker, name, tokens):
        self.worker = worker
        form, _, path = name.partition("/")
        layer = kvq.Layer(tokens.q_heads, tokens.kv_heads, tokens.head_dim)
        with worker.client.session([layer], form) as probe:
            self._fill(probe, tokens, 1)
            nbytes = self._bytes(probe)
        self.layers = layer.repeat = tokens.layers(worker.bytes, nbytes)
        self.session = worker.client.session([layer], form, attention=path or "exact")
        self._fill(self.session, tokens, self.layers)
        self.bits = 8 * self._bytes(self.session) / (self.layers * tokens.values)
        shape = (1, tokens.q_heads, tokens.head_dim)
        self.buffer = worker.client.buffer(8 * int(np.prod(shape)))
        q, self.result = (self.buffer.array(shape, np.float32, i * self.buffer.nbytes // 2)
                          for i in range(2))
        q[:] = tokens.q
        tensors = {"q": self.buffer.tensor(q), "out": self.buffer.tensor(self.result)}
        self.works = [make_work({"layer": i, **tensors}) for i in range(self.layers)]
        self.entries = make_entries([self.session], queries=1)

    @staticmethod
    def _bytes(session):
        """What it takes, as soon as kvqd has packed it."""
        last, since = None, time.monotonic()
        while time.monotonic() < since + SETTLES:
            info = session.info()
            now = info["packed_bytes"] + info["window_bytes"]
            if now != last:
                last, since = now, time.monotonic()
            time.sleep(0.02)
        return last

    def _fill(self, session, tokens, layers):
        shape = (min(tokens.tokens, AT_ONCE), tokens.kv_heads, tokens.head_dim)
        with self.worker.client.buffer(4 * int(np.prod(shape))) as buffer:
            k, v = (buffer.array(shape, np.float16, i * buffer.nbytes // 2) for i in range(2))
            for at in range(0, tokens.tokens, AT_ONCE):
                n = min(AT_ONCE, tokens.tokens - at)
                k[:n], v[:n] = tokens.k[at:at + n], tokens.v[at:at + n]
                with self.worker.queue.step([session], n) as step:
                    for layer in range(layers):
                        step.append(layer, k[:n], v[:n])
            del k, v

    def threads(self, number):
        """See peer.py."""
        self.worker.use(number)

    def walk(self):
        """See peer.py."""
        local = self.worker.local
        with local.step([self.session], 0) as step:
            for work, _ in self.works:
                code = lib.kvq_local_attend(local.pointer, byref(work), self.entries.ctypes.data, 1)
                if code:
                    check(code, self.entries)
            step.abort()

    def out(self):
        """See peer.py."""
        return self.result[0]

    def close(self):
        """See peer.py."""
        if self.worker.local:
            self.worker.local.remove(self.session)
        self.session.close()
        self.worker.inside.discard(self.session)
        self.works, self.result = None, None
        self.buffer.close()


class Kvq(Peer):
    """All rows share a kvqd."""

    def __init__(self, threads):
        super().__init__(threads)
        self.client = kvq.Client(runtime_dir=private_daemon(workers=threads, pool_bytes=POOL))
        self.queue = self.client.queue()
        self.local, self.number, self.inside = None, 0, set()
        self.what = f"kvq {self.client.info()['version']}"

    def make(self, name, tokens):
        return Cache(self, name, tokens)

    def use(self, number):
        """Attention is on so many threads from now on, to all sessions that are open."""
        if number != self.number:
            if self.local:
                self.local.close()
            self.local = self.queue.local(require=True, threads=number)
            self.number, self.inside = number, set()
        for row in self.rows.values():
            if row.session not in self.inside:
                self.local.add(row.session)
                self.inside.add(row.session)


make = Kvq
