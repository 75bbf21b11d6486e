"""The part of a LanguageModel that a process without the model needs."""

from __future__ import annotations

import dataclasses

from jaxllama.checkpoints.pooling import Pooling
from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling
from jaxllama.language_model import LanguageModel
from jaxllama.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The part of a LanguageModel that a front end needs."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    sampling: Sampling | None
    adapters: tuple[str, ...]
    pooling: Pooling | None = None
    n_classes: int = 0

    @classmethod
    def of(cls, lm: LanguageModel) -> ModelFacts:
        adapters = tuple(lm.adapters)
        return cls(lm.config, lm.tokenizer, lm.sampling, adapters, lm.pooling, lm.n_classes)
