"""Attention from latents: the absorbed form over a cache is the expanded form of whole rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import ModelConfig, RopeConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers.attention import cudnn
from jaxllama.model.mixers.latent import mix as latent
from pallas_kernels.latent import step
from pallas_kernels.latent.op import latent_attention
from pallas_kernels.latent.plan import LatentPlan
from tests.helpers.cudnn_plain import plain
from tests.helpers.models import LATENT, check_chunks_and_steps, check_offloaded, params_of

CFG = LATENT.first_layers(1)


def test_the_cache_has_one_head_of_latents_and_no_values():
    cache = jax.eval_shape(lambda: jl.init_cache(LATENT, 2, 16, "float32"))
    assert [layer.k.shape for layer in cache.layers] == [(2, 16, 1, 14)] * 2
    assert all(layer.v is None for layer in cache.layers)
    assert cache.nbytes == 2 * (2 * 16 * 14 * 4) + 2 * 4


def test_eight_bits_hold_latents_and_sixteen_the_turning_keys():
    cache = jax.eval_shape(lambda: jl.init_cache(LATENT, 2, 16, "int8"))
    assert [layer.k.shape for layer in cache.layers] == [(2, 16, 1, 14)] * 2
    assert cache.nbytes == 2 * (2 * 16 * (12 + 4 + 2 * 2)) + 2 * 4


@pytest.mark.parametrize(
    ("dtype", "bound", "pages"),
    [
        ("float32", 1e-5, False),
        pytest.param("float32", 1e-5, True, marks=pytest.mark.slow),
        pytest.param("int8", 0.03, True),
        pytest.param("int4", 0.3, False, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", 0.1, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_and_steps_over_a_cache_are_whole_rows(dtype, bound, pages):
    check_chunks_and_steps(CFG, dtype, bound, pages, n=4)


@pytest.mark.parametrize("shapes", ["btnd,ndr->btnr", "btnr,nvr->btnv"])
def test_one_row_s_product_of_heads_stays_a_product_on_a_gpu(shapes, monkeypatch):
    """A GPU's form has two rows, of which the second is zeros: the same values."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 1, 3, 4)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(3, 4, 4)), jnp.float32)
    f = functools.partial(latent.of_heads, shapes)
    lowered = jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in lowered and "1x2x3x4" in lowered
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, cpu: default(*args))
    found, wanted = f(x, w), jnp.einsum(shapes, x, w, precision="highest")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_model_in_16_bits_steps_on_a_cpu():
    params, tokens = params_of(CFG), np.array([[5, 9], [7, 3]])
    found = []
    for dtype in (jnp.float32, jnp.bfloat16):
        cast = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), params)
        _, cache = jl.decode_step(CFG, cast, tokens[:, 0], jl.init_cache(CFG, 2, 24, dtype))
        found.append(jl.decode_step(CFG, cast, tokens[:, 1], cache)[0])
    exact, rounded = (np.asarray(x, np.float32) for x in found)
    np.testing.assert_allclose(rounded, exact, atol=0.05 * np.abs(exact).max())


@pytest.mark.parametrize("pages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_by_the_op_of_latent_attention(pages, monkeypatch):
    """The op's XLA form stands for its kernel, which steps take where it has a plan."""
    called = []

    def op(*operands, **named):
        called.append(operands[0].shape)
        return latent_attention(*operands, **named, implementation="xla")

    monkeypatch.setattr(latent, "own_plan", lambda find, *operands: LatentPlan(64))
    monkeypatch.setattr(latent, "_step", lambda *_: None)
    monkeypatch.setattr(latent, "latent_attention", op)
    check_chunks_and_steps(_of_512(), "float32", 1e-5, pages, n=4)
    assert called == [(2, 1, 4, 516)]


@pytest.mark.parametrize(
    ("dtype", "bound", "pages"),
    [
        ("float32", 1e-5, True),
        pytest.param("float32", 1e-5, False, marks=pytest.mark.slow),
        pytest.param("int8", 0.03, True, marks=pytest.mark.slow),
        pytest.param("int4", 0.3, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_make_the_keys_of_their_past_again(dtype, bound, pages, monkeypatch):
    """As where cuDNN takes the heads; plain sums in float32 stand for it."""
    called = []

    def made(*args, **named):
        called.append(args[0].shape)
        return cudnn.extend(*args, **named)

    monkeypatch.setattr(cudnn, "_with_log_sum", plain)
    monkeypatch.setattr(latent, "has_cudnn", lambda *heads: True)
    monkeypatch.setattr(latent, "extend", made)
    cfg = CFG.replace(rope=RopeConfig(theta=30000.0, rotary_dim=2))  # no kept program
    check_chunks_and_steps(cfg, dtype, bound, pages, n=1)
    assert called == [(2, 8, 4, 8)]


def _of_512(theta: float = 10000.0) -> ModelConfig:
    sizes = {"kv_rank": 512, "d_nope": 4, "d_rope": 4}
    return CFG.replace(
        latent=dataclasses.replace(CFG.latent, **sizes),
        rope=RopeConfig(theta=theta, rotary_dim=4),
    )


@pytest.mark.parametrize("pages", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_by_the_op_of_a_step(pages, monkeypatch):
    """The XLA form of norm, RoPE, cache, both up products and attention stands for its kernels."""
    called = []

    def op(x, **named):
        called.append((x.q.shape, x.entry.shape))
        return step.latent_step(x, **named)

    monkeypatch.setattr(latent, "own_plan", lambda find, *operands: LatentPlan(64))
    monkeypatch.setattr(latent, "latent_step", op)
    # Another model than above, whose programs jax has kept.
    check_chunks_and_steps(_of_512(theta=20000.0), "float32", 1e-5, pages, n=4)
    assert called == [((2, 4, 8), (2, 516))]


def test_a_config_that_latents_contradict_names_the_key():
    for changes, key in (
        ({"attn_softcap": 3.0}, "attn_softcap"),
        ({"attn_sparsity": 0.5}, "attn_sparsity"),
        ({"rope": dataclasses.replace(CFG.rope, rotary_dim=4)}, "rope.rotary_dim"),
        ({"head_dim": 6}, "head_dim"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"d_v": 4}, "d_v"),
        ({"latent": dataclasses.replace(CFG.latent, d_v=9)}, r"latent\.d_v"),
        ({"latent": None}, "latent"),
    ):
        with pytest.raises(JaxLlamaError, match=rf"^{key} = "):
            CFG.replace(**changes)


def test_layers_of_latents_and_of_attention_make_one_model():
    """Attention then has the heads that the flat form states, and latents their own."""
    cfg = LATENT.replace(n_layers=2, layer_types=("attention", "latent"), n_kv_heads=2)
    assert ModelConfig.of(**cfg.to_dict()) == cfg
    assert [layer.kind for layer in cfg.layers] == ["attention", "latent"]
    check_chunks_and_steps(cfg, "float32", 1e-5, False, n=2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_an_offloaded_cache_gives_the_same_tokens(options, tmp_path, monkeypatch):
    """With attention on the CPU, and with rows whose bits no batch decides."""
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    ending = "0 100 100 0" if options else "50 50 100 0 cpu_attention=true"
    prompts, off, got = check_offloaded(f"0 100 {ending}", LATENT, params_of(LATENT), **options)
    for row, prompt in enumerate(prompts if options else ()):
        (alone,) = off.generate([prompt], 8)
        assert alone.logprobs == got[row].logprobs
