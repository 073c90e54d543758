# SPDX-License-Identifier: Apache-2.0
"""A step of a forward, under vLLM. A request that kvqd refuses leaves the step; the others go on.

What is refused is refused late: a step that attends in this process has all its outputs by then,
and those of a longer one that begin with a request's first token are made here, from the step's own
keys and values. So the only rows without an output are those behind tokens that are not in kvqd.
Their requests are lost, and vLLM is told so before it takes a token of theirs.
"""
from dataclasses import dataclass
from typing import Any

import torch

from kvq import plugin
from kvq.errors import Code, Error, check, last_text

from ..fresh import causal

# There may be room later, maybe once other requests have ended.
NO_ROOM = (Code.E_NO_MEMORY, Code.E_QUOTA, Code.E_DEADLINE)
# The session is no more, as one whose blocks on disk are damaged; or what it needs could not be had
# of the system, as blocks that the disk does not read.
GONE = (Code.E_NO_SESSION, Code.E_STALE, Code.E_NO_STEP, Code.E_CANCELLED, Code.E_DAMAGED,
        Code.E_SYSTEM)


@dataclass
class Part:
    """A request's tokens in a step."""
    name: str
    session: Any  # None: nothing of the request is in kvqd, nor will be of this step
    at: int       # how many tokens stand before them
    row: int
    count: int

    @property
    def rows(self):
        return slice(self.row, self.row + self.count)


class Step(plugin.Step):
    """Of a forward. All of its requests have tokens in it.

    live     parts that have an entry: the oldest first, since kvqd gives room in the entries' order
    out      the others
    handles  of the sessions that it began with
    """

    def __init__(self, worker, parts, ids, dtype):
        counts = [part.count for part in parts]
        total = sum(counts)
        super().__init__(worker.queue, counts, total <= plugin.NEAR_ROWS)
        self.worker = worker
        self.ids = torch.tensor(ids, dtype=torch.int32)
        self.desk = worker.desks.of(worker.table, dtype, worker.table.layers if self.near else 1,
                                    total, total)
        self.parts = parts
        self.live = sorted((p for p in parts if p.session is not None),
                           key=lambda p: worker.ages[p.name])
        self.out = [p for p in parts if p.session is None]
        self.handles = [p.session.handle for p in self.live]

    def _enter(self):
        """Makes an entry for each live part."""
        counts = [part.count for part in self.live]
        self.prepare(self.desk, [part.session for part in self.live], counts, counts, self.ids)
        self.entries["row"] = self.entries["q_row"] = [part.row for part in self.live]

    def _keep(self, parts):
        """Only these live on; the others are out."""
        kept = {id(part) for part in parts}
        mask = [id(part) in kept for part in self.live]
        self.out += [part for part, keep in zip(self.live, mask) if not keep]
        self.live = [part for part, keep in zip(self.live, mask) if keep]
        self.entries = self.entries[mask]
        self.status, self._pointer = self.entries["status"], self.entries.ctypes.data

    def _refusals(self):
        """Of the last call: [(part, code, text)] of those that kvqd has refused."""
        found = []
        for part, status in zip(self.live, self.status.tolist()):
            if status:
                found.append((part, status, str(Error(status, "" if found else last_text()))))
        return found

    def begin(self, local):
        self.worker.progress(self.parts)
        while self.live:
            self._enter()
            super().begin(local)
            if not self.failed():
                return
            refused = self._refusals()
            victim = self.worker.victim_for(refused)
            if victim is None:
                self._refuse(refused)
                return
            self.abort()
            self.worker.lose(victim, _for_room(refused))
            self.out += [p for p in self.live if p.name == victim]
            self.live = [p for p in self.live if p.name != victim]

    def _refuse(self, refused):
        """They leave the step, and have lost what kvqd had of them."""
        gone = {id(part) for part, _, _ in refused}
        self._keep([part for part in self.live if id(part) not in gone])
        for part, code, text in refused:
            self.worker.refused(part, code, text)

    def attend(self, name, query, key, value, output):
        """Hands over K and V of a layer, [tokens][heads][dim], and attends into `output`."""
        layer, total, desk = self.worker.table.numbers[name], self.total, self.desk
        if layer != self.next:
            raise RuntimeError(f"kvq: layer {layer} ({name}) attends where {self.next} was "
                               "expected")
        for kept, given in zip(self.kept(layer), (key, value)):
            kept.copy_(given[:total])
        desk.queries[:total].copy_(query[:total])
        if self.live:
            self.ask(layer)
            if self.failed():
                self._refuse(self._refusals())
        output[:total].copy_(desk.out[:total])
        for part in self.out:
            self._attend_alone(part, layer, query, key, value, output)
        self.next += 1
        if self.next == self.worker.table.layers:
            self._commit()

    def _attend_alone(self, part, layer, query, key, value, output):
        """A layer for a request of which nothing is in kvqd."""
        rows = part.rows
        if part.at:
            output[rows] = torch.nan  # nobody has what it should attend to
            return
        q, k, v = (x[rows].transpose(0, 1) for x in (query, key, value))
        scale, softcap = self.worker.table.scales[layer]
        output[rows] = causal(q, k, v, scale, softcap=softcap, want_lse=False)[0].transpose(0, 1)

    def _commit(self):
        """Where there was no room the entries stay in the step, which ends once more when younger
        requests have given theirs up. A step of which no part lives is aborted: it would stay under
        way else."""
        while self.live:
            check(self.end())
            refused = self._refusals()
            for part, status in zip(self.live, self.status.tolist()):
                if not status:
                    part.session.tokens += part.count
            if not refused:
                break
            self._end_again(refused)
        if not self.live:
            self.abort()
        self.worker.step, self.worker.made = None, True

    def abort(self):
        """Also lets go of the page tables of sessions that were closed meanwhile."""
        code = super().abort()
        self.worker.let_go(self.handles)
        return code

    def _end_again(self, refused):
        """Leaves those live that there may be room for now."""
        victim = self.worker.victim_for(refused)
        again = [p for p, code, _ in refused
                 if victim is not None and code in NO_ROOM and p.name != victim]
        if victim is not None:
            self.worker.lose(victim, _for_room(refused))
        stay = {part.name for part in again} | {victim}
        for part, code, text in refused:
            if part.name not in stay:
                self.worker.refused(part, code, text)
        self._keep(again)


def _for_room(refused):
    """Why a younger request gives its room up."""
    return next(text for _, code, text in refused if code in NO_ROOM)
