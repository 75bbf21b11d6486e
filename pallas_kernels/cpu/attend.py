"""How the ops reach the CPU's two programs of attention: their plans, and their calls.

    plan(q, k, table)                     ``decode_attention``: one query token a row, or a few
    prompt_plan(q, k, table, softcap)     many query tokens a row
    new_token_plan(qkv, k, table)         ``rope_and_attend``: RoPE and the cache's write come first

    attend(q, k, v, lengths, ...)         the call with a plan of the first two
    rope_and_attend(qkv, ...)             the call with a plan of the third

``attention.Attend`` takes one query token at a time, ``prefill.Prefill`` tiles of them.  Both give
a query the same bits.  A plan depends on the cache's form, the number of query heads and which
operands there are, so all layers of a model share one.
"""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.operands import Cached, Entries, LatentCodes
from pallas_kernels.cpu import jit
from pallas_kernels.cpu.attention import Attend
from pallas_kernels.cpu.cache import LANES, form_of
from pallas_kernels.cpu.handler import CpuPlan
from pallas_kernels.cpu.prefill import Prefill
from pallas_kernels.cpu.scores import PART
from pallas_kernels.cpu.target import VARIABLE
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor

STACK = 1 << 18  # bytes that a program may take of a thread's stack
FEW_TOKENS = 8  # a row that ``Attend`` takes one by one
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_Stored = tuple[str, tuple[int, ...], int]  # a cache's dtype, (heads, width), scales of a head


class AttendPlan(CpuPlan):
    kernel = "attention_cpu"


class PrefillPlan(CpuPlan):
    kernel = "prefill_cpu"


_PLANS = {Attend: AttendPlan, Prefill: PrefillPlan}


def plan(q: jax.Array, k: Cached, table: jax.Array | None, sinks: bool = False) -> CpuPlan | Reason:
    """Return the plan of ``decode_attention``, or the reason why the handler does not run."""
    if q.dtype not in FLOATS:
        return Reason(f"q is {q.dtype.name}")
    return _plan(Attend, k, q.shape[-2], table, sinks=sinks)


def prompt_plan(
    q: jax.Array, k: Entries, table: jax.Array | None, softcap: float | None, sinks: bool = False
) -> CpuPlan | Reason:
    """Return the plan of ``attend`` for many query tokens a row, or the reason why it has none."""
    if q.dtype not in FLOATS:
        return Reason(f"q is {q.dtype.name}")
    if softcap is not None:
        return Reason("the handler does not cap scores")
    return _plan(Prefill, k, q.shape[-2], table, sinks=sinks)


def new_token_plan(
    qkv: jax.Array | jax.ShapeDtypeStruct,
    k: Entries,
    table: jax.Array | None,
    norm: bool = False,
    sinks: bool = False,
) -> CpuPlan | Reason:
    """Return the plan of ``rope_and_attend``, or why there is none.

    norm: with an RMSNorm of q's and k's heads before RoPE.  sinks: with a sink of each query head.
    """
    heads, width = qkv.shape[-2] - 2 * k.shape[2], qkv.shape[-1]
    if qkv.dtype != jnp.float32:
        return Reason(f"qkv is {qkv.dtype.name}; the handler rotates float32")
    if width % (2 * LANES):
        return Reason(
            f"qkv has heads of {width} features; the handler takes multiples of {2 * LANES}"
        )
    if k.dtype == jnp.int4:
        return Reason("an int4 cache is in another basis")
    kind = Prefill if len(qkv.shape) == 4 and qkv.shape[1] > FEW_TOKENS else Attend
    return _plan(kind, k, heads, table, new=True, norm=norm, sinks=sinks)


def _plan(
    kind: type[Attend | Prefill],
    k: Entries,
    heads: int,
    table: jax.Array | None,
    new: bool = False,
    norm: bool = False,
    sinks: bool = False,
) -> CpuPlan | Reason:
    if isinstance(k, LatentCodes):
        return Reason("latents in 8 bits, with the keys' turning part apart")
    groups = k.scale.shape[-1] if isinstance(k, QTensor) else 0
    stored = jnp.dtype(k.dtype).name, k.shape[-2:], groups
    forms = table is not None, new, norm, sinks
    return _planned(kind, stored, heads, forms, os.environ.get(VARIABLE))


@functools.lru_cache(maxsize=256)
def _planned(
    kind: type[Attend | Prefill],
    stored: _Stored,
    heads: int,
    forms: tuple[bool, ...],
    isa: str | None,
) -> CpuPlan | Reason:
    del isa
    if isinstance(found := form_of(*stored), Reason):
        return found
    if reason := jit.unavailable():
        return reason
    program = kind(found, heads // found.heads, *forms)
    if program.stack > STACK:
        return Reason(
            f"{heads} heads of {found.width} features take {program.stack} bytes of stack"
        )
    return _PLANS[kind](program, jit.host().name)


def attend(
    q: jax.Array,
    k: Cached,
    v: Cached,
    lengths: jax.Array,
    table: jax.Array | None,
    *,
    sinks: jax.Array | None = None,
    window: int | None,
    scale: float,
    plan: CpuPlan,
) -> jax.Array:
    """Return attention ``[B, N, H]``, or ``[B, T, N, H]``, in q's dtype and in the cache's basis.

    lengths: the number of keys that each query token sees; one that sees none gives zeros.
    k, v: ``[B, S, K, H]``, or pages with a table.
    """
    rows = q.astype(jnp.float32).reshape(-1, *q.shape[-2:])
    operands = [rows, lengths.reshape(-1), *jax.tree.leaves((k, v, table)), *_floats(sinks)]
    call = jax.ffi.ffi_call(jit.name_of(plan), results(plan, rows.shape, k, table))
    out, *_ = call(*operands, **attributes(window, scale))
    return out.astype(q.dtype).reshape(q.shape)


def rope_and_attend(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k: Cached,
    v: Cached,
    slots: jax.Array,
    weights: tuple[jax.Array, jax.Array] | None,
    table: jax.Array | None,
    sinks: jax.Array | None = None,
    *,
    window: int | None,
    scale: float,
    eps: float,
    plan: CpuPlan,
) -> tuple[jax.Array, Cached, Cached]:
    """Return (heads ``[B, N, H]``, or ``[B, T, N, H]``, k, v with the new tokens).

    weights: of the norm of q's heads and of k's, where the plan has one.
    """
    shape, heads = qkv.shape[:-2], (qkv.shape[-2] - 2 * k.shape[2], qkv.shape[-1])
    tokens = (x.reshape(-1, *x.shape[len(shape) :]) for x in (qkv, cos, sin, slots))
    qkv, *turns, slots = tokens
    caches, tree = jax.tree.flatten((k, v))
    made = results(plan, (len(qkv), *heads), k, table)
    first = len(made)
    made += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches]
    aliases = {2 + i: first + i for i in range(len(caches))}
    call = jax.ffi.ffi_call(jit.name_of(plan), made, input_output_aliases=aliases)
    rest = *caches, *jax.tree.leaves(table), *turns, *_floats((weights, sinks))
    out, *made = call(qkv, slots, *rest, **attributes(window, scale, eps))
    return out.reshape(*shape, *out.shape[1:]), *jax.tree.unflatten(tree, made[first - 1 :])


def _floats(operands: object) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in jax.tree.leaves(operands)]


def results(
    plan: CpuPlan, heads: tuple[int, ...], k: Cached, table: jax.Array | None
) -> list[jax.ShapeDtypeStruct]:
    """Return a call's results before the caches: heads ``[rows, N, H]``, and room for parts."""
    shapes = [heads]
    if isinstance(plan, AttendPlan):
        capacity = k.shape[1] if table is None else table.shape[1] * k.shape[1]
        rows, n_heads, width = heads
        # A window takes no more.
        shapes.append((rows * -(-capacity // PART) * n_heads * (width + LANES),))
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def attributes(window: int | None, scale: float, eps: float = 0.0) -> dict[str, np.generic]:
    """Return the attributes of a call (``parts.EPS``, ``SCALE``, ``WINDOW``)."""
    seen = np.int32(2**31 - 1 if window is None else window)
    return {"eps": np.float32(eps), "scale": np.float32(scale), "window": seen}
