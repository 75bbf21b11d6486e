"""The parameters of a Mamba-2 layer, and functions of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import numpy as np

from jaxllama.config import UNMULTIPLIED, LayerConfig, MixerOptions, from_dict
from jaxllama.config.reader import requirement
from jaxllama.model.mixers.common import Heads, Sites
from jaxllama.model.names import Source
from jaxllama.model.param import Param, Path, TensorSource, fused, tensor, written
from jaxllama.typing import Options

KEEPS_TOKENS = False
SPLIT = dict.fromkeys(("zxbcdt", "conv", "decay", "y_norm"), 0)


@dataclasses.dataclass(frozen=True)
class SSMOptions:
    """Options of a Mamba-2 layer (``[mixers.ssm]`` in TOML).

    Parameters
    ----------
    n_heads, head_dim : int
        Number and width of the heads.
    state : int
        Number of features of B and C, and so of a head's state.
    n_groups : int
        Number of groups of heads; it divides ``n_heads``. The heads of a group share B and C, and
        the norm is over a group's heads.
    taps : int
        Taps of the short convolution.
    norm_eps : float
        Epsilon of the norm.
    least_step, largest_step : float
        Bounds of dt. A ``largest_step`` of None is no bound.
    conv_bias, bias : bool
        Whether the convolution, and the input's and the output's products, have a bias.
    o_bias : bool, optional
        Whether the output's product has a bias; as ``bias`` by default.
    norm : {"gate_first", "norm_first", "none"}
        RMSNorm of the gated heads, or of the heads before the gate.

    Raises
    ------
    JaxLlamaError
        Names the option that is out of range.
    """

    n_heads: int
    head_dim: int
    state: int
    n_groups: int = 1
    taps: int = 4
    norm_eps: float = 1e-5
    least_step: float = 0.0
    largest_step: float | None = None
    conv_bias: bool = True
    bias: bool = False
    norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    o_bias: bool | None = None

    def __post_init__(self) -> None:
        need = requirement(self, "mixers.ssm.")
        for key in ("n_heads", "head_dim", "state", "n_groups", "taps"):
            need(getattr(self, key) > 0, key, "must be positive")
        divides = f"must divide n_heads ({self.n_heads})"
        need(self.n_heads % self.n_groups == 0, "n_groups", divides)

    @property
    def has_o_bias(self) -> bool:
        """Whether the output's product has a bias."""
        return self.bias if self.o_bias is None else self.o_bias

    @property
    def width(self) -> int:
        """Features of all heads."""
        return self.n_heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Features of x, B and C, which the convolution reads."""
        return self.width + 2 * self.n_groups * self.state


@dataclasses.dataclass(frozen=True)
class SSMNames:
    """The names of the tensors in a checkpoint; ``mixer`` is their prefix.

    is_gguf: A_log's tensor has -exp(A_log), it and D are ``[heads, 1]``, the convolution is a
    matrix, and the norm has a row for each group.
    """

    mixer: str = "mamba."
    inputs: str = "in_proj"
    conv: str = "conv1d"
    norm: str = "norm"
    o: str = "out_proj"
    a_log: str = "A_log"
    dt_bias: str = "dt_bias"
    skip: str = "D"
    is_gguf: bool = False


@functools.lru_cache(maxsize=64)
def options(layer: LayerConfig) -> SSMOptions:
    """Return a layer's options. Raises JaxLlamaError naming the key."""
    return from_dict(SSMOptions, dict(layer.mixer.options), "mixers.ssm.")


def table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """z|x|B|C|dt fused by rows, the convolution, what makes the decay, the norm and o."""
    ssm_names, ssm, d = source.names.of("ssm", SSMNames()), options(layer), layer.d_model
    prefix, heads = f"{prefix}{ssm_names.mixer}", ssm.n_heads
    rows = ssm.width + ssm.convolved + heads
    # The checkpoint's [features, 1, W] is the same memory.
    between, behind = ((), (1,)) if ssm_names.is_gguf else ((1,), ())
    conv = TensorSource(f"{prefix}{ssm_names.conv}.weight", (ssm.convolved, *between, ssm.taps))
    a_log = TensorSource(f"{prefix}{ssm_names.a_log}", (heads, *behind), is_rate=ssm_names.is_gguf)
    skip = TensorSource(f"{prefix}{ssm_names.skip}", (heads, *behind))
    products = source.stored.products or UNMULTIPLIED
    fold: Options = {"scale": products.ssm_input, "bias_scale": 1.0}
    if set(products.ssm_parts) != {1.0}:
        groups = ssm.n_groups * ssm.state
        sizes = ssm.width, ssm.width, groups, groups, heads
        fold["row_scales"] = tuple(zip(sizes, products.ssm_parts, strict=True))
    found = fused("zxbcdt", [(f"{prefix}{ssm_names.inputs}", rows, fold)], d, ssm.bias)
    found["conv", "weight"] = Param((conv,), (ssm.convolved, ssm.taps), std=ssm.taps**-0.5)
    if ssm.conv_bias:
        found["conv", "bias"] = tensor(f"{prefix}{ssm_names.conv}.bias", ssm.convolved, std=0.0)
    found["decay", "a_log"] = Param((a_log,), (heads,), mean=2.0, std=0.5)
    found["decay", "dt_bias"] = tensor(f"{prefix}{ssm_names.dt_bias}", heads, mean=-4.6, std=1.0)
    found["decay", "skip"] = Param((skip,), (heads,), mean=1.0, std=0.0)
    if ssm.norm != "none":
        groups = (ssm.n_groups, ssm.width // ssm.n_groups) if ssm_names.is_gguf else (ssm.width,)
        norm = TensorSource(f"{prefix}{ssm_names.norm}.weight", groups)
        found["y_norm", "weight"] = Param((norm,), (ssm.width,), mean=1.0, std=0.0)
    scale = source.residual(layer) * products.ssm_output
    return found | written("o", f"{prefix}{ssm_names.o}", d, ssm.width, ssm.has_o_bias, scale)


def heads(layer: LayerConfig) -> int:
    """Return the largest number of shards that each have a group of heads."""
    return options(layer).n_groups


def obstacle(layer: LayerConfig, n: int) -> str | None:
    """Return the name of the groups that ``n`` shards do not divide, or None: the norm is over
    all heads of a group."""
    groups = options(layer).n_groups
    return f"the {groups} groups of Mamba-2 heads" if groups % n else None


def replicated(layer: LayerConfig, n: int) -> MixerOptions:
    """Return the options as they are: each of ``n`` shards has groups of its own."""
    del n
    return layer.mixer


def shard(layer: LayerConfig, n: int) -> MixerOptions:
    """Return the options of one of ``n`` shards."""
    ssm = options(layer)
    return layer.mixer.replace(n_heads=ssm.n_heads // n, n_groups=ssm.n_groups // n)


def fused_heads(layer: LayerConfig, name: str, n: int) -> Heads | None:
    """(heads, rows a head) of the parts that a parameter's rows are, None where none moves."""
    del n
    ssm = options(layer)
    x, group = (ssm.n_heads, ssm.head_dim), (ssm.n_groups, ssm.state)
    if name == "zxbcdt":
        return [x, x, group, group, (ssm.n_heads, 1)]
    return [x, group, group] if name == "conv" else None


def sites(layer: LayerConfig) -> Sites:
    """The norm's weight stands last before o."""
    ssm = options(layer)
    source = "" if ssm.norm == "none" else "y_norm"
    return Sites(("zxbcdt",), source, None, np.arange(ssm.width))


def flops(layer: LayerConfig, sequence_length: int) -> float:
    """A token's operations beside its products with weights."""
    del sequence_length
    ssm = options(layer)
    return 4.0 * ssm.width * ssm.state
