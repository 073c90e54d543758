# SPDX-License-Identifier: Apache-2.0
"""Queues, steps and tickets: what happens at every step of a model.

Arrays that lie in a Buffer are used in place. Others are copied through the queue's own staging
buffer; that is convenient, and slower.
"""
import time
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _ffi
from ._ffi import ENTRY, U64_MAX, lib
from .buffers import Buffer, dtype_code, numpy_dtype
from .errors import check

OPERATIONS = {"nop": 0, "step_begin": 1, "append": 2, "attend": 3, "append_attend": 4,
              "step_end": 5, "step_abort": 6, "truncate": 7, "fork": 8, "accept": 9, "read": 10,
              "step": 11}
ORDERS = {0: "none", 1: "words", 2: "events", 3: "host"}
PAST_ONLY = 1


@dataclass
class Pages:
    """K and V in the engine's own paged cache.

    k, v     arrays [pages][page_tokens][heads][dim] in buffers
    lists    for each session of the call its page numbers
    skip     for each session the tokens to skip in its first page; default none
    """
    k: Any
    v: Any
    lists: Any
    skip: Any = None


class Ticket:
    """A request under way. Keeps alive what the daemon reads and writes."""

    def __init__(self, queue, number, entries, work, keep):
        self.queue, self.number, self.entries = queue, number, entries
        self.step, self.work = work.step, work
        self._keep = keep

    def wait(self, timeout=None):
        """Waits at most timeout seconds (None: for as long as the daemon lives) and returns the
        entries. Error with E_DEADLINE if it is not done yet; the ticket stays open then."""
        ns = U64_MAX if timeout is None else int(timeout * 1e9)
        check(lib.kvq_wait(self.queue.pointer, self.number, ns), self.entries)
        return self.entries


class Queue:
    """One ring pair; for one thread at a time."""

    def __init__(self, client):
        self.client = client
        self.pointer = c_void_p()
        self._staging = None
        check(lib.kvq_queue_open(client.pointer, byref(self.pointer)))
        client._queues.append(self)

    def close(self):
        if self.pointer:
            if self._staging is not None:
                self._staging.close()
            lib.kvq_queue_close(byref(self.pointer))
            self.client._queues.remove(self)
            self._forget()

    def _forget(self):
        self.pointer = c_void_p()
        self._staging = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- As in kvq.h ----

    def submit(self, operation, entries, *, keep=None, stream=None, **work):
        """kvq_submit: operation by name, entries an array of ENTRY, work by the fields of struct
        kvq_work (tensors from Buffer.tensor or DeviceBuffer.tensor). With a stream (the number of
        a CUDA stream, torch.cuda.Stream.cuda_stream; 0 is the default one) kvq_submit_on_stream.
        Returns a Ticket."""
        fields = _ffi.Work(**work)
        number = c_uint64()
        front = [self.pointer, OPERATIONS[operation], byref(fields),
                 entries.ctypes.data if len(entries) else None, len(entries)]
        if stream is None:
            check(lib.kvq_submit(*front, byref(number)))
        else:
            check(lib.kvq_submit_on_stream(*front, stream, byref(number)))
        return Ticket(self, number.value, entries, fields, keep)

    def call(self, operation, entries, **work):
        """submit() and wait(), without raising for single entries: returns the entries."""
        ticket = self.submit(operation, entries, **work)
        check(lib.kvq_wait(self.pointer, ticket.number, U64_MAX))
        return ticket

    def order(self):
        """How calls with a stream order it: "words", "events", "host"; "none" before the first."""
        return ORDERS[lib.kvq_queue_order(self.pointer)]

    def wait_for_room(self, seconds):
        """How long steps and forks wait where memory is short and nothing can make room; 0: they
        are refused at once. After that they raise kvq.Error with KVQ_E_DEADLINE."""
        check(lib.kvq_queue_wait_for_room(self.pointer, round(seconds * 1e9)))

    def prepare_streams(self):
        """Does now what the first call with a stream would do."""
        check(lib.kvq_queue_prepare_streams(self.pointer))

    # ---- Staging ----

    def _stage(self, sizes):
        """A buffer with room for areas of these sizes, and where each starts."""
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += size + 63 & ~63
        if self._staging is None or self._staging.nbytes < end:
            if self._staging is not None:
                self._staging.close()
            self._staging = Buffer(self.client, max(end, 1 << 16))
        return self._staging, starts

    def _place(self, arrays):
        """Buffer arrays for the given ones: themselves if they lie in a buffer, else staged copies.
        None stays None. Each comes with its buffer, and whether it is a copy."""
        outside = [a for a in arrays if a is not None and self.client.find_buffer(a) is None]
        buffer, starts = self._stage([a.nbytes for a in outside]) if outside else (None, [])
        placed = []
        for array in arrays:
            if array is None:
                placed.append((None, None, False))
            elif any(array is o for o in outside):
                copy = buffer.array(array.shape, array.dtype, starts.pop(0))
                copy[...] = array
                placed.append((copy, buffer, True))
            else:
                placed.append((array, self.client.find_buffer(array), False))
        return placed

    # ---- Steps ----

    def step(self, sessions, tokens, ids=None):
        """Begins a step over sessions with so many tokens each (a number, or one for each). Use it
        as a context manager: it commits at the end, and aborts if the body raises. ids: of the
        tokens of all sessions, one after the other."""
        return Step(self, sessions, tokens, ids)

    def step_whole(self, sessions, tokens, k, v, ids=None):
        """A whole step in one request: for each layer an array of K and one of V, in buffers (None
        for layers that read another layer's cache). ids: as in step."""
        entries = make_entries(sessions, append=tokens)
        work = step_work(self.client, k, v)
        work.ids = self._place_ids(entries, ids)
        code = lib.kvq_step(self.pointer, byref(work), entries.ctypes.data, len(entries))
        for session, entry in zip(sessions, entries):
            if code == 0 and entry["status"] == 0:
                session.tokens = int(entry["value"])
        check(code, entries)

    def _place_ids(self, entries, ids):
        """struct kvq_ids; sets where each entry's ids start."""
        if ids is None:
            return _ffi.Ids()
        ids = np.ascontiguousarray(ids, np.int32).ravel()
        if ids.size != entries["append"].sum():
            raise ValueError(f"{ids.size} ids of {entries['append'].sum()} tokens")
        (array, buffer, _), = self._place([ids])
        entries["q_row"] = np.cumsum(entries["append"]) - entries["append"]
        return _ffi.Ids(buffer.pointer, array.ctypes.data - buffer.address)

    def local(self, place=None, max_tokens=0, require=False):
        """Attention in this process instead of the daemon's: a Local. require: fail where that
        cannot be."""
        from .local import Local
        return Local(self, place, max_tokens, require)

    def attend(self, sessions, layer, q, queries=1, **options):
        """Attention over committed tokens, without a step. Queries stand behind all tokens."""
        entries = make_entries(sessions, queries=queries)
        return attend(self, "attend", sessions, entries, 0, layer, q=q, **options)

    def nop(self, sessions=()):
        """A request that does nothing: measures the ring."""
        entries = make_entries(sessions)
        check(lib.kvq_nop(self.pointer, entries.ctypes.data, len(entries)), entries)

    # ---- Change of course ----

    def truncate(self, sessions, tokens):
        """Shortens each session to so many tokens (a number, or one for each)."""
        entries = make_entries(sessions)
        wanted = np.broadcast_to(np.asarray(tokens, np.uint64), len(entries)).copy()
        code = lib.kvq_truncate(self.pointer, entries.ctypes.data, wanted.ctypes.data,
                                len(entries))
        for session, entry in zip(sessions, entries):
            if code == 0 and entry["status"] == 0:
                session.tokens = int(entry["value"])
        check(code, entries)

    def fork(self, sessions, at=None):
        """New unnamed sessions with the first `at` tokens of each (None: all of them)."""
        entries = make_entries(sessions)
        if at is not None:
            entries["position"] = at
        check(lib.kvq_fork(self.pointer, entries.ctypes.data, len(entries)), entries)
        return [type(s)(self.client, int(e["value"]), int(e["position"]), s.layers)
                for s, e in zip(sessions, entries)]

    def accept(self, sessions, drafted, keep):
        """Of the last `drafted` tokens (a number, or one for each session) keeps those at the
        ascending indices keep[i], and moves them together."""
        lists = [np.asarray(k, np.int32) for k in keep]
        entries = make_entries(sessions, append=drafted)
        entries["list_token"] = [len(k) for k in lists]
        entries["row"] = np.cumsum([0] + [len(k) for k in lists[:-1]])
        flat = np.concatenate(lists) if lists else np.zeros(0, np.int32)
        (array, buffer, _), = self._place([flat if flat.size else np.zeros(1, np.int32)])
        code = lib.kvq_accept(self.pointer, buffer.pointer, array.ctypes.data - buffer.address,
                              entries.ctypes.data, len(entries))
        for session, entry in zip(sessions, entries):
            if code == 0 and entry["status"] == 0:
                session.tokens = int(entry["value"])
        check(code, entries)

    def read(self, session, layer, start=0, tokens=None, dtype="f32", shape=None):
        """K and V of tokens [start, start + tokens) of one layer, dequantized, in the engine's
        basis: two arrays [tokens][heads][dim], shorter where the session ends and where the
        layer's window has let tokens go. shape: (kv_heads, k_dim, v_dim), if the session was
        opened without a table."""
        tokens = session.tokens - start if tokens is None else tokens
        if shape is None:
            row = session.layer(layer)
            shape = (row.kv_heads, row.head_dim, row.head_dim if row.v_dim is None else row.v_dim)
        kind = numpy_dtype(dtype)
        placed = self._place([np.empty((tokens, shape[0], shape[1]), kind),
                              np.empty((tokens, shape[0], shape[2]), kind)])
        tensors = [buffer.tensor(array, dtype) for array, buffer, _ in placed]
        entries = make_entries([session], append=tokens)
        entries["position"] = start
        work = _ffi.Work(layer=layer, k=tensors[0], v=tensors[1])
        check(lib.kvq_read(self.pointer, byref(work), entries.ctypes.data, 1), entries)
        end = min(tokens, session.tokens - start)
        first = end - int(entries["value"][0])  # above 0 where the window has let tokens go
        return tuple(array[first:end].copy() for array, _, _ in placed)


def make_entries(sessions, append=0, queries=0):
    """One ENTRY for each session, rows and query rows one behind the other."""
    entries = np.zeros(len(sessions), ENTRY)
    entries["session"] = [s.handle for s in sessions]
    entries["position"] = [s.tokens for s in sessions]
    entries["append"] = append
    entries["queries"] = queries
    entries["row"] = np.cumsum(entries["append"]) - entries["append"]
    entries["q_row"] = np.cumsum(entries["queries"].astype(np.uint32)) - entries["queries"]
    return entries


def step_work(client, k, v):
    """struct kvq_step_work of K and V of each layer."""
    def tensors(arrays):
        made = (_ffi.Tensor * len(arrays))()
        for i, array in enumerate(arrays):
            if array is None:
                continue
            buffer = client.find_buffer(array)
            if buffer is None:
                raise ValueError(f"k or v of layer {i} lies in no buffer")
            made[i] = buffer.tensor(array)
        return made
    work = _ffi.StepWork(n_layers=len(k))
    work.k, work.v = tensors(k), tensors(v)
    return work


def _page_fields(queue, pages, entries):
    """Fields of struct kvq_work for paged K and V; fills the entries' lists in."""
    lists = [np.asarray(p, np.int32) for p in pages.lists]
    entries["row"] = np.cumsum([0] + [len(p) for p in lists[:-1]])
    entries["list_token"] = 0 if pages.skip is None else pages.skip
    table = Buffer(queue.client, max(sum(p.nbytes for p in lists), 1))
    flat = np.concatenate(lists)
    table.array(flat.shape, np.int32)[...] = flat
    found = [queue.client.find_buffer(a) for a in (pages.k, pages.v)]
    if None in found:
        raise ValueError("a paged cache must lie in a buffer")
    tensors = [buffer.tensor(a[0]) for buffer, a in zip(found, (pages.k, pages.v))]
    for tensor, buffer, a in zip(tensors, found, (pages.k, pages.v)):
        tensor.offset = a.ctypes.data - buffer.address
    fields = _ffi.Pages(pages.k.shape[1], pages.k.strides[0], pages.v.strides[0], table.pointer, 0)
    return {"k": tensors[0], "v": tensors[1], "pages": fields}, table


def attend(queue, operation, sessions, entries, step, layer, *, k=None, v=None, q=None, out=None,
           lse=True, past_only=False, dtype=None, out_dtype=None, pages=None, timeout=None):
    """One request of append, attend or both. Returns (out, lse): `out` as given, or a new array of
    out_dtype (default f32); lse [queries][heads] fp32, or None if lse is False."""
    row = sessions[0].layer(layer) if sessions[0].layers else None
    rows = int(entries["queries"].sum())
    want_lse = q is not None and lse is not False
    if q is not None and out is None:
        dim = q.shape[2] if row is None or row.v_dim is None else row.v_dim
        out = np.empty((rows, q.shape[1], dim), numpy_dtype(out_dtype or "f32"))
    log_sum = np.empty((rows, q.shape[1]), np.float32) if want_lse else None
    fields, table = {}, None
    if pages is not None:
        fields, table = _page_fields(queue, pages, entries)
    placed = queue._place([k, v, q, out, log_sum])
    kinds = [dtype, dtype, dtype, out_dtype or dtype if out_dtype or out is None else None]
    for name, (array, buffer, _), kind in zip(("k", "v", "q", "out"), placed, kinds):
        if array is not None:
            if kind is not None and numpy_dtype(kind).itemsize != array.itemsize:
                kind = None
            fields[name] = buffer.tensor(array, kind)
    if log_sum is not None:
        array, buffer, _ = placed[4]
        fields["lse"] = _ffi.Tensor(buffer.pointer, array.ctypes.data - buffer.address,
                                    array.strides[0], array.strides[1], dtype_code("f32"))
    deadline = time.monotonic_ns() + int(timeout * 1e9) if timeout is not None else 0
    try:
        ticket = queue.call(operation, entries, step=step, layer=layer, deadline_ns=deadline,
                            flags=PAST_ONLY if past_only else 0, **fields)
    finally:
        if table is not None:
            table.close()
    if placed[3][2]:
        out[...] = placed[3][0]
    if want_lse:
        log_sum[...] = placed[4][0]
    check(0, ticket.entries)
    return out, log_sum


class Step:
    """An open step. Sessions that fail in it raise Error with the entries; the others go on."""

    def __init__(self, queue, sessions, tokens, ids=None):
        self.queue = queue
        self.sessions = list(sessions)
        self.entries = make_entries(self.sessions, append=tokens)
        self.number = None
        step = c_uint64()
        told = queue._place_ids(self.entries, ids)
        begin = (queue.pointer, self.entries.ctypes.data, len(self.entries))
        code = (lib.kvq_step_begin(*begin, byref(step)) if ids is None else
                lib.kvq_step_begin_ids(*begin, byref(told), byref(step)))
        failed = code == 0 and (self.entries["status"] != 0).any()
        if code == 0:
            self.number = step.value
        if failed:
            begun = (self.entries["status"] == 0).any()
            try:
                check(code, self.entries)
            finally:
                if begun:
                    self.abort()
        check(code)

    def _entries(self, queries):
        entries = make_entries(self.sessions, append=self.entries["append"], queries=queries)
        return entries

    def append(self, layer, k=None, v=None, **options):
        """Hands over K and V of one layer: [all tokens][kv_heads][dim]."""
        attend(self.queue, "append", self.sessions, self._entries(0), self.number, layer, k=k, v=v,
               **options)

    def attend(self, layer, q, queries=None, **options):
        """Attention of one layer for the last `queries` tokens of each session (None: all of the
        step's). Returns (out, lse). past_only: attend only to tokens before the step."""
        entries = self._entries(self.entries["append"] if queries is None else queries)
        return attend(self.queue, "attend", self.sessions, entries, self.number, layer, q=q,
                      **options)

    def append_attend(self, layer, k, v, q, queries=None, **options):
        """append and attend in one request. Returns (out, lse)."""
        entries = self._entries(self.entries["append"] if queries is None else queries)
        return attend(self.queue, "append_attend", self.sessions, entries, self.number, layer,
                      k=k, v=v, q=q, **options)

    def on_stream(self, operation, layer, stream, queries=None, flags=0, **tensors):
        """"append", "attend" or "append_attend" in the order of a CUDA stream (its number), with
        k, v, q, out and lse as CUDA tensors in buffers of Client.import_tensor or buffer_on.
        Results are there for later work of the stream."""
        fields = {}
        for name, tensor in tensors.items():
            buffer = self.queue.client.find_device_buffer(tensor)
            if buffer is None:
                raise ValueError(f"{name} lies in no buffer; see Client.import_tensor")
            fields[name] = buffer.tensor(tensor)
        wanted = self.entries["append"] if queries is None else queries
        entries = self._entries(0 if operation == "append" else wanted)
        ticket = self.queue.call(operation, entries, step=self.number, layer=layer, flags=flags,
                                 stream=stream, **fields)
        check(0, ticket.entries)

    def end(self):
        """Commits; sessions get their new counts."""
        entries = make_entries(self.sessions, append=self.entries["append"])
        number, self.number = self.number, None
        code = lib.kvq_step_end(self.queue.pointer, number, entries.ctypes.data, len(entries))
        for session, entry in zip(self.sessions, entries):
            if code == 0 and entry["status"] == 0:
                session.tokens = int(entry["value"])
        check(code, entries)

    def abort(self):
        """Leaves every session as it was."""
        number, self.number = self.number, None
        check(lib.kvq_step_abort(self.queue.pointer, number, None, 0))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.number is None:
            return
        if kind is None:
            self.end()
            return
        try:
            self.abort()
        except Exception:  # the body's own error is what the caller wants to see
            pass
