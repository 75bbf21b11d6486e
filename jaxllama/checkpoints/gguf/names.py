"""GGUF's names of tensors, in the terms of ``model.names``: ``param_tensors(arch, cfg, present)``.

Reading and writing use the same table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from jaxllama.checkpoints.gguf.architectures import GGUFArchitecture
from jaxllama.checkpoints.hf.tables import names_of
from jaxllama.config import ModelConfig
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.mixers.delta.parameters import DeltaNames
from jaxllama.model.mixers.latent.parameters import LatentNames
from jaxllama.model.mixers.short_conv.parameters import ShortConvNames
from jaxllama.model.mixers.ssm.parameters import SSMNames
from jaxllama.model.names import MTPNames, Names
from jaxllama.model.param import Param
from jaxllama.model.param import Path as TreePath
from jaxllama.model.params import param_table

_NAMES = Names(
    embed="token_embd",
    layer="blk.{}",
    mixer_norm="attn_norm",
    mixer="attn_",
    mixer_out_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    mlp="ffn_",
    mlp_out_norm="post_ffw_norm",
    norm="output_norm",
    head="output",
    qkv=("q", "k", "v"),
    gate_up=("gate", "up"),
    o="output",
    down="down",
    sinks="sinks.weight",
)
_EXPERTS = ExpertNames(
    "",
    router="ffn_gate_inp",
    gate_up=("ffn_gate_exps", "ffn_up_exps"),
    down="ffn_down_exps",
    is_apart=True,
    shared="",
    shared_parts=("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"),
    shared_gate="ffn_gate_inp_shexp",
    choice_bias="exp_probs_b.bias",
)
# llama.cpp's conversion counts value heads across the key heads first, and stores -exp(A_log).
_DELTA = DeltaNames(
    mixer="",
    inputs=(("attn_qkv", 3), ("attn_gate", 1)),
    gates=(("ssm_beta", 1), ("ssm_alpha", 1)),
    conv=(("ssm_conv1d", 3),),
    norm="ssm_norm",
    o="ssm_out",
    a_log="ssm_a",
    dt_bias="ssm_dt.bias",
    tiled=True,
    flat_conv=True,
    is_rate=True,
)
# Qwen3-Next's are counted as the model counts them, with beta and decay of each key head together.
_DELTA_NEXT = dataclasses.replace(
    _DELTA, gates=(("ssm_ba", 2),), grouped=("ssm_in", "ssm_ba"), tiled=False
)
_KDA = dataclasses.replace(
    _DELTA,
    inputs=(("attn_q", 1), ("attn_k", 1), ("attn_v", 1)),
    gates=(("ssm_beta", 1),),
    conv=tuple((f"ssm_conv1d_{name}", 1) for name in "qkv"),
    low_rank=(("ssm_f_a", "ssm_f_b"), ("ssm_g_a", "ssm_g_b")),
    rate=(-1, 1),
    o="attn_output",
    tiled=False,
    flat_conv=False,
)
_SSM = SSMNames(
    mixer="",
    inputs="ssm_in",
    conv="ssm_conv1d",
    norm="ssm_norm",
    o="ssm_out",
    a_log="ssm_a",
    dt_bias="ssm_dt.bias",
    skip="ssm_d",
    is_gguf=True,
)
_SHORT_CONV = ShortConvNames(mixer="shortconv.", is_flat=True)
_LATENT = LatentNames(q="q", kv_a="kv_a_mqa", kv_norm="kv_a_norm", kv_b=("kv_b",))


def param_tensors(
    arch: GGUFArchitecture, cfg: ModelConfig, present: Collection[str] = ()
) -> dict[TreePath, Param]:
    """Return the parameters of ``cfg`` and a file's tensors of each.

    ``cfg.stored`` describes the family's Hugging Face directories. A GGUF file has its offsets
    folded already, and an order of its own for the features that RoPE rotates.

    present: the names of a file's tensors, because files differ in which matrices they join.
    Without them the tensors are those of a file that jaxllama writes.
    """
    is_gated = len(names_of(cfg, {}).gate_up) > 1
    if present:
        is_gated = any(name.endswith(".ffn_gate.weight") for name in present)
    is_fused = is_fused_qkv(present, cfg)
    experts, delta = _EXPERTS, _DELTA
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in present):
        experts = dataclasses.replace(_EXPERTS, gate_up=("ffn_gate_up_exps",))
    if arch.by_key_head:
        is_whole = any(name.endswith(".ssm_in.weight") for name in present)
        inputs = (("ssm_in", 4),) if is_whole else _DELTA.inputs
        delta = dataclasses.replace(_DELTA_NEXT, inputs=inputs)
    latent = _LATENT
    if cfg.latent is not None:
        delta = _KDA
        if any(name.endswith(".attn_k_b.weight") for name in present):
            latent = dataclasses.replace(_LATENT, kv_b=("k_b", "v_b"))
    norm = _NAMES.norm
    if arch.mixer == "short_conv" and f"{norm}.weight" not in present:
        norm = "token_embd_norm"
    kinds = {"delta": delta, "experts": experts, "latent": latent}
    nextn = f"blk.{cfg.n_layers}"
    names = dataclasses.replace(
        _NAMES,
        mlp_norm=arch.mlp_norm,
        qkv=("qkv",) if is_fused else _NAMES.qkv,
        gate_up=_NAMES.gate_up if is_gated else ("up",),
        mixers={**kinds, "ssm": _SSM, "short_conv": _SHORT_CONV},
        norm=norm,
        mtp=MTPNames(
            layer=nextn,
            embed_norm=f"{nextn}.nextn.enorm",
            hidden_norm=f"{nextn}.nextn.hnorm",
            fc=f"{nextn}.nextn.eh_proj",
            norm=f"{nextn}.nextn.shared_head_norm",
        ),
    )
    stored = dataclasses.replace(cfg.stored, norm_offset=0.0, interleaved=arch.interleaved)
    return param_table(cfg.replace(stored=stored), names=names)


def is_fused_qkv(present: Collection[str], cfg: ModelConfig) -> bool:
    """Return whether a file has q, k and v of attention in one tensor."""
    return "blk.0.attn_qkv.weight" in present and cfg.delta is None
