# SPDX-License-Identifier: Apache-2.0
"""What rows of bench-engines.py in llama.cpp and in ik_llama.cpp share: the model in a GGUF file,
decoding, and a sequence's state as one of more tokens. `api` is a package's functions and
structures of llama.h. As a program it writes the model to the file that it is given."""
import ctypes
import os
import struct
import sys

import gguf
import numpy as np

from worker import SHAPE, Row

SEED = 64      # tokens that are really decoded
AT_ONCE = 512  # tokens of a prompt's steps, at most
ROOM = 256     # that may be decoded behind a full cache
TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


def write_model(path, **changes):
    """Random weights in bfloat16; changes are those of SHAPE."""
    shape = {**SHAPE, **changes}
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    heads, dim, hidden = shape["heads"], shape["head_dim"], shape["hidden"]
    writer.add_block_count(shape["layers"])
    writer.add_context_length(1 << 18)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(shape["intermediate"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape["vocabulary"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name, rows, columns):
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
        writer.add_tensor(name, words.view(np.uint8),
                          raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name):
        writer.add_tensor(name, np.ones(hidden, np.float32))
    matrix("token_embd.weight", shape["vocabulary"], hidden)
    matrix("output.weight", shape["vocabulary"], hidden)
    norm("output_norm.weight")
    for i in range(shape["layers"]):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for name, rows, columns in (
                ("attn_q", heads * dim, hidden), ("attn_k", shape["kv_heads"] * dim, hidden),
                ("attn_v", shape["kv_heads"] * dim, hidden), ("attn_output", hidden, heads * dim),
                ("ffn_gate", shape["intermediate"], hidden),
                ("ffn_up", shape["intermediate"], hidden),
                ("ffn_down", hidden, shape["intermediate"])):
            matrix(f"blk.{i}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Reader:
    """Walks through a state."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, nbytes):
        """The next bytes."""
        self.at += nbytes
        return self.data[self.at - nbytes:self.at]

    def fields(self, form):
        """The next values, by struct's form."""
        return struct.unpack(form, self.take(struct.calcsize(form)))


def layers_of(read, tokens, transposed, behind):
    """K and V of all layers, of SEED tokens, as those of so many; and the bytes behind them, of
    which there must be so many."""
    times, count = tokens // SEED, read.fields("<I")[0]
    parts = [struct.pack("<I", count)]
    for is_v in (False, True):
        for _ in range(count):
            if is_v and transposed:
                head = read.take(12)
                _, size, values = struct.unpack("<iII", head)
                rows = np.frombuffer(read.take(SEED * size * values), np.uint8)
                parts += [head, np.tile(rows.reshape(values, -1), (1, times)).tobytes()]
            else:
                head = read.take(12)
                parts += [head, read.take(SEED * struct.unpack("<iQ", head)[1]) * times]
    if len(read.data) - read.at != behind:
        raise RuntimeError(f"{len(read.data) - read.at} bytes of the state were not understood: "
                           "this version writes another one")
    return [*parts, read.take(behind)]


def load_backends(api):
    """Makes ggml load what GGML_BACKEND_PATH names, as llama.cpp's own programs do."""
    if os.environ.get("GGML_BACKEND_PATH"):
        folder = os.path.join(os.path.dirname(api.__file__), "lib")
        ctypes.CDLL(os.path.join(folder, "libggml.so.0")).ggml_backend_load_all()


def decode(api, context, at, ids, sequences=1):
    """Decodes ids from position `at` on, in each of the sequences, with the last one's logits;
    llama_decode's status."""
    n = len(ids)
    batch = api.llama_batch_init(n * sequences, 0, 1)
    batch.n_tokens = n * sequences
    for i in range(batch.n_tokens):
        batch.token[i], batch.pos[i] = ids[i % n], at + i % n
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, i // n
        batch.logits[i] = i % n + 1 == n
    code = api.llama_decode(context, batch)
    api.llama_batch_free(batch)
    return code


class Cache(Row):
    """A context that is full: as many sequences as the batch has, of the same tokens. Subclasses
    say how one begins, and how a sequence's state is read and set."""
    api = context = None

    def __init__(self, worker, kind, flash, tokens, batch):
        self.worker, self.at, self.batch = worker, 0, batch
        self.begin(kind, flash, tokens)
        try:
            self._fill_sequences(tokens)
        except BaseException:
            self.free()
            raise

    def free(self):
        """Frees the context, if there is one."""
        if self.context:
            self.api.llama_free(self.context)
        self.context = None

    def _fill_sequences(self, tokens):
        self.decode(range(1, 1 + SEED), 1)
        longer = self.longer(bytes(self.state()), tokens)
        self.set_states(longer)
        self.state_bytes, self.at = self.batch * len(longer), tokens

    def options(self, kind, tokens):
        """Of a context, but for flash attention."""
        options = self.api.llama_context_default_params()
        options.n_ctx = self.batch * (tokens + ROOM)
        options.n_batch = options.n_ubatch = AT_ONCE
        options.n_seq_max = self.batch
        options.n_threads = options.n_threads_batch = self.worker.threads
        options.type_k = options.type_v = TYPES[kind]
        return options

    def begin(self, kind, flash, tokens):
        """Makes self.context."""
        raise NotImplementedError

    def make(self, options):
        """The context of these options."""
        self.context = self.api.llama_init_from_model(self.worker.model, options)
        if not self.context:
            raise RuntimeError("llama.cpp makes no such context")

    def state(self):
        """Of the first sequence."""
        raise NotImplementedError

    def set_states(self, state):
        """Gives a state to each sequence."""
        given = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        for sequence in range(self.batch):
            if self.set_state(given, sequence) != len(state):
                raise RuntimeError(f"{type(self).__module__} does not take the state")

    def set_state(self, state, sequence):
        """Gives one its state; how many bytes of it were taken."""
        raise NotImplementedError

    def longer(self, state, tokens):
        """The state of SEED tokens as one of so many."""
        raise NotImplementedError

    def decode(self, ids, sequences):
        """Goes on in the first ones."""
        if decode(self.api, self.context, self.at, ids, sequences):
            raise RuntimeError("llama_decode failed")
        self.at += len(ids)

    def step(self):
        """See worker.py."""
        self.decode([5], self.batch)

    def nbytes(self):
        """See worker.py: of the sequences' states."""
        return self.state_bytes

    def close(self):
        """See worker.py."""
        self.free()
        super().close()


if __name__ == "__main__":
    write_model(sys.argv[1])
