"""RoPE of a ``config.json`` <-> RopeConfig.

    rope, window_rope = ropes(kind, read, head_dim, max_position)
    entry             = rope_scaling(rope)

It is read in both spellings: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters`` of
transformers 5, which may have an entry for each kind of layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from jaxllama.checkpoints.hf.families import FAMILIES
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import RopeConfig
from jaxllama.typing import JsonMapping, JsonObject


def ropes(
    kind: str, top: JsonReader, head_dim: int, max_position: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """Return (RoPE of all layers, RoPE of sliding layers if they have their own)."""
    config, family = top.config, FAMILIES[kind]
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if isinstance(config.get("rope_parameters"), Mapping) and family.is_local:
        key, scaling = "rope_parameters", config["rope_parameters"]
    if not isinstance(scaling, Mapping):
        raise top.error(key, "expected an object")
    theta = top.number("rope_theta")
    local: JsonMapping = {}
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    if nested:  # one entry for each kind of layer, as transformers 5 may write it
        full = scaling.get("full_attention") or {}
        local = scaling.get("sliding_attention") or {}
        if not all(isinstance(entry, Mapping) for entry in (full, local)):
            raise top.error(key, "expected an object of objects")
        if not family.is_local:
            if len(nested) < len(scaling) or any(entry != nested[0] for entry in nested):
                raise top.error(key, "RoPE that differs between layers is not supported")
            full = nested[0]
        scaling = full
    width = head_dim if family.full_width is None else family.full_width(top)
    rope = _rope(kind, top, JsonReader(scaling, f"{key}."), theta, width, max_position)
    if not family.is_local:
        return rope, None
    theta = top.number("rope_local_base_freq", family.defaults["rope_theta"])
    window_rope = _rope(kind, top, JsonReader(local, f"{key}."), theta, head_dim, max_position)
    return rope, None if window_rope == rope else window_rope


def _rope(
    family: str, top: JsonReader, read: JsonReader, theta: float, head_dim: int, max_position: int
) -> RopeConfig:
    scaling = read.config
    theta = read.number("rope_theta", theta)
    if theta <= 1.0:
        raise (read if scaling.get("rope_theta") else top).error("rope_theta", "must exceed 1")
    share = read.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    is_part = share != 1 and bool(FAMILIES[family].turning)
    if is_part and share * (top.size("qk_nope_head_dim") + head_dim) == head_dim:
        share = 1.0  # of a whole key, where head_dim is the part that turns
    turning = int(head_dim * share)
    said_by = top if scaling.get("partial_rotary_factor") is None else read
    type_key = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = read.text(type_key, "default")
    if kind == "proportional" and FAMILIES[family].full_width is not None and 0 <= share <= 1:
        pairs = int(share * head_dim // 2)
        return RopeConfig(theta, kind, read.positive("factor", 1.0), rotary_dim=2 * pairs)
    if share != 1 and "partial_rotary_factor" not in FAMILIES[family].defaults:
        raise said_by.error("partial_rotary_factor", "only 1.0 is supported")
    if not 0 < share <= 1 or turning % 2 or not turning:
        raise said_by.error(
            "partial_rotary_factor", f"must leave 2 to {head_dim} features, in twos"
        )
    beta = read.number("llama_4_scaling_beta", 0.0)
    build = functools.partial(
        RopeConfig, theta, rotary_dim=None if share == 1 else turning, query_beta=beta
    )
    kind = FAMILIES[family].rope_kinds.get(kind, kind)
    if kind == "default":
        return build()
    if kind == "linear":
        return build("linear", read.positive("factor"))
    if kind == "dynamic" and scaling.get("alpha") is not None:  # HunYuan's static form
        if head_dim <= 2:
            raise read.error("alpha", "needs heads of more than 2 features")
        alpha = read.positive("alpha") ** (head_dim / (head_dim - 2))
        return RopeConfig(theta * alpha, rotary_dim=None if share == 1 else turning)
    if kind == "dynamic":
        return build("dynamic", read.positive("factor"), max_position)
    if kind not in ("llama3", "yarn", "longrope"):
        supported = "default, linear, dynamic, llama3, yarn, longrope"
        raise read.error(type_key, f"not supported; supported: {supported}")
    original_key = "original_max_position_embeddings"
    original = read.size(original_key, max_position)
    original = top.size(original_key, original)
    if kind == "llama3":
        return build(
            "llama3",
            read.positive("factor"),
            original,
            low_freq_factor=read.positive("low_freq_factor"),
            high_freq_factor=read.positive("high_freq_factor"),
        )
    if kind == "longrope":
        return build(
            "longrope",
            read.positive("factor", max_position / original),
            original,
            attention_factor=_amplitude(family, read),
            short_factor=_factors(read, "short_factor", turning),
            long_factor=_factors(read, "long_factor", turning),
        )
    return build(
        "yarn",
        read.positive("factor", max_position / original),
        original,
        # As in transformers, zero counts as absent here.
        beta_fast=read.number("beta_fast", 32.0) or 32.0,
        beta_slow=read.number("beta_slow", 1.0) or 1.0,
        attention_factor=read.number("attention_factor", None),
        mscale=read.number("mscale", None),
        mscale_all_dim=read.number("mscale_all_dim", None),
        truncate=read.flag("truncate", True),
    )


def _amplitude(family: str, read: JsonReader) -> float | None:
    """Return longrope's multiplier of cos and sin, None for its own formula."""
    keys = FAMILIES[family].amplitude
    if len(keys) == 1:
        return read.number(keys[0], None)
    first, *others = (read.positive(key) for key in keys)
    if others != [first]:
        raise read.error(
            keys[-1], f"differs from {keys[0]} ({first}); unequal values are not supported"
        )
    return first


def _factors(read: JsonReader, key: str, turning: int) -> tuple[float, ...]:
    values = read.config.get(key)
    if not isinstance(values, list):
        values = []
    if len(values) != turning // 2 or not all(
        type(x) in (int, float) and 0 < x < 1e30 for x in values
    ):
        raise read.error(key, f"expected {turning // 2} positive numbers")
    return tuple(map(float, values))


def rope_scaling(rope: RopeConfig, head_dim: int) -> JsonObject | None:
    """Return the entry ``rope_scaling`` of a config.json; None for plain RoPE."""
    if rope.scaling == "none":
        return None
    result: JsonObject = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "proportional":
        result["partial_rotary_factor"] = (rope.rotary_dim or 0) / head_dim
        result |= {} if rope.factor != 1.0 else {"factor": None}
        result = {key: value for key, value in result.items() if value is not None}
    if rope.scaling in ("llama3", "yarn", "longrope"):
        result["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        result["low_freq_factor"] = rope.low_freq_factor
        result["high_freq_factor"] = rope.high_freq_factor
    if rope.scaling == "longrope":
        result |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
        result |= (
            {} if rope.attention_factor is None else {"attention_factor": rope.attention_factor}
        )
    if rope.scaling == "yarn":
        keys = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
        values = {key: getattr(rope, key) for key in keys}
        result |= {key: value for key, value in values.items() if value is not None}
        result |= {} if rope.truncate else {"truncate": False}
        result |= {"llama_4_scaling_beta": rope.query_beta} if rope.query_beta else {}
    return result


def usable_context(rope: RopeConfig, max_position: int) -> int:
    """Return the largest usable context in tokens.

    For dynamic and sometimes for yarn scaling, files state the trained context. The extended
    context is the intended one.
    """
    if rope.scaling == "dynamic":
        return int(max_position * rope.factor)
    if rope.scaling == "yarn":
        assert rope.original_max_position is not None
        return max(max_position, int(rope.original_max_position * rope.factor))
    return max_position
