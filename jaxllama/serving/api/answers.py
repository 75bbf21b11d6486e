"""Answers of OpenAI's API (``schemas``), made from the engine's output.

    PartialAnswer                   collects the pieces of one call's choices
    completion(call, answer)        a whole text_completion; chat(call, answer) a chat.completion
    completion_chunk, chat_chunk    the pieces of a stream

A chat's text is split into reasoning, content and calls of tools, as its call says (``reading``).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxllama import __version__
from jaxllama.serving.api.calls import AcceptedCall
from jaxllama.serving.api.logprobs import (
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.reading import answer_reader, parts_of
from jaxllama.serving.api.schemas import (
    Arguments,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessage,
    ChatObject,
    CompletionChoice,
    CompletionLogprobs,
    CompletionObject,
    Delta,
    DetailedChatChoice,
    DetailedChoice,
    DetailedChunkChoice,
    EmbeddingItem,
    EmbeddingList,
    EmbeddingUsage,
    FinishReason,
    FunctionCalled,
    NotedChatChunk,
    Opening,
    PromptDetails,
    ReasoningDelta,
    ToolCallDelta,
    ToolCalled,
    ToolCallGoesOn,
    ToolCallStart,
    Usage,
)
from jaxllama.serving.tools.parts import AnswerPart

_FINGERPRINT = f"jaxllama-{__version__}"


class PartialAnswer:
    """The pieces of one call so far, by choice; only the newest ones without ``kept``."""

    def __init__(self, call: AcceptedCall, kept: bool) -> None:
        self._kept = kept
        self.events: list[list[TextPiece]] = [[] for _ in call.requests]
        self.last = [TextPiece(0, [], index=index) for index in range(len(call.requests))]

    def add(self, event: TextPiece) -> None:
        self.last[event.index] = event
        if self._kept:
            self.events[event.index].append(event)

    def text(self, index: int) -> str:
        return "".join(event.text for event in self.events[index])

    def finish(self, index: int) -> FinishReason:
        return finish_reason(self.last[index]) or "length"


def finish_reason(event: TextPiece) -> FinishReason | None:
    """Return OpenAI's finish reason, or None before the end.

    A deadline counts as "length". Failures are sent as errors and not as choices.
    """
    if event.finish_reason is None:
        return None
    return "stop" if event.finish_reason == "stop" else "length"


def usage(call: AcceptedCall, last: Sequence[TextPiece]) -> Usage:
    """Return the usage of a call. The choices of one prompt count it once.

    last: each choice's newest piece.
    """
    prompts = last[:: call.choices]
    prompt = sum(event.prompt_tokens for event in prompts)
    new = sum(event.completion_tokens for event in last)
    cached = sum(event.cached_tokens for event in prompts)
    return Usage(prompt, new, prompt + new, PromptDetails(cached))


def completion(call: AcceptedCall, answer: PartialAnswer) -> CompletionObject:
    choices = []
    for index, events in enumerate(answer.events):
        echo = call.echoes[index] if call.echoes else ""
        offsets = TextOffsets(call)
        logprobs = joined(
            echoed_logprobs(call, index, offsets),
            completion_logprobs(call, index, events, offsets),
        )
        text, finish = echo + answer.text(index), answer.finish(index)
        choices.append(_choice(call, index, text, logprobs, finish, events, is_first=True))
    return _completion(call, choices, usage(call, answer.last))


def completion_chunk(
    call: AcceptedCall, index: int, event: TextPiece, offsets: TextOffsets, total: Usage | None
) -> CompletionObject:
    """Return a chunk of a completion's stream. offsets: those after the choice's last event."""
    logprobs = completion_logprobs(call, index, [event], offsets)
    choice = _choice(call, index, event.text, logprobs, finish_reason(event), [event])
    return _completion(call, [choice], total)


def completion_echo(call: AcceptedCall, index: int, offsets: TextOffsets) -> CompletionObject:
    """Return the chunk with the prompt, which ``echo`` puts before a choice's stream."""
    logprobs = echoed_logprobs(call, index, offsets)
    choice = _choice(call, index, call.echoes[index], logprobs, None, [], is_first=True)
    return _completion(call, [choice], None)


def _choice(
    call: AcceptedCall,
    index: int,
    text: str,
    logprobs: CompletionLogprobs | None,
    finish: FinishReason | None,
    events: Sequence[TextPiece],
    is_first: bool = False,
) -> CompletionChoice:
    """Return a choice. is_first: whether it is whole or the first of its chunks."""
    if not (call.shows_ids or call.lists_scores):
        return CompletionChoice(index, text, logprobs, finish)
    choice = DetailedChoice(index, text, logprobs, finish)
    if call.lists_scores:
        choice.prompt_logprobs = prompt_logprobs(call, index)
    if call.shows_ids:
        choice.token_ids = [token for event in events for token in event.tokens]
        if is_first:
            choice.prompt_token_ids = list(call.requests[index].prompt)
    return choice


def _completion(
    call: AcceptedCall, choices: list[CompletionChoice], total: Usage | None
) -> CompletionObject:
    return CompletionObject(
        call.id,
        "text_completion",
        call.created,
        call.model,
        _FINGERPRINT,
        choices,
        total,
        list(call.notes) or None,
    )


def chat(call: AcceptedCall, answer: PartialAnswer) -> ChatObject:
    choices = []
    for index, events in enumerate(answer.events):
        message, finish = ChatMessage("assistant", answer.text(index)), answer.finish(index)
        if call.reading is not None:
            message, calls = chat_message(call, index, message.content or "")
            finish = "tool_calls" if calls and finish == "stop" else finish
        choice = ChatChoice(index, message, chat_logprobs(call, index, events), finish)
        if call.shows_ids:
            ids = [token for event in events for token in event.tokens]
            choice = DetailedChatChoice(index, message, choice.logprobs, finish, ids)
        choices.append(choice)
    total = usage(call, answer.last)
    listed = prompt_logprobs(call, 0) if call.lists_scores else None
    ids = list(call.requests[0].prompt) if call.shows_ids else None
    return ChatObject(
        call.id,
        "chat.completion",
        call.created,
        call.model,
        _FINGERPRINT,
        choices,
        total,
        listed,
        ids,
        list(call.notes) or None,
    )


def chat_message(call: AcceptedCall, index: int, text: str) -> tuple[ChatMessage, int]:
    """Return the message of a choice's whole text, and the number of its calls of tools."""
    assert call.reading is not None
    reader = answer_reader(call.reading)
    said = {"reasoning": "", "content": ""}
    calls: list[ToolCalled] = []
    for part in (*reader.feed(text), *reader.close()):
        if part.kind == "call":
            id = tool_call_id(call, index, part)
            calls.append(ToolCalled(id, "function", FunctionCalled(part.text, "")))
        elif part.kind == "arguments":
            calls[part.number].function.arguments += part.text
        else:
            said[part.kind] += part.text
    content = said["content"] or ("" if not calls else None)
    message = ChatMessage("assistant", content, None, said["reasoning"] or None, calls or None)
    return message, len(calls)


def tool_call_id(call: AcceptedCall, index: int, part: AnswerPart) -> str:
    """Return the id of a call of a tool, in the form that the model's template takes.

    part: the beginning of the call. The id follows from the call, so that it is the same each time.
    """
    assert call.reading is not None and call.reading.tools is not None
    tools, number = call.reading.tools, part.number
    digest = hashlib.sha256(f"{call.id}/{index}/{number}".encode()).hexdigest()
    return tools.format.call_id(digest, part.text, tools.earlier + number)


def chat_role(call: AcceptedCall, index: int) -> ChatChunk:
    """Return the first chunk of a choice."""
    choice = ChatChunkChoice(index, Opening("assistant", ""))
    if call.shows_ids:
        choice = _detailed(choice, prompt_token_ids=list(call.requests[index].prompt))
    chunk = _chat_chunk(call, [choice], None)
    if not call.notes:
        return chunk
    return NotedChatChunk(
        chunk.id,
        chunk.object,
        chunk.created,
        chunk.model,
        chunk.system_fingerprint,
        chunk.choices,
        chunk.usage,
        list(call.notes),
    )


def _detailed(choice: ChatChunkChoice, **details: list[int]) -> DetailedChunkChoice:
    return DetailedChunkChoice(
        choice.index, choice.delta, choice.logprobs, choice.finish_reason, **details
    )


def chat_chunk(call: AcceptedCall, index: int, event: TextPiece, total: Usage | None) -> ChatChunk:
    logprobs = chat_logprobs(call, index, [event])
    choice = ChatChunkChoice(index, Delta(event.text), logprobs, finish_reason(event))
    if call.shows_ids:
        choice = _detailed(choice, token_ids=event.tokens)
    return _chat_chunk(call, [choice], total)


class ChatChunks:
    """Makes the chunks of a choice whose text is read.

    ``parts`` and ``of`` are the two halves of ``__call__``, for chunks that carry only a part.
    """

    def __init__(self, call: AcceptedCall, index: int) -> None:
        assert call.reading is not None
        self._call, self._index = call, index
        self._reader = answer_reader(call.reading)

    def parts(self, event: TextPiece) -> list[AnswerPart]:
        return parts_of(self._reader, event)

    def of(self, part: AnswerPart) -> ChatChunk:
        return _chat_chunk(self._call, [ChatChunkChoice(self._index, self._delta(part))], None)

    def __call__(self, event: TextPiece, total: Usage | None) -> list[ChatChunk]:
        call, index, finish = self._call, self._index, finish_reason(event)
        deltas = [self._delta(part) for part in self.parts(event)]
        logprobs = chat_logprobs(call, index, [event])
        has_details = call.shows_ids or (logprobs is not None and logprobs.content)
        if finish is not None or (has_details and not deltas):
            deltas.append(Delta(""))
        choices = [ChatChunkChoice(index, delta) for delta in deltas]
        if choices:
            choices[0].logprobs = logprobs
        if finish is not None:
            is_call = self._reader.calls and finish == "stop"
            choices[-1].finish_reason = "tool_calls" if is_call else finish
        if call.shows_ids:
            choices[0] = _detailed(choices[0], token_ids=event.tokens)
        return [_chat_chunk(call, [choice], total) for choice in choices]

    def _delta(self, part: AnswerPart) -> Delta | ReasoningDelta | ToolCallDelta:
        if part.kind == "content":
            return Delta(part.text)
        if part.kind == "reasoning":
            return ReasoningDelta(part.text)
        if part.kind == "arguments":
            return ToolCallDelta([ToolCallGoesOn(part.number, Arguments(part.text))])
        id = tool_call_id(self._call, self._index, part)
        begun = ToolCallStart(part.number, id, "function", FunctionCalled(part.text, ""))
        return ToolCallDelta([begun])


def usage_chunk(call: AcceptedCall, is_chat: bool, total: Usage) -> ChatChunk | CompletionObject:
    return _chat_chunk(call, [], total) if is_chat else _completion(call, [], total)


def _chat_chunk(
    call: AcceptedCall, choices: list[ChatChunkChoice], total: Usage | None
) -> ChatChunk:
    return ChatChunk(
        call.id, "chat.completion.chunk", call.created, call.model, _FINGERPRINT, choices, total
    )


def embeddings(
    vectors: Sequence[np.ndarray], model: str, tokens: int, as_base64: bool
) -> EmbeddingList:
    def coded(vector: np.ndarray) -> list[float] | str:
        data = np.asarray(vector, "<f4")
        return base64.b64encode(data.tobytes()).decode() if as_base64 else data.tolist()

    items = [
        EmbeddingItem("embedding", index, coded(vector)) for index, vector in enumerate(vectors)
    ]
    return EmbeddingList("list", items, model, EmbeddingUsage(tokens, tokens))
