"""Offloaded: the executor whose weights, cache and activations are placed by a Policy.

    lm = jl.load(source, policy=jl.Policy.parse("0 100 100 0 100 0"))      used like any other model

The weights are placed as they are read, tensor by tensor, so that no whole copy exists anywhere.
The host drives the layers (``run``). The two ends of a turn are programs of their own.

The tokens are the resident model's. Every policy gives the same bits for batches of one size,
because the programs are the same (``programs``). The resident model's bits may differ. XLA sees its
layers in one program and may round once where two units round twice.

In float32, with jax 0.10 on a CPU, this happens only for activations quantized per token (w8a8,
fp8) and for ``embedding_scale``. Newer versions fuse more, and differ in the last bits. In bfloat16
a CPU does so unless XLA_FLAGS has --xla_allow_excess_precision=false. A GPU also tunes its products
for each program. The resident model may choose the other one of two tokens that are a rounding
apart.

LoRA adapters beside the weights stay on the device, because their factors are small and every step
reads them.

In a ``deterministic`` model each row has the same bits whatever the batch, ``chunk`` and the
policy's tiers. Every program has ``gpu_batch_size`` rows, and prompts are read in fixed widths.
Another ``gpu_batch_size`` may round differently. So may the resident model, which reads prompts one
by one.

Left out: a mesh, drafts of a deterministic model, tokens of a grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts
from jaxllama.decoding.gain import DRAFT
from jaxllama.decoding.rows import Report
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.executor import Call, DraftSource, Executor
from jaxllama.executors.offloaded import programs
from jaxllama.executors.offloaded.batch import begin_answer
from jaxllama.executors.offloaded.drafts import advance_drafts
from jaxllama.executors.offloaded.expert_programs import Places
from jaxllama.executors.offloaded.experts import ExpertWork, placed_experts
from jaxllama.executors.offloaded.room import check_host
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.model.cache import cache_dtype_name, check_has_keys, init_layer
from jaxllama.model.decoder import activation_dtype
from jaxllama.model.linear import Stream
from jaxllama.model.lora import ROWS, with_rows
from jaxllama.model.records import Hidden
from jaxllama.offload.experts import ExpertBias, ExpertTensor
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import RowTable, Store, is_stored
from jaxllama.offload.timeline import NO_RECORD, Recording
from jaxllama.offload.units import ModelUnit, units_of
from jaxllama.typing import ArrayOrNumpy, Params, Tree

SCHEME = "w4a16-g64-zero"  # the scheme of compress_weight
KV_DTYPE = "int4"  # the cache's dtype under compress_cache
CHUNK = 512  # default number of tokens of a prompt that pass through a unit at once


def kv_dtype_of(policy: Policy, kv_dtype: DTypeLike | None, dtype: DTypeLike | None) -> Any:
    """Return the cache's dtype under a policy. ``kv_dtype`` is the user's argument, ``dtype`` the
    default.

    Raises JaxLlamaError if the policy compresses the cache and the user names another dtype.
    """
    name = None if kv_dtype is None else cache_dtype_name(kv_dtype)
    if not policy.compress_cache:
        return name or dtype
    if name not in (None, KV_DTYPE):
        raise JaxLlamaError(f"policy: compress_cache is {KV_DTYPE}, and kv_dtype is {name!r}")
    return KV_DTYPE


def chunk_of(policy: Policy, chunk: int | None) -> int:
    """Return the tokens of a prompt that pass through a unit at once; ``chunk`` is the user's
    argument.

    Raises JaxLlamaError if the policy has another value.
    """
    size = policy.prefill_batch_size
    if chunk is not None and size not in (0, chunk):
        raise JaxLlamaError(f"policy: prefill_batch_size is {size}, and chunk is {chunk}")
    return size or chunk or CHUNK


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """The executor of parameters that are a tree of arrays and Stored tensors.

    policy, store: where the parts of the parameters are.
    recorder: notes every load, computation and store (``offload.timeline``).
    """

    policy: Policy
    store: Store
    recorder: Recording = NO_RECORD
    on_device: ClassVar[bool] = False
    runs_ahead: ClassVar[bool] = False

    @property
    def mesh(self) -> None:
        return None

    @property
    def block_size(self) -> int:
        return self.policy.block_size

    def with_params(self, params: Params) -> Offloaded:
        return self

    def with_policy(self, **changes: Any) -> Offloaded:
        """Return the executor with other values in its policy. The store stays."""
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, **changes))

    def laid_out(self, params: Params) -> Params:
        """Return the same tree: ``Placement`` has already stored its weights."""
        return params

    def whole(self, cfg: ModelConfig, params: Params) -> Params:
        raise JaxLlamaError("policy: an offloaded model is not saved: load it without one")

    @property
    def arrangement(self) -> str:
        return f"policy {self.policy}"

    def leaves(self, params: Params) -> Iterator[tuple[str, ArrayOrNumpy]]:
        stored = jax.tree_util.tree_leaves_with_path(
            params, is_leaf=lambda leaf: is_stored(leaf) or isinstance(leaf, ExpertTensor)
        )
        for path, leaf in stored:
            name = jax.tree_util.keystr(path)
            if isinstance(leaf, ExpertTensor):
                if leaf.is_whole:
                    yield from ((name, part) for part in jax.tree.leaves(leaf.hot))
                for expert in sorted((*leaf.host, *leaf.disk)):
                    yield f"{name}[{expert}]", leaf.stored(self.store, expert)
            elif isinstance(leaf, RowTable):
                yield name, leaf.lookup(np.arange(leaf.shape[0]))
            elif isinstance(leaf, ExpertBias):
                yield name, leaf.host
            else:
                yield name, self.store.get(leaf)

    def cache_options(
        self,
        cfg: ModelConfig,
        kv_dtype: DTypeLike | None,
        chunk: int | None,
        dtype: DTypeLike | None,
    ) -> tuple[Any, int]:
        """Return the cache's dtype and the chunk, by default the policy's.

        Raises JaxLlamaError for values that differ from the policy's.
        """
        check_has_keys(cfg, kv_dtype=kv_dtype)
        return kv_dtype_of(self.policy, kv_dtype, dtype), chunk_of(self.policy, chunk)

    def check_drafts(self, deterministic: bool) -> None:
        if deterministic:
            raise JaxLlamaError(
                "policy: a deterministic model takes no draft: the pass that verifies one is wider "
                "than a step"
            )
        if self.policy.cache.device < 100 or self.policy.cpu_attention:
            raise JaxLlamaError(
                "policy: a draft needs the whole cache on the device, attention too"
            )

    def begin(self, cfg: ModelConfig, params: Params, call: Call) -> OffloadedDecoding:
        (rows, width), dtype = call.tokens.shape, activation_dtype(params)
        check_host(cfg, self.policy, (rows, width), call.capacity, call.kv_dtype, dtype)
        if call.drafting is not None:
            cfg = cfg.replace(taps=call.drafting.plan.draft.taps)
        run = self.run(cfg, params, call)
        if call.drafting is None or not call.drafting.plan.draft.reads_hidden:
            run.step()
            return OffloadedDecoding(run, call)
        plan, own, _ = call.drafting
        head = self._on_device(plan.draft.weights(params, own))
        source = DraftSource(plan, head)
        run.begin_head(plan.draft, head)
        run.step()
        return OffloadedDecoding(run, dataclasses.replace(call, drafting=source))

    def _on_device(self, params: Params) -> Params:
        """Return parameters on the device, where a draft needs all of its own."""
        table = params["embed"]["weight"]
        if isinstance(table, RowTable):
            rows = table.lookup(np.arange(table.shape[0]))
            params = {**params, "embed": {"weight": rows}}
        return self.store.get(params)

    def run(self, cfg: ModelConfig, params: Params, call: Call) -> OffloadRun:
        """Return the run of a call's block, before its first step."""
        return OffloadRun(self.policy, self.store, cfg, params, call, self.recorder)

    def logits(
        self, cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Return the logits; weights but for single experts are loaded once for all rows."""
        hidden, weights = self._layers(cfg, params, tokens, lengths)
        logits = [programs.all_logits(cfg, weights, x) for x in hidden]
        return jnp.concatenate(logits) if len(logits) > 1 else logits[0]

    def states(
        self,
        cfg: ModelConfig,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        kv_dtype: DTypeLike | None = None,
    ) -> tuple[Hidden, Params]:
        hidden, weights = self._layers(cfg, params, tokens, lengths, kv_dtype)
        return Hidden(jnp.concatenate([stream.total for stream in hidden])), weights

    def _layers(
        self,
        cfg: ModelConfig,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        kv_dtype: DTypeLike | None = None,
    ) -> tuple[list[Stream], Tree]:
        """Return the streams that leave the last layer, by batches, and the head's weights."""
        size = self.policy.gpu_batch_size
        parts = [
            (tokens[first : first + size], lengths[first : first + size])
            for first in range(0, tokens.shape[0], size)
        ]
        adapters = params.get(ROWS)
        hidden = [programs.embed_tokens(self.store, cfg, params, part) for part, _ in parts]
        rope = [
            programs.positions_of(cfg, jnp.zeros_like(n), n, part.shape[1]) for part, n in parts
        ]
        work = ExpertWork(self.store, self.policy)
        for unit in units_of(cfg, self.policy.sep_layer)[1:-1]:
            weights = self.store.get(unit.weights(params))
            layer = cfg.layers[unit.layer]
            has_cache = kv_dtype is not None and unit.has_cache
            for index, (at, (part, n)) in enumerate(zip(rope, parts, strict=True)):
                layer_weights = weights
                if adapters is not None:
                    layer_weights = with_rows(weights, adapters[index * size :][:size])
                rows, width = part.shape
                state = init_layer(layer, rows, width, kv_dtype) if has_cache else None
                if unit.kind != "mix" and placed_experts(layer_weights) is not None:
                    mixes, where = unit.kind != "feed", Places(at[0], n, at[1])
                    hidden[index], _ = work.layer(
                        layer, mixes, unit, layer_weights, hidden[index], state, where, has_cache
                    )
                    continue
                hidden[index], _ = programs.run_layer(
                    layer,
                    unit.kind,
                    layer_weights,
                    hidden[index],
                    state,
                    at[0],
                    n,
                    at[1],
                    sparse=has_cache,
                )
            jax.block_until_ready(hidden)
        head = ModelUnit("head").weights(params)
        return hidden, self.store.get(head)


class OffloadedDecoding:
    """The state of a block of rows. ``advance`` returns when the tokens have arrived."""

    def __init__(self, run: OffloadRun, call: Call) -> None:
        self._run, self._call = run, call
        if call.drafting is not None:
            plan, params, _ = call.drafting
            prompts = run.cut(call.tokens, call.lengths)
            for batch, (tokens, lengths, _) in zip(run.batches, prompts, strict=True):
                batch.rows = drafts.begin(plan, params, tokens, lengths, batch.rows, call.capacity)
                if batch.head is not None:
                    batch.rows = begin_answer(
                        plan.draft, params, batch.rows, batch.head, batch.output, lengths
                    )
                    batch.head = None  # the rows have it now

    @property
    def report(self) -> Report:
        return self._run.report

    def advance(self, until: int, how: int = DRAFT) -> Report:
        del how
        run, call = self._run, self._call
        if call.drafting is not None:
            plan, params, _ = call.drafting
            advance_drafts(run, plan, params, call.stop_ids, until, call.limit)
            return run.report
        run.end_rows()
        while run.steps < until and run.active_batches():
            run.step()
            run.end_rows()
        return run.report

    def end(self, rows: np.ndarray) -> None:
        self._run.end_rows(rows)


def offloaded(executor: Executor) -> Offloaded:
    """Return the executor of a model loaded with a policy, as its own type."""
    return cast(Offloaded, executor)
