"""A layer whose experts lie one by one: each runs where it is, or is loaded.

    work = ExpertWork(store, policy)
    stream, state = work.layer(layer, mixes, unit, weights, stream, state, at)
    stream, states = work.span(kind, layers, units, weights, stream, states, at)

A GPU reads pinned host memory itself. There layers of few tokens are one program, a span, whose
kernels fetch the experts that the router has chosen. Those that the CPU computes go by mail
(``mailbox``) in the middle of it. The host waits for nothing. Otherwise:

    device   the first half, norm, router, the pairs of the experts that it holds: one program
    link     the other experts with the most tokens, ``FETCHED`` at a time; where the host sends
             them, ``GROUP`` at a time, two groups ahead
    CPU      those with the fewest tokens, where they lie: their tokens move, not their weights
    device   the weighted sum of all pairs, the shared expert, the residual

The host reads which experts the router has chosen, so a layer waits for its router. Everything else
of it is dispatched. ``divided`` splits the experts between link and CPU, by the policy's costs.

So many tokens that they need nearly all experts stream them: the host sends the first groups of the
next layer while this one computes, before a router has chosen. They are sent once for a piece.

A pair of a token and an expert has the same bits wherever it is computed, if the products have:
each pair is computed once, in float32, and the sum goes in the order of the pairs. A machine with a
GPU rounds differently on its CPU, whose handlers read activations in 8 bits.

Left out: a guess of the few experts that the next layer's router will choose.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllama.config import LayerConfig
from jaxllama.executors.offloaded import expert_programs as programs
from jaxllama.executors.offloaded.cpu_attention import cpu
from jaxllama.executors.offloaded.expert_programs import (
    FETCHED,
    ComputedPairs,
    CpuExperts,
    CpuKind,
    FetchedCount,
    FlatParts,
    HotExperts,
    LayerKind,
    LoadedGroup,
    MixtureParts,
    Places,
    RoutedTokens,
)
from jaxllama.executors.offloaded.mailbox import Mailbox
from jaxllama.model.cache import LayerState
from jaxllama.model.linear import Stream
from jaxllama.offload.experts import (
    ExpertBias,
    ExpertLayout,
    ExpertTensor,
)
from jaxllama.offload.policy import CPU_PAIRS, Policy
from jaxllama.offload.store import Store
from jaxllama.offload.timeline import NO_RECORD, Recording
from jaxllama.offload.units import ModelUnit
from jaxllama.typing import Tree
from pallas_kernels.cpu.mail import MailLayout

GROUP = 8  # experts of one program that the host sends
ON_CPU = 4  # experts of one program of the CPU
PAIRS = 256  # fewest pairs of a group's program, if so many tokens have them
AHEAD = 2  # groups that are on their way or being computed
NEARLY_ALL = 0.9  # share of the experts that is needed, from which on they are streamed

Pieces = tuple[jax.Array, jax.Array]  # an expert's bytes on the device, of both products
Tensors = tuple[ExpertTensor, ExpertTensor]  # of both products


def placed_experts(weights: Tree) -> ExpertTensor | None:
    """Return the first product's experts of a layer's weights if they lie one by one."""
    gate_up = weights.get("mlp", {}).get("experts_gate_up")
    weight = None if gate_up is None else gate_up["weight"]
    return weight if isinstance(weight, ExpertTensor) else None


def streams(layer: LayerConfig, tokens: int) -> bool:
    """Whether so many tokens need nearly all of a layer's experts, which are then sent ahead."""
    assert layer.experts is not None
    unused = (1.0 - layer.experts.n_active / layer.experts.n_experts) ** tokens
    return 1.0 - unused >= NEARLY_ALL


def divided(
    tokens: Mapping[int, float],
    loaded: set[int],
    policy: Policy,
    heat: np.ndarray | None = None,
) -> tuple[list[int], list[int]]:
    """Return (experts to load, experts for the CPU) of those that a step needs.

    tokens: number of tokens by expert.  loaded: experts that need no load.
    heat: of ``HotSlots``, by expert.

    Experts with many tokens are loaded first, because the CPU's time grows with them. Among equal
    ones the hottest are, which may get a slot. The split is the one whose later end is earliest.
    """

    warmth = dict.fromkeys(tokens, 0.0) if heat is None else {e: float(heat[e]) for e in tokens}
    order = sorted(tokens, key=lambda e: (e not in loaded, -tokens[e], -warmth[e], e))
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
    """Experts that are on the device or on their way, but have no slot: those that one batch has
    loaded for the next batches of its block, and those that are sent ahead."""

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, Pieces]] = {}  # by layer

    def of(self, layer: int) -> dict[int, Pieces]:
        """Return a layer's pieces by expert; those of other layers are dropped."""
        self._pieces = {layer: self._pieces.get(layer, {})}
        return self._pieces[layer]

    def ahead(self, layer: int) -> dict[int, Pieces]:
        """Return the pieces of a layer that comes later."""
        return self._pieces.setdefault(layer, {})


@dataclasses.dataclass(frozen=True)
class Following:
    """What comes after a piece of tokens has passed a layer.

    keeps: another batch passes the layer, for which the loaded experts stay.
    layer, weights: the next layer with experts, if the piece is the last; -1 and None otherwise.
    """

    keeps: bool = False
    layer: int = -1
    weights: Tree = None


class SpanKind(NamedTuple):
    """What layers of one program share.  sizes, cpu: of their mail, if the CPU computes some."""

    sizes: MailLayout | None = None
    cpu: CpuKind | None = None


@dataclasses.dataclass
class ExpertTally:
    """moved, computed: numbers of experts whose load the host has begun, and that the CPU computed
    for it.
    ahead: of the former, those begun before their layer's router had chosen.
    computed_pairs: number of pairs that the CPU computed."""

    moved: int = 0
    ahead: int = 0
    computed: int = 0
    computed_pairs: int = 0


@dataclasses.dataclass
class ExpertWork:
    """The work of one run with experts that lie one by one.

    counts: tokens that have passed each expert, ``[E]`` by layer; of a layer that the device runs
        by itself only with ``counts_all``, because its router is not waited for otherwise.
    fetched: what the layers counted that the device runs by itself.
    """

    store: Store
    policy: Policy
    counts_all: bool = False
    counts: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    tally: ExpertTally = dataclasses.field(default_factory=ExpertTally)
    fetched: FetchedCount | None = None
    _mailbox: Mailbox | None = None
    _loaded: LoadedExperts = dataclasses.field(default_factory=LoadedExperts)
    _flat: dict[ModelUnit, tuple[Tree, FlatParts, _Cold]] = dataclasses.field(default_factory=dict)

    @property
    def loads(self) -> int:
        """Number of experts that were loaded."""
        return self.tally.moved + self._fetched_counts[0]

    @property
    def computed(self) -> tuple[int, int]:
        """Numbers of experts and of their pairs that the CPU computed."""
        _, computed, pairs = self._fetched_counts
        return self.tally.computed + computed, self.tally.computed_pairs + pairs

    @property
    def _fetched_counts(self) -> list[int]:
        return [0] * 3 if self.fetched is None else np.asarray(self.fetched.counts).tolist()

    def check(self) -> None:
        """Raise what the CPU's part of a span has raised."""
        if self._mailbox is not None:
            self._mailbox.check()

    def reset(self) -> None:
        """Set all counts to zero."""
        self.counts, self.tally, self.fetched, self._mailbox = {}, ExpertTally(), None, None

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
        following: Following = Following(),  # noqa: B008
    ) -> tuple[Stream, LayerState | None]:
        """Return the stream and the state after the layer.

        mixes: whether the layer's first half is run, too.
        """
        flat, cold = self._known(layer, unit, weights)
        tokens, known = stream.x.shape[0] * stream.x.shape[1], self._loaded.of(unit.layer)
        kind = None if known else self.kind(layer, unit, weights, tokens, following.keeps)
        if kind is not None:
            one = [layer], [unit], [weights]
            stream, [state] = self.span(kind, *one, stream, [state], where, sparse, mixes)
            return stream, state
        with cold.lock:
            routed, y, state, held = programs.routed_layer(
                layer, mixes, *flat, cold.hot, stream, state, where, sparse
            )
            cold.hold(cold.hot._replace(held=held))
            if cold.may_compute and routed.experts.size <= CPU_PAIRS:
                routed.tokens.copy_to_host_async()
            # Waits for the router and the hot pairs.
            chosen, slots, heat = jax.device_get((routed.experts, held.slots, held.heat))
            count = np.bincount(chosen.reshape(-1), minlength=cold.n_experts + 1)
            self.counts[unit.layer] = self.counts.get(unit.layer, 0) + count[:-1]
            ahead = self._ahead(following) if cold.is_streamed(tokens) else None
            loads = Loads(known, following.keeps, ahead, count, slots, heat)
            y, computed = cold.added(self.tally, y, routed, chosen, unit, record, loads)
        return programs.with_mixture(layer, *flat, routed, y, computed), state

    def kind(
        self, layer: LayerConfig, unit: ModelUnit, weights: Tree, tokens: int, keeps: bool = False
    ) -> SpanKind | None:
        """Return what layers of one span share; None if the host must know the routers' choice.

        keeps: as in ``Following``.
        """
        if self.counts_all:
            return None
        _, cold = self._known(layer, unit, weights)
        if cold.is_none:
            return SpanKind()
        if keeps or cold.is_streamed(tokens) or cold.addresses[0] is None:
            return None
        assert layer.experts is not None
        sizes = MailLayout(tokens, layer.d_model, tokens * layer.experts.n_active)
        if not (cold.may_compute and self.policy.of_pairs(sizes.pairs).cpu_expert):
            return SpanKind()
        is_mailed = cold.has_mail and sizes.pairs <= CPU_PAIRS
        return SpanKind(sizes, cold.kind) if is_mailed else None

    def span(
        self,
        kind: SpanKind,
        layers: list[LayerConfig],
        units: list[ModelUnit],
        weights: list[Tree],
        stream: Stream,
        states: list[LayerState | None],
        where: Places,
        sparse: bool = False,
        mixes: bool = True,
    ) -> tuple[Stream, list[LayerState | None]]:
        """Return the stream and the states after layers of one ``kind``, in one program."""
        found = [self._known(*own) for own in zip(layers, units, weights, strict=True)]
        if self.fetched is None:
            self.fetched = jax.device_put(FetchedCount.none(), self.store.on_device)
        kinds = tuple(
            LayerKind(layer, cold.layouts, flat.structure)
            for layer, (flat, cold) in zip(layers, found, strict=True)
        )
        with contextlib.ExitStack() as stack:
            for _, cold in found:
                stack.enter_context(cold.lock)
            mail = None
            if kind.sizes is not None and kind.cpu is not None:
                if self._mailbox is None:
                    self._mailbox = Mailbox(self.store, self.policy, kind.sizes.width)
                first, *after = (cold for _, cold in found)
                experts = first.on_cpu(*after)
                mail = self._mailbox.mail
                stack.enter_context(self._mailbox.serving(kind.cpu, kind.sizes, experts))
            stream, states, self.fetched, hot = programs.fetched(
                kinds,
                mixes,
                [flat.leaves for flat, _ in found],
                [cold.hot for _, cold in found],
                stream,
                states,
                where,
                self.fetched,
                sparse,
                mail,
            )
            for (_, cold), own in zip(found, hot, strict=True):
                cold.hold(own)
        return stream, states

    def _known(self, layer: LayerConfig, unit: ModelUnit, weights: Tree) -> tuple[FlatParts, _Cold]:
        tree, flat, cold = self._flat.get(unit, (None, None, None))
        if flat is None or cold is None or tree is not weights:
            flat, cold = self._parts(layer, weights)
            if self.policy.weights.device >= 100:  # others are gone after the layer
                self._flat[unit] = weights, flat, cold
        return flat, cold

    def _ahead(self, following: Following) -> Ahead | None:
        """Return the experts to send for the layer that follows: the hottest that have no slot."""
        if following.weights is None:
            return None
        mixture = following.weights["mlp"]
        tensors = mixture["experts_gate_up"]["weight"], mixture["experts_down"]["weight"]
        if tensors[0].is_whole:
            return None
        with tensors[0].lock:  # later layers' locks only, so no two threads wait for each other
            slots, heat = jax.device_get((tensors[0].held.slots, tensors[0].held.heat))
        order = np.arange(len(slots) - 1) if heat is None else np.argsort(-heat, kind="stable")
        cold = [int(expert) for expert in order if slots[expert] == slots[-1]]
        return Ahead(tensors, cold[: AHEAD * GROUP], self._loaded.ahead(following.layer))

    def _parts(self, layer: LayerConfig, weights: Tree) -> tuple[FlatParts, _Cold]:
        """Return a layer's parts, and those of its experts that are not on the device."""
        mixture = weights["mlp"]
        gate_up, down = mixture["experts_gate_up"], mixture["experts_down"]
        up: ExpertTensor = gate_up["weight"]
        dense = {n: part for n, part in mixture.items() if not n.startswith("experts_")}
        dense = {**programs.without_mlp(weights), "mlp": dense}
        biases = gate_up.get("bias"), down.get("bias")
        cold = _Cold(self.store, self.policy, layer, (up, down["weight"]), biases)
        return FlatParts.of(MixtureParts(dense, cold.on_device, cold.addresses)), cold


@dataclasses.dataclass(frozen=True)
class Ahead:
    """Experts to send before their layer's router has chosen."""

    tensors: Tensors
    experts: list[int]
    known: dict[int, Pieces]


@dataclasses.dataclass(frozen=True)
class Loads:
    """What the host knows before it loads a layer's experts.

    known: loaded ones.  keeps: they stay.  ahead: of the next layer.
    count: pairs of each expert, ``[E + 1]``.  slots, heat: of ``HotSlots``.
    """

    known: dict[int, Pieces]
    keeps: bool
    ahead: Ahead | None
    count: np.ndarray
    slots: np.ndarray
    heat: np.ndarray | None


class _Cold:
    """The experts of a layer, which are not all on the device.

    It knows no ``ExpertWork``, which keeps it: a run's memory is free as soon as the run is.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        layer: LayerConfig,
        tensors: Tensors,
        biases: tuple[ExpertBias | None, ExpertBias | None],
    ) -> None:
        self.store, self.policy, self.layer = store, policy, layer
        self.tensors, self.biases = tensors, biases
        self.on_device = [None if bias is None else bias.device for bias in biases]
        self.pairs: dict[int, np.ndarray] = {}  # of the batch at hand, by expert
        self.n_experts = tensors[0].shape[0]
        self.is_none = tensors[0].is_whole
        self.may_compute = policy.cpu_expert > 0 and not self.is_none
        self.has_handlers = all(tensor.layout.is_of_cpu for tensor in tensors)
        self.kind = CpuKind.of(layer, self.layouts)
        self.has_mail = self.has_handlers and self.kind.mailed is not None
        self.addresses = tensors[0].addresses, tensors[1].addresses
        self.lock = tensors[0].lock
        self._on_cpu: dict[tuple[_Cold, ...], CpuExperts] = {}  # by the layers after it in a span

    def is_streamed(self, tokens: int) -> bool:
        """Whether the host sends the experts ahead for so many tokens."""
        return streams(self.layer, tokens) and not self.lays_out

    def on_cpu(self, *after: _Cold) -> CpuExperts:
        """Return what the CPU's part of this layer and of those after it in a span reads."""
        if after not in self._on_cpu:
            self._on_cpu[after] = self._stacked((self, *after))
        return self._on_cpu[after]

    def _stacked(self, found: tuple[_Cold, ...]) -> CpuExperts:
        def stacked(parts: list[np.ndarray]) -> Any:
            return jax.device_put(np.stack(parts), cpu()) if parts else None

        patterns = [next(iter(tensor.views.values())) for tensor in self.tensors]
        tables = [
            stacked([tensor.leaf_addresses for tensor in each])
            for each in zip(*(cold.tensors for cold in found), strict=True)
        ]
        biases = [
            stacked([bias.host.astype(np.float32) for bias in each if bias is not None])
            for each in zip(*(cold.biases for cold in found), strict=True)
        ]
        return CpuExperts(patterns, tables, biases)

    @property
    def hot(self) -> HotExperts:
        up, down = self.tensors
        return HotExperts((up.hot, down.hot), up.held)

    def hold(self, hot: HotExperts) -> None:
        """Put other experts into the slots."""
        for tensor, weights in zip(self.tensors, hot.weights, strict=True):
            tensor.hot, tensor.held = weights, hot.held

    @property
    def lays_out(self) -> bool:
        """Whether the device needs a layout of its own, which its kernel gives to what it reads."""
        layout = self.layouts[0]
        return layout.restores and layout.is_of_cpu and self.addresses[0] is not None

    def added(
        self,
        tally: ExpertTally,
        y: jax.Array,
        routed: RoutedTokens,
        chosen: np.ndarray,
        unit: ModelUnit,
        record: Recording,
        loads: Loads,
    ) -> tuple[jax.Array, ComputedPairs | None]:
        """Return ``y`` with the pairs of loaded experts, and those of the CPU.

        chosen: ``routed.experts`` on the host.
        """
        known, ahead = loads.known, loads.ahead
        self.pairs = self._cold_pairs(chosen, loads)
        tokens = {expert: len(expert_pairs) for expert, expert_pairs in self.pairs.items()}
        policy = self.policy.of_pairs(chosen.size)
        to_load, to_compute = divided(tokens, set(known), policy, loads.heat)
        tally.computed += len(to_compute)
        tally.computed_pairs += sum(tokens[expert] for expert in to_compute)
        sent_pairs = self._sent(to_compute, routed)  # before the device has more to do
        if not (known or loads.keeps or ahead) and self.addresses[0] is not None:
            tally.moved += len(to_load)
            return self._beside(y, routed, to_load, sent_pairs, unit, record)
        groups = _groups(to_load)
        sent = [(self.tensors, known, group) for group in groups]
        if ahead is not None:
            sent += [(ahead.tensors, ahead.known, group) for group in _groups(ahead.experts)]
            tally.ahead += len(ahead.experts)

        def begin(tensors: Tensors, known: dict[int, Pieces], group: list[int]) -> None:
            with record.watching("load weights", unit) as out:
                new = [expert for expert in group if expert not in known]
                known |= self._begin(tensors, new)
                out.append([known[expert] for expert in group])
            tally.moved += len(new)

        for group in sent[:AHEAD]:
            begin(*group)
        computed = self._compute(sent_pairs)
        for number, group in enumerate(groups):
            pieces = [known[expert] if loads.keeps else known.pop(expert) for expert in group]
            y, done = self._with(y, routed, self._group(group, pieces, routed))
            del pieces
            if number + AHEAD < len(sent):
                jax.block_until_ready(done)
                begin(*sent[number + AHEAD])
        return y, _finished(computed, y.shape[0], unit, record)

    def _beside(
        self,
        y: jax.Array,
        routed: RoutedTokens,
        to_load: list[int],
        sent: list[SentPairs],
        unit: ModelUnit,
        record: Recording,
    ) -> tuple[jax.Array, ComputedPairs | None]:
        """As ``added``, if the device reads experts: the host begins that before the CPU's part,
        which takes all cores."""
        for first in range(0, len(to_load), FETCHED):
            group = self._group(to_load[first : first + FETCHED], None, routed)
            y, _ = self._with(y, routed, group)
        return y, _finished(self._compute(sent), y.shape[0], unit, record)

    def _with(
        self, y: jax.Array, routed: RoutedTokens, group: LoadedGroup
    ) -> tuple[jax.Array, jax.Array]:
        """Return ``y`` with a group's pairs, and a scalar to wait for."""
        how = self.layer, self.layouts, self.on_device, self.addresses
        y, hot, done = programs.added_pairs(*how, routed.tokens, y, self.hot, group)
        self.hold(hot)
        return y, done

    def _cold_pairs(self, chosen: np.ndarray, loads: Loads) -> dict[int, np.ndarray]:
        """Return the pairs, ``token * k + j``, of each expert that is not on the device."""
        flat = chosen.reshape(-1).astype(np.uint16)  # numpy sorts 16 bits by radix
        pairs = np.split(np.argsort(flat, kind="stable"), np.cumsum(loads.count)[:-1])
        is_cold = (loads.slots == loads.slots[-1]) & (loads.count > 0)
        is_cold[-1] = False  # of a token that is none
        return {int(expert): pairs[expert] for expert in np.flatnonzero(is_cold)}

    @property
    def layouts(self) -> tuple[ExpertLayout, ExpertLayout]:
        return self.tensors[0].layout, self.tensors[1].layout

    def _begin(self, tensors: Tensors, experts: list[int]) -> dict[int, Pieces]:
        """Begin to load experts."""
        stored = [tensor.stored(self.store, expert) for expert in experts for tensor in tensors]
        moved = jax.device_put(stored, self.store.on_device)
        return dict(zip(experts, zip(moved[::2], moved[1::2], strict=True), strict=True))

    def _group(
        self, group: list[int], pieces: list[Pieces] | None, routed: RoutedTokens
    ) -> LoadedGroup:
        """Return a group of experts, padded to few sizes, because each is a program.

        pieces: of loaded experts; None if the device reads them.
        """
        none = routed.experts.size
        cold = self.n_experts - self.hot.held.experts.shape[0]
        width, parts = min(cold, none, GROUP if pieces else FETCHED), None
        empty = width - len(group)
        if pieces is not None:
            parts = tuple(zip(*pieces, *pieces[:1] * empty, strict=True))
        experts = np.asarray(group + [self.n_experts] * empty, np.int32)
        group_pairs = [self.pairs[expert] for expert in group]
        pairs = np.concatenate(group_pairs)
        count = min(PAIRS, none)
        while count < len(pairs):
            count = min(4 * count, none)
        places, slots = np.full(count, none, np.int32), np.full(count, width, np.int32)
        places[: len(pairs)] = pairs
        slots[: len(pairs)] = np.repeat(np.arange(len(group)), [len(part) for part in group_pairs])
        return LoadedGroup(experts, parts, places, slots, _rows_of(routed, places))

    def _sent(self, experts: list[int], routed: RoutedTokens) -> list[SentPairs]:
        """Begin to send the tokens of the CPU's experts to the host."""
        if not experts:
            return []
        if self.has_handlers and not self.tensors[0].disk:
            groups = [sorted(experts)]
            pairs = np.concatenate([self.pairs[expert] for expert in groups[0]])
            places = [_filled(pairs, routed.experts.size)]
        else:
            groups = [experts[first : first + ON_CPU] for first in range(0, len(experts), ON_CPU)]
            places = [self._in_rows(group, routed.experts.size) for group in groups]
        return [SentPairs.of(routed, *part) for part in zip(groups, places, strict=True)]

    def _in_rows(self, group: list[int], none: int) -> np.ndarray:
        """Return the pairs of each expert of a group, int32 ``[experts, rows]``."""
        rows = _size(max(len(self.pairs[expert]) for expert in group))
        places = np.full((len(group), rows), none, np.int32)
        for place, expert in zip(places, group, strict=True):
            place[: len(self.pairs[expert])] = self.pairs[expert]
        return places

    def _compute(self, sent: list[SentPairs]) -> list[tuple[np.ndarray, jax.Array]]:
        """Begin the CPU's products; return (pairs, results float32 ``[..., D]``)."""
        (up, down), store, results = self.tensors, self.store, []
        for group, places, tokens, rows in sent:
            x = np.asarray(tokens)[rows]
            with jax.default_device(cpu()):
                if places.ndim == 1:
                    sizes = [len(self.pairs[expert]) for expert in group]
                    chosen = np.repeat(np.asarray(group, np.int32), sizes)
                    chosen = _filled(chosen, self.n_experts)
                    found = programs.computed(self.kind, self.on_cpu(), x, chosen)
                else:
                    found = programs.computed_pairs_of(
                        self.layer,
                        self.layouts,
                        [up.on_cpu(store, expert) for expert in group],
                        [down.on_cpu(store, expert) for expert in group],
                        [None if bias is None else bias.host[group] for bias in self.biases],
                        x,
                    )
            results.append((places.reshape(-1), found))
        return results


class SentPairs(NamedTuple):
    """Pairs of experts that the CPU computes, and their ``tokens[rows]``, on the way to the host.

    places: as in ``LoadedGroup``, int32 ``[P]`` by expert, or ``[experts, rows]``.
    """

    experts: list[int]
    places: np.ndarray
    tokens: jax.Array
    rows: np.ndarray

    @classmethod
    def of(cls, routed: RoutedTokens, experts: list[int], places: np.ndarray) -> SentPairs:
        """Begin to send the pairs' tokens, or all if these are fewer. A step's are on their way."""
        tokens, rows = routed.tokens, _rows_of(routed, places)
        if routed.experts.size > CPU_PAIRS and places.size < len(tokens):
            tokens = programs.taken(tokens, rows.reshape(-1))
            rows = np.arange(places.size).reshape(places.shape)
        tokens.copy_to_host_async()
        return cls(experts, places, tokens, rows)


def _rows_of(routed: RoutedTokens, places: np.ndarray) -> np.ndarray:
    """Return the tokens of pairs; the last one for a pair that is none."""
    return np.minimum(places // routed.experts.shape[1], len(routed.tokens) - 1)


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
    return ComputedPairs(_filled(places, none), _filled(np.concatenate(rows), 0))


def _groups(experts: list[int]) -> list[list[int]]:
    return [experts[first : first + GROUP] for first in range(0, len(experts), GROUP)]


def _filled(values: np.ndarray, none: int) -> np.ndarray:
    """Return the values with ``none`` behind them, up to the next ``_size``."""
    empty = _size(len(values)) - len(values)
    return np.pad(values, ((0, empty), *[(0, 0)] * (values.ndim - 1)), constant_values=none)


def _size(count: int) -> int:
    """Return the power of two that holds ``count``: programs are compiled for such sizes only."""
    return 1 << (count - 1).bit_length()
