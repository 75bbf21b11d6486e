"""Run by test_modules in a process of its own, with 8 devices where the tests have one.

A user's model is initialized on a mesh by its partitioning metadata and run there; one JSON line
says what a device holds and how far the result is from one device's.
"""

from __future__ import annotations

import json

import flax.linen as nn
import jax
import numpy as np

from jaxllama.modules import DecoderLayer, GatedLinearAttention, RMSNorm
from tests.helpers.models import FAMILIES, relative_error

jax.config.update("jax_numpy_dtype_promotion", "strict")
CFG = FAMILIES["hybrid"].replace(
    n_heads=8, n_kv_heads=4, d_ff=64, gla=FAMILIES["gla-conv-groups"].gla
)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        y, _ = GatedLinearAttention(CFG, name="gla")(RMSNorm(CFG)(x))
        x, _ = DecoderLayer(CFG, 1, name="layer")(x + y)
        return x


def main() -> None:
    model, key = Model(), jax.random.key(0)
    x = jax.random.normal(jax.random.key(1), (4, 9, CFG.d_model))
    mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shapes = jax.eval_shape(model.init, key, x)
    place = nn.get_sharding(shapes, mesh)
    variables = jax.jit(model.init, out_shardings=place)(key, x)
    got = jax.jit(model.apply)(variables, x)
    alone = jax.device_put(nn.unbox(variables), jax.devices()[0])
    want = jax.jit(model.apply)(alone, jax.device_put(x, jax.devices()[0]))
    weight = nn.unbox(variables)["params"]["layer"]["mlp"]["gate_up"]["weight"]
    print(
        json.dumps(
            {
                "shard": weight.addressable_shards[0].data.shape,
                "whole": weight.shape,
                "error": relative_error(got, want),
                "size": float(np.abs(np.asarray(want)).max()),
            }
        )
    )


if __name__ == "__main__":
    main()
