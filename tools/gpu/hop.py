#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The part `hop` of tools/gpu-check.sh: what a layer's way to the daemon costs on this machine's
GPU, with and without MPS, from a folder that pack.py made (kvq-bench hop --help says what is
measured).

    hop.py FOLDER --out FILE [--emulate]

--emulate takes the software driver: outputs are compared and nothing is timed. With MPS means an
MPS daemon of its own, which is started for it and ended after.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import check  # noqa: E402
import daemon  # noqa: E402
import report  # noqa: E402

SMALL = ("--tokens", "100", "--sessions", "2", "--layers", "2", "--q-heads", "4", "--kv-heads", "2",
         "--head-dim", "64", "--reps", "1")
FIGURES = ("us", "host_us", "extra_us", "vs_local")


def name_of(row):
    return f"{row['request']}, {row['sessions']:.0f} x {row['tokens']:.0f}, {row['mode']}"


def run_hop(machine, **environment):
    """{name: figures} of one run."""
    machine.need(daemon.SERVES)
    done = machine.run(machine.folder / "bin" / "kvq-hop", "--json", "--driver", machine.driver,
                       *(SMALL if machine.emulate else ()), **environment)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-300:]}")
    rows = json.loads(done.stdout[done.stdout.index("["):])
    return {name_of(row): {"not_run": row["not_run"]} if "not_run" in row else
            {key: row.get(key) for key in FIGURES} | {"MPS": row["mps"]} for row in rows}


def without_mps(machine):
    return run_hop(machine, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")


def with_mps(machine):
    control = shutil.which("nvidia-cuda-mps-control")
    if machine.emulate or not control:
        raise daemon.NotRun("the software driver has no MPS" if machine.emulate else
                            "nvidia-cuda-mps-control is not here")
    with tempfile.TemporaryDirectory(prefix="kvq-mps-") as folder:
        where = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = machine.run(control, "-d", **where)
        if started.returncode:
            raise daemon.NotRun(f"MPS does not start: {started.stdout.strip()[-200:]}")
        try:
            return run_hop(machine, **where)
        finally:
            subprocess.run([control], input="quit\n", text=True, check=False,
                           env={**os.environ, **where}, timeout=60)


def make(function, machine):
    try:
        return function(machine)
    except daemon.NotRun as why:
        return {"not_run": str(why)}
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        return {"wrong": str(error)}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that pack.py made")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--emulate", action="store_true")
    o = parser.parse_args()
    machine = daemon.Machine(o.folder.resolve(), o.emulate)
    rows = check.Rows("hop", types.SimpleNamespace(name=machine.name, timed=not o.emulate), o.out)
    for name, function in (("without MPS", without_mps), ("with MPS", with_mps)):
        row = rows.measure([name], lambda f=function: make(f, machine))
        if "not_run" in row:
            print(f"not run: {name}: {row['not_run']}")
    rows.save(complete=machine.reasons["GPU driver"] is None)
    wrong = report.complaints(rows.result)
    for text in wrong:
        print(f"hop: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
