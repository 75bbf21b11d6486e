"""The cache pytree: one mixer state per layer and one length per row.

    Cache(layers=(KVCache | GLAState, ...), lengths=int32[B], table=None | int32[B, M])

Contract: a cache goes in, a new cache comes out; callers donate the old one, so XLA updates it in
place.  Row ``b`` owns positions ``0 .. lengths[b] - 1``; what lies beyond may hold anything, NaN
included, and reaches nobody.  ``insert`` replaces a row whole, which is also how a row is freed and
reused (continuous batching: Inferencer's fill of new rows; Orca).  Attention rows grow with the
context, GLA rows do not.

With a table the rows of all attention layers share pools of pages (``init_pages``), so a row takes
what it holds and not what it might; what a page holds that no row owns reaches nobody either
(PagedAttention, arXiv 2309.06180).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxllama.config import ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.parallel.collectives import MODEL_AXIS
from jaxllama.parallel.mesh import row_axis
from pallas_kernels.attention.blockwise import capacity_of
from pallas_kernels.attention.rope_cache import WIDTHS, quantize_kv, store
from pallas_kernels.brief import short_repr
from pallas_kernels.dispatch import hopper_reason
from pallas_kernels.qtensor import QTensor, tree_bytes

QUANTIZED_CACHE = ("int8", "int4", "float8_e4m3fn")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values, each ``[B, S, K, H]``, or with a table pages ``[P, S, K, H]``,
    of heads as wide as ``cached_width``: an array, or a QTensor with one scale per token and head
    (int4: a scale and a zero point per 64 features, in a rotated basis)."""

    k: jax.Array | QTensor
    v: jax.Array | QTensor

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GLAState:
    """The recurrent state of GLA or the delta rule, float32 ``[B, H, Dk, Dv]``, and, with short
    convolutions, the last ``W - 1`` inputs of the q, k and v streams (of the delta rule's, which
    are one), each ``[B, W - 1, features]``."""

    state: jax.Array
    conv: tuple[jax.Array, ...] | None = None

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GLATokens:
    """T tokens that a state may yet take: k, v and log_decay ``[B, T, H, D]``, what the short
    convolutions read, each ``[B, T, features]``, and of the delta rule beta ``[B, T, H]``."""

    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    conv: tuple[jax.Array, ...] = ()
    beta: jax.Array | None = None

    __repr__ = short_repr


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """table int32 ``[B, M]``: token t of row b is at ``[table[b, t // S], t % S]`` of every
    attention layer's pages ``[P, S, K, H]``; an entry outside of [0, P) is no page."""

    layers: tuple[KVCache | GLAState, ...]
    lengths: jax.Array
    table: jax.Array | None = None

    __repr__ = short_repr

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int | None:
        """Tokens a row can hold; None when no layer is attention."""
        sizes = [
            capacity_of(layer.k, self.table) for layer in self.layers if isinstance(layer, KVCache)
        ]
        return sizes[0] if sizes else None

    @property
    def nbytes(self) -> int:
        """Bytes on an accelerator, where int4 is packed two to a byte."""
        return tree_bytes(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """A cache and tokens behind it, of which ``decoder.commit`` keeps some.

    cache: its attention rows hold the tokens' keys and values past its lengths, where they are
    dead; its recurrent states have not moved.  new int32 ``[B]``: tokens that there are.  tokens:
    of each layer with such a state what it would take, None for attention.
    """

    cache: Cache
    new: jax.Array
    tokens: tuple[GLATokens | None, ...]

    __repr__ = short_repr


def init_cache(
    cfg: ModelConfig,
    batch: int,
    max_len: int,
    dtype: DTypeLike | None = None,
    *,
    mesh: Mesh | None = None,
) -> Cache:
    """An empty cache for ``batch`` rows of up to ``max_len`` tokens.

    dtype: of keys and values: a float, or int8 / int4 / float8_e4m3fn for a quantized cache; by
    default ``default_dtype``: bfloat16, and float32 on a CPU.
    mesh: the parameters' own (``parallel.mesh_of``): every device holds its rows and heads alone.
    Raises JaxLlamaError for sizes below 1 or a dtype that is neither.
    """
    if batch < 1 or max_len < 1:
        raise JaxLlamaError(f"cache of batch {batch} x max_len {max_len}: both must be at least 1")
    try:
        name = (default_dtype() if dtype is None else jnp.dtype(dtype)).name
    except TypeError:
        name = str(dtype)
    if name not in QUANTIZED_CACHE and not name.startswith(("float", "bfloat")):
        raise JaxLlamaError(f"cache dtype {name!r} is not a float, {', '.join(QUANTIZED_CACHE)}")
    width = cached_width(cfg, name, mesh)
    if mesh is not None:
        return _init_on_mesh(cfg, width, batch, max_len, name, mesh)()
    return _empty(cfg, width, batch, max_len, name)


def default_dtype() -> jnp.dtype:
    """The dtype of activations where nobody names one: bfloat16, but float32 where the default
    backend is a CPU, on which XLA's bfloat16 products are an order slower."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def cached_width(cfg: ModelConfig, dtype: str, mesh: Mesh | None = None) -> int:
    """Features of a head in an attention layer's cache, where this process (or the mesh) runs.

    ``head_dim``; but decoding's kernels take heads of 64, 128 and 256, and where they run heads
    of at least 5/8 of one of these (80, 96, 192) are kept as wide, with zeros: 1.6 times the memory
    at most, read at several times the rate of XLA's form.
    """
    place = None if mesh is None else NamedSharding(mesh, P())
    where = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    if dtype == "float32" or hopper_reason(where) is not None:
        return cfg.head_dim
    fits = (width for width in WIDTHS if cfg.head_dim <= width <= 1.6 * cfg.head_dim)
    return next(fits, cfg.head_dim)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))  # one program, not one for each array
def _empty(cfg: ModelConfig, width: int, batch: int, max_len: int, dtype: str) -> Cache:
    layers = tuple(_init_layer(cfg, width, kind, batch, max_len, dtype) for kind in cfg.layer_types)
    return Cache(layers, jnp.zeros((batch,), jnp.int32))


def init_pages(
    cfg: ModelConfig, rows: int, row_pages: int, pages: int, page: int, dtype: str
) -> Cache:
    """An empty cache of ``rows`` rows of up to ``row_pages`` of the ``pages`` that they share, of
    ``page`` tokens each; no row has one yet.  dtype: as of ``init_cache``, its name."""
    width = cached_width(cfg, dtype)
    layers = tuple(
        _init_layer(cfg, width, kind, *((pages, page) if kind == "attention" else (rows, 0)), dtype)
        for kind in cfg.layer_types
    )
    table = jnp.full((rows, row_pages), pages, jnp.int32)
    return Cache(layers, jnp.zeros((rows,), jnp.int32), table)


@functools.lru_cache(maxsize=32)
def _init_on_mesh(cfg: ModelConfig, width: int, batch: int, max_len: int, dtype: str, mesh: Mesh):
    """The jitted function that makes the cache where it belongs."""
    make = functools.partial(_empty, cfg, width, batch, max_len, dtype)
    return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), mesh))


def _init_layer(
    cfg: ModelConfig, width: int, kind: str, batch: int, max_len: int, dtype: str
) -> KVCache | GLAState:
    if kind == "attention":
        shape = (batch, max_len, cfg.n_kv_heads, width)
        if dtype in QUANTIZED_CACHE:
            # Zeros outright: quantizing them inside a jitted caller would be folded by the
            # compiler, at seconds a layer.
            words = jax.eval_shape(lambda: quantize_kv(jnp.zeros(shape, jnp.float32), dtype))
            return KVCache(_zeros(words), _zeros(words))
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    heads, d_k, d_v, taps, features = _state_sizes(cfg, kind)
    state = jnp.zeros((batch, heads, d_k, d_v), jnp.float32)
    if not taps:
        return GLAState(state)
    # A quantized cache keeps these few rows in float: they are inputs, not history.
    conv_dtype = jnp.float32 if dtype in QUANTIZED_CACHE else dtype
    return GLAState(state, tuple(jnp.zeros((batch, taps - 1, f), conv_dtype) for f in features))


def _state_sizes(cfg: ModelConfig, kind: str) -> tuple[int, int, int, int, tuple[int, ...]]:
    """(H, Dk, columns, taps of the convolutions, features of each) of a layer with a state."""
    if kind == "delta":
        assert cfg.delta is not None
        heads, d_k, d_v = cfg.delta.n_heads, cfg.delta.d_k, cfg.delta.d_v
        return heads, d_k, d_v, cfg.delta.conv_size, (2 * cfg.delta.n_k_heads * d_k + heads * d_v,)
    assert cfg.gla is not None
    d_k, d_v = cfg.gla_head_dims
    heads, kv_heads = cfg.gla.n_heads, cfg.gla.n_kv_heads
    taps = cfg.gla.conv_size if cfg.gla.use_short_conv else 0
    d_state = d_v + cfg.gla.normalizer  # the keys' sum is a column of the state
    return heads, d_k, d_state, taps, (heads * d_k, kv_heads * d_k, kv_heads * d_v)


def _zeros(like: QTensor) -> QTensor:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def cache_specs(cache: Cache, rows: str | None) -> Cache:
    """How a cache is split on a mesh: its rows over the axis ``rows``, heads over the model's.
    Rows that share pages are not split."""
    if cache.table is not None:
        rows = None
    tokens, state = P(rows, None, MODEL_AXIS), P(rows, MODEL_AXIS)
    row = P() if rows is None else P(rows)  # programs give P(), which jit tells from P(None)

    def one(layer: Any) -> Any:
        if isinstance(layer, KVCache):
            return jax.tree.map(lambda _: tokens, layer)
        conv = jax.tree.map(lambda _: tokens, layer.conv)
        return dataclasses.replace(layer, state=state, conv=conv)

    table = None if cache.table is None else row
    specs: Any = row, table  # where a cache has arrays
    return Cache(tuple(map(one, cache.layers)), *specs)


def proposal_specs(cache: Cache, rows: str | None) -> Proposal:
    """``cache_specs`` of what may come of a cache."""
    tokens: Any = P(rows, None, MODEL_AXIS)

    def one(layer: Any) -> Any:
        return None if isinstance(layer, KVCache) else tokens  # of all its arrays

    new: Any = P(rows)
    return Proposal(cache_specs(cache, rows), new, tuple(map(one, cache.layers)))


def cache_shardings(cache: Cache, mesh: Mesh | AbstractMesh) -> Cache:
    """The same as shardings, for a cache or its shapes."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        cache_specs(cache, row_axis(mesh, cache.batch)),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )


def write(
    cache: KVCache, k: jax.Array, v: jax.Array, slots: jax.Array, table: jax.Array | None = None
) -> KVCache:
    """Store ``k, v [B, T, K, H]`` at positions ``slots[B, T]`` of each row; a slot beyond the
    capacity is dropped, which is how padding is kept out."""
    return KVCache(store(cache.k, k, slots, table), store(cache.v, v, slots, table))


def insert(cache: Cache, slot: jax.Array | int, source: Cache, row: jax.Array | int = 0) -> Cache:
    """Replace row ``slot`` of ``cache`` with row ``row`` of ``source``, whole.

    ``source`` may have a smaller capacity: the rest of the slot is beyond the new length.
    """

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(new, row, 0, keepdims=True).astype(old.dtype)
        start = (slot,) + (0,) * (old.ndim - 1)
        return jax.lax.dynamic_update_slice(old, one, start)

    return jax.tree.map(put, cache, source)
