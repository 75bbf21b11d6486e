"""One step of GLA by the CPU's handler, against the recursion in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain, gla_step
from pallas_kernels.cpu import frame, gla, jit
from pallas_kernels.cpu.gla import CpuPlan, GlaStepProgram
from pallas_kernels.cpu.target import TARGETS, VARIABLE
from tests.helpers.arrays import as_jax
from tests.helpers.cpu_cases import GuardedPages, error, native, same_bits_under_load

TOLERANCE = 1e-6


def case(batch, heads, d_k, d_v, seed=0):
    """Decays from none to forgetting; (q, k, v, log_decay, state)."""
    rng = np.random.default_rng(seed)
    q, k = (rng.standard_normal((batch, heads, d_k)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((batch, heads, d_v)).astype(np.float32)
    log_decay = -np.exp(3 * rng.standard_normal((batch, heads, d_k))).astype(np.float32)
    log_decay[..., :: max(1, d_k // 3)] = 0.0
    log_decay[..., d_k // 2] = -np.inf
    state = rng.standard_normal((batch, heads, d_k, d_v)).astype(np.float32)
    return q, k, v, log_decay, state


def oracle(q, k, v, log_decay, state):
    q, k, v, log_decay, state = (x.astype(np.float64) for x in (q, k, v, log_decay, state))
    state = np.exp(log_decay)[..., None] * state + k[..., None] * v[..., None, :]
    return q.shape[-1] ** -0.5 * np.einsum("bhk,bhkv->bhv", q, state), state


def by_hand(*operands, threads=1, on=None, place=lambda a: a):
    q, _, v, _, state = operands
    found = gla.plan(q, v)
    assert isinstance(found, CpuPlan), found
    arrays = [place(x) for x in operands]
    out = place(np.full(v.shape, np.nan, np.float32))
    after = arrays[4] = place(state.copy())  # one array, as XLA has it
    scale = {"scale": np.asarray(q.shape[-1] ** -0.5, np.float32)}
    address = jit.compiled(found.program, on or jit.host()).address
    frame.call(address, arrays, [out, after], scale, threads=threads)
    return np.array(out), np.array(after)


@pytest.mark.core
@pytest.mark.parametrize("target", native(), ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(1, 4, 64, 128), (3, 2, 33, 96), (2, 1, 5, 16)], ids=str)
def test_it_is_the_recursion(shape, target):
    operands = case(*shape)
    for got, want in zip(by_hand(*operands, on=target), oracle(*operands), strict=True):
        assert error(got, want) < TOLERANCE


@pytest.mark.parametrize("one", TARGETS, ids=lambda t: t.name)
def test_every_target_compiles_it(one):
    """NEON's code is read here; ``test_arm_emulated`` runs it."""
    assembly = jit.build(GlaStepProgram(64, 128), one, assembly=True)
    assert ("fmla" if one.arch == "aarch64" else "vfmadd") in assembly
    assert ("zmm" in assembly) == (one.name == "avx512vnni")


def test_any_shape_threads_and_guarded_pages():
    rng = np.random.default_rng(4)
    for seed in range(8):
        shape = (
            *(int(n) for n in rng.integers(1, 4, 2)),
            int(rng.integers(1, 70)),
            16 * int(rng.integers(1, 14)),
        )
        operands = case(*shape, seed)
        alone = by_hand(*operands)
        for threads in (0, 2, 8):
            place = GuardedPages().place if threads == 2 else lambda a: a
            got = by_hand(*operands, threads=threads, place=place)
            for one, other in zip(got, alone, strict=True):
                np.testing.assert_array_equal(one, other)
        assert error(alone[0], oracle(*operands)[0]) < TOLERANCE


def test_a_row_that_stands_still_keeps_its_bits():
    q, k, v, log_decay, state = case(2, 2, 32, 32)
    _, after = by_hand(q, k * 0, v, np.zeros_like(log_decay), state)
    np.testing.assert_array_equal(after, state)


def test_xla_runs_it_in_place():
    operands = [as_jax(x) for x in case(2, 2, 32, 64)]
    step = functools.partial(gla_step, implementation="cpu")
    want = by_hand(*map(np.asarray, operands))
    for got in (step(*operands), jax.jit(step)(*operands)):
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
    mapped = jax.vmap(step)(*(x[:, None] for x in operands))
    np.testing.assert_array_equal(mapped[1][:, 0], want[1])
    compiled = jax.jit(step, donate_argnums=4).lower(*operands).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= operands[4].nbytes > memory.temp_size_in_bytes
    half = step(*(x.astype(jnp.bfloat16) for x in operands[:3]), *operands[3:])
    assert half[0].dtype == jnp.bfloat16 and error(half[0].astype(jnp.float32), want[0]) < 1e-2


def test_its_derivative_is_xlas():
    operands = [as_jax(x) for x in case(1, 2, 8, 16)]
    operands[3] = jnp.maximum(operands[3], -5.0)

    def loss(how, *operands):
        o, state = gla_step(*operands, implementation=how)
        return jnp.sum(jnp.sin(o)) + jnp.sum(state**2)

    slopes = jax.jit(jax.grad(loss, argnums=range(1, 6)), static_argnums=0)
    for got, want in zip(*(slopes(how, *operands) for how in ("cpu", "xla")), strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-5)


def test_the_choice(monkeypatch):
    operands = case(1, 2, 8, 16)
    assert f"cpu, gla_step_cpu, {jit.host().name}, GlaStepProgram" in explain(gla_step, *operands)
    reason = gla.plan(*(np.zeros((1, 1, n)) for n in (8, 20))).text
    assert "20 features; the handler takes multiples of 16" in reason
    monkeypatch.setenv(VARIABLE, "off")
    assert f"xla ({VARIABLE}=off)" in explain(gla_step, *operands)


def _under_load(calls: int) -> None:
    cases = [case(1 + i % 3, 2, 64, 128, i) for i in range(6)]
    step = jax.jit(functools.partial(gla_step, implementation="cpu"))
    same_bits_under_load(calls, [lambda one=one: step(*one)[1] for one in cases])


def test_bits_are_equal_under_load():
    _under_load(30)


@pytest.mark.slow
def test_bits_are_equal_under_long_load():
    _under_load(1500)
