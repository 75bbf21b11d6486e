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
from jaxllama.model.stacked import stack_layers
from jaxllama.quantization.random_params import random_params
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training.config import TrainConfig
from jaxllama.training.data import TokenFile
from jaxllama.training.distill import answer_scales, scaled, student_config, student_params
from jaxllama.typing import Params
from pallas_kernels.qtensor import QTensor


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """The static arguments of the compiled step; hashable."""

    config: TrainConfig
    model: ModelConfig
    teacher: ModelConfig | None = None


def begin(
    config: TrainConfig, data: TokenFile, progress: bool = False
) -> tuple[TrainingSetup, Params, Params | None]:
    """Return (setup, float32 parameters, the teacher's parameters).

    The teacher's parameters have the activations' dtype, and are stacked with ``scan``. Raises
    JaxLlamaError naming the key that data or checkpoint contradicts.
    """
    distill, teacher, teacher_params = config.distill, None, None
    if distill is not None:
        lm = load(distill.teacher, config.dtype, exact=True, progress=progress)
        teacher, teacher_params = lm.config, lm.params
    key = jax.random.key(config.seed)
    if config.init_from is not None:
        lm = load(config.init_from, "float32", exact=True, progress=progress)
        model, params = lm.config, lm.params
        if any(isinstance(leaf, QTensor) for leaf in _leaves(params)):
            raise JaxLlamaError(f"init_from = {config.init_from!r}: quantized weights do not learn")
    elif config.model is not None:
        # A new model uses the tokenizer of the data.
        tokenizer = Tokenizer.from_file(data.directory)
        model = config.model.replace(eos_token_ids=tokenizer.eos_ids, bos_token_id=tokenizer.bos_id)
        # compiles a program for each shape, not one for all weights
        params = random_params(model, key)
    else:
        assert distill is not None and teacher is not None
        model = student_config(teacher, distill.attention_layers)
        params = student_params(model, teacher_params, key)
    # No objective trains a head for multi-token prediction, and decay would spoil it.
    model, params = model.replace(mtp_layers=0), {k: v for k, v in params.items() if k != "mtp"}
    setup = TrainingSetup(config, model, teacher)
    _check(setup, data)
    if config.model is None and config.init_from is None:
        length = config.sequence_length
        rows = data.batch(0, min(4, config.batch_size), length, config.seed)[:, :length]
        scales = answer_scales(model, teacher, params, teacher_params, rows, config.dtype)
        params = scaled(params, scales)
    if config.scan and teacher is not None:
        teacher_params = stack_layers(teacher, teacher_params)
    # The step donates its state, and a checkpoint's arrays may share memory with others.
    return setup, jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params), teacher_params


def _leaves(params: Params) -> list:
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QTensor))


def _check(setup: TrainingSetup, data: TokenFile) -> None:
    config, model, teacher = setup.config, setup.model, setup.teacher
    config_to_hf(model)  # a model that cannot be saved is not trained
    for one in (model, teacher):
        if one is not None and one.head_bias:
            raise JaxLlamaError(f"{one.name}: training has no objective for a head with a bias")
    if data.vocab_size > model.vocab_size:
        raise JaxLlamaError(
            f"data.tokens = {config.data.tokens!r}: ids up to {data.vocab_size - 1}, but "
            f"{model.name}'s vocab_size is {model.vocab_size}"
        )
    if config.sequence_length > model.max_position:
        raise JaxLlamaError(
            f"sequence_length = {config.sequence_length}: exceeds {model.name}'s max_position "
            f"({model.max_position})"
        )
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
        if shapes[0] != shapes[1] or teacher.has_states:
            raise JaxLlamaError(
                f"distill.objective = 'mixers': needs a teacher of attention with the student's "
                f"layers and width; {teacher.name} and {model.name} differ"
            )
        if "gla" not in model.layer_types:
            raise JaxLlamaError("distill.objective = 'mixers': the student has no GLA layers")
