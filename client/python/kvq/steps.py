# SPDX-License-Identifier: Apache-2.0
"""Steps: what a queue's requests are part of from a step's begin to its end."""
from __future__ import annotations

from contextlib import suppress
from ctypes import byref, c_uint64
from typing import Any, Iterable, Optional, SupportsIndex, Tuple, Type

import kvq

from ._ffi import lib
from .checks import Shapes, batch, in_turn
from .errors import Code, Error, check
from .hints import Counts, CudaTensor, Floats, HostArray, Ids, Output
from .shown import Shown, number_of
from .work import Queue, alone, attend, device_fields, make_entries, refresh, take_counts


class Step(Shown):
    """An open step. Sessions that fail in it raise Error with the entries; the others go on. The
    step is over, at the latest, when its queue is closed."""
    number: Optional[int] = None  # the library's; None: it is over

    def __init__(self, queue: Queue, sessions: Iterable[kvq.Session], tokens: Counts,
                 ids: Optional[Ids] = None) -> None:
        self.queue, self.turn = queue, queue.turn
        self._start(queue, sessions, tokens, ids)

    @in_turn
    def _start(self, queue, *arguments):
        begun = c_uint64()
        queue._check_open()
        if queue._left:
            queue._abort_left()
        self._connection = queue.client._connection
        try:
            self._begin(queue, *arguments, begun)
        except BaseException as error:
            if begun.value and not isinstance(error, Error):  # an interrupt: nobody has it
                self.number = begun.value
                self._leave()
                queue._abort_left()
            raise

    def _begin(self, queue, sessions, tokens, ids, step):
        self.sessions = batch(sessions, queue.client, kvq.Session)
        self.entries = make_entries(self.sessions, append=tokens)
        told = queue._place_ids(self.entries, ids)
        begin = (queue.pointer, self.entries.ctypes.data, len(self.entries))
        code = (lib.kvq_step_begin(*begin, byref(step)) if ids is None else
                lib.kvq_step_begin_ids(*begin, byref(told), byref(step)))
        failed = code == 0 and (self.entries["status"] != 0).any()
        begun = code == 0 and (self.entries["status"] == 0).any()
        if begun:
            self.number = step.value
        if failed:
            try:
                check(code, self.entries)
            finally:
                if begun:
                    self.abort()
        check(code)

    def _told(self):
        of = f"of {number_of('session', len(self.sessions))}"
        is_open = self.number is not None and self.queue.pointer \
            and self._connection == self.queue.client._connection
        return f"{self.number} {of}: open" if is_open else f"{of}: ended"

    def _check_open(self):
        self.queue._check_open()
        if self.number is not None and self._connection != self.queue.client._connection:
            self.number = None  # it has ended with its connection, and another may have the number
        if self.number is None:
            raise ValueError("the step has ended")

    def _entries(self, queries):
        entries = make_entries(self.sessions, append=self.entries["append"], queries=queries)
        return entries

    @alone
    def append(self, layer: SupportsIndex, k: Optional[HostArray] = None,
               v: Optional[HostArray] = None, **options: Any) -> None:
        """Hands over K and V of one layer, [all tokens][kv_heads][dim]: the sessions' rows one
        behind the other, of float16, float32 or uint16. Options are

        dtype    what uint16 arrays hold: "bf16" (None as well) or "f16"
        pages    a Pages instead of k and v
        timeout  in seconds, after which kvq.Error with E_DEADLINE is raised; None: none"""
        attend(self.queue, "append", self.sessions, self._entries(0), self.number, layer, k=k, v=v,
               **options)

    @alone
    def attend(self, layer: SupportsIndex, q: HostArray, queries: Optional[Counts] = None,
               **options: Any) -> Tuple[Output, Optional[Floats]]:
        """Attention of one layer for the last `queries` tokens of each session (None: all of the
        step's): q [all queries][q_heads][head_dim] of float16, float32 or uint16. Returns (out,
        lse): out [all queries][q_heads][v_dim], lse [all queries][q_heads] float32 (natural
        logarithms). Options are

        out        the array or CPU tensor for the output, float16, float32 or uint16; None: a new
                   array
        out_dtype  of a new output (None: "f32"), or what a uint16 one holds
        lse        False: not wanted, None is returned
        past_only  True: attend only to tokens before the step
        dtype, timeout  as for append"""
        entries = self._entries(self.entries["append"] if queries is None else queries)
        return attend(self.queue, "attend", self.sessions, entries, self.number, layer, q=q,
                      **options)

    @alone
    def append_attend(self, layer: SupportsIndex, k: Optional[HostArray], v: Optional[HostArray],
                      q: HostArray, queries: Optional[Counts] = None,
                      **options: Any) -> Tuple[Output, Optional[Floats]]:
        """append and attend in one request, with the arrays and options of both. Returns
        (out, lse)."""
        entries = self._entries(self.entries["append"] if queries is None else queries)
        return attend(self.queue, "append_attend", self.sessions, entries, self.number, layer,
                      k=k, v=v, q=q, **options)

    @alone
    def on_stream(self, operation: str, layer: SupportsIndex, stream: SupportsIndex,
                  queries: Optional[Counts] = None, flags: SupportsIndex = 0,
                  **tensors: CudaTensor) -> None:
        """"append", "attend" or "append_attend" in the order of a CUDA stream (its number), with k,
        v, q, out ([tokens][heads][dim]) and lse ([tokens][heads]) as CUDA tensors in buffers of
        Client.import_tensor or buffer_on. Results are there for later work of the stream."""
        wanted = self.entries["append"] if queries is None else queries
        entries = self._entries(0 if operation == "append" else wanted)
        shapes = Shapes(self.sessions, layer, entries)
        fields = device_fields(self.queue.client, shapes.check_device, tensors)
        ticket = self.queue.call(operation, entries, step=self.number, layer=layer, flags=flags,
                                 stream=stream, **fields)
        check(0, ticket.entries)

    def _leave(self):
        """Gives the step to its queue, whose next call aborts it."""
        if self.number is not None and self._connection == self.queue.client._connection:
            self.queue._left.append(self.number)
        self.number = None

    @alone
    def end(self) -> None:
        """Commits; sessions get their new counts. With E_CREDITS, as where 8 tickets of the queue
        are open, the step stays open: end() it again behind a wait."""
        entries = make_entries(self.sessions, append=self.entries["append"])
        try:
            code = lib.kvq_step_end(self.queue.pointer, self.number, entries.ctypes.data,
                                    len(entries))
            take_counts(self.sessions, entries, code)
        except BaseException:  # an interrupt: before the commit, or behind it
            self._leave()
            self.queue._abort_left()
            refresh(self.sessions)
            raise
        if code != Code.E_CREDITS:
            self.number = None
        check(code, entries)

    @alone
    def abort(self) -> None:
        """Leaves every session as it was."""
        code = lib.kvq_step_abort(self.queue.pointer, self.number, None, 0)
        self.number = None
        check(code)

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], *_: object) -> None:
        if self.number is None:
            return
        try:
            if kind is None:
                self.end()
        finally:  # what end(), or the body, raised is what the caller wants to see
            self._leave()
            with suppress(RuntimeError, ValueError):  # of another thread's turn, or closed
                self.turn.run(self._abort_left)

    def _abort_left(self):
        self.queue._check_open()
        self.queue._abort_all_left()  # as abort() does, which waits for a credit

    def __del__(self) -> None:
        self._leave()
