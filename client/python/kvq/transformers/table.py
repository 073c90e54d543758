# SPDX-License-Identifier: Apache-2.0
"""What a model's attention is like, layer by layer, and which models are refused."""
import hashlib
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

import kvq
from kvq.client import MAX_HEAD_DIM
from kvq.configuration import identity, rope_by_length
from kvq.digests import PIECE, digest

KINDS = {"full_attention", "sliding_attention"}
EARLY_EXIT = "_kvq_early_exit"  # a model's attribute: with how many layers it drafts now


def refuse(why):
    """Raises: the model, or what is asked of it, is not served."""
    raise NotImplementedError(f"kvq: {why}")


def text_config(model):
    config = getattr(model, "config", None)
    if config is None or not isinstance(model, torch.nn.Module):
        raise TypeError(f"KvqCache was given {type(model).__name__}; expected the model itself, "
                        "as KvqCache(model)")
    return config.get_text_config(decoder=True)


def check_implementation(config):
    """The cache holds nothing that another implementation could attend to."""
    if config._attn_implementation != "kvq":
        refuse(f"the model attends by {config._attn_implementation!r}, which finds nothing in a "
               "KvqCache; load the model with attn_implementation=\"kvq\", or call "
               "model.set_attn_implementation(\"kvq\")")


def check_weights(asked):
    """Refuses output_attentions=True."""
    if asked:
        refuse("output_attentions=True asks for the weights of attention, which kvqd does not give "
               "out; attn_implementation=\"eager\" does")


def shape(config):
    """Query heads, KV heads and dimensions of all layers. A configuration of transformers 5.24 may
    have some of these layer by layer, and raises an error of its own where it is asked for one."""
    found = set()
    for layer in getattr(config, "per_layer_config", None) or [config]:
        heads = layer.num_attention_heads
        found.add((heads, getattr(layer, "num_key_value_heads", None) or heads,
                   getattr(layer, "head_dim", None) or layer.hidden_size // heads))
    if len(found) > 1:
        refuse("layers with other numbers of heads or dimensions than others are not served: this "
               f"model's have (query heads, KV heads, dimensions) {sorted(found)}")
    return found.pop()


def attention_modules(model, layers):
    """The module of each layer's attention, by its number. The configuration may not have fewer:
    the model would compute these alone, and nobody would be told."""
    found = {}
    for module in model.modules():
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx") \
                and hasattr(module, "scaling"):
            found[module.layer_idx] = module
    missing = [i for i in range(layers) if i not in found]
    if missing:
        refuse(f"layers {missing[:8]} of this {type(model).__name__} have no attention that says "
               "its layer_idx and scaling; models whose layers all attend are served")
    kinds = {type(found[i]) for i in range(layers)}
    most = max(i + 1 for i, m in found.items() if isinstance(i, int) and type(m) in kinds)
    if most > layers and layers != getattr(model, EARLY_EXIT, None):
        refuse(f"this {type(model).__name__} has {most} layers, and its configuration says "
               f"num_hidden_layers={layers}: the others would be left out. generate() with "
               "assistant_early_exit leaves it so where it fails in between, and fails with a "
               "KvqCache for lack of another one (attach(model) serves it): set "
               f"num_hidden_layers back to {most} in the model's configuration "
               "(model.config.get_text_config())")
    return [found[i] for i in range(layers)]


@contextmanager
def early_exit(model, layers):
    """While generate() drafts with a model's first `layers` layers (None: with none such): by the
    configuration, which transformers does not set back where a draft fails."""
    if layers is None:
        yield
        return
    config = text_config(model)
    have = config.num_hidden_layers
    setattr(model, EARLY_EXIT, layers)
    try:
        yield
    finally:
        config.num_hidden_layers = have
        delattr(model, EARLY_EXIT)


BY_CALL = "adapter_names", "alora_offsets"  # PEFT's: what a call chooses adapters by


def adapted(model):
    """The modules that PEFT has put in, which compute with adapters."""
    return [module for module in model.modules() if hasattr(module, "_active_adapter")]


def chosen_by_call(modules):
    """By which keyword the call that is under way chooses adapters for its rows, past those that
    are active; None. PEFT hands that to its modules by hooks."""
    for module in modules:
        for hook in module._forward_pre_hooks.values() if module is not None else ():
            for name in BY_CALL:
                if name in (getattr(hook, "keywords", None) or ()):
                    return name
    return None


def learned_prompt(model):
    """PEFT's configuration of a prompt that was learned, which PEFT puts before each call's; None.
    PEFT's model is this one, or it calls this one's generate() and prepares the forwards of it."""
    prepares = vars(model).get("prepare_inputs_for_generation")
    for wrapper in (model, getattr(prepares, "__self__", None)):
        config = getattr(wrapper, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            return config
    return None


def check_learned(model):
    """Refuses a prompt that PEFT has learned as keys and values, which PEFT hands over in a cache
    of transformers': some versions take it instead of the one that is given, others drop it."""
    kind = getattr(learned_prompt(model), "peft_type", None)
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):
        refuse(f"keys and values that PEFT has learned ({kind.value}) are not served: they come in "
               "a cache of PEFT's own; attn_implementation=\"eager\" or \"sdpa\" runs this model "
               "without kvq")


def check_prefix(config, model=None):
    """Tokens have the same K in every prompt that begins with them."""
    if model is not None and learned_prompt(model):
        refuse("a prefix, of a model whose prompt PEFT has learned: tokens of its own stand before "
               "those of ids; make the cache without prefix")
    kind = rope_by_length(config)
    if kind:
        refuse(f"a prefix, of a model whose RoPE is {kind!r}: its frequencies depend on the length "
               "of what is computed, so that a token has another K in a longer prompt; make the "
               "cache without prefix (attach: reuse=False)")


def check_dropped(config, tokens):
    """generate() of a Phi-3 drops the cache that it was given where the tokens pass a number of the
    configuration's, computes all of them anew and goes on with a cache of its own."""
    most = getattr(config, "original_max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if most and rope and tokens > most and config.model_type.startswith("phi"):
        refuse(f"generate() of a {config.model_type} model drops its cache where the tokens pass "
               f"original_max_position_embeddings ({most}), to compute all of them anew: with a "
               f"KvqCache prompt and answer can have {most} tokens together, and these are "
               f"{tokens}; or no KvqCache was given")


class Table:
    """Heads, dimensions, scale, window and soft-cap of each layer."""

    def __init__(self, model):
        self.config = config = text_config(model)
        check_implementation(config)
        check_learned(model)
        if getattr(model.config, "is_encoder_decoder", False):
            refuse("encoder-decoder models are not served: their cross-attention has no cache here")
        if getattr(config, "kv_lora_rank", None):
            refuse("multi-head latent attention (MLA, kv_lora_rank in the configuration) is not "
                   "served: kvqd holds K and V of each head; attn_implementation=\"eager\" or "
                   "\"sdpa\" runs this model without kvq")
        kinds = set(getattr(config, "layer_types", None) or ()) - KINDS
        if kinds:
            refuse(f"layers of type {', '.join(sorted(kinds))} are not served; those of type "
                   "full_attention and sliding_attention are")
        if getattr(config, "num_kv_shared_layers", 0):
            refuse("models whose layers read other layers' K and V (num_kv_shared_layers) are not "
                   "served yet")
        self.layers = config.num_hidden_layers
        modules = attention_modules(model, self.layers)
        self.q_heads, self.kv_heads, self.head_dim = shape(config)
        if self.head_dim > MAX_HEAD_DIM:
            refuse(f"this model's heads have {self.head_dim} dimensions; up to {MAX_HEAD_DIM} are "
                   "served")
        self._modules = [weakref.ref(m) for m in modules]
        self._model = weakref.ref(model)
        self._adapted = [(weakref.ref(m), tuple(_switches(m))) for m in adapted(model)]
        self.scales = [float(m.scaling) for m in modules]
        self.windows = [self._window(m) for m in modules]
        self.softcaps = [self._softcap(m) for m in modules]
        self._asked = [None] * self.layers  # what each layer was last asked for, and may be

    def _window(self, module):
        window = getattr(module, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if kinds and kinds[module.layer_idx] == "full_attention":  # EXAONE 4 has the field anyway
            return 0
        if not hasattr(module, "sliding_window") and (
                not kinds or kinds[module.layer_idx] == "sliding_attention"):
            window = getattr(self.config, "sliding_window", None)
        return int(window or 0)

    def _softcap(self, module):
        cap = getattr(module, "attn_logit_softcapping", None)
        return float(cap or 0.0)

    def decoder(self, model):
        """The innermost model that has all layers."""
        found = model
        for module in model.modules():  # outer ones first
            if isinstance(module, PreTrainedModel):
                inside = set(module.modules())
                if all(layer() in inside for layer in self._modules):
                    found = module
        return found

    def check_adapters(self, anew):
        """Of a cache that others find, or that is there again: its K and V are those of the
        adapters that were active when it was made. `anew` looks for modules that were put in
        since, through the whole model: not for each single token."""
        model = self._model() if anew else None
        modules = adapted(model) if model is not None else [was() for was, _ in self._adapted]
        name = chosen_by_call(modules)
        if name:
            refuse(f"{name} chooses adapters for this call, but a cache with a name or a prefix is "
                   "for those that are active when it is made: call set_adapter() and make another "
                   "one, or make the cache without name and prefix")
        if len(modules) != len(self._adapted) or any(
                module is None or was() is not module or switched != tuple(_switches(module))
                for module, (was, switched) in zip(modules, self._adapted)):
            refuse("other adapters are active, merged or weighted than when this cache was made; "
                   "with a name or a prefix it is for those: make another cache")

    def check_module(self, layer, module):
        """The attention that asks is that of the model which the cache was made for."""
        if module is not self._modules[layer]():
            refuse(f"layer {layer} of another model was given this cache; a KvqCache is for the "
                   "model that it was made with")

    def check_mask(self, layer, window):
        """The mask that the model made for a layer, and would go by in eager attention, has the
        window that the layer's sessions have. None: it was not made by kvq_mask."""
        have = self.windows[layer]
        if window is not None and window != have:
            asked, have = (f"a window of {n} tokens" if n else "no window" for n in (window, have))
            refuse(f"the model's mask for layer {layer} has {asked}, but its attention and "
                   f"configuration say {have}; make both the same in the model's configuration")

    def rows(self):
        """The table that kvq.Client.session takes."""
        return [kvq.Layer(self.q_heads, self.kv_heads, self.head_dim, window=window, softcap=cap,
                          scale=scale)
                for window, cap, scale in zip(self.windows, self.softcaps, self.scales)]

    def check(self, layer, query, key, value, scaling, window, softcap):
        """What the model asks for in this call is what the sessions were opened with."""
        call = query.shape, key.shape, value.shape, scaling, window, softcap
        if call != self._asked[layer]:
            self._check(layer, *call)
            self._asked[layer] = call

    def _check(self, layer, query, key, value, scaling, window, softcap):
        """The same, of the shapes of Q, K and V."""
        heads, dims = (self.q_heads, self.kv_heads), (self.head_dim,) * 3
        given = (query[1], key[1]), (query[3], key[3], value[3])
        if given != (heads, dims):
            refuse(f"layer {layer} has {given[0][0]} query heads, {given[0][1]} KV heads and "
                   f"dimensions {given[1]} of Q, K and V; the model's configuration says "
                   f"{heads[0]}, {heads[1]} and {self.head_dim}")
        asked = (float(scaling) if scaling else self.head_dim ** -0.5, int(window or 0),
                 float(softcap or 0))
        have = self.scales[layer], self.windows[layer], self.softcaps[layer]
        if asked != have:
            refuse(f"layer {layer} attends with (scale, window, soft-cap) {asked}; the layers were "
                   f"understood as {have} when the cache was made")


def _pieces(tensor):
    """The bytes of a tensor's values, a piece at a time; of one on a GPU, where no model is served,
    a sample."""
    flat = tensor.detach().reshape(-1)
    if not flat.is_cpu:
        flat = flat[::max(flat.numel() // 4096, 1)][:4096].cpu()
    raw = flat.contiguous().view(torch.uint8).numpy()
    return [raw[at:at + PIECE] for at in range(0, raw.nbytes, PIECE)]


def _weights(model):
    """Parameters, and the buffers that are saved with them, as quantized weights are. Those that
    are not follow from the configuration, and may change with the length of what was computed."""
    yield from model.named_parameters()
    for name, module in model.named_modules():
        for buffer, tensor in module.named_buffers(name, recurse=False):
            if buffer.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield buffer, tensor


def _switches(module):
    """What PEFT's layers choose their weights by."""
    for name in ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling"):
        value = getattr(module, name, None)
        if isinstance(value, str):  # one of the list that set_adapter() makes
            value = [value]
        elif isinstance(value, dict):
            value = sorted(value.items())
        if isinstance(value, (bool, int, float, list, tuple)):
            yield f"{name}={value}"


def fingerprint(model):
    """Tells models apart whose keys and values differ: the configuration but for fields that change
    neither, of every parameter and saved buffer its name, shape and a digest of all of its bits,
    and which adapters are active. Weights are looked at anew each time: PyTorch does not count what
    is written to them through .data."""
    told = hashlib.sha256(identity(text_config(model)).encode())
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, tensor in _weights(model):
            told.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            pieces = _pieces(tensor)
            for found in (pool.map if len(pieces) > 1 else map)(digest, pieces):
                told.update(found)
    for name, module in model.named_modules():
        for switch in _switches(module):
            told.update(f"{name} {switch}".encode())
    return f"transformers {told.hexdigest()[:32]}"
