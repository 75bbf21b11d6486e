"""Vectors and scores: /v1/embeddings, /v1/rerank and /v1/score.

The engine's process computes one row of a body after the other (``hub``). So bodies take turns, and
a row has the same bits in any body and order. At most ``WAITING`` bodies wait; more get 429.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from starlette.datastructures import State
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxllama.checkpoints.pooling import Pooling
from jaxllama.engine.embeddings import cut
from jaxllama.serving.api import answers
from jaxllama.serving.api.bodies import Embedding
from jaxllama.serving.api.calls import Prompts, as_list
from jaxllama.serving.api.ranking import (
    RankedDocument,
    RankedItem,
    Rerank,
    RerankObject,
    Score,
    ScoreItem,
    ScoreList,
    answer_ids,
    method_of,
    pair_row,
)
from jaxllama.serving.api.schemas import ApiError, EmbeddingUsage, respond
from jaxllama.serving.http.body_threads import threaded
from jaxllama.serving.http.context import Context
from jaxllama.serving.http.middleware import unless_disconnected

WAITING = 32  # number of bodies
TOKENS = 300_000  # tokens of one body, as in OpenAI's API
Result = TypeVar("Result")
Handler = Callable[[Context, HttpRequest, Any], Coroutine[Any, Any, Result]]


def _in_turn(handler: Handler[Result]) -> Handler[Result]:
    """Return the handler, which raises ApiError 429 if too many bodies wait."""

    @functools.wraps(handler)
    async def waiting(server: Context, http: HttpRequest, body: Any) -> Result:
        if server.vectors >= WAITING:
            message = f"{server.vectors} requests for embeddings or scores are waiting"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        server.vectors += 1
        try:
            return await unless_disconnected(http.receive, handler(server, http, body))
        finally:
            server.vectors -= 1

    return waiting


# Embeddings


@_in_turn
async def embeddings(server: Context, http: HttpRequest, body: Embedding) -> Response:
    state = http.state
    rows = await threaded(state.body_size, embedding_rows, server.prompts, body)
    _count(state, sum(map(len, rows)))
    vectors = await _vectors(server, rows)
    pooling, width = server.model.pooling or Pooling(), server.model.config.d_model
    vectors = [cut(vector, body.dimensions, pooling.normalize) for vector in vectors]
    as_base64, n_tokens = body.encoding_format == "base64", sum(map(len, rows))

    def response() -> Response:
        return respond(answers.embeddings(vectors, server.settings.name, n_tokens, as_base64))

    return await threaded(4 * width * len(vectors), response)


async def _vectors(server: Context, rows: Sequence[list[int]]) -> list[np.ndarray]:
    return [np.frombuffer(await server.link.ask("embed", row), np.float32) for row in rows]


def embedding_rows(prompts: Prompts, body: Embedding) -> list[list[int]]:
    """Return the token ids of a body's texts."""
    _check_model(prompts, body.model)
    width = prompts.lm.config.d_model
    if body.dimensions is not None and body.dimensions > width:
        raise ApiError.unsupported("dimensions", f"this model's embeddings have {width}")
    keep = body.truncate_prompt_tokens
    keep = prompts.max_len if keep == -1 else keep
    return _bounded("input", (prompts.row(text, "input", keep) for text in as_list(body.input)))


# Scores


@_in_turn
async def rerank(server: Context, http: HttpRequest, body: Rerank) -> RerankObject:
    state = http.state
    texts = [d if isinstance(d, str) else d.text for d in body.documents]
    pairs = [(body.query, text) for text in texts]
    scores, n_tokens = await _pair_scores(server, state, body, pairs)
    best = sorted(range(len(texts)), key=lambda i: (-scores[i], i))
    shown = body.return_documents is not False
    items = [
        RankedItem(i, scores[i], RankedDocument(texts[i]) if shown else None)
        for i in best[: len(best) if body.top_n is None else body.top_n]
    ]
    _count(state, n_tokens)
    usage = EmbeddingUsage(n_tokens, n_tokens)
    return RerankObject(f"rerank-{state.request_id}", server.settings.name, items, usage)


@_in_turn
async def score(server: Context, http: HttpRequest, body: Score) -> ScoreList:
    state = http.state
    first, second = as_list(body.text_1), as_list(body.text_2)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = f"text_2: {len(second)} texts for {len(first)} in text_1"
        raise ApiError(400, message, param="text_2")
    pairs = list(zip(first, second, strict=True))
    scores, n_tokens = await _pair_scores(server, state, body, pairs)
    items = [ScoreItem(index, "score", score) for index, score in enumerate(scores)]
    _count(state, n_tokens)
    usage, created = EmbeddingUsage(n_tokens, n_tokens), int(time.time())
    id = f"score-{state.request_id}"
    return ScoreList(id, "list", created, server.settings.name, items, usage)


async def _pair_scores(
    server: Context, state: State, body: Rerank | Score, pairs: list[tuple[str, str]]
) -> tuple[list[float], int]:
    """Return the score of each pair and the number of tokens that were read."""
    prompts, size = server.prompts, state.body_size
    _check_model(prompts, body.model)
    method = method_of(server.model)
    if method == "cosine":
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        read = (prompts.row(text, "documents") for text in texts)
        rows = await threaded(size, _bounded, "documents", read)
        vectors = dict(zip(texts, await _vectors(server, rows), strict=True))
        return [_cosine(vectors[a], vectors[b]) for a, b in pairs], sum(map(len, rows))
    ids = answer_ids(prompts) if method == "judgement" else []
    read = (pair_row(prompts, method, *pair, body.instruction) for pair in pairs)
    rows = await threaded(size, _bounded, "documents", read)
    scores = [(await server.link.ask("rank", row, ids))[0] for row in rows]
    return scores, sum(map(len, rows))


def _check_model(prompts: Prompts, model: str) -> None:
    if prompts.adapter_of(model) is not None:
        message = "model: embeddings and scores are the base model's, not an adapter's"
        raise ApiError(400, message, param="model", code="unsupported")


def _count(state: State, tokens: int) -> None:
    """Count tokens for the log and for the key's limits."""
    state.fields["prompt_tokens"] = state.scored_tokens = tokens


def _bounded(key: str, rows: Iterable[list[int]]) -> list[list[int]]:
    """Return the rows. Raises ApiError 400 at the first row beyond ``TOKENS`` in all."""
    kept: list[list[int]] = []
    total = 0
    for row in rows:
        kept.append(row)
        total += len(row)
        if total > TOKENS:
            message = f"{key}: more than {TOKENS} tokens in all: send several bodies"
            raise ApiError(400, message, param=key, code="too_many_tokens")
    return kept


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    first, second = first.astype(np.float64), second.astype(np.float64)
    return float(first @ second / max(np.linalg.norm(first) * np.linalg.norm(second), 1e-20))
