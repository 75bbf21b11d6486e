"""A layer whose experts lie one by one: each runs where it is, or is loaded.

    work = ExpertWork(store, policy)
    stream, state = work.layer(layer, mixes, unit, weights, stream, state, at)

A GPU reads pinned host memory itself. Where the CPU computes nothing, a layer is one program, whose
kernels fetch the experts that the router has chosen, and the host waits for nothing. Otherwise:

    device   the first half, norm, router, the pairs of the experts that it holds: one program
    link     the other experts with the most tokens, ``FETCHED`` at a time; where the host sends
             them, ``GROUP`` at a time, two groups ahead
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
from collections import deque
from collections.abc import Mapping

import jax
import numpy as np

from jaxllama.config import LayerConfig
from jaxllama.executors.offloaded import expert_programs as programs
from jaxllama.executors.offloaded.cpu_attention import cpu
from jaxllama.executors.offloaded.expert_programs import (
    FETCHED,
    ComputedPairs,
    FlatParts,
    LoadedGroup,
    MixtureParts,
    Places,
    RoutedTokens,
)
from jaxllama.model.cache import LayerState
from jaxllama.model.linear import Stream
from jaxllama.offload.experts import (
    ExpertBias,
    ExpertLayout,
    ExpertTensor,
)
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.offload.timeline import NO_RECORD, Recording
from jaxllama.offload.units import ModelUnit
from jaxllama.typing import Tree

GROUP = 8  # experts of one program that the host sends
ON_CPU = 4  # experts of one program of the CPU
AHEAD = 2  # groups that are on their way or being computed

Pieces = tuple[jax.Array, jax.Array]  # an expert's bytes on the device, of both products


def placed_experts(weights: Tree) -> ExpertTensor | None:
    """Return the first product's experts of a layer's weights if they lie one by one."""
    gate_up = weights.get("mlp", {}).get("experts_gate_up")
    weight = None if gate_up is None else gate_up["weight"]
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
class ExpertTally:
    """moved, computed: numbers of experts whose load the host has begun, and that the CPU computed.
    computed_pairs: number of pairs that the CPU computed."""

    moved: int = 0
    computed: int = 0
    computed_pairs: int = 0


@dataclasses.dataclass
class ExpertWork:
    """The work of one run with experts that lie one by one.

    counts: tokens that have passed each expert, ``[E]`` by layer; of a layer whose experts are all
        on the device only with ``counts_all``, because its router is not waited for otherwise.
    fetched: int32 on the device: number of experts that the device itself has read.
    """

    store: Store
    policy: Policy
    counts_all: bool = False
    counts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    tally: ExpertTally = dataclasses.field(default_factory=ExpertTally)
    fetched: jax.Array | None = None
    _flat: dict[ModelUnit, tuple[Tree, FlatParts, _Cold]] = dataclasses.field(default_factory=dict)

    @property
    def loads(self) -> int:
        """Number of experts that were loaded."""
        return self.tally.moved + (0 if self.fetched is None else int(self.fetched))

    def reset(self) -> None:
        """Set all counts to zero."""
        self.counts, self.tally, self.fetched = {}, ExpertTally(), None

    def layer(
        self,
        layer: LayerConfig,
        mixes: bool,
        unit: ModelUnit,
        weights: Tree,
        stream: Stream,
        state: LayerState | None,
        where: Places,
        sparse: bool = False,
        record: Recording = NO_RECORD,
        loaded: dict[int, Pieces] | None = None,
    ) -> tuple[Stream, LayerState | None]:
        """Return the stream and the state after the layer.

        mixes: whether the layer's first half is run, too.
        loaded: loaded experts, for which the layer's next batches look there; None keeps none.
        """
        known, flat, cold = self._flat.get(unit, (None, None, None))
        if flat is None or cold is None or known is not weights:
            flat, cold = self._parts(layer, weights)
            if self.policy.weights.device >= 100:  # others are gone after the layer
                self._flat[unit] = weights, flat, cold
        if self._fetches(cold, loaded):
            if self.fetched is None:
                self.fetched = jax.device_put(np.int32(0), self.store.on_device)
            stream, state, self.fetched = programs.fetched(
                layer, mixes, cold.layouts, *flat, stream, state, where, self.fetched, sparse
            )
            return stream, state
        routed, y, state = programs.routed_layer(layer, mixes, *flat, stream, state, where, sparse)
        if cold.may_compute:
            routed.tokens.copy_to_host_async()
        chosen = np.asarray(routed.experts)  # waits for the router and the hot pairs
        count = np.bincount(chosen.reshape(-1), minlength=cold.n_experts + 1)[:-1]
        self.counts[unit.layer] = self.counts.get(unit.layer, 0) + count
        y, computed = cold.added(self.tally, y, routed, chosen, unit, record, loaded)
        return programs.with_mixture(layer, *flat, routed, y, computed), state

    def _fetches(self, cold: _Cold, loaded: dict[int, Pieces] | None) -> bool:
        """Whether the device reads a layer's experts by itself: nothing else needs to know them."""
        if self.counts_all:
            return False
        reads = loaded is None and not cold.may_compute and cold.addresses[0] is not None
        return cold.is_none or reads

    def _parts(self, layer: LayerConfig, weights: Tree) -> tuple[FlatParts, _Cold]:
        """Return a layer's parts, and those of its experts that are not on the device."""
        mixture = weights["mlp"]
        gate_up, down = mixture["experts_gate_up"], mixture["experts_down"]
        up: ExpertTensor = gate_up["weight"]
        dense = {n: part for n, part in mixture.items() if not n.startswith("experts_")}
        dense = {**programs.without_mlp(weights), "mlp": dense}
        biases = gate_up.get("bias"), down.get("bias")
        cold = _Cold(self.store, self.policy, layer, (up, down["weight"]), biases)
        hot = up.hot, down["weight"].hot
        parts = MixtureParts(dense, hot, cold.on_device, up.held, cold.addresses)
        return FlatParts.of(parts), cold


class _Cold:
    """The experts of a layer that are not on the device.

    It knows no ``ExpertWork``, which keeps it: a run's memory is free as soon as the run is.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        layer: LayerConfig,
        tensors: tuple[ExpertTensor, ExpertTensor],
        biases: tuple[ExpertBias | None, ExpertBias | None],
    ) -> None:
        self.store, self.policy, self.layer = store, policy, layer
        self.tensors, self.biases = tensors, biases
        self.on_device = [None if bias is None else bias.device for bias in biases]
        self.pairs: dict[int, np.ndarray] = {}  # of the batch at hand, by expert
        self.n_experts = tensors[0].shape[0]
        self.is_none = tensors[0].is_whole
        self.may_compute = policy.cpu_expert > 0 and not self.is_none
        self.addresses = tensors[0].addresses, tensors[1].addresses
        self._held = np.zeros(self.n_experts + 1, bool)
        self._held[[*tensors[0].place.device, self.n_experts]] = True

    def added(
        self,
        tally: ExpertTally,
        y: jax.Array,
        routed: RoutedTokens,
        chosen: np.ndarray,
        unit: ModelUnit,
        record: Recording,
        loaded: dict[int, Pieces] | None,
    ) -> tuple[jax.Array, ComputedPairs | None]:
        """Return ``y`` with the pairs of loaded experts, and those of the CPU.

        chosen: ``routed.experts`` on the host.
        """
        self.pairs = self._cold_pairs(chosen)
        if not self.pairs:
            return y, None
        known = {} if loaded is None else loaded
        tokens = {expert: len(expert_pairs) for expert, expert_pairs in self.pairs.items()}
        to_load, to_compute = divided(tokens, set(known), self.policy)
        tally.moved += sum(expert not in known for expert in to_load)
        tally.computed += len(to_compute)
        tally.computed_pairs += sum(tokens[expert] for expert in to_compute)
        if loaded is None and self.addresses[0] is not None:
            return self._beside(y, routed, to_load, to_compute, unit, record)
        groups = [to_load[first : first + GROUP] for first in range(0, len(to_load), GROUP)]
        begun: deque[list[Pieces]] = deque()
        running: deque[jax.Array] = deque()

        def begin(group: list[int]) -> None:
            with record.watching("load weights", unit) as out:
                begun.append(self._begin(group, known))
                out.append(begun[-1])
            if loaded is not None:
                loaded.update(zip(group, begun[-1], strict=True))

        for group in groups[:AHEAD]:
            begin(group)
        computed = self._compute(to_compute, routed)
        for number, group in enumerate(groups):
            expert_pairs = self._group(group, begun.popleft(), routed)
            y = self._with(y, routed, expert_pairs)
            running.append(y)
            if number + AHEAD < len(groups):
                jax.block_until_ready(running.popleft())
                begin(groups[number + AHEAD])
        return y, _finished(computed, y.shape[0], unit, record)

    def _beside(
        self,
        y: jax.Array,
        routed: RoutedTokens,
        to_load: list[int],
        to_compute: list[int],
        unit: ModelUnit,
        record: Recording,
    ) -> tuple[jax.Array, ComputedPairs | None]:
        """As ``added``, if the device reads experts: the host begins that, and the CPU's part."""
        groups = [to_load[first : first + FETCHED] for first in range(0, len(to_load), FETCHED)]
        for group in groups[:1]:
            y = self._with(y, routed, self._group(group, None, routed))
        computed = self._compute(to_compute, routed)
        for group in groups[1:]:
            y = self._with(y, routed, self._group(group, None, routed))
        return y, _finished(computed, y.shape[0], unit, record)

    def _with(self, y: jax.Array, routed: RoutedTokens, group: LoadedGroup) -> jax.Array:
        how = self.layer, self.layouts, self.on_device, self.addresses
        return programs.added_pairs(*how, routed.tokens, y, group)

    def _cold_pairs(self, chosen: np.ndarray) -> dict[int, np.ndarray]:
        """Return the pairs, ``token * k + j``, of each expert that is not on the device."""
        flat = chosen.reshape(-1)
        cold = np.flatnonzero(~self._held[flat])
        return {int(expert): cold[flat[cold] == expert] for expert in np.unique(flat[cold])}

    @property
    def layouts(self) -> tuple[ExpertLayout, ExpertLayout]:
        return self.tensors[0].layout, self.tensors[1].layout

    def _begin(self, group: list[int], known: Mapping[int, Pieces]) -> list[Pieces]:
        """Begin to load a group's experts, but those that are ``known``."""
        new, store = [expert for expert in group if expert not in known], self.store
        if not new:
            return [known[expert] for expert in group]
        stored = [tensor.stored(store, expert) for expert in new for tensor in self.tensors]
        moved = jax.device_put(stored, store.on_device)
        begun = dict(zip(new, zip(moved[::2], moved[1::2], strict=True), strict=True))
        return [known[expert] if expert in known else begun[expert] for expert in group]

    def _group(
        self, group: list[int], pieces: list[Pieces] | None, routed: RoutedTokens
    ) -> LoadedGroup:
        """Return a group of experts, padded to few sizes.

        pieces: of loaded experts; None if the device reads them.
        """
        width, fan = _size(len(group)), routed.experts.shape[1]
        empty, parts = width - len(group), None
        if pieces is not None:
            parts = tuple(zip(*pieces, *pieces[:1] * empty, strict=True))
        rest = [self.n_experts] if pieces is None else group[:1]
        experts = np.asarray(group + rest * empty, np.int32)
        group_pairs = [self.pairs[expert] for expert in group]
        pairs = np.concatenate(group_pairs)
        count = width
        while count < len(pairs):
            count *= 4  # few sizes, because each is a program
        places = np.full(count, routed.experts.size, np.int32)  # a pair that is none
        places[: len(pairs)] = pairs
        slots = np.zeros(count, np.int32)
        slots[: len(pairs)] = np.repeat(np.arange(len(group)), [len(part) for part in group_pairs])
        rows = np.minimum(places // fan, len(routed.tokens) - 1)
        return LoadedGroup(experts, parts, places, slots, rows)

    def _compute(
        self, experts: list[int], routed: RoutedTokens
    ) -> list[tuple[np.ndarray, jax.Array]]:
        """Begin the CPU's products; return (pairs, results float32 ``[experts, rows, D]``)."""
        if not experts:
            return []
        tokens, fan = np.asarray(routed.tokens), routed.experts.shape[1]
        (up, down), store = self.tensors, self.store
        results = []
        for first in range(0, len(experts), ON_CPU):
            group = experts[first : first + ON_CPU]
            rows = _size(max(len(self.pairs[expert]) for expert in group))
            places = np.full((len(group), rows), routed.experts.size, np.int32)
            for place, expert in zip(places, group, strict=True):
                place[: len(self.pairs[expert])] = self.pairs[expert]
            with jax.default_device(cpu()):
                found = programs.computed_pairs_of(
                    self.layer,
                    self.layouts,
                    [up.on_cpu(store, expert) for expert in group],
                    [down.on_cpu(store, expert) for expert in group],
                    [None if bias is None else bias.host[group] for bias in self.biases],
                    tokens[np.minimum(places // fan, len(tokens) - 1)],
                )
            results.append((places.reshape(-1), found))
        return results


def _finished(
    results: list[tuple[np.ndarray, jax.Array]], none: int, unit: ModelUnit, record: Recording
) -> ComputedPairs | None:
    """Wait for the CPU's products; return them in few sizes, because each is a program.

    none: a place that is none.
    """
    if not results:
        return None
    with record("experts on CPU", unit):
        jax.block_until_ready([result for _, result in results])
    places = np.concatenate([part for part, _ in results])
    rows = [np.asarray(part).reshape(-1, part.shape[-1]) for _, part in results]
    empty = _size(len(places)) - len(places)
    rows.append(np.zeros((empty, rows[0].shape[1]), rows[0].dtype))
    return ComputedPairs(np.pad(places, (0, empty), constant_values=none), np.concatenate(rows))


def _size(count: int) -> int:
    """Return the power of two that holds ``count``: programs are compiled for such sizes only."""
    return 1 << (count - 1).bit_length()
