# SPDX-License-Identifier: Apache-2.0
"""Client processes of the end-to-end tests: e2e_child.py FUNCTION [JSON ARGUMENT]...

Each says lines of JSON and waits for a line where the test has to act first.
"""
import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import socket
import sys
import threading
import time

import e2e_chaos
import e2e_engine
import e2e_flooders
from e2e_rig import Tokens, attend64, feed, kvq, np, read_all, relative_error


def say(value):
    print(json.dumps(value), flush=True)


def wait():
    if not sys.stdin.readline():
        sys.exit(3)  # the test is gone


def check_step(queue, tokens, session, n):
    """A step whose output is held against double precision over what the daemon gives back for the
    past and the step's own K and V, rounded as they are stored. Returns the largest error."""
    past = [queue.read(session, layer) for layer in range(tokens.layers)]
    start, worst = session.tokens, 0.0
    results = tokens.feed(queue, session, n)
    for layer, (out, lse) in enumerate(results):
        new = slice(start, start + n)
        k, v = (np.concatenate([p, np.float32(np.float16(getattr(tokens, x)[layer, new]))])
                for p, x in zip(past[layer], "kv"))
        want, want_lse = attend64(k, v, tokens.q[layer, new], start)
        worst = max(worst, relative_error(out, want), np.abs(lse - want_lse).max())
    return worst


def engine(directory, format, seed, prompt, steps):
    """An engine's life: prefill in pieces, then token by token; every output checked."""
    tokens = Tokens(seed, prompt + steps)
    with kvq.Client(directory, name=f"engine {format}") as client, client.queue() as queue:
        session = client.session(tokens.rows, format, name=f"work-{format}")
        say("ready")
        wait()
        worst = 0.0
        while session.tokens < prompt:
            n = min(200, prompt - session.tokens)
            worst = max(worst, check_step(queue, tokens, session, n))
        for i in range(steps):
            if i % 16 == 0:
                worst = max(worst, check_step(queue, tokens, session, 1))
            else:
                tokens.feed(queue, session, 1)
        say({"tokens": session.tokens, "error": float(worst), "info": session.info()})
        wait()


def stop_at(directory, name, seed, n, layers, where):
    """Begins a step on a named session and stops: where -1 right after the beginning, else after
    so many layers; `layers` means that only the end is missing."""
    tokens = Tokens(seed, 700, layers=layers)
    with kvq.Client(directory) as client, client.queue() as queue:
        session = client.session(name=name, must_exist=True)
        at = slice(session.tokens, session.tokens + n)
        step = queue.step([session], n)
        for layer in range(max(where, 0)):
            step.append_attend(layer, tokens.k[layer, at], tokens.v[layer, at],
                               tokens.q[layer, at])
        # And one that nobody will miss.
        unnamed = client.session(tokens.rows, "f16")
        feed(queue, [tokens], [unnamed], [n])
        say({"client": client.info()["client_id"], "tokens": session.tokens})
        wait()


def rank(directory, name, shard, seed, steps):
    """Writes one of two shards: so many steps of ten tokens, then one more whenever it is told to
    and another is begun. Says where it stands, or what has become of the step."""
    tokens = Tokens(seed, 400)
    with kvq.Client(directory) as client, client.queue() as queue:
        session = client.session(tokens.rows, "oscar2", name=name, shard=shard, shards=2)
        say("open")
        wait()
        for _ in range(steps):
            tokens.feed(queue, session, 10, attend=False)
        say(session.tokens)
        while sys.stdin.readline():
            tokens.feed(queue, session, 10, attend=False)
            say(session.tokens)
            try:
                queue.step([session], 10).abort()
            except kvq.Error as error:
                say({"code": int(error.code), "text": error.text, "tokens": session.refresh()})


def stop_at_shard(directory, name, shard, seed, where):
    """Takes a shard over, begins a step, and stops behind so many layers."""
    tokens = Tokens(seed, 400)
    with kvq.Client(directory) as client, client.queue() as queue:
        session = client.session(name=name, shard=shard, take_over=True)
        at = slice(session.tokens, session.tokens + 10)
        step = queue.step([session], 10)
        for layer in range(where):
            step.append(layer, tokens.k[layer, at], tokens.v[layer, at])
        say("there")
        wait()


def waiter(directory):
    """Waits for an answer; says how it ended and when, on the machine's monotonic clock."""
    with kvq.Client(directory) as client, client.queue() as queue:
        say("ready")
        wait()
        ticket = queue.submit("nop", np.zeros(1, kvq.ENTRY))
        say("waiting")
        try:
            ticket.wait()
            code = 0
        except kvq.Error as error:
            code = int(error.code)
        say({"code": code, "at": time.monotonic()})
        try:
            queue.nop()
        except kvq.Error as error:
            say(int(error.code))


def own_rings():
    """Where this process has request rings mapped: (address, length) each."""
    with open("/proc/self/maps", encoding="ascii") as file:
        for line in file:
            found = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-s .*kvq-requests", line)
            if found:
                start, end = (int(x, 16) for x in found.groups())
                yield start, end - start


PAGE_BYTES, TAIL, CQ_HEAD = 512, 128, 256
HEADER = 256


def random_request(rng, seq):
    """A request's header: random, or nearly right with one thing wrong."""
    header = bytearray(rng.randbytes(HEADER) if rng.random() < 0.3 else HEADER)
    count = rng.choice([0, 1, 2, 64, 1024])
    header[0] = rng.randrange(0, 12)
    header[2:4] = rng.choice([0, 1, 2, 3, 4, 65535]).to_bytes(2, "little")
    header[4:6] = count.to_bytes(2, "little")
    header[6:8] = (4 + (count + 1) // 2).to_bytes(2, "little")
    header[8:12] = seq.to_bytes(4, "little")
    for _ in range(rng.randrange(4)):
        header[rng.randrange(12, HEADER)] = rng.randrange(256)
    if rng.random() < 0.003:
        header[6:8] = rng.randbytes(2)
    return bytes(header), 4 + (count + 1) // 2


def ring_the_bell():
    """Wakes the daemon, as libkvq does when the daemon sleeps."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if "eventfd" in os.readlink(f"/proc/self/fd/{name}"):
                os.write(int(name), (1).to_bytes(8, "little"))
        except OSError:  # the listing's own
            pass


def write_requests(rng, ring):
    """Well-formed messages with senseless contents."""
    tail = ctypes.c_uint32.from_address(ring + TAIL)
    room = 8192 - tail.value % 8192
    for seq in range(300):
        header, slots = random_request(rng, seq)
        if slots > room:
            continue
        room -= slots
        ctypes.memmove(ring + PAGE_BYTES + tail.value % 8192 * 64, header, HEADER)
        tail.value += slots


def scribble(directory, seed, way):
    """Writes over its own request ring; says what became of an honest call after it."""
    rng = random.Random(seed)
    with kvq.Client(directory, name=f"scribbler {seed}", timeout_ms=20000) as client:
        queue = client.queue()
        tokens = Tokens(seed, 16)
        session = client.session(tokens.rows, "f16", name=f"scribbled-{seed}")
        tokens.feed(queue, session, 8)
        say(client.info()["client_id"])
        wait()
        (ring, length), = own_rings()
        if way == "tail":  # further ahead than the ring is long
            ctypes.c_uint32.from_address(ring + TAIL).value += 1 << 20
        elif way == "all":
            ctypes.memmove(ring, rng.randbytes(length), length)
        elif way == "head":  # consumed what was never there
            ctypes.c_uint32.from_address(ring + CQ_HEAD).value += 77777
        else:
            write_requests(rng, ring)
        ring_the_bell()
        say("scribbled")
        wait()
        try:
            queue.nop()
            say("answered")
        except kvq.Error as error:
            say(error.code.name)


def spins(directory, in_context):
    """An engine with GNU's OpenMP and more threads, which attends in the daemon or by itself."""
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        say("no libgomp")
        return
    for _ in range(3):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    tokens = Tokens(1, 8)
    with kvq.Client(directory, name="spins") as client, client.queue() as queue:
        session = client.session(tokens.rows, "f16")
        tokens.feed(queue, session, 4)
        with contextlib.ExitStack() as stack:
            if in_context:
                local = stack.enter_context(queue.local(max_tokens=1024, require=True))
                local.add(session)
                stack.callback(local.remove, session)
            say(os.getpid())
            wait()


def stranger(directory, uid, ns, name, groups=()):
    """Tries as another user to reach a namespace that is not its own."""
    tokens = Tokens(1, 4)  # while this user may still read everything that it needs
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)
    results = {}
    try:
        client = kvq.Client(directory)
    except kvq.Error as error:
        say([error.code.name, error.text])
        return
    with client:
        def attempt(label, **options):
            try:
                with client.session(tokens.rows, "f16", **options) as session:
                    results[label] = ["OK", session.info()["ns"]]
            except kvq.Error as error:
                results[label] = [error.code.name, error.text]
        attempt("own")
        attempt("other", ns=ns)
        attempt("existing", ns=ns, name=name)
        attempt("reading", ns=ns, name=name, read_only=True)
    say(results)


def http_client(path, uid, groups, questions):
    """Asks HTTP by one connection as another user, for one path after the other; says the status
    and the answer of each, and waits."""
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)
    connection = http.client.HTTPConnection("kvqd")
    connection.auto_open = 0  # it is this connection or none
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    for question in questions:
        connection.request("GET", question)
        reply = connection.getresponse()
        say([reply.status, reply.read().decode()])
        wait()


def soak_client(directory, seed, sessions, seconds):
    """One of many: sessions of its own, steps of random shape, outputs checked now and then."""
    rng = random.Random(seed)
    tokens = Tokens(seed, 4096, layers=1, q_heads=4, kv_heads=1, dim=64)
    with kvq.Client(directory, name=f"soak {seed}", timeout_ms=60000) as client:
        queue = client.queue()
        formats = ["f16", "oscar2", "oscar3", "oscar4", "bf16", "oscar2-xh"]
        mine = [client.session(tokens.rows, formats[i % len(formats)],
                               name=f"soak-{seed}-{i}" if i % 4 == 0 else None,
                               max_rollback=rng.choice([0, 8]))
                for i in range(sessions)]
        say(client.info()["client_id"])
        wait()
        end, steps, worst = time.monotonic() + seconds, 0, 0.0
        while time.monotonic() < end:
            batch = rng.sample(mine, rng.randint(1, len(mine)))
            counts = [min(rng.choice([1, 1, 1, 2, 17, 130]), tokens.n - s.tokens) for s in batch]
            batch, counts = zip(*[(s, n) for s, n in zip(batch, counts) if n]) if any(
                counts) else ([], [])
            if not batch:
                break
            plain = [s for s in batch if mine.index(s) % len(formats) != 4]
            if steps % 8 == 0 and plain:
                session = rng.choice(plain)
                n = min(4, tokens.n - session.tokens)
                worst = max(worst, check_step(queue, tokens, session, n) if n else 0)
            else:
                feed(queue, [tokens] * len(batch), batch, counts)
            steps += 1
        say({"steps": steps, "error": float(worst), "tokens": sum(s.tokens for s in mine)})
        wait()


def reads(directory, name, layers):
    """Opens a session, and reads all of it when it is told to."""
    with kvq.Client(directory) as client, client.queue() as queue:
        session = client.session(Tokens(0, 1, layers).rows, "oscar2", name=name, read_only=True)
        say("ready")
        wait()
        say(read_all(queue, session, layers).hex())


def parks(directory, n):
    """Parks a session without a name, and is killed."""
    tokens = Tokens(11, n)
    with kvq.Client(directory) as client, client.queue() as queue:
        session = client.session(tokens.rows, "oscar2")
        tokens.feed(queue, session, n, attend=False)
        session.park()
        say(client.info()["client_id"])
        wait()


def takes_turns(directory, seed, n, rounds):
    """An engine with more sessions than fit, that uses one after the other; every output checked.
    """
    tokens = [Tokens(100 * seed + i, 400) for i in range(n)]
    with kvq.Client(directory) as client, client.queue() as queue:
        sessions = [client.session(t.rows, "f16") for t in tokens]
        say("ready")
        wait()
        worst = 0.0
        for t, s in zip(tokens, sessions):
            t.feed(queue, s, 360, attend=False)
        for _ in range(rounds):
            for t, s in zip(tokens, sessions):
                worst = max(worst, check_step(queue, t, s, 2))
                for layer in range(t.layers):
                    k, v = queue.read(s, layer)
                    for got, want in ((k, t.k), (v, t.v)):
                        want = np.float32(np.float16(want[layer, :s.tokens]))
                        if got.tobytes() != want.tobytes():
                            sys.exit(4)
        say({"tokens": [s.refresh() for s in sessions], "error": float(worst)})
        wait()


def gpu_engine(*arguments):
    e2e_engine.gpu_engine(say, wait, *arguments)


def gpu_scribbler(*arguments):
    e2e_engine.gpu_scribbler(say, wait, *arguments)


def gpu_victim(*arguments):
    e2e_chaos.victim(say, wait, *arguments)


def gpu_chaos(*arguments):
    e2e_chaos.chaos(say, wait, *arguments)


def gpu_stuck(*arguments):
    e2e_engine.gpu_stuck(say, wait, *arguments)


def step_when_told(*arguments):
    e2e_flooders.step_when_told(say, wait, check_step, *arguments)


def connect_plainly(*arguments):
    e2e_flooders.connect_plainly(say, wait, *arguments)


def connect_one_by_one(*arguments):
    e2e_flooders.connect_one_by_one(say, wait, *arguments)


def open_queues(*arguments):
    e2e_flooders.open_queues(say, wait, *arguments)


def send_frames(*arguments):
    e2e_flooders.send_frames(say, wait, *arguments)


def come_and_go(*arguments):
    e2e_flooders.come_and_go(say, *arguments)


if __name__ == "__main__":
    globals()[sys.argv[1]](*(json.loads(a) for a in sys.argv[2:]))
