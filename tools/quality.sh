#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Measures what the formats do to keys, values and a model, and writes the report: tables and
# verdicts to docs/quality.md, plots to docs/quality/, all numbers to docs/quality/quality.json.
#
#     tools/quality.sh                everything; about an hour on two CPUs
#     tools/quality.sh --quick        fewer seeds, less text, fewer formats; a few minutes
#     tools/quality.sh --model DIR --text FILE     the same for another checkpoint
#
# Measurements are kept in a results file (--results FILE) as they are made: a run that was ended
# goes on where it stood. Needs no daemon. KVQ_BIN_DIR names the folder of kvq-bench.
set -eu

usage() {
    sed -n '4,12s/^# \{0,1\}//p' "$0"
    echo "Options: --quick --model DIR --text FILE --results FILE --out FILE --methods LIST" \
        "--jobs N"
}

root=$(cd "$(dirname "$0")/.." && pwd)
bin=${KVQ_BIN_DIR:-$root/build/release/bin}
model=$root/tools/model/kvq-bytes
text=$root/tools/model/heldout.txt
results='' out='' methods='' quick='' jobs=2
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 ;;
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
out=${out:-$root/docs/quality.md}
plots=$(dirname "$out")/quality
kept=$root/build/quality
mkdir -p "$plots" "$kept"

# What the claims compare, besides the formats of the table.
order=oscar2-norot-noscale,oscar2-norot,oscar2-noscale
claims=$order,oscar2-max,oscar2-mean,kivi2-g128,innerq-small:vcodec=affine:zero=minimum
claims=$claims,innerq-small-full,innerq-hybrid-full
more=oscar2-fm,oscar2-g64,oscar2-g128,kivi2-g64,oscar2:vrot=hadamard,kivi2:vrot=hadamard
if [ -n "$quick" ]; then
    results=${results:-$kept/quick-$(basename "$model").jsonl}
    few=f16,dropped,int2-token,oscar2,oscar4,kivi2,ott2,ott2-oscar,innerq-hybrid,innerq-small
    methods=${methods:-$few,quarot2,turboquant3,$claims}
    seeds=1 queries=4 tokens=2112 bytes=4096 variants='1 10' count=2
else
    results=${results:-$kept/$(basename "$model").jsonl}
    methods=${methods:-all,$claims,$more}
    seeds=3 queries=16 tokens=4160 bytes=16384 variants='1 10 30' count=8
fi
items=$kept/items-$count.jsonl
python3 "$root/tools/model/recall.py" --text "$root/tools/model/heldout.txt" --count $count |
    grep '"kind": "fact"' | grep -v '"distance": 4000' >"$items"

# One line a job; the longest first.
{
    for v in $variants; do
        echo "perplexity --outliers $v --bytes $bytes"
    done
    [ "$model" = "$root/tools/model/kvq-bytes" ] && echo "recall --items '$items'"
    echo "captured --outliers 1 --queries $((queries * 4))"
    s=1
    while [ $s -le $seeds ]; do
        echo "synthetic --seed $s --seeds 1 --queries $queries --tokens $tokens"
        s=$((s + 1))
    done
    echo formats
} >"$kept/jobs"

xargs -P "$jobs" -L 1 "$bin/kvq-bench" quality --results "$results" --methods "$methods" \
    --model "$model" --text "$text" <"$kept/jobs" || {
    echo "quality.sh: a measurement failed; what is done is kept in $results" >&2
    exit 1
}
python3 "$root/tools/quality/report.py" --results "$results" --out "$out" --plots "$plots" \
    --json "$plots/quality.json" --note "Model: $(basename "$model")." --text
