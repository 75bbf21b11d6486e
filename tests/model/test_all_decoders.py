"""Every causal decoder of transformers is loaded, or refused with its reason before a tensor is
read.

Those that are loaded have a case in ``parity_cases``, which ``test_parity`` compares with
transformers live.  The guide's table of families and refusals is made of the same entries.
"""

import pytest

from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.checkpoints.hf.families import ALIKE, FAMILIES
from jaxllama.checkpoints.hf.refused import REFUSED, WRAPPERS
from jaxllama.errors import JaxLlamaError
from tests.helpers.parity_cases import CASES, FAMILY_CASES

LOADED = 120  # of transformers' types; more is better
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


@pytest.mark.slow
def test_every_type_is_loaded_or_refused():
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    types = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    loaded = sorted(kind for kind in types if kind in FAMILIES or kind in WRAPPERS)
    assert len(loaded) >= LOADED, loaded
    assert set(types) == set(loaded) | set(REFUSED)
    for kind in REFUSED:
        with pytest.raises(JaxLlamaError, match="model_type|architectures") as caught:
            config_from_hf({"model_type": kind, "architectures": [types[kind]], **SIZES}, kind)
        is_decoder = types[kind].endswith(("ForCausalLM", "LMHeadModel"))
        is_known = types[kind] in {name for one in FAMILIES.values() for name in one.architectures}
        assert (REFUSED[kind] in str(caught.value)) == (is_decoder or is_known), kind


def test_a_type_is_loaded_or_refused_and_not_both():
    assert not set(REFUSED) & (set(FAMILIES) | set(WRAPPERS))
    assert set(WRAPPERS.values()) <= set(FAMILIES)


def test_a_refusal_says_what_the_model_would_need():
    with pytest.raises(JaxLlamaError, match=r"model_type = 'bloom': .*linear biases \(ALiBi\)"):
        config_from_hf({"model_type": "bloom", **SIZES}, "bloom")


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_decoder_of_a_model_with_image_input_is_read(kind: str) -> None:
    text = {**SIZES, "model_type": WRAPPERS[kind], "num_experts": 4, "num_experts_per_tok": 2}
    text |= {"head_dim": 16, "sliding_window": 8}
    text = {key: value for key, value in text.items() if "gemma" not in kind or "exp" not in key}
    if kind != "gemma3":
        text.pop("sliding_window")
    if kind == "qwen3_5":
        text.pop("num_experts")
        text.pop("num_experts_per_tok")
    cfg = config_from_hf({"model_type": kind, "text_config": text}, kind)
    assert cfg.stored.family == WRAPPERS[kind] and cfg.n_layers == 2


def test_every_family_has_a_case():
    tested = {kind for kind, _, _ in FAMILY_CASES} | {cfg.stored.family for cfg in CASES.values()}
    assert set(FAMILIES) - set(ALIKE) <= tested
