"""Fields of other servers' APIs that would change an answer and that this server lacks.

    refuse(endpoint, unknown, fields, hints)    ApiError 400 for the first field with an effect

A field of the table is refused, unless its value has no effect: null, false, 0, an empty value, or
one of the values beside its reason. Fields of this server's other endpoints are refused in the same
way. A field that is neither in the table nor of another endpoint is logged and ignored. README.md
has a table of the supported fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from jaxllama.serving.api.schemas import ApiError
from jaxllama.typing import JsonMapping

_SAMPLER = "this sampler is not here; temperature, top_k, top_p and min_p are"
_LIMIT = "send max_tokens"
# Name: (reason for the refusal, values without effect).
ELSEWHERE: dict[str, tuple[str, tuple[object, ...]]] = {
    # vLLM
    "chat_template": ("the checkpoint's is used; chat_template_kwargs are its variables", ()),
    "documents": ("send chat_template_kwargs.documents", ()),
    "logits_processors": ("a server runs no code of its clients", ()),
    "use_beam_search": ("answers are sampled; there is no beam search", ()),
    "length_penalty": ("it belongs to beam search, which is not here", (1,)),
    "early_stopping": ("it belongs to beam search, which is not here", ()),
    "guided_whitespace_pattern": ("JSON is written with at most one blank between tokens", ()),
    "return_tokens_as_token_ids": ("send return_token_ids", ()),
    "thinking_token_budget": ("reasoning has no limit of its own; send max_tokens", (-1,)),
    "structural_tag": ('send response_format with the type "structural_tag"', ()),
    # llama.cpp
    "json_schema": ("send response_format or guided_json", ()),
    "repeat_penalty": ("send repetition_penalty", (1,)),
    "typical_p": (_SAMPLER, (1,)),
    "top_n_sigma": (_SAMPLER, (-1,)),
    "tfs_z": (_SAMPLER, (1,)),
    "mirostat": (_SAMPLER, ()),
    "dynatemp_range": (_SAMPLER, ()),
    "xtc_probability": (_SAMPLER, ()),
    "dry_multiplier": (_SAMPLER, ()),
    "samplers": (_SAMPLER, ()),
    "reasoning_budget": ("reasoning has no limit of its own; send max_tokens", (-1,)),
    "n_keep": ("a prompt that is too long is refused; send truncate_prompt_tokens", (-1,)),
    # SGLang, TGI, transformers
    "regex": ("send guided_regex", ()),
    "ebnf": ("send guided_grammar", ()),
    "stop_regex": ("send stop, a text or a list of texts", ()),
    "no_stop_trim": ("send include_stop_str_in_output", ()),
    "min_new_tokens": ("send min_tokens", ()),
    "max_new_tokens": (_LIMIT, ()),
    "num_beams": ("answers are sampled; there is no beam search", (1,)),
    "do_sample": ("send temperature, 0 for the likeliest tokens", (True,)),
    "bad_words_ids": ("send bad_words or logit_bias", ()),
    # Ollama
    "num_predict": (_LIMIT, ()),
    "num_ctx": ("the context is the server's --max-len", ()),
    "options": ("send its fields beside model", ()),
    "format": ("send response_format", ()),
    "think": ("send enable_thinking", ()),
}


def refuse(
    endpoint: str, unknown: JsonMapping, fields: Collection[str], hints: Mapping[str, str]
) -> None:
    """Refuse the first unknown field that would change the answer.

    fields: names of other endpoints' fields. hints: the field to send instead, by name. Raises
    ApiError 400.
    """
    for name, value in unknown.items():
        if value in (None, False, "", [], {}):
            continue
        if name in hints or name in fields:
            reason = hints.get(name, f"{endpoint} does not have it")
        elif name in ELSEWHERE and value not in ELSEWHERE[name][1]:
            reason = ELSEWHERE[name][0]
        else:
            continue
        raise ApiError.unsupported(name, reason)
