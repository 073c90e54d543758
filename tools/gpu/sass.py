# SPDX-License-Identifier: Apache-2.0
"""What a cubin's machine code says: kernels, instructions, loops within loops and their passes.

An instruction of compute capability 7.0 and later is 16 bytes long; its low 12 bits say what it
does. A loop is what a backward branch repeats: the blocks that reach the branch without passing its
target, where every way to the branch passes that target. Stubs behind a kernel's end, which jump
back into it, are no loops.

A loop's passes can be read off where a counter that grows by a constant is compared with a constant
before the branch back, if every start below the constant, or the one that is loaded before the
loop, gives the same number.
"""
import collections
import struct

# Bits 0 to 8; bits 9 to 11 only say where the operands are.
NAMES = {
    0x002: "MOV", 0x005: "CS2R", 0x006: "VOTE", 0x007: "SEL", 0x008: "FSEL", 0x009: "FMNMX",
    0x00b: "FSETP", 0x00c: "ISETP", 0x010: "IADD3", 0x011: "LEA", 0x012: "LOP3", 0x016: "PRMT",
    0x017: "IMNMX", 0x019: "SHF", 0x01c: "PLOP3", 0x020: "FMUL", 0x021: "FADD", 0x023: "FFMA",
    0x024: "IMAD", 0x025: "IMAD.WIDE", 0x030: "HADD2", 0x031: "HFMA2", 0x032: "HMUL2",
    0x036: "VIADD", 0x03a: "MOVM", 0x03b: "LDSM", 0x03c: "HMMA", 0x03e: "F2FP", 0x048: "VIMNMX",
    0x07f: "BRA.DIV", 0x08c: "UISETP", 0x090: "UIADD3", 0x099: "USHF", 0x0a4: "UIMAD",
    0x0b9: "ULDC", 0x104: "F2F", 0x105: "F2I", 0x106: "I2F", 0x108: "MUFU", 0x118: "NOP",
    0x119: "S2R", 0x11a: "DEPBAR", 0x11d: "BAR", 0x141: "BSYNC", 0x144: "CALL", 0x145: "BSSY",
    0x147: "BRA",
    0x148: "WARPSYNC", 0x149: "BRX", 0x14d: "EXIT", 0x150: "RET", 0x181: "LDG", 0x182: "LDC",
    0x183: "LDL", 0x184: "LDS", 0x186: "STG", 0x187: "STL", 0x188: "STS", 0x189: "SHFL",
    0x1ae: "LDGSTS", 0x1af: "LDGDEPBAR",
}
BRANCH, MATRIX, PADDING = "BRA", "HMMA", "NOP"
CALL = "CALL"  # of a function, or out of a loop, without coming back
ENDS = ("EXIT", "RET", "BRX")
ALWAYS = 7     # as a predicate
NOTHING = 255  # as a register: reads zero
RARE = 16      # instructions that a rare part has at least
MOST_PASSES = 1 << 16

# What a comparison says of a counter and a constant.
COMPARE = {1: int.__lt__, 2: int.__eq__, 3: int.__le__, 4: int.__gt__, 5: int.__ne__, 6: int.__ge__}


class Instruction(collections.namedtuple("Instruction", "name target low high")):
    """One instruction; `target`: index of a branch's target, or None."""

    @property
    def guard(self):
        """Predicate under which it is done, and whether that is negated."""
        return self.low >> 12 & 7, bool(self.low >> 15 & 1)

    @property
    def operands(self):
        """Registers: what is written, then what is read in the places a, b and c."""
        return self.low >> 16 & 255, self.low >> 24 & 255, self.low >> 32 & 255, self.high & 255

    @property
    def constant(self):
        """The immediate, where the instruction has one, as a signed number; else None."""
        return signed(self.low >> 32, 32) if self.low >> 9 & 7 == 4 else None

    @property
    def control(self):
        """What the compiler tells the scheduler: cycles before the next instruction of the warp,
        barriers that are set when results and operands are done with (7: none), and a mask of
        those that are waited for."""
        high = self.high
        return high >> 41 & 15, high >> 46 & 7, high >> 49 & 7, high >> 52 & 63


# ---- Cubins ----

def sections(data):
    """Section headers of a 64-bit ELF file, and a function that reads their names."""
    if len(data) < 64 or data[:4] != b"\x7fELF":
        raise ValueError("not an ELF file; make it with nvcc -cubin")
    table, = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]

    def text(section, at):
        start = headers[section][4] + at
        return data[start:data.index(b"\0", start)].decode()
    return headers, names, text


def kernels(data):
    """Yields name and code of every kernel of a cubin."""
    headers, names, text = sections(data)
    for header in headers:
        name = text(names, header[0])
        if name.startswith(".text."):
            yield name[6:], data[header[4]:header[4] + header[5]]


def registers(data):
    """Registers a thread, by kernel: attribute 0x2f of section .nv.info, by symbol number."""
    headers, names, text = sections(data)
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
    """The instructions of a kernel."""
    words = [struct.unpack_from("<QQ", code, at) for at in range(0, len(code), 16)]
    # The distance counts in fours from bit 34. Since 9.0 its low byte stands apart, which the
    # branch to itself that ends every kernel tells.
    apart = any(low == 0xfffffffc00fc7947 for low, _ in words)
    found = []
    for i, (low, high) in enumerate(words):
        name, target = NAMES.get(low & 0x1ff, f"0x{low & 0xfff:03x}"), None
        if name in (BRANCH, CALL):
            fours = signed(low >> 34, 30)
            bytes_ = 4 * (fours * 256 + (low >> 16 & 0xff) if apart else fours)
            target = i + 1 + bytes_ // 16
            if bytes_ % 16 or not 0 <= target <= len(words):
                raise ValueError(f"branch {low:#x} of instruction {i} leads nowhere")
        found.append(Instruction(name, target, low, high))
    return found


# ---- Ways through the code ----

def next_of(code, i):
    """Indices of the instructions that may come after instruction i."""
    at = code[i]
    always = at.guard == (ALWAYS, False)
    if at.name == BRANCH:  # with a second predicate; bits 32 and 33: where the warp is uniform, or
        always = always and at.high >> 23 & 15 == ALWAYS and at.low >> 32 & 3 == 0  # diverges
        return [at.target] if always else [i + 1, at.target]
    if at.name == CALL:
        return [i + 1, at.target]
    return [] if at.name in ENDS and always else [i + 1]


def blocks_of(code):
    """{first index: (end, indices of the first instructions that follow)}, what can be reached."""
    starts = {0} | {i.target for i in code if i.target is not None}
    starts |= {i + 1 for i, at in enumerate(code) if at.name in (BRANCH, CALL, *ENDS)}
    blocks, todo = {}, [0]
    while todo:
        first = todo.pop()
        if first in blocks or first >= len(code):
            continue
        last = first
        while last + 1 < len(code) and last + 1 not in starts:
            last += 1
        blocks[first] = last + 1, [n for n in next_of(code, last) if n < len(code)]
        todo += blocks[first][1]
    return blocks


def order_of(blocks):
    """Blocks so that, loops aside, each comes before those that follow it."""
    found, seen, stack = [], {0}, [(0, iter(blocks[0][1]))]
    while stack:
        block, rest = stack[-1]
        step = next((n for n in rest if n not in seen), None)
        if step is None:
            found.append(block)
            stack.pop()
        else:
            seen.add(step)
            stack.append((step, iter(blocks[step][1])))
    return found[::-1]


def dominators(blocks):
    """{block: the block that every way to it passes last}."""
    order = order_of(blocks)
    number = {block: i for i, block in enumerate(order)}
    before = collections.defaultdict(list)
    for block in order:
        for n in blocks[block][1]:
            before[n].append(block)
    above, changed = {0: 0}, True
    while changed:
        changed = False
        for block in order[1:]:
            ways = [b for b in before[block] if b in above]
            one = ways[0]
            for other in ways[1:]:
                while one != other:
                    if number[one] > number[other]:
                        one = above[one]
                    else:
                        other = above[other]
            changed |= above.get(block) != one
            above[block] = one
    return above


class Loop:
    """What begins with block `first`; `branches`: those back; `inner`: loops in it."""

    def __init__(self, first):
        self.first, self.blocks, self.branches, self.inner = first, {first}, [], []

    def near(self):
        """Its blocks without those behind its last branch back, where compilers put stubs for
        warps whose lanes have parted."""
        return [b for b in sorted(self.blocks) if b <= max(self.branches)]

    def indices(self, blocks):
        """Its instructions, without such stubs."""
        return [i for b in self.near() for i in range(b, blocks[b][0])]


def loops_of(blocks):
    """All loops, each behind those that it lies in."""
    above, found = dominators(blocks), {}
    before = collections.defaultdict(list)
    for block, (_, follow) in blocks.items():
        for n in follow:
            before[n].append(block)

    def dominates(a, b):
        while b > 0 and b != a:
            b = above[b]
        return a == b

    for block, (end, follow) in blocks.items():
        for first in follow:
            if not dominates(first, block):
                continue
            loop = found.setdefault(first, Loop(first))
            loop.branches.append(end - 1)
            todo = [block]
            while todo:
                one = todo.pop()
                if one not in loop.blocks:
                    loop.blocks.add(one)
                    todo += before[one]
    loops = sorted(found.values(), key=lambda loop: -len(loop.blocks))
    for i, loop in enumerate(loops):
        around = [o for o in loops[:i] if loop.first in o.blocks]
        if around:
            min(around, key=lambda o: len(o.blocks)).inner.append(loop)
    for loop in loops:
        loop.inner.sort(key=lambda o: o.first)
    return loops


# ---- Passes ----

def copied(at):
    """The register that the instruction copies, or None."""
    if at.name == "MOV" and at.constant is None:
        return at.operands[2]
    if at.name == "IMAD" and at.operands[1] == NOTHING and at.constant is None:
        return at.operands[3] if at.low >> 9 & 7 == 1 else None
    return None


def step_of(at):
    """(register, what is added to it) if the instruction adds a constant; None else."""
    one, constant, other = at.operands[1], at.constant, at.operands[3]
    if at.name == "VIADD" and constant is not None:
        return one, constant
    if at.name == "IADD3" and constant is not None and other == NOTHING:
        return one, constant
    source = copied(at)
    return None if source is None else (source, 0)


def traced(code, indices, register, before):
    """Follows a register back through one pass: (register as it came into the pass, what was added
    since), or None. `before`: number, among `indices`, of the instruction that reads it."""
    added = 0
    for n in range(before - 1, -1, -1):
        at = code[indices[n]]
        if at.operands[0] != register or at.name in ("STS", "STG", "STL", "BRA", "ISETP", "FSETP"):
            continue
        step = step_of(at)
        if step is None or at.guard != (ALWAYS, False):
            return None
        register, added = step[0], added + step[1]
    return register, added


def start_of(code, loop, register):
    """The constant that the register has before the loop, whatever way leads there, or None."""
    first = loop.first
    entered = {at.target for i, at in enumerate(code)
               if at.target is not None and i not in loop.branches}
    for i in range(first - 1, max(0, first - 64) - 1, -1):
        at = code[i]
        if i + 1 in entered:  # not through what stands above
            return None
        if at.name == BRANCH and at.target is not None and at.guard == (ALWAYS, False):
            return None
        pair = at.name == "CS2R" and at.operands[0] + 1 == register
        if at.operands[0] != register and not pair:
            continue
        if at.guard != (ALWAYS, False):
            return None
        if at.name == "CS2R":
            return 0
        if at.name == "MOV" and at.constant is not None:
            return at.constant
        if at.name == "IMAD" and at.operands[1] == NOTHING and at.low >> 9 & 7 == 2:
            return signed(at.low >> 32, 32)
        return 0 if copied(at) == NOTHING else None
    return None


def passes_from(start, added, step, limit, holds, stays):
    """How often a loop is gone through whose counter begins with `start`."""
    for n in range(MOST_PASSES):
        if holds(start + n * step + added, limit) != stays:
            return n + 1
    return None


def decided(code, loop, indices):
    """Where a loop's passes are decided: (number among `indices`, whether its predicate must hold
    for one more), or None. It is the branch back, or, if that has no condition, the last one out of
    the loop before it."""
    at = indices.index(loop.branches[0])
    predicate, negated = code[indices[at]].guard
    if predicate != ALWAYS:
        return at, not negated
    for n in range(at - 1, -1, -1):
        out = code[indices[n]]
        if out.target is not None and out.guard[0] != ALWAYS and out.target not in loop.blocks:
            return n, out.guard[1]
    return None


def passes_of(code, blocks, loop):
    """How often the loop is gone through, or None if the code does not say."""
    if len(loop.branches) != 1 or loop.inner:
        return None
    indices = loop.indices(blocks)
    found = decided(code, loop, indices)
    if found is None:
        return None
    at, stays = found
    predicate = code[indices[at]].guard[0]
    for n in range(at - 1, -1, -1):
        test = code[indices[n]]
        if test.name.endswith("SETP") and predicate in (test.high >> 17 & 7, test.high >> 20 & 7):
            break
    else:
        return None
    holds, limit = COMPARE.get(test.high >> 12 & 7), test.constant
    if test.low >> 9 & 7 == 1 and test.operands[2] == NOTHING:
        limit = 0
    plain = test.name == "ISETP" and limit is not None and test.guard == (ALWAYS, False)
    if not plain or holds is None or predicate != test.high >> 17 & 7:
        return None
    counter = traced(code, indices, test.operands[1], n)
    whole = counter and traced(code, indices, counter[0], len(indices))
    if not whole or whole[0] != counter[0] or whole[1] <= 0:
        return None
    start, step = start_of(code, loop, counter[0]), whole[1]
    starts = [start] if start is not None else [0, step - 1] if step > 1 else []
    passes = {passes_from(s, counter[1], step, limit, holds, stays) for s in starts}
    return passes.pop() if len(passes) == 1 else None


# ---- Counting ----

class Kernel:
    """A kernel's code with its loops; `by`: the opcode that tells the main loop."""

    def __init__(self, code, by=MATRIX):
        self.code, self.blocks = code, blocks_of(code)
        self.loops = loops_of(self.blocks)
        self.main = self.find_main(by)

    def has(self, loop, name):
        return sum(self.code[i].name == name for i in loop.indices(self.blocks))

    def find_main(self, by):
        """Of the loops with matrix instructions and none with such in them, or if there are none,
        of all, the one with the most instructions `by`; None without loops."""
        def innermost(name):
            having = [o for o in self.loops if self.has(o, name)]
            return [o for o in having if not any(p is not o and p.first in o.blocks and
                                                 p.blocks < o.blocks for p in having)]
        some = innermost(MATRIX) or innermost(by)
        return max(some, default=None,
                   key=lambda o: (self.has(o, by), len(o.indices(self.blocks))))

    def inside(self, loop=None):
        """The loops in a loop, at any depth, in the order of the code."""
        loop = loop or self.main
        found = []
        for o in loop.inner if loop else []:
            found += [o, *self.inside(o)]
        return found

    def passes(self, given=None):
        """{loop: passes or None} of the loops in the main one. `given`: {number from 1: passes}."""
        return {o: (given or {}).get(n, passes_of(self.code, self.blocks, o))
                for n, o in enumerate(self.inside(), 1)}

    def longest(self, passes, most=MOST_PASSES, loop=None):
        """Opcodes of one pass of a loop on the way that has the most instructions, without loops of
        more than `most` passes; None if there is no such way. Raises if passes are not known."""
        loop = loop or self.main
        owner = {b: o for o in loop.inner for b in o.blocks}

        def own(node):
            if not isinstance(node, Loop):
                end = self.blocks[node][0]
                return collections.Counter(i.name for i in self.code[node:end]
                                           if i.name != PADDING)
            if passes[node] is None:
                raise ValueError(f"nobody knows how many passes the loop at {node.first} has")
            one = self.longest(passes, most, node) if passes[node] <= most else None
            return one and collections.Counter({k: v * passes[node] for k, v in one.items()})

        best = {}
        for node, follow in self.backwards(loop, owner):
            ways = [best[n] for n in follow if best[n] is not None]
            mine = own(node)
            if mine is None or (follow and not ways):
                best[node] = None
            else:
                best[node] = mine + max(ways, key=collections.Counter.total,
                                        default=collections.Counter())
        return best[loop.first]

    def backwards(self, loop, owner):
        """Blocks of a loop, and loops in it as a whole, each behind all that follow it."""
        near = set(loop.near())

        def follow_of(node):
            inner = node.blocks if isinstance(node, Loop) else {node}
            follow = {n for b in inner for n in self.blocks[b][1]
                      if n in near and n != loop.first and n not in inner}
            return sorted((owner.get(n, n) for n in follow), key=lambda n: getattr(n, "first", n))

        seen, stack = {loop.first}, [(loop.first, follow_of(loop.first), 0)]
        while stack:
            node, follow, at = stack.pop()
            if at == len(follow):
                yield node, follow
                continue
            stack.append((node, follow, at + 1))
            if follow[at] not in seen:
                seen.add(follow[at])
                stack.append((follow[at], follow_of(follow[at]), 0))

    def rare_parts(self):
        """Stretches of the main loop, as ranges, that a forward branch skips and that have no
        matrix instruction; no overlaps."""
        indices = self.main.indices(self.blocks) if self.main else range(len(self.code))
        first, last = min(indices), max(indices)
        parts, free = [], first
        for i in indices:
            target = self.code[i].target
            if i < free or target is None or not i < target <= last:
                continue
            if target - i - 1 >= RARE and all(at.name != MATRIX for at in self.code[i + 1:target]):
                parts.append(range(i + 1, target))
                free = target
        return parts

    def common(self):
        """Indices of the main loop without its rare parts."""
        rare = {i for part in self.rare_parts() for i in part}
        indices = self.main.indices(self.blocks) if self.main else range(len(self.code))
        return [i for i in indices if i not in rare]

    def names(self, indices):
        return collections.Counter(self.code[i].name for i in indices
                                   if self.code[i].name != PADDING)
