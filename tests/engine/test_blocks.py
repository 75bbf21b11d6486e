"""An offloaded model behind the engine: tokens of ``generate``; rows join and leave a block."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.engine import blocks
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Grammar, Request
from jaxllama.language_model import LanguageModel
from jaxllama.model.lora import attach
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from tests.helpers import lora_cases
from tests.helpers.engine_cases import check_answer, model

POLICY = "0 100 50 50 0 100 gpu_batch_size=2 num_gpu_batches=2"
REQUESTS = [
    Request("a", tuple(range(5, 12)), 9),
    Request("b", (9, 8, 7), 4, jl.Sampling(temperature=1.0, seed=3)),
    Request("c", tuple(range(40, 50)), 12, jl.Sampling(repetition_penalty=1.3), logprobs=0),
    Request("f", tuple(range(30, 60)), 6),  # a longer prompt, which joins
    Request("g", (77, 78), 7, priority=1),
]


def offloaded(family: str, policy: str) -> LanguageModel:
    resident = model(family)
    place = Placement(Policy.parse(policy), jnp.float32)
    params = place.tree(jax.tree.map(np.asarray, resident.params))
    return place.model(resident.config, params, resident.tokenizer)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return offloaded("llama", POLICY)


@pytest.fixture
def began(monkeypatch) -> list[tuple[str, list[str]]]:
    """Of each block's beginning and of each step in which rows join: which, and the newcomers."""
    found: list[tuple[str, list[str]]] = []
    do = blocks.BlockRunner._do

    def spied(self, newcomers, rows):
        if newcomers:
            what = "begin" if len(newcomers) == len(rows) else "join"
            found.append((what, [sequence.request.id for sequence in newcomers]))
        return do(self, newcomers, rows)

    monkeypatch.setattr(blocks.BlockRunner, "_do", spied)
    return found


def test_an_answer_may_end_among_the_tokens_that_its_listener_has(lm):
    """Rows of a block generate these anew, and a stop token may be among them."""
    engine = Engine(lm, max_len=96)
    tokens = [token for event in engine.generate(REQUESTS[:1])["a"] for token in event.tokens]
    again = dataclasses.replace(REQUESTS[0], begun=tokens[:6], stop_token_ids=(tokens[2],))
    [event] = engine.generate([again])["a"]
    assert (event.finish_reason, event.tokens) == ("stop", ())


def test_requests_get_the_tokens_of_generate_in_blocks_that_others_join(lm, began):
    engine = Engine(lm, max_len=96)
    events = engine.generate(REQUESTS)
    assert began == [("begin", ["g", "a", "b", "c"]), ("join", ["f"])]  # g is the most urgent
    for request in REQUESTS:
        mine = events[request.id]
        check_answer("llama", request, mine)
        tokens = [token for event in mine for token in event.tokens if token != 2]
        text = lm.tokenizer.decode(tokens)
        assert "".join(event.text for event in mine) == text
        assert len(mine) >= len(tokens)  # streamed, a token a step
    stats = engine.stats()
    assert stats.pages_used == stats.running == stats.waiting == 0
    assert stats.completion_tokens == sum(
        event.completion_tokens for e in events.values() for event in e[-1:]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("hybrid", "0 100 100 0 100 0 gpu_batch_size=2 num_gpu_batches=2"),
        ("hybrid", "0 0 0 100 0 0 gpu_batch_size=3 overlap=false sep_layer=true"),
        ("gla", "0 100 30 40 0 100 gpu_batch_size=3"),
        ("window", "0 100 50 50 100 0 gpu_batch_size=4 cpu_attention=true"),
        ("llama", "0 100 30 40 100 0 gpu_batch_size=2 num_gpu_batches=2 compress_cache=true"),
        ("llama", "0 100 0 100 100 0 gpu_batch_size=4 attn_sparsity=0.99"),
    ],
)
def test_rows_join_and_leave_whatever_holds_their_state(family, policy, began):
    """Twelve requests of many lengths, more than rows, some of which are cancelled; the tokens are
    those of ``generate``, a row at a time."""
    lm = offloaded(family, policy)
    engine = Engine(lm, max_len=96)
    rng, events = np.random.default_rng(0), {}
    requests = [
        Request(
            f"r{index}",
            tuple(rng.integers(3, 97, rng.integers(1, 40)).tolist()),
            int(rng.integers(1, 30)),
            (
                jl.Sampling(),
                jl.Sampling(temperature=1.0, seed=index),
                jl.Sampling(repetition_penalty=1.3),
            )[index % 3],
        )
        for index in range(12)
    ]
    for step in range(400):
        if step < 24 and step % 2 == 0:
            request = requests[step // 2]
            engine.submit(request, events.setdefault(request.id, []).append)
        if step in (9, 15):
            engine.cancel(f"r{step // 5}")
        if not engine.step() and step > 24:
            break
    assert sum(what == "join" for what, _ in began) >= 3
    assert engine.scheduler.pages.used == 0
    for request in requests:
        got = [token for event in events[request.id] for token in event.tokens]
        [want] = lm.generate([request.prompt], request.max_new_tokens, request.sampling)
        if events[request.id][-1].finish_reason == "cancelled":
            assert len(got) < len(want.tokens)
        assert got == want.tokens[: len(got)]
        logprobs = [value for event in events[request.id] for value in event.logprobs]
        np.testing.assert_allclose(logprobs, want.logprobs[: len(got)], atol=1e-4)


@pytest.mark.slow
def test_rows_of_a_block_have_adapters_of_their_own(lm):
    factors = [lora_cases.factors(lm.config, seed) for seed in (1, 2)]
    params = attach(tensor_table(lm.config), lm.params, factors)
    lm = dataclasses.replace(lm, params=params, adapters=("one", "two"))
    names = ["one", None, "two", "two", None, "one"]
    requests = [Request(f"{i}", (5, 6, 7), 3 + i, adapter=name) for i, name in enumerate(names)]
    events = Engine(lm, max_len=96).generate(requests)
    for request, name in zip(requests, names, strict=True):
        [want] = lm.generate([(5, 6, 7)], request.max_new_tokens, adapter=name)
        assert [t for event in events[request.id] for t in event.tokens] == want.tokens


def test_a_request_that_does_not_fit_the_block_waits_for_the_next_and_lets_none_overtake(lm):
    engine = Engine(lm, max_len=96)
    scheduler, began = engine.scheduler, [["a"], ["b"], []]
    for name, ignores in (("a", False), ("b", False), ("other", True), ("c", False)):
        engine.submit(Request(name, (5, 6, 7), 9, ignore_eos=ignores), print)
        if name in ("a", "b", "c"):
            engine._take_inbox()
            while not (plan := scheduler.plan()).budgets:
                pass
            assert [one.request.id for one in plan.admitted] == began.pop(0)


def test_a_deterministic_model_is_refused(lm):
    with pytest.raises(jl.JaxLlamaError, match="the request that begins a block decides"):
        Engine(dataclasses.replace(lm, deterministic=True), max_len=96)


def test_rows_that_end_early_and_rows_that_come_late(lm):
    engine = Engine(lm, max_len=96)
    events: dict[str, list] = {}

    def submit(*requests: Request) -> None:
        for request in requests:
            engine.submit(request, events.setdefault(request.id, []).append)

    submit(Request("long", (5, 6, 7), 14, ignore_eos=True), Request("left", (8, 9), 14))
    submit(Request("text", (5, 6, 7), 14, stop=("zzzz",), deadline=60.0))
    while not events["long"]:
        engine.step()
    engine.cancel("left")
    submit(Request("late", (5, 6, 7), 14, ignore_eos=True))
    while engine.step():
        assert engine.stats().running <= 3
    assert events["left"][-1].finish_reason == "cancelled"
    tokens = {name: [t for event in told for t in event.tokens] for name, told in events.items()}
    assert tokens["late"] == tokens["long"] and len(tokens["late"]) == 14
    assert len(tokens["left"]) < 14
    assert engine.scheduler.pages.used == 0


def test_over_http(lm):
    """Rows that come together run together; what it cannot do is said."""
    http_server = pytest.importorskip("tests.helpers.http_server")
    engine = Engine(lm, max_len=96)
    engine.start()
    with http_server.serving(lm, engine) as url, http_server.client(url) as http:

        def ask(**body):
            body = {"prompt": "abcdefg", "max_tokens": 9, "temperature": 0} | body
            return http.post("/v1/completions", json={"model": http_server.NAME, **body})

        with ThreadPoolExecutor(2) as pool:
            two = pool.submit(ask, n=2, logprobs=0, seed=1)
            [choice] = ask().json()["choices"]
        assert len(two.result().json()["choices"]) == 2
        chunks = http_server.chunks_of(ask(stream=True).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        assert len(chunks) > 1
        for refused, words in (
            ({"guided_regex": "a+"}, "grammar = "),
            ({"logprobs": 2}, "logprobs = 2"),
            ({"echo": True, "logprobs": 0, "max_tokens": 0}, "the model is offloaded"),
        ):
            reply = ask(**refused)
            assert reply.status_code == 400 and words in reply.json()["error"]["message"], refused
    engine.stop()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_slots": 8}, "max_slots = 8: with a policy the slots are the 4 rows"),
        ({"page_size": 16}, "page_size = 16: an engine of an offloaded model has no such option"),
        ({"prefix_cache": False}, "prefix_cache = False: an engine of an offloaded model"),
        ({"deterministic": True}, "deterministic = True: an engine of an offloaded model"),
        ({"max_len": 10**6}, "max_len = 1000000: tiny-llama has a context of"),
        ({"max_queue": 0}, "max_queue = 0: must be a whole number"),
    ],
)
def test_options_that_blocks_do_not_have_are_refused_by_name(lm, options, words):
    with pytest.raises(jl.JaxLlamaError, match=words):
        Engine(lm, **options)


@pytest.mark.parametrize("draft", ["ngram", "a model"])
def test_a_draft_is_refused_in_one_sentence(lm, draft):
    draft = model("llama") if draft == "a model" else draft
    with pytest.raises(
        jl.JaxLlamaError, match="draft = .*: rows join the block .* one by one"
    ) as e:
        Engine(lm, draft=draft)
    assert len(str(e.value)) < 250 and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"grammar": Grammar("regex", "a+")}, "grammar = .*no logits are masked"),
        ({"min_tokens": 2}, "min_tokens = 2: .*no logits are masked"),
        ({"logprobs": 2}, "logprobs = 2: .*no alternatives"),
        ({"adapter": "x"}, "adapter = 'x': tiny-llama has none"),
        ({"max_new_tokens": 96}, "exceed the engine's limit of 96"),
    ],
)
def test_requests_that_blocks_cannot_answer_are_refused_by_name(lm, asked, words):
    engine = Engine(lm, max_len=96)
    with pytest.raises(jl.JaxLlamaError, match=words):
        engine.submit(Request("x", (5, 6), **asked), lambda event: None)
    assert not engine.step()
