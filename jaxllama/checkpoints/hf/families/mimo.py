"""MiMo-V2-Flash: windows with sinks and twice the key heads of the other layers.

Values are narrower than keys. ``attention_value_scale`` multiplies values, which o's weight takes.
"""

from __future__ import annotations

from jaxllama.checkpoints.hf.experts import SigmoidMixture
from jaxllama.checkpoints.hf.family import Family, Fields
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import FullAttentionConfig, ModelConfig, Multipliers
from jaxllama.model.names import Names

_EXPERTS = SigmoidMixture(256, 8, width=2048, has_types=True)
_PART = "partial_rotary_factor"


def _slides(index: int, read: JsonReader) -> bool:
    """Return whether a layer has a window: all but the first and each sixth."""
    del read
    return index > 0 and (index + 1) % 6 != 0


def _fields(read: JsonReader) -> Fields:
    width, heads = read.size("head_dim"), read.size("num_key_value_heads")
    n, types = read.size("num_hidden_layers"), read.config.get("layer_types")
    slides = [_slides(i, read) for i in range(n)]
    if isinstance(types, list):
        slides = [kind == "sliding_attention" for kind in types]
    found: Fields = {
        "d_v": read.size("v_head_dim"),
        "stored.products": Multipliers(attention_output=read.number("attention_value_scale", 1.0)),
    }
    if any(slides) and read.config.get("sliding_window_size") is not None:
        found["sliding_window"] = read.size("sliding_window_size") + 1  # and the query's own key
    if any(slides):
        found |= {"n_kv_heads": 2 * heads, "attn_sinks": True}
        found |= {} if all(slides) else {"full": FullAttentionConfig(width, heads)}
    return found


def _to_hf(cfg: ModelConfig) -> Fields:
    window, products = cfg.window_rope or cfg.rope, cfg.stored.products or Multipliers()
    named = {"full_attention": cfg.rope, "sliding_attention": window}
    return {
        "num_key_value_heads": cfg.n_kv_heads // (2 if cfg.attn_sinks else 1),
        "v_head_dim": cfg.d_v or cfg.head_dim,
        "sliding_window": cfg.sliding_window or 129,  # the class takes no null
        "attention_value_scale": products.attention_output,
        "rope_parameters": {
            name: {
                "rope_type": "default",
                "rope_theta": rope.theta,
                _PART: (rope.rotary_dim or cfg.head_dim) / cfg.head_dim,
            }
            for name, rope in named.items()
        },
    }


FAMILIES: dict[str, Family] = {
    "mimo_v2_flash": Family(
        ("MiMoV2FlashForCausalLM",),
        defaults={
            "n_shared_experts": 0,
            "attention_value_scale": 0.707,
            "v_head_dim": 128,
            "rope_theta": 5e6,
            "rope_local_base_freq": 10000.0,
            _PART: 0.334,
        },
        keys=("sliding_window_size", "scoring_func", "topk_method"),
        same=(("attention_bias", "qkv_bias", False),),
        parts=(_EXPERTS,),
        fields=_fields,
        to_hf=_to_hf,
        fixed={"scoring_func": ("sigmoid", None)},
        window=_slides,
        is_local=True,
        absent=(_PART, "rope_theta", "rope_scaling"),
        unused=("model.mtp.",),
        tensors=Names(sinks="attention_sink_bias"),
    ),
}
