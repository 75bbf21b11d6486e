"""A long mixed load through HTTP on ``jaxllama serve``: good and bad bodies, streams, clients that
leave at any moment, more than the queue takes.  None lost, none answered twice, memory flat."""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

import httpx2 as httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.http_server import serve, tiny_checkpoint
from tests.helpers.models import GLA, HYBRIDS, LLAMA

REQUESTS, AT_ONCE = 10_000, 32
CONFIGS = {
    "llama": LLAMA,
    "gla": LLAMA.replace(layer_types=("gla", "attention"), gla=GLA),
    **HYBRIDS,
}
BAD = (
    b"{",
    b"[]",
    b'{"model": "tiny"}',
    b'{"model": "tiny", "prompt": "", "n": 1}',
    b'{"model": "gpt-4", "prompt": "a"}',
    b'{"model": "tiny", "prompt": "a", "n": 0}',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 100000}',
)


def body_of(draw: random.Random) -> dict:
    """One of not many bodies, so that equal ones can be compared."""
    kind = draw.randrange(40)
    own = random.Random(kind)
    text = "".join(own.choice("abcdef ghij") for _ in range(own.randint(1, 60)))
    body = {
        "model": "tiny",
        "max_tokens": own.randint(1, 40),
        "seed": kind,
        "n": own.choice((1, 1, 2)),
    }
    body |= {"temperature": own.choice((0, 0.8)), "stop": own.choice((None, ["e"], ["ab", "q"]))}
    if own.random() < 0.3:
        return {**body, "messages": [{"role": "user", "content": text}]}
    return {**body, "prompt": text, "logprobs": own.choice((None, 0, 2))}


def told(choice: dict) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


class Client:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http, self.count = http, collections.Counter()
        self.texts: dict[str, list[str]] = {}  # what an equal body was answered
        self.answers: dict[str, tuple[str, list[str]]] = {}  # by id: path, texts

    async def one(self, index: int) -> None:
        draw = random.Random(index)
        dice = draw.random()
        if dice < 0.1:
            headers = {"Content-Type": "application/json"}
            reply = await self.http.post(
                "/v1/completions", content=draw.choice(BAD), headers=headers
            )
            assert 400 <= reply.status_code < 500 and reply.json()["error"]["message"]
            self.count["bad"] += 1
            return
        body, headers = body_of(draw), {"X-Request-Id": f"r{index}"}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        if dice < 0.25:
            await self.leave(path, {**body, "stream": draw.random() < 0.7}, headers, draw)
        elif dice < 0.6:
            await self.whole(path, body, headers)
        else:
            await self.streamed(path, body, headers)

    async def refused(self, reply: httpx.Response) -> bool:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            self.count["refused"] += 1
            await asyncio.sleep(0.2)
        else:
            assert reply.status_code == 200, await reply.aread()
        return reply.status_code == 429

    def keep(self, path: str, body: dict, call_id: str, texts: list[str], headers: dict) -> None:
        assert call_id.endswith(f"-{headers['X-Request-Id']}")
        assert call_id not in self.answers
        self.answers[call_id] = path, texts
        key = json.dumps(body)
        assert self.texts.setdefault(key, texts) == texts, "equal bodies, equal answers"
        self.count["answered"] += 1

    async def whole(self, path: str, body: dict, headers: dict) -> None:
        reply = await self.http.post(path, json=body, headers=headers)
        if not await self.refused(reply):
            answer = reply.json()
            self.keep(path, body, answer["id"], [told(c) for c in answer["choices"]], headers)

    async def streamed(self, path: str, body: dict, headers: dict) -> None:
        texts, ends, done, call_id = [""] * body["n"], [0] * body["n"], 0, ""
        ask = self.http.stream("POST", path, json={**body, "stream": True}, headers=headers)
        async with ask as reply:
            if await self.refused(reply):
                return
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    done += 1
                elif line:
                    chunk = json.loads(line.removeprefix("data: "))
                    [choice] = chunk["choices"]
                    index, call_id = choice["index"], chunk["id"]
                    delta = choice.get("delta")
                    texts[index] += choice["text"] if delta is None else delta.get("content", "")
                    ends[index] += choice["finish_reason"] is not None
        assert (done, ends) == (1, [1] * body["n"])
        self.keep(path, body, call_id, texts, headers)

    async def leave(self, path: str, body: dict, headers: dict, draw: random.Random) -> None:
        self.count["left"] += 1
        ask = self.http.stream("POST", path, json=body, headers=headers)
        try:
            async with asyncio.timeout(draw.choice((0.001, 0.01, 0.05))), ask as reply:
                async for _ in reply.aiter_lines():
                    if draw.random() < 0.3:
                        return
        except TimeoutError:
            pass


async def values(http: httpx.AsyncClient) -> dict[str, float]:
    page = (await http.get("/metrics")).text
    found: collections.Counter[str] = collections.Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


def front_ends_memory(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    pages = sum(int(Path(f"/proc/{child}/statm").read_text().split()[1]) for child in children)
    return pages * os.sysconf("SC_PAGE_SIZE")


async def soak(url: str, pid: int) -> tuple[Client, list[float], dict[str, float]]:
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        client, free, memory = Client(http), asyncio.Semaphore(AT_ONCE), []

        async def one(index: int) -> None:
            async with free:
                if index % (REQUESTS // 100) == 0:
                    own = (await values(http))["process_resident_memory_bytes"]
                    memory.append(own + front_ends_memory(pid))
                await client.one(index)

        await asyncio.gather(*(one(index) for index in range(REQUESTS)))
        for _ in range(600):
            end = await values(http)
            if end["jaxllama_requests_running"] + end["jaxllama_requests_waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        for call_id, (path, texts) in client.answers.items():
            stored = (await http.get(f"{path}/{call_id}")).json()
            assert [told(choice) for choice in stored["choices"]] == texts
        return client, memory, end


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_soak(family, tmp_path):
    cfg = CONFIGS[family].replace(vocab_size=260)
    folder = tiny_checkpoint(tmp_path, cfg)
    flags = (
        "--max-slots",
        "4",
        "--max-len",
        "128",
        "--max-queue",
        "24",
        "--state",
        str(tmp_path / "s"),
        "--api-servers",
        "2" if family == "llama" else "1",
    )
    with serve(folder, *flags) as (process, url, log):
        client, memory, end = asyncio.run(soak(url, process.pid))
        process.terminate()
        assert process.wait(60) == 0
        lines = [json.loads(line) for line in log.read_text().splitlines()]
    print(dict(client.count), {k: v for k, v in end.items() if k.startswith("jaxllama_re")})
    tenth = len(memory) // 10
    first, last = sum(memory[:tenth]) / tenth, sum(memory[-tenth:]) / tenth
    print(f"resident memory: {first / 2**20:.1f} MiB -> {last / 2**20:.1f} MiB")
    assert last <= 1.05 * first
    assert end["jaxllama_compilations_total"] == 0
    assert end["jaxllama_requests_running"] + end["jaxllama_requests_waiting"] == 0
    asked = [line for line in lines if line.get("method") == "POST"]
    status = collections.Counter(line["status"] for line in asked)
    assert set(status) <= {200, 400, 404, 429, 499}, status
    assert client.count["answered"] > REQUESTS / 4 and client.count["refused"] > 0
    ended = [line["id"] for line in asked if "id" in line]
    assert len(ended) == len(set(ended)), "one end each"
    # Whatever was accepted has ended, and was counted once by the engine too.
    from jaxllama.engine.journal import Journal

    journal = Journal(tmp_path / "s")
    assert journal.unfinished() == []
    assert all(journal.find(call_id).text for call_id in ended)
    journal.close()
