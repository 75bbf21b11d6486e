"""TrainConfig: the settings of one training run, and their TOML file.

    steps = 1000
    batch_size = 32                  # sequences a step
    sequence_length = 512
    learning_rate = 3e-4             # the peak
    model = "gla-340m"               # a preset, a model's .toml, or a table [model] with its keys
    [data]
    tokens = "data/bible"            # made by `jaxllama tokenize`

The first weights are random (``model``), a checkpoint's (``init_from``), or those of a teacher's
student (``[distill]`` alone). Every other key has the default below. Paths are relative to the
working directory, except a model's .toml, which is relative to the file that names it. A file is
checked whole before anything is loaded. Checks that need data and checkpoints run before the first
step.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

from jaxllama.config import (
    FlatConfig,
    ModelConfig,
    expand,
    from_dict,
    load_config,
    read_toml,
    shipped,
)
from jaxllama.config.reader import require
from jaxllama.errors import JaxLlamaError
from jaxllama.training.tuning import (
    DataConfig,
    DraftConfig,
    LoraConfig,
    ObjectiveConfig,
    RewardConfig,
    RolloutConfig,
    SamplesConfig,
)
from jaxllama.typing import JsonObject


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW.

    The learning rate rises linearly for ``warmup_steps`` and then falls as a cosine to
    ``final_share`` of its peak. Matrices decay; vectors (norms, biases) and scales do not.
    clip_norm: largest norm of the whole gradient; 0 clips nothing.
    """

    warmup_steps: int = 0
    final_share: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for key in ("b1", "b2"):
            value = getattr(self, key)
            require(0 <= value < 1, f"optimizer.{key}", value, "must be in [0, 1)")
        require(self.eps > 0, "optimizer.eps", self.eps, "must be positive")
        for key in ("warmup_steps", "weight_decay", "clip_norm"):
            value = getattr(self, key)
            require(value >= 0, f"optimizer.{key}", value, "must not be negative")
        require(
            0 <= self.final_share <= 1,
            "optimizer.final_share",
            self.final_share,
            "must be in [0, 1]",
        )


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """A teacher (a model for ``load``) and the objective of its student.

    objective: "logits" minimizes ``kl_weight * temperature^2 * KL(teacher || student) + ce_weight *
    CE`` over the whole model. With "mixers" every GLA mixer learns its teacher's attention on the
    teacher's own inputs, and nothing else changes. attention_layers: layers that stay attention in
    a student made from the teacher (a hybrid).
    """

    teacher: str
    objective: Literal["logits", "mixers"] = "logits"
    kl_weight: float = 1.0
    ce_weight: float = 0.1
    temperature: float = 1.0
    attention_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in ("kl_weight", "ce_weight"):
            require(
                getattr(self, key) >= 0,
                f"distill.{key}",
                getattr(self, key),
                "must not be negative",
            )
        require(
            self.kl_weight + self.ce_weight > 0,
            "distill.kl_weight",
            self.kl_weight,
            "with ce_weight = 0 there is nothing to minimise",
        )
        require(self.temperature > 0, "distill.temperature", self.temperature, "must be positive")


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """Quantization-aware training of every matmul weight.

    "w8a16" has one scale per output channel. "w4a16" has one per group of inputs, and begins at
    w4a16-sym's grids. zeros: whether there is an offset beside each scale.
    """

    scheme: Literal["w8a16", "w4a16"]
    zeros: bool = False


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """Losses of the routers of a mixture of experts, which are added to the cross entropy.

    balance: weight of the load-balance loss. z: weight of the z-loss. (``training.routers``)
    """

    balance: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        for key in ("balance", "z"):
            value = getattr(self, key)
            require(value >= 0, f"router.{key}", value, "must not be negative")
        require(
            self.balance + self.z > 0, "router.balance", self.balance, "with z = 0 adds nothing"
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The settings of one training run.

    Parameters
    ----------
    data : DataConfig
        The token file.
    steps, batch_size, sequence_length : int
        Number of updates, sequences of an update, tokens of a sequence.
    learning_rate : float
        The peak of the learning rate.
    model : ModelConfig or None
        A new model with random weights.
    init_from : str or None
        A checkpoint that the run continues from.
    distill : DistillConfig or None
        A teacher and the objective of its student.
    quantize : QuantizeConfig or None
        Quantization-aware training.
    objective : ObjectiveConfig or None
        What is minimized; by default what the data are for.
    router : RouterConfig or None
        Losses of the routers of a mixture of experts.
    lora : LoraConfig or None
        Trains adapters beside frozen weights, not the weights.
    samples : SamplesConfig or None
        Questions that the model answers during training.
    rollout : RolloutConfig or None
        How the model answers prompts to learn from rewards.
    reward : RewardConfig or None
        The reward of an answer.
    draft : DraftConfig or None
        A head that drafts for ``init_from``.
    optimizer : OptimizerConfig
        Options of AdamW.
    seed : int
        Seed of weights and batches.
    microbatches : int
        Number of parts in which a step's sequences pass the model, one after the other.
    dtype : str
        Dtype of activations; weights and sums are float32.
    products : str or None
        "fp8" multiplies the layers' matrices in float8_e4m3fn (``training.fp8``). None multiplies
        them in ``dtype``.
    remat : bool
        Whether the backward pass recomputes a layer's activations instead of keeping them.
    scan : bool
        Whether layers of one kind are compiled once and run as a loop, which a deep model needs.
    fsdp : bool
        Whether the devices of a mesh divide the weights and moments too (``training.fsdp``).
    validate_every, checkpoint_every : int
        Number of steps between two validations or checkpoints; 0 means only at the end.
    keep_checkpoints : int
        Number of checkpoints that are kept.
    keep_best : bool
        Whether the result has the parameters of the lowest validation loss, not the last ones.
    peak_tflops : float or None
        Peak of the device for MFU, if it is unknown.

    Raises
    ------
    JaxLlamaError
        Naming the key, its value and what is allowed.
    """

    data: DataConfig
    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float
    model: ModelConfig | None = None
    init_from: str | None = None
    distill: DistillConfig | None = None
    quantize: QuantizeConfig | None = None
    objective: ObjectiveConfig | None = None
    router: RouterConfig | None = None
    lora: LoraConfig | None = None
    samples: SamplesConfig | None = None
    rollout: RolloutConfig | None = None
    reward: RewardConfig | None = None
    draft: DraftConfig | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    seed: int = 0
    microbatches: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    products: Literal["fp8"] | None = None
    remat: bool = False
    scan: bool = False
    fsdp: bool = False
    validate_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 1
    keep_best: bool = False
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        for key in ("steps", "batch_size", "sequence_length", "microbatches", "keep_checkpoints"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "must be at least 1")
        for key in ("validate_every", "checkpoint_every", "seed"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "must not be negative")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "must be positive")
        require(
            self.peak_tflops is None or self.peak_tflops > 0,
            "peak_tflops",
            self.peak_tflops,
            "must be positive",
        )
        require(
            self.batch_size % self.microbatches == 0,
            "microbatches",
            self.microbatches,
            f"must divide batch_size ({self.batch_size})",
        )
        require(
            self.optimizer.warmup_steps < self.steps,
            "optimizer.warmup_steps",
            self.optimizer.warmup_steps,
            f"must be below steps ({self.steps})",
        )
        for key in ("validate_every", "keep_best"):
            require(
                not (getattr(self, key) and not self.data.held_out),
                key,
                getattr(self, key),
                "needs data.validation_tokens above 0, or validation_conversations or _prompts",
            )
        if self.data.validation_tokens:
            require(
                self.data.validation_tokens > self.sequence_length,
                "data.validation_tokens",
                self.data.validation_tokens,
                f"must exceed sequence_length ({self.sequence_length})",
            )
        self._check_start()
        self._check_tuning()
        self._check_draft()
        self._check_rewards()
        mixers = self.distill is not None and self.distill.objective == "mixers"
        others = {"lora": self.lora, "quantize": self.quantize, "mixers": mixers}
        for key in filter(lambda key: getattr(self, key), ("products", "fsdp")):
            for name in filter(others.get, others):
                require(False, key, getattr(self, key), f"excludes {name}: leave one of them out")
        require(not (self.fsdp and self.router), "fsdp", self.fsdp, "excludes [router]")
        if self.model is not None:
            require(
                self.sequence_length <= self.model.max_position,
                "sequence_length",
                self.sequence_length,
                f"exceeds the model's max_position ({self.model.max_position})",
            )

    @property
    def goal(self) -> ObjectiveConfig:
        """``objective``, or what the data are for."""
        if self.objective is not None:
            return self.objective
        if self.distill is not None:
            return ObjectiveConfig("distill")
        if self.draft is not None:
            return ObjectiveConfig("draft")
        if self.data.prompts is not None:
            return ObjectiveConfig("grpo")
        return ObjectiveConfig("pretrain" if self.data.conversations is None else "sft")

    @property
    def drafting(self) -> DraftConfig:
        """``draft``, or its defaults."""
        return self.draft or DraftConfig()

    @property
    def answer_tokens(self) -> int:
        """Largest number of tokens of an answer to a prompt."""
        return self.drafting.max_new_tokens if self.rollout is None else self.rollout.max_new_tokens

    def _check_start(self) -> None:
        """Check that the weights have exactly one source, and that nothing contradicts it."""
        require(
            self.model is None or self.init_from is None,
            "init_from",
            self.init_from,
            "excludes model, which is the checkpoint's own",
        )
        distill = self.distill
        if distill is None:
            require(
                self.model is not None or self.init_from is not None,
                "model",
                None,
                "is needed, or init_from, or [distill]",
            )
            return
        named = "model" if self.model else "init_from" if self.init_from else None
        require(
            not (distill.attention_layers and named),
            "distill.attention_layers",
            list(distill.attention_layers),
            f"is for a student made from the teacher, and here {named} says what it is",
        )
        require(
            not (distill.objective == "mixers" and self.quantize),
            "distill.objective",
            "mixers",
            "excludes [quantize]; allowed with it: logits",
        )
        require(
            not (distill.objective == "mixers" and self.scan),
            "distill.objective",
            "mixers",
            "excludes scan; allowed with it: logits",
        )
        require(
            not (distill.objective == "mixers" and self.model),
            "distill.objective",
            "mixers",
            "learns the teacher's layers: leave model out",
        )

    def _check_tuning(self) -> None:
        """Check that the tables of fine-tuning do not contradict the others."""
        require(
            self.lora is None or self.quantize is None,
            "lora.base",
            self.lora and self.lora.base,
            "[lora] excludes [quantize]; lora.base is the scheme of frozen weights",
        )
        goal = self.goal
        needs = {"pretrain": "data.tokens", "distill": "[distill]"}.get(
            goal.kind,
            "data.prompts" if goal.has_rewards or goal.kind == "draft" else "data.conversations",
        )
        kind = next(
            kind
            for kind in ("tokens", "conversations", "prompts")
            if getattr(self.data, kind) is not None
        )
        has = "[distill]" if self.distill and kind == "tokens" else f"data.{kind}"
        require(needs == has, "objective.kind", goal.kind, f"needs {needs}")
        require(
            self.router is None or goal.kind in ("pretrain", "sft"),
            "router",
            self.router,
            f"is for the objectives pretrain and sft, not {goal.kind}",
        )
        for key in ("lora", "samples"):
            require(
                getattr(self, key) is None or self.distill is None,
                key,
                getattr(self, key),
                "excludes [distill]",
            )
        require(
            kind == "tokens" or self.distill is None,
            f"data.{kind}",
            getattr(self.data, kind),
            "excludes [distill], which reads data.tokens",
        )
        require(
            kind == "tokens" or self.init_from is not None or self.data.tokenizer is not None,
            "data.tokenizer",
            None,
            f"is needed for {kind} of a new model",
        )
        require(
            self.lora is None or not self.lora.merge or self.init_from is not None,
            "lora.merge",
            True,
            "needs init_from, whose weights take the adapter",
        )

    def _check_draft(self) -> None:
        """Check that a run that trains a head that drafts has a model, and nothing else to do."""
        if self.goal.kind != "draft":
            require(self.draft is None, "draft", self.draft, "is for objective.kind = draft")
            return
        require(self.init_from is not None, "init_from", None, "is needed: the head drafts for it")
        for key in ("lora", "quantize", "router", "samples", "scan", "fsdp", "products"):
            value = getattr(self, key)
            require(not value, key, value, "excludes objective.kind = draft")
        tokens = self.drafting.max_new_tokens
        room = f"leaves no room for prompts in sequence_length ({self.sequence_length})"
        require(tokens < self.sequence_length, "draft.max_new_tokens", tokens, room)

    def _check_rewards(self) -> None:
        """Check that a run with prompts to reward, and no other, says how to answer and reward."""
        is_draft = self.goal.kind == "draft"
        is_rewarded = self.data.prompts is not None and not is_draft
        wrong = "excludes objective.kind = draft" if is_draft else "is for data.prompts"
        for key in ("rollout", "reward"):
            value = getattr(self, key)
            require(
                is_rewarded == (value is not None),
                key,
                value,
                wrong if value else "is needed for data.prompts",
            )
        if self.rollout is None:
            return
        self.rollout.check(self.batch_size, self.sequence_length)
        require(self.quantize is None, "quantize", self.quantize, "excludes data.prompts")
        require(
            self.samples is None,
            "samples",
            self.samples,
            "excludes data.prompts, whose answers samples.md shows",
        )


# Keys of a training file that name files or folders, by table.
_FILES = {"data": ("tokens", "conversations", "prompts"), "reward": ("schema",)}


def _found_in(name: Any, folder: str | Path) -> Any:
    """Return the path of ``name`` in ``folder`` if it is there and not in the current folder."""
    if not isinstance(name, str) or Path(name).exists() or not (Path(folder) / name).exists():
        return name
    return str(Path(folder) / name)


def load_train_config(path: str | Path) -> TrainConfig:
    """Return the TrainConfig of a TOML file, given by path, or of a shipped one, given by name.

    Raises JaxLlamaError naming the file, the key and what is allowed.
    """
    path = shipped("training", path)
    return train_config_from_dict(read_toml(path), str(path), path.parent)


def train_config_from_dict(data: JsonObject, where: str, folder: str | Path = ".") -> TrainConfig:
    """Return the TrainConfig of a parsed table.

    where: beginning of error messages. folder: the file's own, to which a model's .toml is
    relative, and in which data is looked for that the current folder lacks.
    """
    data = dict(data)
    for table, keys in _FILES.items():
        if isinstance(data.get(table), dict):
            own = {key: _found_in(data[table][key], folder) for key in keys if key in data[table]}
            data[table] = {**data[table], **own}
    try:
        model = data.get("model")
        if isinstance(model, str):
            named = Path(folder) / model if model.endswith(".toml") else model
            data["model"] = load_config(named)
        elif isinstance(model, dict):
            keys = {"name": Path(where).stem, **model}
            data["model"] = expand(from_dict(FlatConfig, keys, "model."))
        return from_dict(TrainConfig, data)
    except JaxLlamaError as error:
        raise JaxLlamaError(f"{where}: {error}") from None
