"""One token of a GLA layer between its projections and its output product, as one kernel.

    log_decay = max(logsigmoid(decay_weight low + decay_bias) / normalizer, clamp_min)
    S         <- exp(log_decay)[:, None] * S + k v^T
    o         = Dk ** -0.5 * q S
    y         = rms_norm(o, norm) * silu(gate)                        per head

What it computes is the module ``jaxllama.gla`` for one token; there is no other form of it here.
``unsupported`` says where the kernel does not go.  The projections come as columns of wider arrays,
as a product with several weights leaves them, and are read there.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import wants_kernel
from pallas_kernels.quantized_matmul_blocks import Columns

COLUMNS = 128  # value channels of a block
CLUSTER = 8  # blocks whose sums of squares can be brought together


def gla_token(
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    lengths: jax.Array,
    state: jax.Array,
    *,
    eps: float,
    normalizer: float,
    clamp_min: float | None,
) -> tuple[jax.Array, jax.Array]:
    """(y ``[B, H, Dv]``, new state): donate the float32 state ``[B, H, Dk, Dv]``.

    streams: q ``[B, H * Dk]``, k, v of ``Hkv`` heads, low ``[B, rank]`` and, where the layer has
        one, gate ``[B, H * Dv]``; bfloat16, as all weights.
    decay: weight ``[Hkv * Dk, rank]`` and bias ``[Hkv * Dk]``.  norm: ``[Dv]``.
    lengths: int32 ``[B]``; where it is 0 the row's state stays, and its y means nothing.
    Raises NotImplementedError, naming the fact, for what ``unsupported`` does not let pass.
    """
    if reason := unsupported(streams, decay, norm, state):
        raise NotImplementedError(f"gla_token: {reason}")
    from pallas_kernels import gla_step_mosaic

    rows = tuple(x.rows for x in streams)
    starts = tuple(x.start for x in streams)
    options = (float(eps), float(normalizer), clamp_min)
    return gla_step_mosaic.gla_token(
        rows, decay, norm, lengths, state, starts=starts, options=options
    )


def unsupported(
    streams: Sequence[Columns],
    decay: tuple[jax.Array, jax.Array],
    norm: jax.Array,
    state: jax.Array,
) -> str | None:
    """Why the kernel does not take this call, or None."""
    for x in (*(stream.rows for stream in streams), *decay, norm):
        if x.dtype != jnp.bfloat16:
            return f"operands of {x.dtype}; the kernel takes bfloat16"
    dk, dv = state.shape[2:]
    if dk not in (64, 128, 256):
        return f"Dk = {dk} is not 64, 128 or 256"
    if dv % COLUMNS or dv > CLUSTER * COLUMNS:
        return f"Dv = {dv} is not a multiple of {COLUMNS} up to {CLUSTER * COLUMNS}"
    if decay[0].shape[1] % 8:
        return f"a low rank of {decay[0].shape[1]}, not a multiple of 8"
    if any(x.start % 8 or x.rows.shape[1] % 8 for x in streams):
        return "columns that do not begin at multiples of 16 bytes"
    return None


def takes(*operands) -> bool:
    """Is ``gla_token`` of these operands to be called here?"""
    return wants_kernel(None) and unsupported(*operands) is None
