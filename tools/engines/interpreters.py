# SPDX-License-Identifier: Apache-2.0
"""--python of bench-engines.py and bench-prompt.py: engines whose packages one interpreter does not
have all of."""


def add_option(parser, engines):
    """Tells a parser of it; engines are the names that it takes."""
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH",
                        help="interpreter of " + ", ".join(engines) + " (the one that runs this)")


def take_option(parser, given, engines):
    """Makes given.python {engine: path}."""
    given.python = dict(x.partition("=")[::2] for x in given.python)
    unknown = set(given.python) - set(engines)
    if unknown:
        parser.error(f"--python: {', '.join(sorted(unknown))} is no engine; there are "
                     + ", ".join(engines))
