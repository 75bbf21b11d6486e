"""Writes transcripts.txt: the bytes of answers and streams of all APIs, over a scripted engine.

python -m tests.golden.make_transcripts [FILE]

One event loop runs the server and the engine's steps, so the chunks of a stream are always the
same. Times, random ids and the version are replaced by their names.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx2 as httpx

from jaxllama import __version__
from jaxllama.engine.request import Request
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http import batch_worker
from jaxllama.serving.http.server import ServerSettings, create_app
from tests.helpers.fake_engine import FakeEngine, says
from tests.helpers.http_server import NAME, tiny_model
from tests.serving.http.test_tools import CITY, TOOLS, USER, tokenizer

FILE = Path(__file__).with_name("transcripts.txt")
MAX_LEN = 2048
BURSTS = (1, 2, 3, 5, 8, 13, 21, 34, 55)  # tokens of a row between two looks of the event loop
TURNS = 40  # of the event loop, in which news of the engine reach a client
THINK = "{% if False %}<think></think>{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
AGENT = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"
FAILS = "fail"  # an answer whose request fails behind its first tokens
MODEL = {"model": NAME, "seed": 1}
CHAT = {**MODEL, "messages": USER}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
WEATHER = {"type": "function", "name": "weather", "parameters": CITY}
MESSAGE = {"model": NAME, "messages": USER, "max_tokens": 300}
CLAUDE_TOOLS = [{"name": "weather", "input_schema": CITY}]
OLLAMA = {"model": NAME, "messages": USER}
RESPONSE = {"model": NAME, "input": "hi"}
# Path, name, what the model writes, body. Each is asked for whole and as a stream.
BODIES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("/v1/completions", "plain", "Yes, é.", {**MODEL, "prompt": "hi"}),
    (
        "/v1/completions",
        "two prompts, logprobs, echo",
        "No.",
        {**MODEL, "prompt": ["a", "bc"], "max_tokens": 2, "echo": True, "logprobs": None},
    ),
    ("/v1/completions", "logprobs", "No.", {**MODEL, "prompt": "a", "logprobs": 1, "n": 2}),
    ("/v1/completions", "usage", "Sure", {**MODEL, "prompt": "a", "stop": "r", **COUNTED}),
    ("/v1/completions", "failure", FAILS, {**MODEL, "prompt": "a"}),
    ("/v1/chat/completions", "plain", "A long answer", {**CHAT, "stop": ["g a"]}),
    ("/v1/chat/completions", "cut", "A long answer", {**CHAT, "max_tokens": 4, "n": 2}),
    (
        "/v1/chat/completions",
        "logprobs",
        "No.",
        {**CHAT, "logprobs": True, "top_logprobs": 2, **COUNTED},
    ),
    ("/v1/chat/completions", "reasoning and a call", AGENT, {**CHAT, "tools": TOOLS, **COUNTED}),
    ("/v1/chat/completions", "two calls", CALL + CALL, {**CHAT, "tools": TOOLS}),
    (
        "/v1/chat/completions",
        "schema",
        '{"city": "Rome", "days": 2}',
        {**CHAT, "response_format": SCHEMA},
    ),
    ("/v1/chat/completions", "failure", FAILS, CHAT),
    ("/v1/responses", "plain", "A long answer", RESPONSE),
    ("/v1/responses", "cut", "A long answer", {**RESPONSE, "max_output_tokens": 4}),
    ("/v1/responses", "reasoning and a call", AGENT, {**RESPONSE, "tools": [WEATHER]}),
    ("/v1/responses", "failure", FAILS, RESPONSE),
    ("/v1/messages", "plain", "A long answer", MESSAGE),
    ("/v1/messages", "stop sequence", "A long answer", {**MESSAGE, "stop_sequences": [" a"]}),
    ("/v1/messages", "reasoning and a call", AGENT, {**MESSAGE, "tools": CLAUDE_TOOLS}),
    ("/v1/messages", "failure", FAILS, MESSAGE),
    ("/api/chat", "reasoning and a call", AGENT, {**OLLAMA, "tools": TOOLS}),
    ("/api/chat", "failure", FAILS, OLLAMA),
    ("/api/generate", "cut", "Yes", {"model": NAME, "prompt": "a", "options": {"num_predict": 2}}),
)
WRONG = ({"model": "other"}, {"temperature": "hot"}, {"model": 3}, {"unknown": 1})
PLAIN = {path: body for path, name, _, body in BODIES if name in ("plain", "failure", "cut")}
SMALL: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{NAME}", None),
    ("GET", "/v1/models/other", None),
    ("GET", "/health", None),
    ("GET", "/version", None),
    ("GET", "/api/tags", None),
    ("GET", "/api/version", None),
    ("POST", "/tokenize", {"model": NAME, "prompt": "é"}),
    ("POST", "/detokenize", {"model": NAME, "tokens": [104, 105]}),
    ("POST", "/v1/messages/count_tokens", {"model": NAME, "messages": USER}),
    ("GET", "/v1/chat/completions/chatcmpl-none", None),
    ("GET", "/v1/responses/resp_none", None),
    ("GET", "/nowhere", None),
    ("GET", "/v1/completions", None),
    *(("POST", path, {**PLAIN[path], **wrong}) for path in PLAIN for wrong in WRONG),
)
RULES = (
    (
        r'"(created|created_at|expires_at|in_progress_at|finalizing_at|completed_at)":( ?)\d+',
        r'"\1":\2T',
    ),
    (r'"(created_at|modified_at)":"[^"]*"', r'"\1":"T"'),
    (r'"(\w+_duration)":\d+', r'"\1":T'),
    (r"\b[0-9a-f]{32}\b|(?<=_)[0-9a-f]{32}|(?<=-)[0-9a-f]{32}", "ID"),
    (rf'(?<=["-]){re.escape(__version__)}(?=")', "VERSION"),
)


class SteppedEngine(FakeEngine):
    """A fake engine without a thread: ``step`` writes tokens of all rows."""

    def __enter__(self) -> SteppedEngine:
        return self

    def stop(self) -> None:
        self.closed = "the engine has stopped"

    def step(self, count: int) -> None:
        for _ in range(count):
            with self._clock:
                self._tell([row.step() for row in self.live.values()])


def fails(request: Request) -> Iterator[int]:
    return itertools.repeat(ord("x"))


class Recorder:
    """Asks the server, and keeps what was sent and answered."""

    def __init__(self, http: httpx.AsyncClient, engine: SteppedEngine, words: Any) -> None:
        self.http, self._engine, self._words = http, engine, words
        self.lines: list[str] = []
        self._number = 0

    async def ask(self, method: str, path: str, body: Any = None, text: str = "", **more: Any):
        """Return the answer, whose bytes are recorded."""
        engine = self._engine
        engine.answer = fails if text == FAILS else says(self._words, text)
        headers = {"x-request-id": f"n{self._number}"}
        self._number += 1
        asked = asyncio.create_task(
            self.http.request(method, path, json=body, headers=headers, **more)
        )
        bursts = itertools.chain(BURSTS, itertools.repeat(BURSTS[-1]))
        while not asked.done():
            if engine.live:
                engine.step(next(bursts))
            else:
                await asyncio.sleep(0.001)  # a thread makes the call
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if text == FAILS and any(row.written > 5 for row in engine.live.values()):
                for id in list(engine.live):
                    engine.fail(id, ValueError("the row broke"))
        answer = asked.result()
        kind = answer.headers.get("content-type", "")
        self.keep(f"{answer.status_code} {kind}", answer.text)
        return answer

    def keep(self, *texts: str) -> None:
        self.lines += texts

    def title(self, text: str) -> None:
        self.lines.append(f"\n## {text}")


async def record(recorder: Recorder) -> None:
    for path, name, text, body in BODIES:
        for stream in (False, True):
            recorder.title(f"{path} {name}{', streamed' if stream else ''}")
            more = {} if stream else {"stream_options": None} if "stream_options" in body else {}
            await recorder.ask("POST", path, {**body, **more, "stream": stream}, text)
    for method, path, body in SMALL:
        recorder.title(f"{method} {path} {json.dumps(body)}")
        await recorder.ask(method, path, body)
    await _responses(recorder)
    await _batch(recorder)


async def _responses(recorder: Recorder) -> None:
    """A conversation, a response in the background, and their ends."""
    recorder.title("responses that are kept")
    first = (await recorder.ask("POST", "/v1/responses", RESPONSE, AGENT)).json()["id"]
    more = {**RESPONSE, "previous_response_id": first}
    second = (await recorder.ask("POST", "/v1/responses", more, "Well.")).json()["id"]
    for method, path in (
        ("GET", f"/v1/responses/{first}"),
        ("GET", f"/v1/responses/{second}/input_items"),
        ("POST", f"/v1/responses/{second}/cancel"),
        ("DELETE", f"/v1/responses/{first}"),
        ("GET", f"/v1/responses/{first}"),
    ):
        recorder.title(f"{method} {path}")
        await recorder.ask(method, path)
    recorder.title("a response in the background, cancelled")
    behind = {**RESPONSE, "background": True}
    id = (await recorder.ask("POST", "/v1/responses", behind, "x" * 40)).json()["id"]
    await recorder.ask("POST", f"/v1/responses/{id}/cancel")


async def _batch(recorder: Recorder) -> None:
    """A file of lines for each path that batches have, its answers and its errors."""
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/responses", {"input": "a"}),
    ):
        recorder.title(f"a batch of {path}")
        entries = [
            {"custom_id": f"c{n}", "method": "POST", "url": path, "body": {"seed": 1, **body, **x}}
            for n, x in enumerate(({}, {"temperature": 9}, {"model": NAME}))
        ]
        data = "".join(json.dumps(entry) + "\n" for entry in entries)
        upload: Any = {"files": {"file": ("in.jsonl", data)}, "data": {"purpose": "batch"}}
        file = (await recorder.ask("POST", "/v1/files", **upload)).json()["id"]
        created = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
        batch = (await recorder.ask("POST", "/v1/batches", created, "Hi.")).json()
        while batch["status"] not in ("completed", "failed"):
            kept, recorder.lines = recorder.lines, []
            batch = (await recorder.ask("GET", f"/v1/batches/{batch['id']}", None, "Hi.")).json()
            recorder.lines = kept
        await recorder.ask("GET", f"/v1/batches/{batch['id']}")
        for kind in ("output_file_id", "error_file_id"):
            answer = await recorder.http.get(f"/v1/files/{batch[kind]}/content")
            recorder.keep(*sorted(answer.text.splitlines(), key=_custom_id))


def _custom_id(line: str) -> str:
    return json.loads(line)["custom_id"]


@contextlib.asynccontextmanager
async def running(app: Any) -> AsyncGenerator[None]:
    """The application's lifespan."""
    arriving: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan"}, arriving.get, sent.put))
    for name in ("startup", "shutdown"):
        await arriving.put({"type": f"lifespan.{name}"})
        assert (await sent.get())["type"] == f"lifespan.{name}.complete"
        if name == "startup":
            yield
    await task


async def _recorded(folder: str) -> list[str]:
    words = tokenizer("hermes", THINK)
    lm, metrics = tiny_model(words), Metrics()
    with SteppedEngine(max_len=MAX_LEN, max_queue=64) as engine:
        metrics.watch(engine)
        app = create_app(lm, engine, ServerSettings(NAME, MAX_LEN, state=folder), metrics)
        transport = httpx.ASGITransport(app)
        client = httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60)
        async with running(app), client as http:
            recorder = Recorder(http, engine, words)
            await record(recorder)
    return recorder.lines


def transcripts() -> str:
    """Return the transcripts, with names in the places of times and random ids."""
    soon: Any = {"BEAT_SECONDS": 0.01, "LOOK_SECONDS": 0.02}
    with tempfile.TemporaryDirectory() as folder, mock.patch.multiple(batch_worker, **soon):
        text = "\n".join(asyncio.run(_recorded(folder))).strip() + "\n"
    for pattern, name in RULES:
        text = re.sub(pattern, name, text)
    return text


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else FILE).write_text(transcripts(), encoding="utf-8")
