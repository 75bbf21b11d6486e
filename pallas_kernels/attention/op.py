"""Attention of the newest tokens of each row over a cache of keys and values: the op of a decode
step, and of one that verifies a draft.

    out[b, n] = softmax_s(scale * q[b, n] . k[b, s, n // G]) v[b, s, n // G],   s < lengths[b]

with G = N / K query heads to a kv head.  A sliding window keeps only the last ``window`` of those
keys.  With ``sinks``, exp(sinks[n]) is added to the softmax's denominator (gpt-oss, arXiv
2508.10925; StreamingLLM's softmax with a sink, 2309.17453).

Contract: values that the cache holds at s >= lengths[b], even NaN, never change a result.  A row of
length 0 gives zeros.  A row's result depends on no other row, and is the same bits every time.

T tokens of a row, each with its own length, are T such rows over one cache, which is read once.
The product that a kernel computes has T * G rows, each with its own mask.

A quantized cache is read as it is stored, codes and scales, and never exists as floats in memory.

Source: FlashAttention's online softmax (arXiv 2205.14135), split over keys as in Flash-Decoding.
Left out: a prompt's many query tokens (``attention.blockwise`` serves those).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.blockwise import CPU_DECODE_BLOCK, blockwise_attention, load
from pallas_kernels.attention.operands import WIDTHS, Attended, Cached, capacity_of
from pallas_kernels.attention.plain import is_visible
from pallas_kernels.attention.rope_cache import PAGED, from_cache_basis, unusual
from pallas_kernels.cpu import attend as cpu
from pallas_kernels.dispatch import Implementation, Plan, Reason, choose_plan, first_plan, is_empty
from pallas_kernels.operands import check
from pallas_kernels.qtensor import QTensor
from pallas_kernels.transform import Op, chosen

_Static = tuple[int | None, float, Plan | None]  # window, scale, the kernel's plan
_OPERANDS = {
    "q": "float [B, N, H]",
    "k": "float|QTensor [B, S, K+, H]",
    "v": "k|QTensor [B, S, K, H]",
    "lengths": "int32 [B]",
    "table": "int32 [B, M+] ?",
    "sinks": "float [N] ?",
}
_SEVERAL = {"q": "float [B, T+, N, H]", "lengths": "int32 [B, T]"}
MOST_ROWS = 64  # query heads of all tokens, to a kv head
MOST_TOKENS = 16


def decode_attention(
    q: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    lengths: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Return the attention of each row's newest tokens over its cache of keys and values.

    Parameters
    ----------
    q : float [B, N, H], or [B, T, N, H] for T tokens of a row
        The query heads, in the cache's basis as ``rope_and_write`` returns them.
    k, v : float or QTensor [B, S, K, H]
        The cache; K divides N. QTensors are those of ``rope_cache.quantize_kv``: int8, int4 or
        float8_e4m3fn.
    lengths : int32 [B], or [B, T] for T tokens of a row
        Number of keys that each token sees, its own included, from 0 to S. Entries of the cache
        past the row's longest length have no effect, whatever they hold.
    window : int, optional
        Number of these keys that a token sees, the last ones. All by default.
    scale : float, optional
        Factor of the scores; H ** -0.5 by default.
    table : int32 [B, M], optional
        The cache is then in pages: k and v are ``[P, page, K, H]``, and token t of row b is at
        ``[table[b, t // page], t % page]``. S is ``M * page``. Rows may share pages. Unused
        entries of the table and unused pages may hold anything.
    sinks : float [N], optional
        A logit of each query head that joins the softmax and has no value.
    implementation : "xla", "mosaic", "cpu" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    Array [B, N, H], or [B, T, N, H]
        The outputs in q's dtype and in the model's basis (``rope_cache.from_cache_basis``).

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | q, sinks, and k, v or their scales: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    x = Attended(q, k, v, lengths, table, sinks)
    _check(x, window)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    find = lambda: plan(q, k, v, table)  # noqa: E731
    on_cpu = lambda: _other(k, v) or cpu.plan(q, k, table, sinks is not None)  # noqa: E731
    found = choose_plan("decode_attention", implementation, find, q, k, v, cpu=on_cpu)
    if is_empty(q, k):  # there are no queries or no keys
        return jnp.zeros(q.shape, q.dtype)
    return _decode_attention(chosen(found, implementation), (window, scale, found), x)


def _other(k: Cached, v: Cached) -> Reason | None:
    """Return how a cache differs from those that kernels and handlers read, if it is in codes."""
    if not (isinstance(k, QTensor) and isinstance(v, QTensor)):
        return None
    for name, part in (("k", k), ("v", v)):
        if reason := unusual(part):
            return Reason(f"{name} is {reason}")
        if part.columns is not None or part.unit is not None:
            return Reason(f"{name} has columns in another order, or a unit")
    if k.scale.shape != v.scale.shape:
        return Reason(f"k.scale {k.scale.shape} is not v.scale {v.scale.shape}")
    return None


def _kernel(call: _Static, x: Attended) -> jax.Array:
    window, scale, plan = call
    options: Any = {"window": window, "scale": scale, "plan": plan}
    if isinstance(plan, cpu.CpuPlan):
        return from_cache_basis(x.v, cpu.attend(*x[:5], sinks=x.sinks, **options))
    from pallas_kernels.attention import direct, kernel

    sinks = None if x.sinks is None else x.sinks.astype(jnp.float32)
    attend = direct.attend if isinstance(plan, direct.DirectPlan) else kernel.decode_attention
    return attend(x._replace(sinks=sinks), **options)


def xla_form(call: _Static, x: Attended) -> jax.Array:
    block = CPU_DECODE_BLOCK if jax.default_backend() == "cpu" else None
    return _blockwise(call, x, x.k, x.v, block, x.table)


def _blockwise(
    call: _Static,
    x: Attended,
    k: Cached,
    v: Cached,
    block: int | None,
    table: jax.Array | None = None,
) -> jax.Array:
    window, scale, _ = call
    q, lengths = x.by_token()
    given: Any = {"window": window, "scale": scale, "block": block}
    out = blockwise_attention(q, k, v, lengths - 1, **given, table=table, sinks=x.sinks)
    return from_cache_basis(x.v, out.reshape(x.q.shape))


def attend_at_once(call: _Static, x: Attended) -> jax.Array:
    """The form that is differentiated: all keys in one block.

    A loop with a length known only at run time has no transpose.  Keys and values that no query
    sees are replaced by zeros, so NaN there reaches no gradient.
    """
    capacity, (_, lengths) = capacity_of(x.k, x.table), x.by_token()
    position = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    seen = jnp.any(is_visible(lengths - 1, position, call[0]), axis=1)[:, :, None, None]
    k, v = (jnp.where(seen, load(y, 0, capacity, x.q.dtype, x.table), 0) for y in (x.k, x.v))
    return _blockwise(call, x, k, v, capacity)


_decode_attention = Op("decode_attention", xla_form, _kernel, derivative=attend_at_once)


def plan(
    q: jax.Array, k: jax.Array | QTensor, v: jax.Array | QTensor, table: jax.Array | None = None
) -> Plan | Reason:
    """How a kernel computes the call: the one for one or two rows, or the one for many."""
    from pallas_kernels.attention import direct
    from pallas_kernels.attention import plan as many
    from pallas_kernels.attention.pages import as_rows

    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return Reason(f"q is {q.dtype.name}; the kernel multiplies bfloat16 and float16")
    if (h := q.shape[-1]) not in WIDTHS:
        return Reason(f"q has heads of {h} features; the kernel takes 64, 128 and 256")
    name = jnp.dtype(k.dtype).name
    tokens = q.shape[1] if q.ndim == 4 else 1
    n, n_kv = q.shape[-2], k.shape[2]
    if tokens > MOST_TOKENS or (tokens > 1 and tokens * n // n_kv > MOST_ROWS):
        return Reason(
            f"q has {tokens} tokens of {n} heads on {n_kv} kv heads of k; the kernel takes "
            f"{MOST_TOKENS} tokens and {MOST_ROWS} of their heads to one"
        )
    if n // n_kv > MOST_ROWS:
        return Reason(f"q has {n} heads on {n_kv} kv heads of k; the kernel takes 64 to one")
    if not isinstance(k, QTensor) and k.dtype != q.dtype:
        return Reason(f"k and v are {name} where q is {q.dtype.name}")
    if reason := _other(k, v):
        return reason
    if isinstance(k, QTensor) and isinstance(v, QTensor):
        for part_name, part in (("k", k), ("v", v)):
            if part.group_size % 64 or part.scale.shape[-1] not in (1, 2, 4):
                return Reason(
                    f"{part_name}.scale is of {part.group_size} features each; the kernel takes "
                    "multiples of 64"
                )
    if isinstance(rows := as_rows(k, table), Reason):
        return rows
    if q.ndim == 4:
        return many.plan((q, rows, tokens * n))
    return first_plan((q, rows, n), direct.plan, many.plan)


def decode_attention_reference(
    q: jax.Array,
    k: jax.Array | QTensor,
    v: jax.Array | QTensor,
    lengths: jax.Array,
    *,
    window: int | None = None,
    scale: float | None = None,
    table: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """The definition in float32, every score of every row at once; never optimised."""
    if q.ndim == 4:
        one = lambda q, lengths: decode_attention_reference(  # noqa: E731
            q, k, v, lengths, window=window, scale=scale, table=table, sinks=sinks
        )
        return jax.vmap(one, in_axes=1, out_axes=1)(q, lengths)
    batch, n, h = q.shape
    cache = v
    capacity, n_kv = capacity_of(k, table), k.shape[2]
    k, v = (load(x, 0, capacity, jnp.float32, table) for x in (k, v))
    position = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    visible = position < lengths[:, None]
    if window is not None:
        visible &= position >= lengths[:, None] - window
    v = jnp.where(visible[:, :, None, None], v, 0.0)
    grouped = q.astype(jnp.float32).reshape(batch, n_kv, n // n_kv, h)
    grouped = grouped * (h**-0.5 if scale is None else scale)
    scores = jnp.einsum("bkgh,bskh->bkgs", grouped, k, precision=lax.Precision.HIGHEST)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:  # one more score, of a key whose value is zero
        sink = sinks.astype(jnp.float32).reshape(1, n_kv, -1, 1)
        sink = jnp.broadcast_to(sink, (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
        v = jnp.pad(v, ((0, 0), (0, 1), (0, 0), (0, 0)))
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1)[..., None]
    out = jnp.einsum("bkgs,bskh->bkgh", weights, v, precision=lax.Precision.HIGHEST)
    out = out / jnp.where(total > 0, total, 1.0)
    return from_cache_basis(cache, out.reshape(batch, n, h)).astype(q.dtype)


def _check(x: Attended, window: int | None) -> None:
    lines = _OPERANDS if x.table is None else _OPERANDS | PAGED
    lines = lines | _SEVERAL if x.q.ndim == 4 else lines
    sizes = check("decode_attention", lines, **x._asdict())
    if sizes["N"] % sizes["K"]:
        raise ValueError(
            f"decode_attention: q has {sizes['N']} heads on {sizes['K']} kv heads of k"
        )
    if window is not None and window < 1:
        raise ValueError(f"decode_attention: window {window} is below 1")
