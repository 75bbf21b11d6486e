"""Layers that are alike as one loop: ``lax.scan`` over their stacked parameters.

    stacked = stack_layers(cfg, params)      layer_0 .. layer_79 become one entry, layers_0_80_1
    params  = unstack_layers(stacked)        the inverse, to the bit
    x       = hidden_states(cfg, params, tokens, dtype)    the model of training, of either form

The entry ``layers_{start}_{stop}_{step}`` holds the layers of ``range(start, stop, step)``.  Its
leaves have a leading axis of that many layers.  A layer that no neighbour repeats stays
``layer_{i}``.  A hybrid repeats a pattern: twelve times three delta layers and one of attention are
the entries ``layers_0_48_4`` to ``layers_3_48_4`` and one loop of twelve turns.

The compiler sees each repeated layer once.  A loop has no cache, because it would slice every
layer's out of one array and back; decoding takes the per-layer tree.

In training, parameters are float32 (the master weights), and every matmul casts its own to the
activations' dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model import decoder, linear
from jaxllama.model.decoder import begin, block, final_norm
from jaxllama.model.layer_ops import LayerOps
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.param import Path
from jaxllama.model.records import At, whole_rows
from jaxllama.typing import Params, ParamsDict, Tree

PREFIX = "layers_"


@dataclasses.dataclass(frozen=True)
class Run:
    """``count`` repetitions of ``period`` layers, from layer ``first`` on."""

    first: int
    period: int
    count: int

    @property
    def names(self) -> tuple[str, ...]:
        """The entries of the layers of one period."""
        stop = self.first + self.period * self.count
        indices = range(self.first, self.first + self.period)
        if self.count == 1:
            return tuple(f"layer_{index}" for index in indices)
        return tuple(f"{PREFIX}{index}_{stop}_{self.period}" for index in indices)


@functools.lru_cache(maxsize=256)
def runs(cfg: ModelConfig) -> tuple[Run, ...]:
    """The runs that a model's layers are, such that as few layers as possible are compiled.

    Layers that read another's keys, or inputs of their own, are in no loop.
    """
    if cfg.needs_model:
        return (Run(0, cfg.n_layers, 1),)
    numbers: dict[LayerConfig, int] = {}
    kinds = [numbers.setdefault(layer, len(numbers)) for layer in cfg.layers]
    # best[n]: (compiled layers, loops, runs) of the first n layers.
    best: list[tuple[int, int, tuple[Run, ...]]] = [(0, 0, ())]
    for stop in range(1, cfg.n_layers + 1):
        options: list[tuple[int, int, tuple[Run, ...]]] = []
        for period in range(1, stop + 1):
            pattern = kinds[stop - period : stop]
            for first in range(stop - period, -1, -period):
                if kinds[first : first + period] != pattern:
                    break
                compiled, loops, before = best[first]
                run = Run(first, period, (stop - first) // period)
                options.append((compiled + period, loops + 1, (*before, run)))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]


def is_stacked(params: Params) -> bool:
    """Whether a parameter tree is ``stack_layers``'s."""
    return any(name.startswith(PREFIX) for name in params)


def stack_layers(cfg: ModelConfig, tree: Tree, *, release: bool = False) -> Tree:
    """Stack the layers of a parameter tree, or of every parameter tree inside ``tree``.

    Parameters
    ----------
    cfg : ModelConfig
        The model's configuration. Layers that it makes alike are stacked.
    tree : pytree
        Parameters of ``Decoder(cfg)``, or a pytree that contains such parameters (moments of an
        optimizer, a training state).
    release : bool
        Whether to delete each array of ``tree`` that was copied. At most one weight of all layers
        then exists twice.

    Returns
    -------
    pytree
        The same pytree, where one entry ``layers_{start}_{stop}_{step}`` replaces the entries
        ``layer_{i}`` for i in ``range(start, stop, step)``. Its arrays have a new first axis: one
        element for each of these layers. A layer without an equal stays as it is.

    Raises
    ------
    JaxLlamaError
        If alike layers are stored differently, for example only one of them is quantized. Also if
        the tree has other layers than ``cfg``.
    """

    def stacked(params: Params) -> ParamsDict:
        found = {name: node for name, node in params.items() if not _is_layer(name)}
        expected = {f"layer_{index}" for index in range(cfg.n_layers)}
        for name in sorted(expected ^ {name for name in params if _is_layer(name)}):
            which = ("config", "tree") if name in expected else ("tree", "config")
            raise JaxLlamaError(
                f"{name}: the {which[0]} has this layer, and the {which[1]} has not"
            )
        for run in runs(cfg):
            for offset, name in enumerate(run.names):
                start = run.first + offset
                indices = range(start, cfg.n_layers, run.period)[: run.count]
                found[name] = _joined(params, indices, release)
        return found

    return _of_params(stacked, tree, lambda params: "layer_0" in params)


def _joined(params: Params, indices: range, release: bool) -> Tree:
    layers = [params[f"layer_{index}"] for index in indices]
    if len(layers) == 1:
        return layers[0]
    for index, layer in zip(indices, layers, strict=True):
        if jax.tree.structure(layer) != jax.tree.structure(layers[0]):
            raise JaxLlamaError(
                f"layer_{index}: its parameters are not stored as layer_{indices[0]}'s are, "
                "so one loop (scan) cannot run both"
            )

    def join(*leaves: jax.Array) -> jax.Array:
        if not release:
            return jnp.stack(leaves)
        whole = jax.block_until_ready(_stacked(*leaves))
        for leaf in leaves:
            if isinstance(leaf, jax.Array):  # else a checkpoint's numpy array
                leaf.delete()
        return whole

    return jax.tree.map(join, *layers)


@jax.jit
def _stacked(*leaves: jax.Array) -> jax.Array:
    return jnp.stack(leaves)


def unstack_layers(tree: Tree) -> Tree:
    """Return ``tree`` with one entry for each layer: the inverse of ``stack_layers``.

    The entries' names say which layers they hold, so no config is needed.

    Parameters
    ----------
    tree : pytree
        The result of ``stack_layers``, or a pytree of the same form (gradients, moments).

    Returns
    -------
    pytree
        The same pytree, where entries ``layer_{i}`` replace ``layers_{start}_{stop}_{step}``. Their
        arrays have lost the first axis. A tree without stacked layers stays as it is.

    Raises
    ------
    JaxLlamaError
        If an array has not one element for each layer of its entry's name.
    """

    def unstacked(params: Params) -> ParamsDict:
        found: ParamsDict = {}
        for name, node in params.items():
            if not name.startswith(PREFIX):
                found[name] = node
                continue
            indices = range(*map(int, name.removeprefix(PREFIX).split("_")))
            for leaf in jax.tree.leaves(node):
                if jnp.shape(leaf)[:1] != (len(indices),):
                    raise JaxLlamaError(
                        f"{name}: an array {list(jnp.shape(leaf))} is not of {len(indices)} layers"
                    )
            for place, index in enumerate(indices):
                found[f"layer_{index}"] = jax.tree.map(lambda leaf, at=place: leaf[at], node)
        return found

    return _of_params(unstacked, tree, is_stacked)


def _of_params(
    change: Callable[[Params], ParamsDict],
    tree: Tree,
    is_one: Callable[[Params], bool],
) -> Tree:
    """``tree`` with ``change`` applied to the parameter trees in it."""

    def is_params(node: object) -> TypeGuard[Params]:
        return isinstance(node, Mapping) and is_one(node)

    return jax.tree.map(
        lambda node: change(node) if is_params(node) else node, tree, is_leaf=is_params
    )


def _is_layer(name: str) -> bool:
    return name.startswith("layer_")


def one_layer_path(path: Path) -> tuple[Path, int]:
    """Return (the path in the per-layer tree, the number of leading axes of the leaf).

    The path is that of the first layer in a stacked entry; outside of one it is ``path`` itself.
    """
    if not path[0].startswith(PREFIX):
        return path, 0
    start = path[0].removeprefix(PREFIX).split("_")[0]
    return (f"layer_{start}", *path[1:]), 1


def walk(
    cfg: ModelConfig,
    params: Params,
    stream: Stream,
    at: At,
    run_layer: Callable[..., tuple[Stream, LayerState]] = block,
) -> Stream:
    """Run ``decoder.walk`` without a cache, for a per-layer tree or a stacked one.

    run_layer: what a layer does, called as ``decoder.block``.  Between the turns of a loop the
    stream is one array: what is pending has been added, rounded as the next norm would.
    """
    return walk_with_results(cfg, params, stream, at, run_layer)[0]


def walk_with_results(
    cfg: ModelConfig,
    params: Params,
    stream: Stream,
    at: At,
    run_layer: Callable[..., tuple[Stream, LayerState]],
) -> tuple[Stream, list[LayerState]]:
    """As ``walk``, with the second results of ``run_layer``.

    Those of layers in a loop are one, whose leaves have a leading axis of layers.
    """
    if not is_stacked(params):
        stream, results, _ = decoder.walk(cfg, params, stream, None, at, run_layer)
        return stream, list(results)
    found: list[LayerState] = []
    for run in runs(cfg):
        layers = tuple(params[name] for name in run.names)
        period = _period(cfg, run, at, run_layer)
        if run.count == 1:
            stream, results = period(stream, layers)
        else:
            stream, results = _repeated(period, stream, layers)
        found += results
    return stream, found


_Period = Callable[[Stream, tuple[Params, ...]], tuple[Stream, tuple[LayerState, ...]]]


def _period(
    cfg: ModelConfig, run: Run, at: At, run_layer: Callable[..., tuple[Stream, LayerState]]
) -> _Period:
    """Return a function that runs a stream through the layers of one period of ``run``.

    The function takes (stream, the layers' parameters) and returns (stream, the layers' results).
    """
    configs = cfg.layers[run.first : run.first + run.period]

    def through(
        stream: Stream, layers: tuple[Params, ...]
    ) -> tuple[Stream, tuple[LayerState, ...]]:
        results = []
        for config, layer in zip(configs, layers, strict=True):
            stream, result = run_layer(config, layer, stream, None, at)
            results.append(result)
        return stream, tuple(results)

    return through


def _repeated(
    period: _Period, stream: Stream, layers: tuple[Params, ...]
) -> tuple[Stream, tuple[LayerState, ...]]:
    """The stream behind all turns of a loop, and their results."""

    def turn(x: jax.Array, now: tuple[Params, ...]) -> tuple[jax.Array, tuple[LayerState, ...]]:
        after, results = period(Stream(x, embedded=embedded), now)
        return after.total, results

    embedded = stream.embedded
    x, results = lax.scan(turn, stream.total, layers)
    return Stream(x, embedded=embedded), results


def recomputed_block(
    layer: LayerConfig,
    params: Params,
    stream: Stream,
    state: LayerState,
    at: At,
    ops: LayerOps = linear,
) -> tuple[Stream, LayerState]:
    """Run ``decoder.block``; for the backward pass only the layer's input is kept.

    state: keys and values that the layer borrows, or None.
    """
    run = jax.checkpoint(lambda params, stream, state: block(layer, params, stream, state, at, ops))
    return run(params, stream, state)


def hidden_states(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    dtype: jnp.dtype,
    segments: jax.Array | None = None,
    run_layer: Callable[..., tuple[Stream, LayerState]] = block,
    begins: jax.Array | None = None,
) -> jax.Array:
    """Return the states before the head, ``[B, T, D]`` of ``dtype``, of ``tokens[B, T]``.

    Rows are whole: without padding or a cache.
    params: per layer, or stacked: then layers that are alike are one loop.
    segments: int32 ``[B, T]`` where several sequences lie in a row.
    run_layer: what a layer does, as ``walk`` takes it.
    begins: int32 ``[B, M]``, where the segments begin, as ``Chunk`` has it.
    """
    stream, at = embed(cfg, params, tokens, dtype, segments, begins)
    stream = walk(cfg, params, stream, at, run_layer)
    return final_norm(cfg, params, stream)


def embed(
    cfg: ModelConfig,
    params: Params,
    tokens: jax.Array,
    dtype: jnp.dtype,
    segments: jax.Array | None = None,
    begins: jax.Array | None = None,
) -> tuple[Stream, At]:
    """Return the arguments of the first layer for whole rows; see ``hidden_states``."""
    batch, length = tokens.shape
    return begin(cfg, params, tokens, dtype, whole_rows(cfg, batch, length, segments, begins))
