# SPDX-License-Identifier: Apache-2.0
"""kvq.vllm's two sides without vLLM: a scheduler that does what it is told, over a model without
anything but attention. For vllm_test.py."""
import pickle
from types import SimpleNamespace

import torch

from kvq.vllm import checks
from kvq.vllm.plan import Layers, Planner, Report
from kvq.vllm.worker import Table, Worker

LAYERS, Q_HEADS, KV_HEADS, DIM, IDS, LONGEST = 3, 4, 2, 64, 50, 1024


class Tokens:
    """K, V and Q of a token: by its id, where it stands, and the layer."""

    def __init__(self, dim=DIM):
        make = torch.Generator().manual_seed(3)
        self.dim = dim
        self.by_id, self.by_place = (
            torch.randn(n, LAYERS, KV_HEADS + Q_HEADS, 2, dim, generator=make)
            for n in (IDS, LONGEST))

    def of(self, ids, first, layer):
        made = self.by_id[torch.tensor(ids), layer] + self.by_place[first:first + len(ids), layer]
        return made[:, :KV_HEADS, 0], made[:, :KV_HEADS, 1], made[:, KV_HEADS:, 0]


class Engine:
    """A scheduler that does what it is told, and a model without anything but attention."""

    def __init__(self, directory, tokens, recompute=False, **options):
        options = {"format": "f16", "attention": "exact", **options}
        asked = checks.Options(runtime_dir=directory, **options)
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32,
                                                              max_model_len=LONGEST))
        self.tokens, self.planner = tokens, Planner(asked, "m")
        self.worker = Worker(config, asked, recompute)
        table = self.worker.table = Table.__new__(Table)
        table.numbers = {f"layer {i}": i for i in range(LAYERS)}
        table.q_heads, table.kv_heads = Q_HEADS, KV_HEADS
        table.head_dim = tokens.dim
        table.scales, table.layers = [(tokens.dim ** -0.5, 0.0)] * LAYERS, LAYERS
        self.planner.layers = Layers(table.rows(), self.worker.options())
        self.placed, self.pages = {}, 100
        self.failed = set()  # by the last step: requests whose tokens vLLM does not take
        self.outputs = {}    # of the last step: of each request, a tensor for each layer

    def ask(self, name, ids, prompt=None, salt=None):
        return SimpleNamespace(request_id=name, all_token_ids=list(ids), cache_salt=salt,
                               num_prompt_tokens=prompt or len(ids), done=0,
                               num_computed_tokens=0, skip_reading_prefix_cache=False)

    def finish(self, request):
        del self.placed[request.request_id]
        self.planner.over(request)

    def plan(self, work, preempted=(), finished=()):
        """work: of (request, tokens). A request without pages gets some, and what kvqd has."""
        for request in preempted:
            del self.placed[request.request_id]
            request.done = 0
        for request in finished:
            self.finish(request)
        new, old = [], []
        for request, _ in work:
            if request.request_id in self.placed:
                old.append(request)
                continue
            new.append(request)
            request.done = self.planner.matched(request)
            self.pages += 1
            self.placed[request.request_id] = self.pages
            blocks = SimpleNamespace(get_block_ids=lambda page=self.pages: ([page, 7, 8],))
            self.planner.placed(request, blocks, request.done)
        counts = {r.request_id: r.num_prompt_tokens - r.done if n is None else n for r, n in work}
        return counts, pickle.loads(pickle.dumps(self.planner.plan(SimpleNamespace(
            preempted_req_ids={r.request_id for r in preempted},
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id, num_computed_tokens=r.done)
                                for r in new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[r.request_id for r in old],
                                                  num_computed_tokens=[r.done for r in old]),
            num_scheduled_tokens=counts))))

    def step(self, work, preempted=(), finished=(), leave=LAYERS):
        """Plans and makes a step; its batch has the requests in another order. Returns how far the
        outputs are from attention over all of each request's tokens; of those that vLLM takes."""
        counts, plan = self.plan(work, preempted, finished)
        self.worker.prepare(plan)
        batch = [(r, counts[r.request_id]) for r, _ in work][::-1]
        starts = [0]
        for _, n in batch:
            starts.append(starts[-1] + n)
        far, step = {r.request_id: [] for r, _ in batch}, None
        self.outputs = {r.request_id: [] for r, _ in batch}
        told = SimpleNamespace(pages=[self.placed[r.request_id] for r, _ in batch], starts=starts,
                               lengths=[r.done + n for r, n in batch])
        for layer in range(leave):
            parts = [self.tokens.of(r.all_token_ids[:r.done + n], 0, layer) for r, n in batch]
            k, v, q = (torch.cat([p[i][r.done:] for p, (r, _) in zip(parts, batch)])
                       for i in range(3))
            step = step or self.worker.begin(plan, told, k.dtype)
            out = torch.full_like(q, torch.nan)
            step.attend(f"layer {layer}", q, k, v, out)
            for i, (r, n) in enumerate(batch):
                given = out[starts[i]:starts[i + 1]]
                self.outputs[r.request_id].append(given)
                far[r.request_id].append((given - attention(*parts[i], n)).abs().max())
        self.worker.finished(plan)
        self.hear(plan, batch)
        taken = [x for name, some in far.items() for x in some if name not in self.failed]
        return float(torch.stack(taken).max()) if taken else 0.0  # NaN if one is

    def hear(self, plan, batch):
        """What vLLM's scheduler does with what the worker says. It looks at the pages of tokens
        that it had before the step alone."""
        invalid = self.worker.failures(plan)
        asked = {r.request_id: r for r, _ in batch}
        self.failed = {name for name, page in self.placed.items() if page in invalid
                       and (name not in asked or asked[name].done)}
        for r, n in batch:
            r.done = 0 if r.request_id in self.failed else r.done + n
        if self.worker.full:
            self.planner.heard(Report(True))

    def close(self):
        self.planner.client.close()
        self.worker.close()


def attention(k, v, q, last):
    """Of the last queries, causal."""
    k, v = (x.half().float().repeat_interleave(Q_HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q[-last:], k) * q.shape[2] ** -0.5
    n = len(k)
    hidden = torch.arange(n)[None] > torch.arange(n - last, n)[:, None]
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


def ids(count, seed=0):
    return torch.randint(0, IDS, (count,),
                         generator=torch.Generator().manual_seed(seed)).tolist()
