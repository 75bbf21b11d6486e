"""The cost model: what a policy will take, and the policy that takes least.

    predict(cfg, policy, calibration, task, ...) -> Prediction     seconds and bytes, by term
    solve(cfg, calibration, task, limits, ...) -> Policy

A step is unit by unit.  In a unit, the lanes (loads and stores of weights, cache and hidden states;
computation) take the seconds that the calibration gives for their bytes.  Serially they add up;
overlapped, a unit takes its longest lane and the share ``contention`` of the others:

    T_unit = max(lanes) + contention * (sum(lanes) - max(lanes))
    T = T_prefill + (new_tokens - 1) * T_step;      throughput = rows * new_tokens / T

``solve`` walks over batch sizes and numbers of batches; for each, the shares that minimise a step
are a linear program under the limits of device, host and disk (scipy), whose solution is rounded to
whole percents, checked against the exact ``footprint`` and improved by exact neighbours.

Source: FlexGen (arXiv 2303.06865), section 4.3.  Unlike there, one more term: joining pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.offload.accounting import (
    Footprint,
    cache_shapes,
    footprint,
    hidden_bytes,
    unit_shapes,
)
from jaxllama.offload.calibration import Calibration
from jaxllama.offload.fitting import moving
from jaxllama.offload.layer_cache import TAIL, snapshot_columns
from jaxllama.offload.policy import PERCENTAGES, Policy, Shares
from pallas_kernels.qtensor import tree_bytes

LANES = (
    "load weights", "load cache", "load hidden", "compute", "store cache", "store hidden"
)  # fmt: skip
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_BATCHES = (1, 2, 4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Task:
    """rows of ``prompt`` tokens to be continued by ``new`` ones."""

    rows: int
    prompt: int
    new: int
    chunk: int = 512

    @property
    def capacity(self) -> int:
        return self.prompt + self.new


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bytes that may be used; None is no limit."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def allow(self, need: Footprint) -> bool:
        pairs = ((self.device, need.device), (self.host, need.host), (self.disk, need.disk))
        return all(limit is None or used <= limit for limit, used in pairs)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a prediction depends on besides the policy: dtypes and the scheme of the weights."""

    dtype: Any
    kv_dtype: Any
    scheme: str | None = None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of the prefill and of one decode step of a block; of a step also each lane's sum."""

    prefill: float
    step: float
    lanes: dict[str, float]
    blocks: int
    tokens_per_second: float


def predict(
    cfg: ModelConfig, policy: Policy, costs: Calibration, task: Task, settings: Settings
) -> Prediction:
    """Time of ``task`` under ``policy``."""
    block = min(policy.block_size, task.rows)
    batches = -(-block // policy.gpu_batch_size)
    rows = -(-block // batches)
    context = task.prompt + task.new // 2
    step, lanes = _step(cfg, policy, costs, settings, rows, batches, 1, context, task)
    prefill, _ = _step(cfg, policy, costs, settings, rows, batches, task.prompt, 0, task)
    blocks = -(-task.rows // block)
    total = blocks * (prefill + (task.new - 1) * step)
    return Prediction(prefill, step, lanes, blocks, task.rows * task.new / total)


def _step(
    cfg: ModelConfig, policy: Policy, costs: Calibration, settings: Settings, rows: int,
    batches: int, width: int, context: int, task: Task,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """(seconds, seconds of each lane) of one token a row, or of a prefill of ``width`` tokens."""
    totals, seconds = dict.fromkeys(LANES, 0.0), 0.0
    for lanes in _units(cfg, policy, costs, settings, rows, width, context, task):
        lanes = {
            lane: value * (1 if lane == "load weights" else batches)
            for lane, value in lanes.items()
        }
        longest, total = max(lanes.values()), sum(lanes.values())
        if policy.overlap:
            seconds += longest + costs.contention * (total - longest)
        else:
            seconds += total
        for lane, value in lanes.items():
            totals[lane] += value
    return seconds, totals


def _units(
    cfg: ModelConfig, policy: Policy, costs: Calibration, settings: Settings, rows: int,
    width: int, context: int, task: Task,
) -> Iterator[dict[str, float]]:  # fmt: skip
    """The seconds of each unit's lanes, for one batch."""
    overhead, a_row, a_token = costs.decode
    state = _cache_moving(cfg, rows, task.capacity, settings.kv_dtype, policy.cache)
    pair = 2 * hidden_bytes(cfg, rows, width, settings.dtype)
    hidden = _pure_bytes(pair, policy.activations)
    moves_cache = policy.cache.device < 100 and not policy.cpu_attention
    names = cfg, np.dtype(settings.dtype).name, settings.scheme, policy.sep_layer
    amounts_of = _weights_moving(*names, policy.weights)
    for index, (unit, _) in enumerate(unit_shapes(*names)):
        if unit.kind == "embed":
            continue
        lanes = dict.fromkeys(LANES, 0.0)
        if policy.weights.device < 100:
            lanes["load weights"] = costs.load_weights.seconds(*amounts_of[index])
        if unit.kind == "head":
            lanes["compute"] = costs.head[0] + costs.head[1] * rows
            yield lanes
            continue
        half = 0.5 if policy.sep_layer else 1.0
        if width > 1:
            fixed, a_word, a_pair = costs.prefill
            lanes["compute"] = half * (fixed + rows * width * (a_word + a_pair * width))
        else:
            lanes["compute"] = half * (overhead + a_row * rows + a_token * rows * context)
        if policy.activations.device < 100:
            lanes["load hidden"] = costs.load_hidden.seconds(*hidden)
            lanes["store hidden"] = costs.store_hidden.seconds(*hidden)
        if moves_cache and unit.has_cache:
            share = 1.0  # a GLA state moves whole
            if cfg.layer_types[unit.layer] == "attention":
                share = snapshot_columns(task.capacity, max(context, width)) / task.capacity
            amounts = [share * part for part in state[unit.layer]]
            written = costs.store_cache.seconds(*amounts)
            if width > 1:
                lanes["store cache"] = written
            else:
                lanes["load cache"] = costs.load_cache.seconds(*amounts)
                lanes["store cache"] = costs.push_cache + written / TAIL
        yield lanes


@functools.lru_cache(maxsize=4096)
def _weights_moving(
    cfg: ModelConfig, dtype: str, scheme: str | None, sep_layer: bool, shares: Shares
) -> list[tuple[float, float, float]]:
    return [moving(shapes, shares) for _, shapes in unit_shapes(cfg, dtype, scheme, sep_layer)]


@functools.lru_cache(maxsize=4096)
def _cache_moving(
    cfg: ModelConfig, rows: int, capacity: int, dtype: Any, shares: Shares
) -> list[tuple[float, float, float]]:
    return [moving(layer, shares) for layer in cache_shapes(cfg, rows, capacity, dtype)]


def _pure_bytes(nbytes: int, shares: Shares) -> tuple[float, float, float]:
    host, disk = nbytes * shares.host / 100, nbytes * shares.disk / 100
    mixed = shares.device < 100 and 100 not in (shares.host, shares.disk)
    return host, disk, float(nbytes) if mixed else 0.0


def need_of(
    cfg: ModelConfig, policy: Policy, task: Task, settings: Settings, programs: int | None = None
) -> Footprint:
    """The footprint of a task's block; programs: bytes of the largest program, if known."""
    need = footprint(
        cfg, policy, rows=min(policy.block_size, task.rows), width=task.prompt,
        capacity=task.capacity, dtype=settings.dtype, kv_dtype=settings.kv_dtype,
        scheme=settings.scheme, chunk=policy.prefill_batch_size or task.chunk,
        compile_programs=programs is None,
    )  # fmt: skip
    return need if programs is None else dataclasses.replace(need, programs=programs)


def solve(
    cfg: ModelConfig,
    costs: Calibration,
    task: Task,
    limits: Limits,
    settings: Settings,
    base: Policy | None = None,
) -> Policy:
    """The fastest policy within the limits; base: what is not searched (overlap, sep_layer,
    compression).  Raises JaxLlamaError when nothing fits."""
    base = Policy() if base is None else base
    best: tuple[float, Policy] | None = None
    for size, count in itertools.product(_BATCH_SIZES, _BATCHES):
        if size * count > 2 * task.rows and (size, count) != (1, 1):
            continue
        policy = dataclasses.replace(base, gpu_batch_size=size, num_gpu_batches=count)
        programs = program_bytes(cfg, policy, task, settings)
        for candidate in _candidates(cfg, policy, costs, task, limits, settings, programs):
            if not limits.allow(need_of(cfg, candidate, task, settings, programs)):
                continue
            rate = predict(cfg, candidate, costs, task, settings).tokens_per_second
            if best is None or rate > best[0]:
                best = rate, candidate
    if best is None:
        smallest = dataclasses.replace(base, gpu_batch_size=1, num_gpu_batches=1)
        smallest = _with_shares(smallest, (0, 0, 0, 0, 100, 0))
        need = need_of(cfg, smallest, task, settings, program_bytes(cfg, smallest, task, settings))
        raise JaxLlamaError(
            f"no policy fits: even one row with everything on disk needs "
            f"{need.device / 1e9:.3f} GB on the device and {need.disk / 1e9:.3f} GB of disk"
        )
    return best[1]


def program_bytes(cfg: ModelConfig, policy: Policy, task: Task, settings: Settings) -> int:
    """An estimate, without compiling, of the results and temporaries of the largest program: a
    prompt's piece inside the feed-forward, or the logits of every row and their copies."""
    rows = min(policy.gpu_batch_size, task.rows)
    chunk = min(policy.prefill_batch_size or task.chunk, task.prompt)
    width = 3 * cfg.d_ff + 6 * cfg.d_model
    scores = 4 * cfg.n_heads * min(512, task.prompt)
    layers = cache_shapes(cfg, rows, task.capacity, settings.kv_dtype)
    inside = rows * chunk * (width * np.dtype(settings.dtype).itemsize + 2 * scores)
    return max(inside + max(map(tree_bytes, layers)), 16 * rows * cfg.vocab_size)


def _candidates(
    cfg: ModelConfig, policy: Policy, costs: Calibration, task: Task, limits: Limits,
    settings: Settings, programs: int,
) -> Iterator[Policy]:  # fmt: skip
    """The rounded solution of the linear program and its neighbours, and the pure policies."""
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


def _with_shares(policy: Policy, shares: tuple[float, ...]) -> Policy:
    return dataclasses.replace(
        policy, **{name: float(x) for name, x in zip(PERCENTAGES, shares, strict=True)}
    )


def _linear_program(
    cfg: ModelConfig, policy: Policy, costs: Calibration, task: Task, limits: Limits,
    settings: Settings, programs: int,
) -> np.ndarray | None:  # fmt: skip
    """Six percentages that minimise a decode step, or None if nothing fits.

    Variables: the shares (weights, cache, activations; device, host) and T, the longest lane summed
    over units.  Lanes and needs are linear in the shares but for latencies and joins, so slopes are
    taken from the pure policies.
    """
    from scipy.optimize import linprog

    corners = {"off": (0, 0, 0, 0, 0, 0)}
    for index, name in enumerate(PERCENTAGES):
        corners[name] = tuple(100 if i == index else 0 for i in range(6))
    lanes, needs = {}, {}
    for name, shares in corners.items():
        corner = _with_shares(policy, shares)
        step = predict(cfg, corner, costs, task, settings).lanes
        lanes[name] = np.array([step[lane] for lane in LANES])
        need = need_of(cfg, corner, task, settings, 0)
        rest = need.weights + need.cache + need.hidden
        needs[name] = np.array([rest.device, rest.host, rest.disk], float)
    # What a unit needs while it runs is largest where tensors have pieces to join.
    inner = need_of(cfg, _with_shares(policy, (30, 30) * 3), task, settings, programs)
    working = inner.device - (inner.weights + inner.cache + inner.hidden).device
    for need in needs.values():
        need[0] += working
    slope = np.stack([lanes[name] - lanes["off"] for name in PERCENTAGES], axis=1)  # [lane, share]
    rows, bounds = [], []
    for lane in range(len(LANES)):  # lane(p) <= T
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
    # Lanes that are hidden must count for something: among equals the one that moves least.
    share = max(0.02, costs.contention) if policy.overlap else 1.0
    objective = [*(share * slope.sum(axis=0)), 1.0 - share]
    found = linprog(
        objective, A_ub=np.array(rows), b_ub=np.array(bounds), bounds=[(0, 1)] * 6 + [(0, None)]
    )
    return 100 * found.x[:6] if found.success else None
