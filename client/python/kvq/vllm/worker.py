# SPDX-License-Identifier: Apache-2.0
"""The worker's side: a session for each request, and the steps that go over them."""
import torch

import kvq
from kvq import plugin
from kvq._ffi import lib
from kvq.errors import check, last_text

from ..memory import CODES
from .checks import refuse

FULL = (kvq.Code.E_NO_MEMORY, kvq.Code.E_QUOTA, kvq.Code.E_DEADLINE)


class Table:
    """What the layers' attention is like. All layers are alike."""

    def __init__(self, config, names):
        from vllm.model_executor.layers.attention import Attention
        from vllm.model_executor.models.utils import extract_layer_index

        from .backend import KvqImpl

        context = config.compilation_config.static_forward_context
        names = sorted(names, key=extract_layer_index)
        for name in names:
            layer, served = context.get(name), "serve this model without KVQ_VLLM"
            if type(layer) is not Attention:  # classes made from it attend by rules of their own
                refuse(f"layer {name}, a {type(layer).__name__}", "kvqd serves plain attention "
                       "alone", served)
            if not isinstance(layer.impl, KvqImpl):
                refuse(f"layer {name}, whose attention is {type(layer.impl).__name__}", "vLLM asks "
                       "kvq for attention on CPUs alone", served)
            if layer.head_size_v != layer.impl.head_size:
                refuse(f"layer {name}, with keys of {layer.impl.head_size} dimensions and values "
                       f"of {layer.head_size_v}", "kvqd stores as many of both", served)
        self.numbers = {name: i for i, name in enumerate(names)}
        impls = [context[name].impl for name in names]
        shapes = {(i.num_heads, i.num_kv_heads, i.head_size) for i in impls}
        if len(shapes) != 1:
            refuse("layers with other numbers of heads than others", "not done",
                   "serve this model without KVQ_VLLM")
        ((self.q_heads, self.kv_heads, self.head_dim),) = shapes
        self.scales = [(i.scale, i.softcap) for i in impls]
        self.layers = len(names)

    def rows(self):
        return [kvq.Layer(self.q_heads, self.kv_heads, self.head_dim, scale=scale,
                          softcap=softcap) for scale, softcap in self.scales]


class Worker:
    """Sessions of requests, and what a step of them needs."""

    def __init__(self, config, asked):
        self.config, self.asked = config, asked
        self.dtype = config.model_config.dtype
        if self.dtype not in CODES:
            refuse(f"a model of {self.dtype}", "kvqd takes float16, bfloat16 and float32",
                   "start with one of these as dtype")
        self.client = kvq.Client(asked.runtime_dir, name="vllm worker", private=False)
        self.queue = self.client.queue()
        self.local = self.queue.local(max_tokens=config.model_config.max_model_len,
                                      threads=asked.threads)
        self.table = None
        self.sessions = {}  # by request
        self.desks = plugin.Desks(self.client)
        self.step = None
        self.made = False   # the step that is planned

    def understand(self, caches):
        """Learns what the layers are, whose pages vLLM has made, and that kvqd serves them."""
        self.table = Table(self.config, caches)
        asked = {n: v for n, v in self.options().items() if n in ("format", "attention", "ns")}
        try:
            self.client.session(self.table.rows(), on_detach="drop", **self.options()).close()
        except (kvq.Error, ValueError) as error:
            if getattr(error, "code", None) in FULL:  # maybe there is room when requests come
                return
            refuse(f"sessions of {self.table.layers} layers with {asked}", str(error),
                   "change the options in kv_connector_extra_config, or serve this model without "
                   "KVQ_VLLM")

    def options(self):
        """Of all sessions."""
        wide = "bf16" if self.dtype == torch.bfloat16 else "f16"
        form = wide if self.asked.format == "16bit" else self.asked.format
        return {"format": form, "dtype": form if form in ("f16", "bf16") else wide,
                "attention": self.asked.attention, "ns": self.asked.namespace, "place": "host"}

    def prepare(self, plan):
        """Ends and begins the sessions of a step. A request that was preempted begins anew."""
        self.abort()
        self.made = False
        for name in plan.ended:
            self._end(name)
        for opening in plan.opened:
            self._end(opening.request)
            self._open(opening)

    def _end(self, name):
        session = self.sessions.pop(name, None)
        if session is not None:
            # Its page table stays mapped else. Of no effect where the session was not added.
            lib.kvq_local_remove(self.local.pointer, session.handle)
            session.close()

    def _open(self, opening):
        more = {}
        if opening.model is not None:
            more = {"model": opening.model, "salt": opening.salt}
        if opening.prefix:
            more["prefix"] = opening.prefix
        session = self.client.session(self.table.rows(), prompt_tokens=opening.prompt,
                                      on_detach="drop", **self.options(), **more)
        self.sessions[opening.request] = session
        if session.tokens != len(opening.prefix):
            raise RuntimeError(f"kvq: request {opening.request} was planned with "
                               f"{len(opening.prefix)} tokens that kvqd had; it has "
                               f"{session.tokens} now. A namespace near its table_bytes gives up "
                               "prefixes that are in use: raise the limit (kvqctl quota set "
                               "NAMESPACE --table-bytes SIZE)")
        self.local.add(session)

    def begin(self, plan, batch, dtype):
        """Begins the step of a forward, whose batch vLLM may have put in any order."""
        self.abort()
        if len(batch.pages) != len(plan.tokens):
            raise RuntimeError(f"kvq: a forward of {len(batch.pages)} requests was planned with "
                               f"{len(plan.tokens)}")
        sessions, ids = [], []
        for row, page in enumerate(batch.pages):
            name, at, some = plan.tokens[page]
            session = self.sessions[name]
            new = batch.starts[row + 1] - batch.starts[row]
            if not session.tokens == at == batch.lengths[row] - new or new != len(some):
                raise RuntimeError(
                    f"kvq: request {name} has {session.tokens} tokens in kvqd; its plan has "
                    f"{len(some)} from {at} on, its forward {new} from {batch.lengths[row] - new}")
            sessions.append(session)
            ids += some
        self.step = Step(self, sessions, batch.starts, ids, dtype)
        self.step.begin(self.local)
        return self.step

    def finished(self, plan):
        """A forward has ended; with an open step if it failed, or left layers out."""
        if self.made or not plan.tokens:
            return
        reached = 0 if self.step is None else self.step.next
        self.abort()
        raise RuntimeError(f"kvq: a forward ended before layer {reached} of {self.table.layers} "
                           "attended; its tokens are not in kvqd")

    def abort(self):
        step, self.step = self.step, None
        if step is not None:
            step.abort()

    def close(self):
        self.step = None  # kvqd gives it up with the client
        self.client.close()


class Step(plugin.Step):
    """Of a forward. All of its requests have tokens in it."""

    def __init__(self, worker, sessions, starts, ids, dtype):
        counts = [b - a for a, b in zip(starts, starts[1:])]
        super().__init__(worker.queue, counts, starts[-1] <= plugin.NEAR_ROWS)
        self.worker, self.sessions = worker, sessions
        desk = worker.desks.of(worker.table, dtype, worker.table.layers if self.near else 1,
                               self.total, self.total)
        self.prepare(desk, sessions, counts, counts, torch.tensor(ids, dtype=torch.int32))

    def begin(self, local):
        super().begin(local)
        self._check()

    def attend(self, name, query, key, value, output):
        """Hands over K and V of a layer, [tokens][heads][dim], and attends into `output`."""
        layer, total, desk = self.worker.table.numbers[name], self.total, self.desk
        if layer != self.next:
            raise RuntimeError(f"kvq: layer {layer} ({name}) attends where {self.next} was "
                               "expected")
        for kept, given in zip(self.kept(layer), (key, value)):
            kept.copy_(given[:total])
        desk.queries[:total].copy_(query[:total])
        self.ask(layer)
        self._check()
        output[:total].copy_(desk.out[:total])
        self.next += 1
        if self.next == self.worker.table.layers:
            self._commit()

    def _commit(self):
        check(self.end())
        self._check()
        for session, new in zip(self.sessions, self.counts):
            session.tokens += new
        self.worker.step, self.worker.made = None, True

    def _check(self):
        if not self.failed():
            return
        at = int((self.status != 0).argmax())
        if self.status[at] != kvq.Code.E_NONFINITE:
            check(0, self.entries)
        (name,) = (n for n, s in self.worker.sessions.items() if s is self.sessions[at])
        raise kvq.Error(kvq.Code.E_NONFINITE, f"{last_text()}. This is request {name}, "
                        f"of a model in {str(self.worker.dtype)[6:]}: where float16 is too small "
                        "for a model's values, start with dtype=\"bfloat16\"", self.entries)
