"""A mixer in a folder of its own does what the others do, with no other file knowing of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers import MIXERS
from jaxllama.model.params import param_table
from jaxllama.model.records import whole_rows
from jaxllama.model.split import local_config, natural_rows, row_order, split_axis
from jaxllama.quantization.sites import fold, sites
from pallas_kernels.operands import Columns
from tests.helpers.arrays import as_jax
from tests.helpers.engine_cases import every_way_generates
from tests.helpers.models import LLAMA, check_prompt_steps_and_a_draft, params_of

CFG = LLAMA.replace(
    n_layers=2, layer_types=("short_conv", "attention"), mixers={"short_conv": {"width": 48}}
)
ROWS, WIDTH = 2, 9


@functools.cache
def model() -> tuple[jl.LanguageModel, np.ndarray, np.ndarray]:
    """(the model, tokens, teacher-forced logits)."""
    params = params_of(CFG)
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, (ROWS, WIDTH), np.int32)
    lm = jl.LanguageModel(CFG, params, None)
    return lm, tokens, np.asarray(lm.logits(tokens, np.full(ROWS, WIDTH, np.int32)))


def reference(p: dict, x: np.ndarray) -> np.ndarray:
    """The mixer in float64, of the normed input ``[T, D]``, without the output product."""
    b, c, u = np.split(x @ np.asarray(p["bcx"]["weight"], np.float64).T, 3, axis=-1)
    taps = np.asarray(p["conv"]["weight"], np.float64)
    read = np.pad(b * u, ((taps.shape[1] - 1, 0), (0, 0)))
    made = [(read[t : t + taps.shape[1]] * taps.T).sum(axis=0) for t in range(len(x))]
    return c * np.stack(made)


@pytest.mark.core
def test_the_mixer_is_the_formula():
    lm, _, _ = model()
    p = lm.params["layer_0"]["mixer"]
    x = np.random.default_rng(1).standard_normal((1, WIDTH, CFG.d_model))
    made = as_jax(x @ np.asarray(p["bcx"]["weight"], np.float64).T, jnp.float32)
    at = whole_rows(CFG, 1, WIDTH)

    @jax.jit
    def mixed(p, made):
        return MIXERS["short_conv"].mix.mix(CFG.layers[0], p, [Columns.whole(made)], None, at)

    got, state = mixed(p, made)
    assert state is None
    np.testing.assert_allclose(got[0], reference(p, x[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.core
def test_prompt_and_steps_are_the_whole_sequence():
    check_prompt_steps_and_a_draft(*model())


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_engine_drafts_and_offloading_give_generates_answers():
    every_way_generates(*model()[:2])


def test_quantization_leaves_little_error():
    """Its products are quantized as others are, and a scale per channel folds away."""
    lm, tokens, want = model()
    params = jl.quantize_params(lm.params, "w8a16")
    got = jl.LanguageModel(CFG, params, None).logits(tokens, np.full(ROWS, WIDTH, np.int32))
    assert np.sqrt(np.mean((np.asarray(got) - want) ** 2)) < 0.02 * np.std(want)
    layer = lm.params["layer_0"]
    scales = {
        site.name: np.linspace(0.5, 2.0, site.n_channels, dtype=np.float32)
        for site in sites(CFG.layers[0])
    }
    folded = jax.jit(functools.partial(fold, CFG.layers[0]))(layer, scales)
    folded = {**lm.params, "layer_0": folded}
    got = jl.LanguageModel(CFG, folded, None).logits(tokens, np.full(ROWS, WIDTH, np.int32))
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_shard_is_a_smaller_model():
    local = param_table(local_config(CFG, 2))
    table = {path: param for path, param in param_table(CFG).items() if "mixer" in path}
    for path, param in table.items():
        order, axis = row_order(CFG, path, 2), split_axis(path)
        shape = list(param.shape)
        if axis is not None:
            shape[axis] //= 2
        assert local[path].shape == tuple(shape), path
        if order is not None and path[-2] == "bcx":
            np.testing.assert_array_equal(order[:24], np.arange(24))
            np.testing.assert_array_equal(order[24:48], 48 + np.arange(24))
            np.testing.assert_array_equal(order[natural_rows(order)], np.arange(144))


def test_config():
    assert ModelConfig.of(**CFG.to_dict()) == CFG
    with pytest.raises(JaxLlamaError, match="mixers.short_conv.tabs"):
        param_table(CFG.replace(mixers={"short_conv": {"width": 48, "tabs": 3}}))
    with pytest.raises(JaxLlamaError, match="missing key 'mixers.short_conv.width'"):
        param_table(CFG.replace(mixers={"short_conv": {}}))
