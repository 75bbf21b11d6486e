"""``jaxllama quantize``: write a model as a directory of quantized weights, calibrated and
measured.

    request = QuantizeRequest(...);  check(cfg, request);  quantize_checkpoint(lm, request) ->
    report

``check`` finds everything that a config shows before weights are read, including the format's
limits and the free space of the disk. Rounding to nearest needs no text; it is calibrated only for
its report.

The directory appears complete, by one rename, or not at all. Finished layers are kept in a hidden
folder beside it. The folder's name is a hash of the weights, the text, the scheme, the method and
jax's version and device. So a killed run continues there to the same bits, and other runs do not
see it. The folder is removed when the directory is in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.checkpoints import saving
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.progress import peak_rss, working
from jaxllama.quantization import report as reports
from jaxllama.quantization.calibration import DEFAULT_TEXT, windows
from jaxllama.quantization.pipeline import calibrate, check_method
from jaxllama.quantization.quantize import quantize_params
from jaxllama.quantization.random_params import param_shapes
from jaxllama.quantization.scheme import (
    Packed,
    Recipe,
    check_experts,
    is_packed,
    parse,
    round_weight,
    untie,
)
from jaxllama.quantization.tune import steps, tune
from jaxllama.quantization.work import QuantizeWork, fingerprint
from jaxllama.typing import DictKey, JsonObject, Leaf, Params, ParamsDict
from pallas_kernels.qtensor import QTensor, leaves_of, tree_bytes
from pallas_kernels.rounding import FORMATS

# Weights whose rows share scales in a format, which tuning would give scales of their own.
_SHARED_SCALES = {
    "fp8": {"fp8-block"},
    "modelopt": {"nvfp4"},
    "compressed-tensors": {"nvfp4"},
}
# Formats that keep the head in floats unless a rule names it, and why.
_FLOAT_HEADS = {
    "awq": "no quantized head",
    "fp8": "no weights of other schemes",
    "modelopt": "no weights of other schemes",
    "compressed-tensors": "one scheme for all weights if it has zero points",
}
# Formats whose readers expect float16 scales: codes are computed with scales rounded to float16.
_FLOAT16_SCALES = ("awq", "gptq", "gguf")


_SAMPLES = 32


@dataclasses.dataclass(frozen=True)
class QuantizeRequest:
    """A request for a quantized checkpoint.

    text: calibration text, by default the packaged one. samples: number of windows of ``window``
    tokens, 32 by default. 0 means no calibration and no report of errors; it is the default of
    rounding to nearest, unless a text or a report is requested. report: files that end in .json or
    .png. tune: steps of end-to-end tuning, one window each.
    """

    out: Path
    scheme: str
    method: str = "rtn"
    format: str = "native"
    text: str | None = None
    samples: int | None = None
    window: int = 512
    report: tuple[Path, ...] = ()
    tune: int = 0

    def __post_init__(self) -> None:
        check_method(parse(self.scheme), self.method)
        recipe = parse(self.scheme)
        wants = {
            "a report": bool(self.report),
            "fp8-static": any(scheme.static for scheme in recipe.schemes),
            "tuning": self.tune > 0,
            self.method: self.method != "rtn",
        }
        wanted = [name for name, is_so in wants.items() if is_so]
        if self.samples is None:
            is_read = bool(wanted) or self.text is not None
            object.__setattr__(self, "samples", _SAMPLES if is_read else 0)
        if self.samples == 0 and wanted:
            raise JaxLlamaError(f"samples = 0: {wanted[0]} needs at least 1")
        formats = saving.FORMATS[1:]  # without floats
        if self.format not in formats:
            raise JaxLlamaError(f"format {self.format!r} is not one of {', '.join(formats)}")
        for name, least in (("samples", 0), ("window", 2), ("tune", 0)):
            if getattr(self, name) < least:
                raise JaxLlamaError(f"{name} = {getattr(self, name)}: must be at least {least}")
        kinds = {scheme.weights for scheme in recipe.schemes}
        if self.tune and "mxfp4" in kinds:
            raise JaxLlamaError(f"tune = {self.tune}: mxfp4's scales are powers of two, which stay")
        if self.tune and (shared := sorted(kinds & _SHARED_SCALES.get(self.format, set()))):
            raise JaxLlamaError(
                f"tune = {self.tune}: rows of {shared[0]} get scales of their own, which format "
                f"{self.format!r} cannot hold"
            )
        if self.text is not None and not self.text.strip():
            raise JaxLlamaError("the calibration text is empty")
        for path in self.report:
            if path.suffix not in (".json", ".png"):
                raise JaxLlamaError(f"{path}: a report is a .json or a .png file")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise JaxLlamaError(f"{self.out}: already exists; nothing is overwritten")

    @property
    def recipe(self) -> Recipe:
        """The scheme; the head stays in floats if the format requires it and no rule names it."""
        recipe = parse(self.scheme)
        return recipe.with_rule("head", None) if self.notes else recipe

    @property
    def notes(self) -> list[str]:
        """Differences between the result and the scheme."""
        names_head = any(pattern == "head" for pattern, _ in parse(self.scheme).rules)
        has_zeros = any(one.zeros and one.activations is None for one in parse(self.scheme).schemes)
        is_held = self.format not in _FLOAT_HEADS
        is_held |= self.format == "compressed-tensors" and not has_zeros
        if is_held or names_head:
            return []
        return [f"the head stays in floats: format {self.format!r} has {_FLOAT_HEADS[self.format]}"]

    @property
    def scale_dtype(self) -> str | None:
        return "float16" if self.format in _FLOAT16_SCALES else None

    def rounds_scales(self, dtype: DTypeLike) -> bool:
        """Return whether the float32 scales of a native file take values that float16 holds.

        So the file converts to AWQ's and GPTQ's formats. dtype: of the model's floats.
        """
        schemes = self.recipe.schemes
        kinds = {(one.weights, one.activations) for one in schemes}
        is_weight_only = kinds <= {("int4", None), ("int8", None)}
        return self.format == "native" and is_weight_only and jnp.dtype(dtype) == jnp.float32


def check(cfg: ModelConfig, request: QuantizeRequest, dtype: DTypeLike = jnp.float32) -> None:
    """Check a request for a model with floats of ``dtype``.

    Raises JaxLlamaError for a window beyond the context or a group that divides no weight. Also for
    a weight that the format cannot hold, or a disk without room.
    """
    if request.samples and request.window > cfg.max_position:
        raise JaxLlamaError(f"window = {request.window}: the context is {cfg.max_position} tokens")
    stand_in = _stand_in(cfg, request, dtype)
    saving.check(request.out, cfg, stand_in, request.format)
    folder = next(path for path in request.out.absolute().parents if path.exists())
    if not os.access(folder, os.W_OK):
        raise JaxLlamaError(f"{request.out}: {folder} is not writable")
    # Finished layers are on disk beside the checkpoint.
    needed = tree_bytes(stand_in) * (2 if request.samples else 1)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise JaxLlamaError(
            f"{request.out}: needs {needed / 1e6:.0f} MB, and {folder} has {free / 1e6:.0f} MB free"
        )


def _stand_in(cfg: ModelConfig, request: QuantizeRequest, dtype: DTypeLike) -> ParamsDict:
    """Return the resulting tree with arrays of ones or zeros that take no memory.

    Blocks of rows that are neighbours have unlike scales, which a format may have to part.
    """
    shapes, recipe = untie(param_shapes(cfg, dtype), request.recipe)

    def filled(value: int, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, jnp.dtype(dtype)), shape)

    def fake(path: tuple[DictKey, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray | QTensor:
        *keys, last = [entry.key for entry in path]
        name = "/".join(keys)
        scheme = recipe.of(name) if last == "weight" else None
        if scheme is None:
            return filled(0, leaf.shape, leaf.dtype)
        check_experts(leaf, scheme, name)
        if scheme.is_format:
            options = {"scheme": scheme, "name": name, "scale_dtype": request.scale_dtype}
            like = jax.eval_shape(functools.partial(round_weight, **options), leaf)
            ones = jax.tree.map(lambda part: filled(1, part.shape, part.dtype), like)
            if (of_block := FORMATS[scheme.weights].rows) == 1:
                return ones
            scales = 1 + np.arange(leaf.shape[-2])[:, None] // of_block % 2
            scale = np.broadcast_to(scales.astype(ones.scale.dtype), ones.scale.shape)
            return dataclasses.replace(ones, scale=scale)
        *rows, width = leaf.shape
        groups = (*rows, width // scheme.group_of(width, name))
        return QTensor(
            filled(0, leaf.shape, scheme.weights),
            filled(1, groups, scheme.scale_dtype(leaf, request.scale_dtype)),
            filled(0, groups, "int8") if scheme.zeros else None,
            scheme.activations,
            input_scale=filled(1, (), "float32") if scheme.static else None,
            unit=filled(1, (*rows, 1), "float32") if scheme.two_levels else None,
        )

    return jax.tree_util.tree_map_with_path(fake, shapes)


def quantize_checkpoint(
    lm: LanguageModel, request: QuantizeRequest, progress: bool = False
) -> JsonObject:
    """Make ``request.out``, and return a report: sizes, seconds, peak memory and weights' errors.

    Raises JaxLlamaError, with nothing written, for a model that is already quantized or has no
    tokenizer. Also for a window beyond its context, or a text that is too short. So it does for a
    weight whose inputs are not finite, or that the format cannot hold.
    """
    begun = time.perf_counter()
    if leaves_of(lm.params, Packed):
        name = lm.config.name
        raise JaxLlamaError(f"{name}: its weights are already quantized; start from floats")
    check(lm.config, request, lm.dtype)
    recipe, errors, kept, n_tokens = request.recipe, [], 0, 0
    rounds_scales = request.rounds_scales(lm.dtype)
    scale_dtype = "float16" if rounds_scales else request.scale_dtype
    losses: list[float] = []
    if request.samples == 0:
        params = quantize_params(
            lm.params, recipe, cfg=lm.config, scale_dtype=scale_dtype, progress=progress
        )
        work = None
    else:
        text = DEFAULT_TEXT.read_text(encoding="utf-8") if request.text is None else request.text
        assert request.samples is not None  # the request's default fills it in
        tokens = windows(lm.tokenizer, text, request.window, request.samples)
        order = steps(lm.tokenizer, text, request.window, request.tune)
        work, n_tokens = _work(lm, request, tokens, order), int(tokens.size)
        kept = len(list(work.folder.glob("layer_*.npz"))) if work.folder.is_dir() else 0
        total = sum(
            leaf.nbytes
            for name, part in lm.params.items()
            if name.startswith("layer_")
            for leaf in jax.tree.leaves(part)
        )
        with (
            _pointing_to(work),
            working(f"{request.method} {recipe.text}", total, progress) as advance,
        ):
            params, errors = calibrate(
                lm.config,
                lm.params,
                tokens,
                recipe,
                request.method,
                scale_dtype=scale_dtype,
                work=work,
                progress=advance,
            )
        if request.tune:
            with (
                _pointing_to(work),
                working("tuning", len(order), progress, unit="steps") as advance,
            ):
                params, losses = tune(
                    lm.config, lm.params, params, order, work=work, progress=advance
                )
    calibrated = time.perf_counter() - begun
    _check_scales(params)
    params = _with_float32_scales(params) if rounds_scales else params
    with tempfile.TemporaryDirectory() as scratch, _pointing_to(work):
        files = [] if lm.tokenizer is None else lm.tokenizer.save(scratch)
        saving.save(
            request.out,
            lm.config,
            params,
            files,
            format=request.format,
            dtype=lm.dtype,
            sampling=lm.sampling,
            progress=progress,
        )
    if work is not None:
        shutil.rmtree(work.folder, ignore_errors=True)
    head = params.get("head") if "head" not in lm.params else None
    report = {
        "out": str(request.out),
        "scheme": recipe.text,
        "method": request.method,
        "format": request.format,
        "calibration_tokens": n_tokens,
        "layers_kept": kept,
        "tuning_losses": losses,
        "seconds": calibrated,
        "peak_rss_bytes": peak_rss(),
        "device_peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "float_bytes": tree_bytes(lm.params),
        "bytes": tree_bytes(params),
        "notes": request.notes,
        "head_copy_bytes": 0 if head is None else tree_bytes(head),
        "errors": errors,
    }
    for path in request.report:
        reports.write(report, path)
    return report


def _work(lm: LanguageModel, request: QuantizeRequest, *tokens: np.ndarray) -> QuantizeWork:
    """Return the folder of finished layers that belongs to this request only."""
    scales = jnp.dtype(lm.dtype if request.scale_dtype is None else request.scale_dtype).name
    facts = {
        "config": lm.config.to_dict(),
        "scheme": repr(request.recipe),
        "method": request.method,
        "format": request.format,
        "scales": scales,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    key = fingerprint(facts, [*tokens, *jax.tree.leaves(lm.params)])
    return QuantizeWork(request.out.parent / f".{request.out.name}.{key}")


@contextlib.contextmanager
def _pointing_to(work: QuantizeWork | None) -> Generator[None]:
    """Make errors say where the finished layers are."""
    try:
        yield
    except JaxLlamaError as error:
        if work is None or not work.folder.is_dir():
            raise
        raise JaxLlamaError(
            f"{error}; finished layers are kept in {work.folder}, and the same command goes on "
            "from there"
        ) from None


def _check_scales(params: Params) -> None:
    """Raise JaxLlamaError for scales that are not finite; float16 can overflow."""
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


def _with_float32_scales(params: ParamsDict) -> ParamsDict:
    """Return the tree with float32 scales of the same values."""

    def one(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, QTensor):
            return leaf
        return dataclasses.replace(leaf, scale=leaf.scale.astype(jnp.float32))

    return jax.tree.map(one, params, is_leaf=is_packed)


def table(report: JsonObject) -> str:
    """Return the report as text: a line of facts, then the mean errors of every kind of weight."""
    kinds: dict[str, list[JsonObject]] = {}
    copy = report["head_copy_bytes"]
    for entry in report["errors"]:
        kinds.setdefault(entry["weight"].rsplit("/", 1)[-1], []).append(entry)
    lines = [
        f"wrote     {report['out']}: {report['bytes'] / 1e6:.1f} MB, floats had "
        f"{report['float_bytes'] / 1e6:.1f} MB"
        + (f", and {copy / 1e6:.1f} MB are the tied head's own" if copy else ""),
        f"method    {report['method']}, {report['scheme']}, {report['calibration_tokens']} tokens, "
        f"{report['seconds']:.1f} s, peak memory {report['peak_rss_bytes'] / 1e6:.0f} MB",
    ]
    if losses := report["tuning_losses"]:
        quarter = -(-len(losses) // 4)
        first, last = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))
        lines.append(
            f"tuned     {len(losses)} steps: KL {first:.4f} nats in the first quarter, {last:.4f} "
            "in the last; errors below are from before"
        )
    lines += [f"note      {note}" for note in report["notes"]]
    for kind, entries in kinds.items():
        schemes = " and ".join(Counter(entry["scheme"] for entry in entries))
        worst = max(entries, key=lambda entry: entry["output_error"])
        mean = sum(entry["output_error"] for entry in entries) / len(entries)
        lines.append(
            f"{kind:<9} {schemes}: output error {mean:.4f} on average, "
            f"{worst['output_error']:.4f} at most ({worst['weight']})"
        )
    return "\n".join(lines)
