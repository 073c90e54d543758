# SPDX-License-Identifier: Apache-2.0
"""Which thread uses a cache: one at a time, through a whole forward or a call that changes it."""
import threading
from contextlib import contextmanager


class Owner:
    """Of a cache: free until a thread takes it; taken until that thread leaves it, or has ended."""

    def __init__(self):
        self._lock, self._thread = threading.Lock(), None

    def take(self):
        """RuntimeError if another thread has it. Says whether it was free."""
        me = threading.current_thread()
        if self._thread is me:  # and stays so: others take it from threads that have ended
            return False
        with self._lock:
            other = self._thread
            if other is not None and other.is_alive():
                raise RuntimeError(
                    f"thread {other.name!r} is in a forward or a call of this KvqCache, which one "
                    "thread uses at a time; give each thread a cache of its own (copy.deepcopy() "
                    "of one, made before, is a fork). After a forward that was interrupted "
                    "(KeyboardInterrupt) the cache's abort(), in that thread, gives it free")
            self._thread = me
            return True

    def is_mine(self):
        return self._thread is threading.current_thread()

    def leave(self):
        with self._lock:
            if self.is_mine():
                self._thread = None

    @contextmanager
    def use(self):
        """For a call, which may be made in the middle of the same thread's forward."""
        free = self.take()
        try:
            yield
        finally:
            if free:
                self.leave()
