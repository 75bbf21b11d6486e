"""A decode step's chain of weight-reading kernels, in blocks of half an SM with a deep ring.

    python -m benchmarks.kernels.ring_probe [--schemes w4a16,bf16] [--only LABEL ...]

Question.  Between two kernels of a decode step memory is idle: the next kernel's first bytes come
behind the end of the one before.  Here a block has 8 warps and half of an SM's shared memory, so
two kernels in succession live on one SM, and the second fills its ring before it waits.

Kernel.  Each warp has a ring of its own: ``depth`` slots of one piece of its two rows of w, with
their scales.  Lane 0 starts the bulk copies; one mbarrier a slot counts the bytes.  The warp that
has multiplied a slot fills it again, so no warp produces for others and no barrier says "empty".
x, the norm, the products and the fused work are those of the one-row kernel (``few_rows.row``).

Variants, by what stands before ``griddepcontrol.wait``:

    today     the kernels that the project chooses now
    after     wait, then the next kernel may begin, then fill the ring
    before    fill the ring, wait, then the next may begin
    early     the next may begin, fill the ring, wait
    nobody    fill the ring, and no wait: wrong values, the bound of any such form

The chain is Llama-3.2-1B's: 16 layers of qkv, attention, o, gate_up, down, then the head (int8
beside int4).  Prints microseconds of a turn of a loop on the device, (long - short) / turns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels import ptx as p
from pallas_kernels import quantize
from pallas_kernels.attention.rope_attention import rope_and_attend
from pallas_kernels.jax_internals import arith, ir
from pallas_kernels.launch import launch
from pallas_kernels.matmul.few_rows.kernel import Weight, kinds_of, parts_of
from pallas_kernels.matmul.few_rows.operands import FewRowsOperands
from pallas_kernels.matmul.few_rows.plan import RowPlan, divide_row
from pallas_kernels.matmul.few_rows.row import Input, WeightRows
from pallas_kernels.matmul.few_rows.row_loops import Floats, Nibbles
from pallas_kernels.matmul.few_rows.scheme import FewRowsScheme
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.ptx import Value

WARPS = 8
HALF_SM = 112 * 1024  # of 228 KB, less what a block has besides
WIDTH, FFN, VOCABULARY, LAYERS = 2048, 8192, 128256, 16
HEADS = 32, 8, 64
CONTEXT, CAPACITY = 1000, 1152
EPS = 1e-5
SHAPES = {
    "qkv": ((HEADS[0] + 2 * HEADS[1]) * HEADS[2], WIDTH),
    "o": (WIDTH, HEADS[0] * HEADS[2]),
    "gate_up": (2 * FFN, WIDTH),
    "down": (WIDTH, FFN),
}


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """row: of x and of a warp's rows.  ring: bytes of a block at most.  piece: bytes of a row in a
    slot at most.  order: of filling and waiting, see the module."""

    row: RowPlan
    scale_bytes: int  # of a row of w
    ring: int
    order: str
    piece: int = 1024
    one_sm: bool = False  # nothing else needs room on the SM

    @property
    def row_bytes(self) -> int:
        return self.row.k * self.row.bits // 8

    @property
    def piece_bytes(self) -> int:
        return min(self.row_bytes, self.piece)

    @property
    def pieces(self) -> int:
        return self.row_bytes // self.piece_bytes

    @property
    def scale_piece(self) -> int:
        return self.scale_bytes // self.pieces

    @property
    def slot_bytes(self) -> int:
        return self.row.rows * (self.piece_bytes + self.scale_piece)

    @property
    def depth(self) -> int:
        x_bytes = self.row.scratch_sizes(normed=True)[0]
        room = self.ring if self.one_sm else min(self.ring, HALF_SM - 2048 - x_bytes)
        return max(1, room // (WARPS * self.slot_bytes))

    @property
    def blocks(self) -> int:
        return min(self.row.sms, -(-self.row.units // WARPS))


def plan_of(w: Weight, swiglu: bool, ring: int, order: str, **changes: Any) -> RingPlan:
    divided = divide_row(w, swiglu)
    n = w.shape[0]
    row = dataclasses.replace(divided, rows=2, units=n // 2, warps=WARPS)
    scale_bytes = FewRowsScheme.of(w, "bf16").scale_row if row.bits == 4 else 0
    return RingPlan(row, scale_bytes, ring * 1024, order, one_sm=ring > 96, **changes)


@dataclasses.dataclass(frozen=True)
class Ring:
    """A warp's slots.  base, barriers: addresses of its own in shared memory."""

    plan: RingPlan
    scheme: FewRowsScheme
    rows: WeightRows
    lane: Value
    base: Value
    barriers: Value

    def initialise(self) -> None:
        def body() -> None:
            for slot in range(self.plan.depth):
                p.barrier_init(p.add(self.barriers, 8 * slot), 1)
            p.barriers_ready()

        p.when(p.less(self.lane, 1), body)
        p.warp_barrier()

    def fill(self, unit: Value, piece: int, slot: Value) -> None:
        """Copy a piece of the unit's rows and its scales; by lane 0, if there is such a unit."""
        plan, operands = self.plan, self.rows.operands
        exists = arith.andi(p.less(self.lane, 1), p.less(unit, plan.row.units))

        def body() -> None:
            full = p.add(self.barriers, p.mul(slot, 8))
            at = p.add(self.base, p.mul(slot, plan.slot_bytes))
            p.barrier_expect(full, plan.slot_bytes)
            for i, row in enumerate(self.rows.of(unit)):
                index = p.add(p.mul(row, plan.pieces), piece)
                source = p.offset_rows(operands.w, index, plan.piece_bytes)
                p.copy_bulk(at, source, plan.piece_bytes, full, i * plan.piece_bytes)
                if plan.scale_bytes:
                    source = p.offset_rows(operands.scale, index, plan.scale_piece)
                    begin = plan.row.rows * plan.piece_bytes + i * plan.scale_piece
                    p.copy_bulk(at, source, plan.scale_piece, full, begin)

        p.when(exists, body)

    def words(self, slot: Value) -> list[Value]:
        """The lane's words of a slot, in the order of ``WeightRows.load``."""
        plan = self.plan
        at = p.add(self.base, p.mul(slot, plan.slot_bytes))
        lane = p.add(at, p.mul(self.lane, 16))
        group = p.add(at, p.mul(p.shift_right(self.lane, 2), self.scheme.scale_bytes))
        out = []
        for chunk in range(plan.piece_bytes // 512):
            for i in range(plan.row.rows):
                out += p.load_shared(lane, 4, i * plan.piece_bytes + 512 * chunk)
            for i in range(plan.row.rows if plan.scale_bytes else 0):
                begin = plan.row.rows * plan.piece_bytes + i * plan.scale_piece
                begin += 8 * self.scheme.scale_bytes * chunk
                out += [p.load_shared_narrow(group, "u16", begin), p.ci(self.scheme.bias)]
        return out


def _mark() -> None:
    owner = ir.InsertionPoint.current.block.owner
    while owner.parent is not None:
        owner = owner.parent
    owner.attributes["mosaic_gpu.uses_pdl"] = ir.UnitAttr.get()


def allow_next() -> None:
    """The kernel behind this one may begin, and this one waits for none before it."""
    if p._overlaps():
        p.ptx("griddepcontrol.launch_dependents;")
        _mark()


def run(plan: RingPlan, scheme: FewRowsScheme, operands: FewRowsOperands, smem: Any) -> None:
    """Emit a block's program while the kernel is traced."""
    xs, squares, ring_at, barriers = (
        p.shared_address(getattr(smem, name)) for name in ("x", "squares", "ring", "barriers")
    )
    thread = p.register("tid.x")
    warp, lane = p.shift_right(thread, 5), p.masked(thread, 31)
    # The last round's units are spread over all SMs.
    first = p.add(p.mul(warp, plan.blocks), p.register("ctaid.x"))
    kind = Nibbles if plan.row.bits == 4 else Floats
    loop = kind.of(plan.row, scheme, operands, xs, lane)
    source = Input(plan.row, operands, loop, thread, squares)
    rows = WeightRows(plan.row, scheme, operands, loop, lane, operands.w, operands.w, loop)
    ring = Ring(
        plan,
        scheme,
        rows,
        lane,
        p.add(ring_at, p.mul(warp, plan.depth * plan.slot_bytes)),
        p.add(barriers, p.mul(warp, 8 * plan.depth)),
    )
    stride, pieces, chunks = plan.blocks * WARPS, plan.pieces, plan.piece_bytes // 512

    def fill_all() -> None:
        for i in range(plan.depth):
            ring.fill(p.add(first, stride * (i // pieces)), i % pieces, p.ci(i))

    if plan.order == "early":
        allow_next()
    ring.initialise()
    if plan.order in ("before", "early", "nobody"):
        fill_all()
    (allow_next if plan.order == "nobody" else p.await_kernel)()
    if plan.order == "after":
        fill_all()
    source.store(source.ask(early=True), warp, lane)
    p.barrier()
    factor = source.factor()

    def step(i: Value, carry: list[Value]) -> list[Value]:
        unit = p.add(p.mul(i, stride), first)
        slot, parity = carry
        asked, sums = rows.ask(unit), loop.nothing()
        for piece in range(pieces):
            p.barrier_wait(p.add(ring.barriers, p.mul(slot, 8)), parity)
            words = ring.words(slot)
            sums = loop.group(range(piece * chunks, (piece + 1) * chunks), words, sums)
            p.warp_barrier()
            ahead = piece + plan.depth
            ring.fill(p.add(unit, stride * (ahead // pieces)), ahead % pieces, slot)
            wraps = p.equal(slot, plan.depth - 1)
            parity = arith.select(wraps, arith.xori(parity, p.ci(1)), parity)
            slot = arith.select(wraps, p.ci(0), p.add(slot, 1))
        rows.finish(unit, sums, asked, factor)
        return [slot, parity]

    units = p.ci(plan.row.units + stride - 1)
    rounds = arith.divui(arith.subi(units, first), p.ci(stride))
    p.loop(0, rounds, 1, [p.ci(0), p.ci(0)], step)


@functools.partial(jax.jit, static_argnames=("swiglu", "plan"))
def ring_matmul(
    x: jax.Array,
    w: Weight,
    *,
    plan: RingPlan,
    gamma: jax.Array | None = None,
    residual: jax.Array | None = None,
    swiglu: bool = False,
) -> jax.Array:
    """x [1, K] bf16, w [N, K] -> [1, N] (with SwiGLU N / 2) bf16: the product and what is fused."""
    n, k = w.shape
    inputs = {"x": x, **parts_of(w), "gamma": gamma, "residual": residual}
    outs = {"out": jax.ShapeDtypeStruct((1, n // 2 if swiglu else n), x.dtype)}
    facts = {"k": k, "kinds": kinds_of(inputs | outs), "eps": EPS, "swiglu": swiglu}
    scheme = FewRowsScheme.of(w, "bf16")

    def body(gmem: Any, smem: Any) -> None:
        run(plan, scheme, FewRowsOperands.of(vars(gmem), **facts), smem)

    x_bytes, square_bytes = plan.row.scratch_sizes(normed=True)
    sizes = {
        "x": x_bytes,
        "squares": square_bytes,
        "ring": WARPS * plan.depth * plan.slot_bytes,
        "barriers": 8 * WARPS * plan.depth,
    }
    (out,) = launch(
        body,
        inputs,
        outs,
        name="ring_probe",
        grid=plan.blocks,
        warpgroups=WARPS // 4,
        scratch={name: size // 4 for name, size in sizes.items()},
        registers=True,
    )
    return out


# --- The chain ------------------------------------------------------------------------------------


def product(x, w, ring, *, gamma=None, residual=None, swiglu=False):
    """ring: None for the project's choice, else (KB, order, further fields of the plan)."""
    if ring is None:
        norm = None if gamma is None else (gamma, EPS)
        return quantized_matmul(
            x, w, norm=norm, residual=residual, swiglu=swiglu, implementation="mosaic"
        )
    size, order, changes = ring
    plan = plan_of(w, swiglu, size, order, **dict(changes))
    return ring_matmul(x, w, plan=plan, gamma=gamma, residual=residual, swiglu=swiglu)


def layer(x, w, attention, ring, with_attention):
    gamma = w["gamma"]
    qkv = product(x, w["qkv"], ring, gamma=gamma)
    if with_attention:
        heads, k, v = rope_and_attend(
            qkv.reshape(1, -1, HEADS[2]), *attention, implementation="mosaic"
        )
        attention = (*attention[:2], k, v, *attention[4:])
        heads = heads.reshape(1, -1)
    else:
        heads = qkv[:, : HEADS[0] * HEADS[2]]
    x = product(heads, w["o"], ring, residual=x)
    up = product(x, w["gate_up"], ring, gamma=gamma, swiglu=True)
    return product(up, w["down"], ring, residual=x), attention


def step(x0, weights, caches, tables, ring, with_attention):
    """One turn: (the next turn's x, caches)."""
    x, new = x0, []
    for w, (k, v) in zip(weights["layers"], caches, strict=True):
        cos, sin, slots = tables
        x, attention = layer(x, w, (cos, sin, k, v, slots), ring, with_attention)
        new.append(attention[2:4])
    logits = product(x, weights["head"], ring, gamma=weights["gamma"])
    return x0 + logits[:, : x0.shape[1]] * jnp.bfloat16(1e-3), new


def make_weights(scheme: str) -> dict[str, Any]:
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def one(key, shape, head):
        w = jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[1] ** -0.5)
        if scheme == "bf16":
            return w
        words, group = ("int8", shape[1]) if head else ("int4", 128)
        scale = jnp.float32 if head else jnp.bfloat16
        return quantize(w, words, group_size=group, symmetric=True, scale_dtype=scale)

    gamma = jnp.ones((WIDTH,), jnp.bfloat16)
    layers = []
    for i in range(LAYERS):
        keys = jax.random.split(jax.random.key(i), len(SHAPES))
        products = {n: one(key, s, False) for key, (n, s) in zip(keys, SHAPES.items(), strict=True)}
        layers.append(products | {"gamma": gamma})
    head = one(jax.random.key(99), (VOCABULARY, WIDTH), True)
    return {"layers": layers, "head": head, "gamma": gamma}


def operands() -> tuple[Any, ...]:
    """x, caches, tables of a turn."""
    x = jax.random.normal(jax.random.key(7), (1, WIDTH), jnp.bfloat16)
    shape = (1, CAPACITY, *HEADS[1:])
    caches = [(jnp.zeros(shape, jnp.bfloat16),) * 2 for _ in range(LAYERS)]
    angle = jnp.linspace(0.0, 6.0, HEADS[2] // 2)[None]
    return x, caches, (jnp.cos(angle), jnp.sin(angle), jnp.full((1,), CONTEXT, jnp.int32))


@contextlib.contextmanager
def nobody_waits(wanted: bool):
    """Within, and if so wanted, no kernel waits for the one before: wrong values."""
    jax.clear_caches()
    with mock.patch.object(p, "await_kernel", allow_next if wanted else p.await_kernel):
        yield


def loop_of(ring, with_attention):
    from jaxllama import compiler_options

    @functools.partial(jax.jit, compiler_options=compiler_options.for_device())
    def loop(x, weights, caches, tables, turns):
        def turn(_, state):
            return step(*state[:1], weights, state[1], tables, ring, with_attention)

        return jax.lax.fori_loop(0, turns, turn, (x, caches))

    return loop


def seconds(loop, args, turns: int) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(loop(*args, jnp.int32(turns)))
    return time.perf_counter() - begin


def turn_us(ring, weights, with_attention: bool, nobody: bool) -> dict[str, Any]:
    x, caches, tables = operands()
    begin = time.perf_counter()
    with nobody_waits(nobody):
        loop, args = loop_of(ring, with_attention), (x, weights, caches, tables)
        seconds(loop, args, 3)
        made = time.perf_counter() - begin
        runs = [(seconds(loop, args, 200), seconds(loop, args, 40)) for _ in range(5)]
    us = statistics.median(1e6 * (long - short) / 160 for long, short in runs)
    return {"us": round(us, 1), "compile_s": round(made, 1)}


def check_values(scheme: str, weights) -> dict[str, float]:
    """Relative RMS difference of each product from that of the project's kernel."""
    found, w = {}, weights["layers"][0]
    for name, (n, k) in {**SHAPES, "head": (VOCABULARY, WIDTH)}.items():
        x = jax.random.normal(jax.random.key(n), (1, k), jnp.bfloat16)
        more: dict[str, Any] = {"swiglu": name == "gate_up"}
        if k == WIDTH and name != "o":
            more["gamma"] = weights["gamma"]
        else:
            more["residual"] = jnp.ones((1, n), x.dtype)
        one = weights["head"] if name == "head" else w[name]
        got, want = (
            jax.jit(functools.partial(product, ring=ring, **more))(x, one).astype(jnp.float32)
            for ring in ((96, "before", ()), None)
        )
        found[name] = float(jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2)))
    return found


VARIANTS: dict[str, Any] = {
    "today": None,
    "before 96": (96, "before", ()),
    "nobody 96": (96, "nobody", ()),
    "after 96": (96, "after", ()),
    "early 96": (96, "early", ()),
    "today, nobody waits": None,
    "before 64": (64, "before", ()),
    "before 32": (32, "before", ()),
    "before 128": (128, "before", ()),
    "before 96, 2 KB pieces": (96, "before", (("piece", 2048),)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schemes", default="w4a16,bf16")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS))
    parser.add_argument("--without-attention", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    results: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}

    def note(key: str, value: Any) -> None:
        results[key] = value
        print(f"{key}: {value}", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)

    for scheme in args.schemes.split(","):
        weights = jax.block_until_ready(make_weights(scheme))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        note(f"{scheme} bytes us", round(size / 4.3e6, 1))
        try:
            note(f"{scheme} values", check_values(scheme, weights))
        except Exception as error:
            note(f"{scheme} values", repr(error)[:300])
        for label in args.only:
            try:
                ring, nobody = VARIANTS[label], "nobody" in label
                found = turn_us(ring, weights, not args.without_attention, nobody)
                note(f"{scheme} {label}", found)
            except Exception as error:
                note(f"{scheme} {label}", repr(error)[:300])
        del weights


if __name__ == "__main__":
    main()
