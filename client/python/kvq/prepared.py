# SPDX-License-Identifier: Apache-2.0
"""Attention that was asked for and checked once, and is asked for again with arrays that are alike.

A model's layer is given the same shapes, dtypes and strides token after token, mostly in the same
buffers. So its request is kept as it was made, with the layout of each array. A call whose arrays
have these layouts changes nothing but the places in it; any other call is checked as the first one
was.
"""
from __future__ import annotations

import sys
from ctypes import byref, memmove

import numpy as np

from ._ffi import lib
from .buffers import in_use
from .checks import counts
from .errors import check
from .views import is_tensor, view
from .work import fetch, make_entries

NAMES = "q", "k", "v", "out"
_LONG = "pages", "timeout"  # options of requests that are not kept


def layout(value):
    """All that is checked of an array by itself; arrays of one layout differ in where they lie and
    what they hold. None for what is neither an array of NumPy's own nor a strided tensor of
    PyTorch's."""
    kind = type(value)
    if kind is np.ndarray:
        return kind, value.dtype, value.shape, value.strides, value.flags.writeable
    torch = sys.modules.get("torch")
    if kind is not getattr(torch, "Tensor", None) or value.layout is not torch.strided:
        return None  # others may have no strides to ask for
    return (kind, value.dtype, value.shape, value.stride(), value.device, value.requires_grad,
            value.is_neg())


class Asked:
    """The entries of a step's attentions: one array for all layers that ask for as many queries.
    The library sets the status of each entry in every call."""
    __slots__ = "entries", "status", "pointer", "rows", "_queries", "_state"

    def __init__(self, sessions, append, queries):
        wanted = [max(n, 1) for n in append] if queries is None else \
            counts("queries", queries, np.uint16, len(sessions))
        self.entries = make_entries(sessions, append=append, queries=wanted)
        self.status, self.pointer = self.entries["status"], self.entries.ctypes.data
        self.rows = sum(append), sum(wanted)
        self._queries = queries if queries is None or type(queries) is int else ...
        self._state = self._state_of(sessions)

    @staticmethod
    def _state_of(sessions):
        return [(session.handle, session.tokens) for session in sessions]

    def serve(self, sessions, queries):
        """Whether they are those of a call."""
        return (queries is None or type(queries) is int) and queries == self._queries \
            and self._state_of(sessions) == self._state


class _Known:
    """An array of a request: its layout and the bytes that it has, and where it was the last time,
    in a buffer, or, copied, in the queue's staging buffer."""
    __slots__ = "layout", "nbytes", "copied", "buffer", "offset", "kind", "_tensor"

    def __init__(self, value, array, placed, tensor):
        self.layout, self.nbytes = layout(value), placed.end - placed.start
        self.copied, self.buffer, self.offset = placed.copied, placed.buffer, placed.offset
        self.kind = placed.array.shape, placed.array.dtype
        self._tensor = tensor  # of the request's work

    def find(self, start, buffers):
        """The buffer that an array of the layout, which begins there, is in; the request is told.
        None: it has to be copied, and the last one had not, or the other way round."""
        end, buffer = start + self.nbytes, self.buffer
        if self.copied:
            return buffer if start and buffers.find(start, end) is None else None
        if not (buffer.pointer and buffer.address <= start
                and end <= buffer.address + buffer.nbytes):
            buffer = buffers.find(start, end)
            if buffer is None:
                return None
            self.buffer = buffer
        # Each time: the last call may have been interrupted between the two.
        self._tensor.buffer, self._tensor.offset = buffer.pointer, start - buffer.address
        return buffer

    def staged(self):
        """The copy, as an array."""
        return self.buffer.array(*self.kind, self.offset)


class Prepared:
    """The request of a Local for the attention of one layer."""
    __slots__ = ("_sessions", "_rows", "_options", "_work", "_pointer", "_arrays", "_made",
                 "_staging")

    def __init__(self, sessions, rows, arguments, options, done):
        self._sessions, self._rows, self._options = sessions, rows, options
        self._work, self._pointer = done.work, byref(done.work)
        self._arrays = [None if value is None else
                        _Known(value, done.arrays[name], done.placed[name],
                               getattr(done.work, name))
                        for name, value in zip(NAMES, arguments)]
        # New arrays: the output, if none was given, and the LSE.
        self._made = [_Known(None, own.array, own, None) if own is not None else None
                      for own in (done.placed.get("out") if arguments[3] is None else None,
                                  done.placed.get("lse"))]
        self._staging = next((own.buffer for own in done.placed.values() if own.copied), None)

    @staticmethod
    def of(sessions, rows, arguments, options, done):
        """That of a call which was done, or None: its arrays are not of kinds that can be told by
        their layouts, or the call was a rare one."""
        if any(name in options for name in _LONG):
            return None
        for name, value in zip(NAMES, arguments):
            if value is None:
                continue
            array, own = done.arrays[name], done.placed[name]
            if layout(value) is None or array.size == 0 \
                    or own.copied and not array.flags.c_contiguous:
                return None
        return Prepared(sessions, rows, arguments, options, done)

    def _is_for(self, queue, sessions, rows, options):
        """Whether a call asks for what this one did, but for its arrays."""
        return (rows == self._rows and sessions == self._sessions
                and (self._staging is None or self._staging is queue._staging)
                and options.keys() == self._options.keys()
                and all(options[name] is value for name, value in self._options.items()))

    def _places(self, buffers, arguments):
        """Where each array begins, and the buffers that they are in, or None: they are not alike
        those before."""
        starts, used = [], []
        for known, value in zip(self._arrays, arguments):
            if known is None or value is None:
                if known is not value:
                    return None
                starts.append(0)
                continue
            if layout(value) != known.layout:
                return None
            start = value.ctypes.data if known.layout[0] is np.ndarray else value.data_ptr()
            buffer = known.find(start, buffers)
            if buffer is None:
                return None
            starts.append(start)
            used.append(buffer)
        out = self._arrays[3]
        if out is not None:
            for known, start in zip(self._arrays[:3], starts):
                if known is not None and start < starts[3] + out.nbytes \
                        and starts[3] < start + known.nbytes:
                    return None  # maybe it overlaps what is read while it is written
        return starts, used

    def ask(self, local, sessions, asked, arguments, options):
        """(out, lse) of a call that is alike, else None, and nothing was done."""
        if not self._is_for(local.queue, sessions, asked.rows, options):
            return None
        found = self._places(local.client._buffers, arguments)
        if found is None:
            return None
        starts, used = found
        if self._staging is not None:
            used.append(self._staging)
            for known, start in zip(self._arrays[:3], starts):
                if known is not None and known.copied:
                    memmove(self._staging.address + known.offset, start, known.nbytes)
        own = [known.buffer for known in self._arrays[1:3] if known is not None]
        if not own:  # else this layer's K and V are among those before
            used += local._given
        local._given += own
        check(in_use(used, lib.kvq_local_attend, local.pointer, self._pointer, asked.pointer,
                     len(asked.entries)))
        return self._results(asked, arguments[3], starts[3])

    def _results(self, asked, out, start):
        known = self._arrays[3]
        if any(asked.status.tolist()):
            told = asked.entries.copy()  # the next call writes to that of all layers
            if known is not None and known.copied:
                fetch(view("out", out) if is_tensor(out) else out, known.staged(), told)
            check(0, told)
        if known is not None and known.copied:
            memmove(start, self._staging.address + known.offset, known.nbytes)
        made, lse = (None if new is None else new.staged().copy() for new in self._made)
        return (out if made is None else made), lse
