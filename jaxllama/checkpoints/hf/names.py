"""The names of tensors that several families share, and those of flash-linear-attention's models.

A family's own names are its entry's ``tensors``; one without them has Llama's.
"""

from __future__ import annotations

import dataclasses

from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.mixers.delta import parameters as delta
from jaxllama.model.mixers.gla import parameters as gla
from jaxllama.model.names import Names

LLAMA = Names()
FLA = Names(embed="model.embeddings", mixer_norm="attn_norm", mixer="attn.", mlp_norm="mlp_norm")
OLMO = Names(mixer_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
GEMMA = dataclasses.replace(OLMO, mlp_norm="pre_feedforward_layernorm")
MIXTRAL = ExpertNames("block_sparse_moe.", gate_up=("w1", "w3"), down="w2")
GRANITE = ExpertNames(
    "block_sparse_moe.",
    router="router.layer",
    fused=("input_linear.weight", "output_linear.weight"),
    is_fused=True,
)
LFM2 = Names(
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    mlp="feed_forward.",
    norm="model.embedding_norm",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    o="out_proj",
    gate_up=("w1", "w3"),
    down="w2",
)
SHARED = ExpertNames(shared="shared_experts.")
# Of flash-linear-attention and of GLA's authors, by ``cfg.stored.family``.
LINEAR = {
    "gla": FLA,
    "simple_gla": FLA,
    "linear_attn": dataclasses.replace(FLA, mixers={"gla": gla.GLANames(norms=("norm",))}),
    "gla_paper": Names(
        embed="transformer.wte",
        layer="transformer.h.{}",
        mixer_norm="ln_1",
        mixer="attn.",
        mlp_norm="ln_2",
        mlp="",
        norm="transformer.ln_f",
        gate_up=("w1", "w3"),
        down="w2",
        o="out_proj",
        mixers={"gla": gla.GLANames(decay="k_gate")},
    ),
    "gated_deltanet": dataclasses.replace(FLA, mixers={"delta": delta.FLA}),
    "kda": dataclasses.replace(FLA, mixers={"delta": delta.FLA}),
    "delta_net": dataclasses.replace(FLA, mixers={"delta": delta.FLA}),
}
