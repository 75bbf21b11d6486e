"""Generation with pure functions under jit.  ``python -m jaxllama.examples.pure_functions``

Config, parameters and cache are arguments. Each call donates the cache and returns a new one.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jaxllama as jl

# A model of any shape: the config is a frozen dataclass, the parameters a tree of arrays.
cfg = jl.load_config("smollm2-135m").replace(n_layers=2, layer_types=("attention",) * 2)
params = jl.init_params(cfg, jax.random.key(0))

# Two rows of different lengths, padded on the right.
tokens = jnp.asarray([[504, 3575, 282, 4649, 314], [19556, 905, 0, 0, 0]])
lengths = jnp.asarray([5, 2])

cache = jl.init_cache(cfg, batch=2, max_len=32)
logits, cache = jl.prefill(cfg, params, tokens, lengths, cache)  # [2, V], of the last valid token
for _ in range(3):
    token = logits.argmax(-1)
    logits, cache = jl.decode_step(cfg, params, token, cache)
    print("tokens", token.tolist(), "lengths", cache.lengths.tolist())


# Differentiable like any function: the loss of every next token of the first row.
def loss(params: dict[str, Any]) -> jax.Array:
    every = jax.nn.log_softmax(jl.logits(cfg, params, tokens[:1], lengths[:1]))  # [1, T, V]
    return -jnp.take_along_axis(every[:, :-1], tokens[:1, 1:, None], axis=-1).mean()


value, gradients = jax.jit(jax.value_and_grad(loss))(params)
norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
print(f"loss {value:.3f}, norm of its gradient {norm:.3f}")
