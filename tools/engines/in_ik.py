#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-engines.py that run in ik_llama.cpp (ik-llama-cpp-python):

    ik:TYPE[/fa]    f16, bf16, q8_0, q4_0 ...; /fa: with its flash attention

Its caches are filled as those of llama.cpp are."""
import ctypes
import os
import struct
import tempfile

import ik_llama_cpp
import ik_llama_cpp._ctypes_api as api
import numpy as np

from llama_files import SEED, Reader, layers_of, write_model
from worker import Worker, serve

ROOM = 256
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


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


def _longer(state, tokens):
    """The state of a sequence of SEED tokens as one of so many."""
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


class Cache:
    """A context that is full."""

    def __init__(self, worker, kind, flash, tokens):
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = tokens + ROOM, 512, 512
        options.n_threads = options.n_threads_batch = worker.threads
        options.type_k = options.type_v = TYPES[kind]
        options.flash_attn = bool(flash)
        self.at, self.context = 0, api.llama_init_from_model(worker.model, options)
        if not self.context:
            raise RuntimeError("ik_llama.cpp makes no such context")
        self._decode(range(1, 1 + SEED))
        library = worker.library
        state = (ctypes.c_uint8 * library.llama_state_seq_get_size(self.context, 0, 0))()
        library.llama_state_seq_get_data(self.context, state, len(state), 0, 0)
        longer = _longer(bytes(state), tokens)
        given = (ctypes.c_uint8 * len(longer)).from_buffer_copy(longer)
        if library.llama_state_seq_set_data(self.context, given, len(longer), 0, 0) != len(longer):
            raise RuntimeError("ik_llama.cpp does not take the longer state")
        self.state_bytes, self.at = len(longer), tokens

    def _decode(self, ids):
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, self.at + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i + 1 == len(ids)
        if api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        api.llama_batch_free(batch)
        self.at += len(ids)

    def step(self):
        """See worker.py."""
        self._decode([5])

    def nbytes(self):
        """See worker.py: of the sequence's state."""
        return self.state_bytes

    def settle(self):
        """See worker.py."""

    def pids(self):
        """See worker.py."""
        return []

    def close(self):
        """See worker.py."""
        api.llama_free(self.context)


class Ik(Worker):
    """All rows share the weights."""

    def __init__(self, threads):
        super().__init__(threads)
        self.library = _library()
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-bench-")
        path = os.path.join(self.folder.name, "model.gguf")
        write_model(path)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(),
                                                    api.llama_model_default_params())
        if not self.model:
            raise RuntimeError("ik_llama.cpp does not load the model")
        what = self.library.llama_print_system_info().decode()
        self.what = f"ik-llama-cpp-python {ik_llama_cpp.__version__}: {what}"

    def make(self, name, tokens):
        kind, _, path = name[3:].partition("/")
        return Cache(self, kind, path, tokens)


if __name__ == "__main__":
    serve(Ik)
