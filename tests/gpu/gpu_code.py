# SPDX-License-Identifier: Apache-2.0
"""Machine code of a few instructions, and cubins of it, for the tests of what reads them."""
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools" / "gpu"))
import sass  # noqa: E402

NUMBERS = {name: number for number, name in sass.NAMES.items()}
REGISTER, CONSTANT = 1 << 9, 4 << 9  # where the second operand is
LESS, GREATER_OR_EQUAL = 1, 6
END = 0xfffffffc00fc7947, 0x000fc00003800000  # a branch to itself


def make(name, d=255, a=255, b=None, c=255, constant=None, guard=7, negated=False, high=0,
         wait=1, sets=7, waits_for=0):
    """The two words of an instruction. `sets`: a barrier; `waits_for`: a mask of them."""
    low = NUMBERS[name] | guard << 12 | negated << 15 | d << 16 | a << 24
    if constant is not None:
        low |= CONSTANT | (constant & 0xffffffff) << 32
    else:
        low |= REGISTER | (255 if b is None else b) << 32
    high |= c | wait << 41 | sets << 46 | 7 << 49 | waits_for << 52
    return low, high


def compare(register, how, constant, predicate=0):
    return make("ISETP", d=0, a=register, constant=constant, c=0,
                high=how << 12 | predicate << 17 | 7 << 20)


def branch(here, to, guard=7, negated=False):
    fours = (to - here - 1) * 4
    low = NUMBERS["BRA"] | guard << 12 | negated << 15 | (fours & 0xff) << 16
    return low | 1 << 11 | (fours >> 8 & 0x3fffffff) << 34, 7 << 23 | 1 << 41 | 7 << 46 | 7 << 49


def code_of(words):
    return b"".join(struct.pack("<QQ", *pair) for pair in [*words, END])


def nest(limit=64, step=8, start=None, inner=5, before=()):
    """A loop with a product in it and a loop of `inner` instructions and the counter's three, that
    is gone through until the counter passes `limit`. `start`: an instruction that sets it, number
    2; `before`: what stands behind that, from number 3 on."""
    words = [start or make("MOV", d=1, constant=0)]
    first = len(words)
    words += [make("HMMA", d=8, a=16, b=24, c=8), make("MOV", d=1, constant=0)]
    if start:
        words[-1] = start
    words += before
    body = len(words)
    words += [make("LOP3", d=30, a=30, b=30) for _ in range(inner)]
    words += [make("VIADD", d=1, a=1, constant=step), compare(1, GREATER_OR_EQUAL, limit)]
    words.append(branch(len(words), body, guard=0, negated=True))
    words += [make("IADD3", d=2, a=2, constant=1), compare(2, LESS, 100, predicate=1)]
    words.append(branch(len(words), first, guard=1))
    return [*words, make("EXIT")]


def cubin(kernels, registers=40):
    """An ELF file with kernels: {name: words}."""
    names, texts = b"\0", []

    def name(text):
        nonlocal names
        at = len(names)
        names += text.encode() + b"\0"
        return at

    parts = [(0, 0, b"")]
    symbols, info = bytes(24), b""
    for i, (kernel, words) in enumerate(kernels.items(), 1):
        parts.append((name(".text." + kernel), 1, code_of(words)))
        texts.append(name(kernel))
        symbols += struct.pack("<IBBHQQ", texts[-1], 18, 0, i, 0, 0)
        info += struct.pack("<BBHII", 4, 0x2f, 8, i, registers)
    parts += [(name(".nv.info"), 0x70000000, info), (name(".symtab"), 2, symbols)]
    last = len(parts)
    own = name(".strtab")
    parts.append((own, 3, names))
    data, headers = bytearray(64), []
    for at, kind, content in parts:
        headers.append(struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, len(data), len(content),
                                   last if kind == 2 else 0, 0, 1, 0))
        data += content
    struct.pack_into("<4s", data, 0, b"\x7fELF")
    struct.pack_into("<Q", data, 40, len(data))
    struct.pack_into("<HH", data, 60, len(headers), last)
    return bytes(data) + b"".join(headers)
