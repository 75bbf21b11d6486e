"""GGUF files of hybrids (Qwen3.5, Qwen3-Next, Kimi-Linear, Granite 4), with experts and without:
llama.cpp's changes are undone, and a model may be in several files.

llama.cpp's converter does not run here.  ``gguf_cases`` writes files by its rules.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import jaxllama as jl
from jaxllama.checkpoints.gguf.file import GGUFFile
from jaxllama.checkpoints.gguf.load import load_params, read_config
from jaxllama.checkpoints.hf import load as hf
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from pallas_kernels.cpu import CpuWeight, prepare_tree
from pallas_kernels.qtensor import QTensor, dequantize
from tests.helpers.gguf_cases import write_gguf
from tests.helpers.mtp_cases import CONFIG
from tests.helpers.parity_cases import CASES
from tests.helpers.seeded import seeded_params

is_packed = lambda leaf: isinstance(leaf, QTensor)  # noqa: E731


def config(d_v: int = 32, **changes) -> ModelConfig:
    delta = dataclasses.replace(CONFIG.delta, n_heads=6, n_k_heads=2, d_k=32, d_v=d_v)
    changes = {"eos_token_ids": (), **changes}
    return CONFIG.replace(vocab_size=64, d_ff=64, head_dim=32, delta=delta, **changes)


def written(cfg: ModelConfig, folder: Path, name: str = "model.gguf", **options) -> Path:
    directory = folder / "directory"
    if not directory.exists():
        hf.save(directory, cfg, seeded_params(cfg, 3))
    write_gguf(folder / name, directory, **options)
    return directory


@pytest.mark.parametrize("mtp_layers", [1, 0])
def test_a_file_is_the_model_of_its_directory(mtp_layers, tmp_path) -> None:
    """Three value heads of each key head, a head for drafts or none.  A_log is a logarithm of the
    file's number, so it differs by a rounding."""
    directory = written(config(mtp_layers=mtp_layers), tmp_path)
    want_cfg, want = hf.load(directory)
    cfg = read_config(tmp_path / "model.gguf")
    assert cfg.replace(name=want_cfg.name) == want_cfg and cfg.mtp_layers == mtp_layers
    got = load_params(tmp_path / "model.gguf", cfg, np.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, 12)))
    lengths = jnp.asarray([12])
    scores = [jl.logits(cfg, params, tokens, lengths) for params in (got, want)]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("d_v", [32, 16])
def test_kept_codes_have_our_order_of_columns(d_v, tmp_path) -> None:
    """A group of 32 columns is one head of 32, or two of 16 that come from different places."""
    written(config(d_v), tmp_path, kind=Type.Q8_0)
    cfg = read_config(tmp_path / "model.gguf")
    dense = load_params(tmp_path / "model.gguf", cfg, np.float32)
    kept = load_params(tmp_path / "model.gguf", cfg, np.float32, keep_quantized=True)
    out = kept["layer_0"]["mixer"]["o"]["weight"]
    assert is_packed(out) and (out.columns is None) == (d_v == 32)
    assert is_packed(kept["layer_0"]["mixer"]["qkvz"]["weight"])
    floats = jax.tree.map(lambda w: dequantize(w) if is_packed(w) else w, kept, is_leaf=is_packed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), floats, dense)


def mixture(name: str, **changes) -> ModelConfig:
    """A parity case with groups of 32 columns, and what a file implies."""
    cfg = CASES[name]
    experts = dataclasses.replace(cfg.experts, d_ff=32, shared=32, normalize=True)
    delta = dataclasses.replace(cfg.delta, n_heads=4, n_k_heads=2, d_k=32, d_v=32)
    options = {"d_ff": 32, "experts": experts, "delta": delta, "eos_token_ids": ()}
    kinds = ("delta", "attention", "delta")
    return cfg.replace(**options, layer_types=kinds, n_layers=3, **changes)


@pytest.mark.parametrize("name", ["qwen3_next-experts", "qwen3_5_moe_text"])
def test_a_file_with_experts_is_the_model_of_its_directory(name, tmp_path) -> None:
    """With a head for drafts, whose layer has experts too; as floats and in the file's codes."""
    directory = written(mixture(name, mtp_layers=1), tmp_path)
    want_cfg, want = hf.load(directory)
    path = tmp_path / "model.gguf"
    cfg = read_config(path)
    assert cfg.replace(name=want_cfg.name, bos_token_id=want_cfg.bos_token_id) == want_cfg
    got = load_params(path, cfg, np.float32)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, got, want)
    write_gguf(tmp_path / "codes.gguf", directory, kind=Type.Q8_0)
    dense = load_params(tmp_path / "codes.gguf", cfg, np.float32)
    kept = load_params(tmp_path / "codes.gguf", cfg, np.float32, keep_quantized=True)
    for part in ("experts_gate_up", "experts_down"):
        assert is_packed(kept["mtp"]["layer_0"]["mlp"][part]["weight"])
    floats = jax.tree.map(lambda w: dequantize(w) if is_packed(w) else w, kept, is_leaf=is_packed)
    jax.tree.map(close, floats, dense)


@pytest.mark.parametrize("is_whole", [False, True])
def test_kimis_latents_are_put_together(is_whole, tmp_path) -> None:
    """Keys of all heads, transposed, and values are one matrix here; older files have it so."""
    cfg = CASES["kimi_linear-experts"]
    cfg = cfg.replace(experts=dataclasses.replace(cfg.experts, n_groups=1), eos_token_ids=())
    directory = written(cfg, tmp_path, is_whole=is_whole)
    want_cfg, want = hf.load(directory)
    got_cfg = read_config(tmp_path / "model.gguf")
    assert got_cfg.replace(name=want_cfg.name, bos_token_id=want_cfg.bos_token_id) == want_cfg
    got = load_params(tmp_path / "model.gguf", got_cfg, np.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)
    write_gguf(tmp_path / "codes.gguf", directory, kind=Type.Q8_0, is_whole=is_whole)
    kept = load_params(tmp_path / "codes.gguf", got_cfg, np.float32, keep_quantized=True)
    assert is_packed(kept["layer_1"]["mlp"]["experts_gate_up"]["weight"])
    assert not is_packed(kept["layer_1"]["mixer"]["kv_b"]["weight"])


@pytest.mark.parametrize("name", ["granitemoehybrid", "granitemoehybrid-experts"])
def test_granites_layers_of_mamba(name, tmp_path) -> None:
    """Without experts and positions, and with both."""
    directory = written(CASES[name].replace(eos_token_ids=()), tmp_path)
    want_cfg, want = hf.load(directory)
    cfg = read_config(tmp_path / "model.gguf")
    assert cfg.replace(name=want_cfg.name, bos_token_id=want_cfg.bos_token_id) == want_cfg
    got = load_params(tmp_path / "model.gguf", cfg, np.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)
    write_gguf(tmp_path / "codes.gguf", directory, kind=Type.Q8_0)
    kept = load_params(tmp_path / "codes.gguf", cfg, np.float32, keep_quantized=True)
    mixer = next(kept[f"layer_{i}"]["mixer"] for i in range(2) if cfg.layer_types[i] == "ssm")
    assert is_packed(mixer["zxbcdt"]["weight"]) and mixer["y_norm"]["weight"].shape == (64,)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.key_length_mla", 4, "4 must exceed the 4 features that rope.dimension_count"),
        (
            "attention.head_count_kv",
            [0, 2, 0],
            r"\[0, 2, 0\] is not one of \[0, 1, 4\]",
        ),
    ],
)
def test_keys_of_latents_are_checked(key, value, message, tmp_path) -> None:
    written(CASES["kimi_linear-experts"], tmp_path, **{f"kimi-linear.{key}": value})
    with pytest.raises(JaxLlamaError, match=message):
        read_config(tmp_path / "model.gguf")


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=str)
def test_experts_laid_out_at_once_are_those_laid_out_afterwards(kind, tmp_path) -> None:
    """Gate and up of each expert together, straight from the file's blocks."""
    written(mixture("qwen3_next-experts"), tmp_path, kind=kind)
    cfg = read_config(tmp_path / "model.gguf")
    want, got = (
        load_params(tmp_path / "model.gguf", cfg, np.float32, keep_quantized=True, laid_out=at_once)
        for at_once in (False, True)
    )
    for name in ("experts_gate_up", "experts_down"):
        assert isinstance(got["layer_0"]["mlp"][name]["weight"], CpuWeight)
    want = prepare_tree(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_other_layouts_of_the_same_tensors(tmp_path) -> None:
    """Gate and up of all experts in one tensor, q, k, v and z as Qwen3-Next's files had them first,
    and no list of the recurrent layers."""
    cfg = mixture("qwen3_next-experts")
    directory = written(cfg.replace(layer_types=("delta", "delta", "delta")), tmp_path)
    want = load_params(tmp_path / "model.gguf", read_config(tmp_path / "model.gguf"), np.float32)
    changes = {"qwen3next.attention.recurrent_layers": None}
    write_gguf(tmp_path / "other.gguf", directory, is_whole=True, **changes)
    with GGUFFile(tmp_path / "other.gguf") as file:
        names = {name.removeprefix("blk.0.") for name in file.tensors}
        assert {"ffn_gate_up_exps.weight", "ssm_in.weight"} <= names
        assert not {"ffn_up_exps.weight", "attn_qkv.weight"} & names
    other = read_config(tmp_path / "other.gguf")
    assert other.layer_types == ("delta", "delta", "delta")  # the fourth would be attention
    got = load_params(tmp_path / "other.gguf", other, np.float32)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_list_of_recurrent_layers_must_be_long_enough(tmp_path) -> None:
    changes = {"qwen35.attention.recurrent_layers": [True]}
    written(config(), tmp_path, **changes)
    with pytest.raises(JaxLlamaError, match="recurrent_layers: has 1 entries for 2 layers"):
        read_config(tmp_path / "model.gguf")


def test_a_split_model_is_the_model_of_one_file(tmp_path) -> None:
    """By its first file; the others are checked, and say what is missing."""
    written(config(), tmp_path)
    written(config(), tmp_path, "part.gguf", split=12)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) > 2 and parts[0].name == f"part-00001-of-{len(parts):05d}.gguf"
    cfg = read_config(parts[0])
    assert cfg.replace(name="model") == read_config(tmp_path / "model.gguf")
    assert cfg.name == "part"
    got, want = (load_params(path, cfg, np.float32) for path in (parts[0], tmp_path / "model.gguf"))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    with pytest.raises(JaxLlamaError, match="split.no: 1 is not 0; name the first file"):
        read_config(parts[1])
    shutil.copy(parts[2], parts[1])
    with pytest.raises(JaxLlamaError, match=f"{parts[1].name}: GGUF split.no: 2 is not 1"):
        read_config(parts[0])
    parts[1].unlink()
    with pytest.raises(JaxLlamaError, match=f"{parts[1].name}: No such file"):
        read_config(parts[0])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(JaxLlamaError, match="the name does not end with -00001-of-"):
        read_config(tmp_path / "renamed.gguf")
