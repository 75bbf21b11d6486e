"""Quantized weights in the layout that a CPU's handlers read.

    lay_out(params) -> params             lays out weights on a CPU; elsewhere returns the tree.
    slow_on_cpu(params) -> str | None     returns why quantized weights run without a handler.

``LanguageModel`` calls ``lay_out`` for its parameters, so every way to a quantized weight leads
through it.  A handler rounds activations to 8 bits (``pallas_kernels.cpu``).  Weights stay as they
are on a mesh, while they are traced, and where activations are not float32.
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxllama.parallel.mesh import mesh_of
from jaxllama.typing import Params
from pallas_kernels.cpu import prepare, prepare_tree, unavailable
from pallas_kernels.dispatch import Reason
from pallas_kernels.qtensor import QTensor


def lay_out(params: Params) -> Params:
    """``params`` with every QTensor laid out for which this CPU has a handler."""
    if not _weights(params) or mesh_of(params) is not None or not handles(_dtype(params)):
        return params
    return jax.device_put(prepare_tree(params))


def slow_on_cpu(params: Params) -> str | None:
    """One line on quantized weights that a CPU multiplies without a handler, or None.

    params: of a model, after ``lay_out``.
    """
    weights = _weights(params)
    if jax.default_backend() != "cpu" or not weights or mesh_of(params) is not None:
        return None
    reason = _reason_of(_dtype(params))
    if reason is None:
        found = [prepare(weight) for weight in weights]
        reasons = Counter(one.text for one in found if isinstance(one, Reason))
        reason = "; ".join(reasons)
    return (
        f"{len(weights)} quantized weights have no CPU handler and may be slower than floats: "
        f"{reason}"
    )


def _weights(params: Params) -> list[QTensor]:
    """The QTensors of a tree whose values are known."""
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    found = [leaf for leaf in leaves if isinstance(leaf, QTensor)]
    return [w for w in found if isinstance(w.q, jax.Array) and not isinstance(w.q, Tracer)]


def _dtype(params: Params) -> jnp.dtype:
    """The activations'."""
    return params["norm"]["weight"].dtype


def _reason_of(dtype: jnp.dtype) -> str | None:
    """Why no weight of a model with activations of ``dtype`` has a handler, or None."""
    if jax.default_backend() != "cpu":
        return "the handlers are a CPU's"
    if dtype != jnp.float32:
        return f"handlers take activations in float32, not {dtype.name}"
    missing = unavailable()
    return None if missing is None else missing.text


def handles(dtype: jnp.dtype) -> bool:
    """Whether this machine's CPU has handlers for activations of ``dtype``."""
    return _reason_of(dtype) is None
