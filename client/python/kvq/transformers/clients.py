# SPDX-License-Identifier: Apache-2.0
"""The clients of the caches of a process: one for all that are given none, and queues of it."""
from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from typing import List, Optional

import kvq

_shared: Optional[kvq.Client] = None
_shared_lock = threading.RLock()  # a cache that is collected takes it in whatever its thread does
_retired: List[kvq.Client] = []  # clients whose daemons have ended, of caches that are still there
# Of the processes that this one was forked from, never closed here.
_inherited: List[Optional[kvq.Client]] = []


def _begin_anew():
    """In a forked process: the connection is its parent's, and so may the lock be."""
    global _shared, _shared_lock, _retired
    _inherited.extend([_shared, *_retired])
    _shared, _shared_lock, _retired = None, threading.RLock(), []


os.register_at_fork(after_in_child=_begin_anew)


def shared_client():
    """One connection for all caches of a process that are given none."""
    global _shared
    with _shared_lock:
        if _shared is None or not _shared.pointer:
            _shared = kvq.Client(name="transformers")
        return _shared


def queue_of(client):
    """A queue for a cache. Where the client has as many as it can, those of caches that nothing
    refers to any more, but for circles, are given back first."""
    try:
        return client.queue()
    except kvq.Error as error:
        if error.code != kvq.Code.E_LIMIT:
            raise
    gc.collect()
    try:
        return client.queue()
    except kvq.Error as error:
        if error.code != kvq.Code.E_LIMIT:
            raise
        raise kvq.Error(error.code, f"{error.text}. A KvqCache has a queue: close() caches that "
                        "are done with, or make further ones with client=kvq.Client()") from None


def close_retired():
    """A client whose daemon has ended holds that daemon's memory as long as it is open: it goes
    with the last cache of it."""
    for client in [c for c in _retired if not c._queues]:
        with suppress(kvq.Error, RuntimeError, ValueError):  # another thread may be in a call
            client.close()
    with _shared_lock:
        _retired[:] = [c for c in _retired if c.pointer]


def shared_queue():
    """The client that all caches share, and a queue of it. Where the client's daemon has ended, a
    new client takes the place of the one before, which caches that are there keep."""
    global _shared
    client = shared_client()
    try:
        return client, queue_of(client)
    except kvq.Error as error:
        if error.code != kvq.Code.E_DISCONNECTED:
            raise
    except ValueError:
        if client.pointer:  # else another thread has found it so, and closed it
            raise
    with _shared_lock:
        if _shared is client:
            _shared = None
            _retired.append(client)
    close_retired()
    client = shared_client()
    return client, queue_of(client)
