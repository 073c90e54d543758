#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random misuse of the Python package: wrong shapes, dtypes, strides and numbers, closed objects,
buffers closed too early, several threads on one queue.

    tests/e2e/python_misuse.py [--cases N] [--seed S] [--minutes M]

A case is a call with arguments drawn from its seed. What is wrong about them is known: such a call
must raise an error of the package's kinds, and one with nothing wrong gives the same bits as plain
arrays do. Whatever happens, memory around outputs stays as it was, and so does what is committed.
Cases run in child processes, so that a crash is found and has a seed. With AddressSanitizer:
KVQ_BIN_DIR names a build with it, KVQ_CHILD_LIBRARY its libkvq and KVQ_PRELOAD the runtime, which
are for the children alone; KVQ_LIBRARY stays a libkvq without.
"""
import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time

import e2e_rig
from e2e_rig import kvq, np

CHUNK = 100  # cases of one process
Q_HEADS, KV_HEADS, DIM, LAYERS, PAST = 4, 2, 64, 2, 150
GUARD = 0x7a7a7a7a
ROWS = [kvq.Layer(Q_HEADS, KV_HEADS, DIM, repeat=LAYERS)]
ODD = [-1, 0, 1, 2, 3, 7, 255, 2**16 - 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**63, 2**64 - 1,
       2**64, -2**63, 1.5, float("nan"), float("inf"), None, "1", "", b"x", [], [1, 2], (), True,
       object(), np.zeros(3), np.array(5), np.float32(2)]
ERRORS = (kvq.Error, TypeError, ValueError, RuntimeError, BufferError, MemoryError)


class Wrong(AssertionError):
    """A finding."""


class Bench:
    """A client with a queue, two sessions with tokens, and what they must have."""

    def __init__(self, directory):
        self.directory = directory
        self.client = kvq.Client(directory)
        self.queue = self.client.queue()
        random = np.random.default_rng(5)
        self.k, self.v = (random.standard_normal((PAST, KV_HEADS, DIM), np.float32)
                          for _ in "kv")
        self.sessions = [self.client.session(ROWS, f) for f in ("oscar2", "f16")]
        for session in self.sessions:
            with self.queue.step([session], PAST) as step:
                for layer in range(LAYERS):
                    step.append(layer, self.k, self.v)
        self.counts = [PAST, PAST]

    def check(self):
        for session, tokens in zip(self.sessions, self.counts):
            if session.refresh() != tokens:
                raise Wrong(f"a session has {session.tokens} tokens, {tokens} were committed")

    def close(self):
        self.client.close()


# ---- Arrays that are as they should be, and that are not ----

class Arrays:
    """Draws arrays, and remembers whether one of them cannot be right."""

    def __init__(self, bench, random):
        self.bench, self.random, self.wrong, self.guards, self.buffers = bench, random, [], [], []

    def pick(self, *choices):
        return choices[self.random.integers(len(choices))]

    def buffer(self, nbytes):
        self.buffers.append(self.bench.client.buffer(nbytes))
        return self.buffers[-1]

    def close(self):
        for buffer in self.buffers:
            buffer.close()

    def values(self, shape, dtype):
        made = self.random.standard_normal(shape)
        return made.astype(dtype) if np.dtype(dtype).kind == "f" else made.astype(np.int64).astype(
            dtype)

    def shape(self, name, right):
        """The right shape, or another one."""
        if self.random.random() < 0.75:
            return right
        at, other = self.random.integers(len(right)), list(right)
        what = self.pick("size", "swap", "drop", "add", "transpose")
        if what == "size":
            other[at] = int(self.pick(0, 1, other[at] - 1, other[at] + 1, 2 * other[at]))
        elif what == "swap":
            other[0], other[1] = other[1], other[0]
        elif what == "drop":
            del other[at]
        elif what == "add":
            other.insert(at, 1)
        else:
            other = other[::-1]
        if tuple(other) != right:
            self.wrong.append(f"{name}: shape {tuple(other)} for {right}")
        return tuple(other)

    def dtype(self, name):
        if self.random.random() < 0.85:
            return np.dtype(self.pick(np.float32, np.float16))
        dtype = np.dtype(self.pick("f8", "i4", "u1", ">f4", ">f2", "i2", "c8", "?", "u8"))
        self.wrong.append(f"{name}: dtype {dtype}")
        return dtype

    def array(self, name, right, written=False):
        """An array, in a buffer or not, with strides of some kind."""
        shape, dtype = self.shape(name, right), self.dtype(name)
        if self.random.random() < 0.03:
            self.wrong.append(f"{name}: no array")
            return self.pick([1, 2], "array", 5, object())
        size = int(np.prod(shape, dtype=np.int64))
        inside = self.random.random() < 0.5
        pad = 1024
        # Guards on both sides, and between rows where the strides leave room.
        raw = (self.buffer(4 * (size * dtype.itemsize + 2 * pad)).array(
            size * dtype.itemsize + 2 * pad, np.uint32) if inside else
            np.empty(size * dtype.itemsize + 2 * pad, np.uint32))
        raw[:] = GUARD
        flat = raw.view(np.uint8)[4 * pad:].view(dtype.newbyteorder("="))
        made = self.stride(name, flat, shape, dtype, written, inside)
        own = np.zeros(raw.shape, bool)
        if written and isinstance(made, np.ndarray) and made.size:
            start = made.__array_interface__["data"][0] - raw.__array_interface__["data"][0]
            at = sum(abs(s) * np.arange(n).reshape([-1 if i == d else 1 for i in range(made.ndim)])
                     for d, (s, n) in enumerate(zip(made.strides, made.shape)))
            low = start + sum((n - 1) * s for n, s in zip(made.shape, made.strides) if s < 0)
            touched = (low + np.asarray(at)).ravel()
            for byte in range(made.itemsize):
                own[(touched + byte) // 4] = True
        elif made.size:
            if made.flags.writeable and not written:
                np.copyto(made, self.values(made.shape, dtype))
        self.guards.append((name, raw, raw.copy(), own if written else np.zeros(raw.shape, bool)))
        if written and self.random.random() < 0.05:
            made.flags.writeable = False
            self.wrong.append(f"{name}: read-only")
        return made

    def stride(self, name, flat, shape, dtype, written, inside):
        size = int(np.prod(shape, dtype=np.int64))
        whole = flat[:size].view(dtype).reshape(shape)
        what = self.random.random()
        if what < 0.6 or whole.ndim != 3 or size == 0:
            return whole
        if what < 0.7:  # rows twice as far apart
            return flat[:2 * size].view(dtype).reshape(shape[0], 2 * shape[1], shape[2])[:, ::2]
        if what < 0.8:  # [heads][tokens][dim] in memory, [tokens][heads][dim] as it is given
            return whole.reshape(shape[1], shape[0], shape[2]).transpose(1, 0, 2)
        if what < 0.86:
            if inside and shape[0] > 1:
                self.wrong.append(f"{name}: negative strides in a buffer")
            return whole[::-1]
        if what < 0.92:  # values that lie apart
            if inside and shape[2] > 1:
                self.wrong.append(f"{name}: the last dimension is not contiguous")
            return flat[:2 * size].view(dtype).reshape(shape[0], shape[1], 2 * shape[2])[:, :, ::2]
        step = int(self.pick(0, 1, shape[2] - 1)) * dtype.itemsize
        folded = np.lib.stride_tricks.as_strided(
            whole, shape, (step, shape[2] * dtype.itemsize, dtype.itemsize))
        if shape[0] > 1 and (written or inside):
            self.wrong.append(f"{name}: rows on one another")
        return folded

    def check_guards(self, returned):
        for name, raw, before, own in self.guards:
            changed = (raw != before) & ~own
            if changed.any():
                raise Wrong(f"{int(changed.sum())} words around {name} were overwritten")
            if not returned and self.wrong and (raw != before).any():
                raise Wrong(f"a call that was refused wrote to {name}")


# ---- Cases ----

def refused(arrays, call, *arguments, **options):
    """Whether the call raised. It must if something is wrong."""
    try:
        result = call(*arguments, **options)
    except ERRORS as error:
        if not str(error):
            raise Wrong(f"{error!r} says nothing") from error
        arrays.check_guards(False)
        return True, None
    if arrays.wrong:
        raise Wrong(f"taken, though wrong: {'; '.join(arrays.wrong)}")
    arrays.check_guards(True)
    return False, result


def case_attend(bench, random):
    arrays = Arrays(bench, random)
    n, session = int(random.integers(1, 9)), bench.sessions[random.integers(2)]
    q = arrays.array("q", (n, Q_HEADS, DIM))
    out = arrays.array("out", (n, Q_HEADS, DIM), True) if random.random() < 0.7 else None
    if random.random() < 0.05:
        out = q
        arrays.wrong.append("out is q")
    layer = int(random.integers(LAYERS))
    failed, result = refused(arrays, bench.queue.attend, [session], layer, q, n, out=out)
    if not failed:
        want, lse = bench.queue.attend([session], layer, np.array(q), n,
                                       out_dtype=result[0].dtype)
        if want.tobytes() != result[0].tobytes() or lse.tobytes() != result[1].tobytes():
            raise Wrong(f"attention over {q.dtype} {q.shape} {q.strides} differs from plain arrays")
    arrays.close()


def case_step(bench, random):
    arrays = Arrays(bench, random)
    n, at = int(random.integers(1, 9)), random.integers(2)
    session = bench.sessions[at]
    step = bench.queue.step([session], n)
    k, v = (arrays.array(x, (n, KV_HEADS, DIM)) for x in "kv")
    q, out = arrays.array("q", (n, Q_HEADS, DIM)), None
    if random.random() < 0.5:
        out = arrays.array("out", (n, Q_HEADS, DIM), True)
        if random.random() < 0.05:
            out = q
            arrays.wrong.append("out is q")
    failed, _ = refused(arrays, step.append_attend, 0, k, v, q, out=out)
    if failed or random.random() < 0.5:
        step.abort()
    else:
        step.append(1, k, v)
        step.end()
        bench.counts[at] += n
        for array, stored in zip((k, v), bench.queue.read(session, 1, session.tokens - n)):
            if session is bench.sessions[1] and not np.array_equal(
                    np.float32(array.astype(np.float16)), stored):
                raise Wrong(f"stored is not what was given: {array.dtype} {array.strides}")
    arrays.close()


def case_local(bench, random):
    arrays = Arrays(bench, random)
    n, at = int(random.integers(1, 5)), random.integers(2)
    session = bench.sessions[at]
    with bench.queue.local(max_tokens=1 << 16) as local:
        local.add(session)
        step = local.step([session], n)
        k, v = (arrays.array(x, (n, KV_HEADS, DIM)) for x in "kv")
        for name, x in (("k", k), ("v", v)):
            if isinstance(x, np.ndarray) and bench.client.find_buffer(x) is None:
                arrays.wrong.append(f"{name} lies in no buffer")
        q = arrays.array("q", (n, Q_HEADS, DIM))
        out = arrays.array("out", (n, Q_HEADS, DIM), True) if random.random() < 0.5 else None
        known = random.random() < 0.7 and known_request(bench, random, step, n, out is not None)
        failed, result = refused(arrays, step.attend, 0, q, k=k, v=v, out=out)
        if not failed:
            check_again(local, step, result, q, k, v, out)
        broken = arrays.pick("", "", "buffer", "local", "queue")
        if broken == "buffer" and not failed:
            arrays.buffers.pop(0).close()
        elif broken == "local":
            local.close()
        elif broken == "queue":
            bench.queue.close()
            bench.queue = bench.client.queue()
        if broken and not (failed and broken == "buffer"):
            expect(lambda: step.attend(1, q, k=k, v=v))
            expect(step.end)
            step.abort()
        elif failed or known:  # K and V were given twice, else
            step.abort()
        else:
            step.attend(1, q, k=k, v=v)
            step.end()
            bench.counts[at] += n
    arrays.close()
    if known:
        known.close()


def known_request(bench, random, step, n, has_out):
    """A call with nothing wrong, which the Local knows then, so that one that is alike is checked
    by layouts alone. Returns the buffer that it used."""
    kind = np.dtype((np.float32, np.float16)[random.integers(2)])
    size = kind.itemsize * n * DIM
    buffer = bench.client.buffer(size * (2 * KV_HEADS + 2 * Q_HEADS))
    k, v, q, out = (buffer.array((n, heads, DIM), kind, size * at)
                    for heads, at in ((KV_HEADS, 0), (KV_HEADS, KV_HEADS), (Q_HEADS, 2 * KV_HEADS),
                                      (Q_HEADS, 2 * KV_HEADS + Q_HEADS)))
    if random.random() < 0.5:
        q, out = q.copy(), out.copy()
    step.attend(0, q, k=k, v=v, out=out if has_out else None)
    return buffer


def check_again(local, step, result, q, k, v, out):
    """The same call gives the same bits, known or checked from the beginning."""
    want = [np.array(x) for x in result]
    for forget in (False, True):
        if forget:
            local._prepared.clear()
        got = step.attend(0, q, k=k, v=v, out=out)
        if any(a.tobytes() != np.asarray(b).tobytes() for a, b in zip(want, got)):
            raise Wrong(f"the same call gave other bits, {forget=}")


def expect(call):
    """It must raise."""
    try:
        call()
    except ERRORS:
        return
    raise Wrong("a call that cannot be went well")


def case_numbers(bench, random):
    """Odd values wherever a number or a name belongs. Whether each is wrong is not known here: what
    counts is that nothing breaks, and nothing is committed that was not asked for."""
    def odd():
        return ODD[random.integers(len(ODD))]
    session, queue = bench.sessions[random.integers(2)], bench.queue
    q = np.zeros((1, Q_HEADS, DIM), np.float32)
    rows = {name: odd() for name in ("q_heads", "kv_heads", "head_dim", "v_dim", "window",
                                     "softcap", "scale", "format", "kv_from", "repeat")
            if random.random() < 0.2}
    options = {name: odd() for name in ("name", "ns", "model", "dtype", "v_rotation", "attention",
                                        "on_detach", "shard", "shards", "max_rollback",
                                        "prompt_tokens", "keep_seconds", "place", "salt", "adapter",
                                        "prefix", "spans", "read_only") if random.random() < 0.15}

    def begin():
        queue.step([session], odd(), ids=odd() if random.random() < 0.3 else None).abort()

    def opened():
        row = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, **rows}
        bench.client.session([kvq.Layer(**row)], "f16", **options).close()
    calls = [begin, opened, lambda: queue.attend([session], odd(), q, odd()),
             lambda: queue.attend([session], 0, q, 1, timeout=odd(), dtype=odd()),
             lambda: [s.close() for s in queue.fork([session], odd())],
             lambda: queue.read(session, odd(), odd(), int(random.integers(40))),
             lambda: bench.client.buffer(int(random.integers(1, 1 << 20)) if random.random() < 0.5
                                         else -1).close(),
             lambda: queue.submit(odd(), kvq.make_entries([session]), step=odd()).wait(10),
             lambda: queue.accept([session], odd(), [odd()]), lambda: session.tell_spans(odd()),
             lambda: bench.client.lookup(ROWS, "f16", prefix=odd()), lambda: queue.nop(odd()),
             lambda: queue.step([session, odd()], 1).abort(),
             lambda: queue.step_whole([session], odd(), odd(), odd()),
             lambda: kvq.Client(odd(), timeout_ms=odd()).close()]
    try:
        calls[random.integers(len(calls))]()
    except (*ERRORS, FileNotFoundError):
        pass


def case_pages(bench, random):
    arrays = Arrays(bench, random)
    size, n = int(random.integers(1, 9)), int(random.integers(1, 20))
    need = -(-n // size)
    cache = [bench.client.array((need + 1, size, KV_HEADS, DIM)) for _ in "kv"]
    for x in cache:
        x[...] = random.standard_normal(x.shape)
    lists = random.permutation(need + 1)[:need].astype(np.int32)
    what = arrays.pick("", "", "short", "high", "low", "cache", "skip", "lists", "type")
    if what:
        arrays.wrong.append(what)
    pages = kvq.Pages(*cache, [lists])
    pages.lists = {"short": [lists[1:]], "high": [lists + need + 1], "low": [lists - need - 1],
                   "lists": [lists, lists], "type": [lists + 0.5]}.get(what, [lists])
    if what == "cache":
        pages.k = pages.k[:, :, :1]
    if what == "skip":
        pages.skip = [need * size]
    step = bench.queue.step([bench.sessions[0]], n)
    refused(arrays, step.append, 0, pages=pages)
    step.abort()
    for x in cache:
        bench.client.find_buffer(x).close()


def case_closed(bench, random):
    """Calls on what is closed."""
    client = kvq.Client(bench.directory)
    queue, session = client.queue(), client.session(ROWS, "f16")
    held = client.array((1, KV_HEADS, DIM))
    buffer = client.find_buffer(held)
    tensor, entries = buffer.tensor(held), kvq.make_entries([session], append=1)
    step, local = queue.step([session], 1), queue.local(max_tokens=1024)
    ticket = queue.submit("append", entries, step=step.number, layer=0, k=tensor, v=tensor)
    folder = tempfile.mkdtemp()
    capture = kvq.Capture(os.path.join(folder, "capture"), ROWS)
    q = np.zeros((1, Q_HEADS, DIM), np.float32)
    closers = [buffer.close, queue.close, client.close, session.close, local.close, capture.close,
               step.abort, ticket.wait]
    calls = {  # what each needs
        lambda: queue.attend([session], 0, q): (queue, session), ticket.wait: (queue,),
        lambda: step.append(0, held, held): (queue, step), step.end: (queue, step),
        lambda: queue.call("append", entries, step=1, layer=0, k=tensor, v=tensor): (buffer,),
        lambda: local.add(session): (local, session), lambda: local.step([session], 1): (local,),
        lambda: capture.append(ticket): (capture, buffer), session.info: (session, client),
        queue.order: (queue,), lambda: client.array((1, 2, 3)): (client,), client.info: (client,),
        lambda: capture.tokens: (capture,), lambda: buffer.array(3): (buffer,)}
    for i in random.permutation(len(closers))[:int(random.integers(1, 4))]:
        try:
            closers[i]()
        except ERRORS:
            pass
    for call, needs in calls.items():
        gone = any(not (x.handle if x is session else x.number if x is step else x.pointer)
                   for x in needs)
        try:
            call()
        except ERRORS:
            continue
        if gone:
            raise Wrong(f"{call} went well though what it needs is closed")
    for close in (local.close, queue.close, client.close, capture.close):
        close()
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


def case_threads(bench, random):
    """Several threads on one queue, one of which may close things. Each call works, or says that
    another thread is there, or that it is closed."""
    client = kvq.Client(bench.directory)
    queue, session = client.queue(), client.session(ROWS, "f16")
    strange, n = [], int(random.integers(2, 5))
    start = threading.Barrier(n)

    def work(number, closes):
        start.wait(60)
        q = np.zeros((1, Q_HEADS, DIM), np.float32)
        for i in range(20):
            try:
                if closes and i == closes:
                    (queue if closes % 2 else client).close()
                queue.attend([session], 0, q)
                session.info()
                client.array((2, 2, 2))
            except ERRORS:
                continue
            except BaseException as error:
                strange.append((number, error))
    closes = int(random.integers(0, 19))
    threads = [threading.Thread(target=work, args=(i, closes if i == 0 else 0)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    client.close()
    if strange:
        raise Wrong(f"threads: {strange[0]!r}")


CASES = [case_attend] * 6 + [case_step] * 6 + [case_local] * 3 + [case_numbers] * 6 + \
    [case_pages] * 2 + [case_closed] * 2 + [case_threads]


def child(directory, first, cases):
    bench, fds = None, None
    for seed in range(first, first + cases):
        random = np.random.default_rng(seed)
        case = CASES[random.integers(len(CASES))]
        print(seed, case.__name__, flush=True)
        if bench is None:
            bench = Bench(directory)
            fds = e2e_rig.own_fds()
        case(bench, random)
        bench.check()
        if seed % 25 == 24:
            bench.close()
            bench = None
    if bench:
        bench.close()
    assert fds is None or e2e_rig.own_fds() <= fds, "descriptors were left open"


def run_chunk(daemon, first, cases):
    """None, or what was found."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    preload = os.environ.get("KVQ_PRELOAD")
    if preload:
        environment.update(LD_PRELOAD=preload, KVQ_LIBRARY=os.environ["KVQ_CHILD_LIBRARY"],
                           ASAN_OPTIONS="detect_leaks=0:handle_segv=1")
    done = subprocess.run([sys.executable, os.path.abspath(__file__), "--child", daemon.directory,
                           str(first), str(cases)], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=600)
    if done.returncode == 0 and daemon.process.poll() is None:
        return None
    last = done.stdout.strip().split("\n")[-1]
    log = "" if daemon.process.poll() is None else "\n".join(daemon.lines[-40:])
    return f"seed {last}: status {done.returncode}\n{done.stderr[-4000:]}\n{log}"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0, help="stop after so long, too")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child[0], int(options.child[1]), int(options.child[2]))
        return 0
    started, done, found = time.monotonic(), 0, 0
    daemon = e2e_rig.Daemon(pool_bytes="64mb", backend="cpu")
    for first in itertools.count(options.seed, CHUNK):
        late = options.minutes and time.monotonic() - started > 60 * options.minutes
        if done >= options.cases or late:
            break
        cases = min(CHUNK, options.cases - done)
        finding = run_chunk(daemon, first, cases)
        done += cases
        if finding:
            found += 1
            print(finding, flush=True)
        if daemon.process.poll() is not None:
            daemon = e2e_rig.Daemon(pool_bytes="64mb", backend="cpu")
    try:
        daemon.stop()
    except AssertionError as error:
        found += 1
        print(error)
    print(f"{done} cases from seed {options.seed}, {time.monotonic() - started:.1f} s: "
          f"{found} findings")
    print(f"{done - found} passed, {found} failed, 0 skipped")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
