"""What a run shows: a bar while it works, and a picture of its loss."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxllama.errors import JaxLlamaError

Row = dict[str, Any]


@contextlib.contextmanager
def training_bar(first: int, steps: int, show: bool) -> Iterator[Callable[[Row], None]]:
    """Yield ``show(row of a step)``; nothing on a stderr that is no terminal."""
    if not show or not sys.stderr.isatty():
        yield lambda row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), Remaining(),
               TextColumn("{task.fields[text]}"))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=steps, completed=first, text="compiling")

        def advance(row: Row) -> None:
            mfu = "" if row["mfu"] is None else f"  MFU {row['mfu']:.1%}"
            text = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tokens/s{mfu}"
            bar.update(task, completed=row["step"], text=text)

        yield advance


def draw(path: Path, steps: list[Row], validations: list[Row]) -> None:
    """Loss by tokens, training and validation.  Needs matplotlib."""
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([row["tokens"] for row in steps], [row["loss"] for row in steps],
              linewidth=0.8, label="training")  # fmt: skip
    if validations:
        axes.plot([row["tokens"] for row in validations],
                  [row["validation_loss"] for row in validations],
                  marker="o", markersize=3, label="validation (cross entropy)")  # fmt: skip
    axes.set(xlabel="tokens", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def new_figure() -> Any:
    """A matplotlib Figure of its own: no pyplot, whose state is global."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise JaxLlamaError("training needs matplotlib: pip install 'jaxllama[train]'") from None
    return Figure(figsize=(7, 4), layout="constrained")
