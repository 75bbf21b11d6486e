"""An offloaded model behind the engine: tokens of ``generate``, a block of rows at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

import jaxllama as jl
from jaxllama.engine import blocks
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Grammar, Request
from jaxllama.language_model import LanguageModel
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from tests.helpers.engine_cases import check_answer, model

POLICY = "0 100 50 50 0 100 gpu_batch_size=2 num_gpu_batches=2"
REQUESTS = [
    Request("a", tuple(range(5, 12)), 9),
    Request("b", (9, 8, 7), 4, jl.Sampling(temperature=1.0, seed=3)),
    Request("c", tuple(range(40, 50)), 12, jl.Sampling(repetition_penalty=1.3), logprobs=0),
    Request("f", tuple(range(30, 60)), 6),  # another shape
    Request("g", (77, 78), 7, priority=1),
]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    resident = model("llama")
    place = Placement(Policy.parse(POLICY), jnp.float32)
    params = place.tree(jax.tree.map(lambda leaf: leaf, resident.params))
    return place.model(resident.config, params, resident.tokenizer)


def test_requests_get_the_tokens_of_generate_in_blocks_of_one_shape(lm, monkeypatch):
    began = []
    begin = blocks.BlockRunner._begin

    def spied(self, newcomers):
        began.append([sequence.request.id for sequence in newcomers])
        return begin(self, newcomers)

    monkeypatch.setattr(blocks.BlockRunner, "_begin", spied)
    engine = Engine(lm, max_len=96)
    events = engine.generate(REQUESTS)
    assert began == [["g", "a", "b", "c"], ["f"]]  # g is the most urgent
    for request in REQUESTS:
        mine = events[request.id]
        check_answer("llama", request, mine)
        tokens = [token for event in mine for token in event.tokens if token != 2]
        text = lm.tokenizer.decode(tokens)
        assert "".join(event.text for event in mine) == text
        assert len(mine) >= len(tokens)  # streamed, a token a step
    stats = engine.stats()
    assert stats.pages_used == stats.running == stats.waiting == 0
    assert stats.completion_tokens == sum(event.completion_tokens for e in events.values()
                                          for event in e[-1:])  # fmt: skip


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
        ({"max_slots": 8}, "max_slots = 8: the policy has 4 rows of a block"),
        ({"page_size": 16}, "page_size = 16: the policy has blocks"),
        ({"prefix_cache": False}, "prefix_cache = False: the policy has blocks"),
        ({"deterministic": True}, "deterministic = True: the policy has blocks"),
        ({"max_len": 10**6}, "max_len = 1000000: tiny-llama has a context of"),
        ({"max_queue": 0}, "max_queue = 0: must be a whole number"),
    ],
)
def test_options_that_blocks_do_not_have_are_refused_by_name(lm, options, words):
    with pytest.raises(jl.JaxLlamaError, match=words):
        Engine(lm, **options)


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
