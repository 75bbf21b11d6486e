"""Schemes mxfp4, nvfp4 and fp8-block of whole models: rounding, methods, files, offloading."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import save as packed
from jaxllama.quantization.gptq import gptq
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import random_params
from jaxllama.quantization.rounding import nearest
from jaxllama.quantization.scheme import parse, round_weight
from pallas_kernels.qtensor import QTensor
from tests.helpers.cases import slow
from tests.helpers.models import LLAMA, relative_error
from tests.helpers.packed_oracle import floats_of
from tests.helpers.seeded import seeded_params

FORMATS = ("mxfp4", "nvfp4", "fp8-block")
CODES = {"mxfp4": "float4_e2m1fn", "nvfp4": "float4_e2m1fn", "fp8-block": "float8_e4m3fn"}
CFG = LLAMA.replace(d_model=64, d_ff=96, n_layers=1, layer_types=(), tie_embeddings=True)


@pytest.fixture(scope="module")
def mixed() -> dict:
    """A model with a weight of each format."""
    params = jax.device_put(seeded_params(CFG))
    return quantize_params(params, "mxfp4,down=nvfp4,o=fp8-block,embed=mxfp4")


def test_a_recipe_names_the_formats(mixed) -> None:
    layer = mixed["layer_0"]
    for leaf, name, group in (
        (layer["mixer"]["qkv"], "mxfp4", 32),
        (layer["mlp"]["down"], "nvfp4", 16),
        (layer["mixer"]["o"], "fp8-block", 32),
    ):
        weight = leaf["weight"]
        assert (weight.dtype.name, weight.group_size) == (CODES[name], group)
    tokens, lengths = np.asarray([[5, 6, 7]]), np.asarray([3])
    plain = jax.tree.map(floats_of, mixed, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    want = jl.logits(CFG, plain, tokens, lengths)
    assert relative_error(jl.logits(CFG, mixed, tokens, lengths), want) < 1e-5  # float32 sums


def test_a_native_checkpoint_holds_every_bit(mixed, tmp_path) -> None:
    out = packed.save(tmp_path / "out", CFG, jax.device_get(mixed), format="native")
    _, got = hf.load(out)
    for a, b in zip(jax.tree.leaves(mixed), jax.tree.leaves(got), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("name", ["nvfp4", *slow("mxfp4", "fp8-block")])
def test_gptq_keeps_the_format_s_scales(name) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((144, 128)).astype(np.float32)
    x = rng.standard_normal((512, 128)) @ (np.eye(128) + 0.3 * rng.standard_normal((128, 128)))
    hessian = (x.T @ x).astype(np.float32)
    grid = (name, {"mxfp4": 32, "nvfp4": 16, "fp8-block": 128}[name], False)
    plain = nearest(w, 1.0, grid=grid, scale_dtype="float32")
    got = gptq(jnp.asarray(w), jnp.asarray(hessian), 1.0, grid=grid)
    assert got.dtype == plain.dtype
    np.testing.assert_array_equal(np.asarray(got.scale), np.asarray(plain.scale))
    cost = [np.sum(((floats_of(t) - w) @ x.T) ** 2) for t in (got, plain)]
    assert cost[0] < 0.8 * cost[1]


@pytest.mark.slow
def test_random_codes_have_the_deviation_of_random_floats() -> None:
    for name in FORMATS:
        params = jax.eval_shape(lambda n=name: quantize_params(seeded_params(CFG), n))
        got = random_params(CFG, jax.random.key(0), jnp.float32, name)
        assert jax.tree.structure(got) == jax.tree.structure(params)
        std = np.std(floats_of(got["layer_0"]["mlp"]["gate_up"]["weight"]))
        # The scale of MXFP4 is a power of two.
        assert 0.7 < std / 0.02 < 1.45


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mxfp4-g64", "mxfp4 fixes its groups"),
        ("nvfp4-sym", "nvfp4 fixes its groups"),
        ("mxfp5", "is not one of .*, mxfp4, nvfp4, fp8-block, fp8-block-a8, none"),
    ],
)
def test_a_format_takes_no_options(text, words) -> None:
    with pytest.raises(jl.JaxLlamaError, match=words):
        parse(text)


def test_blocks_of_fp8_beside_fp8_activations(tmp_path) -> None:
    """Codes are fp8-block's.  Own files keep the activations' dtype; other files' regain it."""
    cfg = CFG.replace(d_model=256, d_ff=256)
    params = seeded_params(cfg)
    plain, rounded = (quantize_params(params, name) for name in ("fp8-block", "fp8-block-a8"))
    weight = rounded["layer_0"]["mlp"]["down"]["weight"]
    assert weight.activations == "float8_e4m3fn" and weight.scale.shape[1] == 2
    assert weight.has_blocks and rounded["layer_0"]["mlp"]["gate_up"]["weight"].has_blocks
    rows = np.arange(24, dtype=np.int32).reshape(2, 12), np.asarray([12, 12])
    of_floats, want, got = (np.asarray(jl.logits(cfg, p, *rows)) for p in (params, plain, rounded))
    change = np.std(got - want) / np.std(of_floats)
    assert 0 < change < 0.05  # a code of e4m3 is off by 2^-4 of itself at most, 0.02 on average

    saved = packed.save(tmp_path / "own", cfg, jax.device_get(rounded))
    assert jax.tree.structure(hf.load(saved)[1]) == jax.tree.structure(rounded)
    named = "fp8-block-a8,head=none,qkv=none,o=none"
    rounded = jax.device_get(quantize_params(params, named))
    saved = packed.save(tmp_path / "fp8", cfg, rounded, format="fp8")
    read = quantize_params(hf.load(saved)[1], named)
    assert jax.tree.structure(read) == jax.tree.structure(rounded)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(read), rounded)


def test_experts_have_activations_of_fp8_alone() -> None:
    experts = jnp.ones((2, 8, 128))
    for text in ("fp8-block-a8", "fp8"):
        recipe = parse(text)
        rounded = round_weight(experts, recipe.of("layer_0/mlp/experts_down"), "experts_down")
        assert rounded.activations == "float8_e4m3fn" and rounded.shape == experts.shape
    with pytest.raises(jl.JaxLlamaError, match="experts read activations in floats or FP8"):
        round_weight(experts, parse("w8a8").of("layer_0/mlp/experts_down"), "experts_down")


def test_a_weight_that_groups_do_not_divide_is_named() -> None:
    with pytest.raises(jl.JaxLlamaError, match="mlp/down: mxfp4: groups of 32 do not divide"):
        quantize_params(seeded_params(CFG.replace(d_ff=48)), "mxfp4")
