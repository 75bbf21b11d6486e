"""Attention of one query token a row over its cache: the handler of ``decode_attention`` and, with
RoPE and the cache's write before it, of ``rope_and_attend``.

A row's keys are cut into parts, in the order of ``cpu.softmax``.  The cut does not depend on the
threads or the other rows:

    scores of a part's keys, their weights, sums of weight times value   phase 1, by rows and parts
    the parts joined in turn                                             phase 2, by rows, kv heads

So a query's result is the same bits for any threads and other rows, and the same as from
``cpu.prefill``.  All arithmetic is float32 on the cached values; a row of one part is done after
phase 1.

A part takes 16 tokens at a time through all heads, in the order of memory.  Each token prefetches
the one that lies 16 tokens ahead, so the cache is read at the rate of memory.

With RoPE, the part that ends with the new token first writes it to the cache.  Several consecutive
rows may be tokens of one row of the cache (a draft being verified); an extra first phase then
writes them all.  So each token gets the bits of its own decode step.  Cache arrays are operands
and results at once.

Source: Flash-Decoding's split over keys (as ``attention.op``).  Leaves out: float8 caches; head
widths that are no multiple of 16 features (32 with int4 or RoPE); RoPE before an int4 cache, which
is in another basis; so many heads that a part's stack exceeds ``STACK`` bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import jit
from pallas_kernels.cpu.cache import LANES, CacheForm, Stored, attributes, form_of
from pallas_kernels.cpu.handler import CpuPlan, Phase, Program
from pallas_kernels.cpu.parts import VALUES, CallRows, Join, KeyPart, Write, ahead
from pallas_kernels.cpu.scores import KEYS
from pallas_kernels.cpu.softmax import PART
from pallas_kernels.cpu.target import VARIABLE
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter, Value
    from pallas_kernels.cpu.frame import CallFrame
    from pallas_kernels.cpu.target import Target

STACK = 1 << 18
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
Cached = jax.Array | QTensor


class AttendPlan(CpuPlan):
    kernel = "attention_cpu"


def plan(q: jax.Array, k: Cached, table: jax.Array | None, sinks: bool = False) -> CpuPlan | Reason:
    """Return the plan of ``decode_attention``, or the reason why the handler does not run."""
    if q.dtype not in FLOATS:
        return Reason(f"q is {q.dtype.name}")
    return _plan(k, q.shape[-2], table, sinks=sinks)


def new_token_plan(
    qkv: jax.Array,
    k: Cached,
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
    return _plan(k, heads, table, new=True, norm=norm, sinks=sinks)


def _plan(
    k: Cached,
    heads: int,
    table: jax.Array | None,
    new: bool = False,
    norm: bool = False,
    sinks: bool = False,
) -> CpuPlan | Reason:
    groups = k.scale.shape[-1] if isinstance(k, QTensor) else 0
    stored = jnp.dtype(k.dtype).name, k.shape[-2:], groups
    forms = table is not None, new, norm, sinks
    return _planned(stored, heads, forms, os.environ.get(VARIABLE))


@functools.lru_cache(maxsize=256)
def _planned(
    stored: Stored, heads: int, forms: tuple[bool, ...], isa: str | None
) -> CpuPlan | Reason:
    """Return the plan, which depends on these alone: every layer of a model asks for the same."""
    del isa
    if isinstance(found := form_of(*stored), Reason):
        return found
    if reason := jit.unavailable():
        return reason
    program = Attend(found, heads // found.heads, *forms)
    if program.stack > STACK:
        return Reason(
            f"{heads} heads of {found.width} features take {program.stack} bytes of stack"
        )
    return AttendPlan(program, jit.host().name)


def decode_attention(
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
    """``[B, N, H]``, or ``[B, T, N, H]``, in q's dtype, in the cache's basis."""
    rows = q.astype(jnp.float32).reshape(-1, *q.shape[-2:])
    operands = [rows, lengths.reshape(-1), *jax.tree.leaves((k, v, table)), *_floats(sinks)]
    results = _results(plan.program, rows.shape[0], k, table)
    call = jax.ffi.ffi_call(jit.register(plan.program), results)
    out, _ = call(*operands, **attributes(window, scale))
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
    """(heads ``[B, N, H]``, or ``[B, T, N, H]``, k, v with the new tokens).

    weights: of the norm of q's heads and of k's, where the plan has one.
    """
    shape, h, program = qkv.shape[:-2], qkv.shape[-1], plan.program
    tokens = (x.reshape(-1, *x.shape[len(shape) :]) for x in (qkv, cos, sin, slots))
    qkv, *turns, slots = tokens
    caches, tree = jax.tree.flatten((k, v))
    made = [jax.ShapeDtypeStruct((len(qkv), program.heads, h), jnp.float32)]
    if isinstance(program, Attend):
        made = _results(program, len(qkv), k, table)
    first = len(made)
    made += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches]
    aliases = {2 + i: first + i for i in range(len(caches))}
    call = jax.ffi.ffi_call(jit.register(program), made, input_output_aliases=aliases)
    rest = *caches, *jax.tree.leaves(table), *turns, *_floats((weights, sinks))
    out, *made = call(qkv, slots, *rest, **attributes(window, scale, eps))
    return out.reshape(*shape, *out.shape[1:]), *jax.tree.unflatten(tree, made[first - 1 :])


def _floats(operands: object) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in jax.tree.leaves(operands)]


def _results(
    program: Attend, batch: int, k: Cached, table: jax.Array | None
) -> list[jax.ShapeDtypeStruct]:
    capacity = k.shape[1] if table is None else table.shape[1] * k.shape[1]
    heads, width = program.heads, program.cache.width
    parts = batch * -(-capacity // PART) * heads * (width + LANES)  # a window takes no more
    shapes = (batch, heads, width), (parts,)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


@dataclasses.dataclass(frozen=True)
class Attend(Program):
    """The program of attention over a cache.

    group: query heads to a kv head.  paged: through a table.  new: with RoPE and the write.
    norm: with an RMSNorm of q's and k's heads before RoPE.  sinks: with a sink of each query head.

    Operands: q and lengths (qkv and slots), k, v, table, cos, sin, weights of q's norm and of k's,
    sinks.
    Results: heads, parts (a record a part and head: sums, then total and largest), k, v.
    Attributes: eps, scale, window.
    """

    cache: CacheForm
    group: int
    paged: bool
    new: bool = False
    norm: bool = False
    sinks: bool = False

    @property
    def heads(self) -> int:
        return self.group * self.cache.heads

    @property
    def arguments(self) -> int:
        before = 2 + 2 * self.cache.arrays + self.paged
        return before + 2 * self.new + 2 * self.norm + self.sinks

    @property
    def results(self) -> int:
        return 2 + 2 * self.cache.arrays * self.new

    @property
    def stack(self) -> int:
        """Bytes: queries, sums and scores of all heads, scales, keys, tokens."""
        floats = self.heads * (2 * self.cache.width + PART + PART // VALUES)
        floats += self.cache.heads * PART
        return 4 * (floats + KEYS * self.cache.width) + 8 * (PART + ahead(self.cache))

    def phases(self, target: Target) -> Sequence[Phase]:
        def count_owners(e: Emitter, call: CallFrame) -> Value:
            body = CallRows(self, e, call)
            several = e.b.icmp_unsigned(">", body.sharing, e.i64(1))
            return e.b.select(several, body.owners, e.i64(0))

        def written(e: Emitter, call: CallFrame, i: Value) -> None:
            Write(self, e, call).chunk(i)

        def count_parts(e: Emitter, call: CallFrame) -> Value:
            body = CallRows(self, e, call)
            return e.b.mul(body.batch, body.most_parts())

        def part(e: Emitter, call: CallFrame, i: Value) -> None:
            KeyPart(self, e, call).chunk(i)

        def count_joined(e: Emitter, call: CallFrame) -> Value:
            body = CallRows(self, e, call)
            many = e.b.icmp_signed(">", body.most_parts(), e.i64(1))
            heads = e.b.mul(body.batch, e.i64(self.cache.heads))
            return e.b.select(many, heads, e.i64(0))

        def joined(e: Emitter, call: CallFrame, i: Value) -> None:
            Join(self, e, call).chunk(i)

        phases = [Phase(count_parts, part), Phase(count_joined, joined)]
        return [Phase(count_owners, written), *phases] if self.new else phases
