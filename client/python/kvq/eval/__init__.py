# SPDX-License-Identifier: Apache-2.0
"""Measures what kvq's formats do to a model of yours, beside controls and other quantized caches.

    python -m kvq.eval MODEL --formats oscar4,oscar2

docs/eval.md says what the numbers are. It needs PyTorch and transformers
(pip install 'kvq[eval]'); `stats`, `results` and `report` need NumPy alone.
"""
from typing import List, Optional

__all__ = ["main"]


def main(arguments: Optional[List[str]] = None) -> int:
    """The command `python -m kvq.eval`; returns its exit status."""
    from .command import main as run
    return run(arguments)
