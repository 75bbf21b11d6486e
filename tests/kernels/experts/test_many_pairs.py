"""The Mosaic kernel of many pairs: sorting, plans, code for CUDA, and values on a GPU."""

from __future__ import annotations

import functools
import sys
from types import SimpleNamespace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import QTensor, grouped_matmul, quantize
from pallas_kernels import ptx as p
from pallas_kernels.device import tiles_of
from pallas_kernels.dispatch import Reason
from pallas_kernels.experts import blocks
from pallas_kernels.experts import plan as planning
from pallas_kernels.experts.gate import ClampedGate, apply_gate
from pallas_kernels.experts.many_pairs import finish_program, gather_program, plan, sort_kernel
from pallas_kernels.experts.many_pairs.finish_program import PairsFinish
from pallas_kernels.experts.many_pairs.gather_program import GatherShape, RowCopies, RowGather
from pallas_kernels.experts.many_pairs.plan import (
    GroupedTilePlan,
    TokenTile,
    tile_plan,
)
from pallas_kernels.experts.op import GroupedStatic, grouped_matmul_reference, planned
from pallas_kernels.launch import launch
from pallas_kernels.matmul.many_rows.plan import WeightTile
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import tree_bytes
from pallas_kernels.rounding import FORMATS
from tests.helpers.matmul_cases import activations, newest
from tests.helpers.warp_emulator import emulated

CODES_TILES = tiles_of("pairs codes", WeightTile)
GATES = {"none": None, "silu": "silu", "gelu_tanh": "gelu_tanh", "clamped": ClampedGate()}
GROUPS = {  # of int4: columns, whether it is symmetric
    "int4": (128, True),
    "zeros": (128, False),
    "int4-64": (64, True),
    "int4-32": (32, True),
    "zeros-64": (64, False),
}
SCHEMES = ["bfloat16", "int8", "int4", "zeros", "int4-64", *FORMATS]


def stacked(scheme: str, n_experts: int, n: int, k: int):
    """Random experts ``[E, N, K]`` whose values no code clips."""
    keys = jax.random.split(jax.random.key(0), n_experts)
    floats = [(jax.random.normal(key, (n, k)) * k**-0.5).astype(jnp.bfloat16) for key in keys]
    if scheme == "bfloat16":
        return jnp.stack(floats)
    how = GROUPS.get(scheme)
    dtype = scheme if how is None else "int4"
    options = {} if how is None else {"group_size": how[0], "symmetric": how[1]}
    return jax.tree.map(lambda *v: jnp.stack(v), *(quantize(w, dtype, **options) for w in floats))


def outline(scheme: str, n_experts: int, n: int, k: int):
    return jax.eval_shape(functools.partial(stacked, scheme, n_experts, n, k))


# --- pairs by expert ---


SORTED = [(1, 5, 2), (4, 7, 16), (9, 70, 3)]  # experts, pairs, the most in a part
parts = jax.jit(blocks.parts_of_pairs, static_argnums=(1, 2))


@hypothesis.given(st.data(), st.sampled_from(SORTED))
@hypothesis.settings(max_examples=60, deadline=None)
def test_parts_hold_every_pair_once(data, sizes) -> None:
    n_experts, n_pairs, size = sizes
    drawn = st.lists(st.integers(0, n_experts), min_size=n_pairs, max_size=n_pairs)
    experts = np.asarray(data.draw(drawn), np.int32)  # n_experts is none
    found = parts(experts, n_experts, size)
    order, work = np.asarray(found.order), np.asarray(found.work)
    np.testing.assert_array_equal(order, np.argsort(experts, kind="stable"))
    count, rows = work[0, 0], work[1:, :3]
    assert count <= len(rows) == blocks.most_blocks(n_pairs, n_experts, size)
    places = []
    for expert, first, end in rows[:count]:
        assert 0 < end - first <= size
        assert (experts[order[first:end]] == expert).all()
        places += range(first, end)
    assert places == list(range((experts < n_experts).sum()))


@newest
@pytest.mark.parametrize(
    "n_experts,n_pairs,size", [(5, 40, 4), (128, 96, 16), (1, 3, 2), (40, 1100, 32)]
)
def test_the_sort_s_code_on_numpy(n_experts, n_pairs, size) -> None:
    """As XLA's form, but for the order of one expert's pairs."""
    experts = np.random.default_rng(0).integers(0, n_experts + 1, n_pairs).astype(np.int32)
    with emulated(sort_kernel):
        found = sort_kernel.parts_of_pairs(jnp.asarray(experts), n_experts, size)
    check_parts(found, experts, n_experts, size)


@newest
def test_a_cluster_s_sort_on_numpy(monkeypatch) -> None:
    """Four blocks of 128 threads, which have up to two pairs each."""
    for name, value in {"THREADS": 128, "BLOCKS": 4, "LONE": 128}.items():
        monkeypatch.setattr(sort_kernel, name, value)
    experts = np.random.default_rng(0).integers(0, 10, 700).astype(np.int32)
    with emulated(sort_kernel):
        found = sort_kernel.parts_of_pairs(jnp.asarray(experts), 9, 64)
    check_parts(found, experts, 9, 64)


@newest
def test_the_sort_clamps_experts_on_numpy() -> None:
    experts = np.random.default_rng(0).integers(-3, 9, 40).astype(np.int32)
    with emulated(sort_kernel):
        found = sort_kernel.parts_of_pairs(jnp.asarray(experts), 5, 4, partial=False)
    check_parts(found, experts.clip(0, 4), 5, 4)


def check_parts(found, experts, n_experts: int, size: int) -> None:
    order, work = np.asarray(found.order), np.asarray(found.work)
    want = parts(experts, n_experts, size)
    count = work[0, 0]
    assert count == want.work[0, 0]
    np.testing.assert_array_equal(work[1 : 1 + count, :3], want.work[1 : 1 + count, :3])
    inside = np.flatnonzero(experts < n_experts)
    order = order[: len(inside)]
    np.testing.assert_array_equal(np.sort(order), inside)
    np.testing.assert_array_equal(experts[order], np.sort(experts[inside]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n_experts,n_pairs,size",
    [(32, 2048, 128), (128, 512, 16), (512, 8192, 64), (1, 1, 16), (128, 65536, 128)],
)
def test_the_sort_on_the_gpu(n_experts, n_pairs, size) -> None:
    experts = np.random.default_rng(0).integers(0, n_experts + 1, n_pairs).astype(np.int32)
    sort = jax.jit(sort_kernel.parts_of_pairs, static_argnums=(1, 2))
    check_parts(sort(jnp.asarray(experts), n_experts, size), experts, n_experts, size)


# --- behind a sum ---


@newest
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", ClampedGate()])
def test_a_gated_result_has_its_own_reciprocal(gate) -> None:
    """A thread's two tokens: the bits of one do not depend on the other."""
    finish = PairsFinish(scaled=False, gate=gate, rest=1.0, bytes=4)
    own, others = (np.asarray(activations((2, 128), jnp.float32, seed)) for seed in (1, 2))

    def results(sums) -> np.ndarray:
        def body(gmem, smem) -> None:
            thread = p.register("tid.x")
            at = p.offset(p.address(gmem.sums), thread, 4)
            for token in range(2):
                held = [p.load_global(at, 1, 512 * (2 * token + i), kind="f32")[0] for i in (0, 1)]
                (y,) = finish.of_one(held, None, None)
                p.store_global(p.offset(p.address(gmem.out), thread, 4), [y], 512 * token)

        out = {"out": jax.ShapeDtypeStruct((2, 128), jnp.float32)}
        with emulated(finish_program, sys.modules[__name__]):
            (found,) = launch(
                body, {"sums": sums}, out, name="ends", grid=1, registers=True, warpgroups=1
            )
        return np.asarray(found)

    first = results(jnp.asarray([own, others]))
    np.testing.assert_array_equal(first[0], results(jnp.asarray([own, own]))[0])
    want = np.asarray(apply_gate(jnp.concatenate([*own]), gate))
    np.testing.assert_allclose(first[0], want, rtol=2e-6, atol=1e-7)


# --- rows of x into the ring ---


def gathered(parts_of, pair: int, x, pairs, fan: int, tokens: int, stages: int) -> np.ndarray:
    """The slots ``[stages, tokens, 8, 8]`` of one of a cluster's two blocks, which have a part
    each; no slot is read before all are full."""
    k = x.shape[1]
    work = jnp.asarray([[len(parts_of), 0, 0, 0]] + [[0, *part, 0] for part in parts_of], jnp.int32)
    how = GatherShape(fan, 2 * k, k // 64, 1, 1, tokens, (16, 32), cluster=2)
    sizes = {"slots": stages * tokens * 32, "barriers": 6 * stages}

    def body(gmem, smem) -> None:
        gather = RowGather(smem.barriers, stages, 1)
        gather.start()
        refs = gmem.x, gmem.pairs, gmem.work, smem.slots, smem.barriers
        thread = p.register("tid.x")
        for warp in range(2):
            copies = functools.partial(RowCopies, how, stages, warp, p.ci(pair), *refs)
            p.when(p.equal(thread >> 5, warp), lambda copies=copies: copies().run(p.ci(0)))
        for i in range(sizes["slots"] // 128):
            at = (thread + 128 * i) * 4
            word = p.load_shared(p.shared_address(smem.slots) + at, 1)
            p.store_global(p.offset(p.address(gmem.out), at), word)

    operands = {"x": x, "pairs": pairs, "work": work}
    out = {"out": jax.ShapeDtypeStruct((stages, tokens, 8, 8), jnp.bfloat16)}
    with emulated(gather_program, sys.modules[__name__]):
        (found,) = launch(
            body, operands, out, name="gather", grid=1, registers=True, scratch=sizes, warpgroups=1
        )
    return np.asarray(found)


@newest
def test_the_gather_s_code_on_numpy() -> None:
    """Rows of five parts, swizzled.  Of a cluster's third tile the second block has no part, and
    its slots are as they were.  Behind a part's last row is that row again."""
    tokens, fan, steps, stages = 32, 2, 2, 6
    x = activations((40, 64 * steps), jnp.bfloat16)
    pairs = jnp.asarray(np.random.default_rng(0).permutation(80), jnp.int32)
    parts_of = [(0, 14), (14, 38), (38, 70), (70, 71), (71, 80)]
    chunk = np.arange(8)
    for pair in range(2):
        found = gathered(parts_of, pair, x, pairs, fan, tokens, stages)
        own = parts_of[pair::2]
        assert (found[steps * len(own) :].view(np.uint16) == 0xFFFF).all()
        for tile, (first, end) in enumerate(own):
            row = np.arange(-(-(end - first) // 16) * 16)
            rows = np.asarray(pairs)[np.minimum(first + row, end - 1)] // fan
            for j in range(steps):
                want = np.asarray(x)[rows, 64 * j : 64 * (j + 1)].reshape(-1, 8, 8)
                got = found[steps * tile + j, row[:, None], chunk ^ row[:, None] % 8]
                np.testing.assert_array_equal(got, want)


@newest
@pytest.mark.parametrize("k", [200, 3136])
def test_the_sorted_rows_code_on_numpy(k, monkeypatch) -> None:
    """Rows of fewer vectors than a warp has lanes, and of more than a warp has under way."""
    monkeypatch.setattr(sort_kernel, "gpu", lambda: SimpleNamespace(sms=1))
    x = activations((20, k), jnp.bfloat16)
    order = np.random.default_rng(0).permutation(40).astype(np.int32)
    with emulated(sort_kernel):
        found = sort_kernel.sorted_rows(x, jnp.asarray(order), 2)
    np.testing.assert_array_equal(found, x[order // 2])


# --- plans ---


@pytest.mark.parametrize(
    "scheme,n,k,dtype,said",
    [
        ("bfloat16", 128, 128, jnp.float16, "x is float16"),
        ("bfloat16", 96, 128, jnp.bfloat16, "N = 96"),
        ("bfloat16", 128, 96, jnp.bfloat16, "K = 96"),
        ("int4-32", 128, 384, jnp.bfloat16, "group size 32"),
    ],
)
def test_why_there_is_no_plan(scheme, n, k, dtype, said) -> None:
    x = jax.ShapeDtypeStruct((64, k), dtype)
    found = tile_plan(x, outline(scheme, 4, n, k), 128, "silu")
    assert isinstance(found, Reason) and said in found.text


def test_zeros_of_up_begin_where_a_copy_may() -> None:
    """45 bytes of zeros a row of gate: 128 rows of them, as in tiles of 192 and 256, are enough."""
    w, x = outline("zeros-64", 32, 256, 2880), jax.ShapeDtypeStruct((1, 2880), jnp.bfloat16)
    plans = [tile_plan(x, w, pairs, ClampedGate()) for pairs in (32, 2048, 1 << 17)]
    assert {plan.tile.rows for plan in plans} <= {192, 256}


def test_zeros_of_a_tile_fill_whole_copies() -> None:
    """192 rows with one byte of zeros each do not."""
    w, x = outline("zeros", 8, 2048, 128), jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    plans = [tile_plan(x, w, pairs, None) for pairs in (64, 512, 4096, 1 << 17)]
    assert not {plan.tile.rows % 128 for plan in plans} - {0}


def test_a_longer_call_has_wider_tiles() -> None:
    """By the pairs of an expert; gpt-oss-20b's gate and up."""
    w, x = outline("mxfp4", 32, 256, 2880), jax.ShapeDtypeStruct((1, 2880), jnp.bfloat16)
    tokens = [tile_plan(x, w, pairs, ClampedGate()).tile.tokens for pairs in (32, 2048, 1 << 17)]
    assert tokens == sorted(tokens) and tokens[0] == 16 and tokens[-1] == 192


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tile_fits_into_shared_memory(scheme) -> None:
    """Every tile of the table, with gate and up of 2880 or 3072 columns."""
    k = 3072 if "int4" in scheme or scheme == "zeros" else 2880
    k = 2944 if scheme == "fp8-block" else k
    w = outline(scheme, 2, 128, k)
    weight = StoredWeight.of(w)
    assert any(plan.fitted(tile, weight, True).stages >= 3 for tile in CODES_TILES)


def test_the_choice_between_the_kernels() -> None:
    """Few pairs by rows, many by tiles; ``explain`` has both times."""
    w = outline("mxfp4", 32, 5760, 2880)
    one, many = (
        planning.plan(jax.ShapeDtypeStruct((t, 2880), jnp.bfloat16), w, 4 * t, ClampedGate())
        for t in (1, 64)
    )
    assert isinstance(one, planning.GroupedRowPlan) and isinstance(many, GroupedTilePlan)
    assert many.predicted_us < many.xla_us


# --- the kernel ---


def operands(scheme, n, k, tokens=37, n_experts=5, chosen=2):
    w = stacked(scheme, n_experts, n, k)
    rng = np.random.default_rng(0)
    experts = rng.random((tokens, n_experts)).argsort(-1)[:, :chosen]
    experts[experts == 1] = 0  # an expert that no pair has
    bias = activations((n_experts, n), jnp.float32, 2)
    return activations((tokens, k), jnp.bfloat16), w, jnp.asarray(experts, jnp.int32), bias


def by_tile(tile, gated, x, w, experts, bias=None, weights=None):
    fan = experts.size // (x.size // x.shape[-1])
    static = GroupedStatic(fan, gated, GroupedTilePlan(tile), x.dtype, w.shape[0], False)
    return planned(static, x, w, experts, weights, bias)


def fitted(tile, w, gated):
    return plan.fitted(tile, StoredWeight.of(w), gated is not None)


@newest
@pytest.mark.parametrize("scheme,gate", [("mxfp4", "clamped"), ("zeros", "none"), ("int8", "silu")])
def test_lowers_for_cuda(scheme, gate) -> None:
    x, w, experts, bias = operands(scheme, 128, 256)
    weights = jnp.ones(experts.shape, jnp.float32)
    f = functools.partial(by_tile, fitted(CODES_TILES[0], w, GATES[gate]), GATES[gate])
    traced = jax.jit(f).trace(x, w, experts, bias, weights)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu") == 2


def tiles_beside(scheme: str) -> list:
    """Those of any scheme, and bfloat16's own."""
    found = [*CODES_TILES, *tiles_of("pairs float4 sorted", WeightTile)]
    if scheme != "bfloat16":
        return found
    own = [*tiles_of("pairs float", WeightTile)[:2], *tiles_of("pairs float by tokens", TokenTile)]
    return found + own


# Every scheme with every tile, and every gate with every tile.
CASES = [
    (scheme, list(GATES)[(i + j) % len(GATES)], tile)
    for i, scheme in enumerate(SCHEMES)
    for j, tile in enumerate(tiles_beside(scheme))
]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme,gate,tile", CASES)
def test_values_on_the_gpu(scheme, gate, tile) -> None:
    """Ragged experts, one without pairs, rows of w that fill no tile; with and without a bias."""
    gated, n, k = GATES[gate], 320, 768
    x, w, experts, bias = operands(scheme, n, k, tokens=350)  # 284, 144 and 128 pairs
    tile = fitted(tile, w, gated)
    if tile.stages < 3:
        pytest.skip("no room for three stages: no plan has this tile")
    f = jax.jit(functools.partial(by_tile, tile, gated))
    for added in (bias, None):
        got = np.asarray(f(x, w, experts, added), np.float64)
        want = grouped_matmul_reference(x, w, experts, bias=added, gated=gated)
        want = np.asarray(want, np.float64)
        assert np.sqrt(np.mean((got - want) ** 2)) <= 4e-3 * np.sqrt(np.mean(want**2))
        assert np.abs(got - want).max() <= 2e-2 * np.abs(want).max()


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bfloat16", "zeros", "mxfp4"])
def test_a_pair_has_the_same_bits_in_any_place(scheme) -> None:
    x, w, experts, bias = operands(scheme, 256, 512, tokens=150)
    f = jax.jit(functools.partial(by_tile, fitted(CODES_TILES[2], w, "silu"), "silu"))
    got = f(x, w, experts, bias)
    order = np.random.default_rng(1).permutation(150)
    assert (f(x[order], w, experts[order], bias) == got[order]).all()


@newest
def test_a_pair_has_the_same_bits_beside_any_other() -> None:
    """The same on the emulator, in float32, whose last bit a neighbour's gate must not change."""
    from pallas_kernels.experts.many_pairs.kernel import grouped_tiles
    from tests.helpers.emulator.launch import emulated

    x, w, experts, bias = operands("bfloat16", 128, 192, tokens=20, n_experts=3)
    tile = fitted(CODES_TILES[0], w, "silu")
    order = np.random.default_rng(1).permutation(20)

    def products(x, experts):
        how = {"fan": 2, "gate": "silu", "tile": tile, "out_dtype": jnp.dtype(jnp.float32)}
        return np.asarray(grouped_tiles(x, w, experts.reshape(-1), bias, **how)).reshape(20, 2, -1)

    with emulated(sms=2):
        got, moved = products(x, experts), products(x[order], experts[order])
    np.testing.assert_array_equal(moved, got[order])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bfloat16", "mxfp4"])
def test_a_nan_reaches_its_own_pairs_alone(scheme) -> None:
    """In a token, and in the weight or scales of an expert."""
    x, w, experts, _ = operands(scheme, 320, 512, tokens=150)
    f = jax.jit(functools.partial(by_tile, fitted(CODES_TILES[1], w, None), None))
    is_bad = np.asarray(f(x.at[7].set(jnp.nan), w, experts) != f(x, w, experts)).any((1, 2))
    assert is_bad.nonzero()[0].tolist() == [7]
    if isinstance(w, QTensor):
        return
    is_bad = ~np.isfinite(np.asarray(f(x, w.at[3].set(jnp.nan), experts), np.float32)).all(-1)
    np.testing.assert_array_equal(is_bad, np.asarray(experts) == 3)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bfloat16", "mxfp4"])
def test_the_weighted_sum_on_the_gpu(scheme) -> None:
    """Down's product: a row for each pair, sums in float32."""
    _, w, experts, bias = operands(scheme, 256, 512, tokens=150)
    x = activations((150, 2, 512), jnp.bfloat16)
    weights = jax.nn.softmax(activations((150, 2), jnp.float32, 5))
    f = jax.jit(functools.partial(by_tile, fitted(CODES_TILES[2], w, None), None))
    got = np.asarray(f(x, w, experts, bias, weights), np.float64)
    want = grouped_matmul_reference(x, w, experts, bias=bias, weights=weights)
    want = np.asarray(want, np.float64)
    assert np.sqrt(np.mean((got - want) ** 2)) <= 4e-3 * np.sqrt(np.mean(want**2))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 64, 512])
def test_the_op_chooses_the_kernel(tokens) -> None:
    """At gpt-oss-20b's size."""
    n_experts, n, k = 32, 5760, 2880
    x, w, experts, bias = operands("mxfp4", n, k, tokens, n_experts, 4)
    f = functools.partial(grouped_matmul, gated=ClampedGate(), bias=bias)
    got = np.asarray(jax.jit(f)(x, w, experts)[:8], np.float64)
    want = grouped_matmul_reference(x[:8], w, experts[:8], gated=ClampedGate(), bias=bias)
    want = np.asarray(want, np.float64)
    assert np.sqrt(np.mean((got - want) ** 2)) <= 4e-3 * np.sqrt(np.mean(want**2))
    assert tree_bytes(w) > 2**27
