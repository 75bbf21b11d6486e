"""What ``jaxllama bench serve`` asks for: shared beginnings, turns, lengths from a file."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.bench import load_generator
from jaxllama.bench.load_generator import Lengths, Load
from jaxllama.bench.workload import conversations, read_lengths
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.serving.engine.engine import Engine
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import byte_tokenizer, serving
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

CFG = LLAMA.replace(vocab_size=260)


@pytest.fixture(scope="module")
def lm():
    return LanguageModel(CFG, jax.tree.map(jnp.asarray, seeded_params(CFG)), byte_tokenizer())


def test_later_turns_repeat_what_was_said(lm):
    engine = FakeEngine(lm.tokenizer, eos=2, max_len=200, max_queue=64)
    engine.start()
    with serving(lm, engine) as url:
        load = Load(url, requests=4, prompt_tokens=Lengths("2:6"), new_tokens=Lengths("3"),
                    prefix_tokens=10, prefixes=2, turns=3)  # fmt: skip
        report = load_generator.run(load)
    engine.stop()
    assert (report["requests"], report["answered"], report["output_tokens"]) == (12, 12, 36)
    asked = sorted((request.prompt for request in engine.requests), key=len)
    firsts = [prompt for prompt in asked if len(prompt) <= 16]
    assert len({prompt[:10] for prompt in firsts}) == 2 and len(firsts) == 4
    for prompt in asked:
        if len(prompt) > 16:  # ends with the answer to an earlier prompt, and new ids
            before = max((p for p in asked if p == prompt[: len(p)] and p != prompt), key=len)
            answer = prompt[len(before) : len(before) + 3]
            assert bytes(answer).decode().strip("abcdefghij ") == "", "letters that it wrote"
            assert len(before) + 5 <= len(prompt) <= len(before) + 9


def test_conversations_of_a_real_engine_are_found_in_its_cache(lm):
    engine = Engine(lm, max_slots=2, max_len=512, prefill_chunk=16)
    engine.start()
    with serving(lm, engine) as url:
        load = Load(url, requests=2, prompt_tokens=Lengths("20"), new_tokens=Lengths("8"), turns=8)
        report = load_generator.run(load)
    engine.stop()
    assert report["answered"] == 16
    prompts = [28 * turn + 20 for turn in range(8)]
    assert report["prompt_tokens"] == 2 * sum(prompts)
    # At least the whole blocks of the prompt before, but for its last token.
    least = 2 * sum((length - 1) // 16 * 16 for length in prompts[:-1])
    assert report["cached_tokens"] >= least
    assert "in the server's cache" in load_generator.table(report)


def test_lengths_of_files(tmp_path):
    chats = [
        {"conversations": [
            {"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80},
            {"from": "human", "value": "é"}, {"from": "gpt", "value": "z" * 400}]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q" * 8},
                           {"from": "gpt", "value": "a" * 4}]},
        {"conversations": [{"from": "human", "value": "nobody answered"}]},
    ]  # fmt: skip
    chat, pairs = tmp_path / "chats.json", tmp_path / "pairs.jsonl"
    chat.write_text(json.dumps(chats))
    pairs.write_text(
        '{"prompt_tokens": 7, "new_tokens": 9}\n\n{"prompt_tokens": 1, "new_tokens": 2}'
    )
    assert read_lengths(chat) == [[(10, 20), (1, 100)], [(2, 1)]]
    assert read_lengths(pairs) == [[(7, 9)], [(1, 2)]]

    def made(path, longest=None, **more):
        load = Load("http://x", requests=50, lengths=path, **more)
        return conversations(load, np.random.default_rng(0), 100, longest)

    sizes = {tuple((len(turn.ids), turn.new_tokens) for turn in turns) for turns in made(chat)}
    assert sizes == {((10, 20),), ((2, 1),)}
    both = {tuple((len(t.ids), t.new_tokens) for t in turns) for turns in made(chat, turns=2)}
    assert both == {((10, 20), (1, 100)), ((2, 1),)}
    cut = {tuple((len(t.ids), t.new_tokens) for t in turns) for turns in made(chat, 60, turns=2)}
    assert cut == {((10, 20),), ((2, 1),)}, "turns that do not fit are not asked"
    with pytest.raises(JaxLlamaError, match="as short as 2 tokens"):
        made(chat, 2)
    for text, message in (
        ('{"prompt_tokens": 0, "new_tokens": 2}', ":1: needs prompt_tokens"),
        ('{"prompt_tokens": 1, "new_tokens": 2}\nx', ":2: needs prompt_tokens"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 0: no conversation"),
    ):
        pairs.write_text(text)
        with pytest.raises(JaxLlamaError, match=message):
            read_lengths(pairs)
