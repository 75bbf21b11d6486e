"""Adapters that are loaded and unloaded while an engine runs."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model import lora
from tests.helpers import lora_cases
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

CFG = LLAMA.replace(n_layers=1, layer_types=(), eos_token_ids=())
PROMPT = tuple(np.random.default_rng(0).integers(3, CFG.vocab_size, 12).tolist())


@pytest.fixture(scope="module")
def base() -> LanguageModel:
    return LanguageModel(CFG, jax.device_put(seeded_params(CFG)), None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    for seed in (1, 2, 3):
        lora_cases.write(root / str(seed), lora_cases.tensors(CFG, seed))
    lora_cases.write(root / "wide", lora_cases.tensors(CFG, 4, rank=8), r=8)
    return root


def tokens(engine, request: Request) -> list[int]:
    return [token for event in engine.generate([request])[request.id] for token in event.tokens]


def wanted(base, seed: int) -> list[int]:
    params = lora.attach(tensor_table(CFG), base.params, [lora_cases.factors(CFG, seed)])
    lm = dataclasses.replace(base, params=params, adapters=("one",))
    return lm.generate([list(PROMPT)], 6, adapter="one")[0].tokens


def test_adapters_come_and_go_while_an_engine_runs(base, folders):
    """One slot, two adapters of one name in turn. What the first one left in the prefix cache is
    not read by the second, and nothing is compiled."""
    engine = Engine(
        base, max_slots=2, max_len=32, prefill_chunk=16, prefill_rows=1, lora_slots=1,
        max_lora_rank=4,
    )  # fmt: skip
    engine.warm_up()
    plain = base.generate([list(PROMPT)], 6)[0].tokens
    assert tokens(engine, Request("plain", PROMPT, 6)) == plain
    first = engine.load_adapter("sql", folders / "1")
    with pytest.raises(JaxLlamaError, match="all 1 adapter slots are in use: unload one"):
        engine.load_adapter("more", folders / "2")
    assert tokens(engine, Request("first", PROMPT, 6, adapter=first)) == wanted(base, 1)

    # The request began before its adapter was unloaded, so it keeps the slot to its end.
    events = []
    engine.submit(Request("kept", PROMPT, 6, adapter=first), events.append)
    engine.step()
    engine.unload_adapter(first)
    with pytest.raises(JaxLlamaError, match="all 1 adapter slots are in use"):
        engine.load_adapter("sql", folders / "2")
    while engine.step():
        pass
    assert [token for event in events for token in event.tokens] == wanted(base, 1)

    second = engine.load_adapter("sql", folders / "2")
    assert second != first
    assert tokens(engine, Request("second", PROMPT, 6, adapter=second)) == wanted(base, 2)
    assert tokens(engine, Request("again", PROMPT, 6)) == plain
    assert engine.stats().compilations == 0
    with pytest.raises(JaxLlamaError, match=f"adapter = '{first}': tiny has '{second}'"):
        engine.submit(Request("late", PROMPT, 6, adapter=first), events.append)


def test_what_a_slot_refuses(base, folders):
    engine = Engine(base, max_slots=1, max_len=32, lora_slots=1, max_lora_rank=4)
    for path, said in (
        ("wide", "rank 8, and the largest here is 4"),
        ("none", "No such file"),
    ):
        with pytest.raises(JaxLlamaError, match=said):
            engine.load_adapter("a", folders / path)
    with pytest.raises(JaxLlamaError, match="adapter = 'a': tiny has none"):
        engine.unload_adapter("a")
    with pytest.raises(JaxLlamaError, match="adapter = None: came with the model"):
        engine.unload_adapter(None)
    with pytest.raises(JaxLlamaError, match="lora_slots is 0"):
        Engine(base, max_slots=1, max_len=32).load_adapter("a", folders / "1")


def test_slots_beside_adapters_of_the_model(base, folders):
    """A model's own adapters keep their factors beside slots of a larger rank."""
    own = [lora_cases.factors(CFG, seed) for seed in (1, 2)]
    params = lora.attach(tensor_table(CFG), base.params, own)
    targets = set(own[0])
    grown = lora.put(
        tensor_table(CFG),
        lora.reserve(tensor_table(CFG), params, targets, 2, 6),
        3,
        lora_cases.factors(CFG, 3),
    )
    for before, after in zip(lora.factors(params), lora.factors(grown), strict=True):
        assert after.a.shape[0] == 4 and after.a.shape[2] == 6
        for index in (0, 1):
            np.testing.assert_array_equal(after.added(index), before.added(index))
        assert not after.added(2).any()
    alone = lora.attach(tensor_table(CFG), base.params, [lora_cases.factors(CFG, 3)])
    for want, got in zip(lora.factors(alone), lora.factors(grown), strict=True):
        np.testing.assert_allclose(got.added(3), want.added(0), rtol=1e-6, atol=1e-7)
