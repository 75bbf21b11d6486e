"""How an op with a kernel behaves under jax's transformations: one mechanism for all ops and both
kinds of kernels. These are Mosaic's on a GPU and the generated handlers on a CPU.

An ``Op`` is a form in plain jax.numpy beside a kernel that computes the same.  ``kernel_p`` is the
launch of the kernel, ``linear_p`` a derivative:

    jit        runs the kernel on a single device or inside a ``jax.shard_map`` over all axes.  XLA
               cannot partition a kernel and would gather its operands.  The XLA form therefore
               replaces it under a ``jit`` over several devices and for another platform.
               ``jax.export`` uses the XLA form too, since a kernel has no stable exported form.
               In these places a caller that named the kernel gets an error.
    jvp, grad  are those of the XLA form, at any order, or the op's own ``backward``.  Only operands
               are kept between the passes; the rest is computed again.  Codes (integers and 8-bit
               floats) have no derivative.
    vmap       the kernel once for each element.

Source: jax's custom_jvp and linear_call, of which the latter takes neither vmap nor a second
derivative.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from pallas_kernels.dispatch import KERNELS, Implementation, Plan, kind_of
from pallas_kernels.jax_internals import Primitive, get_opaque_trace_state, jaxpr_as_fun
from pallas_kernels.operands import TreeDef
from pallas_kernels.primitives.derivative import is_codes, is_float, linear_p

if TYPE_CHECKING:
    from jax.core import ShapedArray
    from jax.extend.core import ClosedJaxpr

    from pallas_kernels.jax_internals import Value

Leaves = Sequence[jax.Array]
_Tree = TypeVar("_Tree")
# The results of an op, a pytree.
Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


@dataclasses.dataclass(frozen=True)
class OpChoice:
    """The implementation that ``dispatch`` chose, and whether the caller had named it."""

    implementation: Implementation
    named: bool = False


XLA = OpChoice("xla")


def chosen(plan: Plan | None, implementation: Implementation | None) -> OpChoice:
    """Return the choice that ``dispatch.choose_plan``'s plan is; None is XLA's form."""
    return OpChoice(kind_of(plan), implementation is not None)


@dataclasses.dataclass(frozen=True, eq=False)
class Op(Generic[Out_co]):
    """``op(choice, static, *operands)``: operands are pytrees of arrays, static is hashable.

    xla, kernel: the two forms, ``f(static, *operands)``.  An op without an XLA form has no
        derivative and runs on single devices only.
    derivative: the form that is differentiated, by default ``xla``.
    at: ``at(static, operands, out)`` are operands of equal derivatives that cost less to keep.
    backward: ``backward(choice, static, operands, saved, *d_outs)`` -> a cotangent for each
        operand, None for codes; by default the transpose of ``derivative``.
    forward: ``forward(choice, static, *operands)`` -> (out, what ``backward`` finds in ``saved``).
    """

    name: str
    xla: Callable[..., Out_co] | None
    kernel: Callable[..., Out_co] | None = None
    derivative: Callable[..., Out_co] | None = None
    at: Callable[..., tuple[object, ...]] | None = None
    backward: Callable[..., tuple[object, ...]] | None = None
    forward: Callable[..., tuple[Out_co, object]] | None = None

    def __call__(self, choice: OpChoice, static: Hashable, *operands: object) -> Out_co:
        leaves, tree = jax.tree.flatten(operands)
        leaves = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in leaves]
        if choice.implementation != "xla" and any(map(_is_explicitly_sharded, leaves)):
            choice = self.unsharded(choice)
        return _apply(OpCall(self, choice, static, tree), *equally_varying(leaves))

    def unsharded(self, choice: OpChoice) -> OpChoice:
        """Return the choice for operands over explicit axes, which no kernel takes.

        Raises ValueError if the caller named the kernel, or the op has no other form.
        """
        if choice.named or self.xla is None:
            raise ValueError(self.no_kernel(choice, "for operands sharded over explicit axes"))
        return XLA

    def no_kernel(
        self, choice: OpChoice, where: str, instead: str = "call it inside jax.shard_map"
    ) -> str:
        if self.xla is not None:
            instead += ', or with implementation="xla"'
        return f"{self.name}: no {KERNELS[choice.implementation]} {where}; {instead}"


@dataclasses.dataclass(frozen=True)
class OpCall(Generic[Out_co]):
    op: Op[Out_co]
    choice: OpChoice
    static: Hashable
    tree: TreeDef  # of the operands

    def run(self, form: Callable[..., Out], leaves: Leaves) -> Out:
        return form(self.static, *jax.tree.unflatten(self.tree, leaves))


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of an op's call, as a function.

    It takes (operands, saved, tangents of the operands that move) and returns the tangents of the
    float results.  Transposed, it returns the cotangents of the operands that move.
    """

    call: OpCall[object]
    moves: tuple[bool, ...]
    saved: TreeDef
    transposed: bool = False
    smooth: bool = False  # uses only jax.numpy, for the derivative of a derivative

    def __call__(self, *args: jax.Array) -> list[jax.Array]:
        op, call, n = self.call.op, self.call, len(self.moves)
        primals, n_kept = args[:n], n + self.saved.num_leaves
        saved, moved = args[n:n_kept], args[n_kept:]
        if self.transposed and op.backward is not None and not self.smooth:
            operands = jax.tree.unflatten(call.tree, primals)
            saved = jax.tree.unflatten(self.saved, saved)
            back = op.backward(call.choice, call.static, operands, saved, *moved)
            back = call.tree.flatten_up_to(back)
            return [d for d, m in zip(back, self.moves, strict=True) if m]
        differentiated = op.derivative or op.xla
        assert differentiated is not None
        moving = [x for x, m in zip(primals, self.moves, strict=True) if m]

        def form(*moving: jax.Array) -> list[jax.Array]:
            each = iter(moving)
            leaves = [next(each) if m else x for x, m in zip(primals, self.moves, strict=True)]
            outs = jax.tree.leaves(call.run(differentiated, leaves))
            return [x for x in outs if is_float(x)]

        if self.transposed:
            return list(jax.vjp(form, *moving)[1](list(moved)))
        return jax.jvp(form, tuple(moving), moved)[1]

    def smoothed(self) -> Derivative:
        return dataclasses.replace(self, smooth=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _apply(call: OpCall[Out], *leaves: jax.Array) -> Out:
    if call.choice.implementation != "xla":
        return _launch(call, leaves)
    assert call.op.xla is not None
    return call.op.xla(call.static, *call.tree.unflatten(leaves))


def _launch(call: OpCall[Out], leaves: Leaves) -> Out:
    """Trace the kernel as if on one device; its results vary over the axes that operands do.

    Its indices are int32 under ``jax_enable_x64`` too.
    """
    assert call.op.kernel is not None
    shapes = call.tree.unflatten(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    kernel = functools.partial(call.op.kernel, call.static)
    with jax.enable_x64(False):
        jaxpr, out = jax.make_jaxpr(kernel, return_shape=True)(*shapes)
    return jax.tree.structure(out).unflatten(kernel_p.bind(*leaves, jaxpr=jaxpr, call=call))


@functools.partial(_apply.defjvp, symbolic_zeros=True)
def _apply_jvp(
    call: OpCall[Out], primals: Leaves, tangents: Sequence[jax.Array | SymbolicZero]
) -> tuple[Out, object]:
    op, saved = call.op, ()
    if op.xla is None:
        raise NotImplementedError(
            f"{op.name}: jvp and grad have no rule for this kernel; differentiate the parts of it"
        )
    if op.forward is None:
        out = _apply(call, *primals)
    else:
        operands = jax.tree.unflatten(call.tree, primals)
        out, saved = op.forward(call.choice, call.static, *operands)
    moves = tuple(
        not (isinstance(t, SymbolicZero) or is_codes(x))
        for x, t in zip(primals, tangents, strict=True)
    )
    outs, out_tree = jax.tree.flatten(out)
    d_floats = []
    if any(moves):
        moving = [t for t, m in zip(tangents, moves, strict=True) if m]
        if op.at is not None:
            operands = jax.tree.unflatten(call.tree, primals)
            primals = jax.tree.leaves(op.at(call.static, operands, out))
        kept = [*primals, *jax.tree.leaves(saved)]
        f = Derivative(call, moves, jax.tree.structure(saved))
        d_floats = linear_p.bind(
            *kept,
            *moving,
            n_kept=len(kept),
            f=f,
            transpose=dataclasses.replace(f, transposed=True),
            out_types=tuple(jax.typeof(x) for x in outs if is_float(x)),
        )
    d_floats = iter(d_floats)
    d_outs = [
        next(d_floats)
        if any(moves) and is_float(x)
        else SymbolicZero(jax.typeof(x).to_tangent_aval())
        for x in outs
    ]
    return out, jax.tree.unflatten(out_tree, d_outs)


def equally_varying(tree: _Tree) -> _Tree:
    """Make all arrays vary over the same axes, as a ``shard_map`` that checks it wants them.

    An op's operands need it, and the initial carry of a loop.  It stands outside of the derivative,
    where jax sums the gradient of one that did not vary.  Leaves that are no arrays stay.
    """
    # Nothing varies outside of a shard_map.
    return _cast_to_vary(tree) if jax.sharding.get_abstract_mesh().manual_axes else tree


def _cast_to_vary(tree: _Tree) -> _Tree:
    leaves, structure = jax.tree.flatten(tree)
    own = {
        at: jax.typeof(x).manual_axis_type.varying
        for at, x in enumerate(leaves)
        if isinstance(x, jax.Array | np.ndarray)
    }
    union = frozenset[Hashable]().union(*own.values())
    for at, axes in own.items():
        if missing := tuple(union - axes):
            leaves[at] = jax.lax.pcast(leaves[at], missing, to="varying")
    return jax.tree.unflatten(structure, leaves)


def is_traced() -> bool:
    """Return whether the caller is inside of a trace, such as that of ``jit`` or ``vmap``.

    Comparing jax's states is one check. Looking for tracers among parameters takes hundreds.
    """
    return get_opaque_trace_state() != _untraced()


@functools.cache
def _untraced() -> object:
    """Return jax's state outside of any trace, which a new thread has."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(get_opaque_trace_state).result()


def _is_explicitly_sharded(x: jax.Array) -> bool:
    # The type of an array names the explicit axes of its mesh, and no others.
    return any(axis is not None for axis in jax.typeof(x).sharding.spec)


# --- kernel_p: the launch of a kernel ------------------------------------------------------------

_Dims = Sequence[int | None]  # of the mapped axes
kernel_p = Primitive("kernel")
_PLATFORMS = {"mosaic": ("cuda", "a Hopper GPU"), "cpu": ("cpu", "a CPU")}
kernel_p.multiple_results = True


@kernel_p.def_impl
def _kernel_impl(*args: jax.Array, **params: object) -> list[jax.Array]:
    return jax.jit(functools.partial(kernel_p.bind, **params))(*args)


@kernel_p.def_abstract_eval
def _kernel_types(
    *args: ShapedArray, jaxpr: ClosedJaxpr, call: OpCall[object]
) -> list[ShapedArray]:
    return [_result_type(args[0], x) for x in jaxpr.out_avals]


def _result_type(operand: ShapedArray, x: ShapedArray) -> ShapedArray:
    """Return the type of a result: on the operand's mesh, and varying as all operands do."""
    sharding = operand.sharding.update(spec=PartitionSpec(*(None,) * len(x.shape)))
    return operand.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=sharding)


def _kernel_batching(
    args: Leaves, dims: _Dims, **params: object
) -> tuple[list[jax.Array], list[int]]:
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def one(mapped: list[jax.Array]) -> list[jax.Array]:
        rest = iter(mapped)
        each = (x if d is None else next(rest) for x, d in zip(args, dims, strict=True))
        return kernel_p.bind(*each, **params)

    outs = jax.lax.map(one, mapped)
    return outs, [0] * len(outs)


def _kernel_lowering(
    ctx: mlir.LoweringRuleContext, *args: Value, jaxpr: ClosedJaxpr, call: OpCall[object]
) -> Sequence[Value | Sequence[Value]]:
    obstacle = _obstacle(call, ctx.module_context)
    if obstacle is not None:
        return _xla_lowering(ctx, args, call, obstacle)
    plain = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    emit = mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)
    if call.choice.implementation == "mosaic":
        from pallas_kernels.primitives.lowered import lowered

        return lowered(call.op.name, plain, args, jaxpr, emit)
    return emit(plain, *args)


def _obstacle(call: OpCall[object], module: mlir.ModuleContext) -> tuple[str, ...] | None:
    """Return why the kernel cannot be part of this module, and a remedy if it is an own one."""
    platform, device = _PLATFORMS[call.choice.implementation]
    if _partitions(module.axis_context) > 1:
        return ("under a jit over several devices, where XLA would gather operands",)
    if module.lowering_parameters.for_export:
        return "in jax.export, which has no stable form of it", "jit it where it runs"
    is_elsewhere = tuple(module.platforms) != (platform,) and not call.choice.named
    return (f"for {', '.join(module.platforms)}", f"run it on {device}") if is_elsewhere else None


def _xla_lowering(
    ctx: mlir.LoweringRuleContext,
    args: Sequence[Value],
    call: OpCall[object],
    obstacle: tuple[str, ...],
) -> Sequence[Value | Sequence[Value]]:
    """Lower the op's XLA form; ValueError if it has none, or the caller named the kernel."""
    xla = call.op.xla
    if call.choice.named or xla is None:
        raise ValueError(call.op.no_kernel(call.choice, *obstacle))
    form = lambda *leaves: jax.tree.leaves(call.run(xla, leaves))  # noqa: E731
    return mlir.lower_fun(form, multiple_results=True)(ctx, *args)


def _partitions(context: Any) -> int:
    """Return the number of devices over which XLA would partition code lowered in this context."""
    if hasattr(context, "manual_axes"):
        shape = dict(context.mesh.shape)
        return math.prod(n for axis, n in shape.items() if axis not in context.manual_axes)
    return getattr(context, "num_devices", 1)


batching.primitive_batchers[kernel_p] = _kernel_batching
mlir.register_lowering(kernel_p, _kernel_lowering)
