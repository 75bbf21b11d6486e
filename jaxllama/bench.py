"""``jaxllama bench``: what a user waits for, as medians of several runs.

    run(lm, ...) -> report (a dict)        table(report) -> text

* ``decode_tokens_per_second``: rows x steps of the decode loop over its wall time, after a prompt
  of 5 tokens, without the prefill.  ``generate_tokens_per_second`` has the prefill and the host's
  part in it.
* ``prefill_seconds``: ``prompt_tokens`` random tokens to the first new token, on the device.
* ``first_token_seconds``: from the start of this process, with imports, loading and compiling (or
  reading the persistent compilation cache).
* ``weight_gigabytes_per_second``: bytes of weights that one step reads, times steps a second; to be
  held against the machine's memory bandwidth.
* memory: the process's peak resident set, and the device's peak where it keeps count.

The loop stops at no token, so every run does the same work.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama import generation
from jaxllama.cache import init_cache
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import PREFILL_CHUNK, LanguageModel
from jaxllama.sampling import Sampling, SamplingParams
from pallas_kernels.qtensor import QTensor

SHORT = 5
_IMPORTED = time.monotonic()


def run(
    lm: LanguageModel,
    *,
    batch: int = 1,
    prompt_tokens: int = 512,
    new_tokens: int = 64,
    runs: int = 5,
    kv_dtype: str | None = None,
    chunk: int | None = None,
) -> dict[str, Any]:
    """Measure greedy decoding.  Raises JaxLlamaError if the context is too short for it."""
    longest = max(prompt_tokens + 1, SHORT + new_tokens)
    if longest > lm.config.max_position:
        raise JaxLlamaError(
            f"bench needs {longest} positions, and the context is {lm.config.max_position}"
        )
    loop = _Loop(lm, batch, kv_dtype, chunk or PREFILL_CHUNK)
    loop.prefill(SHORT, 1)
    first_token = _since_process_start()
    # Two warm-ups: the first compiles, the second fills allocator and caches.
    decodes, generates = zip(*[loop.decode(new_tokens) for _ in range(runs + 2)], strict=True)
    prefills = [loop.prefill(prompt_tokens, 1) for _ in range(runs + 2)]
    decode, generate, prefill = (
        statistics.median(times[2:]) for times in (decodes, generates, prefills)
    )
    steps = new_tokens - 1
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    read = bytes_per_step(lm)
    return {
        "model": lm.config.name,
        "dtype": lm.dtype.name,
        "device": device.device_kind,
        "jax": jax.__version__,
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "runs": runs,
        "decode_tokens_per_second": batch * steps / decode,
        "generate_tokens_per_second": batch * new_tokens / generate,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": batch * prompt_tokens / prefill,
        "first_token_seconds": first_token,
        "weight_bytes_per_step": read,
        "weight_gigabytes_per_second": read * steps / decode / 1e9,
        "peak_rss_bytes": peak_rss(),
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
    }


class _Loop:
    """The two halves of ``generation.generate``, timed apart."""

    def __init__(self, lm: LanguageModel, batch: int, kv_dtype: str | None, chunk: int) -> None:
        self.lm, self.batch, self.chunk = lm, batch, chunk
        self.kv_dtype = lm.dtype if kv_dtype is None else kv_dtype
        self.params = SamplingParams.stack([Sampling()] * batch, lm.config.vocab_size)
        self.stop_ids = jnp.zeros((0,), jnp.int32)

    def _start(self, prompt: int, room: int) -> tuple[generation.GenerateState, float]:
        rng = np.random.default_rng(0)
        ids = rng.integers(0, self.lm.config.vocab_size, (self.batch, prompt))
        tokens = jnp.asarray(ids, jnp.int32)
        lengths = jnp.full((self.batch,), prompt, jnp.int32)
        cache = init_cache(self.lm.config, self.batch, prompt + room, self.kv_dtype)
        jax.block_until_ready((tokens, lengths, cache))
        begun = time.perf_counter()
        state = generation.start(
            self.lm.config, self.lm.params, tokens, lengths, cache, self.params, self.stop_ids,
            max_new_tokens=room, chunk=self.chunk if prompt > self.chunk else None,
        )  # fmt: skip
        return jax.block_until_ready(state), begun

    def prefill(self, prompt: int, room: int) -> float:
        """Seconds from a prompt on the device to its first new token."""
        _, begun = self._start(prompt, room)
        return time.perf_counter() - begun

    def decode(self, new_tokens: int) -> tuple[float, float]:
        """Seconds of the steps after the first token, and of all with the prefill."""
        state, begun = self._start(SHORT, new_tokens)
        first = time.perf_counter()
        state = generation.advance(
            self.lm.config, self.lm.params, state, self.params, self.stop_ids,
            np.int32(new_tokens),
        )  # fmt: skip
        jax.block_until_ready(state)
        done = time.perf_counter()
        return done - first, done - begun


def bytes_per_step(lm: LanguageModel) -> int:
    """Bytes of weights that one decode step reads: all, but of the embedding only the rows of its
    tokens, unless it is the head as well."""
    total = weight_bytes(lm.params)
    return total if lm.config.tie_embeddings else total - weight_bytes(lm.params["embed"])


def weight_bytes(tree: Any) -> int:
    """Bytes of a parameter tree on an accelerator."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    return sum(leaf.nbytes for leaf in leaves)


def peak_rss() -> int:
    """Bytes; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _since_process_start() -> float:
    """Seconds; where the system does not say, from the import of this module."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
            started = int(stat.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.monotonic() - _IMPORTED


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    megabytes = 1e6
    rows = [
        ("model", f"{report['model']} ({report['dtype']}), batch {report['batch']}"),
        ("device", f"{report['device']}, jax {report['jax']}"),
        ("decode", f"{report['decode_tokens_per_second']:.1f} tokens/s, reading weights at "
                   f"{report['weight_gigabytes_per_second']:.1f} GB/s"),
        ("generate", f"{report['generate_tokens_per_second']:.1f} tokens/s with the prefill of "
                     f"{SHORT} tokens"),
        ("prefill", f"{report['prompt_tokens']} tokens in {report['prefill_seconds']:.3f} s, "
                    f"{report['prefill_tokens_per_second']:.0f} tokens/s"),
        ("first token", f"{report['first_token_seconds']:.2f} s after the process began"),
        ("weights", f"{report['weight_bytes_per_step'] / megabytes:.1f} MB read a step"),
        ("peak memory", f"{report['peak_rss_bytes'] / megabytes:.0f} MB resident"),
    ]  # fmt: skip
    if report["peak_device_bytes"] is not None:
        rows.append(("", f"{report['peak_device_bytes'] / megabytes:.0f} MB on the device"))
    return "\n".join(f"{name:12} {value}" for name, value in rows)
