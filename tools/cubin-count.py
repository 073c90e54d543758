#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count the instructions of the main loop of the GPU kernels in a cubin, without a disassembler.

    nvcc -std=c++17 -fmad=false -arch=sm_90a -cubin -I. kernels/cuda/attend_d128.cu -o attend.cubin
    tools/cubin-count.py attend.cubin                   one line a kernel
    tools/cubin-count.py attend.cubin --kernel b2_n1  those whose name contains it, with opcodes
    tools/cubin-count.py attend.cubin --kernel b2_n1 --by LOP3 --at-most 13 --registers 168
                                                        fails if a kernel needs more, or spills
    tools/cubin-count.py attend.cubin --kernel any_n1 --by LOP3 --tokens 16 --passes 1=1
                                                        of loops in the main loop

The main loop is, of the loops with matrix instructions and none with such in them, the one with the
most instructions of a kind (--by, matrix instructions unless told). One pass of it serves --tokens
tokens of one KV head. How loops and their passes are found stands in tools/gpu/sass.py.

Where no loop is in the main loop, its rare parts are the longer stretches that a forward branch
skips and that hold no matrix instruction: raising the running maximum of the softmax, masks where a
row does not see a whole group, the soft-cap of models that have one. They are counted apart.

Where loops are in it, what counts is the way through it with the most instructions, rare parts as
well, each loop as often as it is gone through: read off the code, or told by --passes, by its
number in the main loop. A budget (--at-most) fails where neither says so. --no-loop-over leaves out
ways through loops of more passes.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))
import sass  # noqa: E402

SPILLS = ("LDL", "STL")
CONVERSIONS = ("I2F", "F2I")  # a budget allows none in a loop without loops in it


def pair(text):
    number, passes = text.split("=")
    return int(number), int(passes)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("cubin")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--by", default=sass.MATRIX,
                        help=f"opcode that tells the main loop ({sass.MATRIX})")
    parser.add_argument("--tokens", type=int, default=32, help="tokens a pass of the loop (32)")
    parser.add_argument("--passes", type=pair, action="append", default=[], metavar="LOOP=N",
                        help="passes of loop number LOOP in the main loop")
    parser.add_argument("--no-loop-over", type=int, default=sass.MOST_PASSES, metavar="N",
                        help="leave out ways through loops of more passes")
    parser.add_argument("--at-most", type=float, help="most instructions per token and head")
    parser.add_argument("--registers", type=int, help="most registers a thread")
    parser.add_argument("--spills", type=int, default=0,
                        help="most accesses of local memory in the main loop (0)")
    parser.add_argument("--elsewhere", type=int, default=0,
                        help="most accesses of local memory outside of it (0)")
    return parser.parse_args()


def count(kernel, options):
    """Opcodes of one pass of the main loop, or None if nobody knows, and the sizes of its rare
    parts."""
    inner = kernel.passes(dict(options.passes))
    if not inner:
        return kernel.names(kernel.common()), [kernel.names(p).total() for p in kernel.rare_parts()]
    try:
        return kernel.longest(inner, options.no_loop_over), []
    except ValueError:
        return None, []


def describe(kernel, options, common, rare):
    """What a pass takes, in words."""
    passes = list(kernel.passes(dict(options.passes)).values())
    loops = f"loops in it of {', '.join(str(n or '?') for n in passes)} passes"
    if common is None:
        return f"not counted, {loops}"
    each = common.total() / options.tokens
    return (f"{each:.2f} instructions per token and head ({common.total()} a pass of the loop, "
            f"{loops if passes else f'rare parts of {rare}'}), {common[sass.MATRIX]} {sass.MATRIX}")


def is_over(kernel, options, common):
    """Whether a budget of instructions is not kept."""
    if options.at_most is None:
        return False
    if common is None:
        print("  the passes of loops that have \"?\" are not in the code; tell them by --passes")
        return True
    converts = not kernel.inside() and sum(common[name] for name in CONVERSIONS)
    return common.total() / options.tokens > options.at_most or bool(converts)


def main():
    options = parse()
    with open(options.cubin, "rb") as file:
        data = file.read()
    used, bad, seen = sass.registers(data), 0, 0
    for name, text in sorted(sass.kernels(data)):
        if options.kernel not in name:
            continue
        seen += 1
        kernel = sass.Kernel(sass.decode(text), options.by)
        common, rare = count(kernel, options)
        spills = sum(kernel.has(kernel.main, spill) for spill in SPILLS) if kernel.main else 0
        elsewhere = sum(at.name in SPILLS for at in kernel.code) - spills
        print(f"{name}: {describe(kernel, options, common, rare)}, {used[name]} registers, "
              f"{spills} spills, {elsewhere} elsewhere")
        if options.kernel and common:
            print("  " + " ".join(f"{k} {v}" for k, v in common.most_common()))
        bad += (spills > options.spills or elsewhere > options.elsewhere or
                is_over(kernel, options, common) or
                (options.registers is not None and used[name] > options.registers))
    if not seen:
        print(f"{options.cubin}: no kernel's name contains \"{options.kernel}\"", file=sys.stderr)
    return 1 if bad or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
