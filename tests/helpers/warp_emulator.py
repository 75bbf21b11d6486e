"""Runs the bodies of kernels on the CPU: every thread of a block a lane of numpy.

Those bodies are Python that calls ``pallas_kernels.ptx`` and MLIR's ``arith`` while a kernel is
traced.  Here the same source computes: ``ptx`` is executed a second time over numpy, and its one
function that emits PTX runs the text instead (``helpers.instructions`` says what an instruction
does).  A value becomes an array with one entry per thread, memory one array of bytes.  All threads
of a block take each step together, so a wait that is not satisfied when it is reached is a
deadlock; reads that no barrier protects go unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import launch, transform
from pallas_kernels import ptx as kernel_side
from pallas_kernels.rows import fused_parts
from tests.helpers.arrays import as_jax
from tests.helpers.instructions import EFFECTS, MEANING

U32 = np.uint32


class Lanes(np.ndarray):
    """One entry per thread.  Words wrap, so a negative number may be an operand beside them."""


def _wrapping(name: str) -> Callable:
    inner = getattr(np.ndarray, name)

    def method(self, other):
        if type(other) is int and other < 0 and self.dtype == U32:
            other += 1 << 32
        return inner(self, other)

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand"):
    setattr(Lanes, f"__{_name}__", _wrapping(f"__{_name}__"))


def to_bytes(x) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype == jnp.int4:
        words = x.astype(np.int8).reshape(-1).view(np.uint8) & 15
        return words[::2] | words[1::2] << 4
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def from_bytes(raw: np.ndarray, like) -> jax.Array:
    if like.dtype == jnp.int4:
        nibbles = np.stack((raw << 4, raw & 0xF0), -1).view(np.int8) >> 4
        return as_jax(nibbles.reshape(like.shape), jnp.int4)
    return as_jax(raw.view(like.dtype).reshape(like.shape))


class Block:
    """The threads that are there together: of one block, or of the ``blocks`` of a cluster, whose
    shared memories lie ``apart`` bytes from one another."""

    def __init__(self, threads: int, size: int, blocks: int = 1, apart: int = 0):
        self.n, self.apart = threads * blocks, apart
        self.memory = np.full(size, 0xFF, np.uint8)  # NaN until written
        self.masks = [np.ones(self.n, bool)]
        self.barriers: dict[int, list[int]] = {}
        # Copies under way: (to, bytes, threads, their groups), and the groups that a thread closed.
        self.copies: list[tuple] = []
        self.groups = np.zeros(self.n, int)
        self.touched = False  # device memory, by this block
        self.index = np.arange(self.n)
        index = self.index.astype(U32)
        self.rank = index // U32(threads)
        self.special = {"tid.x": index % U32(threads), "cluster_ctarank": self.rank}

    def c(self, value, dtype=U32):
        return np.full(self.n, value).astype(dtype).view(Lanes)

    def like(self, number, other):
        return number if isinstance(number, np.ndarray) else self.c(number, other.dtype)

    def touches(self, space: str) -> None:
        self.touched = self.touched or "global" in space

    def at(self, address, size):
        address = np.where(self.masks[-1], np.asarray(address, np.int64), 0)
        return address[:, None] + np.arange(size)

    def load(self, address, n, dtype):
        raw = self.memory[self.at(address, 4 * n)]
        return [np.ascontiguousarray(raw[:, 4 * i : 4 * i + 4]).view(dtype)[:, 0] for i in range(n)]

    def write(self, address, raw):
        keep = self.masks[-1]
        self.memory[self.at(address, raw.shape[1])[keep]] = raw[keep]

    def store(self, address, values):
        raw = np.stack([v.view(np.uint8).reshape(self.n, -1) for v in values], 1)
        self.write(address, raw.reshape(self.n, -1))

    def at_barrier(self, barrier, arrivals=0, size=0):
        """Each thread's ``arrivals`` and bytes to come (negative: that came).  The state of an
        mbarrier: [phase, arrivals left, arrivals of a phase, bytes to come]."""
        for i in np.flatnonzero(self.masks[-1]):
            state = self.barriers[int(barrier[i])]
            state[1], state[3] = state[1] - arrivals, state[3] + size
            if state[1] == 0 and state[3] == 0:
                state[0], state[1] = state[0] ^ 1, state[2]

    def mma(self, acc, left, right, dtype):
        return [
            (x + part).astype(np.float32)
            for x, part in zip(acc, self.fragment_products(left, right, dtype, 2), strict=True)
        ]

    def mma_int8(self, acc, left, right):
        parts = self.fragment_products(left, right, np.int8, 4)
        return [x + part.astype(np.int32).view(U32) for x, part in zip(acc, parts, strict=True)]

    def fragment_products(self, left, right, dtype, per_word: int):
        """Each warp's product of its fragments, ``per_word`` values of K in a register, in the
        order of the accumulator."""

        def values(word):
            raw = np.ascontiguousarray(word).view(np.uint8).view(dtype)
            return raw.reshape(-1, 32, per_word).astype(np.float64)

        a, b = [values(x) for x in left], [values(x) for x in right]
        warps = self.n // 32
        lane = np.arange(32)
        row, col, half = lane // 4, lane % 4 * per_word, 4 * per_word
        m_a, m_b = np.zeros((warps, 16, 2 * half)), np.zeros((warps, 2 * half, 8))
        for i in range(per_word):
            for r in range(4):
                m_a[:, row + 8 * (r % 2), col + half * (r // 2) + i] = a[r][:, :, i]
            for r in range(2):
                m_b[:, col + half * r + i, row] = b[r][:, :, i]
        out = m_a @ m_b
        col = lane % 4 * 2
        return [out[:, row + 8 * (i // 2), col + i % 2].reshape(-1) for i in range(4)]

    # Control, which the kernel-side functions write as regions of MLIR.

    def when(self, condition, body):
        self.masks.append(self.masks[-1] & condition)
        if self.masks[-1].any():
            body()
        self.masks.pop()

    def choose(self, condition, body, otherwise):
        values = otherwise
        self.masks.append(self.masks[-1] & condition)
        if self.masks[-1].any():
            pairs = zip(body(), otherwise, strict=True)
            values = [_select(condition, x, y) for x, y in pairs]
        self.masks.pop()
        return values

    def loop(self, start, stop, step, carry, body):
        bounds = (self.c(x) if isinstance(x, int) else x for x in (start, stop, step))
        index, stop, step = (x.view(np.int32) for x in bounds)
        carry = list(carry)
        while (self.masks[-1] & (index < stop)).any():
            self.masks.append(self.masks[-1] & (index < stop))
            out = body(index.view(U32), list(carry))
            pairs = zip(out, carry, strict=True)
            carry = [_select(self.masks[-1], new, old) for new, old in pairs]
            self.masks.pop()
            index = index + step
        return carry


# --- PTX text -------------------------------------------------------------------------------------

Operand = Callable[[Block, dict[str, Any]], Any]


def names_of(code: str) -> list[str]:
    """Return the instructions' names in PTX text; labels, jumps and declarations are left out."""
    return [name for name, *_ in statements(code)]


@functools.cache
def statements(code: str) -> tuple[tuple[str, tuple[str, ...], str | None, bool], ...]:
    """(name, operands, predicate, whether it is negated) of each instruction."""
    found = []
    text = re.sub(r"^\{|(?<=[;\s])\}$", "", code.strip()).strip()
    for line in text.split(";"):
        line = re.sub(r"^(\s*\w+:(?!:))+", "", line.strip().lstrip("{").strip()).strip()
        guard = re.match(r"@(!?)([$\w]+)\s+", line)
        name, _, rest = line[guard.end() if guard else 0 :].partition(" ")
        if not name or name in (".reg", "bra", "}"):
            continue
        rest = re.sub(r"\((.*?)\)( . \w+)?$", _evaluated, rest)
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", rest)
        found.append((name, tuple(operands), guard and guard[2], bool(guard and guard[1])))
    return tuple(found)


def _evaluated(found: re.Match) -> str:
    """A constant expression, such as ``(0xf0 & 0xcc) ^ 0xaa``."""
    return str(eval(found[0], {"__builtins__": {}}))


def _operand(text: str) -> Operand:
    """How an operand is read from a block and its registers."""
    if text[0] == "{":
        parts = [_operand(part.strip()) for part in text[1:-1].split(",")]
        return lambda block, registers: [part(block, registers) for part in parts]
    if text[0] == "[":
        base, _, at = text[1:-1].partition("+")
        offset = int(at or 0)
        return lambda block, registers: registers[base].astype(np.int64) + offset
    if text[0] == "%":
        return lambda block, registers: block.special[text[1:]]
    if re.fullmatch(r"-?\d+|0x[\da-f]+", text):
        value = int(text, 0)
        return lambda block, registers: value
    return lambda block, registers: registers[text]


@functools.cache
def _program(code: str) -> list[tuple[Callable, list[str], list[Operand], str | None]]:
    """(meaning, results, operands, predicate) of each instruction."""
    program = []
    for name, operands, guard, negated in statements(code):
        if name not in MEANING or negated:
            raise NotImplementedError(f"tests.helpers.instructions has no meaning for {name!r}")
        rest = list(operands)
        results = [] if name in EFFECTS else re.findall(r"[$\w]+", rest.pop(0))
        program.append((MEANING[name], results, [_operand(x) for x in rest], guard))
    return program


def execute(block: Block, code: str, args: Sequence[Any], n_results: int) -> list[Any]:
    """Return ``$0`` to ``$n_results - 1`` after PTX text whose other registers are ``args``."""
    registers = {f"${n_results + i}": x for i, x in enumerate(args)}
    for meaning, results, operands, guard in _program(code):
        if guard is not None:
            block.masks.append(block.masks[-1] & registers[guard])
        values = meaning(block, *[read(block, registers) for read in operands])
        if guard is not None:
            block.masks.pop()
        if not results:
            continue
        values = values if isinstance(values, list) else [values]
        for name, value in zip(results, values, strict=True):
            kept = value if guard is None else np.where(registers[guard], value, registers[name])
            registers[name] = kept
    return [np.asarray(registers[f"${i}"]).view(Lanes) for i in range(n_results)]


# --- MLIR's arith, and the rest that ptx.py takes from MLIR ---------------------------------------


def _select(condition, x, y):
    return np.where(condition, x, y).view(Lanes)


def _signed(function):
    return lambda x, y: function(x.view(np.int32), y.view(np.int32))


def _words(function):
    return lambda x, y: function(x.view(np.int32), y.view(np.int32)).view(U32)


ARITH = SimpleNamespace(
    andi=np.bitwise_and,
    ori=np.bitwise_or,
    xori=np.bitwise_xor,
    shli=np.left_shift,
    shrui=np.right_shift,
    divui=np.floor_divide,
    remui=np.remainder,
    addi=np.add,
    subi=np.subtract,
    muli=np.multiply,
    select=_select,
    minui=np.minimum,
    maxui=np.maximum,
    minsi=_words(np.minimum),
    maxsi=_words(np.maximum),
    addf=np.add,
    subf=np.subtract,
    mulf=np.multiply,
    negf=np.negative,
    bitcast=lambda kind, x: x.view(kind),
    extui=lambda kind, x: x.astype(kind),
    trunci=lambda kind, x: x.astype(kind),
    cmpi=lambda predicate, x, y: predicate(x, y),
    cmpf=lambda predicate, x, y: predicate(x, y),
    CmpIPredicate=SimpleNamespace(
        eq=np.equal,
        ne=np.not_equal,
        uge=np.greater_equal,
        ugt=np.greater,
        ult=np.less,
        slt=_signed(np.less),
        sle=_signed(np.less_equal),
    ),
    CmpFPredicate=SimpleNamespace(OEQ=np.equal, OGT=np.greater, OLT=np.less, ONE=np.not_equal),
)


@functools.cache
def _source_of_ptx() -> CodeType:
    return compile(Path(kernel_side.__file__).read_text(), kernel_side.__file__, "exec")


def _modules(block: Block) -> dict[str, Any]:
    """``p`` and ``arith`` for modules whose code is to run on ``block``."""
    p: Any = ModuleType("ptx on numpy")
    exec(_source_of_ptx(), vars(p))

    def ptx(code, *args, results=None, volatile=True, convergent=False):
        count = len(results) if isinstance(results, list) else int(results is not None)
        found = execute(block, code, args, count)
        return found if isinstance(results, list) else found[0] if found else None

    nothing = SimpleNamespace(parent=None, attributes={})
    p.__dict__.update(
        ptx=ptx,
        arith=ARITH,
        operators=SimpleNamespace(like=block.like),
        Value=np.ndarray,
        type_of=lambda x: x.dtype,
        _overlaps=lambda: True,
        i32=lambda: np.dtype(U32),
        i64=lambda: np.dtype(np.int64),
        f32=lambda: np.dtype("f4"),
        mgpu=SimpleNamespace(
            utils=SimpleNamespace(
                c=lambda value, kind: block.c(value, kind),
                memref_ptr=lambda ref: ref,
                warpgroup_barrier=lambda: None,
            )
        ),
        llvm=SimpleNamespace(ptrtoint=lambda kind, ref: block.c(ref, kind)),
        gpu=SimpleNamespace(barrier=lambda: None),
        ir=SimpleNamespace(
            InsertionPoint=SimpleNamespace(
                current=SimpleNamespace(block=SimpleNamespace(owner=nothing))
            ),
            UnitAttr=SimpleNamespace(get=lambda: None),
        ),
        shared_address=lambda ref: block.c(ref) + block.rank * U32(block.apart),
        when=block.when,
        choose=block.choose,
        loop=block.loop,
    )
    return {"p": p, "arith": ARITH}


def registers(threads: int) -> Any:
    """``ptx`` for code that touches no memory."""
    return _modules(Block(threads, 0))["p"]


@contextlib.contextmanager
def running_on(block: Block, *modules) -> Any:
    """Within, the code of ``modules`` that calls ``ptx`` and ``arith`` runs on ``block``."""
    names = _modules(block)
    with contextlib.ExitStack() as patches, np.errstate(all="ignore"):
        for module in modules:
            for name in names.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, names[name]))
        yield names["p"]


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
            with running_on(block, *modules):
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
        kernel=kernel,
        SMEM=lambda shape, dtype: shape,
        RefType=lambda: None,
        inline_mgpu=lambda arg_types, return_type: lambda f: lambda *refs: f(None, *refs),
        CompilerParams=lambda **kw: None,
        LoweringSemantics=SimpleNamespace(Lane=None),
    )
    with contextlib.ExitStack() as patches:
        patches.enter_context(jax.disable_jit())  # the arrays have to be concrete
        patches.enter_context(mock.patch.object(transform.Op, "__call__", _directly))
        for module in modules:
            if hasattr(module, "plgpu"):
                patches.enter_context(mock.patch.object(module, "plgpu", fake))
        yield
