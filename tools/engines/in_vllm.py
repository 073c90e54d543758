# SPDX-License-Identifier: Apache-2.0
"""A row of bench-engines.py or bench-prompt.py that runs in vLLM for CPUs, in one process:

    vllm:TYPE                 its own cache; TYPE is a kv_cache_dtype: auto, fp8 ..
    vllm:kvq:FORMAT[/PATH]    over kvqd, with a daemon of its own; exact unless PATH is fast

The model has random weights in bfloat16. Its cache is filled as vLLM fills it, by a prompt of
random ids for each request of a batch, which takes minutes for long ones. Each row has a process,
since a plug-in is for all engines of one."""
import json
import os
import sys
import tempfile

from worker import SHAPE, Row, Worker

ROOM = 256
os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
                  VLLM_LOGGING_LEVEL="WARNING", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def _plugin(folder):
    """What pip would write: vLLM finds kvq's plug-in by it."""
    info = os.path.join(folder, "kvq_bench-0.dist-info")
    os.makedirs(info)
    for name, text in (("entry_points.txt", "[vllm.general_plugins]\nkvq = kvq.vllm:register\n"),
                       ("METADATA", "Metadata-Version: 2.1\nName: kvq-bench\nVersion: 0\n")):
        with open(os.path.join(info, name), "w", encoding="utf-8") as file:
            file.write(text)
    sys.path.append(folder)


def _model(folder):
    """A configuration; vLLM makes weights up."""
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                   "hidden_size": SHAPE["hidden"], "num_hidden_layers": SHAPE["layers"],
                   "num_attention_heads": SHAPE["heads"], "head_dim": SHAPE["head_dim"],
                   "num_key_value_heads": SHAPE["kv_heads"], "rms_norm_eps": 1e-6,
                   "intermediate_size": SHAPE["intermediate"], "hidden_act": "silu",
                   "vocab_size": SHAPE["vocabulary"], "max_position_embeddings": 1 << 18,
                   "tie_word_embeddings": False, "torch_dtype": "bfloat16"}, file)


class Engine(Row):
    """An engine for a batch of requests of so many tokens."""

    def __init__(self, worker, name, tokens, batch):
        kind = name[5:]
        options = {"kv_cache_dtype": kind}
        of_token = 2 * SHAPE["layers"] * SHAPE["kv_heads"] * SHAPE["head_dim"]
        of_token *= 1 if kind.startswith("fp8") else 2
        self.bytes, self.tokens, self.batch = of_token * tokens * batch, tokens, batch
        options["kv_cache_memory_bytes"] = of_token * (tokens + 2 * ROOM) * batch + (64 << 20)
        if kind.startswith("kvq:"):
            options = self._over_kvq(worker, kind[4:], tokens + 2 * ROOM, batch)
        from vllm import EngineArgs, LLMEngine, SamplingParams
        self.engine = LLMEngine.from_engine_args(EngineArgs(
            model=worker.folder.name, load_format="dummy", dtype="bfloat16", enforce_eager=True,
            skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=batch,
            max_model_len=tokens + ROOM, max_num_batched_tokens=2048, seed=1, **options))
        self.sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)

    def _over_kvq(self, worker, form, places, batch):
        from daemon import Daemon
        self.daemon = Daemon(worker.threads, batch)
        form, _, path = form.partition("/")
        os.environ.update(KVQ_VLLM="1", KVQ_RUNTIME_DIR=self.daemon.directory)
        return {"kv_cache_memory_bytes": places * batch * SHAPE["layers"] * 2 + (16 << 20),
                "kv_transfer_config": {
                    "kv_connector": "KvqConnector", "kv_role": "kv_both",
                    "kv_connector_extra_config": {"format": form, "attention": path or "exact",
                                                  "threads": worker.threads, "prefix": False}}}

    def ask(self, name, answer):
        """Adds a request: its prompt, and how many tokens are to be decoded."""
        sampling = self.sampling.clone()
        sampling.max_tokens = answer
        ids = [3 + i * 7919 % (SHAPE["vocabulary"] - 3) for i in range(self.tokens)]
        self.engine.add_request(name, {"prompt_token_ids": ids}, sampling)

    def fill(self):
        """Takes the prompts of all requests in."""
        for request in range(self.batch):
            self.ask(f"bench-{request}", ROOM)
        while len(self.engine.step()) < self.batch:
            pass

    def step(self):
        """See worker.py."""
        done = len(self.engine.step())
        if done < self.batch:  # after ROOM tokens a request has ended
            raise RuntimeError(f"vLLM decoded a token of {done} of {self.batch} requests; each has "
                               f"room for {ROOM}")

    def nbytes(self):
        """See worker.py: of its pages, or of the sessions."""
        return self.daemon.session_bytes() if self.daemon else self.bytes

    def close(self):
        """See worker.py."""
        self.engine.engine_core.shutdown()
        super().close()


class Vllm(Worker):
    """One row."""
    with_model = True

    def __init__(self, threads):
        super().__init__(threads)
        self.folder = tempfile.TemporaryDirectory(prefix="kvq-bench-")
        _model(self.folder.name)
        _plugin(os.path.join(self.folder.name, "plugin"))
        import torch
        torch.set_num_threads(threads)
        from importlib.metadata import version
        self.what = f"vllm-cpu {version('vllm-cpu')}, torch {torch.__version__}"

    def make(self, name, tokens, batch):
        row = Engine(self, name, tokens, batch)
        row.fill()
        return row


make = Vllm
