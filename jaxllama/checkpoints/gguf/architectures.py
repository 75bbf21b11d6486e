"""GGUF's architectures: a table from ``general.architecture`` to a family and its peculiarities.

Metadata is translated to a config.json of the family, so that only ``hf.families`` interprets it.
The facts come from llama.cpp's conversion and loader: which architectures rotate neighbouring
features, the patterns of windows, and the names that differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Literal

from jaxllama.typing import JsonMapping, JsonObject

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class GGUFArchitecture:
    """A GGUF architecture.

    family: the family whose config.json the metadata describes. windowed: the family of files with
    a sliding window, None if there are none. interleaved: whether RoPE rotates features 2i and 2i +
    1 of the stored q and k. keys: further metadata -> the key of config.json. more: (sizes) -> keys
    that the file does not have. mixture: the family of files with experts, None if there are none.
    experts: their metadata -> the key of config.json. gating: llama.cpp's number of the router's
    scores: 1 softmax, 2 sigmoid, 3 softmax of the chosen. shared_mixture: the family of files whose
    experts have a shared one beside them. read: keys of config.json that follow from the tensors'
    names. local_theta: default of the sliding layers' theta. needs_window: whether a file without a
    window is refused, and may_lack_window: whether the family's default stands for a missing one.
    has_still: whether files may have no positions, which is refused. by_key_head: whether beta and
    decay of the delta rule are together by key head. rope: further keys of a scaling. mlp_norm:
    name of the norm before the feed-forward. has_mtp: whether the file may have a head for
    multi-token prediction behind its
    layers. ignores_mtp: whether such heads are left out. mixer: the kind of the layers beside plain
    attention. biases: those of "o" and "mlp" that llama.cpp reads. tied: whether it has no head but
    the embedding (True), or none but its own (False); None if a file may have either. has_groups:
    whether it reads fewer kv heads than query heads. patterned: the family that differs from
    ``windowed`` in the pattern of its windows.
    """

    family: str
    windowed: str | None = None
    interleaved: bool = False
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: Callable[[JsonMapping], JsonObject] | None = None
    mlp_norm: str = "ffn_norm"
    has_mtp: bool = False
    ignores_mtp: bool = False
    mixer: Literal["", "delta", "latent", "ssm", "short_conv"] = ""
    shared_mixture: str = ""
    read: Callable[[Collection[str]], JsonObject] | None = None
    local_theta: float | None = None
    needs_window: bool = False
    may_lack_window: bool = False
    has_still: bool = False
    by_key_head: bool = False
    rope: JsonMapping = dataclasses.field(default_factory=dict)
    mixture: str | None = None
    experts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gating: int = SOFTMAX
    biases: tuple[str, ...] = ()
    tied: bool | None = None
    has_groups: bool = True
    patterned: str | None = None


def _gemma(largest: int) -> Callable[[JsonMapping], JsonObject]:
    """Return a function for q's scale; the 27B ones have the most layers."""

    def more(sizes: JsonMapping) -> JsonObject:
        is_largest = sizes["num_hidden_layers"] == largest
        wide = sizes["hidden_size"] // sizes["num_attention_heads"]
        return {"query_pre_attn_scalar": wide if is_largest else sizes["head_dim"]}

    return more


_LOCAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_COUNTED = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_WIDE = {**_COUNTED, **_WIDTH}
_SHARED_WIDTH = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_GLM_EXPERTS = {
    **_WIDTH,
    **_GROUPS,
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_GLM_DEFAULTS = {
    "n_shared_experts": 0,
    "norm_topk_prob": False,
    "first_k_dense_replace": 0,
}
_KIMI_EXPERTS = {
    **_WIDTH,
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_token",
    "expert_shared_count": "num_shared_experts",
    "expert_group_count": "num_expert_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "moe_renormalize",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_KIMI_DEFAULTS = {
    "num_shared_experts": 0,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}
_ERNIE_EXPERTS = {
    **_WIDTH,
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_shared_count": "moe_num_shared_experts",
    "interleave_moe_layer_step": "moe_layer_interval",
    "leading_dense_block_count": "moe_layer_start_index",
}
_ERNIE_DEFAULTS = {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}
_LOGIT_SCALE = {"logit_scale": "logit_scale"}
_SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}
_GRANITE = GGUFArchitecture(
    "granite",
    interleaved=True,
    keys={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    },
    more=lambda sizes: {"attention_multiplier": sizes["head_dim"] ** -0.5},
    biases=("o", "mlp"),
)
_DELTA = GGUFArchitecture(
    "qwen3_5_text",
    keys={
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads",
        "ssm.time_step_rank": "linear_num_value_heads",
        "ssm.inner_size": "linear_value_head_dim",
        "full_attention_interval": "full_attention_interval",
    },
    mlp_norm="post_attention_norm",
    has_mtp=True,
    mixer="delta",
)
_LFM2 = GGUFArchitecture(
    "lfm2",
    keys={"shortconv.l_cache": "conv_L_cache"},
    mixer="short_conv",
    more=lambda sizes: {"block_auto_adjust_ff_dim": False},
)
ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        "llama",
        windowed="mistral",
        patterned="ministral",
        interleaved=True,
        mixture="mixtral",
        experts=_LOCAL,
        biases=("o", "mlp"),
    ),
    "qwen2": GGUFArchitecture("qwen2", windowed="qwen2"),
    "qwen3": GGUFArchitecture("qwen3", windowed="qwen3"),
    "olmoe": GGUFArchitecture(
        "olmoe", mixture="olmoe", experts=_COUNTED, tied=False, has_groups=False
    ),
    "qwen2moe": GGUFArchitecture(
        "qwen2_moe", mixture="qwen2_moe", experts={**_WIDE, **_SHARED_WIDTH}, tied=False
    ),
    "qwen3moe": GGUFArchitecture(
        "qwen3_moe", mixture="qwen3_moe", experts=_WIDE, more=lambda sizes: {"norm_topk_prob": True}
    ),
    "gpt-oss": GGUFArchitecture(
        "gpt_oss",
        windowed="gpt_oss",
        mixture="gpt_oss",
        experts={**_LOCAL, "expert_feed_forward_length": "intermediate_size"},
        gating=SOFTMAX_OF_CHOSEN,
        mlp_norm="post_attention_norm",
        rope={"truncate": False},  # which no key says
        biases=("o",),
        tied=False,
    ),
    "phi3": GGUFArchitecture("phi3", windowed="phi3"),
    "internlm2": GGUFArchitecture("llama", interleaved=True),
    "smollm3": GGUFArchitecture("smollm3", interleaved=True),
    "phimoe": GGUFArchitecture(
        "phimoe", windowed="phimoe", mixture="phimoe", experts=_LOCAL, biases=("o",), tied=False
    ),
    "granite": dataclasses.replace(_GRANITE, has_still=True),
    "granitemoe": dataclasses.replace(
        _GRANITE,
        mixture="granitemoe",
        experts={**_LOCAL, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        shared_mixture="granitemoeshared",
    ),
    "granitehybrid": dataclasses.replace(
        _GRANITE,
        family="granitemoehybrid",
        keys={
            **_GRANITE.keys,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
            "ssm.inner_size": "mamba_d_head",
        },
        mixture="granitemoehybrid",
        experts=_LOCAL,
        mixer="ssm",
        more=lambda sizes: {
            "attention_multiplier": sizes["head_dim"] ** -0.5,
            "shared_intermediate_size": sizes["intermediate_size"],
            "num_local_experts": 0,
        },
    ),
    "seed_oss": GGUFArchitecture("seed_oss", mlp_norm="post_attention_norm"),
    "ernie4_5": GGUFArchitecture("ernie4_5", interleaved=True, biases=("o",)),
    "ernie4_5-moe": GGUFArchitecture(
        "ernie4_5_moe",
        interleaved=True,
        mixture="ernie4_5_moe",
        experts=_ERNIE_EXPERTS,
        more=lambda sizes: _ERNIE_DEFAULTS,
    ),
    "olmo2": GGUFArchitecture("olmo2", windowed="olmo3", tied=False),
    "gemma2": GGUFArchitecture(
        "gemma2",
        windowed="gemma2",
        keys={**_SOFTCAP, "attn_logit_softcapping": "attn_logit_softcapping"},
        more=_gemma(46),
        may_lack_window=True,
        tied=True,
    ),
    "gemma3": GGUFArchitecture(
        "gemma3_text", windowed="gemma3_text", keys=_SOFTCAP, more=_gemma(62), local_theta=10000.0
    ),
    "chatglm": GGUFArchitecture("glm", interleaved=True),
    "glm4": GGUFArchitecture("glm4", interleaved=True),
    "glm4moe": GGUFArchitecture(
        "glm4_moe",
        mlp_norm="post_attention_norm",
        ignores_mtp=True,
        mixture="glm4_moe",
        experts=_GLM_EXPERTS,
        gating=SIGMOID,
        more=lambda sizes: _GLM_DEFAULTS,
        read=lambda names: {"use_qk_norm": "blk.0.attn_q_norm.weight" in names},
    ),
    "stablelm": GGUFArchitecture(
        "stablelm",  # The key of parallel sublayers is True even if config.json had no value.
        read=lambda names: {"use_parallel_residual": "blk.0.ffn_norm.weight" not in names},
        tied=False,
    ),
    "command-r": GGUFArchitecture(
        "cohere",
        interleaved=True,
        keys=_LOGIT_SCALE,
        more=lambda sizes: {"logit_scale": 1.0},
        tied=True,
    ),
    "cohere2": GGUFArchitecture(
        "cohere2",
        windowed="cohere2",
        interleaved=True,
        keys=_LOGIT_SCALE,
        needs_window=True,
        tied=True,
    ),
    "lfm2": _LFM2,
    "lfm2moe": dataclasses.replace(
        _LFM2,
        family="lfm2_moe",
        mixture="lfm2_moe",
        experts={**_WIDE, **_GROUPS, "leading_dense_block_count": "num_dense_layers"},
        gating=SIGMOID,
        more=lambda sizes: {"norm_topk_prob": True, "num_dense_layers": 0},
    ),
    "kimi-linear": GGUFArchitecture(
        "kimi_linear",
        mixture="kimi_linear",
        keys={
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length_mla": "qk_nope_head_dim",
            "attention.value_length_mla": "v_head_dim",
            "kda.head_dim": "linear_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
        },
        experts=_KIMI_EXPERTS,
        gating=SIGMOID,
        mixer="latent",
        more=lambda sizes: _KIMI_DEFAULTS,
    ),
    "qwen35": _DELTA,
    "qwen35moe": dataclasses.replace(
        _DELTA,
        family="qwen3_5_moe_text",
        mixture="qwen3_5_moe_text",
        experts={**_WIDE, **_SHARED_WIDTH},
    ),
    "qwen3next": dataclasses.replace(
        _DELTA,
        family="qwen3_next",
        by_key_head=True,
        mixture="qwen3_next",
        experts={**_WIDE, **_SHARED_WIDTH},
        more=lambda sizes: {"norm_topk_prob": True},
    ),
}
