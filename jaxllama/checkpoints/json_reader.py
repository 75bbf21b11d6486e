"""Typed look-ups in a parsed JSON object, for configs that other programs wrote.

null counts as absent. Bounds keep a damaged file from making the program build huge objects. Every
error is a JaxLlamaError of one line that names the key and its value.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.typing import JsonMapping

MAX_SIZE = 1 << 31
_MISSING: Any = object()
# Keys of a config.json that change no logit: records, options of training, and keys that belong
# into generation_config.json. Keys that begin with "_" are ignored too.
_INERT = frozenset(
    """
    attention_dropout attn_pdrop classifier_dropout embd_pdrop resid_pdrop residual_dropout
    hidden_dropout attn_implementation
    dtype finetuning_task id2label initializer_range is_decoder is_llama_config label2id
    name_or_path num_labels output_attentions
    output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id
    task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens target_lookbehind temperature top_k top_p typical_p
    """.split()
)


class JsonReader:
    """Reads the keys of an object. ``prefix`` precedes a key in messages, like "rope_scaling."."""

    def __init__(self, config: JsonMapping, prefix: str = ""):
        self.config, self.prefix = config, prefix

    def error(self, key: str, why: str) -> JaxLlamaError:
        try:
            value = repr(self.config.get(key))
        except ValueError:  # an integer of more digits than Python prints
            value = "(a huge number)"
        value = value if len(value) <= 80 else value[:77] + "..."
        return JaxLlamaError(f"{self.prefix}{key} = {value}: {why}")

    def check_keys(
        self,
        name: str,
        kind: str,
        known: Collection[str],
        fixed: Mapping[str, tuple[object, ...]],
        file: str = "config.json",
    ) -> None:
        """Check all keys, so that none is ignored silently.

        fixed: keys that change the computation, with the supported values; any other value is an
        error. known: the keys that are read. Other keys do not belong to a model of this kind: one
        WeightWarning names those that are not null, false, zero or empty.
        """
        for key, values in fixed.items():
            if key in self.config and not any(self.config[key] == value for value in values):
                raise self.error(key, f"only {values[0]!r} is supported")
        unknown = [
            key
            for key, value in self.config.items()
            if value and key not in (*known, *fixed) and key not in _INERT and key[:1] != "_"
        ]
        if unknown:
            shown = ", ".join(repr(key[:60]) for key in unknown[:12])
            more = f" and {len(unknown) - 12} more" if len(unknown) > 12 else ""
            warnings.warn(
                f"{name}: {file}: not part of a {kind} model and ignored, as by its own "
                f"library: {shown}{more}",
                WeightWarning,
                stacklevel=2,
            )

    def get(self, key: str, default: Any = _MISSING) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _MISSING:
            raise JaxLlamaError(f"missing key '{self.prefix}{key}'")
        return default

    def size(self, key: str, default: Any = _MISSING, limit: int = MAX_SIZE) -> int:
        value = self.natural(key, default)
        if not 0 < value <= limit:
            raise self.error(key, f"must be between 1 and {limit}")
        return value

    def natural(self, key: str, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise self.error(key, f"expected an integer between 0 and {MAX_SIZE}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> Any:
        value = self.get(key, default)
        if value is None:
            return None
        if type(value) not in (int, float) or abs(value) > 1e30 or not math.isfinite(value):
            raise self.error(key, "expected a finite number")
        return float(value)

    def positive(self, key: str, default: Any = _MISSING) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.error(key, "must be positive")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, "expected true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "expected a string")
        return value

    def token_ids(self, key: str, default: int | None) -> tuple[int, ...]:
        value = self.config.get(key, default)  # null means none here, not the default
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and 0 <= item < MAX_SIZE for item in ids):
            raise self.error(key, "expected a token id or a list of them")
        return tuple(ids)
