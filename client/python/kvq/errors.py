# SPDX-License-Identifier: Apache-2.0
"""Status codes and the exception that carries them."""
from __future__ import annotations

import enum
import re
from typing import Any, Optional, Tuple, Union

from ._ffi import lib
from .hints import Entries


class Code(enum.IntEnum):
    """The codes of kvq.h without their prefix KVQ_."""
    OK = 0
    E_INVALID = -1
    E_VERSION = -2
    E_NO_DAEMON = -3
    E_PERMISSION = -4
    E_NO_SESSION = -5
    E_STALE = -6
    E_BUSY = -7
    E_EXISTS = -8
    E_SHAPE = -9
    E_DTYPE = -10
    E_FORMAT = -11
    E_POSITION = -12
    E_BOUNDS = -13
    E_LIMIT = -14
    E_NO_MEMORY = -15
    E_QUOTA = -16
    E_NONFINITE = -17
    E_NO_STEP = -18
    E_INCOMPLETE = -19
    E_ROLLBACK = -20
    E_READ_ONLY = -21
    E_DEADLINE = -22
    E_CANCELLED = -23
    E_DISCONNECTED = -24
    E_EPOCH = -25
    E_PROTOCOL = -26
    E_CREDITS = -27
    E_DRAINING = -28
    E_BUFFER = -29
    E_SYSTEM = -30
    E_UNSUPPORTED = -31
    E_TAKEN = -32
    E_INTERNAL = -33
    E_NO_CLIENT = -34
    E_NO_SPACE = -35
    E_DAMAGED = -36
    E_REMOTE = -37
    E_NO_NAMESPACE = -38


_FUNCTION = re.compile(r'(?<![\w/."-])kvq_[a-z_]+\b(?![/"-])')  # not in a path, nor a name
_HERE = {  # what there is to call here, by the name in C
    "kvq_bucket_open": "Bucket()", "kvq_buffer_create_on": "Client.buffer_on()",
    "kvq_buffer_import": "Client.import_memfd()", "kvq_connect": "Client()",
    "kvq_daemon_gpus": "Client.gpus()", "kvq_daemon_info": "Client.info()",
    "kvq_disconnect": "Client.close()", "kvq_local": "Local",
    "kvq_local_abort": "LocalStep.abort()", "kvq_local_add": "Local.add()",
    "kvq_local_attend_on_stream": "Bucket.attend()", "kvq_local_begin": "Local.step()",
    "kvq_local_begin_on_stream": "Bucket.begin()", "kvq_local_end": "LocalStep.end()",
    "kvq_local_end_on_stream": "Bucket.end()", "kvq_local_open": "Queue.local()",
    "kvq_local_remove": "Local.remove()", "kvq_lookup": "Client.lookup()",
    "kvq_queue_open": "Client.queue()",
    "kvq_queue_wait_for_room": "Queue.wait_for_room()", "kvq_reattach": "Client.reattach()",
    "kvq_session_close": "Session.close()", "kvq_session_drop": "Session.drop()",
    "kvq_session_info": "Session.info()", "kvq_session_layers": "Client.session()",
    "kvq_session_move": "Session.move()", "kvq_session_open": "Client.session()",
    "kvq_session_park": "Session.park()", "kvq_session_pin": "Session.pin()",
    "kvq_session_prefetch": "Session.prefetch()", "kvq_session_restore": "Client.restore()",
    "kvq_session_save": "Session.save()", "kvq_session_spans": "Session.tell_spans()",
    "kvq_step": "Queue.step_whole()", "kvq_step_begin": "Queue.step()",
}


def strerror(code: int) -> str:
    """One sentence for a code."""
    return lib.kvq_strerror(int(code)).decode()


def version() -> str:
    """The library's version, as "0.2.0"."""
    return lib.kvq_version().decode()


def _as_code(value: int) -> Union[Code, int]:
    try:
        return Code(value)
    except ValueError:
        return value


class Error(Exception):
    """A call that failed.

    code     a Code, or the number of one that this package does not know
    text     what was wrong: the value, the limit, what to do
    entries  of a call over a batch: its entries [sessions] with their status and value; else None
    """

    def __init__(self, code: int, text: str, entries: Optional[Entries] = None) -> None:
        self.code = _as_code(code)
        self.text = text
        self.entries = entries
        name = self.code.name if isinstance(self.code, Code) else str(code)
        super().__init__(f"{name}: {text or strerror(code)}")

    def __reduce__(self) -> Tuple[Any, ...]:
        """As pickle and copy make it anew; a pool of processes hands errors on in this way."""
        return type(self), (int(self.code), self.text, self.entries)


def last_text() -> str:
    """What went wrong in this thread's last failed call."""
    said = lib.kvq_error_text().decode(errors="replace")
    return _FUNCTION.sub(lambda found: _HERE.get(found[0], found[0]), said)


def check(code: int, entries: Optional[Entries] = None) -> None:
    """Raises Error for a negative code, or for the first entry that failed."""
    if code:
        raise Error(code, last_text(), entries)
    if entries is not None:
        failed = next(filter(None, entries["status"].tolist()), 0)
        if failed:
            raise Error(failed, last_text(), entries)
