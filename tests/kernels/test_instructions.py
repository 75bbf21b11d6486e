"""Every PTX instruction that the kernels emit has a meaning on the emulator, so that
``helpers.warp_emulator`` runs whatever ``pallas_kernels.ptx`` can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pallas_kernels
from tests.helpers import warp_emulator
from tests.helpers.instructions import E4M3, MEANING

HOLE = "\0"  # what an f-string fills in
# Products that run beside the threads, which the emulator steps together.
NOT_EMULATED = "wgmma."


def strings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from strings(child)


def without_meaning(source: str) -> set[str]:
    """Return the instructions in a module's PTX text that the table does not have."""
    missing = set()
    for text in strings(ast.parse(source)):
        if re.search(r"\$\d", text) or re.fullmatch(r"[a-z]+[\w:]*\.\S+( .*)?;", text):
            for name in warp_emulator.names_of(text):
                pattern = re.escape(name).replace(re.escape(HOLE), r"[\w.:]*")
                if name[0].isalpha() and not any(re.fullmatch(pattern, x) for x in MEANING):
                    missing.add(name)
    return {name for name in missing if not name.startswith(NOT_EMULATED)}


@pytest.mark.core
def test_every_instruction_has_a_meaning():
    folder = Path(pallas_kernels.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text()
        if "ptx" in source and path.parent.name != "cpu":
            assert without_meaning(source) == set(), path.relative_to(folder)


def test_an_instruction_without_meaning_is_named():
    assert without_meaning("ptx('{ .reg .b32 r; frob.u32 r, $1; mov.b32 $0, r; }')") == {"frob.u32"}
    assert without_meaning("ptx(f'frob.{kind} $0, $1;')") == {f"frob.{HOLE}"}
    block = warp_emulator.Block(32, 0)
    with pytest.raises(NotImplementedError, match="no meaning for 'frob.u32'"):
        warp_emulator.execute(block, "frob.u32 $0, $1;", [block.c(1)], 1)


def test_text_is_run_as_it_is_written():
    """Declarations, predicates, halves and immediates; the kernel-side functions on numpy."""
    block = warp_emulator.Block(32, 0)
    lane = block.special["tid.x"]
    code = "{ .reg .pred q; setp.ne.u32 q, $2, 0; mov.b32 $0, 7; @q mov.b32 $0, $1; }"
    (got,) = warp_emulator.execute(block, code, [lane + np.uint32(10), lane % np.uint32(2)], 1)
    np.testing.assert_array_equal(got, np.where(lane % 2, lane + 10, 7))
    p = warp_emulator.registers(32)
    x = np.linspace(-3, 3, 32, dtype=np.float32)
    pair = p.pack(x, p.fma(x, x, p.cf(1.0)), "f16")
    np.testing.assert_array_equal(p.widen(pair, "f16"), x.astype(np.float16))
    np.testing.assert_allclose(p.widen_high(pair, "f16"), x * x + 1, rtol=2.0**-11)
    np.testing.assert_array_equal(p.shuffle_xor(lane, 5), lane ^ 5)
    np.testing.assert_array_equal(p.and_xor(lane, 12, 3), (lane & 12) ^ 3)
    assert (p.any_lane(p.equal(lane, 9)) == (block.index >= 0)).all()


def test_codes_are_rounded_from_floats_and_from_their_words():
    """jax hands the bits of a float32 to the conversion, and the kernels hand the float."""
    block = warp_emulator.Block(32, 0)
    code = "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;"
    x = np.linspace(-500, 500, 32, dtype=np.float32)
    want = np.clip(x, -448, 448).astype(E4M3).view(np.uint8)
    for low in x, x.view(np.uint32), x.view(np.int32):
        (got,) = warp_emulator.execute(block, code, [low, np.zeros_like(low)], 1)
        np.testing.assert_array_equal(got, want)
