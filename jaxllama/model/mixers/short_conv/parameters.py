"""The parameters of a gated short convolution, and functions of them."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxllama.config import LayerConfig, MixerOptions, from_dict
from jaxllama.config.reader import requirement
from jaxllama.model.mixers.common import Heads, Sites
from jaxllama.model.names import Source
from jaxllama.model.param import Param, Path, TensorSource, rows, written

KEEPS_TOKENS = False
SPLIT = dict.fromkeys(("bcx", "conv"), 0)


@dataclasses.dataclass(frozen=True)
class ShortConvOptions:
    """Options of a short convolution: width of the streams, and taps (``[mixers.short_conv]``)."""

    width: int
    taps: int = 3

    def __post_init__(self) -> None:
        need = requirement(self, "mixers.short_conv.")
        for key in ("width", "taps"):
            need(getattr(self, key) > 0, key, "must be positive")


@dataclasses.dataclass(frozen=True)
class ShortConvNames:
    """The names of the tensors in a checkpoint; ``mixer`` is their prefix.

    is_flat: the convolution is a matrix.
    """

    mixer: str = "conv."
    inputs: str = "in_proj"
    conv: str = "conv"
    o: str = "out_proj"
    is_flat: bool = False


@functools.lru_cache(maxsize=64)
def options(layer: LayerConfig) -> ShortConvOptions:
    """Return a layer's options. Raises JaxLlamaError naming the key."""
    return from_dict(ShortConvOptions, dict(layer.mixer.options), "mixers.short_conv.")


def table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """b|c|x fused by rows, the convolution's taps, and o."""
    conv_names, d = source.names.of("short_conv", ShortConvNames()), layer.d_model
    width, taps, prefix = options(layer).width, options(layer).taps, f"{prefix}{conv_names.mixer}"
    # The checkpoint's [features, 1, W] is the same memory.
    between = () if conv_names.is_flat else (1,)
    conv = TensorSource(f"{prefix}{conv_names.conv}.weight", (width, *between, taps))
    return {
        ("bcx", "weight"): rows(
            [TensorSource(f"{prefix}{conv_names.inputs}.weight", (3 * width, d))]
        ),
        ("conv", "weight"): Param((conv,), (width, taps), std=taps**-0.5),
        **written("o", f"{prefix}{conv_names.o}", d, width, False),
    }


def heads(layer: LayerConfig) -> int:
    """Return the largest number of shards that each have a stream."""
    return options(layer).width


def obstacle(layer: LayerConfig, n: int) -> str | None:
    """Return the name of the streams that ``n`` shards do not divide, or None."""
    width = options(layer).width
    return f"the {width} streams of the short convolution" if width % n else None


def replicated(layer: LayerConfig, n: int) -> MixerOptions:
    """Return the options as they are."""
    del n
    return layer.mixer


def shard(layer: LayerConfig, n: int) -> MixerOptions:
    """Return the options of one of ``n`` shards."""
    return layer.mixer.replace(width=options(layer).width // n)


def fused_heads(layer: LayerConfig, name: str, n: int) -> Heads | None:
    """(heads, rows a head) of the parts that a parameter's rows are, None where none moves."""
    del n
    return [(options(layer).width, 1)] * 3 if name == "bcx" else None


def sites(layer: LayerConfig) -> Sites:
    """o's input is a multiple of c."""
    width = options(layer).width
    return Sites(("bcx",), "bcx", (width, 2 * width), np.arange(width))


def flops(layer: LayerConfig, sequence_length: int) -> float:
    """A token's operations beside its products with weights."""
    del sequence_length
    return 2.0 * options(layer).width * options(layer).taps
