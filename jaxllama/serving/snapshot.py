"""Snapshots, the request log, and replays: an engine's state on disk.

A snapshot is one .npz file: the device arrays byte for byte, and as JSON what the host knows.  The
log is JSON lines: the engine's options, then what came in, each with the step that took it
(``{"step": 3, "submit": {...}}``, ``{"step": 9, "end": id, "reason": "cancelled"}``; a deadline is
logged when it strikes, so a replay needs no clock).

    restore(snapshot)              goes on where it was saved
    restore(snapshot, log)         and does again what came in after it: the kill costs no token
    replay(log)                    from the beginning: the same bits, on the same machine

Left out: the weights (the caller loads the model; a mismatch is refused), listeners (whoever
restores listens), and requests that no step has taken yet.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving.options import EngineOptions
from jaxllama.serving.request import Event, Request
from jaxllama.serving.runner import Lane
from jaxllama.serving.scheduler import Sequence

if TYPE_CHECKING:
    from jaxllama.serving.engine import Engine

FORMAT = 1


class RequestLog:
    """Appends to a log.  Every line is handed to the system at once, so it survives the process."""

    def __init__(self, path: str | Path, options: EngineOptions, written: int = 0) -> None:
        """written: how many entries ``read_log`` found, to go on after them; 0 begins anew."""
        try:
            self._file = open(path, "r+b" if written else "wb")
        except OSError as error:
            raise JaxLlamaError(f"{path}: {error.strerror}") from None
        if written:
            whole = self._file.read().rfind(b"\n") + 1
            self._file.seek(whole)
            self._file.truncate()
        self.written = written
        if not written:
            self.write({"options": dataclasses.asdict(options)})

    def write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        self.written += 1

    def close(self) -> None:
        self._file.close()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The entries of a log; a last line that was cut off by a kill is dropped."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        entries = [json.loads(line) for line in lines[:-1]]
    except (OSError, ValueError) as error:
        raise JaxLlamaError(f"{path}: not a request log: {error}") from None
    if not entries or "options" not in entries[0]:
        raise JaxLlamaError(f"{path}: not a request log: the first line has no options")
    return entries


class Script:
    """Log entries that are still to be done."""

    def __init__(self, entries: Iterable[dict[str, Any]]) -> None:
        self._entries = collections.deque(entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def at(self, step: int) -> Iterator[dict[str, Any]]:
        """The entries of this step, removed."""
        while self._entries and self._entries[0]["step"] == step:
            yield self._entries.popleft()

    def expect_end(self, step: int) -> None:
        if self._entries:
            raise JaxLlamaError(
                f"the request log goes on at step {self._entries[0]['step']}, but nothing is left "
                f"to do at step {step}: it is another engine's"
            )


def replay(
    log: str | Path, lm: LanguageModel, on_event: Callable[[Event], None] = lambda event: None
) -> Engine:
    """Do again everything that a log says, on a new engine, to its end."""
    from jaxllama.serving.engine import Engine

    header, *entries = read_log(log)
    engine = Engine(lm, **header["options"])
    engine.script, engine.on_script_event = Script(entries), on_event
    while engine.step():
        pass
    return engine


def save_state(engine: Engine, path: str | Path) -> None:
    runner = engine.runner
    sequences, lanes = [], []
    for live in engine.live.values():
        sequence = live.sequence
        lane = runner.lanes.get(sequence)
        if lane is not None:
            lanes.append(lane.cache)
        sequences.append(
            {
                "request": sequence.request.to_json(),
                "order": sequence.order,
                "output": sequence.output,
                "slot": sequence.slot,
                "filled": sequence.filled,
                "cached": sequence.cached,
                "is_prefilling": sequence in engine.scheduler.prefilling,
                "lane_nodes": None if lane is None else len(lane.nodes),
                "logprobs": live.logprobs,
            }
        )
    leaves = jax.device_get(jax.tree.leaves((runner.slots, runner.pool, lanes)))
    meta = {
        "format": FORMAT,
        "model": _fingerprint(engine.lm),
        "options": dataclasses.asdict(engine.options),
        "size": runner.slots.size,
        "patience": runner.patience,
        "prefix": runner.prefix.to_json(),
        "sequences": sequences,
        "counts": dict(engine.counts),
        "steps": engine.steps,
        "arrivals": engine.arrivals,
        "log": 0 if engine.log is None else engine.log.written,
        "dtypes": [leaf.dtype.name for leaf in leaves],
        "shapes": [leaf.shape for leaf in leaves],
    }
    arrays = {
        str(index): np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        for index, leaf in enumerate(leaves)
    }
    text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    partial = Path(f"{path}.partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, meta=text, **arrays)
        os.replace(partial, path)  # a reader finds the old snapshot or the new one
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror}") from None


def load_state(
    path: str | Path,
    lm: LanguageModel,
    on_event: Callable[[Event], None],
    log: str | Path | None,
    **engine_options: Any,
) -> Engine:
    """See ``Engine.restore``."""
    from jaxllama.serving.engine import Engine

    try:
        with open(path, "rb") as raw_file, np.load(raw_file) as file:
            meta = json.loads(file["meta"].tobytes())
            raw = [file[str(index)] for index in range(len(meta["dtypes"]))]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise JaxLlamaError(f"{path}: not an engine's snapshot: {error}") from None
    if meta["format"] != FORMAT:
        raise JaxLlamaError(f"{path}: format {meta['format']}, but this version reads {FORMAT}")
    if meta["model"] != _fingerprint(lm):
        raise JaxLlamaError(f"{path}: the snapshot is of another model than {lm.config.name}")
    leaves = [
        jnp.asarray(data.view(jnp.dtype(dtype)).reshape(shape))
        for data, dtype, shape in zip(raw, meta["dtypes"], meta["shapes"], strict=True)
    ]
    engine = Engine(lm, **meta["options"], **engine_options)
    options, runner = engine.options, engine.runner
    n_lanes = sum(entry["lane_nodes"] is not None for entry in meta["sequences"])
    like = (runner.slots, runner.pool, [runner.empty(1, options.capacity)] * n_lanes)
    if runner.mesh is not None:
        leaves = jax.device_put(leaves, [leaf.sharding for leaf in jax.tree.leaves(like)])
    runner.slots, runner.pool, lanes = jax.tree.unflatten(jax.tree.structure(like), leaves)
    runner.prefix.restore(meta["prefix"])
    runner.patience = meta["patience"]
    engine.counts.update(meta["counts"])
    engine.steps, engine.arrivals = meta["steps"], meta["arrivals"]
    engine.on_script_event = on_event
    caches = iter(lanes)
    for entry in meta["sequences"]:
        sequence = _revive(engine, entry, on_event)
        if entry["lane_nodes"] is not None:
            known = sequence.tokens[: entry["lane_nodes"] * options.prefix_block]
            runner.lanes[sequence] = Lane(next(caches), 0, runner.prefix.match(known))
    if log is not None:
        entries = read_log(log)
        engine.script = Script(entries[meta["log"] :])
        engine.log = RequestLog(log, options, written=len(entries))
    return engine


def _revive(engine: Engine, entry: dict[str, Any], on_event: Callable[[Event], None]) -> Sequence:
    """One request of a snapshot, back where it was; its listener gets what was written before."""
    request = Request.from_json(entry["request"])
    sequence = Sequence(
        request, entry["order"], time.monotonic(), list(entry["output"]), None, entry["filled"],
        entry["cached"],
    )  # fmt: skip
    live = engine.follow(sequence, on_event, engine.admission.check(request))
    live.logprobs += entry["logprobs"]
    _, text = live.reader.read(sequence.output)
    if live.matcher is not None:
        live.matcher.read(sequence.output)
    engine.scheduler.put(sequence, entry["slot"], entry["is_prefilling"])
    if sequence.output:
        tokens, logprobs = tuple(sequence.output), tuple(live.logprobs)
        engine.emit(live, tokens=tokens, text=text, logprobs=logprobs)
    return sequence


def _fingerprint(lm: LanguageModel) -> str:
    """Of the configuration and of the final norm's weights, which no two models share."""
    digest = hashlib.sha256(repr(lm.config).encode())
    digest.update(np.asarray(lm.params["norm"]["weight"]).tobytes())
    return digest.hexdigest()
