"""A request whose grammar turns out too complex, over HTTP with a real engine: it alone fails."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
pytest.importorskip("llguidance")

import tokenizers

from jaxllama.engine.engine import Engine
from jaxllama.language_model import LanguageModel
from jaxllama.text.token_bytes import byte_characters
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.http_server import NAME, client, serving
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

# Words make the automaton of a mask large at once, as those of a real vocabulary do.
WORDS = ["".join(word) for n in range(2, 9) for word in itertools.product("az", repeat=n)]
PATTERN = "(.*[a-m].{300}[b-z].*){3}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": PATTERN}},
    "required": ["a"],
}
FORMATS = {
    "regex": {"type": "regex", "regex": PATTERN},
    "schema": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
}
# The words, rather than single bytes.
BIAS = {str(byte): -100 for byte in range(256)}


@pytest.mark.slow
def test_a_grammar_that_fails_late_fails_alone():
    vocab = {char: byte for byte, char in enumerate([*byte_characters(), *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    cfg = LLAMA.replace(vocab_size=len(vocab))
    params = jax.tree.map(jnp.asarray, seeded_params(cfg))
    lm = LanguageModel(cfg, params, Tokenizer(backend, "test tokenizer"))
    engine = Engine(lm, max_slots=10, max_len=128, prefill_chunk=16, prefix_cache=False)
    engine.warm_up_behind = lambda: None  # only what is used is compiled
    engine.start()

    def ordinary(seed: int) -> dict:
        return {
            "model": NAME,
            "prompt": "Once",
            "max_tokens": 100,
            "seed": seed,
            "ignore_eos": True,
        }

    def bad(kind: str) -> dict:
        return {
            "model": NAME,
            "prompt": "Hi",
            "max_tokens": 120,
            "temperature": 1.5,
            "seed": 1,
            "logit_bias": BIAS,
            "response_format": FORMATS[kind],
        }

    try:
        with serving(lm, engine) as url, client(url) as http, ThreadPoolExecutor(10) as pool:

            def ask(body: dict, stream: bool = True):
                return http.post("/v1/completions", json={**body, "stream": stream})

            def text(reply) -> str:
                *lines, end = [line[6:] for line in reply.text.split("\n\n") if line]
                assert end == "[DONE]"
                chunks = [json.loads(line)["choices"][0] for line in lines]
                assert chunks[-1]["finish_reason"] == "length"
                return "".join(chunk["text"] for chunk in chunks)

            alone = [text(ask(ordinary(seed))) for seed in range(8)]
            streams = [pool.submit(ask, ordinary(seed)) for seed in range(8)]
            streamed = pool.submit(ask, bad("regex"))
            whole = pool.submit(ask, bad("schema"), stream=False)
            assert whole.result().status_code == 400
            lines = [line[6:] for line in streamed.result().text.split("\n\n") if line]
            errors = [whole.result().json(), json.loads(lines[-1])]
            for error in errors:
                assert error["error"]["message"] == (
                    "grammar: lexer error: too many expressions constructed"
                )
            assert [text(stream.result()) for stream in streams] == alone
            assert http.get("/health").status_code == 200
            assert text(ask(ordinary(3))) == alone[3]
    finally:
        engine.stop()
    # An answer may be read before the step that ended it is counted.
    assert engine.stats().finished == {"length": 17, "error": 2}
