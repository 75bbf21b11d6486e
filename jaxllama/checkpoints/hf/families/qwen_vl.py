"""Qwen3-VL's text decoder with experts: Qwen3's, whose published files store experts as [in, out].

Files that transformers wrote of a new model have them as [out, in], as ours do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxllama.checkpoints.hf.experts import Mixture
from jaxllama.checkpoints.hf.family import BIAS, Family
from jaxllama.config import ModelConfig
from jaxllama.model.experts.parameters import ExpertNames
from jaxllama.model.names import Names

_EXPERTS = Mixture(60, 4, width=1408, is_mixed=True)

_DOWN = re.compile(r"\.mlp\.experts\.down_proj$")


def _tensors(cfg: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Names:
    found = next((shape for name, shape in shapes.items() if _DOWN.search(name)), None)
    is_in_out = found is not None and found[1] != cfg.d_model
    return Names(mixers={"experts": ExpertNames(is_fused=True, is_transposed=is_in_out)})


FAMILIES: dict[str, Family] = {
    "qwen3_vl_moe_text": Family(
        ("Qwen3VLMoeForConditionalGeneration",),
        same=BIAS,
        parts=(_EXPERTS,),
        fixed={"norm_topk_prob": (True, None)},
        facts={"qk_norm": "head"},
        rope_key="rope_parameters",
        tensors_of=_tensors,
    ),
}
