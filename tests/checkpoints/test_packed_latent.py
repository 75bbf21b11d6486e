"""FP8 checkpoints in blocks of models with attention from latents: they load as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.checkpoints.hf.save import flatten
from pallas_kernels.qtensor import QTensor
from tests.helpers.models import relative_error, tokens_of
from tests.helpers.packed_oracle import floats_of
from tests.helpers.seeded import seeded_params

BLOCK = 128
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 136,  # no multiple of a block, and neither are the rows of q and of kv_b
    "q_lora_rank": 144,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 24,
    "v_head_dim": 56,
    "moe_intermediate_size": 72,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}
INDEXER = {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 6}


def in_blocks(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (codes, scale of each block, the float32 that they stand for)."""
    rows, columns = (-(-size // BLOCK) for size in w.shape)
    whole = np.zeros((rows * BLOCK, columns * BLOCK), np.float32)
    whole[: w.shape[0], : w.shape[1]] = w
    blocks = whole.reshape(rows, BLOCK, columns, BLOCK)
    scale = np.abs(blocks).max((1, 3)).astype(np.float32) / 448
    codes = (blocks / scale[:, None, :, None]).astype(ml_dtypes.float8_e4m3fn)
    floats = codes.astype(np.float32) * scale[:, None, :, None]
    cut = tuple(slice(size) for size in w.shape)
    return codes.reshape(whole.shape)[cut], scale, floats.reshape(whole.shape)[cut]


def both(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """Return a directory in FP8 blocks, and one of the same weights in float32."""
    cfg = config_from_hf(config, "tiny")
    floats = hf.save(folder / "floats", cfg, seeded_params(cfg, 0))
    codes = folder / "codes"
    shutil.copytree(floats, codes)
    tensors = load_file(floats / "model.safetensors")
    packed, plain = dict(tensors), dict(tensors)
    for name, w in tensors.items():
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight", "wq_b.weight", "wk.weight")):
            if "weights_proj" in name:  # the scores' weights stay floats
                continue
            packed[name], scale, plain[name] = in_blocks(w)
            packed[f"{name}_scale_inv"] = scale
    save_file(
        {key: np.ascontiguousarray(plain[key]) for key in plain}, floats / "model.safetensors"
    )
    save_file(
        {key: np.ascontiguousarray(packed[key]) for key in packed}, codes / "model.safetensors"
    )
    said = json.loads((codes / "config.json").read_text())
    said["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (codes / "config.json").write_text(json.dumps(said))
    return codes, floats


KINDS = pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])


def config_of(kind: str) -> dict[str, Any]:
    return {**CONFIG, "model_type": kind, **(INDEXER if kind == "deepseek_v32" else {})}


@KINDS
def test_blocks_are_read_as_their_floats(kind: str, tmp_path: Path) -> None:
    """With RoPE's order of rows and YaRN's multiplier of q, which their codes and scales take."""
    codes, floats = both(tmp_path, config_of(kind))
    (cfg, params), (same, plain) = hf.load(codes), hf.load(floats, dtype=np.float32)
    assert cfg.replace(name="") == same.replace(name="")
    held, want = flatten(params), flatten(plain)
    assert held.keys() == want.keys()
    for path, leaf in want.items():
        np.testing.assert_allclose(floats_of(held[path]), leaf, rtol=1e-6, atol=0)
    names = ["q_a", "q", "kv_a", "kv_b", "o"] + ["index_q", "index_k"] * (kind == "deepseek_v32")
    for name in names:
        leaf = held["layer_1", "mixer", name, "weight"]
        assert isinstance(leaf, QTensor) and np.dtype(leaf.q.dtype) == ml_dtypes.float8_e4m3fn


def test_rows_that_stay_in_their_block_keep_the_blocks_kernel(tmp_path: Path) -> None:
    """The sizes of DeepSeek-V3's heads: RoPE's order of rows moves none into another block."""
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "q_lora_rank": 256}
    codes, _ = both(tmp_path, {**CONFIG, **sizes})
    _, params = hf.load(codes)
    mixer = params["layer_1"]["mixer"]
    assert mixer["q"]["weight"].has_blocks and mixer["q_a"]["weight"].has_blocks
    assert not mixer["kv_a"]["weight"].has_blocks  # 200 rows


@pytest.mark.slow
@KINDS
def test_blocks_give_the_logits_of_their_floats(kind: str, tmp_path: Path) -> None:
    """Whole rows, and a prompt in chunks with steps behind, which absorb the up product."""
    codes, floats = both(tmp_path, config_of(kind))
    (cfg, params), (_, plain) = hf.load(codes), hf.load(floats, dtype=np.float32)
    tokens, lengths = np.asarray(tokens_of(cfg, 2, 16)), np.array([16, 11], np.int32)
    params, plain = jax.device_put((params, plain))
    want = np.asarray(jl.logits(cfg, plain, tokens, lengths))
    got = np.asarray(jl.logits(cfg, params, tokens, lengths))
    for row, length in enumerate(lengths):
        assert relative_error(got[row, :length], want[row, :length]) < 1e-5
    cache = jl.init_cache(cfg, 2, 24, jnp.float32)
    last, cache = jl.prefill(cfg, params, tokens[:, :12], lengths - 4, cache, chunk=5)
    for step in range(4):
        for row in range(2):
            at = lengths[row] - 5 + step
            assert relative_error(np.asarray(last)[row], want[row, at]) < 1e-5
        last, cache = jl.decode_step(cfg, params, tokens[np.arange(2), lengths - 4 + step], cache)
