"""The parameters of a layer: its norms, mixer and feed-forward, and what its form adds.

    layer_table(cfg, index, source) -> {path within the layer: Param}
    model_table(cfg, source)        -> {path: Param}        tables that all layers of a form share

This file imports no jax.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllama.config import (
    UNMULTIPLIED,
    Eagle,
    Inputs,
    LayerConfig,
    ModelConfig,
    Parallel,
    Shared,
    SharedBlocks,
)
from jaxllama.model.experts import parameters as experts
from jaxllama.model.mixers import MIXERS
from jaxllama.model.names import Names, Source
from jaxllama.model.param import (
    Param,
    Path,
    TensorSource,
    fused,
    norm_rows,
    rows,
    tensor,
    transposed,
    written,
)
from jaxllama.typing import Options


def layer_table(cfg: ModelConfig, index: int, source: Source) -> dict[Path, Param]:
    """Return the parameters of layer ``index``, in the order of the forward pass."""
    layer, names = cfg.layers[index], source.names
    form, d = layer.form, layer.d_model
    if isinstance(form, Shared) and form.block is not None:
        return _shared_block(cfg.layers, index, form.block, source)
    prefix, behind = _prefixes(cfg.layers, index, names)
    mixer_norm, feed_norm = names.mixer_norm, names.mlp_norm
    if isinstance(form, Parallel) and form.two_norms and names.parallel_norms is not None:
        mixer_norm, feed_norm = names.parallel_norms
    table: dict[Path, Param] = {}
    if layer.learned_positions is not None:
        n_places = cfg.max_position + layer.learned_positions
        table["positions", "weight"] = tensor(f"{names.positions}.weight", n_places, d)
    if layer.embed_norm:
        table |= norm(layer, "embed_norm", names.embed_norm, source)
    if form.mixer_norm:
        table |= norm(layer, "mixer_norm", f"{prefix}.{mixer_norm}", source)
    if isinstance(form, Eagle):
        table |= norm(layer, "embedded_norm", f"{prefix}.{names.embedded_norm}", source)
    mixer = MIXERS[layer.kind].parameters.table(layer, f"{prefix}.", source)
    table |= {("mixer", *path): param for path, param in mixer.items()}
    scale = source.stored.residual  # what the layer adds is multiplied
    if form.post_norms:
        table |= norm(layer, "mixer_out_norm", f"{prefix}.{names.mixer_out_norm}", source, scale)
    if layer.feed is not None:
        if form.feed_norm:
            table |= norm(layer, "mlp_norm", f"{behind}.{feed_norm}", source)
        mlp = _feed(layer, behind, source)
        table |= {("mlp", *path): param for path, param in mlp.items()}
        if form.post_norms or (layer.experts is not None and layer.experts.out_norm):
            table |= norm(layer, "mlp_out_norm", f"{behind}.{names.mlp_out_norm}", source, scale)
    if isinstance(form, Inputs):
        table |= _layer_inputs(layer, form, behind, source)
    return table


def model_table(cfg: ModelConfig, source: Source) -> dict[Path, Param]:
    """Return the parameters that the form of the layers has once for all of them."""
    form = cfg.layers[0].form
    if not isinstance(form, Inputs) or form.tables is None:
        return {}
    names, tables = source.names.layer_inputs, form.tables
    width = tables.n_layers * tables.width
    table, norm = f"{names.table}.weight", f"{names.norm}.weight"
    return {
        ("inputs", "table", "weight"): tensor(table, tables.vocab_size, width),
        ("inputs", "project", "weight"): tensor(f"{names.project}.weight", width, cfg.d_model),
        ("inputs", "norm", "weight"): tensor(norm, tables.width, mean=1.0, std=0.0),
    }


def norm(
    layer: LayerConfig, path: str, name: str, source: Source, scale: float = 1.0
) -> dict[Path, Param]:
    """Return the parameters of a layer's norm, under the name that a file has."""
    prefix, _, last = name.rpartition(".")
    other, present = f"{prefix}.{source.names.other_norms.get(last, last)}", source.present
    is_other = f"{name}.weight" not in present and f"{other}.weight" in present
    name, offset = other if is_other else name, source.stored.norm_offset
    return norm_rows((path,), name, layer.d_model, layer.norm, offset, scale)


def _feed(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    names = source.names
    if layer.experts is not None:
        return experts.table(layer, f"{prefix}.", source)
    is_other = f"{prefix}.{names.other_mlp}{names.gate_up[0]}.weight" in source.present
    return dense_table(layer, f"{prefix}.{names.other_mlp if is_other else names.mlp}", source)


def _prefixes(layers: Sequence[LayerConfig], index: int, names: Names) -> tuple[str, str]:
    """Return the prefixes of a layer's mixer and of its feed-forward."""
    if names.shared:
        reads = [isinstance(layer.form, Shared) and layer.form.reads for layer in layers]
        layer = names.layer.format(index - sum(reads[: index + 1])) + names.reads * reads[index]
        return layer, layer
    if names.is_paired:
        return names.layer.format(index // 2), names.layer.format(index // 2)
    if not names.is_halved:
        return names.layer.format(index), names.layer.format(index)
    first = 2 * index - sum(layer.feed is None for layer in layers[:index])
    return names.layer.format(first), names.layer.format(first + 1)


def _layer_inputs(
    layer: LayerConfig, form: Inputs, prefix: str, source: Source
) -> dict[Path, Param]:
    """Return the parameters of a layer's further input, and its scale."""
    names, d, found = source.names.layer_inputs, layer.d_model, dict[Path, Param]()
    if form.tables is not None:
        width = form.tables.width
        inputs = {
            ("gate", "weight"): tensor(f"{prefix}.{names.gate}.weight", width, d),
            **written("out", f"{prefix}.{names.out}", d, width, False),
            ("norm", "weight"): tensor(f"{prefix}.{names.out_norm}.weight", d, mean=1.0, std=0.0),
        }
        found |= {("inputs", *path): param for path, param in inputs.items()}
    if form.layer_scale:
        name = f"{prefix}.{source.names.layer_scale}"
        found["scale", "weight"] = tensor(name, 1, mean=1.0, std=0.0)
    return found


def _shared_block(
    layers: Sequence[LayerConfig], index: int, block: SharedBlocks, source: Source
) -> dict[Path, Param]:
    """Return the parameters of layer ``index``, whose block other layers have too."""
    layer, names = layers[index], source.names
    cfg, feed = layer.mixer, layer.feed
    assert feed is not None
    places = [i for i, layer in enumerate(layers) if layer.kind == "attention"]
    turn, d, width = places.index(index), layer.d_model, 2 * layer.d_model
    whole = f"{_prefixes(layers, places[turn % block.count], names)[0]}.{names.shared}"
    attention, mlp = f"{whole}{names.mixer}", f"{whole}{names.mlp}"
    q, kv, rank = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim, block.rank
    parts = list(zip(names.qkv, (q, kv, kv), strict=True))
    scales = source.stored.query, 1.0, 1.0
    qkv = rows(
        [
            TensorSource(f"{attention}{name}.weight", (n, width), scale)
            for (name, n), scale in zip(parts, scales, strict=True)
        ]
    )
    before = f"{whole}{names.mixer_norm}.weight"
    table = {
        ("mixer_norm", "weight"): tensor(before, width, mean=1.0, std=0.0),
        ("mixer", "qkv", "weight"): qkv,
        ("mixer", "o", "weight"): tensor(f"{attention}{names.o}.weight", d, q),
        ("mlp_norm", "weight"): tensor(f"{whole}{names.mlp_norm}.weight", d, mean=1.0, std=0.0),
    }
    if block.attention_adapters:
        lists = [f"{attention}linear_{name[0]}_adapter_list.{turn}" for name in names.qkv]
        ins = [TensorSource(f"{name}.0.weight", (rank, width)) for name in lists]
        outs = [
            TensorSource(f"{name}.1.weight", (n, rank), scale)
            for name, (_, n), scale in zip(lists, parts, scales, strict=True)
        ]
        table["mixer", "adapter_in", "weight"] = rows(ins)
        table["mixer", "adapter_out", "weight"] = rows(outs)
    adapter = f"{mlp}gate_up_proj_adapter_list.{turn}"
    inner, out = 2 * feed.d_ff, f"{_prefixes(layers, index, names)[0]}.linear.weight"
    products = {
        **fused("gate_up", [(f"{mlp}{names.gate_up[0]}", inner, {})], d, feed.mlp_bias),
        ("adapter_in", "weight"): tensor(f"{adapter}.0.weight", rank, d),
        ("adapter_out", "weight"): tensor(f"{adapter}.1.weight", inner, rank),
        **written("down", f"{mlp}{names.down}", d, feed.d_ff, feed.mlp_bias),
        ("out", "weight"): tensor(out, d, d),
    }
    return table | {("mlp", *path): param for path, param in products.items()}


def dense_table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """Gate and up fused by rows, and down.  Old checkpoints of flash-linear-attention have gate and
    up in one tensor, too."""
    feed, names, present = layer.feed, source.names, source.present
    assert feed is not None
    products = source.stored.products or UNMULTIPLIED
    d, d_ff, down = layer.d_model, feed.d_ff, f"{prefix}{names.down}"
    residual = source.residual(layer) * products.down
    last = written("down", down, d, d_ff, feed.mlp_bias, residual, names.is_transposed)
    if feed.inner_norms:
        name, offset = f"{prefix}{names.inner_norms[1]}", source.stored.norm_offset
        last = norm_rows(("inner_norm",), name, d_ff, layer.norm, offset) | last
    if not feed.gated_mlp:
        order = transposed(d_ff) if names.is_transposed else {}
        up = fused("up", [(f"{prefix}{names.gate_up[-1]}", d_ff, order)], d, feed.mlp_bias)
        if feed.activation == "xielu":
            shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
            scalars = (
                TensorSource(f"{prefix}act_fn.{key}", shape) for key, shape in shapes.items()
            )
            up["xielu", "weight"] = Param(tuple(scalars), (4,), mean=0.2)
        return up | last
    gate_up = [f"{prefix}{name}" for name in names.gate_up]
    if f"{gate_up[0]}.weight" in present and f"{gate_up[-1]}.weight" not in present:
        gate_up = gate_up[:1]
    folds: list[Options] = [{} for _ in gate_up]
    if products.gate != 1.0:
        scales = ((d_ff, products.gate), (d_ff, 1.0))
        folds[0] = {"row_scales": scales[:1] if len(gate_up) > 1 else scales}
    parts = list(zip(gate_up, (2 * d_ff // len(gate_up),) * 2, folds, strict=False))
    return fused("gate_up", parts, d, feed.mlp_bias) | last
