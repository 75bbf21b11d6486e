"""``jaxllama quantize``: a model to a directory of quantized weights, calibrated and measured.

    quantize_checkpoint(lm, Request(...)) -> report

The directory appears complete, by one rename, or not at all.  Finished layers are kept in a hidden
folder beside it, whose name is a hash of the weights, the text, the scheme, the method and the jax
that computes: a run that was killed continues there to the same bits, and any other run does not
see it.  The folder goes when the directory is in place.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.bench import peak_rss
from jaxllama.checkpoints import packed
from jaxllama.checkpoints.progress import byte_bar
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.quantization import report as reports
from jaxllama.quantization.calibration import DEFAULT_TEXT, windows
from jaxllama.quantization.pipeline import calibrate, check_method
from jaxllama.quantization.scheme import Plan, parse
from jaxllama.quantization.work import Work, fingerprint
from pallas_kernels.qtensor import QTensor

# Formats whose readers expect float16 scales: words are computed against the rounded ones.
_FLOAT16_SCALES = ("awq", "gptq")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to make.  text: of the calibration, the packaged one by default, of which ``samples``
    windows of ``window`` tokens are used; report: files that end in .json or .png."""

    out: Path
    scheme: str
    method: str = "rtn"
    format: str = "native"
    text: str | None = None
    samples: int = 32
    window: int = 512
    report: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        check_method(parse(self.scheme), self.method)
        if self.format not in packed.FORMATS:
            raise JaxLlamaError(f"format {self.format!r} is not one of {', '.join(packed.FORMATS)}")
        for name, least in (("samples", 1), ("window", 2)):
            if getattr(self, name) < least:
                raise JaxLlamaError(f"{name} = {getattr(self, name)}: must be at least {least}")
        if self.text is not None and not self.text.strip():
            raise JaxLlamaError("the calibration text is empty")
        for path in self.report:
            if path.suffix not in (".json", ".png"):
                raise JaxLlamaError(f"{path}: a report is a .json or a .png file")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise JaxLlamaError(f"{self.out}: already exists; nothing is overwritten")


def quantize_checkpoint(
    lm: LanguageModel, request: Request, progress: bool = False
) -> dict[str, Any]:
    """Make ``request.out``; returns what was done: sizes, seconds, peak memory and the errors of
    every weight.

    Raises JaxLlamaError, with nothing written, for a model that is already quantized or has no
    tokenizer, a window beyond its context, a text that is too short, a weight whose inputs are not
    finite, or one that the format cannot hold.
    """
    begun = time.perf_counter()
    if request.window > lm.config.max_position:
        raise JaxLlamaError(
            f"window = {request.window}: the context is {lm.config.max_position} tokens"
        )
    plan = parse(request.scheme)
    _check_weights(lm.config, lm.params, plan)
    text = DEFAULT_TEXT.read_text(encoding="utf-8") if request.text is None else request.text
    tokens = windows(lm.tokenizer, text, request.window, request.samples)
    scale_dtype = jnp.float16 if request.format in _FLOAT16_SCALES else lm.dtype
    leaves = jax.tree.leaves(lm.params, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    facts = {
        "config": lm.config.to_dict(), "scheme": plan.text, "method": request.method,
        "scales": jnp.dtype(scale_dtype).name, "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }  # fmt: skip
    key = fingerprint(facts, [tokens, *jax.tree.leaves(leaves)])
    work = Work(request.out.parent / f".{request.out.name}.{key}")
    kept = len(list(work.folder.glob("layer_*.npz"))) if work.folder.is_dir() else 0
    total = sum(leaf.nbytes for name, part in lm.params.items() if name.startswith("layer_")
                for leaf in jax.tree.leaves(part))  # fmt: skip
    with byte_bar(f"{request.method} {plan.text}", total, progress) as advance:
        params, errors = calibrate(
            lm.config, lm.params, tokens, plan, request.method,
            scale_dtype=scale_dtype, work=work, progress=advance,
        )  # fmt: skip
    calibrated = time.perf_counter() - begun
    _check_scales(params)
    with tempfile.TemporaryDirectory() as scratch:
        files = [] if lm.tokenizer is None else lm.tokenizer.save(scratch)
        packed.save(request.out, lm.config, params, files, format=request.format)
    shutil.rmtree(work.folder, ignore_errors=True)
    report = {
        "out": str(request.out),
        "scheme": plan.text,
        "method": request.method,
        "format": request.format,
        "calibration_tokens": int(tokens.size),
        "layers_kept": kept,
        "seconds": calibrated,
        "peak_rss_bytes": peak_rss(),
        "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "float_bytes": sum(leaf.nbytes for leaf in leaves),
        "bytes": sum(leaf.nbytes for leaf in _leaves(params)),
        "errors": errors,
    }
    for path in request.report:
        reports.write(report, path)
    return report


def _check_weights(cfg: ModelConfig, params: dict[str, Any], plan: Plan) -> None:
    """Every weight's group, before anything slow."""
    if any(isinstance(leaf, QTensor) for leaf in _leaves(params)):
        raise JaxLlamaError(f"{cfg.name}: its weights are already quantized; start from floats")
    flat = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in flat:
        *keys, last = [entry.key for entry in path]
        scheme = plan.of("/".join(keys)) if last == "weight" else None
        if scheme is not None:
            scheme.group_of(leaf.shape[-1], "/".join(keys))


def _check_scales(params: dict[str, Any]) -> None:
    """A group of weights that are not all zero must have a scale; float16 can lose a tiny one."""
    flat = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda leaf: isinstance(leaf, QTensor)
    )
    for path, leaf in flat:
        if isinstance(leaf, QTensor):
            scale = np.asarray(leaf.scale.astype(jnp.float32))
            name = "/".join(str(entry.key) for entry in path[:-1])
            if not np.isfinite(scale).all():
                raise JaxLlamaError(
                    f"{name}: a scale is not finite in {leaf.scale.dtype.name}: the weight holds "
                    "NaN, infinity or values beyond it"
                )


def _leaves(params: Any) -> list[Any]:
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def table(report: dict[str, Any]) -> str:
    """The report for people: one line of facts, then the mean errors of every kind of weight."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for entry in report["errors"]:
        kinds.setdefault(entry["weight"].rsplit("/", 1)[-1], []).append(entry)
    lines = [
        f"wrote     {report['out']}: {report['bytes'] / 1e6:.1f} MB, floats had "
        f"{report['float_bytes'] / 1e6:.1f} MB",
        f"method    {report['method']}, {report['scheme']}, {report['calibration_tokens']} tokens, "
        f"{report['seconds']:.1f} s, peak memory {report['peak_rss_bytes'] / 1e6:.0f} MB",
    ]
    for kind, entries in kinds.items():
        schemes = " and ".join(Counter(entry["scheme"] for entry in entries))
        worst = max(entries, key=lambda entry: entry["output_error"])
        mean = sum(entry["output_error"] for entry in entries) / len(entries)
        lines.append(
            f"{kind:<9} {schemes}: output error {mean:.4f} on average, "
            f"{worst['output_error']:.4f} at most ({worst['weight']})"
        )
    return "\n".join(lines)
