"""The display of a run: a line for a step, and a picture of its loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxllama import extras
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = JsonObject


def told(row: Row) -> str:
    """Return a step's metrics in a few words."""
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    return f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s{mfu}"


def draw(path: Path, steps: list[Row], validations: list[Row]) -> None:
    """Draw the training and validation loss by tokens. Needs matplotlib."""
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot(
        [row["tokens"] for row in steps],
        [row["loss"] for row in steps],
        linewidth=0.8,
        label="training",
    )
    if validations:
        axes.plot(
            [row["tokens"] for row in validations],
            [row["validation_loss"] for row in validations],
            marker="o",
            markersize=3,
            label="validation (cross entropy)",
        )
    axes.set(xlabel="tokens", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def new_figure() -> Figure:
    """Return a matplotlib Figure without pyplot, whose state is global."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise extras.missing("matplotlib", "training") from None
    return Figure(figsize=(7, 4), layout="constrained")
