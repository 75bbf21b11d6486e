"""Draw the guide's pictures of measured figures: ``python docs/results.py`` writes them.

The figures come from ``benchmarks/results`` and from the tables of ``docs/lab``; a test compares
the files with them.  The pictures are narrow, so that a phone shows readable text.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from results import RESULTS, measured

FOLDER = Path(__file__).parent / "_static"
LAB = Path(__file__).parent / "lab"
WIDTH = 460  # of each picture
OURS, PEER = "#2f6fb3", "#c33"


def headline() -> str:
    """Return how many times the peer's speed each line of README.md's table has."""
    bars = [
        (figure, result["figures"][figure.label] / result["peers"][figure.peer])
        for figure, result in measured()
        if figure.peer is not None
    ]
    bars = [(figure, x if figure.more_is_better else 1 / x) for figure, x in bars]
    unit = (WIDTH - 150) / max(times for _, times in bars)
    parts = [_text(8, 18, "speed, peer = 1", "bold")]
    for place, (figure, times) in enumerate(bars):
        y = 42 + 42 * place
        parts += [_text(8, y, figure.what), _bar(8, y + 6, unit * times)]
        parts.append(_text(14 + unit * times, y + 19, f"{times:.2f}x {figure.named}"))
        parts.append(_line(8 + unit, y + 4, 8 + unit, y + 25))
    return _picture(42 * len(bars) + 36, parts)


def schemes() -> str:
    """Return the speed and the damage of quantization schemes, beside bfloat16's."""
    one, page = _table("model.md", "one row, context 1,024")
    many, _ = _table("model.md", "Llama-3.1-8B")
    losses, _ = _table("quantization.md", "method")
    loss = {
        "w8a16": losses["**`w8a16`, GPTQ** (the head to nearest)"],
        "w4a16": losses["**and 64 steps of tuning**"],
        "w8a8": losses["**`w8a8`, GPTQ** (behind SmoothQuant's scales)"],
        "w4a8": losses["`w4a8`"],
    }
    groups = {
        "one row": {
            "bfloat16": one["bfloat16"],
            "w8a16": one["W8A16"],
            "w4a16": one["with zeros"],
        },
        "64 rows": {
            "bfloat16": many["batch 64, bfloat16"],
            "w8a8": one["Llama-3.1-8B, 64 rows, int8 cache, W8A8"],
            "w4a8": one["W4A8"],
        },
    }
    parts = [
        _text(84, 18, "speed, bfloat16 = 1", "bold"),
        _text(284, 18, "rise of perplexity", "bold"),
    ]
    y = 20
    for name, rows in groups.items():
        y += 22
        parts.append(_text(8, y, name, "bold"))
        base = _number(rows["bfloat16"][0])
        for scheme, cells in rows.items():
            y += 25
            times = _number(cells[0]) / base
            rise = _number(loss[scheme][0]) if scheme in loss else 0.0
            parts += [_text(8, y, scheme), _bar(84, y - 13, 50 * times)]
            parts.append(_text(90 + 50 * times, y, f"{times:.2f}x"))
            parts.append(_bar(284, y - 13, 8 * rise, PEER))
            parts.append(_text(290 + 8 * rise, y, f"+{rise:.2g}%" if rise else "0"))
        y += 6
    facts = (
        f"Speed: Llama-3.1-8B, {_facts(page)}; bfloat16 with 64 rows",
        "jax 0.11.2, w8a8 and w4a8 with an int8 cache. Perplexity: SmolLM2-135M",
        "on API texts, by GPTQ, w4a16 also tuned. docs/lab has other kinds of text.",
    )
    parts += [_text(8, y + 24 + 16 * k, fact, size=11) for k, fact in enumerate(facts)]
    return _picture(y + 64, parts)


def roofline() -> str:
    """Return the tokens a second of one row by the bytes of a token, below the memory's rate."""
    table, page = _table("model.md", "one row, context 1,024")
    [rate] = re.findall(r"weights' bytes at ([\d.]+) TB/s", page)
    left, right, top, bottom = 46, WIDTH - 12, 34, 270

    def place(gigabytes: float, rate: float) -> tuple[float, float]:
        x = left + (right - left) * math.log(gigabytes / 0.2) / math.log(100)
        y = bottom - (bottom - top) * math.log(rate / 150) / math.log(40)
        return x, y

    parts = [_text(8, 18, "one row: tokens/s by GB that a token reads", "bold")]
    for value in (0.2, 0.5, 1, 2, 5, 10, 20):
        x, _ = place(value, 150)
        parts.append(_line(x, top, x, bottom, "#ddd"))
        parts.append(_text(x, bottom + 16, f"{value:g}", at="middle"))
    for value in (200, 500, 1000, 2000, 5000):
        _, y = place(1, value)
        parts += [_line(left, y, right, y, "#ddd"), _text(left - 6, y + 4, f"{value:,}", at="end")]
    limit = 1000 * float(rate)
    parts.append(_line(*place(limit / 6000, 6000), *place(20, limit / 20)))
    model, peers = "", {}  # bytes of a token of the peer's model, by scheme
    for name, cells in table.items():
        if "64 rows" in name:
            break
        model, _, scheme = name.rpartition(", ") if ", " in name else (model, "", name)
        if scheme == "with zeros":
            continue
        turn, share = _number(cells[2]), _number(cells[3]) / 100
        gigabytes = share * limit * turn / 1e6
        x, y = place(gigabytes, _number(cells[0]))
        label = f"{model.removeprefix('Llama-')} {scheme.split()[0]}"
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="5" fill="{OURS}"/>')
        if x > left + 100:
            parts.append(_text(x - 9, y + 4, label, at="end", size=12))
        else:
            parts.append(_text(x - 24, y - 10, label, size=12))
        if model == "Llama-3.1-8B":
            peers[scheme.split()[0].lower()] = gigabytes
    found = json.loads((RESULTS / "decode.json").read_text())["peers"]
    for scheme, gigabytes in peers.items():
        x, y = place(gigabytes, found[f"gpt-fast {scheme}"])
        parts.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="#fff" stroke="{PEER}"/>')
    facts = (
        f"Line: {rate} TB/s, the memory's rate. A step on it does nothing but read.",
        f"Points: jaxllama, {_facts(page)}. Circles: gpt-fast, 3.1-8B.",
    )
    parts += [_text(8, bottom + 42 + 17 * k, fact, size=11) for k, fact in enumerate(facts)]
    return _picture(bottom + 68, parts)


PICTURES = {"headline": headline, "schemes": schemes, "roofline": roofline}


def write() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


def _table(page: str, first: str) -> tuple[dict[str, list[str]], str]:
    """Return the rows of a lab page's table by their first cells, and the page's text on one line.

    A name that comes again is left out, so the first of equal names counts.
    """
    text = (LAB / page).read_text(encoding="utf-8")
    lines = text[text.index(f"\n| {first} |") + 1 :].partition("\n\n")[0].splitlines()
    rows: dict[str, list[str]] = {}
    model = ""
    for line in lines[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows.setdefault(name if name not in rows else f"{model}, {name}", cells)
        model = name.rpartition(", ")[0] or model
    return rows, " ".join(text.split())


def _facts(page: str) -> str:
    """Return jax, card and date of the first table of one row, as the page states them."""
    return re.findall(r"jax [\d.]+, one H200, \d{4}-\d\d-\d\d", page)[0]


def _number(cell: str) -> float:
    """Return the first number of a cell."""
    return float(re.findall(r"[\d,]+\.?\d*", cell)[0].replace(",", ""))


def _text(x: float, y: float, text: str, weight: str = "", at: str = "", size: int = 13) -> str:
    more = (f' font-weight="{weight}"' if weight else "") + (f' text-anchor="{at}"' if at else "")
    more += f' font-size="{size}"' if size != 13 else ""
    return f'<text x="{x:.0f}" y="{y:.0f}"{more}>{text}</text>'


def _bar(x: float, y: float, width: float, fill: str = OURS) -> str:
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="17" rx="3" fill="{fill}"/>'


def _line(x: float, y: float, to_x: float, to_y: float, stroke: str = PEER) -> str:
    dashes = ' stroke-dasharray="4 3"' if stroke == PEER else ""
    return (
        f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{to_x:.0f}" y2="{to_y:.0f}" '
        f'stroke="{stroke}"{dashes}/>'
    )


def _picture(height: float, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        'font-family="sans-serif" font-size="13" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )
