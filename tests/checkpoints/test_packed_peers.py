"""Packed checkpoints in other programs: the compressed-tensors library and transformers.

AutoAWQ's and GPTQ's own readers need a GPU or a build; their formats are held against
``packed_oracle`` (and were, once, against GPTQModel 7.7's CPU kernels: equal bit for bit).
"""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.packed import load as packed
from jaxllama.quantization.quantize import quantize_params
from tests.helpers import packed_oracle as oracle
from tests.helpers.models import params_of, relative_error, tokens_of
from tests.helpers.packed_cases import CFG, IMPORTS, quantized, words_of, write

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# The library no longer reads act-order, and never an old file's unpacked zeros.
READ = [case for case, (_, options, _, _) in IMPORTS.items()
        if options["quant_method"] == "compressed-tensors" and "order" not in case
        and "old" not in case] + ["awq", "gptq-symmetric", "gptq-8bit"]  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_compressed_tensors_reads_the_same_weights(tmp_path: Path, case: str) -> None:
    """Its own decompressor, on what we read and on what we write."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder, weights = write(tmp_path / "m", *IMPORTS[case][:3])
    out = packed.save(tmp_path / "out", *hf.load(folder), format="compressed-tensors")
    # It wants groups that divide the inputs, which those of our export do.
    theirs = not case.startswith(("awq", "gptq")) and case != "packed-padded"
    folders = [folder, out] if theirs else [out]
    for directory in folders:
        config = json.loads((directory / "config.json").read_text())["quantization_config"]
        parsed = QuantizationConfig.model_validate(config)
        tensors = oracle.load(directory)
        for name in ("self_attn.v_proj", "mlp.down_proj"):
            prefix = f"model.layers.0.{name}."
            scheme = next(
                group for group in parsed.config_groups.values()
                if group.targets == ["Linear"] or prefix[:-1] in group.targets
            )  # fmt: skip
            compressor = BaseCompressor.get_value_from_registry(scheme.format or parsed.format)
            state = {
                key.removeprefix(prefix): _torch(value)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            # In float32, so that its product of words and scales rounds no more than ours.
            state["weight_scale"] = state["weight_scale"].to(torch.float32)
            got = compressor.decompress(state, scheme)["weight"].to(torch.float32).numpy()
            np.testing.assert_array_equal(got, weights[f"{prefix}weight"])


def _torch(value: np.ndarray) -> torch.Tensor:
    for name, dtype in (("bfloat16", torch.bfloat16), ("float8_e4m3fn", torch.float8_e4m3fn)):
        if value.dtype == getattr(ml_dtypes, name):
            raw = value.view(f"u{value.dtype.itemsize}").copy()
            return torch.from_numpy(raw).view(dtype)
    return torch.from_numpy(value)


@pytest.mark.parametrize("case", ["packed", "int8-static", "fp8-channel-tokens"])
def test_transformers_gives_the_same_logits(tmp_path: Path, case: str) -> None:
    """With activations in words too; sums are float32 in both, in another order."""
    folder, _ = write(tmp_path / "m", *IMPORTS[case][:3])
    for directory in (folder, packed.save(tmp_path / "o", *hf.load(folder),
                                          format="compressed-tensors")):  # fmt: skip
        _compare(directory, 1e-5)


def test_transformers_reads_a_mix(tmp_path: Path) -> None:
    """8-bit rows and FP8 beside 4-bit groups, as an experiment's plan would have them."""
    kinds = {"down": ("int8", None), "o": ("float8_e4m3fn", None)}
    params = quantized(CFG, lambda path, w: words_of(w.shape, *kinds.get(path[-2], ("int4", 16)),
                                                     scale=np.float32))  # fmt: skip
    _compare(packed.save(tmp_path / "out", CFG, params, format="compressed-tensors"), 1e-5)


def test_transformers_reads_fp8_blocks(tmp_path: Path) -> None:
    """It dequantizes them on the CPU, and there activations stay in floats, as ours do."""
    pytest.importorskip("accelerate")
    _compare(write(tmp_path / "m", *IMPORTS["fp8-blocks"][:3])[0], 1e-5)


# transformers 5.23 refuses packed zero points, its own libraries' too: w4a16 has them.
SAVED = [("w4a16-g16", format) for format in (None, "native", "floats")]
SAVED += [("w8a16", format) for format in (None, "floats", "compressed-tensors")]


@pytest.mark.parametrize(("scheme", "format"), SAVED)
def test_a_saved_model_is_the_same_or_refused(tmp_path: Path, scheme: str, format: str) -> None:
    """No program may make a model of random weights of a directory that ``save`` wrote."""
    cfg = CFG.replace(d_ff=48)
    params = quantize_params(params_of(cfg), scheme, cfg=cfg)
    lm = jl.LanguageModel(cfg, params, None, exact=True)
    out = lm.save(tmp_path / "out", format=format)
    if format in ("floats", "compressed-tensors"):
        _compare(out, 1e-5)
    else:
        with pytest.raises(OSError, match="no file named model.safetensors"):
            transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = tokens_of(cfg, 2, 9)
    got = jl.load(out, "float32", exact=True).logits(tokens, [9, 9])
    assert relative_error(got, lm.logits(tokens, [9, 9])) < 1e-5


def _compare(directory: Path, bound: float) -> None:
    pytest.importorskip("compressed_tensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    lm = jl.load(directory, exact=True)
    tokens = tokens_of(lm.config, 2, 9)
    with torch.no_grad():
        want = model(torch.tensor(np.asarray(tokens))).logits.numpy()
    assert relative_error(lm.logits(tokens, [9, 9]), want) < bound
