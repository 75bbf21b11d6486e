"""One parameter of a model: its shape, what it is drawn from, and where a checkpoint has it.

A ``Param``'s memory is its ``TensorSource`` tensors' memory, one after the other.  Fusion (q|k|v,
gate|up) is therefore data.  This file imports no jax: who only reads a checkpoint does without.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np

from jaxllama.config import NormConfig
from jaxllama.typing import Options

Path = tuple[str, ...]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Turned:
    """Rows that RoPE turns, as a checkpoint orders them: the first ``heads`` heads of ``head_dim``
    rows each, of which ``rotary_dim`` turn, two that are neighbours or half of them apart.

    Ours are a head's two halves, row i turning with row i + head_dim / 2; rows that do not turn
    stand behind those that do in each half.  gated: behind each head are as many rows of its gate,
    which in ours stand before all heads.  first: rows of a head before those that turn, which stay.
    flipped: the halves change places, so that a pair turns the other way.
    """

    heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    gated: bool = False
    first: int = 0
    flipped: bool = False

    @property
    def block(self) -> int:
        """Rows that change places only among themselves."""
        return 2 * self.heads * self.head_dim if self.gated else self.head_dim

    def rows(self) -> np.ndarray:
        """For each of our rows the checkpoint's."""
        turning, rest = np.split(np.arange(self.first, self.head_dim), (self.rotary_dim,))
        halves = (turning[0::2], turning[1::2]) if self.interleaved else np.split(turning, 2)
        halves = halves[::-1] if self.flipped else halves
        still, others = np.arange(self.first), np.split(rest, 2)
        head = np.concatenate([still, halves[0], others[0], halves[1], others[1]])
        starts = np.arange(self.heads)[:, None] * self.head_dim
        if not self.gated:
            return (starts + head).reshape(-1)
        gates = 2 * starts + self.head_dim + np.arange(self.head_dim)
        return np.concatenate([gates.reshape(-1), (2 * starts + head).reshape(-1)])


@dataclasses.dataclass(frozen=True)
class ByHead:
    """Rows of a fused q|k|v that a checkpoint orders by heads, and we by part.

    Theirs are, for each of ``n_kv`` kv heads, the ``n_q`` q heads that read it, then k and v; ours
    are all q, all k, all v.  heads: the order of the rows of a head that RoPE turns.
    """

    n_kv: int
    n_q: int
    heads: Turned

    @property
    def block(self) -> int:
        return self.n_kv * (self.n_q + 2) * self.heads.head_dim

    def rows(self) -> np.ndarray:
        """For each of our rows the checkpoint's."""
        theirs = np.arange(self.block).reshape(self.n_kv, self.n_q + 2, -1)
        q, k, v = np.split(theirs, (self.n_q, self.n_q + 1), axis=1)
        order = dataclasses.replace(self.heads, heads=1).rows()
        return np.concatenate([q[..., order].reshape(-1), k[..., order].reshape(-1), v.reshape(-1)])


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Rows that a checkpoint orders by group and we order by part.

    parts: the number of rows of each part in a group.
    """

    groups: int
    parts: tuple[int, ...]

    @property
    def block(self) -> int:
        return self.groups * sum(self.parts)

    def rows(self) -> np.ndarray:
        theirs = np.arange(self.block).reshape(self.groups, -1)
        ends = np.cumsum(self.parts)[:-1]
        return np.concatenate([part.reshape(-1) for part in np.split(theirs, ends, axis=1)])


@dataclasses.dataclass(frozen=True)
class Tiled:
    """Rows of heads that a checkpoint counts across groups first, and we within a group.

    Behind ``first`` rows that keep their places, ``per_group`` heads of ``head_dim`` rows of each
    of ``groups`` groups: theirs are head 0 of every group, then head 1 (llama.cpp's value heads).
    """

    groups: int
    per_group: int
    head_dim: int
    first: int = 0

    @property
    def block(self) -> int:
        return self.first + self.groups * self.per_group * self.head_dim

    def rows(self) -> np.ndarray:
        """For each of our rows the checkpoint's."""
        theirs = np.arange(self.first, self.block).reshape(self.per_group, self.groups, -1)
        return np.concatenate([np.arange(self.first), theirs.swapaxes(0, 1).reshape(-1)])


@dataclasses.dataclass(frozen=True)
class Stacked:
    """The matrices ``[rows, width]`` of all experts in one tensor, or their biases ``[rows]``.

    alternate: whether gate and up rows take turns; ours are gate, then up.  transposed: whether the
    checkpoint has each matrix as ``[width, rows]``.
    """

    count: int
    block: int  # rows of a matrix
    alternate: bool = False
    transposed: bool = False

    def rows(self) -> np.ndarray:
        block_rows = np.arange(self.block)
        block_rows = block_rows.reshape(-1, 2).T.reshape(-1) if self.alternate else block_rows
        return (np.arange(self.count)[:, None] * self.block + block_rows).reshape(-1)


def piece_name(whole: str, first: int, total: int) -> str:
    """Return the name of rows of a tensor, from ``first`` on, of ``total`` rows in all.

    A ``TensorSource`` of this name reads and writes its rows only.
    """
    return f"{whole}[{first}/{total}]"


def piece_of(name: str) -> tuple[str, int, int] | None:
    """Return the arguments of ``piece_name``, None for the name of a whole tensor."""
    found = re.fullmatch(r"(.*)\[(\d+)/(\d+)\]", name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """A tensor as the checkpoint has it; the parameter's rows are ``scale * tensor + offset``, in
    our order of what RoPE turns, or of what is fused in groups.

    row_scales: further multipliers, (number of rows, multiplier) of each part in turn.
    columns: the same for the columns of a matrix (GGUF only).
    is_rate: the tensor has -exp(x) of the parameter's x (GGUF only).
    shape: in the parameter; ``stored_shape`` is the checkpoint's.
    """

    name: str
    shape: Shape
    scale: float = 1.0
    offset: float = 0.0
    turned: Turned | ByHead | Grouped | Tiled | Stacked | None = None
    columns: Tiled | None = None
    is_rate: bool = False
    row_scales: tuple[tuple[int, float], ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_scaled(self) -> bool:
        """Whether the parameter's values are others than the tensor's."""
        return (self.scale, self.offset) != (1.0, 0.0) or bool(self.row_scales)

    @property
    def is_folded(self) -> bool:
        """Whether a parameter differs from its tensor in values or in the order of rows."""
        return self.is_scaled or self.turned is not None

    def factor(self, axes: int = 2) -> np.ndarray:
        """The multiplier, float32: a number, or ``[rows, 1, ...]`` of so many axes."""
        if not self.row_scales:
            return np.float32(self.scale)  # type: ignore[return-value]
        counts, scales = zip(*self.row_scales, strict=True)
        by_row = np.repeat(np.asarray(scales, np.float32) * np.float32(self.scale), counts)
        return by_row.reshape(-1, *(1,) * (axes - 1))

    @property
    def is_transposed(self) -> bool:
        return isinstance(self.turned, Stacked) and self.turned.transposed

    @property
    def stored_shape(self) -> Shape:
        if not self.is_transposed:
            return self.shape
        *lead, rows, width = self.shape
        return (*lead, width, rows)

    @property
    def n_rows(self) -> int:
        """Rows that ``row_order`` orders: the first axis, or all experts' one after the other."""
        stack = self.turned
        return stack.count * stack.block if isinstance(stack, Stacked) else self.shape[0]

    def row_order(self, inverse: bool = False) -> np.ndarray | None:
        """For each row of the parameter the tensor's (inverse: the other way), None where they are
        the same."""
        if self.turned is None:
            return None
        rows, turned = np.arange(self.n_rows), self.turned.rows()
        rows[: turned.size] = turned
        return np.argsort(rows) if inverse else rows


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter of ``shape`` whose memory is its ``sources``' memory, one after the other.

    mean, std: of the normal distribution that it is drawn from.  is_float32: a file's values are
    kept in float32 whatever the weights' dtype, because rounding them would change a choice.
    Without sources it is a constant ``mean`` that no file has.
    """

    sources: tuple[TensorSource, ...]
    shape: Shape
    mean: float = 0.0
    std: float = 0.02
    is_float32: bool = False

    def __post_init__(self) -> None:
        size = sum(source.size for source in self.sources)
        assert not self.sources or size == math.prod(self.shape), self

    @property
    def is_constant(self) -> bool:
        """Whether no file has it."""
        return not self.sources

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Facts(TypedDict, total=False):
    """A ``Param``'s fields that have defaults."""

    mean: float
    std: float
    is_float32: bool


def tensor(name: str, *shape: int, fold: Options | None = None, **facts: Unpack[Facts]) -> Param:
    """A parameter that is one tensor; fold: of its ``TensorSource``."""
    return Param((TensorSource(name, shape, **(fold or {})),), shape, **facts)


def rows(parts: Sequence[TensorSource], **facts: Unpack[Facts]) -> Param:
    """A parameter that stacks tensors ``[rows_i, ...]``."""
    rest = parts[0].shape[1:]
    return Param(tuple(parts), (sum(part.shape[0] for part in parts), *rest), **facts)


def fused(
    name: str, parts: list[tuple[str, int, Options]], width: int, bias: bool
) -> dict[Path, Param]:
    """A product that reads the residual stream.

    parts: (tensor, rows, fields of its ``TensorSource``), and "bias_scale" where the bias has
    another scale than the weight.
    """
    table = {
        (name, "weight"): rows(
            [TensorSource(f"{n}.weight", (r, width), **_of_weight(f)) for n, r, f in parts]
        )
    }
    if bias:
        of_bias = [_of_bias(f) for *_, f in parts]
        table[name, "bias"] = rows(
            [
                TensorSource(f"{n}.bias", (r,), **f)
                for (n, r, _), f in zip(parts, of_bias, strict=True)
            ],
            std=0.0,
        )
    return table


def _of_weight(fold: Options) -> Options:
    """Without what only the bias has."""
    return {key: value for key, value in fold.items() if key != "bias_scale"}


def _of_bias(fold: Options) -> Options:
    """A bias is not transposed, and multipliers of the input do not reach it."""
    bias_fold = {key: value for key, value in fold.items() if not _is_transposed(value)}
    scale = bias_fold.pop("bias_scale", bias_fold.get("scale", 1.0))
    return bias_fold if scale == bias_fold.get("scale", 1.0) else {**bias_fold, "scale": scale}


def _is_transposed(order: object) -> bool:
    return isinstance(order, Stacked) and order.transposed


def transposed(rows: int) -> Options:
    """Return the ``TensorSource`` field of a matrix of so many rows that a file has transposed."""
    return {"turned": Stacked(1, rows, transposed=True)}


def written(
    name: str,
    source: str,
    d: int,
    width: int,
    bias: bool,
    scale: float = 1.0,
    is_transposed: bool = False,
) -> dict[Path, Param]:
    """A product that writes it; its bias is added once, to the sum."""
    fold: Options = {"scale": scale}
    order = transposed(d) if is_transposed else {}
    table = {(name, "weight"): tensor(f"{source}.weight", d, width, fold={**fold, **order})}
    if bias:
        table[name, "bias"] = tensor(f"{source}.bias", d, std=0.0, fold=fold)
    return table


def norm_rows(
    path: Path, name: str, width: int, norm: NormConfig, offset: float, scale: float = 1.0
) -> dict[Path, Param]:
    """Return the parameters of a norm of ``width`` features.

    The checkpoint's weight w stands for ``scale * (w + offset)``.  Where the file has none, as its
    empty name says, the weight is ``scale``.
    """
    if not norm.weight or not name:
        return {(*path, "weight"): Param((), (width,), mean=scale, std=0.0)}
    fold = {"scale": scale, "offset": scale * offset}
    table = {(*path, "weight"): tensor(f"{name}.weight", width, mean=1.0, std=0.0, fold=fold)}
    if norm.bias:
        table[*path, "bias"] = tensor(f"{name}.bias", width, std=0.0, fold={"scale": scale})
    return table
