"""``jaxllama bench serve``: load on a running server, and what its clients see.

    run(load) -> report        table(report) -> str

Requests arrive as a Poisson process (or all at once), with prompt and answer lengths drawn from
distributions; all of it follows from the seed.  Prompts are random token ids over /v1/completions,
streamed, with ``ignore_eos``, so that the number of tokens is the one that was drawn.

Times are a client's: ``ttft`` until the first chunk, ``itl`` between chunks (a chunk may bring
several tokens), ``tpot`` the mean time per token after the first, ``e2e`` the whole request.  With
a rate they count from the moment of arrival, so that a request which waits for a free connection
has waited (no coordinated omission).  Goodput is the rate of requests that met all their limits
(DistServe, arXiv 2401.09670).  Refusals (429) and failures are counted, never retried.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import time
from collections import Counter
from typing import Any

import numpy as np

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.http_client import Address, request

PERCENTILES = (50, 90, 99)
LIMITS = ("ttft", "tpot", "e2e")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """``N``: always N.  ``LOW:HIGH``: uniform.  ``~N``: log-normal of mean N (sigma 1, at most
    8 N), which is what chats look like."""

    text: str

    def __post_init__(self) -> None:
        try:
            numbers = [int(part) for part in self.text.removeprefix("~").split(":")]
        except ValueError:
            numbers = []
        single = len(numbers) == 1
        pair = len(numbers) == 2 and self.text[0] != "~" and numbers[0] <= numbers[1]
        if not (single or pair) or numbers[0] < 1:
            raise JaxLlamaError(f"{self.text!r} is no length: N, LOW:HIGH or ~MEAN, from 1 on")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        if self.text[0] == "~":
            mean = int(self.text[1:])
            drawn = rng.lognormal(math.log(mean) - 0.5, 1.0, count)
            return np.clip(drawn, 1, 8 * mean).astype(int).tolist()
        low, _, high = self.text.partition(":")
        return rng.integers(int(low), int(high or low), count, endpoint=True).tolist()


@dataclasses.dataclass(frozen=True)
class Load:
    """rate: requests a second, inf for all at once; concurrency: connections.  limits: seconds by
    key of LIMITS, for the goodput."""

    url: str
    requests: int = 100
    rate: float = math.inf
    concurrency: int = 64
    prompt_tokens: Lengths = Lengths("128")
    new_tokens: Lengths = Lengths("128")
    seed: int = 0
    api_key: str | None = None
    limits: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for flag, value in (("--requests", self.requests), ("--concurrency", self.concurrency)):
            if value < 1:
                raise JaxLlamaError(f"{flag} = {value}: must be at least 1")
        if not self.rate > 0:
            raise JaxLlamaError(f"--rate = {self.rate}: must be above 0")
        for key, seconds in self.limits:
            if key not in LIMITS or not seconds > 0:
                raise JaxLlamaError(
                    f"--goodput {key}={seconds}: allowed are {', '.join(LIMITS)}, in seconds"
                )


def from_words(args: argparse.Namespace) -> Load:
    """A Load from the command's words."""
    limits = []
    for entry in args.goodput:
        key, _, value = entry.partition("=")
        try:
            limits.append((key, float(value)))
        except ValueError:
            raise JaxLlamaError(f"--goodput {entry!r}: expected KEY=SECONDS") from None
    return Load(
        url=args.url,
        requests=args.requests,
        rate=args.rate,
        concurrency=args.concurrency,
        prompt_tokens=Lengths(args.prompt_tokens),
        new_tokens=Lengths(args.new_tokens),
        seed=args.seed,
        api_key=args.api_key or os.environ.get("JAXLLAMA_API_KEY"),
        limits=tuple(limits),
    )


@dataclasses.dataclass
class Sample:
    """One request as its client saw it; times in seconds."""

    status: int = 0
    ttft: float = math.nan
    e2e: float = math.nan
    gaps: list[float] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    new_tokens: int = 0
    error: str = ""

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / max(self.new_tokens - 1, 1)


def run(load: Load) -> dict[str, Any]:
    """Make the load; raises JaxLlamaError when there is no server, or not one answer."""
    samples, seconds = asyncio.run(_run(load))
    good = [sample for sample in samples if sample.status == 200 and not sample.error]
    if not good:
        reasons = Counter(sample.error for sample in samples)
        raise JaxLlamaError(f"{load.url}: no request was answered: {reasons.most_common(1)[0][0]}")
    new = sum(sample.new_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    report: dict[str, Any] = {
        "url": load.url,
        "requests": len(samples),
        "answered": len(good),
        "refused": sum(sample.status == 429 for sample in samples),
        "failed": sum(sample.status != 429 and bool(sample.error) for sample in samples),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": new / seconds,
        "total_tokens_per_s": (new + prompt) / seconds,
        "prompt_tokens": prompt,
        "output_tokens": new,
        "ttft_s": _spread([sample.ttft for sample in good]),
        "itl_s": _spread([gap for sample in good for gap in sample.gaps]),
        "tpot_s": _spread([sample.tpot for sample in good if sample.new_tokens > 1]),
        "e2e_s": _spread([sample.e2e for sample in good]),
    }
    if load.limits:
        met = sum(all(getattr(s, key) <= limit for key, limit in load.limits) for s in good)
        report["goodput_per_s"] = met / seconds
        report["goodput_share"] = met / len(samples)
    return report


async def _run(load: Load) -> tuple[list[Sample], float]:
    address = Address.parse(load.url)
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    reply = await request(address, "GET", "/v1/models", headers)
    if reply.status != 200:
        raise JaxLlamaError(f"{load.url}/v1/models: {_reason(await reply.body())}")
    model = json.loads(await reply.body())["data"][0]
    rng = np.random.default_rng(load.seed)
    bodies = [
        {
            "model": model["id"],
            "prompt": rng.integers(3, model["vocab_size"], length).tolist(),
            "max_tokens": new,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
        }
        for length, new in zip(
            load.prompt_tokens.draw(rng, load.requests),
            load.new_tokens.draw(rng, load.requests),
            strict=True,
        )
    ]
    paced = math.isfinite(load.rate)
    gaps = rng.exponential(1 / load.rate, load.requests) if paced else np.zeros(load.requests)
    free = asyncio.Semaphore(load.concurrency)
    begin = time.perf_counter()
    arrivals = begin + np.cumsum(gaps)

    async def one(body: dict[str, Any], arrival: float) -> Sample:
        await asyncio.sleep(max(arrival - time.perf_counter(), 0))
        async with free:
            start = arrival if paced else time.perf_counter()
            return await _measure(address, headers, body, start)

    work = (one(body, arrival) for body, arrival in zip(bodies, arrivals, strict=True))
    samples = await asyncio.gather(*work)
    return samples, time.perf_counter() - begin


async def _measure(
    address: Address, headers: dict[str, str], body: dict[str, Any], start: float
) -> Sample:
    sample = Sample()
    try:
        reply = await request(address, "POST", "/v1/completions", headers, body)
        sample.status = reply.status
        if reply.status != 200:
            sample.error = _reason(await reply.body())
            return sample
        last, done = math.nan, False
        async for line in reply.lines():
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                now = time.perf_counter()
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    sample.error = chunk["error"]["message"]
                    return sample
                if chunk["usage"]:
                    sample.prompt_tokens = chunk["usage"]["prompt_tokens"]
                    sample.new_tokens = chunk["usage"]["completion_tokens"]
                elif math.isnan(last):
                    sample.ttft, last = now - start, now
                else:
                    sample.gaps.append(now - last)
                    last = now
        sample.e2e = last - start
        if not done:
            sample.error = "the stream broke off"
    except (OSError, EOFError, ValueError, JaxLlamaError) as error:
        sample.error = str(error) or type(error).__name__
    return sample


def _reason(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    out = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **out, "max": float(np.max(values))}


def table(report: dict[str, Any]) -> str:
    """For people; ``run``'s report is for machines."""
    lines = [
        f"{report['answered']} of {report['requests']} requests answered in "
        f"{report['seconds']:.1f} s ({report['refused']} refused, {report['failed']} failed)",
        f"{report['requests_per_s']:.2f} requests/s, {report['output_tokens_per_s']:.1f} output "
        f"tokens/s, {report['total_tokens_per_s']:.1f} tokens/s with prompts",
    ]
    if "goodput_per_s" in report:
        share = 100 * report["goodput_share"]
        lines.append(f"goodput {report['goodput_per_s']:.2f} requests/s ({share:.1f}%)")
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    lines.append("ms".ljust(26) + "".join(name.rjust(10) for name in columns))
    names = {"ttft_s": "time to first token", "itl_s": "between chunks",
             "tpot_s": "per token", "e2e_s": "whole request"}  # fmt: skip
    for key, name in names.items():
        if report[key]:
            cells = (f"{1000 * report[key][column]:10.1f}" for column in columns)
            lines.append(name.ljust(26) + "".join(cells))
    return "\n".join(lines)
