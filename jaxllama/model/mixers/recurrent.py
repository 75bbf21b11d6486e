"""Parts that the mixers with a recurrent state share: GLA, the delta rule, Mamba-2, convolutions.

y, last  = convolve(x, weight, past, at)              a short convolution
o, state = steps(one, operands, state, count, exact)  a decoder's steps, token by token
y        = gated_norm(o, weight, eps, gate)           the norm after the recursion
o, after = scan_pieces(scan, through, at, before)     a row that is spread over devices
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxllama.model.mixers.common import QUANTIZED_CACHE
from jaxllama.model.records import At, Pieces
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis
from jaxllama.typing import Tree
from pallas_kernels.fixed_sums import rounded
from pallas_kernels.operands import short_repr
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.transform import equally_varying


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """The state of a GLA or delta rule layer.

    state: float32 ``[B, H, Dk, Dv]``.
    conv: with short convolutions, the last ``W - 1`` inputs of each stream,
    ``[B, W - 1, features]``.  GLA has the streams q, k and v; the delta rule has one.
    """

    state: jax.Array
    conv: tuple[jax.Array, ...] | None = None

    __repr__ = short_repr

    def specs(self, rows: RowAxis) -> RecurrentState:
        """How it is split on a mesh: rows over the axis ``rows``, heads over the model's."""
        conv: Tree = jax.tree.map(lambda _: P(rows, None, MODEL_AXIS), self.conv)
        state: Tree = P(rows, MODEL_AXIS)
        return RecurrentState(state, conv)


class Convolved(Protocol):
    """Tokens of a draft; conv: their inputs of the short convolutions, ``[B, T, features]``."""

    @property
    def conv(self) -> tuple[jax.Array, ...]: ...


def empty_state(
    rows: int, heads: int, d_k: int, d_v: int, taps: int, features: Sequence[int], dtype: str
) -> RecurrentState:
    """Return the state before any token.

    taps: width W of the convolutions, 0 for none.  features: of each convolution.
    dtype: that of the cache.  With a quantized cache the convolutions' few inputs are float32.
    """
    state = jnp.zeros((rows, heads, d_k, d_v), jnp.float32)
    if not taps:
        return RecurrentState(state)
    dtype = "float32" if dtype in QUANTIZED_CACHE else dtype
    return RecurrentState(state, tuple(jnp.zeros((rows, taps - 1, n), dtype) for n in features))


def moving(moves: jax.Array, *operands: jax.Array) -> Iterator[jax.Array]:
    """Return operands ``[B, ...]`` with zeros for the rows that stand still, so nothing decays and
    nothing is added. A step can then update the state in place, without a second copy of it.  They
    are arrays then, too, and no slices of one, which a kernel refuses where they are not aligned.
    """
    for x in operands:
        yield jnp.where(moves.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def last_convolved(
    state: RecurrentState, tokens: Convolved, count: jax.Array
) -> tuple[jax.Array, ...] | None:
    """Return the convolutions' last inputs after the first ``count[B]`` of the tokens."""
    if state.conv is None:
        return None
    read = zip(state.conv, tokens.conv, strict=True)
    return tuple(last_inputs(past, x, count) for past, x in read)


def steps(
    advance: Callable[..., tuple[jax.Array, jax.Array]],
    operands: Sequence[jax.Array],
    state: jax.Array,
    count: jax.Array,
    exact: bool,
) -> tuple[jax.Array, jax.Array]:
    """A decoder's steps, of operands ``[B, T, ...]`` the first ``count[B]``: (``o [B, T, H, Dv]``,
    state).  advance: ``advance(*operands at t, moves[B], state=)`` -> (o, state).

    A CPU takes them in a loop, also a single one (``_loop``). A GPU fuses the chain and passes over
    the state once. exact: in a step of B * T rows, most of them empty.
    """
    is_cpu, (batch, width) = jax.default_backend() == "cpu", operands[0].shape[:2]
    if exact and is_cpu:
        *operands, state, count = (
            jnp.pad(x, ((0, batch * (width - 1)), *((0, 0),) * (x.ndim - 1)))
            for x in (*operands, state, count)
        )
    if is_cpu:
        o, state = _loop(advance, [jnp.moveaxis(x, 1, 0) for x in operands], state, count)
        return jnp.moveaxis(o, 0, 1)[:batch], state[:batch]

    def step(state: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        o, state = advance(*now, state=state)
        return state, o

    moves = jnp.arange(width, dtype=count.dtype)[:, None] < count[None, :]
    tokens = *(jnp.moveaxis(x, 1, 0) for x in operands), moves
    state, o = jax.lax.scan(step, state, tokens, unroll=True)
    return jnp.moveaxis(o, 0, 1), state


def _loop(
    advance: Callable[..., tuple[jax.Array, jax.Array]],
    operands: Sequence[jax.Array],
    state: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """``steps`` of operands ``[T, B, ...]``: (``o [T, B, H, Dv]``, state); o is 0 behind the
    longest row.

    XLA's fusions on a CPU decide which products and sums become one rounding. A loop is a border
    for them, so a token has the same bits alone and in a draft. The compiler must neither unroll a
    loop of one round nor move the decay's exponential out of it. So the number of rounds is not
    known to it, and which rows move depends on the round.
    """
    shapes = jax.eval_shape(advance, *(x[0] for x in operands), count > 0, state=state)
    o = jnp.zeros((operands[0].shape[0], *shapes[0].shape), shapes[0].dtype)
    o, state, *operands = equally_varying((o, state, *operands))

    def body(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        o, state = carry
        now = (jax.lax.dynamic_index_in_dim(x, t, keepdims=False) for x in operands)
        new, state = advance(*now, t < count, state=state)
        return jax.lax.dynamic_update_index_in_dim(o, new, t, 0), state

    longest = jnp.max(count)
    return jax.lax.fori_loop(jnp.zeros_like(longest), longest, body, (o, state))


@functools.partial(jax.checkpoint, static_argnums=(2, 4))
def gated_norm(
    o: jax.Array, weight: jax.Array, eps: float, gate: jax.Array | None, activation: str
) -> jax.Array:
    """Return ``rms_norm(o) * activation(gate)`` over the last axis, in o's dtype.

    It is computed in float32 with one cast. A backward pass keeps o and gate as they are, and
    computes the float32 arrays between them and the result again. activation: "silu" or "sigmoid".
    """
    y = rms_norm(o, weight, eps, out_dtype=jnp.float32)
    if gate is not None:
        y = y * getattr(jax.nn, activation)(gate.astype(jnp.float32))
    return y.astype(o.dtype)


def short_convolution(
    x: jax.Array, weight: jax.Array, past: jax.Array | None, at: At
) -> tuple[jax.Array, jax.Array]:
    """``silu`` of ``convolve`` in x's dtype, and the last inputs."""
    y, last = convolve(x, weight, past, at)
    return jax.nn.silu(y).astype(x.dtype), last


def convolve(
    x: jax.Array, weight: jax.Array, past: jax.Array | None, at: At
) -> tuple[jax.Array, jax.Array]:
    """A causal depthwise convolution over time: ``y_t = sum_w weight[:, w] * x_{t - W + 1 + w}``.

    ``x[B, T, features]`` by rows of the cache, ``weight[features, W]``, past
    ``[B, W - 1, features]`` (None: zeros) -> (float32 y, the last W - 1 inputs after each row's
    valid ones).  Inputs of another segment count as zeros.  A piece has at least W - 1 tokens.
    """
    if not isinstance(at, Pieces):
        return _causal(x, weight, past, at.row_lengths(), at.segments)
    assert past is not None
    taps, width = past.shape[1], x.shape[1]
    if width < taps:
        raise ValueError(f"pieces of {width} tokens: a convolution reads the {taps} before a token")
    ends = at.every(x[:, width - taps :].astype(past.dtype))
    before = at.local(jnp.concatenate([past[None], ends[:-1]]))
    y, last = _causal(x, weight, before, at.lengths, None)
    newest = jnp.maximum(at.totals - 1, 0) // width
    return y, jnp.take_along_axis(at.every(last), newest[None, :, None, None], axis=0)[0]


def _causal(
    x: jax.Array,
    weight: jax.Array,
    past: jax.Array | None,
    lengths: jax.Array,
    segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """``convolve`` of rows with ``lengths[B]`` valid tokens; segments: as a ``Chunk`` has them."""
    (features, width), (batch, n_new, _) = weight.shape, x.shape
    if past is None:
        past = jnp.zeros((batch, width - 1, features), x.dtype)
    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    taps = weight.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        read = inputs[:, tap : tap + n_new].astype(jnp.float32)
        if segments is not None and tap < width - 1:
            back = width - 1 - tap
            before = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, :n_new]
            read = jnp.where((before == segments)[:, :, None], read, 0.0)
        y = y + rounded(read * taps[:, tap])
    return y, last_inputs(past, x, lengths)


def last_inputs(past: jax.Array, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Return the last ``W - 1`` inputs of a convolution, ``[B, W - 1, features]``.

    They end with the first ``lengths[B]`` tokens of ``x [B, T, features]``, which follow
    ``past [B, W - 1, features]``.  The convolution's next token reads them.
    """
    inputs = jnp.concatenate([past.astype(x.dtype), x], axis=1)
    last = lengths[:, None] + jnp.arange(past.shape[1], dtype=lengths.dtype)[None, :]
    return jnp.take_along_axis(inputs, last[:, :, None], axis=1).astype(past.dtype)


# Rows whose tokens are spread over devices
#
# A recursion is linear in its state: a piece turns the state S before it into A S + R.  Each device
# computes A and R of its pieces from zero, all devices exchange them, and the state before a piece
# is the chain over the pieces before it.  The piece is then scanned again from that state.  Two
# scans of 1/n of the tokens, and for the delta rule one more for A, replace a chain of n devices
# that wait.  A is the product of the decays in GLA and SSD, and a matrix ``[Dk, Dk]`` a head in the
# delta rule.
#
# Source: the associative combination is that of parallel scans (Blelloch 1990; S5, arXiv
# 2208.04933).

# (state before, or None for zeros) -> (o, state after)
Scan = Callable[[jax.Array | None], tuple[jax.Array, jax.Array]]


def scan_pieces(
    scan: Scan,
    through: Callable[[], Callable[[jax.Array, jax.Array], jax.Array]],
    at: Pieces,
    before: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return (o of these pieces ``[2 B, T, H, Dv]``, the rows' state after all pieces).

    scan: of these pieces, each from its own state, or all from zeros.
    through: returns ``step(index, state)``, which gives A S of piece ``index`` of every row.
    before: the rows' state before the first piece, float32 ``[B, H, Dk, Dv]``.
    """
    rest, step = at.every(scan(None)[1]), through()
    states = [before]
    for index in range(2 * at.n):
        states.append(step(jnp.int32(index), states[-1]) + rest[index])
    o, _ = scan(at.local(jnp.stack(states[:-1])))
    return o, states[-1]


def decayed(log_decay: jax.Array, at: Pieces) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return ``scan_pieces``'s step for decays ``[2 B, T, H, Dk]`` of key channels."""
    is_token = jnp.arange(log_decay.shape[1], dtype=jnp.int32)[None, :] < at.lengths[:, None]
    decays = jnp.where(is_token[:, :, None, None], log_decay.astype(jnp.float32), 0.0)
    products = at.every(jnp.exp(jnp.sum(decays, axis=1)))
    return lambda index, state: products[index][..., None] * state
