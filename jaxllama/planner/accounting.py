"""Byte accounting: the size of weights, and the memory that a policy needs in each tier.

    model_bytes(cfg, dtype, scheme)      bytes of the weights (``executors.offloaded.room``: caches)
    footprint(cfg, policy, ...) -> Footprint      device, host and disk, with its terms

``model_bytes`` is exact for every dtype: a 4-bit code takes half a byte, and scales and zero points
count. FlexGen's numbers are the same but for grouped heads: here a cache holds ``n_kv_heads *
head_dim`` features a token, not ``d_model``.

``footprint`` adds the device memory of a running unit: three units' weights, two batches' caches,
the pieces being joined, and XLA's own need for each program. It also adds the host memory of data
on its way from the disk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.executors.offloaded import programs
from jaxllama.executors.offloaded.experts import AHEAD as GROUPS_AHEAD
from jaxllama.executors.offloaded.experts import GROUP
from jaxllama.executors.offloaded.layer_cache import TAIL
from jaxllama.executors.offloaded.room import (
    Tiers,
    cache_shapes,
    hidden_bytes,
    layer_shapes,
    split_bytes,
)
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.records import Hidden
from jaxllama.offload.experts import layout_of
from jaxllama.offload.policy import Policy, Shares
from jaxllama.offload.schedule import AHEAD, QUEUED
from jaxllama.offload.units import ModelUnit, units_of
from jaxllama.planner.experts import expert_counts, shares_of
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import param_shapes
from jaxllama.typing import Params, ParamsDict, Tree
from pallas_kernels.qtensor import packed_bytes, tree_bytes
from pallas_kernels.rounding import NIBBLES


def weight_shapes(cfg: ModelConfig, dtype: DTypeLike, scheme: str | None = None) -> Params:
    """Return the parameter tree as shapes, quantized by ``scheme``."""
    shapes = param_shapes(cfg, dtype)
    if scheme is None:
        return shapes
    return jax.eval_shape(functools.partial(quantize_params, scheme=scheme), shapes)


def model_bytes(cfg: ModelConfig, dtype: DTypeLike, scheme: str | None = None) -> int:
    return tree_bytes(weight_shapes(cfg, dtype, scheme))


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes by tier: each kind of tensor at rest, and the device's extra memory while it works."""

    weights: Tiers
    cache: Tiers
    hidden: Tiers
    loading_weights: int  # peak of moved weights on the device
    loading_cache: int
    loading_hidden: int
    programs: int  # results and temporaries of the largest program
    reading: int  # host bytes of data on its way from the disk

    @property
    def device(self) -> int:
        """Return the peak in bytes, as if every kind had its worst moment at once."""
        rest = self.weights.device + self.cache.device + self.hidden.device
        moving = self.loading_weights + self.loading_cache + self.loading_hidden
        return rest + moving + self.programs

    @property
    def host(self) -> int:
        return self.weights.host + self.cache.host + self.hidden.host + self.reading

    @property
    def disk(self) -> int:
        return self.weights.disk + self.cache.disk + self.hidden.disk


@functools.lru_cache(maxsize=64)
def unit_shapes(
    cfg: ModelConfig, dtype: str, scheme: str | None, sep_layer: bool, singly: bool = False
) -> list[tuple[ModelUnit, ParamsDict]]:
    """Return every unit with the shapes of its weights.

    singly: without the experts, which lie one by one.
    """
    shapes = weight_shapes(cfg, dtype, scheme)
    units = [(unit, unit.weights(shapes)) for unit in units_of(cfg, sep_layer)]
    if not singly:
        return units
    return [(unit, _without_experts(tree)) for unit, tree in units]


def _without_experts(tree: ParamsDict) -> ParamsDict:
    mlp = tree.get("mlp")
    if mlp is None:
        return tree
    return {**tree, "mlp": {n: part for n, part in mlp.items() if not n.startswith("experts_")}}


def weights_footprint(
    cfg: ModelConfig,
    policy: Policy,
    dtype: DTypeLike,
    scheme: str | None,
    keeps: bool = True,
) -> tuple[Tiers, int]:
    """Return the weights' bytes by tier, and the peak bytes of moved weights on the device.

    keeps: whether a layer's loaded experts stay until its last batch (``experts_footprint``).
    """
    dtype, singly = jnp.dtype(dtype).name, bool(policy.experts)
    layer_key = cfg, policy.weights, policy.sep_layer, dtype, scheme, singly
    weights, loading = _weights_footprint(*layer_key)
    if singly:
        experts, more = experts_footprint(cfg, policy, dtype, scheme, keeps)
        return weights + experts, loading + more
    return weights, loading


def experts_footprint(
    cfg: ModelConfig, policy: Policy, dtype: str, scheme: str | None, keeps: bool
) -> tuple[Tiers, int]:
    """Return the bytes by tier of experts that lie one by one, and of those on their way.

    keeps: a block of several batches keeps what a layer has loaded until its last batch.
        Otherwise only groups are on the device.
    """
    total, most, counts = Tiers(), 0, expert_counts(cfg)
    for (layer, (bytes_of_one, rest)), (place, _) in zip(
        expert_bytes(cfg, dtype, scheme).items(), shares_of(cfg, policy), strict=True
    ):
        n_experts, device = counts[layer], len(place.device)
        hot = sum(nbytes for nbytes, _ in bytes_of_one) * device
        packed = sum(nbytes for _, nbytes in bytes_of_one)
        heat = n_experts if 0 < device < n_experts else 0
        slots = len(bytes_of_one) * 4 * (n_experts + 1 + device + heat)
        total += Tiers(
            hot + rest + slots, packed * len(place.pinned) + rest, packed * len(place.written)
        )
        cold = n_experts - device
        # Groups on their way, then one that is stacked, unpacked and perhaps restored.
        group = min(cold, GROUP)
        most = max(most, packed * ((cold if keeps else (1 + GROUPS_AHEAD) * group) + 3 * group))
    return total, most


@functools.lru_cache(maxsize=64)
def expert_bytes(
    cfg: ModelConfig, dtype: str, scheme: str | None
) -> dict[int, tuple[tuple[tuple[int, int], ...], int]]:
    """Return by layer the (bytes on the device, packed bytes) of an expert in each product, and the
    bytes of all biases.
    """
    shapes, found = weight_shapes(cfg, dtype, scheme), {}
    for layer in expert_counts(cfg):
        mlp = shapes[f"layer_{layer}"]["mlp"]
        products, biases = [], 0
        for name in ("experts_gate_up", "experts_down"):
            parts, structure = jax.tree.flatten(mlp[name]["weight"])
            layout = layout_of(parts, structure, "cpu")
            products.append((tree_bytes(parts) // parts[0].shape[0], layout.nbytes))
            biases += tree_bytes(mlp[name].get("bias"))
        found[layer] = tuple(products), biases
    return found


@functools.lru_cache(maxsize=4096)
def _weights_footprint(
    cfg: ModelConfig,
    shares: Shares,
    sep_layer: bool,
    dtype: str,
    scheme: str | None,
    singly: bool,
) -> tuple[Tiers, int]:
    units = unit_shapes(cfg, dtype, scheme, sep_layer, singly)
    total, loads = Tiers(), []
    is_tied = "embed" in units[-1][1]  # the head's unit
    for unit, shapes in units:
        if unit.kind == "head" and is_tied:
            total += split_bytes(shapes["norm"], shares)
        elif unit.kind == "embed" and not is_tied and shares.device < 100:
            # A table that is only looked up is never on the device.
            table = split_bytes(shapes, shares)
            total += Tiers(host=table.device + table.host, disk=table.disk)
            continue
        else:
            total += split_bytes(shapes, shares)
        loads.append(loading_bytes(shapes, shares))
    # One computes, one arrives, and the one behind them is begun: a computation is known to be done
    # a little before its memory is free (on an H200 two units were up to 1.25 times too few).
    around = zip(loads, loads[1:] + loads[:1], loads[2:] + loads[:2], strict=True)
    return total, max(map(sum, around))


def loading_bytes(tree: Tree, shares: Shares) -> int:
    """Return the device bytes for loading a stored tree: whole tensors and the parts that form
    them.

    Tensors that are whole on the device cost nothing.
    """
    moved = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim >= 2]
    if shares.device >= 100:
        return 0
    whole = sum(packed_bytes(leaf.size, leaf.dtype) for leaf in moved)
    one_tier = 100 in (shares.host, shares.disk)
    if one_tier and not any(leaf.dtype.name in NIBBLES for leaf in moved):
        return whole
    parts = max(packed_bytes(leaf.size, leaf.dtype) for leaf in moved)
    return whole + 2 * parts


def reading_bytes(tree: Tree, shares: Shares) -> int:
    """Return the host bytes for reading a stored tree from disk.

    A tensor's part is read while the tensor before it is handed to the device, and one more is on
    its way.
    """
    return 3 * max((split_bytes(leaf, shares).disk for leaf in jax.tree.leaves(tree)), default=0)


@functools.lru_cache(maxsize=4096)
def _weights_reading(
    cfg: ModelConfig, shares: Shares, dtype: str, scheme: str | None, singly: bool
) -> int:
    # The table of embed is read by the row.
    units = unit_shapes(cfg, dtype, scheme, False, singly)
    return max(reading_bytes(shapes, shares) for unit, shapes in units if unit.kind != "embed")


def batches_of(policy: Policy, rows: int) -> tuple[int, int]:
    """Return how many batches a block of ``rows`` rows has, and the rows of the largest."""
    count = -(-rows // policy.gpu_batch_size)
    return count, -(-rows // count)


def footprint(
    cfg: ModelConfig,
    policy: Policy,
    *,
    rows: int,
    width: int,
    capacity: int,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    scheme: str | None = None,
    chunk: int | None = None,
    compile_programs: bool = True,
) -> Footprint:
    """Return the memory for generating ``rows`` rows, at most a block, of ``width`` prompt tokens.

    capacity: number of tokens of a row that the cache holds.
    chunk: number of tokens of a prompt that pass through the model at once.
    compile_programs: compile each program to ask XLA for its memory. Otherwise that term is 0.
    """
    batches, size = batches_of(policy, rows)
    chunk = width if chunk is None else min(chunk, width)
    weights, loading_weights = weights_footprint(cfg, policy, dtype, scheme, batches > 1)
    on_cpu = policy.cpu_attention
    cache, loading_cache, reading = _cache_footprint(
        cfg, policy.cache, on_cpu, size, capacity, kv_dtype
    )
    padded = -(-width // chunk) * chunk
    pair = 2 * hidden_bytes(cfg, size, padded, dtype)
    hidden = split_bytes(jax.ShapeDtypeStruct((pair,), jnp.int8), Shares(100, 0))
    # What is being made, before what it is made of is gone.
    loading_hidden = max(AHEAD * pair, 2 * QUEUED * hidden_bytes(cfg, size, 1, dtype))
    if policy.activations.device < 100:
        shape = jax.ShapeDtypeStruct((pair // cfg.d_model, cfg.d_model), jnp.int8)
        hidden, loading_hidden = split_bytes(shape, policy.activations), (3 + AHEAD) * pair
    singly = bool(policy.experts)
    reading += _weights_reading(cfg, policy.weights, jnp.dtype(dtype).name, scheme, singly)
    reading += 3 * hidden.disk
    # Positions, rotations, tokens.
    hidden += Tiers(device=_position_bytes(cfg, size, padded) + 4 * size * padded)
    needs = 0
    if compile_programs:
        needs = _program_bytes(cfg, policy, size, chunk, capacity, dtype, kv_dtype, scheme)
        needs = max(needs, expert_program_bytes(cfg, policy, size * chunk, dtype))
    return Footprint(
        weights,
        cache.times(batches),
        hidden.times(batches),
        loading_weights,
        loading_cache,
        loading_hidden,
        needs,
        reading,
    )


@functools.lru_cache(maxsize=4096)
def _cache_footprint(
    cfg: ModelConfig, shares: Shares, on_cpu: bool, size: int, capacity: int, kv_dtype: DTypeLike
) -> tuple[Tiers, int, int]:
    """Return a batch's cache by tier, the peak bytes of a moved cache on the device, and the host
    bytes for reading it from disk.
    """
    one_cache = cache_shapes(cfg, size, capacity, kv_dtype)
    cache, loading = Tiers(), 0
    moves = shares.device < 100 and not on_cpu
    for layer in one_cache:
        part = split_bytes(layer, shares)
        if isinstance(layer, KVCache) and moves:
            part += Tiers(device=tree_bytes(layer) * TAIL // capacity + 4 * size * TAIL)
        cache += part
    if on_cpu:
        # After the prefill: one that is cut in two, and those of what is dispatched.
        loading = (2 + AHEAD) * max(map(tree_bytes, one_cache))
    elif moves:
        # One in use, one being loaded from its parts, one being stored, and those of what is
        # dispatched (on an H200 two were missing: 1.02 times the prediction in one of nine).
        largest = max(one_cache, key=tree_bytes)
        loading = (3 + AHEAD) * tree_bytes(largest) + loading_bytes(largest, shares)
    return cache, loading, reading_bytes(one_cache, shares)


@functools.lru_cache(maxsize=4096)
def _position_bytes(cfg: ModelConfig, size: int, width: int) -> int:
    """Return the bytes of the positions and rotations of ``size`` rows."""
    ints = jax.ShapeDtypeStruct((size,), jnp.int32)
    arrays = jax.eval_shape(functools.partial(programs.positions_of, cfg, n_new=width), ints, ints)
    return tree_bytes(arrays)


def _programs(
    cfg: ModelConfig,
    policy: Policy,
    size: int,
    chunk: int,
    capacity: int,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    scheme: str | None,
) -> Iterator[jax.stages.Lowered]:
    """Yield the distinct programs of a run, lowered.

    They are the prefill and decode step of each kind of layer, and the head.
    """
    ints = jax.ShapeDtypeStruct((size,), jnp.int32)
    seen = set()
    singly, name = bool(policy.experts), jnp.dtype(dtype).name
    for unit, weights in unit_shapes(cfg, name, scheme, policy.sep_layer, singly):
        if unit.kind == "embed":
            continue
        if unit.kind == "head":
            x: Tree = jax.ShapeDtypeStruct((size, cfg.d_model), dtype)
            yield programs.head_logits.lower(cfg, weights, Hidden(x))
            continue
        layer = cfg.layers[unit.layer]
        if (layer, unit.kind) in seen:
            continue
        seen.add((layer, unit.kind))
        part = unit.kind
        if singly and layer.experts is not None:
            if part == "feed":
                continue
            part, weights = "mix", {n: leaf for n, leaf in weights.items() if n != "mlp"}
        state = layer_shapes(layer, size, capacity, kv_dtype)
        for n_new, sparse in ((chunk, False), (1, True)):
            x: Tree = jax.ShapeDtypeStruct((size, n_new, cfg.d_model), dtype)
            at, rope = jax.eval_shape(
                functools.partial(programs.positions_of, cfg, n_new=n_new), ints, ints
            )
            yield programs.run_layer.lower(
                layer,
                part,
                weights,
                _stream(layer, part, x),
                state if unit.has_cache else None,
                at,
                ints,
                rope,
                sparse=sparse,
            )


def _stream(layer: LayerConfig, part: str, x: Tree) -> Stream:
    """Return the types of a layer's stream, with what may stand beside it."""
    shares = layer.form.name == "shared"
    is_read = getattr(layer.form, "reads", False) or (shares and part == "feed")
    return Stream(x, x, x if is_read else None, x if shares else None)


def expert_program_bytes(cfg: ModelConfig, policy: Policy, tokens: int, dtype: DTypeLike) -> int:
    """Return an estimate of the results and temporaries of experts that lie one by one.

    The pairs of ``tokens`` have sums of both products in float32, which are copied once.
    """
    if not policy.experts or cfg.experts is None:
        return 0
    pair = 4 * (2 * 2 * cfg.experts.d_ff + 3 * cfg.d_model)
    return tokens * cfg.experts.n_active * (pair + jnp.dtype(dtype).itemsize * cfg.experts.d_ff)


def _program_bytes(*arguments: Any) -> int:
    needs = [0]
    for lowered in _programs(*arguments):
        found = lowered.compile().memory_analysis()
        if found is not None:
            needs.append(found.temp_size_in_bytes + found.output_size_in_bytes)
    return max(needs)
