"""The gated delta rule: the mixer of Gated DeltaNet, Kimi Delta Attention and DeltaNet layers.

    q, k, v    = SiLU of short causal convolutions of products of x; q and k of length one a head
    beta       = beta_max * sigmoid(product)
    log_decay  = -exp(a_log) * softplus(product + dt_bias)      a head, or a key channel
    o          = gated_delta(q, k, v, log_decay, beta)          in decode one step
    y          = out(norm(o) * activation(gate(x)))             norm per head

A channel's decay and Kimi's output gate are products of two factors.  q, k and v go through one
convolution, whose last ``conv_size - 1`` inputs are part of the row's state.  No positions.

On Hopper, with one decay a head, one kernel (``gated_delta.token``) does all the work between the
projections and the output's product.  This holds for a decode step and for the verification of a
draft.  ``commit`` is one kernel for all layers.

Sources: arXiv 2406.06484, 2412.06464, 2510.26692; transformers' ``qwen3_next``,
flash-linear-attention's layers of these names.  Left out: other feature maps than SiLU, biases of
the convolutions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import DeltaConfig, LayerConfig
from jaxllama.model.linear import linear
from jaxllama.model.mixers.delta.parameters import INPUTS
from jaxllama.model.mixers.recurrent import (
    RecurrentState,
    empty_state,
    gated_norm,
    last_convolved,
    moving,
    scan_pieces,
    short_convolution,
    steps,
)
from jaxllama.model.records import At, Chunk, Draft, Pieces, Step
from jaxllama.typing import Options, Params
from pallas_kernels.gated_delta.commit import gated_delta_commit, own_commit
from pallas_kernels.gated_delta.op import gated_delta, gated_delta_step
from pallas_kernels.gated_delta.token import DeltaLayerTokens, gated_delta_token, own_token
from pallas_kernels.operands import Columns, short_repr


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaTokens:
    """T tokens of a draft that a state may accept later.

    k: ``[B, T, Hk, Dk]``.  v: ``[B, T, H, Dv]``.  log_decay: ``[B, T, H]`` or ``[B, T, H, Dk]``.
    beta: ``[B, T, H]``.  conv: the inputs of the short convolution, ``[B, T, features]``.
    """

    kind: ClassVar[str] = "delta"
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    conv: tuple[jax.Array, ...] = ()

    __repr__ = short_repr


def init_state(
    layer: LayerConfig, rows: int, length: int, width: int, dtype: str
) -> RecurrentState:
    """Return the state before any token; it does not grow with a row's ``length``."""
    del length, width
    delta: DeltaConfig = layer.mixer
    features = (_qkv_width(delta),)
    return empty_state(rows, delta.n_heads, delta.d_k, delta.d_v, delta.conv_size, features, dtype)


def inputs(layer: LayerConfig, p: Params) -> list[Params]:
    """Return the weights that multiply the layer's input."""
    return [p[name] for name in INPUTS if name in p]


def mix(
    layer: LayerConfig,
    p: Params,
    projected: Sequence[Columns],
    state: RecurrentState | None,
    at: At,
) -> tuple[jax.Array, RecurrentState | DeltaTokens | None]:
    """The projections of ``inputs``, columns of ``[B, T, n]`` -> (gated heads ``[B, T, H Dv]``,
    state); None, padding and tokens that are verified as in ``gla.mix``."""
    delta: DeltaConfig = layer.mixer
    names = (name for name in INPUTS if name in p)
    columns = dict(zip(names, projected, strict=True))
    fused = _fused(layer, p, columns, state, at)
    if fused is not None:
        return fused
    streams = {name: x.value for name, x in columns.items()}
    qkv, z = jnp.split(streams["qkvz"], (_qkv_width(delta),), axis=-1)
    batch, n_new, _ = qkv.shape
    read, conv = at.by_row(qkv), None
    if delta.conv_size:
        past = None if state is None or state.conv is None else state.conv[0]
        y, last = short_convolution(read, p["conv"]["weight"], past, at)
        qkv, conv = y.reshape(qkv.shape), (last,)
    else:
        qkv = jax.nn.silu(qkv)
    width = delta.n_k_heads * delta.d_k
    q, k, v = jnp.split(qkv, (width, 2 * width), axis=-1)
    q, k = (x.reshape(batch, n_new, delta.n_k_heads, delta.d_k) for x in (q, k))
    v = v.reshape(batch, n_new, delta.n_heads, delta.d_v)
    log_decay, beta = _gates(delta, p, streams)
    new: RecurrentState | DeltaTokens | None = None
    if isinstance(at, Draft):
        assert state is not None
        q, k, v, log_decay, beta = (at.by_row(x) for x in (q, k, v, log_decay, beta))
        count = at.row_lengths()
        o, _ = steps(_step, (q, k, v, log_decay, beta), state.state, count, at.exact)
        o = o.reshape(batch, 1, *o.shape[2:])
        new = DeltaTokens(k, v, log_decay, beta, (read,) if delta.conv_size else ())
    else:
        o, after = _recur((q, k, v, log_decay, beta), at, state)
        new = None if after is None else RecurrentState(after, conv)
    gate = z if delta.gate == "full" else None
    if delta.gate == "low_rank":
        gate = linear(streams["g_0"], p["g_1"])
    gate = None if gate is None else gate.reshape(o.shape)
    o = gated_norm(o, p["o_norm"]["weight"], delta.norm_eps, gate, delta.gate_activation)
    return o.reshape(batch, n_new, -1), new


def _fused(
    layer: LayerConfig, p: Params, columns: dict[str, Columns], state: RecurrentState | None, at: At
) -> tuple[jax.Array, RecurrentState | DeltaTokens] | None:
    """``mix`` of one token, or of a draft's, as one kernel, or None where there is none."""
    delta: DeltaConfig = layer.mixer
    batch = columns["qkvz"].rows.shape[0]
    if isinstance(at, Chunk | Pieces) or state is None or state.conv is None:
        return None
    plain = delta.decay == "head" and (
        delta.gate == "none" or (delta.gate, delta.gate_activation) == ("full", "silu")
    )
    if not plain:
        return None
    rows = [x._replace(rows=x.rows[:, 0]) for x in (columns["qkvz"], columns["ba"])]
    decay = p["decay"]["a_log"], p["decay"]["dt_bias"]
    weights = p["conv"]["weight"], decay, p["o_norm"]["weight"]
    before = state.state, state.conv[0]
    lengths = at.lengths if isinstance(at, Step) else None
    operands = DeltaLayerTokens(rows, *weights, lengths, *before)
    plan = own_token(operands)
    if plan is None:
        return None
    options: Options = {
        "eps": delta.norm_eps,
        "beta_max": delta.beta_max,
        "planned": plan,
    }
    o, *results = gated_delta_token(operands, **options)
    o = o.reshape(batch, 1, -1)
    if lengths is not None:
        after, last = results
        return o, RecurrentState(after, (last,))
    k, v, log_decay, beta, read = results
    return o, DeltaTokens(k, v, log_decay, beta, (read,))


def commit(
    states: Sequence[RecurrentState], tokens: Sequence[DeltaTokens], count: jax.Array, exact: bool
) -> Iterator[RecurrentState]:
    """``gla.commit`` of the delta rule."""
    both = list(zip(states, tokens, strict=True))
    layers = [
        (old.state, *(old.conv or ()), of.k, of.v, of.log_decay, of.beta, *of.conv)
        for old, of in both
    ]
    plain = all(len(layer) == 7 and layer[4].ndim == 3 for layer in layers)  # a decay a head
    plan = own_commit(layers, count) if plain else None
    if plan is not None:
        for state, last in zip(*gated_delta_commit(layers, count, planned=plan), strict=True):
            yield RecurrentState(state, (last,))
        return
    for state, of in both:
        operands = of.k, of.k, of.v, of.log_decay, of.beta
        _, after = steps(_step, operands, state.state, count, exact)
        yield RecurrentState(after, last_convolved(state, of, count))


def _qkv_width(delta: DeltaConfig) -> int:
    return 2 * delta.n_k_heads * delta.d_k + delta.n_heads * delta.d_v


def _gates(
    delta: DeltaConfig, p: Params, streams: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """(log_decay ``[B, T, H]`` or ``[B, T, H, Dk]``, beta ``[B, T, H]``), float32."""
    ba = streams["ba"].astype(jnp.float32)
    b = ba[..., : delta.n_heads]
    beta = delta.beta_max * jax.nn.sigmoid(b)
    if delta.decay == "none":
        return jnp.zeros_like(b), beta
    rate = jnp.exp(p["decay"]["a_log"].astype(jnp.float32))
    dt = p["decay"]["dt_bias"].astype(jnp.float32)
    if delta.decay == "head":
        return -rate * jax.nn.softplus(ba[..., delta.n_heads :] + dt), beta
    dt = dt + linear(streams["f_0"], p["f_1"]).astype(jnp.float32)
    dt = dt.reshape(*b.shape, delta.d_k)
    return -rate[:, None] * jax.nn.softplus(dt), beta


def _recur(
    operands: tuple[jax.Array, ...], at: Chunk | Step | Pieces, state: RecurrentState | None
) -> tuple[jax.Array, jax.Array | None]:
    """(heads ``[B, T, H, Dv]``, state) of q, k, v ``[B, T, H, D]``, log_decay and beta."""
    if isinstance(at, Step) and jax.default_backend() == "cpu":
        assert state is not None  # the loop of a draft, for the bits of a draft
        return steps(_step, operands, state.state, at.lengths, False)
    if isinstance(at, Step):
        assert state is not None
        q, k, v, log_decay, beta = (x[:, 0] for x in operands)
        o, after = _step(q, k, v, log_decay, beta, at.lengths > 0, state=state.state)
        return o[:, None], after
    if isinstance(at, Pieces):
        assert state is not None
        return _recur_pieces(operands, at, state.state)
    q, k, v, log_decay, beta = operands
    o, after = gated_delta(
        q,
        k,
        v,
        log_decay,
        beta,
        normalize_qk=True,
        initial_state=None if state is None else state.state,
        lengths=None if state is None else at.lengths,
        segment_ids=at.segments,
    )
    return o, None if state is None else after


def _recur_pieces(
    operands: tuple[jax.Array, ...], at: Pieces, before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``_recur`` of pieces."""
    q, k, v, log_decay, beta = operands

    def scan(state: jax.Array | None, v: jax.Array = v) -> tuple[jax.Array, jax.Array]:
        return gated_delta(
            q,
            k,
            v,
            log_decay,
            beta,
            normalize_qk=True,
            initial_state=state,
            lengths=at.lengths,
        )

    def through() -> Callable[[jax.Array, jax.Array], jax.Array]:
        # What a piece does to a state, it does to each column of the identity.
        batch, width, heads, _ = v.shape
        d_k = k.shape[-1]
        columns = jnp.broadcast_to(jnp.eye(d_k, dtype=jnp.float32), (batch, heads, d_k, d_k))
        matrices = at.every(scan(columns, jnp.zeros((batch, width, heads, d_k), v.dtype))[1])
        return lambda index, state: jnp.matmul(
            matrices[index], state, precision=lax.Precision.HIGHEST
        )

    return scan_pieces(scan, through, at, before)


def _step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    moves: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """``gated_delta_step`` of the rows that move, bool ``[B]``."""
    k, v, log_decay, beta = moving(moves, k, v, log_decay, beta)
    return gated_delta_step(q, k, v, log_decay, beta, state, normalize_qk=True)
