# SPDX-License-Identifier: Apache-2.0
"""Needles: a sentence that cannot be guessed stands some way back in a text, and is asked for.

The answer is teacher-forced: each of its tokens counts as right if it is the likeliest one, and the
item if all are. A model that does not find a needle with the engine's own cache says nothing about
formats, so the reference stands in the same table."""
from __future__ import annotations

import hashlib
import random
from functools import partial
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch

from .models import Failed
from .results import Results, key_of, rounded
from .score import METHOD, Failures, Left, say
from .sides import Side
from .stats import wilson
from .texts import beginning, encode

DISTANCES = (64, 256, 1024, 3072)
LEAD = 64  # tokens of text before the needle
SHARES = ((0.0, 0.0, "0%"), (0.0, 0.5, "up to 50%"), (0.5, 0.9, "50 to 90%"),
          (0.9, 1.0, "90 to 100%"))
_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "po", "ri", "su", "ta", "vel", "mor", "kan")

Item = Dict[str, Any]  # distance, prompt (ids), answer (ids)


def make(tokenizer: Any, text: str, distances: Sequence[int], count: int) -> List[Item]:
    """`count` items for each distance, in tokens from the needle's answer to the question's end.
    The same text and tokenizer give the same items."""
    head, hay = beginning(tokenizer), encode(tokenizer, text[:1 << 18])
    rng, items = random.Random(1), []
    for distance in distances:
        for _ in range(count):
            name = "".join(rng.choices(_SYLLABLES, k=3)).capitalize()
            question = encode(tokenizer, f"\n\nThe secret number of {name} is")
            answer = encode(tokenizer, f" {rng.randrange(10000, 100000)}")
            needle = question + answer + encode(tokenizer, ".\n\n")
            fill = distance - (len(needle) - len(question)) - len(question)
            if fill < 0:
                raise ValueError(f"a needle {distance} tokens away does not fit: its sentence has "
                                 f"{len(needle)} tokens, the question {len(question)}")
            if LEAD + fill > len(hay):
                raise ValueError(f"the text has {len(hay)} tokens; a needle {distance} tokens away "
                                 f"needs {LEAD + fill}: give a longer --text, or fewer --distances")
            at = rng.randrange(0, len(hay) - LEAD - fill + 1)
            items.append({"distance": distance, "answer": answer,
                          "prompt": head + hay[at:at + LEAD] + needle
                          + hay[at + LEAD:at + LEAD + fill] + question})
    return items


def ask(side: Side, item: Item, step: int) -> Dict[str, Any]:
    """What a side makes of an item: right (text of 0 and 1 for each token), bits for the answer,
    and the share of the cache that is not in full when the answer begins."""
    prompt, answer = item["prompt"], item["answer"]
    side.begin()
    try:
        body = torch.tensor(prompt[:-1])
        for at in range(0, len(body), step):
            side.forward(body[at:at + step], last=1)
        outside = 1 - side.in_full() / side.tokens
        logits = side.forward(torch.tensor([prompt[-1], *answer[:-1]]))
    finally:
        side.end()
    told = logits.double().log_softmax(-1)
    if not bool(torch.isfinite(told).all()):
        raise Failed("its logits are not finite")
    want = torch.tensor(answer)
    right = told.argmax(-1) == want
    bits = -told.gather(1, want[:, None]).sum() / np.log(2)
    return {"right": "".join("1" if x else "0" for x in right.tolist()),
            "bits": rounded([float(bits)])[0], "outside": rounded([outside])[0]}


def needle_key(reference: Side, side: Side, item: Item, step: int) -> str:
    """What a line of an item depends on."""
    models = reference.models
    ids = np.array([*item["prompt"], -1, *item["answer"]], np.int64)
    return key_of("needle", METHOD, models.id, models.dtype, models.attention, step,
                  hashlib.sha256(ids.tobytes()).hexdigest()[:16], side.key)


def run(results: Results, sides: Sequence[Side], items: Sequence[Item], step: int,
        failures: Failures) -> None:
    """Asks every side for every item that the results lack; the first side is the reference."""
    def missing(side):
        return [] if side.key in failures.why else [
            item for item in items if results.get(needle_key(sides[0], side, item, step)) is None]
    left = Left(sum(len(missing(side)) for side in sides))
    for side in sides:
        todo = missing(side)
        if todo:
            say(f"needles: {side.key}, {len(todo)} of {len(items)}{left.told()}")
        for number, item in enumerate(todo):
            left.midst(number, len(todo), len(todo), "needles")
            told = failures.attempt(side, partial(ask, side, item, step))
            if told:
                results.put(needle_key(sides[0], side, item, step),
                            {"part": "needle", "side": side.key, "distance": item["distance"],
                             **told})
        left.gone(len(todo))


def _recall(lines: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    right = [all(c == "1" for c in line["right"]) for line in lines]
    low, high = wilson(sum(right), len(right))
    return {"items": len(right), "right": sum(right) / len(right), "right_low": low,
            "right_high": high,
            "tokens": float(np.mean([c == "1" for line in lines for c in line["right"]])),
            "bits": float(np.mean([line["bits"] for line in lines]))}


def bucket(outside: float) -> str:
    """The name of the part of the cache that is not in full."""
    for low, high, name in SHARES:
        if outside <= low == high or low < outside <= high:
            return name
    raise ValueError(f"a share of {outside}")


def summary(lines: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Recall of all items, by distance, and by the share of the cache outside of the format's
    window."""
    groups: Tuple[Dict[Any, List[Dict[str, Any]]], ...] = ({}, {})
    for line in lines:
        groups[0].setdefault(line["distance"], []).append(line)
        groups[1].setdefault(bucket(line["outside"]), []).append(line)
    order = [name for _, _, name in SHARES]
    return {"all": _recall(lines),
            "by_distance": [{"distance": d, **_recall(groups[0][d])} for d in sorted(groups[0])],
            "by_outside": [{"outside": n, **_recall(groups[1][n])}
                           for n in sorted(groups[1], key=order.index)]}
