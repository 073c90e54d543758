# SPDX-License-Identifier: Apache-2.0
"""A model, once as its engine runs it and once over kvqd, with the same weights in memory."""
from __future__ import annotations

import copy
import os
from typing import Any, Optional

import torch
import transformers

import kvq.transformers  # noqa: F401 (registers "kvq")
from kvq.transformers.table import Table, fingerprint

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Failed(Exception):
    """Something that whoever called has to mend; its text says what."""


class Models:
    """`reference` attends in the engine, `over_kvq` in kvqd."""

    def __init__(self, reference: Any, tokenizer: Any, name: str) -> None:
        self.reference, self.tokenizer, self.name = reference.eval(), tokenizer, name
        self.over_kvq = twin(reference)
        self.table = Table(self.over_kvq)  # refuses models that kvq does not serve
        self.id = fingerprint(reference)[-12:]
        self.dtype = str(reference.dtype).rpartition(".")[2]
        self.attention = reference.config._attn_implementation

    def values_at(self, tokens: int) -> int:
        """Numbers of K and V that attention can see with so many tokens in the cache."""
        seen = sum(min(tokens, window or tokens) for window in self.table.windows)
        return 2 * self.table.kv_heads * self.table.head_dim * seen


def twin(model: Any) -> Any:
    """The model once more, attending by "kvq", over the same parameters."""
    shared = {id(p): p for p in model.parameters()}
    made = copy.deepcopy(model, shared)
    made.set_attn_implementation("kvq")
    return made.eval()


def load(name: str, dtype: str, attention: str) -> Models:
    """From a folder, a file *.gguf, or a name of the hub whose files are in the cache already."""
    where: Any = {"local_files_only": True}
    source: Optional[str] = name
    if name.endswith(".gguf"):
        if not os.path.isfile(name):
            raise Failed(f"{name}: there is no such file")
        source, where["gguf_file"] = os.path.split(os.path.abspath(name))
    elif os.path.sep in name.rstrip(os.path.sep) and name.startswith((".", os.path.sep)) \
            and not os.path.isdir(name):
        raise Failed(f"{name}: there is no such folder")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, attn_implementation=attention, dtype=DTYPES[dtype], **where)
    except (OSError, ValueError, ImportError, KeyError) as error:
        hint = " (GGUF needs pip install gguf accelerate)" if "gguf_file" in where else ""
        raise Failed(f"{name} cannot be loaded{hint}: {error}") from None
    try:
        return Models(model, tokenizer, os.path.basename(os.path.normpath(name)))
    except NotImplementedError as error:
        raise Failed(f"{name}: {error}") from None
