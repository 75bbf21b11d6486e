"""The rows of one call of ``generate``: an executor runs them batch by batch, readers make text.

    steps = generations(executor, cfg, tokenizer, call, params_of, kept)
    for row, text in steps: ...        new text during decoding; the iterator returns the results

The executor decodes in slices where a caller reads the text as it comes, or where stop strings may
end it. The device gets a slice before the host has read the one before it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.gain import DRAFT, OFF, Gain
from jaxllama.decoding.rows import Report
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.executors.executor import (
    DETERMINISTIC_ROWS,
    Alone,
    Call,
    DraftSource,
    Executor,
    KeptCalls,
)
from jaxllama.model.shardings import fetch
from jaxllama.text.reader import Reader
from jaxllama.text.rows import Generation, fixed_pieces, pad_rows, shapes_of
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import Params

# Seconds of decoding between two reads of the text, if a caller streams it or stop strings may end
# it. 12 pieces a second read as one flow.
PIECE_SECONDS = 0.08
MEASURED_STEPS = 16  # most tokens of a row in a call by which drafts are measured

OnPrompt = Callable[[int, int], None]
# Yields (row, new text) during decoding, and returns the results.
Steps = Generator[tuple[int, str], None, list[Generation]]


@dataclasses.dataclass(frozen=True)
class GenerateCall:
    """The checked arguments of one call of ``generate``.

    rows, sampling, adapters: of each row its token ids, its sampling and its adapter's number.
    stops: texts that end a row. watched: a caller reads the text during decoding. deterministic: a
    row's bits do not depend on its batch. The other fields are those of ``Call``.
    """

    rows: list[list[int]]
    sampling: list[Sampling]
    adapters: list[int]
    max_new_tokens: int
    stops: tuple[str, ...]
    kv_dtype: DTypeLike
    chunk: int | None
    watched: bool
    deterministic: bool
    drafting: DraftSource | None
    on_prompt: OnPrompt | None

    def batch_rows(self, executor: Executor) -> int:
        """Return the rows of every batch of a deterministic model.

        They are the executor's block, or as many as make a pass of ``DETERMINISTIC_ROWS`` tokens.
        """
        width = self.drafting.plan.widths[0] if self.drafting else 1
        return executor.block_size or DETERMINISTIC_ROWS // width


def generations(
    executor: Executor,
    cfg: ModelConfig,
    tokenizer: Tokenizer | None,
    call: GenerateCall,
    params_of: Callable[[list[int]], Params],
    kept: KeptCalls | None,
) -> Steps:
    """Run the rows batch by batch.

    Parameters
    ----------
    executor, cfg, tokenizer
        The model's.
    call
        The rows and the arguments for all of them.
    params_of
        Returns the parameters for rows with these adapters' numbers.
    kept
        Programs that earlier processes compiled.

    Yields
    ------
    (int, str)
        A row and its new text, if ``call.watched``.

    Returns
    -------
    list of Generation
        One result for each row.
    """
    results: dict[int, Generation] = {}
    for members in _groups(executor, call):
        numbers = [call.adapters[index] for index in members]
        if call.deterministic:
            numbers += [0] * (call.batch_rows(executor) - len(members))
        batch = _batch(executor, cfg, call, members, kept)
        n_rows = batch.tokens.shape[0]
        gains = None if call.drafting is None else call.drafting.gains
        gain = None if gains is None else gains[n_rows, batch.capacity]
        if gain is not None and not call.deterministic and gain.next() == OFF:
            batch, gain = dataclasses.replace(batch, drafting=None), None  # the program without
        decoding = executor.begin(cfg, params_of(numbers), batch)
        answers = [_Answer(Reader(tokenizer, cfg.eos_token_ids, call.stops)) for _ in members]
        is_read = call.watched or bool(call.stops)
        pace = _Pieces(call.max_new_tokens, is_read, gain)
        counts, report = np.ones(n_rows, int), decoding.report
        while True:
            ahead = None
            # The device gets the next call before the host reads this one. The first piece is the
            # exception: it does not wait until the loop is compiled.
            if executor.runs_ahead and pace.until > 1 and pace.until < call.max_new_tokens:
                ahead = decoding.advance(*pace.next(counts))
            found: Report = fetch(report)
            counts = found.counts
            pace.arrived(counts, found.done)
            for row, answer in enumerate(answers):
                text = answer.read(found.tokens[row, : counts[row]])
                if text and call.watched:
                    yield members[row], text
            ended = np.ones(n_rows, bool)
            ended[: len(answers)] = [answer.reader.stopped for answer in answers]
            if not (~ended & ~found.done & (counts < call.max_new_tokens)).any():
                break
            if call.stops:
                decoding.end(ended)
            if ahead is None:
                ahead = decoding.advance(*pace.next(counts[~ended]))
            report = ahead
        for row, answer in enumerate(answers):
            tail = answer.close()
            if tail and call.watched:
                yield members[row], tail
            drafted, accepted = map(int, found.drafts[:, row])
            results[members[row]] = answer.result(found.logprobs[row], drafted, accepted)
    return [results[index] for index in range(len(call.rows))]


def _groups(executor: Executor, call: GenerateCall) -> list[list[int]]:
    """Return the indices of the rows that run together.

    A group has as many rows as the executor takes. In a deterministic model its programs have the
    same shapes as in any other batch.
    """
    if not call.deterministic:
        count = len(call.rows)
        size = executor.block_size or count
        return [list(range(at, min(at + size, count))) for at in range(0, count, size)]
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(call.rows):
        shapes = shapes_of([row], call.max_new_tokens)
        alike.setdefault((*shapes[:2], fixed_pieces(len(row))), []).append(index)
    size = call.batch_rows(executor)
    return [
        members[first : first + size]
        for members in alike.values()
        for first in range(0, len(members), size)
    ]


def _batch(
    executor: Executor,
    cfg: ModelConfig,
    call: GenerateCall,
    members: list[int],
    kept: KeptCalls | None,
) -> Call:
    """Return the ``Call`` of the rows ``members``, padded to a bucket of ``text.rows``.

    A deterministic model's batch is filled up with empty rows.
    """
    rows = [call.rows[index] for index in members]
    sampling = [call.sampling[index] for index in members]
    if call.deterministic:
        empty = call.batch_rows(executor) - len(rows)
        rows, sampling = rows + [[]] * empty, sampling + [Sampling()] * empty
    width, capacity, room = shapes_of(rows, call.max_new_tokens)
    tokens, lengths = pad_rows(rows, width)
    alone = None
    if call.deterministic:
        alone = Alone(DETERMINISTIC_ROWS, *fixed_pieces(max(map(len, rows))))
    return Call(
        tokens,
        lengths,
        SamplingParams.stack(sampling, cfg.vocab_size, seed=0),
        stop_ids=jax.device_put(np.asarray(cfg.eos_token_ids, np.int32)),
        capacity=capacity,
        room=room,
        limit=call.max_new_tokens,
        kv_dtype=call.kv_dtype,
        chunk=call.chunk,
        alone=alone,
        drafting=call.drafting,
        on_prompt=call.on_prompt,
        kept=kept,
    )


class _Pieces:
    """The number of tokens that each call of the loop writes.

    If ``is_read`` is true, a caller waits for the text. Each call then takes about
    ``PIECE_SECONDS``, estimated from the fastest step so far. A slow model thus shows each token,
    and the host does not delay a fast one. Calls have 2 steps until one has been measured, and grow
    by at most four times. Otherwise one call writes all tokens. Calls are short until the
    ``gain`` of drafts is known. ``until`` is the number of tokens of each row after the calls so
    far.
    """

    def __init__(self, limit: int, is_read: bool, gain: Gain | None) -> None:
        self._limit, self._is_read, self._gain = limit, is_read, gain
        self._steps = 2 if is_read else limit
        self._running: list[tuple[int, float]] = []  # how, time of the call
        self._arrived = 0.0
        self._step_seconds = math.inf
        self._before, self._open = np.zeros(0, int), np.zeros(0, bool)
        self.until = 1

    def next(self, counts: np.ndarray) -> tuple[int, int]:
        """Return (the tokens that each row shall have after the call that begins now, how it
        drafts).

        counts: the open rows' tokens, as far as they are known.
        """
        if self._is_read and self._step_seconds < math.inf:
            affordable = max(int(PIECE_SECONDS / self._step_seconds), 1)
            self._steps = min(affordable, 4 * self._steps)
        steps, how = self._steps, DRAFT
        if self._gain is not None:
            how = self._gain.next()
            steps = steps if self._gain.is_known else min(steps, MEASURED_STEPS)
        # After a correct draft a row has more tokens than the call requested.
        self.until = min(max(self.until, int(counts.min())) + steps, self._limit)
        self._running.append((how, time.perf_counter()))
        return self.until, how

    def arrived(self, counts: np.ndarray, done: np.ndarray) -> None:
        """Record that the tokens of the oldest call have arrived; of its rows."""
        now = time.perf_counter()
        if self._running:
            how, asked = self._running.pop(0)
            seconds = now - max(asked, self._arrived)
            new = (counts - self._before)[self._open]
            if new.any():  # correct drafts may have written all before the call began
                self._step_seconds = min(self._step_seconds, seconds / int(new.max()))
                if self._gain is not None:
                    self._gain.took(how, float(new.mean()) / seconds)
        self._arrived, self._before, self._open = now, counts, ~done & (counts < self._limit)


@dataclasses.dataclass
class _Answer:
    """One row's tokens and text so far, as its reader returns them."""

    reader: Reader
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""

    def read(self, written: np.ndarray) -> str:
        """Read the row's tokens, of which the first are known, and return the new text."""
        if self.reader.stopped:
            return ""
        new = written[len(self.tokens) :].tolist()
        count, text = self.reader.read(new)
        self.tokens += new[:count]
        self.text += text
        return text

    def close(self) -> str:
        """Return the text that the reader held back."""
        text = self.reader.close()
        self.text += text
        return text

    def result(self, logprobs: np.ndarray, drafted: int, accepted: int) -> Generation:
        """Return the row's Generation, with these log-probabilities."""
        reason = "stop" if self.reader.stopped else "length"
        known = logprobs[: len(self.tokens)].tolist()
        return Generation(self.text, self.tokens, known, reason, drafted, accepted)
