"""Many mixed requests at once, each compared with its own answer alone, to the byte.

The server drafts, shares prefixes, holds answers to grammars, and loads and unloads
adapters meanwhile. The reference is another engine that has none of this: no drafts, no prefix
cache, its adapters loaded with the model, one request at a time. Both are deterministic.

``REQUESTS`` is the number of requests; ``JAXLLAMA_REQUESTS=10000`` makes the long run.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
pytest.importorskip("llguidance")

from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.engine.engine import Engine
from jaxllama.language_model import LanguageModel
from jaxllama.model import lora
from tests.helpers import lora_cases
from tests.helpers.http_server import CFG, NAME, client, serving
from tests.helpers.seeded import seeded_params
from tests.serving.http.test_tools import CITY, TOOLS, tokenizer

REQUESTS = int(os.environ.get("JAXLLAMA_REQUESTS", "1000"))
AT_ONCE, BODIES = 12, 96
ADAPTERS = ("one", "two", "three")  # one more than there are slots
KINDS = ("chat", "completion", "tools", "schema", "adapter", "adapter", "embedding", "sampled")
MAX_LEN = 512


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of one of ``BODIES`` requests."""
    own, kind = random.Random(number), KINDS[number % len(KINDS)]
    shared = "A long beginning that several prompts share, for the prefix cache. "
    text = own.choice((shared, "")) + "".join(
        own.choice("abcdef ghij") for _ in range(own.randint(1, 60))
    )
    limit = own.randint(4, 24)
    plain = {"model": NAME, "max_tokens": limit, "temperature": 0, "seed": number}
    said = {"messages": [{"role": "user", "content": text}]}
    if kind == "embedding":
        return "/v1/embeddings", {"model": NAME, "input": text}
    if kind == "chat":
        return "/v1/chat/completions", {**plain, **said, "logprobs": True, "top_logprobs": 2}
    if kind == "tools":
        asked = {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 96}
        return "/v1/chat/completions", {**plain, **said, **asked}
    if kind == "schema":
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
        return "/v1/chat/completions", {**plain, **said, "response_format": form, "max_tokens": 64}
    if kind == "sampled":
        return "/v1/completions", {**plain, "prompt": text, "temperature": 0.8, "n": 2}
    model = own.choice(ADAPTERS) if kind == "adapter" else NAME
    return "/v1/completions", {**plain, "prompt": text, "logprobs": 1, "model": model}


def essence(answer: dict[str, Any]) -> Any:
    """Return an answer without its id, time, and the counts of the cache."""
    if "data" in answer:
        return [item["embedding"] for item in answer["data"]]
    choices = json.loads(json.dumps(answer["choices"]))
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("id")
    return choices


def resident_mb() -> float:
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


class Load:
    """The clients of the load, and what they found."""

    def __init__(self, http: Any, wanted: list[Any]) -> None:
        self.http, self.wanted = http, wanted
        self.counts: collections.Counter[str] = collections.Counter()
        self.differ: list[tuple[int, Any]] = []
        self.memory: list[float] = []

    def ask(self, turn: int) -> None:
        draw = random.Random(10**6 + turn)
        number = draw.randrange(BODIES)
        path, body = body_of(number)
        if draw.random() < 0.15 and path == "/v1/completions":
            self._leave(number, path, body, draw.randint(1, 4))
        else:
            answer = self.http.post(path, json=body)
            if answer.status_code == 404 and body["model"] in ADAPTERS:
                self.counts["its adapter is not loaded"] += 1
            elif answer.status_code != 200 or essence(answer.json()) != self.wanted[number]:
                self.differ.append((number, answer.text))
            else:
                self.counts[KINDS[number % len(KINDS)]] += 1
        if turn % 50 == 0:
            gc.collect()
            self.memory.append(resident_mb())

    def _leave(self, number: int, path: str, body: dict[str, Any], chunks: int) -> None:
        """Stream an answer, leave after some chunks, and compare what came."""
        texts: collections.Counter[int] = collections.Counter()
        said: dict[int, str] = {}
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code == 404 and body["model"] in ADAPTERS:
                self.counts["its adapter is not loaded"] += 1
                return
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                [choice] = json.loads(line[6:])["choices"]
                said[choice["index"]] = said.get(choice["index"], "") + choice["text"]
                texts[choice["index"]] += 1
                if texts.total() == chunks:
                    break
        for index, text in said.items():
            if not self.wanted[number][index]["text"].startswith(text):
                self.differ.append((number, text))
        self.counts["left"] += 1

    def change_adapters(self, folders: Any, ended: threading.Event) -> None:
        """Load and unload adapters until the load has ended."""
        draw, loaded = random.Random(0), []
        while not ended.is_set():
            name = draw.choice([name for name in ADAPTERS if name not in loaded])
            if len(loaded) == 2:
                gone = loaded.pop(draw.randrange(2))
                answer = self.http.post("/v1/unload_lora_adapter", json={"lora_name": gone})
                assert answer.status_code == 200, answer.text
            body = {"lora_name": name, "lora_path": str(folders / name)}
            answer = self.http.post("/v1/load_lora_adapter", json=body)
            if answer.status_code == 200:
                loaded.append(name)
                self.counts["adapters loaded"] += 1
            else:  # requests still use the slots of adapters that were unloaded
                assert "adapter slots are in use" in answer.text, answer.text
                self.counts["adapters that waited"] += 1
            ended.wait(0.2)


@pytest.mark.slow
def test_each_of_many_requests_is_answered_as_alone(tmp_path):
    words = tokenizer("hermes")
    lm = LanguageModel(CFG, jax.device_put(seeded_params(CFG)), words, deterministic=True)
    factors = []
    for seed, name in enumerate(ADAPTERS):
        lora_cases.write(tmp_path / name, lora_cases.tensors(CFG, seed))
        factors.append(lora_cases.factors(CFG, seed))
    alone = dataclasses.replace(
        lm, params=lora.attach(tensor_table(CFG), lm.params, factors), adapters=ADAPTERS
    )
    sizes = {"max_len": MAX_LEN, "prefill_chunk": 32, "max_queue": 64}

    engine = Engine(alone, max_slots=1, prefix_cache=False, **sizes)
    engine.start()
    wanted = []
    with serving(alone, engine) as url, client(url) as http:
        for number in range(BODIES):
            path, body = body_of(number)
            model = body["model"]
            named = model if model == NAME else f"{NAME}:{model}"
            answer = http.post(path, json={**body, "model": named})
            assert answer.status_code == 200, answer.text
            wanted.append(essence(answer.json()))
    engine.stop()
    numbered = enumerate(wanted)
    bare = [json.dumps(want) for n, want in numbered if KINDS[n % len(KINDS)] == "adapter"]
    assert len(set(bare)) == len(bare)

    engine = Engine(lm, max_slots=4, draft="ngram", lora_slots=2, max_lora_rank=4, **sizes)
    engine.start()
    ended = threading.Event()
    with serving(lm, engine, lora_slots=2) as url, client(url) as http:
        load = Load(http, wanted)
        with ThreadPoolExecutor(AT_ONCE + 1) as pool:
            changing = pool.submit(load.change_adapters, tmp_path, ended)
            try:
                list(pool.map(load.ask, range(REQUESTS)))
            finally:
                ended.set()
            changing.result()
    engine.stop()
    print(f"{REQUESTS} requests: {dict(load.counts)}; {len(load.differ)} differ")
    print("resident MB:", *(round(value) for value in load.memory))
    assert not load.differ, load.differ[:2]
    assert load.counts["adapter"] and load.counts["adapters loaded"] > 2
    assert not engine.live and engine.stats().compilations == 0
    settled = load.memory[len(load.memory) // 2]
    assert load.memory[-1] < settled * 1.05, "the memory grows"
