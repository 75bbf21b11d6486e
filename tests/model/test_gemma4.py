"""Gemma 4: heads of two widths, keys that layers share, and further inputs of every layer."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama import modules
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.config import ExpertsConfig, FullAttentionConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.model import linear
from jaxllama.model.linear import Stream
from jaxllama.model.rope import rope_tables
from jaxllama.model.stacked import hidden_states, recomputed_block, runs, stack_layers
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.quantization.pipeline import calibrate
from jaxllama.quantization.scheme import parse
from jaxllama.training.routers import _Watch
from pallas_kernels.experts.route import fused_norm_and_route, norm_and_route
from tests.helpers.arrays import as_jax
from tests.helpers.models import (
    GEMMA4,
    check_chunks_and_steps,
    check_offloaded,
    params_of,
    relative_error,
    tokens_of,
)


def test_a_cache_has_the_heads_of_each_layer_and_none_where_keys_are_shared():
    cache = jax.eval_shape(lambda: jl.init_cache(GEMMA4, 2, 16, "float32"))
    shapes = [None if layer is None else layer.k.shape for layer in cache.layers]
    assert shapes == [(2, 16, 2, 8), (2, 16, 1, 16), None, None]
    assert [layer.borrows for layer in GEMMA4.layers] == ["", "", "window", "full"]
    assert cache.capacity == 16


def test_the_first_layers_keep_who_lends_keys_to_whom():
    cfg = GEMMA4.first_layers(3)
    assert (cfg.shared_kv_layers, cfg.layers[2].borrows, cfg.window_layers) == (1, "window", (0, 2))
    assert GEMMA4.first_layers(2).shared_kv_layers == 0
    full = GEMMA4.replace(shared_kv_layers=0, shared_kv_d_ff=None, window_layers=(1,))
    cfg = full.first_layers(1)
    assert (cfg.full, cfg.head_dim, cfg.k_is_v) == (None, 16, True)
    assert round(cfg.flat.stored.query, 12) == 4.0


def test_proportional_rope_turns_the_first_pairs_of_a_whole_heads_frequencies():
    positions, total = np.arange(5)[None], np.full(1, 5)
    cos, sin = rope_tables(GEMMA4.rope, 16, positions, total)
    angles = np.arange(5)[:, None] * np.array([1.0, 1000.0 ** (-2 / 16), *[0.0] * 6])
    np.testing.assert_allclose(cos[0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin[0], np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("is_fused", [False, True])
def test_factors_of_experts_reach_the_weights_however_they_are_routed(is_fused, monkeypatch):
    """The fused kernel of norm and router knows no factors, and the routers' losses watch."""
    cfg = GEMMA4.replace(experts=ExpertsConfig(n_experts=4, n_active=2, d_ff=8))
    draw = np.random.default_rng(0).standard_normal
    x, gamma, weight = (as_jax(draw(shape), jnp.float32) for shape in ((3, 32), (32,), (4, 32)))
    router = {"weight": weight, "expert_scale": jnp.arange(1.0, 5.0)}
    if is_fused:
        fused = functools.partial(norm_and_route, implementation="xla")
        monkeypatch.setattr(linear, "fused_norm_and_route", fused)
        monkeypatch.setattr(linear, "route", None)
    scale, stream = {"weight": gamma}, Stream(x)
    y, _, routed = linear.norm_route(stream, scale, router, cfg)
    check_routed(y, routed, router)
    *_, watched = _Watch(linear, None).norm_route(stream, scale, router, cfg)
    for got, want in zip(watched, routed, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def check_routed(y, routed, router, rtol=1e-5) -> None:
    """Compare with the softmax over the best logits of y, times the factors, in float64."""
    y, weight, factors = (
        np.asarray(one, np.float64) for one in (y, router["weight"], router["expert_scale"])
    )
    experts, weights = routed
    logits = y @ weight.T
    best = np.argsort(-logits, axis=-1)[:, : experts.shape[1]]
    np.testing.assert_array_equal(experts, best)
    odds = np.exp(np.take_along_axis(logits, best, 1))
    want = odds / odds.sum(1, keepdims=True) * factors[best]
    np.testing.assert_allclose(weights, want, rtol)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8])
def test_factors_of_experts_on_the_gpu(tokens):
    """They follow the kernel of norm and router."""
    cfg = GEMMA4.replace(d_model=2816, experts=ExpertsConfig(n_experts=128, n_active=8, d_ff=704))
    draw = np.random.default_rng(1).standard_normal
    x, gamma = as_jax(draw((tokens, 2816)), jnp.bfloat16), as_jax(draw(2816), jnp.bfloat16)
    router = {
        "weight": as_jax(draw((128, 2816)) / 2816**0.5, jnp.bfloat16),
        "expert_scale": as_jax(np.linspace(0.25, 4, 128), jnp.bfloat16),
    }
    norm = gamma, cfg.norm_eps
    options = {"k": 8, "normalize": True, "scale": 1.0}
    assert fused_norm_and_route(x, norm, router["weight"], **options) is not None

    @jax.jit
    def routed(x, gamma, router):
        y, _, routed = linear.norm_route(Stream(x), {"weight": gamma}, router, cfg)
        return y, routed

    check_routed(*routed(x, gamma, router), router, rtol=1e-4)


@pytest.mark.gpu
def test_a_mixture_with_factors_on_the_gpu():
    """A prompt and steps in bfloat16 on the GPU, beside the CPU in float32."""
    params = jax.tree.map(lambda one: one.astype(jnp.bfloat16), params_of(EXPERTS))
    tokens = np.asarray(tokens_of(EXPERTS, 2, 12))

    def steps(params, dtype):
        cache = jl.init_cache(EXPERTS, 2, 16, dtype=dtype)
        found, cache = jl.prefill(EXPERTS, params, tokens[:, :8], np.full(2, 8), cache)
        logits = [np.asarray(found)]
        for at in range(8, 12):
            found, cache = jl.decode_step(EXPERTS, params, tokens[:, at], cache)
            logits.append(np.asarray(found))
        return np.stack(logits)

    got = steps(params, jnp.bfloat16)
    with jax.default_device(jax.devices("cpu")[0]):
        wide = jax.tree.map(lambda one: np.asarray(one).astype(np.float32), params)
        want = steps(jax.device_put(wide), jnp.float32)
    rms = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
    assert rms <= 0.05, rms


@pytest.mark.parametrize(
    ("dtype", "bound", "pages"),
    [
        ("float32", 1e-5, True),
        pytest.param("float32", 1e-5, False, marks=pytest.mark.slow),
        pytest.param("int8", 0.1, True, marks=pytest.mark.slow),
        pytest.param("int4", 0.5, False, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", 0.2, False, marks=pytest.mark.slow),
    ],
)
def test_chunks_and_steps_over_a_cache_are_whole_rows(dtype, bound, pages):
    check_chunks_and_steps(GEMMA4, dtype, bound, pages, n=3)


@pytest.mark.slow
def test_gradients_reach_every_parameter_and_no_layers_are_stacked():
    """A query that borrows keys sends a gradient to the layer that lends them."""
    params, tokens = params_of(GEMMA4), tokens_of(GEMMA4, 2, 12)
    assert runs(GEMMA4)[0].count == 1 and "layer_0" in stack_layers(GEMMA4, params)

    def loss(params, each=None):
        options = {} if each is None else {"run_layer": each}
        x = hidden_states(GEMMA4, params, tokens, jnp.float32, **options)
        return jnp.sum(jnp.sin(x))

    grads = jax.grad(loss)(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert float(jnp.max(jnp.abs(leaf))) > 0, jax.tree_util.keystr(path)
    again = jax.grad(loss)(params, recomputed_block)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), grads, again)


def test_an_offloaded_model_with_shared_keys_is_refused():
    place = Placement(Policy.parse("50 50 100 0 100 0"), jnp.float32)
    with pytest.raises(JaxLlamaError, match="layers read each other's keys"):
        place.model(GEMMA4, place.tree(jax.tree.map(np.asarray, params_of(GEMMA4))), None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"shared_kv_layers": 4}, "shared_kv_layers"),
        ({"shared_kv_layers": 3}, "shared_kv_layers"),
        ({"shared_kv_layers": 0}, "shared_kv_d_ff"),
        ({"attn_softcap": 3.0}, "attn_softcap"),
        ({"sliding_window": None, "window_layers": ()}, "full"),
    ],
)
def test_a_config_that_shared_keys_contradict_names_the_key(changes, key):
    with pytest.raises(JaxLlamaError, match=rf"^{key} = "):
        GEMMA4.replace(**changes)


def test_heads_by_layer_are_read_as_transformers_writes_them():
    own = {
        "model_type": "gemma4_text",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_k_eq_v": True,
    }
    theirs = {"per_layer_config": {"5": {"head_dim": 16, "num_key_value_heads": 1}}}
    ours = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    cfg = config_from_hf({**own, **theirs}, "tiny")
    assert cfg == config_from_hf({**own, **ours}, "tiny")
    assert cfg.full is not None and cfg.full.head_dim == 16 and cfg.rope.rotary_dim == 4
    with pytest.raises(JaxLlamaError, match="per_layer_config"):
        config_from_hf({**own, "per_layer_config": {"2": {"head_dim": 16}}}, "tiny")


@pytest.mark.slow
def test_modules_declare_and_compute_the_same():
    params, tokens = params_of(GEMMA4), tokens_of(GEMMA4, 2, 12)
    decoder = modules.Decoder(GEMMA4)
    drawn = nn.unbox(decoder.init(jax.random.key(0), tokens)["params"])
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, params)
    hidden, _ = decoder.apply({"params": params}, tokens)
    scores = decoder.apply({"params": params}, hidden, method="logits")
    want = jl.logits(GEMMA4, params, tokens, np.full(2, 12, np.int32))
    assert relative_error(scores, want) < 1e-6
    for index, message in ((0, "inputs of the Decoder"), (2, "another layer's keys")):
        layer = modules.DecoderLayer(GEMMA4, index)
        x = jnp.zeros((1, 3, GEMMA4.d_model))
        with pytest.raises(JaxLlamaError, match=message):
            layer.apply({"params": params[f"layer_{index}"]}, x)


EXPERTS = GEMMA4.replace(
    head_dim=16,
    full=FullAttentionConfig(head_dim=32, n_kv_heads=1, k_is_v=True),
    d_ff=64,
    shared_kv_layers=0,
    shared_kv_d_ff=None,
    layer_inputs=None,
    experts=ExpertsConfig(8, 2, 32, shared=64, shared_norms=True),
)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "bound"), [("rtn", 0.3), ("awq", 0.2), ("gptq", 0.2)])
def test_experts_beside_a_feed_forward_are_calibrated(method, bound):
    """And layers whose next layer has heads of another width."""
    params, tokens = params_of(EXPERTS), np.asarray(tokens_of(EXPERTS, 2, 12))
    lengths = np.full(2, 12, np.int32)
    want = jl.logits(EXPERTS, params, tokens, lengths)
    done, _ = calibrate(EXPERTS, params, tokens, parse("w4a16"), method, measure=False)
    got = jl.logits(EXPERTS.with_head_of(done), done, tokens, lengths)
    assert relative_error(got, want) < bound
    with pytest.raises(JaxLlamaError, match="read each other"):
        calibrate(GEMMA4, params_of(GEMMA4), tokens, parse("w4a16"), method)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["0 100 100 0 100 0", "0 100 100 0 100 0 experts=25/75"])
def test_offloaded_experts_beside_a_feed_forward(policy, tmp_path, monkeypatch):
    """They give the tokens of a resident model."""
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    check_offloaded(policy, EXPERTS, params_of(EXPERTS))


@pytest.mark.slow
def test_the_text_decoder_of_a_multimodal_checkpoint(tmp_path):
    """As transformers' own class for images and texts computes a text."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 9,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 64,
        "pad_token_id": 0,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    others = {"image_token_id": 60, "video_token_id": 61, "audio_token_id": 62}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, **others)
    torch.manual_seed(0)
    model = transformers.Gemma4ForConditionalGeneration(config).eval().float()
    with torch.no_grad():
        for name, leaf in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("layer_scalar"):
                leaf.fill_(0.7)
            elif "norm" not in name and leaf.is_floating_point() and leaf.ndim == 2:
                leaf.normal_(std=0.2)
    model.save_pretrained(tmp_path / "m")
    tokens = np.random.default_rng(0).integers(1, 50, (2, 40))
    with torch.no_grad():
        want = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    with pytest.warns(WeightWarning, match="its text decoder alone is read"):
        cfg, params = hf.load(tmp_path / "m")
    assert cfg.stored.family == "gemma4_text" and cfg.shared_kv_layers == 2
    got = jl.logits(cfg, params, tokens.astype(np.int32), np.full(2, 40, np.int32))
    assert relative_error(got, want) < 1e-4
