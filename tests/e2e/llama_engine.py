#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A llama.cpp in a process of its own, for llama_test.py.

    llama_engine.py MODEL       reads lines of JSON, each a list that begins with what to do:
                                ["decode", [ids]], ["cut", tokens], ["clear"], ["shift", by],
                                ["save", FILE], ["restore", FILE, tokens]

Answers each with a line of JSON: of "decode" the last token's logits, or null if it failed. With
GGML_BACKEND_PATH in the environment llama.cpp loads that backend, and has flash attention unless
KVQ_TEST_FLASH is 0 (or -1, which leaves it to llama.cpp)."""
import ctypes
import json
import os
import sys

import llama_cpp as api
import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/engines"))
import llama_files  # noqa: E402


@api.llama_log_callback
def quiet(_level, _text, _data):
    pass


class Context:
    """One sequence."""

    def __init__(self, path):
        api.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_files.load_backends(api)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(),
                                                    api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = 2048, 512, 512
        options.n_threads = options.n_threads_batch = 2
        options.type_k = options.type_v = int(os.environ.get("KVQ_TEST_TYPE", "1"))
        flash = "1" if os.environ.get("GGML_BACKEND_PATH") else "0"
        options.flash_attn_type = int(os.environ.get("KVQ_TEST_FLASH", flash))
        self.context = api.llama_init_from_model(self.model, options)
        if not self.context:
            sys.exit("no context")
        self.words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.memory, self.at = api.llama_get_memory(self.context), 0

    def decode(self, ids):
        code = llama_files.decode(api, self.context, self.at, ids)
        if code:
            return None
        self.at += len(ids)
        return np.ctypeslib.as_array(api.llama_get_logits(self.context), (self.words,)).tolist()

    def cut(self, tokens):
        self.at = tokens
        return bool(api.llama_memory_seq_rm(self.memory, 0, tokens, -1))

    def shift(self, by):
        self.at += by
        api.llama_memory_seq_add(self.memory, 0, 0, -1, by)
        return True

    def clear(self):
        self.at = 0
        api.llama_memory_clear(self.memory, True)
        return True

    def save(self, path):
        state = (ctypes.c_uint8 * api.llama_state_seq_get_size(self.context, 0))()
        with open(path, "wb") as file:
            api.llama_state_seq_get_data(self.context, state, len(state), 0)
            return file.write(state)

    def restore(self, path, tokens):
        with open(path, "rb") as file:
            state = file.read()
        given = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        self.at = tokens
        return api.llama_state_seq_set_data(self.context, given, len(state), 0)


def main():
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    context = Context(sys.argv[1])
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(context, what)(*arguments)), file=out, flush=True)


if __name__ == "__main__":
    main()
