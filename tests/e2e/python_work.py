# SPDX-License-Identifier: Apache-2.0
"""What a queue keeps while requests are under way; python.py runs these."""
import copy
import gc
import os
import pickle
import signal
import sys
import threading
import unittest.mock
import weakref

from e2e_rig import Test, Tokens, kvq, np

from kvq._ffi import lib


class Readers(Test):
    """Reading back, where a session's count is another than this process knows."""

    def check(self, queue, session, k, asked, there, **options):
        """Of the tokens that were asked for those are read that are there."""
        got, _ = queue.read(session, 1, *asked, **options)
        first, end = there
        self.assertEqual(got.shape[0], end - first)
        if options:  # bf16, as uint16
            got = (got.astype(np.uint32) << 16).view(np.float32)
        self.assertLess(np.abs(got - k[first:end]).max(initial=0), 0.2)

    def test_that_a_writer_is_ahead_of(self):
        """Which has appended, and which has taken tokens back."""
        tokens = Tokens(1, 450)
        k = tokens.k[1]
        for layers, some in ((tokens.rows, False),
                             ([kvq.Layer(8, 2, 128, window=40, repeat=2)], True)):
            writer = self.client.session(layers, "f16", name="chat", max_rollback=60)
            tokens.feed(self.queue, writer, 400)
            with self.daemon.client() as other, other.queue() as queue:
                reader = other.session(name="chat", read_only=True)
                tokens.feed(self.queue, writer, 50)
                for dtype in ({}, {"dtype": "bf16"}):
                    self.check(queue, reader, k, (390, 60), (390, 450), **dtype)
                    self.check(queue, reader, k, (400, 10), (400, 410), **dtype)
                self.assertEqual(reader.tokens, 400)
                self.check(queue, reader, k, (390,), (390, 450))
                self.assertEqual(reader.tokens, 450)
                self.queue.truncate([writer], [410])
                self.check(queue, reader, k, (390, 60), (390, 410))
                self.check(queue, reader, k, (410, 5), (410, 410))
                kept = self.queue.read(writer, 1)[0].shape[0]
                self.check(queue, reader, k, (0, 450), (410 - kept, 410))
                self.assertEqual(kept < 410, some)
            writer.drop()


class Readings(Test):
    """Reading more than there is."""

    def test_the_room_for_it(self):
        """Is that for the tokens that are there, and a large one is given back."""
        tokens = Tokens(1, 300)
        session = self.client.session(tokens.rows, "f16")
        tokens.feed(self.queue, session, 300)
        queue = self.client.queue()
        for asked in (301, 1 << 20, 2**32 - 1):
            k, v = queue.read(session, 0, 100, asked)
            self.assertEqual((k.shape, v.shape), ((200, 2, 128),) * 2)
            self.assertLess(np.abs(k - tokens.k[0, 100:300]).max(), 1e-2)
        self.assertLess(queue._staging.nbytes, 1 << 20)
        self.assertEqual(queue.read(session, 0, 300, 2**32 - 1)[0].shape, (0, 2, 128))
        self.fails(kvq.Code.E_POSITION, queue.read, session, 0, 301, 5)
        with unittest.mock.patch.object(kvq.work, "KEPT", 1000):
            self.assertEqual(queue.read(session, 0, 0, 20)[0].shape, (20, 2, 128))
        self.assertIsNone(queue._staging)
        self.assertEqual(queue.read(session, 0, 7, 20)[0].shape, (20, 2, 128))

    def test_a_count_that_is_behind(self):
        """Of a session whose step was ended past its object."""
        tokens = Tokens(1, 300)
        session = self.client.session(tokens.rows, "f16")
        tokens.feed(self.queue, session, 300)
        session.tokens = 10
        self.assertEqual(self.queue.read(session, 0, 5, 200)[0].shape, (200, 2, 128))


class Queues(Test):
    def test_one_more_than_a_client_has(self):
        """The refusal says what to do, and doing it helps."""
        queues = [self.client.queue() for _ in range(63)]  # beside the test's own
        self.fails(kvq.Code.E_LIMIT, self.client.queue,
                   text=("64 queues", "close some, or connect another client"))
        queues[0].close()
        self.client.queue().nop()

    def test_threads_of_what_is_not_there(self):
        with unittest.mock.patch.dict(sys.modules):
            sys.modules.pop("torch", None)
            with self.assertRaisesRegex(ValueError, "torch is not imported"):
                self.queue.local(threads="torch")


class Tickets(Test):
    """The library writes to the entries of a ticket whenever its results come."""

    def setUp(self):
        super().setUp()
        self.session = self.client.session(Tokens(1, 1).rows, "f16")
        self.entries = kvq.make_entries([self.session])

    def submit(self, **work):
        """A ticket that nobody has, and a reference to its entries that does not keep them."""
        entries = self.entries.copy()
        self.queue.submit("nop", entries, **work)
        return weakref.ref(entries)

    def freed(self, entries):
        gc.collect()
        return entries() is None

    def test_one_that_is_let_go(self):
        """Its entries stay, also when its results have come with another call, until its queue, or
        its client, is closed."""
        queues = [self.queue, self.client.queue(), self.daemon.client().queue()]
        entries = []
        for self.queue in queues:
            entries.append(self.submit())
            self.assertFalse(self.freed(entries[-1]))
            self.queue.nop()
            self.assertFalse(self.freed(entries[-1]))
        queues[1].close()
        self.assertTrue(self.freed(entries[1]))
        queues[2].client.reattach()
        self.assertTrue(self.freed(entries[2]))
        queues[2].client.close()
        self.client.close()
        self.assertTrue(self.freed(entries[0]))

    def test_one_that_is_waited_for(self):
        """Is kept while it is open, and not longer."""
        self.daemon.pause()
        try:
            entries = self.entries.copy()
            entries["status"] = kvq.Code.E_DEADLINE  # of a call before
            ticket = self.queue.submit("nop", entries)
            entries = weakref.ref(entries)
            self.fails(kvq.Code.E_DEADLINE, ticket.wait, 0.001)
            number, ticket = ticket.number, None
            self.assertFalse(self.freed(entries))
        finally:
            self.daemon.process.send_signal(signal.SIGCONT)
        ticket, = self.queue._tickets
        self.assertEqual(ticket.number, number)
        self.assertEqual(ticket.wait()["status"].tolist(), [0])
        self.fails(kvq.Code.E_INVALID, ticket.wait)
        del ticket
        self.assertTrue(self.freed(entries))
        q = self.client.array((1, 8, 128))
        q = self.client.find_buffer(q).tensor(q)
        for _ in range(20):  # its own deadline closes a ticket, too; so does a request that fails
            late = self.queue.submit("attend", self.entries.copy(), deadline_ns=1, q=q, out=q)
            self.fails(kvq.Code.E_DEADLINE, late.wait)
            self.fails(kvq.Code.E_NO_STEP,
                       self.queue.submit("step_abort", self.entries.copy(), step=1).wait)
        self.assertEqual(self.queue._tickets, [])

    def test_an_interrupt(self):
        """Before a call's request was waited for, or right behind that: nothing is left open."""
        submit, wait = lib.kvq_submit, lib.kvq_wait

        def interrupted(function, before):
            def call(*arguments):
                patch.stop()
                if not before:
                    function(*arguments)
                raise KeyboardInterrupt
            return call
        for name, function, before in (("kvq_submit", submit, False), ("kvq_wait", wait, True),
                                       ("kvq_wait", wait, False)):
            for _ in range(10):  # more than may be open
                patch = unittest.mock.patch.object(lib, name, interrupted(function, before))
                patch.start()
                with self.assertRaises(KeyboardInterrupt):
                    self.queue.call("nop", self.entries)
                self.assertEqual(self.queue._tickets, [])


class Found(unittest.TestCase):
    """Which of a client's buffers holds an address, without one of the daemon's."""

    class Made:
        """One with a count of the looks at it."""

        def __init__(self, address, nbytes):
            self.address, self.nbytes, self.looks, self.is_open = address, nbytes, 0, True

        @property
        def pointer(self):
            self.looks += 1
            return self.is_open

    def setUp(self):
        self.buffers = kvq.buffers.Buffers()

    def make(self, *places):
        made = [self.Made(*place) for place in places]
        for buffer in made:
            self.buffers.append(buffer)
        return made

    def test_one_look(self):
        """At the one that it is, of many in any order; none, for what lies between them."""
        made = self.make(*((i * 37 % 200 * 100, 60) for i in range(200)))
        for buffer in made:
            self.assertIs(self.buffers.find(buffer.address + 5, buffer.address + 60), buffer)
            for start, end in ((buffer.address + 5, buffer.address + 61),
                               (buffer.address - 1, buffer.address + 5),
                               (buffer.address + 70, buffer.address + 80)):
                self.assertIsNone(self.buffers.find(start, end))
        self.assertEqual({buffer.looks for buffer in made}, {1})

    def test_an_older_one_of_another_thread(self):
        """What a find has sorted stands for it, also if another thread sets an older one."""
        sort, before = self.buffers._sort, self.buffers._sorted

        def sort_and_be_late():
            made = sort()
            self.buffers._sorted = before
            return made
        made, = self.make((100, 10))
        with unittest.mock.patch.object(self.buffers, "_sort", sort_and_be_late):
            self.assertIs(self.buffers.find(100, 110), made)
        self.assertIs(self.buffers.find(100, 110), made)

    def test_sorted_once(self):
        made = self.make((100, 10), (200, 10))
        with unittest.mock.patch.object(kvq.buffers.Buffers, "_sort", autospec=True,
                                        side_effect=kvq.buffers.Buffers._sort) as sort:
            for _ in range(3):
                self.assertIs(self.buffers.find(200, 210), made[1])
            self.assertEqual(sort.call_count, 1)
            self.buffers.remove(made[0])
            self.assertIsNone(self.buffers.find(100, 110))
            self.assertIs(self.buffers.find(200, 210), made[1])
            self.assertEqual(sort.call_count, 2)
            self.buffers.clear()
            self.assertIsNone(self.buffers.find(200, 210))

    def test_one_in_another(self):
        """As where tensors of a GPU are imported, and parts of them, too."""
        whole, part, last = self.make((0, 1000), (100, 100), (900, 100))
        for start, end, found in ((100, 200, part), (150, 201, whole), (300, 400, whole),
                                  (950, 1000, last), (899, 1000, whole), (899, 1001, None)):
            self.assertIs(self.buffers.find(start, end), found)
        part.is_open = False
        self.assertIs(self.buffers.find(100, 200), whole)
        whole.is_open = False
        self.assertIsNone(self.buffers.find(100, 200))

    def test_one_that_comes_while_others_are_sorted(self):
        """From another thread, or as Python collects what had one: the next find knows of it."""
        first, second = self.make((100, 10), (300, 10))
        late = self.Made(500, 10)

        class Disturbing(self.Made):
            """The first look at its address, which is sorting's, lets others come and go."""

            @property
            def address(of):
                if late not in self.buffers:
                    self.buffers.append(late)
                    self.buffers.remove(first)
                return 200

            @address.setter
            def address(self, _):
                pass
        self.buffers.append(Disturbing(200, 10))
        self.assertIs(self.buffers.find(300, 310), second)
        self.assertIs(self.buffers.find(500, 510), late)
        self.assertIsNone(self.buffers.find(100, 110))


class Given(Test):
    """What requests are made of, as each layer of a model does."""

    def test_counts(self):
        """In whatever form they are given, entries are the same; what they cannot be is refused."""
        sessions = [unittest.mock.Mock(handle=n, tokens=10 * n) for n in (1, 2, 3)]
        forms = (2, np.uint8(2), [2, 2, 2], (2, 2, 2), np.full(3, 2, np.int64),
                 np.full(3, 2, np.uint32), np.array(2))
        for append in forms:
            for queries in forms:
                entries = kvq.make_entries(sessions, append, queries)
                self.assertEqual(
                    [tuple(e) for e in entries.tolist()],
                    [(n, 10 * n, 2 * n - 2, 2 * n - 2, 2, 2, 0, 0, 0) for n in (1, 2, 3)])
        entries = kvq.make_entries(sessions, [3, 0, 5], np.array([1, 65535, 0], np.uint32))
        self.assertEqual(entries["row"].tolist(), [0, 3, 3])
        self.assertEqual(entries["q_row"].tolist(), [0, 1, 65536])
        self.assertEqual(len(kvq.make_entries([], 3, 3)), 0)
        for wrong, error, text in (
                (-1, ValueError, "values -1 to -1; they can be 0 to 4294967295"),
                (1 << 32, ValueError, "they can be 0 to 4294967295"),
                ([1, 2, -3], ValueError, "values -3 to 2"), ([1, 2], ValueError, r"shape \(2,\)"),
                (True, TypeError, "dtype bool"), ([1, True, 1.5], TypeError, "dtype float64"),
                (np.zeros((3, 1), np.uint32), ValueError, r"shape \(3, 1\)"),
                ([1 << 31] * 3, ValueError, "6442450944 rows of append together")):
            with self.assertRaisesRegex(error, text):
                kvq.make_entries(sessions, wrong)
        for wrong in (65536, [1, 65536, 1], np.full(3, 65536, np.uint32)):
            with self.assertRaisesRegex(ValueError, "65536; they can be 0 to 65535"):
                kvq.make_entries(sessions, 1, wrong)

    def test_buffers_of_the_layers_before(self):
        """Attention in this process looks at them again where a buffer was closed, and only then:
        a model's last layer would look at those of all layers."""
        other = self.client.buffer(4096)
        with self.queue.local() as local:
            local._given = given = [Found.Made(100, 10) for _ in range(3)]
            for _ in range(5):
                local._check_given()
            self.assertEqual([buffer.looks for buffer in given], [1, 1, 1])
            given[2].is_open = False
            other.close()
            for _ in range(2):
                with self.assertRaisesRegex(ValueError, "closed before the step's end"):
                    local._check_given()
            local._given = []


class Buffers(Test):
    """Buffers that come and go while others are looked for."""

    def tearDown(self):
        gc.collect()  # mocks hold arrays, in circles
        super().tearDown()

    def test_a_look_for_each_tensor(self):
        """Of a call, however many there are."""
        first, second = self.client.buffer(4096), self.client.buffer(4096)
        array, plain = second.array(4), np.zeros(3, np.int32)
        first.close()
        with unittest.mock.patch.object(self.client._buffers, "find",
                                        side_effect=self.client._buffers.find) as looked:
            one, none, two = self.queue._place([array, None, plain])
        self.assertEqual(looked.call_count, 2)
        self.assertEqual((one.array is array, one.buffer is second, one.copied),
                         (True, True, False))
        self.assertEqual((two.array is plain, two.buffer is self.queue._staging, two.copied),
                         (False, True, True))
        self.assertEqual((one.offset, two.offset, none), (0, 0, None))

    def test_views_of_all_kinds(self):
        """Are found by the first byte and the last that they have."""
        buffers = [self.client.buffer(4096) for _ in range(20)]
        for buffer in buffers:
            whole = buffer.array((8, 8, 16))
            for array in (whole, whole[:, ::2], whole[::-1, 2:], whole.T, whole[7:, 7:, 15:],
                          buffer.array(4096, np.uint8)[-1:], whole[3, 4, 5:6]):
                self.assertIs(self.client.find_buffer(array), buffer)
        wide = np.ndarray((2, 8), np.uint8, buffers[3]._memory, strides=(4088, 1))
        self.assertIs(self.client.find_buffer(wide), buffers[3])
        beyond = np.lib.stride_tricks.as_strided(wide, (2, 9))  # a byte of what lies behind it
        self.assertIsNone(self.client.find_buffer(beyond))
        for other in ("text", None, 3, [1, 2], np.float32(3), beyond + 1):
            self.assertIsNone(self.client.find_buffer(other))

    def test_pages_that_are_refused(self):
        """Nothing is left of the call."""
        cache = self.client.buffer(1 << 16).array((2, 16, 2, 256), np.float32)[..., ::2]
        session = self.client.session([kvq.Layer(8, 2, 128)], "f16")
        before = list(self.client._buffers)
        with self.queue.step([session], 1) as step:
            with self.assertRaisesRegex(ValueError, "must be contiguous"):
                step.append(0, pages=kvq.Pages(cache, cache, [[0]]))
            step.abort()
        self.assertEqual(self.client._buffers, before)

    def test_array_of_a_client(self):
        """Its buffer stays without it, until it is closed; the memory goes with the array then."""
        array = self.client.array((4, 4))
        array[...] = 3
        buffer, self.memory = self.client.find_buffer(array), []
        weakref.finalize(buffer._memory, self.memory.append, "gone")
        del array
        gc.collect()
        self.assertEqual((self.client._buffers, self.memory), ([buffer], []))
        array = buffer.array((4, 4))
        self.client.find_buffer(array).close()
        self.assertEqual((self.client._buffers, self.memory), ([], []))
        self.assertEqual(array.sum(), 48)
        del array
        gc.collect()
        self.assertEqual(self.memory, ["gone"])


class InUse(Test):
    """A buffer that another thread's call works with."""

    def test_attention_in_this_process(self):
        """Its buffers cannot be closed meanwhile: the library would read memory that is gone."""
        tokens = Tokens(1, 10)
        session = self.client.session(tokens.rows, "f16")
        made = self.client.buffer(1 << 20, daemon_made=True)
        said = []

        def attend(*arguments):
            def close():
                try:
                    made.close()
                    said.append(None)
                except BufferError as error:
                    said.append(str(error))
            thread = threading.Thread(target=close)
            thread.start()
            thread.join()
            return call(*arguments)
        call = lib.kvq_local_attend
        with self.queue.local(require=True) as local:
            local.add(session)
            step = local.step([session], 10)
            k, v, q = (made.take((10, heads, 128)) for heads in (2, 2, 8))
            with unittest.mock.patch.object(lib, "kvq_local_attend", attend):
                step.attend(0, q, k=k, v=v)
            step.abort()
        self.assertEqual(len(said), 1)
        self.assertIn("1 calls of other threads use this buffer", said[0])
        del k, v, q
        gc.collect()
        made.close()


class Failures(Test):
    """What can be done behind a call that failed."""
    DAEMON = {"pool_bytes": "4mb", "extent_bytes": "2mb", "backend": "cpu"}

    def test_an_error_in_another_process(self):
        """Pools of processes pickle what their workers raise."""
        error = self.fails(kvq.Code.E_NO_SESSION, self.client.session, name="nobody")
        for made in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            self.assertEqual((made.code, made.text, str(made)),
                             (error.code, error.text, str(error)))

    def test_a_drop_that_is_refused(self):
        """Leaves the handle, which can be closed."""
        tokens = Tokens(1, 1)
        with self.client.session(tokens.rows, "f16", name="it"), \
                self.daemon.client() as other:
            reader = other.session(name="it", read_only=True)
            self.fails(kvq.Code.E_READ_ONLY, reader.drop)
            reader.close()
            shown = self.daemon.ctl("session", "show", "it")
            self.assertEqual(shown["readers"], 0, shown)

    def test_a_fork_while_a_daemon_starts(self):
        """The child has a lock that nobody holds, though a thread of its parent had it."""
        with kvq.private._lock:
            child = os.fork()
            if child == 0:
                os._exit(0 if kvq.private._lock.acquire(False) else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_options_that_are_none(self):
        """A flag is no word, an empty name is none, and a prefix is one session's."""
        rows, ids = Tokens(1, 5).rows, np.ones((2, 200), np.int32)
        for flag in ("read_only", "take_over", "must_exist"):
            for value in ("no", 0, 1, None):
                with self.assertRaisesRegex(TypeError, f"^{flag} is {value!r}; .* True or False"):
                    self.client.session(rows, "f16", name="it", **{flag: value})
        with self.assertRaisesRegex(ValueError, "^name is ''; "):
            self.client.session(rows, "f16", name="")
        with self.assertRaisesRegex(ValueError, r"shape \(2, 200\); expected the ids of one"):
            self.client.session(rows, "f16", prefix=ids, model="m")
        with self.client.session(rows, "f16", prefix=ids[:1], model="m", must_create=np.True_,
                                 read_only=False) as session:
            self.assertEqual((session.tokens, session.info()["name"]), (0, ""))

    def test_no_room_in_this_process(self):
        """The step stays for the sessions that found none, and ends when there is room."""
        tokens = Tokens(3, 1200)
        n = 1100  # 2.2 MiB in two layers
        large, small, other = (self.client.session(tokens.rows, "f16") for _ in range(3))
        tokens.feed(self.queue, other, n, attend=False)
        own = {x: self.client.array((n + 1, 2, 128)) for x in "kv"}
        for x in "kv":
            own[x][...] = getattr(tokens, x)[0, :n + 1]
        q = np.zeros((2, 8, 128), np.float32)
        with self.queue.local(max_tokens=2048, require=True) as local:
            for session in (large, small):
                local.add(session)
            step = local.step([large, small], [n, 1])
            for layer in range(2):
                step.attend(layer, q, **own, queries=[1, 1])
            self.fails(kvq.Code.E_NO_MEMORY, step.end)
            self.assertEqual((large.tokens, small.tokens, step.open), (0, 1, True))
            self.fails(kvq.Code.E_NO_MEMORY, step.end)
            other.drop()
            step.end()
            self.assertEqual((large.refresh(), small.refresh(), step.open), (n, 1, False))
            np.testing.assert_array_equal(self.queue.read(large, 1)[0],
                                          np.float32(np.float16(own["k"][:n])))
            with self.assertRaises(kvq.Error):  # and a block that ends in an error leaves nothing
                with local.step([small], [n]) as step:
                    for layer in range(2):
                        step.attend(layer, q[:1], k=own["k"][:n], v=own["v"][:n],
                                    queries=[1])
            self.assertFalse(step.open)
            with local.step([small], [0]):
                pass
            self.assertEqual(small.refresh(), 1)

    def test_what_differs(self):
        """Is named with both values; of another model nothing can be taken as it is."""
        rows = [kvq.Layer(8, 2, 128, window=16, softcap=5, repeat=2)]
        with self.client.session(rows, "f16", name="differs", model="m"):
            for more, words in (({"window": 32}, "window in layer 0 (16 there, 32 asked for)"),
                                ({"softcap": 2}, "softcap in layer 0 (5 there, 2 asked for)"),
                                ({"q_heads": 4}, "query heads in layer 0 (8 there, 4 asked for)"),
                                ({"repeat": 3}, "number of layers (2 there, 3 asked for)")):
                other = kvq.Layer(**{"q_heads": 8, "kv_heads": 2, "head_dim": 128, "window": 16,
                                     "softcap": 5, "repeat": 2, **more})
                self.fails(kvq.Code.E_EXISTS, self.client.session, [other], "f16",
                           name="differs", text=(words, "open it without layers"))
            error = self.fails(kvq.Code.E_EXISTS, self.client.session, rows, "f16",
                               name="differs", model="another",
                               text=("model fingerprint", "use another name"))
            self.assertNotIn("without layers", error.text)

    def test_what_there_is(self):
        """A session that is opened as it is says what it was made with."""
        rows = [kvq.Layer(8, 2, 128, window=16, softcap=5, scale=0.5), kvq.Layer(8, 2, 128),
                kvq.Layer(8, 2, 128, kv_from=1)]
        with self.client.session(rows, "f16", name="there", max_rollback=7) as made:
            self.assertEqual(made.layers, rows)
            with self.client.session(name="there", read_only=True) as found:
                self.assertEqual(found.info()["max_rollback"], 7)
                rows[1].scale = rows[2].scale = float(np.float32(128 ** -0.5))
                self.assertEqual([(r.window, r.softcap, r.scale, r.kv_from, r.dim_of_v)
                                  for r in found.layers],
                                 [(r.window, r.softcap, r.scale, r.kv_from, 128) for r in rows])

    def test_a_tensor_that_is_named(self):
        """A request that is refused as a whole says which tensor it was."""
        tokens = Tokens(1, 4, layers=1)
        session = self.client.session(tokens.rows, "f16")
        own = self.client.array((4, 2, 128))
        tensor = self.client.find_buffer(own).tensor(own)
        with self.queue.step([session], 4) as step:
            for fields, words in (({"token_stride": 3}, "k has the token_stride 3, which is no "
                                                        "multiple of the 4 bytes of its dtype"),
                                  ({"offset": 2 ** 40}, f"k begins at byte {2 ** 40}")):
                bad = self.client.find_buffer(own).tensor(own)
                for name, value in fields.items():
                    setattr(bad, name, value)
                with self.assertRaisesRegex(kvq.Error, words):
                    self.queue.call("append", step.entries, step=step.number, layer=0, k=bad,
                                    v=tensor)
            step.abort()
