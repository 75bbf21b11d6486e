"""gpt-oss's own files: experts in MXFP4 blocks, beside transformers' reading of them."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import save as packed
from jaxllama.errors import JaxLlamaError
from jaxllama.loading import stored_scheme
from pallas_kernels.qtensor import QTensor, dequantize
from tests.helpers.parity_cases import CASES, _family
from tests.helpers.seeded import seeded_params

OPTIONS = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
}
CFG = _family("gpt_oss", "", **OPTIONS)
# The values of the sixteen codes (OCP Microscaling specification, table 5).
VALUES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
EXPERTS = ("experts_gate_up", "experts_down")


def quantized():
    """Parameters whose experts are MXFP4."""
    params = seeded_params(CFG)
    for layer in (params["layer_0"], params["layer_1"]):
        for name in EXPERTS:
            own = layer["mlp"][name]
            own["weight"] = jax.tree.map(
                np.asarray,
                jl.quantize_params({"experts_gate_up": {"weight": own["weight"]}}, "mxfp4"),
            )["experts_gate_up"]["weight"]
    return params


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    params = quantized()
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    return params, packed.save(folder, CFG, params, format="mxfp4")


def test_blocks_are_read_and_written_bit_for_bit(saved):
    """And mean what the file's format says: two codes a byte, a power of two for 32 of them, gate
    and up in turns."""
    params, path = saved
    cfg, read = hf.load(path)
    assert cfg.replace(name=CFG.name) == CFG
    jax.tree.map(np.testing.assert_array_equal, read, params)
    assert stored_scheme(path) == "none,experts_gate_up=mxfp4,experts_down=mxfp4"
    with contextlib.ExitStack() as stack:
        files = hf.open_tensors(path, stack)
        name = "model.layers.1.mlp.experts.gate_up_proj"
        blocks, scales = (files[f"{name}_{x}"][0].read(f"{name}_{x}") for x in ("blocks", "scales"))
    assert blocks.shape == (4, 64, 2, 16) and scales.shape == (4, 64, 2)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    want = VALUES[codes] * 2.0 ** (scales[..., None].astype(np.float32) - 127)
    own = read["layer_1"]["mlp"]["experts_gate_up"]["weight"]
    assert isinstance(own, QTensor)
    want = want.reshape(4, 32, 2, 64).swapaxes(1, 2).reshape(4, 64, 64)
    np.testing.assert_array_equal(dequantize(jax.tree.map(jnp.asarray, own)), want)


@pytest.mark.slow
def test_the_model_of_the_codes_is_the_model_of_their_floats(saved):
    """The worst logit is within 1e-4 of the largest: the codes' floats are exact."""
    params, _ = saved
    params = jax.tree.map(jnp.asarray, params)
    plain = packed.in_floats(params, jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 20))
    lengths = np.full(2, 20, np.int32)
    got, want = (np.asarray(jl.logits(CFG, p, tokens, lengths)) for p in (params, plain))
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()


def test_what_cannot_be_read_or_written_is_named(saved, tmp_path):
    params, path = saved
    with pytest.raises(JaxLlamaError, match="gpt_oss's own"):
        packed.check(CASES["mixtral"], seeded_params(CASES["mixtral"]), "mxfp4")
    with pytest.raises(JaxLlamaError, match=r"experts_gate_up/weight: .*experts_\*=mxfp4"):
        packed.check(CFG, seeded_params(CFG), "mxfp4")
    file = path / "model.safetensors"
    broken = tmp_path / "broken"
    broken.mkdir()
    for one in path.iterdir():
        (broken / one.name).write_bytes(one.read_bytes())
    raw = file.read_bytes().replace(b"gate_up_proj_scales", b"gate_up_proj_scalez", 1)
    (broken / file.name).write_bytes(raw)
    with pytest.raises(JaxLlamaError, match="gate_up_proj_scales"):
        hf.load(broken)


@pytest.mark.slow
def test_transformers_reads_the_same_model(saved):
    """Live, dequantized to float32: the worst logit is within 1e-4 of the largest."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params, path = saved
    how = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=how
    )
    tokens = np.random.default_rng(0).integers(0, 64, (2, 20))
    with torch.no_grad():
        want = model(torch.from_numpy(tokens)).logits.float().numpy()
    plain = packed.in_floats(jax.tree.map(jnp.asarray, params), jnp.float32)
    got = np.asarray(jl.logits(CFG, plain, tokens, np.full(2, 20, np.int32)))
    assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
