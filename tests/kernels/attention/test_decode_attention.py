"""decode_attention and rope_and_write: every form against float64, on the words the cache stores.

Errors are relative RMS: 1e-5 in float32, 4e-3 in 16-bit (a bf16 output alone rounds by 1.7e-3).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device
from pallas_kernels.attention.op import decode_attention, decode_attention_reference, plan
from pallas_kernels.attention.plain import hadamard
from pallas_kernels.attention.rope_cache import quantize_kv, rope_and_write
from pallas_kernels.cards.architecture import TARGET, asked_target
from pallas_kernels.device import block_bytes, gpu, gpu_named
from pallas_kernels.dispatch import Reason
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.cache_cases import heads_of, poisoned, rotation, softmax, values_of
from tests.helpers.cases import each_once
from tests.helpers.delta_cases import relative_rms
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.warp_emulator import emulated

NEWEST = tuple(int(x) for x in jax.__version__.split(".")[:3]) >= (0, 11, 2)
H200 = gpu_named("NVIDIA H200")
CACHES = ["bfloat16", "float16", "int8", "int4", "float8_e4m3fn"]


QUANTIZED = ("int8", "int4", "float8_e4m3fn")
_quantize = jax.jit(quantize_kv, static_argnums=1)


def as_cache(x, dtype):
    """By ``quantize_kv`` itself."""
    return _quantize(x, dtype) if dtype in QUANTIZED else x.astype(dtype)


@pytest.mark.core
@pytest.mark.parametrize(
    "heads, window, capacity",
    [((4, 4), None, 1300), ((6, 2), 1, 150), ((8, 2), 40, 150), ((8, 1), None, 150)],
    ids=str,
)
def test_the_xla_form_and_the_reference_are_a_float64_softmax(heads, window, capacity):
    """In one block of keys and in several; narrow caches are in ``test_pages``."""
    q, k, v, lengths = heads_of(7, capacity, *heads, 64)
    want = softmax(q, k, v, lengths, window)
    assert not want[0].any()  # no keys, no output
    k, v = poisoned(k, lengths), poisoned(v, lengths)
    xla = functools.partial(decode_attention, implementation="xla")
    for form in (xla, decode_attention_reference):
        got = jax.jit(form, static_argnames="window")(q, k, v, lengths, window=window)
        assert relative_rms(got, want) < 1e-5


def test_bad_arguments_are_named():
    q, k, v, lengths = heads_of(2, 20, 4, 2, 64)
    for match, args, window in (
        (r"q \(4, 64\) is", (q[0], k, v, lengths), None),
        (r"k \(1, 20, 2, 64\) is", (q, k[:1], v, lengths), None),
        ("v is", (q, k, v.astype(jnp.int8), lengths), None),
        (r"v \(2, 3, 2, 64\) is not .*: S is 20 in k", (q, k, v[:, :3], lengths), None),
        ("kv heads", (q[:, :3], k, v, lengths), None),
        ("lengths", (q, k, v, lengths.astype(jnp.float32)), None),
        ("window 0", (q, k, v, lengths), 0),
    ):
        with pytest.raises(ValueError, match=match):
            decode_attention(*args, window=window)
    with pytest.raises(NotImplementedError, match="float32"):
        decode_attention(q, k, v, lengths, implementation="mosaic")


def test_what_the_kernel_refuses_is_said():
    def reason(h=128, cache="bfloat16", q_dtype="bfloat16"):
        found = plan(*heads_of(1, 8, 4, 2, h, cache, q_dtype)[:3])
        return found.text if isinstance(found, Reason) else None

    assert reason() is None and reason(64, "int4") is None and reason(256, "float8_e4m3fn") is None
    assert "96" in reason(96)
    assert "k and v are float16" in reason(cache="float16")
    assert "float32" in reason(q_dtype="float32")


SHAPES = [
    (64, 8192, 32, 8, 128),
    (1, 131072, 32, 8, 128),
    (1, 1152, 32, 8, 128),
    (900, 90, 9, 3, 64),
    (3, 700, 16, 1, 256),
]
MOSAIC_CACHES = ["bfloat16", "int8", "int4", "float8_e4m3fn"]


def kernels_of(found):
    """The kernels that a plan of ``decode_attention`` stands for, by the names in the program."""
    if found.kernel == "decode_attention_direct":
        return ["decode_attention_direct"]
    merge = [] if found.cluster else ["decode_attention_merge"]
    return ["decode_attention_kernel", *merge]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize(
    "shape, cache", each_once([(shape,) for shape in SHAPES], MOSAIC_CACHES), ids=str
)
def test_what_was_planned_lowers_for_cuda(shape, cache):
    batch, capacity, n, n_kv, h = shape
    kv = jax.eval_shape(lambda: as_cache(jnp.zeros((batch, capacity, n_kv, h)), cache))
    q = jax.ShapeDtypeStruct((batch, n, h), jnp.bfloat16)
    qkv = jax.ShapeDtypeStruct((batch, n + 2 * n_kv, h), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((batch, h // 2), jnp.float32)
    ints = jax.ShapeDtypeStruct((batch,), jnp.int32)

    def both(q, qkv, table, kv, ints):
        step = rope_and_write(qkv, table, table, kv, kv, ints, implementation="mosaic")
        return step, decode_attention(q, *step[1:], ints, window=77, implementation="mosaic")

    ran = kernels_in(lowered(both, q, qkv, table, kv, ints))
    assert ran == [*kernels_of(plan(q, kv, kv)), "rope_and_cache_write"]


@pytest.mark.core
@pytest.mark.parametrize("sms", [1, 78, 132])
@pytest.mark.parametrize("cache", CACHES)
def test_a_plan_fits_the_gpu_and_takes_every_token(cache, sms, monkeypatch):
    """Shared memory, registers' teams and clusters hold it; its parts are the whole row."""
    from pallas_kernels.attention import plan as plans
    from pallas_kernels.attention.codes import Codes

    monkeypatch.setattr(plans, "gpu", lambda: dataclasses.replace(H200, sms=sms))
    shape = jax.ShapeDtypeStruct
    dtype = jnp.float16 if cache == "float16" else jnp.bfloat16
    n_seen = 0
    types = {
        h: jax.eval_shape(lambda h=h: as_cache(jnp.zeros((1, 1, 1, h)), cache))
        for h in (64, 128, 256)
    }
    heads = [(32, 8, 128), (9, 3, 64), (16, 1, 256), (8, 8, 128), (64, 1, 64), (6, 6, 256)]
    for batch, capacity, tokens, (n, n_kv, h) in itertools.product(
        (1, 3, 64, 900), (1, 90, 1152, 8192, 131072), (None, 5), heads
    ):
        kv = jax.tree.map(
            lambda x, b=(batch, capacity, n_kv): shape((*b, *x.shape[3:]), x.dtype), types[h]
        )
        q = shape((batch, n, h) if tokens is None else (batch, tokens, n, h), dtype)
        group = n // n_kv * (tokens or 1)
        found = plan(q, kv, kv)
        if isinstance(found, Reason) or found.kernel == "decode_attention_direct":
            continue
        n_seen += 1
        assert block_bytes(plans.shared_bytes(found, group, Codes.of(q, kv))) <= H200.shared_bytes
        members, teams = plans.team_of(found, group)
        assert n_kv % found.heads == 0 and members * teams <= found.warps and teams >= 1
        assert members * plans.HEADS * found.fuls >= found.heads * group
        if found.cluster:
            assert found.cluster in (1, 2, 4, plans.CLUSTER) and found.chunk == 0
        else:
            units = plans.units_of(found, capacity, n_kv)
            assert units * found.chunk * found.heads >= capacity * n_kv
            assert plans.blocks_of(found, capacity, n_kv, group) * teams >= units
    assert n_seen > 150


@pytest.mark.core
@pytest.mark.parametrize("card", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA B200"])
@pytest.mark.parametrize("cache", CACHES)
def test_what_fits_no_block_has_a_reason(card, cache, monkeypatch):
    """Sixteen tokens of four heads on a kv head of 256 features, and fewer."""
    from pallas_kernels.attention import plan as plans
    from pallas_kernels.attention.codes import Codes

    facts = device._facts(card, "", None, None, None)
    monkeypatch.setattr(plans, "gpu", lambda: facts)
    dtype = jnp.float16 if cache == "float16" else jnp.bfloat16
    reasons = 0
    for batch, tokens, (n, n_kv, h) in itertools.product(
        (1, 16, 200), (2, 5, 9, 16), [(4, 1, 256), (16, 8, 256), (8, 1, 128), (32, 8, 64)]
    ):
        kv = jax.eval_shape(lambda s=(batch, 1000, n_kv, h): as_cache(jnp.zeros(s), cache))
        q = jax.ShapeDtypeStruct((batch, tokens, n, h), dtype)
        found = plan(q, kv, kv)
        if isinstance(found, Reason):
            reasons += "need more than shared memory holds" in found.text
            continue
        taken = plans.shared_bytes(found, tokens * n // n_kv, Codes.of(q, kv))
        assert block_bytes(taken) <= facts.shared_bytes
    assert (reasons > 0) == (facts.shared_bytes < 128 * 1024 and cache != "int4")


@pytest.mark.core
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("several", [False, True])
def test_the_longest_rows_come_first(window, several):
    kernel = importlib.import_module("pallas_kernels.attention.kernel")
    rows = np.random.default_rng(0).integers(0, 9, 70).astype(np.int32)  # many are equal
    given = np.stack([rows - 1, rows], axis=1) if several else rows
    order = kernel.longest_first(jnp.asarray(given), window)
    work = rows if window is None else np.minimum(rows, window)
    assert order.dtype == jnp.int32
    assert np.array_equal(order, np.argsort(-work, kind="stable"))


@pytest.mark.parametrize(
    "batch, capacity, sorts",
    [(64, 2048, False), (132, 2048, False), (512, 2048, True), (512, 256, False)],
)
def test_long_rows_that_wait_for_an_sm_are_sorted(batch, capacity, sorts, monkeypatch):
    plans = importlib.import_module("pallas_kernels.attention.plan")
    monkeypatch.setattr(plans, "gpu", lambda: H200)
    rows = jax.eval_shape(lambda: as_cache(jnp.zeros((batch, capacity, 8, 128)), "float8_e4m3fn"))
    found = plan(jax.ShapeDtypeStruct((batch, 32, 128), jnp.bfloat16), rows, rows)
    assert found.by_length == sorts


@pytest.mark.parametrize("batch, is_whole", [(64, False), (256, True)])
def test_with_a_row_for_every_sm_longer_rows_stay_whole(batch, is_whole, monkeypatch):
    plans = importlib.import_module("pallas_kernels.attention.plan")
    monkeypatch.setattr(plans, "gpu", lambda: H200)
    rows = jax.eval_shape(lambda: as_cache(jnp.zeros((batch, 2176, 8, 128)), "float8_e4m3fn"))
    found = plan(jax.ShapeDtypeStruct((batch, 32, 128), jnp.bfloat16), rows, rows)
    assert (found.cluster > 0) == is_whole


EMULATED = [  # form, capacity that is no whole page or step, heads, cache, q, window
    ("direct", 40, (8, 2, 64), "bfloat16", "bfloat16", None),
    ("direct", 333, (9, 3, 64), "int4", "bfloat16", None),
    ("clusters", 300, (6, 2, 64), "bfloat16", "bfloat16", 40),
    ("clusters", 300, (16, 1, 128), "int8", "bfloat16", None),
    ("blocks", 40, (8, 2, 64), "bfloat16", "bfloat16", None),
    ("blocks", 200, (8, 1, 128), "float8_e4m3fn", "bfloat16", 150),
    ("chunks", 40, (8, 2, 64), "int4", "bfloat16", 9),
    ("chunks", 300, (6, 3, 128), "float16", "float16", 40),
    ("chunks", 2100, (4, 1, 64), "int8", "bfloat16", None),
    ("few chunks", 500, (7, 1, 128), "int4", "bfloat16", 200),
]
KERNELS = (
    "codes",
    "decode_program",
    "direct",
    "gather",
    "merge",
    "ring",
    "source",
    "team_share",
    "tile",
)


def emulation(*more: str):
    """Within, the kernels of attention compute here, and those of more modules."""
    names = *KERNELS, "pages", *more
    return emulated(*(importlib.import_module(f"pallas_kernels.attention.{x}") for x in names))


def direct_rows(monkeypatch, direct, rows):
    """Up to so many rows of any length go to the direct kernel."""
    card, limits = direct.gpu, {"direct_rows": rows, "direct_tokens": 1 << 30}

    def limited():
        return dataclasses.replace(card(), attention=card().attention._replace(**limits))

    monkeypatch.setattr(direct, "gpu", limited)


def form_given(monkeypatch, form):
    """Of decode_attention's Mosaic forms, always this one."""
    direct, plan = (
        importlib.import_module(f"pallas_kernels.attention.{x}") for x in ("direct", "plan")
    )
    direct_rows(monkeypatch, direct, 100 if form == "direct" else 0)
    # For a GPU of one SM there are few chunks, and no clusters.
    sms = 1 if form in ("few chunks", "blocks") else 132
    card = gpu() if asked_target() else H200
    few = 0 if "chunks" in form else 100
    limits = card.attention._replace(few_chunks=few, longest_first=100)
    monkeypatch.setattr(plan, "gpu", lambda: dataclasses.replace(card, sms=sms, attention=limits))


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_the_kernel_emulated_is_a_float64_softmax(case, monkeypatch):
    """The Mosaic kernels themselves, threads lanes of numpy: layouts, scales, masks, barriers.
    Whole pages are in ``test_pages``."""
    form, capacity, heads, cache, q_dtype, window = case
    form_given(monkeypatch, form)
    q, k, v, _ = heads_of(4, capacity, *heads, cache, q_dtype)
    lengths = as_jax([capacity, 0, 1, capacity // 2 + 3], jnp.int32)
    k, v = poisoned(k, lengths), poisoned(v, lengths)
    with emulation():
        got = decode_attention(q, k, v, lengths, window=window, implementation="mosaic")
    want = softmax(q, k, v, lengths, window)
    assert relative_rms(got, want) < 4e-3
    assert not np.asarray(got, np.float32)[1].any()


# Portable: by the target that none of a form's copies needs more than, and the rows' lengths.
PORTABLE = [
    ("blocks", 200, (8, 2, 64), "bfloat16", "bfloat16", 150),
    ("blocks", 150, (16, 1, 128), "float8_e4m3fn", "bfloat16", None),
    ("chunks", 300, (6, 3, 128), "float16", "float16", 40),
    ("few chunks", 500, (7, 1, 128), "int4", "bfloat16", 200),
]


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("case", PORTABLE, ids=str)
def test_the_portable_kernel_emulated_is_a_float64_softmax(case, monkeypatch):
    """As it runs before Hopper: every warp copies for itself, and no clusters."""
    monkeypatch.setenv(TARGET, "sm_80")
    test_the_kernel_emulated_is_a_float64_softmax(case, monkeypatch)


def rope_case(cache, batch=5, capacity=40, n=6, n_kv=2, h=64, dtype="float32"):
    rng = np.random.default_rng(1)
    qkv = rng.standard_normal((batch, n + 2 * n_kv, h)).astype(jnp.dtype(dtype))
    qkv[0, n] = 0  # a key of zeros
    qkv = as_jax(qkv)
    angle = as_jax(rng.uniform(0, 6, (batch, h // 2)), jnp.float32)
    k, v = (as_cache(jnp.ones((batch, capacity, n_kv, h)), cache) for _ in range(2))
    slots = as_jax([0, capacity, capacity - 1, 7, 3], jnp.int32)
    return qkv, angle, k, v, slots


def in_basis(x, cache, dtype):
    """float64 heads as a cache of that dtype holds them: every step rounded to the activations'."""
    if cache != "int4":
        return x
    rounded = x.astype(jnp.dtype(dtype)).astype(np.float64)
    return rounded @ rotation(x.shape[-1])


def check_rope(cache, implementation, bound, dtype, h=128):
    qkv, angle, k, v, slots = rope_case(cache, dtype=dtype, h=h)
    n = qkv.shape[1] - 2 * k.shape[2]
    step = jax.jit(rope_and_write, static_argnames="implementation")
    q, new_k, new_v = step(
        qkv, jnp.cos(angle), jnp.sin(angle), k, v, slots, implementation=implementation
    )
    x = values_of(qkv)
    c, s = (f(np.asarray(angle, np.float64))[:, None] for f in (np.cos, np.sin))
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = np.concatenate((first * c - second * s, second * c + first * s), -1)
    assert relative_rms(q, in_basis(turned[:, :n], cache, dtype)) < bound
    for new, old, want in (
        (new_k, k, turned[:, n : n + k.shape[2]]),
        (new_v, v, x[:, n + k.shape[2] :]),
    ):
        expected = values_of(old)
        words = in_basis(want, cache, dtype).astype(jnp.dtype(dtype))
        words = values_of(as_cache(as_jax(words), cache))
        for row, slot in enumerate(np.asarray(slots)):
            if slot < expected.shape[1]:
                expected[row, slot] = words[row]
        # Words may differ by one where the rounding is a tie to float32.
        assert relative_rms(values_of(new), expected) < bound


@pytest.mark.core
@pytest.mark.parametrize("cache", CACHES)
def test_rope_and_write_rotates_and_stores(cache):
    check_rope(cache, "xla", 1e-3, "float32")


@pytest.mark.skipif(not NEWEST, reason="Mosaic kernels need jax >= 0.11.2")
@pytest.mark.parametrize("h", [64, 128, 256])
def test_the_rope_kernels_rotation_emulated_is_the_matrix(h):
    from pallas_kernels.attention import codes

    block = warp_emulator.Block(32, 128)
    lane = block.special["tid.x"]
    x = np.random.default_rng(0).standard_normal(h).astype(np.float32)
    # A lane's features: two side by side of each 64 of a half; the rest of a warp repeats.
    runs = max(1, h // 128)
    first = np.asarray([part * h // 2 + 64 * r for part in range(2) for r in range(runs)])
    index = (2 * (lane % (h // 4)))[:, None] + np.repeat(first, 2) + np.tile([0, 1], 2 * runs)
    with warp_emulator.running_on(block, codes):
        got = codes.hadamard_of_lanes(list(x[index].T), lane, min(32, h // 4))
    np.testing.assert_allclose(np.stack(got, 1), (x @ rotation(h))[index], atol=1e-5)


@pytest.mark.parametrize("h", [1, 20, 64, 96])
def test_the_rotation_is_its_own_inverse_and_keeps_scores(h):
    """In blocks of the largest power of two; float32, so 1e-5."""
    x = np.random.default_rng(0).standard_normal((3, 2, h)).astype(np.float32)
    size = h & -h
    want = (x.reshape(3, 2, -1, size) @ rotation(size)).reshape(x.shape)
    rotate = jax.jit(hadamard)
    got = np.asarray(rotate(x))
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(np.asarray(rotate(got)), x, atol=1e-5)
    np.testing.assert_allclose(np.sum(got * got, -1), np.sum(x * x, -1), rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 64), (3, 2, 128), (4, 20)], ids=str)
def test_int4_words_and_zero_points_are_within_half_a_step(shape):
    """And a float16 rounding of what they stand for; offsets, constants and extremes included."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[0] *= 1e-3
    x[1] += 50
    x[2] = 0.1
    x[-1, ..., 0] = 1e6
    got = as_cache(as_jax(x), "int4")
    groups = max(1, shape[-1] // 64)
    assert got.scale.shape == got.zero.shape == (*shape[:-1], groups)
    assert got.scale.dtype == got.zero.dtype == jnp.float16
    want = np.clip(x, -65504, 65504).reshape(*shape[:-1], groups, -1).astype(np.float64)
    span = want.max(-1, keepdims=True) - want.min(-1, keepdims=True)
    bound = span / 30 + np.abs(want).max(-1, keepdims=True) * 2.0**-10 + 2.0**-24
    assert (np.abs(values_of(got).reshape(want.shape) - want) <= bound).all()
    assert not values_of(as_cache(jnp.zeros(shape), "int4")).any()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bfloat16", "int8", "int4", "float8_e4m3fn"])
def test_the_rope_kernel_does_the_same_in_place(cache):
    for h in (64, 128, 256):
        check_rope(cache, "mosaic", 5e-3, "bfloat16", h)
    qkv, angle, k, v, slots = rope_case(cache, dtype="bfloat16", capacity=4096)
    step = jax.jit(rope_and_write, donate_argnums=(3, 4), static_argnames="implementation")
    compiled = step.lower(qkv, angle, angle, k, v, slots, implementation="mosaic").compile()
    memory = compiled.memory_analysis()
    size = k.nbytes + v.nbytes
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size // 10


@pytest.mark.gpu
@pytest.mark.parametrize(
    "heads, cache, window",
    [
        ((8, 8, 128), "bfloat16", None),
        ((8, 8, 128), "int4", 200),
        ((9, 3, 64), "int4", None),
        ((9, 3, 64), "int8", 200),
        ((32, 8, 128), "int8", None),
        ((32, 8, 128), "bfloat16", 200),
        ((8, 1, 64), "float8_e4m3fn", None),
        ((8, 1, 64), "bfloat16", 200),
        ((16, 1, 128), "int8", 200),
        ((16, 1, 128), "int4", None),
        ((8, 4, 256), "bfloat16", None),
        ((8, 4, 256), "float8_e4m3fn", 200),
    ],
    ids=str,
)
def test_the_kernel_is_a_float64_softmax(heads, cache, window, monkeypatch):
    forms = (
        ("blocks", 100, 1.0),
        ("clusters", 1000, 1.0),
        ("chunks", 1000, 1.0),
        ("few chunks", 1500, 60.0),
        ("direct", 1500, 60.0),
    )
    for form, capacity, size in forms:
        if form == "direct" and heads[0] // heads[1] > 8:
            continue
        form_given(monkeypatch, form)
        q, k, v, lengths = heads_of(7, capacity, *heads, cache, "bfloat16", size)
        run = jax.jit(decode_attention, static_argnames=("window", "implementation"))
        got = run(
            q,
            poisoned(k, lengths),
            poisoned(v, lengths),
            lengths,
            window=window,
            implementation="mosaic",
        )
        assert relative_rms(got, softmax(q, k, v, lengths, window)) < 4e-3
        again = run(q, k, v, lengths, window=window, implementation="mosaic")
        assert np.array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["float16", "int8", "int4", "float8_e4m3fn"])
def test_the_kernel_with_float16_queries(cache):
    q, k, v, lengths = heads_of(7, 700, 8, 2, 128, cache, "float16")
    got = decode_attention(q, k, v, lengths, implementation="mosaic")
    assert relative_rms(got, softmax(q, k, v, lengths)) < 4e-3


@pytest.mark.gpu
def test_a_row_is_the_same_bits_whatever_its_neighbours_hold():
    q, k, v, lengths = heads_of(5, 3000, 32, 8, 128, "bfloat16", "bfloat16")
    run = jax.jit(functools.partial(decode_attention, implementation="mosaic"))
    want = np.asarray(run(q, k, v, lengths), np.float32)
    for row in range(5):
        others = jnp.arange(5) != row
        strange = [
            jnp.where(jnp.expand_dims(others, range(1, x.ndim)), x[::-1], x) for x in (q, k, v)
        ]
        turned = jnp.where(others, lengths[::-1], lengths)
        assert np.array_equal(np.asarray(run(*strange, turned)[row], np.float32), want[row])
