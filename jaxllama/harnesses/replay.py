"""Make the answers of an evaluation again, from its state folder.

    replay(lm, state, ids) -> ReplayReport(same, different, digest, recorded)

A state folder of ``LocalModel`` has each body with its seed, and its answer. With a deterministic
model an answer made again has the same tokens and, if it has any, the same bits of logprobs. With
any other model most answers are the same; the report has the ids of those that differ. The answers
in the folder stay as they are.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from jaxllama.engine.journal import Journal
from jaxllama.errors import JaxLlamaError
from jaxllama.files import SETTINGS, read_json
from jaxllama.harnesses.local_model import MODEL_FILE, LocalModel
from jaxllama.language_model import LanguageModel
from jaxllama.typing import JsonObject

PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """Answers made again. different: ids of those that came out otherwise. digest: of this model;
    recorded: of the folder's."""

    same: int
    different: tuple[str, ...]
    digest: str
    recorded: str

    def to_json(self) -> JsonObject:
        return dataclasses.asdict(self)


def replay(lm: LanguageModel, state: Path, ids: Sequence[str] = ()) -> ReplayReport:
    """Return how the folder's answers come out with this model; of ``ids`` alone if there are any.

    Raises JaxLlamaError for a folder of something else, and for an unknown id.
    """
    path = state / MODEL_FILE
    if not path.exists():
        raise JaxLlamaError(f"{state}: no state folder of an evaluation: {MODEL_FILE} is missing")
    recorded = read_json(path, SETTINGS)
    if not {"digest", "engine_deterministic"} <= recorded.keys():
        raise JaxLlamaError(f"{path}: no evaluation wrote it")
    journal = Journal(state, keeps_bodies=True)
    try:
        entries = {entry.id: (entry, answer) for entry, answer in journal.answered()}
    finally:
        journal.close()
    for id in ids:
        if id not in entries:
            raise JaxLlamaError(f"{state}: no answer with the id {id!r}")
    chosen = [entries[id] for id in ids or entries]
    if not chosen:
        raise JaxLlamaError(f"{state}: no answers")
    deterministic = bool(recorded["engine_deterministic"])
    name = json.loads(chosen[0][0].body)["model"]
    different: list[str] = []
    cache = recorded.get("kv_dtype")  # missing in older folders
    with LocalModel(lm, name, deterministic=deterministic, kv_dtype=cache) as model:
        for kind, url in PATHS.items():
            kind_entries = [(entry, answer) for entry, answer in chosen if entry.kind == kind]
            answers = model.post_all(url, [json.loads(entry.body) for entry, _ in kind_entries])
            for (entry, before), after in zip(kind_entries, answers, strict=True):
                if json.loads(before).get("choices") != after["choices"]:
                    different.append(entry.id)
        return ReplayReport(
            len(chosen) - len(different), tuple(different), model.digest, recorded["digest"]
        )
