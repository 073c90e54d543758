# SPDX-License-Identifier: Apache-2.0
"""What is checked of arguments before the library sees them.

The library takes addresses, strides and counts on trust where a shape is concerned: it has none.
So arrays are held against the session's layers and the step here, and numbers against the C types
that they become. Failures are TypeError, for what can never be such an argument, and ValueError,
with what was expected and what was given.
"""
from __future__ import annotations

import functools
import operator
import os
import threading
from typing import Any, Callable, List, TypeVar, cast

import numpy as np

from ._ffi import ENTRY, Ids, Pages, Tensor
from .views import is_tensor, view

Method = TypeVar("Method", bound=Callable[..., Any])
KINDS = (np.float16, np.uint16, np.float32)  # of K, V, Q and outputs


# ---- Numbers and texts ----

def integer(name: str, value: Any, bits: int = 32) -> int:
    """An int that fits so many bits."""
    if type(value) is int and 0 <= value < 1 << bits:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    low, high = 0, (1 << bits) - 1
    if isinstance(value, (bool, np.bool_)) or not low <= number <= high:
        raise ValueError(f"{name} is {value!r}; it can be {low} to {high}")
    return number


def integers(name, value, dtype, shape=None):
    """An array of that integer dtype; floats and values that do not fit are refused. A single
    number stands for all of shape (n,)."""
    array = np.asarray(value)
    if array.size == 0:
        array = array.astype(dtype)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; it must hold integers")
    limits = np.iinfo(dtype)
    if array.size and not (limits.min <= int(array.min()) and int(array.max()) <= limits.max):
        raise ValueError(f"{name} has values {array.min()} to {array.max()}; they can be "
                         f"{limits.min} to {limits.max}")
    if shape is not None and array.shape not in ((), shape):
        raise ValueError(f"{name} has shape {array.shape}; expected one number, or {shape}: one "
                         "for each session")
    return array.astype(dtype) if shape is None else np.broadcast_to(array.astype(dtype), shape)


def counts(name: str, value: Any, dtype: Any, n: int) -> List[int]:
    """integers() of shape (n,), as a list. Each layer of a model asks for it, mostly with what
    needs no array."""
    limit = np.iinfo(dtype).max
    if type(value) is int:
        value = [value] * n
    elif isinstance(value, np.ndarray) and value.dtype.kind == "u" and value.shape == (n,):
        value = value.tolist()
    if type(value) is list and len(value) == n and all(
            type(x) is int and 0 <= x <= limit for x in value):
        return value
    return integers(name, value, dtype, (n,)).tolist()


def number(name, value):
    """A float."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; it must be a number") from None


def text(name, value):
    """Bytes for C, or None. A NUL would end the text there without anybody noticing."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be a str")
    if "\0" in value:
        raise ValueError(f"{name} {value!r} has a NUL character")
    return value.encode()


def choice(name, value, known):
    """known[value]."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; known are {', '.join(map(repr, known))}")
    return known[value]


# ---- Objects ----

def batch(sessions: Any, client: Any, kind: Any) -> List[Any]:
    """Sessions as a list, all of this client."""
    if isinstance(sessions, kind):
        raise TypeError("sessions is a Session; give a list of them")
    sessions = list(sessions)
    for i, session in enumerate(sessions):
        if not isinstance(session, kind):
            raise TypeError(f"sessions[{i}] is {type(session).__name__}; expected a Session")
        if client is not None and session.client is not client:
            raise ValueError(f"sessions[{i}] is of another Client than the queue")
    if not sessions:
        raise ValueError("no sessions; a request has at least 1")
    return sessions


def entries(array):
    """An array of ENTRY that C may write to."""
    if not isinstance(array, np.ndarray) or array.dtype != ENTRY:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"entries are {kind}; expected an array of kvq.ENTRY (make_entries)")
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError(f"entries have shape {array.shape}; expected one contiguous row that can "
                         "be written")
    return array


def owner(name, tensor):
    """The buffer of a Tensor, which must still be open."""
    if not isinstance(tensor, (Tensor, Pages, Ids)):
        raise TypeError(f"{name} is {type(tensor).__name__}; expected a Tensor (Buffer.tensor)")
    pointer = tensor.list if isinstance(tensor, Pages) else tensor.buffer
    if not pointer:
        return None
    if tensor.owner is None:
        raise ValueError(f"{name} was not made by Buffer.tensor or DeviceBuffer.tensor")
    if tensor.owner.pointer.value != pointer:
        raise ValueError(f"{name} lies in a buffer that is closed")
    return tensor.owner


class Home:
    """The process that something of the library's is of. Two processes on one connection would take
    each other's replies."""

    def __init__(self, what):
        self._what, self._process = what, os.getpid()

    def is_left(self):
        """Whether this process was forked from that one."""
        return self._process != os.getpid()

    def check_process(self):
        if self._process != os.getpid():
            raise ValueError(f"the {self._what} is of the process that this one was forked from; "
                             "make a kvq.Client in this process, and open its sessions there")


class Turn(Home):
    """Of what one thread may use at a time. That thread may take it again meanwhile.

    Each run() puts a mark, and the thread of the oldest mark has the turn. A mark goes by one call
    of C, behind a `finally` that stands before it comes, so that no KeyboardInterrupt leaves one:
    CPython, from 3.10 on, raises it as a function begins, behind a call, and as a loop goes round.
    `with` would lose one that comes between the taking of a lock and the block."""

    def __init__(self, what):
        super().__init__(what)
        self._marks = {}  # the thread of each, in the order in which they came

    def _take(self, mark):
        self.check_process()
        me = self._marks[mark] = threading.get_ident()
        if list(self._marks.values())[0] != me:  # one call of C: they change meanwhile
            raise RuntimeError(f"another thread is using this {self._what}; open one for each "
                               "thread")

    def run(self, function, *arguments, **options):
        """Calls the function while no other thread is in such a call; else RuntimeError."""
        mark = object()
        try:
            self._take(mark)
            return function(*arguments, **options)
        finally:
            self._marks.pop(mark, None)


def in_turn(method: Method) -> Method:
    """Of an object with a turn."""
    @functools.wraps(method)
    def wrapped(self, *arguments, **options):
        return self.turn.run(method, self, *arguments, **options)
    return cast(Method, wrapped)


class Gate(Home):
    """Has a mark of each call under way, as Turn has, so that none is left behind when the
    library's object goes."""

    def __init__(self, what):
        super().__init__(what)
        self._lock, self._marks, self.closed = threading.Lock(), set(), False

    def _enter(self, mark):
        self.check_process()
        with self._lock:
            if self.closed:
                raise ValueError(f"the {self._what} is closed")
            self._marks.add(mark)

    def run(self, function, *arguments):
        """Calls the function, unless the object is closed; then ValueError."""
        mark = object()
        try:
            self._enter(mark)
            return function(*arguments)
        finally:
            self._marks.discard(mark)

    def alone(self, function):
        """Calls the function, and lets nobody in meanwhile; RuntimeError if somebody is."""
        ours = False
        try:
            with self._lock:
                if self._marks:
                    raise RuntimeError(f"{len(self._marks)} calls of this {self._what} are under "
                                       "way in other threads; let them end first")
                if self.closed:
                    raise ValueError(f"the {self._what} is closed")
                self.closed = ours = True
            return function()
        finally:
            if ours:
                self.closed = False


# ---- Arrays ----

def _given(array):
    return f"{tuple(array.shape)} {array.dtype}"


def array(name, value, shape, meaning, kinds=KINDS, written=False):
    """An array of K, V, Q or an output, or a tensor of PyTorch on the CPU, against the shape that
    it must have. Returns the array, or one over the tensor's memory."""
    if is_tensor(value):
        value = view(name, value)
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name} is {type(value).__name__}; expected a NumPy array, or a tensor of "
                        "PyTorch on the CPU")
    if value.dtype.type not in kinds or not value.dtype.isnative:
        raise TypeError(f"{name} has dtype {value.dtype.str}; expected "
                        f"{', '.join(np.dtype(k).name for k in kinds)} in native byte order "
                        "(bfloat16 travels as uint16)")
    if value.shape != tuple(shape):
        raise ValueError(f"{name} has shape {value.shape}; expected {tuple(shape)}: {meaning}")
    if written:
        if not value.flags.writeable:
            raise ValueError(f"{name} is read-only; it is written to")
        if folds(value):
            raise ValueError(f"{name} has strides {value.strides} for shape {value.shape}: its "
                             "elements overlap, and it is written to")
    return value


def folds(value):
    """Whether elements of an array may share memory. Exact for positive strides up to three
    dimensions that nest, which all that NumPy makes by slicing do."""
    if value.flags.c_contiguous or value.size == 0:
        return False
    reach = 0
    for size, stride in sorted(((n, abs(s)) for n, s in zip(value.shape, value.strides) if n > 1),
                               key=lambda x: x[1]):
        if stride < reach + value.itemsize:
            return True
        reach += (size - 1) * stride
    return False


def device_tensor(name, value, shape, meaning):
    """The same for a CUDA tensor. LSE has two dimensions."""
    missing = [m for m in ("data_ptr", "element_size", "shape", "stride", "dtype")
               if not hasattr(value, m)]
    if missing:
        raise TypeError(f"{name} is {type(value).__name__}, without {', '.join(missing)}; expected "
                        "a CUDA tensor")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {tuple(shape)}: "
                         f"{meaning}")
    return value


_DIMENSIONS = {"k": "[tokens][kv_heads][head_dim]", "v": "[tokens][kv_heads][v_dim]",
               "q": "[queries][q_heads][head_dim]", "out": "[queries][q_heads][v_dim]",
               "lse": "[queries][q_heads]"}


class Shapes:
    """The shapes of one request's arrays, by the layer of its sessions and by its entries."""

    def __init__(self, sessions, layer, request):
        layer = integer("layer", layer)
        rows = [s.layer(layer) for s in sessions]
        heads = [(r.q_heads, r.kv_heads, r.head_dim, r.dim_of_v) for r in rows]
        for i, other in enumerate(heads):
            if other != heads[0]:
                raise ValueError(f"layer {layer} of sessions[{i}] has (q_heads, kv_heads, "
                                 f"head_dim, v_dim) {other}, that of sessions[0] {heads[0]}; one "
                                 "array cannot hold both")
        q_heads, kv_heads, dim, v_dim = heads[0]
        tokens, queries = sum(request["append"].tolist()), sum(request["queries"].tolist())
        self._how = f"layer {layer}, {len(sessions)} sessions"
        self.of = {"k": (tokens, kv_heads, dim), "v": (tokens, kv_heads, v_dim),
                   "q": (queries, q_heads, dim), "out": (queries, q_heads, v_dim),
                   "lse": (queries, q_heads)}

    def says(self, name):
        """What the dimensions of one of them are."""
        return f"{_DIMENSIONS[name]} of {self._how}"

    def check(self, name, value, written=False):
        return array(name, value, self.of[name], self.says(name), written=written)

    def check_device(self, name, value):
        return device_tensor(name, value, self.of[name], self.says(name))
