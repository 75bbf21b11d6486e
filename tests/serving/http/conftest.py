"""A server over an engine without a model, for the tests that need no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lm() -> Any:
    from tests.helpers.http_server import tiny_model

    return tiny_model()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from tests.helpers.fake_engine import FakeEngine

    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="module")
def url(lm: Any, engine: Any) -> Iterator[str]:
    from tests.helpers.http_server import serving

    with serving(lm, engine, max_body=100_000) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[Any]:
    from tests.helpers.http_server import client

    with client(url) as http:
        yield http
