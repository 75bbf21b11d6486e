"""The files of the chat page, as handlers of their paths (``middleware.PAGE``)."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response


def page_file(name: str, kind: str) -> Callable[[Request], Response]:
    """Return the handler of a file. kind: its content type."""
    content = (importlib.resources.files("jaxllama.serving.http") / "page" / name).read_bytes()
    return lambda _: Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})
