"""Threads of a front end in which bodies become calls: parsing, rendering and tokenizing.

    call = await in_thread(http, size, work, *arguments)

A body of at most ``LARGE`` bytes takes milliseconds, one of several megabytes takes seconds. So
large bodies share few threads, and the small ones have others. If the client leaves, work that has
not begun never begins.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from starlette.requests import Request as HttpRequest

from jaxllama.serving.http.middleware import unless_disconnected

SMALL = 2048  # bytes of a body that takes less time than waking a thread
LARGE = 2**16  # bytes
_small = ThreadPoolExecutor(4, "bodies")
_large = ThreadPoolExecutor(2, "large bodies")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def in_thread(
    http: HttpRequest,
    size: int,
    work: Callable[Parameters, Result],
    *arguments: Parameters.args,
    **named: Parameters.kwargs,
) -> Result:
    """Return the work's result. Raises ClientGone. The body must have been read.

    size: bytes that the work reads.
    """
    if size <= SMALL:
        return work(*arguments, **named)
    context = contextvars.copy_context()
    threads = _large if size > LARGE else _small
    loop = asyncio.get_running_loop()
    future = loop.run_in_executor(threads, lambda: context.run(work, *arguments, **named))

    async def done() -> Result:
        return await future

    return await unless_disconnected(http.receive, done())
