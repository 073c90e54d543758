# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-engines.py that run in llama.cpp (llama-cpp-python):

    llama:TYPE[/fa]    f16, bf16, q8_0, q4_0 ...; /fa: with its flash attention, which types of
                       fewer than 16 bits need for V
    llama:kvq:FORMAT[/PATH]   over kvqd, by the backend of ggml that GGML_BACKEND_PATH names, each
                       row with a daemon of its own; exact unless PATH is fast

The model, random weights in bfloat16, is written to a GGUF file. A cache is filled by decoding a
few tokens, asking for the sequence's state, and giving back one that has these tokens again and
again, to each sequence of a batch. Each has a stream of its own. kvqd's sessions are filled through
the daemon; llama.cpp's states then say which cells are in use."""
import ctypes
import os
import struct
import tempfile

import llama_cpp as api
import numpy as np

import llama_files
from llama_files import AT_ONCE, SEED, Reader, layers_of
from worker import SHAPE, Worker

NAME = "full"        # of the sessions over kvq; behind the first one's, the stream's number
MMAP_THRESHOLD = -3  # of mallopt()


@api.llama_log_callback
def _quiet(_level, _text, _data):
    pass


class Cache(llama_files.Cache):
    """A context that is full."""
    api = api

    def begin(self, kind, flash, tokens):
        options = self.options(kind, tokens)
        options.flash_attn_type = 1 if flash else 0
        options.kv_unified = False
        self.make(options)

    def state(self):
        state = (ctypes.c_uint8 * api.llama_state_seq_get_size(self.context, 0))()
        api.llama_state_seq_get_data(self.context, state, len(state), 0)
        return state

    def set_state(self, state, sequence):
        return api.llama_state_seq_set_data(self.context, state, len(state), sequence)

    def longer(self, state, tokens):
        read = Reader(state)
        magic, sequence, streams, cells = read.fields("<IiII")
        if streams != self.batch or cells != SEED:
            raise RuntimeError(f"the state has {streams} streams, with {cells} cells in the first, "
                               f"not {self.batch} with {SEED}")
        read.take(12 * SEED)
        where = np.zeros((tokens, 3), np.int32)  # position, number of sequences, the sequence
        where[:, 0], where[:, 1] = np.arange(tokens), 1
        transposed, = read.fields("<I")
        return b"".join([struct.pack("<IiII", magic, sequence, streams, tokens), where.tobytes(),
                         struct.pack("<I", transposed),
                         # Behind them stand the counts of cells of the other streams: none.
                         *layers_of(read, tokens, transposed, 4 * (streams - 1))])


class OverKvq(Cache):
    """A context whose K and V are sessions of kvqd, one for each sequence."""

    def __init__(self, worker, form, path, tokens, batch):
        self.worker, self.daemon, self.batch = worker, None, batch
        try:
            self._open(form, path or "exact", tokens)
        except BaseException:
            self.free()
            if self.daemon:
                self.daemon.stop()
            raise

    def _open(self, form, path, tokens):
        os.environ.pop("KVQ_LLAMA_SESSION", None)
        os.environ.update(KVQ_LLAMA_FORMAT=form, KVQ_LLAMA_ATTENTION=path, KVQ_LLAMA_ROLLBACK="0")
        self._begin_daemon()
        super().__init__(self.worker, "f16", True, tokens, self.batch)
        state = bytes(self.state())
        self.free()
        self.daemon.stop()
        self.daemon = None
        # As if llama.cpp had been started anew over sessions that it filled before.
        self._begin_daemon()
        self._fill_sessions(form, path, tokens)
        os.environ["KVQ_LLAMA_SESSION"] = NAME
        self.begin("f16", True, tokens)
        self.set_states(state)

    def _begin_daemon(self):
        from daemon import Daemon
        self.daemon = Daemon(self.worker.threads, self.batch)
        os.environ["KVQ_RUNTIME_DIR"] = self.daemon.directory

    def _fill_sessions(self, form, path, tokens):
        """The sessions that the backend would have made, filled by a prompt's steps. They are let
        go, and stay for a while."""
        import kvq
        from daemon import fill
        layer = kvq.Layer(SHAPE["heads"], SHAPE["kv_heads"], SHAPE["head_dim"])
        with kvq.Client(self.daemon.directory) as client:
            for name in [NAME] + [f"{NAME}-{i}" for i in range(1, self.batch)]:
                with client.session([layer] * SHAPE["layers"], form, name=name, model="llama.cpp",
                                    salt=name, attention=path, max_rollback=0,
                                    prompt_tokens=AT_ONCE) as session:
                    fill(client, session, tokens, bfloat16=False, at_once=AT_ONCE)

    def nbytes(self):
        """See worker.py: of the sessions, as kvqd counts."""
        return self.daemon.session_bytes()


class Llama(Worker):
    """All rows share the weights."""

    def __init__(self, threads):
        super().__init__(threads)
        # What is freed goes back to the system: glibc would keep up to 32 MB of a piece, and a
        # context that gets a piece which another one has used takes memory that a first one does
        # not.
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-bench-")
        path = os.path.join(self.folder.name, "model.gguf")
        llama_files.write_model(path)
        api.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_files.load_backends(api)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(),
                                                    api.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp does not load the model")
        what = api.llama_print_system_info().decode()
        self.what = f"llama-cpp-python {api.__version__}: {what}"

    def make(self, name, tokens, batch):
        kind, _, path = name[6:].partition("/")
        if kind.startswith("kvq:"):
            return OverKvq(self, kind[4:], path, tokens, batch)
        return Cache(self, kind, path, tokens, batch)


make = Llama
