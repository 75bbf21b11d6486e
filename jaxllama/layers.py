"""Linear, RMSNorm, SwiGLU and Embedding: the linen modules that call the dense kernels.

A parameter named "weight" is an array, a QTensor or RowBlocks; the module does not care.  All
weights are ``[out, in]``, as checkpoints store them.  Activations keep the dtype they come in;
every sum is accumulated in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxllama.parallel_ops import is_split, lookup_rows, row_parallel_matmul
from pallas_kernels.qtensor import QTensor, RowBlocks, dequantize
from pallas_kernels.quantize_tokens import quantize_tokens
from pallas_kernels.quantized_matmul import fusible, quantized_matmul
from pallas_kernels.quantized_matmul_blocks import fusible as all_fusible
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.swiglu import swiglu

Weight = jax.Array | QTensor | RowBlocks
# The residual stream: x, and what is still to be added to it, or None.
Stream = tuple[jax.Array, jax.Array | None]
_normal = nn.initializers.normal(0.02)


@struct.dataclass
class Normed:
    """``rms_norm(x + pending, weight, eps)`` that is not taken yet: the product that reads it does
    so in its own kernel, and where something is pending gives the pair (product, sum)."""

    x: jax.Array
    weight: jax.Array
    eps: float = struct.field(pytree_node=False)
    pending: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype


def weight_param(
    module: nn.Module, name: str, init: Callable[..., jax.Array], shape: tuple[int, ...]
) -> Weight:
    """The parameter as it is stored.  linen's own shape check knows no QTensor, so a bound value
    is read directly and checked here."""
    if not module.has_variable("params", name):
        return module.param(name, init, shape, jnp.float32)
    value = module.get_variable("params", name)
    if value.shape != shape:
        path = "/".join((*module.path, name))
        raise ValueError(f"{path}: shape {value.shape}, but the config wants {shape}")
    return value


def weight_at(module: nn.Module, *path: str) -> Weight | None:
    """The weight of the Linear at ``path`` below ``module``, for whoever prepares its input; None
    where there is none."""
    node = module.variables.get("params", {})
    for name in (*path, "weight"):
        node = node.get(name, {})
    return None if isinstance(node, dict) else node


def input_words(module: nn.Module, *path: str) -> str | None:
    """The dtype to which the Linear at ``path`` below ``module`` wants its input quantized token by
    token, so that whoever computes that input can do it in the same pass; None for floats."""
    node = weight_at(module, *path)
    blocks = node.blocks if isinstance(node, RowBlocks) else (node,)
    wanted = {
        block.activations if isinstance(block, QTensor) and block.input_scale is None else None
        for block in blocks
    }
    return wanted.pop() if len(wanted) == 1 else None


def matmul(
    x: jax.Array | QTensor | Normed,
    weight: Weight,
    bias: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    *,
    residual: jax.Array | None = None,
    gated: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``x[..., in] @ weight[out, in].T + bias`` -> ``[..., out]``, for some ``Normed`` a pair.

    dtype: of the result, x's by default; to be given where x is quantized already, which only a
    weight with ``activations`` takes.
    residual: added to the result.  It and a Normed x come only where ``fusible`` has said so.
    gated: weight is gate and up, and the result ``silu(gate) * up``, ``[..., out / 2]``.
    """
    norm = pending = None
    if isinstance(x, Normed):
        norm, pending, x = (x.weight, x.eps), x.pending, x.x
    if isinstance(weight, RowBlocks):
        ends = list(itertools.accumulate(block.shape[0] for block in weight.blocks))
        biases = [None] * len(ends) if bias is None else jnp.split(bias, ends[:-1])
        parts = [matmul(x, *part, dtype) for part in zip(weight.blocks, biases, strict=True)]
        out = jnp.concatenate(parts, axis=-1)
    elif isinstance(weight, QTensor) and weight.activations is not None:
        dtype = x.dtype if dtype is None else dtype
        if not isinstance(x, QTensor):
            x = quantize_tokens(x, weight.activations, scale=weight.input_scale)
        out = quantized_matmul(x, weight, bias=bias, out_dtype=dtype)
    else:
        return quantized_matmul(
            x, weight, bias=bias, out_dtype=dtype, norm=norm, residual=residual, swiglu=gated,
            pending=pending,
        )  # fmt: skip
    return swiglu(out) if gated else out


class Linear(nn.Module):
    """``y[..., features] = x[..., in] @ weight.T (+ bias)``; ``matmul`` has the options.

    split_inputs: on a mesh each device has its own part of the inputs, and y is the sum over them.
    """

    features: int
    in_features: int
    use_bias: bool = False
    split_inputs: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array | QTensor | Normed,
        dtype: DTypeLike | None = None,
        *,
        stream: jax.Array | None = None,
        gated: bool = False,
    ) -> jax.Array | Stream | tuple[jax.Array, jax.Array]:
        """y, or the pair of a ``Normed``; or, given the residual stream that y belongs to, that
        stream with y added or pending."""
        weight = weight_param(self, "weight", _normal, (self.features, self.in_features))
        bias = (
            self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
            if self.use_bias
            else None
        )
        if self.split_inputs and is_split():
            y = row_parallel_matmul(x, weight, bias, dtype)
            if stream is None:
                return y.astype(x.dtype if dtype is None else dtype)
            return stream, y
        if stream is not None and fusible(x, weight, out_dtype=dtype, residual=stream):
            return matmul(x, weight, bias, dtype, residual=stream), None
        y = matmul(x, weight, bias, dtype, gated=gated)
        return y if stream is None else (stream, y)


class RMSNorm(nn.Module):
    """RMSNorm over the last axis; with ``residual`` returns (normed sum, sum); with ``quantize``
    the normed value is a QTensor for a Linear that asks for it.

    reader: the weight that the normed value is multiplied with, and nothing else, or all of
    several; where one kernel does both the result is ``Normed``.
    pending: float32, a residual that is not rounded yet; returns (normed sum, sum or, where the
    kernel of the product will also add, None).
    """

    features: int
    eps: float

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array | None = None,
        quantize: DTypeLike | None = None,
        reader: Weight | tuple[Weight, ...] | None = None,
        pending: jax.Array | None = None,
    ):
        ones = nn.initializers.ones_init()
        weight = self.param("weight", ones, (self.features,), jnp.float32)
        norm = (weight, self.eps)
        is_read = residual is None and quantize is None and reader is not None
        several = isinstance(reader, tuple)
        if pending is not None:
            if is_read and not several and fusible(x, reader, norm=norm, pending=pending):
                return Normed(x, *norm, pending), None
            # Not by the norm: what rounds the sum adds it.
            x = x + pending.astype(x.dtype)
        if is_read and (all_fusible if several else fusible)(x, reader, norm=norm):
            normed = Normed(x, *norm)
        else:
            normed = rms_norm(x, *norm, residual=residual, quantize=quantize)
        return normed if pending is None else (normed, x)


class SwiGLU(nn.Module):
    """The Llama feed-forward: ``down(silu(gate(x)) * up(x))`` with gate and up in one matmul.

    dtype: of the result, for an x that comes quantized.  stream: see ``Linear``.
    """

    d_model: int
    d_ff: int
    use_bias: bool = False

    @nn.compact
    def __call__(  # [B, T, D] -> [B, T, D]
        self,
        x: jax.Array | QTensor | Normed,
        dtype: DTypeLike | None = None,
        *,
        stream: jax.Array | None = None,
    ) -> jax.Array | Stream:
        words = input_words(self, "down")
        gate_up = Linear(2 * self.d_ff, self.d_model, self.use_bias, name="gate_up")
        dtype = x.dtype if dtype is None else dtype
        y = gate_up(x, dtype, gated=words is None)
        if isinstance(x, Normed) and x.pending is not None:
            y, stream = y
        if words is not None and is_split():  # the token's scale needs the other shards
            y = swiglu(y.astype(jnp.float32))
        elif words is not None:
            y = swiglu(y, quantize=words)
        down = Linear(self.d_model, self.d_ff, self.use_bias, split_inputs=True, name="down")
        return down(y, dtype, stream=stream)


class Embedding(nn.Module):
    """Token embedding ``weight[V, D]``; ``attend`` is the tied output head."""

    vocab_size: int
    features: int

    def setup(self) -> None:
        self.weight = weight_param(self, "weight", _normal, (self.vocab_size, self.features))

    def __call__(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:  # [B, T] -> [B, T, D]
        weight = self.weight
        if is_split():
            return lookup_rows(weight, tokens, dtype)
        if isinstance(weight, QTensor):
            return dequantize(weight.rows(tokens), dtype)
        return weight[tokens].astype(dtype)

    def attend(self, x: jax.Array) -> jax.Array:  # [..., D] -> [..., V]
        return matmul(x, self.weight)
