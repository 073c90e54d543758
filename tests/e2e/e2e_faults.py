# SPDX-License-Identifier: Apache-2.0
"""Processes that die in the middle of anything, clients that scribble, memory that runs out."""
import os
import signal
import time

from e2e_rig import (BOUND, Child, Daemon, Test, Tokens, feed, kvq, long_emulated, np, own_fds,
                     read_all)

LAYERS = 4


class DeadClients(Test):
    """A client that dies leaves every session at its last commit, and nothing else of it stays."""

    @long_emulated
    def test_killed_at_every_layer(self):
        tokens = Tokens(1, 700, layers=LAYERS)
        for format, n in (("f16", 7), ("oscar2", 300)):
            self.killed_at_every_layer(tokens, format, n)

    def killed_at_every_layer(self, tokens, format, n):
        name = f"victim-{format}-{n}"
        session = self.client.session(tokens.rows, format, name=name)
        tokens.feed(self.queue, session, 200, attend=False)
        before = read_all(self.queue, session, LAYERS)
        session.close()
        quiet = self.daemon.status()
        fds = self.daemon.settled_fds()
        for where in range(LAYERS + 1):
            child = Child("stop_at", self.daemon.directory, name, 1, n, LAYERS, where)
            said = child.hear()
            self.assertEqual(said["tokens"], 200)
            self.assertGreater(self.daemon.status()["pool_used_bytes"], quiet["pool_used_bytes"])
            child.kill()
            self.daemon.wait_gone(said["client"])
            status = self.daemon.status()
            for key in ("sessions", "tokens", "clients", "pool_used_bytes"):
                self.assertEqual(status[key], quiet[key], (key, where))
            self.daemon.wait_fds(fds)
            session = self.client.session(tokens.rows, format, name=name)
            self.assertEqual(session.tokens, 200)
            self.assertTrue(read_all(self.queue, session, LAYERS) == before)
            session.close()
        # And it goes on as if nothing had been.
        session = self.client.session(tokens.rows, format, name=name)
        with self.client.session(tokens.rows, format) as twin:
            tokens.feed(self.queue, twin, 200, attend=False)
            for s in (session, twin):
                tokens.feed(self.queue, s, 150, attend=False)
            self.assertTrue(read_all(self.queue, session, LAYERS)
                            == read_all(self.queue, twin, LAYERS))
        session.drop()

    def test_scribblers(self):
        """Clients that write over their own rings are cut off or refused; nobody else notices."""
        tokens = Tokens(3, 400)
        session, twin = (self.client.session(tokens.rows, "oscar2") for _ in range(2))
        fds = self.daemon.settled_fds()
        clients = self.daemon.status()["clients"]
        refused = self.daemon.status()["counters"]["refused_requests"]
        for seed in range(12):
            way = ("tail", "all", "head", "requests")[seed % 4]
            child = Child("scribble", self.daemon.directory, seed, way)
            number = child.hear()
            tokens.feed(self.queue, session, 5)
            child.tell()
            self.assertEqual(child.hear(), "scribbled")
            if way in ("tail", "all"):
                self.daemon.wait_gone(number)
            tokens.feed(self.queue, session, 5)
            child.tell()
            fate = child.hear()
            if way == "requests":
                self.assertIn(fate, ("E_DISCONNECTED", "E_PROTOCOL", "E_STALE", "answered"))
            else:
                self.assertEqual(fate, "E_DISCONNECTED", way)
            child.end()
            self.daemon.wait_gone(number)
        self.assertGreater(self.daemon.status()["counters"]["refused_requests"], refused + 50)
        for _ in range(24):
            tokens.feed(self.queue, twin, 5)
        self.assertTrue(read_all(self.queue, session, 2) == read_all(self.queue, twin, 2))
        self.assertEqual(self.daemon.status()["clients"], clients)
        self.daemon.wait_fds(fds)
        for i in range(12):  # their sessions stand at their last commit
            left = self.client.session(name=f"scribbled-{i}")
            self.assertEqual(left.tokens, 8)
            left.drop()

    def test_kept_for_a_time(self):
        """A named session goes when its keep time is over."""
        tokens = Tokens(1, 10)
        with self.daemon.client() as other, other.queue() as queue:
            session = other.session(tokens.rows, "f16", name="brief", on_detach="keep",
                                    keep_seconds=1)
            tokens.feed(queue, session, 10)
        self.daemon.wait_log('event=session_dropped .*session="?brief')
        self.fails(kvq.Code.E_NO_SESSION, self.client.session, name="brief", must_exist=True)


class DeadDaemon(Test):
    """A daemon that dies ends every wait at once, and comes back."""

    def setUp(self):
        self.daemon = Daemon()
        super().setUp()

    def tearDown(self):
        self.client.close()
        self.assertEqual(own_fds(), self.fds_before)
        self.daemon.stop()

    @classmethod
    def setUpClass(cls):
        pass

    tearDownClass = setUpClass

    def restart(self):
        self.daemon.kill()
        self.daemon.reader.join(BOUND)
        self.daemon.process.stderr.close()
        new = Daemon(self.daemon.directory)
        new.own = True
        self.daemon = new

    def test_killed_while_clients_wait(self):
        """An error within a second, for every one that waits."""
        children = [Child("waiter", self.daemon.directory) for _ in range(4)]
        for child in children:
            self.assertEqual(child.hear(), "ready")
        self.daemon.pause()
        for child in children:
            child.tell()
            self.assertEqual(child.hear(), "waiting")
        killed = time.monotonic()
        self.daemon.kill()
        for child in children:
            end = child.hear()
            self.assertEqual(end["code"], kvq.Code.E_DISCONNECTED)
            self.assertLess(end["at"] - killed, 1.0)
            self.assertEqual(child.hear(), kvq.Code.E_DISCONNECTED)  # and from then on
            child.end()
        self.fails(kvq.Code.E_DISCONNECTED, self.queue.nop, text="Client.reattach()")
        self.fails(kvq.Code.E_DISCONNECTED, self.client.session, Tokens(1, 1).rows, "f16")

    def test_reattach_after_restart(self):
        tokens = Tokens(1, 60)
        session = self.client.session(tokens.rows, "oscar2", name="lost")
        other = self.client.session(tokens.rows, "f16")
        made, own = self.client.buffer(4096, daemon_made=True), self.client.buffer(4096)
        made.array(4)[:], own.array(4)[:] = [1, 2, 3, 4], [5, 6, 7, 8]
        tokens.feed(self.queue, session, 20)
        self.daemon.pause()
        ticket = self.queue.submit("nop", np.zeros(1, kvq.ENTRY))
        self.daemon.kill()
        self.fails(kvq.Code.E_NO_DAEMON, self.client.reattach, text=self.daemon.directory)
        self.restart()
        self.assertEqual(self.client.reattach(), (True, 2))
        self.assertIn("restarted", kvq.errors.last_text())
        self.fails(kvq.Code.E_CANCELLED, ticket.wait)
        self.fails(kvq.Code.E_STALE, self.queue.step, [session], 1, text="open it again")
        self.fails(kvq.Code.E_STALE, other.info)
        # What they were is another session's now, maybe: they do not end it.
        with self.client.session(tokens.rows, "f16", name="new") as new:
            tokens.feed(self.queue, new, 20)
            other.close()
            self.fails(kvq.Code.E_STALE, session.drop)
            self.fails(kvq.Code.E_STALE, session.refresh)
            self.assertEqual((session.handle, other.handle, new.refresh()), (0, 0, 20))
            new.drop()
        # The same queue, the same buffers, the same memory.
        self.assertEqual(list(made.array(4)) + list(own.array(4)), [1, 2, 3, 4, 5, 6, 7, 8])
        session = self.client.session(tokens.rows, "oscar2", name="lost")
        self.assertEqual(session.tokens, 0)
        tokens.feed(self.queue, session, 60)
        for buffer in (made, own):
            target = buffer.array((2, 1, 2, 128), "f16")
            entries = kvq.make_entries([session], append=1)
            entries["position"] = 0
            self.queue.call("read", entries, layer=0, k=buffer.tensor(target[0]),
                            v=buffer.tensor(target[1]))
            self.assertEqual(entries["status"][0], 0)
            self.assertTrue((target[1] == np.float16(tokens.v[0, :1])).all())
        del target
        made.close()

    def test_kicked(self):
        """Cut off by an administrator: the same daemon, the named session at its last commit."""
        tokens = Tokens(1, 60)
        session = self.client.session(tokens.rows, "oscar2", name="mine")
        tokens.feed(self.queue, session, 20)
        step = self.queue.step([session], 10)
        step.append(0, tokens.k[0, :10], tokens.v[0, :10])
        number = self.client.info()["client_id"]
        status, said, complaint = self.daemon.ctl("client", "kick", "4711", check=False)
        self.assertEqual((status, said), (5, ""))
        for part in ("4711", "client list", "E_NO_CLIENT"):
            self.assertIn(part, complaint)
        self.daemon.ctl("client", "kick", str(number))
        with self.assertRaises(kvq.Error) as caught:
            step.append(1, tokens.k[1, :10], tokens.v[1, :10])
        self.assertIn(caught.exception.code, (kvq.Code.E_DISCONNECTED, kvq.Code.E_CANCELLED))
        self.daemon.wait_gone(number)
        self.assertEqual(self.daemon.ctl("client", "kick", str(number), check=False)[0], 5)
        self.assertEqual(self.client.reattach(), (False, 1))
        again = self.client.session(tokens.rows, "oscar2", name="mine")
        self.assertEqual(again.tokens, 20)
        tokens.feed(self.queue, again, 40)
        self.assertEqual(self.daemon.status()["counters"]["kicked_clients"], 1)

    def test_calls_given_up(self):
        """What a control call makes after its caller stopped waiting is given back unasked."""
        rows = Tokens(1, 1).rows
        with self.daemon.client() as other:  # on a GPU its stream is the next one's, and takes long
            other.session(rows, "f16")

        def patiently(call):  # however slow this machine is
            while True:
                try:
                    return call()
                except kvq.Error as error:
                    self.assertEqual(error.code, kvq.Code.E_DEADLINE)

        client = patiently(lambda: self.daemon.client(timeout_ms=200))
        own = patiently(lambda: client.session(rows, "f16"))

        def held():
            mine = [c for c in self.daemon.ctl("client", "list")
                    if c["id"] == client.info()["client_id"]]
            return [mine[0][key] for key in ("queues", "buffers", "buffer_bytes", "sessions")]

        before, fds = held(), own_fds()
        for _ in range(3):
            self.daemon.pause()
            self.fails(kvq.Code.E_DEADLINE, client.queue, text="200 ms")
            self.fails(kvq.Code.E_DEADLINE, client.buffer, 1 << 20, True)
            self.fails(kvq.Code.E_DEADLINE, client.buffer, 1 << 20)
            self.fails(kvq.Code.E_DEADLINE, client.session, rows, "f16", name="late")
            self.daemon.process.send_signal(signal.SIGCONT)
            patiently(own.info)  # behind all of them
            self.assertEqual(held(), before)
            self.assertEqual(own_fds(), fds)
            self.client.session(rows, "f16", name="late").close()  # nobody writes it
        client.close()

    def test_disconnecting_is_done_when_it_returns(self):
        """What a client held is free for the next one; it waits for the daemon to say so."""
        rows = Tokens(1, 1).rows
        for _ in range(30):
            with self.daemon.client() as other:
                other.session(rows, "f16", name="passed on")
        self.assertEqual(self.daemon.status()["clients"], 1)
        other = self.daemon.client(timeout_ms=200)
        self.daemon.pause()
        started = time.monotonic()
        other.close()
        self.assertGreaterEqual(time.monotonic() - started, 0.2)
        self.daemon.process.send_signal(signal.SIGCONT)

    def test_drain(self):
        """SIGTERM lets an open step come to its end and takes nothing new."""
        tokens = Tokens(1, 60)
        session = self.client.session(tokens.rows, "f16")
        step = self.queue.step([session], 10)
        step.append(0, tokens.k[0, :10], tokens.v[0, :10])
        self.daemon.process.terminate()
        self.daemon.wait_log("event=draining")
        self.fails(kvq.Code.E_DRAINING, self.client.session, tokens.rows, "f16")
        step.append(1, tokens.k[1, :10], tokens.v[1, :10])
        step.end()
        self.assertEqual(session.tokens, 10)
        self.assertEqual(self.daemon.process.wait(BOUND), 0)
        self.fails(kvq.Code.E_DISCONNECTED, self.queue.nop)


class Memory(Test):
    """Pools that are full: refused where it is asked for, nothing lost, back when there is room."""
    DAEMON = {"pool_bytes": "16mb", "extent_bytes": "2mb", "evict_idle_ms": 3600000}

    @long_emulated
    def test_full_at_begin(self):
        tokens = Tokens(1, 8192)
        session = self.client.session(tokens.rows, "f16")
        while True:
            try:
                tokens.feed(self.queue, session, 512, attend=False)
            except kvq.Error as error:
                self.assertEqual(error.code, kvq.Code.E_NO_MEMORY)
                self.assertIn("pool_bytes", error.text)
                break
        full = session.tokens
        self.assertGreater(full, 3000)
        self.assertEqual(session.refresh(), full)
        self.assertEqual(read_all(self.queue, session, 2)[:1024],
                         np.float32(np.float16(tokens.k[0, :1])).tobytes()[:1024])
        # A new one has no room, an old one goes on as soon as there is.
        with self.client.session(tokens.rows, "f16") as second:
            try:
                tokens.feed(self.queue, second, 2000, attend=False)
                self.fail("there should be no room")
            except kvq.Error as error:
                self.assertEqual(error.code, kvq.Code.E_NO_MEMORY)
            self.assertEqual(second.refresh(), 0)
        status = self.daemon.status()
        self.assertLessEqual(status["pool_extent_bytes"], status["pool_bytes"])
        session.drop()
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)
        third = self.client.session(tokens.rows, "f16")
        while third.tokens < full:
            tokens.feed(self.queue, third, 512, attend=False)
        third.drop()

    def test_full_in_a_batch(self):
        """The sessions that fit are in the step."""
        tokens = Tokens(2, 6000)
        big, small = (self.client.session(tokens.rows, "f16") for _ in range(2))
        entries = kvq.make_entries([big, small])
        entries["append"] = [30000, 10]
        ticket = self.queue.call("step_begin", entries)
        self.assertEqual(list(entries["status"]), [kvq.Code.E_NO_MEMORY, 0])
        self.queue.call("step_abort", np.zeros(0, kvq.ENTRY), step=ticket.step)
        self.assertEqual(self.daemon.status()["pool_used_bytes"], 0)
        for session in (big, small):
            session.close()

    def test_full_at_start(self):
        """A pool that cannot hold one extent is refused by name."""
        with self.assertRaises(AssertionError) as caught:
            Daemon(pool_bytes="1mb", extent_bytes="2mb")
        self.assertIn("pool_bytes", str(caught.exception))
        self.assertIn("extent_bytes", str(caught.exception))

    def test_quota(self):
        """A namespace's limit is told as one."""
        path = os.path.join(self.daemon.directory, "quota.conf")
        with open(path, "w", encoding="ascii") as file:
            file.write("[namespace small]\nuids = %d\nhost_bytes = 2mb\ndevice_bytes = 2mb\n"
                       "max_sessions = 2\n" % os.getuid())
        tokens = Tokens(1, 6000)
        with Daemon(config=path) as daemon, daemon.client() as client, client.queue() as queue:
            sessions = [client.session(tokens.rows, "f16", ns="small") for _ in range(2)]
            self.fails(kvq.Code.E_QUOTA, client.session, tokens.rows, "f16", ns="small",
                       text=("small", "2"))
            self.fails(kvq.Code.E_QUOTA, queue.step, sessions[:1], 5000, text="namespace")
            feed(queue, [tokens], sessions[:1], [100], attend=False)
            own = client.session(tokens.rows, "f16")  # other namespaces do not mind
            feed(queue, [tokens], [own], [5000], attend=False)
