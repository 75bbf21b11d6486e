"""Files that need Ray or a harness use only names that exist: pyright does not read them here."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "jaxllama"
FILES = [*(ROOT / "serving/ray").glob("*.py"), *(ROOT / "harnesses").glob("*.py")]


def missing_names(source: str) -> list[str]:
    """The names of this project that a file imports or reads from a module, and that no module
    has."""
    missing, modules = [], {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxllama")):
            continue
        try:
            module = importlib.import_module(str(node.module))
        except ModuleNotFoundError:  # one of these files itself
            continue
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            if not hasattr(module, alias.name):
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError:
                    missing.append(name)
                    continue
            found = getattr(module, alias.name)
            if isinstance(found, types.ModuleType):
                modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                missing.append(f"{module.__name__}.{node.attr}")
    return missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_names_exist(path: Path):
    pytest.importorskip("starlette")
    assert missing_names(path.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_found():
    pytest.importorskip("starlette")
    source = "from jaxllama.serving.http import batch, gone\nbatch.Answers()\nbatch.left"
    names = ["jaxllama.serving.http.gone", "jaxllama.serving.http.batch.Answers"]
    assert missing_names(source) == names
