"""Calibration: what a load, a store and a computation cost on this machine, for layers of a shape.

    calibrate(cfg, dtype, scheme, kv_dtype) -> Calibration      seconds as linear functions of bytes

A model of one layer a kind, with random weights, is run unit by unit under a few policies that put
everything on one tier or half on two; the recorder gives the seconds of every load, store and
computation, and each kind is fitted by non-negative least squares:

    load, store   latency + host bytes / rate + disk bytes / rate + joined bytes / rate
    compute       overhead + rows * a + rows * context * b         a decode step of one layer
                  rows * tokens * c                                prefill, in pieces of one size

Then the same policies run overlapped: ``contention`` is the share of the work beside the longest
lane that is not hidden (0 on a machine whose links and cores do not share memory, near 1 on a CPU,
where a "link" is a copy made by the cores that also compute).  The result is kept in a file.
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
from jaxllama.offload.accounting import cache_shapes, hidden_bytes, split_bytes, unit_shapes
from jaxllama.offload.loading import Placement, scheme_of
from jaxllama.offload.model import KV_DTYPE, OffloadedModel
from jaxllama.offload.policy import Policy, Shares
from jaxllama.offload.run import Run
from jaxllama.offload.timeline import NO_RECORD, Event, Recorder
from jaxllama.random_params import random_params
from jaxllama.sampling import Sampling, SamplingParams

ROWS = (1, 2, 8)
CONTEXTS = (64, 256)
STEPS = 5  # decode steps that are timed
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Moving:
    """Seconds of one transfer: latency, then seconds a byte by tier and of joining pieces."""

    latency: float
    host: float
    disk: float
    join: float

    def seconds(self, host: float, disk: float, joined: float) -> float:
        return self.latency + self.host * host + self.disk * disk + self.join * joined


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
    prefill: float  # a row and token; a layer
    head: tuple[float, float]  # overhead, a row
    slot: float  # of the loop itself, a unit and batch
    contention: float
    disk_cold: float  # seconds a byte when the system's page cache holds nothing of the file


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
        n_layers=2 * len(kinds), layer_types=2 * kinds, first_window_layer=0, name="calibration"
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
    """One policy's run: events of the decode steps, of the prefill, and seconds a step."""

    policy: Policy
    rows: int
    context: int
    events: list[Event]
    prefill: list[Event]
    step: float

    def median(self, lane: str, kinds: Sequence[str], prefill: bool = False) -> float:
        times = [
            event.seconds
            for event in (self.prefill if prefill else self.events)
            if event.lane == lane and (event.unit.split("_")[0] in kinds or not event.unit)
        ]
        return statistics.median(times) if times else 0.0


class _Measure:
    def __init__(
        self, cfg: ModelConfig, dtype: Any, scheme: str | None, kv_dtype: Any, chunk: int,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.cfg, self.dtype, self.scheme, self.kv_dtype = cfg, jnp.dtype(dtype), scheme, kv_dtype
        self.chunk, self.progress = chunk, progress

    def run(self) -> Calibration:
        shares = {"resident": (100, 0), "host": (0, 100), "disk": (0, 0), "half": (50, 50)}
        samples: dict[tuple[str, int, int], _Sample] = {}
        overlapped: list[tuple[_Sample, _Sample]] = []
        for name, (device, host) in shares.items():
            text = f"{device} {host} " * 3 + "overlap=false"
            points = [(rows, CONTEXTS[1]) for rows in ROWS]
            if name == "resident":
                points.append((ROWS[-1], CONTEXTS[0]))
            model = self._model(Policy.parse(f"{text} gpu_batch_size={ROWS[-1]}"))
            for rows, context in points if name in ("resident", "host") else points[-1:]:
                self.progress(f"calibrating: {name}, {rows} rows of {context} tokens")
                samples[name, rows, context] = self._sample(model, rows, context)
            if name in ("host", "half"):
                policy = dataclasses.replace(model.policy, overlap=True)
                other = self._sample(dataclasses.replace(model, policy=policy), *points[-1])
                overlapped.append((samples[name, *points[-1]], other))
        return self._fit(samples, overlapped)

    def _model(self, policy: Policy) -> OffloadedModel:
        place = Placement(policy, self.dtype, self.scheme)
        params = random_params(self.cfg, jax.random.key(0), self.dtype, self.scheme, place)
        return place.model(self.cfg, params, None)

    def _sample(self, model: OffloadedModel, rows: int, context: int) -> _Sample:
        rng = np.random.default_rng(0)
        tokens = jnp.asarray(rng.integers(0, self.cfg.vocab_size, (rows, context)), jnp.int32)
        lengths = jnp.full((rows,), context, jnp.int32)
        sampling = SamplingParams.stack([Sampling()] * rows, self.cfg.vocab_size)

        def begin() -> Run:
            return Run(
                model, tokens, lengths, sampling, jnp.zeros((0,), jnp.int32),
                room=16, limit=16, capacity=context + 64, kv_dtype=self.kv_dtype, chunk=self.chunk,
            )  # fmt: skip

        run = begin()
        for _ in range(3):  # compile
            run.step()
        run = begin()
        prefill = self._record(run, 1)[0]
        run.step()
        events, step = self._record(run, STEPS)
        return _Sample(model.policy, rows, context, events, prefill, step)

    def _record(self, run: Run, steps: int) -> tuple[list[Event], float]:
        run.record = Recorder()
        begin = time.perf_counter()
        for _ in range(steps):
            run.step()
            run.end_rows()
        seconds = (time.perf_counter() - begin) / steps
        events, run.record = run.record.finish(), NO_RECORD
        return events, seconds

    def _fit(
        self,
        samples: dict[tuple[str, int, int], _Sample],
        overlapped: list[tuple[_Sample, _Sample]],
    ) -> Calibration:
        layer = ("layer",)
        moved = [sample for (name, *_), sample in samples.items() if name != "resident"]
        still = [sample for (name, *_), sample in samples.items() if name == "resident"]
        weights, caches, stores, hiddens, puts = [], [], [], [], []
        for sample in moved:
            policy = sample.policy
            for unit, shapes in unit_shapes(self.cfg, self.dtype.name, self.scheme, False)[1:]:
                if self.cfg.tie_embeddings and unit.kind == "head":
                    continue  # its table is not loaded twice
                if unit.layer in (-1, 0):
                    seconds = sample.median("load weights", (unit.kind,))
                    weights.append((*moving(shapes, policy.weights), seconds))
            [one] = cache_shapes(self.cfg.replace(n_layers=1, layer_types=self.cfg.layer_types[:1]),
                                 sample.rows, sample.context + 64, self.kv_dtype)  # fmt: skip
            amounts = moving(one, policy.cache)
            caches.append((*amounts, sample.median("load cache", layer)))
            stores.append((*amounts, sample.median("store cache", layer, prefill=True)))
            for prefill, width in ((False, 1), (True, sample.context)):
                pair = 2 * hidden_bytes(self.cfg, sample.rows, width, self.dtype)
                amounts = moving(jax.ShapeDtypeStruct((pair // 8, 8), jnp.int8), policy.activations)
                hiddens.append((*amounts, sample.median("load hidden", layer, prefill)))
                puts.append((*amounts, sample.median("store hidden", layer, prefill)))
        decode = nnls(
            [(1.0, s.rows, s.rows * s.context) for s in still],
            [s.median("compute", layer) for s in still],
        )
        head = nnls([(1.0, s.rows) for s in still], [s.median("compute", ("head",)) for s in still])
        largest = max(still, key=lambda s: s.rows * s.context)
        slots = self.cfg.n_layers + 1
        slot = statistics.median(
            max(0.0, s.step - sum(e.seconds for e in s.events) / STEPS) / slots for s in still
        )
        return Calibration(
            fit_moving(weights), fit_moving(caches), fit_moving(stores),
            statistics.median(s.median("store cache", layer) for s in moved),
            fit_moving(hiddens), fit_moving(puts), decode,
            largest.median("compute", layer, prefill=True) / (largest.rows * largest.context),
            head, slot, _contention(overlapped), self._cold_disk(),
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


def moving(tree: Any, shares: Shares) -> tuple[float, float, float]:
    """(host bytes, disk bytes, joined bytes) of getting a tree of shapes that ``shares`` split."""
    if shares.device >= 100:
        return 0.0, 0.0, 0.0
    part = split_bytes(tree, shares)
    whole = part.device + part.host + part.disk
    pure = 100 in (shares.host, shares.disk)
    return part.host, part.disk, 0.0 if pure else whole


def nnls(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative coefficients that explain ``seconds`` with the least relative squared error."""
    from scipy.optimize import nnls as solve

    matrix, target = np.asarray(rows, float), np.asarray(seconds, float)
    target = np.maximum(target, 1e-9)
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-30)
    found, _ = solve(matrix / scale / target[:, None], np.ones(len(target)))
    return tuple(float(value) for value in found / scale)


def fit_moving(samples: Sequence[tuple[float, float, float, float]]) -> Moving:
    """Samples are (host, disk, joined bytes, seconds)."""
    return Moving(*nnls([(1.0, *amounts) for *amounts, _ in samples], [s for *_, s in samples]))


def _contention(pairs: Sequence[tuple[_Sample, _Sample]]) -> float:
    """Of a serial step's work beside its longest lane, the share that overlapping did not hide."""
    shares = []
    for serial, overlapped in pairs:
        lanes: dict[str, float] = {}
        for event in serial.events:
            lanes[event.lane] = lanes.get(event.lane, 0.0) + event.seconds / STEPS
        longest = max(lanes.values())
        beside = max(serial.step - longest, 1e-9)
        shares.append(min(1.0, max(0.0, (overlapped.step - longest) / beside)))
    return statistics.mean(shares)


def settings_of(
    policy: Policy, dtype: Any, scheme: str | None, kv_dtype: Any
) -> tuple[str | None, Any]:
    """(scheme, cache dtype) that a policy's compression means."""
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    return scheme_of(policy, scheme), KV_DTYPE if policy.compress_cache else kv_dtype
