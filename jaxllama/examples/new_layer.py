"""A decoder with a new kind of layer.  ``python -m jaxllama.examples.new_layer``

A mixer is one folder, ``jaxllama/model/mixers/<kind>/``, and one word in ``MIXERS``.
``parameters.py`` lists a layer's parameters. ``mix.py`` computes the layer. ``module.py`` names the
Flax module. ``short_conv`` is the example: a gated short convolution, in two files of about 100
lines and one of 20. This program puts such layers beside attention, and does with the model all
that other models can do.
"""

from typing import Any

import jax
import jax.numpy as jnp

import jaxllama as jl

cfg = jl.load_config("smollm2-135m").replace(
    n_layers=3,
    d_model=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    d_ff=128,
    vocab_size=256,
    layer_types=("short_conv", "attention", "short_conv"),
    mixers={"short_conv": {"width": 64, "taps": 3}},
)
params = jl.init_params(cfg, jax.random.key(0), dtype=jnp.float32)
tokens = jax.random.randint(jax.random.key(1), (4, 12), 0, cfg.vocab_size)
lengths = jnp.full(4, 12)

# Training: the gradient of any loss on the logits.


def loss(params: Any) -> jax.Array:
    scores = jl.LanguageModel(cfg, params, None).logits(tokens[:, :-1], lengths - 1)
    found = jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, 1:, None], axis=-1)
    return -jnp.mean(found)


@jax.jit
def update(params: Any) -> tuple[Any, jax.Array]:
    value, grads = jax.value_and_grad(loss)(params)
    size = jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: p - 0.3 * g / size, params, grads), value


for step in range(121):
    params, value = update(params)
    if step % 40 == 0:
        print(f"step {step:3d}: loss {value:.3f}")

# Decoding: a prompt, then greedy steps from the prompt's state.
cache = jl.init_cache(cfg, batch=4, max_len=16, dtype=jnp.float32)
scores, cache = jl.prefill(cfg, params, tokens[:, :6], jnp.full(4, 6), cache)
found: list[jax.Array] = []
for _ in range(6):
    newest = jnp.argmax(scores, axis=-1)
    found.append(newest)
    scores, cache = jl.decode_step(cfg, params, newest, cache)
same = jnp.mean(jnp.stack(found, 1) == tokens[:, 6:])
print(f"remembered after 120 steps: {same:.0%} of the tokens")

# Quantized, with drafts, and in the engine's slots, like every other model.
small = jl.LanguageModel(cfg, jl.quantize_params(params, "w8a16"), None)
prompt = tokens[0, :6].tolist()
print("w8a16:", small.generate([prompt], max_new_tokens=6)[0].tokens)
print("the same with drafts:", small.generate([prompt], max_new_tokens=6, draft="ngram")[0].tokens)
