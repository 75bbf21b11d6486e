"""The OpenAPI page, held against the server by schemathesis: generated requests, valid and not,
find no 5xx, no undocumented status and no answer that differs from its schema."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from jaxllama.serving.http.routes import ROUTES
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.http_server import NAME, serving

# Limits that need the tokenizer, and numbers like 2.0, are refused beyond what a schema says.
EXCLUDED = [positive_data_acceptance]


@pytest.fixture(scope="module")
def page(lm, tmp_path_factory):
    state = str(tmp_path_factory.mktemp("state"))
    with (
        FakeEngine(max_len=512, max_queue=200) as engine,
        serving(lm, engine, state=state, lora_slots=1) as url,
    ):
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


OPERATIONS = [(row.path.replace(":path", ""), row.method) for row in ROUTES]


def ask(case) -> None:
    """Send what was generated, with the model's name and a length that fits where there are any."""
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = NAME
        for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(body.get(key)) is int and body[key] > 0:
                body[key] = body[key] % 20 + 1
    case.call_and_validate(excluded_checks=EXCLUDED)


def hold_against(page, path: str, method: str, examples: int) -> None:
    operation = page[path][method]
    modes = [GenerationMode.POSITIVE]
    if len(operation.body) or len(operation.query):  # no part of a path can be wrong
        modes.append(GenerationMode.NEGATIVE)
    for mode in modes:
        settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(given(case=operation.as_strategy(generation_mode=mode))(ask))()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_page_holds(page, path, method):
    hold_against(page, path, method, 2)


def test_every_operation_is_asked(page):
    found = {(o.ok().path, o.ok().method.upper()) for o in page.get_all_operations()}
    found.add(("/openapi.json", "GET"))  # schemathesis leaves out the page that it reads
    assert found == set(OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_page_holds_for_long(page, path, method):
    hold_against(page, path, method, 300)
