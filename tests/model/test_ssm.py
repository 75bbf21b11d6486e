"""Mamba-2's mixer against its formula in float64, and the ways to run it against one another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.checkpoints.hf.load import load as hf_load
from jaxllama.checkpoints.hf.save import save as hf_save
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.config import CheckpointForm, ModelConfig, SharedBlocks
from jaxllama.errors import JaxLlamaError
from jaxllama.model.decoder import check, forward
from jaxllama.model.forms import FORMS
from jaxllama.model.linear import Stream
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.ssm.parameters import SSMOptions, options
from jaxllama.model.params import param_table
from jaxllama.model.records import whole_rows
from jaxllama.model.split import check_shards, local_config, natural_rows, row_order, split_axis
from jaxllama.model.stacked import hidden_states, stack_layers
from jaxllama.offload.policy import Policy
from jaxllama.planner import accounting
from jaxllama.quantization import calibration
from pallas_kernels.operands import Columns
from tests.helpers.arrays import as_jax
from tests.helpers.cases import slow
from tests.helpers.engine_cases import every_way_generates
from tests.helpers.models import LLAMA, check_prompt_steps_and_a_draft, params_of
from tests.helpers.parity_cases import CASES
from tests.helpers.seeded import seeded_params

SIZES = {"n_heads": 4, "head_dim": 6, "state": 5, "n_groups": 2, "least_step": 0.3}
CFG = LLAMA.replace(
    n_layers=2, layer_types=("ssm", "attention"), bare_layers=(0,), mixers={"ssm": SIZES}
)
ROWS, WIDTH = 2, 9


@functools.cache
def model() -> tuple[jl.LanguageModel, np.ndarray, np.ndarray]:
    """(the model, tokens, teacher-forced logits)."""
    params = params_of(CFG)
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, (ROWS, WIDTH), np.int32)
    lm = jl.LanguageModel(CFG, params, None)
    return lm, tokens, np.asarray(lm.logits(tokens, np.full(ROWS, WIDTH, np.int32)))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def reference(ssm: SSMOptions, p: dict, x: np.ndarray) -> np.ndarray:
    """The mixer in float64, of the normed input ``[T, D]``, without the output product."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), p)
    z, xbc, dt = np.split(x @ p["zxbcdt"]["weight"].T, [ssm.width, ssm.width + ssm.convolved], -1)
    taps = p["conv"]["weight"]
    read = np.pad(xbc, ((taps.shape[1] - 1, 0), (0, 0)))
    made = [(read[t : t + taps.shape[1]] * taps.T).sum(axis=0) for t in range(len(x))]
    xbc = silu(np.stack(made) + p["conv"]["bias"])
    u, b, c = np.split(xbc, [ssm.width, ssm.width + ssm.n_groups * ssm.state], axis=-1)
    dt = np.clip(np.log1p(np.exp(dt + p["decay"]["dt_bias"])), ssm.least_step, ssm.largest_step)
    y = np.zeros((len(x), ssm.n_heads, ssm.head_dim))
    for head in range(ssm.n_heads):
        group = head // (ssm.n_heads // ssm.n_groups)
        own = slice(group * ssm.state, (group + 1) * ssm.state)
        v = u[:, head * ssm.head_dim : (head + 1) * ssm.head_dim]
        state = np.zeros((ssm.state, ssm.head_dim))
        for t in range(len(x)):
            decay = np.exp(-np.exp(p["decay"]["a_log"][head]) * dt[t, head])
            state = decay * state + np.outer(b[t, own], dt[t, head] * v[t])
            y[t, head] = c[t, own] @ state + p["decay"]["skip"][head] * v[t]
    y = y.reshape(len(x), ssm.n_groups, -1)
    gate = silu(z).reshape(y.shape)
    y = y if ssm.norm == "norm_first" else y * gate
    if ssm.norm != "none":
        y = y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + ssm.norm_eps)
        y = y * p["y_norm"]["weight"].reshape(y.shape[1:])
    y = y * gate if ssm.norm == "norm_first" else y
    return y.reshape(len(x), -1)


@pytest.mark.core
@pytest.mark.parametrize("norm", ["gate_first", *slow("norm_first", "none")])
def test_the_mixer_is_the_formula(norm):
    cfg = CFG.replace(mixers={"ssm": {**SIZES, "norm": norm}})
    p = params_of(cfg)["layer_0"]["mixer"]
    x = np.random.default_rng(1).standard_normal((1, WIDTH, cfg.d_model))
    made = as_jax(x @ np.asarray(p["zxbcdt"]["weight"], np.float64).T, jnp.float32)
    at = whole_rows(cfg, 1, WIDTH)

    @jax.jit
    def mixed(p, made):
        return MIXERS["ssm"].mix.mix(cfg.layers[0], p, [Columns.whole(made)], None, at)

    got, state = mixed(p, made)
    assert state is None
    np.testing.assert_allclose(
        got[0], reference(options(cfg.layers[0]), p, x[0]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.core
def test_prompt_and_steps_are_the_whole_sequence():
    check_prompt_steps_and_a_draft(*model())


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_engine_drafts_and_offloading_give_generates_answers():
    every_way_generates(*model()[:2])


def test_a_shard_is_a_smaller_model():
    local = param_table(local_config(CFG, 2))
    for path, param in param_table(CFG).items():
        if "mixer" not in path or path[0] != "layer_0":
            continue
        order, axis = row_order(CFG, path, 2), split_axis(path)
        shape = list(param.shape)
        if axis is not None:
            shape[axis] //= 2
        assert local[path].shape == tuple(shape), path
        if order is not None and path[-2] == "zxbcdt":
            # z of two heads, x of two, B and C of one group, dt of two heads
            want = [*range(12), *range(24, 36), *range(48, 53), *range(58, 63), 68, 69]
            np.testing.assert_array_equal(order[:36], want)
            np.testing.assert_array_equal(order[natural_rows(order)], np.arange(72))
    with pytest.raises(JaxLlamaError, match="the 2 groups of Mamba-2 heads"):
        check_shards(CFG, 4)


def test_config():
    assert ModelConfig.of(**CFG.to_dict()) == CFG
    with pytest.raises(JaxLlamaError, match=r"mixers.ssm.n_groups = 3: must divide n_heads \(4\)"):
        param_table(CFG.replace(mixers={"ssm": {**SIZES, "n_groups": 3}}))
    with pytest.raises(JaxLlamaError, match="bare_layers"):
        CFG.replace(bare_layers=(2,))
    with pytest.raises(JaxLlamaError, match="gated_mlp"):
        CFG.replace(activation="relu2")


def nemotron(pattern: str) -> ModelConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    config = {"model_type": "nemotron_h", **sizes, "num_key_value_heads": 2}
    config |= {"intermediate_size": 48}
    return config_from_hf({**config, "hybrid_override_pattern": pattern}, "tiny")


def test_nemotron_layers():
    """A feed-forward belongs to the mixer before it."""
    cfg = nemotron("M-M*-")
    assert cfg.layer_types == ("ssm", "ssm", "attention")
    assert cfg.bare_layers == (1,)
    assert nemotron("ME*-").expert_layers == (0,)
    table = tensor_table(cfg)
    assert table["layer_2", "mlp", "up", "weight"].sources[0].name.startswith("backbone.layers.4.")
    for pattern, why in (("-M", "behind"), ("M--", "behind"), ("ME-", "behind"), ("MX", "unknown")):
        with pytest.raises(JaxLlamaError, match=why):
            nemotron(pattern)


# Attention and Mamba-2 side by side, twice (Falcon-H1).
PAIRS = LLAMA.replace(
    n_layers=4,
    layer_types=("attention", "ssm") * 2,
    bare_layers=(0, 2),
    beside_layers=(1, 3),
    mixers={"ssm": SIZES},
)


def test_mixers_side_by_side_read_one_input():
    """The sum of both is what is added, whichever is first."""
    params = params_of(PAIRS)
    assert "mixer_norm" not in params["layer_1"] and "mlp" not in params["layer_0"]
    at, x = whole_rows(PAIRS, 1, WIDTH), np.random.default_rng(2).standard_normal((1, WIDTH, 32))
    stream = Stream(as_jax(x, jnp.float32))
    parts = []

    def mix(layer, p, stream, state, at):
        return FORMS[layer.form.name].mix(layer, p, stream, state, at)

    for index in range(2):
        after, _ = mix(PAIRS.layers[index], params[f"layer_{index}"], stream, None, at)
        parts.append(after.total - stream.total)
        stream = after
    assert stream.handed is None
    alone = PAIRS.replace(n_layers=1, layer_types=("ssm",), bare_layers=(), beside_layers=())
    own = {**params["layer_1"], "mixer_norm": params["layer_0"]["mixer_norm"]}
    want, _ = mix(alone.layers[0], own, Stream(as_jax(x, jnp.float32)), None, at)
    np.testing.assert_allclose(parts[1], want.total - x, atol=1e-5)
    with pytest.raises(JaxLlamaError, match="reads the input of the layer before"):
        mix(PAIRS.layers[1], params["layer_1"], Stream(stream.x), None, at)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_mixers_side_by_side_give_generates_answers():
    lm = jl.LanguageModel(PAIRS, params_of(PAIRS), None)
    every_way_generates(lm, model()[1])


# Three layers that share two blocks of attention, before Mamba-2 (Zamba2).
SHARED = LLAMA.replace(
    n_layers=6,
    head_dim=16,
    n_kv_heads=4,
    layer_types=("attention", "ssm") * 3,
    bare_layers=(1, 3, 5),
    beside_layers=(1, 3, 5),
    shared_blocks=SharedBlocks(count=2, rank=4, attention_adapters=True),
    mixers={"ssm": SIZES},
    tie_embeddings=True,
    stored=CheckpointForm(family="zamba2"),
)


def test_layers_share_blocks_by_turns():
    table = tensor_table(SHARED)
    sources = [table[f"layer_{i}", "mixer", "o", "weight"].sources[0].name for i in (0, 2, 4)]
    assert sources[0] == sources[2] != sources[1]
    adapters = {table[f"layer_{i}", "mlp", "adapter_in", "weight"].sources for i in (0, 2, 4)}
    assert len(adapters) == 3
    with pytest.raises(JaxLlamaError, match="share blocks of weights; allowed: 1"):
        check_shards(SHARED, 2)
    with pytest.raises(JaxLlamaError, match="beside_layers"):
        SHARED.replace(beside_layers=(1, 3))
    with pytest.raises(JaxLlamaError, match="rounded to nearest"):
        calibration.embed(SHARED, {}, np.zeros((1, 4), np.int32))


def test_random_parameters_of_shared_blocks_have_the_tables_shapes():
    """A block's norms are over the stream and the embeddings, side by side."""
    params = jax.eval_shape(lambda key: jl.init_params(SHARED, key), jax.random.key(0))
    check(SHARED, params)
    width = params["layer_0"]["mixer_norm"]["weight"].shape[0]
    assert width == 2 * SHARED.d_model


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_shared_blocks_give_generates_answers():
    lm = jl.LanguageModel(SHARED, params_of(SHARED), None)
    every_way_generates(lm, model()[1])


@pytest.mark.slow
def test_shared_blocks_train_in_a_loop():
    """Stacked layers give the states of single ones."""
    params, tokens = params_of(SHARED), as_jax(model()[1])
    want = hidden_states(SHARED, params, tokens, jnp.float32)
    got = hidden_states(SHARED, stack_layers(SHARED, params), tokens, jnp.float32)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_shared_blocks_are_saved_once(tmp_path):
    """Layers whose values of one tensor differ cannot be saved."""
    own = CASES["zamba2-bias"]
    params = seeded_params(own)
    cfg, again = hf_load(hf_save(tmp_path / "m", own, params))
    assert cfg.replace(name=own.name) == own
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)  # q is multiplied
    jax.tree.map(close, again, params)
    params["layer_3"]["mlp_norm"]["weight"] = params["layer_3"]["mlp_norm"]["weight"] + 1
    with pytest.raises(JaxLlamaError, match="layers that share model.layers.0.shared_transformer"):
        hf_save(tmp_path / "n", own, params)


@pytest.mark.slow
def test_mixers_side_by_side_are_calibrated_as_they_run():
    """The windows' last states are those of the whole model."""
    params, tokens = params_of(PAIRS), model()[1]
    (h,) = calibration.embed(PAIRS, params, tokens)
    for index in range(PAIRS.n_layers):
        (h,) = calibration.advance(PAIRS.layers[index], params[f"layer_{index}"], [h])
    hidden, _ = forward(PAIRS, params, as_jax(tokens), as_jax([WIDTH, WIDTH]))
    np.testing.assert_allclose(h, hidden.x, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", [PAIRS, SHARED], ids=["side-by-side", "shared"])
@pytest.mark.parametrize("halves", ["false", "true"])
def test_the_planner_lowers_layers_with_something_beside_the_stream(cfg, halves):
    policy = Policy.parse(f"0 50 0 50 0 50 sep_layer={halves}")
    sizes = 2, 4, 16  # rows, tokens of a chunk, capacity
    programs = accounting._programs(cfg, policy, *sizes, jnp.float32, jnp.float32, None)
    assert len(list(programs)) >= 5
