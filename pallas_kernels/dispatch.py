"""The choice of an op's implementation, and ``explain``, which reports it.

"xla" is plain jax.numpy and runs anywhere.  "mosaic" is the Pallas Mosaic GPU kernel.  "cpu" is the
handler that is generated for this machine's CPU (``pallas_kernels.cpu``).  If one of the latter two
cannot run, NotImplementedError names the fact that rules it out.  None chooses one of three:

    the kernel    the operands are on an NVIDIA GPU of an architecture whose kernels were run, the
                  version of jax was tested, and the op returns a ``Plan``, not a ``Reason``
    the handler   the operands are on a CPU, and the op returns a ``Plan`` for it
    XLA           everywhere else

The choice never tries a kernel and catches its error.  XLA takes every call with an operand of
size 0, because such a call has nothing to launch.

``runs.json`` names the architectures on which a GPU has run the kernels, and the plans that it has
not run.  Elsewhere, from compute capability 8.0 on, the kernels were only assembled.  A caller who
names "mosaic" gets them, and ``JAXLLAMA_TARGET=sm_89`` makes them the choice on such a GPU.

Committed arrays and meshes decide which device the operands are on; without any it is the default
device.  ``jax.jit`` without a mesh does not know where its arguments will be, so the choice assumes
the default device there.  To jit a function for another device, trace it under
``jax.default_device`` of that device, or ask for "xla".
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import importlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import jax
from jax.core import Tracer

from pallas_kernels.cards.architecture import TARGET, asked_target, nearest
from pallas_kernels.operands import Device, has_shape

Implementation = Literal["xla", "mosaic", "cpu"]
_IMPLEMENTATIONS = ("xla", "mosaic", "cpu")
_NAMES = "'xla', 'mosaic', 'cpu' or None"
KERNELS = {"mosaic": "Mosaic kernel", "cpu": "CPU handler"}
# From the first version on, and below the second.
TESTED_JAX = (0, 11, 2), (0, 13, 0)
_SPAN = " <= jax < ".join(".".join(map(str, version)) for version in TESTED_JAX)


class Plan(Protocol):
    """The way a kernel computes one call; a planner returns it, and the kernel's launcher takes it.

    It is hashable, and ``explain`` prints its ``str``.  The plan of a CPU handler has an
    ``implementation``, "cpu".
    """

    kernel: ClassVar[str]  # the kernel's name


P = TypeVar("P", bound=Plan)
C = TypeVar("C")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """Predicted times of a call, which a plan carries if its op has a table of costs.

    predicted_us, xla_us: predicted microseconds of the kernel, and of XLA's form of the call.
    """

    kernel: ClassVar[str]
    predicted_us: float | None = dataclasses.field(default=None, compare=False, repr=False)
    xla_us: float | None = dataclasses.field(default=None, compare=False, repr=False)


T = TypeVar("T", bound=Predicted)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a planner has no plan for a call, or advises against its plan.

    plan: a plan that exists, while the text names a form that was measured to be faster.  A caller
    who names the implementation still gets this plan.
    """

    text: str
    plan: Plan | None = None


_ASKED = Reason("it was asked for")
_EMPTY = Reason("an operand of size 0")


def untested_jax() -> str | None:
    """How this jax is none of the versions that were tested, or None."""
    first, end = TESTED_JAX
    if first <= jax.__version_info__ < end:
        return None
    return (
        f"jax {jax.__version__} is not one of the tested versions, {_SPAN}, which need Python 3.12"
    )


def hopper_reason(*operands: object) -> str | None:
    """Return why Mosaic kernels cannot run natively where these operands are, or None if they can.

    Without operands the question is about new arrays.
    """
    device = device_of(operands)
    elsewhere = f"the operands are on {device.platform!r}, not an NVIDIA GPU"
    return _gpu_reason(device) if device.platform == "gpu" else elsewhere


def _gpu_reason(gpu: Device) -> str | None:
    """Return why Mosaic kernels cannot run on this GPU with this jax, or None."""
    capability = str(getattr(gpu, "compute_capability", "?"))
    arch = nearest(capability)
    if arch is None:
        return f"compute capability {capability} is below 8.0, of the first GPUs with kernels"
    if reason := untested_jax():
        _say_once(reason)
    elif jax.__version_info__ < arch.first_jax:
        reason = f"kernels of {arch.name} need jax {'.'.join(map(str, arch.first_jax))}"
        _say_once(reason)
    elif arch.name not in not_run() and asked_target() is None:
        reason = f"no GPU of {arch.name} has run its kernels; {TARGET}={arch.name} chooses them"
        _say_once(reason)
    return reason


@functools.cache
def _say_once(reason: str) -> None:
    logging.getLogger("pallas_kernels").warning("no Mosaic kernel is used: %s", reason)


def device_of(operands: object) -> Device:
    """Return the device, or one of the devices, where a pytree of arrays, tracers or shapes is.

    A device has a ``platform`` and, if it is a GPU, a ``compute_capability``.
    """
    if (recorder := _recorder.get()) is not None:
        return recorder.device
    for x in jax.tree.leaves(operands):
        device = None
        if not isinstance(x, Tracer):
            device = _device_of_array(x)
        elif (abstract := jax.typeof(x).sharding.mesh.abstract_device) is not None:
            device = _like(abstract)
        if device is not None:
            return device
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        return _like(abstract)
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.devices(default)[0] if default is None or isinstance(default, str) else default


def _device_of_array(x: object) -> Device | None:
    """Return a device that an array or a shape is bound to, or None if it may be anywhere."""
    sharding: jax.sharding.Sharding | None = getattr(x, "sharding", None)
    if sharding is None or (isinstance(x, jax.Array) and not x.committed):
        return None
    return next(iter(sharding.device_set))


def _like(abstract: Device) -> Device:
    """Return a device of this machine of the abstract device's kind.

    If the machine has none, the program is for another machine. The abstract device then says as
    much as there is to know.
    """
    try:
        here = jax.devices(abstract.platform)
    except RuntimeError:
        here = []
    return next((d for d in here if d.device_kind == abstract.device_kind), abstract)


def wants_kernel(implementation: Implementation | None, *operands: object) -> bool:
    """Can ``choose_plan`` come to a Mosaic kernel?"""
    if implementation is None:
        return hopper_reason(*operands) is None
    return implementation == "mosaic"


Find = Callable[[], Plan | Reason]


def choose_plan(
    op: str,
    implementation: Implementation | None,
    find: Find,
    *operands: object,
    has_xla: bool = True,
    cpu: Find | None = None,
) -> Plan | None:
    """Return the plan of ``op``'s kernel for a call, or None if the call takes its XLA form.

    Parameters
    ----------
    op, implementation
        The op's name, and the implementation that the caller named, if any.
    find
        The planner of the op's Mosaic kernels. It is asked once, and only if a Mosaic kernel may
        run, because it may import the kernels. That takes a third of a second and needs jax's
        private modules.
    operands
        The call's operands, arrays or shapes.
    has_xla
        Whether the op has a form to fall back on.
    cpu
        The planner of the CPU's handler, for an op that has one.

    Raises
    ------
    NotImplementedError
        The caller named a kernel, and there is no plan for it. The message names the fact.
    """
    if implementation is not None:
        return _named_choice(op, implementation, find, cpu, operands, has_xla)
    found = _EMPTY if has_xla and is_empty(*operands) else _own_answer(find, cpu, operands)
    plan = None if isinstance(found, Reason) else found
    if _recorder.get() is not None:
        _record(op, operands, kind_of(plan), found, plan)
    return plan


def kind_of(plan: Plan | None) -> Implementation:
    """Return the implementation that a plan belongs to; None is XLA's form."""
    return "xla" if plan is None else getattr(plan, "implementation", "mosaic")


def _named_choice(
    op: str,
    implementation: Implementation,
    find: Find,
    cpu: Find | None,
    operands: tuple[object, ...],
    has_xla: bool,
) -> Plan | None:
    """``choose_plan`` for a caller who names the implementation."""
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"{op}: implementation {implementation!r} is not {_NAMES}")
    is_xla, is_nothing = implementation == "xla", has_xla and is_empty(*operands)
    if is_xla or is_nothing:
        found, plan, kind = _ASKED if is_xla else _EMPTY, None, "xla"
    else:
        planner, kind = cpu if implementation == "cpu" else find, implementation
        found = Reason("the op has none") if planner is None else planner()
        plan = named_plan(found)
    if _recorder.get() is not None:
        _record(op, operands, kind, found, plan)
    if plan is None and kind != "xla":
        raise NotImplementedError(f"{op}: no {KERNELS[kind]} for this call: {_text(found)}")
    if plan is not None and kind == "mosaic" and jax.__version_info__ < TESTED_JAX[0]:
        raise NotImplementedError(f"{plan.kernel}: {untested_jax()}")
    return plan


def _own_answer(
    find: Callable[[], P | Reason],
    cpu: Callable[[], P | Reason] | None,
    operands: tuple[object, ...],
) -> P | Reason:
    """Ask the planner of the kernels that can run where the operands are."""
    if cpu is not None and device_of(operands).platform == "cpu":
        return cpu()
    if reason := hopper_reason(*operands):
        return Reason(reason)
    return _proven(find(), str(getattr(device_of(operands), "compute_capability", "9.0")))


def _proven(found: P | Reason, capability: str) -> P | Reason:
    """Return a planner's answer, or a Reason if it is a plan that no such GPU has run."""
    arch = nearest(capability)
    if arch is None or isinstance(found, Reason) or not (unproven := not_run().get(arch.name)):
        return found
    if run_name(found) in unproven:
        return Reason(f"{found} has not been run on a GPU of {arch.name}", found)
    return found


def stands_for(plan: Any) -> Plan:
    """Return the listed plan of a plan's class, with representative numbers of sizes.

    A plan whose numbers follow from sizes has a method ``representative``.
    """
    return plan.representative() if hasattr(plan, "representative") else plan


def run_name(plan: Any) -> str:
    """Return the name of a plan's class in ``runs.json``."""
    return f"{plan.kernel} {stands_for(plan)}"


@functools.cache
def not_run() -> Mapping[str, Sequence[str]]:
    """Return the plans that no GPU has run, by the architectures whose plans were run.

    ``tests/golden/make_plans.py`` writes the file from the record of the runs.
    """
    return json.loads((Path(__file__).parent / "runs.json").read_text())


def own_plan(
    find: Callable[[], P | Reason], *operands: object, cpu: Callable[[], P | Reason] | None = None
) -> P | None:
    """Return the plan that ``choose_plan`` with None comes to, or None.

    It serves a caller who does something else if there is no kernel, and otherwise gives the op
    this plan. Nothing is recorded.
    """
    if is_empty(*operands):
        return None
    found = _own_answer(find, cpu, operands)
    return None if isinstance(found, Reason) else found


def named_plan(found: Plan | Reason) -> Plan | None:
    """Return the plan for a caller who names the implementation."""
    return found.plan if isinstance(found, Reason) else found


def _text(found: Plan | Reason) -> str | None:
    return found.text if isinstance(found, Reason) else None


def first_plan(call: C, *planners: Callable[[C], Plan | Reason]) -> Plan | Reason:
    """Return the answer of the first planner that has a plan, or a Reason that joins all reasons.

    A planner's Reason that holds a plan (another form is faster) also counts as an answer.
    """
    reasons = []
    for planner in planners:
        found = planner(call)
        if not isinstance(found, Reason) or found.plan is not None:
            return found
        reasons.append(found.text)
    return Reason("; ".join(filter(None, reasons)))


def shortest(
    found: Sequence[T | Reason], us: Callable[[T], float], xla: Callable[[], float]
) -> T | Reason:
    """The plan with the shortest predicted time, or a Reason: no planner has a plan, or XLA's form
    is predicted to be shorter.

    found: what each planner says of a call.
    us, xla: predicted microseconds of a plan, and of XLA's form.
    """
    plans = [one for one in found if not isinstance(one, Reason)]
    if not plans:
        reasons = [one for one in found if isinstance(one, Reason)]
        named = (reason for reason in reasons if reason.plan is not None)
        return next(named, Reason("; ".join(reason.text for reason in reasons if reason.text)))
    xla_us = xla()
    timed = [dataclasses.replace(one, predicted_us=us(one), xla_us=xla_us) for one in plans]
    best = min(timed, key=_predicted_us)
    if _predicted_us(best) <= xla_us:
        return best
    times = (
        f"XLA's form is predicted to take {xla_us:.1f} us, {best.kernel} {best.predicted_us:.1f}"
    )
    return Reason(times, best)


def _predicted_us(plan: Predicted) -> float:
    assert plan.predicted_us is not None
    return plan.predicted_us


def is_empty(*operands: object) -> bool:
    """Has one of the arrays no elements?"""
    return any(0 in x.shape for x in jax.tree.leaves(operands))


# --- explain -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Choice:
    """A result of ``choose_plan``, with the name and plan of the kernel if it chose a kernel."""

    op: str
    operands: str
    implementation: Implementation
    reason: str | None
    kernel: str | None = None
    plan: str = ""
    predicted: str = ""  # times of the kernel and of XLA's form

    def __str__(self) -> str:
        how = f"{self.implementation}"
        if self.kernel is not None:
            how = ", ".join(filter(None, (how, self.kernel, self.predicted, self.plan)))
        elif self.reason is not None:
            how = f"no {how} kernel" if self.implementation != "xla" else how
            how += f" ({self.reason})"
        return f"{self.op} {self.operands}: {how}"


def _record(
    op: str,
    operands: object,
    implementation: Implementation,
    found: Plan | Reason,
    plan: Plan | None,
) -> None:
    """Tell ``choices`` of a choice."""
    recorder = _recorder.get()
    assert recorder is not None
    choice = Choice(op, _described(operands), implementation, _text(found))
    if plan is not None:
        choice.kernel, choice.plan, choice.predicted = plan.kernel, str(plan), _times(plan)
    recorder.choices.append(choice)


def _times(plan: Plan) -> str:
    us, xla_us = getattr(plan, "predicted_us", None), getattr(plan, "xla_us", None)
    return "" if us is None else f"{us:.1f} us predicted (XLA {xla_us:.1f})"


class _Recorder(NamedTuple):
    device: Device
    choices: list[Choice]


_recorder: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar("_", default=None)


def is_recording() -> bool:
    """Is this traced for ``choices``, which is to see every call?"""
    return _recorder.get() is not None


def explain(op: str | Callable[..., object], *operands: object, **options: object) -> str:
    """Return the implementation that ``op(*operands, **options)`` would use, without computing it.

    Parameters
    ----------
    op : callable or str
        A function of this package, or its name.
    *operands, **options
        The op's arguments: arrays or ``jax.ShapeDtypeStruct``. Without a Hopper GPU, pass
        ``implementation="mosaic"`` to see the kernel that one would use.

    Returns
    -------
    str
        A line for each choice: the implementation, its kernel and plan, or the reason that there is
        no kernel.

    Raises
    ------
    ValueError
        For an unknown name, and for operands that the op refuses.

    Examples
    --------
    >>> print(explain("rms_norm", x, weight, 1e-5))
    rms_norm bfloat16[1,4096] bfloat16[4096]: mosaic, rowwise_mosaic, Plan(threads=256, ...)
    """
    if not isinstance(op, str):
        function = op
    else:
        package = importlib.import_module("pallas_kernels")
        if op not in package.__all__ or not callable(getattr(package, op)):
            raise ValueError(f"explain: {op!r} is no op of pallas_kernels")
        function = getattr(package, op)
    made = choices(function, *operands, **options)
    if (target := asked_target()) is not None:
        note = f"kernels use only what {target.name} has ({TARGET})"
        return "\n".join([*map(str, made), note])
    return "\n".join(map(str, made)) or f"{function.__name__}: xla (it has no kernel)"


def choices(function: Callable[..., object], *operands: object, **options: object) -> list[Choice]:
    """Return the choices made in ``function(*operands, **options)``, which is traced, not run.

    If the function asks for a kernel that does not cover its call, that is the last choice.
    """
    leaves, tree = jax.tree.flatten((operands, options))
    traced = [has_shape(x) and not isinstance(x, type) for x in leaves]

    def call(arrays: list[jax.Array]) -> object:
        taken = iter(arrays)
        pairs = zip(leaves, traced, strict=True)
        args, options = jax.tree.unflatten(tree, [next(taken) if t else x for x, t in pairs])
        return function(*args, **options)

    arrays = [x for x, is_traced in zip(leaves, traced, strict=True) if is_traced]
    recorder = _Recorder(device_of(arrays), [])
    token = _recorder.set(recorder)
    try:
        jax.eval_shape(call, arrays)
    except NotImplementedError:
        if not recorder.choices or recorder.choices[-1].implementation == "xla":
            raise
    finally:
        _recorder.reset(token)
    return recorder.choices


def _described(operands: object) -> str:
    return " ".join(
        f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(operands)
    )
