#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of Hugging Face's whose KV cache lies in kvqd:

    examples/transformers_chat.py MODEL [FORMAT] [QUESTION]

MODEL is a name or a folder, as transformers takes it, or a file that ends in .gguf.
"""
import os
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvq.transformers


def main(name, form="oscar4", question="What is a key-value cache?"):
    folder, file = os.path.split(os.path.abspath(name))
    where = {"gguf_file": file} if file.endswith(".gguf") else {}
    name = folder if where else name
    tokenizer = AutoTokenizer.from_pretrained(name, **where)
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kvq", **where)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}],
                                           add_generation_prompt=True, tokenize=False)
    given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with kvq.transformers.KvqCache(model, form) as cache:
        given[kvq.transformers.cache_name(model)] = cache
        ids = model.generate(**given, max_new_tokens=64, do_sample=False)
        print(tokenizer.decode(ids[0, given["input_ids"].shape[1]:], skip_special_tokens=True))
        print(f"{cache.get_seq_length()} tokens in {form}, "
              f"{cache.sessions[0].info()['bits_per_value']:.2f} bits per packed value")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
