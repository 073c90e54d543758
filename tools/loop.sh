#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds, checks and tests what an edit can have broken, within seconds.
#
#   tools/loop.sh [FILE]...
#
# FILE is what was edited; without one it is all that git sees as changed. Sources are checked for
# layout (clang-format) and against the daemon's rooms (tests/house.py --includes), then built in
# build/dev (the preset `dev`: -O2, no GPU code), then those tests run that take
# less than a second and link what was edited. It is no proof: tools/test.sh is, before a commit.
# The first run builds everything and takes a minute. Exit status 0 if all is well, 1 if not.
set -u
cd "$(dirname "$0")/.." || exit 1
case "${1:-}" in
-h | --help) sed -n '3,12s/^# \{0,1\}//p' tools/loop.sh && exit 0 ;;
-*) echo "loop.sh: unknown argument '$1'; --help says what there is" >&2 && exit 2 ;;
esac
began=$(date +%s%N)

files=("$@")
if [ $# = 0 ]; then
    mapfile -t files < <(git diff --name-only --diff-filter=d HEAD &&
        git ls-files --others --exclude-standard)
fi
areas=() sources=() targets=()
for file in "${files[@]}"; do
    file=$(realpath -m --relative-to=. "$file")
    if [ ! -e "$file" ]; then
        echo "loop.sh: there is no file '$file'" >&2
        exit 2
    fi
    case "$file" in *.c | *.h | *.cpp | *.cu | *.cuh) sources+=("$file") ;; esac
    case "$file" in
    daemon/core/*) areas+=(core) targets+=(kvqd) ;;
    daemon/*) areas+=(edges) targets+=(kvqd) ;;
    storage/*) areas+=(storage edges) ;;
    kernels/*) areas+=(kernels core) ;;
    client/* | examples/*) areas+=(client) ;;
    tools/*) areas+=(other) ;;
    proto/*) areas+=(core edges client storage other) ;;
    tests/*) areas+=(core edges client storage kernels other) ;;
    esac
done
if [ ${#areas[@]} = 0 ]; then
    echo "loop.sh: nothing that is compiled was edited"
    exit 0
fi
mapfile -t areas < <(printf '%s\n' "${areas[@]}" | sort -u)

if [ ! -f build/dev/build.ninja ]; then
    . tools/deps.sh
    kvq_install_packages loop || exit 1
    launcher=()
    command -v ccache >/dev/null && launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache)
    cmake --preset dev "${launcher[@]}" >/dev/null || exit 1
fi
failed=0
if [ ${#sources[@]} -gt 0 ]; then
    if ! command -v clang-format-14 >/dev/null; then
        echo "loop.sh: clang-format-14 is not here: tools/deps.sh loop installs it"
        failed=1
    fi
    clang-format-14 --dry-run -Werror "${sources[@]}" 2>&1 | grep -m 10 error: && failed=1
    python3 tests/house.py --includes || failed=1
fi
if ! ninja -C build/dev --quiet "${targets[@]}" "${areas[@]/#/quick-}"; then
    echo "loop.sh: the build failed"
    exit 1
fi
labels=$(printf '|quick-%s' "${areas[@]}")
ctest --test-dir build/dev -j "$(nproc)" --output-on-failure --progress -L "^(${labels:1})\$" \
    >build/dev/loop.log 2>&1
if [ $? != 0 ]; then
    failed=1
    tail -n 40 build/dev/loop.log
fi
counted=$(sed -n 's/.* passed, \([0-9]*\) tests failed out of \(.*\)/\2 tests, \1 failed/p' \
    build/dev/loop.log)
ms=$((($(date +%s%N) - began) / 1000000))
printf 'loop: %s; %s in %d.%d s\n' "${areas[*]}" "${counted:-no test ran}" \
    $((ms / 1000)) $((ms / 100 % 10))
exit $failed
