"""Examples packed into rows of equal length, and batches of these rows.

    data = Conversations.open(config.data, length)         the file, as tokens
    training, held_out = data.split(last)
    training.batch(step, batch_size, length, seed)         Batch of numpy arrays

``pack`` fills rows by best fit, the longest example first (as TRL's "bfd", arXiv 2404.10830). Rows
are the same in every epoch, and a seed shuffles their order again for every epoch. A batch depends
on (seed, step) only, so there is no position to save. An example longer than a row loses its end;
``cut`` counts them.

Losses are means over the answers' tokens of a whole step, or over its pairs. Weights are scaled so
that their mean over its rows is 1, for any number of microbatches and devices.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import conversations
from jaxllama.training.batch import Batch
from jaxllama.training.config import TrainConfig
from jaxllama.training.conversations import Example, Unit
from jaxllama.training.data import epoch_order, run_tokenizer


@dataclasses.dataclass(frozen=True)
class Conversations:
    """An open file of conversations. lines: the units of each line."""

    tokenizer: Tokenizer
    lines: list[list[Unit]]
    sha256: str
    length: int
    is_packed: bool = True

    @classmethod
    def open(cls, config: TrainConfig) -> Conversations:
        """Open the file of a configuration. Raises JaxLlamaError naming the line that is wrong."""
        data, length = config.data, config.sequence_length + 1
        assert data.conversations is not None
        tokenizer = run_tokenizer(data.tokenizer, config.init_from)
        lines = conversations.read(data.conversations, tokenizer, config.goal.kind)
        digest = hashlib.sha256(Path(data.conversations).read_bytes()).hexdigest()
        if len(lines) <= data.validation_conversations:
            raise JaxLlamaError(
                f"data.conversations = {data.conversations!r}: {len(lines)} lines, of which "
                f"data.validation_conversations = {data.validation_conversations} leaves none"
            )
        return cls(tokenizer, lines, digest, length, data.packing)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def save_tokenizer(self, directory: Path) -> list[Path]:
        """Write the tokenizer's files into ``directory``, and return their paths."""
        return self.tokenizer.save(directory)

    def split(self, last: int) -> tuple[PackedRows, PackedRows]:
        """Return (rows of all but the last ``last`` lines, rows of the last ones).

        Raises JaxLlamaError if none of the first ones fits.
        """
        cut = len(self.lines) - last
        training = self._rows(self.lines[:cut])
        if not len(training):
            raise JaxLlamaError(
                f"sequence_length = {self.length - 1}: no answer of the {cut} lines to train on "
                "begins within a row, or no pair fits into one"
            )
        return training, self._rows(self.lines[cut:])

    def _rows(self, lines: Sequence[list[Unit]]) -> PackedRows:
        return PackedRows.of([unit for line in lines for unit in line], self.length, self.is_packed)


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of ``length`` tokens.

    members: indices of the units of each row. cut: number of sequences that lost their end, and of
    pairs that were left out because they are longer than a row. reference: float32 ``[units, 2]``,
    the log-probabilities of pairs under the first model.
    """

    units: list[Unit]
    members: list[list[int]]
    length: int
    cut: int
    reference: np.ndarray | None = None

    @classmethod
    def of(cls, units: Sequence[Unit], length: int, is_packed: bool = True) -> PackedRows:
        """Pack units; those whose answers begin behind a row's end are left out."""
        cut = sum(len(unit) > length for unit in units)
        short = [unit for unit in map(functools.partial(_shortened, length), units) if unit]
        sizes = [len(unit) for unit in short]
        members = pack(sizes, length) if is_packed else [[index] for index in range(len(sizes))]
        return cls(short, members, length, cut)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def density(self) -> float:
        """Share of the rows' places that hold tokens."""
        used = sum(map(len, self.units))
        return used / max(len(self) * self.length, 1)

    @functools.cached_property
    def _pairs(self) -> int:
        """Most pairs of a row; 0 for single sequences."""
        is_pair = any(len(unit.examples) == 2 for unit in self.units)
        return max(map(len, self.members), default=0) if is_pair else 0

    @functools.cached_property
    def _most(self) -> int:
        """Most segments of a row, with its padding."""
        return 1 + max(
            (sum(len(self.units[unit].examples) for unit in row) for row in self.members), default=0
        )

    def row(self, index: int) -> Batch:
        """Return one row; its weights are 0 or 1. A row past the last is empty."""
        tokens, segments = np.zeros((2, self.length), np.int32)
        answers = np.zeros(self.length, bool)
        members = self.members[index] if index < len(self) else []
        at, begins = 0, np.full(self._most, -1, np.int32)
        sequences = [example for member in members for example in self.units[member].examples]
        for number, example in enumerate(sequences, 1):
            end = at + len(example.tokens)
            tokens[at:end], segments[at:end] = example.tokens, number
            begins[number - 1] = at
            answers[at + 1 : end] = example.answers[1:]
            at = end
        if at < self.length:
            begins[len(sequences)] = at
        row = Batch(tokens, segments, answers[1:].astype(np.float32), begins=begins)
        if not self._pairs:
            return row
        labels = np.zeros(self._pairs, np.float32)
        reference = np.zeros((self._pairs, 2), np.float32)
        labels[: len(members)] = [self.units[member].label for member in members]
        if self.reference is not None:
            reference[: len(members)] = self.reference[members]
        return row._replace(labels=labels, reference=reference)

    def rows(self, indices: Sequence[int]) -> Batch:
        """Return several rows, ``[rows, length]`` each."""
        return jax.tree.map(lambda *parts: np.stack(parts), *map(self.row, indices))

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Batch:
        """Return the rows of step ``step`` (from 0), with weights whose mean is 1."""
        assert length + 1 == self.length
        indices = []
        for number in range(step * batch_size, (step + 1) * batch_size):
            epoch, place = divmod(number, len(self))
            indices.append(int(epoch_order(seed, epoch, len(self))[place]))
        rows = self.rows(indices)
        if rows.labels is not None:
            return rows._replace(labels=rows.labels / np.float32(np.mean(np.abs(rows.labels))))
        assert rows.weights is not None
        return rows._replace(weights=rows.weights / np.float32(np.mean(rows.weights)))

    def validation(self, size: int, length: int, devices: int = 1) -> Iterator[Batch]:
        """Yield all rows in batches of ``size``, the last one padded with empty rows."""
        del devices  # they share every batch
        assert length + 1 == self.length
        for first in range(0, len(self), size):
            yield self.rows(range(first, first + size))


def _shortened(length: int, unit: Unit) -> Unit | None:
    """Return the unit within ``length`` tokens; None for a pair that is longer, or no answer."""
    if len(unit) > length:
        if len(unit.examples) > 1:
            return None
        short = (
            Example(example.tokens[:length], example.answers[:length]) for example in unit.examples
        )
        unit = Unit(tuple(short), unit.label)
    has_answers = all(example.answers[1:].any() for example in unit.examples)
    return unit if has_answers else None


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return rows of indices whose sizes sum to at most ``length``, by best fit decreasing."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (places left, row), sorted
    for index in sorted(
        range(len(sizes)), key=lambda index_of_unit: (-sizes[index_of_unit], index_of_unit)
    ):
        found = bisect.bisect_left(open_rows, (sizes[index], -1))
        if found == len(open_rows):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = open_rows.pop(found)
        rows[row].append(index)
        bisect.insort(open_rows, (left - sizes[index], row))
    return rows
