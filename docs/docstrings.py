"""Docstrings as reStructuredText that Sphinx reads without a warning.

``process`` is a listener of Sphinx's ``autodoc-process-docstring``. A docstring here is plain text
with ``double backticks``, lines "name: meaning", indented examples, lines that begin with "|", and
NumPy sections. The listener makes a list of the lines "name: meaning", and literal blocks of
examples and tables. It leaves the sections to napoleon. It escapes the characters that mean
something else to reStructuredText.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

_NAMED = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>.*)")
_CODE = re.compile(r"(``.+?``)")
# The parameters that flax adds to each module.
_FLAX = re.compile(r", parent: .*_Sentinel object>, name: .*?(?=\))")
_SPECIAL = re.compile(r"([*|`@\\]|(?<=\w)_(?!\w))")


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replace the docstring's lines."""
    lines[:] = readable(lines)


def without_flax(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    result: str | None,
) -> tuple[str, str | None] | None:
    """Return a module's signature without flax's own parameters, or None for any other."""
    if what != "class" or signature is None:
        return None
    return _FLAX.sub("", signature), result


def readable(lines: list[str]) -> list[str]:
    """Return the docstring's lines as reStructuredText."""
    head = next((i for i, line in enumerate(lines[1:]) if re.fullmatch(r"-{3,}", line)), len(lines))
    out: list[str] = []
    is_item = False
    for block in _blocks(lines[:head]):
        if block[0].startswith(("|", " ")):
            out += ["", ".. code-block:: text", "", *(f"   {line}" for line in block), ""]
            continue
        is_item = False
        for line in block:
            if is_item and line.startswith("Raises "):
                out.append("")
                is_item = False
            named = _NAMED.fullmatch(line)
            if named:
                names = ", ".join(f"``{one}``" for one in named["names"].split(", "))
                out += [*([] if is_item else [""]), f"* {names}: {_escaped(named['text'])}"]
                is_item = True
            else:
                out.append(f"{'  ' if is_item else ''}{_escaped(line.strip())}")
        out.append("")
    return out + _sections(lines[head:])


def _sections(lines: list[str]) -> list[str]:
    """Return the NumPy sections, for napoleon, with their tables as literal blocks."""
    out: list[str] = []
    for is_table, group in itertools.groupby(lines, key=lambda line: line.startswith("|")):
        if is_table:
            out += ["", ".. code-block:: text", "", *(f"   {line}" for line in group), ""]
        else:
            out += [line if line.startswith((">>> ", "... ")) else _escaped(line) for line in group]
    return out


def _blocks(lines: list[str]) -> list[list[str]]:
    """Return the paragraphs, tables and indented blocks."""
    blocks: list[list[str]] = []
    fresh = True
    for line in lines:
        if not line.strip():
            fresh = True
            continue
        is_table = line.startswith("|")
        joins = blocks and not fresh and is_table == blocks[-1][0].startswith("|")
        if joins:
            blocks[-1].append(line)
        else:
            blocks.append([line])
        fresh = False
    return blocks


def _escaped(text: str) -> str:
    """Escape what reStructuredText would read as markup, outside of ``code``."""
    parts = _CODE.split(text)
    return "".join(
        part if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts)
    )
