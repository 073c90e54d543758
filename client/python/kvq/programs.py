# SPDX-License-Identifier: Apache-2.0
"""kvqd and kvqctl on the PATH of the environment that the package is installed in."""
import os
import sys

from .private import program


def _run(name):
    path = program(name)
    if not path or os.path.realpath(path) == os.path.realpath(sys.argv[0]):
        sys.exit(f"{name}: this package was installed without it; install kvq from a wheel")
    os.execv(path, [name, *sys.argv[1:]])


def kvqd() -> None:
    """The command kvqd."""
    _run("kvqd")


def kvqctl() -> None:
    """The command kvqctl."""
    _run("kvqctl")
