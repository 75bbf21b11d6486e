"""RMSNorm of each head of v, without a weight.

v = v / rms(v)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxllama.config import AttentionConfig, LayerConfig
from jaxllama.model.names import Source
from jaxllama.model.param import Param, Path
from jaxllama.typing import Params

if TYPE_CHECKING:
    import jax

SPLIT: dict[str, int] = {}


def table(layer: LayerConfig, prefix: str, source: Source) -> dict[Path, Param]:
    """Return no parameters."""
    del layer, prefix, source
    return {}


def apply(cfg: AttentionConfig, p: Params, qkv: jax.Array) -> jax.Array:
    """Return ``qkv [..., (N + 2K) H]`` with the norm of each head of v."""
    import jax.numpy as jnp

    from pallas_kernels.rows.rms_norm import rms_norm

    del p
    before = (cfg.n_heads + cfg.n_kv_heads) * cfg.head_dim
    qk, v = jnp.split(qkv, (before,), axis=-1)
    heads = v.reshape(*v.shape[:-1], cfg.n_kv_heads, cfg.head_dim)
    heads = rms_norm(heads, jnp.ones((cfg.head_dim,), v.dtype), cfg.norm_eps)
    return jnp.concatenate([qk, heads.reshape(v.shape)], axis=-1)
