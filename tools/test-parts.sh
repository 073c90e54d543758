#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The parts of test.sh, one function each, and the counting they share. Sourced by test.sh, which
# sets jobs, full, fuzzers, fuzz_seconds, seeds, and reads passed, failed and skipped.
# shellcheck disable=SC2034,SC2154

log_file() { echo "build/log/$part.log"; }

count_pass() { passed=$((passed + ${1:-1})); }

# Counts a failure and shows the end of the part's log. Returns 1, as what has failed does.
count_fail() {
    failed=$((failed + 1))
    failures+=("$part: $1")
    echo "  FAILED: $1 (build/log/$part.log)"
    tail -n "${2:-25}" "$(log_file)" | sed 's/^/    /'
    return 1
}

# Limits end what hangs. What is slow, on a machine that others use as well, must not come near
# them: every limit below is multiplied by this.
patience=3

# step SECONDS COMMAND...: runs it with a limit, output to the log. Its exit status is returned.
step() {
    local limit=$(($1 * patience)) status began=$SECONDS
    shift
    echo "\$ $*" >>"$(log_file)"
    timeout -k 10 "$limit" "$@" >>"$(log_file)" 2>&1
    status=$?
    echo "took $((SECONDS - began)) s" >>"$(log_file)"
    [ $status = 124 ] && echo "stopped: it ran past its $limit seconds" >>"$(log_file)"
    return $status
}

# check NAME SECONDS COMMAND...: one test. Returns 1 if it failed, as check_counted does.
check() {
    local name=$1
    shift
    if step "$@"; then count_pass; else count_fail "$name"; fi
}

# check_counted NAME SECONDS COMMAND...: a runner whose last line counts "N passed, M failed".
check_counted() {
    local name=$1 before line status
    before=$(wc -l <"$(log_file)")
    shift
    step "$@"
    status=$?
    line=$(tail -n +$((before + 1)) "$(log_file)" |
        grep -Eo '[0-9]+ passed, [0-9]+ failed(, [0-9]+ skipped)?' | tail -n 1)
    set -- $(grep -Eo '[0-9]+' <<<"${line:-0 0 0}") 0
    count_pass "$1"
    skipped=$((skipped + $3))
    if [ "$2" != 0 ]; then
        failed=$((failed + $2 - 1))
        count_fail "$name: $2 failed"
    elif [ $status != 0 ] || [ "$1" = 0 ]; then
        count_fail "$name: exit status $status with $1 tests passed"
    fi
}

architectures() {
    local counted=(80 90a) commits
    commits=$(git rev-list --count HEAD 2>/dev/null || echo 1)
    if [ "$full" = 1 ]; then echo '80;90a;100;120'; else echo "${counted[commits % 2]}"; fi
}

# Sets launchers: what the release build compiles the test build has compiled, and another clone may
# have.
compiler_cache() {
    launchers=()
    command -v ccache >/dev/null || return 0
    export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
    # Without the preprocessor, which a cache that begins empty runs for nothing; a cache that is
    # kept finds more with it.
    if [ "${CI:-}" = true ]; then export CCACHE_DEPEND=1; fi
    launchers=("-DCMAKE_C_COMPILER_LAUNCHER=ccache" "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
}

# configure PRESET [OPTION...]: for Ninja, since make starts cmake for each file and each target. A
# folder that make has built stays with it.
configure() {
    local preset=$1 launchers generator=()
    shift
    compiler_cache
    command -v ninja >/dev/null && [ ! -e "build/$preset/CMakeCache.txt" ] && generator=(-G Ninja)
    step 120 cmake --preset "$preset" "${generator[@]}" "${launchers[@]}" "$@"
}

# build PRESET [TARGET...]: configures and builds build/PRESET. Counts only a failure, or with no
# test to follow (count=1) the build as one test.
build() {
    local preset=$1 targets=() options=()
    shift
    [ $# -gt 0 ] && targets=(--target "$@")
    case $preset-$full in
    test-*) options+=(-DKVQ_PORTABLE=ON) ;; # tests/gpu/gpu_pack.py moves it
    asan-1) options+=(-DKVQ_VECTOR=ON -DKVQ_SANITIZE_VECTORS=ON) ;;
    tsan-1) options+=(-DKVQ_VECTOR=ON) ;;
    esac
    # CI compiles the GPU kernels and counts their instructions, for one architecture, another one
    # with every commit: nvcc takes minutes for each.
    [ "$preset" = test ] && [ "${CI:-}" = true ] &&
        options+=(-DKVQ_CUDA=ON "-DKVQ_CUDA_ARCHITECTURES=$(architectures)")
    if configure "$preset" "${options[@]}" &&
        step 900 cmake --build "build/$preset" -j "$jobs" "${targets[@]}"; then
        count_pass
    else
        count_fail "the $preset build" 40
    fi
}

# Brings build/test up to date with the sources, once in a run: old programs would pass for these
# sources. Where the build has failed, no part that needs it goes on, and each is a failure.
build_test() {
    case ${test_build:-} in
    done) return 0 ;;
    failed)
        count_fail "build/test: the build has failed before" 0
        return
        ;;
    esac
    test_build=failed
    build test || return
    test_build=done
}

# run_ctest PRESET SECONDS [CTEST ARGUMENTS]: counts each of its tests.
run_ctest() {
    local preset=$1 limit=$(($2 * patience)) out="build/log/$part-ctest.txt" name
    shift 2
    echo "\$ ctest --test-dir build/$preset $*" >>"$(log_file)"
    timeout -k 10 "$limit" ctest --test-dir "build/$preset" --output-on-failure -j "$jobs" \
        --no-tests=error "$@" >"$out" 2>&1
    local status=$?
    cat "$out" >>"$(log_file)"
    count_pass "$(grep -Ec '^ *[0-9]+/[0-9]+ Test .* Passed ' "$out")"
    skipped=$((skipped + $(grep -Ec '^ *[0-9]+/[0-9]+ Test .*\*\*\*Skipped' "$out")))
    while read -r name; do
        count_fail "$name" 0
        # The test's own output, up to the next test's line, without what went well.
        awk -v name=" $name " '/^ *[0-9]+\/[0-9]+ Test/ { mine = index($0, name) } mine' "$out" |
            grep -Ev '\[ (RUN|      OK)' | tail -n 25 | sed 's/^/    /'
    done < <(grep -E '^ *[0-9]+/[0-9]+ Test .*\*\*\*' "$out" | grep -v 'Skipped' |
        sed -E 's/.*Test +#[0-9]+: ([^ ]+) .*/\1/')
    if [ $status != 0 ] && ! grep -q 'tests failed out of' "$out"; then
        count_fail "ctest in build/$preset ended with status $status"
    fi
}

sources() {
    find proto kernels client daemon storage tools tests examples \
        -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' | LC_ALL=C sort
}

part_tidy() {
    check_counted "tidy self-test" 120 tests/tidy.py --self-test
    check_counted "tidy" 120 tests/tidy.py
}

# One process looks at 32 files; where these are not all well, one for each says which.
part_format() {
    local file status
    while read -r file status; do
        if [ "$status" = 0 ]; then
            count_pass
        else
            count_fail "$file: clang-format-14 -i $file" 0
        fi
    done < <(sources | xargs -P "$jobs" -n 32 bash -c '
        well() { clang-format-14 --dry-run -Werror "$@" >/dev/null 2>&1; }
        if well "$@"; then printf "%s 0\n" "$@"; exit; fi
        for file; do
            well "$file"
            echo "$file $?"
        done' format)
}

part_tests() {
    local without=(-LE '^long$')
    [ "$full" = 1 ] && without=()
    build_test || return
    run_ctest test 1200 "${without[@]}"
    check "exported symbols" 60 tests/tidy.py --only symbols --symbols build/test
}

# Errors planted into the GPU kernels: a quarter of them, another one with every commit; all under
# --full. Each takes half a second.
part_planted() {
    local commits
    build_test || return
    commits=$(git rev-list --count HEAD 2>/dev/null || echo 1)
    if [ $full = 1 ]; then
        check_counted "planted errors" 7200 tests/gpu/mutate-gpu.py build/test --jobs "$jobs" \
            --resume build/full/planted-caught
    else
        check_counted "planted errors" 600 tests/gpu/mutate-gpu.py build/test --jobs "$jobs" \
            --part 4 --seed "$commits"
    fi
}

# At lower instruction sets, with other numbers, GPU kernels in other orders and shapes, and on an
# emulated CPU that has no AVX at all, where a stray instruction would be fatal.
part_kernels() {
    local mask masks=(c) seed gpu_kernels='^test_gpu_(attend|long|replay|pack)$'
    build_test || return
    # The tests part has run the highest instruction set of this CPU.
    grep -qw avx512_vnni /proc/cpuinfo && masks+=(avx2)
    for mask in "${masks[@]}"; do
        KVQ_CPU_MASK=$mask run_ctest test 400 -L kernels
    done
    for seed in $(seq 2 "$seeds"); do
        KVQ_SEED=$seed run_ctest test 1200 -L kernels
        KVQ_SEED=$seed run_ctest test 1200 -R "$gpu_kernels"
    done
    KVQ_FULL=1 run_ctest test 1200 -R "$gpu_kernels"
    # Each computes with one thread.
    timeout 7200 qemu-x86_64 -cpu Nehalem build/test/tests/check >build/log/no-avx.log 2>&1 &
    check "10,000 orders of streams" 1800 build/test/tests/test_soft_order 10000 1000
    wait $!
    check "no AVX" 10 bash -c "cat build/log/no-avx.log; exit $?"
}

part_clang() { build clang; }

part_loop() {
    check "the quick loop" 900 tools/loop.sh daemon/core/core.c daemon/control/control.c
}

part_wheel() {
    check "tools/wheel.sh" 900 tools/wheel.sh KVQ_CUDA=OFF || return
    check_counted "the wheel" 300 bash -c 'python3 tests/e2e/wheel.py build/wheel-out/*.whl'
    check_counted "the tour" 1800 bash -c 'python3 tests/e2e/tour.py build/wheel-out/*.whl'
}

# Where it may not be root, have a network, or run a container, there is nothing to show it with.
part_deb() {
    local said=build/deb-vm.log
    check "tools/deb.sh" 1800 tools/deb.sh --out build/deb || return
    check "tools/deb.sh, a higher version" 1800 tools/deb.sh --version 9.0-1 --out build/deb-next ||
        return
    if [ "$(id -u)" != 0 ] || ! { kvq_install_packages vm && python3 tests/deb.py --try; } \
        >$said 2>&1; then
        tail -n 3 $said
        skipped=$((skipped + 1))
        return
    fi
    check "lintian" 600 lintian --allow-root --fail-on error,warning build/deb/*.deb
    check_counted "packages in a Debian" 1800 python3 tests/deb.py build/deb build/deb-next
    check_counted "from packages to a service" 3600 python3 tests/deb_tour.py build/deb
}

part_compat() {
    if ! tools/compat.sh --last >/dev/null 2>&1; then
        echo "no release is here to work with"
        skipped=$((skipped + 1))
        return
    fi
    build_test || return
    check_counted "the last release" 1800 tools/compat.sh
}

# A name and what it runs; the longest first.
attacks() {
    cat <<'ATTACKS'
sim_soft_asan build/asan/tests/sim_soft 1 500
sim_soft_asan_2 build/asan/tests/sim_soft 501 500
test_store_faults build/test/tests/test_store_faults
test_store_crash build/test/tests/test_store_crash
test_store_edits build/test/tests/test_store_edits
sim_asan build/asan/tests/sim 501 300
sim_gpu_asan build/asan/tests/sim_gpu 301 100
sim build/test/tests/sim 1 500
sim_gpu build/test/tests/sim_gpu 1 300
test_store_kill build/test/tests/test_store_kill
test_store_move build/test/tests/test_store_move
test_core_save_formats build/test/tests/test_core_save_formats
test_core_scale build/test/tests/test_core_scale
test_core_reshard build/test/tests/test_core_reshard
test_core_reshard_bad build/test/tests/test_core_reshard_bad
test_remote_s3 build/test/tests/test_remote_s3
ATTACKS
}

# What CI takes seconds over takes minutes here; as many at a time as there are jobs.
part_attacks() {
    local name status
    build_test || return
    build asan sim sim_gpu sim_soft || return
    while read -r name status; do
        cat "build/log/attack-$name.log" >>"$(log_file)"
        if [ "$status" = 0 ]; then count_pass; else count_fail "$name" 40; fi
    done < <(attacks | KVQ_FULL=1 xargs -P "$jobs" -L 1 bash -c '
        timeout -k 10 3000 "$@" >"build/log/attack-$0.log" 2>&1
        echo "$0 $?"')
}

# same_traces PRESET: a seed of a simulation is the same run in that build as in the optimized one.
same_traces() {
    local sim
    build_test || return
    for sim in sim sim_gpu sim_soft; do
        [ -x "build/$1/tests/$sim" ] || continue # without the emulator
        # shellcheck disable=SC2016
        check "$sim is the same run in test and $1" 300 bash -c '
            a=$("build/test/tests/$1" 1 3 | grep ^trace) &&
                b=$("build/$0/tests/$1" 1 3 | grep ^trace) && echo "$a, $b" && [ "$a" = "$b" ]
        ' "$1" "$sim"
    done
}

# Under --full the slow ones as well, but no test twice that the tests part runs in several orders
# or with less shared memory. Without them, only what the fast ones need is built: programs,
# tests of these names, and programs that they run: test_soft_order, gpu_cost_plan.
part_asan() {
    local which=(-L fast) targets=()
    if [ $full = 1 ]; then
        which=(-E '_by_(events|host)$|_in_99k$')
    else
        configure asan
        mapfile -t targets < <(comm -12 <(cmake --build build/asan --target help |
            sed -En 's/^(\.\.\. )?([a-z0-9_]+)(:? .*)?$/\2/p' | sort -u) <(ctest \
            --test-dir build/asan -N -L fast | sed -n 's/^ *Test *#[0-9]*: //p' | sort -u))
        targets+=(kvqd kvqctl kvq kvq-bench kvq-run kvq_soft_driver test_soft_order gpu_cost_plan)
        targets+=(kvq_wide_kernels) # for clang's warnings; nothing where CPUs are not x86
    fi
    build asan "${targets[@]}" || return
    ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 \
        run_ctest asan $((full ? 3600 : 1200)) "${which[@]}"
    same_traces asan
}

# Builds only the tests that run, with what they depend on.
part_tsan() {
    local tests
    configure tsan
    tests=$(ctest --test-dir build/tsan -N -L threads | sed -n 's/^ *Test *#[0-9]*: //p')
    # shellcheck disable=SC2086
    build tsan $tests || return
    TSAN_OPTIONS="halt_on_error=1 suppressions=$PWD/tests/tsan.supp" run_ctest tsan 900 -L threads
}

# Fuzzes from a copy of the corpus, so that what a run finds does not land in the tree unasked. As
# many at a time as there are jobs.
part_fuzz() {
    local name status ran=0
    # shellcheck disable=SC2086
    build fuzz $fuzzers || return
    while read -r name status; do
        cat "build/log/$name.log" >>"$(log_file)"
        if [ "$status" = 0 ]; then count_pass; else count_fail "$name"; fi
        ran=$((ran + 1))
    done < <(printf '%s\n' $fuzzers | SECONDS_EACH=$fuzz_seconds xargs -P "$jobs" -I{} bash -c '
        mkdir -p build/fuzz-finds/{}
        timeout -k 10 $((SECONDS_EACH + 60)) build/fuzz/tests/{} -max_total_time="$SECONDS_EACH" \
            -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
            -artifact_prefix=build/fuzz-finds/ build/fuzz-finds/{} tests/fuzz/corpus/{} \
            >build/log/{}.log 2>&1
        echo "{} $?"')
    [ $ran -gt 0 ] || count_fail "no fuzzer was built"
}

# Three at a time: they wait for each other's processes more than they compute. The software GPU
# computes with one thread, so two processes share its tests.
part_e2e() {
    local limit=$((full ? 7200 : 900)) out=build/log/e2e bins="$PWD/build/test/bin" run
    local scripts=(tests/e2e/e2e.py tests/e2e/e2e_kvq_run.py tests/e2e/e2e_models.py)
    build_test || return
    [ -e build/test/lib/libkvq-emu.so ] &&
        scripts=("tests/e2e/e2e.py emu 1" "tests/e2e/e2e.py emu 2" "${scripts[@]}")
    rm -rf "$out"-*
    mkdir "$out-claims"
    # shellcheck disable=SC2016
    printf '%s\n' "${scripts[@]}" | KVQ_BIN_DIR=$bins KVQ_FULL=$full OUT=$out \
        LIMIT=$((limit * patience)) xargs -P 3 -I{} bash -c '
            set -- {}
            name=$OUT-$(basename "$1" .py)-${2:-host}$3
            export KVQ_E2E_BACKEND=${2:-cpu}
            [ -z "$3" ] || export KVQ_E2E_CLAIMS=$OUT-claims
            timeout -k 10 "$LIMIT" python3 "$1" >"$name.log" 2>&1
            echo $? >"$name.status"'
    for run in "${scripts[@]}"; do
        set -- $run
        out=build/log/e2e-$(basename "$1" .py)-${2:-host}${3:-}
        check_counted "$1${2:+ on the software GPU}" 10 \
            bash -c "cat $out.log; exit \$(cat $out.status)"
    done
}

part_python() {
    build_test || return
    check_counted "the Python package" 200 env KVQ_BIN_DIR="$PWD/build/test/bin" \
        KVQ_LIBRARY="$PWD/build/test/lib/libkvq.so" python3 tests/e2e/python.py || return
    check_counted "misuse of the Python package" 1200 env \
        KVQ_BIN_DIR="$PWD/build/test/bin" \
        KVQ_LIBRARY="$PWD/build/test/lib/libkvq.so" python3 tests/e2e/python_misuse.py \
        --cases $((full ? 3000 : 400))
}

# What users build, and nothing else.
part_install() {
    build release || return
    check_counted "installed tree" 200 python3 tests/install.py build/release
    if command -v systemd-analyze >/dev/null; then
        check_counted "service unit" 200 python3 tests/tools/unit.py build/release
    else
        skipped=$((skipped + 1)) # Debian's package systemd has it
    fi
}

part_docs() {
    build_test || return
    check_counted "documentation" 60 python3 tests/docs.py build/test
    check_counted "what pages tell to type" 120 python3 tests/pages.py build/test
    check_counted "containers" 120 python3 tests/tools/containers.py build/test
    check_counted "house" 60 python3 tests/house.py build/test
    if command -v promtool >/dev/null; then
        check_counted "alerts" 120 python3 tests/tools/alerts.py
    else
        skipped=$((skipped + 1)) # Debian's package prometheus has it
    fi
}

# tidy_files CHECKS FILE...: clang-tidy, one test for each file.
tidy_files() {
    local checks=$1 file status
    shift
    while read -r file status; do
        if [ "$status" = 0 ]; then count_pass; else count_fail "clang-tidy $file" 0; fi
    done < <(printf '%s\n' "$@" | CHECKS=$checks xargs -P "$jobs" -I{} bash -c '
        log=build/log/lint-$(tr / - <<<"{}").log
        timeout 600 clang-tidy-14 --quiet --extra-arg=-Wno-unknown-warning-option \
            --checks="$CHECKS" -p build/test {} >"$log" 2>/dev/null
        status=$?; echo "{} $status"; [ $status = 0 ] || cat "$log" >&2' 2>>"$(log_file)")
}

# The parsers of foreign bytes get every check. The others, under --full, all but the analyzer: it
# sees one file at a time and takes contracts between files for bugs. Tests are left out.
part_lint() {
    local file parsers=() others=()
    build_test || return
    for file in $(sources | grep '\.c$'); do
        grep -q "\"file\": \".*/$file\"" build/test/compile_commands.json || continue
        case $file in
        tests/*) ;;
        proto/* | client/* | daemon/control/* | daemon/attach/* | daemon/config/* | \
            storage/remote_reply.c | storage/remote_parts.c)
            parsers+=("$file")
            ;;
        *) others+=("$file") ;;
        esac
    done
    tidy_files '' "${parsers[@]}"
    [ $full = 0 ] || tidy_files '-clang-analyzer-*' "${others[@]}"
}

# Prints what each part took, and its share of the whole; of a part that has passed before, what it
# took then.
print_summary() {
    local entry share
    printf '%-10s %7s %7s %8s %8s %6s\n' part passed failed skipped seconds share
    printf '%-10s %7s %7s %8s %8s %5s%%\n' packages - - - "$installed" \
        $((total_seconds ? installed * 100 / total_seconds : 0))
    for entry in "${summary[@]}"; do
        set -- $entry
        share=$((total_seconds ? $5 * 100 / total_seconds : 0))
        printf '%-10s %7s %7s %8s %8s %5s%%%s\n' "$1" "$2" "$3" "$4" "$5" "$share" "${6:+  $6}"
    done
    printf '%-10s %7s %7s %8s %8s\n' all "$total_passed" "$total_failed" "$total_skipped" \
        "$total_seconds"
}

# Writes the result of a whole --full run between the two marks in docs/testing.md. It names a
# commit, which has to be what was tested.
record_full_result() {
    local result
    if [ -n "$(git status --porcelain -- . ':!docs/testing.md' 2>&1)" ]; then
        echo "not recorded in docs/testing.md: there are changes that are not committed"
        return
    fi
    result=$(
        echo "Commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)," \
            "$(date -u '+%Y-%m-%d %H:%M') UTC, $(nproc) cores," \
            "$fuzz_seconds s for each fuzzer, $seeds seeds:" \
            "$total_passed passed, $total_failed failed, $total_skipped skipped."
        echo
        echo '```'
        print_summary
        echo '```'
    )
    RESULT=$result python3 - <<'PYTHON'
import os, re
path = "docs/testing.md"
with open(path, encoding="utf-8") as file:
    text = file.read()
marks = r"(<!-- full: begin -->\n).*?(<!-- full: end -->)"
text = re.sub(marks, lambda m: m[1] + os.environ["RESULT"] + "\n" + m[2], text, flags=re.S)
with open(path, "w", encoding="utf-8") as file:
    file.write(text)
PYTHON
}
