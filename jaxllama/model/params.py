"""The parameters of a model: one table, read by init, sharding, loading, saving and schemes.

    param_table(cfg) -> {path: Param}     in the order of the forward pass

A path is that of the parameter tree, ("layer_0", "mixer", "qkv", "weight").  A ``Param``
(``model.param``) says where a checkpoint has it, so loading and saving are the same walk in two
directions.  Each mixer defines its own parameters (``mixers/<kind>/parameters.py``).  Another
family of names is another ``Names``; models with GLA layers have those of flash-linear-attention.
The path of a parameter determines the axis along which a mesh splits it (``split.split_axis``).

Flax modules declare them (``model.declare``).  This file imports no jax, so code that only reads a
checkpoint does not load it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping

from jaxllama.config import ModelConfig
from jaxllama.model.experts import parameters as experts
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.mixers import MIXERS
from jaxllama.model.mixers.delta import parameters as delta
from jaxllama.model.mixers.gla import parameters as gla
from jaxllama.model.mixers.ssm import parameters as ssm
from jaxllama.model.names import Names
from jaxllama.model.param import (
    Param,
    Path,
    TensorSource,
    fused,
    one,
    transposed,
    written,
)
from jaxllama.typing import ParamsDict

LLAMA = Names()
FLA = Names(embed="model.embeddings", mixer_norm="attn_norm", mixer="attn.", mlp_norm="mlp_norm")
_OLMO = Names(mixer_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
_GEMMA = dataclasses.replace(_OLMO, mlp_norm="pre_feedforward_layernorm")
_QWEN_NEXT = delta.DeltaNames(
    inputs=(("in_proj_qkvz", 4),),
    gates=(("in_proj_ba", 2),),
    grouped=("in_proj_qkvz", "in_proj_ba"),
)
_KIMI = dataclasses.replace(
    delta.FLA,
    mixer="self_attn.",
    low_rank=(("f_a_proj", "f_b_proj"), ("g_a_proj", "g_b_proj")),
    rate=(1, 1, -1, 1),
)
_MIXTRAL = ExpertNames("block_sparse_moe.", gate_up=("w1", "w3"), down="w2")
_KIMI_EXPERTS = dataclasses.replace(_MIXTRAL, shared="shared_experts.")
_GRANITE = ExpertNames(
    "block_sparse_moe.",
    router="router.layer",
    fused=("input_linear.weight", "output_linear.weight"),
    is_fused=True,
)
_ERNIE = ExpertNames(
    shared="shared_experts.", choice_bias="moe_statics.e_score_correction_bias", is_matrix=True
)
_MAMBA = Names(
    embed="backbone.embeddings",
    layer="backbone.layers.{}",
    mixer_norm="norm",
    norm="backbone.norm_f",
    mixers={"ssm": ssm.SSMNames(mixer="mixer.")},
)
_LFM2 = Names(
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
_GPT2 = Names(
    embed="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    mixer_norm="ln_1",
    mixer="attn.",
    mlp_norm="ln_2",
    norm="transformer.ln_f",
    qkv=("c_attn",),
    o="c_proj",
    gate_up=("c_fc",),
    down="c_proj",
    is_transposed=True,
)
_GPTJ = dataclasses.replace(
    _GPT2,
    qkv=Names.qkv,
    o="out_proj",
    gate_up=("fc_in",),
    down="fc_out",
    is_transposed=False,
)
_NEOX = Names(
    embed="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}",
    mixer="attention.",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("query_key_value",),
    o="dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
    is_by_head=True,
)
_OPT = Names(
    embed="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}",
    mixer_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    mlp="",
    norm="model.decoder.final_layer_norm",
    o="out_proj",
    gate_up=("fc1",),
    down="fc2",
)
_GRANITE_SHARED = Names(
    gate_up=("input_linear",),
    down="output_linear",
    mixers={"experts": dataclasses.replace(_GRANITE, shared="shared_mlp.", is_beside=True)},
)
_SHARED = ExpertNames(shared="shared_experts.")
_LFM2_EXPERTS = ExpertNames(
    "feed_forward.", gate_up=("w1", "w3"), down="w2", choice_bias="expert_bias"
)
_GPT_OSS = ExpertNames(router="router", is_fused=True, alternates=True)
# By ``cfg.stored.family``; LLAMA for those that are not here.
FAMILIES = {
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
    **dict.fromkeys(
        ("gated_deltanet", "kda", "delta_net"),
        dataclasses.replace(FLA, mixers={"delta": delta.FLA}),
    ),
    "kimi_linear": Names(
        mixers={"delta": _KIMI, "experts": _KIMI_EXPERTS}, other_mlp="block_sparse_moe."
    ),
    "glm4_moe": Names(mixers={"experts": _SHARED}),
    "qwen3_5_moe_text": Names(mixers={"delta": delta.DeltaNames()}),
    "qwen3_next": Names(mixers={"delta": _QWEN_NEXT}),
    "qwen3_5_text": Names(mixers={"delta": delta.DeltaNames()}),
    "mamba2": _MAMBA,
    "nemotron_h": dataclasses.replace(
        _MAMBA, mlp_norm="norm", mlp="mixer.", is_halved=True, mixer="mixer."
    ),
    "bamba": Names(mlp_norm="pre_ff_layernorm", mlp="feed_forward.", norm="model.final_layernorm"),
    "granitemoehybrid": Names(
        mlp="shared_mlp.",
        gate_up=("input_linear",),
        down="output_linear",
        mixers={"experts": dataclasses.replace(_GRANITE, shared="shared_mlp.", is_beside=True)},
    ),
    "phimoe": Names(mixers={"experts": _MIXTRAL}),
    "ernie4_5_moe": Names(mixers={"experts": _ERNIE}),
    "mixtral": Names(mixers={"experts": _MIXTRAL}),
    "granitemoe": Names(mixers={"experts": _GRANITE}),
    "gpt_oss": Names(mixers={"experts": _GPT_OSS}),
    "phi3": Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "glm": Names(gate_up=("gate_up_proj",)),
    "glm4": Names(gate_up=("gate_up_proj",)),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma2": _GEMMA,
    "vaultgemma": Names(mlp_norm="pre_feedforward_layernorm"),
    "exaone4": _OLMO,
    "olmo_hybrid": dataclasses.replace(
        _OLMO, mixers={"delta": dataclasses.replace(delta.FLA, mixer="linear_attn.")}
    ),
    "hyperclovax": Names(mixer_out_norm="post_norm1", mlp_out_norm="post_norm2"),
    "starcoder2": Names(gate_up=("c_fc",), down="c_proj"),
    "apertus": Names(mixer_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
    "hunyuan_v1_dense": Names(q_norm="query_layernorm", k_norm="key_layernorm"),
    "exaone": Names(
        embed="transformer.wte",
        layer="transformer.h.{}",
        mixer_norm="ln_1",
        mixer="attn.attention.",
        mlp_norm="ln_2",
        norm="transformer.ln_f",
        gate_up=("c_fc_0", "c_fc_1"),
        down="c_proj",
        o="out_proj",
    ),
    "lfm2": _LFM2,
    "lfm2_moe": dataclasses.replace(_LFM2, mixers={"experts": _LFM2_EXPERTS}),
    **dict.fromkeys(("dots1", "solar_open"), Names(mixers={"experts": _SHARED})),
    "exaone_moe": Names(
        mixers={"experts": dataclasses.replace(_SHARED, choice_bias="e_score_correction_bias")}
    ),
    "sarvam_moe": Names(
        embed="model.word_embeddings",
        mixer="attention.",
        qkv=("query_key_value",),
        q_norm="query_layernorm",
        k_norm="key_layernorm",
        o="dense",
        mixers={"experts": dataclasses.replace(_SHARED, choice_bias="gate.expert_bias")},
    ),
    "flex_olmo": _OLMO,
    "granitemoeshared": _GRANITE_SHARED,
    "granitemoe_swa": dataclasses.replace(
        _GRANITE_SHARED,
        mixers={
            "experts": ExpertNames(
                "block_sparse_moe.",
                router="router",
                is_fused=True,
                shared="shared_mlp.",
                is_beside=True,
            )
        },
    ),
    "hunyuan_v1_moe": Names(
        q_norm="query_layernorm",
        k_norm="key_layernorm",
        mixers={"experts": ExpertNames(router="gate.wg", shared="shared_mlp.")},
    ),
    "minimax_m2": Names(
        mixers={"experts": dataclasses.replace(_MIXTRAL, choice_bias="e_score_correction_bias")}
    ),
    "gpt2": _GPT2,
    "gpt-sw3": _GPT2,
    "gpt_bigcode": dataclasses.replace(_GPT2, is_transposed=False, is_by_head=True),
    "gpt_neo": dataclasses.replace(
        _GPT2, mixer="attn.attention.", qkv=Names.qkv, o="out_proj", is_transposed=False
    ),
    "gptj": _GPTJ,
    "codegen": dataclasses.replace(_GPTJ, qkv=("qkv_proj",), n_blocks=4),
    "gpt_neox": _NEOX,
    "opt": _OPT,
    "biogpt": dataclasses.replace(
        _OPT,
        embed="biogpt.embed_tokens",
        positions="biogpt.embed_positions",
        layer="biogpt.layers.{}",
        norm="biogpt.layer_norm",
        head="output_projection",
    ),
    "phi": Names(o="dense", gate_up=("fc1",), down="fc2", norm="model.final_layernorm"),
    "falcon": dataclasses.replace(
        _NEOX,
        embed="transformer.word_embeddings",
        layer="transformer.h.{}",
        mixer="self_attention.",
        norm="transformer.ln_f",
        head="lm_head",
        parallel_norms=("ln_attn", "ln_mlp"),
    ),
    "gemma3_text": _GEMMA,
}


def param_table(
    cfg: ModelConfig, present: Collection[str] = (), names: Names | None = None
) -> dict[Path, Param]:
    """See the module docstring.

    present: a checkpoint's tensors, where a family has had more than one name for a thing; without
        them the names are the library's present ones.
    names: another container's (GGUF), instead of those of the family's Hugging Face directories.
    """
    if names is None:
        names = FAMILIES.get(cfg.stored.family, FLA if "gla" in cfg.layer_types else LLAMA)
    if cfg.parallel_norms and names.parallel_norms is not None:
        first, second = names.parallel_norms
        names = dataclasses.replace(names, mixer_norm=first, mlp_norm=second)
    d, stored = cfg.d_model, cfg.stored
    table: dict[Path, Param] = {
        ("embed", "weight"): one(
            f"{names.embed}.weight", cfg.vocab_size, d, fold={"scale": stored.embed}
        )
    }
    for index, kind in enumerate(cfg.layer_types):
        (prefix, feed), layer = _halves(cfg, names, index), f"layer_{index}"
        mixer = MIXERS[kind].parameters.table(cfg, f"{prefix}.", names, present)
        is_other = f"{prefix}.{names.other_mlp}{names.gate_up[0]}.weight" in present
        mlp_prefix = names.other_mlp if is_other else names.mlp
        (pre_norms, post_norms), mlp = cfg.norms_of(index), dict[Path, Param]()
        if index not in cfg.bare_layers:
            mlp = (
                _mlp(cfg, f"{feed}.{mlp_prefix}", names, present)
                if cfg.experts_of(index) is None
                else experts.table(cfg, f"{feed}.", names, present)
            )
        norm = functools.partial(_norm, cfg)
        after = functools.partial(norm, scale=stored.residual)  # what the layer adds is multiplied
        if index == 0 and cfg.learned_positions is not None:
            places = cfg.max_position + cfg.learned_positions
            table[layer, "positions", "weight"] = one(f"{names.positions}.weight", places, d)
        if pre_norms:
            table |= norm((layer, "mixer_norm"), f"{prefix}.{names.mixer_norm}")
        table |= {(layer, "mixer", *path): param for path, param in mixer.items()}
        if post_norms:
            table |= after((layer, "mixer_out_norm"), f"{prefix}.{names.mixer_out_norm}")
        if mlp and pre_norms and (cfg.parallel_norms or not cfg.parallel_block):
            table |= norm((layer, "mlp_norm"), f"{feed}.{names.mlp_norm}")
        table |= {(layer, "mlp", *path): param for path, param in mlp.items()}
        if mlp and post_norms:
            table |= after((layer, "mlp_out_norm"), f"{feed}.{names.mlp_out_norm}")
    # A tied head has the embedding's multiplier, too.
    scale = stored.logits / (stored.embed if cfg.tie_embeddings else 1.0)
    table |= _norm(cfg, ("norm",), names.norm, scale)
    if not cfg.tie_embeddings:
        table["head", "weight"] = one(f"{names.head}.weight", cfg.vocab_size, d)
        if cfg.head_bias:
            table["head", "bias"] = one(f"{names.head}.bias", cfg.vocab_size, std=0.0)
    if cfg.mtp_layers:
        table |= _mtp(cfg, names, present)
    return table


def _halves(cfg: ModelConfig, names: Names, index: int) -> tuple[str, str]:
    """The prefixes of a layer's mixer and of its feed-forward."""
    if not names.is_halved:
        return names.layer.format(index), names.layer.format(index)
    first = 2 * index - sum(bare < index for bare in cfg.bare_layers)
    return names.layer.format(first), names.layer.format(first + 1)


def _mtp(cfg: ModelConfig, names: Names, present: Collection[str]) -> dict[Path, Param]:
    """The head for multi-token prediction; embedding and last product are the model's."""
    head = names.mtp
    own = dataclasses.replace(names, layer=head.layer, norm=head.norm)
    rest = param_table(cfg.mtp_config(), present, own)
    table = {
        **_norm(cfg, ("mtp", "embed_norm"), head.embed_norm),
        **_norm(cfg, ("mtp", "hidden_norm"), head.hidden_norm),
        ("mtp", "fc", "weight"): one(f"{head.fc}.weight", cfg.d_model, 2 * cfg.d_model),
    }
    layer = {path: param for path, param in rest.items() if path[0] in ("layer_0", "norm")}
    return table | {("mtp", *path): param for path, param in layer.items()}


def _norm(cfg: ModelConfig, path: Path, name: str, scale: float = 1.0) -> dict[Path, Param]:
    """A norm of the stream; the checkpoint's weight w stands for ``scale * (w + norm_offset)``."""
    if not cfg.norm_weight:
        return {(*path, "weight"): Param((), (cfg.d_model,), mean=scale, std=0.0)}
    fold = {"scale": scale, "offset": scale * cfg.stored.norm_offset}
    weight = one(f"{name}.weight", cfg.d_model, mean=1.0, std=0.0, fold=fold)
    table = {(*path, "weight"): weight}
    if cfg.norm_bias:
        bias = one(f"{name}.bias", cfg.d_model, std=0.0, fold={"scale": scale})
        table[*path, "bias"] = bias
    return table


def _mlp(
    cfg: ModelConfig, prefix: str, names: Names, present: Collection[str]
) -> dict[Path, Param]:
    """gate and up fused by rows, and down.  Old checkpoints of flash-linear-attention have both in
    one tensor, too."""
    down, residual, d = f"{prefix}{names.down}", cfg.product_scale, cfg.d_model
    last = written("down", down, d, cfg.d_ff, cfg.mlp_bias, residual, names.is_transposed)
    if not cfg.gated_mlp:
        order = transposed(cfg.d_ff) if names.is_transposed else {}
        up = fused("up", [(f"{prefix}{names.gate_up[-1]}", cfg.d_ff, order)], d, cfg.mlp_bias)
        if cfg.activation == "xielu":
            shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
            scalars = (TensorSource(f"{prefix}act_fn.{key}", one) for key, one in shapes.items())
            up["xielu", "weight"] = Param(tuple(scalars), (4,), mean=0.2)
        return up | last
    gate_up = [f"{prefix}{name}" for name in names.gate_up]
    if f"{gate_up[0]}.weight" in present and f"{gate_up[-1]}.weight" not in present:
        gate_up = gate_up[:1]
    parts = [(name, 2 * cfg.d_ff // len(gate_up), {}) for name in gate_up]
    return fused("gate_up", parts, cfg.d_model, cfg.mlp_bias) | last


def nested(table: Mapping[Path, object]) -> ParamsDict:
    """A tree of dicts out of a dict by path."""
    tree: ParamsDict = {}
    for path, value in table.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree
