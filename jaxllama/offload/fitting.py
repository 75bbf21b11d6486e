"""Fits of measured seconds: a transfer's cost by bytes, and what overlapping does not hide.

    moving(tree, shares) -> bytes that getting a tree moves      fit_moving(samples) -> Moving
    contention(steps) -> share

Least squares are of relative errors and, but for ``contention``, non-negative, so that a latency of
microseconds and a prefill of seconds count alike and no rate is negative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllama.offload.accounting import split_bytes
from jaxllama.offload.policy import Shares


@dataclasses.dataclass(frozen=True)
class Moving:
    """Seconds of one transfer: latency, then seconds a byte by tier and of joining pieces."""

    latency: float
    host: float
    disk: float
    join: float

    def seconds(self, host: float, disk: float, joined: float) -> float:
        return self.latency + self.host * host + self.disk * disk + self.join * joined


def moving(tree: Any, shares: Shares) -> tuple[float, float, float]:
    """(host bytes, disk bytes, joined bytes) of getting a tree of shapes that ``shares`` split."""
    if shares.device >= 100:
        return 0.0, 0.0, 0.0
    part = split_bytes(tree, shares)
    whole = part.device + part.host + part.disk
    pure = 100 in (shares.host, shares.disk)
    return part.host, part.disk, 0.0 if pure else whole


def nnls(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative coefficients that explain ``seconds`` with the least relative squared error."""
    from scipy.optimize import nnls as solve

    matrix, target = np.asarray(rows, float), np.asarray(seconds, float)
    target = np.maximum(target, 1e-9)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    found, _ = solve(matrix / scale / target[:, None], np.ones(len(target)))
    return tuple(float(value) for value in found / scale)


def fit_moving(samples: Sequence[tuple[float, float, float, float]]) -> Moving:
    """Samples are (host, disk, joined bytes, seconds)."""
    return Moving(*nnls([(1.0, *amounts) for *amounts, _ in samples], [s for *_, s in samples]))


def contention(steps: Sequence[tuple[float, float, float]]) -> float:
    """The share of ``beside`` that explains (longest lanes, work beside them, seconds) of steps,
    with the least relative squared error."""
    pairs = [(beside / taken, 1 - longest / taken) for longest, beside, taken in steps]
    square = sum(x * x for x, _ in pairs)
    return max(0.0, sum(x * y for x, y in pairs) / square) if square else 0.0
