"""Examples packed into rows of equal length, and batches of these rows.

    data = Conversations.open(config.data, length)         the file, as tokens
    training, held_out = data.split(last)
    training.batch(step, batch_size, length, seed)         Batch of numpy arrays

``pack`` fills rows by best fit, the longest example first (as TRL's "bfd", arXiv 2404.10830). Rows
are the same in every epoch, and a seed shuffles their order again for every epoch. A batch depends
on (seed, step) only, so there is no position to save. An example longer than a row loses its end;
``cut`` counts them.

Losses are means over the answers' tokens of a whole step: weights are scaled so that their mean
over its rows is 1, whatever the number of microbatches and devices.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import conversations
from jaxllama.training.batch import Batch
from jaxllama.training.config import TrainConfig
from jaxllama.training.conversations import Example
from jaxllama.training.data import epoch_order, load_tokenizer


@dataclasses.dataclass(frozen=True)
class Conversations:
    """An open file of conversations. lines: the examples of each line."""

    tokenizer: Tokenizer
    lines: list[list[Example]]
    sha256: str
    length: int
    is_packed: bool = True

    @classmethod
    def open(cls, config: TrainConfig) -> Conversations:
        """Open the file of a configuration. Raises JaxLlamaError naming the line that is wrong."""
        data, length = config.data, config.sequence_length + 1
        name = data.tokenizer or config.init_from
        assert data.conversations is not None and name is not None
        tokenizer = load_tokenizer(name)
        lines = conversations.read(data.conversations, tokenizer)
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
        """Return (rows of all but the last ``last`` lines, rows of the last ones)."""
        cut = len(self.lines) - last
        return self._rows(self.lines[:cut]), self._rows(self.lines[cut:])

    def _rows(self, lines: Sequence[list[Example]]) -> PackedRows:
        return PackedRows.of(
            [example for line in lines for example in line], self.length, self.is_packed
        )


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of ``length`` tokens.

    members: indices of the examples of each row. cut: number of examples that lost their end.
    """

    examples: list[Example]
    members: list[list[int]]
    length: int
    cut: int

    @classmethod
    def of(cls, examples: Sequence[Example], length: int, is_packed: bool = True) -> PackedRows:
        """Pack examples; those whose answers begin behind a row's end are left out."""
        cut = sum(len(example.tokens) > length for example in examples)
        short = [Example(one.tokens[:length], one.answers[:length]) for one in examples]
        short = [example for example in short if example.answers[1:].any()]
        sizes = [len(example.tokens) for example in short]
        members = pack(sizes, length) if is_packed else [[index] for index in range(len(sizes))]
        return cls(short, members, length, cut)

    def __len__(self) -> int:
        return len(self.members)

    @property
    def density(self) -> float:
        """Share of the rows' places that hold tokens."""
        used = sum(len(example.tokens) for example in self.examples)
        return used / max(len(self) * self.length, 1)

    def row(self, index: int) -> Batch:
        """Return one row; its weights are 0 or 1. A row past the last is empty."""
        tokens, segments = np.zeros((2, self.length), np.int32)
        answers = np.zeros(self.length, bool)
        at = 0
        for number, member in enumerate(self.members[index] if index < len(self) else (), 1):
            example = self.examples[member]
            end = at + len(example.tokens)
            tokens[at:end], segments[at:end] = example.tokens, number
            answers[at + 1 : end] = example.answers[1:]
            at = end
        return Batch(tokens, segments, answers[1:].astype(np.float32))

    def rows(self, indices: Sequence[int]) -> Batch:
        """Return several rows, ``[rows, length]`` each."""
        return Batch(*map(np.stack, zip(*map(self.row, indices), strict=True)))

    def batch(self, step: int, batch_size: int, length: int, seed: int) -> Batch:
        """Return the rows of step ``step`` (from 0), with weights whose mean is 1."""
        assert length + 1 == self.length
        indices = []
        for number in range(step * batch_size, (step + 1) * batch_size):
            epoch, place = divmod(number, len(self))
            indices.append(int(epoch_order(seed, epoch, len(self))[place]))
        rows = self.rows(indices)
        assert rows.weights is not None
        return rows._replace(weights=rows.weights / np.float32(np.mean(rows.weights)))

    def validation(self, size: int, length: int, devices: int = 1) -> Iterator[Batch]:
        """Yield all rows in batches of ``size``, the last one padded with empty rows."""
        del devices  # they share every batch
        assert length + 1 == self.length
        for first in range(0, len(self), size):
            yield self.rows(range(first, first + size))


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return rows of indices whose sizes sum to at most ``length``, by best fit decreasing."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (places left, row), sorted
    for index in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        found = bisect.bisect_left(open_rows, (sizes[index], -1))
        if found == len(open_rows):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = open_rows.pop(found)
        rows[row].append(index)
        bisect.insort(open_rows, (left - sizes[index], row))
    return rows
