"""Predicted tokens a second of Llama-3.1-8B, one row, on cards that were not there.

    python -m benchmarks.cards [--schemes w4a16] [--context 1024]       a table in Markdown
    python -m benchmarks.cards --memory 12 16 24                        tokens that a cache holds

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
from jaxllama.engine.options import SMALL_CARDS
from jaxllama.planner.accounting import model_bytes
from pallas_kernels.cards.architecture import CARDS, Architecture, Card
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


def cache_tokens(cfg: ModelConfig, scheme: str, gb: int) -> tuple[int, str]:
    """Tokens of a server's cache on a card of so many GB with a display, and the cache's dtype.

    0.85 of the memory is the server's, of which the engine takes 0.9; 1 GB is for its work.
    """
    weights = model_bytes(cfg, jnp.dtype("bfloat16"), None if scheme == "bfloat16" else scheme)
    dtype = next((kind for most, kind in SMALL_CARDS if gb <= most), "bfloat16")
    bytes_of = {"bfloat16": 2.0, "int8": 1 + 4 / cfg.head_dim, "int4": 0.5 + 4 / 64}[dtype]
    token = 2 * cfg.n_layers * cfg.n_kv_heads * cfg.head_dim * bytes_of
    return int(max(0, 0.85 * 0.9 * gb * 2**30 - weights - 1e9) / token), dtype


def print_memory(sizes: list[int], schemes: list[str]) -> None:
    print(f"| model | scheme | {' | '.join(f'{gb} GB' for gb in sizes)} |")
    print("|---" * (2 + len(sizes)) + "|")
    for name in ("llama-3.2-3b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b"):
        for scheme in schemes:
            found = [cache_tokens(load_config(name), scheme, gb) for gb in sizes]
            cells = [f"{tokens:,} ({dtype})" if tokens > 2048 else "-" for tokens, dtype in found]
            print(f"| {name} | {scheme} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="+", default=["bfloat16", "w8a16", "w4a16"])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--memory", type=int, nargs="+", metavar="GB")
    given = parser.parse_args()
    if given.memory:
        print_memory(given.memory, given.schemes)
        return
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
