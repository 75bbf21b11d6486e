"""Rotary position embedding: frequencies under every context-extension rule, and the rotation.

Frequencies and tables are float32; positions are exact int32 until the one multiplication.  The
rotation is the "rotate half" form that HF checkpoints are stored for: feature i of the first half
of a head turns with feature i of the second half.  Features that do not turn (partial rotation)
have frequency 0: loading puts them behind the turning ones of each half, which moves q's and k's
alike (``model.param.TensorSource``).

Sources: RoFormer (arXiv 2104.09864); linear interpolation (2306.15595); dynamic NTK; YaRN
(2309.00071); Llama 3.1's piecewise rule.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxllama.config import RopeConfig


def rope_tables(
    cfg: RopeConfig, head_dim: int, positions: jax.Array, total_lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32 ``[B, T, head_dim // 2]``, for ``positions[B, T]``.

    total_lengths[B] counts a row's tokens when this step is done.  "dynamic" and "longrope" depend
    on it.  Past the trained context the base of "dynamic" grows with the length; keys already
    cached keep the rotation of their own step (as in transformers).  "longrope" has other
    frequencies for rows longer than the trained context.  A row that grows past it keeps its cached
    keys, while transformers' generate computes the whole row again.
    """
    turning = head_dim if cfg.rotary_dim is None else cfg.rotary_dim
    if cfg.scaling == "proportional":  # of a head's frequencies the first
        inv_freq, amplitude = _frequencies(cfg, head_dim)
        inv_freq = inv_freq[: turning // 2]
    else:
        inv_freq, amplitude = _frequencies(cfg, turning)
    freq = jnp.asarray(inv_freq)
    if cfg.scaling in ("dynamic", "longrope"):
        freq = _frequencies_of_rows(cfg, turning, inv_freq, total_lengths)  # [B, 1, H/2]
    angles = positions.astype(jnp.float32)[..., None] * freq
    cos, sin = jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude
    return _with_still(cos, sin, head_dim // 2)


def _frequencies_of_rows(
    cfg: RopeConfig, turning: int, inv_freq: np.ndarray, total_lengths: jax.Array
) -> jax.Array:
    """Return the frequencies that depend on a row's length, float32 ``[B, 1, turning // 2]``."""
    if cfg.scaling == "dynamic":
        return _dynamic_frequencies(cfg, turning, total_lengths)[:, None, :]
    assert cfg.original_max_position is not None
    long = total_lengths[:, None, None] > cfg.original_max_position
    factors = (np.asarray(f, np.float32) for f in (cfg.long_factor, cfg.short_factor))
    return jnp.where(long, *(jnp.asarray(inv_freq / factor) for factor in factors))


def _with_still(
    cos: jax.Array, sin: jax.Array, pairs: int, length: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Tables of so many pairs, those that are added of ``length`` and without a turn."""
    rest = ((0, 0),) * (cos.ndim - 1) + ((0, pairs - cos.shape[-1]),)
    return jnp.pad(cos, rest, constant_values=length), jnp.pad(sin, rest)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tables"], meta_fields=["configs"]
)
@dataclasses.dataclass(frozen=True)
class Ropes:
    """The tables of a call for each kind of positions that its layers have."""

    configs: tuple[tuple[RopeConfig, int], ...]
    tables: tuple[tuple[jax.Array, jax.Array], ...]

    def of(self, cfg: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Return the tables of heads of ``head_dim`` features."""
        return self.tables[self.configs.index((cfg, head_dim))]

    def widened(self, head_dim: int, width: int) -> Ropes:
        """Return the tables of heads of ``head_dim`` features, for heads padded to ``width``.

        Added features do not rotate.  cos and sin are multiplied by (width / H) ** (1 / 4).  So
        scores divided by sqrt(width) equal the original scores divided by sqrt(H), and no caller
        has to pass a scale.
        """
        longer = (width / head_dim) ** 0.25

        def widened_table(cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _with_still(cos * longer, sin * longer, width // 2, longer)

        pairs = zip(self.configs, self.tables, strict=True)
        found = {
            (rope, width): widened_table(*pair) for (rope, of), pair in pairs if of == head_dim
        }
        return Ropes(tuple(found), tuple(found.values()))


def widened(heads: jax.Array, rope: Ropes, width: int) -> tuple[jax.Array, Ropes]:
    """Heads ``[..., H]`` and their tables for a cache of heads of ``width`` features
    (``model.cache.cached_width``): zeros behind each half, so that pairs turn as they did."""
    if heads.shape[-1] == width:
        return heads, rope
    halves = heads.reshape(*heads.shape[:-1], 2, -1)
    rest = ((0, 0),) * (halves.ndim - 1) + ((0, (width - heads.shape[-1]) // 2),)
    padded = jnp.pad(halves, rest).reshape(*heads.shape[:-1], width)
    return padded, rope.widened(heads.shape[-1], width)


def narrowed(heads: jax.Array, head_dim: int) -> jax.Array:
    """Heads ``[..., width]`` without what ``widened`` added."""
    if heads.shape[-1] == head_dim:
        return heads
    halves = heads.reshape(*heads.shape[:-1], 2, -1)[..., : head_dim // 2]
    return halves.reshape(*heads.shape[:-1], head_dim)


@functools.lru_cache(maxsize=64)
def _frequencies(cfg: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """(inverse frequencies ``[H/2]`` float32, amplitude of the tables)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inv_freq = (1.0 / np.power(np.float64(cfg.theta), exponents)).astype(np.float32)
    if cfg.scaling in ("linear", "proportional"):
        return inv_freq / np.float32(cfg.factor), 1.0
    if cfg.scaling == "llama3":
        return _llama3(cfg, inv_freq), 1.0
    if cfg.scaling == "yarn":
        return _yarn(cfg, head_dim, inv_freq)
    if cfg.scaling == "longrope":
        return inv_freq, _longrope_amplitude(cfg)
    return inv_freq, 1.0


def _longrope_amplitude(cfg: RopeConfig) -> float:
    assert cfg.original_max_position is not None
    if cfg.attention_factor is not None:
        return cfg.attention_factor
    if cfg.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(cfg.factor) / math.log(cfg.original_max_position))


def _llama3(cfg: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Long waves are slowed by ``factor``, short ones kept, those between blended."""
    assert cfg.original_max_position is not None
    turns = cfg.original_max_position * inv_freq / (2 * math.pi)
    keep = (turns - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return (keep * inv_freq + (1 - keep) * inv_freq / cfg.factor).astype(np.float32)


def _yarn(cfg: RopeConfig, head_dim: int, inv_freq: np.ndarray) -> tuple[np.ndarray, float]:
    """NTK by parts: a linear ramp over dimensions between ``beta_fast`` and ``beta_slow`` turns."""
    trained = cfg.original_max_position
    assert trained is not None

    def dimension(turns: float) -> float:
        waves = trained / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(cfg.theta))

    low, high = dimension(cfg.beta_fast), dimension(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    stretch = np.clip(ramp, 0.0, 1.0)
    freq = inv_freq / cfg.factor * stretch + inv_freq * (1 - stretch)

    def mscale(scale: float) -> float:
        return 0.1 * scale * math.log(cfg.factor) + 1.0 if cfg.factor > 1 else 1.0

    if cfg.attention_factor is not None:
        amplitude = cfg.attention_factor
    elif cfg.mscale and cfg.mscale_all_dim:
        amplitude = mscale(cfg.mscale) / mscale(cfg.mscale_all_dim)
    else:
        amplitude = mscale(1.0)
    return freq.astype(np.float32), amplitude


def _dynamic_frequencies(cfg: RopeConfig, head_dim: int, total: jax.Array) -> jax.Array:
    """NTK base grown with the row's length once it passes the trained context: ``[B, H/2]``."""
    assert cfg.original_max_position is not None
    trained = cfg.original_max_position
    length = jnp.maximum(total, trained).astype(jnp.float32)
    growth = (cfg.factor * length / trained) - (cfg.factor - 1)
    base = cfg.theta * growth ** (head_dim / (head_dim - 2))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return 1.0 / (base[:, None] ** jnp.asarray(exponents)[None, :])


def scaled_by_position(rope: RopeConfig, q: jax.Array, positions: jax.Array) -> jax.Array:
    """Return queries ``[B, T, ...]`` times a function of their positions (``rope.query_beta``)."""
    assert rope.original_max_position is not None
    steps = (positions // rope.original_max_position).astype(jnp.float32)
    factor = 1.0 + rope.query_beta * jnp.log1p(steps)
    factor = factor.reshape(*factor.shape, *(1,) * (q.ndim - 2))
    return (q.astype(jnp.float32) * factor).astype(q.dtype)
