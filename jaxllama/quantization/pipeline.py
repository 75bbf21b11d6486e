"""Calibrated quantization of a model, layer by layer.

    calibrate(cfg, params, tokens, recipe, method, ...) -> (params, [one report entry per weight])

The steps for each block, in order, are these. Gather statistics of its weights' inputs, with the
earlier blocks already quantized. Choose scales per channel (AWQ, SmoothQuant) and fold them into
the block. Round (to nearest, or by GPTQ). Measure the error of each weight. The head follows if it
is not the embedding.

    rtn          each weight by itself; w4a16's grids weigh columns by their inputs' size
    awq          weight-only schemes: scales, and clipping of int4 groups
    gptq         any scheme: its rounding, on grids clipped as AWQ clips them (int4), behind
                 smoothquant's scales for w8a8
    smoothquant  quantized activations (w8a8, fp8, fp8-static, w4a8, w4a8-fp8): scales

AWQ and GPTQ then fit the codes' scales to the output (``scale_fit``), if no format fixes them.

If a method does not apply to a weight's scheme (a mixed recipe), that weight is rounded to nearest.
Experts are rounded to nearest under each method, on grids weighted by the inputs of each expert. A
warning counts the experts with too few inputs. With ``work`` every finished layer is stored and not
computed again.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.errors import JaxLlamaError, WeightWarning
from jaxllama.quantization import awq, smoothquant
from jaxllama.quantization.calibration import InputStats, advance, embed, observe
from jaxllama.quantization.gptq import gptq
from jaxllama.quantization.report import weight_errors
from jaxllama.quantization.rounding import Grid, nearest
from jaxllama.quantization.scale_fit import fit_scales
from jaxllama.quantization.scheme import Packed, Recipe, Scheme, is_packed, round_weight, untie
from jaxllama.quantization.sites import Layer, Part, Site, fold, get, put, row_factor, sites
from jaxllama.quantization.work import QuantizeWork
from jaxllama.typing import JsonObject, Leaf, Params, ParamsDict
from pallas_kernels.qtensor import QTensor, leaves_of
from pallas_kernels.rounding import CODES

_FEW = 16  # number of tokens that an expert's statistics need
METHODS = ("rtn", "awq", "gptq", "smoothquant")


def check_method(recipe: Recipe, method: str) -> None:
    """Raise JaxLlamaError for an unknown method, or one that the recipe gives nothing to do."""
    if method not in METHODS:
        raise JaxLlamaError(f"method {method!r} is not one of {', '.join(METHODS)}")
    if not recipe.schemes:
        raise JaxLlamaError(f"scheme {recipe.text!r} quantizes nothing")
    uses = [_searches(scheme, method) for scheme in recipe.schemes]
    if method in ("awq", "smoothquant") and not any(uses):
        what = "w4a16 or w8a16" if method == "awq" else "w8a8, fp8 or fp8-static"
        raise JaxLlamaError(
            f"method {method!r} is for {what}, or w4a8, and the scheme is {recipe.text!r}"
        )


def _searches(scheme: Scheme, method: str) -> bool:
    """Return whether the method searches scales for a weight of this scheme."""
    if method == "awq":
        return scheme.activations is None or scheme.weights == "int4"
    if method == "gptq":  # measured for this scheme only
        return scheme.weights == scheme.activations == "int8"
    return method == "smoothquant" and scheme.activations is not None and not scheme.is_format


def calibrate(
    cfg: ModelConfig,
    params: Params,
    tokens: np.ndarray,
    recipe: Recipe,
    method: str,
    *,
    scale_dtype: DTypeLike | None = None,
    measure: bool = True,
    work: QuantizeWork | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[ParamsDict, list[JsonObject]]:
    """Quantize a model.

    Parameters
    ----------
    cfg : ModelConfig
        Config of the model.
    params : dict
        Parameter tree in floats.
    tokens : int32[n, T]
        Calibration windows (``calibration.windows``).
    recipe : Recipe
        Schemes of the weights.
    method : str
        One of ``METHODS``.
    scale_dtype : data-type or None
        See ``Scheme.scale_dtype``.
    measure : bool
        Whether to make report entries.
    work : QuantizeWork or None
        Storage of finished layers.
    progress : callable
        Called with the bytes of further finished weights.

    Returns
    -------
    (dict, list of dict)
        The quantized parameters, and ``report.weight_errors`` of every quantized weight.

    Raises
    ------
    JaxLlamaError
        For a model that is already quantized, a method that does not fit, or naming the weight
        whose inputs are not finite.
    """
    check_method(recipe, method)
    if cfg.needs_model:
        raise JaxLlamaError(
            f"{cfg.name}: {cfg.needs_model}: no calibration runs them one by one; "
            "load(quantize=) rounds them to nearest"
        )
    if found := leaves_of(params, Packed):
        raise JaxLlamaError(
            f"{cfg.name}: {len(found)} weights are already quantized; calibrate floats"
        )
    params, recipe = untie(params, recipe)
    run = Run(recipe, method, scale_dtype, measure)
    names = [f"layer_{index}" for index in range(cfg.n_layers)]
    out, report = dict(params), []
    if "weight" in params["embed"] and recipe.of("embed") is not None:
        scheme = recipe.of("embed")
        assert scheme is not None
        if scheme.activations is not None:
            raise JaxLlamaError(f"scheme {recipe.text!r}: an embedding needs a weight-only scheme")
        rounded = round_weight(params["embed"]["weight"], scheme, "embed", scale_dtype)
        out["embed"] = {**params["embed"], "weight": rounded}
    h: list[jax.Array] | None = None
    for index, name in enumerate(names):
        stored = None if work is None else work.load(name)
        if stored is not None:
            out[name], entries = stored
        else:
            if h is None:
                h = embed(cfg, params, tokens) if index == 0 else _stored_hidden(work, name)
            layer, following = cfg.layers[index], None
            if index + 1 < cfg.n_layers and cfg.layers[index + 1].kind == "attention":
                following = cfg.layers[index + 1], params[f"layer_{index + 1}"]
            out[name], entries = run.layer(layer, name, params[name], h, following)
            h = advance(layer, out[name], h)
            if work is not None:
                next_name = names[index + 1] if index + 1 < len(names) else "head"
                work.save(name, out[name], entries, next_name, h)
        report += entries
        progress(sum(leaf.nbytes for leaf in _leaves(params[name])))
    if "head" in params and recipe.of("head") is not None:
        h = _stored_hidden(work, "head") if h is None else h
        last = {"norm": params["norm"], "head": params["head"]}
        done, entries = run.layer(cfg, "", last, h)
        out.update(done)
        report += entries
        progress(params["head"]["weight"].nbytes)
    return out, report


def _stored_hidden(work: QuantizeWork | None, name: str) -> list[jax.Array]:
    assert work is not None
    return work.hidden(name)


@dataclasses.dataclass(frozen=True)
class Run:
    """The settings that all layers share."""

    recipe: Recipe
    method: str
    scale_dtype: DTypeLike | None
    is_measured: bool

    def layer(
        self,
        part: Part,
        prefix: str,
        layer: Layer,
        h: list[jax.Array],
        following: tuple[LayerConfig, Layer] | None = None,
    ) -> tuple[Layer, list[JsonObject]]:
        """Return (the quantized layer, its report entries)."""
        hessian = self.method in ("awq", "gptq")
        stats = observe(part, layer, h, hessian=hessian, following=following)
        n_tokens = sum(batch.shape[0] * batch.shape[1] for batch in h)
        scales = {}
        for site in sites(part):
            seen = stats[site.name]
            if not bool(jnp.all(jnp.isfinite(seen.peak))):
                raise JaxLlamaError(
                    f"calibration: the inputs of {_join(prefix, site.readers[0])} hold NaN or "
                    "infinity"
                )
            s = self._scales(site, layer, prefix, seen, n_tokens)
            if s is not None:
                scales[site.name] = s
            if seen.experts is not None and self.is_measured:
                _warn_of_few(_join(prefix, site.readers[0]), seen.experts[1])
        folded = fold(part, layer, scales)
        done, entries = folded, []
        for site in sites(part):
            ones = jnp.ones((len(site.channel),), jnp.float32)
            s = site.of_inputs(scales[site.name]) if site.name in scales else ones
            seen = stats[site.name].scaled(s)
            for reader in site.readers:
                scheme = self.recipe.of(_join(prefix, reader))
                if scheme is None:
                    continue
                name = _join(prefix, reader)
                rounded = self._round(get(folded, reader)["weight"], scheme, seen, name)
                done = put(done, reader, "weight", rounded)
                if not self.is_measured:
                    continue
                weight = get(layer, reader)["weight"]
                rows = _row_scales(part, reader, weight.shape[0], scales)
                errors = weight_errors(weight, rounded, stats[site.name], s, rows)
                entries.append({"weight": name, "scheme": _describe(rounded), **errors})
        return done, entries

    def _scales(
        self, site: Site, layer: Layer, prefix: str, seen: InputStats, n_tokens: int
    ) -> jax.Array | None:
        """Return the method's scale of each of the source's channels; None for no scaling."""
        chosen = []
        for reader in site.readers:
            scheme = self.recipe.of(_join(prefix, reader))
            if scheme is not None and _searches(scheme, self.method):
                chosen.append((get(layer, reader)["weight"], scheme, _join(prefix, reader)))
        if not chosen or not site.source:
            return None
        weights = tuple(weight for weight, _, _ in chosen)
        channel = jnp.asarray(site.channel)
        grids = tuple(_grid(weight, scheme, name) for weight, scheme, name in chosen)
        if self.method == "awq":
            s, _ = awq.search_scales(
                weights,
                seen.hessian,
                seen.total / n_tokens,
                channel,
                grids=grids,
                n_channels=site.n_channels,
            )
            return s
        scheme = chosen[0][1]
        s, _ = smoothquant.search_scales(
            weights,
            seen.sample,
            seen.weight,
            seen.felt,
            seen.peak,
            channel,
            dtype=scheme.activations,
            grids=grids,
            static=scheme.static,
            n_channels=site.n_channels,
        )
        return s

    def _round(self, weight: jax.Array, scheme: Scheme, seen: InputStats, name: str) -> QTensor:
        """Return the folded weight as a QTensor. seen: statistics of the folded inputs."""
        if weight.ndim == 3:
            return round_weight(weight, scheme, name, self.scale_dtype, _of_experts(seen))
        searched = self.method == "gptq" or (self.method == "awq" and _searches(scheme, "awq"))
        if searched:
            grid, shrink = _grid(weight, scheme, name), 1.0
            if scheme.weights == "int4":
                shrink = awq.search_clip(weight, seen.hessian, grid=grid)
            dtype = scheme.scale_dtype(weight, self.scale_dtype)
            if self.method == "gptq":
                assert seen.hessian is not None
                out = gptq(weight, seen.hessian, shrink, grid=grid, scale_dtype=dtype)
            else:
                out = nearest(weight, shrink, grid=grid, scale_dtype=dtype)
            if out.unit is None and not scheme.is_format:
                out = fit_scales(weight, out, seen.hessian)
            out = dataclasses.replace(out, activations=scheme.activations)
        else:
            importance = jnp.mean(jnp.square(seen.sample), axis=0)
            out = round_weight(weight, scheme, name, self.scale_dtype, importance)
        if scheme.static:
            assert scheme.activations is not None
            _, top = CODES[scheme.activations]
            out = dataclasses.replace(out, input_scale=jnp.max(seen.peak) / top)
        return out


def _of_experts(seen: InputStats) -> jax.Array:
    """Return the importance ``[E, K]`` of experts' columns.

    It is the mean square of each expert's inputs, with ``_FEW`` additional rows of the mean over
    all experts.
    """
    assert seen.experts is not None
    sums, rows = seen.experts
    mean = jnp.mean(jnp.square(seen.sample), axis=0)
    return (sums + _FEW * mean) / (rows + _FEW)[:, None]


def _warn_of_few(name: str, rows: jax.Array) -> None:
    few = int(jnp.sum(rows < _FEW))
    if few:
        warnings.warn(
            f"{name}: {few} of {len(rows)} experts read fewer than {_FEW} tokens of the "
            "calibration text: give a longer one",
            WeightWarning,
            stacklevel=2,
        )


def _grid(weight: jax.Array, scheme: Scheme, name: str) -> Grid:
    return scheme.weights, scheme.group_of(weight.shape[-1], name), scheme.zeros


def _row_scales(part: Part, path: str, n_rows: int, scales: dict[str, jax.Array]) -> jax.Array:
    """Return the divisor of each row of a weight from folding."""
    for site in sites(part):
        if site.source == path and site.rows is not None and site.name in scales:
            return row_factor(site, n_rows, scales[site.name])
    return jnp.ones((n_rows,), jnp.float32)


def _describe(w: QTensor) -> str:
    name = jnp.dtype(w.dtype).name
    group = "" if w.scale.shape[-1] == 1 else f" g{w.group_size}"
    zero = "" if w.zero is None else " zero"
    return name + group + zero + (f" x {w.activations}" if w.activations else "")


def _join(prefix: str, path: str) -> str:
    return f"{prefix}/{path}" if prefix else path


def _leaves(tree: Params) -> list[Leaf]:
    return jax.tree.leaves(tree, is_leaf=is_packed)
