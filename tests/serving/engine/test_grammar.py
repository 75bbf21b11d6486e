"""Grammars: the tokens are those of one mask a token, and forced ones take no look of the host."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import ModelConfig
from jaxllama.model.decoder import forward, logits
from jaxllama.sampling import History, SamplingParams, sample
from jaxllama.serving.engine.engine import Engine
from jaxllama.serving.engine.grammar import GrammarCompiler
from jaxllama.serving.engine.request import Event, Grammar, Request
from tests.helpers.engine_cases import MAX_LEN, OPTIONS, model

llguidance = pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"enum": ["x", "yz"]}, "employed": {"type": "boolean"}},
    "required": ["first_name", "employed"],
    "additionalProperties": False,
}
REQUESTS = (
    Request("json", tuple(b"one"), 60, grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    Request("drawn", tuple(b"two"), 60, jl.Sampling(temperature=1.0, seed=3, presence_penalty=0.5),
            grammar=Grammar("json_schema", json.dumps(SCHEMA))),
    Request("word", tuple(b"three"), 30, grammar=Grammar("regex", "the only answer"), logprobs=2),
    Request("cut", tuple(b"four"), 9, grammar=Grammar("regex", "(a|b)cdefghijklmnop")),
    Request("least", tuple(b"five"), 24, jl.Sampling(temperature=1.0, seed=5), min_tokens=9,
            grammar=Grammar("regex", "ab[cd]{0,3}e?")),
    Request("free", tuple(b"abababab"), 24, ignore_eos=True),
)  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def scores_of(cfg: ModelConfig, params, tokens: jax.Array, length: jax.Array) -> jax.Array:
    hidden, _ = forward(cfg, params, tokens, length[None])
    return logits(cfg, params, hidden[:, length - 1])


@functools.cache
def alone(family: str, request: Request) -> tuple[list[int], list[float]]:
    """One token after the other: all of the text through the model, a mask of the library's own."""
    lm = model(family)
    cfg, params = lm.config, SamplingParams.stack([request.sampling], lm.config.vocab_size, 0)
    draw = jax.jit(lambda *arrays: sample(arrays[0], params, *arrays[1:]))
    matcher = None
    if request.grammar is not None:
        compiler = GrammarCompiler(lm.tokenizer, cfg.vocab_size, cfg.eos_token_ids)
        matcher = compiler.matcher(request.grammar)._matcher
    text, logprobs, history = list(request.prompt), [], None
    if request.sampling.has_penalties:
        prompt = jnp.asarray([request.prompt])
        history = History.of_prompt(prompt, jnp.asarray([len(text)]), cfg.vocab_size)
    while len(logprobs) < request.max_new_tokens and not (matcher and matcher.is_stopped()):
        allowed = np.ones(256, bool)
        if matcher is not None:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[:256].astype(bool)
        if len(logprobs) < request.min_tokens and allowed.sum() > 1:
            allowed[list(cfg.eos_token_ids)] = False
        padded = np.asarray([text + [0] * (MAX_LEN - len(text))])
        scores = scores_of(cfg, lm.params, padded, np.int32(len(text)))
        token, logprob = draw(scores, np.asarray([len(text)], np.int32), history, allowed[None])
        text.append(int(token[0]))
        logprobs.append(float(logprob[0]))
        history = None if history is None else history.add(token)
        if text[-1] in cfg.eos_token_ids and not request.ignore_eos:
            break
        if matcher is not None:
            matcher.consume_token(text[-1])
    return text[len(request.prompt) :], logprobs


def check(family: str, request: Request, events: list[Event]) -> None:
    tokens, logprobs = alone(family, request)
    assert [token for event in events for token in event.tokens] == tokens
    got = [value for event in events for value in event.logprobs]
    np.testing.assert_allclose(got, logprobs, atol=1e-4)


@pytest.mark.core
@pytest.mark.parametrize(
    ("family", "draft"),
    [
        ("llama", None),
        pytest.param("hybrid", "ngram", marks=pytest.mark.slow),
        pytest.param("llama", "first", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_mask_a_token(family, draft):
    eng = Engine(
        model(family),
        **{**OPTIONS, "cache_tokens": 96},
        draft=model(family).first_layers(1) if draft == "first" else draft,
    )
    events = eng.generate(REQUESTS)
    for request in REQUESTS:
        check(family, request, events[request.id])
    assert eng.stats().preemptions > 0
    assert [event.finish_reason for event in events["cut"]][-1] == "length"
    answer = "".join(event.text for event in events["json"])
    assert json.loads(answer).keys() == SCHEMA["properties"].keys()
    assert all(len(event.top_logprobs) == len(event.tokens) for event in events["word"])
    # Forced tokens take no look of the host: as many a call as drafts, call after call.
    again = eng.generate([REQUESTS[2]])["word"]
    assert "".join(event.text for event in again) == "the only answer"
    assert [len(event.tokens) for event in again] == ([15] if draft else [3] * 5)
