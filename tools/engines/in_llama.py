#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-engines.py that run in llama.cpp (llama-cpp-python):

    llama:TYPE[/fa]    f16, bf16, q8_0, q4_0 ...; /fa: with its flash attention, which types of
                       fewer than 16 bits need for V
    llama:kvq:FORMAT[/PATH]   over kvqd, by the backend of ggml that GGML_BACKEND_PATH names, each
                       row with a daemon of its own; exact unless PATH is fast

The model, random weights in bfloat16, is written to a GGUF file. A cache is filled by decoding a
few tokens, asking for the sequence's state, and giving back one that has these tokens again and
again. kvqd's session is filled through the daemon; llama.cpp's state then says which cells are in
use."""
import ctypes
import os
import struct
import tempfile

import llama_cpp as api
import numpy as np

from llama_files import SEED, Reader, layers_of, write_model
from worker import Worker, serve

ROOM = 256
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


@api.llama_log_callback
def _quiet(_level, _text, _data):
    pass


def _longer(state, tokens):
    """The state of a sequence of SEED tokens as one of so many."""
    read = Reader(state)
    magic, sequence, streams, cells = read.fields("<IiII")
    if streams != 1 or cells != SEED:
        raise RuntimeError(f"the state has {streams} streams of {cells} cells, not 1 of {SEED}")
    read.take(12 * SEED)
    where = np.zeros((tokens, 3), np.int32)  # position, number of sequences, the sequence
    where[:, 0], where[:, 1] = np.arange(tokens), 1
    transposed, = read.fields("<I")
    return b"".join([struct.pack("<IiII", magic, sequence, 1, tokens), where.tobytes(),
                     struct.pack("<I", transposed),
                     *layers_of(read, tokens, transposed, 0)])


class Cache:
    """A context that is full."""

    def __init__(self, worker, kind, flash, tokens):
        self._begin(worker, kind, flash, tokens)
        self._decode(range(1, 1 + SEED))
        state = (ctypes.c_uint8 * api.llama_state_seq_get_size(self.context, 0))()
        api.llama_state_seq_get_data(self.context, state, len(state), 0)
        longer = _longer(bytes(state), tokens)
        given = (ctypes.c_uint8 * len(longer)).from_buffer_copy(longer)
        if api.llama_state_seq_set_data(self.context, given, len(longer), 0) != len(longer):
            raise RuntimeError("llama.cpp does not take the longer state")
        self.state_bytes = len(longer)
        self.at = tokens

    def _begin(self, worker, kind, flash, tokens):
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = tokens + ROOM, 512, 512
        options.n_threads = options.n_threads_batch = worker.threads
        options.type_k = options.type_v = TYPES[kind]
        options.flash_attn_type = 1 if flash else 0
        self.at, self.context = 0, api.llama_init_from_model(worker.model, options)
        if not self.context:
            raise RuntimeError("llama.cpp makes no such context")

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


class OverKvq(Cache):
    """A context whose K and V are a session of kvqd."""

    def __init__(self, worker, form, path, tokens):
        from daemon import Daemon, fill
        import kvq
        self.daemon = Daemon(worker.threads)
        os.environ.update(KVQ_RUNTIME_DIR=self.daemon.directory, KVQ_LLAMA_SESSION="full",
                          KVQ_LLAMA_FORMAT=form, KVQ_LLAMA_ATTENTION=path or "exact",
                          KVQ_LLAMA_ROLLBACK="0")
        self.client = kvq.Client(self.daemon.directory)
        super().__init__(worker, "f16", True, tokens)
        # As if llama.cpp had been started anew: the session is let go for a while.
        state = (ctypes.c_uint8 * self.state_bytes)()
        api.llama_state_seq_get_data(self.context, state, len(state), 0)
        api.llama_free(self.context)
        with self.client.session(name="full") as session:
            fill(self.client, session, tokens, bfloat16=False)
        self._begin(worker, "f16", True, tokens)
        if api.llama_state_seq_set_data(self.context, state, len(state), 0) != len(state):
            raise RuntimeError("llama.cpp does not take its own state")
        self.at = tokens

    def nbytes(self):
        """See worker.py: of the session, as kvqd counts."""
        with self.client.session(name="full", read_only=True) as session:
            info = session.info()
        return info["packed_bytes"] + info["window_bytes"]

    def settle(self):
        """See worker.py."""
        self.daemon.settle()

    def pids(self):
        """See worker.py."""
        return self.daemon.pids()

    def close(self):
        """See worker.py."""
        super().close()
        self.client.close()
        self.daemon.stop()


class Llama(Worker):
    """All rows share the weights."""

    def __init__(self, threads):
        super().__init__(threads)
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-bench-")
        path = os.path.join(self.folder.name, "model.gguf")
        write_model(path)
        api.llama_log_set(_quiet, ctypes.c_void_p(0))
        if os.environ.get("GGML_BACKEND_PATH"):  # llama.cpp's programs do that by themselves
            folder = os.path.join(os.path.dirname(api.__file__), "lib")
            ctypes.CDLL(os.path.join(folder, "libggml.so.0")).ggml_backend_load_all()
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(),
                                                    api.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp does not load the model")
        what = api.llama_print_system_info().decode()
        self.what = f"llama-cpp-python {api.__version__}: {what}"

    def make(self, name, tokens):
        kind, _, path = name[6:].partition("/")
        if kind.startswith("kvq:"):
            return OverKvq(self, kind[4:], path, tokens)
        return Cache(self, kind, path, tokens)


if __name__ == "__main__":
    serve(Llama)
