"""Tiny configurations and seeded inputs that several test files share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxllama as jl
from jaxllama.config import (
    CheckpointForm,
    DeltaConfig,
    FullAttentionConfig,
    GLAConfig,
    IndexerConfig,
    LatentConfig,
    LayerInputsConfig,
    ModelConfig,
    RopeConfig,
)
from jaxllama.model.cache import init_pages
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from jaxllama.quantization.sites import fold, sites
from tests.helpers.arrays import as_jax
from tests.helpers.seeded import seeded_params

LLAMA = ModelConfig.of(
    name="tiny",
    vocab_size=97,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    norm_eps=1e-5,
    max_position=4096,
    rope=RopeConfig(theta=10000.0),
    tie_embeddings=False,
    eos_token_ids=(2,),
)
DELTA = DeltaConfig(n_heads=4, n_k_heads=2, d_k=8, d_v=12, norm_eps=1e-5)
GLA = GLAConfig(n_heads=2, n_kv_heads=2, expand_k=0.5, expand_v=1.0)
FAMILIES = {
    "gqa": LLAMA,
    "mha-tied-bias": LLAMA.replace(n_kv_heads=4, tie_embeddings=True, qkv_bias=True, o_bias=True),
    "mqa-window": LLAMA.replace(n_kv_heads=1, sliding_window=7, mlp_bias=True),
    "wide-heads-yarn": LLAMA.replace(
        head_dim=16,
        embedding_scale=True,
        rope=RopeConfig(theta=10000.0, scaling="yarn", factor=4.0, original_max_position=16),
    ),
    "gla": LLAMA.replace(layer_types=("gla", "gla"), gla=GLA),
    "gla-conv-groups": LLAMA.replace(
        layer_types=("gla", "gla"),
        gla=GLAConfig(n_heads=4, n_kv_heads=2, expand_k=0.5, expand_v=1.0, use_short_conv=True),
    ),
    "gla-variant": LLAMA.replace(
        layer_types=("gla", "gla"),
        gla=GLAConfig(
            n_heads=4,
            n_kv_heads=2,
            expand_k=0.5,
            expand_v=1.0,
            decay="head",
            feature_map="elu",
            normalizer=True,
            output_norm="layer",
            norm_weight=False,
            gate_bias=True,
        ),
    ),
    "hybrid": LLAMA.replace(layer_types=("gla", "attention"), gla=GLA),
    "delta": LLAMA.replace(
        layer_types=("delta", "attention"), delta=DELTA, attn_gate=True, qk_norm="head"
    ),
    "kda": LLAMA.replace(
        layer_types=("delta", "delta"),
        delta=dataclasses.replace(
            DELTA, n_k_heads=4, decay="channel", gate="low_rank", gate_bias=True
        ),
    ),
}

# The shapes of Qwen3.5 (three delta layers before one of attention, which turns a part of a head)
# and of Kimi-Linear (a decay a key channel, latent attention without positions).
HYBRIDS = {
    "qwen3.5": LLAMA.replace(
        n_layers=4,
        layer_types=("delta", "delta", "delta", "attention"),
        delta=DELTA,
        head_dim=16,
        rope=RopeConfig(theta=10000.0, rotary_dim=4),
        attn_gate=True,
        qk_norm="head",
        stored=CheckpointForm(family="qwen3_5_text", norm_offset=1.0),
    ),
    "kimi": LLAMA.replace(
        layer_types=("delta", "latent"),
        delta=dataclasses.replace(
            DELTA, n_k_heads=4, d_v=8, decay="channel", gate="low_rank", gate_activation="sigmoid"
        ),
        n_kv_heads=4,
        latent=LatentConfig(kv_rank=12, d_nope=6, d_rope=2, d_v=6),
        nope_layers=(0, 1),
        stored=CheckpointForm(family="kimi_linear"),
    ),
}

# DeepSeek-V3's attention: keys, values and queries from latents, and a part of a key that turns.
LATENT = LLAMA.replace(
    layer_types=("latent", "latent"),
    n_kv_heads=4,
    latent=LatentConfig(kv_rank=12, d_nope=6, d_rope=2, d_v=6, q_rank=10),
    rope=RopeConfig(theta=10000.0, rotary_dim=2),
    stored=CheckpointForm(family="deepseek_v3", interleaved=True),
)

# DeepSeek-V3.2's: an indexer chooses the keys of a query.
INDEXED = LATENT.replace(
    latent=dataclasses.replace(
        LATENT.latent, indexer=IndexerConfig(n_heads=6, head_dim=8, top_k=5)
    ),
    stored=CheckpointForm(family="deepseek_v32", interleaved=True),
)

# Gemma 4's layers: heads of two widths, keys that are values, layers that read another's keys, and
# a further input of each layer.
GEMMA4 = LLAMA.replace(
    n_layers=4,
    sliding_window=7,
    window_layers=(0, 2),
    rope=RopeConfig(theta=1000.0, scaling="proportional", rotary_dim=4),
    window_rope=RopeConfig(theta=100.0),
    full=FullAttentionConfig(head_dim=16, n_kv_heads=1, k_is_v=True),
    shared_kv_layers=2,
    shared_kv_d_ff=96,
    layer_inputs=LayerInputsConfig(width=6, vocab_size=97, n_layers=4),
    qk_norm="head",
    attention_parts=("value_norm",),
    post_norms=True,
    layer_scale=True,
    embedding_scale=True,
    tie_embeddings=True,
    activation="gelu_tanh",
    stored=CheckpointForm(family="gemma4_text", query=8**0.5),
)

# The layer loop is the same for all: the identities run on one layer where layers are alike.
IDENTITIES = {
    name: cfg if name == "gqa" or len(set(cfg.layer_types)) > 1 else cfg.first_layers(1)
    for name, cfg in FAMILIES.items()
}


def params_of(cfg: ModelConfig, seed: int = 0, dtype=jnp.float32):
    """Return random parameters that numpy draws, because an initializer compiles a program for
    every configuration. Each bias is large enough that a test sees when it is left out."""
    params = seeded_params(cfg, seed)
    return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(dtype), params))


def tokens_of(cfg: ModelConfig, batch: int, length: int, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed)
    return as_jax(rng.integers(3, cfg.vocab_size, (batch, length)), jnp.int32)


def relative_error(got, want) -> float:
    """Largest difference over the largest magnitude."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(got - want)) / np.max(np.abs(want)))


LENGTHS = np.array([13, 9], np.int32)
WHOLE = 20


def paged(cfg: ModelConfig, dtype: str) -> jl.Cache:
    """An empty cache of two rows whose pages lie in turns."""
    cache = init_pages(cfg, 2, 3, 6, 8, dtype)
    return dataclasses.replace(cache, table=jnp.arange(6, dtype=jnp.int32).reshape(3, 2).T)


def check_chunks_and_steps(cfg: ModelConfig, dtype: str, bound: float, pages: bool, n: int) -> None:
    """Chunks of a prompt and n steps over a cache give the logits of whole rows, within bound."""
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, 2, WHOLE))
    want = np.asarray(jl.logits(cfg, params, tokens, np.full(2, WHOLE, np.int32)))
    cache = paged(cfg, dtype) if pages else jl.init_cache(cfg, 2, 24, dtype)
    got, cache = jl.prefill(cfg, params, tokens[:, :13], LENGTHS, cache, chunk=8)
    for step in range(n):
        at = LENGTHS + step
        for row in range(2):
            assert relative_error(got[row], want[row, at[row] - 1]) <= bound
        got, cache = jl.decode_step(cfg, params, tokens[np.arange(2), at], cache)


def check_prompt_steps_and_a_draft(
    lm: jl.LanguageModel,
    tokens: np.ndarray,
    want: Any,
    chunk: int | None = None,
    atol: float = 1e-5,
    dtype: str = "float32",
    *,
    lengths: tuple[int, int] = (5, 3),
    n_steps: int = 1,
    n_drafted: int = 2,
    last: tuple[int, int] = (1, -1),
) -> None:
    """Rows of different lengths, then steps, then a draft of which a row keeps the tokens up to its
    ``last``, or nothing, give the logits ``want [2, T, V]`` of the whole rows ``tokens [2, T]``."""
    cfg, rows, at = lm.config, np.arange(2), np.asarray(lengths)
    cache = jl.init_cache(cfg, 2, tokens.shape[1] + 8, dtype=dtype)
    given = tokens[:, : max(lengths)]
    scores, cache = jl.prefill(cfg, lm.params, given, as_jax(lengths), cache, chunk=chunk)
    np.testing.assert_allclose(scores, want[rows, at - 1], atol=atol)
    for _ in range(n_steps):
        scores, cache = jl.decode_step(cfg, lm.params, as_jax(tokens[rows, at]), cache)
        np.testing.assert_allclose(scores, want[rows, at], atol=atol)
        at = at + 1
    drafted = rows[:, None], at[:, None] + np.arange(n_drafted)
    counts = as_jax([n_drafted] * 2)
    scores, proposal = jl.verify_step(cfg, lm.params, as_jax(tokens[drafted]), counts, cache)
    np.testing.assert_allclose(scores, want[drafted], atol=atol)
    cache, at = jl.commit(proposal, as_jax(last)), at + np.asarray(last) + 1
    scores, _ = jl.decode_step(cfg, lm.params, as_jax(tokens[rows, at]), cache)
    np.testing.assert_allclose(scores, want[rows, at], atol=atol)


def check_gradients(lm: jl.LanguageModel, tokens: np.ndarray) -> None:
    """Gradients of logits reach every parameter, and are finite."""
    lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    loss = lambda p: jnp.mean(jl.logits(lm.config, p, tokens, lengths) ** 2)  # noqa: E731
    found = jax.device_get(jax.jit(jax.grad(loss))(lm.params))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        assert np.isfinite(leaf).all() and np.any(leaf), path


def check_folded_scales(cfg: ModelConfig, params: Any) -> None:
    """Scales of channels, which AWQ and SmoothQuant fold, leave a model's function alone."""
    tokens, lengths = np.asarray(tokens_of(cfg, 1, 12)), np.array([12], np.int32)
    want, rng = jl.logits(cfg, params, tokens, lengths), np.random.default_rng(0)
    for index, part in enumerate(cfg.layers):
        scales = {
            site.name: np.exp(rng.standard_normal(site.n_channels)).astype(np.float32)
            for site in sites(part)
            if site.source
        }
        layer = jax.jit(functools.partial(fold, part))(params[f"layer_{index}"], scales)
        params = {**params, f"layer_{index}": layer}
    assert relative_error(jl.logits(cfg, params, tokens, lengths), want) < 1e-4


def check_same(
    got: list[jl.Generation], want: list[jl.Generation], atol: float = 1e-5, of: str = ""
) -> None:
    """The same tokens, and log-probabilities as near as ``atol``; ``of`` names a case."""
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens, of
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)


def check_offloaded(
    policy: str, cfg: ModelConfig, params: Any, **options: Any
) -> tuple[list[list[int]], jl.LanguageModel, list[jl.Generation]]:
    """A model under a policy gives the tokens of a resident one.

    options: of ``Placement``.  Returns (prompts, the offloaded model, its answers).
    """
    prompts, cfg = [[5, 9, 4, 7, 11], [3], [8, 6, 5]], cfg.replace(eos_token_ids=())
    place = Placement(Policy.parse(policy), jnp.float32, **options)
    off = place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)
    want = jl.LanguageModel(cfg, params, None).generate(prompts, 8)
    got = off.generate(prompts, 8)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    return prompts, off, got


def shrunk(cfg: ModelConfig) -> ModelConfig:
    """Return a small model of the same structure: the first layers that show every kind."""
    chosen = [cfg.window_layers, cfg.bare_layers, cfg.expert_layers]
    kinds = [
        (kind, *(index in layers for layers in chosen))
        for index, kind in enumerate(cfg.layer_types)
    ]
    n_layers = 1 + max(map(kinds.index, set(kinds)))
    cfg = cfg.first_layers(min(max(n_layers, 2), cfg.n_layers))
    share = cfg.n_heads // cfg.n_kv_heads
    scale = 16 / cfg.head_dim
    changes: dict[str, Any] = {
        "vocab_size": 128,
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": max(4 // share, 1),
        "head_dim": 16,
        "d_ff": 48,
        "eos_token_ids": tuple(range(2, 2 + len(cfg.eos_token_ids))),
        "bos_token_id": None if cfg.bos_token_id is None else 1,
    }
    if cfg.latent is not None:
        ranks = {"kv_rank": 12, "d_nope": 12, "d_rope": 4, "d_v": 12}
        ranks |= {} if cfg.latent.q_rank is None else {"q_rank": 10}
        changes["latent"] = dataclasses.replace(cfg.latent, **ranks)
        changes["n_kv_heads"] = 4
    if cfg.rope.rotary_dim is not None:
        turned = int(cfg.rope.rotary_dim * scale)
        changes["rope"] = dataclasses.replace(cfg.rope, rotary_dim=turned)
    if cfg.experts is not None:
        sizes = {"n_experts": 4, "n_active": 2, "d_ff": 48}
        sizes |= {"shared": 48} if cfg.experts.shared else {}
        changes["experts"] = dataclasses.replace(cfg.experts, **sizes)
    if cfg.gla is not None:
        changes["gla"] = dataclasses.replace(cfg.gla, n_heads=4, n_kv_heads=4)
    if cfg.delta is not None:
        changes["delta"] = dataclasses.replace(cfg.delta, n_heads=4, n_k_heads=2, d_k=8, d_v=8)
    mixers = {kind: dict(options) for kind, options in cfg.mixers}
    if "ssm" in mixers:
        groups = min(mixers["ssm"].get("n_groups", 1), 2)
        sizes = {"n_heads": 8, "head_dim": 16, "state": 16, "n_groups": groups}
        changes["mixers"] = {**mixers, "ssm": {**mixers["ssm"], **sizes}}
    return cfg.replace(**changes)
