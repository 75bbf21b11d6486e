"""Draw the pictures that an experiment's file asks for, as PNG and SVG, by matplotlib.

Numeric ``x`` values give a line with a marker for each point, and lists give a curve without
markers. Words give bars, or markers if there is a ``by``. With several seeds the line is their
mean, and a band or bar reaches from the smallest to the largest value. A line below says so, and
names the machine. Series over the same words stand side by side. Without matplotlib nothing is
drawn, and one warning says how to install it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxllama import extras
from jaxllama.experiments.config import Experiment, Picture
from jaxllama.experiments.table import Row, by_point, facts, is_number, value
from jaxllama.typing import JsonObject, Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = "osD^vP*X"
_BARS = "bars and bands reach from"


def draw(
    experiment: Experiment, rows: Sequence[Row], directory: Path, environment: JsonObject
) -> list[Path]:
    """Draw every picture, and return the files."""
    if not experiment.pictures:
        return []
    try:
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn(
            f"no pictures: matplotlib is missing; {extras.how('experiment')}, and this again",
            stacklevel=2,
        )
        return []
    paths = []
    for index, picture in enumerate(experiment.pictures):
        only = picture.where.items()
        shown = [row for row in rows if all(value(row, key) == wanted for key, wanted in only)]
        series = _series(picture, shown)
        columns = 1 if max(map(len, series)) > 30 else 3
        legend_rows = -(-len(series) // columns) if picture.by else 0
        figure = Figure(figsize=(7, 4.6 + 0.22 * legend_rows), layout="constrained")
        axes = figure.subplots()
        for number, (label, groups) in enumerate(series.items()):
            _plot(axes, picture, label, groups, number, len(series))
        axes.set(
            xlabel=picture.x.replace("_", " "),
            ylabel=picture.y.replace("_", " "),
            title=picture.title or experiment.title,
        )
        _scale(axes, picture, shown)
        axes.grid(alpha=0.3)
        if picture.by:
            figure.legend(loc="outside lower center", fontsize="small", ncols=columns)
        figure.supxlabel("\n".join(facts(experiment, environment, _BARS)), fontsize=6.5)
        for kind in ("png", "svg"):
            path = directory / f"{index + 1}-{picture.y}-by-{picture.x}.{kind}"
            figure.savefig(path, dpi=150)
            paths.append(path)
    return paths


Group = Sequence[Row]  # one point's seeds


def _series(picture: Picture, rows: Sequence[Row]) -> dict[str, list[Group]]:
    """Group points by their label in the legend."""
    series: dict[str, list[Group]] = {}
    for group in by_point(rows):
        parts = [value(group[0], key) for key in picture.by]
        label = ", ".join(str(part) for part in parts if part is not None)
        series.setdefault(label, []).append(group)
    return series


def _plot(
    axes: Axes, picture: Picture, label: str, groups: list[Group], number: int, n_series: int
) -> None:
    style: JsonObject = {"label": label, "color": f"C{number}"}
    first = value(groups[0][0], picture.x)
    if isinstance(first, list):
        for group in groups:
            ys = np.asarray([value(row, picture.y) for row in group], np.float64)
            axes.plot(first, ys.mean(0), **style)
            if len(group) > 1:
                axes.fill_between(first, ys.min(0), ys.max(0), color=style["color"], alpha=0.2)
            style.pop("label", None)
        return
    ys = np.asarray([[value(row, picture.y) for row in group] for group in groups], np.float64)
    mean = ys.mean(1)
    spread = np.stack([mean - ys.min(1), ys.max(1) - mean]) if ys.shape[1] > 1 else None
    marker = _MARKERS[number % len(_MARKERS)]
    if is_number(first):
        xs = np.asarray([np.mean([value(row, picture.x) for row in group]) for group in groups])
        order = np.argsort(xs)
        spread = None if spread is None else spread[:, order]
        axes.errorbar(xs[order], mean[order], yerr=spread, marker=marker, capsize=2, **style)
        return
    labels: Tree = [str(value(group[0], picture.x)) for group in groups]  # matplotlib takes texts
    if picture.by:
        axes.plot(labels, mean, linestyle="")  # names the places of the words
        places = np.asarray(axes.xaxis.convert_units(labels))
        aside = 0.5 * ((number + 0.5) / n_series - 0.5)
        axes.errorbar(
            places + aside, mean, yerr=spread, marker=marker, linestyle="", capsize=2, **style
        )
    else:
        axes.bar(labels, mean, yerr=spread, capsize=2, color=style["color"])


def _scale(axes: Axes, picture: Picture, rows: Sequence[Row]) -> None:
    """Set the axes' scales; a few chosen x values become the ticks."""
    first = value(rows[0], picture.x)
    if is_number(first) or isinstance(first, list):
        axes.set_xscale(picture.x_scale)
        ticks = sorted({value(row, picture.x) for row in rows} if is_number(first) else first)
        if picture.x_scale == "log" and picture.x in rows[0]["settings"] and len(ticks) <= 12:
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
    axes.set_yscale(picture.y_scale)
