# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration, as transformers has it, says of its K and V."""
from __future__ import annotations

import json
from typing import Any, Iterator, Optional


def _parts(told: object) -> Iterator[Any]:
    """A dictionary and all that lie in it."""
    if isinstance(told, dict):
        yield told
        for value in told.values():
            yield from _parts(value)


def rope_by_length(config: Any) -> Optional[str]:
    """The kind of RoPE, of any type of layer, whose frequencies depend on how long what is computed
    is: a token then has another K in a longer prompt. None where there is none."""
    for part in _parts(json.loads(config.to_json_string())):
        for name in ("rope_type", "type"):
            kind = part.get(name)
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                return kind
    return None
