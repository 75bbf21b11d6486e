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
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with the options of its module's ``ENGINE``."""
    from tests.helpers.fake_engine import FakeEngine

    with FakeEngine(**getattr(request.module, "ENGINE", {})) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(lm: Any, engine: Any) -> Iterator[str]:
    from tests.helpers.http_server import serving

    with serving(lm, engine, max_body=100_000) as url:
        yield url


@pytest.fixture(scope="module")
def client(lm: Any, engine: Any) -> Iterator[Any]:
    """OpenAI's own client of a server."""
    from tests.helpers.http_server import talking

    with talking(lm, engine) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[Any]:
    from tests.helpers.http_server import client

    with client(url) as http:
        yield http
