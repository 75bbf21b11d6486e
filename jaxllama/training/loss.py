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

from jaxllama.model.decoder import softcap
from jaxllama.typing import Tree

CHUNK = 4096  # tokens

# chunk(logits [C, V], valid [C], per-token operands, others)
#   -> (sum of losses, other sums, gradient of the former by the logits)
ChunkLoss = Callable[..., tuple[jax.Array, Tree, jax.Array]]


def cross_entropy(
    x: jax.Array, w: jax.Array, targets: jax.Array, cap: float | None = None
) -> tuple[jax.Array, Tree]:
    """Return (mean, {"ce": mean}) of the negative natural log-probability of the targets.

    x ``[B, T, D]``: states. w ``[V, D]``: float32 head. targets ``[B, T]``: token ids. cap:
    ``cfg.logit_softcap``.
    """
    return _mean_over_tokens(_ce_chunk, cap, x, w, targets, None)


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


def _ce_chunk(logits, valid, targets, _):
    ce, d_logits = _nll(logits, targets)
    ce = jnp.sum(jnp.where(valid, ce, 0.0))
    return ce, {"ce": ce}, jnp.where(valid[:, None], d_logits, 0.0)


def _kl_chunk(kl_weight, ce_weight, temperature, teacher_cap, logits, valid, tokens, teacher_w):
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


def _nll(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (negative log-probability ``[C]``, its gradient ``[C, V]``)."""
    ids = lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    hit = ids == targets[:, None]
    logp = jax.nn.log_softmax(logits, axis=-1)
    # Unlike a gather, this is fused into the pass that sums.
    return -jnp.sum(jnp.where(hit, logp, 0.0), axis=-1), jnp.exp(logp) - hit.astype(jnp.float32)


def _mean_over_tokens(
    chunk: ChunkLoss, cap: float | None, x, w, tokens, others
) -> tuple[jax.Array, Tree]:
    """Return the chunks' sums over all of x's ``[B, T]``, divided by their number."""
    count = x.shape[0] * x.shape[1]
    size = min(CHUNK, count)
    chunks = -(-count // size)

    def split(leaf: jax.Array) -> jax.Array:
        flat = leaf.reshape(count, *leaf.shape[2:])
        flat = jnp.pad(flat, [(0, chunks * size - count)] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(chunks, size, *flat.shape[1:])

    valid = jnp.arange(chunks * size).reshape(chunks, size) < count
    sums = _sums(chunk, cap, split(x), w, (valid, jax.tree.map(split, tokens)), others)
    return jax.tree.map(lambda total: total / count, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(chunk: ChunkLoss, cap: float | None, x, w, tokens, others):
    head = w.astype(x.dtype)

    def one(part):
        return chunk(softcap(_dot(part[0], head, 1, 1), cap), *part[1], others)[:2]

    sums = lax.map(one, (x, tokens))
    return jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums)


def _sums_forward(chunk: ChunkLoss, cap: float | None, x, w, tokens, others):
    head = w.astype(x.dtype)

    def step(d_w, part):
        logits, pull = jax.vjp(lambda y: softcap(y, cap), _dot(part[0], head, 1, 1))
        *sums, d_logits = chunk(logits, *part[1], others)
        d_logits = pull(d_logits)[0].astype(x.dtype)
        d_x = _dot(d_logits, head, 1, 0).astype(x.dtype)
        return d_w + _dot(d_logits, part[0], 0, 0), (tuple(sums), d_x)

    d_w, (sums, d_x) = lax.scan(step, jnp.zeros_like(w), (x, tokens))
    return jax.tree.map(lambda parts: jnp.sum(parts, axis=0), sums), (d_x, d_w)


def _sums_backward(chunk: ChunkLoss, cap: float | None, saved, cotangents):
    """Return the gradients of x and w only.

    Tokens and others (targets, a teacher) have no gradient, and the aux sums pass none on.
    """
    d_x, d_w = saved
    d_loss = cotangents[0]
    return (d_x.astype(jnp.float32) * d_loss).astype(d_x.dtype), d_w * d_loss, None, None


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
