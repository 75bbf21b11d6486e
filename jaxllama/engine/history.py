"""What an engine took, and at which step, in a journal; ``Engine.restore`` does it again.

begin(folder, lm, draft, options) -> Journal                   a new one, which says whose it is
record(journal, step, kind, entry)                             before anything is done about it
resume(folder, lm, draft) -> (Journal, options, [Entry, ...])  what to do again, in order
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxllama.engine.journal import Entry, Journal
from jaxllama.engine.options import EngineOptions, ResolvedOptions
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.lora import factors


def begin(
    folder: str | Path,
    lm: LanguageModel,
    draft: str | LanguageModel | None,
    options: ResolvedOptions,
) -> Journal:
    """draft: who proposes tokens.  Raises JaxLlamaError for a journal that another engine has
    begun."""
    journal = Journal(folder)
    if journal.history():
        journal.close()
        raise JaxLlamaError(f"{folder}: another engine's journal: Engine.restore goes on")
    asked = [field.name for field in dataclasses.fields(EngineOptions)]
    sizes = {name: getattr(options, name) for name in asked}
    header = {"model": _fingerprint(lm), "options": sizes}
    if isinstance(draft, LanguageModel):
        sizes["draft"], header["draft"] = None, _fingerprint(draft)
    journal.accept(None, "options", 0, json.dumps(header))
    return journal


def record(
    journal: Journal, step: int, kind: Literal["submit", "end"], entry: dict[str, Any]
) -> None:
    # numpy's numbers are numbers too
    journal.accept(None, kind, step, json.dumps(entry, default=lambda number: number.item()))


def resume(
    folder: str | Path, lm: LanguageModel, draft: LanguageModel | None
) -> tuple[Journal, dict[str, Any], list[Entry]]:
    """Raises JaxLlamaError if there is no engine's journal, or one of another model or draft."""
    if not Path(folder).is_dir():
        raise JaxLlamaError(f"{folder}: not an engine's journal")
    journal = Journal(folder)
    try:
        entries = journal.history()
        if not entries:
            raise JaxLlamaError(f"{folder}: not an engine's journal")
        header = json.loads(entries[0].body)
        if header["model"] != _fingerprint(lm):
            raise JaxLlamaError(f"{folder}: the journal of another model than {lm.config.name}")
        if header.get("draft") != (None if draft is None else _fingerprint(draft)):
            raise JaxLlamaError(f"{folder}: the journal of an engine with another draft")
        options = header["options"] | ({} if draft is None else {"draft": draft})
        return journal, options, entries[1:]
    except BaseException:
        journal.close()
        raise


def _fingerprint(lm: LanguageModel) -> str:
    """Of the configuration and of the final norm's weights, which no two models share, and of the
    adapters."""
    digest = hashlib.sha256(repr(lm.config).encode())
    digest.update(np.asarray(lm.params["norm"]["weight"]).tobytes())
    if lm.adapters:
        digest.update(repr(lm.adapters).encode())
        for leaf in jax.tree.leaves(factors(lm.params)):
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
