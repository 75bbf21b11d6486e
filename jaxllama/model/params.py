"""The parameters of a model: one table, read by init, sharding, loading, saving and schemes.

    param_table(cfg) -> {path: Param}     in the order of the forward pass

A path is that of the parameter tree, ("layer_0", "mixer", "qkv", "weight").  A ``Param``
(``model.param``) says where a checkpoint has it, so loading and saving are the same walk in two
directions.  Each mixer defines its own parameters (``mixers/<kind>/parameters.py``).  Another
family of names is another ``Names``; models with GLA layers have those of flash-linear-attention.
The path of a parameter determines the axis along which a mesh splits it (``split.split_axis``).

Flax modules declare them (``model.declare``).  This file imports no jax, so code that only reads a
checkpoint does not load it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping

from jaxllama.config import UNMULTIPLIED, ModelConfig, SharedBlocks
from jaxllama.model import layer_input_params as layer_inputs
from jaxllama.model.experts import parameters as experts
from jaxllama.model.family_names import FAMILIES, FLA, LLAMA
from jaxllama.model.mixers import MIXERS
from jaxllama.model.names import Names
from jaxllama.model.param import (
    Param,
    Path,
    TensorSource,
    fused,
    one,
    rows,
    transposed,
    written,
)
from jaxllama.typing import Options, ParamsDict


def param_table(
    cfg: ModelConfig, present: Collection[str] = (), names: Names | None = None
) -> dict[Path, Param]:
    """See the module docstring.

    present: a checkpoint's tensors, where a family has had more than one name for a thing; without
        them the names are the library's present ones.
    names: another container's (GGUF), instead of those of the family's Hugging Face directories.
    """
    if names is None:
        names = FAMILIES.get(cfg.stored.family, FLA if "gla" in cfg.layer_types else LLAMA)
    if cfg.parallel_norms and names.parallel_norms is not None:
        first, second = names.parallel_norms
        names = dataclasses.replace(names, mixer_norm=first, mlp_norm=second)
    d, stored = cfg.d_model, cfg.stored
    table: dict[Path, Param] = {
        ("embed", "weight"): one(
            f"{names.embed}.weight", cfg.vocab_size, d, fold={"scale": stored.embed}
        )
    }
    if cfg.layer_inputs is not None:
        tables = layer_inputs.table(cfg, names.layer_inputs)
        table |= {("inputs", *path): param for path, param in tables.items()}
    for index, kind in enumerate(cfg.layer_types):
        (prefix, feed), layer = _halves(cfg, names, index), f"layer_{index}"
        if cfg.shared_blocks is not None and kind == "attention":
            table |= _shared_block(cfg, cfg.shared_blocks, names, index)
            continue
        own_heads = cfg.with_heads_of(index)
        mixer = MIXERS[kind].parameters.table(own_heads, f"{prefix}.", names, present)
        is_other = f"{prefix}.{names.other_mlp}{names.gate_up[0]}.weight" in present
        mlp_prefix = names.other_mlp if is_other else names.mlp
        (pre_norms, post_norms), mlp = cfg.norms_of(index), dict[Path, Param]()
        if index not in cfg.bare_layers:
            own = cfg.experts_of(index)
            mlp = (
                _mlp(cfg, f"{feed}.{mlp_prefix}", names, present, cfg.d_ff_of(index))
                if own is None
                else experts.table(cfg, own, f"{feed}.", names, present)
            )
        norm = functools.partial(_layer_norm, cfg, names, present)
        after = functools.partial(norm, scale=stored.residual)  # what the layer adds is multiplied
        if index == 0 and cfg.learned_positions is not None:
            places = cfg.max_position + cfg.learned_positions
            table[layer, "positions", "weight"] = one(f"{names.positions}.weight", places, d)
        if index == 0 and cfg.embed_norm:
            table |= _norm(cfg, (layer, "embed_norm"), names.embed_norm)
        is_beside = cfg.shared_blocks is None and index in cfg.beside_layers
        if pre_norms and not is_beside:
            table |= norm((layer, "mixer_norm"), f"{prefix}.{names.mixer_norm}")
        table |= {(layer, "mixer", *path): param for path, param in mixer.items()}
        if post_norms:
            table |= after((layer, "mixer_out_norm"), f"{prefix}.{names.mixer_out_norm}")
        if mlp and pre_norms and (cfg.parallel_norms or not cfg.parallel_block):
            table |= norm((layer, "mlp_norm"), f"{feed}.{names.mlp_norm}")
        table |= {(layer, "mlp", *path): param for path, param in mlp.items()}
        own = cfg.experts_of(index)
        has_out_norm = post_norms or (own is not None and own.out_norm)
        if mlp and has_out_norm:
            table |= after((layer, "mlp_out_norm"), f"{feed}.{names.mlp_out_norm}")
        if cfg.layer_inputs is not None:
            own_inputs = layer_inputs.layer_table(cfg, f"{feed}.", names.layer_inputs)
            table |= {(layer, "inputs", *path): param for path, param in own_inputs.items()}
        if cfg.layer_scale:
            scale_name = f"{feed}.{names.layer_scale}"
            table[layer, "scale", "weight"] = one(scale_name, 1, mean=1.0, std=0.0)
    # A tied head has the embedding's multiplier, too.
    scale = stored.logits / (stored.embed if cfg.tie_embeddings else 1.0)
    table |= _norm(cfg, ("norm",), names.norm, scale)
    if cfg.tie_embeddings and cfg.head_bias:
        table["embed", "bias"] = one(f"{names.head}.bias", cfg.vocab_size, std=0.0)
    if not cfg.tie_embeddings:
        table["head", "weight"] = one(f"{names.head}.weight", cfg.vocab_size, d)
        if cfg.head_bias:
            table["head", "bias"] = one(f"{names.head}.bias", cfg.vocab_size, std=0.0)
    if cfg.mtp_layers:
        table |= _mtp(cfg, names, present)
    return table


def _halves(cfg: ModelConfig, names: Names, index: int) -> tuple[str, str]:
    """The prefixes of a layer's mixer and of its feed-forward."""
    if names.shared:
        layer = names.layer.format(index - sum(i <= index for i in cfg.beside_layers))
        layer += ".mamba_decoder" * (index in cfg.beside_layers)
        return layer, layer
    if names.is_paired:
        return names.layer.format(index // 2), names.layer.format(index // 2)
    if not names.is_halved:
        return names.layer.format(index), names.layer.format(index)
    first = 2 * index - sum(bare < index for bare in cfg.bare_layers)
    return names.layer.format(first), names.layer.format(first + 1)


def _shared_block(
    cfg: ModelConfig, shared: SharedBlocks, names: Names, index: int
) -> dict[Path, Param]:
    """The parameters of layer ``index``, whose block other layers have too (``shared_block``)."""
    layers = [i for i, kind in enumerate(cfg.layer_types) if kind == "attention"]
    turn = layers.index(index)
    layer, d, width = f"layer_{index}", cfg.d_model, 2 * cfg.d_model
    block = f"{_halves(cfg, names, layers[turn % shared.count])[0]}.{names.shared}"
    attention, feed = f"{block}{names.mixer}", f"{block}{names.mlp}"
    q, kv, rank = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim, shared.rank
    parts = list(zip(names.qkv, (q, kv, kv), strict=True))
    scales = cfg.stored.query, 1.0, 1.0
    qkv = rows(
        [
            TensorSource(f"{attention}{name}.weight", (n, width), scale)
            for (name, n), scale in zip(parts, scales, strict=True)
        ]
    )
    before = f"{block}{names.mixer_norm}.weight"
    table = {
        ("mixer_norm", "weight"): one(before, width, mean=1.0, std=0.0),
        ("mixer", "qkv", "weight"): qkv,
        ("mixer", "o", "weight"): one(f"{attention}{names.o}.weight", d, q),
        ("mlp_norm", "weight"): one(f"{block}{names.mlp_norm}.weight", d, mean=1.0, std=0.0),
    }
    if shared.attention_adapters:
        lists = [f"{attention}linear_{name[0]}_adapter_list.{turn}" for name in names.qkv]
        ins = [TensorSource(f"{name}.0.weight", (rank, width)) for name in lists]
        outs = [
            TensorSource(f"{name}.1.weight", (n, rank), scale)
            for name, (_, n), scale in zip(lists, parts, scales, strict=True)
        ]
        table["mixer", "adapter_in", "weight"] = rows(ins)
        table["mixer", "adapter_out", "weight"] = rows(outs)
    adapter = f"{feed}gate_up_proj_adapter_list.{turn}"
    mlp = {
        **fused("gate_up", [(f"{feed}{names.gate_up[0]}", 2 * cfg.d_ff, {})], d, cfg.mlp_bias),
        ("adapter_in", "weight"): one(f"{adapter}.0.weight", rank, d),
        ("adapter_out", "weight"): one(f"{adapter}.1.weight", 2 * cfg.d_ff, rank),
        **written("down", f"{feed}{names.down}", d, cfg.d_ff, cfg.mlp_bias),
        ("out", "weight"): one(f"{_halves(cfg, names, index)[0]}.linear.weight", d, d),
    }
    table |= {("mlp", *path): param for path, param in mlp.items()}
    return {(layer, *path): param for path, param in table.items()}


def _mtp(cfg: ModelConfig, names: Names, present: Collection[str]) -> dict[Path, Param]:
    """The head for multi-token prediction; embedding and last product are the model's."""
    head = names.mtp
    own = dataclasses.replace(names, layer=head.layer, norm=head.norm)
    rest = param_table(cfg.mtp_config(), present, own)
    table = {
        **_norm(cfg, ("mtp", "embed_norm"), head.embed_norm),
        **_norm(cfg, ("mtp", "hidden_norm"), head.hidden_norm),
        ("mtp", "fc", "weight"): one(f"{head.fc}.weight", cfg.d_model, 2 * cfg.d_model),
    }
    layer = {path: param for path, param in rest.items() if path[0] in ("layer_0", "norm")}
    return table | {("mtp", *path): param for path, param in layer.items()}


def _layer_norm(
    cfg: ModelConfig,
    names: Names,
    present: Collection[str],
    path: Path,
    name: str,
    scale: float = 1.0,
) -> dict[Path, Param]:
    """A layer's norm, under the name that a file has."""
    layer, _, last = name.rpartition(".")
    other = f"{layer}.{names.other_norms.get(last, last)}"
    is_other = f"{name}.weight" not in present and f"{other}.weight" in present
    return _norm(cfg, path, other if is_other else name, scale)


def _norm(cfg: ModelConfig, path: Path, name: str, scale: float = 1.0) -> dict[Path, Param]:
    """A norm of the stream; the checkpoint's weight w stands for ``scale * (w + norm_offset)``."""
    width = cfg.d_model
    if not cfg.norm_weight:
        return {(*path, "weight"): Param((), (width,), mean=scale, std=0.0)}
    fold = {"scale": scale, "offset": scale * cfg.stored.norm_offset}
    weight = one(f"{name}.weight", width, mean=1.0, std=0.0, fold=fold)
    table = {(*path, "weight"): weight}
    if cfg.norm_bias:
        table[*path, "bias"] = one(f"{name}.bias", width, std=0.0, fold={"scale": scale})
    return table


def _mlp(
    cfg: ModelConfig, prefix: str, names: Names, present: Collection[str], d_ff: int
) -> dict[Path, Param]:
    """gate and up fused by rows, and down, of width ``d_ff``.  Old checkpoints of
    flash-linear-attention have both in one tensor, too."""
    products = cfg.stored.products or UNMULTIPLIED
    down, d = f"{prefix}{names.down}", cfg.d_model
    residual = cfg.product_scale * products.down
    inner = {}
    if cfg.inner_norms:
        inner = _norm(cfg.replace(d_model=d_ff), ("inner_norm",), f"{prefix}{names.inner_norms[1]}")
    last = inner | written("down", down, d, d_ff, cfg.mlp_bias, residual, names.is_transposed)
    if not cfg.gated_mlp:
        order = transposed(d_ff) if names.is_transposed else {}
        up = fused("up", [(f"{prefix}{names.gate_up[-1]}", d_ff, order)], d, cfg.mlp_bias)
        if cfg.activation == "xielu":
            shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
            scalars = (TensorSource(f"{prefix}act_fn.{key}", one) for key, one in shapes.items())
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
    return fused("gate_up", parts, cfg.d_model, cfg.mlp_bias) | last


def nested(table: Mapping[Path, object]) -> ParamsDict:
    """A tree of dicts out of a dict by path."""
    tree: ParamsDict = {}
    for path, value in table.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree
