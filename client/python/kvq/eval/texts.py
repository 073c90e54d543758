# SPDX-License-Identifier: Apache-2.0
"""Text, and the windows of token ids that caches are measured over."""
from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

# In a checkout of kvq: held-out text of the small model in tools/model.
_HELD_OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 4, "tools",
                         "model", "heldout.txt")


def read(path: Optional[str]) -> Tuple[str, str]:
    """Text and a name for it. None: kvq's held-out text in a checkout, else the language reference
    that comes with Python."""
    if path is None and os.path.exists(_HELD_OUT):
        path = _HELD_OUT
    if path is not None:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(), os.path.basename(path)
    from pydoc_data.topics import topics
    return "\n\n".join(topics[name] for name in sorted(topics)), "pydoc_data.topics"


def beginning(tokenizer: Any) -> List[int]:
    """The ids that this tokenizer puts before every text: [], or that of <bos>."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def told_beginning(tokenizer: Any) -> Optional[Dict[str, Any]]:
    """For the report: <bos>, and whether windows begin with it. None for a tokenizer without."""
    if tokenizer.bos_token_id is None:
        return None
    return {"token": tokenizer.bos_token, "put": bool(beginning(tokenizer))}


def encode(tokenizer: Any, text: str) -> List[int]:
    """Ids of a text that stands within another."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def windows(tokenizer: Any, text: str, count: int, context: int, skip: int = 0
            ) -> List[List[int]]:
    """`count` windows of `context` ids each, one behind the other in the text, each with <bos>
    before it where the tokenizer has one. The first `skip` tokens of the text are passed over."""
    head = beginning(tokenizer)
    body, ids = context - len(head), []
    need = skip + count * body
    for at in range(0, len(text), 1 << 16):  # no more of a long text than is needed
        ids += encode(tokenizer, text[at:at + (1 << 16)])
        if len(ids) >= need:
            break
    if len(ids) < need:
        raise ValueError(f"the text has {len(ids)} tokens; {count} windows of {context} tokens "
                         f"from token {skip} on need {need}: give a longer --text, or fewer "
                         "--windows or a smaller --context")
    return [head + ids[skip + i * body:skip + (i + 1) * body] for i in range(count)]


def name_of(ids: List[int]) -> str:
    """Tells windows apart."""
    return hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest()[:16]
