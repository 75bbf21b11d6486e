"""Weights of a model that an engine runs: new ones, and none while the engine sleeps.

replaced(lm, params) -> LanguageModel     the same model with other weights
without_weights(lm) -> LanguageModel      the same model with shapes in place of its weights
"""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp

from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.quantization.scheme import Scheme, is_packed, round_weight
from jaxllama.typing import ArrayOrNumpy, Params, Tree
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.qtensor import QTensor, RowBlocks
from pallas_kernels.rounding import FORMATS


def replaced(lm: LanguageModel, params: Params) -> LanguageModel:
    """Return a model with other weights, which lie where the old ones lie.

    Parameters
    ----------
    lm : LanguageModel
        The model, resident on its devices, or ``without_weights``.
    params : dict
        The new tree: the paths and shapes of the old one. Floats are cast to the dtype, or
        quantized by the scheme, of the weight that they replace.

    Raises
    ------
    JaxLlamaError
        Names the first leaf that differs.
    """
    if "head" in lm.params and "head" not in params and "embed" in params:
        # A tied head that is quantized has codes of its own beside the embedding.
        params = {**params, "head": params["embed"]}
    for name in lm.params:
        if name not in params:
            raise JaxLlamaError(f"update_params: {name!r} is missing")
    params = _like(lm.params, params, "")
    # The device's kernels may have a layout of their own, in which the model holds its weights.
    laid_out = params if lm.exact else lm.executor.laid_out(params)
    old, structure = jax.tree_util.tree_flatten_with_path(lm.params)
    new = jax.tree_util.tree_flatten_with_path(laid_out)[0]
    theirs = {jax.tree_util.keystr(path): _about(leaf) for path, leaf in new}
    for path, leaf in old:
        name = jax.tree_util.keystr(path)
        found = theirs.pop(name, "missing")
        if found != _about(leaf):
            raise JaxLlamaError(f"update_params: {name} is {found}, not {_about(leaf)}{_HINT}")
    if theirs:
        raise JaxLlamaError(f"update_params: the model has no {next(iter(theirs))}{_HINT}")
    placed = [
        jax.device_put(leaf, was.sharding)
        if isinstance(was, (jax.Array, jax.ShapeDtypeStruct))
        else leaf
        for (_, leaf), (_, was) in zip(new, old, strict=True)
    ]
    return with_params(lm, jax.tree.unflatten(structure, placed))


def without_weights(lm: LanguageModel) -> LanguageModel:
    """Return the model with each weight's shape, dtype and sharding in its place."""

    def shape(leaf: Tree) -> Tree:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return with_params(lm, jax.tree.map(shape, lm.params))


def with_params(lm: LanguageModel, params: Params) -> LanguageModel:
    """Return a copy with other parameters, which are in the model's layout already."""
    found = copy.copy(lm)
    object.__setattr__(found, "params", params)
    return found


def _like(old: Tree, new: Tree, path: str) -> Tree:
    """Return ``new`` with its floats cast or quantized as ``old``'s."""
    if isinstance(new, dict):
        return {
            key: _like(old[key], part, f"{path}/{key}" if path else key) if key in old else part
            for key, part in new.items()
        }
    _check_blocks(old, new, path)
    is_floats = hasattr(new, "dtype") and jnp.issubdtype(new.dtype, jnp.floating)
    if not is_floats or is_packed(new) or getattr(old, "shape", None) != new.shape:
        return new
    if isinstance(old, (QTensor, CpuWeight)):
        scheme, scale_dtype = _scheme_of(old, path)
        return round_weight(jnp.asarray(new), scheme, path, scale_dtype)
    if jnp.issubdtype(old.dtype, jnp.floating) and old.dtype != new.dtype:
        return jnp.asarray(new).astype(old.dtype)
    return new


def _check_blocks(old: Tree, new: Tree, path: str) -> None:
    """Raise JaxLlamaError if 128 rows of ``old`` share scales, and those of ``new`` do not."""
    if isinstance(old, RowBlocks) and isinstance(new, RowBlocks):
        for block, other in zip(old.blocks, new.blocks, strict=False):
            _check_blocks(block, other, path)
        return
    if not isinstance(old, QTensor) or not isinstance(new, QTensor) or not old.has_blocks:
        return
    if not new.has_blocks and not new.found_blocks().has_blocks:
        raise JaxLlamaError(
            f"update_params: {path}: rows have scales of their own, where 128 rows share theirs"
        )


def _scheme_of(weight: QTensor | CpuWeight, path: str) -> tuple[Scheme, str]:
    """Return (the scheme that gives codes of this form, dtype of its scales)."""
    form, activations = (
        (weight.outline, weight.form.activations)
        if isinstance(weight, CpuWeight)
        else (weight, weight.activations)
    )
    codes, scale_dtype = jnp.dtype(form.dtype).name, jnp.dtype(form.scale.dtype).name
    groups = form.scale.shape[-1]
    if codes == "float4_e2m1fn":
        name = "mxfp4" if form.unit is None else "nvfp4"
        found = Scheme(name, group_size=FORMATS[name].group, activations=activations)
    elif codes == "float8_e4m3fn" and (
        groups > 1 or (activations is None and form.shape[-1] <= FORMATS["fp8-block"].group)
    ):
        group = FORMATS["fp8-block"].group
        found = Scheme("fp8-block", group_size=group, activations=activations)
    else:
        size = None if groups == 1 and form.zero is None else form.group_size
        found = Scheme(codes, size, form.zero is not None, activations)
    is_interleaved = isinstance(weight, QTensor) and weight.interleaved
    is_moved = weight.columns is not None and not is_interleaved
    fixed = is_moved or weight.input_scale is not None
    if fixed or (form.zero is not None and jnp.issubdtype(form.zero.dtype, jnp.floating)):
        raise JaxLlamaError(
            f"update_params: {path}: this form of codes came with its calibration; pass quantized "
            "weights of the same form"
        )
    return found, scale_dtype


_HINT = "; the new tree needs the old one's paths and shapes"


def _about(leaf: ArrayOrNumpy) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"
