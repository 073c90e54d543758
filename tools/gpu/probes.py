# SPDX-License-Identifier: Apache-2.0
"""What the device gives at best: the floor that attention is held against, and what else the
kernels' design takes for granted."""
import rig as rigs

RECORDS = (12288, 12800)  # bytes; one of oscar2 at head_dim 128 has 12,544
LAUNCHES = 200


def read_rate(lab, record_bytes):
    """GB/s of blocks that read records into shared memory and do nothing else."""
    total = (8 << 30) if lab.timed else (1 << 20)
    n = total // record_bytes
    memory = lab.rig.take(n * record_bytes)
    try:
        us = min(lab.time([lambda: lab.rig.probe_read(memory, record_bytes, n, lab.now())], 10))
    finally:
        lab.rig.give(memory)
    return n * record_bytes / us / 1e3


def operations_a_second(lab, probe):
    rounds = 20000 if lab.timed else 2
    done = [0.0]

    def call():
        done[0] = lab.rig.probe_rate(probe, rounds, lab.now())
    us = min(lab.time([call], 10))
    return done[0] / us / 1e6  # in 10^12


def probes(lab, rows):
    off = rows.measure(["subnormal_error"], lab.rig.probe_subnormals)
    rows.measure(["read_gb_per_s"], lambda: max(read_rate(lab, r) for r in RECORDS))
    rows.measure(["mma_tflops"], lambda: operations_a_second(lab, rigs.MMA))
    rows.measure(["logic_tops"], lambda: operations_a_second(lab, rigs.LOGIC))
    rows.measure(["launch_us"], lambda: min(lab.time(
        [lambda: lab.rig.probe_rate(rigs.NOTHING, 0, lab.now())] * LAUNCHES, 10)))
    rows.measure(["multiprocessors"], lab.rig.multiprocessors)
    if off > 1e-6:
        rows.measure(["wrong"], lambda: f"products of subnormals are {off:.1e} off: unpacking "
                     "rests on them")
