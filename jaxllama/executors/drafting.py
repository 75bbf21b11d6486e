"""The source of drafts that a caller names, checked against the model that verifies them."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts
from jaxllama.decoding.mtp import MTPDraft
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.executor import DraftSource, Executor
from jaxllama.text.rows import short
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import Params


@runtime_checkable
class Drafter(Protocol):
    """A model that drafts, or one that verifies drafts; ``LanguageModel`` is the only class."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def params(self) -> Params: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def executor(self) -> Executor: ...
    @property
    def mesh(self) -> Mesh | None: ...


def draft_source(model: Drafter, draft: str | Drafter, draft_tokens: Any) -> DraftSource:
    """Return the source of ``model``'s drafts.

    Arguments and errors are those of ``LanguageModel.drafting``.
    """
    params: Params | None = None
    if isinstance(draft, Drafter):
        _check_model(model, draft)
        source = drafts.ModelDraft(draft.config, model.config.vocab_size)
        params = draft.params
    elif draft == "ngram":
        source = drafts.NGram(unsure=not draft_tokens)
    elif draft == "mtp":
        _check_mtp(model)
        source = MTPDraft(model.config)
    else:
        raise JaxLlamaError(f'draft = {short(draft)}: expected "ngram", "mtp" or a LanguageModel')
    plan = drafts.DraftPlan.of(source, draft_tokens, model.deterministic)
    model.executor.check_drafts(model.deterministic)
    return DraftSource(plan, params)


def _check_mtp(model: Drafter) -> None:
    if not model.config.mtp_layers or "mtp" not in model.params:
        raise JaxLlamaError(
            f'draft = "mtp": {model.config.name} has no head for multi-token prediction'
        )


def _check_model(model: Drafter, draft: Drafter) -> None:
    """Raise JaxLlamaError if ``model`` cannot verify the tokens of ``draft``."""
    name = draft.config.name
    if not draft.executor.on_device:
        raise JaxLlamaError(f"draft: {name} is offloaded, and a draft lies on the device")
    if draft.mesh != model.mesh:
        raise JaxLlamaError(f"draft: {name} is not on the mesh of {model.config.name}")
    tokenizer, other = model.tokenizer, draft.tokenizer
    if tokenizer is None or other is None:
        is_same = draft.config.vocab_size == model.config.vocab_size
    else:
        is_same = tokenizer.has_ids_of(other)
    if not is_same:
        raise JaxLlamaError(f"draft: {name} has another tokenizer than {model.config.name}")
