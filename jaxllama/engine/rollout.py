"""Sampled answers as arrays, for a loss that learns from rewards.

rollouts = rollout(engine, prompts, n=8, sampling=jl.Sampling(temperature=1.0), seed=step)
rollouts.tokens, rollouts.answers, rollouts.logprobs        [B, T], [B, T - 1], [B, T - 1]
logprobs = rescore(engine, rollouts)                        the same answers under new weights
engine.update_params(params)                                after the trainer's update
"""

from __future__ import annotations

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
    longest = max(len(tokens) for tokens, *_ in rows)
    tokens = np.zeros((len(rows), longest), np.int32)
    answers = np.zeros((len(rows), longest - 1), np.float32)
    logprobs = np.zeros((len(rows), longest - 1), np.float32)
    for row, (ids, numbers, *_) in enumerate(rows):
        tokens[row, : len(ids)] = ids
        answer = slice(len(ids) - len(numbers) - 1, len(ids) - 1)
        answers[row, answer] = 1
        logprobs[row, answer] = numbers
    return Rollouts(
        tokens,
        np.array([len(ids) for ids, *_ in rows], np.int32),
        answers,
        logprobs,
        np.arange(len(rows), dtype=np.int32) // n,
        tuple(text for _, _, text, _ in rows),
        tuple(reason for *_, reason in rows),
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
    for index, (tokens, length, own) in enumerate(
        zip(rollouts.tokens, rollouts.lengths, rollouts.answers, strict=True)
    ):
        ids, begin = tokens[:length].tolist(), int(np.argmax(own)) + 1
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
    for row, (ids, numbers, *_) in enumerate(_run(engine, requests)):
        logprobs[row, len(ids) - len(numbers) - 1 : len(ids) - 1] = numbers
    return logprobs


Row = tuple[list[int], list[float], str, FinishReason]


def _run(engine: Engine, requests: list[Request]) -> list[Row]:
    """Run requests on this thread, and return a row for each."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    queue = list(reversed(requests))
    while queue or engine.live:
        # The engine bounds its queue.
        while queue and engine.stats().waiting < engine.options.max_queue:
            request = queue.pop()
            engine.submit(request, events[request.id].append)
        engine.step()
    return [_row(request, events[request.id]) for request in requests]


def _row(request: Request, events: list[Event]) -> Row:
    """Return a row's tokens, its answer's log-probabilities, its text and why it ended."""
    tokens, logprobs, text = list(request.prompt), list[float](), ""
    for event in events:
        tokens += event.tokens
        logprobs += event.logprobs
        text += event.text
    reason = events[-1].finish_reason
    if reason not in ("stop", "length"):
        raise JaxLlamaError(f"{request.id} ended with {reason!r}: {events[-1].message}")
    return tokens, logprobs, text, reason
