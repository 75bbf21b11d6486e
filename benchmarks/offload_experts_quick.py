"""Decode and prefill of an offloaded mixture in less than three minutes.

    XLA_PYTHON_CLIENT_MEM_FRACTION=0.114 python -m benchmarks.offload_experts_quick [--limit 160]

gpt-oss-120b's shape in 16 GB of an H200: all layers, of which ``--distinct`` have pinned experts of
their own. An eighth of each layer's experts have slots. A JSON line after each phase:

    decode     1 and 16 rows; even use, and routers that a bias skews (``offload_experts``), whose
               use no table tells; slots that stay beside slots that learn
    prompt     512 and 8,192 tokens; experts sent under computing, or read by the device's kernel
    with CPU   the same where the CPU computes a part, in its layout

``--small`` runs the same code on a small shape, which is what a CPU can do.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.offload_experts import EVERY, zipf_bias
from benchmarks.offload_experts_host import Host
from jaxllama.config import load_config
from jaxllama.decoding.sampling import Sampling
from jaxllama.executors.offloaded import experts as placed
from jaxllama.executors.offloaded.executor import offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.loading import enable_compilation_cache
from jaxllama.offload.policy import Policy
from jaxllama.planner.trial import random_run, timed_step
from pallas_kernels.cpu import unavailable

SPREAD, WARM, STEPS = Sampling(temperature=100.0), 40, 16
WITH_CPU = {"cpu_expert": 0.8, "cpu_token": 0.2}


def skewed(lm: LanguageModel) -> LanguageModel:
    """Return the model with routers that prefer some experts; the slots are the same."""
    params = dict(lm.params)
    for layer, bias in zipf_bias(lm.config).items():
        own = params[f"layer_{layer}"]
        router = {**own["mlp"]["router"], "bias": jnp.asarray(bias, lm.dtype)}
        params[f"layer_{layer}"] = {**own, "mlp": {**own["mlp"], "router": router}}
    return dataclasses.replace(lm, params=params)


def changed(lm: LanguageModel, **fields: Any) -> LanguageModel:
    """Return the model with other fields of its policy."""
    return dataclasses.replace(lm, executor=offloaded(lm.executor).with_policy(**fields))


def forget(lm: LanguageModel, learns: bool = True) -> None:
    """Let every expert be as hot as any other; or let the slots stay."""
    for layer in range(lm.config.n_layers):
        for name in ("experts_gate_up", "experts_down"):
            tensor = lm.params[f"layer_{layer}"]["mlp"][name]["weight"]
            heat = jnp.zeros(tensor.shape[0], jnp.float32) if learns else None
            tensor.held = tensor.held._replace(heat=heat)


def decode(lm: LanguageModel, rows: int, warm: int, steps: int) -> dict[str, Any]:
    run = random_run(lm, rows, 1, warm + steps, warm + steps + 1, lm.dtype, 512, SPREAD)
    for _ in range(warm):
        timed_step(run)
    run.experts.reset()
    times = sorted(timed_step(run) for _ in range(steps))
    step, count = times[len(times) // 2], lm.config.n_layers * steps
    return {
        "tokens_per_second": rows / step,
        "step_ms": 1e3 * step,
        "loads_a_layer": run.experts.loads / count,
        "computed_a_layer": run.experts.tally.computed / count,
    }


def prompt(lm: LanguageModel, tokens: int, chunk: int) -> dict[str, Any]:
    run = random_run(lm, 1, tokens, 2, tokens + 2, lm.dtype, chunk, SPREAD)
    seconds = timed_step(run)
    tally, layers = run.experts.tally, lm.config.n_layers
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "loads_a_layer": run.experts.loads / layers,
        "ahead_a_layer": tally.ahead / layers,
        "computed_a_layer": tally.computed / layers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=160.0, help="seconds")
    parser.add_argument("--distinct", type=int, default=2)
    args = parser.parse_args()
    begin = time.perf_counter()
    enable_compilation_cache()
    cfg = load_config("gpt-oss-120b").replace(eos_token_ids=())
    assert cfg.experts is not None
    lengths, chunk = (512, 8192), 8192
    if args.small:
        experts = dataclasses.replace(cfg.experts, d_ff=128, n_experts=32)
        cfg = cfg.first_layers(2).replace(
            d_model=128, n_heads=4, n_kv_heads=2, head_dim=32, vocab_size=1024, experts=experts
        )
        lengths = (64, 128)

    def tell(name: str, work: Callable[..., Any], *what: Any) -> None:
        """Run a phase. A failure is told, and does not stop the rest."""
        now = time.perf_counter() - begin
        if now > args.limit:
            return
        try:
            found = work(*what)
        except Exception as error:  # noqa: BLE001
            found = f"{type(error).__name__}: {str(error)[:400]}"
        print(json.dumps({"at": round(now, 1), name: found}), flush=True)

    def together(*calls: Callable[[], Any]) -> str:
        """Compile the programs of several phases at once."""
        with ThreadPoolExecutor(len(calls)) as threads:
            for done in [threads.submit(call) for call in calls]:
                done.result()
        return "compiled"

    def model(computes: bool) -> LanguageModel:
        host = Host(cfg, computes, args.distinct, sent=False)
        return host.model(Policy.parse(f"{EVERY} experts=12.5/87.5 gpu_batch_size=16"))

    def warm(lm: LanguageModel, *prompts: int) -> list[Callable[[], Any]]:
        rows = [functools.partial(decode, lm, rows, 2, 1) for rows in (1, 16)]
        return rows + [functools.partial(prompt, lm, tokens, chunk) for tokens in prompts]

    tell("device", lambda: [jax.devices()[0].device_kind, jax.__version__])
    lm = model(False)
    uneven = skewed(lm)
    short, long = lengths
    tell("warm", together, *warm(lm, short, long))
    tell(f"prompt {long}, sent", prompt, lm, long, chunk)
    tell(f"prompt {short}, sent", prompt, lm, short, chunk)
    forget(lm)
    tell("decode 1, even", decode, lm, 1, WARM // 2, STEPS)
    tell("decode 1, skewed, learned", decode, uneven, 1, 2 * WARM, STEPS)
    forget(lm)
    tell("decode 16, even", decode, lm, 16, WARM // 2, STEPS)
    tell("decode 16, skewed, learned", decode, uneven, 16, WARM, STEPS)
    stats = offloaded(lm.executor).store.device.memory_stats() or {}
    tell("peak device bytes", lambda: stats.get("peak_bytes_in_use"))
    if unavailable() is None:
        del lm, uneven
        lm = changed(model(True), **WITH_CPU)
        uneven, alone = skewed(lm), changed(lm, cpu_expert=1e-6, cpu_token=0.0)
        tell(
            "warm, with CPU", together, *warm(lm, short), functools.partial(decode, alone, 1, 2, 1)
        )
        tell("with CPU: decode 16, even", decode, lm, 16, WARM // 2, STEPS)
        tell("CPU alone: decode 1", decode, alone, 1, 6, STEPS)
        tell(f"with CPU: prompt {short}", prompt, lm, short, chunk)
        forget(lm)
        tell("with CPU: decode 16, skewed, learned", decode, uneven, 16, WARM, STEPS)
    del lm, uneven
    lm = model(False)
    with mock.patch.object(placed, "streams", lambda *_: False):
        tell("warm, read by the kernel", together, *warm(lm, short, long)[2:])
        tell(f"prompt {long}, read by the kernel", prompt, lm, long, chunk)
        tell(f"prompt {short}, read by the kernel", prompt, lm, short, chunk)
    tell(f"prompt {long} again, sent", prompt, lm, long, chunk)
    forget(lm, learns=False)
    uneven = skewed(lm)
    tell("decode 1, skewed, slots that stay", decode, uneven, 1, 6, STEPS)


if __name__ == "__main__":
    main()
