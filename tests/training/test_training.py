"""Training: gradients and curves against torch, resuming to the bit, what a run leaves behind."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxllama as jl
from jaxllama import generation
from jaxllama.checkpoints.hf import load as hf
from jaxllama.errors import JaxLlamaError
from jaxllama.model.decoder import head
from jaxllama.model.flops import flops_per_token, matmul_weights, parameters
from jaxllama.model.params import param_table
from jaxllama.model.stacked import hidden_states, is_stacked, recomputed_block
from jaxllama.training import loop, passes, train
from jaxllama.training import loss as loss_module
from jaxllama.training.checkpoint import CheckpointWarning
from jaxllama.training.data import TokenFile
from jaxllama.training.estimate import estimate
from jaxllama.training.loss import cross_entropy, distillation
from jaxllama.training.run_directory import ANSWERS
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import (
    _gradient,
    init_state,
    loss,
    per_layer,
    update,
    validation_loss,
)
from tests.helpers.models import relative_error
from tests.helpers.parity_cases import CASES as PARITY
from tests.helpers.seeded import seeded_params
from tests.helpers.training_cases import (
    GOLDEN,
    byte_model,
    family_case,
    first_params,
    rows_of,
    run_config,
    sampled,
    token_file,
)

OTHER_FAMILIES = ("gemma3_text", "granite", "cohere")


# The model as training sees it


def test_layer_by_layer_is_the_decoder():
    cfg = byte_model("hybrid", sliding_window=9, window_layers=(1,), embedding_scale=True)
    params, tokens = seeded_params(cfg), rows_of(cfg, 2, 20)
    want = generation.logits(cfg, params, tokens, np.full(2, 20, np.int32))
    how = {"dtype": jnp.dtype(jnp.float32), "run_layer": recomputed_block}
    run = jax.jit(functools.partial(hidden_states, cfg, **how))
    got = np.asarray(run(params, tokens)) @ head(params)["weight"].T
    assert relative_error(got, want) < 2e-6  # XLA fuses the two programs differently


def mean_loss(x, w, targets, teacher, cap, weights):
    """The loss by its definition, in float64; without weights the cross entropy."""

    def log_softmax(scores):
        return scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))

    logits = capped(x @ w.T, cap)
    ce = -np.mean(np.take_along_axis(log_softmax(logits), targets[..., None], axis=-1))
    if not weights:
        return ce
    heat = weights["temperature"]
    student, teacher = log_softmax(logits / heat), log_softmax(teacher / heat)
    kl = np.mean(np.sum(np.exp(teacher) * (teacher - student), axis=-1))
    return weights["kl_weight"] * heat**2 * kl + weights["ce_weight"] * ce


def capped(scores, cap):
    return scores if cap is None else cap * np.tanh(scores / cap)


def central_differences(function, array, step=1e-5):
    """The gradient of ``function`` at ``array``, entry by entry."""
    gradient = np.empty(array.shape)
    for index in np.ndindex(array.shape):
        shift = np.zeros(array.shape)
        shift[index] = step
        gradient[index] = (function(array + shift) - function(array - shift)) / (2 * step)
    return gradient


@pytest.mark.core
@pytest.mark.parametrize(
    ("caps", "weights"),
    [
        ((2.0, None), {}),
        ((None, None), {"kl_weight": 0.7, "ce_weight": 0.2, "temperature": 1.7}),
        ((2.0, 3.0), {"kl_weight": 0.7, "ce_weight": 0.2, "temperature": 1.7}),
    ],
    ids=["cross entropy", "distillation", "capped distillation"],
)
def test_chunked_losses_and_gradients_are_those_of_all_tokens_at_once(caps, weights, monkeypatch):
    """Chunks of 5 of 12 tokens, the last one padded, against the definition in float64."""
    monkeypatch.setattr(loss_module, "CHUNK", 5)
    rng = np.random.default_rng(0)
    x, teacher_x = rng.standard_normal((2, 2, 6, 8)).astype(np.float32)
    w, teacher_w = rng.standard_normal((2, 11, 8)).astype(np.float32)
    targets = rng.integers(0, 11, (2, 6)).astype(np.int32)

    def ours(x, w):
        if not weights:
            return cross_entropy(x, w, targets, caps[0])[0]
        return distillation(
            x, w, targets, teacher_x, teacher_w, cap=caps[0], teacher_cap=caps[1], **weights
        )[0]

    got, (d_x, d_w) = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, w)
    x, w, teacher_x, teacher_w = (a.astype(np.float64) for a in (x, w, teacher_x, teacher_w))
    teacher = capped(teacher_x @ teacher_w.T, caps[1])
    wanted = functools.partial(
        mean_loss, targets=targets, teacher=teacher, cap=caps[0], weights=weights
    )
    assert relative_error(got, wanted(x, w)) < 1e-6
    # float32 sums of a dozen terms
    assert relative_error(d_x, central_differences(lambda x: wanted(x, w), x)) < 3e-6
    assert relative_error(d_w, central_differences(lambda w: wanted(x, w), w)) < 3e-6


def test_the_head_s_products_read_16_bits():
    """In bfloat16 no operand of a large product may be float32: a GPU would run it 15x slower."""
    x, w = jnp.ones((1, 4, 8), jnp.bfloat16), jnp.ones((16, 8), jnp.float32)
    targets = jnp.zeros((1, 4), jnp.int32)
    gradient = jax.grad(lambda x, w: cross_entropy(x, w, targets)[0], (0, 1))
    jaxpr, shapes = jax.make_jaxpr(gradient, return_shape=True)(x, w)
    products = list(_products(jaxpr.jaxpr))
    assert len(products) == 3
    for eqn in products:
        assert {operand.aval.dtype for operand in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
        assert eqn.outvars[0].aval.dtype == jnp.float32
    assert [shape.dtype for shape in shapes] == [jnp.bfloat16, jnp.float32]


def _products(jaxpr):
    """Every dot_general, also in the bodies of loops."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for value in eqn.params.values():
            if hasattr(value, "jaxpr"):
                yield from _products(value.jaxpr)


@pytest.mark.parametrize("family", ["gla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_remat_keeps_a_layer_s_input_and_little_else(family, folder):
    """What the backward pass is given, from shapes alone (XLA's CPU compiler undoes remat)."""
    cfg = byte_model(family)
    cfg = cfg.replace(n_layers=6, layer_types=cfg.layer_types[:1] * 6)
    params = jax.eval_shape(functools.partial(generation.init_params, cfg), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((8, 129), jnp.int32)
    kept = {}
    for remat in (False, True):
        setup = TrainingSetup(run_config(folder, cfg, remat=remat), cfg)

        def backward(params, batch, setup=setup):
            return jax.vjp(lambda params: loss(setup, params, None, batch)[0], params)[1]

        leaves = jax.tree.leaves(jax.eval_shape(backward, params, batch))
        kept[remat] = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    weights = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    inputs = 6 * 2 * 8 * 128 * cfg.d_model * 4  # x and pending of every layer
    assert kept[True] < kept[False] / 4
    assert kept[True] < 3 * (inputs + weights)


# Against torch


@pytest.fixture(params=["golden", pytest.param("live", marks=pytest.mark.slow)])
def torch_says(request):
    """torch_says(case) -> torch's answer, from the golden file or, under ``slow``, from torch."""
    if request.param == "live":
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        from tests.helpers.training_torch import reference

        return reference

    def stored(case):
        with np.load(GOLDEN) as arrays:
            return {
                key.removeprefix(f"{case}/"): value
                for key, value in arrays.items()
                if key.startswith(f"{case}/")
            }

    return stored


@pytest.mark.core
@pytest.mark.parametrize("family", ["gla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_gradients_of_the_whole_model_are_torch_s_in_float64(family, torch_says, folder):
    """Every leaf within 1e-4 (of its largest entry); float32 against float64 measures 3e-6. Each of
    the three rows is a microbatch, of which an update takes the mean."""
    cfg = byte_model(family)
    setup = TrainingSetup(run_config(folder, cfg), cfg)
    gradient = jax.jit(functools.partial(_gradient, setup))
    rows = rows_of(cfg, 3, 21)[None]  # [rows, microbatches, T + 1]
    grads, metrics = gradient(jax.device_put(seeded_params(cfg)), None, rows)
    want = torch_says(f"gradients/{family}")
    assert abs(float(metrics["loss"]) / want.pop("loss") - 1) < 1e-6
    assert want.keys() == {"/".join(path) for path in param_table(cfg)}
    for path, gradient in want.items():
        got = functools.reduce(lambda tree, key: tree[key], path.split("/"), grads)
        assert relative_error(sampled(got), gradient) < 1e-4, path


@pytest.mark.parametrize("family", ["gla", pytest.param("gqa", marks=pytest.mark.slow)])
def test_the_curve_is_torch_s(family, torch_says, folder, tmp_path):
    """The bar is 2% at the end; the same arithmetic in another order stays within 1e-4 at every
    step of a run this short."""
    begin = hf.save(tmp_path / "begin", byte_model(family), first_params(byte_model(family)))
    config = run_config(folder, init_from=str(begin), microbatches=2 if family == "gla" else 1)
    got = [row["loss"] for row in train(config, tmp_path / "run").metrics]
    assert got[-1] < got[0] - 0.4  # it learns
    np.testing.assert_allclose(got, torch_says(f"curve/{family}")["losses"], rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["gemma2", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHER_FAMILIES)]
)
def test_twenty_steps_of_each_family_are_transformers_and_torch_s_adamw(
    name, torch_says, folder, tmp_path
):
    """Gemma 2 caps its logits, and all of them have constants that loading folds into weights.
    Losses, validation and weights are those of the family's own parameters; float32 measures
    3e-7 and 4e-6, of an unfolded Llama as well."""
    cfg, config, batches = family_case(name, folder)
    want = torch_says(f"steps/{name}")
    setup, params = TrainingSetup(config, cfg), jax.device_put(seeded_params(cfg))
    held = validation_loss(setup, params, batches[0])
    np.testing.assert_allclose(held, want.pop("held"), rtol=2e-6)
    state, curve = init_state(setup, params), []
    for batch in batches:
        state, metrics = update(setup, state, None, batch[None])
        curve.append(float(metrics["loss"]))
    np.testing.assert_allclose(curve, want.pop("losses"), rtol=2e-6)
    hf.save(tmp_path / "ours", cfg, state["params"])
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    assert want.keys() == tensors.keys()
    for tensor, weight in want.items():
        assert relative_error(sampled(tensors[tensor]), weight) < 1e-5, tensor


def test_equal_setups_are_one_static_argument(folder):
    """A setup has its model's multipliers, and is hashed and compared without them."""
    cfg, config, _ = family_case("granite", folder)
    setup, again = TrainingSetup(config, cfg), TrainingSetup(config, cfg)
    assert setup == again and hash(setup) == hash(again)
    folded = {path: set(rows.tolist()) for path, rows in setup.multipliers.items()}
    sources = {
        path: {float(np.float32(source.scale)) for source in spec.sources}
        for path, spec in param_table(cfg).items()
    }
    assert folded == {path: found for path, found in sources.items() if found != {1.0}}
    assert folded and not TrainingSetup(config, byte_model("gqa")).multipliers


# Layers that are alike as one loop


def scanned_and_not(config, cfg, params, steps):
    """(states of both per layer, losses of both) after ``steps`` updates on the same batches."""
    found = []
    for scan in (False, True):
        setup = TrainingSetup(dataclasses.replace(config, scan=scan), cfg)
        state, losses = init_state(setup, jax.device_put(params)), []
        assert is_stacked(state["params"]) == scan
        for step in range(steps):
            batch = rows_of(cfg, 2, 13, step)[None]
            state, metrics = update(setup, state, None, batch)
            losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        found.append((per_layer(state), losses))
    (plain, want), (looped, got) = found
    assert jax.tree.structure(plain) == jax.tree.structure(looped)
    return plain, looped, want, got


def assert_close(got, want, share):
    """Two trees are equal up to ``share`` of each leaf's largest value."""

    def one(got, want):
        want = np.asarray(want)
        np.testing.assert_allclose(got, want, rtol=0, atol=share * np.abs(want).max())

    jax.tree.map(one, got, want)


@pytest.mark.slow
def test_updates_of_a_loop_are_those_of_its_layers(folder):
    """Of a family with constants that loading folds into weights; norms do not decay, stacked or
    not.  Sums are ordered differently: 1e-5 of the largest value, and where Adam divides a small
    gradient by its own size 1e-4."""
    cfg = PARITY["granite"].replace(n_layers=3)
    config = run_config(folder, byte_model("gqa"), steps=20, learning_rate=3e-2)
    plain, looped, want, got = scanned_and_not(config, cfg, first_params(cfg), 3)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_close(looped["moments"], plain["moments"], 1e-5)
    assert_close(looped["params"], plain["params"], 1e-4)
    gains = [plain["params"][f"layer_{i}"]["mlp_norm"]["weight"] for i in range(3)]
    assert np.std(gains) > 1e-3, "nothing moved"


@pytest.mark.slow
def test_grids_of_a_loop_are_those_of_its_layers(folder):
    """One update: a second one begins where rounding may fall to the other side."""
    cfg = byte_model("gqa").replace(n_layers=3)
    quantize = {"scheme": "w8a16", "zeros": True}
    config = run_config(folder, byte_model("gqa"), quantize=quantize)
    plain, looped, want, got = scanned_and_not(config, cfg, first_params(cfg), 1)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_close(looped["moments"], plain["moments"], 1e-5)
    assert hasattr(looped["params"]["layer_2"]["mlp"]["down"]["weight"], "scale")


@pytest.mark.slow
def test_a_run_with_scan_keeps_the_layers_apart_on_disk(folder, tmp_path):
    """It goes on from a checkpoint that a run without scan wrote, and the other way round."""
    cfg = byte_model("gqa", n_layers=3, layer_types=())
    config = run_config(folder, cfg, steps=4, checkpoint_every=2, keep_checkpoints=4)
    scanned = dataclasses.replace(config, scan=True)
    want = train(config, tmp_path / "plain")
    for first, then in ((scanned, config), (config, scanned)):
        run = tmp_path / ("scan-first" if first.scan else "scan-then")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop.Checkpoints, "save", deadly(loop.Checkpoints.save, 1, True))
            with pytest.raises(Killed):
                train(first, run)
        result = train(then, run)
        losses = [[row["loss"] for row in one.metrics] for one in (result, want)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
        checkpoints = loop.Checkpoints(run / "checkpoints", 4)
        setup = TrainingSetup(config, cfg)
        like = jax.device_put(init_state(setup, seeded_params(cfg)), jax.devices()[0])
        for step in (2, 4):
            assert set(checkpoints.restore(step, like)["params"]) == set(seeded_params(cfg))
        assert jl.load(result.model).config.n_layers == 3


# Runs


class Killed(BaseException):
    """What no handler in the loop may catch."""


@pytest.fixture(scope="module")
def finished(folder):
    """(config, result) of a hybrid's uninterrupted run, with everything that has a state."""
    config = run_config(
        folder,
        byte_model("hybrid"),
        checkpoint_every=4,
        validate_every=3,
        data={"tokens": str(token_file(folder)), "validation_tokens": 120},
    )
    return config, train(config, folder / "finished")


@pytest.mark.slow
def test_an_estimate_is_of_the_whole_run(finished):
    config, _ = finished
    found = estimate(config, TokenFile.open(config.data.tokens))
    validations = -(-config.steps // config.validate_every)
    assert found.seconds == pytest.approx(
        found.start_seconds
        + config.steps * found.step_seconds
        + validations * found.validation_seconds
    )
    assert min(found.step_seconds, found.validation_seconds) > 0
    assert found.tokens == config.steps * config.batch_size * config.sequence_length
    # Weights and two moments in float32.
    assert 0 <= found.state_bytes - 12 * found.parameters < 200


def _curve(rows):
    """Everything logged but the clock."""
    clock = ("seconds", "tokens_per_second", "mfu")
    return [{key: row[key] for key in row if key not in clock} for row in rows]


def deadly(function, calls, after):
    """``function``, whose last call kills the process in its place or, with ``after``, behind
    it."""
    count = itertools.count(1)

    def run(*args):
        if next(count) < calls:
            return function(*args)
        if after:
            function(*args)
        raise Killed

    return run


@pytest.mark.core
def test_killed_anywhere_and_resumed_the_curve_is_the_same_to_the_bit(finished, tmp_path):
    """One run of twelve steps with a checkpoint every four, killed five times."""
    config, whole = finished
    run = tmp_path / "run"
    for owner, name, calls, after in (
        (loop.RunDirectory, "append", 1, False),  # nothing is there yet
        (loop.RunDirectory, "append", 7, False),  # between two checkpoints
        (loop.Checkpoints, "save", 1, False),  # step 8 is in the metrics, its checkpoint is not
        (loop.Checkpoints, "save", 1, True),  # it is, and nothing after it
        (loop.report, "draw", 2, False),  # all steps are done, the model is not written
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, deadly(getattr(owner, name), calls, after))
            with pytest.raises(Killed):
                train(config, run)
        assert (run / "loss.png").exists() == (calls != 1 or owner is not loop.RunDirectory)
        if (run / "metrics.jsonl").exists():
            with open(run / "metrics.jsonl", "a") as file:
                file.write('{"step": 9, "lo')  # a line that was being written
    result = train(config, run)
    assert _curve(result.metrics) == _curve(whole.metrics)
    assert result.validation == whole.validation
    name = "model/model.safetensors"
    assert (run / name).read_bytes() == (whole.directory / name).read_bytes()


@pytest.fixture(scope="module")
def interrupted(finished, tmp_path_factory):
    """(config, a run that was killed after step 8, with checkpoints of the steps 4 and 8)."""
    config = dataclasses.replace(finished[0], keep_checkpoints=3)
    run = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Checkpoints, "save", deadly(loop.Checkpoints.save, 2, True))
        with pytest.raises(Killed):
            train(config, run)
    return config, run


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        ("largest", flipped),
        pytest.param("largest", lambda data: data[:-1], marks=pytest.mark.slow),
        pytest.param("largest", None, marks=pytest.mark.slow),
        ("metrics.jsonl", lambda data: data.replace(b'{"step": 6', b'{"step":x6')),
        pytest.param("metrics.jsonl", lambda data: data[: len(data) // 2], marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_left_for_the_one_before(
    part, damage, finished, interrupted, tmp_path
):
    """The curve and the model are those of a run that nothing disturbed."""
    config, run = interrupted
    shutil.copytree(run, tmp_path / "run")
    run = tmp_path / "run"
    path = run / part
    if part == "largest":
        found = [path for path in (run / "checkpoints/8").rglob("*") if path.is_file()]
        path = max(found, key=lambda path: path.stat().st_size)
    whole = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(whole))
        assert path.read_bytes() != whole
    with pytest.warns(CheckpointWarning) as told:
        result = train(config, run)
    assert len(told) == 1 and path.name in str(told[0].message)
    assert _curve(result.metrics) == _curve(finished[1].metrics)
    assert result.validation == finished[1].validation
    name = "model/model.safetensors"
    assert (run / name).read_bytes() == (finished[1].directory / name).read_bytes()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["12", "4", "8"]


def test_a_damaged_line_of_a_finished_run_is_named(finished, tmp_path):
    config, result = finished
    shutil.copytree(result.directory, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"step": 2', b'{"step":', 1))
    with pytest.raises(JaxLlamaError, match=r"metrics.jsonl:2: damaged$"):
        train(config, tmp_path / "run")


@pytest.mark.core
def test_what_a_run_leaves_behind(finished):
    config, result = finished
    rows = result.metrics
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["tokens"] == 12 * 4 * 24
    assert [row["step"] for row in result.validation] == [3, 6, 9, 12]
    # Half of the peak, both warm-up steps, and the cosine's last step.
    assert rows[0]["learning_rate"] == pytest.approx(1.5e-3)
    assert rows[1]["learning_rate"] == rows[2]["learning_rate"] == pytest.approx(3e-3)
    last = 3e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 9 / 10)))
    assert rows[-1]["learning_rate"] == pytest.approx(last)
    assert all(row["seconds"] > 0 and row["mfu"] is None for row in rows)
    run = json.loads((result.directory / "run.json").read_text())
    assert run["config"]["optimizer"]["b2"] == 0.95  # resolved: defaults are written out
    assert run["environment"]["jax"] == jax.__version__
    assert (result.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (result.directory / "checkpoints").iterdir()] == ["12"]


def test_the_model_loads_and_is_the_one_that_was_validated(finished):
    config, result = finished
    lm = jl.load(result.model)
    assert lm.config.layer_types == ("gla", "attention") and lm.tokenizer.vocab_size == 256
    data = TokenFile.open(config.data.tokens)
    _, held_out = data.split(120)
    rows = np.stack([held_out.window(index, 24) for index in range(4)])
    logits = lm.logits(rows[:, :-1], np.full(4, 24))
    logp = np.asarray(jax.nn.log_softmax(logits), np.float64)
    nll = -np.mean(np.take_along_axis(logp, rows[:, 1:, None], axis=2))
    assert result.validation[-1]["validation_loss"] == pytest.approx(nll, rel=1e-5)


def test_a_finished_run_is_not_run_again(finished, monkeypatch):
    config, result = finished
    monkeypatch.setattr(passes, "update", None)
    again = train(config, result.directory)
    assert again.metrics == result.metrics


def test_ctrl_c_saves_the_step_under_way_and_says_how_to_go_on(finished, tmp_path, capsys):
    config, whole = finished
    update, calls = passes.update, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 6:  # two steps behind the last checkpoint
            os.kill(os.getpid(), signal.SIGINT)
        return update(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", progress=True)
    err = capsys.readouterr().err
    assert "step 6 is saved; the same command goes on from there" in err
    assert "step 3: validation loss" in err
    result = train(config, tmp_path / "run", progress=True)
    assert "goes on after step 6 of 12" in capsys.readouterr().err
    assert _curve(result.metrics) == _curve(whole.metrics)


def test_more_steps_extend_a_finished_run(finished, tmp_path, monkeypatch):
    """Under the longer schedule from where it is; fewer are another run."""
    config, whole = finished
    shutil.copytree(whole.directory, tmp_path / "run")

    def step(setup, state, *_):
        assert setup.config.steps == 14
        found = {name: np.float32(1) for name in ("loss", "grad_norm", "learning_rate")}
        return {**state, "step": state["step"] + 1}, found

    monkeypatch.setattr(passes, "update", step)
    monkeypatch.setattr(passes, "validation_loss", lambda *_: np.float32(1))
    result = train(dataclasses.replace(config, steps=14), tmp_path / "run")
    assert _curve(result.metrics[:12]) == _curve(whole.metrics)
    assert [row["step"] for row in result.metrics[12:]] == [13, 14]
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["config"]["steps"] == 14 and run["extended"] == [12]
    with pytest.raises(JaxLlamaError, match="its steps is 14, and here it is 12"):
        train(config, tmp_path / "run")


def test_a_folder_of_another_run_is_left_alone(finished, tmp_path):
    config, result = finished
    before = (result.directory / "run.json").read_bytes()
    with pytest.raises(JaxLlamaError, match="another run is there: its optimizer.b2 is 0.95.*0.9;"):
        other = dataclasses.replace(config.optimizer, b2=0.9)
        train(dataclasses.replace(config, optimizer=other), result.directory)
    assert (result.directory / "run.json").read_bytes() == before
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(JaxLlamaError, match="not a run's folder: it holds 'thesis.txt'"):
        train(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_two_processes_do_not_share_a_folder(finished, tmp_path):
    config, _ = finished
    run = loop.RunDirectory(tmp_path / "run", config, "sha")
    with pytest.raises(JaxLlamaError, match="another process is running this"):
        loop.RunDirectory(tmp_path / "run", config, "sha")
    run.close()
    loop.RunDirectory(tmp_path / "run", config, "sha").close()


def test_answers_of_another_configuration_are_removed(finished, tmp_path):
    """A run without a row takes any configuration, but not the answers of the one before."""
    config, _ = finished
    kept = []
    for seed in (1, 1, 2):
        run = loop.RunDirectory(tmp_path / "run", dataclasses.replace(config, seed=seed), "sha")
        kept.append((run.path / ANSWERS).exists())
        (run.path / ANSWERS).touch()
        run.close()
    assert kept == [False, True, False]


def test_a_loss_that_is_no_number_ends_the_run(finished, tmp_path, monkeypatch):
    config, _ = finished
    update = passes.update

    def broken(*args):
        state, metrics = update(*args)
        return state, {**metrics, "loss": jnp.float32(jnp.nan)}

    monkeypatch.setattr(passes, "update", broken)
    with pytest.raises(JaxLlamaError, match="the loss is nan at step 1; a lower learning_rate"):
        train(config, tmp_path / "run")


# Arithmetic


@pytest.mark.core
def test_flops_by_hand():
    llama = jl.load_config("llama-3.2-1b")
    d, f, v, layers = 2048, 8192, 128256, 16
    weights = layers * (d * (2048 + 2 * 512) + 2048 * d + 3 * d * f) + v * d
    assert matmul_weights(llama) == weights
    attention = layers * 2 * 4096 * 32 * 64
    assert flops_per_token(llama, 4096) == 3 * (2 * weights + attention)
    gla = jl.load_config("gla-1.3b")
    assert parameters(gla) == pytest.approx(1.37e9, rel=0.01)
    state = 24 * 4 * 4 * 256 * 512
    assert flops_per_token(gla, 2048) == 3 * (2 * matmul_weights(gla) + state)
    assert flops_per_token(gla, 2048) == flops_per_token(gla, 65536)
    window = llama.replace(sliding_window=64)
    keys = np.mean(np.minimum(np.arange(4096) + 1, 64))  # what a query sees, counted
    want = 3 * (2 * weights + layers * 4 * 32 * 64 * keys)
    assert flops_per_token(window, 4096) == pytest.approx(want, rel=1e-3)
