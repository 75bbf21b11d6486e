"""Mixtures of experts: routers, and everything that walks parameters.

That the families compute what transformers does is in ``test_parity``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.save import flatten
from jaxllama.checkpoints.packed import save as packed
from jaxllama.checkpoints.peft import products
from jaxllama.config import CheckpointForm, ExpertsConfig, ModelConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.model import linear
from jaxllama.model.decoder import logits
from jaxllama.model.experts.feed import feed_experts, mixture
from jaxllama.model.experts.route import choose, router_logits
from jaxllama.model.forms import FORMS
from jaxllama.model.linear import Stream
from jaxllama.model.params import param_table
from jaxllama.model.split import check_shards
from jaxllama.modules import Decoder, MixtureOfExperts
from jaxllama.quantization.checkpoint import QuantizeRequest, check
from jaxllama.quantization.pipeline import calibrate
from jaxllama.quantization.scheme import parse
from pallas_kernels.cpu import restore_tree
from pallas_kernels.experts import mixture as mixture_op
from pallas_kernels.qtensor import QTensor, quantize
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.engine_cases import every_way_generates
from tests.helpers.models import (
    LLAMA,
    check_gradients,
    check_prompt_steps_and_a_draft,
    params_of,
    relative_error,
    tokens_of,
)
from tests.helpers.packed_oracle import floats_of
from tests.helpers.parity_cases import CASES
from tests.helpers.parity_cases import params_of as parity_params

EXPERTS = ExpertsConfig(n_experts=8, n_active=3, d_ff=32, shared=32, shared_gate=True)
CFG = LLAMA.replace(
    d_ff=64,
    experts=EXPERTS,
    expert_layers=(1,),
    qkv_bias=True,
    norm_eps=1e-6,
    stored=CheckpointForm(family="qwen2_moe"),
)
ROWS, WIDTH = 2, 9


def test_a_shared_expert_like_the_others_is_one_op_with_them(monkeypatch):
    """The op's XLA form stands for its kernels: experts, shared expert and the residual."""
    layer = jl.load_config("glm-4.7-flash").layers[1]
    few = dataclasses.replace(layer.experts, n_experts=4, n_active=2, d_ff=128, shared=128)
    layer = layer.replace(d_model=256, feed=dataclasses.replace(layer.feed, experts=few))
    rng = np.random.default_rng(0)

    def drawn(*shape):
        return as_jax(rng.normal(size=shape) * shape[-1] ** -0.5, jnp.float32)

    router = {"weight": drawn(4, 256), "choice_bias": drawn(4)}
    shapes = {"gate_up": (256, 256), "down": (256, 128)}
    shapes |= {f"experts_{name}": (4, *shape) for name, shape in shapes.items()}
    codes = {k: {"weight": quantize(drawn(*v), "int4", group_size=128)} for k, v in shapes.items()}
    p = {"mlp": {"router": router, **codes}, "mlp_norm": {"weight": jnp.ones(256)}}
    stream = Stream(drawn(2, 1, 256))
    feeds = [jax.jit(lambda x: feed_experts(layer, p, x, linear, None)) for _ in range(2)]
    parts = feeds[0](stream)
    monkeypatch.setattr(mixture_op, "own_plan", lambda *_: True)
    whole = feeds[1](stream)
    assert parts.pending is not None and whole.pending is None
    np.testing.assert_allclose(whole.x, parts.total, rtol=1e-5, atol=1e-5)


@functools.cache
def model() -> tuple[jl.LanguageModel, np.ndarray, np.ndarray]:
    """(the model, tokens, teacher-forced logits)."""
    lm = jl.LanguageModel(CFG, params_of(CFG), None)
    tokens = np.asarray(tokens_of(CFG, ROWS, WIDTH))
    return lm, tokens, np.asarray(lm.logits(tokens, np.full(ROWS, WIDTH, np.int32)))


# --- routers


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


LOGITS = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
BIAS = np.random.default_rng(1).standard_normal(8).astype(np.float32)


ROUTERS = list(
    itertools.product(("softmax", "sigmoid"), (True, False), ((1, 1), (4, 2)), (None, BIAS))
)


@functools.cache
def chosen() -> list[tuple[jax.Array, jax.Array]]:
    """(experts, weights) of all routers, by one program."""

    @jax.jit
    def run(x):
        return [
            choose(
                ExpertsConfig(8, 3, 16, scores, normalize, 2.5, n_groups=n, n_active_groups=active),
                x,
                bias,
            )
            for scores, normalize, (n, active), bias in ROUTERS
        ]

    return run(LOGITS)


@pytest.mark.parametrize("index", range(len(ROUTERS)))
def test_a_router_is_the_formula(index) -> None:
    scores, normalize, (n, active), bias = ROUTERS[index]
    experts, weights = map(np.asarray, chosen()[index])
    values = softmax(LOGITS) if scores == "softmax" else 1 / (1 + np.exp(-LOGITS))
    by = values if bias is None else values + bias
    for row in range(len(LOGITS)):
        best = np.sort(by[row].reshape(n, -1), axis=-1)[:, -2:].sum(-1)
        kept = np.isin(np.repeat(np.arange(n), 8 // n), np.argsort(-best)[:active])
        order = np.argsort(np.where(kept, -by[row], np.inf), kind="stable")[:3]
        np.testing.assert_array_equal(experts[row], order)
        want = values[row][order]
        want = want / want.sum() if normalize else want
        np.testing.assert_allclose(weights[row], 2.5 * want, rtol=1e-5)


def test_of_equal_scores_the_lowest_index_wins() -> None:
    logits = as_jax([[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]])
    experts, weights = jax.jit(functools.partial(choose, ExpertsConfig(6, 4, 16)))(logits)
    assert experts.tolist() == [[1, 2, 4, 0]]
    np.testing.assert_allclose(weights[0, :3], weights[0, 0])


def test_a_token_s_sublayer_has_the_same_bits_in_any_batch() -> None:
    """Router, weights and sums; a shared expert is an ordinary product, and none of it."""
    cfg = LLAMA.replace(experts=dataclasses.replace(EXPERTS, shared=0, shared_gate=False))
    layer = {k: v for k, v in params_of(cfg)["layer_1"].items() if k != "mixer"}
    x = np.random.default_rng(0).standard_normal((1, 40, 32)).astype(np.float32)
    form = FORMS["sequential"]
    run = jax.jit(lambda x: form.feed(cfg.layers[1], layer, Stream(x), Stream(x)).total)
    want = np.asarray(run(x))
    for rows in (slice(0, 1), slice(3, 12)):
        np.testing.assert_array_equal(run(x[:, rows]), want[:, rows])


def test_router_logits_are_the_product() -> None:
    x, w = (np.random.default_rng(n).standard_normal((n, 32)).astype(np.float32) for n in (5, 8))
    np.testing.assert_allclose(jax.jit(router_logits)(x, w), x @ w.T, atol=1e-5)


# --- the model


def test_prompt_and_steps_are_the_whole_sequence() -> None:
    check_prompt_steps_and_a_draft(*model(), chunk=2, atol=2e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_engine_drafts_and_offloading_give_generates_answers() -> None:
    every_way_generates(*model()[:2])


# Without a gate (Nemotron-H), and a shared expert with biases.
UNGATED = LLAMA.replace(
    activation="relu2",
    gated_mlp=False,
    experts=ExpertsConfig(8, 3, 32, scores="sigmoid", shared=40, shared_bias=True),
)


def test_experts_without_a_gate_are_the_formula() -> None:
    own = params_of(UNGATED)["layer_0"]["mlp"]
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    cfg = UNGATED.layers[0]
    got = jax.jit(functools.partial(mixture, cfg))(own, x)

    def squared(y: np.ndarray) -> np.ndarray:
        return np.maximum(y, 0) ** 2

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), own)
    scores = 1 / (1 + np.exp(-x @ p["router"]["weight"].T))
    want = squared(x @ p["up"]["weight"].T + p["up"]["bias"]) @ p["down"]["weight"].T
    want += p["down"]["bias"]
    for row, score in enumerate(scores):
        best = np.argsort(-score)[:3]
        for expert in best:
            inner = squared(p["experts_gate_up"]["weight"][expert] @ x[row])
            y = p["experts_down"]["weight"][expert] @ inner
            want[row] += score[expert] / score[best].sum() * y
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_experts_without_a_gate_give_generates_answers() -> None:
    lm = jl.LanguageModel(UNGATED, params_of(UNGATED), None)
    every_way_generates(lm, np.asarray(tokens_of(UNGATED, ROWS, WIDTH)))


@pytest.mark.parametrize(("scheme", "bound"), [("w4a16", 0.25), *slow(("w8a16", 0.02))])
def test_quantized_saved_and_loaded(scheme, bound, tmp_path) -> None:
    lm, tokens, want = model()
    params = jl.quantize_params(lm.params, scheme)
    own = params["layer_1"]["mlp"]
    for name in ("experts_gate_up", "experts_down", "gate_up", "down"):
        assert isinstance(own[name]["weight"], QTensor), name
    assert not isinstance(own["router"]["weight"], QTensor)
    path = packed.save(tmp_path / "packed", CFG, params)
    cfg, read = hf.load(path)
    assert cfg.replace(name=CFG.name) == CFG
    jax.tree.map(np.testing.assert_array_equal, read, jax.tree.map(np.asarray, params))
    quantized = jl.LanguageModel(CFG, params, None)
    restored = restore_tree(jax.tree.map(np.asarray, quantized.params))  # numpy compiles nothing
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    got = np.asarray(quantized.logits(tokens, np.full(ROWS, WIDTH, np.int32)))
    assert np.sqrt(np.mean((got - want) ** 2)) < bound * np.std(want)


EXPORTED = [
    ("w4a16-sym,head=none", "compressed-tensors"),
    ("w8a16,head=none", "compressed-tensors"),
    ("w4a16,head=none", "awq"),
    ("w8a16,head=none,down=w4a16", "gptq"),
]


@pytest.mark.parametrize(("scheme", "format"), EXPORTED)
def test_experts_in_the_formats_of_other_programs(scheme: str, format: str, tmp_path) -> None:
    lm, _, _ = model()
    params = jl.quantize_params(lm.params, scheme, scale_dtype=jnp.float16)
    _, read = hf.load(packed.save(tmp_path / "out", CFG, jax.device_get(params), format=format))
    got, want = flatten(read), flatten(params)
    assert isinstance(got["layer_1", "mlp", "experts_gate_up", "weight"], QTensor)
    for path, leaf in want.items():
        np.testing.assert_array_equal(floats_of(got[path]), floats_of(leaf), err_msg=str(path))


def test_an_export_says_what_transformers_will_not_load(tmp_path) -> None:
    lm, _, _ = model()
    for scheme, reason in (
        ("w4a16,head=none", "no experts with zero points; scheme w4a16-sym"),
        ("w4a16-sym,experts_*=none", "no experts in floats beside these weights"),
    ):
        params = jl.quantize_params(lm.params, scheme)
        with pytest.warns(WeightWarning, match=f"transformers 5.24 will not load it: .*{reason}"):
            packed.check(CFG, params, "compressed-tensors")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16-sym,head=none", "w8a16"])
def test_transformers_loads_exported_experts(scheme: str, tmp_path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    _, tokens, _ = model()
    params = jl.quantize_params(params_of(CFG), scheme)
    out = packed.save(tmp_path / "out", CFG, jax.device_get(params), format="compressed-tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        want = theirs(torch.tensor(tokens)).logits.numpy()
    got = np.asarray(jl.load(out, exact=True).logits(tokens, np.full(ROWS, WIDTH, np.int32)))
    assert relative_error(got, want) < 1e-5


def test_modules_declare_and_compute_the_same() -> None:
    lm, tokens, want = model()
    x = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)

    @jax.jit
    def run(params, x):
        own = params["layer_1"]["mlp"]
        hidden, _ = Decoder(CFG).apply({"params": params}, tokens)
        mixed = MixtureOfExperts(CFG, 1).apply({"params": own}, x)
        return logits(CFG, params, hidden), mixed, mixture(CFG.layers[1], own, x)

    scores, got, pure = run(lm.params, x)
    np.testing.assert_allclose(scores, want, atol=2e-5)
    np.testing.assert_allclose(got, pure, atol=1e-6)
    drawn = jax.eval_shape(lambda key: jl.init_params(CFG, key), jax.random.key(0))
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, lm.params)


def test_gradients_reach_every_parameter() -> None:
    check_gradients(*model()[:2])


def test_calibration_counts_the_rows_of_each_expert() -> None:
    cfg = CFG.replace(expert_layers=(0, 1)).first_layers(1)
    text = np.asarray(tokens_of(cfg, 1, 24))
    with pytest.warns(WeightWarning, match="of 8 experts read fewer than 16 tokens"):
        params, report = calibrate(cfg, params_of(cfg), text, parse("none,experts_*=w4a16"), "gptq")
    entries = {entry["weight"]: entry for entry in report}
    assert entries["layer_0/mlp/experts_down"]["scheme"] == "int4 zero"
    assert all(np.isfinite(entry["output_error"]) for entry in report)


def test_what_is_not_done_is_refused_by_name(tmp_path) -> None:
    lm, _, _ = model()
    odd = CFG.replace(experts=dataclasses.replace(CFG.experts, n_experts=7))
    with pytest.raises(JaxLlamaError, match="mesh: model=2 does not divide the 7 experts of tiny"):
        check_shards(odd, 2)
    with pytest.raises(JaxLlamaError, match=r"experts_down: .*add experts_\*=w8a16"):
        jl.quantize_params(lm.params, "w8a8")
    mixed = jl.quantize_params(lm.params, "w8a8,experts_*=w8a16")
    packed.check(CFG, mixed, "compressed-tensors")
    granite = CASES["granitemoe"]
    stacked = jl.quantize_params(parity_params("granitemoe"), "w8a16")
    with pytest.raises(JaxLlamaError, match=r"all experts in one tensor.*experts_\*=none"):
        packed.check(granite, stacked, "compressed-tensors")
    with pytest.raises(JaxLlamaError, match=r"add experts_\*=w8a16"):
        check(CFG, QuantizeRequest(tmp_path / "q", "w8a8"))
    check(CFG, QuantizeRequest(tmp_path / "q", "w4a16"))
    assert not any(".experts." in name for name in products(CFG))
    with pytest.raises(JaxLlamaError, match="experts.n_experts|experts = "):
        hf.save(tmp_path / "x", CFG.replace(stored=CheckpointForm()), lm.params)


def test_a_choice_s_bias_stays_in_float32(tmp_path) -> None:
    cfg, params = CASES["glm4_moe"], parity_params("glm4_moe")
    _, read = hf.load(hf.save(tmp_path / "glm", cfg, params), dtype=jnp.bfloat16)
    router = read["layer_1"]["mlp"]["router"]
    assert (router["weight"].dtype, router["choice_bias"].dtype) == (jnp.bfloat16, np.float32)
    np.testing.assert_array_equal(
        router["choice_bias"], params["layer_1"]["mlp"]["router"]["choice_bias"]
    )


def test_config() -> None:
    assert ModelConfig.of(**CFG.to_dict()) == CFG
    assert CFG.layers[0].experts is None
    assert CFG.layers[1].experts == EXPERTS
    assert CFG.first_layers(1).experts is None
    alike = CFG.replace(expert_layers=(0, 1))
    assert alike.expert_layers == () and alike.first_layers(1).experts == alike.experts
    assert alike.feed_width == CFG.feed_width == 3 * 32 + 32
    shapes = {path[2:]: spec.shape for path, spec in param_table(alike).items() if "mlp" in path}
    assert shapes["experts_gate_up", "weight"] == (8, 64, 32)
    assert shapes["experts_down", "weight"] == (8, 32, 32)
    for change, text in (
        ({"n_active": 9}, "experts.n_active = 9"),
        ({"n_groups": 3}, "experts.n_groups = 3: must divide"),
        ({"shared": 0}, "experts.shared_gate"),
    ):
        with pytest.raises(JaxLlamaError, match=text):
            CFG.replace(experts=dataclasses.replace(EXPERTS, **change))
    with pytest.raises(JaxLlamaError, match="expert_layers"):
        CFG.replace(expert_layers=(2,))
