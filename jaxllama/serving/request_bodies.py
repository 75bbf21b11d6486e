"""What clients may ask: the bodies of OpenAI's API as pydantic models, and its errors.

    Completion, Chat, Embedding, Tokenize, Detokenize    the JSON bodies
    parse(model, data) -> body                           or an ApiError that names the field

Contract.  A body is checked strictly: no coercion between types, no NaN, no unknown keys, so that a
misspelt parameter is an error and not a silent default.  null is the default everywhere.  Beyond
OpenAI: ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``priority`` (larger goes
first), ``deadline`` (seconds; what is there by then is the answer, finish_reason "length"), prompts
as token ids, and ``response_format`` "regex".

Source: OpenAI's API reference; the extensions' names are vLLM's where it has them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jaxllama.serving.request import MAX_LOGPROBS


class ApiError(Exception):
    """An answer that is an error: HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Lenient(BaseModel):
    """Parts that clients send back as they got them, with keys that mean nothing here."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    # Usage in every chunk, for clients that count tokens.
    continuous_usage_stats: bool | None = None


class JsonSchema(_Strict):
    name: str = "answer"
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class Generation(_Strict):
    """What completions and chat share.  null is the default everywhere."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
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
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Extensions
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    deadline: float | None = Field(None, gt=0, le=86400)
    # Accepted without effect: they concern OpenAI's own service, not the text.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


Ids = Annotated[list[TokenId], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1, max_length=2048)]
IdRows = Annotated[list[Ids], Field(min_length=1, max_length=2048)]


class Completion(Generation):
    """Body of POST /v1/completions."""

    prompt: str | Texts | Ids | IdRows
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=128)
    suffix: str | None = None


class TextPart(_Lenient):
    type: Literal["text"]
    text: str


class FunctionCall(_Lenient):
    name: str
    arguments: str


class ToolCall(_Lenient):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Lenient):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class Chat(Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class Embedding(_Strict):
    """Body of POST /v1/embeddings."""

    model: str
    input: str | Texts | Ids | IdRows
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class Tokenize(_Strict):
    """Body of POST /tokenize: ``prompt``, or ``messages`` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None


class Detokenize(_Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000)]


Body = TypeVar("Body", bound=BaseModel)


def parse(model: type[Body], data: bytes | str) -> Body:
    """The body, or an ApiError 400 that names the first wrong field."""
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    first = found[0]
    if not first["loc"]:
        return ApiError(400, f"the body is not valid: {first['msg']}", code="invalid_json")
    param = str(first["loc"][0])
    # A value that fits no member of a union fails once per member: say all of it, once.
    reasons = [entry for entry in found if entry["loc"][0] == param]
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        message = f"{param}: there is no such parameter"
        return ApiError(400, message, param=param, code="unknown_parameter")
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return ApiError(400, f"{param}: is required", param=param, code="missing_parameter")
    words = dict.fromkeys(f"{_path(entry['loc'])}: {entry['msg']}" for entry in reasons)
    return ApiError(400, "; or ".join(list(words)[:4]), param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """messages[0].content: pydantic's names for the members of a union are left out."""
    text = str(loc[0])
    for part in loc[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            text += f".{part}"
    return text
