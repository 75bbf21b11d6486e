"""Runs the decode matmul's own code on numpy, all threads of a cluster in lockstep.

The kernel is Python that emits instructions; here the same Python meets an object with the same
functions that executes them, one array element per thread.  It checks addresses, fragment orders,
masks and arithmetic.  It knows no time: copies land at once and barriers do nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np

from pallas_kernels import fused_parts
from pallas_kernels.matmul.few_rows import copies, sums, widen
from pallas_kernels.matmul.few_rows import kernel as decode
from pallas_kernels.matmul.few_rows import staged_x as staging
from pallas_kernels.matmul.few_rows import tile as tiles
from pallas_kernels.matmul.few_rows.plan import divide_tiles
from pallas_kernels.matmul.few_rows.scheme import KIND, Scheme

_DTYPE = {"bf16": jnp.bfloat16, "f16": jnp.float16}


class Machine:
    """One cluster: ``ranks`` blocks of 512 threads, their shared memories, the operands."""

    def __init__(self, arrays, shared_sizes, cluster: int, ranks: int):
        self.threads, self.ranks, self.cluster = 512 * ranks, ranks, cluster
        self.memory = [None if a is None else np.frombuffer(bytearray(a), np.uint8) for a in arrays]
        starts = np.concatenate([[0], np.cumsum(shared_sizes)])
        self.shared = np.full((ranks, int(starts[-1])), 0xFF, np.uint8)
        bases = [None if a is None else (i + 1) << 40 for i, a in enumerate(arrays)]
        self.refs = bases + [int(s) for s in starts[:-1]]
        self.mask = np.ones(self.threads, bool)
        self.rank = np.arange(self.threads) // 512

    # values
    def ci(self, v):
        return np.full(self.threads, v & 0xFFFFFFFF, np.uint32)

    def cf(self, v):
        return np.full(self.threads, v, np.float32)

    def register(self, name):
        known = {
            "tid.x": np.arange(self.threads) % 512,
            "ctaid.x": np.full(self.threads, self.cluster),
            "clusterid.x": np.full(self.threads, self.cluster),
            "cluster_ctarank": self.rank,
        }
        return known[name].astype(np.uint32)

    def address(self, ref):
        return np.full(self.threads, ref, np.uint64)

    def shared_address(self, ref):
        return self.ci(ref)

    def add(self, *terms):
        total = functools.reduce(np.add, [self.ci(t) if isinstance(t, int) else t for t in terms])
        return total.astype(np.uint32)

    def mul(self, a, b):
        return (a * np.uint32(b)).astype(np.uint32)

    def offset(self, base, index, stride=1):
        return base + index.astype(np.uint64) * np.uint64(stride)

    def minimum(self, a, b):
        return np.minimum(a, np.uint32(b))

    def less(self, a, b):
        a, b = (np.uint32(v) if isinstance(v, int) else v for v in (a, b))
        return a < b

    def when(self, condition, body):
        outer, self.mask = self.mask, self.mask & condition
        if self.mask.any():
            body()
        self.mask = outer

    def loop(self, count, carry, body):
        for i in range(count):
            carry = body(self.ci(i), carry)
        return carry

    def store_words(self, base, words, at=0):
        for i, word in enumerate(words):
            self.store_global(base + np.uint64(at + 4 * i), word)

    # memory; threads that are masked off read what the first active one reads
    def _bytes(self, base, at, count):
        where = np.where(self.mask, base + np.uint64(at), base[self.mask][:1]).astype(np.uint64)
        tensor = int(where[0] >> np.uint64(40)) - 1
        first = (where & np.uint64((1 << 40) - 1)).astype(np.int64)
        return self.memory[tensor], first[:, None] + np.arange(count)

    def load_global(self, base, n, at=0):
        memory, where = self._bytes(base, at, 4 * n)
        assert (where[:, 0] % (4 * n) == 0)[self.mask].all()
        return list(memory[where].copy().view(np.uint32).T)

    def store_global(self, base, value):
        memory, where = self._bytes(base, 0, 4)
        memory[where[self.mask]] = value.view(np.uint8).reshape(-1, 4)[self.mask]

    def store_global_half(self, base, half):
        memory, where = self._bytes(base, 0, 2)
        halves = half.astype(np.uint16).view(np.uint8).reshape(-1, 2)
        memory[where[self.mask]] = halves[self.mask]

    def _shared(self, base, at, count, rank=None):
        first = np.where(self.mask, base.astype(np.int64) + at, 0)
        rank = self.rank if rank is None else rank
        return rank[:, None], first[:, None] + np.arange(count)

    def copy_async(self, to, source, at, from_at=0, size=None):
        memory, where = self._bytes(source, from_at, 16)
        assert (where[:, 0] % 16 == 0)[self.mask].all()
        rank, place = self._shared(to, at, 16)
        assert (place[:, 0] % 16 == 0)[self.mask].all()
        m = self.mask
        data = memory[where[m]]
        if size is not None:
            data = np.where(np.arange(16) < size[m, None], data, 0)
        self.shared[rank[m], place[m]] = data

    def load_shared_words(self, base, n, at=0):
        return list(self.shared[self._shared(base, at, 4 * n)].copy().view(np.uint32).T)

    def load_shared(self, base, at=0):
        return self.load_shared_words(base, 1, at)[0].view(np.float32)

    def load_shared_narrow(self, base, kind, at=0):
        dtype = {"u16": np.uint16, "s8": np.int8}[kind]
        raw = self.shared[self._shared(base, at, np.dtype(dtype).itemsize)]
        return raw.copy().view(dtype)[:, 0].astype(np.int32).view(np.uint32)

    def store_shared(self, base, value, at=0):
        rank, place = self._shared(base, at, 4)
        m = self.mask
        self.shared[rank[m], place[m]] = value.view(np.uint8).reshape(-1, 4)[m]

    def store_shared_words(self, base, words, at=0):
        for i, word in enumerate(words):
            self.store_shared(base, word, at + 4 * i)

    def peer_address(self, base, rank):
        return base + np.uint32((rank + 1) << 24)

    def load_peer(self, base, at=0):
        rank = np.where(self.mask, base >> np.uint32(24), 1).astype(np.int64) - 1
        where = self._shared(base & np.uint32((1 << 24) - 1), at, 4, rank)
        return self.shared[where].copy().view(np.float32)[:, 0]

    # arithmetic
    def shift_right(self, w, bits):
        return w >> np.uint32(bits)

    def and_xor(self, w, mask, flip):
        return (w & np.uint32(mask)) ^ np.uint32(flip)

    def permute(self, a, b, selector):
        every = [(v >> np.uint32(s)) & np.uint32(255) for v in (a, b) for s in (0, 8, 16, 24)]
        picked = [every[(selector >> s) & 15] for s in (0, 4, 8, 12)]
        return sum(v << np.uint32(s) for v, s in zip(picked, (0, 8, 16, 24), strict=True))

    def pair(self, word, kind):
        halves = word & np.uint32(0xFFFF), word >> np.uint32(16)
        return [h.astype(np.uint16).view(_DTYPE[kind]).astype(np.float32) for h in halves]

    def join(self, halves, kind):
        low, high = (h.astype(_DTYPE[kind]).view(np.uint16).astype(np.uint32) for h in halves)
        return low | high << np.uint32(16)

    def sub_pairs(self, a, b, kind):
        pairs = zip(self.pair(a, kind), self.pair(b, kind), strict=True)
        return self.join([x - y for x, y in pairs], kind)

    def mul_pairs(self, a, b):
        pairs = zip(self.pair(a, "bf16"), self.pair(b, "bf16"), strict=True)
        return self.join([x * y for x, y in pairs], "bf16")

    def fma_pairs(self, a, b, c):
        triples = zip(*(self.pair(v, "bf16") for v in (a, b, c)), strict=True)
        return self.join([x * y + z for x, y, z in triples], "bf16")

    def fma(self, a, b, c):
        return a * b + c

    def widen(self, half, kind):
        return self.pair(half, kind)[0]

    def widen_high(self, word, kind):
        return self.pair(word, kind)[1]

    def narrow(self, value, kind):
        return value.astype(_DTYPE[kind]).view(np.uint16).astype(np.uint32)

    def mma(self, acc, a, b, kind="bf16"):
        """acc[16, 8] += a[16, 16] b[16, 8] in every warp; PTX's places of rows and columns."""
        g, t = np.arange(32) // 4, np.arange(32) % 4
        warps = self.threads // 32
        left = np.zeros((warps, 16, 16), np.float32)
        right = np.zeros((warps, 16, 8), np.float32)
        for i, word in enumerate(a):
            for e, half in enumerate(self.pair(word, kind)):
                left[:, g + 8 * (i % 2), 2 * t + 8 * (i // 2) + e] = half.reshape(warps, 32)
        for i, word in enumerate(b):
            for e, half in enumerate(self.pair(word, kind)):
                right[:, 2 * t + 8 * i + e, g] = half.reshape(warps, 32)
        out = left @ right
        return [acc[i] + out[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(-1) for i in range(4)]

    def pack(self, low, high, kind):
        return self.join([low, high], kind)

    def rsqrt(self, value):
        value = np.where(self.mask, value, np.float32(1))
        return np.float32(1) / np.sqrt(value)

    def exp2(self, value):
        with np.errstate(over="ignore"):
            return np.exp2(np.where(self.mask, value, np.float32(0)))

    def divide(self, a, b):
        return np.where(self.mask, a, np.float32(0)) / np.where(self.mask, b, np.float32(1))

    def shuffle_xor(self, value, lanes):
        assert self.mask.all()
        return value[np.arange(self.threads) ^ lanes]

    def f32(self):
        return np.float32

    def nothing(self, *args):
        del args

    barrier = warp_barrier = cluster_barrier = copies_commit = copies_wait = nothing


ARITH = types.SimpleNamespace(
    andi=np.bitwise_and,
    xori=np.bitwise_xor,
    addi=np.add,
    subi=np.subtract,
    addf=np.add,
    mulf=np.multiply,
    divui=np.floor_divide,
    remui=np.remainder,
    select=np.where,
    bitcast=lambda kind, v: v.view(kind),
)


def raw(a):
    if a is None:
        return None
    a = np.asarray(a)
    if a.dtype == jnp.int4:
        nibbles = a.astype(np.int8).view(np.uint8) & 15
        a = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return a.tobytes()


def run_decode(
    monkeypatch,
    x,
    w,
    bias,
    out_dtype,
    *,
    norm=None,
    residual=None,
    pairs=False,
    pending=None,
    **changes,
):
    """``decode.matmul`` of x and w; ``changes`` to its plan (clusters, per, batch, depth)."""
    (m, k), n = x.shape, w.shape[0]
    plan = divide_tiles(m, w, bias=bias is not None, residual=residual is not None, pairs=pairs)
    plan = dataclasses.replace(plan, **changes)
    scheme = Scheme.of(w, KIND[x.dtype.name])

    n_out = n // 2 if pairs else n
    out = np.full((m, n_out), np.nan, jnp.dtype(out_dtype))
    total = None if pending is None else np.full((m, k), np.nan, x.dtype)
    bias = None if bias is None else np.asarray(bias, np.float32)
    gamma, eps = (None, None) if norm is None else norm
    sizes = plan.scratch_sizes(normed=norm is not None)
    for cluster in range(plan.clusters):
        given = x, *decode.parts_of(w), bias, gamma, residual, out, pending, total
        arrays = [raw(v) for v in given]
        machine = Machine(arrays, sizes, cluster, plan.split)
        install(monkeypatch, machine)
        operands = decode.Operands(*machine.refs[: len(given)])
        kinds = {"out": KIND[jnp.dtype(out_dtype).name], "eps": eps}
        if gamma is not None:
            kinds["gamma"] = KIND[gamma.dtype.name]
        decode.Kernel(plan, scheme, n, k, operands, machine.refs[len(given) :], **kinds).run()
        out = machine.memory[7].view(out.dtype).reshape(m, n_out)
        if total is not None:
            total = machine.memory[9].view(x.dtype).reshape(m, k)
    return out if total is None else (out, total)


def install(monkeypatch, machine: Machine) -> None:
    """The kernel's modules emit into the machine."""
    for module in (decode, copies, staging, tiles, sums, widen, fused_parts):
        for name, fake in (("p", machine), ("a", machine), ("arith", ARITH)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
