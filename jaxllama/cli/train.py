"""``jaxllama train``: run the training of a TOML file and print a summary."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllama.cli import common
from jaxllama.cli.domains import Parser, out_folder, refusing
from jaxllama.progress import working
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxllama.training.config import TrainConfig
    from jaxllama.training.loop import TrainResult

HELP = "Train or distill a model as a TOML file says."


@refusing
def parse_mesh(text: str) -> str:
    """Check a mesh's form, which may have stages."""
    from jaxllama.parallel.mesh import stage_sizes

    return common.parse_mesh(text) if stage_sizes(text) is None else text


def options(sub: Parser) -> None:
    sub.add_argument("file", metavar="FILE", help="a TOML file, or the name of a shipped one")
    sub.add_argument(
        "--out",
        type=out_folder,
        metavar="DIR",
        help="folder of the run (default runs/NAME); an earlier run continues",
    )
    sub.add_argument(
        "--mesh",
        type=parse_mesh,
        metavar="AXES",
        help="devices that share every step's rows (data=N) or the layers (stage=N)",
    )
    sub.add_argument(
        "--dry-run",
        action="store_true",
        help="time a few steps, print memory and time, and write nothing",
    )
    common.json_option(sub)


def run(args: argparse.Namespace) -> None:
    from jaxllama.training.config import load_train_config
    from jaxllama.training.loop import train

    mesh = common.mesh(args)
    config = load_train_config(args.file)
    if args.dry_run:
        return common.show(args, _planned(args.file, config, mesh), common.lines)
    out = args.out or Path("runs") / Path(args.file).stem
    result = train(config, out, mesh=mesh, progress=True)
    common.show(args, summary(result, config.keep_best), common.lines)


def _planned(file: str, config: TrainConfig, mesh: Mesh | None) -> JsonObject:
    from jaxllama.training.estimate import estimate
    from jaxllama.training.loop import data_mesh
    from jaxllama.training.start import open_data

    grid = None if mesh is None else data_mesh(config, mesh)
    with working("timing a few steps"):
        found = estimate(config, open_data(config), grid)
    return {"file": file, "steps": config.steps, **dataclasses.asdict(found)}


def summary(result: TrainResult, keep_best: bool = False) -> JsonObject:
    """Return the command's rows.

    Speed is the median over the steps after the first, which compiles. The validation loss is the
    written model's: the last one, or the lowest with ``keep_best``, which adds its step.
    """
    steps = result.metrics
    last, timed = steps[-1], steps[1:] or steps
    rows = {
        "directory": str(result.directory),
        "model": str(result.model),
        "steps": last["step"],
        "tokens": last["tokens"],
        "loss": last["loss"],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in timed),
        "mfu": last["mfu"] and statistics.median(row["mfu"] for row in timed),
    }
    if "reward" in last:
        rows["reward"] = last["reward"]
    if result.validation:
        key = "validation_reward" if "reward" in last else "validation_loss"
        written = result.validation[-1]
        if keep_best:
            best = max if "reward" in last else min
            written = best(result.validation, key=lambda row: row[key])
            rows["best_step"] = written["step"]
        rows[key] = written[key]
    return rows
