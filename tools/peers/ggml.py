# SPDX-License-Identifier: Apache-2.0
"""Some functions of a ggml library, by ctypes."""
import ctypes
import os
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}  # ggml's numbers, and names
ALIGNMENT = 64
LIBRARIES = ("libggml-base.so", "libggml-cpu.so", "libggml.so")


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


# What each returns, and what it takes. Objects of ggml's are addresses.
FUNCTIONS = {
    "ggml_init": (c_void_p, InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_row_size": (c_size_t, c_int, c_int64),
    "ggml_type_name": (ctypes.c_char_p, c_int),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64,
                            c_void_p),
    "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64),
    "ggml_permute": (c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_soft_max_ext": (c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float),
    "ggml_flash_attn_ext": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_float,
                            c_float, c_float),
    "ggml_set_output": (None, c_void_p),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_tensor_alloc": (None, c_void_p, c_void_p, c_void_p),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_get_default_buffer_type": (c_void_p, c_void_p),
    "ggml_backend_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_gallocr_new": (c_void_p, c_void_p),
    "ggml_gallocr_alloc_graph": (c_bool, c_void_p, c_void_p),
    "ggml_gallocr_free": (None, c_void_p),
}
EXTENSIONS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16")


class Ggml:
    """The library in a folder."""

    def __init__(self, folder):
        paths = [os.path.join(folder, n) for n in LIBRARIES]
        self.libraries = [ctypes.CDLL(p, ctypes.RTLD_GLOBAL) for p in paths if os.path.exists(p)]
        if not self.libraries:
            raise RuntimeError(f"no ggml library in {folder}")
        for name, (returns, *takes) in FUNCTIONS.items():
            function = self.find(name)
            if not function:
                raise RuntimeError(f"the ggml library lacks {name}")
            function.restype, function.argtypes = returns, takes
            setattr(self, name.removeprefix("ggml_"), function)
        for name, number in TYPES.items():
            if self.type_name(number) != name.encode():
                raise RuntimeError(f"the ggml library has another type {number} than {name}")
        self.backend = self.backend_cpu_init()

    def find(self, name):
        """A function, or None."""
        for library in self.libraries:
            if hasattr(library, name):
                return getattr(library, name)
        return None

    def __str__(self):
        version = self.find("ggml_version")
        if version:
            version.restype = ctypes.c_char_p
        has = [e for e in EXTENSIONS if (f := self.find("ggml_cpu_has_" + e)) and f()]
        return f"ggml{' ' + version().decode() if version else ''} ({', '.join(has)})"

    def convert(self, values, kind):
        """Rows of float32 [..][n] as [..][bytes of a row] of a type, at an aligned address."""
        values = np.ascontiguousarray(values, np.float32)
        rows, length = values.size // values.shape[-1], values.shape[-1]
        made = aligned(rows * self.row_size(TYPES[kind], length))
        if self.quantize_chunk(TYPES[kind], address(values), address(made), 0, rows, length,
                               None) != made.nbytes:
            raise RuntimeError(f"the ggml library does not convert to {kind}")
        return made.reshape(*values.shape[:-1], -1)


def address(array):
    """Of an array's first byte."""
    return array.ctypes.data


def aligned(nbytes):
    """Zeros at an address that ggml takes."""
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)
    return whole[-address(whole) % ALIGNMENT:][:nbytes]
