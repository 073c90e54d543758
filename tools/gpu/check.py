#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs one measuring part of tools/gpu-check.sh and writes its JSON, after every row of it: a part
that was stopped goes on behind its last row.

    check.py PART --library FILE --out FILE
    check.py report --folder FOLDER
"""
import argparse
import datetime
import functools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import attend  # noqa: E402
import lab as labs  # noqa: E402
import probes  # noqa: E402
import report  # noqa: E402
import steps  # noqa: E402

PARTS = {"probes": probes.probes,
         **{f"points-{n}": functools.partial(attend.points, n) for n in (48, 1)},
         "shapes": attend.shapes,
         "ablation": attend.ablation, "grids": attend.grids, "packing": attend.packing,
         "prefill": attend.prefill,
         **{f"steps-{name}": functools.partial(steps.steps, name) for name in steps.MODELS},
         **{f"batches-{name}": functools.partial(steps.batches, name) for name in steps.MODELS}}


class Rows:
    """The rows of a part as nested dictionaries, and the file that has them."""

    def __init__(self, part, lab, path=None):
        self.path = path
        self.result = {"part": part, "device": lab.name, "timed": lab.timed, "complete": False,
                       "date": datetime.date.today().isoformat(), "rows": {}}
        try:
            found = json.loads(path.read_text()) if path else {}
        except (OSError, ValueError):
            found = {}
        if all(found.get(key) == self.result[key] for key in ("part", "device", "timed")):
            self.result["rows"] = found["rows"]

    def __call__(self, *names):
        """The rows under some names."""
        rows = self.result["rows"]
        for name in names:
            rows = rows.setdefault(name, {})
        return rows

    def measure(self, names, make):
        """The row of these names, measured by make() unless it is there; None is no row."""
        rows = self(*names[:-1])
        if names[-1] not in rows:
            rows[names[-1]] = make()
            self.save()
        return rows[names[-1]]

    def save(self, complete=False):
        self.result["complete"] = complete
        if self.path:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.result, indent=1) + "\n")
            os.replace(new, self.path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "report"])
    parser.add_argument("--library", help="libkvq_gpu_rig.so, or that of the emulator")
    parser.add_argument("--out", help="file to write")
    parser.add_argument("--folder", help="of the parts' files, for the report")
    o = parser.parse_args()
    if o.part == "report":
        return report.write(Path(o.folder))
    lab = labs.open_lab(o.library)
    rows = Rows(o.part, lab, Path(o.out))
    PARTS[o.part](lab, rows)
    rows.save(complete=True)
    wrong = report.complaints(rows.result)
    for text in wrong:
        print(f"{o.part}: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
