#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count the instructions of the main loop of the GPU kernels in a cubin, without a disassembler.

    nvcc -std=c++17 -fmad=false -arch=sm_90a -cubin -I. kernels/cuda/attend_d128.cu -o attend.cubin
    tools/cubin-count.py attend.cubin                   one line a kernel
    tools/cubin-count.py attend.cubin --kernel b2_n1  those whose name contains it, with opcodes
    tools/cubin-count.py attend.cubin --kernel b2_n1 --by LOP3 --at-most 13 --registers 168
                                                        fails if a kernel needs more, or spills

An instruction of compute capability 7.0 and later is 16 bytes long; its low 12 bits say what it
does. A loop is what lies between a backward branch and its target; the main loop is the one with
the most instructions of a kind (--by, matrix instructions unless told) and no loop with such in it.
Its rare parts are the longer stretches in it that a forward branch skips and that hold no matrix
instruction: raising the running maximum of the softmax, masks where a row does not see a whole
group, the soft-cap of models that have one. They are counted apart. One pass of the loop serves
--tokens tokens of one KV head.
"""
import argparse
import collections
import struct
import sys

# Bits 0 to 8; bits 9 to 11 only say where the operands are.
NAMES = {
    0x002: "MOV", 0x005: "CS2R", 0x006: "VOTE", 0x007: "SEL", 0x008: "FSEL", 0x009: "FMNMX",
    0x00b: "FSETP", 0x00c: "ISETP", 0x010: "IADD3", 0x011: "LEA", 0x012: "LOP3", 0x016: "PRMT",
    0x017: "IMNMX", 0x019: "SHF", 0x01c: "PLOP3", 0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA",
    0x024: "IMAD", 0x025: "IMAD.WIDE", 0x030: "HADD2", 0x031: "HFMA2", 0x032: "HMUL2",
    0x036: "VIADD", 0x03a: "MOVM", 0x03b: "LDSM", 0x03c: "HMMA", 0x03e: "F2FP", 0x048: "VIMNMX",
    0x07f: "BRA.DIV", 0x08c: "UISETP", 0x090: "UIADD3", 0x099: "USHF", 0x0a4: "UIMAD",
    0x0b9: "ULDC", 0x104: "F2F", 0x105: "F2I", 0x106: "I2F", 0x108: "MUFU", 0x118: "NOP",
    0x119: "S2R", 0x11a: "DEPBAR", 0x11d: "BAR", 0x141: "BSYNC", 0x145: "BSSY", 0x147: "BRA",
    0x148: "WARPSYNC", 0x14d: "EXIT", 0x181: "LDG", 0x182: "LDC", 0x183: "LDL", 0x184: "LDS",
    0x186: "STG", 0x187: "STL", 0x188: "STS", 0x189: "SHFL", 0x1ae: "LDGSTS", 0x1af: "LDGDEPBAR",
}
BRANCH, MATRIX, SPILLS, PADDING = "BRA", "HMMA", ("LDL", "STL"), "NOP"
CONVERSIONS = ("I2F", "F2I")  # a budget allows none in the loop
RARE = 16  # instructions that a rare part has at least


def kernels(data):
    """Yields name and code of every kernel of a cubin, a 64-bit ELF file."""
    if len(data) < 64 or data[:4] != b"\x7fELF":
        raise ValueError("not an ELF file; make it with nvcc -cubin")
    table, = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        name = data[start:data.index(b"\0", start)].decode()
        if name.startswith(".text."):
            yield name[6:], data[header[4]:header[4] + header[5]]


def registers(data):
    """Registers a thread, by kernel: attribute 0x2f of section .nv.info, by symbol number."""
    table, = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]

    def text(section, at):
        start = headers[section][4] + at
        return data[start:data.index(b"\0", start)].decode()

    symbols = next(h for h in headers if h[1] == 2)
    info = next(h for h in headers if text(names, h[0]) == ".nv.info")
    found, at = {}, info[4]
    while at < info[4] + info[5]:
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != 4:  # the value stands in the size field
            continue
        if attribute == 0x2f:
            symbol, number = struct.unpack_from("<II", data, at)
            name, = struct.unpack_from("<I", data, symbols[4] + 24 * symbol)
            found[text(symbols[6], name)] = number
        at += size
    return found


def signed(value, bits):
    return value - (1 << bits) if value >> (bits - 1) else value


def decode(code):
    """A list of (name, index of a branch's target or None), one an instruction."""
    words = [struct.unpack_from("<QQ", code, at) for at in range(0, len(code), 16)]
    # The distance counts in fours from bit 34. Since 9.0 its low byte stands apart, which the
    # branch to itself that ends every kernel tells.
    apart = any(low == 0xfffffffc00fc7947 for low, _ in words)
    found = []
    for i, (low, _) in enumerate(words):
        name, target = NAMES.get(low & 0x1ff, f"0x{low & 0xfff:03x}"), None
        if name == BRANCH:
            fours = signed(low >> 34, 30)
            bytes_ = 4 * (fours * 256 + (low >> 16 & 0xff) if apart else fours)
            target = i + 1 + bytes_ // 16
            if bytes_ % 16 or not 0 <= target <= len(words):
                raise ValueError(f"branch {low:#x} of instruction {i} leads nowhere")
        found.append((name, target))
    return found


def main_loop(code, by):
    """First and last index of the loop with the most instructions `by`, no loop of them in it."""
    def kinds(loop):
        return sum(name == by for name, _ in code[loop[0]:loop[1] + 1])

    loops = [(target, i) for i, (_, target) in enumerate(code) if target is not None and target < i]
    loops = [loop for loop in loops if kinds(loop)]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return max(inner, key=kinds, default=(0, len(code) - 1))


def rare_parts(code, first, last):
    """The stretches without a matrix instruction that a forward branch skips; no overlaps."""
    parts, free = [], first
    for i in range(first, last + 1):
        target = code[i][1]
        if i < free or target is None or not i < target <= last:
            continue
        part = code[i + 1:target]
        if len(part) >= RARE and all(name != MATRIX for name, _ in part):
            parts.append(part)
            free = target
    return parts


def count(code, by):
    """Opcode counts of the main loop without its rare parts, and of each of these."""
    first, last = main_loop(code, by)
    rare = [collections.Counter(name for name, _ in part if name != PADDING)
            for part in rare_parts(code, first, last)]
    common = collections.Counter(name for name, _ in code[first:last + 1] if name != PADDING)
    for part in rare:
        common -= part
    return common, rare


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("cubin")
    parser.add_argument("--kernel", default="", help="only kernels whose name contains this")
    parser.add_argument("--by", default=MATRIX, help=f"opcode that tells the main loop ({MATRIX})")
    parser.add_argument("--tokens", type=int, default=32, help="tokens a pass of the loop (32)")
    parser.add_argument("--at-most", type=float, help="most instructions per token and head")
    parser.add_argument("--registers", type=int, help="most registers a thread")
    parser.add_argument("--spills", type=int, default=0,
                        help="most accesses of local memory in the main loop (0)")
    parser.add_argument("--elsewhere", type=int, default=0,
                        help="most accesses of local memory outside of them (0)")
    options = parser.parse_args()
    with open(options.cubin, "rb") as file:
        data = file.read()
    used, bad, seen = registers(data), 0, 0
    for name, text in sorted(kernels(data)):
        if options.kernel not in name:
            continue
        seen += 1
        code = decode(text)
        common, rare = count(code, options.by)
        spills = sum(part[mnemonic] for part in [common, *rare] for mnemonic in SPILLS)
        elsewhere = sum(mnemonic in SPILLS for mnemonic, _ in code) - spills
        each = common.total() / options.tokens
        print(f"{name}: {each:.2f} instructions per token and head ({common.total()} in the loop, "
              f"rare parts of {[part.total() for part in rare]}), {common[MATRIX]} {MATRIX}, "
              f"{used[name]} registers, {spills} spills, {elsewhere} elsewhere")
        if options.kernel:
            print("  " + " ".join(f"{k} {v}" for k, v in common.most_common()))
        converts = sum(common[mnemonic] for mnemonic in CONVERSIONS)
        over = options.at_most is not None and (each > options.at_most or converts)
        bad += (spills > options.spills or elsewhere > options.elsewhere or over
                or (options.registers is not None and used[name] > options.registers))
    if not seen:
        print(f"{options.cubin}: no kernel's name contains \"{options.kernel}\"", file=sys.stderr)
    return 1 if bad or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
