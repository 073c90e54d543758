# SPDX-License-Identifier: Apache-2.0
"""Teacher-forced text: a few caches beside the reference, step by step, so that no more logits
are held than a step has."""
from __future__ import annotations

import math
import sys
import time
from typing import Any, Callable, Dict, List, Sequence, Set

import torch

import kvq

from .models import Failed
from .results import Results, key_of, rounded
from .sides import Side

METHOD = 1  # raised when a number would come out otherwise than before: lines of old runs are not
#             taken then
_ROWS = 16  # tokens whose distributions are held in double precision
_EVERY = 30  # seconds between two lines of progress in the midst of a window


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def compare(reference: torch.Tensor, logits: torch.Tensor, following: torch.Tensor
            ) -> Dict[str, List[float]]:
    """Logits [n][vocabulary] against the reference's, and the tokens [n] that followed: nll, gain,
    kl and same (stats.summary), n numbers each."""
    out: Dict[str, List[float]] = {"nll": [], "gain": [], "kl": [], "same": []}
    for at in range(0, len(following), _ROWS):
        rows = slice(at, at + _ROWS)
        want, have = (x[rows].double().log_softmax(-1) for x in (reference, logits))
        there = following[rows, None]
        own = have.gather(1, there)[:, 0]
        kl = (want.exp() * (want - have)).sum(-1)
        if not bool(torch.isfinite(kl).all() and torch.isfinite(own).all()):
            raise Failed("its logits are not finite")
        out["nll"] += (-own).tolist()
        out["gain"] += (own - want.gather(1, there)[:, 0]).tolist()
        out["kl"] += kl.clamp(min=0).tolist()
        out["same"] += (want.argmax(-1) == have.argmax(-1)).tolist()
    return out


class Failures:
    """Sides that could not be measured, and why. The others go on."""

    def __init__(self) -> None:
        self.why: Dict[str, str] = {}
        self.absent: Set[str] = set()  # of them, those whose packages are not installed

    def attempt(self, side: Side, what: Callable[[], Any]) -> Any:
        """What the side does, or None if it has failed, now or before."""
        if side.key in self.why:
            return None
        try:
            return what()
        except (kvq.Error, Failed, NotImplementedError, ImportError, RuntimeError, ValueError
                ) as error:
            self.why[side.key] = " ".join(str(error).split())
            if isinstance(error, ImportError):
                self.absent.add(side.key)
            say(f"  {side.key}: {self.why[side.key]}")
            side.end()
            return None


def step_of(reference: Side, sides: Sequence[Side], ids: torch.Tensor, at: int, step: int,
            failures: Failures, kept: Dict[str, Dict[str, List[float]]]) -> None:
    """One step of the reference and of all sides; adds what it says of each."""
    piece = ids[at:at + step]
    following = ids[at + 1:at + 1 + len(piece)]  # the last step's last token has none
    try:
        want = reference.forward(piece)[:len(following)]
    except RuntimeError as error:
        raise Failed(f"the model itself cannot run: {error}") from None
    if not bool(torch.isfinite(want).all()):
        raise Failed(f"the model's own logits are not finite in {want.dtype} "
                     f"(tokens {at} to {at + len(piece)} of a window); try another --dtype")
    for side in [reference, *sides]:
        def measured(side=side):
            own = want if side is reference else side.forward(piece)[:len(following)]
            return compare(want, own, following)
        told = failures.attempt(side, measured)
        for name, numbers in (told or {}).items():
            kept[side.key][name] += numbers


class Left:
    """How much of a run is left, by what it took so far."""

    def __init__(self, passes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.passes, self.done, self.clock, self.began = passes, 0, clock, clock()
        self.spoke = self.began

    def gone(self, passes: int) -> None:
        """So many caches went through a window."""
        self.done += passes

    def lost(self, passes: int) -> None:
        """So many will not be made: of caches that have failed."""
        self.passes -= passes

    def told(self, part: float = 0) -> str:
        """For a line of progress; nothing while nothing is known. `part` of a pass is under way."""
        self.spoke = self.clock()
        done, rest = self.done + part, self.passes - self.done - part
        if not done or rest <= 0:
            return ""
        minutes = (self.spoke - self.began) / done * rest / 60
        return (f" ({self.done} of {self.passes} done, about {math.ceil(minutes)} more "
                f"minute{'' if minutes <= 1 else 's'})")

    def midst(self, done: int, of: int, passes: int, what: str = "tokens") -> None:
        """So many passes have `done` of their `of` tokens (or what is said) behind them: a line of
        progress, unless there was one a short while ago."""
        if self.clock() - self.spoke >= _EVERY:
            say(f"  {done} of {of} {what}{self.told(passes * done / of)}")


def window(reference: Side, sides: Sequence[Side], ids: List[int], step: int, failures: Failures,
           left: Left) -> Dict[str, Dict[str, Any]]:
    """One window through the reference and all sides; what a line keeps of each, by its key."""
    running = [reference, *sides]
    kept: Dict[str, Dict[str, Any]] = {
        s.key: {"nll": [], "gain": [], "kl": [], "same": []} for s in running}
    given = torch.tensor(ids)
    try:
        for side in running:
            failures.attempt(side, side.begin)
        for at in range(0, len(ids), step):
            left.midst(at, len(ids), len(sides))
            step_of(reference, sides, given, at, step, failures, kept)
        lines = {}
        for side in running:
            sizes = failures.attempt(side, side.sizes)
            if sizes is None:
                continue
            own = kept[side.key]
            same = "".join("1" if x else "0" for x in own.pop("same"))
            lines[side.key] = {**{n: rounded(v) for n, v in own.items()}, "same": same,
                               "sizes": sizes, "seconds": side.seconds, "step": step}
    finally:
        for side in running:
            side.end()
    return lines


def run(results: Results, reference: Side, sides: Sequence[Side], texts: Sequence[List[int]],
        names: Sequence[str], step: int, together: int, failures: Failures) -> None:
    """Measures what the results lack: every side over every window of ids, whose names are given.
    At most `together` sides run beside the reference, each with a cache of its own."""
    def is_missing(side, name):
        return results.get(score_key(reference, side, name, step)) is None
    left = Left(sum(is_missing(s, name) for s in sides if s.key not in failures.why
                    for name in names))
    for number, (ids, name) in enumerate(zip(texts, names)):
        def missing(some, name=name):
            return [s for s in some if s.key not in failures.why and is_missing(s, name)]
        todo = missing(sides)
        groups = [todo[i:i + together] for i in range(0, len(todo), together)]
        if not groups and missing([reference]):
            groups = [[]]
        for group in groups:
            say(f"window {number + 1} of {len(texts)}, {len(ids)} tokens{left.told()}: "
                + ", ".join(s.key for s in group or [reference]))
            for key, line in window(reference, group, ids, step, failures, left).items():
                side = next(s for s in [reference, *group] if s.key == key)
                own = score_key(reference, side, name, step)
                if results.get(own) is None:
                    results.put(own, {"part": "score", "side": key, "window": name, **line})
            left.gone(len(group))
            left.lost(sum(is_missing(s, later) for s in group if s.key in failures.why
                          for later in names[number + 1:]))


def score_key(reference: Side, side: Side, window_name: str, step: int) -> str:
    """What a line of a window depends on."""
    models = reference.models
    return key_of("score", METHOD, models.id, models.dtype, models.attention, step, window_name,
                  side.key)
