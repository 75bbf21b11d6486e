"""Every public op under jit, vmap, grad, jvp, shard_map, export: the table in ``transform``.

Values are checked with the XLA form on a CPU; the mechanism that puts a kernel in its place, with a
kernel of plain jax.numpy; the kernels themselves by lowering for CUDA, and on a GPU.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import pallas_kernels as ops
from pallas_kernels import transform
from pallas_kernels.attention.op import decode_attention_reference
from pallas_kernels.attention.rope_cache import quantize_kv
from pallas_kernels.experts.op import grouped_matmul_reference
from pallas_kernels.matmul import weight_only
from pallas_kernels.matmul.op import quantized_matmul_reference
from pallas_kernels.primitives.derivative import late
from tests.helpers.arrays import as_jax
from tests.helpers.compiling import environment

VERSION = tuple(int(v) for v in jax.__version__.split(".")[:3] if v.isdigit())
newest = pytest.mark.skipif(VERSION < (0, 11, 2), reason="Mosaic kernels need jax >= 0.11.2")
P = PartitionSpec


class Case(NamedTuple):
    """``f(*operands, implementation=...)``; operands are made in a dtype.  batched: which of them
    have the axis that shard_map divides first.  reference: for the gradients of an op whose own
    tests have none.  smooth: it has numerical derivatives."""

    f: Callable
    operands: Callable
    batched: tuple[bool, ...]
    reference: Callable | None = None
    smooth: bool = True


_quantize = jax.jit(
    ops.quantize, static_argnames=("dtype", "group_size", "symmetric", "scale_dtype")
)
_quantize_kv = jax.jit(quantize_kv, static_argnums=1)


def _arrays(dtype, *shapes) -> list[jax.Array]:
    """Drawn and rounded by numpy, which compiles nothing."""
    rng = np.random.default_rng(len(shapes))
    return [as_jax(rng.standard_normal(s).astype(jnp.dtype(dtype))) for s in shapes]


def _weight(words: str, zeros: bool = False, n: int = 16, k: int = 64) -> ops.QTensor:
    (w,) = _arrays(jnp.float32, (n, k))
    return _quantize(w, words, group_size=32 if zeros else None, symmetric=not zeros)


def _matmul(words: str, zeros: bool = False) -> Case:
    def operands(dtype):  # more than one tile of rows
        return (*_arrays(dtype, (4, 64)), _weight(words, zeros, n=208))

    return Case(ops.quantized_matmul, operands, (True, False), quantized_matmul_reference)


def _grouped() -> Case:
    experts = as_jax([[0, 2], [1, 0], [2, 1], [2, 0]], jnp.int32)

    def operands(dtype):
        return *_arrays(dtype, (4, 32), (3, 16, 32)), experts, *_arrays(dtype, (4, 2))

    def f(x, w, experts, weights, **how):
        return ops.grouped_matmul(x, w, experts, weights=weights, gated="silu", **how)

    def reference(x, w, experts, weights):
        return grouped_matmul_reference(x, w, experts, weights=weights, gated="silu")

    return Case(f, operands, (True, False, True, True), reference)


def _pair(dtype):
    x, w = _arrays(jnp.float32, (4, 64), (16, 64))
    return _quantize(x), _quantize(w)


def _int4_pair(dtype):
    k = 2048 if dtype == jnp.bfloat16 else 256  # the kernel wants 16 groups
    x, w = _arrays(jnp.float32, (4, k), (16, k))
    return _quantize(x), _quantize(w, "int4", group_size=128, scale_dtype="int8")


def _fp8_groups(dtype):
    x, w = _arrays(jnp.float32, (4, 256), (256, 256))
    return ops.quantize_tokens(x, "float8_e4m3fn", group_size=128), _quantize(w, "fp8-block")


def _cache(dtype, words: str | None):
    k, v = _arrays(dtype, (2, 128, 1, 64), (2, 128, 1, 64))
    if words is not None:
        k, v = _quantize_kv(k, words), _quantize_kv(v, words)
    return k, v


def _attention(words: str | None = None) -> Case:
    def operands(dtype):
        return (
            *_arrays(dtype, (2, 2, 64)),
            *_cache(dtype, words),
            as_jax([128, 5], jnp.int32),
        )

    # float16 scales are too coarse for differences.
    smooth = words != "int4"
    return Case(ops.decode_attention, operands, (True,) * 4, decode_attention_reference, smooth)


def _pages() -> Case:
    def operands(dtype):
        lengths, table = as_jax([128, 5], jnp.int32), as_jax([[3, 0], [1, 2]], jnp.int32)
        return *_arrays(dtype, (2, 2, 64), (4, 64, 1, 64), (4, 64, 1, 64)), lengths, table

    def f(*operands, implementation):
        *rest, table = operands
        return ops.decode_attention(*rest, table=table, implementation=implementation)

    def reference(*operands):
        *rest, table = operands
        return decode_attention_reference(*rest, table=table)

    return Case(f, operands, (True, False, False, True, True), reference)


def _rope(op: Callable, words: str | None = None) -> Case:
    def operands(dtype):
        angle = np.linspace(0.0, 3.0, 64, dtype=np.float32).reshape(2, 32)
        return (
            *_arrays(dtype, (2, 4, 64)),
            as_jax(np.cos(angle)),
            as_jax(np.sin(angle)),
            *_cache(dtype, words),
            as_jax([127, 3], jnp.int32),
        )

    return Case(op, operands, (True,) * 6, smooth=words is None)


def _gla(tokens: tuple[int, ...], *states: tuple[int, ...]) -> Callable:
    def operands(dtype):
        q, k, v, g = _arrays(dtype, *((2, *tokens, 1, d) for d in (64, 64, 128, 64)))
        state = _arrays(jnp.float32, *states)
        return q, k, v, as_jax(-np.abs(np.asarray(g, np.float32))), *state

    return operands


def _delta(tokens: tuple[int, ...], *states: tuple[int, ...]) -> Callable:
    def operands(dtype):
        shapes = *((2, *tokens, 1, 64),) * 2, (2, *tokens, 2, 128), *((2, *tokens, 2),) * 2
        q, k, v, g, beta = _arrays(dtype, *shapes)
        g, beta = (np.asarray(x, np.float32) for x in (g, beta))
        gates = as_jax(-np.abs(g)), as_jax(1 / (1 + np.exp(-beta)))
        return q, as_jax(np.asarray(k) / 8, dtype), v, *gates, *_arrays(jnp.float32, *states)

    return operands


def _gla_op(*operands, implementation):
    return ops.gla(*operands, chunk=8, implementation=implementation)


CASES = {
    "rms_norm": Case(
        lambda x, w, implementation: ops.rms_norm(x, w, 1e-5, implementation=implementation),
        lambda dtype: _arrays(dtype, (4, 64), (64,)),
        (True, False),
    ),
    "rms_norm-residual": Case(
        lambda x, r, w, implementation: ops.rms_norm(
            x, w, 1e-5, residual=r, implementation=implementation
        ),
        lambda dtype: _arrays(dtype, (4, 64), (4, 64), (64,)),
        (True, True, False),
    ),
    "rms_norm-int8": Case(
        lambda x, w, implementation: ops.rms_norm(
            x, w, 1e-5, quantize="int8", implementation=implementation
        ),
        lambda dtype: _arrays(dtype, (4, 64), (64,)),
        (True, False),
        smooth=False,
    ),
    "swiglu": Case(ops.swiglu, lambda dtype: _arrays(dtype, (4, 64)), (True,)),
    "swiglu-int8": Case(
        functools.partial(ops.swiglu, quantize="int8"),
        lambda dtype: _arrays(dtype, (4, 128)),
        (True,),
        smooth=False,
    ),
    "quantize_tokens": Case(
        ops.quantize_tokens, lambda dtype: _arrays(dtype, (4, 64)), (True,), smooth=False
    ),
    "matmul-int8": _matmul("int8"),
    "matmul-int4-zeros": _matmul("int4", zeros=True),
    "matmul-w8a8": Case(
        functools.partial(ops.quantized_matmul, out_dtype=jnp.float32),
        _pair,
        (True, False),
        quantized_matmul_reference,
    ),
    "matmul-w4a8": Case(  # its kernel writes 16-bit floats
        lambda x, w, implementation: ops.quantized_matmul(
            x,
            w,
            implementation=implementation,
            out_dtype=jnp.bfloat16 if implementation == "mosaic" else jnp.float32,
        ),
        _int4_pair,
        (True, False),
        quantized_matmul_reference,
    ),
    "matmul-fp8-groups": Case(
        functools.partial(ops.quantized_matmul, out_dtype=jnp.float32),
        _fp8_groups,
        (True, False),
        quantized_matmul_reference,
    ),
    "matmul-fused": Case(
        lambda x, w, gamma, residual, implementation: ops.quantized_matmul(
            x, w, norm=(gamma, 1e-5), residual=residual, implementation=implementation
        ),
        lambda dtype: (
            *_arrays(dtype, (4, 512)),
            _weight("int8", k=512),
            *_arrays(dtype, (512,), (4, 16)),
        ),
        (True, False, False, True),
    ),
    "decode_attention": _attention(),
    "decode_attention-int4": _attention("int4"),
    "decode_attention-pages": _pages(),
    "rope_and_write": _rope(ops.rope_and_write),
    "rope_and_write-int8": _rope(ops.rope_and_write, "int8"),
    "rope_and_attend": _rope(ops.rope_and_attend),
    "gated_delta": Case(ops.gated_delta, _delta((16,)), (True,) * 5),
    "gated_delta_step": Case(ops.gated_delta_step, _delta((), (2, 2, 64, 128)), (True,) * 6),
    "grouped_matmul": _grouped(),
    "gla": Case(_gla_op, _gla((16,)), (True,) * 4),
    "gla_step": Case(ops.gla_step, _gla((), (2, 1, 64, 128)), (True,) * 5),
}
# Ops that stand above in another scheme, or as a part of another op: with `-m slow`.
SCHEMES = ("rms_norm-int8", "matmul-int8", "decode_attention-int4", "rope_and_write-int8")
PARTS = (
    "rms_norm",
    "decode_attention-pages",
    "rope_and_write",
    "swiglu",
    "matmul-w8a8",
    "gla_step",
    "gated_delta",
    "swiglu-int8",
)


def each(names: Iterable[str], slow: tuple[str, ...] = SCHEMES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(x, marks=pytest.mark.slow if x in slow else ()) for x in names]
    )


every = each(CASES, SCHEMES + PARTS)


def _xla(name: str) -> tuple[Callable, tuple]:
    case = CASES[name]
    return functools.partial(case.f, implementation="xla"), tuple(case.operands(jnp.float32))


def _moving(tree: Any) -> list[bool]:
    """Which leaves have a derivative: floats that are no words."""
    return [
        jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1
        for x in jax.tree.leaves(tree)
    ]


def _floats(f: Callable, operands: tuple) -> tuple[Callable, list]:
    """f as a function of its float operands alone, to a list of its float results."""
    leaves, tree = jax.tree.flatten(operands)
    moves = _moving(operands)

    def g(*floats):
        given = iter(floats)
        each = [next(given) if m else x for x, m in zip(leaves, moves, strict=True)]
        out = jax.tree.leaves(f(*tree.unflatten(each)))
        return [y for y in out if jnp.issubdtype(y.dtype, jnp.floating)]

    return g, [x for x, m in zip(leaves, moves, strict=True) if m]


def _value_and_gradients(f: Callable, *operands: Any) -> tuple:
    g, floats = _floats(f, operands)
    out, back = jax.vjp(g, *floats)
    return out, back([jnp.ones_like(y) for y in out])


def _close(a: Any, b: Any, tolerance: float = 2e-4) -> None:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=tolerance * max(1.0, np.abs(y).max()), rtol=0)


@every
def test_vmap_export_and_shard_map(name: str) -> None:
    """Each element under vmap is what the exported program gives for it alone.  vmap of one operand
    and shard_map are traced; their values are jax's."""
    f, operands = _xla(name)
    pairs = jax.tree.map(lambda x: np.stack([np.asarray(x), np.flip(np.asarray(x), 0)]), operands)
    alone = jax.jit(export.export(jax.jit(f))(*operands).call)
    each = [alone(*jax.tree.map(lambda x, i=i: x[i], pairs)) for i in range(2)]
    got = jax.jit(jax.vmap(f))(*pairs)
    _close(got, jax.tree.map(lambda *y: np.stack(y), *each))
    leaves, tree = jax.tree.flatten(operands)
    for i, pair in enumerate(jax.tree.leaves(pairs)):

        def instead(x, i=i):
            return f(*tree.unflatten([*leaves[:i], x, *leaves[i + 1 :]]))

        mapped = jax.eval_shape(jax.vmap(instead), pair)
        assert jax.tree.map(jnp.shape, mapped) == jax.tree.map(jnp.shape, got)
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = _specs(CASES[name])
    placed = tuple(_auto(mesh, spec, x) for spec, x in zip(specs, operands, strict=True))
    for check in (True, False):
        divided = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check)
        jax.eval_shape(functools.partial(_value_and_gradients, divided), *placed)


@every
def test_derivatives(name: str) -> None:
    """Both modes agree with each other, and with differences where the op is smooth; so does the
    derivative of the gradient, all of them under vmap.  Gradients are the reference's."""
    f, operands = _xla(name)
    case = CASES[name]
    g, floats = _floats(f, operands)
    rng = np.random.default_rng(7)
    # Small beside the operand: scales are about 0.02.
    tangents = [
        (rng.standard_normal(x.shape) * np.sqrt(np.mean(np.square(x)))).astype(x.dtype)
        for x in map(np.asarray, floats)
    ]
    # The operands, and behind and ahead of them.
    steps = np.asarray([0.0, -1e-3, 1e-3])
    points = [
        np.stack([x + (step * t).astype(x.dtype) for step in steps])
        for x, t in zip(map(np.asarray, floats), tangents, strict=True)
    ]

    def loss(floats, g=g):
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in g(*floats))

    def along(floats):
        """The loss and its gradient times the tangents; and the gradient."""
        value, back = jax.value_and_grad(loss)(floats)
        slope = sum(jnp.vdot(x, y).astype(jnp.float32) for x, y in zip(back, tangents, strict=True))
        return (value, slope), back

    @jax.jit
    def run(points, floats):
        twice = jax.vmap(lambda x: jax.jvp(along, (x,), (tangents,), has_aux=True))(points)
        if case.reference is None:
            return twice, None, None
        want = jax.grad(loss)(floats, _floats(case.reference, operands)[0])
        return twice, jax.grad(loss)(floats), want

    found, back, want = jax.tree.map(np.asarray, run(points, floats))
    (value, slope), (forward, second), mapped = found
    assert all(np.isfinite(d).all() for d in mapped)
    if want is not None:
        _close([d[0] for d in mapped], back)
        _close(back, want, 1e-3)
    np.testing.assert_allclose(forward, slope, rtol=2e-3, atol=2e-3)
    if case.smooth:
        for derivative, (_, behind, ahead) in ((slope, value), (second, slope)):
            difference = (ahead - behind) / (steps[2] - steps[1])
            np.testing.assert_allclose(derivative[0], difference, rtol=0.03, atol=0.1)


def test_nothing_past_a_row_s_length_reaches_a_gradient() -> None:
    q, k, v, lengths = CASES["decode_attention"].operands(jnp.float32)
    past = (np.arange(128) >= np.asarray(lengths)[:, None])[:, :, None, None]
    lengths = as_jax([lengths[0], 0], jnp.int32)
    k, v = (np.where(past, np.float32(np.nan), np.asarray(x)) for x in (k, v))
    loss = lambda *x: jnp.sum(ops.decode_attention(*x, lengths) ** 2)  # noqa: E731
    for d in map(np.asarray, jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)):
        assert np.isfinite(d).all() and not d[1].any()


def _specs(case: Case) -> tuple:
    return tuple(P("x") if batched else P() for batched in case.batched)


def test_the_backward_of_a_weight_is_one_product_on_a_gpu() -> None:
    """With the dequantized weight, in x's dtype; it was 150 small ones in float32."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    w = jax.eval_shape(functools.partial(ops.quantize, group_size=128), shape((28672, 4096)))

    def back(x, w, dy):
        return jax.vjp(lambda x: ops.quantized_matmul(x, w, implementation="xla"), x)[1](dy)

    lowered = jax.jit(back).trace(shape((4096, 4096)), w, shape((4096, 28672)))
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    dx, dw = re.findall(r"stablehlo.dot_general.* : \((.*)\) ->", text)  # dw has no use
    assert dx == "tensor<4096x28672xbf16>, tensor<28672x4096xbf16>"
    assert dw == "tensor<4096x28672xbf16>, tensor<4096x4096xbf16>"


# --- on several devices: this file run as a program, with two ----------------------------------


@pytest.mark.slow
def test_several_devices() -> None:
    """shard_map (with and without its check of what varies), and jit of sharded operands."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_op_transformations", *CASES],
        env=environment(2),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == list(CASES)


def _on_two_devices(name: str) -> None:
    f, operands = _xla(name)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = _specs(CASES[name])
    placed = tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    )

    def all_of(*operands):
        results = []
        for form in (f, checked, unchecked):
            g, floats = _floats(form, operands)
            loss = lambda x, g=g: sum(jnp.sum(jnp.sin(y)) for y in g(*x))  # noqa: E731
            results.append((form(*operands), jax.grad(loss)(floats)))
        return results

    checked, unchecked = (
        jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check)
        for check in (True, False)
    )
    plain, *divided = jax.jit(all_of)(*placed)
    _close(divided, 2 * [plain])


# --- a kernel in its place -----------------------------------------------------------------------


def _toy(static, x, w):
    return {"y": jnp.sin(x) * w * static}, w


def _toy_kernel(static, x, w):
    return {"y": jnp.sin(x) * w * static + 1.0}, w  # to be told from the XLA form


TOY = transform.Op("toy", _toy, _toy_kernel)
NAMED, CHOSEN = transform.OpChoice("mosaic", named=True), transform.OpChoice("mosaic")


@pytest.mark.core
def test_the_kernel_runs_and_the_xla_form_is_differentiated() -> None:
    x, w = _arrays(jnp.float32, (3, 4), (4,))
    toy = lambda x, w: TOY(NAMED, 2.0, x, w)[0]["y"]  # noqa: E731
    plain = lambda x, w: _toy(2.0, x, w)[0]["y"] + 1  # noqa: E731

    def rules(f):
        """What jax may ask of a function."""

        @jax.jit
        def run(x, w):
            twice_x, twice_w = jnp.stack([x, 2 * x]), jnp.stack([w, 2 * w])
            mapped = (
                jax.vmap(f, (0, None))(twice_x, w),
                jax.vmap(f, (None, 0))(x, twice_w),
                jax.vmap(f)(twice_x, twice_w),
            )
            forward = jax.jvp(f, (x, w), (jnp.cos(x), jnp.cos(w)))
            second = jax.hessian(lambda x: jnp.sum(f(x, w) ** 3))(x)
            return f(x, w), mapped, forward, jax.jacrev(f, (0, 1))(x, w), second

        return run(x, w)

    want = rules(plain)
    _close(rules(toy), want)
    # Without a jit around it.
    _close(toy(x, w), want[0])
    _close(jax.jvp(toy, (x, w), (jnp.cos(x), jnp.cos(w))), want[2])
    # Elsewhere than on CUDA, what was not asked for by name is the XLA form.
    _close(TOY(CHOSEN, 2.0, x, w), _toy(2.0, x, w))


def test_a_kernel_without_an_xla_form_names_what_it_lacks() -> None:
    only = transform.Op("only", None, lambda static, x: x * static)
    with pytest.raises(NotImplementedError, match="only: jvp and grad"):
        jax.grad(lambda x: jnp.sum(only(NAMED, 2.0, x)))(jnp.ones(3))
    with pytest.raises(ValueError, match="only: no Mosaic kernel for cpu"):
        jax.jit(lambda x: only(CHOSEN, 2.0, x))(jnp.ones(3))


def _cuda(f: Callable, *operands) -> int:
    """How many kernels f lowers to."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu")


def _auto(mesh: AbstractMesh, spec: P, x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), x
    )


@pytest.mark.core
def test_sharded_operands_are_partitioned_or_refused() -> None:
    """Never handed to a kernel, for which XLA would gather them."""
    x, w = _arrays(jnp.float32, (8, 4), (4,))
    one = functools.partial(TOY, CHOSEN, 2.0)
    named = functools.partial(TOY, NAMED, 2.0)
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    operands = _auto(mesh, P("x"), x), _auto(mesh, P(), w)
    text = jax.jit(one).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    kernel = jax.jit(one).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert kernel.count("stablehlo.add") == 1 and "stablehlo.add" not in text
    with pytest.raises(ValueError, match="toy: .*several devices.*shard_map"):
        jax.jit(named).trace(*operands).lower(lowering_platforms=("cuda",))
    manual = jax.shard_map(named, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    text = jax.jit(manual).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.add" in text
    square = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    half = jax.shard_map(
        named, mesh=square, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"}
    )
    operands = _auto(square, P("x"), x), _auto(square, P(), w)
    with pytest.raises(ValueError, match="toy: .*several devices"):
        jax.jit(half).trace(*operands).lower(lowering_platforms=("cuda",))
    explicit = AbstractMesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(explicit):
        operands = _auto(explicit, P("x"), x), _auto(explicit, P(), w)
        jax.eval_shape(one, *operands)
        with pytest.raises(ValueError, match="toy: .*explicit axes.*shard_map"):
            jax.eval_shape(named, *operands)


def test_export_refuses_a_named_kernel() -> None:
    x, w = _arrays(jnp.float32, (8, 4), (4,))
    with pytest.raises(ValueError, match="toy: .*jax.export.*implementation"):
        export.export(jax.jit(functools.partial(TOY, NAMED, 2.0)), platforms=("cuda",))(x, w)
    export.export(jax.jit(functools.partial(TOY, CHOSEN, 2.0)), platforms=("cuda",))(x, w)


# --- the kernels themselves ----------------------------------------------------------------------

# XLA's fusion is all there is to swiglu; products with experts have a test of their own.
KERNELS = [n for n in CASES if n not in ("swiglu", "grouped_matmul")]


def _mosaic(name: str) -> tuple[Callable, tuple]:
    case = CASES[name]
    return functools.partial(case.f, implementation="mosaic"), tuple(case.operands(jnp.bfloat16))


@newest
@each(KERNELS)
def test_kernels_lower_under_every_transformation(name: str) -> None:
    """Kernels are lowered under vmap, and with their gradients under shard_map.  The other rules
    are followed without lowering the kernel again."""
    f, operands = _mosaic(name)
    assert _cuda(jax.vmap(f), *jax.tree.map(lambda x: x[None], operands))
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = _specs(CASES[name])
    placed = [_auto(mesh, spec, x) for spec, x in zip(specs, operands, strict=True)]
    sharded, unchecked = (
        jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check)
        for check in (True, False)
    )

    assert _cuda(functools.partial(_value_and_gradients, sharded), *placed)
    jax.eval_shape(unchecked, *placed)
    g, floats = _floats(functools.partial(_value_and_gradients, f), operands)
    jax.eval_shape(lambda *x: jax.jvp(g, x, x), *floats)
    with pytest.raises(ValueError, match=r"several devices.*shard_map"):
        _cuda(f, *placed)


@newest
def test_kernels_lower_under_x64() -> None:
    """Of many rows, of pairs, and of gradients: their indices are int32."""
    bf16, f32 = (functools.partial(jax.ShapeDtypeStruct, dtype=d) for d in ("bfloat16", "float32"))
    words = jax.jit(functools.partial(ops.quantize, dtype="int4", group_size=128))
    w, experts = (jax.eval_shape(words, f32(s)) for s in ((256, 256), (4, 256, 256)))
    heads, gates = bf16((1, 64, 2, 128)), (f32((1, 64, 2, 128)), f32((1, 64, 2)))
    with jax.enable_x64(True):
        assert _cuda(
            functools.partial(ops.quantized_matmul, implementation="mosaic"), bf16((64, 256)), w
        )
        chosen = jax.ShapeDtypeStruct((64, 4), jnp.int32)
        pairs = functools.partial(ops.grouped_matmul, gated="silu", implementation="mosaic")
        assert _cuda(pairs, bf16((64, 256)), experts, chosen)

        def loss(*x):
            return jnp.sum(ops.gated_delta(*x, implementation="mosaic")[0].astype(jnp.float32))

        assert _cuda(jax.grad(loss, (0, 1, 2, 3, 4)), heads, heads, heads, *gates)


@pytest.mark.gpu
@each(KERNELS)
def test_kernels_derivatives_are_the_xla_forms(name: str) -> None:
    f, operands = _mosaic(name)
    xla = functools.partial(CASES[name].f, implementation="xla")
    results = []
    for form in (f, xla):
        g, floats = _floats(form, operands)

        def both(*floats, g=g):
            out, back = jax.vjp(g, *floats)
            return back([jnp.ones_like(y) for y in out]), jax.jvp(g, floats, floats)[1]

        results.append(jax.jit(both)(*floats))
    _close(*results, 3e-2)


if __name__ == "__main__":
    warnings.simplefilter("error")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    for case in sys.argv[1:]:
        _on_two_devices(case)
    print(json.dumps(sys.argv[1:]))


def test_a_form_for_an_accelerator_is_traced_only_when_it_is_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, find = [], weight_only._form
    monkeypatch.setattr(weight_only, "_form", lambda *call: asked.append(call) or find(*call))
    w = ops.quantize(jnp.ones((64, 128)), "int4", group_size=32)
    f = jax.jit(lambda x, w: ops.quantized_matmul(x, w, implementation="xla"))
    traced = f.trace(jnp.ones((3, 128)), w)
    traced.lower(lowering_platforms=("cpu",))
    assert not asked
    assert "optimization_barrier" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert [call[1] for call in asked] == [(3, 128)]


def test_late_is_its_function_under_jaxs_transformations() -> None:
    x = jnp.arange(1.0, 7.0).reshape(2, 3)
    run = lambda x: late(jnp.square, jax.ShapeDtypeStruct(x.shape, x.dtype), x)  # noqa: E731
    for f in (run, jax.jit(run), jax.vmap(run)):
        np.testing.assert_array_equal(f(x), jnp.square(x))
    np.testing.assert_array_equal(jax.grad(lambda x: run(x).sum())(x), 2 * x)
    np.testing.assert_array_equal(jax.jvp(run, (x,), (x,))[1], 2 * x * x)
    second = jax.grad(lambda x: jax.grad(lambda y: run(y).sum())(x).sum())(x)
    np.testing.assert_array_equal(second, jnp.full_like(x, 2.0))
