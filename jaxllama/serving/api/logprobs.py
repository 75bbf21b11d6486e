r"""Logprobs of answers and prompts, in the formats of OpenAI and vLLM.

If a token is not valid UTF-8 by itself, its text is written as ``bytes:\xe2\x80``, as OpenAI's API
did. A stop token counts in the usage and has no entry.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from jaxllama.serving.api.calls import AcceptedCall
from jaxllama.serving.api.messages import TextPiece
from jaxllama.serving.api.schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    to_json,
)
from jaxllama.text.stream import TextStream
from jaxllama.text.tokenizer import Tokenizer


class TextOffsets:
    """Offsets of a choice's tokens in its text, in whole characters."""

    def __init__(self, call: AcceptedCall) -> None:
        self._stream = TextStream(call.tokenizer) if call.tokenizer else None
        self._length = 0

    def __call__(self, token: int) -> int:
        begin = self._length
        if self._stream is not None:
            self._length += len(self._stream.feed(token))
        return begin


def completion_logprobs(
    call: AcceptedCall, index: int, events: Sequence[TextPiece], offsets: TextOffsets
) -> CompletionLogprobs | None:
    wanted = call.requests[index].logprobs
    if wanted is None:
        return None
    out = CompletionLogprobs([], [], [] if wanted else None, [])
    for event in events:
        for token, logprob, top in _scored(call, event):
            out.tokens.append(_spell(call.tokenizer, token))
            out.token_logprobs.append(_number(logprob))
            if out.top_logprobs is not None:
                best = {
                    _spell(call.tokenizer, other): _number(value) for other, value in top[:wanted]
                }
                out.top_logprobs.append(best)
            out.text_offset.append(offsets(token))
    return out


def echoed_logprobs(
    call: AcceptedCall, index: int, offsets: TextOffsets
) -> CompletionLogprobs | None:
    """Return the logprobs of the prompt's own tokens, or None if they were not requested."""
    if not call.echoes_scores:
        return None
    scores, wanted = call.scores[index // call.choices], call.requests[index].logprobs
    tops = [
        None
        if top is None
        else {_spell(call.tokenizer, id): _number(value) for id, value in top[:wanted]}
        for top in scores.tops
    ]
    return CompletionLogprobs(
        [_spell(call.tokenizer, token) for token in scores.tokens],
        [None if value is None else _number(value) for value in scores.logprobs],
        tops if wanted else None,
        [offsets(token) for token in scores.tokens],
    )


def joined(
    first: CompletionLogprobs | None, second: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    if first is None or second is None:
        return first or second
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        tops,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(call: AcceptedCall, index: int) -> PromptLogprobs:
    """Return vLLM's prompt_logprobs: each prompt token and the likeliest tokens, by id."""
    scores = call.scores[index // call.choices]
    out: PromptLogprobs = []
    rows = zip(scores.tokens, scores.logprobs, scores.ranks, scores.tops, strict=True)
    for token, logprob, rank, top in rows:
        if logprob is None:
            out.append(None)
            continue
        values = [
            *((other, value, n) for n, (other, value) in enumerate(top or (), 1)),
            (token, logprob, rank),
        ]
        out.append(
            {
                other: PromptLogprob(_number(value), place, _spell(call.tokenizer, other))
                for other, value, place in values
            }
        )
    return out


def chat_logprobs(
    call: AcceptedCall, index: int, events: Sequence[TextPiece]
) -> ChatLogprobs | None:
    wanted = call.requests[index].logprobs
    if wanted is None:
        return None
    content = [
        TokenLogprob(
            _spell(call.tokenizer, token),
            _number(logprob),
            list(_bytes(call.tokenizer, token)),
            [
                TopLogprob(
                    _spell(call.tokenizer, other),
                    _number(value),
                    list(_bytes(call.tokenizer, other)),
                )
                for other, value in top[:wanted]
            ],
        )
        for event in events
        for token, logprob, top in _scored(call, event)
    ]
    return ChatLogprobs(content)


def chat_entries(call: AcceptedCall, index: int, event: TextPiece) -> bytes:
    """Return ``chat_logprobs``' content of a piece that is not the last, as JSON without brackets.

    Everything but the numbers follows from the token ids, and is cached.
    """
    tokenizer, wanted = call.tokenizer, call.requests[index].logprobs
    entries: list[bytes] = []
    for place, (token, logprob) in enumerate(zip(event.tokens, event.logprobs, strict=True)):
        before, after = _around(tokenizer, token)
        others: list[bytes] = []
        if wanted:
            for other, value in event.top_logprobs[place][:wanted]:
                begun, ended = _around(tokenizer, other)
                others.append(begun + _json(_number(value)) + ended + b"}")
        top = b',"top_logprobs":[' + b",".join(others) + b"]}"
        entries.append(before + _json(_number(logprob)) + after + top)
    return b",".join(entries)


@functools.lru_cache(maxsize=1 << 16)
def _around(tokenizer: Tokenizer | None, token: int) -> tuple[bytes, bytes]:
    """Return a TopLogprob's JSON before and after its number, without the last brace."""
    bare = TopLogprob(_spell(tokenizer, token), None, list(_bytes(tokenizer, token)))
    before, after = to_json(bare).split(b'"logprob":null')
    return before + b'"logprob":', after.removesuffix(b"}")


_json = msgspec.json.Encoder().encode


def _scored(
    call: AcceptedCall, event: TextPiece
) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Return (token, logprob, alternatives) of an event's tokens, without a stop token."""
    n = len(event.tokens)
    if event.finish_reason == "stop" and n and event.tokens[-1] in call.eos:
        n -= 1
    tops = event.top_logprobs or [[] for _ in event.tokens]
    return list(zip(event.tokens, event.logprobs, tops, strict=True))[:n]


def _bytes(tokenizer: Tokenizer | None, token: int) -> bytes:
    return tokenizer.token_bytes(token, skip_special=False) if tokenizer else b""


def _spell(tokenizer: Tokenizer | None, token: int) -> str:
    if tokenizer is None:
        return f"token_id:{token}"
    data = _bytes(tokenizer, token)
    try:
        return data.decode() or f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _number(value: float) -> float | None:
    """Return a logprob for JSON, which has no -inf and NaN; OpenAI writes the lowest as -9999."""
    return value if value > -9999.0 else (-9999.0 if value == value else None)
