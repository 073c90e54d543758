#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Debian packages of kvq for the Debian that it runs on (12), without GPU kernels.
#
#   tools/deb.sh [--version VERSION] [--out FOLDER]
#
#   --version VERSION  the packages' version in place of the project's
#   --out FOLDER       where the packages go (default: build/deb)
#
# Compiles in build/deb, and prints the packages' names and sizes. It installs what it
# needs, by apt, where it may.
set -eu
usage() { sed -n '3,11s/^# \{0,1\}//p' tools/deb.sh; }
cd "$(dirname "$0")/.."
version= out=build/deb log=build/deb.log
while [ $# -gt 0 ]; do
    case "$1" in
    --version) version=${2:?--version needs a version} && shift ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    -h | --help) usage && exit 0 ;;
    *) echo "deb.sh: unknown argument '$1'; --help says what there is" >&2 && exit 2 ;;
    esac
    shift
done
mkdir -p build "$out"
umask 022

quietly() {
    echo "\$ $*" >>$log
    "$@" >>$log 2>&1 || {
        tail -n 25 $log >&2
        echo "deb.sh: this command failed: $*; the whole log is in $log" >&2
        exit 1
    }
}

: >$log
. tools/deps.sh
kvq_install_packages deb >&2
rm -f "$out"/kvqd_*.deb "$out"/kvq-tools_*.deb "$out"/libkvq0_*.deb "$out"/libkvq-dev_*.deb \
    "$out"/python3-kvq_*.deb
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)
export SOURCE_DATE_EPOCH
quietly cmake --preset deb -U KVQ_DEB_VERSION ${version:+"-DKVQ_DEB_VERSION=$version"}
echo "Compiling; $log has what it says ..." >&2
quietly cmake --build build/deb -j "$(nproc)"
quietly cpack --config build/deb/CPackConfig.cmake -B "$out"
rm -rf "$out/_CPack_Packages"
(cd "$out" && wc -c ./*.deb | sed '$d; s,\./,,')
