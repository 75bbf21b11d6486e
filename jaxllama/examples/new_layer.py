"""A mixer of your own: retention (arXiv 2307.08621).  ``python -m jaxllama.examples.new_layer``

What a mixer owes a decoder: ``x[B, T, D], state -> (y[B, T, D], state)`` such that any split of a
sequence into calls gives the same y.  Retention is GLA whose decay is one constant a head.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels import gla, gla_step


class Retention(nn.Module):
    n_heads: int
    head_dim: int

    @nn.compact
    def __call__(self, x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads = (self.n_heads, self.head_dim)
        q, k, v = (nn.DenseGeneral(heads, use_bias=False, name=name)(x) for name in "qkv")
        decay = 1.0 - 2.0 ** -(5.0 + jnp.arange(self.n_heads, dtype=jnp.float32))
        log_decay = jnp.broadcast_to(jnp.log(decay)[:, None], k.shape)  # natural, float32, <= 0
        if x.shape[1] == 1:  # a decode step: one kernel, the state updated in place
            q, k, v, log_decay = (a[:, 0] for a in (q, k, v, log_decay))
            y, state = gla_step(q, k, v, log_decay, state)
            y = y[:, None]
        else:  # a prompt, by chunks
            y, after = gla(q, k, v, log_decay, initial_state=state)
            assert after is not None  # it is with return_state=False
            state = after
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="o")(y), state


mixer = Retention(n_heads=4, head_dim=16)
x = jax.random.normal(jax.random.key(0), (2, 9, 64))
start = jnp.zeros((2, 4, 16, 16), jnp.float32)  # [B, H, Dk, Dv]
params = mixer.init(jax.random.key(1), x, start)

whole, _ = mixer.apply(params, x, start)
first, state = mixer.apply(params, x[:, :6], start)
parts = [first]
for t in range(6, 9):
    y, state = mixer.apply(params, x[:, t : t + 1], state)
    parts.append(y)
error = jnp.abs(jnp.concatenate(parts, 1) - whole).max() / jnp.abs(whole).max()
print(f"prefill of 6 and 3 steps, beside all 9 at once: largest difference {error:.1e}")
