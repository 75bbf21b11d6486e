"""Requests with adapters of their own in one engine: the tokens that ``generate`` gives them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.lora import attach
from tests.helpers import lora_cases
from tests.helpers.models import FAMILIES, HYBRIDS, LLAMA
from tests.helpers.seeded import seeded_params

CONFIGS = {
    "gqa": LLAMA.replace(n_layers=1, layer_types=()),
    **{k: FAMILIES[k] for k in ("delta", "kda")},
} | HYBRIDS
NAMES = ("two", None, "one", "two", "one")


@pytest.fixture(
    scope="module",
    params=[
        "gqa",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "gqa"),
    ],
)
def lm(request) -> LanguageModel:
    cfg = CONFIGS[request.param].replace(eos_token_ids=())
    base = jax.device_put(seeded_params(cfg))
    factors = [lora_cases.factors(cfg, seed) for seed in (1, 2)]
    return LanguageModel(
        cfg, attach(tensor_table(cfg), base, factors), None, adapters=("one", "two")
    )


# Deterministic engines have fewer programs; the others' prefill takes several prompts at once.
@pytest.mark.parametrize(
    ("deterministic", "draft"),
    [
        (True, None),
        *(pytest.param(False, draft, marks=pytest.mark.slow) for draft in ("ngram", "model")),
    ],
)
def test_an_engine_gives_each_request_the_tokens_of_its_adapter(lm, deterministic, draft):
    """Short prompts together and a long one in chunks, more than slots; nothing that the prefix
    cache holds is shared between two adapters, and what one of them left is found again."""
    engine = Engine(
        lm,
        max_slots=3,
        max_len=48,
        prefill_chunk=16,
        prefill_rows=1 if deterministic else 2,
        deterministic=deterministic,
        draft=lm.first_layers(1) if draft == "model" else draft,
    )
    engine.warm_up()
    prompt = np.random.default_rng(0).integers(3, lm.config.vocab_size, 40)
    prompts = [prompt[:n].tolist() for n in (12, 12, 12, 40, 12)]
    want = lm.generate(prompts, 8, adapter=NAMES)
    assert len({tuple(want[row].tokens) for row in range(3)}) == 3
    for turn in range(2):
        requests = [
            Request(f"{turn}-{row}", tuple(prompts[row]), 8, adapter=name)
            for row, name in enumerate(NAMES)
        ]
        events = engine.generate(requests)
        for request, out in zip(requests, want, strict=True):
            got = events[request.id]
            assert [token for event in got for token in event.tokens] == out.tokens
            if not turn and request.id in ("0-0", "0-1", "0-2"):
                assert got[-1].cached_tokens == 0
        assert turn == 0 or events["1-3"][-1].cached_tokens == 32
    assert engine.stats().compilations == 0


def test_what_an_engine_knows_of_adapters(lm):
    engine = Engine(lm, max_slots=1, max_len=48, prefill_chunk=16)
    with pytest.raises(JaxLlamaError, match="adapter = 'three': tiny has 'one', 'two'"):
        engine.submit(Request("a", (3,), 4, adapter="three"), print)
    with pytest.raises(JaxLlamaError, match="adapter = 3: must be str or None"):
        Request("a", (3,), adapter=3)
    request = Request("a", (3,), adapter="one")
    assert Request.from_json(request.to_json()) == request
    assert jl.Engine is Engine
