"""The sizes of an engine, as requested (EngineOptions) and as chosen (ResolvedOptions).

The shapes of all compiled programs follow from these sizes.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding.drafts import DraftPlan
from jaxllama.engine.declared import DECLARED
from jaxllama.engine.transfers import STAGED
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.executor import DETERMINISTIC_ROWS
from jaxllama.model.cache import cache_dtype_name, check_has_keys, init_pages
from jaxllama.model.mixers import has_states
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.mixers.common import QUANTIZED_CACHE
from jaxllama.offload.store import available_memory
from jaxllama.parallel.mesh import MODEL_AXIS
from jaxllama.text.rows import chunk_widths, default_chunk, powers_of, short
from pallas_kernels.cards.architecture import CARDS
from pallas_kernels.fixed_sums import block_rows
from pallas_kernels.qtensor import tree_bytes

CACHE_DTYPES = ("float32", "bfloat16", "float16", *QUANTIZED_CACHE)
# Tokens of one prefill call: enough to fill a GPU, and a short stall for the rows that decode.
PREFILL_TOKENS = 2048
# Slots from which on a step's default budget is two prefill calls.
TWO_CALLS = 512
# Context lengths, in tokens, up to which rows are decoded by programs of their own. Kernels are
# planned for the longest row, so a program for 131,072 tokens would serve short rows badly. Up to
# 2,048 tokens of an int8 cache no row is split into chunks.
SHORT_CONTEXTS = (2048, 8192)
# Largest number of tokens of a pass in which rows draft, by whether the backend is a CPU. In larger
# passes the drafted tokens and the search for drafts cost too much beside a plain step.
DRAFTING_TOKENS = {True: 16, False: 64}
# Caches of 16-bit activations by default, by the largest memory of a card in GB.
SMALL_CARDS = ((8, "int4"), (16, "int8"))
# Bytes of the pages that move between the device and the tiers together.
TRANSFER_BYTES = 144 << 20  # 32 pages of an 8B in int8
# Largest default of ``host_cache_gb``, in bytes; jax pins twice as much by default.
HOST_CACHE_BYTES = 32 * 10**9
# Default bytes of the host's memory for the cache.
CPU_CACHE_BYTES = 2**30


def default_cache_dtype(dtype: DTypeLike, device: Any) -> str:
    """Return the cache's dtype for activations of ``dtype`` on a device."""
    name = jnp.dtype(dtype).name
    card = CARDS.get(device.device_kind)
    if card is None or name == "float32":
        return name
    return next((small for gb, small in SMALL_CARDS if card.memory <= gb << 30), name)


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The requested sizes of an engine; ``resolve`` replaces None.

    Parameters
    ----------
    max_slots : int
        Number of requests that run at once.
    max_len : int or None
        Largest number of tokens of a request, prompt and answer together. The default is the
        model's context length, or the cache's size if that is smaller.
    kv_dtype : str or None
        Dtype of the cache, as for ``init_cache``. The default is the dtype of the activations. For
        16-bit activations on a small card it is int8 (up to 16 GB) or int4 (up to 8 GB).
    cache_tokens : int or None
        Number of tokens that the cache holds for all requests and known prefixes together, at least
        max_len. On a GPU the default is the memory that memory_share leaves. On a CPU it is 1 GiB,
        but no more than the slots can use.
    memory_share : float
        Share of jax's GPU memory that weights, cache and work may take. jax takes
        ``$XLA_CLIENT_MEM_FRACTION`` of the GPU, by default three quarters; ``jaxllama serve`` and
        ``jaxllama batch`` set it themselves.
    page_size : int or None
        Tokens in a page of the cache, at most prefill_chunk. The default is 16 on a CPU and 64
        elsewhere.
    prefix_cache : bool
        Whether requests may begin with cached prefixes of earlier requests.
    prefill_chunk : int or None
        Tokens of a prompt between two decode steps, at most max_len. The default is 64 on a CPU and
        2048 elsewhere, for each GPU that shares a prompt's tokens. A deterministic engine reads
        them in pieces of 32 tokens on a CPU and 512 elsewhere, one at least.
    prefill_rows : int or None
        Largest number of prompts in one prefill call; calls of wide chunks take fewer (``rows``).
        The default on a CPU is as many short prompts as a chunk has room for, and elsewhere a 32nd
        of max_slots. A deterministic engine has as many as fill a block of ``fixed_sums``.
    token_budget : int or None
        Tokens of prompts, padding included, between two decode calls, at least prefill_chunk. While
        more wait, a decode call is one step. The default is the tokens of one prefill call, on a
        GPU with 512 slots or more of two: few calls then leave a prompt to the next.
    max_queue : int
        Largest number of waiting requests.
    steps_per_call : int or None
        Number of tokens that a row may generate before the host reads the results; streams advance
        by as many. The default is 4. A value of 2 halves the time between results. It pays where a
        step is long enough for the host's work (10 to 20 ms for hundreds of rows).
    host_cache_gb : float or None
        GB of pinned host memory for cached prefixes that leave the device. They come back while
        other rows decode. The default is none; with disk_cache it is a quarter of the free memory,
        up to 32 GB.
    disk_cache : str or None
        Folder for cached prefixes that leave the device. Each is written as soon as its tokens are
        known, so a restarted engine finds it. Several engines may use one folder. Files depend on
        the weights, the cache's layout and the salt, and are found by no others.
    disk_cache_gb : float or None
        GB that this folder may hold; the default is half of what its disk has room for.
    deterministic : bool
        Whether a request's tokens and logprobs are the same bits whatever runs beside it and in any
        slot. The default is the model's own flag. Sums then have one order for any number of rows,
        in passes of 32 tokens and more, on a GPU of 512 at most. A prefill call has one shape for
        each width. Prefixes are reused in whole pieces, or as a whole prompt. A row that has
        generated tokens is never preempted, because another program would compute them again.
    draft : str, ModelConfig or None
        Source of drafts. "ngram" proposes the tokens that followed an earlier occurrence of a row's
        last tokens (``jaxllama.decoding.drafts``). "mtp" is the checkpoint's own head
        (``jaxllama.decoding.heads``). A ModelConfig names a draft model, or another head's layer.
        Its layers share the cache; if it has states, prefixes are reused in whole chunks. Drafts
        never change the tokens. A row whose drafts are wrong asks for fewer and then for none, and
        no row drafts if there are too many rows.
    draft_tokens : int
        Largest number of tokens that a row proposes, up to 15; 0 lets the engine choose, and end
        drafting where it costs time.
    lora_slots : int
        Number of LoRA adapters that can be loaded while the engine runs (``Engine.load_adapter``).
    max_lora_rank : int
        Their largest rank. Each slot takes memory for this rank beside every weight.

    Raises
    ------
    JaxLlamaError
        If an option has the wrong type or lies outside its range. The message names the option.
    """

    max_slots: int = DECLARED["max_slots"].default
    max_len: int | None = DECLARED["max_len"].default
    kv_dtype: str | None = None
    cache_tokens: int | None = DECLARED["cache_tokens"].default
    memory_share: float = DECLARED["memory_share"].default
    page_size: int | None = DECLARED["page_size"].default
    prefix_cache: bool = DECLARED["prefix_cache"].default
    prefill_chunk: int | None = DECLARED["prefill_chunk"].default
    prefill_rows: int | None = DECLARED["prefill_rows"].default
    token_budget: int | None = DECLARED["token_budget"].default
    max_queue: int = DECLARED["max_queue"].default
    steps_per_call: int | None = DECLARED["steps_per_call"].default
    host_cache_gb: float | None = DECLARED["host_cache_gb"].default
    disk_cache: str | None = DECLARED["disk_cache"].default
    disk_cache_gb: float | None = DECLARED["disk_cache_gb"].default
    deterministic: bool = DECLARED["deterministic"].default
    draft: str | ModelConfig | None = None
    draft_tokens: int = 0
    lora_slots: int = DECLARED["lora_slots"].default
    max_lora_rank: int = DECLARED["max_lora_rank"].default

    def __post_init__(self) -> None:
        for name, option in DECLARED.items():
            option.check(getattr(self, name))
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", _cache_dtype(self.kv_dtype))
        if not isinstance(self.draft, ModelConfig) and self.draft not in (None, "ngram", "mtp"):
            raise JaxLlamaError(
                f'draft = {short(self.draft)}: expected "ngram", "mtp" or a ModelConfig'
            )
        if self.draft is None and self.draft_tokens:
            raise JaxLlamaError(f"draft_tokens = {self.draft_tokens!r} needs a draft")
        DraftPlan.of(self.draft, self.draft_tokens)
        if self.disk_cache_gb is not None and self.disk_cache is None:
            raise JaxLlamaError(
                f"disk_cache_gb = {self.disk_cache_gb} needs disk_cache: the folder that it bounds"
            )

    @property
    def has_tiers(self) -> bool:
        """Whether prefixes that leave the device are kept."""
        return self.host_cache_gb is not None or self.disk_cache is not None

    @property
    def _host_bytes(self) -> int:
        if not self.has_tiers:
            return 0
        if self.host_cache_gb is not None:
            return max(int(self.host_cache_gb * 1e9), 1)
        return min((available_memory() or 0) // 4, HOST_CACHE_BYTES)

    def check_context(self, cfg: ModelConfig) -> None:
        """Raise JaxLlamaError if ``max_len`` exceeds the model's context."""
        if self.max_len is not None and self.max_len > cfg.max_position:
            raise JaxLlamaError(
                f"max_len = {self.max_len}: {cfg.name} has a context of {cfg.max_position}, "
                "so give at most that"
            )

    def resolve(
        self,
        cfg: ModelConfig,
        dtype: jnp.dtype,
        devices: int = 1,
        shards: int = 1,
        parts: int = 1,
    ) -> ResolvedOptions:
        """Replace every None.

        Parameters
        ----------
        cfg : ModelConfig
            Config of the model.
        dtype : data-type
            Dtype of the activations.
        devices : int
            Number of devices over which the heads are split.
        shards : int
            Number of devices that may share the tokens of a prompt.
        parts : int
            Number of parts of the devices, each of which has its own slots and pages.

        Returns
        -------
        ResolvedOptions

        Raises
        ------
        JaxLlamaError
            For sizes that contradict each other.
        """
        self.check_context(cfg)
        check_has_keys(cfg, kv_dtype=self.kv_dtype)
        on_cpu = jax.default_backend() == "cpu"
        kv_dtype = self.kv_dtype or default_cache_dtype(dtype, jax.local_devices()[0])
        more = draft_config(cfg, self.draft)
        cfgs = (cfg,) if more is None else (cfg, more)
        if self.deterministic and self.draft is not None and cfg.attn_sparsity < 1:
            raise JaxLlamaError(
                "draft: a deterministic engine takes none with attn_sparsity, as the first token "
                "of an answer reads the cache otherwise than its draft"
            )
        tokens = self.cache_tokens or self._affordable(cfgs, kv_dtype, devices, parts)
        share = tokens // self.max_slots if self.deterministic else tokens
        max_len = self.max_len or max(min(cfg.max_position, share // parts), 2)
        default = default_chunk(on_cpu) * (1 if on_cpu else shards)
        chunk = self.prefill_chunk or min(default, max_len)
        piece = block_rows() if self.deterministic else chunk
        keeps_states = any(map(has_states, cfgs))
        is_dynamic = cfg.rope.scaling == "dynamic"
        page = self.page_size or min(16 if on_cpu else 64, piece)
        if self.page_size is None and (keeps_states or self.deterministic):
            page = math.gcd(page, piece)
        row_pages = -(-max_len // page)
        if self.cache_tokens is None:
            most = self.max_slots * row_pages * page
            if self.deterministic:
                tokens = most
            tokens = max(min(tokens, most) if on_cpu else tokens, parts * row_pages * page)
        narrowest = _widths(piece)[0]
        slots = self.max_slots // parts
        many = min(chunk // narrowest, slots) if on_cpu else max(slots // 32, 1)
        if self.token_budget is not None:
            many = min(many, max(self.token_budget // narrowest, 1))
        many = self.prefill_rows or many
        fixed_rows = piece // chunk_widths(piece, False)[0] if self.deterministic else None
        call = max(chunk, piece)
        if not on_cpu or self.prefill_rows is not None:
            # A deterministic engine reads as many tokens, in other calls.
            tokens_of = (width * _rows(many, width, PREFILL_TOKENS) for width in _widths(chunk))
            call = max(call, *tokens_of)
        calls = 1 if on_cpu or slots < TWO_CALLS else 2
        prefix_cache = self.prefix_cache and not is_dynamic
        if self.has_tiers and not prefix_cache:
            name = "disk_cache" if self.host_cache_gb is None else "host_cache_gb"
            why = f"{cfg.name} has dynamic RoPE" if is_dynamic else "prefix_cache is False"
            raise JaxLlamaError(
                f"{name} = {short(getattr(self, name))}: no prefixes are kept, as {why}: "
                "leave it out"
            )
        resolved = ResolvedOptions(
            max_slots=self.max_slots,
            max_len=max_len,
            kv_dtype=kv_dtype,
            cache_tokens=-(-tokens // (parts * page)) * parts * page,
            memory_share=self.memory_share,
            page_size=page,
            prefix_cache=prefix_cache,
            prefill_chunk=chunk,
            prefill_rows=fixed_rows or many,
            token_budget=self.token_budget or calls * call,
            max_queue=self.max_queue,
            steps_per_call=self.steps_per_call or min(4, max_len - 1),
            deterministic=self.deterministic,
            snapshots=self.max_slots if keeps_states and prefix_cache else 0,
            draft=self.draft,
            draft_tokens=self.draft_tokens,
            host_bytes=self._host_bytes,
            disk_cache=self.disk_cache,
            disk_bytes=None if self.disk_cache_gb is None else int(self.disk_cache_gb * 1e9),
            parts=parts,
        )
        if self.prefill_rows not in (None, resolved.prefill_rows):
            raise JaxLlamaError(
                f"prefill_rows = {self.prefill_rows}: must be {resolved.prefill_rows}, as a "
                "deterministic engine's calls have one shape"
            )
        resolved.check()
        return resolved

    def _affordable(
        self, cfgs: tuple[ModelConfig, ...], kv_dtype: str, devices: int, parts: int
    ) -> int:
        """Return the number of cache tokens, of the model and its draft, that the memory allows."""
        cfg = cfgs[0]
        states_of_model, *more = (
            jax.eval_shape(functools.partial(init_pages, state, 1, 1, 1, 1, kv_dtype)).layers
            for state in cfgs
        )
        drafts = [layer for layers in more for layer in layers]
        kept = [state for state in (*states_of_model, *drafts) if isinstance(state, KVCache)]
        token = tree_bytes(kept)
        if not token:
            return self.max_slots * (self.max_len or cfg.max_position)
        memory = jax.local_devices()[0].memory_stats()
        if jax.default_backend() == "cpu" or not memory:
            return max(CPU_CACHE_BYTES // token, self.max_len or 2)
        free = memory["bytes_limit"] * self.memory_share - memory["bytes_in_use"]
        # Memory of the work: logits and the sampler's copies of them, the rows' histories, and the
        # activations of a prefill call, the widest of them twice.
        rows = self.max_slots // parts
        rows = rows if self.draft is None else max(rows, DRAFTING_TOKENS[False])
        work = rows * cfg.vocab_size * 24
        work += 2 * PREFILL_TOKENS * 4 * (3 * cfg.feed_width + 8 * cfg.d_model)
        # A draft model's states: one for each row, its snapshot, and a copy for rejected drafts.
        states = tree_bytes([state for state in drafts if not isinstance(state, KVCache)])
        work += 3 * self.max_slots * states
        if self.has_tiers:
            work += (2 * STAGED + 1) * TRANSFER_BYTES
        token = sum(_bytes_of_device(state, devices) for state in kept)
        return max(int((free - work) * parts // token), (self.max_len or 2) * parts)


@dataclasses.dataclass(frozen=True)
class ResolvedOptions:
    """The sizes of an engine: ``EngineOptions`` without a None.

    snapshots: number of snapshots of GLA's states for known prefixes. host_bytes: for prefixes that
    leave the device; 0 keeps none. disk_bytes: None stands for half of the room. parts: of the
    slots and pages, as of ``Cache``; each has ``prefill_rows`` and ``token_budget`` of its own.
    """

    max_slots: int
    max_len: int
    kv_dtype: str
    cache_tokens: int
    memory_share: float
    page_size: int
    prefix_cache: bool
    prefill_chunk: int
    prefill_rows: int
    token_budget: int
    max_queue: int
    steps_per_call: int
    deterministic: bool
    snapshots: int
    draft: str | ModelConfig | None
    draft_tokens: int
    host_bytes: int = 0
    disk_cache: str | None = None
    disk_bytes: int | None = None
    parts: int = 1

    def check(self) -> None:
        """Raise JaxLlamaError for sizes that contradict each other."""
        chunk, slots, max_len = self.prefill_chunk, self.max_slots, self.max_len
        narrowest, page, piece = self.widths[0], self.page_size, self.piece
        rows = 1 if self.deterministic else self.prefill_rows
        call = _rows(rows, narrowest, PREFILL_TOKENS) * narrowest
        tokens = self.pass_widths(1)[-1]
        most = block_rows() // tokens
        for name, fits, why in (
            ("prefill_chunk", chunk <= max_len, f"exceeds max_len = {max_len}"),
            (
                "page_size",
                self.deterministic or page <= chunk,
                f"exceeds prefill_chunk = {chunk}",
            ),
            (
                "page_size",
                not self.snapshots or self.deterministic or not chunk % page,
                f"must divide {chunk}, as GLA's states are taken between chunks",
            ),
            (
                "page_size",
                not self.deterministic or not piece % page,
                f"must divide {piece}, as a deterministic engine reads prompts in such pieces",
            ),
            ("prefill_rows", rows <= slots, f"exceeds max_slots = {slots}"),
            ("token_budget", self.token_budget >= chunk, f"less than prefill_chunk = {chunk}"),
            (
                "prefill_rows",
                call <= self.token_budget,
                f"{self.widths[0]} tokens each exceed token_budget = {self.token_budget}",
            ),
            (
                "cache_tokens",
                self.pages >= self.row_pages * self.parts,
                f"less than max_len = {max_len}"
                + (f" for each of {self.parts} devices" if self.parts > 1 else ""),
            ),
            (
                "cache_tokens",
                not self.deterministic or self.pages >= slots * self.row_pages,
                f"less than {slots} slots of {self.row_pages * page} tokens, and a deterministic "
                "engine preempts no row",
            ),
            (
                "steps_per_call",
                self.steps_per_call < max_len,
                f"an answer within max_len = {max_len} has fewer tokens",
            ),
            (
                "max_slots",
                not self.deterministic or jax.default_backend() == "cpu" or slots <= most,
                f"a deterministic engine computes at most {most * tokens} tokens a pass, "
                f"{tokens} of each of {most} rows",
            ),
        ):
            if not fits:
                value = getattr(self, name)
                raise JaxLlamaError(f"{name} = {getattr(value, 'name', value)}: {why}")

    @property
    def newcomers(self) -> int:
        """A part's newcomers in an admission call, which has no sums."""
        slots = self.max_slots // self.parts
        return min(max(self.prefill_rows, slots // 32), slots)

    def rows(self, width: int) -> int:
        """Return the number of a part's prompts in a prefill call of ``width`` tokens a row."""
        tokens = min(self.token_budget, PREFILL_TOKENS)
        if not self.deterministic:
            return _rows(self.prefill_rows, width, tokens)
        many = _rows(min(self.prefill_rows, self.max_slots), width, tokens)
        return max(many, self.piece // width)

    def row_counts(self, width: int) -> list[int]:
        """Return a part's row counts in the prefill calls of this width.

        They are one, a quarter, half and all of ``rows``. On a CPU, whose calls are small, they are
        one and all. The calls of a deterministic engine fill one block of ``fixed_sums``, two, or
        as many as ``rows``. Fewer prompts than a block has room for cost as much as a block.
        """
        most = self.rows(width)
        if self.deterministic:
            block = self.piece // width
            return sorted({block, min(2 * block, most), most})
        if jax.default_backend() == "cpu":
            return sorted({1, most})
        return sorted({1, -(-most // 4), -(-most // 2), most})

    @property
    def pages(self) -> int:
        return self.cache_tokens // self.page_size

    @property
    def row_pages(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_len // self.page_size)

    @property
    def has_tiers(self) -> bool:
        """Whether prefixes that leave the device are kept."""
        return self.host_bytes > 0 or self.disk_cache is not None

    @property
    def shares_prompts(self) -> bool:
        """Whether a request may begin with a whole prompt that is known, whose last page it copies.

        Its last piece may be no whole ``unit``.
        """
        return self.deterministic and self.prefix_cache and not self.snapshots

    @property
    def more_pages(self) -> int:
        """Largest number of pages that a row can need for one decode call."""
        return -(-self.steps_per_call * self.pass_widths(1)[-1] // self.page_size)

    @property
    def unit(self) -> int:
        """Prefixes are reused in multiples of this many tokens."""
        return self.piece if self.snapshots or self.deterministic else 1

    @property
    def piece(self) -> int:
        """Most tokens of a prompt in one call; pieces begin at multiples of it."""
        return block_rows() if self.deterministic else self.prefill_chunk

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows of the decode programs: 1, 4, 16, 64, 128, 256, 512, 768, ..., max_slots.

        A deterministic engine's programs have at least the tokens of that of
        ``LanguageModel.generate``.
        """
        least = DETERMINISTIC_ROWS // self.pass_widths(1)[0] if self.deterministic else 1
        most = max(self.max_slots, least)
        sizes = (least, 4, 16, 64, 128, *range(256, most, 256))
        sizes = (-(-size // self.parts) * self.parts for size in sizes if least <= size < most)
        return tuple(sorted({*sizes, most}))

    def size(self, rows: int) -> int:
        """Return the number of rows of the smallest program that decodes ``rows`` of each part."""
        return next(size for size in self.sizes if size >= rows * self.parts)

    @property
    def longest_draft(self) -> int:
        """Largest number of tokens of a draft; 0 without drafts."""
        return 0 if self.draft is None else DraftPlan.of(self.draft, self.draft_tokens).most

    def draft_config(self, cfg: ModelConfig) -> ModelConfig | None:
        """Config of the draft's layers, which share the model's cache; None if it has none."""
        return draft_config(cfg, self.draft)

    def pass_widths(self, size: int) -> tuple[int, ...]:
        """Return the numbers of tokens of a row that a pass of ``size`` rows may verify."""
        if self.draft is None:
            return (1,)
        if self.deterministic:
            return DraftPlan.of(self.draft, self.draft_tokens, deterministic=True).widths
        limit = DRAFTING_TOKENS[jax.default_backend() == "cpu"]
        widest = min(DraftPlan.of(self.draft, self.draft_tokens).most + 1, limit // size)
        return tuple(sorted({1, min(widest, 4), widest} - {0}))

    @property
    def contexts(self) -> tuple[int, ...]:
        """Numbers of pages of a row that decode programs read."""
        if self.deterministic or jax.default_backend() == "cpu":
            return (self.row_pages,)
        short = (-(-tokens // self.page_size) for tokens in SHORT_CONTEXTS)
        return (*(pages for pages in short if pages < self.row_pages), self.row_pages)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a prefill call in tokens: 32, 128, 512, 1024, ..., piece.

        On a CPU they begin at 16, because padding costs as much as tokens there. With
        ``deterministic`` they are 32 there, because attention adds otherwise in other widths.
        """
        return chunk_widths(self.piece, jax.default_backend() == "cpu" and not self.deterministic)

    @property
    def history_widths(self) -> tuple[int, ...]:
        """Lengths of the history that sampling depends on, in tokens: 0, 128, 512, ..., max_len."""
        return (0, *powers_of(4, 128, self.max_len))


def _bytes_of_device(state: KVCache, devices: int) -> int:
    """Return a device's bytes of a cache whose heads ``devices`` devices divide. The one head of a
    latent is whole on each."""
    of_heads = any(MODEL_AXIS in spec for spec in jax.tree.leaves(state.specs(None)))
    return tree_bytes(state) // (devices if of_heads else 1)


def draft_config(cfg: ModelConfig, draft: str | ModelConfig | None) -> ModelConfig | None:
    """As ``ResolvedOptions.draft_config``."""
    if isinstance(draft, ModelConfig):
        return draft
    return cfg.draft_head() if draft == "mtp" else None


def _rows(most: int, width: int, tokens: int) -> int:
    """Return the number of prompts of a call: at most ``most``, with about ``tokens`` tokens."""
    return max(min(most, tokens // width), 1)


def _widths(chunk: int) -> tuple[int, ...]:
    return chunk_widths(chunk, jax.default_backend() == "cpu")


def checked_names(options: Iterable[str]) -> None:
    """Raise JaxLlamaError for a name that is no option of ``Engine``."""
    known = [*(field.name for field in dataclasses.fields(EngineOptions)), "observe"]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise JaxLlamaError(
                f"{name}: Engine has no such option; "
                + (f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}")
            )


def _cache_dtype(dtype: DTypeLike) -> str:
    name = cache_dtype_name(dtype)
    if name not in CACHE_DTYPES:
        raise JaxLlamaError(f"kv_dtype = {name!r}: allowed are {', '.join(CACHE_DTYPES)} and fp8")
    return name
