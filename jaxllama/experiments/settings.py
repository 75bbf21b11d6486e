"""The settings of each workload: frozen dataclasses that refuse invalid values.

    quality   QualitySettings     speed   SpeedSettings     offload   OffloadSettings
    serve     ServeSettings       learn   LearnSettings
    train     TrainSettings, around ``training.TrainConfig``

Contract: a field's type and ``__post_init__`` check everything that can be checked without loading
anything. Messages name the key.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal, TypeAlias

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.offload.policy import Policy
from jaxllama.quantization.pipeline import check_method
from jaxllama.quantization.scheme import parse
from jaxllama.typing import JsonObject

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from jaxllama.training.config import TrainConfig

Method = Literal["rtn", "awq", "gptq", "smoothquant"]
Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "int8", "int4", "fp8"]
Workload = Literal["quality", "speed", "train", "offload", "serve", "learn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of a model, for all workloads but training.

    model: a preset, a name under ``[models]`` (random weights), a directory, a .gguf or a hub id.
    random: use random weights of the preset's shape and fetch nothing. scheme: as for ``--scheme``,
    "none" for floats. method: how its codes are found. attn_sparsity: share of the attention
    weights that decoding keeps (FlexGen, arXiv 2303.06865).
    """

    model: str
    random: bool = False
    dtype: Dtype | None = None
    scheme: str = "none"
    method: Method = "rtn"
    kv_dtype: KVDtype | None = None
    attn_sparsity: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.attn_sparsity <= 1:
            raise JaxLlamaError(f"attn_sparsity = {self.attn_sparsity}: must be in (0, 1]")
        recipe = parse(self.scheme)
        if self.method != "rtn":
            check_method(recipe, self.method)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings(ModelSettings):
    """A draft: "ngram", "mtp", "layers=N" (the model's own first layers), or a model's name.

    draft_tokens: tokens of a draft; 0 adapts the number.
    """

    draft: str | None = None
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, "draft_tokens", 0)
        if self.draft_tokens and self.draft is None:
            raise JaxLlamaError(f"draft_tokens = {self.draft_tokens}: needs a draft")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualitySettings(ModelSettings):
    """Perplexity of the first ``max_tokens`` of ``text``, KL and top-1 agreement to ``reference``.

    The text is scored in windows, as in ``jaxllama eval``. The default reference is the same model
    in floats. calibration: the text for methods and static schemes, by default the shipped one;
    ``calibration_samples`` windows of ``calibration_window`` tokens are used. decode_tokens: if
    positive, also time the decoding of this many tokens in one row. policy: offload the model, but
    not the reference.
    """

    text: str
    reference: str | None = None
    window: int = 512
    max_tokens: int | None = None
    calibration: str | None = None
    calibration_samples: int = 32
    calibration_window: int = 512
    decode_tokens: int = 0
    policy: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy is not None:
            Policy.parse(self.policy)
            if self.calibrated:
                raise JaxLlamaError("policy: codes that a text decides are not offloaded")
            if self.decode_tokens:
                raise JaxLlamaError("policy: decode_tokens is without one; see workload offload")
        for key in ("window", "max_tokens", "calibration_window"):
            at_least(self, key, 2)
        at_least(self, "calibration_samples", 1)
        if self.decode_tokens:
            at_least(self, "decode_tokens", 2)

    @property
    def calibrated(self) -> bool:
        """Whether a text decides the codes or the activations' scales."""
        return self.method != "rtn" or any(scheme.static for scheme in parse(self.scheme).schemes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedSettings(DraftSettings):
    """Settings of ``bench.run``, or with a draft of ``evaluation.speed.drafts``.

    context: tokens in every row when decoding begins. chunk: tokens of a prompt that are prefilled
    at once. With a draft one row continues the texts of configs/texts/drafts.jsonl by
    ``new_tokens``; batch, context and prompt_tokens are not read.
    """

    batch: int = 1
    context: int = 5
    prompt_tokens: int = 512
    new_tokens: int = 64
    runs: int = 5
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least in (
            ("batch", 1),
            ("context", 5),
            ("prompt_tokens", 1),
            ("runs", 1),
            ("new_tokens", 2),
            ("chunk", 1),
        ):
            at_least(self, key, least)
        no_calibration(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadSettings(DraftSettings):
    """Generation under an offloading ``policy``, which is text for ``offload.policy.Policy``."""

    policy: str
    batch: int = 1
    prompt_tokens: int = 32
    new_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least in (("batch", 1), ("prompt_tokens", 1), ("new_tokens", 2)):
            at_least(self, key, least)
        no_calibration(self)
        Policy.parse(self.policy)
        if self.draft is not None and self.draft.startswith("layers="):
            raise JaxLlamaError(
                f"draft = {self.draft!r}: the layers are offloaded, and a draft lies on the device"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeSettings(DraftSettings):
    """A queue of random prompts over ``slots`` rows (``experiments.serving``).

    batching: "continuous", where a prompt takes the slot of an answer that has ended, or "whole",
    where a batch holds its slots until its longest answer has ended. new_tokens: the longest
    answer; lengths are drawn evenly from 1 on.
    """

    batching: Literal["continuous", "whole"] = "continuous"
    requests: int = 32
    slots: int = 8
    prompt_tokens: int = 32
    new_tokens: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("requests", "slots", "prompt_tokens", "new_tokens"):
            at_least(self, key, 1)
        no_calibration(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Keys of ``training.TrainConfig``, with a ``text`` as an alternative to ``data.tokens``.

    text: a file, or "bible" for the text of ``training.corpus``. tokenizer: "bytes", or a model
    whose tokenizer splits the text.
    """

    config: TrainConfig
    text: str | None = None
    tokenizer: str = "bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnSettings:
    """Settings of ``learning.learn``: a model of bytes, trained at each learning rate.

    model: a name under ``[models]``. text: a file, "bible" or "facts". n_layers: number of the
    model's last layers that are used, by default all. held_tokens: size of each of the two parts at
    a text's end that are not trained on. facts: numbers of facts in a row of "facts", each equally
    often. distances: distances of recall in bytes. trials: number of rows for each number and each
    distance.
    """

    model: str
    text: str
    learning_rates: tuple[float, ...]
    steps: int
    batch_size: int
    sequence_length: int
    distances: tuple[int, ...]
    facts: tuple[int, ...] = (8,)
    n_layers: int | None = None
    held_tokens: int = 32768
    trials: int = 128

    def __post_init__(self) -> None:
        for key, least in (
            ("batch_size", 1),
            ("sequence_length", 4),
            ("trials", 1),
            ("steps", 20),
            ("n_layers", 1),
        ):
            at_least(self, key, least)
        if self.steps % 20:
            raise JaxLlamaError(f"steps = {self.steps}: must be a multiple of 20")
        for key, least in (("learning_rates", 0.0), ("distances", 1), ("facts", 0)):
            values = getattr(self, key)
            if not values or not all(value > least for value in values):
                raise JaxLlamaError(f"{key} = {list(values)}: one or more above {least}")
        most = min(112, self.sequence_length // 4)
        if max(self.facts) > most:
            raise JaxLlamaError(f"facts = {list(self.facts)}: must be at most {most}")


Settings: TypeAlias = (
    QualitySettings
    | SpeedSettings
    | OffloadSettings
    | ServeSettings
    | LearnSettings
    | TrainSettings
)
FACTS = "facts"
BIBLE = "bible"
NO_FILES = BIBLE, FACTS  # values of text that are no files
FILES = ("text", "calibration")  # settings that are files, on whose contents the numbers depend
SETTINGS: dict[str, type] = {
    "quality": QualitySettings,
    "speed": SpeedSettings,
    "offload": OffloadSettings,
    "serve": ServeSettings,
    "learn": LearnSettings,
}


def flatten(settings: DataclassInstance, prefix: str = "") -> JsonObject:
    """Return the settings by dotted name; a model's configuration becomes its name."""
    if isinstance(settings, TrainSettings):
        config = flatten(settings.config)
        config.pop("seed")  # seeds belong to the file
        if settings.text is None:
            return config
        config.pop("data.tokens")
        return {"text": settings.text, "tokenizer": settings.tokenizer, **config}
    flat: JsonObject = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, ModelConfig):
            flat[prefix + field.name] = value.name
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            flat.update(flatten(value, f"{prefix}{field.name}."))
        else:
            flat[prefix + field.name] = list(value) if isinstance(value, tuple) else value
    return flat


def at_least(settings: object, key: str, least: int) -> None:
    value = getattr(settings, key)
    if value is not None and value < least:
        raise JaxLlamaError(f"{key} = {value!r}: must be at least {least}")


def no_calibration(settings: ModelSettings) -> None:
    """Refuse calibration: codes do not change the speed, so these workloads round to nearest."""
    if settings.method != "rtn":
        raise JaxLlamaError(f"method = {settings.method!r}: allowed values here are rtn")
    if any(scheme.static for scheme in parse(settings.scheme).schemes):
        raise JaxLlamaError(f"scheme = {settings.scheme!r}: needs calibration, and here is none")
