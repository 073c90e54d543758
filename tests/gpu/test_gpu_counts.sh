#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The attention loops keep their budgets: instructions per token and KV head, registers, no spills,
# for two architectures, or the one of these that there is. $1: the folder of the build that has the
# cubins; skipped where it has none.
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
built=
for arch in sm_80 sm_90a; do
    [ ! -f "$1/attend_d128.$arch.cubin" ] || built="$built $arch"
done
[ "$built" ] || { echo "built without KVQ_CUDA, or for other GPUs; skipped"; exit 77; }

# The loop over packed affine codes is the one with the most LOP3. 168 registers let three blocks
# of 128 threads run on a multiprocessor, 255 two. With 16 query rows or head_dim 256 registers are
# short: what is kept from split to split is spilled, outside of the loop but for a few. Kernels
# that dequantize have a stretch for each way to do so in their loop, with a few spills of its own.
# Three blocks at head_dim 128 are for GPUs that have shared memory for them.
#
# Those have loops in their loop as well. What they take is the longest way, each loop as often as
# it is gone through; with --no-loop-over, the longest that does not look up one code at a time.
# Their first loop fetches groups of more than 12 KB ahead, which no format has up to head_dim 128.
# The numbers are what they take today.
for arch in $built; do
    count() {
        name=$1
        shift
        allowed="--elsewhere 16"
        case $name in
        *_any) allowed="--spills 420 --elsewhere 280 --tokens 16 --passes 1=0" ;;
        d256* | *_n2 | *_iq | *_book | *_raw) allowed="--spills 4 --elsewhere 128" ;;
        esac
        "$source/tools/cubin-count.py" "$folder/attend_${name%%_*}.$arch.cubin" \
            --kernel "$name" --by LOP3 $allowed "$@"
    }
    # WORDS COMMAND...: fails, having counted, with these words.
    refused() {
        words=$1
        shift
        said=$("$@") && said="passed: $said"
        case $said in
        passed:*) ;;
        *" registers, "*) [ "${said##*"$words"*}" ] || return 0 ;;
        esac
        echo "cubin-count.py on \"$*\": $said" >&2
        exit 1
    }
    folder=$1
    echo "$arch"
    three=168
    [ "$arch" = sm_90a ] || three=255
    count d64_b2_n1 --at-most 9 --registers 168
    count d64_b3_n1 --at-most 13 --registers 168
    count d64_b4_n1 --at-most 13 --registers 168
    count d128_b2_n1 --at-most 13.5 --registers $three
    count d128_b3_n1 --at-most 19 --registers 255
    count d128_b4_n1 --at-most 19 --registers 255
    count d256_b2_n1 --at-most 22 --registers 255
    count d256_b3_n1 --at-most 33 --registers 255
    count d256_b4_n1 --at-most 33 --registers 255
    count d64_b2_n2 --at-most 13.5 --registers 255
    count d128_b2_n2 --at-most 20 --registers 255
    count d64_s2_n1 --at-most 9 --registers 168
    count d64_s3_n1 --at-most 12.5 --registers 168
    count d128_s2_n1 --at-most 13 --registers $three
    count d128_s3_n1 --at-most 18.5 --registers 255
    count d256_s2_n1 --at-most 22 --registers 255
    count d256_s3_n1 --at-most 35 --registers 255
    for kernel in d64_s2_n2 d64_s3_n2 d128_s2_n2 d128_s3_n2; do
        count "$kernel" --registers 255
    done
    for bits in 3 4; do
        count "d64_b${bits}_n2" --registers 255
        count "d128_b${bits}_n2" --registers 255
    done
    # Codebooks: the loop with the most matrix instructions.
    "$source/tools/cubin-count.py" "$folder/attend_d128.$arch.cubin" --kernel d128_book_n1 \
        --at-most 12.5 --registers 255
    # InnerQ: what it takes today; a group's codes of K become numbers.
    count d128_iq2_n1 --at-most 21.5 --registers 255
    count d128_iq3_n1 --at-most 23.5 --registers 255
    for kernel in d64_iq d128_iq2_n2 d128_iq3_n2 d256_iq; do
        count "$kernel" --registers 255
    done
    for kernel in d64_book d128_book_n2 d256_book; do
        count "$kernel" --registers 255
    done
    for dim in 64 128 256; do
        "$source/tools/cubin-count.py" "$folder/attend_wide.$arch.cubin" --kernel "wide_d$dim" \
            --registers 255 --spills 760 --elsewhere 640
    done
    count d64_any --at-most 620 --registers 255
    count d64_any --no-loop-over 8 --at-most 143
    count d128_any --at-most 1205 --registers 255
    count d128_any --no-loop-over 16 --at-most 260
    count d256_any --at-most 2385 --registers 255
    count d256_any --no-loop-over 16 --at-most 470
    # No local memory anywhere else either.
    for dim in 64 128 256; do
        count "d${dim}_raw" --registers 255
    done
    # A budget that is not kept is seen, and a loop that nobody counted, for what they are.
    refused "instructions per token and head" count d128_b2_n1 --at-most 5
    refused "registers, 0 spills" count d128_b2_n1 --registers 50
    refused "loops in it of" count d128_any --at-most 1100
    refused "tell them by --passes" "$source/tools/cubin-count.py" \
        "$folder/attend_d128.$arch.cubin" --kernel d128_any_n1 --by LOP3 --spills 420 \
        --elsewhere 280 --at-most 1205
done
