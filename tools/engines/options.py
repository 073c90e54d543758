# SPDX-License-Identifier: Apache-2.0
"""Options that bench-engines.py and bench-prompt.py share, of the engines' processes: which
interpreter each one has, since hardly one has the packages of all, and how its threads wait."""
import os


def add_options(parser, engines):
    """Tells a parser of them; engines are the names that --python takes."""
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH",
                        help="interpreter of " + ", ".join(engines) + " (the one that runs this)")
    parser.add_argument("--waiting", default="passive", choices=("passive", "active", "default"),
                        help="how OpenMP's threads wait for work (%(default)s)")


def take_options(parser, given, engines):
    """Makes given.python {engine: path}."""
    given.python = dict(x.partition("=")[::2] for x in given.python)
    unknown = set(given.python) - set(engines)
    if unknown:
        parser.error(f"--python: {', '.join(sorted(unknown))} is no engine; there are "
                     + ", ".join(engines))


def environment(given, threads):
    """Of an engine's process."""
    made = os.environ | {"OMP_NUM_THREADS": str(threads),
                         "KVQ_BENCH_SMALL": "1" if given.small else ""}
    made.pop("OMP_WAIT_POLICY", None)
    if given.waiting != "default":
        made["OMP_WAIT_POLICY"] = given.waiting
    return made
