# SPDX-License-Identifier: Apache-2.0
"""Attention in this process, over the daemon's memory: in-context mode (kvq.h)."""
from ctypes import byref, c_void_p

from . import _ffi
from ._ffi import lib
from .errors import check
from .work import attend, make_entries, step_work

REQUIRE = 1


class Local:
    """Made by Queue.local; for the queue's thread. Sessions are taken in with add().

    Results are those of the queue's own steps, to the bit. Where attention cannot be here it goes
    through the daemon, and `why` says why.
    """

    def __init__(self, queue, place=None, max_tokens=0, require=False):
        self.queue, self.client = queue, queue.client
        self.pointer = c_void_p()
        options = _ffi.LocalOptions(place=place.encode() if place else None, max_tokens=max_tokens,
                                    flags=REQUIRE if require else 0)
        check(lib.kvq_local_open(queue.pointer, byref(options), byref(self.pointer)))

    @property
    def why(self):
        """None if attention runs here, else why it goes through the daemon."""
        text = lib.kvq_local_why(self.pointer)
        return text.decode() if text else None

    def add(self, session):
        """Takes a session in: maps what is not mapped yet."""
        check(lib.kvq_local_add(self.pointer, session.handle))

    def remove(self, session):
        check(lib.kvq_local_remove(self.pointer, session.handle))

    def step(self, sessions, tokens, ids=None):
        """As Queue.step; tokens 0: of reading alone."""
        return LocalStep(self, sessions, tokens, ids)

    def close(self):
        lib.kvq_local_close(byref(self.pointer))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- What work.attend asks of a queue ----

    def _place(self, arrays):
        return self.queue._place(arrays)

    def call(self, _operation, entries, *, step, **fields):
        work = _ffi.Work(**fields)
        check(lib.kvq_local_attend(self.pointer, byref(work), entries.ctypes.data, len(entries)))
        return _Done(entries)


class Bucket:
    """Device memory for the attentions of a step on a GPU (kvq.h, kvq_bucket). For a Local whose
    place is a GPU; its calls take entries (make_entries) and the number of a CUDA stream. attend()
    may be captured into a graph, which replays for whatever entries begin() was given last."""

    def __init__(self, local, session, max_tokens=0, max_sessions=1, max_queries=1):
        self.local = local
        self.pointer = c_void_p()
        options = _ffi.BucketOptions(session=session.handle, max_tokens=max_tokens,
                                     max_sessions=max_sessions, max_queries=max_queries)
        check(lib.kvq_bucket_open(local.pointer, byref(options), byref(self.pointer)))

    def begin(self, entries, stream):
        check(lib.kvq_local_begin_on_stream(self.local.pointer, self.pointer, entries.ctypes.data,
                                            len(entries), stream), entries)

    def attend(self, entries, layer, stream, **tensors):
        """k, v, q, out and lse: CUDA tensors in buffers of Client.import_tensor or buffer_on."""
        work = _ffi.Work(layer=layer)
        for name, tensor in tensors.items():
            buffer = self.local.client.find_device_buffer(tensor)
            if buffer is None:
                raise ValueError(f"{name} lies in no buffer; see Client.import_tensor")
            setattr(work, name, buffer.tensor(tensor))
        check(lib.kvq_local_attend_on_stream(self.local.pointer, self.pointer, byref(work),
                                             entries.ctypes.data, len(entries), stream), entries)

    def end(self, entries, stream, ids=None):
        """Commits; the entries' values are the sessions' new counts. ids: as in Queue.step."""
        work = _ffi.StepWork()
        work.ids = self.local.queue._place_ids(entries, ids)
        check(lib.kvq_local_end_on_stream(self.local.pointer, byref(work), entries.ctypes.data,
                                          len(entries), stream), entries)

    def close(self):
        """When its stream has passed its last work."""
        lib.kvq_bucket_close(byref(self.pointer))


class _Done:
    def __init__(self, entries):
        self.entries = entries


class LocalStep:
    """An open step of a Local."""

    def __init__(self, local, sessions, tokens, ids=None):
        self.local, self.sessions, self.ids = local, list(sessions), ids
        self.entries = make_entries(self.sessions, append=tokens)
        self.open = False
        check(lib.kvq_local_begin(local.pointer, self.entries.ctypes.data, len(self.entries)),
              None)
        self.open = bool((self.entries["status"] == 0).any())
        try:
            check(0, self.entries)
        except Exception:
            self.abort()
            raise

    def attend(self, layer, q, k=None, v=None, queries=None, **options):
        """Attention of one layer. k and v, of the step's tokens, lie in buffers and stay as they
        are until the step's end; None for layers that read another layer's cache. Returns
        (out, lse)."""
        for array in (k, v):
            if array is not None and self.local.client.find_buffer(array) is None:
                raise ValueError("k and v must lie in a buffer: they are read until the step's end")
        append = self.entries["append"]
        wanted = [max(int(n), 1) for n in append] if queries is None else queries
        entries = make_entries(self.sessions, append=append, queries=wanted)
        return attend(self.local, "attend", self.sessions, entries, 0, layer, k=k, v=v, q=q,
                      **options)

    def end(self, k=None, v=None):
        """Commits. k and v: for each layer the step's K and V, if attend() did not get them."""
        entries = make_entries(self.sessions, append=self.entries["append"])
        work = step_work(self.local.client, k, v) if k is not None else _ffi.StepWork()
        work.ids = self.local.queue._place_ids(entries, self.ids)
        code = lib.kvq_local_end(self.local.pointer, byref(work), entries.ctypes.data,
                                 len(entries))
        self.open = False
        for session, entry in zip(self.sessions, entries):
            if code == 0 and entry["status"] == 0:
                session.tokens = int(entry["value"])
        try:
            check(code, entries)
        except Exception:
            self.abort()
            raise

    def abort(self):
        """Leaves every session as it was."""
        self.open = False
        lib.kvq_local_abort(self.local.pointer)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if not self.open:
            return
        if kind is None:
            self.end()
        else:
            self.abort()
