"""``grouped_matmul``: values of every form, a token's independence of its neighbours, refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ClampedGate, QTensor, explain, grouped_matmul, quantize
from pallas_kernels.cpu import CpuWeight, prepare, restore, unavailable
from pallas_kernels.experts import plan, xla
from pallas_kernels.experts.blocks import blocks_of, most_blocks
from pallas_kernels.experts.op import grouped_matmul_reference
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once, pairwise, slow
from tests.helpers.packed_oracle import floats_of

E, OUT, IN = 5, 24, 64
SCHEMES = {
    "float32": None,
    "bfloat16": None,
    "int8": {"dtype": "int8"},
    "int4-zeros": {"dtype": "int4", "group_size": 32, "symmetric": False},
    "int4-levels": {"dtype": "int4", "group_size": 32, "scale_dtype": "int8"},
    "float8": {"dtype": "float8_e4m3fn"},
}
BOUND = {"float32": 2e-6, "bfloat16": 8e-3}  # relative RMS


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


@functools.cache
def weight(scheme: str, floating_zeros: bool = False) -> jax.Array | QTensor:
    w = as_jax(draw(E, OUT, IN, seed=1) * IN**-0.5)
    if SCHEMES[scheme] is None:
        return w.astype(scheme)
    made = jax.jit(functools.partial(quantize, **SCHEMES[scheme]))(w)
    if floating_zeros:
        made = dataclasses.replace(made, zero=as_jax(0.01 * draw(*made.scale.shape)))
    return made


def chosen(tokens: int, k: int, seed: int = 0) -> np.ndarray:
    """Different experts for each token; the last expert has none."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(E - 1)[:k] for _ in range(tokens)]
    return np.asarray(rows, np.int32).reshape(tokens, k)


def in_numpy(x, w, experts, *, weights=None, bias=None, gated=None) -> np.ndarray:
    """The op in float64 of the same numbers, token by token."""
    w = floats_of(w) if isinstance(w, QTensor) else np.asarray(w)
    w, x, experts = w.astype(np.float64), np.asarray(x).astype(np.float64), np.asarray(experts)
    x = np.repeat(x[:, None], experts.shape[1], axis=1) if x.ndim == 2 else x
    y = np.einsum("tki,tkoi->tko", x, w[experts])
    y = y if bias is None else y + np.asarray(bias, np.float64)[experts]
    if gated is not None:
        gate, up = np.split(y, 2, axis=-1)
        if isinstance(gated, ClampedGate):
            gate, up = np.minimum(gate, gated.limit), np.clip(up, -gated.limit, gated.limit)
            y = gate / (1 + np.exp(-gated.alpha * gate)) * (up + 1)
        elif gated == "silu":
            y = gate / (1 + np.exp(-gate)) * up
        else:
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            y = gate * (1 + np.tanh(inner)) / 2 * up
    if weights is not None:
        y = np.einsum("tko,tk->to", y, np.asarray(weights, np.float64))
    return y


@pytest.mark.parametrize(
    "scheme,dtype,gated,own_rows,weighted",
    pairwise(
        tuple(SCHEMES),
        ("float32", "bfloat16"),
        (None, "silu", "gelu_tanh", ClampedGate(limit=0.5)),
        (False, True),
        (False, True),
    ),
)
def test_values(scheme, dtype, gated, own_rows, weighted) -> None:
    tokens, k = 13, 3
    x = as_jax(draw(tokens, k, IN) if own_rows else draw(tokens, IN)).astype(dtype)
    options = {"gated": gated, "bias": as_jax(draw(E, OUT, seed=2))}
    if weighted:
        options["weights"] = as_jax(np.abs(draw(tokens, k, seed=3)))
    w, experts = weight(scheme), chosen(tokens, k)
    got = jax.jit(functools.partial(grouped_matmul, gated=gated))(
        x, w, experts, **{name: v for name, v in options.items() if name != "gated"}
    )
    want = in_numpy(x, w, experts, **options)
    assert (got.dtype, got.shape) == (jnp.dtype(dtype), want.shape)
    error = np.sqrt(np.mean(np.square(np.asarray(got, np.float32) - want)))
    assert error <= BOUND[dtype] * np.sqrt(np.mean(np.square(want)))


@pytest.mark.parametrize(
    ("form", "scheme"), each_once(plan.XLA_FORMS, ["float32", "int8", "int4-zeros"])
)
def test_the_forms_of_an_accelerator(form, scheme) -> None:
    """Run here, where another is chosen."""
    x, w, experts = as_jax(draw(13, IN)), weight(scheme), chosen(13, 3).reshape(-1)
    w = QTensor(w.q, w.scale, w.zero) if isinstance(w, QTensor) else w
    size = plan.block_rows(len(experts), E)
    run = functools.partial(xla.BY_FORM[form], fan=3, size=size, dtype=jnp.float32)
    loss = lambda f, *given: jnp.sum(jnp.sin(f(*given)))  # noqa: E731
    whole = lambda *given: xla.sums(*given, 3)  # noqa: E731

    @jax.jit
    def all_of(x, w, experts):
        many = jax.vmap(run, in_axes=(0, None, 0))(x[None], w, experts[None])
        slopes = [jax.grad(functools.partial(loss, f))(x, w, experts) for f in (run, whole)]
        return run(x, w, experts), many[0], slopes

    got, many, slopes = all_of(x, w, experts)
    want = in_numpy(x, w, experts.reshape(13, 3)).reshape(-1, OUT)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(many, want, atol=1e-5)
    np.testing.assert_allclose(*slopes, atol=1e-5)


@pytest.mark.parametrize("form", plan.XLA_FORMS)
def test_no_nan_of_an_expert_that_is_not_chosen(form) -> None:
    x, w, experts = as_jax(draw(13, IN)), weight("float32"), chosen(13, 3).reshape(-1)
    size = plan.block_rows(len(experts), E)
    w = np.array(w)
    w[-1] = np.nan
    run = functools.partial(xla.BY_FORM[form], fan=3, size=size, dtype=jnp.float32)
    assert np.isfinite(jax.jit(run)(x, w, experts)).all()


@pytest.mark.parametrize("scheme", ["float32", "int4-zeros"])
def test_a_token_has_the_same_bits_in_any_batch(scheme) -> None:
    """Alone, in other batches, in another order, and beside NaN."""
    run = jax.jit(functools.partial(grouped_matmul, gated="silu"))
    x, w, experts = draw(70, IN), weight(scheme), chosen(70, 3)
    weights = np.abs(draw(70, 3, seed=3))
    want = np.asarray(run(x, w, experts, weights=weights))
    order = np.random.default_rng(1).permutation(70)
    for rows in (np.arange(1), np.arange(9), np.arange(50, 70), order):
        got = run(x[rows], w, experts[rows], weights=weights[rows])
        np.testing.assert_array_equal(got, want[rows])
    x[1:] = np.nan
    np.testing.assert_array_equal(run(x, w, experts, weights=weights)[0], want[0])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_blocks_hold_every_pair_once(size) -> None:
    for seed, pairs in enumerate((1, 3, 40)):
        experts = np.random.default_rng(seed).integers(0, 6, pairs).astype(np.int32)
        at = jax.jit(blocks_of, static_argnums=(1, 2))(experts, 6, size)
        assert at.pairs.shape == (most_blocks(pairs, 6, size), size)
        held = np.asarray(at.pairs).reshape(-1)
        assert sorted(held[held < pairs]) == list(range(pairs))
        np.testing.assert_array_equal(held[np.asarray(at.places)], np.arange(pairs))
        owner = np.repeat(np.asarray(at.experts), size)
        np.testing.assert_array_equal(owner[held < pairs], experts[held[held < pairs]])


@pytest.mark.parametrize("scheme", ["float32", "int8", "float-zeros"])
def test_gradients_are_the_reference_s(scheme) -> None:
    w = weight("int8", floating_zeros=True) if scheme == "float-zeros" else weight(scheme)
    x, experts = as_jax(draw(9, IN)), chosen(9, 2)
    weights, bias = as_jax(draw(9, 2, seed=3)), as_jax(draw(E, OUT, seed=2))
    floats, static = (w, lambda w: w), None
    if isinstance(w, QTensor):
        static = w
        moving = {"scale": w.scale} | ({} if w.zero is None else {"zero": w.zero})
        floats = (moving, lambda parts: dataclasses.replace(static, **parts))

    def loss(op, x, w, weights, bias):
        y = op(x, floats[1](w), experts, weights=weights, bias=bias, gated="silu")
        return jnp.sum(jnp.sin(y))

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, op), (0, 1, 2, 3)))(x, floats[0], weights, bias)
        for op in (grouped_matmul, grouped_matmul_reference)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))


@functools.cache
def prepared(scheme: str, group: int | None, zeros: bool) -> tuple[QTensor, CpuWeight]:
    w = as_jax(draw(E, 64, 128, seed=1) * 128**-0.5)
    made = jax.jit(functools.partial(quantize, dtype=scheme, group_size=group, symmetric=not zeros))
    plain = made(w)
    found = prepare(plain)
    assert isinstance(found, CpuWeight), found
    return plain, found


handler = pytest.mark.skipif(unavailable() is not None, reason="no handler on this machine")


@handler
@pytest.mark.parametrize(
    "scheme,group,zeros,gated",
    [
        *each_once(
            [
                ("int4", 32, True),
                ("int4", None, False),
                ("int8", None, False),
                ("float8_e4m3fn", 64, False),
            ],
            [None, "silu", "gelu_tanh"],
        ),
        *slow(("nvfp4", None, False, "silu")),
    ],
)
def test_a_cpu_s_handler(scheme, group, zeros, gated) -> None:
    """Within the rounding of x to 8 bits; the same bits for a token in any batch."""
    plain, w = prepared(scheme, group, zeros)
    jax.tree.map(np.testing.assert_array_equal, restore(jax.tree.map(np.asarray, w)), plain)
    x, experts = draw(70, 128), chosen(70, 3)
    weights = np.abs(draw(70, 3, seed=3))
    assert "grouped_matmul_cpu" in explain("grouped_matmul", x, w, experts)
    run = jax.jit(functools.partial(grouped_matmul, gated=gated))
    got = run(x, w, experts, weights=weights)
    want = in_numpy(x, plain, experts, weights=weights, gated=gated)
    error = np.sqrt(np.mean(np.square(got - want)))
    assert error <= 0.015 * np.sqrt(np.mean(np.square(want)))
    for rows in (np.arange(1), np.arange(20, 33), np.random.default_rng(1).permutation(70)):
        again = run(x[rows], w, experts[rows], weights=weights[rows])
        np.testing.assert_array_equal(again, np.asarray(got)[rows])
    exact = jax.jit(functools.partial(grouped_matmul, gated=gated, implementation="xla"))
    np.testing.assert_allclose(exact(x, w, experts, weights=weights), want, atol=2e-4)


@handler
def test_a_cpu_s_handler_has_the_gradients_of_the_weight_that_it_stands_for() -> None:
    plain, w = prepared("int4", 32, True)
    x, experts = as_jax(draw(9, 128)), chosen(9, 2)
    loss = lambda x, w: jnp.sum(grouped_matmul(x, w, experts, gated="silu"))  # noqa: E731
    got, want = (jax.jit(jax.grad(loss))(x, one) for one in (w, plain))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_an_empty_call_and_a_wrong_index() -> None:
    w = weight("float32")
    run = jax.jit(grouped_matmul)
    empty = run(np.zeros((0, IN), np.float32), w, np.zeros((0, 2), np.int32))
    assert empty.shape == (0, 2, OUT)
    x = draw(1, IN)
    outside = run(x, w, np.asarray([[-3, 99]], np.int32))
    inside = run(x, w, np.asarray([[0, E - 1]], np.int32))
    np.testing.assert_array_equal(outside, inside)


@pytest.mark.parametrize("group_size", [64, *slow(None)], ids=["groups", "rows"])
def test_float8_beside_float8_activations(group_size) -> None:
    """Codes of both and their scales, in float64: x has a scale where w has one."""
    k, rows = 128, chosen(3, 2)

    @jax.jit
    def run(x, floats):
        made = functools.partial(quantize, dtype="float8_e4m3fn", group_size=group_size)
        w = made(floats)
        got = grouped_matmul(x, dataclasses.replace(w, activations="float8_e4m3fn"), rows)
        return got, w, made(x, scale_dtype=jnp.float32)

    got, w, codes = run(draw(3, k), draw(E, 16, k, seed=1))

    def exact(q) -> np.ndarray:
        scales = np.asarray(q.scale, np.float64)
        return np.asarray(q.q, np.float64) * np.repeat(scales, k // scales.shape[-1], axis=-1)

    want = np.einsum("tk,tjnk->tjn", exact(codes), exact(w)[np.asarray(rows)])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_refusals_name_the_operand() -> None:
    x, w, experts = jnp.zeros((4, IN)), weight("int8"), chosen(4, 2)
    cases = {
        "experts is float32, not int32": {"experts": jnp.zeros((4, 2))},
        r"experts \(3, 2\) is not \[T, k\]: T is 4 in x": {"experts": chosen(3, 2)},
        r"weights \(4, 3\)": {"weights": jnp.zeros((4, 3))},
        r"bias \(2,\)": {"bias": jnp.zeros((2,))},
        "gated 'tanh' is not one of": {"gated": "tanh"},
        "activations in int8": {"w": dataclasses.replace(w, activations="int8")},
        "columns in another order": {"w": dataclasses.replace(w, columns=jnp.arange(IN))},
        r"w \(24, 64\)": {"w": w.rows(0)},
    }
    for text, change in cases.items():
        options = {"x": x, "w": w, "experts": experts} | change
        with pytest.raises(ValueError, match=text):
            grouped_matmul(**options)
    with pytest.raises(ValueError, match="7 rows of an expert are not gate and up"):
        grouped_matmul(x, jnp.zeros((E, 7, IN)), experts, gated="silu")
    with pytest.raises(NotImplementedError, match="no Mosaic kernel"):
        grouped_matmul(x, w, experts, implementation="mosaic")


def test_explain_and_the_choice_of_a_form() -> None:
    x, w = jnp.zeros((4, IN)), weight("int8")
    assert "grouped_matmul" in explain("grouped_matmul", x, w, chosen(4, 2))
    shape = jax.ShapeDtypeStruct((128, 1536, 2048), jnp.bfloat16)
    assert plan.shortest_form(shape, 8, 1) == "gather"
    assert plan.shortest_form(shape, 8 * 8192, 8192) == "blocks"
