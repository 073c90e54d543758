# SPDX-License-Identifier: Apache-2.0
"""Buffers: memory shared with the daemon, seen as NumPy arrays."""
from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from contextlib import suppress
from ctypes import byref, c_void_p
from itertools import accumulate
from typing import (Any, Callable, Dict, Iterable, List, Optional, SupportsIndex, Tuple, TypeVar,
                    cast)

import numpy as np
import numpy.typing as npt

import kvq

from ._ffi import Tensor, lib
from .checks import integer
from .hints import Array, Dtype, HostArray, Shape
from .shown import Shown, number_of
from .views import dtype_of, host_bounds, is_tensor, view

Result = TypeVar("Result")
F16, BF16, F32 = 1, 2, 3
_NUMPY: Dict[int, np.dtype[Any]] = {F16: np.dtype(np.float16), BF16: np.dtype(np.uint16),
                                    F32: np.dtype(np.float32)}
_CODES = {kind: code for code, kind in _NUMPY.items()}
_TORCH = {F16: "float16", BF16: "bfloat16", F32: "float32"}
_NAMES = {"f16": F16, "float16": F16, "bf16": BF16, "bfloat16": BF16, "f32": F32, "float32": F32,
          "uint16": BF16}


def dtype_code(dtype: Dtype) -> int:
    """1, 2 or 3 for a name, a code or a NumPy dtype. bfloat16 travels as uint16."""
    if type(dtype) is int and F16 <= dtype <= F32:
        return dtype
    if isinstance(dtype, np.dtype) and dtype in _CODES:
        return _CODES[dtype]
    if dtype in (F16, BF16, F32) and not isinstance(dtype, (np.dtype, type)):
        return int(cast(int, dtype))
    name = dtype if isinstance(dtype, str) else np.dtype(cast(Any, dtype)).name
    if name not in _NAMES:
        raise TypeError(f"dtype {name}: f16, bf16 (as uint16) and f32 are known")
    return _NAMES[name]


def own_code(name: str, tensor: Any, dtype: Optional[Dtype] = None) -> int:
    """1, 2 or 3 for the dtype of a tensor of PyTorch's; what dtype says may not be another one of
    that size."""
    own = dtype_code(dtype_of(tensor))
    if dtype is not None and dtype_code(dtype) != own \
            and numpy_dtype(dtype).itemsize == tensor.element_size():
        raise TypeError(f"dtype {dtype!r} of {name}, which is {tensor.dtype}: only uint16 arrays "
                        "hold another one, bf16 or f16")
    return own


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """The NumPy dtype that holds values of a dtype."""
    return _NUMPY[dtype_code(dtype)]


def _with(shape: Shape, last: int) -> Tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, SupportsIndex) else tuple(shape)
    return (*(integer("shape", n, 62) for n in sizes), last)


_calls = threading.RLock()  # over the marks of calls; a buffer that is collected takes it in
#                              whatever its thread does
_in_use: Dict[object, List[Any]] = {}  # by the mark of a call the buffers that it has


def _begin_anew():
    """In a forked process: another thread of its parent may have had the lock, or been in a
    call."""
    global _calls
    _calls = threading.RLock()
    _in_use.clear()


os.register_at_fork(after_in_child=_begin_anew)


def _use(mark, buffers):
    held = [b for b in dict.fromkeys(buffers) if b is not None]
    with _calls:
        for buffer in held:
            if not buffer.pointer:
                raise ValueError("the buffer is closed")
        _in_use[mark] = held


def in_use(buffers: Iterable[Any], function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls the function, which hands the buffers to the library: no other thread closes them
    meanwhile. Marks the call as Turn does, so that no KeyboardInterrupt leaves it counted."""
    mark = object()
    try:
        _use(mark, buffers)
        return function(*arguments)
    finally:
        _in_use.pop(mark, None)


def _take_pointer(buffer, let_go):
    """From a buffer that is to be closed, which nobody finds open any more; let_go() may refuse
    that. BufferError while another thread is in a call with the buffer."""
    with _calls:
        callers = sum(any(b is buffer for b in held) for held in list(_in_use.values()))
        if callers:
            raise BufferError(f"{callers} calls of other threads use this buffer of "
                              f"{buffer.nbytes} bytes; let them end first")
        let_go()
        buffer.pointer = c_void_p()


def close_pointer(buffer: Any, let_go: Callable[[], None] = lambda: None) -> None:
    """Closes a buffer for the library. Interrupted, it has or has not, as the buffer's pointer then
    says."""
    pointer = buffer.pointer
    try:
        _take_pointer(buffer, let_go)
        lib.kvq_buffer_close(byref(pointer))
    finally:
        buffer.pointer = pointer  # none, if it was closed


class Buffers(List[Any]):
    """The open buffers of a client, in the order in which they were made, on the host or on GPUs.

    Each layer of a model asks for those of its tensors, so they are sorted by address, once after a
    change. There is no lock: any thread may make a change, and so may a find, in which Python
    collects what had a buffer. A change sets a new mark behind itself; what was sorted counts as
    long as the mark is the one that was read before."""
    mark: object = None
    _sorted: Tuple[object, List[int], List[int], List[Any]] = (None, [], [], [])

    def append(self, buffer: Any) -> None:
        super().append(buffer)
        self.mark = object()

    def remove(self, buffer: Any) -> None:
        super().remove(buffer)
        self.mark = object()

    def discard(self, buffer: Any) -> None:
        """As of a set."""
        with suppress(ValueError):
            self.remove(buffer)

    def clear(self) -> None:
        super().clear()
        self.mark = object()

    def find(self, start: int, end: int) -> Any:
        """The open buffer that holds the bytes from start to before end, or None. Imported memory
        of a GPU may lie in several."""
        held = self._sorted  # once: another thread's find may set an older one
        if held[0] is not self.mark:
            held = self._sort()
        _, starts, reach, buffers = held
        i = bisect_right(starts, start) - 1
        while i >= 0 and end <= reach[i]:
            buffer = buffers[i]
            if buffer.pointer and end <= buffer.address + buffer.nbytes:
                return buffer
            i -= 1
        return None

    def _sort(self):
        mark = self.mark
        buffers = sorted(self, key=lambda b: b.address)
        ends = accumulate((b.address + b.nbytes for b in buffers), max)
        made = mark, [b.address for b in buffers], list(ends), buffers
        self._sorted = made
        return made


class Buffer(Shown):
    """Shared memory that the daemon reads and writes in place.

    Made by Client.buffer. Arrays from array() and tensors from torch() are views of it; passing
    them, or any view of them, to a Queue copies nothing.

    client   its Client
    nbytes   its size in bytes
    address  where it begins in this process
    """

    def __init__(self, client: kvq.Client, nbytes: SupportsIndex, daemon_made: bool = False,
                 memfd: Optional[int] = None, offset: int = 0) -> None:
        nbytes = integer("nbytes", nbytes, 62)
        if nbytes == 0:
            raise ValueError("a buffer of 0 bytes: at least 1 is needed")
        self.client = client
        self.nbytes = nbytes
        self.pointer = c_void_p()
        self._used = 0
        self._closing = threading.Lock()
        self._memory: Any = None
        self._shown: Optional[weakref.ref[Any]] = None  # what is closed of the daemon's
        self._daemon_made = daemon_made
        try:
            client._gate.run(self._open, memfd, offset)
        except BaseException:
            if self.pointer:  # an interrupt: nobody has the buffer
                self.close()
            raise

    def _told(self):
        by = ", made by the daemon" if self._daemon_made else ""
        state = "open" if self.pointer else "closed"
        return f"of {number_of('byte', self.nbytes)} at {self.address:#x}{by}: {state}"

    def _open(self, memfd, offset):
        if self._daemon_made:
            self.client.control(lib.kvq_buffer_create, self.nbytes, byref(self.pointer))
            self.address = lib.kvq_buffer_data(self.pointer)
            self._show()
        else:
            self._import(memfd, offset)
        self.client._buffers.append(self)

    # The mapping is Python's own here, so arrays stay valid after the buffer is closed.
    def _import(self, memfd, offset):
        # What is made here is kept, and closed, in one call of C's each: an interrupt that comes
        # behind a call loses what the call has returned.
        made: List[int] = []
        closing = map(os.close, made)
        try:
            if memfd is None:
                made.extend(map(os.memfd_create, ("kvq-buffer",),
                                (os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,)))
                memfd, = made
                os.ftruncate(memfd, self.nbytes)
            self._memory = mmap.mmap(memfd, self.nbytes, offset=offset)
            self.client.control(lib.kvq_buffer_import_memfd, memfd, offset, self.nbytes,
                                byref(self.pointer))
        finally:
            any(closing)
        self.address = np.frombuffer(self._memory, np.uint8).ctypes.data

    def array(self, shape: Shape, dtype: npt.DTypeLike = np.float32, offset: int = 0) -> Array:
        """An array of that shape over the bytes from offset (in bytes) on. dtype: any of NumPy's
        without objects, or "f16", "bf16" (an array of uint16), "f32"."""
        if isinstance(dtype, str) and dtype in _NAMES:
            dtype = numpy_dtype(dtype)
        if np.dtype(dtype).hasobject:
            raise TypeError(f"dtype {np.dtype(dtype)} in shared memory: expected numbers")
        if self._memory is None:
            raise ValueError("the buffer is closed")
        return np.ndarray(shape, dtype, self._memory, offset)

    def torch(self, shape: Shape, dtype: Any = "f32", offset: int = 0) -> Any:
        """A torch.Tensor of that shape over the bytes from offset (in bytes) on; used in place as
        arrays are. dtype: "f16", "bf16", "f32", or any of PyTorch's. Needs PyTorch."""
        import torch
        kind = getattr(torch, _TORCH[dtype_code(dtype)]) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise TypeError(f"dtype {dtype!r}: expected a torch.dtype, or f16, bf16 or f32")
        size = torch.empty(0, dtype=kind).element_size()
        raw = self.array(_with(shape, size), np.uint8, offset)
        with torch.inference_mode(False):  # else no other mode could write to it
            if raw.size == 0:
                return torch.empty(raw.shape[:-1], dtype=kind)
            flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=raw.nbytes,
                                    offset=offset)
            return flat.view(kind).view(raw.shape[:-1])

    def take(self, shape: Shape, dtype: npt.DTypeLike = np.float32) -> Array:
        """The next array of a buffer used front to back, aligned to 64 bytes; shape and dtype as
        for array()."""
        at = self._used
        made = self.array(shape, dtype, at)
        self._used = at + (made.nbytes + 63 & ~63)
        return made

    def contains(self, array: object) -> bool:
        """Whether all of an array, of any shape and dtype, lies in this buffer, which is open.
        False for what is no array."""
        if not self.pointer:
            return False
        bounds = host_bounds(array)
        return bounds is not None and self.address <= bounds[0] \
            and bounds[1] <= self.address + self.nbytes

    def tensor(self, array: HostArray, dtype: Optional[Dtype] = None) -> Tensor:
        """Tensor for a [tokens][heads][dim] array (dim contiguous) of float16, float32 or uint16,
        or for a CPU tensor of PyTorch, that lies in this buffer. dtype: what a uint16 array holds,
        "bf16" (None as well) or "f16"."""
        if is_tensor(array):
            dtype, array = own_code("the tensor", array, dtype), view("the tensor", array)
        bounds = host_bounds(array)
        assert isinstance(array, np.ndarray) and bounds
        return self._tensor_at(bounds[0] - self.address, bounds[1] - self.address, array, dtype)

    def _tensor_at(self, start, end, array, dtype):
        """tensor() of an array whose bytes are those from start to before end of the buffer."""
        if array.ndim != 3:
            raise ValueError(f"shape {array.shape}: [tokens, heads, dim] is needed")
        code = dtype_code(dtype if dtype is not None else array.dtype)
        if _NUMPY[code] != array.dtype and (code == F32 or array.dtype != np.uint16):
            raise TypeError(f"dtype {dtype} of an array of {array.dtype}: only uint16 arrays hold "
                            "another one, bf16 or f16")
        strides = array.strides
        if array.shape[2] > 1 and strides[2] != array.itemsize:
            raise ValueError("the last dimension of a tensor must be contiguous")
        if min(strides) < 0:
            raise ValueError("a tensor's strides may not be negative")
        if not self.pointer or start < 0 or end > self.nbytes:
            raise ValueError("the array does not lie in this buffer")
        return self.strided(start, strides[0], strides[1], code)

    def strided(self, offset: SupportsIndex, token_stride: SupportsIndex,
                head_stride: SupportsIndex, dtype: Dtype = "f32") -> Tensor:
        """Tensor of [tokens][heads][dim] from offset on; offset and strides are in bytes, and go to
        the daemon as they are given."""
        if not self.pointer:
            raise ValueError("the buffer is closed")
        made = Tensor(self.pointer, integer("offset", offset, 64),
                      integer("token_stride", token_stride, 64),
                      integer("head_stride", head_stride, 64), dtype_code(dtype))
        made.owner = self
        return made

    def _show(self):
        """The memory of one that the daemon made."""
        self._memory = (ctypes.c_uint8 * self.nbytes).from_address(self.address)

    def close(self) -> None:
        """Unregisters it; waits until no request in flight uses it. Interrupted, it can be called
        again.

        BufferError while another thread is in a call with it, such as attention in this process,
        and, of a buffer made by the daemon, while arrays still refer to it.
        """
        if not self.pointer and self not in self.client._buffers:
            return
        if self.client._gate.is_left():
            self._forget()
        else:
            self.client._gate.run(self._close)

    def _close(self):
        with self._closing:
            if self._daemon_made and self._memory is not None:
                self._shown = weakref.ref(self._memory)  # anew: Python's collector clears old ones
            try:
                if self.pointer:  # else another thread was first
                    close_pointer(self, self._let_go)
            finally:
                if not self.pointer:
                    self._forget()
                    self.client._buffers.discard(self)  # until then close() goes on here
                elif self._memory is None and self._shown is not None:
                    self._memory = self._shown()
                    if self._memory is None:
                        self._show()

    def _let_go(self):
        """The mapping of one that the daemon made ends with it: nothing may refer to it any
        more."""
        if self._shown is None:
            return
        self._memory = None
        if self._shown() is not None:
            raise BufferError(f"arrays still refer to this buffer of {self.nbytes} bytes, which "
                              "was made by the daemon; let go of them first")

    def _forget(self):
        """Arrays keep the mapping for as long as they need it; the buffer itself does not."""
        self.pointer = c_void_p()
        self._memory = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
