"""Results as a Markdown table: one row a point, seeds summed up as mean and spread.

    markdown(experiment, rows) -> text          values(row, name) -> a setting or a result

A cell of several seeds is ``mean ± spread / 2``, where the spread is the largest less the smallest;
of one seed, the value.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.config import Experiment

Row = Mapping[str, Any]  # of results.json: point, settings, seed, seconds, results


def markdown(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Title, table, and what did not vary."""
    names = columns(experiment, rows)
    lines = [
        f"# {experiment.title}",
        "",
        "| " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|" + "---|" * len(names),
    ]
    for group in by_point(rows):
        lines.append(
            "| " + " | ".join(cell([value(row, n) for row in group]) for n in names) + " |"
        )
    flat = experiment.points[0].flat
    same = [f"{k} = {v}" for k, v in flat.items() if k not in experiment.axes and v is not None]
    return "\n".join([*lines, "", f"Workload {experiment.workload}: {', '.join(same)}."]) + "\n"


def columns(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """The file's, or what varies and every result that is a number."""
    if experiment.columns:
        return list(experiment.columns)
    results = rows[0]["results"]
    return [*experiment.axes, *(key for key, entry in results.items() if is_number(entry))]


def check_columns(experiment: Experiment, results: Mapping[str, Any]) -> None:
    """Raises JaxLlamaError if table or pictures name what is neither a setting nor a result."""
    known = [*experiment.points[0].flat, *results]
    wanted = [("table.columns", name) for name in experiment.columns]
    for picture in experiment.pictures:
        wanted += [("picture.x", picture.x), ("picture.y", picture.y)]
    for where, name in wanted:
        if name not in known:
            raise JaxLlamaError(f"{where} = {name!r}: allowed: {', '.join(known)}")


def by_point(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of the same point together, in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["point"], []).append(row)
    return list(groups.values())


def value(row: Row, name: str) -> Any:
    """A setting or a result; results are asked first."""
    results = row["results"]
    return results[name] if name in results else row["settings"].get(name)


def is_number(entry: Any) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool)


def cell(entries: Sequence[Any]) -> str:
    """One point's values, one a seed."""
    if all(is_number(entry) for entry in entries) and len(set(entries)) > 1:
        spread = max(entries) - min(entries)
        return f"{number(statistics.mean(entries))} ± {number(spread / 2, digits=2)}"
    if is_number(entries[0]):
        return number(entries[0])
    return "" if entries[0] is None else str(entries[0])


def number(entry: float, digits: int = 4) -> str:
    """Four digits, without exponents where people would not write them."""
    if isinstance(entry, int) or (abs(entry) >= 10 ** (digits - 1) and abs(entry) < 1e15):
        return f"{entry:,.0f}"
    return f"{entry:.{digits}g}"
