"""Log-probabilities of sequences, with the same bits however the sequences are batched.

    logprobs, entropies = scores(setup, params, fixed, tokens)

One compiled program takes ``ROWS`` sequences, each at the beginning of a row of ``sequence_length
+ 1`` tokens. On a CPU it takes one, so nothing but the sequence and the parameters enters its
numbers: neither the other sequences, nor their order, nor the microbatches of the update, nor a
packed row that the sequence came from. On a GPU it takes eight. On an H200 a row's bits did not
depend on its seven neighbours (``benchmarks.rewards bits``: Llama and GLA in bfloat16).
"""

from __future__ import annotations

import jax
import numpy as np

from jaxllama.training.start import TrainingSetup
from jaxllama.training.step import row_scores
from jaxllama.typing import Params


def scores(
    setup: TrainingSetup, params: Params, fixed: Params | None, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (log-probabilities, entropies) of each next token, float32 ``[B, T]``, in nats.

    Parameters
    ----------
    setup : TrainingSetup
        The run; its ``sequence_length`` is T.
    params, fixed : dict
        Parameters that learn, and those that do not.
    tokens : numpy.ndarray
        int32 ``[B, <= T + 1]``: one sequence a row, from its first place on, then zeros.

    Returns
    -------
    tuple of numpy.ndarray
        Values behind a sequence's end have no meaning.
    """
    rows = 1 if jax.default_backend() == "cpu" else 8
    count, width = tokens.shape
    length = setup.config.sequence_length + 1
    whole = np.zeros((-(-count // rows) * rows, length), np.int32)
    whole[:count, :width] = tokens
    found = [
        row_scores(setup, params, whole[first : first + rows], fixed)
        for first in range(0, len(whole), rows)
    ]
    logprobs, entropies = (np.concatenate(parts)[:count] for parts in zip(*found, strict=True))
    return logprobs, entropies
