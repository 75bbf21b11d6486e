"""inspect-ai's provider ``jaxllama``: ``inspect eval TASK --model jaxllama/MODEL``.

``-M name=value`` takes the options of ``LocalModel``: dtype, quantize, max_len, deterministic,
state and others. Conversations with tools, reasoning and ``response_schema`` go through the
server's own application in this process. Each answer's ``metadata`` has the digest. The fields
``REFUSED`` of ``GenerateConfig`` are refused by name; other fields beside ``FIELDS`` concern other
services.
"""

from __future__ import annotations

from typing import Any

from jaxllama import extras
from jaxllama.errors import JaxLlamaError
from jaxllama.harnesses.local_model import LocalModel
from jaxllama.typing import JsonObject

try:
    from anyio import to_thread
    from inspect_ai.model import (
        ChatMessage,
        GenerateConfig,
        ModelAPI,
        ModelOutput,
        messages_to_openai,
        model_output_from_openai,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolFunction, ToolInfo
except ImportError as error:
    if not extras.is_optional(error.name):
        raise
    raise extras.missing(str(error.name), "this provider of inspect-ai") from None

# Fields of GenerateConfig, and a body's fields of the same meaning.
FIELDS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop_seqs": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "num_choices": "n",
    "parallel_tool_calls": "parallel_tool_calls",
    "reasoning_effort": "reasoning_effort",
}
# Fields that would change an answer, which this provider does not have.
REFUSED = ("best_of", "logit_bias", "prompt_logprobs", "extra_body", "reasoning_tokens", "batch")


@modelapi(name="jaxllama")
class JaxLlamaAPI(ModelAPI):
    """The provider. model_name: as for ``jaxllama.load``."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config or GenerateConfig())
        if base_url is not None:
            raise JaxLlamaError(
                f"base_url = {base_url}: this provider runs the model itself; for a server use "
                "openai-api"
            )
        local = model_args.pop("local", None)
        self.local: LocalModel = local or LocalModel.load(model_name, **model_args)

    def close(self) -> None:
        self.local.close()

    async def aclose(self) -> None:
        await to_thread.run_sync(self.local.close)

    def connection_key(self) -> str:
        return f"jaxllama/{self.local.name}"

    def max_connections(self) -> int:
        return self.local.at_once

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        body = {**_fields(config), "messages": await messages_to_openai(input)}
        if tools:
            body["tools"] = [_tool(tool) for tool in tools]
            body["tool_choice"] = _choice(tool_choice)
        try:
            answer = await to_thread.run_sync(self.local.post, "/v1/chat/completions", body)
        except JaxLlamaError as error:
            if "context" in str(error) and "tokens" in str(error):
                return ModelOutput.from_content(
                    self.local.name, str(error), stop_reason="model_length"
                )
            raise
        output = await model_output_from_openai(answer)
        output.metadata = {"digest": self.local.digest, "id": answer["id"]}
        return output


def _fields(config: GenerateConfig) -> JsonObject:
    for name in REFUSED:
        if getattr(config, name, None) not in (None, False):
            raise JaxLlamaError(f"{name}: this provider does not have it")
    body = {
        theirs: value
        for name, theirs in FIELDS.items()
        if (value := getattr(config, name)) is not None
    }
    if config.response_schema is not None:
        wanted = config.response_schema
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {
                "name": wanted.name,
                "schema": wanted.json_schema.model_dump(exclude_none=True),
                "strict": bool(wanted.strict),
            },
        }
    return body


def _tool(tool: ToolInfo) -> JsonObject:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters.model_dump(exclude_none=True),
        },
    }


def _choice(choice: ToolChoice) -> str | JsonObject:
    if isinstance(choice, ToolFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice == "any" else choice
