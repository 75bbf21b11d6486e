"""Calibration of experts that lie one by one, on this machine.

    measure_experts(cfg, model, kv_dtype, chunk) -> ExpertCosts
    measured_use(lm, tokens) -> ExpertUse        how often these tokens pass each expert

Steps of one small model are timed under policies that place its experts one by one, in the form
that a run has. Each series gives the seconds of a layer:

    hot             all experts on the device: ``layer``
    link            none on the device, all loaded: ``load``
    link, slots     half on the device, the others loaded: ``slots``
    CPU             none on the device, all computed by the CPU: ``cpu``
    CPU, slots      half on the device, the others computed by the CPU: ``slots``
    CPU, prompt     none on the device, a prompt's all computed by the CPU: ``prompt``
    both            none on the device, divided by the costs of link and CPU: ``both``

Steps are timed at two depths, because what a step has besides its layers differs between the
series: the host dispatches layers while the link is busy, and not while it waits. A shared host's
speed changes within a second by half, and the differences would be that noise. So a series' steps
are timed in turns, and each point is its fastest turn's median. The runs count the experts that
they load and compute, so the fit does not assume how the random router chooses. Rows sample their
tokens, because greedy rows of a random model become alike.
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
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.language_model import LanguageModel
from jaxllama.offload.expert_places import ExpertUse
from jaxllama.offload.policy import ALL_ON_CPU, CPU_PAIRS, Policy
from jaxllama.planner.experts import ExpertCosts
from jaxllama.planner.fitting import nnls
from jaxllama.planner.trial import given_run, random_run, spread_routes, timed_step
from pallas_kernels.cpu import unavailable

EXPERT_ROWS = (1, 16)
CPU_ROWS = (1, 4, 16)  # three, for a layer, an expert and a further token of it
PROMPT, PROMPTS = 512, 2  # tokens, and how often they are timed
CONTEXT, ROOM = 1, 127  # a prompt of one token has a step's programs
WARM, STEPS, LEAST = 8, 27, 3  # steps; of a turn at least ``LEAST``, and more for ``SECONDS``
SECONDS, TURNS = 0.1, 4
EVERYWHERE = Policy.parse(f"100 0 100 0 100 0 gpu_batch_size={EXPERT_ROWS[-1]}")


class StepPoint(NamedTuple):
    """Seconds of a step, and by layer: experts loaded, computed, and further tokens of these."""

    seconds: float
    loads: float
    computed: float
    extra: float


class Series(NamedTuple):
    """Steps of a model by rows. seconds: of one of the layers that the shallow model lacks. whole:
    of the step, by layers, to which the errors of ``seconds`` are in proportion.
    """

    points: Sequence[StepPoint]
    seconds: np.ndarray
    whole: np.ndarray


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
    assert cfg.experts is not None
    hot = dataclasses.replace(EVERYWHERE, experts="100/0")
    computes = computes and unavailable() is None
    # Experts that the CPU may compute lie in its layout, also where the link loads them.
    cold = dataclasses.replace(
        EVERYWHERE, experts="0/100", cpu_expert=ALL_ON_CPU if computes else 0.0
    )
    half = dataclasses.replace(cold, experts="50/50")

    def by_layer(
        name: str,
        lm: LanguageModel,
        rows: Sequence[int] = EXPERT_ROWS,
        a_row: float = 0.0,
        **changes: Any,
    ) -> Series:
        """Return the steps without what each row takes beside the experts, ``a_row``."""
        lm = dataclasses.replace(lm, executor=offloaded(lm.executor).with_policy(**changes))
        lms = dataclasses.replace(lm, config=shallow), lm
        points = _timed_points([(each, row) for each in lms for row in rows], kv_dtype, chunk)
        short, long = points[: len(rows)], points[len(rows) :]
        tell(f"{name}, shallow", short)
        tell(name, long)
        seconds = np.array([[point.seconds for point in found] for found in (long, short)])
        layers = cfg.n_layers - shallow.n_layers
        return Series(
            long,
            (seconds[0] - seconds[1]) / layers - a_row * np.array(rows),
            np.array([point.seconds / cfg.n_layers for point in long]),
        )

    def spread(policy: Policy) -> LanguageModel:
        lm = model(policy)
        return dataclasses.replace(lm, params=spread_routes(lm.params, cfg))

    def added(found: Series, terms: Sequence[Sequence[float]], costs: Sequence[float]) -> float:
        """Return what a layer of the series adds to its costs."""
        rest = found.seconds - np.array(terms) @ np.array(costs)
        return nnls([(1.0,)] * len(rest), rest, found.whole)[0]

    shallow = cfg.first_layers(depths(cfg)[0])
    found = by_layer("hot", spread(hot))
    layer = nnls([(1.0, rows) for rows in EXPERT_ROWS], found.seconds, found.whole)
    cold_lm, half_lm = spread(cold), spread(half)
    found = by_layer("link", cold_lm, cpu_expert=0.0)
    load = nnls(_loaded(found), found.seconds, found.whole)
    found = by_layer("link, slots", half_lm, cpu_expert=0.0)
    slots = added(found, _loaded(found), load)
    if not computes:
        return ExpertCosts(layer, load, (), (), (slots, 0.0), (0.0, 0.0))
    by_cpu = [min(rows, CPU_PAIRS // cfg.experts.n_active) for rows in CPU_ROWS], layer[1]
    prompt = _prompt_seconds(dataclasses.replace(cold_lm, config=shallow), kv_dtype, chunk)
    tell("CPU, prompt", [StepPoint(prompt, 0.0, 0.0, 0.0)])
    cpu = _cpu_costs(by_layer("CPU", cold_lm, *by_cpu), prompt)
    found = by_layer("CPU, slots", half_lm, *by_cpu)
    both_slots = slots, added(found, _computed(found), cpu)
    visit, expert, token = cpu
    cpu = visit, expert + token, token
    costs = ExpertCosts(layer, load, cpu, (prompt,), both_slots, (0.0, 0.0))
    found = by_layer("both", cold_lm, *by_cpu, **costs.of_policy)
    return dataclasses.replace(costs, both=_both(costs, found))


def _prompt_seconds(lm: LanguageModel, kv_dtype: DTypeLike, chunk: int) -> float:
    """Return what a token and expert of a prompt take whose experts the CPU computes."""
    costs = {"cpu_expert": ALL_ON_CPU, "cpu_token": ALL_ON_CPU}  # else long prompts are loaded
    lm = dataclasses.replace(lm, executor=offloaded(lm.executor).with_policy(**costs))
    found = []
    for _ in range(1 + PROMPTS):
        run = random_run(lm, 1, PROMPT, 2, PROMPT + 2, kv_dtype, chunk)
        found.append(timed_step(run) / run.experts.computed[1])
    return min(found[1:])


def _loaded(found: Series) -> list[tuple[float, float]]:
    """Return the terms of the costs ``load`` for each point."""
    return [(1.0, point.loads) for point in found.points]


def _computed(found: Series) -> list[tuple[float, float, float]]:
    """Return the terms of the costs ``cpu``: an expert costs what a token does, and more."""
    return [(1.0, point.computed, point.computed + point.extra) for point in found.points]


def _cpu_costs(found: Series, prompt: float) -> tuple[float, ...]:
    """Return the coefficients of ``_computed``'s terms. Even use has few further tokens, whose cost
    noise can hide; it is at most ``prompt``, that of a prompt's."""
    terms = _computed(found)
    costs = nnls(terms, found.seconds, found.whole)
    if costs[2] <= prompt:
        return costs
    rest = found.seconds - prompt * np.array([pairs for *_, pairs in terms])
    return *nnls([own[:2] for own in terms], rest, found.whole), prompt


def depths(cfg: ModelConfig) -> tuple[int, int]:
    """Return the numbers of layers at which steps are timed."""
    return max(1, cfg.n_layers // 3), cfg.n_layers


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


def _both(costs: ExpertCosts, found: Series) -> tuple[float, ...]:
    """Return what a layer of both adds, and a second of the shorter of both."""
    terms, rest, whole = [], [], []
    for point, taken, step in zip(found.points, found.seconds, found.whole, strict=True):
        if point.loads and point.computed:
            link = point.loads * costs.load[1]
            cpu = costs.on_cpu(point.computed, point.extra)
            terms.append((1.0, min(link, cpu)))
            rest.append(taken - costs.cpu[0] - max(link, cpu))
            whole.append(step)
    return nnls(terms, np.array(rest), np.array(whole)) if terms else (0.0, 0.0)


def _timed_points(
    of: Sequence[tuple[LanguageModel, int]], kv_dtype: DTypeLike, chunk: int
) -> list[StepPoint]:
    """Return a point of each model and number of rows; all are timed in turns."""
    capacity, spread = CONTEXT + ROOM, Sampling(temperature=100.0)
    runs = [
        random_run(lm, rows, CONTEXT, ROOM, capacity, kv_dtype, chunk, spread) for lm, rows in of
    ]
    for run in runs:
        for _ in range(WARM):
            timed_step(run)
        run.experts.reset()
    turns: list[list[list[float]]] = [[] for _ in runs]
    for _ in range(TURNS):
        for run, found in zip(runs, turns, strict=True):
            times: list[float] = []
            while len(times) < LEAST or (len(times) < STEPS and sum(times) < SECONDS):
                times.append(timed_step(run))
            found.append(times)
    return [_point(*each) for each in zip(runs, turns, strict=True)]


def _point(run: OffloadRun, turns: list[list[float]]) -> StepPoint:
    count = run.cfg.n_layers * sum(len(times) for times in turns)
    computed, pairs = run.experts.computed
    return StepPoint(
        min(statistics.median(times) for times in turns),
        run.experts.loads / count,
        computed / count,
        (pairs - computed) / count,
    )
