"""``jaxllama eval``: perplexity of a text under a model.

The text is cut into windows of ``window`` tokens that overlap by one, so that every token but the
very first is predicted once, from the tokens before it in its window.  perplexity = exp(mean
negative natural log-probability).  Windows are scored one at a time and padded to one shape, so
one program serves any text.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama import generation
from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.language_model import LanguageModel


def perplexity(lm: LanguageModel, text: str, window: int | None = None) -> dict[str, Any]:
    """{"perplexity", "tokens" (predicted), "nll" (mean, natural log), "window"}.

    window: 512 by default, or the context if that is shorter.

    Raises JaxLlamaError for a model without a tokenizer, a window beyond the context, or a text of
    fewer than two tokens.
    """
    if lm.tokenizer is None:
        raise JaxLlamaError(f"{lm.config.name} has no tokenizer, so it cannot read text")
    window = min(512, lm.config.max_position) if window is None else window
    if not 2 <= window <= lm.config.max_position:
        raise JaxLlamaError(f"window = {window}: must be from 2 to {lm.config.max_position}")
    ids = lm.tokenizer.encode(text)
    if len(ids) < 2:
        raise JaxLlamaError(f"the text has {len(ids)} tokens: at least 2 are needed")
    total = 0.0
    for first in range(0, len(ids) - 1, window - 1):
        row = ids[first : first + window]
        tokens = np.zeros((1, window), np.int32)
        tokens[0, : len(row)] = row
        total += float(_nll(lm.config, lm.params, tokens, np.array([len(row)], np.int32)))
    count = len(ids) - 1
    mean = total / count
    value = math.exp(mean) if mean < 700 else math.inf
    return {"perplexity": value, "tokens": count, "nll": mean, "window": window}


@functools.partial(jax.jit, static_argnums=0)
def _nll(
    cfg: ModelConfig, params: generation.Params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """Summed negative log-probability of tokens[:, 1:], up to ``lengths``."""
    logits = generation.logits(cfg, params, tokens, lengths)[:, :-1]
    targets = tokens[:, 1:]
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=2)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=2) - chosen
    predicted = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]
    return jnp.sum(jnp.where(predicted, nll, 0.0))
