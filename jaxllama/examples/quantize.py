"""Quantize weights to 8 and 4 bits.  ``python -m jaxllama.examples.quantize [MODEL]``

The program prints the cost.
"""

import sys

import jax
import jax.numpy as jnp

import jaxllama as jl
from pallas_kernels import dequantize
from pallas_kernels.qtensor import tree_bytes

lm = jl.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", exact=True)

# One layer under several schemes, rounded to nearest.  Mixtures are by path.
layer = {"layer_0": lm.params["layer_0"]}
print(f"float32: {tree_bytes(layer) / 1e6:.1f} MB a layer")
for scheme in ("w8a16", "w4a16-zero", "w4a16-zero,down=w8a16"):
    small = jl.quantize_params(layer, scheme)  # a matrix becomes a QTensor: codes and scales
    print(f"{scheme}: {tree_bytes(small) / 1e6:.1f} MB a layer", end="")
    for room, name in (("mixer", "qkv"), ("mlp", "down")):
        w, packed = (tree["layer_0"][room][name]["weight"] for tree in (layer, small))
        error = jnp.linalg.norm(dequantize(packed, w.dtype) - w) / jnp.linalg.norm(w)
        print(f", {name} off by {error:.1%}", end="")
    print()

# The whole model in 8 bits against its floats. Every function takes the quantized tree.
assert lm.tokenizer is not None  # None if a checkpoint has no tokenizer
ids = lm.tokenizer.encode("The sea is salt because rivers wash minerals out of the rocks.")
tokens, lengths = jnp.asarray([ids]), jnp.asarray([len(ids)])
params = jl.quantize_params(lm.params, "w8a16")
floats = jax.nn.log_softmax(jl.logits(lm.config, lm.params, tokens, lengths))
ours = jax.nn.log_softmax(jl.logits(lm.config, params, tokens, lengths))
kl = jnp.sum(jnp.exp(floats) * (floats - ours), axis=-1).mean()
print(f"KL of w8a16 to float32: {kl:.4f} nats a token")

# Calibrated, and saved: jaxllama quantize --scheme w4a16-zero --method gptq --out DIR
