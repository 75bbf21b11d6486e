"""``jaxllama bench serve``: load a running server, and measure what its clients see.

    run(load) -> report        table(report) -> str

Conversations of one or more turns arrive as a Poisson process, or all at once. Prompt and answer
lengths are drawn from distributions or from a file (``workload``), and all follows from the seed.
Prompts are random token ids over /v1/completions, streamed, with ``ignore_eos``, so that the number
of tokens is the drawn one. Any server works that lists its models as OpenAI's API does and accepts
those three, such as vLLM and SGLang. Later turns repeat the generated ids if the server reports
them (``return_token_ids``, as jaxllama and vLLM do); otherwise they repeat as many other ids.

Times are a client's. ``ttft`` is the time until the first chunk, ``itl`` the time between chunks (a
chunk may have several tokens). ``tpot`` is the mean time per token after the first, and ``e2e``
the time of the whole request. With a rate the times count from the arrival, so they include the
wait for a free connection (no coordinated omission). Goodput is the rate of requests that met all
their limits (DistServe, arXiv 2401.09670). Refusals (429) and failures are counted and never
retried.

The client is aiohttp (extra ``bench``). It takes 17 us of CPU a chunk, and httpx takes 34, so the
clock measures the server.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from jaxllama import extras
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed import workload
from jaxllama.evaluation.speed.workload import ConversationTurn, Lengths
from jaxllama.typing import JsonObject

try:
    import aiohttp
except ImportError:
    raise extras.missing("aiohttp", "bench serve") from None

PERCENTILES = (50, 90, 99)
LIMITS = ("ttft", "tpot", "e2e")
# number of ids to draw from if the server does not report it; only jaxllama does
VOCABULARY = 10_000


@dataclasses.dataclass(frozen=True)
class Load:
    """The load on a server.

    rate: requests a second, inf for all at once. concurrency: number of connections. limits:
    seconds by key of LIMITS, for the goodput. model: None for the first that the server lists.
    requests: number of conversations, of ``turns`` requests each. lengths: a file that replaces
    prompt_tokens and new_tokens (``workload``). prefix_tokens: tokens of a shared prefix, one of
    ``prefixes``, before the first prompt.
    """

    url: str
    model: str | None = None
    requests: int = 100
    rate: float = math.inf
    concurrency: int = 64
    prompt_tokens: Lengths = Lengths("128")
    new_tokens: Lengths = Lengths("128")
    seed: int = 0
    api_key: str | None = None
    limits: tuple[tuple[str, float], ...] = ()
    lengths: Path | None = None
    prefix_tokens: int = 0
    prefixes: int = 1
    turns: int = 1


@dataclasses.dataclass
class Sample:
    """One request as its client saw it; times in seconds."""

    status: int = 0
    ttft: float = math.nan
    e2e: float = math.nan
    gaps: list[float] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    ids: list[int] = dataclasses.field(default_factory=list)
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / max(self.new_tokens - 1, 1)


def run(load: Load) -> JsonObject:
    """Make the load. Raises JaxLlamaError if there is no server, or not one answer."""
    model, samples, seconds = asyncio.run(_run(load))
    good = [sample for sample in samples if sample.status == 200 and not sample.error]
    if not good:
        reasons = Counter(sample.error for sample in samples)
        raise JaxLlamaError(f"{load.url}: no request was answered: {reasons.most_common(1)[0][0]}")
    new = sum(sample.new_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    report: JsonObject = {
        "url": load.url,
        "model": model,
        "requests": len(samples),
        "answered": len(good),
        "refused": sum(sample.status == 429 for sample in samples),
        "failed": sum(sample.status != 429 and bool(sample.error) for sample in samples),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": new / seconds,
        "total_tokens_per_s": (new + prompt) / seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(sample.cached_tokens for sample in good),
        "output_tokens": new,
        "ttft_s": _summary([sample.ttft for sample in good]),
        "itl_s": _summary([gap for sample in good for gap in sample.gaps]),
        "tpot_s": _summary([sample.tpot for sample in good if sample.new_tokens > 1]),
        "e2e_s": _summary([sample.e2e for sample in good]),
    }
    if load.limits:
        met = sum(all(getattr(s, key) <= limit for key, limit in load.limits) for s in good)
        report["goodput_per_s"] = met / seconds
        report["goodput_share"] = met / len(samples)
    return report


async def _run(load: Load) -> tuple[str, list[Sample], float]:
    async with _session(load) as session:
        return await _measure_all(session, load)


def check_url(url: str) -> None:
    """Raise JaxLlamaError for a text that is no http(s) URL."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise JaxLlamaError(f"{url!r} is no http:// or https:// address")


def _session(load: Load) -> aiohttp.ClientSession:
    """Return a session with one connection for each request; the URL may end with ``/v1``."""
    check_url(load.url)
    headers = {"Accept-Encoding": "identity"}
    if load.api_key:
        headers["Authorization"] = f"Bearer {load.api_key}"
    return aiohttp.ClientSession(
        load.url.rstrip("/").removesuffix("/v1") + "/",
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
    )


async def _measure_all(
    session: aiohttp.ClientSession, load: Load
) -> tuple[str, list[Sample], float]:
    model, vocab_size, longest = await _model(session, load)
    rng = np.random.default_rng(load.seed)
    conversations = workload.conversations(load, rng, vocab_size, longest)
    paced = math.isfinite(load.rate)
    gaps = rng.exponential(1 / load.rate, load.requests) if paced else np.zeros(load.requests)
    free = asyncio.Semaphore(load.concurrency)
    begin = time.perf_counter()
    arrivals = begin + np.cumsum(gaps)

    async def measure(turns: list[ConversationTurn], arrival: float) -> list[Sample]:
        """Send the turns; each waits for the answer to the one before."""
        await asyncio.sleep(max(arrival - time.perf_counter(), 0))
        history: list[int] = []
        samples: list[Sample] = []
        for turn in turns:
            prompt = history + turn.ids
            body = {**common, "prompt": prompt, "max_tokens": turn.new_tokens}
            async with free:
                start = arrival if paced and not samples else time.perf_counter()
                samples.append(await _measure(session, body, start))
            if samples[-1].error:
                break
            written, count = samples[-1].ids, samples[-1].new_tokens
            others = itertools.islice(itertools.cycle(prompt), max(count - len(written), 0))
            history = [*prompt, *written, *others]
        return samples

    common = {
        "model": model,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    if load.turns > 1:
        common["return_token_ids"] = True
    work = (measure(turns, arrival) for turns, arrival in zip(conversations, arrivals, strict=True))
    samples = [sample for samples in await asyncio.gather(*work) for sample in samples]
    return model, samples, time.perf_counter() - begin


async def _model(session: aiohttp.ClientSession, load: Load) -> tuple[str, int, int | None]:
    """Return the model's name, the number of ids to draw from, and its context if it is known."""
    where = f"{load.url}: /v1/models"
    try:
        async with session.get("v1/models") as reply:
            body = await reply.read()
        if reply.status != 200:
            raise JaxLlamaError(f"{where}: {_reason(body)}")
        there = {model["id"]: model for model in json.loads(body)["data"]}
        sizes: dict[str, tuple[int | None, int | None]] = {
            name: (model.get("vocab_size"), model.get("max_model_len"))
            for name, model in there.items()
        }
    except JaxLlamaError:
        raise
    except aiohttp.ClientConnectorError as error:
        raise JaxLlamaError(
            f"{load.url}: no server answers ({error.os_error.strerror}); start one with "
            "jaxllama serve, or give its address by --url"
        ) from None
    except (aiohttp.ClientError, ValueError, LookupError, TypeError, AttributeError):
        raise JaxLlamaError(f"{where}: no list of models as OpenAI's API has it") from None
    name = next(iter(sizes), None) if load.model is None else load.model
    if name is None or name not in sizes:
        known = ", ".join(map(str, sizes)) or "nothing"
        raise JaxLlamaError(f"{where} has {known}" + (f", not {name!r}" if name else ""))
    vocab_size, longest = sizes[name]
    return name, vocab_size or VOCABULARY, longest


async def _measure(session: aiohttp.ClientSession, body: JsonObject, start: float) -> Sample:
    sample = Sample()
    try:
        async with session.post("v1/completions", json=body) as reply:
            await _read(reply, sample, start)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        sample.error = str(error) or type(error).__name__
    return sample


async def _read(reply: aiohttp.ClientResponse, sample: Sample, start: float) -> None:
    sample.status = reply.status
    if reply.status != 200:
        sample.error = _reason(await reply.read())
        return
    last, done = math.nan, False
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        now, data = time.perf_counter(), line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            sample.error = _reason(data)
            return
        if usage := chunk.get("usage"):
            sample.prompt_tokens = usage["prompt_tokens"]
            sample.new_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            sample.cached_tokens = details.get("cached_tokens") or 0
        if not chunk["choices"]:
            continue
        sample.ids += chunk["choices"][0].get("token_ids") or ()
        if math.isnan(last):
            sample.ttft = now - start
        else:
            sample.gaps.append(now - last)
        last = now
    sample.e2e = last - start
    if not done:
        sample.error = "the stream broke off"
    elif not sample.new_tokens:
        sample.error = "the stream has no usage, or no tokens"


def _reason(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _summary(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    out = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **out, "max": float(np.max(values))}


def table(report: JsonObject) -> str:
    """Return the report as text."""
    lines = [
        f"{report['answered']} of {report['requests']} requests answered in "
        f"{report['seconds']:.1f} s ({report['refused']} refused, {report['failed']} failed)",
        f"{report['requests_per_s']:.2f} requests/s, {report['output_tokens_per_s']:.1f} output "
        f"tokens/s, {report['total_tokens_per_s']:.1f} tokens/s with prompts",
    ]
    if report["cached_tokens"]:
        share = 100 * report["cached_tokens"] / report["prompt_tokens"]
        lines.append(f"{share:.1f}% of the prompts' tokens were in the server's cache")
    if "goodput_per_s" in report:
        share = 100 * report["goodput_share"]
        lines.append(f"goodput {report['goodput_per_s']:.2f} requests/s ({share:.1f}%)")
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    lines.append("ms".ljust(26) + "".join(name.rjust(10) for name in columns))
    names = {
        "ttft_s": "time to first token",
        "itl_s": "between chunks",
        "tpot_s": "per token",
        "e2e_s": "whole request",
    }
    for key, name in names.items():
        if report[key]:
            cells = (f"{1000 * report[key][column]:10.1f}" for column in columns)
            lines.append(name.ljust(26) + "".join(cells))
    return "\n".join(lines)
