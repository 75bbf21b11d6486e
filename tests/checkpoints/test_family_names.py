"""A family is known by name in its own file alone: the decoder and the rest ask for options."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jaxllama
from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.checkpoints.hf.fla import MODELS
from jaxllama.model.mixers import MIXERS

ROOT = Path(jaxllama.__file__).parent
# Where a family's entry is: its own file, and the tables of the two containers.
OWN = {
    *(ROOT / "checkpoints" / "hf").rglob("*.py"),
    ROOT / "checkpoints" / "gguf" / "architectures.py",
}
# Within that folder these files are of no family.
SHARED = {
    ROOT / "checkpoints" / "hf" / f"{name}.py"
    for name in ("common", "config", "experts", "family", "load", "rope", "save", "tables")
}
# Names of other things: formats of tool calls and of tokenizers, and the form by default.
OTHER = (
    ROOT / "serving" / "tools",
    ROOT / "checkpoints" / "gguf" / "tokenizer.py",
    ROOT / "checkpoints" / "gguf" / "vocabulary.py",
)
DEFAULT = ("config/stored.py", "llama")


def named(path: Path) -> set[str]:
    """Return the families whose names are strings of a file."""
    kinds = {*FAMILIES, *MODELS} - {*MIXERS}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {kind for kind in kinds if kind in strings}


@pytest.mark.core
def test_no_family_is_named_outside_its_own_file():
    found = {
        (path.relative_to(ROOT).as_posix(), kind)
        for path in ROOT.rglob("*.py")
        if (path not in OWN or path in SHARED) and path not in OTHER and path.parent not in OTHER
        for kind in named(path)
    }
    assert found - {DEFAULT} == set()


@pytest.mark.core
def test_the_check_finds_a_name(tmp_path):
    (tmp_path / "x.py").write_text('if family == "gemma2": pass\n', encoding="utf-8")
    assert named(tmp_path / "x.py") == {"gemma2"}
