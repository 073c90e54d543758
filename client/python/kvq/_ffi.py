# SPDX-License-Identifier: Apache-2.0
"""libkvq through ctypes: the structures and functions of kvq.h, name by name.

The library is $KVQ_LIBRARY, else the package's own, else libkvq.so.0 where the dynamic linker finds
it. Calls release the interpreter's lock.
"""
import ctypes
import os
from ctypes import (CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int,
                    c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p)
from typing import Any

import numpy as np

U64_MAX = 2**64 - 1


class Sized(Structure):
    """One that can grow: its first field is `size`, which is set when it is made."""

    def __init__(self, **values: Any) -> None:
        super().__init__(size=ctypes.sizeof(self), **values)


class ConnectOptions(Sized):
    _fields_ = [("size", c_uint32), ("timeout_ms", c_uint32), ("spin_us", c_uint32),
                ("runtime_dir", c_char_p), ("name", c_char_p)]


class DaemonInfo(Sized):
    _fields_ = [("size", c_uint32), ("protocol", c_uint32), ("version", c_char * 32),
                ("backend", c_char * 32), ("isa", c_char * 32), ("epoch", c_uint64),
                ("client_id", c_uint64)]


class GpuInfo(Structure):
    _fields_ = [("place", c_char * 48), ("name", c_char * 64)]


class Tensor(Structure):
    owner: Any = None  # the buffer that it lies in
    _fields_ = [("buffer", c_void_p), ("offset", c_uint64), ("token_stride", c_uint64),
                ("head_stride", c_uint64), ("dtype", c_uint8)]


class LayerRow(Structure):
    _fields_ = [("q_heads", c_uint16), ("kv_heads", c_uint16), ("k_dim", c_uint16),
                ("v_dim", c_uint16), ("window", c_uint32), ("softcap", c_float),
                ("scale", c_float), ("format", c_char_p), ("kv_from", c_uint32),
                ("repeat", c_uint32)]


class Span(Structure):
    _fields_ = [("first", c_uint64), ("tokens", c_uint32), ("digest", c_uint8 * 32)]


class Prefix(Structure):
    _fields_ = [("buffer", c_void_p), ("offset", c_uint64), ("tokens", c_uint64),
                ("spans", POINTER(Span)), ("n_spans", c_uint32)]


class Ids(Structure):
    owner: Any = None
    _fields_ = [("buffer", c_void_p), ("offset", c_uint64)]


class SessionOptions(Sized):
    _fields_ = [("size", c_uint32), ("ns", c_char_p), ("name", c_char_p), ("model", c_char_p),
                ("layers", POINTER(LayerRow)), ("n_layers", c_uint32), ("format", c_char_p),
                ("dtype", c_uint8), ("v_rotation", c_uint8), ("attention", c_uint8),
                ("on_detach", c_uint8), ("shard", c_uint16), ("shards", c_uint16),
                ("flags", c_uint32), ("max_rollback", c_uint32), ("prompt_tokens", c_uint64),
                ("keep_seconds", c_uint64), ("place", c_char_p), ("salt", c_char_p),
                ("adapter", c_char_p), ("prefix", Prefix)]


class SessionInfo(Sized):
    _fields_ = [("size", c_uint32), ("layers", c_uint32), ("id", c_uint64), ("tokens", c_uint64),
                ("packed_bytes", c_uint64), ("window_bytes", c_uint64), ("table_bytes", c_uint64),
                ("full_precision_tokens", c_uint64), ("saturated_values", c_uint64),
                ("bits_per_value", c_double), ("bytes_per_token_head", c_double),
                ("bytes_per_token_head_total", c_double), ("compression", c_double),
                ("created", c_uint8), ("read_only", c_uint8), ("ns", c_char * 128),
                ("name", c_char * 128), ("format", c_char * 64), ("attention", c_char * 16),
                ("isa", c_char * 16), ("place", c_char * 48), ("shard", c_uint32),
                ("shards", c_uint32), ("group_tokens", c_uint64), ("prefix_tokens", c_uint64),
                ("exact_tokens", c_uint64), ("shared_bytes", c_uint64), ("tier", c_char * 8),
                ("pinned", c_uint8), ("v_rotation", c_char * 8), ("max_rollback", c_uint32)]


class Pages(Structure):
    owner: Any = None
    _fields_ = [("page_tokens", c_uint32), ("k_page_stride", c_uint64),
                ("v_page_stride", c_uint64), ("list", c_void_p), ("list_offset", c_uint64)]


class Work(Structure):
    _fields_ = [("step", c_uint64), ("layer", c_uint32), ("flags", c_uint32),
                ("deadline_ns", c_uint64), ("k", Tensor), ("v", Tensor), ("q", Tensor),
                ("out", Tensor), ("lse", Tensor), ("pages", Pages), ("ids", Ids)]


class StepWork(Structure):
    _fields_ = [("k", POINTER(Tensor)), ("v", POINTER(Tensor)), ("n_layers", c_uint32),
                ("deadline_ns", c_uint64), ("pages", Pages), ("ids", Ids)]


# Runs item(arg, i) for every i below n.
PARALLEL = CFUNCTYPE(None, c_void_p, c_uint32, c_void_p, c_void_p)


class LocalOptions(Sized):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("place", c_char_p),
                ("max_tokens", c_uint64), ("threads", c_uint32), ("parallel", PARALLEL),
                ("parallel_context", c_void_p)]


class BucketOptions(Sized):
    _fields_ = [("size", c_uint32), ("max_sessions", c_uint32), ("max_queries", c_uint32),
                ("session", c_uint64), ("max_tokens", c_uint64)]


class CaptureOptions(Sized):
    _fields_ = [("size", c_uint32), ("n_layers", c_uint32), ("layers", POINTER(LayerRow)),
                ("queries", c_uint8), ("model", c_char_p), ("max_tokens", c_uint64)]


# struct kvq_entry, so that a batch is one array.
ENTRY = np.dtype([("session", np.uint64), ("position", np.uint64), ("row", np.uint32),
                  ("q_row", np.uint32), ("append", np.uint32), ("queries", np.uint16),
                  ("list_token", np.uint16), ("status", np.int32), ("value", np.uint64)],
                 align=True)
assert ENTRY.itemsize == 48

# Every function of kvq.h: result and arguments.
FUNCTIONS = {
    "kvq_strerror": (c_char_p, [c_int]),
    "kvq_error_text": (c_char_p, []),
    "kvq_version": (c_char_p, []),
    "kvq_connect": (c_int, [POINTER(ConnectOptions), POINTER(c_void_p)]),
    "kvq_disconnect": (None, [POINTER(c_void_p)]),
    "kvq_daemon_info": (c_int, [c_void_p, POINTER(DaemonInfo)]),
    "kvq_daemon_gpus": (c_int, [c_void_p, POINTER(GpuInfo), c_uint32, POINTER(c_uint32)]),
    "kvq_reattach": (c_int, [c_void_p, POINTER(c_uint32)]),
    "kvq_queue_open": (c_int, [c_void_p, POINTER(c_void_p)]),
    "kvq_queue_close": (None, [POINTER(c_void_p)]),
    "kvq_buffer_create": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "kvq_buffer_import_memfd": (c_int, [c_void_p, c_int, c_uint64, c_size_t, POINTER(c_void_p)]),
    "kvq_buffer_create_on": (c_int, [c_void_p, c_char_p, c_size_t, POINTER(c_void_p)]),
    "kvq_buffer_import": (c_int, [c_void_p, c_void_p, c_size_t, POINTER(c_void_p)]),
    "kvq_buffer_device": (c_void_p, [c_void_p]),
    "kvq_buffer_data": (c_void_p, [c_void_p]),
    "kvq_buffer_size": (c_size_t, [c_void_p]),
    "kvq_buffer_close": (None, [POINTER(c_void_p)]),
    "kvq_tensor_make": (Tensor, [c_void_p, c_uint64, c_uint32, c_uint32, c_uint8]),
    "kvq_session_open": (c_int, [c_void_p, POINTER(SessionOptions), POINTER(c_uint64),
                                 POINTER(SessionInfo)]),
    "kvq_session_close": (c_int, [c_void_p, c_uint64]),
    "kvq_session_drop": (c_int, [c_void_p, c_uint64]),
    "kvq_session_move": (c_int, [c_void_p, c_uint64, c_char_p]),
    "kvq_session_park": (c_int, [c_void_p, c_uint64]),
    "kvq_session_prefetch": (c_int, [c_void_p, c_uint64]),
    "kvq_session_pin": (c_int, [c_void_p, c_uint64, c_int]),
    "kvq_session_save": (c_int, [c_void_p, c_uint64]),
    "kvq_session_restore": (c_int, [c_void_p, c_char_p, c_char_p, c_uint32, c_uint32]),
    "kvq_session_info": (c_int, [c_void_p, c_uint64, POINTER(SessionInfo)]),
    "kvq_session_layers": (c_int, [c_void_p, c_uint64, POINTER(LayerRow), c_uint32,
                                   POINTER(c_uint32)]),
    "kvq_lookup": (c_int, [c_void_p, POINTER(SessionOptions), POINTER(c_uint64)]),
    "kvq_session_spans": (c_int, [c_void_p, c_uint64, POINTER(Span), c_uint32]),
    "kvq_step_begin_ids": (c_int, [c_void_p, c_void_p, c_uint32, POINTER(Ids),
                                   POINTER(c_uint64)]),
    "kvq_step_begin": (c_int, [c_void_p, c_void_p, c_uint32, POINTER(c_uint64)]),
    "kvq_append": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32]),
    "kvq_attend": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32]),
    "kvq_append_attend": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32]),
    "kvq_step_end": (c_int, [c_void_p, c_uint64, c_void_p, c_uint32]),
    "kvq_step_abort": (c_int, [c_void_p, c_uint64, c_void_p, c_uint32]),
    "kvq_truncate": (c_int, [c_void_p, c_void_p, c_void_p, c_uint32]),
    "kvq_fork": (c_int, [c_void_p, c_void_p, c_uint32]),
    "kvq_accept": (c_int, [c_void_p, c_void_p, c_uint64, c_void_p, c_uint32]),
    "kvq_read": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32]),
    "kvq_step": (c_int, [c_void_p, POINTER(StepWork), c_void_p, c_uint32]),
    "kvq_local_open": (c_int, [c_void_p, POINTER(LocalOptions), POINTER(c_void_p)]),
    "kvq_local_openmp": (None, [c_void_p, c_uint32, c_void_p, c_void_p]),
    "kvq_local_close": (None, [POINTER(c_void_p)]),
    "kvq_local_why": (c_char_p, [c_void_p]),
    "kvq_local_add": (c_int, [c_void_p, c_uint64]),
    "kvq_local_remove": (c_int, [c_void_p, c_uint64]),
    "kvq_local_begin": (c_int, [c_void_p, c_void_p, c_uint32]),
    "kvq_local_attend": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32]),
    "kvq_local_end": (c_int, [c_void_p, POINTER(StepWork), c_void_p, c_uint32]),
    "kvq_local_abort": (None, [c_void_p]),
    "kvq_bucket_open": (c_int, [c_void_p, POINTER(BucketOptions), POINTER(c_void_p)]),
    "kvq_bucket_close": (None, [POINTER(c_void_p)]),
    "kvq_local_begin_on_stream": (c_int, [c_void_p, c_void_p, c_void_p, c_uint32, c_void_p]),
    "kvq_local_attend_on_stream": (c_int, [c_void_p, c_void_p, POINTER(Work), c_void_p, c_uint32,
                                           c_void_p]),
    "kvq_local_end_on_stream": (c_int, [c_void_p, POINTER(StepWork), c_void_p, c_uint32,
                                        c_void_p]),
    "kvq_nop": (c_int, [c_void_p, c_void_p, c_uint32]),
    "kvq_submit": (c_int, [c_void_p, c_int, POINTER(Work), c_void_p, c_uint32,
                           POINTER(c_uint64)]),
    "kvq_wait": (c_int, [c_void_p, c_uint64, c_uint64]),
    "kvq_queue_order": (c_int, [c_void_p]),
    "kvq_queue_prepare_streams": (c_int, [c_void_p]),
    "kvq_queue_wait_for_room": (c_int, [c_void_p, c_uint64]),
    "kvq_append_on_stream": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32, c_void_p]),
    "kvq_attend_on_stream": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32, c_void_p]),
    "kvq_append_attend_on_stream": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32,
                                            c_void_p]),
    "kvq_read_on_stream": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32, c_void_p]),
    "kvq_submit_on_stream": (c_int, [c_void_p, c_int, POINTER(Work), c_void_p, c_uint32, c_void_p,
                                     POINTER(c_uint64)]),
    "kvq_capture_open": (c_int, [c_char_p, POINTER(CaptureOptions), POINTER(c_void_p)]),
    "kvq_capture_append": (c_int, [c_void_p, POINTER(Work), c_void_p, c_uint32]),
    "kvq_capture_tokens": (c_uint64, [c_void_p]),
    "kvq_capture_close": (c_int, [POINTER(c_void_p)]),
    "kvq_digest": (None, [c_void_p, c_size_t, c_char_p]),
    "kvq_merge_states": (None, [c_void_p] * 6 + [c_size_t, c_size_t]),
}


def load():
    """The library with every function's types declared. ImportError if there is none that fits."""
    asked = os.environ.get("KVQ_LIBRARY")
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "libkvq.so.0")
    name = asked or (own if os.path.exists(own) else "libkvq.so.0")
    hint = ("this package holds no library: install libkvq (cmake --install of the project), then "
            "run ldconfig, or set LD_LIBRARY_PATH to its folder or KVQ_LIBRARY to the file, e.g. "
            "KVQ_LIBRARY=build/release/lib/libkvq.so")
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise ImportError(f"kvq cannot load {name}{' ($KVQ_LIBRARY)' if asked else ''}: {error}; "
                          f"{hint}") from None
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is None:
            raise ImportError(f"{library._name} has no {name}: it is of another version than this "
                              f"package; {hint}")
        function.restype = result
        function.argtypes = arguments
    return library


lib = load()
