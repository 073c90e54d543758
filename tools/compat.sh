#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Shows that this version and another one work with each other: clients, daemons, kvqctl, stores.
#
#   tools/compat.sh [REF]     runs the tests
#   tools/compat.sh --last    says which commit is the last release
#
# REF is a tag or commit of this repository; by default the last release: the newest tag v*, or, in
# a clone without tags, the newest commit "release: kvq X.Y.Z". Builds it in build/compat/REF, once,
# without GPU kernels, and this version in build/test unless it is there; then runs
# tests/e2e/compat.py. The last line is "N passed, M failed". Exit status 3: no release is here (a
# shallow clone has none), and no REF was given.
set -eu
usage() { sed -n '3,13s/^# \{0,1\}//p' "$0"; }
case "${1:-}" in
-h | --help) usage && exit 0 ;;
--last) only_say=1 && shift ;;
-*) echo "compat.sh: unknown argument '$1'; --help says what there is" >&2 && exit 2 ;;
esac
cd "$(dirname "$0")/.."
last_release() {
    git describe --tags --match 'v*' --abbrev=0 2>/dev/null ||
        git log -1 --format=%H -E --grep='^release: kvq [0-9]+\.[0-9]+\.[0-9]+$' 2>/dev/null || true
}
ref=${1:-$(last_release)}
[ -n "$ref" ] || { echo "compat.sh: no release is here, neither a tag v* nor a commit; give one" \
    "(git fetch --unshallow --tags, if this clone is shallow)" >&2 && exit 3; }
commit=$(git rev-parse --verify --quiet "$ref^{commit}") ||
    { echo "compat.sh: '$ref' names no tag or commit here" >&2 && exit 2; }
[ -z "${only_say:-}" ] || { echo "$commit" && exit 0; }
folder=build/compat/$commit
if [ ! -e "$folder/made" ]; then
    rm -rf "$folder"
    mkdir -p "$folder/source"
    git archive "$commit" | tar -x -C "$folder/source"
    echo "Compiling $ref; $folder/log has what it says ..." >&2
    if ! { cmake -S "$folder/source" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
        -DKVQ_TESTS=OFF -DKVQ_CUDA=OFF -DKVQ_EMU=OFF -DCMAKE_C_FLAGS_RELEASE=-O3 &&
        cmake --build "$folder/build" -j "$(nproc)" --target kvqd kvqctl kvq; } \
        >"$folder/log" 2>&1; then
        tail -n 25 "$folder/log" >&2
        echo "compat.sh: $ref could not be built; the whole log is in $folder/log" >&2
        exit 1
    fi
    cp -a "$folder/build/bin" "$folder/build/lib" "$folder/"
    cp -a "$folder/source/client/python" "$folder/"
    rm -rf "$folder/source" "$folder/build"
    touch "$folder/made"
fi
[ -n "${KVQ_BIN_DIR:-}" ] || [ -x build/test/bin/kvqd ] ||
    { cmake --preset test && cmake --build build/test -j "$(nproc)"; } >build/compat/test.log
exec python3 tests/e2e/compat.py "$folder"
