# SPDX-License-Identifier: Apache-2.0
"""KvqCache: a cache of transformers whose keys and values lie in kvqd."""
from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin

import kvq

from .masks import beside_ids, check_goes_on, check_places, check_positions
from ..hints import Threads
from ..memory import CODES
from .owner import Owner
from .rows import MAX_TOKENS, Rows
from .table import (
    Table, check_implementation, check_prefix, check_weights, fingerprint, refuse)

CACHE_NAMES = "cache", "past_key_values"  # of the argument: from transformers 5.24 on, and before
_FINGERPRINT = ("kvq.transformers' fingerprint is of the configuration (but for the version of "
                "transformers and what concerns generate() alone), of all values of all parameters "
                "and saved buffers, and of PEFT's active adapters; one of them is another now, or "
                "the session is of a kvq or a transformers that wrote these down otherwise: then "
                "drop the session, or use another name")
_LENGTHS = int(transformers.__version__.split(".", 1)[0]) < 5  # crop() takes the length to keep


class KvqLayer(CacheLayerMixin):
    """One layer of a KvqCache. Stores nothing: it tells the attention function whose K this is."""
    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, state, number):
        super().__init__()
        self.state, self.number = state, number
        self.is_initialized = True

    def lazy_initialization(self, *_):
        """Nothing is to be done: sessions are opened by the first attention."""

    def update(self, key_states, value_states, *_, **__):
        """The new K, tagged for the attention function, and V. The model made K for this layer."""
        self.state.came(self.number, key_states)
        key_states.kvq_layer = self
        return key_states, value_states

    def get_seq_length(self, *_):
        return self.state.rows.seen

    def get_mask_sizes(self, query_length):
        # transformers 4: the positions of the new tokens instead of their number
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.state.rows.seen + new, 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self):
        return len(self.state.rows.sessions) or -1

    def _whole(self, *_):
        refuse("layers of a KvqCache change together: call the cache's own method")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = _whole
    offload = prefetch = _whole


class State:
    """What a forward goes through, from layer to layer."""

    def __init__(self, table, rows):
        self.table, self.rows = table, rows
        self.owner = Owner()
        self.hooked = False   # begins() was called, and over() will be
        self.waiting = None   # the layer whose K came and was not attended to yet
        self.tells = False    # the daemon learns which tokens they are, for others to find
        self.ids = None       # of the forward under way, if it tells

    def came(self, number, key):
        self.owner.take()
        if number == 0 or self.waiting is not None or key.dtype not in CODES or not key.is_cpu:
            try:
                self._check(number, key)
            except BaseException:
                self._leave()
                raise
        self.waiting = number

    def _leave(self):
        """Lets other threads in, unless over() will do so."""
        if not self.hooked:
            self.owner.leave()

    def _check(self, number, key):
        if number == 0:
            check_implementation(self.table.config)
        if key.dtype not in CODES:
            refuse(f"keys are {key.dtype}; float16, bfloat16 and float32 are served")
        if not key.is_cpu:
            refuse(f"the model is on {key.device}; models on the CPU are served")
        if number and self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.rows.abort()
            refuse(f"layer {waiting} came without being attended to by kvq")

    def attend(self, number, *arguments):
        self.owner.take()
        try:
            return self._attend(number, *arguments)
        finally:
            if self.rows.step is None:  # after the last layer, or a failure
                self._leave()

    def _attend(self, number, query, key, value, mask, scaling, window, softcap, want_lse):
        rows = self.rows
        self.waiting = None
        if number == 0:
            if self.ids is None:  # begins() was not called
                self._tell_no_more("something called the forward of the model's decoder past "
                                   "PyTorch's hooks")
            rows.begin(key, mask, self.ids)
        if rows.step is None or rows.step.next != number:
            rows.abort()
            refuse(f"layer {number} came out of turn; the layers of a forward come from the first "
                   "to the last")
        try:
            self.table.check(number, query, key, value, scaling, window, softcap)
            out = rows.attend(number, query, key, value, want_lse)
            rows.step.next += 1
            if rows.step.next == self.table.layers:
                rows.end()
        except BaseException:
            rows.abort()
            raise
        return out

    def begins(self, given):
        """A forward of the decoder begins, with these arguments. Ids are told without a gap."""
        self.owner.take()
        self.hooked = True
        ids = given.get("input_ids")
        if self.tells:
            self._tell_no_more("this forward came with embeddings instead of ids" if ids is None
                               else beside_ids(given, self.rows.tokens(len(ids)), self.rows.seen))
        self.ids = ids if self.tells else None

    def _tell_no_more(self, why):
        """Unless there is nothing to be said why."""
        if self.tells and why:
            warnings.warn(f"kvq: {why}: the daemon cannot know the tokens of this cache from here "
                          "on, and other caches with a prefix will not find them", stacklevel=2)
            self.tells = False

    def over(self, failed):
        """A forward has ended. What is still open is no whole step."""
        if not self.owner.is_mine():  # begins() has refused it
            return
        left = self.waiting is not None or self.rows.step is not None
        self.waiting = self.ids = None
        self.hooked = False
        try:
            self.rows.abort()
        finally:
            self.owner.leave()
        if left and not failed:
            refuse("the forward ended before its last layer (an early exit): its tokens are not in "
                   "the cache")


def _alone(method):
    """Of a KvqCache: no other thread may be in a forward or a call of it."""
    @functools.wraps(method)
    def wrapped(self, *arguments, **options):
        with self.state.owner.use():
            return method(self, *arguments, **options)
    return wrapped


class KvqCache(Cache):
    """A cache for generate() and for forwards of `model`, which attends by "kvq".

    format         of docs/formats.md; "16bit": f16, or bf16 for a model in bfloat16
    client         a kvq.Client; None: one that all caches share, as kvq.Client() finds it
    attention      "exact", "fast", or "default": as the daemon is configured
    max_rollback   tokens that crop() can take away, as speculative decoding does
    prompt_tokens  of a prompt that comes in pieces: so many are attended to in 16 bits. None: as
                   many as the first forward or the prefix has, at most 512; with a name and no
                   prefix 0
    max_tokens     that a row may have
    threads        that attend in this process: "torch", those that PyTorch computes with, or a
                   number of kvq's own
    name           of a session that outlives the cache: one that is there goes on where it stands,
                   and get_seq_length() says how many tokens it has; a prompt has the ids of all of
                   them and new ones. Its cache has one row
    namespace      of the name, and of prefixes
    prefix         ids of the prompt, [tokens] or [1][tokens]: what other sessions have of it need
                   not be computed again, and what this one computes is there for others. The cache
                   has one row

    on_detach, keep_seconds, salt and adapter are those of kvq.Client.session. A session that is
    there keeps the attention, max_rollback, on_detach and keep_seconds that it was made with.

    copy.deepcopy() of a cache is a fork: it shares what is packed.
    """

    def __init__(self, model: transformers.PreTrainedModel, format: str = "oscar4", *,
                 client: Optional[kvq.Client] = None, attention: str = "default",
                 max_rollback: int = 32, prompt_tokens: Optional[int] = None,
                 max_tokens: Optional[int] = None, threads: Threads = "torch",
                 name: Optional[str] = None, namespace: Optional[str] = None,
                 prefix: Union[torch.Tensor, Sequence[int], None] = None,
                 on_detach: str = "default", keep_seconds: int = 0, salt: Optional[str] = None,
                 adapter: Optional[str] = None) -> None:
        table = Table(model)
        longest = getattr(table.config, "max_position_embeddings", 0) or 0
        options: Dict[str, Any] = {
            "format": format, "attention": attention, "max_rollback": max_rollback,
            "prompt_tokens": prompt_tokens, "name": name, "ns": namespace, "on_detach": on_detach,
            "keep_seconds": keep_seconds, "salt": salt, "adapter": adapter, "threads": threads}
        ids = [] if prefix is None else _one_row(prefix)
        if prefix is not None:
            check_prefix(table.config, model)
            options["prefix"] = ids[:-1]  # the last token's logits are needed
        if name is not None or prefix is not None:
            options["model"] = fingerprint(model)
        rows = Rows(table, client, options,
                    max_tokens or min(max(longest, MAX_TOKENS), 1 << 20))
        self._set(State(table, rows))
        self.state.tells = prefix is not None
        watch(table.decoder(model))
        if "model" in options:
            try:
                rows.open(1, model.dtype, max(len(ids) - 1, 0))
            except kvq.Error as error:
                if "model fingerprint" in error.text and hasattr(error, "add_note"):
                    error.add_note(_FINGERPRINT)
                raise
            if prefix is not None and rows.seen >= len(ids):
                rows.close()
                refuse(f"the session {name!r} has {rows.seen} tokens already, and prefix {len(ids)}"
                       " ids: they would be appended again. Give the ids of all of its tokens and "
                       "new ones; or make the cache without prefix, and crop() or reset() it first")
        else:
            rows.check_options(model.dtype)

    def _set(self, state):
        self.state = state
        super().__init__(layers=[KvqLayer(state, i) for i in range(state.table.layers)])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
               *_: Any, **__: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """Called by each layer of the model, with its new K and V."""
        return self.layers[layer_idx].update(key_states, value_states)

    def __repr__(self):
        rows = self.state.rows
        return f"KvqCache({rows.format}, {len(rows.sessions)} rows of {rows.seen} tokens)"

    @property
    def sessions(self) -> List[kvq.Session]:
        """The kvq.Session of each row; none before the first forward."""
        return list(self.state.rows.sessions)

    @property
    def why(self) -> Optional[str]:
        """None, or why steps of few tokens attend in the daemon instead of this process."""
        return self.state.rows.attach().why

    @_alone
    def crop(self, tokens: int) -> None:
        """Takes tokens away: -n the last n. As in transformers 4, n above 0 keeps the first n."""
        rows = self.state.rows
        if tokens > 0 or (tokens == 0 and _LENGTHS):
            tokens = min(tokens - rows.seen, 0)
        if -tokens > rows.seen:
            raise ValueError(f"crop({tokens}) of {rows.seen} tokens")
        if tokens and -tokens == rows.seen:
            if rows.options.get("name"):
                refuse("crop() of all tokens would destroy the session and its name; reset() does")
            self.reset()
        else:
            rows.crop(-tokens)

    @_alone
    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i a fork of row beam_idx[i]: an integer tensor [rows], from 0 on."""
        self.state.rows.select(beam_idx.tolist())

    @_alone
    def batch_repeat_interleave(self, repeats: int) -> None:
        """Makes each row `repeats` rows, at least 1, one behind the other."""
        rows = self.state.rows
        rows.select([i for i in range(len(rows.sessions)) for _ in range(repeats)])

    @_alone
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows of these indices, an integer tensor [rows kept], or of a mask [rows]."""
        chosen = torch.arange(len(self.state.rows.sessions))[indices]
        self.state.rows.select(chosen.tolist())

    @_alone
    def reset(self) -> None:
        """Empties the cache: its sessions end, also those with a name."""
        self.state.rows.drop()

    @_alone
    def close(self) -> None:
        """Gives sessions and buffers back. A cache that nothing refers to does so by itself."""
        self.state.rows.close()

    def abort(self) -> None:
        """Ends a forward of this thread's that was left by an interrupt, for which PyTorch calls no
        hooks: other threads may use the cache then. The forward's tokens are not in it, but where
        the interrupt came when all of them were stored; get_seq_length() says. Does nothing where
        no forward is open. RuntimeError if the forward is another thread's."""
        self.state.owner.take()
        self.state.over(failed=True)

    @_alone
    def save(self) -> None:
        """Saves a named session to the daemon's storage; returns when that is durable. ValueError
        where there is none: of a cache without a name, or one that was reset or closed."""
        self.state.rows.save()

    @_alone
    def __deepcopy__(self, _):
        made = KvqCache.__new__(KvqCache)
        made._set(State(self.state.table, self.state.rows.fork()))
        made.state.tells = self.state.tells
        return made

    def __enter__(self) -> KvqCache:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except kvq.Error as error:  # closed either way, as of a Session
            if error.code not in (kvq.Code.E_DISCONNECTED, kvq.Code.E_STALE):
                raise


def _one_row(ids):
    """Ids of a prompt as a list."""
    ids = torch.as_tensor(ids)
    if ids.numel() == 0 or ids.numel() != ids.shape[-1]:
        refuse(f"prefix has shape {tuple(ids.shape)}; the ids of one row are served")
    return ids.reshape(-1).tolist()


# ---- Forwards of the decoder: what they begin with, and how they end ----

_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def watch(decoder):
    """So that ids of tokens are known, and a forward that fails leaves no step open. Once for each
    decoder. A wrapper that calls the model's forward() itself, as PEFT does, calls no hooks of the
    model, but the model calls its decoder as a module."""
    if decoder not in _watched:
        _watched.add(decoder)
        decoder.register_forward_pre_hook(_begins, with_kwargs=True)
        decoder.register_forward_hook(_ended, with_kwargs=True, always_call=True)


def _named(decoder, args, options):
    """All arguments of a forward by their names."""
    if not args:
        return options
    return dict(zip(inspect.signature(decoder.forward).parameters, args)) | options


@functools.lru_cache(maxsize=None)
def _name_in(kind):
    names = inspect.signature(kind.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_name(model: torch.nn.Module) -> str:
    """The name by which generate() and forwards of a model, or of a wrapper of one, take the cache:
    "cache" from transformers 5.24 on, which warns of "past_key_values", the older name."""
    kinds: List[Any] = [type(module) for module in model.modules()]
    return next(filter(None, (_name_in(kind) for kind in kinds)), CACHE_NAMES[-1])


def cache_among(given):
    """The cache among a call's arguments."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def _begins(decoder, args, options):
    given = _named(decoder, args, options)
    cache = cache_among(given)
    if isinstance(cache, KvqCache):
        # Here, since transformers 4 puts what gathers weights in place of the layers' forward(),
        # and leaves it there if the decoder raises: a copy of the model would call this one's.
        check_weights(given.get("output_attentions"))
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        check_positions(positions, mask)
        rows = cache.state.rows
        if "model" in rows.options:
            ids = given.get("input_ids")
            cache.state.table.check_adapters(anew=ids is None or ids.shape[-1] > 1)
        name = rows.options.get("name")
        if rows.real is None and (name or "model" in rows.options and rows.seen):
            check_goes_on(name, rows.seen, positions, mask)
        check_places(given.get("cache_position"), rows.seen)
        cache.state.begins(given)


def _ended(decoder, args, options, output):
    cache = cache_among(_named(decoder, args, options))
    if isinstance(cache, KvqCache):
        cache.state.over(failed=output is None)
