"""Learning from rewards: the engine answers, a program rewards, and the trainer updates.

    sampler = Sampler(setup, state["params"], fixed, prompts)
    state, metrics = sampler.step(state, fixed, training, step)
    sampler.mean_reward(state["params"], fixed, held_out)

The engine runs in the trainer's process and has the trainer's weights in the activations' dtype. A
step hands it new weights, samples, rewards, scores and updates. The prompts and the seeds of a step
depend on (seed, step) only. A step replaces the weights even if they are the same, so it finds no
cached prefix of earlier calls. A resumed run therefore has the bits of an uninterrupted one.

``policy`` has the losses. With ``rollout.deterministic`` the policy is the engine's form of the
model: a prompt in fixed pieces, an answer token by token. Its log-probabilities are then the old
and new ones, to the bit, and the forward pass of the update computes them again (``served``).
Otherwise the policy is the trainer's form (whole rows, chunks of GLA and delta layers). "gap_kl"
and "gap_max" measure how far the engine is from the trainer's forward pass. Gradients are the
trainer's in both cases. Left out: a mesh, a temperature, several steps of sampling ahead.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama import compiler_options
from jaxllama.decoding.sampling import Sampling
from jaxllama.engine.engine import Engine
from jaxllama.engine.options import PREFILL_TOKENS
from jaxllama.engine.rollout import Rollouts, rescore, rollout
from jaxllama.language_model import LanguageModel
from jaxllama.model.mixers import has_states
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import samples
from jaxllama.training.batch import Batch
from jaxllama.training.policy import Answers, coefficients, gap
from jaxllama.training.prompts import Prompt, PromptFile
from jaxllama.training.rewards import reward_of
from jaxllama.training.scores import scores
from jaxllama.training.served import is_served
from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import State, per_layer, update
from jaxllama.typing import JsonObject, Options, ParamsDict, Tree

GREEDY, PLAIN = Sampling(), Sampling(temperature=1.0)
# Tokens, at most, of a page of the cache on a GPU. A prompt's samples share whole pages, and the
# kernels take multiples of 32.
PAGE = 32
STEPS = 8  # tokens of a row between two results: nobody reads along
SHOWN = 4  # prompts whose answers samples.md shows


class Sampler:
    """The engine, the reward and the reference of a run.

    Parameters
    ----------
    setup : TrainingSetup
        The run, with [rollout] and [reward].
    params : dict
        The parameters before the first step, which are the reference.
    fixed : dict or None
        The weights beneath adapters.
    tokenizer : Tokenizer
        Writes the answers' texts.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        params: ParamsDict,
        fixed: ParamsDict | None,
        tokenizer: Tokenizer,
    ) -> None:
        config = setup.config
        assert config.rollout is not None and config.reward is not None
        self._setup, self._config, self._rollout = setup, config, config.rollout
        self._tokenizer = tokenizer
        self._reward = reward_of(config.reward)
        # The update donates the parameters.
        has_reference = config.goal.beta > 0
        self._reference = jax.tree.map(jnp.copy, params) if has_reference else None
        options = compiler_options.of_fusions(True) if is_served(setup) else None
        self._update = compiler_options.compiled_with(
            options, update, static_argnums=0, donate_argnums=1
        )
        lm = self._model(params, fixed)
        slots = min(self._rollout.slots, config.batch_size)
        # By default an engine's cache takes the memory that is free, which the update needs.
        row = -(-config.sequence_length // 64) * 64
        self._engine = Engine(
            lm,
            max_slots=slots,
            max_len=config.sequence_length,
            cache_tokens=slots * row,
            max_queue=max(config.batch_size, slots),
            steps_per_call=min(STEPS, self._rollout.max_new_tokens),
            **_prompt_options(setup, slots),
        )

    def step(
        self, state: State, fixed: ParamsDict | None, prompts: PromptFile, step: int
    ) -> tuple[State, Tree]:
        """Return (state after the step, its metrics); ``state`` is donated."""
        config, goal, options = self._config, self._config.goal, self._rollout
        clock = _Clock()
        self._refresh(state["params"], fixed)
        clock.took("refresh")
        count = config.batch_size // options.samples
        asked = prompts.of_step(step, count, config.seed)
        seed = int(np.random.default_rng((config.seed, step)).integers(2**32))
        found = self._answers(asked, options.samples, PLAIN, seed)
        clock.took("rollout")
        rewards = self._rewards(found, asked)
        clock.took("reward")
        tokens = np.zeros((config.batch_size, config.sequence_length + 1), np.int32)
        tokens[:, : found.tokens.shape[1]] = found.tokens
        is_answer, sampled = (_padded(part, tokens) for part in (found.answers, found.logprobs))
        prompt_tokens, old, entropies = None, sampled, None
        if is_served(self._setup):  # the update computes the engine's bits, and entropies
            prompt_tokens = np.argmax(is_answer, axis=1, keepdims=True).astype(np.int32) + 1
        else:
            own, entropies = scores(self._setup, state["params"], fixed, tokens)
            old = sampled if options.deterministic else own
        reference = None
        if self._reference is not None:
            reference = scores(self._setup, self._reference, fixed, tokens)[0]
        answers = Answers(
            jnp.asarray(is_answer),
            jnp.asarray(old),
            None if reference is None else jnp.asarray(reference),
            jnp.asarray(sampled),
            jnp.asarray(rewards),
        )
        clock.took("scoring")
        new, parts, measured = old, {}, answers
        for number in range(options.updates):
            if number:
                new = self._scores(state["params"], fixed, tokens, found)
            if options.sleep and not self._engine.asleep:
                self._engine.sleep("drop")
            change, parts = coefficients(
                goal, options.samples, options.importance_cap, new, answers
            )
            # The mean of weighted cross entropies divides by the places of the batch.
            weights = np.asarray(change) * np.float32(-change.size)
            batch = Batch(tokens, None, weights, prompts=prompt_tokens)
            batch = jax.tree.map(self._microbatches, batch)
            state, metrics = self._update(self._setup, state, fixed, batch)
            if prompt_tokens is not None:
                rows = [metrics.pop(name).reshape(old.shape) for name in ("logprobs", "entropies")]
                if not number:
                    measured, entropies = answers._replace(old=rows[0]), rows[1]
            parts = {**metrics, **parts}
        jax.block_until_ready(state)
        clock.took("update")
        return state, {
            **parts,
            "reward": rewards.mean(),
            "reward_std": rewards.std(),
            "length": is_answer.sum() / len(is_answer),
            "entropy": (entropies * is_answer).sum() / is_answer.sum(),
            **gap(measured),
            **clock.seconds,
        }

    @property
    def engine(self) -> Engine:
        """The engine that answers."""
        return self._engine

    def _microbatches(self, leaf: np.ndarray) -> np.ndarray:
        return leaf.reshape(self._config.microbatches, -1, leaf.shape[-1])

    def mean_reward(
        self, params: ParamsDict, fixed: ParamsDict | None, prompts: PromptFile
    ) -> float:
        """Return the mean reward of a greedy answer to every prompt."""
        self._refresh(params, fixed)
        found = self._answers(prompts.prompts, 1, GREEDY, 0)
        return float(self._rewards(found, prompts.prompts).mean())

    def shown(
        self, params: ParamsDict, fixed: ParamsDict | None, prompts: PromptFile, step: int
    ) -> list[JsonObject]:
        """Return a line of samples.jsonl for each of the first prompts: a greedy and a sampled
        answer, and their rewards.
        """
        self._refresh(params, fixed)
        asked = prompts.prompts[:SHOWN]
        lines = [{"step": step, "prompt": prompt.text} for prompt in asked]
        for name, sampling in (("answer", GREEDY), ("sampled", PLAIN)):
            found = self._answers(asked, 1, sampling, step)
            rewards = self._rewards(found, asked)
            for line, text, reward in zip(lines, found.texts, rewards.tolist(), strict=True):
                line[name], line[f"{name}_reward"] = text, reward
        return lines

    def _refresh(self, params: ParamsDict, fixed: ParamsDict | None) -> None:
        self._engine.update_params(self._model(params, fixed).params)
        if self._engine.asleep:
            self._engine.wake()

    def _model(self, params: ParamsDict, fixed: ParamsDict | None) -> LanguageModel:
        """Return the model of the engine, which shares no array with the state."""
        setup = self._setup
        if setup.config.lora is None:
            return LanguageModel(
                setup.model,
                _engine_weights(setup.config.dtype, params),
                self._tokenizer,
                self._rollout.deterministic,
                exact=True,
            )
        tree, frozen = per_layer(params), None if fixed is None else per_layer(fixed)
        return samples.model_of(
            setup, tree, frozen, self._tokenizer, deterministic=self._rollout.deterministic
        )

    def _answers(self, prompts: list[Prompt], n: int, sampling: Sampling, seed: int) -> Rollouts:
        return rollout(
            self._engine,
            [prompt.tokens for prompt in prompts],
            n=n,
            sampling=sampling,
            max_new_tokens=self._rollout.max_new_tokens,
            seed=seed,
            adapter=None if self._config.lora is None else samples.ADAPTER,
        )

    def _rewards(self, found: Rollouts, prompts: list[Prompt]) -> np.ndarray:
        """Return the rewards of all answers, float32 ``[B]``."""
        pairs = zip(found.texts, found.groups.tolist(), strict=True)
        values = [self._reward(text, prompts[group].line) for text, group in pairs]
        return np.array(values, np.float32)

    def _scores(
        self, params: ParamsDict, fixed: ParamsDict | None, tokens: np.ndarray, found: Rollouts
    ) -> np.ndarray:
        """Return the log-probabilities of answers under new parameters, in the policy's form."""
        if not self._rollout.deterministic:
            return scores(self._setup, params, fixed, tokens)[0]
        self._refresh(params, fixed)
        adapter = None if self._config.lora is None else samples.ADAPTER
        return _padded(rescore(self._engine, found, adapter=adapter), tokens)


def _prompt_options(setup: TrainingSetup, slots: int) -> Options:
    """Return the sizes of the engine's pages and calls for prompts, on a GPU.

    Many rows end their prompts by a few tokens each behind shared pages.
    """
    assert setup.config.rollout is not None
    if setup.config.rollout.deterministic or jax.default_backend() == "cpu":
        return {}
    rows: Options = {"prefill_rows": min(slots, PREFILL_TOKENS // PAGE)}
    if has_states(setup.model):  # prefixes are shared by chunks
        return rows
    return {"page_size": min(PAGE, setup.config.sequence_length), **rows}


@functools.partial(jax.jit, static_argnums=0)
def _engine_weights(dtype: str, params: ParamsDict) -> ParamsDict:
    """Return parameters by layer in the engine's dtype; no array is shared with ``params``."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), per_layer(params))


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """Prompts with the sampler that answers them."""

    sampler: Sampler
    prompts: PromptFile

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def density(self) -> float:
        """Share of a batch's places that are counted as tokens; padding is."""
        return 1.0


def _padded(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return ``[B, t]`` as ``[B, T]``, with zeros behind; tokens are ``[B, T + 1]``."""
    return np.pad(values, ((0, 0), (0, tokens.shape[1] - 1 - values.shape[1])))


class _Clock:
    """seconds: of each part of a step, by "<part>_seconds"."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def took(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[f"{part}_seconds"] = now - self._mark
        self._mark = now
