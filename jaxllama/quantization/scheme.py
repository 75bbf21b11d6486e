"""Schemes: how each weight of a model is quantized, in one line of text; and round-to-nearest.

    parse("w4a16,down=w8a16,layer_0/*=none") -> Recipe     quantize_params(params, recipe) -> params

A scheme names the widths of weights and activations. Weight-only schemes keep activations in
floats. The others also quantize activations, inside the matmul's input.

    w8a16       int8 weights, one scale per output channel
    w4a16       int4 weights, one scale and one zero point per group of 128 inputs (the widest of
                128, 64, 32 that divides), each fitted for the least error
    w8a8        w8a16's weights, activations int8 with one scale per token
    fp8         float8_e4m3fn both, scales as in w8a8
    fp8-static  fp8 with one scale for all activations of a weight, which needs calibration
    w4a8        w4a16's weights, their groups' scales int8 multiples of one a row (two levels, as in
                QServe, arXiv 2405.04532), activations int8 with one scale per token: exact sums
    w4a8-fp8    w4a16's weights, activations float8_e4m3fn with one scale per token
    mxfp4       float4_e2m1fn weights, a power of two as the scale of 32 inputs
    nvfp4       float4_e2m1fn weights, a float8_e4m3fn scale for 16 inputs, a float32 one for all
    fp8-block   float8_e4m3fn weights, one scale for 128 x 128 of them; activations in floats
    fp8-block-a8  fp8-block's weights, activations float8_e4m3fn with a scale for 128 columns of a
                token (DeepSeek-V3, arXiv 2412.19437, section 3.3)
    none        floats

``-gN`` after w8a16 or a scheme of 4 bits fixes its group (``w4a16-g32``, ``w8a16-g128``). ``-zero``
gives the groups of w8a16 zero points; 4-bit schemes have them by default. ``-sym`` removes zero
points (``w4a16-sym``): the grid then reaches the group's largest magnitude.

A recipe is a scheme and, after commas, exceptions ``PATTERN=SCHEME``; the last matching one counts.
A pattern is a name on the weight's path (``down``, ``mlp``, ``layer_3``) or, with ``/``, the whole
path (``layer_*/mlp/down``). ``*`` and ``?`` are wildcards.

The recipe applies to the matmuls of the layers and to an untied head, and to an embedding only if
it is named (``embed=w8a16``). A tied model's head, which is the embedding, gets a quantized copy of
its own. Its scheme comes from ``head=SCHEME``, or w8a16 if the recipe's default is weight-only.
``head=none`` makes no copy, and a quantized embedding needs none. Norms, biases and the small gate
projections of GLA stay unchanged. ``docs/lab/quantization.md`` has the measured costs of rounding.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.errors import JaxLlamaError
from jaxllama.quantization.rounding import fitted, nearest
from jaxllama.typing import Leaf, Params, ParamsDict
from pallas_kernels.cpu import CpuWeight
from pallas_kernels.qtensor import FLOAT4, QTensor, RowBlocks
from pallas_kernels.rounding import E4M3, E8M0, FORMATS, format_group

SCHEMES = (
    "w8a16",
    "w4a16",
    "w8a8",
    "fp8",
    "fp8-static",
    "w4a8",
    "w4a8-fp8",
    "mxfp4",
    "nvfp4",
    "fp8-block",
    "fp8-block-a8",
)
# Parents of a "weight" that is a matmul.
_FP8 = ("float8_e4m3fn", "fp8-block")
_EXPERTS = ("experts_gate_up", "experts_down")  # [E, out, in]
_MIXERS = ("qkv", "qkvz", "zxbcdt", "q", "k", "v", "g", "o")
MATMULS = frozenset((*_MIXERS, "gate_up", "up", "down", "head", *_EXPERTS))
_NAMES = MATMULS | {"embed", "mixer", "mlp"}
_GROUPS = (128, 64, 32)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How one weight is quantized.

    weights: dtype of the codes, or a format of ``quantize``. group_size: columns per scale; None is
    a whole row, 0 the widest of 128, 64, 32 that divides. zeros: whether there are integer zero
    points beside the scales. activations: dtype of the other operand, or None for floats. static:
    whether activations have one calibrated scale instead of one per token.
    """

    weights: str
    group_size: int | None = None
    zeros: bool = False
    activations: str | None = None
    static: bool = False

    def group_of(self, width: int, name: str) -> int:
        """Return the columns per scale for ``width`` inputs; JaxLlamaError if none divides."""
        if self.group_size is None:
            return width
        if self.is_format:
            try:
                return format_group(self.weights, width)
            except ValueError as error:
                raise JaxLlamaError(f"{name}: {error}") from None
        if self.group_size:
            if width % self.group_size:
                raise JaxLlamaError(
                    f"{name}: groups of {self.group_size} do not divide its {width} inputs"
                )
            return self.group_size
        group = next((group for group in _GROUPS if width % group == 0), None)
        if group is None:
            raise JaxLlamaError(
                f"{name}: no group of 128, 64 or 32 divides its {width} inputs; 8 bits need no "
                f"groups, so use a mix: SCHEME,{name.rpartition('/')[2]}=w8a16"
            )
        return group

    @property
    def is_format(self) -> bool:
        """Whether a format fixes the groups and their scales (``pallas_kernels.rounding``)."""
        return self.weights in FORMATS

    @property
    def is_fitted(self) -> bool:
        """Whether its grids are searched for (``rounding.search_grid``)."""
        return self.weights == "int4" and self.zeros

    @property
    def two_levels(self) -> bool:
        """Whether groups' scales are int8 multiples of one number a row (``QTensor.unit``)."""
        return (self.weights, self.activations) == ("int4", "int8")

    def scale_dtype(
        self, weight: jax.Array | jax.ShapeDtypeStruct, chosen: DTypeLike | None = None
    ) -> str:
        """Return the dtype of the scales of ``weight``.

        It is float32 for whole rows and the weight's dtype for groups, unless another is
        ``chosen``. In two levels it is int8.
        """
        if self.two_levels:
            return "int8"
        default = jnp.float32 if self.group_size is None else weight.dtype
        return jnp.dtype(default if chosen is None else chosen).name


_BASES = {
    "w8a16": Scheme("int8"),
    "w4a16": Scheme("int4", group_size=0, zeros=True),
    "w8a8": Scheme("int8", activations="int8"),
    "fp8": Scheme("float8_e4m3fn", activations="float8_e4m3fn"),
    "fp8-static": Scheme("float8_e4m3fn", activations="float8_e4m3fn", static=True),
    "w4a8": Scheme("int4", group_size=0, zeros=True, activations="int8"),
    "w4a8-fp8": Scheme("int4", group_size=0, zeros=True, activations="float8_e4m3fn"),
    **{name: Scheme(name, group_size=found.group) for name, found in FORMATS.items()},
    "fp8-block-a8": Scheme("fp8-block", group_size=128, activations="float8_e4m3fn"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A scheme for every weight: ``text`` as the user wrote it, the default and the exceptions."""

    text: str
    default: Scheme | None
    rules: tuple[tuple[str, Scheme | None], ...] = ()

    def of(self, path: str) -> Scheme | None:
        """Return the scheme of the weight at a path (``layer_0/mlp/down``); None keeps floats."""
        names = path.split("/")
        scheme = self.default if names[-1] in MATMULS else None
        if names[-1] not in MATMULS and names != ["embed"]:
            return None
        return self._named(path, scheme)

    def _named(self, path: str, scheme: Scheme | None) -> Scheme | None:
        """Return the scheme of the exceptions for a path, or ``scheme`` if none matches."""
        for pattern, other in self.rules:
            names = [path] if "/" in pattern else path.split("/")
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                scheme = other
        return scheme

    @property
    def tied_head(self) -> Scheme | None:
        """The scheme of a tied head's own copy; None if the embedding stays the head."""
        embed, default = self.of("embed"), self.default
        is_weight_only = default is not None and default.activations is None
        head = self._named("head", embed or (Scheme("int8") if is_weight_only else None))
        return None if head == embed else head

    def with_rule(self, pattern: str, scheme: Scheme | None) -> Recipe:
        """Return the recipe with one more exception."""
        return dataclasses.replace(self, rules=(*self.rules, (pattern, scheme)))

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes that occur."""
        every = (self.default, *(scheme for _, scheme in self.rules))
        return tuple(dict.fromkeys(scheme for scheme in every if scheme is not None))

    def check_rounding(self) -> None:
        """Raise JaxLlamaError for a scheme that rounding to nearest cannot make."""
        if any(scheme.static for scheme in self.schemes):
            raise JaxLlamaError(
                f"scheme {self.text!r}: fp8-static needs calibrated activation scales: make a "
                "checkpoint with 'jaxllama quantize'"
            )


@functools.cache
def parse(text: str) -> Recipe:
    """Return the recipe of a text; see the module docstring.

    Raises JaxLlamaError naming the wrong part and the allowed values.
    """
    first, *rest = text.split(",")
    if "=" in first:
        raise JaxLlamaError(f"scheme {text!r}: begins with a scheme, then PATTERN=SCHEME")
    rules = []
    for entry in rest:
        pattern, equals, scheme = entry.partition("=")
        if not equals or not pattern:
            raise JaxLlamaError(f"scheme {text!r}: {entry!r} is not PATTERN=SCHEME")
        _check_pattern(text, pattern)
        rules.append((pattern, _scheme(scheme)))
    return Recipe(text, _scheme(first), tuple(rules))


def _check_pattern(text: str, pattern: str) -> None:
    """Raise JaxLlamaError for a plain name that no weight has, which is probably a typing error."""
    free = "/" in pattern or any(sign in pattern for sign in "*?[")
    if not free and pattern not in _NAMES and not re.fullmatch(r"layer_\d+", pattern):
        known = ", ".join(sorted(_NAMES))
        raise JaxLlamaError(f"scheme {text!r}: {pattern!r} is not one of {known}, layer_N")


def _scheme(text: str) -> Scheme | None:
    if text == "none":
        return None
    base = next(
        (
            name
            for name in sorted(_BASES, key=len, reverse=True)
            if text == name or text.startswith(name + "-")
        ),
        None,
    )
    if base is None:
        raise JaxLlamaError(
            f"scheme {text!r} is not one of {', '.join(SCHEMES)}, none; those of 4 bits and w8a16 "
            "take -gN, -zero and -sym, as in w4a16-sym"
        )
    scheme = _BASES[base]
    if scheme.is_format and text != base:
        raise JaxLlamaError(f"scheme {text!r}: {base} fixes its groups and has no zero points")
    for option in text[len(base) :].split("-")[1:]:
        if re.fullmatch(r"g[1-9]\d*", option):
            scheme = dataclasses.replace(scheme, group_size=int(option[1:]))
        elif option in ("zero", "sym"):
            scheme = dataclasses.replace(scheme, zeros=option == "zero")
        else:
            raise JaxLlamaError(f"scheme {text!r}: {option!r} is not one of gN, zero, sym")
    grouped = scheme.zeros or scheme.group_size is not None
    if scheme.activations and scheme.weights != "int4" and grouped and not scheme.is_format:
        raise JaxLlamaError(
            f"scheme {text!r}: groups and zero points are for weights of 4 bits and w8a16"
        )
    return scheme


def text_of(weights: Mapping[str, QTensor]) -> str:
    """Return the recipe that makes codes like those of weights, by their names ("qkv")."""
    rules = (f"{name}={_text_of(w)}" for name, w in weights.items() if name in MATMULS | {"embed"})
    return ",".join(["none", *rules])


def _text_of(w: QTensor) -> str:
    if w.dtype == FLOAT4:
        return "mxfp4" if w.scale.dtype == E8M0 else "nvfp4"
    grouped, zeros = w.scale.shape[-1] > 1, w.zero is not None
    if w.dtype == E4M3:
        if w.activations is None:
            return "fp8-block"
        return "fp8-block-a8" if grouped else "fp8"
    if w.dtype == jnp.int8:
        group = f"-g{w.group_size}" if grouped else ""
        return ("w8a8" if w.activations else "w8a16") + group + ("-zero" if zeros else "")
    base = {None: "w4a16", "int8": "w4a8"}.get(w.activations, "w4a8-fp8")
    return f"{base}-g{w.group_size}" + ("" if zeros else "-sym")


Packed = QTensor | RowBlocks | CpuWeight


def untie(params: Params, recipe: Recipe) -> tuple[ParamsDict, Recipe]:
    """Return (params, recipe) with a head of its own if the recipe quantizes a tied head.

    The new head holds the embedding's floats, so the rest of the code needs no special case.
    """
    if "embed" not in params or "head" in params or recipe.tied_head is None:
        return dict(params), recipe
    if is_packed(params["embed"]["weight"]):
        return dict(params), recipe
    embed = {name: leaf for name, leaf in params["embed"].items() if name != "bias"}
    return (
        {**params, "embed": embed, "head": params["embed"]},
        recipe.with_rule("head", recipe.tied_head),
    )


def is_packed(leaf: object) -> TypeGuard[Packed]:
    return isinstance(leaf, Packed)


def quantize_leaf(
    path: Sequence[str],
    leaf: Leaf,
    recipe: Recipe,
    scale_dtype: DTypeLike | None = None,
) -> Leaf:
    """Return one parameter of ``quantize_params``, by its path."""
    recipe.check_rounding()
    name = "/".join(path[:-1])
    chosen = recipe.of(name) if path[-1] == "weight" else None
    if chosen is None:
        return leaf
    if isinstance(leaf, Packed):
        return _with_activations(leaf, chosen) if chosen == _BASES["fp8-block-a8"] else leaf
    return round_weight(jnp.asarray(leaf), chosen, name, scale_dtype)


_T = TypeVar("_T")


def _with_activations(leaf: _T, scheme: Scheme) -> _T:
    """Return FP8 codes in blocks with the scheme's activations, and other leaves as they are."""
    if isinstance(leaf, RowBlocks):
        blocks = tuple(_with_activations(block, scheme) for block in leaf.blocks)
        return dataclasses.replace(leaf, blocks=blocks)
    if not isinstance(leaf, QTensor) or leaf.dtype != jnp.float8_e4m3fn or leaf.ndim > 3:
        return leaf
    if leaf.activations is not None:
        return leaf
    if leaf.group_size != format_group(scheme.weights, leaf.shape[-1]):
        return leaf
    return dataclasses.replace(leaf, activations=scheme.activations)


def check_experts(
    weight: jax.Array | QTensor | jax.ShapeDtypeStruct, scheme: Scheme, name: str
) -> None:
    """Raise JaxLlamaError for experts ``[E, out, in]`` with quantized activations, unless both are
    FP8."""
    is_float8 = scheme.activations == "float8_e4m3fn" and scheme.weights in _FP8
    if weight.ndim == 3 and scheme.activations is not None and not is_float8:
        raise JaxLlamaError(
            f"{name}: experts read activations in floats or FP8: add experts_*=w8a16 to the scheme"
        )


def round_weight(
    weight: jax.Array,
    scheme: Scheme,
    name: str,
    scale_dtype: DTypeLike | None = None,
    importance: jax.Array | None = None,
) -> QTensor:
    """Round ``weight[out, in]`` or ``[E, out, in]`` to nearest.

    name: for errors. scale_dtype: as in ``Scheme.scale_dtype``. importance: ``[in]`` or ``[E,
    in]``, as in ``rounding``. Raises JaxLlamaError as ``check_experts`` does.
    """
    check_experts(weight, scheme, name)
    grid = (scheme.weights, scheme.group_of(weight.shape[-1], name), scheme.zeros)
    scale_dtype = scheme.scale_dtype(weight, scale_dtype)
    if scheme.is_fitted:
        rounded = fitted(weight, importance, grid=grid, scale_dtype=scale_dtype)
    else:
        rounded = nearest(weight, 1.0, grid=grid, scale_dtype=scale_dtype)
    return dataclasses.replace(rounded, activations=scheme.activations)
