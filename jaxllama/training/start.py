"""The start of a run: its model, its first weights, its teacher.

Everything that data and checkpoints can contradict is checked here, before the first step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxllama.checkpoints.hf.config import config_to_hf
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.loading import load
from jaxllama.model.eagle3 import Eagle3Head
from jaxllama.model.mixers import has_states
from jaxllama.model.stacked import stack_layers
from jaxllama.quantization.random_params import random_params
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import draft
from jaxllama.training.adapters import first_adapters, with_magnitudes
from jaxllama.training.config import TrainConfig
from jaxllama.training.data import TokenFile, naming
from jaxllama.training.distill import answer_scales, scaled, student_config, student_params
from jaxllama.training.optimizer import Multipliers, multipliers_of
from jaxllama.training.packing import Conversations
from jaxllama.training.prompts import PromptFile
from jaxllama.typing import Params
from pallas_kernels.qtensor import QTensor, leaves_of

Data = TokenFile | Conversations | PromptFile


def open_data(config: TrainConfig) -> Data:
    """Open the data of a run. Raises JaxLlamaError naming what is missing or wrong."""
    if config.data.tokens is not None:
        return TokenFile.open(config.data.tokens)
    if config.data.prompts is not None:
        return PromptFile.open(config)
    return Conversations.open(config)


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """The static arguments of the compiled step; hashable.

    teacher: of a distillation, or the model that a head drafts for. head: that head; ``model`` is
    then its layer's. multipliers: of the model's folded parameters (``training.optimizer``).
    """

    config: TrainConfig
    model: ModelConfig
    teacher: ModelConfig | None = None
    head: Eagle3Head | None = None
    multipliers: Multipliers = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "multipliers", multipliers_of(self.model))


def begin(
    config: TrainConfig, data: Data, progress: bool = False
) -> tuple[TrainingSetup, Params, Params | None]:
    """Return (setup, float32 parameters that learn, the parameters that do not).

    The latter are a teacher's, the weights beneath adapters, or the model beside a head. They have
    the activations' dtype or codes, and are stacked with ``scan``. Raises JaxLlamaError naming the
    key that data or checkpoint contradicts.
    """
    if config.goal.kind == "draft":
        return _begin_draft(config, data, progress)
    if config.lora is not None:
        return _begin_adapters(config, data, progress)
    distill = config.distill
    teacher: ModelConfig | None = None
    teacher_params: Params | None = None
    if distill is not None:
        with naming("distill.teacher", distill.teacher):
            lm = load(distill.teacher, config.dtype, exact=True, progress=progress)
        teacher, teacher_params = lm.config, lm.params
    key = jax.random.key(config.seed)
    if config.init_from is not None:
        with naming("init_from", config.init_from):
            lm = load(config.init_from, "float32", exact=True, progress=progress)
        model, params = lm.config, lm.params
        if leaves_of(params, QTensor):
            raise JaxLlamaError(f"init_from = {config.init_from!r}: quantized weights do not learn")
    elif config.model is not None:
        model = _new_model(config, data)
        # compiles a program for each shape, not one for all weights
        params = random_params(model, key)
    else:
        assert distill is not None and teacher is not None and teacher_params is not None
        model = student_config(teacher, distill.attention_layers)
        params = student_params(model, teacher_params, key)
    # No objective trains a head for multi-token prediction, and decay would spoil it.
    model, params = model.replace(mtp_layers=0), {k: v for k, v in params.items() if k != "mtp"}
    setup = TrainingSetup(config, model, teacher)
    _check(setup, data)
    if config.model is None and config.init_from is None:
        length = config.sequence_length
        assert isinstance(data, TokenFile)  # a distillation's
        rows = data.batch(0, min(4, config.batch_size), length, config.seed)[:, :length]
        scales = answer_scales(model, teacher, params, teacher_params, rows, config.dtype)
        params = scaled(params, scales)
    if config.scan and teacher is not None:
        teacher_params = stack_layers(teacher, teacher_params)
    # The step donates its state, and a checkpoint's arrays may share memory with others.
    return setup, jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params), teacher_params


def _begin_adapters(
    config: TrainConfig, data: Data, progress: bool
) -> tuple[TrainingSetup, Params, Params]:
    """``begin`` of adapters beside frozen weights."""
    lora = config.lora
    assert lora is not None
    if config.init_from is not None:
        # Exact: a CPU would round activations to 8 bits, which have no gradient.
        with naming("init_from", config.init_from):
            lm = load(config.init_from, config.dtype, lora.base, exact=True, progress=progress)
        model, base = lm.config, lm.params
    else:
        model = _new_model(config, data)
        key = jax.random.key(config.seed)
        base = random_params(model, key, jnp.dtype(config.dtype), lora.base)
    for leaf in leaves_of(base, QTensor):
        if leaf.activations is not None:
            raise JaxLlamaError(
                f"lora.base = {lora.base!r}: it rounds activations to {leaf.activations}, which "
                "have no gradient; schemes of weights alone train, such as w4a16, w8a16 and nvfp4"
            )
    setup = TrainingSetup(config, model)
    _check(setup, data)
    adapters = jax.device_put(first_adapters(model, lora, config.seed))
    if lora.dora:
        adapters = with_magnitudes(model, lora, adapters, base)
    return setup, adapters, stack_layers(model, base, release=True) if config.scan else base


def _begin_draft(
    config: TrainConfig, data: Data, progress: bool
) -> tuple[TrainingSetup, Params, Params]:
    """``begin`` of a head that drafts for a frozen model."""
    assert config.init_from is not None and isinstance(data, Conversations)
    with naming("init_from", config.init_from):
        lm = load(config.init_from, config.dtype, exact=True, progress=progress)
    target = lm.config.replace(mtp_layers=0)
    _check(TrainingSetup(config, target), data)
    params = {name: part for name, part in lm.params.items() if name != "mtp"}
    head, own, fixed = draft.begin(config, f"{target.name}-eagle3", target, params, data)
    return TrainingSetup(config, head.model, target, head), own, fixed


def tokenizer_of(data: Data) -> Tokenizer:
    """Return the tokenizer of a run's data."""
    return Tokenizer.from_file(data.directory) if isinstance(data, TokenFile) else data.tokenizer


def _new_model(config: TrainConfig, data: Data) -> ModelConfig:
    """Return the configuration's model with the special tokens of the data's tokenizer."""
    assert config.model is not None
    tokenizer = tokenizer_of(data)
    return config.model.replace(eos_token_ids=tokenizer.eos_ids, bos_token_id=tokenizer.bos_id)


def _check(setup: TrainingSetup, data: Data) -> None:
    config, model, teacher = setup.config, setup.model, setup.teacher
    config_to_hf(model)  # a model that cannot be saved is not trained
    for folder in (model, teacher):
        if folder is not None and folder.head_bias:
            raise JaxLlamaError(f"{folder.name}: training has no objective for a head with a bias")
    if config.router is not None and model.experts is None:
        raise JaxLlamaError(f"router = {config.router}: {model.name} has no experts")
    if config.router is not None and model.shared_kv_layers:
        raise JaxLlamaError(f"router = {config.router}: the layers of {model.name} share keys")
    if data.vocab_size > model.vocab_size:
        options = config.data
        source = options.tokens or options.conversations or options.prompts
        key = (
            "tokens" if options.tokens else "conversations" if options.conversations else "prompts"
        )
        raise JaxLlamaError(
            f"data.{key} = {source!r}: ids up to {data.vocab_size - 1}, but "
            f"{model.name}'s vocab_size is {model.vocab_size}"
        )
    if config.sequence_length > model.max_position:
        raise JaxLlamaError(
            f"sequence_length = {config.sequence_length}: exceeds {model.name}'s max_position "
            f"({model.max_position})"
        )
    if not isinstance(data, TokenFile):
        return
    training = len(data) - config.data.validation_tokens
    if training <= config.sequence_length:
        raise JaxLlamaError(
            f"data.tokens = {config.data.tokens!r}: {max(training, 0)} tokens to train on, and "
            f"one window needs {config.sequence_length + 1}"
        )
    if teacher is None:
        return
    if teacher.vocab_size != model.vocab_size:
        raise JaxLlamaError(
            f"distill.teacher: {teacher.name} has {teacher.vocab_size} tokens, and the student "
            f"{model.vocab_size}"
        )
    distill = config.distill
    if distill is not None and distill.objective == "mixers":
        shapes = [(cfg.n_layers, cfg.d_model) for cfg in (teacher, model)]
        if shapes[0] != shapes[1] or has_states(teacher):
            raise JaxLlamaError(
                f"distill.objective = 'mixers': needs a teacher of attention with the student's "
                f"layers and width; {teacher.name} and {model.name} differ"
            )
        if "gla" not in model.layer_types:
            raise JaxLlamaError("distill.objective = 'mixers': the student has no GLA layers")
