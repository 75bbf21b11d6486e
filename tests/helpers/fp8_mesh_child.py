"""Products whose columns and FP8 blocks are split over two devices; ``test_exchange``.

    python -m tests.helpers.fp8_mesh_child

A JSON line for each number of columns: each device's error relative to one device's product.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxllama.model.linear import linear
from jaxllama.parallel.collectives import row_parallel_matmul
from jaxllama.parallel.mesh import make_mesh
from jaxllama.quantization.scheme import parse, round_weight


def main() -> None:
    mesh, rng = make_mesh("model=2"), np.random.default_rng(0)
    split = P(None, "model")
    for columns in (256, 512):  # a block on each device, and two
        w = rng.normal(size=(128, columns)) * np.repeat(1.0 + 3 * np.arange(columns // 128), 128)
        x = jnp.asarray(rng.normal(size=(3, columns)), jnp.float32)
        scheme = parse("fp8-block-a8").default
        assert scheme is not None
        weight = round_weight(jnp.asarray(w, jnp.float32), scheme, "w")
        alone = np.asarray(linear(x, {"weight": weight}))
        product = jax.shard_map(
            lambda x, weight: row_parallel_matmul(x, weight, None, None),
            mesh=mesh,
            in_specs=(split, jax.tree.map(lambda _: split, weight)),
            out_specs=P(),
            check_vma=False,
        )
        found = [np.asarray(own.data) for own in jax.jit(product)(x, weight).addressable_shards]
        off = [float(np.linalg.norm(own - alone) / np.linalg.norm(alone)) for own in found]
        print(json.dumps({"columns": columns, "off": off}))


if __name__ == "__main__":
    main()
