# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment; python.py runs these."""
import gc
import itertools
import os
import sys
import tempfile
import threading
import unittest.mock
from contextlib import suppress

from e2e_rig import Test, Tokens, kvq, np

from kvq._ffi import lib


class Interrupts(Test):
    """Ctrl-C within the library's calls that begin and commit a step, before or behind what they
    do: no step stays open, and the session's count is the daemon's."""

    def setUp(self):
        super().setUp()
        self.tokens = Tokens(1, 20)
        self.session = self.client.session(self.tokens.rows, "f16")

    def interrupted(self, name, behind, call):
        function = getattr(lib, name)

        def stop(*arguments):
            if behind:
                function(*arguments)
            raise KeyboardInterrupt
        with unittest.mock.patch.object(lib, name, stop):
            self.assertRaises(KeyboardInterrupt, call)

    def goes_on(self, begin, expected):
        self.assertEqual(self.session.tokens, expected)
        self.assertEqual(self.session.refresh(), expected)
        begin().abort()

    def test_what_is_opened(self):
        """Nobody has the handle or the queue: they are closed."""
        def open_one():
            return self.client.session(self.tokens.rows, "f16", name="one writer")
        self.tokens.feed(self.queue, self.session, 5)
        for behind in (False, True):
            self.interrupted("kvq_session_open", behind, open_one)
            open_one().close()
            before = len(self.daemon.ctl("session", "list"))
            self.interrupted("kvq_fork", behind, lambda: self.queue.fork([self.session] * 3))
            self.assertEqual(len(self.daemon.ctl("session", "list")), before)
            for _ in range(70):  # a client has 64
                self.interrupted("kvq_queue_open", behind, self.client.queue)
            self.client.queue().close()
        for moment in self.moments(self.client.queue):
            self.assertEqual(self.client._queues, [self.queue])
        self.assertGreater(moment, 10)

    def test_steps(self):
        def begin(**options):
            return self.queue.step([self.session], 2, **options)
        for behind in (False, True):
            self.interrupted("kvq_step_begin", behind, begin)
            self.goes_on(begin, 0)
            self.interrupted("kvq_step_begin_ids", behind, lambda: begin(ids=[1, 2]))
            self.goes_on(begin, 0)
        for behind, expected in ((False, 0), (True, 2)):
            step = begin()
            for layer in range(2):
                step.append(layer, self.tokens.k[layer, :2], self.tokens.v[layer, :2])
            self.interrupted("kvq_step_end", behind, step.end)
            self.goes_on(begin, expected)

    @staticmethod
    def interrupt(moment, call):
        """Calls it with a KeyboardInterrupt at that moment, and says whether it came before the
        end. A moment is where CPython looks for signals: as a function begins, and behind each
        call of C's."""
        left = moment

        def look(_frame, event, _argument):
            nonlocal left
            left -= event in ("call", "c_return")
            if left == 0:
                raise KeyboardInterrupt
        with suppress(KeyboardInterrupt), \
                unittest.mock.patch.object(sys, "unraisablehook", str):  # one in a __del__
            sys.setprofile(look)
            try:
                call()
            finally:
                sys.setprofile(None)
        return left <= 0

    @classmethod
    def moments(cls, call):
        """Interrupts a call at the first moment, then at the second one, until it comes to its
        end."""
        for moment in itertools.count(1):
            if not cls.interrupt(moment, call):
                return
            yield moment

    def test_at_any_moment(self):
        """Another thread has the queue's turn behind it, and the session is in no step."""
        refused = []

        def step():
            self.queue.step([self.session], 1).abort()

        def elsewhere():
            try:
                step()
            except (RuntimeError, kvq.Error) as error:
                refused.append(error)
        for moment in self.moments(step):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            self.assertEqual(refused, [], moment)
        self.assertGreater(moment, 30)

    def test_a_turn_that_others_try_to_take(self):
        """Its thread takes it again, at whatever moment their attempts come."""
        turn = kvq.checks.Turn("queue")

        def others_come(*_):
            turn._marks[object()] = 0

        def again():
            sys.setprofile(others_come)
            try:
                turn.run(bool)
            finally:
                sys.setprofile(None)
        turn.run(again)
        self.assertGreater(len(turn._marks), 3)

    def test_at_any_moment_of_a_control_call(self):
        """The client can be closed behind it: in no call of its own is anybody left."""
        client = self.daemon.client()
        for moment in self.moments(client.info):
            self.assertEqual(client._gate.alone(bool), False, moment)
        self.assertGreater(moment, 5)
        client.close()

    def test_at_any_moment_of_a_call_with_buffers(self):
        """They can be closed behind it: in no call is any of them left."""
        k, v, q, out = (self.client.array((1, heads, 128)) for heads in (2, 2, 8, 8))

        def step():
            with self.queue.step([self.session], 1) as step:
                step.append_attend(0, k, v, q, out=out)
                raise ZeroDivisionError
        with self.queue.local(max_tokens=1024) as local:
            local.add(self.session)
            self.assertRaises(ZeroDivisionError, step)  # makes the queue's staging buffer
            for moment in self.moments(lambda: self.assertRaises(ZeroDivisionError, step)):
                self.assertEqual(kvq.buffers._in_use, {}, moment)
            self.assertGreater(moment, 100)
            open_one = local.step([self.session], 1)
            for moment in self.moments(lambda: open_one.attend(0, q, k=k, v=v, out=out)):
                self.assertEqual(kvq.buffers._in_use, {}, moment)
            self.assertGreater(moment, 100)
            open_one.abort()
        self.goes_on(lambda: self.queue.step([self.session], 1), 0)
        for array in (k, v, q, out):
            self.client.find_buffer(array).close()

    def test_at_any_moment_of_a_step_of_this_process(self):
        """The next one begins: whatever was interrupted, it is aborted."""
        k, v, q, out = (self.client.array((1, heads, 128)) for heads in (2, 2, 8, 8))
        with self.queue.local(max_tokens=1024) as local:
            local.add(self.session)

            def step():
                with local.step([self.session], 1) as step:
                    step.attend(0, q, k=k, v=v, out=out, lse=False)
                    raise ZeroDivisionError
            for moment in self.moments(lambda: self.assertRaises(ZeroDivisionError, step)):
                self.assertEqual(kvq.buffers._in_use, {}, moment)
                self.goes_on(lambda: local.step([self.session], 1), 0)
            self.assertGreater(moment, 100)

    def test_an_abort_while_another_thread_has_the_turn(self):
        """Is refused, and the step stays open, for another abort."""
        refused = []

        def abort():
            try:
                step.abort()
            except RuntimeError:
                refused.append(step.open)
        with self.queue.local(max_tokens=1024) as local:
            local.add(self.session)
            step = local.step([self.session], 1)
            thread = threading.Thread(target=abort)
            self.queue.turn.run(lambda: (thread.start(), thread.join()))
            self.assertEqual(refused, [True])
            step.abort()
            self.assertFalse(step.open)
            self.goes_on(lambda: local.step([self.session], 1), 0)

    def test_steps_of_this_process(self):
        k, v, q = (self.client.array((2, *getattr(self.tokens, x).shape[2:])) for x in "kvq")
        k[...], v[...], q[...] = (getattr(self.tokens, x)[0, :2] for x in "kvq")
        with self.queue.local(max_tokens=1024) as local:
            local.add(self.session)

            def begin():
                return local.step([self.session], 2)
            for behind in (False, True):
                self.interrupted("kvq_local_begin", behind, begin)
                self.goes_on(begin, 0)
            for behind, expected in ((False, 0), (True, 2)):
                step = begin()
                for layer in range(2):
                    step.attend(layer, q, k=k, v=v)
                self.interrupted("kvq_local_end", behind, step.end)
                self.goes_on(begin, expected)
            open_one = begin()  # a second one is refused, and leaves the first
            self.assertRaises(kvq.Error, begin)
            open_one.attend(0, q, k=k, v=v)
            open_one.abort()

    def end_of(self, moments):
        """How many there were; nothing is open behind any of them."""
        count = 0
        for count in moments:
            self.assertEqual(kvq.buffers._in_use, {})
            self.assertEqual(self.client._buffers, [])
        return count

    def descriptors(self):
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def test_at_any_moment_of_making_a_buffer(self):
        """Nobody has it: it is closed, and the client can have as many as before."""
        memfd = os.memfd_create("another's", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(memfd, 4096)
        before = self.descriptors()
        for make in (lambda: self.client.buffer(4096),
                     lambda: self.client.buffer(4096, daemon_made=True),
                     lambda: self.client.import_memfd(memfd, 4096), lambda: self.client.array(8)):
            def make_and_close():
                left = make()
                setprofile(None)
                (self.client.find_buffer(left) if isinstance(left, np.ndarray) else left).close()
            setprofile = sys.setprofile
            self.assertGreater(self.end_of(self.moments(make_and_close)), 20)
            self.assertEqual(self.descriptors(), before)
        for name in ("kvq_buffer_import_memfd", "kvq_buffer_create"):
            for behind in (False, True):
                for _ in range(200):  # a client has 256
                    self.interrupted(name, behind, lambda: self.client.buffer(
                        4096, daemon_made=name == "kvq_buffer_create"))
                self.assertEqual(self.client._buffers, [])
        buffers = [self.client.buffer(4096) for _ in range(256)]
        os.close(memfd)
        for buffer in buffers:
            buffer.close()

    def test_at_any_moment_of_closing_a_buffer(self):
        """It is open, and can be closed, or it is closed."""
        for daemon_made in (False, True):
            for moment in range(1, 1000):
                buffer = self.client.buffer(4096, daemon_made)
                array = buffer.array(8) if moment % 2 else None
                if daemon_made and moment % 2:
                    interrupted = self.interrupt(moment, lambda: self.assertRaises(
                        BufferError, buffer.close))
                    self.assertIs(self.client.find_buffer(array), buffer)
                    self.assertRaises(BufferError, buffer.close)
                else:
                    interrupted = self.interrupt(moment, buffer.close)
                if buffer.pointer:
                    self.assertTrue(array is None or np.shares_memory(buffer.array(8), array))
                    buffer.array(8)[:] = 3
                del array
                gc.collect()
                buffer.close()
                self.assertEqual((self.client._buffers, buffer._memory, bool(buffer.pointer)),
                                 ([], None, False))
                if not interrupted:
                    break
            self.assertGreater(moment, 10)
        for behind in (False, True):
            buffer = self.client.buffer(4096)
            self.interrupted("kvq_buffer_close", behind, buffer.close)
            self.assertEqual(bool(buffer.pointer), not behind)
            buffer.close()
        buffers = [self.client.buffer(4096) for _ in range(256)]
        for buffer in buffers:
            buffer.close()

    def test_at_any_moment_of_a_request(self):
        """That is sent alone: no ticket of it stays, and as many can be open as before."""
        entries = kvq.make_entries([self.session])
        for moment in self.moments(lambda: self.queue.submit("nop", entries.copy()).wait()):
            for ticket in list(self.queue._tickets):  # the wait for it was interrupted
                self.assertGreater(ticket.number, 0)
                with suppress(kvq.Error):  # it was over
                    ticket.wait()
            self.assertEqual(self.queue._tickets, [])
        self.assertGreater(moment, 20)
        for moment in self.moments(lambda: self.submitted(entries)):
            self.assertEqual(self.queue._tickets, [])
        self.assertGreater(moment, 15)
        for behind in (False, True):
            for _ in range(10):  # more than may be open
                self.interrupted("kvq_submit", behind, lambda: self.queue.submit("nop", entries))
            self.assertEqual(self.queue._tickets, [])
        for ticket in [self.queue.submit("nop", entries.copy()) for _ in range(8)]:
            ticket.wait()

    def submitted(self, entries):
        """One that is not interrupted once the caller has it."""
        ticket = self.queue.submit("nop", entries.copy())
        sys.setprofile(None)
        ticket.wait()

    def test_a_second_step_of_this_process(self):
        """Which is refused, interrupted at any moment, leaves the first one open."""
        with self.queue.local(max_tokens=1024) as local:
            local.add(self.session)

            def begin():
                return local.step([self.session], 2)
            first = begin()
            for moment in self.moments(lambda: self.fails(kvq.Code.E_BUSY, begin)):
                self.assertTrue(first.open)
            self.assertGreater(moment, 20)
            self.interrupted("kvq_local_begin", True, begin)
            self.assertRaisesRegex(kvq.Error, "E_INCOMPLETE", first.end)  # it is there
            self.goes_on(begin, 0)
            first = begin()
            del first
            self.interrupted("kvq_local_begin", True, begin)
            self.goes_on(begin, 0)

    def test_what_belongs_to_a_queue(self):
        """A Local is closed before its queue is, which it refers to; a capture's file is closed."""
        close = unittest.mock.Mock(side_effect=lib.kvq_local_close)
        with self.client.queue() as queue, \
                unittest.mock.patch.object(lib, "kvq_local_close", close):
            for behind in (False, True):
                self.interrupted("kvq_local_open", behind, queue.local)
                self.assertEqual(close.call_count, int(behind))
            for moment in self.moments(queue.local):
                self.assertEqual(queue._locals, [])
            self.assertGreater(moment, 10)
        with tempfile.TemporaryDirectory() as folder:
            before = self.descriptors()
            self.interrupted("kvq_capture_open", True, lambda: kvq.Capture(
                os.path.join(folder, "tokens"), self.tokens.rows))
            self.assertEqual(self.descriptors(), before)

    def test_a_buffer_that_was_closed_before(self):
        """An attention that looks for it has staged nothing yet."""
        k, v = (self.client.array((1, 2, 128)) for _ in range(2))
        with self.queue.local(max_tokens=1024) as local:
            local.add(self.session)
            step = local.step([self.session], 1)
            q = np.zeros((1, 8, 128), np.float32)
            for _ in range(2):
                step.attend(0, q, k=k, v=v)
            self.client.find_buffer(k).close()
            staged = self.queue._staging.array(self.queue._staging.nbytes, np.uint8)
            staged[:] = 7
            for layer in range(2):
                self.assertRaisesRegex(ValueError, "closed before the step's end", step.attend,
                                       layer, q, k=v, v=v)
            self.assertTrue((staged == 7).all())
            step.abort()
