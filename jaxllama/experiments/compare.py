"""Compare two runs: list the numbers that differ by more than the noise.

    compare(a, b) -> [Difference, ...]          text(differences) -> a Markdown table

Points are matched by their settings, numbers by their names. The noise of a number is the
difference of two means that seeds alone exceed once in a hundred times. The test is Student's,
two-sided, with the variance pooled over both runs. So one of a hundred equal numbers may be listed.
With one seed in
both runs the noise is unknown: every difference is listed and marked so. A difference below 1e-6 of
the value does not count.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

from jaxllama.errors import JaxLlamaError
from jaxllama.experiments.table import Row, by_point, is_number, number
from jaxllama.typing import JsonObject

_SAME = 1e-6
# Student's t at 99%, two-sided, for 1, 2, ... degrees of freedom; the last serves all beyond.
_T99 = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169)


@dataclasses.dataclass(frozen=True)
class Difference:
    """One number of one point; ``noise`` is None if neither run was repeated."""

    point: str
    name: str
    a: float
    b: float
    noise: float | None


def compare(a: str | Path, b: str | Path) -> list[Difference]:
    """Return the differences between two run directories.

    Raises JaxLlamaError for a directory without results, or two without a point in common.
    """
    left, right = _points(Path(a)), _points(Path(b))
    common = [key for key in left if key in right]
    if not common:
        raise JaxLlamaError(f"{a} and {b} have no point in common")
    found = []
    for key in common:
        ours, theirs = left[key], right[key]
        for name, entry in ours[0]["results"].items():
            if is_number(entry) and is_number(theirs[0]["results"].get(name)):
                difference = _difference(ours, theirs, name)
                found += [difference] if difference is not None else []
    return found


def _points(directory: Path) -> dict[str, list[Row]]:
    """Return a run's rows by their settings."""
    path = directory / "results.json"
    try:
        rows: list[JsonObject] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    except OSError as error:
        raise JaxLlamaError(f"{path}: {error.strerror}: not a finished run") from None
    except (ValueError, KeyError):
        raise JaxLlamaError(f"{path}: not a run's results") from None
    return {json.dumps(g[0]["settings"], sort_keys=True): g for g in by_point(rows)}


def _difference(ours: list[Row], theirs: list[Row], name: str) -> Difference | None:
    a, b = ([row["results"][name] for row in rows] for rows in (ours, theirs))
    means = statistics.mean(a), statistics.mean(b)
    noise = _noise(a, b)
    gap = abs(means[0] - means[1])
    if gap <= max(noise or 0.0, _SAME * max(abs(means[0]), abs(means[1]))):
        return None
    return Difference(ours[0]["point"], name, *means, noise)


def _noise(a: list[float], b: list[float]) -> float | None:
    free = len(a) + len(b) - 2
    if not free:
        return None
    squares = sum((entry - statistics.mean(part)) ** 2 for part in (a, b) for entry in part)
    t = _T99[min(free, len(_T99)) - 1]
    return t * math.sqrt(squares / free * (1 / len(a) + 1 / len(b)))


def text(differences: list[Difference]) -> str:
    """Return the differences as a Markdown table."""
    if not differences:
        return "no difference beyond the noise\n"
    lines = ["| point | | A | B | B / A | noise |", "|---|---|---|---|---|---|"]
    for row in differences:
        ratio = number(row.b / row.a) if row.a else ""
        noise = "unknown: one seed" if row.noise is None else number(row.noise, digits=2)
        a, b = number(row.a), number(row.b)
        lines.append(f"| {row.point} | {row.name} | {a} | {b} | {ratio} | {noise} |")
    return "\n".join(lines) + "\n"
