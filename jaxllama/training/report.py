"""The display of a run: a line for a step, and pictures of its curves.

A picture's title is the name of the run's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxllama import extras
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = JsonObject
# Titles of the panels, with units, by the key of metrics.jsonl.
_REWARDS = {
    "reward": "mean reward of an answer",
    "length": "length, tokens",
    "kl": "divergence, nats a token",
    "entropy": "entropy, nats a token",
    "gap_kl": "gap of the engine, nats a token",
    "gap_max": "largest gap, nats",
}


def metrics_line(row: Row) -> str:
    """Return a step's metrics in a few words."""
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    if "reward" in row:
        return f"reward {row['reward']:.3f}, length {row['length']:.1f}, {row['seconds']:.2f} s"
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
    if validations and "validation_loss" in validations[0]:
        axes.plot(
            [row["tokens"] for row in validations],
            [row["validation_loss"] for row in validations],
            marker="o",
            markersize=3,
            label="validation (cross entropy)",
        )
    axes.set(title=path.parent.name, xlabel="tokens", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_rewards(path: Path, steps: list[Row], validations: list[Row]) -> None:
    """Draw what a run with rewards measures at each step. Needs matplotlib."""
    figure = new_figure(5)
    panels = figure.subplots(2, 3, sharex=True).ravel()
    for axes, (key, title) in zip(panels, _REWARDS.items(), strict=True):
        axes.plot([row["step"] for row in steps], [row[key] for row in steps], linewidth=0.8)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
    for axes in panels[3:]:
        axes.set(xlabel="step")
    figure.suptitle(path.parent.name)
    if validations:
        panels[0].plot(
            [row["step"] for row in validations],
            [row["validation_reward"] for row in validations],
            marker="o",
            markersize=3,
            label="held out, greedy",
        )
        panels[0].legend()
    figure.savefig(path, dpi=120)


def new_figure(height: float = 4) -> Figure:
    """Return a matplotlib Figure without pyplot, whose state is global."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise extras.missing("matplotlib", "training", "train") from None
    return Figure(figsize=(7, height), layout="constrained")
