# SPDX-License-Identifier: Apache-2.0
"""rig.h for Python. Device addresses are numbers; errors are raised with rig.h's sentences."""
import ctypes
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64, c_void_p

F16, BF16, F32 = 1, 2, 3
NOTHING, MMA, LOGIC = 0, 1, 2
TEXT = 1280


class Wish(ctypes.Structure):
    _fields_ = [("format", c_char_p), ("tokens", POINTER(c_uint32)), ("sessions", c_uint32),
                ("layers", c_uint32), ("q_heads", c_uint32), ("kv_heads", c_uint32),
                ("head_dim", c_uint32), ("dtype", c_uint32), ("seed", c_uint64)]


class Query(ctypes.Structure):
    _fields_ = [("q", c_uint64), ("out", c_uint64), ("lse", c_uint64), ("fresh_k", c_uint64),
                ("fresh_v", c_uint64), ("q_tokens", c_uint32), ("fresh_tokens", c_uint32),
                ("dtype", c_uint32)]


class RigError(Exception):
    """A call failed; the text says why."""


FUNCTIONS = {
    "rig_open": (c_int, [POINTER(c_void_p), c_char_p]),
    "rig_close": (None, [c_void_p]),
    "rig_multiprocessors": (c_int, [c_void_p]),
    "rig_sync": (c_int, [c_void_p, c_char_p]),
    "rig_cache_make": (c_int, [c_void_p, POINTER(Wish), POINTER(c_void_p), c_char_p]),
    "rig_cache_free": (None, [c_void_p]),
    "rig_cache_bytes": (c_uint64, [c_void_p]),
    "rig_cache_bits": (c_double, [c_void_p]),
    "rig_cache_bind": (c_int, [c_void_p, c_uint32, POINTER(Query), c_char_p]),
    "rig_attend": (c_int, [c_void_p, c_uint32, c_uint64, c_uint32, c_char_p]),
    "rig_read": (c_int, [c_void_p, c_uint32, c_uint32, c_uint64, c_uint64, c_uint64, c_char_p]),
    "rig_store": (c_int, [c_void_p, c_uint64, c_char_p]),
    "rig_pack": (c_int, [c_void_p, c_uint64, POINTER(c_uint64), c_char_p]),
    "rig_probe_read": (c_int, [c_void_p, c_uint64, c_uint32, c_uint32, c_uint64,
                               POINTER(c_uint32), c_char_p]),
    "rig_probe_rate": (c_int, [c_void_p, c_int, c_uint32, c_uint64, POINTER(c_double), c_char_p]),
    "rig_probe_subnormals": (c_int, [c_void_p, POINTER(c_double), c_char_p]),
    "rig_take": (c_int, [c_void_p, POINTER(c_uint64), c_size_t, c_char_p]),
    "rig_give": (None, [c_void_p, c_uint64]),
    "rig_copy_in": (c_int, [c_void_p, c_uint64, c_void_p, c_size_t, c_char_p]),
    "rig_copy_out": (c_int, [c_void_p, c_void_p, c_uint64, c_size_t, c_char_p]),
}


class Rig:
    """A device with our kernels: the one whose context is current, else the first."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self.handle = c_void_p()
        self.call("rig_open", byref(self.handle))

    def call(self, name, *arguments):
        """A function whose last argument is text."""
        text = ctypes.create_string_buffer(TEXT)
        if getattr(self.library, name)(*arguments, text) != 0:
            raise RigError(text.value.decode(errors="replace"))

    def close(self):
        self.library.rig_close(self.handle)

    def multiprocessors(self):
        return self.library.rig_multiprocessors(self.handle)

    def sync(self):
        self.call("rig_sync", self.handle)

    def probe_read(self, at, record_bytes, n, stream=0):
        """Reads n records; returns how many blocks of threads do it."""
        blocks = c_uint32()
        self.call("rig_probe_read", self.handle, at, record_bytes, n, stream, byref(blocks))
        return blocks.value

    def probe_rate(self, probe, rounds, stream=0):
        """probe: NOTHING, MMA or LOGIC. Returns the operations that were done."""
        operations = c_double()
        self.call("rig_probe_rate", self.handle, probe, rounds, stream, byref(operations))
        return operations.value

    def probe_subnormals(self):
        error = c_double()
        self.call("rig_probe_subnormals", self.handle, byref(error))
        return error.value

    def take(self, nbytes):
        at = c_uint64()
        self.call("rig_take", self.handle, byref(at), nbytes)
        return at.value

    def give(self, at):
        self.library.rig_give(self.handle, at)

    def copy_in(self, at, array):
        self.call("rig_copy_in", self.handle, at, array.ctypes.data, array.nbytes)

    def copy_out(self, array, at):
        self.call("rig_copy_out", self.handle, array.ctypes.data, at, array.nbytes)
        return array


class Cache:
    """Caches of random tokens, as rig_cache_make makes them; tokens: a list, one a session."""

    def __init__(self, rig, form, tokens, layers=1, q_heads=32, kv_heads=8, head_dim=128,
                 dtype=BF16, seed=1):
        self.rig, self.library = rig, rig.library
        self.tokens, self.layers = list(tokens), layers
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        numbers = (c_uint32 * len(self.tokens))(*self.tokens)
        wish = Wish(form.encode(), numbers, len(self.tokens), layers, q_heads, kv_heads, head_dim,
                    dtype, seed)
        self.handle = c_void_p()
        rig.call("rig_cache_make", rig.handle, byref(wish), byref(self.handle))

    def free(self):
        self.library.rig_cache_free(self.handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()

    def bytes(self):
        """Bytes that one attention over a layer reads."""
        return self.library.rig_cache_bytes(self.handle)

    def bits(self):
        return self.library.rig_cache_bits(self.handle)

    def bind(self, layer, q, out, q_tokens=1, dtype=BF16, lse=0, fresh=(0, 0, 0)):
        """fresh: device K and V of the step's own tokens, and how many those are."""
        query = Query(q, out, lse, fresh[0], fresh[1], q_tokens, fresh[2], dtype)
        self.rig.call("rig_cache_bind", self.handle, layer, byref(query))

    def attend(self, layer, stream=0, blocks=0):
        self.rig.call("rig_attend", self.handle, layer, stream, blocks)

    def read(self, layer, session, k, v, stream=0):
        self.rig.call("rig_read", self.handle, layer, session, k, v, stream)

    def store(self, stream=0):
        """The fresh tokens that the layers were bound with."""
        self.rig.call("rig_store", self.handle, stream)

    def pack(self, stream=0):
        """Returns the bytes of raw tokens that are read."""
        nbytes = c_uint64()
        self.rig.call("rig_pack", self.handle, stream, byref(nbytes))
        return nbytes.value
