"""Policy: the place of weights, cache and activations, and the order of the work.

    Policy.parse("20 80 0 100 0 100")      FlexGen's six numbers
    Policy.parse("0 100 100 0 100 0 gpu_batch_size=8 num_gpu_batches=4 compress_weight=true")
    Policy.parse("100 0 100 0 100 0 experts=20/80")      a mixture's experts, one by one

The six numbers are percentages of weights, cache and activations, each on the device and in host
memory; the rest is on disk. They divide every tensor by rows, and not the set of tensors, so every
percentage is possible. Source: FlexGen (arXiv 2303.06865), section 4.

Left out: percentages for each layer, and compression that differs between tiers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Options

PERCENTAGES = (
    "weights_device",
    "weights_host",
    "cache_device",
    "cache_host",
    "activations_device",
    "activations_host",
)


ALL_ON_CPU = 1e-6  # a ``cpu_expert`` that leaves all experts without a slot to the CPU
CPU_PAIRS = 128  # of a token and an expert, in a layer; of more, ``ALL_ON_CPU`` loads the experts


class Shares(NamedTuple):
    """Percentages of a tensor's rows on the device and in host memory; the rest is on disk."""

    device: float
    host: float

    @property
    def disk(self) -> float:
        return round(100.0 - self.device - self.host, 9)  # tenths of a percent may miss 0

    def rows(self, total: int) -> tuple[int, int, int]:
        """Return how many of ``total`` rows each tier holds, in the order device, host, disk."""
        device = round(total * self.device / 100)
        host = round(total * (self.device + self.host) / 100)
        return device, host - device, total - host


@dataclasses.dataclass(frozen=True)
class Policy:
    """The places of weights, cache and activations, as in FlexGen (arXiv 2303.06865).

    ``Policy.parse("20 80 0 100 0 100")`` reads one from text.

    Parameters
    ----------
    weights_device, weights_host : float
        Percentages of the weights on the device and in host memory; the rest is on disk.
    cache_device, cache_host : float
        The same of the cache.
    activations_device, activations_host : float
        The same of the activations.
    gpu_batch_size : int
        Rows that one program computes.
    num_gpu_batches : int
        Number of such batches that share one load of a unit's weights. The product of both is a
        block, and larger inputs run block by block.
    overlap : bool
        While a unit computes, load the next unit's weights and the next batch's cache, and store
        the previous batch's results.
    sep_layer : bool
        Make attention and feed-forward two units, so that half as many weights are on the device at
        once.
    compress_weight : bool
        Use FlexGen's 4-bit weights, with a scale and a zero point for each group of 64 (the scheme
        "w4a16-g64-zero"). Normally distributed weights have an RMS error of 9.1% then; symmetric
        groups of 128 have 11.7%.
    compress_cache : bool
        Use a 4-bit cache.
    cpu_attention : bool
        In decode, attend to keys in host memory on the CPU.
    attn_sparsity : float
        Share of a row's older keys whose values decode reads. The other values of an offloaded
        cache do not move.
    prefill_batch_size : int
        Tokens of a prompt that pass a unit at once; 0 leaves the choice to the caller.
    experts : str
        "DEVICE/HOST", percentages of a mixture's experts, which then lie one by one, the most used
        on the device; the rest is on disk. A step loads only the experts that its tokens choose.
        Empty: experts are divided as the layer's other weights are, and load with them.
    expert_use : str
        File of the measured use of each expert (``offload.expert_places``), which ranks them.
    cpu_expert, cpu_token : float
        Time that the CPU takes for an expert that is not on the device, for one token and for each
        further one. The unit is the time of loading that expert. A step divides such experts
        between the link and the CPU so that both end early. A ``cpu_expert`` of 0 loads all. One
        of ``ALL_ON_CPU`` leaves all to the CPU, but loads those of more than ``CPU_PAIRS`` pairs of
        a token and an expert, which a prompt has.

    Raises
    ------
    JaxLlamaError
        Names the option that is out of range, and its value.
    """

    weights_device: float = 100.0
    weights_host: float = 0.0
    cache_device: float = 100.0
    cache_host: float = 0.0
    activations_device: float = 100.0
    activations_host: float = 0.0
    gpu_batch_size: int = 8
    num_gpu_batches: int = 1
    overlap: bool = True
    sep_layer: bool = False
    compress_weight: bool = False
    compress_cache: bool = False
    cpu_attention: bool = False
    attn_sparsity: float = 1.0
    prefill_batch_size: int = 0
    experts: str = ""
    expert_use: str = ""
    cpu_expert: float = 0.0
    cpu_token: float = 0.0

    def __post_init__(self) -> None:
        for kind in ("weights", "cache", "activations"):
            shares = getattr(self, kind)
            for name, value in (("device", shares.device), ("host", shares.host)):
                if not 0 <= value <= 100:
                    raise JaxLlamaError(f"policy: {kind}_{name} = {value:g}: must be 0 to 100")
            if shares.disk < 0:
                raise JaxLlamaError(
                    f"policy: {kind}: {shares.device:g}% + {shares.host:g}% exceed 100%"
                )
        for name in ("gpu_batch_size", "num_gpu_batches"):
            if getattr(self, name) < 1:
                raise JaxLlamaError(f"policy: {name} = {getattr(self, name)}: must be at least 1")
        if self.prefill_batch_size < 0:
            raise JaxLlamaError(
                f"policy: prefill_batch_size = {self.prefill_batch_size}: must not be negative"
            )
        if not 0 < self.attn_sparsity <= 1:
            raise JaxLlamaError(f"policy: attn_sparsity = {self.attn_sparsity}: must be in (0, 1]")
        if self.cpu_attention and self.cache_device + self.cache_host != 100:
            raise JaxLlamaError("policy: cpu_attention reads host memory: no cache may be on disk")
        shares = self.expert_shares
        if shares is not None and not (min(shares) >= 0 and shares.disk >= 0):
            raise JaxLlamaError(
                f"policy: experts = {self.experts}: percentages must be 0 to 100, and 100 together"
            )
        for name in ("cpu_expert", "cpu_token"):
            if not getattr(self, name) >= 0:
                raise JaxLlamaError(f"policy: {name} = {getattr(self, name)}: must be at least 0")
        if any(letter in " ,=" or letter.isspace() for letter in self.expert_use):
            raise JaxLlamaError(
                f"policy: expert_use = {self.expert_use!r}: a path without spaces, commas and ="
            )
        for name in ("expert_use", "cpu_expert", "cpu_token"):
            if getattr(self, name) and shares is None:
                raise JaxLlamaError(f"policy: {name} needs experts=DEVICE/HOST")

    @property
    def weights(self) -> Shares:
        """Percentages of the weights on the device and in host memory."""
        return Shares(self.weights_device, self.weights_host)

    @property
    def cache(self) -> Shares:
        """Percentages of the cache on the device and in host memory."""
        return Shares(self.cache_device, self.cache_host)

    @property
    def activations(self) -> Shares:
        """Percentages of the activations on the device and in host memory."""
        return Shares(self.activations_device, self.activations_host)

    @property
    def expert_shares(self) -> Shares | None:
        """Percentages of the experts that lie one by one; None if they lie with their layer."""
        if not self.experts:
            return None
        parts = self.experts.split("/")
        if len(parts) != 2:
            raise JaxLlamaError(f"policy: experts = {self.experts!r}: expected DEVICE/HOST")
        return Shares(*(_number("experts", part) for part in parts))

    @property
    def computes_all(self) -> bool:
        """Whether the CPU computes all experts that are not on the device, of few pairs."""
        return 0 < self.cpu_expert <= ALL_ON_CPU and not self.cpu_token

    def of_pairs(self, pairs: int) -> Policy:
        """Return the policy for a layer with so many pairs of a token and an expert."""
        loads = self.computes_all and pairs > CPU_PAIRS
        return dataclasses.replace(self, cpu_expert=0.0) if loads else self

    @property
    def block_size(self) -> int:
        """Rows that share one load of the weights."""
        return self.gpu_batch_size * self.num_gpu_batches

    @property
    def moves(self) -> bool:
        """Whether anything leaves the device, or attention runs elsewhere."""
        shares = self.weights, self.cache, self.activations, self.expert_shares or Shares(100, 0)
        return self.cpu_attention or any(share.device < 100 for share in shares)

    def also(self, **asked: Any) -> Policy:
        """Return the policy with further options. An option of None changes nothing.

        Raises JaxLlamaError if this policy already sets an option to another value.
        """
        asked = {name: value for name, value in asked.items() if value is not None}
        for field in dataclasses.fields(self):
            kept, value = getattr(self, field.name), asked.get(field.name)
            if value is not None and kept not in (field.default, value):
                raise JaxLlamaError(
                    f"policy: {field.name} = {kept}, and beside it {value} is asked for"
                )
        return dataclasses.replace(self, **asked)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Return the policy of six percentages, followed by any ``field=value``.

        Parameters
        ----------
        text : str
            For example "0 100 100 0 100 0 gpu_batch_size=8".

        Raises
        ------
        JaxLlamaError
            Naming the invalid part and what is allowed.
        """
        words = text.replace(",", " ").split()
        numbers = [word for word in words if "=" not in word]
        if len(numbers) != 6:
            raise JaxLlamaError(
                f"policy {text!r}: expected six percentages (weights, cache, activations; each on "
                f"the device and in host memory), found {len(numbers)}"
            )
        named = zip(PERCENTAGES, numbers, strict=True)
        values: Options = {name: _number(name, word) for name, word in named}
        fields = {field.name: field for field in dataclasses.fields(cls)}
        options = [name for name in fields if name not in PERCENTAGES]
        for word in (word for word in words if "=" in word):
            name, _, value = word.partition("=")
            if name not in options:
                raise JaxLlamaError(
                    f"policy: unknown option {name!r}; allowed: {', '.join(options)}"
                )
            values[name] = _value(name, value, type(fields[name].default))
        return cls(**values)

    def __str__(self) -> str:
        """Return text for ``parse``: the percentages, then the fields without their defaults."""
        words = [f"{getattr(self, name):g}" for name in PERCENTAGES]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in PERCENTAGES and value != field.default:
                word = str(value).lower() if isinstance(value, bool) else str(value)
                words.append(f"{field.name}={word}")
        return " ".join(words)


def _number(name: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise JaxLlamaError(f"policy: {name} = {word!r}: expected a percentage") from None


def _value(name: str, word: str, kind: type) -> bool | int | float | str:
    if kind is bool:
        if word.lower() not in ("true", "false"):
            raise JaxLlamaError(f"policy: {name} = {word!r}: expected true or false")
        return word.lower() == "true"
    try:
        return kind(word)
    except ValueError:
        raise JaxLlamaError(f"policy: {name} = {word!r}: expected a number") from None
