# SPDX-License-Identifier: Apache-2.0
"""What rows of bench-engines.py over kvqd share: a daemon each, and sessions full of random K and
V, as a prompt would leave them."""
import json
import os
import subprocess
import tempfile
import time

import numpy as np

from kvq.private import program
from worker import SETTLES, SHAPE, available, resident

AT_ONCE = 4096  # tokens of a step that fills, unless said
POOL = 8 << 30  # bytes for one request, where the machine has as many
LEAST = 1 << 28  # bytes of a pool


class Daemon:
    """A kvqd in a folder of its own. It ends with this process, if not before. Its pool may grow to
    all that the machine has left where a batch is to fit."""

    def __init__(self, workers, batch=1):
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-bench-")
        self.directory = os.path.join(self.folder.name, "run")
        left = max(available(), LEAST)
        pool = left if batch > 1 else min(left, POOL)
        ready, told = os.pipe()
        lives, self.lives = os.pipe()
        self.process = subprocess.Popen(
            [program("kvqd"), "--runtime-dir", self.directory, "--ready-fd", str(told),
             "--workers", str(workers), "--pool-bytes", str(pool), "--log-level", "warn",
             "--http", "no", "--lifetime-fd", str(lives)],
            pass_fds=[told, lives])
        os.close(told)
        os.close(lives)
        if not os.read(ready, 64):
            raise RuntimeError("kvqd did not start")
        os.close(ready)

    def pids(self):
        """Of its process."""
        return [self.process.pid]

    def _sessions(self):
        return json.loads(subprocess.run(
            [program("kvqctl"), "--runtime-dir", self.directory, "session", "list", "--json"],
            stdout=subprocess.PIPE, check=True).stdout)

    def session_bytes(self):
        """Of all sessions."""
        return sum(s["packed_bytes"] + s["window_bytes"] for s in self._sessions())

    def session_tokens(self):
        """Of all sessions."""
        return sum(s["tokens"] for s in self._sessions())

    def settle(self):
        """Waits until it has given back what filling left behind: it does so after ten seconds."""
        last, since = resident(self.pids()), time.monotonic()
        while time.monotonic() < since + SETTLES:
            time.sleep(0.5)
            now = resident(self.pids())
            if now != last:
                last, since = now, time.monotonic()

    def stop(self):
        """Ends it."""
        self.process.terminate()
        self.process.wait()
        os.close(self.lives)
        self.folder.cleanup()


def fill(client, session, tokens, bfloat16, at_once=AT_ONCE):
    """Appends random K and V to all layers, until the session has so many tokens."""
    shape = (min(tokens, at_once), SHAPE["kv_heads"], SHAPE["head_dim"])
    rng = np.random.default_rng(2)
    with client.queue() as queue, client.buffer(4 * int(np.prod(shape))) as buffer:
        halves = [buffer.array(shape, np.uint16 if bfloat16 else np.float16, i * buffer.nbytes // 2)
                  for i in range(2)]
        for half in halves:
            values = rng.standard_normal(shape, np.float32)
            half[:] = values.view(np.uint32) >> 16 if bfloat16 else values
        while session.tokens < tokens:
            n = min(at_once, tokens - session.tokens)
            with queue.step([session], n) as step:
                for layer in range(SHAPE["layers"]):
                    step.append(layer, *(half[:n] for half in halves))
        del halves, half
