"""A cache whose heads are wider than the model's, as decoding's kernels want them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import LatentConfig, RopeConfig
from jaxllama.language_model import LanguageModel
from jaxllama.model import cache as caches
from jaxllama.model.decoder import positions_of
from jaxllama.model.mixers.attention.mix import mix
from jaxllama.model.records import new_tokens
from jaxllama.offload.loading import Placement
from jaxllama.offload.policy import Policy
from jaxllama.sampling import Sampling
from jaxllama.serving.engine.engine import Engine
from jaxllama.serving.engine.request import Request
from pallas_kernels.dispatch import choices
from tests.helpers.delta_cases import relative_rms
from tests.helpers.models import FAMILIES, LLAMA, params_of, relative_error, tokens_of

LATENT = LatentConfig(kv_rank=12, d_nope=6, d_rope=2, d_v=6)
CASES = {
    name: FAMILIES[name] for name in ("gqa", "mha-tied-bias", "mqa-window", "yarn-rope", "delta")
} | {
    "norm of all heads": LLAMA.replace(qk_norm="full"),
    "half turns": LLAMA.replace(rope=RopeConfig(theta=1e4, rotary_dim=4)),
    "capped": LLAMA.replace(attn_softcap=5.0),
    "sparse": LLAMA.replace(attn_sparsity=0.4),
    "latent": LLAMA.replace(
        n_kv_heads=4, latent=LATENT, nope_layers=(0, 1), rope=RopeConfig(theta=1e4)
    ),
}
QUICK = ("yarn-rope", "delta", "half turns", "latent")
WIDER = 12  # than heads of 8
PROMPTS = [np.random.default_rng(n).integers(3, 97, n).tolist() for n in (1, 9, 21)]


def kept_wide(monkeypatch, width: int = WIDER) -> None:
    monkeypatch.setattr(caches, "cached_width", lambda *_: width)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "width"),
    [(80, "int8", 128), (96, "bfloat16", 128), (96, "float32", 96), (64, "int8", 64),
     (48, "int8", 64), (32, "bfloat16", 32), (160, "float16", 256), (192, "int4", 256),
     (320, "int8", 320)],
)  # fmt: skip
def test_where_kernels_run_heads_are_kept_as_wide_as_they_take(monkeypatch, head_dim, dtype, width):
    cfg = LLAMA.replace(head_dim=head_dim)
    assert caches.cached_width(cfg, dtype) == head_dim  # here there are none
    monkeypatch.setattr(caches, "hopper_reason", lambda *_: None)
    assert caches.cached_width(cfg, dtype) == width
    for made in (
        jax.eval_shape(lambda: jl.init_cache(cfg, 1, 8, dtype)),
        jax.eval_shape(lambda: caches.init_pages(cfg, 2, 2, 4, 8, dtype)),
    ):
        assert made.layers[0].k.shape[-1] == width


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("gqa", "int8"), *((case, "float32") for case in QUICK)]
    + [pytest.param(case, "float32", marks=pytest.mark.slow) for case in CASES if case not in QUICK]
    + [pytest.param(case, "int8", marks=pytest.mark.slow) for case in CASES if case != "gqa"],
)
def test_a_wider_cache_changes_no_logit(monkeypatch, case, dtype):
    """Prompts in two chunks, steps, and tokens that are verified; codes are the same but where a
    scale is rounded otherwise."""
    cfg = CASES[case]
    params, tokens = params_of(cfg), tokens_of(cfg, 3, 12)
    later, lengths = tokens_of(cfg, 3, 6, seed=1), jnp.asarray([12, 9, 4])

    def logits() -> list[jax.Array]:
        cache = jl.init_cache(cfg, 3, 40, dtype)
        first, cache = jl.prefill(cfg, params, tokens, lengths, cache)
        again, cache = jl.prefill(cfg, params, later[:, :3], jnp.asarray([3, 1, 2]), cache)
        one, cache = jl.decode_step(cfg, params, later[:, 3], cache)
        several, _ = jl.verify_step(cfg, params, later[:, 3:], jnp.asarray([3, 3, 2]), cache)
        return [first, again, one, several[:, :2]]

    narrow = logits()
    kept_wide(monkeypatch)
    for found, wanted in zip(logits(), narrow, strict=True):
        assert relative_error(found, wanted) < (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.3])
def test_every_way_gives_the_same_tokens(tmp_path, monkeypatch, share):
    """``generate``, the engine's pages, and offloaded caches, one of them attended on the CPU."""
    cfg = LLAMA.replace(attn_sparsity=share, eos_token_ids=())
    params = params_of(cfg, seed=1)
    lm = LanguageModel(cfg, params, None)
    want = [out.tokens for out in lm.generate(PROMPTS, 20)]
    kept_wide(monkeypatch)
    assert [out.tokens for out in lm.generate(PROMPTS, 20)] == want
    for policy in ("100 0 30 40 100 0", "100 0 0 100 100 0 cpu_attention=true sep_layer=true"):
        place = Placement(Policy.parse(policy), jnp.float32, directory=tmp_path)
        off = place.model(cfg, place.tree(jax.tree.map(lambda leaf: leaf, params)), None)
        assert [out.tokens for out in off.generate(PROMPTS, 20)] == want
    engine = Engine(
        lm, max_slots=2, max_len=44, prefill_chunk=8, steps_per_call=3, cache_tokens=88, page_size=4
    )
    requests = [Request(f"{i}", tuple(p), 20, Sampling()) for i, p in enumerate(PROMPTS)]
    events = engine.generate(requests)
    assert [[t for event in events[r.id] for t in event.tokens] for r in requests] == want


@pytest.mark.parametrize("width", [128, pytest.param(None, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("batch", "dtype"), [(1, "bfloat16"), (3, "bfloat16"), (1, "int8")])
def test_heads_of_96_attend_as_in_float32(monkeypatch, batch, dtype, width):
    """A prompt, one behind it and steps, beside a float32 cache as wide as the model's heads; on a
    Hopper GPU by the kernels."""
    cfg = LLAMA.replace(head_dim=96, n_heads=8)
    wide = width or caches.cached_width(cfg, dtype)
    assert wide == 128
    drawn = jax.random.normal(jax.random.key(0), (batch, 76, 12 * 96))
    chosen: set[str] = set()

    def heads(dtype: str, kv_dtype: str, width: int) -> list[jax.Array]:
        kept_wide(monkeypatch, width)
        cache, found = jl.init_cache(cfg, batch, 256, kv_dtype).layers[0], []
        for start, stop in ((0, 40), (40, 73), (73, 74), (74, 75), (75, 76)):
            begin = jnp.full((batch,), start, jnp.int32)
            positions, rope = positions_of(cfg, begin, begin + stop - start, stop - start)
            count = jnp.full_like(begin, stop - start)
            at = new_tokens(positions, count, rope, fresh=start == 0, cached=True)
            qkv = drawn[:, start:stop].astype(jnp.bfloat16).astype(dtype)
            step = functools.partial(mix, cfg, {}, at=at)
            made = {one.op: one.implementation for one in choices(step, qkv, cache)}
            chosen.update(made.get(op, "") for op in ("rope_and_attend", "decode_attention"))
            out, cache = jax.jit(step)(qkv, cache)
            found.append(out)
        return found

    want = heads("float32", "float32", 96)
    chosen.clear()
    bound = 1.5e-2 if dtype == "int8" else 5e-3
    for got, exact in zip(heads("bfloat16", dtype, wide), want, strict=True):
        assert relative_rms(got, exact) < bound
    assert width or "mosaic" in chosen
