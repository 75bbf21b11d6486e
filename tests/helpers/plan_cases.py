"""Calls that prove a plan of a product: each at its smallest shape and at an odd one.

Between them the cases of a plan have every part that may stand around the product, zero points of
each kind, and groups of each size that has a program of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.matmul import choice
from pallas_kernels.matmul.call import MatmulCall, Static
from pallas_kernels.matmul.few_rows.plan import RowPlan, TilePlan
from pallas_kernels.matmul.many_rows.plan import CODES_K, PairTile, WeightTile
from pallas_kernels.matmul.mid_rows.plan import MidTile
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import (
    activations,
    codes,
    extras,
    fused_product,
    product,
    weight,
    wide,
)

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# Weights of ``matmul_cases`` by the codes that plans name: at the smallest shape, at the odd one.
ROWS = {
    "float": ("plain", "plain"),
    "int8": ("w8-row", "w8-row"),
    "float8": ("fp8-block", "fp8-block"),
    "int4": ("w4-g128", "w4-g128-zero"),
    "int4 fold": ("w4-g32", "w4-g64-zero"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
TILES = ROWS | {
    "int4": ("w4-g128-zero", "w4-row"),
    "int4 fold": ("w4-g64-zero", "w4-g32-minimum"),
    "int8 fold": ("w8-g32", "w8-g32"),
    "float8": ("fp8-row", "fp8-row"),
    "float8 fold": ("fp8-g32", "fp8-g32"),
}
STORED = {
    "int4": ("w4-g128", "w4-g128-zero"),
    "int8": ("w8-g128", "w8-g64-zero"),
    "float8": ("fp8-block", "fp8-block"),
}
UNSTORED = {
    "int4": ("w4-g32", "w4-row"),
    "int8": ("w8-row", "w8-g64-zero"),
    "float8": ("fp8-row", "fp8-block"),
}


@dataclasses.dataclass(frozen=True)
class ProductCase:
    """A call of a product: m, n, k and the letters of ``matmul_cases.extras``, b for a bias and p
    for a pending sum."""

    m: int
    n: int
    k: int
    weight: str
    around: str = ""

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.weight} {self.around}".rstrip()


def cases(plan: Any, *, few: bool = False) -> tuple[ProductCase, ProductCase]:
    """Return the smallest case of a plan, and an odd one.

    few: blocks have one round of work, for the emulators.
    """
    if isinstance(plan, RowPlan):
        return _row(plan, few)
    if isinstance(plan, TilePlan):
        return _tile(plan, few)
    if isinstance(plan, WeightTile):
        return _weight(plan, few)
    if isinstance(plan, PairTile):
        return _pair(plan)
    if isinstance(plan, MidTile):
        return _mid(plan)
    raise TypeError(type(plan))


def _row(plan: RowPlan, few: bool) -> tuple[ProductCase, ProductCase]:
    first, second = ROWS[plan.codes]
    unit = {"float": 256, "int8": 512, "int4": 128, "float8": 128}.get(plan.codes, 64)
    pairs = "s" if plan.rows == 2 else ""
    alone = "s" if plan.codes == "float" and plan.rows == 2 else ""
    # Several rounds, the last of which is short.
    n = 80 if few else plan.rows * (plan.sms * plan.warps + 9)
    small = ProductCase(1, 32, 8 * unit, first, alone)
    # Long rows have one chain of sums, and short ones two.
    k = 8192 + unit if plan.codes == "int4" else 13 * unit
    return small, ProductCase(1, n, k, second, f"nb{pairs}p" if pairs else "nbrp")


def _tile(plan: TilePlan, few: bool) -> tuple[ProductCase, ProductCase]:
    first, second = TILES[plan.codes]
    bits = {"float": 16, "int8": 8, "float8": 8}.get(plan.codes.split()[0], 4)
    if plan.k_warp:
        unit = plan.split * plan.k_warp
        k, odd_k = 8 * unit, 11 * unit
        m = 5 if plan.k_warp == 512 else 13
    else:
        k, odd_k, m = 8 * 512 // bits, 43 * 512 // bits, 3
    # A norm wants all of K in one block or cluster.
    whole = "br" if plan.apart else "nbrp"
    n = 80 if few else 16 * (plan.clusters + 5)
    tokens = [size for size in (m, 7, 3, 2, 1) if size <= min(m, plan.tokens)]
    odd = (
        ProductCase(size, n, columns, second, around)
        for columns in (odd_k, k)
        for around in (whole, whole.replace("r", ""), "")
        for size in tokens
    )
    small = ProductCase(1, 32, k, first)
    return small, next((case for case in odd if _fits(plan, case)), small)


def _fits(plan: TilePlan, case: ProductCase) -> bool:
    """Whether shared memory holds a tile of the case."""
    # The values of weights decide nothing, so a weight of 32 rows stands for one of n.
    x, w, given = operands(dataclasses.replace(case, n=32))
    w = jax.tree.map(lambda v: jax.ShapeDtypeStruct((case.n, *v.shape[1:]), v.dtype), w)
    try:
        plan.divide(call_of(case, x, w, given))
    except AssertionError:
        return False
    return True


def _weight(plan: WeightTile, few: bool) -> tuple[ProductCase, ProductCase]:
    name = plan.codes
    if plan.block >= CODES_K:
        names = (name, f"{name}, zeros")
    else:
        names = (STORED if plan.stored else UNSTORED).get(name, (name, name))
    is_few = plan.tokens <= 64 and plan.store == 16
    m, odd_m = (3, plan.tokens - 5) if is_few else (plan.tokens + 3, 2 * plan.tokens + 5)
    n = plan.rows * plan.cluster
    small_n = 80
    odd_n = 2 * n + 16 if few else 3 * n + 16
    ks = (k for k in itertools.count(2048, 128) if plan.divides(k))
    k = next(ks)
    odd = next(k for k in ks if plan.stored is False or k % 2048 == 0)
    return ProductCase(m, small_n, k, names[0]), ProductCase(odd_m, odd_n, odd, names[1], "b")


def _pair(plan: PairTile) -> tuple[ProductCase, ProductCase]:
    m, odd_m = (5, 61) if plan.m == 64 else (70, 3 * plan.m + 5)
    n, k = 3 * plan.n * plan.cluster + 16, 1024
    odd_k = 3072 if plan.split == 2 or "float8 " in plan.codes else 1152
    if plan.codes == "float8 blocks":
        n = -(-n // 128) * 128
    small = 128 if plan.codes == "float8 blocks" else 32
    return ProductCase(m, small, k, plan.codes), ProductCase(odd_m, n, odd_k, plan.codes, "b")


def _mid(plan: MidTile) -> tuple[ProductCase, ProductCase]:
    k = 128 * plan.parts * 4
    # Tiles of 128 rows of x take codes of 8 bits alone.
    small = ProductCase(17, 32, k, "w8-g128" if plan.tokens == 128 else "w4-g128-zero")
    return small, ProductCase(plan.tokens + 21, 3 * plan.rows + 32, 3 * k, "w8-row", "b")


# --- operands -------------------------------------------------------------------------------------


def _codes_of_rows(shape: tuple[int, int], dtype: str, groups: int, seed: int) -> QTensor:
    rng = np.random.default_rng(seed)
    q = np.clip(rng.normal(0, 45, shape), -127, 127)
    q = np.round(q) if dtype == "int8" else q
    return QTensor(as_jax(q, dtype), as_jax(rng.uniform(0.01, 0.03, (shape[0], groups)), F32))


def operands(case: ProductCase) -> tuple[Any, Any, dict[str, Any]]:
    """Return x, w, and what is given around their product."""
    m, n, k, name = case.m, case.n, case.k, case.weight
    bias = {"bias": activations((n,), F32, 2)} if "b" in case.around else {}
    if " x " in name:
        dtype = "int8" if "x int8" in name else "float8_e4m3fn"
        return _codes_of_rows((m, k), dtype, 1, 1), _int4(case), bias
    if name.split()[0] in ("int8", "float8"):
        dtype = "int8" if name == "int8" else "float8_e4m3fn"
        groups = k // 128 if " " in name else 1
        w = _codes_of_rows((n, k), dtype, groups, 3)
        if name.endswith("blocks"):
            scale = np.repeat(wide(w.scale)[::128], 128, axis=0)
            w = QTensor(w.q, as_jax(scale, BF16), blocked="bfloat16")
        return _codes_of_rows((m, k), dtype, groups, 1), w, bias
    x = activations((m, k), BF16)
    given = extras(m, n // 2 if "s" in case.around else n, k, BF16, case.around) | bias
    if "p" in case.around:
        given["pending"] = activations((m, k), F32, 9)
    return x, weight("plain" if name == "float" else name, n, k, BF16), given


def _int4(case: ProductCase) -> QTensor:
    """int4 in groups of 128, in two levels of scales if the case says so."""
    rng = np.random.default_rng(7)
    q, groups = codes((case.n, case.k), "int4"), (case.n, case.k // 128)
    zero = None
    if "zeros" in case.weight:
        zero = as_jax(rng.integers(-8, 8, groups), jnp.int8)
    if "levels" in case.weight:
        scale = as_jax(rng.integers(1, 9, groups), jnp.int8)
        unit = as_jax(rng.uniform(0.001, 0.003, (case.n, 1)), F32)
        return QTensor(q, scale, zero, unit=unit)
    return QTensor(q, as_jax(rng.uniform(0.01, 0.03, groups), BF16), zero)


def call_of(case: ProductCase, x: Any, w: Any, given: dict[str, Any]) -> MatmulCall:
    """Return the call as a planner sees it."""
    more = {key: v for key, v in given.items() if key not in ("norm", "swiglu", "activation")}
    if "norm" in given:
        more |= {"gamma": given["norm"][0], "eps": given["norm"][1]}
    fixed = {key: given[key] for key in ("swiglu", "activation") if key in given}
    return MatmulCall.of(x, w, BF16, **more, **fixed)


def run(plan: Any, call: MatmulCall, x: Any, w: Any, given: dict[str, Any]) -> Any:
    """Compute the product by the plan's kernel."""
    arrays = {name: given.get(name) for name in ("bias", "residual", "pending")}
    around = call.work(gamma=given.get("norm", (None, None))[0], **arrays)
    return choice.run(Static(BF16, call, plan), x, w, around)


def reference(plan: Any, x: Any, w: Any, given: dict[str, Any]) -> np.ndarray:
    """Return the product in float64; x is rounded with the pending sum, as the op says."""
    if isinstance(x, QTensor):
        return product(x, w, given.get("bias"))
    given = dict(given)
    if (pending := given.pop("pending", None)) is not None:
        x = as_jax((wide(x) + wide(pending)).astype(np.float32), x.dtype)
    # Beside these codes of one row, x times the norm's weight is closer than bfloat16.
    if isinstance(plan, RowPlan) and plan.codes in ("float", "int8", "int4"):
        x = wide(x)
    return fused_product(x, w, **given)


def program(plan: Any, case: ProductCase) -> tuple[Any, tuple[Any, ...]]:
    """Return a function that runs the plan's kernel, and its operands."""
    x, w, given = operands(case)
    static = {key: v for key, v in given.items() if key in ("swiglu", "activation")}
    arrays = {key: v for key, v in given.items() if key not in static and key != "norm"}
    eps = None
    if "norm" in given:
        arrays["gamma"], eps = given["norm"]
    call = call_of(case, x, w, given)

    def f(x: Any, w: Any, arrays: dict[str, Any]) -> Any:
        more = {key: v for key, v in arrays.items() if key != "gamma"} | static
        if eps is not None:
            more["norm"] = arrays["gamma"], eps
        return run(plan, call, x, w, more)

    return f, (x, w, arrays)
