"""The GLA kernels: algorithm in numpy, rules, lowering; values on a Hopper GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CHUNK = 64
GATES = np.array([0.0, -1e-3, -1.0, -20.0, -1e4, -np.inf])
LEVELS = (1, 2, 4, 8, 16, 32)
VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())
pytestmark = pytest.mark.skipif(
    VERSION < (0, 11, 2), reason=f"jax {jax.__version__}: the kernels need 0.11.2"
)

if VERSION >= (0, 11, 2):
    from pallas_kernels.gla import kernel as gla_mosaic
    from pallas_kernels.gla import scan
    from pallas_kernels.gla.gates import gates
    from pallas_kernels.gla.op import gla


def chunk_case(seed: int, dk: int = 8, dv: int = 4, gate: str = "mixed"):
    """One chunk in float64: q, k, log_decay [64, dk], v, d_out [64, dv], S, E [dk, dv]."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, CHUNK, dk))
    v, d_out = rng.normal(size=(2, CHUNK, dv))
    state, d_state = rng.normal(size=(2, dk, dv))
    if gate == "mixed":
        g = GATES[rng.integers(0, len(GATES), size=(CHUNK, dk))]
    else:
        g = -np.abs(rng.normal(size=(CHUNK, dk))) * 0.05
    return q, k, g, v, d_out, state, d_state


def between(g: np.ndarray) -> np.ndarray:
    """exp(sum of g over j+1..i) for j <= i, else 0: [i, j, d], without any difference."""
    out = np.zeros((CHUNK, CHUNK, g.shape[-1]))
    for j in range(CHUNK):
        out[j, j] = 1.0
        for i in range(j + 1, CHUNK):
            out[i, j] = out[i - 1, j] * np.exp(g[i])
    return out


def tree(g: np.ndarray):
    """Yields (level, is query row, f) and at last (64, p, t): the kernels' recurrence."""
    p, t, o = np.exp(g), np.ones_like(g), np.exp(g)
    rows = np.arange(CHUNK)
    for level in LEVELS:
        query = (rows & level != 0)[:, None]
        yield level, query, np.where(query, p, t)
        other = o[rows ^ level]
        p, t, o = np.where(query, p * other, p), np.where(query, t, t * other), o * other
    yield CHUNK, p, t


def pairs_of(level: int) -> np.ndarray:
    """The pairs that meet on a level: the highest bit in which i and j differ."""
    i, j = np.indices((CHUNK, CHUNK))
    return (i ^ j) // level == 1


@pytest.mark.parametrize("gate", ["mixed", "weak"])
def test_tree_gives_the_gated_products(gate):
    q, k, g, *_ = chunk_case(0, gate=gate)
    lower = np.tril(np.ones((CHUNK, CHUNK)), -1) > 0
    attention = np.diag(np.sum(q * k, axis=1))
    *levels, (_, p, t) = tree(g)
    for level, query, f in levels:
        y = f * np.where(query, q, k)
        assert np.all(f <= 1.0)
        attention = np.where(pairs_of(level) & lower, y @ y.T, attention)
    exact = between(g)
    np.testing.assert_allclose(
        attention, np.einsum("id,jd,ijd->ij", q, k, exact), rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(p, np.exp(np.cumsum(g, axis=0)), rtol=1e-12)
    np.testing.assert_allclose(t, exact[-1], rtol=1e-12)


@pytest.mark.parametrize("gate", ["mixed", "weak"])
def test_tree_gives_the_gradients(gate):
    q, k, g, v, d_out, state, d_state = chunk_case(1, gate=gate)
    scale = 0.3
    exact = between(g)
    start, end = np.exp(np.cumsum(g, axis=0)), exact[-1]  # exp(b), exp(b_C - b)
    d_attention = scale * np.tril(d_out @ v.T)
    # The definition, pair by pair.
    flux = d_attention[:, :, None] * q[:, None] * k[None] * exact
    from_state = scale * start * (d_out @ state.T)
    to_state = end * (v @ d_state.T)
    dq = from_state + np.einsum("ij,jd,ijd->id", d_attention, k, exact)
    dk = to_state + np.einsum("ij,id,ijd->jd", d_attention, q, exact)
    through = start[-1] * np.sum(state * d_state, axis=1)
    dg = np.stack(
        [
            np.sum(flux[t:, :t], axis=(0, 1))
            + np.sum((q * from_state)[t:], axis=0)
            + np.sum((k * to_state)[:t], axis=0)
            + through
            for t in range(CHUNK)
        ]
    )
    # The kernel's way: one symmetric product per level, then one suffix sum.
    symmetric = np.tril(d_attention, -1)
    symmetric = symmetric + symmetric.T
    got_q, got_k, moved = from_state.copy(), to_state.copy(), q * from_state - k * to_state
    *levels, _ = tree(g)
    for level, query, f in levels:
        y = f * np.where(query, q, k)
        z = np.where(pairs_of(level), symmetric, 0.0) @ y
        got_q += np.where(query, f * z, 0.0)
        got_k += np.where(query, 0.0, f * z)
        moved += np.where(query, 1.0, -1.0) * y * z
    weight = np.diag(d_attention)[:, None]
    got_q, got_k = got_q + weight * k, got_k + weight * q
    got_g = through + np.sum(k * to_state, axis=0) + np.cumsum(moved[::-1], axis=0)[::-1]
    got_g = np.where(np.exp(g) == 0, 0.0, got_g)
    for got, want in ((got_q, dq), (got_k, dk), (got_g, dg)):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "rows, heads, dv, chunks, segments",
    [
        (8, 16, 128, 64, 1),
        (1, 16, 128, 256, 8),
        (1, 96, 128, 128, 1),
        (32, 4, 512, 32, 1),
        (1, 1, 128, 4096, 132),
        (1, 2, 128, 16, 4),
        (1, 1, 128, 1, 1),
    ],
)
def test_segments_fill_the_gpu_and_no_more(rows, heads, dv, chunks, segments):
    assert gla_mosaic.segments_for(rows, heads, dv, chunks) == segments


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunks, n", [(6, 3), (7, 3), (5, 4)])
def test_segment_starts_equal_the_plain_recursion(chunks, n, reverse):
    rng = np.random.default_rng(2)
    decay = rng.uniform(size=(1, 1, chunks, 3)).astype(np.float32)
    update = rng.normal(size=(chunks, 3, 2)).astype(np.float32)
    start = rng.normal(size=(3, 2)).astype(np.float32)
    per = -(-chunks // n)
    order = range(chunks)[::-1] if reverse else range(chunks)
    local, want, state = np.zeros((n, 3, 2), np.float32), {}, start
    for c in order:
        s = c // per
        want.setdefault(s, state)
        local[s] = decay[0, 0, c][:, None] * local[s] + update[c]
        state = decay[0, 0, c][:, None] * state + update[c]
    got = gla_mosaic.segment_starts(
        jnp.asarray(local)[None, None],
        jnp.asarray(decay),
        jnp.asarray(start)[None, None],
        None,
        n,
        reverse=reverse,
    )
    for s, expected in want.items():
        np.testing.assert_allclose(got[0, 0, s], expected, rtol=1e-5, atol=1e-6)


def test_segment_starts_skip_the_chunks_past_a_row():
    decay = jnp.full((1, 1, 4, 1), jnp.nan).at[:, :, :2].set(0.5)
    local = jnp.asarray([3.0, 0.0]).reshape(1, 1, 2, 1, 1)
    starts = gla_mosaic.segment_starts(local, decay, None, jnp.asarray([100]), 2)
    np.testing.assert_array_equal(np.asarray(starts).ravel(), [0.0, 3.0])


def operands(b, t, h, dk, dv, dtype=jnp.bfloat16):
    spec = jax.ShapeDtypeStruct
    q = spec((b, t, h, dk), dtype)
    return q, q, spec((b, t, h, dv), dtype), spec((b, t, h, dk), jnp.float32)


@pytest.mark.parametrize(
    "change, reason",
    [({"dtype": jnp.float32}, "q is float32"), ({"dk": 96}, "Dk = 96"), ({"dv": 96}, "Dv = 96")],
)
def test_a_reason_names_the_fact(change, reason):
    shape = {"b": 1, "t": 64, "h": 1, "dk": 128, "dv": 128} | change
    assert reason in gla_mosaic.plan(*operands(**shape)[:3]).text


def test_ragged_rows_cannot_be_saved():
    q, k, v, g = operands(1, 64, 1, 128, 128)
    with pytest.raises(ValueError, match="save needs whole rows"):
        gla_mosaic.gla_forward(q, k, v, g, scale=0.1, lengths=jnp.asarray([3]), save="states")


def test_supported_shapes_have_no_reason():
    for dk, dv in ((64, 64), (64, 128), (128, 128), (256, 512), (512, 128)):
        assert gla_mosaic.plan(*operands(2, 100, 3, dk, dv)[:3]).segments >= 1


def test_halves_of_a_head_are_the_head():
    """In the XLA form: values, state and gradients."""
    rng = np.random.default_rng(0)
    q, k, g = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(3, 2, 70, 3, 512)))
    v, d_o = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, 2, 70, 3, 64)))
    state = jnp.asarray(rng.normal(size=(2, 3, 512, 64)), jnp.float32)

    def whole(q, k, v, g, state):
        o, new = gla(q, k, v, g, initial_state=state, scale=0.1)
        return jnp.sum(o * d_o) + jnp.sum(new**2), (o, new)

    def cut(q, k, v, g, state):
        parts = *map(gla_mosaic.halves, (q, k)), gla_mosaic.twice(v), gla_mosaic.halves(g)
        o, new = gla(*parts, initial_state=state.reshape(2, 6, 256, 64), scale=0.1)
        o, new = gla_mosaic.summed(o), new.reshape(state.shape)
        return jnp.sum(o * d_o) + jnp.sum(new**2), (o, new)

    operands = q, k, v, -jnp.abs(g), state
    want, got = (jax.grad(f, argnums=range(5), has_aux=True)(*operands) for f in (whole, cut))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_rms(x, np.asarray(y, np.float64)) < 1e-5


def test_a_step_of_512_channels_lowers_in_place():
    q, k, v, g = (
        jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
        for x in operands(64, 1, 4, 512, 128)
    )
    state = jax.ShapeDtypeStruct((64, 4, 512, 128), jnp.float32)
    step = jax.jit(lambda *x: gla_mosaic.gla_step(*x, 0.1), donate_argnums=4)
    text = step.trace(q, k, v, g, state).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1 and "tf.aliasing_output = 1" in text


def lowered(f, *args) -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "shape, kernels",
    [
        ((8, 4096, 16, 128, 128), 2),
        ((1, 16384, 16, 128, 128), 3),
        ((32, 2048, 4, 256, 512), 2),
        ((2, 1003, 3, 64, 128), 3),
        ((8, 4096, 8, 512, 128), 2),
    ],
)
def test_forward_lowers(shape, kernels):
    text = lowered(
        lambda q, k, v, g: gla_mosaic.gla_forward(q, k, v, g, scale=0.1), *operands(*shape)
    )
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert "stablehlo.transpose" not in text  # everything is read and written where it lies


@pytest.mark.parametrize(
    "shape, kernels",
    [((8, 4096, 16, 128, 128), 4), ((32, 2048, 4, 256, 512), 5), ((8, 4096, 8, 512, 128), 4)],
)
def test_backward_lowers(shape, kernels):
    q, k, v, g = operands(*shape)
    text = lowered(
        lambda q, k, v, g, d: gla_mosaic.gla_backward(q, k, v, g, d, None, scale=0.1),
        q,
        k,
        v,
        g,
        v,
    )
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert "stablehlo.transpose" not in text


def test_ragged_forward_with_state_lowers():
    q, k, v, g = operands(2, 700, 2, 128, 256)
    state = jax.ShapeDtypeStruct((2, 2, 128, 256), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lowered(
        lambda q, k, v, g, s, n: gla_mosaic.gla_forward(
            q, k, v, g, scale=0.1, initial_state=s, lengths=n
        ),
        q,
        k,
        v,
        g,
        state,
        lengths,
    )
    assert text.count("@mosaic_gpu_v2(") == 3


def test_step_lowers_in_place():
    q, k, v, g = (
        jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
        for x in operands(64, 1, 32, 128, 128)
    )
    state = jax.ShapeDtypeStruct((64, 32, 128, 128), jnp.float32)
    step = jax.jit(lambda *x: gla_mosaic.gla_step(*x, 0.1), donate_argnums=4)
    text = step.trace(q, k, v, g, state).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 4" in text
    assert "tf.aliasing_output = 1" in text


# --- Values, on the GPU ---------------------------------------------------------------------------
CASES = [  # (B, T, H, Dk, Dv), gates, segments
    ((1, 64, 1, 64, 128), "weak", 1),
    ((2, 300, 2, 128, 256), "mixed", None),
    ((1, 1003, 3, 64, 128), "strong", 1),
    ((2, 300, 3, 64, 64), "weak", None),  # Dv padded to 128
    ((2, 520, 2, 256, 512), "weak", 3),
    ((2, 700, 2, 128, 128), "mixed", 4),
    ((2, 520, 2, 512, 128), "mixed", None),  # two halves
    ((1, 300, 1, 512, 64), "weak", 1),
]


def gpu_case(shape, gate):
    b, t, h, dk, dv = shape
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(x, jnp.bfloat16) for x in rng.normal(size=(2, b, t, h, dk)))
    v, d_out = (jnp.asarray(x, jnp.bfloat16) for x in rng.normal(size=(2, b, t, h, dv)))
    state, d_state = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, b, h, dk, dv)))
    if gate == "mixed":
        g = GATES[rng.integers(0, len(GATES), size=(b, t, h, dk))]
    else:
        g = -np.abs(rng.normal(size=(b, t, h, dk))) * (0.05 if gate == "weak" else 2.0)
    return q, k, v, jnp.asarray(g, jnp.float32), d_out, state, d_state


def recurrence(q, k, v, g, state, scale):
    """float64 o, state and all states, by the definition."""
    q, k, v, g, state = (np.asarray(x, np.float64) for x in (q, k, v, g, state))
    out, states = [], [state]
    for t in range(q.shape[1]):
        state = np.exp(g[:, t])[..., None] * state + k[:, t][..., None] * v[:, t][..., None, :]
        states.append(state)
        out.append(scale * np.einsum("bhk,bhkv->bhv", q[:, t], state))
    return np.stack(out, axis=1), state, states


def gradients(q, k, v, g, d_out, states, d_state, scale):
    """float64 dq, dk, dv, dg, dinitial from the stored states."""
    q, k, v, g, d_out, e = (np.asarray(x, np.float64) for x in (q, k, v, g, d_out, d_state))
    dq, dk, dv, dg = (np.zeros_like(x) for x in (q, k, v, g))
    for t in reversed(range(q.shape[1])):
        dq[:, t] = scale * np.einsum("bhv,bhkv->bhk", d_out[:, t], states[t + 1])
        e = e + scale * q[:, t][..., None] * d_out[:, t][..., None, :]
        dk[:, t] = np.einsum("bhkv,bhv->bhk", e, v[:, t])
        dv[:, t] = np.einsum("bhkv,bhk->bhv", e, k[:, t])
        e = np.exp(g[:, t])[..., None] * e
        dg[:, t] = np.sum(e * states[t], axis=-1)
    return dq, dk, dv, dg, e


def relative_rms(x, want) -> float:
    x = np.asarray(x, np.float64)
    return float(np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2)))


@pytest.mark.gpu
@pytest.mark.parametrize("shape, gate, segments", CASES)
def test_forward_and_backward_values(shape, gate, segments):
    q, k, v, g, d_out, state, d_state = gpu_case(shape, gate)
    scale = shape[3] ** -0.5

    @jax.jit
    def run(q, k, v, g, d_out, state, d_state):
        o, last, states = gla_mosaic.gla_forward(
            q, k, v, g, scale=scale, initial_state=state, segments=segments, save="states"
        )
        *_, everything = gla_mosaic.gla_forward(
            q, k, v, g, scale=scale, initial_state=state, segments=segments, save="all"
        )
        grads = gla_mosaic.gla_backward(
            q, k, v, g, d_out, d_state, scale=scale, initial_state=state, segments=segments
        )
        saved = [
            gla_mosaic.gla_backward(
                q, k, v, g, d_out, d_state, scale=scale, saved=x, segments=segments
            )
            for x in (states, everything)
        ]
        return (o, last, *grads), saved

    got, saved = run(q, k, v, g, d_out, state, d_state)
    again, _ = run(q, k, v, g, d_out, state, d_state)
    for a, b in zip(got, again, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for other in saved:
        for a, b in zip(got[2:], other, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    o, last, states = recurrence(q, k, v, g, state, scale)
    want = (o, last, *gradients(q, k, v, g, d_out, states, d_state, scale))
    names = ("o", "state", "dq", "dk", "dv", "dg", "dinitial")
    errors = {n: relative_rms(x, w) for n, x, w in zip(names, got, want, strict=True)}
    assert all(error < 5e-3 for error in errors.values()), errors
    dg = np.asarray(got[5])
    assert np.all(dg[np.exp(np.asarray(g)) == 0] == 0)
    hard = np.asarray(g) == -20
    assert np.all(np.abs(dg[hard]) < 1e-5)


@pytest.mark.gpu
def test_padding_may_hold_anything():
    shape = (3, 330, 2, 128, 128)
    q, k, v, g, _, state, _ = gpu_case(shape, "mixed")
    lengths = np.array([330, 129, 20], np.int32)
    valid = (np.arange(330)[None] < lengths[:, None])[:, :, None, None]
    poison = [jnp.where(valid, x, jnp.nan).astype(x.dtype) for x in (q, k, v, g)]
    clean = [jnp.where(valid, x, 0).astype(x.dtype) for x in (q, k, v, g)]
    run = jax.jit(
        lambda *x: gla_mosaic.gla_forward(
            *x[:4], scale=0.1, initial_state=x[4], lengths=x[5], segments=2
        )
    )
    o, last = run(*poison, state, lengths)
    want_o, want_last, _ = recurrence(*clean, state, 0.1)
    assert relative_rms(o, want_o) < 5e-3
    assert relative_rms(last, want_last) < 5e-3
    assert np.all(np.where(valid, 0, np.asarray(o, np.float32)) == 0)


@pytest.mark.gpu
def test_pairs_of_blocks_give_the_bits_of_blocks(monkeypatch):
    """Ragged rows, one of which ends in the first chunk."""
    q, k, v, g, _, state, _ = gpu_case((2, 330, 2, 256, 256), "weak")
    lengths = jnp.asarray([330, 20], jnp.int32)
    forward = gla_mosaic.gla_forward.__wrapped__  # each jit traces it anew

    def run(*x):
        return forward(*x, scale=0.1, initial_state=state, lengths=lengths, segments=1)

    alone = jax.jit(run)(q, k, v, g)
    small = dataclasses.replace(scan.gpu(), sms=1)
    monkeypatch.setattr(scan, "gpu", lambda: small)
    pairs = jax.jit(lambda *x: run(*x))(q, k, v, g)
    for a, b in zip(alone, pairs, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
def test_the_gates_alone():
    q, k, _, g, *_ = gpu_case((1, 200, 2, 128, 128), "mixed")
    qg, kg, attention, decay = jax.jit(lambda q, k, g: gates(q, k, g, None, 0.25))(q, k, g)
    assert qg.shape == (1, 2, 256, 128) and attention.shape == (1, 2, 1, 256, 64)
    g64 = np.zeros((256, 128))
    g64[:200] = np.asarray(g, np.float64)[0, :, 1]
    product = np.exp(g64.reshape(4, 64, 128).sum(axis=1))
    np.testing.assert_allclose(np.asarray(decay)[0, 1], product, rtol=1e-5, atol=1e-30)
    assert np.all(np.triu(np.asarray(attention, np.float32)[0, 0, 0, :64], 1) == 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(3, 5, 128, 128), (2, 2, 256, 512), (1, 1, 64, 128), (3, 2, 512, 128)]
)
def test_step_values(shape):
    b, h, dk, dv = shape
    q, k, v, g, _, state, _ = gpu_case((b, 1, h, dk, dv), "mixed")
    want_o, want_state, _ = recurrence(q, k, v, g, state, 0.1)
    step = jax.jit(lambda *x: gla_mosaic.gla_step(*x, 0.1), donate_argnums=4)
    o, new = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], state)
    assert relative_rms(o, want_o[:, 0]) < 3e-3
    np.testing.assert_allclose(np.asarray(new), want_state, rtol=1e-5, atol=1e-5)
