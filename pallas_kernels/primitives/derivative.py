"""``linear_p``: a derivative of an op, as a linear function of tangents that knows its transpose.
``late``: a function that is traced when it is lowered.

``transform.Op`` binds it in its rule of jvp.  ``Derivative`` says which form is differentiated, or
transposed by the op's own ``backward``; under vmap it is mapped over the leading axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from pallas_kernels.jax_internals import Primitive
from pallas_kernels.operands import TreeDef

if TYPE_CHECKING:
    from jax.core import ShapedArray

Leaves = Sequence[jax.Array]
_Dims = Sequence[int | None]  # of the mapped axes
_Types = tuple["ShapedArray", ...]


def is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_codes(x: jax.Array) -> bool:
    return not is_float(x) or x.dtype.itemsize == 1


class LinearFunction(Protocol):
    """A function of (what was kept, linear operands), hashable. ``transform.Derivative`` is one."""

    def __call__(self, *args: jax.Array) -> list[jax.Array]: ...

    def smoothed(self) -> LinearFunction:
        """Return the same function in jax.numpy alone, for the derivative of a derivative."""
        ...


@dataclasses.dataclass(frozen=True)
class _Late:
    """The function of ``late``, on the leaves of its operands."""

    form: Callable[..., jax.Array]
    tree: TreeDef

    def __call__(self, *leaves: jax.Array) -> list[jax.Array]:
        return [self.form(*self.tree.unflatten(leaves))]

    def smoothed(self) -> _Late:
        return self


def late(form: Callable[..., jax.Array], out: jax.ShapeDtypeStruct, *operands: object) -> jax.Array:
    """Return ``form(*operands)``, of which nothing is traced until it is lowered or differentiated.

    It serves a branch of ``lax.platform_dependent``, which would trace the branches of all
    platforms.  out: shape and dtype of the result.  form: hashable, such as a plain function.
    """
    leaves, tree = jax.tree.flatten(operands)
    f, kind = _Late(form, tree), jax.typeof(leaves[0])
    sharding = kind.sharding.update(spec=PartitionSpec(*(None,) * len(out.shape)))
    types = (kind.update(shape=out.shape, dtype=out.dtype, weak_type=False, sharding=sharding),)
    return linear_p.bind(*leaves, n_kept=len(leaves), f=f, transpose=f, out_types=types)[0]


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A derivative under vmap, mapped over the leading axes."""

    f: LinearFunction
    axes: tuple[int | None, ...]

    def __call__(self, *args: jax.Array) -> list[jax.Array]:
        return jax.vmap(self.f, in_axes=self.axes)(*args)

    def smoothed(self) -> _Mapped:
        return dataclasses.replace(self, f=self.f.smoothed())


linear_p = Primitive("linear_derivative")
linear_p.multiple_results = True


@linear_p.def_impl
def _linear_impl(*args: jax.Array, f: LinearFunction, **_: object) -> list[jax.Array]:
    return _run(f, *args)


@functools.partial(jax.jit, static_argnums=0)
def _run(f: LinearFunction, *args: jax.Array) -> list[jax.Array]:
    return f(*args)


@linear_p.def_abstract_eval
def _linear_types(*args: object, out_types: _Types, **_: object) -> list[ShapedArray]:
    return list(out_types)


def _linear_jvp(
    primals: Leaves,
    tangents: Sequence[jax.Array | ad.Zero],
    *,
    f: LinearFunction,
    n_kept: int,
    **params: object,
) -> tuple[list[jax.Array], list[jax.Array]]:
    bind = functools.partial(linear_p.bind, f=f, n_kept=n_kept, **params)
    out = bind(*primals)
    moves = [
        not (isinstance(t, ad.Zero) or is_codes(x)) for x, t in zip(primals, tangents, strict=True)
    ]
    if not any(moves[:n_kept]):
        return out, bind(*primals[:n_kept], *map(ad.instantiate_zeros, tangents[n_kept:]))

    def form(*moving: jax.Array) -> list[jax.Array]:
        each = iter(moving)
        return f.smoothed()(*(next(each) if m else x for x, m in zip(primals, moves, strict=True)))

    moving = [(x, t) for x, t, m in zip(primals, tangents, moves, strict=True) if m]
    at, along = zip(*moving, strict=True)
    return out, jax.jvp(form, at, along)[1]


def _linear_transpose(
    d_outs: Sequence[jax.Array | ad.Zero],
    *args: jax.Array | ad.UndefinedPrimal,
    f: LinearFunction,
    transpose: LinearFunction,
    n_kept: int,
    out_types: _Types,
) -> list[jax.Array | None]:
    kept, linear = args[:n_kept], args[n_kept:]
    back = linear_p.bind(
        *kept,
        *map(ad.instantiate_zeros, d_outs),
        n_kept=n_kept,
        f=transpose,
        transpose=f,
        out_types=tuple(x.aval for x in linear),
    )
    return [None] * n_kept + back


def _linear_batching(
    args: Leaves,
    dims: _Dims,
    *,
    f: LinearFunction,
    transpose: LinearFunction,
    n_kept: int,
    out_types: _Types,
) -> tuple[list[jax.Array], list[int]]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    linear = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else x
        for x, d in zip(args[n_kept:], dims[n_kept:], strict=True)
    ]
    kept_axes = tuple(None if d is None else 0 for d in dims[:n_kept])
    outs = linear_p.bind(
        *args[:n_kept],
        *linear,
        n_kept=n_kept,
        f=_Mapped(f, (*kept_axes, *(0 for _ in linear))),
        transpose=_Mapped(transpose, (*kept_axes, *(0 for _ in out_types))),
        out_types=tuple(_mapped_type(t, size) for t in out_types),
    )
    return outs, [0] * len(outs)


def _mapped_type(t: ShapedArray, size: int) -> ShapedArray:
    spec = PartitionSpec(None, *t.sharding.spec)
    return t.update(shape=(size, *t.shape), sharding=t.sharding.update(spec=spec))


ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
batching.primitive_batchers[linear_p] = _linear_batching
mlir.register_lowering(
    linear_p,
    mlir.lower_fun(lambda *args, f, **_: f(*args), multiple_results=True),
)
