# SPDX-License-Identifier: Apache-2.0
"""Captures: K, V and, if asked for, Q that an engine appends, in a file for tools that make
codebooks and measure formats."""
from __future__ import annotations

import os
from ctypes import byref, c_void_p
from typing import Iterable, Optional, SupportsIndex, Union

import kvq

from . import _ffi
from ._ffi import lib
from .checks import entries, integer, owner, text
from .client import _rows
from .errors import check
from .shown import Shown


class Capture(Shown):
    """A file of captured tokens, made new. Needs no daemon; for one thread at a time.

    layers      as for Client.session
    max_tokens  of all sessions together, the rest is passed over; 0: no limit
    queries     Q as well; each entry then has as many query tokens as tokens
    """

    def __init__(self, path: Union[str, os.PathLike[str]], layers: Iterable[kvq.Layer],
                 model: Optional[str] = None, max_tokens: SupportsIndex = 0,
                 queries: bool = False) -> None:
        self.pointer = c_void_p()
        self._path = os.fsdecode(path)
        layers, rows = _rows(layers)
        options = _ffi.CaptureOptions(layers=rows, n_layers=len(layers), queries=bool(queries),
                                      model=text("model", model),
                                      max_tokens=integer("max_tokens", max_tokens, 64))
        try:
            check(lib.kvq_capture_open(text("path", self._path), byref(options),
                                       byref(self.pointer)))
        except BaseException:
            self.close()  # an interrupt comes right behind the call, and nobody has it
            raise

    def append(self, ticket: kvq.Ticket) -> None:
        """What an append or append_attend handed over, K, V and Q as [tokens][heads][dim]: its
        ticket, once it is done (Queue.call) and before its tensors change. Entries that failed are
        passed over."""
        for name, tensor in ticket.tensors.items():
            owner(name, tensor)
        self._check_open()
        check(lib.kvq_capture_append(self.pointer, byref(ticket.work),
                                     entries(ticket.entries).ctypes.data, len(ticket.entries)))

    def _told(self):
        return f"{self._path!r}: {'open' if self.pointer else 'closed'}"

    def _check_open(self):
        if not self.pointer:
            raise ValueError("the capture is closed")

    @property
    def tokens(self) -> int:
        """Number of tokens begun so far, as one layer counts them."""
        self._check_open()
        return lib.kvq_capture_tokens(self.pointer)

    def close(self) -> None:
        """Writes the counts and closes the file."""
        if self.pointer:
            check(lib.kvq_capture_close(byref(self.pointer)))

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
