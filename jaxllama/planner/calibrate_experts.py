"""Calibration of experts that lie one by one, on this machine.

    measure_experts(cfg, model, kv_dtype, chunk) -> ExpertCosts
    measured_use(lm, tokens) -> ExpertUse        how often these tokens pass each expert

Steps of one small model are timed under policies that place its experts one by one, in the form
that a run has. Each series gives the seconds of a layer:

    hot          all experts on the device: ``layer``
    wait         the same, while the host reads the routers' choices: ``wait``. If the CPU gets its
                 experts by mail, the host reads nothing
    link         none or half on the device, all others loaded: ``load``
    CPU          none on the device, all computed by the CPU: ``cpu``, beyond ``wait``
    both         divided between them by the two costs: ``both``, beyond ``wait``

Steps of the first three are timed at two depths, because what a step has besides its layers differs
between them: the host dispatches layers while the link is busy, and not while it waits. The runs
count the experts that they load and compute, so the fit does not assume how the random router
chooses. Rows sample their tokens, because greedy rows of a random model become alike.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.offload.expert_places import ExpertUse
from jaxllama.offload.policy import Policy
from jaxllama.planner.experts import ExpertCosts
from jaxllama.planner.fitting import nnls
from jaxllama.planner.trial import given_run, random_run, spread_routes, timed_step
from pallas_kernels.cpu import unavailable

EXPERT_ROWS = (1, 16)
CPU_ROWS = (1, 4, 16)  # three, for a layer, an expert and a further token of it
CONTEXT, ROOM = 1, 63  # a prompt of one token has a step's programs
WARM, STEPS, LEAST = 8, 40, 12  # steps; at least ``LEAST``, and more for ``SECONDS``
SECONDS = 0.5
COMPUTES = 1e-6  # the ratio of costs that leaves all experts to the CPU
EVERYWHERE = Policy.parse(f"100 0 100 0 100 0 gpu_batch_size={EXPERT_ROWS[-1]}")


class StepPoint(NamedTuple):
    """Seconds of a step, and by layer: experts loaded, computed, and further tokens of these."""

    seconds: float
    loads: float
    computed: float
    extra: float


def measure_experts(
    cfg: ModelConfig,
    model: Callable[[Policy], LanguageModel],
    kv_dtype: DTypeLike,
    chunk: int,
    tell: Callable[[str, list[StepPoint]], object] = lambda *_: None,
    computes: bool = True,
) -> ExpertCosts:
    """Return the costs of ``cfg``'s layers, all of which have experts.

    model: makes a model of ``cfg`` with random weights under a policy.
    tell: called with the name and the points of each series.
    computes: measure the CPU too, if it has handlers. Without them floats are slow.
    """
    hot = dataclasses.replace(EVERYWHERE, experts="100/0")
    half = dataclasses.replace(EVERYWHERE, experts="50/50")
    cold = dataclasses.replace(EVERYWHERE, experts="0/100", cpu_expert=COMPUTES)
    computes = computes and unavailable() is None
    if not computes:
        cold = dataclasses.replace(cold, cpu_expert=0.0)

    def points(
        name: str,
        lm: LanguageModel,
        rows: Sequence[int] = EXPERT_ROWS,
        waits: bool = False,
        **changes: Any,
    ) -> list[StepPoint]:
        changed = offloaded(lm.executor).with_policy(**changes)
        lm = dataclasses.replace(lm, executor=changed)
        found = [_point(lm, row, kv_dtype, chunk, waits) for row in rows]
        tell(name, found)
        return found

    def by_layer(
        name: str,
        lm: LanguageModel,
        rows: Sequence[int] = EXPERT_ROWS,
        waits: bool = False,
        **changes: Any,
    ) -> list[float]:
        """Return the seconds of a layer of further layers."""
        less = dataclasses.replace(lm, config=shallow)
        short = points(f"{name}, one layer", less, rows, waits, **changes)
        found.append(points(name, lm, rows, waits, **changes))
        return _beyond(found[-1], short, layers - 1)

    def spread(policy: Policy) -> LanguageModel:
        lm = model(policy)
        return dataclasses.replace(lm, params=spread_routes(lm.params, cfg))

    layers, shallow = cfg.n_layers, cfg.first_layers(1)
    of_rows = [(1.0, rows) for rows in EXPERT_ROWS]
    found: list[list[StepPoint]] = []
    lm = spread(hot)
    layer = nnls(of_rows, by_layer("hot", lm))
    waits = not (computes and offloaded(lm.executor).store.fetches)  # or the CPU gets mail
    seconds = by_layer("wait", lm, rows=CPU_ROWS, waits=waits)
    wait = nnls([(1.0, rows) for rows in CPU_ROWS], seconds)
    waiting = found[-1]
    del lm
    lm = spread(cold)
    seconds = by_layer("link", lm, cpu_expert=0.0)
    loads = [point.loads for point in found[-1]]
    seconds += by_layer("half", spread(half))
    loads += [point.loads for point in found[-1]]
    load = nnls([(1.0, expert_load) for expert_load in loads], seconds)
    if not computes:
        return ExpertCosts(layer, wait, load, (), ())
    computed = points("CPU", lm, CPU_ROWS)
    # An expert costs at least what a further token of it does.
    terms = [(1.0, point.computed, point.computed + point.extra) for point in computed]
    visit, expert, token = nnls(terms, _beyond(computed, waiting, layers))
    costs = ExpertCosts(layer, wait, load, (visit, expert + token, token), (0.0, 0.0))
    both = points("both", lm, CPU_ROWS, False, **costs.of_policy)
    return dataclasses.replace(costs, both=_both(costs, both, _beyond(both, waiting, layers)))


def measured_use(lm: LanguageModel, tokens: np.ndarray) -> ExpertUse:
    """Return how often rows of tokens ``[B, T]`` pass each expert, in one prefill.

    lm: loaded with a policy that places experts one by one.
    """
    width = tokens.shape[1]
    run = given_run(lm, tokens, 1, width + 1, lm.dtype, width)
    run.experts.counts_all = True
    run.step()
    assert lm.config.experts is not None
    return ExpertUse.of_counts(run.experts.counts, lm.config.experts.n_active)


def _beyond(points: Sequence[StepPoint], base: Sequence[StepPoint], layers: int) -> list[float]:
    """Return the seconds of a layer beyond those of ``base``."""
    pairs = zip(points, base, strict=True)
    return [max(1e-9, (point.seconds - baseline.seconds) / layers) for point, baseline in pairs]


def _both(
    costs: ExpertCosts, points: Sequence[StepPoint], seconds: Sequence[float]
) -> tuple[float, ...]:
    """Return what a layer of both adds, and the share of the shorter of both that is not hidden."""
    from scipy.optimize import lsq_linear

    terms, rest = [], []
    waited = costs.seconds(0, 0, 0.0)
    for point, taken in zip(points, seconds, strict=True):
        if point.loads and point.computed:
            link = costs.seconds(point.loads, 0, 0.0) - waited
            cpu = costs.seconds(0, point.computed, point.extra) - waited
            terms.append((1.0, min(link, cpu)))
            rest.append(taken - max(link, cpu))
    if not terms:
        return 0.0, 0.0
    found = lsq_linear(np.array(terms), np.array(rest), bounds=([0.0, 0.0], [np.inf, 1.0]))
    return tuple(float(x) for x in found.x)


def _point(lm: LanguageModel, rows: int, kv_dtype: DTypeLike, chunk: int, waits: bool) -> StepPoint:
    capacity, spread = CONTEXT + ROOM, Sampling(temperature=100.0)
    run = random_run(lm, rows, CONTEXT, ROOM, capacity, kv_dtype, chunk, spread)
    run.experts.counts_all = waits
    for _ in range(WARM):
        timed_step(run)
    run.experts.reset()
    times: list[float] = []
    while len(times) < LEAST or (len(times) < STEPS and sum(times) < SECONDS):
        times.append(timed_step(run))
    count, (computed, pairs) = lm.config.n_layers * len(times), run.experts.computed
    return StepPoint(
        statistics.median(times),
        run.experts.loads / count,
        computed / count,
        (pairs - computed) / count,
    )
