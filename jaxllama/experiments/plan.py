"""``--dry-run``: describe an experiment before it runs.

    plan(experiment, directory) -> text

For every point whose model is known without its checkpoint, the plan has the parameters and the
time. It also has the bytes of weights and cache as an accelerator stores them. An offloaded point
has its bytes in each place. The time comes from a small piece of the point's own work
(``estimate``). If points differ in numbers alone, the cheapest is measured, and the others
follow from it by their lower bounds. If the piece is too large for this machine, the plan has a
lower bound instead. The bound follows from bytes, operations and this machine's rates in a short
probe. The time of a calibration is not known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllama.config import ModelConfig
from jaxllama.evaluation.speed.harness import cache_bytes_per_step, matmul_rate, memory_bandwidth
from jaxllama.experiments.config import Experiment, Point
from jaxllama.experiments.estimate import Duration, measured, text_tokens, window_count
from jaxllama.experiments.run import finished
from jaxllama.experiments.settings import (
    LearnSettings,
    OffloadSettings,
    QualitySettings,
    ServeSettings,
    SpeedSettings,
    TrainSettings,
)
from jaxllama.experiments.table import is_number
from jaxllama.experiments.workloads import kv_dtype, model_config, offload_need
from jaxllama.loading import default_dtype
from jaxllama.model.cache import init_cache
from jaxllama.offload.store import available_memory
from jaxllama.progress import working
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import param_shapes
from jaxllama.quantization.scheme import parse
from jaxllama.typing import Tree
from pallas_kernels.qtensor import tree_bytes

_LONGEST = 10.0  # seconds: largest lower bound of a piece that a dry run still measures
_SLACK = 3.0  # a measured duration over its lower bound: most that other points inherit
_ADAM = 4  # float32 copies of the weights: the weights, gradients, two moments


@dataclasses.dataclass(frozen=True)
class PointCost:
    """The cost of one measurement of a point.

    moved: bytes of memory that are read or written, in sequence with ``operations``. pieces: number
    of equal parts of the work.
    """

    shapes: str
    parameters: int
    weight_bytes: int
    cache_bytes: int
    moved: float
    operations: float
    pieces: int


def plan(experiment: Experiment, directory: Path) -> str:
    """Return the plan as text."""
    count = len(experiment.points) * len(experiment.seeds)
    lines = [
        f"{experiment.title}: {len(experiment.points)} points x {len(experiment.seeds)} seeds of "
        f"{experiment.workload!r}",
        f"into {directory}"
        + (
            f", where {finished(experiment, directory)} of {count} are done"
            if directory.exists()
            else ""
        ),
        "",
    ]
    costs = [cost(experiment, point) for point in experiment.points]
    bandwidth, rate = memory_bandwidth(), matmul_rate()
    bounds = [
        None if one is None else one.moved / bandwidth + one.operations / rate for one in costs
    ]
    durations = _durations(experiment, costs, bounds)
    total, calibrated, floors = 0.0, 0, 0
    for point, one, floor in zip(experiment.points, costs, bounds, strict=True):
        if one is None or floor is None:
            lines.append(f"{point.name}: known when the model is loaded")
            continue
        is_calibrated = _is_calibrated(point)
        calibrated += is_calibrated
        found = durations.get(point.name)
        if is_calibrated:
            duration = "time unknown (calibration)"
        elif found is None:
            floors += 1
            total += floor * len(experiment.seeds)
            duration = f"at least {_time(floor)}"
        else:
            total += found.of(len(experiment.seeds))
            duration = f"about {_time(found.first)}"
        cached = f", cache {_size(one.cache_bytes)}" if one.cache_bytes else ""
        if isinstance(point.settings, OffloadSettings):
            need = offload_need(experiment, point.settings)
            cached += (
                f", on the device {_size(need.device)}, in host memory {_size(need.host)}, on disk "
                f"{_size(need.disk)}"
            )
        lines.append(
            f"{point.name}: {one.shapes}; {one.parameters / 1e6:.1f} M parameters, weights "
            f"{_size(one.weight_bytes)}{cached}; {duration}"
        )
    unknown = sum(one is None for one in costs)
    lines += [
        "",
        f"{'at least' if floors else 'about'} {_time(total)} in all on this "
        f"{jax.devices()[0].device_kind} ({bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.2f} TFLOP/s)"
        + (f", {floors} points without loading and compiling" if floors else "")
        + (f", and without {unknown} points whose models are not known yet" if unknown else "")
        + (f", and without {calibrated} points that calibrate" if calibrated else ""),
    ]
    return "\n".join(lines) + "\n"


def _is_calibrated(point: Point) -> bool:
    return bool(getattr(point.settings, "calibrated", False))


def _durations(
    experiment: Experiment, costs: list[PointCost | None], bounds: list[float | None]
) -> dict[str, Duration]:
    """Return the duration of each point whose piece of work this machine can measure, by name.

    Points that differ in numbers alone are of one kind. The cheapest of a kind is measured. The
    others take as much longer as their lower bounds are longer, times ``_SLACK`` at most.
    """
    cheapest: dict[str, tuple[float, Duration]] = {}
    found: dict[str, Duration] = {}
    known = [
        (bound, point, one)
        for point, one, bound in zip(experiment.points, costs, bounds, strict=True)
        if one is not None and bound is not None and not _is_calibrated(point)
    ]
    with working("timing a piece of each", len(known), unit="points") as bar:
        for bound, point, one in sorted(known, key=lambda entry: entry[0]):
            bar.note(point.name)
            if bound / one.pieces <= _LONGEST and _fits(one):
                words = {key: value for key, value in point.flat.items() if not is_number(value)}
                kind = repr((type(point.settings), words, one.parameters))
                if kind not in cheapest:
                    cheapest[kind] = bound, measured(experiment, point.settings)
                first, like = cheapest[kind]
                more = (bound - first) * min(_SLACK, max(1.0, like.later / first if first else 1.0))
                found[point.name] = Duration(like.first + more, like.later + more)
            bar()
    return found


def _fits(one: PointCost) -> bool:
    """Return whether a piece of the work leaves half of this machine's memory free."""
    free = (jax.devices()[0].memory_stats() or {}).get("bytes_limit") or available_memory()
    return free is None or 2 * (one.weight_bytes + one.cache_bytes) <= free


def cost(experiment: Experiment, point: Point) -> PointCost | None:
    """Return the cost of a point; None if the model's shape is not known yet."""
    settings = point.settings
    cfg = model_config(experiment, settings)
    if cfg is None:
        return None
    if isinstance(settings, TrainSettings):
        return _training(cfg, settings.config, 1)
    if isinstance(settings, LearnSettings):
        return _training(cfg, settings, len(settings.learning_rates))
    shapes = _weights(cfg, settings)
    n = _parameters(cfg)
    weights = tree_bytes(shapes)
    if isinstance(settings, QualitySettings):
        tokens = text_tokens(experiment, settings)
        pieces = window_count(tokens, min(settings.window, cfg.max_position))
        # the model, and its reference
        return PointCost(_shape(cfg), n, weights, 0, weights, 2 * 2.0 * n * tokens, pieces)
    held, batch, runs = _decode(settings)
    cache = _cache(cfg, batch, held + settings.new_tokens, settings)
    unread = tree_bytes(shapes["embed"]) if "head" in shapes else 0
    step = weights - unread + cache_bytes_per_step(cfg, cache, held)
    return PointCost(
        _shape(cfg),
        n,
        weights,
        tree_bytes(cache.layers),
        float(step * settings.new_tokens * runs),
        2.0 * n * batch * settings.prompt_tokens * runs,
        runs,
    )


def _decode(settings: SpeedSettings | OffloadSettings | ServeSettings) -> tuple[int, int, int]:
    """Return (tokens in the cache, rows, number of runs)."""
    if isinstance(settings, SpeedSettings):
        return settings.context, settings.batch, settings.runs + 2
    if isinstance(settings, ServeSettings):
        return settings.prompt_tokens, settings.slots, -(-settings.requests // settings.slots)
    return settings.prompt_tokens, settings.batch, 3


def _training(cfg: ModelConfig, config: Any, models: int) -> PointCost:
    """Return the cost of training. config: a TrainConfig, or settings with the same sizes."""
    from jaxllama.training import flops_per_token

    n = _parameters(cfg) * models
    tokens = config.steps * config.batch_size * config.sequence_length * models
    work = flops_per_token(cfg, config.sequence_length) * tokens
    state = _ADAM * 4 * n
    shape = f"{_shape(cfg)}, {tokens:,} tokens, weights with gradients and moments"
    return PointCost(shape, n, state, 0, float(state * config.steps), float(work), config.steps)


def _weights(cfg: ModelConfig, settings: Any) -> Tree:
    """Return the shapes of the parameters under the point's scheme."""
    dtype = default_dtype() if settings.dtype is None else settings.dtype
    floats = param_shapes(cfg, dtype)
    chosen = parse(settings.scheme)
    if not chosen.schemes:
        return floats
    if any(one.static for one in chosen.schemes):  # calibration adds one scale a weight
        chosen = parse("fp8")
    return jax.eval_shape(functools.partial(quantize_params, scheme=chosen), floats)


def _cache(cfg: ModelConfig, batch: int, room: int, settings: Any) -> Tree:
    dtype = kv_dtype(settings.kv_dtype) or settings.dtype or default_dtype()
    return jax.eval_shape(functools.partial(init_cache, cfg, batch, room, dtype))


def _parameters(cfg: ModelConfig) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(cfg)))


def _shape(cfg: ModelConfig) -> str:
    kinds: Mapping[str, int] = {kind: cfg.layer_types.count(kind) for kind in cfg.layer_types}
    layers = " + ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{layers} layers of {cfg.d_model}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.1f} s"
