#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# What building, showing and testing kvq needs on Debian 12, in one list. Sourced by demo.sh and
# test.sh; run by itself it installs what is missing, or prints the one command that would.
#
#   tools/deps.sh [build|test|full]   `build` is enough for the programs and the demo
#   tools/deps.sh loop                what tools/loop.sh needs
#   tools/deps.sh wheel               what tools/wheel.sh needs, from Debian
#   tools/deps.sh deb                 what tools/deb.sh needs
#   tools/deps.sh vm                  what tests/deb.py needs
#   tools/deps.sh cuda                the CUDA compiler for the GPU kernels, into build/cuda
#   tools/deps.sh s3                  rclone, whose S3 server the remote tier is tested with, into
#                                     build/s3

kvq_build_packages=(
    gcc g++ libc6-dev make cmake pkg-config python3
    libuv1-dev libzmq3-dev libprotobuf-c-dev protobuf-c-compiler libinih-dev libcjson-dev
    libxxhash-dev libsodium-dev libsqlite3-dev libopenblas-dev libcmocka-dev
    libcurl4-openssl-dev libssl-dev libexpat1-dev libmicrohttpd-dev
)
kvq_test_packages=(
    clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev llvm-14 binutils python3-numpy
    libsimde-dev python3-yaml ccache ninja-build
)
kvq_wheel_packages=(python3-venv)
kvq_deb_packages=(dpkg-dev file)
kvq_vm_packages=(debootstrap systemd-container lintian)
kvq_loop_packages=(ninja-build ccache clang-format-14)
kvq_full_packages=(qemu-user "${kvq_wheel_packages[@]}")
kvq_cuda_packages=(g++ python3-pip)
# The CUDA compiler as Python wheels; CMake finds it where kvq_install_cuda puts it.
kvq_cuda_wheels=(
    'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*'
    'nvidia-cuda-runtime==13.0.*'
)

# rclone as a Python wheel: Debian 12's is too old to serve S3.
kvq_s3_wheel='rclone-adapter==0.2.0'

# Prints the packages of the given kind that are not installed.
kvq_missing_packages() {
    local wanted=("${kvq_build_packages[@]}") package
    [ "$1" = test ] || [ "$1" = full ] && wanted+=("${kvq_test_packages[@]}")
    [ "$1" = full ] && wanted+=("${kvq_full_packages[@]}")
    [ "$1" = wheel ] && wanted+=("${kvq_wheel_packages[@]}")
    [ "$1" = deb ] && wanted+=("${kvq_deb_packages[@]}")
    [ "$1" = vm ] && wanted+=("${kvq_vm_packages[@]}")
    [ "$1" = loop ] && wanted+=("${kvq_loop_packages[@]}")
    [ "$1" = cuda ] && wanted=("${kvq_cuda_packages[@]}")
    for package in "${wanted[@]}"; do
        dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' ||
            printf '%s ' "$package"
    done
}

# Installs what is missing. Returns 1, having printed the command to run, where it may not.
kvq_install_packages() {
    local missing sudo=()
    if ! command -v dpkg-query >/dev/null; then
        echo "This is not a Debian system. Install what matches these packages, then try again:"
        echo "  ${kvq_build_packages[*]}"
        [ "$1" != build ] && echo "  ${kvq_test_packages[*]} ${kvq_full_packages[*]}"
        echo "or say KVQ_SKIP_DEPS=1 if it is all there."
        [ -n "${KVQ_SKIP_DEPS:-}" ]
        return
    fi
    missing=$(kvq_missing_packages "$1")
    [ -z "$missing" ] && return 0
    if [ "$(id -u)" != 0 ]; then
        # Without a terminal sudo must work without a password; with one it may ask.
        if ! command -v sudo >/dev/null || ! { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
            echo "Packages are missing and this user may not install them. Run this, then again:"
            echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends $missing"
            return 1
        fi
        sudo=(sudo)
    fi
    echo "Installing: $missing"
    mkdir -p build
    if ! { "${sudo[@]}" apt-get update &&
        # shellcheck disable=SC2086 # one word a package is meant
        "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends $missing; } >build/apt.log 2>&1; then
        tail -n 15 build/apt.log
        echo "apt-get could not install them; the whole log is in build/apt.log. The command was:"
        echo "  apt-get update && apt-get install -y --no-install-recommends $missing"
        return 1
    fi
}

# Puts nvcc into build/cuda, 260 MB, unless one is installed. Returns 1, having said what is wrong,
# if it cannot: the GPU kernels are then left out of a build, and all else works.
kvq_install_cuda() {
    local nvcc=build/cuda/nvidia/cu13/bin/nvcc
    command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || [ -x $nvcc ] && return 0
    python3 -m pip --version >/dev/null 2>&1 || kvq_install_packages cuda || return 1
    echo "Installing: ${kvq_cuda_wheels[*]}"
    mkdir -p build
    if ! python3 -m pip install --no-deps --upgrade --target build/cuda \
        "${kvq_cuda_wheels[@]}" >build/pip-cuda.log 2>&1 || ! $nvcc --version >/dev/null; then
        tail -n 15 build/pip-cuda.log
        echo "pip could not install the CUDA compiler; the whole log is in build/pip-cuda.log."
        echo "Install NVIDIA's CUDA 13 toolkit instead, or build with -DKVQ_CUDA=OFF."
        return 1
    fi
}

# Puts rclone into build/s3, 70 MB. Returns 1, having said what is wrong, if it cannot: tests that
# need it are then skipped.
kvq_install_s3() {
    local rclone=build/s3/rclone/bin/rclone-linux-amd64
    [ -n "${KVQ_RCLONE:-}" ] || [ -x $rclone ] && return 0
    python3 -m pip --version >/dev/null 2>&1 || kvq_install_packages cuda || return 1
    echo "Installing: $kvq_s3_wheel"
    mkdir -p build
    if ! python3 -m pip install --no-deps --upgrade --target build/s3 "$kvq_s3_wheel" \
        >build/pip-s3.log 2>&1 || ! chmod +x $rclone || ! $rclone version >/dev/null; then
        tail -n 15 build/pip-s3.log
        echo "pip could not install rclone; the whole log is in build/pip-s3.log. Tests against a"
        echo "real S3 server are skipped. Name an rclone of version 1.65 or later with KVQ_RCLONE."
        return 1
    fi
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    cd "$(dirname "$0")/.." || exit 1
    case "${1:-build}" in
    build | loop | wheel | deb | vm | test | full) kvq_install_packages "${1:-build}" ;;
    cuda) kvq_install_cuda ;;
    s3) kvq_install_s3 ;;
    -h | --help) sed -n '3,13s/^# \{0,1\}//p' tools/deps.sh ;;
    *)
        echo "deps.sh: '$1' is none of build, loop, wheel, deb, vm, test, full, cuda, s3"
        exit 2
        ;;
    esac
fi
