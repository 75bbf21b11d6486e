"""GGUF files that jaxllama writes: config, weights, codes and tokenizer come back as they were."""

from __future__ import annotations

import dataclasses
import json
import re
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
from jaxllama.config import RopeConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from pallas_kernels.qtensor import QTensor, RowBlocks
from tests.checkpoints.test_gguf import Tiny
from tests.checkpoints.test_gguf_families import NAMES, case
from tests.helpers.seeded import seeded_params

# Models of the families' tests that llama.cpp does not read, or that are hybrids.
REFUSED = {
    "lfm2": "model_type 'lfm2' is not written; written: llama, qwen2, qwen3",
    "lfm2_moe": "model_type 'lfm2_moe' is not written",
    "cohere-bias": "llama.cpp's 'command-r' has no head apart from the embedding",
    "ernie4_5_moe": "llama.cpp's 'ernie4_5-moe' has no dense layer behind one with experts",
    "seed_oss-bias": "llama.cpp's 'seed_oss' has no o_bias",
    "ernie4_5-bias": "llama.cpp's 'ernie4_5' has no mlp_bias",
    "olmo2-bias-yarn": "llama.cpp's 'olmo2' has no o_bias",
    "cohere2-pattern": "llama.cpp's 'cohere2' has no head apart from the embedding",
    "olmoe": "llama.cpp's 'olmoe' has no kv heads that several query heads share",
}
# llama.cpp's own bytes (ggml_quantize_chunk of llama-cpp-python 0.3.36) of ``_wave``.
LLAMA_CPP = {
    Type.Q4_K: (
        "99216d2df1f6faefebbdf3f3bfe4f77fc52689a2769dd167b90589a0659ce647aaa488af4387d4269ab2"
        "77aff668db852799a477ad2367d40689a2679df657ca7589b04588f5379bb478bf2678f4769b9a85699e"
        "2568c5177a94589e0758c4667aa24788e6387b456aa02779e5677cb4676c92487ac7397d966b90296ac6"
        "697da45a9a085a74587da2498be76a8f466d"
    ),
    Type.Q5_K: (
        "001d942df5fcfef4e9bdf0f28fc5fd3f326c9b724c936248936c9b724c9b624c936edb73689a724c9b66"
        "cc9366d8336e8b5c1244fd3ab1de730a2250ca29cc9e6557015f970fb85d2564ef5ffcdfa70a5d3347ef"
        "4b56dfa90c1354cd3afcaf85ea02608b1ffa6e2677e16f4df0e7fd26462bd33f5bd1ac1ff748b22f0fa1"
        "99cef6548012fd71099bd6604ff3fbd00a88cfe83580f4bf63fb4cc73042d5acd2fb59a53500b509b0eb"
        "657216fee50f8dda"
    ),
    Type.Q6_K: (
        "194c0ada1e3ce3c14c488910284aebf0747caa61dd7e0a22c3a30e21c3cd2f16ab395db35aa290061900"
        "8f65358031d078364b57090bb6f1307a57f66f2553fba49a99c13aae18f162701cf1425dfff5ad695fb4"
        "6a93a3470c009f6655d134116b264c29ea1d69e3315b47b8302747eb40848ecb70d07e0b23d3b51f21c3"
        "dd3f2991b658853b5ce62a91b66885eb5d86a99a75e89225ee52699b45e89e25ac5699aa45d86215ee62"
        "59ab45d8a2159e664aa469d6a14e97b94aa46d16a17a97b1ad6788a65c7899506e90a96180a45776a295"
    ),
}


def _wave(columns: int = 256) -> np.ndarray:
    """A row of values that any machine computes alike."""
    index = np.arange(columns)
    return ((index * 37 % 101 - 50) / 64 * (1 + index % 7)).astype(np.float32)[None]


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QTensor | RowBlocks)


@pytest.mark.core
@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
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
    **{"q5_1": 0.04, "q5_0": 0.045, "q4_k": 0.072, "q4_1": 0.08, "q4_0": 0.09, "mxfp4": 0.13},
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
    assert k_quants.quantize(_wave(), kind).tobytes().hex() == LLAMA_CPP[kind]


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


def test_embedding_and_head_keep_more_bits(tmp_path: Path) -> None:
    """Q6_K, or Q8_0 here, where 256 does not divide the columns."""
    cfg = case("llama-gqa")
    path = save(tmp_path / "m.gguf", cfg, seeded_params(cfg, 3), type="q4_0")
    with GGUFFile(path) as file:
        names = ("token_embd", "output", "blk.0.attn_q")
        kinds = [file.tensors[f"{name}.weight"].type for name in names]
    assert kinds == [Type.Q8_0, Type.Q8_0, Type.Q4_0]


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


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_an_architecture_is_refused(name: str, tmp_path: Path) -> None:
    cfg = case(name)
    with pytest.raises(JaxLlamaError, match=f"^format 'gguf': {re.escape(REFUSED[name])}"):
        save(tmp_path / "m.gguf", cfg, seeded_params(cfg, 3))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("llama-gqa", {"rope": RopeConfig(1e4, "dynamic", 4.0, 32)}, "rope.scaling"),
        ("llama-gqa", {"rope": RopeConfig(1e4, rotary_dim=4)}, "partial_rotary_factor = 0.5"),
        ("qwen3", {"eos_token_ids": (1, 2, 3, 4)}, "a GGUF file names three, not [4]"),
    ],
)
def test_a_value_that_no_key_states_is_refused(
    name: str, changes: Any, why: str, tmp_path: Path
) -> None:
    """Before any weight is written, and nothing stays."""
    cfg = case(name).replace(**changes)
    with pytest.raises(JaxLlamaError, match=re.escape(why)) as caught:
        save(tmp_path / "m.gguf", cfg, seeded_params(cfg, 3))
    assert "\n" not in str(caught.value) and str(tmp_path) not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "type", "why"),
    [
        ("m", None, "writes one file, whose name ends with .gguf"),
        ("there.gguf", None, "already exists; nothing is overwritten"),
        ("m.gguf", "q3_k", "type = 'q3_k': is not one of f32, "),
    ],
)
def test_a_target_is_refused(path: str, type: str | None, why: str, tmp_path: Path) -> None:
    cfg = case("llama-gqa")
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(JaxLlamaError, match=why):
        save(tmp_path / path, cfg, seeded_params(cfg, 3), type=type)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


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
    words = ["convert", "--model", str(source), "--out", str(out), "--json"]
    assert main(words if model == "llama" else [*words, "--format", "gguf"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == "again.gguf"
    if model == "llama":
        again = jl.load(source).save(tmp_path / "saved.gguf")
        assert again.read_bytes() == out.read_bytes(), "the path's end is the format"
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
