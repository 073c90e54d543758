# SPDX-License-Identifier: Apache-2.0
"""Forked processes, and clients that are let go of; python.py runs these."""
import ctypes
import gc
import os
import select
import signal

import e2e_rig
from e2e_rig import Test, Tokens, kvq, np

from kvq._ffi import lib


def in_child(call):
    """What a forked process says of call(): "done", or the error that it raised. "hangs" if it says
    nothing."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        said = "ended"
        try:
            call()
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(there, said.encode())
            os._exit(0)
    os.close(there)
    said = b"hangs"
    if select.select([here], [], [], e2e_rig.BOUND)[0]:
        said = os.read(here, 4096)
    else:
        os.kill(child, signal.SIGKILL)
    os.close(here)
    os.waitpid(child, 0)
    return said.decode()


class Forks(Test):
    """A connection is one process's: a forked one can only let go of it."""

    def setUp(self):
        super().setUp()
        self.tokens = Tokens(1, 40)
        self.session = self.client.session(self.tokens.rows, "f16")
        self.tokens.feed(self.queue, self.session, 5)

    def check_parent(self):
        """It goes on with all that it has."""
        before = self.session.tokens
        self.tokens.feed(self.queue, self.session, 3)
        self.assertEqual(self.session.refresh(), before + 3)

    def test_what_is_refused(self):
        """Before anything is sent, so that the parent gets all replies to its own requests."""
        buffer, local = self.client.buffer(4096), self.queue.local()
        ticket = self.queue.submit("nop", kvq.make_entries([self.session]))
        calls = {
            "client": [self.client.info, self.client.queue, self.session.refresh,
                       self.session.drop, self.client.reattach,
                       lambda: self.client.buffer(4096), lambda: self.client.buffer_on(64)],
            "queue": [lambda: self.queue.step([self.session], 1), self.queue.nop, ticket.wait,
                      lambda: self.queue.read(self.session, 0), lambda: self.queue.local(),
                      lambda: self.queue.fork([self.session]), self.queue.order,
                      lambda: local.add(self.session), lambda: local.why]}
        for what, some in calls.items():
            for call in some:
                with self.subTest(what=what, call=call):
                    self.assertRegex(in_child(call), f"^ValueError: the {what} is of the process "
                                     "that this one was forked from; make a kvq.Client in this")
        ticket.wait()
        local.close()
        buffer.close()
        self.check_parent()

    def test_what_is_closed(self):
        """The library is told nothing, and the parent has everything still."""
        buffer, local = self.client.buffer(4096), self.queue.local()
        made = self.client.buffer(4096, daemon_made=True)
        array = made.array((4,))

        def leave():
            with self.client:
                raise SystemExit(3)

        def leave_step():
            with self.queue.step([self.session], 1):
                raise SystemExit(3)
        for call in (self.session.close, self.queue.close, local.close, buffer.close, made.close,
                     self.client.close):
            with self.subTest(call=call):
                def twice(call=call):
                    call()
                    call()
                self.assertEqual(in_child(twice), "done")
                self.check_parent()
        self.assertEqual(in_child(leave), "SystemExit: 3")
        array[...] = 7
        with self.client.session(self.tokens.rows, "f16") as other:
            local.add(other)
            with self.queue.step([other], 1) as step:
                self.assertEqual(in_child(lambda: step.__exit__(None)),
                                 "ValueError: the queue is of the process that this one was forked "
                                 "from; make a kvq.Client in this process, and open its sessions "
                                 "there")
                for layer in range(2):
                    step.append(layer, *(np.zeros((1, 2, 128), np.float32) for _ in "kv"))
            with local.step([other], 0) as step:
                self.assertEqual(in_child(lambda: step.__exit__(SystemExit)), "done")
        del array
        made.close()
        self.check_parent()

    def test_within_a_call_with_a_buffer(self):
        """Which only the parent is in."""
        buffer = self.client.buffer(4096)

        def look():
            if kvq.buffers._in_use:
                raise AssertionError("in use")
        self.assertEqual(kvq.buffers.in_use([buffer], in_child, look), "done")
        buffer.close()

    def test_a_client_of_its_own(self):
        """It goes on beside its parent's, which is closed here alone."""
        def work():
            self.client.close()
            with self.daemon.client() as client, client.queue() as queue:
                session = client.session(self.tokens.rows, "f16")
                self.tokens.feed(queue, session, 5)
                assert session.refresh() == 5
        self.assertEqual(in_child(work), "done")
        self.check_parent()


class LetGo(Test):
    """Clients that nobody has closed."""

    def setUp(self):
        super().setUp()
        self.others = len(self.daemon.ctl("client", "list"))
        gc.disable()  # it is told when to collect
        self.addCleanup(gc.enable)

    def left(self):
        """How many clients the daemon has more than before; it takes one down before its end of the
        connection closes."""
        return len(self.daemon.ctl("client", "list")) - self.others

    def test_with_all_that_it_has(self):
        class Engine:
            def __init__(self, client):
                self.client, self.queue = client, client.queue()
                self.local, self.session = self.queue.local(), client.session(tokens.rows, "f16")
                self.array = client.array((4, 4))
                tokens.feed(self.queue, self.session, 5)

            def __del__(self):
                closed.append(self.client.pointer.value is None or bool(self.local.close()))
                self.queue.close()
                self.session.close()
                self.client.close()
        tokens, closed = Tokens(1, 5), []
        engine = Engine(self.daemon.client())
        array = engine.array
        array[...] = 3
        self.assertEqual(self.left(), 1)
        del engine
        gc.collect()
        self.assertEqual(len(closed), 1)
        self.assertEqual(self.left(), 0)
        self.assertEqual(float(array.sum()), 48)  # the mapping is the array's

    def test_without_an_end_of_its_own(self):
        client = self.daemon.client()
        queue, buffer = client.queue(), client.buffer(4096, daemon_made=True)
        session = client.session(Tokens(1, 5).rows, "f16")
        del client, queue, buffer
        gc.collect()
        self.assertEqual(self.left(), 1)  # the session refers to it
        del session
        gc.collect()
        self.assertEqual(self.left(), 0)

    def test_while_arrays_are_there(self):
        """Of memory of the daemon's: the client stays, else they would be of nothing."""
        client = self.daemon.client()
        pointer = client.pointer
        array = client.buffer(4096, daemon_made=True).array((4,))
        del client
        gc.collect()
        array[...] = 5
        self.assertEqual(float(array.sum()), 20)
        lib.kvq_disconnect(ctypes.byref(pointer))  # the test's own: no array is looked at again

    def test_in_a_forked_process(self):
        """It is the parent's, and stays."""
        kept = [self.daemon.client()]
        kept.append(kept[0].queue())

        def let_go():
            kept.clear()
            gc.collect()
        self.assertEqual(in_child(let_go), "done")
        kept[1].nop()
        self.assertEqual(self.left(), 1)
        kept[0].close()
