"""Experts on the CPU beside the rate of its memory: ``python -m benchmarks.offload_experts_cpu``.

The program that a layer gives its CPU (``expert_programs.computed_pairs_of``), four experts at a
time, over more experts than any cache holds. In turns with it, a handler only reads the same codes.
Medians and bests of rounds, for each scheme and number of tokens an expert.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.cpu import reading, rounds
from jaxllama.config import LayerConfig, load_config
from jaxllama.executors.offloaded.expert_programs import computed_pairs_of
from jaxllama.executors.offloaded.experts import ON_CPU
from jaxllama.offload.experts import ExpertLayout, layout_of, pack, views_of
from jaxllama.offload.store import Store
from jaxllama.planner.accounting import weight_shapes
from jaxllama.planner.trial import random_expert
from pallas_kernels.cpu import prepare_tree

Views = dict[int, tuple[jax.Array, ...]]
BYTES = 450e6  # of experts; more than the last-level cache that one of many machines may use


def pinned(model: str, scheme: str) -> tuple[LayerConfig, list[ExpertLayout], list[Views]]:
    """Return (layer, layouts of the two products, their experts as the CPU sees them)."""
    cfg, store = load_config(model), Store(".")
    mlp = weight_shapes(cfg, jnp.bfloat16, f"none,experts_*={scheme}")["layer_0"]["mlp"]
    layouts, packed = [], []
    for name in ("experts_gate_up", "experts_down"):
        weight = prepare_tree(random_expert(mlp[name]["weight"]))
        parts, structure = jax.tree.flatten(weight)
        layouts.append(layout_of(parts, structure, "cpu"))
        packed.append(pack(layouts[-1], [np.asarray(part) for part in parts]))
    count = int(BYTES / sum(layout.nbytes for layout in layouts)) // ON_CPU * ON_CPU
    views = [
        views_of(layout, {expert: store.pin(data) for expert in range(count)})
        for layout, data in zip(layouts, packed, strict=True)
    ]
    return cfg.layers[0], layouts, views


def computed(
    layer: LayerConfig, layouts: Sequence[ExpertLayout], views: Sequence[Views], rows: int
) -> list[jax.Array]:
    """Return every expert's results for ``rows`` tokens of its own."""
    x = np.random.default_rng(0).standard_normal((ON_CPU, rows, layer.d_model)).astype(np.float32)
    found, (up, down) = [], views
    for first in range(0, len(up), ON_CPU):
        group = range(first, first + ON_CPU)
        own = [up[expert] for expert in group], [down[expert] for expert in group]
        found.append(computed_pairs_of(layer, tuple(layouts), *own, (None, None), x))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--schemes", default="mxfp4,w4a16,w8a16")
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for scheme in args.schemes.split(","):
        layer, layouts, views = pinned(args.model, scheme)
        each = sum(layout.nbytes for layout in layouts)
        codes = [leaves[0].reshape(-1, 64) for own in views for leaves in own.values()]
        to_read = sum(part.nbytes for part in codes)
        for rows in map(int, args.rows.split(",")):
            work = functools.partial(computed, layer, layouts, views, rows)
            seconds = rounds({"read": reading(codes), "experts": work}, args.rounds)
            reads = [to_read / taken / 1e9 for taken in seconds["read"]]
            rates = [len(views[0]) * each / taken / 1e9 for taken in seconds["experts"]]
            shares = [rate / read for rate, read in zip(rates, reads, strict=True)]
            print(
                f"{args.model} {scheme}, {rows} tokens: {rates[0]:5.1f} ({rates[1]:5.1f}) GB/s, "
                f"reading alone {reads[0]:5.1f} ({reads[1]:5.1f}): {shares[0]:.0%} "
                f"({shares[1]:.0%}); {1e3 * each / rates[0] / 1e9:.2f} ms an expert",
                flush=True,
            )


if __name__ == "__main__":
    main()
