# SPDX-License-Identifier: Apache-2.0
"""Client processes of the campaign (e2e_campaign.py): engines on a GPU that do whatever a seed
draws, and their victim, which does its work beside them; run by e2e_child.py."""
import ctypes
import os
import random
import sys
import threading

from e2e_cuda import CudaTensor
from e2e_engine import LAYERS, PIECE, Engine
from e2e_rig import Tokens, attend64, kvq, np, relative_error

NEAR = 0.02  # of a relative error: outputs are held against tokens before they were stored
MOST = 380   # tokens of a session, which is then begun anew
Code = kvq.Code
# What others may do to a session of a name that all use, and what a full pool does.
ALLOWED = {Code.E_BUSY, Code.E_TAKEN, Code.E_STALE, Code.E_NO_SESSION, Code.E_NO_MEMORY,
           Code.E_CANCELLED, Code.E_POSITION, Code.E_DEADLINE, Code.E_READ_ONLY, Code.E_LIMIT,
           Code.E_NO_STEP}


class Worker:
    """An engine with a session of f16, so that what it attends is known to the bit."""

    def __init__(self, directory, seed):
        # 16 processes and a GPU in software on a few cores: nobody answers soon.
        self.engine = Engine(directory, None, timeout_ms=60000)
        self.cuda, self.queue = self.engine.cuda, self.engine.queue
        self.other = self.engine.client.queue()
        self.tokens = self.engine.tokens = Tokens(seed, MOST + 20, layers=LAYERS)
        self.session, self.named = None, False

    def open(self, name=""):
        self.session = self.engine.client.session(
            self.tokens.rows, "f16", place=self.engine.place,
            **({"name": name, "take_over": True} if name else {}))
        self.named = bool(name)

    def close(self):
        session, self.session = self.session, None
        if session:
            session.close()

    def ready(self):
        """Its session, with room for another step."""
        if self.session and self.session.tokens > MOST:
            self.close()
        if not self.session:
            self.open()
        return self.session

    def on_stream(self, n):
        """A step in the order of the stream: the largest error."""
        return self.engine.work(self.ready(), self.engine.arena.address, n)

    def on_host(self, n):
        """The same with a request for each layer, from the host's memory."""
        session, worst = self.ready(), 0.0
        first = session.tokens
        for layer, (out, _) in enumerate(self.tokens.feed(self.queue, session, n)):
            k, v = (np.float16(getattr(self.tokens, x)[layer, :first + n]) for x in "kv")
            want, _ = attend64(k, v, self.tokens.q[layer, first:first + n], first)
            worst = max(worst, relative_error(out, want))
        return float(worst)

    def fork(self):
        """Goes on with a fork of its session, or with the session."""
        session = self.ready()
        if session.tokens == 0:
            return
        forked = self.queue.fork([session])[0]
        session.close()
        self.session, self.named = forked, False


def victim(say, wait, directory, seed):
    """Two steps of each kind whenever it is told to; says the largest error and what it has
    committed."""
    worker, random_, done = Worker(directory, seed), random.Random(seed), 0
    say({"client": worker.engine.client.info()["client_id"], "order": worker.queue.order()})
    while True:
        wait()
        worst = 0.0
        for _ in range(2):
            n = random_.randrange(1, 9)
            worst = max(worst, worker.on_stream(n), worker.on_host(n))
            done += 2 * n
        if random_.random() < 0.3:
            worker.fork()
        say({"error": worst, "done": done, "tokens": worker.session.tokens})


class Chaos(Worker):
    """Draws what it does next. Whatever it reads back is checked, also here."""

    def __init__(self, directory, seed):
        super().__init__(directory, seed)
        self.over = threading.Event()  # the test wants it to end
        self.depends, self.leaving = False, threading.Lock()
        threading.Thread(target=self.leave, daemon=True).start()
        self.random = random.Random(seed)
        self.word = self.cuda.alloc(8)

    def leave(self):
        """When the test wants it to, also out of a call that may wait for those who stand still:
        the test kills them later."""
        sys.stdin.read()
        with self.leaving:
            self.over.set()
            if self.depends:
                os._exit(0)

    def depend(self, yes):
        """Whether what comes next may wait for those who stand still. False: it is not to come."""
        with self.leaving:
            self.depends = yes
            return not self.over.is_set()

    def hold(self):
        """What is given to its stream from now on waits for a word."""
        self.cuda.put(self.word, np.zeros(1, np.uint64), None)
        self.cuda("cuStreamSynchronize", None)
        self.cuda("cuStreamWaitValue64_v2", ctypes.c_void_p(self.engine.stream),
                  ctypes.c_uint64(self.word), ctypes.c_uint64(1), 0)

    def let_go(self, late):
        """Meanwhile, or after so many requests of another queue."""
        cuda = self.cuda
        cuda("cuCtxSetCurrent", cuda.context)
        for _ in range(late):
            self.other.nop()
        one = np.ones(1, np.uint64)
        cuda.put(self.word, one, None)
        cuda("cuStreamSynchronize", None)

    def late(self):
        """A step whose tensors its stream comes to late, or never."""
        self.ready()
        self.hold()
        if self.random.random() < 0.25:
            return self.never()
        helper = threading.Thread(target=self.let_go, args=(self.random.randrange(200),))
        helper.start()
        try:
            return self.on_stream(self.random.randrange(1, 20))
        finally:
            helper.join()

    def never(self):
        """It stands still with work in flight, or waiting for its stream, until it is killed."""
        threading.Thread(target=lambda: (self.over.wait(), os._exit(0)), daemon=True).start()
        session, n = self.session, self.random.randrange(1, 20)
        step = self.queue.step([session], n)
        for layer in range(LAYERS):
            self.engine.layer(step, layer, self.engine.arena.address, session.tokens, n)
        self.over.wait()
        os._exit(0)

    def shared(self):
        """A session that others use as well, and take away: a step in it comes behind the work of
        who had it before."""
        self.close()
        number = self.random.randrange(4)
        self.tokens = self.engine.tokens = Tokens(1000 + number, MOST + 20, layers=LAYERS)
        self.open(f"shared-{number}")

    def anew(self):
        self.close()
        self.open()

    def drop(self):
        session, self.session = self.session, None
        if session:
            session.drop()

    def memory(self):
        """Memory comes, and goes when no stream of any client waits."""
        at = self.cuda.alloc(PIECE)
        self.engine.client.import_tensor(CudaTensor(at, 1024)).close()

    def once(self):
        draw = self.random.choices(
            (lambda: self.on_stream(self.random.randrange(1, 20)),
             lambda: self.on_host(self.random.randrange(1, 20)),
             self.late, self.fork, self.anew, self.shared, self.drop, self.memory),
            (8, 6, 3, 3, 2, 2, 1, 1))[0]
        if not self.depend(self.named or draw in (self.shared, self.memory)):
            return 0.0
        try:
            return draw() or 0.0
        except kvq.Error as error:
            if error.code not in ALLOWED:
                raise
            self.session = None
            return 0.0
        finally:
            self.depend(False)


def chaos(say, _wait, directory, seed):
    """Until it is killed, or its standard input ends."""
    worker = Chaos(directory, seed)
    say({"client": worker.engine.client.info()["client_id"]})
    while not worker.over.is_set():
        error = worker.once()
        if error > NEAR:
            say({"wrong": error})
            sys.exit(4)
    worker.engine.client.close()
