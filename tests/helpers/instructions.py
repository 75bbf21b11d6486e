"""What each PTX instruction does to the threads of an emulated block.

``MEANING`` is the table: by an instruction's full name, a function of the block and the operands.
An operand is an array with one entry per thread, a list of them for ``{a,b}``, an integer for an
immediate, an address in bytes for ``[a+4]``. Names in ``EFFECTS`` have no result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

MEANING: dict[str, Callable[..., Any]] = {}
EFFECTS: set[str] = set()
HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
E4M3 = ml_dtypes.float8_e4m3fn
U16, U32, F32 = np.uint16, np.uint32, np.float32


def result_of(*names: str) -> Callable:
    """Register a function as the meaning of instructions with a result."""

    def register(function):
        MEANING.update(dict.fromkeys(names, function))
        return function

    return register


def effect_of(*names: str) -> Callable:
    """Register a function as the meaning of instructions without a result."""
    EFFECTS.update(names)
    return result_of(*names)


# --- Lane by lane ---------------------------------------------------------------------------------

# A function of three words is named by its bits for a = 0xF0, b = 0xCC, c = 0xAA.
LOGIC = {
    function(0xF0, 0xCC, 0xAA): function
    for function in (
        lambda a, b, c: (a & b) ^ c,
        lambda a, b, c: (a & b) | c,
        lambda a, b, c: (a & b) | (c & ~b),
    )
}


def _permute(a, b, selector):
    both = [np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)]
    both = np.concatenate(both, axis=1)
    both = np.concatenate([both, np.uint8(255) * (both >> 7)], axis=1)
    selector = np.broadcast_to(selector, len(both))[:, None] >> np.arange(0, 16, 4) & 15
    return np.take_along_axis(both, selector, 1).view(U32)[:, 0]


def _to_e4m3(high, low):
    largest = float(ml_dtypes.finfo(E4M3).max)
    pair = np.stack([low, high], 1).view(F32)  # words or floats
    pair = np.clip(pair, -largest, largest)
    return pair.astype(E4M3).view(U16)[:, 0]


def _halves(word, kind):
    return np.ascontiguousarray(word).view(HALF[kind]).astype(F32)


LANEWISE: dict[str, Callable[..., Any]] = {
    "add.s64": np.add,
    "mad.wide.u32": lambda a, b, c: a.astype(np.int64) * b + c,
    "lop3.b32": lambda a, b, c, table: LOGIC[table](a, b, c),
    "prmt.b32": _permute,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.eq.u32": lambda a, b: a == b,
    "add.u32": lambda a, b: a + U32(b),
    "setp.ne.b32": lambda a, b: a != b,
    "setp.lt.and.u32": lambda a, b, other: (a < b) & other,
    "setp.eq.or.u32": lambda a, b, other: (a == b) | other,
    "selp.u32": lambda a, b, condition: np.where(condition, U32(a), U32(b)),
    "min.f32": np.fmin,
    "max.f32": np.fmax,
    "max.NaN.f32": np.maximum,
    "abs.f32": np.abs,
    "fma.rn.f32": lambda a, b, c: a * b + c,
    "div.rn.f32": np.divide,
    "rcp.rn.f32": np.reciprocal,
    "rcp.approx.f32": np.reciprocal,
    "rcp.approx.ftz.f32": np.reciprocal,
    "rsqrt.approx.f32": lambda x: (1 / np.sqrt(x)).astype(F32),
    "ex2.approx.f32": np.exp2,
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.ftz.f32": np.log2,
    "cvt.f32.f16": lambda bits: bits.view(np.float16).astype(F32),
    "cvt.u16.u32": lambda word: word.astype(U16),
    "cvt.u32.u16": lambda half: half.astype(U32),
    "cvt.s32.s16": lambda half: half.view(np.int16).astype(np.int32).view(U32),
    "cvt.rni.s32.f32": lambda x: np.rint(x).astype(np.int32).view(U32),
    "cvt.rn.f32.s32": lambda x: x.view(np.int32).astype(F32),
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3,
    "cvt.rn.f16x2.e4m3x2": lambda half: half.view(E4M3).astype(np.float16).view(U32),
}
PAIRS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
}
for _kind, _dtype in HALF.items():

    def _to_half(x, dtype=_dtype):
        return x.astype(dtype).view(U16)

    def _to_pair(high, low, dtype=_dtype):
        return np.stack([low, high], 1).astype(dtype).view(U32)[:, 0]

    LANEWISE |= {f"cvt.rn.{_kind}.f32": _to_half, f"cvt.rn.{_kind}x2.f32": _to_pair}
    for _name, _function in PAIRS.items():

        def _of_pairs(*words, function=_function, kind=_kind):
            return function(*(_halves(x, kind) for x in words)).astype(HALF[kind]).view(U32)

        LANEWISE[f"{_name}.rn.{_kind}x2"] = _of_pairs

for _name, _function in LANEWISE.items():
    result_of(_name)(lambda block, *operands, function=_function: function(*operands))


@result_of("mov.u32", "mov.b32")
def _move(block, x):
    if isinstance(x, list):  # two halves make a word
        return x[0].astype(U32) | x[1].astype(U32) << U32(16)
    return block.c(x) if isinstance(x, int) else x


# --- Other lanes ----------------------------------------------------------------------------------


@result_of("shfl.sync.bfly.b32")
def _shuffle_xor(block, x, lanes, last, members):
    return x[block.index ^ lanes]


@result_of("atom.shared.add.u32")
def _atomic_add(block, at, value):
    """One thread after the other."""
    old = block.c(0)
    for i in np.flatnonzero(block.masks[-1]):
        (word,) = block.load(np.full(block.n, at[i]), 1, U32)
        old[i] = word[i]
        mine = np.arange(block.n) == i
        block.masks.append(mine)
        block.store(at, [old + value.astype(U32)])
        block.masks.pop()
    return old


@result_of("shfl.sync.up.b32")
def _shuffle_up(block, x, lanes, first, members):
    return x[np.where(block.index % 32 < lanes, block.index, block.index - lanes)]


@result_of("shfl.sync.idx.b32")
def _shuffle_from(block, x, lane, last, members):
    return x[block.index & -32 | lane]


@result_of("redux.sync.max.u32")
def _largest_of_warp(block, x, members):
    return np.repeat(x.reshape(-1, 32).max(1), 32)


@result_of("redux.sync.min.u32")
def _smallest_of_warp(block, x, members):
    return np.repeat(x.reshape(-1, 32).min(1), 32)


@result_of("vote.sync.any.pred")
def _any_of_warp(block, x, members):
    return np.repeat(x.reshape(-1, 32).any(1), 32)


@result_of("movmatrix.sync.aligned.m8n8.trans.b16")
def _transpose(block, word):
    tiles = np.ascontiguousarray(word).view(U16).reshape(-1, 8, 8).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).reshape(-1).view(U32)


# The four tiles are side by side in a warp's 32 rows; in registers each is a word of every lane.
for _trans, _order in (("", (1, 0, 2, 3)), (".trans", (1, 0, 3, 2))):

    @result_of(f"ldmatrix.sync.aligned.m8n8.x4{_trans}.shared.b16")
    def _load_matrices(block, address, order=_order):
        tiles = block.memory[block.at(address, 16)].view(U16).reshape(-1, 4, 8, 8)
        return [np.ascontiguousarray(tile).reshape(-1).view(U32) for tile in tiles.transpose(order)]

    @effect_of(f"stmatrix.sync.aligned.m8n8.x4{_trans}.shared.b16")
    def _store_matrices(block, address, words, order=_order):
        tiles = np.stack(words).view(U16).reshape(4, -1, 8, 8).transpose(order)
        block.write(address, np.ascontiguousarray(tiles).view(np.uint8).reshape(block.n, 16))


for _kind, _dtype in HALF.items():

    @result_of(f"mma.sync.aligned.m16n8k16.row.col.f32.{_kind}.{_kind}.f32")
    def _mma(block, left, right, acc, dtype=_dtype):
        return block.mma(acc, left, right, dtype)


@result_of("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")
def _mma_int8(block, left, right, acc):
    return block.mma_int8(acc, left, right)


# --- Memory ---------------------------------------------------------------------------------------

SPACES = ("global", "global.nc", "global.L1::no_allocate", "shared", "shared::cluster")
SPACES += ("volatile.global", "relaxed.sys.global", "acquire.sys.global", "release.sys.global")
WORDS = {"b32": U32, "f32": F32}
NARROW = {"u8": np.uint8, "s8": np.int8, "u16": U16}
for _space, _kind, _n in itertools.product(SPACES, WORDS, (1, 2, 4)):
    _vector = _kind if _n == 1 else f"v{_n}.{_kind}"

    @result_of(f"ld.{_space}.{_vector}")
    def _load(block, address, space=_space, dtype=WORDS[_kind], n=_n):
        block.touches(space)
        words = block.load(address, n, dtype)
        return words if n > 1 else words[0]

    @effect_of(f"st.{_space}.{_vector}")
    def _store(block, address, words, space=_space):
        block.touches(space)
        block.store(address, words if isinstance(words, list) else [words])


for _space, _kind in itertools.product(SPACES, NARROW):

    @result_of(f"ld.{_space}.{_kind}")
    def _load_narrow(block, address, space=_space, dtype=NARROW[_kind]):
        block.touches(space)
        raw = block.memory[block.at(address, np.dtype(dtype).itemsize)].view(dtype)[:, 0]
        return raw.astype(np.int16).view(U16) if dtype is np.int8 else raw.astype(U16)


@result_of("ld.global.nc.b64")
def _load_address(block, address):
    return block.memory[block.at(address, 8)].view(np.int64)[:, 0]


for _kind, _dtype in (("b8", np.uint8), ("b16", U16)):

    @effect_of(f"st.global.{_kind}")
    def _store_narrow(block, address, half, dtype=_dtype):
        block.touches("global")
        block.store(address, [half.astype(dtype)])


@effect_of("cp.async.cg.shared.global", "cp.async.cg.shared.global.L2::128B")
def _copy_async(block, to, source, whole, size=None):
    block.touches("global")
    keep = block.masks[-1]
    assert not (source % whole)[keep].any() and not (to % whole)[keep].any()
    size = whole if size is None else size[:, None]
    raw = block.memory[block.at(source, whole)]
    block.copies.append((to, np.where(np.arange(whole) < size, raw, 0), keep, block.groups.copy()))


@effect_of("cp.async.commit_group")
def _close_group(block):
    block.groups += block.masks[-1]


@effect_of("cp.async.wait_group")
def _await_groups(block, pending):
    """A copy arrives when a thread waits for its group, so no earlier than it may be read."""
    left = []
    for to, raw, keep, group in block.copies:
        due = keep & block.masks[-1] & (group < block.groups - pending)
        block.memory[block.at(to, raw.shape[1])[due]] = raw[due]
        if (keep & ~due).any():
            left.append((to, raw, keep & ~due, group))
    block.copies = left


@effect_of("cp.async.mbarrier.arrive.noinc.shared.b64")
def _copies_arrive(block, barrier):
    """A copy arrives when the barrier hears of it, so no earlier than it may be read."""
    left = []
    for to, raw, keep, group in block.copies:
        due = keep & block.masks[-1]
        block.memory[block.at(to, raw.shape[1])[due]] = raw[due]
        if (keep & ~due).any():
            left.append((to, raw, keep & ~due, group))
    block.copies = left
    block.at_barrier(barrier, arrivals=1)


@effect_of("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes")
def _copy_bulk(block, to, source, size, barrier):
    assert size % 16 == 0
    block.touches("global")
    for i in np.flatnonzero(block.masks[-1]):
        start = int(to[i])
        block.memory[start : start + size] = block.memory[int(source[i]) :][:size]
    block.at_barrier(barrier, size=-size)


@effect_of("cp.async.bulk.prefetch.L2.global")
def _prefetch(block, address, size):
    address = address[block.masks[-1]]
    assert size % 16 == 0 and (address % 16 == 0).all()
    assert (address + size <= len(block.memory)).all()


# --- Barriers, which all threads of an emulated block reach together ------------------------------


@effect_of(
    "bar.warp.sync",
    "barrier.cluster.arrive.relaxed.aligned",
    "barrier.cluster.arrive.release.aligned",
    "barrier.cluster.wait.acquire.aligned",
    "fence.acq_rel.sys",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.async.shared::cta",
    "griddepcontrol.launch_dependents",
    "nanosleep.u32",
    "prefetch.global.L1",
)
def _nothing(block, *operands):
    pass


@effect_of("trap")
def _trap(block):
    assert not block.masks[-1].any(), "a thread traps"


@effect_of("griddepcontrol.wait")
def _await_kernel(block):
    assert not block.touched, "device memory is read or written before the kernel before ended"


@effect_of("mbarrier.init.shared.b64")
def _barrier_init(block, barrier, arrivals):
    for i in np.flatnonzero(block.masks[-1]):
        block.barriers[int(barrier[i])] = [0, arrivals, arrivals, 0]


@result_of("mbarrier.arrive.shared.b64")
def _barrier_arrive(block, barrier):
    block.at_barrier(barrier, arrivals=1)


@result_of("mbarrier.arrive.expect_tx.shared.b64")
def _barrier_expect(block, barrier, size):
    block.at_barrier(barrier, arrivals=1, size=size)


@result_of("mbarrier.try_wait.parity.shared.b64")
def _barrier_wait(block, barrier, parity):
    for i in np.flatnonzero(block.masks[-1]):
        assert block.barriers[int(barrier[i])][0] != int(parity[i]), "deadlock"
    return block.c(True, bool)


# --- The other blocks of a cluster ----------------------------------------------------------------


@result_of("mapa.shared::cluster.u32")
def _peer_address(block, address, rank):
    return address + (rank - block.rank) * U32(block.apart)


@effect_of(*(f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v{n}.f32" for n in (2, 4)))
def _send_peer(block, address, words, barrier):
    block.store(address, words)
    block.at_barrier(barrier, size=-4 * len(words))
