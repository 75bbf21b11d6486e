"""Calibration: measures the cost of loads, stores and computations on this machine.

    calibrate(cfg, settings) -> Calibration      seconds as linear functions of bytes

It runs a model with a few layers of each kind, equally sparse attention and random weights, unit by
unit. A few policies place everything in one tier, or half in each of two. Non-negative least
squares fit the measured seconds:

    load, store   latency + host bytes / rate + disk bytes / rate + joined bytes / rate
                  from the recorder's events of serial steps
    join          overhead + bytes / rate         a unit's weights, when all pieces have arrived
    layer         overhead + rows * a + rows * context * b         a decode step of one layer
                  overhead + rows * tokens * a + rows * tokens^2 * b         prefill
    head          overhead + rows * a         the part of a step that does not grow with the depth
    look-up       overhead + tokens * a       rows of an input table in host memory
    cpu           as layer, for a decode step with all of its attention on the CPU
    fetch         latency + bytes / rate      values that a sparse step reads from an offloaded
                  cache: its layers' time beyond those of a resident cache

The costs of layer and head come from whole overlapped steps of a resident model at two depths. They
therefore include dispatch and the loop's own work as often as these occur.

Then policies that move data run overlapped, with one batch and with several. ``contention`` is
fitted to the time of their steps beyond the longest lanes of the cost model. It is near 0 if links
and cores share nothing. Small transfers, however, are mostly dispatch, and one interpreter does all
of it. On a CPU a "link" is a copy made by the cores that also compute. The result is kept in a
file.

A CPU measures two layers of each kind with short prompts, in a narrower form of a large model:
fewer heads, fewer features of the feed-forward and fewer tokens. The weights of each layer and of
the head still exceed the CPU's last cache. The seconds of a layer and of the head's program are
scaled by the weights of the model's own. A transfer's seconds are those of bytes, and need no
scaling. After ``Extent.patience`` seconds, hardly anything is timed several times, and
``contention`` is fitted to steps that move all that their policy places in the host's memory, or
their weights alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.checkpoints import hub
from jaxllama.config import ExpertsConfig, ModelConfig
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.executors.offloaded.layer_cache import snapshot_columns
from jaxllama.executors.offloaded.programs import embed_tokens, head_logits
from jaxllama.executors.offloaded.room import cache_shapes, hidden_bytes
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.files import text_digest, write_text
from jaxllama.language_model import LanguageModel
from jaxllama.model.records import Hidden
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import is_pending
from jaxllama.offload.timeline import NO_RECORD, Recorder, TimelineBar
from jaxllama.offload.units import ModelUnit, units_of
from jaxllama.placement import Placement
from jaxllama.planner.accounting import model_bytes, unit_shapes, weight_shapes
from jaxllama.planner.calibrate_experts import EXPERT_ROWS, measure_experts
from jaxllama.planner.cost import KINDS, PlannerSettings, Task, kept_share, step_of
from jaxllama.planner.experts import ExpertCosts
from jaxllama.planner.fitting import (
    Calibration,
    Moving,
    contention,
    fit_moving,
    moving,
    nnls,
)
from jaxllama.planner.trial import random_model, random_run, timed_step
from jaxllama.typing import JsonObject, Tree
from pallas_kernels.qtensor import packed_bytes

ROWS = (1, 8)
REUSED = 1 << 25  # bytes; malloc uses the memory of smaller arrays again
NARROWER = (16, 8, 4, 2)  # divisors of a layer's heads and width, and of the vocabulary
STEPS, IN_A_ROW, FEWER = 12, 4, 2  # timed decode steps; in a row, and of a late calibration
LONG = 0.5  # seconds of prefills that need no repetition
LONGEST, SOON = 20.0, 1.0  # seconds after which steps are not repeated; in a late calibration
ROOM = 64  # tokens that a cache has beside the context
SHARES = {"host": (0, 100), "disk": (0, 0), "half": (50, 50)}  # on the device, in host memory
CACHE_STAYS = {"cache_device": 100.0, "cache_host": 0.0}
ON_CPU = {"cache_device": 0.0, "cache_host": 100.0, "cpu_attention": True}
HIDDEN_STAYS = {"activations_device": 100.0, "activations_host": 0.0}
STAYING = ({}, CACHE_STAYS | HIDDEN_STAYS, CACHE_STAYS, HIDDEN_STAYS)
Progress = Callable[[str], None]
Point = tuple[int, int]  # rows, context


class Extent(NamedTuple):
    """The extent of a calibration.

    depths: layers of each kind. context: tokens of a row. other: the point with other contexts.
    batches: numbers of batches of overlapped steps. patience: seconds after which hardly anything
    is repeated.
    """

    depths: tuple[int, int] = (1, 4)
    context: int = 256
    other: tuple[int, int] = (ROWS[-1], 64)
    batches: tuple[int, ...] = (1, 4)
    patience: float = 60.0

    @property
    def points(self) -> list[Point]:
        return [*((rows, self.context) for rows in ROWS), self.other]


class Widths(NamedTuple):
    """Ratios of the model's own weights and heads to those of the measured form."""

    layer: float = 1.0
    head: float = 1.0
    heads: float = 1.0


FULL, LITTLE = Extent(), Extent((1, 2), 16, (1, 512), (2,), 0.0)


def calibrate(
    cfg: ModelConfig,
    settings: PlannerSettings,
    *,
    chunk: int = 512,
    moves: bool = True,
    fresh: bool = False,
    progress: Progress = lambda _: None,
) -> Calibration:
    """Measure the costs, or read the earlier measurement of this machine and these shapes.

    moves: False measures computation alone, a fifth of the work, and leaves every cost of moving at
        0. Use it for policies that keep everything on the device.
    fresh: measure even if there is an earlier measurement.
    """
    dtype, scheme = settings.dtype, settings.scheme
    kinds = tuple(dict.fromkeys(cfg.layer_types))

    def of_depth(depth: int) -> ModelConfig:
        return cfg.replace(
            n_layers=depth * len(kinds),
            layer_types=depth * kinds,
            window_layers=(),
            expert_layers=(),
            experts=None if cfg.experts is None else _fewer(cfg.experts),
            name="calibration",
        )

    extent, widths = FULL, Widths()
    small = of_depth(extent.depths[1])
    if jax.default_backend() == "cpu":
        extent = LITTLE
        small, widths = narrower(of_depth(extent.depths[1]), dtype, scheme)
    words = small, dtype, scheme, settings.kv_dtype, chunk, widths, extent
    whole, resident = _path(*words), _path(*words, "resident")
    if not fresh:
        for known in (whole,) if moves else (whole, resident):
            if known.is_file():
                return _read(known)
    result = _Measure(small, settings, chunk, progress, moves, extent, widths).run()
    path = whole if moves else resident
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(dataclasses.asdict(result), indent=1))
    return result


def narrower(cfg: ModelConfig, dtype: DTypeLike, scheme: str | None) -> tuple[ModelConfig, Widths]:
    """Return the config with narrower layers and fewer tokens, and how much narrower it is.

    Each layer and the head keep more bytes than the CPU's last cache. A weight of ``REUSED``
    bytes or more keeps as many: its copies touch new pages, which takes several times as long.
    """
    kinds, wide = len(set(cfg.layer_types)), cfg

    def bytes_of(model: ModelConfig) -> tuple[int, int]:
        """Return the bytes of one layer of each kind, and of the rest."""
        both = [model_bytes(x, dtype, scheme) for x in (model, model.first_layers(kinds))]
        layers = (both[0] - both[1]) * kinds // (cfg.n_layers - kinds)
        return layers, both[1] - layers

    def sizes(model: ModelConfig) -> list[int]:
        leaves = jax.tree.leaves(weight_shapes(model.first_layers(kinds), dtype, scheme))
        return [packed_bytes(leaf.size, leaf.dtype) for leaf in leaves]

    enough, most = 3 * _last_cache() // 2, sizes(cfg)

    def narrowest(part: int, least: int, change: Callable[[int], JsonObject | None]) -> ModelConfig:
        """Return the config with the largest divisor whose part keeps ``least`` bytes."""
        for divisor in NARROWER:
            if (changes := change(divisor)) is not None:
                found = cfg.replace(**changes)
                pairs = zip(most, sizes(found), strict=True)
                keeps = all(size < REUSED or narrow >= REUSED for size, narrow in pairs)
                if keeps and bytes_of(found)[part] >= least:
                    return found
        return cfg

    def feed(divisor: int) -> JsonObject | None:
        return None if cfg.d_ff % (128 * divisor) else {"d_ff": cfg.d_ff // divisor}

    def heads(divisor: int) -> JsonObject | None:
        if cfg.n_kv_heads % divisor:
            return None
        return {"n_heads": cfg.n_heads // divisor, "n_kv_heads": cfg.n_kv_heads // divisor}

    cfg = narrowest(0, enough * kinds, feed)
    if set(cfg.layer_types) == {"attention"} and cfg.experts is None and cfg.full is None:
        cfg = narrowest(0, enough * kinds, heads)
    cfg = narrowest(1, enough, lambda divisor: {"vocab_size": -(-wide.vocab_size // divisor)})
    layer = bytes_of(wide)[0] / bytes_of(cfg)[0]
    return cfg, Widths(layer, wide.vocab_size / cfg.vocab_size, wide.n_heads / cfg.n_heads)


def widened(costs: Calibration, widths: Widths, heads: Sequence[float]) -> Calibration:
    """Return the costs of a model so much wider than the measured one.

    heads: the measured seconds of the head's program for each of ``ROWS``. The rest of a step has
    no weights.
    """

    def wider(fixed: float, a_row: float, a_pair: float) -> tuple[float, ...]:
        return widths.layer * fixed, widths.layer * a_row, widths.heads * a_pair

    weighed = nnls([(1.0, rows) for rows in ROWS], heads)
    pairs = zip(costs.head, weighed, strict=True)
    return dataclasses.replace(
        costs,
        decode=wider(*costs.decode),
        prefill=wider(*costs.prefill),
        cpu=wider(*costs.cpu),
        head=tuple(rest + (widths.head - 1) * seconds for rest, seconds in pairs),
    )


def _last_cache() -> int:
    """Return the bytes of the CPU's last cache; 32 MB if the system does not say."""
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes = [os.sysconf(f"SC_LEVEL{level}_CACHE_SIZE") for level in (2, 3, 4)]
        return max(*sizes, 1 << 22)
    return 1 << 25


def _fewer(experts: ExpertsConfig) -> ExpertsConfig:
    """Return the experts of a layer, at most as many as the measured rows choose.

    The costs of a load are those of bytes, and of a step those of the chosen experts.
    """
    chosen = experts.n_active * EXPERT_ROWS[-1] // 2
    count = experts.n_experts if experts.n_groups > 1 else min(experts.n_experts, chosen)
    return dataclasses.replace(experts, n_experts=count)


def _path(cfg: ModelConfig, *settings: object) -> Path:
    device = jax.devices()[0].device_kind
    records = Calibration, ExpertCosts
    fields = [field.name for record in records for field in dataclasses.fields(record)]
    machine = device, os.cpu_count(), _last_cache()
    words = [repr((cfg, machine)), jax.__version__, *fields, str(KINDS), *map(str, settings)]
    name = text_digest("|".join(words))
    return hub.cache_dir() / "offload" / f"calibration-{name}.json"


def _read(path: Path) -> Calibration:
    data = json.loads(path.read_text())
    experts = data.pop("experts")
    if experts is not None:
        experts = ExpertCosts(**{name: tuple(values) for name, values in experts.items()})
    for field in dataclasses.fields(Calibration):
        if field.name == "experts":
            continue
        value = data[field.name]
        data[field.name] = Moving(**value) if isinstance(value, dict) else value
        if isinstance(value, list):
            data[field.name] = tuple(value)
    return Calibration(**data, experts=experts)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A policy's serial run: the events of its decode steps and of its prefill."""

    policy: Policy
    rows: int
    context: int
    events: list[TimelineBar]
    prefill: list[TimelineBar]

    def seconds(self, lane: str, kinds: Sequence[str], prefill: bool = False) -> float:
        times = [
            event.seconds
            for event in (self.prefill if prefill else self.events)
            if event.lane == lane and (event.unit.split("_")[0] in kinds or not event.unit)
        ]
        return lower(times) if times else 0.0


@dataclasses.dataclass
class _Measure:
    """A calibration under way: what it measures, and what it has measured.

    still, on_cpu: by point, of the shallow and the deep model: (prefill, step) seconds, and the
    step's with attention on the CPU. moved: serial runs of policies that move data. joins, lookups:
    (bytes or tokens, seconds). heads: the seconds of the head's program, for each of ``ROWS``.
    overlapped: (policy, number of batches, seconds of a step).
    """

    cfg: ModelConfig
    settings: PlannerSettings
    chunk: int
    progress: Progress
    moves: bool = True
    extent: Extent = FULL
    widths: Widths = Widths()
    still: dict[Point, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)
    on_cpu: dict[Point, list[float]] = dataclasses.field(default_factory=dict)
    moved: list[_Sample] = dataclasses.field(default_factory=list)
    joins: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    lookups: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    heads: list[float] = dataclasses.field(default_factory=list)
    overlapped: list[tuple[Policy, int, float]] = dataclasses.field(default_factory=list)
    done: int = 0

    def __post_init__(self) -> None:
        extent, deep = self.extent, self.cfg.n_layers
        self.dtype = jnp.dtype(self.settings.dtype)
        self.layers = [depth * deep // extent.depths[1] for depth in extent.depths]
        self.begun = time.perf_counter()
        self.measures_experts = (
            self.moves and self.cfg.experts is not None and not self.cfg.parallel_block
        )
        self.parts = len(ROWS) + 1 + self.moves * (len(ROWS) + 4) + self.measures_experts

    @property
    def is_late(self) -> bool:
        return time.perf_counter() > self.begun + self.extent.patience

    def _begin(self, part: str) -> None:
        """Report the part that begins, and how long it and those behind it will take."""
        left = ""
        if self.done:
            taken = time.perf_counter() - self.begun
            left = f", about {taken * (self.parts - self.done) / self.done:.0f} s more"
        self.done += 1
        self.progress(f"calibrating: {part} ({self.done} of {self.parts}){left}")

    def run(self) -> Calibration:
        self._measure_resident()
        for name, share in SHARES.items() if self.moves else ():
            gc.collect()  # or two models would be in memory
            self._measure_moving(name, self._model(share))
        gc.collect()
        costs = self._fit()
        if not self.measures_experts:
            return costs
        self._begin("experts")
        known = functools.partial(random_model, self.cfg, self.dtype, scheme=self.settings.scheme)
        found = measure_experts(self.cfg, known, self.settings.kv_dtype, self.chunk)
        return dataclasses.replace(costs, experts=found)

    def _measure_resident(self) -> None:
        model = self._model((100, 0))
        both = [self._shallow(model), model]
        for point in self.extent.points:
            self._begin("resident")
            self.still[point] = self._times([self._runs(lm, *point)[1] for lm in both])
            if self.moves:
                runs = [self._runs(_with(lm, **ON_CPU), *point)[0] for lm in both]
                self.on_cpu[point] = self._steps(runs)
        self.heads += self._heads(model)

    def _measure_moving(self, name: str, model: LanguageModel) -> None:
        serial, points = _with(model, overlap=False), self.extent.points[: len(ROWS)]
        if self.extent is LITTLE:  # the samples are each layer's
            serial = self._shallow(serial)
        for point in points if name == "host" else points[-1:]:
            self._begin(name)
            self.moved.append(self._sample(serial, *point))
        if name == "half":
            self.joins += self._joins(model)
            self.lookups += self._lookups(model)
        if name not in ("host", "half"):
            return
        self._begin(f"{name}, overlapped")
        models = [
            _with(model, num_gpu_batches=count, **staying)
            for staying in (STAYING[:2] if self.is_late else STAYING)
            for count in self.extent.batches
        ]
        counts = [_policy(lm).num_gpu_batches for lm in models]
        runs = [
            self._runs(lm, ROWS[-1] * count, self.extent.context)[0]
            for lm, count in zip(models, counts, strict=True)
        ]
        steps = self._steps(runs)
        self.overlapped += zip(map(_policy, models), counts, steps, strict=True)

    def _model(self, share: tuple[int, int]) -> LanguageModel:
        """Return a model with these percentages of all data on the device and in host memory."""
        policy = Policy.parse(f"{share[0]} {share[1]} " * 3 + f"gpu_batch_size={ROWS[-1]}")
        return random_model(self.cfg, self.dtype, policy, self.settings.scheme)

    def _shallow(self, model: LanguageModel) -> LanguageModel:
        """Return the model's first layers."""
        return dataclasses.replace(model, config=self.cfg.first_layers(self.layers[0]))

    def _runs(
        self, model: LanguageModel, rows: int, context: int
    ) -> tuple[OffloadRun, Callable[[], OffloadRun]]:
        """Return a run of one task whose programs are compiled, and a function that makes another
        run.
        """
        begin = functools.partial(
            random_run, model, rows, context, 32, context + ROOM, self.settings.kv_dtype, self.chunk
        )
        run = begin()
        for _ in range(2):  # the prefill and a step have every program
            timed_step(run)
        return run, begin

    def _times(self, runs: Sequence[Callable[[], OffloadRun]]) -> list[tuple[float, float]]:
        """Return (prefill, step) seconds of each run.

        The runs alternate, so that a busy machine slows all alike. Prefills of seconds are timed
        once.
        """
        prefills: list[list[float]] = []
        begun: list[OffloadRun] = []
        for _ in range(3):
            if sum(map(sum, prefills)) > LONG:
                break
            begun = [begin() for begin in runs]
            prefills.append([timed_step(run) for run in begun])
        return list(zip(map(lower, zip(*prefills, strict=True)), self._steps(begun), strict=True))

    def _steps(self, begun: Sequence[OffloadRun]) -> list[float]:
        """Return the seconds of a step of each run.

        The first of several steps in a row does not count, because the next weights of another run
        load beside it.
        """
        in_a_row = FEWER if self.is_late else IN_A_ROW
        steps: list[list[float]] = [[] for _ in begun]
        start = time.perf_counter()
        for _ in range(STEPS // in_a_row):
            longest = SOON if self.is_late else LONGEST
            if steps[0] and time.perf_counter() - start > longest:
                break
            for run, times in zip(begun, steps, strict=True):
                times += [timed_step(run) for _ in range(in_a_row + 1)][1:]
        return list(map(lower, steps))

    def _sample(self, model: LanguageModel, rows: int, context: int) -> _Sample:
        _, begin = self._runs(model, rows, context)
        run = begin()
        prefill = self._record(run, 1)
        run.step()
        steps = IN_A_ROW if self.is_late else STEPS
        return _Sample(_policy(model), rows, context, self._record(run, steps), prefill)

    def _heads(self, model: LanguageModel) -> list[float]:
        """Return the seconds of the head's program for each number of rows."""
        weights = offloaded(model.executor).store.get(
            units_of(self.cfg, False)[-1].weights(model.params)
        )
        found = []
        for rows in ROWS:
            x, times = Hidden(jnp.ones((rows, self.cfg.d_model), self.dtype)), []
            for _ in range(IN_A_ROW + 1):
                begin = time.perf_counter()
                jax.block_until_ready(head_logits(self.cfg, weights, x))
                times.append(time.perf_counter() - begin)
            found.append(lower(times[1:]))
        return found

    def _joins(self, model: LanguageModel) -> list[tuple[float, float]]:
        """Return (bytes, seconds) of finishing a layer's weights and the head's after they have
        arrived.
        """
        found, store = [], offloaded(model.executor).store
        for unit, shapes in self._units():
            if unit.layer > 0:
                continue
            times = []
            for _ in range(IN_A_ROW if self.is_late else STEPS):
                pending = store.begin(unit.weights(model.params))
                parts = [
                    x.moved for x in jax.tree.leaves(pending, is_leaf=is_pending) if is_pending(x)
                ]
                jax.block_until_ready(parts)
                begin = time.perf_counter()
                jax.block_until_ready(store.finish(pending))
                times.append(time.perf_counter() - begin)
            found.append((moving(shapes, _policy(model).weights)[2], lower(times)))
        return found

    def _lookups(self, model: LanguageModel) -> list[tuple[float, float]]:
        """Return (tokens, seconds) of embedding a step's tokens and a prompt's tokens."""
        found, store = [], offloaded(model.executor).store
        for width in (1, self.extent.context):
            tokens = jnp.ones((ROWS[-1], width), jnp.int32)
            times = []
            for _ in range((FEWER if self.is_late else STEPS) + 1):
                begin = time.perf_counter()
                jax.block_until_ready(embed_tokens(store, model.config, model.params, tokens))
                times.append(time.perf_counter() - begin)
            found.append((float(tokens.size), lower(times[1:])))
        return found

    def _units(self) -> list[tuple[ModelUnit, Tree]]:
        """Return the units behind the embedding, with the shapes of their weights."""
        return unit_shapes(self.cfg, self.dtype.name, self.settings.scheme, False)[1:]

    def _record(self, run: OffloadRun, steps: int) -> list[TimelineBar]:
        run.record = Recorder()
        for _ in range(steps):
            timed_step(run)
        events, run.record = run.record.finish(), NO_RECORD
        return events

    def _fit(self) -> Calibration:
        layer = ("layer",)
        sparse = self.cfg.attn_sparsity < 1 and "attention" in self.cfg.layer_types
        weights, caches, stores, hiddens, puts, fetches = [], [], [], [], [], []
        for sample in self.moved:
            policy = sample.policy
            for unit, shapes in self._units():
                if unit.kind == "head" and "embed" in shapes:
                    continue  # its table is not loaded twice
                if unit.layer in (-1, 0):
                    seconds = sample.seconds("load weights", (unit.kind,))
                    weights.append((*moving(shapes, policy.weights)[:2], 0.0, seconds))
            [shape] = cache_shapes(
                self.cfg.replace(n_layers=1, layer_types=self.cfg.layer_types[:1]),
                sample.rows,
                sample.context + ROOM,
                self.settings.kv_dtype,
            )
            capacity = sample.context + ROOM
            share = snapshot_columns(capacity, sample.context) / capacity
            amounts = tuple(share * part for part in moving(shape, policy.cache))
            # A sparse step loads only the keys of its cache.
            loaded = tuple(part * (0.5 if sparse else 1.0) for part in amounts)
            caches.append((*loaded, sample.seconds("load cache", layer)))
            kept = tuple(0.5 * part * kept_share(self.cfg) for part in amounts[:2])
            fetches.append((sample, kept))
            stores.append((*amounts, sample.seconds("store cache", layer, prefill=True)))
            for prefill, width in ((False, 1), (True, sample.context)):
                pair = 2 * hidden_bytes(self.cfg, sample.rows, width, self.dtype)
                amounts = moving(jax.ShapeDtypeStruct((pair // 8, 8), jnp.int8), policy.activations)
                hiddens.append((*amounts, sample.seconds("load hidden", layer, prefill)))
                puts.append((*amounts, sample.seconds("store hidden", layer, prefill)))
        fewer, more = self.layers

        def layers_of(steps: dict[Point, list[float]]) -> dict[Point, float]:
            return {
                point: max(1e-9, (long - short) / (more - fewer))
                for point, (short, long) in steps.items()
            }

        def decode_of(steps: dict[Point, float]) -> tuple[float, ...]:
            return nnls([(1.0, rows, rows * at) for rows, at in steps], list(steps.values()))

        still = self.still.items()
        steps = layers_of({point: [step for _, step in both] for point, both in still})
        rests = {point: max(1e-9, short[1] - fewer * steps[point]) for point, (short, _) in still}
        decode = decode_of(steps)
        head = nnls([(1.0, rows) for rows, _ in rests], list(rests.values()))
        prefill = nnls(
            [(1.0, rows * width, rows * width**2) for rows, width in self.still],
            [max(1e-9, (long[0] - short[0]) / (more - fewer)) for _, (short, long) in still],
        )
        free = fetch = Moving(0.0, 0.0, 0.0, 0.0)
        if not self.moves:
            computes = decode, prefill, head
            still_only = (0.0, 0.0), (0.0,) * len(KINDS), 0.0, decode, free
            costs = free, (0.0, 0.0), free, free, 0.0, free, free, *computes, *still_only
            return widened(Calibration(*costs), self.widths, self.heads)
        if sparse:
            fetch = fit_moving(
                [
                    (*kept, 0.0, max(1e-9, s.seconds("compute", layer) - steps[s.rows, s.context]))
                    for s, kept in fetches
                ]
            )
        costs = Calibration(
            fit_moving(weights),
            nnls([(1.0, size) for size, _ in self.joins], [t for _, t in self.joins]),
            fit_moving(caches),
            fit_moving(stores),
            statistics.median(s.seconds("store cache", layer) for s in self.moved),
            fit_moving(hiddens),
            fit_moving(puts),
            decode,
            prefill,
            head,
            nnls([(1.0, count) for count, _ in self.lookups], [t for _, t in self.lookups]),
            (0.0,) * len(KINDS),
            self._cold_disk(),
            decode_of(layers_of(self.on_cpu)),
            fetch,
        )
        steps, cfg, context = [], self.cfg, self.extent.context
        for policy, count, seconds in self.overlapped:
            task = Task(ROWS[-1] * count, context, ROOM)
            step = step_of(cfg, policy, costs, task, self.settings, ROWS[-1], count, 1, context)
            steps.append((step.longest, step.beside, seconds))
        costs = dataclasses.replace(costs, contention=contention(steps))
        return widened(costs, self.widths, self.heads)

    def _cold_disk(self) -> float:
        """Return the seconds a byte of reading a file that is not in the page cache."""
        place = Placement(Policy.parse("0 0 0 0 0 0"), self.dtype)
        disk = place.store.disk
        block = np.random.default_rng(0).integers(0, 256, 1 << 25, np.uint8)
        extents = [disk.write(block) for _ in range(2)]
        disk.drop_cache()
        begin = time.perf_counter()
        for extent in extents:
            disk.read(extent)
        return (time.perf_counter() - begin) / (len(extents) * block.nbytes)


def lower(times: Sequence[float]) -> float:
    """Return the lower quartile: the time on a machine that is otherwise idle."""
    return sorted(times)[(len(times) - 1) // 4]


def _policy(model: LanguageModel) -> Policy:
    return offloaded(model.executor).policy


def _with(model: LanguageModel, **changes: Any) -> LanguageModel:
    return dataclasses.replace(model, executor=offloaded(model.executor).with_policy(**changes))
