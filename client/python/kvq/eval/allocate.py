# SPDX-License-Identifier: Apache-2.0
"""A mix of formats, layer by layer, for a number of bits: layers that a model feels more get more.

Each layer by itself is set to each lower level while all others have the highest, and the KL
divergence that this adds to most tokens is its sensitivity. The mix takes these for additive, which
they are for small ones, and buys, from the lowest level up, what takes away the most KL for a bit.
Controls are the same levels dealt to the layers in other orders: they have the mix's bits, without
what was measured."""
from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from typing import Any, Dict, List, Sequence

import numpy as np
import torch

import kvq

from .models import Failed, Models
from .results import Results, array
from .score import Failures, run, say, score_key
from .sides import Format, Side

TAIL = 0.01  # of a window's tokens, those with the most KL, which no layer is judged by

Sensitivity = List[Dict[str, float]]  # of each layer: KL by level


class Mixed(Format):
    """Formats layer by layer."""

    def __init__(self, like: Format, name: str, levels: Sequence[str]) -> None:
        super().__init__(like.models, name, like.path, like.client)
        self.levels = list(levels)
        told = hashlib.sha256(",".join(self.levels).encode()).hexdigest()[:12]
        self._key = f"{name}-{told}/{self.path}"

    @property
    def key(self) -> str:
        """With all levels in it: mixes of one name may differ."""
        return self._key

    def make(self) -> Any:
        """A cache whose rows of layers name their formats."""
        shown, self.name = self.name, self.levels[-1]
        try:
            cache = super().make()
        finally:
            self.name = shown
        rows = [dataclasses.replace(row, format=level)
                for row, level in zip(cache.state.table.rows(), self.levels)]
        cache.state.table.rows = lambda: rows
        return cache


def section(name: str, base: str, levels: Sequence[str]) -> str:
    """The section of kvqd's configuration for a level of each layer; `base` where nothing is
    said."""
    ranges: List[List[int]] = []
    for layer, level in enumerate(levels):
        if layer and levels[layer - 1] == level:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    told = [f"{a}-{b}:{levels[a]}" for a, b in ranges if levels[a] != base]
    return "\n".join([f"[format {name}]", f"base = {base}",
                      *(f"layers = {one}" for one in told)]) + "\n"


def without_tail(windows: Sequence[np.ndarray]) -> float:
    """The mean of the KLs [n] of each window without those of its TAIL. A single token can have
    more KL than all others of its window together, and a small change anywhere in the cache then
    takes it away or brings it."""
    return float(np.concatenate([
        np.sort(kl)[:len(kl) - math.ceil(TAIL * len(kl))] for kl in windows]).mean())


def enough(budget: float, bits: Dict[str, float]) -> None:
    """ValueError if the budget is less than the level with the fewest bits takes."""
    lowest = min(bits, key=lambda level: bits[level])
    if bits[lowest] > budget + 1e-9:
        raise ValueError(f"{budget:g} bits are less than {lowest} takes, {bits[lowest]:.3f}: give "
                         "more, or a lower one of --levels")


def other_orders(chosen: Sequence[str], sensitivity: Sensitivity, bits: Dict[str, float]
                 ) -> Dict[str, List[str]]:
    """The levels of a mix in other orders of layers: turned round, and the most bits first or
    last."""
    every = range(len(chosen))
    most = max(bits[level] for level in sensitivity[0])
    felt = [max((row[level] for level in row if bits[level] < most), default=0.0)
            for row in sensitivity]
    dealt = sorted(chosen, key=lambda level: -bits[level])

    def deal(order):
        found = dict(zip(order, dealt))
        return [found[layer] for layer in every]
    return {"reversed": deal(sorted(every, key=lambda i: (bits[chosen[i]], felt[i]))),
            "first": deal(every), "last": deal(reversed(every))}


def choose(sensitivity: Sensitivity, bits: Dict[str, float], budget: float) -> List[str]:
    """A level for each layer, with at most `budget` bits a value on the mean."""
    order = sorted(bits, key=lambda level: bits[level])
    layers = len(sensitivity)
    chosen, spent = [order[0]] * layers, bits[order[0]] * layers
    enough(budget, bits)
    while True:
        best, gain = None, 0.0
        for layer, level in enumerate(chosen):
            for other in order[order.index(level) + 1:]:
                price = max(bits[other] - bits[level], 1e-9)  # two levels may have the same bits
                if spent + price > budget * layers + 1e-9:
                    continue
                won = (sensitivity[layer][level] - sensitivity[layer][other]) / price
                if won > gain:
                    best, gain = (layer, other), won
        if best is None:
            return chosen
        spent += bits[best[1]] - bits[chosen[best[0]]]
        chosen[best[0]] = best[1]


class Allocation:
    """Mixes for numbers of bits, from windows of text."""

    def __init__(self, models: Models, reference: Side, like: Format, levels: Sequence[str],
                 budgets: Sequence[float]) -> None:
        self.models, self.reference, self.budgets = models, reference, list(budgets)
        self.uniform = [Format(models, level, like.path, like.client) for level in levels]
        self.bits = {side.name: bits_of(side) for side in self.uniform}
        self.uniform.sort(key=lambda side: self.bits[side.name])
        self.levels = [side.name for side in self.uniform]
        for budget in budgets:  # before hours of measuring
            enough(budget, self.bits)
        layers, top = models.table.layers, self.levels[-1]
        self.probes = {(layer, level): Mixed(like, f"probe-{layer}-{level}", [
            level if i == layer else top for i in range(layers)])
            for level in self.levels[:-1] for layer in range(layers)}
        self.like = like

    def measure(self, results: Results, windows: Sequence[List[int]], names: Sequence[str],
                step: int, together: int) -> None:
        """Every level for all layers, and every probe, where the results lack them."""
        failures = Failures()
        say(f"bits by layer: {len(self.probes)} caches with one layer at a lower level, over "
            f"{len(windows)} window(s) of {len(windows[0])} tokens")
        run(results, self.reference, [*self.uniform, *self.probes.values()], windows, names, step,
            together, failures)
        if failures.why:
            raise Failed("a level could not be measured: " + next(iter(failures.why.values())))

        def kl(side):
            found = [results.get(score_key(self.reference, side, name, step)) for name in names]
            return without_tail([array(line, "kl") for line in found if line])
        top = kl(self.uniform[-1])
        self.sensitivity: Sensitivity = [
            {self.levels[-1]: 0.0, **{level: max(kl(self.probes[layer, level]) - top, 0.0)
                                      for level in self.levels[:-1]}}
            for layer in range(self.models.table.layers)]

    def mixes(self, folder: str, controls: bool) -> List[Mixed]:
        """The mixes, with their sections in FOLDER/format.conf, and the controls of each."""
        made, sections = [], []
        for budget in self.budgets:
            chosen, name = choose(self.sensitivity, self.bits, budget), f"mix-{budget:g}"
            sections.append(section(name, max(chosen, key=chosen.count), chosen))
            made.append(Mixed(self.like, name, chosen))
            if controls:
                others = other_orders(chosen, self.sensitivity, self.bits)
                made += [Mixed(self.like, f"{name}-{other}", levels)
                         for other, levels in others.items()]
        with open(os.path.join(folder, "format.conf"), "w", encoding="utf-8") as file:
            file.write("\n".join(sections))
        return made


def bits_of(side: Format) -> float:
    """Bits of a packed number, as the daemon says; Failed where it does not take the format."""
    try:
        side.begin()
        side.forward(torch.tensor([0]))  # the session begins with the first token
        return float(side.info()["bits_per_value"])
    except (kvq.Error, ValueError, RuntimeError) as error:
        raise Failed(f"a level could not be measured: {error}") from None
    finally:
        side.end()
