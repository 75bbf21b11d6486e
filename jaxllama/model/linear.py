"""The two operations that every layer is made of; nothing outside of this file knows of fusion.

    y, stream = norm_linear(stream, norm, linear, cfg)    a norm of the stream, then a product
    stream    = linear_add(x, linear, stream, cfg)        a product, added to the stream

A norm stands before a product and a residual after one, so these two operations are where kernels
fuse work.  In a decode step on Hopper each is one kernel.  It includes the quantization of its
input, a gated activation, bias and the sum over devices, as far as a kernel has them.  LayerNorm, a
norm after a product and the exact GELU are separate steps.
``linear`` is a product alone, ``norm`` a norm alone.

The stream is a pair (x, pending).  ``pending`` is a last term that its product could not add to x
in its own kernel.  The next norm adds it, or the product after that norm.  A sum over devices is
pending in float32 and rounded where it is added.

Parameters are the dictionaries of the parameter tree, {"weight": ..., "bias": ...}.  A weight is an
array, a QTensor, RowBlocks or a CpuWeight, ``[out, in]``; callers do not distinguish them.  If rows
have LoRA adapters ("lora", ``model.lora``), a quantized input comes with its inner products
(``Adapted``).  A product of floats then runs one step after the other.
Activations keep the dtype they come in; every sum is accumulated in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.config import StepConfig
from jaxllama.model.elementwise import layer_norm
from jaxllama.model.experts.route import Routed, has_plain_scores, route, with_factors
from jaxllama.model.lora import Adapted, Lora
from jaxllama.parallel.collectives import row_parallel_matmul
from jaxllama.parallel.mesh import is_split
from jaxllama.typing import Options, Params, Tree
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.dispatch import wants_kernel
from pallas_kernels.experts.gate import Gate
from pallas_kernels.experts.op import grouped_matmul
from pallas_kernels.experts.route import fused_norm_and_route
from pallas_kernels.matmul.blocks import blocks_matmul, own_blocks
from pallas_kernels.matmul.fused import fused_matmul
from pallas_kernels.matmul.gated import gated_matmul
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.matmul.sums import Posted, collect, norm_matmul, post
from pallas_kernels.operands import Columns
from pallas_kernels.qtensor import QTensor, RowBlocks
from pallas_kernels.rows.quantize_tokens import quantize_tokens
from pallas_kernels.rows.rms_norm import rms_norm
from pallas_kernels.rows.swiglu import swiglu

POST = "post"  # in a linear layer: the table of the sum over devices that its product posts
Weight = jax.Array | QTensor | RowBlocks | CpuWeight
Input = jax.Array | QTensor | Adapted
StaticCodes = tuple[str, jax.Array]  # a dtype, and one scale for all inputs


class Stream(NamedTuple):
    """The residual stream ``[..., D]``: x, and a pending term that is added later, or None.

    handed: ``[..., D]`` that the layer before hands to this layer's mixer, such as its own normed
        input, or None.
    embedded: the embeddings ``[..., D]``, if layers read them, or None.
    """

    x: jax.Array
    pending: jax.Array | Posted | None = None
    handed: jax.Array | None = None
    embedded: jax.Array | None = None

    @property
    def total(self) -> jax.Array:
        """As one array."""
        last = collect(self.pending) if isinstance(self.pending, Posted) else self.pending
        return self.x if last is None else self.x + last.astype(self.x.dtype)

    @property
    def packed(self) -> jax.Array:
        """As one array, with ``handed`` behind its features; ``unpacked`` is the inverse."""
        total = self.total
        return total if self.handed is None else jnp.concatenate([total, self.handed], axis=-1)

    @classmethod
    def unpacked(cls, x: jax.Array, d_model: int) -> Stream:
        """Return the stream of ``x[..., D]``, or of ``x[..., 2 D]`` with ``handed`` behind it."""
        if x.shape[-1] == d_model:
            return cls(x)
        return cls(x[..., :d_model], None, x[..., d_model:])

    @property
    def rounded(self) -> Stream:
        """With a sum over devices, which is float32, added now instead of in the norm."""
        if self.pending is None:
            return self
        is_sum = isinstance(self.pending, Posted) or self.pending.dtype != self.x.dtype
        return Stream(self.total) if is_sum else self


# The two operations


def norm_linear(
    stream: Stream,
    scale: Params | None,
    linear: Params | Sequence[Params],
    cfg: StepConfig,
    *,
    into: Params | None = None,
) -> tuple[Tree, Stream]:
    """``norm(stream) @ weight.T + bias``: (``[..., out]``, the stream).

    scale: the norm's parameters, None where there is no norm.
    linear: one layer, or several that read the same input: then a list of ``Columns``, which may
        lie in fewer arrays.
    into: this layer's weight is gate and up, and the result ``activation(gate) * up`` is for that
        layer, quantized where it wants it so.
    """
    if not isinstance(linear, Mapping):
        return _norm_linears(stream, scale, linear, cfg)
    codes, lora = input_codes(linear), _lora(linear)
    has_kernel = codes is lora is None and _has_kernels(stream.x, linear["weight"])
    if has_kernel and scale is not None and cfg.norm.kind == "rms":
        fused = _fused_norm_linear(stream, scale, linear, cfg, into)
        if fused is not None:
            return fused
    normed, stream = norm(stream, scale, cfg, codes, lora, static=_static_codes(linear))
    return product(normed, linear, stream.x.dtype, cfg, into=into), stream


def _fused_norm_linear(
    stream: Stream,
    scale: Params,
    linear: Params,
    cfg: StepConfig,
    into: Params | None,
) -> tuple[Input, Stream] | None:
    """Return ``norm_linear`` of float inputs if one kernel does all of it, else None."""
    weight = linear["weight"]
    around: Options = {"norm": (scale["weight"], cfg.norm.eps)}
    around |= {"bias": linear.get("bias"), "out_dtype": stream.x.dtype}
    if _is_inner(into, cfg):
        around |= {"swiglu": True, "activation": cfg.activation}
    if stream.pending is not None:
        if isinstance(stream.pending, Posted):
            fused = norm_matmul(stream.x, weight, stream.pending, **around)
        else:
            fused = fused_matmul(stream.x, weight, **around, pending=stream.pending)
        if fused is not None:
            return _gated(fused[0], into, cfg), Stream(fused[1])
    stream = stream.rounded
    y = fused_matmul(stream.x, weight, **around) if stream.pending is None else None
    return None if y is None else (_gated(y, into, cfg), stream)


def _has_kernels(x: Input, weight: Weight) -> bool:
    """Can a kernel fuse this product with the work around it?"""
    return isinstance(weight, CpuWeight) or wants_kernel(None, x, weight)


def _norm_linears(
    stream: Stream, scale: Params | None, linears: Sequence[Params], cfg: StepConfig
) -> tuple[list[Columns], Stream]:
    weights = [layer["weight"] for layer in linears]
    has_lora = any(_lora(layer) is not None for layer in linears)
    has_kernel = not has_lora and wants_kernel(None, stream.x, weights)
    if has_kernel and scale is not None and cfg.norm.kind == "rms":
        # The kernel takes no pending term.  XLA adds it where it made it.
        fused = _fused_norm_linears(stream.total, scale, linears, cfg)
        if fused is not None:
            return fused
    wanted = [None if has_lora else input_codes(layer) for layer in linears]
    if len(set(wanted)) > 1:
        return _by_codes(stream, scale, linears, wanted, cfg)
    # The input is quantized once for all that want the same codes.
    dtype = None if has_lora else stream.x.dtype
    normed, stream = norm(stream, scale, cfg, wanted[0])
    return [Columns.whole(linear(normed, layer, dtype)) for layer in linears], stream


def _fused_norm_linears(
    x: jax.Array, scale: Params, linears: Sequence[Params], cfg: StepConfig
) -> tuple[list[Columns], Stream] | None:
    """Return ``norm_linears`` of the stream x if one kernel does the norm and all products."""
    weights, norm = [linear["weight"] for linear in linears], (scale["weight"], cfg.norm.eps)
    plan = own_blocks(x, weights, norm=norm)
    if plan is None:
        return None
    products = blocks_matmul(x, weights, norm=norm, plan=plan)
    pairs = zip(products, linears, strict=True)
    return [y.plus(linear.get("bias")) for y, linear in pairs], Stream(x)


def _by_codes(
    stream: Stream,
    scale: Params | None,
    linears: Sequence[Params],
    wanted: Sequence[str | None],
    cfg: StepConfig,
) -> tuple[list[Columns], Stream]:
    """Compute products that want one input in several codes; each code is made once."""
    dtype = stream.x.dtype
    normed, stream = norm(stream, scale, cfg)
    inputs = {codes: _quantized(normed, codes) for codes in dict.fromkeys(wanted)}
    pairs = zip(wanted, linears, strict=True)
    return [Columns.whole(linear(inputs[codes], layer, dtype)) for codes, layer in pairs], stream


def linear_add(
    x: Input,
    linear: Params,
    stream: Stream,
    cfg: StepConfig,
    scale: Params | None = None,
) -> Stream:
    """``stream + x @ weight.T + bias``.  On a mesh each device has its own part of the inputs, and
    the product is the sum over them.  scale: of a norm behind the product."""
    weight, bias, dtype = linear["weight"], linear.get("bias"), stream.x.dtype
    if stream.pending is not None:  # the other sublayer's of a parallel block
        stream = Stream(stream.total)
    is_plain = _lora(linear) is None
    if POST in linear:
        assert isinstance(x, jax.Array)
        return Stream(stream.x, post(x, weight, linear[POST]))
    if is_plain and is_split():
        assert isinstance(x, jax.Array)  # each shard quantizes its own part
        y = row_parallel_matmul(x, weight, bias, dtype)
    elif is_plain and scale is None and _has_kernels(x, weight):
        assert not isinstance(x, Adapted)  # only layers with adapters take one
        total = fused_matmul(x, weight, bias=bias, out_dtype=dtype, residual=stream.x)
        if total is not None:
            return Stream(total)
        y = _matmul(x, weight, bias, dtype)
    else:
        y = product(x, linear, dtype, cfg)
    return Stream(stream.x, y if scale is None else norm_behind(y.astype(dtype), scale, cfg))


# Their parts


@overload
def norm(
    stream: Stream,
    scale: Params | None,
    cfg: StepConfig,
    codes: None = None,
    lora: Lora | None = None,
    static: None = None,
) -> tuple[jax.Array, Stream]: ...
@overload
def norm(
    stream: Stream,
    scale: Params | None,
    cfg: StepConfig,
    codes: str | None,
    lora: Lora | None = None,
    static: StaticCodes | None = None,
) -> tuple[Input, Stream]: ...
def norm(
    stream: Stream,
    scale: Params | None,
    cfg: StepConfig,
    codes: str | None = None,
    lora: Lora | None = None,
    static: StaticCodes | None = None,
) -> tuple[Input, Stream]:
    """(the norm of the stream, the stream added up); codes: the dtype to quantize it to, lora: of
    the layer that reads the codes.  static: in place of codes, a dtype with one scale for all."""
    if scale is None or cfg.norm.kind == "layer":
        x = Stream(stream.total)  # its product uses a static scale
        return _quantized(layer_norm(x.x, scale, cfg.norm.eps), codes, lora), x
    stream, weight = stream.rounded, scale["weight"]
    assert not isinstance(stream.pending, Posted)
    x, residual = (stream.x, None) if stream.pending is None else (stream.pending, stream.x)
    if codes is not None and lora is not None:
        y, *total = lora.adapted(x, codes, norm=(weight, cfg.norm.eps), residual=residual)
        return y, Stream(*total) if total else stream
    codes, given = (codes, None) if static is None else static
    of_codes: Options = {"quantize": codes, "scale": given}
    if residual is None:
        return rms_norm(x, weight, cfg.norm.eps, **of_codes), stream
    y, total = rms_norm(x, weight, cfg.norm.eps, residual=residual, **of_codes)
    return y, Stream(total)


def norm_behind(y: jax.Array, scale: Params, cfg: StepConfig) -> jax.Array:
    """Return the norm of a sublayer's output ``y[..., D]``."""
    if cfg.norm.out_eps is not None:
        cfg = dataclasses.replace(cfg, norm=dataclasses.replace(cfg.norm, eps=cfg.norm.out_eps))
    return norm(Stream(y), scale, cfg)[0]


def _quantized(x: jax.Array, codes: str | None, lora: Lora | None = None) -> Input:
    """For a layer that wants ``codes`` and has ``lora``."""
    if codes is None:
        return x
    if lora is None:
        return quantize_tokens(x, codes)
    return lora.adapted(x, codes)[0]


def linear(x: Input, params: Params, dtype: DTypeLike | None = None) -> jax.Array:
    """``x[..., in] @ weight[out, in].T + bias`` -> ``[..., out]``.

    dtype: of the result, x's by default; to be given where x is quantized already, which only a
    weight with ``activations`` takes.
    """
    lora = _lora(params)
    if lora is not None:
        return _with_lora(x, params, lora, dtype)
    assert not isinstance(x, Adapted)  # only layers with adapters take one
    return _matmul(x, params["weight"], params.get("bias"), dtype)


def linear_of_norm(x: Columns, scale: jax.Array, eps: float, params: Params) -> jax.Array:
    """Return ``linear`` of the RMSNorm of ``x[..., in]``; scale: its weights ``[in]``."""
    weight = params["weight"]
    if input_codes(params) is _lora(params) is None and _has_kernels(x.rows, weight):
        y = fused_matmul(x, weight, bias=params.get("bias"), norm=(scale, eps))
        if y is not None:
            return y
    return linear(rms_norm(x.value, scale, eps), params)


def _with_lora(x: Input, params: Params, lora: Lora, dtype: DTypeLike | None) -> jax.Array:
    """Return ``linear`` of a layer whose rows have adapters."""
    weight, bias = params["weight"], params.get("bias")
    if isinstance(x, jax.Array):
        dtype = x.dtype if dtype is None else dtype
        x = _quantized(x, input_codes(params), lora)
    if lora.gain is not None:
        if isinstance(x, Adapted):
            low_rank = x.inner, lora.b
            y = quantized_matmul(x.codes, weight, out_dtype=jnp.float32, low_rank=low_rank)
        else:
            assert isinstance(x, jax.Array)
            y = _matmul(x, weight, None, jnp.float32) + lora.product(x).astype(jnp.float32)
        y = lora.scaled(y)
        return (y if bias is None else y + bias.astype(jnp.float32)).astype(dtype)
    if isinstance(x, Adapted):
        low_rank = x.inner, lora.b
        return quantized_matmul(x.codes, weight, bias=bias, out_dtype=dtype, low_rank=low_rank)
    assert isinstance(x, jax.Array) and dtype is not None
    wide = lora.sums_in(dtype)
    return (_matmul(x, weight, bias, wide) + lora.product(x).astype(wide)).astype(dtype)


@overload
def product(
    x: Input, params: Params, dtype: DTypeLike, cfg: StepConfig, *, into: None = None
) -> jax.Array: ...
@overload
def product(
    x: Input,
    params: Params,
    dtype: DTypeLike,
    cfg: StepConfig,
    *,
    into: Params | None,
) -> Input: ...
def product(
    x: Input,
    params: Params,
    dtype: DTypeLike,
    cfg: StepConfig,
    *,
    into: Params | None = None,
) -> Input:
    """``linear``, and with ``into`` what ``norm_linear`` does with it."""
    gate_by = cfg.activation if _is_inner(into, cfg) else None
    if _lora(params) is not None:
        y = linear(x, params, dtype)
        y = y if gate_by is None else swiglu(y, activation=gate_by)
    else:
        assert not isinstance(x, Adapted)  # only layers with adapters take one
        if into is not None and isinstance(x, QTensor):
            codes = _gated_codes(x, params, dtype, cfg, into)
            if codes is not None:
                return codes
        y = _matmul(x, params["weight"], params.get("bias"), dtype, gate_by)
    return y if into is None or gate_by is not None else _gate_for(y, into, cfg)


def _gated_codes(
    x: QTensor, params: Params, dtype: DTypeLike, cfg: StepConfig, into: Params
) -> QTensor | None:
    """Return gate and up's product in the codes of a layer with a static scale, or None."""
    weight, static = params["weight"], _static_codes(into)
    if static is None or cfg.activation != "silu" or params.get("bias") is not None or is_split():
        return None
    if x.dtype != static[0] or not isinstance(weight, QTensor):
        return None
    return gated_matmul(x, weight, static[1], dtype=dtype)


def norm_route(
    stream: Stream, scale: Params | None, router: Params, cfg: StepConfig
) -> tuple[jax.Array, Stream, Routed]:
    """(the norm of the stream, the stream added up, its T tokens' experts and weights ``[T, k]``).

    scale: as for ``norm_linear``.  router: the parameters of a mixture's router.
    """
    options = cfg.experts
    assert options is not None
    width = stream.x.shape[-1]
    is_plain = stream.pending is None and has_plain_scores(options, router)
    if is_plain and scale is not None and cfg.norm.kind == "rms":
        fused = fused_norm_and_route(
            stream.x.reshape(-1, width),
            (scale["weight"], cfg.norm.eps),
            router["weight"],
            router.get("bias"),
            router.get("choice_bias"),
            k=options.n_active,
            normalize=options.normalize,
            scale=options.scale,
            sigmoid=options.scores == "sigmoid",
        )
        if fused is not None:
            y, experts, weights = fused
            weights = with_factors(weights, experts, router)
            return y.reshape(stream.x.shape), stream, (experts, weights)
    x, stream = norm(stream, scale, cfg)
    return x, stream, route(options, x.reshape(-1, width), router)


class Grouping(TypedDict, total=False):
    """The options that ``grouped`` passes to ``grouped_matmul``."""

    weights: jax.Array | None
    gated: Gate | None
    first: jax.Array | None
    out_dtype: DTypeLike | None


def grouped(
    x: jax.Array, params: Params, experts: jax.Array, **options: Unpack[Grouping]
) -> jax.Array:
    """``grouped_matmul`` with the weight and bias of a layer's experts."""
    return grouped_matmul(x, params["weight"], experts, bias=params.get("bias"), **options)


def _matmul(
    x: jax.Array | QTensor,
    weight: Weight,
    bias: jax.Array | None,
    dtype: DTypeLike | None,
    gate_by: str | None = None,
) -> jax.Array:
    """gate_by: the weight is gate and up, and the activation of the one."""
    if isinstance(weight, QTensor) and weight.activations is not None:
        out = _codes_matmul(x, weight, bias, dtype)
    elif isinstance(weight, RowBlocks):
        out = _by_blocks(x, weight, bias, dtype)
    else:
        gated: Options = {} if gate_by is None else {"swiglu": True, "activation": gate_by}
        return quantized_matmul(x, weight, bias=bias, out_dtype=dtype, **gated)
    return out if gate_by is None else swiglu(out, activation=gate_by)


def _codes_matmul(
    x: jax.Array | QTensor, weight: QTensor, bias: jax.Array | None, dtype: DTypeLike | None
) -> jax.Array:
    """The product with a weight that wants its input quantized."""
    dtype = x.dtype if dtype is None else dtype
    if not isinstance(x, QTensor):
        assert weight.activations is not None
        group = weight.group_size if weight.has_input_groups else None
        x = quantize_tokens(x, weight.activations, scale=weight.input_scale, group_size=group)
    return quantized_matmul(x, weight, bias=bias, out_dtype=dtype)


def _by_blocks(
    x: jax.Array | QTensor, weight: RowBlocks, bias: jax.Array | None, dtype: DTypeLike | None
) -> jax.Array:
    """The products with the weight's blocks, one behind the other."""
    ends = list(itertools.accumulate(block.shape[0] for block in weight.blocks))
    biases = [None] * len(ends) if bias is None else jnp.split(bias, ends[:-1])
    parts = [_matmul(x, *part, dtype) for part in zip(weight.blocks, biases, strict=True)]
    return jnp.concatenate(parts, axis=-1)


def _is_inner(into: Params | None, cfg: StepConfig) -> bool:
    """Whether the product itself is to apply the gate."""
    return into is not None and cfg.activation != "gelu" and input_codes(into) is None


def _gated(y: jax.Array, into: Params | None, cfg: StepConfig) -> Input:
    """``activation(gate) * up`` where the product did not do it itself."""
    return y if into is None or _is_inner(into, cfg) else _gate_for(y, into, cfg)


def _gate_for(y: jax.Array, into: Params, cfg: StepConfig) -> Input:
    """``activation(gate) * up`` as the layer ``into`` wants it."""
    codes, lora = input_codes(into), _lora(into)
    if codes is not None and is_split():  # the token's scale needs the other shards
        y, codes = y.astype(jnp.float32), None
    if cfg.activation == "silu":
        if codes is None or lora is None:
            return swiglu(y, quantize=codes)
        return lora.adapted(y, codes, gated=True)[0]
    return _quantized(swiglu(y, activation=cfg.activation), codes, lora)


def _lora(linear: Params) -> Lora | None:
    """Return the layer's adapters, or None if its rows have none."""
    lora = linear.get("lora")
    return None if lora is None or lora.rows is None else lora


def _static_codes(linear: Params) -> StaticCodes | None:
    """Return the codes of a layer whose inputs all have one scale."""
    weight = linear["weight"]
    if not isinstance(weight, QTensor) or weight.activations is None or _lora(linear) is not None:
        return None
    return None if weight.input_scale is None else (weight.activations, weight.input_scale)


def input_codes(linear: Params) -> str | None:
    """Return the dtype to which a layer's input is quantized token by token; None for floats.

    Floats also go to a weight whose input is quantized in groups of columns.

    The op that computes that input can then quantize it in the same pass.
    """
    weight = linear["weight"]
    if isinstance(weight, RowBlocks) and _lora(linear) is None:
        wanted = {input_codes({"weight": block}) for block in weight.blocks}
        return wanted.pop() if len(wanted) == 1 else None
    if isinstance(weight, QTensor) and weight.input_scale is None and not weight.has_input_groups:
        return weight.activations
    return None
