"""Threads of a front end in which bodies become calls: parsing, rendering and tokenizing.

    call = await in_thread(http, size, work, *arguments)      while the client stays
    call = await threaded(size, work, *arguments)

A body of at most ``LARGE`` bytes takes milliseconds, one of several megabytes takes seconds. So
large bodies share few threads, and the small ones have others. If the client leaves, work that has
not begun never begins.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from jaxllama.serving.http.middleware import unless_disconnected

SMALL = 2048  # bytes of a body that takes less time than waking a thread
LARGE = 2**16  # bytes
_small = ThreadPoolExecutor(4, "bodies")
_large = ThreadPoolExecutor(2, "large bodies")
Result = TypeVar("Result")


async def threaded(size: int, work: Callable[..., Result], *arguments: Any) -> Result:
    """Return the work's result. size: bytes that the work reads."""
    if size <= SMALL:
        return work(*arguments)
    context = contextvars.copy_context()
    threads = _large if size > LARGE else _small
    return await asyncio.get_running_loop().run_in_executor(
        threads, lambda: context.run(work, *arguments)
    )


async def in_thread(
    http: HttpRequest,
    size: int,
    work: Callable[..., Result],
    *arguments: Any,
) -> Result:
    """Return the work's result. Raises ClientGone. The body must have been read."""
    if size <= SMALL:
        return work(*arguments)
    return await unless_disconnected(http.receive, threaded(size, work, *arguments))
