"""Quantized weights in the layout that this device's kernels read fastest.

    lay_out(params) -> params             lays out the weights; the result computes the same.
    slow_on_cpu(params) -> str | None     returns why quantized weights run without a handler.

``LanguageModel`` calls ``lay_out`` for its parameters, so every way to a quantized weight leads
through it.  Weights stay as they are on a mesh and while they are traced.

A CPU's handlers have a layout of their own.  They round activations, which must be float32, to 8
bits, but not beside FP8 (``pallas_kernels.cpu``).  On a Hopper GPU W4A8's columns are in the order
of its kernel (``matmul.interleave``), but an embedding's, whose rows are read one by one.
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxllama.parallel.mesh import mesh_of
from jaxllama.typing import Params
from pallas_kernels.cpu import prepare, prepare_tree, restore_tree, unavailable
from pallas_kernels.dispatch import Reason, hopper_reason
from pallas_kernels.matmul.interleave import in_order_tree, interleaved_tree
from pallas_kernels.qtensor import QTensor, leaves_of


def lay_out(params: Params, donate: bool = False) -> Params:
    """``params`` with every QTensor laid out for which this device has a layout.

    donate: on a GPU, use up the weights that are laid out, so that none is held twice.
    """
    if not _weights(params) or mesh_of(params) is not None:
        return params
    if handles(_dtype(params)):
        return jax.device_put(prepare_tree(params))
    if hopper_reason() is not None:
        return params
    return {
        name: part if name == "embed" else interleaved_tree(part, donate)
        for name, part in params.items()
    }


def as_stored(params: Params) -> Params:
    """``params`` as they were before ``lay_out``."""
    return in_order_tree(restore_tree(params))


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
        reasons = Counter(reason.text for reason in found if isinstance(reason, Reason))
        reason = "; ".join(reasons)
    return (
        f"{len(weights)} quantized weights have no CPU handler and may be slower than floats: "
        f"{reason}"
    )


def _weights(params: Params) -> list[QTensor]:
    """The QTensors of a tree whose values are known."""
    found = leaves_of(params, QTensor)
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
