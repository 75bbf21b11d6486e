"""Real weight shapes, read by tests and benchmarks: ``(name, N, K)`` of ``w[N, K]``."""

from __future__ import annotations

LLAMA_8B = (
    ("gate or up", 14336, 4096),
    ("qkv", 6144, 4096),
    ("o", 4096, 4096),
    ("gate_up", 28672, 4096),
    ("down", 4096, 14336),
    ("head", 128256, 4096),
)
SMOLLM2_135M = (
    ("qkv", 960, 576),
    ("o", 576, 576),
    ("gate_up", 3072, 576),
    ("down", 576, 1536),
    ("head", 49152, 576),
)
LLAMA_1B = (
    ("qkv", 3072, 2048),
    ("o", 2048, 2048),
    ("gate_up", 16384, 2048),
    ("down", 2048, 8192),
    ("head", 128256, 2048),
)
