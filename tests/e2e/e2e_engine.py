# SPDX-License-Identifier: Apache-2.0
"""Client processes of the end-to-end tests that are engines on a GPU, with streams of their own;
run by e2e_child.py."""
import ctypes
import os

from e2e_cuda import DRIVER, Cuda, CudaTensor
from e2e_rig import Tokens, attend64, kvq, np, relative_error

LAYERS, PIECE = 2, 1 << 18  # of memory, for each tensor
READY = 128  # where that word stands in a timeline page


class Engine:
    """A connection, a stream, and memory that the daemon made or that it imports."""

    def __init__(self, directory, order, **options):
        os.environ["KVQ_GPU_DRIVER"] = DRIVER
        if order:  # by force
            os.environ["KVQ_GPU_ORDER"] = order
        self.cuda = Cuda(DRIVER)
        self.stream = self.cuda.stream()
        self.client = kvq.Client(directory, **options)
        self.queue = self.client.queue()
        self.place = self.client.gpus()[0]["place"]
        self.tokens = Tokens(1, 400, layers=LAYERS)
        self.arena = self.client.buffer_on(4 * PIECE)

    def session(self, **options):
        return self.client.session(self.tokens.rows, "oscar2", place=self.place, **options)

    def import_memory(self):
        """Memory of this process's own; its address."""
        at = self.cuda.alloc(4 * PIECE)
        self.client.import_tensor(CudaTensor(at, PIECE))
        return at

    def layer(self, step, layer, at, first, n):
        """One layer of a step on the stream, with tensors from that address on; where the output
        will be."""
        arrays = [np.ascontiguousarray(getattr(self.tokens, x)[layer, first:first + n])
                  for x in "kvq"]
        tensors = {}
        for i, array in enumerate(arrays):
            self.cuda.put(at + i * PIECE, array, self.stream)
            tensors["kvq"[i]] = CudaTensor(at + i * PIECE, *array.shape)
        tensors["out"] = CudaTensor(at + 3 * PIECE, *arrays[2].shape)
        step.on_stream("append_attend", layer, self.stream, **tensors)
        return tensors["out"]

    def work(self, session, at, n):
        """A step, whose outputs are held against double precision: the largest error."""
        first, worst = session.tokens, 0.0
        with self.queue.step([session], n) as step:
            for layer in range(LAYERS):
                out = self.layer(step, layer, at, first, n)
                got = self.cuda.get(out.at, out.shape, self.stream)
                k, v = (np.float16(getattr(self.tokens, x)[layer, :first + n]) for x in "kv")
                want, _ = attend64(k, v, self.tokens.q[layer, first:first + n], first)
                worst = max(worst, relative_error(got, want))
        return float(worst)


def stuck(directory, order):
    """Has committed some tokens, then has work in flight that waits for its stream, which does not
    go on; K, V and Q lie in memory of the daemon's and in imported memory."""
    engine = Engine(directory, order)
    session = engine.session(name="stuck")
    own = engine.import_memory()
    error = engine.work(session, own, 20)
    engine.cuda.wait_for_ever(engine.stream)
    step = engine.queue.step([session], 20)
    for layer, at in enumerate((engine.arena.address, own)):
        engine.layer(step, layer, at, 20, 20)
    return engine, {"client": engine.client.info()["client_id"], "error": error,
                    "order": engine.queue.order()}


def gpu_stuck(say, wait, directory, order):
    _engine, what = stuck(directory, order)
    say(what)
    wait()


def gpu_scribbler(say, _wait, directory):
    """The same, and takes back for ever what the daemon writes to let its stream go."""
    _engine, what = stuck(directory, "words")
    with open("/proc/self/maps", encoding="ascii") as maps:
        page = next(int(line.split("-")[0], 16) for line in maps if "kvq-timeline" in line)
    ready = ctypes.c_uint64.from_address(page + READY)
    say(what)
    while True:
        ready.value = 0


def gpu_engine(say, wait, directory, order):
    """Works in memory that the daemon made; says what became of an import, and goes on when it is
    told to."""
    engine = Engine(directory, order)
    session = engine.session()
    refused = ""
    try:
        engine.import_memory()
    except kvq.Error as error:
        refused = error.text
    for _ in range(2):
        error = engine.work(session, engine.arena.address, 10)
        say({"client": engine.client.info()["client_id"], "pid": os.getpid(), "error": error,
             "order": engine.queue.order(), "tokens": session.tokens, "refused": refused})
        wait()
    engine.client.close()
