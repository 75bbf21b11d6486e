"""The distance of each quantized weight from its floats: numbers, and a picture.

    weight_errors(weight, quantized, stats, s, rows) -> {"weight_error", "output_error", "cosine"}
    picture(entries, path, title)

weight_error is ``||W' - W|| / ||W||``. Let y = x W^T for calibration inputs x, and y' the output of
the quantized weight, with quantized inputs if its scheme has them. output_error is ``||y' - y|| /
||y||``, and cosine is the cosine of the angle between y and y'. Tokens have the weights of
``calibration``. Folded scales are undone on both sides, so that methods can be compared. The
picture needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama import extras
from jaxllama.errors import JaxLlamaError
from jaxllama.model.linear import linear
from jaxllama.quantization.calibration import InputStats
from jaxllama.typing import JsonObject
from pallas_kernels.qtensor import QTensor, dequantize


def weight_errors(
    weight: jax.Array, quantized: QTensor, stats: InputStats, s: jax.Array, rows: jax.Array
) -> dict[str, float]:
    """Return the errors of a weight; see the module docstring.

    s ``[K]``: divisors of the inputs. rows ``[N]``: divisors of the outputs.
    """
    seen = (stats.sample, jnp.sqrt(stats.weight))
    if weight.ndim == 3:
        values = jax.device_get(_errors_of_experts(weight, quantized, seen))
    else:
        values = jax.device_get(_errors(weight, quantized, seen, s, rows))
    return {key: float(value) for key, value in values.items()}


@jax.jit
def _errors(
    weight: jax.Array,
    quantized: QTensor,
    seen: tuple[jax.Array, jax.Array],
    s: jax.Array,
    rows: jax.Array,
) -> dict[str, jax.Array]:
    w, (x, weight_of) = weight.astype(jnp.float32), seen
    y = jnp.matmul(x, w.T, precision=lax.Precision.HIGHEST) * weight_of
    got = linear(x / s, {"weight": quantized}) * rows * weight_of
    off = dequantize(quantized) * rows[:, None] / s - w
    return {
        "weight_error": _norm(off) / _norm(w),
        "output_error": _norm(got - y) / _norm(y),
        "cosine": jnp.sum(got * y) / (_norm(got) * _norm(y)),
    }


@jax.jit
def _errors_of_experts(
    weight: jax.Array, quantized: QTensor, seen: tuple[jax.Array, jax.Array]
) -> dict[str, jax.Array]:
    """Return the mean errors over experts, each of which multiplies the whole sample."""
    unit = jnp.ones((), jnp.float32)

    def of(index: jax.Array) -> dict[str, jax.Array]:
        rows = jnp.broadcast_to(unit, weight.shape[1:2])
        return _errors(weight[index], quantized.rows(index), seen, unit, rows)

    expert_errors = lax.map(of, jnp.arange(weight.shape[0]))
    return jax.tree.map(jnp.mean, expert_errors)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x)))


def picture(entries: list[JsonObject], path: str | Path, title: str) -> None:
    """Write a PNG of weight and output errors along the layers, one line for each kind of weight.

    Raises JaxLlamaError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise JaxLlamaError(f"{path}: {extras.missing('matplotlib', 'a picture')}") from None
    lines: dict[str, tuple[list[int], dict[str, list[float]]]] = {}
    last = 1 + max((_layer(entry["weight"]) for entry in entries), default=0)
    for entry in entries:
        name = entry["weight"].rsplit("/", 1)[-1]
        at, values = lines.setdefault(name, ([], {}))
        at.append(_layer(entry["weight"]) if "/" in entry["weight"] else last)
        for key in ("weight_error", "output_error"):
            values.setdefault(key, []).append(entry[key])
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, 2)
    for axis, key, label in zip(
        axes, ("weight_error", "output_error"), ("weights", "outputs"), strict=True
    ):
        for name, (at, values) in lines.items():
            axis.plot(at, values[key], marker="o", markersize=3, linewidth=1, label=name)
        axis.set_xlabel("layer")
        axis.set_ylabel(f"relative error of {label}")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _layer(name: str) -> int:
    first = name.split("/", 1)[0]
    return int(first.removeprefix("layer_")) if first.startswith("layer_") else 0


def write(report: JsonObject, path: str | Path) -> None:
    """Write the report of ``quantize_checkpoint`` as JSON or as a picture, by the file's suffix."""
    path = Path(path)
    if path.suffix == ".png":
        title = f"{report['method']} {report['scheme']}"
        return picture(report["errors"], path, title)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
