"""Families that have attention and Mamba-2 in one layer of the file: Falcon-H1 and Zamba2.

Each such layer is two of ours, the second of which is among ``ModelConfig.beside_layers``.
"""

from __future__ import annotations

import dataclasses

from jaxllama.checkpoints.hf.family import BIAS, MLP_BIAS, Family, Fields
from jaxllama.checkpoints.hf.mamba import MambaKeys, options_of
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import UNMULTIPLIED, ModelConfig, Multipliers, SharedBlocks
from jaxllama.errors import JaxLlamaError
from jaxllama.model.names import Names

_FALCON = MambaKeys()


def _numbers(read: JsonReader, key: str, count: int) -> tuple[float, ...]:
    """Return a list of multipliers; ones where the key is missing."""
    value = read.config.get(key)
    if value is None:
        return (1.0,) * count
    is_list = isinstance(value, list | tuple) and len(value) == count
    if not is_list or not all(type(number) in (int, float) for number in value):
        raise read.error(key, f"expected {count} numbers")
    return tuple(map(float, value))


def _falcon_h1(read: JsonReader) -> Fields:
    """Return the fields of Falcon-H1: a layer of the file is one of attention, without a
    feed-forward, and one of Mamba-2 beside it."""
    n, n_heads = read.size("num_hidden_layers"), read.size("mamba_n_heads", 128)
    width = read.config.get("mamba_d_ssm", 1024)
    if width is None:
        width = read.size("mamba_expand", 2) * read.size("hidden_size")
    head_dim = read.config.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = width // n_heads if type(width) is int else 0
    if type(head_dim) is not int or head_dim * n_heads != width:
        raise read.error("mamba_d_head", f"times mamba_n_heads must be the width ({width!r})")
    norm = "none"
    if read.flag("mamba_rms_norm", False):
        norm = "norm_first" if read.flag("mamba_norm_before_gate", True) else "gate_first"
    found = _FALCON.fields(JsonReader({**read.config, "mamba_d_head": head_dim}), norm)
    o_bias = read.flag("projectors_bias", False)
    if o_bias != found["mixers"]["ssm"]["bias"]:
        found["mixers"]["ssm"]["o_bias"] = o_bias
    gate, down = _numbers(read, "mlp_multipliers", 2)
    products = Multipliers(
        attention_input=read.number("attention_in_multiplier", 1.0),
        key=read.number("key_multiplier", 1.0),
        attention_output=read.number("attention_out_multiplier", 1.0),
        ssm_input=read.number("ssm_in_multiplier", 1.0),
        ssm_parts=_numbers(read, "ssm_multipliers", 5),
        ssm_output=read.number("ssm_out_multiplier", 1.0),
        gate=gate,
        down=down,
    )
    return {
        **found,
        "n_layers": 2 * n,
        "layer_types": ("attention", "ssm") * n,
        "bare_layers": tuple(range(0, 2 * n, 2)),
        "beside_layers": tuple(range(1, 2 * n, 2)),
        "stored.products": None if products == UNMULTIPLIED else products,
    }


def _falcon_h1_to_hf(cfg: ModelConfig) -> Fields:
    """Return the keys of Falcon-H1.  Raises JaxLlamaError where the layers are no pairs."""
    if cfg.layer_types != ("attention", "ssm") * (cfg.n_layers // 2):
        raise JaxLlamaError("layer_types: this family has pairs of attention and Mamba-2")
    ssm, products = options_of(cfg), cfg.stored.products or UNMULTIPLIED
    return {
        **_FALCON.to_hf(cfg),
        "num_hidden_layers": cfg.n_layers // 2,
        "mamba_d_ssm": ssm.width,
        "mamba_rms_norm": ssm.norm != "none",
        "mamba_norm_before_gate": ssm.norm != "gate_first",
        "projectors_bias": ssm.has_o_bias,
        "attention_in_multiplier": products.attention_input,
        "key_multiplier": products.key,
        "attention_out_multiplier": products.attention_output,
        "ssm_in_multiplier": products.ssm_input,
        "ssm_multipliers": list(products.ssm_parts),
        "ssm_out_multiplier": products.ssm_output,
        "mlp_multipliers": [products.gate, products.down],
    }


_ZAMBA = dataclasses.replace(
    _FALCON,
    n_heads=("n_mamba_heads", 8),
    head_dim=("mamba_headdim", None),
    state=("mamba_d_state", 64),
    n_groups=("mamba_ngroups", 1),
    conv_bias=("use_conv_bias", True),
    bias=("add_bias_linear", False),
    least=("time_step_min", 0.001),
)
_ZAMBA_KINDS = {"hybrid": "hybrid", "linear_attention": "ssm", "mamba": "ssm"}


def _zamba_types(read: JsonReader) -> list[str]:
    """Return the kinds of a file's layers, "hybrid" or "ssm"."""
    n = read.size("num_hidden_layers")
    types = read.config.get("layers_block_type") or read.config.get("layer_types")
    if types is None:
        plain = ["ssm"] * 5 + ["hybrid"]
        types = ["ssm", *plain * 7, *["ssm"] * 4, "hybrid", *["ssm"] * 3, "hybrid", "ssm", "ssm"]
    else:
        found = types if isinstance(types, list) else []
        types = [_ZAMBA_KINDS.get(kind, "") for kind in found if isinstance(kind, str)]
    if len(types) != n or "" in types:
        raise read.error("layers_block_type", f"must be {n} entries of linear_attention, hybrid")
    return types


def _zamba2(read: JsonReader) -> Fields:
    """Return the fields of Zamba2: a hybrid layer of the file is one of attention, whose block
    several share, and one of Mamba-2 that reads its output beside the stream."""
    d_model, n_heads = read.size("hidden_size"), read.size("num_attention_heads")
    whole, mamba_heads = read.size("mamba_expand", 2) * d_model, read.size("n_mamba_heads", 8)
    if whole % mamba_heads:
        raise read.error("n_mamba_heads", f"must divide the {whole} features of the heads")
    if 2 * d_model % n_heads:
        raise read.error("num_attention_heads", f"must divide twice hidden_size ({2 * d_model})")
    head_dim = whole // mamba_heads
    found = _ZAMBA.fields(JsonReader({**read.config, "mamba_headdim": head_dim}))
    found["mixers"]["ssm"] |= {"norm_eps": 1e-5, "conv_bias": True}
    types: list[str] = []
    beside: list[int] = []
    for kind in _zamba_types(read):
        if kind == "hybrid":
            types.append("attention")
            beside.append(len(types))
        types.append("ssm")
    n = len(types)
    if not beside:
        raise read.error("layers_block_type", "has no hybrid layer")
    return {
        **found,
        "n_layers": n,
        "layer_types": tuple(types),
        "head_dim": 2 * d_model // n_heads,
        "d_ff": read.size("intermediate_size", 4 * d_model),
        "bare_layers": tuple(i for i, kind in enumerate(types) if kind == "ssm"),
        "beside_layers": tuple(beside),
        "nope_layers": () if read.flag("use_mem_rope", False) else tuple(range(n)),
        "shared_blocks": SharedBlocks(
            count=read.size("num_mem_blocks", 1),
            rank=read.size("adapter_rank", 128),
            attention_adapters=read.flag("use_shared_attention_adapter", False),
        ),
        "stored.query": 2**0.5,
    }


def _zamba2_to_hf(cfg: ModelConfig) -> Fields:
    """Return the keys of Zamba2.  Raises JaxLlamaError where no blocks are shared."""
    shared = cfg.shared_blocks
    if shared is None:
        raise JaxLlamaError("shared_blocks: this family's layers of attention have them")
    kinds = ["linear_attention"] * cfg.n_layers
    for index in cfg.beside_layers:
        kinds[index] = "hybrid"
    types = [kind for i, kind in enumerate(kinds) if cfg.layer_types[i] == "ssm"]
    return {
        **_ZAMBA.to_hf(cfg),
        "num_hidden_layers": len(types),
        "layers_block_type": types,
        "num_mem_blocks": shared.count,
        "adapter_rank": shared.rank,
        "use_shared_attention_adapter": shared.attention_adapters,
        "use_mem_rope": len(cfg.nope_layers) != cfg.n_layers,
    }


FAMILIES: dict[str, Family] = {
    "zamba2": Family(
        ("Zamba2ForCausalLM",),
        defaults={"num_hidden_layers": 54},
        keys=(
            *_ZAMBA.keys,
            "layers_block_type",
            "layer_types",
            "num_mem_blocks",
            "adapter_rank",
            "use_shared_attention_adapter",
            "use_mem_rope",
            "use_mem_eff_path",
            "attention_head_dim",
            "attention_hidden_size",
            "hybrid_layer_ids",
            "kv_channels",
            "num_query_groups",
        ),
        same=(("add_bias_linear", "mlp_bias", False),),
        fields=_zamba2,
        to_hf=_zamba2_to_hf,
        # Without it transformers shares no blocks.
        fixed={"use_long_context": (False, None), "tie_word_embeddings": (True, None)},
        derived=lambda read: {
            "head_dim": 2 * read.size("hidden_size") // read.size("num_attention_heads"),
            "intermediate_size": 4 * read.size("hidden_size"),
        },
        tensors=Names(
            mlp_norm="pre_ff_layernorm",
            mlp="feed_forward.",
            norm="model.final_layernorm",
            gate_up=("gate_up_proj",),
            shared="shared_transformer.",
            reads=".mamba_decoder",
        ),
    ),
    "falcon_h1": Family(
        ("FalconH1ForCausalLM",),
        keys=(
            *_FALCON.keys,
            "mamba_d_ssm",
            "mamba_rms_norm",
            "mamba_norm_before_gate",
            "projectors_bias",
            "attention_in_multiplier",
            "key_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_multipliers",
            "ssm_out_multiplier",
            "mlp_multipliers",
        ),
        same=(
            *BIAS,
            *MLP_BIAS,
            ("embedding_multiplier", "stored.embed", 1.0),
            ("lm_head_multiplier", "stored.logits", 1.0),
        ),
        fields=_falcon_h1,
        to_hf=_falcon_h1_to_hf,
        tensors=Names(
            mlp_norm="pre_ff_layernorm",
            mlp="feed_forward.",
            norm="model.final_layernorm",
            is_paired=True,
        ),
    ),
}
