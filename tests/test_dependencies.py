"""What pyproject.toml declares is what the packages import, and resolves on every Python."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"test", "dev"}
NOT_IMPORTED = {"jaxlib"}  # jax's own


def named(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported() -> set[str]:
    """Top-level modules of other distributions that the two packages import."""
    found: set[str] = set()
    for package in ("jaxllama", "pallas_kernels"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r"^ *(?:import|from) ([a-zA-Z]\w*)(?=[ .]|$)", text, re.M))
    return found - sys.stdlib_module_names - {"jaxllama", "pallas_kernels"}


@pytest.mark.core
def test_every_import_is_declared_and_every_dependency_imported():
    distributions = importlib.metadata.packages_distributions()
    extras = [
        text for name, texts in EXTRAS.items() if name not in FOR_DEVELOPERS for text in texts
    ]
    base = named(PROJECT["dependencies"])
    declared = base | named(extras)
    used: set[str] = set()
    for module in imported():
        names = {canonicalize_name(name) for name in distributions.get(module, ())}
        used |= names & declared or names  # several distributions share a namespace
    assert used - base - named(extras) == set()
    assert base - used - NOT_IMPORTED == set()


def imports_of(name: str, path: Path, modules: set[str]) -> set[str]:
    """Modules of the two packages that a file imports, in functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & modules or {str(node.module)}
    return found & modules - {name}


def test_no_module_imports_itself_through_others():
    packages = "jaxllama", "pallas_kernels"
    files = [path for package in packages for path in ROOT.glob(f"{package}/**/*.py")]
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
    }
    graph = {name: imports_of(name, path, set(modules)) for name, path in modules.items()}
    assert graph["pallas_kernels.attention.direct"] >= {"pallas_kernels.attention.operands"}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle
    assert len(order) == len(modules)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_gpu_s_jax_exists_for_every_python(version):
    """jax has no 0.11 for Python 3.11."""
    wanted = [
        one
        for text in EXTRAS["cuda13"]
        if (one := Requirement(text)).marker is None
        or one.marker.evaluate({"python_version": version})
    ]
    newest = "0.10.2" if version == "3.11" else "0.12.0"
    assert len(wanted) == 1 and wanted[0].specifier.contains(newest)
    assert wanted[0].specifier.contains("0.10.2") == (version == "3.11")
