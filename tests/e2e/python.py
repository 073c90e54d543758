#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package: that it says what kvq.h says, and that its own conveniences work.

    tests/e2e/python.py [NAME]...

What the library does is tested through it by e2e.py. KVQ_BIN_DIR says where kvqd is.
"""
import ctypes
import gc
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

import e2e_rig
from e2e_cuda import SOFT_DRIVER, Cuda, CudaTensor
from e2e_rig import ROOT, Test, Tokens, attend64, kvq, np
from python_ends import Ends, Meanwhile, Shows, Words
from python_forks import Forks, LetGo
from python_hints import Hints
from python_interrupts import Interrupts
from python_prepared import Prepared
from python_private import Private
from python_work import (
    Buffers, Failures, Found, Given, InUse, Queues, Readers, Readings, Tickets)

from kvq import _ffi
from kvq._ffi import lib

KVQ_H = ""  # the headers that kvq.h consists of, without comments
for name in sorted(os.listdir(os.path.join(ROOT, "client", "kvq"))):
    with open(os.path.join(ROOT, "client", "kvq", name), encoding="ascii") as header:
        KVQ_H += re.sub(r"/\*.*?\*/", "", header.read(), flags=re.S)


class Header(unittest.TestCase):
    """The package against the header."""

    def test_functions(self):
        declared = set(re.findall(r"\b(kvq_\w+)\(", KVQ_H))
        self.assertEqual(declared, set(_ffi.FUNCTIONS))
        with open(os.path.join(ROOT, "client", "kvq.map"), encoding="ascii") as file:
            self.assertEqual(declared, set(re.findall(r"\b(kvq_\w+);", file.read())))

    def test_structures(self):
        """Every field lies where the compiler puts it."""
        names = {"ConnectOptions": "connect_options", "DaemonInfo": "daemon_info",
                 "GpuInfo": "gpu_info", "Tensor": "tensor", "LayerRow": "layer",
                 "SessionOptions": "session_options", "SessionInfo": "session_info",
                 "Pages": "pages", "Work": "work", "CaptureOptions": "capture_options",
                 "StepWork": "step_work", "LocalOptions": "local_options",
                 "BucketOptions": "bucket_options", "Span": "span", "Prefix": "prefix",
                 "Ids": "ids"}
        ours = {n for n, s in vars(_ffi).items()
                if isinstance(s, type) and issubclass(s, ctypes.Structure)} - {"Structure", "Sized"}
        self.assertEqual(set(names), ours)
        want, lines = [], []
        for name, struct in names.items():
            python = getattr(_ffi, name)
            lines.append(f'printf("{name} %zu\\n", sizeof(struct kvq_{struct}));')
            want.append(f"{name} {ctypes.sizeof(python)}")
            for field, *_ in python._fields_:
                lines.append(f'printf("{name}.{field} %zu\\n", '
                             f"offsetof(struct kvq_{struct}, {field}));")
                want.append(f"{name}.{field} {getattr(python, field).offset}")
        lines.append('printf("entry %zu\\n", sizeof(struct kvq_entry));')
        want.append(f"entry {kvq.ENTRY.itemsize}")
        source = ("#include <stddef.h>\n#include <stdio.h>\n#include <kvq.h>\n"
                  "int main(void)\n{\n" + "\n".join(lines) + "\n}\n")
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "offsets")
            subprocess.run(["cc", "-I", os.path.join(ROOT, "client"), "-x", "c", "-", "-o",
                            program], input=source, text=True, check=True)
            done = subprocess.run([program], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split("\n")[:-1], want)

    def test_used(self):
        """Every function is reached from the package's own code."""
        folder = os.path.dirname(kvq.__file__)
        text = ""
        for name in os.listdir(folder):
            if name.endswith(".py") and name != "_ffi.py":
                with open(os.path.join(folder, name), encoding="utf-8") as file:
                    text += file.read()
        by_submit = {"kvq_append", "kvq_attend", "kvq_append_attend"}  # as operations by name
        by_submit |= {n + "_on_stream" for n in by_submit | {"kvq_read"}}
        unused = {n for n in _ffi.FUNCTIONS if not re.search(rf"lib\.{n}\b", text)} - by_submit
        self.assertEqual(unused, {"kvq_buffer_size", "kvq_tensor_make"})

    def test_codes(self):
        codes = {name: int(value) for name, value in re.findall(r"KVQ_(E_\w+|OK) = (-?\d+)", KVQ_H)}
        self.assertEqual(codes, {c.name: c.value for c in kvq.Code})
        for code in kvq.Code:
            self.assertNotEqual(kvq.strerror(code), "unknown status")

    def test_operations(self):
        values = re.findall(r"KVQ_DO_(\w+) = (\d+)", KVQ_H)
        self.assertEqual({n.lower(): int(v) for n, v in values}, kvq.work.OPERATIONS)

    def test_version(self):
        self.assertRegex(kvq.version(), r"^\d+\.\d+\.\d+$")

    @unittest.skipUnless(e2e_rig.shutil.which("cc"), "needs a C compiler")
    def test_layouts(self):
        """Sizes and offsets of every structure, as the C compiler has them."""
        pairs = {"kvq_connect_options": _ffi.ConnectOptions, "kvq_daemon_info": _ffi.DaemonInfo,
                 "kvq_tensor": _ffi.Tensor, "kvq_layer": _ffi.LayerRow,
                 "kvq_session_options": _ffi.SessionOptions,
                 "kvq_session_info": _ffi.SessionInfo, "kvq_pages": _ffi.Pages,
                 "kvq_work": _ffi.Work}
        lines, here = [], []
        for name, kind in pairs.items():
            lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
            here.append(ctypes.sizeof(kind))
            for field, *_ in kind._fields_:
                lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field}));')
                here.append(getattr(kind, field).offset)
        for field, (_, offset) in kvq.ENTRY.fields.items():
            lines.append(f'printf("%zu\\n", offsetof(struct kvq_entry, {field}));')
            here.append(offset)
        lines.append('printf("%zu\\n", sizeof(struct kvq_entry));')
        here.append(kvq.ENTRY.itemsize)
        program = '#include <stdio.h>\n#include "client/kvq.h"\nint main(void) {\n' + "\n".join(
            lines) + "\nreturn 0; }\n"
        with tempfile.TemporaryDirectory() as folder:
            binary = os.path.join(folder, "layouts")
            subprocess.run(["cc", "-I", ROOT, "-x", "c", "-", "-o", binary], input=program,
                           text=True, check=True)
            out = subprocess.run([binary], capture_output=True, text=True, check=True).stdout
        self.assertEqual([int(x) for x in out.split()], here)


@unittest.skipIf(os.path.exists("/run/kvqd/attach.sock"), "they would find the service")
class Package(Test):
    """Conveniences on top of the library."""

    def setUp(self):
        super().setUp()
        self.tokens = Tokens(1, 100)
        self.session = self.client.session(self.tokens.rows, "f16")

    def test_info(self):
        info = self.client.info()
        self.assertEqual(info["backend"], "cpu")
        self.assertIn(info["isa"], ("c", "avx2", "avx512", "amx"))
        self.assertEqual(self.session.info()["ns"], f"uid-{os.getuid()}")
        self.assertEqual(self.session.info()["layers"], 2)

    def test_step_commits_or_aborts(self):
        k, v, q = (getattr(self.tokens, x)[0, :10] for x in "kvq")
        with self.queue.step([self.session], 10) as step:
            for layer in range(2):
                step.append(layer, k, v)
        self.assertEqual(self.session.tokens, 10)
        with self.assertRaises(ZeroDivisionError):
            with self.queue.step([self.session], 10) as step:
                step.append(0, k, v)
                raise ZeroDivisionError
        self.assertEqual(self.session.refresh(), 10)
        with self.queue.step([self.session], 10) as step:  # nothing is left open
            step.abort()
        self.assertEqual(self.session.refresh(), 10)

    def test_in_context(self):
        """The same outputs here as from the daemon, and the same session afterwards."""
        here, there = (self.client.session(self.tokens.rows, "oscar2") for _ in range(2))
        k, v, q = (self.client.array((100, *getattr(self.tokens, x).shape[2:])) for x in "kvq")
        for view, x in zip((k, v, q), "kvq"):
            view[...] = getattr(self.tokens, x)[0]
        with self.queue.local(require=True, max_tokens=1024, threads=2) as local:
            self.assertIsNone(local.why)
            local.add(here)
            for _ in range(3):
                with local.step([here], 100) as mine, self.queue.step([there], 100) as step:
                    for layer in range(2):
                        out, lse = mine.attend(layer, q, k=k, v=v)
                        want, want_lse = step.append_attend(layer, k, v, q)
                        np.testing.assert_array_equal(out, want)
                        np.testing.assert_array_equal(lse, want_lse)
            with local.step([here], 0) as step:
                with self.assertRaises(TypeError):  # as of append_attend: K would count as Q
                    step.attend(0, k, v, q)
                out, _ = step.attend(0, q[:1])
            np.testing.assert_array_equal(out, self.queue.attend([there], 0, q[:1])[0])
            self.assertEqual(here.tokens, 300)
            self.queue.step_whole([here], 100, [k, k], [v, v])
            self.assertEqual(here.refresh(), 400)
            with self.assertRaises(ValueError):
                with local.step([here], 1) as step:
                    step.attend(0, np.zeros((1, *q.shape[1:]), np.float32), k=k[:1].copy(), v=v[:1])
            self.fails(kvq.Code.E_LIMIT, local.step, [here], 1000)
            here.tokens = 5
            self.fails(kvq.Code.E_POSITION, local.step, [here], 1)
            here.tokens = 400
            local.remove(here)
        os.environ["KVQ_LOCAL"] = "daemon"
        try:
            self.fails(kvq.Code.E_UNSUPPORTED, self.queue.local, require=True)
            with self.queue.local() as local:
                self.assertIn("KVQ_LOCAL", local.why)
        finally:
            del os.environ["KVQ_LOCAL"]

    def test_failed_begin_leaves_nothing_open(self):
        other = self.client.session(self.tokens.rows, "f16")
        self.session.tokens = 5
        self.fails(kvq.Code.E_POSITION, self.queue.step, [self.session, other], 1)
        self.session.tokens = 0
        with self.queue.step([self.session, other], 1) as step:
            step.abort()

    def test_arrays_in_and_out(self):
        """Copies and views give the same; outputs go where they are told."""
        k, v, q = (getattr(self.tokens, x)[0, :10] for x in "kvq")
        answers = []
        for place in ("copied", "in place"):
            if place == "in place":
                views = [self.client.array(a.shape) for a in (k, v, q)]
                for view, a in zip(views, (k, v, q)):
                    view[...] = a
                k, v, q = views
            with self.client.session(self.tokens.rows[:1], "oscar2") as session:
                with self.queue.step([session], 10) as step:
                    out = np.zeros((10, 8, 128), np.float16)
                    got, lse = step.append_attend(0, k, v, q, out=out)
                    self.assertIs(got, out)
                    again, none = step.attend(0, q, lse=False)
                    self.assertIsNone(none)
                    self.assertEqual(again.dtype, np.float32)
                    half, _ = step.attend(0, q, out_dtype="f16")
                    self.assertEqual(half.dtype, np.float16)
                    self.assertTrue((half == out).all())
                    step.abort()
            answers.append(out.tobytes() + lse.tobytes() + again.tobytes())
        self.assertTrue(answers[0] == answers[1])

    def test_bad_arrays(self):
        k, v, q = (getattr(self.tokens, x)[0, :10] for x in "kvq")
        step = self.queue.step([self.session], 10)
        with self.assertRaises(ValueError):
            step.append(0, k[0], v[0])
        with self.assertRaises(TypeError):
            step.append(0, k.astype(np.float64), v)
        with self.assertRaises(ValueError):
            own = self.client.array((10, 2, 256))
            step.append(0, own[:, :, ::2], v)
        with self.assertRaises(ValueError):
            step.append(0, self.client.array((10, 2, 128))[::-1], v)
        with self.assertRaises(TypeError):
            self.client.session(self.tokens.rows, "f16", nonsense=True)
        with self.assertRaises(ValueError):
            self.client.buffer(0)
        step.abort()

    def test_shapes_are_those_of_session_and_step(self):
        """What the library would take for other tokens or heads, or write past, is refused, and
        nothing is committed."""
        k, v, q = (getattr(self.tokens, x)[0, :10] for x in "kvq")
        by_heads = [np.ascontiguousarray(a.transpose(1, 0, 2)) for a in (k, v, q)]
        narrow = [q[:, :4], np.concatenate([q, q], 1), q[:, :, :64], q[:9]]
        wrong = {"k": [by_heads[0], k[:9], np.concatenate([k, k]), k[:, :1]],
                 "v": [by_heads[1], v[:9], np.concatenate([v, v]), v[:, :1]],
                 "q": [by_heads[2], *narrow]}
        good = {"k": k, "v": v, "q": q}
        for place in (np.ascontiguousarray, self.in_buffer):
            for name, arrays in wrong.items():
                for array in arrays:
                    step = self.queue.step([self.session], 10)
                    expected = rf"^{name} has shape .*; expected \(10"
                    with self.assertRaisesRegex(ValueError, expected):
                        step.append_attend(0, **{n: place(a) for n, a in
                                                 {**good, name: array}.items()})
                    self.fails(kvq.Code.E_INCOMPLETE, step.end)
            whole = self.client.array((10, 16, 128))
            whole[...] = 7
            for out in (whole[:, :4], whole[:5, :8], whole[:, :8, :64]):
                with self.queue.step([self.session], 10) as step:
                    with self.assertRaisesRegex(ValueError, "^out has shape"):
                        step.append_attend(0, place(k), place(v), place(q), out=out)
                    step.abort()
            self.assertTrue((whole == 7).all())
        self.assertEqual(self.session.refresh(), 0)

    def in_buffer(self, array):
        made = self.client.array(array.shape, array.dtype)
        made[...] = array
        return made

    def test_arrays_that_cannot_be_written(self):
        q = self.tokens.q[0, :4]
        with self.queue.step([self.session], 10) as step:
            for layer in range(2):
                step.append(layer, self.tokens.k[layer, :10], self.tokens.v[layer, :10])
        whole = self.client.array((8, 8, 128))
        locked = whole[:4].view()
        locked.flags.writeable = False
        folded = np.lib.stride_tricks.as_strided(whole, (4, 8, 128), (512, 512, 4))
        swapped = np.zeros((4, 8, 128), ">f4")
        for out, error in ((locked, ValueError), (folded, ValueError), (swapped, TypeError),
                           (np.zeros((4, 8, 128)), TypeError), ([0], TypeError)):
            with self.assertRaises(error):
                self.queue.attend([self.session], 0, q, 4, out=out)
        with self.assertRaises(TypeError):
            self.queue.attend([self.session], 0, q.astype(">f4"), 4)
        with self.assertRaises(TypeError):
            self.queue.attend([self.session], 0, q.astype(np.float16), 4, dtype="bf16")
        plain = np.zeros((8, 8, 128), np.float32)
        for own, out in ((plain[:4], plain[:4]), (plain[:4], plain[3:7]), (whole[:4], whole[3:7]),
                         (self.in_buffer(q),) * 2):
            with self.assertRaisesRegex(ValueError, "^out overlaps q"):
                self.queue.attend([self.session], 0, own, 4, out=out)
        self.queue.attend([self.session], 0, plain[::2], 4, out=plain[1::2])
        self.queue.attend([self.session], 0, whole[:4], 4, out=whole[4:])

    def test_a_session_opened_as_it_is_has_its_shapes(self):
        rows = [kvq.Layer(8, 2, 128, repeat=2), kvq.Layer(4, 4, 64), kvq.Layer(8, 2, 128)]
        with self.client.session(rows, "f16", name="shaped"):
            pass
        with self.client.session(name="shaped") as session:
            shapes = [(x.q_heads, x.kv_heads, x.head_dim, x.dim_of_v) for x in session.layers]
            self.assertEqual(shapes, [(8, 2, 128, 128)] * 2 + [(4, 4, 64, 64), (8, 2, 128, 128)])
            fork, = self.queue.fork([session])
            self.assertEqual(len(fork.layers), 4)
            with self.queue.step([session], 1) as step:
                with self.assertRaisesRegex(ValueError, r"expected \(1, 4, 64\)"):
                    step.append(2, *(np.zeros((1, 2, 128), np.float32),) * 2)
                step.abort()
            session.drop()

    def test_rotation_of_v(self):
        """By default as the format's paper has it. An engine that rotates V itself gets the same in
        its own basis, and whoever rotates, reading gives back what was handed over."""
        def opened(format, **options):
            return self.client.session(tokens.rows, format, attention="exact", **options)
        tokens, turned = Tokens(7, 600), Tokens(7, 600)
        signs = np.array([[(-1) ** bin(i & j).count("1") for j in range(128)] for i in range(128)])
        rotation = np.float32(signs / np.sqrt(128))
        turned.v = tokens.v @ rotation
        for format, by in (("oscar2", "daemon"), ("quarot4", "daemon"), ("kivi2", "none"),
                           ("oscar2-norot", "none"), ("oscar2:vrot=none", "none")):
            self.assertEqual(opened(format).info()["v_rotation"], by)
        default, daemon, none, engine = (
            opened("oscar2", v_rotation=by) for by in ("default", "daemon", "none", "engine"))
        outs = [self.queue_outputs(t, s) for t, s in
                ((tokens, default), (tokens, daemon), (tokens, none), (turned, engine))]
        np.testing.assert_array_equal(outs[0], outs[1])
        error = np.abs(outs[3] @ rotation - outs[1])  # codes may differ where fp16 rounds otherwise
        self.assertLess(np.sqrt(np.mean(error ** 2)),
                        np.sqrt(np.mean((outs[2] - outs[1]) ** 2)) / 5)
        for session, t in ((daemon, tokens), (engine, turned)):
            v = self.queue.read(session, 0)[1]
            self.assertLess(np.abs(v - t.v[0]).max(), 2.5)
            self.assertLess(np.sqrt(np.mean((v - t.v[0]) ** 2)), 0.5)

    def queue_outputs(self, tokens, session):
        tokens.feed(self.queue, session, 590, attend=False)
        return np.concatenate([out for out, _ in tokens.feed(self.queue, session, 10)])

    def test_numbers_that_c_would_cut(self):
        for change in ({"q_heads": 65536 + 8}, {"kv_heads": -1}, {"repeat": 1 << 32},
                       {"window": 1.5}, {"format": "f16\0x"}):
            with self.assertRaises((ValueError, TypeError)):
                self.client.session([kvq.Layer(**{"q_heads": 8, "kv_heads": 2, "head_dim": 128,
                                                  **change})], "f16")
        for tokens in (-1, 1 << 32, 1.5, [1, 2], "1", None, True):
            with self.assertRaises((ValueError, TypeError)):
                self.queue.step([self.session], tokens)
        for queries in (65536 + 1, -1):
            with self.assertRaises(ValueError):
                self.queue.attend([self.session], 0, self.tokens.q[0, :1], queries)
        with self.assertRaises(ValueError):
            self.client.session(self.tokens.rows, "f16", name="a\0b")
        with self.assertRaises(ValueError):
            self.queue.truncate([self.session], -1)
        with self.assertRaises(ValueError):
            self.queue.step([self.session], 1, ids=[1 << 31])
        with self.assertRaises(TypeError):
            self.queue.step([self.session], 1, ids=[1.0])

    def test_closed_and_others(self):
        """Of what is closed, or of another client, an error says so; nothing is reached."""
        other = kvq.Client(self.daemon.directory)
        foreign = other.session(self.tokens.rows, "f16")
        with self.assertRaises(ValueError):
            self.queue.step([foreign], 1)
        queue, local = other.queue(), None
        local = queue.local()
        local.add(foreign)
        step = local.step([foreign], 1)
        held = other.array((1, 2, 128))
        tensor = other.find_buffer(held).tensor(held)
        entries = kvq.make_entries([foreign])
        queue.close()  # and with it the Local
        for call in (lambda: queue.step([foreign], 1), queue.nop, queue.order,
                     lambda: local.add(foreign), lambda: local.why,
                     lambda: step.attend(0, np.zeros((1, 8, 128), np.float32), k=held, v=held)):
            with self.assertRaises(ValueError):
                call()
        queue = other.queue()
        other.find_buffer(held).close()
        with self.assertRaises(ValueError):
            queue.call("append", entries, step=1, layer=0, k=tensor, v=tensor)
        other.close()
        other.close()
        for call in (other.info, other.queue, foreign.info, lambda: other.buffer(1), queue.nop):
            with self.assertRaises(ValueError):
                call()

    def test_buffer_of_a_local_step_closed_too_early(self):
        session = self.client.session(self.tokens.rows, "f16")
        k, v, q = (self.in_buffer(getattr(self.tokens, x)[0, :1]) for x in "kvq")
        with self.queue.local(require=True, max_tokens=1024) as local:
            local.add(session)
            step = local.step([session], 1)
            step.attend(0, q, k=k, v=v)
            self.assertRaisesRegex(ValueError, "out overlaps q", step.attend, 0, q, k=k, v=v, out=q)
            wide = self.client.array((4, 8, 128))
            both = wide.reshape(-1)[:1024].reshape(1, 8, 128)
            inner = wide.reshape(-1)[512:768].reshape(1, 2, 128)
            step.attend(1, q, k=inner, v=v)
            self.fails(kvq.Code.E_INVALID, step.attend, 0, q, k=k, v=v, out=both)  # layer 1's K
            self.client.find_buffer(v).close()
            with self.assertRaisesRegex(ValueError, "closed before the step's end"):
                step.end()
            step.abort()
        self.assertEqual(session.refresh(), 0)

    def test_one_thread_at_a_time(self):
        """A queue in use by another thread, and a client that is to be closed meanwhile."""
        inside, leave, seen = threading.Event(), threading.Event(), []

        def use():
            inside.set()
            leave.wait(e2e_rig.BOUND)
        thread = threading.Thread(target=self.queue.turn.run, args=(self.client._gate.run, use))
        thread.start()
        inside.wait(e2e_rig.BOUND)
        for call in (self.queue.nop, self.queue.close, self.client.close, self.client.reattach):
            try:
                call()
            except RuntimeError as error:
                seen.append(str(error))
        leave.set()
        thread.join(e2e_rig.BOUND)
        self.assertEqual(len(seen), 4)
        self.queue.nop()
        self.client.info()

    def test_without_the_library(self):
        """Importing says what to do."""
        done = subprocess.run([sys.executable, "-c", "import kvq"], capture_output=True, text=True,
                              env=dict(os.environ, KVQ_LIBRARY="/nowhere/libkvq.so",
                                       PYTHONPATH=os.path.join(ROOT, "client", "python")),
                              timeout=e2e_rig.BOUND)
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, "ImportError: kvq cannot load /nowhere/libkvq.so .*KVQ_LIB")

    def test_arrays_outlive_their_buffer(self):
        """A buffer's memory is there for as long as an array refers to it."""
        buffer = self.client.buffer(1 << 16)
        array = buffer.array((64, 64))
        array[...] = 3
        buffer.close()
        buffer.close()
        gc.collect()
        self.assertEqual(array.sum(), 3 * 64 * 64)

    def test_buffer_from_front_to_back(self):
        buffer = self.client.buffer(4096)
        first, second = buffer.take((3, 5), np.float16), buffer.take(7)
        self.assertEqual(second.ctypes.data - first.ctypes.data, 64)
        self.assertEqual(second.ctypes.data % 64, 0)
        with self.assertRaises(TypeError):
            buffer.take(4096)
        self.assertIs(self.client.find_buffer(second[2:]), buffer)
        self.assertIsNone(self.client.find_buffer(np.zeros(3)))

    def test_errors_carry_code_text_and_entries(self):
        self.session.tokens = 3
        error = self.fails(kvq.Code.E_POSITION, self.queue.step, [self.session], 1)
        self.assertEqual(error.entries["status"][0], kvq.Code.E_POSITION)
        self.assertTrue(str(error).startswith("E_POSITION: "))
        self.session.tokens = 0

    def test_closed_session(self):
        session = self.client.session(self.tokens.rows, "f16")
        session.close()
        session.close()
        self.fails(kvq.Code.E_STALE, self.queue.step, [session], 1)
        with self.client.session(self.tokens.rows, "f16") as session:
            session.drop()

    def test_merge(self):
        random = np.random.default_rng(1)
        logits, values = random.standard_normal((3, 50)), random.standard_normal((50, 8))

        def state(part):
            weights = np.exp(logits[:, part])
            return weights @ values[part] / weights.sum(1)[:, None], np.log(weights.sum(1))
        out, lse = kvq.merge_states(*state(slice(0, 20)), *state(slice(20, 50)))
        want, want_lse = state(slice(0, 50))
        self.assertLess(np.abs(out - want).max(), 1e-6)
        self.assertLess(np.abs(lse - want_lse).max(), 1e-6)
        with self.assertRaises(ValueError):
            kvq.merge_states(out, lse[:2], out, lse)


class Captures(Test):
    """What is captured is in the file as it was handed over."""

    def test_capture(self):
        tokens = Tokens(1, 5, layers=1)
        with tempfile.TemporaryDirectory() as folder, \
                self.client.session(tokens.rows, "f16") as session:
            path = os.path.join(folder, "five.capture")
            with kvq.Capture(path, tokens.rows, model="test") as capture:
                step = self.queue.step([session], 5)
                tensors = {}
                for name in "kv":
                    own = self.client.array((5, 2, 128))
                    own[...] = getattr(tokens, name)[0]
                    tensors[name] = self.client.find_buffer(own).tensor(own)
                ticket = self.queue.call("append", step.entries, step=step.number, layer=0,
                                         **tensors)
                capture.append(ticket)
                step.end()
                self.assertEqual(capture.tokens, 5)
            with open(path, "rb") as file:
                held = file.read()
        for name in "kv":  # [heads][tokens][dim]
            self.assertIn(getattr(tokens, name)[0].transpose(1, 0, 2).tobytes(), held)
        with self.assertRaises(kvq.Error) as caught:
            kvq.Capture("/nowhere/at/all", tokens.rows)
        self.assertEqual(caught.exception.code, kvq.Code.E_SYSTEM)


class WithoutGpu(Test):
    """A daemon without GPUs has none to show, and says so when asked for one."""
    DAEMON = {"backend": "cpu"}

    def test_refusals(self):
        self.assertEqual(self.client.gpus(), [])
        self.fails(kvq.Code.E_UNSUPPORTED, self.client.buffer_on, 4096)
        self.fails(kvq.Code.E_UNSUPPORTED, self.queue.prepare_streams)
        self.assertEqual(self.queue.order(), "none")
        rows = Tokens(1, 1).rows
        place = "GPU-00000000-0000-0000-0000-000000000001"
        self.fails(kvq.Code.E_INVALID, self.client.session, rows, "f16", place=place)
        with self.client.session(rows, "f16", place="host") as session:
            self.assertEqual(session.info()["place"], "host")


@unittest.skipUnless(os.path.exists(SOFT_DRIVER), "needs the software driver")
class OnGpu(Test):
    """Device memory and streams from Python."""
    DAEMON = {"backend": "emu", "gpu_bytes": "256mb"}

    def setUp(self):
        os.environ["KVQ_GPU_DRIVER"] = SOFT_DRIVER
        self.cuda = Cuda(SOFT_DRIVER)
        super().setUp()

    def run_at(self, buffer, at):
        """One step with tensors from `at` on, against the same on the host."""
        tokens = Tokens(1, 20)
        k, v, q = (np.ascontiguousarray(getattr(tokens, x)[0, :20], np.float32) for x in "kvq")
        with self.client.session(tokens.rows[:1], "f16", place="host") as session:
            with self.queue.step([session], 20) as step:
                want, _ = step.append_attend(0, k, v, q)
                step.abort()
        place = self.client.gpus()[0]["place"]
        places = {"k": at, "v": at + (1 << 18), "q": at + (1 << 19)}
        for name, array in zip("kvq", (k, v, q)):
            self.cuda.put(places[name], array)
        tensors = {n: CudaTensor(places[n], *a.shape) for n, a in zip("kvq", (k, v, q))}
        out = CudaTensor(at + (1 << 20), *want.shape)
        with self.client.session(tokens.rows[:1], "f16", place=place) as session:
            self.assertEqual(session.info()["place"], place)
            with self.queue.step([session], 20) as step:
                step.on_stream("append_attend", 0, 0, out=out, **tensors)
                got = self.cuda.get(out.at, want.shape)
                with self.assertRaises(ValueError):
                    step.on_stream("attend", 0, 0, q=CudaTensor(4096, 1, 1, 1), out=out)
                step.abort()
        self.assertLess(abs(got - want).max(), 2e-3)
        self.assertEqual(self.queue.order(), "words")
        self.assertTrue(buffer.contains(out))

    def test_import(self):
        at = self.cuda.alloc(4 << 20)
        with self.client.import_tensor(CudaTensor(at, 1 << 20)) as buffer:
            self.assertEqual(buffer.address, at)
            self.run_at(buffer, at)
        self.cuda("cuMemFree_v2", ctypes.c_uint64(at))
        self.fails(kvq.Code.E_BUFFER, self.client.import_tensor, CudaTensor(4096, 16))

    def test_in_context(self):
        """The same bits on the engine's own stream as from the daemon."""
        tokens = Tokens(1, 20)
        place = self.client.gpus()[0]["place"]
        arrays = {x: np.ascontiguousarray(getattr(tokens, x)[0, :20], np.float32) for x in "kvq"}
        with self.client.buffer_on(4 << 20) as buffer:
            at = buffer.address
            tensors = {}
            for name, where in {"k": at, "v": at + (1 << 18), "q": at + (1 << 19)}.items():
                self.cuda.put(where, arrays[name])
                tensors[name] = CudaTensor(where, *arrays[name].shape)
            outs = [CudaTensor(at + (i << 20), *arrays["q"].shape) for i in (1, 2)]
            here, there = (self.client.session(tokens.rows, "oscar2", place=place)
                           for _ in range(2))
            local = self.queue.local(place, max_tokens=1024, require=True)
            local.add(here)
            bucket = kvq.Bucket(local, here, max_queries=20)
            for _ in range(8):
                with self.queue.step([there], 20) as step:
                    for layer in range(2):
                        step.on_stream("append_attend", layer, 0, out=outs[0], **tensors)
                entries = kvq.make_entries([here], append=20, queries=20)
                bucket.begin(entries, 0)
                for layer in range(2):
                    bucket.attend(entries, layer, 0, out=outs[1], **tensors)
                bucket.end(entries, 0)
                here.tokens = int(entries["value"][0])
                np.testing.assert_array_equal(*(self.cuda.get(o.at, o.shape) for o in outs))
            self.queue.nop([here])  # waits for the last step's commit
            self.assertEqual(here.refresh(), 160)
            self.assertEqual(repr(bucket), "<kvq.Bucket open>")
            bucket.close()
            self.assertEqual(repr(bucket), "<kvq.Bucket closed>")
            local.close()
            self.assertEqual(repr(local), f"<kvq.Local on '{place}': closed>")

    def test_closed_by_another_thread(self):
        """Not while a call works with it: the library would read what is gone."""
        place, said = self.client.gpus()[0]["place"], []
        with self.client.buffer_on(4 << 20) as buffer, self.client.session(
                Tokens(1, 1).rows[:1], "f16", place=place) as session:
            tensors = {n: CudaTensor(buffer.address + (i << 18), 1, heads, 128)
                       for i, (n, heads) in enumerate({"k": 2, "v": 2, "q": 8, "out": 8}.items())}

            def close():
                try:
                    buffer.close()
                except BufferError as error:
                    said.append(str(error))

            def closing(call):
                def called(*arguments):
                    thread = threading.Thread(target=close)
                    thread.start()
                    thread.join()
                    return call(*arguments)
                return called
            for name in ("kvq_submit_on_stream", "kvq_local_attend_on_stream"):
                with unittest.mock.patch.object(lib, name, closing(getattr(lib, name))):
                    if "local" in name:
                        with self.queue.local(place, max_tokens=1024) as local:
                            local.add(session)
                            bucket = kvq.Bucket(local, session)  # which the local closes
                            entries = kvq.make_entries([session], append=1, queries=1)
                            bucket.begin(entries, 0)
                            bucket.attend(entries, 0, 0, **tensors)
                    else:
                        with self.queue.step([session], 1) as step:
                            step.on_stream("append_attend", 0, 0, **tensors)
                            step.abort()
                self.assertIn("1 calls of other threads use this buffer", said.pop(), name)
            buffer.close()
            self.assertFalse(buffer.pointer)
            self.assertEqual(self.client._device_buffers, [])

    def test_made_by_the_daemon(self):
        with self.client.buffer_on(4 << 20) as buffer:
            self.run_at(buffer, buffer.address)
        of = f"<kvq.DeviceBuffer of {4 << 20} bytes at {buffer.address:#x}: "
        self.assertEqual(repr(buffer), of + "closed>")
        left = self.client.buffer_on(1 << 20)  # to be closed with the client
        self.assertGreater(left.address, 0)
        self.assertRegex(repr(left), ": open>$")

    def test_at_any_moment_of_making_and_closing(self):
        """Nothing is left of it."""
        def make_and_close():
            self.client.buffer_on(4096).close()
        for moment in Interrupts.moments(make_and_close):
            for left in list(self.client._device_buffers):  # its close was interrupted
                left.close()
            self.assertEqual(self.client._device_buffers, [])
        self.assertGreater(moment, 20)


class Examples(Test):
    """The programs of examples/."""

    def run_example(self, *command):
        environment = dict(os.environ, KVQ_RUNTIME_DIR=self.daemon.directory,
                           PYTHONPATH=os.path.join(ROOT, "client", "python"))
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True,
                              timeout=e2e_rig.BOUND).stdout

    def test_python(self):
        out = self.run_example(sys.executable, os.path.join(ROOT, "examples", "minimal.py"))
        self.assertRegex(out, r"^240 tokens, 2\.75 bits per packed value, output -?\d")

    def test_readme(self):
        """Its programs, one behind the other, print what stands beside them."""
        path = os.path.join(ROOT, "client", "python", "README.md")
        with open(path, encoding="utf-8") as file:
            program = "".join(re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S))
        told = re.findall(r"print\(.*?\) +# (.*)", program)
        self.assertEqual(len(told), 2)
        self.assertEqual(self.run_example(sys.executable, "-c", program).splitlines(), told)

    def test_pytorch(self):
        """Where there is no PyTorch, or no GPU for it, it says so."""
        program = os.path.join(ROOT, "examples", "pytorch_engine.py")
        environment = dict(os.environ, KVQ_RUNTIME_DIR=self.daemon.directory,
                           PYTHONPATH=os.path.join(ROOT, "client", "python"))
        done = subprocess.run([sys.executable, program], capture_output=True, text=True,
                              env=environment, timeout=e2e_rig.BOUND)
        if done.returncode:
            self.assertRegex(done.stderr, r"^(this example needs (PyTorch|a GPU)"
                                          r"|this kvqd has no GPU)\n$")
        else:
            self.assertRegex(done.stdout, r"^44 tokens on .*, streams ordered by ")

    def test_c(self):
        """And its number, against double precision over the same tokens as they are stored."""
        program = os.path.join(os.path.dirname(e2e_rig.BIN), "tests", "example_minimal")
        if not os.path.exists(program):
            self.skipTest("example_minimal was not built")
        out = self.run_example(program)
        self.assertRegex(out, r"^304 and 305 tokens, output -?\d")
        self.assertEqual(self.run_example(program.replace("minimal", "in_context")), out)
        # The values of rows of the first session: five in the first step, then one each.
        i = np.arange(1 << 15)

        def values(token, start, rows, heads):
            at = i[start // 4:start // 4 + rows * heads * 128]
            return (((at * 31 + token * 17) % 101 - 50) / 50).reshape(rows, heads, 128)
        k, v = (np.concatenate([values(t, start, 5 if t == 0 else 1, 2) for t in range(300)])
                for start in (0, 16 << 10))
        k, v, q = (x.astype(np.float32) for x in (k, v, values(299, 32 << 10, 1, 8)))
        with self.client.session([kvq.Layer(8, 2, 128)], "kvq2") as session:
            with self.queue.step([session], 303) as step:
                step.append(0, k[:303], v[:303])
            stored = self.queue.read(session, 0)
        want, _ = attend64(*(np.concatenate([s, x[303:]]) for s, x in zip(stored, (k, v))), q, 303)
        self.assertLess(abs(float(out.split()[-1]) - want[0, 0, 0]), 1e-4)


if __name__ == "__main__":
    sys.exit(e2e_rig.run([Header, Hints, Package, Tickets, Buffers, Ends, Failures, Forks, Found,
                          Given, InUse, Interrupts, LetGo, Meanwhile, Queues, Readers, Readings,
                          Prepared, Private, Shows, Words, Captures, WithoutGpu, OnGpu, Examples],
                         __doc__))
