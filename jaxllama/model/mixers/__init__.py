"""The kinds of layers.  ``MIXERS[kind]`` is the only list of them; a kind is a folder.

``layer`` is a ``LayerConfig``, whose ``mixer`` is the kind's record of options.

    MIXERS[kind].parameters    the parameters of a layer; imports no jax
        table(layer, prefix, source) -> {path: Param}           SPLIT: {parameter's name: axis}
        KEEPS_TOKENS: its cache grows with the context
        heads, obstacle, replicated, shard, fused_heads          for a mesh
        sites(layer)                                             for calibration
        flops(layer, sequence_length)
    MIXERS[kind].module        MIXER: its Flax module; imports flax
    MIXERS[kind].mix           the computation
        inputs(layer, p) -> the weights that multiply the layer's input
        mix(layer, p, projected, state, at) -> (heads, state)
        init_state(layer, rows, length, width, dtype) -> state
        commit(states, tokens, count, exact) -> states           accepts tokens of a draft
    MIXERS[kind].beside        if it keeps tokens: a step whose middle part runs beside the cache

A layer's state is a ``KVCache``, or any pytree of arrays ``[B, ...]`` of fixed size.  Its method
``specs(rows)`` says how a mesh splits it.  For a ``records.Draft``, ``mix`` does not change a state
of fixed size.  It returns the tokens that the state may take, in a type that has the ``kind``;
``commit`` applies some of them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.model.mixers.common import Heads, LayerState, Sites
from jaxllama.model.names import Source
from jaxllama.model.param import Param, Path
from jaxllama.typing import Params, Tree

if TYPE_CHECKING:
    import jax

    from jaxllama.model.records import At
    from jaxllama.model.rope import Ropes


class Parameters(Protocol):
    """``mixers/<kind>/parameters.py``."""

    KEEPS_TOKENS: bool
    SPLIT: Mapping[str, int]

    def table(self, layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]: ...
    def heads(self, layer: LayerConfig) -> int: ...
    def obstacle(self, layer: LayerConfig, n: int) -> str | None: ...
    def replicated(self, layer: LayerConfig, n: int) -> Any: ...
    def shard(self, layer: LayerConfig, n: int) -> Any: ...
    def fused_heads(self, layer: LayerConfig, name: str, n: int) -> Heads | None: ...
    def sites(self, layer: LayerConfig) -> Sites: ...
    def flops(self, layer: LayerConfig, sequence_length: int) -> float: ...


class Mix(Protocol):
    """``mixers/<kind>/mix.py``; a state is of the mixer's own type."""

    def init_state(
        self, layer: LayerConfig, rows: int, length: int, width: int, dtype: str
    ) -> LayerState: ...
    def inputs(self, layer: LayerConfig, p: Params) -> Params | list[Params]: ...
    def mix(
        self, layer: LayerConfig, p: Params, projected: Tree, state: LayerState, at: At
    ) -> tuple[jax.Array, LayerState]: ...
    def commit(
        self,
        states: Sequence[LayerState],
        tokens: Sequence[LayerState],
        count: jax.Array,
        exact: bool,
    ) -> Iterable[LayerState]: ...


class Beside(Protocol):
    """``mixers/<kind>/beside.py``."""

    def sinks_of(self, cfg: Any, p: Params) -> jax.Array | None: ...
    def before(
        self, layer: LayerConfig, p: Params, projected: Tree
    ) -> tuple[jax.Array, jax.Array | None]: ...
    def attend(
        self,
        layer: LayerConfig,
        new: jax.Array,
        position: jax.Array,
        lengths: jax.Array,
        rope: Ropes,
        sinks: jax.Array | None,
        cache: LayerState,
    ) -> tuple[jax.Array, LayerState]: ...
    def after(
        self, layer: LayerConfig, p: Params, heads: jax.Array, gate: jax.Array | None
    ) -> jax.Array: ...


class ModuleFile(Protocol):
    """``mixers/<kind>/module.py``."""

    MIXER: Callable[..., Tree]  # the class


class Mixer:
    """One kind of layer: its files, imported when they are asked for."""

    def __init__(self, kind: str) -> None:
        self._folder = f"{__name__}.{kind}"

    @functools.cached_property
    def parameters(self) -> Parameters:
        return importlib.import_module(f"{self._folder}.parameters")  # type: ignore[return-value]

    @functools.cached_property
    def mix(self) -> Mix:
        return importlib.import_module(f"{self._folder}.mix")  # type: ignore[return-value]

    @functools.cached_property
    def beside(self) -> Beside:
        return importlib.import_module(f"{self._folder}.beside")  # type: ignore[return-value]

    @functools.cached_property
    def module(self) -> ModuleFile:
        return importlib.import_module(f"{self._folder}.module")  # type: ignore[return-value]


MIXERS: dict[str, Mixer] = {
    kind: Mixer(kind) for kind in ("attention", "latent", "gla", "delta", "short_conv", "ssm")
}


def keeps_tokens(kind: str) -> bool:
    """Return whether the cache of a kind's layers grows with the context."""
    return MIXERS[kind].parameters.KEEPS_TOKENS


def has_states(cfg: ModelConfig) -> bool:
    """Return whether some layer keeps a state of fixed size instead of its tokens."""
    return not all(map(keeps_tokens, set(cfg.layer_types)))
