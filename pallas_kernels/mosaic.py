"""What ``matmul`` still calls by older names, each in terms of ``ptx``."""
# ruff: noqa: F401, F403

from __future__ import annotations

from pallas_kernels.ptx import *
from pallas_kernels.ptx import Value, load_float
from pallas_kernels.ptx import load_shared as load_shared_words
from pallas_kernels.ptx import loop as _loop
from pallas_kernels.ptx import store_shared as store_shared_words

load_shared = load_float


def store_shared(base: Value, value: Value, at: int = 0) -> None:
    store_shared_words(base, [value], at)


def loop(count: int, carry, body) -> list[Value]:
    return _loop(0, count, 1, carry, body)
