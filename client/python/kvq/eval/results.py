# SPDX-License-Identifier: Apache-2.0
"""Measurements, kept one JSON object a line as they are made: a run that was ended goes on."""
from __future__ import annotations

import json
import os
from typing import Any, Dict, Iterable, List, Optional

import numpy as np


def rounded(values: Iterable[float]) -> List[float]:
    """Numbers as a line keeps them, with 7 digits."""
    return [float(f"{x:.7g}") for x in values]


def key_of(*parts: object) -> str:
    """The key of a measurement: what it depends on."""
    return "|".join(str(part) for part in parts)


class Results:
    """The lines of a file by their keys. A line that a killed run left half written is passed over,
    and measured again."""

    def __init__(self, path: str, taken: Optional[Dict[str, Any]] = None) -> None:
        self.path = path
        self.taken = taken  # on which machine, by how many threads and what versions
        self.lines: Dict[str, Dict[str, Any]] = {}
        whole = True
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                for text in file:
                    whole = text.endswith("\n")
                    try:
                        line = json.loads(text)
                        self.lines[line["key"]] = line
                    except (json.JSONDecodeError, KeyError, TypeError):
                        continue
        self._file = open(path, "a", encoding="utf-8")
        if not whole:
            self._file.write("\n")

    def get(self, key: str) -> Optional[Dict[str, Any]]:
        """The measurement with this key, or None."""
        return self.lines.get(key)

    def put(self, key: str, line: Dict[str, Any]) -> None:
        """Keeps a measurement, on disk before this returns."""
        line = {"key": key, **line, **({"taken": self.taken} if self.taken else {})}
        text = json.dumps(line)
        self._file.write(text + "\n")
        self._file.flush()
        self.lines[key] = json.loads(text)

    def are_of_here(self, lines: Iterable[Dict[str, Any]]) -> bool:
        """Whether speeds of these lines are of this machine, these threads and versions."""
        return all(line.get("taken") == self.taken for line in lines)

    def other_versions(self, lines: Iterable[Dict[str, Any]]) -> List[str]:
        """The versions of kvq, transformers and PyTorch that lines were measured with, where they
        are not this run's."""
        def told(taken):
            return ", ".join(f"{name} {taken[name]}" for name in ("kvq", "transformers", "torch")
                             if name in taken)
        here = told(self.taken or {})
        return sorted({told(line["taken"]) for line in lines if line.get("taken")} - {here, ""})

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def array(line: Dict[str, Any], name: str) -> np.ndarray:
    """The numbers [tokens] that a line has under a name; `same` is text of 0 and 1."""
    value = line[name]
    if isinstance(value, str):
        return np.frombuffer(value.encode(), np.uint8) == ord("1")
    return np.array(value, np.float64)
