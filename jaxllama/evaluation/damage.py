"""``jaxllama eval --texts DIR``: locate a model's damage by kind of text, by layer, by token.

    report = damage(lm, {kind: text}, reference=exact);  table(report);  write(report, path)

Each kind of text has its ``evaluate.perplexity``. With a reference the report has two more parts:

    worst    the ten predictions of largest KL, each with the text before it, the actual token,
             and each model's likeliest token
    layers   KL and top-1 after every layer, for the first ``LENS`` tokens: both models' streams
             pass through their own last norm and head, as if the layer were the last (the logit
             lens), so the two need not have the same basis
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxllama import extras
from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.perplexity import predictions, summary, tokens_of, window_and_stride
from jaxllama.files import json_text
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import activation_dtype, begin, block, logits, walk
from jaxllama.model.linear import Stream
from jaxllama.model.mixers.common import LayerState
from jaxllama.model.records import At, Hidden, whole_rows
from jaxllama.typing import JsonObject, Params

WORST = 10  # number for each kind
LENS = 128
_CONTEXT = 16  # tokens before a bad one


def damage(
    lm: LanguageModel,
    texts: Mapping[str, str],
    window: int | None = None,
    stride: int | None = None,
    *,
    reference: LanguageModel | None = None,
    kv_dtype: DTypeLike | None = None,
    progress: bool = False,
) -> JsonObject:
    """Return the report of a model.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    texts : mapping of str to str
        Texts by kind.
    window, stride, reference, kv_dtype, progress
        As for ``perplexity``, which has the errors too.

    Returns
    -------
    dict
        "window", "stride" and "kinds": {kind: report of ``perplexity``}. With a reference also
        "worst": {kind: [...]} and "layers": {kind: {"kl": [...], "top1": [...]}}; the latter only
        if both models are on one device.
    """
    window, stride = window_and_stride(lm, window, stride, reference)
    report: JsonObject = {"window": window, "stride": stride, "kinds": {}}
    worst, layers = {}, {}
    for kind, text in texts.items():
        ids = tokens_of(lm, text, reference)
        rows = predictions(
            lm, ids, window, stride, reference=reference, kv_dtype=kv_dtype, progress=progress
        )
        report["kinds"][kind] = summary(rows, reference is not None)
        if reference is None:
            continue
        worst[kind] = _worst(lm, ids, rows)
        if not any(_is_elsewhere(model) for model in (lm, reference)):
            layers[kind] = _layers(lm, reference, ids[: min(LENS, window)])
    return report if reference is None else {**report, "worst": worst, "layers": layers}


def _worst(lm: LanguageModel, ids: np.ndarray, rows: np.ndarray) -> list[JsonObject]:
    assert lm.tokenizer is not None
    read, found = lm.tokenizer.decode, []
    for at in np.argsort(-rows[:, 2], kind="stable")[:WORST]:
        nll, reference_nll, kl, token, other = rows[at].tolist()
        begin = max(0, int(at) + 1 - _CONTEXT)
        found.append(
            {
                "position": int(at) + 1,
                "kl": kl,
                "nll": nll,
                "reference_nll": reference_nll,
                "before": read(ids[begin : at + 1].tolist()),
                "token": read([int(ids[at + 1])]),
                "says": read([int(token)]),
                "reference_says": read([int(other)]),
            }
        )
    return found


def _is_elsewhere(lm: LanguageModel) -> bool:
    return not lm.executor.on_device or lm.mesh is not None


def _layers(lm: LanguageModel, reference: LanguageModel, ids: np.ndarray) -> dict[str, list[float]]:
    row = jnp.asarray(ids[None])
    streams = [_streams(model.config, model.params, row) for model in (lm, reference)]
    heads = tuple(
        {name: model.params[name] for name in ("norm", "head", "embed") if name in model.params}
        for model in (lm, reference)
    )
    kl, top1 = np.asarray(_lens((lm.config, reference.config), heads, *streams))
    return {"kl": kl.tolist(), "top1": top1.tolist()}


@functools.partial(jax.jit, static_argnums=0)
def _streams(cfg: ModelConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the residual stream after every layer, ``[L, T, D]``."""
    seen = []

    def layer_of_both(
        layer: LayerConfig, p: Params, stream: Stream, state: LayerState, at: At
    ) -> tuple[Stream, LayerState]:
        stream, state = block(layer, p, stream, state, at)
        seen.append(stream.total[0])
        return stream, state

    rows, length = tokens.shape
    at = whole_rows(cfg, rows, length)
    stream, at = begin(cfg, params, tokens, activation_dtype(params), at)
    walk(cfg, params, stream, None, at, layer_of_both)
    return jnp.stack(seen)


@functools.partial(jax.jit, static_argnums=0)
def _lens(
    cfgs: tuple[ModelConfig, ModelConfig],
    params: tuple[Params, Params],
    scores: jax.Array,
    other: jax.Array,
) -> jax.Array:
    """Return [KL, share of equal likeliest tokens] after every layer, ``[2, L]``."""

    def lens_of(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, p = (
            jax.nn.log_softmax(logits(cfg, part, Hidden(x)))
            for cfg, part, x in zip(cfgs, params, pair, strict=True)
        )
        kl = jnp.sum(jnp.where(p > -jnp.inf, jnp.exp(p) * (p - q), 0.0), axis=1)
        same = jnp.argmax(p, axis=1) == jnp.argmax(q, axis=1)
        return jnp.stack([jnp.mean(kl), jnp.mean(same.astype(jnp.float32))])

    return lax.map(lens_of, (scores, other)).T


def table(report: JsonObject) -> str:
    """Return a line for each kind, and with a reference its worst predictions."""
    kinds = report["kinds"]
    width = max(map(len, kinds))
    lines = []
    for kind, part in kinds.items():
        line = f"{kind:{width}}  {part['tokens']:>6} tokens  perplexity {_with(part, 'perplexity')}"
        if "kl" in part:
            line += (
                f"  {_with(part, 'rise', 100, '+')}%  KL {_with(part, 'kl', digits=4)}"
                f"  top-1 {_with(part, 'top1', 100, digits=1)}%"
            )
        lines.append(line)
    for kind, entries in report.get("worst", {}).items():
        lines += ["", f"{kind}: the worst predictions"]
        for entry in entries:
            lines.append(
                f"  KL {entry['kl']:6.2f}  {entry['before']!r} -> {entry['token']!r}, it says "
                f"{entry['says']!r}, the reference {entry['reference_says']!r}"
            )
    return "\n".join(lines)


def _with(part: JsonObject, name: str, times: float = 1.0, sign: str = "", digits: int = 2) -> str:
    return f"{times * part[name]:{sign}.{digits}f} ± {times * part[name + '_se']:.{digits}f}"


def write(report: JsonObject, path: str | Path) -> None:
    """Write the report as JSON, or the layers' KL and top-1 as a picture, by the file's suffix.

    Raises JaxLlamaError if matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix != ".png":
        path.write_text(json_text(report, indent=1) + "\n", encoding="utf-8")
        return
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise JaxLlamaError(f"{path}: {extras.missing('matplotlib', 'a picture')}") from None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(str(report.get("model", "")), fontsize=10)
    for axis, key, label in zip(
        figure.subplots(1, 2), ("kl", "top1"), ("KL, nats", "same most likely token"), strict=True
    ):
        for kind, values in report["layers"].items():
            axis.plot(values[key], marker="o", markersize=3, linewidth=1, label=kind)
        axis.set_xlabel("layer, read as if it were the last")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
