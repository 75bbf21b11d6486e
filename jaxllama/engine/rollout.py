"""Sampled answers as arrays, for a loss that learns from rewards.

rollouts = rollout(engine, prompts, n=8, sampling=jl.Sampling(temperature=1.0), seed=step)
rollouts.tokens, rollouts.answers, rollouts.logprobs        [B, T], [B, T - 1], [B, T - 1]
logprobs = rescore(engine, rollouts)                        the same answers under new weights
engine.update_params(params)                                after the trainer's update
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxllama.decoding.sampling import Sampling
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Event, FinishReason, Request
from jaxllama.errors import JaxLlamaError

SAMPLING = Sampling(temperature=1.0)


class Rollouts(NamedTuple):
    """The answers to ``B = n * len(prompts)`` samples; a prompt's ``n`` samples stand together.

    Parameters
    ----------
    tokens : numpy.ndarray
        int32 ``[B, T]``: each prompt with its answer, then zeros.
    lengths : numpy.ndarray
        int32 ``[B]``: tokens of a row.
    answers : numpy.ndarray
        float32 ``[B, T - 1]``: 1 at ``t`` where ``tokens[:, t + 1]`` was sampled, else 0.
    logprobs : numpy.ndarray
        float32 ``[B, T - 1]``: log-probability of ``tokens[:, t + 1]`` where it was sampled, else
        0. The distribution is the model's own: before temperature, penalties and truncation.
    groups : numpy.ndarray
        int32 ``[B]``: the number of a row's prompt.
    texts : tuple of str
        The answers as text, empty strings without a tokenizer.
    finish_reasons : tuple of str
        "stop" or "length" for each row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    answers: np.ndarray
    logprobs: np.ndarray
    groups: np.ndarray
    texts: tuple[str, ...]
    finish_reasons: tuple[FinishReason, ...]


def rollout(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    sampling: Sampling = SAMPLING,
    max_new_tokens: int = 64,
    seed: int = 0,
    adapter: str | None = None,
) -> Rollouts:
    """Sample ``n`` answers to each prompt on this thread.

    A prompt's samples share its pages in the prefix cache.

    Parameters
    ----------
    engine : Engine
        An engine without a thread of its own and without requests.
    prompts : sequence of sequences of int
        Token ids, at least one for each prompt.
    n : int
        Number of answers to a prompt.
    sampling : Sampling
        Settings of each sample. Its ``seed`` must be None, because each sample has its own.
    max_new_tokens : int
        Largest number of tokens of an answer.
    seed : int
        From 0 to 2**32 - 1. Row ``r`` has the seed ``seed * 2**24 + r``, so calls with different
        seeds have no row's seed in common.
    adapter : str or None
        One of the model's adapters.

    Returns
    -------
    Rollouts
        The ``B = n * len(prompts)`` rows as numpy arrays.

    Raises
    ------
    JaxLlamaError
        If an argument lies outside its range, or a sample ended with an error.
    """
    if n < 1:
        raise JaxLlamaError(f"n = {n!r}: a prompt needs at least one sample")
    if sampling.seed is not None:
        raise JaxLlamaError("sampling: rollout gives each sample a seed of its own; pass seed=")
    if not 0 <= seed < 2**32:
        raise JaxLlamaError(f"seed = {seed!r}: must lie between 0 and 2**32 - 1")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise JaxLlamaError(f"prompts[{index}] is text: give its token ids, tokenizer.encode()")
    prompts = [tuple(int(token) for token in prompt) for prompt in prompts]
    if not 0 < n * len(prompts) <= 2**24:
        raise JaxLlamaError(f"{n * len(prompts)} samples: there must be 1 to {2**24}")
    requests = [
        Request(
            f"rollout-{index}",
            prompts[index // n],
            max_new_tokens,
            dataclasses.replace(sampling, seed=(seed << 24) + index),
            logprobs=0,
            adapter=adapter,
        )
        for index in range(n * len(prompts))
    ]
    rows = _run(engine, requests)
    longest = max(len(row.tokens) for row in rows)
    tokens = np.zeros((len(rows), longest), np.int32)
    answers = np.zeros((len(rows), longest - 1), np.float32)
    logprobs = np.zeros((len(rows), longest - 1), np.float32)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = row.tokens
        answers[index, row.answer] = 1
        logprobs[index, row.answer] = row.logprobs
    return Rollouts(
        tokens,
        np.array([len(row.tokens) for row in rows], np.int32),
        answers,
        logprobs,
        np.arange(len(rows), dtype=np.int32) // n,
        tuple(row.text for row in rows),
        tuple(row.finish_reason for row in rows),
    )


def rescore(engine: Engine, rollouts: Rollouts, *, adapter: str | None = None) -> np.ndarray:
    """Return the log-probabilities of given answers in the engine's own form.

    The engine reads the prompts and then one token of an answer after the other, by the programs
    that ``rollout`` samples with. A deterministic engine with the weights of ``rollouts`` returns
    the bits of ``rollouts.logprobs``, for any selection and order of the rows.

    Parameters
    ----------
    engine : Engine
        An engine without a thread of its own and without requests.
    rollouts : Rollouts
        Only ``tokens``, ``lengths`` and ``answers`` are read.
    adapter : str or None
        One of the model's adapters.

    Returns
    -------
    numpy.ndarray
        float32 ``[B, T - 1]``, as ``Rollouts.logprobs``.

    Raises
    ------
    JaxLlamaError
        If the engine refuses a row.
    """
    requests = []
    for index, (tokens, length, is_answer) in enumerate(
        zip(rollouts.tokens, rollouts.lengths, rollouts.answers, strict=True)
    ):
        ids, begin = tokens[:length].tolist(), int(np.argmax(is_answer)) + 1
        forced = tuple(ids[begin:])
        requests.append(
            Request(
                f"rescore-{index}",
                tuple(ids[:begin]),
                len(forced),
                logprobs=0,
                adapter=adapter,
                forced=forced,
                ignore_eos=True,
            )
        )
    logprobs = np.zeros(rollouts.answers.shape, np.float32)
    for index, row in enumerate(_run(engine, requests)):
        logprobs[index, row.answer] = row.logprobs
    return logprobs


class _Row:
    """A row's tokens so far, its answer's log-probabilities and its text; a request's listener.

    Events are not kept: many live objects make Python's collector of cycles run, and it reads the
    whole process.
    """

    def __init__(self, request: Request) -> None:
        self.tokens, self.logprobs = list(request.prompt), list[float]()
        self.parts: list[str] = []
        self.reason: FinishReason | None = None
        self.message = ""

    def __call__(self, event: Event) -> None:
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.parts.append(event.text)
        if event.finish_reason is not None:
            self.reason, self.message = event.finish_reason, event.message

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def finish_reason(self) -> FinishReason:
        assert self.reason is not None
        return self.reason

    @property
    def answer(self) -> slice:
        """Where the answer's values stand in a row of ``Rollouts.logprobs``."""
        return slice(len(self.tokens) - len(self.logprobs) - 1, len(self.tokens) - 1)


def _run(engine: Engine, requests: list[Request]) -> list[_Row]:
    """Run requests on this thread, and return a row for each."""
    rows = [_Row(request) for request in requests]
    queue = collections.deque(_first_of_prompts(requests))
    while queue or engine.live:
        # The engine bounds its queue.
        while queue and engine.stats().waiting < engine.options.max_queue:
            index = queue.popleft()
            engine.submit(requests[index], rows[index])
        engine.step()
    for request, row in zip(requests, rows, strict=True):
        if row.reason not in ("stop", "length"):
            raise JaxLlamaError(f"{request.id} ended with {row.reason!r}: {row.message}")
    return rows


def _first_of_prompts(requests: list[Request]) -> list[int]:
    """Return the order of submission: each prompt's first request before all others.

    A prompt's pages are found by requests of later steps, so samples that stand together would all
    compute them.
    """
    first: dict[tuple[int, ...], int] = {}
    for index, request in enumerate(requests):
        first.setdefault(request.prompt, index)
    ahead = list(first.values())
    known = set(ahead)
    return [*ahead, *(index for index in range(len(requests)) if index not in known)]
