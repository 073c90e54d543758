# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side finds out and tells the worker's. Knows nothing of vLLM's classes.

A request that begins gets what kvqd has of its prompt. Between the scheduler's asking and the
worker's opening a session these tokens could be given up; a session of the scheduler's holds them
until the worker's step has been made.
"""
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

import kvq

PAGE = 128  # tokens that prefixes are shared by
ASK_AGAIN = 1.0  # seconds until kvqd is asked again for a prompt of which it had nothing
# A request begins without a prefix if kvqd has no room to hold one.
NO_ROOM = (kvq.Code.E_NO_MEMORY, kvq.Code.E_QUOTA, kvq.Code.E_LIMIT, kvq.Code.E_DEADLINE)

_log = logging.getLogger("vllm.kvq")


@dataclass
class Layers:
    """What the worker tells the scheduler: the model's layers, and how sessions are opened."""
    rows: List[kvq.Layer]
    session: dict


@dataclass
class Opening:
    """A session that begins: with so many tokens that kvqd has."""
    request: str
    prompt: int             # tokens
    prefix: List[int]       # ids that are there
    model: Optional[str]    # None: nobody is to find its tokens
    salt: Optional[str]
    page: int               # its first


@dataclass
class Report:
    """What the worker tells of a step."""
    full: bool  # kvqd had no room for somebody

    def aggregate(self, other):
        return Report(self.full or other.full)


@dataclass
class Plan:
    """Of a step."""
    ended: Set[str] = field(default_factory=set)
    opened: List[Opening] = field(default_factory=list)
    # By a request's first page: the request, where its new tokens stand, and their ids.
    tokens: Dict[int, Tuple[str, int, List[int]]] = field(default_factory=dict)


class Planner:
    """The scheduler's side."""

    def __init__(self, asked, model):
        self.layers = None  # until the worker has told
        self.client = kvq.Client(asked.runtime_dir, name="vllm scheduler", private=False)
        self.name = model
        self.model = model if asked.prefix else None
        if asked.prefix and self.model is None:
            _log.warning("kvq: prompts that begin alike are not shared: it cannot be known which "
                         "files the model's weights come from (none are on this machine, or "
                         "load_format takes them from elsewhere), and so which model it is. Name "
                         "it by \"model\" in kv_connector_extra_config")
        self.held = {}      # of a request that waits: a session that keeps what it will begin with
        self.vain = {}      # of a request that waits: when kvqd was last asked and had nothing
        self.told = set()   # why nothing is shared, in the log already
        self.full = None    # when kvqd last had no room for a request that runs
        self.freed = False  # one that ran has ended since the last plan
        self.clock = time.monotonic
        self.done = []      # held sessions whose requests begin in the step that is planned
        self.old = []       # .. that began in the step before it, which has been made
        self.requests = {}  # that have pages
        self.first = {}     # of each, its first page
        self.untold = set()  # that ran when reset() came: nobody is to find what they append
        self.opened = []    # since the last plan
        self.ended = set()

    def _salt(self, request):
        """Of any length and any characters, as the HTTP server takes it: kvqd's has neither."""
        salt = getattr(request, "cache_salt", None)
        return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest() if salt else None

    def matched(self, request):
        """How many of a request's first tokens kvqd has. A session holds them from here on, so that
        they are still there when the worker opens its own. None: the request is to wait, since
        those that run lack room already."""
        name = request.request_id
        if self.full is not None and self.first and self.clock() - self.full < ASK_AGAIN:
            return None
        if self.model is None or self.layers is None or request.skip_reading_prefix_cache:
            return 0
        if name not in self.held:
            ids = list(request.all_token_ids)[:-1]  # the last one's logits are needed
            now = self.clock()
            if len(ids) < PAGE or now - self.vain.get(name, -ASK_AGAIN) < ASK_AGAIN:
                return 0
            held = self._hold(request, ids)
            if held is None:
                self.vain[name] = now
                return 0
            self.held[name] = held
        return self.held[name].tokens

    def _hold(self, request, ids):
        """A session that begins with what kvqd has of these tokens, or None."""
        try:
            held = self.client.session(self.layers.rows, prefix=ids, model=self.model,
                                       salt=self._salt(request), on_detach="drop",
                                       **self.layers.session)
        except kvq.Error as error:
            if error.code == kvq.Code.E_UNSUPPORTED:
                self.model = None
            elif error.code not in NO_ROOM:
                raise
            if error.code not in self.told:
                self.told.add(error.code)
                often = "" if self.model is None else ", at times"
                _log.warning("kvq: prompts that begin alike are not shared%s: %s", often,
                             str(error))
            return None
        if held.tokens:
            return held
        held.close()  # nothing to keep, and maybe there is something later
        return None

    def placed(self, request, blocks, found):
        """A request has got pages, and begins with `found` tokens that kvqd has; or, with input
        that comes as a stream, goes on in the session and the pages that it has."""
        name = request.request_id
        if request.num_computed_tokens > found:
            if name not in self.first:
                raise RuntimeError(f"kvq: request {name} goes on behind "
                                   f"{request.num_computed_tokens} tokens, and has no session")
            return
        self.vain.pop(name, None)
        held = self.held.pop(name, None)
        if held is not None:
            self.done.append(held)
        self.requests[name] = request
        self.first[name] = blocks.get_block_ids()[0][0]
        self._open(name, found)

    def _open(self, name, found):
        request = self.requests[name]
        self.untold.discard(name)
        self.opened.append(Opening(name, request.num_prompt_tokens,
                                   list(request.all_token_ids)[:found], self.model,
                                   self._salt(request), self.first[name]))

    def heard(self, report):
        """What the worker tells of a step that was made. vLLM hands it on behind the ends of that
        step's requests, whose room is free by now."""
        if report.full and not self.freed:
            self.full = self.clock()

    def over(self, request):
        """A request has finished, or was given up."""
        name = request.request_id
        if name in self.first:
            self.full, self.freed = None, True
        held = self.held.pop(name, None)
        if held is not None:
            held.close()
        self.vain.pop(name, None)
        self.requests.pop(name, None)
        self.untold.discard(name)
        self.first.pop(name, None)
        self.opened = [o for o in self.opened if o.request != name]
        self.ended.add(name)

    def plan(self, output):
        """What the worker is told of a step."""
        for session in self.old:
            session.close()
        self.old, self.done = self.done, []
        preempted = output.preempted_req_ids or set()
        opened = {o.request for o in self.opened}
        for name in preempted - opened:
            self.first.pop(name, None)
        started = [(r.req_id, r.num_computed_tokens) for r in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        going = list(zip(cached.req_ids, cached.num_computed_tokens))
        for name, at in going:
            if at == 0 and name not in opened:  # the worker has lost it, and vLLM begins it anew
                self._open(name, 0)
        plan = Plan(self.ended | set(preempted), self.opened)
        self.opened, self.ended, self.freed = [], set(), False
        for name, at in [*started, *going]:
            count = output.num_scheduled_tokens[name]
            ids = list(self.requests[name].all_token_ids[at:at + count])
            if len(ids) != count or min(ids) < 0:
                raise RuntimeError(f"kvq: request {name} gets {count} tokens from {at} on; "
                                   f"{sum(i >= 0 for i in ids)} are known")
            page = self.first[name]
            if page in plan.tokens:
                raise RuntimeError(f"kvq: requests {name} and {plan.tokens[page][0]} both begin "
                                   f"with page {page}")
            if name in self.untold:  # ids that no prompt has
                ids = [~secrets.randbits(31) for _ in ids]
            plan.tokens[page] = (name, at, ids)
        return plan

    def reset(self):
        """What was computed so far is of other weights, say: requests that begin from here on find
        nothing of it, in this engine. Those that run end with what they have. What they append is
        found by nobody: their sessions have the name of the weights that they began with."""
        for session in self.held.values():
            session.close()
        self.held = {}
        self.untold |= set(self.first)
        if self.model is not None:
            self.model = f"{self.name} {secrets.token_hex(8)}"

    def close(self):
        self.client.close()
