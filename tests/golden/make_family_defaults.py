"""Write jaxllama/checkpoints/hf/defaults.json: what a missing key of config.json means, by model
type, where the type's class in transformers differs from ``hf.config.COMMON``.

python tests/golden/make_family_defaults.py     (torch 2.13.0 CPU, transformers 5.24.0)
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from jaxllama.checkpoints.hf.common import COMMON, DEFAULTS  # noqa: E402
from jaxllama.checkpoints.hf.families import FAMILIES  # noqa: E402

# Keys of which a class has a literal default that files rely on, under the shared names. Sizes are
# in every file, and ``hf.experts`` has the numbers of experts.
KEYS = (
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "sliding_window", "attention_bias"),
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    *("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
    *("attn_logit_softcapping", "final_logit_softcapping", "original_max_position_embeddings"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)
THETA = 10000.0


def defaults_of(kind: str) -> dict[str, Any]:
    """Return the defaults of a model type's class; {} where transformers has none."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(kind)
    except ValueError:
        return {}
    literal = {name for part in type(config).__mro__ for name in vars(part)}
    said = FAMILIES[kind].shared({name: getattr(type(config), name) for name in literal})
    found = {key: said[key] for key in KEYS if not isinstance(said.get(key), property | None)}
    found |= {key: None for key in ("bos_token_id", "eos_token_id") if said.get(key, 0) is None}
    if "kv_lora_rank" in said:  # whose keys are of one head
        found.pop("num_key_value_heads", None)
    found = {
        key: value
        for key, value in found.items()
        if value != COMMON.get(key) and not (value in (None, False) and key not in COMMON)
    }
    rope = config.to_dict().get("rope_parameters") or {}
    inner = rope.get("full_attention", rope)
    is_plain = rope.get("rope_type", "default") == "default" and inner is rope
    if not is_plain and inner != rope.get("sliding_attention"):
        found["rope_parameters"] = rope
    if inner.get("rope_theta", THETA) not in (None, THETA):
        found["rope_theta"] = inner["rope_theta"]
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return found


def main() -> None:
    table = {kind: defaults_of(kind) for kind in sorted(FAMILIES)}
    rows = [f"  {json.dumps(kind)}: {json.dumps(row)}" for kind, row in table.items() if row]
    DEFAULTS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    print(DEFAULTS, DEFAULTS.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
