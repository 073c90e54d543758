# SPDX-License-Identifier: Apache-2.0
"""How objects show themselves: by what this process knows of them."""
from __future__ import annotations

from typing import Optional


class Shown:
    """Has a repr of what _told() says. It asks nobody, waits for nothing and never raises."""

    def _told(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        try:
            told = self._told()
        except Exception:  # its making has not come to an end
            told = "not open"
        return f"<kvq.{type(self).__name__} {told}>"


def number_of(what: str, n: int) -> str:
    """As "1 queue" and "2 queues"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def quoted(name: Optional[str]) -> str:
    """A name and a space; nothing where there is none."""
    return f"{name!r} " if name else ""
