"""Packed checkpoints in other programs: the compressed-tensors library and transformers.

They run under ``slow``; by default their logits come from ``golden/packed.npz``.  AutoAWQ's and
GPTQ's own readers need a GPU or a build; their formats are held against ``packed_oracle`` (and
were, once, against GPTQModel 7.7's CPU kernels: equal bit for bit).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.save import flatten
from jaxllama.checkpoints.packed import save as packed
from tests.helpers import packed_oracle as oracle
from tests.helpers.models import relative_error, tokens_of
from tests.helpers.packed_cases import CFG, IMPORTS, quantized, words_of, write_case

pytestmark = pytest.mark.filterwarnings("ignore")
GOLDEN = Path(__file__).parents[1] / "golden" / "packed.npz"
LOGITS = ("packed", "int8-static", "fp8-channel-tokens", "fp8-blocks", "mix")


def directory(folder: Path, case: str) -> Path:
    """A case's directory; "mix" is 8-bit rows and FP8 beside 4-bit groups, as we export them."""
    if case != "mix":
        return write_case(folder, case)[0]
    kinds = {"down": ("int8", None), "o": ("float8_e4m3fn", None)}
    params = quantized(
        CFG, lambda path, w: words_of(w.shape, *kinds.get(path[-2], ("int4", 16)), scale=np.float32)
    )
    return packed.save(folder, CFG, params, format="compressed-tensors")


def transformers_logits(directory: Path) -> np.ndarray:
    """float32 ``[2, 9, V]`` of what transformers makes of a directory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens_of(CFG, 2, 9)))).logits.numpy()


def our_logits(directory: Path) -> np.ndarray:
    lm = jl.load(directory, exact=True)
    return np.asarray(lm.logits(tokens_of(CFG, 2, 9), [9, 9]))


@pytest.mark.core
@pytest.mark.parametrize("case", LOGITS)
def test_transformers_gives_the_same_logits(tmp_path: Path, case: str) -> None:
    """With activations in words too; sums are float32 in both, in another order.  FP8 blocks are
    dequantized on the CPU, and there activations stay in floats."""
    with np.load(GOLDEN) as golden:
        assert relative_error(our_logits(directory(tmp_path / "m", case)), golden[case]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", LOGITS)
def test_the_golden_logits_are_transformers_own(tmp_path: Path, case: str) -> None:
    """Of the directory, and of what we export of it."""
    folders = [directory(tmp_path / "m", case)]
    if case != "fp8-blocks":
        loaded = hf.load(folders[0])
        folders.append(packed.save(tmp_path / "o", *loaded, format="compressed-tensors"))
    with np.load(GOLDEN) as golden:
        for folder in folders:
            assert relative_error(transformers_logits(folder), golden[case]) < 1e-6


# The library no longer reads act-order, and never an old file's unpacked zeros.
READ = [
    case
    for case, (_, options, _, _) in IMPORTS.items()
    if options["quant_method"] == "compressed-tensors" and "order" not in case and "old" not in case
] + ["awq", "gptq-symmetric", "gptq-8bit"]


@pytest.mark.slow
@pytest.mark.parametrize("case", READ)
def test_compressed_tensors_reads_the_same_weights(tmp_path: Path, case: str) -> None:
    """Its own decompressor, on what we read and on what we write."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder, weights = write_case(tmp_path / "m", case)
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
                group
                for group in parsed.config_groups.values()
                if group.targets == ["Linear"] or prefix[:-1] in group.targets
            )
            compressor = BaseCompressor.get_value_from_registry(scheme.format or parsed.format)
            state = {
                key.removeprefix(prefix): _torch(value)
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            # In float32, so that its product of words and scales rounds no more than ours.
            if case not in ("mxfp4", "nvfp4"):
                state["weight_scale"] = state["weight_scale"].to(torch.float32)
            got = compressor.decompress(state, scheme)["weight"].to(torch.float32).numpy()
            want = weights[f"{prefix}weight"]
            # Its float4 values are bfloat16; NVFP4's scale is divided there, not multiplied.
            error = 2.0**-8 if case == "nvfp4" else 0
            np.testing.assert_allclose(got, want, rtol=error)


def _torch(value: np.ndarray) -> Any:
    import torch

    for name, dtype in (("bfloat16", torch.bfloat16), ("float8_e4m3fn", torch.float8_e4m3fn)):
        if value.dtype == getattr(ml_dtypes, name):
            raw = value.view(f"u{value.dtype.itemsize}").copy()
            return torch.from_numpy(raw).view(dtype)
    return torch.from_numpy(value)


SAVED = [("int4", format) for format in (None, "native", "floats", "compressed-tensors")]
SAVED += [("int8", format) for format in (None, "floats", "compressed-tensors")]


def saved(folder: Path, words: str, format: str | None) -> tuple[dict[str, Any], Path]:
    """(the parameters of a model, the directory that ``LanguageModel.save`` wrote of it)."""
    group, zeros = (16, True) if words == "int4" else (None, False)
    params = quantized(
        CFG, lambda path, w: words_of(w.shape, words, group, zeros=zeros, scale=np.float32)
    )
    return params, jl.LanguageModel(CFG, params, None, exact=True).save(folder, format=format)


@pytest.mark.parametrize(("words", "format"), SAVED)
def test_a_saved_model_is_the_same(tmp_path: Path, words: str, format: str | None) -> None:
    """No program may make a model of random weights of a directory that ``save`` wrote: where the
    file has names of our own, there is no model.safetensors."""
    params, out = saved(tmp_path / "out", words, format)
    got, want = flatten(jl.load(out, "float32", exact=True).params), flatten(params)
    assert got.keys() == want.keys()
    for path, leaf in want.items():
        np.testing.assert_array_equal(oracle.floats_of(got[path]), oracle.floats_of(leaf))
    is_common = format in ("floats", "compressed-tensors")
    assert (out / "model.safetensors").exists() == is_common


@pytest.mark.slow
@pytest.mark.parametrize(("words", "format"), SAVED)
def test_transformers_reads_a_saved_model_or_refuses_it(
    tmp_path: Path, words: str, format: str | None
) -> None:
    _, out = saved(tmp_path / "out", words, format)
    if (out / "model.safetensors").exists():
        assert relative_error(our_logits(out), transformers_logits(out)) < 1e-5
    else:
        with pytest.raises(OSError, match="no file named model.safetensors"):
            transformers_logits(out)
