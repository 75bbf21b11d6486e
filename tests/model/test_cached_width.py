"""A cache whose heads are wider than the model's, as decoding's kernels want them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import RopeConfig
from jaxllama.model import cache as caches
from jaxllama.model.mixers.attention.mix import mix
from jaxllama.model.records import new_tokens, positions_of
from pallas_kernels.dispatch import choices
from tests.helpers.arrays import as_jax
from tests.helpers.delta_cases import relative_rms
from tests.helpers.models import IDENTITIES, LLAMA, params_of, relative_error, tokens_of

ONE_LAYER = LLAMA.first_layers(1)
CASES = {
    "gate, norm of heads, half turns by yarn": (
        ONE_LAYER.replace(
            attn_gate=True,
            qk_norm="head",
            rope=RopeConfig(
                1e4, scaling="yarn", factor=4.0, original_max_position=16, rotary_dim=4
            ),
        ),
        "int8",
    ),
    "gqa": (ONE_LAYER, "float32"),
    "sparse": (ONE_LAYER.replace(attn_sparsity=0.4), "float32"),
    "mqa-window": (IDENTITIES["mqa-window"], "int8"),
    "norm of all heads, capped": (ONE_LAYER.replace(qk_norm="full", attn_softcap=5.0), "int8"),
}
SLOW = ("gqa", "sparse", "mqa-window", "norm of all heads, capped")
WIDER = 12  # than heads of 8


def kept_wide(monkeypatch, width: int = WIDER) -> None:
    monkeypatch.setattr(caches, "cached_width", lambda *_: width)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "width"),
    [
        (80, "int8", 128),
        (96, "bfloat16", 128),
        (96, "float32", 96),
        (64, "int8", 64),
        (48, "int8", 64),
        (32, "bfloat16", 32),
        (160, "float16", 256),
        (192, "int4", 256),
        (320, "int8", 320),
    ],
)
def test_where_kernels_run_heads_are_kept_as_wide_as_they_take(monkeypatch, head_dim, dtype, width):
    cfg = LLAMA.replace(head_dim=head_dim)
    assert caches.cached_width(cfg.layers[0], dtype) == head_dim  # here there are none
    monkeypatch.setattr(caches, "hopper_reason", lambda *_: None)
    assert caches.cached_width(cfg.layers[0], dtype) == width
    for made in (
        jax.eval_shape(lambda: jl.init_cache(cfg, 1, 8, dtype)),
        jax.eval_shape(lambda: caches.init_pages(cfg, 2, 2, 4, 8, dtype)),
    ):
        assert made.layers[0].k.shape[-1] == width


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]
)
def test_a_wider_cache_changes_no_logit(monkeypatch, case):
    """Two prompts, steps, and tokens that are verified; codes are the same but where a scale is
    rounded otherwise."""
    cfg, dtype = CASES[case]
    params, tokens = params_of(cfg), np.asarray(tokens_of(cfg, 3, 12))
    later, lengths = np.asarray(tokens_of(cfg, 3, 12, seed=1)), np.asarray([12, 9, 4])

    def logits() -> list[jax.Array]:
        cache = jl.init_cache(cfg, 3, 40, dtype)
        first, cache = jl.prefill(cfg, params, tokens, lengths, cache)
        again, cache = jl.prefill(cfg, params, later, np.asarray([3, 1, 2]), cache)
        one, cache = jl.decode_step(cfg, params, later[:, 3], cache)
        several, _ = jl.verify_step(cfg, params, later[:, 3:6], np.asarray([3, 3, 2]), cache)
        return [first, again, one, several[:, :2]]

    narrow = logits()
    kept_wide(monkeypatch)
    for found, wanted in zip(logits(), narrow, strict=True):
        assert relative_error(found, wanted) < (1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("width", [128, pytest.param(None, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("batch", "dtype"),
    [(3, "bfloat16"), (1, "bfloat16"), (1, "int8")],
)
def test_heads_of_96_attend_as_in_float32(monkeypatch, batch, dtype, width):
    """A prompt, one behind it and steps, beside a float32 cache as wide as the model's heads; on a
    Hopper GPU by the kernels."""
    cfg = LLAMA.replace(head_dim=96, n_heads=8)
    wide = width or caches.cached_width(cfg.layers[0], dtype)
    assert wide == 128
    drawn = np.random.default_rng(0).standard_normal((batch, 76, 12 * 96)).astype("bfloat16")
    chosen: set[str] = set()

    @functools.partial(jax.jit, static_argnames="fresh")
    def mixed(qkv, cache, begin, fresh):
        length = qkv.shape[1]
        positions, rope = positions_of(cfg, begin, begin + length, length)
        count = jnp.full_like(begin, length)
        at = new_tokens(positions, count, rope, fresh=fresh, cached=True)
        return mix(cfg.layers[0], {}, qkv, cache, at=at)

    def heads(dtype: str, kv_dtype: str, width: int) -> list[jax.Array]:
        kept_wide(monkeypatch, width)
        cache, found = jl.init_cache(cfg, batch, 256, kv_dtype).layers[0], []
        for start, stop in ((0, 40), (40, 73), (73, 74), (74, 75), (75, 76)):
            qkv = as_jax(drawn[:, start:stop].astype(dtype))
            operands = qkv, cache, np.full(batch, start, np.int32)
            if stop in (40, 73, 74):  # the other steps are the first one's program
                step = functools.partial(mixed.__wrapped__, fresh=start == 0)
                made = {one.op: one.implementation for one in choices(step, *operands)}
                chosen.update(made.get(op, "") for op in ("rope_and_attend", "decode_attention"))
            out, cache = mixed(*operands, fresh=start == 0)
            found.append(out)
        return found

    want = heads("float32", "float32", 96)
    chosen.clear()
    bound = 1.5e-2 if dtype == "int8" else 5e-3
    for got, exact in zip(heads("bfloat16", dtype, wide), want, strict=True):
        assert relative_rms(got, exact) < bound
    assert width or "mosaic" in chosen
