"""Decoding with drafts of which a fixed number is right, beside plain decoding.

    python -m benchmarks.verify [--model llama-3.1-8b --quantize w4a16 --drafted 4 --accepted 3]
    python -m benchmarks.verify --model qwen3.6-27b --quantize w4a16 --drafted 3 --accepted 2 --mtp

One row of random weights: a loop of ``verify_step`` and ``commit`` keeps ``--accepted`` of
``--drafted`` tokens in each pass, whatever the model says.  Drafting itself costs nothing here.
Plain decoding is the same loop without a draft.  ``--mtp`` times ``generate``'s own passes too, in
which the model's MTP head drafts: how many tokens a pass keeps hardly changes its time.  A first
call of each compiles, all at once.  One line of JSON: seconds a pass and a step, and the tokens a
second of the one over the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxllama as jl
from jaxllama import compiler_options
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.evaluation.speed.harness import held_cache, timed
from jaxllama.executors.executor import Call
from jaxllama.model.cache import Cache
from jaxllama.typing import Params

PASSES = 48  # of a call


@functools.partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
def passes(
    cfg: jl.ModelConfig,
    params: Params,
    cache: Cache,
    newest: jax.Array,
    accepted: int,
    drafted: int,
) -> tuple[Cache, jax.Array]:
    """Return the cache and the newest token ``[B]`` after ``PASSES`` passes.

    A pass reads the newest token and ``drafted`` more, and keeps ``accepted`` of these.
    """
    rows = newest.shape[0]
    lengths = jnp.full((rows,), drafted + 1, jnp.int32)
    kept = jnp.full((rows,), accepted, jnp.int32)

    def body(i: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, newest = carry
        if not drafted:
            scores, cache = jl.decode_step(cfg, params, newest, cache)
            return cache, jnp.argmax(scores, -1).astype(jnp.int32)
        tokens = jnp.repeat(newest[:, None], drafted + 1, axis=1)
        scores, proposal = jl.verify_step(cfg, params, tokens, lengths, cache)
        chosen = jnp.argmax(scores[:, accepted], -1).astype(jnp.int32)
        return jl.commit(proposal, kept), chosen

    return lax.fori_loop(0, PASSES, body, (cache, newest))


def pass_seconds(
    lm: jl.LanguageModel, context: int, accepted: int, drafted: int, kv_dtype: str | None
) -> float:
    """Return the seconds of a pass behind ``context`` tokens, in one call of ``passes``."""
    room = context + PASSES * (accepted + 1) + drafted + 1
    loop = compiler_options.compiled_for(passes, None, static_argnums=(0, 4, 5), donate_argnums=2)
    dtype, _ = lm.executor.cache_options(lm.config, kv_dtype, None, lm.dtype)
    cache = held_cache(lm.config, 1, room, dtype, context)
    newest = jnp.zeros((1,), jnp.int32)
    jax.block_until_ready(cache)
    _, took = timed(loop, lm.config, lm.params, cache, newest, accepted, drafted)
    return took / PASSES


def mtp_pass(
    lm: jl.LanguageModel, context: int, drafted: int, kv_dtype: str | None
) -> tuple[float, float, float]:
    """Return the seconds of a pass of ``generate`` in which the MTP head drafts, in one call, and
    how many tokens a pass drafted and accepted.
    """
    tokens = np.random.default_rng(0).integers(0, lm.config.vocab_size, (1, context), np.int32)
    room = PASSES * (drafted + 1)
    dtype, chunk = lm.executor.cache_options(lm.config, kv_dtype, None, lm.dtype)
    call = Call(
        tokens,
        np.asarray([context], np.int32),
        SamplingParams.stack([Sampling()], lm.config.vocab_size),
        jnp.asarray([], jnp.int32),
        context + room + drafted + 1,
        room,
        limit=room,
        kv_dtype=dtype,
        chunk=chunk,
        drafting=lm.drafting("mtp", drafted),
    )
    rows = lm.executor.begin(lm.config, lm.params, call)
    jax.block_until_ready(rows.report)
    report, took = timed(rows.advance, PASSES)
    report = jax.device_get(report)
    proposed, right = report.drafts[:, 0].tolist()
    count = int(report.counts[0]) - 1 - right
    return took / count, proposed / count, right / count


def run(
    lm: jl.LanguageModel,
    context: int,
    accepted: int,
    drafted: int,
    kv_dtype: str | None,
    runs: int,
    mtp: bool = False,
) -> dict[str, Any]:
    """Return seconds a pass and a plain step, medians of ``runs`` calls, and the gain in tokens a
    second; ``mtp``: those of a pass in which the head drafts, too.

    The programs are compiled side by side: one of them takes half a minute for 64 layers.
    """
    measures = {
        "step": lambda: pass_seconds(lm, context, 0, 0, kv_dtype),
        "pass": lambda: pass_seconds(lm, context, accepted, drafted, kv_dtype),
    }
    if mtp:
        measures["mtp_pass"] = lambda: mtp_pass(lm, context, drafted, kv_dtype)[0]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda measure: measure(), measures.values()))
    report = {}
    for name, measure in measures.items():
        report[f"{name}_seconds"] = took = statistics.median(measure() for _ in range(runs))
        print(f"{name} {1e3 * took:.3f} ms", file=sys.stderr, flush=True)
    kept = (accepted + 1) * report["step_seconds"]
    report["times_plain"] = kept / report["pass_seconds"]
    if mtp:
        report["mtp_times_plain"] = kept / report["mtp_pass_seconds"]
        _, report["mtp_drafted"], report["mtp_accepted"] = mtp_pass(lm, context, drafted, kv_dtype)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset; weights are random")
    parser.add_argument("--quantize", help="a scheme")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--context", type=int, default=1024, help="tokens that the row holds")
    parser.add_argument("--drafted", type=int, default=4)
    parser.add_argument("--accepted", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mtp", action="store_true", help="time passes with the MTP head too")
    args = parser.parse_args()
    lm = jl.load(args.model, quantize=args.quantize, random=True)
    report = run(
        lm, args.context, args.accepted, args.drafted, args.kv_dtype, args.runs, mtp=args.mtp
    )
    about = {
        "model": args.model,
        "quantize": args.quantize,
        "context": args.context,
        "drafted": args.drafted,
        "accepted": args.accepted,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    print(json.dumps({**about, **report}))


if __name__ == "__main__":
    main()
