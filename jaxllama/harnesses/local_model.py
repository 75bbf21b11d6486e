"""A model behind the server's application, in this process, for libraries that evaluate models.

    with LocalModel.load("DIR", state="STATE", deterministic=True) as model:
        model.post("/v1/completions", body)     -> the answer, as JSON
        model.post_all(path, bodies)            -> the answers, made together
        model.origin, model.digest              what scores depend on (``evaluation.provenance``)

Contract. An event loop of its own runs the application in a thread, so any thread may call. Bodies
that name no seed get the seed 0 and not a random one. With a state folder each body is stored with
its seed and, later, its answer; nothing is deleted. ``MODEL_FILE`` in the folder names the model,
and a folder of another model is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxllama.engine.journal import Journal
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.provenance import provenance
from jaxllama.files import SETTINGS, read_json, text_digest, write_text
from jaxllama.language_model import LanguageModel
from jaxllama.loading import load
from jaxllama.serving.http.batch import post
from jaxllama.serving.http.process import local_app, model_name
from jaxllama.typing import JsonObject

MODEL_FILE = "model.json"
AGAIN_SECONDS = 0.05
LOADING = ("dtype", "quantize", "random", "exact", "revision")
ENGINE = ("max_slots", "max_len", "kv_dtype", "memory_share", "prefix_cache")


class LocalModel:
    """A running model; the module docstring has the interface.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    name : str
        Its name.
    state : path, optional
        Folder for bodies and answers.
    deterministic : bool
        Whether an answer's bits are independent of the others.
    options
        Options of ``Engine``.

    Raises
    ------
    JaxLlamaError
        If the state folder is another model's.
    """

    def __init__(
        self,
        lm: LanguageModel,
        name: str,
        state: str | Path | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> None:
        self.lm, self.name = lm, name
        facts = provenance(lm, options.get("kv_dtype"))
        del facts["digest"]  # it leaves out the engine's promise
        self.origin: JsonObject = {**facts, "engine_deterministic": deterministic}
        origin = json.dumps(self.origin, sort_keys=True)
        self.digest = text_digest(origin)
        self._answers: list[bytes] = []
        if state is not None:
            self._check_state(Path(state))
        journal = None if state is None else Journal(state, keeps_bodies=True)
        if deterministic:
            options["deterministic"] = True
        self._app_context = local_app(lm, name, options, journal)
        self._app, self.engine = self._app_context.__enter__()
        self.at_once = max(1, min(self.engine.options.max_queue, 4 * self.engine.options.max_slots))
        self._journal = journal
        self._loop = asyncio.new_event_loop()
        self._places = asyncio.Semaphore(self.at_once)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, model: str, **options: Any) -> LocalModel:
        """Return a model by the name that ``jaxllama.load`` takes.

        options: those of ``LOADING``, of ``ENGINE``, ``state`` and ``deterministic``. Raises
        JaxLlamaError naming an unknown one.
        """
        known = {*LOADING, *ENGINE, "state", "deterministic"}
        for name in options:
            if name not in known:
                raise JaxLlamaError(f"{name}: unknown; known are {', '.join(sorted(known))}")
        loading = {name: options.pop(name) for name in LOADING if name in options}
        return cls(load(model, **loading), model_name(model), **options)

    def _check_state(self, state: Path) -> None:
        path = state / MODEL_FILE
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            text = json.dumps({"digest": self.digest, **self.origin}, indent=1)
            write_text(path, text + "\n")
            return
        found = read_json(path, SETTINGS)
        if found.get("digest") != self.digest:
            differing = [key for key in self.origin if found.get(key) != self.origin[key]]
            raise JaxLlamaError(
                f"{state}: is of another model: {', '.join(differing)} differ (digest "
                f"{found.get('digest')}, now {self.digest})"
            )

    def post(self, path: str, body: Mapping[str, Any]) -> JsonObject:
        """Return the answer to a body. Raises JaxLlamaError with the server's own message."""
        return self._submit(path, body).result()

    def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
        """Return the answers to bodies, in their order."""
        waiting = [self._submit(path, body) for body in bodies]
        return [future.result() for future in waiting]

    def _submit(self, path: str, body: Mapping[str, Any]) -> Future[JsonObject]:
        return asyncio.run_coroutine_threadsafe(self._answer(path, {**body}), self._loop)

    async def _answer(self, path: str, body: JsonObject) -> JsonObject:
        body = {"model": self.name, "seed": 0, **body}
        async with self._places:
            while True:
                status, answer = await post(self._app, path, body, uuid.uuid4().hex)
                if status != 429:
                    break
                await asyncio.sleep(AGAIN_SECONDS)
        if status != 200:
            raise JaxLlamaError(answer["error"]["message"])
        said = json.dumps([path, body, answer["choices"]], sort_keys=True)
        self._answers.append(hashlib.sha256(said.encode()).digest())
        return answer

    @property
    def answers_digest(self) -> str:
        """A digest of all bodies and answers so far, in any order."""
        return hashlib.sha256(b"".join(sorted(self._answers))).hexdigest()[:16]

    def said(self) -> str:
        """Return the line that stands beside a score."""
        return (
            f"digest {self.digest} (weights {self.origin['weights']}; {self.origin['device']}), "
            f"answers {self.answers_digest} of {len(self._answers)}"
        )

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._app_context.__exit__(None, None, None)
        if self._journal is not None:
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
