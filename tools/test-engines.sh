#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The part `engines` of test.sh: the engines that kvq has plug-ins for, each installed under
# build/engines/ as tests/e2e/engines/ says, and its tests. Sourced by test.sh after test-parts.sh.
# shellcheck disable=SC2034,SC2154

engine_names=(transformers transformers4 vllm llama)
engines_folder=build/engines

# engine_failed WHAT NEXT: an engine that cannot be tested is a failure, with what to do about it.
engine_failed() {
    printf '%s\n' "$1" "Next: $2" \
        "To test the others alone: tools/test.sh --only engines --engines 'NAME ...'" \
        >>"$(log_file)"
    count_fail "$1" 16
}

# What an environment is made of: its requirements and its Python.
engine_recipe() {
    { cat "tests/e2e/engines/$1.txt" && python3 --version; } | sha256sum
}

# pip_for NAME FOLDER NEXT PIP-ARGUMENTS...: pip of an environment, its output to a log of its own.
pip_for() {
    local name=$1 folder=$2 next=$3 log=build/log/engines-$1-pip.log began=$SECONDS
    shift 3
    echo "\$ $folder/bin/python -m pip $* >>$log" >>"$(log_file)"
    PIP_PROGRESS_BAR=off timeout -k 10 $((3600 * patience)) "$folder/bin/python" -m pip "$@" \
        >>"$log" 2>&1 && echo "took $((SECONDS - began)) s" >>"$(log_file)" && return
    grep -v '^WARNING' "$log" | tail -n 12 | cut -c 1-200 >>"$(log_file)"
    engine_failed "$name: pip could not install tests/e2e/engines/$name.txt" \
        "see the whole of $log. $next"
    return 1
}

# make_engine NAME MODULES NEXT [PIP-OPTION]...: the environment build/engines/NAME, unless it is
# there, and whether its modules can be imported.
make_engine() {
    local name=$1 modules=$2 next=$3 folder=$engines_folder/$1 recipe
    shift 3
    recipe=$(engine_recipe "$name")
    if [ "$(cat "$folder/recipe" 2>/dev/null)" != "$recipe" ]; then
        echo "  installing $name into $folder"
        rm -rf "$folder"
        : >"build/log/engines-$name-pip.log"
        if ! step 60 python3 -m venv "$folder"; then
            engine_failed "$name: no virtual environment" "install python3-venv"
            return 1
        fi
        pip_for "$name" "$folder" "$next" install "$@" -r "tests/e2e/engines/$name.txt" || return
        echo "$recipe" >"$folder/recipe"
    fi
    step 300 "$folder/bin/python" -c "import $modules" && return
    engine_failed "$name: what is in $folder cannot be imported" \
        "remove $folder, and it is installed anew"
    return 1
}

# The weights of SmolLM2, which some tests ask for.
fetch_smollm2() {
    step 1200 "$1/bin/python" tools/eval/fetch.py "$engines_folder/models" smollm2 && return
    engine_failed "SmolLM2's weights were not fetched" \
        "put smollm2.gguf into $engines_folder/models by hand, or see what pip says above"
    return 1
}

# run_engine NAME ENVIRONMENT SECONDS TEST [VARIABLE=VALUE]...: a file of tests, and the names of
# those that were skipped.
run_engine() {
    local name=$1 python=$engines_folder/$2/bin/python seconds=$3 tests=$4 before
    shift 4
    before=$(wc -l <"$(log_file)")
    check_counted "$name: $tests" "$seconds" env KVQ_BIN_DIR="$PWD/build/test/bin" \
        KVQ_LIBRARY="$PWD/build/test/lib/libkvq.so" "$@" "$python" "tests/e2e/$tests"
    tail -n +$((before + 1)) "$(log_file)" | sed -n "s/^skipped: /  skipped, $name: /p"
}

make_transformers() {
    make_engine transformers "torch, transformers, peft, accelerate, gguf" \
        "PyTorch takes 6 GB where pip finds no build for CPUs." &&
        fetch_smollm2 $engines_folder/transformers
}

engine_transformers() {
    make_transformers || return
    run_engine transformers transformers 2400 transformers_test.py \
        KVQ_SMOLLM2="$PWD/$engines_folder/models/smollm2.gguf"
    run_engine transformers transformers 1200 eval_test.py
}

# The oldest version that is served, in the place of the environment's own.
engine_transformers4() {
    local folder=$engines_folder/transformers4 recipe
    make_transformers || return
    recipe=$(engine_recipe transformers4)
    if [ "$(cat $folder/recipe 2>/dev/null)" != "$recipe" ]; then
        echo "  installing transformers4 into $folder"
        rm -rf $folder
        : >build/log/engines-transformers4-pip.log
        pip_for transformers4 $engines_folder/transformers "" install --no-deps \
            --target $folder -r tests/e2e/engines/transformers4.txt || return
        echo "$recipe" >$folder/recipe
    fi
    run_engine transformers4 transformers 2400 transformers_test.py \
        KVQ_SMOLLM2="$PWD/$engines_folder/models/smollm2.gguf" PYTHONPATH="$PWD/$folder"
}

engine_vllm() {
    make_engine vllm "torch, vllm" \
        "vLLM on CPUs needs PyTorch's build for CPUs: name an index that has it by \
PIP_EXTRA_INDEX_URL, or a folder by PIP_FIND_LINKS." --no-deps || return
    run_engine vllm vllm 1800 vllm_test.py
}

# The sources that pip has compiled llama.cpp from. Their dates are of now: what was built from
# others is built anew.
fetch_llama_cpp() {
    local folder=$engines_folder/llama package
    [ -d $folder/sources ] && return
    package=$(grep '^llama_cpp_python==' tests/e2e/engines/llama.txt)
    pip_for llama $folder "" download --no-deps --no-binary llama_cpp_python -d $folder/sdist \
        "$package" || return
    mkdir -p $folder/unpacked
    # shellcheck disable=SC2016
    step 120 bash -c 'tar -C "$0/unpacked" --strip-components=1 -xmf "$0"/sdist/*.tar.gz &&
        mv "$0/unpacked" "$0/sources"' $folder && return
    engine_failed "llama: the sources of llama.cpp were not unpacked" "remove $folder/sdist"
    return 1
}

# kvq's backend of ggml for the llama.cpp that is installed.
make_backend() {
    local build=$engines_folder/ggml base launchers
    base=$($engines_folder/llama/bin/python -c '
import importlib.util, os
print(os.path.dirname(importlib.util.find_spec("llama_cpp").origin))')/lib/libggml-base.so
    compiler_cache
    step 120 cmake --preset release -B $build "${launchers[@]}" -DKVQ_GGML_LIBRARY="$base" \
        -DKVQ_LLAMA_CPP="$PWD/$engines_folder/llama/sources/vendor/llama.cpp" &&
        step 900 cmake --build $build -j "$jobs" --target kvq-ggml && return
    engine_failed "llama: kvq's backend of ggml was not built" "see above what CMake says"
    return 1
}

engine_llama() {
    make_engine llama "llama_cpp, gguf" "llama.cpp is compiled, by g++ and CMake." || return
    fetch_llama_cpp && make_backend || return
    run_engine llama llama 1200 llama_test.py \
        KVQ_GGML_BACKEND="$PWD/$engines_folder/ggml/lib/libkvq-ggml.so"
}

part_engines() {
    local engine
    build_test || return
    if ! kvq_install_packages wheel; then
        engine_failed "python3-venv is not installed" "install it, as it says above"
        return
    fi
    for engine in $engines; do "engine_$engine"; done
}
