#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the model files from a checkpoint of train.py, and training.json for the card."""
import argparse
import json
import os
import platform
import re

import torch

import model


def processor():
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
        found = re.search(r"model name\s*:\s*(.*)", f.read())
    return found.group(1) if found else platform.machine()


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="folder of train.py; without it the weights are random")
    parser.add_argument("--sources", help="sources.json of corpus.py")
    parser.add_argument("--seed", type=int, default=1, help="of random weights")
    parser.add_argument("--out", default=os.path.join(here, "kvq-bytes"))
    args = parser.parse_args()
    if not args.run:
        model.save(model.init(args.seed), args.out)
        return
    saved = torch.load(os.path.join(args.run, "checkpoint.pt"))
    model.save(saved["masters"], args.out)
    with open(os.path.join(args.run, "progress.jsonl"), encoding="ascii") as f:
        progress = [json.loads(line) for line in f]
    facts = {**saved["state"], "processor": processor(), "torch": torch.__version__,
             "progress": progress[9::10] if len(progress) > 20 else progress}
    if args.sources:
        with open(args.sources, encoding="ascii") as f:
            facts["sources"] = json.load(f)
    with open(os.path.join(here, "training.json"), "w", encoding="ascii") as f:
        json.dump(facts, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()
