"""The cost model: predicts a policy's time and memory.

    predict(cfg, policy, calibration, task, settings) -> Prediction     seconds, by term
    need_of(cfg, policy, task, settings) -> Footprint                   bytes, by term

A step runs unit by unit. Each unit has lanes: loads and stores of weights, cache and hidden states,
and computation. The calibration gives each lane's seconds for its bytes. In a serial run the lanes
add up.

In an overlapped run a unit takes as long as its longest lane. The bytes of all loads share one link
and count as one lane. So do the bytes of all stores, and those of the disk. The share of the other
lanes that is not hidden is added. A unit's weights start to move while other data still move, so
only their bytes can be the longest lane. The first loads of a step overlap with nothing:

    T_unit = max(lanes, loads' bytes, stores' bytes, disk's bytes) + sum(contention * beside)
    T_step = T_first loads + sum(T_unit)
    T = T_prefill + (new_tokens - 1) * T_step;      throughput = rows * new_tokens / T

Experts that lie one by one are loaded or computed while their layer waits (``planner.experts``), so
their time counts as computation too. So does attention on the CPU, and the transfer of the values
that sparse attention reads, because the keys choose them during the unit's computation. A long
prompt streams its experts, so the longer of loading and computing counts there.

Source: FlexGen (arXiv 2303.06865), section 4.3, with one more term for joining pieces.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.executors.offloaded.executor import CHUNK
from jaxllama.executors.offloaded.experts import streams
from jaxllama.executors.offloaded.layer_cache import TAIL, snapshot_columns
from jaxllama.executors.offloaded.room import cache_shapes, hidden_bytes
from jaxllama.model.mixers import keeps_tokens
from jaxllama.offload.policy import Policy, Shares
from jaxllama.planner.accounting import (
    Footprint,
    batches_of,
    expert_program_bytes,
    footprint,
    unit_shapes,
)
from jaxllama.planner.experts import experts_seconds
from jaxllama.planner.fitting import Calibration, Moving, moving
from pallas_kernels.qtensor import tree_bytes

LANES = ("load weights", "load cache", "load hidden", "compute", "store cache", "store hidden")
_LOADS, _STORES = ("load weights", "load cache", "load hidden"), ("store cache", "store hidden")
LINKS = (("link", _LOADS), ("link", _STORES), ("disk", _LOADS + _STORES))
# Kinds of contention. Whole weights are a few transfers, which computation hardly slows. Pieces
# that must be joined keep the host and the device's queue busy.
KINDS = (
    ("load weights", "compute"),
    ("load cache", "store cache"),
    ("load hidden", "store hidden"),
    ("load weights", "compute"),
)
WHOLE, JOINED = 0, 3


@dataclasses.dataclass(frozen=True)
class Task:
    """The task: ``rows`` rows of ``prompt`` tokens, each continued by ``new`` tokens."""

    rows: int
    prompt: int
    new: int
    chunk: int = CHUNK

    @property
    def capacity(self) -> int:
        return self.prompt + self.new


@dataclasses.dataclass(frozen=True)
class MemoryLimits:
    """Bytes that may be used in each tier; None for no limit."""

    device: int | None = None
    host: int | None = None
    disk: int | None = None

    def allow(self, need: Footprint) -> bool:
        # Without a limit of its own the device's memory is the host's, as on a CPU.
        host = need.host + (need.device if self.device is None else 0)
        pairs = ((self.device, need.device), (self.host, host), (self.disk, need.disk))
        return all(limit is None or used <= limit for limit, used in pairs)


@dataclasses.dataclass(frozen=True)
class PlannerSettings:
    """Inputs of a prediction besides the policy: the dtypes and the weights' scheme."""

    dtype: DTypeLike
    kv_dtype: DTypeLike
    scheme: str | None = None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of a block's prefill and of one of its decode steps.

    lanes, links: a step's sum of each lane, and of the bytes of each of ``LINKS``.
    """

    prefill: float
    step: float
    lanes: dict[str, float]
    links: tuple[float, ...]
    blocks: int
    tokens_per_second: float


def predict(
    cfg: ModelConfig, policy: Policy, costs: Calibration, task: Task, settings: PlannerSettings
) -> Prediction:
    """Return the time of ``task`` under ``policy``."""
    block = min(policy.block_size, task.rows)
    batches, rows = batches_of(policy, block)
    context = task.prompt + task.new // 2
    step = step_of(cfg, policy, costs, task, settings, rows, batches, 1, context)
    prefill = step_of(cfg, policy, costs, task, settings, rows, batches, task.prompt, 0)
    blocks = -(-task.rows // block)
    total = blocks * (prefill.seconds + (task.new - 1) * step.seconds)
    return Prediction(
        prefill.seconds, step.seconds, step.lanes, step.links, blocks, task.rows * task.new / total
    )


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Sums over the units, for one token a row or for a prefill.

    longest, beside: sums of overlapped units' longest lanes, and of the lanes beside them, by kind
        of contention.
    """

    seconds: float
    lanes: dict[str, float]
    links: tuple[float, ...]
    longest: float
    beside: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class _Lane:
    """Seconds of a unit's lane.

    The link's bytes and the disk's bytes move at the same time. ``other`` is the rest.
    """

    link: float = 0.0
    disk: float = 0.0
    other: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.link, self.disk) + self.other

    def __add__(self, more: _Lane) -> _Lane:
        return _Lane(self.link + more.link, self.disk + more.disk, self.other + more.other)


def kept_share(cfg: ModelConfig) -> float:
    """Return the share of an offloaded cache's values that a sparse step reads.

    It assumes that the heads of a group choose independently. Heads that agree read less.
    """
    return 1 - (1 - cfg.attn_sparsity) ** (cfg.n_heads // cfg.n_kv_heads)


def _decode_seconds(costs: Calibration, here: float, on_cpu: float, context: int) -> float:
    """Return the seconds of a layer's decode step.

    here, on_cpu: numbers of rows that attend on the device and on the CPU.
    """
    overhead = costs.cpu[0] if on_cpu else costs.decode[0]
    parts = ((here, costs.decode), (on_cpu, costs.cpu))
    return overhead + sum(rows * (a_row + a_token * context) for rows, (_, a_row, a_token) in parts)


def step_of(
    cfg: ModelConfig,
    policy: Policy,
    costs: Calibration,
    task: Task,
    settings: PlannerSettings,
    rows: int,
    batches: int,
    width: int,
    context: int,
) -> StepCost:
    """Return the cost of ``batches`` of ``rows`` with ``context`` tokens each, or of a prefill.

    width: number of tokens of the prefill.
    """
    totals: dict[str, float] = dict.fromkeys(LANES, 0.0)
    links = np.zeros(len(LINKS))
    longest_sum, beside, serial = 0.0, np.zeros(len(KINDS)), 0.0
    names = _names(cfg, policy, settings)
    joins = any(joined for *_, joined in _weights_moving(*names, policy.weights))
    other = WHOLE if joins else JOINED
    for lanes in _units(cfg, policy, costs, settings, rows, batches, width, context, task):
        joint = [{lane: getattr(lanes[lane], part) for lane in members} for part, members in LINKS]
        alone = [{lane: value.seconds} for lane, value in lanes.items() if lane != "load weights"]
        hidden = max(joint + alone, key=lambda seconds: sum(seconds.values()))
        if totals["compute"] == 0.0:  # the first unit
            firsts = lanes["load cache"].seconds + lanes["load hidden"].seconds
            longest_sum += firsts / batches
        longest_sum += sum(hidden.values())
        for lane, value in lanes.items():
            totals[lane] += value.seconds
        for kind, members in enumerate(KINDS):
            if kind != other:
                beside[kind] += sum(lanes[lane].seconds - hidden.get(lane, 0.0) for lane in members)
        links += [sum(seconds.values()) for seconds in joint]
        serial += sum(value.seconds for value in lanes.values())
    overlapped = longest_sum + float(beside @ np.array(costs.contention))
    return StepCost(
        overlapped if policy.overlap else serial,
        totals,
        tuple(links.tolist()),
        longest_sum,
        tuple(beside.tolist()),
    )


def _names(
    cfg: ModelConfig, policy: Policy, settings: PlannerSettings
) -> tuple[ModelConfig, str, str | None, bool, bool]:
    """Return the arguments of ``unit_shapes``."""
    dtype, singly = np.dtype(settings.dtype).name, bool(policy.experts)
    return cfg, dtype, settings.scheme, policy.sep_layer, singly


def _units(
    cfg: ModelConfig,
    policy: Policy,
    costs: Calibration,
    settings: PlannerSettings,
    rows: int,
    batches: int,
    width: int,
    context: int,
    task: Task,
) -> Iterator[dict[str, _Lane]]:
    """Yield each unit's lanes, for all batches."""
    state = _cache_moving(cfg, rows, task.capacity, settings.kv_dtype, policy.cache)
    pair = 2 * hidden_bytes(cfg, rows, width, settings.dtype)
    hidden = _pure_bytes(pair, policy.activations)
    names = _names(cfg, policy, settings)
    amounts_of = _weights_moving(*names, policy.weights)

    def moved(cost: Moving, amounts: Sequence[float], times: float = batches) -> _Lane:
        host, disk, joined = amounts
        other = cost.latency + cost.join * joined
        return _Lane(times * cost.host * host, times * cost.disk * disk, times * other)

    chunk = policy.prefill_batch_size or task.chunk
    piece = min(chunk, width)
    by_layer = experts_seconds(cfg, costs.experts, policy, rows, batches, width, chunk)
    for index, (unit, shapes) in enumerate(unit_shapes(*names)):
        if unit.kind == "embed":
            continue
        lanes: dict[str, _Lane] = dict.fromkeys(LANES, _Lane())
        joining = 0.0
        if policy.weights.device < 100:
            lanes["load weights"] = moved(costs.load_weights, amounts_of[index], 1)
            if amounts_of[index][2]:
                joining = costs.join[0] + costs.join[1] * amounts_of[index][2]
        half = 0.5 if policy.sep_layer else 1.0
        if unit.kind == "head":
            seconds = costs.head[0] + costs.head[1] * rows
            if policy.weights.device < 100 and "head" in shapes:
                seconds += costs.look_up[0] + costs.look_up[1] * rows * width
        elif width > 1:
            fixed, a_word, a_pair = costs.prefill
            seconds = half * (fixed + rows * width * (a_word + a_pair * width))
        else:
            on_cpu = rows * policy.cache.host / 100 if policy.cpu_attention else 0.0
            seconds = _decode_seconds(costs, rows - on_cpu, on_cpu, context)
            if unit.layer in by_layer:  # its two halves were measured as programs of their own
                assert costs.experts is not None
                a_layer, a_row = costs.experts.layer
                attending = _decode_seconds(costs, 0.0, on_cpu, context) if on_cpu else 0.0
                seconds = a_layer + a_row * rows + rows * context * costs.decode[2] + attending
            seconds *= half
        if unit.kind != "head" and policy.activations.device < 100:
            lanes["load hidden"] = moved(costs.load_hidden, hidden)
            lanes["store hidden"] = moved(costs.store_hidden, hidden)
        if policy.cache.device < 100 and unit.has_cache:
            share, sparse = 1.0, False  # a GLA state moves whole
            if keeps_tokens(cfg.layer_types[unit.layer]):
                share = snapshot_columns(task.capacity, max(context, width)) / task.capacity
                sparse = cfg.attn_sparsity < 1
            amounts = [share * part for part in state[unit.layer]]
            halves = [0.5 * part for part in amounts]  # keys, or values
            if width > 1 and policy.cpu_attention:
                seconds += costs.store_cache.seconds(*amounts)
            elif width > 1:
                lanes["store cache"] = moved(costs.store_cache, amounts)
            elif not policy.cpu_attention:
                lanes["load cache"] = moved(costs.load_cache, halves if sparse else amounts)
                stored = [moved(costs.store_cache, amounts, batches / TAIL)]
                if sparse:
                    stored.append(moved(costs.load_cache, halves, batches / TAIL))
                    host, disk = (kept_share(cfg) * part for part in halves[:2])
                    seconds += costs.fetch.seconds(host, disk, 0.0)
                stored.append(_Lane(other=batches * costs.push_cache))
                lanes["store cache"] = functools.reduce(_Lane.__add__, stored)
        experts = by_layer.get(unit.layer, 0.0) if unit.kind != "mix" else 0.0
        computed = batches * seconds + joining
        if experts and policy.cpu_expert == 0 and streams(cfg.layers[unit.layer], rows * piece):
            computed = max(computed, experts)
        else:
            computed += experts
        lanes["compute"] = _Lane(other=computed)
        yield lanes


@functools.lru_cache(maxsize=4096)
def _weights_moving(
    cfg: ModelConfig,
    dtype: str,
    scheme: str | None,
    sep_layer: bool,
    singly: bool,
    shares: Shares,
) -> list[tuple[float, float, float]]:
    units = unit_shapes(cfg, dtype, scheme, sep_layer, singly)
    return [moving(shapes, shares) for _, shapes in units]


@functools.lru_cache(maxsize=4096)
def _cache_moving(
    cfg: ModelConfig, rows: int, capacity: int, dtype: DTypeLike, shares: Shares
) -> list[tuple[float, float, float]]:
    return [moving(layer, shares) for layer in cache_shapes(cfg, rows, capacity, dtype)]


def _pure_bytes(nbytes: int, shares: Shares) -> tuple[float, float, float]:
    host, disk = nbytes * shares.host / 100, nbytes * shares.disk / 100
    mixed = shares.device < 100 and 100 not in (shares.host, shares.disk)
    return host, disk, float(nbytes) if mixed else 0.0


def need_of(
    cfg: ModelConfig,
    policy: Policy,
    task: Task,
    settings: PlannerSettings,
    programs: int | None = None,
) -> Footprint:
    """Return the footprint of a task's block.

    programs: bytes of the largest program, if known.
    """
    need = footprint(
        cfg,
        policy,
        rows=min(policy.block_size, task.rows),
        width=task.prompt,
        capacity=task.capacity,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        scheme=settings.scheme,
        chunk=policy.prefill_batch_size or task.chunk,
        compile_programs=programs is None,
    )
    return need if programs is None else dataclasses.replace(need, programs=programs)


def program_bytes(cfg: ModelConfig, policy: Policy, task: Task, settings: PlannerSettings) -> int:
    """Return an estimate of the results and temporaries of the largest program, in bytes.

    It compiles nothing. The largest is a prompt's piece inside the feed-forward, or the logits of
    every row with their copies.
    """
    rows = min(policy.gpu_batch_size, task.rows)
    chunk = min(policy.prefill_batch_size or task.chunk, task.prompt)
    width = 3 * cfg.feed_width + 6 * cfg.d_model
    scores = 4 * cfg.n_heads * min(512, task.prompt)
    layers = cache_shapes(cfg, rows, task.capacity, settings.kv_dtype)
    inside = rows * chunk * (width * np.dtype(settings.dtype).itemsize + 2 * scores)
    experts = expert_program_bytes(cfg, policy, rows * chunk, settings.dtype)
    return max(inside + max(map(tree_bytes, layers)), experts, 16 * rows * cfg.vocab_size)
