"""Write all that shows measured figures, from ``benchmarks/results/*.json``.

    python docs/results.py        rewrites README.md's table and the pictures in ``docs/_static``

The guide's build writes its page of benchmarks by ``write``.  ``benchmarks/headline.py`` lists the
table's lines; a test compares README.md and the pictures with the files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.headline import README, ROWS, Figure  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: python docs/results.py -->\n", "<!-- end of figures -->"

HEAD = """# Benchmarks

This page is generated from the files in `benchmarks/results`.
`python -m benchmarks.headline NAME` measures a row and writes its file, with all that was printed.
[The lab's pages](lab/index.md) have the other measurements.

One row reads all weights for each token, so the memory's rate bounds its speed:

```{image} _static/roofline.svg
:alt: Tokens a second of one row by the bytes of a token, below the memory's rate
```

"""


def write(page: Path) -> None:
    """Write the page if its text has changed."""
    found = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    # ``assembled.json`` holds registers, not figures of speed.
    found = [result for result in found if "figures" in result]
    order = [*ROWS, *(result["name"] for result in found)]
    found.sort(key=lambda result: order.index(result["name"]))
    text = HEAD + "\n".join(map(section, found))
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def section(result: dict[str, Any]) -> str:
    """Return a result's section: figures beside the peers', and the facts of the measurement."""
    unit = result["unit"]
    rows = [("jaxllama", name, value) for name, value in result["figures"].items()]
    rows += [(name, "", value) for name, value in (result.get("peers") or {}).items()]
    machine, versions = result["machine"], result["versions"]
    used = ", ".join(
        f"{name} {version[:9] if len(version) == 40 else version}"
        for name, version in versions.items()
        if version
    )
    memory = machine["memory"] / 1e9
    host = f"{machine['cores']} cores of {machine['cpu']}, {memory:.0f} GB"
    name = result["name"]
    title = ROWS[name].what.partition(";")[0] if name in ROWS else name
    facts = [
        f"- Name: `{name}`",
        f"- Date: {result['date']}",
        f"- Machine: {machine['devices']}; {host}",
        f"- Versions: {used}",
    ]
    if result.get("source"):
        facts.append(f"- Peers: {result['source']}")
    commands = "\n".join(dict.fromkeys(result["commands"].values()))
    return "\n".join(
        [
            f"## {title}\n",
            f"| | | {unit} |\n|---|---|---|",
            *(f"| {who} | {what} | {number(value)} |" for who, what, value in rows),
            "",
            *facts,
            f"\n```bash\n{commands}\n```\n",
        ]
    )


def number(value: float) -> str:
    """Return a figure with four digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def measured() -> list[tuple[Figure, dict[str, Any]]]:
    """Return the lines of README.md's table whose row has a file, with that file."""
    paths = [(figure, RESULTS / f"{figure.row}.json") for figure in README]
    found = [(figure, json.loads(path.read_text())) for figure, path in paths if path.exists()]
    return [(figure, result) for figure, result in found if figure.label in result["figures"]]


def readme_table() -> str:
    """Return README.md's table: a figure and the peer's in each line, the facts below."""
    lines = ["| | jaxllama | peer | unit |", "|---|---|---|---|"]
    facts: dict[str, list[int]] = {}
    for place, (figure, result) in enumerate(measured(), start=1):
        peer = ""
        if figure.peer is not None:
            peer = f"{number(result['peers'][figure.peer])} {figure.named}"
        ours = number(result["figures"][figure.label])
        lines.append(f"| {figure.what} | {ours} | {peer} | {result['unit']} |")
        machine, versions = result["machine"], result["versions"]
        device = (machine["devices"] or "").partition("gpu ")[2] or machine["cpu"]
        facts.setdefault(f"one {device}, jax {versions['jax']}, {result['date']}", []).append(place)
    where = [f"{_spans(places)} on {fact}" for fact, places in facts.items()]
    return "\n".join([*lines, "", f"Measured: {'; '.join(where)}.\n"])


def _spans(places: list[int]) -> str:
    """Return "lines 1 to 3, 5" for [1, 2, 3, 5], and "line 4" for [4]."""
    spans: list[list[int]] = []
    for place in places:
        if spans and spans[-1][-1] == place - 1:
            spans[-1].append(place)
        else:
            spans.append([place])
    named = ", ".join(str(x[0]) if len(x) == 1 else f"{x[0]} to {x[-1]}" for x in spans)
    return f"line{'s' * (len(places) > 1)} {named}"


def readme_with(text: str) -> str:
    """Return README.md's text with the table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{readme_table()}{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(readme_with(readme.read_text(encoding="utf-8")), encoding="utf-8")
    import pictures

    pictures.write()
