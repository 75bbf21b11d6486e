"""What a traced kernel asks of a GPU and no GPU has, which neither jax nor the assembler refuses.

    refuse(name, jaxpr)       raises NotImplementedError

Shared memory: all arrays and barriers of a block are counted.  Registers: warpgroups that ask for
more than others gave back wait for ever.  Copies between global and shared memory: a GPU wants
whole 16 bytes.

Hopper's copy engine (TMA) stops the process with CUDA_ERROR_ILLEGAL_INSTRUCTION where a copy begins
inside 16 bytes of the last axis. Neither jax nor the assembler refuses such a copy. So the kernel's
jaxpr is read here: each integer has a divisor, and loops are repeated until divisors stay. A kernel
must write offsets so that the divisor shows: ``8 * (j // 8)``, not a ``j`` that a condition limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.dtypes import extended

from pallas_kernels.device import block_bytes, gpu

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr, JaxprEqn

UNIT = 16  # bytes
_ANY = 0  # the divisor of zero, which every number divides
_SAME = {"convert_element_type", "broadcast_in_dim", "neg", "squeeze", "reshape", "copy", "pcast"}
_COMMON = {"add", "sub", "max", "min", "rem"}


def refuse(name: str, jaxpr: Jaxpr) -> None:
    """Raise NotImplementedError for a copy that may begin inside 16 bytes, or for too much memory
    or too many registers.

    jaxpr: of a program that launches the kernel.
    """
    walk = _Walk()
    walk.outputs(jaxpr, [])
    if walk.faults:
        raise NotImplementedError(
            f'{name}: its kernel {walk.faults[0]}; call it with implementation="xla"'
        )


class _Walk:
    """Divisors of the integers of a jaxpr, and the faults of its copies."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.alone: set[object] = set()  # axes of size 1, whose index is 0
        self.registers: list[int] = []  # of a thread, that a kernel's warpgroups ask for

    def outputs(self, jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
        """Return the divisors of a jaxpr's results.

        inputs: those of its constants and inputs, of which the last may be missing.
        """
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=False))

        def of(atom: Any) -> int:
            if hasattr(atom, "val"):
                kind: Any = atom.aval
                is_integer = jnp.issubdtype(kind.dtype, jnp.integer) and not kind.shape
                return abs(int(atom.val)) if is_integer else 1
            return known.get(atom, 1)

        for step in jaxpr.eqns:
            found = self.results(step, [of(x) for x in step.invars])
            known.update(zip(step.outvars, found, strict=True))
        return [of(x) for x in jaxpr.outvars]

    def results(self, step: JaxprEqn, given: list[int]) -> list[int]:
        """Return the divisors of a step's results."""
        name, params = step.primitive.name, step.params
        if name in _SAME:
            return given[:1]
        if name in _COMMON:
            return [math.gcd(*given)]
        if name == "mul":
            return [given[0] * given[1]]
        if name == "select_n":
            return [math.gcd(*given[1:])]
        if name == "axis_index":
            return [_ANY if params["axis_name"] in self.alone else 1]
        if name == "copy_gmem_to_smem":
            first = 2 + params["has_barrier"]
            self.check(step, 0, given[first:], params["src_transforms_treedef"])
        if name == "copy_smem_to_gmem":
            first = 2 + params["src_transforms_treedef"].num_leaves
            self.check(step, 1, given[first:], params["dst_transforms_treedef"])
        if name == "scan":  # a kernel's has no arrays to go over: all results are carried
            return self.loop(params["jaxpr"].jaxpr, given, len(step.outvars))
        if name == "while":
            given = given[params["cond_nconsts"] :]
            return self.loop(params["body_jaxpr"].jaxpr, given, len(step.outvars))
        for mesh in params.get("meshes", ()):
            self.alone |= {axis for axis, size in getattr(mesh, "shape", {}).items() if size == 1}
        if name == "set_max_registers":
            self.registers.append(params["n"])
        given = given[1:] if name == "cond" else given
        if name == "run_scoped":
            self.check_memory([x.aval for x in params["jaxpr"].invars])
        # What ``run_scoped`` is given are its jaxpr's constants; the inputs are new arrays.
        is_scope = name == "run_scoped"
        inputs = [([] if is_scope else [1] * len(one.constvars)) + given for one in _jaxprs(params)]
        meshes = params.get("meshes", ())
        warpgroups = next((n for x in meshes if (n := getattr(x, "num_threads", None))), 0)
        if warpgroups:
            self.registers = []
        found = list(map(self.outputs, _jaxprs(params), inputs))
        if warpgroups:
            self.check_registers(warpgroups)
        found = [one for one in found if len(one) == len(step.outvars)]
        return [math.gcd(*each) for each in zip(*found, strict=True)] or [1] * len(step.outvars)

    def loop(self, body: Jaxpr, given: list[int], n_carry: int) -> list[int]:
        """Return the divisors of a loop's carry, its last inputs, that hold in every turn."""
        n_faults, n_consts = len(self.faults), len(given) - n_carry
        consts, carry = given[:n_consts], given[n_consts:]
        of_body = [1] * len(body.constvars)
        while True:
            out = self.outputs(body, [*of_body, *consts, *carry])
            held = list(map(math.gcd, carry, out))
            if held == carry:
                return held
            carry = held
            del self.faults[n_faults:]

    def check_memory(self, kinds: Sequence[Any]) -> None:
        """Note a fault if arrays and barriers are more than a block's shared memory."""
        shared = [x for x in kinds if str(getattr(x, "memory_space", "")).lower() == "smem"]
        arrays = [x for x in shared if not jnp.issubdtype(x.dtype, extended)]
        sizes = [math.prod(x.shape) * bits_of(x.dtype) // 8 for x in arrays]
        barriers = sum(math.prod(x.shape) for x in shared if jnp.issubdtype(x.dtype, extended))
        taken, most = block_bytes(sizes, barriers), gpu().shared_bytes
        if taken > most:
            self.faults.append(f"takes {taken:,} bytes of shared memory, and a block has {most:,}")

    def check_registers(self, warpgroups: int) -> None:
        """Note a fault if one warpgroup copies, and the others then lack registers.

        A launch gives all threads as many, in multiples of 8.
        """
        if not self.registers:
            return
        given = gpu().registers // (128 * warpgroups * 8) * 8 * warpgroups
        asked = min(self.registers) + max(self.registers) * (warpgroups - 1)
        if asked > given:
            self.faults.append(
                f"asks for {asked} registers in {warpgroups} warpgroups, and has {given}"
            )

    def check(self, step: JaxprEqn, which: int, given: list[int], tree: Any) -> None:
        """Note a fault if the step's operand in global memory is no copy by 16 bytes."""
        kind: Any = step.invars[which].aval
        bits, unit = bits_of(kind.dtype), 8 * UNIT
        first, size = _ANY, kind.shape[-1]
        for indexer in tree.unflatten(given[: tree.num_leaves]):
            last = indexer.indices[-1]
            first, size = math.gcd(first, last.start), last.size
        what = f"copies {kind.dtype}[{','.join(map(str, kind.shape))}]"
        if first * bits % unit:
            self.refuse(f"{what} from multiples of {first * bits / 8:g} bytes of a row")
        if size * bits % unit:
            self.refuse(f"{what} in rows of {size * bits / 8:g} bytes")
        if len(kind.shape) > 1 and kind.shape[-1] * bits % unit:
            self.refuse(f"{what}, whose rows have {kind.shape[-1] * bits / 8:g} bytes")

    def refuse(self, copy: str) -> None:
        self.faults.append(f"{copy}, and a GPU copies by {UNIT} bytes")


def bits_of(dtype: Any) -> int:
    """Return the bits of an element in memory."""
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def _jaxprs(params: dict[str, Any]) -> Iterator[Jaxpr]:
    """Return the jaxprs among a step's parameters."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                yield inner
