# SPDX-License-Identifier: Apache-2.0
"""What bench-engines.py and bench-prompt.py ask of --ggml-backend: without the file, llama.cpp runs
as well, over its own cache."""
import os

MISSING = "needs --ggml-backend FILE, kvq's backend of ggml (docs/engines.md says how it is built)"


def choose_rows(parser, given, default, over_kvq):
    """Makes given.rows a list, and returns {row: why} of those that are left out: without the
    backend, the default rows in llama.cpp over kvq. Who names such a row must name the backend,
    too. over_kvq(row) says which ones these are."""
    if given.ggml_backend and not os.path.isfile(given.ggml_backend):
        parser.error(f"--ggml-backend: there is no file {given.ggml_backend}")
    rows = (given.rows or default).split(",")
    lacking = [] if given.ggml_backend else [row for row in rows if over_kvq(row)]
    if lacking and given.rows:
        parser.error(f"{lacking[0]} {MISSING}")
    given.rows = [row for row in rows if row not in lacking]
    return dict.fromkeys(lacking, MISSING)
