"""Learn from rewards alone.  ``python -m jaxllama.examples.learn_from_rewards``

A small random model learns to write even tokens by GRPO (arXiv 2402.03300). The engine samples,
and a jitted step updates the weights. The engine takes them over and compiles nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxllama as jl

cfg = jl.load_config("smollm2-135m").replace(
    vocab_size=64,
    d_model=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=128,
    eos_token_ids=(),
)
PROMPTS, SAMPLES, NEW = 8, 8, 8
params = jl.init_params(cfg, jax.random.key(0), jnp.float32)
# exact: on a CPU the engine then holds the very tree that is trained.
engine = jl.Engine(
    jl.LanguageModel(cfg, params, None, exact=True), max_slots=32, max_len=16, kv_dtype="float32"
)
optimizer = optax.adamw(1e-2)
moments = optimizer.init(params)


def loss(params: Any, rollouts: jl.Rollouts, advantages: jax.Array) -> jax.Array:
    """GRPO's clipped objective, a mean over each answer's tokens; without a KL term."""
    tokens = jnp.asarray(rollouts.tokens)
    scores = jl.logits(cfg, params, tokens, jnp.asarray(rollouts.lengths))[:, :-1]
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    ratio = jnp.exp(chosen - jax.nn.logsumexp(scores, -1) - rollouts.logprobs)
    gain = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 0.8, 1.2) * advantages[:, None])
    answers = rollouts.answers
    return -jnp.mean(jnp.sum(gain * answers, -1) / jnp.sum(answers, -1))


@jax.jit
def update(
    params: Any, moments: Any, rollouts: jl.Rollouts, advantages: jax.Array
) -> tuple[Any, Any]:
    gradients = jax.grad(loss)(params, rollouts, advantages)
    changes, moments = optimizer.update(gradients, moments, params)
    return optax.apply_updates(params, changes), moments


draw = np.random.default_rng(0)
for step in range(31):
    prompts = draw.integers(0, cfg.vocab_size, (PROMPTS, 4)).tolist()
    # texts and reasons are no arrays, so they stay outside of the jitted step
    rollouts = jl.rollout(engine, prompts, n=SAMPLES, max_new_tokens=NEW, seed=step)
    arrays = rollouts._replace(texts=(), finish_reasons=())
    even = (rollouts.tokens[:, 1:] % 2 == 0) * rollouts.answers
    reward = (even.sum(-1) / rollouts.answers.sum(-1)).reshape(PROMPTS, SAMPLES)
    spread = reward.std(-1, keepdims=True) + 1e-4
    advantages = ((reward - reward.mean(-1, keepdims=True)) / spread).ravel()
    if step % 10 == 0:
        print(f"step {step}: {reward.mean():.0%} of the tokens are even")
    params, moments = update(params, moments, arrays, advantages)
    engine.update_params(params)
