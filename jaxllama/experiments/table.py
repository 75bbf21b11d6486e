"""Results as a Markdown table: one row a point, with the mean and spread over seeds.

    markdown(experiment, rows, environment) -> text     value(row, name) -> a setting or a result

A cell of several seeds is ``mean ± spread / 2``, where the spread is the largest value less the
smallest. A cell of one seed is its value.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.config import Experiment
from jaxllama.typing import JsonObject, Tree

PLUS_MINUS = "± is half of the range from"
Row = JsonObject  # an entry of results.json: point, settings, seed, seconds, results


def markdown(experiment: Experiment, rows: Sequence[Row], environment: JsonObject) -> str:
    """Return title, table, the settings that did not vary, the meaning of ±, and the machine."""
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
    settings = f"Workload {experiment.workload}: {', '.join(same)}."
    return "\n".join([*lines, "", settings, "", *facts(experiment, environment, PLUS_MINUS)]) + "\n"


def facts(experiment: Experiment, environment: JsonObject, spread: str) -> list[str]:
    """Return two sentences: the seeds with what ``spread`` says of their range, and the machine."""
    seeds = ", ".join(map(str, experiment.seeds))
    first = f"Means of seeds {seeds}; {spread} the smallest to the largest value."
    if len(experiment.seeds) == 1:
        first = f"One seed, {seeds}: no spread is known."
    machine = (environment["device"], environment["system"], f"jax {environment['jax']}")
    return [first, f"Machine: {', '.join(machine)}, {environment['date'][:10]}."]


def columns(experiment: Experiment, rows: Sequence[Row]) -> list[str]:
    """Return the file's columns, or by default the varying settings and all numeric results."""
    if experiment.columns:
        return list(experiment.columns)
    results = rows[0]["results"]
    return [*experiment.axes, *(key for key, entry in results.items() if is_number(entry))]


def check_columns(experiment: Experiment, results: Iterable[str]) -> None:
    """Raise JaxLlamaError if table or pictures name neither a setting nor one of ``results``."""
    known = [*experiment.points[0].flat, *results]
    wanted = [("table.columns", name) for name in experiment.columns]
    for picture in experiment.pictures:
        wanted += [("picture.x", picture.x), ("picture.y", picture.y)]
    for where, name in wanted:
        if name not in known:
            raise JaxLlamaError(
                f"{experiment.path}: {where} = {name!r}: allowed: {', '.join(known)}"
            )


def by_point(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows by point, in order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["point"], []).append(row)
    return list(groups.values())


def value(row: Row, name: str) -> Tree:
    """Return a result of this name, or else a setting."""
    results = row["results"]
    return results[name] if name in results else row["settings"].get(name)


def is_number(entry: object) -> bool:
    return isinstance(entry, (int, float)) and not isinstance(entry, bool)


def cell(entries: Sequence[Tree]) -> str:
    """Return the cell of one point's values, one a seed."""
    if all(is_number(entry) for entry in entries) and len(set(entries)) > 1:
        spread = max(entries) - min(entries)
        return f"{number(statistics.mean(entries))} ± {number(spread / 2, digits=2)}"
    if is_number(entries[0]):
        return number(entries[0])
    return "" if entries[0] is None else str(entries[0])


def number(entry: float, digits: int = 4) -> str:
    """Return four digits, without exponents for ordinary numbers."""
    if isinstance(entry, int) or (abs(entry) >= 10 ** (digits - 1) and abs(entry) < 1e15):
        return f"{entry:,.0f}"
    return f"{entry:.{digits}g}"
