#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# GPU kernels keep their budgets: instructions per token and head of the attention loops, registers,
# no spills, for two architectures. $1: the folder of the build that has the cubins; skipped where it has none.
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
    # Packing and reading: no local memory, and five blocks of 128 threads on a multiprocessor.
    for file in extras pack read store; do
        "$source/tools/cubin-count.py" "$1/$file.$arch.cubin" --by LDG --registers 102
    done
done
