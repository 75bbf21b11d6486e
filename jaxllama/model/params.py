"""The parameters of a model: one table, read by init, sharding, loading, saving and schemes.

    param_table(cfg) -> {path: Param}     in the order of the forward pass

A path is that of the parameter tree, ("layer_0", "mixer", "qkv", "weight").  A ``Param``
(``model.param``) says where a checkpoint has it, so loading and saving are the same walk in two
directions.  ``forms.parameters`` has those of a layer, and each mixer its own
(``mixers/<kind>/parameters.py``).  Another family of names is another ``Names``.
The path of a parameter determines the axis along which a mesh splits it (``split.split_axis``).

Flax modules declare them (``model.declare``).  This file imports no jax, so code that only reads a
checkpoint does not load it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from jaxllama.config import ModelConfig
from jaxllama.model.forms.parameters import layer_table, model_table
from jaxllama.model.names import Names, Source
from jaxllama.model.param import Param, Path, norm_rows, tensor
from jaxllama.typing import ParamsDict


def param_table(
    cfg: ModelConfig, present: Collection[str] = (), names: Names | None = None
) -> dict[Path, Param]:
    """See the module docstring.

    present: a checkpoint's tensors, where a family has had more than one name for a thing; without
        them the names are the library's present ones.
    names: the checkpoint's, such as a family's (``checkpoints.hf.tables``); Llama's by
        default.  Paths and shapes do not depend on them.
    """
    source = Source(names or Names(), cfg.stored, present)
    names, stored, d = source.names, cfg.stored, cfg.d_model
    embed = tensor(f"{names.embed}.weight", cfg.vocab_size, d, fold={"scale": stored.embed})
    table: dict[Path, Param] = {("embed", "weight"): embed, **model_table(cfg, source)}
    for index in range(cfg.n_layers):
        layer = layer_table(cfg, index, source)
        table |= {(f"layer_{index}", *path): param for path, param in layer.items()}
    # A tied head has the embedding's multiplier, too.
    scale = stored.logits / (stored.embed if cfg.tie_embeddings else 1.0)
    offset = 0.0 if names.is_last_norm_plain else stored.norm_offset
    table |= norm_rows(("norm",), names.norm, d, cfg.norm, offset, scale)
    head = "embed" if cfg.tie_embeddings else "head"
    if not cfg.tie_embeddings:
        table["head", "weight"] = tensor(f"{names.head}.weight", cfg.vocab_size, d)
    if cfg.head_bias:
        table[head, "bias"] = tensor(f"{names.head}.bias", cfg.vocab_size, std=0.0)
    return table if cfg.mtp is None else table | _mtp(cfg, source)


def _mtp(cfg: ModelConfig, source: Source) -> dict[Path, Param]:
    """The head for multi-token prediction; embedding and last product are the model's."""
    assert cfg.mtp is not None
    head, d, offset = source.names.mtp, cfg.d_model, source.stored.norm_offset
    names = dataclasses.replace(source.names, layer=head.layer, norm=head.norm)
    rest = param_table(cfg.of_layers([cfg.mtp]), source.present, names)
    table = {
        **norm_rows(("mtp", "embed_norm"), head.embed_norm, d, cfg.norm, offset),
        **norm_rows(("mtp", "hidden_norm"), head.hidden_norm, d, cfg.norm, offset),
        ("mtp", "fc", "weight"): tensor(f"{head.fc}.weight", d, 2 * d),
    }
    layer = {path: param for path, param in rest.items() if path[0] in ("layer_0", "norm")}
    return table | {("mtp", *path): param for path, param in layer.items()}


def nested(table: Mapping[Path, object]) -> ParamsDict:
    """A tree of dicts out of a dict by path."""
    tree: ParamsDict = {}
    for path, value in table.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree
