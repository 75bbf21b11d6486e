"""The parameters of a gated delta layer, and functions of them.

They say how a mesh splits the parameters, where a scale can be absorbed, and how many operations a
token takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxllama.config import DeltaConfig, LayerConfig
from jaxllama.model.mixers.common import Heads, Sites
from jaxllama.model.names import Source
from jaxllama.model.param import Grouped, Param, Path, TensorSource, Tiled, piece_name, rows, tensor

KEEPS_TOKENS = False
SPLIT = dict.fromkeys(("qkvz", "ba", "conv", "decay", "f_1", "g_1"), 0)
INPUTS = ("qkvz", "ba", "f_0", "g_0")


@dataclasses.dataclass(frozen=True)
class DeltaNames:
    """The names of a gated delta layer's tensors in a checkpoint; ``mixer`` is their prefix.

    inputs, gates, conv: the tensors of q|k|v|output gate, of beta|decay and of the convolutions,
    each with the number of these parts that it holds.
    grouped: the tensors that hold the parts of each key head together.
    low_rank: the names of decay and output gate, two tensors each.
    rate: A_log's shape, -1 for the heads.
    tiled: the value heads are counted across the key heads first.
    flat_conv: the convolutions are a matrix.
    is_rate: the tensor of A_log has -exp(A_log).
    is_joined: the tensor of ``inputs`` has that of ``gates`` behind it.
    """

    mixer: str = "linear_attn."
    inputs: tuple[tuple[str, int], ...] = (("in_proj_qkv", 3), ("in_proj_z", 1))
    gates: tuple[tuple[str, int], ...] = (("in_proj_b", 1), ("in_proj_a", 1))
    conv: tuple[tuple[str, int], ...] = (("conv1d", 3),)
    grouped: tuple[str, ...] = ()
    low_rank: tuple[tuple[str, str], ...] = ()
    rate: tuple[int, ...] = (-1,)
    norm: str = "norm"
    o: str = "out_proj"
    a_log: str = "A_log"
    dt_bias: str = "dt_bias"
    tiled: bool = False
    flat_conv: bool = False
    is_rate: bool = False
    is_joined: bool = False


FLA = DeltaNames(
    mixer="attn.",
    inputs=tuple((f"{name}_proj", 1) for name in "qkvg"),
    gates=(("b_proj", 1), ("a_proj", 1)),
    conv=tuple((f"{name}_conv1d", 1) for name in "qkv"),
    low_rank=(("f_proj.0", "f_proj.1"), ("g_proj.0", "g_proj.1")),
    norm="o_norm",
    o="o_proj",
)


def table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """The parameters of one gated delta mixer."""
    delta, delta_names = layer.mixer, source.names.of("delta", FLA)
    prefix, d, rank = f"{prefix}{delta_names.mixer}", layer.d_model, delta.d_v
    k, v, heads = delta.n_k_heads * delta.d_k, delta.n_heads * delta.d_v, delta.n_heads
    groups, per_group = delta.n_k_heads, heads // delta.n_k_heads

    def tiled(width: int, first: int = 0) -> Tiled | None:
        """Return the order of the value heads, of ``width`` rows each, behind ``first`` rows."""
        is_moved = delta_names.tiled and width > 0 and min(groups, per_group) > 1
        return Tiled(groups, per_group, width, first) if is_moved else None

    def fused(
        tensors: Sequence[tuple[str, int]], sizes: Sequence[tuple[int, int]], *rest: int
    ) -> Param:
        """sizes: of each part, its rows and those of a value head; 0 for parts of key heads."""
        parts, at = [], 0
        for name, count in tensors:
            held, at = sizes[at : at + count], at + count
            if held:
                names = [n for n, _ in held]
                turned: Grouped | Tiled | None = tiled(held[-1][1], sum(names[:-1]))
                if name in delta_names.grouped:
                    turned = Grouped(groups, tuple(n // groups for n in names))
                parts.append(
                    TensorSource(f"{prefix}{name}.weight", (sum(names), *rest), turned=turned)
                )
        return rows(parts)

    key, value = (k, 0), (v, delta.d_v)
    inputs = (key, key, value, value) if delta.gate == "full" else (key, key, value)
    table = {("qkvz", "weight"): fused(delta_names.inputs, inputs, d)}
    table["ba", "weight"] = fused(
        delta_names.gates, ((heads, 1),) * (1 + (delta.decay == "head")), d
    )
    if delta_names.is_joined:
        first, total = 0, sum(table[name, "weight"].shape[0] for name in ("qkvz", "ba"))
        for name in ("qkvz", "ba"):
            whole = f"{prefix}{delta_names.inputs[0][0]}.weight"
            table[name, "weight"] = tensor(
                piece_name(whole, first, total), *table[name, "weight"].shape
            )
            first += table[name, "weight"].shape[0]
    if delta.conv_size:
        between = () if delta_names.flat_conv else (1,)
        conv = fused(delta_names.conv, (key, key, value), *between, delta.conv_size)
        # The checkpoint's [features, 1, W] is the same memory.
        table["conv", "weight"] = dataclasses.replace(
            conv, shape=(2 * k + v, delta.conv_size), std=delta.conv_size**-0.5
        )
    low_rank = (
        ("f", delta.decay == "channel", heads * delta.d_k),
        ("g", delta.gate == "low_rank", v),
    )
    for index, (name, there, width) in enumerate(low_rank):
        if there:
            first, second = (f"{prefix}{tensor}" for tensor in delta_names.low_rank[index])
            table[f"{name}_0", "weight"] = tensor(f"{first}.weight", rank, d)
            table[f"{name}_1", "weight"] = tensor(f"{second}.weight", width, rank)
            if name == "g" and delta.gate_bias:
                table["g_1", "bias"] = tensor(f"{second}.bias", width, std=0.0)
    if delta.decay != "none":
        n_rates = heads * delta.d_k if delta.decay == "channel" else heads
        shape = tuple(heads if n < 0 else n for n in delta_names.rate)
        rate = TensorSource(
            f"{prefix}{delta_names.a_log}", shape, turned=tiled(1), is_rate=delta_names.is_rate
        )
        table["decay", "a_log"] = Param((rate,), (heads,), mean=2.0, std=0.5)
        order = {"turned": tiled(1)} if n_rates == heads else {}
        table["decay", "dt_bias"] = tensor(
            f"{prefix}{delta_names.dt_bias}", n_rates, fold=order, mean=-4.6, std=1.0
        )
    table["o_norm", "weight"] = tensor(
        f"{prefix}{delta_names.norm}.weight", delta.d_v, mean=1.0, std=0.0
    )
    fold = {"columns": tiled(delta.d_v)}
    table["o", "weight"] = tensor(f"{prefix}{delta_names.o}.weight", d, v, fold=fold)
    return table


def heads(layer: LayerConfig) -> int:
    """Return the largest number of shards that each have a head."""
    delta: DeltaConfig = layer.mixer
    return delta.n_k_heads


def obstacle(layer: LayerConfig, n: int) -> str | None:
    """Return the name of the heads that ``n`` shards do not divide, or None."""
    delta: DeltaConfig = layer.mixer
    count = delta.n_k_heads
    return f"the {count} key heads of the delta rule" if count % n else None


def replicated(layer: LayerConfig, n: int) -> DeltaConfig:
    """Return the options as they are: each of ``n`` shards has key heads of its own."""
    del n
    return layer.mixer


def shard(layer: LayerConfig, n: int) -> DeltaConfig:
    """Return the options of one of ``n`` shards."""
    delta: DeltaConfig = layer.mixer
    count, k_count = delta.n_heads // n, delta.n_k_heads // n
    return dataclasses.replace(delta, n_heads=count, n_k_heads=k_count)


def fused_heads(layer: LayerConfig, name: str, n: int) -> Heads | None:
    """Return (heads, rows a head) of each part of a parameter; None if rows keep their order."""
    del n
    delta: DeltaConfig = layer.mixer
    if name == "ba":
        return [(delta.n_heads, 1)] * (1 + (delta.decay == "head"))
    if name not in ("qkvz", "conv"):
        return None
    k, v = (delta.n_k_heads, delta.d_k), (delta.n_heads, delta.d_v)
    return [k, k, v] + [v] * (name == "qkvz" and delta.gate == "full")


def sites(layer: LayerConfig) -> Sites:
    """All heads share o_norm's weight, and so a scale."""
    delta: DeltaConfig = layer.mixer
    low_rank = delta.decay == "channel", delta.gate == "low_rank"
    there = (True, True, *low_rank)
    inputs = tuple(name for name, is_there in zip(INPUTS, there, strict=True) if is_there)
    value = np.tile(np.arange(delta.d_v), delta.n_heads)
    return Sites(inputs, "o_norm", None, value)


def flops(layer: LayerConfig, sequence_length: int) -> float:
    """A token's operations beside its products with weights."""
    del sequence_length
    delta: DeltaConfig = layer.mixer
    return 6.0 * delta.n_heads * delta.d_k * delta.d_v
