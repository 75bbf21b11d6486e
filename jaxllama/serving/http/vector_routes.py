"""The routes of vectors and scores: /v1/embeddings, /v1/rerank and /v1/score.

The engine's process computes one row of a body after the other (``hub``). So bodies take turns, and
a row has the same bits in any body and order. At most ``WAITING`` bodies wait; more get 429.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np
from starlette.datastructures import State
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from jaxllama.checkpoints.pooling import Pooling
from jaxllama.engine.embeddings import cut
from jaxllama.serving.api import answers
from jaxllama.serving.api.bodies import Embedding, parse
from jaxllama.serving.api.calls import Prompts, as_list
from jaxllama.serving.api.ranking import (
    Method,
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
from jaxllama.serving.http.middleware import read_body, unless_disconnected
from jaxllama.serving.ipc.link import EngineClient

WAITING = 32  # number of bodies
TOKENS = 300_000  # tokens of one body, as in OpenAI's API


class VectorRoutes:
    def __init__(self, prompts: Prompts, link: EngineClient, max_body: int) -> None:
        self._prompts, self._link, self._max_body = prompts, link, max_body
        self._n_waiting = 0

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/rerank", self.rerank, methods=["POST"]),
            Route("/v1/score", self.score, methods=["POST"]),
        ]

    async def embeddings(self, http: HttpRequest) -> Response:
        return await self._in_turn(http, self._embedded)

    async def rerank(self, http: HttpRequest) -> Response:
        return await self._in_turn(http, self._reranked)

    async def score(self, http: HttpRequest) -> Response:
        return await self._in_turn(http, self._scored)

    async def _in_turn(
        self, http: HttpRequest, answer: Callable[[bytearray, State], Awaitable[Response]]
    ) -> Response:
        """Return the answer; 429 if too many bodies wait, 499 if the client leaves."""
        data = await read_body(http, self._max_body)
        if self._n_waiting >= WAITING:
            message = f"{self._n_waiting} requests for embeddings or scores are waiting"
            raise ApiError(429, message, code="queue_full", retry_after=1)
        self._n_waiting += 1

        async def work() -> Response:
            return await answer(data, http.state)

        try:
            return await unless_disconnected(http.receive, work())
        finally:
            self._n_waiting -= 1

    # Embeddings

    async def _embedded(self, data: bytearray, state: State) -> Response:
        body, rows = await asyncio.to_thread(self.embedding_rows, data)
        _count(state, sum(map(len, rows)))
        vectors = await self._vectors(rows)
        return await asyncio.to_thread(self._answer, body, rows, vectors)

    async def _vectors(self, rows: Sequence[list[int]]) -> list[np.ndarray]:
        return [np.frombuffer(await self._link.ask("embed", row), np.float32) for row in rows]

    def _answer(
        self, body: Embedding, rows: list[list[int]], vectors: list[np.ndarray]
    ) -> Response:
        pooling = self._prompts.lm.pooling or Pooling()
        vectors = [cut(vector, body.dimensions, pooling.normalize) for vector in vectors]
        as_base64 = body.encoding_format == "base64"
        n_tokens = sum(map(len, rows))
        return respond(answers.embeddings(vectors, self._prompts.name, n_tokens, as_base64))

    def embedding_rows(self, data: bytearray) -> tuple[Embedding, list[list[int]]]:
        """Return a body and the token ids of its texts."""
        body = parse(Embedding, data, TOKENS, self._prompts.max_len)
        self._check_model(body.model)
        width = self._prompts.lm.config.d_model
        if body.dimensions is not None and body.dimensions > width:
            message = f"dimensions: this model's embeddings have {width}"
            raise ApiError(400, message, param="dimensions", code="unsupported")
        keep = body.truncate_prompt_tokens
        keep = self._prompts.max_len if keep == -1 else keep
        rows = (self._prompts.row(prompt, "input", keep) for prompt in as_list(body.input))
        return body, _bounded("input", rows)

    # Scores

    async def _reranked(self, data: bytearray, state: State) -> Response:
        body = await asyncio.to_thread(parse, Rerank, data, 0, self._prompts.max_len)
        texts = [d if isinstance(d, str) else d.text for d in body.documents]
        pairs = [(body.query, text) for text in texts]
        scores, n_tokens = await self._pair_scores(body.model, pairs, body.instruction)
        best = sorted(range(len(texts)), key=lambda i: (-scores[i], i))
        shown = body.return_documents is not False
        items = [
            RankedItem(i, scores[i], RankedDocument(texts[i]) if shown else None)
            for i in best[: len(best) if body.top_n is None else body.top_n]
        ]
        _count(state, n_tokens)
        usage = EmbeddingUsage(n_tokens, n_tokens)
        return respond(RerankObject(f"rerank-{state.request_id}", self._prompts.name, items, usage))

    async def _scored(self, data: bytearray, state: State) -> Response:
        body = await asyncio.to_thread(parse, Score, data, 0, self._prompts.max_len)
        first, second = as_list(body.text_1), as_list(body.text_2)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            message = f"text_2: {len(second)} texts for {len(first)} in text_1"
            raise ApiError(400, message, param="text_2")
        pairs = list(zip(first, second, strict=True))
        scores, n_tokens = await self._pair_scores(body.model, pairs, body.instruction)
        items = [ScoreItem(index, "score", score) for index, score in enumerate(scores)]
        _count(state, n_tokens)
        usage, created = EmbeddingUsage(n_tokens, n_tokens), int(time.time())
        id, name = f"score-{state.request_id}", self._prompts.name
        return respond(ScoreList(id, "list", created, name, items, usage))

    async def _pair_scores(
        self, model: str, pairs: list[tuple[str, str]], instruction: str | None
    ) -> tuple[list[float], int]:
        """Return the score of each pair and the number of tokens that were read."""
        self._check_model(model)
        method = method_of(self._prompts.lm)
        if method == "cosine":
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            rows = await asyncio.to_thread(self._text_rows, texts)
            vectors = dict(zip(texts, await self._vectors(rows), strict=True))
            return [_cosine(vectors[a], vectors[b]) for a, b in pairs], sum(map(len, rows))
        ids = answer_ids(self._prompts) if method == "judgement" else []
        rows = await asyncio.to_thread(self._pair_rows, method, pairs, instruction)
        scores = [(await self._link.ask("rank", row, ids))[0] for row in rows]
        return scores, sum(map(len, rows))

    def _text_rows(self, texts: list[str]) -> list[list[int]]:
        return _bounded("documents", (self._prompts.row(text, "documents") for text in texts))

    def _pair_rows(
        self, method: Method, pairs: list[tuple[str, str]], instruction: str | None
    ) -> list[list[int]]:
        rows = (pair_row(self._prompts, method, *pair, instruction) for pair in pairs)
        return _bounded("documents", rows)

    def _check_model(self, model: str) -> None:
        if self._prompts.adapter_of(model) is not None:
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
