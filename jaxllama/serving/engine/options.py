"""The sizes of an engine, asked for (EngineOptions) and chosen (ResolvedOptions).  Everything that
is compiled follows from them."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.cache import QUANTIZED_CACHE

DEFAULT_MAX_LEN = 1024
CACHE_DTYPES = ("float32", "bfloat16", "float16", *QUANTIZED_CACHE)
# Tokens that several prompts are prefilled at once with: enough to fill a GPU, and a short stall
# for those who decode.
PREFILL_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """None: ``resolve`` chooses.  Raises JaxLlamaError naming an option that is no such number.

    max_slots: requests that run at once.  max_len: tokens of a request, prompt and answer.
    kv_dtype: of the cache, as for ``init_cache``; the activations' by default.
    prefill_chunk: tokens of a prompt between two decode steps; 64 on a CPU, else 512, at most
        max_len.
    prefill_rows: prompts that fit one chunk are prefilled so many at a time, long ones fewer
        (``rows``); 1 on a CPU, else a 32nd of the slots.
    token_budget: tokens of prompts, with their padding, between two decode steps, at least a chunk;
        by default those of one prefill call.
    cache_tokens: that all admitted requests may hold together, at least max_len; all that the slots
        have by default.
    prefix_block: tokens in a block of the prefix cache; 16, with GLA layers prefill_chunk.
    prefix_blocks: in the pool; as much memory as half the slots by default, 0 is no prefix cache.
    max_queue: waiting requests.
    lanes: prompts that are worked on at once because they are longer than a chunk or begin with
        what the prefix cache has; each is a row of max_len tokens beside the slots'.  2 by default.
    steps_per_call: most tokens a row writes between two looks of the host (streams then move by so
        many); 4 by default.  A look costs an H200 about 2 ms: where throughput is all, take 16
        steps, and an eighth of the slots as prefill_rows.
    deterministic: a request's tokens and logprobs are the same bits whatever runs beside it and in
        whichever slot; the model's own flag by default.  As ``LanguageModel`` does it, shapes are
        fixed: prompts are prefilled one by one, rows decoded in one program of max_slots rows, a
        prefix is taken over in whole chunks, and no row that has written is preempted (what it
        wrote would be computed again by another program).
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
    steps_per_call: int | None = None
    lanes: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # A request is a prompt of one token and an answer of one.
            least = {"prefix_blocks": 0, "max_len": 2}.get(field.name, 1)
            if field.name in ("kv_dtype", "deterministic") or (
                value is None and field.default is None
            ):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise JaxLlamaError(f"{field.name} = {value!r}: must be a whole number >= {least}")
        if not isinstance(self.deterministic, bool):
            raise JaxLlamaError(f"deterministic = {self.deterministic!r}: must be true or false")
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", _cache_dtype(self.kv_dtype))

    def resolve(self, cfg: ModelConfig, dtype: jnp.dtype) -> ResolvedOptions:
        """Every None replaced.  Raises JaxLlamaError for sizes that do not go together."""
        max_len = self.max_len or min(DEFAULT_MAX_LEN, cfg.max_position)
        if max_len > cfg.max_position:
            raise JaxLlamaError(
                f"max_len = {max_len}: {cfg.name} has a context of {cfg.max_position}"
            )
        on_cpu = jax.default_backend() == "cpu"
        chunk = self.prefill_chunk or min(64 if on_cpu else 512, max_len)
        fixed = "gla" in cfg.layer_types or self.deterministic
        block = self.prefix_block or (chunk if fixed else math.gcd(16, chunk))
        blocks = self.prefix_blocks
        if cfg.rope.scaling == "dynamic":
            if blocks:
                raise JaxLlamaError(
                    f"prefix_blocks = {blocks}: must be 0, as keys of dynamic RoPE depend on the "
                    "length of the whole prompt"
                )
            blocks = 0
        if blocks is None:
            per_row = 1 if set(cfg.layer_types) == {"gla"} else max_len // block
            blocks = max(self.max_slots * per_row // 2, 1)
        rows = 1 if on_cpu or self.deterministic else max(self.max_slots // 32, 1)
        if self.token_budget is not None:
            rows = min(rows, max(self.token_budget // _widths(chunk)[0], 1))
        rows = self.prefill_rows or rows
        call = max(width * _rows(rows, width) for width in _widths(chunk))
        resolved = ResolvedOptions(
            max_slots=self.max_slots,
            max_len=max_len,
            kv_dtype=self.kv_dtype or jnp.dtype(dtype).name,
            prefill_chunk=chunk,
            prefill_rows=rows,
            token_budget=self.token_budget or call,
            cache_tokens=self.cache_tokens or self.max_slots * max_len,
            prefix_block=block,
            prefix_blocks=blocks,
            max_queue=self.max_queue,
            steps_per_call=self.steps_per_call or min(4, max_len - 1),
            lanes=self.lanes or min(2, self.max_slots),
            deterministic=self.deterministic,
        )
        resolved.check(cfg)
        return resolved


@dataclasses.dataclass(frozen=True)
class ResolvedOptions:
    """The sizes an engine has: ``EngineOptions`` without a None."""

    max_slots: int
    max_len: int
    kv_dtype: str
    prefill_chunk: int
    prefill_rows: int
    token_budget: int
    cache_tokens: int
    prefix_block: int
    prefix_blocks: int
    max_queue: int
    steps_per_call: int
    lanes: int
    deterministic: bool

    def check(self, cfg: ModelConfig) -> None:
        """JaxLlamaError for sizes that do not go together."""
        chunk, slots, max_len = self.prefill_chunk, self.max_slots, self.max_len
        all_tokens = slots * max_len
        has_gla, smallest = "gla" in cfg.layer_types, self.widths[0]
        call = self.rows(smallest) * smallest
        for name, fits, why in (
            ("prefill_chunk", chunk <= max_len, f"exceeds max_len = {max_len}"),
            ("prefix_block", not chunk % self.prefix_block,
             f"must divide {chunk}, as chunks are taken between them"),
            ("prefix_block", not has_gla or self.prefix_block == chunk,
             f"must be {chunk}, as GLA's states are taken between chunks"),
            ("prefix_block", not self.deterministic or self.prefix_block == chunk,
             f"must be {chunk}, as a deterministic engine takes over whole chunks"),
            ("prefill_rows", not self.deterministic or self.prefill_rows == 1,
             "must be 1, as a deterministic engine prefills prompts one by one"),
            ("prefill_rows", self.prefill_rows <= slots, f"exceeds max_slots = {slots}"),
            ("token_budget", self.token_budget >= chunk, f"less than prefill_chunk = {chunk}"),
            ("prefill_rows", call <= self.token_budget,
             f"{smallest} tokens each exceed token_budget = {self.token_budget}"),
            ("cache_tokens", self.cache_tokens >= max_len, f"less than max_len = {max_len}"),
            ("cache_tokens", self.cache_tokens <= all_tokens,
             f"exceeds what {slots} slots of {max_len} tokens hold, {all_tokens}"),
            ("cache_tokens", not self.deterministic or self.cache_tokens == all_tokens,
             f"must be {all_tokens}, as a deterministic engine preempts no row"),
            ("lanes", self.lanes <= slots, f"exceeds max_slots = {slots}"),
            ("steps_per_call", self.steps_per_call < max_len,
             f"an answer within max_len = {max_len} has fewer tokens"),
        ):  # fmt: skip
            if not fits:
                raise JaxLlamaError(f"{name} = {getattr(self, name)}: {why}")

    def rows(self, width: int) -> int:
        """Prompts that a prefill call of ``width`` tokens a row takes."""
        return _rows(self.prefill_rows, width)

    @property
    def capacity(self) -> int:
        """Tokens that a slot has room for: whole blocks."""
        return -(-self.max_len // self.prefix_block) * self.prefix_block

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of slots that there are programs for: 1, 4, 16, ..., max_slots."""
        return (self.max_slots,) if self.deterministic else _powers_of_four(1, self.max_slots)

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of a prefill call: 32, 128, ..., prefill_chunk."""
        return _widths(self.prefill_chunk)


def _rows(most: int, width: int) -> int:
    return max(min(most, PREFILL_TOKENS // width), 1)


def _widths(chunk: int) -> tuple[int, ...]:
    return _powers_of_four(32, chunk)


def _powers_of_four(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 4
    return (*sizes, last)


def _cache_dtype(dtype: DTypeLike) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in CACHE_DTYPES:
        raise JaxLlamaError(f"kv_dtype = {name!r}: allowed are {', '.join(CACHE_DTYPES)}")
    return name
