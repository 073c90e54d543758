#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A worker of bench-engines.py: `serve.py ENGINE`, with the rows of in_ENGINE.py. An interpreter
that lacks what they import answers so."""
import importlib
import sys

from worker import serve

if __name__ == "__main__":
    serve(lambda threads: importlib.import_module("in_" + sys.argv[1]).make(threads))
