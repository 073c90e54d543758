# SPDX-License-Identifier: Apache-2.0
"""The connection and its sessions."""
from __future__ import annotations

import math
import os
import sys
import weakref
from contextlib import suppress
from ctypes import byref, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from functools import partial
from typing import (Any, Callable, Dict, Iterable, List, Optional, Sequence, SupportsIndex, Tuple,
                    Union)

import numpy as np
import numpy.typing as npt

from . import _ffi
from ._ffi import lib
from .buffers import Buffer, Buffers, dtype_code, numpy_dtype
from .checks import Gate, choice, integer, integers, number, text
from .errors import Code, Error, check, last_text
from .gpu import DeviceBuffer
from .hints import Array, CudaTensor, Ids, Shape, Span
from .private import clients, private_daemon, start_again
from .shown import Shown, number_of, quoted
from .views import bounds, host_bounds, is_tensor
from .work import Queue

MAX_HEAD_DIM = 256  # kvqd stores heads of up to 64, 128 and 256 dimensions as these

_ROTATIONS = {"default": 0, "engine": 1, "daemon": 2, "none": 3}
_ATTENTION = {"default": 0, "exact": 1, "fast": 2}
_DETACH = {"default": 0, "drop": 1, "keep": 2, "save": 3}
_FLAGS = {"read_only": 1, "take_over": 2, "must_exist": 4, "must_create": 8,
          "exact_prompt": 16, "packed_prompt": 32}


@dataclass
class Layer:
    """One row of a session's table of layers; struct kvq_layer says what each field means. Windows
    are in tokens; head_dim and v_dim are in values."""
    q_heads: int
    kv_heads: int
    head_dim: int
    v_dim: Optional[int] = None  # None: head_dim
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    format: Optional[str] = None
    kv_from: Optional[int] = None  # number of the layer whose cache it reads; None: its own
    repeat: int = 1

    @property
    def dim_of_v(self) -> int:
        """v_dim, or head_dim where that is None."""
        return self.head_dim if self.v_dim is None else self.v_dim

    def _row(self):
        return _ffi.LayerRow(integer("q_heads", self.q_heads, 16),
                             integer("kv_heads", self.kv_heads, 16),
                             integer("head_dim", self.head_dim, 16),
                             integer("v_dim", self.dim_of_v, 16),
                             integer("window", self.window), number("softcap", self.softcap),
                             number("scale", self.scale), text("format", self.format),
                             0 if self.kv_from is None else integer("kv_from", self.kv_from, 8) + 1,
                             integer("repeat", self.repeat))


def _rows(layers: Iterable[Layer]) -> Tuple[List[Layer], Any]:
    """Layers as a list, and struct kvq_layer of each."""
    layers = list(layers)
    for i, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise TypeError(f"layers[{i}] is {type(layer).__name__}; expected a Layer")
    return layers, (_ffi.LayerRow * max(len(layers), 1))(*(layer._row() for layer in layers))


def _values(structure):
    values = {name: getattr(structure, name) for name, *_ in structure._fields_ if name != "size"}
    return {n: v.decode(errors="replace") if isinstance(v, bytes) else v
            for n, v in values.items()}


class Session(Shown):
    """A session handle. `tokens` is the committed count as this process knows it. A session that
    was closed, or that Client.reattach() has lost, has the handle 0, and close() does nothing. One
    that nothing refers to any more stays open in the daemon until the client is closed: close()
    sessions and forks, or use them as context managers."""

    def __init__(self, client: Client, handle: int, tokens: int, layers: List[Layer],
                 read_only: bool = False, name: Optional[str] = None, format: str = "") -> None:
        self.client = client
        self.handle = handle
        self.tokens = tokens
        self.layers = layers  # of Layer, one for each layer
        self.read_only = read_only
        self._name, self._format = name, format
        client._sessions.add(self)

    @property
    def name(self) -> Optional[str]:
        """By which others find it; None: it has none."""
        return self._name

    @property
    def format(self) -> str:
        """The format that it was made with, by name; layers may have others."""
        return self._format

    def _told(self):
        if self.handle and self.client.pointer:
            state = ", read-only" if self.read_only else ""
        else:
            state = ", closed"
        return (f"{quoted(self.name)}{self.format}: {number_of('token', self.tokens)}, "
                f"{number_of('layer', len(self.layers))}{state}")

    def layer(self, number: int) -> Layer:
        """The Layer of that number."""
        if not self.layers:
            raise ValueError("the daemon, of an earlier version, does not say what layers the "
                             "session has: open it with them")
        if not 0 <= number < len(self.layers):
            raise Error(Code.E_SHAPE, f"layer {number}: the session has {len(self.layers)} layers,"
                                      f" 0 to {len(self.layers) - 1}")
        return self.layers[number]

    def info(self) -> Dict[str, Any]:
        """What the daemon knows of it, as a dict with the fields of struct kvq_session_info."""
        out = _ffi.SessionInfo()
        self.client.control(lib.kvq_session_info, self.handle, byref(out))
        return _values(out)

    def refresh(self) -> int:
        """Takes the committed count from the daemon and returns it."""
        self.tokens = self.info()["tokens"]
        return self.tokens

    def close(self) -> None:
        """Detaches; the session goes by its on_detach. Does nothing once the client is closed,
        which has detached it. Where it fails with E_DEADLINE it can be called again."""
        if not self.handle:
            return
        handle, self.handle = self.handle, 0
        if self.client._gate.is_left() or not self.client.pointer:
            return
        try:
            self.client.control(lib.kvq_session_close, handle)
        except Error as error:
            if error.code == Code.E_DEADLINE:
                self.handle = handle
            raise

    def tell_spans(self, spans: Iterable[Span]) -> None:
        """Says what tokens to come stand for: (first, tokens, digest of 32 bytes) of each image or
        audio."""
        spans = list(spans)
        self.client.control(lib.kvq_session_spans, self.handle, make_spans(spans), len(spans))

    def move(self, place: str) -> None:
        """Moves it to "host" or a GPU's place, and returns when it is there."""
        self.client.control(lib.kvq_session_move, self.handle, text("place", place))

    def park(self) -> None:
        """Writes it to disk with all its shards, and returns when its memory is free.

        It comes back when it is used."""
        self.client.control(lib.kvq_session_park, self.handle)

    def prefetch(self) -> None:
        """Begins to bring it back from disk, and returns at once."""
        self.client.control(lib.kvq_session_prefetch, self.handle)

    def pin(self, pinned: bool = True) -> None:
        """Keeps it in memory: it is never parked. With False it may be."""
        self.client.control(lib.kvq_session_pin, self.handle, int(bool(pinned)))

    def save(self) -> None:
        """Saves it with all its shards, and returns when that is durable."""
        self.client.control(lib.kvq_session_save, self.handle)

    def drop(self) -> None:
        """Destroys the session, with all its shards. Where that fails the handle stays open."""
        self.client.control(lib.kvq_session_drop, self.handle)
        self.handle = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except Error as error:
            # Its daemon is gone, or it was dropped meanwhile: closed either way.
            if error.code not in (Code.E_DISCONNECTED, Code.E_STALE):
                raise


def make_spans(spans: Sequence[Span]) -> Any:
    """struct kvq_span of (first, tokens, digest of 32 bytes) each."""
    made = (_ffi.Span * max(len(spans), 1))()
    for i, (first, tokens, digest) in enumerate(spans):
        if not isinstance(digest, (bytes, bytearray)) or len(digest) != 32:
            raise ValueError(f"span {i} has the digest {digest!r}; expected 32 bytes")
        made[i] = _ffi.Span(integer(f"first of span {i}", first, 64),
                            integer(f"tokens of span {i}", tokens), (c_uint8 * 32)(*digest))
    return made


class Client(Shown):
    """A connection to kvqd. Any number of threads may use it; each needs a Queue of its own. It is
    for the process that made it: in a forked one calls raise ValueError, and close() of it and of
    what it has made only lets go. Close it, or use it as a context manager: one that nothing refers
    to any more, nor to its queues, sessions and buffers, is closed when Python collects it, which
    may be late. While arrays of a buffer that the daemon made are there it stays open.

    runtime_dir names the daemon's directory, else KVQ_RUNTIME_DIR. Without either it is the
    machine's daemon, or, where none is running, one that is started for this process
    (private_daemon); private says that it must be that one (True) or must not (False). name is for
    people, e.g. "myengine 1.2". timeout_ms: for connecting and control calls, in milliseconds; 0:
    5000. spin_us: the longest time to spin before sleeping, in microseconds; 0: adaptive."""

    def __init__(self, runtime_dir: Union[str, os.PathLike[str], None] = None,
                 name: Optional[str] = None, timeout_ms: SupportsIndex = 0,
                 spin_us: SupportsIndex = 0, private: Optional[bool] = None) -> None:
        self.pointer = c_void_p()
        self._private: Optional[str] = None  # the directory of this process's own daemon
        self._connection = 0  # which one it is: reattach() makes the next
        self._gate = Gate("client")
        self._buffers = Buffers()
        self._device_buffers = Buffers()
        self._queues: List[Queue] = []
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        if private and runtime_dir:
            raise ValueError(f"runtime_dir is {runtime_dir!r} and private True: give one of them")
        told = runtime_dir or os.environ.get("KVQ_RUNTIME_DIR")
        self._directory = os.fsdecode(told) if told else None  # else where the library looks
        options = _ffi.ConnectOptions(runtime_dir=text("runtime_dir",
                                                       runtime_dir and os.fsdecode(runtime_dir)),
                                      name=text("name", name),
                                      timeout_ms=integer("timeout_ms", timeout_ms),
                                      spin_us=integer("spin_us", spin_us))
        code = Code.E_NO_DAEMON
        if not private:
            code = lib.kvq_connect(byref(options), byref(self.pointer))
        if code == Code.E_NO_DAEMON and (private or private is None and not told):
            self._private = self._directory = private_daemon()
            options.runtime_dir = text("runtime_dir", self._private)
            code = lib.kvq_connect(byref(options), byref(self.pointer))
            if code == Code.E_NO_DAEMON and start_again(self._private):  # it was about to end
                code = lib.kvq_connect(byref(options), byref(self.pointer))
        if code == Code.E_NO_DAEMON and private is None and told and not runtime_dir:
            raise Error(code, f"{last_text()}; or unset KVQ_RUNTIME_DIR, and Python starts one")
        check(code)
        if self._private:
            clients.add(self)

    def _told(self):
        where = f"of {self._directory!r}" if self._directory else "of the machine's daemon"
        if not self.pointer or self._gate.closed:
            return f"{where}: closed"
        buffers = len(self._buffers) + len(self._device_buffers)
        left = ", of the process that this one was forked from" if self._gate.is_left() else ""
        return (f"{where}: {number_of('queue', len(self._queues))}, "
                f"{number_of('session', len(self._sessions))}, "
                f"{number_of('buffer', buffers)}{left}")

    def control(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls a function of the library's that takes the client first. ValueError if the client
        is closed."""
        self._gate.run(self._control, function, *arguments)

    def _control(self, function, *arguments):
        check(function(self.pointer, *arguments))

    def info(self) -> Dict[str, Any]:
        """About the daemon, as a dict with the fields of struct kvq_daemon_info."""
        out = _ffi.DaemonInfo()
        self.control(lib.kvq_daemon_info, byref(out))
        return _values(out)

    def gpus(self) -> List[Dict[str, Any]]:
        """The daemon's GPUs: dicts with "place", for session() and buffer_on(), and "name"."""
        found, n = (_ffi.GpuInfo * 16)(), c_uint32()
        self.control(lib.kvq_daemon_gpus, found, len(found), byref(n))
        return [_values(g) for g in found[:n.value]]

    def queue(self) -> Queue:
        """A new Queue, for one thread at a time."""
        return Queue(self)

    def buffer(self, nbytes: SupportsIndex, daemon_made: bool = False) -> Buffer:
        """Shared memory of so many bytes: Python's own, or made by the daemon."""
        return Buffer(self, nbytes, daemon_made)

    def import_memfd(self, memfd: int, nbytes: SupportsIndex, offset: int = 0) -> Buffer:
        """Registers nbytes of a memfd that the caller keeps, from offset (in bytes) on."""
        return Buffer(self, nbytes, memfd=memfd, offset=offset)

    def buffer_on(self, nbytes: SupportsIndex, gpu: Optional[str] = None) -> DeviceBuffer:
        """Memory of a GPU, of so many bytes, made by the daemon; gpu is its place, None the current
        context's."""
        return DeviceBuffer(self, nbytes, gpu=gpu)

    def import_tensor(self, tensor: CudaTensor) -> DeviceBuffer:
        """Registers the memory of a contiguous CUDA tensor, of any shape and dtype (of PyTorch, or
        anything else with data_ptr, numel and element_size), which must stay until the buffer is
        closed."""
        return DeviceBuffer(self, tensor.numel() * tensor.element_size(), tensor=tensor)

    def array(self, shape: Shape, dtype: npt.DTypeLike = np.float32) -> Array:
        """An array in a buffer of its own; shape and dtype as for Buffer.array. The client holds
        the buffer, and with it the memory, until the client is closed, also if the array is let go
        of. To end it earlier, client.find_buffer(array).close(): the array stays as it is then,
        and its memory goes with it."""
        kind = numpy_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
        sizes = [integer("shape", n, 62) for n in np.atleast_1d(np.asarray(shape, object))]
        buffer = self.buffer(max(math.prod(sizes) * kind.itemsize, 1))
        try:
            return buffer.array(shape, dtype)
        except BaseException:
            buffer.close()
            raise

    def find_buffer(self, array: object) -> Optional[Buffer]:
        """The open buffer that holds all of an array, of any shape and dtype, or None."""
        held = host_bounds(array)
        return None if held is None else self._buffers.find(*held)

    def find_device_buffer(self, tensor: CudaTensor) -> Optional[DeviceBuffer]:
        """The open buffer on a GPU that holds all of a CUDA tensor, or None."""
        return self._device_buffers.find(*bounds(tensor)) if is_tensor(tensor) else None

    def restore(self, name: str, ns: Optional[str] = None, shard: SupportsIndex = 0,
                shards: SupportsIndex = 0) -> None:
        """Reads a saved session into the daemon's memory, and returns when all of it is there.
        shards: how many it is to have; 0: as many as it was saved with."""
        self.control(lib.kvq_session_restore, text("ns", ns), text("name", name),
                     integer("shard", shard), integer("shards", shards))

    def _describe(self, layers, format, ns=None, name=None, model=None, dtype=None,
                  v_rotation="default", attention="default", on_detach="default", shard=0, shards=0,
                  max_rollback=0, prompt_tokens=0, keep_seconds=0, place=None, salt=None,
                  adapter=None, prefix=None, spans=(), **flags):
        """struct kvq_session_options, and the buffer of the prefix's ids, to be closed."""
        unknown = set(flags) - set(_FLAGS)
        if unknown:
            raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
        for flag, value in flags.items():
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{flag} is {value!r}; it must be True or False")
        if name == "":
            raise ValueError("name is ''; a session without one has None, and nobody finds it")
        layers, rows = _rows(layers)
        ids = integers("prefix", [] if prefix is None else prefix, np.int32)
        if ids.ndim > 1 and ids.size != ids.shape[-1]:
            raise ValueError(f"prefix has shape {ids.shape}; expected the ids of one session, "
                             "[tokens] or [1][tokens]")
        ids = ids.ravel()
        spans = list(spans)
        described = _ffi.SessionOptions(
            ns=text("ns", ns), name=text("name", name), model=text("model", model),
            layers=rows if layers else None, n_layers=len(layers), format=text("format", format),
            dtype=0 if dtype is None else dtype_code(dtype),
            v_rotation=choice("v_rotation", v_rotation, _ROTATIONS),
            attention=choice("attention", attention, _ATTENTION),
            on_detach=choice("on_detach", on_detach, _DETACH), shard=integer("shard", shard, 16),
            shards=integer("shards", shards, 16), flags=sum(_FLAGS[f] for f in flags if flags[f]),
            max_rollback=integer("max_rollback", max_rollback),
            prompt_tokens=integer("prompt_tokens", prompt_tokens, 64),
            keep_seconds=integer("keep_seconds", keep_seconds, 64), place=text("place", place),
            salt=text("salt", salt), adapter=text("adapter", adapter),
            prefix=_ffi.Prefix(None, 0, 0, make_spans(spans), len(spans)))
        buffer = self.buffer(ids.nbytes) if ids.size else None
        if buffer:
            buffer.array(ids.shape, np.int32)[:] = ids
            described.prefix.buffer, described.prefix.tokens = buffer.pointer, ids.size
        return described, buffer

    def session(self, layers: Iterable[Layer] = (), format: Optional[str] = None,
                **options: Any) -> Session:
        """Opens or creates a session. layers: of Layer; none: of a session that is there. Options
        are

        prefix     array-like of the ids of its first tokens, of which a new session has as many as
                   are there (session.tokens)
        spans      (first, tokens, digest of 32 bytes) of images and audio
        dtype      of the window's values: "f16" or "bf16"; by default that of format "f16" or
                   "bf16", else "f16"
        v_rotation "default", "engine", "daemon", "none"
        attention  "default", "exact", "fast"
        on_detach  "default", "drop", "keep", "save"; keep_seconds: for how many seconds
        read_only, take_over, must_exist, must_create, exact_prompt, packed_prompt
                   flags, all False by default

        and ns, name, model, place, salt, adapter (each a str), shard, shards, max_rollback and
        prompt_tokens (integers, the last two in tokens) as in struct kvq_session_options."""
        layers = list(layers)
        described, ids = self._describe(layers, format, **options)
        handle, info = c_uint64(), _ffi.SessionInfo()
        try:
            self.control(lib.kvq_session_open, byref(described), byref(handle), byref(info))
            # Copies: whoever changes a Layer later does not change what the session has.
            table = [replace(layer) for layer in layers for _ in range(max(layer.repeat, 1))]
            told = _values(info)
            return Session(self, handle.value, info.tokens, table or self._layers_of(handle),
                           bool(info.read_only), told["name"] or None, told["format"])
        except BaseException:  # an interrupt comes right behind the call, and nobody has the handle
            if handle.value:
                with suppress(Error):
                    self.control(lib.kvq_session_close, handle)
            raise
        finally:
            if ids:
                ids.close()

    def _layers_of(self, handle):
        """Of a session that was opened as it is; [] if the daemon does not say."""
        rows, n = (_ffi.LayerRow * 256)(), c_uint32()
        try:
            self.control(lib.kvq_session_layers, handle, rows, len(rows), byref(n))
        except Error as error:
            if error.code != Code.E_UNSUPPORTED:
                raise
        return [Layer(r.q_heads, r.kv_heads, r.k_dim, r.v_dim, r.window, r.softcap, r.scale,
                      kv_from=r.kv_from - 1 if r.kv_from else None)
                for r in rows[:n.value]]

    def lookup(self, layers: Iterable[Layer], format: Optional[str] = None, *, prefix: Ids,
               **options: Any) -> int:
        """How many tokens of the prefix (array-like of ids) a new session would begin with, which
        is described as for session()."""
        described, ids = self._describe(list(layers), format, prefix=prefix, **options)
        tokens = c_uint64()
        try:
            self.control(lib.kvq_lookup, byref(described), byref(tokens))
        finally:
            if ids:
                ids.close()
        return tokens.value

    def reattach(self) -> Tuple[bool, int]:
        """Connects again after E_DISCONNECTED. Returns (restarted, lost): whether the daemon was
        restarted, and how many session handles are lost. Queues and buffers go on working. Sessions
        are as closed: open named ones again. A daemon of this process's own is started again if it
        has ended."""
        return self._alone(self._reattach)

    def _reattach(self):
        lost = c_uint32()
        code = lib.kvq_reattach(self.pointer, byref(lost))
        if code == Code.E_NO_DAEMON and self._private and start_again(self._private):
            code = lib.kvq_reattach(self.pointer, byref(lost))
        if code not in (Code.OK, Code.E_EPOCH):
            raise Error(code, last_text())
        self._connection += 1
        for queue in self._queues:  # the library has cancelled what was under way
            queue._nothing_open()
        for session in list(self._sessions):  # another one may get the same handle
            session.handle = 0
        self._sessions.clear()
        return code == Code.E_EPOCH, lost.value

    def _alone(self, call):
        """Calls it while no other thread is in a call of the client or of its queues; else
        RuntimeError."""
        self._gate.check_process()
        call = partial(self._gate.alone, call)
        for queue in list(self._queues):
            call = partial(queue.turn.run, call)
        return call()

    def close(self) -> None:
        """Disconnects; closes what is still open. BufferError while arrays refer to a buffer that
        the daemon made; RuntimeError while another thread is in a call."""
        if not self.pointer:
            return
        if self._gate.is_left():
            self._leave_alone()
            return
        for buffer in [b for b in list(self._buffers) if b._daemon_made]:
            buffer.close()
        self._alone(self._disconnect)
        self._gate.closed = True

    def _disconnect(self):
        for queue in self._queues:
            queue._close_locals()
        open_tickets = [queue._tickets for queue in self._queues]
        self._forget()
        lib.kvq_disconnect(byref(self.pointer))
        del open_tickets  # what streams still owed has come

    def _forget(self):
        for owner in self._buffers + self._device_buffers + self._queues:
            owner._forget()
        self._buffers.clear()
        self._device_buffers.clear()
        self._queues.clear()

    def _leave_alone(self):
        """In a forked process: the connection stays its parent's, so the library is told
        nothing."""
        for queue in self._queues:
            for local in queue._locals:
                local._forget()
        self._forget()
        self.pointer = c_void_p()

    def __del__(self) -> None:
        # Nobody is in a call: who is refers to it. At the interpreter's end daemon threads may be,
        # and the connection ends with the process.
        if not sys.is_finalizing() and getattr(self, "pointer", None):
            with suppress(Exception):  # arrays refer to memory of the daemon's: it stays, then
                self.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
