"""What PTX text does to a ``Task``: memory, barriers and the tensor cores.

``tests.helpers.instructions`` has what an instruction does to registers alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers.emulator.clocks import GRAIN, Race
from tests.helpers.emulator.machine import (
    DEVICE,
    FIRST,
    LANES,
    PEER,
    InFlight,
    Task,
    in_flight,
)
from tests.helpers.instructions import EFFECTS, MEANING
from tests.helpers.warp_emulator import Block, _operand, statements

U32 = np.uint32
SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8}
DTYPES = {"u8": "u1", "s8": "i1", "u16": "u2", "b16": "u2", "f32": "f4", "b64": "i8"}
NUMBERS = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
}


class Registers(Block):
    """The lanes of a task, for instructions that touch registers alone."""

    def __init__(self, task: Task):
        self.n, self.index, self.special = task.n, task.index, task.special
        self.masks = [task.every]


OWN: list[tuple[re.Pattern, Callable, bool]] = []


def does(pattern: str, result: bool = False) -> Callable:
    """Register what an instruction does: a function of the task, the mask, the match, operands."""

    def register(function):
        OWN.append((re.compile(pattern), function, result))
        return function

    return register


@does(r"ld\.([\w:.]*?)(?:\.v(\d))?\.(\w+)$", result=True)
def _load(t: Task, mask, found, address):
    space, n, kind = found[1], int(found[2] or 1), found[3]
    if space.startswith(("global", "volatile", "relaxed")):
        t.touch(mask)
    size = SIZES[kind] * n
    out = t.load(address, mask, size, DTYPES.get(kind, "u4"), space, (n,) if n > 1 else ())
    if kind in ("u8", "s8"):
        out = out.astype(np.int16).view(np.uint16) if kind == "s8" else out.astype(np.uint16)
    return [out[:, i] for i in range(n)] if n > 1 else out


@does(r"st\.(?!async)([\w:.]*?)(?:\.v(\d))?\.(\w+)$")
def _store(t: Task, mask, found, address, value):
    space, n, kind = found[1], int(found[2] or 1), found[3]
    if "global" in space:
        t.touch(mask)
    value = np.stack([np.asarray(x) for x in value], 1) if n > 1 else value
    if SIZES[kind] < 4:
        value = value.astype(f"u{SIZES[kind]}")
    t.store(value, address, mask, SIZES[kind] * n, space)


@does(r"atom\.shared\.add\.u32", result=True)
def _add(t: Task, mask, found, address, value):
    at = t.place(address, mask, 4, "shared", 4)
    t.clocks.writes(t.warps_at(mask), at[:, None] // GRAIN, "an atomic", is_atomic=True)
    old, words = np.zeros(t.n, U32), t.machine.views[4]
    for lane, one in zip(t.active(mask), at // 4, strict=True):
        old[lane] = words[one]
        words[one] += U32(value[lane])
    return old


@does(r"ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.shared\.b16", result=True)
def _load_matrices(t: Task, mask, found, address):
    return load_matrices(t, mask, address, int(found[1]), bool(found[2]))


@does(r"stmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16")
def _store_matrices(t: Task, mask, found, address, words):
    store_matrices(t, mask, address, words, bool(found[1]))


def load_matrices(t: Task, mask, address, n: int, is_transposed: bool) -> list[np.ndarray]:
    lanes = (t.index % LANES < 8 * n) & (t.every if mask is None else mask)
    rows = t.load(address, lanes, 16, "u2", "shared", (8,)).reshape(-1, 4, 8, 8)
    if is_transposed:
        rows = rows.swapaxes(2, 3)
    return [np.ascontiguousarray(rows[:, i]).reshape(-1).view(U32) for i in range(n)]


def store_matrices(t: Task, mask, address, words, is_transposed: bool) -> None:
    tiles = [np.ascontiguousarray(t.full(x)).view(np.uint16).reshape(-1, 8, 8) for x in words]
    tiles += tiles[:1] * (4 - len(tiles))
    rows = np.stack(tiles, 1)
    if is_transposed:
        rows = rows.swapaxes(2, 3)
    lanes = (t.index % LANES < 8 * len(words)) & (t.every if mask is None else mask)
    t.store(np.ascontiguousarray(rows).reshape(t.n, 8), address, lanes, 16, "shared")


# --- barriers, fences and groups ---


@does(r"mbarrier\.init\.shared\.b64")
def _init(t: Task, mask, found, address, count):
    t.barrier_init(address, count, mask)


@does(r"mbarrier\.arrive(?:\.\w+)*(?:\.shared::?\w*)?(?:\.shared)?\.b64")
def _arrive(t: Task, mask, found, state, address, extra=None):
    is_expect = "expect_tx" in found[0]
    t.arrive(address, mask, *((1, extra) if is_expect else (1 if extra is None else extra,)))


@does(r"cp\.async\.mbarrier\.arrive\.noinc\.shared\.b64")
def _copies_arrive(t: Task, mask, found, address):
    t.copies_arrive(address, mask)


@does(r"fence\.proxy\.async.*")
def _fence(t: Task, mask, found):
    t.clocks.fence(t.warps_of(mask))


@does(r"fence\.mbarrier_init.*")
def _publish(t: Task, mask, found):
    t.clocks.publish(t.warps_of(mask))


@does(
    r"bar\.warp\.sync|setmaxnreg.*|wgmma\.fence.*|prefetch.*"
    r"|griddepcontrol\.launch_dependents"
)
def _nothing(t: Task, mask, found, *operands):
    pass


@does(r"griddepcontrol\.wait")
def _await_kernel(t: Task, mask, found):
    t.may_touch[t.active(mask)] = True


@does(r"cp\.async\.bulk\.prefetch\.L2\.global")
def _prefetch(t: Task, mask, found, address, size):
    t.place(address, mask, size, "", 16)


@does(r"cp\.async\.cg\.shared\.global(?:\.L2::128B)?")
def _copy_async(t: Task, mask, found, to, source, whole, size=16):
    t.touch(mask)
    t.copy_async(to, source, mask, size)


@does(r"cp\.async\.commit_group")
def _commit(t: Task, mask, found):
    t.copies_commit(mask)


@does(r"cp\.async\.wait_group")
def _wait_group(t: Task, mask, found, pending):
    t.copies_wait(pending, mask)


@does(r"wgmma\.commit_group.*")
def _products_commit(t: Task, mask, found):
    t.products_commit()


@does(r"wgmma\.wait_group.*")
def _products_wait(t: Task, mask, found, pending):
    t.products_wait(pending)


# --- the other blocks of the cluster ---


@does(r"mapa\.shared::cluster\.u32", result=True)
def _peer(t: Task, mask, found, address, rank):
    return (np.asarray(address, np.int64) % PEER + (np.asarray(rank, np.int64) + 1) * PEER).astype(
        U32
    )


@does(r"st\.async(?:\.\w+)?\.shared::cluster\.mbarrier::complete_tx::bytes(?:\.v(\d))?\.(\w+)")
def _send(t: Task, mask, found, address, value, barrier):
    n, kind = int(found[1] or 1), found[2]
    size = SIZES[kind] * n
    value = np.stack(value, 1) if n > 1 else value
    raw = np.ascontiguousarray(t.full(value)).view(np.uint8).reshape(t.n, size)
    lanes = t.active(mask)
    to = t.place(address, mask, size, "shared", size)
    of = t.place(barrier, mask, 8, "shared", 8)
    for lane, at, one in zip(lanes.tolist(), to.tolist(), of.tolist(), strict=True):
        counter = t.machine.barrier(one, t.warp[[lane]])
        words = np.arange(at // GRAIN, (at + size) // GRAIN)
        t.clocks.async_writes(
            int(t.warp[lane]), words, counter.agent, counter.phase + 1, "st.async"
        )

        def end(at=at, lane=lane, counter=counter) -> None:
            t.machine.bytes[at : at + size] = raw[lane]
            counter.add(t.clocks, 0, -size)

        t.machine.later(end)


# --- bulk copies ---


@does(r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes")
def _bulk_in(t: Task, mask, found, to, source, size, barrier):
    t.touch(mask)
    size = t.full(size)
    for lane in t.active(mask).tolist():
        one = np.zeros(t.n, bool)
        one[lane] = True
        n = int(size[lane])
        start = t.place(source, one, n, "", 16)[0] + np.arange(n)
        place = t.place(to, one, n, "shared", 16)[0] + np.arange(n)
        of = int(t.place(barrier, one, 8, "shared", 8)[0])
        t.copy_in(lane, start, place, of, n, "a bulk copy")


@does(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group")
def _bulk_out(t: Task, mask, found, to, source, size):
    t.touch(mask)
    size = t.full(size)
    for lane in t.active(mask).tolist():
        one = np.zeros(t.n, bool)
        one[lane] = True
        n = int(size[lane])
        start = t.place(source, one, n, "shared", 16)[0] + np.arange(n)
        t.copy_out(lane, start, t.place(to, one, n, "", 16)[0] + np.arange(n), "a bulk store")


def swizzled(at: np.ndarray, width: int) -> np.ndarray:
    """Addresses after the swizzle of rows of ``width`` bytes."""
    return at ^ (at // 128 % (width // 16)) * 16 if width > 16 else at


@functools.cache
def _box(window: tuple[int, ...], size: int) -> np.ndarray:
    """Offsets of a box's bytes in shared memory, [elements, bytes of one]."""
    n = int(np.prod(window))
    return np.arange(n * size).reshape(n, size)


def _tensor(t: Task, lane: int, tensor, coordinates, to: int):
    """(bytes of device memory or -1, addresses of shared memory) of a box.  to: its address."""
    place = [int(t.full(x)[lane].astype(np.int32)) for x in reversed(coordinates)]
    if tensor.bits == 4:
        place[-1] //= 2
    if place[-1] * tensor.size % 16:
        raise Race(f"a bulk copy begins at {place}, in the middle of 16 bytes")
    offset, inside = np.zeros(tensor.window, np.int64), np.ones(tensor.window, bool)
    for axis, (first, n) in enumerate(zip(place, tensor.window, strict=True)):
        index = (first + np.arange(n)).reshape([-1 if i == axis else 1 for i in range(len(place))])
        offset = offset + index * tensor.strides[axis]
        inside = inside & (index >= 0) & (index < tensor.shape[axis])
    own = tensor.address - DEVICE + offset.reshape(-1, 1) * tensor.size + np.arange(tensor.size)
    source = np.where(inside.reshape(-1, 1), own, -1).reshape(-1)
    if to % 128:
        raise Race(f"a box of a bulk copy lies at byte {to}, no multiple of 128")
    return source, swizzled(to + _box(tensor.window, tensor.size).reshape(-1), tensor.swizzle)


@does(r"cp\.async\.bulk\.tensor\.\dd\.shared::(?:cta|cluster)\.global\.mbarrier.*")
def _tensor_in(t: Task, mask, found, to, where, barrier, blocks=None):
    t.touch(mask)
    desc, coordinates = where
    for lane in t.active(mask).tolist():
        tensor = t.tensors[int(t.full(desc)[lane])]
        address, of = (int(t.full(x)[lane]) for x in (to, barrier))
        source, at = _tensor(t, lane, tensor, coordinates, address)
        ranks = [int(t.rank[lane])]
        if blocks is not None:
            bits = int(t.full(blocks)[lane])
            ranks = [i for i in range(t.machine.n_blocks) if bits >> i & 1]
        for rank in ranks:
            base = rank * t.machine.apart - FIRST
            t.copy_in(lane, source, at + base, of + base, len(at), "a bulk copy")


def store_tensor(t: Task, mask, desc, source, coordinates, is_sum: bool = False) -> None:
    t.touch(mask)
    for lane in t.active(mask).tolist():
        tensor = t.tensors[int(t.full(desc)[lane])]
        to, at = _tensor(t, lane, tensor, coordinates, int(t.full(source)[lane]))
        at = at + int(t.base[lane])
        add = {6: np.float32, 7: ml_dtypes.bfloat16, 5: np.float16}[tensor.kind] if is_sum else None
        t.copy_out(lane, at[to >= 0], to[to >= 0], "a bulk store", add)


@does(r"cp\.reduce\.async\.bulk\.tensor\.\dd\.global\.shared::cta\.add.*")
def _tensor_sum(t: Task, mask, found, where, source):
    store_tensor(t, mask, where[0], source, where[1], is_sum=True)


# --- wgmma ---


@functools.lru_cache(maxsize=4096)
def _matrix(desc: int, rows: int, depth: int, size: int, by_rows: bool):
    """Addresses [rows, depth, size] of the matrix that a descriptor describes, and its words.

    by_rows: the rows of M or N are contiguous, not K.
    """
    at = (desc & 0x3FFF) << 4
    leading, stride = (desc >> 16 & 0x3FFF) << 4, (desc >> 32 & 0x3FFF) << 4
    width = {0: 16, 1: 128, 2: 64, 3: 32}[desc >> 62 & 3]
    row, k = np.arange(rows)[:, None], np.arange(depth)[None]
    if by_rows:
        per = width // size
        offset = row // per * leading + k // 8 * stride + k % 8 * width + row % per * size
    elif width == 16:
        offset = row // 8 * stride + k * size // 16 * leading + row % 8 * 16 + k * size % 16
    else:
        offset = row // 8 * stride + row % 8 * width + k * size
    out = swizzled(at + offset, width)[..., None] + np.arange(size)
    return out, np.unique(out // GRAIN)


@does(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)", result=True)
def _wgmma(t: Task, mask, found, sums, left, right, uses_sums, *facts):
    """facts: scales of A and B, then which of the operands in memory are by rows."""
    if mask is not None and not mask.all():
        raise Race("wgmma by a part of its lanes")
    n, depth, out = int(found[1]), int(found[2]), found[3]
    kinds = NUMBERS[found[4]], NUMBERS[found[5]]
    by_rows = [bool(x) for x in facts[2:]]
    dtype = np.int32 if out == "s32" else np.float32
    in_registers = isinstance(left, list)
    flips = dict(zip(("right",) if in_registers else ("left", "right"), by_rows, strict=False))
    keep = np.all(uses_sums)
    results = [np.array(np.asarray(x).view(dtype) if keep else np.zeros(t.n, dtype)) for x in sums]
    lane = np.arange(128)
    row, column = lane // 32 * 16 + lane % 32 // 4, lane % 4 * 2
    for group in range(t.n // 128):
        lanes = slice(128 * group, 128 * group + 128)
        warps = t.warp[lanes][::LANES]
        if (warps // 4 != warps[0] // 4).any() or warps[0] % 4:
            raise Race("wgmma by warps of several warpgroups")

        def operand(desc, rows, kind, by_row, lanes=lanes, warps=warps):
            one = int(t.full(desc)[lanes.start]) & (1 << 64) - 1
            size = np.dtype(kind).itemsize
            at, words = _matrix(one, rows, depth, size, by_row)
            if at[0, 0, 0] < FIRST or (words[-1] + 1) * GRAIN > t.machine.shared + FIRST:
                raise Race("wgmma reads outside of shared memory")
            base = int(t.base[lanes.start])
            reader = t.clocks.products + int(warps[0]) // 4
            t.clocks.async_reads(warps, words + base // GRAIN, reader, "wgmma")
            return t.machine.bytes[at + base].view(kind)[..., 0].astype(np.float64)

        if in_registers:
            a = _fragments([x[lanes] for x in left], kinds[0], depth)
        else:
            a = operand(left, 64, kinds[0], flips.get("left", False))
        # In the same order for any number of columns.
        c = np.einsum("ik,jk->ij", a, operand(right, n, kinds[1], flips.get("right", False)))
        for i, result in enumerate(results):
            part = c[row + i // 2 % 2 * 8, column + i % 2 + i // 4 * 8]
            result[lanes] = (result[lanes].astype(np.float64) + part).astype(dtype)
    flight = t.products[-1]
    return [in_flight(x, (flight,)) for x in results]


def _fragments(words, kind, depth: int) -> np.ndarray:
    """A [64, depth] from a warpgroup's four registers."""
    per = 4 // np.dtype(kind).itemsize
    out, lane = np.zeros((64, depth)), np.arange(128)
    row, column = lane // 32 * 16 + lane % 32 // 4, lane % 4 * per
    for i, word in enumerate(words):
        values = np.ascontiguousarray(word).view(kind).reshape(128, per).astype(np.float64)
        for e in range(per):
            out[row + i % 2 * 8, column + i // 2 * (depth // 2) + e] = values[:, e]
    return out


# --- text ---


def _read(text: str):
    """How an operand is read; a bulk copy's ``[tensor, {coordinates}]`` is a pair."""
    inner = re.fullmatch(r"\[([$\w]+),\s*\{([^}]*)\}\]", text)
    if inner:
        desc, places = _operand(inner[1]), [_operand(x.strip()) for x in inner[2].split(",")]
        return lambda t, r: (desc(t, r), [x(t, r) for x in places])
    if text == "_":
        return lambda t, r: None
    if re.fullmatch(r"0x[\da-fA-F]+", text):
        return lambda t, r, value=int(text, 16): value
    return _operand(text)


@functools.cache
def program(code: str):
    """(function, its match or None, results, operands, predicate, negated) of each instruction."""
    out = []
    for name, operands, guard, negated in statements(code):
        own = (
            (function, found, has_result)
            for pattern, function, has_result in OWN
            if (found := pattern.fullmatch(name))
        )
        if name in MEANING:
            function, found, has_result = next(own, (MEANING[name], None, name not in EFFECTS))
        else:
            meant = next(own, None)
            if meant is None:
                raise NotImplementedError(f"no meaning for the instruction {name!r}")
            function, found, has_result = meant
        rest = list(operands)
        results = re.findall(r"[$\w]+", rest[0]) if has_result else []
        if has_result and not name.startswith("wgmma"):
            rest.pop(0)
        out.append((function, found, results, [_read(x) for x in rest], guard, negated))
    return out


def execute(t: Task, code: str, tied: list[int], n_results: int, args, mask) -> list[Any]:
    """Return ``$0`` to ``$n_results - 1``.  tied: results that begin as the first arguments."""
    registers = {f"${n_results + i}": x for i, x in enumerate(args)}
    if "wgmma.mma" in code:  # which takes its sums, even if it does not add to them
        registers |= {f"${i}": np.zeros(t.n, np.float32) for i in range(n_results)}
    for i, result in enumerate(tied):
        registers[f"${result}"] = args[i]
    for function, found, results, operands, guard, negated in program(code):
        own = mask
        if guard is not None:
            condition = t.full(registers[guard]).astype(bool) != negated
            own = condition if mask is None else condition & mask
        if guard is not None and found is not None and not own.any():
            continue
        values = [read(t.registers, registers) for read in operands]
        first = (t.registers,) if found is None else (t, own, found)
        value = function(*first, *values)
        if not results:
            continue
        value = value if isinstance(value, list) else [value]
        for name, one in zip(results, value, strict=True):
            is_whole = guard is None or name not in registers
            registers[name] = one if is_whole else np.where(condition, one, registers[name])
    return [registers[f"${i}"] for i in range(n_results)]


# --- what Mosaic's own code has beside the kernels' ---


@does(r"setp\.(ne|eq)\.b32", result=True)
def _compare(t: Task, mask, found, a, b):
    return t.full(np.equal(a, b) != (found[1] == "ne"))


@does(r"prmt\.b32", result=True)
def _permute(t: Task, mask, found, *operands):
    return MEANING["prmt.b32"](t.registers, *(t.full(np.asarray(x).astype(U32)) for x in operands))


@does(r"and\.b32", result=True)
def _and(t: Task, mask, found, a, b):
    return np.asarray(a, U32) & np.asarray(b).astype(U32)


@does(r"(add|sub|mul)\.(bf16|f16)x2", result=True)
def _pairs(t: Task, mask, found, *operands):
    return MEANING[f"{found[1]}.rn.{found[2]}x2"](t.registers, *operands)


@does(r"mov\.b16", result=True)
def _move_half(t: Task, mask, found, x):
    return x


# --- what a program calls ---


def and_mask(t: Task, mask, condition):
    condition = t.full(condition)
    return condition if mask is None else condition & mask


def argument(t: Task, x, way: str, is_vector: bool, is_read: bool = True):
    """An operand as PTX has it.  way: its constraint."""
    if way == "n":
        return int(x)
    if isinstance(x, InFlight) and is_read:
        x.land()
    x = np.asarray(x)
    if is_vector:
        x = x[..., 0] if x.shape[-1] == 1 else np.ascontiguousarray(x).view(U32)[..., 0]
    x = t.full(x)
    if way in ("r", "h"):
        dtype = U32 if way == "r" else np.uint16
        return x.view(dtype) if x.dtype.itemsize == np.dtype(dtype).itemsize else x.astype(dtype)
    return x


def results(values, kinds, is_struct: bool):
    """PTX's results as the program has them.  kinds: (dtype, whether it is a vector of one)."""
    out = []
    for value, (name, is_vector) in zip(values, kinds, strict=True):
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        x = value if isinstance(value, InFlight) else np.asarray(value)
        x = x.view(dtype) if x.dtype.itemsize == dtype.itemsize else x.astype(dtype)
        out.append(x[..., None] if is_vector else x)
    return tuple(out) if is_struct else out[0]


def await_mbarrier(t: Task, code: str, args, mask):
    yield from t.wait(args[0], args[1], mask)


def meet(t: Task, code: str, args, mask):
    threads = int(re.search(r"bar\.sync [^,]*, (\d+)", code)[1])
    yield from t.meet("bar.sync", args[0], threads, mask)


def arrive_in_cluster(t: Task, code: str, args, mask):
    n = t.machine.threads * t.machine.n_blocks
    yield from t.arrive_at("cluster", 0, n, mask, "relaxed" not in code)


def await_cluster(t: Task, code: str, args, mask):
    yield from t.await_met("cluster")
