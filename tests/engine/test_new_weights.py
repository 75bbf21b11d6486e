"""New weights of floats are quantized as those that they replace."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from pallas_kernels.qtensor import QTensor
from tests.helpers.models import FAMILIES, LLAMA
from tests.helpers.seeded import seeded_params

CFG = LLAMA.replace(n_layers=1, layer_types=(), eos_token_ids=())
WIDE = CFG.replace(d_model=64, d_ff=128, n_heads=4, n_kv_heads=2, head_dim=16)


def floats(cfg, seed=0, dtype="float32"):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), seeded_params(cfg, seed))


def engine_of(lm):
    return Engine(lm, max_slots=2, max_len=64, prefill_chunk=32, prefill_rows=1)


def answer(engine):
    request = Request("a", tuple(range(1, 41)), 6)
    events = engine.generate([request])["a"]
    return [token for event in events for token in event.tokens], events[-1].cached_tokens


def held():
    """Bytes of jax's arrays."""
    gc.collect()
    return sum(leaf.nbytes for leaf in jax.live_arrays())


@pytest.mark.parametrize(
    "scheme",
    [
        "w8a8",
        *(
            pytest.param(scheme, marks=pytest.mark.slow)
            for scheme in (
                "w8a16",
                "w4a16",
                "w4a16-g16",
                "w4a8",
                "fp8",
                "mxfp4",
                "nvfp4",
                "fp8-block",
                "w4a16,head=w8a16",
                "w8a16,embed=w8a16",
            )
        ),
    ],
)
@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_floats_are_quantized_as_the_weights_that_they_replace(scheme, exact):
    """The codes are ``quantize_params``'s, in XLA's layout and in the CPU's, also from bfloat16."""
    from jaxllama.engine.weights import replaced

    cfg = WIDE.replace(tie_embeddings="head" in scheme)
    first = jl.quantize_params(floats(cfg), scheme)
    lm = LanguageModel(cfg, first, None, exact=exact)
    for dtype in ("float32", "bfloat16"):
        new = floats(cfg, 1, dtype)
        same = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), new)
        got = replaced(lm, new).params
        want = LanguageModel(cfg, jl.quantize_params(same, scheme), None, exact=exact).params
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # numpy knows NaN, which pads e8m0's scales, in its own floats only
            np.testing.assert_array_equal(*(np.asarray(x).astype(np.float32) for x in (one, other)))


@pytest.mark.slow
def test_a_thousand_new_weights_compile_nothing_and_keep_no_memory():
    cfg = FAMILIES["delta"].replace(eos_token_ids=())
    engine = engine_of(LanguageModel(cfg, jl.quantize_params(floats(cfg), "w8a8"), None))
    engine.warm_up()
    trees = [floats(cfg, seed) for seed in range(2)]
    wants, size = [], None
    for number in range(1000):
        engine.update_params(trees[number % 2])
        if number < 2:
            wants.append(answer(engine)[0])
            size = held()
        elif number % 50 < 2:
            assert answer(engine) == (wants[number % 2], 0)
    assert wants[0] != wants[1] and engine.stats().compilations == 0
    assert held() == size


def test_new_scales_of_rows_do_not_pass_for_those_of_blocks():
    """A kernel reads one scale for 128 rows of a weight that says that they share it."""
    from jaxllama.engine.weights import replaced

    def params(scale):
        w = QTensor(np.ones((128, 256), "float8_e4m3fn"), scale, blocked=blocked)
        return {"embed": {"weight": w}}

    ones, blocked = np.ones((128, 2), np.float32), 128
    lm = LanguageModel(CFG, jax.tree.map(jnp.asarray, params(ones)), None, exact=True)
    blocked = None
    got = replaced(lm, params(2 * ones)).params["embed"]["weight"]
    assert got.has_blocks and got.scale[0, 0] == 2
    with pytest.raises(jl.JaxLlamaError, match="embed/weight: rows have scales of their own"):
        replaced(lm, params(np.arange(256, dtype=np.float32).reshape(128, 2)))
