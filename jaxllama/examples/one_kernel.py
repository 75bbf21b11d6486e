"""One op alone, without any model.  ``python -m jaxllama.examples.one_kernel``

On a Hopper GPU this program runs the Mosaic kernel. Elsewhere it runs the XLA form, with the same
call and the same result.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import dequantize, quantize, quantized_matmul
from pallas_kernels.dispatch import hopper_reason

w = jax.random.normal(jax.random.key(0), (512, 1024), jnp.bfloat16)  # [out, in]
x = jax.random.normal(jax.random.key(1), (4, 1024), jnp.bfloat16)  # four rows of a decode step


def relative_error(found: jax.Array, exact: jax.Array) -> jax.Array:
    return jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)


print("kernel" if hopper_reason() is None else f"XLA's form: {hopper_reason()}")
for dtype, group in (("int8", None), ("int4", 128), ("float8_e4m3fn", None)):
    packed = quantize(w, dtype, group_size=group)  # codes and scales, one pytree node
    y = jax.jit(quantized_matmul)(x, packed).astype(jnp.float32)
    stored = dequantize(packed, jnp.float32)
    whole = w.astype(jnp.float32)
    # The reference uses the same quantized weights: the error is the rounding of the product.
    product = relative_error(y, x.astype(jnp.float32) @ stored.T)
    print(
        f"{dtype}: {w.nbytes / packed.nbytes:.1f}x smaller; relative error of the stored weights "
        f"{relative_error(stored, whole):.1e}, of the product with them {product:.1e}"
    )
