"""Every causal decoder of transformers is loaded, or refused with its reason before a tensor is
read.

Those that are loaded have a case in ``parity_cases``, which ``test_parity`` compares with
transformers live.  The guide's table of families and refusals is made of the same entries.
"""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxllama as jl
from jaxllama.checkpoints.hf import load as hf
from jaxllama.checkpoints.hf.common import defaults_of
from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.checkpoints.hf.families import ALIKE, FAMILIES, stored_name
from jaxllama.checkpoints.hf.refused import REFUSED, WRAPPERS
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.typing import JsonObject
from tests.helpers.dense_cases import ORACLES, WRAPPED
from tests.helpers.parity_cases import CASES

# Types of flash-linear-attention, and text decoders of models with image input.
ELSEWHERE = ("rwkv7", "step3p5", "glm5_next_text")
ALONE = {*ORACLES, *WRAPPED, "mistral4"}  # families that are no type of AutoModelForCausalLM
ROOT = Path(__file__).parents[2]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def stated_counts() -> tuple[int, ...]:
    """Return the guide's numbers of transformers' types: loaded, all, and with an own entry."""
    page = (ROOT / "docs" / "rooms" / "checkpoints.md").read_text(encoding="utf-8")
    pattern = r"(\d+) of the (\d+) causal model types of [^\n]* load\. (\d+) of them have"
    [found] = re.findall(pattern, page)
    return tuple(map(int, found))


def test_the_guide_and_the_changelog_state_the_number_of_families():
    _, _, own = stated_counts()
    assert own == len(set(FAMILIES) - ALONE)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [(families, alone)] = re.findall(r"(\d+) model types of transformers, (.*) load", changes)
    assert int(families) == own
    assert {"minicpm", "mistral4"} <= set(re.findall(r"`(\w+)`", alone)) <= ALONE


@pytest.mark.slow
def test_every_type_is_loaded_or_refused():
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    types = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    loaded = sorted(kind for kind in types if kind in FAMILIES or kind in WRAPPERS)
    assert (len(loaded), len(types), len(set(loaded) & set(FAMILIES))) == stated_counts()
    assert set(types) == set(loaded) | (set(REFUSED) - set(ELSEWHERE))
    for kind in set(REFUSED) & set(types):
        with pytest.raises(JaxLlamaError, match="model_type|architectures") as caught:
            config_from_hf({"model_type": kind, "architectures": [types[kind]], **SIZES}, kind)
        is_decoder = types[kind].endswith(("ForCausalLM", "LMHeadModel"))
        is_known = types[kind] in {name for one in FAMILIES.values() for name in one.architectures}
        assert (REFUSED[kind] in str(caught.value)) == (is_decoder or is_known), kind


def test_a_type_is_loaded_or_refused_and_not_both():
    assert not set(REFUSED) & (set(FAMILIES) | set(WRAPPERS))
    assert set(WRAPPERS.values()) <= set(FAMILIES)


def test_a_refusal_says_what_the_model_would_need():
    with pytest.raises(JaxLlamaError, match="model_type = 'rwkv7': .*writes by another key"):
        config_from_hf({"model_type": "rwkv7", **SIZES}, "rwkv7")
    with pytest.raises(JaxLlamaError, match=r"model_type = 'bloom': .*linear biases \(ALiBi\)"):
        config_from_hf({"model_type": "bloom", **SIZES}, "bloom")


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_decoder_of_a_model_with_image_input_is_read(kind: str) -> None:
    text = {**SIZES, "model_type": WRAPPERS[kind], "num_experts": 4, "num_experts_per_tok": 2}
    text |= {"head_dim": 16, "sliding_window": 8}
    has_experts = kind.endswith("moe")
    text = {key: value for key, value in text.items() if has_experts or "exp" not in key}
    if kind not in ("gemma3", "mistral3"):
        text.pop("sliding_window")
    cfg = config_from_hf({"model_type": kind, "text_config": text}, kind)
    assert cfg.stored.family == stored_name(WRAPPERS[kind]) and cfg.n_layers == 2


_SMALL = ("hidden_size", "intermediate_size", "num_attention_heads")
_PIXTRAL = {
    "model_type": "pixtral",
    "num_hidden_layers": 1,
    "head_dim": 8,
    "image_size": 8,
    "patch_size": 4,
    **{key: SIZES[key] for key in _SMALL},
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
_PUBLISHED = "language_model.model.layers"
_UNTIED = {"tie_word_embeddings": False}
_KIMI = {
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# transformers' class, its text decoder's config, and the vision tower's.
MULTIMODAL: dict[str, tuple[str, JsonObject, JsonObject]] = {
    "ministral3": ("Mistral3", {"model_type": "ministral3"}, _PIXTRAL),
    "mistral": ("Mistral3", {"model_type": "mistral"}, _PIXTRAL),
    "qwen2_vl": ("Qwen2VL", _MROPE, {"depth": 1, "embed_dim": 32, "num_heads": 4}),
    "qwen2_5_vl": ("Qwen2_5_VL", _MROPE, _QWEN_VISION),
    "qwen3_vl": ("Qwen3VL", _MROPE, _QWEN_VISION),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            **_MROPE,
            **_UNTIED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
        _QWEN_VISION,
    ),
    "kimi_k25": (
        "Kimi_K25",
        {**_KIMI, "model_type": "kimi_k2"},
        {"num_hidden_layers": 1, **{key: SIZES[key] for key in _SMALL}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_text_decoder_of_a_multimodal_model_has_transformers_logits(kind, tmp_path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name, text, vision = MULTIMODAL[kind]
    config = getattr(transformers, f"{name}Config")(
        text_config={**SIZES, **text}, vision_config=vision, **(_UNTIED if kind[0] == "k" else {})
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path / "m")
    if kind == "kimi_k25":  # transformers writes the vision tower's word for the decoder's layers
        held = load_file(tmp_path / "m" / "model.safetensors")
        names = {key: key.replace("language_model.model.blocks", _PUBLISHED) for key in held}
        save_file({names[key]: held[key] for key in held}, tmp_path / "m" / "model.safetensors")
    tokens = np.random.default_rng(0).integers(0, 64, (1, 40))
    with torch.no_grad():
        want = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    with pytest.warns(WeightWarning, match="its text decoder alone is read"):
        cfg, params = hf.load(tmp_path / "m")
    got = jl.logits(cfg, jax.device_put(params), tokens.astype(np.int32), np.array([40]))
    assert np.abs(np.asarray(got) - want).max() <= 1e-4 * np.abs(want).max()


def test_a_text_decoder_s_keys_may_stand_beside_the_vision_tower_s():
    """As in the files that Qwen2.5-VL was published with."""
    scaling = {"type": "mrope", "mrope_section": [2, 1, 1]}
    config = {**SIZES, "model_type": "qwen2_5_vl", "vision_config": {}, "image_token_id": 3}
    cfg = config_from_hf({**config, "rope_scaling": scaling, "rope_theta": 1e6}, "vl")
    plain = config_from_hf({**SIZES, "model_type": "qwen2", "rope_theta": 1e6}, "vl")
    assert cfg == plain


def test_kimi_k2_is_deepseek_v3():
    """Its file has a ``model_type`` of its own and DeepSeek's architecture."""
    config = {**SIZES, **_KIMI, "architectures": ["DeepseekV3ForCausalLM"]}
    cfg, same = (
        config_from_hf({**config, "model_type": kind}, "kimi")
        for kind in ("kimi_k2", "deepseek_v3")
    )
    assert cfg == same and cfg.stored.family == "deepseek_v3" and cfg.latent.kv_rank == 16


def test_every_family_has_a_case():
    elsewhere = {kind for kind, oracle in ORACLES.items() if oracle is None}
    tested = elsewhere | {cfg.stored.family for cfg in CASES.values()}
    assert set(FAMILIES) - set(ALIKE) <= tested


@pytest.mark.slow
def test_the_defaults_are_those_of_transformers_classes():
    """``defaults.json`` has what ``make_family_defaults`` finds, so no family was forgotten."""
    pytest.importorskip("transformers")
    defaults = pytest.importorskip("tests.golden.make_family_defaults").defaults_of
    for kind in FAMILIES:
        assert defaults_of(kind) == json.loads(json.dumps(defaults(kind))), kind
