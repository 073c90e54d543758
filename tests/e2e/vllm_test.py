#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq.vllm: its steps over a real daemon, planned here as vLLM's scheduler would, what it refuses,
and engines of vLLM against stock ones.

    tests/e2e/vllm_test.py [NAME]...

Needs PyTorch, and vLLM on the CPU for the engines; says so and ends well where these are missing.
KVQ_BIN_DIR says where kvqd is.
"""
import concurrent.futures
import copy
import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock
import urllib.error
import urllib.request
from types import SimpleNamespace

import e2e_rig
from e2e_rig import kvq

try:
    import torch
except ImportError as missing:
    print(f"kvq.vllm is not tested: {missing}")
    print("0 passed, 0 failed, 1 skipped")
    sys.exit(0)

import kvq.vllm
from kvq.plugin import NEAR_ROWS
from kvq.vllm import checks
from vllm_faults import Full, FullInDaemon, Poisoned, PoisonedInDaemon
from vllm_names import Names
from vllm_refused import Refused
from vllm_steps import KV_HEADS, LAYERS, Engine, Tokens, ids

NEAR = 2e-3  # of outputs: K and V are rounded alike, sums are not


class Steps(e2e_rig.Test):
    """What vLLM's scheduler may do."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tokens = Tokens()

    def engine(self, **options):
        engine = Engine(self.daemon.directory, self.tokens, **options)
        self.addCleanup(engine.close)
        return engine

    def tearDown(self):
        self.doCleanups()
        super().tearDown()

    def near(self, far):
        self.assertLess(far, NEAR)  # false for NaN as well

    def test_ragged_batch_then_decoding(self):
        engine = self.engine()
        some = [engine.ask(str(n), ids(n + 6, n), n) for n in (1, 40, 7, 90)]
        self.near(engine.step([(r, None) for r in some]))
        for _ in range(3):
            self.near(engine.step([(r, 1) for r in some]))
        self.assertEqual({n: s.refresh() for n, s in engine.worker.sessions.items()},
                         {str(n): n + 3 for n in (1, 40, 7, 90)})

    def test_pieces_of_prompts_beside_decoding(self):
        """Steps of more and of fewer tokens than attend in this process."""
        engine = self.engine()
        one, long = engine.ask("one", ids(20, 1), 10), engine.ask("long", ids(900, 2))
        self.near(engine.step([(one, None)]))
        for piece in (64, NEAR_ROWS, NEAR_ROWS - 1, 300):
            self.near(engine.step([(one, 1), (long, piece)]))
        self.assertEqual(engine.worker.sessions["long"].refresh(), 64 + 2 * NEAR_ROWS - 1 + 300)

    def test_heads_of_other_dimensions(self):
        """Zeros are stored behind them; in steps that attend in this process, and longer ones."""
        for dim in (80, 96, 192):
            with self.subTest(dim):
                engine = Engine(self.daemon.directory, Tokens(dim), prefix=False)
                self.addCleanup(engine.close)
                one, long = engine.ask("one", ids(20, 1), 10), engine.ask("long", ids(400, 2), 350)
                self.near(engine.step([(one, None)]))
                self.near(engine.step([(one, 1), (long, NEAR_ROWS + 40)]))
                self.near(engine.step([(one, 1), (long, 50)]))
                (layer,) = {(layer.head_dim,) for layer in engine.worker.table.rows()}
                self.assertEqual(layer, (dim,))

    def test_preempted_requests_begin_anew(self):
        engine = self.engine(prefix=False)
        one, two = engine.ask("one", ids(60, 1), 50), engine.ask("two", ids(60, 2), 50)
        self.near(engine.step([(one, None), (two, None)]))
        self.near(engine.step([(one, 1), (two, 1)]))
        self.near(engine.step([(one, 1)], preempted=[two]))
        self.assertEqual(list(engine.worker.sessions), ["one"])
        self.near(engine.step([(two, 30), (one, 1)]))
        self.near(engine.step([(two, 22), (one, 1)]))
        self.assertEqual(engine.worker.sessions["two"].refresh(), 52)

    def test_preempted_and_resumed_in_one_step(self):
        engine = self.engine(prefix=False)
        one = engine.ask("one", ids(60, 1), 50)
        self.near(engine.step([(one, None)]))
        self.near(engine.step([(one, 50)], preempted=[one]))
        self.near(engine.step([(one, 1)]))

    def test_place(self):
        """Both sides' sessions are on the host, also of a daemon that would choose a GPU."""
        engine = self.engine()
        self.assertEqual(engine.worker.options()["place"], "host")
        self.assertEqual(engine.planner.layers.session["place"], "host")
        self.near(engine.step([(engine.ask("one", ids(60, 1), 50), None)]))
        self.assertEqual(engine.worker.sessions["one"].info()["place"], "host")

    def test_input_that_comes_as_a_stream(self):
        """vLLM places the request again for each piece, behind the tokens that it has."""
        engine = self.engine()
        one = engine.ask("one", ids(90, 1), 50)
        self.near(engine.step([(one, None)]))
        session = engine.worker.sessions["one"]
        one.num_computed_tokens = one.done
        blocks = SimpleNamespace(get_block_ids=lambda: ([engine.placed["one"], 7],))
        engine.planner.placed(one, blocks, 0)
        self.near(engine.step([(one, 40)]))
        self.assertIs(engine.worker.sessions["one"], session)
        self.assertEqual(session.refresh(), 90)
        other = engine.ask("other", ids(9, 1))
        other.num_computed_tokens = 5
        self.assertRaisesRegex(RuntimeError, "has no session", engine.planner.placed, other, blocks,
                               0)

    def test_finished_requests_leave_nothing(self):
        engine = self.engine(prefix=False)
        one, two = engine.ask("one", ids(60, 1)), engine.ask("two", ids(60, 2), 50)
        self.near(engine.step([(one, None), (two, None)]))
        self.near(engine.step([(two, 1)], finished=[one]))
        self.assertEqual(list(engine.worker.sessions), ["two"])
        self.assertEqual(len(self.daemon.ctl("session", "list")), 1)
        with open("/proc/self/maps") as maps:  # page tables, in this process
            self.assertEqual(sum("kvq-table" in line for line in maps), 1)

    def test_prompts_that_begin_alike(self):
        """Within an engine, and for one that starts later; under a salt of its own, not."""
        common = ids(300, 5)
        engine = self.engine()
        first = engine.ask("first", common + ids(30, 6), 310)
        self.near(engine.step([(first, None)]))
        self.assertEqual(len(engine.planner.held), 0)
        second = engine.ask("second", common + ids(40, 7), 320)
        self.near(engine.step([(second, 9), (first, 1)]))
        self.assertEqual(second.done, 256 + 9)
        self.near(engine.step([(second, 64 - 9), (first, 1)]))
        salted = engine.ask("salted", common, salt="other")
        self.near(engine.step([(salted, None)]))
        engine.close()
        later = self.engine()
        again = later.ask("again", common[:280] + ids(40, 8), 290)
        self.near(later.step([(again, 1)]))
        self.assertEqual(again.done, 256 + 1)
        salted = later.ask("salted", common, salt="third")
        self.near(later.step([(salted, 1)]))
        self.assertEqual(salted.done, 1)

    def test_prompts_in_pieces_are_found(self):
        """Ids of steps that attend in this process are told as well, and those of decoding."""
        common = ids(300, 11)
        engine = self.engine()
        first = engine.ask("first", common, 150)
        for piece in (100, 50, *[1] * 110):
            self.near(engine.step([(first, piece)]))
        second = engine.ask("second", common)
        self.near(engine.step([(second, 1)]))
        self.assertEqual(second.done, 256 + 1)

    def test_what_is_promised_is_held(self):
        """Between the scheduler's asking and the worker's step nobody can give it up."""
        common = ids(300, 9)
        engine = self.engine()
        first = engine.ask("first", common)
        self.near(engine.step([(first, None)]))
        second = engine.ask("second", common + ids(20, 6))
        _, plan = engine.plan([(second, 5)], finished=[first])
        self.assertEqual(second.done, 256)
        engine.worker._end("first")
        self.daemon.ctl("prefix", "drop")
        engine.worker.prepare(plan)
        self.assertEqual(engine.worker.sessions["second"].tokens, 256)

    def test_sessions_that_kvqd_does_not_serve(self):
        """Are refused when the engine starts, not by its first request."""
        engine = self.engine()
        worker, table = engine.worker, engine.worker.table
        with unittest.mock.patch("kvq.vllm.worker.Table", return_value=table):
            worker.understand([])
            for where, name, value, says in (
                    (worker.asked, "format", "oscar9", "'oscar9'.*E_FORMAT"),
                    (worker.asked, "attention", "exat", "exat"),
                    (worker.asked, "namespace", "nobodys", "E_NO_NAMESPACE"),
                    (table, "q_heads", 71 * KV_HEADS, "E_SHAPE"),
                    (table, "scales", table.scales * 100, "E_LIMIT")):
                with self.subTest(name), unittest.mock.patch.object(where, name, value), \
                        self.assertRaisesRegex(NotImplementedError, says):
                    worker.understand([])
        self.assertEqual(self.daemon.ctl("session", "list"), [])

    def test_no_room_to_hold_a_prefix(self):
        """The request begins without one, and goes on."""
        common = ids(300, 25)
        engine = self.engine()
        self.near(engine.step([(engine.ask("first", common), None)]))
        (quota,) = (q for q in self.daemon.ctl("quota", "list")
                    if q["namespace"] == f"uid-{os.getuid()}")
        limit = ["quota", "set", quota["namespace"], "--table-bytes"]
        self.daemon.ctl(*limit, "1")
        try:
            second = engine.ask("second", common + ids(20, 26))
            with self.assertLogs("vllm.kvq", "WARNING") as said:
                self.assertEqual(engine.planner.matched(second), 0)
                self.assertEqual(engine.planner.matched(engine.ask("third", common)), 0)
            self.assertEqual(len(said.output), 1)
            self.assertIn("E_QUOTA", said.output[0])
        finally:
            self.daemon.ctl(*limit, str(quota["limit"]["table_bytes"]))
        self.near(engine.step([(second, None)]))
        self.assertEqual(engine.worker.sessions["second"].info()["prefix_tokens"], 0)

    def test_a_prefix_given_up_between_plan_and_step(self):
        """Its request alone is lost. The log says what to do."""
        common = ids(300, 27)
        engine = self.engine()
        first = engine.ask("first", common)
        self.near(engine.step([(first, None)]))
        second, other = engine.ask("second", common + ids(20, 6)), engine.ask("other", ids(40, 3))

        def drop(plan, prepare=engine.worker.prepare):
            for session in engine.planner.done + engine.planner.old:
                session.close()
            engine.worker._end("first")
            self.daemon.ctl("prefix", "drop")
            prepare(plan)
        with unittest.mock.patch.object(engine.worker, "prepare", drop), \
                self.assertLogs("vllm.kvq", "WARNING") as said:
            self.near(engine.step([(second, 5), (other, None)], finished=[first]))
        self.assertEqual(engine.failed, {"second"})
        self.assertRegex(said.output[0], "request second .*256 tokens .*has 0 now.* --table-bytes")

    def test_nothing_is_there(self):
        """A request that waits asks once a second, not at every step."""
        engine, now = self.engine(), [5.0]
        engine.planner.clock = lambda: now[0]
        waits = engine.ask("waits", ids(300, 28))
        asked = unittest.mock.Mock(side_effect=engine.planner.client.session)
        engine.planner.client.session = asked
        for now[0], times in ((5.0, 1), (5.9, 1), (6.1, 2), (7.0, 2)):
            self.assertEqual(engine.planner.matched(waits), 0)
            self.assertEqual(asked.call_count, times)
        self.near(engine.step([(engine.ask("first", ids(300, 28)), None)]))
        now[0] = 7.5
        self.assertEqual(engine.planner.matched(waits), 256)
        engine.planner.over(waits)
        self.assertEqual(engine.planner.vain, {})

    def test_a_reset(self):
        """Requests that begin behind it find nothing of before it, and each other's tokens again;
        one that waits does not keep what it was promised."""
        common = ids(300, 19)
        engine = self.engine()
        first, later = engine.ask("first", common + ids(9, 1), 302), ids(300, 20)
        self.near(engine.step([(first, None)]))
        waits = engine.ask("waits", common + ids(20, 6))
        before = len(self.daemon.ctl("session", "list"))
        self.assertEqual(engine.planner.matched(waits), 256)
        engine.planner.reset()
        self.assertEqual(len(self.daemon.ctl("session", "list")), before)
        self.near(engine.step([(first, 1), (waits, None)]))
        self.assertEqual(waits.done, 320)
        self.assertEqual(engine.worker.sessions["waits"].info()["prefix_tokens"], 0)
        for name, found in (("second", 0), ("third", 256)):
            request = engine.ask(name, later)
            self.near(engine.step([(request, None)], finished=[waits] if found == 0 else []))
            self.assertEqual(engine.worker.sessions[name].info()["prefix_tokens"], found)
        again = engine.ask("again", common)
        self.near(engine.step([(again, None)]))
        self.assertEqual(engine.worker.sessions["again"].info()["prefix_tokens"], 256)  # of "waits"
        engine.planner.reset()
        unshared = self.engine(prefix=False)
        unshared.planner.reset()
        self.assertIsNone(unshared.planner.model)

    def test_a_reset_while_requests_run(self):
        """Other engines find of them what they had before it; of those that begin behind it, all
        is found in this engine."""
        engine = self.engine()
        runs = engine.ask("runs", ids(600, 23), 140)
        self.near(engine.step([(runs, None)]))
        engine.planner.reset()
        begins = engine.ask("begins", ids(300, 24))
        self.near(engine.step([(runs, 100), (begins, 200)]))
        self.near(engine.step([(runs, 300), (begins, 100)]))
        alike = engine.ask("alike", ids(300, 24))
        self.near(engine.step([(runs, 1), (alike, None)]))
        self.assertEqual(engine.worker.sessions["alike"].info()["prefix_tokens"], 256)
        self.near(engine.step([(runs, 400)], preempted=[runs]))  # all of it is computed anew
        other = self.engine()
        for where, found in ((other, 128), (engine, 384)):
            again = where.ask("again", ids(600, 23))
            self.near(where.step([(again, None)]))
            self.assertEqual(where.worker.sessions["again"].info()["prefix_tokens"], found)

    def connector(self, planner):
        """vLLM's scheduler's."""
        names = ("KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "KVConnectorMetadata",
                 "KVConnectorRole", "KVConnectorWorkerMetadata")
        made = {"KVConnectorBase_V1": object, "KVConnectorRole": object}
        base = SimpleNamespace(**{n: made.get(n, unittest.mock.Mock()) for n in names})
        at = "vllm.distributed.kv_transfer.kv_connector.v1.base"
        registry = SimpleNamespace(AttentionBackendEnum=object)
        with unittest.mock.patch.dict(sys.modules, {
                at: base, "vllm.v1.attention.backends.registry": registry}):
            sys.modules.pop("kvq.vllm.connector", None)
            from kvq.vllm.connector import KvqConnector
            del sys.modules["kvq.vllm.connector"]
        connector = KvqConnector.__new__(KvqConnector)
        connector.planner = planner
        return connector

    def test_the_connector_resets(self):
        """As vLLM's scheduler asks it to, and says that it did."""
        connector = self.connector(self.engine().planner)
        before = connector.planner.model
        self.assertIs(connector.reset_cache(), True)
        self.assertNotEqual(connector.planner.model, before)

    def test_pages_for_more_tokens_than_there_is_memory_for(self):
        """What vLLM makes of its defaults, or of what stock engines are given."""
        planner = self.engine().planner
        connector, layers = self.connector(planner), planner.layers
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=128))
        for pages, says in ((1000, []), (1 << 44, ["num_gpu_blocks_override"])):
            connector.pages = SimpleNamespace(num_blocks=pages, kv_cache_groups=[group])
            with unittest.mock.patch("logging.Logger.warning") as said:
                connector.set_xfer_handshake_metadata({0: layers})
            self.assertEqual(len(said.mock_calls), len(says))
            for text in says:
                self.assertIn(text, said.mock_calls[0].args[0])
        rows = [kvq.Layer(32, 8, 128)] * 32  # 65,536 values a token: 8 KiB at one bit each
        self.assertIsNone(checks.overcommitted(1 << 16, 16, rows, 8 << 30))
        self.assertRegex(checks.overcommitted((1 << 16) + 1, 16, rows, 8 << 30),
                         "1048592 tokens, .* 8 GiB .* less than 65536;")

    def test_a_request_given_up_while_it_waits(self):
        common = ids(300, 10)
        engine = self.engine()
        self.near(engine.step([(engine.ask("first", common), None)]))
        waits = engine.ask("waits", common + ids(20, 6))
        before = len(self.daemon.ctl("session", "list"))
        self.assertEqual(engine.planner.matched(waits), 256)
        self.assertEqual(engine.planner.matched(waits), 256)
        self.assertEqual(len(self.daemon.ctl("session", "list")), before + 1)
        engine.planner.over(waits)
        self.assertEqual(len(self.daemon.ctl("session", "list")), before)

    def test_a_forward_that_leaves_layers_out(self):
        """Its tokens are not stored, and it does not go unnoticed."""
        engine = self.engine()
        one = engine.ask("one", ids(60, 1), 50)
        for leave in (0, LAYERS - 1):
            with self.assertRaisesRegex(RuntimeError, f"before layer {leave} of {LAYERS}"):
                engine.step([(one, 20 if leave else None)], leave=leave)
            self.assertEqual(engine.worker.sessions["one"].refresh(), 0)

    def test_a_forward_that_is_not_the_planned_one(self):
        engine = self.engine()
        one = engine.ask("one", ids(60, 1), 50)
        _, plan = engine.plan([(one, 20)])
        engine.worker.prepare(plan)
        page = engine.placed["one"]
        for pages, starts, lengths in (([page], [0, 19], [19]), ([page], [0, 20], [21]),
                                       ([page, page], [0, 10, 20], [10, 10])):
            told = SimpleNamespace(pages=pages, starts=starts, lengths=lengths)
            with self.assertRaises(RuntimeError):
                engine.worker.begin(plan, told, torch.float32)


def prompts(*counts, seed=0, common=()):
    draw = random.Random(seed)
    return [[*common, *(draw.randrange(3, 256) for _ in range(n))] for n in counts]


def make_model(folder, head_dim):
    """A Llama with random weights."""
    import transformers
    torch.manual_seed(7)
    sizes = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, vocab_size=256, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.08)
    model = transformers.LlamaForCausalLM(sizes)
    model.model.embed_tokens.weight.data[POISON] = torch.inf
    model.lm_head.weight.data[POISON] = 0  # so that nobody answers with it
    model.save_pretrained(folder)


POISON = 1  # a token whose K and V are not finite
COMMON = prompts(300, seed=1)[0]
JOBS = {  # prompts, and how many tokens are generated for each
    "single": (prompts(20, seed=2), 12),
    "ragged": (prompts(5, 130, 33, 260, 1, 64, seed=3), 12),
    "first": ([COMMON], 4),
    "alike": (prompts(9, 41, seed=4, common=COMMON), 8),
    "many": (prompts(*(10 + 7 * i % 90 for i in range(64)), seed=5), 24),
    "large": (prompts(*[300] * 8, seed=6), 64),
    "poisoned": ([*prompts(40, 260, 33, seed=8), [*prompts(30, seed=9)[0], POISON, 5, 6, 7]], 8),
}
TIE = 0.02  # of logits from -3 to 3: near enough to change places over a cache in f16
KVQ = {"kv_transfer_config": {
    "kv_connector": kvq.vllm.CONNECTOR, "kv_role": "kv_both",
    "kv_connector_extra_config": {"format": "16bit", "attention": "exact"}}}


def asking(policy="fail", **options):
    """KVQ with other options of kvq's, and what becomes of lost requests."""
    made = copy.deepcopy(KVQ)
    made["kv_transfer_config"]["kv_connector_extra_config"].update(options)
    made["kv_transfer_config"]["kv_load_failure_policy"] = policy
    return made


SMALL = {"block_size": 32, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 64}


@unittest.skipUnless(importlib.util.find_spec("vllm"), "vLLM is not installed")
class Engines(e2e_rig.Test):
    """Two engines over one daemon, the second with few pages and small steps; two over a daemon
    that has too little memory for their job, the second of which begins lost requests anew; and a
    stock one."""
    processes = "0"  # 1: vLLM's scheduler and its worker are processes of their own
    head_dim, pool = 64, "4mb"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        make_model(os.path.join(cls.folder.name, "model"), cls.head_dim)
        stock, _ = cls.run_engines([({}, list(JOBS))])
        cls.stock = stock[0]
        cls.start()

    @classmethod
    def start(cls):
        """What is held against the stock engine."""
        cramped = e2e_rig.Daemon(pool_bytes=cls.pool, extent_bytes="2mb")
        cls.addClassCleanup(cramped.stop)
        room = {"runtime_dir": cramped.directory}
        (cls.plain, cls.small, cls.full, cls.anew), cls.refused = cls.run_engines(
            [(KVQ, ["single", "ragged", "first", "alike", "poisoned"]),
             ({**KVQ, **SMALL}, ["many", "alike"]),
             ({**KVQ, "enable_prefix_caching": True}, []), ({}, []),
             (asking(**room), ["large"]),
             ({**asking("recompute", **room), "max_num_batched_tokens": 64},
              ["large", "poisoned"]),
             # The last: vLLM leaves a connector behind whose worker was refused.
             (asking(format="oscar9"), [])], KVQ_VLLM="1")

    @classmethod
    def environment(cls):
        """With kvq as a plug-in that vLLM finds."""
        plugin = os.path.join(cls.folder.name, "plugin")
        info = os.path.join(plugin, "kvq_tested-0.dist-info")
        os.makedirs(info, exist_ok=True)
        with open(os.path.join(e2e_rig.ROOT, "client", "python", "pyproject.toml")) as file:
            point = re.search(r'"vllm.general_plugins"]\nkvq = "(.*)"', file.read())[1]
        for name, text in (("entry_points.txt", f"[vllm.general_plugins]\nkvq = {point}\n"),
                           ("METADATA", "Metadata-Version: 2.1\nName: kvq-tested\nVersion: 0\n")):
            with open(os.path.join(info, name), "w") as file:
                file.write(text)
        paths = [plugin, os.path.join(e2e_rig.ROOT, "client", "python")]
        return {**os.environ, "KVQ_RUNTIME_DIR": cls.daemon.directory,
                "PYTHONPATH": os.pathsep.join(paths)}

    @classmethod
    def run_engines(cls, engines, **environment):
        """Runs (arguments, names of jobs) one after the other: their answers, and the sentences of
        those that were refused."""
        base = {"model": os.path.join(cls.folder.name, "model"), "dtype": "float32",
                "enable_prefix_caching": False, "max_model_len": 448, "max_num_seqs": 8,
                "kv_cache_memory_bytes": 64 << 20}
        asked = "".join(json.dumps({
            "engine": {**base, **arguments},
            "jobs": [{"prompts": JOBS[n][0], "count": JOBS[n][1]} for n in jobs]})
            + "\n" for arguments, jobs in engines)
        done = subprocess.run(
            [sys.executable, os.path.join(e2e_rig.HERE, "vllm_engine.py")], input=asked, text=True,
            capture_output=True, timeout=1800, env={
                **cls.environment(), **environment,
                "VLLM_ENABLE_V1_MULTIPROCESSING": cls.processes})
        if done.returncode:
            raise AssertionError(done.stderr[-5000:])
        cls.said = done.stdout + done.stderr
        lines = [line.split(" ", 1) for line in done.stdout.splitlines()
                 if line.startswith(("RESULT ", "REFUSED "))]
        found = iter([json.loads(text) for kind, text in lines if kind == "RESULT"])
        answers = [{n: next(found) for n in jobs} for _, jobs in engines]
        return [a for a in answers if a], [json.loads(t) for kind, t in lines if kind == "REFUSED"]

    def same(self, name, engine, rows=None):
        """The stock engine's tokens, of all rows or some; or, where they part for the first time,
        its second best, which is as likely but for what a cache in f16 makes of it."""
        stock, tokens = self.stock[name], engine[name]["tokens"]
        parted = 0
        for row in range(len(tokens)) if rows is None else rows:
            want, got = stock["tokens"][row], tokens[row]
            self.assertEqual(len(want), len(got))
            at = next((i for i, (a, b) in enumerate(zip(want, got)) if a != b), None)
            if at is not None:
                token, gap = stock["nearly"][row][at]
                self.assertEqual(got[at], token, f"request {row}, token {at}")
                self.assertLess(gap, TIE, f"request {row}, token {at}")
                parted += 1
        self.assertLess(parted, 2 + len(tokens) // 20)

    def test_single_request(self):
        self.same("single", self.plain)

    def test_batch_of_ragged_prompts(self):
        self.same("ragged", self.plain)

    def test_prompts_that_begin_alike(self):
        self.same("first", self.plain)
        self.same("alike", self.plain)
        self.assertEqual(self.plain["first"]["found"], 0)
        self.assertEqual(self.plain["alike"]["found"], 2 * 256)

    def test_prompts_that_an_earlier_engine_had(self):
        self.same("alike", self.small)
        self.assertEqual(self.small["alike"]["found"], 2 * 256)

    def test_64_requests_in_pieces_with_preemption(self):
        self.same("many", self.small)
        self.assertGreater(self.small["many"]["preempted"], 0)
        if self.processes == "0":  # else it is seen by nobody
            self.assertGreater(self.small["many"]["longest"], 0)
        self.assertLessEqual(self.small["many"]["longest"], SMALL["max_num_batched_tokens"])

    def test_refused(self):
        self.assertEqual(len(self.refused), 3)
        self.assertIn("enable_prefix_caching=False", self.refused[0])
        self.assertIn("kv_transfer_config", self.refused[1])
        self.assertIn("oscar9", self.refused[2])

    def test_a_daemon_without_room(self):
        """Some requests fail; the others have their tokens."""
        ends = self.full["large"]["ends"]
        self.assertEqual(set(ends), {"length", "error"})
        self.same("large", self.full, [i for i, end in enumerate(ends) if end == "length"])
        self.assertRegex(self.said, "kvq: request .* ends with an error: E_NO_MEMORY")

    def test_a_daemon_without_room_where_requests_begin_anew(self):
        """All end, in the order in which room comes; also in pieces of 64 tokens."""
        self.assertEqual(set(self.anew["large"]["ends"]), {"length"})
        self.same("large", self.anew)
        self.assertRegex(self.said, "kvq: request .* begins anew.*: E_NO_MEMORY")

    def test_a_request_whose_values_are_not_finite(self):
        """It fails alone, or where requests begin anew it has a stock engine's tokens."""
        for engine, end in ((self.plain, "error"), (self.anew, "length")):
            self.assertEqual(engine["poisoned"]["ends"], ["length"] * 3 + [end])
            self.same("poisoned", engine, range(3))
        self.assertEqual(self.anew["poisoned"]["tokens"][3], self.stock["poisoned"]["tokens"][3])
        self.assertRegex(self.said, "kvq: request .* ends with an error: E_NONFINITE")

class Processes(Engines):
    """The same where vLLM's scheduler and its worker are processes of their own, vLLM's default;
    with heads that kvqd stores zeros behind."""
    processes = "1"
    head_dim, pool = 96, "8mb"

    def test_refused(self):
        """The engine's processes say why on their way out."""
        self.assertEqual(len(self.refused), 3)
        self.assertRegex(self.said, "NotImplementedError: kvq: .*enable_prefix_caching=False")
        self.assertRegex(self.said, "NotImplementedError: kvq: .*kv_transfer_config")
        self.assertRegex(self.said, "NotImplementedError: kvq: .*oscar9")


class Server(Engines):
    """vLLM's OpenAI server."""

    @classmethod
    def start(cls):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        cls.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
                   os.path.join(cls.folder.name, "model"), "--dtype", "float32", "--enforce-eager",
                   "--skip-tokenizer-init", "--no-enable-prefix-caching", "--max-model-len", "448",
                   "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8",
                   "--port", str(port), "--kv-transfer-config",
                   json.dumps(KVQ["kv_transfer_config"])]
        environment = {k: v for k, v in cls.environment().items()
                       if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        cls.server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=e2e_rig.die_with_parent, env={
                **environment, "KVQ_VLLM": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"})
        cls.addClassCleanup(cls.stop)
        cls.lines, cls.answers = [], threading.Event()
        cls.reader = threading.Thread(target=cls.read)
        cls.reader.start()
        if not cls.answers.wait(900) or cls.server.poll() is not None:
            raise AssertionError("".join(cls.lines)[-5000:])

    @classmethod
    def read(cls):
        """What it says, to its end."""
        for line in cls.server.stdout:
            cls.lines.append(line)
            if "Application startup complete" in line:
                cls.answers.set()
        cls.server.wait()
        cls.answers.set()

    @classmethod
    def stop(cls):
        cls.server.terminate()
        cls.reader.join(e2e_rig.BOUND)
        cls.server.kill()  # of no effect where it has ended
        cls.reader.join()
        cls.server.stdout.close()

    def complete(self, ids, count):
        """The tokens behind a prompt."""
        asked = {"model": os.path.join(self.folder.name, "model"), "prompt": ids, "temperature": 0,
                 "max_tokens": count, "ignore_eos": True, "return_token_ids": True,
                 "detokenize": False}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(asked).encode(),
                                         {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def answered(self, name):
        """A job's requests, all at a time, against the stock engine's tokens."""
        prompts, count = JOBS[name]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
            tokens = list(threads.map(lambda ids: self.complete(ids, count), prompts))
        self.same(name, {name: {"tokens": tokens}})

    def test_single_request(self):
        self.answered("single")

    def test_batch_of_ragged_prompts(self):
        self.answered("ragged")

    def test_prompts_that_begin_alike(self):
        for name in ("first", "alike"):
            self.answered(name)
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            found = re.search(r"vllm:external_prefix_cache_hits_total{[^}]*} ([0-9.e+]+)",
                              answer.read().decode())
        self.assertEqual(float(found[1]), 2 * 256)

    def test_a_request_whose_values_are_not_finite(self):
        """Is answered with an error. The server goes on."""
        prompts, count = JOBS["poisoned"]
        with self.assertRaises(urllib.error.HTTPError) as refused:
            self.complete(prompts[3], count)
        self.assertEqual(refused.exception.code, 500)
        refused.exception.close()
        self.answered("single")
        self.assertRegex("".join(self.lines), "kvq: request .* ends with an error: E_NONFINITE")

    def test_worker_that_is_killed(self):
        """Its request fails, the server ends, and kvqd has nothing left of it. The last test of the
        server, for that reason."""
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            begun = len([x for x in self.daemon.lines if "event=session_opened" in x])
            answer = threads.submit(self.complete, prompts(20, seed=9)[0], 420)
            self.daemon.wait_log("event=session_opened", begun + 1)
            (worker,) = (c for c in self.daemon.ctl("client", "list") if c["name"] == "vllm worker")
            os.kill(worker["pid"], signal.SIGKILL)
            with self.assertRaises((urllib.error.URLError, ConnectionError)):
                answer.result(e2e_rig.BOUND)
        self.server.wait(e2e_rig.BOUND)
        self.daemon.wait_gone(worker["id"])
        self.assertEqual(self.daemon.ctl("session", "list"), [])

    test_prompts_that_an_earlier_engine_had = None
    test_64_requests_in_pieces_with_preemption = None
    test_refused = test_a_daemon_without_room = None
    test_a_daemon_without_room_where_requests_begin_anew = None


SUITES = [Steps, Names, Refused, Poisoned, Full, PoisonedInDaemon, FullInDaemon,
          Engines, Processes, Server]

if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(e2e_rig.run(SUITES, __doc__))
