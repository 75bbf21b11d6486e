"""Sums whose order does not depend on the number of rows: one plan a weight, and blocks of rows.

The kernels run in the emulator with the plan of 512 rows.  A row has the same bits in every call.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fixed_sums, quantize
from pallas_kernels.attention import plan as attention
from pallas_kernels.attention.blockwise import blockwise_attention
from pallas_kernels.attention.pages import as_rows
from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import Reason, explain, named_plan
from pallas_kernels.experts import plan as experts
from pallas_kernels.experts.op import weighted_sum
from pallas_kernels.gated_delta import kernel as delta_kernel
from pallas_kernels.gated_delta import step_kernel as delta
from pallas_kernels.gated_delta.op import gated_delta
from pallas_kernels.gla import kernel as gla_kernel
from pallas_kernels.gla import op as gla_op
from pallas_kernels.gla import step_kernel as gla
from pallas_kernels.latent import plan as latent
from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import Around, MatmulCall, Static
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.recurrence.op import Heads
from pallas_kernels.rows import plan as rows
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.ssd import kernel as ssd
from tests.helpers.matmul_cases import lowered, newest

ROWS = (1, 2, 33, 64, 200, 512)
BF16 = jnp.dtype(jnp.bfloat16)
SCHEMES = {  # codes and group of w, codes of x
    "w4a16": ("int4", 128, None),
    "w8a16": ("int8", None, None),
    "w8a8": ("int8", None, "int8"),
    "fp8": ("float8_e4m3fn", None, "float8_e4m3fn"),
}
shape = jax.ShapeDtypeStruct


@pytest.fixture
def on_an_h200(monkeypatch):
    """Plan for an H200, whose blocks have 512 rows, on a CPU."""
    monkeypatch.setitem(fixed_sums._ROWS, True, 512)
    with planned_for("NVIDIA H200"), fixed_sums.fixed_sums(True):
        yield


def quantized(scheme, x, w):
    codes, group, of_x = SCHEMES[scheme]
    w = quantize(w, codes, group_size=group)
    return (x if of_x is None else quantize_tokens(x, of_x)), w


def operands(scheme, m, n, k):
    r = np.random.default_rng(0)
    w, x = (r.standard_normal((rows, k)).astype(np.float32) for rows in (n, 512))
    return quantized(scheme, jnp.asarray(x, BF16)[:m], jnp.asarray(w))


def shapes(scheme, m):
    x, w = shape((m, 4096), BF16), shape((4096, 4096), jnp.float32)
    return jax.eval_shape(functools.partial(quantized, scheme), x, w)


def plan_of(scheme, m):
    return choice.plan(MatmulCall.of(*shapes(scheme, m), BF16))


def alike(plans):
    """Whether plans of several calls are one: their kernel, tile and division."""
    return len({repr(named_plan(plan)) for plan in plans}) == 1


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "fp8"])
def test_a_weight_has_one_plan_for_any_number_of_rows(scheme, on_an_h200):
    """``explain`` says what a call of so many rows takes with it, which differs."""
    plans = [plan_of(scheme, m) for m in (*ROWS, 2048)]
    assert not any(isinstance(plan, Reason) for plan in plans) and alike(plans)
    assert plans[0].predicted_us < plans[-1].predicted_us
    x, w = shapes(scheme, 1)
    with fixed_sums.fixed_sums(False):
        assert repr(plan_of(scheme, 1)) != repr(plans[0])
    if scheme != "fp8":
        line = explain(quantized_matmul, x, w, implementation="mosaic")
        assert f"{plans[0].predicted_us:.1f} us predicted" in line


def test_exact_sums_keep_the_tile_of_the_rows(on_an_h200):
    plans = [plan_of("w8a8", m) for m in ROWS]
    assert {plan.kernel for plan in plans} == {"quantized_matmul_prefill_pair"}
    with fixed_sums.fixed_sums(False):
        assert repr(plans) == repr([named_plan(plan_of("w8a8", m)) for m in ROWS])


def test_every_other_op_has_one_plan(on_an_h200):
    def attend(batch, capacity, cache=BF16):
        q, k = shape((batch, 32, 128), BF16), shape((batch, capacity, 8, 128), cache)
        return attention.plan((q, as_rows(k, None), 32))

    assert alike([attend(batch, n) for batch in ROWS for n in (256, 2048, 32768)])

    def norm(m):
        return rows.plan("norm", shape((m, 4096), BF16), "int8", shape((4096,), BF16))

    def gate(m):
        return rows.plan("gate", shape((m, 8192), BF16), "int8")

    assert alike([norm(m) for m in ROWS]) and alike([gate(m) for m in ROWS])
    assert alike([gla.divided(m, 4, 256, 512) for m in ROWS])

    def step(m):
        q, v = shape((m, 8, 128), BF16), shape((m, 8, 128), BF16)
        return delta.plan(q, q, v)

    assert alike([step(m) for m in ROWS])
    cache = lambda m: shape((m, 4096, 576), BF16)  # noqa: E731
    q = lambda m: shape((m, 1, 16, 576), BF16)  # noqa: E731
    assert alike([latent.plan(q(m), cache(m), None) for m in ROWS])

    def grouped(m):
        w = shape((32, 2880, 2880), BF16)
        pairs = fixed_sums.planned_rows(m) * 4
        return experts.plan(shape((m, 2880), BF16), w, pairs, "silu")

    assert alike([grouped(m) for m in ROWS])


def test_a_row_has_one_number_of_segments_beside_any_others(on_an_h200):
    """GLA-1.3B, Qwen3.6 and Mamba-2 in calls of one row and more, also longer than a block."""

    def plans(batch, length):
        def heads(n, d, *keys):
            q, v = shape((batch, length, keys[0], d), BF16), shape((batch, length, n, d), BF16)
            return Heads(q, q, v, shape((batch, length, *keys[1:]), jnp.float32))

        gla = heads(4, 256, 4, 4, 256)
        return gla_kernel.plan(gla), delta_kernel.plan(heads(32, 128, 16, 32)), ssd.plan(gla)

    for length in (32, 128, 512, 2048):
        for kernel in zip(*(plans(batch, length) for batch in (1, 4, 16)), strict=True):
            assert alike(kernel) and not isinstance(kernel[0], Reason)
    assert [plan.segments for plan in plans(1, 512)] == [2, 1, 1]


@pytest.mark.parametrize(("name", "length"), [("gla", 100), ("delta", 32)])
def test_chunks_of_a_row_do_not_know_the_rows_beside_it(name, length):
    """XLA's form; without fixed sums its products of several rows add otherwise."""
    r = np.random.default_rng(0)
    shapes = [(3, length, 2, 16)] * 2 + [(3, length, 2, 32)]
    heads = [jnp.asarray(r.standard_normal(size), jnp.float32) for size in shapes]
    lengths, state = jnp.asarray([length, 7, length - 5]), jnp.ones((3, 2, 16, 32))

    @jax.jit
    def run(q, k, v, state, lengths):
        log_decay, given = -jnp.square(k) / 8, {"initial_state": state, "lengths": lengths}
        with fixed_sums.fixed_sums(True):
            if name == "gla":
                return gla_op.gla(q, k, v, log_decay, **given)
            beta = jax.nn.sigmoid(v[..., 0])
            return gated_delta(q, k, v, log_decay[..., 0], beta, normalize_qk=True, **given)

    together = run(*heads, state, lengths)
    for i in range(3):
        alone = run(*(x[i : i + 1] for x in (*heads, state, lengths)))
        for x, y in zip(together, alone, strict=True):
            np.testing.assert_array_equal(x[i], y[0])


@newest
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weights_plan_lowers_for_fewer_rows_than_its_tile(scheme, on_an_h200):
    """One row and 33 rows, with the tile that 512 rows have."""

    def product(x, w):
        return quantized_matmul(x, w, out_dtype=BF16, implementation="mosaic")

    for m in (1, 33):
        text = lowered(product, *shapes(scheme, m))
        assert "mosaic_gpu" in text


@newest
@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [
        ("fp8", (1, 33)),
        *(pytest.param(scheme, ROWS, marks=pytest.mark.slow) for scheme in SCHEMES),
    ],
)
def test_a_row_has_the_same_bits_in_any_number_of_rows(scheme, sizes, on_an_h200):
    """The emulated kernel of the weight's plan, on four multiprocessors."""
    from tests.helpers.emulator.launch import emulated

    n, k, found = 128, 256, {}
    for m in sizes:
        x, w = operands(scheme, m, n, k)
        call = MatmulCall.of(x, w, BF16)
        plan = named_plan(choice.plan(call))
        assert plan is not None
        with emulated(0):
            static = Static(BF16, call, dataclasses.replace(plan, sms=4))
            found[m] = np.asarray(choice.run(static, x, w, Around(BF16)), np.float32)
    most = found[max(sizes)]
    assert np.abs(most).max() > 1
    for m, y in found.items():
        np.testing.assert_array_equal(y, most[:m])


@newest
@pytest.mark.slow
def test_exact_sums_have_the_same_bits_in_any_tile(on_an_h200):
    """Tiles of one block, of halves of K, and of a cluster of many rows."""
    from tests.helpers.emulator.launch import emulated

    x, w = operands("w8a8", 70, 256, 512)
    call, found = MatmulCall.of(x, w, BF16), []
    plan = named_plan(choice.plan(call))
    few = dataclasses.replace(plan, m=64, n=128, cluster=1, stages=4, sms=4)
    many = dataclasses.replace(few, m=128, cluster=2)
    for tile in (few, dataclasses.replace(few, split=2), many):
        with emulated(0):
            y = choice.run(Static(BF16, call, tile), x, w, Around(BF16))
        found.append(np.asarray(y, np.float32))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("codes", [None, "int8", "int4"])
def test_xlas_products_have_the_same_bits_in_any_number_of_rows(codes):
    """On a CPU one row alone, and 64, are rounded otherwise without the blocks."""
    r = np.random.default_rng(0)
    w, x = (jnp.asarray(r.standard_normal((n, 768)), jnp.float32) for n in (256, 200))
    w = w if codes is None else quantize(w, codes, group_size=128 if codes == "int4" else None)

    def differing(on: bool) -> list[int]:
        def product(x):
            with fixed_sums.fixed_sums(on):
                return quantized_matmul(x, w, implementation="xla")

        whole = jax.jit(product)(x)
        parts = {m: jax.jit(lambda x: product(x))(x[:m]) for m in (1, 2, 33, 64, 100)}
        return [m for m, y in parts.items() if not np.array_equal(y, whole[:m])]

    assert differing(False) and not differing(True)


def test_xla_multiplies_blocks_of_rows():
    """Padded to whole blocks: a product sees one shape, and results are those of the rows."""
    seen = []

    def product(x):
        seen.append(x[0].shape)
        return x[0] @ x[1].T

    x, scale = jnp.arange(70 * 4, dtype=jnp.float32).reshape(35, 2, 4), jnp.ones((3, 4))
    scalar = jnp.float32(2)
    with fixed_sums.fixed_sums(True):
        y = fixed_sums.by_blocks(lambda x: product((x[0] * x[1], scale)), (x, scalar), axes=2)
        one = fixed_sums.by_blocks(lambda x: product((x, scale)), x[:3, 0])
    assert {size[0] for size in seen} == {32}
    np.testing.assert_array_equal(y, 2 * x @ scale.T)
    np.testing.assert_array_equal(one, x[:3, 0] @ scale.T)
    assert fixed_sums.by_blocks(lambda x: x, x, axes=2) is x


@pytest.mark.parametrize("width", [8, 32, 576])
def test_a_norm_has_the_same_bits_in_any_number_of_rows(width):
    """In calls of any rows and in loops: XLA divides a CPU's reductions among threads otherwise."""
    r = np.random.default_rng(0)
    x, scale = (jnp.asarray(r.standard_normal(n), jnp.float32) for n in ((160, width), width))

    def differing(on: bool) -> int:
        def norm(x):
            with fixed_sums.fixed_sums(on):
                return rms_norm(x, scale, 1e-5)

        want = np.concatenate([jax.jit(norm)(x[at : at + 32]) for at in range(0, 160, 32)])
        in_a_loop = jax.jit(lambda x: jax.lax.map(norm, x[:, None].reshape(5, 32, 1, -1)))(x)
        found = jax.jit(norm)(x), in_a_loop.reshape(160, -1)
        np.testing.assert_allclose(found[0], want, rtol=1e-6)
        return sum(int(np.sum(np.asarray(y) != want)) for y in found)

    assert differing(True) == 0
    assert width != 32 or differing(False) > 0


def test_ordered_sums_are_sums():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 130, 5)), jnp.float32)
    for axis in (-1, 1, -3):
        want = np.sum(np.asarray(x, np.float64), axis=axis, keepdims=True)
        np.testing.assert_allclose(fixed_sums.ordered_sums(x, axis), want, atol=1e-5)


def test_a_tokens_experts_are_summed_in_their_order():
    """Each product is rounded before it is added, whatever a fusion would do."""
    r = np.random.default_rng(0)
    y, w = (jnp.asarray(r.standard_normal(n), jnp.float32) for n in ((5, 4, 64), (5, 4)))
    want = np.zeros((5, 64), np.float32)
    for j in range(4):
        want = want + np.asarray(y)[:, j] * np.asarray(w)[:, j, None]
    with fixed_sums.fixed_sums(True):
        got = jax.jit(lambda y, w: weighted_sum(y, w, jnp.float32))(y, w)
    np.testing.assert_array_equal(got, want)


def test_blocks_may_have_several_results():
    x = jnp.arange(35 * 4, dtype=jnp.float32).reshape(35, 4)
    with fixed_sums.fixed_sums(True):
        first, both = fixed_sums.by_blocks(lambda x, w: (x[:, 0], {"x": x * w}), x, jnp.ones(4))
    np.testing.assert_array_equal(first, x[:, 0])
    np.testing.assert_array_equal(both["x"], x)


@pytest.mark.parametrize("page", [None, 16])
def test_attention_divides_keys_by_their_positions(page):
    """Caches of any length, as rows and as pages: the same bits, and the values of plain sums."""
    r = np.random.default_rng(0)
    k, v = (jnp.asarray(r.standard_normal((2, 640, 2, 32)), jnp.float32) for _ in range(2))
    q = jnp.asarray(r.standard_normal((2, 5, 4, 32)), jnp.float32)
    positions = jnp.asarray([[45], [11]], jnp.int32) + jnp.arange(5, dtype=jnp.int32)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def attend(on, capacity):
        table, kv = None, (k[:, :capacity], v[:, :capacity])
        if page is not None:
            kv = tuple(x.reshape(-1, page, *x.shape[2:]) for x in kv)
            table = jnp.arange(len(kv[0]), dtype=jnp.int32).reshape(2, -1)
        with fixed_sums.fixed_sums(on):
            return blockwise_attention(q, *kv, positions, table=table)

    want = attend(True, 640)
    for capacity in (64, 528):
        np.testing.assert_array_equal(attend(True, capacity), want)
    np.testing.assert_allclose(want, attend(False, 640), atol=1e-6)


def test_no_rows_have_fixed_sums_too():
    with fixed_sums.fixed_sums(True):
        assert quantized_matmul(jnp.zeros((0, 16)), jnp.zeros((8, 16))).shape == (0, 8)
