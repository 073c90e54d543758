# SPDX-License-Identifier: Apache-2.0
"""What bad input gets: a code, a text that says what was wrong, and nothing lost."""
import json
import os
import shutil
import socket
import subprocess
import tempfile
import unittest

from e2e_rig import (BACKEND, BIN, BOUND, Child, Daemon, Test, Tokens, everybodys_kvqctl, feed, kvq,
                     np, own_fds, read_all)


class BadOpen(Test):
    """Sessions that cannot be."""

    def refuse(self, code, text, *rows, format="oscar2", **options):
        self.fails(code, self.client.session, rows, format, text=text, **options)

    def test_shapes(self):
        layer = kvq.Layer
        self.refuse(kvq.Code.E_SHAPE, ("272", "256"), layer(8, 2, 272))
        self.refuse(kvq.Code.E_SHAPE, ("192", "128"), layer(8, 2, 192, v_dim=128))
        self.refuse(kvq.Code.E_SHAPE, ("9", "2"), layer(9, 2, 128))
        self.refuse(kvq.Code.E_SHAPE, "0", layer(0, 0, 128))
        self.refuse(kvq.Code.E_SHAPE, "128", layer(128, 1, 128))
        self.refuse(kvq.Code.E_SHAPE, "5", layer(8, 2, 128), layer(8, 2, 128, kv_from=5))
        self.refuse(kvq.Code.E_SHAPE, "kv_from 0", layer(8, 2, 128), layer(8, 4, 128, kv_from=0))
        self.refuse(kvq.Code.E_LIMIT, ("300", "256"), layer(8, 2, 128, repeat=300))
        self.refuse(kvq.Code.E_LIMIT, ("257", "256"), *[layer(8, 2, 128)] * 257)

    def test_formats(self):
        rows = kvq.Layer(8, 2, 128)
        self.refuse(kvq.Code.E_FORMAT, "oscar9", rows, format="oscar9")
        self.refuse(kvq.Code.E_FORMAT, "nothing-2", kvq.Layer(8, 2, 128, format="nothing-2"))
        for code in (0, 3):  # a window of fp32 is none of the two
            with self.assertRaises((kvq.Error, TypeError)):
                self.client.session([rows], "f16", dtype="f64" if code else "f32")

    def test_limits(self):
        rows = kvq.Layer(8, 2, 128)
        self.refuse(kvq.Code.E_LIMIT, ("1025", "1024"), rows, max_rollback=1025)
        self.refuse(kvq.Code.E_LIMIT, "127", rows, name="n" * 128)
        self.refuse(kvq.Code.E_INVALID, "UTF-8", rows, name="tab\there")
        self.fails(kvq.Code.E_LIMIT, self.client.buffer, 5 << 30, True, text=str(5 << 30))

    def test_handles_of_one_client(self):
        """At most 4,096, and the daemon stays as it was."""
        rows = [kvq.Layer(1, 1, 64)]
        first = self.client.session(rows, "f16", name="many")
        readers = [self.client.session(name="many", read_only=True) for _ in range(4095)]
        self.fails(kvq.Code.E_LIMIT, self.client.session, name="many", read_only=True, text="4096")
        self.fails(kvq.Code.E_LIMIT, self.queue.fork, [first], text=("4096", "Session.close()"))
        readers.pop().close()
        fork, = self.queue.fork([first])
        for reader in readers:
            reader.close()
        fork.close()
        first.drop()


class BadWork(Test):
    """Requests on a ring that cannot be. After each the session is as it was, and works."""

    def setUp(self):
        super().setUp()
        self.tokens = Tokens(1, 200)
        self.session = self.client.session(self.tokens.rows, "oscar2", max_rollback=4)
        self.twin = self.client.session(self.tokens.rows, "oscar2", max_rollback=4)
        for session in (self.session, self.twin):
            self.tokens.feed(self.queue, session, 150, attend=False)

    def tearDown(self):
        self.session.tokens = self.twin.tokens
        self.assertEqual(self.session.refresh(), self.twin.tokens)
        answers = [b"".join(a.tobytes() for pair in self.tokens.feed(self.queue, s, 9)
                            for a in pair) for s in (self.session, self.twin)]
        self.assertTrue(answers[0] == answers[1])
        self.assertTrue(read_all(self.queue, self.session, 2) == read_all(self.queue, self.twin, 2))
        super().tearDown()

    def arrays(self, n=10):
        at = slice(150, 150 + n)
        return tuple(getattr(self.tokens, x)[0, at] for x in "kvq")

    def test_position(self):
        self.session.tokens = 149
        error = self.fails(kvq.Code.E_POSITION, self.queue.step, [self.session], 5,
                           text=("149", "150", "nothing"))
        self.assertEqual(error.entries["value"][0], 150)
        self.session.tokens = 151
        self.fails(kvq.Code.E_POSITION, self.queue.attend, [self.session], 0, self.tokens.q[0, :1],
                   text=("151", "150"))

    def test_sessions_are_named_as_kvqctl_does(self):
        """By the name, or the number that lists have of those without one; of a shard also which.
        A fork's number only the daemon knows."""
        rows = self.tokens.rows
        named = self.client.session(rows, "f16", name="chat")
        nameless = self.client.session(rows, "f16")
        listed = {s["id"]: s["name"] for s in self.daemon.ctl("session", "list")}
        number = max(listed)
        self.assertEqual(listed[number], "")
        shard = self.client.session(rows, "f16", name="ranks", shard=1, shards=2)
        fork, = self.queue.fork([named])
        for session, text in ((named, '(session "chat"): '), (nameless, f"(session #{number}): "),
                              (shard, '(session "ranks", shard 1): '),
                              (fork, f"(session {fork.handle:#x}): ")):
            session.tokens += 1
            self.fails(kvq.Code.E_POSITION, self.queue.step, [session], 5, text=(text,))
            session.tokens -= 1
        if BACKEND != "cpu":
            return  # attention in this process would need a context of the GPU
        local = self.queue.local(max_tokens=64)
        local.add(named)
        self.fails(kvq.Code.E_LIMIT, local.step, [named], 65, text=('(session "chat"): ',))
        self.fails(kvq.Code.E_STALE, local.step, [nameless], 1, text=(f"(session #{number}): ",))
        local.close()

    def test_position_in_a_batch(self):
        """The one that is wrong fails alone."""
        third = self.client.session(self.tokens.rows, "f16")
        sessions = [self.session, third, self.twin]
        third.tokens = 7
        entries = kvq.make_entries(sessions, append=0)
        ticket = self.queue.call("step_begin", entries)
        self.assertEqual(list(entries["status"]), [0, kvq.Code.E_POSITION, 0])
        self.queue.call("step_end", kvq.make_entries([self.session, self.twin]), step=ticket.step)

    def test_layer(self):
        k, v, q = self.arrays()
        with self.queue.step([self.session], 10) as step:
            entries = step._entries(0)
            tensors = {x: self.client.find_buffer(a).tensor(a) for x, a in self.placed(k, v)}
            self.queue.call("append", entries, step=step.number, layer=2, **tensors)
            self.assertEqual(entries["status"][0], kvq.Code.E_SHAPE)
            self.assertRegex(kvq.errors.last_text(), "layer 2.* 2 layers, 0 to 1")
            step.abort()

    def placed(self, *arrays):
        for name, array in zip("kv", arrays):
            own = self.client.array(array.shape)
            own[...] = array
            yield name, own

    def test_bounds(self):
        """Views that reach outside their buffer, by one byte and by much, and that overflow."""
        buffer = self.client.buffer(1 << 16)
        row = 2 * 128 * 4
        most = (1 << 16) // row
        for offset, stride, rows, code in [
                (4, row, most, "E_BOUNDS"), (0, row, most + 1, "E_BOUNDS"),
                (1 << 16, row, 1, "E_BOUNDS"), (0, 1 << 39, 3, "E_BOUNDS"),
                (2**64 - row, row, 2, "E_BOUNDS"), (0, 2**64 - row, 2, "E_BOUNDS"),
                (0, 2**63, 3, "E_BOUNDS"), (2, row, 1, "E_INVALID"), (0, 8, 2, "E_INVALID")]:
            step = self.queue.step([self.session], rows)
            tensor = buffer.strided(offset, stride, 512)
            good = buffer.strided(0, 0 if rows == 1 else 512, 512)
            entries = kvq.make_entries([self.session], append=rows)
            try:
                self.queue.call("append", entries, step=step.number, layer=0, k=tensor, v=good)
                status = kvq.Code(entries["status"][0])
            except kvq.Error as error:
                status = error.code
            self.assertEqual(status.name, code, (offset, stride, rows))
            if status == kvq.Code.E_BOUNDS and stride == row and offset < 1 << 16:
                text = kvq.errors.last_text()
                self.assertIn(str(offset + rows * row), text)
                self.assertIn("65536 bytes", text)
            step.abort()
        buffer.close()

    def test_rows(self):
        """Row numbers near 2^32 do not wrap around."""
        k, v, _ = self.arrays(1)
        own = dict(self.placed(k, v))
        tensors = {x: self.client.find_buffer(a).tensor(a) for x, a in own.items()}
        step = self.queue.step([self.session], 1)
        entries = kvq.make_entries([self.session], append=1)
        for row in (1, 2**31, 2**32 - 1):
            entries["row"] = row
            self.queue.call("append", entries, step=step.number, layer=0, **tensors)
            self.assertEqual(entries["status"][0], kvq.Code.E_BOUNDS)
            self.assertIn(str(row), kvq.errors.last_text())
        step.abort()

    def test_dtype(self):
        k, v, _ = self.arrays()
        own = dict(self.placed(k, v))
        for bad in (0, 4, 255):
            tensors = {x: self.client.find_buffer(a).tensor(a) for x, a in own.items()}
            tensors["k"].dtype = bad
            step = self.queue.step([self.session], 10)
            self.fails(kvq.Code.E_DTYPE, self.queue.call, "append", step.entries, step=step.number,
                       layer=0, text=(bad, "k"), **tensors)
            step.abort()

    def test_buffers(self):
        k, v, _ = self.arrays()
        own = dict(self.placed(k, v))
        tensors = {x: self.client.find_buffer(a).tensor(a) for x, a in own.items()}
        with self.daemon.client() as other, self.queue.step([self.session], 10) as step:
            theirs = other.buffer(1 << 16)
            tensors["v"].buffer, tensors["v"].owner = theirs.pointer, theirs
            self.fails(kvq.Code.E_BUFFER, self.queue.call, "append", step.entries,
                       step=step.number, layer=0, text="another connection", **tensors)
            tensors["v"].buffer = None
            self.fails(kvq.Code.E_BUFFER, self.queue.call, "append", step.entries,
                       step=step.number, layer=0, text="v", **tensors)
            step.abort()

    def test_counts(self):
        """More than the limits, and counts that overflow."""
        self.fails(kvq.Code.E_LIMIT, self.queue.step, [self.session], 65537,
                   text=("65537", "65536"))
        self.fails(kvq.Code.E_LIMIT, self.queue.step, [self.session], 2**32 - 1, text="65536")
        self.fails(kvq.Code.E_LIMIT, self.queue.step, [self.session] * 1025, 1,
                   text=("1025", "1024"))
        most = 32768 if BACKEND == "cpu" else 512
        tensor = self.client.buffer(1 << 16)
        tensor = tensor.tensor(tensor.take((1, 8, 128)))
        entries = kvq.make_entries([self.session], queries=most + 1)
        self.fails(kvq.Code.E_LIMIT, lambda: self.queue.submit(
            "attend", entries, layer=0, q=tensor, out=tensor).wait(),
                   text=(f"{most + 1} query tokens", str(most)))
        q = np.zeros((0, 8, 128), np.float32)
        self.fails(kvq.Code.E_INVALID, self.queue.attend, [self.session], 0, q, 0,
                   text="0 query tokens")

    def test_overlaps(self):
        """The text names the rule that was broken, and by which tensors or entries."""
        buffer = self.client.buffer(1 << 20)
        q, out = (buffer.tensor(buffer.take((2, 8, 128))) for _ in range(2))
        entries = kvq.make_entries([self.session] * 2, queries=1)
        entries["q_row"] = 0
        self.queue.call("attend", entries, layer=0, q=q, out=out)
        self.assertEqual(list(entries["status"]), [0, kvq.Code.E_INVALID])
        self.assertRegex(kvq.errors.last_text(), r"entry 1 .* for entry 0; .*\(q_row\)")
        entries["q_row"] = 0, 1
        self.fails(kvq.Code.E_INVALID, self.queue.call, "attend", entries, layer=0, q=q, out=q,
                   text="out is written and overlaps q")
        out.token_stride = out.head_stride
        self.fails(kvq.Code.E_INVALID, self.queue.call, "attend", entries, layer=0, q=q, out=out,
                   text="out is written and overlaps itself")
        entries = kvq.make_entries([self.session], queries=2)
        out.token_stride = 4
        self.queue.call("attend", entries, layer=0, q=q, out=out)
        self.assertEqual(entries["status"][0], kvq.Code.E_INVALID)
        self.assertRegex(kvq.errors.last_text(), "out has strides of 4 bytes.* has 512 bytes")

    def test_step_numbers(self):
        k, v, q = self.arrays()
        with self.queue.step([self.session], 10) as step:
            self.fails(kvq.Code.E_BUSY, self.queue.step, [self.session], 1, text="step")
            number, step.number = step.number, step.number + 1000
            self.fails(kvq.Code.E_NO_STEP, step.append, 0, k, v, text="step")
            step.number = number
            step.append(0, k, v)
            self.fails(kvq.Code.E_INVALID, step.append, 0, k, v, text="of this layer already")
            # Attention over a layer whose K and V are not there yet.
            self.fails(kvq.Code.E_INCOMPLETE, step.attend, 1, q, text="of this layer")
            step.abort()
        self.fails(kvq.Code.E_NO_STEP, self.queue.call, "step_end", np.zeros(0, kvq.ENTRY),
                   step=number)

    def test_results_of_failed_calls(self):
        """As step.h says: the call's code and 0, or as they were where the library refuses."""
        tensor = self.client.buffer(1 << 16)
        tensor = tensor.tensor(tensor.take((1, 8, 128)))
        entries = kvq.make_entries([self.session], queries=1)
        for code, operation, more, left in (
                (kvq.Code.E_NO_STEP, "step_end", {"step": 999}, (kvq.Code.E_NO_STEP, 0)),
                (kvq.Code.E_DEADLINE, "nop", {"deadline_ns": 1}, (kvq.Code.E_DEADLINE, 0)),
                (kvq.Code.E_BUFFER, "attend", {"layer": 0, "q": tensor}, (0, 777))):
            entries["status"], entries["value"] = 1234, 777  # status 0 is set by Python's submit()
            self.fails(code, self.queue.call, operation, entries, **more)
            self.assertEqual((entries["status"][0], entries["value"][0]), left, operation)

    def test_lacking_layer(self):
        k, v, _ = self.arrays()
        step = self.queue.step([self.session], 10)
        step.append(1, k, v)
        self.fails(kvq.Code.E_INCOMPLETE, step.end, text="every layer")
        self.assertEqual(self.session.refresh(), 150)
        step = self.queue.step([self.session], 10)
        self.fails(kvq.Code.E_INCOMPLETE, self.queue.call, "step_end", np.zeros(0, kvq.ENTRY),
                   step=step.number, text="still open")
        step.abort()

    def test_too_many_steps(self):
        sessions = [self.client.session(self.tokens.rows, "f16") for _ in range(65)]
        steps = [self.queue.step([s], 1) for s in sessions[:64]]
        self.fails(kvq.Code.E_LIMIT, self.queue.step, sessions[64:], 1, text="64 open steps")
        for step in steps:
            step.abort()

    def test_nonfinite(self):
        """NaN or infinity fails its own session; the others of the batch go on."""
        for bad in (np.nan, np.inf, -np.inf):
            for x in range(2):
                third = self.client.session(self.tokens.rows, "oscar2")
                fourth = self.client.session(self.tokens.rows, "oscar2")
                k, v = (np.concatenate([a[0, :20], a[0, :20]])
                        for a in (self.tokens.k, self.tokens.v))
                (k, v)[x][5, 1, 17] = bad
                step = self.queue.step([third, fourth], 20)
                error = self.fails(kvq.Code.E_NONFINITE, step.append, 0, k, v,
                                   text=("layer 0", "entry 0", "infinity"))
                self.assertEqual(list(error.entries["status"]), [kvq.Code.E_NONFINITE, 0])
                k[5], v[5] = 0, 0
                entries = kvq.make_entries([fourth], append=20)
                entries["row"] = 20
                buffer = self.client.buffer(1 << 18)
                views = {}
                for name, array in (("k", k), ("v", v)):
                    own = buffer.take(array.shape)
                    own[...] = array
                    views[name] = buffer.tensor(own)
                self.queue.call("append", entries, step=step.number, layer=1, **views)
                self.queue.call("step_end", entries, step=step.number)
                self.assertEqual((third.refresh(), fourth.refresh()), (0, 20))
                self.assertTrue(np.isfinite(self.queue.read(fourth, 0)[x]).all())
                self.queue.call("step_abort", np.zeros(0, kvq.ENTRY), step=step.number) \
                    if self.open_step(third) else None
                third.close()
                fourth.close()
                buffer.close()

    def open_step(self, session):
        return any(s["step_open"] for s in self.daemon.ctl("session", "list")
                   if s.get("tokens") == session.tokens and s.get("step_open"))

    def test_saturation_is_counted(self):
        k, v, _ = (a.copy() for a in self.arrays())
        third = self.client.session(self.tokens.rows, "f16")
        k[0, 0, 0], v[1, 1, 1] = 1e6, -1e30
        with self.queue.step([third], 10) as step:
            for layer in range(2):
                step.append(layer, k, v)
        self.assertEqual(third.info()["saturated_values"], 4)
        got_k, got_v = self.queue.read(third, 0)
        self.assertEqual((got_k[0, 0, 0], got_v[1, 1, 1]), (65504, -65504))
        third.close()

    def test_stale_handles(self):
        third = self.client.session(self.tokens.rows, "f16")
        handle = third.handle
        third.close()
        again = self.client.session(self.tokens.rows, "f16")  # maybe in the same place
        third.handle = handle
        for wrong in (handle, handle + (5 << 32), 2**64 - 1, 12345):
            third.handle = wrong
            self.fails(kvq.Code.E_STALE, self.queue.step, [third], 1, text=(hex(wrong), "open it"))
            self.fails(kvq.Code.E_STALE, third.info)
            self.fails(kvq.Code.E_STALE, self.queue.fork, [third])
        with self.daemon.client() as other, other.queue() as queue:
            with self.assertRaisesRegex(ValueError, "another Client"):
                queue.attend([self.session], 0, self.tokens.q[0, :1])
            entries = kvq.make_entries([self.session])  # and without the package's own check
            queue.call("nop", entries)
            self.assertEqual(entries["status"][0], kvq.Code.E_STALE)
        again.close()

    def test_read(self):
        """Reading behind the end gives what is there; nonsense is refused."""
        own = self.client.array((16, 2, 128))
        tensor = self.client.find_buffer(own).tensor(own)
        other = self.client.array(own.shape)
        apart = self.client.find_buffer(other).tensor(other)
        for start, n, want in ((140, 11, 10), (150, 5, 0), (0, 17, kvq.Code.E_BOUNDS),
                               (0, 2**32 - 1, kvq.Code.E_BOUNDS), (151, 1, kvq.Code.E_POSITION),
                               (2**63, 1, kvq.Code.E_POSITION)):
            entries = kvq.make_entries([self.session], append=n)
            entries["position"] = start
            self.queue.call("read", entries, layer=0, k=tensor, v=apart)
            got = entries["value"][0] if entries["status"][0] == 0 else entries["status"][0]
            self.assertEqual(got, want, (start, n))
        self.assertEqual(self.queue.read(self.session, 0, 140, 11)[0].shape, (10, 2, 128))


class BadPeople(Test):
    """Who may not, what is already there, and what is no client."""
    DAEMON = {"runtime_mode": "0755"}

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.chmod(cls.daemon.directory, 0o755)

    NAMED = (("session", "show", "x"), ("session", "drop", "x"), ("session", "pin", "x"),
             ("session", "list"), ("prefix", "drop"))

    def test_no_such_namespace(self):
        """Administrators are told that a namespace does not exist; a user's own always does."""
        for words in (*self.NAMED, ("quota", "get", "nobody"), ("quota", "delete", "nobody"),
                      ("quota", "set", "nobody", "--sessions", "1")):
            more = () if words[0] == "quota" else ("--namespace", "nobody")
            status, out, complaint = self.daemon.ctl(*words, *more, check=False)
            self.assertEqual((status, out), (5, ""), words)
            self.assertRegex(complaint, 'there is no namespace "nobody".*E_NO_NAMESPACE')
        self.assertEqual(self.daemon.ctl("session", "list", "--namespace", "uid-4712"), [])

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_namespaces_stay_secret(self):
        """Others get the same answers of one that does not exist and of one that is not theirs."""
        with self.client.session(Tokens(1, 1).rows, "f16", name="private", ns="uid-4713"):
            for words in self.NAMED:
                answers = []
                for name in ("nobody", "uid-4713"):
                    done = subprocess.run(
                        [everybodys_kvqctl(), "--runtime-dir", self.daemon.directory, *words,
                         "--namespace", name], capture_output=True, text=True, timeout=BOUND,
                        user=65534, extra_groups=[], cwd="/")
                    answers.append((done.returncode, done.stdout,
                                    done.stderr.replace(name, "NAME")))
                self.assertEqual(answers[0], answers[1], words)
                self.assertEqual(answers[0][0], 0 if words[1] == "list" else 6, words)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_another_users_namespace(self):
        tokens = Tokens(1, 4)
        mine = self.client.session(tokens.rows, "f16", name="private")
        tokens.feed(self.queue, mine, 4)
        child = Child("stranger", self.daemon.directory, 65534, "uid-0", "private")
        results = child.hear()
        child.end()
        self.assertEqual(results["own"], ["OK", "uid-65534"])
        for attempt in ("other", "existing", "reading"):
            code, text = results[attempt]
            self.assertEqual(code, "E_PERMISSION")
            self.assertIn("uid-0", text)
            self.assertIn("65534", text)
        self.assertEqual(mine.refresh(), 4)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_supplementary_groups(self):
        """They open a namespace on both sockets; without them it is another's."""
        path = os.path.join(self.daemon.directory, "team.conf")
        with open(path, "w", encoding="ascii") as file:
            file.write("[namespace team]\ngids = 4242\n")
        tokens = Tokens(1, 4)
        with Daemon(config=path, runtime_mode="0755") as daemon, daemon.client() as client:
            os.chmod(daemon.directory, 0o755)
            client.session(tokens.rows, "f16", ns="team", name="ours")

            def ctl(groups, *arguments):
                return subprocess.run(
                    [everybodys_kvqctl(), "--runtime-dir", daemon.directory, "--namespace", "team",
                     "--json", *arguments], capture_output=True, text=True, timeout=BOUND, cwd="/",
                    user=65534, group=65534, extra_groups=groups)

            for groups, code in (([4242], "OK"), ([1, 4242, 70000], "OK"), ([4241], "E_PERMISSION"),
                                 ([], "E_PERMISSION")):
                child = Child("stranger", daemon.directory, 65534, "team", "ours", groups)
                self.assertEqual(child.hear()["other"][0], code, groups)
                child.end()
                shown = ctl(groups, "session", "show", "ours")
                self.assertEqual(shown.returncode, 0 if code == "OK" else 6, shown.stderr)
                listed = json.loads(ctl(groups, "session", "list").stdout)
                self.assertEqual([s["name"] for s in listed], ["ours"] if code == "OK" else [])
            self.assertEqual(ctl([4241], "session", "drop", "ours").returncode, 6)
            self.assertEqual(ctl([4242], "session", "drop", "ours").returncode, 0)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_no_permission_for_the_directory(self):
        with Daemon(runtime_mode="0700") as daemon:
            child = Child("stranger", daemon.directory, 65534, "uid-0", "x")
            code, text = child.hear()
            child.end()
            for command, status in (("status", 6), ("doctor", 7)):
                done = subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory,
                                       command], capture_output=True, user=65534, timeout=BOUND,
                                      extra_groups=[])
                self.assertEqual(done.returncode, status, done.stderr)
        self.assertEqual(code, "E_PERMISSION")
        self.assertIn("65534", text)
        self.assertIn(daemon.directory, text)

    def test_two_daemons(self):
        tokens = Tokens(1, 10)
        session = self.client.session(tokens.rows, "f16")
        tokens.feed(self.queue, session, 5)
        done = subprocess.run([os.path.join(BIN, "kvqd"), "--runtime-dir", self.daemon.directory],
                              capture_output=True, text=True, timeout=BOUND)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(self.daemon.directory, done.stderr)
        self.assertIn(str(self.daemon.process.pid), done.stderr)
        tokens.feed(self.queue, session, 5)
        with self.daemon.client() as other:
            self.assertEqual(other.info()["epoch"], self.client.info()["epoch"])

    def raw(self):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.settimeout(BOUND)
        s.connect(os.path.join(self.daemon.directory, "attach.sock"))
        return s

    def test_wrong_version(self):
        """Request{id 1, protocol 9, Hello{protocol 9 to 9}}."""
        with self.raw() as s:
            s.send(bytes([8, 1, 16, 9, 0x52, 4, 8, 9, 16, 9]))
            reply, fds, _, _ = socket.recv_fds(s, 65536, 8)
        self.assertEqual(fds, [])
        self.assertIn(b"\x10\x03", reply)  # status -2, zigzag
        self.assertRegex(reply, rb"9.*1")

    def test_not_a_client(self):
        """Bytes that are no message, descriptors nobody asked for, and silence."""
        before = self.daemon.settled_fds()
        socks = []
        for packet in (b"\xff" * 100, b"", bytes(65536), b"\x08\x01" * 3000, b"\x52\x00",
                       bytes([8, 1, 0x9a, 1, 0])):
            s = self.raw()
            if packet:
                socket.send_fds(s, [packet], [0, 1, 2])
                try:
                    while s.recv(65536):
                        pass
                except ConnectionError:
                    pass
            socks.append(s)
        with self.daemon.client() as other:
            other.info()
        for s in socks:
            s.close()
        self.daemon.wait_log("event=connection_end", 6)
        self.daemon.wait_fds(before)

    def test_no_emulator(self):
        """A build without the emulator says so, not that NVIDIA's driver is missing."""
        with tempfile.TemporaryDirectory() as folder:
            program, beside = os.path.join(folder, "bin", "kvqd"), os.path.join(BIN, "..", "lib")
            os.mkdir(os.path.dirname(program))
            os.mkdir(os.path.join(folder, "lib"))
            shutil.copy(os.path.join(BIN, "kvqd"), program)
            for name in set(os.listdir(beside)) - {"libkvq-emu.so"}:  # kvqd itself needs some
                os.symlink(os.path.abspath(os.path.join(beside, name)),
                           os.path.join(folder, "lib", name))
            done = subprocess.run([program, "--runtime-dir", folder + "/run", "--backend", "emu"],
                                  capture_output=True, text=True, timeout=BOUND)
        self.assertEqual(done.returncode, 1)
        self.assertIn("this build has no emulator (KVQ_EMU=OFF)", done.stderr)

    def test_no_daemon_there(self):
        before = own_fds()
        self.fails(kvq.Code.E_NO_DAEMON, kvq.Client, "/nowhere", text=("/nowhere", "start kvqd"))
        self.assertEqual(own_fds(), before)
