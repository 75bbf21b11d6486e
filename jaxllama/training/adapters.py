"""LoRA adapters as the trained leaves beside frozen weights (arXiv 2106.09685, QLoRA: 2305.14314).

    adapters = first_adapters(cfg, lora, seed)                 {"layer_0": {"mixer": {"qkv": {
                                                                   "q_proj": {"a", "b"}, ...}}}}
    params = joined(cfg, lora, base, adapters, rows, dtype)    the tree that the model multiplies by
    save(directory, cfg, lora, adapters, source)               PEFT's directory

A trained ``b`` is PEFT's own, without alpha / r and without a family's multiplier, so AdamW moves
it as PEFT's. Its rows are in our order. ``joined`` puts a ``model.lora.TrainedLora`` beside each
weight. It is the record that serves adapters, with all rows on adapter 1 and sums in the
activations' dtype. Products of quantized weights get dX from one product with the dequantized
weight.

DoRA (2402.09353) also trains ``m [out]``, the norm of each adapted row, and ``joined`` gives the
record its gains. As in PEFT, norms have no gradient of their own.

Left out: dropout of an adapter's input, adapters of experts and embeddings.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.checkpoints import peft
from jaxllama.checkpoints.folding import unfold_rows
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.lora import TrainedLora, row_norms
from jaxllama.model.param import Path as ParamPath
from jaxllama.model.param import TensorSource
from jaxllama.model.stacked import one_layer_path
from jaxllama.training.tuning import ALL_PRODUCTS, LoraConfig
from jaxllama.typing import Params, ParamsDict, Tree


def first_adapters(cfg: ModelConfig, lora: LoraConfig, seed: int) -> ParamsDict:
    """Return the adapters before the first step, float32, per layer.

    ``a [r, in]`` is uniform within ``in ** -0.5``, as PEFT draws it, and ``b [out, r]`` is zero.
    Raises JaxLlamaError naming a target that is no product of the model's layers.
    """
    tree: ParamsDict = {}
    rng = np.random.default_rng(seed)
    for path, name, source in _targets(cfg, lora):
        node = tree
        for key in (*path, name):
            node = node.setdefault(key, {})
        out, width = source.shape
        bound = width**-0.5
        node["a"] = rng.uniform(-bound, bound, (lora.rank, width)).astype(np.float32)
        node["b"] = np.zeros((out, lora.rank), np.float32)
    return tree


def with_magnitudes(
    cfg: ModelConfig, lora: LoraConfig, adapters: Params, base: Params
) -> ParamsDict:
    """Return the first adapters with DoRA's magnitudes, the norms of the base's rows.

    adapters, base: per layer. A magnitude is PEFT's own, without a family's multiplier, as b is.
    """
    tree = jax.tree.map(lambda leaf: leaf, dict(adapters))
    table = tensor_table(cfg)
    for path, name, source in _targets(cfg, lora):
        node, weight = tree, base
        for key in path:
            node, weight = node[key], weight[key]
        sources = table[(*path, "weight")].sources
        sizes = [source.shape[0] for source in sources]
        nothing = jnp.zeros((len(sources), 1, source.shape[1]))
        norms = row_norms(weight["weight"], nothing, jnp.zeros((sum(sizes), 1)), sizes)
        at = sources.index(source)
        source_norms = jnp.split(norms, np.cumsum(sizes)[:-1])[at]
        node[name] = {**node[name], "m": source_norms / np.float32(source.scale)}
    return tree


def _targets(cfg: ModelConfig, lora: LoraConfig) -> Iterator[tuple[ParamPath, str, TensorSource]]:
    """Yield (path of the product, name of the adapter, tensor) of every adapted tensor."""
    adapted = {source.name for source in peft.products(cfg).values()}
    found = [
        (path[:-1], _name(source), source)
        for path, param in tensor_table(cfg).items()
        for source in param.sources
        if source.name in adapted
    ]
    names = list(dict.fromkeys(name for _, name, _ in found))
    for target in lora.targets:
        if target != ALL_PRODUCTS and target not in names:
            raise JaxLlamaError(
                f"lora.targets: {target!r} is no product of {cfg.name}'s layers; allowed: "
                f"{', '.join(names)}, {ALL_PRODUCTS}"
            )
    for path, name, source in found:
        if name in lora.targets or ALL_PRODUCTS in lora.targets:
            yield path, name, source


def _name(source: TensorSource) -> str:
    """Return the last part of a module's name, such as "q_proj"."""
    return source.name.removesuffix(".weight").rpartition(".")[2]


def joined(
    cfg: ModelConfig,
    lora: LoraConfig,
    base: Params,
    adapters: Params,
    rows: int,
    dtype: jnp.dtype,
) -> ParamsDict:
    """Return the frozen tree with the adapters beside its weights, for ``rows`` rows.

    base, adapters: both per layer or both stacked (``model.stacked``). dtype: of activations.
    """
    table = tensor_table(cfg)

    def walk(node: Params, added: Params, path: ParamPath) -> ParamsDict:
        layer_path, lead = one_layer_path(path) if path else ((), 0)
        param = table.get((*layer_path, "weight"))
        if param is not None and "weight" in node:
            return {**node, "lora": _record(param.sources, added, lead, node["weight"])}
        tree = dict(node)
        for key, part in added.items():
            tree[key] = walk(node[key], part, (*path, key))
        return tree

    def _record(
        sources: tuple[TensorSource, ...], added: Params, lead: int, weight: Tree
    ) -> TrainedLora:
        leading = jax.tree.leaves(added)[0].shape[:lead]
        first, second = [], []
        for source in sources:
            out, width = source.shape
            pair = added.get(_name(source))
            if pair is None:
                first.append(jnp.zeros((*leading, lora.rank, width), dtype))
                second.append(jnp.zeros((*leading, out, lora.rank), dtype))
            else:
                first.append(pair["a"].astype(dtype))
                second.append((pair["b"] * np.float32(lora.scale * source.scale)).astype(dtype))
        a = jnp.stack(first, axis=lead)
        of_rows = jnp.ones((*leading, rows), jnp.int32)
        gain = None
        if lora.dora:
            found = functools.partial(_gain, lora, sources)
            # One layer's weight in floats at a time.
            gain = lax.map(found, (weight, added)) if lead else found((weight, added))
        return TrainedLora(jnp.expand_dims(a, lead), tuple(second), of_rows, gain)

    return walk(base, adapters, ())


def _gain(
    lora: LoraConfig, sources: tuple[TensorSource, ...], operands: tuple[Tree, Params]
) -> jax.Array:
    """Return the gains of one product, float32 ``[1, out]``."""
    weight, added = operands
    sizes = [source.shape[0] for source in sources]
    first, second = [], []
    for source in sources:
        pair = added.get(_name(source))
        if pair is None:
            first.append(jnp.zeros((lora.rank, source.shape[1])))
            second.append(jnp.zeros((source.shape[0], lora.rank)))
        else:
            first.append(pair["a"])
            second.append(pair["b"] * np.float32(lora.scale * source.scale))
    parts = jax.lax.stop_gradient((weight, jnp.stack(first), jnp.concatenate(second)))
    norms = jnp.split(row_norms(*parts, sizes), np.cumsum(sizes)[:-1])
    gains = [
        added[_name(source)]["m"] * np.float32(source.scale) / norm
        if _name(source) in added
        else jnp.ones_like(norm)
        for source, norm in zip(sources, norms, strict=True)
    ]
    return jnp.concatenate(gains)[None]


def factors(cfg: ModelConfig, lora: LoraConfig, adapters: Params) -> peft.Factors:
    """Return the factors as ``peft.read`` would, by the checkpoint's tensor."""
    found = {}
    for source, a, b, *magnitude in _pairs(cfg, lora, adapters):
        more = (magnitudes * np.float32(source.scale) for magnitudes in magnitude)
        found[source.name] = a, b * np.float32(lora.scale * source.scale), *more
    return found


def _pairs(
    cfg: ModelConfig, lora: LoraConfig, adapters: Params
) -> Iterator[tuple[TensorSource, *tuple[np.ndarray, ...]]]:
    for path, name, source in _targets(cfg, lora):
        node = adapters
        for key in (*path, name):
            node = node[key]
        parts = jax.device_get([node[key] for key in ("a", "b", "m") if key in node])
        yield source, *map(np.asarray, parts)


def save(
    directory: Path, cfg: ModelConfig, lora: LoraConfig, adapters: Params, source: str | None
) -> None:
    """Write adapters as PEFT's directory. source: the base model's name, for readers.

    adapters: per layer.
    """
    modules = {}
    for tensor, a, *ours in _pairs(cfg, lora, adapters):
        theirs = (
            unfold_rows(tensor, magnitudes * tensor.factor(magnitudes.ndim)) for magnitudes in ours
        )
        modules[tensor.name.removesuffix(".weight")] = a, *map(np.ascontiguousarray, theirs)
    peft.save(directory, modules, lora.rank, lora.alpha, source)
