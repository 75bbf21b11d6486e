"""Latent attention (MLA) of the newest tokens of each row over its cache, the absorbed form.

    out[b, t, n] = softmax_s(scale * q[b, t, n] . cache[b, s]) cache[b, s, :512],  s < lengths[b, t]

An entry of the cache is a token's latent (512 features) and the turning part of its key (64).  All
query heads share it, and its latent is also the value.  With 8 bits (``LatentCodes``) the latents
are codes with a scale a token.  q holds heads whose still part the key's up
product has multiplied; the value's up product multiplies the result.

Contract, as ``attention.op``'s: entries at s >= the row's longest length, even NaN, never change a
result.  A token of length 0 gives zeros.  A row's result depends on no other row, and is the same
bits every time.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; the kernel's two halves as in FlashMLA.  A
choice of keys by an indexer has ``latent.chosen``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import op as attention
from pallas_kernels.attention.blockwise import joined
from pallas_kernels.attention.operands import LatentCodes
from pallas_kernels.attention.plain import is_visible
from pallas_kernels.dispatch import Implementation, Plan, choose_plan, is_empty
from pallas_kernels.latent.plan import LATENT, plan, rank_of
from pallas_kernels.operands import check
from pallas_kernels.transform import Op, chosen

_Static = tuple[float, Plan | None]  # scale, the kernel's plan
_OPERANDS = {
    "q": "float [B, T+, N, H]",
    "cache": "q [B, S, H]",
    "lengths": "int32 [B, T]",
    "table": "int32 [B, M+] ?",
}
_CODES = {"low": "float|QTensor [B, S, R]", "rope": "bfloat16 [B, S, r]"}


def latent_attention(
    q: jax.Array,
    cache: jax.Array | LatentCodes,
    lengths: jax.Array,
    *,
    scale: float,
    table: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Return the sums of latents that each row's newest tokens attend to.

    Parameters
    ----------
    q : float [B, T, N, 576]
        The query heads of T tokens a row, absorbed: 512 features that meet latents, and 64 with
        RoPE.
    cache : [B, S, 576], of q's dtype, or a LatentCodes
        The latent of each token, and the part of its key with RoPE. A LatentCodes may have
        latents of R features in place of 512; q and the result have as many.
    lengths : int32 [B, T]
        Number of keys that each token sees, its own included, from 0 to S.
    scale : float
        Factor of the scores.
    table : int32 [B, M], optional
        The cache is then in pages ``[P, page, 576]``, and token s of row b is at
        ``[table[b, s // page], s % page]``. Unused entries and pages may hold anything.
    implementation : "xla", "mosaic" or None
        See ``pallas_kernels.dispatch``.

    Returns
    -------
    Array [B, T, N, 512]
        In q's dtype.

    Raises
    ------
    ValueError
        Names the operand that does not fit.
    NotImplementedError
        ``implementation`` names a kernel that cannot run the call.

    Notes
    -----
    | jit, vmap, shard_map          | any operand; under vmap one launch for each element |
    | jvp, grad, at any order       | q, cache: the XLA form's |
    | export, jit over many devices | the XLA form; ValueError if the caller named "mosaic" |
    """
    check_latents("latent_attention", _OPERANDS, q=q, cache=cache, lengths=lengths, table=table)
    find = lambda: plan(q, cache, table)  # noqa: E731
    found = choose_plan("latent_attention", implementation, find, q, cache)
    if is_empty(q, cache):
        return jnp.zeros((*q.shape[:3], rank_of(cache)), q.dtype)
    call = float(scale), found
    operands = _Operands(q, cache, lengths, table)
    return _latent_attention(chosen(found, implementation), call, operands)


def check_latents(op: str, lines: dict[str, str], **operands: Any) -> None:
    """Raise ValueError naming the operand that does not fit.  With a table, the cache has pages."""
    cache = operands["cache"]
    if isinstance(cache, LatentCodes):
        lines = {name: line for name, line in lines.items() if name != "cache"} | _CODES
        operands |= {"low": cache.low, "rope": cache.rope}
    if operands["table"] is not None:
        lines = {name: re.sub(r"\[B, S\+?", "[P, page+", line) for name, line in lines.items()}
    sizes = check(op, lines, **operands)
    width = sizes["H"]
    if isinstance(cache, LatentCodes):
        if width != sizes["R"] + sizes["r"]:
            raise ValueError(f"{op}: q has {width} features, and cache {cache.shape[-1]}")
    elif width <= LATENT:
        raise ValueError(f"{op}: q has {width} features; it needs more than 512")


class _Operands(NamedTuple):
    q: jax.Array
    cache: jax.Array | LatentCodes
    lengths: jax.Array
    table: jax.Array | None


def _kernel(call: _Static, x: _Operands) -> jax.Array:
    from pallas_kernels.latent import kernel

    scale, plan = call
    return kernel.latent_attention(*x, scale=scale, plan=plan)


def _form(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return a form of attention with one kv head, whose values are the whole entries."""

    def form(call: _Static, x: _Operands) -> jax.Array:
        kv = jax.tree.map(lambda leaf: leaf[:, :, None], x.cache)
        given = attention.Attended(x.q, kv, kv, x.lengths, x.table)
        return attend((None, call[0], None), given)[..., : rank_of(x.cache)]

    return form


_latent_attention = Op(
    "latent_attention",
    _form(attention.xla_form),
    _kernel,
    derivative=_form(attention.attend_at_once),
)


def latent_attention_reference(
    q: jax.Array,
    cache: jax.Array | LatentCodes,
    lengths: jax.Array,
    *,
    scale: float,
    table: jax.Array | None = None,
) -> jax.Array:
    """The definition in float32, every score at once; never optimised."""
    entries = cache if table is None else joined(cache, table)
    position = jnp.arange(entries.shape[1], dtype=jnp.int32)[None, :]
    visible = is_visible(lengths - 1, position, None)[:, :, None]
    seen = jnp.any(visible, axis=(1, 2))[..., None]
    entries = jnp.where(seen, entries.astype(jnp.float32), 0.0)
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    scores = scale * product("btnh,bsh->btns", q.astype(jnp.float32), entries)
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return product("btns,bsr->btnr", weights, entries[..., : rank_of(cache)]).astype(q.dtype)
