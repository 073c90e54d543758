# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-engines.py that run in ik_llama.cpp (ik-llama-cpp-python):

    ik:TYPE[/fa]    f16, bf16, q8_0, q4_0 ...; /fa: with its flash attention

Its caches are filled as those of llama.cpp are. All sequences share its cells, and each attends to
those of all others, so it is timed with one."""
import ctypes
import os
import struct
import tempfile

import ik_llama_cpp
import ik_llama_cpp._ctypes_api as api
import numpy as np

import llama_files
from llama_files import SEED, Reader, layers_of
from worker import Worker


def _library():
    """libllama, with the functions that the package does not declare."""
    path = os.path.join(os.path.dirname(api.__file__), "lib", "libllama.so")
    library = ctypes.CDLL(path)
    where = [ctypes.c_int32, ctypes.c_uint32]  # sequence, flags
    for name, arguments in (("size", []), ("data", [ctypes.c_void_p, ctypes.c_size_t])):
        function = getattr(library, f"llama_state_seq_get_{name}")
        function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_void_p, *arguments, *where]
    function = library.llama_state_seq_set_data
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *where]
    library.llama_print_system_info.restype = ctypes.c_char_p
    return library


class Cache(llama_files.Cache):
    """A context that is full."""
    api = api

    def begin(self, kind, flash, tokens):
        options = self.options(kind, tokens)
        options.flash_attn = bool(flash)
        self.make(options)

    def state(self):
        library = self.worker.library
        state = (ctypes.c_uint8 * library.llama_state_seq_get_size(self.context, 0, 0))()
        library.llama_state_seq_get_data(self.context, state, len(state), 0, 0)
        return state

    def set_state(self, state, sequence):
        return self.worker.library.llama_state_seq_set_data(self.context, state, len(state),
                                                            sequence, 0)

    def longer(self, state, tokens):
        read = Reader(state)
        cells, = read.fields("<I")
        if cells != SEED:
            raise RuntimeError(f"the state has {cells} cells, not {SEED}")
        read.take(8 * SEED)
        where = np.zeros((tokens, 2), np.int32)  # position, number of sequences
        where[:, 0] = np.arange(tokens)
        transposed, = read.fields("<I")
        return b"".join([struct.pack("<I", tokens), where.tobytes(), struct.pack("<I", transposed),
                         *layers_of(read, tokens, transposed, 4)])


class Ik(Worker):
    """All rows share the weights."""

    def __init__(self, threads):
        super().__init__(threads)
        self.library = _library()
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-bench-")
        path = os.path.join(self.folder.name, "model.gguf")
        llama_files.write_model(path)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(),
                                                    api.llama_model_default_params())
        if not self.model:
            raise RuntimeError("ik_llama.cpp does not load the model")
        what = self.library.llama_print_system_info().decode()
        self.what = f"ik-llama-cpp-python {ik_llama_cpp.__version__}: {what}"

    def make(self, name, tokens, batch):
        if batch > 1:
            raise ValueError("ik_llama.cpp has no stream for each sequence: batch 1 alone is timed")
        kind, _, path = name[3:].partition("/")
        return Cache(self, kind, path, tokens, batch)


make = Ik
