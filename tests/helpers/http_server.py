"""Servers on ports of their own, for tests that talk to them as clients do: in a thread, or as the
process that ``jaxllama serve`` is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import uvicorn

from jaxllama.checkpoints.hf import load as hf
from jaxllama.config import ModelConfig
from jaxllama.language_model import LanguageModel
from jaxllama.serving.http import limits
from jaxllama.serving.http.metrics import Metrics
from jaxllama.serving.http.server import Settings, create_app
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.seeded import seeded_params

NAME = "tiny"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{# <tool_call> #}{% endif %}<assistant>"
)


def byte_tokenizer() -> Tokenizer:
    """Bytes, with a chat template."""
    plain = Tokenizer.byte_level()
    return Tokenizer(plain._backend, "test tokenizer", chat_template=TEMPLATE)


@contextlib.contextmanager
def talking(lm: LanguageModel, engine, key: str = "none", **settings) -> Iterator[Any]:
    """OpenAI's own client of a server (``serving``)."""
    import openai

    with serving(lm, engine, **settings) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            yield client


@contextlib.contextmanager
def serving(
    lm: LanguageModel, engine, peers: limits.Peers | None = None, **settings
) -> Iterator[str]:
    """The server's address, while it runs."""
    settings = {"name": NAME, "max_len": engine.options.max_len, **settings}
    metrics = Metrics()
    metrics.watch(engine)
    app = create_app(lm, engine, Settings(**settings), metrics)
    config = uvicorn.Config(
        app,
        http=limits.protocol(peers),
        lifespan="on",
        ws="none",
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
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
    return httpx.Client(base_url=url, timeout=60, **options)


def tiny_checkpoint(root: Path, cfg: ModelConfig) -> Path:
    """A folder with a checkpoint "tiny", and room for compiled programs, logs and state."""
    hf.save(root / NAME, cfg, seeded_params(cfg))
    byte_tokenizer().save(root / NAME)
    return root


@contextlib.contextmanager
def serve(
    folder: Path, *flags: str, program: tuple[str, ...] = ("-m", "jaxllama")
) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    """(process, url, its log) of ``jaxllama serve``; killed at the end if it still runs."""
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    environment = {
        **os.environ, "JAXLLAMA_CACHE": str(folder / "cache"), "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    command = [sys.executable, *program, "serve", "--model", str(folder / NAME),
               "--port", "0", "--chunk", "16", *flags]  # fmt: skip
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"jaxllama serves tiny on (http://127\.0\.0\.1:\d+)\n", line)
            assert found, (line, log.read_text())
            yield process, found[1], log
        finally:
            process.kill()
            process.communicate()
