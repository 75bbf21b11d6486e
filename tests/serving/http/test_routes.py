"""The table of routes, and what is made from it."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")

from jaxllama.serving.http import openapi
from jaxllama.serving.http.model_pool import ModelPool, ModelSpec
from jaxllama.serving.http.model_router import Router, RouterSettings
from jaxllama.serving.http.routes import BATCHABLE, OPEN, ROUTES
from tests.helpers.http_server import NAME


def test_the_rows_are_what_the_server_has():
    paths = openapi.document(64, True, True, True)["paths"]
    listed = {(method.upper(), path) for path, entry in paths.items() for method in entry}
    rows = {(row.method, row.path.replace(":path", "")): row for row in ROUTES}
    assert len(rows) == len(ROUTES), "no row is there twice"
    assert listed == rows.keys()
    assert not [row.path for row in ROUTES if not row.summary]
    for key in listed:
        operation = paths[key[1]][key[0].lower()]
        assert (operation.get("security") == []) == (key[1] in OPEN)
        assert ("requestBody" in operation) == (key[0] == "POST" and "cancel" not in key[1])
    enum = openapi.document(64, False, False, True)["components"]["schemas"]["CreateBatch"]
    assert enum["properties"]["endpoint"]["enum"] == [*BATCHABLE]
    assert [path for path, has_priority in BATCHABLE.items() if has_priority] == [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
    ]


def test_bodies_that_name_a_model_go_through_the_router():
    from jaxllama.serving.http import model_router

    app = model_router.application(ModelPool((), [ModelSpec("a", ())]), RouterSettings())
    routes = app._app.routes  # behind the middleware
    there = {r.path for r in routes if getattr(r.endpoint, "__func__", None) is Router.routed}
    assert there == {row.path for row in ROUTES if row.is_routed}
    assert {"/v1/responses/input_tokens", "/api/chat", "/detokenize"} <= there
    assert not there & {"/v1/batches", "/v1/load_lora_adapter"}


def test_the_tokens_of_a_responses_input(http, engine):
    body = {"model": NAME, "input": "hello", "instructions": "be kind"}
    reply = http.post("/v1/responses/input_tokens", json=body)
    made = http.post("/v1/responses", json={**body, "max_output_tokens": 1}).json()
    assert reply.json() == {
        "object": "response.input_tokens",
        "input_tokens": made["usage"]["input_tokens"],
    }
    more = {"model": NAME, "input": "more", "previous_response_id": made["id"]}
    counted = http.post("/v1/responses/input_tokens", json=more).json()["input_tokens"]
    http.post("/v1/responses", json={**more, "max_output_tokens": 1})
    assert counted == len(engine.requests[-1].prompt) > len("more")
    missing = {"model": NAME, "input": "x", "previous_response_id": "resp_x"}
    assert http.post("/v1/responses/input_tokens", json=missing).status_code == 404
