"""Latent attention of each token over a list of cached tokens, as an indexer chooses them.

    out[b, t, n] = softmax_k(scale * q[b, t, n] . e_k) e_k[:512],   e_k = cache[b, chosen[b, t, k]]

Contract, as ``latent.op``'s: a negative place is free, free places come last, and a list without
tokens gives zeros.  Entries that no list names, even NaN, never change a result.

Source: DeepSeek-V3.2's sparse attention; the exact form over the chosen tokens.  A block gathers a
chunk of a list and multiplies it: ``latent.chosen_program``, or with up to 16 heads, whose bytes
take longer than their products, ``latent.few_program``.  Each token of a prompt has a list, too.
Left out: lists that query heads do not share, and latents in 8 bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.device import gpu, lacking
from pallas_kernels.dispatch import (
    Implementation,
    Plan,
    Predicted,
    Reason,
    choose_plan,
    is_empty,
    shortest,
)
from pallas_kernels.fixed_sums import planned_rows
from pallas_kernels.latent.op import check_latents
from pallas_kernels.latent.plan import (
    FEW_ROWS,
    LATENT,
    ROUND,
    TILE,
    WIDTH,
    LatentPlan,
    chunks_of,
    microseconds,
    xla_microseconds,
)
from pallas_kernels.transform import Op
from pallas_kernels.transform import chosen as implementation_of

_Static = tuple[float, Plan | None]  # scale, the kernel's plan
_OPERANDS = {
    "q": "float [B, T, N, H]",
    "cache": "q [B, S+, H]",
    "chosen": "int32 [B, T, K+]",
    "table": "int32 [B, M+] ?",
}
TOKENS = 16  # query tokens whose entries XLA's form gathers at once


@dataclasses.dataclass(frozen=True)
class ChosenPlan(Predicted):
    """chunk: tokens of a list that a block takes.

    few: query rows of the program for few, or 0: the program for 64.
    """

    kernel: ClassVar[str] = "chosen_latents_mosaic"
    chunk: int
    few: int = 0

    def __str__(self) -> str:
        program = f"{self.few} query rows, " if self.few else ""
        return f"{program}chunks of {self.chunk} tokens"

    def representative(self) -> ChosenPlan:
        return dataclasses.replace(self, chunk=_round(self.few))


def _round(few: int) -> int:
    """Return the tokens of a round of the program, of which chunks are multiples."""
    return TILE if few else ROUND


def chosen_latent_attention(
    q: jax.Array,
    cache: jax.Array,
    chosen: jax.Array,
    *,
    scale: float,
    table: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Return the sums of latents that each token's query heads attend to.

    Parameters
    ----------
    q : float [B, T, N, 576]
        The query heads, absorbed, as ``latent_attention`` takes them.
    cache : [B, S, 576], of q's dtype, or pages ``[P, page, 576]`` with a table
    chosen : int32 [B, T, K]
        The cached tokens of its row that a token attends to, each once and in any order.  A
        negative place is free, and free places come last.
    scale : float
        Factor of the scores.
    table : int32 [B, M], optional
        As ``latent_attention`` takes it.
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
    name = "chosen_latent_attention"
    check_latents(name, _OPERANDS, q=q, cache=cache, chosen=chosen, table=table)
    found = choose_plan(name, implementation, lambda: plan(q, cache, chosen), q, cache)
    if is_empty(q, cache):
        return jnp.zeros((*q.shape[:3], LATENT), q.dtype)
    places = places_of(cache, chosen, table)
    call = float(scale), found
    flat = cache.reshape(-1, cache.shape[-1])
    return _attention(implementation_of(found, implementation), call, q, flat, places)


def plan(q: jax.Array, cache: jax.Array, chosen: jax.Array) -> ChosenPlan | Reason:
    """Return the chunk with the least predicted time."""
    if reason := lacking("wgmma"):
        return Reason(reason)
    if q.dtype != jnp.bfloat16 or cache.dtype != jnp.bfloat16:
        return Reason(
            f"q is {q.dtype.name} and cache {cache.dtype.name}; the kernel takes bfloat16"
        )
    batch, tokens, n, width = q.shape
    if width != WIDTH:
        return Reason(f"q has {width} features; the kernel takes 512 + 64")
    lists, places = planned_rows(batch * tokens), chosen.shape[2]
    gather_us = 2 * lists * places * 2 * WIDTH / gpu().copy_rate * 1e6  # reads and writes
    return shortest(
        plans(n, places),
        lambda one: microseconds(LatentPlan(one.chunk, one.few), lists, n, places),
        lambda: gather_us + xla_microseconds(lists, n, places),
    )


def plans(n: int, places: int) -> list[ChosenPlan]:
    """Return the plans of lists of so many places, one for each number of chunks."""
    few = FEW_ROWS if n <= FEW_ROWS else 0
    return [ChosenPlan(chunk, few) for chunk in chunks_of(places, _round(few))]


def places_of(cache: jax.Array, chosen: jax.Array, table: jax.Array | None) -> jax.Array:
    """Return the chosen tokens' places among all tokens of the cache; -1 where a place is free."""
    if table is None:
        rows = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None, None]
        held = rows * cache.shape[1] + chosen
    else:
        page = cache.shape[1]
        pages = jnp.take_along_axis(table[:, None], jnp.maximum(chosen, 0) // page, axis=2)
        held = pages * page + chosen % page
    return jnp.where(chosen >= 0, held, -1)


def _kernel(call: _Static, q: jax.Array, cache: jax.Array, places: jax.Array) -> jax.Array:
    from pallas_kernels.latent import kernel

    scale, plan = call
    assert isinstance(plan, ChosenPlan)
    queries, lists = q.reshape(-1, *q.shape[2:]), places.reshape(-1, places.shape[-1])
    few = bool(plan.few)
    out = kernel.chosen_attention(queries, cache, lists, scale=scale, chunk=plan.chunk, few=few)
    return out.reshape(*q.shape[:3], LATENT)


def _xla(call: _Static, q: jax.Array, cache: jax.Array, places: jax.Array) -> jax.Array:
    def token(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, places = given
        taken = places >= 0
        entries = cache.at[jnp.where(taken, places, len(cache))].get(mode="fill", fill_value=0)
        return attend_list(q, entries, entries[:, :LATENT], taken, call[0])

    flat = q.reshape(-1, *q.shape[2:]), places.reshape(-1, places.shape[-1])
    return lax.map(token, flat, batch_size=TOKENS).reshape(*q.shape[:3], LATENT)


_attention = Op("chosen_latent_attention", _xla, _kernel)


def attend_list(
    q: jax.Array, keys: jax.Array, values: jax.Array, taken: jax.Array, scale: float
) -> jax.Array:
    """Return the attention of ``q [..., N, H]`` over a list: keys ``[..., K, H]``, their values.

    Only keys that are ``taken [..., K]`` count. A list without any gives zeros.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    if q.dtype == jnp.float32:  # which a GPU may round to TF32
        product = functools.partial(product, precision=lax.Precision.HIGHEST)
    scores = scale * product("...nh,...kh->...nk", q, keys)
    scores = jnp.where(taken[..., None, :], scores, -jnp.inf)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    out = product("...nk,...kr->...nr", weights.astype(q.dtype), values)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return (out / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
