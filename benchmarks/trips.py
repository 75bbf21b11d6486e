"""``python -m benchmarks.trips``: how far a call travels through this project's code.

    python -m benchmarks.trips [--only NAME ...] [--gguf FILE] [-v]

A trip is one public call. For each trip a profiler counts the entered files, their functions, the
source lines of those functions, and the deepest stack of own frames. The models are
tiny, with random weights. Each trip compiles anew ("cold"), except where its name says otherwise.

The HTTP trip sends one ``/v1/completions`` body to the ASGI application in this process. An engine
without a model (``tests.helpers.fake_engine``) answers it.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that other processes compiled would shorten the trips.
os.environ.setdefault("JAXLLAMA_CACHE", tempfile.mkdtemp(prefix="jaxllama-trips-"))

import jax
import jax.numpy as jnp
import numpy as np

import jaxllama as jl
from pallas_kernels import quantize, quantized_matmul

ROOT = str(Path(__file__).parents[1]) + os.sep
PACKAGES = tuple(ROOT + name + os.sep for name in ("jaxllama", "pallas_kernels"))
LAYERS = 8  # as many as keep compiled programs
MODEL = jl.ModelConfig.of(
    name="trips",
    vocab_size=512,
    d_model=64,
    n_layers=LAYERS,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,  # a multiple of 32, as in all presets: the CPU's handlers take it
    d_ff=128,
    norm_eps=1e-5,
    max_position=512,
    rope=jl.load_config("smollm2-135m").rope,
    tie_embeddings=False,
    eos_token_ids=(2,),
)


class Trip:
    """A profiler's hook that records the project's functions that are called."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[tuple[str, int], int]] = collections.defaultdict(dict)
        self.depth = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        name = code.co_filename
        # Modules and the bodies of classes (without CO_NEWLOCALS) are entered once, at import.
        if event != "call" or not name.startswith(PACKAGES) or not code.co_flags & 2:
            return
        name = name.removeprefix(ROOT)
        lines = len({line for *_, line in code.co_lines() if line})
        self.functions[name][code.co_qualname, code.co_firstlineno] = lines
        depth, outer = 0, frame
        while outer is not None:
            depth += outer.f_code.co_filename.startswith(PACKAGES)
            outer = outer.f_back
        self.depth = max(self.depth, depth)

    def run(self, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, whose functions are recorded in all new threads too."""
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            return call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def __str__(self) -> str:
        functions = sum(map(len, self.functions.values()))
        lines = sum(sum(own.values()) for own in self.functions.values())
        files = len(self.functions)
        return f"{files} files, {functions} functions, {lines} lines, depth {self.depth}"

    def listing(self) -> str:
        """Return one line for each file: its functions."""
        return "\n".join(
            f"    {name}: {', '.join(sorted(own for own, _ in functions))}"
            for name, functions in sorted(self.functions.items())
        )


Trips = Iterator[tuple[str, Callable[[], Any]]]


def decoding() -> Trips:
    yield from one_model("float32", MODEL.first_layers(2), None)
    hybrid = jl.load_config("gla-340m").replace(n_layers=2, layer_types=("gla", "attention"))
    yield from one_model("hybrid w4a16", hybrid, "w4a16")


def one_model(name: str, cfg: jl.ModelConfig, scheme: str | None) -> Trips:
    params = jl.init_params(cfg, jax.random.key(0))
    if scheme is not None:
        params = jl.quantize_params(params, scheme)
    caches = [jl.init_cache(cfg, 1, 16)]
    tokens, lengths = jnp.asarray([[1, 2, 3, 4]]), jnp.asarray([4])

    def prefill() -> None:
        caches.append(jl.prefill(cfg, params, tokens, lengths, caches.pop())[1])

    def step() -> None:
        caches.append(jl.decode_step(cfg, params, jnp.asarray([3]), caches.pop())[1])

    yield f"prefill, {name}", prefill
    yield f"decode_step, {name}", step
    jax.clear_caches()
    yield f"decode_step, {name}, planners warm", step


def product() -> Trips:
    w, x = quantize(jnp.ones((64, 128)), "int8"), jnp.ones((1, 128))
    yield "quantized_matmul, XLA form", lambda: quantized_matmul(x, w)


def text(path: Path | None) -> Trips:
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = gguf_file(Path(folder))
        models = [jl.load(path)]  # tests this machine's CPU handlers, which are then kept

        def generate() -> Any:
            return models[-1].generate(["The capital of France is"], max_new_tokens=2)

        yield "load a GGUF file", lambda: models.append(jl.load(path))
        yield "lm.generate, two tokens", generate
        models.append(jl.load(path))
        yield "lm.generate, two tokens, with kept programs", generate


def gguf_file(folder: Path) -> Path:
    """Return a GGUF file with Q4_0 weights and a byte-level tokenizer."""
    from gguf import GGMLQuantizationType

    from jaxllama.checkpoints.hf import load as hf
    from jaxllama.text.token_bytes import byte_characters
    from tests.helpers.gguf_cases import write_gguf

    hf.save(folder / "hf", MODEL, jl.init_params(MODEL, jax.random.key(0), "float32"))
    tokens = [*byte_characters(), "th", *(f"<{i}>" for i in range(257, MODEL.vocab_size))]
    pairs = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * 257 + [3] * (MODEL.vocab_size - 257),
        "merges": ["t h"],
        "bos_token_id": 257,
        "eos_token_id": 258,
    }
    path = folder / "model.gguf"
    changes = {f"tokenizer.ggml.{key}": value for key, value in pairs.items()}
    write_gguf(path, folder / "hf", GGMLQuantizationType.Q4_0, **changes)
    return path


def http() -> Trips:
    import httpx2 as httpx

    from jaxllama.serving.api.metrics import Metrics
    from jaxllama.serving.http.server import ServerSettings, create_app
    from tests.helpers.fake_engine import FakeEngine

    cfg = MODEL.first_layers(1)
    tokenizer = jl.load("smollm2-135m", random=True, dtype="float32").tokenizer
    lm = jl.LanguageModel(cfg, jl.init_params(cfg, jax.random.key(0)), tokenizer)
    with FakeEngine() as engine:
        metrics = Metrics()
        metrics.watch(engine)
        app = create_app(lm, engine, ServerSettings("trips", 96), metrics)

        async def post() -> None:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                body = {"model": "trips", "prompt": "Hello", "max_tokens": 4}
                reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text

        asyncio.run(post())  # imports
        yield "one /v1/completions, without the model", lambda: asyncio.run(post())


def training() -> Trips:
    from jaxllama.training.start import TrainingSetup
    from jaxllama.training.step import init_state, update
    from tests.helpers.training_cases import run_config

    cfg = MODEL.first_layers(2)
    with tempfile.TemporaryDirectory() as folder:
        setup = TrainingSetup(run_config(Path(folder), cfg), cfg)
        params = jl.init_params(cfg, jax.random.key(0), "float32")
        # compiles the CPU's handler of attention, as the other trips do before this one
        jl.logits(cfg, params, jnp.ones((1, 8), int), jnp.asarray([8]))
        state = init_state(setup, params)
        batch = jnp.asarray(np.ones((1, 2, 9), np.int32))
        yield "a training update", lambda: update(setup, state, None, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    trips = {"text": None, "decoding": decoding, "product": product, "http": http}
    trips["training"] = training
    parser.add_argument("--only", nargs="+", choices=trips, help="the trips to measure")
    parser.add_argument("--gguf", type=Path, help="a file to load; by default a tiny one is made")
    parser.add_argument("-v", action="store_true", help="list the files and functions of each trip")
    args = parser.parse_args()
    # Public names import their modules when they are first used, which no trip counts.
    for name in jl.__all__:
        getattr(jl, name)
    for room, make in trips.items():
        if args.only and room not in args.only:
            continue
        for name, call in text(args.gguf) if make is None else make():
            trip = Trip()
            trip.run(call)
            print(f"{name}: {trip}", flush=True)
            if args.v:
                print(trip.listing())


if __name__ == "__main__":
    main()
