"""Weights of every kind that the CPU's handler reads, and what a product with them has to be."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import CpuWeight, frame, jit, prepare
from pallas_kernels.cpu.matmul import CpuPlan, plan
from pallas_kernels.cpu.target import TARGETS, VARIABLE, Target
from pallas_kernels.cpu.weight import block_size
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.qtensor import QTensor

# dtype of the codes, columns of a group (0: one a row), dtypes of scales and zeros
SCHEMES = {
    "q4_0": ("int4", 32, "float16", None),
    "q4_1": ("int4", 32, "float16", "float32"),
    "q4_k": ("int4", 32, "float32", "float32"),
    "q8_0": ("int8", 32, "float16", None),
    "q5_1": ("int8", 32, "float16", "float16"),
    "q6_k": ("int8", 16, "float32", None),
    "gptq": ("int4", 128, "float16", "int8"),
    "awq": ("int4", 64, "bfloat16", "int8"),
    "int8 groups": ("int8", 128, "float32", "int8"),
    "int8 rows": ("int8", 0, "float32", None),
    "int4 rows": ("int4", 0, "float32", "int8"),
    "w4a8": ("int4", 128, "int8", "int8"),
    "mxfp4": ("float4_e2m1fn", 32, "float8_e8m0fnu", None),
    "nvfp4": ("float4_e2m1fn", 16, "float8_e4m3fn", None),
    "fp8 blocks": ("float8_e4m3fn", 128, "bfloat16", None),
    "fp8 groups": ("float8_e4m3fn", 32, "float16", None),
    "fp8 rows": ("float8_e4m3fn", 0, "float32", None),
}


def weight(scheme: str, n: int, k: int, seed: int = 0) -> QTensor:
    """numpy's arrays.  Codes cover their whole range."""
    dtype, group, scale_dtype, zero_dtype = SCHEMES[scheme]
    rng = np.random.default_rng(seed)
    groups = k // group if group else 1
    if dtype == "float4_e2m1fn":
        return _float4_weight(rng, n, k, groups, scale_dtype)
    low, high = (-8, 8) if dtype == "int4" else (-128, 128)
    if dtype == "float8_e4m3fn":  # each of its numbers, subnormal ones too
        bits = rng.integers(0, 127, (n, k)) + 128 * rng.integers(0, 2, (n, k))
        q = bits.astype(np.uint8).view(jnp.dtype(dtype))
    else:
        q = rng.integers(low, high, (n, k)).astype(jnp.dtype(dtype))
    # Small whole numbers times a power of two, so that the affine forms of files are exact.
    scale = (rng.integers(1, 64, (n, groups)) * 2.0**-9).astype(np.float32)
    if scale_dtype == "float32":
        scale *= np.float32(1.0009)
    scale = scale.astype(jnp.dtype(scale_dtype))
    zero = None
    if zero_dtype is not None and np.issubdtype(jnp.dtype(zero_dtype), np.integer):
        zero = rng.integers(low, high, (n, groups)).astype(zero_dtype)
    elif zero_dtype is not None:
        zero = (rng.integers(-64, 1, (n, groups)) * 2.0**-7).astype(np.float32)
        zero = (zero + 8 * scale.astype(np.float32)).astype(zero_dtype)
    unit = None
    if scale_dtype == "int8":  # in two levels
        zero, unit = zero // 4, (rng.integers(1, 64, (n, 1)) * 2.0**-9).astype(np.float32)
        scale = rng.integers(1, 12, (n, groups)).astype(np.int8)
    return QTensor(q, scale, zero, unit=unit)


def _float4_weight(
    rng: np.random.Generator, n: int, k: int, groups: int, scale_dtype: str
) -> QTensor:
    q = rng.integers(0, 16, (n, k)).astype(np.uint8).view(jnp.dtype("float4_e2m1fn"))
    if scale_dtype == "float8_e8m0fnu":
        bits = rng.integers(110, 130, (n, groups)).astype(np.uint8)
        return QTensor(q, bits.view(jnp.dtype(scale_dtype)))
    bits = rng.integers(0, 127, (n, groups)).astype(np.uint8)  # subnormal ones too
    unit = (rng.integers(1, 64, (n, 1)) * 2.0**-15).astype(np.float32)
    return QTensor(q, bits.view(jnp.dtype(scale_dtype)), unit=unit)


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    """Of different sizes along every axis."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * np.exp(rng.normal(size=shape))).astype(np.float32)


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """x as the handler rounds it, in float64."""
    r, k = x.shape
    blocks = np.zeros((r, -(-k // block) * block), np.float32)
    blocks[:, :k] = x
    blocks = blocks.reshape(r, -1, block)
    largest = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0)
    codes = np.rint(blocks * inverse.astype(np.float32))
    scale = (largest * np.float32(1 / 127)).astype(np.float64)
    return (codes * scale).reshape(r, -1)[:, :k]


def values(w: QTensor) -> np.ndarray:
    """What a weight stands for, in float64."""
    q, scale = np.asarray(w.q).astype(np.float64), np.asarray(w.scale).astype(np.float64)
    scale = scale if w.unit is None else scale * np.asarray(w.unit).astype(np.float64)
    groups = scale.shape[-1]
    q = q.reshape(w.shape[0], groups, -1)
    if w.zero is None:
        found = q * scale[..., None]
    elif np.issubdtype(w.zero.dtype, np.integer):
        found = (q - np.asarray(w.zero).astype(np.float64)[..., None]) * scale[..., None]
    else:
        found = q * scale[..., None] + np.asarray(w.zero).astype(np.float64)[..., None]
    return found.reshape(w.shape)


def oracle(x: np.ndarray, w: QTensor) -> np.ndarray:
    """The product of the rounded x with the same codes, in float64; beside float8 x as it is."""
    if w.dtype == jnp.float8_e4m3fn:
        return x.astype(np.float64) @ values(w).T
    return rounded(x, block_size(w.shape[1], w.scale.shape[-1])) @ values(w).T


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative RMS."""
    found = np.asarray(found, np.float64)
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))


def prepared(w: QTensor) -> CpuWeight:
    found = prepare(w)
    assert isinstance(found, CpuWeight), found
    return found


def native() -> list[Target]:
    """The targets that this machine can run."""
    from llvmlite import binding

    features = {name for name, there in binding.get_host_cpu_features().items() if there}
    arch = jit.host().arch
    return [t for t in TARGETS if t.arch == arch and features.issuperset(t.needs)]


def program_of(x: np.ndarray, w: CpuWeight, **fused):
    found = plan(MatmulCall.of(x, w, jnp.float32, **fused))
    assert isinstance(found, CpuPlan), found
    return found.program


def by_hand(
    x: np.ndarray, w: CpuWeight, threads: int = 1, on: Target | None = None, place=lambda a: a
) -> np.ndarray:
    """The product without XLA, each array where ``place`` copies it."""
    program = program_of(x, w)
    results = [place(np.zeros(r.shape, r.dtype)) for r in program.results_of(w, len(x))]
    operands = (x, w.q, w.scale, w.zero, w.unit if w.form.has_unit else None)
    arrays = [place(np.asarray(a)) for a in operands if a is not None]
    address = jit.compiled(program, on or jit.host()).address
    frame.call(address, arrays, results, threads=threads)
    return np.array(results[0])


def stored(x: Any) -> np.ndarray:
    """An array as XLA's CPU has it in memory: int4 two to a byte."""
    x = np.asarray(x)
    if x.dtype != jnp.int4:
        return x
    codes = x.astype(np.int8) & 15
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


class GuardedPages:
    """Copies of arrays that end where a page begins that nobody may touch."""

    def __init__(self) -> None:
        self.maps: list[mmap.mmap] = []
        self.libc = ctypes.CDLL(None, use_errno=True)

    def place(self, a: np.ndarray) -> np.ndarray:
        page = mmap.PAGESIZE
        room = -(-a.nbytes // page) * page
        memory = mmap.mmap(-1, room + page)
        self.maps.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.libc.mprotect(ctypes.c_void_p(start + room), page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        whole = np.frombuffer(memory, np.uint8, room)
        copy = whole[room - a.nbytes :].view(a.dtype).reshape(a.shape)
        copy[...] = a
        return copy


def in_six_threads(work: Callable[[int], None]) -> None:
    """``work(0)`` to ``work(5)`` at once, to their ends."""
    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def same_bits_under_load(calls: int, runs: Sequence[Callable[[], Any]]) -> None:
    """Six functions, each called so often by a thread of its own, always give the same array."""
    wanted, wrong = [np.asarray(run()) for run in runs], []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(calls) if not np.array_equal(runs[i](), wanted[i]))

    in_six_threads(work)
    assert not wrong


def said_with_avx2(code: str) -> str:
    """What a process prints in which the handlers are those of the least target of this CPU."""
    environment = os.environ | {VARIABLE: native()[-1].name}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()
