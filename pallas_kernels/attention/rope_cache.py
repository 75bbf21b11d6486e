"""The first step of attention while decoding: rotate q and k, and write k and v into the cache.

    q, k, v = split(qkv);  q = rope(q);  k_cache[b, slots[b]] = rope(k);  v_cache[b, slots[b]] = v

Contract: the cache is returned updated, in place where the caller donates it; a slot outside of
[0, S) writes nothing, which is how idle rows are kept out.  A quantized cache gets the codes and
scales that ``quantize_kv`` would give.

An int4 cache holds k and v in another basis (``to_cache_basis``), because four bits do not survive
outlier channels: q comes out in it too.  ``decode_attention`` brings its result back; what
``attention.blockwise`` gives, ``from_cache_basis`` does.

``rope_and_write_tokens`` does so for T tokens a row; k and v also come back, with the rounding of
the cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.operands import WIDTHS, Cached, Entries, LatentCodes, NewTokens
from pallas_kernels.attention.plain import hadamard, rotate
from pallas_kernels.dispatch import Implementation, Reason, choose_plan
from pallas_kernels.fixed_sums import row_sums
from pallas_kernels.operands import check
from pallas_kernels.qtensor import QTensor, dequantize, quantize
from pallas_kernels.rounding import reciprocal, to_codes
from pallas_kernels.transform import Op, chosen

Result = tuple[jax.Array, Cached, Cached]  # q or the heads, and the cache
Written = tuple[jax.Array, jax.Array, jax.Array, Cached, Cached]
_OPERANDS = {
    "qkv": "float [B, N + 2K, H+]",
    "k": "float|QTensor [B, S, K+, H]",
    "v": "k|QTensor [B, S, K, H]",
    "cos": "float32 [B, H / 2]",
    "sin": "float32 [B, H / 2]",
    "slots": "int32 [B]",
    "table": "int32 [B, M+] ?",
}
_SEVERAL = {
    "qkv": "float [B, T, N + 2K, H+]",
    "cos": "float32 [B, T, H / 2]",
    "sin": "float32 [B, T, H / 2]",
    "slots": "int32 [B, T]",
}
# With a table k and v are pools of pages.
PAGED = {"k": "float|QTensor [P, page+, K+, H]", "v": "k|QTensor [P, page, K, H]"}


def rope_and_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    *,
    table: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Cached, Cached]:
    """Rotate a new token of each row, and return its queries and the cache with its key and value.

    Parameters
    ----------
    qkv : float [B, N + 2K, H]
        The heads of q, then of k, then of v.
    cos, sin : float32 [B, H / 2]
        The rotary tables at each row's position.
    k, v : float or QTensor [B, S, K, H]
        The cache. Donate it to have it updated in place.
    slots : int32 [B]
        The token's place in its row of the cache. A slot outside of [0, S) writes nothing.
    table : int32 [B, M], optional
        The cache is then in pages: k and v are ``[P, page, K, H]``, and slot t of row b is
        ``[table[b, t // page], t % page]``. S is ``M * page``. A token whose entry is outside of
        [0, P) is not written.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    q : [B, N, H]
        The rotated queries, in the cache's basis (``rope_cache.to_cache_basis``).
    k, v : float or QTensor
        The cache with the new tokens.

    Raises
    ------
    ValueError
        Names the operand or option that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | qkv, cos, sin, and k, v or their scales: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    x = NewTokens(qkv, cos, sin, k, v, slots, table)
    check_tokens("rope_and_write", x, is_several=False)
    found = choose_plan("rope_and_write", implementation, lambda: plan(qkv, k), qkv, k, v)
    return _rope_and_write(chosen(found, implementation), None, x)


def rope_and_write_tokens(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    *,
    table: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> Written:
    """Rotate several new tokens a row and write them to the cache.

    qkv: ``[B, T, N + 2K, H]``, the heads of q, then of k, then of v.
    k, v: the cache, ``[B, S, K, H]``.
    cos, sin: float32 ``[B, T, H / 2]``.
    slots: int32 ``[B, T]``, all different within a row.

    Returns (q ``[B, T, N, H]``, the new k and v ``[B, T, K, H]`` as they are stored, k, v).  A
    prompt's tokens attend to one another through these arrays, without reading the cache.
    Everything else, jax's transformations too, is as for ``rope_and_write``.
    """
    op, x = "rope_and_write_tokens", NewTokens(qkv, cos, sin, k, v, slots, table)
    check_tokens(op, x, is_several=True)
    found = choose_plan(op, implementation, lambda: plan(qkv, k), qkv, k, v)
    return _rope_and_write_tokens(chosen(found, implementation), None, x)


def norm_heads(
    qkv: jax.Array, n_kv: int, weights: tuple[jax.Array, jax.Array], eps: float, full: bool = False
) -> jax.Array:
    """RMSNorm of q and k among ``qkv [..., N + 2K, H]``, one expression for all heads, which XLA
    makes one kernel.

    weights: of q and k, ``[H]``, with ``full`` ``[N H]`` and ``[K H]``: one norm over all heads.
    """
    heads, h = qkv.shape[-2:]
    n, x = heads - 2 * n_kv, qkv.astype(jnp.float32)
    index = jnp.arange(heads, dtype=jnp.int32)[:, None]
    mean = row_sums(jnp.square(x)) / h
    q, k = (w.astype(jnp.float32) for w in weights)
    if full:
        q, k = (w.reshape(-1, h) for w in (q, k))
        q, k = jnp.pad(q, ((0, 2 * n_kv), (0, 0))), jnp.pad(k, ((n, n_kv), (0, 0)))
        parts = mean[..., :n, :], mean[..., n : n + n_kv, :]
        mean = jnp.where(index < n, *(row_sums(m, axis=-2) / m.shape[-2] for m in parts))
    y = x * jax.lax.rsqrt(mean + eps) * jnp.where(index < n, q, k)
    return jnp.where(index < n + n_kv, y, x).astype(qkv.dtype)


def _kernel(_: None, x: NewTokens) -> Result:
    from pallas_kernels.attention import rope_cache_kernel

    return rope_cache_kernel.rope_and_write(x)


def _kernel_of_several(_: None, x: NewTokens) -> Written:
    from pallas_kernels.attention import rope_cache_kernel

    return rope_cache_kernel.rope_and_write_tokens(x)


def _xla(_: None, x: NewTokens) -> Result:
    one = {name: getattr(x, name)[:, None] for name in _SEVERAL}
    q, new_k, new_v = _rotated(x._replace(**one))
    k, v = (store(kv, new, one["slots"], x.table) for kv, new in ((x.k, new_k), (x.v, new_v)))
    return q[:, 0], k, v


def _xla_of_several(_: None, x: NewTokens) -> Written:
    q, *new = _rotated(x)
    (kept_k, k), (kept_v, v) = (
        (as_stored(kv, y), store(kv, y, x.slots, x.table))
        for kv, y in zip((x.k, x.v), new, strict=True)
    )
    return q, kept_k, kept_v, k, v


def _rotated(x: NewTokens) -> tuple[jax.Array, ...]:
    """q, k and v of T tokens a row, in the cache's basis."""
    n_kv = x.k.shape[2]
    n = x.qkv.shape[2] - 2 * n_kv
    q, k, v = jnp.split(x.qkv, (n, n + n_kv), axis=2)
    return to_cache_basis(x.k, rotate(q, x.cos, x.sin), rotate(k, x.cos, x.sin), v)


_rope_and_write = Op("rope_and_write", _xla, _kernel)
_rope_and_write_tokens = Op("rope_and_write_tokens", _xla_of_several, _kernel_of_several)


def check_tokens(op: str, x: NewTokens, is_several: bool) -> None:
    """Raise ValueError that names what does not fit together."""
    lines = _OPERANDS if x.table is None else _OPERANDS | PAGED
    lines, several = (lines | _SEVERAL, "T, ") if is_several else (lines, "")
    sizes = check(op, lines, **x._asdict())
    heads, n_kv, h = sizes["N + 2K"], sizes["K"], sizes["H"]
    if heads < 3 * n_kv or heads % n_kv:
        raise ValueError(
            f"{op}: qkv {x.qkv.shape} is not [B, {several}N + 2K, H] with N a multiple of "
            f"the {n_kv} heads of k"
        )
    if h != 2 * sizes["H / 2"]:
        raise ValueError(
            f"{op}: cos {x.cos.shape} and sin {x.sin.shape} are not "
            f"[B, {several}H / 2] for qkv {x.qkv.shape}"
        )
    for name, kv in (("k", x.k), ("v", x.v)):
        if isinstance(kv, QTensor):
            _check_codes(op, name, kv, h)


def _check_codes(op: str, name: str, kv: QTensor, head_dim: int) -> None:
    """ValueError for a cache that ``quantize_kv`` would not make."""
    if reason := unusual(kv):
        raise ValueError(f"{op}: {name} is {reason}")
    group = _group(head_dim, jnp.dtype(kv.dtype).name)
    if kv.group_size != group:
        raise ValueError(f"{op}: {name}.scale {kv.scale.shape} is not of {group} features")


@dataclasses.dataclass(frozen=True)
class RopeCachePlan:
    """A warp for each head of each row; for many rows, of k and v alone: nothing to choose."""

    kernel: ClassVar[str] = "rope_cache_mosaic"

    def __str__(self) -> str:
        return ""


def plan(qkv: jax.Array, k: Cached) -> RopeCachePlan | Reason:
    """How the kernel writes the heads of qkv into caches like k."""
    if qkv.dtype not in (jnp.bfloat16, jnp.float16):
        return Reason(f"qkv is {qkv.dtype.name}; the kernel rotates bfloat16 and float16")
    if (h := qkv.shape[-1]) not in WIDTHS:
        return Reason(f"qkv has heads of {h} features; the kernel takes 64, 128 and 256")
    if not isinstance(k, QTensor) and k.dtype != qkv.dtype:
        return Reason(f"k and v are {k.dtype.name} where qkv is {qkv.dtype.name}")
    return RopeCachePlan()


def to_cache_basis(kv: Entries, *heads: jax.Array) -> tuple[jax.Array, ...]:
    """q, k or v ``[..., H]`` in the basis of the cache ``kv``: rotated by ``hadamard`` for int4,
    as they are for any other."""
    return tuple(hadamard(x) for x in heads) if kv.dtype == jnp.int4 else heads


def from_cache_basis(kv: Entries, out: jax.Array) -> jax.Array:
    """Attention over the cache ``kv``, ``[..., H]``, back in the basis of the model."""
    return hadamard(out) if kv.dtype == jnp.int4 else out


def quantize_kv(x: jax.Array, dtype: str) -> QTensor:
    """Keys or values ``[..., H]`` as a cache QTensor.

    int8, float8_e4m3fn: one float32 scale per token and head, the largest magnitude's.
    int4: 16 levels from the smallest to the largest of each 64 features (of the head where 64 does
        not divide it), as a float16 scale and a float16 zero point: x = scale q + zero (FlexGen's
        group-wise compression, arXiv 2303.06865, section 5).  Rounding to float16 costs no more
        than an array of float16 would; magnitudes past 65504 are clipped to it.
    """
    head_dim = x.shape[-1]
    group = _group(head_dim, dtype)
    if dtype != "int4":
        return quantize(x, dtype, group_size=group, scale_dtype=jnp.float32)
    parts = jnp.clip(x.astype(jnp.float32), -65504.0, 65504.0)
    parts = parts.reshape(*x.shape[:-1], head_dim // group, group)
    low, high = jnp.min(parts, axis=-1), jnp.max(parts, axis=-1)
    scale = ((high - low) * (1 / 15)).astype(jnp.float16)
    step = scale.astype(jnp.float32)
    # Codes run from -8 to 7: their middle stands for the group's.
    zero = ((low + high) * 0.5 + step * 0.5).astype(jnp.float16)
    steps = (parts - zero.astype(jnp.float32)[..., None]) * reciprocal(scale)[..., None]
    return QTensor(to_codes(steps, dtype).reshape(x.shape), scale, zero)


def _group(head_dim: int, dtype: str) -> int:
    return 64 if dtype == "int4" and head_dim % 64 == 0 else head_dim


def unusual(kv: QTensor) -> str | None:
    """How a cache differs from what ``quantize_kv`` makes of its codes, or None."""
    zero = None if kv.zero is None else kv.zero.dtype
    if kv.dtype == jnp.int4:
        if kv.scale.dtype == zero == jnp.float16:
            return None
        return "an int4 cache whose scales and zero points are not float16"
    if kv.scale.dtype == jnp.float32 and zero is None:
        return None
    return "a cache whose scales are not float32 without zero points"


def place(kv: Entries, slots: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (page, place in the page) of ``slots[B, T]``; page P means that nothing is written."""
    pages, page = kv.shape[:2]
    entry = jnp.take_along_axis(table, slots // page, axis=1, mode="clip")
    inside = (slots >= 0) & (slots < table.shape[1] * page) & (entry >= 0)
    return jnp.where(inside, jnp.minimum(entry, pages), pages), slots % page


def store(kv: Entries, new: jax.Array, slots: jax.Array, table: jax.Array | None = None) -> Any:
    """``new[B, T, K, H]`` into ``kv[B, S, K, H]`` at ``slots[B, T]``; slots outside of [0, S) are
    dropped.  table: as ``rope_and_write`` takes it."""
    return store_codes(kv, to_stored(kv, new), slots, table)


def to_stored(kv: Entries, new: jax.Array) -> Any:
    """``new[B, T, K, H]`` in the form in which ``kv`` stores keys or values."""
    if isinstance(kv, LatentCodes):
        low, rope = jnp.split(new, (kv.low.shape[-1],), axis=-1)
        return LatentCodes(to_stored(kv.low, low), rope.astype(kv.rope.dtype))
    if isinstance(kv, QTensor):
        return quantize_kv(new, jnp.dtype(kv.dtype).name)
    return new.astype(kv.dtype)


def as_stored(kv: Entries, new: jax.Array) -> jax.Array:
    """New keys or values as a reader of the cache ``kv`` would get them, rounding included."""
    stored = to_stored(kv, new)
    return (
        dequantize(stored, new.dtype) if isinstance(stored, QTensor) else stored.astype(new.dtype)
    )


def store_codes(
    kv: Entries, new_tokens: Cached, slots: jax.Array, table: jax.Array | None = None
) -> Cached:
    """``store`` of what ``to_stored`` returned. No two of a row's slots are equal, unless dropped:
    a GPU then writes 8 bytes at once, where it would exchange each element's word."""
    rows = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    if table is not None:
        rows, slots = place(kv, slots, table)

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        at = old.at[rows, slots]
        return at.set(new, mode="drop", wrap_negative_indices=False, unique_indices=True)

    return jax.tree.map(written, kv, new_tokens)
