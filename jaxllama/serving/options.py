"""EngineOptions: the sizes of an engine.  Everything that is compiled follows from them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError

DEFAULT_MAX_LEN = 1024
# Tokens that several prompts are prefilled at once with: enough to fill a GPU, and a short stall
# for those who decode.
PREFILL_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """None: ``resolve`` chooses.

    max_slots: requests that run at once.  max_len: tokens of a request, prompt and answer.
    kv_dtype: of the cache, as for ``init_cache``; the activations' by default.
    prefill_chunk: tokens of a prompt between two decode steps; 64 on a CPU, else 512.
    prefill_rows: prompts that fit one chunk are prefilled so many at a time, long ones fewer
        (``rows``); 1 on a CPU, else a 32nd of the slots.
    token_budget: tokens of prompts, with their padding, between two decode steps; by default those
        of one prefill call.
    cache_tokens: that all admitted requests may hold together; all that the slots have by default.
    prefix_block: tokens in a block of the prefix cache; 16, with GLA layers prefill_chunk.
    prefix_blocks: in the pool; as much memory as half the slots by default, 0 is no prefix cache.
    max_queue: waiting requests.  lanes: long prompts that are partly prefilled at once.
    steps_per_call: most tokens a row writes between two looks of the host (streams then move by so
        many).  A look costs an H200 about 2 ms: where throughput is all, take 16 steps, and an
        eighth of the slots as prefill_rows.
    """

    max_slots: int = 16
    max_len: int | None = None
    kv_dtype: str | None = None
    prefill_chunk: int | None = None
    prefill_rows: int | None = None
    token_budget: int | None = None
    cache_tokens: int | None = None
    prefix_block: int | None = None
    prefix_blocks: int | None = None
    max_queue: int = 256
    steps_per_call: int = 4
    lanes: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "prefix_blocks" else 1
            if field.name == "kv_dtype" or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise JaxLlamaError(f"{field.name} = {value!r}: must be a whole number >= {least}")
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", jnp.dtype(self.kv_dtype).name)

    def resolve(self, cfg: ModelConfig, dtype: jnp.dtype) -> EngineOptions:
        """Every None replaced.  Raises JaxLlamaError for sizes that do not go together."""
        max_len = self.max_len or min(DEFAULT_MAX_LEN, cfg.max_position)
        if max_len > cfg.max_position:
            raise JaxLlamaError(
                f"max_len = {max_len}: {cfg.name} has a context of {cfg.max_position}"
            )
        chunk = self.prefill_chunk or min(64 if jax.default_backend() == "cpu" else 512, max_len)
        rows = 1 if jax.default_backend() == "cpu" else max(self.max_slots // 32, 1)
        has_gla = "gla" in cfg.layer_types
        block = self.prefix_block or (chunk if has_gla else min(16, chunk))
        if chunk % block or (has_gla and block != chunk):
            allowed = f"be {chunk}, as GLA's states" if has_gla else f"divide {chunk}, as chunks"
            raise JaxLlamaError(f"prefix_block = {block}: must {allowed} are taken between chunks")
        blocks = self.prefix_blocks
        if cfg.rope.scaling == "dynamic":
            blocks = 0  # keys depend on the length of the whole prompt
        if blocks is None:
            per_row = 1 if set(cfg.layer_types) == {"gla"} else max_len // block
            blocks = max(self.max_slots * per_row // 2, 1)
        resolved = dataclasses.replace(
            self,
            max_len=max_len,
            kv_dtype=self.kv_dtype or jnp.dtype(dtype).name,
            prefill_chunk=chunk,
            prefill_rows=self.prefill_rows or rows,
            cache_tokens=self.cache_tokens or self.max_slots * max_len,
            prefix_block=block,
            prefix_blocks=blocks,
        )
        call = max(width * resolved.rows(width) for width in resolved.widths)
        return dataclasses.replace(resolved, token_budget=self.token_budget or call)

    def rows(self, width: int) -> int:
        """Prompts that a prefill call of ``width`` tokens a row takes."""
        assert self.prefill_rows is not None
        return max(min(self.prefill_rows, PREFILL_TOKENS // width), 1)

    @property
    def capacity(self) -> int:
        """Tokens that a slot has room for: whole blocks."""
        return -(-self.max_len // self.prefix_block) * self.prefix_block

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of slots that there are programs for: 1, 4, 16, ..., max_slots."""
        return _powers_of_four(1, self.max_slots)

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of a prefill call: 32, 128, ..., prefill_chunk."""
        return _powers_of_four(32, self.prefill_chunk)


def _powers_of_four(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 4
    return (*sizes, last)
