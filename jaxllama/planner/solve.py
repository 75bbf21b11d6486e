"""The solver: finds the fastest policy under limits of device, host and disk.

    solve(cfg, calibration, task, limits, settings) -> Policy

A mixture's experts may also lie one by one. Then the device has slots for as many as fit, beside
dense parts that are on the device or stream. The rest is on the host, or on disk if that is full.
Long prompts then pass in longer pieces, where that is faster than more slots.

It tries batch sizes and numbers of batches. For each, a linear program (scipy) finds the shares
that minimise a step under the limits. The solver rounds the solution to whole percents, checks it
against the exact ``footprint`` and improves it by exact neighbours. It also tries each with
attention on the CPU. It never chooses sparse attention, which changes the model's output. Costs and
policy use the configuration's ``attn_sparsity``.

Source: FlexGen (arXiv 2303.06865), section 4.3.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers import keeps_tokens
from jaxllama.offload.policy import ALL_ON_CPU, PERCENTAGES, Policy
from jaxllama.offload.units import check_halves
from jaxllama.planner.cost import (
    KINDS,
    LANES,
    MemoryLimits,
    PlannerSettings,
    Task,
    need_of,
    predict,
    program_bytes,
)
from jaxllama.planner.fitting import Calibration

_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCHES = (1, 2, 4, 8, 16)
_PIECES = (2048, 8192)  # tokens of a prompt, for which a layer's experts are loaded once


def solve(
    cfg: ModelConfig,
    costs: Calibration,
    task: Task,
    limits: MemoryLimits,
    settings: PlannerSettings,
    base: Policy | None = None,
    expert_use: str = "",
) -> Policy:
    """Return the fastest policy within the limits.

    expert_use: file of the experts' measured use (``offload.expert_places``).
    base: the options that are not searched: overlap, sep_layer, compression, sparsity, and
        attention on the CPU if it is set.

    Raises JaxLlamaError if no policy fits, or the base does not fit the model.
    """
    base = Policy() if base is None else base
    check_fits(cfg, base, task, limits, settings)
    moving = dataclasses.replace(base, cpu_attention=False)
    best: tuple[float, Policy] | None = None
    for size, count in itertools.product(_BATCH_SIZES, _BATCHES):
        if size * count > 2 * task.rows and (size, count) != (1, 1):
            continue
        policy = dataclasses.replace(moving, gpu_batch_size=size, num_gpu_batches=count)
        least = _least_device(cfg, base, policy, task, settings)
        if limits.device is not None and least > limits.device:
            continue
        programs = program_bytes(cfg, policy, task, settings)
        found = itertools.chain(
            _candidates(cfg, policy, costs, task, limits, settings, programs),
            one_by_one(cfg, policy, expert_use, costs, task, limits, settings),
        )
        for candidate in itertools.chain.from_iterable(
            _variants(cfg, base, shares) for shares in found
        ):
            own = programs
            if candidate.prefill_batch_size != policy.prefill_batch_size:
                own = program_bytes(cfg, candidate, task, settings)
            if not limits.allow(need_of(cfg, candidate, task, settings, own)):
                continue
            rate = predict(cfg, candidate, costs, task, settings).tokens_per_second
            if best is None or rate > best[0]:
                best = rate, candidate
    if best is None:
        smallest = dataclasses.replace(moving, gpu_batch_size=1, num_gpu_batches=1)
        smallest = _with_shares(smallest, (0, 0, 0, 0, 100, 0))
        need = need_of(cfg, smallest, task, settings, program_bytes(cfg, smallest, task, settings))
        raise JaxLlamaError(
            f"no policy fits: even one row with everything on disk needs "
            f"{need.device / 1e9:.3f} GB on the device, {need.host / 1e9:.3f} GB of host memory "
            f"and {need.disk / 1e9:.3f} GB of disk"
        )
    return best[1]


def check_fits(
    cfg: ModelConfig,
    base: Policy | None,
    task: Task,
    limits: MemoryLimits,
    settings: PlannerSettings,
) -> None:
    """Raise JaxLlamaError if the device is too small for one row, or the base for the model.

    Nothing is measured or compiled.
    """
    base = Policy() if base is None else base
    check_halves(cfg, base)
    smallest = dataclasses.replace(base, cpu_attention=False, gpu_batch_size=1, num_gpu_batches=1)
    least = _least_device(cfg, base, smallest, task, settings)
    if limits.device is not None and least > limits.device:
        raise JaxLlamaError(
            f"no policy fits: even one row with everything on disk needs {least / 1e9:.3f} GB on "
            f"the device, and the limit is {limits.device / 1e9:g} GB"
        )


def _variants(cfg: ModelConfig, base: Policy, policy: Policy) -> Iterator[Policy]:
    """Yield the policy, and with attention on the CPU if the base allows or asks for it."""
    if not base.cpu_attention:
        yield policy
    if policy.cache.device < 100 and any(map(keeps_tokens, cfg.layer_types)):
        on_host = 100 - policy.cache.device
        yield dataclasses.replace(policy, cache_host=on_host, cpu_attention=True)


def _least_device(
    cfg: ModelConfig, base: Policy, policy: Policy, task: Task, settings: PlannerSettings
) -> float:
    """Return at most the bytes that the device needs for these batches.

    Each kind of tensor is all on the device, or not at all. Experts may lie one by one.
    """
    programs = program_bytes(cfg, policy, task, settings)
    forms = [policy]
    if cfg.experts is not None and not policy.experts and not cfg.parallel_block:
        forms.append(dataclasses.replace(policy, experts="0/100"))
    needs = (
        need_of(cfg, candidate, task, settings, programs)
        for form, device in itertools.product(forms, itertools.product((0, 100), repeat=3))
        for shares in [_with_shares(form, tuple(x for share in device for x in (share, 0)))]
        for candidate in _variants(cfg, base, shares)
    )
    return min((need.device for need in needs), default=0)


def _candidates(
    cfg: ModelConfig,
    policy: Policy,
    costs: Calibration,
    task: Task,
    limits: MemoryLimits,
    settings: PlannerSettings,
    programs: int,
) -> Iterator[Policy]:
    """Yield the linear program's rounded solution and its neighbours, and the pure policies."""
    pure = ((100, 0), (0, 100), (0, 0))
    for shares in itertools.product(pure, repeat=3):
        yield _with_shares(policy, tuple(itertools.chain(*shares)))
    found = _linear_program(cfg, policy, costs, task, limits, settings, programs)
    if found is None:
        return
    whole = np.floor(found + 1e-6)
    for shift in itertools.product((0, -1, -3), (0, -1, -3)):
        shares = whole.copy()
        shares[0] = max(0.0, shares[0] + shift[0])
        shares[2] = max(0.0, shares[2] + shift[1])
        yield _with_shares(policy, tuple(shares))
        shares[1::2] = 100 - shares[::2]  # nothing on disk
        yield _with_shares(policy, tuple(shares))
        yield _with_shares(policy, (*shares[:4], 100.0, 0.0))


def one_by_one(
    cfg: ModelConfig,
    policy: Policy,
    expert_use: str,
    costs: Calibration,
    task: Task,
    limits: MemoryLimits,
    settings: PlannerSettings,
) -> Iterator[Policy]:
    """Yield policies whose experts lie one by one, with as many on the device as fit, or none.

    policy: the batches, and all that is not searched.  expert_use: as for ``solve``.
    """
    if cfg.experts is None or costs.experts is None or policy.experts or cfg.parallel_block:
        return
    divides = [{}]
    if costs.experts.cpu:
        divides += [costs.experts.of_policy, {"cpu_expert": ALL_ON_CPU}]
    usual = policy.prefill_batch_size or task.chunk
    longer = () if policy.prefill_batch_size else _PIECES
    pieces = [policy.prefill_batch_size, *(n for n in longer if usual < n < 4 * task.prompt)]
    pure = (100, 0), (0, 100)
    for weights, cache, piece in itertools.product(pure, pure, pieces):
        on_host = _with_shares(policy, (*weights, *cache, 100, 0))
        on_host = dataclasses.replace(on_host, prefill_batch_size=piece)

        def placed(device: int, host: int, on_host: Policy = on_host) -> Policy:
            """``device`` and ``host`` in tenths of a percent."""
            experts = f"{device / 10:g}/{host / 10:g}"
            return dataclasses.replace(on_host, experts=experts, expert_use=expert_use)

        programs = program_bytes(cfg, placed(0, 0), task, settings)
        need = functools.partial(need_of, cfg, task=task, settings=settings, programs=programs)
        device = _most(lambda x: need(placed(x, 0)).device, limits.device, 1000)  # noqa: B023
        if device is None:
            continue
        for slots in dict.fromkeys((device, 0)):
            at = functools.partial(placed, slots)
            host = _most(lambda x: need(at(x)).host, limits.host, 1000 - slots)  # noqa: B023
            found = at(host or 0)
            yield from (dataclasses.replace(found, **divided) for divided in divides)


def _most(need: Callable[[int], int], limit: int | None, end: int) -> int | None:
    """Return the largest number up to ``end`` whose need is within the limit; None if none is.

    The need is nearly linear, so its two ends say where to look.
    """
    if limit is None:
        return end
    low, high = need(0), need(end)
    if low > limit:
        return None
    found = end if high <= limit else int(end * (limit - low) / (high - low))
    while found > 0 and need(found) > limit:
        found -= 1
    return found


def _with_shares(policy: Policy, shares: tuple[float, ...]) -> Policy:
    return dataclasses.replace(
        policy, **{name: float(x) for name, x in zip(PERCENTAGES, shares, strict=True)}
    )


def _linear_program(
    cfg: ModelConfig,
    policy: Policy,
    costs: Calibration,
    task: Task,
    limits: MemoryLimits,
    settings: PlannerSettings,
    programs: int,
) -> np.ndarray | None:
    """Return six percentages that minimise a decode step, or None if nothing fits.

    The variables are the shares (weights, cache, activations; device, host) and T. T is the longest
    lane or link, summed over units. Lanes and needs are linear in the shares except for latencies
    and joins, so the pure policies give the slopes.
    """
    from scipy.optimize import linprog

    corners: dict[str, tuple[int, ...]] = {"off": (0, 0, 0, 0, 0, 0)}
    for index, name in enumerate(PERCENTAGES):
        corners[name] = tuple(100 if i == index else 0 for i in range(6))
    lanes, needs = {}, {}
    for name, shares in corners.items():
        corner = _with_shares(policy, shares)
        step = predict(cfg, corner, costs, task, settings)
        lanes[name] = np.array([*(step.lanes[lane] for lane in LANES), *step.links])
        need = need_of(cfg, corner, task, settings, 0)
        rest = need.weights + need.cache + need.hidden
        needs[name] = np.array([rest.device, rest.host, rest.disk], float)
    # A running unit needs most memory if its tensors have pieces to join.
    inner = need_of(cfg, _with_shares(policy, (30, 30) * 3), task, settings, programs)
    working = inner.device - (inner.weights + inner.cache + inner.hidden).device
    for need in needs.values():
        need += working, inner.reading, 0.0
        if limits.device is None:  # its memory is the host's
            need[1] += need[0]
    slope = np.stack([lanes[name] - lanes["off"] for name in PERCENTAGES], axis=1)  # [lane, share]
    rows, bounds = [], []
    for lane in range(len(slope)):  # lane(p) <= T
        rows.append([*slope[lane], -1.0])
        bounds.append(-lanes["off"][lane])
    room = np.stack([needs[name] - needs["off"] for name in PERCENTAGES], axis=1)
    for tier, limit in enumerate((limits.device, limits.host, limits.disk)):
        if limit is not None:
            rows.append([*(room[tier] / 1e9), 0.0])
            bounds.append((limit - needs["off"][tier]) / 1e9)
    for kind in range(3):  # device + host <= 100%
        rows.append([float(i // 2 == kind) for i in range(6)] + [0.0])
        bounds.append(1.0)
    # Hidden lanes get a small cost: among equal policies the one that moves least wins.
    share = np.ones(len(LANES))
    if policy.overlap:
        # Shares between the pure policies need joins.
        kinds = [max(i for i, kind in enumerate(KINDS) if lane in kind) for lane in LANES]
        share = np.clip([costs.contention[kind] for kind in kinds], 0.02, 1.0)
    objective = [*(share @ slope[: len(LANES)]), float(1.0 - share.min())]
    found = linprog(
        objective, A_ub=np.array(rows), b_ub=np.array(bounds), bounds=[(0, 1)] * 6 + [(0, None)]
    )
    return 100 * found.x[:6] if found.success else None
