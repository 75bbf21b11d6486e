"""Runs Mosaic kernels on the CPU, in random orders of their warps and copies, and finds races.

    with emulated(seed=0):
        out = decode_attention(q, k, v, lengths, implementation="mosaic")

Each launch of ``pallas_kernels`` lowers its kernel for CUDA and runs the module that Mosaic made.
Shared memory and results hold NaN, or -1, at first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import device, dispatch, launch, transform
from pallas_kernels.cards.architecture import TARGET
from pallas_kernels.jax_internals import ir
from tests.helpers.emulator import asm
from tests.helpers.emulator.machine import DEVICE, LANES, Apart, Deadlock, Machine, Task
from tests.helpers.emulator.program import Change, Host, Program
from tests.helpers.kernel_modules import calls_in
from tests.helpers.warp_emulator import _directly, from_bytes, to_bytes

_APART = 256  # alignment of arrays


@functools.lru_cache(maxsize=64)
def _program(bytecode: bytes) -> Program:
    return Program(bytecode)


class Emulator:
    """programs: what has run, in order.  change: of each program's operations that order others."""

    def __init__(self, seed: int, change: Change | None):
        self.seed, self.change, self.programs = seed, change, []

    def program(self, bytecode: bytes) -> Program:
        program = _program(bytecode) if self.change is None else Program(bytecode, self.change)
        self.programs.append(program)
        return program

    def kernel(self, *args: Any, **named: Any):
        """What ``plgpu.kernel`` returns, on concrete arrays and references to them."""
        kernel = plgpu.kernel(*args, **named)

        def run(*operands: Any):
            is_ref = [not isinstance(x, jax.Array | np.ndarray) for x in operands]
            values = [x[...] if ref else x for x, ref in zip(operands, is_ref, strict=True)]

            def program(*arrays: Any):
                given = [
                    jax.new_ref(x) if ref else x for x, ref in zip(arrays, is_ref, strict=True)
                ]
                out = kernel(*given)
                changed = [jax.freeze(x) for x, ref in zip(given, is_ref, strict=True) if ref]
                return out, changed

            types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]
            with jax.disable_jit(False):
                traced = jax.jit(program).trace(*types)
                module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
            [call] = calls_in(module.operation)
            config = ir.DictAttr(call.attributes["mhlo.backend_config"])
            bytecode = ir.StringAttr(config["module"]).value_bytes
            shapes, tree = jax.tree.flatten(traced.out_info[0])
            outs, changed = self.execute(self.program(bytecode), values, is_ref, shapes)
            refs = [x for x, ref in zip(operands, is_ref, strict=True) if ref]
            for ref, x in zip(refs, changed, strict=True):
                ref[...] = x
            return jax.tree.unflatten(tree, outs)

        return run

    def execute(self, program: Program, values, is_ref, shapes):
        """(results, changed arrays) of a program.  shapes: of its results."""
        inout = [x for x, ref in zip(values, is_ref, strict=True) if ref]
        given = [to_bytes(x) for x, ref in zip(values, is_ref, strict=True) if not ref]
        changed = [to_bytes(x) for x in inout]
        results = [np.full(_n_bytes(x), 0xFF, np.uint8) for x in shapes]
        host = Host([0] * (len(given) + 2 * len(changed) + len(results)))
        facts, _ = program.main(host)  # for the size of shared memory
        grid, block, rest = facts[:3], facts[3:6], facts[6:]
        cluster, shared = (rest[:3], rest[3]) if len(rest) == 4 else ((1, 1, 1), rest[0])
        blocks = int(np.prod(cluster))
        apart = -(-shared // 1024) * 1024 + 1024
        arrays = [*changed, *results, *given]
        starts = itertools.accumulate(
            (-(-len(x) // _APART) * _APART + _APART for x in arrays[:-1]), initial=blocks * apart
        )
        starts = list(starts)
        size = starts[-1] + len(arrays[-1]) + _APART
        memory, owned = np.zeros(-(-size // 8) * 8, np.uint8), np.zeros(-(-size // 8) * 8, bool)
        owned[: blocks * apart] = True
        for start, x in zip(starts, arrays, strict=True):
            memory[start : start + len(x)], owned[start : start + len(x)] = x, True
        n, k = len(changed), len(results)
        tracked = starts[n + k] if n + k < len(starts) else len(memory)
        refs, rest = iter(starts[:n]), iter(starts[n + k :])
        order = [next(refs if ref else rest) for ref in is_ref]
        host = Host([DEVICE + x for x in [*order, *starts[n : n + k], *starts[:n]]])
        with np.errstate(all="ignore"):
            _, device = program.main(host)
            threads = int(np.prod(block))
            counts = [g // c for g, c in zip(grid, cluster, strict=True)]
            for number in range(int(np.prod(counts))):
                place = np.unravel_index(number, counts[::-1])[::-1]
                special = _special(grid, block, cluster, [int(x) for x in place])
                machine = functools.partial(
                    Machine, memory, tracked, owned, shared, apart, blocks, threads
                )
                self.cluster(program, machine, device, special, host, number)
        of_results = zip(starts[n : n + k], results, shapes, strict=True)
        out = [from_bytes(memory[at : at + len(x)], like) for at, x, like in of_results]
        of_refs = zip(starts[:n], changed, inout, strict=True)
        new = [from_bytes(memory[at : at + len(x)], like) for at, x, like in of_refs]
        return out, new

    def cluster(self, program: Program, make, device, special, host, number: int) -> None:
        doubtful: set[tuple[int, int, int]] = set()
        before = None
        while True:
            machine = make(seed=f"{self.seed} {number}")
            machine.bytes[: machine.n_blocks * machine.apart] = 0xFF
            if before is None:
                before = machine.bytes[: machine.tracked].copy()
            else:
                machine.bytes[: machine.tracked] = before
            machine.clocks.doubtful, machine.overlaps = doubtful, program.overlaps
            machine.by_warp = program.by_warp
            warps = range(machine.n_blocks * machine.threads // LANES)
            parts = program.parts or [frozenset(warps)]
            tasks = [
                Task(machine, sorted(part), special, host.tensors, asm.Registers) for part in parts
            ]
            try:
                machine.run(tasks, device)
            except Apart as found:
                split = [x for part in parts for x in _divided(part, found.parts)]
                assert len(split) > len(parts)
                program.parts, doubtful = split, set()
                continue
            except Deadlock:
                if program.by_warp:
                    raise
                program.by_warp, doubtful = True, set()
                continue
            if machine.clocks.late <= doubtful:
                return
            doubtful = doubtful | machine.clocks.late


def _divided(part: frozenset[int], by: list[frozenset[int]]) -> list[frozenset[int]]:
    rest = part.difference(*by)
    return [x for x in (*(part & y for y in by), rest) if x]


def _n_bytes(x: Any) -> int:
    bits = 4 if x.dtype == jax.numpy.int4 else x.dtype.itemsize * 8
    return int(np.prod(x.shape)) * bits // 8


def _special(grid, block, cluster, place) -> dict[str, np.ndarray]:
    """The special registers of each thread of a cluster."""
    thread = np.arange(int(np.prod(block)))
    threads, blocks = len(thread), int(np.prod(cluster))
    rank, within = np.repeat(np.arange(blocks), threads), np.tile(thread, blocks)
    out: dict[str, np.ndarray] = {"cluster_ctarank": rank}
    apart_block = apart_rank = 1
    for i, axis in enumerate("xyz"):
        own = rank // apart_rank % cluster[i]
        out |= {
            f"tid.{axis}": within // apart_block % block[i],
            f"ntid.{axis}": np.full(len(rank), block[i]),
            f"cluster_ctaid.{axis}": own,
            f"cluster_nctaid.{axis}": np.full(len(rank), cluster[i]),
            f"clusterid.{axis}": np.full(len(rank), place[i]),
            f"ctaid.{axis}": place[i] * cluster[i] + own,
            f"nctaid.{axis}": np.full(len(rank), grid[i]),
        }
        apart_block, apart_rank = apart_block * block[i], apart_rank * cluster[i]
    return out


@contextlib.contextmanager
def planned_with(sms: int | None, target: str = "") -> Iterator[None]:
    """Within, plans are for a GPU of ``sms`` multiprocessors, and for an architecture."""
    facts = device._facts

    def fewer(*args: Any) -> device.Gpu:
        found = facts(*args)
        return found if sms is None else dataclasses.replace(found, sms=sms)

    with (
        mock.patch.dict(os.environ, {TARGET: target} if target else {}),
        mock.patch.object(device, "_facts", fewer),
    ):
        yield


@contextlib.contextmanager
def emulated(
    seed: int = 0, change: Change | None = None, sms: int | None = None, target: str = ""
) -> Iterator[Emulator]:
    """Within, Mosaic kernels run here, and ops call theirs directly.

    seed: of the orders.  sms, target: of ``planned_with``.  With few sms a block has several tiles.
    change: takes the number, the kind and the text of each operation
    that orders others, and returns the text that takes its place.
    """
    emulator = Emulator(seed, change)
    names = {name: getattr(plgpu, name) for name in dir(plgpu) if not name.startswith("__")}
    fake = SimpleNamespace(**names | {"kernel": emulator.kernel})
    with (
        planned_with(sms, target),
        jax.disable_jit(),
        mock.patch.object(launch, "plgpu", fake),
        mock.patch.object(transform.Op, "__call__", _directly),
        mock.patch.object(dispatch, "hopper_reason", lambda *_: None),
    ):
        yield emulator
