"""Engine: every request's tokens are those it gets alone, whatever else happens."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import jaxllama as jl
from jaxllama import generation
from jaxllama.config import RopeConfig
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import KVCache
from jaxllama.sampling import SamplingParams
from jaxllama.serving.engine import runner
from jaxllama.serving.engine.engine import Engine
from jaxllama.serving.engine.grammar import Matcher
from jaxllama.serving.engine.options import EngineOptions, ResolvedOptions
from jaxllama.serving.engine.programs import (
    CACHE_HIT,
    KEPT,
    Kept,
    Programs,
    Wanted,
    keep,
    name,
    read,
)
from jaxllama.serving.engine.request import (
    EngineClosed,
    EngineFailed,
    Event,
    Grammar,
    QueueFull,
    Request,
)
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.models import FAMILIES, params_of

MAX_LEN, MAX_NEW = 96, 24
OPTIONS = {"max_slots": 4, "max_len": MAX_LEN, "prefill_chunk": 16, "steps_per_call": 3}
ALL = ("draw", "top_k", "top_p", "min_p", "penalties", "bias")
SAMPLINGS = (
    jl.Sampling(),
    jl.Sampling(temperature=1.0, seed=1),
    jl.Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
    jl.Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3),
    jl.Sampling(temperature=0.7, seed=3, repetition_penalty=1.2, logit_bias={5: 3.0}),
    # Texts that repeat, for drafts: one token, two of them at random, three in turn.
    jl.Sampling(logit_bias={5: 50.0}),
    jl.Sampling(temperature=1.0, seed=4, logit_bias={5: 50.0, 6: 48.0}),
    jl.Sampling(frequency_penalty=1.0, logit_bias={5: 50.0, 6: 49.0, 7: 48.0}),
)


CONFIGS = {
    "llama": FAMILIES["gqa"].replace(vocab_size=256, name="tiny-bytes"),  # speaks bytes; 2 ends
    "gla": FAMILIES["gla-conv-groups"],
    "hybrid": FAMILIES["hybrid"],
    "window": FAMILIES["mqa-window"],
}


@functools.cache
def model(family: str) -> LanguageModel:
    cfg = CONFIGS[family]
    tokenizer = Tokenizer.byte_level() if family == "llama" else None
    return LanguageModel(cfg, params_of(cfg), tokenizer)


@functools.cache
def engine(family: str, **options) -> Engine:
    """One for all tests of a family: idle between them, so only its prefix cache is not new."""
    return Engine(model(family), **{**OPTIONS, **options})


@functools.cache
def alone(
    family: str, prompt: tuple[int, ...], sampling: jl.Sampling, kv_dtype: str = "float32"
) -> tuple[list[int], list[float], bool]:
    """The request by itself through ``generation``: MAX_NEW tokens in one shape, so that one
    program serves every request; a shorter answer is its beginning."""
    lm = model(family)
    params = SamplingParams.stack([sampling], lm.config.vocab_size, 0)
    if params.bias_ids is None:
        blank = jnp.full((1, 1), lm.config.vocab_size, jnp.int32), jnp.zeros((1, 1), jnp.float32)
        params = dataclasses.replace(params, bias_ids=blank[0], bias_values=blank[1])
    params = dataclasses.replace(params, features=ALL)
    tokens = jnp.asarray([[*prompt, *[0] * (MAX_LEN - len(prompt))]], jnp.int32)
    cache = jl.init_cache(lm.config, 1, MAX_LEN + MAX_NEW, dtype=kv_dtype)
    stop_ids = jnp.asarray(lm.config.eos_token_ids, jnp.int32)
    state = generation.start(
        lm.config, lm.params, tokens, jnp.asarray([len(prompt)], jnp.int32), cache, params,
        stop_ids, max_new_tokens=MAX_NEW,
    )  # fmt: skip
    state = generation.advance(lm.config, lm.params, state, params, stop_ids, np.int32(MAX_NEW))
    n = int(state.counts[0])
    stopped = bool(state.done[0])
    return np.asarray(state.tokens)[0, :n].tolist(), np.asarray(state.logprobs)[0, :n], stopped


def check_answer(
    family: str, request: Request, events: list[Event], kv_dtype="float32", drafts: bool = False
) -> None:
    """Token for token what the request gives alone, ended once and for the right reason."""
    tokens, logprobs, stopped = alone(family, request.prompt, request.sampling, kv_dtype)
    tokens = tokens[: request.max_new_tokens]
    got = [token for event in events for token in event.tokens]
    reasons = [event.finish_reason for event in events]
    assert [reason is None for reason in reasons] == [True] * (len(events) - 1) + [False]
    if reasons[-1] == "cancelled":
        tokens = tokens[: len(got)]
    else:
        ended = stopped and len(tokens) == len(alone(family, request.prompt, request.sampling)[0])
        assert reasons[-1] == ("stop" if ended else "length")
    assert got == tokens
    got_logprobs = [value for event in events for value in event.logprobs]
    # float32 sums in other orders: 1e-7 of logits of up to ten, through two layers.  A narrow cache
    # turns such a difference, at a rounding border, into another last bit of a stored number (2**-8
    # of it in bfloat16), one of hundreds that a logit is made of.  A pass over a draft adds a GLA
    # layer's tokens in chunks (test_speculative has the same bound).
    atol = (1e-4 if drafts else 2e-5) if kv_dtype == "float32" else 2e-3
    np.testing.assert_allclose(got_logprobs, logprobs[: len(got)], atol=atol)
    assert events[-1].completion_tokens == len(got)
    assert events[-1].prompt_tokens == len(request.prompt)


def poison(eng: Engine) -> None:
    """NaN into every slot, page and snapshot that is nobody's."""

    def with_nan(tree, rows: list[int]):
        def put(leaf: jax.Array) -> jax.Array:
            data = np.array(leaf)
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                data[rows] = np.nan
            return jnp.asarray(data)

        return jax.tree.map(put, tree)

    eng.runner.wait()
    runner, slots = eng.runner, eng.runner.slots
    taken = {sequence.slot for sequence in eng.scheduler.admitted}
    free = [slot for slot in range(slots.size) if slot not in taken]
    layers = tuple(
        with_nan(layer, runner.pages.free if isinstance(layer, KVCache) else free)
        for layer in slots.cache.layers
    )
    runner.slots = dataclasses.replace(
        slots,
        cache=dataclasses.replace(slots.cache, layers=layers),
        snapshots=with_nan(slots.snapshots, runner.pages.free_states),
    )


PROMPTS = tuple(
    tuple(np.random.default_rng(seed).integers(3, 97, length).tolist())
    for seed, length in enumerate([1, 2, 9, 16, 17, 18, 33, 40, 50])
) + (tuple(np.random.default_rng(7).integers(3, 97, 40).tolist()) + (5, 6, 7),)
one_request = st.tuples(
    st.integers(0, len(PROMPTS) - 1),
    st.integers(0, len(SAMPLINGS) - 1),
    st.integers(1, MAX_NEW),
    st.integers(0, 12),  # the step it arrives at
    st.integers(0, 1),  # priority
    st.one_of(st.none(), st.none(), st.integers(0, 15)),  # the step it is cancelled at
)
schedules = st.lists(one_request, min_size=1, max_size=8)


def run_schedule(family: str, eng: Engine, schedule, kv_dtype: str = "float32") -> None:
    requests = [
        Request(f"r{index}", PROMPTS[prompt], new, SAMPLINGS[sampling], priority=priority)
        for index, (prompt, sampling, new, _, priority, _) in enumerate(schedule)
    ]
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    step = 0
    while step <= 15 or eng.live:
        for request, (*_, arrival, _, cancel) in zip(requests, schedule, strict=True):
            if arrival == step:
                eng.submit(request, events[request.id].append)
            if cancel == step:
                eng.cancel(request.id)
        poison(eng)
        eng.step()
        step += 1
        assert step < 400
    for request, (*_, arrival, _, cancel) in zip(requests, schedule, strict=True):
        if cancel is not None and cancel < arrival:
            assert events[request.id][-1].finish_reason != "cancelled"
        drafts = eng.options.draft is not None
        check_answer(family, request, events[request.id], kv_dtype, drafts)


def search(family: str, examples: int, **options) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(schedules)
    def every_schedule(schedule) -> None:
        run_schedule(family, engine(family, **options), schedule)

    every_schedule()


FAMILY = pytest.mark.parametrize("family", ["llama", "gla", "hybrid"])


def test_tokens_are_those_of_the_request_alone():
    search("hybrid", 10)


@pytest.mark.slow
@FAMILY
def test_tokens_are_those_of_the_request_alone_in_many_schedules(family):
    search(family, 70)


@pytest.mark.slow
@FAMILY
def test_tokens_survive_preemption_in_many_schedules(family):
    search(family, 30, cache_tokens=100, prefill_rows=3)


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [0, 15])
@pytest.mark.parametrize("family", [*CONFIGS])
def test_drafts_change_no_tokens_in_many_schedules(family, draft_tokens):
    """Some of them in a cache that is too small for all, so that rows are preempted."""
    drafts = {"draft": "ngram", "draft_tokens": draft_tokens}
    search(family, 40, **drafts)
    search(family, 20, **drafts, cache_tokens=100, prefill_rows=3)
    stats = engine(family, **drafts).stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


SOME = ["hybrid", *(pytest.param(family, marks=pytest.mark.slow)
                    for family in ("llama", "gla", "window"))]  # fmt: skip


@pytest.mark.parametrize("family", SOME)
def test_drafts_change_no_tokens(family):
    """Texts that repeat and texts that do not, alone and together, drawn, with penalties and bias,
    cancelled in the middle of a draft, preempted, ended by their length within one."""
    eng = engine(family, draft="ngram", cache_tokens=128)
    schedule = [(9, 5, 24, 0, 0, None), (3, 6, 23, 0, 0, None), (2, 7, 22, 1, 0, None),
                (7, 5, 21, 2, 0, 5), (8, 2, 24, 3, 1, None), (9, 3, 20, 5, 0, None),
                (0, 6, 24, 14, 0, None)]  # fmt: skip
    run_schedule(family, eng, schedule)
    stats = eng.stats()
    assert stats.preemptions > 0 and 20 < stats.accepted_tokens < stats.drafted_tokens


def test_a_row_whose_drafts_are_right_takes_fewer_steps():
    """Up to a draft and one token a pass.  Drafts that are wrong stop; and what the host masks, as
    ``min_tokens`` does, ends a call where its mask ends."""
    eng, prompt = engine("llama", draft="ngram"), PROMPTS[4]
    calls = {}
    for kind, sampling in (("right", SAMPLINGS[5]), ("wrong", jl.Sampling(temperature=5.0))):
        before = eng.stats()
        request = Request(kind, prompt * 2, MAX_NEW, sampling, ignore_eos=True)
        events = eng.generate([request])[kind]
        calls[kind] = len(events)
        drafted = eng.stats().drafted_tokens - before.drafted_tokens
        accepted = eng.stats().accepted_tokens - before.accepted_tokens
        assert accepted >= 16 if kind == "right" else drafted == 7
    assert calls == {"right": 3, "wrong": MAX_NEW // OPTIONS["steps_per_call"]}
    least = Request("least", prompt, 12, SAMPLINGS[5], min_tokens=4, stop_token_ids=(5,))
    events = eng.generate([least])["least"]
    assert [len(event.tokens) for event in events] == [3, 1, 1]
    tokens, _ = written(events)
    assert tokens.index(5) == 4 and events[-1].finish_reason == "stop"


def test_likeliest_tokens_and_stop_strings_do_not_see_the_draft():
    plain, drafts = engine("llama"), engine("llama", draft="ngram")
    bias = jl.Sampling(temperature=1.0, seed=4, logit_bias={97: 50.0, 98: 48.0})
    requests = [
        Request("top", tuple(b"abab"), 20, bias, logprobs=3, ignore_eos=True),
        Request("stop", tuple(b"abab"), 20, bias, stop=("aab",)),
    ]
    want, got = plain.generate(requests), drafts.generate(requests)
    for key, events in got.items():
        assert "".join(e.text for e in events) == "".join(e.text for e in want[key])
        assert written(events)[0] == written(want[key])[0]
        assert events[-1].finish_reason == want[key][-1].finish_reason
        tops = [[pair for e in some for top in e.top_logprobs for pair in top]
                for some in (events, want[key])]  # fmt: skip
        assert [token for token, _ in tops[0]] == [token for token, _ in tops[1]]
        np.testing.assert_allclose(*([value for _, value in top] for top in tops), atol=2e-5)
    assert want["stop"][-1].finish_reason == "stop"


def test_short_cache_preempts_and_the_tokens_stay():
    eng = engine("hybrid", cache_tokens=96)
    run_schedule("hybrid", eng, [(8, 0, 24, 0, 0, None), (3, 2, 24, 0, 0, None),
                                 (2, 4, 24, 0, 0, None)])  # fmt: skip
    assert eng.stats().preemptions > 0


def test_a_repeated_prefix_is_not_computed_again():
    for family, block in (("llama", 16), ("hybrid", 16)):
        eng = engine(family)
        prompt = tuple(np.random.default_rng(99).integers(3, 97, 40).tolist())
        hits = []
        for index, tail in enumerate([(5,), (5,), (6, 7)]):
            request = Request(f"p{index}", prompt + tail, 6)
            events = eng.generate([request])[request.id]
            check_answer(family, request, events)
            hits.append(events[-1].cached_tokens)
        assert hits == [0, 40 // block * block, 40 // block * block]


def test_nothing_is_compiled_after_the_warm_up():
    """Every shape and every sampling feature; counted by jax itself."""
    eng = engine("hybrid")
    eng.warm_up()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    requests = [
        Request(f"w{index}", PROMPTS[index % len(PROMPTS)], 5, SAMPLINGS[index % 5], logprobs=3)
        for index in range(12)
    ]
    eng.generate(requests)
    eng.generate([Request("one", (5, 6), 2)])
    assert compiled == []
    assert eng.stats().compilations == 0


def test_a_second_engine_takes_the_first_ones_programs(tmp_path, monkeypatch):
    def made() -> Engine:
        eng = Engine(model("llama"), **{**OPTIONS, "max_slots": 1, "max_len": 48})
        eng.warm_up()
        return eng

    monkeypatch.setattr(runner, "folder", lambda: tmp_path)
    requests = [Request(f"k{i}", PROMPTS[i], 5, SAMPLINGS[i]) for i in range(3)]
    written = made().generate(requests)
    assert len(list(tmp_path.iterdir())) == 1
    with monkeypatch.context() as nothing:
        nothing.setattr(Wanted, "lower", None)
        second = made()
        assert second.generate(requests) == written
        assert second.stats().compilations == 0
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="compiling again"):
        assert made().generate(requests) == written
    wanted, home = second.runner._wanted(), jax.devices()[0]
    key, one = wanted.popitem()
    others = [one, one._replace(static={**one.static, "width": 2}), one._replace(cfg=None)]
    assert len({name({**wanted, key: other}, home) for other in others}) == 3


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_program_from_jaxs_cache_is_not_kept_again(is_cached, tmp_path):
    """On a CPU it lacks functions when it is written once more: the start after that failed."""
    jitted = jax.jit(lambda x: x + 1)

    class Known:
        __name__ = "known"

        def lower(self, *arguments):
            return self

        def compile(self):
            if is_cached:
                jax.monitoring.record_event(CACHE_HIT)
            return jitted.lower(jnp.zeros(3)).compile()

    programs = Programs(tmp_path, jax.devices()[0])
    programs.add({"one": Wanted(Known(), (jnp.zeros(3),))})
    assert len(programs) == 1 and len(list(tmp_path.iterdir())) == (not is_cached)


def test_only_the_newest_programs_are_kept(tmp_path):
    for number in range(KEPT + 2):
        keep(tmp_path / "engines" / f"engine-{number}.pickle", Kept((), [(b"x", None, None)]))
    assert len(list((tmp_path / "engines").iterdir())) == KEPT
    newest = tmp_path / "engines" / f"engine-{KEPT + 1}.pickle"
    assert read(newest) == Kept((), [(b"x", None, None)]) and read(tmp_path / "none") is None


def test_likeliest_tokens_are_reported():
    request = Request("top", PROMPTS[2], 5, logprobs=3)
    [*_, last] = events = engine("llama").generate([request])["top"]
    assert last.finish_reason in ("stop", "length")
    written = list(request.prompt)
    lm = model("llama")
    for event in events:
        for token, logprob, top in zip(
            event.tokens, event.logprobs, event.top_logprobs, strict=True
        ):
            padded = jnp.asarray([written + [0] * (32 - len(written))], jnp.int32)
            scores = lm.logits(padded, [len(written)])[0, len(written) - 1]
            want = np.sort(np.asarray(jax.nn.log_softmax(scores)))[::-1][:3]
            np.testing.assert_allclose([value for _, value in top], want, atol=2e-5)
            assert top[0] == (token, pytest.approx(logprob, abs=1e-6))
            written.append(token)


def test_text_and_stop_strings_are_those_of_generate():
    eng, sampling = engine("llama"), jl.Sampling(temperature=1.0, seed=4)
    prompt = tuple(b"stop strings")
    [free] = eng.lm.generate([list(prompt)], 20, sampling)
    stop = free.text[4:7]
    assert stop
    [want] = eng.lm.generate([list(prompt)], 20, sampling, stop=[stop])
    requests = [
        Request("s", prompt, 20, sampling, stop=(stop,)), Request("f", prompt, 20, sampling)
    ]  # fmt: skip
    events = eng.generate(requests)
    for key, answer in (("s", want), ("f", free)):
        assert "".join(event.text for event in events[key]) == answer.text
        assert [token for event in events[key] for token in event.tokens] == answer.tokens
        assert events[key][-1].finish_reason == answer.finish_reason
    assert want.finish_reason == "stop"


def test_grammar_holds_the_output():
    pytest.importorskip("llguidance")
    import json

    eng = engine("llama")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    requests = [
        Request("regex", tuple(b"one"), 20, grammar=Grammar("regex", "(ab|ba){3}")),
        Request(
            "json", tuple(b"two"), 40, jl.Sampling(temperature=1.0, seed=1),
            grammar=Grammar("json_schema", json.dumps(schema)),
        ),
        Request("free", tuple(b"three"), 10),
    ]  # fmt: skip
    events = eng.generate(requests)
    texts = {key: "".join(event.text for event in value) for key, value in events.items()}
    assert set(texts["regex"][i : i + 2] for i in (0, 2, 4)) <= {"ab", "ba"}
    assert len(texts["regex"]) == 6 and events["regex"][-1].finish_reason == "stop"
    answer = json.loads(texts["json"])
    assert answer["a"] in ("x", "y") and isinstance(answer["b"], bool)
    alone = eng.generate([Request("free", tuple(b"three"), 10)])["free"]
    assert texts["free"] == "".join(event.text for event in alone)
    with pytest.raises(jl.JaxLlamaError, match="regex: .*unclosed group"):
        eng.submit(Request("bad", (1,), grammar=Grammar("regex", "a(")), print)


def test_a_step_is_told_while_the_device_does_the_next_one(monkeypatch):
    """The next call is handed over before anybody hears of the one before."""
    eng, order = engine("llama"), []
    run, read = eng.runner.run, eng.runner.read
    monkeypatch.setattr(eng.runner, "run", lambda *args: (order.append("run"), run(*args))[1])
    monkeypatch.setattr(eng.runner, "read", lambda drawn: (order.append("read"), read(drawn))[1])
    request = Request("on", PROMPTS[0], 7, ignore_eos=True)
    eng.submit(request, lambda event: order.append(len(event.tokens)))
    while eng.step():
        pass
    assert order == ["run", "run", "read", 3, "run", "read", 3, "run", "read", 1]


def test_deadline_ends_a_request():
    eng, events = engine("llama"), []
    eng.submit(Request("late", PROMPTS[2], 24, deadline=1e-9), events.append)
    assert eng.step() and not eng.step()
    assert [event.finish_reason for event in events] == ["deadline"]


def written(events: list[Event]) -> tuple[list[int], list[float]]:
    """Tokens, and logprobs to the last bit."""
    return (
        [token for event in events for token in event.tokens],
        [value for event in events for value in event.logprobs],
    )


class Broken:
    """A listener, a tokenizer's stream or a matcher that raises; what it was called with."""

    def __init__(self, error: Exception) -> None:
        self.calls, self.error = [], error

    def __call__(self, *args) -> None:
        self.calls += args
        raise self.error


@pytest.mark.parametrize("what", ["listener", "reader", "flush", "mask", "impossible"])
def test_what_raises_ends_its_own_request_with_one_error(what, monkeypatch):
    """``on_event``, the text of the tokens, the text held back at the end, a grammar that turns out
    too complex (with a library's own exception too), a request that came to be impossible."""
    eng = engine("llama")
    error = jl.JaxLlamaError("too complex") if what == "mask" else RuntimeError("gone")
    broken, events = Broken(error), {"bad": [], "well": []}
    listener = broken if what == "listener" else events["bad"].append
    eng.submit(Request("bad", PROMPTS[4], 20, ignore_eos=True), listener)
    well = Request("well", PROMPTS[3], 8)
    eng.submit(well, events["well"].append)
    before = eng.stats().finished.get("error", 0)
    if what == "impossible":
        monkeypatch.setattr(eng.runner.pages, "count", 2)  # well's
    eng.step()
    if what == "mask":
        eng.live["bad"].matcher = Matcher(types.SimpleNamespace(compute_bitmask=broken), 256)
    elif what in ("reader", "flush"):
        monkeypatch.setattr(
            eng.live["bad"].reader, {"reader": "read", "flush": "close"}[what], broken
        )
        if what == "flush":
            eng.cancel("bad")
    while eng.step():
        pass
    check_answer("llama", well, events["well"])
    heard = broken.calls if what == "listener" else events["bad"]
    assert [event.finish_reason for event in heard if event.finish_reason] == ["error"]
    assert heard[-1].finish_reason == "error"
    if what == "impossible":
        assert "exceed the cache of" in heard[-1].message
    else:
        assert heard[-1].error is error and heard[-1].message == str(error)
    assert eng.stats().finished["error"] == before + 1 and eng.failure is None


def test_a_step_that_raises_ends_the_engine_and_everybody_is_told(monkeypatch, caplog):
    eng, events = Engine(model("llama"), **OPTIONS), {"a": [], "b": [], "c": []}
    eng.warm_up = lambda: None
    eng.submit(Request("a", PROMPTS[2], 24), events["a"].append)
    eng.submit(Request("b", PROMPTS[3], 24), Broken(RuntimeError("gone")))

    def run(*_) -> None:
        eng.submit(Request("c", PROMPTS[3], 24), events["c"].append)  # not taken by a step yet
        raise MemoryError("no more")

    monkeypatch.setattr(eng.runner, "run", run)
    eng.start()
    eng._thread.join(60)
    assert eng.failure == eng.closed == "the engine failed: MemoryError: no more"
    for key in "ac":
        [last] = events[key]
        assert last.finish_reason == "error" and isinstance(last.error, EngineFailed)
    with pytest.raises(EngineClosed, match="MemoryError: no more"):
        eng.submit(Request("d", (5,), 2), print)
    assert eng.drain(timeout=1)
    eng.stop()
    assert "no more" in caplog.text


def test_what_runs_shares_the_pages_of_a_common_beginning():
    """Ten questions about one text, longer than a row's share of the cache: pages, not copies."""
    eng = Engine(model("llama"), **{**OPTIONS, "max_slots": 12, "cache_tokens": 256})
    text = tuple(np.random.default_rng(5).integers(3, 97, 64).tolist())
    first = Request("first", (*text, 7), 4)
    check_answer("llama", first, eng.generate([first])["first"])
    requests = [Request(f"m{i}", (*text, 5, 7 + i), 8) for i in range(10)]
    events = {request.id: [] for request in requests}
    for request in requests:
        eng.submit(request, events[request.id].append)
    while eng.step():
        used = eng.scheduler.pages.used
        assert used <= 64 // 16 + 10
    for request in requests:
        check_answer("llama", request, events[request.id])
        assert events[request.id][-1].cached_tokens == 64
    assert eng.stats().preemptions == 0


def test_long_rows_are_decoded_by_a_program_of_their_own(monkeypatch):
    """As on a GPU: what looks at two pages of a row, and what looks at all."""
    two = property(lambda options: (2, options.row_pages))
    monkeypatch.setattr(ResolvedOptions, "contexts", two)
    eng = Engine(model("llama"), **OPTIONS)
    seen, decode = [], eng.runner._decode
    monkeypatch.setattr(eng.runner, "_decode", lambda c: (seen.append(c.context), decode(c))[1])
    requests = [Request("a", PROMPTS[2], 20), Request("b", PROMPTS[7], 5)]
    for request in requests:
        check_answer("llama", request, eng.generate([request])[request.id])
    assert set(seen) == {2, 6} and seen[0] == 2


def test_an_answer_is_known_when_the_talk_goes_on():
    eng = engine("llama")
    talk = tuple(np.random.default_rng(66).integers(3, 97, 30).tolist())
    for turn in range(2):
        request = Request(f"t{turn}", talk, 18, ignore_eos=True)
        events = eng.generate([request])[request.id]
        assert events[-1].cached_tokens == (0, 47 // 16 * 16)[turn]
        talk += tuple(token for event in events for token in event.tokens) + (9,)


@FAMILY
def test_a_deterministic_engine_gives_the_same_bits_in_any_company(family):
    """Alone on a new engine, and among others that took the first slots, shared their prefixes,
    sampled otherwise and were more urgent."""
    lm = dataclasses.replace(model(family), deterministic=True)
    long = tuple(np.random.default_rng(11).integers(3, 97, 45).tolist())
    prompts = [long, long[:33], long[:16], long[:17], (5,), long, PROMPTS[8]]
    requests = [
        Request(f"d{index}", prompt, 9, SAMPLINGS[index % 5], priority=index % 3, ignore_eos=True)
        for index, prompt in enumerate(prompts)
    ]

    def run(*requests: Request) -> dict[str, tuple]:
        eng = Engine(lm, **OPTIONS)
        assert eng.options.deterministic and eng.options.sizes == (32,)
        return {key: written(events) for key, events in eng.generate(requests).items()}

    together, reverse = run(*requests), run(*requests[::-1])
    for request in requests:
        assert run(request)[request.id] == together[request.id] == reverse[request.id]


def test_options_that_do_not_go_together_are_refused_by_name():
    lm = model("llama")
    fixed = dataclasses.replace(lm, deterministic=True)
    for bad, options, words in (
        (lm, {"max_slots": 0}, "max_slots = 0: must be a whole number >= 1"),
        (lm, {"max_slots": None}, "max_slots = None: must be a whole number"),
        (lm, {"prefill_rows": 1.5}, "prefill_rows = 1.5: must be a whole number"),
        (lm, {"max_len": 1}, "max_len = 1: must be a whole number >= 2"),
        (lm, {"max_len": 5000}, "max_len = 5000: tiny-bytes has a context of 4096"),
        (lm, {"prefill_chunk": 128}, "prefill_chunk = 128: exceeds max_len = 96"),
        (lm, {"page_size": 32}, "page_size = 32: exceeds prefill_chunk = 16"),
        (model("hybrid"), {"page_size": 5}, "page_size = 5: must divide 16, as GLA's states"),
        (lm, {"memory_share": 1.5}, "memory_share = 1.5: must be in"),
        (lm, {"memory_share": "all"}, "memory_share = 'all': must be a number"),
        (lm, {"prefix_cache": 1}, "prefix_cache = 1: must be true or false"),
        (lm, {"prefill_rows": 5}, "prefill_rows = 5: exceeds max_slots = 4"),
        (lm, {"token_budget": 15}, "token_budget = 15: less than prefill_chunk = 16"),
        (lm, {"token_budget": 16, "prefill_rows": 2}, "prefill_rows = 2: 16 tokens each exceed"),
        (lm, {"cache_tokens": 80}, "cache_tokens = 80: less than max_len = 96"),
        (lm, {"steps_per_call": 96}, "steps_per_call = 96: an answer within max_len = 96"),
        (lm, {"kv_dtype": "int16"}, "kv_dtype = 'int16': allowed are float32"),
        (lm, {"kv_dtype": "fp7"}, "kv_dtype = 'fp7': allowed are float32"),
        (lm, {"deterministic": 1}, "deterministic = 1: must be true or false"),
        (lm, {"draft": "eagle"}, "draft = 'eagle': expected \"ngram\" or a LanguageModel"),
        (lm, {"draft": model("hybrid")}, "draft: .* has another tokenizer than tiny-bytes"),
        (lm, {"draft": "ngram", "draft_tokens": 16}, "draft_tokens = 16: must be from 0"),
        (lm, {"draft_tokens": 3}, "draft_tokens = 3 needs a draft"),
        (fixed, {"draft": "ngram"}, "draft = ngram: a deterministic engine decodes in one shape"),
        (fixed, {"draft": lm}, "draft = tiny-bytes: a deterministic engine decodes in one shape"),
        (fixed, {"prefill_rows": 2}, "prefill_rows = 2: must be 1"),
        (fixed, {"page_size": 5}, "page_size = 5: must divide 16, as a deterministic"),
        (fixed, {"cache_tokens": 208}, "cache_tokens = 208: less than 4 slots of 96 tokens"),
    ):
        with pytest.raises(jl.JaxLlamaError, match=words) as error:
            Engine(bad, **{**OPTIONS, **options})
        assert "\n" not in str(error.value)
    rope = RopeConfig(theta=1e4, scaling="dynamic", factor=2.0, original_max_position=16)
    dynamic = LanguageModel(lm.config.replace(rope=rope), lm.params, None)
    # Its keys depend on the length of the whole prompt.
    assert not Engine(dynamic, **OPTIONS).options.prefix_cache
    for smallest in ({"max_len": 2, "max_slots": 1}, {"max_len": 3, "prefill_chunk": 3}):
        eng = Engine(lm, **smallest)
        assert eng.options.steps_per_call == eng.options.max_len - 1


def test_a_cache_on_a_cpu_is_a_gibibyte_or_what_the_slots_can_use():
    small = FAMILIES["gqa"].replace(max_position=512)
    token = 2 * small.n_layers * small.n_kv_heads * small.head_dim * 4
    assert EngineOptions(max_slots=4).resolve(small, jnp.float32).cache_tokens == 4 * 512
    assert EngineOptions(max_slots=4, max_len=90).resolve(small, jnp.float32).cache_tokens == 4 * 96
    large = small.replace(max_position=2**24)
    sizes = EngineOptions(max_slots=4).resolve(large, jnp.float32)
    assert 0.99 * 2**30 < sizes.cache_tokens * token <= 2**30 + 16 * token
    assert sizes.max_len == 2**30 // token  # one request may have it all
    fixed = EngineOptions(max_slots=4, deterministic=True).resolve(large, jnp.float32)
    assert fixed.max_len == 2**30 // token // 4 and fixed.pages == 4 * fixed.row_pages


@pytest.mark.parametrize(
    ("option", "says"), [("slots", "max_slots"), ("max_length", "max_len"), ("zzz", "it has ")]
)
def test_an_option_that_is_none_is_named(option, says):
    lm = types.SimpleNamespace()  # nothing of it is looked at
    with pytest.raises(jl.JaxLlamaError, match=f"^{option}: Engine has no such option; .*{says}"):
        Engine(lm, **{option: 3})


def test_ignore_eos_goes_on():
    lm, eng = model("llama"), engine("llama")
    stops = [p for p in PROMPTS if alone("llama", p, SAMPLINGS[1])[2]]
    prompt = stops[0] if stops else PROMPTS[2]
    request = Request("on", prompt, MAX_NEW, SAMPLINGS[1], ignore_eos=True)
    events = eng.generate([request])["on"]
    assert events[-1].finish_reason == "length"
    assert events[-1].completion_tokens == MAX_NEW
    assert lm.config.eos_token_ids == (2,)


def test_bad_requests_are_refused_with_a_reason():
    eng, other = engine("llama"), engine("hybrid")
    for bad, words in (
        (lambda: Request("x", ()), "the prompt is empty"),
        (lambda: Request("x", (1,), max_new_tokens=0), "max_new_tokens = 0"),
        (lambda: Request("x", (1,), logprobs=21), "logprobs = 21"),
        (lambda: Request("x", (1,), stop=("",)), "must not be empty"),
        (lambda: Request("x", (1,), deadline=0.0), "deadline = 0.0"),
        (lambda: Request(5, (1,)), "id = 5: must be str"),
        (lambda: Request("x", (1,), max_new_tokens=2.5), "max_new_tokens = 2.5: must be int"),
        (lambda: Request("x", (1,), priority="high"), "priority = 'high': must be int"),
        (lambda: Request("x", (1,), logprobs=2.5), "logprobs = 2.5: must be int or None"),
        (lambda: Request("x", (1,), sampling={}), "sampling = {}: must be Sampling"),
        (lambda: Request("x", (1,), stop=(5,)), r"stop = \(5,\): must be strings"),
        (lambda: eng.submit(Request("x", (256,)), print), "256 is outside the vocabulary of 256"),
        (lambda: eng.submit(Request("x", (1,) * 90), print), "exceed the engine's limit of 96"),
        (lambda: other.submit(Request("x", (1,), 2, stop=("a",)), print), "need a tokenizer"),
        (lambda: other.submit(Request("x", (1,), 2, grammar=Grammar("regex", "a")), print),
         "needs a tokenizer|needs llguidance"),
    ):  # fmt: skip
        with pytest.raises(jl.JaxLlamaError, match=words):
            bad()
    eng.submit(Request("twice", (5,), 2), lambda event: None)
    with pytest.raises(jl.JaxLlamaError, match="'twice' is in flight already"):
        eng.submit(Request("twice", (5,), 2), print)
    while eng.step():
        pass


def test_a_full_queue_says_when_to_come_back():
    eng = Engine(model("llama"), **{**OPTIONS, "max_queue": 2})
    for index in range(2):
        eng.submit(Request(f"q{index}", (5, 6), 2), lambda event: None)
    with pytest.raises(QueueFull, match="2 requests are waiting") as full:
        eng.submit(Request("q2", (5, 6), 2), lambda event: None)
    assert full.value.retry_after >= 1
    eng.stop()


def test_thread_serves_many_submitters_and_drains():
    eng = Engine(model("llama"), **OPTIONS)
    eng.warm_up = lambda: None  # compiled by the other tests, or when first needed
    eng.start()
    requests = [Request(f"t{index}", PROMPTS[index % 9], 7) for index in range(24)]
    events: dict[str, list[Event]] = {request.id: [] for request in requests}

    def client(mine: list[Request]) -> None:
        for request in mine:
            eng.submit(request, events[request.id].append)

    threads = [threading.Thread(target=client, args=(requests[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert eng.drain()
    for request in requests:
        check_answer("llama", request, events[request.id])
    with pytest.raises(EngineClosed, match="shutting down"):
        eng.submit(requests[0], print)
    eng.stop()


def test_stop_ends_everything_in_flight():
    eng, events = Engine(model("llama"), **OPTIONS), []
    eng.submit(Request("a", PROMPTS[2], 24), events.append)
    eng.step()
    eng.submit(Request("b", PROMPTS[2], 24), events.append)
    eng.stop()
    ends = [event.id for event in events if event.finish_reason == "cancelled"]
    assert sorted(ends) == ["a", "b"]
