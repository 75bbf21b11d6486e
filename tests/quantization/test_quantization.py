"""Schemes, the grid, scales and their folding, and the three methods as functions of arrays.

Oracles: ``pallas_kernels.qtensor.quantize`` for the grid, a plain float64 loop over columns for
GPTQ, the unfolded block for folding, brute force over one scale for AWQ's error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.quantization import awq, rounding, smoothquant
from jaxllama.quantization.calibration import advance
from jaxllama.quantization.gptq import DAMPING, gptq
from jaxllama.quantization.pipeline import check_method
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.rounding import fitted, nearest
from jaxllama.quantization.scale_fit import fit_scales
from jaxllama.quantization.scheme import Scheme, parse, round_weight
from jaxllama.quantization.sites import fold, get, sites
from pallas_kernels.qtensor import QTensor, quantize
from pallas_kernels.rounding import codes, grid
from tests.helpers.arrays import as_jax
from tests.helpers.models import FAMILIES, LLAMA, relative_error
from tests.helpers.packed_oracle import floats_of
from tests.helpers.seeded import seeded_params

# One program a shape and cell.
rounded = jax.jit(rounding.rounded, static_argnums=(1, 2, 3))


@pytest.fixture
def normal() -> Callable[..., np.ndarray]:
    """normal(*shape, scale=1) -> float32 numbers, other ones at each call of a test."""
    rng = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.normal(size=shape) * scale).astype(np.float32)

    return draw


# Schemes


@pytest.mark.core
def test_a_plan_is_a_scheme_and_exceptions_of_which_the_last_counts():
    plan = parse("w4a16,mlp=w8a16,layer_1/*=none,layer_1/mlp/down=w4a16-g32-sym")
    int4, int8 = Scheme("int4", group_size=0, zeros=True), Scheme("int8")
    assert plan.of("layer_0/mixer/qkv") == int4
    assert plan.of("layer_0/mlp/down") == int8
    assert plan.of("layer_1/mlp/gate_up") is None
    assert plan.of("layer_1/mlp/down") == Scheme("int4", group_size=32)
    assert plan.of("embed") is None and plan.of("head") == int4
    assert parse("none,embed=w8a16").of("embed") == int8
    assert parse("w4a16-zero").default == parse("w4a16").default
    # Gate projections and norms are never matmuls of a plan, whatever the pattern says.
    assert parse("none,*=w8a16").of("layer_0/mixer/gk_0") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("w1a1", "'w1a1' is not one of w8a16, w4a16, w8a8, fp8, fp8-static, w4a8, w4a8-fp8, mxfp4"),
        ("w4a16,downn=w8a16", "'downn' is not one of"),
        ("w4a16,down", "'down' is not PATTERN=SCHEME"),
        ("down=w8a16", "begins with a scheme"),
        ("w4a16-g0", "'g0' is not one of gN, zero, sym"),
        ("w8a8-g64", "groups and zero points are for weights of 4 bits"),
        ("", "'' is not one of"),
    ],
)
def test_a_plan_that_is_none_says_what_is_allowed(text, words):
    with pytest.raises(jl.JaxLlamaError, match=words):
        parse(text)


def test_quantize_params_follows_the_plan():
    cfg = LLAMA.replace(d_model=64, d_ff=96, tie_embeddings=True)
    params = jax.device_put(seeded_params(cfg))
    got = quantize_params(params, "w4a16,down=w8a16-g32-zero,embed=w8a16,layer_1/mixer/o=none")
    qkv, down = got["layer_0"]["mixer"]["qkv"]["weight"], got["layer_0"]["mlp"]["down"]["weight"]
    assert (qkv.dtype, qkv.group_size, qkv.zero.dtype) == (jnp.int4, 64, jnp.int8)
    assert (down.dtype, down.group_size, down.zero.dtype) == (jnp.int8, 32, jnp.int8)
    assert got["embed"]["weight"].dtype == jnp.int8 and "head" not in got
    assert isinstance(got["layer_1"]["mixer"]["o"]["weight"], jax.Array)
    assert isinstance(got["norm"]["weight"], jax.Array)
    # An int8 tied embedding is both the lookup and the head.
    tokens, lengths = np.asarray([[5, 6, 7]]), np.asarray([3])
    plain = jax.tree.map(floats_of, got, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    want = jl.logits(cfg, plain, tokens, lengths)
    assert relative_error(jl.logits(cfg, got, tokens, lengths), want) < 1e-5  # float32 sums


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("w4a16-g128", "groups of 128 do not divide its 32 inputs"),
        ("w4a16", "48 inputs; 8 bits need no groups, so use a mix: SCHEME,down=w8a16"),
        ("fp8-static", "needs calibrated activation scales"),
    ],
)
def test_quantize_params_names_what_does_not_fit(scheme, words):
    with pytest.raises(jl.JaxLlamaError, match=words):
        quantize_params(seeded_params(LLAMA), scheme)


@pytest.mark.parametrize(
    ("plan", "method", "words"),
    [
        ("w8a8", "awq", "'awq' is for w4a16 or w8a16"),
        ("w4a16", "smoothquant", "'smoothquant' is for w8a8, fp8"),
        ("none", "rtn", "quantizes nothing"),
        ("w4a16", "hqq", "'hqq' is not one of rtn, awq, gptq, smoothquant"),
    ],
)
def test_a_method_with_nothing_to_do_is_refused(plan, method, words):
    with pytest.raises(jl.JaxLlamaError, match=words):
        check_method(parse(plan), method)


# The grid


@pytest.mark.core
@pytest.mark.parametrize(
    ("dtype", "zeros"),
    [("int8", False), ("int8", True), ("int4", False), ("int4", True), ("float8_e4m3fn", False)],
)
def test_an_unclipped_grid_is_quantize_bit_for_bit(normal, dtype, zeros):
    w = normal(5, 64)
    w[0] = 0.0

    @jax.jit
    def both(w):
        scale, zero = grid(w, dtype, 32, zeros)
        want = quantize(w, dtype, group_size=32, symmetric=not zeros)
        return want, QTensor(codes(w, scale, zero, dtype), scale, zero)

    want, got = both(w)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_clipped_grid_spends_its_steps_on_a_smaller_range(normal):
    w = normal(24, 64)
    w[:, 0] = 20.0
    whole, clipped = rounded(w, "int4", 64), rounded(w, "int4", 64, False, 0.2)
    assert np.max(np.abs(clipped)) == pytest.approx(4.0, rel=1e-6)
    off = [np.mean(np.square(x - w)[:, 1:]) for x in (clipped, whole)]
    assert off[0] < 0.1 * off[1]


def test_a_fitted_grid_is_best_where_its_inputs_are_large(normal):
    """Its cost is below the plain grid's, and a column that meets one huge input is nearly exact,
    but where its weight is less than half a step."""
    w, large = normal(64, 256), 77
    importance = np.ones(256, np.float32)
    importance[large] = 1e4
    cell = {"grid": ("int4", 64, True), "scale_dtype": "float32"}
    got, plain = floats_of(fitted(w, importance, **cell)), floats_of(nearest(w, 1.0, **cell))
    cost = [np.sum(importance * np.square(x - w), axis=1) for x in (got, plain)]
    assert np.all(cost[0] < cost[1])
    off = [np.median(np.abs(x - w)[:, large]) for x in (got, plain)]
    assert off[0] < 0.05 * off[1]
    # Nothing known of the inputs: the error still falls.
    blind = floats_of(fitted(w, None, **cell))
    assert np.sum(np.square(blind - w)) < np.sum(np.square(plain - w))
    np.testing.assert_array_equal(floats_of(fitted(0 * w, None, **cell)), 0 * w)


def test_a_tied_head_is_a_copy_in_eight_bits_unless_the_plan_says_otherwise():
    def head(text: str) -> Scheme | None:
        return parse(text).tied_head

    int8 = Scheme("int8")
    assert head("w4a16") == head("w8a16-g64") == head("w4a16-sym,down=none") == int8
    assert head("w4a16,head=w4a16-g32") == Scheme("int4", group_size=32, zeros=True)
    # The embedding itself, as it is or quantized.
    for text in ("w4a16,head=none", "w8a8", "fp8", "none", "none,down=w8a16", "w4a16,embed=w8a16"):
        assert head(text) is None, text
    assert head("w4a16,embed=w4a16,head=w8a16") == int8
    cfg = LLAMA.replace(d_model=64, d_ff=96, n_layers=1, layer_types=(), tie_embeddings=True)
    params, tokens, lengths = seeded_params(cfg), np.asarray([[5, 6, 7]]), np.asarray([3])
    got = quantize_params(params, "none,head=w8a16")
    assert got["embed"]["weight"] is params["embed"]["weight"]
    # The config may still say "tied": what is in the tree counts.
    want = {**params, "head": {"weight": floats_of(got["head"]["weight"])}}
    want = jl.logits(cfg.replace(tie_embeddings=False), want, tokens, lengths)
    for config in (cfg, cfg.replace(tie_embeddings=False)):
        assert relative_error(jl.logits(config, got, tokens, lengths), want) < 1e-5


def test_w4a8_is_w4a16_in_two_levels_of_scales(normal):
    """Of the same grids, fitted or GPTQ's; weights of 4 bits in groups, inputs of 8."""
    w = normal(24, 256)
    scheme, base = parse("w4a8").default, parse("w4a16").default
    assert scheme == dataclasses.replace(base, activations="int8") and scheme.two_levels
    assert parse("w4a8-fp8-sym-g64").default == Scheme("int4", 64, False, "float8_e4m3fn")
    got, plain = (round_weight(w, one, "w") for one in (scheme, base))
    assert got.unit.shape == (24, 1) and got.scale.dtype == jnp.int8 and got.activations == "int8"
    np.testing.assert_array_equal(got.zero, plain.zero)
    rms = [np.linalg.norm(floats_of(one) - w) for one in (got, plain)]
    assert rms[0] < 1.03 * rms[1]
    cell = "int4", 128, True
    found = gptq(w, np.eye(256, dtype=np.float32), grid=cell, scale_dtype="int8")
    np.testing.assert_array_equal(found.q, nearest(w, 1.0, grid=cell, scale_dtype="int8").q)
    fp8 = round_weight(w, parse("w4a8-fp8").default, "w")
    assert fp8.unit is None and fp8.activations == "float8_e4m3fn"


# Folding


@pytest.mark.core
@pytest.mark.parametrize(
    "name",
    [
        "mha-tied-bias",
        "mqa-window",
        "gla-conv-groups",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gqa", "gla")),
    ],
)
def test_folded_scales_leave_the_function_alone(normal, name):
    """Bound: float32 rounding of the scaled weights and of sums taken in other proportions."""
    cfg = FAMILIES[name]
    part = cfg.layers[0]
    # Biases of zero would hide one that is not divided.
    layer = jax.tree.map(lambda leaf: leaf + np.float32(0.1), seeded_params(cfg)["layer_0"])
    rng = np.random.default_rng(1)
    scales = {
        site.name: rng.uniform(0.2, 5.0, site.n_channels).astype(np.float32) for site in sites(part)
    }
    folded = jax.jit(functools.partial(fold, part))(layer, scales)
    for site in sites(part):
        reader = site.readers[0]
        before, after = get(layer, reader)["weight"], get(folded, reader)["weight"]
        assert relative_error(after, before) > 0.1
    x = normal(2, 6, cfg.d_model)
    [want], [got] = (advance(part, one, [as_jax(x)]) for one in (layer, folded))
    assert relative_error(got - x, want - x) < 2e-5


# AWQ


def outliers(normal, size: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(w [24, 64], x [256, 64], channels): a few input channels are large, their weights small, so
    that the product is not theirs alone; to nearest, the small weights all but vanish."""
    channels = np.array([7, 20, 41, 59])
    w, x = normal(24, 64), normal(256, 64)
    w[:, channels] *= 2.0 / size
    x[:, channels] *= size
    return w, x, channels


def error_of(w: np.ndarray, got: Any, x: np.ndarray) -> float:
    """Squared error of the product, in float64."""
    return float(np.sum(np.square(x.astype(np.float64) @ (np.asarray(got, np.float64) - w).T)))


@pytest.mark.core
def test_awq_recovers_what_rounding_loses_at_planted_outliers(normal):
    w, x, channels = outliers(normal, 30.0)
    h = x.T @ x
    cell = ("int4", 64, False)
    s, errors = awq.search_scales(
        (w,), h, np.mean(np.abs(x), axis=0), np.arange(64), grids=(cell,), n_channels=64
    )
    s = np.asarray(s)
    assert np.min(s[channels]) > np.median(s)  # larger activations, larger scales
    nearest = error_of(w, rounded(w, "int4", 64), x)
    # The search's own error, from second moments, is the error on the tokens themselves.
    assert float(errors[0]) == pytest.approx(nearest, rel=1e-3)
    assert float(np.min(errors)) == pytest.approx(
        error_of(w, rounded(w * s, "int4", 64) / s, x), rel=1e-3
    )
    shrink = awq.search_clip(w * s, h / s[:, None] / s[None, :], grid=cell)
    got = error_of(w, rounded(w * s, "int4", 64, False, shrink) / s, x)
    assert got < 0.2 * nearest


def test_awq_clips_a_group_by_its_own_part_of_the_output(normal):
    w, x = normal(24, 64), normal(256, 64)
    w[:, 3] = 9.0
    x[:, 3] *= 1e-3
    shrink = np.asarray(awq.search_clip(w, x.T @ x, grid=("int4", 32, False)))
    assert shrink.shape == (24, 2)
    # An outlying weight that hardly any input meets is clipped away; the other group keeps more.
    assert np.max(shrink[:, 0]) <= 0.6 and np.mean(shrink[:, 1]) > 0.7
    clipped = [np.asarray(rounded(w, "int4", 32, False, c)) for c in awq.SHRINKS]
    for row in (0, 5):
        part = slice(row, row + 1), slice(32, None)
        errors = [error_of(w[part], got[part], x[:, 32:]) for got in clipped]
        assert awq.SHRINKS[int(np.argmin(errors))] == pytest.approx(float(shrink[row, 1]))


def test_a_grid_with_zero_points_is_clipped_at_one_end_where_only_that_one_is_far_out(normal):
    w, x = np.clip(normal(24, 64), -1.0, 1.0), normal(256, 64)
    w[:, 3] = 4.0
    x[:, 3] *= 1e-3
    low, high = awq.search_clip(w, x.T @ x, grid=("int4", 64, True))
    assert low.shape == high.shape == (24, 1)
    assert np.mean(high) < 0.6 and np.mean(low) > 0.75
    got = error_of(w, rounded(w, "int4", 64, True, (low, high)), x)
    ends_alike = [error_of(w, rounded(w, "int4", 64, True, c), x) for c in awq.SHRINKS]
    assert got < min(ends_alike)


def test_awq_without_activations_does_not_scale(normal):
    s, _ = awq.search_scales(
        (normal(24, 64),),
        np.zeros((64, 64), np.float32),
        np.zeros(64, np.float32),
        np.arange(64),
        grids=(("int4", 64, False),),
        n_channels=64,
    )
    assert np.all(np.isfinite(s)) and np.ptp(s) == 0


# GPTQ


def columns_one_by_one(w, h, group):
    """Algorithm 1 of the paper without blocks, in float64, act-order with static groups."""
    w, h = np.asarray(w, np.float64), np.asarray(h, np.float64)
    k = w.shape[1]
    scale = np.abs(w).reshape(len(w), -1, group).max(-1) / 7
    order = np.argsort(-np.diagonal(h), kind="stable")
    h = h + DAMPING * np.mean(np.diagonal(h)) * np.eye(k)
    inverse = np.linalg.inv(h[order][:, order])
    upper = np.linalg.cholesky(inverse).T
    w, q = w[:, order].copy(), np.zeros_like(w)
    for j in range(k):
        step = scale[:, order[j] // group]
        q[:, j] = np.clip(np.round(w[:, j] / step), -8, 7)
        error = (w[:, j] - q[:, j] * step) / upper[j, j]
        w[:, j:] -= error[:, None] * upper[j, j:][None, :]
    out = np.zeros_like(q)
    out[:, order] = q
    return out


@pytest.mark.core
@pytest.mark.parametrize("k", [64, 192])  # one block of columns, and three
def test_gptq_is_the_papers_loop(normal, k):
    """float32 against float64: a word may round to the other side, and later columns follow it;
    in this data at most one word in fifty does."""
    x = normal(256, k) @ normal(k, k, scale=k**-0.5)
    w, h = normal(24, k), x.T @ x
    got = gptq(w, h, grid=("int4", 32, False))
    want = columns_one_by_one(w, h, 32)
    assert np.mean(np.asarray(got.q, np.float32) != want) < 0.02
    assert got.scale.shape == (24, k // 32) and got.columns is None


@pytest.mark.parametrize(
    "cell", [("int4", 32, False), ("int4", 64, True), ("int8", 64, False)], ids=str
)
def test_gptq_beats_rounding_where_inputs_are_correlated(normal, cell):
    x = normal(256, 64) @ normal(64, 64, scale=0.3) + normal(256, 1)
    w = normal(24, 64)
    got = floats_of(gptq(w, x.T @ x, grid=cell))
    assert error_of(w, got, x) < 0.6 * error_of(w, rounded(w, *cell), x)


def test_gptq_takes_inputs_that_were_always_zero(normal):
    w, x = normal(24, 64), normal(256, 64)
    x[:, 5] = 0.0
    cell = ("int4", 32, False)
    got = gptq(w, x.T @ x, grid=cell)
    want = nearest(w, 1.0, grid=cell, scale_dtype="float32")
    got, want = (np.asarray(one.q, np.int8)[:, 5] for one in (got, want))
    np.testing.assert_array_equal(got, want)


def test_gptq_refuses_moments_that_are_none(normal):
    w, cell = normal(24, 64), ("int4", 32, False)
    with pytest.raises(jl.JaxLlamaError, match=r"needs a \[64, 64\] hessian, not \[16, 16\]"):
        gptq(w, np.eye(16, dtype=np.float32), grid=cell)
    with pytest.raises(jl.JaxLlamaError, match="not positive definite"):
        gptq(w, np.full((64, 64), np.nan, np.float32), grid=cell)


# Scales that fit the codes


@pytest.mark.parametrize("cell", [("int4", 32, True), ("int8", 64, False)], ids=str)
def test_fitted_scales_are_the_least_squares_of_the_output(normal, cell):
    """Against float64 on the tokens themselves, the damping being as many more tokens of unit
    vectors; float32 systems of two unknowns."""
    w, x = normal(24, 64), normal(256, 64) @ normal(64, 64, scale=0.2)
    before = nearest(w, 0.8, grid=cell, scale_dtype="float32")
    h = x.T @ x
    got = fit_scales(w, before, h)
    damping = np.sqrt(DAMPING * np.mean(np.diagonal(h)))
    tokens = np.concatenate([x.astype(np.float64), damping * np.eye(64)])
    cut = tokens.reshape(len(tokens), -1, cell[1])
    units = floats_of(QTensor(before.q, np.ones_like(before.scale), before.zero))
    for row in range(12):
        steps = units[row].astype(np.float64).reshape(-1, cell[1])
        parts = np.einsum("tgi,gi->tg", cut, steps)
        want = np.linalg.lstsq(parts, tokens @ w[row].astype(np.float64), rcond=None)[0]
        np.testing.assert_allclose(got.scale[row], want, rtol=1e-4)
    assert error_of(w, floats_of(got), x) < error_of(w, floats_of(before), x)
    np.testing.assert_array_equal(np.asarray(got.q, np.int8), np.asarray(before.q, np.int8))


def test_a_scale_that_nothing_determines_stays(normal):
    w, x = normal(24, 64), normal(256, 64)
    w[1, :32] = 0.0
    x[:, 32:] = 0.0
    before = nearest(w, 1.0, grid=("int4", 32, False), scale_dtype="float32")
    got = fit_scales(w, before, x.T @ x)
    assert got.scale[1, 0] == 0 and np.all(np.isfinite(got.scale))
    np.testing.assert_allclose(got.scale[:, 1], before.scale[:, 1], rtol=0.05)
    broken = fit_scales(w, before, np.full((64, 64), np.nan, np.float32))
    np.testing.assert_array_equal(broken.scale, before.scale)


# SmoothQuant


@pytest.mark.core
@pytest.mark.parametrize("static", [False, True], ids=["per-token", "static"])
def test_smoothquant_recovers_what_outlying_activations_cost(normal, static):
    w, x, channels = outliers(normal, 100.0)
    peak = np.max(np.abs(x), axis=0)
    s, errors = smoothquant.search_scales(
        (w,),
        x,
        np.ones((256, 1), np.float32),
        peak,
        peak,
        np.arange(64),
        dtype="int8",
        grids=(("int8", 64, False),),
        static=static,
        n_channels=64,
    )
    s, errors = np.asarray(s), np.asarray(errors)
    assert np.min(s[channels]) > np.median(s)
    assert np.min(errors) < 0.2 * errors[0]
    # The error the search reports is that of the product it stands for.
    xs, step = x / s, np.max(peak / s) / np.float32(127)
    if not static:
        step = np.max(np.abs(xs), axis=1, keepdims=True) / np.float32(127)
    xs = np.clip(np.round(xs / step), -128, 127) * step
    real = np.sum(np.square(xs @ np.asarray(rounded(w * s, "int8", 64)).T - x @ w.T))
    assert float(real) == pytest.approx(float(np.min(errors)), rel=1e-3)
