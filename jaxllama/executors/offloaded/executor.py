"""Offloaded: the executor where weights, cache and activations are where a Policy puts them.

    lm = jl.load(source, policy=jl.Policy.parse("0 100 100 0 100 0"))      as any other from here on

Weights are placed as they are read, tensor by tensor, so that no whole copy exists anywhere.  The
host drives the layers (``run``); the two ends of a turn are programs of their own.

Its tokens are the resident model's, and every policy gives the same bits for batches of one size,
because the programs are the same (``programs``).  The resident model's very bits are another
matter: XLA sees its layers in one program and may round once where two units round twice.
In float32, with jax 0.10 on a CPU, it does so only for activations quantized per token (w8a8, fp8)
and ``embedding_scale``; newer ones fuse more, and differ in the last bits.  In bfloat16 a CPU does
so unless XLA_FLAGS has --xla_allow_excess_precision=false, and a GPU's products are tuned a program
at a time besides: where two tokens are a rounding apart, the resident model may take the other one.

LoRA adapters beside the weights stay on the device: their factors are small, and every step reads
them.

A ``deterministic`` model's rows have the same bits whatever the batch, ``chunk`` and the tiers that
the policy names: every program has ``gpu_batch_size`` rows, and prompts are read in fixed widths.
Another ``gpu_batch_size`` may round otherwise, and so may the resident model, which reads prompts
one by one.

Left out: a mesh, drafts of a deterministic model, tokens of a grammar.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import ModelConfig
from jaxllama.decoding import drafts
from jaxllama.decoding.forward import Params
from jaxllama.decoding.rows import Report
from jaxllama.errors import JaxLlamaError
from jaxllama.executors.executor import Call, Executor
from jaxllama.executors.offloaded import programs
from jaxllama.executors.offloaded.drafts import advance_drafts
from jaxllama.executors.offloaded.room import check_host
from jaxllama.executors.offloaded.run import OffloadRun
from jaxllama.model.cache import init_cache
from jaxllama.model.decoder import activation_dtype, layer_config
from jaxllama.model.linear import Stream
from jaxllama.model.lora import ROWS, with_rows
from jaxllama.model.records import Hidden
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.offload.timeline import NO_RECORD
from jaxllama.offload.units import ModelUnit, units_of

SCHEME = "w4a16-g64-zero"  # what compress_weight means
KV_DTYPE = "int4"  # what compress_cache means
CHUNK = 512  # tokens of a prompt that go through a unit at once, where nobody says


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
    return own or chunk or CHUNK


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """policy, store: where the parts of parameters are, which are a tree of arrays and Stored.
    recorder: sees every load, computation and store (``offload.timeline``)."""

    policy: Policy
    store: Store
    recorder: Any = NO_RECORD

    @property
    def mesh(self) -> None:
        return None

    @property
    def on_device(self) -> bool:
        return False

    @property
    def runs_ahead(self) -> bool:
        return False

    @property
    def block_size(self) -> int:
        return self.policy.block_size

    def with_params(self, params: Params) -> Offloaded:
        return self

    def with_policy(self, **changes: Any) -> Offloaded:
        """The executor whose policy has other values; the store stays."""
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, **changes))

    def laid_out(self, params: Params) -> Params:
        """The same tree: ``Placement`` has put its weights where they belong."""
        return params

    def whole(self, cfg: ModelConfig, params: Params) -> Params:
        raise JaxLlamaError("policy: an offloaded model is not saved: load it without one")

    def cache_options(self, kv_dtype: Any, chunk: int | None, dtype: Any) -> tuple[Any, int]:
        """By default what the policy says; an other value than the policy's is a JaxLlamaError."""
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
        shape, dtype = call.tokens.shape, activation_dtype(params)
        check_host(cfg, self.policy, shape, call.capacity, call.kv_dtype, dtype)
        run = self.run(cfg, params, call)
        run.step()
        return OffloadedDecoding(run, call)

    def run(self, cfg: ModelConfig, params: Params, call: Call) -> OffloadRun:
        """The block of a call, with nothing done yet."""
        assert call.chunk is not None
        return OffloadRun(
            self.policy,
            self.store,
            cfg,
            params,
            call.tokens,
            call.lengths,
            call.sampling,
            call.stop_ids,
            room=call.room,
            limit=call.limit,
            capacity=call.capacity,
            kv_dtype=call.kv_dtype,
            chunk=call.chunk,
            alone=call.alone,
            recorder=self.recorder,
        )

    def logits(
        self, cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        """Weights are loaded once for all rows."""
        hidden, weights = self._layers(cfg, params, tokens, lengths)
        logits = [programs.all_logits(cfg, weights, x) for x in hidden]
        return jnp.concatenate(logits) if len(logits) > 1 else logits[0]

    def states(
        self,
        cfg: ModelConfig,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        kv_dtype: Any = None,
    ) -> tuple[Hidden, Params]:
        hidden, weights = self._layers(cfg, params, tokens, lengths, kv_dtype)
        return Hidden(jnp.concatenate([stream.total for stream in hidden])), weights

    def _layers(
        self,
        cfg: ModelConfig,
        params: Params,
        tokens: jax.Array,
        lengths: jax.Array,
        kv_dtype: Any = None,
    ) -> tuple[list[Stream], Any]:
        """(the streams that leave the last layer, by batches; the weights of the head)."""
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
        for unit in units_of(cfg, self.policy.sep_layer)[1:-1]:
            weights = self.store.get(unit.weights(params))
            alike, kind = layer_config(cfg, unit.layer)
            has_cache = kv_dtype is not None and unit.has_cache
            for index, (at, (part, n)) in enumerate(zip(rope, parts, strict=True)):
                own = weights
                if adapters is not None:
                    own = with_rows(weights, adapters[index * size :][:size])
                state = init_cache(alike, *part.shape, kv_dtype).layers[0] if has_cache else None
                hidden[index], _ = programs.run_layer(
                    alike,
                    kind,
                    unit.kind,
                    own,
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
    """A block of rows; ``advance`` returns when its tokens are there."""

    def __init__(self, run: OffloadRun, call: Call) -> None:
        self._run, self._call = run, call
        if call.drafting is not None:
            plan, params = call.drafting
            prompts = run.cut(call.tokens, call.lengths)
            for batch, (tokens, lengths, _) in zip(run.batches, prompts, strict=True):
                batch.rows = drafts.begin(plan, params, tokens, lengths, batch.rows, call.capacity)

    @property
    def report(self) -> Report:
        return self._run.report

    def advance(self, until: int) -> Report:
        run, call = self._run, self._call
        if call.drafting is not None:
            advance_drafts(run, *call.drafting, call.stop_ids, until, call.limit)
            return run.report
        run.end_rows()
        while run.steps < until and run.active_batches():
            run.step()
            run.end_rows()
        return run.report

    def end(self, rows: np.ndarray) -> None:
        self._run.end_rows(rows)


def offloaded(executor: Executor) -> Offloaded:
    """The executor of a model that was loaded with a policy, by its own type."""
    return cast(Offloaded, executor)
