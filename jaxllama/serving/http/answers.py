"""The engine's Events as the answers of OpenAI's API (``schemas``).

    Answer                          collects the Events of one call's choices
    completion(call, answer)        a whole text_completion; chat(call, answer) a chat.completion
    completion_chunk, chat_chunk    the pieces of a stream

A token that is no valid UTF-8 by itself is written ``bytes:\\xe2\\x80`` where a string is asked
for, as OpenAI's API did.  A stop token is counted in the usage and has no entry in the logprobs.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from jaxllama import __version__
from jaxllama.serving.engine.request import Event
from jaxllama.serving.http.calls import Call
from jaxllama.serving.http.schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatObject,
    CompletionChoice,
    CompletionLogprobs,
    CompletionObject,
    Delta,
    EmbeddingItem,
    EmbeddingList,
    EmbeddingUsage,
    FinishReason,
    Opening,
    PromptDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from jaxllama.text.stream import TextStream

_FINGERPRINT = f"jaxllama-{__version__}"


class Answer:
    """The events of one call so far, by choice.  ``add`` returns the event's choice index."""

    def __init__(self, call: Call) -> None:
        self._index = {request.id: index for index, request in enumerate(call.requests)}
        self.events: list[list[Event]] = [[] for _ in call.requests]

    def add(self, event: Event) -> int:
        index = self._index[event.id]
        self.events[index].append(event)
        return index

    def text(self, index: int) -> str:
        return "".join(event.text for event in self.events[index])

    def finish(self, index: int) -> FinishReason:
        return finish_reason(self.events[index][-1]) or "length"


def finish_reason(event: Event) -> FinishReason | None:
    """A deadline is a limit of length, in time.  What fails is no choice but an error."""
    if event.finish_reason is None:
        return None
    return "stop" if event.finish_reason == "stop" else "length"


def usage(call: Call, last: Sequence[Event]) -> Usage:
    """last: each choice's newest event.  The choices of one prompt read it once."""
    prompts = last[:: call.choices]
    prompt = sum(event.prompt_tokens for event in prompts)
    new = sum(event.completion_tokens for event in last)
    cached = sum(event.cached_tokens for event in prompts)
    return Usage(prompt, new, prompt + new, PromptDetails(cached))


def completion(call: Call, answer: Answer) -> CompletionObject:
    choices = []
    for index, events in enumerate(answer.events):
        echo = call.echoes[index] if call.echoes else ""
        logprobs = completion_logprobs(call, index, events, TextOffsets(call))
        text = echo + answer.text(index)
        choices.append(CompletionChoice(index, text, logprobs, answer.finish(index)))
    return _completion(call, choices, usage(call, [events[-1] for events in answer.events]))


def completion_chunk(
    call: Call, index: int, event: Event, offsets: TextOffsets, total: Usage | None
) -> CompletionObject:
    """offsets: the choice's own, which has seen its earlier events."""
    logprobs = completion_logprobs(call, index, [event], offsets)
    choice = CompletionChoice(index, event.text, logprobs, finish_reason(event))
    return _completion(call, [choice], total)


def completion_echo(call: Call, index: int) -> CompletionObject:
    """The prompt, which ``echo`` puts before a choice's stream."""
    return _completion(call, [CompletionChoice(index, call.echoes[index])], None)


def completion_usage(call: Call, total: Usage) -> CompletionObject:
    return _completion(call, [], total)


def _completion(
    call: Call, choices: list[CompletionChoice], total: Usage | None
) -> CompletionObject:
    return CompletionObject(
        call.id, "text_completion", call.created, call.model, _FINGERPRINT, choices, total
    )


def chat(call: Call, answer: Answer) -> ChatObject:
    choices = []
    for index, events in enumerate(answer.events):
        message = ChatMessage("assistant", answer.text(index))
        logprobs = chat_logprobs(call, index, events)
        choices.append(ChatChoice(index, message, logprobs, answer.finish(index)))
    total = usage(call, [events[-1] for events in answer.events])
    return ChatObject(
        call.id, "chat.completion", call.created, call.model, _FINGERPRINT, choices, total
    )


def chat_role(call: Call, index: int) -> ChatChunk:
    """The first chunk of a choice."""
    return _chat_chunk(call, [ChatChunkChoice(index, Opening("assistant", ""))], None)


def chat_chunk(call: Call, index: int, event: Event, total: Usage | None) -> ChatChunk:
    logprobs = chat_logprobs(call, index, [event])
    choice = ChatChunkChoice(index, Delta(event.text), logprobs, finish_reason(event))
    return _chat_chunk(call, [choice], total)


def chat_usage(call: Call, total: Usage) -> ChatChunk:
    return _chat_chunk(call, [], total)


def _chat_chunk(call: Call, choices: list[ChatChunkChoice], total: Usage | None) -> ChatChunk:
    return ChatChunk(
        call.id, "chat.completion.chunk", call.created, call.model, _FINGERPRINT, choices, total
    )


# Logprobs


class TextOffsets:
    """Where in a choice's text each of its tokens begins, in whole characters."""

    def __init__(self, call: Call) -> None:
        self._stream = TextStream(call.tokenizer) if call.tokenizer else None
        self._length = 0

    def __call__(self, token: int) -> int:
        begin = self._length
        if self._stream is not None:
            self._length += len(self._stream.feed(token))
        return begin


def completion_logprobs(
    call: Call, index: int, events: Sequence[Event], offsets: TextOffsets
) -> CompletionLogprobs | None:
    wanted = call.requests[index].logprobs
    if wanted is None:
        return None
    out = CompletionLogprobs([], [], [] if wanted else None, [])
    for event in events:
        for token, logprob, top in _scored(call, event):
            out.tokens.append(_spell(call, token))
            out.token_logprobs.append(_number(logprob))
            if out.top_logprobs is not None:
                best = {_spell(call, other): _number(value) for other, value in top[:wanted]}
                out.top_logprobs.append(best)
            out.text_offset.append(offsets(token))
    return out


def chat_logprobs(call: Call, index: int, events: Sequence[Event]) -> ChatLogprobs | None:
    wanted = call.requests[index].logprobs
    if wanted is None:
        return None
    content = [
        TokenLogprob(
            _spell(call, token),
            _number(logprob),
            list(_bytes(call, token)),
            [
                TopLogprob(_spell(call, other), _number(value), list(_bytes(call, other)))
                for other, value in top[:wanted]
            ],
        )
        for event in events
        for token, logprob, top in _scored(call, event)
    ]
    return ChatLogprobs(content)


def _scored(call: Call, event: Event) -> list[tuple[int, float, tuple[tuple[int, float], ...]]]:
    """(token, logprob, alternatives) of an event, without a stop token."""
    n = len(event.tokens)
    if event.finish_reason == "stop" and n and event.tokens[-1] in call.eos:
        n -= 1
    tops = event.top_logprobs or ((),) * len(event.tokens)
    return list(zip(event.tokens, event.logprobs, tops, strict=True))[:n]


def _bytes(call: Call, token: int) -> bytes:
    return call.tokenizer.token_bytes(token, skip_special=False) if call.tokenizer else b""


def _spell(call: Call, token: int) -> str:
    if call.tokenizer is None:
        return f"token_id:{token}"
    data = _bytes(call, token)
    try:
        return data.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(value: float) -> float | None:
    """JSON has no -inf and NaN; OpenAI writes the least likely as -9999."""
    return value if value > -9999.0 else (-9999.0 if value == value else None)


# The rest


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
