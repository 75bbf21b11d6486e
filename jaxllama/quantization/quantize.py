"""Round a model's parameters to nearest, by a recipe.

    quantize_params(params, scheme, cfg=cfg) -> params      a whole tree
    put = Rounder(recipe, keep, cfg)                        one parameter after the other, as a
    params = put.finish(params)                             loader reads them

Both give the same weights. ``load`` rounds with a ``Rounder`` on one device, on a mesh and under a
policy.

With the model's config, grids that are searched for (w4a16's) are fitted to the inputs that each
weight has for random tokens. Random tokens too show which inputs of a weight are large, and that a
few exceed all others together (massive activations, arXiv 2402.17762). SmolLM2-135M in w4a16 has a
KL of 0.21, and 0.30 with grids that ignore the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.model import flax_state
from jaxllama.progress import working
from jaxllama.quantization.calibration import advance, embed
from jaxllama.quantization.pipeline import Run
from jaxllama.quantization.scheme import Packed, Recipe, is_packed, parse, quantize_leaf, untie
from jaxllama.typing import DictKey, Leaf, Params, ParamsDict, Tree
from pallas_kernels.qtensor import leaves_of

Path = tuple[str, ...]
_RANDOM_TOKENS = 128  # tokens of a row


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
    packed = bool(leaves_of(params, Packed))
    is_fitted = not packed and any(quantize_leaf.is_fitted for quantize_leaf in recipe.schemes)
    if cfg is not None and _runs_alone(cfg) and is_fitted:
        return _fitted(params, Rounder(recipe, cfg=cfg, scale_dtype=scale_dtype), progress)
    params, recipe = untie(params, recipe)
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    with working(f"quantizing to {recipe.text}", total, progress) as advance:

        def quantized_leaf(path: Sequence[DictKey], leaf: jax.Array | Packed) -> Leaf:
            out = quantize_leaf([key.key for key in path], leaf, recipe, scale_dtype)
            if progress:
                jax.block_until_ready(out)
                advance(sum(part.size for part in jax.tree.leaves(leaf)))
            return out

        return jax.tree_util.tree_map_with_path(quantized_leaf, params, is_leaf=is_packed)


class Rounder:
    """Rounds the parameters of a model to nearest as they arrive, in the order of its table.

    ``put(path, leaf)`` returns the tree's value of a parameter, or None for one that ``finish``
    puts into the tree. A fit needs all floats of one layer, and no more: the layers before are
    rounded and kept by then.

    recipe: the schemes.  keep: ``keep(path, leaf)`` returns the tree's value of a rounded leaf.
    cfg: the model's config, for the fit.  scale_dtype: as for ``quantize_params``.
    """

    def __init__(
        self,
        recipe: Recipe,
        keep: Callable[[Path, Leaf], Tree] = lambda _, leaf: leaf,
        cfg: ModelConfig | None = None,
        scale_dtype: DTypeLike | None = None,
    ) -> None:
        recipe.check_rounding()
        self._recipe, self._keep, self._scale_dtype = recipe, keep, scale_dtype
        is_fitted = any(scheme.is_fitted for scheme in recipe.schemes)
        self._cfg = cfg if cfg is not None and is_fitted and _runs_alone(cfg) else None
        self._run = Run(recipe, "rtn", scale_dtype, is_measured=False)
        self._embed: ParamsDict = {}  # in floats
        self._held: ParamsDict = {}  # the present layer, and what belongs to the head
        self._hidden: list[jax.Array] | None = None  # before the present layer
        self._kept: dict[Path, Tree] = {}  # the tree's values of leaves that were held

    def __call__(self, path: Path, leaf: Leaf) -> Tree:
        """Return the tree's value of the next parameter, or None; see the class."""
        if path[0] == "embed" and not is_packed(leaf):
            self._embed[path[-1]] = leaf
        is_layer = path[0].startswith("layer_")
        if self._cfg is None or path[0] == "embed":
            return self._keep(path, self._rounded(path, leaf))
        if is_layer or path[0] in ("norm", "head"):
            if is_layer and path[0] not in self._held:
                self._round_layer()
            _put(self._held, path, leaf)
            return None
        return self._keep(path, leaf)

    def finish(self, params: Params) -> ParamsDict:
        """Return the whole tree of the values that the calls returned.

        A tied head that the recipe rounds becomes ``params["head"]``.
        """
        params, embedding = dict(params), self._embed if "weight" in self._embed else None
        if embedding is not None and "head" not in params and "head" not in self._held:
            floats, recipe = untie({"embed": embedding}, self._recipe)
            if "head" in floats:
                self._recipe = recipe
                self._run = Run(recipe, "rtn", self._scale_dtype, is_measured=False)
                params["embed"] = {"weight": params["embed"]["weight"]}
                for name, leaf in floats["head"].items():
                    _put(params, ("head", name), self(("head", name), leaf))
        if self._cfg is not None:
            self._round_layer()
            self._round_head(self._cfg)
        for path, value in self._kept.items():
            _put(params, path, value)
        self._embed, self._hidden, self._kept = {}, None, {}
        return params

    def _rounded(self, path: Path, leaf: Leaf) -> Leaf:
        return quantize_leaf(path, leaf, self._recipe, self._scale_dtype)

    def _round_layer(self) -> None:
        """Round the layer that is held, if there is one, and take the stream through it."""
        name = next((name for name in self._held if name.startswith("layer_")), None)
        if name is None:
            return
        cfg = self._cfg
        assert cfg is not None
        if self._hidden is None:
            width = min(_RANDOM_TOKENS, cfg.max_position)
            tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=(4, width), dtype="i4")
            dtype = self._embed["weight"].dtype
            self._hidden = embed(cfg, {"embed": self._embed}, tokens, dtype)
        layer = jax.tree.map(jnp.asarray, self._held.pop(name))
        part = cfg.layers[int(name.removeprefix("layer_"))]
        done, _ = self._run.layer(part, name, layer, self._hidden)
        self._hidden = advance(part, done, self._hidden)
        self._keep_all({name: done})

    def _round_head(self, cfg: ModelConfig) -> None:
        held = self._held
        if "head" in held and self._recipe.of("head") is not None:
            held = jax.tree.map(jnp.asarray, held)
            assert self._hidden is not None
            last = {"norm": held["norm"], "head": held["head"]}
            held = {**held, **self._run.layer(cfg, "", last, self._hidden)[0]}
        self._keep_all(held)
        self._held = {}

    def _keep_all(self, tree: Params) -> None:
        self._kept |= {path: self._keep(path, leaf) for path, leaf in _flat(tree).items()}


def in_order(params: Params) -> list[str]:
    """Return the names of a tree's parts in the order in which a ``Rounder`` takes them."""
    layers = [name for name in params if name.startswith("layer_")]
    layers.sort(key=lambda name: int(name.removeprefix("layer_")))
    first = [name for name in ("embed", *layers) if name in params]
    return first + [name for name in params if name not in set(first)]


def _flat(tree: Params) -> dict[Path, Leaf]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_packed)
    return {tuple(key.key for key in path): leaf for path, leaf in leaves}


def _put(tree: ParamsDict, path: Path, value: Tree) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value


def _runs_alone(cfg: ModelConfig) -> bool:
    """Return whether the layers run one by one, with weights of their own."""
    return not cfg.needs_model and cfg.shared_blocks is None


def _fitted(params: Params, put: Rounder, progress: bool) -> ParamsDict:
    """Return the tree that a Rounder makes of a whole tree."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    found: ParamsDict = {}
    with working("quantizing", total, progress) as bar:
        for name in in_order(params):
            for path, leaf in _flat({name: params[name]}).items():
                _put(found, path, put(path, leaf))
            bar(sum(leaf.nbytes for leaf in jax.tree.leaves(params[name])))
        return put.finish(found)
