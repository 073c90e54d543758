#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Measures formats on three pretrained models with kvq.eval, and puts the tables into
# docs/quality.md and docs/quality/. Takes hours on two cores; what is measured is kept in
# build/eval/ (or in $KVQ_EVAL_DIR), and the same command goes on where it was ended.
#
#     tools/eval/quality.sh
#
# Needs kvq's package, PyTorch, transformers, optimum-quanto, hqq and gguf in `python3` (or in
# $PYTHON), and fetches models and text by tools/eval/fetch.py. Two runs at a time halve the time:
# give each some of the models, as in `tools/eval/quality.sh smollm2 gemma3-270m`.
set -eu

if [ "${1:-}" = --help ]; then
    sed -n '4,13s/^# \{0,1\}//p' "$0"
    exit 0
fi
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
out=${KVQ_EVAL_DIR:-$root/build/eval}
formats=16bit,oscar4,oscar4/fast,oscar3,oscar3/fast,kvq2,kvq2/fast,oscar2,oscar2/fast
formats=$formats,turboquant4,kivi4,kivi4/fast,kivi2,innerq-hybrid,ott2,kvq2-fm-s0
formats=$formats,kvq2-fm-s0/fast,oscar2-fit-s32,kivi2-fit-s32
# What the papers' claims compare.
claims=oscar2-norot-noscale,oscar2-norot,oscar2-noscale,oscar2,oscar2-max,oscar2-mean,kivi2
claims=$claims,kivi2-g128,ott2,innerq-hybrid,innerq-small,innerq-hybrid-full,innerq-small-full
claims=$claims,turboquant3
models=${*:-smollm2 qwen-coder gemma3-270m}
for model in $models; do
    case $model in
    smollm2 | qwen-coder | gemma3-270m) ;;
    *) echo "quality.sh: $model is no model of this page" >&2 && exit 2 ;;
    esac
done
mkdir -p "$out"
cd "$out"
[ -e weights/articles.txt ] || "$python" "$root/tools/eval/fetch.py" weights

# measure MODEL FOLDER OPTION..
measure() {
    model=$1 folder=$2
    shift 2
    OMP_NUM_THREADS=1 "$python" -m kvq.eval "weights/$model.gguf" --text weights/articles.txt \
        --reference sdpa --out "$folder" "$@"
}

for model in $models; do
    case $model in
    smollm2) some="--windows 8 --context 2048 --needles 6 --answers 4 --answer-tokens 96" ;;
    qwen-coder)
        some="--dtype bfloat16 --windows 3 --context 1536 --needles 3 --answers 2"
        some="$some --answer-tokens 64 --prompt 768"
        ;;
    gemma3-270m)
        some="--windows 4 --context 2048 --needles 4 --answers 3 --answer-tokens 64 --prompt 768"
        ;;
    esac
    # shellcheck disable=SC2086
    measure "$model" "$model" --formats "$formats" --distances 64,256,1024 $some
    # shellcheck disable=SC2086
    measure "$model" "claims-$model" --formats "$claims" --controls '' --peers '' $some \
        --needles 0 --answers 0 --windows 2
done
# Codebooks, of other text than they are measured on.
if [ ! -e books-smollm2/report.json ] && [ -e smollm2/report.json ]; then
    mkdir -p books
    "$python" -m kvq.eval weights/smollm2.gguf --text weights/articles.txt --skip 100000 \
        --windows 2 --context 2048 --reference sdpa --capture smollm2.capture
    names=
    for format in vecinfer-2 vecinfer-2-norot vecinfer-2-nosmooth vecinfer-2-norot-nosmooth; do
        "${KVQ_BIN_DIR:-$root/build/release/bin}/kvq-codebook" make --capture smollm2.capture \
            --format "$format" --out "books/$format.kvqbook" --quiet
        names=$names${names:+,}$format@$format
    done
    measure smollm2 books-smollm2 --formats "$names" --controls '' --peers '' --needles 0 \
        --answers 0 --windows 4 --context 2048 --daemon "codebook_dir=$out/books"
fi
for model in smollm2 qwen-coder gemma3-270m; do
    [ -e "claims-$model/report.json" ] || { echo "no $model yet: the page stays as it is"; exit 0; }
done
"$python" "$root/tools/eval/page.py" --page "$root/docs/quality.md" \
    --models SmolLM2-135M=smollm2 Qwen2.5-Coder-1.5B=qwen-coder "Gemma 3 270M=gemma3-270m" \
    --claims SmolLM2-135M=claims-smollm2,books-smollm2 Qwen2.5-Coder-1.5B=claims-qwen-coder \
    "Gemma 3 270M=claims-gemma3-270m"
