# SPDX-License-Identifier: Apache-2.0
"""The report of tools/gpu-check.sh: one JSON and one Markdown file from what its parts wrote."""
import json

ORDER = ("probes", "points-48", "points-1", "shapes", "ablation", "grids", "packing", "prefill",
         "steps-qwen3", "steps-llama3", "batches-qwen3", "batches-llama3", "daemon",
         "hop")
TITLES = {
    "probes": "What the device gives at best",
    "points-48": "Attention of one layer, 32/8 heads, head_dim 128, 48 sessions",
    "points-1": "Attention of one layer, 32/8 heads, head_dim 128, one session",
    "shapes": "Other shapes, 48 sessions of 4,096 tokens",
    "ablation": "Codes left as they are (AND only), and classic dequantization",
    "grids": "oscar2 with grids of other sizes",
    "packing": "Packing one block of 48 sessions in 36 layers",
    "prefill": "512 new tokens over 32,768 cached ones, one layer",
    "steps-qwen3": "Whole decode steps, Qwen3-8B's shape (random weights)",
    "steps-llama3": "Whole decode steps, Llama-3.1-8B's shape (random weights)",
    "batches-qwen3": "The largest batch of 4,096 tokens that fits, and its step: Qwen3-8B's shape",
    "batches-llama3":
        "The largest batch of 4,096 tokens that fits, and its step: Llama-3.1-8B's shape",
    "daemon": "kvqd on the GPU, with clients in processes of their own",
    "hop": "A layer's way to the daemon and back, oscar2, 32/8 heads, head_dim 128, 32 layers: "
           "microseconds a layer",
}


def complaints(result):
    """What is wrong with a part's numbers, in words."""
    found = []

    def look(rows, path):
        if not isinstance(rows, dict):
            return
        if "wrong" in rows:
            found.append(f"{', '.join(path)}: {rows['wrong']}")
        if rows.get("same_bits") is False:
            found.append(f"{', '.join(path)}: other bits than with the first grid")
        for key, value in rows.items():
            look(value, [*path, key])
    look(result["rows"], [])
    return found


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(x, digits=1):
    return "" if x is None else f"{x:,.{digits}f}"


def perfect_fp8(point, ways, floor):
    """The line of a reader of 8 bits a value that nothing but memory holds up."""
    us = ways["kvq bf16"]["bytes"] / 2 / floor / 1e3
    best = min(r["us"] for r in ways.values() if r and "us" in r and r.get("bits", 16) == 16)
    return [point, "a perfect reader of fp8 (computed)", number(us), number(floor, 0), "100%",
            number(best / us, 2), ""]


def attention_rows(rows, floor):
    for point, ways in rows.items():
        if floor and "us" in (ways.get("kvq bf16") or {}):
            yield perfect_fp8(point, ways, floor)
        for way, row in ways.items():
            if not row:
                continue
            if "refused" in row:
                yield [point, way, "refused: " + row["refused"], "", "", "", ""]
                continue
            speed = row["bytes"] / row["us"] / 1e3
            yield [point, way, number(row["us"]), number(speed, 0),
                   f"{speed / floor:.0%}" if floor else "", number(row.get("vs_16_bits"), 2),
                   f"{row['error']:.1e}" if "error" in row else ""]


def attention_table(rows, floor):
    head = ("point", "attention", "us a layer", "GB/s", "of what can be read",
            "times the fastest 16 bits", "error")
    return table(head, attention_rows(rows, floor))


def plain_table(rows):
    """Rows of one level: a column for each key."""
    keys = list(dict.fromkeys(key for row in rows.values() if row for key in row))
    body = [[name, *(cell(row.get(key)) for key in keys)] for name, row in rows.items() if row]
    return table(["", *(key.replace("_", " ") for key in keys)], body)


def cell(x):
    if isinstance(x, bool):
        return "yes" if x else "NO"
    if isinstance(x, float) and 0 < abs(x) < 0.005:
        return f"{x:.1e}"
    if isinstance(x, float):
        return number(x, 2)
    return "" if x is None else str(x)


def nested_table(rows):
    """{model: {point: {way: row}}} or {model: {way: row}}, flattened."""
    flat = {}

    def walk(value, path):
        if value and all(not isinstance(v, dict) for v in value.values()):
            flat[", ".join(path)] = value
        else:
            for key, inner in value.items():
                walk(inner, [*path, key])
    walk(rows, [])
    return plain_table(flat)


def section(result, floor):
    rows, part = result["rows"], result["part"]
    if not rows:
        return "nothing was measured\n"
    if part == "probes":
        return table(("", ""), [[key.replace("_", " "), cell(x)] for key, x in rows.items()])
    if part.startswith(("points", "shapes")):
        return attention_table(rows, floor)
    nested = part.startswith(("steps", "ablation", "daemon", "hop"))
    return nested_table(rows) if nested else plain_table(rows)


def write(folder):
    """folder/PART.json to folder/gpu-check.json and gpu-check.md. Returns the exit status."""
    parts = {part: json.loads((folder / f"{part}.json").read_text())
             for part in ORDER if (folder / f"{part}.json").exists()}
    if not parts:
        print(f"{folder}: no part has been measured yet; run tools/gpu-check.sh")
        return 1
    (folder / "gpu-check.json").write_text(json.dumps(parts, indent=1) + "\n")
    floor = (parts.get("probes", {}).get("rows") or {}).get("read_gb_per_s")
    device = ", ".join(sorted({p["device"] for p in parts.values()}))
    text = [f"# Measured on {device}\n",
            "Written by `tools/gpu-check.sh`. Kernel ratios and ratios of whole steps stand in "
            "tables of their own.\n"]
    if not all(p["timed"] for p in parts.values()):
        text.append("**Without a GPU: no time here means anything.**\n")
    for part, result in parts.items():
        text += [f"## {TITLES.get(part, part)}\n", section(result, floor)]
        if not result["complete"]:
            text.append("Stopped before its end: run `tools/gpu-check.sh` again to go on.\n")
        text += [f"- wrong: {line}" for line in complaints(result)]
    (folder / "gpu-check.md").write_text("\n".join(text) + "\n")
    print(f"{folder / 'gpu-check.md'}")
    return 0
