"""A decode step on Hopper as one program: which kernels a layer is, read off the lowered text."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from models import LLAMA

import jaxllama as jl
from jaxllama.generation import init_params
from pallas_kernels import dispatch

CFG = LLAMA.replace(
    vocab_size=1024,
    d_model=1024,
    n_layers=3,
    layer_types=("attention",) * 3,
    n_heads=8,
    n_kv_heads=2,
    head_dim=128,
    d_ff=2048,
)


def kernels_of(batch: int, scheme: str | None, kv_dtype: str) -> Counter[str]:
    """Calls of Mosaic kernels in the whole step, by the jitted function that holds one."""

    def params():
        drawn = init_params(CFG, jax.random.key(0), jnp.bfloat16)
        return drawn if scheme is None else jl.quantize_params(drawn, scheme)

    cache = jax.eval_shape(lambda: jl.init_cache(CFG, batch, 256, kv_dtype))
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = jl.decode_step.trace(CFG, jax.eval_shape(params), tokens, cache)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    calls = Counter(re.findall(r"call @(\w+)\(", text))
    kernels = Counter()
    for function in re.split(r"\n  func\.func ", text)[1:]:
        name = re.match(r"\w+ @(\w+)", function).group(1)
        if "@mosaic_gpu" in function:
            kernels[re.sub(r"_\d+$", "", name)] += calls[name]
    return kernels


@pytest.fixture
def on_hopper(monkeypatch):
    if tuple(int(v) for v in jax.__version__.split(".")[:3]) < (0, 11, 2):
        pytest.skip(f"jax {jax.__version__}: the kernels need 0.11.2")
    jax.clear_caches()
    monkeypatch.setattr(dispatch, "hopper_reason", lambda: None)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", None])
def test_a_llama_layer_of_one_row_is_five_kernels(on_hopper, scheme):
    """norm + qkv, RoPE + cache + attention, o + residual, norm + gate/up + SwiGLU, down + residual;
    after the layers the last norm and the head."""
    calls = kernels_of(1, scheme, "bfloat16")
    assert calls == {"matmul": 4 * CFG.n_layers + 1, "attend": CFG.n_layers, "run": 1}
