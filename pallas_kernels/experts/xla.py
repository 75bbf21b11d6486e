"""The XLA forms of ``grouped_matmul``'s products, and their gradients.

    sums(x[N, in], w[E, out, in], experts[P], fan) -> float32 [P, out]      pair p reads x[p // fan]

    blocks   pairs sorted by expert into blocks of a fixed number of rows; a loop over the blocks
             reads one expert at a time.  A CPU's form, and an accelerator's for many pairs
    gather   multiply and reduce with the experts of all pairs in one kernel that reads their codes
             once.  An accelerator's form for few pairs
    every    one product of every row of x with the rows of all experts, then each pair's expert is
             picked.  An accelerator's form between the two, from about 10 to 300 tokens

On a CPU the blocks have ``CPU_ROWS`` rows whatever the call's size.  XLA then runs the same product
for every pair, so a row's bits depend on that row and its expert alone.

On an accelerator ``experts.plan`` chooses the form by the number of pairs.  The order of a sum
depends on the form and on the number of pairs.  "every" reads the weight once, as it lies, and
multiplies a token once where its pairs share a row.  It holds float sums ``[N, E, out]``, which
``predict`` limits, and the floats of all codes in x's dtype.  The other forms read chosen experts
only.  A NaN in one expert's weight reaches the pairs that have chosen it, in every form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.experts import plan
from pallas_kernels.experts.blocks import blocks_of
from pallas_kernels.experts.plan import XlaForm
from pallas_kernels.fixed_sums import has_fixed_sums, planned_rows
from pallas_kernels.matmul.predict import WORD
from pallas_kernels.matmul.weight_only import Dims, dot, float4_values, scale_gradients
from pallas_kernels.qtensor import FLOAT4, QTensor, dequantize
from pallas_kernels.rounding import NIBBLES

Weight = jax.Array | QTensor
# Rows of a block on a CPU: what few pairs waste beside what many read again.
CPU_ROWS = 8
_LAST: Dims = (((1,), (1,)), ((), ()))
_FIRST: Dims = (((0,), (0,)), ((), ()))
_ROWS: Dims = (((1,), (0,)), ((), ()))


def sums(
    x: jax.Array, w: Weight, experts: jax.Array, fan: int, form: XlaForm | None = None
) -> jax.Array:
    """The products of all pairs, float32 ``[P, out]``.

    form: on an accelerator; None is the one that is predicted to be the shortest.
    """
    if isinstance(w, QTensor) and w.unit is not None:
        plain = dataclasses.replace(w, unit=None)
        return sums(x, plain, experts, fan, form) * w.unit[..., 0][experts]
    n_pairs = planned_rows(experts.shape[0])
    form = "blocks" if has_fixed_sums() else form or plan.shortest_form(w, n_pairs, x.shape[0])
    elsewhere = functools.partial(
        BY_FORM[form], fan=fan, size=plan.block_rows(n_pairs, w.shape[0]), dtype=x.dtype
    )
    on_cpu = functools.partial(_by_blocks, fan=fan, size=CPU_ROWS, dtype=jnp.float32)
    return lax.platform_dependent(x, w, experts, default=elsewhere, cpu=on_cpu)


def backward(
    x: jax.Array, w: Weight, experts: jax.Array, dy: jax.Array, fan: int
) -> tuple[jax.Array, Weight]:
    """The gradients of x and w, of float32 ``dy[P, out]``; those of codes are None.

    w's is formed only where a caller wants it: ``jit`` drops it otherwise.
    """
    size = plan.block_rows(experts.shape[0], w.shape[0])

    def gradient(form: Callable[..., jax.Array]) -> jax.Array:
        elsewhere = functools.partial(form, fan=fan, size=size, dtype=x.dtype)
        on_cpu = functools.partial(form, fan=fan, size=CPU_ROWS, dtype=jnp.float32)
        return lax.platform_dependent(x, w, experts, dy, default=elsewhere, cpu=on_cpu)

    dx, dw = gradient(_d_x).astype(x.dtype), gradient(_d_w)
    return dx, scale_gradients(w, dw) if isinstance(w, QTensor) else dw.astype(w.dtype)


# --- one expert's floats --------------------------------------------------------------------------


def _expert(w: Weight, dtype: DTypeLike) -> Callable[[jax.Array], jax.Array]:
    """A function from an expert's index to its floats ``[out, in]``."""
    if not isinstance(w, QTensor):
        return lambda e: lax.dynamic_index_in_dim(w, e, keepdims=False).astype(dtype)
    if w.dtype.name not in NIBBLES or w.shape[-1] % 2:
        return lambda e: dequantize(_pick(w, e), dtype)
    # XLA's CPU backend unpacks a whole array of 4-bit codes before it slices it; it slices bytes as
    # they are.
    packed = lax.bitcast_convert_type(w.q.reshape(*w.shape[:-1], -1, 2), jnp.int8)
    outer = dataclasses.replace(w, q=packed)

    def floats(e: jax.Array) -> jax.Array:
        own = _pick(outer, e)
        if w.dtype == FLOAT4:
            codes = jnp.stack([float4_values(own.q), float4_values(own.q >> 4)], axis=-1)
        else:
            codes = jnp.stack([(own.q << 4) >> 4, own.q >> 4], axis=-1)
        return dataclasses.replace(own, q=codes.reshape(w.shape[1:])).floats(dtype)

    return floats


def _pick(w: QTensor, e: jax.Array) -> QTensor:
    pick = functools.partial(lax.dynamic_index_in_dim, index=e, keepdims=False)
    zero, unit = (None if v is None else pick(v) for v in (w.zero, w.unit))
    return QTensor(pick(w.q), pick(w.scale), zero, unit=unit)


# --- the forms ------------------------------------------------------------------------------------


def _by_blocks(
    x: jax.Array,
    w: Weight,
    experts: jax.Array,
    *,
    fan: int,
    size: int,
    dtype: DTypeLike,
    dims: Dims = _LAST,
) -> jax.Array:
    """dims: of rows of x and an expert's floats, that are summed."""
    floats, at = _expert(w, dtype), blocks_of(experts, w.shape[0], size)
    pairs = jnp.minimum(at.pairs, experts.shape[0] - 1)
    rows = pairs if fan == 1 else pairs // fan

    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        expert, own = block
        return dot(x[own], floats(expert), dims, dtype)

    found = lax.map(one, (at.experts, rows))
    return found.reshape(-1, found.shape[-1])[at.places]


def _by_gather(
    x: jax.Array, w: Weight, experts: jax.Array, *, fan: int, size: int, dtype: DTypeLike
) -> jax.Array:
    del size, dtype
    rows = jnp.repeat(x, fan, axis=0).astype(jnp.float32)[:, None]
    if not isinstance(w, QTensor):
        return jnp.sum(w[experts].astype(jnp.float32) * rows, axis=-1)
    if w.dtype.name not in NIBBLES or w.group_size % WORD:
        return jnp.sum(dequantize(w.rows(experts)) * rows, axis=-1)
    words = lax.bitcast_convert_type(w.q.reshape(*w.shape[:-1], -1, WORD), jnp.int32)[experts]
    if w.dtype == FLOAT4:
        codes = jnp.stack([float4_values(words >> shift) for shift in range(0, 32, 4)], axis=-1)
    else:
        # A code is shifted to the upper end of its word and back, which extends its sign.
        codes = jnp.stack([(words << shift) >> 28 for shift in range(28, -1, -4)], axis=-1)
        codes = codes.astype(jnp.int8)
    zero = None if w.zero is None else w.zero[experts]
    plain = QTensor(codes.reshape(*words.shape[:-1], -1), w.scale[experts], zero)
    return jnp.sum(plain.floats(jnp.float32) * rows, axis=-1)


def _by_every(
    x: jax.Array, w: Weight, experts: jax.Array, *, fan: int, size: int, dtype: DTypeLike
) -> jax.Array:
    del size
    flat = jax.tree.map(lambda v: v.reshape(-1, v.shape[-1]), w)
    floats = dequantize(flat, dtype) if isinstance(flat, QTensor) else flat
    found = dot(x, floats, _LAST, dtype).reshape(x.shape[0], w.shape[0], -1)
    return found[jnp.arange(experts.shape[0]) // fan, experts]


BY_FORM: dict[XlaForm, Callable[..., jax.Array]] = {
    "gather": _by_gather,
    "blocks": _by_blocks,
    "every": _by_every,
}


def _d_x(
    x: jax.Array,
    w: Weight,
    experts: jax.Array,
    dy: jax.Array,
    *,
    fan: int,
    size: int,
    dtype: DTypeLike,
) -> jax.Array:
    by_pair = _by_blocks(dy, w, experts, fan=1, size=size, dtype=dtype, dims=_ROWS)
    return jnp.sum(by_pair.reshape(x.shape[0], fan, -1), axis=1)


def _d_w(
    x: jax.Array,
    w: Weight,
    experts: jax.Array,
    dy: jax.Array,
    *,
    fan: int,
    size: int,
    dtype: DTypeLike,
) -> jax.Array:
    """float32 ``[E, out, in]``."""
    at, n_pairs = blocks_of(experts, w.shape[0], size), experts.shape[0]

    def add(total: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        expert, own = block
        pairs = jnp.minimum(own, n_pairs - 1)
        given = jnp.where((own < n_pairs)[:, None], dy[pairs], 0.0)
        found = dot(given, x[pairs // fan], _FIRST, dtype)
        before = lax.dynamic_index_in_dim(total, expert, keepdims=True)
        return lax.dynamic_update_index_in_dim(total, before + found, expert, 0), None

    # Zeros of dy, so that inside of a shard_map they vary over the axes that dy does.
    zero = jnp.broadcast_to(jnp.zeros_like(dy[:1, :1])[..., None], w.shape)
    return lax.scan(add, zero, (at.experts, at.pairs))[0]
