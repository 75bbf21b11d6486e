"""quantize_params: a parameter tree rounded to nearest, as a recipe says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.model import flax_state
from jaxllama.progress import working
from jaxllama.quantization.pipeline import round_model
from jaxllama.quantization.scheme import Recipe, is_packed, parse, quantize_leaf, untie


def quantize_params(
    params: Mapping[str, Any],
    scheme: str | Recipe,
    *,
    cfg: ModelConfig | None = None,
    scale_dtype: DTypeLike | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Round a tree of parameters to QTensors; weights that are already quantized stay.

    Parameters
    ----------
    params : mapping
        The parameters, as ``init_params`` or ``load`` returns them.
    scheme : str or Recipe
        A scheme such as "w8a16", or a mixture such as "w4a16,down=w8a16".
    cfg : ModelConfig, optional
        The model's configuration. With it w4a16's grids are fitted to the inputs that random tokens
        give each weight, as ``load`` does. That lowers KL by a third.
    scale_dtype : optional
        Dtype of the scales; see ``Scheme.scale_dtype``.
    progress : bool
        Show a bar on stderr.

    Returns
    -------
    dict
        The tree with QTensors. A tied head is quantized as a copy, ``params["head"]``, beside the
        embedding; the model uses it where it is present.

    Raises
    ------
    JaxLlamaError
        If ``scheme`` is no recipe, needs calibration, or has a group size that does not divide a
        weight (the error names it).

    Notes
    -----
    On a CPU a LanguageModel lays the tree out for the CPU's handlers. The pure functions run the
    tree as it is, in XLA's exact and slower form, or after ``pallas_kernels.cpu.prepare_tree``.
    """
    flax_state.register()
    recipe = parse(scheme) if isinstance(scheme, str) else scheme
    recipe.check_rounding()
    packed = any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed)))
    if cfg is not None and not packed and any(one.is_fitted for one in recipe.schemes):
        return round_model(cfg, dict(params), recipe, scale_dtype, progress)
    params, recipe = untie(params, recipe)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    with working(f"quantizing to {recipe.text}", total, progress) as advance:

        def one(path: Sequence[Any], leaf: Any) -> Any:
            out = quantize_leaf([key.key for key in path], leaf, recipe, scale_dtype)
            if progress:
                jax.block_until_ready(out)
                advance(sum(part.size for part in jax.tree.leaves(leaf)))
            return out

        return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_packed)
