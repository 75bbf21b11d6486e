"""Facts about a GPU for plans and benchmarks: its features, and the measured table of its card."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

from pallas_kernels.cards.architecture import (
    FEATURES,
    STAND_IN,
    Architecture,
    Features,
    asked_target,
    card_of,
)
from pallas_kernels.cards.table import CardTable, table_of
from pallas_kernels.dispatch import device_of

Tile = TypeVar("Tile")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gpu(Features, CardTable):
    """What kernels may use, within ``JAXLLAMA_TARGET``, and what was measured on the card.

    arch: the architecture's name.  sms: multiprocessors.  shared_bytes: of shared memory, for one
    block at most.  shared_per_sm, registers: of a multiprocessor.

    Two are equal if they are one object; ``gpu`` makes one for each device.
    """

    arch: str
    sms: int
    shared_bytes: int
    shared_per_sm: int
    registers: int


_planned_card: contextvars.ContextVar[str | None] = contextvars.ContextVar("_", default=None)


@contextlib.contextmanager
def planned_for(card: str) -> Generator[None, None, None]:
    """Within, ``gpu`` returns the facts of a card of the table, whatever the device is."""
    token = _planned_card.set(card)
    try:
        yield
    finally:
        _planned_card.reset(token)


def gpu() -> Gpu:
    """Return the facts of the device on which new arrays are placed.

    A card without a table gets the sheet's bandwidth times 0.9, and the measured card's costs
    scaled.  An unknown card is the first one of its architecture, with the device's own
    multiprocessors.  A CPU, for which kernels are lowered only, stands for the first card of
    ``STAND_IN``, or of ``JAXLLAMA_TARGET``.
    """
    if (card := _planned_card.get()) is not None:
        return gpu_named(card)
    device, target = device_of(()), asked_target()
    if device.platform != "gpu":
        return _facts((target or STAND_IN).cards[0].name, "", None, None, target)
    return _facts(
        getattr(device, "device_kind", ""),
        getattr(device, "compute_capability", "9.0"),
        getattr(device, "core_count", None),
        getattr(device, "shared_memory_per_block_optin", None),
        target,
    )


def gpu_named(card: str) -> Gpu:
    """Return the facts of a card of the table."""
    return _facts(card, "", None, None, None)


def sms() -> int:
    """Return the multiprocessors of ``gpu``."""
    return gpu().sms


def timed_tiles(family: str, kind: Callable[..., Tile]) -> Sequence[tuple[Tile, float]]:
    """Return the tiles of a family in the card's table, of a class, and the microseconds of each.

    A card without such tiles has none.
    """
    return _timed_tiles(gpu(), family, kind)


@functools.lru_cache(maxsize=256)
def _timed_tiles(
    device: Gpu, family: str, kind: Callable[..., Tile]
) -> Sequence[tuple[Tile, float]]:
    rows = device.tiles.get(family, ())
    return tuple((kind(**row.fields, sms=device.sms), row.us) for row in rows)


def tiles_of(family: str, kind: Callable[..., Tile]) -> list[Tile]:
    """Return the tiles of ``timed_tiles`` alone."""
    return [tile for tile, _ in timed_tiles(family, kind)]


def block_bytes(sizes: Iterable[int], barriers: int = 0) -> int:
    """Return the bytes of shared memory that a launch takes for a block.

    sizes: bytes of its arrays, which Mosaic GPU puts at multiples of 1,024.  barriers: their count.
    """
    return sum(-(-size // 1024) * 1024 for size in sizes) + 8 * barriers


def lacking(*features: str) -> str | None:
    """Return which of an architecture's features kernels may not use here, as a reason, or None."""
    device = gpu()
    missing = device.lacking(*features)
    return f"{device.arch} has no {' and no '.join(missing)}" if missing else None


@functools.cache
def _facts(
    kind: str, capability: str, sms: int | None, shared: int | None, target: Architecture | None
) -> Gpu:
    card, arch = card_of(kind, capability)
    arch = arch if target is None else arch.limited(target)
    table, sheet = table_of(card), {name: getattr(arch, name) for name in FEATURES}
    return Gpu(
        **vars(table),
        **sheet,
        arch=arch.name,
        sms=sms or card.sms,
        shared_bytes=min(shared or arch.shared_bytes, arch.shared_bytes),
        shared_per_sm=arch.shared_per_sm,
        registers=arch.registers,
    )
