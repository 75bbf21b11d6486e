"""The models of ``benchmarks.offload_experts``, and the parts of a layer that it times alone."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxllama.config import ModelConfig
from jaxllama.executors.offloaded import expert_programs as programs
from jaxllama.executors.offloaded.executor import Offloaded
from jaxllama.language_model import LanguageModel
from jaxllama.loading import default_dtype
from jaxllama.offload.expert_places import ExpertPlace, ExpertUse, places
from jaxllama.offload.experts import (
    ExpertBias,
    ExpertLayout,
    ExpertTensor,
    HotSlots,
    fetched,
    fetched_from,
    layout_of,
    pack,
    unpack,
    views_of,
)
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.planner.accounting import weight_shapes
from jaxllama.planner.experts import expert_counts
from jaxllama.planner.trial import random_expert, random_tree, spread_routes
from jaxllama.typing import Params, ParamsDict, Tree
from pallas_kernels.cpu import prepare_tree, restore_tree

SCHEME = "none,experts_*=mxfp4"
EXPERTS = ("experts_gate_up", "experts_down")


class Host:
    """The experts of all layers in pinned memory, from which models of any placement are made."""

    def __init__(self, cfg: ModelConfig, computes: bool, first: int, sent: bool) -> None:
        """Pin the experts of the ``first`` layers, which the others share until they are pinned."""
        self.cfg, self.computes, self.dtype = cfg, computes, default_dtype()
        self.place = Placement(Policy.parse("100 0 100 0 100 0"), self.dtype, SCHEME)
        self.store = self.place.store
        self.store.fetches &= not sent
        self.shapes = weight_shapes(cfg, self.dtype, SCHEME)
        dense = self.place.model(cfg, self._dense(self.shapes), None).params
        self.params = spread_routes(dense, cfg)
        own, self.weights = self.shapes["layer_0"]["mlp"], {}  # the weights are those of one expert
        self.packed, self.layouts = {}, {}
        self.tensors: dict[tuple[int, str], dict[int, jax.Array]] = {}
        self.views: dict[tuple[int, str], dict[int, tuple[jax.Array, ...]]] = {}
        for name in EXPERTS:
            weight = self.weights[name] = random_expert(own[name]["weight"])
            weight = prepare_tree(weight) if computes else weight
            parts, structure = jax.tree.flatten(weight)
            self.layouts[name] = layout_of(parts, structure, self.store.device.platform)
            self.packed[name] = pack(self.layouts[name], [np.asarray(x) for x in parts])
        self.pin(range(min(first, cfg.n_layers)))
        for layer in range(first, cfg.n_layers):
            for name in EXPERTS:
                self.tensors[layer, name] = self.tensors[layer % first, name]
                self.views[layer, name] = self.views[layer % first, name]

    def pin(self, layers: Iterable[int]) -> None:
        """Give these layers pinned buffers of their own."""
        for name in EXPERTS:
            source = jax.device_put(self.packed[name], self.store.on_device)
            for layer in layers:
                count = expert_counts(self.cfg)[layer]
                pinned = {expert: self.store.pin(source) for expert in range(count)}
                views = views_of(self.layouts[name], pinned) if self.computes else {}
                self.tensors[layer, name], self.views[layer, name] = pinned, views

    @property
    def pinned_bytes(self) -> int:
        every = {id(x): x for own in self.tensors.values() for x in own.values()}
        return sum(x.nbytes for x in every.values())

    def _dense(self, shapes: Params) -> ParamsDict:
        """Return all other parameters; layers share one layer's arrays."""
        found: dict[tuple[str, ...], Any] = {}
        for name in [name for name in shapes if not name.startswith("layer_")] + ["layer_0"]:
            leaves: dict[tuple[str, ...], Any] = flatten_dict(shapes[name])
            for path, shape in leaves.items():
                if path[1:2] and path[1] in EXPERTS and path[-1] == "weight":
                    continue
                leaf = random_tree(shape)
                if path[-1] == "bias" and path[1] in EXPERTS:
                    leaf = ExpertBias(0 * leaf, np.zeros(shape.shape, shape.dtype))
                elif len(path) > 1 and path[-2] == "router" and path[-1] == "bias":
                    leaf = 0 * leaf
                else:
                    leaf = self.place((name, *path), leaf)
                layers = range(self.cfg.n_layers) if name == "layer_0" else (None,)
                for layer in layers:
                    target = name if layer is None else f"layer_{layer}"
                    found[target, *path] = leaf
        return unflatten_dict(found)

    def model(
        self,
        policy: Policy,
        use: ExpertUse | None = None,
        bias: dict[int, np.ndarray] | None = None,
        cfg: ModelConfig | None = None,
    ) -> LanguageModel:
        """Return a model of the policy.

        bias: of the routers, by layer.  cfg: perhaps one with fewer layers.
        """
        cfg = cfg or self.cfg
        counts = expert_counts(cfg)
        where = places(policy, counts, use)
        kept = [name for name in self.params if not name.startswith("layer_")]
        params = {name: self.params[name] for name in kept}
        for layer in range(cfg.n_layers):
            own = self.params[f"layer_{layer}"]
            mlp = dict(own["mlp"])
            for name in EXPERTS:
                mlp[name] = {**mlp[name], "weight": self._tensor(layer, name, where[layer])}
            if bias is not None:
                mlp["router"] = {**mlp["router"], "bias": jnp.asarray(bias[layer], self.dtype)}
            params[f"layer_{layer}"] = {**own, "mlp": mlp}
        return LanguageModel(cfg, params, None, executor=Offloaded(policy, self.store))

    def _tensor(self, layer: int, name: str, place: ExpertPlace) -> ExpertTensor:
        shape = self.shapes["layer_0"]["mlp"][name]["weight"]
        layout, hot = self.layouts[name], None
        if place.device and self.store.fetches:
            table = fetched_from(self.store, self.tensors[layer, name], shape.shape[0])
            [hot] = _fetched((layout,), [table], jnp.zeros(len(place.device), jnp.int32))
        elif place.device:
            source = jax.device_put(self.packed[name], self.store.on_device)
            hot = _unpacked(layout, source, len(place.device))
        held = HotSlots.of(self.store, shape.shape[0], place)
        host = {expert: self.tensors[layer, name][expert] for expert in place.pinned}
        return ExpertTensor(
            shape.shape,
            np.dtype(shape.dtype),
            layout,
            hot,
            held,
            place,
            host,
            {},
            self.views[layer, name],
            fetched_from(self.store, host, shape.shape[0]),
        )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _unpacked(layout: ExpertLayout, source: jax.Array, count: int) -> Tree:
    return unpack(layout, jnp.broadcast_to(source[None], (count, source.size)))


PROGRAMS = (
    (programs, ("fetched", "routed_layer", "added_pairs", "with_mixture")),
    (programs, ("computed_pairs_of",)),
    (np, ("asarray",)),  # the host's waits, for the router, the tokens and the CPU
)


@contextlib.contextmanager
def timed_programs() -> Iterator[dict[str, list[float]]]:
    """Yield the number of calls and the host's seconds of each program."""
    taken: dict[str, list[float]] = {}
    with contextlib.ExitStack() as patches:
        for owner, names in PROGRAMS:
            for name in names:
                inner = getattr(owner, name)

                def timed(*args: Any, _inner: Any = inner, _name: str = name, **named: Any) -> Any:
                    begin = time.perf_counter()
                    found = _inner(*args, **named)
                    own = taken.setdefault(_name, [0, 0.0])
                    own[0], own[1] = own[0] + 1, own[1] + time.perf_counter() - begin
                    return found

                patches.enter_context(mock.patch.object(owner, name, timed))
        yield taken


@functools.partial(jax.jit, static_argnums=0)
def _fetched(
    layouts: tuple[ExpertLayout, ...], tables: list[jax.Array], experts: jax.Array
) -> list[Tree]:
    return [fetched(*own, experts) for own in zip(layouts, tables, strict=True)]


def _is_same(one: Tree, other: Tree) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(*(np.asarray(x).astype(np.float32) for x in pair)) for pair in pairs)


def parts_of(host: Host, computes: bool) -> dict[str, Any]:
    """Return what the parts of a layer take alone, each the fastest of several runs."""
    store, layouts = host.store, tuple(host.layouts[name] for name in EXPERTS)
    each = sum(layout.nbytes for layout in layouts)
    found: dict[str, Any] = {"expert_bytes": each}

    def best(work: Callable[[], Any], times: int = 8) -> float:
        taken = []
        for _ in range(times):
            begin = time.perf_counter()
            jax.block_until_ready(work())
            taken.append(time.perf_counter() - begin)
        return min(taken[1:])

    pinned = [host.tensors[0, name] for name in EXPERTS]
    if store.fetches:
        tables = [fetched_from(store, own, len(own)) for own in pinned]
        for count in (1, 4, 16):
            experts = jnp.arange(count, dtype=jnp.int32)
            seconds = best(lambda: _fetched(layouts, tables, experts))  # noqa: B023
            found[f"fetch {count}"] = [1e3 * seconds, count * each / seconds / 1e9]
        got = _fetched(layouts, tables, jnp.asarray([5], jnp.int32))
        same = [
            _is_same(restore_tree(x), host.weights[name])
            for x, name in zip(got, EXPERTS, strict=True)
        ]
        found["fetched bytes are right"] = all(same)
    for count in (1, 4):
        pieces = [own[e] for e in range(count) for own in pinned]
        seconds = best(lambda: jax.device_put(pieces, store.on_device))  # noqa: B023
        found[f"device_put {count}"] = [1e3 * seconds, count * each / seconds / 1e9]
    begin_put = time.perf_counter()
    sent = jax.device_put(pieces, store.on_device)
    found["device_put 4, the host alone"] = 1e3 * (time.perf_counter() - begin_put)
    jax.block_until_ready(sent)
    small = jax.jit(lambda x: x + 1)
    x = jax.device_put(np.zeros(4, np.int32), store.on_device)
    found["program and wait"] = 1e3 * best(lambda: np.asarray(small(x)), 30)
    if computes:
        cfg = host.cfg.layers[0]
        views = [host.views[0, name] for name in EXPERTS]
        biases = [np.zeros((4, w), host.dtype) for w in (2 * cfg.experts.d_ff, cfg.d_model)]
        for count, rows in ((1, 1), (4, 1), (4, 4)):
            x = np.zeros((count, rows, cfg.d_model), host.dtype)
            own = [[view[e] for e in range(count)] for view in views]
            given = [bias[:count] for bias in biases]
            with jax.default_device(jax.devices("cpu")[0]):
                seconds = best(lambda: programs.computed_pairs_of(cfg, layouts, *own, given, x))  # noqa: B023
            found[f"CPU: {count} experts of {rows} tokens"] = 1e3 * seconds
    return found
