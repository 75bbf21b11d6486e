"""The options of an engine, declared once; without jax, so that a command starts fast.

The defaults and checks of ``EngineOptions``, the flags of ``serve`` and ``batch``, and the keys of
a ``--config`` file are made from this table. The docstring of ``EngineOptions`` explains them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from jaxllama.errors import JaxLlamaError
from jaxllama.files import short


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of an engine.

    kind: of its values; a text is a folder. default: None if the engine chooses. text: help of its
    flag. group: of its flag, which is the command's own, the engine's, or one of a server that
    loads adapters; None stands elsewhere. least, most: of its values; a float must be above
    ``least``. unit: of a float, as its flag shows it.
    """

    name: str
    kind: type
    default: Any
    text: str = ""
    group: Literal["command", "engine", "adapters"] | None = None
    least: int = 1
    most: float = math.inf
    unit: str = "SHARE"

    def check(self, value: Any) -> None:
        """Raise JaxLlamaError, which names the option, for a value that it cannot have."""
        if value is None and self.default is None:
            return
        found: Any = value
        kinds = (int, float) if self.kind is float else (self.kind,)
        if not any(type(found) is kind for kind in kinds) or not self._has(found):
            raise JaxLlamaError(f"{self.name} = {short(value)}: must be {self._domain}")

    def _has(self, value: Any) -> bool:
        """Whether a value of the option's kind is one that it can have."""
        if self.kind in (bool, str):
            return self.kind is bool or bool(value)
        is_above = self.least < value if self.kind is float else self.least <= value
        return is_above and value <= self.most

    @property
    def _domain(self) -> str:
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "the name of a folder"
        if self.kind is float and self.most == math.inf:
            return f"a number > {self.least}"
        if self.kind is float:
            return f"a number in ({self.least}, {self.most:g}]"
        end = "" if self.most == math.inf else f" and <= {self.most}"
        return f"a whole number >= {self.least}{end}"


DECLARED = {
    option.name: option
    for option in (
        Option(
            "max_slots",
            int,
            16,
            "requests that run at once; a policy's are the rows of its block",
            "command",
        ),
        # The shortest request has one prompt token and one new token.
        Option(
            "max_len",
            int,
            None,
            "tokens of a request with its answer (default the model's context, "
            "if the cache holds it)",
            "command",
            least=2,
        ),
        Option("max_queue", int, 256, "requests that wait; more get 429", "command"),
        Option("prefill_rows", int, None, "short prompts that are prefilled at once", "engine"),
        Option("token_budget", int, None, "tokens of prompts between two decode steps", "engine"),
        Option(
            "cache_tokens",
            int,
            None,
            "tokens that the cache holds (default: as many as fit the memory)",
            "engine",
        ),
        Option("page_size", int, None, "tokens in a page of the cache", "engine"),
        Option(
            "steps_per_call",
            int,
            None,
            "tokens that a row may generate before the host reads them",
            "engine",
        ),
        Option("memory_share", float, 0.9, "share of jax's GPU memory to use", "engine", 0, 1),
        Option(
            "prefix_cache",
            bool,
            True,
            "read every prompt whole, also if its beginning is cached",
            "engine",
        ),
        Option(
            "host_cache_gb",
            float,
            None,
            "GB of the host's memory for prefixes that leave the device (default: none; with "
            "--disk-cache a quarter of what is free, up to 32)",
            "engine",
            0,
            1e9,
            unit="GB",
        ),
        Option(
            "disk_cache",
            str,
            None,
            "folder for prefixes that leave the device; a restarted server finds them again",
            "engine",
        ),
        Option(
            "disk_cache_gb",
            float,
            None,
            "GB that this folder may hold (default: half of what its disk has room for)",
            "engine",
            0,
            1e9,
            unit="GB",
        ),
        Option(
            "deterministic",
            bool,
            False,
            "a request's bits do not depend on other requests",
            "engine",
        ),
        Option("prefill_chunk", int, None),  # the flag is the cache's
        Option(
            "lora_slots",
            int,
            0,
            "LoRA adapters that clients may load and unload while the server runs "
            "(POST /v1/load_lora_adapter; 0: none)",
            "adapters",
            least=0,
            most=64,
        ),
        Option("max_lora_rank", int, 16, "largest rank of these adapters", "adapters", most=512),
    )
}
