"""Measures every implementation of ``quantized_matmul`` at random shapes, fits the card's table to
the times, and checks what dispatch would choose: ``python -m benchmarks.kernels.fit``.

    measure times.jsonl --seed 1 --cases 150     on the GPU: one line for a program
    fit times.jsonl --card "NVIDIA H200"         writes the costs into the card's table
    check unseen.jsonl                           time lost by the choices, beside the measured best

A case is a scheme, M, N, K and what is fused around the product.  Its programs are each kernel that
has a plan and XLA's forms.  A time is the sum of all kernels of one call (CUPTI, median), after a
read of more bytes than the L2 holds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.card_file import write_costs
from benchmarks.kernels.shapes import LLAMA_8B
from pallas_kernels.cards.table import KernelCost
from pallas_kernels.dispatch import Reason, named_plan
from pallas_kernels.matmul import choice, predict, weight_only
from pallas_kernels.matmul.call import MatmulCall, Static
from pallas_kernels.matmul.op import quantized_matmul
from pallas_kernels.qtensor import QTensor

SCHEMES = {  # codes, columns of a group (0: a row), zeros, codes of x
    "plain": (None, 0, None, None),
    "w8a16": ("int8", 0, None, None),
    "w8a16-g128": ("int8", 128, None, None),
    "w4a16": ("int4", 128, None, None),
    "w4a16-zero": ("int4", 128, "int8", None),
    "w4a16-g32-minimum": ("int4", 32, "bfloat16", None),
    "w8a8": ("int8", 0, None, "int8"),
    "fp8": ("float8_e4m3fn", 0, None, "float8_e4m3fn"),
    "w4a8": ("int4", 128, "int8", "int8"),
    "w8a16-g32": ("int8", 32, None, None),
}
DRAWN = tuple(SCHEMES)[:-1]  # the last one's kernels are the others', but for one family
FUSED = ("", "", "", "n", "r", "ng", "np")  # norm, residual, gate, pending
MOST_VALUES = 1 << 27
FLUSHED = 192 << 20  # bytes, more than three times an H200's L2


@dataclasses.dataclass(frozen=True)
class FitCase:
    scheme: str
    m: int
    n: int
    k: int
    fused: str = ""

    def call(self) -> MatmulCall:
        """The call's shapes, as those of ``operands``."""
        codes, group, zeros, x_codes = SCHEMES[self.scheme]
        shape = jax.ShapeDtypeStruct
        w: Any = shape((self.n, self.k), codes or jnp.bfloat16)
        if codes is not None:
            unit, dtype = None, jnp.bfloat16 if group else jnp.float32
            if self.scheme == "w4a8":
                unit, dtype = shape((self.n, 1), jnp.float32), jnp.int8
            parts = self.n, self.k // (group or self.k)
            zero = None if zeros is None else shape(parts, zeros)
            w = QTensor(w, shape(parts, dtype), zero, unit=unit)
        normed = "n" in self.fused
        return MatmulCall(
            self.m,
            jnp.dtype(x_codes or jnp.bfloat16),
            w,
            jnp.dtype(jnp.bfloat16),
            quantized_x=x_codes is not None,
            norm=jnp.dtype(jnp.bfloat16) if normed else None,
            eps=1e-5 if normed else None,
            residual=jnp.dtype(jnp.bfloat16) if "r" in self.fused else None,
            swiglu="g" in self.fused,
            pending=jnp.dtype(jnp.float32) if "p" in self.fused else None,
        )


def cases(seed: int, count: int) -> list[FitCase]:
    """Random cases: the ``DRAWN`` schemes, M of 1 to 256, logarithmic in every size."""
    draw, made = random.Random(seed), []
    while len(made) < count:
        scheme = DRAWN[len(made) % len(DRAWN)]
        m = 1 if draw.random() < 0.3 else round(2 ** draw.uniform(1, 8))
        unit = draw.choice([1024, 1024, 512, 256])
        k = max(1024, round(2 ** draw.uniform(10, 14)) // unit * unit)
        unit = draw.choice([256, 128, 32])
        n = max(512, round(2 ** draw.uniform(9, 15.5)) // unit * unit)
        if n * k > MOST_VALUES or (scheme == "plain" and m > 64):  # where no kernel is
            continue
        may_fuse = m <= 16 and SCHEMES[scheme][3] is None
        made.append(FitCase(scheme, m, n, k, draw.choice(FUSED) if may_fuse else ""))
    return made


def operands(case: FitCase, seed: Any) -> tuple[Any, Any, dict[str, Any]]:
    """x, w and what is fused.  The bits are a hash of their places, which compiles quickly."""
    codes, group, zeros, x_codes = SCHEMES[case.scheme]
    m, n, k = case.m, case.n, case.k

    def bits(shape: tuple[int, ...], salt: int) -> jax.Array:
        at = jax.lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(2654435761)
        at = at + jnp.uint32(salt * 7919) + jnp.uint32(seed)
        at = (at ^ (at >> 15)) * jnp.uint32(2246822519)
        return (at ^ (at >> 13)).reshape(shape)

    def floats(shape: tuple[int, ...], salt: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return ((bits(shape, salt) >> 8).astype(jnp.float32) * 2**-24 - 0.5).astype(dtype)

    def words(shape: tuple[int, ...], dtype: str, salt: int) -> jax.Array:
        if dtype == "float8_e4m3fn":
            return (floats(shape, salt, jnp.float32) * 100).astype(dtype)
        width = 4 if dtype == "int4" else 8
        return (bits(shape, salt).astype(jnp.int32) >> (32 - width)).astype(dtype)

    def scales(rows: int, groups: int, salt: int, dtype: Any) -> jax.Array:
        return (0.01 + jnp.abs(floats((rows, groups), salt, jnp.float32)) / 50).astype(dtype)

    x: Any = floats((m, k), 1)
    if x_codes is not None:
        x = QTensor(words((m, k), x_codes, 1), scales(m, 1, 2, jnp.float32))
    w: Any = floats((n, k), 3)
    if codes is not None:
        groups, unit = k // (group or k), None
        scale = scales(n, groups, 4, jnp.bfloat16 if group else jnp.float32)
        if case.scheme == "w4a8":
            scale = jnp.abs(words((n, groups), "int4", 4).astype(jnp.int8))
            unit = scales(n, 1, 5, jnp.float32)
        zero = None
        if zeros == "int8":
            zero = words((n, groups), "int4", 6).astype(jnp.int8)
        elif zeros is not None:
            zero = floats((n, groups), 6)
        w = QTensor(words((n, k), codes, 3), scale, zero, unit=unit)
    extras: dict[str, Any] = {}
    if "n" in case.fused:
        extras["norm"] = floats((k,), 7)
    if "r" in case.fused:
        extras["residual"] = floats((m, n), 8)
    if "p" in case.fused:
        extras["pending"] = floats((m, k), 9, jnp.float32)
    return x, w, extras


# --- programs ------------------------------------------------------------------------------------


def kernels(case: FitCase) -> dict[str, Callable[..., Any]]:
    """Each kernel that has a plan for the case, by its name."""
    call = case.call()
    found = map(named_plan, choice.plans(call))

    def program(plan: Any) -> Callable[..., Any]:
        def run(x: Any, w: Any, extras: dict[str, Any]) -> Any:
            gamma, others = extras.get("norm"), {k: v for k, v in extras.items() if k != "norm"}
            around = call.work(gamma=gamma, **others)
            return choice.run(Static(call.out, call, plan), x, w, around)

        return run

    return {plan.kernel: program(plan) for plan in found if plan is not None}


def xla_forms(case: FitCase) -> dict[str, Callable[..., Any]]:
    """XLA's form, or each of a weight-only product's that is not far behind."""
    codes, group, _, x_codes = SCHEMES[case.scheme]

    def whole(x: Any, w: Any, extras: dict[str, Any]) -> Any:
        given = dict(extras)
        if "norm" in given:
            given["norm"] = given["norm"], 1e-5
        return quantized_matmul(
            x, w, swiglu="g" in case.fused, implementation="xla", out_dtype=jnp.bfloat16, **given
        )

    def weight_only_program(form: weight_only.Form) -> Callable[..., Any]:
        def run(x: Any, w: Any, extras: dict[str, Any]) -> Any:
            return weight_only.BY_FORM[form](x, w.scale, w.zero, w.q).astype(jnp.bfloat16)

        return run

    if codes is None or x_codes is not None or case.fused:
        return {"xla": whole}
    near = {
        "words": codes == "int4" and case.m <= 3,
        "sums": case.m <= (group or case.k) // 2,
        "copy": case.m > 8 and bool(group),
    }
    return {f"xla {form}": weight_only_program(form) for form in near if near[form]}


Program = tuple[FitCase, str, Any]


def compiled(
    jobs: list[tuple[FitCase, str, Callable[..., Any]]], threads: int, until: float
) -> list[Program]:
    def one(job: tuple[FitCase, str, Callable[..., Any]]) -> Program | None:
        case, name, f = job
        if time.time() > until:
            return None
        try:
            shapes = jax.eval_shape(functools.partial(operands, case), 0)
            return case, name, jax.jit(f).lower(*shapes).compile()
        except Exception as error:  # a program that does not compile is reported as one
            return case, name, f"{type(error).__name__}: {str(error)[:200]}"

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return [program for program in pool.map(one, jobs) if program is not None]


def measured(programs: list[Program], lock: Any, until: float) -> Iterator[dict[str, Any]]:
    from jax.experimental.mosaic.gpu import profiler

    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    flushed = jnp.ones(FLUSHED // 4, jnp.int32)
    flush = jax.jit(jnp.sum).lower(flushed).compile()
    make = functools.lru_cache(2)(lambda case: jax.jit(functools.partial(operands, case))(0))

    def kernel_times(run: Callable[[], Any], calls: int) -> list[list[float]]:
        jax.block_until_ready((run(), flush(flushed)))
        with lock:
            extension._cupti_init()
            try:
                for _ in range(calls):
                    last = flush(flushed), run()
                jax.block_until_ready(last)
            finally:
                times = [1e3 * ms for _, ms in extension._cupti_get_timings(True)]
        each = len(times) // calls
        return [times[i : i + each] for i in range(0, len(times), each)]

    before = len(kernel_times(lambda: None, 2)[0])  # kernels of the read
    for case, name, program in programs:
        if time.time() > until:
            return
        row = {**dataclasses.asdict(case), "name": name}
        if isinstance(program, str):
            yield {**row, "error": program}
            continue
        args = make(case)
        runs = [run[before:] for run in kernel_times(functools.partial(program, *args), 9)]
        us = statistics.median(sum(run) for run in runs)
        yield {**row, "us": round(us, 3), "kernels": len(runs[0])}


def _worker(
    part: list[FitCase], path: str, ready: Any, begin: Any, lock: Any, until: tuple
) -> None:
    try:
        jobs = [(case, name, f) for case in part for name, f in kernels(case).items()]
        programs = compiled(jobs, 1, until[0])
    finally:
        ready.release()
    begin.wait()
    _write(path, measured(programs, lock, until[1]))


def _write(path: str, rows: Iterator[dict[str, Any]]) -> None:
    with Path(path).open("w") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)


def measure(
    all_cases: list[FitCase], out: str, processes: int, compile_s: float, total_s: float
) -> None:
    """Kernels are traced and assembled in processes of their own, XLA's forms in threads here; then
    one program at a time is timed."""
    start = time.time()
    until = start + compile_s, start + total_s
    context = multiprocessing.get_context("spawn")
    lock, begin, ready = context.Lock(), context.Event(), context.Semaphore(0)
    workers = []
    for i in range(processes):
        args = all_cases[i::processes], f"{out}.{i}", ready, begin, lock, until
        workers.append(context.Process(target=_worker, args=args))
        workers[-1].start()
    jobs = [(case, name, f) for case in all_cases for name, f in xla_forms(case).items()]
    programs = compiled(jobs, 12, until[0])
    print(f"{len(programs)} of {len(jobs)} XLA programs, {time.time() - start:.0f} s", flush=True)
    for _ in workers:
        ready.acquire()
    print(f"kernels compiled, {time.time() - start:.0f} s", flush=True)
    begin.set()
    _write(f"{out}.xla", measured(programs, lock, until[1]))
    for worker in workers:
        worker.join()
    parts = [f"{out}.{i}" for i in range(processes)] + [f"{out}.xla"]
    Path(out).write_text("".join(Path(part).read_text() for part in parts if Path(part).exists()))
    for part in parts:
        Path(part).unlink(missing_ok=True)
    print(
        f"{len(Path(out).read_text().splitlines())} rows, {time.time() - start:.0f} s", flush=True
    )


# --- the table -----------------------------------------------------------------------------------


def read(path: str) -> dict[FitCase, dict[str, float]]:
    """Measured microseconds by case and program."""
    times: dict[FitCase, dict[str, float]] = {}
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        case = FitCase(*(row[field.name] for field in dataclasses.fields(FitCase)))
        if "us" in row:
            times.setdefault(case, {})[row["name"]] = row["us"]
    return times


def fit(times: dict[FitCase, dict[str, float]]) -> dict[str, KernelCost]:
    """The costs with the least relative error, by family."""
    found: dict[str, list[tuple[predict.MatmulWork, float]]] = {}
    for case, programs in times.items():
        call = case.call()
        plans = {plan.kernel: plan for plan in map(named_plan, choice.plans(call)) if plan}
        for name, us in programs.items():
            if name in plans:
                work = predict.kernel_work(plans[name], call)
            elif case.fused or _has_more(name, call):
                continue
            elif name == "xla":
                work = predict.product_work(call)
            else:
                work = predict.form_work(name.removeprefix("xla "), call)
            found.setdefault(work.family, []).extend([(work, us)] * _weight(case))
    costs = {family: fit_family(rows) for family, rows in sorted(found.items())}
    for family, rows in found.items():
        kind = family.split()[0]
        kindred = [cost for name, cost in costs.items() if name.split()[0] == kind != "xla"]
        costs[family] = fit_family(rows, kindred)
    return costs | fit_around(times, costs)


def _weight(case: FitCase) -> int:
    """How often a case counts: shapes of a decoder more often than random ones."""
    return 3 if (case.n, case.k) in {(n, k) for _, n, k in LLAMA_8B} else 1


def _has_more(name: str, call: MatmulCall) -> bool:
    """Is more in the program than its family's work?"""
    if name == "xla words":
        return call.w.zero is not None
    return call.quantized_x and call.w.dtype == jnp.int4 and call.m > 1


# Chosen by cross-validation: a start is at least this share of a family's shortest time, and from
# this relative error on an outlier counts less.
LEAST_START, OUTLIER = 0.5, 0.05
# Calls that a cost needs: with fewer it is the median of the kindred families'.
LEAST_CALLS = 2


def fit_family(
    rows: list[tuple[predict.MatmulWork, float]], kindred: Sequence[KernelCost] = ()
) -> KernelCost:
    """kindred: costs of families with the same amounts, for what too few of these rows have."""
    from scipy.optimize import least_squares

    serial = np.array([[1.0, *work.serial] for work, _ in rows])
    shared = np.array([work.shared for work, _ in rows])
    us, split = np.array([us for _, us in rows]), serial.shape[1]
    given = np.array([[1.0, *cost.serial, *cost.shared] for cost in kindred])
    amounts = np.concatenate([serial, shared], axis=1)
    rare = np.count_nonzero(amounts, axis=0) < LEAST_CALLS
    fixed = np.median(given, axis=0) if len(given) else np.zeros(len(rare))

    def errors(costs: np.ndarray) -> np.ndarray:
        costs = np.where(rare, fixed, costs)
        longest = np.sqrt(((shared * costs[split:]) ** 2).sum(axis=1))
        return np.log(np.maximum(serial @ costs[:split] + longest, 1e-3) / us)

    best: Any = None
    for seed in range(4):
        draw = np.random.default_rng(seed)
        each = np.median(us) / np.maximum(np.median(shared, axis=0), 1e-6) / 2
        begin = [2.0, *draw.uniform(0.01, 0.5, split - 1), *draw.uniform(0.1, 1, len(each)) * each]
        least = [LEAST_START * us.min(), *[0.0] * (len(begin) - 1)]
        begin = np.maximum(begin, np.add(least, 1e-9))
        found = least_squares(
            errors, begin, bounds=(least, np.inf), loss="soft_l1", f_scale=OUTLIER
        )
        best = found if best is None or found.cost < best.cost else best
    made = np.where(rare, fixed, best.x)
    start, *others = (float(f"{cost:.3g}") if cost > 1e-6 else 0.0 for cost in made)
    return KernelCost(start, tuple(others[: split - 1]), tuple(others[split - 1 :]))


def fit_around(
    times: dict[FitCase, dict[str, float]], costs: dict[str, KernelCost]
) -> dict[str, KernelCost]:
    """What norms, gates, pending sums, zeros and widened codes add to XLA's forms."""
    from scipy.optimize import nnls

    work, more, zeros, widened = [], [], [], []
    with table(costs | {"xla zeros": KernelCost(0.0), "xla widened": KernelCost(0.0, (0.0,))}):
        for case, programs in times.items():
            call = case.call()
            if case.fused and "xla" in programs:
                work.append([v / programs["xla"] for v in predict.around_work(call)])
                more.append(1 - predict.product_us(call) / programs["xla"])
            elif "xla words" in programs and call.w.zero is not None:
                zeros.append(programs["xla words"] - predict.form_us("words", call))
            elif "xla" in programs and _has_more("xla", call):
                more_us = programs["xla"] - predict.product_us(call)
                widened.append(more_us / (call.n * call.k / 1e6))
    added, _ = nnls(np.array(work), np.clip(more, -0.5, 1))
    serial = tuple(float(f"{us:.3g}") for us in added)
    zero, wide = (float(f"{max(0.0, statistics.median(us)):.3g}") for us in (zeros, widened))
    return {
        "xla around": KernelCost(0.0, serial),
        "xla widened": KernelCost(0.0, (wide,)),
        "xla zeros": KernelCost(zero),
    }


@contextlib.contextmanager
def table(costs: dict[str, KernelCost]) -> Iterator[None]:
    """Predictions with other costs than the device's."""
    before = predict.gpu
    predict.gpu = lambda: dataclasses.replace(before(), costs=costs)
    try:
        yield
    finally:
        predict.gpu = before


def lost(case: FitCase, programs: dict[str, float]) -> tuple[float, str] | None:
    """Share of time that the choice loses beside the measured best, and the choice.  None where
    there is nothing to choose, or the choice was not measured."""
    call = case.call()
    if len(programs) < 2:
        return None
    found = choice.plan(call)
    if isinstance(found, Reason):
        forms = [name for name in programs if name.startswith("xla")]
        chosen = forms[0] if forms else "xla"
        if len(forms) > 1:
            chosen = min(forms, key=lambda name: predict.form_us(name.removeprefix("xla "), call))
    else:
        chosen = found.kernel
    if chosen not in programs:
        return None
    return programs[chosen] / min(programs.values()) - 1, chosen


def check(times: dict[FitCase, dict[str, float]]) -> None:
    rows = [(lost(case, programs), case, programs) for case, programs in times.items()]
    made = sorted(((*row[0], *row[1:]) for row in rows if row[0] is not None), key=lambda r: -r[0])
    for share, chosen, case, programs in made[:12]:
        print(f"{share:6.1%} {chosen:34s} {case} {programs}")
    shares = [row[0] for row in made]
    late = sum(share > 0.15 for share in shares)
    print(
        f"{len(shares)} cases: {statistics.mean(shares):.2%} lost in the mean, "
        f"{max(shares):.1%} at worst, {late} above 15%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["measure", "fit", "check"])
    parser.add_argument("file", nargs="+", help="times, one line for a program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=150)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--compile-seconds", type=float, default=1e9, help="drop what is later")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop timing then")
    parser.add_argument("--card", help="name of the card in pallas_kernels/cards/architecture.py")
    args = parser.parse_args()
    if args.what == "measure":
        drawn = cases(args.seed, args.cases)
        measure(drawn, args.file[0], args.processes, args.compile_seconds, args.seconds)
        return
    times = {case: programs for path in args.file for case, programs in read(path).items()}
    if args.what == "check":
        return check(times)
    if args.card is None:
        parser.error("fit needs --card, the card on which the times were measured")
    write_costs(args.card, fit(times))


if __name__ == "__main__":
    main()
