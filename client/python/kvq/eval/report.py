# SPDX-License-Identifier: Apache-2.0
"""What was measured, as JSON and as Markdown.

The report is a dict: "model", "settings", "rows" (a dict for each cache, in the order of the
table, with "score", and "failed" where it could not be measured) and "machine". What depends on
the machine stands under "speed" of a row, everything else comes out the same everywhere, but for
rounding.
"""
from __future__ import annotations

import json
import math
import re
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import stats
from .results import array

Row = Dict[str, Any]


def score_of(lines: Sequence[Dict[str, Any]]) -> Row:
    """"score" and "speed" of a row, from its line of each window."""
    measured = {name: [array(line, name) for line in lines]
                for name in ("nll", "gain", "kl", "same")}
    largest = max(lines, key=lambda line: line["sizes"]["tokens"])
    tokens, seconds = (sum(values) for values in zip(
        *((line["sizes"]["tokens"], line["seconds"]) for line in lines)))
    places = stats.by_place(measured["kl"])
    return {"score": {**stats.summary(**measured), "sizes": largest["sizes"],
                      **({"by_place": places} if places else {})},
            "speed": {"prefill_tokens_per_second": tokens / seconds if seconds else math.nan,
                      "prefill_step": lines[0]["step"]}}


# ---- Numbers in a table ----

def number(x: float, digits: int = 3) -> str:
    """With so many digits that count, and no exponent above 0.0001."""
    if x is None or not math.isfinite(x):
        return "-"
    if x == 0 or abs(x) >= 10 ** digits:
        return f"{x:,.0f}"
    if abs(x) < 1e-4:
        return f"{x:.1e}"
    return f"{x:.{max(digits - 1 - math.floor(math.log10(abs(x))), 0)}f}"


def with_error(x: float, error: float) -> str:
    """A number and its standard error, with the error's digits."""
    if not math.isfinite(error) or error <= 0:
        return number(x)
    if error < 1e-6:
        return f"{x:.1e} ± {error:.1e}"
    digits = max(1 - math.floor(math.log10(error)), 0)
    return f"{x:.{digits}f} ± {error:.{digits}f}"


def share(x: float, digits: int = 1) -> str:
    """In percent."""
    return f"{100 * x:.{digits}f}%"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> List[str]:
    """Lines of a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(str(x).replace("|", "\\|") for x in row) + " |"
                    for row in rows]


# ---- Sections ----

def name_of(row: Row) -> str:
    """How a row is called in tables."""
    return f"`{row['name']}`" if row["kind"] != "reference" else f"{row['name']} ({row['dtype']})"


def quality(report: Dict[str, Any]) -> List[str]:
    """The table of perplexity and KL."""
    rows = []
    for row in report["rows"]:
        if "score" not in row:
            continue
        s = row["score"]
        reference = row["kind"] == "reference"
        packed = s["sizes"].get("bits_packed")
        rows.append([
            name_of(row), row["path"], number(s["sizes"]["bits"]),
            number(packed) if packed else "-", f"{s['sizes']['bytes']:,}",
            f"{s['perplexity']:.4g}",
            "-" if reference else with_error(s["gain"], s["gain_error"]),
            "-" if reference else with_error(s["kl"], s["kl_error"]),
            "-" if reference else number(s["kl_99"]),
            "-" if reference else share(s["same_top"], 2)])
    return [] if not rows else ["## Text", "", *table(
        ("cache", "path", "bits a value", "packed", "KV bytes", "perplexity",
         "log p against the reference", "KL, mean", "KL, 99%", "same top token"), rows), "",
        _about_text(report), ""]


def _about_text(report):
    first = next(row["score"] for row in report["rows"] if "score" in row)
    return (
        f"{first['windows']} window(s), {first['tokens']:,} tokens scored, teacher-forced in steps "
        f"of {report['settings']['step']}. Standard errors by {first['errors_by']} "
        f"({first['clusters']} of them)"
        + (", which depend on each other within a window: the errors are lower bounds"
           if first["errors_by"] != "windows" else "")
        + ". KL and log p in nats. Bits a value are the bytes that the cache took at a window's "
        "end, those of tokens in full precision included, over the numbers of K and V that "
        "attention can see; \"packed\" are those of a packed token alone."
        + _about_versions(report))


def _about_versions(report):
    """Lines that an earlier run has left are taken, whatever it ran."""
    older = [f"{name_of(row)} ({row['path']}) by {' and '.join(row['other_versions'])}"
             for row in report["rows"] if row.get("other_versions")]
    return f" **Measured with other versions than these:** {'; '.join(older)}." if older else ""


def by_place(report: Dict[str, Any]) -> List[str]:
    """Whether what a cache loses grows along a window."""
    rows = [row for row in report["rows"]
            if row.get("score", {}).get("by_place") and row["kind"] != "reference"]
    if not rows:
        return []
    return ["### By place in the window", "", *table(
        ("cache", "path", *(f"KL, tokens {p['first']:,} to {p['last']:,}"
                            for p in rows[0]["score"]["by_place"])),
        [[name_of(row), row["path"],
          *(with_error(p["kl"], p["kl_error"]) for p in row["score"]["by_place"])]
         for row in rows]), ""]


def by_layer(report: Dict[str, Any]) -> List[str]:
    """What each layer adds at each level, and the levels of each mix."""
    found = report.get("allocation")
    if not found:
        return []
    mixes = [row for row in report["rows"] if "levels" in row]
    *lower, top = sorted(found["bits"], key=lambda level: found["bits"][level])
    rows = [[str(layer), *(number(felt[level]) for level in lower),
             *(f"`{row['levels'][layer]}`" for row in mixes)]
            for layer, felt in enumerate(found["sensitivity"])]
    return ["## Bits by layer", "", *table(
        ("layer", *(f"`{level}` adds" for level in lower), *(name_of(row) for row in mixes)),
        rows), "",
        f"KL that one layer at a level adds while all others have `{top}`, without the 1% of "
        f"tokens that have the most, over {found['windows']} window(s) from token "
        f"{found['skip']:,} of the text on. The mixes were chosen by it"
        + (": **on text that they are measured on above**." if found["same_text"]
           else ", on other text than is measured above.")
        + " Rows behind `-reversed`, `-first` and `-last` have their levels in other orders.", ""]


def needles(report: Dict[str, Any]) -> List[str]:
    """Recall by distance, and by what part of the cache is not in full."""
    rows = [row for row in report["rows"] if "needles" in row]
    if not rows:
        return []
    lines = ["## Needles", ""]
    for by, name, head in (("by_distance", "distance", "{:,} tokens away"),
                           ("by_outside", "outside", "{} outside")):
        groups = list(dict.fromkeys(g[name] for row in rows for g in row["needles"][by]))
        if by == "by_outside":
            groups.sort(key=lambda g: int(re.findall(r"[0-9]+", g)[-1]))
        cells = []
        for row in rows:
            found = {g[name]: g for g in row["needles"][by]}
            cells.append([name_of(row), row["path"], *(
                f"{share(found[g]['right'], 0)} ({100 * found[g]['right_low']:.0f} to "
                f"{share(found[g]['right_high'], 0)}) of {found[g]['items']}, "
                f"{number(found[g]['bits'])} bits" if g in found else "-" for g in groups)])
        lines += [*table(("cache", "path", *(head.format(g) for g in groups)), cells), ""]
    return [*lines, "How many needles were found (each token of the answer is the likeliest one), "
            "between which shares the true one lies in 95 of 100 cases (Wilson's interval), and "
            "the bits that the answer cost on the mean, for the reference first. \"Outside\" "
            "is the part of the cache that is not in full precision when the answer begins, so a "
            "format stands in the column of its window.", ""]


def answers(report: Dict[str, Any]) -> List[str]:
    """How long greedy answers stay the reference's."""
    rows = [[name_of(row), row["path"],
             with_error(row["answers"]["same"], row["answers"]["same_error"]),
             number(row["answers"]["median"]),
             f"{row['answers']['whole']} of {row['answers']['prompts']}"]
            for row in report["rows"] if "answers" in row and row["kind"] != "reference"]
    if not rows:
        return []
    tokens = next(row["answers"]["tokens"] for row in report["rows"] if "answers" in row)
    return ["## Long answers", "", *table(
        ("cache", "path", "same tokens, mean", "median", "never parted"), rows), "",
        f"Greedy answers of {tokens} tokens behind {report['settings']['prompt']} tokens of the "
        "text: how many are the reference's before the first that is not. Standard errors by "
        "prompts.", ""]


def speeds(report: Dict[str, Any]) -> List[str]:
    """What depends on the machine."""
    rows = []
    for row in report["rows"]:
        speed = row.get("speed")
        if speed:
            rows.append([name_of(row), row["path"],
                         number(speed.get("prefill_tokens_per_second", math.nan)),
                         number(speed.get("decode_tokens_per_second", math.nan))])
    others = sum("score" in row and not row.get("speed") for row in report["rows"])
    left = ([f"{others} of the caches were measured on another machine, by other threads or with "
             "other versions: their speed is not here.", ""] if others else [])
    if not rows:
        return ["## Speed on this machine", "", *left] if left else []
    return ["## Speed on this machine", "", *table(
        ("cache", "path", "prefill, tokens a second", "decoding, tokens a second"), rows), "",
        f"{report['machine']}. The whole model, with its matrix products; caches took turns, and "
        "what else the machine did meanwhile is in these numbers.", "", *left]


def failed(report: Dict[str, Any]) -> List[str]:
    """Rows without numbers, and why."""
    rows = [[name_of(row), row["path"], row["failed"]] for row in report["rows"]
            if "failed" in row]
    return ["## Not measured", "", *table(("cache", "path", "why"), rows), ""] if rows else []


def plots(report: Dict[str, Any]) -> List[str]:
    """The plots that lie beside the page."""
    return [line for title, name in report.get("plots", ())
            for line in (f"![{title}]({name})", "")]


Section = Callable[[Dict[str, Any]], List[str]]
SECTIONS: Tuple[Section, ...] = (
    quality, by_place, by_layer, needles, answers, plots, speeds, failed)


def beginning(bos: Optional[Dict[str, Any]]) -> str:
    """Whether windows begin with <bos>, as the report says it behind the text's name."""
    if not bos:
        return ""
    if bos["put"]:
        return f", each window behind `{bos['token']}`"
    return f", no window behind `{bos['token']}`, which the tokenizer puts before no text"


def markdown(report: Dict[str, Any]) -> str:
    """The whole report as a page."""
    s = report["settings"]
    lines = [f"# {report['model']}", "",
             f"Written by `python -m kvq.eval`; do not edit. Weights in {s['dtype']}; the "
             f"reference is the engine's own cache in {s['dtype']} with {s['attention']} attention "
             f"(transformers {s['transformers']}, PyTorch {s['torch']}), over the same weights. "
             f"Text: {s['text']}{beginning(s.get('bos'))}.", ""]
    for section in SECTIONS:
        lines += section(report)
    return "\n".join(lines).rstrip("\n") + "\n"


def without_nan(thing: Any) -> Any:
    """The same with None for what JSON has no number for."""
    if isinstance(thing, dict):
        return {name: without_nan(value) for name, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [without_nan(value) for value in thing]
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing


def as_json(report: Dict[str, Any]) -> str:
    """The whole report as JSON."""
    return json.dumps(without_nan(report), indent=1, allow_nan=False) + "\n"
