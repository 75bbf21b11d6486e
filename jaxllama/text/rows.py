"""The rows of one call of ``generate``: prompts to padded tokens.

Prompts are padded to a few fixed widths, so that later calls find their programs compiled. An
argument given once for all rows becomes one value for each row here. A wrong one raises an error
with its name.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxllama.config import ModelConfig
from jaxllama.decoding.sampling import Sampling, sampling_rows
from jaxllama.errors import JaxLlamaError
from jaxllama.files import short
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.fixed_sums import block_rows


@dataclasses.dataclass(frozen=True)
class Generation:
    """One continuation.

    Attributes
    ----------
    text : str
        The text, without a stop token and up to a stop string.
    tokens : list of int
        The token ids, a stop token included.
    logprobs : list of float
        Natural logarithms under the model's own distribution, one a token.
    finish_reason : str
        "stop" or "length".
    drafted : int
        Number of tokens that a draft proposed.
    accepted : int
        Number of these that the model sampled too.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    drafted: int = 0
    accepted: int = 0


def pad_rows(
    rows: Sequence[Sequence[int]], width: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return (tokens ``[B, T]``, lengths ``[B]``), both int32.

    Tokens are padded with 0 on the right to ``width``, by default a bucket.
    """
    width = bucket(max(len(row) for row in rows)) if width is None else width
    tokens = np.zeros((len(rows), width), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return jax.device_put((tokens, np.array([len(row) for row in rows], np.int32)))


def shapes_of(rows: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[int, int, int]:
    """Return (prompt width, cache capacity, new tokens), each a bucket."""
    width, new = bucket(max(len(row) for row in rows)), bucket(max_new_tokens)
    return width, bucket(width + new, smallest=128), new


def bucket(size: int, smallest: int = 16) -> int:
    """Return ``size`` rounded up to 16, 32, 64, 96, 128, 192, ...

    At most half is padding, and there are few possible shapes.
    """
    bucket = smallest
    while bucket < size:
        if bucket >= 64 and bucket * 3 // 2 >= size:
            return bucket * 3 // 2
        bucket *= 2
    return bucket


def chunk_widths(chunk: int, on_cpu: bool) -> tuple[int, ...]:
    """Return the widths of the programs that read up to ``chunk`` tokens of a row.

    They are 32, 128, 512, 1024, ..., chunk. On a CPU they begin at 16, because padding costs as
    much as tokens there.
    """
    narrow = (16, 32, 128, 512) if on_cpu else (32, 128, 512)
    return tuple(width for width in narrow if width < chunk) + powers_of(2, 1024, chunk)


def powers_of(base: int, first: int, last: int) -> tuple[int, ...]:
    """Return first, base first, base^2 first, ... below last, and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= base
    return (*sizes, last)


def default_chunk(on_cpu: bool) -> int:
    """Return the tokens of a prompt that an engine reads between two decode steps.

    They are enough to fill a GPU, and a short stall for the rows that decode.
    """
    return 64 if on_cpu else 2048


def fixed_pieces(length: int) -> tuple[int, int]:
    """Return the widths in which a deterministic model reads a prompt: (whole pieces', last's).

    A decode step reads the last of the prompt's ``length`` tokens. Whole pieces are as wide as a
    block of ``fixed_sums``. The last has the narrowest width that holds the rest. A width without a
    piece is 0.
    """
    piece = block_rows()
    rest = (length - 1) % piece
    last = next(width for width in (0, *chunk_widths(piece, False)) if width >= rest)
    return piece if length > piece else 0, last


def encoded(
    tokenizer: Tokenizer | None, model: str, prompts: str | Sequence[str | Sequence[int]]
) -> list[list[int]]:
    """Return the token ids of each prompt; ``model`` is the model's name in errors."""
    try:
        given = [prompts] if isinstance(prompts, str) else list(prompts)
    except TypeError:
        raise JaxLlamaError(
            f"prompts = {short(prompts)}: expected text, or a list of texts or token ids"
        ) from None
    if not given:
        raise JaxLlamaError("no prompts: the list is empty")
    rows = []
    for index, prompt in enumerate(given):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise JaxLlamaError(
                    f"prompt {index} is text, but {model} has no tokenizer: pass token ids"
                )
            if not prompt:
                raise JaxLlamaError(f"prompt {index} is empty")
            rows.append(tokenizer.encode(prompt))
        else:
            rows.append(ids_of(index, prompt))
    return rows


def check_rows(
    cfg: ModelConfig,
    tokenizer: Tokenizer | None,
    rows: list[list[int]],
    max_new_tokens: int,
    stops: tuple[str, ...],
) -> None:
    """Raise JaxLlamaError unless ``generate`` can run these rows with these arguments."""
    if max_new_tokens < 1:
        raise JaxLlamaError(f"max_new_tokens = {max_new_tokens}: must be at least 1")
    if stops and tokenizer is None:
        raise JaxLlamaError(f"stop strings need a tokenizer, and {cfg.name} has none")
    if "" in stops:
        raise JaxLlamaError("stop = '': a stop string must not be empty")
    limit, vocab = cfg.max_position, cfg.vocab_size
    for index, row in enumerate(rows):
        if not row:
            raise JaxLlamaError(f"prompt {index} is empty")
        bad = [token for token in row if not 0 <= token < vocab]
        if bad:
            raise JaxLlamaError(
                f"prompt {index}: token id {bad[0]} is outside the vocabulary of {vocab}"
            )
        if len(row) + max_new_tokens > limit:
            raise JaxLlamaError(
                f"prompt {index}: {len(row)} tokens and {max_new_tokens} new ones exceed the "
                f"context of {limit}: {fewer_tokens(len(row), limit)}"
            )


def fewer_tokens(n_prompt: int, limit: int) -> str:
    """Return what to do about a prompt that is too long with its answer."""
    room = limit - n_prompt
    return f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"


def token_batch(tokens: Any, lengths: Any, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Return tokens ``[B, T]`` and lengths ``[B]`` as int32 arrays.

    Traced arguments are checked for their shapes only.
    """
    try:
        given = [x if isinstance(x, Tracer) else np.asarray(x) for x in (tokens, lengths)]
    except ValueError:
        raise JaxLlamaError("tokens, lengths: rows differ in length: pad them") from None
    tokens, lengths = given
    for name, x in (("tokens", tokens), ("lengths", lengths)):
        if not np.issubdtype(x.dtype, np.integer):
            raise JaxLlamaError(f"{name}: {x.dtype.name}: expected whole numbers")
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise JaxLlamaError(
            f"tokens{list(tokens.shape)}, lengths{list(lengths.shape)}: expected [B, T] and [B]"
        )
    if not any(isinstance(x, Tracer) for x in given):
        if np.any((lengths < 0) | (lengths > tokens.shape[1])):
            raise JaxLlamaError(f"lengths: must be from 0 to {tokens.shape[1]}")
        valid = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
        bad = valid[(valid < 0) | (valid >= vocab_size)]
        if bad.size:
            raise JaxLlamaError(f"token id {bad[0]} is outside the vocabulary of {vocab_size}")
    # numpy converts: ``jnp.asarray`` would compile a program for each shape.
    tokens, lengths = (
        x.astype(jnp.int32) if isinstance(x, Tracer) else jax.device_put(x.astype(np.int32))
        for x in given
    )
    return tokens, lengths


def ids_of(index: int, prompt: Any) -> list[int]:
    """Return token ids as ints. Raises JaxLlamaError unless they are a list of whole numbers."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise JaxLlamaError(
            f"prompt {index} is {short(prompt)}: expected text or a list of token ids"
        ) from None


def stops_of(stop: Any) -> tuple[str, ...]:
    try:
        given = (stop,) if isinstance(stop, str) else tuple(stop)
    except TypeError:
        given = (stop,)
    if not all(isinstance(text, str) for text in given):
        raise JaxLlamaError(f"stop = {short(stop)}: expected text, or a list of texts")
    return given


def sampling_of(
    sampling: Sampling | Sequence[Sampling] | None, seed: int | Sequence[int], batch: int
) -> list[Sampling]:
    """Return one Sampling for each row, each with a seed."""
    sampling = sampling_rows(Sampling() if sampling is None else sampling, batch)
    try:
        row_seed: Any = seed
        is_one = hasattr(row_seed, "__index__") and not np.ndim(row_seed)
        seeds = [row_seed] * batch if is_one else list(row_seed)
    except TypeError:
        raise JaxLlamaError(f"seed = {seed!r}: expected a whole number, or one a row") from None
    if len(seeds) != batch:
        raise JaxLlamaError(f"seed: {len(seeds)} entries for {batch} prompts")
    return [
        row if row.seed is not None else dataclasses.replace(row, seed=row_seed)
        for row, row_seed in zip(sampling, seeds, strict=True)
    ]
