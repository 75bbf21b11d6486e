"""Cross entropy and distillation over the vocabulary, a few thousand tokens at a time.

Float32 logits of a whole batch would be larger than the model. So the forward pass computes head,
loss and gradient chunk by chunk, and keeps only the gradients of the states and of the head. No two
chunks' logits exist at once, and none are computed twice (as in Liger Kernel, arXiv 2410.10989). A
loss has a formula for its gradient (probabilities minus targets), which is one pass over the
logits. ``decoder.softcap`` caps a model's logits, and ``jax.vjp`` differentiates it. Products with
the head read the activations' dtype and sum in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllama.model.decoder import head, softcap
from jaxllama.typing import Params, Tree
from pallas_kernels.qtensor import QTensor, dequantize

CHUNK = 4096  # tokens
# Most logits at once of a head that does not learn: 256 MB of float32. Such a head has no gradient
# to add up, so small chunks cost nothing.
FROZEN_LOGITS = 1 << 26

# chunk(logits [C, V], valid [C], per-token operands, others)
#   -> (sum of losses, other sums, gradient of the former by the logits)
ChunkSums = tuple[jax.Array, dict[str, jax.Array], jax.Array]
ChunkLoss = Callable[..., ChunkSums]


def cross_entropy(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    cap: float | None = None,
    weights: jax.Array | None = None,
    *,
    is_frozen: bool = False,
) -> tuple[jax.Array, Tree]:
    """Return (mean, {"ce": mean}) of the negative natural log-probability of the targets.

    x ``[B, T, D]``: states. w ``[V, D]``: float32 head. targets ``[B, T]``: token ids. cap:
    ``cfg.logit_softcap``. weights ``[B, T]``: each target's weight in the mean, 1 by default; the
    mean still divides by B T. is_frozen: whether w has no gradient.
    """
    if weights is None:
        return _mean_over_tokens(_ce_chunk, cap, x, w, targets, None, is_frozen)
    tokens = (targets, weights)
    return _mean_over_tokens(_weighted_ce_chunk, cap, x, w, tokens, None, is_frozen)


def distillation(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    teacher_x: jax.Array,
    teacher_w: jax.Array,
    *,
    kl_weight: float,
    ce_weight: float,
    temperature: float,
    cap: float | None = None,
    teacher_cap: float | None = None,
) -> tuple[jax.Array, Tree]:
    """Return (loss, {"ce", "kl"}), means over tokens, in nats.

    ``loss = kl_weight * temperature^2 * kl + ce_weight * ce``, where kl = KL(teacher || student) of
    the distributions softened by ``temperature`` (arXiv 1503.02531). cap, teacher_cap: each model's
    ``logit_softcap``.
    """
    chunk = functools.partial(_kl_chunk, kl_weight, ce_weight, temperature, teacher_cap)
    teacher_w = teacher_w.astype(teacher_x.dtype)
    return _mean_over_tokens(chunk, cap, x, w, (targets, teacher_x), teacher_w)


def head_weight(params: Params, dtype: jnp.dtype) -> jax.Array:
    """Return the head's weight in floats; ``dtype`` if it is quantized."""
    weight = head(params)["weight"]
    return dequantize(weight, dtype) if isinstance(weight, QTensor) else weight


def token_logprobs(
    x: jax.Array,
    w: jax.Array,
    targets: jax.Array,
    cap: float | None = None,
    *,
    is_frozen: bool = False,
) -> jax.Array:
    """Return the natural log-probability of every target, float32 ``[B, T]``.

    Arguments as ``cross_entropy``'s. Logits exist for one chunk at a time. The backward pass
    computes them again, because such losses weigh a token by what they read of all tokens.
    """
    split, _ = _chunks(targets.size, w, is_frozen)
    found: jax.Array = _logprobs(cap, is_frozen, split(x), w, split(targets))
    return found.reshape(-1)[: targets.size].reshape(targets.shape)


def token_scores(
    x: jax.Array, w: jax.Array, targets: jax.Array, cap: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (log-probabilities of the targets, entropies of their distributions).

    Both are float32 ``[B, T]``, in nats, and have no gradient. Arguments as ``cross_entropy``'s.
    """
    split, _ = _chunks(targets.size, w, True)
    head = w.astype(x.dtype)

    def chunk_scores(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logp = jax.nn.log_softmax(softcap(_dot(part[0], head, 1, 1), cap), axis=-1)
        chosen = jnp.take_along_axis(logp, part[1][:, None], axis=-1)[:, 0]
        return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    found = lax.map(chunk_scores, (split(x), split(targets)))
    return jax.tree.map(lambda v: v.reshape(-1)[: targets.size].reshape(targets.shape), found)


def draft_divergence(
    x: jax.Array,
    w: jax.Array,
    weights: jax.Array,
    teacher_x: jax.Array,
    teacher_w: jax.Array,
    teacher_cap: float | None = None,
) -> tuple[jax.Array, Tree]:
    """Return (weighted mean of KL(teacher || student), {"right"}), in nats.

    weights ``[B, T]``: each place's weight. "right": weighted share of places where both have the
    same likeliest token. teacher_x, teacher_w: states and head of the teacher, over the student's
    tokens only.
    """
    chunk = functools.partial(_draft_chunk, teacher_cap)
    return _mean_over_tokens(chunk, None, x, w, (weights, teacher_x), teacher_w)


def likeliest(x: jax.Array, w: jax.Array | QTensor, cap: float | None = None) -> jax.Array:
    """Return the likeliest token of each state ``x[B, T, D]``, int32 ``[B, T]``."""
    head = dequantize(w, x.dtype) if isinstance(w, QTensor) else w.astype(x.dtype)
    split, _ = _chunks(x.shape[0] * x.shape[1], head, True)

    def chunk(part: jax.Array) -> jax.Array:
        return jnp.argmax(softcap(_dot(part, head, 1, 1), cap), axis=-1).astype(jnp.int32)

    found = lax.map(chunk, split(x)).reshape(-1)
    return found[: x.shape[0] * x.shape[1]].reshape(x.shape[:2])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logprobs(
    cap: float | None, is_frozen: bool, x: jax.Array, w: jax.Array, targets: jax.Array
) -> jax.Array:
    head = w.astype(x.dtype)
    return lax.map(
        lambda part: -_nll(softcap(_dot(part[0], head, 1, 1), cap), part[1])[0], (x, targets)
    )


def _logprobs_forward(
    cap: float | None, is_frozen: bool, x: jax.Array, w: jax.Array, targets: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _logprobs(cap, is_frozen, x, w, targets), (x, w, targets)


def _logprobs_backward(
    cap: float | None,
    is_frozen: bool,
    saved: tuple[jax.Array, jax.Array, jax.Array],
    cotangents: jax.Array,
) -> tuple[jax.Array, jax.Array | None, None]:
    x, w, targets = saved
    head = w.astype(x.dtype)

    def step(
        d_w: jax.Array | None, part: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array | None, jax.Array]:
        rows, ids, weights = part
        logits, pull = jax.vjp(lambda y: softcap(y, cap), _dot(rows, head, 1, 1))
        d_logits = -_nll(logits, ids)[1] * weights[:, None]
        d_logits = pull(d_logits)[0].astype(x.dtype)
        if d_w is not None:
            d_w = d_w + _dot(d_logits, rows, 0, 0)
        return d_w, _dot(d_logits, head, 1, 0).astype(x.dtype)

    first = None if is_frozen else jnp.zeros_like(w)
    d_w, d_x = lax.scan(step, first, (x, targets, cotangents))
    return d_x, d_w, None


_logprobs.defvjp(_logprobs_forward, _logprobs_backward)


def _ce_chunk(logits: jax.Array, valid: jax.Array, targets: jax.Array, _: None) -> ChunkSums:
    ce, d_logits = _nll(logits, targets)
    ce = jnp.sum(jnp.where(valid, ce, 0.0))
    return ce, {"ce": ce}, jnp.where(valid[:, None], d_logits, 0.0)


def _weighted_ce_chunk(
    logits: jax.Array, valid: jax.Array, tokens: tuple[jax.Array, jax.Array], _: None
) -> ChunkSums:
    targets, weights = tokens
    ce, d_logits = _nll(logits, targets)
    weights = jnp.where(valid, weights, 0.0)
    ce = jnp.sum(ce * weights)
    return ce, {"ce": ce}, d_logits * weights[:, None]


def _kl_chunk(
    kl_weight: float,
    ce_weight: float,
    temperature: float,
    teacher_cap: float | None,
    logits: jax.Array,
    valid: jax.Array,
    tokens: tuple[jax.Array, jax.Array],
    teacher_w: jax.Array,
) -> ChunkSums:
    targets, teacher_x = tokens
    student = jax.nn.log_softmax(logits / temperature, axis=-1)
    teacher = softcap(_dot(teacher_x, teacher_w, 1, 1), teacher_cap)
    teacher = jax.nn.log_softmax(teacher / temperature, axis=-1)
    p = jnp.exp(teacher)
    kl = jnp.sum(jnp.where(valid, jnp.sum(p * (teacher - student), axis=-1), 0.0))
    ce, d_ce = _nll(logits, targets)
    ce = jnp.sum(jnp.where(valid, ce, 0.0))
    d_logits = kl_weight * temperature * (jnp.exp(student) - p) + ce_weight * d_ce
    loss = kl_weight * temperature**2 * kl + ce_weight * ce
    return loss, {"ce": ce, "kl": kl}, jnp.where(valid[:, None], d_logits, 0.0)


def _draft_chunk(
    teacher_cap: float | None,
    logits: jax.Array,
    valid: jax.Array,
    tokens: tuple[jax.Array, jax.Array],
    teacher_w: jax.Array,
) -> ChunkSums:
    weights, teacher_x = tokens
    weights = jnp.where(valid, weights, 0.0)
    student = jax.nn.log_softmax(logits, axis=-1)
    teacher = jax.nn.log_softmax(softcap(_dot(teacher_x, teacher_w, 1, 1), teacher_cap), axis=-1)
    p = jnp.exp(teacher)
    kl = jnp.sum(weights * jnp.sum(p * (teacher - student), axis=-1))
    is_right = jnp.argmax(logits, axis=-1) == jnp.argmax(teacher, axis=-1)
    right = jnp.sum(jnp.where(is_right, weights, 0.0))
    return kl, {"right": right}, (jnp.exp(student) - p) * weights[:, None]


def _nll(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (negative log-probability ``[C]``, its gradient ``[C, V]``)."""
    ids = lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    hit = ids == targets[:, None]
    logp = jax.nn.log_softmax(logits, axis=-1)
    # Unlike a gather, this is fused into the pass that sums.
    return -jnp.sum(jnp.where(hit, logp, 0.0), axis=-1), jnp.exp(logp) - hit.astype(jnp.float32)


def _mean_over_tokens(
    chunk: ChunkLoss,
    cap: float | None,
    x: jax.Array,
    w: jax.Array,
    tokens: Tree,
    others: jax.Array | None,
    is_frozen: bool = False,
) -> tuple[jax.Array, Tree]:
    """Return the chunks' sums over all of x's ``[B, T]``, divided by their number."""
    count = x.shape[0] * x.shape[1]
    split, valid = _chunks(count, w, is_frozen)
    sums = _sums(chunk, cap, is_frozen, split(x), w, (valid, jax.tree.map(split, tokens)), others)
    return jax.tree.map(lambda total: total / count, sums)


def _chunks(
    count: int, w: jax.Array, is_frozen: bool
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return how ``count`` tokens are split, and which places of the chunks have one.

    They are a function from ``[B, T, ...]`` to ``[chunks, C, ...]``, and bool ``[chunks, C]``.
    """
    # Whole tiles of 128 rows.
    most = CHUNK
    if is_frozen:
        most = min(most, max(FROZEN_LOGITS // w.shape[0] // 128, 1) * 128)
    size = min(most, count)
    chunks = -(-count // size)

    def split(leaf: jax.Array) -> jax.Array:
        flat = leaf.reshape(count, *leaf.shape[2:])
        flat = jnp.pad(flat, [(0, chunks * size - count)] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(chunks, size, *flat.shape[1:])

    return split, jnp.arange(chunks * size).reshape(chunks, size) < count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sums(
    chunk: ChunkLoss,
    cap: float | None,
    is_frozen: bool,
    x: jax.Array,
    w: jax.Array,
    tokens: tuple[jax.Array, Tree],
    others: jax.Array | None,
) -> tuple[jax.Array, Tree]:
    head = w.astype(x.dtype)

    def chunk_sums(part: tuple[jax.Array, tuple[jax.Array, Tree]]) -> tuple[jax.Array, Tree]:
        return chunk(softcap(_dot(part[0], head, 1, 1), cap), *part[1], others)[:2]

    sums = lax.map(chunk_sums, (x, tokens))
    return jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums)


def _sums_forward(
    chunk: ChunkLoss,
    cap: float | None,
    is_frozen: bool,
    x: jax.Array,
    w: jax.Array,
    tokens: tuple[jax.Array, Tree],
    others: jax.Array | None,
) -> tuple[Tree, tuple[jax.Array, jax.Array | None]]:
    head = w.astype(x.dtype)

    def step(
        d_w: jax.Array | None, part: tuple[jax.Array, tuple[jax.Array, Tree]]
    ) -> tuple[jax.Array | None, Tree]:
        logits, pull = jax.vjp(lambda y: softcap(y, cap), _dot(part[0], head, 1, 1))
        *sums, d_logits = chunk(logits, *part[1], others)
        d_logits = pull(d_logits)[0].astype(x.dtype)
        d_x = _dot(d_logits, head, 1, 0).astype(x.dtype)
        if d_w is not None:
            d_w = d_w + _dot(d_logits, part[0], 0, 0)
        return d_w, (tuple(sums), d_x)

    d_w, (sums, d_x) = lax.scan(step, None if is_frozen else jnp.zeros_like(w), (x, tokens))
    return jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums), (d_x, d_w)


def _sums_backward(
    chunk: ChunkLoss,
    cap: float | None,
    is_frozen: bool,
    saved: tuple[jax.Array, jax.Array | None],
    cotangents: tuple[jax.Array, Tree],
) -> tuple[jax.Array, jax.Array | None, None, None]:
    """Return the gradients of x and w only.

    Tokens and others (targets, a teacher) have no gradient, and the aux sums pass none on.
    """
    d_x, d_w = saved
    d_loss = cotangents[0]
    d_w = None if d_w is None else d_w * d_loss
    return (d_x.astype(jnp.float32) * d_loss).astype(d_x.dtype), d_w, None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Return the float32 product over one axis of each.

    Without HIGHEST a GPU would use TF32 for float32.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((a_axis,), (b_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
