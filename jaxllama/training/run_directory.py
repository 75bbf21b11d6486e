"""The folder of a run, and the rules for writing to it.

    run.json        the resolved configuration, the data's SHA-256, the environment at the start
    metrics.jsonl   one line a step, and one a validation
    checkpoints/    the states of some steps, with SHA-256 of their files (``checkpoint``)
    loss.png        the curve
    best/           with keep_best: the parameters of the lowest validation loss, or highest reward
    samples.jsonl   with [samples] or [rollout]: the model's answers; samples.md for people
    rewards.png     with [rollout]: rewards, lengths, divergence, entropy and gap, beside loss.png
    model/          the trained model, which ``jaxllama.load`` reads; its presence ends the run
    adapter/        with [lora], instead of model/: PEFT's directory; merged/ is the whole model

A folder belongs to the run whose configuration it holds, from the first step on. The same run
resumes, and another run is refused. So is a folder with other contents, or one to which a living
process writes. Only ``steps`` may grow: more steps extend a run, finished or not, and run.json's
"extended" lists the earlier numbers.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax

from jaxllama.config import ModelConfig, of_last_version
from jaxllama.errors import JaxLlamaError
from jaxllama.files import parse_object, part_of, write_text
from jaxllama.training.config import TrainConfig
from jaxllama.typing import JsonObject, Tree

RUN, METRICS, LOCK = "run.json", "metrics.jsonl", "lock"
SAMPLES, PAGE = "samples.jsonl", "samples.md"
ANSWERS = "answers.npz"  # the model's, with [draft]
# What these depend on.
_OF_ANSWERS = ("data", "data_sha256", "init_from", "draft", "seed", "dtype", "sequence_length")


class RunDirectory:
    """The folder of a run, opened for ``config``; the module docstring lists what is refused."""

    def __init__(self, directory: str | Path, config: TrainConfig, data_sha256: str) -> None:
        self.path = Path(directory)
        self.model = self.path / ("model" if config.lora is None else "adapter")
        settings = dataclasses.asdict(config)
        settings["model"] = None if config.model is None else config.model.to_dict()
        for key in ("scan", "fsdp"):  # like a mesh; checkpoints do not depend on them
            del settings[key]
        identity = _plain({**settings, "data_sha256": data_sha256})
        try:
            if self.path.is_dir() and not (self.path / RUN).exists():
                own = (self.path / LOCK, part_of(self.path / RUN))
                foreign = [path.name for path in self.path.iterdir() if path not in own]
                if foreign:
                    raise JaxLlamaError(f"{self.path}: not a run's folder: it holds {foreign[0]!r}")
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path / LOCK)
            if (self.path / RUN).exists() and (self._has_rows() or self.model.exists()):
                self._check(identity)
            else:
                self._drop_answers_of_others(identity)
                document = {"config": identity, "environment": _environment()}
                write_text(self.path / RUN, json.dumps(document, indent=2) + "\n")
        except OSError as error:
            raise JaxLlamaError(f"{self.path}: {error.strerror or error}") from None

    def _drop_answers_of_others(self, identity: JsonObject) -> None:
        """Remove answers that another configuration asked for."""
        try:
            stored = json.loads((self.path / RUN).read_text(encoding="utf-8"))["config"]
            if all(stored[key] == identity[key] for key in _OF_ANSWERS):
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass
        (self.path / ANSWERS).unlink(missing_ok=True)

    def _check(self, identity: JsonObject) -> None:
        try:
            document = json.loads((self.path / RUN).read_text(encoding="utf-8"))
            stored = document["config"]
            if stored.get("model"):
                known = ModelConfig.of(**of_last_version(stored["model"]))
                stored["model"] = _plain(known.to_dict())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise JaxLlamaError(f"{self.path / RUN}: not a run's configuration") from None
        differences = list(_differences(stored, identity))
        if [key for key, *_ in differences] == ["steps"] and stored["steps"] < identity["steps"]:
            # The model is removed first, because its presence ends a run.
            shutil.rmtree(self.model, ignore_errors=True)
            shutil.rmtree(self.path / "merged", ignore_errors=True)
            document["extended"] = [*document.get("extended", []), stored["steps"]]
            write_text(self.path / RUN, json.dumps({**document, "config": identity}, indent=2))
            return
        for key, theirs, ours in differences:
            raise JaxLlamaError(
                f"{self.path}: another run is there: its {key} is {theirs!r}, and here it is "
                f"{ours!r}; choose another --out"
            )

    def close(self) -> None:
        os.close(self._lock)

    def rows(self, name: str = METRICS) -> list[JsonObject]:
        """Return the lines of metrics.jsonl, without a last line that a kill cut short."""
        path, rows = self.path / name, []
        data = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            if line.endswith(b"\n"):
                try:
                    rows.append(parse_object(line, ""))
                except JaxLlamaError:
                    raise JaxLlamaError(f"{path}:{number}: damaged") from None
        return rows

    def _has_rows(self) -> bool:
        path = self.path / METRICS
        return path.exists() and b"\n" in path.read_bytes()

    def keep(self, sizes: Mapping[str, int]) -> None:
        """Cut metrics.jsonl and samples.jsonl to the bytes that they had before, or to none."""
        (self.path / METRICS).touch()
        for name in (METRICS, SAMPLES):
            if (self.path / name).exists():
                os.truncate(self.path / name, sizes.get(name, 0))

    def is_best(self, value: float, key: str) -> bool:
        """Whether a validation's value, not written yet, is better than all before.

        key: "validation_loss", where less is better, or "validation_reward".
        """
        sign = -1.0 if key == "validation_reward" else 1.0
        before = (sign * row[key] for row in self.rows() if key in row and row["step"])
        return sign * value < min(before, default=math.inf)

    def append(self, rows: Iterable[JsonObject]) -> None:
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def synced(self) -> list[Path]:
        """Return metrics.jsonl and, if it exists, samples.jsonl, after they reach the disk."""
        paths = [path for name in (METRICS, SAMPLES) if (path := self.path / name).exists()]
        for path in paths:
            with open(path, "a", encoding="utf-8") as file:
                os.fsync(file.fileno())
        return paths


def _locked(path: Path) -> int:
    """Return a lock that the system drops when the process ends, however it ends."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise JaxLlamaError(f"{path.parent}: another process is running this") from None
    return handle


def _plain(value: Tree) -> Tree:
    """Return a value as it comes back from JSON."""
    return json.loads(json.dumps(value))


def _differences(a: Tree, b: Tree, key: str = "") -> Iterator[tuple[str, Tree, Tree]]:
    """Yield (key, in a, in b) wherever two JSON values differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(name for name in b if name not in a)]:
            yield from _differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif a != b:
        yield key, a, b


def _environment() -> JsonObject:
    import jaxllama

    return {
        "jaxllama": jaxllama.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
    }
