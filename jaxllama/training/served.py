"""The update's forward pass in the reductions of a deterministic engine; its derivative is free.

    loss, scores = objective(setup, params, batch)     batch.prompts: int32 [B, 1]

The engine reads a prompt in pieces and an answer token by token. ``objective`` computes each layer
of whole rows in these forms, and the head as the sampler does. The log-probabilities therefore have
the engine's bits. The backward pass differentiates the trainer's form of a layer
(``decoder.block``) at the input that the engine has there.

All tokens of an answer are one exact draft (``records.Draft``), so each weight is read once for all
of them. On a CPU rows go one by one, as XLA adds the chunks of several rows otherwise.

Left out: layers that read another's keys, losses of routers, FP8 products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.config import LayerConfig, ModelConfig
from jaxllama.decoding.sampling import logprobs_of
from jaxllama.engine.options import default_cache_dtype
from jaxllama.executors.executor import DETERMINISTIC_ROWS
from jaxllama.model import decoder, stacked
from jaxllama.model.cache import init_layer
from jaxllama.model.linear import Stream
from jaxllama.model.lora import Lora, TrainedLora
from jaxllama.model.records import (
    Chunk,
    Draft,
    Hidden,
    Step,
    new_tokens,
    places_of,
    positions_of,
    whole_rows,
)
from jaxllama.text.rows import fixed_pieces
from jaxllama.training.batch import Batch
from jaxllama.training.loss import head_weight, token_logprobs
from jaxllama.training.start import TrainingSetup
from jaxllama.typing import Params, Tree
from pallas_kernels.fixed_sums import by_blocks, fixed_sums


def is_served(setup: TrainingSetup) -> bool:
    """Return whether an update computes its answers as the engine does."""
    config = setup.config
    asked = config.rollout is not None and config.rollout.deterministic
    is_plain = config.router is None and config.products is None
    return asked and is_plain and not setup.model.needs_model


def objective(
    setup: TrainingSetup, params: Params, batch: Batch
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the weighted mean of cross entropies, and {"logprobs", "entropies"} ``[B, T]``.

    params: the floats or frozen weights that the model multiplies by. Entropies have no gradient.
    Places without an answer have no weight; the results are zeros there.
    """
    config, inputs, targets = setup.config, batch.inputs, batch.targets
    assert config.rollout is not None
    room = config.rollout.max_new_tokens
    cfg = setup.model.replace(fixed_sums=True)
    prompts = jnp.asarray(batch.prompts)[:, 0]

    def run(
        layer: LayerConfig, p: Params, stream: Stream, state: None, at: Tree
    ) -> tuple[Stream, None]:
        served = functools.partial(_served_rows, setup, cfg, layer)
        free = functools.partial(_free_rows, cfg, layer, room)
        return Stream(_with_bits_of(served, free)(p, stream.total, prompts)), None

    stream, at = stacked.embed(cfg, params, inputs, jnp.dtype(config.dtype))
    rounded = _with_bits_of(functools.partial(_rounded, setup), lambda x: x)
    stream = stream._replace(x=rounded(stream.total), pending=None)
    x = stacked.walk(cfg, params, stream, at, run).total
    ends = {name: params[name] for name in ("norm", "head", "embed") if name in params}
    served = functools.partial(_served_scores, setup, cfg)
    free = functools.partial(_free_scores, setup)
    at = jnp.arange(len(inputs))[:, None], (prompts - 1)[:, None] + jnp.arange(room)
    x, targets = (whole.at[at].get(mode="clip") for whole in (x, targets))
    found = _with_bits_of(served, free)(ends, x, targets)
    none = jnp.zeros(inputs.shape, jnp.float32)
    logprobs, entropies = (none.at[at].set(values, mode="drop") for values in found)
    loss = -jnp.mean(jnp.asarray(batch.weights) * logprobs)
    return loss, {"logprobs": logprobs, "entropies": entropies}


def _with_bits_of(served: Callable[..., Tree], free: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return a function with the results of ``served`` and the derivative of ``free``."""
    both = jax.custom_vjp(served)
    both.defvjp(
        lambda *operands: (served(*operands), operands),
        lambda operands, change: jax.vjp(free, *operands)[1](change),
    )
    return both


def _rounded(setup: TrainingSetup, x: jax.Array) -> jax.Array:
    """Return x in the run's dtype.

    XLA drops a cast whose result a GPU's fusion makes float32 again, and the masters' further bits
    stay. It keeps this rounding.
    """
    dtype = jnp.finfo(setup.config.dtype)
    x = lax.reduce_precision(x.astype(jnp.float32), dtype.nexp, dtype.nmant)
    return x.astype(setup.config.dtype)


def _engine_params(setup: TrainingSetup, params: Params, rows: int) -> Tree:
    """Return parameters as the engine has them, for ``rows`` rows."""
    if setup.config.lora is None:
        return jax.tree.map(functools.partial(_rounded, setup), params)

    def served(leaf: Tree) -> Tree:
        if not isinstance(leaf, TrainedLora):
            return leaf
        return Lora(*leaf)._replace(rows=jnp.ones((rows,), jnp.int32))

    return jax.tree.map(served, params, is_leaf=lambda leaf: isinstance(leaf, TrainedLora))


def _served_rows(
    setup: TrainingSetup,
    cfg: ModelConfig,
    layer: LayerConfig,
    p: Params,
    x: jax.Array,
    prompts: jax.Array,
) -> jax.Array:
    """Return ``x[B, T, D]`` behind a layer in the engine's form, zeros behind an answer's room.

    prompts: int32 ``[B]``, the tokens of each prompt. A step reads the last of them.
    """
    if jax.default_backend() == "cpu" and len(x) > 1:
        one = functools.partial(_served_rows, setup, cfg, layer, p)
        return lax.map(lambda row: one(row[0][None], row[1][None])[0], (x, prompts))
    assert setup.config.rollout is not None
    batch, length, features = x.shape
    room, begin = setup.config.rollout.max_new_tokens, prompts - 1
    width = max(room, DETERMINISTIC_ROWS)  # a pass of the engine has no fewer rows
    size = max(fixed_pieces(length - room))
    block = decoder.block_of_a_program(cfg)
    if setup.config.lora is None:  # once for all pieces
        p = _engine_params(setup, p, batch)

    def run(part: jax.Array, state: Tree, at: Chunk | Step | Draft) -> tuple[jax.Array, Tree]:
        weights = _engine_params(setup, p, len(part))
        stream, state = block(layer, weights, Stream(part), state, at)
        return stream.total, state

    def read(index: jax.Array, carry: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
        out, state = carry
        first = index * size
        positions, rope = positions_of(cfg, jnp.full_like(begin, first), prompts, size)
        n_new = jnp.clip(begin - first, 0, size)
        part = lax.dynamic_slice_in_dim(x, first, size, axis=1)

        def form(fresh: bool) -> Callable[[Tree], tuple[jax.Array, Tree]]:
            at = new_tokens(positions, n_new, rope, fresh=fresh, cached=True)
            return lambda state: run(part, state, at)

        part, state = lax.cond(index == 0, form(True), form(False), state)
        return lax.dynamic_update_slice_in_dim(out, part, first, axis=1), state

    # XLA's fusions on a CPU round otherwise where it sees that a state has only zeros. It does not
    # see how many pieces a loop reads.
    kv_dtype = default_cache_dtype(x.dtype, jax.local_devices()[0])
    state = init_layer(layer, batch, -(-(length + width) // 64) * 64, kv_dtype)
    x = jnp.pad(x, ((0, 0), (0, width + size), (0, 0)))
    out = jnp.zeros_like(x)
    if size:
        pieces = (jnp.max(begin) + size - 1) // size
        out, state = lax.fori_loop(jnp.zeros_like(pieces), pieces, read, (out, state))
    at = Draft(*places_of(cfg, begin, jnp.full_like(begin, width), width), width, exact=True)
    place = jnp.arange(batch, dtype=jnp.int32)[:, None], at.by_row(at.positions)
    answer, _ = run(x[place].reshape(-1, 1, features), state, at)
    out = out.at[place].set(answer.reshape(batch, width, features))
    return _without_rest(out[:, :length], begin + room - 1)


def _without_rest(x: jax.Array, last: jax.Array) -> jax.Array:
    """Return ``x[B, T, D]`` with zeros behind the place ``last[B]``."""
    is_read = jnp.arange(x.shape[1], dtype=jnp.int32) <= last[:, None]
    return jnp.where(is_read[:, :, None], x, jnp.zeros((), x.dtype))


def _free_rows(
    cfg: ModelConfig, layer: LayerConfig, room: int, p: Params, x: jax.Array, prompts: jax.Array
) -> jax.Array:
    """Return ``_served_rows`` in the trainer's form."""
    at = whole_rows(cfg, x.shape[0], x.shape[1])
    stream, _ = decoder.block(layer, p, Stream(x), None, at)
    return _without_rest(stream.total, prompts + room - 2)


def _served_scores(
    setup: TrainingSetup, cfg: ModelConfig, params: Params, x: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return (log-probabilities of the targets, entropies), as the engine's sampler has them."""
    weights = _engine_params(setup, params, len(x))

    def scores(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = decoder.stored_logits(cfg, weights, Hidden(part[0])).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        return jnp.stack([logprobs_of(logits, part[1]), entropy], axis=-1)

    with fixed_sums(cfg.fixed_sums):
        found = by_blocks(scores, (x.reshape(-1, x.shape[2]), targets.reshape(-1)))
    return found[:, 0].reshape(targets.shape), found[:, 1].reshape(targets.shape)


def _free_scores(
    setup: TrainingSetup, params: Params, x: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``_served_scores`` in the trainer's form, without entropies."""
    normed = decoder.final_norm(setup.model, params, Stream(x))
    weight, cap = head_weight(params, jnp.dtype(setup.config.dtype)), setup.model.logit_softcap
    is_frozen = setup.config.lora is not None
    logprobs = token_logprobs(normed, weight, targets, cap, is_frozen=is_frozen)
    return logprobs, jnp.zeros_like(logprobs)
