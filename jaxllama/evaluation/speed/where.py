"""``jaxllama bench --where decode|prefill``: the time of a step, kernel by kernel.

    run(lm, phase, ...) -> report (a dict)        table(report) -> text
    account(events, launches, rates) -> report    from a recorded trace and the program's kernels

A row has the launches of a step with the same name and the same number of bytes: launches,
microseconds, bytes, floor, share of the floor. The bytes come from the compiled program
(``hlo.launches``). The floor is the larger of two times: bytes over this machine's memory rate, and
a product's operations over its rate. The latter is the rate of the default dtype, twice for
operands of 8 bits. Both rates are measured in the same run.

``between`` is the time inside a step in which no kernel ran. ``outside`` is the difference between
a step's unprofiled wall time and the trace. In a loop it is the condition and the start of the next
turn. A loop runs for two numbers of steps. ``call`` is the part that does not grow with them. It is
the host's part of a call: its arguments, and the graph's update if they have moved since the call
before.

A prefill is the whole program with its first token; a decode step is a turn of the loop. CUDA
graphs stay on (``trace.profiled_graphs``, before jax starts its devices). CUPTI then records one
turn of a loop and knows the graph only, so kernels are matched to instructions by name and order.
Library calls within a graph have names of their own, and no bytes here. On a CPU the rows are XLA's
thunks, whose threads overlap, and the profiler makes short steps longer. Shares of the floor are
valid there, but sums may exceed the step, so ``outside`` is None. A product's row has its shapes.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import jax

from jaxllama.evaluation.speed.decode import SHORT, check_room
from jaxllama.evaluation.speed.harness import Decoding, matmul_rate, memory_bandwidth
from jaxllama.evaluation.speed.hlo import Launch, launches
from jaxllama.evaluation.speed.trace import TraceEvent, events_by_device, events_on_host
from jaxllama.language_model import LanguageModel
from jaxllama.progress import Working
from jaxllama.typing import JsonObject

Phase = Literal["decode", "prefill"]
_STEPS, _MORE = 16, 48  # steps of the short and the long decode runs
_SUFFIX = re.compile(r"(_mosaic)?(_gpu)?_kernel$")
_NUMBER = re.compile(r"([._]\d+)+(?=$|_fusion)")


def run(
    lm: LanguageModel,
    phase: Phase,
    *,
    batch: int = 1,
    prompt_tokens: int = 512,
    runs: int = 5,
    kv_dtype: str | None = None,
    chunk: int | None = None,
    context: int = SHORT,
    sign: Working | None = None,
) -> JsonObject:
    """Return the report of a step of ``phase``; arguments as for ``decode.run``.

    Raises JaxLlamaError if the model's context is too short.
    """
    check_room(lm.config, prompt_tokens + 1, context, _MORE + 1)
    sign = Working() if sign is None else sign
    decoding = Decoding(lm, batch, kv_dtype, chunk)
    sign.note(f"compiling {phase}")
    state = functools.partial(decoding.prefilled, SHORT, _MORE + 1, context - SHORT)
    if phase == "decode":
        module, text = "jit_advance", decoding.compile(state()[0]).compiled.as_text() or ""
    else:
        module, text = "jit_start", decoding.prefill_text(prompt_tokens)

    def once(steps: int = _STEPS) -> float:
        if phase == "decode":
            return decoding.run(state()[0], steps + 1)
        return decoding.prefilled(prompt_tokens, 1)[1]

    def median(of: Callable[[], float]) -> float:
        return statistics.median([of() for _ in range(2 + runs)][2:])

    seconds, call = median(once), 0.0
    if phase == "decode":
        short, long = seconds, median(lambda: once(_MORE))
        # Where other work delays the shorter run, the call's own time is lost in the noise.
        seconds = (long - short) / (_MORE - _STEPS) if long > short else long / _MORE
        call = max(0.0, short - _STEPS * seconds)
    sign.note("profiling")
    events = _traced(once, module)
    rates = memory_bandwidth(), matmul_rate()
    steps = 1 if phase == "prefill" else None
    report = account(events, launches(text, loop=phase == "decode"), rates, steps)
    return {
        "model": lm.config.name,
        "device": jax.devices()[0].device_kind,
        "phase": phase,
        "batch": batch,
        "context": context if phase == "decode" else 0,
        "tokens": batch * (1 if phase == "decode" else prompt_tokens),
        "step_us": 1e6 * seconds,
        "call_us": 1e6 * call,
        "outside_us": None
        if jax.default_backend() == "cpu"
        else 1e6 * seconds - report["kernels_us"] - report["between_us"],
        **report,
    }


def _traced(once: Callable[[], float], module: str) -> list[TraceEvent]:
    """Return the events of the first device, or of the host if XLA ran there."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            once()
        devices = events_by_device(Path(folder))
        events = next(iter(devices.values())) if devices else events_on_host(Path(folder))
    return [event for event in events if event.module == module]


def account(
    events: Iterable[TraceEvent],
    program: Sequence[Launch],
    rates: tuple[float, float],
    steps: int | None = None,
) -> JsonObject:
    """Return the launches of a step, longest first.

    program: the kernels of a step, in order. rates: bytes and operations a second. steps: number of
    steps of the events; None counts them by the program's kernels. Events before the first kernel
    of the program and after its last one do not count.
    """
    ops = {launch.op: launch for launch in program}
    names: dict[str, list[Launch]] = defaultdict(list)
    for launch in program:
        names[launch.kernel].append(launch)
    turns = {name: itertools.cycle(found) for name, found in names.items()}

    def launch_of(event: TraceEvent) -> Launch | None:
        if event.op in ops:
            return ops[event.op]
        turn = turns.get(event.name) or turns.get(_SUFFIX.sub("", event.name))
        return None if turn is None else next(turn)

    pairs = [(event, launch_of(event)) for event in sorted(events)]
    known = [i for i, (_, launch) in enumerate(pairs) if launch is not None]
    pairs = pairs[known[0] : known[-1] + 1] if known else []
    seen = Counter(launch.op for _, launch in pairs if launch is not None)
    if steps is None:
        steps = round(statistics.median(seen.values())) if seen else 1
    rows: dict[tuple[str, int | None], JsonObject] = {}
    for event, launch in pairs:
        name = _NUMBER.sub("", _SUFFIX.sub("", event.name))
        if launch is not None and name in ("ffi_call", "dot"):  # a CPU's events without a name
            name = launch.kernel
        nbytes = None if launch is None else launch.nbytes
        row = rows.setdefault((name, nbytes), {"launches": 0, "us": 0.0, "floor_us": 0.0})
        row["launches"] += 1 / steps
        row["us"] += 1e6 * event.seconds / steps
        row["floor_us"] += _floor_us(launch, rates) / steps
    table: list[JsonObject] = [
        {"kernel": name, "bytes": nbytes, **row} for (name, nbytes), row in rows.items()
    ]
    return {
        "steps": steps,
        "kernels": sorted(table, key=lambda row: -row["us"]),
        "kernels_us": sum(row["us"] for row in table),
        "between_us": _idle_us([event for event, _ in pairs]) / steps,
    }


def _floor_us(launch: Launch | None, rates: tuple[float, float]) -> float:
    if launch is None:
        return 0.0
    memory, products = rates
    products *= 2 if launch.bits == 8 else 1
    return 1e6 * max(launch.nbytes / memory, launch.operations / products)


def _idle_us(events: Sequence[TraceEvent]) -> float:
    """Return the time in no event, from the first event to the last."""
    idle, reached = 0.0, events[0].begin if events else 0.0
    for event in events:
        idle += max(0.0, event.begin - reached)
        reached = max(reached, event.begin + event.seconds)
    return 1e6 * idle


def table(report: JsonObject) -> str:
    """Return the report as text."""
    lines = [
        f"{report['model']} on {report['device']}, {report['phase']}, batch {report['batch']}: "
        f"{report['step_us']:.1f} us a step, {1e6 * report['tokens'] / report['step_us']:.1f} "
        f"tokens/s",
        f"{'kernel':44} {'launches':>8} {'us':>9} {'MB each':>9} {'floor us':>9} {'share':>6}",
    ]
    for row in report["kernels"]:
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.3f}"
        floor = f"{row['floor_us']:.1f}" if row["floor_us"] else "-"
        share = f"{row['floor_us'] / row['us']:.0%}" if row["floor_us"] and row["us"] else "-"
        lines.append(
            f"{row['kernel'][:44]:44} {row['launches']:8.3g} {row['us']:9.1f} {size:>9} "
            f"{floor:>9} {share:>6}"
        )
    launched = sum(row["launches"] for row in report["kernels"])
    floor = sum(row["floor_us"] for row in report["kernels"])
    lines.append(f"{'kernels':44} {launched:8.4g} {report['kernels_us']:9.1f} {'':9} {floor:9.1f}")
    lines.append(f"{'between kernels':44} {'':8} {report['between_us']:9.1f}")
    if report["outside_us"] is not None:
        lines.append(f"{'outside of the trace':44} {'':8} {report['outside_us']:9.1f}")
    if report["phase"] == "decode":
        lines.append(f"{'a call, whatever its steps':44} {'':8} {report['call_us']:9.1f}")
    return "\n".join(lines)
