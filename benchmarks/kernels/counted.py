"""Calls of four weight kernels, once each, for a profiler that reads counters:

    ncu -k regex:quantized_matmul --clock-control none --section WarpStateStats \\
        python -m benchmarks.kernels.counted

14336 x 4096: W4A16 and W4A8 with 64 rows, W8A8 with 64 rows, W4A16 with one row.  The kernels are
launched in this order.  ``--rows 4096 --implementation xla`` tries the program without a GPU.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

from benchmarks.kernels.matmul import SCHEMES, _weights
from pallas_kernels.matmul.interleave import interleaved
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.rows.quantize_tokens import quantize_tokens

CALLS = ("w4a16-g128-sym", 64), ("w4a8", 64), ("w8a8", 64), ("w4a16-g128-sym", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=14336, help="of the weight")
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--implementation", default="mosaic")
    args = parser.parse_args()
    made = {
        scheme: interleaved(_weights(scheme, args.rows, args.columns, 1)[0]) for scheme, _ in CALLS
    }
    for scheme, rows in CALLS:
        x = jax.random.normal(jax.random.key(9), (rows, args.columns), jnp.bfloat16)
        given = quantize_tokens(x, "int8") if SCHEMES[scheme][-1] else x
        call = jax.jit(
            lambda x, w: quantized_matmul(
                x, w, out_dtype=jnp.bfloat16, implementation=args.implementation
            )
        )
        jax.block_until_ready(call(given, made[scheme]))


if __name__ == "__main__":
    main()
