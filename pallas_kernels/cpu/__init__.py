"""Handlers that are generated for this machine's CPU; see the README."""

from pallas_kernels.cpu.blocks import from_blocks, stacked
from pallas_kernels.cpu.jit import unavailable
from pallas_kernels.cpu.weight import TILE, CpuWeight, prepare, prepare_tree, restore, restore_tree

__all__ = [
    "TILE",
    "CpuWeight",
    "from_blocks",
    "prepare",
    "prepare_tree",
    "restore",
    "restore_tree",
    "stacked",
    "unavailable",
]
