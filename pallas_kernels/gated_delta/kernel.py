"""The gated delta rule on Hopper: the Mosaic GPU kernels put together."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.kernel_chunks import chunks
from pallas_kernels.gated_delta.kernel_scan import scan


@functools.partial(jax.jit, static_argnames=("scale",))
def gated_delta_forward(q, k, v, log_decay, beta, *, scale, initial_state=None, lengths=None):
    if lengths is not None:
        lengths = lengths.astype(jnp.int32)
    keys, weights, decays = chunks(q, k, log_decay, beta, lengths, float(scale))
    return scan(q, k, keys, weights, decays, v, start=initial_state, lengths=lengths)
