"""The source of drafts that a caller names, checked against the model that verifies them."""

from __future__ import annotations

import collections
import functools
from collections.abc import Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts
from jaxllama.decoding.gain import Gain
from jaxllama.decoding.heads import HeadDraft
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.executor import DraftSource, Executor
from jaxllama.model.decoder import activation_dtype
from jaxllama.model.eagle3 import Drafter, Eagle3Head
from jaxllama.model.mtp import MTPHead
from jaxllama.text.rows import short
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import Params


@runtime_checkable
class DraftingModel(Protocol):
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
    @property
    def gains(self) -> dict[Hashable, Mapping[tuple[int, int], Gain]]: ...


def draft_source(
    model: DraftingModel, draft: str | DraftingModel | Drafter, draft_tokens: Any
) -> DraftSource:
    """Return the source of ``model``'s drafts.

    Arguments and errors are those of ``LanguageModel.drafting``.
    """
    params: Params | None = None
    if isinstance(draft, DraftingModel):
        _check_model(model, draft)
        source = drafts.ModelDraft(draft.config, model.config.vocab_size)
        params = draft.params
    elif isinstance(draft, Drafter):
        source, params = HeadDraft(_fitted(model, draft)), draft.params
    elif draft == "ngram":
        source = drafts.NGram(unsure=not draft_tokens)
    elif draft == "mtp":
        _check_mtp(model)
        source = HeadDraft(MTPHead(model.config))
    else:
        raise JaxLlamaError(
            f'draft = {short(draft)}: expected "ngram", "mtp", a LanguageModel or a Drafter'
        )
    plan = drafts.DraftPlan.of(source, draft_tokens, model.deterministic)
    model.executor.check_drafts(model.deterministic)
    # Hosts that share a mesh must not decide by their own times.
    on_one = model.executor.on_device and model.mesh is None
    if not (plan.adaptive and on_one) or draft == "ngram":
        return DraftSource(plan, params)
    name = draft if isinstance(draft, str) else id(draft)
    gains = collections.defaultdict(functools.partial(Gain, waits=4))
    return DraftSource(plan, params, model.gains.setdefault(name, gains))


def _fitted(model: DraftingModel, draft: Drafter) -> Eagle3Head:
    """Return the head for ``model``.  Raises JaxLlamaError if it cannot draft for it."""
    name = draft.head.model.name
    if model.mesh is not None:
        raise JaxLlamaError(f"draft: {name} is on one device, and {model.config.name} on a mesh")
    own, dtype = draft.params["fc"]["weight"].dtype, activation_dtype(model.params)
    if own != dtype:
        raise JaxLlamaError(f"draft: {name} is {own}, but {model.config.name} is {dtype}")
    return draft.head.fitted(model.config, "embed" in draft.params)


def _check_mtp(model: DraftingModel) -> None:
    if not model.config.mtp_layers or "mtp" not in model.params:
        raise JaxLlamaError(
            f'draft = "mtp": {model.config.name} has no head for multi-token prediction'
        )


def _check_model(model: DraftingModel, draft: DraftingModel) -> None:
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
