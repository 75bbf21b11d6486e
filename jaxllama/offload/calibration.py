"""Calibration: what a load, a store and a computation cost on this machine, for layers of a shape.

    calibrate(cfg, dtype, scheme, kv_dtype) -> Calibration      seconds as linear functions of bytes

A model of a few layers a kind, with random weights, is run unit by unit under a few policies that
put everything on one tier or half on two, and non-negative least squares fit what was seen:

    load, store   latency + host bytes / rate + disk bytes / rate + joined bytes / rate
                  from the recorder's events of serial steps
    layer         overhead + rows * a + rows * context * b         a decode step of one layer
                  overhead + rows * tokens * a + rows * tokens^2 * b         prefill
    head          overhead + rows * a         all of a step that does not grow with the depth

Layer and head are taken from whole overlapped steps of a resident model at two depths, so dispatch
and the loop's own work are in them as often as they occur.  Then policies that move run overlapped,
with one batch and with several: ``contention`` is the share of the work beside the longest lane
that is not hidden (near 0 where links and cores share nothing; on a CPU a "link" is a copy made by
the cores that also compute, and it may pass 1).  The result is kept in a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.checkpoints import hub
from jaxllama.config import ModelConfig
from jaxllama.offload.accounting import cache_shapes, hidden_bytes, unit_shapes
from jaxllama.offload.fitting import Moving, contention, fit_moving, moving, nnls
from jaxllama.offload.layer_cache import snapshot_columns
from jaxllama.offload.loading import Placement, scheme_of
from jaxllama.offload.model import KV_DTYPE, OffloadedModel
from jaxllama.offload.policy import Policy
from jaxllama.offload.run import Run
from jaxllama.offload.timeline import NO_RECORD, Event, Recorder
from jaxllama.random_params import random_params
from jaxllama.sampling import Sampling, SamplingParams

ROWS = (1, 8)
CONTEXTS = (64, 256)
DEPTHS = (1, 4)  # layers of each kind
BATCHES = (1, 4)
STEPS = 12  # decode steps that are timed
SHARES = {"resident": (100, 0), "host": (0, 100), "disk": (0, 0), "half": (50, 50)}
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """See the module docstring; times are seconds."""

    load_weights: Moving
    load_cache: Moving
    store_cache: Moving
    push_cache: float  # a step's token into the tail
    load_hidden: Moving
    store_hidden: Moving
    decode: tuple[float, float, float]  # overhead, a row, a row and token of context; a layer
    prefill: tuple[float, float, float]  # overhead, a row and token, a row and token^2; a layer
    head: tuple[float, float]  # overhead, a row
    contention: float
    disk_cold: float  # seconds a byte when the system's page cache holds nothing of the file

    def cold(self) -> Calibration:
        """For models that the page cache cannot hold."""
        names = ("load_weights", "load_cache", "load_hidden")
        slower = {name: getattr(self, name) for name in names}
        return dataclasses.replace(
            self,
            **{
                name: dataclasses.replace(moving, disk=max(moving.disk, self.disk_cold))
                for name, moving in slower.items()
            },
        )


def calibrate(
    cfg: ModelConfig,
    dtype: Any,
    scheme: str | None = None,
    kv_dtype: Any = None,
    *,
    chunk: int = 512,
    fresh: bool = False,
    progress: Progress = lambda _: None,
) -> Calibration:
    """Measure, or read what was measured before on this machine for these shapes.

    fresh: measure in any case.
    """
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    kinds = tuple(dict.fromkeys(cfg.layer_types))
    small = cfg.replace(
        n_layers=DEPTHS[1] * len(kinds),
        layer_types=DEPTHS[1] * kinds,
        first_window_layer=0,
        name="calibration",
    )
    path = _path(small, dtype, scheme, kv_dtype, chunk)
    if path.is_file() and not fresh:
        return _read(path)
    result = _Measure(small, dtype, scheme, kv_dtype, chunk, progress).run()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(result), indent=1))
    return result


def _path(cfg: ModelConfig, *settings: Any) -> Path:
    device = jax.devices()[0].device_kind
    words = [repr(cfg), device, jax.__version__, *map(str, settings)]
    name = hashlib.sha256("|".join(words).encode()).hexdigest()[:16]
    return hub.cache_dir() / "offload" / f"calibration-{name}.json"


def _read(path: Path) -> Calibration:
    data = json.loads(path.read_text())
    for field in dataclasses.fields(Calibration):
        value = data[field.name]
        data[field.name] = Moving(**value) if isinstance(value, dict) else value
        if isinstance(value, list):
            data[field.name] = tuple(value)
    return Calibration(**data)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A policy's serial run: events of the decode steps and of the prefill."""

    policy: Policy
    rows: int
    context: int
    events: list[Event]
    prefill: list[Event]

    def seconds(self, lane: str, kinds: Sequence[str], prefill: bool = False) -> float:
        times = [
            event.seconds
            for event in (self.prefill if prefill else self.events)
            if event.lane == lane and (event.unit.split("_")[0] in kinds or not event.unit)
        ]
        return lower(times) if times else 0.0

    def loads(self, kind: str) -> list[float]:
        """Seconds of a unit's lanes but the computation; the weights' first."""
        lanes = ["load weights"]
        if kind == "layer":
            lanes += ["load cache", "load hidden", "store cache", "store hidden"]
        return [self.seconds(lane, (kind,)) for lane in lanes]


Point = tuple[int, int]  # rows, context


class _Measure:
    def __init__(
        self, cfg: ModelConfig, dtype: Any, scheme: str | None, kv_dtype: Any, chunk: int,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.cfg, self.dtype, self.scheme, self.kv_dtype = cfg, jnp.dtype(dtype), scheme, kv_dtype
        self.chunk, self.progress = chunk, progress
        self.layers = [depth * cfg.n_layers // DEPTHS[1] for depth in DEPTHS]

    def run(self) -> Calibration:
        largest = ROWS[-1], CONTEXTS[-1]
        points = [(rows, CONTEXTS[-1]) for rows in ROWS]
        still: dict[Point, list[tuple[float, float]]] = {}
        moved: list[_Sample] = []
        overlapped: list[tuple[_Sample, int, float]] = []
        for name, (device, host) in SHARES.items():
            model = self._model(Policy.parse(f"{device} {host} " * 3))
            self.progress(f"calibrating: {name}")
            if name == "resident":
                for point in [*points, (ROWS[-1], CONTEXTS[0])]:
                    both = [self._shallow(model), model]
                    still[point] = self._times([self._runs(lm, *point) for lm in both])
                continue
            serial = _with(model, overlap=False)
            for point in points if name == "host" else [largest]:
                moved.append(self._sample(serial, *point))
            if name in ("host", "half"):
                runs = [
                    self._runs(_with(model, num_gpu_batches=count), ROWS[-1] * count, CONTEXTS[-1])
                    for count in BATCHES
                ]
                for count, (_, step) in zip(BATCHES, self._times(runs), strict=True):
                    overlapped.append((moved[-1], count, step))
        return self._fit(still, moved, overlapped)

    def _model(self, policy: Policy) -> OffloadedModel:
        place = Placement(
            dataclasses.replace(policy, gpu_batch_size=ROWS[-1]), self.dtype, self.scheme
        )
        params = random_params(self.cfg, jax.random.key(0), self.dtype, self.scheme, place)
        return place.model(self.cfg, params, None)

    def _shallow(self, model: OffloadedModel) -> OffloadedModel:
        """The first layers of a model."""
        count = self.layers[0]
        cfg = self.cfg.replace(n_layers=count, layer_types=self.cfg.layer_types[:count])
        return dataclasses.replace(model, config=cfg)

    def _runs(self, model: OffloadedModel, rows: int, context: int) -> Callable[[], Run]:
        """Makes runs of one task, the programs of which are compiled."""
        rng = np.random.default_rng(0)
        tokens = jnp.asarray(rng.integers(0, self.cfg.vocab_size, (rows, context)), jnp.int32)
        lengths = jnp.full((rows,), context, jnp.int32)
        sampling = SamplingParams.stack([Sampling()] * rows, self.cfg.vocab_size)

        def begin() -> Run:
            return Run(
                model, tokens, lengths, sampling, jnp.zeros((0,), jnp.int32),
                room=32, limit=32, capacity=context + 64, kv_dtype=self.kv_dtype, chunk=self.chunk,
            )  # fmt: skip

        run = begin()
        for _ in range(3):
            _step(run)
        return begin

    def _times(self, runs: Sequence[Callable[[], Run]]) -> list[tuple[float, float]]:
        """(prefill, step) of each; they alternate, so that a busy machine slows all alike."""
        prefills = []
        for _ in range(3):
            begun = [begin() for begin in runs]
            prefills.append([_step(run) for run in begun])
        steps = [[_step(run) for run in begun] for _ in range(STEPS + 1)][1:]
        quartiles = [list(map(lower, zip(*times, strict=True))) for times in (prefills, steps)]
        return list(zip(*quartiles, strict=True))

    def _sample(self, model: OffloadedModel, rows: int, context: int) -> _Sample:
        run = self._runs(model, rows, context)()
        prefill = self._record(run, 1)
        run.step()
        return _Sample(model.policy, rows, context, self._record(run, STEPS), prefill)

    def _record(self, run: Run, steps: int) -> list[Event]:
        run.record = Recorder()
        for _ in range(steps):
            _step(run)
        events, run.record = run.record.finish(), NO_RECORD
        return events

    def _fit(
        self,
        still: dict[Point, list[tuple[float, float]]],
        moved: list[_Sample],
        overlapped: list[tuple[_Sample, int, float]],
    ) -> Calibration:
        layer = ("layer",)
        weights, caches, stores, hiddens, puts = [], [], [], [], []
        for sample in moved:
            policy = sample.policy
            for unit, shapes in unit_shapes(self.cfg, self.dtype.name, self.scheme, False)[1:]:
                if self.cfg.tie_embeddings and unit.kind == "head":
                    continue  # its table is not loaded twice
                if unit.layer in (-1, 0):
                    seconds = sample.seconds("load weights", (unit.kind,))
                    weights.append((*moving(shapes, policy.weights), seconds))
            [one] = cache_shapes(self.cfg.replace(n_layers=1, layer_types=self.cfg.layer_types[:1]),
                                 sample.rows, sample.context + 64, self.kv_dtype)  # fmt: skip
            capacity = sample.context + 64
            share = snapshot_columns(capacity, sample.context) / capacity
            amounts = tuple(share * part for part in moving(one, policy.cache))
            caches.append((*amounts, sample.seconds("load cache", layer)))
            stores.append((*amounts, sample.seconds("store cache", layer, prefill=True)))
            for prefill, width in ((False, 1), (True, sample.context)):
                pair = 2 * hidden_bytes(self.cfg, sample.rows, width, self.dtype)
                amounts = moving(jax.ShapeDtypeStruct((pair // 8, 8), jnp.int8), policy.activations)
                hiddens.append((*amounts, sample.seconds("load hidden", layer, prefill)))
                puts.append((*amounts, sample.seconds("store hidden", layer, prefill)))
        fewer, more = self.layers
        steps = {
            point: max(1e-9, (long[1] - short[1]) / (more - fewer))
            for point, (short, long) in still.items()
        }
        rests = {
            point: max(1e-9, short[1] - fewer * steps[point]) for point, (short, _) in still.items()
        }
        decode = nnls([(1.0, rows, rows * at) for rows, at in steps], list(steps.values()))
        head = nnls([(1.0, rows) for rows, _ in rests], list(rests.values()))
        prefill = nnls(
            [(1.0, rows * width, rows * width**2) for rows, width in still],
            [max(1e-9, (long[0] - short[0]) / (more - fewer)) for short, long in still.values()],
        )
        largest = ROWS[-1], CONTEXTS[-1]
        lanes = []
        for sample, count, seconds in overlapped:
            own = [(more, "layer", steps[largest]), (1, "head", rests[largest])]
            longest = beside = 0.0
            for times, kind, compute in own:
                first, *others = sample.loads(kind)
                unit = [first, count * compute, *(count * other for other in others)]
                longest += times * max(unit)
                beside += times * (sum(unit) - max(unit))
            lanes.append((longest, beside, seconds))
        return Calibration(
            fit_moving(weights), fit_moving(caches), fit_moving(stores),
            statistics.median(s.seconds("store cache", layer) for s in moved),
            fit_moving(hiddens), fit_moving(puts), decode, prefill, head, contention(lanes),
            self._cold_disk(),
        )  # fmt: skip

    def _cold_disk(self) -> float:
        """Seconds a byte of reading back a file that the page cache has forgotten."""
        place = Placement(Policy.parse("0 0 0 0 0 0"), self.dtype)
        disk = place.store.disk
        block = np.random.default_rng(0).integers(0, 256, 1 << 26, np.uint8)
        extents = [disk.write(block) for _ in range(2)]
        disk.drop_cache()
        begin = time.perf_counter()
        for extent in extents:
            disk.read(extent)
        return (time.perf_counter() - begin) / (len(extents) * block.nbytes)


def lower(times: Sequence[float]) -> float:
    """The lower quartile: what the machine takes when others leave it alone."""
    return sorted(times)[(len(times) - 1) // 4]


def _with(model: OffloadedModel, **changes: Any) -> OffloadedModel:
    return dataclasses.replace(model, policy=dataclasses.replace(model.policy, **changes))


def _step(run: Run) -> float:
    begin = time.perf_counter()
    run.step()
    run.end_rows()
    return time.perf_counter() - begin


def settings_of(
    policy: Policy, dtype: Any, scheme: str | None, kv_dtype: Any
) -> tuple[str | None, Any]:
    """(scheme, cache dtype) that a policy's compression means."""
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    return scheme_of(policy, scheme), KV_DTYPE if policy.compress_cache else kv_dtype
