"""GGUF files that jaxllama writes: config, weights, codes and tokenizer come back as they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.gguf import blocks, k_quants
from jaxllama.checkpoints.gguf.codes import to_floats
from jaxllama.checkpoints.gguf.config import read_config
from jaxllama.checkpoints.gguf.file import GGUFFile
from jaxllama.checkpoints.gguf.load import load_params
from jaxllama.checkpoints.gguf.save import TYPES, save
from jaxllama.checkpoints.gguf.types import TensorType as Type
from jaxllama.cli.convert import TYPES as WORDS
from jaxllama.cli.main import main
from jaxllama.errors import JaxLlamaError, WeightWarning
from pallas_kernels.qtensor import QTensor, RowBlocks
from tests.checkpoints.test_gguf import Tiny
from tests.checkpoints.test_gguf_families import NAMES, case
from tests.helpers.seeded import seeded_params

HYBRIDS = ("lfm2", "lfm2_moe")
# llama.cpp's own bytes (ggml_quantize_chunk of llama-cpp-python 0.3.36) of ``_wave``.
LLAMA_CPP: dict[str, str] = {}


def _wave(columns: int = 256) -> np.ndarray:
    """A row of values that any machine computes alike."""
    index = np.arange(columns)
    return ((index * 37 % 101 - 50) / 64 * (1 + index % 7)).astype(np.float32)[None]


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QTensor | RowBlocks)


@pytest.mark.core
@pytest.mark.parametrize("name", [name for name in NAMES if name not in HYBRIDS])
def test_a_file_of_every_family_has_the_same_config_and_weights(name: str, tmp_path: Path) -> None:
    """Weights are equal to the bit, or to one rounding where the family has a multiplier."""
    cfg = case(name)
    params = seeded_params(cfg, 3)
    path = save(tmp_path / "m.gguf", cfg, params)
    found = read_config(path)  # ``save`` compares the configs
    assert found.n_layers == cfg.n_layers and found.stored.family == cfg.stored.family
    got = load_params(path, found, np.float32)
    rtol = 0 if cfg.stored.residual == 1 else 2e-7
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=0), got, params)


# How codes are kept: dtype, columns of a group (0: a whole row), dtype of zeros.
KEPT = {
    Type.Q4_0: ("int4", 32, None),
    Type.Q4_1: ("int4", 64, "int8"),
    Type.Q8_0: ("int8", 0, None),
    Type.MXFP4: ("float4_e2m1fn", 32, None),
}


def _coded(shape: tuple[int, ...], kind: Type, rng: np.random.Generator) -> QTensor:
    """Random codes that a GGUF type holds."""
    dtype, group, zeros = KEPT[kind]
    groups = (*shape[:-1], shape[-1] // group if group and shape[-1] % group == 0 else 1)
    if kind == Type.MXFP4:
        groups = (*shape[:-1], shape[-1] // 32)
        words = rng.integers(0, 16, shape, np.uint8).view(jnp.dtype(dtype))
        return QTensor(words, rng.integers(118, 126, groups, np.uint8).view("float8_e8m0fnu"))
    least, most = (-8, 8) if dtype == "int4" else (-127, 128)
    q = rng.integers(least, most, shape).astype(jnp.dtype(dtype))
    scale = (rng.integers(64, 128, groups) / 2**12).astype(np.float32)  # exact products with zeros
    zero = None if zeros is None else rng.integers(-8, 8, groups).astype(zeros)
    return QTensor(q, scale, zero)


def _with_codes(params: Any, kind: Type) -> Any:
    """The tree with codes in place of every matrix of 32, 64, ... columns, but the routers."""
    rng = np.random.default_rng(0)

    def coded(path: Any, leaf: np.ndarray) -> Any:
        *_, room, name = (entry.key for entry in path)
        is_kept = name == "weight" and leaf.ndim > 1 and leaf.shape[-1] % 32 == 0
        return _coded(leaf.shape, kind, rng) if is_kept and room != "router" else leaf

    return jax.tree_util.tree_map_with_path(coded, params)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-bias", "gemma3_text", "gpt_oss", "phi3"])
def test_codes_stay_bit_for_bit(name: str, kind: Type, tmp_path: Path) -> None:
    """Of dense layers and experts, whose gate and up are apart in a file; groups of 64 repeat."""
    cfg = case(name)
    cfg = cfg if cfg.experts else cfg.replace(d_ff=64)
    wanted = _with_codes(seeded_params(cfg, 3), kind)
    path = save(tmp_path / "m.gguf", cfg, wanted)
    with GGUFFile(path) as file:
        assert {kind} == {tensor.type for tensor in file.tensors.values()} - {Type.F32}
        got = load_params(file, read_config(file), np.float32, keep_quantized=True)

    def same(want: Any, back: Any) -> None:
        if not isinstance(want, QTensor):
            np.testing.assert_array_equal(back, want)
            return
        assert isinstance(back, QTensor)
        np.testing.assert_array_equal(back.q.view(np.int8), want.q.view(np.int8))
        repeats = want.q.shape[-1] // 32 // want.scale.shape[-1]
        np.testing.assert_array_equal(back.scale, np.repeat(want.scale, repeats, -1))
        if want.zero is not None:  # a file has the minimum
            minimum = -(want.zero.astype(np.float32) * want.scale)
            np.testing.assert_array_equal(back.zero, np.repeat(minimum, repeats, -1))

    jax.tree.map(same, wanted, got, is_leaf=_is_quantized)


def test_parts_of_a_fused_weight_may_differ(tmp_path: Path) -> None:
    """v in floats and q, k in two types: each tensor has its own."""
    cfg, rng = case("llama-gqa"), np.random.default_rng(1)
    params = seeded_params(cfg, 3)
    qkv = params["layer_0"]["mixer"]["qkv"]
    q, k = _coded((32, 32), Type.Q4_0, rng), _coded((16, 32), Type.Q8_0, rng)
    qkv["weight"] = RowBlocks((q, k, qkv["weight"][48:]))
    path = save(tmp_path / "m.gguf", cfg, params)
    with GGUFFile(path) as file:
        kinds = [file.tensors[f"blk.0.attn_{part}.weight"].type for part in "qkv"]
        assert kinds == [Type.Q4_0, Type.Q8_0, Type.F32]
        back = load_params(file, cfg, np.float32, keep_quantized=True)
    for want, found in zip(
        qkv["weight"].blocks, back["layer_0"]["mixer"]["qkv"]["weight"].blocks, strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, _floats(found), _floats(want))


def _floats(w: Any) -> np.ndarray:
    if not isinstance(w, QTensor):
        return np.asarray(w)
    return np.asarray(w.q, np.float32) * np.repeat(w.scale, w.q.shape[1] // w.scale.shape[1], 1)


# Root mean square of the error relative to the values', of normally distributed ones.
ERRORS = {
    **{"f32": 0, "f16": 2.5e-4, "bf16": 2e-3, "q8_0": 6e-3, "q6_k": 0.019, "q5_k": 0.037},
    **{"q5_1": 0.04, "q5_0": 0.045, "q4_k": 0.073, "q4_1": 0.08, "q4_0": 0.09, "mxfp4": 0.13},
}


@pytest.mark.parametrize("word", TYPES)
def test_floats_are_rounded_to_a_type(word: str) -> None:
    """And the reader's words and the ``gguf`` package's values of the bytes are near them."""
    rows = np.random.default_rng(0).standard_normal((8, 512)).astype(np.float32)
    rows[3] = 0
    kind = TYPES[word]
    raw = blocks.of_floats(rows, kind)
    got = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(int(kind)))
    np.testing.assert_array_equal(np.asarray(to_floats(raw, kind), np.float32), got)
    error = np.sqrt(np.mean((got - rows) ** 2) / np.mean(rows**2))
    assert 0.8 * ERRORS[word] <= error <= ERRORS[word]
    assert not got[3].any()
    assert set(WORDS) == set(TYPES) == set(ERRORS)


@pytest.mark.parametrize("kind", k_quants.KINDS, ids=lambda kind: kind.name)
def test_blocks_are_those_of_llama_cpp(kind: Type) -> None:
    assert k_quants.quantize(_wave(), kind).tobytes().hex() == LLAMA_CPP[kind.name]


@pytest.mark.parametrize(
    ("kind", "columns", "found"),
    [
        (Type.Q4_K, 512, Type.Q4_K),
        (Type.Q4_K, 576, Type.Q5_0),
        (Type.Q6_K, 576, Type.Q8_0),
        (Type.Q4_0, 48, Type.F16),
        (Type.Q6_K, 48, Type.F16),
        (Type.BF16, 47, Type.BF16),
    ],
)
def test_rows_that_are_not_whole_blocks_take_a_simpler_type(
    kind: Type, columns: int, found: Type
) -> None:
    assert blocks.kind_for(kind, columns) == found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"activations": "int8"}, "it has no int8 activations"),
        ({"columns": np.arange(32)[::-1]}, "it has no act-order"),
        ({"scale": np.ones((32, 2), np.float32)}, "it has no groups of 16 columns"),
        ({"q": np.zeros((32, 32), "float8_e4m3fn")}, "it has no float8_e4m3fn codes"),
        ({"q": np.zeros((32, 32), np.int8), "zero": np.zeros((32, 1))}, "it has no zeros beside"),
        ({"scale": np.full((32, 1), 1e6, np.float32)}, "a scale is not finite in float16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_weight_that_no_type_holds_is_refused_by_name(
    change: Any, why: str, tmp_path: Path
) -> None:
    cfg = case("llama-gqa")
    params = seeded_params(cfg, 3)
    weight = _coded((32, 32), Type.Q4_0, np.random.default_rng(0))
    params["layer_0"]["mixer"]["o"]["weight"] = dataclasses.replace(weight, **change)
    with pytest.raises(JaxLlamaError, match=f"blk.0.attn_output.weight: {why}") as caught:
        save(tmp_path / "m.gguf", cfg, params)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope": jl.RopeConfig(1e4, "dynamic", 4.0, 32)}, "cannot state rope"),
        ({"layers": "gla"}, "is not written"),
        ({"activation": "gelu_tanh"}, "activation"),
    ],
)
def test_a_model_that_the_keys_cannot_state_is_refused(
    changes: Any, why: str, tmp_path: Path
) -> None:
    name = {"layers": "lfm2"}.get(next(iter(changes)), "llama-gqa")
    cfg = case(name) if name == "lfm2" else case(name).replace(**changes)
    with pytest.raises(JaxLlamaError, match=why):
        save(tmp_path / "m.gguf", cfg, seeded_params(cfg, 3))
    assert not list(tmp_path.iterdir())


def test_scales_that_float16_rounds_are_told(tmp_path: Path) -> None:
    cfg = case("llama-gqa")
    params = seeded_params(cfg, 3)
    weight = _coded((32, 32), Type.Q4_0, np.random.default_rng(0))
    weight = dataclasses.replace(weight, scale=weight.scale * np.float32(1.0001))
    params["layer_0"]["mixer"]["o"]["weight"] = weight
    with pytest.warns(WeightWarning, match="rounds scales or minima of 1 of"):
        path = save(tmp_path / "m.gguf", cfg, params)
    back = load_params(path, cfg, np.float32, keep_quantized=True)["layer_0"]["mixer"]["o"]
    np.testing.assert_array_equal(back["weight"].q.view(np.int8), weight.q.view(np.int8))
    np.testing.assert_allclose(back["weight"].scale, weight.scale, rtol=2**-11)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_file_is_written_again_with_its_tokenizer(model: str, tmp_path: Path, capsys) -> None:
    """``convert`` keeps a file's codes, tokens, types, merges, edges and template."""
    source, out = tmp_path / "tiny.gguf", tmp_path / "again.gguf"
    keys = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    kind = {"arch": "qwen2", "bias": True} if model == "gpt2" else {}
    Tiny(vocab=270, type=Type.Q8_0, tokenizer=model, keys=keys, **kind).write(source)
    words = ["convert", "--model", str(source), "--out", str(out), "--format", "gguf", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["files"] == "again.gguf"
    with GGUFFile(source) as before, GGUFFile(out) as after:
        assert before.tensors.keys() == after.tensors.keys()
        for name, tensor in before.tensors.items():
            assert after.tensors[name].type == tensor.type
            np.testing.assert_array_equal(
                after.rows(after.tensors[name]), before.rows(tensor), name
            )
        for key in ("tokens", "merges"):
            if f"tokenizer.ggml.{key}" in before:
                strings = (file.strings(f"tokenizer.ggml.{key}") for file in (before, after))
                assert next(strings) == next(strings)
    ours, theirs = jl.Tokenizer.from_gguf(source), jl.Tokenizer.from_gguf(out)
    for text in ("ab a ab", "  b", "caf\u00e9 \U0001f642", "<s>a</s>b", "", "A1 22\n"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template and ours.eos_ids == theirs.eos_ids
    assert (ours.bos_id, ours.special_tokens) == (theirs.bos_id, theirs.special_tokens)
