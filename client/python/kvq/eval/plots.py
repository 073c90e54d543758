# SPDX-License-Identifier: Apache-2.0
"""Plots of a report: error and recall, by bits a value and by distance."""
from __future__ import annotations

import os
from typing import Any, Dict, List, Tuple

from . import svg

Points = Dict[str, List[Tuple[float, float]]]


def label(row: Dict[str, Any]) -> str:
    """How a row is called in a plot."""
    return row["name"] + ("/fast" if row["path"] == "fast" else "")


def by_bits(report: Dict[str, Any]) -> Points:
    """KL of each cache but the reference, at the bits that it takes. A cache that takes none has no
    place on the axis."""
    return {label(row): [(row["score"]["sizes"]["bits"], row["score"]["kl"])]
            for row in report["rows"]
            if "score" in row and row["kind"] != "reference" and row["score"]["sizes"]["bits"] > 0}


def answers(report: Dict[str, Any]) -> Points:
    """How long answers stay the reference's, at the bits of the text's windows."""
    return {label(row): [(row["score"]["sizes"]["bits"], row["answers"]["same"])]
            for row in report["rows"]
            if "score" in row and "answers" in row and row["kind"] != "reference"
            and row["score"]["sizes"]["bits"] > 0}


def recall(report: Dict[str, Any]) -> Points:
    """Needles that were found, in percent, by distance."""
    return {label(row): [(g["distance"], 100 * g["right"]) for g in row["needles"]["by_distance"]]
            for row in report["rows"] if "needles" in row}


def write(report: Dict[str, Any], folder: str) -> List[Tuple[str, str]]:
    """Writes what there are numbers for. Returns a title and the file's name for each plot."""
    model, made = report["model"], []
    for name, title, x, y, series, options in (
            ("kl.svg", "KL by bits a value", "bits a value, windows included",
             "KL from the reference, nats", by_bits(report), {"log_x": True, "log_y": True}),
            ("needles.svg", "Needles by distance", "tokens away", "found, %", recall(report),
             {"log_x": True}),
            ("answers.svg", "Long answers by bits a value", "bits a value, windows included",
             "tokens like the reference", answers(report), {"log_x": True})):
        if svg.plot(os.path.join(folder, name), f"{title}: {model}", x, y, series, **options):
            made.append((title, name))
    return made
