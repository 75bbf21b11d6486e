"""Calls of the ops beside a product: their shapes, values, and what they compute, in float64.

A call is checked at rows and heads that are drawn, for a result may be larger than numpy computes
in a second.  What an op must not read is NaN: cache entries past a row's length, tokens past a
sequence's end, and experts that no token has.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import erf

import pallas_kernels as pk
from jaxllama.model.mixers.attention.chunk import attend
from pallas_kernels.attention import op as attention
from pallas_kernels.attention import rope_attention, rope_cache
from pallas_kernels.dispatch import Plan, Reason
from pallas_kernels.experts import mixture as mixtures
from pallas_kernels.experts import plan as experts_plan
from pallas_kernels.experts.best import best, best_plan
from pallas_kernels.experts.gate import ClampedGate, Gate
from pallas_kernels.experts.route import norm_and_route
from pallas_kernels.experts.route_plan import RouteStatic, route_plan
from pallas_kernels.experts.summed_plan import summed_plan
from pallas_kernels.gated_delta import kernel as delta_kernel
from pallas_kernels.gated_delta import step_kernel as delta_step_kernel
from pallas_kernels.gla import kernel as gla_kernel
from pallas_kernels.gla import step_kernel as gla_step_kernel
from pallas_kernels.latent import chosen
from pallas_kernels.latent import op as latent
from pallas_kernels.latent import step as step_op
from pallas_kernels.latent.step_plan import LatentStep, step_plan
from pallas_kernels.matmul import gated
from pallas_kernels.qtensor import QTensor
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.rows import plan as rows_plan
from pallas_kernels.ssd import kernel as ssd_kernel
from pallas_kernels.ssd.op import ssd
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import cache_of, poisoned, values_of
from tests.helpers.latent_cases import in_codes
from tests.helpers.matmul_cases import error, exact, wide
from tests.helpers.random_products import quantized_weight

S = jax.ShapeDtypeStruct
BF16, F16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
INT8, E4M3, INT32 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int32)
# Relative RMS.  16-bit operands and the result are rounded once each.
LIMIT = 6e-3
Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class OpCall:
    """A call of an op.

    find: asks its planner.  function: ``function(*operands, implementation=)``.
    operands: shapes.  values: draws operands.
    check: ``check(results, operands, rng)`` compares results with float64, and returns their error.
    """

    op: str
    find: Callable[[], Plan | Reason]
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    values: Callable[[Rng], tuple[Any, ...]]
    check: Callable[[Any, tuple[Any, ...], Rng], float]

    def __str__(self) -> str:
        leaves = jax.tree.leaves(self.operands)
        return f"{self.op} {' '.join(f'{x.dtype.name}{list(x.shape)}' for x in leaves)}"

    @property
    def kernel(self) -> Callable[..., Any]:
        return functools.partial(self.function, implementation="mosaic")

    @property
    def size(self) -> int:
        """Elements of the operands."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.operands))


def normal(rng: Rng, like: Any, size: float = 1.0) -> jax.Array:
    """Return values like a shape.  A large array repeats a prime number of values."""
    count = min(math.prod(like.shape), 1_000_003)
    drawn = (size * rng.standard_normal(count)).astype(np.float32).astype(like.dtype)
    return as_jax(np.resize(drawn, like.shape))


def near(
    got: Any, want: np.ndarray, limit: float = LIMIT, sizes: tuple[np.ndarray, ...] = ()
) -> float:
    """Return the relative RMS, which is asserted.  The limit of results that are all 0 is 0.

    sizes: of the terms that ``want`` adds up.  Where terms cancel, the error is relative to the
    largest of ``want`` and these.
    """
    if not np.any(want):
        assert not np.any(wide(got))
        return 0.0
    least = np.linalg.norm(want) / max(map(np.linalg.norm, (want, *sizes)))
    found = float(error(got, want) * least)
    assert found <= limit, found
    return found


def _some(rng: Rng, count: int, most: int) -> np.ndarray:
    """Return up to ``most`` of ``count`` places, with the first and the last."""
    drawn = rng.integers(0, count, max(0, most - 2))
    return np.unique(np.concatenate([[0, count - 1], drawn]))[:count]


# --- experts --------------------------------------------------------------------------------------


def _gate64(y: np.ndarray, gate: Gate) -> np.ndarray:
    first, up = np.split(y, 2, axis=-1)
    if isinstance(gate, ClampedGate):
        first, up = np.minimum(first, gate.limit), np.clip(up, -gate.limit, gate.limit)
        return first / (1 + np.exp(-gate.alpha * first)) * (up + 1)
    if gate == "silu":
        return first / (1 + np.exp(-first)) * up
    if gate == "gelu":
        return first * (1 + erf(first / math.sqrt(2))) / 2 * up
    inner = np.sqrt(2 / np.pi) * (first + 0.044715 * first**3)
    return first * (1 + np.tanh(inner)) / 2 * up


def _rows_of(w: Any, expert: int, rows: np.ndarray) -> np.ndarray:
    """Return rows of an expert's weight in float64."""
    some = jax.tree.map(lambda leaf: np.asarray(leaf[expert])[rows], w)
    return exact(some) if isinstance(some, QTensor) else wide(some)


def grouped(
    tokens: int,
    chosen: int,
    w: Any,
    gate: Gate | None = None,
    *,
    weights: bool = False,
    bias: bool = False,
    own_rows: bool | None = None,
    first: int | None = None,
    planner: Callable[..., Any] | None = None,
) -> OpCall:
    """``grouped_matmul`` of w, shapes ``[E, N, K]``.

    own_rows: each pair has a row of x; by default where there is no gate.
    planner: one kernel's, asked in place of the op's.
    """
    n_experts, n, k = w.shape
    own_rows = gate is None if own_rows is None else own_rows
    x = S((tokens, chosen, k) if own_rows else (tokens, k), BF16)
    given: dict[str, Any] = {"weights": S((tokens, chosen), F32)} if weights else {}
    if bias:
        given["bias"] = S((n_experts, n), BF16)
    joined = chosen if weights and own_rows and gate is None else 0
    if planner is None:
        planner = functools.partial(experts_plan.plan, joined=joined)

    def find(x: Any = x, w: Any = w) -> Any:
        found = planner(x, w, tokens * chosen, gate)
        return found if first is None else experts_plan.partial(found)

    def run(x: Any, w: Any, experts: Any, given: Any, implementation: Any) -> Any:
        how = {"gated": gate, "first": first, "implementation": implementation}
        asked = lambda x, w, n_pairs, gate, **_: planner(x, w, n_pairs, gate)  # noqa: E731
        with mock.patch.object(experts_plan, "plan", asked):
            return pk.grouped_matmul(x, w, experts, **how, **given)

    def values(rng: Rng) -> tuple[Any, ...]:
        # One expert has no tokens, and of a share the last two numbers are other devices' experts.
        numbers = n_experts + (0 if first is None else 2)
        experts = np.argsort(rng.random((tokens, numbers)), axis=1)[:, :chosen]
        if n_experts > chosen:
            experts = np.where(experts == n_experts - 2, n_experts - 1, experts)
        floats = {name: normal(rng, like) for name, like in given.items()}
        made = quantized_weight(rng, w, 0.05) if isinstance(w, QTensor) else normal(rng, w, 0.02)
        unused = np.setdiff1d(np.arange(n_experts), experts)

        def poisoned(leaf: Any) -> Any:
            if not len(unused) or leaf.dtype.name not in ("bfloat16", "float16", "float32"):
                return leaf
            raw = np.array(leaf)
            raw[unused] = np.nan
            return as_jax(raw)

        return (
            normal(rng, x),
            jax.tree.map(poisoned, made),
            as_jax(experts + (first or 0), INT32),
            floats,
        )

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        x, w, experts, given = operands
        width = n // 2 if gate is not None else n
        columns = _some(rng, width, 32)
        rows = np.concatenate([columns, columns + width]) if gate is not None else columns
        tokens_of, experts = _some(rng, tokens, 8), np.asarray(experts) - (first or 0)
        want = np.zeros((len(tokens_of), chosen, len(columns)))
        for i, t in enumerate(tokens_of):
            for j, expert in enumerate(experts[t]):
                if expert >= n_experts:  # another device's
                    continue
                y = wide(x[t, j] if own_rows else x[t]) @ _rows_of(w, expert, rows).T
                y = y + wide(given["bias"])[expert, rows] if bias else y
                want[i, j] = y if gate is None else _gate64(y, gate)
        if weights:
            want = np.einsum("tjc,tj->tc", want, wide(given["weights"])[tokens_of])
        return near(wide(out)[tokens_of][..., columns], want)

    operands = x, w, S((tokens, chosen), INT32), given
    return OpCall("grouped_matmul", find, run, operands, values, check)


def mixture(k: int, gate_up: Any, down: Any, *, is_one_kernel: bool = False) -> OpCall:
    """A token's k experts of these shapes ``[E, 2F, D]`` and ``[E, D, F]`` and one like them.

    is_one_kernel: where another kernel is predicted to be shorter, too.
    """
    n_experts, d, f = down.shape
    one = lambda w: jax.tree.map(lambda leaf: S(leaf.shape[1:], leaf.dtype), w)  # noqa: E731
    x = mixtures.SharedMixture(
        S((1, d), BF16),
        mixtures.WithShared(gate_up, one(gate_up)),
        mixtures.WithShared(down, one(down)),
        S((1, k), INT32),
        S((1, k), F32),
        S((1, d), BF16),
    )

    def forced(*_: Any) -> Any:
        rows = experts_plan.row_plan(x.x, gate_up, k + 1, "silu")
        sums = summed_plan(S((1, k + 1, f), BF16), down, k + 1, k + 1)
        return next((p for p in (rows, sums) if isinstance(p, Reason)), None) or (
            mixtures.MixturePlan(rows, sums)  # pyright: ignore[reportArgumentType]
        )

    find = forced if is_one_kernel else functools.partial(mixtures.mixture_plan, x, "silu")

    def run(*operands: Any, implementation: Any) -> Any:
        with mock.patch.object(mixtures, "mixture_plan", lambda *_: find()):
            return mixtures.shared_mixture(
                mixtures.SharedMixture(*operands), "silu", implementation
            )

    def values(rng: Rng) -> tuple[Any, ...]:
        weights = [
            mixtures.WithShared(*(quantized_weight(rng, w, 0.05) for w in pair))
            for pair in (x.gate_up, x.down)
        ]
        chosen = rng.integers(0, n_experts, (1, k))
        given = normal(rng, x.x), *weights, as_jax(chosen, INT32)
        return *given, as_jax(rng.random((1, k)), F32), normal(rng, x.residual)

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        given = mixtures.SharedMixture(*operands)
        want = wide(given.residual)[0].copy()
        shares = [*zip(np.asarray(given.experts)[0], wide(given.weights)[0], strict=True), (-1, 1)]
        for expert, share in shares:

            def of(pair: Any, expert: int = expert) -> np.ndarray:
                many = jax.tree.map(operator.itemgetter(expert), pair.experts)
                return exact(pair.shared if expert < 0 else many)

            gate_up, down = of(given.gate_up), of(given.down)
            inner = _gate64(gate_up @ wide(given.x)[0], "silu")
            want += share * (down @ wide(as_jax(inner, BF16)))
        return near(wide(out)[0], want)

    return OpCall("shared_mixture", find, run, tuple(x), values, check)


def route(
    tokens: int, width: int, n: int, k: int, normalize: bool, sigmoid: bool = False
) -> OpCall:
    """sigmoid: scores are sigmoids, with a bias of the choice."""
    x, router = S((tokens, width), BF16), S((n, width), BF16)
    static = RouteStatic(k, normalize, 1.0, 1e-6, sigmoid)
    find = functools.partial(route_plan, x, router, static)

    def run(x: Any, gamma: Any, router: Any, *choice_bias: Any, implementation: Any) -> Any:
        how = {"k": k, "normalize": normalize, "sigmoid": sigmoid}
        how |= {"implementation": implementation}
        return norm_and_route(x, (gamma, 1e-6), router, None, *choice_bias, **how)

    def values(rng: Rng) -> tuple[Any, ...]:
        gamma = 1 + 0.1 * rng.standard_normal(width)
        given = normal(rng, x), as_jax(gamma, BF16), normal(rng, router, width**-0.5)
        return (*given, as_jax(rng.standard_normal(n), F32)) if sigmoid else given

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        (y, experts, weights), (x, gamma, router, *choice_bias) = out, operands
        floats = wide(x)
        normed = floats / np.sqrt(np.mean(floats**2, -1, keepdims=True) + 1e-6) * wide(gamma)
        logits = wide(y) @ wide(router).T
        powers = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits)
        by = powers + np.asarray(choice_bias[0]) if sigmoid else logits
        # Scores that are equal to float32 may come in either order.
        found, shares = (np.take_along_axis(v, np.asarray(experts), -1) for v in (by, powers))
        np.testing.assert_allclose(found, -np.sort(-by, -1)[:, :k], rtol=0, atol=1e-4)
        assert all(len(set(row)) == k for row in np.asarray(experts).tolist())
        if normalize or not sigmoid:
            shares = shares / (shares if normalize else powers).sum(-1, keepdims=True)
        np.testing.assert_allclose(wide(weights), shares, rtol=1e-3)
        return near(y, normed)

    operands = x, S((width,), BF16), router, *[S((n,), F32)] * sigmoid
    return OpCall("norm_and_route", find, run, operands, values, check)


def largest(rows: int, n: int, k: int) -> OpCall:
    scores = S((rows, n), F32)

    def values(rng: Rng) -> tuple[Any, ...]:
        return (as_jax(np.round(rng.standard_normal((rows, n)), 2) + 0.0, F32),)  # some are equal

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        (values, places), x = out, np.asarray(operands[0])
        order = np.argsort(-x, -1, kind="stable")[:, :k]
        np.testing.assert_array_equal(places, order)
        np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))
        return 0.0

    find = functools.partial(best_plan, scores, k)
    return OpCall("best", find, functools.partial(best, k=k), (scores,), values, check)


# --- attention ------------------------------------------------------------------------------------


def cache_shape(kind: str, shape: tuple[int, ...]) -> Any:
    """Return the shapes of a cache ``[B, S, K, H]`` of a dtype of floats or codes."""
    return jax.tree.map(
        lambda leaf: S((*shape[:3], *leaf.shape[3:]), leaf.dtype), _token(kind, shape[3])
    )


@functools.cache
def _token(kind: str, width: int) -> Any:
    """Return the shapes of a cache of one token: a trace is dear, and there are many shapes."""
    floats = S((1, 1, 1, width), kind if kind in ("bfloat16", "float16") else BF16)
    if floats.dtype.name == kind:
        return floats
    return jax.eval_shape(functools.partial(rope_cache.quantize_kv, dtype=kind), floats)


def _filled(rng: Rng, cache: Any, ends: np.ndarray | None) -> Any:
    """Return a cache whose tokens repeat a prime number of them, NaN from a row's end on."""
    first, *shape = cache.shape[:2], *cache.shape[2:]
    base = cache_of(rng.standard_normal((1, 1009, *shape)), jnp.dtype(cache.dtype).name)

    def spread(leaf: Any) -> Any:
        raw = np.asarray(leaf)[0]
        raw = np.resize(raw, (math.prod(first), *raw.shape[1:]))
        return as_jax(raw.reshape(*first, *raw.shape[1:]))

    cache = jax.tree.map(spread, base)
    return cache if ends is None else poisoned(cache, ends)


def _part(cache: Any, row: int, head: int, table: Any) -> np.ndarray:
    """Return the values of a row and kv head, ``[S, H]``, in the cache's basis."""
    if table is None:
        part = jax.tree.map(lambda leaf: leaf[row : row + 1, :, head : head + 1], cache)
        return values_of(part)[0, :, 0]
    pages = np.clip(np.asarray(table)[row], 0, cache.shape[0] - 1)
    part = jax.tree.map(lambda leaf: np.asarray(leaf[:, :, head : head + 1])[pages], cache)
    return values_of(part)[:, :, 0].reshape(-1, cache.shape[-1])


@functools.cache
def _basis(h: int) -> np.ndarray:
    """Return the basis of a cache of int4: Sylvester's matrix over its square root."""
    matrix = np.ones((1, 1))
    while len(matrix) < h:
        matrix = np.kron(matrix, [[1, 1], [1, -1]])
    return matrix * h**-0.5


def _attended(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    length: int,
    window: int | None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Return the attention of ``q [G, H]`` over ``k, v [S, H]``."""
    if length <= 0:
        return np.zeros_like(q)
    first = 0 if window is None else max(0, length - window)
    scores = q @ k[first:length].T * q.shape[-1] ** -0.5
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - top)
    return weights @ v[first:length] / total


def latents(
    batch: int,
    tokens: int,
    n: int,
    capacity: int,
    page: int = 0,
    places: int = 0,
    kind: str = "bfloat16",
) -> OpCall:
    """Latent attention of all keys, or with ``places`` of lists of up to so many keys.

    kind: the dtype of the cached latents.
    """
    pool = (2 * batch * capacity // page + 3, page) if page else (batch, capacity)
    table = S((batch, capacity // page), INT32) if page else None
    q = S((batch, tokens, n, 576), BF16)
    cache = jax.eval_shape(lambda: in_codes(jnp.zeros((*pool, 576), BF16), kind))
    seen = S((batch, tokens, places) if places else (batch, tokens), INT32)
    op = chosen.chosen_latent_attention if places else latent.latent_attention
    find = functools.partial(chosen.plan, q, cache, seen)
    if not places:
        find = functools.partial(latent.plan, q, cache, table)

    def run(q: Any, cache: Any, seen: Any, table: Any, implementation: Any) -> Any:
        return op(q, cache, seen, scale=576**-0.5, table=table, implementation=implementation)

    def values(rng: Rng) -> tuple[Any, ...]:
        counts = rng.integers(0, (places or capacity) + 1, (batch, tokens))
        for empty in (counts.shape, (batch, 1)):  # some tokens, and whole rows, have no key
            counts = np.where(rng.random(empty) < 1 / 8, 0, counts)
        counts.flat[-1] = places or capacity
        named = np.tile(np.arange(capacity), (batch, tokens, 1))
        if places:
            named = rng.permuted(named, axis=2)[..., :places]
        named = np.where(np.arange(named.shape[2]) < counts[..., None], named, -1)
        entries = np.array(normal(rng, S((batch, capacity, 576), BF16)))
        for row in range(batch):
            entries[row, np.setdiff1d(np.arange(capacity), named[row])] = np.nan
        pages = None
        if table is not None:
            at, held = rng.permutation(pool[0])[: table.size], np.full((*pool, 576), np.nan, BF16)
            held[at] = entries.reshape(-1, page, 576)
            entries, pages = held, as_jax(at.reshape(table.shape), INT32)
        return (
            normal(rng, q),
            in_codes(as_jax(entries), kind),
            as_jax(named if places else counts, INT32),
            pages,
        )

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        q, cache, seen, table = operands
        got, want = [], []
        for row in _some(rng, batch, 6):
            own = row if table is None else table[row]
            held = jax.tree.map(operator.itemgetter(own), cache).astype(jnp.float32)
            keys = wide(held).reshape(-1, 576)
            for token, at in enumerate(np.asarray(seen[row])):
                seen_keys = keys[at[at >= 0] if places else slice(at)]
                sums = _attended(wide(q[row, token]), seen_keys, seen_keys, len(seen_keys), None)
                want.append(sums[:, :512])
                got.append(wide(out[row, token]))
        return near(np.stack(got), np.stack(want))

    name = "chosen_latent_attention" if places else "latent_attention"
    return OpCall(name, find, run, (q, cache, seen, table), values, check)


def latent_step(batch: int, n: int, still: int, d_v: int, capacity: int, page: int = 0) -> OpCall:
    """A step's latent attention; the entry stands behind 40 other columns.  Row 1 has no token."""
    start, rank, r, eps = 40, 512, 64, 1e-5
    pool = (2 * batch * capacity // page + 3, page) if page else (batch, capacity)
    x = LatentStep(
        S((batch, n, still + r), BF16),
        S((batch, start + rank + r + 8), BF16),
        S((rank,), BF16),
        *[S((batch, r // 2), F32)] * 2,
        S((*pool, 1, rank + r), BF16),
        *[S((batch,), INT32)] * 2,
        S((batch, capacity // page), INT32) if page else None,
        S((n, still + d_v, rank), BF16),
    )

    def run(*operands: Any, implementation: Any) -> Any:
        given = LatentStep(*operands)
        return step_op.latent_step(given, start=start, eps=eps, implementation=implementation)

    def values(rng: Rng) -> tuple[Any, ...]:
        places = rng.integers(0, capacity, batch)
        places[0], is_new = capacity - 1, np.arange(batch) != 1
        angles = rng.uniform(0, 6, (batch, r // 2))
        entries = np.array(normal(rng, S((batch, capacity, rank + r), BF16)))
        for row, place in enumerate(places):
            entries[row, place:] = np.nan
        pages, held = None, entries
        if page:
            at, held = (
                rng.permutation(pool[0])[: batch * capacity // page],
                np.full((*pool, rank + r), np.nan, BF16),
            )
            held[at] = entries.reshape(-1, page, rank + r)
            pages = as_jax(at.reshape(batch, -1), INT32)
        return (
            normal(rng, x.q),
            normal(rng, x.entry),
            as_jax(1 + 0.1 * rng.standard_normal(rank), BF16),
            as_jax(np.cos(angles), F32),
            as_jax(np.sin(angles), F32),
            as_jax(held[:, :, None]),
            as_jax(np.where(is_new, places, capacity), INT32),
            as_jax(np.where(is_new, places + 1, 0), INT32),
            pages,
            normal(rng, x.up, rank**-0.5),
        )

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        (heads, cache), given = out, LatentStep(*operands)
        cos, sin = wide(given.cos), wide(given.sin)

        def turned(v: np.ndarray, row: int) -> np.ndarray:
            a, b = np.split(v, 2, -1)
            c, s = cos[row], sin[row]
            return np.concatenate([a * c - b * s, b * c + a * s], -1)

        got, want = [], []
        before, after = wide(given.cache), wide(cache)
        for row, seen in enumerate(np.asarray(given.lengths)):
            flat = (np.arange(len(before)) == row).nonzero()[0] if not page else given.table[row]
            keys = after[np.asarray(flat)].reshape(-1, rank + r)
            new = wide(given.entry)[row, start:][: rank + r]
            low = new[:rank] / np.sqrt(np.mean(new[:rank] ** 2) + eps) * wide(given.gamma)
            if seen:
                entry = np.concatenate([low, turned(new[rank:], row)])
                np.testing.assert_allclose(keys[seen - 1], entry, rtol=1e-2, atol=1e-2)
                place = (
                    (row, seen - 1) if not page else (flat[(seen - 1) // page], (seen - 1) % page)
                )
                before[place] = after[place]
            q, up = wide(given.q)[row], wide(given.up)
            both = np.einsum("nd,ndr->nr", q[:, :still], up[:, :still])
            both = (
                np.concatenate([both, turned(q[:, still:], row)], -1) * (576 / (still + r)) ** 0.5
            )
            sums = _attended(both, keys[:seen], keys[:seen], int(seen), None)[:, :rank]
            want.append(np.einsum("nr,nvr->nv", sums, up[:, still:]))
            got.append(wide(heads[row]))
        np.testing.assert_array_equal(before, after)  # nothing else was written
        return near(np.stack(got), np.stack(want))

    find = functools.partial(step_plan, x)
    return OpCall("latent_step", find, run, tuple(x), values, check)


def latent_prompt(batch: int, tokens: int, n: int) -> OpCall:
    """Causal attention of a prompt from latents: heads of 192 features, and values of 128."""
    qk, v = S((batch, tokens, n, 192), BF16), S((batch, tokens, n, 128), BF16)

    def run(q: Any, k: Any, v: Any, implementation: Any) -> Any:
        del implementation  # cuDNN's, where it is
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
        return attend(q, k, v, positions, None)

    def values(rng: Rng) -> tuple[Any, ...]:
        return normal(rng, qk), normal(rng, qk), normal(rng, v)

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        got, want = [], []
        for row, head in itertools.product(_some(rng, batch, 3), _some(rng, n, 3)):
            q, k, v, o = (wide(x[row, :, head]) for x in (*operands, out))
            for token in _some(rng, tokens, 40):
                want.append(_attended(q[token, None], k, v, token + 1, None))
                got.append(o[token, None])
        return near(np.stack(got), np.stack(want))

    find = functools.partial(Reason, "prompts have no kernel of this package")
    return OpCall("latent_prompt", find, run, (qk, qk, v), values, check)


def decode(
    heads: tuple[int, int, int],
    batch: int,
    capacity: int,
    kind: str = "bfloat16",
    *,
    tokens: int | None = None,
    page: int | None = None,
    window: int | None = None,
    sinks: bool = False,
    dtype: Any = BF16,
) -> OpCall:
    """heads: query heads, kv heads, features.  kind: the cache's dtype.  tokens: of a row."""
    n, n_kv, h = heads
    shape = (batch,) if tokens is None else (batch, tokens)
    table, cache = None, (batch, capacity)
    if page is not None:
        cache, table = (2 * batch + 5, page), S((batch, max(1, capacity // page)), INT32)
        capacity = table.shape[1] * page
    k = cache_shape(kind, (*cache, n_kv, h))
    q = S((*shape, n, h), dtype)
    given: dict[str, Any] = {} if table is None else {"table": table}
    if sinks:
        given["sinks"] = S((n,), F32)

    def run(q: Any, k: Any, v: Any, lengths: Any, given: Any, implementation: Any) -> Any:
        how = {"window": window, "implementation": implementation}
        return pk.decode_attention(q, k, v, lengths, **how, **given)

    def values(rng: Rng) -> tuple[Any, ...]:
        lengths = rng.integers(0, capacity + 1, shape)
        lengths.flat[-1] = capacity
        ends = lengths if tokens is None else lengths.max(1)
        made: dict[str, Any] = {}
        if table is not None:
            numbers = rng.integers(0, cache[0], table.shape)
            unused = np.arange(table.shape[1]) >= -(-ends[:, None] // page)
            made["table"] = as_jax(np.where(unused, 2**31 - 1, numbers), INT32)
        if sinks:
            made["sinks"] = normal(rng, given["sinks"])
        caches = (_filled(rng, k, None if table is not None else ends) for _ in range(2))
        return normal(rng, q), *caches, as_jax(lengths, INT32), made

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        q, k, v, lengths, given = operands
        q, out = (wide(x).reshape(batch, -1, n, h) for x in (q, out))
        lengths, group = np.asarray(lengths).reshape(batch, -1), n // n_kv
        got, want = [], []
        for row in _some(rng, batch, 3):
            for head in _some(rng, n_kv, 2):
                of_head = slice(head * group, (head + 1) * group)
                own = None if not sinks else wide(given["sinks"])[of_head]
                keys, held = (_part(x, row, head, given.get("table")) for x in (k, v))
                for t, length in enumerate(lengths[row]):
                    y = _attended(q[row, t, of_head], keys, held, length, window, own)
                    want.append(y @ _basis(h) if kind == "int4" else y)
                    got.append(out[row, t, of_head])
        return near(np.stack(got), np.stack(want))

    find = functools.partial(attention.plan, q, k, k, table)
    operands = q, k, k, S(shape, INT32), given
    return OpCall("decode_attention", find, run, operands, values, check)


class _NewTokens(NamedTuple):
    """Operands of the ops that write new tokens, and what they write in float64."""

    qkv: Any
    cos: Any
    sin: Any
    k: Any
    v: Any
    slots: Any

    def turned(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return a row's q ``[N, H]``, k and v ``[K, H]``, rotated, in the cache's basis."""
        n_kv, x = self.k.shape[2], wide(self.qkv[row])
        c, s = wide(self.cos[row]), wide(self.sin[row])
        first, second = np.split(x, 2, axis=-1)
        rotated = np.concatenate((first * c - second * s, second * c + first * s), -1)
        q, k, v = rotated[: -2 * n_kv], rotated[-2 * n_kv : -n_kv], x[-n_kv:]
        if self.k.dtype != jnp.int4:
            return q, k, v
        rounded = (as_jax(y, self.qkv.dtype) for y in (q, k, v))
        q, k, v = (wide(y) @ _basis(x.shape[-1]) for y in rounded)
        return q, k, v

    def check_written(self, new_k: Any, new_v: Any) -> float:
        """Every other token has the bits that it had, and a new one is rounded once."""
        worst, slots, capacity = 0.0, np.asarray(self.slots), self.k.shape[1]
        for new, old, which in ((new_k, self.k, 1), (new_v, self.v, 2)):
            leaves = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
            inside = [(row, slot) for row, slot in enumerate(slots) if 0 <= slot < capacity]
            for a, b in leaves:
                a, b = np.array(a), np.array(b)
                for row, slot in inside:
                    a[row, slot] = b[row, slot] = 0
                assert a.tobytes() == b.tobytes()
            for row, slot in inside:
                one = jax.tree.map(operator.itemgetter((row, slot)), new)
                got, want = values_of(one), self.turned(row)[which]
                worst = max(worst, self._rounding(one, got, want))
        return worst

    def _rounding(self, stored: Any, got: np.ndarray, want: np.ndarray) -> float:
        if not isinstance(stored, QTensor):
            return near(got, want)
        scale = np.repeat(wide(stored.scale), stored.group_size, axis=-1)
        step = scale if stored.dtype != E4M3 else np.maximum(np.abs(want) / 8, scale * 2.0**-9)
        # x was rounded to 16 bits; zeros and scales of int4 are float16.
        slack = 2.0**-8 * np.abs(want) + (0.01 * np.abs(want).max() if step is scale else 0)
        assert (np.abs(got - want) <= 0.51 * step + slack).all()
        return float(np.sqrt(np.sum((got - want) ** 2) / np.sum(want**2)))


def _new_tokens(heads: tuple[int, int, int], batch: int, capacity: int, kind: str, dtype: Any):
    n, n_kv, h = heads
    k, half = cache_shape(kind, (batch, capacity, n_kv, h)), S((batch, h // 2), F32)
    qkv = S((batch, n + 2 * n_kv, h), dtype)

    def values(rng: Rng) -> tuple[Any, ...]:
        slots = rng.integers(0, capacity, batch)
        if batch > 2:
            slots[1] = capacity  # writes nothing
        angle = rng.uniform(0, 6, half.shape)
        cos, sin = as_jax(np.cos(angle), F32), as_jax(np.sin(angle), F32)
        caches = (_filled(rng, k, slots) for _ in range(2))
        return normal(rng, qkv), cos, sin, *caches, as_jax(slots, INT32)

    return (qkv, half, half, k, k, S((batch,), INT32)), values


def rope_write(
    heads: tuple[int, int, int], batch: int, capacity: int, kind: str, dtype: Any = BF16
) -> OpCall:
    operands, values = _new_tokens(heads, batch, capacity, kind, dtype)

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        (q, k, v), given = out, _NewTokens(*operands)
        want = np.stack([given.turned(row)[0] for row in range(batch)])
        return max(near(q, want), given.check_written(k, v))

    find = functools.partial(rope_cache.plan, operands[0], operands[3])
    return OpCall("rope_and_write", find, pk.rope_and_write, operands, values, check)


def rope_attend(
    heads: tuple[int, int, int], batch: int, capacity: int, kind: str, dtype: Any = BF16
) -> OpCall:
    operands, values = _new_tokens(heads, batch, capacity, kind, dtype)
    n, n_kv, _ = heads
    group = n // n_kv

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        (heads, k, v), given = out, _NewTokens(*operands)
        got, want = [], []
        for row, slot in enumerate(np.asarray(given.slots)):
            length = slot + 1 if slot < capacity else 0
            for head in _some(rng, n_kv, 2):
                of_head = slice(head * group, (head + 1) * group)
                keys, held = (_part(x, row, head, None) for x in (k, v))
                got.append(wide(heads[row, of_head]))
                q = given.turned(row)[0][of_head]
                want.append(_attended(q, keys, held, length, None))
        return max(near(np.stack(got), np.stack(want)), given.check_written(k, v))

    find = functools.partial(rope_attention.plan, operands[0], operands[3])
    return OpCall("rope_and_attend", find, pk.rope_and_attend, operands, values, check)


# --- recurrences ----------------------------------------------------------------------------------


class Recursion(NamedTuple):
    """o ``[T, Dv]``, the last state, and the sizes ``[T, Dv]`` of the terms that o adds up.

    A kernel rounds q, k and the state in each key channel.  The error is as large as channels' root
    sum of squares.  It also rounds the sums over parts of the channels, and the error is up to the
    sum of their absolute values.
    """

    o: np.ndarray
    state: np.ndarray
    sizes: tuple[np.ndarray, np.ndarray]


def recursion(
    heads: Heads, state: np.ndarray, scale: float, normalize: bool = False, n_parts: int = 1
) -> Recursion:
    """Compute one head by the definition in float64.

    n_parts: parts of the key channels, each of which a kernel adds up before it rounds.
    normalize: a kernel's operands are q and k that are normalized and rounded to their dtype.
    """
    q, k, v, log_decay = map(wide, heads[:4])
    beta = None if heads.beta is None else wide(heads.beta)
    if normalize:
        unit = (x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
        q, k = (wide(x.astype(heads.q.dtype)) for x in unit)
    decay, (o, channels, parts) = np.exp(log_decay), np.zeros((3, *v.shape))
    for t in range(len(q)):
        state = (decay[t] if decay.ndim == 1 else decay[t][:, None]) * state
        change = v[t] if beta is None else beta[t] * (v[t] - k[t] @ state)
        state = state + k[t][:, None] * change
        of_parts = q[t].reshape(n_parts, 1, -1) @ state.reshape(n_parts, -1, v.shape[-1])
        o[t], parts[t] = scale * of_parts.sum((0, 1)), scale * np.abs(of_parts).sum((0, 1))
        channels[t] = scale * np.sqrt(q[t] ** 2 @ state**2)
    return Recursion(o, state, (channels, parts))


def _drawn_heads(rng: Rng, like: Heads) -> Heads:
    """Return values of a layer's size."""
    unit = like.q.shape[-1] ** -0.5
    q, k = normal(rng, like.q, unit), normal(rng, like.k, unit)
    log_decay = as_jax(-np.log1p(np.exp(-wide(normal(rng, like.log_decay)))), F32)
    beta = None if like.beta is None else as_jax(rng.uniform(size=like.beta.shape), F32)
    return Heads(q, k, normal(rng, like.v), log_decay, beta)


def sequences(
    op: str,
    batch: int,
    length: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    *,
    by_channel: bool = True,
    initial: bool = False,
    ends: bool = False,
    normalize: bool = False,
) -> OpCall:
    """``gla``, ``gated_delta`` or ``ssd``.

    heads: of keys, and of values.  ends: rows end early.
    """
    (hk, h), (dk, dv) = heads, widths
    q, v = S((batch, length, hk, dk), BF16), S((batch, length, h, dv), BF16)
    g = S((batch, length, h, dk) if by_channel else (batch, length, h), F32)
    like = Heads(q, q, v, g, S((batch, length, h), F32) if op == "gated_delta" else None)
    given: dict[str, Any] = {"initial_state": S((batch, h, dk, dv), F32)} if initial else {}
    if ends:
        given["lengths"] = S((batch,), INT32)
    function = {"gla": pk.gla, "gated_delta": pk.gated_delta, "ssd": ssd}[op]
    planner = {"gla": gla_kernel, "gated_delta": delta_kernel, "ssd": ssd_kernel}[op].plan
    scale, n_parts = 1.0 if op == "ssd" else dk**-0.5, max(1, dk // 128) if op == "gla" else 1
    how: dict[str, Any] = {"normalize_qk": normalize} if op == "gated_delta" else {}

    def run(heads: Any, given: Any, implementation: Any) -> Any:
        operands = [x for x in heads if x is not None]
        return function(*operands, implementation=implementation, **how, **given)

    def values(rng: Rng) -> tuple[Any, ...]:
        made, own = _drawn_heads(rng, like), {}
        if initial:
            own["initial_state"] = normal(rng, given["initial_state"])
        if ends:
            lengths = rng.integers(0, length + 1, batch)
            own["lengths"], made = as_jax(lengths, INT32), poisoned(made, lengths)
        return made, own

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        (o, state), (heads, own) = out, operands
        worst, o = 0.0, wide(o)
        for b in _some(rng, batch, 2)[-2:]:
            count = int(own["lengths"][b]) if ends else length
            assert not o[b, count:].any()
            for head in _some(rng, h, 2)[-2:]:
                key = head // (h // hk)
                parts = [heads.q[b, :count, key], heads.k[b, :count, key]]
                parts += [x[b, :count, head] for x in heads[2:] if x is not None]
                first = wide(own["initial_state"][b, head]) if initial else np.zeros((dk, dv))
                want = recursion(Heads(*parts), first, scale, normalize, n_parts)
                worst = max(worst, near(state[b, head], want.state))
                worst = max(worst, near(o[b, :count, head], want.o, sizes=want.sizes))
        return worst

    return OpCall(op, functools.partial(planner, like), run, (like, given), values, check)


def step(
    op: str,
    batch: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    *,
    by_channel: bool = True,
    dtype: Any = BF16,
) -> OpCall:
    """``gla_step`` or ``gated_delta_step``."""
    (hk, h), (dk, dv) = heads, widths
    q, v = S((batch, hk, dk), dtype), S((batch, h, dv), dtype)
    g = S((batch, h, dk) if by_channel else (batch, h), F32)
    is_delta = op == "gated_delta_step"
    like = Heads(q, q, v, g, S((batch, h), F32) if is_delta else None)
    function = pk.gated_delta_step if is_delta else pk.gla_step
    planner = (delta_step_kernel if is_delta else gla_step_kernel).plan
    state = S((batch, h, dk, dv), F32)

    def run(heads: Any, state: Any, implementation: Any) -> Any:
        operands = [x for x in heads if x is not None]
        return function(*operands, state, implementation=implementation)

    def values(rng: Rng) -> tuple[Any, ...]:
        return _drawn_heads(rng, like), normal(rng, state)

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        (o, new), (heads, state) = out, operands
        worst = 0.0
        for b in _some(rng, batch, 3):
            for head in _some(rng, h, 3):
                key = head // (h // hk)
                parts = [heads.q[b, key], heads.k[b, key]]
                parts += [x[b, head] for x in heads[2:] if x is not None]
                one = Heads(*(np.asarray(x)[None] for x in parts))
                want = recursion(one, wide(state[b, head]), dk**-0.5)
                worst = max(worst, near(o[b, head], want.o[0]))
                worst = max(worst, near(new[b, head], want.state, 1e-5))
        return worst

    return OpCall(op, functools.partial(planner, q, q, v), run, (like, state), values, check)


# --- rows -----------------------------------------------------------------------------------------

ENDS = {"int8": (-128, 127), "float8_e4m3fn": (-448, 448)}


def _check_codes(got: QTensor, want: np.ndarray, rows: np.ndarray, given: Any) -> float:
    """Codes are the nearest ones.  Return by how much of a step they are beyond half of one."""
    name = got.dtype.name
    scale = wide(got.scale)[rows]
    if given is None:
        limit = np.abs(want).max(-1, keepdims=True) / (127 if name == "int8" else 448)
        np.testing.assert_allclose(scale, limit, rtol=1e-5)
    else:
        np.testing.assert_array_equal(scale, np.full_like(scale, wide(given)))
    steps = np.clip(want / np.where(scale > 0, scale, 1), *ENDS[name])
    half = 0.5 if name == "int8" else np.abs(steps) * 2.0**-4 + 2.0**-10
    beyond = np.abs(wide(got.q)[rows] - steps) - half
    assert (beyond <= 1e-4 * np.abs(steps) + 1e-5).all(), beyond.max()
    return float(max(0.0, beyond.max()))


def rowwise(
    op: str,
    rows: int,
    width: int,
    codes: str | None,
    *,
    given: bool = False,
    residual: bool = False,
    weight: Any = BF16,
    dtype: Any = BF16,
) -> OpCall:
    """``rms_norm``, ``swiglu`` or ``quantize_tokens``.  given: codes have a scale that is given."""
    form = {"rms_norm": "norm", "swiglu": "gate", "quantize_tokens": "copy"}[op]
    x = S((rows, 2 * width if form == "gate" else width), dtype)
    like = {"x": x, "scale": S((), F32) if given else None}
    if form == "norm":
        like |= {"weight": S((width,), weight), "residual": x if residual else None}
    more = (like["weight"], like["residual"], 1e-5) if form == "norm" else ()
    out = codes or dtype.name
    find = functools.partial(rows_plan.plan, form, x, out, *more, given=given)

    def run(operands: Any, implementation: Any) -> Any:
        x, scale = operands["x"], operands["scale"]
        how = {"implementation": implementation} | ({} if scale is None else {"scale": scale})
        if form == "copy":
            return pk.quantize_tokens(x, dtype=codes, **how)
        if form == "gate":
            return pk.swiglu(x, quantize=codes, **how)
        residual = operands["residual"]
        return pk.rms_norm(x, operands["weight"], 1e-5, quantize=codes, residual=residual, **how)

    def values(rng: Rng) -> tuple[Any, ...]:
        made = {k: None if x is None else normal(rng, x) for k, x in like.items()}
        if given:
            made["scale"] = as_jax(0.03 if codes == "int8" else 0.008, F32)  # some are clipped
        return (made,)

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        made, some = operands[0], _some(rng, rows, 48)
        y = wide(made["x"])[some]
        if form == "gate":
            gate, up = np.split(y, 2, axis=-1)
            y = gate / (1 + np.exp(-gate)) * up
        if form == "norm":
            if residual:
                out, total = out
                y = wide((y + wide(made["residual"])[some]).astype(np.float32).astype(dtype))
                np.testing.assert_array_equal(wide(total)[some], y)
            y = y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-5) * wide(made["weight"])
        if codes is None:
            return near(wide(out)[some], y)
        return _check_codes(out, y, some, made["scale"])

    return OpCall(op, find, run, (like,), values, check)


def tensor_core_sums(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return x @ w.T of float8 codes as Hopper's tensor cores add them, ``[m, n]`` in float64.

    A step takes 32 products and the sum so far, cut to 14 bits below the largest of them.  After
    every 8 steps the sum goes to a float32 one (``promote`` of the plans).
    """
    of_steps = np.zeros((len(x), len(w)))
    total = of_steps.astype(np.float32)
    for start in range(0, x.shape[1], 32):
        terms = x[:, None, start : start + 32] * w[None, :, start : start + 32]
        terms = np.concatenate([terms, of_steps[..., None]], axis=-1)
        unit = np.exp2(np.frexp(np.abs(terms).max(-1, keepdims=True))[1] - 14.0)
        of_steps = (np.trunc(terms / unit) * unit).sum(-1)
        if start % 256 == 224:
            total, of_steps = total + of_steps.astype(np.float32), np.zeros_like(of_steps)
    return (total + of_steps.astype(np.float32)).astype(np.float64)


def gated_product(m: int, n: int, k: int) -> OpCall:
    """``gated_matmul``: float8 of one scale by float8, silu(gate) * up, float8 of one scale."""
    x = QTensor(S((m, k), E4M3), S((m, 1), F32))
    w = QTensor(S((n, k), E4M3), S((n, 1), F32))

    def values(rng: Rng) -> tuple[Any, ...]:
        def drawn(like: QTensor, scale: float) -> QTensor:
            q = as_jax(np.clip(120 * rng.standard_normal(like.shape), -448, 448), E4M3)
            return QTensor(q, as_jax(scale * rng.uniform(0.5, 1, like.scale.shape), F32))

        return drawn(x, 0.01), drawn(w, 0.01 * k**-0.5), as_jax(0.004, F32)

    def check(out: Any, operands: tuple[Any, ...], rng: Rng) -> float:
        x, w, scale = operands
        columns, rows = _some(rng, n // 2, 32), _some(rng, m, 48)
        take = np.concatenate([columns, columns + n // 2])
        scales = wide(x.scale)[rows] * wide(w.scale)[take].T
        y = want = (wide(x.q)[rows] @ wide(w.q)[take].T) * scales
        if jax.default_backend() == "gpu":  # the emulator adds exactly
            y = tensor_core_sums(wide(x.q)[rows], wide(w.q)[take]) * scales
        steps = np.clip(_gate64(y, "silu") / float(scale), *ENDS["float8_e4m3fn"])
        beyond = np.abs(wide(out.q)[rows][:, columns] - steps) - np.abs(steps) / 16 - 2.0**-10
        # An error of gate or of up is multiplied by the other: silu's slope is below 1.1.  A
        # quarter of the tensor cores' largest error is what their own order of terms may change.
        gate, up = np.split(y, 2, axis=-1)
        slope = 1.1 * np.abs(up) + np.abs(gate / (1 + np.exp(-gate)))
        of_sums = np.abs(y - want).max() / 4 * slope / float(scale)
        assert (beyond <= 2.0**-9 * np.abs(steps) + of_sums).all(), beyond.max()
        return float(max(0.0, beyond.max()))

    find = functools.partial(gated._plan, x, w)
    run = functools.partial(gated.gated_matmul, dtype=F32)
    return OpCall("gated_matmul", find, run, (x, w, S((), F32)), values, check)
