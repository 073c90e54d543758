#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that wants a GPU, in one command and without a network: builds the GPU kernels (needs
# the CUDA toolkit, CMake and a C and C++ compiler; no library of the daemon's), runs their tests on
# the GPU and under compute-sanitizer, and measures them against PyTorch. Results go to
# build/gpu-check: a JSON file for each part, then gpu-check.json and gpu-check.md. The part
# `daemon`, kvqd with its clients, and `hop`, what the way to it costs, need a folder that --pack
# made before on a Debian machine.
#
#     tools/gpu-check.sh                 all parts that have no result yet; one that was stopped
#                                        goes on behind its last row
#     tools/gpu-check.sh PART..          these parts, again from the start
#     tools/gpu-check.sh --list          the parts; each takes less than ten minutes
#     tools/gpu-check.sh --emulate       the same steps without a GPU: no figure means anything
#     tools/gpu-check.sh --out FOLDER    results go there
#     tools/gpu-check.sh --pack [FOLDER]     makes that folder, build/gpu-pack, without a GPU; for
#                                        fewer GPUs, smaller: KVQ_CUDA_ARCHITECTURES=90a
#     tools/gpu-check.sh --packed FOLDER     the parts `daemon` and `hop` alone, from there
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
parts=(build probes tests sanitizer points-48 points-1 shapes ablation grids packing prefill
    steps-qwen3 steps-llama3 batches-qwen3 batches-llama3 daemon hop)
out='' emulate='' pack='' packed=$root/build/gpu-pack chosen=()
while [ $# -gt 0 ]; do
    case $1 in
    --help | -h)
        sed -n '4,20s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --list)
        printf '%s\n' "${parts[@]}"
        exit 0
        ;;
    --emulate) emulate=1 ;;
    --pack)
        pack=$root/build/gpu-pack
        if [[ $# -gt 1 && $2 != -* ]]; then
            pack=$(realpath -m "$2")
            shift
        fi
        ;;
    --packed)
        [ $# -gt 1 ] || { echo "gpu-check.sh: --packed needs a folder" >&2; exit 2; }
        packed=$(realpath -m "$2") parts=(daemon hop)
        [ -e "$packed/bin/kvqd" ] || {
            echo "gpu-check.sh: $2 is no folder that --pack made" >&2
            exit 2
        }
        shift
        ;;
    --out)
        [ $# -gt 1 ] || { echo "gpu-check.sh: --out needs a folder" >&2; exit 2; }
        out=$2
        shift
        ;;
    *)
        [[ " ${parts[*]} " == *" $1 "* ]] || {
            echo "gpu-check.sh: there is no part $1; the parts are: ${parts[*]}" >&2
            exit 2
        }
        chosen+=("$1")
        ;;
    esac
    shift
done
build=$root/build/gpu${emulate:+-emulated}
out=${out:-$root/build/gpu-check${emulate:+-emulated}}
library=$build/lib/libkvq_gpu_rig${emulate:+_emu}.so
failed=0

# All of kvqd, with its libraries: needs no GPU, but a Debian machine and the CUDA compiler.
make_pack() {
    local build=${KVQ_PACK_BUILD:-$root/build/gpu-pack-build}
    cd "$root"
    . tools/deps.sh
    kvq_install_packages build && kvq_install_cuda || return 1
    mkdir -p build
    if ! { cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DKVQ_PORTABLE=ON -DKVQ_CUDA=ON \
        -DKVQ_EMU=ON -DKVQ_REMOTE=OFF \
        "-DKVQ_CUDA_ARCHITECTURES=${KVQ_CUDA_ARCHITECTURES:-80;90a;100;120}" &&
        cmake --build "$build" -j "$(nproc)" --target \
        kvqd kvqctl kvq-hop kvq kvq_soft_driver example_cuda_engine test_gpu_driver \
        test_gpu_attend test_gpu_long test_gpu_replay test_gpu_pack test_soft_driver \
        test_soft_peers; } \
        >build/gpu-pack.log 2>&1 </dev/null; then
        tail -n 15 build/gpu-pack.log
        echo "gpu-check.sh: the build failed; the whole log is in build/gpu-pack.log" >&2
        return 1
    fi
    python3 tools/gpu/pack.py "$build" "$pack"
}

if [ -n "$pack" ]; then
    make_pack
    exit
fi
mkdir -p "$out" "$build"

log() { echo "$out/$1.log"; }

# run PART COMMAND..: its output goes to PART.log; the end of it is shown if it fails.
run() {
    local part=$1 start=$SECONDS
    shift
    if "$@" >"$(log "$part")" 2>&1; then
        printf '%-14s done, %d s\n' "$part" $((SECONDS - start))
    else
        printf '%-14s FAILED after %d s; the whole output is in %s\n' "$part" \
            $((SECONDS - start)) "$(log "$part")"
        tail -n 15 "$(log "$part")" | sed 's/^/    /'
        failed=1
        return 1
    fi
}

# The architecture of ours that the first GPU runs; all of them where that cannot be asked.
architectures() {
    local capability
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
    case ${capability//[ .]/} in
    8?) echo 80 ;;
    90) echo 90a ;;
    10?) echo 100 ;;
    12?) echo 120 ;;
    *) echo '80;90a;100;120' ;;
    esac
}

# For the GPU that is here alone, and whatever another compiler warns of: minutes on it are dear.
part_build() {
    cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DKVQ_KERNELS_ONLY=ON \
        -DKVQ_CUDA=$([ -n "$emulate" ] && echo OFF || echo ON) -DKVQ_EMU=ON -DKVQ_WERROR=OFF \
        "-DKVQ_CUDA_ARCHITECTURES=${KVQ_CUDA_ARCHITECTURES:-$(architectures)}" &&
        cmake --build "$build" -j "$(nproc)" &&
        cmake --build "$build" -j "$(nproc)" --target kvq_gpu_rig kvq_gpu_rig_classic
}

gpu_tests='^test_gpu_(driver|attend|long|replay|pack)$'

part_tests() {
    [ -n "$emulate" ] || export KVQ_GPU=0
    ctest --test-dir "$build" --output-on-failure --no-tests=error -R "$gpu_tests"
}

# One program: each tool takes the kernels apart and is many times slower.
part_sanitizer() {
    if [ -n "$emulate" ] || ! command -v compute-sanitizer; then
        echo "compute-sanitizer: not here, so not run"
        return 0
    fi
    for tool in memcheck racecheck; do # kernels are looked for in all modules, so not found in some
        KVQ_GPU=0 timeout 280 compute-sanitizer --tool $tool --error-exitcode 9 \
            --report-api-errors no "$build/tests/test_gpu_pack" || return 1
    done
}

# What a part has shown stands in PART.json, row by row, so that another run goes on behind it.
measure() {
    [ ${#chosen[@]} -eq 0 ] || rm -f "$out/$1.json"
    timeout 580 python3 "$root/tools/gpu/check.py" "$1" --library "$library" --out "$out/$1.json"
}

# packed PART: kvqd's parts, by the script of that name.
packed() {
    if [ ! -e "$packed/bin/kvqd" ]; then
        echo "not run: there is no $packed; tools/gpu-check.sh --pack makes it on a Debian machine"
        return 0
    fi
    [ ${#chosen[@]} -eq 0 ] || rm -f "$out/$1.json"
    timeout 580 python3 "$root/tools/gpu/$1.py" "$packed" --out "$out/$1.json" \
        ${emulate:+--emulate}
}

is_done() {
    [ -f "$out/$1.ok" ] || grep -q '"complete": true' "$out/$1.json" 2>/dev/null
}

for part in "${chosen[@]:-${parts[@]}}"; do
    if [ ${#chosen[@]} -eq 0 ] && [ "$part" != build ] && is_done "$part"; then
        printf '%-14s has a result already\n' "$part"
        continue
    fi
    case $part in
    build) run build part_build || exit 1 ;;
    tests | sanitizer)
        rm -f "$out/$part.ok"
        if run "$part" "part_$part"; then touch "$out/$part.ok"; fi
        ;;
    daemon | hop)
        run "$part" packed "$part" || true
        grep '^not run: ' "$(log "$part")" || true
        ;;
    *) run "$part" measure "$part" || true ;;
    esac
done
python3 "$root/tools/gpu/check.py" report --folder "$out" || true
exit $failed
