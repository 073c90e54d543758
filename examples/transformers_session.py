#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A chat whose KV cache outlives this process, and begins with what others had of its prompt:

    examples/transformers_session.py MODEL NAME QUESTION

The first call with a NAME begins a chat, further ones go on with it. MODEL is a name or a folder,
as transformers takes it, or a file that ends in .gguf. The chat's words and ids are kept in
NAME.json, its K and V in the session NAME of a kvqd with a --storage-dir. Both belong together: a
session that is there without its NAME.json, or with an older one, is refused, or goes on wrongly
(kvqctl session drop NAME ends it). A model whose chat template changes earlier turns, as Qwen3's
drops their thinking, has one turn alone: a second one is refused.
"""
import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvq.transformers

RULES = """You are the assistant of a library that lends books, maps and records. Be kind and be
brief. The library is open from nine to eight, on Saturdays from ten to four, and closed on Sundays.
A book may be kept for four weeks, a map for one week, and a record for two; each of them may be
kept as long again if nobody else has asked for it. Up to twenty things may be borrowed at a time.
Whoever is late pays ten cents for each day and thing, and never more than the thing has cost. A
card costs nothing for children and pupils, and twelve a year for all others. Books that the library
does not have can be ordered from other towns, which takes about ten days. The reading room on the
second floor has forty places, newspapers from nine countries, and a copier. Dogs stay outside.
There are stories for small children on Wednesdays at three, and a chess club meets on Fridays at
six. Old maps may only be read in the reading room. Records can be heard there before they are
borrowed. Ask for a name and the number of a card before you say what somebody has borrowed."""


def main(model, name, question):
    folder, file = os.path.split(os.path.abspath(model))
    where = {"gguf_file": file} if file.endswith(".gguf") else {}
    tokenizer = AutoTokenizer.from_pretrained(folder if where else model, **where)
    model = AutoModelForCausalLM.from_pretrained(folder if where else model,
                                                 attn_implementation="kvq", **where)
    ids, said = [], [{"role": "system", "content": RULES}]
    if os.path.exists(f"{name}.json"):
        with open(f"{name}.json", encoding="utf-8") as kept:
            ids, said = json.load(kept)
    before = tokenizer.apply_chat_template(said, tokenize=False) if ids else ""
    said.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    if not text.startswith(before):  # as where thinking is left out of all answers but the last
        sys.exit(f"{name} cannot go on: this model's chat template renders earlier turns otherwise "
                 "once a new one stands behind them, and the session has the tokens of the former "
                 "text. Take a model whose template leaves earlier turns as they were.")
    ids += tokenizer(text[len(before):], add_special_tokens=False)["input_ids"]

    with kvq.transformers.KvqCache(model, "oscar4", name=name, prefix=ids) as cache:
        print(f"{cache.get_seq_length()} of {len(ids)} tokens are there")
        given = torch.tensor([ids])
        named = {kvq.transformers.cache_name(model): cache}
        out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=40,
                             do_sample=False, **named)[0].tolist()
        cache.save()
    answer = tokenizer.decode(out[len(ids):], skip_special_tokens=True)
    if out[-1] != tokenizer.eos_token_id:  # cut: the next turn stands behind the end of this one
        out.append(tokenizer.eos_token_id)
    print(answer)
    with open(f"{name}.json", "w", encoding="utf-8") as kept:
        json.dump((out, [*said, {"role": "assistant", "content": answer}]), kept)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
