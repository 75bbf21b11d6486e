"""Write the page of benchmarks from ``benchmarks/results/*.json`` (``benchmarks/results.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"

HEAD = """# Benchmarks

This page is generated from the files in `benchmarks/results`.
`python -m benchmarks.headline NAME` measures a row and writes its file.
[The lab's pages](lab/index.md) have the other measurements.

"""


def write(page: Path) -> None:
    """Write the page if its text has changed."""
    results = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]
    text = HEAD + "\n".join(map(section, results))
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")


def section(result: dict[str, Any]) -> str:
    """Return a result's section: figures beside the peers', and the facts of the measurement."""
    unit = result["unit"]
    rows = [("jaxllama", name, value) for name, value in result["figures"].items()]
    rows += [(name, "", value) for name, value in (result.get("peers") or {}).items()]
    machine, versions = result["machine"], result["versions"]
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    memory = machine["memory"] / 1e9
    host = f"{machine['cores']} cores of {machine['cpu']}, {memory:.0f} GB"
    facts = [
        f"- Date: {result['date']}",
        f"- Machine: {machine['devices']}; {host}",
        f"- Versions: {used}",
    ]
    if result.get("source"):
        facts.append(f"- Peers: {result['source']}")
    commands = "\n".join(dict.fromkeys(result["commands"].values()))
    output = "\n".join(line for lines in result["output"].values() for line in lines)
    return "\n".join(
        [
            f"## {result['name']}\n",
            f"| | | {unit} |\n|---|---|---|",
            *(f"| {who} | {what} | {value:,.4g} |" for who, what, value in rows),
            "",
            *facts,
            f"\n```text\n{commands}\n```\n",
            f"```text\n{output}\n```\n",
        ]
    )
