# SPDX-License-Identifier: Apache-2.0
"""Cycles that warps take over a stretch of machine code, one warp or some on one scheduler.

The compiler writes into each instruction how many cycles the warp waits before its next one, and
which barriers it waits for; results that take as long as they take set those. So a walk over the
code gives the cycles of a warp, and a walk of several warps by turns what they take from each
other: the scheduler, which starts one instruction a cycle, and the units behind it.

Nothing of this was measured by us: times of units are what others have published of Hopper,
rounded. Memory behind shared memory is never waited for here (cost.py adds it), nor are
instructions.
"""
import collections

import sass

# Units that a warp's instruction takes up for longer than a cycle, of one scheduler's share.
LOGIC = {"LOP3", "SHF", "PRMT", "FMNMX", "ISETP", "FSETP", "IADD3", "LEA", "SEL", "FSEL", "VIADD",
         "PLOP3", "F2FP", "VIMNMX", "IMNMX"}
INTEGER = {"IMAD", "IMAD.WIDE"}
SHARED = {"LDS", "STS", "LDGSTS", "LDSM", "SHFL"}
HALF_RATE, FUNCTION_CYCLES, MOVE_CYCLES = 2, 8, 4
MATRIX_CYCLES = 6.4  # 16 x 8 x 16 by mma.sync: 62% of the rate of wgmma, which takes 4
SCHEDULERS = 4       # that have one path to shared memory together
WIDTHS = {5: 2, 6: 4}  # cycles of that path for accesses of 64 and 128 bits a lane

# Cycles from the start of an instruction, or its end on the path to shared memory, to its result.
LATENCY = {"HMMA": 33, "LDS": 30, "LDSM": 33, "SHFL": 25, "MUFU": 22, "MOVM": 12, "LDG": 600}
OTHER_LATENCY, OPERANDS_READ = 20, 10
MATRIX_REGISTERS = (4, 4, 2, 4)  # of result, a, b and c
# Warps would fall into step, in ways that are up to a tenth faster or slower than others. So each
# waits for up to so many cycles before each turn, as it does for memory, by numbers that seem to be
# random and are always the same.
UNSTEADY, TURNS = 256, 80

Step = collections.namedtuple("Step", "wait sets frees barriers unit cycles latency reads writes")


def unit_of(at):
    """(unit that the instruction takes up, for how many cycles)."""
    if at.name == sass.MATRIX:
        return "matrix", MATRIX_CYCLES
    if at.name in LOGIC:
        return "logic", HALF_RATE
    if at.name in INTEGER:
        return "integer", HALF_RATE
    if at.name == "MUFU":
        return "function", FUNCTION_CYCLES
    if at.name == "MOVM":
        return "move", MOVE_CYCLES
    if at.name in SHARED:
        wide = 1 if at.name == "SHFL" else WIDTHS.get(at.high >> 9 & 7, 1)
        return "shared", SCHEDULERS * wide
    return None, 0


def step_of(at):
    """What a walk needs to know of an instruction."""
    wait, sets, frees, barriers = at.control
    unit, cycles = unit_of(at)
    reads, writes = {r for r in at.operands[1:] if r != sass.NOTHING}, set()
    if at.name == sass.MATRIX:
        spans = [{r + k for k in range(n)} if r != sass.NOTHING else set()
                 for r, n in zip(at.operands, MATRIX_REGISTERS)]
        writes, reads = spans[0], set().union(*spans[1:])
    return Step(max(1, wait), sets, frees, [b for b in range(6) if barriers >> b & 1], unit, cycles,
                LATENCY.get(at.name, OTHER_LATENCY), reads, writes)


class Warp:
    """One warp: where it is, when its next instruction has what it needs, when its barriers open
    and when the registers are there that matrix instructions write."""

    def __init__(self, steps, start):
        self.steps, self.at, self.ready = steps, 0, start
        self.barriers, self.registers = [0] * 6, {}

    @property
    def unit(self):
        return self.steps[self.at].unit

    def issue(self, now, units):
        step = self.steps[self.at]
        if step.unit:
            units[step.unit] = now + step.cycles
        begun = now + step.cycles if step.unit == "shared" else now
        if step.sets < 6:
            self.barriers[step.sets] = max(self.barriers[step.sets], begun + step.latency)
        if step.frees < 6:
            self.barriers[step.frees] = max(self.barriers[step.frees], begun + OPERANDS_READ)
        for register in step.writes:
            self.registers[register] = now + step.latency
        self.at += 1
        if self.at == len(self.steps):
            self.at = 0
        after = self.steps[self.at]
        self.ready = max([now + step.wait, *(self.barriers[b] for b in after.barriers),
                          *(self.registers.get(r, 0) for r in after.reads)])


def walk(steps, warps, turns):
    """Cycles that each of some warps takes for a turn, of `turns` each. The one that went last goes
    on if it can, else, of those that can, the one that went last before it."""
    units = dict.fromkeys(("matrix", "logic", "integer", "function", "move", "shared", None), 0)
    going = collections.deque(Warp(steps, w * len(steps)) for w in range(warps))
    now, begun, all_, number = 0, 0, turns * warps * len(steps), 1
    for done in range(all_):
        if done == all_ // turns:
            begun = now
        now, turn = min((max(now, w.ready, units[w.unit]), i) for i, w in enumerate(going))
        one = going[turn]
        one.issue(now, units)
        if one.at == 0 and warps > 1:
            number = (number * 1103515245 + 12345) % (1 << 31)
            one.ready += (number >> 8) % UNSTEADY
        del going[turn]
        going.appendleft(one)
        now += 1
    return (now - begun) / (turns - 1)


def cycles(code, warps, latency=None):
    """Cycles that each of `warps` warps on a scheduler takes for one turn of `code`. `latency`:
    others for some results."""
    steps = [step_of(at) for at in code]
    if latency:
        steps = [s._replace(latency=latency.get(at.name, s.latency)) for s, at in zip(steps, code)]
    return walk(steps, warps, TURNS if warps > 1 else 8)
