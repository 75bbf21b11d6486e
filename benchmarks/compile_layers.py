"""How long a deep model's forward and backward take to compile, layer by layer and as one loop.

    python -m benchmarks.compile_layers --layers 80

The model is tiny, because compile time follows the number of operations and not their size.  Each
form is traced, lowered and compiled once, in this process, without jax's kept programs.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig, load_config
from jaxllama.modules import Decoder


def cost(cfg: ModelConfig, scan: bool) -> tuple[float, float]:
    """Return (wall seconds, processor seconds) to compile a gradient of the whole model."""
    model = Decoder(cfg, scan=scan, remat=True)
    tokens = jnp.zeros((2, 32), jnp.int32)

    def loss(params: dict) -> jax.Array:
        hidden, _ = model.apply({"params": params}, tokens)
        return jnp.mean(hidden.x**2)

    shapes = jax.eval_shape(lambda key: model.init(key, method="tree"), jax.random.key(0))
    wall, processor = time.perf_counter(), time.process_time()
    jax.jit(jax.value_and_grad(loss)).lower(shapes["params"]).compile()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Print a line for each form."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=80)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    cfg = load_config("smollm2-135m").replace(
        vocab_size=256,
        d_model=64,
        n_layers=args.layers,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=128,
    )
    for name, scan in (("one loop", True), ("layer by layer", False)):
        wall, processor = cost(cfg, scan)
        print(f"{args.layers} layers, {name}: {wall:.1f} s, of the processor {processor:.1f} s")


if __name__ == "__main__":
    main()
