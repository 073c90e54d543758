#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Shows what kvqd does: two engines on one daemon, one of which is killed; a prompt that two engines
# share; a chat that outlives the daemon; then what each format costs and how well it does on the
# shipped model, and attention at the shape of a real one.
#
#   tools/demo.sh [--quick]
#
#   --quick   a smaller sample of text for the table, with larger errors
#
# On Debian 12, as root or with sudo, it installs what it needs, and builds in build/release. It
# ends by itself and leaves nothing running.
set -eu
cd "$(dirname "$0")/.."
case "${1:-}" in
-h | --help)
    sed -n '3,12s/^# \{0,1\}//p' tools/demo.sh
    exit 0
    ;;
'' | --quick) ;;
*)
    echo "demo.sh: unknown argument '$1'; --help says what there is" >&2
    exit 2
    ;;
esac

. tools/deps.sh
kvq_install_packages build
mkdir -p build
if ! { cmake --preset release &&
    cmake --build build/release -j "$(nproc)"; } \
    >build/demo-build.log 2>&1 </dev/null; then
    tail -n 30 build/demo-build.log
    echo "demo.sh: the build failed; the whole log is in build/demo-build.log" >&2
    exit 1
fi
exec python3 tools/demo.py build/release/bin "$@" </dev/null
