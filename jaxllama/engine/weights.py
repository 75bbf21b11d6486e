"""New weights for a model that an engine runs.

replaced(lm, params) -> LanguageModel     the same model with other weights
"""

from __future__ import annotations

import dataclasses

import jax

from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.typing import ArrayOrNumpy, Params


def replaced(lm: LanguageModel, params: Params) -> LanguageModel:
    """Return a model with other weights, which lie where the old ones lie.

    Parameters
    ----------
    lm : LanguageModel
        The model, resident on its devices.
    params : dict
        The new tree: the paths, shapes and dtypes of the old one.

    Raises
    ------
    JaxLlamaError
        Names the first leaf that differs.
    """
    for name in lm.params:
        if name not in params:
            raise JaxLlamaError(f"update_params: {name!r} is missing")
    # The CPU's handlers have a layout of their own, in which the model holds its weights.
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
        jax.device_put(leaf, was.sharding) if isinstance(was, jax.Array) else leaf
        for (_, leaf), (_, was) in zip(new, old, strict=True)
    ]
    return dataclasses.replace(lm, params=jax.tree.unflatten(structure, placed))


_HINT = "; quantize new weights as the model's are"


def _about(leaf: ArrayOrNumpy) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"
