# SPDX-License-Identifier: Apache-2.0
"""A small writer of SVG plots: points and lines on linear or logarithmic axes, with a legend."""
import math

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 230, 40, 55
COLOURS = ("#1b6ca8", "#c44e52", "#3a923a", "#8172b3", "#b8860b", "#17807e", "#d1588c", "#5b5b5b",
           "#7a9b2e", "#a0522d", "#4f6bed", "#222222")


def escape(text):
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def number(x):
    return f"{x:.3g}" if abs(x) < 1e4 else f"{x:.0f}"


class Axis:
    """Maps numbers of a range to pixels."""

    def __init__(self, values, start, end, log):
        self.log, self.start, self.end = log, start, end
        low, high = min(values), max(values)
        if log:
            self.low, self.high = math.log10(low) - 0.1, math.log10(high) + 0.1
        else:
            margin = 0.06 * (high - low or 1)
            self.low, self.high = low - margin, high + margin

    def __call__(self, x):
        share = ((math.log10(x) if self.log else x) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self):
        """Round numbers within the range."""
        if self.log:
            marks = [m * 10 ** e for e in range(math.floor(self.low), math.ceil(self.high) + 1)
                     for m in ((1, 2, 5) if self.high - self.low < 2 else (1,))]
            return [m for m in marks if self.low <= math.log10(m) <= self.high]
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(m for m in (1, 2, 5, 10) if (self.high - self.low) / (step * m) <= 7)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def frame(title, x_label, y_label, x, y):
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>']
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in x.ticks():
        parts.append(f'<line x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{bottom}" '
                     f'stroke="#e4e4e4"/><text x="{x(tick):.1f}" y="{bottom + 16}" '
                     f'text-anchor="middle">{number(tick)}</text>')
    for tick in y.ticks():
        parts.append(f'<line x1="{LEFT}" y1="{y(tick):.1f}" x2="{right}" y2="{y(tick):.1f}" '
                     f'stroke="#e4e4e4"/><text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" '
                     f'text-anchor="end">{number(tick)}</text>')
    parts.append(f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" '
                 f'fill="none" stroke="#888"/>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 14}" text-anchor="middle">'
                 f'{escape(x_label)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="18" y="{middle}" text-anchor="middle" '
                 f'transform="rotate(-90 18 {middle})">{escape(y_label)}</text>')
    return parts


def spread(places, least):
    """Moves labels that stand too close apart, downwards."""
    out, last = {}, -math.inf
    for key, at in sorted(places.items(), key=lambda item: item[1]):
        last = max(at, last + least)
        out[key] = last
    return out


def plot(path, title, x_label, y_label, series, *, log_x=False, log_y=False, names=True):
    """series: {name: [(x, y), ...]}; one point is drawn as a dot with its name beside it, several
    as a line with its name at the right. Points that a logarithm cannot show are left out."""
    shown = {}
    for name, points in series.items():
        points = [(a, b) for a, b in points if (a > 0 or not log_x) and (b > 0 or not log_y)]
        if points:
            shown[name] = points
    if not shown:
        return False
    every = [p for points in shown.values() for p in points]
    x = Axis([p[0] for p in every], LEFT, WIDTH - RIGHT, log_x)
    y = Axis([p[1] for p in every], HEIGHT - BOTTOM, TOP, log_y)
    parts = frame(title, x_label, y_label, x, y)
    ends = spread({n: y(points[-1][1]) for n, points in shown.items()}, 13)
    for i, (name, points) in enumerate(shown.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        if len(points) > 1:
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" '
                         f'stroke-width="1.8"/>')
        parts += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>'
                  for a, b in points]
        a, b = points[-1]
        parts.append(f'<line x1="{x(a):.1f}" y1="{y(b):.1f}" x2="{WIDTH - RIGHT + 8}" '
                     f'y2="{ends[name]:.1f}" stroke="{colour}" stroke-opacity="0.3"/>'
                     f'<text x="{WIDTH - RIGHT + 12}" y="{ends[name] + 4:.1f}" fill="{colour}">'
                     f'{escape(name) if names else ""}</text>')
    height = max([HEIGHT, *(end + 20 for end in ends.values())])
    body = "\n".join(parts).replace(f'height="{HEIGHT}" fill="white"',
                                    f'height="{height:.0f}" fill="white"', 1)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
                   f'height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" '
                   f'font-family="sans-serif" font-size="11">\n{body}\n</svg>\n')
    return True
