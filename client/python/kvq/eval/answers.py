# SPDX-License-Identifier: Apache-2.0
"""Long answers: text goes on greedily, and how long a cache says what the reference says.

Behind the first other token the two are different texts, so nothing is compared there. A cache that
never parts counts with all tokens. Decoding speed is measured here, token by token."""
from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch

from .results import Results, key_of
from .score import METHOD, Failures, say
from .sides import Side
from .texts import name_of

TIMED = 16  # tokens, at the least, that a speed is the median of


def answer(side: Side, prompt: Sequence[int], tokens: int, step: int,
           like: Optional[Sequence[int]] = None) -> Dict[str, Any]:
    """Greedy tokens behind a prompt, and the median of their seconds. With `like`, ends once a
    token is another than there, but not before TIMED tokens."""
    side.begin()
    try:
        given = torch.tensor(prompt)
        for at in range(0, len(prompt), step):
            logits = side.forward(given[at:at + step], last=1)
        said: List[int] = [int(logits[-1].argmax())]
        seconds: List[float] = []
        while len(said) < tokens:
            parted = like is not None and said != list(like[:len(said)])
            if parted and len(seconds) >= TIMED:
                break
            began = time.perf_counter()
            said.append(int(side.forward(torch.tensor(said[-1:]), last=1)[-1].argmax()))
            seconds.append(time.perf_counter() - began)
        sizes = side.sizes()
    finally:
        side.end()
    return {"said": said, "median_seconds": statistics.median(seconds) if seconds else None,
            "sizes": sizes}


def same(said: Sequence[int], like: Sequence[int]) -> int:
    """How many tokens are alike before the first that is not."""
    return next((i for i, (a, b) in enumerate(zip(said, like)) if a != b),
                min(len(said), len(like)))


def answer_key(reference: Side, side: Side, prompt: List[int], tokens: int, step: int) -> str:
    """What a line of an answer depends on."""
    models = reference.models
    return key_of("answer", METHOD, models.id, models.dtype, models.attention, step, tokens,
                  name_of(prompt), side.key)


def run(results: Results, sides: Sequence[Side], prompts: Sequence[List[int]], tokens: int,
        step: int, failures: Failures) -> None:
    """Every side behind every prompt, where the results lack it; the first side is the reference,
    which the others are held against."""
    for number, prompt in enumerate(prompts):
        like: Optional[List[int]] = None
        for side in sides:
            key = answer_key(sides[0], side, prompt, tokens, step)
            line = results.get(key)
            if line is None and side.key not in failures.why:
                say(f"answer {number + 1} of {len(prompts)}: {side.key}")
                told = failures.attempt(side, partial(answer, side, prompt, tokens, step, like))
                if told:
                    told["same"] = tokens if like is None else same(told["said"], like)
                    results.put(key, {"part": "answer", "side": side.key, "tokens": tokens, **told})
                    line = results.get(key)
            if side is sides[0]:
                if line is None:
                    return
                like = line["said"]


def summary(lines: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """How long answers stay the reference's: the mean over prompts, its standard error, the
    median, and how many never part."""
    lengths = np.array([line["same"] for line in lines], np.float64)
    n, most = len(lengths), lines[0]["tokens"]
    return {"prompts": n, "tokens": most, "same": float(lengths.mean()),
            "same_error": float(lengths.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan"),
            "median": float(np.median(lengths)), "whole": int((lengths == most).sum())}


def speed(lines: Sequence[Dict[str, Any]]) -> Dict[str, float]:
    """Tokens a second of decoding: the median over prompts."""
    seconds = [line["median_seconds"] for line in lines if line["median_seconds"]]
    return {"decode_tokens_per_second": 1 / statistics.median(seconds)} if seconds else {}
