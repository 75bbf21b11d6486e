"""The cache pytree: one mixer state per layer and one length per row.

    Cache(layers=(KVCache | RecurrentState, ...), lengths=int32[B], table=None | int32[B, M])

Contract: a cache goes in, a new cache comes out; callers donate the old one, so XLA updates it in
place.  Row ``b`` owns positions ``0 .. lengths[b] - 1``.  Positions beyond may hold anything, even
NaN, and never change a result.  Attention rows grow with the context; rows of a recurrent state do
not.

With a table, the rows of all attention layers share pools of pages (``init_pages``).  So a row uses
memory for the tokens that it has, not for its capacity.  Pages that no row owns never change a
result either (PagedAttention, arXiv 2309.06180).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxllama.config import AttentionConfig, LayerConfig, ModelConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.mixers import MIXERS, keeps_tokens
from jaxllama.model.mixers.attention.state import KVCache
from jaxllama.model.mixers.common import QUANTIZED_CACHE, LayerState
from jaxllama.model.records import Hidden
from jaxllama.parallel.mesh import MODEL_AXIS, RowAxis, row_axis
from jaxllama.typing import Tree
from pallas_kernels.attention.operands import WIDTHS, capacity_of
from pallas_kernels.dispatch import hopper_reason
from pallas_kernels.operands import short_repr
from pallas_kernels.qtensor import tree_bytes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of a model after the tokens of B rows. ``init_cache`` makes an empty one.

    Parameters
    ----------
    layers : tuple
        The state of each layer. None for a layer that reads another's keys and values.
    lengths : int32 [B]
        Number of tokens of each row.
    table : int32 [B, M], optional
        Table of a cache in pages of S tokens. Token t of row b is at ``[table[b, t // S], t % S]``
        of every attention layer's pages ``[P, S, K, H]``. An entry outside of [0, P) is no page.
    parts : int
        Number of equal parts of the rows and of the pages. Rows of a part use pages of that part
        alone, and their entries count from its first page. So devices can divide both.
    """

    layers: tuple[LayerState, ...]
    lengths: jax.Array
    table: jax.Array | None = None
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    __repr__ = short_repr

    @property
    def shares_pages(self) -> bool:
        """Whether all rows share the pages, so that devices cannot divide the rows."""
        return self.table is not None and self.parts == 1

    @property
    def batch(self) -> int:
        """Number of rows B."""
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
    """A cache and the tokens of a draft, some of which ``verification.commit`` keeps.

    cache: its attention rows hold the tokens' keys and values past its lengths, where no query
    reads them.  Its recurrent states do not contain the tokens yet.
    new: int32 ``[B]``, the number of tokens of each row.
    tokens: for each layer with a recurrent state, the tokens in its own form; None for attention.
    hidden: the tokens' hidden states ``[B, T, D]`` before the last norm, which a head that drafts
        reads; None inside of the decoder.
    """

    cache: Cache
    new: jax.Array
    tokens: tuple[LayerState, ...]
    hidden: Hidden | None = None

    __repr__ = short_repr


def init_cache(
    cfg: ModelConfig,
    batch: int,
    max_len: int,
    dtype: DTypeLike | None = None,
    *,
    mesh: Mesh | None = None,
) -> Cache:
    """Return an empty cache for ``batch`` rows of up to ``max_len`` tokens.

    Parameters
    ----------
    cfg : ModelConfig
        The model's configuration.
    batch : int
        Number of rows B, at least 1.
    max_len : int
        Tokens that a row can hold, at least 1.
    dtype : data-type, optional
        Type of keys and values: a float, or int8, int4 or "fp8" for a quantized cache. The
        default is ``default_dtype``: bfloat16, and float32 on a CPU.
    mesh : Mesh, optional
        The parameters' own mesh (``parallel.mesh_of``). Every device then holds only its rows and
        heads.

    Returns
    -------
    Cache
        The cache, whose rows hold no tokens.

    Raises
    ------
    JaxLlamaError
        If a size is below 1 or the cache cannot have this dtype.
    """
    if batch < 1 or max_len < 1:
        raise JaxLlamaError(f"cache of batch {batch} x max_len {max_len}: both must be at least 1")
    name = cache_dtype_name(default_dtype() if dtype is None else dtype)
    if name not in QUANTIZED_CACHE and not name.startswith(("float", "bfloat")):
        raise JaxLlamaError(
            f"cache dtype {name!r} is not a float, {', '.join(QUANTIZED_CACHE)} or fp8"
        )
    check_has_keys(cfg, **{f"cache dtype {name!r}": name in QUANTIZED_CACHE})
    widths = _widths(cfg, name, mesh)
    if mesh is not None:
        return _init_on_mesh(cfg, widths, batch, max_len, name, mesh)()
    return _empty(cfg.layers, widths, batch, max_len, name)


def check_has_keys(cfg: ModelConfig, **asked: object) -> None:
    """Raise JaxLlamaError naming an option of keys and values for a model that has none.

    asked: options by name; None and False are not asked for.
    """
    if any(map(keeps_tokens, cfg.layer_types)):
        return
    for name, value in asked.items():
        if value is not None and value is not False:
            raise JaxLlamaError(
                f"{name}: {cfg.name} has no layer with keys and values: leave it out"
            )


def cache_dtype_name(dtype: DTypeLike) -> str:
    """Return the name of a cache's dtype, in which "fp8" is float8_e4m3fn.

    A word that names no dtype is returned as it is.
    """
    if isinstance(dtype, str) and dtype == "fp8":
        return "float8_e4m3fn"
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def default_dtype() -> jnp.dtype:
    """Return the default dtype of activations: bfloat16, or float32 on a CPU backend.

    On a CPU XLA's bfloat16 products are an order of magnitude slower.
    """
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def cached_width(layer: LayerConfig, dtype: str, mesh: Mesh | None = None) -> int:
    """Features of a head in an attention layer's cache, where this process (or the mesh) runs; 0
    for other layers.

    It is ``head_dim``, or more where the kernels of decoding run.  These take heads of 64, 128 and
    256.  Heads of at least 5/8 of such a width (80, 96, 192) are padded to it with zeros.  That
    takes at most 1.6 times the memory, but is read at several times the rate of XLA's form.
    """
    place = None if mesh is None else NamedSharding(mesh, P())
    where = jax.ShapeDtypeStruct((), jnp.int32, sharding=place)
    if layer.kind != "attention":
        return 0
    cfg: AttentionConfig = layer.mixer
    if dtype == "float32" or hopper_reason(where) is not None:
        return cfg.head_dim
    fits = (width for width in WIDTHS if cfg.head_dim <= width <= 1.6 * cfg.head_dim)
    return next(fits, cfg.head_dim)


Widths = tuple[int, ...]  # ``cached_width`` of each layer


def _widths(cfg: ModelConfig, dtype: str, mesh: Mesh | None = None) -> Widths:
    return tuple(cached_width(layer, dtype, mesh) for layer in cfg.layers)


def init_layer(
    layer: LayerConfig, batch: int, max_len: int, dtype: DTypeLike | None = None
) -> LayerState:
    """Return the state of one layer for ``batch`` rows without tokens, as ``init_cache`` does."""
    name = cache_dtype_name(default_dtype() if dtype is None else dtype)
    return _empty((layer,), (cached_width(layer, name),), batch, max_len, name).layers[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))  # one program, not one for each array
def _empty(
    layers: tuple[LayerConfig, ...], widths: Widths, batch: int, max_len: int, dtype: str
) -> Cache:
    states = tuple(
        MIXERS[layer.kind].mix.init_state(layer, batch, max_len, width, dtype)
        for layer, width in zip(layers, widths, strict=True)
    )
    return Cache(states, jnp.zeros((batch,), jnp.int32))


def init_pages(
    cfg: ModelConfig, rows: int, row_pages: int, pages: int, page: int, dtype: str
) -> Cache:
    """Return an empty cache of ``pages`` pages of ``page`` tokens, which ``rows`` rows share. A row
    may have up to ``row_pages`` pages, and has none yet. dtype: as of ``init_cache``, its name."""
    layers: list[LayerState] = []
    for layer, width in zip(cfg.layers, _widths(cfg, dtype), strict=True):
        mixer = MIXERS[layer.kind]
        size = (pages, page) if mixer.parameters.KEEPS_TOKENS else (rows, 0)
        layers.append(mixer.mix.init_state(layer, *size, width, dtype))
    table = jnp.full((rows, row_pages), pages, jnp.int32)
    return Cache(tuple(layers), jnp.zeros((rows,), jnp.int32), table)


@functools.lru_cache(maxsize=32)
def _init_on_mesh(
    cfg: ModelConfig, widths: Widths, batch: int, max_len: int, dtype: str, mesh: Mesh
):
    """The jitted function that makes the cache where it belongs."""
    make = functools.partial(_empty, cfg.layers, widths, batch, max_len, dtype)
    return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), mesh))


def cache_specs(cache: Cache, rows: RowAxis) -> Cache:
    """How a cache is split on a mesh: its rows over the axis ``rows``, heads over the model's.
    Rows that share pages are not split."""
    if cache.shares_pages:
        rows = None
    row = P() if rows is None else P(rows)  # jit distinguishes a program's P() from P(None)

    table = None if cache.table is None else row
    specs: Tree = row, table  # where a cache has arrays
    layers = tuple(layer and layer.specs(rows) for layer in cache.layers)
    return Cache(layers, *specs, parts=cache.parts)


def proposal_specs(cache: Cache, rows: RowAxis) -> Proposal:
    """Return the specs of a ``Proposal``, as ``cache_specs`` does for a cache."""
    tokens: Tree = P(rows, None, MODEL_AXIS)

    def layer_specs(layer: LayerState) -> Tree:
        return None if layer is None or isinstance(layer, KVCache) else tokens  # of all its arrays

    new: Tree = P(rows)
    return Proposal(cache_specs(cache, rows), new, tuple(map(layer_specs, cache.layers)))


def cache_shardings(cache: Cache, mesh: Mesh | AbstractMesh) -> Cache:
    """The same as shardings, for a cache or its shapes."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        cache_specs(cache, row_axis(mesh, cache.batch)),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
