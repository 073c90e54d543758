#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs one measuring part of tools/gpu-check.sh and writes its JSON.

    check.py PART --library FILE --out FILE
    check.py report --folder FOLDER
"""
import argparse
import datetime
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import attend  # noqa: E402
import lab as labs  # noqa: E402
import probes  # noqa: E402
import report  # noqa: E402
import steps  # noqa: E402

PARTS = {"probes": probes.probes, "points": attend.points, "shapes": attend.shapes,
         "grids": attend.grids, "packing": attend.packing, "prefill": attend.prefill,
         "steps": steps.steps, "batches": steps.batches}


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
    result = {"part": o.part, "device": lab.name, "timed": lab.timed,
              "date": datetime.date.today().isoformat(), "rows": PARTS[o.part](lab)}
    Path(o.out).write_text(json.dumps(result, indent=1) + "\n")
    wrong = report.complaints(result)
    for text in wrong:
        print(f"{o.part}: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
