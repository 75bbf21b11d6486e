"""Quantization-aware training and distillation: what is learned, and what is left alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama import generation
from jaxllama.checkpoints.hf import load as hf
from jaxllama.errors import JaxLlamaError
from jaxllama.model.decoder import block
from jaxllama.model.stacked import embed
from jaxllama.quantization.quantize import quantize_params
from jaxllama.training import loop, train
from jaxllama.training.config import QuantizeConfig
from jaxllama.training.data import TokenFile
from jaxllama.training.distill import (
    answer_scales,
    mixer_loss,
    scaled,
    student_config,
    student_params,
)
from jaxllama.training.fake_quantize import RANGES, fake_quantize, to_qtensor
from jaxllama.training.quantization_aware import GridWeight, prepare, quantized, rounded
from jaxllama.training.start import TrainingSetup, begin
from jaxllama.training.step import init_state, loss
from pallas_kernels.qtensor import QTensor
from tests.helpers.models import relative_error, tokens_of
from tests.helpers.packed_oracle import floats_of
from tests.helpers.parity_cases import CASES
from tests.helpers.seeded import seeded_params
from tests.helpers.training_cases import byte_model, rows_of, run_config, token_file


@pytest.fixture(scope="module")
def teacher(folder):
    """A Llama that has learned a little, so that there is something to imitate."""
    cfg = byte_model("gqa", tie_embeddings=True, d_ff=64)
    return train(run_config(folder, cfg, steps=60, learning_rate=1e-2), folder / "teacher").model


# Fake quantization


@pytest.mark.core
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("words", ["int8", "int4"])
def test_fake_quantize_and_its_gradients_are_the_equations(words, zeros):
    """Against numpy in float64, with weights beyond both ends of the range."""
    rng = np.random.default_rng(0)
    low, high = RANGES[words]
    w = rng.standard_normal((6, 32)).astype(np.float32)
    scale = (rng.uniform(1.0, 2.5, (6, 4)) / high).astype(np.float32)  # some weights are clipped
    zero = rng.uniform(-0.5, 0.5, (6, 4)).astype(np.float32) if zeros else None
    dy = rng.standard_normal(w.shape).astype(np.float32)

    shift = 0 if zero is None else zero[..., None].astype(np.float64)
    n = (w.reshape(6, 4, 8) - shift) / scale[..., None].astype(np.float64)
    q = np.clip(np.round(n), low, high)
    inside = (n >= low) & (n <= high)
    assert 0.05 < np.mean(~inside) < 0.5
    d = dy.reshape(6, 4, 8)
    want = [
        q * scale[..., None] + shift,
        np.where(inside, d, 0),
        np.sum(d * (q - np.where(inside, n, 0)), axis=-1),
        np.sum(np.where(inside, 0, d), axis=-1),
    ]

    @jax.jit
    def forth_and_back(w, scale, zero, dy):
        y, pull = jax.vjp(lambda *args: fake_quantize(*args, words), w, scale, zero)
        return y, *pull(dy), to_qtensor(w, scale, zero, words)

    y, d_w, d_scale, d_zero, codes = forth_and_back(w, scale, zero, dy)
    got = [y.reshape(6, 4, 8), d_w.reshape(6, 4, 8), d_scale, d_zero]
    for a, b in zip(got[: 3 + zeros], want, strict=False):
        assert relative_error(a, b) < 1e-5
    np.testing.assert_array_equal(y, floats_of(codes))


def test_fake_quantize_of_nothing_and_of_a_lost_scale_is_finite():
    w = np.repeat(np.float32([[0.0], [1.0]]), 8, axis=1)
    scale = np.float32([[0.0], [-1.0]])

    @jax.jit
    def forth_and_back(w, scale):
        y, pull = jax.vjp(lambda *args: fake_quantize(*args, None, "int4"), w, scale)
        return y, pull(jnp.ones_like(y))

    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(forth_and_back(w, scale)))
    with pytest.raises(ValueError, match="'int3' are not one of int8, int4"):
        fake_quantize(w, scale, None, "int3")
    with pytest.raises(ValueError, match="does not fit"):
        fake_quantize(w, jnp.ones((2, 3)), None)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
def test_training_begins_at_round_to_nearest_s_words(scheme):
    params = seeded_params(byte_model("gla", d_ff=64, n_layers=1, layer_types=("gla",)))

    @jax.jit
    def begin(params):
        grids = prepare(params, QuantizeConfig(scheme))
        return quantized(grids), rounded(grids), quantize_params(params, f"{scheme}-sym")

    words, floats, want = begin(params)
    jax.tree.map(np.testing.assert_array_equal, words, want)
    is_q = lambda leaf: isinstance(leaf, QTensor)  # noqa: E731
    assert sum(map(is_q, jax.tree.leaves(want, is_leaf=is_q))) == 7 + 1
    stands_for = jax.tree.map(floats_of, want, is_leaf=is_q)
    jax.tree.map(np.testing.assert_array_equal, floats, stands_for)


def test_grids_of_experts_stand_for_the_words_that_are_saved():
    w = np.random.default_rng(0).standard_normal((2, 64, 128)).astype(np.float32)
    grids = prepare({"experts_down": {"weight": w}}, QuantizeConfig("w8a16"))
    words, floats = (f(grids)["experts_down"]["weight"] for f in (quantized, rounded))
    assert words.shape == floats.shape == w.shape
    np.testing.assert_array_equal(floats_of(words), floats)


def test_a_grid_with_zeros_stands_for_the_words_that_are_saved():
    w = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)

    @jax.jit
    def begin(params):
        grids = prepare(params, QuantizeConfig("w4a16", zeros=True))
        return quantized(grids), rounded(grids)

    words, floats = (tree["head"]["weight"] for tree in begin({"head": {"weight": w}}))
    assert words.zero is not None
    np.testing.assert_array_equal(floats_of(words), floats)
    assert relative_error(floats, w) < 0.08  # half a step of 16


@pytest.mark.parametrize("zeros", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_quantization_aware_training_beats_rounding(zeros, folder, teacher, tmp_path):
    """Where rounding costs something: columns of ``down`` are 16 times larger than their neighbours
    and the rows that feed them smaller, which is the same function until it is rounded in groups.
    Step 0 is rounding to nearest; what counts is the distance to the model that was rounded.
    Weights, scales and zeros have moved, and what is saved stands for the same floats."""
    lm = jl.load(teacher)
    params = jax.tree.map(np.array, lm.params)
    factors = np.ones(64, np.float32)
    factors[::16] = 16.0
    for name in ("layer_0", "layer_1"):
        mlp = params[name]["mlp"]
        mlp["gate_up"]["weight"][64:] /= factors[:, None]
        mlp["down"]["weight"] *= factors
    files = TokenFile.open(token_file(folder)).tokenizer_files
    planted = hf.save(tmp_path / "planted", lm.config, params, files)
    config = run_config(
        folder,
        init_from=str(planted),
        learning_rate=2e-3,
        steps=40,
        batch_size=8,
        remat=True,
        quantize={"scheme": "w4a16", "zeros": zeros},
        optimizer={"warmup_steps": 2, "weight_decay": 0.0},
        distill={"teacher": str(planted), "ce_weight": 0.0},
    )
    result = train(config, tmp_path / "run")
    curve = [row["kl"] for row in result.metrics]
    assert curve[0] > (1e-4 if zeros else 1e-3), "rounding costs nothing here"
    assert np.mean(curve[-5:]) < curve[0] / 10
    setup, params, _ = begin(config, TokenFile.open(config.data.tokens))
    state = init_state(setup, params)
    before = jax.tree.map(np.array, state["params"]["layer_0"]["mlp"]["gate_up"]["weight"])
    checkpoints = loop.Checkpoints(result.directory / "checkpoints", 1)
    grids = checkpoints.restore(40, jax.device_put(state, jax.devices()[0]))["params"]
    after = grids["layer_0"]["mlp"]["gate_up"]["weight"]
    # A zero has a gradient only where one of its group's weights is clipped.
    for part, least in (("w", 0.9), ("scale", 0.9), *([("zero", 0.3)] if zeros else [])):
        moved = np.asarray(getattr(after, part)) != getattr(before, part)
        assert np.mean(moved) > least, part
    weight = jl.load(result.model, exact=True).params["layer_0"]["mlp"]["gate_up"]["weight"]
    assert isinstance(weight, QTensor) and weight.dtype == jnp.int4 and weight.group_size == 32
    floats = rounded({"gate_up": {"weight": after}})["gate_up"]["weight"]
    np.testing.assert_array_equal(floats_of(weight), floats)


# Distillation


@functools.partial(jax.jit, static_argnums=(0, 1))
def imitation_loss(student, teacher, params, teacher_params, tokens):
    dtype = jnp.dtype(jnp.float32)
    return mixer_loss(student, teacher, params, teacher_params, tokens, dtype, remat=False)[0]


def test_a_student_is_its_teacher_but_for_the_mixers(teacher):
    lm = jl.load(teacher)
    cfg = student_config(lm.config, (1,))
    assert cfg.layer_types == ("gla", "attention") and cfg.gla.head_dims(cfg.d_model) == (8, 8)
    params = student_params(cfg, lm.params, jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(generation.init_params, cfg), jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    np.testing.assert_array_equal(params["embed"]["weight"], lm.params["embed"]["weight"])
    jax.tree.map(np.testing.assert_array_equal, params["layer_1"], lm.params["layer_1"])
    for part in ("mlp", "mlp_norm", "mixer_norm"):
        jax.tree.map(
            np.testing.assert_array_equal, params["layer_0"][part], lm.params["layer_0"][part]
        )
    mixer, attention = params["layer_0"]["mixer"], lm.params["layer_0"]["mixer"]
    qkv = np.concatenate([mixer[name]["weight"] for name in "qkv"])
    np.testing.assert_array_equal(qkv, attention["qkv"]["weight"])
    np.testing.assert_array_equal(mixer["o"]["weight"], attention["o"]["weight"])
    bias = np.asarray(mixer["gk_1"]["bias"]).reshape(2, 8)
    np.testing.assert_allclose(bias[0], np.linspace(-2, 4, 8), rtol=1e-6)
    np.testing.assert_array_equal(bias[0], bias[1])


def test_mixer_loss_compares_what_the_teacher_s_layers_took_and_gave(teacher):
    """With attention kept in layer 0 and GLA in layer 1: by hand from the whole models."""
    lm = jl.load(teacher)
    cfg = student_config(lm.config, (0,))
    params = student_params(cfg, lm.params, jax.random.key(0))
    tokens = tokens_of(lm.config, 2, 12)
    got = imitation_loss(cfg, lm.config, params, lm.params, tokens)

    # A student whose MLP of layer 1 is zero shows the mixer's answer in its last residual stream.
    @functools.partial(jax.jit, static_argnums=0)
    def last_stream(config, tree):
        stream, at = embed(lm.config, lm.params, tokens, jnp.dtype(jnp.float32))
        first, last = config.layers[:2]
        stream, _ = block(first, tree["layer_0"], stream, None, at)
        before = stream.total
        silent = jax.tree.map(jnp.zeros_like, tree["layer_1"]["mlp"])
        stream, _ = block(last, {**tree["layer_1"], "mlp": silent}, stream, None, at)
        return stream.total - before

    streams = {
        "student": np.asarray(last_stream(cfg, params), np.float64),
        "teacher": np.asarray(last_stream(lm.config, lm.params), np.float64),
    }
    error = np.sum((streams["student"] - streams["teacher"]) ** 2)
    assert float(got) == pytest.approx(error / np.sum(streams["teacher"] ** 2), rel=1e-4)


def test_a_student_s_first_answers_have_the_teacher_s_size(teacher, folder):
    """Then they are not far off: a layer's loss is 1 - r^2 at the least-squares factor."""
    lm = jl.load(teacher)
    cfg = student_config(lm.config)
    params = student_params(cfg, lm.params, jax.random.key(0))
    tokens = TokenFile.open(token_file(folder)).batch(0, 4, 24, 0)
    scales = answer_scales(cfg, lm.config, params, lm.params, tokens)
    assert scales.shape == (2,) and bool(jnp.all(scales > 0))
    before = imitation_loss(cfg, lm.config, params, lm.params, tokens)
    params = scaled(params, scales)
    at = imitation_loss(cfg, lm.config, params, lm.params, tokens)
    assert float(at) <= 1.0 and float(at) < float(before)
    again = answer_scales(cfg, lm.config, params, lm.params, tokens)
    np.testing.assert_allclose(again, 1.0, rtol=1e-4)  # nothing is left to scale


def test_learning_to_imitate_mixers(teacher, folder, tmp_path):
    """The loss falls, nothing but the replaced mixer is touched, and a model that loads comes
    out."""
    goal = {"teacher": str(teacher), "objective": "mixers", "attention_layers": [1]}
    found = train(run_config(folder, distill=goal, learning_rate=1e-2), tmp_path / "mixers")
    curve = [row["loss"] for row in found.metrics]
    assert curve[-1] < 0.9 * curve[0]
    student, lm = jl.load(found.model), jl.load(teacher)
    assert student.config.layer_types == ("gla", "attention")
    for part in ("embed", "norm", "layer_1"):
        jax.tree.map(np.testing.assert_array_equal, student.params[part], lm.params[part])
    for part in ("mlp", "mlp_norm", "mixer_norm"):
        ours, theirs = (tree["layer_0"][part] for tree in (student.params, lm.params))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
def test_learning_to_imitate_logits(teacher, folder, tmp_path):
    """Begun with the student that has learned to imitate mixers."""
    common = {"teacher": str(teacher)}
    first = run_config(folder, distill={**common, "objective": "mixers"}, learning_rate=1e-2)
    mixers = train(first, tmp_path / "mixers").model
    goal = {**common, "temperature": 2.0}
    found = train(
        run_config(folder, init_from=str(mixers), distill=goal, remat=True, scan=True),
        tmp_path / "logits",
    )
    rows = found.metrics
    assert rows[-1]["kl"] < rows[0]["kl"]
    for row in rows:
        assert row["loss"] == pytest.approx(4.0 * row["kl"] + 0.1 * row["ce"], rel=1e-5)
    assert jl.load(found.model).generate(["The "], max_new_tokens=2)[0].tokens


def test_a_distilled_model_s_logits_and_its_teacher_s_are_capped(folder):
    """Two Gemma 2 of one layer: KL and cross entropy are those of ``jl.logits``, capped here, and
    the loss has the shares of them that the file says."""
    cfg = CASES["gemma2"].replace(n_layers=1, layer_types=(), window_layers=())
    caps = (cfg.logit_softcap, 1.5)
    models = [cfg.replace(logit_softcap=cap) for cap in caps]
    params = [jax.device_put(seeded_params(cfg, seed)) for seed in (1, 2)]
    tokens = rows_of(cfg, 2, 9)
    goal = {"teacher": "unread", "temperature": 2.0, "kl_weight": 0.7, "ce_weight": 0.2}
    config = run_config(folder, byte_model("gqa"), distill=goal)
    total, parts = jax.jit(functools.partial(loss, TrainingSetup(config, *models)))(*params, tokens)
    logits = []
    for cap, weights in zip(caps, params, strict=True):
        uncapped = cfg.replace(logit_softcap=None)
        scores = jl.logits(uncapped, weights, tokens[:, :-1], np.full(2, 8, np.int32))
        logits.append(cap * np.tanh(np.asarray(scores, np.float64) / cap))
    student, wanted = (log_softmax(scores / 2.0) for scores in logits)
    kl = np.mean(np.sum(np.exp(wanted) * (wanted - student), axis=-1))
    nll = log_softmax(logits[0])
    ce = -np.mean(np.take_along_axis(nll, tokens[:, 1:, None], axis=-1))
    np.testing.assert_allclose([parts["kl"], parts["ce"]], [kl, ce], rtol=1e-5)
    assert float(total) == pytest.approx(0.7 * 4.0 * kl + 0.2 * ce, rel=1e-5)


def log_softmax(scores):
    return scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))


def test_teachers_that_do_not_fit_are_refused(teacher, folder, tmp_path):
    lm = jl.load(teacher)
    for layers, message in (((5,), "5 is not a layer of"), ((0, 1), "nothing is left to replace")):
        with pytest.raises(JaxLlamaError, match=message):
            student_config(lm.config, layers)
    with pytest.raises(JaxLlamaError, match="has GLA layers"):
        student_config(byte_model("gla"))
    with pytest.raises(JaxLlamaError, match="post_norms = True: flash-linear-attention's"):
        student_config(CASES["glm4"])
    assert student_config(CASES["granite"]).stored.embed == 1.0  # its weights have it
    other = byte_model("gla", d_model=64)
    hf.save(tmp_path / "wide", other, seeded_params(other))
    config = run_config(
        folder,
        init_from=str(tmp_path / "wide"),
        distill={"teacher": str(teacher), "objective": "mixers"},
    )
    with pytest.raises(JaxLlamaError, match="layers and width"):
        train(config, tmp_path / "run")
    assert not isinstance(lm.params["embed"]["weight"], GridWeight)


def test_what_only_data_and_checkpoints_can_contradict(teacher, folder, tmp_path):
    small = byte_model("gqa", d_ff=64).replace(vocab_size=100)
    for change, message in (
        ({"cfg": small}, "ids up to 255, but .* vocab_size is 100"),
        ({"init_from": str(teacher), "sequence_length": 5000}, "exceeds .* max_position"),
        ({"init_from": str(teacher), "sequence_length": 4000}, "one window needs 4001"),
        ({"cfg": byte_model("gla", mlp_bias=True)}, "mlp_bias"),
    ):
        with pytest.raises(JaxLlamaError, match=message):
            # None of them has taken a step, so the folder stays free.
            train(run_config(folder, **change), tmp_path / "run")
    config = run_config(folder, init_from=str(teacher))
    lost = dataclasses.replace(config, data=dataclasses.replace(config.data, tokens="nowhere"))
    with pytest.raises(JaxLlamaError, match="nowhere"):
        train(lost, tmp_path / "other")
