"""Facts about a GPU for plans and benchmarks: its architecture, and rates and costs by model."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from pallas_kernels.architecture import (
    BY_NAME,
    CARDS,
    Architecture,
    Card,
    asked_target,
    nearest,
)
from pallas_kernels.dispatch import device_of


class KernelCost(NamedTuple):
    """Microseconds of one family of kernels: to start, and for a unit of each amount of work
    (``matmul.predict``)."""

    start: float
    serial: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Gpu:
    """sms: multiprocessors.  shared_bytes: of shared memory, for one block at most.
    arch: what kernels may use, within ``JAXLLAMA_TARGET``.

    copy_rate, sum_rate: bytes a second that a copy, and a sum, of device memory reach.
    product_rates: operations a second that XLA's products reach, by the operands' dtype.
    costs: of kernels and of XLA's forms by family, as ``bench.fit`` prints them.
    """

    sms: int
    shared_bytes: int
    copy_rate: float
    sum_rate: float
    product_rates: Mapping[str, float] = dataclasses.field(hash=False)
    costs: Mapping[str, KernelCost] = dataclasses.field(hash=False)
    arch: Architecture = BY_NAME["sm_90"]


H200 = Gpu(
    sms=132,
    shared_bytes=227 * 1024,
    copy_rate=4.3e12,
    sum_rate=4.2e12,
    product_rates={"int8": 1512e12, "float8_e4m3fn": 1570e12, "bfloat16": 799e12},
    costs={
        # Relative to the device's rate of a copy: ``benchmarks.kernels.experts_fit``.
        "experts blocks float": KernelCost(start=25.9, serial=(6.43, 0.932, 1.0)),
        "experts blocks int4": KernelCost(start=25.9, serial=(6.43, 1.93, 1.0)),
        "experts blocks int8": KernelCost(start=25.9, serial=(6.43, 1.2, 1.0)),
        "experts every codes": KernelCost(start=1.0, serial=(1.3, 1.0)),
        "experts every float": KernelCost(start=1.0, serial=(0.843, 1.0)),
        "experts gather float": KernelCost(start=2.05, serial=(0.959,)),
        "experts gather int4": KernelCost(start=2.05, serial=(5.66,)),
        "experts gather int8": KernelCost(start=2.05, serial=(1.44,)),
        "experts mosaic float": KernelCost(start=4.21, serial=(1.12,)),
        "experts mosaic int4": KernelCost(start=4.21, serial=(1.49,)),
        "experts mosaic int8": KernelCost(start=4.21, serial=(1.33,)),
        "experts tiles float": KernelCost(start=8.14, serial=(0.984,)),
        "experts tiles int4": KernelCost(start=8.14, serial=(1.16,)),
        "experts tiles int8": KernelCost(start=8.14, serial=(1.63,)),
        "experts summed int4": KernelCost(start=1.52, serial=(1.36,)),
        "between kernels": KernelCost(1.3),  # in a CUDA graph; not fitted
        # Not fitted: from instruction rates (``matmul.mid_rows.plan``) at 1.7 GHz; of GPUs without
        # wgmma, by whose numbers it is scaled.
        "mid int4": KernelCost(start=3.3, serial=(2.5, 2.7), shared=(0.238, 0.6)),
        "mid int8": KernelCost(start=3.3, serial=(2.5, 2.7), shared=(0.238, 0.6)),
        "mid int8 x 8 bits": KernelCost(start=3.3, serial=(2.5, 2.7), shared=(0.238, 0.6)),
        "pair float": KernelCost(
            start=3.28, serial=(0.0, 0.406, 0.382), shared=(0.179, 9.26, 127.0)
        ),
        "pair float8_e4m3fn": KernelCost(
            start=2.7, serial=(0.445, 1.08, 0.963), shared=(0.178, 6.63, 69.5)
        ),
        "pair int8": KernelCost(
            start=2.85, serial=(0.219, 0.92, 0.354), shared=(0.188, 5.95, 94.9)
        ),
        "row float": KernelCost(start=1.81, serial=(0.758, 0.0, 0.0617), shared=(0.214, 0.145)),
        "row int4": KernelCost(start=2.69, serial=(0.117, 0.0837, 0.0442), shared=(0.208, 0.284)),
        "row int8": KernelCost(start=2.14, serial=(0.42, 0.0, 0.0275), shared=(0.21, 0.245)),
        "tile float": KernelCost(
            start=1.89, serial=(0.655, 0.0125, 0.0197, 0.0), shared=(0.248, 4.51, 0.0)
        ),
        "tile int4": KernelCost(
            start=2.61, serial=(0.211, 0.046, 0.0156, 0.0), shared=(0.18, 3.21, 1.15)
        ),
        "tile int4 fold": KernelCost(
            start=2.52, serial=(0.0, 0.0318, 0.0, 1.84), shared=(0.193, 4.58, 2.04)
        ),
        "tile int8": KernelCost(
            start=2.29, serial=(0.172, 0.0634, 0.0135, 0.365), shared=(0.21, 5.35, 0.0)
        ),
        "tile int8 fold": KernelCost(
            start=2.31, serial=(0.957, 0.0151, 0.0137, 0.0), shared=(0.244, 5.86, 1.1)
        ),
        "weight int4": KernelCost(
            start=4.05, serial=(0.362, 2.59, 2.36, 0.0, 12.9, 9.54, 3.26), shared=(0.0361,)
        ),
        "weight int4 x 8 bits": KernelCost(
            start=3.93, serial=(0.949, 0.946, 2.36, 0.0, 8.61, 16.5, 0.0), shared=(0.123,)
        ),
        # Not fitted: from five shapes of Llama-3.1-8B at 64 rows (docs/lab/matmul.md).
        "weight int4 x int8": KernelCost(start=4.4, serial=(1.0, 1.5, 5.3)),
        "weight int8": KernelCost(
            start=4.4, serial=(0.545, 0.946, 7.57, 1.74, 12.3, 13.3, 0.107), shared=(0.0317,)
        ),
        "xla copy": KernelCost(start=5.61, serial=(0.0, 0.48), shared=(0.354, 6.11)),
        "xla float": KernelCost(start=4.01, serial=(2.72,), shared=(0.229, 4.82, 0.183)),
        "xla float8_e4m3fn": KernelCost(start=3.88, serial=(13.9,), shared=(0.264, 0.0, 0.0)),
        "xla int8": KernelCost(start=3.36, serial=(17.7,), shared=(0.264, 2.05, 0.0)),
        "xla row float": KernelCost(start=1.58, serial=(0.0686, 0.0), shared=(0.244,)),
        "xla row float8_e4m3fn": KernelCost(start=2.9, serial=(0.105, 0.0), shared=(0.294,)),
        "xla row int8": KernelCost(start=2.8, serial=(0.0162, 0.00198), shared=(0.341,)),
        "xla row sums": KernelCost(
            start=4.64, serial=(0.0, 6.38, 0.0744), shared=(0.32, 0.0, 7.14)
        ),
        "xla sums": KernelCost(
            start=4.84, serial=(0.255, 0.103, 12.6, 6.22, 3.66), shared=(0.253, 9.0)
        ),
        "xla w4a8 row": KernelCost(start=2.43, serial=(0.00912,), shared=(1.29,)),
        "xla words": KernelCost(start=2.88, serial=(0.23,), shared=(0.0, 248.0)),
        "xla around": KernelCost(start=0.0, serial=(1.81, 0.717, 0.782, 0.0), shared=()),
        "xla widened": KernelCost(start=0.0, serial=(3.12,), shared=()),
        "xla zeros": KernelCost(start=3.33, serial=(), shared=()),
    },
)
# The multiprocessors are an H200's.  The memory's rate was measured for a copy.
H100 = dataclasses.replace(H200, copy_rate=3.0e12, sum_rate=3.0e12)
TABLES = {"NVIDIA H200": H200, "NVIDIA H100 80GB HBM3": H100}  # by the device's kind
# Share of the sheet's bandwidth that a card without measured rates is taken to reach.
_SHEET_SHARE = 0.9


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

    A card without measured rates gets the sheet's bandwidth times 0.9, and the H200's costs scaled.
    An unknown card is the first one of its architecture, with the device's own multiprocessors.  A
    CPU, for which kernels are lowered only, stands for an H200, or for the first card of
    ``JAXLLAMA_TARGET``.
    """
    if (card := _planned_card.get()) is not None:
        return _facts(card, "", None, None, None)
    device, target = device_of(()), asked_target()
    if device.platform != "gpu":
        return _facts((target or BY_NAME["sm_90"]).cards[0].name, "", None, None, target)
    return _facts(
        getattr(device, "device_kind", ""),
        getattr(device, "compute_capability", "9.0"),
        getattr(device, "core_count", None),
        getattr(device, "shared_memory_per_block_optin", None),
        target,
    )


def block_bytes(sizes: Iterable[int], barriers: int = 0) -> int:
    """Return the bytes of shared memory that a launch takes for a block.

    sizes: bytes of its arrays, which Mosaic GPU puts at multiples of 1,024.  barriers: their count.
    """
    return sum(-(-size // 1024) * 1024 for size in sizes) + 8 * barriers


def lacking(*features: str) -> str | None:
    """Return which of an architecture's features kernels may not use here, as a reason, or None."""
    arch = gpu().arch
    missing = [name for name in features if not getattr(arch, name)]
    return f"{arch.name} has no {' and no '.join(missing)}" if missing else None


@functools.cache
def _facts(
    kind: str, capability: str, sms: int | None, shared: int | None, target: Architecture | None
) -> Gpu:
    card, arch = card_of(kind, capability)
    arch = arch if target is None else arch.limited(target)
    measured = TABLES.get(kind)
    if measured is None:
        rate = _SHEET_SHARE * card.bandwidth
        measured = dataclasses.replace(
            H200, sms=card.sms, copy_rate=rate, sum_rate=rate, costs=_scaled_costs(card)
        )
    return dataclasses.replace(
        measured,
        sms=sms or measured.sms,
        shared_bytes=min(shared or arch.shared_bytes, arch.shared_bytes),
        arch=arch,
    )


def _scaled_costs(card: Card) -> dict[str, KernelCost]:
    """Return the H200's costs on a card that was not measured.

    Megabytes of memory, the first of the amounts that overlap, take longer by the sheets'
    bandwidths, and the rest of these by the multiprocessors.  Costs of experts are relative to the
    rate of a copy already.
    """
    h200 = CARDS["NVIDIA H200"]
    slower = h200.bandwidth / card.bandwidth
    fewer = h200.sms / card.sms
    costs: dict[str, KernelCost] = {}
    for family, cost in H200.costs.items():
        if cost.shared and not family.startswith("experts"):
            first, *rest = cost.shared
            # A fit beside other amounts may give memory no time at all; a slower memory shows.
            first = max(first, 1e12 / H200.copy_rate)
            cost = cost._replace(shared=(first * slower, *(x * fewer for x in rest)))
        costs[family] = cost
    return costs


def card_of(kind: str, capability: str = "") -> tuple[Card, Architecture]:
    """Return a device's card and architecture.

    kind: the device's name.  A card that is not in the table is the first one of the nearest
    architecture at or below ``capability``.
    """
    if kind in CARDS:
        card = CARDS[kind]
        return card, next(arch for arch in BY_NAME.values() if card in arch.cards)
    arch = nearest(capability) or BY_NAME["sm_80"]
    return arch.cards[0], arch


def nearest_card(device: object) -> str | None:
    """Return the name of the card that an unknown GPU is planned as, or None if it is known."""
    kind = getattr(device, "device_kind", "")
    if kind in CARDS:
        return None
    return card_of(kind, getattr(device, "compute_capability", ""))[0].name
