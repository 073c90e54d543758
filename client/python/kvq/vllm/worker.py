# SPDX-License-Identifier: Apache-2.0
"""The worker's side: a session for each request, and the steps that go over them."""
import itertools
import logging
import time

import torch

import kvq
from kvq import plugin
from kvq._ffi import lib

from ..memory import CODES
from .checks import refuse
from .step import GONE, NO_ROOM, Part, Step

PATIENCE = 60.0  # seconds that the oldest request begins anew without getting any farther

_log = logging.getLogger("vllm.kvq")


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
    """Sessions of requests, and what a step of them needs.

    A request whose session kvqd refuses or gives up is lost: what vLLM has computed of it is
    nowhere. By kv_load_failure_policy vLLM ends it with an error, or computes it anew from its
    first token on.

    recompute  vLLM computes lost requests anew
    lost       requests without a session that vLLM has yet to end or to begin anew
    void       requests that would be lost again each time: they go on without meaning
    """

    def __init__(self, config, asked, recompute=False):
        self.config, self.asked, self.recompute = config, asked, recompute
        self.dtype = config.model_config.dtype
        if self.dtype not in CODES:
            refuse(f"a model of {self.dtype}", "kvqd takes float16, bfloat16 and float32",
                   "start with one of these as dtype")
        self.client = kvq.Client(asked.runtime_dir, name="vllm worker", private=False)
        self.queue = self.client.queue()
        self.local = self.queue.local(max_tokens=config.model_config.max_model_len,
                                      threads=asked.threads)
        self.table = None
        self.desks = plugin.Desks(self.client)
        self.step = None
        self.made = False   # the step that is planned
        self.full = False   # somebody was refused for want of room since the step was planned
        self.sessions = {}  # by request
        self.pages = {}     # of each request, its first page
        self.ages = {}      # of each request, a number that later ones have a larger one of
        self.count = itertools.count()
        self.lost, self.void, self.told = set(), set(), set()
        # Of each request the tokens that it once had, and since when it gets no farther, with no
        # older one in its way.
        self.reach, self.stuck = {}, {}
        self.clock = time.monotonic

    def understand(self, caches):
        """Learns what the layers are, whose pages vLLM has made, and that kvqd serves them."""
        self.table = Table(self.config, caches)
        asked = {n: v for n, v in self.options().items() if n in ("format", "attention", "ns")}
        try:
            self.client.session(self.table.rows(), on_detach="drop", **self.options()).close()
        except (kvq.Error, ValueError) as error:
            if getattr(error, "code", None) in NO_ROOM:  # maybe there is room when requests come
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
        self.made = self.full = False
        for name in plan.ended:
            self._forget(name)
        for opening in plan.opened:
            name = opening.request
            self._end(name)
            self.lost.discard(name)
            self.pages[name] = opening.page
            self.ages.setdefault(name, next(self.count))
            self._open(opening)

    def _forget(self, name):
        """A request has ended, or waits again."""
        self._end(name)
        for some in (self.pages, self.ages, self.reach, self.stuck):
            some.pop(name, None)
        for some in (self.lost, self.void, self.told):
            some.discard(name)

    def _end(self, name):
        session = self.sessions.pop(name, None)
        if session is None:
            return
        # Its page table stays mapped else. Of no effect where the session was not added, nor for
        # one in the step under way, whose end lets go of it.
        handles = [session.handle]
        self.let_go(handles)
        try:
            session.close()
        except kvq.Error as error:
            if error.code not in GONE:
                raise

    def let_go(self, handles):
        """Of the page tables of sessions that were closed."""
        kept = {session.handle for session in self.sessions.values()}
        for handle in handles:
            if handle not in kept:
                lib.kvq_local_remove(self.local.pointer, handle)

    def _open(self, opening):
        more = {}
        if opening.model is not None:
            more = {"model": opening.model, "salt": opening.salt}
        if opening.prefix:
            more["prefix"] = opening.prefix
        name, session = opening.request, None
        while session is None:
            try:
                session = self.client.session(self.table.rows(), prompt_tokens=opening.prompt,
                                              on_detach="drop", **self.options(), **more)
                if session.tokens == len(opening.prefix):
                    self.local.add(session)
            except kvq.Error as error:
                if session is not None:
                    session.close()
                if error.code not in (*NO_ROOM, kvq.Code.E_LIMIT, kvq.Code.E_SYSTEM):
                    raise
                session, victim = None, None
                if error.code != kvq.Code.E_SYSTEM:
                    victim, self.full = self._younger(name), True
                if victim is None:
                    self.lose(name, str(error))
                    return
                self.lose(victim, str(error))
        self.sessions[name] = session
        if session.tokens != len(opening.prefix):
            self.lose(name, f"it was planned with {len(opening.prefix)} tokens that kvqd had, "
                            f"which has {session.tokens} now. A namespace near its table_bytes "
                            "gives up prefixes that are in use: raise the limit (kvqctl quota set "
                            "NAMESPACE --table-bytes SIZE)")

    def begin(self, plan, batch, dtype):
        """Begins the step of a forward, whose batch vLLM may have put in any order."""
        self.abort()
        if len(batch.pages) != len(plan.tokens):
            raise RuntimeError(f"kvq: a forward of {len(batch.pages)} requests was planned with "
                               f"{len(plan.tokens)}")
        parts, ids = [], []
        for row, page in enumerate(batch.pages):
            name, at, some = plan.tokens[page]
            session = self.sessions.get(name)
            if session is None and name not in self.lost | self.void:
                raise RuntimeError(f"kvq: request {name} has no session, and was not refused one")
            has = at if session is None else session.tokens
            new = batch.starts[row + 1] - batch.starts[row]
            if not has == at == batch.lengths[row] - new or new != len(some):
                raise RuntimeError(
                    f"kvq: request {name} has {has} tokens in kvqd; its plan has "
                    f"{len(some)} from {at} on, its forward {new} from {batch.lengths[row] - new}")
            parts.append(Part(name, session, at, batch.starts[row], new))
            ids += some
        self.step = Step(self, parts, ids, dtype)
        self.step.begin(self.local)
        return self.step

    # ---- What is refused ----

    def _younger(self, name):
        """The youngest request that has tokens in kvqd, if it is to give up its room to this one:
        so the oldest one always gets on, and then the next is the oldest."""
        if not self.recompute:
            return None
        some = [n for n, s in self.sessions.items() if s.tokens and self.ages[n] > self.ages[name]]
        return max(some, key=self.ages.get, default=None)

    def victim_for(self, refused):
        """Of (part, code, text): who gives up its room to the oldest one that there was none for.
        Where that is an error, only those pay who lack room themselves, the youngest first."""
        lacking = [part.name for part, code, _ in refused if code in NO_ROOM]
        self.full |= bool(lacking)
        if len(lacking) > 1 and not self.recompute:
            return max(lacking, key=self.ages.get)
        return self._younger(min(lacking, key=self.ages.get)) if lacking else None

    def refused(self, part, code, text):
        """kvqd has not taken a request's tokens, or no more of them."""
        if code == kvq.Code.E_NONFINITE:
            self._poisoned(part.name, text)
        elif code in (*NO_ROOM, *GONE):
            self.full |= code in NO_ROOM
            self.lose(part.name, text)
        else:
            raise kvq.Error(code, text)

    def _poisoned(self, name, text):
        text = (f"{text}. This is a model in {str(self.dtype)[6:]}: where float16 is too small for "
                "a model's values, start with dtype=\"bfloat16\"")
        if self.recompute:  # which would be the same again
            self._end_meaning(name, text)
        else:
            self.lose(name, text)

    def lose(self, name, text):
        """Gives up what kvqd has of a request. vLLM is told behind the next step that its tokens
        do not begin with."""
        if self._hopeless(name):
            self._end_meaning(name, f"{text}. No request is older, and it has begun anew for "
                              f"{PATIENCE:.0f} seconds")
            return
        self._end(name)
        self.lost.add(name)
        if name not in self.told:
            self.told.add(name)
            says = "kvq: request %s begins anew, as often as need be: %s" if self.recompute else \
                "kvq: request %s ends with an error: %s"
            _log.warning(says, name, text)

    def _end_meaning(self, name, text):
        self._end(name)
        self.void.add(name)
        _log.error("kvq: request %s goes on without meaning: %s", name, text)

    def _hopeless(self, name):
        """Whether beginning anew has not helped a request for long. While there is an older one, in
        kvqd or about to begin anew, that one may have the room, and takes it first."""
        if not self.recompute:
            return False
        if any(self.ages[other] < self.ages[name] for other in self.ages.keys() - self.void):
            self.stuck.pop(name, None)
            return False
        return self.clock() - self.stuck.setdefault(name, self.clock()) > PATIENCE

    def progress(self, parts):
        """A step begins."""
        for part in parts:
            end, has = part.at + part.count, part.session is not None or part.at == 0
            if has and end > self.reach.get(part.name, 0):
                self.reach[part.name] = end
                self.stuck.pop(part.name, None)

    def failures(self, plan):
        """First pages of lost requests. vLLM takes no token of these, and ends them or begins them
        anew. It looks at pages that had tokens before the step alone: those that begin in this step
        get their outputs all the same, and are told of behind the next one."""
        begin = {name for name, at, _ in plan.tokens.values() if at == 0}
        return {self.pages[name] for name in self.lost - begin}

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
