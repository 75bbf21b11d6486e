"""The chat page: its files, by their paths."""

from __future__ import annotations

import functools
import importlib.resources

from starlette.requests import Request
from starlette.responses import Response

# The file and content type of each path.
PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/markdown.js": ("markdown.js", "text/javascript"),
    "/marked.js": ("vendor/marked.js", "text/javascript"),
    "/purify.js": ("vendor/purify.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


async def page(_: object, http: Request) -> Response:
    name, kind = PAGE[http.url.path]
    return Response(_content(name), media_type=kind, headers={"Cache-Control": "no-cache"})


@functools.cache
def _content(name: str) -> bytes:
    return (importlib.resources.files("jaxllama.serving.http") / "page" / name).read_bytes()
