"""Fits of measured seconds: a transfer's cost by bytes, and the time that overlapping cannot hide.

    moving(tree, shares) -> bytes that loading a tree moves      fit_moving(samples) -> Moving
    contention(steps) -> shares        Calibration: all fitted values of a machine and a model

The least squares minimise relative errors with non-negative coefficients. A latency of microseconds
and a prefill of seconds thus count alike, and no rate is negative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxllama.executors.offloaded.room import split_bytes
from jaxllama.offload.policy import Shares
from jaxllama.planner.experts import ExpertCosts
from jaxllama.typing import Tree
from pallas_kernels.qtensor import packed_bytes
from pallas_kernels.rounding import NIBBLES


@dataclasses.dataclass(frozen=True)
class Moving:
    """Seconds of one transfer: a latency, then seconds a byte by tier, and of joining pieces."""

    latency: float
    host: float
    disk: float
    join: float

    def seconds(self, host: float, disk: float, joined: float) -> float:
        return self.latency + self.host * host + self.disk * disk + self.join * joined


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Seconds of loads, stores and computations on one machine (``calibrate``)."""

    load_weights: Moving
    join: tuple[float, ...]  # pieces into a unit's weights: overhead, a byte of the whole
    load_cache: Moving
    store_cache: Moving
    push_cache: float  # a step's token into the tail
    load_hidden: Moving
    store_hidden: Moving
    decode: tuple[float, ...]  # overhead, a row, a row and token of context; a layer
    prefill: tuple[float, ...]  # overhead, a row and token, a row and token^2; a layer
    head: tuple[float, ...]  # overhead, a row
    look_up: tuple[float, ...]  # a table that is not on the device: overhead, a token
    contention: tuple[float, ...]  # unhidden shares, by ``cost.KINDS``
    disk_cold: float  # seconds a byte when the system's page cache holds nothing of the file
    cpu: tuple[float, ...]  # as decode, with all of its attention on the CPU
    fetch: Moving  # values that a sparse step reads from an offloaded cache
    experts: ExpertCosts | None = None  # of a mixture, whose experts may lie one by one

    def cold(self) -> Calibration:
        """Return the calibration for models that do not fit the page cache."""
        names = ("load_weights", "load_cache", "load_hidden", "fetch")
        slower = {name: getattr(self, name) for name in names}
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(moving, disk=max(moving.disk, self.disk_cold))
                for name, moving in slower.items()
            },
        )


def moving(tree: Tree, shares: Shares) -> tuple[float, float, float]:
    """Return the (host bytes, disk bytes, joined bytes) of loading a tree of shapes under
    ``shares``.

    4-bit codes are unpacked where others are joined.
    """
    if shares.device >= 100:
        return 0.0, 0.0, 0.0
    part = split_bytes(tree, shares)
    pure = 100 in (shares.host, shares.disk)
    joined = sum(
        packed_bytes(leaf.size, leaf.dtype)
        for leaf in jax.tree.leaves(tree)
        if leaf.ndim >= 2 and (not pure or leaf.dtype.name in NIBBLES)
    )
    return part.host, part.disk, float(joined)


def nnls(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float] | np.ndarray,
    whole: np.ndarray | None = None,
) -> tuple[float, ...]:
    """Return non-negative coefficients that fit ``seconds`` with least relative squared error.

    whole: what the errors are in proportion to, unless to ``seconds`` themselves.
    """
    from scipy.optimize import nnls as solve

    matrix, target = np.asarray(rows, float), np.maximum(seconds, 1e-9)
    unit = target if whole is None else np.maximum(whole, 1e-9)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    found, _ = solve(matrix / scale / unit[:, None], target / unit)
    return tuple(float(value) for value in found / scale)


def fit_moving(samples: Sequence[tuple[float, float, float, float]]) -> Moving:
    """Return the fitted cost of a transfer from samples (host, disk, joined bytes, seconds)."""
    return Moving(*nnls([(1.0, *amounts) for *amounts, _ in samples], [s for *_, s in samples]))


def contention(steps: Sequence[tuple[float, Sequence[float], float]]) -> tuple[float, ...]:
    """Return the unhidden share of each kind, at most 1.

    steps: (longest, beside by kind, seconds) of each step, which the shares explain.
    """
    from scipy.optimize import lsq_linear

    taken = np.array([seconds for *_, seconds in steps])
    beside = np.array([besides for _, besides, _ in steps]) / taken[:, None]
    longest = np.array([first for first, *_ in steps]) / taken
    return tuple(lsq_linear(beside, 1 - longest, bounds=(0.0, 1.0)).x.tolist())
