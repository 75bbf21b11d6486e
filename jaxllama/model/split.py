"""How a model is cut into ``n`` shards: what must divide, which rows and columns go where.

Tensor parallelism is that of Megatron-LM (arXiv 1909.08053).  Matmuls that read the residual stream
are split by output rows, and those that write it by input columns.  So a layer needs two sums over
the shards.  Heads, the feed-forward's width and the vocabulary are split; norms and low-rank gate
inputs are whole everywhere.

``split_axis(path)`` returns the axis along which a parameter is split.  A plain split of fused rows
(q|k|v, gate|up) would hand one shard all of q.  ``row_order`` is the permutation that makes shard
j's slice ``[q_j, k_j, v_j]``, so a shard is an ordinary, smaller model (``local_config``).
``natural_rows`` is its inverse.

With fewer kv heads than shards, each kv head is repeated ``n / K`` times, in the weights and so in
the cache.  The function stays the same: query head i reads a copy of the head that it read before.
A vocabulary that n does not divide is padded with rows of zeros, whose logits are cut off again.

Each shard has whole experts.  It routes every token, and computes the pairs of its own experts
(``experts.feed``).  The expert that every token passes is split as a dense feed-forward.  The
"expert" axis of a mesh divides nothing but the experts: along it, every group of shards has its own
rows and exchanges their tokens (``parallel.exchange``).

Left out: splitting the layers.  The sequence is split over another axis (``parallel.sequence``).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers import MIXERS, Parameters
from jaxllama.model.mixers.common import Heads

Path = tuple[str, ...]


@functools.cache
def _axes() -> dict[str, int]:
    """By a parameter's name; a mixer's are its own, and ``o`` writes the residual stream."""
    axes = {"embed": 0, "head": 0, "gate_up": 0, "up": 0, "down": 1, "o": 1}
    axes |= {"experts_gate_up": 0, "experts_down": 0}
    for mixer in MIXERS.values():
        for name, axis in mixer.parameters.SPLIT.items():
            assert axes.setdefault(name, axis) == axis, f"{name} is split along two axes"
    return axes


def split_axis(path: Path) -> int | None:
    """0: split by rows (outputs), 1: by columns (inputs), None: whole on every shard.

    ``path`` is of the parameter tree, ("layer_0", "mixer", "o", "weight").
    """
    parent, leaf = path[-2:]
    axis = _axes().get(parent)
    return None if axis == 1 and leaf != "weight" else axis


def check_shards(cfg: ModelConfig, n: int) -> None:
    """Raises JaxLlamaError naming what ``n`` shards do not divide, and the numbers that do."""
    if n == 1:
        return
    whole = next((layer.whole for layer in cfg.layers if layer.whole), "")
    if whole:
        raise JaxLlamaError(f"mesh: model={n}: {whole.format(cfg.name)}; allowed: 1")
    reason = _obstacle(cfg, n)
    if reason is None:
        return
    allowed = [k for k in range(1, _most_shards(cfg) + 1) if _obstacle(cfg, k) is None]
    raise JaxLlamaError(
        f"mesh: model={n} does not divide {reason} of {cfg.name}; "
        f"allowed: {', '.join(map(str, allowed))}"
    )


def check_groups(cfg: ModelConfig, n: int, groups: int) -> None:
    """``check_shards`` of ``n`` shards in ``groups`` groups, which divide the experts."""
    check_shards(cfg, n)
    if groups == 1:
        return
    experts = next((layer.experts for layer in cfg.layers if layer.experts is not None), None)
    if experts is None:
        raise JaxLlamaError(f"mesh: expert={groups}: {cfg.name} has no experts; allowed: 1")
    if experts.n_experts % (n * groups):
        raise JaxLlamaError(
            f"mesh: expert={groups},model={n} does not divide the {experts.n_experts} experts "
            f"of {cfg.name}"
        )


def _mixer(layer: LayerConfig) -> Parameters:
    return MIXERS[layer.kind].parameters


def _most_shards(cfg: ModelConfig) -> int:
    return min(_mixer(layer).heads(layer) for layer in cfg.layers)


def _obstacle(cfg: ModelConfig, n: int) -> str | None:
    found = (_mixer(layer).obstacle(layer, n) or _feed_obstacle(layer, n) for layer in cfg.layers)
    return next((reason for reason in found if reason), None)


def _feed_obstacle(layer: LayerConfig, n: int) -> str | None:
    feed, experts = layer.feed, layer.experts
    if feed is None:
        return None
    if experts is None:
        return f"the feed-forward width {feed.d_ff}" if feed.d_ff % n else None
    if experts.n_experts % n:
        return f"the {experts.n_experts} experts"
    return f"the shared expert's width {experts.shared}" if experts.shared % n else None


def replicated_config(cfg: ModelConfig, n: int) -> ModelConfig:
    """``cfg`` with kv heads repeated so that every one of ``n`` shards has its own."""
    check_shards(cfg, n)
    return cfg.map_layers(lambda layer: layer.replace(mixer=_mixer(layer).replicated(layer, n)))


def local_config(cfg: ModelConfig, n: int, groups: int = 1, own_rows: bool = False) -> ModelConfig:
    """The model that one of ``n`` shards of ``replicated_config(cfg, n)`` is.

    groups: groups of shards that divide the experts.  own_rows: whether each group has its own
    rows.
    """
    cfg = replicated_config(cfg, n)
    check_groups(cfg, n, groups)

    def cut(layer: LayerConfig) -> LayerConfig:
        feed, experts = layer.feed, layer.experts
        if experts is not None:  # a shard routes among all experts
            experts = dataclasses.replace(
                experts,
                shared=experts.shared // n,
                shards=n * groups,
                exchanges=own_rows and groups > 1,
            )
        if feed is not None:
            feed = dataclasses.replace(feed, d_ff=max(1, feed.d_ff // n), experts=experts)
        return layer.replace(mixer=_mixer(layer).shard(layer, n), feed=feed)

    return cfg.map_layers(cut).replace(vocab_size=padded_vocab(cfg, n) // n)


def padded_vocab(cfg: ModelConfig, n: int) -> int:
    return -(-cfg.vocab_size // n) * n


def row_order(cfg: ModelConfig, path: Path, n: int) -> np.ndarray | None:
    """For each row of the stored parameter the row of the original it is, -1 for a row of zeros;
    None where nothing moves.  ``cfg`` is the original model's; ``path`` is split by rows."""
    parent = path[-2]
    if n == 1 or split_axis(path) != 0:
        return None
    if parent in ("embed", "head"):
        pad = padded_vocab(cfg, n) - cfg.vocab_size
        return np.pad(np.arange(cfg.vocab_size), (0, pad), constant_values=-1) if pad else None
    if parent.startswith("experts_"):
        return None
    layer = cfg.mtp if path[0] == "mtp" else cfg.layers[int(path[0].removeprefix("layer_"))]
    assert layer is not None
    if parent == "gate_up":
        assert layer.feed is not None
        width = layer.feed.d_ff if layer.experts is None else layer.experts.shared
        return _interleave([(width, 1)] * 2, n)
    parts = _mixer(layer).fused_heads(layer, parent, n)
    return None if parts is None else _interleave(parts, n)


def _interleave(parts: Heads, n: int) -> np.ndarray:
    """Rows of fused ``parts`` (heads, rows a head), regrouped as n shards of all parts; a part of
    fewer heads than n has each repeated."""
    begin, columns = 0, []
    for heads, width in parts:
        rows = np.arange(begin, begin + heads * width).reshape(heads, width)
        begin += heads * width
        columns.append(np.repeat(rows, max(1, n // heads), axis=0).reshape(n, -1))
    return np.concatenate(columns, axis=1).reshape(-1)


def natural_rows(order: np.ndarray) -> np.ndarray:
    """For each row of the original, the first place ``order`` puts it: the inverse."""
    rows, places = np.unique(order, return_index=True)
    return places[rows >= 0]
