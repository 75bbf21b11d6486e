"""``jaxllama bench``: the times that a user waits for, as medians of several runs.

    run(lm, ...) -> report (a dict)        table(report) -> text

* ``decode_tokens_per_second``: rows x steps of the decode loop over its wall time, without the
prefill. Rows hold ``context`` tokens at the start, by default 5. ``generate_tokens_per_second``
includes the prefill of 5 tokens and the host's part.
* ``prefill_seconds``: from ``prompt_tokens`` random tokens to the first new token, on the device.
* ``first_token_seconds``: from the start of this process, with imports, loading and compiling (or
reading the persistent compilation cache). ``compile_seconds``: for the decode loop alone.
* ``weight_gigabytes_per_second``: bytes of weights that one step reads, times steps a second.
``share_of_ceiling``: bytes that a step must move (weights and cache) times steps a second, over a
ceiling. The ceiling is the rate of a copy or a matrix-vector product on this machine in the same
run. On a mesh both are sums over its devices.
* ``kernels_per_step`` (see ``hlo``) and ``program_bytes`` come from the compiler.
* memory: the process's peak resident set, and the device's peak if it keeps count.

The loop stops at no token, so every run does the same work. With ``trace``, one more step runs
under jax's profiler, whose files (for Perfetto, XProf) go to that folder.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed.harness import (
    Decoding,
    bytes_per_step,
    cache_bytes_per_step,
    median,
    memory_bandwidth,
)
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import init_cache
from jaxllama.parallel.mesh import DATA_AXIS
from jaxllama.progress import Working, peak_rss
from jaxllama.typing import JsonObject
from pallas_kernels.qtensor import tree_bytes

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
    context: int = SHORT,
    trace: str | Path | None = None,
    sign: Working | None = None,
) -> JsonObject:
    """Measure greedy decoding.

    context: number of tokens that every row holds when decoding begins. trace: a folder for the
    profile of one step. sign: shows what is compiled, and every figure as soon as it is known.
    Raises JaxLlamaError if the model's context is too short, or ``context`` is below 5.
    """
    check_room(lm.config, prompt_tokens + 1, context, new_tokens)
    sign = Working() if sign is None else sign
    data = 1 if lm.mesh is None else lm.mesh.shape[DATA_AXIS]
    devices = 1 if lm.mesh is None else lm.mesh.size
    decoding = Decoding(lm, batch, kv_dtype, chunk)
    prompt = functools.partial(decoding.prefilled, SHORT, new_tokens, context - SHORT)

    def decode_and_generate() -> tuple[float, float]:
        state, prefill = prompt()
        decode = decoding.run(state, new_tokens)
        return decode, prefill + decode

    sign.say(
        f"weights      {tree_bytes(lm.params) / 1e9:.2f} GB on {devices} "
        f"device{'s' * (devices > 1)}, {_since_process_start():.1f} s after the process began"
    )
    sign.note(f"compiling a prefill of {SHORT} tokens")
    decoding.prefilled(SHORT, 1)
    first_token = _since_process_start()
    sign.say(f"first token  {first_token:.1f} s after the process began")
    sign.note("compiling the decode loop")
    program = decoding.compile(prompt()[0])
    decode, generate = median(decode_and_generate, runs, warm=2)
    steps = new_tokens - 1
    sign.say(f"decode       {batch * steps / decode:.1f} tokens/s")
    sign.note(f"compiling a prefill of {prompt_tokens} tokens")
    prefill = median(lambda: decoding.prefilled(prompt_tokens, 1)[1], runs, warm=2)
    sign.say(f"prefill      {batch * prompt_tokens / prefill:.0f} tokens/s")
    if trace is not None:
        decoding.trace(trace, prompt()[0], 2)
    sign.note("the memory's rate")
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    read = data * bytes_per_step(lm, batch // data)
    cache = jax.eval_shape(
        functools.partial(init_cache, lm.config, batch, context + new_tokens, decoding.kv_dtype)
    )
    moved = read + cache_bytes_per_step(lm.config, cache, context + new_tokens // 2)
    ceiling = devices * memory_bandwidth()
    return {
        "model": lm.config.name,
        "dtype": lm.dtype.name,
        "device": device.device_kind,
        "jax": jax.__version__,
        "kv_dtype": jnp.dtype(decoding.kv_dtype).name,
        "batch": batch,
        "context": context,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "runs": runs,
        "decode_tokens_per_second": batch * steps / decode,
        "generate_tokens_per_second": batch * new_tokens / generate,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": batch * prompt_tokens / prefill,
        "first_token_seconds": first_token,
        "compile_seconds": program.compile_seconds,
        "compiled_from_cache": program.from_cache,
        "kernels_per_step": program.kernels_per_step,
        "weight_bytes_per_step": read,
        "weight_gigabytes_per_second": read * steps / decode / 1e9,
        "cache_bytes": tree_bytes(cache.layers),
        "bytes_per_step": moved,
        "gigabytes_per_second": moved * steps / decode / 1e9,
        "ceiling_gigabytes_per_second": ceiling / 1e9,
        "share_of_ceiling": moved * steps / decode / ceiling,
        "program_bytes": program.nbytes,
        "peak_rss_bytes": peak_rss(),
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
    }


def check_room(cfg: ModelConfig, prefilled: int, context: int, new_tokens: int) -> None:
    """Raise JaxLlamaError if the model has too few positions, or the context is too small."""
    longest = max(prefilled, context + new_tokens)
    if longest > cfg.max_position:
        raise JaxLlamaError(
            f"bench needs {longest} positions, and the context is {cfg.max_position}"
        )
    if context < SHORT:
        raise JaxLlamaError(f"context = {context}: must be at least {SHORT}")


def _since_process_start() -> float:
    """Return seconds since the process began, or since this module's import if that is unknown."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
            started = int(stat.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.monotonic() - _IMPORTED


def table(report: JsonObject) -> str:
    """Return the report as text."""
    megabytes = 1e6
    moved = report["bytes_per_step"] / megabytes
    origin = "read from the cache" if report["compiled_from_cache"] else "compiled"
    rows = [
        ("model", f"{report['model']} ({report['dtype']}), batch {report['batch']}"),
        ("device", f"{report['device']}, jax {report['jax']}"),
        (
            "decode",
            f"{report['decode_tokens_per_second']:.1f} tokens/s, reading weights at "
            f"{report['weight_gigabytes_per_second']:.1f} GB/s, in rows of "
            f"{report['context']} tokens",
        ),
        (
            "ceiling",
            f"{report['share_of_ceiling']:.0%} of the {moved:.1f} MB a step at this "
            f"machine's {report['ceiling_gigabytes_per_second']:.1f} GB/s, "
            f"{report['kernels_per_step']} kernels a step",
        ),
        (
            "generate",
            f"{report['generate_tokens_per_second']:.1f} tokens/s with the prefill of "
            f"{SHORT} tokens",
        ),
        (
            "prefill",
            f"{report['prompt_tokens']} tokens in {report['prefill_seconds']:.3f} s, "
            f"{report['prefill_tokens_per_second']:.0f} tokens/s",
        ),
        ("first token", f"{report['first_token_seconds']:.2f} s after the process began"),
        ("decode loop", f"{origin} in {report['compile_seconds']:.2f} s"),
        ("weights", f"{report['weight_bytes_per_step'] / megabytes:.1f} MB read a step"),
        ("cache", f"{report['cache_bytes'] / megabytes:.2f} MB ({report['kv_dtype']})"),
        ("peak memory", f"{report['peak_rss_bytes'] / megabytes:.0f} MB resident"),
    ]
    if report["peak_device_bytes"] is not None:
        rows.append(("", f"{report['peak_device_bytes'] / megabytes:.0f} MB on the device"))
    return "\n".join(f"{name:12} {value}" for name, value in rows)
