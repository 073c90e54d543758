#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Builds and tests everything, part by part.
#
#   tools/test.sh [--full] [--only PART]... [--list] [--jobs N] [--fuzz-seconds N] [--seeds N]
#                 [--engines LIST]
#
#   --full            the long tier, two hours at most on two cores: longer fuzzing, more seeds,
#                     longer attacks, clang-tidy over all but tests. Resumable: a part that passed
#                     on the same sources is not run again. Its result, with commit and date, is
#                     written into docs/testing.md, unless there are uncommitted changes.
#   --only PART       run this part only; may be given several times
#   --list            name the parts and what each does
#   --jobs N          compile and test with N jobs (default: all cores)
#   --fuzz-seconds N  seconds for each fuzzer (default: a share of 48, of 600 with --full)
#   --seeds N         --full: seeds that the kernel checks run with (default: 3)
#   --engines LIST    of the part engines: some of transformers, transformers4, vllm, llama
#                     (default: KVQ_ENGINES, or all)
#
# On Debian 12, as root or with sudo, it installs what it needs. Builds go to build/, so a second
# run is quick; what the parts print goes to build/log/PART.log. The last line is
# "N passed, M failed", counted in tests; exit status 0 if none failed, else 1, 2 for bad usage.
set -u
cd "$(dirname "$0")/.." || exit 1
. tools/deps.sh
. tools/test-parts.sh
. tools/test-engines.sh

usage() { sed -n '3,22s/^# \{0,1\}//p' tools/test.sh; }

parts=(tidy format tests planted asan tsan fuzz e2e python install docs lint)
long_parts=(kernels clang loop wheel deb compat engines attacks) # by --full or --only
declare -A part_about=(
    [tidy]="house rules a script can see, and a self-test that plants a violation of each"
    [format]="clang-format over every source"
    [tests]="gcc build, every test, and what the libraries export"
    [planted]="errors planted into the GPU kernels are caught; all of them under --full"
    [kernels]="the kernel checks at lower CPU masks and with other seeds; under --full alone"
    [asan]="clang build; AddressSanitizer, LeakSanitizer and UBSan: tests labelled fast"
    [tsan]="ThreadSanitizer: tests labelled threads"
    [fuzz]="every fuzzer from its committed corpus"
    [e2e]="real processes, kill -9 and all; kvq-run against NumPy and PyTorch"
    [python]="the Python package's tests"
    [install]="install to a folder, compile README's client against it, run it"
    [docs]="links, and that manual pages and --help agree"
    [lint]="clang-tidy over the parsers of foreign bytes; under --full over all but tests"
    [wheel]="a wheel with the daemon in it, in an environment of its own; under --full alone"
    [deb]="Debian packages, in a Debian with a systemd; under --full alone"
    [compat]="this version with the last release; under --full alone"
    [engines]="kvq under transformers, vLLM and llama.cpp, which it installs; under --full alone"
    [loop]="tools/loop.sh, which builds and tests after an edit; under --full alone"
    [clang]="the optimized build with clang 14; under --full alone"
    [attacks]="simulations and attacks on the store for longer; under --full alone"
)

# A value that is missing is bad usage, for which ${2:?} alone would end with status 1.
case "${!#}" in
--only | --jobs | --seeds | --engines | --fuzz-seconds)
    echo "test.sh: ${!#} needs a value; --help lists what there is" >&2
    exit 2
    ;;
esac
full=0 jobs=$(nproc) fuzz_seconds= seeds=3 engines=${KVQ_ENGINES:-${engine_names[*]}}
only=()
while [ $# -gt 0 ]; do
    case "$1" in
    --full) full=1 ;;
    --only) only+=("${2:?--only needs a part}") && shift ;;
    --jobs) jobs=${2:?--jobs needs a number} && shift ;;
    --seeds) seeds=${2:?--seeds needs a number} && shift ;;
    --engines) engines=${2:?--engines needs a list} && shift ;;
    --fuzz-seconds) fuzz_seconds=${2:?--fuzz-seconds needs a number} && shift ;;
    --list)
        for part in "${parts[@]}" "${long_parts[@]}"; do
            printf '%-8s  %s\n' "$part" "${part_about[$part]}"
        done
        exit 0
        ;;
    -h | --help) usage && exit 0 ;;
    *)
        echo "test.sh: unknown argument '$1'; --help lists what there is" >&2
        exit 2
        ;;
    esac
    shift
done
for part in "${only[@]}"; do
    if [ -z "${part_about[$part]:-}" ]; then
        echo "test.sh: there is no part '$part'; the parts are: ${parts[*]} ${long_parts[*]}" >&2
        exit 2
    fi
done
engines=$(xargs <<<"${engines//,/ }")
for engine in ${engines:-''}; do
    if [[ " ${engine_names[*]} " != *" $engine "* ]]; then
        echo "test.sh: there is no engine '$engine'; the engines are: ${engine_names[*]}" >&2
        exit 2
    fi
done
[ $full = 1 ] && parts+=("${long_parts[@]}")
[ ${#only[@]} -gt 0 ] && parts=("${only[@]}")
# All fuzzers together have 48 seconds, or 10 minutes of a CPU, so that another one does not make a
# run longer.
fuzzers=$(sed -n 's/^ *kvq_fuzz(\([a-z0-9_]*\).*/\1/p' tests/CMakeLists.txt)
[ -z "$fuzz_seconds" ] && fuzz_seconds=$(((full ? 600 : 48) / $(wc -w <<<"$fuzzers")))

exec </dev/null
mkdir -p build/log build/full
started=$SECONDS
kvq_install_packages $([ $full = 1 ] && echo full || echo test) || exit 1
# Elsewhere the GPU kernels may be left out; here a build without them is a failure.
if [ "${CI:-}" = true ]; then kvq_install_cuda || exit 1; fi
kvq_install_s3 # without it, tests against a real S3 server are skipped
installed=$((SECONDS - started))

# Names the state of the sources, so that --full knows what it has already shown.
source_state() {
    find . -type f -not -path './build/*' -not -path './.git/*' -not -name '*.pyc' \
        -not -path ./docs/testing.md -print0 | LC_ALL=C sort -z | xargs -0 sha256sum |
        sha256sum | cut -c1-16
}

total_passed=0 total_failed=0 total_skipped=0 total_seconds=$installed
summary=()
failures=()
shown="$(source_state) $fuzz_seconds $seeds" # what a part that has passed has passed with
for part in "${parts[@]}"; do
    stamp=build/full/$part
    [ "$part" = engines ] && stamp+="-${engines// /-}" # these have passed, and not the others
    passed=0 failed=0 skipped=0
    part_started=$SECONDS
    if [ $full = 1 ] && [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$shown" ]; then
        read -r passed skipped seconds < <(tail -n 1 "$stamp")
        note="passed before on these sources"
    else
        printf '%-8s  %s ...\n' "$part" "${part_about[$part]}"
        : >"build/log/$part.log"
        part_"$part"
        seconds=$((SECONDS - part_started))
        note=
        [ $full = 1 ] && [ $failed = 0 ] &&
            printf '%s\n%s\n' "$shown" "$passed $skipped $seconds" >"$stamp"
    fi
    printf '%-8s  %s passed, %s failed, %s skipped, %s s  %s\n' \
        "$part" "$passed" "$failed" "$skipped" "$seconds" "$note" | tee -a "build/log/$part.log"
    summary+=("$part $passed $failed $skipped $seconds${note:+ before}")
    total_seconds=$((total_seconds + seconds))
    total_passed=$((total_passed + passed))
    total_failed=$((total_failed + failed))
    total_skipped=$((total_skipped + skipped))
done

echo
print_summary | tee build/log/summary.txt
[ $full = 1 ] && [ ${#only[@]} = 0 ] && [ "$engines" = "${engine_names[*]}" ] && record_full_result
for failure in "${failures[@]}"; do echo "failed: $failure"; done
echo "$total_passed passed, $total_failed failed"
[ $total_failed = 0 ] && [ $total_passed -gt 0 ]
