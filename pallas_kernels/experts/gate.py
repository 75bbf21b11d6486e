"""The gated activations that ``grouped_matmul`` applies: ``activation(gate) * up``.

    "silu", "gelu", "gelu_tanh"      the activation of the first half, times the second
    ClampedGate(limit, alpha)        gpt-oss: both halves clamped,
                                     (up + 1) * gate * sigmoid(alpha gate)

Everything is float32.  Sources: GLU variants (arXiv 2002.05202), gpt-oss (arXiv 2508.10925).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.rows.activations import ACTIVATIONS, GATES


@dataclasses.dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's SwiGLU, ``(up + 1) * gate * sigmoid(alpha * gate)``, for ``gated=``.

    Parameters
    ----------
    limit : float
        The gate is clamped to at most ``limit`` and ``up`` to [-limit, limit].
    alpha : float
        Factor inside of the sigmoid.

    Raises
    ------
    ValueError
        If ``limit`` is not positive.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"ClampedGate: limit = {self.limit!r}: must be positive")


Gate = Literal["silu", "gelu", "gelu_tanh"] | ClampedGate


def check_gate(op: str, gated: Gate | None, width: int) -> None:
    """Raises ValueError for an unknown gate, or an odd number of rows of the weight."""
    if gated is None:
        return
    if not isinstance(gated, ClampedGate) and gated not in GATES:
        raise ValueError(
            f"{op}: gated {gated!r} is not one of {', '.join(GATES)}, a ClampedGate or None"
        )
    if width % 2:
        raise ValueError(f"{op}: the {width} rows of an expert are not gate and up")


def apply_gate(gate_up: jax.Array, gated: Gate) -> jax.Array:
    """float32 ``gate_up[..., 2F]``, gate then up, to ``[..., F]``."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    if not isinstance(gated, ClampedGate):
        return ACTIVATIONS[gated](gate) * up
    gate = jnp.minimum(gate, gated.limit)
    up = jnp.clip(up, -gated.limit, gated.limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(gated.alpha * gate)
