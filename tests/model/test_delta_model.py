"""Gated delta layers and models: flash-linear-attention's three against a recurrence in torch that
shares no code, their files, and that they work wherever GLA does.

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
from jaxllama.errors import JaxLlamaError
from jaxllama.model import delta
from jaxllama.model.params import param_table
from jaxllama.offload.policy import Policy
from jaxllama.quantization import sites
from jaxllama.serving.engine.request import Request
from pallas_kernels.gated_delta.reference import gated_delta_recurrent
from tests.helpers.files import is_as_in_files
from tests.helpers.models import FAMILIES, params_of, relative_error, tokens_of

PROMPT, NEW = 24, 64
_BASE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
         "norm_eps": 1e-5, "eos_token_id": None}  # fmt: skip
FLA = {
    "gated_deltanet": {"num_heads": 2, "head_dim": 8, "expand_v": 1.5, "num_v_heads": 4},
    "gated_deltanet-plain": {
        "num_heads": 2, "head_dim": 8, "use_gate": False, "use_short_conv": False,
        "allow_neg_eigval": True, "tie_word_embeddings": True},
    "kda": {"num_heads": 2, "head_dim": 8, "expand_v": 1.5},
    "delta_net": {"num_heads": 4},
    "delta_net-gate": {"num_heads": 2, "expand_k": 0.5, "expand_v": 1.5, "use_gate": True,
                       "conv_size": 3},
}  # fmt: skip


def config_of(name):
    kind = name.partition("-")[0]
    return {**_BASE, "model_type": kind, **FLA[name]}


def reference(config, tensors, tokens):
    """Logits ``[T, V]`` in float64, by the recurrences of the papers, token by token."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    w = {name: torch.from_numpy(x).double() for name, x in tensors.items()}
    eps, kind = config["norm_eps"], config["model_type"]

    def norm(x, weight):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def unit(x):
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    def convolved(x, name):
        if f"{name}.weight" in w:
            taps = w[f"{name}.weight"]
            padded = functional.pad(x.T[None], (taps.shape[-1] - 1, 0))
            x = functional.conv1d(padded, taps, groups=taps.shape[0])[0].T
        return functional.silu(x)

    def mixer(x, at):
        project = lambda name: x @ w[f"{at}.{name}.weight"].T  # noqa: E731
        q, k, v = (convolved(project(f"{n}_proj"), f"{at}.{n}_conv1d") for n in "qkv")
        beta = torch.sigmoid(project("b_proj")) * (2 if config.get("allow_neg_eigval") else 1)
        heads, n = beta.shape[1], len(x)
        k_heads = config["num_heads"]
        q, k = (unit(y.reshape(n, k_heads, -1)).repeat_interleave(heads // k_heads, 1)
                for y in (q, k))  # fmt: skip
        v, decay = v.reshape(n, heads, -1), torch.ones(n, heads, 1).double()
        if kind == "gated_deltanet":
            dt = functional.softplus(project("a_proj") + w[f"{at}.dt_bias"])
            decay = torch.exp(-w[f"{at}.A_log"].exp() * dt)[..., None]
        if kind == "kda":
            low = project("f_proj.0") @ w[f"{at}.f_proj.1.weight"].T + w[f"{at}.dt_bias"]
            rate = w[f"{at}.A_log"].exp()[:, None]
            decay = torch.exp(-rate * functional.softplus(low).reshape(n, heads, -1))
        state, out = torch.zeros(heads, q.shape[-1], v.shape[-1]).double(), []
        for t in range(n):
            state = decay[t][..., None] * state
            error = v[t] - torch.einsum("hd,hde->he", k[t], state)
            state = state + torch.einsum("hd,he->hde", k[t], beta[t][:, None] * error)
            out.append(torch.einsum("hd,hde->he", q[t], state) * q.shape[-1] ** -0.5)
        o = norm(torch.stack(out), w[f"{at}.o_norm.weight"])
        if kind == "kda":
            gate = project("g_proj.0") @ w[f"{at}.g_proj.1.weight"].T + w[f"{at}.g_proj.1.bias"]
            o = o * torch.sigmoid(gate).reshape(o.shape)
        elif f"{at}.g_proj.weight" in w:
            o = o * functional.silu(project("g_proj")).reshape(o.shape)
        return o.reshape(n, -1) @ w[f"{at}.o_proj.weight"].T

    x = w["model.embeddings.weight"][torch.from_numpy(tokens).long()]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        x = x + mixer(norm(x, w[f"{at}.attn_norm.weight"]), f"{at}.attn")
        y = norm(x, w[f"{at}.mlp_norm.weight"])
        gate, up = (y @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embeddings.weight"])
    return (norm(x, w["model.norm.weight"]) @ head.T).numpy()


@pytest.mark.parametrize("name", FLA)
def test_flash_linear_attention_s_models(name, tmp_path):
    """Logits and 64 greedy tokens, of weights under the names of that library's files."""
    is_as_in_files(config_of(name), reference, tmp_path, PROMPT, NEW, 1e-4)


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


@pytest.mark.parametrize("change", [{}, {"num_experts": 4, "mlp_only_layers": [0]}])
def test_experts_are_refused_by_name(change):
    config = {
        "model_type": "qwen3_next", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    with pytest.raises(JaxLlamaError, match="num_experts.*a mixture of experts"):
        config_from_hf({**config, **change}, "x")
    assert config_from_hf({**config, "num_experts": 0}, "x").layer_types == ("delta", "delta")


def test_a_mixer_that_no_file_has_words_for_is_named():
    cfg = config_from_hf(config_of("kda"), "x")
    cfg = cfg.replace(delta=dataclasses.replace(cfg.delta, gate_activation="silu"))
    with pytest.raises(JaxLlamaError, match="delta.gate_activation = 'silu'"):
        config_to_hf(cfg)


def test_the_preset_is_what_transformers_would_build():
    """Its Qwen3.5 by default is the 9B's shape, but for the context and RoPE's base."""
    transformers = pytest.importorskip("transformers")
    theta = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    config = transformers.Qwen3_5TextConfig(rope_parameters=theta, max_position_embeddings=262144)
    preset = load_config("qwen3.5-9b")
    assert config_from_hf(config.to_dict(), preset.name) == preset
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
    row = np.asarray(tokens_of(cfg, 1, 40)[0]).tolist()
    return [row, row[:33] + [5, 6, 7], row[:3]]


def generated(lm):
    return [one.tokens for one in lm.generate(prompts(lm.config), max_new_tokens=8)]


@pytest.mark.parametrize("family", ["delta", "kda"])
def test_engine_prefixes_and_offloading_give_the_same_tokens(family, tmp_path):
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
    for policy in ("0 100 0 100 100 0", "50 50 0 100 100 0"):
        assert generated(language_model(family, tmp_path, policy=Policy.parse(policy))) == want


def test_gated_attention_on_the_cpu_s_side_of_an_offloaded_cache(tmp_path):
    lm = language_model("delta", tmp_path)
    policy = dataclasses.replace(Policy.parse("0 100 0 100 100 0"), cpu_attention=True)
    assert generated(language_model("delta", tmp_path, policy=policy)) == generated(lm)


@pytest.mark.parametrize("family", ["delta", "kda"])
def test_scales_of_channels_leave_the_function_alone(family):
    """What AWQ and SmoothQuant fold."""
    cfg, params = FAMILIES[family], params_of(FAMILIES[family])
    tokens, lengths = tokens_of(cfg, 1, 12), jnp.array([12], jnp.int32)
    want = jl.logits(cfg, params, tokens, lengths)
    for index, kind in enumerate(cfg.layer_types):
        scales = {
            site.name: jnp.exp(jax.random.normal(jax.random.key(n), (site.n_channels,)))
            for n, site in enumerate(sites.sites(cfg, kind))
        }
        layer = sites.fold(cfg, kind, params[f"layer_{index}"], scales)
        params = {**params, f"layer_{index}": layer}
    assert relative_error(jl.logits(cfg, params, tokens, lengths), want) < 1e-4


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_quantized_layers_stay_near(scheme, tmp_path):
    lm = language_model("delta", tmp_path)
    cfg, tokens = lm.config, tokens_of(lm.config, 1, 30)
    params = jl.quantize_params(lm.params, scheme, cfg=cfg)
    assert type(params["layer_0"]["mixer"]["qkvz"]["weight"]).__name__ == "QTensor"
    lengths = jnp.array([30], jnp.int32)
    want = jl.logits(cfg, lm.params, tokens, lengths)
    assert relative_error(jl.logits(cfg, params, tokens, lengths), want) < 0.1


@pytest.mark.parametrize("family", ["delta", "kda"])
def test_a_model_s_gradients_are_the_recursion_s(family, monkeypatch):
    cfg, params = FAMILIES[family], params_of(FAMILIES[family])
    tokens, lengths = tokens_of(cfg, 2, 9), jnp.array([9, 9], jnp.int32)

    def loss(params):
        scores = jax.nn.log_softmax(jl.logits(cfg, params, tokens[:, :-1], lengths - 1))
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    got = jax.grad(loss)(params)

    def recursion(*operands, lengths=None, **options):
        assert lengths is None
        return gated_delta_recurrent(*operands, **options)

    monkeypatch.setattr(delta, "gated_delta", recursion)
    jax.clear_caches()
    want = jax.grad(loss)(params)
    jax.clear_caches()
    for path, leaf in jax.tree.leaves_with_path(want):
        own = got
        for key in path:
            own = own[key.key]
        assert relative_error(own, leaf) < 1e-3, path
