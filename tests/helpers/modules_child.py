"""Run by test_modules in a process of its own, with 8 devices where the tests have one.

A user's model and a whole decoder are initialized on a mesh by their partitioning metadata and run
there.  A JSON line for each says into how many parts its parameters are split, and how far the
result is from one device's.
"""

from __future__ import annotations

import json
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxllama.modules import Decoder, DecoderLayer, GatedLinearAttention, RMSNorm
from tests.helpers.models import FAMILIES, relative_error, tokens_of

jax.config.update("jax_numpy_dtype_promotion", "strict")
CFG = FAMILIES["hybrid"].replace(
    n_heads=8, n_kv_heads=4, d_ff=64, vocab_size=96, gla=FAMILIES["gla-conv-groups"].gla
)


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        y, _ = GatedLinearAttention(CFG, name="gla")(RMSNorm(CFG)(x))
        x, _ = DecoderLayer(CFG, 1, name="layer")(x + y)
        return x


class Whole(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        decoder = Decoder(CFG.replace(n_layers=4, layer_types=("gla", "attention") * 2), scan=True)
        return decoder.logits(decoder(tokens)[0])


def compared(model: nn.Module, x: jax.Array, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The model on the mesh beside the same on one device."""
    key = jax.random.key(0)
    place = nn.get_sharding(jax.eval_shape(model.init, key, x), mesh)
    variables = jax.jit(model.init, out_shardings=place)(key, x)
    got = jax.jit(model.apply)(variables, x)
    alone = jax.device_put((nn.unbox(variables), x), jax.devices()[0])
    want = jax.jit(model.apply)(*alone)
    shards = jax.tree.leaves(
        jax.tree.map(lambda a: a.size / a.addressable_shards[0].data.size, nn.unbox(variables))
    )
    return {
        "error": relative_error(got, want),
        "size": float(np.abs(np.asarray(want)).max()),
        "parts": sorted(set(shards)),
    }


def main() -> None:
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(1), (4, 9, CFG.d_model))
    print(json.dumps(compared(Layers(), x, mesh)))
    print(json.dumps(compared(Whole(), tokens_of(CFG, 4, 9), mesh)))


if __name__ == "__main__":
    main()
