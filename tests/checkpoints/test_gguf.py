"""GGUF: configs, parameters and quantized words against the gguf package and transformers, and
damaged files, which are one JaxLlamaError each."""

from __future__ import annotations

import dataclasses
import functools
import struct
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllama.checkpoints import hub
from jaxllama.checkpoints.gguf.file import GGUFFile
from jaxllama.checkpoints.gguf.load import load_params, read_config
from jaxllama.checkpoints.gguf.types import BLOCKS, READABLE
from jaxllama.config import ModelConfig, RopeConfig, load_config
from jaxllama.config.stored import Multipliers
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.cpu import CpuWeight, prepare_tree
from pallas_kernels.qtensor import QTensor, RowBlocks
from tests.helpers.gguf_cases import add_key
from tests.helpers.packed_oracle import floats_of

KEPT = (
    Type.Q8_0,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q4_K,
    Type.Q5_K,
    Type.Q6_K,
    Type.Q2_K,
    Type.Q3_K,
    Type.TQ1_0,
    Type.TQ2_0,
    Type.IQ4_NL,
    Type.IQ4_XS,
    Type.MXFP4,
    Type.IQ1_S,
    Type.IQ1_M,
    Type.IQ2_XXS,
    Type.IQ2_XS,
    Type.IQ2_S,
    Type.IQ3_XXS,
    Type.IQ3_S,
    Type.NVFP4,
)
TYPES = (Type.F32, Type.F16, Type.BF16, *KEPT)
# The types whose file is a Qwen2, whose rows are not permuted; the others' is a Llama.
QWEN2 = (Type.F16, Type.Q4_1, Type.Q5_K, Type.IQ4_NL)
MINIMA = (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K, Type.Q2_K)
INT4 = (Type.Q4_0, Type.Q4_1, Type.Q2_K, Type.Q3_K, Type.TQ1_0, Type.TQ2_0)
GROUPS = {
    Type.Q2_K: 16,
    Type.Q3_K: 16,
    Type.Q6_K: 16,
    Type.TQ1_0: 256,
    Type.TQ2_0: 256,
    Type.IQ1_M: 16,
    Type.IQ2_XS: 16,
    Type.IQ2_S: 16,
    Type.NVFP4: 16,
}
# Where a block of a type that gguf cannot make has its float16 scales; the other bytes may be
# anything, but for the exponent of IQ1_M's scale, which is spread over four words.
SCALES = {
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.IQ1_M: (),
    Type.NVFP4: (),
}
SCALES |= {kind: (0,) for kind in TYPES if kind.name.startswith("IQ") and kind != Type.IQ1_M}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M file; fetched once into the user's cache."""
    try:
        return hub.resolve("smollm2-135m")
    except JaxLlamaError as error:
        pytest.skip(str(error))


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A small model file: 1 layer, 4 query heads, 2 kv heads."""

    arch: str = "llama"
    d: int = 32
    head_dim: int = 8
    f: int = 64
    vocab: int = 20
    type: Type = Type.F32
    tied: bool = True
    bias: bool = False
    types: dict[str, Type] = dataclasses.field(default_factory=dict)
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    tensors: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str = ""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        d, f, q, k = self.d, self.f, 4 * self.head_dim, 2 * self.head_dim
        shapes = {
            "token_embd": (self.vocab, d),
            "blk.0.attn_q": (q, d),
            "blk.0.attn_k": (k, d),
            "blk.0.attn_v": (k, d),
            "blk.0.attn_output": (d, q),
            "blk.0.ffn_gate": (f, d),
            "blk.0.ffn_up": (f, d),
            "blk.0.ffn_down": (d, f),
        }
        return shapes if self.tied else {**shapes, "output": (self.vocab, d)}

    def write(self, path: Path) -> dict[str, np.ndarray]:
        """Write the file; returns every tensor as the gguf package dequantizes it."""
        rng = np.random.default_rng(0)
        writer = gguf.GGUFWriter(path, self.arch)
        numbers = {
            "block_count": 1,
            "context_length": 128,
            "embedding_length": self.d,
            "feed_forward_length": self.f,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.dimension_count": self.head_dim,
        }
        for key, value in numbers.items():
            if f"{self.arch}.{key}" not in self.keys:
                writer.add_uint32(f"{self.arch}.{key}", value)
        writer.add_float32(f"{self.arch}.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_float32(f"{self.arch}.rope.freq_base", 10000.0)
        for key, value in self.keys.items():
            add_key(writer, key, value)
        if self.tokenizer:
            add_tiny_tokenizer(writer, self.tokenizer, self.vocab)
        stored = {}
        for name, shape in self.matrices.items():
            stored[f"{name}.weight"] = (
                self.types.get(name, self.type),
                rng.standard_normal(shape, np.float32),
            )
        for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
            stored[f"{name}.weight"] = (Type.F32, rng.standard_normal(self.d).astype(np.float32))
        if self.bias:
            for name in ("attn_q", "attn_k", "attn_v"):
                rows = self.matrices[f"blk.0.{name}"][0]
                value = rng.standard_normal(rows).astype(np.float32)
                stored[f"blk.0.{name}.bias"] = (Type.F32, value)
        expected = {}
        for name, (kind, value) in stored.items():
            if name in self.tensors:
                value = self.tensors[name]
                if value is None:
                    continue
            raw = pack(value, kind, rng)
            writer.add_tensor(name, raw, raw_dtype=kind)
            expected[name] = gguf.quants.dequantize(raw, kind)
        for name, value in self.tensors.items():
            if name not in stored:
                writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return expected


def pack(value: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    """``value`` in a stored type; random blocks of those that gguf cannot make."""
    if value.dtype == np.uint8 or kind == Type.F32:
        return value
    if kind not in SCALES:
        return gguf.quants.quantize(value, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (value.shape[0], value.shape[1] // block, size), np.uint8)
    for at in SCALES[kind]:
        scales = rng.standard_normal(raw.shape[:2]).astype("<f2")
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    if kind == Type.IQ1_M:
        raw[..., 55] &= 0xBF
    return raw.reshape(value.shape[0], -1)


def sizes_for(kind: Type) -> dict[str, int]:
    """Sizes of a ``Tiny`` whose rows are whole blocks."""
    return {"d": 256, "head_dim": 64, "f": 256} if gguf.GGML_QUANT_SIZES[kind][0] > 32 else {}


def add_tiny_tokenizer(writer: gguf.GGUFWriter, model: str, vocab: int) -> None:
    space = "▁" if model == "llama" else "Ġ"
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", space, f"{space}a"]
    tokens += [f"<0x{byte:02X}>" for byte in range(vocab - len(tokens))]
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1] + [6] * (vocab - 8))
    if model == "llama":
        writer.add_token_scores([-float(index) for index in range(vocab)])
    else:
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges(["a b", f"{space} a"])
        writer.add_add_bos_token(True)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def unpermuted(stored: np.ndarray, heads: int) -> np.ndarray:
    """Row by row: stored (pair i, half h) of a head becomes (half h, pair i)."""
    out = np.empty_like(stored)
    size = len(stored) // heads
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                out[head * size + half * (size // 2) + pair] = stored[head * size + 2 * pair + half]
    return out


def as_tree(expected: dict[str, np.ndarray], permuted: bool) -> dict[str, np.ndarray]:
    """The stored tensors as the leaves of our tree."""
    q, k = expected["blk.0.attn_q.weight"], expected["blk.0.attn_k.weight"]
    if permuted:
        q, k = unpermuted(q, 4), unpermuted(k, 2)
    block = {
        name: expected[f"blk.0.{name}.weight"]
        for name in (
            "attn_norm",
            "attn_v",
            "attn_output",
            "ffn_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
        )
    }
    return {
        "embed": expected["token_embd.weight"],
        "mixer_norm": block["attn_norm"],
        "qkv": np.concatenate([q, k, block["attn_v"]]),
        "o": block["attn_output"],
        "mlp_norm": block["ffn_norm"],
        "gate_up": np.concatenate([block["ffn_gate"], block["ffn_up"]]),
        "down": block["ffn_down"],
        "norm": expected["output_norm.weight"],
    }


def leaves(params: dict[str, Any]) -> dict[str, Any]:
    """Our tree's weights by the name of the room they are in."""
    layer = params["layer_0"]
    rooms = {
        "embed": params["embed"],
        "norm": params["norm"],
        **layer["mixer"],
        **layer["mlp"],
        "mixer_norm": layer["mixer_norm"],
        "mlp_norm": layer["mlp_norm"],
    }
    return {name: room["weight"] for name, room in rooms.items()}


def bits(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32).view(np.uint32)


# Parameters


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[Type, tuple[Path, dict[str, Any]]]:
    """For each type a file with a tokenizer, and its tensors as the gguf package reads them."""
    folder, files = tmp_path_factory.mktemp("originals"), {}
    for kind in TYPES:
        path = folder / f"{kind.name}.gguf"
        options = {"arch": "qwen2", "bias": True, "tokenizer": "gpt2"} if kind in QWEN2 else {}
        tiny = Tiny(**{"type": kind, "tokenizer": "llama", **sizes_for(kind), **options})
        files[kind] = path, tiny.write(path)
    return files


@pytest.mark.core
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_dequantizes_as_gguf_does(kind: Type, originals: Any) -> None:
    """At once, and from the codes that a tree keeps."""
    path, expected = originals[kind]
    want = as_tree(expected, permuted=kind not in QWEN2)
    dense = leaves(load_params(path, read_config(path), np.float32))
    kept = leaves(load_params(path, read_config(path), np.float32, keep_quantized=True))
    assert dense.keys() == kept.keys() == want.keys()
    for name, value in want.items():
        assert dense[name].dtype == np.float32
        np.testing.assert_array_equal(bits(dense[name]), bits(value), err_msg=name)
        leaf = kept[name]
        if name.endswith("norm") or kind not in KEPT:
            np.testing.assert_array_equal(leaf, value)
            continue
        if isinstance(leaf, RowBlocks):  # random minima: a member may need unsigned words
            assert kind == Type.Q4_K
        else:
            assert leaf.group_size == GROUPS.get(kind, 32)
            if kind != Type.Q4_K:
                codes = ml_dtypes.float4_e2m1fn if kind == Type.MXFP4 else np.int8
                assert leaf.q.dtype == (ml_dtypes.int4 if kind in INT4 else codes)
            assert (leaf.zero is not None) == (kind in MINIMA)
        got = floats_of(leaf)
        # But for the sign of a zero: -0 * d - 0 there, 8 d - 8 d here; words under a scale of 0.
        if kind in (Type.Q4_K, Type.Q3_K, Type.IQ4_XS, Type.NVFP4, Type.MXFP4):
            got, value = got + 0.0, value + 0.0
        np.testing.assert_array_equal(bits(got), bits(value), err_msg=name)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_0], ids=str)
def test_a_tree_laid_out_at_once_is_the_one_laid_out_afterwards(kind: Type, originals: Any) -> None:
    """Rows in RoPE's order, and fused, straight from the file's blocks."""
    path, _ = originals[kind]
    cfg = read_config(path)
    kept = load_params(path, cfg, np.float32, keep_quantized=True)
    at_once = load_params(path, cfg, np.float32, keep_quantized=True, laid_out=True)
    is_laid_out = isinstance(at_once["layer_0"]["mixer"]["qkv"]["weight"], CpuWeight)
    assert is_laid_out == (kind != Type.Q5_0)
    want, got = prepare_tree(kept), prepare_tree(at_once)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=str)
def test_multipliers_of_rows_are_folded(kind: Type, originals: Any) -> None:
    """``Multipliers.gate`` is that of the first half of gate and up, in floats and in codes."""
    path, _ = originals[kind]
    cfg = read_config(path)
    stored = dataclasses.replace(cfg.stored, products=Multipliers(gate=3.0))
    scaled = cfg.replace(stored=stored)
    plain = floats_of(load_params(path, cfg, np.float32)["layer_0"]["mlp"]["gate_up"]["weight"])
    for options in ({}, {"keep_quantized": True}, {"keep_quantized": True, "laid_out": True}):
        params = load_params(path, scaled, np.float32, **options)
        got = floats_of(params["layer_0"]["mlp"]["gate_up"]["weight"])
        gate, up = np.split(got, 2)
        np.testing.assert_allclose(gate, 3.0 * plain[: len(gate)], rtol=1e-6)
        np.testing.assert_array_equal(up, plain[len(gate) :])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_dtype(dtype: Any, tmp_path: Path) -> None:
    expected = Tiny(type=Type.Q8_0).write(tmp_path / "m.gguf")
    path = tmp_path / "m.gguf"
    got = leaves(load_params(path, read_config(path), dtype, progress=True))
    for name, value in as_tree(expected, permuted=True).items():
        assert got[name].dtype == dtype
        np.testing.assert_array_equal(got[name], value.astype(dtype))


def test_every_type_that_gguf_dequantizes_is_read() -> None:
    assert set(READABLE) == set(TYPES)


def test_gguf_types():
    """Ours are those of the ``gguf`` package, which a start does not import."""
    known = {kind.name: (int(kind), size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind.name: (int(kind), size) for kind, size in BLOCKS.items()} == known
    dequantized = {kind.name for kind in Type if hasattr(gguf.quants, kind.name)}
    floats = {"F32", "F16", "BF16"}
    assert {kind.name for kind in READABLE} == dequantized | floats
    assert {kind.name for kind in TYPES} >= {kind.name for kind in gguf.quants._type_traits}


def test_a_minimum_far_below_its_scale_keeps_unsigned_words(tmp_path: Path) -> None:
    """8 d + m has no exact float32 here, so int4 words would lose bits."""
    blocks = np.zeros((32, 2, 20), np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(1.0009765625).tobytes(), np.uint8)
    blocks[..., 2:4] = np.frombuffer(np.float16(6e-8).tobytes(), np.uint8)
    blocks[..., 4:] = np.random.default_rng(1).integers(0, 256, (32, 2, 16), np.uint8)
    path = tmp_path / "m.gguf"
    tensors = {"blk.0.ffn_down.weight": blocks.reshape(32, 40)}
    expected = Tiny(type=Type.Q4_1, tensors=tensors).write(path)
    down = load_params(path, read_config(path), np.float32, keep_quantized=True)
    down = down["layer_0"]["mlp"]["down"]["weight"]
    assert down.q.dtype == np.int8 and down.q.min() == 0
    np.testing.assert_array_equal(bits(floats_of(down)), bits(expected["blk.0.ffn_down.weight"]))


def test_scales_of_mxfp4_that_are_no_float8(tmp_path: Path) -> None:
    """Powers that a float8_e8m0fnu has not, or whose products are denormal, stand in float32."""
    blocks = np.random.default_rng(1).integers(0, 256, (32, 2, 17), np.uint8)
    blocks[..., 0] = 120
    blocks[3, 1, 1:] = 0x91  # so that the largest power has finite products
    path, name = tmp_path / "m.gguf", "blk.0.ffn_down.weight"
    for byte in (0, 255, 2):
        blocks[3, 1, 0] = byte
        expected = Tiny(type=Type.MXFP4, tensors={name: blocks.reshape(32, 34)}).write(path)
        params = load_params(path, read_config(path), np.float32, keep_quantized=True)
        down = params["layer_0"]["mlp"]["down"]["weight"]
        assert down.q.dtype == (ml_dtypes.float4_e2m1fn if byte == 2 else np.int8)
        np.testing.assert_array_equal(floats_of(down) + 0.0, expected[name] + 0.0)


@pytest.mark.core
def test_a_fused_matrix_of_mixed_types_keeps_them_as_row_blocks(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    types = {"blk.0.attn_v": Type.Q8_0, "blk.0.ffn_up": Type.F16}
    expected = Tiny(type=Type.Q4_0, types=types).write(path)
    params = load_params(path, read_config(path), np.float32, keep_quantized=True)
    got, want = leaves(params), as_tree(expected, permuted=True)
    assert isinstance(got["o"], QTensor)
    assert [block.q.dtype.name for block in got["qkv"].blocks] == ["int4", "int8"]
    assert got["gate_up"].blocks[1].dtype == np.float32
    for name in ("qkv", "gate_up"):
        np.testing.assert_array_equal(floats_of(got[name]), want[name])


# Configs


@pytest.mark.core
def test_config(tmp_path: Path) -> None:
    path = tmp_path / "some-model.gguf"
    Tiny(
        keys={
            "tokenizer.ggml.eos_token_id": 7,
            "tokenizer.ggml.eot_token_id": 9,
            "tokenizer.ggml.bos_token_id": 1,
        }
    ).write(path)
    assert read_config(path) == ModelConfig.of(
        name="some-model",
        vocab_size=20,
        d_model=32,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        d_ff=64,
        norm_eps=1e-5,
        max_position=128,
        rope=RopeConfig(10000.0),
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(7, 9),
    )


def llama3_divisors(head_dim: int, factor: float) -> np.ndarray:
    """What llama.cpp's conversion stores for Llama 3.1's rule with theta 10000."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.asarray(divisors, np.float32)


@pytest.mark.parametrize(
    ("keys", "tensors", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {},
            {"rope": RopeConfig(10000.0, "linear", 4.0)},
        ),
        ({"llama.rope.scaling.factor": 4.0}, {}, {"rope": RopeConfig(10000.0, "linear", 4.0)}),
        ({"llama.rope.scale_linear": 2.0}, {}, {"rope": RopeConfig(10000.0, "linear", 2.0)}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {},
            {"rope": RopeConfig(10000.0, "yarn", 8.0, original_max_position=64)},
        ),
        (
            {},
            {"rope_freqs.weight": llama3_divisors(8, 32.0)},
            {"rope": RopeConfig(10000.0, "llama3", 32.0, 8192, 1.0, 4.0)},
        ),
        ({}, {"rope_freqs.weight": np.ones(4, np.float32)}, {"rope": RopeConfig(10000.0)}),
        ({"llama.attention.sliding_window": 16}, {}, {"sliding_window": 16}),
        ({"llama.attention.head_count_kv": [2]}, {}, {"n_kv_heads": 2}),
        ({"llama.attention.head_count_kv": None}, {}, {"n_kv_heads": 4}),
    ],
)
def test_config_keys(
    keys: dict[str, Any], tensors: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    Tiny(keys=keys, tensors=tensors).write(tmp_path / "m.gguf")
    cfg = read_config(tmp_path / "m.gguf")
    assert {key: getattr(cfg, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (Tiny(arch="gpt2"), "general.architecture: 'gpt2' is not supported"),
        (
            Tiny(arch="qwen2", keys={"qwen2.expert_count": 8}),
            "qwen2.expert_count: a mixture of experts, which is not supported",
        ),
        (Tiny(keys={"split.count": 2}), "split.count"),
        (Tiny(keys={"llama.block_count": 4_000_000_000}), "llama.block_count: 4000000000 layers"),
        (Tiny(keys={"llama.attention.head_count": 0}), "llama.attention.head_count: 0"),
        (Tiny(keys={"llama.attention.head_count": [4, 2]}), "differs between layers"),
        (Tiny(keys={"llama.attention.head_count_kv": 3}), "n_kv_heads = 3: must divide"),
        (Tiny(keys={"llama.embedding_length": 48}), "llama.embedding_length: 48"),
        (Tiny(keys={"llama.context_length": "long"}), "expected an integer, found 'long'"),
        (Tiny(keys={"llama.context_length": None}), "llama.context_length: the key is missing"),
        (Tiny(keys={"llama.rope.dimension_count": 4}), "llama.rope.dimension_count: 4 differs"),
        (Tiny(keys={"llama.rope.scaling.type": "longrope"}), "llama.rope.scaling.type: 'longrope'"),
        (
            Tiny(keys={"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}),
            "llama.rope.scaling.attn_factor",
        ),
        (Tiny(tensors={"rope_freqs.weight": np.full(4, 3.0, np.float32)}), "rope_freqs.weight"),
        (Tiny(tensors={"rope_freqs.weight": np.ones(3, np.float32)}), "rope_freqs.weight"),
        (Tiny(tensors={"token_embd.weight": None}), "token_embd.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_configs_are_named(tiny: Tiny, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny.write(path)
    with pytest.raises(JaxLlamaError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


@pytest.mark.core
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.0.ffn_up.weight": None}, "missing: blk.0.ffn_up.weight"),
        ({"blk.0.extra.weight": np.zeros(3, np.float32)}, "unexpected: blk.0.extra.weight"),
        (
            {"blk.0.attn_k.weight": np.zeros((8, 32), np.float32)},
            "tensor 'blk.0.attn_k.weight': shape [8, 32], but the config wants [16, 32]",
        ),
        ({"output_norm.weight": np.zeros((32, 1), np.float32)}, "shape [32, 1]"),
    ],
)
def test_wrong_tensors_are_named(tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny(tensors=tensors).write(path)
    with pytest.raises(JaxLlamaError) as caught:
        load_params(path, read_config(path), np.float32)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_unsupported_tensor_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny(d=256, head_dim=64, f=256).write(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", Type.I8)
    path.write_bytes(data)
    with pytest.raises(JaxLlamaError, match="'blk.0.ffn_up.weight': type I8 is not one of F32"):
        load_params(path, read_config(path), np.float32)


@pytest.mark.parametrize("keep", [False, True])
def test_nan_weights_warn(keep: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    raw = gguf.quants.quantize(np.ones((32, 64), np.float32), Type.Q8_0)
    raw[3, :2] = np.frombuffer(np.float16(np.nan).tobytes(), np.uint8)
    Tiny(type=Type.Q8_0, tensors={"blk.0.ffn_down.weight": raw}).write(path)
    with pytest.warns(WeightWarning, match="tensor 'blk.0.ffn_down.weight' holds NaN"):
        params = load_params(path, read_config(path), np.float32, keep_quantized=keep)
    down = params["layer_0"]["mlp"]["down"]["weight"]
    rows = np.isnan(floats_of(down)).any(axis=1)
    assert rows.tolist() == [index == 3 for index in range(32)]


# Damage


def load_all(path: Path) -> None:
    """Everything that is read from a GGUF file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeightWarning)
        load_params(path, read_config(path), np.float32)
        load_params(path, read_config(path), np.float32, keep_quantized=True)
        tokenizer = Tokenizer.from_gguf(path)
        tokenizer.decode(tokenizer.encode("a ab\n1") + list(range(30)))


def test_the_walk_agrees_with_ggufs_own_reader(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny(tokenizer="llama", tied=False, type=Type.Q5_1).write(path)
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert file.keys == [key for key in reader.fields if not key.startswith("GGUF.")]
        assert file.strings("tokenizer.ggml.tokens")[3:5] == ["a", "b"]
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert (info.type, info.offset) == (tensor.tensor_type, tensor.data_offset)
            np.testing.assert_array_equal(
                file.rows(info).ravel(), np.asarray(tensor.data).view(np.uint8).ravel()
            )


def test_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.gguf", tmp_path / "m.gguf"
    Tiny(tokenizer="llama", bias=True).write(whole)
    load_all(whole)
    with GGUFFile(whole) as file:
        start = min(info.offset for info in file.tensors.values())
    data = whole.read_bytes()
    fields = set()
    for size in [*range(0, start, 3), *range(start, len(data), 997)]:
        path.write_bytes(data[:size])
        with pytest.raises(JaxLlamaError) as caught:
            read_config(path)
        head, _, why = str(caught.value).removeprefix(f"{path}: GGUF ").partition(": ")
        assert why and "\n" not in str(caught.value)
        fields.add(head.split(" ")[0])
    # Every part of the header was cut and named: counts, keys, strings and tensors.
    assert {
        "header",
        "kv_count",
        "tensor_count",
        "tokenizer.ggml.scores",
        "key",
        "tensor",
    } <= fields


@pytest.mark.parametrize(
    ("at", "code", "value", "message"),
    [
        (0, "4s", b"GGML", "magic: b'GGML' is not b'GGUF'"),
        (4, "I", 1, "version: 1 is not 2 or 3"),
        (4, "I", 3 << 24, "a big-endian file?"),
        (8, "Q", 2**63, "tensor_count: 9223372036854775808 x 24 bytes are announced"),
        (16, "Q", 2**40, "kv_count: 1099511627776 x 13 bytes are announced"),
        (24, "Q", 2**64 - 1, "key 0 of 18 (name length): 18446744073709551615 x 1 bytes"),
        (52, "I", 99, "general.architecture (type): 99 is not a known value type"),
        (56, "Q", 2**50, "general.architecture: string 0 has length 1125899906842624"),
    ],
)
def test_absurd_header_fields(at: int, code: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny(tokenizer="llama").write(path)
    data = bytearray(path.read_bytes())
    struct.pack_into("<" + code, data, at, value)
    path.write_bytes(data)
    with pytest.raises(JaxLlamaError) as caught:
        read_config(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("bound", "message"),
    [
        ("_MAX_KEYS", "kv_count: 18 is more than the 3 that are supported"),
        ("_MAX_TENSORS", "tensor_count: "),
        ("_MAX_STRINGS", "tokenizer.ggml.tokens: "),
    ],
)
def test_a_large_file_of_too_many_entries(
    bound: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    Tiny(tokenizer="llama").write(path)
    monkeypatch.setattr(f"jaxllama.checkpoints.gguf.file.{bound}", 3)
    with pytest.raises(JaxLlamaError, match="is more than the 3") as caught:
        read_config(path)
    assert message in str(caught.value)


def patch_tensor(path: Path, name: bytes, field: str, value: int) -> None:
    """Overwrite a field of a matrix's entry in the tensor table."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    offset, code = {"n_dims": (0, "I"), "dim": (4, "Q"), "type": (20, "I"), "offset": (24, "Q")}[
        field
    ]
    struct.pack_into("<" + code, data, at + offset, value)
    path.write_bytes(data)


@pytest.mark.core
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_dims", 0, "n_dims: 0 is not in 1..4"),
        ("n_dims", 2**31, "n_dims: 2147483648 is not in 1..4"),
        ("dim", 2**62, "its data would end at byte"),
        ("dim", 0, "has a zero"),
        ("type", 200, "type: 200 is not a known type"),
        ("type", Type.Q4_K, "rows of 64 are not whole Q4_K blocks of 256"),
        ("offset", 2**60, "its data would end at byte"),
        ("offset", 3, "offset 3 is not a multiple of 32"),
        ("offset", 0, "overlaps tensor"),
    ],
)
def test_absurd_tensor_fields(field: str, value: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    Tiny().write(path)
    patch_tensor(path, b"blk.0.ffn_down.weight", field, value)
    with pytest.raises(JaxLlamaError) as caught:
        read_config(path)
    assert "'blk.0.ffn_down.weight'" in str(caught.value) and message in str(caught.value)


def test_no_such_file_and_twice_the_same_key(tmp_path: Path) -> None:
    with pytest.raises(JaxLlamaError, match="No such file"):
        read_config(tmp_path / "none.gguf")
    with pytest.raises(JaxLlamaError, match="Is a directory"):
        read_config(tmp_path)
    path = tmp_path / "m.gguf"
    Tiny().write(path)
    path.write_bytes(path.read_bytes().replace(b"llama.context_length", b"general.architecture"))
    with pytest.raises(JaxLlamaError, match="'general.architecture' is there twice"):
        read_config(path)


INTERESTING = [0, 1, 2, 3, 7, 31, 32, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1]
# Nine of ten edits fall into the header, where damage matters.
edits = st.tuples(
    st.one_of(*[st.integers(0, 4000)] * 9, st.integers(0, 10**6)),
    st.one_of(
        st.tuples(st.just("byte"), st.integers(0, 255)),
        st.tuples(st.just("u32"), st.sampled_from(INTERESTING)),
        st.tuples(st.just("u64"), st.sampled_from(INTERESTING)),
        st.tuples(st.just("cut"), st.integers(1, 8)),
        st.tuples(st.just("insert"), st.binary(min_size=1, max_size=8)),
    ),
)


def fuzz(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


damage = given(kind=st.sampled_from(TYPES), edits=st.lists(edits, min_size=1, max_size=4))


@fuzz(80)
@damage
def test_damaged_files_raise_only_our_error(originals, tmp_path, kind, edits) -> None:
    check_damaged(originals, tmp_path, kind, edits)


@pytest.mark.slow
@fuzz(2000)
@damage
def test_many_damaged_files_raise_only_our_error(originals, tmp_path, kind, edits) -> None:
    check_damaged(originals, tmp_path, kind, edits)


def check_damaged(
    originals: Any, tmp_path: Path, kind: Type, edits: list[tuple[int, tuple[str, Any]]]
) -> None:
    content = bytearray(originals[kind][0].read_bytes())
    for at, (edit, value) in edits:
        at %= len(content) - 8
        if edit == "byte":
            content[at] = value
        elif edit == "u32":
            struct.pack_into("<I", content, at, value % 2**32)
        elif edit == "u64":
            struct.pack_into("<Q", content, at, value)
        elif edit == "cut":
            del content[at : at + value]
        else:
            content[at:at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        load_all(path)
    except JaxLlamaError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # 4-bit words become 8 times larger as float32; beyond that only small objects.
    assert peak < 8 * len(content) + 2**21


# The real file


def test_smollm2_config_is_the_preset(smollm2: Path) -> None:
    found = read_config(smollm2)
    # <|im_end|>, and by their spelling <|endoftext|> and <reponame>, as in llama.cpp.
    assert found.eos_token_ids == (2, 0, 4)
    assert found.replace(name="smollm2-135m", eos_token_ids=(2,)) == load_config("smollm2-135m")


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    # transformers makes this map anew for each of 397 modules, half of the test's time.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    transformers = pytest.importorskip("transformers")
    gguf_utils = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    cfg = read_config(smollm2)
    sizes = {
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_ff,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
    }
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        names = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        with torch.device("cpu"):
            loaded = gguf_utils.load_gguf_checkpoint(
                str(smollm2), return_tensors=True, model_to_load=names
            )
    state = {name: value.float().numpy() for name, value in loaded["tensors"].items()}
    params = load_params(smollm2, cfg, np.float32)
    for i in range(cfg.n_layers):
        layer, prefix = params[f"layer_{i}"], f"model.layers.{i}"
        for ours, theirs in (
            (layer["mixer"]["qkv"], [f"self_attn.{name}_proj" for name in "qkv"]),
            (layer["mixer"]["o"], ["self_attn.o_proj"]),
            (layer["mlp"]["gate_up"], ["mlp.gate_proj", "mlp.up_proj"]),
            (layer["mlp"]["down"], ["mlp.down_proj"]),
            (layer["mixer_norm"], ["input_layernorm"]),
            (layer["mlp_norm"], ["post_attention_layernorm"]),
        ):
            want = np.concatenate([state[f"{prefix}.{name}.weight"] for name in theirs])
            np.testing.assert_array_equal(ours["weight"], want, err_msg=f"{prefix} {theirs}")
    np.testing.assert_array_equal(params["embed"]["weight"], state["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["norm"]["weight"], state["model.norm.weight"])


@pytest.mark.slow
def test_smollm2_kept_quantized_is_lossless_and_small(smollm2: Path) -> None:
    cfg = read_config(smollm2)
    dense = load_params(smollm2, cfg, np.float32)
    kept = load_params(smollm2, cfg, np.float32, keep_quantized=True)
    is_qtensor = lambda leaf: isinstance(leaf, QTensor)  # noqa: E731
    pairs = zip(jax.tree.leaves(dense), jax.tree.leaves(kept, is_leaf=is_qtensor), strict=True)
    words = []
    for plain, leaf in pairs:
        if is_qtensor(leaf):
            words.append(str(leaf.q.dtype))
            leaf = floats_of(leaf)
        np.testing.assert_array_equal(bits(leaf), bits(plain))
    assert sorted(words) == ["int4"] * 120 + ["int8"]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(kept, is_leaf=is_qtensor))
    assert size < 0.21 * sum(leaf.nbytes for leaf in jax.tree.leaves(dense))


@pytest.mark.slow
def test_peak_memory_of_loading(smollm2: Path) -> None:
    """Loading float32 peaks within 1.3 times the tree's size, the interpreter included."""
    if not Path("/proc/self/status").is_file():
        pytest.skip("the peak is read from /proc (ru_maxrss would count the parent's)")
    code = (
        "import sys, numpy as np\n"
        "from jaxllama.checkpoints.gguf.load import load_params, read_config\n"
        "params = load_params(sys.argv[1], read_config(sys.argv[1]), np.float32)\n"
        "status = open('/proc/self/status').read()\n"
        "print(int(status.split('VmHWM:')[1].split()[0]) * 1024)\n"
    )
    command = [sys.executable, "-c", code, str(smollm2)]
    peak = int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert peak <= 1.3 * 4 * 134_515_008  # parameters
