# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-engines.py that run in transformers: its own caches, and kvq.

    static, dynamic          StaticCache, DynamicCache: bfloat16, attention by SDPA
    empty                    a DynamicCache that is not filled: the time of all but attention to
                             the past, which no cache can beat
    quanto4, quanto2,        QuantizedCache
    hqq4, hqq2
    kvq:FORMAT[/PATH][@WHERE]   KvqCache, each row with a daemon of its own; exact unless PATH is
                             fast; attention on PyTorch's threads, with @own on as many of kvq's
                             own, with @daemon in kvqd

The model has random weights. Its caches are filled with random K and V, as a prompt would leave
them: kvq's through the daemon, 4,096 tokens a step."""
import os

import torch
import transformers

import kvq
from kvq.eval.models import Models
from kvq.eval.peers import BACKENDS, Peer
from kvq.eval.sides import tensors_of
from kvq.transformers import KvqCache
from daemon import Daemon, fill
from worker import SHAPE, Row, Worker, check_room

ROOM = 256      # tokens that may be decoded


def _model():
    config = transformers.LlamaConfig(
        hidden_size=SHAPE["hidden"], num_hidden_layers=SHAPE["layers"],
        num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"],
        head_dim=SHAPE["head_dim"], intermediate_size=SHAPE["intermediate"],
        vocab_size=SHAPE["vocabulary"], max_position_embeddings=1 << 18)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model


class Model(Row):
    """A model over a cache of so many tokens in each row of a batch."""

    def __init__(self, model, tokens, batch):
        self.model, self.at, self.batch = model, tokens, batch
        self.cache = None

    def step(self):
        """See worker.py."""
        ids = torch.full((self.batch, 1), 5)
        self.model(ids, past_key_values=self.cache, position_ids=torch.full_like(ids, self.at),
                   use_cache=True)
        self.at += 1

    def close(self):
        """See worker.py."""
        self.cache = None
        super().close()


class Own(Model):
    """A cache of transformers."""

    def __init__(self, worker, name, tokens, batch):
        super().__init__(worker.models.reference, tokens, batch)
        config = self.model.config
        if name == "static":
            self.cache = transformers.StaticCache(config, max_cache_len=tokens + ROOM)
        elif name in ("dynamic", "empty"):
            self.cache = transformers.DynamicCache(config=config)
        elif name.rstrip("0123456789") in BACKENDS:
            self.cache = Peer(worker.models, name).make()
        else:
            raise ValueError(f"{name!r} is no row; see --help")
        if name == "empty":
            return
        k, v = (torch.randn(1, SHAPE["kv_heads"], tokens, SHAPE["head_dim"],
                            dtype=torch.bfloat16).expand(batch, -1, -1, -1) for _ in "kv")
        if name in ("static", "dynamic"):  # which would grow to the limit layer by layer
            check_room(2 * SHAPE["layers"] * k.nbytes)
        for layer in range(SHAPE["layers"]):
            self.cache.update(k, v, layer)

    def nbytes(self):
        """See worker.py: of its tensors."""
        return sum(t.nbytes for layer in self.cache.layers for t in tensors_of(vars(layer)))


class Kvq(Model):
    """A KvqCache, with a kvqd of its own. Each row of a batch is a session."""

    def __init__(self, worker, name, tokens, batch):
        super().__init__(worker.models.over_kvq, tokens, batch)
        self.client = None
        self.daemon = Daemon(worker.threads, batch)
        try:
            self._open(name, tokens, worker.threads)
        except BaseException:
            self.close()
            raise

    def _open(self, name, tokens, threads):
        name, _, where = name[4:].partition("@")
        form, _, path = name.partition("/")
        self.client = kvq.Client(runtime_dir=self.daemon.directory)
        os.environ["KVQ_LOCAL"] = "daemon" if where == "daemon" else ""
        self.cache = KvqCache(self.model, form, client=self.client, attention=path or "exact",
                              max_rollback=int(self.batch > 1),  # which batches here need
                              threads=threads if where == "own" else "torch")
        rows = self.cache.state.rows
        rows.open(self.batch, torch.bfloat16, tokens)
        for session in rows.sessions:
            fill(self.client, session, tokens, bfloat16=True)
        rows.seen = rows.sessions[0].tokens
        if (self.cache.why is None) == (where == "daemon"):
            raise RuntimeError(f"attention is not where it should be: {self.cache.why}")

    def nbytes(self):
        """See worker.py: of the sessions, as kvqd counts."""
        return self.daemon.session_bytes()

    def close(self):
        """See worker.py."""
        for thing in (self.cache, self.client):
            if thing:
                thing.close()
        super().close()


class Transformers(Worker):
    """All rows share the weights."""

    def __init__(self, threads):
        super().__init__(threads)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.models = Models(_model(), None, "bench")
        self.what = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def make(self, name, tokens, batch):
        return (Kvq if name.startswith("kvq:") else Own)(self, name, tokens, batch)


make = Transformers
