"""Engine: every request's tokens are those it gets alone, whatever else happens.

``test_engine_state`` has the same of a model with states.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import RopeConfig
from jaxllama.engine import runner
from jaxllama.engine.engine import Engine
from jaxllama.engine.grammar import Matcher
from jaxllama.engine.options import EngineOptions, ResolvedOptions, default_cache_dtype
from jaxllama.engine.programs import KEPT, Programs, name
from jaxllama.engine.request import (
    EngineClosed,
    EngineFailed,
    Event,
    Grammar,
    QueueFull,
    Request,
)
from jaxllama.engine.step_input import Ended, StepInput, Submitted
from jaxllama.kept import Kept, Wanted, keep, read
from jaxllama.language_model import LanguageModel
from pallas_kernels.jax_internals import persistent_cache_min_compile_time_secs
from tests.helpers.engine_cases import (
    DELTA_FAMILIES,
    DELTA_ROWS,
    MAX_LEN,
    OPTIONS,
    PROMPTS,
    SAMPLINGS,
    check_answer,
    engine,
    model,
    search,
    written,
)
from tests.helpers.models import FAMILIES

FAMILY = pytest.mark.parametrize("family", ["llama", "gla", "hybrid"])


@pytest.mark.core
def test_tokens_are_those_of_the_request_alone(monkeypatch):
    """Many at once in a short cache, so that rows are preempted; nothing of a free page matters."""
    eng, called = engine("llama"), set()
    programs, before = eng.runner._programs, eng.stats().preemptions
    call = programs.call
    monkeypatch.setattr(programs, "call", lambda key, *more: called.add(key) or call(key, *more))
    search("llama", 8)
    assert eng.stats().preemptions > before
    assert called <= eng.runner._wanted().keys(), "the warm-up would have compiled them all"
    assert {key[0] for key in called} == {"admit", "fill", "decode"}


@pytest.mark.slow
@FAMILY
def test_tokens_are_those_of_the_request_alone_in_many_schedules(family):
    search(family, 70)


@pytest.mark.core
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("hybrid", "latent", "gemma4")),
        *DELTA_ROWS,
    ],
)
def test_a_repeated_prefix_is_not_computed_again(family):
    eng = engine(family)
    prompt = tuple(np.random.default_rng(99).integers(3, 97, 40).tolist())
    hits = []
    for index, tail in enumerate([(5,), (5,), (6, 7)]):
        request = Request(f"p{index}", prompt + tail, 6)
        events = eng.generate([request])[request.id]
        check_answer(family, request, events)
        hits.append(events[-1].cached_tokens)
    assert hits == [0, 32, 32]


def test_the_warm_up_compiles_all_and_a_second_engine_takes_it(tmp_path, monkeypatch):
    """Every sampling feature; counted by jax itself."""

    def made() -> Engine:
        eng = Engine(model("llama"), **{**OPTIONS, "max_slots": 1, "max_len": 48})
        eng.warm_up()
        return eng

    monkeypatch.setattr(runner, "folder", lambda _: tmp_path)
    requests = [Request(f"w{i}", PROMPTS[i], 5, SAMPLINGS[i % 5], logprobs=3) for i in range(6)]
    first, compiled = made(), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    answers = first.generate(requests)
    first.generate([Request("one", (5, 6), 2)])
    assert compiled == [] and first.stats().compilations == 0
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(Wanted, "lower", None)
    second = made()
    assert second.generate(requests) == answers
    assert second.stats().compilations == 0
    wanted, home = second.runner._wanted(), jax.devices()[:1]
    key, one = wanted.popitem()
    others = [one, one._replace(static={**one.static, "width": 2}), one._replace(cfg=None)]
    assert len({name({**wanted, key: other}, home) for other in others}) == 3


def test_kept_programs_that_are_damaged_are_compiled_again(tmp_path):
    wanted = {"one": Wanted(jax.jit(lambda x: x + 1), (jnp.zeros(3),))}
    for damage in (0, 100):
        for path in tmp_path.iterdir():
            path.write_bytes(path.read_bytes()[:-damage])
        programs = Programs(tmp_path, jax.devices()[:1])
        if damage:
            with pytest.warns(UserWarning, match="compiling again"):
                programs.add(wanted)
        else:
            programs.add(wanted)
        assert programs.call("one", wanted["one"]).tolist() == [1, 1, 1]


def test_a_kept_program_that_cannot_be_read_is_compiled_again(tmp_path):
    jitted, device = jax.jit(lambda x: x + 1), jax.devices()[:1]
    wanted = {key: Wanted(jitted, (jnp.zeros(key),)) for key in (1, 2)}
    Programs(tmp_path, device).add(wanted)
    [path] = tmp_path.iterdir()
    kept = read(path)
    keep(path, kept._replace(programs=[kept.programs[0], (b"", *kept.programs[1][1:])]), KEPT)
    with pytest.warns(UserWarning, match="compiling again"):
        (programs := Programs(tmp_path, device)).add(wanted)
    assert [programs.call(key, wanted[key]).tolist() for key in (1, 2)] == [[1], [1, 1]]
    assert read(path).programs[1][0], "which is kept again"


def test_a_cpus_program_is_compiled_past_jaxs_cache(tmp_path):
    """One from there lacks functions when it is written once more: the start after that failed."""
    seconds, asked = persistent_cache_min_compile_time_secs, []
    jitted = jax.jit(lambda x: x + 1)

    class Known:
        __name__ = "known"
        in_tree = None

        def as_text(self):
            return ""

        def lower(self, *arguments):
            return self

        def compile(self, compiler_options):
            asked.append((compiler_options, seconds.value))
            return jitted.lower(jnp.zeros(3)).compile()

    before, programs = seconds.value, Programs(tmp_path, jax.devices()[:1])
    programs.add({"one": Wanted(Known(), (jnp.zeros(3),))})
    assert asked == [({"xla_embed_ir_in_executable": False}, 1e9)] and seconds.value == before
    assert len(programs) == 1 and len(list(tmp_path.iterdir())) == 1


def test_only_the_newest_programs_are_kept(tmp_path):
    for number in range(KEPT + 2):
        keep(tmp_path / "engines" / f"engine-{number}.pickle", Kept((), [(b"x", None, None)]), KEPT)
    assert len(list((tmp_path / "engines").iterdir())) == KEPT
    newest = tmp_path / "engines" / f"engine-{KEPT + 1}.pickle"
    assert read(newest) == Kept((), [(b"x", None, None)]) and read(tmp_path / "none") is None


@pytest.mark.core
def test_likeliest_tokens_are_reported():
    request = Request("top", PROMPTS[2], 5, logprobs=3)
    events = engine("llama").generate([request])["top"]
    check_answer("llama", request, events)
    written, lm = list(request.prompt), model("llama")
    for event in events:
        for token, logprob, top in zip(
            event.tokens, event.logprobs, event.top_logprobs, strict=True
        ):
            padded = np.asarray([written + [0] * (32 - len(written))], np.int32)
            scores = np.asarray(lm.logits(padded, [len(written)]), np.float64)[0, len(written) - 1]
            want = np.sort(scores - np.log(np.exp(scores).sum()))[::-1][:3]
            np.testing.assert_allclose([value for _, value in top], want, atol=2e-5)
            assert top[0] == (token, pytest.approx(logprob, abs=1e-6))
            written.append(token)


@pytest.mark.core
def test_text_and_stop_strings_are_those_of_generate():
    eng, sampling = engine("llama"), jl.Sampling(temperature=1.0, seed=4)
    prompt = tuple(b"stop strings")
    [free] = eng.lm.generate([list(prompt)], 20, sampling)
    stop = free.text[4:7]
    assert stop
    [want] = eng.lm.generate([list(prompt)], 20, sampling, stop=[stop])
    requests = [
        Request("s", prompt, 20, sampling, stop=(stop,)),
        Request("f", prompt, 20, sampling),
    ]
    events = eng.generate(requests)
    for key, answer in (("s", want), ("f", free)):
        assert "".join(event.text for event in events[key]) == answer.text
        assert [token for event in events[key] for token in event.tokens] == answer.tokens
        assert events[key][-1].finish_reason == answer.finish_reason
    assert want.finish_reason == "stop"


# Grammars

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"enum": ["x", "yz"]}, "employed": {"type": "boolean"}},
    "required": ["first_name", "employed"],
    "additionalProperties": False,
}
BOUND = (
    Request("json", tuple(b"one"), 60, grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    Request(
        "drawn",
        tuple(b"two"),
        60,
        jl.Sampling(temperature=1.0, seed=3, presence_penalty=0.5),
        grammar=Grammar("json_schema", json.dumps(SCHEMA)),
    ),
    Request("word", tuple(b"three"), 30, grammar=Grammar("regex", "the only answer"), logprobs=2),
    Request("cut", tuple(b"four"), 9, grammar=Grammar("regex", "(a|b)cdefghijklmnop")),
    Request(
        "least",
        tuple(b"five"),
        24,
        jl.Sampling(temperature=1.0, seed=5),
        min_tokens=9,
        grammar=Grammar("regex", "ab[cd]{0,3}e?"),
    ),
    Request("free", tuple(b"abababab"), 24, ignore_eos=True),
)


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "draft"),
    [
        ("llama", None),
        pytest.param("hybrid", "ngram", marks=pytest.mark.slow),
        pytest.param("llama", "first", marks=pytest.mark.slow),
        pytest.param("delta", None, marks=pytest.mark.slow),
        pytest.param("kda", "ngram", marks=pytest.mark.slow),
        pytest.param("qwen3.5", "ngram", marks=pytest.mark.slow),
        pytest.param("kimi", "first", marks=pytest.mark.slow),
    ],
)
def test_tokens_under_a_grammar_are_those_of_one_mask_a_token(family, draft):
    pytest.importorskip("llguidance")
    if draft is None:
        eng = engine(family)
    else:
        by = model(family).first_layers(1) if draft == "first" else draft
        eng = Engine(model(family), **OPTIONS, draft=by)
    events = eng.generate(BOUND)
    for request in BOUND:
        check_answer(family, request, events[request.id], 1e-4)
    assert [event.finish_reason for event in events["cut"]][-1] == "length"
    answer = "".join(event.text for event in events["json"])
    assert json.loads(answer).keys() == SCHEMA["properties"].keys()
    assert all(len(event.top_logprobs) == len(event.tokens) for event in events["word"])
    # Forced tokens take no look of the host: as many a call as drafts, call after call.
    again = eng.generate([BOUND[2]])["word"]
    assert "".join(event.text for event in again) == "the only answer"
    assert [len(event.tokens) for event in again] == ([15] if draft else [3] * 5)
    with pytest.raises(jl.JaxLlamaError, match="regex: .*unclosed group"):
        eng.submit(Request("bad", (1,), grammar=Grammar("regex", "a(")), print)


# Steps


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


@pytest.mark.core
def test_deadline_ends_a_request():
    eng, events = engine("llama"), []
    eng.submit(Request("late", PROMPTS[2], 24, deadline=1e-9), events.append)
    assert eng.step() and not eng.step()
    assert [event.finish_reason for event in events] == ["deadline"]


class Broken:
    """A listener, a tokenizer's stream or a matcher that raises; what it was called with."""

    def __init__(self, error: Exception) -> None:
        self.calls, self.error = [], error

    def __call__(self, *args) -> None:
        self.calls += args
        raise self.error


@pytest.mark.core
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
        monkeypatch.setattr(eng.runner.pools[0], "count", 2)  # well's
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


@pytest.mark.core
def test_a_step_that_raises_ends_the_engine_and_everybody_is_told(monkeypatch, caplog):
    eng, events = Engine(model("llama"), **OPTIONS), {"a": [], "b": [], "c": []}
    eng.warm_up_behind = lambda: None
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
    """Three questions about one text: pages, not copies."""
    eng = Engine(model("llama"), **OPTIONS)
    text = tuple(np.random.default_rng(5).integers(3, 97, 64).tolist())
    first = Request("first", (*text, 7), 4)
    check_answer("llama", first, eng.generate([first])["first"])
    requests = [Request(f"m{i}", (*text, 5, 7 + i), 8) for i in range(4)]
    events = {request.id: [] for request in requests}
    for request in requests:
        eng.submit(request, events[request.id].append)
    while eng.step():
        assert eng.scheduler.pages.used <= 64 // 16 + 4
    for request in requests:
        check_answer("llama", request, events[request.id])
        assert events[request.id][-1].cached_tokens == 64
    assert eng.stats().preemptions == 0


def test_a_step_tells_what_it_takes(monkeypatch):
    """``engine.lockstep`` repeats it in other processes."""
    eng, steps = engine("llama"), []
    monkeypatch.setattr(eng, "on_step", steps.append)
    first, late = Request("first", (5, 6), 9), Request("late", (5,), 9, deadline=1e-6)
    eng.submit(first, lambda event: None)
    eng.submit(late, lambda event: None, with_text=False)
    before = eng.steps
    eng.step()
    eng.cancel("first")
    while eng.step():
        pass
    taken = (Submitted(first, True), Submitted(late, False), Ended("late", "deadline"))
    assert steps[0] == StepInput(before, taken)
    assert [entry for step in steps[1:] for entry in step.entries] == [Ended("first", "cancelled")]


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"deterministic": True, "cache_tokens": 384}, marks=pytest.mark.slow)],
    ids=["prefilled", "generated-again"],
)
def test_an_answer_goes_on_after_the_tokens_that_it_has(options):
    """Another engine's first tokens: drawn, with penalties, with a least length, among a few."""
    eng = engine("llama", **options)
    some = dataclasses.replace(
        Request("some", PROMPTS[3], 12, SAMPLINGS[1]), allowed_token_ids=(3, 5, 9, 70)
    )
    whole = [Request(f"w{i}", PROMPTS[i], 12, SAMPLINGS[i], logprobs=2) for i in (1, 3, 4)]
    whole += [some, dataclasses.replace(whole[0], id="least", min_tokens=9)]
    answers = eng.generate(whole)
    parts = []
    for request in whole:
        tokens, _ = written(answers[request.id])
        for cut in {1, len(tokens) - 1} - {0, len(tokens)}:
            parts.append((request, cut, tokens[:cut]))
    rest = eng.generate(
        dataclasses.replace(request, id=f"{request.id}-{cut}", begun=begun)
        for request, cut, begun in parts
    )
    assert len(parts) >= 6
    for request, cut, begun in parts:
        got, want = rest[f"{request.id}-{cut}"], answers[request.id]
        assert begun + written(got)[0] == written(want)[0]
        assert got[-1].finish_reason == want[-1].finish_reason
        assert got[-1].completion_tokens == want[-1].completion_tokens
        np.testing.assert_allclose(written(got)[1], written(want)[1][cut:], atol=5e-5)
        n_top = sum(len(event.top_logprobs) for event in got)
        assert n_top == (0 if request.logprobs is None else len(written(got)[0]))
    with pytest.raises(jl.JaxLlamaError, match="begun has 12 tokens: must be fewer than"):
        Request("x", (5,), 12, begun=(3,) * 12)


@pytest.mark.slow
def test_tokens_that_a_grammar_does_not_have_end_their_own_request(monkeypatch):
    eng, told = engine("llama"), {"bad": [], "late": [], "good": []}
    bad = Request("bad", (5,), 8, grammar=Grammar("regex", "a+"), begun=(98,))
    check = eng.admission.check

    def slowly(request):  # the engine goes to sleep meanwhile
        found = check(request)
        eng.sleep("keep")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(eng.admission, "check", slowly)
        eng.submit(Request("late", (5,), 2), told["late"].append)
    eng.step()
    eng.wake()
    eng.submit(bad, told["bad"].append)
    eng.submit(Request("good", (5,), 2), told["good"].append)
    while eng.step():
        pass
    assert [told[name][-1].finish_reason for name in told] == ["error", "error", "length"]
    assert "sleeps" in str(told["late"][-1].error) and "grammar" in str(told["bad"][-1].error)


def test_generate_takes_more_requests_than_may_wait_and_leaves_none_behind(monkeypatch):
    eng = engine("llama")
    monkeypatch.setattr(eng, "options", dataclasses.replace(eng.options, max_queue=1))
    requests = [Request(f"r{number}", (5, number), 2) for number in range(6)]
    assert all(events[-1].finish_reason for events in eng.generate(requests).values())
    with pytest.raises(jl.JaxLlamaError):
        eng.generate([requests[0], Request("long", (5,), 10**6)])
    assert eng.generate(requests[:1])["r0"][-1].finish_reason == "length"


def test_long_rows_are_decoded_by_a_program_of_their_own(monkeypatch):
    """As on a GPU: what looks at two pages of a row, and what looks at all."""
    two = property(lambda options: (2, options.row_pages))
    monkeypatch.setattr(ResolvedOptions, "contexts", two)
    eng = Engine(model("llama"), **OPTIONS)
    seen, decode = [], eng.runner._decode
    monkeypatch.setattr(
        eng.runner, "_decode", lambda call, at: (seen.append(call.context), decode(call, at))[1]
    )
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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gla", "hybrid", *DELTA_FAMILIES])
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
        eng = Engine(lm, **{**OPTIONS, "cache_tokens": 4 * MAX_LEN})
        assert eng.options.deterministic and eng.options.sizes == (32,)
        return {key: written(events) for key, events in eng.generate(requests).items()}

    together, reverse = run(*requests), run(*requests[::-1])
    assert together == reverse
    for request in requests[1::2]:
        assert run(request)[request.id] == together[request.id]


@pytest.mark.parametrize("slots, budget", [(16, 2048), (511, 2048), (512, 4096), (1024, 4096)])
def test_with_many_slots_a_step_on_a_gpu_has_two_prefill_calls(slots, budget, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    given = EngineOptions(max_slots=slots, max_len=3000, cache_tokens=10**6)
    options = given.resolve(model("llama").config, jnp.bfloat16)
    assert options.token_budget == budget
    assert options.rows(1024) * 1024 <= 2048  # of a call


def test_options_that_do_not_go_together_are_refused_by_name():
    lm = model("llama")
    fixed = dataclasses.replace(lm, deterministic=True)
    config = lm.config.replace(name="other", vocab_size=97)
    other = dataclasses.replace(lm, config=config, tokenizer=None)
    for bad, options, words in (
        (lm, {"max_slots": 0}, "max_slots = 0: must be a whole number >= 1"),
        (lm, {"max_slots": None}, "max_slots = None: must be a whole number"),
        (lm, {"prefill_rows": 1.5}, "prefill_rows = 1.5: must be a whole number"),
        (lm, {"max_len": 1}, "max_len = 1: must be a whole number >= 2"),
        (lm, {"max_len": 5000}, "tiny-llama has a context of 4096, so give at most that"),
        (lm, {"prefill_chunk": 128}, "prefill_chunk = 128: exceeds max_len = 96"),
        (lm, {"page_size": 32}, "page_size = 32: exceeds prefill_chunk = 16"),
        (model("hybrid"), {"page_size": 5}, "page_size = 5: must divide 16, as GLA's states"),
        (lm, {"memory_share": 1.5}, "memory_share = 1.5: must be a number in"),
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
        (
            lm,
            {"draft": "eagle"},
            'draft = \'eagle\': expected "ngram", "mtp", a LanguageModel or a Dra',
        ),
        (lm, {"draft": "mtp"}, 'draft = "mtp": tiny-llama has no head for multi-token'),
        (lm, {"draft": other}, "draft: other has another tokenizer than tiny-llama"),
        (lm, {"draft": "ngram", "draft_tokens": 16}, "draft_tokens = 16: must be from 0"),
        (lm, {"draft_tokens": 3}, "draft_tokens = 3 needs a draft"),
        (fixed, {"prefill_rows": 2}, "prefill_rows = 2: must be 1"),
        (fixed, {"page_size": 5}, "page_size = 5: must divide 32, as a deterministic"),
        (fixed, {"cache_tokens": 208}, "cache_tokens = 208: less than 4 slots of 96 tokens"),
    ):
        with pytest.raises(jl.JaxLlamaError, match=words) as error:
            Engine(bad, **{**OPTIONS, "cache_tokens": None, **options})
        assert "\n" not in str(error.value)
    rope = RopeConfig(theta=1e4, scaling="dynamic", factor=2.0, original_max_position=16)
    dynamic = LanguageModel(lm.config.replace(rope=rope), lm.params, None)
    # Its keys depend on the length of the whole prompt.
    assert not Engine(dynamic, **OPTIONS).options.prefix_cache
    for smallest in ({"max_len": 2, "max_slots": 1}, {"max_len": 3, "prefill_chunk": 3}):
        eng = Engine(lm, **smallest)
        assert eng.options.steps_per_call == eng.options.max_len - 1


@pytest.mark.parametrize(
    "card, dtype, cache",
    [
        ("NVIDIA GeForce RTX 4070", "bfloat16", "int8"),
        ("NVIDIA GeForce RTX 4070", "float32", "float32"),
        ("NVIDIA GeForce RTX 4090", "bfloat16", "bfloat16"),
        ("cpu", "float16", "float16"),
    ],
)
def test_a_small_card_has_a_cache_of_codes(card, dtype, cache):
    assert default_cache_dtype(dtype, SimpleNamespace(device_kind=card)) == cache


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
    """A stop token that is certain ends an answer, or does not. A row that the device stops and the
    host awaits would be stepped forever, so the steps are bounded."""
    eng = engine("llama")
    for ignores in (False, True):
        sampling, events = jl.Sampling(logit_bias={2: 50.0}), []
        request = Request(f"on{ignores}", PROMPTS[2], 5, sampling, ignore_eos=ignores)
        eng.submit(request, events.append)
        assert not all(eng.step() for _ in range(20)), "the request never ends"
        check_answer("llama", request, events)
        assert events[-1].completion_tokens == (5 if ignores else 1)


@pytest.mark.core
def test_bad_requests_are_refused_with_a_reason():
    eng = engine("llama")
    other = Engine(dataclasses.replace(model("llama"), tokenizer=None), **OPTIONS)
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
        (
            lambda: other.submit(Request("x", (1,), 2, grammar=Grammar("regex", "a")), print),
            "needs a tokenizer|needs llguidance",
        ),
    ):
        with pytest.raises(jl.JaxLlamaError, match=words):
            bad()
    eng.submit(Request("twice", (5,), 2), lambda event: None)
    with pytest.raises(jl.JaxLlamaError, match="'twice' is in flight already"):
        eng.submit(Request("twice", (5,), 2), print)
    while eng.step():
        pass


@pytest.mark.core
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "123"},
        {"prompt": None},
        {"prompt": (1.7,)},
        {"stop": "END"},
        {"stop": None},
        {"allowed_token_ids": "x"},
    ],
)
def test_a_request_of_other_types_says_so(fields):
    [name] = fields
    with pytest.raises(jl.JaxLlamaError, match=f"^{name} = .*: must be (token ids|strings)"):
        Request(**{"id": "a", "prompt": (1,), **fields})


def test_a_full_queue_says_when_to_come_back():
    eng = Engine(model("llama"), **{**OPTIONS, "max_queue": 2})
    for index in range(2):
        eng.submit(Request(f"q{index}", (5, 6), 2), lambda event: None)
    with pytest.raises(QueueFull, match="2 requests are waiting") as full:
        eng.submit(Request("q2", (5, 6), 2), lambda event: None)
    assert full.value.retry_after >= 1
    eng.stop()


def test_a_cancelled_request_does_not_wait():
    eng = Engine(model("llama"), **{**OPTIONS, "max_queue": 3})
    for index in range(9):
        eng.submit(Request(f"q{index}", (5, 6), 2), lambda event: None)
        eng.cancel(f"q{index}")
        assert eng.stats().waiting == 0
    for index in range(3):
        eng.submit(Request(f"r{index}", (5, 6), 2), lambda event: None)
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        eng.submit(Request("r3", (5, 6), 2), lambda event: None)
    eng.stop()


def test_thread_serves_many_submitters_and_drains():
    eng = Engine(model("llama"), **OPTIONS)
    eng.warm_up_behind = lambda: None  # compiled by the other tests, or when first needed
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


@pytest.mark.core
def test_stop_ends_everything_in_flight():
    eng, events = Engine(model("llama"), **OPTIONS), []
    eng.submit(Request("a", PROMPTS[2], 24), events.append)
    eng.step()
    eng.submit(Request("b", PROMPTS[2], 24), events.append)
    eng.stop()
    ends = [event.id for event in events if event.finish_reason == "cancelled"]
    assert sorted(ends) == ["a", "b"]
