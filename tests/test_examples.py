"""Every program of ``jaxllama/examples`` runs, and prints what it promises.

By default those run that call what no other test calls so; the others' calls have tests of their
own, and here the names that they use are looked up.
"""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from pathlib import Path

import pytest

import jaxllama as jl
import jaxllama.examples
from tests.helpers.http_server import tiny_checkpoint
from tests.helpers.models import LLAMA

PRINTS = {
    "plain_llama": "The capital of France is",
    "generate": "Paris",
    "pure_functions": "lengths [8, 5]",
    "batcher": "5 of 5 answers are those of the prompt alone",
    "new_layer": "remembered after 120 steps: 100% of the tokens",
    "quantize": "KL of w8a16 to float32: 0.00",
    "serve_and_call": "ended with status 0",
    "one_kernel": "float8_e4m3fn: 2.0x smaller",
    "flax_layers": "it forecasts",
    "sums": "6000 lines of text, 800 prompts",
    "learn_from_rewards": "step 30: 100% of the tokens are even",
}


# By default on small models: SmolLM2 compiles for the best part of a minute.
TINY = LLAMA.replace(vocab_size=260, d_ff=64)
ON_A_TINY_MODEL = ("plain_llama", "generate", "quantize", "serve_and_call")


QUICK = ("one_kernel",)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in PRINTS]
)
def test_it_runs_and_prints(name, capfd, monkeypatch, tmp_path):
    words = [name]
    if name in ON_A_TINY_MODEL:
        words.append(str(tiny_checkpoint(tmp_path, TINY) / "tiny"))
        load = jl.load
        monkeypatch.setattr(jl, "load", lambda source, **options: load(words[-1], **options))
    if name == "sums":
        words.append(str(tmp_path))
    monkeypatch.setattr(jl, "load_config", lambda preset: LLAMA.replace(vocab_size=49152))
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_module(f"jaxllama.examples.{name}", run_name="__main__")
    # Random weights know no capital, and do not stop.
    assert ("length" if name == "generate" else PRINTS[name]) in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "pure_functions", "quantize"])
def test_it_runs_on_its_own_model(name, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_module(f"jaxllama.examples.{name}", run_name="__main__")
    assert PRINTS[name] in capfd.readouterr().out


def test_none_is_forgotten():
    files = Path(jaxllama.examples.__file__).parent.glob("*.py")
    assert {file.stem for file in files} - {"__init__"} == set(PRINTS)


@pytest.mark.parametrize("name", PRINTS)
def test_the_names_that_it_uses_are_there(name):
    source = Path(jaxllama.examples.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "jl" or hasattr(jl, node.attr), node.attr
