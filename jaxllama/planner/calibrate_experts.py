"""Calibration of experts that lie one by one, on this machine.

    measure_experts(cfg, model, kv_dtype, chunk) -> ExpertCosts
    measured_use(lm, tokens) -> ExpertUse        how often these tokens pass each expert

Steps of one small model are timed under policies that place its experts one by one. Their
differences, a layer, are fitted:

    hot          all experts on the device, at two depths: ``layer``
    link         none on the device, all loaded: ``load``
    CPU          none on the device, all computed by the CPU: ``cpu``
    both         divided between them by the two costs: ``beside``

The runs count the experts that they load and compute, so the fit does not assume how the random
router chooses. Rows sample their tokens, because greedy rows of a random model become alike.
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

EXPERT_ROWS = (1, 4, 16)
CONTEXT, ROOM = 32, 64
WARM, STEPS = 6, 12
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
    cold = dataclasses.replace(EVERYWHERE, experts="0/100", cpu_expert=COMPUTES)
    computes = computes and unavailable() is None
    if not computes:
        cold = dataclasses.replace(cold, cpu_expert=0.0)

    def points(name: str, lm: LanguageModel, **changes: Any) -> list[StepPoint]:
        changed = offloaded(lm.executor).with_policy(**changes)
        lm = dataclasses.replace(lm, executor=changed)
        found = [_point(lm, rows, kv_dtype, chunk) for rows in EXPERT_ROWS]
        tell(name, found)
        return found

    def spread(policy: Policy) -> LanguageModel:
        lm = model(policy)
        return dataclasses.replace(lm, params=spread_routes(lm.params, cfg))

    lm, layers = spread(hot), cfg.n_layers
    warm = points("hot", lm)
    shallow = cfg.first_layers(1)
    short = points("one layer", dataclasses.replace(lm, config=shallow))
    layer = nnls([(1.0, rows) for rows in EXPERT_ROWS], _beyond(warm, short, layers - 1))
    del lm
    lm = spread(cold)
    loaded = points("link", lm, cpu_expert=0.0)
    load = nnls([(1.0, point.loads) for point in loaded], _beyond(loaded, warm, layers))
    if not computes:
        return ExpertCosts(layer, load, (), 0.0)
    computed = points("CPU", lm)
    cpu = nnls(
        [(1.0, point.computed, point.extra) for point in computed],
        _beyond(computed, warm, layers),
    )
    costs = ExpertCosts(layer, load, cpu, 0.0)
    both = points("both", lm, **costs.of_policy)
    return dataclasses.replace(costs, beside=_beside(costs, both, _beyond(both, warm, layers)))


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
    return [max(1e-9, (point.seconds - own.seconds) / layers) for point, own in pairs]


def _beside(costs: ExpertCosts, points: Sequence[StepPoint], seconds: Sequence[float]) -> float:
    """Return the share of the shorter of link and CPU that was not hidden."""
    shares = []
    for point, taken in zip(points, seconds, strict=True):
        if point.loads and point.computed:
            link = costs.seconds(point.loads, 0, 0.0)
            cpu = costs.seconds(0, point.computed, point.extra)
            shares.append((taken - max(link, cpu)) / max(min(link, cpu), 1e-9))
    return float(np.clip(statistics.fmean(shares), 0.0, 1.0)) if shares else 0.0


def _point(lm: LanguageModel, rows: int, kv_dtype: DTypeLike, chunk: int) -> StepPoint:
    capacity, spread = CONTEXT + ROOM, Sampling(temperature=100.0)
    run = random_run(lm, rows, CONTEXT, ROOM, capacity, kv_dtype, chunk, spread)
    for _ in range(WARM):
        timed_step(run)
    run.experts.reset()
    run.experts.counts_all = True  # a layer with all of its experts on the device waits too
    times = [timed_step(run) for _ in range(STEPS)]
    work, layers = run.experts, lm.config.n_layers
    return StepPoint(
        sorted(times)[len(times) // 4],
        work.loads / layers / STEPS,
        work.computed / layers / STEPS,
        (work.computed_pairs - work.computed) / layers / STEPS,
    )
