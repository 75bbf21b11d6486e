"""LoRA adapters as the trained leaves beside frozen weights (arXiv 2106.09685, QLoRA: 2305.14314).

    adapters = first_adapters(cfg, lora, seed)                 {"layer_0": {"mixer": {"qkv": {
                                                                   "q_proj": {"a", "b"}, ...}}}}
    params = joined(cfg, lora, base, adapters, rows, dtype)    the tree that the model multiplies by
    save(directory, cfg, lora, adapters, source)               PEFT's directory

A trained ``b`` is PEFT's own, without alpha / r and without a family's multiplier, so AdamW moves
it as PEFT's. Its rows are in our order. ``joined`` puts a ``model.lora.Lora`` beside each weight,
the same record that serves adapters, with all rows on adapter 1. So training and serving run the
same code, and products of quantized weights get dX from one product with the dequantized weight.

Left out: DoRA, dropout of an adapter's input, adapters of experts and embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.checkpoints import peft
from jaxllama.checkpoints.folding import unfold
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.lora import Lora
from jaxllama.model.param import Path as ParamPath
from jaxllama.model.param import TensorSource
from jaxllama.model.params import param_table
from jaxllama.model.stacked import one_layer_path
from jaxllama.training.tuning import ALL_PRODUCTS, LoraConfig
from jaxllama.typing import Params, ParamsDict


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


def _targets(cfg: ModelConfig, lora: LoraConfig) -> Iterator[tuple[ParamPath, str, TensorSource]]:
    """Yield (path of the product, name of the adapter, tensor) of every adapted tensor."""
    adapted = {source.name for source in peft.products(cfg).values()}
    found = [
        (path[:-1], _name(source), source)
        for path, param in param_table(cfg).items()
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
    table = param_table(cfg)

    def walk(node: Params, added: Params, path: ParamPath) -> ParamsDict:
        own, lead = one_layer_path(path) if path else ((), 0)
        param = table.get((*own, "weight"))
        if param is not None and "weight" in node:
            return {**node, "lora": _record(param.sources, added, lead)}
        tree = dict(node)
        for key, part in added.items():
            tree[key] = walk(node[key], part, (*path, key))
        return tree

    def _record(sources: tuple[TensorSource, ...], added: Params, lead: int) -> Lora:
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
        return Lora(jnp.expand_dims(a, lead), tuple(second), of_rows)

    return walk(base, adapters, ())


def factors(cfg: ModelConfig, lora: LoraConfig, adapters: Params) -> peft.Factors:
    """Return the factors as ``peft.read`` would, by the checkpoint's tensor."""
    found = {}
    for source, a, b in _pairs(cfg, lora, adapters):
        found[source.name] = a, b * np.float32(lora.scale * source.scale)
    return found


def _pairs(
    cfg: ModelConfig, lora: LoraConfig, adapters: Params
) -> Iterator[tuple[TensorSource, np.ndarray, np.ndarray]]:
    for path, name, source in _targets(cfg, lora):
        node = adapters
        for key in (*path, name):
            node = node[key]
        a, b = jax.device_get((node["a"], node["b"]))
        yield source, np.asarray(a), np.asarray(b)


def save(
    directory: Path, cfg: ModelConfig, lora: LoraConfig, adapters: Params, source: str | None
) -> None:
    """Write adapters as PEFT's directory. source: the base model's name, for readers.

    adapters: per layer.
    """
    modules = {}
    for tensor, a, b in _pairs(cfg, lora, adapters):
        theirs = unfold(tensor, b * np.float32(tensor.scale))
        modules[tensor.name.removesuffix(".weight")] = a, np.ascontiguousarray(theirs)
    peft.save(directory, modules, lora.rank, lora.alpha, source)
