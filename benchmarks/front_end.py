"""``python -m benchmarks.front_end``: what a front end of ``jaxllama serve`` streams, alone.

A real front end, a process of its own on one core, between an engine that is none (it answers every
request with tokens as fast as they are taken, a step's in one message) and clients that only count.
Its CPU time is the kernel's, so that a busy machine does not count; tokens a second are those of a
core that does nothing else, one over that time.  Parts are the same code on the same messages in
this process; what is left of user time is tasks, ASGI and uvicorn, and system time is reading and
sending: one write a connection and step.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import pickle
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers

from jaxllama.config import load_config
from jaxllama.serving.api import messages
from jaxllama.serving.api.bodies import Completion
from jaxllama.serving.api.calls import AcceptedCall, ModelFacts, Prompts
from jaxllama.serving.api.logprobs import TextOffsets
from jaxllama.serving.api.messages import Reply, RowEvent, StepNews, Submit
from jaxllama.serving.http import front_end
from jaxllama.serving.http.runs import CallRun, ChunkAnswer
from jaxllama.serving.http.server import ServerSettings
from jaxllama.serving.ipc.link import EngineClient
from jaxllama.text.stream import StopStrings
from jaxllama.text.token_bytes import byte_characters
from jaxllama.text.tokenizer import Tokenizer

WORDS = 8192
AHEAD = 1  # steps that the engine may be ahead of the clients: two would come as one chunk
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
STOPS = ["\n\nUser:", "###", "<end of the story>"]
BODY = {"model": "mock", "max_tokens": 100_000, "stream": True, "seed": 0}


@dataclasses.dataclass(frozen=True)
class LoadCase:
    """per_step: tokens of a row in a message."""

    name: str
    path: str = "/v1/completions"
    body: tuple[tuple[str, Any], ...] = (("prompt", [1]),)
    per_step: int = 1
    spaces: int = 1  # that a chunk has for every token


CHAT = ("messages", [{"role": "user", "content": "x"}])
CASES = (
    LoadCase("completions"),
    LoadCase("chat", "/v1/chat/completions", (CHAT,)),
    LoadCase("chat, 3 stop strings", "/v1/chat/completions", (CHAT, ("stop", STOPS))),
    LoadCase("chat, logprobs", "/v1/chat/completions", (CHAT, ("logprobs", True)), spaces=2),
    LoadCase("chat, 4 tokens a step", "/v1/chat/completions", (CHAT,), 4),
)


def facts() -> ModelFacts:
    """A model of words of three to nine letters, each with the space before it."""
    rng = np.random.default_rng(0)
    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    space = byte_characters()[ord(" ")]
    while len(vocab) < WORDS:
        letters = rng.integers(ord("a"), ord("z") + 1, rng.integers(2, 9))
        vocab.setdefault(space + "".join(map(chr, letters)), len(vocab))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    config = load_config("llama-3.2-1b").replace(vocab_size=WORDS, eos_token_ids=(2,))
    return ModelFacts(config, Tokenizer(backend, "words", chat_template=TEMPLATE), None, ())


SETTINGS = ServerSettings("mock", 200_000)


class Mock:
    """The engine's end: answers ``Submit``s, and writes steps of all rows while ``clients`` have
    read the others."""

    def __init__(self, connection: socket.socket, case: LoadCase) -> None:
        self._socket, self._case = connection, case
        self._frames = messages.Frames(messages.from_front_end())
        self.rows: list[tuple[int, bool]] = []
        self.is_ready = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while data := self._received():
            for message in self._frames.feed(data):
                if isinstance(message, Submit):
                    for offset, request in enumerate(message.requests):
                        self.rows.append((message.first + offset, request["logprobs"] is not None))
                    self.send(Reply(message.call, None))
                elif isinstance(message, messages.Ready):
                    self.is_ready.set()

    def _received(self) -> bytes:
        """Return what came, or nothing once the other thread has closed the socket."""
        try:
            return self._socket.recv(1 << 16)
        except OSError:
            return b""

    def send(self, message: messages.IpcMessage) -> None:
        self._socket.sendall(messages.encode(message))

    def step(self, tokens: np.ndarray) -> None:
        n = self._case.per_step
        self.send(StepNews(rows_of(self.rows, tokens, n)))


def rows_of(rows: list[tuple[int, bool]], tokens: np.ndarray, n: int) -> list[RowEvent]:
    ids = tokens.reshape(-1, n).tolist()
    return [
        RowEvent(number, own, [-1.25] * n if scored else [], [])
        for (number, scored), own in zip(rows, ids, strict=True)
    ]


class Clients:
    """Streams that are read and counted: every token is a word with a space before it."""

    def __init__(self, port: int, case: LoadCase, streams: int) -> None:
        body = json.dumps({**BODY, **dict(case.body)}).encode()
        head = f"POST {case.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        asked = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._selector, self._spaces = selectors.DefaultSelector(), case.spaces
        self._words = self.chunks = 0
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(asked)
            self._selector.register(connection, selectors.EVENT_READ)

    def read_until(self, tokens: int) -> None:
        while self.tokens < tokens:
            for key, _ in self._selector.select(10):
                data = key.fileobj.recv(1 << 16)  # pyright: ignore
                chunks = data.count(b"data: ")
                self._words += data.count(b" ") - chunks
                self.chunks += chunks

    @property
    def tokens(self) -> int:
        return self._words // self._spaces

    def drain(self) -> None:
        """What is there already: heads of the answers, with spaces of their own."""
        while ready := self._selector.select(0.5):
            for key, _ in ready:
                key.fileobj.recv(1 << 16)  # pyright: ignore
        self._words = self.chunks = 0

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # pyright: ignore


@dataclasses.dataclass
class Result:
    """us: of CPU a token."""

    seconds: float
    tokens: int
    chunks: int
    us: float
    system_us: float


def measure(case: LoadCase, streams: int, seconds: float) -> Result:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        child = front_end.start(listener)
        try:
            mock = Mock(child.socket, case)
            setup = front_end.FrontEndSetup(facts(), SETTINGS, 100_000, 1)
            mock.send(messages.Welcome(pickle.dumps(setup)))
            assert mock.is_ready.wait(60)
            clients = Clients(listener.getsockname()[1], case, streams)
            while len(mock.rows) < streams:
                time.sleep(0.01)
            clients.drain()
            return _measure(mock, clients, case.per_step, child.process.pid, seconds)
        finally:
            child.kill()


def _measure(mock: Mock, clients: Clients, n: int, pid: int, seconds: float) -> Result:
    tokens = np.random.default_rng(1).integers(256, WORDS, (64, len(mock.rows) * n))
    size = tokens.shape[1]
    sent = 0

    def run(until: Callable[[], bool]) -> None:
        nonlocal sent
        while not until():
            mock.step(tokens[sent % len(tokens)])
            sent += 1
            clients.read_until((sent - AHEAD + 1) * size)
        clients.read_until(sent * size)

    run(lambda: sent >= 50)
    clock = (~pid << 3) | 2  # Linux: the CPU time of that process
    begin, cpu, system = time.monotonic(), time.clock_gettime(clock), _system(pid)
    read, chunks = clients.tokens, clients.chunks
    run(lambda: time.monotonic() > begin + seconds)
    cpu, system = time.clock_gettime(clock) - cpu, _system(pid) - system
    count = clients.tokens - read
    clients.close()
    return Result(
        time.monotonic() - begin,
        count,
        clients.chunks - chunks,
        cpu / count * 1e6,
        system / count * 1e6,
    )


def _system(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[12]) / os.sysconf("SC_CLK_TCK")


def parts(case: LoadCase, streams: int) -> dict[str, float]:
    """Microseconds a token of what a front end does with a step's message, least of several."""
    known, n = facts(), case.per_step
    prompts = Prompts(known, "mock", SETTINGS.max_len, 8)  # pyright: ignore
    body = {**BODY, **dict(case.body)}
    if "messages" in body:
        from jaxllama.serving.api.bodies import Chat

        parsed: Any = Chat(**body)
        calls = [prompts.chat(parsed, f"chatcmpl-{i}") for i in range(streams)]
    else:
        parsed = Completion(**body)
        calls = [prompts.completion(parsed, f"cmpl-{i}") for i in range(streams)]
    return asyncio.run(_parts(known, calls, parsed, n))


async def _parts(
    known: ModelFacts, calls: list[AcceptedCall], body: Any, n: int
) -> dict[str, float]:
    link = EngineClient()
    link.know(known.tokenizer, known.config.eos_token_ids)
    mine = messages.Frames(messages.from_front_end())
    rows: list[tuple[int, bool]] = []

    def answer(data: bytes) -> None:
        for message in mine.feed(data):
            if isinstance(message, Submit):
                rows.append((message.first, message.requests[0]["logprobs"] is not None))
                link.received(messages.encode(Reply(message.call, None)))

    link.open(answer)
    kind = "chat" if hasattr(body, "messages") else "completion"
    streams = [await link.submit(call.id, call.requests) for call in calls]
    runs = [
        CallRun(kind, call, stream, {}, lambda id, answer: None, kept=False)
        for call, stream in zip(calls, streams, strict=True)
    ]
    answers = [ChunkAnswer(run, body) for run in runs]
    writers = [
        answer._writer(0, TextOffsets(call)) for answer, call in zip(answers, calls, strict=True)
    ]
    stops = [StopStrings(call.requests[0].stop) for call in calls]
    pieces = [answer._pieces() for answer in answers]
    for one in pieces:
        if kind == "chat":
            await anext(one)  # the role
    tokens = np.random.default_rng(1).integers(256, WORDS, (60, len(calls) * n))
    names = "decode", "read", "stop strings", "streams", "JSON", "answers"
    spent: dict[str, list[float]] = {name: [] for name in names}
    choices = link._choices
    plain = messages.Frames(messages.from_engine())
    clock = time.perf_counter
    for step in np.tile(tokens, (2, 1)):  # what is kept of a token is there the second time
        data = messages.encode(StepNews(rows_of(rows, step, n)))
        begin = clock()
        [told] = plain.feed(data)
        decoded = clock()
        for piece in told.rows:
            choices[piece.number].read(piece)
        read = clock()
        if body.stop:
            for stop, piece in zip(stops, told.rows, strict=True):
                stop.feed(piece.text)
        stopped = clock()
        for piece in told.rows:
            choice = choices[piece.number]
            choice.stream.put(choice, piece)
        put = clock()
        for write, piece in zip(writers, told.rows, strict=True):
            write(piece)
        json_made = clock()
        for one in pieces:
            await anext(one)
        written = clock()
        clocks = begin, decoded, read, stopped, put, json_made, written
        for name, (first, last) in zip(names, itertools.pairwise(clocks), strict=True):
            spent[name].append(last - first)
    for one in pieces:
        await one.aclose()
    us = {name: min(values) / (len(calls) * n) * 1e6 for name, values in spent.items()}
    # What was timed alone is a part of what was timed in its place.
    return {
        "decoding": us["decode"],
        "detokenizing": us["read"] - us["stop strings"],
        "stop strings": us["stop strings"],
        "JSON": us["JSON"],
        "streams": us["streams"] + us["answers"] - us["JSON"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", help="cases whose name begins so")
    args = parser.parse_args()
    for case in CASES:
        if args.only is None or case.name.startswith(args.only):
            result = measure(case, args.streams, args.seconds)
            inside = parts(case, args.streams)
            user = result.us - result.system_us
            named = ", ".join(f"{name} {value:.2f}" for name, value in inside.items())
            print(
                f"{case.name}: {1e6 / result.us:,.0f} tokens/s a core "
                f"({result.tokens / result.seconds:,.0f} seen, "
                f"{result.tokens / result.chunks:.2f} a chunk); "
                f"{result.us:.2f} us a token: {named}, tasks and uvicorn "
                f"{user - sum(inside.values()):.2f}, system {result.system_us:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
