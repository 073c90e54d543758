#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/bench-engines.py and tools/bench-prompt.py without any engine: what they refuse, and what
they say of rows that are not over kvq. Engines are stood for by scripts and modules."""
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import types
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
TOOLS = os.path.join(HERE, "..", "..", "tools")
sys.path.insert(0, os.path.join(TOOLS, "engines"))
import options  # noqa: E402
import worker  # noqa: E402

# Answers as a worker does. A cache has 1 MB for each request; one of 16 does not fit.
FAKE = """#!{python}
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    batch = asked.get("batch", 0)
    answer = {{"start": {{"what": "fake"}}, "open": {{"bytes": 1000000 * batch, "resident": None}},
              "step": {{"ms": 2.0}}}}.get(asked["do"], {{}})
    if batch == 16:
        answer = {{"error": "MemoryError: no"}}
    print(json.dumps(answer), flush=True)
"""


def program(name):
    """A tool as a module."""
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"),
                                                  os.path.join(TOOLS, name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Daemon:
    """Stands for engines/daemon.py: a kvqd whose sessions have so many tokens."""
    directory = "nowhere"

    def __init__(self, tokens):
        self.tokens = tokens

    def session_tokens(self):
        return self.tokens

    def settle(self):
        pass

    def stop(self):
        pass


class Case(unittest.TestCase):
    """With an interpreter that answers for every engine."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.fake = self.script("fake", FAKE.format(python=sys.executable))

    def script(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)
        return path

    def run_tool(self, name, *options):
        return subprocess.run([sys.executable, os.path.join(TOOLS, name), *options],
                              capture_output=True, text=True, timeout=60)


class Backend(Case):
    """Rows of llama.cpp over kvq, which runs as well where kvq's backend is not found."""

    def test_no_backend(self):
        """A row that is named needs it; the default rows do without, and say so."""
        for name, row in (("bench-engines.py", "llama:kvq:f16"), ("bench-prompt.py", "kvq:f16")):
            for options, says in ((("--rows", row), f"{row} needs --ggml-backend"),
                                  (("--ggml-backend", "/nowhere/x"), "there is no file /nowhere/")):
                done = self.run_tool(name, *options)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(says, done.stderr)
        done = self.run_tool("bench-engines.py", "--python", f"llama={self.fake}", "--python",
                             f"transformers={self.fake}", "--tokens", "64", "--threads", "1")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("| `llama:f16` | 2 | 500.0 |", done.stdout)
        self.assertNotIn("| `llama:kvq", done.stdout)
        for row in ("llama:kvq:f16", "llama:kvq:kvq2/fast"):
            self.assertIn(f"not measured: {row}: needs --ggml-backend FILE", done.stdout)

    def test_default_prompts(self):
        prompt = program("bench-prompt")
        with mock.patch.object(sys, "argv", ["bench-prompt.py"]):
            given = prompt.arguments()
        self.assertEqual(given.rows, ["f16", "f16/fa"])
        self.assertEqual(list(given.failed), ["kvq:f16", "kvq:kvq2/fast"])

    def test_not_over_kvq(self):
        """A row whose session has not grown by the token that was decoded is refused."""
        class Row(worker.Row):
            def step(self):
                pass

            def nbytes(self):
                return 5

        def make(_name, tokens, batch):
            row = Row()
            row.daemon = Daemon(batch * tokens + grown)
            return row
        engine = worker.Worker(1)
        engine.make, engine.with_model = make, True
        with mock.patch.object(worker.Worker, "_resident", lambda self: 0):
            grown = 9
            self.assertEqual(engine.open("a", 64, 3), {"bytes": 5, "resident": None})
            grown = 3  # one request of three goes over kvq
            with self.assertRaisesRegex(RuntimeError, "have 195 tokens, and 201 were decoded"):
                engine.open("b", 64, 3)
        self.assertEqual(list(engine.rows), ["a"])

    def test_prompt_not_over_kvq(self):
        """The same in bench-prompt.py, behind the first piece."""
        prompt, took = program("bench-prompt"), []
        api, files = mock.MagicMock(), types.ModuleType("llama_files")
        files.TYPES, files.load_backends = {"f16": 1}, lambda api: None
        files.decode = lambda api, context, at, ids: took.append(len(ids))
        with mock.patch.object(sys, "argv", ["bench-prompt.py", "--worker", "kvq:f16",
                                             "--ggml-backend", self.fake, "--model", "x",
                                             "--tokens", "1024"]):
            given = prompt.arguments()
        for tokens in (0, 512):
            daemon = types.ModuleType("daemon")
            daemon.Daemon = lambda threads, tokens=tokens: Daemon(tokens)
            with mock.patch.dict(sys.modules, llama_cpp=api, llama_files=files, daemon=daemon), \
                    mock.patch.object(sys, "stdin", io.StringIO("go\n")), \
                    mock.patch.object(sys, "stdout", io.StringIO()) as out:
                if tokens:
                    prompt.work_in_llama(given)
                    self.assertTrue(out.getvalue().startswith("pieces ["))
                else:
                    with self.assertRaisesRegex(RuntimeError, "0 tokens, and 512 were decoded"):
                        prompt.work_in_llama(given)
        self.assertEqual(took, [512, 512, 512])


    def test_vllm_not_over_kvq(self):
        """The same in vLLM, behind the whole prompt, whose pieces are timed to its first token."""
        prompt = program("bench-prompt")
        steps = iter([[], [], ["first"], ["second"]] * 2)
        row = mock.Mock(engine=mock.Mock(step=lambda: next(steps)), step=lambda: next(steps))
        engine = types.ModuleType("in_vllm")
        engine.make, engine.Engine = lambda threads: None, lambda *what: row
        given = mock.Mock(worker="vllm:kvq:kvq2", tokens=1024, threads=1)
        for row.daemon in (None, Daemon(1024), Daemon(512)):
            with mock.patch.dict(sys.modules, in_vllm=engine), \
                    mock.patch.object(sys, "stdin", io.StringIO("go\n")), \
                    mock.patch.object(sys, "stdout", io.StringIO()) as out:
                if row.daemon is None or row.daemon.tokens == 1024:
                    prompt.work_in_vllm(given)
                    self.assertEqual(len(json.loads(out.getvalue()[7:])), 3)
                    continue
                steps = iter([[], ["first"]])
                with self.assertRaisesRegex(RuntimeError, "512 tokens, and 1024 were decoded"):
                    prompt.work_in_vllm(given)
                self.assertEqual(out.getvalue(), "")


class Pieces(unittest.TestCase):
    """Of rows over kvq, with stand-ins of what is not here."""

    @staticmethod
    def load(name, **modules):
        """A module of tools/engines."""
        stands = {n: mock.MagicMock() for n in ("numpy", "gguf", "kvq", "kvq.private")}
        with mock.patch.dict(sys.modules, {**stands, **modules}):
            for known in ("llama_files", name):
                sys.modules.pop(known, None)
            return importlib.import_module(name)

    def test_contexts_are_freed(self):
        """Each once, also if the second one, over full sessions, is not made or takes no state."""
        for contexts, takes, freed in (((1, 2), (4, 4), [1]), ((1, 0), (4,), [1]),
                                       ((1, 2), (4, 0), [1, 2]), ((1,), (0,), [1]), ((0,), (), [])):
            api = mock.MagicMock()
            api.llama_init_from_model.side_effect = contexts
            api.llama_state_seq_set_data.side_effect = takes
            module = self.load("in_llama", llama_cpp=api)
            kvq = module.OverKvq
            with mock.patch.multiple(kvq, state=lambda _: b"seed", longer=lambda *_: b"long",
                                     _fill_sessions=mock.DEFAULT,
                                     _begin_daemon=lambda row: setattr(row, "daemon", Daemon(0))), \
                    mock.patch.dict(os.environ), \
                    mock.patch.object(module.llama_files, "decode", return_value=0), \
                    self.subTest(contexts=contexts, takes=takes):
                if freed == [1] and len(takes) == 2:
                    row = kvq(mock.Mock(threads=1), "f16", "", 64, 1)
                    self.assertEqual(row.context, 2)
                else:
                    with self.assertRaises(RuntimeError):
                        kvq(mock.Mock(threads=1), "f16", "", 64, 1)
                self.assertEqual([c.args[0] for c in api.llama_free.call_args_list], freed)

    def test_the_pool(self):
        """Of a daemon: all that the machine has, for a batch."""
        module = self.load("daemon")

        def start(arguments, pass_fds):
            pools.append(int(arguments[arguments.index("--pool-bytes") + 1]))
            os.write(pass_fds[0], b"ready")
            return mock.Mock()
        pools = []
        with mock.patch.object(module.subprocess, "Popen", start):
            for left in (100 << 30, 5 << 30, -1):
                with mock.patch.object(module, "available", return_value=left):
                    for batch in (1, 2):
                        module.Daemon(1, batch).stop()
        self.assertEqual(pools, [8 << 30, 100 << 30, 5 << 30, 5 << 30, 1 << 28, 1 << 28])


class Engines(Case):
    """bench-engines.py over workers that time nothing."""

    def test_not_here(self):
        """Why an engine did not start is said where it starts, and of its rows."""
        bare = self.script("bare", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        done = self.run_tool("bench-engines.py", "--python", f"transformers={bare}", "--python",
                             "ik=/nowhere/python", "--python", f"llama={self.fake}", "--rows",
                             "static,ik:f16,llama:f16", "--tokens", "64", "--threads", "1")
        self.assertEqual(done.returncode, 1, done.stderr)
        lacks = r"ModuleNotFoundError: No module named '\w+'"
        where = r" \[batch 1, 64 tokens, 1 thread\]\n"
        self.assertRegex(done.stderr, "transformers: did not start: " + lacks + r"\n")
        self.assertRegex(done.stdout, "not measured: static: " + lacks + where)
        self.assertRegex(done.stderr, "ik: did not start: .*No such file")
        self.assertRegex(done.stdout, "not measured: ik:f16: .*No such file.*" + where)
        self.assertIn("| `llama:f16` | 2 |", done.stdout)

    def test_batches(self):
        """Each batch has a table, where a step is a token of each request; what does not fit is
        named with its batch, and the others go on."""
        path = os.path.join(self.folder, "measured.json")
        done = self.run_tool("bench-engines.py", "--python", f"transformers={self.fake}", "--rows",
                             "static,dynamic", "--tokens", "64,128", "--batch", "1,8,16",
                             "--threads", "2", "--json", path)
        self.assertEqual(done.returncode, 1, done.stderr)
        for batch, rest in ((1, "500.0 | 1.00 | 1 | - |"), (8, "4000.0 | 1.00 | 8 | - |")):
            for tokens in (64, 128):
                start = done.stdout.index(f"batch {batch}, {tokens} tokens, 2 threads:\n")
                self.assertIn(f"| `dynamic` | 2 | {rest}", done.stdout[start:].split("batch", 2)[1])
        self.assertIn("not measured: dynamic: MemoryError: no [batch 16, 64 tokens, 2 threads; "
                      "batch 16, 128 tokens, 2 threads]\n", done.stdout)
        with open(path, encoding="utf-8") as file:
            cases = json.load(file)
        self.assertEqual([(c["batch"], c["tokens"], len(c["rows"])) for c in cases],
                         [(1, 64, 2), (1, 128, 2), (8, 64, 2), (8, 128, 2), (16, 64, 0),
                          (16, 128, 0)])


class Memory(unittest.TestCase):
    """A row that does not fit is an error, which says how much there was."""

    def test_does_not_fit(self):
        """In a process of its own: the limit stays."""
        done = subprocess.run(
            [sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1])\n"
             "import worker\n"
             "engine = worker.Worker(1)\n"
             "engine.make = lambda name, tokens, batch: bytearray(batch << 30)\n"
             "worker.available = lambda: 2 << 30\n"
             "engine.open('a', 64, 3)\n", os.path.join(TOOLS, "engines")],
            capture_output=True, text=True, timeout=60)
        self.assertIn("(2.1 GB of memory were left for it)", done.stderr)

    def test_room(self):
        """What is needed is said before anything is taken."""
        with mock.patch.object(worker, "available", lambda: 100):
            worker.check_room(100)
            with self.assertRaisesRegex(MemoryError, "1.5 GB are needed"):
                worker.check_room(1.5e9)


class Meant(Case):
    def test_what_cannot_be_meant(self):
        for name, options, says in (
                ("bench-engines.py", ("--rounds", "0"), "--rounds 0: expected 1 or more"),
                ("bench-prompt.py", ("--rounds", "0"), "--rounds 0: expected 1 or more"),
                ("bench-prompt.py", ("--rows", "f16", "--python", "ik=x"), "ik is no engine"),
                ("bench-prompt.py", ("--rows", "vllm:auto", "--pieces", "512,512"),
                 "vLLM cuts prompts by itself"),
                ("bench-engines.py", ("--rows", "static,llama:f16", "--base", "llama:f61"),
                 "--base llama:f61 is none of the rows: static, llama:f16"),
                ("bench-engines.py", ("--batch", "0"), "--batch 0: expected 1 or more"),
                ("bench-engines.py", ("--batch", "x"), "--batch x: whole numbers")):
            done = self.run_tool(name, *options)
            self.assertEqual(done.returncode, 2, done.stdout + done.stderr)
            self.assertIn(says, done.stderr)


class Waiting(unittest.TestCase):
    """What an engine's process learns of how its threads wait."""

    def test_policy(self):
        with mock.patch.dict(os.environ, OMP_WAIT_POLICY="active"):
            for waiting, policy in (("passive", "passive"), ("default", None)):
                made = options.environment(mock.Mock(waiting=waiting, small=True), 3)
                self.assertEqual(made.get("OMP_WAIT_POLICY"), policy)
                self.assertEqual((made["OMP_NUM_THREADS"], made["KVQ_BENCH_SMALL"]), ("3", "1"))


class Tables(unittest.TestCase):
    """What is printed of times that are given: ratios are medians of those within a round, which
    one slow round does not move."""

    def test_engines(self):
        results = {"static": {"ms": [10, 20, 300], "bytes": 2e6, "resident": 3e6},
                   "kvq": {"ms": [5, 5, 100], "bytes": 1e6, "resident": None}}
        lines = list(program("bench-engines").table(results, "static", 4))
        self.assertEqual(lines[2:], ["| `static` | 20 | 200.0 | 1.00 | 2 | 3 |",
                                     "| `kvq` | 5 | 800.0 | 3.00 | 1 | - |"])  # 4 of the medians
        lines = list(program("bench-engines").table({"kvq": results["kvq"]}, "static", 1))
        self.assertEqual(lines[2:], ["| `kvq` | 5 | 200.0 | - | 1 | - |"])
        self.assertEqual({x.count("|") for x in lines}, {7})

    def test_prompts(self):
        rows = [mock.Mock(rounds=[[1, 3], [2, 6], [20, 60]]),
                mock.Mock(rounds=[[1, 1], [1, 1], [10, 30]])]
        rows[0].name, rows[1].name = "f16", "kvq:f16"
        lines = list(program("bench-prompt").table(mock.Mock(tokens=1024), rows))
        self.assertEqual(lines[2:], ["| `f16` | 128.0 | 1.00 | 6.00 | 1.00 |",
                                     "| `kvq:f16` | 512.0 | 2.00 | 1.00 | 3.00 |"])
        self.assertEqual({x.count("|") for x in lines}, {6})


if __name__ == "__main__":
    unittest.main()
