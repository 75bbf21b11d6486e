"""A layer's second half whose experts lie one by one: each runs where it is, or is loaded.

    work = ExpertWork(store, policy)
    stream = work.feed(cfg, unit, weights, stream, lengths)

    device   norm, router; the pairs of the experts that it holds
    link     the other experts with the most tokens, ``GROUP`` at a time, two groups ahead
    CPU      those with the fewest tokens, where they lie: their tokens move, not their weights
    device   the weighted sum of all pairs, the shared expert, the residual

The host reads which experts the router has chosen, so a layer waits for its router. Everything else
of it is dispatched. ``divided`` splits the experts between link and CPU, by the policy's costs.

A pair of a token and an expert has the same bits wherever it is computed, if the products have:
each pair is computed once, in float32, and the sum goes in the order of the pairs. A machine with a
GPU rounds differently on its CPU, whose handlers read activations in 8 bits.

Left out: loading experts before the router has chosen them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.executors.offloaded.cpu_attention import cpu
from jaxllama.model import linear
from jaxllama.model.experts.feed import gate_of, shared, with_output
from jaxllama.model.experts.route import route
from jaxllama.model.linear import Stream
from jaxllama.offload.experts import (
    ExpertBias,
    ExpertLayout,
    ExpertTensor,
    HotSlots,
    unpack,
    unpack_on_cpu,
)
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.offload.timeline import NO_RECORD, Recording
from jaxllama.offload.units import ModelUnit
from jaxllama.typing import Options, Params, Tree
from pallas_kernels.experts.op import grouped_matmul, weighted_sum

GROUP = 8  # experts that one program reads from the link
ON_CPU = 4  # experts of one program of the CPU
AHEAD = 2  # groups that are on their way or being computed

Pieces = tuple[jax.Array, jax.Array]  # an expert's bytes on the device, of both products


class Routed(NamedTuple):
    """tokens ``[T, D]``, of which each passes ``experts [T, k]`` with ``weights``; index E is no
    expert, for a token that is none."""

    tokens: jax.Array
    experts: jax.Array
    weights: jax.Array
    stream: Stream


def without_mlp(weights: Tree) -> Tree:
    """Return a layer's weights without its second half's products."""
    return {name: part for name, part in weights.items() if name != "mlp"}


def placed_experts(weights: Tree) -> ExpertTensor | None:
    """Return the first product's experts of a layer's weights if they lie one by one."""
    own = weights.get("mlp", {}).get("experts_gate_up")
    weight = None if own is None else own["weight"]
    return weight if isinstance(weight, ExpertTensor) else None


def divided(
    tokens: Mapping[int, float], loaded: set[int], policy: Policy
) -> tuple[list[int], list[int]]:
    """Return (experts to load, experts for the CPU) of those that a step needs.

    tokens: number of tokens by expert.  loaded: experts that need no load.

    Experts with many tokens are loaded first, because the CPU's time grows with them. The split is
    the one whose later end is earliest.
    """
    order = sorted(tokens, key=lambda expert: (expert not in loaded, -tokens[expert], expert))
    if policy.cpu_expert == 0:
        return order, []
    first = sum(expert in loaded for expert in order)
    on_cpu, cut = 0.0, len(order)  # the CPU takes experts from the end while it is the earlier
    while cut > first:
        more = on_cpu + policy.cpu_expert + policy.cpu_token * (tokens[order[cut - 1]] - 1)
        if max(more, cut - 1 - first) > max(on_cpu, cut - first):
            break
        on_cpu, cut = more, cut - 1
    return order[:cut], order[cut:]


class LoadedExperts:
    """The experts of one unit that one batch has loaded, for the next batches of its block."""

    def __init__(self) -> None:
        self._unit: ModelUnit | None = None
        self._pieces: dict[int, Pieces] = {}

    def of(self, unit: ModelUnit) -> dict[int, Pieces]:
        """Return the loaded experts of ``unit``; those of another unit are dropped."""
        if unit != self._unit:
            self._unit, self._pieces = unit, {}
        return self._pieces


@dataclasses.dataclass
class ExpertWork:
    """The work of one run with experts that lie one by one.

    counts: tokens that have passed each expert, ``[E]`` by layer; of a layer whose experts are all
        on the device only with ``counts_all``, because its router is not waited for otherwise.
    loads, computed: numbers of experts that were loaded, and that the CPU computed.
    computed_pairs: number of pairs that the CPU computed.
    """

    store: Store
    policy: Policy
    counts_all: bool = False
    counts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    loads: int = 0
    computed: int = 0
    computed_pairs: int = 0

    def reset(self) -> None:
        """Set all counts to zero."""
        self.counts = {}
        self.loads = self.computed = self.computed_pairs = 0

    def feed(
        self,
        cfg: ModelConfig,
        unit: ModelUnit,
        weights: Tree,
        stream: Stream,
        lengths: jax.Array,
        record: Recording = NO_RECORD,
        loaded: dict[int, Pieces] | None = None,
    ) -> Stream:
        """Return the stream after the layer's second half.

        stream: ``[B, T, D]``, of which ``lengths[B]`` tokens are valid.
        loaded: loaded experts, for which the layer's next batches look there; None keeps none.
        """
        own = weights["mlp"]
        gate_up, down = own["experts_gate_up"], own["experts_down"]
        up: ExpertTensor = gate_up["weight"]
        dense = {n: part for n, part in own.items() if not n.startswith("experts_")}
        dense = {**without_mlp(weights), "mlp": dense}
        routed = _routed(cfg, dense, stream, lengths)
        cold = _Cold(self, cfg, (up, down["weight"]), (gate_up.get("bias"), down.get("bias")))
        y = _hot(cfg, (up.hot, down["weight"].hot), cold.on_device, up.held, routed)
        if not up.is_whole or self.counts_all:
            chosen = np.asarray(routed.experts)  # waits for the router alone
            count = np.bincount(chosen.reshape(-1), minlength=up.shape[0] + 1)[:-1]
            self.counts[unit.layer] = self.counts.get(unit.layer, 0) + count
            y = cold.added(y, routed, chosen, unit, record, loaded)
        return _finished(cfg, dense, routed, y)


class _Cold:
    """The experts of a layer that are not on the device, for one batch."""

    def __init__(
        self,
        work: ExpertWork,
        cfg: ModelConfig,
        tensors: tuple[ExpertTensor, ExpertTensor],
        biases: tuple[ExpertBias | None, ExpertBias | None],
    ) -> None:
        self.work, self.cfg, self.tensors, self.biases = work, cfg, tensors, biases
        self.on_device = [None if bias is None else bias.device for bias in biases]
        self.pairs: dict[int, np.ndarray] = {}

    def added(
        self,
        y: jax.Array,
        routed: Routed,
        chosen: np.ndarray,
        unit: ModelUnit,
        record: Recording,
        loaded: dict[int, Pieces] | None,
    ) -> jax.Array:
        """Return ``y [T k, D]`` with the pairs of all experts that are not on the device.

        chosen: ``routed.experts`` on the host.
        """
        self.pairs = self._cold_pairs(chosen)
        if not self.pairs:
            return y
        known = {} if loaded is None else loaded
        tokens = {expert: len(own) for expert, own in self.pairs.items()}
        to_load, to_compute = divided(tokens, set(known), self.work.policy)
        self.work.loads += sum(expert not in known for expert in to_load)
        self.work.computed += len(to_compute)
        self.work.computed_pairs += sum(tokens[expert] for expert in to_compute)
        groups = [to_load[first : first + GROUP] for first in range(0, len(to_load), GROUP)]
        begun: deque[list[Pieces]] = deque()
        running: deque[jax.Array] = deque()

        def begin(group: list[int]) -> None:
            with record.watching("load weights", unit) as out:
                begun.append([known.get(expert) or self._begin(expert) for expert in group])
                out.append(begun[-1])
            if loaded is not None:
                loaded.update(zip(group, begun[-1], strict=True))

        for group in groups[:AHEAD]:
            begin(group)
        results = self._compute(to_compute, routed) if to_compute else []
        for number, group in enumerate(groups):
            found, places = self._group(group, begun.popleft(), routed)
            y = _with_pairs(y, places, found)
            running.append(found)
            if number + AHEAD < len(groups):
                jax.block_until_ready(running.popleft())
                begin(groups[number + AHEAD])
        if results:
            with record("experts on CPU", unit):
                jax.block_until_ready(results)
        for places, result in results:
            moved = jax.device_put(np.asarray(result), self.work.store.on_device)
            y = _with_pairs(y, places, moved.reshape(-1, moved.shape[-1]))
        return y

    def _cold_pairs(self, chosen: np.ndarray) -> dict[int, np.ndarray]:
        """Return the pairs, ``token * k + j``, of each expert that is not on the device."""
        up = self.tensors[0]
        held = np.zeros(up.shape[0] + 1, bool)
        held[[*up.place.device, up.shape[0]]] = True
        flat = chosen.reshape(-1)
        cold = np.flatnonzero(~held[flat])
        return {int(expert): cold[flat[cold] == expert] for expert in np.unique(flat[cold])}

    @property
    def _layouts(self) -> tuple[ExpertLayout, ExpertLayout]:
        return self.tensors[0].layout, self.tensors[1].layout

    def _begin(self, expert: int) -> Pieces:
        up, down = self.tensors
        return up.begin(self.work.store, expert), down.begin(self.work.store, expert)

    def _group(
        self, group: list[int], pieces: list[Pieces], routed: Routed
    ) -> tuple[jax.Array, np.ndarray]:
        """Return (float32 ``[P, D]``, pairs) of loaded experts, padded to few sizes."""
        width, fan = _size(len(group)), routed.experts.shape[1]
        pieces = pieces + pieces[:1] * (width - len(group))
        experts = np.asarray(group + group[:1] * (width - len(group)), np.int32)
        own = [self.pairs[expert] for expert in group]
        pairs = np.concatenate(own)
        count = width
        while count < len(pairs):
            count *= 4  # few sizes, because each is a program
        places = np.full(count, routed.experts.size, np.int32)  # a pair that is none
        places[: len(pairs)] = pairs
        slots = np.zeros(count, np.int32)
        slots[: len(pairs)] = np.repeat(np.arange(len(group)), [len(part) for part in own])
        found = _streamed(
            self.cfg,
            self._layouts,
            tuple(zip(*pieces, strict=True)),
            experts,
            self.on_device,
            routed.tokens,
            slots,
            np.minimum(places // fan, len(routed.tokens) - 1),
        )
        return found, places

    def _compute(self, experts: list[int], routed: Routed) -> list[tuple[np.ndarray, jax.Array]]:
        """Begin the CPU's products; return (pairs, results float32 ``[experts, rows, D]``)."""
        tokens, fan = np.asarray(routed.tokens), routed.experts.shape[1]
        (up, down), store = self.tensors, self.work.store
        results = []
        for first in range(0, len(experts), ON_CPU):
            group = experts[first : first + ON_CPU]
            rows = _size(max(len(self.pairs[expert]) for expert in group))
            places = np.full((len(group), rows), routed.experts.size, np.int32)
            for own, expert in zip(places, group, strict=True):
                own[: len(self.pairs[expert])] = self.pairs[expert]
            with jax.default_device(cpu()):
                found = _computed(
                    self.cfg,
                    self._layouts,
                    [up.on_cpu(store, expert) for expert in group],
                    [down.on_cpu(store, expert) for expert in group],
                    [None if bias is None else bias.host[group] for bias in self.biases],
                    tokens[np.minimum(places // fan, len(tokens) - 1)],
                )
            results.append((places.reshape(-1), found))
        return results


def _size(count: int) -> int:
    """Return the power of two that holds ``count``: programs are compiled for such sizes only."""
    return 1 << (count - 1).bit_length()


# The programs


@functools.partial(jax.jit, static_argnums=0)
def _routed(cfg: ModelConfig, p: Params, stream: Stream, lengths: jax.Array) -> Routed:
    assert cfg.experts is not None
    x, stream = linear.norm(stream, p.get("mlp_norm"), cfg)
    tokens = x.reshape(-1, x.shape[-1])
    experts, weights = route(cfg.experts, tokens, p["mlp"]["router"])
    is_valid = jnp.arange(x.shape[1], dtype=jnp.int32) < lengths[:, None]
    experts = jnp.where(is_valid.reshape(-1, 1), experts, cfg.experts.n_experts)
    return Routed(tokens, experts, weights, stream)


@functools.partial(jax.jit, static_argnums=0)
def _hot(
    cfg: ModelConfig,
    weights: tuple[Tree, Tree],
    biases: Sequence[jax.Array | None],
    held: HotSlots,
    routed: Routed,
) -> jax.Array:
    """Return float32 ``[T k, D]``: the pairs of experts on the device, and zeros."""
    count, width = routed.experts.size, routed.tokens.shape[-1]
    if weights[0] is None:
        return jnp.zeros((count, width), jnp.float32)
    own = [None if bias is None else bias[held.experts] for bias in biases]
    y = _products(cfg, weights, own, held.slots[routed.experts], routed.tokens)
    return y.reshape(count, width)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _streamed(
    cfg: ModelConfig,
    layouts: tuple[ExpertLayout, ExpertLayout],
    pieces: tuple[tuple[jax.Array, ...], ...],
    experts: jax.Array,
    biases: Sequence[jax.Array | None],
    tokens: jax.Array,
    slots: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """Return float32 ``[P, D]`` of pairs with loaded experts.

    pieces: the experts' bytes, of both products.  slots, rows ``[P]``: a pair's place among
    ``experts`` and its token.
    """
    up, down = (unpack(layout, jnp.stack(own)) for layout, own in zip(layouts, pieces, strict=True))
    own = [None if bias is None else bias[experts] for bias in biases]
    return _products(cfg, (up, down), own, slots[:, None], tokens[rows])[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _computed(
    cfg: ModelConfig,
    layouts: tuple[ExpertLayout, ExpertLayout],
    ups: Sequence[tuple[jax.Array, ...]],
    downs: Sequence[tuple[jax.Array, ...]],
    biases: Sequence[np.ndarray | None],
    x: jax.Array,
) -> jax.Array:
    """Return float32 ``[experts, rows, D]`` of ``x [experts, rows, D]``, on the CPU."""
    found = []
    for index, leaves in enumerate(zip(ups, downs, strict=True)):
        weights = [unpack_on_cpu(*pair) for pair in zip(layouts, leaves, strict=True)]
        only = jnp.zeros((x.shape[1], 1), jnp.int32)
        own = [None if bias is None else jnp.asarray(bias)[index : index + 1] for bias in biases]
        found.append(_products(cfg, (weights[0], weights[1]), own, only, x[index])[:, 0])
    return jnp.stack(found)


def _products(
    cfg: ModelConfig,
    weights: tuple[Tree, Tree],
    biases: Sequence[jax.Array | None],
    experts: jax.Array,
    x: jax.Array,
) -> jax.Array:
    """Return float32 ``[T, k, D]``, unweighted; an index behind the last expert gives zeros."""
    assert cfg.experts is not None
    how: Options = {"gated": gate_of(cfg, cfg.experts), "bias": biases[0]}
    inner = grouped_matmul(x, weights[0], experts, first=0, **how)
    return grouped_matmul(
        inner, weights[1], experts, first=0, bias=biases[1], out_dtype=jnp.float32
    )


@functools.partial(jax.jit, donate_argnums=0)
def _with_pairs(y: jax.Array, places: np.ndarray, found: jax.Array) -> jax.Array:
    """Return ``y [T k, D]`` with the rows ``found`` at ``places``; places past its end are none."""
    return y.at[places].set(found, mode="drop")


@functools.partial(jax.jit, static_argnums=0)
def _finished(cfg: ModelConfig, p: Params, routed: Routed, y: jax.Array) -> Stream:
    """Return the stream with the mixture's output, of the pairs' ``y [T k, D]``."""
    assert cfg.experts is not None
    stream, tokens = routed.stream, routed.tokens
    pairs = y.reshape(*routed.experts.shape, y.shape[-1])
    out = weighted_sum(pairs, routed.weights, tokens.dtype).reshape(stream.x.shape)
    if cfg.experts.shared:
        out = out + shared(cfg, p["mlp"], tokens.reshape(stream.x.shape))
    return with_output(cfg, p, stream, out)
