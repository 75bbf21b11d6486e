"""The features that each generation of NVIDIA GPUs offers to a kernel, and its cards: one table.

Plans read it through ``device.gpu()``.  What was measured on a card stands in its file of the
folder ``cards``.  The environment variable ``JAXLLAMA_TARGET=sm_80`` limits
kernels to what that architecture offers. The kernels of older or smaller cards can then run, and be
measured, on a newer one.

Sources: the CUDA programming guide's table of compute capabilities (shared memory, threads), the
PTX ISA (instructions by target), NVIDIA's data sheets (multiprocessors, L2, memory, bandwidth).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

TARGET = "JAXLLAMA_TARGET"
KIB = 1024
RESERVED = KIB  # bytes of a multiprocessor's shared memory that a block cannot have
OTHER_JAX = 0, 12, 0  # the first that assembles kernels for other GPUs than Hopper's


@dataclasses.dataclass(frozen=True)
class Card:
    """The data sheet of one card.

    name: as the driver says it, and so jax's ``device_kind``.  sms: multiprocessors.
    bandwidth: bytes a second of device memory.  l2, memory: bytes.
    """

    name: str
    sms: int
    bandwidth: float
    l2: int
    memory: int


def _card(name: str, sms: int, gb_per_s: float, l2_mb: int, gb: int) -> Card:
    return Card(name, sms, gb_per_s * 1e9, l2_mb << 20, gb << 30)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """What kernels may use.

    clusters: blocks of a cluster read and write one another's shared memory.
    bulk_copies: the copy engine, and barriers that count its bytes.
    dependent_launch: a kernel may begin before the one before it has ended.
    pair_arithmetic: one instruction adds, subtracts or multiplies a pair of bfloat16.
    float8: one instruction converts to and from e4m3.
    wgmma, tcgen05: products of a warpgroup, of Hopper and of the server Blackwell.
    """

    clusters: bool = False
    bulk_copies: bool = False
    dependent_launch: bool = False
    pair_arithmetic: bool = False
    float8: bool = False
    wgmma: bool = False
    tcgen05: bool = False

    def lacking(self, *features: str) -> list[str]:
        """Return those of the features that kernels may not use."""
        return [name for name in features if not getattr(self, name)]


FEATURES = tuple(field.name for field in dataclasses.fields(Features))


@dataclasses.dataclass(frozen=True)
class Architecture(Features):
    """One architecture.

    name: as the assembler has it.  capability: (major, minor).
    shared_bytes: shared memory of one block at most; a multiprocessor has ``RESERVED`` more.
    threads: of a multiprocessor.  registers: 32-bit registers of a multiprocessor.
    first_jax: the first version of jax that assembles kernels for it.
    cards: the first is the one that an unknown card is planned as.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    threads: int = 2048
    registers: int = 65536
    first_jax: tuple[int, int, int] = OTHER_JAX
    cards: tuple[Card, ...] = ()

    @property
    def shared_per_sm(self) -> int:
        return self.shared_bytes + RESERVED

    def limited(self, by: Architecture) -> Architecture:
        """Return what both offer; the name says both."""
        both = {name: getattr(self, name) and getattr(by, name) for name in FEATURES}
        return dataclasses.replace(
            self,
            name=by.name if self.name == by.name else f"{by.name} on {self.name}",
            shared_bytes=min(self.shared_bytes, by.shared_bytes),
            threads=min(self.threads, by.threads),
            **both,
        )


def _with_hoppers(name: str, capability: tuple[int, int], **own: Any) -> Architecture:
    """Return an architecture with the features that Hopper and what came later share."""
    shared = ("clusters", "bulk_copies", "dependent_launch", "pair_arithmetic", "float8")
    return Architecture(name=name, capability=capability, **dict.fromkeys(shared, True), **own)


_SMALL: dict[str, Any] = {"shared_bytes": 99 * KIB, "threads": 1536}
_LARGE: dict[str, Any] = {"shared_bytes": 227 * KIB}

ARCHITECTURES = (
    Architecture(
        "sm_80",
        (8, 0),
        163 * KIB,
        cards=(
            _card("NVIDIA A100-SXM4-80GB", 108, 2039, 40, 80),
            _card("NVIDIA A100-SXM4-40GB", 108, 1555, 40, 40),
            _card("NVIDIA A100 80GB PCIe", 108, 1935, 40, 80),
            _card("NVIDIA A100-PCIE-40GB", 108, 1555, 40, 40),
            _card("NVIDIA A30", 56, 933, 24, 24),
        ),
    ),
    Architecture(
        "sm_86",
        (8, 6),
        **_SMALL,
        cards=(
            _card("NVIDIA GeForce RTX 3090", 82, 936, 6, 24),
            _card("NVIDIA GeForce RTX 3090 Ti", 84, 1008, 6, 24),
            _card("NVIDIA GeForce RTX 3080", 68, 760, 5, 10),
            _card("NVIDIA GeForce RTX 3080 Ti", 80, 912, 6, 12),
            _card("NVIDIA GeForce RTX 3060", 28, 360, 3, 12),
            _card("NVIDIA RTX A6000", 84, 768, 6, 48),
            _card("NVIDIA A40", 84, 696, 6, 48),
            _card("NVIDIA A10", 72, 600, 6, 24),
            _card("NVIDIA A10G", 80, 600, 6, 24),
        ),
    ),
    Architecture("sm_87", (8, 7), 163 * KIB, 1536, cards=(_card("Orin", 16, 204, 4, 64),)),
    Architecture(
        "sm_89",
        (8, 9),
        **_SMALL,
        float8=True,
        cards=(
            _card("NVIDIA L40S", 142, 864, 96, 48),
            _card("NVIDIA GeForce RTX 4090", 128, 1008, 72, 24),
            _card("NVIDIA GeForce RTX 4080", 76, 717, 64, 16),
            _card("NVIDIA GeForce RTX 4080 SUPER", 80, 736, 64, 16),
            _card("NVIDIA GeForce RTX 4070", 46, 504, 36, 12),
            _card("NVIDIA GeForce RTX 4070 Ti SUPER", 66, 672, 48, 16),
            _card("NVIDIA GeForce RTX 4060 Ti", 34, 288, 32, 16),
            _card("NVIDIA RTX 6000 Ada Generation", 142, 960, 96, 48),
            _card("NVIDIA L40", 142, 864, 96, 48),
            _card("NVIDIA L4", 58, 300, 48, 24),
        ),
    ),
    _with_hoppers(
        "sm_90",
        (9, 0),
        **_LARGE,
        wgmma=True,
        first_jax=(0, 11, 2),
        cards=(
            _card("NVIDIA H200", 132, 4800, 50, 141),
            _card("NVIDIA H100 80GB HBM3", 132, 3350, 50, 80),
            _card("NVIDIA H100 PCIe", 114, 2039, 50, 80),
            _card("NVIDIA H100 NVL", 132, 3938, 60, 94),
            _card("NVIDIA GH200 480GB", 132, 4023, 50, 96),
            _card("NVIDIA H20", 78, 4023, 60, 96),
        ),
    ),
    _with_hoppers(
        "sm_100",
        (10, 0),
        **_LARGE,
        tcgen05=True,
        cards=(
            _card("NVIDIA B200", 148, 8000, 126, 180),
            _card("NVIDIA GB200", 148, 8000, 126, 184),
        ),
    ),
    _with_hoppers(
        "sm_103",
        (10, 3),
        **_LARGE,
        tcgen05=True,
        cards=(_card("NVIDIA B300", 148, 8000, 126, 268),),
    ),
    _with_hoppers(
        "sm_120",
        (12, 0),
        **_SMALL,
        cards=(
            _card("NVIDIA GeForce RTX 5090", 170, 1792, 96, 32),
            _card("NVIDIA GeForce RTX 5080", 84, 960, 64, 16),
            _card("NVIDIA GeForce RTX 5070 Ti", 70, 896, 48, 16),
            _card("NVIDIA GeForce RTX 5070", 48, 672, 48, 12),
            _card("NVIDIA GeForce RTX 5060 Ti", 36, 448, 32, 16),
            _card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 1792, 128, 96),
            _card("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 1597, 128, 96),
        ),
    ),
    _with_hoppers("sm_121", (12, 1), **_SMALL, cards=(_card("NVIDIA GB10", 48, 273, 24, 128),)),
)
BY_NAME = {one.name: one for one in ARCHITECTURES}
CARDS = {card.name: card for one in ARCHITECTURES for card in one.cards}
MEASURED = CARDS["NVIDIA H200"]  # its times, scaled, are those of a card without a table
STAND_IN = BY_NAME["sm_90"]  # that of a machine without a GPU, where kernels are lowered only


def card_of(kind: str, capability: str = "") -> tuple[Card, Architecture]:
    """Return a device's card and architecture.

    kind: the device's name.  A card that is not in the table is the first one of the nearest
    architecture at or below ``capability``.
    """
    if kind in CARDS:
        card = CARDS[kind]
        return card, next(arch for arch in ARCHITECTURES if card in arch.cards)
    arch = nearest(capability) if capability else None
    arch = arch or ARCHITECTURES[0]
    return arch.cards[0], arch


def nearest_card(device: object) -> str | None:
    """Return the name of the card that an unknown GPU is planned as, or None if it is known."""
    kind = getattr(device, "device_kind", "")
    if kind in CARDS:
        return None
    return card_of(kind, getattr(device, "compute_capability", ""))[0].name


def nearest(capability: str) -> Architecture | None:
    """Return the architecture of a compute capability such as "8.9".

    One that is not in the table gets the nearest below it. One below the table, or another maker's
    ("gfx942"), gets None.
    """
    if not capability[:1].isdigit():
        return None
    own = tuple(map(int, capability.split(".")))
    return next((one for one in reversed(ARCHITECTURES) if one.capability <= own), None)


def asked_target() -> Architecture | None:
    """Return the architecture that ``JAXLLAMA_TARGET`` names, or None if it is not set.

    Raises ValueError for a name that is not in the table.
    """
    name = os.environ.get(TARGET)
    if not name:
        return None
    if name not in BY_NAME:
        raise ValueError(f"{TARGET}={name} is none of {', '.join(BY_NAME)}")
    return BY_NAME[name]
