"""Gated delta layers and models: flash-linear-attention's three against a recurrence in numpy
that shares no code, their files, and that they work wherever GLA does.

Qwen3-Next and Qwen3.5 against transformers are test_parity's; the identities that every model keeps
are test_model's.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf, config_to_hf
from jaxllama.config import load_config
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers.delta import mix as delta
from jaxllama.model.params import param_table
from jaxllama.offload.policy import Policy
from pallas_kernels.gated_delta.reference import gated_delta_recurrent
from tests.helpers.files import convolved, is_as_in_files, sigmoid, silu, softplus
from tests.helpers.models import FAMILIES, check_folded_scales, params_of, relative_error, tokens_of

WIDTH = 40
_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "norm_eps": 1e-5,
    "eos_token_id": None,
}
FLA = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 8, "expand_v": 1.5, "num_v_heads": 4},
    "gated_deltanet-plain": {
        "num_heads": 2,
        "head_dim": 8,
        "use_gate": False,
        "use_short_conv": False,
        "allow_neg_eigval": True,
        "tie_word_embeddings": True,
    },
    "kda": {"num_heads": 2, "head_dim": 8, "expand_v": 1.5},
    "delta_net": {"num_heads": 4},
    "delta_net-gate": {
        "num_heads": 2,
        "expand_k": 0.5,
        "expand_v": 1.5,
        "use_gate": True,
        "conv_size": 3,
    },
}


def config_of(name):
    kind = name.partition("-")[0]
    return {**_BASE, "model_type": kind, **FLA[name]}


def reference(config, tensors, tokens):
    """Logits ``[T, V]`` in float64, by the recurrences of the papers, token by token."""
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    eps, kind = config["norm_eps"], config["model_type"]

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    def mixer(x, at):
        def project(name):
            return x @ w[f"{at}.{name}.weight"].T

        def stream(name):
            taps, y = w.get(f"{at}.{name}_conv1d.weight"), project(f"{name}_proj")
            return silu(y) if taps is None else convolved(y, taps)

        q, k, v = (stream(name) for name in "qkv")
        beta = sigmoid(project("b_proj")) * (2 if config.get("allow_neg_eigval") else 1)
        heads, n = beta.shape[1], len(x)
        k_heads = config["num_heads"]
        q, k = (
            np.repeat(unit(y.reshape(n, k_heads, -1)), heads // k_heads, axis=1) for y in (q, k)
        )
        v, decay = v.reshape(n, heads, -1), np.ones((n, heads, 1))
        if kind == "gated_deltanet":
            dt = softplus(project("a_proj") + w[f"{at}.dt_bias"])
            decay = np.exp(-np.exp(w[f"{at}.A_log"]) * dt)[..., None]
        if kind == "kda":
            low = project("f_proj.0") @ w[f"{at}.f_proj.1.weight"].T + w[f"{at}.dt_bias"]
            rate = np.exp(w[f"{at}.A_log"])[:, None]
            decay = np.exp(-rate * softplus(low).reshape(n, heads, -1))
        state, out = np.zeros((heads, q.shape[-1], v.shape[-1])), []
        for t in range(n):
            state = decay[t][..., None] * state
            error = v[t] - np.einsum("hd,hde->he", k[t], state)
            state = state + np.einsum("hd,he->hde", k[t], beta[t][:, None] * error)
            out.append(np.einsum("hd,hde->he", q[t], state) * q.shape[-1] ** -0.5)
        o = norm(np.stack(out), w[f"{at}.o_norm.weight"])
        if kind == "kda":
            gate = project("g_proj.0") @ w[f"{at}.g_proj.1.weight"].T + w[f"{at}.g_proj.1.bias"]
            o = o * sigmoid(gate).reshape(o.shape)
        elif f"{at}.g_proj.weight" in w:
            o = o * silu(project("g_proj")).reshape(o.shape)
        return o.reshape(n, -1) @ w[f"{at}.o_proj.weight"].T

    x = w["model.embeddings.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = x + mixer(norm(x, w[f"{at}.attn_norm.weight"]), f"{at}.attn")
        y = norm(x, w[f"{at}.mlp_norm.weight"])
        gate, up = (y @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embeddings.weight"])
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.core if name == "kda" else ())
        for name in FLA
        if name != "delta_net"
    ]
    + [pytest.param("delta_net", marks=pytest.mark.slow)],
)
def test_flash_linear_attention_s_models(name, tmp_path):
    """Logits of weights under the names of that library's files."""
    is_as_in_files(config_of(name), reference, tmp_path, WIDTH, 1e-4, with_steps=name == "kda")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("kda", {"num_v_heads": 4}, "num_v_heads = 4: only num_heads"),
        ("kda", {"safe_gate": True}, "safe_gate = True: only False"),
        ("gated_deltanet", {"expand_v": 1.3}, "expand_v = 1.3: heads of values of 10.4"),
        ("gated_deltanet", {"num_v_heads": 3}, "delta.n_k_heads"),
        ("delta_net", {"qk_norm": "sum"}, "qk_norm = 'sum': only 'l2'"),
        ("delta_net", {"expand_k": 0.3}, "expand_k = 0.3: heads of keys"),
    ],
)
def test_what_a_file_says_and_we_have_not_is_named(kind, change, message):
    with pytest.raises(JaxLlamaError, match=message):
        config_from_hf({**config_of(kind), **change}, "x")


def test_experts_are_in_the_layers_that_the_file_says():
    config = {
        "model_type": "qwen3_next",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    cfg = config_from_hf(config, "x")
    assert (cfg.experts.n_experts, cfg.experts.n_active, cfg.expert_layers) == (512, 10, ())
    mixed = config_from_hf({**config, "num_experts": 16, "mlp_only_layers": [0]}, "x")
    assert mixed.expert_layers == (1,) and mixed.layers[0].experts is None
    dense = config_from_hf({**config, "num_experts": 0}, "x")
    assert (dense.layer_types, dense.experts) == (("delta", "delta"), None)


def test_a_mixer_that_no_file_has_words_for_is_named():
    cfg = config_from_hf(config_of("kda"), "x")
    cfg = cfg.replace(delta=dataclasses.replace(cfg.delta, gate_activation="silu"))
    with pytest.raises(JaxLlamaError, match="delta.gate_activation = 'silu'"):
        config_to_hf(cfg)


@pytest.mark.slow
def test_the_preset_is_what_transformers_would_build():
    """Its Qwen3.5 by default is the 9B's shape, but for the context and RoPE's base."""
    transformers = pytest.importorskip("transformers")
    theta = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = transformers.Qwen3_5TextConfig(rope_parameters=theta, max_position_embeddings=262144)
    preset = load_config("qwen3.5-9b")
    assert config_from_hf(config.to_dict(), preset.name) == preset


def test_the_preset_has_the_published_size_and_comes_back_from_its_file():
    preset = load_config("qwen3.5-9b")
    assert config_from_hf(config_to_hf(preset), preset.name) == preset
    assert sum(spec.size for spec in param_table(preset).values()) == pytest.approx(9e9, rel=0.01)


def language_model(family, tmp_path, **options):
    """A saved model, loaded: Qwen3.5's layers, or Kimi's."""
    cfg = FAMILIES[family]
    if family == "kda":
        cfg = cfg.replace(stored=dataclasses.replace(cfg.stored, family="kda"))
        sigmoid = dataclasses.replace(cfg.delta, gate_activation="sigmoid")
        cfg = cfg.replace(delta=sigmoid, n_kv_heads=cfg.n_heads)
    else:
        stored = dataclasses.replace(cfg.stored, family="qwen3_5_text", norm_offset=1.0)
        cfg = cfg.replace(stored=stored)
    path = tmp_path / family
    if not path.exists():
        hf.save(path, cfg, jax.tree.map(np.asarray, params_of(cfg)))
    return jl.load(path, "float32", **options)


def prompts(cfg):
    row = np.asarray(tokens_of(cfg, 1, 40))[0].tolist()
    return [row, row[:33] + [5, 6, 7], row[:3]]


def generated(lm):
    return [one.tokens for one in lm.generate(prompts(lm.config), max_new_tokens=8)]


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
@pytest.mark.parametrize("family", ["delta", "kda"])
def test_engine_prefixes_give_the_same_tokens(family, tmp_path):
    """Two slots for three rows, of which the second begins with a snapshot of the first's state."""
    lm = language_model(family, tmp_path)
    want = generated(lm)
    engine = jl.Engine(lm, max_slots=2, max_len=64, prefill_chunk=16, page_size=16)
    got, cached = ([], [], []), []
    for row, prompt in enumerate(prompts(lm.config)):

        def listen(event, row=row):
            got[row].extend(event.tokens)

        engine.submit(Request(str(row), tuple(prompt), 8), listen)
        while engine.step():
            pass
        cached.append(engine.stats().prefix_hit_tokens)
    assert [*got] == want and cached == [0, 32, 32]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["delta", "kda"])
def test_offloading_gives_the_same_tokens(family, tmp_path):
    """Gated attention on the CPU's side of the cache too.  (By default GLA's states: offload/.)"""
    want = generated(language_model(family, tmp_path))
    policy = Policy.parse("50 50 0 100 100 0")
    policy = dataclasses.replace(policy, cpu_attention=family == "delta")
    assert generated(language_model(family, tmp_path, policy=policy)) == want


@pytest.mark.parametrize("family", ["delta", pytest.param("kda", marks=pytest.mark.slow)])
def test_scales_of_channels_leave_the_function_alone(family):
    check_folded_scales(FAMILIES[family], params_of(FAMILIES[family]))


@pytest.mark.parametrize("scheme", ["w8a8", pytest.param("w8a16", marks=pytest.mark.slow)])
def test_quantized_layers_stay_near(scheme):
    cfg, floats = FAMILIES["delta"], params_of(FAMILIES["delta"])
    tokens, lengths = np.asarray(tokens_of(cfg, 1, 12)), np.array([12], np.int32)
    params = jl.quantize_params(floats, scheme, cfg=cfg)
    assert type(params["layer_0"]["mixer"]["qkvz"]["weight"]).__name__ == "QTensor"
    want = jl.logits(cfg, floats, tokens, lengths)
    assert relative_error(jl.logits(cfg, params, tokens, lengths), want) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["delta", "kda"])
def test_a_model_s_gradients_are_the_recursion_s(family, monkeypatch):
    cfg = FAMILIES[family].first_layers(1)
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, 2, 9))

    def gradients():
        def loss(params):
            scores = jl.logits(cfg, params, tokens[:, :-1], np.array([8, 8], np.int32))
            scores = jax.nn.log_softmax(scores)
            return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

        jax.clear_caches()
        return jax.jit(jax.grad(loss))(params)

    def recursion(*operands, lengths=None, **options):
        assert lengths is None
        return gated_delta_recurrent(*operands, **options)

    got = gradients()
    monkeypatch.setattr(delta, "gated_delta", recursion)
    want = gradients()
    jax.clear_caches()
    for path, leaf in jax.tree.leaves_with_path(want):
        own = got
        for key in path:
            own = own[key.key]
        assert relative_error(own, leaf) < 1e-3, path
