# SPDX-License-Identifier: Apache-2.0
"""The connection and its sessions."""
from ctypes import byref, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Optional

import numpy as np

from . import _ffi
from ._ffi import lib
from .buffers import Buffer, dtype_code
from .errors import Code, Error, check, last_text
from .gpu import DeviceBuffer
from .work import Queue

_ROTATIONS = {"none": 0, "engine": 1, "daemon": 2}
_ATTENTION = {"exact": 0, "fast": 1, "default": 2}
_DETACH = {"default": 0, "drop": 1, "keep": 2, "save": 3}
_FLAGS = {"read_only": 1, "take_over": 2, "must_exist": 4, "must_create": 8}


@dataclass
class Layer:
    """One row of a session's table of layers; struct kvq_layer says what each field means."""
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: Optional[int] = None  # None: head_dim
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    format: Optional[str] = None
    kv_from: int = -1
    repeat: int = 1

    def _row(self):
        return _ffi.LayerRow(self.q_heads, self.kv_heads, self.head_dim,
                             self.head_dim if self.v_dim is None else self.v_dim, self.window,
                             self.softcap, self.scale, _bytes(self.format), self.kv_from,
                             self.repeat)


def _bytes(text):
    return None if text is None else text.encode()


def _values(structure):
    values = {name: getattr(structure, name) for name, *_ in structure._fields_}
    return {n: v.decode(errors="replace") if isinstance(v, bytes) else v
            for n, v in values.items()}


class Session:
    """A session handle. `tokens` is the committed count as this process knows it."""

    def __init__(self, client, handle, tokens, layers, read_only=False):
        self.client = client
        self.handle = handle
        self.tokens = tokens
        self.layers = layers  # of Layer, one for each layer; [] if opened without a table
        self.read_only = read_only

    def layer(self, number):
        """The Layer of that number. ValueError if the session was opened without a table."""
        if not self.layers:
            raise ValueError("the session was opened without its table of layers: give shapes")
        if not 0 <= number < len(self.layers):
            raise Error(Code.E_SHAPE, f"layer {number}: the session has {len(self.layers)} layers,"
                                      f" 0 to {len(self.layers) - 1}")
        return self.layers[number]

    def info(self):
        """What the daemon knows of it, as a dict with the fields of struct kvq_session_info."""
        out = _ffi.SessionInfo()
        check(lib.kvq_session_info(self.client.pointer, self.handle, byref(out)))
        return _values(out)

    def refresh(self):
        """Takes the committed count from the daemon and returns it."""
        self.tokens = self.info()["tokens"]
        return self.tokens

    def close(self):
        """Detaches; the session goes by its on_detach."""
        if self.handle:
            handle, self.handle = self.handle, 0
            check(lib.kvq_session_close(self.client.pointer, handle))

    def tell_spans(self, spans):
        """Says what tokens to come stand for: (first, tokens, digest) of each image or audio."""
        check(lib.kvq_session_spans(self.client.pointer, self.handle, make_spans(spans),
                                    len(spans)))

    def move(self, place):
        """Moves it to "host" or a GPU's place, and returns when it is there."""
        check(lib.kvq_session_move(self.client.pointer, self.handle, _bytes(place)))

    def park(self):
        """Writes it to disk with all its shards, and returns when its memory is free.

        It comes back when it is used."""
        check(lib.kvq_session_park(self.client.pointer, self.handle))

    def prefetch(self):
        """Begins to bring it back from disk, and returns at once."""
        check(lib.kvq_session_prefetch(self.client.pointer, self.handle))

    def pin(self, pinned=True):
        """Keeps it in memory: it is never parked. With False it may be."""
        check(lib.kvq_session_pin(self.client.pointer, self.handle, int(pinned)))

    def save(self):
        """Saves it with all its shards, and returns when that is durable."""
        check(lib.kvq_session_save(self.client.pointer, self.handle))

    def drop(self):
        """Destroys the session, with all its shards."""
        handle, self.handle = self.handle, 0
        check(lib.kvq_session_drop(self.client.pointer, handle))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.close()
        except Error as error:
            # Its daemon is gone, or it was dropped meanwhile: closed either way.
            if error.code not in (Code.E_DISCONNECTED, Code.E_STALE):
                raise


def make_spans(spans):
    """struct kvq_span of (first, tokens, digest of 32 bytes) each."""
    made = (_ffi.Span * max(len(spans), 1))()
    for i, (first, tokens, digest) in enumerate(spans):
        if len(digest) != 32:
            raise ValueError(f"span {i} has a digest of {len(digest)} bytes; it must have 32")
        made[i] = _ffi.Span(first, tokens, (c_uint8 * 32)(*digest))
    return made


class Client:
    """A connection to kvqd. Any number of threads may use it; each needs a Queue of its own."""

    def __init__(self, runtime_dir=None, name=None, timeout_ms=0, spin_us=0):
        options = _ffi.ConnectOptions(_bytes(runtime_dir and str(runtime_dir)), _bytes(name),
                                      timeout_ms, spin_us)
        self.pointer = c_void_p()
        self._buffers = []
        self._device_buffers = []
        self._queues = []
        check(lib.kvq_connect(byref(options), byref(self.pointer)))

    def info(self):
        """About the daemon, as a dict with the fields of struct kvq_daemon_info."""
        out = _ffi.DaemonInfo()
        check(lib.kvq_daemon_info(self.pointer, byref(out)))
        return _values(out)

    def gpus(self):
        """The daemon's GPUs: dicts with "place", for session() and buffer_on(), and "name"."""
        found, n = (_ffi.GpuInfo * 16)(), c_uint32()
        check(lib.kvq_daemon_gpus(self.pointer, found, len(found), byref(n)))
        return [_values(g) for g in found[:n.value]]

    def queue(self):
        """A new Queue, for one thread at a time."""
        return Queue(self)

    def buffer(self, nbytes, daemon_made=False):
        """Shared memory of so many bytes: Python's own, or made by the daemon."""
        return Buffer(self, nbytes, daemon_made)

    def import_memfd(self, memfd, nbytes, offset=0):
        """Registers memory of a memfd that the caller keeps."""
        return Buffer(self, nbytes, memfd=memfd, offset=offset)

    def buffer_on(self, nbytes, gpu=None):
        """Memory of a GPU made by the daemon; gpu is its place, None the current context's."""
        return DeviceBuffer(self, nbytes, gpu=gpu)

    def import_tensor(self, tensor):
        """Registers the memory of a contiguous CUDA tensor (of PyTorch, or anything else with
        data_ptr, numel and element_size), which must stay until the buffer is closed."""
        return DeviceBuffer(self, tensor.numel() * tensor.element_size(), tensor=tensor)

    def array(self, shape, dtype=np.float32):
        """An array in a buffer of its own."""
        code = np.dtype(dtype) if not isinstance(dtype, str) else None
        itemsize = code.itemsize if code else {1: 2, 2: 2, 3: 4}[dtype_code(dtype)]
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
        return self.buffer(max(nbytes, 1)).array(shape, dtype)

    def find_buffer(self, array):
        """The open buffer that holds all of an array, or None."""
        return next((b for b in self._buffers if b.contains(array)), None)

    def find_device_buffer(self, tensor):
        """The open buffer on a GPU that holds all of a CUDA tensor, or None."""
        return next((b for b in self._device_buffers if b.contains(tensor)), None)

    def restore(self, name, ns=None, shard=0, shards=0):
        """Reads a saved session into the daemon's memory, and returns when all of it is there.
        shards: how many it is to have; 0: as many as it was saved with."""
        check(lib.kvq_session_restore(self.pointer, _bytes(ns), _bytes(name), shard, shards))

    def _describe(self, layers, format, ns=None, name=None, model=None, dtype="f16",
                  v_rotation="none", attention="exact", on_detach="default", shard=0, shards=0,
                  max_rollback=0, prompt_tokens=0, keep_seconds=0, place=None, salt=None,
                  adapter=None, prefix=None, spans=(), **flags):
        """struct kvq_session_options, and the buffer of the prefix's ids, to be closed."""
        unknown = set(flags) - set(_FLAGS)
        if unknown:
            raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
        rows = (_ffi.LayerRow * max(len(layers), 1))(*(layer._row() for layer in layers))
        ids = np.asarray([] if prefix is None else prefix, np.int32).ravel()
        buffer = self.buffer(ids.nbytes) if ids.size else None
        if buffer:
            buffer.array(ids.shape, np.int32)[:] = ids
        told = _ffi.Prefix(buffer and buffer.pointer, 0, ids.size, make_spans(spans), len(spans))
        return _ffi.SessionOptions(
            _bytes(ns), _bytes(name), _bytes(model), rows if layers else None, len(layers),
            _bytes(format), dtype_code(dtype), _ROTATIONS[v_rotation], _ATTENTION[attention],
            _DETACH[on_detach], shard, shards, sum(_FLAGS[f] for f in flags if flags[f]),
            max_rollback, prompt_tokens, keep_seconds, _bytes(place), _bytes(salt),
            _bytes(adapter), told), buffer

    def session(self, layers=(), format=None, **options):
        """Opens or creates a session. layers: of Layer. prefix: ids of its first tokens, of which a
        new session has as many as are there (session.tokens). spans: (first, tokens, digest) of
        images and audio. Flags, all False by default: read_only, take_over, must_exist,
        must_create. The rest is as in struct kvq_session_options."""
        layers = list(layers)
        described, ids = self._describe(layers, format, **options)
        handle, info = c_uint64(), _ffi.SessionInfo()
        try:
            check(lib.kvq_session_open(self.pointer, byref(described), byref(handle), byref(info)))
        finally:
            if ids:
                ids.close()
        table = [layer for layer in layers for _ in range(max(layer.repeat, 1))]
        return Session(self, handle.value, info.tokens, table, bool(info.read_only))

    def lookup(self, layers, format=None, *, prefix, **options):
        """How many tokens of the prefix a new session of these options would begin with."""
        described, ids = self._describe(list(layers), format, prefix=prefix, **options)
        tokens = c_uint64()
        try:
            check(lib.kvq_lookup(self.pointer, byref(described), byref(tokens)))
        finally:
            if ids:
                ids.close()
        return tokens.value

    def reattach(self):
        """Connects again after E_DISCONNECTED. Returns (restarted, lost): whether the daemon was
        restarted, and how many session handles are lost. Queues and buffers go on working."""
        lost = c_uint32()
        code = lib.kvq_reattach(self.pointer, byref(lost))
        if code not in (Code.OK, Code.E_EPOCH):
            raise Error(code, last_text())
        return code == Code.E_EPOCH, lost.value

    def close(self):
        """Disconnects; closes what is still open. BufferError while arrays refer to a buffer that
        the daemon made."""
        if not self.pointer:
            return
        for buffer in [b for b in self._buffers if b._daemon_made]:
            buffer.close()
        for owner in self._buffers + self._device_buffers + self._queues:
            owner._forget()
        self._buffers.clear()
        self._device_buffers.clear()
        self._queues.clear()
        lib.kvq_disconnect(byref(self.pointer))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
