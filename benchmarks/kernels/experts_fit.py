"""Fits the costs of ``grouped_matmul``'s forms to measured times, and checks what they choose.

    python -m benchmarks.kernels.experts --json times.jsonl     on the GPU: one line for a form
    python -m benchmarks.kernels.experts_fit times.jsonl        prints the time lost by the choices;
                                                                --card NAME writes the costs
                                                                into the card's table

A form has one start, a cost for the bytes of each kind of codes, and "blocks" one for a block.  The
device's rate of products and the rows' bytes are not fitted.  The check is made twice: with the fit
to all times, and for each shape with a fit to those of the other shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.card_file import write_costs
from pallas_kernels.cards.architecture import MEASURED
from pallas_kernels.cards.table import KernelCost
from pallas_kernels.device import gpu_named
from pallas_kernels.experts import plan
from pallas_kernels.qtensor import QTensor

FORMS: tuple[Any, ...] = (*plan.XLA_FORMS, "mosaic", "tiles", "summed")
OUTLIER = 0.1  # relative error from which a time counts less


class ExpertsCase(NamedTuple):
    card: str  # the device's kind
    shape: tuple[int, int, int, int]  # experts, chosen by a token, rows and columns of one
    scheme: str
    tokens: int
    rows: int  # of x

    @property
    def pairs(self) -> int:
        return self.tokens * self.shape[1]

    @property
    def gated(self) -> bool:
        """Only the product of gate and up has one row of x for all pairs of a token."""
        return self.rows == self.tokens

    def weight(self) -> Any:
        """The weight's shapes, as ``benchmarks.kernels.experts`` makes it."""
        n_experts, _, n, k = self.shape
        of = lambda width, dtype: jax.ShapeDtypeStruct((n_experts, n, width), dtype)  # noqa: E731
        if self.scheme == "bf16":
            return of(k, jnp.bfloat16)
        if self.scheme == "w8":
            return QTensor(of(k, jnp.int8), of(1, jnp.float32))
        if self.scheme == "mxfp4":
            return QTensor(of(k, jnp.float4_e2m1fn), of(k // 32, jnp.float8_e8m0fnu))
        return QTensor(of(k, jnp.int4), of(k // 128, jnp.bfloat16), of(k // 128, jnp.int8))


Times = dict[ExpertsCase, dict[str, float]]


def read(path: str) -> Times:
    """Microseconds by case and form."""
    times: Times = {}
    with open(path) as lines:
        for line in lines:
            row = json.loads(line)
            form, us = row.pop("form"), row.pop("us")
            case = ExpertsCase(**row | {"shape": tuple(row["shape"])})
            times.setdefault(case, {})[form] = us
    return times


@contextlib.contextmanager
def table(card: str, costs: dict[str, KernelCost] | None = None) -> Iterator[None]:
    """Predictions for a card, with other costs than the device's if given."""
    before = plan.gpu
    device = gpu_named(card)
    device = device if costs is None else dataclasses.replace(device, costs=costs)
    plan.gpu = lambda: device
    try:
        yield
    finally:
        plan.gpu = before


def fit(times: Times) -> dict[str, KernelCost]:
    """The device's costs, with those of these forms replaced by the ones of least error."""
    costs = dict(gpu_named(MEASURED.name).costs)
    for form in FORMS:
        rows = [(work(form, case), found[form]) for case, found in times.items() if form in found]
        costs |= fit_form(rows)
    return costs


def work(form: Any, case: ExpertsCase) -> plan.FormWork:
    """A form's amounts on the card that was measured."""
    with table(case.card):
        return plan.form_work(form, case.weight(), case.pairs, case.rows, case.gated)


def fit_form(rows: list[tuple[plan.FormWork, float]]) -> dict[str, KernelCost]:
    """One form's costs by family: a common start and cost of a block, a rate for each family."""
    from scipy.optimize import least_squares

    families = sorted({work.family for work, _ in rows})
    amounts = np.zeros((len(rows), 2 + len(families)))
    fixed = np.zeros(len(rows))
    for i, (work, _) in enumerate(rows):
        is_blocks = len(work.amounts) == 3
        amounts[i, 0] = 1.0
        amounts[i, 1] = work.amounts[0] if is_blocks else 0.0
        amounts[i, 2 + families.index(work.family)] = work.amounts[is_blocks]
        fixed[i] = sum(work.amounts[1 + is_blocks :])
    us = np.array([us for _, us in rows])
    errors = lambda logs: np.log((amounts @ np.exp(logs) + fixed) / us)  # noqa: E731
    begin = np.log([3.0, 5.0, *[1.0] * len(families)])
    least = [0.0, *[-np.inf] * (len(begin) - 1)]  # a form starts for a microsecond at least
    found = least_squares(errors, begin, bounds=(least, np.inf), loss="soft_l1", f_scale=OUTLIER)
    start, block, *rates = (float(f"{cost:.3g}") for cost in np.exp(found.x))
    made = {}
    for family, rate in zip(families, rates, strict=True):
        count = max(len(work.amounts) for work, _ in rows)
        serial = {1: (rate,), 2: (rate, 1.0), 3: (block, rate, 1.0)}[count]
        made[family] = KernelCost(start, serial)
    return made


Lost = tuple[float, str, ExpertsCase]


def lost(found: dict[str, float], case: ExpertsCase, costs: dict[str, KernelCost] | None) -> Lost:
    """Share of time that the choice loses beside the best of the measured forms, and the choice."""
    w = case.weight()
    forms = [form for form in found if form != "every" or plan.has_every(w, case.rows)]
    with table(case.card, costs):
        amounts = w, case.pairs, case.rows, case.gated
        best = min(forms, key=lambda form: plan.form_us(form, *amounts))
    return found[best] / min(found[form] for form in forms) - 1, best, case


def losses(
    times: Times, cases: Iterable[ExpertsCase], costs: dict[str, KernelCost] | None = None
) -> list[Lost]:
    """``lost`` of the cases that have a choice, by the device's costs or others."""
    return [lost(times[case], case, costs) for case in cases if len(times[case]) > 1]


def losses_of_unseen_shapes(times: Times) -> list[Lost]:
    """``lost`` of every case, by a fit to the times of the other shapes."""
    made = []
    for shape in sorted({case.shape for case in times}):
        others = {case: found for case, found in times.items() if case.shape != shape}
        made += losses(times, [case for case in times if case.shape == shape], fit(others))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times")
    parser.add_argument("--card", help="name of the card in pallas_kernels/cards/architecture.py")
    args = parser.parse_args()
    times = read(args.times)
    costs = fit(times)
    if args.card is not None:
        own = {family: cost for family, cost in costs.items() if family.startswith("experts ")}
        write_costs(args.card, own)
    fitted = losses(times, times, costs)
    for name, found in (("fitted", fitted), ("unseen shape", losses_of_unseen_shapes(times))):
        shares = [share for share, *_ in found]
        print(
            f"{name}: {len(shares)} cases lose {statistics.mean(shares):.1%}, at most "
            f"{max(shares):.0%}"
        )
        for share, form, case in found:
            if share > 0.05:
                print(f"    {share:5.0%} by {form}: {case}")


if __name__ == "__main__":
    main()
