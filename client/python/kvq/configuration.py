# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration, as transformers has it, says of its K and V."""
from __future__ import annotations

import json
from typing import Any, Dict, FrozenSet, Iterator, Optional

# Fields that K and V do not depend on: who wrote the configuration, what its outputs are called,
# and how generate() goes on with them. Of what precision weights are they say themselves.
INERT = frozenset((
    "transformers_version", "architectures", "auto_map", "_name_or_path", "_commit_hash", "dtype",
    "torch_dtype", "torchscript", "tokenizer_class", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "task_specific_params", "return_dict", "output_attentions",
    "output_hidden_states", "tie_word_embeddings", "initializer_range", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "top_p", "min_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"))


def _parts(told: object) -> Iterator[Any]:
    """A dictionary and all that lie in it."""
    if isinstance(told, dict):
        yield told
        for value in told.values():
            yield from _parts(value)


def _told(config: Dict[str, Any], inert: FrozenSet[str]) -> Dict[str, Any]:
    """What K and V may depend on: of a configuration and those within it, which name a model_type.
    A field that is None is as good as none."""
    return {name: _told(value, INERT if "model_type" in value else frozenset())
            if isinstance(value, dict) else value
            for name, value in config.items() if name not in inert and value is not None}


def identity(config: Any) -> str:
    """The configuration as a text that is the same where K and V are: also of another release of
    transformers, as long as that calls the fields alike."""
    return json.dumps(_told(json.loads(config.to_json_string()), INERT), sort_keys=True)


def rope_by_length(config: Any) -> Optional[str]:
    """The kind of RoPE, of any type of layer, whose frequencies depend on how long what is computed
    is: a token then has another K in a longer prompt. None where there is none."""
    told = [part.get(name) for part in _parts(json.loads(config.to_json_string()))
            for name in ("rope_parameters", "rope_scaling")]
    for part in (inner for rope in told for inner in _parts(rope)):
        kind = part.get("rope_type", part.get("type"))
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            return kind
    return None
