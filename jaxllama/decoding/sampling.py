"""Sampling: logits to tokens, one set of parameters per row.

    Sampling          one request's parameters, on the host, validated
    SamplingParams    a batch of them stacked into arrays [B], for jitted code
    History           the tokens that a row has seen and written; only penalties need it
    sample(logits[B, V], params, positions[B], history) -> (tokens[B], logprobs[B])

Contract. ``sample`` is pure and row-wise. A row's token is a function of its own logits, its own
parameters, its own history and ``fold_in(row key, position)``. It never depends on the row's slot
or its neighbours. A program contains only the steps that some row of the batch wants. The steps, in
order:

    logit_bias, then penalties (repetition: prompt and output; frequency, presence: output only),
    division by the temperature, top-k, then top-p of what is left, then min-p, then a draw.

Temperature 0 is greedy: the first largest logit after bias and penalties, without random numbers. A
draw is Gumbel-max: ``argmax(logits / temperature + noise)`` over the kept tokens. ``logprobs`` are
natural logarithms of the chosen tokens' probabilities under the unmodified distribution,
``log_softmax(logits)``.

Ties: top-k keeps the k-th largest logit and everything equal to it. Top-p keeps all tokens equal to
the last one that it needs. Its set is the smallest with mass >= p that does not split a tie. Not a
number: NaN logits count as -inf, and -inf is never drawn; +inf counts as the largest float. A row
without any finite logit gives token 0 with log-probability NaN.

No step sorts the vocabulary. ``cutoff`` finds both thresholds exactly by a search over float32 bit
patterns, so any k and p cost the same.

Sources: nucleus sampling (arXiv 1904.09751), min-p (2407.01082), CTRL's repetition penalty
(1909.05858); frequency and presence as in OpenAI's API. Left out: beam search, typical and locally
typical sampling, mirostat.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jaxllama.decoding.cutoff import cutoff
from jaxllama.errors import JaxLlamaError
from jaxllama.typing import Tree
from pallas_kernels.fixed_sums import has_fixed_sums, ordered_sums
from pallas_kernels.operands import short_repr


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings by which one request picks its tokens. The defaults are greedy decoding.

    Parameters
    ----------
    temperature : float
        From 0 to 100; 0 is greedy.
    top_k : int
        Keep the k most likely tokens; 0 keeps all.
    top_p : float
        Keep the smallest set of tokens with at least this probability, in (0, 1].
    min_p : float
        Keep tokens with at least this share of the best token's probability, in [0, 1].
    repetition_penalty : float
        Divides positive logits and multiplies negative ones, for tokens in the prompt or the
        output. In (0, 100]; 1 has no effect.
    frequency_penalty : float
        Subtracted from a logit once for each occurrence of the token in the output, in [-2, 2].
    presence_penalty : float
        Subtracted from a logit if the token occurs in the output, in [-2, 2].
    logit_bias : mapping of int to float, optional
        Numbers that are added to the logits of token ids; -inf forbids a token.
    seed : int, optional
        The row's own seed. None takes the seed of the call.

    Raises
    ------
    JaxLlamaError
        Names the setting that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, above=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if whole("top_k", self.top_k) < 0:
            raise JaxLlamaError(f"top_k = {self.top_k!r}: must be 0 (off) or more")
        if self.seed is not None and not -(2**63) <= whole("seed", self.seed) < 2**64:
            raise JaxLlamaError(f"seed = {self.seed!r}: must fit 64 bits")
        # A tuple, so that the dataclass stays hashable.
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        for name in _NUMBERS:  # numpy's scalars: they print long and are no JSON
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "top_k", operator.index(self.top_k))
        if self.seed is not None:
            object.__setattr__(self, "seed", operator.index(self.seed))

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty has an effect."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    def __str__(self) -> str:
        """Return a text for people: "temperature 0.6, top_p 0.9", or "greedy"."""
        said = ["greedy"] if self.temperature == 0 else []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            said += [f"{field.name} {value}"] if value != field.default else []
        return ", ".join(said)


_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)

BiasPairs = tuple[Any, ...]  # (token, what is added to its logit); a Mapping until it is checked


def _check(key: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Raise JaxLlamaError unless ``low <= value <= high``, or ``low < value`` with ``above``.

    NaN is never in range.
    """
    number = issubclass(type(value), numbers.Real) and not isinstance(value, bool)
    if not number or not (low < value if above else low <= value) or not value <= high:
        start = "above" if above else "from"
        raise JaxLlamaError(f"{key} = {value!r}: must be a number {start} {low:g} to {high:g}")


def sampling_rows(sampling: Sampling | Sequence[Sampling], batch: int) -> list[Sampling]:
    """Return one Sampling for each row. Raises JaxLlamaError for another type or number."""
    rows: Any = [sampling] * batch if isinstance(sampling, Sampling) else sampling
    if not isinstance(rows, Sequence) or not all(isinstance(row, Sampling) for row in rows):
        text = repr(sampling)
        text = text if len(text) <= 60 else f"{text[:57]}..."
        raise JaxLlamaError(f"sampling = {text}: expected a Sampling, or one a row")
    if len(rows) != batch:
        raise JaxLlamaError(f"sampling: {len(rows)} entries for {batch} prompts")
    return list(rows)


def whole(key: str, value: SupportsIndex) -> int:
    """Return any kind of whole number as an int. Raises JaxLlamaError naming the key."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise JaxLlamaError(f"{key} = {value!r}: must be a whole number") from None


def _bias_pairs(
    bias: Mapping[int, float] | Iterable[tuple[int, float]] | None,
) -> tuple[tuple[int, float], ...] | None:
    if bias is None:
        return None
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        raise JaxLlamaError(f"logit_bias = {bias!r}: must map token ids to numbers") from None
    for token, value in pairs.items():
        if whole("logit_bias: token id", token) < 0:
            raise JaxLlamaError(f"logit_bias: token id = {token!r}: must not be negative")
        try:
            is_number = isinstance(value, numbers.Real) and float(value) < math.inf
        except OverflowError:  # an int that no float holds
            is_number = False
        if not is_number:
            raise JaxLlamaError(f"logit_bias[{token}] = {value!r}: must be a number or -inf")
    return tuple((int(token), float(value)) for token, value in pairs.items()) or None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The parameters of B rows, as arrays ``[B]``.

    ``key`` uint32 ``[B, 2]`` is threefry key data.  ``bias_ids`` int32 and ``bias_values`` float32
    are ``[B, n]``, padded with ids beyond the vocabulary, or None.  ``features`` is static: names
    of the steps that some row uses.  Only these are compiled.  With "mixed" among them, a step that
    is named may be unused; the program then checks at run time whether a row uses top-k or top-p.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    key: jax.Array
    bias_ids: jax.Array | None
    bias_values: jax.Array | None
    features: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    __repr__ = short_repr

    @classmethod
    def stack(
        cls, rows: Sequence[Sampling], vocab_size: int, seed: int | jax.Array = 0
    ) -> SamplingParams:
        """Stack the parameters of ``rows`` into arrays on the device.

        seed: an int or a PRNG key, for rows without a seed of their own; it may be traced.  Rows
        that share a seed share their noise: equal prompts then give equal texts.
        """
        if not isinstance(seed, Tracer):
            return jax.device_put(cls.on_host(rows, vocab_size, seed))
        params = jax.device_put(cls.on_host(rows, vocab_size))
        has_own = np.array([row.seed is not None for row in rows])[:, None]
        return dataclasses.replace(params, key=jnp.where(has_own, params.key, _traced_key(seed)))

    @classmethod
    def on_host(
        cls, rows: Sequence[Sampling], vocab_size: int, seed: int | jax.Array = 0
    ) -> SamplingParams:
        """``stack`` into numpy arrays."""
        shared = None if all(row.seed is not None for row in rows) else _key_data(seed)
        keys: list[Tree] = [shared if row.seed is None else _key_data(row.seed) for row in rows]
        drawn = [row for row in rows if row.temperature > 0]
        wanted = {
            "draw": bool(drawn),
            "top_k": any(0 < row.top_k < vocab_size for row in drawn),
            "top_p": any(row.top_p < 1 for row in drawn),
            "min_p": any(row.min_p > 0 for row in drawn),
            "penalties": any(row.has_penalties for row in rows),
            "bias": any(row.logit_bias for row in rows),
        }
        ids, values = _stack_bias(rows, vocab_size) if wanted["bias"] else (None, None)

        def floats(name: str) -> np.ndarray:
            return np.array([getattr(row, name) for row in rows], np.float32)

        arrays: tuple[Tree, ...] = (
            floats("temperature"),
            np.array([min(row.top_k or vocab_size, vocab_size) for row in rows], np.int32),
            floats("top_p"),
            floats("min_p"),
            floats("repetition_penalty"),
            floats("frequency_penalty"),
            floats("presence_penalty"),
            np.stack(keys),
            ids,
            values,
        )
        features = tuple(name for name, want in wanted.items() if want)
        return cls(*arrays, features=features)

    @property
    def penalties(self) -> bool:
        """Return whether ``sample`` needs a History."""
        return "penalties" in self.features


def _key_data(seed: int | jax.Array) -> np.ndarray:
    """uint32[2], the data of a threefry ``jax.random.key(seed)``; seeds may have 64 bits."""
    if isinstance(seed, jax.Array) and _is_key(seed):
        return np.asarray(_traced_key(seed))
    bits = whole("seed", seed) % 2**64
    return np.array([bits >> 32, bits & 0xFFFFFFFF], np.uint32)


def _is_key(seed: jax.Array) -> bool:
    return seed.ndim > 0 or jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)


def _traced_key(seed: jax.Array) -> jax.Array:
    """``_key_data`` of an array that may be traced: a key, or a whole number."""
    if not _is_key(seed):
        if not jnp.issubdtype(seed.dtype, jnp.integer):
            raise JaxLlamaError(f"seed: {seed.dtype}: must be a whole number or a PRNG key")
        # An arithmetic shift of the sign, as a number of 64 bits has it.
        high = seed >> 32 if seed.dtype.itemsize == 8 else -(seed < 0).astype(jnp.int32)
        return jnp.stack([high.astype(jnp.uint32), seed.astype(jnp.uint32)])
    data = jax.random.key_data(seed) if seed.dtype != jnp.uint32 else seed
    if data.shape != (2,):  # another generator's key: draw a threefry key from it
        data = jax.random.bits(seed, (2,), jnp.uint32)
    return data


def _stack_bias(rows: Sequence[Sampling], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    biases: list[BiasPairs] = [tuple(row.logit_bias or ()) for row in rows]
    # A power of two, so that few widths are ever compiled.
    width = 1 << (max(len(bias) for bias in biases) - 1).bit_length()
    ids = np.full((len(rows), width), vocab_size, np.int32)
    values = np.zeros((len(rows), width), np.float32)
    for index, bias in enumerate(biases):
        for column, (token, value) in enumerate(bias):
            if token >= vocab_size:
                raise JaxLlamaError(
                    f"logit_bias: token id {token} is outside the vocabulary of {vocab_size}"
                )
            ids[index, column], values[index, column] = token, value
    return ids, values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """The tokens of B rows, for penalties.

    prompt: bool ``[B, V]``: tokens of the prompt.
    counts: int32 ``[B, V]``: how often each token has been generated.
    """

    prompt: jax.Array
    counts: jax.Array

    __repr__ = short_repr

    @classmethod
    def of_prompt(cls, tokens: jax.Array, lengths: jax.Array, vocab_size: int) -> History:
        """Return the history of ``tokens[B, T]``, right-padded beyond ``lengths[B]``."""
        batch, width = tokens.shape
        valid = jnp.arange(width, dtype=jnp.int32)[None, :] < lengths[:, None]
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        blank = jnp.zeros((batch, vocab_size), bool)
        seen = blank.at[rows, jnp.where(valid, tokens, vocab_size)].set(True, mode="drop")
        return cls(seen, jnp.zeros((batch, vocab_size), jnp.int32))

    def add(self, tokens: jax.Array, live: jax.Array | None = None) -> History:
        """Count generated tokens ``[B]`` or ``[B, T]``.

        live: which of them count, an array of the same shape; all by default.
        """
        increments = jnp.ones_like(tokens) if live is None else live.astype(jnp.int32)
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        rows = rows.reshape(-1, *(1,) * (tokens.ndim - 1))
        return dataclasses.replace(self, counts=self.counts.at[rows, tokens].add(increments))


def sample(
    logits: jax.Array,
    params: SamplingParams,
    positions: jax.Array,
    history: History | None = None,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token per row; see the module docstring.

    logits: float32 ``[B, V]``.  positions: int32 ``[B]``, places in the text of the new tokens.
    history: needed if ``params.penalties``.
    allowed: bool ``[B, V]``, the tokens that a grammar allows; all others count as -inf.
    Returns (tokens int32 ``[B]``, logprobs float32 ``[B]``).
    """
    features = params.features
    logits = _clean(logits)
    scores = logits
    if "bias" in features:
        assert params.bias_ids is not None and params.bias_values is not None
        scores = _add_bias(scores, params.bias_ids, params.bias_values)
    if "penalties" in features:
        if history is None:
            raise ValueError("sample: some row has penalties, which need a history")
        scores = _penalize(scores, params, history)
    if allowed is not None:
        # A bias of minus infinity on every allowed token makes them equal.
        least = jnp.finfo(scores.dtype).min
        scores = jnp.where(allowed, jnp.maximum(scores, least), -jnp.inf)
    if "draw" in features:
        scores = _noisy(_clean(scores), params, positions)
    return _picked(scores, logits)


def _picked(scores: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``_pick`` in the form of the device."""
    # jax keeps the trace of a named function, whatever the sums were then.
    if scores is logits:
        likeliest, pick = lambda x: _likeliest(x), lambda x: _pick(x, x)
        return lax.platform_dependent(logits, cuda=likeliest, default=pick)
    likeliest, pick = lambda *x: _pick_likeliest(*x), lambda *x: _pick(*x)
    return lax.platform_dependent(scores, logits, cuda=likeliest, default=pick)


def _pick(scores: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each row's token with the first largest score, and its log-probability.

    The log-probability is that of the logits.
    """
    tokens = _argmax(scores)
    # A masked maximum: a gather would collect a vocabulary that is split over devices.
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    chosen = jnp.max(jnp.where(ids == tokens[:, None], logits, -jnp.inf), axis=1)
    return tokens, chosen - log_sum_exp(logits)


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the log-probabilities of given tokens as ``sample`` has them, ``[B, V], [B]``."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    scores = jnp.where(ids == tokens[:, None], jnp.float32(0), -jnp.inf)
    return _picked(scores, _clean(logits))[1]


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Return the logarithm of each row's sum of exponentials, ``[B, V]`` -> ``[B]``."""
    if not has_fixed_sums():
        return jax.nn.logsumexp(logits, axis=1)
    best = jnp.max(logits, axis=1)
    return best + jnp.log(_total(logits, best))


def _total(logits: jax.Array, best: jax.Array) -> jax.Array:
    """Return each row's sum of exponentials relative to its largest logit, ``[B]``.

    It adds elementwise, as XLA reduces a row otherwise in every fusion.
    """
    # A row of -inf alone has the sum NaN, and no token of it counts.
    return ordered_sums(jnp.exp(logits - best[:, None]))[:, 0]


def _likeliest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``_pick(logits, logits)`` in one reduction.

    It takes two kernels on a GPU instead of seven, and more time on a CPU.
    """
    best, tokens, total = _summed(logits)
    return tokens, jnp.where(best == -jnp.inf, jnp.nan, -jnp.log(total))


def _pick_likeliest(scores: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``_pick``; the likeliest token gets the same log-probability as from ``_likeliest``."""
    tokens = _argmax(scores)
    best, _, total = _summed(logits)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    chosen = jnp.max(jnp.where(ids == tokens[:, None], logits, -jnp.inf), axis=1)
    return tokens, jnp.where(best == -jnp.inf, jnp.nan, (chosen - best) - jnp.log(total))


def _summed(logits: jax.Array) -> tuple[jax.Array, ...]:
    """Return each row's largest logit, its token, and the sum of all exponentials relative to it.

    One reduction computes all three, or the sums are fixed and have one of their own.
    """

    def merge(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (logit_a, id_a, *sums_a), (logit_b, id_b, *sums_b) = a, b
        is_a = (logit_a > logit_b) | ((logit_a == logit_b) & (id_a < id_b))
        best, other = jnp.maximum(logit_a, logit_b), jnp.minimum(logit_a, logit_b)
        share = jnp.where(other == -jnp.inf, 0.0, jnp.exp(other - best))
        sums = (
            jnp.where(is_a, x, y) + share * jnp.where(is_a, y, x)
            for x, y in zip(sums_a, sums_b, strict=True)
        )
        return best, jnp.where(is_a, id_a, id_b), *sums

    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    none = jnp.float32(-jnp.inf), jnp.int32(logits.shape[1]), jnp.float32(0.0)
    count = 2 if has_fixed_sums() else 3
    found = lax.reduce((logits, ids, jnp.ones_like(logits))[:count], none[:count], merge, (1,))
    return tuple(found) if count == 3 else (*found, _total(logits, found[0]))


def _clean(x: jax.Array) -> jax.Array:
    """Replace NaN by -inf, and +inf by the largest float."""
    return jnp.where(jnp.isnan(x), -jnp.inf, jnp.minimum(x, jnp.finfo(x.dtype).max))


def _argmax(scores: jax.Array) -> jax.Array:
    """Return the index of the first largest entry of each row, which has no NaN.

    It uses two plain reductions, because XLA's CPU code for argmax is six times slower.
    """
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)
    is_best = scores == jnp.max(scores, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_best, ids, scores.shape[1] - 1), axis=1)


def _add_bias(scores: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return scores.at[rows, ids].add(values, mode="drop")


def _penalize(scores: jax.Array, params: SamplingParams, history: History) -> jax.Array:
    generated = history.counts > 0
    repeated = history.prompt | generated
    factor = jnp.where(repeated, params.repetition_penalty[:, None], 1.0)
    scores = jnp.where(scores > 0, scores / factor, scores * factor)
    scores = scores - history.counts.astype(jnp.float32) * params.frequency_penalty[:, None]
    return scores - jnp.where(generated, params.presence_penalty[:, None], 0.0)


def _noisy(scores: jax.Array, params: SamplingParams, positions: jax.Array) -> jax.Array:
    """Return the scores whose argmax is a sampled row's token. Greedy rows pass unchanged."""
    greedy = params.temperature == 0
    temperature = jnp.where(greedy, 1.0, params.temperature)[:, None]
    best = jnp.max(scores, axis=1, keepdims=True)
    best = jnp.where(best == -jnp.inf, 0.0, best)
    # Distance below the best token, in units of the temperature: >= 0, cannot overflow to NaN.
    below = (best - scores) / temperature
    keep = _kept(below, params)
    keys = jax.random.wrap_key_data(params.key, impl="threefry2x32")

    def noise(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(key, position)
        return jax.random.gumbel(key, scores.shape[1:], jnp.float32)

    drawn = jnp.where(keep, jax.vmap(noise)(keys, positions) - below, -jnp.inf)
    return jnp.where(greedy[:, None], scores, drawn)


def _kept(below: jax.Array, params: SamplingParams) -> jax.Array:
    """Return bool ``[B, V]``: the tokens that top-k, top-p and min-p keep."""
    keep, mixed = jnp.ones(below.shape, bool), "mixed" in params.features
    if "top_k" in params.features:
        is_used = jnp.any(params.top_k < below.shape[1]) if mixed else True
        keep = below <= cutoff(below, None, params.top_k, is_used)[:, None]
    if "top_p" in params.features:
        mass = jnp.where(keep, jnp.exp(-below), 0.0)
        enough = params.top_p * jnp.sum(mass, axis=1)
        last = cutoff(below, mass, enough, jnp.any(params.top_p < 1) if mixed else True)
        keep &= below <= jnp.where(params.top_p < 1, last, jnp.inf)[:, None]
    if "min_p" in params.features:
        keep &= below <= -jnp.log(params.min_p)[:, None]
    return keep
