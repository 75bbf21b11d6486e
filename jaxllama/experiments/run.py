"""Measure an experiment's points one by one, into a directory from which a killed run continues.

    run(experiment, out) -> directory

    config.json        everything that the numbers depend on, with the files' SHA-256
    environment.json   machine, versions, commit
    results/*.json     one file a point and seed, written whole when the point is done
    work/*             a workload's own state inside a point (training's checkpoints)
    results.json  table.md  *.png      made from the files above at every end of a run

Contract: a directory of another configuration, or of this one on another machine or jax, is refused
and stays unchanged. A finished point is not measured again. Left out: two processes in one
directory at once (they would measure some points twice).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

import jaxllama
from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.config import Experiment, Point, digest
from jaxllama.experiments.pictures import draw
from jaxllama.experiments.settings import FILES, NO_FILES
from jaxllama.experiments.table import check_columns, markdown
from jaxllama.experiments.workloads import OF_SEEDS, WORKLOADS, check
from jaxllama.files import write_text
from jaxllama.progress import working, write
from jaxllama.typing import JsonObject

RUNS = Path("runs")
_MACHINE = ("jax", "backend", "device", "devices")  # facts that must not change inside a run


def run(
    experiment: Experiment,
    out: Path | None = None,
    tell: Callable[[str], None] = write,
) -> Path:
    """Measure the missing points, then write table and pictures.

    tell: called with progress. Raises JaxLlamaError for a directory of another run, a missing file,
    or a point that its workload refuses.
    """
    check(experiment)
    directory = run_directory(experiment) if out is None else out
    _open(directory, experiment)
    # Seed by seed and not point by point, so that a point's spread includes the machine's drift.
    work = [(point, seed) for seed in experiment.seeds for point in experiment.points]
    missing = [(point, seed) for point, seed in work if not _file(directory, point, seed).exists()]
    if len(missing) < len(work):
        tell(f"{directory}: {len(work) - len(missing)} of {len(work)} are there already")
    begun = time.perf_counter()
    done = 0
    for point, seeds in _at_once(experiment, missing):
        left, several = _left(begun, done, len(missing)), "s" * (len(seeds) > 1)
        of = f"seed{several} {', '.join(map(str, seeds))}"
        tell(f"[{done + len(seeds)}/{len(missing)}] {point.name}, {of}{left}")
        with working(point.name):
            measured = _measure(experiment, point, seeds, directory)
        for measurement in measured:
            _write(_file(directory, point, measurement["seed"]), measurement)
        done += len(seeds)
    rows = [
        json.loads(_file(directory, *measurement).read_text(encoding="utf-8"))
        for measurement in work
    ]
    _write(directory / "results.json", {"title": experiment.title, "rows": rows})
    environment = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    write_text(directory / "table.md", markdown(experiment, rows, environment))
    for picture in draw(experiment, rows, directory, environment):
        tell(f"{picture}")
    return directory


def run_directory(experiment: Experiment) -> Path:
    """Return the default directory of a run, which depends on the configuration."""
    return RUNS / f"{experiment.path.stem}-{experiment.digest}"


def finished(experiment: Experiment, directory: Path) -> int:
    """Return the number of finished measurements."""
    return sum(
        _file(directory, point, seed).exists()
        for point in experiment.points
        for seed in experiment.seeds
    )


def _left(begun: float, done: int, of: int) -> str:
    if not done:
        return ""
    seconds = (time.perf_counter() - begun) / done * (of - done)
    return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"


def _at_once(
    experiment: Experiment, missing: list[tuple[Point, int]]
) -> list[tuple[Point, list[int]]]:
    """Group the measurements: one seed, or all seeds of a point if the workload allows it."""
    if experiment.workload not in OF_SEEDS:
        return [(point, [seed]) for point, seed in missing]
    seeds: dict[str, tuple[Point, list[int]]] = {}
    for point, seed in missing:
        seeds.setdefault(point.name, (point, []))[1].append(seed)
    return list(seeds.values())


def _measure(
    experiment: Experiment, point: Point, seeds: list[int], directory: Path
) -> list[JsonObject]:
    begun = time.perf_counter()
    try:
        if experiment.workload in OF_SEEDS:
            results = OF_SEEDS[experiment.workload](experiment, point.settings, seeds)
        else:
            (seed,) = seeds
            room = directory / "work" / _stem(point, seed)
            results = [WORKLOADS[experiment.workload](experiment, point.settings, seed, room)]
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{experiment.path}: {point.name}: {error}") from None
    seconds = (time.perf_counter() - begun) / len(seeds)
    check_columns(experiment, results[0])
    return [
        {
            "point": point.name,
            "settings": point.flat,
            "seed": seed,
            "seconds": seconds,
            "results": result,
        }
        for seed, result in zip(seeds, results, strict=True)
    ]


def _stem(point: Point, seed: int) -> str:
    """Return a file name that is readable and unique to the point."""
    words = re.sub(r"[^\w.=-]+", "_", point.name)[:80]
    return f"{words}-{digest(point.flat)}-seed{seed}"


def _file(directory: Path, point: Point, seed: int) -> Path:
    return directory / "results" / f"{_stem(point, seed)}.json"


def _open(directory: Path, experiment: Experiment) -> None:
    """Create the directory, or check that it belongs to this run."""
    config = {**experiment.identity, "files": dict(_hashes(experiment))}
    environment = machine()
    # config.json is written last: without it the run was killed here, or the folder is foreign.
    there = {path.name for path in directory.iterdir()} if directory.exists() else set()
    if there <= {"results", "environment.json", "environment.json.part", "config.json.part"}:
        (directory / "results").mkdir(parents=True, exist_ok=True)
        _write(directory / "environment.json", environment)
        _write(directory / "config.json", config)
        return
    try:
        before = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        there = json.loads((directory / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise JaxLlamaError(
            f"{directory}: not a run's directory; give another with --out"
        ) from None
    if before != config:
        changed = [key for key in config if before.get(key) != config[key]]
        raise JaxLlamaError(
            f"{directory}: holds a run with other {', '.join(changed)}; give another with --out"
        )
    for key in _MACHINE:
        if there.get(key) != environment[key]:
            raise JaxLlamaError(
                f"{directory}: was begun with {key} {there.get(key)}, and this is "
                f"{environment[key]}; give another with --out"
            )


def _hashes(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield (name, SHA-256) of every file that the settings name.

    Raises JaxLlamaError for a missing file.
    """
    names = {point.flat.get(key) for point in experiment.points for key in FILES}
    for name in sorted(name for name in names if name is not None and name not in NO_FILES):
        path = experiment.find(name)
        try:
            yield name, hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise JaxLlamaError(f"{experiment.path}: {path}: {error.strerror}") from None


def machine() -> JsonObject:
    """Return the facts of this machine."""
    device = jax.devices()[0]
    return {
        "jaxllama": jaxllama.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str | None:
    """Return the checkout's commit, with "+" if files have changed; None outside of a checkout."""
    here = ["git", "-C", str(Path(__file__).parent)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head, changes = (
            subprocess.run([*here, *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
        return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
    return None


def _write(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")
