#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Measures what the formats do to keys, values and a model, and writes the report: tables and
# verdicts to docs/quality/small-model.md, with plots and all numbers (quality.json) beside it.
# Pretrained models are measured by tools/eval/quality.sh.
#
#     tools/quality.sh                everything; about a quarter of an hour on two idle CPUs
#     tools/quality.sh --quick        less text, fewer formats; a few minutes
#     tools/quality.sh --long         more seeds, more text, larger codebooks; over two hours
#     tools/quality.sh --model DIR --text FILE     the same for another checkpoint
#
# Measurements are kept in a results file (--results FILE) as they are made: a run that was ended
# goes on where it stood. Needs no daemon. KVQ_BIN_DIR names the folder of kvq-bench.
set -eu

usage() {
    sed -n '4,14s/^# \{0,1\}//p' "$0"
    echo "Options: --quick --long --model DIR --text FILE --results FILE --out FILE" \
        "--methods LIST --jobs N"
}

root=$(cd "$(dirname "$0")/.." && pwd)
bin=${KVQ_BIN_DIR:-$root/build/release/bin}
model=$root/tools/model/kvq-bytes
text=$root/tools/model/heldout.txt
results='' out='' methods='' quick='' long='' jobs=2
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 ;;
    --long) long=1 ;;
    --help) usage; exit 0 ;;
    --model | --text | --results | --out | --methods | --jobs)
        [ $# -gt 1 ] || { echo "quality.sh: $1 needs a value" >&2; exit 2; }
        eval "${1#--}=\$2"
        shift
        ;;
    *) echo "quality.sh: $1 is no option; see --help" >&2; exit 2 ;;
    esac
    shift
done
[ -x "$bin/kvq-bench" ] || {
    echo "quality.sh: no kvq-bench in $bin; build it, or set KVQ_BIN_DIR" >&2
    exit 1
}
out=${out:-$root/docs/quality/small-model.md}
plots=$(dirname "$out")
kept=$root/build/quality
mkdir -p "$plots" "$kept"

# What the claims compare, besides the formats of the table.
order=oscar2-norot-noscale,oscar2-norot,oscar2-noscale
claims=$order,oscar2-max,oscar2-mean,kivi2-g128,innerq-small:vcodec=affine:zero=minimum
claims=$claims,innerq-small-full,innerq-hybrid-full
books=vecinfer-2,vecinfer-2-norot,vecinfer-2-nosmooth,vecinfer-2-norot-nosmooth
more=oscar2-fm,oscar2-g64,oscar2-g128,kivi2-g64,oscar2:vrot=none,kivi2:vrot=hadamard
# What is asked for facts; the others would take too long.
asked=f16,dropped,int2-token,oscar2,oscar4,kivi2,ott2,innerq-hybrid,innerq-small,quarot2
asked=$asked,turboquant2.5,turboquant3,vecinfer-2,kvq2
if [ -n "$quick" ]; then
    results=${results:-$kept/quick-$(basename "$model").jsonl}
    few=f16,dropped,int2-token,oscar2,oscar4,kivi2,ott2,ott2-oscar,innerq-hybrid,innerq-small
    asked=${methods:-f16,dropped,int2-token,oscar2,kivi2}
    methods=${methods:-$few,quarot2,turboquant3,$claims}
    books='' sizes='' seeds=1 queries=4 tokens=2112 bytes=4096 variants='1 10' count=2
else
    results=${results:-$kept/$(basename "$model").jsonl}
    sizes=vecinfer-1,vecinfer-4,million-2,vecinfer-d2b4,vecinfer-d4b6,vecinfer-d2b3
    sizes=$sizes${long:+,vecinfer-1.5,vecinfer-3,vecinfer-d8b16,million-3}
    [ -z "$methods" ] || asked=$methods books='' sizes=''
    methods=${methods:-all,$claims,$more}
    variants='1 10 30' seeds=1 queries=8 tokens=2112 bytes=8192 count=3
    [ -z "$long" ] || seeds=3 queries=16 tokens=4160 bytes=32768 count=16
fi
items=$kept/items-$count.jsonl
python3 "$root/tools/model/recall.py" --text "$root/tools/model/heldout.txt" --count $count |
    grep '"kind": "fact"' | grep -v '"distance": 4000' >"$items"

# One line a job; the longest first. Other codebooks are trained on the licence.
with_books=$methods${books:+,$books}
{
    for v in $variants; do
        echo "perplexity --outliers $v --bytes $bytes --methods $methods"
        [ -z "$books" ] || echo "perplexity --outliers $v --bytes $bytes --methods $books"
    done
    [ -z "$books" ] ||
        echo "perplexity --bytes $bytes --methods vecinfer-2 --book-text '$root/LICENSE'"
    [ -z "$sizes" ] || echo "perplexity --bytes $bytes --methods $sizes"
    [ "$model" != "$root/tools/model/kvq-bytes" ] ||
        echo "recall --items '$items' --methods $asked"
    echo "captured --queries $((queries * 4)) --methods $with_books"
    s=1
    while [ $s -le $seeds ]; do
        echo "synthetic --seed $s --seeds 1 --queries $queries --tokens $tokens" \
            "--methods $with_books"
        s=$((s + 1))
    done
    echo "formats --methods $with_books${sizes:+,$sizes}"
} >"$kept/jobs"

xargs -P "$jobs" -L 1 "$bin/kvq-bench" quality --results "$results" --model "$model" \
    --text "$text" <"$kept/jobs" || {
    echo "quality.sh: a measurement failed; what is done is kept in $results" >&2
    exit 1
}
python3 "$root/tools/quality/report.py" --results "$results" --out "$out" --plots "$plots" \
    --json "$plots/quality.json" --note "Model: $(basename "$model")." --text
