"""Scores of pairs of texts: the bodies and answers of /v1/rerank and /v1/score.

    method_of(model) -> "classifier", "cosine" or "judgement"
    pair_row(prompts, method, query, document, instruction) -> token ids

A score is between 0 and 1 for a classifier and a judgement, and between -1 and 1 for a cosine:

- classifier: the model has a head of one class (``...ForSequenceClassification``). It reads the
  pair as the tokenizer joins two texts, and the score is the sigmoid.
- cosine: the model's files define its vectors (``modules.json``). The score is the cosine of both.
- judgement: any other chat model is asked whether the document meets the query. The score is the
  probability of "yes" against "no" (Qwen3-Reranker, arXiv 2506.05176).

Sources: Jina's and Cohere's rerank API, vLLM's score API. Left out: ``max_chunks_per_doc``, images.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxllama.serving.api.bodies import FIRST_ERROR, MAX_ROWS, Lenient, Strict, Texts
from jaxllama.serving.api.calls import ModelFacts, Prompts
from jaxllama.serving.api.schemas import ApiError, EmbeddingUsage, Schema, schema

Method = Literal["classifier", "cosine", "judgement"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker was trained with this text. Its chat template adds an empty thought after it.
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)


class Document(Lenient):
    text: str


class Rerank(Strict):
    """Body of POST /v1/rerank."""

    model: str
    query: str
    documents: Annotated[
        list[str | Document], Field(min_length=1, max_length=MAX_ROWS), FIRST_ERROR
    ]
    top_n: int | None = Field(None, ge=0)
    return_documents: bool | None = None
    instruction: str | None = None
    user: str | None = None


class Score(Strict):
    """Body of POST /v1/score: one text against each of several, or pairs of equally many."""

    model: str
    text_1: str | Texts
    text_2: str | Texts
    instruction: str | None = None
    user: str | None = None


@schema
class RankedDocument(Schema):
    text: str


@schema
class RankedItem(Schema):
    index: int
    relevance_score: float
    document: RankedDocument | None = None


@schema
class RerankObject(Schema):
    id: str
    model: str
    results: list[RankedItem]
    usage: EmbeddingUsage


@schema
class ScoreItem(Schema):
    index: int
    object: Literal["score"]
    score: float


@schema
class ScoreList(Schema):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage


def method_of(lm: ModelFacts) -> Method:
    """Return how this model scores a pair. Raises ApiError 400 if it cannot."""
    if lm.n_classes > 1:
        message = f"model: it has {lm.n_classes} classes, and a score needs exactly one"
        raise ApiError(400, message, param="model", code="unsupported")
    if lm.n_classes:
        return "classifier"
    if lm.pooling is not None:
        return "cosine"
    if lm.tokenizer is None or lm.tokenizer.chat_template is None:
        message = "model: it has no classifier, no pooling and no chat template to score with"
        raise ApiError(400, message, param="model", code="unsupported")
    return "judgement"


def answer_ids(prompts: Prompts) -> list[int]:
    """Return the ids of "yes" and "no", which must be one token each."""
    ids = [prompts.tokenizer().encode(word, add_special=False) for word in ("yes", "no")]
    if any(len(row) != 1 for row in ids):
        message = 'model: its tokenizer splits "yes" or "no", so it cannot judge documents'
        raise ApiError(400, message, param="model", code="unsupported")
    return [row[0] for row in ids]


def pair_row(
    prompts: Prompts, method: Method, query: str, document: str, instruction: str | None
) -> list[int]:
    """Return the token ids of a pair for a classifier or a judgement."""
    tokenizer = prompts.tokenizer()
    for key, text in (("query", query), ("document", document)):
        if tokenizer.exceeds(text, prompts.max_len):
            raise _too_long(key, prompts.max_len)
    if method == "classifier":
        row = tokenizer.encode_pair(query, document)
    else:
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        conversation = [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
        row = tokenizer.encode_chat(conversation, enable_thinking=False)
    if len(row) > prompts.max_len:
        raise _too_long("document", prompts.max_len)
    return row


def _too_long(key: str, limit: int) -> ApiError:
    message = f"{key}: the pair has more than {limit} tokens, which is the context"
    return ApiError(400, message, param=key, code="context_length_exceeded")
