"""The tensors of some families as llama.cpp's conversion cuts, joins and orders them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_LAYER = r"model\.layers\.(\d+)\."
_GPT_OSS = re.compile(_LAYER + r"mlp\.experts\.(gate_up|down)_proj(_bias)?")
_KIMI = {
    "f_a_proj": "ssm_f_a",
    "f_b_proj": "ssm_f_b",
    "g_a_proj": "ssm_g_a",
    "g_b_proj": "ssm_g_b",
    "b_proj": "ssm_beta",
    "o_norm": "ssm_norm",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "kv_a_layernorm": "attn_kv_a_norm",
    "kv_b_proj": "attn_kv_b",
}
_SINKS = re.compile(_LAYER + r"self_attn\.sinks")


def halved(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors, with the two that a model keeps in one apart: gate and up of Granite's experts,
    and the output gate of Qwen3-Next's q, k and v, which are ordered by key head."""
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        if rest.endswith("input_linear.weight"):
            kind = "_exps" if rest.startswith("block_sparse_moe.") else "_shexp"
            kind = kind if config["num_local_experts"] else ""
            for part, own in zip(("gate", "up"), np.split(value, 2, axis=-2), strict=True):
                found[f"blk.{layer}.ffn_{part}{kind}.weight"] = np.ascontiguousarray(own)
        elif rest.startswith("mamba."):
            found |= _of_mamba(f"blk.{layer}.", rest.removeprefix("mamba."), value, config)
        elif rest == "shared_mlp.output_linear.weight" and not config["num_local_experts"]:
            found[f"blk.{layer}.ffn_down.weight"] = value
        elif rest.endswith("in_proj_qkvz.weight"):
            groups, d_k = config["linear_num_key_heads"], config["linear_key_head_dim"]
            v = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
            by_group = value.reshape(groups, -1, value.shape[-1])
            parts = np.split(by_group, np.cumsum([d_k, d_k, v]), axis=1)
            q, k, v, z = (part.reshape(-1, value.shape[-1]) for part in parts)
            found[f"blk.{layer}.attn_qkv.weight"] = np.concatenate([q, k, v])
            found[f"blk.{layer}.attn_gate.weight"] = z
        else:
            found[name] = value
    return found


def _of_mamba(
    layer: str, name: str, value: np.ndarray, config: dict[str, Any]
) -> dict[str, np.ndarray]:
    """A tensor of a Mamba-2 layer: -exp(A_log), and a row of the norm for each group."""
    if name == "A_log":
        return {f"{layer}ssm_a": -np.exp(value)[:, None]}
    if name == "D":
        return {f"{layer}ssm_d": value[:, None]}
    if name == "dt_bias":
        return {f"{layer}ssm_dt.bias": value}
    if name == "norm.weight":
        return {f"{layer}ssm_norm.weight": value.reshape(config["mamba_n_groups"], -1)}
    part, _, leaf = name.partition(".")
    new = {"in_proj": "ssm_in", "out_proj": "ssm_out", "conv1d": "ssm_conv1d"}[part]
    is_conv = part == "conv1d" and leaf == "weight"
    return {f"{layer}{new}.{leaf}": value.squeeze(1) if is_conv else value}


def joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, with gate and up of all experts as one, and Qwen3-Next's q, k, v and z."""
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if name.endswith("ffn_gate_exps.weight"):
            both = value, tensors[name.replace("_gate_", "_up_")]
            found[name.replace("_gate_", "_gate_up_")] = np.concatenate(both, axis=1)
        elif name.endswith("in_proj_qkvz.weight"):
            found[f"blk.{name.split('.')[2]}.ssm_in.weight"] = value
        elif not name.endswith("ffn_up_exps.weight"):
            found[name] = value
    return found


def of_gpt_oss(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss's experts and sinks under GGUF's names, taken out of ``tensors``: gate and up apart,
    as [E, out, in]."""
    found: dict[str, np.ndarray] = {}
    for name in [*tensors]:
        if sinks := _SINKS.fullmatch(name):
            found[f"blk.{sinks[1]}.attn_sinks.weight"] = tensors.pop(name)
        if (one := _GPT_OSS.fullmatch(name)) is None:
            continue
        value, leaf = tensors.pop(name), "bias" if one[3] else "weight"
        value = value if one[3] else value.swapaxes(1, 2)
        parts = {"down": value}
        if one[2] == "gate_up":
            parts = {"gate": value[:, 0::2], "up": value[:, 1::2]}
        for part, own in parts.items():
            found[f"blk.{one[1]}.ffn_{part}_exps.{leaf}"] = np.ascontiguousarray(own)
    return found


def of_kimi(
    tensors: dict[str, np.ndarray], config: dict[str, Any], is_whole: bool
) -> dict[str, np.ndarray]:
    """Kimi-Linear's mixers under GGUF's names, taken out of ``tensors``: rates, convolutions with
    more axes, and what makes keys and values of latents in two, unless ``is_whole``."""
    found: dict[str, np.ndarray] = {}
    heads, d_k = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name in [*tensors]:
        if (one := re.fullmatch(_LAYER + r"self_attn\.(\w+?)(?:\.weight)?", name)) is None:
            continue
        part, value, layer = one[2], tensors[name], f"blk.{one[1]}"
        if part == "A_log":
            found[f"{layer}.ssm_a"] = -np.exp(value)
        elif part == "dt_bias":
            found[f"{layer}.ssm_dt.bias"] = value
        elif part.endswith("_conv1d"):
            found[f"{layer}.ssm_conv1d_{part[0]}.weight"] = value[None]
        elif part == "kv_b_proj" and not is_whole:
            by_head = value.reshape(heads, -1, value.shape[-1])
            keys = np.ascontiguousarray(by_head[:, :d_k].swapaxes(1, 2))
            found[f"{layer}.attn_k_b.weight"] = keys
            found[f"{layer}.attn_v_b.weight"] = np.ascontiguousarray(by_head[:, d_k:])
        elif part in _KIMI:
            found[f"{layer}.{_KIMI[part]}.weight"] = value
        else:
            continue
        del tensors[name]
    return found


def linear_attention(
    name: str, value: np.ndarray, config: dict[str, Any]
) -> tuple[str, np.ndarray]:
    """As llama.cpp's ``conversion/qwen.py``: norms plus one, -exp(A_log), and value heads in the
    order head 0 of every key head, head 1 of every key head."""
    is_next = config["model_type"] == "qwen3_next"  # which has its heads in their order
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    d_k, d_v = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def tiled(value: np.ndarray, width: int) -> np.ndarray:
        if is_next:
            return value
        grid = value.reshape(groups, heads // groups, width, *value.shape[1:])
        return np.ascontiguousarray(grid.swapaxes(0, 1)).reshape(value.shape)

    *_, room, part, leaf = f"..{name}".split(".")
    if leaf == "A_log":
        return f"{name}.", tiled(-np.exp(value), 1)
    if leaf == "dt_bias":
        return name.replace("linear_attn.dt_bias", "ssm_dt.bias"), tiled(value, 1)
    if room != "linear_attn":
        return name, value + 1 if "norm" in part else value
    if part in ("in_proj_qkv", "conv1d"):
        keys = 2 * groups * d_k
        value = value.reshape(len(value), -1)
        return name, np.concatenate([value[:keys], tiled(value[keys:], d_v)])
    if part == "out_proj":
        return name, np.ascontiguousarray(tiled(value.T, d_v).T)
    if part == "norm":
        return name, value
    return name, tiled(value, d_v if part == "in_proj_z" else 1)
