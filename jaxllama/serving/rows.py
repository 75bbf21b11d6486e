"""Rows: what the host knows of requests on their way into slots, as arrays and as one array.

    packed = pack(make_rows(newcomers, rows, max_len, vocab_size))         on the host
    rows = unpack(packed, vocab_size)                                      on the device

A transfer to the device costs time whatever its size, so all of it goes as one int32 array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jaxllama.sampling import Sampling, SamplingParams

# OpenAI takes up to 300 entries.
MAX_BIAS = 320


class Newcomer(NamedTuple):
    """A request on its way into slot ``slot``; ``output`` is what it has written already."""

    slot: int
    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    remaining: int
    ignore_eos: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What ``insert`` needs to know of the rows of a cache, all ``[R, ...]``.

    slot int32: where each goes, past the last slot for one that is nobody's.  tokens int32
    ``[R, max_len]``: the prompt, then the output; n_prompt and n_tokens count them.
    """

    slot: np.ndarray
    tokens: np.ndarray
    n_prompt: np.ndarray
    n_tokens: np.ndarray
    remaining: np.ndarray
    ignore_eos: np.ndarray
    sampling: SamplingParams


def make_rows(newcomers: Mapping[int, Newcomer], rows: int, max_len: int, vocab_size: int) -> Rows:
    """newcomers: by the row of the cache that is theirs; the others of ``rows`` are nobody's."""
    slot = np.arange(2**30, 2**30 + rows, dtype=np.int32)  # distinct, as insert promises
    tokens = np.zeros((rows, max_len), np.int32)
    n_prompt, n_tokens, remaining = (np.zeros(rows, np.int32) for _ in range(3))
    ignore_eos = np.zeros(rows, bool)
    sampling = [Sampling()] * rows
    for row, new in newcomers.items():
        slot[row], sampling[row] = new.slot, new.sampling
        n_prompt[row], n_tokens[row] = len(new.prompt), len(new.prompt) + len(new.output)
        tokens[row, : n_prompt[row]] = new.prompt
        tokens[row, n_prompt[row] : n_tokens[row]] = new.output
        remaining[row], ignore_eos[row] = new.remaining, new.ignore_eos
    params = stack_sampling(sampling, vocab_size)
    return Rows(slot, tokens, n_prompt, n_tokens, remaining, ignore_eos, params)


def pack(rows: Rows) -> np.ndarray:
    """Rows as one int32 array ``[R, n]``, floats by their bits."""
    leaves = jax.tree.leaves(rows)
    flat = [leaf.reshape(len(leaf), -1) for leaf in leaves]
    words = [leaf.astype(np.int32) if leaf.dtype == bool else leaf.view(np.int32) for leaf in flat]
    return np.concatenate(words, axis=1)


def unpack(packed: jax.Array, vocab_size: int) -> Rows:
    """Inside a jitted function."""
    n_rows, columns = packed.shape
    rest = pack(make_rows({}, 1, 0, vocab_size)).shape[1]
    like, structure = jax.tree.flatten(make_rows({}, n_rows, columns - rest, vocab_size))
    ends = np.cumsum([leaf[0].size for leaf in like]).tolist()
    leaves = []
    for leaf, end in zip(like, ends, strict=True):
        words = packed[:, end - leaf[0].size : end].reshape(leaf.shape)
        is_bool = leaf.dtype == bool
        leaves.append(words != 0 if is_bool else lax.bitcast_convert_type(words, leaf.dtype))
    return jax.tree.unflatten(structure, leaves)


def stack_sampling(rows: Sequence[Sampling], vocab_size: int) -> SamplingParams:
    """The rows' parameters in the shape that all rows have: every feature's arrays are there."""
    params = SamplingParams.on_host(rows, vocab_size)
    ids = np.full((len(rows), MAX_BIAS), vocab_size, np.int32)
    values = np.zeros((len(rows), MAX_BIAS), np.float32)
    for row, sampling in enumerate(rows):
        for column, (token, value) in enumerate(sampling.logit_bias or ()):
            ids[row, column], values[row, column] = token, value
    return dataclasses.replace(params, bias_ids=ids, bias_values=values, features=())
