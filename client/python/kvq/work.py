# SPDX-License-Identifier: Apache-2.0
"""Queues and tickets: what happens at every step of a model.

Arrays, and tensors of PyTorch on the CPU, that lie in a Buffer are used in place. Others are copied
through the queue's own staging buffer; that is convenient, and slower.
"""
from __future__ import annotations

import functools
import math
import time
from contextlib import suppress
from ctypes import byref, c_uint64, c_void_p
from dataclasses import dataclass
from itertools import accumulate
from typing import (Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, SupportsFloat,
                    SupportsIndex, Tuple, cast)

import numpy as np

import kvq

from . import _ffi
from ._ffi import ENTRY, U64_MAX, lib
from .buffers import BF16, F16, F32, Buffer, dtype_code, in_use, numpy_dtype, own_code
from .checks import (Method, Shapes, Turn, array as check_array, batch, choice, counts,
                     entries as check_entries, in_turn, integer, integers, number, owner)
from .errors import Code, Error, check
from .hints import (Array, Counts, Dtype, Entries, Floats, HostArray, Ids, Output,
                    Threads)
from .shown import Shown, number_of
from .views import host_bounds, is_tensor

OPERATIONS = {"nop": 0, "step_begin": 1, "append": 2, "attend": 3, "append_attend": 4,
              "step_end": 5, "step_abort": 6, "truncate": 7, "fork": 8, "accept": 9, "read": 10,
              "step": 11}
ORDERS = {0: "none", 1: "words", 2: "events", 3: "host"}
PAST_ONLY = 1
CREDITS = 8  # requests that a queue may have under way: KVQ_QUEUE_CREDITS of proto/limits.h
KEPT = 64 << 20  # bytes of a staging buffer that a queue keeps behind a read
TENSORS = frozenset(("k", "v", "q", "out", "lse", "pages", "ids"))
NANS = {F16: 0x7e00, BF16: 0x7fc0, F32: 0x7fc00000}


@dataclass
class Pages:
    """K and V in the engine's own paged cache.

    k, v     arrays [pages][page_tokens][heads][dim] in buffers, of float16, float32 or uint16
             (which holds bfloat16)
    lists    for each session of the call its page numbers
    skip     for each session the tokens to skip in its first page; default none
    """
    k: HostArray
    v: HostArray
    lists: Sequence[Ids]
    skip: Optional[Counts] = None


def alone(method: Method) -> Method:
    """Of an object with a queue's turn: no other thread may be in a call of that queue, and it is
    open."""
    @functools.wraps(method)
    def checked(self, *arguments, **options):
        self._check_open()
        return method(self, *arguments, **options)
    return cast(Method, in_turn(checked))


def nanoseconds(seconds: Optional[SupportsFloat]) -> int:
    """0 to 2^64 - 1 for a number of seconds; None is for ever."""
    if seconds is None:
        return U64_MAX
    value = number("seconds", seconds)
    if math.isnan(value):
        raise ValueError(f"seconds is {seconds!r}; it must be a number")
    return int(min(max(value, 0) * 1e9, 2.0**63))


class Ticket(Shown):
    """A request under way. Keeps alive what the daemon reads and writes; the queue keeps the ticket
    until a wait has closed it, or the queue is closed. entries: an array [sessions] of ENTRY, whose
    status and value the daemon sets."""

    def __init__(self, queue: Queue, entries: Entries, work: _ffi.Work, tensors: Dict[str, Any],
                 keep: object) -> None:
        self.queue, self.entries, self.work, self.tensors = queue, entries, work, tensors
        self._number = c_uint64()
        self._keep = keep, entries  # also if the attribute is given others

    def _told(self):
        entries = number_of("session", len(self._keep[1]))
        if not self.number:
            return f"of {entries}: not sent"
        is_open = any(ticket is self for ticket in self.queue._tickets)
        return f"{self.number} of {entries}: {'open' if is_open else 'done'}"

    @property
    def number(self) -> int:
        """The library's number of it; 0 before it was sent."""
        return self._number.value

    @property
    def step(self) -> int:
        """The number of the step that it is of, or that it begins."""
        return self.work.step

    def wait(self, timeout: Optional[SupportsFloat] = None) -> Entries:
        """Waits at most timeout seconds (None: for as long as the daemon lives) and returns the
        entries. Error with E_DEADLINE if it is not done yet; the ticket stays open then."""
        return self.queue._wait(self, nanoseconds(timeout))


class Placed(NamedTuple):
    """An array of a request, and where it lies: in a buffer, from an address to before another."""
    array: Array
    buffer: Any
    start: int
    end: int
    copied: bool = False  # from one that lies in no buffer

    @property
    def offset(self) -> int:
        """In the buffer, of an array without negative strides."""
        return self.start - self.buffer.address

    def tensor(self, dtype):
        """Buffer.tensor() of it."""
        at = self.buffer.address
        return self.buffer._tensor_at(self.start - at, self.end - at, self.array, dtype)


class Queue(Shown):
    """One ring pair; for one thread at a time."""

    def __init__(self, client: kvq.Client) -> None:
        self.client = client
        self.pointer = c_void_p()
        self.turn = Turn("queue")
        self._staging: Optional[Buffer] = None
        self._locals: List[kvq.Local] = []
        self._nothing_open()
        try:
            client._gate.run(self._open)
        except BaseException:
            if self.pointer:  # an interrupt: nobody has it
                self._close()
            raise

    def _told(self):
        if not self.pointer:
            return "closed"
        return f"open: {number_of('ticket', len(self._tickets))} under way"

    def _open(self):
        self.client.control(lib.kvq_queue_open, byref(self.pointer))
        self.client._queues.append(self)

    def close(self) -> None:
        """Closes its Locals, too, and aborts its open steps."""
        if self.turn.is_left():
            self._forget()
        else:
            self._close()

    @in_turn
    def _close(self):
        if not self.pointer:
            return
        self._close_locals()
        if self._staging is not None:
            self._staging.close()
        self.client._gate.run(self._close_here)

    def _close_here(self):
        lib.kvq_queue_close(byref(self.pointer))
        with suppress(ValueError):  # its opening was interrupted
            self.client._queues.remove(self)
        self._forget()

    def _close_locals(self):
        for local in list(self._locals):
            local.close()

    def _abort_left(self):
        """Aborts the steps that nobody has any more, if there is a credit for that. For calls that
        wait for an answer: that of an abort comes behind those of all open tickets, too."""
        if sum(t.number > 0 for t in self._tickets) < CREDITS:
            self._abort_all_left()

    def _abort_idle(self):
        """For calls that need not wait: aborts them where no ticket is open."""
        if not any(t.number > 0 for t in self._tickets):
            self._abort_all_left()

    def _abort_all_left(self):
        """Aborts them now."""
        while self._left:  # others may come behind the first one meanwhile, from any thread
            lib.kvq_step_abort(self.pointer, self._left[0], None, 0)
            self._left.pop(0)

    def _check_open(self):
        if not self.pointer:
            raise ValueError("the queue is closed")
        if self._left:
            self._abort_idle()

    def _forget(self):
        self.pointer = c_void_p()
        self._staging = None
        self._nothing_open()

    def _nothing_open(self):
        self._tickets: List[Ticket] = []  # open ones: the library writes to their entries
        self._left: List[int] = []  # numbers of open steps that nobody has any more

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- As in kvq.h ----

    def submit(self, operation: str, entries: Entries, *, keep: object = None,
               stream: Optional[SupportsIndex] = None, **work: Any) -> Ticket:
        """kvq_submit: operation by name, entries an array [sessions] of ENTRY, work by the fields
        of struct kvq_work (tensors from Buffer.tensor or DeviceBuffer.tensor). With a stream (the
        number of a CUDA stream, torch.cuda.Stream.cuda_stream; 0 is the default one)
        kvq_submit_on_stream. Returns a Ticket; up to 8 of a queue may be open. Interrupted, it
        waits for what was sent."""
        made: List[Ticket] = []
        try:
            return self._submit(made, operation, entries, keep, stream, work)
        except BaseException:
            for ticket in made:
                self._end(ticket)
            raise

    @alone
    def _submit(self, made, operation, entries, keep, stream, work):
        fields, tensors = make_work(work)
        entries = check_entries(entries) if len(entries) else np.zeros(0, ENTRY)
        front = [self.pointer, choice("operation", operation, OPERATIONS), byref(fields),
                 entries.ctypes.data if len(entries) else None, len(entries)]
        numbers = () if stream is None else (integer("stream", stream, 64),)
        if len(entries):
            entries["status"] = 0  # what _close_ticket() sees there is the answer
        ticket = Ticket(self, entries, fields, tensors, keep)
        function = lib.kvq_submit if stream is None else lib.kvq_submit_on_stream

        def send():
            made.append(ticket)
            self._tickets.append(ticket)  # before it is sent: an interrupt may come behind that
            return function(*front, *numbers, byref(ticket._number))
        check(in_use((t.owner for t in tensors.values()), send))
        return ticket

    @alone
    def _end(self, ticket):
        """Of one that nobody has: it was not sent, or its call was interrupted."""
        if ticket.number:
            self._close_ticket(ticket, U64_MAX)
        else:
            self._tickets = [t for t in self._tickets if t is not ticket]

    @alone
    def call(self, operation: str, entries: Entries, **work: Any) -> Ticket:
        """submit() and wait(), without raising for single entries: returns the ticket."""
        before = len(self._tickets)
        try:
            ticket = self.submit(operation, entries, **work)
            check(self._close_ticket(ticket, U64_MAX))
        except Error:
            raise
        except BaseException:  # an interrupt: nobody else will wait
            for left in self._tickets[before:]:
                self._close_ticket(left, U64_MAX)
            raise
        return ticket

    @alone
    def _wait(self, ticket, ns):
        code = self._close_ticket(ticket, ns)
        if self._left:
            self._abort_idle()
        check(code, ticket.entries)
        return ticket.entries

    def _close_ticket(self, ticket, ns):
        """kvq_wait. The ticket is open behind it if the time is over, or if waiting itself failed;
        a request that failed alike says so in its entries."""
        code = lib.kvq_wait(self.pointer, ticket.number, ns)
        entries = ticket._keep[1]
        if code not in (Code.E_DEADLINE, Code.E_SYSTEM) \
                or (len(entries) and (entries["status"] == code).all()):
            self._tickets = [t for t in self._tickets if t is not ticket]
        return code

    @alone
    def order(self) -> str:
        """How calls with a stream order it: "words", "events", "host"; "none" before the first."""
        return ORDERS[lib.kvq_queue_order(self.pointer)]

    @alone
    def wait_for_room(self, seconds: SupportsFloat) -> None:
        """How long steps and forks wait where memory is short and nothing can make room; 0: they
        are refused at once. After that they raise kvq.Error with KVQ_E_DEADLINE."""
        if number("seconds", seconds) < 0:
            raise ValueError(f"seconds is {seconds!r}; it can be 0 or more")
        check(lib.kvq_queue_wait_for_room(self.pointer, nanoseconds(seconds)))

    @alone
    def prepare_streams(self) -> None:
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

    def _place(self, arrays, results=()):
        """Buffer arrays for the given ones: themselves if they lie in a buffer, else staged copies;
        of those among the results, which the daemon writes, just the room. None stays None. Each is
        a Placed."""
        find = self.client._buffers.find
        bounds = [None if a is None else host_bounds(a) for a in arrays]
        placed = [None if a is None else Placed(a, find(*place), *place)
                  for a, place in zip(arrays, bounds)]
        copied = [i for i, p in enumerate(placed) if p is not None and p.buffer is None]
        if copied:
            staging, starts = self._stage([arrays[i].nbytes for i in copied])
            for i, start in zip(copied, starts):
                array = arrays[i]
                copy = staging.array(array.shape, array.dtype, start)
                if not any(array is r for r in results):
                    copy[...] = array
                start += staging.address
                placed[i] = Placed(copy, staging, start, start + array.nbytes, True)
        return placed

    # ---- Steps ----

    def step(self, sessions: Iterable[kvq.Session], tokens: Counts,
             ids: Optional[Ids] = None) -> kvq.Step:
        """Begins a step over sessions with so many tokens each (a number, or one for each). Use it
        as a context manager: it commits at the end, and aborts if the body raises. ids: of the
        tokens of all sessions, one after the other: as many integers as the step has tokens."""
        from .steps import Step
        return Step(self, sessions, tokens, ids)

    @alone
    def step_whole(self, sessions: Iterable[kvq.Session], tokens: Counts,
                   k: Iterable[Optional[HostArray]], v: Iterable[Optional[HostArray]],
                   ids: Optional[Ids] = None) -> None:
        """A whole step in one request: for each layer an array [all tokens][kv_heads][dim] of K and
        one of V, in buffers (None for layers that read another layer's cache), of float16, float32
        or uint16 (which holds bfloat16). ids: as in step."""
        sessions = batch(sessions, self.client, kvq.Session)
        entries = make_entries(sessions, append=tokens)
        work, used = step_work(self.client, sessions, entries, k, v)
        work.ids = self._place_ids(entries, ids)
        code = in_use(used, lib.kvq_step, self.pointer, byref(work), entries.ctypes.data,
                      len(entries))
        take_counts(sessions, entries, code)
        check(code, entries)

    def _place_ids(self, entries, ids):
        """struct kvq_ids; sets where each entry's ids start."""
        if ids is None:
            return _ffi.Ids()
        ids = integers("ids", ids, np.int32).ravel()
        if ids.size != entries["append"].sum():
            raise ValueError(f"{ids.size} ids of {entries['append'].sum()} tokens")
        placed, = self._place([ids])
        entries["q_row"] = np.cumsum(entries["append"]) - entries["append"]
        told = _ffi.Ids(placed.buffer.pointer, placed.offset)
        told.owner = placed.buffer
        return told

    def local(self, place: Optional[str] = None, max_tokens: SupportsIndex = 0,
              require: bool = False, threads: Threads = 1) -> kvq.Local:
        """Attention in this process instead of the daemon's: a Local, which says what the arguments
        are."""
        from .local import Local
        return Local(self, place, max_tokens, require, threads)

    @alone
    def attend(self, sessions: Iterable[kvq.Session], layer: SupportsIndex, q: HostArray,
               queries: Counts = 1, **options: Any) -> Tuple[Output, Optional[Floats]]:
        """Attention over committed tokens, without a step, with arrays and options as for
        Step.attend: q is [all queries][q_heads][head_dim]. Queries stand behind all tokens: on a
        layer with a window of W the first sees the last W - 1 of them, where the last token of a
        step saw W, itself among them. Returns (out, lse)."""
        sessions = batch(sessions, self.client, kvq.Session)
        entries = make_entries(sessions, queries=queries)
        return attend(self, "attend", sessions, entries, 0, layer, q=q, **options)

    @alone
    def nop(self, sessions: Iterable[kvq.Session] = ()) -> None:
        """A request that does nothing: measures the ring."""
        sessions = list(sessions)
        entries = make_entries(sessions and batch(sessions, self.client, kvq.Session))
        check(lib.kvq_nop(self.pointer, entries.ctypes.data, len(entries)), entries)

    # ---- Change of course ----

    @alone
    def truncate(self, sessions: Iterable[kvq.Session], tokens: Counts) -> None:
        """Shortens each session to so many tokens (a number, or one for each)."""
        sessions = batch(sessions, self.client, kvq.Session)
        entries = make_entries(sessions)
        wanted = integers("tokens", tokens, np.uint64, (len(entries),)).copy()
        code = lib.kvq_truncate(self.pointer, entries.ctypes.data, wanted.ctypes.data,
                                len(entries))
        take_counts(sessions, entries, code)
        check(code, entries)

    @alone
    def fork(self, sessions: Iterable[kvq.Session],
             at: Optional[Counts] = None) -> List[kvq.Session]:
        """New unnamed sessions with the first `at` tokens of each (None: all of them). If one
        cannot be made, none is."""
        sessions = batch(sessions, self.client, kvq.Session)
        entries = make_entries(sessions)
        if at is not None:
            entries["position"] = integers("at", at, np.uint64, (len(entries),))
        code = 0
        try:
            code = lib.kvq_fork(self.pointer, entries.ctypes.data, len(entries))
            check(code, entries)
            return [type(s)(self.client, int(e["value"]), int(e["position"]), s.layers,
                            format=s.format)
                    for s, e in zip(sessions, entries)]
        except BaseException:  # an interrupt, too: nobody has the handles
            made = entries["value"][entries["status"] == 0].tolist() if not code else ()
            for handle in filter(None, made):
                with suppress(Error):  # what failed first is what the caller is told
                    self.client.control(lib.kvq_session_close, handle)
            raise

    @alone
    def accept(self, sessions: Iterable[kvq.Session], drafted: Counts,
               keep: Iterable[Ids]) -> None:
        """Of the last `drafted` tokens (a number, or one for each session) keeps those at the
        ascending indices keep[i] (from 0, below drafted), and moves them together."""
        sessions = batch(sessions, self.client, kvq.Session)
        lists = [integers("keep", k, np.int32).ravel() for k in keep]
        if len(lists) != len(sessions) or any(len(k) > 65535 for k in lists):
            raise ValueError(f"keep has {len(lists)} lists for {len(sessions)} sessions; expected "
                             "one for each, of 65535 indices at most")
        entries = make_entries(sessions, append=drafted)
        entries["list_token"] = [len(k) for k in lists]
        entries["row"] = np.cumsum([0] + [len(k) for k in lists[:-1]])
        flat = np.concatenate(lists) if lists else np.zeros(0, np.int32)
        placed, = self._place([flat if flat.size else np.zeros(1, np.int32)])
        code = lib.kvq_accept(self.pointer, placed.buffer.pointer, placed.offset,
                              entries.ctypes.data, len(entries))
        take_counts(sessions, entries, code)
        check(code, entries)

    @alone
    def read(self, session: kvq.Session, layer: SupportsIndex, start: SupportsIndex = 0,
             tokens: Optional[SupportsIndex] = None, dtype: Dtype = "f32") -> Tuple[Array, Array]:
        """K and V of tokens [start, start + tokens) of one layer (tokens None: all from start, of a
        read-only session those that its writer has committed by now), dequantized, in the engine's
        basis: two arrays [tokens][kv_heads][dim] of dtype, shorter where the session ends and where
        the layer's window has let tokens go."""
        session, = batch([session], self.client, kvq.Session)
        start = integer("start", start, 64)
        if tokens is None:
            if session.read_only:  # its writer goes on without our being told
                session.refresh()
            tokens = max(session.tokens - start, 0)
        asked = self._there(session, start, integer("tokens", tokens))
        row = session.layer(integer("layer", layer))
        shape = (row.kv_heads, row.head_dim, row.dim_of_v)
        kind = numpy_dtype(dtype)
        arrays = [np.empty((asked, shape[0], dim), kind) for dim in shape[1:]]
        placed = self._place(arrays, arrays)
        tensors = [p.tensor(dtype) for p in placed]
        entries = make_entries([session], append=asked)
        entries["position"] = start
        work = _ffi.Work(layer=layer, k=tensors[0], v=tensors[1])
        marks = placed[0].array[:, 0, 0].view(np.uint32 if kind.itemsize == 4 else np.uint16)
        marks[...] = NANS[dtype_code(dtype)]  # no token has one: where it stays none was written
        check(lib.kvq_read(self.pointer, byref(work), entries.ctypes.data, 1), entries)
        count = int(entries["value"][0])
        first = int((marks != NANS[dtype_code(dtype)]).argmax()) if count else 0
        result = tuple(p.array[first:first + count].copy() for p in placed)
        if self._staging is not None and self._staging.nbytes > KEPT:
            staging, self._staging = self._staging, None
            with suppress(Error):  # the daemon has ended meanwhile; what was read stands
                staging.close()
        return result

    @staticmethod
    def _there(session, start, tokens):
        """How many tokens a read has to ask for: no more than the session may have from start on,
        since there is room for all that are asked for. At least 1, if any are, so that the daemon
        says whether start is right. Of a session that has gone on without us the daemon knows."""
        if start + tokens > session.tokens:
            tokens = min(tokens, max(session.info()["tokens"] - start, 1))
        return tokens


def make_work(fields: Dict[str, Any]) -> Tuple[_ffi.Work, Dict[str, Any]]:
    """struct kvq_work, and its tensors by name, whose buffers are open."""
    tensors, others = {}, {}
    for name, field in fields.items():
        if field is None:
            continue
        if name in TENSORS:
            owner(name, field)
            tensors[name] = field
        else:
            others[name] = integer(name, field, 32 if name in ("layer", "flags") else 64)
    return _ffi.Work(**others, **tensors), tensors


def make_entries(sessions: Iterable[kvq.Session], append: Counts = 0,
                 queries: Counts = 0) -> Entries:
    """One ENTRY for each session, rows and query rows one behind the other: an array [sessions].
    append and queries: numbers of tokens, for all or for each."""
    sessions = list(sessions)
    n = len(sessions)
    entries = np.zeros(n, ENTRY)
    entries["session"] = [s.handle for s in sessions]
    entries["position"] = [integer("session.tokens", s.tokens, 64) for s in sessions]
    for name, told, rows in (
            ("append", counts("tokens", append, np.uint32, n), "row"),
            ("queries", counts("queries", queries, np.uint16, n), "q_row")):
        entries[name] = told
        *starts, end = accumulate(told, initial=0)
        if end > 0xffffffff:
            raise ValueError(f"{end} rows of {name} together; they can be 4294967295")
        entries[rows] = starts
    return entries


def step_work(client, sessions, entries, k, v):
    """struct kvq_step_work of K and V of each layer, and the buffers that they lie in."""
    k, v, layers = list(k), list(v), len(sessions[0].layers)
    if not len(k) == len(v) == layers:
        raise ValueError(f"K of {len(k)} and V of {len(v)} layers were given; expected {layers}, "
                         "None for those that read another layer's cache")
    work, used = _ffi.StepWork(n_layers=layers), []
    for name, arrays in (("k", k), ("v", v)):
        made = (_ffi.Tensor * layers)()
        for i, given in enumerate(arrays):
            if given is None:
                continue
            given = Shapes(sessions, i, entries).check(name, given)
            buffer = client.find_buffer(given)
            if buffer is None:
                raise ValueError(f"{name} of layer {i} lies in no buffer")
            made[i] = buffer.tensor(given)
            used.append(buffer)
        setattr(work, name, made)
    return work, used


def _page_fields(queue, sessions, layer, pages, entries, dtype):
    """Fields of struct kvq_work for paged K and V; fills the entries' lists in."""
    if not isinstance(pages, Pages):
        raise TypeError(f"pages is {type(pages).__name__}; expected Pages")
    row, n = sessions[0].layer(integer("layer", layer)), len(sessions)
    Shapes(sessions, layer, entries)  # all alike
    found, arrays = [], []
    for name, given, dim in (("k", pages.k, row.head_dim), ("v", pages.v, row.dim_of_v)):
        shape = tuple(getattr(given, "shape", ()))
        size = shape[:2] if len(shape) == 4 else (1, 1)
        arrays.append(check_array(f"pages.{name}", given, (*size, row.kv_heads, dim),
                                  "[pages][page_tokens][kv_heads][dim]"))
        if 0 in size:
            raise ValueError(f"pages.{name} has shape {given.shape}: no page, or no token in one")
        found.append(queue.client.find_buffer(given))
    if None in found:
        raise ValueError("a paged cache must lie in a buffer")
    k, v = arrays
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"pages.k has {k.shape[:2]} pages and tokens in each, pages.v "
                         f"{v.shape[:2]}")
    size = k.shape[1]
    lists = [integers("pages.lists", p, np.int32).ravel() for p in pages.lists]
    skip = integers("pages.skip", 0 if pages.skip is None else pages.skip, np.uint16, (n,))
    if len(lists) != n:
        raise ValueError(f"pages.lists has {len(lists)} lists for {n} sessions")
    for i, (own, first, tokens) in enumerate(zip(lists, skip, entries["append"])):
        need = -(-(int(first) + int(tokens)) // size)
        if len(own) < need or (own < 0).any() or (own >= len(k)).any():
            raise ValueError(f"pages.lists[{i}] is {own.tolist()[:8]}; expected at least {need} "
                             f"numbers of pages below {len(k)}")
    entries["row"] = np.cumsum([0] + [len(p) for p in lists[:-1]])
    entries["list_token"] = skip
    tensors = [buffer.tensor(a[0], _kind("pages", given, dtype))
               for buffer, a, given in zip(found, arrays, (pages.k, pages.v))]
    for tensor, buffer, a in zip(tensors, found, arrays):
        tensor.offset = a.ctypes.data - buffer.address
    table = Buffer(queue.client, max(sum(p.nbytes for p in lists), 1))
    flat = np.concatenate(lists)
    table.array(flat.shape, np.int32)[...] = flat
    fields = _ffi.Pages(size, k.strides[0], v.strides[0], table.pointer, 0)
    fields.owner = table
    return {"k": tensors[0], "v": tensors[1], "pages": fields}, table


def _kind(name, array, dtype):
    """What an array holds: uint16 arrays what dtype says, others what they are."""
    if is_tensor(array):
        return own_code(name, array, dtype)
    if array.dtype != np.uint16:
        if dtype is not None and numpy_dtype(dtype) != array.dtype \
                and numpy_dtype(dtype).itemsize == array.itemsize:
            raise TypeError(f"dtype {dtype!r} of an array of {array.dtype}: only uint16 arrays "
                            "hold another one, bf16 or f16")
        return None
    return dtype if dtype is not None and dtype_code(dtype) != F32 else None


def _share(one, other):
    """Whether two arrays have bytes in common, or may have: where that is too hard to tell."""
    try:
        return np.may_share_memory(one, other) and np.shares_memory(one, other, max_work=1 << 16)
    except RuntimeError:
        return True


class Done(NamedTuple):
    """A request that was done: its results, and by name what it was made of."""
    out: Output
    lse: Optional[Floats]
    work: _ffi.Work
    arrays: Dict[str, Optional[Array]]  # k, v, q and out as they were given, tensors as arrays
    placed: Dict[str, Placed]           # these where the library found them, and lse


def attend(*arguments, **options):
    """ask() for (out, lse) alone."""
    return ask(*arguments, **options)[:2]


def ask(queue, operation, sessions, entries, step, layer, *, k=None, v=None, q=None, out=None,
        lse=True, past_only=False, dtype=None, out_dtype=None, pages=None, timeout=None):
    """One request of append, attend or both. Its results are `out` as given, or a new array of
    out_dtype (default f32), and lse [queries][heads] fp32, or None if lse is False. What is copied
    is copied once: inputs to the staging buffer, results from there."""
    shapes = Shapes(sessions, layer, entries)
    if not isinstance(lse, bool) or not isinstance(past_only, bool):
        raise TypeError(f"lse is {lse!r}, past_only is {past_only!r}; each is True or False")
    if q is None and out is not None:
        raise ValueError("out was given, but no q")
    want_lse = q is not None and lse
    if q is not None and out is None:
        out = np.empty(shapes.of["out"], numpy_dtype(out_dtype or "f32"))
    log_sum = np.empty(shapes.of["lse"], np.float32) if want_lse else None
    fields, table = {}, None
    if pages is not None and (k is not None or v is not None):
        raise ValueError("pages were given, and k or v as well")
    given = {"q": q, "out": out, "k": k, "v": v}
    arrays = {n: None if a is None else shapes.check(n, a, written=n == "out")
              for n, a in given.items()}
    for n in "qkv":
        if out is not None and arrays[n] is not None and _share(arrays["out"], arrays[n]):
            raise ValueError(f"out overlaps {n}, which is read while out is written: give an array "
                             "of its own")
    kinds = {n: None if a is None else _kind(n, a, out_dtype or dtype if n == "out" else dtype)
             for n, a in given.items()}
    deadline = 0 if timeout is None else max(time.monotonic_ns() + nanoseconds(timeout), 1)
    if timeout is not None and timeout < 0:
        deadline = 1
    names = ("k", "v", "q", "out")
    results = [x for x in (arrays["out"], log_sum) if x is not None]
    places = queue._place([*(arrays[n] for n in names), log_sum], results)
    placed = {n: own for n, own in zip((*names, "lse"), places) if own is not None}
    try:
        if pages is not None:
            fields, table = _page_fields(queue, sessions, layer, pages, entries, dtype)
        for name, own in placed.items():
            fields[name] = own.tensor(kinds[name]) if name != "lse" else \
                own.buffer.strided(own.offset, *own.array.strides, F32)
        ticket = queue.call(operation, entries, step=step, layer=layer, deadline_ns=deadline,
                            flags=PAST_ONLY if past_only else 0, **fields)
    finally:
        if table is not None:
            table.close()
    for result, own in ((arrays["out"], placed.get("out")), (log_sum, placed.get("lse"))):
        if own is not None and own.copied:
            fetch(result, own.array, ticket.entries)
    check(0, ticket.entries)
    return Done(out, log_sum, ticket.work, arrays, placed)


def fetch(result, staged, entries):
    """Rows of a result from where the daemon wrote them; those of entries that failed stay."""
    if (entries["status"] == 0).all():
        result[...] = staged
        return
    for entry in entries[entries["status"] == 0]:
        rows = slice(int(entry["q_row"]), int(entry["q_row"]) + int(entry["queries"]))
        result[rows] = staged[rows]


def device_fields(client, check_shape, tensors):
    """Fields of struct kvq_work: CUDA tensors that lie in buffers."""
    fields = {}
    for name, tensor in tensors.items():
        if name not in ("k", "v", "q", "out", "lse"):
            raise TypeError(f"{name} is no tensor of a request; k, v, q, out and lse are")
        check_shape(name, tensor)
        buffer = client.find_device_buffer(tensor)
        if buffer is None:
            raise ValueError(f"{name} lies in no buffer; see Client.import_tensor")
        fields[name] = buffer.tensor(tensor)
    return fields


def take_counts(sessions, entries, code):
    """Sessions take what a commit says: their new counts, where it did not fail, or on a GPU failed
    behind what it had stored."""
    for session, entry in zip(sessions, entries):
        behind = entry["status"] == Code.E_UNSUPPORTED and entry["value"] > session.tokens
        if code == 0 and (entry["status"] == 0 or behind):
            session.tokens = int(entry["value"])


def refresh(sessions):
    """Sessions take their counts from the daemon, those that can."""
    for session in sessions:
        with suppress(Error):
            session.refresh()
