"""Servers on ports of their own, for tests that talk to them as clients do: in a thread, or as the
process that ``jaxllama serve`` is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jax
import uvicorn

from jaxllama.checkpoints.hf import load as hf
from jaxllama.config import ModelConfig
from jaxllama.language_model import LanguageModel
from jaxllama.serving.api.metrics import Metrics
from jaxllama.serving.http import limits
from jaxllama.serving.http.server import ServerSettings, create_app
from jaxllama.serving.ipc.served import Served
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

NAME = "tiny"
# Bytes, and a few special tokens. A server compiles an engine's programs, whatever the layers are.
CFG = LLAMA.first_layers(1).replace(vocab_size=264)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{# <tool_call> #}{% endif %}<assistant>"
)


def byte_tokenizer(template: str | dict[str, str] = TEMPLATE, special: Sequence[str] = ()):
    """Bytes, with a chat template and special tokens from id 256 on."""
    backend = Tokenizer.byte_level()._backend
    backend.add_special_tokens([*special])
    return Tokenizer(backend, "test tokenizer", chat_template=template)


def tiny_model(tokenizer: Tokenizer | None = None) -> LanguageModel:
    return LanguageModel(CFG, jax.device_put(seeded_params(CFG)), tokenizer or byte_tokenizer())


@contextlib.contextmanager
def talking(lm: LanguageModel, engine: Served, key: str = "none", **settings) -> Iterator[Any]:
    """OpenAI's own client of a server (``serving``)."""
    import openai

    with serving(lm, engine, **settings) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            yield client


@contextlib.contextmanager
def serving(
    lm: LanguageModel, engine: Served, peers: limits.Peers | None = None, **settings
) -> Iterator[str]:
    """The server's address, while it runs."""
    settings = {"name": NAME, "max_len": engine.options.max_len, **settings}
    metrics = Metrics()
    metrics.watch(engine)
    app = create_app(lm, engine, ServerSettings(**settings), metrics)
    config = uvicorn.Config(
        app,
        http=limits.protocol(peers),
        lifespan="on",
        ws="none",
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    # asyncio turns Nagle's algorithm off only for sockets with this protocol number. With Nagle's
    # algorithm each answer waits 40 ms for the client's delayed acknowledgement.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            while not server.started and thread.is_alive():
                thread.join(0.01)
            yield url
        finally:
            server.should_exit = True
            thread.join()


def client(url: str, **options) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, verify=False, **options)  # reads no certificates


def error_of(reply: httpx.Response) -> dict:
    """The error of an answer, which has all fields of one."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def chunks_of(text: str) -> list[dict]:
    """The chunks of a stream that ended as it should."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def children(pid: int) -> list[int]:
    """Processes that a process's threads have started."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}").glob("task/*/children")]
    return [int(word) for text in texts for word in text.split()]


def tiny_checkpoint(root: Path, cfg: ModelConfig = CFG) -> Path:
    """A folder with a checkpoint "tiny", and room for compiled programs, logs and state."""
    hf.save(root / NAME, cfg, seeded_params(cfg))
    byte_tokenizer().save(root / NAME)
    return root


def serve(
    folder: Path, *flags: str, program: tuple[str, ...] = ("-m", "jaxllama")
) -> contextlib.AbstractContextManager[tuple[subprocess.Popen, str, Path]]:
    """(process, url, its log) of ``jaxllama serve`` for the model of a folder."""
    flags = "--model", str(folder / NAME), "--port", "0", "--chunk", "16", *flags
    return started(folder, *flags, program=program)


@contextlib.contextmanager
def started(
    folder: Path, *flags: str, program: tuple[str, ...] = ("-m", "jaxllama"), names: str = NAME
) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """(process, url, its log) of ``jaxllama serve``; killed at the end if it still runs.

    names: what the server says that it serves.
    """
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    environment = {
        **os.environ,
        "JAXLLAMA_CACHE": str(folder / "cache"),
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, *program, "serve", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
        try:
            line = process.stdout.readline()
            address = r"(https?://127\.0\.0\.1:\d+)"
            found = re.fullmatch(rf"jaxllama serves {names} on {address}\n", line)
            assert found, (line, log.read_text())
            yield process, found[1], log
        finally:
            process.kill()
            process.communicate()
