"""A small HTTP/1.1 client on asyncio streams, for the load generator: little work per chunk, so
that the clock measures the server.

    reply = await request(Address.parse(url), "POST", path, headers, body)
    reply.status, await reply.body(), async for line in reply.lines()

One connection a request.  Left out: redirects, compression, proxies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from jaxllama.errors import JaxLlamaError


@dataclasses.dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """JaxLlamaError for what is no http(s) URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise JaxLlamaError(f"{url!r} is no http:// or https:// address")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


@dataclasses.dataclass
class Reply:
    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes; closes the connection.  EOFError when it is cut short."""
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                while size := int(await self._reader.readline() or b"bad", 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
            elif "content-length" in self.headers:
                yield await self._reader.readexactly(int(self.headers["content-length"]))
            else:
                while data := await self._reader.read(1 << 16):
                    yield data
        finally:
            self.close()

    async def lines(self) -> AsyncIterator[bytes]:
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line

    async def body(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    def close(self) -> None:
        self._writer.close()


async def request(
    address: Address,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: Any = None,
) -> Reply:
    """Send, and read the reply's head.  body: sent as JSON.  Raises OSError, EOFError, ValueError
    for what is no HTTP, and JaxLlamaError when nobody listens."""
    try:
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=address.tls or None
        )
    except OSError as error:
        where = f"{address.host}:{address.port}"
        raise JaxLlamaError(f"{where}: {error.strerror or error}") from None
    data = b"" if body is None else json.dumps(body).encode()
    host = f"[{address.host}]" if ":" in address.host else address.host
    head = {
        "Host": f"{host}:{address.port}",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **headers,
    }
    lines = [f"{method} {address.prefix}{path} HTTP/1.1"]
    lines += [f"{key}: {value}" for key, value in head.items()]
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        await writer.drain()
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        answer = {}
        while line := (await reader.readuntil(b"\r\n")).strip():
            key, _, value = line.decode("latin-1").partition(":")
            answer[key.lower()] = value.strip()
    except BaseException:
        writer.close()
        raise
    return Reply(status, answer, reader, writer)
