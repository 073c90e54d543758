#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A worker of bench-peers.py: `serve.py PEER`, with the rows of of_PEER.py. An interpreter that
lacks what they import answers so."""
import importlib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "engines"))
from worker import serve  # noqa: E402

if __name__ == "__main__":
    serve(lambda threads: importlib.import_module("of_" + sys.argv[1]).make(threads))
