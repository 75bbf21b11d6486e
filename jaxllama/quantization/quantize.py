"""quantize_params: round a parameter tree to nearest, by a recipe."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.model import flax_state
from jaxllama.progress import working
from jaxllama.quantization.pipeline import round_model
from jaxllama.quantization.scheme import Packed, Recipe, is_packed, parse, quantize_leaf, untie
from jaxllama.typing import DictKey, Leaf, Params, ParamsDict


def quantize_params(
    params: Params,
    scheme: str | Recipe,
    *,
    cfg: ModelConfig | None = None,
    scale_dtype: DTypeLike | None = None,
    progress: bool = False,
) -> ParamsDict:
    """Return the tree with its weights rounded to QTensors; weights already quantized stay.

    A tied head becomes ``params["head"]`` beside the embedding (see ``scheme``), and the model uses
    it if it exists. On a CPU a LanguageModel converts the tree to the layout of the CPU's handlers.
    The pure functions take the tree unchanged, in XLA's exact and slower form, or after
    ``pallas_kernels.cpu.prepare_tree``.

    Parameters
    ----------
    params : mapping
        Parameter tree of arrays ``[out, in]``.
    scheme : str or Recipe
        Recipe of ``quantization.scheme``, such as "w4a16,down=w8a16".
    cfg : ModelConfig or None
        The model's config. With it w4a16's grids are fitted to each weight's inputs for random
        tokens, as in ``load``, which lowers the KL by a third. Models whose layers share keys or
        have inputs of their own (Gemma 4 E2B) are rounded without a fit.
    scale_dtype : data-type or None
        See ``Scheme.scale_dtype``.
    progress : bool
        Whether to show a bar on stderr.

    Returns
    -------
    dict
        The tree, with a QTensor in place of each weight that the scheme rounds.

    Raises
    ------
    JaxLlamaError
        For text that is no recipe, for a scheme that needs calibration, and for a weight that no
        group size divides. The message names it.
    """
    flax_state.register()
    recipe = parse(scheme) if isinstance(scheme, str) else scheme
    recipe.check_rounding()
    packed = any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed)))
    is_fitted = not packed and any(one.is_fitted for one in recipe.schemes)
    if cfg is not None and not cfg.needs_model and is_fitted:
        return round_model(cfg, dict(params), recipe, scale_dtype, progress)
    params, recipe = untie(params, recipe)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    with working(f"quantizing to {recipe.text}", total, progress) as advance:

        def one(path: Sequence[DictKey], leaf: jax.Array | Packed) -> Leaf:
            out = quantize_leaf([key.key for key in path], leaf, recipe, scale_dtype)
            if progress:
                jax.block_until_ready(out)
                advance(sum(part.size for part in jax.tree.leaves(leaf)))
            return out

        return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_packed)
