"""A whole Llama in plain jax.numpy, over the library's own parameters.

    scores, cache = prefill(cfg, params, tokens, new_cache(cfg, 1, 64))      a prompt
    scores, cache = decode_step(cfg, params, token, cache)                    one token more

    x += o(attention(norm(x)));  x += down(silu(gate(norm(x))) * up(norm(x)))      each layer

Read this file first, then the library's in the order of ``jaxllama/README.md``: they compute the
same numbers with kernels, other families of models, rows of different lengths, and meshes.

Shapes: B rows, T new tokens, S places of the cache, D width, N query heads, K key heads, G = N / K.
A head has H features, the feed-forward F, and the vocabulary V tokens.  Weights are ``[out, in]``.

Source: Llama (arXiv 2302.13971).  Left out: biases, scaled RoPE, windows, rows of other lengths.
Run it with: python -m jaxllama.examples.plain_llama
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxllama as jl
from jaxllama.typing import Params


class Cache(NamedTuple):
    """Keys and values of every layer, ``[L, B, S, K, H]``, and the number of tokens in them."""

    k: jax.Array
    v: jax.Array
    length: int


def new_cache(cfg: jl.ModelConfig, batch: int, max_len: int) -> Cache:
    """Return a cache without tokens."""
    zeros = jnp.zeros((cfg.n_layers, batch, max_len, cfg.n_kv_heads, cfg.head_dim))
    return Cache(zeros, zeros, 0)


def prefill(
    cfg: jl.ModelConfig, params: Params, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Return (logits ``[B, V]`` after the last of ``tokens[B, T]``, the cache with them)."""
    x, cache = forward(cfg, params, tokens, cache)
    return logits(cfg, params, x[:, -1]), cache


def decode_step(
    cfg: jl.ModelConfig, params: Params, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Return (logits ``[B, V]`` after one token a row, ``tokens[B]``, the cache with them)."""
    return prefill(cfg, params, tokens[:, None], cache)


def forward(
    cfg: jl.ModelConfig, params: Params, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Return (the stream ``[B, T, D]`` behind the layers, the cache with the new tokens)."""
    x = params["embed"]["weight"][tokens]
    first, eps = cache.length, cfg.norm_eps
    positions = first + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    keys, values = [], []
    for index in range(cfg.n_layers):
        layer = params[f"layer_{index}"]
        q, k, v = project(cfg, layer["mixer"], rms_norm(x, layer["mixer_norm"], eps))
        q, k = rotate(cfg, q, positions), rotate(cfg, k, positions)
        k = jax.lax.dynamic_update_slice_in_dim(cache.k[index], k, first, axis=1)
        v = jax.lax.dynamic_update_slice_in_dim(cache.v[index], v, first, axis=1)
        x = x + attention(q, k, v, positions) @ layer["mixer"]["o"]["weight"].T
        x = x + feed_forward(layer["mlp"], rms_norm(x, layer["mlp_norm"], eps))
        keys.append(k)
        values.append(v)
    return x, Cache(jnp.stack(keys), jnp.stack(values), first + tokens.shape[1])


def logits(cfg: jl.ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Return the logits ``[B, V]`` of the stream ``x[B, D]``."""
    head = params["embed" if cfg.tie_embeddings else "head"]
    return rms_norm(x, params["norm"], cfg.norm_eps) @ head["weight"].T


def rms_norm(x: jax.Array, p: Params, eps: float) -> jax.Array:
    """Return ``x / rms(x) * weight`` over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * p["weight"]


def project(cfg: jl.ModelConfig, p: Params, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return q ``[B, T, N, H]``, and k and v ``[B, T, K, H]``; one weight has the rows of all."""
    heads = (x @ p["qkv"]["weight"].T).reshape(*x.shape[:2], -1, cfg.head_dim)
    q, k, v = jnp.split(heads, (cfg.n_heads, cfg.n_heads + cfg.n_kv_heads), axis=2)
    return q, k, v


def rotate(cfg: jl.ModelConfig, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Return heads ``x[B, T, heads, H]`` with RoPE: feature i turns with feature i + H / 2."""
    half = cfg.head_dim // 2
    frequencies = cfg.rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None, None].astype(jnp.float32) * frequencies  # [T, 1, H / 2]
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Return ``[B, T, N H]``: each query sees the cache's tokens up to its own position."""
    batch, width, n_heads, head_dim = q.shape
    q = q.reshape(batch, width, k.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / head_dim**0.5
    is_seen = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] <= positions[:, None]  # [T, S]
    weights = jax.nn.softmax(jnp.where(is_seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(batch, width, n_heads * head_dim)


def feed_forward(p: Params, x: jax.Array) -> jax.Array:
    """Return SwiGLU ``down(silu(gate(x)) * up(x))``; one weight has the rows of gate and up."""
    gate, up = jnp.split(x @ p["gate_up"]["weight"].T, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ p["down"]["weight"].T


def main() -> None:
    lm = jl.load("smollm2-135m", dtype="float32")
    assert lm.tokenizer is not None
    tokens = lm.tokenizer.encode("The capital of France is")
    scores, cache = prefill(
        lm.config, lm.params, jnp.asarray([tokens]), new_cache(lm.config, 1, 32)
    )
    for _ in range(8):
        best = jnp.argmax(scores, axis=-1)
        tokens.append(int(best[0]))
        scores, cache = decode_step(lm.config, lm.params, best, cache)
    print(lm.tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
