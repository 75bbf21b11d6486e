"""Learning from rewards on one GPU: the parts of a step, and the bits of its log-probabilities.

    python -m benchmarks.rewards step [--deterministic]     64 prompts, 8 answers of 256 tokens
    python -m benchmarks.rewards refresh                    new weights for a running engine
    python -m benchmarks.rewards bits [--mixers gla,kda]    the same answers scored in every way

Random weights.  Each part prints a line of JSON for everything that it measured, as it comes.
``--small``: tiny models, for a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllama as jl
from benchmarks import engine as load_of
from benchmarks.training import model_of, say
from jaxllama.config import CheckpointForm, ModelConfig, load_config
from jaxllama.engine.rollout import rescore
from jaxllama.language_model import LanguageModel
from jaxllama.quantization.random_params import random_params
from jaxllama.training.batch import Batch
from jaxllama.training.config import TrainConfig
from jaxllama.training.prompts import Prompt
from jaxllama.training.sampler import Sampler
from jaxllama.training.scores import scores
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import init_state, update
from jaxllama.training.tuning import DataConfig, ObjectiveConfig, RewardConfig, RolloutConfig
from pallas_kernels.qtensor import tree_bytes


class _Prompts:
    """Random prompts in place of a file's."""

    def __init__(self, cfg: ModelConfig, count: int, length: int) -> None:
        draw = np.random.default_rng(1)
        ids = draw.integers(1, cfg.vocab_size, (count, length)).tolist()
        self.prompts = [Prompt(tuple(row), {"prompt": "", "answer": "0"}) for row in ids]

    def of_step(self, step: int, count: int, seed: int) -> list[Prompt]:
        return self.prompts[:count]


def any_reward(answer: str, line: Any) -> float:
    """Return a random reward: random weights earn no other."""
    return random.random()


def rewards(args: argparse.Namespace) -> None:
    """Measure the parts of a step that learns from rewards, and the engine's own rate."""
    small, deterministic, steps = args.small, args.deterministic, args.steps
    cfg = model_of(args.model, small)
    prompts, samples, asked, new = (4, 2, 16, 8) if small else (64, 8, 128, 256)
    rows = prompts * samples
    slots = min(args.slots or rows, rows)
    config = TrainConfig(
        data=DataConfig(prompts="none", tokenizer="bytes"),
        steps=1000,
        batch_size=rows,
        microbatches=2 if small else 32,
        sequence_length=asked + new,
        learning_rate=1e-5,
        model=cfg,
        objective=ObjectiveConfig("grpo", beta=0.0),
        rollout=RolloutConfig(
            new, samples, slots=slots, deterministic=deterministic, importance_cap=2.0
        ),
        reward=RewardConfig("function", function="benchmarks.rewards:any_reward"),
        dtype="bfloat16",
        scan=True,
    )
    setup = TrainingSetup(config, cfg)
    weights = random_params(cfg, jax.random.key(0))
    state = init_state(setup, weights)
    del weights
    about = {"part": "rewards", "model": cfg.name, "deterministic": deterministic}
    about |= {"rows": rows, "slots": slots}
    shape = (config.microbatches, -1, asked + new)
    tokens = np.ones((rows, asked + new + 1), np.int32).reshape(*shape[:2], asked + new + 1)
    batch = Batch(tokens, None, np.zeros((rows, asked + new), np.float32).reshape(shape))
    state, _ = jax.block_until_ready(update(setup, state, None, batch))
    say(**about, at="the trainer alone", state_bytes=tree_bytes(state))
    tokenizer: Any = None  # random tokens have no text
    sampler = Sampler(setup, state["params"], None, tokenizer)
    data: Any = _Prompts(cfg, prompts, asked)
    for step in range(steps + 1):
        begun = time.perf_counter()
        state, metrics = sampler.step(state, None, data, step)
        seconds = time.perf_counter() - begun
        parts = {key: float(value) for key, value in metrics.items()}
        rate = rows * new / parts["rollout_seconds"]
        say(**about, at=f"step {step}", step_seconds=seconds, rollout_rate=rate, **parts)
    engine = sampler.engine
    ids = [prompt.tokens for prompt in data.prompts]
    for number in range(args.pairs):
        took = {}
        for name in ("rollout", "requests") if number % 2 else ("requests", "rollout"):
            # As in a step, new weights let no earlier prefix be found.
            engine.update_params(engine.lm.params)
            begun = time.perf_counter()
            if name == "rollout":
                jl.rollout(engine, ids, n=samples, max_new_tokens=new, seed=1000 + number)
            else:
                _without_rollout(engine, ids * samples, new, number * rows)
            took[name] = time.perf_counter() - begun
        ratio = took["requests"] / took["rollout"]
        say(**about, at="rollout beside its requests", seconds=took, ratio=ratio)
    engine.warm_up()  # a rollout needs no calls of fewer prompts
    own = load_of.run(engine, asked, new, rows, 0.5 if small else 4.0)
    say(**about, at="the engine's steady state", **own)


def _without_rollout(
    engine: jl.Engine, prompts: list[tuple[int, ...]], new: int, first: int
) -> None:
    """Run the same requests, in a rollout's order, without log-probabilities and arrays."""
    for row, prompt in enumerate(prompts, first):
        sampling = jl.Sampling(temperature=1.0, seed=row)
        engine.submit(jl.Request(f"own-{row}", prompt, new, sampling), lambda event: None)
    while engine.live or engine.stats().waiting:
        engine.step()


def refreshes(args: argparse.Namespace) -> None:
    """Replace the weights of engines twenty times, by floats that they keep or round to W8A8."""
    small, cfg = args.small, model_of(args.model, args.small)
    about = {"part": "refresh", "model": cfg.name}
    params = random_params(cfg, jax.random.key(0))
    compiled: list[str] = []

    def note(name: str, seconds: float, **_: Any) -> None:
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    for scheme in (None, "w8a8"):
        held = params if scheme is None else jl.quantize_params(params, scheme)
        lm = LanguageModel(cfg, held, None, exact=not small)
        engine = jl.Engine(lm, max_slots=8, max_len=64, cache_tokens=512)
        del held, lm
        before = 0
        for _ in range(2):  # the second has programs' results as its arguments
            before = len(compiled)
            jl.rollout(engine, [(1, 2, 3)], n=2, max_new_tokens=4)
        second = len(compiled) - before
        seconds, used, during = [], [], 0
        for _ in range(21):
            params = jax.block_until_ready(jax.tree.map(lambda leaf: leaf * 1, params))
            before, begun = len(compiled), time.perf_counter()
            engine.update_params(params)
            jax.block_until_ready(engine.lm.params)
            seconds.append(time.perf_counter() - begun)
            during += len(compiled) - before if len(seconds) > 1 else 0
            used.append((jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0))
        before = len(compiled)
        jl.rollout(engine, [(1, 2, 3)], n=2, max_new_tokens=4)
        rest = seconds[1:]
        say(
            **about,
            at=f"update_params, {scheme or 'bfloat16'}",
            seconds={"first": seconds[0], "median": float(np.median(rest)), "most": max(rest)},
            programs={"second": second, "updates": during, "behind": len(compiled) - before},
            used_bytes=used[1:],
        )
        del engine


# Bits


MIXERS = {
    "llama": "smollm2-135m",
    "gla": "gla-340m",
    "delta": "qwen3.5-9b",
    "kda": "qwen3.5-9b",
}


def bits(small: bool, mixers: list[str]) -> None:
    """Measure how far log-probabilities of the same answers are apart, by mixer."""
    for name in mixers:
        cfg = load_config(MIXERS[name])
        count = 2 if small else 4
        cfg = cfg.replace(
            eos_token_ids=(),
            vocab_size=256 if small else 4096,
            n_layers=count,
            layer_types=cfg.layer_types[:1] * count,
            mtp_layers=0,
        )
        if cfg.delta is not None:
            cfg = cfg.replace(d_model=256 if small else 1024, d_ff=2048)
        if name == "kda":
            # The decay and the gates of Kimi Linear.
            kda = {"n_k_heads": 32, "decay": "channel", "gate": "low_rank"}
            options = dataclasses.replace(cfg.delta, **kda, gate_activation="sigmoid")
            cfg = cfg.replace(delta=options, stored=CheckpointForm())
        try:
            _bits_of(name, cfg, small)
        except Exception as error:  # the other mixers are measured
            say(part="bits", mixer=name, error=f"{type(error).__name__}: {error}"[:500])


def _bits_of(name: str, cfg: ModelConfig, small: bool) -> None:
    asked, new, n = (24, 8, 2) if small else (200, 56, 8)
    draw = np.random.default_rng(0)
    prompts = [tuple(draw.integers(1, cfg.vocab_size, asked - i).tolist()) for i in range(8)]
    params = random_params(cfg, jax.random.key(0), jnp.bfloat16)
    config = TrainConfig(
        data=DataConfig(prompts="none", tokenizer="bytes"),
        steps=1000,
        batch_size=8 * n,
        sequence_length=asked + new,
        learning_rate=1e-5,
        model=cfg,
        rollout=RolloutConfig(new, n),
        reward=RewardConfig("exact"),
        dtype="bfloat16",
    )
    setup = TrainingSetup(config, cfg)
    for deterministic in (True, False):
        lm = LanguageModel(cfg, params, None, deterministic, exact=True)
        engine = jl.Engine(lm, max_slots=32, max_len=asked + new)
        found = jl.rollout(engine, prompts, n=n, max_new_tokens=new, seed=1)
        own = found.answers > 0

        def apart(values: np.ndarray, own: np.ndarray = own, base: np.ndarray = found.logprobs):
            gap = np.abs(values - base)[own]
            at = {f"p{share}": float(np.percentile(gap, share)) for share in (50, 90, 99)}
            signed = (values - base)[own]
            kl = float(np.mean(np.expm1(signed) - signed))
            return {"most": float(gap.max()), "differ": float(np.mean(gap > 0)), "kl": kl, **at}

        order = np.random.default_rng(2).permutation(len(own))
        back = np.argsort(order)
        others = found._replace(
            tokens=found.tokens[order], lengths=found.lengths[order], answers=found.answers[order]
        )
        tokens = np.pad(found.tokens, ((0, 0), (0, asked + new + 1 - found.tokens.shape[1])))
        trainer, _ = scores(setup, params, None, tokens)
        shuffled, _ = scores(setup, params, None, tokens[order])
        width = own.shape[1]
        say(
            part="bits",
            mixer=name,
            deterministic=deterministic,
            answers=int(own.sum()),
            rescored=apart(rescore(engine, found)),
            rescored_in_another_order=apart(rescore(engine, others)[back]),
            trainer=apart(trainer[:, :width]),
            trainer_in_another_order=float(np.abs(trainer - shuffled[back])[:, :width][own].max()),
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rewards", allow_abbrev=False)
    parser.add_argument("part", choices=("step", "refresh", "bits"))
    parser.add_argument("--small", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--steps", type=int, default=3, help="steps behind the first")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--pairs", type=int, default=3, help="rollouts beside their requests")
    parser.add_argument("--slots", type=int, help="rows in flight; default: all")
    parser.add_argument("--mixers", default=",".join(MIXERS), help="of `bits`")
    parser.add_argument("--model", default="llama-3.2-1b", help="a preset; weights are random")
    args = parser.parse_args(argv)
    if args.part == "step":
        rewards(args)
    elif args.part == "refresh":
        refreshes(args)
    else:
        bits(args.small, args.mixers.split(","))


if __name__ == "__main__":
    main()
