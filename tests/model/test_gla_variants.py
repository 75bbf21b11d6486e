"""GLA's kin against a float64 recurrence in numpy that shares no code: its authors' own models
(LayerNorm, a gate with a bias, no decay), flash-linear-attention's feature maps, linear attention
with its normalizer, simple GLA; under the names of their files, saved and loaded; and that the
variants work wherever GLA does.

The identities that every model keeps run over them in test_model.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.config import config_from_hf, config_to_hf
from jaxllama.errors import JaxLlamaError
from jaxllama.model import linear
from jaxllama.model.forms import FORMS
from jaxllama.model.records import whole_rows
from tests.helpers.files import convolved, is_as_in_files, sigmoid, silu, softplus
from tests.helpers.models import FAMILIES, check_folded_scales, relative_error, tokens_of
from tests.helpers.seeded import seeded_params

WIDTH = 32
_BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "norm_eps": 1e-5,
    "eos_token_id": None,
    "num_heads": 4,
}
_PAPER = {
    "model_type": "gla",
    "architectures": ["GLAForCausalLM"],
    "d_model": 32,
    "n_head": 2,
    "n_layer": 2,
    "vocab_size": 64,
    "eos_token_id": None,
}
FILES = {
    "paper": _PAPER,
    "paper-ungated": {**_PAPER, "n_layer": 1, "use_gk": False, "tie_word_embeddings": True},
    "gla-relu": {"feature_map": "relu", "num_kv_heads": 2},
    "gla-swish": {"feature_map": "swish", "use_short_conv": True},
    "gla-sqrelu": {"feature_map": "sqrelu", "elementwise_affine": False},
    "gla-sigmoid": {"feature_map": "sigmoid", "use_output_gate": False},
    "gla-logsigmoid": {"feature_map": "logsigmoid", "clamp_min": -0.1},
    "gla-gelu": {"feature_map": "gelu"},
    "simple_gla": {"use_short_conv": True, "num_kv_heads": 2},
    "simple_gla-plain": {"use_short_conv": False, "expand_k": 0.5, "feature_map": "relu"},
    "linear_attn": {"feature_map": "elu", "norm_feature_map": True},
    "linear_attn-relu": {"feature_map": "relu", "num_kv_heads": 2, "elementwise_affine": False},
    "linear_attn-identity": {"feature_map": "identity"},
}


def config_of(name):
    kind = name.partition("-")[0]
    return FILES[name] if kind == "paper" else {**_BASE, "model_type": kind, **FILES[name]}


def reference(config, tensors, tokens):
    """Logits ``[T, V]`` of one row, token by token, in float64."""
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    is_paper, kind = "n_head" in config, config["model_type"]
    eps, heads = (1e-5, config["n_head"]) if is_paper else (config["norm_eps"], config["num_heads"])
    maps = {
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        "relu": lambda x: np.maximum(x, 0),
        "sigmoid": sigmoid,
        "swish": silu,
        "logsigmoid": lambda x: -softplus(-x),
        "sqrelu": lambda x: np.maximum(x, 0) ** 2,
        "identity": lambda x: x,
        "gelu": lambda x: x * sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)),
    }
    feature = maps[config.get("feature_map") or "identity"]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w.get(name, 1.0)

    def project(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def mixer(x, at):
        def stream(name):
            taps, y = w.get(f"{at}.{name}_conv1d.weight"), project(x, f"{at}.{name}_proj")
            return y if taps is None else convolved(y, taps)

        n = len(x)
        q, k, v = (stream(name) for name in "qkv")
        groups = heads // config.get("num_kv_heads", heads)
        d_k = q.shape[1] // heads

        def by_head(y):
            return np.repeat(y.reshape(n, heads // groups, -1), groups, axis=1)

        q, k, v = feature(q.reshape(n, heads, d_k)), feature(by_head(k)), by_head(v)
        decay = np.ones((n, heads, 1))
        for first, second in (("gk_proj.0", "gk_proj.1"), ("k_gate.0", "k_gate.1")):
            if f"{at}.{first}.weight" in w:
                low = project(project(x, f"{at}.{first}"), f"{at}.{second}")
                log = -softplus(-low) / 16
                decay = by_head(np.exp(np.maximum(log, config.get("clamp_min", -np.inf))))
        if kind == "simple_gla":
            decay = np.exp(-softplus(-project(x, f"{at}.gk_proj")) / 16)[..., None]
        scale = (x.shape[1] // heads if is_paper else d_k) ** -0.5
        state, z, out = np.zeros((heads, d_k, v.shape[-1])), 0, []
        for t in range(n):
            state = decay[t][..., None] * state + k[t][..., None] * v[t][:, None]
            z = decay[t] * z + k[t]
            o = np.einsum("hd,hde->he", q[t], state) * scale
            if config.get("norm_feature_map"):
                o = o / ((q[t] * z).sum(-1, keepdims=True) * scale + 1e-10)
            out.append(o)
        o = np.stack(out)
        if is_paper:
            o = (o - o.mean(-1, keepdims=True)) / np.sqrt(o.var(-1, keepdims=True) + eps)
        else:
            names = [f"{at}.{name}.weight" for name in ("g_norm_swish_gate", "g_norm", "norm")]
            o = norm(o, next((name for name in names if name in w), ""))
        o = o.reshape(n, -1)
        if f"{at}.g_proj.weight" in w:
            o = o * silu(project(x, f"{at}.g_proj"))
        return project(o, f"{at}.out_proj" if is_paper else f"{at}.o_proj")

    embed, layers, first, second, last = (
        ("transformer.wte", "transformer.h", "ln_1", "ln_2", "transformer.ln_f")
        if is_paper
        else ("model.embeddings", "model.layers", "attn_norm", "mlp_norm", "model.norm")
    )
    names = ("w1", "w3", "w2") if is_paper else [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    x = w[f"{embed}.weight"][tokens]
    for layer in range(config.get("num_hidden_layers") or config["n_layer"]):
        at = f"{layers}.{layer}"
        x = x + mixer(norm(x, f"{at}.{first}.weight"), f"{at}.attn")
        y = norm(x, f"{at}.{second}.weight")
        gate, up = (project(y, f"{at}.{name}") for name in names[:2])
        x = x + project(silu(gate) * up, f"{at}.{names[2]}")
    head = w.get("lm_head.weight", w[f"{embed}.weight"])
    return norm(x, f"{last}.weight") @ head.T


QUICK = ("paper", "gla-swish", "linear_attn")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in FILES]
)
def test_models_of_files_are_the_recurrence_s(name, tmp_path):
    """Logits, and that saving and loading changes nothing."""
    with_steps = name not in ("gla-swish", "gla-logsigmoid", "simple_gla")
    is_as_in_files(config_of(name), reference, tmp_path, WIDTH, 1e-5, with_steps)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("paper", {"use_gv": True}, "use_gv = True: only False"),
        ("paper", {"n_head": 3}, "gla.expand_k = 0.5"),
        ("gla-relu", {"feature_map": "bias_gelu"}, "feature_map = 'bias_gelu': only None, 'relu'"),
        ("gla-relu", {"use_gk": False}, "use_gk = False: only True"),
        ("simple_gla", {"gate_fn": "relu"}, "gate_fn = 'relu'"),
        ("linear_attn", {"feature_map": "hedgehog"}, "feature_map = 'hedgehog': only 'elu'"),
        ("linear_attn", {"feature_map": None}, "feature_map = None: means 'elementwise_product'"),
        ("linear_attn", {"norm_q": True}, "norm_q = True: only False"),
    ],
)
def test_what_a_file_says_and_we_have_not_is_named(name, change, message):
    with pytest.raises(JaxLlamaError, match=message):
        config_from_hf({**config_of(name), **change}, "x")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("paper", {"output_norm": "rms"}, "gla.output_norm = 'rms': the GLA paper's models"),
        ("gla-relu", {"normalizer": True}, "gla.normalizer = True: flash-linear-attention's gla"),
        ("gla-relu", {"feature_map": "elu"}, "feature_map = 'elu'"),
        ("linear_attn", {"decay": "head"}, "gla.decay = 'head': .*linear_attn models"),
    ],
)
def test_a_layer_that_no_file_has_words_for_is_named(name, change, message):
    cfg = config_from_hf(config_of(name), "x")
    cfg = cfg.replace(gla=dataclasses.replace(cfg.gla, **change))
    with pytest.raises(JaxLlamaError, match=message):
        config_to_hf(cfg)


def test_a_bias_needs_its_gate():
    with pytest.raises(JaxLlamaError, match="gla.gate_bias = True: needs gla.use_output_gate"):
        dataclasses.replace(FAMILIES["gla"].gla, use_output_gate=False, gate_bias=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("linear_attn", "float16"),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in ("paper-ungated", "simple_gla", "linear_attn")
            for dtype in ("float16", "bfloat16")
            if (name, dtype) != ("linear_attn", "float16")
        ),
    ],
)
def test_in_16_bits(name, dtype):
    cfg = config_from_hf(config_of(name), "tiny")
    params = seeded_params(cfg, seed=5)
    tokens, lengths = np.asarray(tokens_of(cfg, 1, 24)), np.array([24], np.int32)
    want = jl.logits(cfg, params, tokens, lengths)
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    got = jl.logits(cfg, narrow, tokens, lengths)
    assert relative_error(got, want) < {"float16": 0.01, "bfloat16": 0.08}[dtype]
    _, cache = jl.prefill(
        cfg, narrow, tokens[:, :23], lengths - 1, jl.init_cache(cfg, 1, 24, dtype=dtype)
    )
    last, _ = jl.decode_step(cfg, narrow, tokens[:, 23], cache)
    assert relative_error(last, got[:, -1]) < {"float16": 0.01, "bfloat16": 0.08}[dtype]


@pytest.mark.parametrize(
    "name", ["delta", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gla", "linear_attn"))]
)
def test_w8a8_quantizes_a_layer_s_input_once(name, monkeypatch):
    """And stays near the floats (a gated delta layer's: test_delta_model)."""
    cfg = FAMILIES[name] if name in FAMILIES else config_from_hf(config_of(name), "tiny")
    params = jax.tree.map(jnp.asarray, seeded_params(cfg.first_layers(1), seed=5))
    cfg = cfg.first_layers(1)
    codes = jl.quantize_params(params, "w8a8", cfg=cfg)
    tokens, lengths = np.asarray(tokens_of(cfg, 1, 30)), np.array([30], np.int32)
    if name != "delta":
        got, want = (np.asarray(jl.logits(cfg, p, tokens, lengths)) for p in (codes, params))
        assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.05
    calls, tokens_op, norm_op = [], linear.quantize_tokens, linear.rms_norm

    def quantize_tokens(*operands, **options):
        calls.append("alone")
        return tokens_op(*operands, **options)

    def rms_norm(*operands, quantize=None, **options):
        calls.extend(["norm"] * (quantize is not None))
        return norm_op(*operands, quantize=quantize, **options)

    monkeypatch.setattr(linear, "quantize_tokens", quantize_tokens)
    monkeypatch.setattr(linear, "rms_norm", rms_norm)
    one = cfg.layers[0]
    x = linear.Stream(jnp.ones((1, 5, cfg.d_model), jnp.float32))
    layer = functools.partial(FORMS["sequential"].mix, one)
    at = whole_rows(one, 1, 5)
    jax.eval_shape(lambda p, x: layer(p, x, None, at), codes["layer_0"], x)
    # The projections' input, in the norm where no float is wanted beside it; the output product's.
    assert calls == ["norm" if name == "linear_attn" else "alone", "alone"]


def test_scales_of_channels_leave_the_function_alone():
    """A head's norm without a weight takes none."""
    for name in ("paper-ungated", "simple_gla"):
        cfg = config_from_hf(config_of(name), "tiny")
        check_folded_scales(cfg, jax.device_put(seeded_params(cfg, seed=5)))
