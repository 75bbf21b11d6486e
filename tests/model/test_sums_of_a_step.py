"""A deterministic step adds no floats of its rows by XLA's reductions.

XLA gives a reduction on a GPU a tile of several rows, more where there are more rows, and the tile
decides which threads add.  Sums in ``by_blocks`` have one shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxllama as jl
from jaxllama.config import ExpertsConfig
from jaxllama.model.decoder import forward, stored_logits
from jaxllama.quantization.random_params import param_shapes
from jaxllama.typing import Params
from tests.helpers.models import FAMILIES, HYBRIDS, LATENT, LLAMA

ROWS = 7  # as long as no other axis
NORMED = ExpertsConfig(8, 3, 32, router_bias=True, bias=True, gate_limit=7.0)
SHARED = ExpertsConfig(8, 3, 32, shared=64, shared_gate=True)
SIGMOID = ExpertsConfig(8, 3, 32, scores="sigmoid", choice_bias=True, shared=32)
CASES = FAMILIES | {
    "softmax experts": LLAMA.replace(experts=NORMED, attn_sinks=True),
    "hybrid of experts": HYBRIDS["qwen3.5"].replace(experts=SHARED),
    "latents and experts": LATENT.replace(experts=SIGMOID),
    "kimi": HYBRIDS["kimi"],
    "a norm of all heads": LLAMA.replace(qk_norm="full"),
}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of its parts too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("name", CASES)
def test_a_step_adds_floats_in_one_order(name: str) -> None:
    cfg = CASES[name].replace(fixed_sums=True)
    params = param_shapes(cfg, jnp.bfloat16)
    cache = jax.eval_shape(lambda: jl.init_cache(cfg, ROWS, 64, dtype="bfloat16"))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    def step(params: Params, tokens: jax.Array, lengths: jax.Array, cache: jl.Cache) -> jax.Array:
        hidden, _ = forward(cfg, params, tokens[:, None], lengths, cache)
        return stored_logits(cfg, params, hidden.flat())

    program = jax.make_jaxpr(step)(params, rows, rows, cache)
    found = [
        equation
        for equation in equations(program.jaxpr)
        if equation.primitive.name in ("reduce_sum", "cumsum", "reduce_window_sum")
        and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating)
        and ROWS in equation.invars[0].aval.shape
    ]
    assert not found
