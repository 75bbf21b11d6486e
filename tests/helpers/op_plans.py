"""Calls that prove the listed plans: each at its smallest shape and at an odd one.

    calls(op, card, plan)

A call of an op beside the dense product asks its planner as users do, and its plan is of the listed
plan's class.  Where another kernel of experts is predicted to be shorter, one kernel's planner is
asked.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.device import gpu, planned_for, timed_tiles
from pallas_kernels.dispatch import Plan, named_plan, stands_for
from pallas_kernels.experts import plan as experts_plan
from pallas_kernels.experts.gate import ClampedGate, Gate
from pallas_kernels.experts.many_pairs.plan import GroupedTilePlan, TokenTile, fitted
from pallas_kernels.experts.summed_plan import summed_plan
from pallas_kernels.matmul.many_rows.plan import WeightTile
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import QTensor
from tests.helpers import plan_cases
from tests.helpers.matmul_cases import error
from tests.helpers.op_calls import (
    BF16,
    E4M3,
    F16,
    F32,
    INT8,
    LIMIT,
    OpCall,
    S,
    decode,
    gated_product,
    grouped,
    largest,
    latent_step,
    latents,
    mixture,
    rope_attend,
    rope_write,
    route,
    rowwise,
    sequences,
    step,
)
from tests.helpers.random_products import E8M0, FLOAT4, INT4


def _experts(kind: str, *shape: int) -> Any:
    """Return the shapes of a weight ``[E, N, K]``."""
    *lead, k = shape
    dtype, group, scale = {
        "float": (BF16, k, BF16),
        "int4": (INT4, 128, BF16),
        "int4 g32": (INT4, 32, BF16),
        "int8": (INT8, k, BF16),
        "float8": (E4M3, 128, BF16),
        "mxfp4": (FLOAT4, 32, E8M0),
        "nvfp4": (FLOAT4, 16, E4M3),
    }[kind]
    if kind == "float":
        return S(shape, dtype)
    unit = S((*lead, 1), F32) if kind == "nvfp4" else None
    return QTensor(S(shape, dtype), S((*lead, k // group), scale), unit=unit)


def _few_pairs() -> Iterator[OpCall]:
    short = (1, 1, 64, 2048), (3, 2, 80, 2176), (128, 4, 64, 3072), (129, 4, 80, 3200)
    sizes = *short, (1, 1, 8192, 1024), (2, 1, 8200, 1152), (1, 1, 64, 8192), (3, 2, 80, 8320)
    kinds = "float", "int4", "int4 g32", "int8", "float8", "mxfp4", "nvfp4"
    gates: tuple[Gate | None, ...] = None, "silu"
    for kind, (tokens, chosen, n, k), gate in itertools.product(kinds, sizes, gates):
        w, planner = _experts(kind, 6, n, k), experts_plan.row_plan
        if named_plan(planner(S((1, k), BF16), w, tokens * chosen, gate)) is not None:
            yield grouped(tokens, chosen, w, gate, bias=gate is None, planner=planner)


def _many_pairs() -> Iterator[OpCall]:
    codes = ("pairs codes", "int4"), ("pairs float", "float"), ("pairs float4 sorted", "mxfp4")
    tiles: list[tuple[str, Any]] = [
        (kind, tile) for family, kind in codes for tile, _ in timed_tiles(family, WeightTile)
    ]
    tiles += [("float", tile) for tile, _ in timed_tiles("pairs float by tokens", TokenTile)]
    sizes: tuple[tuple[int, int, int, Gate | None], ...] = (
        (40, 256, 512, None),
        (301, 384, 640, ClampedGate()),
        (301, 512, 768, "silu"),
    )
    for (kind, tile), (tokens, n, k, gate) in itertools.product(tiles, sizes):
        w = _experts(kind, 5, n, k)
        plan = GroupedTilePlan(fitted(tile, StoredWeight.of(w), gate is not None))
        planner = functools.partial(_always, dataclasses.replace(plan, tile=_here(plan.tile)))
        yield grouped(tokens, 2, w, gate, weights=gate is None, bias=True, planner=planner)


def _here(tile: Any) -> Any:
    return dataclasses.replace(tile, sms=gpu().sms)


def _always(plan: Plan, *_: Any) -> Plan:
    return plan


def _sums() -> Iterator[OpCall]:
    sizes = (1, 2, 64, 512), (1, 3, 50, 640), (1, 8, 64, 1024), (1, 7, 50, 1152)
    for first, (tokens, chosen, n, k) in itertools.product((None, 3), sizes):
        for kind in ("int4", "mxfp4"):
            w = _experts(kind, 9, n, k)

            def planner(x: Any, w: Any, n_pairs: int, _: Any, fan: int = chosen) -> Any:
                return summed_plan(x, w, n_pairs, fan)

            yield grouped(tokens, chosen, w, weights=True, bias=True, first=first, planner=planner)


def _grouped() -> Iterator[OpCall]:
    yield from _few_pairs()
    if gpu().wgmma:
        yield from _many_pairs()
        yield from _sums()


def _mixtures() -> Iterator[OpCall]:
    few = (1, 128, 128), (2, 256, 640), (1, 128, 3072), (8, 256, 3072)
    sizes = *few, (8, 512, 128), (8, 512, 3072), (8, 512, 4096)
    kinds = "int4", "int4 g32", "mxfp4", "nvfp4"
    for (k, f, d), kind in itertools.product(sizes if gpu().wgmma else (), kinds):
        gate_up, down = _experts(kind, 3, 2 * f, d), _experts(kind, 3, d, f)
        yield mixture(k, gate_up, down, is_one_kernel=True)


def _gated() -> Iterator[OpCall]:
    if gpu().wgmma:
        for m, n, k in (5, 256, 128), (61, 768, 208), (70, 256, 128), (300, 768, 208):
            yield gated_product(m, n, k)


def _best() -> Iterator[OpCall]:
    for n in range(32, 513, 32):
        yield largest(1, n, 4)
        yield largest(7, n - 5, 8)


def _route() -> Iterator[OpCall]:
    for tokens, width, n, k in (
        (1, 64, 8, 2),
        (3, 1000, 7, 3),
        (1, 64, 16, 2),
        (3, 1000, 13, 4),
        (1, 64, 32, 2),
        (3, 2880, 29, 4),
        (1, 64, 64, 8),
        (8, 1000, 509, 8),
    ):
        for sigmoid in (False, True):
            yield route(tokens, width, n, k, tokens == 1, sigmoid)


# Capacities of one round of a block's warps, and odd ones.
_ROUNDS = 150, 192, 300, 384, 600, 768, 1200, 1536
_N_KV = 1, 2, 4, 8, 16, 32, 64


def _decode() -> Iterator[OpCall]:
    capacities = 64, 100, *_ROUNDS, 2048, 3000, 4096
    for batch, capacity, n_kv, h, group in itertools.product(
        (1, 2), capacities, _N_KV, (64, 256), (1, 5)
    ):
        yield decode((n_kv * group, n_kv, h), batch, capacity)
    waiting = gpu().sms + 1, gpu().sms + 3  # rows of which some wait
    few = (1, 2), (64, 100, 1000, 4096, 5000, 8192)
    many = (33, 35, 64, 67, *waiting), (64, 1024)
    widths = (64, 256) if gpu().wgmma else (64, 128, 256)
    for batches, capacities in few, many:
        for batch, capacity, n_kv, h, group, tokens in itertools.product(
            batches, capacities, (1, 2, 4, 8), widths, (1, 5, 9, 17, 40), (None, 2)
        ):
            if group * (tokens or 1) <= 64:
                for kind in ("bfloat16", "int8", "int4"):
                    yield decode((n_kv * group, n_kv, h), batch, capacity, kind, tokens=tokens)
    for kind, batch in itertools.product(("bfloat16", "int4"), (8, 9)):
        yield decode((8, 8, 64), batch, 65536, kind)


def _latents(places: tuple[int, int] = (0, 0)) -> Iterator[OpCall]:
    """Each program at its smallest and at an odd shape; places: of the lists there."""
    for small, odd in ((8, (2, 5)), (24, (3, 11)), (72, (2, 61))):
        yield latents(1, 1, small, 64, places=places[0])
        yield latents(3, *odd, 448, 32, places[1])
    for kind in () if any(places) else ("int8", "float8_e4m3fn"):
        yield latents(1, 1, 8, 64, kind=kind)
        yield latents(3, 3, 5, 448, 32, kind=kind)


def _latent_step() -> Iterator[OpCall]:
    for small, odd in ((8, 13), (24, 20), (32, 41), (72, 128)):
        yield latent_step(1, small, 64, 64, 128)
        yield latent_step(3, odd, 192, 256, 448, 32)


def _rope_attend() -> Iterator[OpCall]:
    capacities = 64, 100, *_ROUNDS, 2048, 3000, 4096
    shapes = itertools.product((1, 2), capacities, _N_KV, (64, 256), (1, 5, 8))
    for batch, capacity, n_kv, h, group in shapes:
        yield rope_attend((n_kv * group, n_kv, h), batch, capacity, "bfloat16")


def _rope_write() -> Iterator[OpCall]:
    yield rope_write((1, 1, 64), 1, 16, "bfloat16")
    yield rope_write((9, 3, 128), 5, 100, "float16", F16)
    for kind in ("int8", "int4", "float8_e4m3fn"):
        yield rope_write((6, 2, 256), 3, 70, kind)


def _gla() -> Iterator[OpCall]:
    if gpu().wgmma:
        yield sequences("gla", 1, 40, (1, 1), (64, 64))
        yield sequences("gla", 2, 131, (3, 3), (256, 192), initial=True, ends=True)
        yield sequences("gla", 1, 70, (1, 1), (512, 64), initial=True)
        yield sequences("gla", 1, 512, (1, 1), (64, 64))
        yield sequences("gla", 2, 1003, (3, 3), (128, 192), initial=True, ends=True)


def _ssd() -> Iterator[OpCall]:
    if gpu().wgmma:
        how: dict[str, Any] = {"by_channel": False}
        yield sequences("ssd", 1, 40, (1, 1), (64, 64), **how)
        yield sequences("ssd", 2, 131, (1, 3), (256, 48), initial=True, ends=True, **how)
        yield sequences("ssd", 1, 4096, (1, 2), (64, 64), **how)
        yield sequences("ssd", 2, 4003, (2, 4), (128, 48), initial=True, ends=True, **how)


def _delta() -> Iterator[OpCall]:
    if gpu().wgmma:
        for length, by_channel in itertools.product((40, 131, 8192, 12003), (False, True)):
            even = length % 2 == 0
            heads = (1, 1) if even else (2, 4)
            how: dict[str, Any] = {"by_channel": by_channel, "initial": not even, "ends": not even}
            yield sequences("gated_delta", 1, length, heads, (64, 64), **how)
            wide = (128, 192) if by_channel else (256, 192)
            batch = 2 if length < 1000 else 1
            yield sequences("gated_delta", batch, length, heads, wide, normalize=True, **how)


def _gla_step() -> Iterator[OpCall]:
    widths = itertools.product((64, 128, 256, 512), (32, 64, 96, 128, 192, 256, 1024, 1056))
    for batch, (dk, dv) in itertools.product((1, 3, 67, 135), widths):
        yield step("gla_step", batch, (2, 2), (dk, dv))


def _delta_step() -> Iterator[OpCall]:
    for dk, by_channel in itertools.product((64, 128, 256), (False, True)):
        dtype = F16 if by_channel else BF16
        for batch, heads in ((1, (1, 1)), (67, (1, 3))):
            how: dict[str, Any] = {"by_channel": by_channel, "dtype": dtype}
            yield step("gated_delta_step", batch, heads, (dk, 128), **how)


def _rows(op: str) -> Iterator[OpCall]:
    widths = sorted({*range(8, 32769, 248), *range(1024, 32769, 1024)})
    given = (False, True) if op == "swiglu" else (False,)
    for width, rows, is_given in itertools.product(widths, (1, 65, 1024, 1031), given):
        residual = op == "rms_norm" and rows == 65
        yield rowwise(op, rows, width, "int8", given=is_given, residual=residual)


# Every call of a short list is taken, and of a grid the smallest two of each plan.
_LISTS: dict[str, Callable[[], Iterator[OpCall]]] = {
    "gated_matmul": _gated,
    "norm_and_route": _route,
    "best": _best,
    "latent_attention": _latents,
    "shared_mixture": _mixtures,
    "chosen_latent_attention": functools.partial(_latents, (64, 200)),
    "latent_step": _latent_step,
    "rope_and_write": _rope_write,
    "gla": _gla,
    "gated_delta": _delta,
    "gated_delta_step": _delta_step,
    "ssd": _ssd,
}
_GRIDS: dict[str, Callable[[], Iterator[OpCall]]] = {
    "grouped_matmul": _grouped,
    "decode_attention": _decode,
    "rope_and_attend": _rope_attend,
    "gla_step": _gla_step,
    **{op: functools.partial(_rows, op) for op in ("rms_norm", "swiglu", "quantize_tokens")},
}


@functools.cache
def _by_plan(op: str, card: str) -> dict[Plan, list[OpCall]]:
    with planned_for(card):
        found: dict[Plan, list[OpCall]] = {}
        for call in _LISTS[op]() if op in _LISTS else sorted(_GRIDS[op](), key=_size):
            plan = named_plan(call.find())
            if plan is not None:
                found.setdefault(stands_for(plan), []).append(call)
    return found if op in _LISTS else {plan: _two(some) for plan, some in found.items()}


_size = operator.attrgetter("size")


def _two(found: list[OpCall]) -> list[OpCall]:
    """Return the smallest call, and the next one that is larger."""
    first = found[0]
    others = [call for call in found if call.size > first.size]
    return [first, *others[:1]]


def calls(op: str, card: str, plan: Any) -> list[OpCall]:
    """Return calls that take a listed plan on a card."""
    if op != "quantized_matmul":
        return _by_plan(op, card).get(plan, [])
    return [_product(plan, case) for case in plan_cases.cases(plan)]


def _product(plan: Any, case: plan_cases.ProductCase) -> OpCall:
    function, operands = plan_cases.program(plan, case)

    def check(out: Any, operands: Any, rng: Any) -> float:
        first = out[0] if isinstance(out, tuple) else out
        found = error(first, plan_cases.reference(plan, *plan_cases.operands(case)))
        assert found <= LIMIT, found
        return found

    def run(*operands: Any, implementation: Any) -> Any:
        return function(*operands)

    return OpCall("quantized_matmul", lambda: plan, run, operands, lambda _: operands, check)
