"""The requests of clients: the bodies of OpenAI's API as pydantic models.

    Completion, Chat, Embedding, Tokenize, Detokenize    the JSON bodies
    parse(model, data, ids, longest) -> body             or an ApiError that names the field

Contract. A body is checked strictly: no coercion between types, no NaN. null is the default
everywhere. Fields of OpenAI's own service are accepted without effect. Unknown fields are ignored
too, and each name is logged once. Fields of other servers that would change the answer are refused
(``other_fields``). A body's values are counted before they are parsed, and lists end at their first
invalid entry, so a refusal costs less than a request.

Extensions of OpenAI's API: ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``,
``stop_token_ids``, ``min_tokens``, ``skip_special_tokens``, ``priority`` (larger goes first),
prompts as token ids, ``prompt_logprobs``, ``return_token_ids``. Further ones are
``response_format`` "regex" and "structural_tag", ``structured_outputs`` and ``guided_*``,
``chat_template_kwargs``, ``add_generation_prompt``, ``continue_final_message``. ``deadline`` is in
seconds: the answer is the text so far, with finish_reason "length". ``cache_salt`` shares cached
prompts under one salt only.

Source: OpenAI's API reference. Extensions have vLLM's names where vLLM has them.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from jaxllama.engine.request import MAX_LOGPROBS
from jaxllama.serving.api import other_fields
from jaxllama.serving.api.schemas import ApiError
from jaxllama.typing import JsonObject

MAX_VALUES = 2**16  # texts, objects and numbers of a body; token ids are counted separately
MAX_ROWS = 2048  # prompts of a body
MAX_IDS = 1_000_000  # token ids of a detokenize body
LOGGED_NAMES = 100  # logged names of unknown fields, which clients choose
_log = logging.getLogger("jaxllama.serving")


class Strict(BaseModel):
    """A body, or a part of one, that is checked strictly.

    endpoint: path of a whole body, which refuses some unknown fields (``other_fields``). hints: the
    field to send instead of another endpoint's field, by name. notes: what of a whole body was
    dropped; ``warnings`` of its answer.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    endpoint: ClassVar[str | None] = None
    hints: ClassVar[dict[str, str]] = {}
    shows_unknown: ClassVar[bool] = False  # whether unknown fields are kept, for the template
    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes

    def with_notes(self, notes: tuple[str, ...]) -> Self:
        self._notes = notes
        return self

    @model_validator(mode="after")
    def _drop_unknown(self) -> Self:
        unknown = self.model_extra or {}
        if unknown and self.endpoint is not None:
            other_fields.refuse(self.endpoint, unknown, _of_others(), self.hints)
        if not self.shows_unknown:
            for name in unknown:
                _log_unknown(name[:64])
            unknown.clear()
        return self


_unknown: dict[str, object] = {}


def _log_unknown(name: str) -> None:
    """Log a name once in this process; bodies are parsed in several threads."""
    mark = object()
    if len(_unknown) < LOGGED_NAMES and _unknown.setdefault(name, mark) is mark:
        _log.warning("unknown field ignored", extra={"fields": {"field": name}})
        if len(_unknown) == LOGGED_NAMES:
            _log.warning("further unknown fields are ignored without a word")


class Lenient(BaseModel):
    """A part that clients send back as they received it; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    # Usage in every chunk, for clients that count tokens.
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # without effect


class JsonSchema(Strict):
    name: str = "answer"
    description: str | None = None
    strict: bool | None = None
    schema_: JsonObject = Field(alias="schema")


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
# -1 sets no limit, as in llama.cpp and other servers.
Limit = Annotated[int, Field(ge=1)] | Literal[-1]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]
# For every list; without it each entry of a long list would be an error of its own.
FIRST_ERROR = Field(fail_fast=True)


class Structure(Strict):
    """A structure: ``begin``, which starts with a trigger, JSON of the schema, ``end``."""

    begin: str
    schema_: JsonObject = Field(alias="schema")
    end: str


Structures = Annotated[list[Structure], Field(min_length=1, max_length=128), FIRST_ERROR]
Triggers = Annotated[list[Stop], Field(min_length=1, max_length=128), FIRST_ERROR]
Choices = Annotated[list[Stop], Field(min_length=1, max_length=4096), FIRST_ERROR]


class StructuralTag(Strict):
    structures: Structures
    triggers: Triggers


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema", "regex", "structural_tag"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    structures: Structures | None = None
    triggers: Triggers | None = None


class StructuredOutputs(Strict):
    """Exactly one form of output.

    json: a schema or its JSON text. structural_tag may be JSON text too.
    """

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | str | None = None


Words = Annotated[list[Stop], Field(max_length=128), FIRST_ERROR]
AllowedIds = Annotated[list[TokenId], Field(min_length=1), FIRST_ERROR]
# Number of a prompt's last tokens to keep; -1: as many as fit beside the answer.
Truncation = Annotated[int, Field(ge=1)] | Literal[-1]


class SamplingFields(Strict):
    """The fields that all bodies of an answer share. null is the default everywhere."""

    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    # Extensions
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    deadline: float | None = Field(None, gt=0, le=86400)
    cache_salt: CacheSalt | None = None


class OpenAIFields(SamplingFields):
    """The fields that completions, chats and responses share."""

    stream_options: StreamOptions | None = None
    # Extensions
    bad_words: Words | None = None
    allowed_token_ids: AllowedIds | None = None
    truncate_prompt_tokens: Truncation | None = None
    include_stop_str_in_output: bool | None = None
    grammar: str | None = None  # llama.cpp's name of guided_grammar
    # Without effect: these fields concern OpenAI's own service, or are hints.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class GenerationBody(OpenAIFields):
    """The fields that completions and chat share. null is the default everywhere."""

    model: str
    n: int | None = Field(None, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16), FIRST_ERROR] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=300),
        ]
        | None
    ) = None
    max_tokens: Limit | None = None
    response_format: ResponseFormat | None = None
    # Extensions
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128), FIRST_ERROR] | None = None
    min_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    store: bool | None = None  # without effect


Ids = Annotated[list[TokenId], Field(min_length=1), FIRST_ERROR]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS), FIRST_ERROR]
IdRows = Annotated[list[Ids], Field(min_length=1, max_length=MAX_ROWS), FIRST_ERROR]


class Completion(GenerationBody):
    """Body of POST /v1/completions."""

    endpoint = "/v1/completions"
    hints = {
        "messages": "send them to /v1/chat/completions",
        "max_completion_tokens": "send max_tokens",
    }
    prompt: str | Texts | Ids | IdRows
    # 0 scores the prompt without generating.
    max_tokens: Annotated[int, Field(ge=-1)] | None = None
    n_predict: Annotated[int, Field(ge=-1)] | None = None  # llama.cpp's name of max_tokens
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=128)
    suffix: str | None = None


class TextPart(Lenient):
    type: Literal["text"]
    text: str


class FunctionCall(Lenient):
    name: str
    arguments: str | JsonObject | None = None


class ToolCall(Lenient):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FIRST_ERROR] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another server's name of it


# OpenAI's pattern and a dot, as long as Anthropic's: templates write names unquoted into prompts.
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# Kinds of tools that a service runs itself, or whose calls are not JSON; some have a date behind.
_FOREIGN = re.compile(
    r"(custom|local_shell|shell|apply_patch|web_search|web_fetch|file_search|code_interpreter"
    r"|code_execution|computer|computer_use|browser|browser_toolset|bash|text_editor|memory"
    r"|image_generation|mcp|mcp_toolset|namespace|tool_search|tool_search_tool_(regex|bm25)"
    r"|advisor)(_preview)?(_\d{4}_\d\d_\d\d|_\d{8})?"
)


def _drop_foreign(tools: Any, info: ValidationInfo) -> Any:
    """Drop the tools that are not functions.

    Agents send them to every server. The log and the answer's ``warnings`` list the kinds that the
    model is not shown.
    """
    if not isinstance(tools, list):
        return tools
    kinds = [_kind(tool) for tool in tools]
    dropped = {kind for kind in kinds if isinstance(kind, str) and _FOREIGN.fullmatch(kind)}
    if dropped:
        _log.warning("tools ignored", extra={"fields": {"types": sorted(dropped)}})
        if info.context is not None:
            info.context["notes"].append(f"tools left out: {', '.join(sorted(dropped))}")
    return [
        tool
        for tool, kind in zip(tools, kinds, strict=True)
        if not (isinstance(kind, str) and kind in dropped)
    ]


def _kind(tool: Any) -> Any:
    """Return a tool's type; None for one of Anthropic's that the client runs ("custom" there)."""
    if not isinstance(tool, dict) or "input_schema" in tool:
        return None
    return tool.get("type")


OnlyFunctions = BeforeValidator(_drop_foreign)


class Function(Strict):
    shows_unknown = True
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096), FIRST_ERROR]


class Chat(GenerationBody):
    """Body of POST /v1/chat/completions."""

    endpoint = "/v1/chat/completions"
    hints = {"prompt": "send messages, or the prompt to /v1/completions"}
    messages: Messages
    max_completion_tokens: Limit | None = None
    n_predict: Limit | None = None
    enable_thinking: bool | None = None  # sets chat_template_kwargs.enable_thinking
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=128), FIRST_ERROR, OnlyFunctions] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: Annotated[list[Literal["text", "audio"]], FIRST_ERROR] | None = None
    # Refused by ``calls``, unless the value has no effect.
    audio: JsonObject | None = None
    functions: Annotated[list[JsonObject], FIRST_ERROR] | None = None
    function_call: str | JsonObject | None = None
    moderation: JsonObject | None = None
    web_search_options: JsonObject | None = None
    # Without effect, as above.
    prediction: JsonObject | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None  # for a template that knows it
    verbosity: str | None = None


class Embedding(Strict):
    """Body of POST /v1/embeddings."""

    model: str
    input: str | Texts | Ids | IdRows
    truncate_prompt_tokens: Truncation | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class Tokenize(Strict):
    """Body of POST /tokenize: ``prompt``, or ``messages`` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=128), FIRST_ERROR] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class Detokenize(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_IDS), FIRST_ERROR]


AdapterName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]


class LoadAdapter(Strict):
    """Body of POST /v1/load_lora_adapter."""

    endpoint = "/v1/load_lora_adapter"
    lora_name: AdapterName
    lora_path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")
    load_inplace: bool | None = None
    is_3d_lora_weight: Literal[False] | None = None  # of experts, which take no adapters


class UnloadAdapter(Strict):
    """Body of POST /v1/unload_lora_adapter."""

    endpoint = "/v1/unload_lora_adapter"
    lora_name: AdapterName
    lora_int_id: int | None = None  # without effect, as in vLLM


# Fields that every endpoint accepts: they concern OpenAI's own service, or are hints.
_HARMLESS = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prediction "
    "prompt_cache_options prompt_cache_retention reasoning_effort verbosity modalities "
    "parallel_tool_calls priority cache_salt".split()
)


@functools.cache
def _of_others() -> frozenset[str]:
    """Return the fields of completions and chats that have an effect."""
    return frozenset({*Completion.model_fields, *Chat.model_fields}) - _HARMLESS


Body = TypeVar("Body", bound=BaseModel)


def parse(model: type[Body], data: bytes | bytearray, ids: int, longest: int) -> Body:
    """Return the body, or raise an ApiError 400 that names the first invalid field.

    ids, longest: largest number of token ids in the body, and in one of its lists.
    """
    _check_size(data, ids, longest)
    notes: list[str] = []
    try:
        body = model.model_validate_json(data, context={"notes": notes})
    except ValidationError as error:
        raise explain(error) from None
    return body.with_notes(tuple(notes)) if notes and isinstance(body, Strict) else body


# The parts of a body that the count needs: strings (keys if a colon follows), lists that begin with
# numbers that may be token ids, other openings of lists and objects, and the text between them.
_PARTS = re.compile(
    rb'"(?P<text>[^"\\]*+(?:\\.[^"\\]*+)*+)"(?:\s*+(?P<key>:))?'
    rb'|\[\s*+(?P<ids>\d[\d,\s\]]*+)(?=["\[{}]|\Z)|[\[{]|(?P<others>[^"\[{]++)',
    re.DOTALL,
)


def _check_size(data: bytes | bytearray, ids: int, longest: int) -> None:
    """Raise ApiError 400 for more values than a request has, before they are parsed.

    Parsing takes some 50 bytes a value, and an error takes them again for every type that was
    tried.
    """
    if sum(data.count(mark) for mark in b",[{") <= min(ids, longest, MAX_ROWS):
        return  # too few marks, even if none of them is inside a string
    key, values, rows, total = "body", 0, 0, 0
    for part in _PARTS.finditer(data):
        kind = part.lastgroup
        if kind == "key":
            begin, end = part.span("text")
            key = data[begin : min(end, begin + 64)].decode(errors="replace")
        commas = data.count(b",", *part.span()) if kind in ("ids", "others") else 0
        if kind == "ids":
            rows, total = rows + 1, total + commas
            if commas > longest or total > ids or rows > MAX_ROWS:
                message = f"{key}: at most {longest} token ids in a list, {ids} in {MAX_ROWS} lists"
                raise ApiError(400, message, param=key, code="context_length_exceeded")
        else:
            values += 1 + commas
            if values > MAX_VALUES:
                message = f"{key}: more than {MAX_VALUES} values in one body"
                raise ApiError(400, message, param=key, code="too_many_values")


def explain(error: ValidationError) -> ApiError:
    """Return an ApiError for the first invalid field."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = found[0]
    if not first["loc"]:
        return ApiError(400, f"the body is not valid: {first['msg']}", code="invalid_json")
    param = str(first["loc"][0])
    # A value that fits no member of a union fails once for each member: report all, once.
    reasons = [entry for entry in found if entry["loc"][0] == param]
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return ApiError(400, f"{param}: is required", param=param, code="missing_parameter")
    for entry in reasons:
        if entry["loc"][-1] == "type" and entry["msg"] == "Input should be 'text'":
            message = f"{_path(entry['loc'])}: must be 'text'; no model here reads images or audio"
            return ApiError(400, message, param=param, code="invalid_value")
    texts = dict.fromkeys(f"{_path(entry['loc'])}: {entry['msg']}" for entry in reasons)
    return ApiError(400, "; or ".join(list(texts)[:4]), param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """Return a path like messages[0].content, without pydantic's names for members of a union."""
    text = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            text += f".{part}"
    return text
