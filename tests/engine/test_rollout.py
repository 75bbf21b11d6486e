"""``rollout`` gives arrays for a loss, and ``update_params`` new weights between two of them."""

from __future__ import annotations

import gc

import jax
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from tests.helpers.models import FAMILIES, LLAMA
from tests.helpers.seeded import seeded_params

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
CFG = LLAMA.replace(n_layers=1, layer_types=(), eos_token_ids=())
PROMPTS = [tuple(range(1, 41)), (5, 6, 7)]
HIDDEN = {"delta": FAMILIES["delta"].replace(eos_token_ids=())}


def model(cfg=CFG, seed=0, scheme=None):
    params = jax.device_put(seeded_params(cfg, seed))
    params = params if scheme is None else jl.quantize_params(params, scheme)
    return LanguageModel(cfg, params, None)


def tree(cfg=CFG, seed=1, scheme=None):
    params = jax.device_put(seeded_params(cfg, seed))
    return params if scheme is None else jl.quantize_params(params, scheme)


def engine_of(lm):
    return Engine(lm, max_slots=2, max_len=64, prefill_chunk=32, prefill_rows=1)


def answers(engine, name):
    requests = [Request(f"{name}{i}", prompt, 6) for i, prompt in enumerate(PROMPTS)]
    events = engine.generate(requests)
    return [[t for event in events[r.id] for t in event.tokens] for r in requests], [
        events[r.id][-1].cached_tokens for r in requests
    ]


@pytest.mark.parametrize(
    ("cfg", "scheme"),
    [
        (CFG, "w8a16"),
        pytest.param(CFG, None, marks=pytest.mark.slow),
        pytest.param(CFG, "w8a8", marks=pytest.mark.slow),
        pytest.param(HIDDEN["delta"], None, marks=pytest.mark.slow),
    ],
)
def test_new_weights_give_the_tokens_of_their_model(cfg, scheme):
    """No program is compiled, the old weights' prefixes are not found, and a request in flight
    ends."""
    engine = engine_of(model(cfg, 0, scheme))
    engine.warm_up()
    before, _ = answers(engine, "a")
    again, found = answers(engine, "b")
    assert again == before and found[0] > 0
    running = []
    engine.submit(Request("running", PROMPTS[0], 20), running.append)
    for _ in range(3):
        engine.step()
    params = tree(cfg, 1, scheme)
    engine.update_params(params)
    while engine.step():
        pass
    assert running[-1].finish_reason == "length"
    assert sum(len(event.tokens) for event in running) == 20
    after, found = answers(engine, "c")
    assert after != before and found == [0, 0]
    want = LanguageModel(cfg, params, None).generate([list(p) for p in PROMPTS], 6)
    assert after == [list(one.tokens) for one in want]
    assert answers(engine, "d")[1][0] > 0  # the new weights' prefixes are
    for seed in range(8):
        engine.update_params(params if seed % 2 else tree(cfg, 0, scheme))
        answers(engine, f"e{seed}")
    # Floats are quantized on the way.
    engine.update_params(tree(cfg, 0))
    assert answers(engine, "f")[0] == before
    engine.update_params(tree(cfg, 1))
    assert answers(engine, "g")[0] == after
    assert engine.stats().compilations == 0
    pages = engine.runner.pools[0]
    assert pages.used == 0 and len(pages._roots) <= pages.count


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_a_thousand_updates_compile_nothing_and_hold_nothing(scheme):
    engine, params = engine_of(model(CFG, 0, scheme)), tree()
    compiled = []

    def note(name, seconds, **_):
        compiled.extend([name] if name.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(note)
    found = []
    for number in range(1000):
        params = jax.tree.map(lambda leaf: leaf * 1.001, params)
        engine.update_params(params)
        jl.rollout(engine, [(1, 2, 3)], n=2, max_new_tokens=4, seed=number)
        found.append((len(compiled), len(jax.live_arrays())))
    jax.monitoring.unregister_event_duration_listener(note)
    assert len(set(found[2:])) == 1


def test_other_weights_are_refused_and_the_old_ones_stay():
    lm = model(scheme="w8a16")
    engine = engine_of(lm)
    before, _ = answers(engine, "a")
    fewer = tree(scheme="w8a16")
    fewer.pop("norm")
    more = {**tree(scheme="w8a16"), "more": {"weight": np.zeros(3, np.float32)}}
    wider = tree(CFG.replace(d_ff=2 * CFG.d_ff), scheme="w8a16")
    for wrong, message in (
        (fewer, "'norm' is missing"),
        (more, r"the model has no \['more'\]"),
        (wider, r"\['layer_0'\].* is .*, not "),
    ):
        with pytest.raises(JaxLlamaError, match=message):
            engine.update_params(wrong)
    assert answers(engine, "b")[0] == before
    adapted = Engine(model(), max_slots=1, max_len=32, lora_slots=1)
    with pytest.raises(JaxLlamaError, match="an engine with lora_slots keeps its weights"):
        adapted.update_params(tree())


@pytest.mark.core
def test_rollouts_are_the_samples_with_the_models_own_log_probabilities(monkeypatch):
    lm = model()
    engine = engine_of(lm)
    sampling = jl.Sampling(temperature=0.8, top_k=50)
    order, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda r, row: (order.append(r.id), submit(r, row)))
    found = jl.rollout(engine, PROMPTS, n=3, sampling=sampling, max_new_tokens=8, seed=7)
    # The pages of a prompt are there before its other samples are admitted.
    assert order == [f"rollout-{index}" for index in (0, 3, 1, 2, 4, 5)]
    assert engine.stats().prefix_hit_tokens == 2 * 32
    assert found.tokens.shape == (6, 48) and found.answers.shape == found.logprobs.shape == (6, 47)
    assert found.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.lengths.tolist() == [48, 48, 48, 11, 11, 11]
    assert found.answers.sum(1).tolist() == [8] * 6 and set(found.finish_reasons) == {"length"}
    for row, group in enumerate(found.groups):
        prompt = PROMPTS[group]
        assert tuple(found.tokens[row, : len(prompt)]) == prompt
        assert not found.tokens[row, len(prompt) + 8 :].any()
    scores = np.asarray(jl.logits(CFG, lm.params, found.tokens, found.lengths), np.float64)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    own = np.take_along_axis(scores[:, :-1], found.tokens[:, 1:, None].astype(int), -1)[..., 0]
    np.testing.assert_allclose(found.logprobs, own * found.answers, atol=2e-5)
    assert len({tuple(row) for row in found.tokens.tolist()}) > 2  # seeds differ
    np.testing.assert_allclose(jl.rescore(engine, found), found.logprobs, atol=1e-5)
    again = jl.rollout(engine, PROMPTS, n=3, sampling=sampling, max_new_tokens=8, seed=7)
    np.testing.assert_array_equal(again.tokens, found.tokens)
    other = jl.rollout(engine, PROMPTS, n=3, sampling=sampling, max_new_tokens=8, seed=8)
    assert (other.tokens != found.tokens).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n = 0: a prompt needs at least one sample"),
        ({"sampling": jl.Sampling(seed=3)}, "a seed of its own"),
        ({"seed": 2**32}, "must lie between"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(JaxLlamaError, match=message):
        jl.rollout(None, PROMPTS, **options)
    with pytest.raises(JaxLlamaError, match=r"prompts\[0\] is text: give its token ids"):
        jl.rollout(None, ["text"], n=1, max_new_tokens=1)


def held():
    """Bytes of jax's arrays."""
    gc.collect()
    return sum(leaf.nbytes for leaf in jax.live_arrays())


def test_a_sleeping_engine_frees_its_memory_and_wakes_as_it_was():
    engine = engine_of(model())
    before, _ = answers(engine, "a")
    assert answers(engine, "b")[1][0] > 0
    programs, cache = engine.runner.compiled_programs(), engine.runner.slots.cache
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.lm.params))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))
    del cache
    awake = held()
    for kind, freed in (("keep", size), ("host", size + weights), ("drop", size + weights)):
        engine.sleep(kind)
        assert held() <= awake - freed
        with pytest.raises(JaxLlamaError, match="the engine sleeps: wake it first"):
            engine.submit(Request("b", (1,), 1), print)
        with pytest.raises(JaxLlamaError, match="the engine sleeps already"):
            engine.sleep()
        if kind == "drop":
            with pytest.raises(JaxLlamaError, match="the weights were dropped"):
                engine.wake()
            engine.update_params(tree(seed=0))
        engine.wake()
        assert answers(engine, kind) == (before, [0, 0])  # no prefix of the freed cache is found
    assert engine.runner.compiled_programs() == programs
    with pytest.raises(JaxLlamaError, match="the engine does not sleep"):
        engine.wake()
    engine.submit(Request("c", (1,), 2), lambda event: None)
    with pytest.raises(JaxLlamaError, match="requests are in flight"):
        engine.sleep()
    with pytest.raises(JaxLlamaError, match="allowed are keep, host and drop"):
        engine.sleep("all")
