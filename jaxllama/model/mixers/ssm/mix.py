"""Mamba-2: a state-space layer with one decay a head, as simple GLA computes it.

    z, x B C, dt = products of the layer's input
    x, B, C      = SiLU of a short causal convolution of x|B|C
    dt           = softplus(dt + dt_bias), between two bounds
    S_t          = exp(-exp(a_log) dt_t) S_{t-1} + B_t (dt_t x_t)^T        a head by itself
    y_t          = C_t S_t + skip x_t
    out          = o(norm(y * silu(z)))           or o(norm(y) * silu(z)), or without the norm

This is gated linear attention with q = C, k = B, v = dt x and scale 1. The scan is ``ssd``; the
step and the acceptance of drafts are GLA's kernels.  The heads of a group share B and C, and the
norm is over a group.  A row's state is one ``[state, head_dim]`` matrix a head and the
convolution's last ``taps - 1`` inputs.  No positions.

Source: arXiv 2405.21060; transformers' ``mamba2`` has the parameters' names.  dt is bounded in
steps, too, where transformers' own step leaves it unbounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxllama.config import LayerConfig
from jaxllama.model.mixers.gla import mix as gla_mix
from jaxllama.model.mixers.recurrent import (
    RecurrentState,
    convolve,
    empty_state,
    moving,
    steps,
)
from jaxllama.model.mixers.ssm.parameters import SSMOptions, options
from jaxllama.model.records import At, Chunk, Draft, Pieces, Step
from jaxllama.typing import Params
from pallas_kernels.fixed_sums import rounded, row_sums
from pallas_kernels.gla.op import gla, gla_step
from pallas_kernels.operands import Columns, short_repr
from pallas_kernels.ssd.op import ssd, ssd_as_gla

commit = gla_mix.commit  # a draft's tokens are k, v and log_decay, as GLA's


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SSMTokens:
    """T tokens of a draft that a state may accept later.

    k, log_decay: ``[B, T, H, state]``.  v: ``[B, T, H, head_dim]``.  conv: the inputs of the short
    convolution, ``[B, T, features]``.
    """

    kind: ClassVar[str] = "ssm"
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    conv: tuple[jax.Array, ...]

    __repr__ = short_repr


def init_state(
    layer: LayerConfig, rows: int, length: int, width: int, dtype: str
) -> RecurrentState:
    """Return the state before any token; it does not grow with a row's ``length``."""
    del length, width
    ssm = options(layer)
    sizes = ssm.n_heads, ssm.state, ssm.head_dim, ssm.taps
    return empty_state(rows, *sizes, (ssm.convolved,), dtype)


def inputs(layer: LayerConfig, p: Params) -> list[Params]:
    """Return the weights that multiply the layer's input."""
    del layer
    return [p["zxbcdt"]]


def mix(
    layer: LayerConfig,
    p: Params,
    projected: Sequence[Columns],
    state: RecurrentState | None,
    at: At,
) -> tuple[jax.Array, RecurrentState | SSMTokens | None]:
    """The products of ``inputs``, columns of ``[B, T, n]`` -> (heads ``[B, T, H head_dim]``,
    state); None, padding and tokens that are verified as in ``gla.mix``."""
    ssm = options(layer)
    ends = ssm.width, ssm.width + ssm.convolved
    z, xbc, dt = jnp.split(projected[0].value, ends, axis=-1)
    read = at.by_row(xbc)
    past = None if state is None or state.conv is None else state.conv[0]
    y, last = convolve(read, p["conv"]["weight"], past, at)
    if "bias" in p["conv"]:
        y = y + p["conv"]["bias"].astype(jnp.float32)
    x, *operands = _operands(ssm, p, jax.nn.silu(y).reshape(xbc.shape), dt, xbc.dtype)
    new: RecurrentState | SSMTokens | None = None
    if isinstance(at, Draft):
        assert state is not None
        q, k, v, log_decay = (at.by_row(operand) for operand in ssd_as_gla(*operands))
        o, _ = steps(_step, (q, k, v, log_decay), state.state, at.row_lengths(), at.exact)
        new = SSMTokens(k, v, log_decay, (read,))
    else:
        o, after = _recur(operands, at, state)
        new = None if after is None else RecurrentState(after, (last,))
    skip = p["decay"]["skip"].astype(jnp.float32)[:, None]
    y = o.reshape(x.shape).astype(jnp.float32) + rounded(skip * x)
    return _gated(ssm, p, y.reshape(z.shape), z), new


def _operands(
    ssm: SSMOptions, p: Params, xbc: jax.Array, dt: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """(x ``[B, T, H, D]`` in float32, then ``ssd``'s q, k, v and log_decay) of float32 xbc."""
    batch, n_new, _ = xbc.shape
    heads, groups = ssm.n_heads, ssm.n_groups
    x, b, c = jnp.split(xbc, (ssm.width, ssm.width + groups * ssm.state), axis=-1)
    x = x.reshape(batch, n_new, heads, ssm.head_dim)
    k, q = (operand.astype(dtype).reshape(batch, n_new, groups, -1) for operand in (b, c))
    bias, a_log = (p["decay"][name].astype(jnp.float32) for name in ("dt_bias", "a_log"))
    dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + bias), ssm.least_step, ssm.largest_step)
    return x, q, k, (x * dt[..., None]).astype(dtype), -jnp.exp(a_log) * dt


def _recur(
    operands: Sequence[jax.Array], at: Chunk | Step | Pieces, state: RecurrentState | None
) -> tuple[jax.Array, jax.Array | None]:
    """(heads ``[B, T, H, head_dim]``, state) of ``ssd``'s q, k, v and log_decay."""
    if isinstance(at, Chunk):
        begin: dict[str, Any] = {"return_state": state is not None}
        if state is not None:
            begin |= {"initial_state": state.state, "lengths": at.lengths}
        if at.segments is None:
            return ssd(*operands, **begin)
        # ``ssd`` has no segments.
        return gla(*ssd_as_gla(*operands), scale=1.0, segment_ids=at.segments, **begin)
    assert state is not None
    q, k, v, log_decay = by_head = ssd_as_gla(*operands)
    if isinstance(at, Pieces):
        return gla_mix.gla_pieces(by_head, at, state.state, scale=1.0)
    if jax.default_backend() == "cpu":  # the loop of a draft, for the bits of a draft
        return steps(_step, by_head, state.state, at.lengths, False)
    o, after = _step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], at.lengths > 0, state.state)
    return o[:, None], after


def _step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    moves: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """``gla_step`` of the rows that move, bool ``[B]``."""
    q, k, v, log_decay = moving(moves, q, k, v, log_decay)
    return gla_step(q, k, v, log_decay, state, scale=1.0)


def _gated(ssm: SSMOptions, p: Params, y: jax.Array, z: jax.Array) -> jax.Array:
    """Norm and gate of the heads ``y[B, T, H head_dim]``, float32; in z's dtype."""
    gate = jax.nn.silu(z.astype(jnp.float32))
    if ssm.norm != "norm_first":
        y = y * gate
    if ssm.norm != "none":
        groups = y.reshape(*y.shape[:-1], ssm.n_groups, -1)
        variance = row_sums(jnp.square(groups)) / groups.shape[-1]
        y = (groups * jax.lax.rsqrt(variance + ssm.norm_eps)).reshape(y.shape)
        y = y * p["y_norm"]["weight"].astype(jnp.float32)
    if ssm.norm == "norm_first":
        y = y * gate
    return y.astype(z.dtype)
