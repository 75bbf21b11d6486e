"""Muse Glimmer's text decoder.

Its embeddings, q and k have norms without a weight, and the norms behind a sublayer an epsilon of
their own. Windows have positions, and the other layers none.
"""

from __future__ import annotations

import dataclasses

from jaxllama.checkpoints.hf.family import Family, Fields
from jaxllama.checkpoints.hf.names import GEMMA
from jaxllama.checkpoints.json_reader import JsonReader
from jaxllama.config import ModelConfig


def _slides(index: int, read: JsonReader) -> bool:
    """Return whether a layer has a window: all but each fourth, counted from the last."""
    return (read.size("num_hidden_layers") - 1 - index) % 4 != 0


def _has_no_theta(index: int, read: JsonReader, slides: bool) -> bool:
    del slides
    thetas, n = read.config.get("layer_rope_theta"), read.size("num_hidden_layers")
    if thetas is None:
        return not _slides(index, read)
    if not isinstance(thetas, list) or len(thetas) != n:
        raise read.error("layer_rope_theta", f"must have {n} entries")
    return thetas[index] == 0


def _to_hf(cfg: ModelConfig) -> Fields:
    still = set(cfg.nope_layers)
    return {"layer_rope_theta": [0 if i in still else cfg.rope.theta for i in range(cfg.n_layers)]}


FAMILIES: dict[str, Family] = {
    "muse_glimmer_text": Family(
        ("MuseGlimmerForConditionalGeneration",),
        keys=("layer_rope_theta",),
        same=(
            ("qk_scale_factor", "stored.query", 3.87),
            ("output_multiplier", "stored.logits", 0.19611613513818404),
            ("final_logit_softcapping", "logit_softcap", 20.0),
            ("post_norm_eps", "norm_out_eps", 1e-8),
        ),
        to_hf=_to_hf,
        fixed={"attention_bias": (False, None)},
        facts={"embed_norm": True, "qk_norm": "head", "attn_gate": True, "post_norms": True},
        stored={"norm_offset": 1.0},
        activation="hidden_activation",
        window=_slides,
        is_nope=_has_no_theta,
        rope_key="rope_parameters",
        tensors=dataclasses.replace(
            GEMMA, gate="gate_proj", q_norm="", k_norm="", embed_norm="", is_last_norm_plain=True
        ),
    ),
}
