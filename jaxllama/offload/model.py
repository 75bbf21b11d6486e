"""OffloadedModel: a LanguageModel whose weights are where a Policy puts them.

    lm = jl.load(source, policy=jl.Policy.parse("0 100 100 0 100 0"))      as any other from here on

It has ``LanguageModel``'s methods; only prefill and the decode loop are its own (``run``).  Weights
are placed as they are read, tensor by tensor, so that no whole copy exists anywhere.

Its tokens are the resident model's, and every policy gives the same bits for batches of one size,
because the programs are the same (``units``).  The resident model's very bits are another matter:
XLA sees its layers in one program and may round once where two units round twice.
In float32, with jax 0.10 on a CPU, it does so only for activations quantized per token (w8a8, fp8)
and ``embedding_scale``; newer ones fuse more, and differ in the last bits.  In bfloat16 a CPU does
so unless XLA_FLAGS has --xla_allow_excess_precision=false, and a GPU's products are tuned a program
at a time besides: where two tokens are a rounding apart, the resident model may take the other one.

Left out: a mesh, ``deterministic``, tokens of a grammar.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxllama.decoding.rows import Report
from jaxllama.decoding.sampling import SamplingParams
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.cache import init_cache
from jaxllama.model.decoder import layer_config
from jaxllama.model.linear import Stream
from jaxllama.model.records import Hidden
from jaxllama.offload import units as programs
from jaxllama.offload.draft import OffloadedDrafting
from jaxllama.offload.draft import check as check_draft
from jaxllama.offload.planner.accounting import check_host
from jaxllama.offload.planner.cost import Task
from jaxllama.offload.policy import Policy
from jaxllama.offload.run import OffloadRun
from jaxllama.offload.store import RowTable, Store
from jaxllama.offload.timeline import NO_RECORD

SCHEME = "w4a16-g64-zero"  # what compress_weight means
KV_DTYPE = "int4"  # what compress_cache means


def kv_dtype_of(policy: Policy, kv_dtype: Any, dtype: Any) -> Any:
    """The cache's dtype under a policy; kv_dtype: what the user asked for; dtype: the default."""
    if not policy.compress_cache:
        return dtype if kv_dtype is None else kv_dtype
    if kv_dtype is not None and (name := jnp.dtype(kv_dtype).name) != KV_DTYPE:
        raise JaxLlamaError(f"policy: compress_cache is {KV_DTYPE}, and kv_dtype is {name!r}")
    return KV_DTYPE


def chunk_of(policy: Policy, chunk: int | None) -> int:
    """Tokens of a prompt that go through a unit at once; chunk: what the user asked for."""
    own = policy.prefill_batch_size
    if chunk is not None and own not in (0, chunk):
        raise JaxLlamaError(f"policy: prefill_batch_size is {own}, and chunk is {chunk}")
    return own or chunk or Task.chunk


@dataclasses.dataclass(frozen=True, repr=False)
class OffloadedModel(LanguageModel):
    """params: a tree of arrays and Stored; see the module docstring."""

    # A call of the loop returns when its tokens are there.
    _runs_ahead: ClassVar[bool] = False

    policy: Policy = Policy()
    store: Store | None = None
    recorder: Any = NO_RECORD

    def save(
        self, directory: str | Path, *, format: str | None = None, progress: bool = False
    ) -> Path:
        """Always a JaxLlamaError: its weights are in pieces."""
        raise JaxLlamaError("policy: an offloaded model is not saved: load it without one")

    def logits(self, tokens: Any, lengths: Any) -> jax.Array:
        """Teacher-forced float32 logits ``[B, T, V]``; weights are loaded once for all rows."""
        hidden, weights = self._layers(tokens, lengths)
        logits = [programs.all_logits(self.config, weights, x) for x in hidden]
        return jnp.concatenate(logits) if len(logits) > 1 else logits[0]

    def states(self, tokens: Any, lengths: Any, kv_dtype: Any = None) -> tuple[Hidden, Any]:
        """(hidden states ``[B, T, D]``, the parameters that make logits of them).

        kv_dtype: of a cache through which every token attends, sparsely if the model does so when
        it decodes; None: no cache.
        """
        hidden, weights = self._layers(tokens, lengths, kv_dtype)
        return Hidden(jnp.concatenate([stream.total for stream in hidden])), weights

    def _layers(self, tokens: Any, lengths: Any, kv_dtype: Any = None) -> tuple[list[Stream], Any]:
        """(what leaves the last layer, by batches; the weights of the head)."""
        tokens, lengths = self._batch(tokens, lengths)
        size = self.policy.gpu_batch_size
        parts = [
            (tokens[first : first + size], lengths[first : first + size])
            for first in range(0, tokens.shape[0], size)
        ]
        cfg, hidden = self.config, [self.embed_tokens(part) for part, _ in parts]
        rope = [
            programs.positions_of(cfg, jnp.zeros_like(n), n, part.shape[1]) for part, n in parts
        ]
        for unit in programs.units_of(cfg, self.policy.sep_layer)[1:-1]:
            weights = self.store.get(unit.weights(self.params))
            alike, kind = layer_config(cfg, unit.layer)
            has_cache = kv_dtype is not None and unit.has_cache
            for index, (at, (part, n)) in enumerate(zip(rope, parts, strict=True)):
                state = init_cache(alike, *part.shape, kv_dtype).layers[0] if has_cache else None
                hidden[index], _ = programs.run_layer(
                    alike,
                    kind,
                    unit.kind,
                    weights,
                    hidden[index],
                    state,
                    at[0],
                    n,
                    at[1],
                    sparse=has_cache,
                )
            jax.block_until_ready(hidden)
        head = programs.ModelUnit("head").weights(self.params)
        return hidden, self.store.get(head)

    def embed_tokens(self, tokens: jax.Array) -> Stream:
        """Of ``tokens [B, T]``, from wherever the table is."""
        table = self.params["embed"]["weight"]
        if isinstance(table, RowTable):
            rows = table.lookup(jax.device_get(tokens))
            return programs.embed_rows(self.config, self.dtype, rows)
        weights = self.store.get({"embed": self.params["embed"]})
        return programs.embed(self.config, self.dtype, weights, tokens)

    # LanguageModel's hooks

    def _lay_out(self, params: Any) -> Any:
        """The same tree: ``Placement`` has put its weights where they belong."""
        return params

    def drafting(self, draft: Any, draft_tokens: Any) -> OffloadedDrafting | None:
        """Raises JaxLlamaError for a policy that verifies no drafts too."""
        drafting = super().drafting(draft, draft_tokens)
        if drafting is None:
            return None
        check_draft(self.policy)
        return OffloadedDrafting(drafting.plan, drafting.params)

    def _cache_options(self, kv_dtype: Any, chunk: int | None) -> tuple[Any, int]:
        """By default what the policy says; an other value than the policy's is a JaxLlamaError."""
        return kv_dtype_of(self.policy, kv_dtype, self.dtype), chunk_of(self.policy, chunk)

    def _groups(self, rows: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        size, count = self.policy.block_size, len(rows)
        return [list(range(first, min(first + size, count))) for first in range(0, count, size)]

    def _start(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        capacity: int,
        room: int,
        sampling: SamplingParams,
        stop_ids: jax.Array,
        options: Any,
    ) -> OffloadRun:
        check_host(self.config, self.policy, tokens.shape, capacity, options.kv_dtype, self.dtype)
        run = OffloadRun(
            self,
            tokens,
            lengths,
            sampling,
            stop_ids,
            room=room,
            limit=options.max_new_tokens,
            capacity=capacity,
            kv_dtype=options.kv_dtype,
            chunk=options.chunk,
        )
        run.step()
        return run

    def _advance(
        self, run: OffloadRun, sampling: SamplingParams, stop_ids: jax.Array, until: int
    ) -> tuple[OffloadRun, Report]:
        run.end_rows()
        while run.steps < until and run.active_batches():
            run.step()
            run.end_rows()
        return run, run.report
