#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The GPU loop keeps its budget: instructions per token and head, registers, no spills, for two
# architectures. $1: the folder of the build that has the cubins; skipped where it has none.
set -eu
source=$(cd "$(dirname "$0")/.." && pwd)
[ -f "$1/attend_oscar.sm_90a.cubin" ] || { echo "built without KVQ_CUDA; skipped"; exit 77; }

for arch in sm_80 sm_90a; do
    cubin=$1/attend_oscar.$arch.cubin
    count() { "$source/tools/cubin-count.py" "$cubin" --kernel "$@"; }
    echo "$arch"
    # 168 registers let three blocks of 128 threads run on a multiprocessor, 232 two.
    count d64_b --at-most 13 --registers 168
    count d128_b2 --at-most 13 --registers 168
    count d128_b3 --at-most 19 --registers 168
    count d128_b4 --at-most 19 --registers 168
    count d256_b --at-most 33 --registers 232
    if count d128_b2 --at-most 5 >/dev/null || count d128_b2 --registers 50 >/dev/null; then
        echo "cubin-count.py lets a broken budget pass" >&2
        exit 1
    fi
done
