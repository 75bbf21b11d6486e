"""Adapters that clients load and unload, as vLLM's routes have them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllama.serving.api.calls import Prompts
from tests.helpers import lora_cases
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import (
    CFG,
    NAME,
    client,
    error_of,
    serve,
    serving,
    tiny_checkpoint,
    wait_until,
)

BODY = {"prompt": "a", "max_tokens": 2}


class AdaptingEngine(FakeEngine):
    """Takes any directory as an adapter. loaded: the path by id."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def load_adapter(self, name: str, path: str) -> str:
        id = f"{name}#{next(self._numbers)}"
        self.loaded[id] = path
        return id

    def unload_adapter(self, id: str) -> None:
        del self.loaded[id]


@pytest.fixture
def adapting():
    with AdaptingEngine() as engine:
        yield engine


def test_a_path_that_nobody_can_read_is_404(lm, adapting, tmp_path):
    (tmp_path / "closed").write_text("")
    with serving(lm, adapting, lora_slots=2) as url, client(url) as http:
        for path in ("a" * 4000, str(tmp_path / ("a" * 300)), str(tmp_path / "closed" / "b")):
            body = {"lora_name": "sql", "lora_path": path}
            reply = http.post("/v1/load_lora_adapter", json=body)
            assert reply.status_code == 404 and error_of(reply)["param"] == "lora_path"


def test_clients_load_and_unload_adapters(lm, adapting, tmp_path):
    with serving(lm, adapting, lora_slots=2) as url, client(url) as http:
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        sql = {"lora_name": "sql", "lora_path": str(tmp_path)}
        answer = http.post(load, json=sql)
        assert answer.status_code == 200
        assert answer.text == "Success: LoRA adapter 'sql' added successfully."
        assert adapting.loaded == {"sql#1": str(tmp_path)}
        ids = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert ids == ["sql", NAME]
        assert http.post("/v1/completions", json={**BODY, "model": "sql"}).json()["model"] == "sql"
        assert adapting.requests[-1].adapter == "sql#1"

        again = http.post(load, json=sql)
        assert again.status_code == 400 and "already been loaded" in error_of(again)["message"]
        assert http.post(load, json={**sql, "load_inplace": True}).status_code == 200
        assert adapting.loaded == {"sql#2": str(tmp_path)}

        for body, status, param in (
            ({"lora_name": "b", "lora_path": str(tmp_path / "none")}, 404, "lora_path"),
            ({"lora_name": NAME, "lora_path": str(tmp_path)}, 400, "lora_name"),
            ({"lora_name": "b"}, 400, "lora_path"),
            ({"lora_name": "b\n", "lora_path": str(tmp_path)}, 400, "lora_name"),
        ):
            refused = http.post(load, json=body)
            assert (refused.status_code, error_of(refused)["param"]) == (status, param)

        answer = http.post(unload, json={"lora_name": "sql", "lora_int_id": 1})
        assert answer.text == "Success: LoRA adapter 'sql' removed successfully."
        assert adapting.loaded == {}
        gone = http.post(unload, json={"lora_name": "sql"})
        assert gone.status_code == 404
        assert error_of(gone)["message"] == "The lora adapter 'sql' cannot be found."
        assert http.post("/v1/completions", json={**BODY, "model": "sql"}).status_code == 404
        assert "/v1/load_lora_adapter" in http.get("/openapi.json").json()["paths"]


def test_a_server_without_slots_has_no_such_routes(http):
    for name in ("load", "unload"):
        answer = http.post(f"/v1/{name}_lora_adapter", json={"lora_name": "a", "lora_path": "/"})
        assert answer.status_code == 404
    assert "/v1/load_lora_adapter" not in http.get("/openapi.json").json()["paths"]


@pytest.mark.slow
def test_all_front_ends_of_a_process_know_an_adapter(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    lora_cases.write(folder / "sql", lora_cases.tensors(CFG, 1))
    flags = "--lora-slots", "1", "--max-lora-rank", "4", "--api-servers", "2", "--max-len", "64"
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    scored = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    with serve(folder, *flags) as (_, url, _), client(url) as http:
        load = {"lora_name": "sql", "lora_path": str(folder / "sql")}
        assert http.post("/v1/load_lora_adapter", json=load).status_code == 200

        def listed() -> bool:
            with client(url) as other:
                return len(other.get("/v1/models").json()["data"]) == 2

        wait_until(listed)
        assert all(listed() for _ in range(12))
        texts, scores = set(), set()
        for model in (NAME, "sql"):
            answer = http.post("/v1/completions", json={**body, "model": model}).json()
            texts.add(answer["choices"][0]["text"])
            answer = http.post("/v1/completions", json={**scored, "model": model}).json()
            scores.add(str(answer["choices"][0]["logprobs"]["token_logprobs"]))
        assert len(texts) == len(scores) == 2
        gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert gone.status_code == 200
        wrong = http.post("/v1/load_lora_adapter", json={**load, "lora_path": str(folder)})
        assert "adapter_config.json: No such file" in error_of(wrong)["message"]


def test_an_adapter_that_is_unloaded_during_a_look_up_is_found():
    lm: Any = SimpleNamespace(adapters=())
    states = iter(({"sql": "sql#1"}, {}))
    prompts = Prompts(lm, NAME, 8, 8, loaded=lambda: next(states))
    assert prompts.adapter_of("sql") == "sql#1"
