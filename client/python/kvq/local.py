# SPDX-License-Identifier: Apache-2.0
"""Attention in this process, over the daemon's memory: in-context mode (kvq.h)."""
from __future__ import annotations

import weakref
from contextlib import suppress
from ctypes import byref, c_void_p, cast
from typing import (Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence,
                    SupportsIndex, Tuple, Type)

import numpy as np

import kvq

from . import _ffi
from ._ffi import lib
from .buffers import in_use
from .checks import (Shapes, batch, device_tensor, entries as check_entries, in_turn, integer,
                     text)
from .errors import Code, check
from .hints import Counts, CudaTensor, Entries, Floats, HostArray, Ids, Output, Threads
from .openmp import torch_threads
from .prepared import Asked, Prepared
from .shown import Shown, number_of
from .work import (alone, ask, device_fields, make_entries, make_work, refresh, step_work,
                   take_counts)

REQUIRE = 1


def _threads(asked):
    """Fields of LocalOptions."""
    if isinstance(asked, str) and asked != "torch":
        raise ValueError(f"threads is {asked!r}; it can be a number, or \"torch\"")
    if asked != "torch":
        return {"threads": integer("threads", asked)}
    number, openmp = torch_threads()
    if openmp is None:
        return {"threads": number}
    return {"threads": number, "parallel": cast(lib.kvq_local_openmp, _ffi.PARALLEL),
            "parallel_context": openmp}


class _Answer(NamedTuple):
    """What work.ask wants of a Ticket."""
    entries: Entries
    work: _ffi.Work


class Local(Shown):
    """Made by Queue.local; for the queue's thread. Sessions are taken in with add().

    Results are those of the queue's own steps, to the bit. Where attention cannot be here it goes
    through the daemon, and `why` says why.

    place       of its sessions: "host" (None as well) or a GPU's
    max_tokens  that one session may have at most, those of the step under way included; 0: 131,072
    require     fail where attention cannot be here
    threads     on the host, how many attend, the caller's included; they are kvq's own. "torch":
                those that PyTorch computes with, for a model whose other operations run on them
    """

    def __init__(self, queue: kvq.Queue, place: Optional[str] = None,
                 max_tokens: SupportsIndex = 0, require: bool = False,
                 threads: Threads = 1) -> None:
        self.queue, self.client, self.turn = queue, queue.client, queue.turn
        self.pointer = c_void_p()
        self._at = "host" if place is None else place
        self._buckets: List[Bucket] = []
        self._given: List[Any] = []  # buffers of K and V of the step under way
        self._prepared: Dict[int, Prepared] = {}  # by layer
        self._found_open: object = None  # the mark of the client's buffers, when these were
        self._orphaned = False  # nobody has the LocalStep under way any more
        self._last: Callable[[], Optional[LocalStep]] = lambda: None  # that was begun
        options = _ffi.LocalOptions(place=text("place", place),
                                    max_tokens=integer("max_tokens", max_tokens, 64),
                                    flags=REQUIRE if require else 0,
                                    **_threads(threads))
        try:
            self._open(options)
        except BaseException:
            if self.pointer:  # an interrupt: nobody has it
                self._close()
            raise

    @in_turn
    def _open(self, options):
        self.queue._check_open()
        check(lib.kvq_local_open(self.queue.pointer, byref(options), byref(self.pointer)))
        self.queue._locals.append(self)

    def _told(self):
        if not self.pointer:
            return f"on {self._at!r}: closed"
        return f"on {self._at!r}: open, {'a' if self._has_open_step() else 'no'} step under way"

    def _check_open(self):
        if not self.pointer:
            raise ValueError("the Local is closed")
        if self._orphaned:
            self._abort_orphan()

    def _abort_orphan(self):
        if self.pointer:
            lib.kvq_local_abort(self.pointer)
        self._orphaned = False

    def _has_open_step(self):
        last = self._last()
        return last is not None and last.open

    def _check_given(self):
        mark = self.client._buffers.mark  # else each layer would look at those of all before it
        if mark is not self._found_open:
            if not all(buffer.pointer for buffer in self._given):
                raise ValueError("a buffer with K or V of the step was closed before the step's "
                                 "end")
            self._found_open = mark

    @property
    @alone
    def why(self) -> Optional[str]:
        """None if attention runs here, else why it goes through the daemon."""
        said = lib.kvq_local_why(self.pointer)
        return said.decode() if said else None

    @alone
    def add(self, session: kvq.Session) -> None:
        """Takes a session in: maps what is not mapped yet."""
        session, = batch([session], self.client, kvq.Session)
        check(lib.kvq_local_add(self.pointer, session.handle))

    @alone
    def remove(self, session: kvq.Session) -> None:
        """Takes a session out again; the session stays open."""
        session, = batch([session], self.client, kvq.Session)
        check(lib.kvq_local_remove(self.pointer, session.handle))

    def step(self, sessions: Iterable[kvq.Session], tokens: Counts,
             ids: Optional[Ids] = None) -> LocalStep:
        """As Queue.step; tokens 0: of reading alone."""
        return LocalStep(self, sessions, tokens, ids)

    def close(self) -> None:
        """Closes its Buckets, too."""
        if self.turn.is_left():
            self._forget()
        else:
            self._close()

    @in_turn
    def _close(self):
        if not self.pointer:
            return
        for bucket in list(self._buckets):
            bucket.close()
        self._prepared.clear()
        lib.kvq_local_close(byref(self.pointer))
        with suppress(ValueError):  # its opening was interrupted
            self.queue._locals.remove(self)

    def _forget(self):
        """In a forked process, which has nothing to give back."""
        for bucket in self._buckets:
            bucket._forget()
        self._prepared.clear()
        self.pointer = c_void_p()

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- What work.attend asks of a queue ----

    def _place(self, arrays, results=()):
        return self.queue._place(arrays, results)

    @alone
    def call(self, _operation: str, entries: Entries, *, step: int, **fields: Any) -> _Answer:
        """kvq_local_attend with the fields of struct kvq_work."""
        work, tensors = make_work(fields)
        given = [tensors[n].owner for n in ("k", "v") if n in tensors]
        if self.queue._staging in given:
            raise ValueError("k and v must lie in a buffer: they are read until the step's end")
        self._given += given
        earlier = [] if "k" in tensors else self._given  # else this layer's K and V are among them
        code = in_use([*earlier, *(t.owner for t in tensors.values())], lib.kvq_local_attend,
                      self.pointer, byref(work), entries.ctypes.data, len(entries))
        check(code)
        return _Answer(entries, work)


class Bucket(Shown):
    """Device memory for the attentions of a step on a GPU (kvq.h, kvq_bucket). For a Local whose
    place is a GPU; its calls take entries (make_entries) and the number of a CUDA stream. attend()
    may be captured into a graph, which replays for whatever entries begin() was given last."""

    def __init__(self, local: Local, session: kvq.Session, max_tokens: SupportsIndex = 0,
                 max_sessions: SupportsIndex = 1, max_queries: SupportsIndex = 1) -> None:
        self.local, self.turn = local, local.turn
        self.pointer = c_void_p()
        self._session, = batch([session], local.client, kvq.Session)
        # Of each layer: what a captured graph goes on reading.
        self._tensors: Dict[int, Dict[str, Any]] = {}
        options = _ffi.BucketOptions(session=session.handle,
                                     max_tokens=integer("max_tokens", max_tokens, 64),
                                     max_sessions=integer("max_sessions", max_sessions),
                                     max_queries=integer("max_queries", max_queries))
        try:
            self._open(options)
        except BaseException:
            if self.pointer:  # as of a Local
                self._close()
            raise

    @in_turn
    def _open(self, options):
        self.local._check_open()
        check(lib.kvq_bucket_open(self.local.pointer, byref(options), byref(self.pointer)))
        self.local._buckets.append(self)

    def _told(self):
        return "open" if self.pointer else "closed"

    def _check_open(self):
        if not self.pointer:
            raise ValueError("the Bucket is closed")
        for layer, fields in self._tensors.items():
            for name, tensor in fields.items():
                if not tensor.owner.pointer:
                    raise ValueError(f"{name} of layer {layer} lies in a buffer that is closed")

    @alone
    def begin(self, entries: Entries, stream: SupportsIndex) -> None:
        """Begins a step over entries [sessions] in the order of the stream."""
        check(lib.kvq_local_begin_on_stream(self.local.pointer, self.pointer,
                                            check_entries(entries).ctypes.data, len(entries),
                                            integer("stream", stream, 64)), entries)

    @alone
    def attend(self, entries: Entries, layer: SupportsIndex, stream: SupportsIndex,
               **tensors: CudaTensor) -> None:
        """k, v, q, out ([tokens][heads][dim]) and lse ([tokens][heads], float32): CUDA tensors in
        buffers of Client.import_tensor or buffer_on, with at least as many rows as the entries
        name."""
        entries, layer = check_entries(entries), integer("layer", layer)
        shapes = Shapes([self._session], layer, entries)

        def check_shape(name, tensor):
            row, count = ("row", "append") if name in ("k", "v") else ("q_row", "queries")
            last = int((entries[row].astype(np.uint64) + entries[count]).max(initial=0))
            rows = max(tensor.shape[0] if len(getattr(tensor, "shape", ())) else 0, last)
            device_tensor(name, tensor, (rows, *shapes.of[name][1:]),
                          shapes.says(name) + ", or more rows")

        fields = device_fields(self.local.client, check_shape, tensors)
        work, self._tensors[layer] = make_work({"layer": layer, **fields})
        code = in_use((tensor.owner for tensor in self._tensors[layer].values()),
                      lib.kvq_local_attend_on_stream, self.local.pointer, self.pointer,
                      byref(work), entries.ctypes.data, len(entries),
                      integer("stream", stream, 64))
        check(code, entries)

    @alone
    def end(self, entries: Entries, stream: SupportsIndex, ids: Optional[Ids] = None) -> None:
        """Commits; the entries' values are the sessions' new counts. ids: as in Queue.step. An
        entry that fails with E_UNSUPPORTED and a value past its position has been committed."""
        check_entries(entries)
        work = _ffi.StepWork()
        work.ids = self.local.queue._place_ids(entries, ids)
        check(lib.kvq_local_end_on_stream(self.local.pointer, byref(work), entries.ctypes.data,
                                          len(entries), integer("stream", stream, 64)), entries)

    def close(self) -> None:
        """When its stream has passed its last work."""
        if self.turn.is_left():
            self._forget()
        else:
            self._close()

    @in_turn
    def _close(self):
        if self.pointer:
            lib.kvq_bucket_close(byref(self.pointer))
            with suppress(ValueError):
                self.local._buckets.remove(self)

    def _forget(self):
        self.pointer = c_void_p()


_ROOM = (Code.E_NO_MEMORY, Code.E_QUOTA, Code.E_DEADLINE)  # there may be some later


class LocalStep(Shown):
    """An open step of a Local."""
    open = False

    def __init__(self, local: Local, sessions: Iterable[kvq.Session], tokens: Counts,
                 ids: Optional[Ids] = None) -> None:
        self.local, self.turn, self.ids = local, local.turn, ids
        self._left: List[int] = []  # numbers of the sessions that are not committed yet
        self._asked: Optional[Asked] = None  # of its last attention
        self._begin(local, sessions, tokens)

    @in_turn
    def _begin(self, local, sessions, tokens):
        local._check_open()
        self.sessions = batch(sessions, local.client, kvq.Session)
        self.entries = make_entries(self.sessions, append=tokens)
        self._append = self.entries["append"].tolist()
        begin = (local.pointer, self.entries.ctypes.data, len(self.entries))
        code = None
        try:
            code = lib.kvq_local_begin(*begin)
            check(code)
            local._given = []
            self.open = bool((self.entries["status"] == 0).any())
            self._left = list(range(len(self.entries)))
            check(0, self.entries)
            local._last = weakref.ref(self)
        except BaseException:
            if not code and not local._has_open_step():  # else that stays so
                self._abort()
            raise

    def _told(self):
        state = "open" if self.open and self.local.pointer else "ended"
        return f"of {number_of('session', len(self.sessions))}: {state}"

    def _check_open(self):
        self.local._check_open()
        if not self.open:
            raise ValueError("the step has ended")

    @alone
    def attend(self, layer: SupportsIndex, q: HostArray, *, k: Optional[HostArray] = None,
               v: Optional[HostArray] = None, queries: Optional[Counts] = None,
               out: Optional[HostArray] = None,
               **options: Any) -> Tuple[Output, Optional[Floats]]:
        """Attention of one layer, with arrays and options as for Step.attend. k and v, of the
        step's tokens, lie in buffers and stay as they are until the step's end; None for layers
        that read another layer's cache. They are named, since Step.append_attend has them before q.
        Returns (out, lse). A layer's call is checked as a whole where its arrays have other shapes,
        dtypes or strides than in the layer's last one."""
        local, asked = self.local, self._asked
        local._check_given()
        if asked is None or not asked.serve(self.sessions, queries):
            self._asked = asked = Asked(self.sessions, self._append, queries)
        arguments = q, k, v, out
        at = layer if type(layer) is int else -1
        known = local._prepared.get(at)
        if known is not None:
            done = known.ask(local, self.sessions, asked, arguments, options)
            if done is not None:
                return done
            del local._prepared[at]
        done = ask(local, "attend", self.sessions, asked.entries.copy(), 0, layer, k=k, v=v, q=q,
                   out=out, **options)
        known = Prepared.of(self.sessions, asked.rows, arguments, options, done)
        if known is not None and at >= 0:
            local._prepared[at] = known
        return done.out, done.lse

    @alone
    def end(self, k: Optional[Sequence[Optional[HostArray]]] = None,
            v: Optional[Sequence[Optional[HostArray]]] = None) -> None:
        """Commits. k and v: for each layer the step's K and V, [tokens][kv_heads][dim] in buffers,
        if attend() did not get them. Where there was no room (E_NO_MEMORY, E_QUOTA, E_DEADLINE)
        the step stays open for the sessions that it lacked for, and without a free ticket
        (E_CREDITS) for all: end() again, or abort()."""
        if (k is None) != (v is None):
            raise ValueError("one of k and v was given; expected both, or neither")
        entries = make_entries(self.sessions, append=self.entries["append"])
        work = _ffi.StepWork()
        used = self.local._given
        if k is not None:
            work, used = step_work(self.local.client, self.sessions, entries, k, v)
        else:
            self.local._check_given()
        work.ids = self.local.queue._place_ids(entries, self.ids)
        entries = entries[self._left]
        try:
            code = in_use(used, lib.kvq_local_end, self.local.pointer, byref(work),
                          entries.ctypes.data, len(entries))
            take_counts([self.sessions[i] for i in self._left], entries, code)
            if not code:
                self._left = [i for i, s in zip(self._left, entries["status"]) if s in _ROOM]
            self.open = bool(self._left) and (not code or code in (*_ROOM, Code.E_CREDITS))
        except BaseException:  # an interrupt: before the commit, or behind it
            self._abort()
            refresh(self.sessions)
            raise
        try:
            check(code, entries)
        except Exception:
            if not self.open:
                self._abort()
            raise

    def abort(self) -> None:
        """Leaves every session as it was. Nothing, if the step has ended or was aborted."""
        if self.turn.is_left():
            self.open = False
        else:
            self.turn.run(self._abort_open)

    def _abort_open(self):
        if self.open:  # else the Local may have another one by now
            self._abort()

    def _abort(self):
        self.local._orphaned = True  # until it is aborted: an interrupt may come before that
        self.open = False
        self.local._abort_orphan()

    def __enter__(self) -> LocalStep:
        return self

    def __del__(self) -> None:
        if self.open:
            self.local._orphaned = True  # whose next call aborts it

    def __exit__(self, kind: Optional[Type[BaseException]], *_: object) -> None:
        if not self.open:
            return
        try:
            if kind is None:
                self.end()
        finally:
            if self.open:
                self.abort()
