"""Predicted tokens a second of Llama-3.1-8B, one row, on cards that were not there.

    python -m benchmarks.cards [--schemes w4a16] [--context 1024]       a table in Markdown

    seconds = bytes / (0.93 * bandwidth) + launches * 1.3 us

bytes: the weights that a step reads, and the cache.  bandwidth: by the data sheet.  launches: the
kernels of a step; 5 a layer, and one more before Hopper, where attention's parts are summed by a
second kernel.  1.3 us is the cost of a kernel in a CUDA graph on an H200.  These are predictions:
the H200's own, beside its measured rate, says how far they are off.
"""

from __future__ import annotations

import argparse

import jax.numpy as jnp

from jaxllama.config import ModelConfig, load_config
from jaxllama.planner.accounting import model_bytes
from pallas_kernels.architecture import CARDS, Architecture, Card
from pallas_kernels.device import card_of

CARDS_SHOWN = (
    "NVIDIA GeForce RTX 4090",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA B200",
    "NVIDIA H200",
)
SHARE = 0.93
LAUNCH_SECONDS = 1.3e-6
AROUND = 4  # kernels of a step beside the layers'


def step_bytes(cfg: ModelConfig, scheme: str, context: int) -> int:
    """Bytes that a step of one row reads: all weights but the embedding, and the cache."""
    weights = model_bytes(cfg, jnp.dtype("bfloat16"), None if scheme == "bfloat16" else scheme)
    embedding = 2 * cfg.vocab_size * cfg.d_model
    cache = 2 * 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * context
    return weights - embedding + cache


def tokens_per_second(cfg: ModelConfig, n_bytes: int, card: Card, arch: Architecture) -> float:
    launches = (5 if arch.clusters else 6) * cfg.n_layers + AROUND
    return 1 / (n_bytes / (SHARE * card.bandwidth) + launches * LAUNCH_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=["bfloat16", "w8a16", "w4a16"])
    parser.add_argument("--context", type=int, default=1024)
    given = parser.parse_args()
    cfg = load_config("llama-3.1-8b")
    sizes = [step_bytes(cfg, scheme, given.context) for scheme in given.schemes]
    print(f"| card | GB/s | {' | '.join(given.schemes)} |")
    print("|---" * (2 + len(sizes)) + "|")
    for name in CARDS_SHOWN:
        card, arch = card_of(name)
        rates = [
            f"{tokens_per_second(cfg, size, card, arch):.0f}" if size < 0.85 * card.memory else "-"
            for size in sizes
        ]
        shown = CARDS[name].name.removeprefix("NVIDIA ").removeprefix("GeForce ")
        print(f"| {shown} | {card.bandwidth / 1e9:.0f} | {' | '.join(rates)} |")


if __name__ == "__main__":
    main()
