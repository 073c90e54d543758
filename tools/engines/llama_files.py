# SPDX-License-Identifier: Apache-2.0
"""What rows of bench-engines.py in llama.cpp and in ik_llama.cpp share: the model in a GGUF file,
and a sequence's state as one of more tokens."""
import struct

import gguf
import numpy as np

from worker import SHAPE

SEED = 64  # tokens that are really decoded


def write_model(path):
    """Random weights in bfloat16."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    heads, dim, hidden = SHAPE["heads"], SHAPE["head_dim"], SHAPE["hidden"]
    writer.add_block_count(SHAPE["layers"])
    writer.add_context_length(1 << 18)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(SHAPE["intermediate"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(SHAPE["kv_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(SHAPE["vocabulary"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name, rows, columns):
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(0.02)
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
        writer.add_tensor(name, words.view(np.uint8),
                          raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name):
        writer.add_tensor(name, np.ones(hidden, np.float32))
    matrix("token_embd.weight", SHAPE["vocabulary"], hidden)
    matrix("output.weight", SHAPE["vocabulary"], hidden)
    norm("output_norm.weight")
    for i in range(SHAPE["layers"]):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for name, rows, columns in (
                ("attn_q", heads * dim, hidden), ("attn_k", SHAPE["kv_heads"] * dim, hidden),
                ("attn_v", SHAPE["kv_heads"] * dim, hidden), ("attn_output", hidden, heads * dim),
                ("ffn_gate", SHAPE["intermediate"], hidden),
                ("ffn_up", SHAPE["intermediate"], hidden),
                ("ffn_down", hidden, SHAPE["intermediate"])):
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
