"""What each kernel's wait for the kernel before costs in a decode step of one row.

    python -m benchmarks.kernels.waits MODEL [--quantize SCHEME] [--layers N] [--json FILE]

The model has a few of its layers and random weights.  Its loop runs as it is, with no kernel
waiting, and with each kernel in turn not waiting: the values are wrong, and the time that is saved
bounds what hiding that wait can bring.  The first line has the time of the weights' bytes, too.
Kernels are numbered in the order of a layer, with those of the head behind them.  Saved times do
not add up: a wait may cost only where others wait too.

Needs a Hopper GPU and jax >= 0.12: before, no kernel begins early.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import jaxllama
from jaxllama.evaluation.speed.harness import Decoding, read_in_step
from pallas_kernels import ptx as p
from pallas_kernels.device import gpu
from pallas_kernels.jax_internals import ir
from pallas_kernels.qtensor import tree_bytes

LONG, SHORT, RUNS = 420, 60, 5


@dataclasses.dataclass
class Waits:
    """The kernels that are emitted, in order, and which of them do not wait.

    without: the number of a kernel, "all", or None.
    """

    without: int | str | None = None
    names: list[str] = dataclasses.field(default_factory=list)
    last: Any = None

    def emit(self) -> None:
        """Stand in for ``ptx.await_kernel``; a kernel may call it in several branches."""
        module = ir.InsertionPoint.current.block.owner
        while module.parent is not None:
            module = module.parent
        if self.last is None or module != self.last:
            self.last = module
            self.names.append(ir.StringAttr(module.attributes["sym_name"]).value)
        if self.without in ("all", len(self.names) - 1):
            allow_next()
        else:
            _REAL()


_REAL = p.await_kernel


def allow_next() -> None:
    """The kernel behind this one may begin, and this one waits for none."""
    if not p._overlaps():
        return
    p.ptx("griddepcontrol.launch_dependents;")
    owner = ir.InsertionPoint.current.block.owner
    while owner.parent is not None:
        owner = owner.parent
    owner.attributes["mosaic_gpu.uses_pdl"] = ir.UnitAttr.get()


@contextlib.contextmanager
def emitting(waits: Waits) -> Iterator[None]:
    """Within, kernels that are traced wait as ``waits`` says."""
    jax.clear_caches()
    with mock.patch.object(p, "await_kernel", waits.emit):
        yield
    jax.clear_caches()


def few_layers(name: str, layers: int, scheme: str | None) -> jaxllama.LanguageModel:
    """Return a model of so many layers with random weights."""
    cfg = jaxllama.load_config(name)
    cfg = cfg.replace(n_layers=layers, layer_types=cfg.layer_types[:layers])
    params = jaxllama.init_params(cfg, jax.random.key(0), jnp.bfloat16)
    params = params if scheme is None else jaxllama.quantize_params(params, scheme)
    return jaxllama.LanguageModel(cfg, params, None)


def step_us(model: jaxllama.LanguageModel, waits: Waits) -> float:
    """Return the microseconds of a step."""
    with emitting(waits):
        decoding = Decoding(model, 1)
        decoding.compile(decoding.begun(LONG + 1))

        def seconds(steps: int) -> float:
            return decoding.run(decoding.begun(LONG + 1), steps)

        seconds(SHORT)
        runs = [seconds(LONG) - seconds(SHORT) for _ in range(RUNS)]
    return 1e6 * statistics.median(runs) / (LONG - SHORT)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantize", help="a scheme, as of `jaxllama bench`")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", help="a file for the results")
    args = parser.parse_args()
    if jax.__version_info__ < (0, 12):
        raise SystemExit(f"jax {jax.__version__}: no kernel begins before the one before has ended")
    model, as_it_is = few_layers(args.model, args.layers, args.quantize), Waits()
    base = step_us(model, as_it_is)
    saved: dict[str, float] = {}
    floor = 1e6 * tree_bytes(read_in_step(model)) / gpu().copy_rate
    print(f"as it is: {base:.1f} us a step of {args.layers} layers, bytes {floor:.1f}", flush=True)
    for which in ("all", *range(len(as_it_is.names))):
        name = "all" if which == "all" else f"{which} {as_it_is.names[int(which)]}"
        less = (base - step_us(model, Waits(which))) / args.layers
        saved[name] = round(less, 2)
        print(f"{name} does not wait: {less:.2f} us less a layer", flush=True)
    if args.json:
        facts = {"device": jax.devices()[0].device_kind, "step_us": round(base, 1)}
        with open(args.json, "w") as file:
            json.dump(facts | {"a layer less": saved}, file, indent=1)


if __name__ == "__main__":
    main()
