# SPDX-License-Identifier: Apache-2.0
"""Steps that nobody ends, and what errors and objects say; python.py runs these."""
import ast
import gc
import glob
import os
import re
import signal
import tempfile
import threading
import unittest.mock

from e2e_rig import ROOT, Test, Tokens, kvq, np

import kvq.errors
import kvq.shown
import kvq.steps
from kvq._ffi import lib


class Ends(Test):
    """A session that is in a step is busy until the step is over: none is ever left behind."""

    def setUp(self):
        super().setUp()
        self.tokens = Tokens(1, 10)
        self.session = self.client.session(self.tokens.rows, "f16")

    def tearDown(self):
        self.k = self.v = self.q = None
        super().tearDown()

    def begin(self):
        """A step of one token, all of it appended."""
        step = self.queue.step([self.session], 1)
        for layer in range(2):
            step.append(layer, self.tokens.k[layer, :1], self.tokens.v[layer, :1])
        return step

    def tickets(self, queue=None):
        """All that a queue has."""
        tickets = []

        def take():
            while True:
                tickets.append((queue or self.queue).submit("nop", []))
        self.fails(kvq.Code.E_CREDITS, take)
        return tickets

    def begin_elsewhere(self):
        """Through a queue that has tickets."""
        with self.client.queue() as other:
            other.step([self.session], 1).abort()

    def test_without_a_ticket(self):
        """The step stays open, and ends behind a wait; an abort needs none."""
        step, tickets = self.begin(), self.tickets()
        self.fails(kvq.Code.E_CREDITS, step.end)
        tickets.pop().wait()
        step.end()
        self.assertEqual(self.session.refresh(), 1)
        step = self.queue.step([self.session], 1)
        tickets += self.tickets()
        step.abort()
        self.begin_elsewhere()
        for ticket in tickets:
            ticket.wait()

    def test_a_block_without_a_ticket(self):
        """Its step is aborted, whether the block raised or not."""
        for error in (None, ZeroDivisionError):
            with self.assertRaises(error or kvq.Error), self.begin():
                tickets = self.tickets()
                if error:
                    raise error
            self.begin_elsewhere()
            for ticket in tickets:
                ticket.wait()
        self.assertEqual(self.session.refresh(), 0)

    def test_that_is_let_go(self):
        """Nobody has it any more: the queue's next call aborts it, whichever that is, and says what
        there is to say of itself."""
        self.begin()
        self.begin().abort()
        self.begin()
        self.fails(kvq.Code.E_INVALID, self.queue.truncate, [self.session], 5, text="truncate")
        with self.client.queue() as other:
            other.step([self.session], 1).abort()
        self.session.tokens = 3
        self.fails(kvq.Code.E_POSITION, self.begin)  # which the daemon never began
        self.session.tokens = 0
        self.assertEqual(self.queue._left, [])

    def test_that_is_let_go_without_a_credit(self):
        """No call waits for one to abort it, past what the call itself may take; the wait that
        frees one aborts it."""
        step, tickets = self.begin(), self.tickets()
        self.assertEqual(len(tickets), kvq.work.CREDITS)
        del step
        with unittest.mock.patch.object(lib, "kvq_step_abort") as abort:
            self.queue.order()
            self.fails(kvq.Code.E_CREDITS, self.queue.submit, "nop", [])
            tickets.pop().wait()
            abort.assert_not_called()
        self.begin().abort()  # which waits for its own answer anyway
        for ticket in tickets:
            ticket.wait()

    def test_that_is_let_go_beside_a_slow_request(self):
        """A wait with a timeout does not wait for its abort, which comes behind the request."""
        step, ticket = self.begin(), self.queue.submit("nop", [])
        del step
        with unittest.mock.patch.object(lib, "kvq_step_abort") as abort, \
                unittest.mock.patch.object(lib, "kvq_wait", lambda *_: int(kvq.Code.E_DEADLINE)):
            self.fails(kvq.Code.E_DEADLINE, ticket.wait, 0.01)
            abort.assert_not_called()
        ticket.wait()
        self.begin_elsewhere()

    def test_of_a_queue_that_closes(self):
        """Is aborted with it, also where all tickets are open; so is one that is let go."""
        for tickets in (False, True):
            queue = self.client.queue()
            step = queue.step([self.session], 1)
            another = self.client.session(self.tokens.rows, "f16")
            queue.step([another], 1)
            if tickets:
                self.tickets(queue)
            queue.close()
            self.begin().abort()
            self.queue.step([another], 1).abort()
            self.assertRaisesRegex(ValueError, "the queue is closed", step.end)

    def test_of_a_connection_that_was_lost(self):
        """Has ended; another step may have its number by now."""
        lost = self.begin()
        self.client._connection += 1
        step = self.queue.step([self.client.session(self.tokens.rows, "f16")], 1)
        step.number, number = lost.number, step.number
        self.assertRaisesRegex(ValueError, "the step has ended", lost.end)
        step.number = number
        del lost
        step.abort()
        self.client._connection -= 1

    def test_an_interrupt_before_the_end(self):
        """Of a block."""
        step = self.begin()
        with unittest.mock.patch.object(kvq.steps, "make_entries", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                step.__exit__(None, None, None)
        self.begin().abort()

    def local_step(self, local):
        """Likewise, of this process."""
        step = local.step([self.session], 1)
        for layer in range(2):
            step.attend(layer, self.q, k=self.k, v=self.v)
        return step

    def arrays(self):
        """K, V and Q of one token, in buffers."""
        self.k, self.v, self.q = (self.client.array((1, heads, 128)) for heads in (2, 2, 8))

    def test_of_this_process(self):
        """Without a ticket, and let go."""
        self.arrays()
        for through in ({}, {"KVQ_LOCAL": "daemon"}):
            with unittest.mock.patch.dict(os.environ, through), \
                    self.queue.local(max_tokens=1024) as local:
                local.add(self.session)
                before = self.session.tokens
                step, tickets = self.local_step(local), self.tickets()
                self.fails(kvq.Code.E_CREDITS, step.end)
                self.assertTrue(step.open)
                tickets.pop().wait()
                step.end()
                self.assertEqual(self.session.refresh(), before + 1)
                step = self.local_step(local)
                tickets.append(self.queue.submit("nop", []))
                step.abort()
                for ticket in tickets:
                    ticket.wait()
                self.local_step(local)
                gc.collect()
                self.local_step(local).abort()
                self.local_step(local)
                gc.collect()
                local.remove(self.session)
                local.add(self.session)
                step, tickets = self.local_step(local), self.tickets()
                step.abort()
                for ticket in tickets:
                    ticket.wait()
            self.begin().abort()

    def test_an_abort_behind_the_end(self):
        """Leaves the step alone that was begun since."""
        self.arrays()
        for through in ({}, {"KVQ_LOCAL": "daemon"}):
            with unittest.mock.patch.dict(os.environ, through), \
                    self.queue.local(max_tokens=1024) as local:
                local.add(self.session)
                ended, before = self.local_step(local), self.session.tokens
                ended.end()
                step = self.local_step(local)
                ended.abort()
                step.end()
                self.assertEqual(self.session.refresh(), before + 2)

    def test_what_an_incomplete_end_says(self):
        """That its session stands as before, in this process as through the daemon."""
        self.arrays()
        for through in ({}, {"KVQ_LOCAL": "daemon"}):
            with unittest.mock.patch.dict(os.environ, through), \
                    self.queue.local(max_tokens=1024) as local:
                local.add(self.session)
                step = local.step([self.session], 1)
                step.attend(0, self.q, k=self.k, v=self.v)
                self.fails(kvq.Code.E_INCOMPLETE, step.end,
                           text="the session stands as before the step")
                self.local_step(local).abort()


class Meanwhile(Test):
    """Buffers that another thread closes while a call is under way."""

    def test_a_whole_step(self):
        """BufferError, and the step has what it was given."""
        tokens = Tokens(1, 10)
        session = self.client.session(tokens.rows, "f16")
        arrays = [self.client.array((1, 2, 128)) for _ in range(3)]
        said = []

        def within(name, *closed):
            call = getattr(lib, name)

            def during(*arguments):
                def close():
                    for array in closed:
                        try:
                            self.client.find_buffer(array).close()
                        except BufferError:
                            said.append(name)
                thread = threading.Thread(target=close)
                thread.start()
                thread.join()
                return call(*arguments)
            return unittest.mock.patch.object(lib, name, during)
        with within("kvq_step", *arrays):
            self.queue.step_whole([session], 1, arrays[:2], arrays[1:])
        with self.queue.local(require=True) as local:
            local.add(session)
            step = local.step([session], 1)
            with within("kvq_local_end", *arrays):
                step.end(arrays[:2], arrays[1:])
        self.assertEqual(said, 3 * ["kvq_step"] + 3 * ["kvq_local_end"])
        self.assertEqual(session.refresh(), 2)


class Words(Test):
    """Errors name what there is in Python."""

    def test_functions_of_c(self):
        """Each that an error text of the library's names has its name here."""
        pattern = re.compile(r'"[^"\n]*"')
        for folder in ("client", "client/in_context", "daemon/core/request",
                       "daemon/core/residency", "daemon/core/session"):
            for name in os.listdir(os.path.join(ROOT, folder)):
                if not name.endswith(".c"):
                    continue
                with open(os.path.join(ROOT, folder, name), encoding="utf-8") as file:
                    texts = " ".join(pattern.findall(file.read()))
                for function in re.findall(r"\bkvq_[a-z_]+\b", texts):
                    if hasattr(lib, function):
                        self.assertIn(function, kvq.errors._HERE, f"{folder}/{name}")

    def test_imports(self):
        """A module has no name that it does not use."""
        modules = glob.glob(os.path.join(os.path.dirname(kvq.__file__), "*.py"))
        self.assertGreater(len(modules), 10)
        for module in modules:
            if os.path.basename(module) == "__init__.py":
                continue  # whose names are others'
            with open(module, encoding="utf-8") as file:
                nodes = list(ast.walk(ast.parse(file.read())))
            taken = {(a.asname or a.name).partition(".")[0] for node in nodes
                     if isinstance(node, (ast.Import, ast.ImportFrom)) for a in node.names}
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            self.assertEqual(taken - used - {"annotations"}, set(), module)

    def test_what_they_become(self):
        session = self.client.session([kvq.Layer(8, 2, 128)], "f16")
        with self.queue.local(require=True) as local:
            error = self.fails(kvq.Code.E_STALE, local.step, [session], 1, text="Local.add() it")
            self.assertNotIn("kvq_", error.text)

    def test_arguments(self):
        """What cannot be meant is refused, by its name."""
        self.assertEqual(len(self.queue.submit("nop", []).wait()), 0)
        session = self.client.session([kvq.Layer(8, 2, 128)], "f16")
        self.assertRaisesRegex(ValueError, "seconds is nan", self.queue.attend, [session], 0,
                               np.zeros((1, 8, 128), np.float32), timeout=float("nan"))
        self.assertRaisesRegex(ValueError, "kv_from", self.client.session,
                               [kvq.Layer(8, 2, 128), kvq.Layer(8, 2, 128, kv_from=2**32 - 1)])
        error = self.fails(kvq.Code.E_NO_DAEMON, kvq.Client, "/tmp/kvq_local/kvq_connect")
        self.assertIn("/tmp/kvq_local/kvq_connect/attach.sock", error.text)
        kvq.Client(os.fsencode(self.daemon.directory)).close()
        before = list(self.client._buffers)
        self.assertRaises(TypeError, self.client.array, (1000, 1000), object)
        self.assertEqual(self.client._buffers, before)
        out, lse = kvq.merge_states(np.ones(8), 1.0, np.ones(8), 2.0)
        self.assertEqual((out.shape, lse.shape), ((8,), ()))

    def test_a_session_of_a_closed_client(self):
        """Is closed: with its client."""
        client = self.daemon.client()
        with client.session([kvq.Layer(8, 2, 128)], "f16") as session:
            client.close()
        session.close()

    def test_pages_of_float16_bits(self):
        """Are what dtype says they are."""
        pages = self.client.array((2, 16, 2, 128), np.uint16)
        values = np.random.default_rng(1).standard_normal(pages.shape).astype(np.float16)
        pages[...] = values.view(np.uint16)
        for dtype, want in (("f16", np.float32(values)),
                            (None, (np.uint32(pages) << 16).view(np.float32))):
            session = self.client.session([kvq.Layer(8, 2, 128)], dtype or "bf16")
            with self.queue.step([session], 20) as step:
                step.append(0, pages=kvq.Pages(pages, pages, [[0, 1]]), dtype=dtype)
            got, _ = self.queue.read(session, 0)
            np.testing.assert_allclose(got, want.reshape(32, 2, 128)[:20], rtol=2 ** -7, atol=1e-6)


class Shows(Test):
    """What objects say of themselves: without a request to the daemon, which stands still."""

    def setUp(self):
        super().setUp()
        self.rows = [kvq.Layer(8, 2, 128, repeat=2)]

    def shown(self, thing, expected):
        self.daemon.pause()
        try:
            self.assertRegex(repr(thing), f"^<kvq.{type(thing).__name__} {expected}>$")
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)

    def test_sessions(self):
        """By name and format, also where others have made them, and forks."""
        tokens = Tokens(1, 300)
        made = self.client.session(tokens.rows, "oscar2", name="chat-1")
        tokens.feed(self.queue, made, 300, attend=False)
        self.assertEqual((made.name, made.format), ("chat-1", "oscar2"))
        self.shown(made, "'chat-1' oscar2: 300 tokens, 2 layers")
        with self.daemon.client() as other:
            found = other.session(name="chat-1", read_only=True)
            self.assertEqual((found.name, found.format), ("chat-1", "oscar2"))
            self.shown(found, "'chat-1' oscar2: 300 tokens, 2 layers, read-only")
        self.shown(found, "'chat-1' oscar2: 300 tokens, 2 layers, closed")
        fork, = self.queue.fork([made])
        self.assertEqual((fork.name, fork.format), (None, "oscar2"))
        self.shown(fork, "oscar2: 300 tokens, 2 layers")
        with self.assertRaises(AttributeError):
            fork.name = "other"
        made.drop()
        self.shown(made, "'chat-1' oscar2: 300 tokens, 2 layers, closed")

    def test_the_client_and_what_it_has(self):
        client = self.daemon.client()
        of = f"of '{self.daemon.directory}': "
        self.shown(client, of + "0 queues, 0 sessions, 0 buffers")
        queue, session = client.queue(), client.session(self.rows, "f16")
        buffers = [client.buffer(4096, daemon_made=made) for made in (False, True)]
        self.shown(client, of + "1 queue, 1 session, 2 buffers")
        self.shown(queue, "open: 0 tickets under way")
        for buffer, by in zip(buffers, ("", ", made by the daemon")):
            self.shown(buffer, f"of 4096 bytes at {buffer.address:#x}{by}: open")
        ticket = queue.submit("nop", kvq.make_entries([session]))
        self.shown(queue, "open: 1 ticket under way")
        self.shown(ticket, f"{ticket.number} of 1 session: open")
        ticket.wait()
        self.shown(ticket, f"{ticket.number} of 1 session: done")
        step = queue.step([session], 1)
        self.shown(step, f"{step.number} of 1 session: open")
        step.abort()
        self.shown(step, "of 1 session: ended")
        local = queue.local(max_tokens=1024)
        local.add(session)
        self.shown(local, "on 'host': open, no step under way")
        step = local.step([session], 1)
        self.shown(local, "on 'host': open, a step under way")
        self.shown(step, "of 1 session: open")
        client.close()
        for thing, says in ((client, of), (queue, ""), (local, "on 'host': "),
                            (buffers[0], "of 4096 bytes at 0x[0-9a-f]+: "),
                            (buffers[1], "of 4096 bytes at 0x[0-9a-f]+, made by the daemon: ")):
            self.shown(thing, says + "closed")
        self.shown(step, "of 1 session: ended")

    def test_a_capture(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens.kvq")
            with kvq.Capture(path, self.rows) as capture:
                self.shown(capture, f"'{path}': open")
            self.shown(capture, f"'{path}': closed")

    def test_what_was_not_made(self):
        """As a debugger shows it, within its __init__."""
        for name in kvq.__all__:
            kind = getattr(kvq, name)
            if isinstance(kind, type) and kind.__repr__ is kvq.shown.Shown.__repr__:
                self.assertRegex(repr(kind.__new__(kind)), f"^<kvq.{name} .*(not open|ended)")
        for kind in (kvq.Client, kvq.Session, kvq.Queue, kvq.Buffer, kvq.DeviceBuffer, kvq.Ticket,
                     kvq.Step, kvq.Local, kvq.LocalStep, kvq.Bucket, kvq.Capture):
            self.assertIs(kind.__repr__, kvq.shown.Shown.__repr__)
