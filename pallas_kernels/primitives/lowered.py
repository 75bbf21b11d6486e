"""Kernels that a process lowers and assembles once, whatever number of programs launch them.

    results = lowered(name, ctx, args, jaxpr, emit)     in the lowering rule of a launch
    with noted(note): program = jitted.lower(...)        ``note`` is called with each of its kernels
    assemble(kernel)                                     a thread assembles it, if none has
    await_assembled(kernels)                             until these are there
    module_p.bind(*operands, name, code, avals)          calls a lowered function in a program

jax lowers an equation once a program. For a Mosaic kernel this is Python code that takes 0.2 s, and
that threads cannot share. The programs of an engine differ in few of their kernels: decode steps by
the length of the context have one norm and one product. So the first program that launches a kernel
leaves its lowered function here, and the others get a copy of it.

A kernel is known by its jaxpr. Inner jaxprs count as equal if they are one object, which
``jax.jit`` sees to: calls of a jitted function with equal static arguments and shapes have one.

XLA asks for a program's kernels one after the other, 0.2 to 4 s each. Programs that compile at once
each assemble a kernel that none has yet. So ``assemble`` has each kernel compiled alone, several at
once and each once, from the moment it is lowered, in processes of their own (``assembler.py``). A
program is compiled when its kernels are there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import jax
from jax.core import ShapedArray
from jax.experimental import serialize_executable
from jax.interpreters import mlir
from jax.sharding import SingleDeviceSharding

from pallas_kernels.cards.architecture import asked_target
from pallas_kernels.jax_internals import (
    Primitive,
    described_device,
    func,  # pyright: ignore[reportPrivateImportUsage]
    ir,  # pyright: ignore[reportPrivateImportUsage]
)
from pallas_kernels.primitives import assembler
from pallas_kernels.primitives.assembler import Kernel
from pallas_kernels.primitives.refused import refuse

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from pallas_kernels.jax_internals import Value

Emit = Callable[..., Sequence[Any]]
# Of a module's context: what it has lowered before.
_CACHES = "lowering_cache", "cached_primitive_lowerings", "pallas_lowering_cache"
MOST = 1024  # kernels that are kept, of 46 KB on average and 300 KB at most
MOST_ASSEMBLERS = 16
_kept: dict[Hashable, bytes] = {}
_lock = threading.Lock()
_here = threading.local()  # its ``note``: of ``noted``
_assembled: dict[bytes, Future[None]] = {}  # by the hash of a kernel's code


module_p = Primitive("lowered_module")
module_p.multiple_results = True
module_p.def_abstract_eval(lambda *operands, name, code, avals: avals)


@contextlib.contextmanager
def noted(note: Callable[[Kernel], object]) -> Generator[None]:
    """Within, ``note`` is called with each kernel that a program of this thread launches."""
    _here.note = note
    try:
        yield
    finally:
        del _here.note


def assemble(kernel: Kernel) -> None:
    """Let a thread assemble the kernel for this process's GPU, unless one has."""
    if jax.default_backend() == "gpu" and asked_target() is None:
        with _lock:
            if (known := _known(kernel)) not in _assembled:
                _assembled[known] = _assemblers().submit(_assemble, kernel)


def await_assembled(kernels: Sequence[Kernel] | None) -> None:
    """Return when these kernels, or all, are assembled that were given to ``assemble`` before."""
    with _lock:
        which = list(_assembled) if kernels is None else map(_known, kernels)
        begun = [_assembled[known] for known in which if known in _assembled]
    wait(begun)


def _known(kernel: Kernel) -> bytes:
    return hashlib.sha256(kernel.code).digest()


def start_assemblers() -> None:
    """Start the processes that assemble kernels before there is a kernel."""
    assembler.start(_n_assemblers())


def _n_assemblers() -> int:
    # The processes of a mesh share the cores, and each assembler has 0.3 GB.
    return min(max(assembler.cores() // (2 * jax.process_count()), 1), MOST_ASSEMBLERS)


@functools.cache
def _assemblers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_n_assemblers(), "jaxllama-kernels")


def _assemble(kernel: Kernel) -> None:
    """Let jaxlib have a kernel assembled. The program that launches the kernel tells of errors."""
    with contextlib.suppress(Exception):
        try:
            serialize_executable.deserialize_and_load(
                *assembler.serialized(kernel), execution_devices=jax.local_devices()[:1]
            )
        except Exception:
            program_of(kernel)


def program_of(kernel: Kernel, where: Any = None) -> jax.stages.Compiled:
    """Return a compiled program of a kernel alone.

    where: the sharding of a device that need not be there; None stands for this process's GPU.
    """
    avals = tuple(ShapedArray(x.shape, x.dtype) for x in kernel.results)

    def program(*operands: Any) -> Any:
        return module_p.bind(*operands, name=kernel.name, code=kernel.code, avals=avals)

    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for x in kernel.operands]
    return jax.jit(program).trace(*operands).lower(lowering_platforms=("cuda",)).compile()


def serve() -> None:
    """Assemble the kernels that come, as a process of ``assembler``."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    jax.config.update("jax_enable_compilation_cache", False)  # it reads by a device
    where = SingleDeviceSharding(described_device(pickle.load(sys.stdin.buffer)))
    with contextlib.suppress(EOFError):
        while True:
            signal.alarm(assembler.LONGEST)
            kernel = pickle.load(sys.stdin.buffer)
            signal.alarm(assembler.LONGEST)
            try:
                found = serialize_executable.serialize(program_of(kernel, where))
            except Exception as error:
                found = str(error)
            pickle.dump(found, answers)
            answers.flush()


def lowered(
    name: str, ctx: mlir.LoweringRuleContext, args: Sequence[Value], jaxpr: ClosedJaxpr, emit: Emit
) -> Sequence[Any]:
    """Return ``emit(ctx, *args)``, the results of a kernel in the program that is being lowered.

    Parameters
    ----------
    name
        Of the kernel's function in the program.
    ctx, args
        Of the lowering rule of the launch, on one platform.
    jaxpr
        The kernel, traced.
    emit
        The kernel's own lowering rule, which is called unless the process has lowered the kernel.
    """
    module = ctx.module_context
    key = _key(jaxpr, module)
    if key is None:
        refuse(name, jaxpr.jaxpr)
        return emit(ctx, *args)
    functions = module.cached_primitive_lowerings
    if key not in functions:
        kept = _kept.get(key)
        if kept is None:
            refuse(name, jaxpr.jaxpr)
            kept = _function(ctx, args, emit)
            if kept is None:
                return emit(ctx, *args)
            with _lock:
                while len(_kept) >= MOST:
                    del _kept[next(iter(_kept))]
                _kept[key] = kept
        functions[key] = merged(module, name, kept)
        if note := getattr(_here, "note", None):
            note(Kernel(name, kept, _shapes(ctx.avals_in), _shapes(ctx.avals_out)))
    return called(functions[key], args)


def _shapes(avals: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)


def merged(module: mlir.ModuleContext, name: str, code: bytes) -> Any:
    """Return the function "main" of a module's bytecode, which becomes part of another module."""
    copy = ir.Module.parse(code, module.context)
    own = mlir.merge_mlir_modules(module.module, name, copy, module.symbol_table)
    return module.symbol_table[own]


def called(function: Any, args: Sequence[Value]) -> Sequence[Any]:
    """Return the results of a function of the module that is being lowered."""
    kind = ir.FunctionType(function.attributes["function_type"].value)
    own = ir.FlatSymbolRefAttr.get(ir.StringAttr(function.attributes["sym_name"]).value)
    return func.CallOp(kind.results, own, list(args)).results


def _call_of(
    ctx: mlir.LoweringRuleContext, *operands: Any, name: str, code: bytes, avals: object
) -> Sequence[Any]:
    return called(merged(ctx.module_context, name, code), operands)


mlir.register_lowering(module_p, _call_of)


def _key(jaxpr: ClosedJaxpr, module: mlir.ModuleContext) -> Hashable | None:
    """Return all that the lowered kernel depends on, or None if that cannot be compared."""
    if jaxpr.consts:
        return None
    numbers: dict[Any, int] = {}

    def named(x: Any) -> Hashable:
        if hasattr(x, "val"):
            return str(x.val), x.aval
        return numbers.setdefault(x, len(numbers)), x.aval

    steps = tuple(
        (
            step.primitive,
            tuple(map(named, step.invars)),
            tuple(map(named, step.outvars)),
            tuple(sorted(step.params.items(), key=lambda item: item[0])),
            step.ctx,
        )
        for step in jaxpr.eqns
    )
    ends = tuple(map(named, [*jaxpr.jaxpr.invars, *jaxpr.jaxpr.outvars]))
    # The one device of a program without a mesh may be any of the process's.
    where = module.axis_context
    mesh = getattr(where, "mesh", None), getattr(where, "manual_axes", None)
    key = steps, ends, tuple(module.platforms), mesh, asked_target()
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _function(ctx: mlir.LoweringRuleContext, args: Sequence[Value], emit: Emit) -> bytes | None:
    """Return a module whose function "main" is the kernel, lowered apart from the program.

    Returns None if the kernel needs more of the program than a function.
    """
    module = ctx.module_context
    outside = len(module.keepalives), len(module.host_callbacks)
    takes = [x.type for x in args]
    with ir.Location.unknown(module.context):
        apart = ir.Module.create()
        table = ir.SymbolTable(apart.operation)
        with ir.InsertionPoint(apart.body) as place:
            function = func.FuncOp("main", (takes, []))
        table.insert(function)
        caches: dict[str, Any] = {name: {} for name in _CACHES}
        inner = module.replace(module=apart, ip=place, symbol_table=table, **caches)
        with ir.InsertionPoint(function.add_entry_block()):
            inside = ctx.replace(module_context=inner)
            results = list(emit(inside, *function.entry_block.arguments))
            func.ReturnOp(results)
    kind = ir.FunctionType.get(takes, [x.type for x in results], module.context)
    function.attributes["function_type"] = ir.TypeAttr.get(kind, module.context)
    is_alone = outside == (len(module.keepalives), len(module.host_callbacks))
    if inside.tokens_out or not is_alone:
        return None
    file = io.BytesIO()
    apart.operation.write_bytecode(file)
    return file.getvalue()
