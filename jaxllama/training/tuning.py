"""The tables of a TOML file that say what a run reads and learns: data, adapters, objective.

    [data]
    conversations = "chat.jsonl"

    [lora]
    rank = 16
    alpha = 32
    targets = ["q_proj", "v_proj"]    # names of the checkpoint's modules; default: every product
    base = "w4a16"                    # QLoRA: the scheme of the frozen weights

    [objective]
    kind = "dpo"                      # default: "sft" for conversations, "pretrain" for tokens

    [samples]
    prompts = ["Who are you?"]

A run that learns from rewards has prompts as its data, and two more tables:

    [data]
    prompts = "sums.jsonl"

    [objective]
    kind = "grpo"                     # the default for prompts; or "rloo", "reinforce++"

    [rollout]
    samples = 8                       # answers to a prompt
    max_new_tokens = 16

    [reward]
    kind = "exact"                    # or "regex", "arithmetic", "json_schema", "function"

A run that trains a head that drafts for ``init_from`` has prompts, too:

    [objective]
    kind = "draft"

    [draft]
    max_new_tokens = 256
    temperature = 0.8

``training.config`` checks them against the other tables.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxllama.config.reader import require
from jaxllama.errors import JaxLlamaError

ALL_PRODUCTS = "all-linear"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data of a run: a token file, conversations, or prompts.

    Parameters
    ----------
    tokens : str or None
        A token file's folder.
    validation_tokens : int
        Number of its last tokens that are never trained on.
    conversations : str or None
        A .jsonl file of conversations (``training.conversations``). Only the model's answers count
        in the loss.
    validation_conversations : int
        Number of its last lines that are never trained on.
    prompts : str or None
        A .jsonl file of prompts that the model answers for a reward (``training.prompts``).
    validation_prompts : int
        Number of its last lines that are never trained on.
    tokenizer : str or None
        A model whose tokenizer and chat template write conversations and prompts, or "bytes";
        default ``init_from``.
    packing : bool
        Whether several conversations share a row. Each still sees only itself.
    """

    tokens: str | None = None
    validation_tokens: int = 0
    conversations: str | None = None
    validation_conversations: int = 0
    prompts: str | None = None
    validation_prompts: int = 0
    tokenizer: str | None = None
    packing: bool = True

    def __post_init__(self) -> None:
        kinds = ("tokens", "conversations", "prompts")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if not given:
            raise JaxLlamaError(
                "missing key 'data.tokens', or 'data.conversations', or 'data.prompts'"
            )
        for kind in given[1:]:
            require(False, f"data.{kind}", getattr(self, kind), f"excludes data.{given[0]}")
        for kind in kinds:
            value = getattr(self, f"validation_{kind}")
            require(value >= 0, f"data.validation_{kind}", value, "must not be negative")
            require(
                kind in given or not value,
                f"data.validation_{kind}",
                value,
                "belongs to another kind of data",
            )
        require(
            self.tokens is None or (self.tokenizer is None and self.packing),
            "data.tokens",
            self.tokens,
            "data.tokenizer and data.packing are for data.conversations",
        )
        require(
            self.prompts is None or self.packing,
            "data.packing",
            self.packing,
            "is for data.conversations",
        )

    @property
    def held_out(self) -> int:
        """Number of tokens, conversations or prompts that are never trained on."""
        return self.validation_tokens or self.validation_conversations or self.validation_prompts


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
    dora : bool
        Whether the magnitudes of the adapted weights' rows are trained apart from their directions
        (DoRA, arXiv 2402.09353).
    merge : bool
        Whether the run also writes the whole model with its adapter added, in floats.
    """

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = (ALL_PRODUCTS,)
    base: str | None = None
    dora: bool = False
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
    """The quantity that a run minimizes.

    Parameters
    ----------
    kind : str
        "pretrain" reads [data] tokens, and "sft" answers of conversations; they are the defaults.
        "dpo", "orpo" and "kto" learn from preferences (``training.preference``), and "distill" is
        that of [distill]. "grpo", "rloo" and "reinforce++" learn from rewards
        (``training.policy``). "draft" trains a head that drafts for ``init_from``
        (``training.draft``).
    beta : float
        Strength of the reference in DPO and KTO, weight of the odds in ORPO, weight of the
        divergence from the reference where rewards teach. There 0 needs no reference.
    desirable_weight, undesirable_weight : float
        Weights of KTO's two kinds of answers.
    clip : float
        Where rewards teach: ratios of new to old probabilities outside of 1 - clip to 1 + clip
        gain nothing.
    """

    kind: Literal[
        "pretrain",
        "sft",
        "dpo",
        "orpo",
        "kto",
        "distill",
        "grpo",
        "rloo",
        "reinforce++",
        "draft",
    ]
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    clip: float = 0.2

    def __post_init__(self) -> None:
        for key in ("beta", "desirable_weight", "undesirable_weight", "clip"):
            value = getattr(self, key)
            if key == "beta" and self.has_rewards:
                require(value >= 0, f"objective.{key}", value, "must not be negative")
            else:
                require(value > 0, f"objective.{key}", value, "must be positive")

    @property
    def has_rewards(self) -> bool:
        """Whether the model's own answers are rewarded."""
        return self.kind in ("grpo", "rloo", "reinforce++")

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


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How the model answers the prompts of a step, at temperature 1 and without truncation.

    Parameters
    ----------
    max_new_tokens : int
        Largest number of tokens of an answer.
    samples : int
        Answers to a prompt; divides ``batch_size``, the answers of a step.
    updates : int
        Updates with the same answers. From the second on, ratios differ from 1 and are clipped.
    slots : int
        Answers that the engine writes at a time; with ``deterministic`` at most 512 on a GPU.
    deterministic : bool
        Whether the engine's own log-probabilities are the policy's, to the bit
        (``training.policy``).
    sleep : bool
        Whether the engine frees its cache and its copy of the weights while the trainer updates.
    importance_cap : float
        Largest weight of a token for the difference between the sampler's and the trainer's
        log-probabilities; 0 gives every token the weight 1.
    """

    max_new_tokens: int
    samples: int = 8
    updates: int = 1
    slots: int = 32
    deterministic: bool = False
    sleep: bool = False
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "updates", "slots"):
            value = getattr(self, key)
            require(value >= 1, f"rollout.{key}", value, "must be at least 1")
        require(
            self.samples >= 2, "rollout.samples", self.samples, "must be at least 2, to compare"
        )
        cap = self.importance_cap
        require(cap == 0 or cap >= 1, "rollout.importance_cap", cap, "must be 0 or at least 1")

    def check(self, batch_size: int, sequence_length: int) -> None:
        """Raise JaxLlamaError if the sizes do not fit those of a run."""
        require(
            batch_size % self.samples == 0,
            "rollout.samples",
            self.samples,
            f"must divide batch_size ({batch_size})",
        )
        require(
            self.max_new_tokens < sequence_length,
            "rollout.max_new_tokens",
            self.max_new_tokens,
            f"leaves no room for prompts in sequence_length ({sequence_length})",
        )


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A head that drafts, and the answers of the model beside it that the head learns from.

    Parameters
    ----------
    vocab_size : int
        Largest number of tokens that the head has: the most frequent ones of the answers.
    depth : int
        Test-time steps: tokens of a draft that the head learns to propose.
    max_new_tokens : int
        Largest number of tokens of an answer.
    temperatures : tuple of float
        Of the answers to each prompt, one at each; 0 is greedy.
    """

    vocab_size: int = 32000
    depth: int = 7
    max_new_tokens: int = 256
    temperatures: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for key in ("vocab_size", "depth", "max_new_tokens"):
            value = getattr(self, key)
            require(value >= 1, f"draft.{key}", value, "must be at least 1")
        values = self.temperatures
        require(bool(values), "draft.temperatures", list(values), "must not be empty")
        require(min(values) >= 0, "draft.temperatures", list(values), "must not be negative")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The reward of an answer, which ``training.rewards`` computes.

    Parameters
    ----------
    kind : str
        "exact": the answer is the line's "answer". "regex": ``pattern`` occurs, and its first
        group, if any, is the line's "answer". "arithmetic": the last number of the answer is the
        value of the line's "answer", a number or an expression. "json_schema": the answer is JSON
        of ``schema``. "function": ``function`` returns the reward.
    pattern : str or None
        A regular expression of Python.
    schema : str or None
        A file; without one, each line has a "schema".
    function : str or None
        "module:function", called as (answer, line) with the answer's text and the line's object.
    """

    kind: Literal["exact", "regex", "arithmetic", "json_schema", "function"]
    pattern: str | None = None
    schema: str | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        owners = {"pattern": "regex", "schema": "json_schema", "function": "function"}
        for key, kind in owners.items():
            value = getattr(self, key)
            require(
                value is None or self.kind == kind, f"reward.{key}", value, f"is for kind = {kind}"
            )
            require(
                value is not None or self.kind != kind or key == "schema",
                f"reward.{key}",
                value,
                f"kind = {kind} needs it",
            )
