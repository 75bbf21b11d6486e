"""Attention sinks, a logit of each head in the softmax's denominator: every form against float64.

Errors are those of ``test_decode_attention``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.model.mixers.attention import chunk
from jaxllama.model.mixers.attention import cudnn as cudnn_attention
from pallas_kernels.attention.op import decode_attention, decode_attention_reference
from pallas_kernels.attention.rope_attention import rope_and_attend
from tests.helpers.cache_cases import heads_of, in_pages, poisoned, softmax
from tests.helpers.delta_cases import relative_rms
from tests.kernels.attention.test_decode_attention import NEWEST, emulation, form_given
from tests.kernels.attention.test_several_tokens import case
from tests.model.test_cudnn_attention import plain


def sinks_for(n, seed=3):
    """Some far below, some far above the scores, and one that is no sink."""
    sinks = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * 3
    sinks[0], sinks[-1] = -np.inf, 40.0
    return jnp.asarray(sinks)


@pytest.mark.parametrize(
    "cache, window",
    [
        ("float32", 40),
        pytest.param("bfloat16", None, marks=pytest.mark.slow),
        pytest.param("int8", 40, marks=pytest.mark.slow),
        pytest.param("int4", None, marks=pytest.mark.slow),
    ],
)
def test_the_forms_of_this_machine_are_a_float64_softmax(cache, window):
    """XLA's in one block and in several, the reference, and the CPU's handler; of pages too."""
    q, k, v, lengths = case(3, 150, (6, 2, 64), cache, "float32")
    sinks = sinks_for(6)
    want = softmax(q, k, v, lengths, window, sinks)
    xla, cpu = (functools.partial(decode_attention, implementation=x) for x in ("xla", "cpu"))
    for form in (xla, cpu, decode_attention_reference):
        got = jax.jit(form, static_argnames="window")(q, k, v, lengths, window=window, sinks=sinks)
        assert relative_rms(got, want) < 1e-5
        assert not np.asarray(got)[np.asarray(lengths) == 0].any()
    if cache == "float32":
        pages, table = in_pages((k, v), 30, np.asarray(lengths).max(axis=1))
        got = cpu(q, *pages, lengths, window=window, sinks=sinks, table=table)
        assert relative_rms(got, want) < 1e-5


def test_sinks_of_another_width_are_named():
    q, k, v, lengths = heads_of(2, 20, 4, 2, 64)
    with pytest.raises(ValueError, match="sinks"):
        decode_attention(q, k, v, lengths, sinks=jnp.zeros(2))
    with pytest.raises(ValueError, match=r"sinks \(2,\) is not \[4\]"):
        rope_and_attend(
            jnp.zeros((2, 8, 64)),
            jnp.ones((2, 32)),
            jnp.ones((2, 32)),
            k,
            v,
            lengths,
            sinks=jnp.zeros(2),
        )


def test_the_gradient_of_a_sink_is_the_difference_quotient():
    """Central differences of the float64 oracle, steps of 1e-5: 1e-4 of the largest."""
    q, k, v, lengths = heads_of(3, 20, 4, 2, 64)
    sinks = sinks_for(4).at[0].set(0.5).at[-1].set(2.0)
    weights = np.random.default_rng(5).standard_normal(q.shape)

    def loss(sinks):
        return jnp.sum(
            jnp.asarray(weights, jnp.float32) * decode_attention(q, k, v, lengths, sinks=sinks)
        )

    def value(sinks):
        return np.sum(weights[:, None] * softmax(q, k, v, lengths, None, sinks)[:, None])

    moved = np.asarray(sinks, np.float64) + 1e-5 * np.concatenate([np.eye(4), -np.eye(4)])
    values = np.asarray([value(x) for x in moved])
    want = (values[:4] - values[4:]) / 2e-5
    np.testing.assert_allclose(jax.grad(loss)(sinks), want, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    "window", [40, *(pytest.param(x, marks=pytest.mark.slow) for x in (None, 400))]
)
def test_a_prompts_forms_agree_with_float64(window, monkeypatch):
    """``attend`` in XLA, by the CPU's handler and, with plain sums for cuDNN, on a GPU; and the
    gradients of the last, which are XLA's."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 150, n, 64)), jnp.float32) for n in (6, 2, 2))
    sinks, positions = sinks_for(6), jnp.tile(jnp.arange(150, dtype=jnp.int32), (2, 1))
    want = softmax(q, k, v, np.asarray(positions) + 1, window, sinks)
    call = window, None, None

    def xla(q, k, v, sinks):
        return chunk._attend_in_blocks(call, q, k, v, positions, sinks)

    def chosen(q, k, v, sinks):
        return chunk.attend(q, k, v, positions, window, None, sinks)

    assert relative_rms(jax.jit(xla)(q, k, v, sinks), want) < 1e-5
    assert relative_rms(jax.jit(chosen)(q, k, v, sinks), want) < 1e-5
    monkeypatch.setattr(cudnn_attention, "_with_log_sum", plain)
    monkeypatch.setattr(chunk, "has_cudnn", lambda *heads: True)
    assert relative_rms(jax.jit(chosen)(q, k, v, sinks), want) < 1e-5
    if window == 40:
        finite = sinks.at[0].set(0.0)
        of = [
            jax.jit(jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1, 2, 3)))(
                q, k, v, finite
            )
            for f in (xla, chosen)
        ]
        for one, other in zip(*of, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("window", [70, pytest.param(None, marks=pytest.mark.slow)])
def test_a_chunk_after_a_past_by_cudnn_is_the_same(window, monkeypatch):
    """``extend``: the newest 40 of 150 tokens, with plain sums for cuDNN."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 150, n, 64)), jnp.float32) for n in (6, 2, 2))
    sinks = sinks_for(6)
    lengths = np.tile(np.arange(1, 151), (2, 1))
    want = softmax(q, k, v, lengths, window, sinks)[:, 110:]
    monkeypatch.setattr(cudnn_attention, "_with_log_sum", plain)
    new = (x[:, 110:] for x in (q, k, v))
    got = cudnn_attention.extend(
        *new, (k, v), jnp.full(2, 110, jnp.int32), window=window, sinks=sinks
    )
    assert relative_rms(got, want) < 1e-5


EMULATED = [  # form, tokens of a row, capacity, heads, cache, window
    ("direct", 1, 40, (8, 1, 64), "bfloat16", None),
    ("clusters", 1, 300, (16, 2, 64), "bfloat16", 128),
    ("blocks", 3, 40, (8, 1, 64), "int8", None),
    ("chunks", 1, 300, (6, 3, 64), "int4", 128),
    ("chunks", 3, 300, (16, 2, 64), "bfloat16", None),
]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("given", EMULATED, ids=str)
def test_the_kernels_emulated_are_a_float64_softmax(given, monkeypatch):
    """In each place where partial sums merge: of a block, of a cluster, of chunks."""
    form, tokens, capacity, heads, cache, window = given
    form_given(monkeypatch, form)
    if tokens == 1:
        q, k, v, _ = heads_of(4, capacity, *heads, cache, "bfloat16")
        lengths = jnp.asarray([capacity, 0, 1, capacity // 2 + 3], jnp.int32)
        k, v = poisoned(k, lengths), poisoned(v, lengths)
    else:
        q, k, v, lengths = case(tokens, capacity, heads, cache)
    sinks = sinks_for(heads[0])
    with emulation():
        got = decode_attention(
            q, k, v, lengths, window=window, sinks=sinks, implementation="mosaic"
        )
    want = softmax(q, k, v, lengths, window, sinks)
    assert relative_rms(got, want) < 4e-3
    assert not np.asarray(got, np.float32)[np.asarray(lengths) == 0].any()
