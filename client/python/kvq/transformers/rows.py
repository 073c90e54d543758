# SPDX-License-Identifier: Apache-2.0
"""The sessions of a batch, one for each row, and the steps that go over them.

All rows take a step or none does. The daemon ends its own steps like that. One of this process
commits row by row: rows go back from it if another failed, so in a batch it has no more tokens than
can be cropped.
"""
import functools
import os
import re
import weakref
from ctypes import byref

import torch

import kvq
from kvq import _ffi, plugin
from kvq._ffi import lib
from kvq.errors import check

from ..fresh import causal, merge
from .clients import close_retired, queue_of, shared_queue
from .table import refuse

QUERIES = 512       # of a session in a request; more are merged with PyTorch's attention
MAX_TOKENS = 131072
MOST_ROWS = 1024    # of a batch: sessions of a step
MOST_TOKENS = 65536 # of a row in a forward: tokens of a session in a step
_ANEW = "; a new KvqCache connects again"
_AGAIN = re.compile(r"; (call )?Client\.reattach\(\) (connects again|first)"
                    "(, then close this Local and open another)?")
_served = weakref.WeakKeyDictionary()  # by client: formats that it is known to have
OF_NAMES = ("name", "prefix", "on_detach", "keep_seconds")  # options that a fork does not have


def told(method):
    """Of Rows: an error says what the user can do, who has no kvq.Client to attach again."""
    @functools.wraps(method)
    def wrapped(self, *arguments):
        try:
            return method(self, *arguments)
        except kvq.Error as error:
            if error.code == kvq.Code.E_DISCONNECTED and self.shares and _ANEW not in error.text:
                error.__init__(error.code, _AGAIN.sub("", error.text) + _ANEW, error.entries)
            raise
    return wrapped


def in_turn(method):
    """Of Rows: the client cannot be closed or attached again meanwhile, nor the queue be used by
    another thread."""
    @told
    @functools.wraps(method)
    def wrapped(self, *arguments):
        self.check_process()
        return self.queue.turn.run(method, self, *arguments)
    return wrapped


class Step(plugin.Step):
    """Of a forward, which may have columns that are pads."""

    def __init__(self, queue, counts, keep, columns, near):
        super().__init__(queue, counts, near)
        self.keep = keep        # None, or [batch][columns]: which columns are tokens
        self.columns = columns  # of the forward
        self.rows = [i for i, n in enumerate(counts) if n]
        self.seen = 0           # columns before it
        self.ending = False     # its rows may have committed
        self.past = None        # what each row had before
        self.shaped = None      # the desk's tensors, where no column is a pad
        self.together = False   # one request for a layer appends and attends


class Rows:
    """Sessions and steps. Knows nothing of transformers' classes. What it tells the library are
    pointers: it does so in its queue's turn, and looks first whether they are there."""

    def __init__(self, table, client, options, max_tokens):
        self.table, self.options = table, options
        self.shares = not client  # the connection that all caches without a client have
        self.process = os.getpid()
        self.format, self.threads = options.pop("format"), options.pop("threads")
        self.max_tokens = max_tokens
        self.client, self.queue = (client, queue_of(client)) if client else shared_queue()
        self.local = None
        self.connection = None  # of the client's that the local is of
        self.broken = None      # or why the cache can only be closed or reset
        self.held = set()       # handles that the kvq_local has
        self.sessions = []
        self.dtype = None
        self.seen = 0           # columns, those of pad tokens included
        self.real = None        # None, or [batch][seen]: which of them are tokens
        self.step = None
        self.desks = plugin.Desks(self.client)

    # ---- Sessions ----

    @in_turn
    def check_options(self, dtype):
        """Refuses options and a format that no session can have. Names of formats may be of the
        daemon's configuration: it is asked, once for each."""
        options = {n: o for n, o in self.options.items() if n != "prefix" and o is not None}
        if not isinstance(self.format, str):
            raise TypeError(f"format is {self.format!r}; it is a name, as \"oscar4\"")
        self.client._describe([], self.format, **options)
        served = _served.setdefault(self.client, set())
        if self.format == "16bit" or self.format in served:
            return
        stored = "bf16" if dtype == torch.bfloat16 else "f16"
        try:
            self.client.session(self.table.rows(), self.format, place="host",
                                dtype=self.format if self.format in ("f16", "bf16") else stored
                                ).close()
        except kvq.Error as error:
            if error.code in (kvq.Code.E_FORMAT, kvq.Code.E_SHAPE, kvq.Code.E_INVALID):
                raise
            return  # for lack of room, say, which there may be when it is needed
        served.add(self.format)

    @in_turn
    def open(self, batch, dtype, prompt=0):
        """One session for each row of a batch. One that is there already, by its name or by what it
        begins with, goes on where it stands."""
        options = dict(self.options)
        if options.get("prompt_tokens") is None:
            options["prompt_tokens"] = min(prompt, QUERIES)
        self.options.pop("prefix", None)  # of the first sessions alone
        if batch > 1 and (options.get("name") or "prefix" in options):
            refuse(f"a cache with a name or a prefix has one row; this forward has {batch}")
        stored = "bf16" if dtype == torch.bfloat16 else "f16"
        form = stored if self.format == "16bit" else self.format
        rows = self.table.rows()
        opened = []
        try:
            for _ in range(batch):
                opened.append(self.client.session(
                    rows, form, dtype=form if form in ("f16", "bf16") else stored, place="host",
                    **options))
        except BaseException:
            for session in opened:
                session.close()
            raise
        self.sessions = opened
        self.dtype = dtype
        self.seen = self.sessions[0].tokens

    def _open_anew(self, batch, dtype, prompt):
        """For a forward that has made its positions for an empty cache."""
        self.open(batch, dtype, prompt)
        if self.seen:  # a name that reset() has given up, and somebody has taken since
            refuse(f"a session {self.options['name']!r} is there, with {self.seen} tokens, which "
                   "somebody else made since this cache was reset; this forward has positions from "
                   "0 on. The cache goes on with that session from here on: give the ids of all of "
                   "its tokens and new ones, or reset() the cache again to destroy it")

    def tokens(self, batch):
        """How many tokens each row of a batch has."""
        return [session.tokens for session in self.sessions] or [0] * batch

    def _take_in(self, sessions):
        local = self.attach()
        for session in sessions:
            if session.handle not in self.held:
                check(lib.kvq_local_add(local.pointer, session.handle))
                self.held.add(session.handle)

    @in_turn
    def attach(self):
        """The kvq.Local that steps of few tokens attend by."""
        if self.local is not None and self.connection != self.client._connection:
            self.local.close()
            self.local, self.held = None, set()
        if self.local is None:
            self.connection = self.client._connection
            self.local = self.queue.local(max_tokens=self.max_tokens,
                                          threads=self.threads)
        return self.local

    @in_turn
    def select(self, indices):
        """Makes the rows those of `indices`: forks a session for each further time that its row is
        there, and closes the sessions of rows that are not."""
        self.check_there()
        self.abort()
        have = len(self.sessions)
        if not have:
            return
        wrong = [i for i in indices if type(i) is not int or not 0 <= i < have]
        if wrong:
            raise IndexError(f"row {wrong[0]!r} is asked for; this cache has {have} rows, 0 to "
                             f"{have - 1}")
        if not indices:
            raise ValueError(f"none of the cache's {have} rows would stay: close() or reset() it "
                             "instead")
        if list(indices) == list(range(have)):
            return
        if self.options.get("name"):
            refuse("the session has a name, which one row has; beams and batches need a cache "
                   "without one")
        again = [i for n, i in enumerate(indices) if i in indices[:n]]
        forks = iter(self.queue.fork([self.sessions[i] for i in again]) if again else ())
        chosen, used = [], set()
        for i in indices:
            chosen.append(next(forks) if i in used else self.sessions[i])
            used.add(i)
        left = [session for i, session in enumerate(self.sessions) if i not in used]
        self.sessions = chosen
        self._know(None if self.real is None else self.real[list(indices)])
        self._end_all(left, kvq.Session.close)

    def _know(self, real):
        """Which columns are tokens; None: all."""
        self.real = None if real is None or bool(real.all()) else real

    @in_turn
    def fork(self):
        """The same sessions once more, for a copy of the cache."""
        self.check_there()
        self.abort()
        options = {n: v for n, v in self.options.items() if n not in OF_NAMES}
        options |= {"format": self.format, "threads": self.threads}
        other = Rows(self.table, self.client, options, self.max_tokens)
        other.shares = self.shares
        if self.sessions:
            other.sessions = self.queue.fork(self.sessions)
        other.dtype, other.seen, other.real = self.dtype, self.seen, self.real
        return other

    def _end_all(self, sessions, end):
        """Ends every one; raises for the first that could not be. One that is gone has ended."""
        failed = None
        for session in sessions:
            self.held.discard(session.handle)
            try:
                end(session)
            except kvq.Error as error:
                failed = failed or (error if error.code != kvq.Code.E_STALE else None)
            except KeyboardInterrupt as interrupt:  # for which nobody would end the others
                failed = interrupt
        if failed:
            raise failed

    @in_turn
    def crop(self, columns):
        """Takes the last `columns` away again."""
        self.check_there()
        self.abort()
        if not columns or not self.sessions:
            return
        left = [s.tokens - columns for s in self.sessions]
        if self.real is not None:
            gone = self.real[:, -columns:].sum(1).tolist()
            left = [s.tokens - n for s, n in zip(self.sessions, gone)]
        pairs = [(s, n) for s, n in zip(self.sessions, left) if n != s.tokens]
        pairs.sort(key=lambda pair: pair[1] - pair[0].tokens)
        try:
            if pairs:  # the one that goes back furthest alone: if it cannot, nothing is done
                self.queue.truncate([pairs[0][0]], [pairs[0][1]])
            if pairs[1:]:
                self._truncate(pairs[1:])
        except kvq.Error as error:
            if error.code == kvq.Code.E_ROLLBACK and hasattr(error, "add_note"):  # from Python 3.11
                error.add_note(f"KvqCache(max_rollback={self.options['max_rollback']}) says how "
                               "many tokens can be cropped; a session that was there keeps the "
                               "max_rollback that it was made with")
            raise
        self.seen -= columns
        self._know(None if self.real is None else self.real[:, :self.seen])

    def _truncate(self, pairs):
        """Sessions to so many tokens, all or the cache is of no use any more."""
        try:
            self.queue.truncate(*map(list, zip(*pairs)))
        except kvq.Error as error:
            self.broken = f"rows of the cache stand at different tokens since this: {error}"
            raise

    @in_turn
    def save(self):
        """Saves the session with a name."""
        self.check_there()
        self.abort()
        if not self.options.get("name"):
            raise ValueError("the cache has no name, under which its tokens could be found again: "
                             "make it with name=")
        if not self.sessions:
            raise ValueError(f"there is no session {self.options['name']!r} since the cache was "
                             "reset; its next forward makes one")
        for session in self.sessions:
            session.save()

    @in_turn
    def drop(self):
        """Ends all sessions: those with names are destroyed."""
        self.abort()
        sessions, self.sessions = self.sessions, []
        self.seen, self.real, self.broken = 0, None, None
        self._end_all([s for s in sessions if s.handle], kvq.Session.drop)

    def close(self):
        """Gives everything back. May be called again. In a process that was forked since, nothing
        is this one's to give back."""
        if self.process == os.getpid():
            try:
                self._close()
            finally:
                close_retired()

    @in_turn
    def _close(self):
        if not self.queue.pointer:
            return
        self.abort()
        sessions, self.sessions = self.sessions, []
        try:
            self._end_all(sessions, kvq.Session.close)
        finally:
            self.local = None
            self.desks.close()
            self.queue.close()

    def __del__(self):
        try:
            if self.client.pointer:
                self.close()
        except Exception:  # the interpreter ends, or the daemon is gone: nothing is left to close
            pass

    # ---- Steps ----

    def _counts(self, batch, columns, mask):
        """How many tokens each row appends, and which columns they are."""
        if mask is None:
            if self.real is not None:
                refuse("this cache holds pad tokens, but the forward came without an "
                       "attention_mask; give it the mask of all columns")
            return [columns] * batch, None
        known = self.real if self.real is not None else torch.ones(batch, self.seen,
                                                                    dtype=torch.bool)
        if not torch.equal(mask[:, :self.seen], known):
            refuse("attention_mask hides other tokens of the past than it did when they came; what "
                   "is in a cache stays visible")
        keep = mask[:, self.seen:]
        counts = keep.sum(1).tolist()
        return counts, None if all(n == columns for n in counts) else keep

    @in_turn
    def begin(self, key, mask, ids=None):
        """Begins a step of K's tokens. ids: [batch][columns], told to the daemon."""
        self.check_there()
        self.abort()
        batch, _, columns, _ = key.shape
        if self.sessions and len(self.sessions) != batch:
            refuse(f"the cache has {len(self.sessions)} rows, the forward {batch}")
        counts, keep = self._counts(batch, columns, mask)
        if batch > MOST_ROWS or max(counts) > MOST_TOKENS:
            refuse(f"a forward of {batch} rows with up to {max(counts)} tokens; a step of kvqd "
                   f"takes {MOST_ROWS} rows with {MOST_TOKENS} each (generate() cuts prompts into "
                   "pieces with prefill_chunk_size)")
        if not self.sessions:
            if self.seen:  # positions of this forward were made for these tokens
                raise ValueError(f"the cache has {self.seen} tokens and no session: reset() it")
            self._open_anew(batch, key.dtype, max(counts))
        if key.dtype != self.dtype:
            refuse(f"the cache was begun with {self.dtype}, this forward has {key.dtype}")
        total, most = sum(counts), max(s.tokens + n for s, n in zip(self.sessions, counts))
        if most > self.max_tokens:
            refuse(f"a row would have {most} tokens; this cache was made with max_tokens="
                   f"{self.max_tokens}")
        near = (total <= plugin.NEAR_ROWS or columns == 1) and (
            batch == 1 or max(counts) <= self.options["max_rollback"])
        step = Step(self.queue, counts, keep, columns, near)
        step.past, step.seen = [s.tokens for s in self.sessions], self.seen
        if not total:
            self.step = step
            return
        try:
            self._begin(step, ids)
        except BaseException:
            self.abort()
            raise

    def _begin(self, step, ids):
        active = [self.sessions[i] for i in step.rows]
        counts = [step.counts[i] for i in step.rows]
        step.together = step.near or (any(step.past) and max(step.counts) <= QUERIES)
        desk = self.desks.of(self.table, self.dtype, self.table.layers if step.near else 1,
                             step.total, step.total if step.together else min(step.total, QUERIES))
        if step.together and step.keep is None:
            step.shaped = desk.shaped(len(step.counts), step.columns)
        if ids is not None:
            ids = ids.reshape(-1) if step.keep is None else ids[step.keep]
        step.prepare(desk, active, counts, [min(n, QUERIES) for n in counts], ids)
        if step.near:
            self._take_in(active)
        self.step = step  # so that a failure or an interrupt from here on aborts it
        step.begin(self.local)
        self._check(step)

    def _check(self, step):
        """Raises for the first row that failed; the step is over for all of them then."""
        if step.failed():
            try:
                check(0, step.entries)
            finally:
                self.abort()

    @in_turn
    def end(self):
        """Commits the step. Interrupted, it is settled by the abort that follows."""
        step = self.step
        if step.total:
            step.ending = True
            code = step.end(each=False)
            if step.near and (code or step.failed()):
                try:
                    check(code, step.entries)  # before other calls have a text of theirs
                finally:
                    self.abort()
            check(code)
            for i in step.rows:
                self.sessions[i].tokens = step.past[i] + step.counts[i]
        self._count(step)
        self.step = None

    def _settle(self, step):
        """Of a step whose commit failed or was interrupted. Where all rows have committed, the
        step's tokens are in the cache; where only some have, they are taken from these again."""
        done = []
        for i in step.rows:
            try:
                if self.sessions[i].refresh() > step.past[i]:
                    done.append((self.sessions[i], step.past[i]))
            except kvq.Error:  # it is gone, or the daemon is: the next use of the cache says so
                pass
        if len(done) == len(step.rows):
            self._count(step)
        elif done:
            try:
                self._truncate(done)
            except kvq.Error:
                pass  # the caller raises what failed first; the next use of the cache tells of this

    def _count(self, step):
        """Takes the step's columns in. Called again, it changes nothing."""
        self._remember(step)
        self.seen = step.seen + step.columns

    def _remember(self, step):
        """Which columns are tokens, as long as one of them is not."""
        if self.real is None and step.keep is None:
            return
        batch = len(self.sessions)
        old = self.real[:, :step.seen] if self.real is not None else torch.ones(
            batch, step.seen, dtype=torch.bool)
        new = step.keep if step.keep is not None else torch.ones(batch, step.columns,
                                                                 dtype=torch.bool)
        self.real = torch.cat([old, new], 1)

    def check_process(self):
        """The connection is one process's: two would take each other's replies."""
        if self.process != os.getpid():
            raise ValueError("the cache is of the process that this one was forked from; make one "
                             "here, with a kvq.Client of this process if you give it one")

    def check_open(self):
        """The library is told pointers: of what is closed there are none."""
        if not self.queue.pointer:
            raise ValueError("the cache, or the kvq.Client that it is of, is closed")
        if self.broken:
            raise ValueError(f"{self.broken}; reset() or close() the cache")

    def check_there(self):
        """The same, and the sessions: those that a client had are closed when it is attached again,
        and others may have their handles."""
        self.check_open()
        if not all(session.handle for session in self.sessions):
            raise ValueError("the sessions of this cache are closed, by their close() or by "
                             "kvq.Client.reattach(): reset() the cache to begin anew, or, to go on "
                             "with one that has a name, make another cache of that name")

    @in_turn
    def abort(self):
        """Ends an open step, and leaves every session as it was. An interrupted one can be called
        again."""
        step = self.step
        try:
            if step is not None and step.total and self.queue.pointer:
                self._abort(step)
        except Exception:
            self.step = None
            raise
        self.step = None

    def _abort(self, step):
        code = step.abort()
        if not step.ending:
            check(0 if code == kvq.Code.E_NO_STEP else code)  # ended by the failure itself
        if step.ending:
            self._settle(step)

    # ---- Attention ----

    @told
    def attend(self, layer, query, key, value, want_lse):
        """Appends K and V [batch][heads][columns][dim] of a layer to the step, and attends. Returns
        [batch][columns][q_heads][dim], zeros at pads, and the LSE alike where it is wanted."""
        return self.queue.turn.run(self._attend, layer, query, key, value, want_lse)

    def _attend(self, layer, query, key, value, want_lse):
        self.check_open()
        step = self.step
        if not step.total:
            shape = (query.shape[0], query.shape[2], query.shape[1])
            return query.new_zeros(*shape, query.shape[3]), torch.zeros(shape)
        desk, total = step.desk, step.total
        if step.shaped:
            return self._attend_shaped(step, layer, query, key, value, want_lse)
        for kept, given in zip(step.kept(layer), (key, value)):
            self._gather(step, given, kept)
        if step.together:
            self._gather(step, query, desk.queries[:total])
            self._ask(step, layer)
            return (self._spread(step, desk.out[:total]),
                    self._spread(step, desk.lse[:total]) if want_lse else None)
        return self._prefill(step, layer, query, key, value, want_lse)

    def _attend_shaped(self, step, layer, query, key, value, want_lse):
        """The same where no column is a pad, with one operation of PyTorch for each tensor."""
        keys, values, queries, out, lse = step.shaped
        at = layer % step.desk.kept
        keys[at].copy_(key)
        values[at].copy_(value)
        queries.copy_(query)
        self._ask(step, layer)
        return out.clone(), lse.clone() if want_lse else None

    def _ask(self, step, layer):
        step.ask(layer)
        self._check(step)

    @staticmethod
    def _gather(step, given, rows):
        """Tokens of [batch][heads][columns][dim] one behind the other: [tokens][heads][dim]."""
        given = given.transpose(1, 2)
        if step.keep is None:
            rows.view(given.shape).copy_(given)
        else:
            rows.copy_(given[step.keep])

    @staticmethod
    def _spread(step, rows):
        """The opposite: new tensors [batch][columns]..."""
        shape = (len(step.counts), step.columns, *rows.shape[1:])
        if step.keep is None:
            return rows.view(shape).clone()
        made = rows.new_zeros(shape)
        made[step.keep] = rows
        return made

    def _prefill(self, step, layer, query, key, value, want_lse):
        """A long piece: its own tokens in PyTorch, what was there before merged by LSE."""
        desk = step.desk
        entries = step.entries.copy()
        entries["queries"] = 0
        check(lib.kvq_append(self.queue.pointer, byref(self._only_kv(desk, layer)),
                             entries.ctypes.data, len(entries)))
        step.entries["status"] = entries["status"]
        self._check(step)
        if self.dtype == torch.float32:  # what is attended to is what is stored
            key, value = (x.clamp(-65504, 65504).half().float() for x in (key, value))
        batch, heads, columns, dim = query.shape
        out = query.new_zeros(batch, columns, heads, dim)
        sums = torch.zeros(batch, columns, heads) if want_lse else None
        for i in step.rows:
            own = slice(None) if step.keep is None else step.keep[i]
            done, lse = self._prefill_row(layer, i, *(x[i][:, own] for x in (query, key, value)),
                                          want_lse)
            out[i, own] = done.transpose(0, 1).to(out.dtype)
            if want_lse:
                sums[i, own] = lse.transpose(0, 1)
        return out, sums

    @staticmethod
    def _only_kv(desk, layer):
        full = desk.work[layer]
        return _ffi.Work(step=full.step, layer=layer, k=full.k, v=full.v)

    def _prefill_row(self, layer, row, query, key, value, want_lse):
        table, past = self.table, self.step.past[row]
        scale, window, cap = table.scales[layer], table.windows[layer], table.softcaps[layer]
        if not past:
            return causal(query, key, value, scale, window, cap, want_lse)
        session = self.sessions[row]
        if window:  # few tokens of the past are seen, and by some of the queries: read them
            first = max(past - window + 1, 0)
            old = [torch.from_numpy(a).transpose(0, 1).to(key.dtype)
                   for a in self.queue.read(session, layer, first, past - first)]
            key, value = (torch.cat([o, new], 1) for o, new in zip(old, (key, value)))
            return causal(query, key, value, scale, window, cap, want_lse)
        out, lse = causal(query, key, value, scale, window, cap)
        then, then_lse = self._past(session, layer, query)
        return merge(out, lse, then, then_lse)

    def _past(self, session, layer, query):
        """Attention of all queries to what the session had before the step."""
        heads, n, dim = query.shape
        out = torch.empty(heads, n, dim)
        lse = torch.empty(heads, n)
        desk = self.step.desk
        full = desk.work[layer]
        work = _ffi.Work(layer=layer, q=full.q, out=full.out, lse=full.lse)
        for at in range(0, n, QUERIES):
            count = min(QUERIES, n - at)
            desk.queries[:count].copy_(query[:, at:at + count].transpose(0, 1))
            entries = kvq.make_entries([session], queries=count)
            check(lib.kvq_attend(self.queue.pointer, byref(work), entries.ctypes.data, 1))
            check(0, entries)
            out[:, at:at + count] = desk.out[:count].transpose(0, 1)
            lse[:, at:at + count] = desk.lse[:count].transpose(0, 1)
        return out, lse
