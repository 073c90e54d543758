# SPDX-License-Identifier: Apache-2.0
"""A mix of formats, layer by layer, for a number of bits: layers that a model feels more get more.

Each layer by itself is set to each lower level while all others have the highest, and the KL
divergence that this adds is its sensitivity. The mix takes these for additive, which they are for
small ones, and buys, from the lowest level up, what takes away the most KL for a bit."""
from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any, Dict, List, Sequence

from .models import Failed, Models
from .results import Results, array
from .score import Failures, run, score_key
from .sides import Format, Side
from .stats import mean

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


def choose(sensitivity: Sensitivity, bits: Dict[str, float], budget: float) -> List[str]:
    """A level for each layer, with at most `budget` bits a value on the mean."""
    order = sorted(bits, key=lambda level: bits[level])
    layers = len(sensitivity)
    chosen, spent = [order[0]] * layers, bits[order[0]] * layers
    if spent > budget * layers + 1e-9:
        raise ValueError(f"{budget} bits are less than {order[0]} takes, {bits[order[0]]:.3f}")
    while True:
        best, gain = None, 0.0
        for layer, level in enumerate(chosen):
            for other in order[order.index(level) + 1:]:
                price = bits[other] - bits[level]
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
    """The mix for a number of bits, from windows of text."""

    def __init__(self, models: Models, reference: Side, like: Format, levels: Sequence[str]
                 ) -> None:
        self.models, self.reference = models, reference
        self.uniform = [Format(models, level, like.path, like.client)
                        for level in levels]
        layers, top = models.table.layers, levels[-1]
        self.probes = {(layer, level): Mixed(like, f"probe-{layer}-{level}", [
            level if i == layer else top for i in range(layers)])
            for level in levels[:-1] for layer in range(layers)}
        self.like, self.levels = like, list(levels)

    def measure(self, results: Results, windows: Sequence[List[int]], names: Sequence[str],
                step: int, together: int) -> None:
        """Every level for all layers, and every probe, where the results lack them."""
        failures = Failures()
        run(results, self.reference, [*self.uniform, *self.probes.values()], windows, names, step,
            together, failures)
        if failures.why:
            raise Failed("a level could not be measured: " + next(iter(failures.why.values())))

        def lines(side):
            found = [results.get(score_key(self.reference, side, name, step)) for name in names]
            return [line for line in found if line]

        def kl(side):
            return mean([array(line, "kl") for line in lines(side)])[0]
        self.bits = {side.name: lines(side)[0]["sizes"]["bits_packed"] for side in self.uniform}
        top = kl(self.uniform[-1])
        self.sensitivity: Sensitivity = [
            {self.levels[-1]: 0.0, **{level: max(kl(self.probes[layer, level]) - top, 0.0)
                                      for level in self.levels[:-1]}}
            for layer in range(self.models.table.layers)]

    def mix(self, budget: float, folder: str) -> Mixed:
        """The mix of a number of bits, and its section in FOLDER/format.conf."""
        chosen = choose(self.sensitivity, self.bits, budget)
        name = f"mix-{budget:g}"
        with open(os.path.join(folder, "format.conf"), "w", encoding="utf-8") as file:
            file.write(section(name, max(set(chosen), key=chosen.count), chosen))
        return Mixed(self.like, name, chosen)
