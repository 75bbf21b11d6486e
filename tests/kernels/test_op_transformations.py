"""Every public op under jit, vmap, grad, jvp, shard_map, export: the table in ``transform``.

Values are checked with the XLA form on a CPU; the mechanism that puts a kernel in its place, with a
kernel of plain jax.numpy; the kernels themselves by lowering for CUDA, and on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import pallas_kernels as ops
from pallas_kernels import dispatch, transform
from pallas_kernels.attention.op import decode_attention_reference
from pallas_kernels.attention.rope_cache import quantize_kv
from pallas_kernels.gated_delta.reference import gated_delta_recurrent
from pallas_kernels.gla.reference import gla_recurrent
from pallas_kernels.matmul.op import quantized_matmul_reference
from tests.helpers.compiling import environment

VERSION = tuple(int(v) for v in jax.__version__.split(".")[:3] if v.isdigit())
newest = pytest.mark.skipif(VERSION < (0, 11, 2), reason="Mosaic kernels need jax >= 0.11.2")
P = PartitionSpec


class Case(NamedTuple):
    """``f(*operands, implementation=...)``; operands are made in a dtype.  batched: which of them
    have the axis that shard_map divides first.  smooth: it has numerical derivatives."""

    f: Callable
    operands: Callable
    batched: tuple[bool, ...]
    reference: Callable | None = None
    smooth: bool = True


def _arrays(dtype, *shapes) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(len(shapes)), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def _weight(words: str, zeros: bool = False, n: int = 16, k: int = 64) -> ops.QTensor:
    (w,) = _arrays(jnp.float32, (n, k))
    return ops.quantize(w, words, group_size=32 if zeros else None, symmetric=not zeros)


def _matmul(words: str, zeros: bool = False) -> Case:
    def operands(dtype):  # more than one tile of rows
        return (*_arrays(dtype, (4, 64)), _weight(words, zeros, n=208))

    return Case(ops.quantized_matmul, operands, (True, False), quantized_matmul_reference)


def _pair(dtype):
    x, w = _arrays(jnp.float32, (4, 64), (16, 64))
    return ops.quantize(x), ops.quantize(w)


def _int4_pair(dtype):
    k = 2048 if dtype == jnp.bfloat16 else 256  # the kernel wants 16 groups
    x, w = _arrays(jnp.float32, (4, k), (16, k))
    return ops.quantize(x), ops.quantize(w, "int4", group_size=128, scale_dtype="int8")


def _cache(dtype, words: str | None):
    k, v = _arrays(dtype, (2, 128, 1, 64), (2, 128, 1, 64))
    if words is not None:
        k, v = quantize_kv(k, words), quantize_kv(v, words)
    return k, v


def _attention(words: str | None = None) -> Case:
    def operands(dtype):
        return (
            *_arrays(dtype, (2, 2, 64)),
            *_cache(dtype, words),
            jnp.asarray([128, 5], jnp.int32),
        )

    # float16 scales are too coarse for differences.
    smooth = words != "int4"
    return Case(ops.decode_attention, operands, (True,) * 4, decode_attention_reference, smooth)


def _pages() -> Case:
    def operands(dtype):
        lengths, table = jnp.asarray([128, 5], jnp.int32), jnp.asarray([[3, 0], [1, 2]], jnp.int32)
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
        angle = jnp.linspace(0.0, 3.0, 64, dtype=jnp.float32).reshape(2, 32)
        return (
            *_arrays(dtype, (2, 4, 64)),
            jnp.cos(angle),
            jnp.sin(angle),
            *_cache(dtype, words),
            jnp.asarray([127, 3], jnp.int32),
        )

    return Case(op, operands, (True,) * 6, smooth=words is None)


def _gla(tokens: tuple[int, ...], *states: tuple[int, ...]) -> Callable:
    def operands(dtype):
        q, k, v, g = _arrays(dtype, *((2, *tokens, 1, d) for d in (64, 64, 128, 64)))
        state = _arrays(jnp.float32, *states)
        return q, k, v, -jnp.abs(g.astype(jnp.float32)), *state

    return operands


def _delta(tokens: tuple[int, ...], *states: tuple[int, ...]) -> Callable:
    def operands(dtype):
        shapes = *((2, *tokens, 1, 64),) * 2, (2, *tokens, 2, 128), *((2, *tokens, 2),) * 2
        q, k, v, g, beta = _arrays(dtype, *shapes)
        gates = -jnp.abs(g.astype(jnp.float32)), jax.nn.sigmoid(beta.astype(jnp.float32))
        return q, k / 8, v, *gates, *_arrays(jnp.float32, *states)

    return operands


def _delta_reference(*operands):
    return gated_delta_recurrent(*operands)


def _gla_op(*operands, implementation):
    return ops.gla(*operands, chunk=8, implementation=implementation)


def _gla_reference(*operands):
    return gla_recurrent(*operands)


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
        ),  # fmt: skip
        _int4_pair,
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
    "gated_delta": Case(ops.gated_delta, _delta((16,)), (True,) * 5, _delta_reference),
    "gated_delta_step": Case(ops.gated_delta_step, _delta((), (2, 2, 64, 128)), (True,) * 6),
    "gla": Case(_gla_op, _gla((16,)), (True,) * 4, _gla_reference),
    "gla_step": Case(ops.gla_step, _gla((), (2, 1, 64, 128)), (True,) * 5),
}
# Ops that stand above in another scheme as well: with `-m slow`.
SCHEMES = ("rms_norm-int8", "matmul-int8", "decode_attention-int4", "rope_and_write-int8")
QUICK = [name for name in CASES if name not in SCHEMES]


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=slow if name in SCHEMES else ()) for name in names]
    )


every = each(CASES)


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


def _close(a: Any, b: Any, tolerance: float = 2e-4) -> None:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    for x, y in zip(a, b, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=tolerance * max(1.0, np.abs(y).max()), rtol=0)


@every
def test_vmap_over_each_operand(name: str) -> None:
    f, operands = _xla(name)
    leaves, tree = jax.tree.flatten(operands)
    pairs = [jnp.stack([leaf, jnp.flip(leaf, 0)]) for leaf in leaves]
    alone = jax.jit(lambda leaves: f(*tree.unflatten(leaves)))

    def instead(i):
        return lambda x: f(*tree.unflatten([*leaves[:i], x, *leaves[i + 1 :]]))

    mapped = jax.jit(lambda pairs: [jax.vmap(instead(i))(pair) for i, pair in enumerate(pairs)])
    for i, (got, pair) in enumerate(zip(mapped(pairs), pairs, strict=True)):
        each = [alone([*leaves[:i], x, *leaves[i + 1 :]]) for x in pair]
        _close(got, jax.tree.map(lambda *y: jnp.stack(y), *each))


@every
def test_derivatives(name: str) -> None:
    """Both modes agree with each other, and with differences where the op is smooth; so does the
    derivative of the gradient; under vmap too."""
    f, operands = _xla(name)
    g, floats = _floats(f, operands)
    keys = jax.random.split(jax.random.key(7), len(floats))
    tangents = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, floats, strict=True)]
    # Small beside the operand: scales are about 0.02.
    tangents = [
        t * jnp.sqrt(jnp.mean(jnp.square(x)).astype(x.dtype))
        for t, x in zip(tangents, floats, strict=True)
    ]

    def dot(a, b):
        return sum(jnp.vdot(x, y).astype(jnp.float32) for x, y in zip(a, b, strict=True))

    def loss(floats):
        return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in g(*floats))

    def along(floats):
        """The loss, and its gradient times the tangents."""
        value, back = jax.value_and_grad(loss)(floats)
        return value, dot(back, tangents), back

    @jax.jit
    def run(floats):
        value, slope, back = along(floats)
        forward = jax.jvp(loss, (floats,), (tangents,))[1]
        second = jax.jvp(lambda x: along(x)[:2], (floats,), (tangents,))[1]
        mapped = jax.vmap(lambda x: along(x)[2])([x[None] for x in floats])
        return value, slope, back, forward, second, mapped

    value, slope, back, forward, second, mapped = run(floats)
    assert all(bool(jnp.isfinite(d).all()) for d in back)
    np.testing.assert_allclose(forward, slope, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(second[0], slope, rtol=2e-3, atol=2e-3)
    _close(mapped, [d[None] for d in back])
    if CASES[name].smooth:
        step = 1e-3
        ahead, behind = (
            run([x + t * s for x, t in zip(floats, tangents, strict=True)])[:2]
            for s in (step, -step)
        )
        for derivative, a, b in zip((slope, second[1]), ahead, behind, strict=True):
            np.testing.assert_allclose(derivative, (a - b) / (2 * step), rtol=0.03, atol=0.1)


@each(n for n, case in CASES.items() if case.reference)
def test_gradients_are_the_references(name: str) -> None:
    f, operands = _xla(name)
    (g, floats), (want, _) = _floats(f, operands), _floats(CASES[name].reference, operands)
    loss = lambda g: lambda *x: sum(jnp.sum(jnp.sin(y)) for y in g(*x))  # noqa: E731
    every_one = tuple(range(len(floats)))
    _close(jax.grad(loss(g), every_one)(*floats), jax.grad(loss(want), every_one)(*floats), 1e-3)


def test_nothing_past_a_row_s_length_reaches_a_gradient() -> None:
    q, k, v, lengths = CASES["decode_attention"].operands(jnp.float32)
    past = (jnp.arange(128)[None, :] >= lengths[:, None])[:, :, None, None]
    lengths = lengths.at[1].set(0)
    k, v = (jnp.where(past, jnp.nan, x) for x in (k, v))
    loss = lambda *x: jnp.sum(ops.decode_attention(*x, lengths) ** 2)  # noqa: E731
    for d in jax.grad(loss, (0, 1, 2))(q, k, v):
        assert bool(jnp.isfinite(d).all()) and not bool(jnp.any(d[1]))


def _specs(case: Case) -> tuple:
    return tuple(P("x") if batched else P() for batched in case.batched)


@every
def test_export(name: str) -> None:
    from jax import export

    f, operands = _xla(name)
    exported = export.export(jax.jit(f))(*operands)
    _close(exported.call(*operands), f(*operands))


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


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(SCHEMES, marks=pytest.mark.slow)], ids=["quick", "schemes"]
)
def test_several_devices(names: list[str]) -> None:
    """shard_map (with and without its check of what varies), and jit of sharded operands."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_op_transformations", *names],
        env=environment(2), capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == list(names)


def _on_two_devices(name: str) -> None:
    f, operands = _xla(name)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = _specs(CASES[name])
    placed = tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    )

    def all_of(*forms):
        def run(*operands):
            results = []
            for form in forms:
                g, floats = _floats(form, operands)
                loss = lambda x, g=g: sum(jnp.sum(jnp.sin(y)) for y in g(*x))  # noqa: E731
                results.append((form(*operands), jax.grad(loss)(floats)))
            return results

        return jax.jit(run)

    checked, unchecked = (
        jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check)
        for check in (True, False)
    )
    want = all_of(f)(*operands)
    _close(all_of(f, checked, unchecked)(*placed), 3 * want)


# --- a kernel in its place -----------------------------------------------------------------------


def _toy(static, x, w):
    return {"y": jnp.sin(x) * w * static}, w


def _toy_kernel(static, x, w):
    return {"y": jnp.sin(x) * w * static + 1.0}, w  # to be told from the XLA form


TOY = transform.Op("toy", _toy, _toy_kernel)
NAMED, CHOSEN = transform.Choice("mosaic", named=True), transform.Choice("mosaic")


def test_the_kernel_runs_and_the_xla_form_is_differentiated() -> None:
    x, w = _arrays(jnp.float32, (3, 4), (4,))
    toy = lambda x, w: TOY(NAMED, 2.0, x, w)[0]["y"]  # noqa: E731
    plain = lambda x, w: _toy(2.0, x, w)[0]["y"]  # noqa: E731
    _close(toy(x, w), plain(x, w) + 1)
    _close(jax.jit(toy)(x, w), plain(x, w) + 1)
    for axes in ((0, None), (None, 0), (0, 0)):
        args = tuple(jnp.stack([a, 2 * a]) if n == 0 else a for a, n in zip((x, w), axes))  # noqa: B905
        _close(jax.vmap(toy, axes)(*args), jax.vmap(plain, axes)(*args) + 1)
    both = (x, w), (jnp.cos(x), jnp.cos(w))
    _close(jax.jvp(toy, *both)[1], jax.jvp(plain, *both)[1])
    _close(jax.jacrev(toy, (0, 1))(x, w), jax.jacrev(plain, (0, 1))(x, w))
    loss = lambda f: lambda x: jnp.sum(f(x, w) ** 3 - (3 * f(x, w) ** 2 if f is toy else 0))  # noqa: E731
    plus = lambda x: jnp.sum((plain(x, w) + 1) ** 3 - 3 * (plain(x, w) + 1) ** 2)  # noqa: E731
    _close(jax.hessian(loss(toy))(x), jax.hessian(plus)(x))
    # Elsewhere than on CUDA, what was not asked for by name is the XLA form.
    _close(TOY(CHOSEN, 2.0, x, w), _toy(2.0, x, w))


def test_a_kernel_without_an_xla_form_names_what_it_lacks() -> None:
    only = transform.Op("only", None, lambda static, x: x * static)
    with pytest.raises(NotImplementedError, match="only: jvp and grad"):
        jax.grad(lambda x: jnp.sum(only(NAMED, 2.0, x)))(jnp.ones(3))
    with pytest.raises(ValueError, match="only: no Mosaic kernel for cpu"):
        jax.jit(lambda x: only(CHOSEN, 2.0, x))(jnp.ones(3))


@contextlib.contextmanager
def _named_or_chosen(monkeypatch, named: bool) -> Iterator[str | None]:
    if not named:
        monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    yield "mosaic" if named else None


def _cuda(f: Callable, *operands) -> int:
    """How many kernels f lowers to."""
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu")


def _auto(mesh: AbstractMesh, spec: P, x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), x
    )


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
    from jax import export

    x, w = _arrays(jnp.float32, (8, 4), (4,))
    with pytest.raises(ValueError, match="toy: .*jax.export.*implementation"):
        export.export(jax.jit(functools.partial(TOY, NAMED, 2.0)), platforms=("cuda",))(x, w)
    export.export(jax.jit(functools.partial(TOY, CHOSEN, 2.0)), platforms=("cuda",))(x, w)


# --- the kernels themselves ----------------------------------------------------------------------

# XLA's fusion is all there is to swiglu.
KERNELS = [n for n in CASES if n != "swiglu"]


def _mosaic(name: str) -> tuple[Callable, tuple]:
    case = CASES[name]
    return functools.partial(case.f, implementation="mosaic"), tuple(case.operands(jnp.bfloat16))


@newest
@each(KERNELS)
def test_kernels_lower_under_every_transformation(name: str) -> None:
    f, operands = _mosaic(name)
    g, floats = _floats(f, operands)
    assert _cuda(f, *operands)
    assert _cuda(jax.vmap(f), *jax.tree.map(lambda x: x[None], operands))

    def value_and_gradients(*floats):
        out, back = jax.vjp(g, *floats)
        return out, back([jnp.ones_like(y) for y in out])

    assert _cuda(value_and_gradients, *floats)
    assert _cuda(lambda *x: jax.jvp(g, x, x), *floats)
    second = lambda *x: jax.jvp(lambda *x: value_and_gradients(*x)[1], x, x)  # noqa: E731
    _cuda(second, *floats)
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    specs = _specs(CASES[name])
    placed = [_auto(mesh, spec, x) for spec, x in zip(specs, operands, strict=True)]
    for check in (True, False):
        sharded = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check)
        assert _cuda(sharded, *placed)
    with pytest.raises(ValueError, match=r"several devices.*shard_map"):
        _cuda(f, *placed)


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
