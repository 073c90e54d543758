# SPDX-License-Identifier: Apache-2.0
"""Everything a session can do besides growing: truncate, fork, accept, tickets, paged caches,
buffers, reading back, and who may hold it."""
import mmap
import os
import time

from e2e_rig import (Test, Tokens, attend64, feed, kvq, less, long_emulated, np, read_all,
                     relative_error)


class Change(Test):
    """Changes of course leave exactly what a session that never went there has."""

    def twin(self, tokens, format, n, **options):
        """A session that got n tokens, one step each for the last eight."""
        session = self.client.session(tokens.rows, format, **options)
        tokens.feed(self.queue, session, n - 8, attend=False)
        for _ in range(8):
            tokens.feed(self.queue, session, 1, attend=False)
        return session

    def same(self, tokens, one, other, about):
        self.assertEqual(one.tokens, other.tokens, about)
        self.assertTrue(read_all(self.queue, one, tokens.layers)
                        == read_all(self.queue, other, tokens.layers), about)
        for layer in range(tokens.layers):
            answers = [self.queue.attend([s], layer, tokens.q[layer, :2], 2) for s in (one, other)]
            for a, b in zip(*answers):
                self.assertEqual(a.tobytes(), b.tobytes(), about)

    def test_truncate_within_rollback(self):
        """A draft that was taken back has never been, wherever the units end."""
        tokens, drafts = Tokens(1, 400), Tokens(2, 400)
        for format in less(("f16", "oscar2", "oscar3"), ("oscar2",)):
            for n in less((100, 128, 130, 250, 256, 300), (100, 130, 256)):
                drafted = self.twin(tokens, format, n, max_rollback=16)
                plain = self.twin(tokens, format, n, max_rollback=16)
                feed(self.queue, [drafts], [drafted], [16], attend=False)
                self.queue.truncate([drafted], n)
                for session in (drafted, plain):
                    tokens.feed(self.queue, session, 40, attend=False)
                self.same(tokens, drafted, plain, f"{format} at {n}")
                drafted.close()
                plain.close()

    def test_truncate_too_deep(self):
        tokens = Tokens(1, 300)
        session = self.twin(tokens, "oscar2", 300, max_rollback=4)
        before = read_all(self.queue, session, 2)
        error = self.fails(kvq.Code.E_ROLLBACK, self.queue.truncate, [session], 290,
                           text=("10 tokens back", "296", "max_rollback"))
        self.assertEqual(error.entries["value"][0], 296)
        self.assertEqual(session.refresh(), 300)
        self.assertTrue(read_all(self.queue, session, 2) == before)
        self.fails(kvq.Code.E_INVALID, self.queue.truncate, [session], 301, text=("301", "300"))
        self.queue.truncate([session], 296)
        self.assertEqual(session.refresh(), 296)

    def test_truncate_of_a_batch(self):
        """One that cannot does not keep the others from it."""
        tokens = Tokens(1, 100)
        good, bad = (self.twin(tokens, "f16", 100, max_rollback=r) for r in (8, 0))
        self.fails(kvq.Code.E_ROLLBACK, self.queue.truncate, [bad, good], [95, 95])
        self.assertEqual((bad.refresh(), good.refresh()), (100, 95))

    @long_emulated
    def test_fork(self):
        """A fork goes its own way, and so does its source."""
        tokens, others = Tokens(1, 700), Tokens(2, 700)
        for format in ("f16", "oscar2", "oscar2-xh"):
            source = self.twin(tokens, format, 600, max_rollback=64)
            used = self.daemon.status()["pool_used_bytes"]
            fork, = self.queue.fork([source])
            shared = self.daemon.status()["pool_used_bytes"] - used
            self.assertLess(shared, used / 2, "what is packed is shared")
            self.same(tokens, source, fork, format)
            feed(self.queue, [others], [fork], [60], attend=False)
            tokens.feed(self.queue, source, 60, attend=False)
            plain = self.twin(tokens, format, 600, max_rollback=64)
            tokens.feed(self.queue, plain, 60, attend=False)
            self.same(tokens, source, plain, format)
            source.close()
            plain.close()
            self.assertEqual(fork.refresh(), 660)  # outlives its source
            read_all(self.queue, fork, 2)
            fork.close()

    def test_fork_earlier(self):
        tokens = Tokens(1, 400)
        source = self.twin(tokens, "oscar2", 400, max_rollback=64)
        fork, = self.queue.fork([source], at=350)
        plain = self.twin(tokens, "oscar2", 350, max_rollback=64)
        self.same(tokens, fork, plain, "fork at 350")
        error = self.fails(kvq.Code.E_ROLLBACK, self.queue.fork, [source], at=77,
                           text=("forked at 77",))
        self.assertLess(error.entries["value"][0], 77)
        self.fails(kvq.Code.E_POSITION, self.queue.fork, [source], at=401, text=("401", "400"))

    def test_accept(self):
        """Of a tree of drafts only the chosen path stays."""
        tokens, tree = Tokens(1, 300), Tokens(2, 300)
        keep = [0, 2, 3, 7]
        for format in ("f16", "oscar2"):
            for n in (60, 126, 250):
                session = self.twin(tokens, format, n, max_rollback=16)
                plain = self.twin(tokens, format, n, max_rollback=16)
                at = slice(n, n + 9)
                feed(self.queue, [tree], [session], [9], attend=False)
                self.queue.accept([session], 9, [keep])
                self.assertEqual(session.tokens, n + 4)
                with self.queue.step([plain], 4) as step:
                    for layer in range(2):
                        step.append(layer, tree.k[layer, at][keep], tree.v[layer, at][keep])
                self.same(tokens, session, plain, f"{format} at {n}")
                self.queue.accept([session], 4, [[]])
                self.assertEqual(session.refresh(), n)
                session.close()
                plain.close()

    def test_bad_accept(self):
        tokens = Tokens(1, 100)
        session = self.twin(tokens, "f16", 100, max_rollback=16)
        for keep in ([3, 2], [1, 1], [-1], [4]):
            self.fails(kvq.Code.E_INVALID, self.queue.accept, [session], 4, [keep],
                       text="ascending")
        self.fails(kvq.Code.E_ROLLBACK, self.queue.accept, [session], 17, [[0]], text="17 tokens")
        self.assertEqual(session.refresh(), 100)


class Requests(Test):
    """Tickets, batches, and where tensors may lie."""

    def test_tickets(self):
        """A whole step under way at once, its results in order."""
        tokens = Tokens(1, 40, layers=3)
        session = self.client.session(tokens.rows, "f16")
        twin = self.client.session(tokens.rows, "f16")
        want = tokens.feed(self.queue, twin, 40)
        buffer = self.client.buffer(1 << 21)
        tickets, outs = [], []
        entries = kvq.make_entries([session], append=40)
        tickets.append(self.queue.submit("step_begin", entries))
        step = tickets[0].step
        for layer in range(3):
            k, v, q = (buffer.take(getattr(tokens, x)[layer].shape) for x in "kvq")
            out = buffer.take((40, 8, 128))
            k[...], v[...], q[...] = tokens.k[layer], tokens.v[layer], tokens.q[layer]
            outs.append(out)
            tickets.append(self.queue.submit(
                "append_attend", kvq.make_entries([session], append=40, queries=40), step=step,
                layer=layer, k=buffer.tensor(k), v=buffer.tensor(v), q=buffer.tensor(q),
                out=buffer.tensor(out)))
        tickets.append(self.queue.submit("step_end", kvq.make_entries([session]), step=step))
        for ticket in reversed(tickets):
            ticket.wait(30)
        self.assertEqual(session.refresh(), 40)
        for out, (expected, _) in zip(outs, want):
            self.assertEqual(out.tobytes(), expected.tobytes())
        self.fails(kvq.Code.E_INVALID, tickets[0].wait, text="not open")

    def test_at_most_eight_tickets(self):
        tickets = [self.queue.submit("nop", np.zeros(1, kvq.ENTRY)) for _ in range(8)]
        self.fails(kvq.Code.E_CREDITS, self.queue.submit, "nop", np.zeros(1, kvq.ENTRY), text="8")
        for ticket in tickets:
            self.queue_wait_any(ticket)
        self.queue.submit("nop", np.zeros(0, kvq.ENTRY)).wait(30)

    def queue_wait_any(self, ticket):
        try:
            ticket.wait(30)
        except kvq.Error as error:  # handle 0 is nobody's
            self.assertEqual(error.code, kvq.Code.E_STALE)

    def test_deadlines(self):
        tokens = Tokens(1, 20)
        session = self.client.session(tokens.rows, "f16")
        past = time.monotonic_ns() - 1
        entries = kvq.make_entries([session], append=10)
        self.fails(kvq.Code.E_DEADLINE, self.queue.call, "step_begin", entries, deadline_ns=past)
        tokens.feed(self.queue, session, 10)
        with self.queue.step([session], 10) as step:
            self.fails(kvq.Code.E_DEADLINE, step.append, 0, tokens.k[0, 10:], tokens.v[0, 10:],
                       timeout=-1)
            for layer in range(2):  # the same again in time is fine
                step.append(layer, tokens.k[layer, 10:], tokens.v[layer, 10:], timeout=30)
        self.assertEqual(session.refresh(), 20)

    def test_paged(self):
        """K and V read out of an engine's paged cache, in any order of pages."""
        tokens = Tokens(3, 200, layers=1)
        for page in (16, 48):
            pages = 40
            cache = self.client.buffer(2 * pages * page * 2 * 128 * 4)
            k, v = (cache.take((pages, page, 2, 128)) for _ in range(2))
            random = np.random.default_rng(page)
            order = random.permutation(pages)
            skips = [5, 0]
            lists, at = [], 0
            for skip, n in zip(skips, (150, 50)):
                count = -(-(skip + n) // page)
                lists.append(order[at:at + count])
                at += count
            sessions = [self.client.session(tokens.rows, "oscar2") for _ in range(2)]
            twins = [self.client.session(tokens.rows, "oscar2") for _ in range(2)]
            for skip, n, numbers in zip(skips, (150, 50), lists):
                for t in range(n):
                    where = numbers[(skip + t) // page], (skip + t) % page
                    k[where], v[where] = tokens.k[0, t], tokens.v[0, t]
            with self.queue.step(sessions, [150, 50]) as step:
                out, lse = step.append_attend(
                    0, None, None, np.concatenate([tokens.q[0, :150], tokens.q[0, :50]]),
                    pages=kvq.Pages(k, v, lists, skips))
            want = feed(self.queue, [tokens] * 2, twins, [150, 50])[0]
            self.assertEqual(out.tobytes(), want[0].tobytes())
            self.assertEqual(lse.tobytes(), want[1].tobytes())
            for session, twin in zip(sessions, twins):
                self.assertTrue(read_all(self.queue, session, 1) == read_all(self.queue, twin, 1))
            with self.queue.step([sessions[0]], 20) as step:
                for numbers in ([pages, 0], [-1, 1]):
                    with self.assertRaisesRegex(ValueError, "pages.lists"):
                        step.append(0, pages=kvq.Pages(k, v, [numbers], None))
                step.append(0, tokens.k[0, :20], tokens.v[0, :20])
            for session in sessions + twins:
                session.close()
            cache.close()

    def test_strides(self):
        """Tensors need not be contiguous: heads outermost, and K and V interleaved."""
        tokens = Tokens(4, 60, layers=1)
        session, twin = (self.client.session(tokens.rows, "oscar2") for _ in range(2))
        both = self.client.array((60, 2, 2, 128))
        both[:, 0], both[:, 1] = tokens.k[0], tokens.v[0]
        q = self.client.array((8, 60, 128)).transpose(1, 0, 2)
        q[...] = tokens.q[0]
        out = self.client.array((8, 60, 128)).transpose(1, 0, 2)
        with self.queue.step([session], 60) as step:
            _, lse = step.append_attend(0, both[:, 0], both[:, 1], q, out=out)
        want, = tokens.feed(self.queue, twin, 60)
        self.assertEqual(np.ascontiguousarray(out).tobytes(), want[0].tobytes())
        self.assertEqual(lse.tobytes(), want[1].tobytes())

    def test_buffers(self):
        """Daemon-made, Python's own, and a memfd of the engine from an offset."""
        tokens = Tokens(5, 30, layers=1)
        page = mmap.PAGESIZE
        size = 1 << 20
        memfd = os.memfd_create("engine", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(memfd, size + page)
        made = self.client.buffer(size, daemon_made=True)
        buffers = [made, self.client.buffer(size), self.client.import_memfd(memfd, size, page)]
        answers = []
        for buffer in buffers:
            with self.client.session(tokens.rows, "f16") as session:
                k, v, q = (buffer.take(getattr(tokens, x)[0].shape) for x in "kvq")
                k[...], v[...], q[...] = tokens.k[0], tokens.v[0], tokens.q[0]
                out = buffer.take((30, 8, 128))
                with self.queue.step([session], 30) as step:
                    step.append_attend(0, k, v, q, out=out, lse=False)
                answers.append(out.tobytes())
        self.assertTrue(answers[0] == answers[1] == answers[2])
        self.assertNotEqual(answers[0], bytes(len(answers[0])))
        with mmap.mmap(memfd, page) as first:  # before the offset nothing was touched
            self.assertEqual(first[:], bytes(page))
        os.close(memfd)
        held = made.array(4)
        with self.assertRaises(BufferError):
            made.close()
        with self.assertRaises(BufferError):
            self.client.close()
        held[0] = 1  # still there
        del held
        for buffer in buffers:
            buffer.close()

    def test_queues_in_threads(self):
        """Four threads with a queue each, sessions of their own, at the same time."""
        import threading
        tokens = Tokens(6, 120)
        session = self.client.session(tokens.rows, "oscar2")
        want = b"".join(a.tobytes() for n in (100, 1, 19)
                        for pair in tokens.feed(self.queue, session, n) for a in pair)
        wrong = []

        def work():
            try:
                with self.client.queue() as queue:
                    for _ in range(less(5, 1)):
                        with self.client.session(tokens.rows, "oscar2") as own:
                            got = b"".join(a.tobytes() for n in (100, 1, 19)
                                           for pair in tokens.feed(queue, own, n) for a in pair)
                            if got != want:
                                wrong.append("other bits")
            except Exception as error:  # told to the test's own thread
                wrong.append(repr(error))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        self.assertEqual(wrong, [])


class Holding(Test):
    """Who may hold a session, and what becomes of it."""

    def test_one_writer_many_readers(self):
        tokens = Tokens(1, 60)
        writer = self.client.session(tokens.rows, "oscar2", name="shared")
        tokens.feed(self.queue, writer, 50)
        with self.daemon.client() as other, other.queue() as queue:
            self.fails(kvq.Code.E_BUSY, other.session, tokens.rows, "oscar2", name="shared",
                       text="shared")
            readers = [other.session(name="shared", read_only=True) for _ in range(2)]
            for reader in readers:
                reader.layers = writer.layers
                self.assertTrue(reader.info()["read_only"])
                self.assertEqual(reader.tokens, 50)
            self.assertTrue(read_all(queue, readers[0], 2) == read_all(self.queue, writer, 2))
            self.fails(kvq.Code.E_READ_ONLY, queue.step, readers, 1, text="READ_ONLY")
            self.fails(kvq.Code.E_READ_ONLY, queue.truncate, readers, 49)
            # Readers see committed tokens only.
            step = self.queue.step([writer], 10)
            step.append(0, tokens.k[0, 50:], tokens.v[0, 50:])
            self.assertEqual(readers[0].refresh(), 50)
            queue.attend(readers[:1], 0, tokens.q[0, :1])
            step.append(1, tokens.k[1, 50:], tokens.v[1, 50:])
            step.end()
            self.assertEqual(readers[0].refresh(), 60)
            # Dropping ends everybody's handle.
            writer.drop()
            self.fails(kvq.Code.E_STALE, readers[0].info)
            self.fails(kvq.Code.E_STALE, queue.attend, readers[:1], 0, tokens.q[0, :1],
                       text="open it again")

    def test_take_over(self):
        tokens = Tokens(1, 40)
        old = self.client.session(tokens.rows, "f16", name="taken")
        tokens.feed(self.queue, old, 30)
        step = self.queue.step([old], 5)
        step.append(0, tokens.k[0, 30:35], tokens.v[0, 30:35])
        with self.daemon.client() as other, other.queue() as queue:
            new = other.session(tokens.rows, "f16", name="taken", take_over=True)
            self.assertEqual(new.tokens, 30)  # the open step is gone
            tokens.feed(queue, new, 10)
            with self.assertRaises(kvq.Error) as caught:
                step.append(1, tokens.k[1, 30:35], tokens.v[1, 30:35])
            self.assertIn(caught.exception.code, (kvq.Code.E_TAKEN, kvq.Code.E_NO_STEP))
            self.fails(kvq.Code.E_TAKEN, self.queue.step, [old], 1, text="TAKE_OVER")
            old.close()
            self.assertEqual(new.refresh(), 40)
            new.drop()

    def test_named_sessions_outlive_their_client(self):
        tokens = Tokens(1, 40)
        with self.daemon.client() as other, other.queue() as queue:
            kept = other.session(tokens.rows, "oscar2", name="kept")
            other.session(tokens.rows, "oscar2", name="dropped", on_detach="drop")
            other.session(tokens.rows, "oscar2")
            tokens.feed(queue, kept, 33)
            self.assertEqual(self.daemon.status()["sessions"], 3)
        self.assertEqual(self.daemon.status()["sessions"], 1)
        again = self.client.session(tokens.rows, "oscar2", name="kept")
        self.assertEqual(again.tokens, 33)
        self.assertFalse(again.info()["created"])
        tokens.feed(self.queue, again, 7)
        self.fails(kvq.Code.E_EXISTS, self.client.session, tokens.rows, "oscar2", name="kept",
                   must_create=True, text="kept")
        again.close()
        self.fails(kvq.Code.E_EXISTS, self.client.session, tokens.rows, "f16", name="kept",
                   text=("kept", "oscar2"))
        self.fails(kvq.Code.E_EXISTS, self.client.session, [kvq.Layer(8, 2, 128, repeat=3)],
                   "oscar2", name="kept", text="kept")
        self.fails(kvq.Code.E_NO_SESSION, self.client.session, name="never", must_exist=True,
                   text="never")
        self.client.session(name="kept").drop()
        self.assertEqual(self.daemon.status()["sessions"], 0)

    @long_emulated
    def test_status_agrees(self):
        """kvqctl's sums are the sessions' own numbers, and everything comes back."""
        empty = self.daemon.status()
        self.assertEqual(empty["pool_used_bytes"], 0)
        tokens = [Tokens(i, 500) for i in range(6)]
        sessions = [self.client.session(t.rows, f, name=f"s{i}") for i, (t, f) in enumerate(
            zip(tokens, ["f16", "oscar2", "oscar3", "oscar4", "oscar2-xh", "oscar2"]))]
        for t, s, n in zip(tokens, sessions, (10, 128, 200, 300, 400, 500)):
            t.feed(self.queue, s, n)
        infos = [s.info() for s in sessions]
        held = sum(i["packed_bytes"] + i["window_bytes"] for i in infos)
        status = self.daemon.wait_status("pool_used_bytes", held)
        listed = self.daemon.ctl("session", "list")
        self.assertEqual(status["sessions"], 6)
        self.assertEqual(status["tokens"], sum(i["tokens"] for i in infos))
        self.assertLessEqual(status["pool_used_bytes"], status["pool_extent_bytes"])
        self.assertEqual(sorted((x["name"], x["tokens"]) for x in listed),
                         sorted((i["name"], i["tokens"]) for i in infos))
        for session in sessions:
            session.drop()
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)
