"""Runs the bodies of the attention kernels on the CPU: every thread of a block a lane of numpy.

Those bodies are Python that calls ``pallas_kernels.ptx`` and MLIR's ``arith`` while a kernel is
traced.  Here the same calls compute: a value becomes an array with one entry per
thread, memory one array of bytes.  All threads of a block take each step together, so a wait that
is not satisfied when it is reached is a deadlock; reads that no barrier protects go unnoticed.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import fused_parts, launch, transform

_HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
U32 = np.uint32


def to_bytes(x) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype == jnp.int4:
        words = x.astype(np.int8).reshape(-1).view(np.uint8) & 15
        return words[::2] | words[1::2] << 4
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def from_bytes(raw: np.ndarray, like) -> jax.Array:
    if like.dtype == jnp.int4:
        nibbles = np.stack((raw << 4, raw & 0xF0), -1).view(np.int8) >> 4
        return jnp.asarray(nibbles.reshape(like.shape), jnp.int4)
    return jnp.asarray(raw.view(like.dtype).reshape(like.shape))


class Block:
    """The threads that are there together: of one block, or of the ``blocks`` of a cluster, whose
    shared memories lie ``apart`` bytes from one another."""

    def __init__(self, threads: int, size: int, blocks: int = 1, apart: int = 0):
        self.n, self.apart = threads * blocks, apart
        self.memory = np.full(size, 0xFF, np.uint8)  # NaN until written
        self.masks = [np.ones(self.n, bool)]
        self.barriers: dict[int, list[int]] = {}
        self.touched = False  # device memory, by this block
        index = np.arange(self.n, dtype=U32)
        self.rank = index // U32(threads)
        self.special = {"tid.x": index % U32(threads), "cluster_ctarank": self.rank}

    def c(self, value, dtype=U32):
        return np.full(self.n, value).astype(dtype)

    def at(self, address, size):
        address = np.where(self.masks[-1], np.asarray(address, np.int64), 0)
        return address[:, None] + np.arange(size)

    def load(self, address, n, offset, dtype):
        raw = self.memory[self.at(np.asarray(address, np.int64) + offset, 4 * n)]
        return [np.ascontiguousarray(raw[:, 4 * i : 4 * i + 4]).view(dtype)[:, 0] for i in range(n)]

    def store(self, address, values, offset=0):
        raw = np.stack([v.view(np.uint8).reshape(self.n, -1) for v in values], 1)
        raw = raw.reshape(self.n, -1)
        keep = self.masks[-1]
        self.memory[self.at(np.asarray(address, np.int64) + offset, raw.shape[1])[keep]] = raw[keep]

    def copy_async(self, to, source, at, from_at=0, size=None):
        whole = 16 if size is None else size[:, None]
        raw = np.where(np.arange(16) < whole, self.memory[self.at(source + from_at, 16)], 0)
        keep = self.masks[-1]
        assert not ((source + from_at) % 16)[keep].any() and not ((to + at) % 16)[keep].any()
        self.memory[self.at(to + at, 16)[keep]] = raw[keep]

    def await_kernel(self):
        assert not self.touched, "device memory is read or written before the kernel before ended"

    def prefetch(self, at, size):
        address = np.asarray(at, np.int64)[self.masks[-1]]
        assert size % 16 == 0 and (address % 16 == 0).all()
        assert (address + size <= len(self.memory)).all()

    def narrow(self, address, kind, offset=0):
        dtype = {"u8": np.uint8, "s8": np.int8, "u16": np.uint16}[kind]
        raw = self.memory[self.at(np.asarray(address, np.int64) + offset, np.dtype(dtype).itemsize)]
        return raw.view(dtype)[:, 0].astype(np.int32).view(U32)

    def copy(self, to, source, size):
        for i in np.flatnonzero(self.masks[-1]):
            start = int(to[i])
            self.memory[start : start + size] = self.memory[int(source[i]) :][:size]

    def when(self, condition, body):
        self.masks.append(self.masks[-1] & condition)
        if self.masks[-1].any():
            body()
        self.masks.pop()

    def loop(self, start, stop, step, carry, body):
        index, carry = start.astype(np.int32), list(carry)
        while (self.masks[-1] & (index < stop.astype(np.int32))).any():
            self.masks.append(self.masks[-1] & (index < stop.astype(np.int32)))
            out = body(index.view(U32), list(carry))
            carry = [
                np.where(self.masks[-1], new, old) for new, old in zip(out, carry, strict=True)
            ]
            self.masks.pop()
            index = index + step.astype(np.int32)
        return carry

    # mbarrier: [phase, arrivals left, arrivals of a phase, bytes to come]
    def each(self, barrier, act):
        for i in np.flatnonzero(self.masks[-1]):
            state = self.barriers[int(barrier[i])]
            act(state, i)
            if state[1] == 0 and state[3] == 0:
                state[0], state[1] = state[0] ^ 1, state[2]

    def wait(self, barrier, parity):
        def check(state, i):
            assert state[0] != int(parity[i]), "deadlock"

        for i in np.flatnonzero(self.masks[-1]):
            check(self.barriers[int(barrier[i])], i)

    def mma(self, acc, left, right, kind="bf16"):
        def halves(word):
            pair = np.ascontiguousarray(word).view(np.uint16).reshape(-1, 32, 2)
            return pair.view(_HALF[kind]).astype(np.float64)

        a, b = [halves(x) for x in left], [halves(x) for x in right]
        warps = self.n // 32
        lane = np.arange(32)
        row, col = lane // 4, lane % 4 * 2
        m_a, m_b = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8))
        for i in range(2):
            for r in range(4):
                m_a[:, row + 8 * (r % 2), col + 8 * (r // 2) + i] = a[r][:, :, i]
            for r in range(2):
                m_b[:, col + 8 * r + i, row] = b[r][:, :, i]
        out = m_a @ m_b
        new = []
        for i, x in enumerate(acc):
            part = out[:, row + 8 * (i // 2), col + i % 2].reshape(-1)
            new.append((x + part).astype(np.float32))
        return new

    def transpose(self, word):
        pair = np.ascontiguousarray(word).view(np.uint16).reshape(-1, 8, 8)
        return np.ascontiguousarray(pair.transpose(0, 2, 1)).reshape(-1).view(U32)

    def shuffle(self, x, lanes):
        return x[np.arange(self.n) ^ lanes]

    def shuffle_up(self, x, lanes):
        index = np.arange(self.n)
        return x[np.where(index % 32 < lanes, index, index - lanes)]

    def load_matrices(self, base, at=0, transposed=False):
        rows = self.memory[self.at(np.asarray(base, np.int64) + at, 16)].view(np.uint16)
        tiles = rows.reshape(-1, 4, 8, 8)
        tiles = tiles.transpose(1, 0, 3, 2) if transposed else tiles.transpose(1, 0, 2, 3)
        return [np.ascontiguousarray(tile).reshape(-1).view(U32) for tile in tiles]

    def _store_matrices(self, base, words, at, order):
        tiles = np.stack(words).view(np.uint16).reshape(4, -1, 8, 8).transpose(order)
        rows = np.ascontiguousarray(tiles).view(np.uint8).reshape(self.n, 16)
        keep = self.masks[-1]
        self.memory[self.at(np.asarray(base, np.int64) + at, 16)[keep]] = rows[keep]

    def store_matrices(self, base, words, at=0):
        self._store_matrices(base, words, at, (1, 0, 2, 3))

    def store_matrices_transposed(self, base, words, at=0):
        self._store_matrices(base, words, at, (1, 0, 3, 2))


def _halves(word, kind):
    return np.ascontiguousarray(word).view(np.uint16).view(_HALF[kind])


def _pairs(op):
    def run(a, b, kind="bf16"):
        x, y = (_halves(v, kind) for v in (a, b))
        wide = op(x.astype(np.float32), y.astype(np.float32))
        return wide.astype(_HALF[kind]).view(U32)

    return run


def _fma_pairs(a, b, c, kind="bf16"):
    x, y, z = (_halves(v, kind).astype(np.float32) for v in (a, b, c))
    return (x * y + z).astype(_HALF[kind]).view(U32)


def _pack(low, high, kind="bf16"):
    return np.stack([low, high], 1).astype(_HALF[kind]).view(U32)[:, 0]


def _half(word, high, kind):
    halves = np.ascontiguousarray(word).view(np.uint16).reshape(-1, 2)[:, high]
    return np.ascontiguousarray(halves).view(_HALF[kind]).astype(np.float32)


def _permute(a, b, selector):
    source = np.concatenate([x[:, None].view(np.uint8).reshape(-1, 4) for x in (a, b)], 1)
    return np.ascontiguousarray(
        np.stack([source[:, selector >> 4 * i & 7] for i in range(4)], 1)
    ).view(U32)[:, 0]


def _to_e4m3(*x):
    limit = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
    pair = np.clip(np.stack(x, 1), -limit, limit).astype(ml_dtypes.float8_e4m3fn)
    return pair.view(np.uint16)[:, 0].astype(U32)


def _from_e4m3(word):
    pair = word.astype(np.uint16).view(ml_dtypes.float8_e4m3fn).reshape(-1, 2)
    return list(np.ascontiguousarray(pair.T).astype(np.float32))


_GLOBAL = (
    "load_global", "load_half", "load_signed_byte", "store_global", "store_global_half",
    "store_byte", "copy_async", "copy_bulk",
)  # fmt: skip


def _modules(block: Block):
    def number(x):
        return block.c(x) if isinstance(x, int) else x

    def add(*terms):
        return sum((ci(t) if isinstance(t, int) else t for t in terms), block.c(0))

    def signed(x):
        return number(x).astype(np.int32)

    def ci(value):
        return block.c(value & 0xFFFFFFFF)

    def wide(base, index, stride=1):
        return np.asarray(base, np.int64) + index.astype(np.int64) * stride

    def expect(barrier, size):
        def act(state, _):
            state[1], state[3] = state[1] - 1, state[3] + size

        block.each(barrier, act)

    def arrive(barrier):
        def act(state, _):
            state[1] -= 1

        block.each(barrier, act)

    def copy_bulk(to, source, size, barrier):
        assert size % 16 == 0
        block.copy(to, source, size)

        def act(state, _):
            state[3] -= size

        block.each(barrier, act)

    def barrier_init(barrier, arrivals):
        for i in np.flatnonzero(block.masks[-1]):
            block.barriers[int(barrier[i])] = [0, arrivals, arrivals, 0]

    def send_peer(to, values, barrier, at=0):
        block.store(to, values, at)

        def act(state, _):
            state[3] -= 4 * len(values)

        block.each(barrier, act)

    def choose(condition, body, otherwise):
        values = otherwise
        block.masks.append(block.masks[-1] & condition)
        if block.masks[-1].any():
            values = [np.where(condition, x, y) for x, y in zip(body(), otherwise, strict=True)]
        block.masks.pop()
        return values

    def touching(access):
        def run(*operands, **options):
            block.touched = True
            return access(*operands, **options)

        return run

    def kind_of(kind):
        return np.float32 if kind == "f32" else U32

    p = SimpleNamespace(
        register=lambda name, volatile=False: block.special[name], ci=ci, add=add,
        cf=lambda v: block.c(v, np.float32), mul=lambda x, k: x * U32(k & 0xFFFFFFFF),
        address=lambda ref: block.c(ref, np.int64),
        shared_address=lambda ref: block.c(ref) + block.rank * U32(block.apart),
        offset=wide, offset_rows=wide, shift_right=lambda x, k: x >> U32(k),
        shift_left=lambda x, k: x << U32(k), masked=lambda x, m: x & U32(m & 0xFFFFFFFF),
        less=lambda x, y: x < number(y), equal=lambda x, y: x == number(y), no=np.logical_not,
        bit=lambda x, k: (x >> U32(k) & U32(1)) == 1,
        below=lambda x, y: signed(x) < signed(y), at_most=lambda x, y: signed(x) <= signed(y),
        smaller=lambda x, y: np.minimum(signed(x), signed(y)).view(U32),
        larger=lambda x, y: np.maximum(signed(x), signed(y)).view(U32),
        minimum=lambda x, y: np.minimum(x, U32(y)) if isinstance(y, int) else np.fmin(x, y),
        maximum=np.fmax, absolute=np.abs, exp2=lambda x: np.exp2(x), log2=np.log2,
        divide=lambda x, y: x / y, fma=lambda x, y, z: (x * y + z).astype(np.float32),
        rsqrt=lambda x: (1 / np.sqrt(x)).astype(np.float32),
        bits=lambda x: x.astype(np.float32).view(U32), from_bits=lambda w: w.view(np.float32),
        and_xor=lambda w, m, f: (w & U32(m)) ^ U32(f),
        select_bits=lambda x, m, c: (x & U32(m)) | c, permute=_permute,
        add_pairs=_pairs(np.add), sub_pairs=_pairs(np.subtract),
        mul_pairs=_pairs(np.multiply), pack=_pack,
        widen=lambda w, kind="bf16": _half(w, 0, kind),
        widen_high=lambda w, kind="bf16": _half(w, 1, kind),
        narrow=lambda x, kind: x.astype(_HALF[kind]).view(np.uint16).astype(U32),
        mma=block.mma, shuffle_xor=block.shuffle, shuffle_up=block.shuffle_up,
        shuffle_from=lambda x, lane: x[np.arange(block.n) & -32 | lane],
        load_matrices=block.load_matrices, store_matrices=block.store_matrices,
        store_matrices_transposed=block.store_matrices_transposed, transpose_8x8=block.transpose,
        READ_ONLY=".nc",
        load_global=lambda base, n, at=0, kind="b32", cache="": block.load(
            base, n, at, kind_of(kind)),
        store_global=lambda base, values, at=0: block.store(base, values, at),
        store_global_half=lambda base, half: block.store(base, [half.astype(np.uint16)]),
        store_byte=lambda base, word: block.store(base, [word.astype(np.uint8)]),
        to_integer=lambda x: np.rint(x).astype(np.int32).view(U32),
        to_float=lambda x: signed(x).astype(np.float32),
        to_e4m3=_to_e4m3, from_e4m3=_from_e4m3,
        load_half=lambda base, at=0, cache="": block.load(base, 1, at, U32)[0] & U32(0xFFFF),
        load_signed_byte=lambda base, at=0, cache="": block.narrow(base, "s8", at),
        load_shared=lambda base, n, at=0, kind="b32": block.load(base, n, at, kind_of(kind)),
        load_float=lambda base, at=0: block.load(base, 1, at, np.float32)[0],
        load_peer=lambda base, at=0: block.load(base, 1, at, np.float32)[0],
        load_shared_narrow=block.narrow, copy_async=block.copy_async,
        fma_pairs=_fma_pairs, cluster_barrier=lambda: None,
        store_shared=lambda base, values, at=0: block.store(base, values, at),
        when=block.when, choose=choose,
        loop=lambda start, stop, step, *rest: block.loop(
            number(start), number(stop), number(step), *rest),
        barrier=lambda: None, warpgroup_barrier=lambda: None, warp_barrier=lambda: None,
        copies_commit=lambda: None, await_kernel=block.await_kernel, prefetch=block.prefetch,
        copies_wait=lambda n: None, copy_bulk=copy_bulk, barrier_init=barrier_init,
        barriers_ready=lambda: None, barrier_expect=expect, barrier_arrive=arrive,
        barrier_wait=block.wait, cluster_arrive=lambda order="": None, cluster_wait=lambda: None,
        peer_address=lambda x, rank: x + (rank - block.rank) * U32(block.apart),
        send_peer=send_peer,
    )  # fmt: skip
    for name in _GLOBAL:
        setattr(p, name, touching(getattr(p, name)))
    arith = SimpleNamespace(
        andi=np.bitwise_and, ori=np.bitwise_or, xori=np.bitwise_xor,
        shli=lambda x, k: x << k, divui=lambda x, k: x // k, remui=lambda x, k: x % k,
        addi=lambda x, y: x + y, subi=lambda x, y: x - y, muli=lambda x, y: x * y, select=np.where,
        addf=np.add, subf=np.subtract, mulf=np.multiply, negf=np.negative,
        cmpi=lambda predicate, x, y: predicate(x, y), cmpf=lambda predicate, x, y: predicate(x, y),
        CmpIPredicate=SimpleNamespace(eq=np.equal, uge=np.greater_equal),
        CmpFPredicate=SimpleNamespace(OEQ=np.equal, OGT=np.greater),
    )  # fmt: skip
    return {"p": p, "arith": arith}


def registers(threads: int) -> SimpleNamespace:
    """``ptx`` for code that touches no memory."""
    return _modules(Block(threads, 0))["p"]


def _directly(op, choice, static, *operands):
    """An op that neither traces its kernel nor has derivatives."""
    return (op.kernel if choice.implementation == "mosaic" else op.xla)(static, *operands)


@contextlib.contextmanager
def emulated(*modules):
    """Within, the kernels of ``modules`` compute here, on concrete arrays."""
    modules = *modules, fused_parts, launch

    def kernel(body, *, out_type, grid, scratch_types, num_threads=None, cluster=(), **_):
        outs = tuple(out_type) if isinstance(out_type, tuple | list) else (out_type,)

        def run(*operands):
            data = [to_bytes(x[...]) for x in operands]
            sizes = [len(x) for x in data]
            sizes += [math.prod(o.shape) * o.dtype.itemsize for o in outs]
            shared = len(sizes)
            sizes += [4 * math.prod(s) for s in scratch_types]
            starts = np.cumsum([128, *[(s + 255) // 128 * 128 for s in sizes]]).tolist()
            apart = starts[-1] - starts[shared]
            blocks = math.prod(cluster)
            size = starts[shared] + blocks * apart
            block = Block(128 * (num_threads or 1), size, blocks, apart)
            for start, x in zip(starts, data, strict=False):
                block.memory[start : start + len(x)] = x
            with contextlib.ExitStack() as patches, np.errstate(all="ignore"):
                names = _modules(block)
                for module in modules:
                    mine = {name: x for name, x in names.items() if hasattr(module, name)}
                    if mine:
                        patches.enter_context(mock.patch.multiple(module, **mine))
                for i in range(grid[0]):
                    block.special["clusterid.x"] = block.c(i)
                    block.special["ctaid.x"] = block.c(i) * U32(blocks) + block.rank
                    block.touched = False
                    body(*starts[:-1])
            for start, x, old in zip(starts, operands, data, strict=False):
                if not isinstance(x, jax.Array):  # a reference, to memory that may be written
                    raw = block.memory[start : start + len(old)]
                    x[...] = from_bytes(raw, x)
            done = []
            for start, o in zip(starts[len(data) :], outs, strict=False):
                raw = block.memory[start : start + math.prod(o.shape) * o.dtype.itemsize]
                done.append(from_bytes(raw, o))
            return done[0] if hasattr(out_type, "shape") else type(out_type)(done)

        return run

    fake = SimpleNamespace(
        kernel=kernel, SMEM=lambda shape, dtype: shape, RefType=lambda: None,
        inline_mgpu=lambda arg_types: lambda f: lambda *refs: f(None, *refs),
        CompilerParams=lambda **kw: None, LoweringSemantics=SimpleNamespace(Lane=None),
    )  # fmt: skip
    with contextlib.ExitStack() as patches:
        patches.enter_context(jax.disable_jit())  # the arrays have to be concrete
        patches.enter_context(mock.patch.object(transform.Op, "__call__", _directly))
        for module in modules:
            if hasattr(module, "plgpu"):
                patches.enter_context(mock.patch.object(module, "plgpu", fake))
        yield
