"""Predicted microseconds of a product: its work times the costs in the device's table.

A kernel or a form of XLA's belongs to a family, and its work is two tuples of amounts:

    us = start + sum(serial * costs) + |shared * costs|_2

Amounts in ``serial`` add up.  Those in ``shared`` overlap, so the largest counts most: bytes of
device memory beside what the busiest block does.  ``bench.fit`` measures the costs, which
the card's table holds by family.  Megabytes are of the weight as it is stored, M N K in
thousands of millions.

A call of more rows than were measured is so many calls of these.

Leaves out: an adapter's own work; its kernel counts as one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.device import gpu
from pallas_kernels.dispatch import Reason
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.few_rows.plan import RowDivision, RowPlan, TileDivision, TilePlan, folds
from pallas_kernels.matmul.many_rows import plan as many_rows
from pallas_kernels.matmul.many_rows.plan import PairTile, WeightTile
from pallas_kernels.matmul.mid_rows import plan as mid_rows
from pallas_kernels.matmul.mid_rows.plan import MidTile
from pallas_kernels.operands import HasShape
from pallas_kernels.qtensor import QTensor, tree_bytes
from pallas_kernels.rounding import NIBBLES

# Of a weight-only product on an accelerator; ``weight_only`` describes them.
Form = Literal["words", "sums", "copy"]
WORD = 8  # 4-bit codes in the 32 bits that a thread of the first form reads at a time


class MatmulWork(NamedTuple):
    family: str
    serial: tuple[float, ...]
    shared: tuple[float, ...]


def predicted_us(work: MatmulWork) -> float:
    cost = gpu().costs[work.family]
    serial = sum(c * amount for c, amount in zip(cost.serial, work.serial, strict=True))
    shared = math.hypot(*(c * amount for c, amount in zip(cost.shared, work.shared, strict=True)))
    return cost.start + serial + shared


# --- kernels -------------------------------------------------------------------------------------


_Plan = RowPlan | TilePlan | MidTile | PairTile | WeightTile


def kernel_us(plan: _Plan, call: MatmulCall) -> float:
    if isinstance(plan, TilePlan) and plan.tokens < call.m:
        part = dataclasses.replace(call, m=plan.tokens)
        return math.ceil(call.m / plan.tokens) * predicted_us(kernel_work(plan, part))
    fitted, times = _fitted(call)
    if times > 1:
        found = many_rows.plan(fitted)
        found = found.plan if isinstance(found, Reason) else found
        plan = found if isinstance(found, PairTile | WeightTile) else plan
    return times * predicted_us(kernel_work(plan, fitted))


def kernel_work(plan: _Plan, call: MatmulCall) -> MatmulWork:
    if isinstance(plan, RowPlan):
        return _row(plan.divide(call), call)
    if isinstance(plan, TilePlan):
        return _tile(plan.divide(call), call)
    if isinstance(plan, MidTile):
        return _mid(plan, call)
    return _pair(plan, call) if isinstance(plan, PairTile) else _weight(plan, call)


def _row(plan: RowDivision, call: MatmulCall) -> MatmulWork:
    normed = float(call.norm is not None)
    busiest = plan.rounds * plan.rows * plan.padded_k * plan.bits / 8e3  # KB of a warp
    serial = normed, normed * call.k / 1e3, call.k / 1e3
    return MatmulWork(f"row {_codes(call)}", serial, (_megabytes(call), busiest))


def _tile(plan: TileDivision, call: MatmulCall) -> MatmulWork:
    normed = float(call.norm is not None)
    fold = " fold" if not call.plain and folds(call.weight) else ""
    busiest = plan.per * plan.k_warp / 1e3  # thousands of columns of a warp
    x = call.m * call.k / 1e3
    serial = normed, normed * x, x, float(plan.split > 1)
    shared = _megabytes(call), busiest, busiest * plan.n_tiles
    return MatmulWork(f"tile {_codes(call)}{fold}", serial, shared)


def _mid(plan: MidTile, call: MatmulCall) -> MatmulWork:
    step = mid_rows.MidStep.of(call)
    clocks = plan.clocks(call.m, call.n, call.k, step, gpu())
    shared = _megabytes(call), clocks / 1e3
    return MatmulWork(step.family, mid_rows.sum_work(plan, call.m, call.n), shared)


def _pair(plan: PairTile, call: MatmulCall) -> MatmulWork:
    across, down = math.ceil(call.n / plan.n), math.ceil(call.m / plan.m)
    if plan.m == 64:
        tiles = math.ceil(across / plan.cluster) * down
    else:
        tiles = across * math.ceil(down / plan.cluster)
    rounds = math.ceil(tiles / (gpu().sms // (plan.cluster * plan.split)))
    bytes_k = call.k * call.w.dtype.itemsize / plan.split
    serial = bytes_k / 1e3, float(plan.split > 1), call.m * call.n / 1e6
    copied = rounds * (plan.m + plan.n) * bytes_k / 1e6
    multiplied = rounds * plan.m * plan.n * bytes_k / 1e9
    family = "pair float" if call.plain else f"pair {call.x.name}"
    return MatmulWork(family, serial, (_megabytes(call), copied, multiplied))


def _weight(plan: WeightTile, call: MatmulCall) -> MatmulWork:
    if plan.block > many_rows.CODES_K:
        work = many_rows.few_codes_work(plan, call.n, call.k)
        return MatmulWork(many_rows.FEW_CODES, work, ())
    tiles = math.ceil(call.m / plan.tokens) * math.ceil(call.n / (plan.rows * plan.cluster))
    rounds = math.ceil(tiles / (gpu().sms // (plan.cluster * plan.split)))
    slots = rounds * call.k / plan.block / plan.split / 100
    groups = call.codes.scale.shape[1]
    ordered = float(not plan.stored and groups > 1)  # XLA transposes scales first
    widened = slots * plan.rows / plan.parts / 64
    serial = (
        float(plan.split > 1),
        ordered,
        ordered * call.n * groups / 1e6,
        call.m * call.n / 1e6,
        slots,
        widened,
        widened * plan.tokens / 64,
    )
    codes = " x 8 bits" if call.quantized_x else ""
    return MatmulWork(f"weight {_codes(call)}{codes}", serial, (_megabytes(call),))


# --- XLA -----------------------------------------------------------------------------------------


def xla_us(call: MatmulCall) -> float:
    """Return the predicted time of XLA's form of the product and of the work around it."""
    fitted, times = _fitted(call)
    around = MatmulWork("xla around", around_work(fitted), ())
    # Measured times are sums over kernels, without the gaps between kernels.
    more = (call.norm, call.residual, call.pending, call.low_rank)
    kernels = sum(part is not None for part in more) + call.swiglu
    between = kernels * gpu().costs["between kernels"].start
    return times * (product_us(fitted) + predicted_us(around)) + between


def around_work(call: MatmulCall) -> tuple[float, ...]:
    """A norm, SwiGLU and a pending sum have kernels of their own; a residual is fused."""
    gates = float(call.swiglu)
    pending, normed = float(call.pending is not None), float(call.norm is not None)
    return normed, pending, gates, gates * call.m * call.n / 1e6


def product_us(call: MatmulCall) -> float:
    """XLA's form of the product alone."""
    w = call.w
    is_int4 = isinstance(w, QTensor) and w.dtype == jnp.int4
    as_floats = is_int4 and (call.codes.unit is None or call.x != jnp.int8)
    if as_floats or not (call.plain or call.quantized_x):
        return min(form_us(form, call) for form in forms(call.codes.q, call.codes.group_size))
    if call.quantized_x and not is_int4 and (groups := call.codes.scale.shape[1]) > 1:
        width = call.k // groups
        part = jax.eval_shape(lambda w: QTensor(w.q[:, :width], w.scale[:, :1]), call.codes)
        return groups * product_us(dataclasses.replace(call, w=part))
    us = predicted_us(product_work(call))
    if call.quantized_x and (sums := 4 * call.m * call.n) > gpu().products.l2_bytes:
        us += 2e6 * sums / gpu().copy_rate  # stored, and read by the fusion that scales them
    if not call.plain and call.w.dtype == jnp.int4 and call.m > 1:
        us += predicted_us(MatmulWork("xla widened", (call.n * call.k / 1e6,), ()))
    return us


def forms(q: jax.Array, group_size: int) -> tuple[Form, ...]:
    """The forms that exist for codes in groups of ``group_size`` columns."""
    has_words = q.dtype.name in NIBBLES and group_size % WORD == 0
    return ("words", "sums", "copy") if has_words else ("sums", "copy")


def shortest_form(x: HasShape, w: QTensor) -> Form:
    """Return the form of XLA's that a weight-only product takes; x: ``[M, K]``."""
    call, _ = _fitted(MatmulCall.of(x, QTensor(w.q, w.scale, w.zero), x.dtype))
    return min(forms(w.q, w.group_size), key=functools.partial(form_us, call=call))


def form_us(form: Form, call: MatmulCall) -> float:
    us = predicted_us(form_work(form, call))
    if form == "words" and call.codes.zero is not None:
        us += gpu().costs["xla zeros"].start
    return us


def form_work(form: Form, call: MatmulCall) -> MatmulWork:
    w = call.codes
    m, n, k, groups = call.m, call.n, call.k, w.scale.shape[1]
    stored, multiplied = _megabytes(call), m * n * k / 1e9
    if form == "words":
        # Another number of groups than a power of two costs integer divisions.
        slower = gpu().products.odd_groups if groups & (groups - 1) else 1.0
        return MatmulWork("xla words", (k / 1e3,), (stored, multiplied * slower))
    if form == "copy":
        moved = stored + 2 * n * k * 2 / 1e6
        return MatmulWork("xla copy", (k / 1e3, min(m, 128) * k * 2 / 1e6), (moved, multiplied))
    if groups > 1:
        sums = 2 * groups * m * n * 4 / 1e6
        is_packed, zeros = float(w.dtype.name in NIBBLES), float(w.zero is not None)
        serial = sums, is_packed, n * groups / 1e6, zeros * n * groups / 1e6, zeros
        return MatmulWork("xla sums", serial, (stored, multiplied))
    serial = float(m == 1), min(m, 128) * k * 2 / 1e6, k / 1e3
    return MatmulWork("xla row sums", serial, (stored, _rounds(m, n, 128) * k / 1e3, multiplied))


def product_work(call: MatmulCall) -> MatmulWork:
    """Return the work of a product with a plain weight, or of codes by codes.

    int4 codes count as codes of 8 bits.
    """
    m, n, k, stored = call.m, call.n, call.k, _megabytes(call)
    is_int4 = not call.plain and call.w.dtype == jnp.int4
    if m == 1 and is_int4:
        return MatmulWork("xla w4a8 row", (k / 1e3,), (stored,))
    if m == 1:
        name = "float" if call.plain else call.x.name
        return MatmulWork(f"xla row {name}", (k / 1e3, stored * float(k % 1024 > 0)), (stored,))
    item = 2 if call.plain else 1
    if is_int4:
        stored = n * k / 1e6  # a copy in 8 bits
    shared = stored, m * n * k / 1e9, _rounds(m, n, 64) * k * item / 1e3
    # XLA's products of int8 and of float8 are other libraries' kernels.
    family = "xla float" if call.plain else f"xla {call.x.name}"
    return MatmulWork(family, (m * k * item / 1e6,), shared)


def _fitted(call: MatmulCall) -> tuple[MatmulCall, float]:
    """The call with as many rows as were measured at most, and how many times it has them."""
    m = min(call.m, gpu().products.fitted_rows)
    return dataclasses.replace(call, m=m), call.m / m


def _rounds(m: int, n: int, tile: int) -> int:
    return math.ceil(math.ceil(m / tile) * math.ceil(n / tile) / gpu().sms)


def _codes(call: MatmulCall) -> str:
    if call.plain:
        return "float"
    name = jnp.dtype(call.w.dtype).name
    if name == "float8_e4m3fn":
        return "int8"
    return "int4" if name in NIBBLES else name  # as many bytes, measured for int4 and int8


def _megabytes(call: MatmulCall) -> float:
    return tree_bytes(call.w) / 1e6
