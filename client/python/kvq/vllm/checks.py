# SPDX-License-Identifier: Apache-2.0
"""What is asked of kvq in vLLM's configuration, and what is refused before an engine starts."""
import glob
import hashlib
import os
from dataclasses import dataclass
from typing import Literal, Optional, Union, get_args, get_origin

from ..client import MAX_HEAD_DIM
from ..configuration import identity, rope_by_length
from ..digests import PIECE, digest
from . import CONNECTOR

MOST_QUERIES = 32768  # tokens of one session in a request
MOST_SESSIONS = 1024  # of a request
_TORCH = Literal["torch"]
_KINDS = {str: "a text", int: "an integer", bool: "true or false", _TORCH: "\"torch\""}


def refuse(what, why, instead):
    """Raises: something that is asked for is not served."""
    raise NotImplementedError(f"kvq: {what}: {why}; {instead}")


@dataclass
class Options:
    """kv_connector_extra_config of vLLM's kv_transfer_config."""
    format: str = "oscar4"
    attention: str = "default"
    namespace: Optional[str] = None
    runtime_dir: Optional[str] = None
    threads: Union[int, _TORCH] = "torch"
    prefix: bool = True
    model: Optional[str] = None


def _is(value, kind):
    return value in get_args(kind) if get_origin(kind) is Literal else type(value) is kind


def options(config):
    """The Options of a VllmConfig."""
    given = dict(config.kv_transfer_config.kv_connector_extra_config or {})
    known = Options.__dataclass_fields__
    unknown = sorted(set(given) - set(known))
    if unknown:
        refuse(f"kv_connector_extra_config has {', '.join(unknown)}", "kvq knows no such option",
               f"it can have {', '.join(known)}")
    for name, value in given.items():
        kind = known[name].type
        kinds = get_args(kind) if get_origin(kind) is Union else (kind,)
        if not any(_is(value, one) for one in kinds):
            refuse(f"kv_connector_extra_config has {name}={value!r}",
                   f"kvq takes {' or '.join(_KINDS[k] for k in kinds if k in _KINDS)} there",
                   f"without it, {name} is {known[name].default!r}")
    return Options(**given)


def is_connected(config):
    """Whether the configuration names kvq's connector."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def check_connected(config):
    if not is_connected(config):
        refuse("KVQ_VLLM is set, but the engine has no kv_transfer_config with kv_connector="
               f"\"{CONNECTOR}\"", "without the connector nobody knows which tokens are whose",
               "give it one, or unset KVQ_VLLM")


def check_config(config):
    """Refuses what a VllmConfig asks for and kvq does not serve."""
    check_connected(config)
    model, cache = config.model_config, config.cache_config
    parallel, scheduler = config.parallel_config, config.scheduler_config
    if cache.enable_prefix_caching:
        refuse("enable_prefix_caching=True", "vLLM would take over pages of its own, in which "
               "nothing is", "start with enable_prefix_caching=False: kvqd finds common prefixes")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
                 "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            refuse(f"{name}={getattr(parallel, name)}", "one worker has all heads and layers of a "
                   "session", f"start with {name}=1")
    if config.speculative_config is not None:
        refuse("speculative decoding", "rejected drafts are not taken back from kvqd yet",
               "start without speculative_config")
    if config.lora_config is not None:
        refuse("LoRA", "kvq does not tell adapters apart yet, whose K and V differ",
               "start without enable_lora")
    if model.use_mla:
        refuse("multi-head latent attention (MLA)", "kvqd holds K and V of each head",
               "serve this model without KVQ_VLLM")
    if model.is_encoder_decoder:
        refuse("an encoder-decoder model", "cross-attention has no cache in kvqd",
               "serve this model without KVQ_VLLM")
    if model.is_multimodal_model or model.enable_prompt_embeds:
        refuse("a multimodal model, or enable_prompt_embeds", "what is no token has no id that "
               "prefixes could be compared by", "serve this model without KVQ_VLLM")
    if model.runner_type != "generate":
        refuse(f"a {model.runner_type} model", "only generation is served",
               "serve this model without KVQ_VLLM")
    if getattr(scheduler, "async_scheduling", False):
        refuse("async_scheduling", "a step's ids are not known when it is planned (vLLM turns "
               "async scheduling off on CPUs)", "start with async_scheduling=False")
    if scheduler.max_num_batched_tokens > MOST_QUERIES:
        refuse(f"max_num_batched_tokens={scheduler.max_num_batched_tokens}",
               f"a request to kvqd takes {MOST_QUERIES} tokens of a session",
               f"start with at most {MOST_QUERIES}; vLLM cuts longer prompts into pieces")
    if scheduler.max_num_seqs > MOST_SESSIONS:
        refuse(f"max_num_seqs={scheduler.max_num_seqs}",
               f"a step of kvqd takes {MOST_SESSIONS} sessions",
               f"start with at most {MOST_SESSIONS}")


def check_layer(layer):
    """Refuses what one attention layer asks for; takes vLLM's arguments by name."""
    if layer["attn_type"] != "decoder":
        refuse(f"attention of type {layer['attn_type']}", "kvqd's attention is causal",
               "serve this model without KVQ_VLLM")
    if layer["head_size"] > MAX_HEAD_DIM:
        refuse(f"heads of {layer['head_size']} dimensions", f"kvqd serves up to {MAX_HEAD_DIM}",
               "serve this model without KVQ_VLLM")
    # A dtype of 16 bits is let through: it says how vLLM's own pages would hold K and V, which are
    # in none here.
    if layer["kv_cache_dtype"] not in ("auto", "float16", "bfloat16"):
        refuse(f"kv_cache_dtype={layer['kv_cache_dtype']!r}", "kvqd's format says how K and V are "
               "stored", "start with kv_cache_dtype=\"bfloat16\" (or \"float16\"), also where "
               "nothing was given and the checkpoint asks for this one, and choose a format in "
               "kv_connector_extra_config")
    served = "serve this model without KVQ_VLLM"
    if layer["sliding_window"]:
        refuse(f"a sliding window of {layer['sliding_window']} tokens", "vLLM gives a request's "
               "first page away once it is out of the window, and kvq knows requests by it", served)
    if layer["alibi_slopes"] is not None:
        refuse("ALiBi", "kvqd adds no bias to logits", served)
    if layer["sinks"] is not None:
        refuse("attention sinks", "not done", served)
    if layer["kv_sharing_target_layer_name"] is not None:
        refuse("layers that read other layers' K and V", "not done", served)


def overcommitted(pages, block, rows, memory):
    """A warning, if so many pages of `block` tokens need more than a machine's memory even at one
    bit a value, the least that any format stores; else None. rows: a token's layers."""
    values = 2 * sum(row.kv_heads * row.head_dim for row in rows)
    least = pages * block * values // 8
    if least <= memory:
        return None
    fit = memory * 8 // values // block
    return (f"kvq: vLLM's pages have room for {pages * block} tokens, for which kvqd needs "
            f"{least >> 30} GiB at the least; this machine has {memory >> 30}. These pages are "
            "stubs of one value a token and layer: kv_cache_memory_bytes, VLLM_CPU_KVCACHE_SPACE "
            "and vLLM's default count those alone. Give num_gpu_blocks_override as many pages as "
            f"kvqd's pool has tokens for (kvqctl size), less than {fit}; else vLLM never preempts, "
            "and requests fail or begin anew (E_NO_MEMORY) when the pool is full")


# What vLLM loads weights from, by load_format: the first of these patterns that has files. Other
# formats, also "npcache" with its own copies, take them from elsewhere.
_LOADED = {
    "auto": ("consolidated*.safetensors", "*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",), "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",), "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
}


def _weights(folder, load_format):
    """The files of weights that vLLM takes from a folder; maybe more of their kind than it needs.
    """
    for pattern in _LOADED[load_format]:
        found = sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))
        if found:
            return found
    return []


def _folder(model, load):
    """Where the files are that vLLM loads a model from, or None if that cannot be known."""
    if load.load_format not in _LOADED:
        return None
    if os.path.isdir(model.model):
        return model.model
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("true", "1"):
        return None  # they are in a cache of ModelScope's
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir,
                                 local_files_only=True)
    except Exception:  # whatever the hub's client finds wrong: there are no files to look at
        return None


def _tell_weights(found, path):
    """All bytes, since K and V of a token may depend on any of them."""
    found.update(f"{os.path.basename(path)} {os.path.getsize(path)}\n".encode())
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(PIECE), b""):
            found.update(digest(piece))


def model_name(config, told):
    """What tells models apart whose K and V differ: the configuration, and all bytes of the files
    of weights. `told` is the user's own word for it. None: it cannot be known."""
    model = config.model_config
    found = hashlib.sha256()
    if told:
        found.update(told.encode())
    else:
        folder = _folder(model, config.load_config)
        files = _weights(folder, config.load_config.load_format) if folder else []
        if not files:
            return None
        for path in files:
            _tell_weights(found, path)
    found.update(identity(model.hf_config).encode())
    found.update(f"{model.dtype} {model.quantization}".encode())
    quantized = getattr(model, "quantization_config", None)  # arguments of the engine's own
    if quantized is not None:
        found.update(f" {quantized!r}".encode())
    if rope_by_length(model.hf_config):  # vLLM chooses LongRoPE's frequencies by it, for all tokens
        found.update(f" {model.max_model_len}".encode())
    return f"vllm {found.hexdigest()[:32]}"
