# SPDX-License-Identifier: Apache-2.0
"""generate() of a model with a KvqCache of its own for each call that is given none."""
from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any, Optional

import torch
import transformers

import kvq
from kvq.configuration import rope_by_length

from .cache import CACHE_NAMES, KvqCache, cache_among, cache_name
from .masks import tensors_besides
from .table import (
    BY_CALL, Table, adapted, check_prefix, chosen_by_call, early_exit, learned_prompt, refuse,
    text_config)


# What asks for assisted decoding, which hands over the whole prompt, whatever the cache has of it.
ASSISTED = "assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"

# Names of caches that a call may have without asking for one of transformers': "hybrid" stands in
# configurations of models with windows on the hub, and is what such models have anyway;
# "dynamic_full", which can be cropped, is what assisted decoding of transformers 4 asks assistants
# for.
OURS_AS_WELL = "hybrid", "dynamic_full"


def attach(model: transformers.PreTrainedModel, format: str = "oscar4", *,
           reuse: Optional[bool] = None, **options: Any) -> None:
    """Makes model.generate() put K and V into kvqd: each call that is given no cache has a
    KvqCache(model, format, **options) of its own, which is closed when the call ends, unless the
    output holds it.

    reuse   a call with one row begins with what kvqd has of its prompt, and computes the rest; what
            it computes is there, in whole pages of 128 tokens, for calls that begin a moment after
            its end. Formats that cannot share prefixes need False;
            None: True but for a model whose RoPE depends on the length of what is computed, which
            shares nothing, and a warning says so

    Programs that know nothing of kvq, as `transformers serve`, serve an attached model. A second
    attach() replaces the first; detach() ends it. Raises NotImplementedError for models that
    KvqCache refuses, TypeError for options that it does not know.
    """
    for word in ("name", "prefix"):
        if word in options:
            raise TypeError(f"attach() makes a cache for every call; {word!r} is one cache's own")
    table = Table(model)
    if reuse:
        check_prefix(table.config)
    inspect.signature(KvqCache).bind(model, format, **options)
    if reuse is None:
        kind = rope_by_length(table.config)
        reuse = kind is None
        if not reuse:
            warnings.warn(f"kvq: prompts that begin alike are not shared: this model's RoPE is "
                          f"{kind!r}, whose frequencies depend on the length of what is computed",
                          stacklevel=2)
    detach(model)
    plain = type(model)
    setattr(model, "_kvq_attached", _How(format, reuse, options))
    # Of the same name, which transformers writes into configurations that it saves.
    model.__class__ = type(plain.__name__, (_Attached, plain), {"__module__": plain.__module__})


def detach(model: transformers.PreTrainedModel) -> None:
    """Gives the model its own generate() back."""
    if isinstance(model, _Attached):
        model.__class__ = type(model).__bases__[1]
        delattr(model, "_kvq_attached")


def _quietly(end):
    """Behind an answer that is there, or an exception under way, which are the caller's: a daemon
    that is gone by now is only told of."""
    try:
        end()
    except kvq.Error as error:
        warnings.warn(f"kvq: the cache of this call could not be given back: {error}",
                      stacklevel=3)


class _How:
    """The arguments of attach(). A copy of the model has the same client."""

    def __init__(self, format, reuse, options):
        self.format, self.reuse, self.options = format, reuse, options

    def __deepcopy__(self, _):
        return self


class _Attached:
    """What attach() puts before a model's class. A copy of the model is attached as well."""

    def generate(self, inputs=None, generation_config=None, *rest, **given):
        plain, how = super(), self._kvq_attached
        asked = _Asked(self, inputs, generation_config, given)
        if asked.makes_its_own():
            try:
                with early_exit(self, asked.option("assistant_early_exit")):
                    return plain.generate(inputs, generation_config, *rest, **given)
            except BaseException:
                if isinstance(cache_among(given), KvqCache):  # Ctrl-C: PyTorch calls no hooks
                    _quietly(cache_among(given).abort)
                raise
        try:
            cache = KvqCache(self, how.format, prefix=asked.prompt() if how.reuse else None,
                             **how.options)
        except kvq.Error as error:
            if error.code == kvq.Code.E_UNSUPPORTED and hasattr(error, "add_note"):
                error.add_note("attach(reuse=False) shares no prefixes")
            raise
        for name in CACHE_NAMES:  # given as None
            given.pop(name, None)
        generation_config = asked.without_name()
        given[cache_name(self)] = cache
        done = None
        try:
            with early_exit(self, asked.option("assistant_early_exit")):
                done = plain.generate(inputs, generation_config, *rest, **given)
            return done
        except BaseException:
            _quietly(cache.abort)
            raise
        finally:
            if not any(getattr(done, name, None) is cache for name in CACHE_NAMES):
                _quietly(cache.close)


class _Asked:
    """What a call of generate() asks for."""

    def __init__(self, model, inputs, config, given):
        self.model, self.config, self.given = model, config, given
        self.ids = inputs if inputs is not None else given.get("input_ids")

    def option(self, name, otherwise=None):
        """As generate() finds it: of the call, its configuration, or the model's."""
        configured = {} if self.config is None else vars(self.config)
        for place in (self.given, configured, vars(self.model.generation_config)):
            if place.get(name) is not None:
                return place[name]
        return otherwise

    def makes_its_own(self):
        """A cache was given, and generate() or kvq's attention says what is wrong with it; or one
        by another name is asked for, and the model has another implementation of attention by now.
        What kvq cannot attend to is refused here: transformers 4 would keep a static cache that no
        forward came to use, and fail in every later call that asks for one."""
        if self.option("guidance_scale", 1) != 1 \
                and text_config(self.model)._attn_implementation == "kvq":
            refuse(f"guidance_scale={self.option('guidance_scale')}: classifier-free guidance runs "
                   "a second sequence beside the prompt's, with a cache of its own; leave it out, "
                   "or detach() the model")
        if cache_among(self.given) is not None:
            return True
        name = self.option("cache_implementation")
        if name in (None, *OURS_AS_WELL) and self.option("use_cache") is not False:
            return False
        if text_config(self.model)._attn_implementation == "kvq":
            wanted = "use_cache=False" if name in (None, *OURS_AS_WELL) else \
                f"cache_implementation={name!r}"
            refuse(f"{wanted}, of a model that attach() has changed: its calls have a KvqCache; "
                   "leave that out, or detach() the model")
        return True

    def without_name(self):
        """The call's configuration for a cache that is given, beside which transformers 4 takes no
        name of one. The call's own options lose the name as well."""
        self.given.pop("cache_implementation", None)
        if getattr(self.config, "cache_implementation", None) is None:
            return self.config
        config = copy.copy(self.config)
        config.cache_implementation = None
        return config

    def _has_more_than_ids(self):
        """Images, say, or positions: they change the K of tokens whose ids are the same."""
        return tensors_besides(self.given, {"input_ids", "attention_mask",
                                            *vars(self.model.generation_config)})

    def prompt(self):
        """The ids of the call's one row; None where it has more rows, pads, or more than ids, or
        adapters or a learned prompt of its own, or is assisted."""
        if any(self.given.get(name) is not None for name in BY_CALL) \
                or chosen_by_call(adapted(self.model)) or learned_prompt(self.model) \
                or self._has_more_than_ids():
            return None
        ids, mask = self.ids, self.given.get("attention_mask")
        if self.given.get("inputs_embeds") is not None or not isinstance(ids, torch.Tensor) \
                or ids.ndim != 2 or len(ids) != 1 or ids.shape[1] < 2:
            return None
        if self.option("num_beams", 1) > 1 or self.option("num_return_sequences", 1) > 1 \
                or any(self.option(name) for name in ASSISTED):
            return None
        return ids if mask is None or bool(mask.all()) else None
