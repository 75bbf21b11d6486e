"""Every causal decoder of transformers is loaded, or refused by name before a tensor is read.

Those that are loaded have a case in ``parity_cases``, which ``test_parity`` compares with
transformers live.
"""

import pytest

from jaxllama.checkpoints.hf.config import config_from_hf
from jaxllama.checkpoints.hf.families import ALIKE, FAMILIES
from jaxllama.errors import JaxLlamaError
from tests.helpers.parity_cases import CASES, FAMILY_CASES

LOADED = 40  # of transformers' types; more is better
OWN_CLASS = ("internlm3",)  # written as Llama, tested as Llama


@pytest.mark.slow
def test_every_type_is_loaded_or_refused():
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    types = dict(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    loaded = sorted(set(types) & set(FAMILIES))
    assert len(loaded) >= LOADED, loaded
    for kind in sorted(set(types) - set(FAMILIES)):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
        with pytest.raises(JaxLlamaError, match="model_type|architectures"):
            config_from_hf({"model_type": kind, "architectures": [types[kind]], **sizes}, kind)


def test_every_family_has_a_case():
    tested = {kind for kind, _, _ in FAMILY_CASES} | {cfg.stored.family for cfg in CASES.values()}
    assert set(FAMILIES) - set(ALIKE) - set(OWN_CLASS) <= tested
