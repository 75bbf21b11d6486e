"""Serve a queue of prompts by continuous batching, or in whole batches.

    serve(lm, prompts, lengths, ...) -> {"tokens_per_second", "request_seconds", "seconds"}

Continuous batching gives the slot of an answer that has ended to the next prompt (``Engine``). A
whole batch holds its slots until its longest answer has ended, and the next prompts wait. Only the
tokens that a request asked for count. Programs are compiled before the time is taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Literal

from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Event, Request
from jaxllama.language_model import LanguageModel
from jaxllama.typing import JsonObject, Options

Batching = Literal["continuous", "whole"]
Times = dict[int, float]  # seconds from the start to the end of each request's answer


def serve(
    lm: LanguageModel,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    *,
    slots: int,
    batching: Batching = "continuous",
    kv_dtype: str | None = None,
    draft: str | LanguageModel | None = None,
    draft_tokens: int = 0,
) -> JsonObject:
    """Return the tokens a second of all requests, and the mean seconds until an answer is whole.

    lengths: tokens of each answer.  slots: number of rows that run together.
    """
    if batching == "whole":
        ended = _whole(lm, prompts, lengths, slots, kv_dtype, draft, draft_tokens)
    else:
        ended = _continuous(lm, prompts, lengths, slots, kv_dtype, draft, draft_tokens)
    seconds = max(ended.values())
    return {
        "tokens_per_second": sum(lengths) / seconds,
        "request_seconds": statistics.mean(ended.values()),
        "seconds": seconds,
    }


def _continuous(
    lm: LanguageModel,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    slots: int,
    kv_dtype: str | None,
    draft: str | LanguageModel | None,
    draft_tokens: int,
) -> Times:
    engine = Engine(
        lm,
        draft=draft,
        draft_tokens=draft_tokens,
        max_slots=slots,
        max_len=max(map(len, prompts)) + max(lengths),
        max_queue=len(prompts),
        kv_dtype=kv_dtype,
        prefix_cache=False,
    )

    def run() -> Times:
        ended: Times = {}
        begun = time.perf_counter()

        def tell(event: Event) -> None:
            if event.finish_reason is not None:
                ended[int(event.id)] = time.perf_counter() - begun

        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            engine.submit(Request(str(index), tuple(prompt), length, ignore_eos=True), tell)
        while engine.step():
            pass
        return ended

    run()  # compiles
    ended = run()
    engine.stop()
    return ended


def _whole(
    lm: LanguageModel,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    slots: int,
    kv_dtype: str | None,
    draft: str | LanguageModel | None,
    draft_tokens: int,
) -> Times:
    drafting: Options = {} if draft is None else {"draft": draft, "draft_tokens": draft_tokens}
    every = range(len(prompts))
    batches = [every[first : first + slots] for first in every[::slots]]

    def run() -> Times:
        ended: Times = {}
        begun = time.perf_counter()
        for batch in batches:
            rows = [prompts[index] for index in batch]
            lm.generate(rows, max(lengths[i] for i in batch), kv_dtype=kv_dtype, **drafting)
            ended |= dict.fromkeys(batch, time.perf_counter() - begun)
        return ended

    run()  # compiles
    return run()
