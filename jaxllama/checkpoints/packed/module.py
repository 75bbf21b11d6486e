"""A packed checkpoint's view of the model: one Linear's tensors, and the parameter that they form.

A ``Module`` is one Linear of the checkpoint. Every access to a tensor is checked before anything of
its size is allocated. A format turns the module into a ``PackedPart``, or None if it is in floats.
The parts of a fused parameter, one after the other, form a ``Leaf``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from jaxllama.checkpoints import safetensors as safetensors_file
from jaxllama.checkpoints.safetensors import SafetensorsEntry, SafetensorsFile
from jaxllama.errors import JaxLlamaError
from jaxllama.model.param import Param, tensor
from jaxllama.typing import Tree

if TYPE_CHECKING:
    from pallas_kernels.qtensor import QTensor, RowBlocks

Tensors = Mapping[str, tuple[SafetensorsFile, SafetensorsEntry]]
Floats = Callable[[Param], np.ndarray]
FLOATS = ("F16", "BF16", "F32")
_CODES = ("weight", "weight_packed", "qweight")


@dataclasses.dataclass(frozen=True)
class Module:
    """One Linear ``[out, in]`` of a checkpoint; its tensors are named relative to it: "qweight"."""

    name: str
    shape: tuple[int, ...]
    files: Tensors

    def has(self, tensor: str) -> bool:
        return f"{self.name}.{tensor}" in self.files

    def dtype(self, tensor: str) -> str:
        return self.files[f"{self.name}.{tensor}"][1].dtype

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return self.files[f"{self.name}.{tensor}"][1].shape

    def error(self, tensor: str, why: str) -> JaxLlamaError:
        file, info = self.files[f"{self.name}.{tensor}"]
        return file.error(f"tensor {info.name!r}: {why}")

    def expect(self, tensor: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        """Raise JaxLlamaError unless the tensor exists with one of these dtypes and shapes."""
        if not self.has(tensor):
            raise JaxLlamaError(f"missing tensor {f'{self.name}.{tensor}'!r}")
        found, dtype = self.shape_of(tensor), self.dtype(tensor)
        if dtype not in dtypes:
            raise self.error(tensor, f"dtype {dtype} is not {' or '.join(dtypes)}")
        if found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(tensor, f"shape {list(found)}, but the config wants {wanted}")

    def expect_groups(self, tensor: str, groups: int) -> np.ndarray:
        """Return the group of each column (act-order), read and checked."""
        self.expect(tensor, ("I32", "I64"), (self.shape[1],))
        found = self.read(tensor)
        if found.min() < 0 or found.max() >= groups:
            raise self.error(
                tensor, f"groups {found.min()} to {found.max()}, but there are only {groups}"
            )
        return found.astype(np.int32)

    def read(self, tensor: str) -> np.ndarray:
        file, info = self.files[f"{self.name}.{tensor}"]
        return file.read(info.name)  # the file's own name, which ``hf.load`` may have changed

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a config may mean this Linear: ours, and its file's."""
        kind = next((kind for kind in _CODES if self.has(kind)), None)
        if kind is None:
            return (self.name,)
        info = self.files[f"{self.name}.{kind}"][1]
        return self.name, info.name.removesuffix(f".{kind}")

    def part(self, read: Callable[[], QTensor], *tensors: str) -> PackedPart:
        return PackedPart(
            tuple(f"{self.name}.{tensor}" for tensor in tensors if self.has(tensor)), read
        )


@dataclasses.dataclass(frozen=True)
class PackedPart:
    """Some rows of a parameter: the names of their tensors, and a function that reads them."""

    names: tuple[str, ...]
    read: Callable[[], QTensor] | Param  # a Param for plain floats


def plain(name: str, shape: tuple[int, ...], files: Tensors) -> PackedPart:
    """Return the part of a checked tensor of floats."""
    if name not in files:
        raise JaxLlamaError(f"missing tensors: {name}")
    file, info = files[name]
    if info.shape != shape:
        raise file.error(
            f"tensor {name!r}: shape {list(info.shape)}, but the config wants {list(shape)}"
        )
    if info.dtype not in safetensors_file.FLOATS:
        raise file.error(f"tensor {name!r}: dtype {info.dtype} is no floating-point type")
    return PackedPart((name,), tensor(name, *shape))


Reader = Callable[[Module], PackedPart | None]


def fuse(parts: list[QTensor | np.ndarray]) -> QTensor | RowBlocks | np.ndarray:
    """Join the rows of ``parts``: one QTensor if all are stored alike, otherwise RowBlocks.

    Neighbours that are stored alike become one block. Zeros that are all 0 are dropped.
    """
    from pallas_kernels.qtensor import QTensor, RowBlocks

    blocks = []
    for _, run in itertools.groupby(parts, key=_storage):
        # Parts that are stored alike are all floats, or all codes.
        like: list[QTensor] = []
        floats: list[np.ndarray] = []
        for part in run:
            if isinstance(part, QTensor):
                like.append(part)
            else:
                floats.append(part)
        if floats:
            blocks.append(np.concatenate(floats) if len(floats) > 1 else floats[0])
            continue
        first = like[0]
        if len(like) == 1:
            dropped = first.zero is not None and not first.zero.any()
            blocks.append(dataclasses.replace(first, zero=None) if dropped else first)
            continue
        zeros = [np.zeros_like(w.scale, np.int8) if w.zero is None else w.zero for w in like]
        zero = np.concatenate(zeros)  # all integers, or all floats
        units = [w.unit for w in like if w.unit is not None]
        blocks.append(
            dataclasses.replace(
                first,
                q=np.concatenate([w.q for w in like]),
                scale=np.concatenate([w.scale for w in like]),
                unit=np.concatenate(units) if units else None,
                zero=zero if zero.any() else None,
                blocked=sum(w.shape[0] for w in like) if all(w.has_blocks for w in like) else None,
            )
        )
    return blocks[0] if len(blocks) == 1 else RowBlocks(tuple(blocks))


def _storage(w: QTensor | np.ndarray) -> tuple[object, ...]:
    """Return the properties that two blocks must share to become one."""
    from pallas_kernels.qtensor import QTensor

    if not isinstance(w, QTensor):
        return (w.dtype,)
    beside = [None if leaf is None else leaf.tobytes() for leaf in (w.columns, w.input_scale)]
    floating = w.zero is not None and w.zero.dtype != np.int8
    forms = w.q.dtype, w.scale.dtype, w.scale.shape[1], w.unit is None
    return (*forms, floating, w.activations, *beside)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter of a packed checkpoint: its parts, and the function that joins them."""

    parts: tuple[PackedPart, ...]
    join: Callable[[list[Tree]], Tree] = fuse

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)

    def read(self, floats: Floats) -> QTensor | RowBlocks | np.ndarray:
        return self.join(
            [
                floats(part.read) if isinstance(part.read, Param) else part.read()
                for part in self.parts
            ]
        )
