# SPDX-License-Identifier: Apache-2.0
"""A step of a plug-in, of the forward of a model: what kvq.transformers and kvq.vllm share.

A step of few tokens attends in this process (kvq_local_*): K and V of all layers stay in buffers
until its end. A longer one goes through the daemon layer by layer, so that buffers hold one layer
at a time.

What is told to the library are pointers. Whoever has a Step looks first whether they are there, and
says what becomes of the others where a session fails.
"""
from ctypes import byref, c_uint64

import kvq
from kvq import _ffi
from kvq._ffi import lib
from kvq.errors import check

from .memory import Desk

NEAR_ROWS = 256  # tokens of a step that attends in this process
ROOMY = 8192     # desks of more rows have a multiple of it


def roomy(rows):
    """Some more rows, so that a desk serves a next step of a few more as well."""
    return max(8, 1 << (rows - 1).bit_length()) if rows < ROOMY else -(-rows // ROOMY) * ROOMY


class Desks:
    """Those of a queue: one for steps that keep K and V of all layers, one for those of one."""

    def __init__(self, client):
        self._client, self._made = client, {}

    def of(self, table, dtype, kept, rows, asked):
        """One with at least so many rows of K and V of `kept` layers, and `asked` of Q."""
        desk = self._made.get(kept)
        if desk is None or desk.rows < rows or desk.asked < asked or desk.dtype != dtype:
            if desk is not None:  # closed ones are not kept, also if the new one cannot be made
                rows, asked = max(rows, desk.rows), max(asked, desk.asked)
                self._made.pop(kept).close()
            desk = self._made[kept] = Desk(self._client, table, dtype, roomy(rows), kept,
                                           roomy(asked))
        return desk

    def close(self):
        for kept in list(self._made):
            self._made[kept].close()
            del self._made[kept]


class Step:
    """What is open between the first layer's attention and the last one's.

    counts   tokens of each session
    total    of all
    near     whether it attends in this process
    next     the layer that comes next
    status   of the entries, one for each session that has tokens in the step
    """

    def __init__(self, queue, counts, near):
        self.queue, self.counts, self.near = queue, counts, near
        self.total = sum(counts)
        self.next = 0
        self.local = None        # what it attends by, if it is near
        self.desk = None
        self.entries = self.status = self._pointer = self._told = None
        self._begun = c_uint64() # the number of the daemon's step

    def prepare(self, desk, sessions, counts, queries, ids=None):
        """Says what its entries are, each of some tokens, in a desk's rows one behind the other;
        ids: of all tokens, a tensor, if they are told to the daemon."""
        self.desk = desk
        self.entries = kvq.make_entries(sessions, append=counts, queries=queries)
        self.entries["q_row"] = self.entries["row"]
        self.status, self._pointer = self.entries["status"], self.entries.ctypes.data
        if ids is not None:
            desk.ids[:self.total].copy_(ids)
            self._told = desk.told()

    def begin(self, local):
        """Begins it. The status says which sessions failed."""
        n = len(self.entries)
        if self.near:
            self.local = local
            check(lib.kvq_local_begin(local.pointer, self._pointer, n))
            return
        begin = (self.queue.pointer, self._pointer, n)
        check(lib.kvq_step_begin(*begin, byref(self._begun)) if self._told is None else
              lib.kvq_step_begin_ids(*begin, byref(self._told), byref(self._begun)))
        for work in self.desk.work:
            work.step = self._begun.value

    def kept(self, layer):
        """The desk's rows for K and V of a layer."""
        at = layer % self.desk.kept
        return self.desk.keys[at][:self.total], self.desk.values[at][:self.total]

    def ask(self, layer):
        """Appends a layer's K and V, as they lie on the desk, and attends. The status says which
        sessions failed."""
        at = self.desk.pointers[layer], self._pointer, len(self.entries)
        code = lib.kvq_local_attend(self.local.pointer, *at) if self.near else \
            lib.kvq_append_attend(self.queue.pointer, *at)
        if code:
            check(code)

    def failed(self):
        """Whether a session has."""
        return any(self.status.tolist())

    def end(self, each=True):
        """Commits, and returns the code. each: a session that fails in the daemon's own step leaves
        it to the others; else all commit or none."""
        entries = self._pointer, len(self.entries)
        if self.near:
            work = None if self._told is None else byref(_ffi.StepWork(ids=self._told))
            return lib.kvq_local_end(self.local.pointer, work, *entries)
        return lib.kvq_step_end(self.queue.pointer, self._begun.value,
                                *(entries if each else (None, 0)))

    def abort(self):
        """Leaves the sessions as they were, and returns the code; 0 where nothing was begun."""
        if self.near:
            if self.local is not None:
                lib.kvq_local_abort(self.local.pointer)
        elif self._begun.value:
            return lib.kvq_step_abort(self.queue.pointer, self._begun.value, None, 0)
        return 0
