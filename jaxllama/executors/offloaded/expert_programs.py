"""The jitted programs of a layer whose experts lie one by one (``experts`` calls them).

    routed, y, state, held = routed_layer(...)      the first half; router; pairs of experts there
    y, hot, done = added_pairs(..., y, hot, group)  and of a group of loaded experts
    computed(...)                                   pairs of experts that the CPU computes
    computed_pairs_of(...)                          the same for experts without handlers
    stream = with_mixture(..., y, computed)         and the CPU's pairs; the weighted sum
    stream, states, count, hot = fetched(...)       whole layers; the device itself reads experts
    served(...)                                     the CPU's part of these layers, for their mail

A pair is a token and one of its experts. Loaded experts that are chosen more than those on the
device take their slots (``offload.experts``). Dispatching a program costs a GPU's host more than
most of them take, so there are few.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllama.config import LayerConfig
from jaxllama.model.cache import LayerState
from jaxllama.model.elementwise import activated
from jaxllama.model.experts.feed import gate_of, inputs_of, with_output
from jaxllama.model.forms import FORMS
from jaxllama.model.linear import Stream
from jaxllama.model.records import new_tokens
from jaxllama.model.rope import Ropes
from jaxllama.offload import experts as placed
from jaxllama.offload.experts import (
    ExpertLayout,
    HotExperts,
    HotSlots,
    kept,
    ranked,
    tokens_of,
    unpack,
    unpack_on_cpu,
    warmed,
)
from jaxllama.typing import ArrayOrNumpy, Options, Params, Tree
from pallas_kernels.cpu import mail as cpu_mail
from pallas_kernels.cpu.experts import run_apart
from pallas_kernels.cpu.mail import Clamped, MailedGate, MailedProduct, MailLayout
from pallas_kernels.cpu.weight import TILE
from pallas_kernels.experts.gate import ClampedGate, Gate, apply_gate
from pallas_kernels.experts.mail import collect, post
from pallas_kernels.experts.op import grouped_matmul, weighted_sum
from pallas_kernels.operands import TreeDef

FETCHED = 16  # experts that ``fetched`` has in device memory at once


class RoutedTokens(NamedTuple):
    """tokens ``[T, D]``, of which each passes ``experts [T, k]`` with ``weights``; index E is no
    expert, for a token that is none."""

    tokens: jax.Array
    experts: jax.Array
    weights: jax.Array
    stream: Stream


class MixtureParts(NamedTuple):
    """The weights of a layer without its experts, ``dense``, and the experts' biases.

    addresses: of the experts in pinned memory, or None if there are none or no kernel reads them.
    """

    dense: Params
    biases: Sequence[jax.Array | None]
    addresses: tuple[jax.Array | None, jax.Array | None]


class Places(NamedTuple):
    """Where the tokens of a stream ``[B, T, D]`` stand; ``lengths[B]`` of a row's are valid."""

    positions: jax.Array
    lengths: jax.Array
    rope: Ropes | None


class FlatParts(NamedTuple):
    """``MixtureParts`` as leaves and structure, which no step needs to find again."""

    structure: TreeDef
    leaves: list[jax.Array]

    @classmethod
    def of(cls, parts: MixtureParts) -> FlatParts:
        leaves, structure = jax.tree.flatten(parts)
        return cls(structure, leaves)


class LoadedGroup(NamedTuple):
    """Experts and their pairs.

    experts: index E is none.
    pieces: the experts' bytes, of both products; None if the device reads them.
    places ``[P]``: the pairs, ``token * k + j``; one past the end is none.
    slots, rows ``[P]``: a pair's place among ``experts`` and its token.
    """

    experts: np.ndarray
    pieces: tuple[tuple[jax.Array, ...], ...] | None
    places: np.ndarray
    slots: np.ndarray
    rows: np.ndarray


class Mail(NamedTuple):
    """Where a device posts the experts that the CPU computes, and which these are.

    address: int32 ``[2]``, low word before high.
    expert, token: float32; what the CPU takes to compute an expert of one token and each further
        token, beside the load of one expert. None if the CPU computes all, so that nothing is
        loaded.
    """

    address: ArrayOrNumpy
    expert: ArrayOrNumpy | None
    token: ArrayOrNumpy | None


class FetchedCount(NamedTuple):
    """counts: int32 ``[3]``, experts that the device has read, experts and pairs of the CPU.
    turn: int32 ``[1]``, the last one of the mail."""

    counts: jax.Array
    turn: jax.Array

    @classmethod
    def none(cls) -> FetchedCount:
        return cls(jnp.zeros(3, jnp.int32), jnp.zeros(1, jnp.int32))


class ComputedPairs(NamedTuple):
    """Results ``found [P, D]`` of the CPU, and their places as in ``LoadedGroup``."""

    places: np.ndarray
    found: np.ndarray


def without_mlp(weights: Tree) -> Tree:
    """Return a layer's weights without its second half's products."""
    return {name: part for name, part in weights.items() if name != "mlp"}


def _routed_layer(
    layer: LayerConfig,
    mixes: bool,
    structure: TreeDef,
    leaves: list[jax.Array],
    hot: HotExperts,
    stream: Stream,
    state: LayerState | None,
    where: Places,
    sparse: bool = False,
) -> tuple[RoutedTokens, jax.Array, LayerState | None, HotSlots]:
    """Return the routed tokens, float32 ``[T k, D]``, which are the pairs of experts on the device
    and zeros, the state after the layer's first half, and the slots with the heat after it.

    mixes: whether its first half is run, too.  structure, leaves: of ``FlatParts``.
    """
    parts: MixtureParts = structure.unflatten(leaves)
    assert layer.experts is not None
    positions, lengths, rope = where
    if mixes:
        at = new_tokens(positions, lengths, rope, sparse, cached=state is not None)
        form = FORMS[layer.form.name]
        stream, state = form.mix(layer, without_mlp(parts.dense), stream, state, at)
    (x, (experts, own_weights)), stream = inputs_of(layer, parts.dense, stream)
    tokens = x.reshape(-1, x.shape[-1])
    is_valid = jnp.arange(x.shape[1], dtype=jnp.int32) < lengths[:, None]
    experts = jnp.where(is_valid.reshape(-1, 1), experts, layer.experts.n_experts)
    routed, held = RoutedTokens(tokens, experts, own_weights, stream), warmed(hot.held, experts)
    if hot.weights[0] is None:
        return routed, jnp.zeros((experts.size, tokens.shape[-1]), jnp.float32), state, held
    held_biases = [None if bias is None else bias[held.experts] for bias in parts.biases]
    y = _products(layer, hot.weights, held_biases, held.slots[experts], tokens)
    return routed, y.reshape(experts.size, -1), state, held


routed_layer = jax.jit(_routed_layer, static_argnums=(0, 1, 2, 8), donate_argnums=6)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(5, 6))
def added_pairs(
    layer: LayerConfig,
    layouts: tuple[ExpertLayout, ExpertLayout],
    biases: Sequence[jax.Array | None],
    addresses: Sequence[jax.Array | None],
    tokens: jax.Array,
    y: jax.Array,
    hot: HotExperts,
    group: LoadedGroup,
) -> tuple[jax.Array, HotExperts, jax.Array]:
    """Return ``y`` with the pairs of a group of experts, the experts on the device after it, and a
    scalar to wait for."""
    if group.pieces is None:
        up, down = _fetched(layouts, addresses, jnp.asarray(group.experts))
    else:
        pieces = zip(layouts, group.pieces, strict=True)
        up, down = (unpack(layout, jnp.stack(weights)) for layout, weights in pieces)
    added = [None if bias is None else bias[group.experts] for bias in biases]
    slots = jnp.asarray(group.slots)[:, None]
    found = _products(layer, (up, down), added, slots, tokens[group.rows])[:, 0]
    hot = kept(hot, jnp.asarray(group.experts), (up, down))
    y = y.at[group.places].set(found, mode="drop", unique_indices=True)  # plain stores on a GPU
    return y, hot, found[0, 0]


def _fetched(
    layouts: tuple[ExpertLayout, ExpertLayout],
    addresses: Sequence[jax.Array | None],
    experts: jax.Array,
) -> tuple[Tree, Tree]:
    """Return both products' weights of ``experts``, which the device reads."""
    found = []
    for layout, table in zip(layouts, addresses, strict=True):
        assert table is not None
        found.append(placed.fetched(layout, table, experts))
    return found[0], found[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def computed_pairs_of(
    layer: LayerConfig,
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
        added = [None if bias is None else jnp.asarray(bias)[index : index + 1] for bias in biases]
        found.append(_products(layer, (weights[0], weights[1]), added, only, x[index])[:, 0])
    return jnp.stack(found)


def _products(
    layer: LayerConfig,
    weights: tuple[Tree, Tree],
    biases: Sequence[jax.Array | None],
    experts: jax.Array,
    x: jax.Array,
) -> jax.Array:
    """Return float32 ``[T, k, D]``, unweighted; an index behind the last expert gives zeros."""
    assert layer.experts is not None
    how: Options = {"gated": gate_of(layer, layer.experts), "bias": biases[0]}
    inner = grouped_matmul(x, weights[0], experts, first=0, **how)
    inner = inner if layer.gated_mlp else activated(inner, layer.activation)
    return grouped_matmul(
        inner, weights[1], experts, first=0, bias=biases[1], out_dtype=jnp.float32
    )


@jax.jit
def taken(tokens: jax.Array, rows: np.ndarray) -> jax.Array:
    """Return ``rows`` of the tokens ``[T, D]``."""
    return tokens[rows]


def _with_mixture(
    layer: LayerConfig,
    structure: TreeDef,
    leaves: list[jax.Array],
    routed: RoutedTokens,
    y: jax.Array,
    computed: ComputedPairs | None = None,
) -> Stream:
    """Return the stream with the mixture's output, of the pairs' ``y [T k, D]`` and those that the
    CPU has ``computed``."""
    parts: MixtureParts = structure.unflatten(leaves)
    stream, tokens = routed.stream, routed.tokens
    if computed is not None:
        y = y.at[computed.places].set(computed.found, mode="drop", unique_indices=True)
    pairs = y.reshape(*routed.experts.shape, y.shape[-1])
    out = weighted_sum(pairs, routed.weights, tokens.dtype).reshape(stream.x.shape)
    out = with_output(layer, parts.dense, stream, tokens.reshape(stream.x.shape), out)
    stream = FORMS[layer.form.name].finish(layer, parts.dense, out, None)
    # As the first layer finds it, so that a layer has one program wherever it stands.
    return stream._replace(x=stream.total, pending=None)


with_mixture = jax.jit(_with_mixture, static_argnums=(0, 1))


class LayerKind(NamedTuple):
    """What is static of a layer with experts.

    layouts: how the two products' weights of an expert lie in the host's memory.
    structure: of ``FlatParts``.
    """

    layer: LayerConfig
    layouts: tuple[ExpertLayout, ExpertLayout]
    structure: TreeDef


@functools.partial(jax.jit, static_argnums=(0, 1, 8), donate_argnums=(3, 5, 7))
def fetched(
    kinds: tuple[LayerKind, ...],
    mixes: bool,
    leaves: list[list[jax.Array]],
    hot: list[HotExperts],
    stream: Stream,
    states: list[LayerState | None],
    where: Places,
    count: FetchedCount,
    sparse: bool = False,
    mail: Mail | None = None,
) -> tuple[Stream, list[LayerState | None], FetchedCount, list[HotExperts]]:
    """Return (stream, states, count, hot) after layers whose device reads the experts it lacks.

    mixes, leaves: as for ``_routed_layer``; leaves, hot, states: by layer.
    where: positions ``[B, T]``, lengths ``[B]`` and RoPE tables of the tokens.
    count: these layers' are added to it.
    sparse: whether the tokens read V sparsely.
    mail: with it, the CPU computes some of the experts.
    """
    hot, states = [*hot], [*states]
    for place, kind in enumerate(kinds):
        own = leaves[place], hot[place], stream, states[place]
        stream, states[place], count, hot[place] = _fetched_layer(
            kind, mixes, *own, where, count, sparse, mail
        )
        # Each layer is compiled as if alone. What it has read is gone before the next one reads.
        stream, hot[place] = lax.optimization_barrier((stream, hot[place]))
    return stream, states, count, hot


def _fetched_layer(
    kind: LayerKind,
    mixes: bool,
    leaves: list[jax.Array],
    hot: HotExperts,
    stream: Stream,
    state: LayerState | None,
    where: Places,
    count: FetchedCount,
    sparse: bool,
    mail: Mail | None,
) -> tuple[Stream, LayerState | None, FetchedCount, HotExperts]:
    layer, layouts, structure = kind
    parts: MixtureParts = structure.unflatten(leaves)
    routed, y, state, held = _routed_layer(
        layer, mixes, structure, leaves, hot, stream, state, where, sparse
    )
    biases, experts = parts.biases, routed.experts
    n_experts = held.slots.shape[0] - 1
    loads = mail is None or mail.expert is not None
    most = min(n_experts - held.experts.shape[0], experts.size) if loads else 0
    width = max(1, min(most, FETCHED))
    groups = -(-most // width)
    tokens = tokens_of(experts, n_experts)
    needed = (tokens > 0) & (held.slots[:-1] == held.experts.shape[0])
    (rows, d_model), pairs = routed.tokens.shape, experts.size
    layout = MailLayout(rows, d_model, pairs)
    computed, is_sent = jnp.zeros(n_experts, bool), jnp.zeros(pairs, bool)
    turn = posted = count.turn
    if mail is not None:
        turn = count.turn + 1  # as ``Mailbox`` counts, layers with mail alone
        computed = _for_cpu(mail, tokens, needed, held.heat) if loads else needed
        needed &= ~computed
        is_sent = jnp.append(computed, False)[experts.reshape(-1)]
        sent = jnp.where(is_sent, experts.reshape(-1), n_experts)
        posted = post(jnp.asarray(mail.address), turn, routed.tokens, sent, layout)
        posted, needed = lax.optimization_barrier((posted, needed))  # before the link's part
    places = jnp.where(needed, ranked([needed])[0], groups * width)
    every, at = (jnp.arange(size, dtype=jnp.int32) for size in (n_experts, groups * width))
    listed = jnp.min(jnp.where(places == at[:, None], every, n_experts), axis=1)
    listed = listed.reshape(groups, width)
    slots = jnp.append(places, groups * width)[experts]  # [T, k], the last if it is not fetched

    def with_one(
        number: jax.Array | int, so_far: tuple[jax.Array, HotExperts]
    ) -> tuple[jax.Array, HotExperts]:
        y, hot = so_far
        group, slot = listed[number], slots - number * width
        up, down = _fetched(layouts, parts.addresses, group)
        is_own = (slot >= 0) & (slot < width)
        given = [None if bias is None else bias[group] for bias in biases]
        found = _products(layer, (up, down), given, jnp.where(is_own, slot, width), routed.tokens)
        return jnp.where(is_own[:, :, None], found, y), kept(hot, group, (up, down))

    # Slots change when the pairs of their experts are computed, so that XLA copies no weights.
    y, weights = lax.optimization_barrier((y.reshape(*experts.shape, -1), hot.weights))
    hot = HotExperts(weights, held)
    if groups == 1:
        y, hot = with_one(0, (y, hot))
    elif groups:
        y, hot = lax.fori_loop(0, groups, with_one, (y, hot))
    y = y.reshape(experts.size, -1)
    if mail is not None:
        posted, y = lax.optimization_barrier((posted, y))  # after the link's part
        found = collect(jnp.asarray(mail.address), posted, is_sent.astype(jnp.int32), layout)
        y = jnp.where(is_sent[:, None], found, y)
    stream = _with_mixture(layer, structure, leaves, routed, y)
    own = jnp.stack([jnp.sum(which, dtype=jnp.int32) for which in (needed, computed, is_sent)])
    return stream, state, FetchedCount(count.counts + own, turn), hot


def _for_cpu(mail: Mail, tokens: jax.Array, needed: jax.Array, heat: jax.Array | None) -> jax.Array:
    """Return the experts that the CPU computes, bool ``[E]``, as ``experts.divided`` does.

    tokens: number of those that pass each expert, int32 ``[E]``.  needed: bool ``[E]``.
    """
    warmth = jnp.zeros(tokens.shape, jnp.float32) if heat is None else heat
    rank, before = ranked((needed, tokens, warmth))
    assert mail.expert is not None and mail.token is not None
    own = jnp.where(needed, mail.expert + mail.token * (tokens - 1).astype(jnp.float32), 0.0)
    on_cpu = jnp.sum(jnp.where(before, 0.0, own), axis=1)  # if the expert and all behind it are
    end, none = jnp.maximum(on_cpu, rank.astype(jnp.float32)), jnp.sum(needed, dtype=jnp.int32)
    least = jnp.minimum(jnp.min(jnp.where(needed, end, jnp.inf)), none.astype(jnp.float32))
    cut = jnp.min(jnp.where(needed & (end <= least), rank, none))
    return needed & (rank >= cut)


class CpuKind(NamedTuple):
    """What is static of a layer's experts for the CPU.

    gate: as ``gate_of`` returns it.  activation: of experts without a gate, None otherwise.
    """

    layouts: tuple[ExpertLayout, ExpertLayout]
    gate: Gate | None
    activation: str | None

    @classmethod
    def of(cls, layer: LayerConfig, layouts: tuple[ExpertLayout, ExpertLayout]) -> CpuKind:
        assert layer.experts is not None
        activation = None if layer.gated_mlp else layer.activation
        return cls(layouts, gate_of(layer, layer.experts), activation)

    @property
    def mailed(self) -> MailedGate | None:
        """What ``served`` computes between the products; None if it cannot."""
        up = self.layouts[0]
        if self.gate is None:
            return "relu2" if self.activation == "relu2" else None
        if not up.is_of_cpu or up.structure.unflatten(up.leaves).form.n % (2 * TILE):
            return None
        if isinstance(self.gate, ClampedGate):
            return Clamped(self.gate.limit, self.gate.alpha)
        return "silu" if self.gate == "silu" else None


class CpuExperts(NamedTuple):
    """The experts of ``L`` layers in the host's memory, by product.

    patterns: any expert's leaves.  biases: float32 ``[L, E, out]``, or None.
    tables: addresses of all experts' leaves, int32 ``[L, E, leaves, 2]``, low words before high.
    """

    patterns: Sequence[Sequence[jax.Array]]
    tables: Sequence[jax.Array]
    biases: Sequence[jax.Array | None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def served(
    kind: CpuKind, sizes: MailLayout, address: jax.Array, turn: np.ndarray, experts: CpuExperts
) -> jax.Array:
    """Wait for the mail of each layer in turn, compute its experts and answer; on the CPU.

    address, turn: int32 ``[2]``, low word before high; the turn of the first layer.
    Returns the turn after the last one, when all are answered.
    """
    gate = kind.mailed
    assert gate is not None
    up, down = (
        MailedProduct(unpack_on_cpu(layout, leaves), table, bias)
        for layout, leaves, table, bias in zip(kind.layouts, *experts, strict=True)
    )
    return cpu_mail.served(address, jnp.asarray(turn), sizes, up, down, gate)


@functools.partial(jax.jit, static_argnums=0)
def computed(kind: CpuKind, experts: CpuExperts, x: jax.Array, chosen: jax.Array) -> jax.Array:
    """Return the results float32 ``[P, D]`` of one layer's pairs x ``[P, D]``, sorted by the expert
    ``chosen [P]``; E is none."""
    pairs, n_experts = len(chosen), experts.tables[0].shape[1]
    slots = jnp.cumsum(jnp.append(-1, chosen[:-1]) != chosen) - 1  # of each pair; experts once
    most = jnp.arange(min(pairs, n_experts) + 1)
    firsts = jnp.sum(slots[:, None] < most, axis=0, dtype=jnp.int32)
    starts = jnp.minimum(firsts, jnp.sum(chosen < n_experts, dtype=jnp.int32))
    chosen = jnp.minimum(chosen, n_experts - 1)
    listed = chosen[jnp.minimum(starts[:-1], pairs - 1)]
    gate, y = kind.gate, x
    for number, (layout, leaves, table, bias) in enumerate(
        zip(kind.layouts, *experts, strict=True)
    ):
        gate = None if number else gate
        like, swiglu = unpack_on_cpu(layout, leaves), gate == "silu" and bias is None
        y, is_gated = run_apart(y, like, starts, table[0, listed], n_experts, swiglu)
        y = y if bias is None else y + bias[0, chosen]
        y = y if gate is None or is_gated else apply_gate(y, gate)
        if not number and kind.activation is not None:
            y = activated(y, kind.activation)
    return y
