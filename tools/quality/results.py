# SPDX-License-Identifier: Apache-2.0
"""What kvq-bench quality wrote, by part; means over seeds; and whether a data set says anything."""
import collections
import json
import math

CONTROLS = ("dropped", "int2-token")
FULL = ("f16", "bf16")
LOW_BITS = 3.6  # formats up to so many bits a value are what a data set has to tell apart


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


class Results:
    """All lines of a results file. Missing measurements are NaN."""

    def __init__(self, path):
        self.formats, self.methods = {}, []
        self.measured = {}  # (part, field) -> what all lines of the part were measured on
        self.perplexity = collections.defaultdict(dict)  # outliers -> method -> line
        self.recall = {}
        self.caches = collections.defaultdict(lambda: collections.defaultdict(list))
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    self.add(json.loads(line))
                except json.JSONDecodeError:
                    continue  # a run that was killed while writing

    def add(self, line):
        part, method = line["part"], line["method"]
        for field in ("head_dim", "inputs"):
            one = self.measured.setdefault((part, field), line[field]) if field in line else None
            if one is not None and one != line[field]:
                raise ValueError(f"{part}: lines of {field} {one} and of {line[field]}; give each "
                                 "model, text and head_dim a results file of its own")
        if part == "format":
            self.formats[method] = line
        elif part == "perplexity":
            self.perplexity[line["outliers"]][method] = line
        elif part == "recall":
            self.recall[method] = {d["distance"]: d for d in line["distances"]}
        else:
            self.caches[(part, line["data"], line["aim"])][method].append(line)
        if method not in self.methods:
            self.methods.append(method)

    def bits(self, method):
        return self.formats.get(method, {}).get("bits", math.nan)

    def value(self, key, method, field):
        """Root mean square over seeds of an error on one data set."""
        lines = self.caches.get(key, {}).get(method, [])
        squares = [x[field] ** 2 for x in lines if x.get(field) is not None]
        return math.sqrt(mean(squares)) if squares else math.nan

    def model(self, outliers, method, field):
        value = self.perplexity.get(outliers, {}).get(method, {}).get(field)
        return math.nan if value is None else value

    def captured(self, method, field, aim=0):
        """Root mean square over layers."""
        keys = [k for k in self.caches if k[0] == "captured" and k[2] == aim]
        squares = [self.value(k, method, field) ** 2 for k in keys]
        return math.sqrt(mean(squares)) if squares else math.nan

    def layers(self):
        return sorted({k[1] for k in self.caches if k[0] == "captured"})

    def synthetic(self):
        return list(dict.fromkeys(k[1] for k in self.caches if k[0] == "synthetic"))

    def worse_than_dropped(self, values):
        """Methods by error, the largest first, that have more than what drops the cache."""
        line = values.get("dropped", math.nan)
        return sorted((m for m, v in values.items() if m not in CONTROLS and v > line),
                      key=lambda m: -values[m])

    def says_something(self, values):
        """values: {method: error}. Formats stand clearly between f16 and the controls if the best
        of few bits has at most 0.7 of the better control's error, and half of them less than it."""
        controls = [values[c] for c in CONTROLS if not math.isnan(values.get(c, math.nan))]
        formats = [v for m, v in values.items()
                   if m in self.formats and m not in (*CONTROLS, *FULL)
                   and self.bits(m) <= LOW_BITS and not math.isnan(v)]
        if not controls or len(formats) < 2:
            return None
        line = min(controls)
        return min(formats) <= 0.7 * line and sum(v < line for v in formats) * 2 >= len(formats)
