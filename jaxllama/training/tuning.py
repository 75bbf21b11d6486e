"""The tables of a TOML file that fine-tune a model: adapters, objective, samples of its answers.

    [lora]
    rank = 16
    alpha = 32
    targets = ["q_proj", "v_proj"]    # names of the checkpoint's modules; default: every product
    base = "w4a16"                    # QLoRA: the scheme of the frozen weights

    [objective]
    kind = "dpo"                      # default: "sft" for conversations, "pretrain" for tokens

    [samples]
    prompts = ["Who are you?"]

``training.config`` checks them against the other tables.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxllama.errors import JaxLlamaError

ALL_PRODUCTS = "all-linear"


def require(condition: bool, key: str, value: object, why: str) -> None:
    """Raise JaxLlamaError naming the key and its value unless ``condition``."""
    if not condition:
        raise JaxLlamaError(f"{key} = {value!r}: {why}")


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685); nothing else is trained.

    Parameters
    ----------
    rank : int
        Rank r of every adapter.
    alpha : float
        Multiplier: a weight becomes ``w + alpha / r * b a``.
    targets : tuple of str
        Modules that get adapters, by the last part of their name in the checkpoint ("q_proj").
        "all-linear" stands for every product of the layers that can have one.
    base : str or None
        Scheme of the frozen weights, such as "w4a16" or "nvfp4" (QLoRA, arXiv 2305.14314). It must
        leave activations in floats. None keeps the checkpoint's weights in ``dtype``.
    merge : bool
        Whether the run also writes the whole model with its adapter added, in floats.
    """

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = (ALL_PRODUCTS,)
    base: str | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        require(self.rank >= 1, "lora.rank", self.rank, "must be at least 1")
        require(self.alpha > 0, "lora.alpha", self.alpha, "must be positive")
        require(bool(self.targets), "lora.targets", list(self.targets), "names no module")

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """What a run minimizes.

    Parameters
    ----------
    kind : str
        "pretrain" reads [data] tokens, and "sft" answers of conversations; they are the defaults.
        "dpo", "orpo" and "kto" learn from preferences (``training.preference``), and "distill" is
        that of [distill].
    beta : float
        Strength of the reference in DPO and KTO, weight of the odds in ORPO.
    desirable_weight, undesirable_weight : float
        Weights of KTO's two kinds of answers.
    """

    kind: Literal["pretrain", "sft", "dpo", "orpo", "kto", "distill"]
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for key in ("beta", "desirable_weight", "undesirable_weight"):
            value = getattr(self, key)
            require(value > 0, f"objective.{key}", value, "must be positive")

    @property
    def has_pairs(self) -> bool:
        """Whether the data are pairs of sequences."""
        return self.kind in ("dpo", "orpo", "kto")

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads the first model's log-probabilities."""
        return self.kind in ("dpo", "kto")


@dataclasses.dataclass(frozen=True)
class SamplesConfig:
    """Questions that the model answers at every validation; greedy, into samples.jsonl.

    prompts: a user's messages. max_new_tokens: of an answer.
    """

    prompts: tuple[str, ...]
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        require(bool(self.prompts), "samples.prompts", list(self.prompts), "asks nothing")
        require(
            self.max_new_tokens >= 1,
            "samples.max_new_tokens",
            self.max_new_tokens,
            "must be at least 1",
        )
