"""``jaxllama eval``: perplexity of a text, and the distance of a model from a reference.

The text is read in windows of ``window`` tokens that begin ``stride`` apart. A window scores only
the tokens that no earlier window has scored. So every token but the first is predicted once, from
at least ``window - stride`` tokens before it, except at the beginning of the text. The default
stride, ``window - 1``, scores every token with one pass over the text. A smaller stride is slower
and gives each prediction more context. perplexity = exp(mean negative natural log-probability).

With a reference, the same predictions give three more figures. ``rise`` is the relative increase of
the perplexity over the reference's. ``kl`` is the mean of KL(reference || model) in nats. ``top1``
is the share of positions at which both models have the same likeliest token. The ``_se`` of a
figure is its standard error. It comes from the means of ``BATCH`` consecutive predictions, since
neighbours are not independent (batch means). The error of ``rise`` is the error of the pairs, in
which the text's own difficulty cancels. ``evaluation.damage`` locates the damage.

A quantized cache is scored in the same single pass. Keys and values are written in their stored
form. Every query reads all of them from the cache, its own included, as in decoding token by token.
Sparse attention works alike: every query reads its share of V. Windows are padded to one shape, so
one program serves any text, and logits exist for ``BLOCK`` positions at a time. An offloaded
model's weights are loaded once for as many windows as its policy has rows in a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel
from jaxllama.model.decoder import forward, logits
from jaxllama.model.records import Hidden
from jaxllama.progress import working
from jaxllama.typing import JsonObject, Params, Tree

BLOCK = 128
BATCH = 64  # number of predictions whose mean is one observation of a standard error
# Columns of a prediction: negative log-probabilities, KL, likeliest tokens.
COLUMNS = ("nll", "reference_nll", "kl", "token", "reference_token")


def perplexity(
    lm: LanguageModel,
    text: str,
    window: int | None = None,
    stride: int | None = None,
    *,
    reference: LanguageModel | None = None,
    kv_dtype: DTypeLike | None = None,
    max_tokens: int | None = None,
    progress: bool = False,
) -> JsonObject:
    """Score a text.

    Parameters
    ----------
    lm : LanguageModel
        The model.
    text : str
        The text.
    window : int or None
        Tokens of a window; by default 512, or the context length if that is shorter.
    stride : int or None
        Tokens between two windows, at most window - 1.
    reference : LanguageModel or None
        A model with the same vocabulary to compare with.
    kv_dtype : data-type or None
        Dtype of a cache through which the model is scored; the reference has none. An offloaded
        model's default follows from its policy.
    max_tokens : int or None
        Number of tokens of the text to use.
    progress : bool
        Whether to show a bar on stderr.

    Returns
    -------
    dict
        "perplexity", "tokens" (number of predictions), "nll" (mean, in nats), "window", "stride";
        with a reference also "rise", "kl" (nats) and "top1". Each figure has a standard error
        "..._se".

    Raises
    ------
    JaxLlamaError
        If the model has no tokenizer, or the reference has another vocabulary. If the window
        exceeds a context, or the stride would skip tokens. If the text has fewer than two tokens.
    """
    window, stride = window_and_stride(lm, window, stride, reference)
    ids = tokens_of(lm, text, reference)[:max_tokens]
    rows = predictions(
        lm, ids, window, stride, reference=reference, kv_dtype=kv_dtype, progress=progress
    )
    return {**summary(rows, reference is not None), "window": window, "stride": stride}


def window_and_stride(
    lm: LanguageModel,
    window: int | None,
    stride: int | None,
    reference: LanguageModel | None = None,
) -> tuple[int, int]:
    """Return window and stride of ``perplexity`` with defaults filled in; raises its errors."""
    models = [lm] if reference is None else [lm, reference]
    longest = min(model.config.max_position for model in models)
    window = min(512, longest) if window is None else window
    if not 2 <= window <= longest:
        raise JaxLlamaError(f"window = {window}: must be from 2 to {longest}")
    stride = window - 1 if stride is None else stride
    if not 1 <= stride < window:
        raise JaxLlamaError(f"stride = {stride}: must be from 1 to window - 1, {window - 1}")
    if reference is not None and reference.config.vocab_size != lm.config.vocab_size:
        raise JaxLlamaError(
            f"the reference has a vocabulary of {reference.config.vocab_size}, the model one of "
            f"{lm.config.vocab_size}"
        )
    return window, stride


def tokens_of(lm: LanguageModel, text: str, reference: LanguageModel | None = None) -> np.ndarray:
    """Return the text's token ids, int32.

    Raises JaxLlamaError for a model without a tokenizer, or a reference that reads other ids.
    """
    if lm.tokenizer is None:
        raise JaxLlamaError(f"{lm.config.name} has no tokenizer, so it cannot read text")
    ids, other = lm.tokenizer.encode(text), reference and reference.tokenizer
    if other is not None and other.encode(text) != ids:
        raise JaxLlamaError("the reference's tokenizer gives other tokens than the model's")
    return np.asarray(ids, np.int32)


def predictions(
    lm: LanguageModel,
    ids: np.ndarray,
    window: int,
    stride: int,
    *,
    reference: LanguageModel | None = None,
    kv_dtype: DTypeLike | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Return the predictions, float32 ``[len(ids) - 1, len(COLUMNS)]``: a row a token but the
    first.

    Without a reference the model is its own reference.
    """
    if len(ids) < 2:
        raise JaxLlamaError(f"the text has {len(ids)} tokens: at least 2 are needed")
    models = [lm] if reference is None else [lm, reference]
    kv_dtype, _ = lm.executor.cache_options(lm.config, kv_dtype, None, None)
    if kv_dtype is None and lm.config.attn_sparsity < 1:
        kv_dtype = lm.dtype
    rows, parts = [], list(_windows(ids, window, stride))
    with working("scoring", len(parts), progress, unit="windows") as bar:
        for tokens, scored, length, row_scores, params in _read(lm, iter(parts), kv_dtype):
            hidden = [row_scores]
            if reference is not None:
                row = jnp.asarray(tokens[None])
                hidden.append(_hidden(reference.config, reference.params, row, length, None))
                params = (*params, reference.params)
            found = _score(
                tuple(model.config for model in models),
                params,
                tuple(hidden),
                jnp.asarray(np.append(tokens[1:], 0)),
            )
            rows.append(np.asarray(found)[scored > 0])
            bar()
    return np.concatenate(rows)


def summary(rows: np.ndarray, has_reference: bool) -> JsonObject:
    """Return the report of ``perplexity`` from ``predictions``, without its window and stride."""
    nll, reference_nll, kl, token, other = np.asarray(rows, np.float64).T
    mean = nll.mean()
    value = math.exp(mean) if mean < 700 else math.inf
    report = {
        "perplexity": value,
        "perplexity_se": value * _standard_error(nll),
        "tokens": len(rows),
        "nll": float(mean),
        "nll_se": _standard_error(nll),
    }
    if not has_reference:
        return report
    ratio = math.exp(min((nll - reference_nll).mean(), 700.0))
    same = (token == other).astype(np.float64)
    return {
        **report,
        "rise": ratio - 1.0,
        "rise_se": ratio * _standard_error(nll - reference_nll),
        "kl": float(kl.mean()),
        "kl_se": _standard_error(kl),
        "top1": float(same.mean()),
        "top1_se": _standard_error(same),
    }


def _standard_error(x: np.ndarray) -> float:
    """Return the standard error of the mean of ``x``, whose neighbours are not independent.

    The result is NaN for fewer than two batches.
    """
    whole = len(x) // BATCH
    if whole < 2:
        return math.nan
    means = x[: whole * BATCH].reshape(whole, BATCH).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(whole))


def _read(
    lm: LanguageModel, windows: Iterator[tuple[np.ndarray, np.ndarray]], kv_dtype: DTypeLike | None
) -> Iterator[tuple[np.ndarray, np.ndarray, jax.Array, Hidden, tuple[Params, ...]]]:
    """Yield window, scored positions, its length, hidden states ``[T, D]`` and parameters."""
    size = lm.executor.block_size or 1
    while block := list(itertools.islice(windows, size)):
        rows = jnp.asarray(np.stack([tokens for tokens, _ in block]))
        lengths = jnp.asarray([np.count_nonzero(scored >= 0) for _, scored in block], jnp.int32)
        states, params = lm.executor.states(lm.config, lm.params, rows, lengths, kv_dtype)
        hidden = [states[row] for row in range(len(block))]
        for i, (tokens, scored) in enumerate(block):
            yield tokens, scored, lengths[i : i + 1], hidden[i], (params,)


def _windows(ids: np.ndarray, window: int, stride: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (tokens ``[window]``, scored ``[window]``).

    scored is 1 where the next token is to be predicted, 0 elsewhere, and -1 in the padding.
    """
    done = 1
    for begin in range(0, len(ids), stride):
        part = ids[begin : begin + window]
        tokens, scored = np.zeros(window, np.int32), np.full(window, -1)
        tokens[: len(part)] = part
        scored[: len(part)] = 0
        scored[done - begin - 1 : len(part) - 1] = 1
        done = begin + len(part)
        yield tokens, scored
        if done == len(ids):
            return


@functools.partial(jax.jit, static_argnums=0)
def _hidden(
    cfg: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array, cache: Tree
) -> Hidden:
    """Return the hidden states ``[T, D]`` of one window."""
    return forward(cfg, params, tokens, lengths, cache, sparse=cache is not None)[0][0]


@functools.partial(jax.jit, static_argnums=0)
def _score(
    cfgs: tuple[ModelConfig, ...],
    params: tuple[Params, ...],
    hidden: tuple[Hidden, ...],
    targets: jax.Array,
) -> jax.Array:
    """Return ``COLUMNS`` at every position, ``[T, 5]``; the second model is the reference."""
    length = targets.shape[0]
    blocks = -(-length // BLOCK)

    def cut(x: jax.Array) -> jax.Array:
        pad = ((0, blocks * BLOCK - length),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, pad).reshape(blocks, BLOCK, *x.shape[1:])

    def score_block(block: Tree) -> jax.Array:
        hidden, targets = block
        logs = [
            jax.nn.log_softmax(logits(cfg, p, x))
            for cfg, p, x in zip(cfgs, params, hidden, strict=True)
        ]
        log_probs, other = logs[0], logs[-1]
        nll = [-jnp.take_along_axis(x, targets[:, None], axis=1)[:, 0] for x in (log_probs, other)]
        # A token of zero probability under the reference adds nothing.
        kl = jnp.sum(jnp.where(other > -jnp.inf, jnp.exp(other) * (other - log_probs), 0.0), axis=1)
        top = [jnp.argmax(x, axis=1).astype(jnp.float32) for x in (log_probs, other)]
        return jnp.stack([*nll, kl, *top], axis=1)

    return lax.map(score_block, jax.tree.map(cut, (hidden, targets))).reshape(-1, 5)[:length]
