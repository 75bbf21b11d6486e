"""What ``jaxllama bench serve`` asks for: shared beginnings, turns, lengths from a file."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed import load_generator
from jaxllama.evaluation.speed.load_generator import Lengths, Load
from jaxllama.evaluation.speed.workload import conversations, read_lengths
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import serving, tiny_model


def test_later_turns_repeat_what_was_said():
    with FakeEngine(max_len=200, max_queue=64) as engine, serving(tiny_model(), engine) as url:
        load = Load(
            url,
            requests=4,
            prompt_tokens=Lengths("2:6"),
            new_tokens=Lengths("3"),
            prefix_tokens=10,
            prefixes=2,
            turns=3,
        )
        report = load_generator.run(load)
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


def test_lengths_of_files(tmp_path):
    chats = [
        {
            "conversations": [
                {"from": "human", "value": "x" * 40},
                {"from": "gpt", "value": "y" * 80},
                {"from": "human", "value": "é"},
                {"from": "gpt", "value": "z" * 400},
            ]
        },
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "q" * 8},
                {"from": "gpt", "value": "a" * 4},
            ]
        },
        {"conversations": [{"from": "human", "value": "nobody answered"}]},
    ]
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
