"""``quantized_matmul`` written plainly, which tests compare it with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.op import Activation
from pallas_kernels.qtensor import QTensor, dequantize
from pallas_kernels.rows.activations import ACTIVATIONS


def quantized_matmul_reference(
    x: jax.Array | QTensor,
    w: QTensor,
    *,
    bias: jax.Array | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Return the product in float32; never optimised."""
    x32 = dequantize(x) if isinstance(x, QTensor) else x.astype(jnp.float32)
    out = jnp.einsum("...k,nk->...n", x32, dequantize(w), precision=lax.Precision.HIGHEST)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out if activation is None else ACTIVATIONS[activation](out)
