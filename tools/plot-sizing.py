#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/sizing.svg: what a short session takes, as kvqctl size says it.

    tools/plot-sizing.py [KVQCTL] > docs/sizing.svg     (default build/release/bin/kvqctl)
"""
import json
import subprocess
import sys

MODEL = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]  # Llama-3.1-8B
LINES = (("f16", "#c0392b"), ("oscar2", "#2471a3"), ("innerq-hybrid", "#7d6608"))
TOKENS, WIDTH, HEIGHT, LEFT, BOTTOM = 400, 720, 360, 56, 40


def size(kvqctl, name, tokens):
    out = subprocess.run([kvqctl, "size", "--json", "--format", name, *MODEL, "--tokens",
                          str(tokens)], capture_output=True, text=True, check=True).stdout
    return json.loads(out)


def main():
    kvqctl = sys.argv[1] if len(sys.argv) > 1 else "build/release/bin/kvqctl"
    if kvqctl in ("-h", "--help"):
        print(__doc__)
        return
    told = {name: [size(kvqctl, name, n) for n in range(1, TOKENS + 1)] for name, _ in LINES}
    curves = [(name, color, [x["total_bytes"] / 2**20 for x in told[name]])
              for name, color in LINES]
    curves.append(("16 bits a value", "#7f8c8d", [x["f16_bytes"] / 2**20 for x in told["f16"]]))
    top = max(max(values) for _, _, values in curves)

    def at(n, mib):
        return (LEFT + (WIDTH - LEFT - 8) * n / TOKENS,
                HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 8) * mib / top)

    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
          'font-family="sans-serif" font-size="13" role="img" '
          'aria-label="MiB of a session by its tokens">')
    print(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for mib in range(0, int(top) + 1, 10):
        x, y = at(0, mib)
        print(f'<path d="M{x:.0f} {y:.1f}H{WIDTH - 8}" stroke="#ddd"/>'
              f'<text x="{x - 8:.0f}" y="{y + 4:.1f}" text-anchor="end">{mib}</text>')
    for n in range(0, TOKENS + 1, 32):
        x, y = at(n, 0)
        print(f'<text x="{x:.1f}" y="{y + 18:.0f}" text-anchor="middle">{n}</text>')
    print(f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">tokens; MiB of one session '
          'with 32 layers, 8 KV heads of 128</text>')
    for i, (name, color, values) in enumerate(curves):
        points = " ".join("%.1f,%.1f" % at(n + 1, mib) for n, mib in enumerate(values))
        print(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
              f'<text x="{LEFT + 14}" y="{24 + 18 * i}" fill="{color}">{name}</text>')
    print("</svg>")


if __name__ == "__main__":
    main()
