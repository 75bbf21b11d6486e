"""/v1/messages, Anthropic's API: a message, whole or as a stream of events.

    message_start, then for each block content_block_start, content_block_delta, content_block_stop,
    then message_delta with the stop reason and the usage, and message_stop

A block is the reasoning, some text or a call of a tool, in the order in which the model writes
them. The context's end ends an answer (``model_context_window_exceeded``), so ``max_tokens`` may be
larger than the rest of the context. POST /v1/messages/count_tokens counts a prompt's tokens.
"""

from __future__ import annotations

import dataclasses
import json

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from jaxllama.serving.api import answers
from jaxllama.serving.api.bodies import Chat
from jaxllama.serving.api.calls import AcceptedCall, Prompts
from jaxllama.serving.api.message_bodies import CountTokens, Messages, to_chat
from jaxllama.serving.api.message_schemas import (
    ContentBlock,
    MessageObject,
    MessageUsage,
    StopReason,
    TextContent,
    ThinkingContent,
    TokenCount,
    ToolUseContent,
    message_error,
)
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.reading import parts_of
from jaxllama.serving.api.schemas import ApiError, Usage, to_json
from jaxllama.serving.api.tools import offered
from jaxllama.serving.http.body_threads import in_thread
from jaxllama.serving.http.context import Context
from jaxllama.serving.http.generation import answered
from jaxllama.serving.http.runs import CallRun, EventAnswer
from jaxllama.serving.tools.parts import AnswerPart
from jaxllama.typing import JsonObject


class MessageApi:
    prefix, kind = "msg_", None

    def read(self, prompts: Prompts, body: Messages, id: str, owner: str) -> AcceptedCall:
        call = prompts.chat(_chat(prompts, body), id, owner)
        requests = [
            dataclasses.replace(r, max_new_tokens=min(r.max_new_tokens, body.max_tokens))
            for r in call.requests
        ]
        return dataclasses.replace(call, requests=tuple(requests))

    def write(self, run: CallRun, body: Messages) -> EventAnswer:
        return MessageAnswer(run, body.max_tokens)


async def create(server: Context, http: HttpRequest, body: Messages) -> ASGIApp:
    return await answered(server, http, body, MessageApi())


async def count_tokens(server: Context, http: HttpRequest, body: CountTokens) -> TokenCount:
    return await in_thread(http, http.state.body_size, _counted, server.prompts, body)


def _counted(prompts: Prompts, body: CountTokens) -> TokenCount:
    chat = _chat(prompts, body)
    template = prompts.tokenizer().template_for(bool(chat.tools)) or ""
    tools = offered(chat, template)
    prompt = prompts.chat_prompt(chat, list(tools.shown) if tools else None)
    return TokenCount(len(prompts.encode_chat(prompt)))


def _chat(prompts: Prompts, body: CountTokens) -> Chat:
    prompts.adapter_of(body.model)
    template = prompts.tokenizer().template_for(bool(body.tools)) or ""
    return to_chat(body, template)


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens)


class MessageAnswer(EventAnswer):
    """A message: its blocks, and how it has ended."""

    def __init__(self, run: CallRun, max_tokens: int) -> None:
        super().__init__(run)
        self._call, self._max_tokens = run.call, max_tokens
        self._content: list[ContentBlock] = []
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None
        self._arguments = ""  # of the last call
        self._is_open = False

    def _read(self, piece: TextPiece) -> list[JsonObject]:
        parts = parts_of(self._reader, piece)
        events = [event for part in parts for event in self._take(part)]
        if piece.finish_reason is not None:
            events += self._end()
            self._stop_sequence = piece.stop_text
            self._stop_reason = self._reason(piece)
        return events

    def _reason(self, piece: TextPiece) -> StopReason:
        if piece.finish_reason == "stop":
            if piece.stop_text is not None:
                return "stop_sequence"
            return "tool_use" if self._reader.calls else "end_turn"
        is_full = piece.finish_reason == "length" and piece.completion_tokens < self._max_tokens
        has_room = piece.completion_tokens < self._call.requests[0].max_new_tokens  # a deadline
        return "model_context_window_exceeded" if is_full and not has_room else "max_tokens"

    def _take(self, part: AnswerPart) -> list[JsonObject]:
        events: list[JsonObject] = []
        kinds = {"reasoning": ThinkingContent, "content": TextContent, "arguments": ToolUseContent}
        last = self._content[-1] if self._is_open else None
        if part.kind == "call" or not isinstance(last, kinds[part.kind]):
            events += self._end()
            events.append(self._begin(part))
            last = self._content[-1]
        if isinstance(last, ToolUseContent):
            if part.kind == "call":
                return events
            self._arguments += part.text
            delta: JsonObject = {"type": "input_json_delta", "partial_json": part.text}
        elif isinstance(last, ThinkingContent):
            last.thinking += part.text
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            assert isinstance(last, TextContent)
            last.text += part.text
            delta = {"type": "text_delta", "text": part.text}
        index = len(self._content) - 1
        return [*events, {"type": "content_block_delta", "index": index, "delta": delta}]

    def _begin(self, part: AnswerPart) -> JsonObject:
        block: ContentBlock
        if part.kind == "call":
            id = answers.tool_call_id(self._call, 0, part)
            block = ToolUseContent("tool_use", id, part.text, {})
            self._arguments = ""
        elif part.kind == "reasoning":
            block = ThinkingContent("thinking", "", "")
        else:
            block = TextContent("text", "")
        self._is_open = True
        self._content.append(block)
        shown = dataclasses.asdict(block)
        return {
            "type": "content_block_start",
            "index": len(self._content) - 1,
            "content_block": shown,
        }

    def _end(self) -> list[JsonObject]:
        """Return the event that ends the current block."""
        if not self._is_open:
            return []
        self._is_open = False
        last = self._content[-1]
        if isinstance(last, ToolUseContent):
            last.input = _object(self._arguments)
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]

    async def _whole(self) -> MessageObject:
        return self._message()

    def _message(self) -> MessageObject:
        call = self._call
        return MessageObject(
            call.id,
            "message",
            "assistant",
            call.model,
            self._content,
            self._stop_reason,
            self._stop_sequence,
            _usage(self.run.usage()),
            list(call.notes) or None,
        )

    def _first(self) -> list[JsonObject]:
        start = self._message()
        start.usage.input_tokens = len(self._call.requests[0].prompt)
        return [{"type": "message_start", "message": start}, {"type": "ping"}]

    def _last(self, answer: MessageObject) -> list[JsonObject]:
        delta = {"stop_reason": answer.stop_reason, "stop_sequence": answer.stop_sequence}
        return [
            {"type": "message_delta", "delta": delta, "usage": answer.usage},
            {"type": "message_stop"},
        ]

    def _failure(self, error: ApiError) -> bytes:
        return self._written({"type": "error", "error": message_error(error).error})


def _object(text: str) -> JsonObject:
    """Return a call's arguments. Text that is no JSON object stands under ``INVALID_JSON``."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text, strict=False)
        to_json(found)  # refuses values that are nested too deep to be sent
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
