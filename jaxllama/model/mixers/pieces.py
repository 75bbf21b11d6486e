"""States that pass from piece to piece of a row whose tokens are spread over devices.

    y, last  = convolve(function, x, weight, past, at)            a short convolution
    o, after = scan_pieces(scan, through, at, before)             GLA, SSD, the delta rule

A recursion is linear in its state: a piece turns the state S before it into A S + R.  Each device
computes A and R of its pieces from zero, all devices exchange them, and the state before a piece is
the chain over the pieces before it.  The piece is then scanned again from that state.  Two scans of
1/n of the tokens, and for the delta rule one more for A, replace a chain of n devices that wait.
A is the product of the decays in GLA and SSD, and a matrix ``[Dk, Dk]`` a head in the delta rule.

Source: the associative combination is that of parallel scans (Blelloch 1990; S5, arXiv 2208.04933).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllama.model.records import Pieces

# (x, weight, past, lengths) -> (y, the last inputs)
Convolution = Callable[..., tuple[jax.Array, jax.Array]]
# (state before, or None for zeros) -> (o, state after)
Scan = Callable[[jax.Array | None], tuple[jax.Array, jax.Array]]


def convolve(
    function: Convolution,
    x: jax.Array,
    weight: jax.Array,
    past: jax.Array | None,
    at: Pieces,
) -> tuple[jax.Array, jax.Array]:
    """Return ``function``'s result for pieces ``x[2 B, T, features]``, and the rows' last inputs.

    past: ``[B, W - 1, features]``, before the first piece.  A piece has at least ``W - 1`` tokens.
    """
    assert past is not None
    taps, width = past.shape[1], x.shape[1]
    if width < taps:
        raise ValueError(f"pieces of {width} tokens: a convolution reads the {taps} before a token")
    ends = at.every(x[:, width - taps :].astype(past.dtype))
    before = at.own(jnp.concatenate([past[None], ends[:-1]]))
    y, last = function(x, weight, before, at.lengths)
    newest = jnp.maximum(at.totals - 1, 0) // width
    return y, jnp.take_along_axis(at.every(last), newest[None, :, None, None], axis=0)[0]


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
    o, _ = scan(at.own(jnp.stack(states[:-1])))
    return o, states[-1]


def decayed(log_decay: jax.Array, at: Pieces) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return ``scan_pieces``'s step for decays ``[2 B, T, H, Dk]`` of key channels."""
    is_token = jnp.arange(log_decay.shape[1], dtype=jnp.int32)[None, :] < at.lengths[:, None]
    own = jnp.where(is_token[:, :, None, None], log_decay.astype(jnp.float32), 0.0)
    products = at.every(jnp.exp(jnp.sum(own, axis=1)))
    return lambda index, state: products[index][..., None] * state
