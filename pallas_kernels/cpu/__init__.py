"""Handlers that are generated for this machine's CPU; see the README."""

from pallas_kernels.cpu.blocks import from_blocks
from pallas_kernels.cpu.jit import unavailable
from pallas_kernels.cpu.weight import CpuWeight, prepare, prepare_tree, restore, restore_tree

__all__ = [
    "CpuWeight",
    "from_blocks",
    "prepare",
    "prepare_tree",
    "restore",
    "restore_tree",
    "unavailable",
]
