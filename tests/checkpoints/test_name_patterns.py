"""Patterns of modules' names: PEFT's meaning, in bounded time."""

from __future__ import annotations

import re
import time

import pytest

from jaxllama.checkpoints.name_patterns import first_fitting
from jaxllama.errors import JaxLlamaError

MODULES = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
]


@pytest.mark.parametrize(
    "patterns",
    [
        [],
        ["q_proj", "self_attn.q_proj", "mlp.down_proj"],
        ["proj", "layers.1.self_attn.o_proj", "model.layers.11.mlp.down_proj"],
        [r"layers\.(0|1[01])\..*", "o_proj", r".*\.[a-z]{3}\.(?=down).*"],
        [r"^model.*(?<!q)_proj", ".*"],
        ["model.layers.0.self.attn.q.proj"],
    ],
)
def test_the_first_pattern_fits_as_in_peft(patterns: list[str]) -> None:
    want = [
        next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), None)
        for module in MODULES
    ]
    assert first_fitting(patterns, MODULES, "x.") == want
    assert not patterns or any(want)


def test_a_pattern_of_exponential_time_is_refused() -> None:
    began = time.process_time()
    with pytest.raises(JaxLlamaError, match=r"rank_pattern.: the patterns take more than 1 s"):
        first_fitting([r"(.*.*)*x$"], MODULES, "rank_pattern.")
    assert time.process_time() - began < 0.5  # of this process


def test_what_is_no_pattern_is_named() -> None:
    for patterns, said in (
        (["(" * 900], r"x\.\(\(.*\.\.: no regular expression: "),
        (["q_proj", "(q"], r"x\.\(q: no regular expression: missing \)"),
        (["a" * 1001], r"x\.a+\.\.: longer than 1000 letters"),
        (["a"] * 10_001, "10001 patterns, at most 10000"),
    ):
        with pytest.raises(JaxLlamaError, match=said):
            first_fitting(patterns, MODULES, "x.")
