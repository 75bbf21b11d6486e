"""jaxllama's layers in a Flax model of your own.  ``python -m jaxllama.examples.flax_layers``

``jaxllama.modules`` has each layer as a linen module. This model reads a sequence of numbers and
predicts the next one. It has two Flax ``Dense`` layers around GLA and attention. Copy and change
it.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax  # pyright: ignore[reportMissingTypeStubs]

import jaxllama as jl
from jaxllama.config import GLAConfig, ModelConfig
from jaxllama.modules import Attention, GatedLinearAttention, RMSNorm, SwiGLU

# A layer reads its sizes from a config. Start from any preset and change it.
CFG = jl.load_config("smollm2-135m").replace(
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=128,
    gla=GLAConfig(n_heads=4, n_kv_heads=4, expand_k=0.5, expand_v=1.0),
)


class HybridBlock(nn.Module):
    """A mixer and a feed-forward, each behind a norm."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for mixer in (GatedLinearAttention(self.cfg), Attention(self.cfg)):
            y, _ = mixer(RMSNorm(self.cfg)(x))  # the second result is a cache's new state
            x = x + y
        return x + SwiGLU(self.cfg)(RMSNorm(self.cfg)(x))


class Forecast(nn.Module):
    """A model that maps ``[B, T]`` numbers to the next number after each."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, series: jax.Array) -> jax.Array:
        x = nn.Dense(self.cfg.d_model)(series[..., None])
        x = nn.remat(HybridBlock)(self.cfg)(x)  # recomputed in the backward pass
        return nn.Dense(1)(x)[..., 0]


model = Forecast(CFG)
times = jnp.arange(25.0) + 10 * jax.random.uniform(jax.random.key(1), (16, 1))
waves = jnp.sin(times / 2)

print(model.tabulate(jax.random.key(0), waves, depth=2, console_kwargs={"width": 120}))
variables = jax.jit(model.init)(jax.random.key(0), waves)
# Each parameter is in a box that names the dimension that a mesh's axis "model" splits.
axes = nn.get_partition_spec(variables)["params"]["CheckpointHybridBlock_0"]
print("attention on a mesh:", axes["Attention_0"])
params = nn.unbox(variables)


def loss(params: Any) -> jax.Array:
    forecast = jnp.asarray(model.apply(params, waves[:, :-1]))
    return jnp.mean((forecast - waves[:, 1:]) ** 2)


@jax.jit
def update(params: Any, moments: Any) -> tuple[Any, Any, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(params)
    changes, moments = rule.update(gradients, moments, params)
    return optax.apply_updates(params, changes), moments, value


rule = optax.rmsprop(1e-3)
moments = rule.init(params)
for step in range(81):
    params, moments, value = update(params, moments)
    if step % 20 == 0:
        print(f"step {step:2d}: mean squared error {value:.4f}")
_, _, value = update(params, moments)
print("it forecasts" if value < 0.05 else "it does not forecast yet")
