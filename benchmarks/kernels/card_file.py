"""Writes fitted costs into a card's file of ``pallas_kernels/cards``."""

from __future__ import annotations

from collections.abc import Mapping

from pallas_kernels.cards.table import KernelCost, path_of

_HEAD = "[costs]"


def write_costs(card: str, costs: Mapping[str, KernelCost]) -> None:
    """Put costs into a card's file, which is made if it is not there.  All else in it stays."""
    path = path_of(card)
    lines = path.read_text().splitlines() if path.exists() else []
    if not any(line.startswith(_HEAD) for line in lines):
        lines += ["", _HEAD]
    places = {line.split(" = {")[0]: i for i, line in enumerate(lines) if " = { start" in line}
    head = next(i for i, line in enumerate(lines) if line.startswith(_HEAD))
    more = []
    for family, cost in sorted(costs.items()):
        place = places.get(f'"{family}"')
        if place is None:
            more.append(_line(family, cost))
        else:
            lines[place] = _line(family, cost)
    lines[head + 1 : head + 1] = more
    path.write_text("\n".join(lines) + "\n")


def _line(family: str, cost: KernelCost) -> str:
    parts = [f"start = {cost.start}"]
    parts += [f"serial = {list(cost.serial)}"] if cost.serial else []
    parts += [f"shared = {list(cost.shared)}"] if cost.shared else []
    return f'"{family}" = {{ {", ".join(parts)} }}'
