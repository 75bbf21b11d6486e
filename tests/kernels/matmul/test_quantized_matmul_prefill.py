"""The prefill kernels: lowering at real shapes, the 8-bit kernel in the interpreter, and on a GPU
their values against float64, on ordinary and on hostile operands.

Errors are relative RMS.  Bounds: 4e-3 for a 16-bit output; int8's int32 sum exact.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import device, quantize
from pallas_kernels import launch as launching
from pallas_kernels.cards.architecture import CARDS
from pallas_kernels.cards.table import table_of
from pallas_kernels.device import gpu, tiles_of
from pallas_kernels.dispatch import choose_plan, named_plan
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.many_rows import kernel as prefill
from pallas_kernels.matmul.many_rows import pipeline as prefill_pipeline
from pallas_kernels.matmul.many_rows import plan as planning
from pallas_kernels.matmul.many_rows.pair import pair_matmul
from pallas_kernels.matmul.many_rows.plan import PairTile, WeightTile
from pallas_kernels.matmul.op import product_plan, quantized_matmul
from pallas_kernels.matmul.stored import StoredWeight
from pallas_kernels.qtensor import QTensor
from tests.helpers.arrays import as_jax
from tests.helpers.cases import pairwise, slow
from tests.helpers.matmul_cases import error, lowered, newest, product, shaped
from tests.helpers.matmul_cases import wide as floats

LLAMA = ((14336, 4096), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
BF16, F16, F32, I8, I4 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.int4
F8 = jnp.float8_e4m3fn
WEIGHT_TILES = [
    dataclasses.replace(tile, codes="")
    for tile in (*tiles_of("weight ahead", WeightTile)[:1], *tiles_of("weight", WeightTile))
]


def matmul(x, w, bias, out_dtype, tile=None, *, swiglu=False):
    """The kernel of many rows, with its own tile or another."""
    call = MatmulCall.of(x, w, out_dtype, bias=bias, swiglu=swiglu)
    if isinstance(x, QTensor) or not isinstance(w, QTensor):
        form = planning.quantized_plan if isinstance(x, QTensor) else planning.plain_plan
        plan = tile or named_plan(form(call))
    else:
        plan = named_plan(planning.weight_plan(call, tile))
    return prefill.matmul(x, w, call.work(bias=bias), plan.divide(call))


def pair(m, n, k, dtype, seed=0):
    rng = np.random.default_rng(seed)

    def one(rows):
        q = np.clip(rng.normal(0, 45, (rows, k)), -127, 127)
        q = np.round(q) if dtype == I8 else q
        return QTensor(as_jax(q, dtype), as_jax(rng.uniform(0.01, 0.03, (rows, 1)), F32))

    return one(m), one(n), as_jax(rng.normal(size=n), BF16)


def blocks(m, n, k, seed=0, blocked=None):
    """x and w in e4m3 with a scale for 128 columns of a row, and a bias.

    blocked: as of ``QTensor``, whose dtype of scales a checkpoint may choose.
    """
    x, w, bias = pair(m, n, k, F8, seed)
    rng = np.random.default_rng(seed + 1)
    scales = [as_jax(rng.uniform(0.01, 0.03, (rows, k // 128)), F32) for rows in (m, n)]
    if blocked is not None:
        scales[1] = jnp.repeat(scales[1][::128], 128, axis=0).astype(BF16)
    return QTensor(x.q, scales[0]), QTensor(w.q, scales[1], blocked=blocked), bias


def plain(m, n, k, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    return [as_jax(rng.normal(size=shape), dtype) for shape in ((m, k), (n, k), (n,))]


def weight_only(m, n, k, dtype, group, zeros=None, x_dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    x = as_jax(rng.normal(size=(m, k)), x_dtype)
    low, high = (-8, 8) if dtype == I4 else (-128, 128)
    q = as_jax(rng.integers(low, high, (n, k)), dtype)
    scale = as_jax(rng.uniform(0.01, 0.03, (n, k // group)), x_dtype)
    zero = None
    if zeros == "int":
        zero = as_jax(rng.integers(-8, 8, scale.shape), I8)
    elif zeros == "float":
        zero = as_jax(rng.normal(0, 0.05, scale.shape), x_dtype)
    return x, QTensor(q, scale, zero), as_jax(rng.normal(size=n), x_dtype)


# --- anywhere ------------------------------------------------------------------------------------


def codes_by_codes(m, n, k, dtype):
    return [QTensor(shaped((r, k), dtype), shaped((r, 1), F32)) for r in (m, n)]


def floats_by_codes(m, n, k, group, zeros=None, dtype=I4, x_dtype=BF16):
    groups = shaped((n, k // group), x_dtype)
    zero = None if zeros is None else shaped(groups.shape, x_dtype if zeros == BF16 else I8)
    return shaped((m, k), x_dtype), QTensor(shaped((n, k), dtype), groups, zero)


def floats_by_floats(m, n, k):
    return shaped((m, k), BF16), shaped((n, k), BF16)


LOWERED = [
    codes_by_codes(8191, *LLAMA[0], I8),
    codes_by_codes(65, *LLAMA[1], F8),
    codes_by_codes(64, *LLAMA[4], I8),
    codes_by_codes(17, *LLAMA[2], F8),
    floats_by_codes(8191, *LLAMA[2], 128, I8),
    floats_by_codes(65, *LLAMA[4], LLAMA[4][1], dtype=I8),
    floats_by_codes(64, *LLAMA[3], 128, I8),
    floats_by_codes(64, *LLAMA[0], LLAMA[0][1], dtype=I8),
    floats_by_floats(64, *LLAMA[5]),
    # Every grouping, with zeros of both kinds and scales of both floats.
    floats_by_codes(300, 512, 4096, 32, BF16, x_dtype=F16),
    floats_by_codes(64, 512, 4096, 64, I8, x_dtype=F16),
    floats_by_codes(300, 512, 4096, 256, BF16),
    floats_by_codes(64, 512, 4096, 32),
]


@newest
@pytest.mark.parametrize("operands", LOWERED, ids=range(len(LOWERED)))
def test_lowers_at_real_shapes(operands):
    """``test_plans`` has many more shapes, which are not lowered."""
    x, w = operands
    out, bias = (x.dtype if x.dtype in (BF16, F16) else BF16), shaped((w.shape[0],), BF16)
    bias = shaped(bias.shape, out)
    assert "mosaic_gpu" in lowered(lambda x, w, b: matmul(x, w, b, out), x, w, bias)


@pytest.mark.parametrize(
    "tile,m,n,k,dtype",
    [
        (PairTile(64, 128, stages=3, cluster=1), 72, 136, 256, I8),
        (PairTile(128, 64, stages=3, cluster=1, promote=2), 128, 128, 640, F8),
        *slow((PairTile(128, 64, stages=2, cluster=2), 200, 192, 384, I8)),
        (PairTile(64, 96, stages=3, cluster=1), 24, 200, 320, BF16),
    ],
)
def test_pair_kernel_in_the_interpreter(interpreter, monkeypatch, tile, m, n, k, dtype):
    """The whole pipeline: tiles past the edge, multicast, the ring across tiles, the epilogue.
    (A split K is not of the interpreter: it knows no stores to another block's memory.)"""
    one_view(monkeypatch)
    tile = dataclasses.replace(tile, sms=2)  # a GPU of two SMs: every block has several tiles
    x, w, bias = plain(m, n, k) if dtype == BF16 else pair(m, n, k, dtype)
    words = (x, w, None, None) if dtype == BF16 else (x.q, w.q, x.scale[:, 0], w.scale[:, 0])
    with interpreter():
        # Not the jitted one: its trace would be kept for calls outside the interpreter.
        got = pair_matmul.__wrapped__(*words, bias, F32, tile)
    assert error(got, product(x, w, bias)) < 1e-6


@pytest.mark.slow
def test_one_scale_for_all_rows_in_the_interpreter(interpreter, monkeypatch):
    """The same bits as with that scale for each row."""
    one_view(monkeypatch)
    tile = PairTile(64, 64, stages=2, cluster=1, sms=2)
    x, w, bias = pair(24, 136, 256, I8)
    of_x = x.scale[:1, 0], jnp.broadcast_to(x.scale[:1, 0], (24,))
    with interpreter():
        got, want = (
            pair_matmul.__wrapped__(x.q, w.q, scale, w.scale[:, 0], bias, F32, tile)
            for scale in of_x
        )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "tile,m,n,k",
    [
        (PairTile(128, 64, stages=3, cluster=2, promote=1), 130, 72, 384),
        *slow((PairTile(64, 64, stages=3, cluster=1, promote=1), 22, 200, 2304)),
    ],
)
def test_blocks_of_fp8_in_the_interpreter(interpreter, monkeypatch, tile, m, n, k):
    """A step's scales come through the ring, also past the edges and across tiles."""
    one_view(monkeypatch)
    loaded = lambda ref, dtype, axis: ref[...].astype(dtype)  # noqa: E731
    monkeypatch.setattr(prefill_pipeline, "load_strided", loaded)
    tile = dataclasses.replace(tile, sms=2)
    x, w, bias = blocks(m, n, k)
    scales = prefill._scales_of_groups(x.scale, w, tile)
    with interpreter():
        got = pair_matmul.__wrapped__(x.q, w.q, *scales, bias, F32, tile)
    assert error(got, product(x, w, bias)) < 1e-6


@pytest.mark.parametrize("m,n,k", [(72, 256, 256), *slow((130, 128, 1152))])
def test_rows_that_share_scales_in_the_interpreter(interpreter, monkeypatch, m, n, k):
    """Tiles that begin anywhere in a block of 128 rows of w; nine steps, of which eight have their
    scales in one copy."""
    one_view(monkeypatch)
    tile = PairTile(128, 96, stages=3, cluster=1 + (m > 128), promote=1, sms=2)
    x, w, bias = blocks(m, n, k, blocked=n)
    monkeypatch.setattr(prefill_pipeline, "load_strided", lambda ref, dtype, _: ref[...])
    scales = prefill._scales_of_groups(x.scale, w, tile)
    with interpreter():
        got = pair_matmul.__wrapped__(x.q, w.q, *scales, bias, F32, tile)
    assert error(got, product(x, w, bias)) < 1e-6


def test_a_block_that_copies_for_itself_fills_its_ring(monkeypatch):
    """A copy may be of the next tile, not of the one after it."""
    table = table_of(CARDS["NVIDIA H200"], (0, 12, 0))
    shorter = {**table.tiles, "weight": table.tiles["weight"][-4:]}  # any jax's
    facts = dataclasses.replace(gpu(), tiles=shorter)
    monkeypatch.setattr(device, "gpu", lambda: facts)
    for codes, k, lag in (("int8", 320, 1), ("int8", 256, 0), ("", 320, 0)):
        assert planning.weight_tile(2048, 14336, k, codes=codes).lag == lag


def test_rows_that_share_scales_fit_a_copy():
    for k, fits in ((32768, True), (32896, False)):
        w = QTensor(shaped((256, k), F8), shaped((256, k // 128), F32), blocked=256)
        assert planning.has_block_scales(StoredWeight.of(w)) is fits
    assert not planning.has_block_scales(StoredWeight.of(dataclasses.replace(w, blocked=None)))


def test_blocks_of_fp8_in_xlas_form():
    x, w, bias = blocks(5, 48, 384)
    run = jax.jit(functools.partial(quantized_matmul, out_dtype=F32))
    assert error(run(x, w, bias=bias), product(x, w, bias)) < 1e-6
    with pytest.raises(ValueError, match="x has 3 groups of scales, and w 1"):
        quantized_matmul(x, QTensor(w.q, w.scale[:, :1]))
    with pytest.raises(ValueError, match="x needs one scale per row"):
        quantized_matmul(QTensor(x.q.astype(I8), x.scale), QTensor(w.q.astype(I8), w.scale))


def one_view(monkeypatch):
    """Give the interpreter one memory for each dtype of ``Views``, and no PTX.

    It gives the views of a union memories of their own.  The kernel waits for the one before by
    PTX, which the interpreter does not know.
    """
    memory = launching._memory

    def by_dtype(kind):
        if not isinstance(kind, launching.Views):
            return memory(kind)
        return [kind[name] for name in ("tiles", "low_tiles") if name in kind]

    def by_view(kind, refs):
        if not isinstance(kind, launching.Views):
            return refs
        return SimpleNamespace(**{name: refs[name.startswith("low")] for name in kind})

    monkeypatch.setattr(launching, "_memory", by_dtype)
    monkeypatch.setattr(launching, "_by_view", by_view)
    monkeypatch.setattr(prefill_pipeline, "await_kernel", lambda *_: None)
    monkeypatch.setattr(prefill_pipeline, "warpgroup_barrier", lambda: None)


def low_rank(m, sources, ranks, seed=1):
    """Inner products, some zero as those of other adapters are, and second factors."""
    rng = np.random.default_rng(seed)
    inner = rng.normal(size=(m, len(sources), ranks)) * (rng.random((m, 1, ranks)) < 0.3)
    second = tuple(as_jax(rng.normal(size=(n, ranks)), BF16) for n in sources)
    return as_jax(inner.reshape(m, -1), BF16), second


def with_low_rank(want, inner, second) -> np.ndarray:
    parts = np.split(floats(inner), len(second), axis=1)
    return want + np.concatenate(
        [part @ floats(b).T for part, b in zip(parts, second, strict=True)], axis=1
    )


LOW_RANKS = [((128, 64, 64), 64), ((192, 64), 40), ((256,), 200)]


@pytest.mark.parametrize(
    "sources,ranks,dtype",
    [(*LOW_RANKS[1], F8), *slow((*LOW_RANKS[0], I8), (*LOW_RANKS[2], I8))],
)
def test_a_low_rank_term_in_the_interpreter(interpreter, monkeypatch, sources, ranks, dtype):
    """In the ring behind a tile's last step; of each tile of w's rows its own source; ranks that
    end within a slot."""
    one_view(monkeypatch)
    tile = PairTile(64, 64, stages=3, cluster=1, promote=2 * (dtype == F8), sms=2)
    x, w, bias = pair(40, 256, 320, dtype)
    low = low_rank(40, sources, ranks)
    with interpreter():
        words = x.q, w.q, x.scale[:, 0], w.scale[:, 0]
        got = pair_matmul.__wrapped__(*words, bias, F32, tile, low_rank=low)
    assert error(got, with_low_rank(product(x, w, bias), *low)) < 1e-6


@newest
@pytest.mark.parametrize(
    "sources,k", [((4096, 1024, 1024), 4096), ((14336, 14336), 4096), ((4096,), 14336)]
)
def test_a_low_rank_term_lowers_at_real_shapes(sources, k):
    """Tiles have rows of one source alone."""
    n = sum(sources)
    x, w = (QTensor(shaped((r, k), I8), shaped((r, 1), F32)) for r in (64, n))
    low = shaped((64, 128 * len(sources)), BF16), tuple(shaped((s, 128), BF16) for s in sources)
    call = MatmulCall.of(x, w, BF16, low_rank=low)
    tile = named_plan(planning.quantized_plan(call))
    assert tile.m == 64 and not any(s % tile.n for s in sources)
    f = functools.partial(quantized_matmul, out_dtype=BF16, implementation="mosaic")
    assert "mosaic_gpu" in lowered(lambda x, w, low: f(x, w, low_rank=low), x, w, low)


@pytest.mark.parametrize("dtype", [I8, F8])
def test_a_low_rank_term_is_added_before_the_cast(dtype):
    """XLA's form; also of more rows than the kernel takes, and of sources that no tile divides."""
    x, w, bias = pair(6, 37, 48, dtype)
    low = low_rank(6, (20, 17), 5)
    cube = QTensor(x.q.reshape(2, 3, 48), x.scale.reshape(2, 3, 1))
    of_cube = low[0].reshape(2, 3, -1), low[1]
    call = jax.jit(functools.partial(quantized_matmul, out_dtype=F32))
    got = call(cube, w, bias=bias, low_rank=of_cube)
    want = with_low_rank(product(x, w, bias), *low)
    assert error(got.reshape(6, 37), want) < (1e-6 if dtype == I8 else 1e-4)


@pytest.mark.parametrize(
    "m,sources,ranks,fact",
    [
        (65, (512,), 64, "65 rows"),
        (8, (500, 12), 64, "not multiples of 32"),
        (8, (512,), 12, "12 ranks"),
    ],
)
def test_low_rank_terms_without_a_kernel_say_why(m, sources, ranks, fact):
    x, w = (QTensor(shaped((r, 1024), I8), shaped((r, 1), F32)) for r in (m, 512))
    low = shaped((m, ranks * len(sources)), BF16), tuple(shaped((s, ranks), BF16) for s in sources)
    assert fact in planning.quantized_plan(MatmulCall.of(x, w, BF16, low_rank=low)).text


def test_low_rank_terms_that_do_not_fit_are_named():
    x, w, _ = pair(6, 32, 48, I8)
    inner, second = low_rank(6, (16, 16), 5)
    with pytest.raises(ValueError, match="goes with a quantized x"):
        quantized_matmul(jnp.ones((6, 48), BF16), w, low_rank=(inner, second))
    with pytest.raises(ValueError, match=r"low_rank \(6, 9\)"):
        quantized_matmul(x, w, low_rank=(inner[:, 1:], second))
    with pytest.raises(ValueError, match=r"do not fit x \(6, 48\) and w \(32, 48\)"):
        quantized_matmul(x, w, low_rank=(inner[:, :5], second[:1]))


@pytest.mark.parametrize(
    "change,fact",
    [
        ({"k": 4104}, "K = 4104"),
        ({"n": 516}, "N = 516"),
        ({"x_dtype": F32}, "x is float32"),
        ({"group": 96, "k": 4032}, "group size 96"),
        ({"out": F32}, "the output would be float32"),
    ],
)
def test_unsupported_names_the_fact(change, fact):
    a = {"n": 512, "k": 4096, "x_dtype": BF16, "group": None, "dtype": I4, "out": BF16} | change
    x = shaped((300, a["k"]), a["x_dtype"])
    group = a["group"] or a["k"]
    w = QTensor(shaped((a["n"], a["k"]), a["dtype"]), shaped((a["n"], a["k"] // group), BF16))
    assert fact in planning.weight_plan(MatmulCall.of(x, w, a["out"])).text
    with pytest.raises(NotImplementedError, match=fact):
        choose_plan("quantized_matmul", "mosaic", lambda: product_plan(x, w, out_dtype=a["out"]))


def test_scales_of_a_byte_need_whole_copies():
    """MXFP4 and NVFP4 beside many rows, where the scales are turned."""
    w = jax.eval_shape(lambda: quantize(jnp.zeros((1000, 2816), BF16), "mxfp4"))
    assert "N = 1000" in planning.weight_plan(MatmulCall.of(shaped((40, 2816), BF16), w, BF16)).text


@newest
@pytest.mark.parametrize(
    "m,n,k,blocked", [(300, 1000, 1280, None), (64, 14336, 4096, None), (300, 1024, 1280, 1024)]
)
def test_blocks_of_fp8_fit_in_shared_memory(m, n, k, blocked):
    """The ring's slots hold scales too."""
    x, w = (QTensor(shaped((r, k), F8), shaped((r, k // 128), F32)) for r in (m, n))
    w = dataclasses.replace(w, blocked=blocked)
    assert "mosaic_gpu" in lowered(lambda x, w: matmul(x, w, None, BF16), x, w)


def test_plain_weights_of_few_rows():
    def plan(m, n=4096, k=4096, dtype=BF16, **fused):
        w = shaped((n, k), BF16)
        return planning.plain_plan(MatmulCall.of(shaped((m, k), dtype), w, dtype, **fused))

    assert isinstance(plan(64), PairTile) and "8 rows" in plan(8).text
    assert "65 rows" in plan(65).text and plan(65).plan is None
    assert "float16 by w of bfloat16" in plan(64, dtype=F16).text
    assert "K not of 64" in plan(64, 64, 96).text


# --- on a Hopper GPU -----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [I8, F8])
@pytest.mark.parametrize(
    "m,n,k", [(1, 264, 272), (65, 1024, 512), (259, 4104, 1024), (515, 768, 4096)]
)
def test_pair_values(dtype, m, n, k):
    x, w, bias = pair(m, n, k, dtype)
    for out, bound in ((BF16, 4e-3), (F16, 4e-3), (F32, 1e-6 if dtype == I8 else 5e-4)):
        run = jax.jit(lambda x, w, b, out=out: matmul(x, w, b, out))
        assert error(run(x, w, bias), product(x, w, bias)) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("is_blocked", [False, True])
@pytest.mark.parametrize(
    "m,n,k", [(1, 264, 256), (65, 1024, 512), (259, 4104, 1024), (515, 768, 4096)]
)
def test_values_of_blocks(m, n, k, is_blocked):
    n = -(-n // 128) * 128 if is_blocked else n
    x, w, bias = blocks(m, n, k, blocked=n if is_blocked else None)
    for out, bound in ((BF16, 4e-3), (F16, 4e-3), (F32, 5e-4)):
        run = jax.jit(lambda x, w, b, out=out: matmul(x, w, b, out))
        assert error(run(x, w, bias), product(x, w, bias)) < bound


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype,out,m,n,k,split",
    [(BF16, F32, 17, 272, 320, 1), (BF16, BF16, 40, 9008, 512, 2), (F16, F32, 64, 1056, 4096, 2)],
)
def test_plain_values(dtype, out, m, n, k, split):
    """float32 sums of exact products; with both blocks of a cluster, several tiles each."""
    x, w, bias = plain(m, n, k, dtype)
    tile = PairTile(64, 64, stages=5, cluster=1, split=split)
    run = jax.jit(lambda x, w, b: matmul(x, w, b, out, tile))
    assert error(run(x, w, bias), product(x, w, bias)) < (1e-5 if out == F32 else 4e-3)


@pytest.mark.gpu
def test_plain_swiglu():
    n = 9000
    x, w, _ = plain(50, 2 * n, 512)
    y = product(x, w)
    want = y[:, :n] / (1 + np.exp(-y[:, :n])) * y[:, n:]
    run = jax.jit(lambda x, w: matmul(x, w, None, F32, swiglu=True))
    assert error(run(x, w), want) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("tile", tiles_of("weight few tokens", WeightTile))
@pytest.mark.parametrize(
    "dtype,group,zeros",
    [
        (I4, 128, None),
        (I4, 128, "int"),
        (I4, 64, "float"),
        (I4, 32, "int"),
        (I8, 128, "int"),
    ],
)
def test_weight_tiles_of_few_rows(tile, dtype, group, zeros):
    """Scales and zeros as they are stored, several tiles a block, sums across warpgroups and
    blocks; twice the same bits."""
    x, w, bias = weight_only(50, 17416, 2048, dtype, group, zeros)
    assert planning.weight_plan(MatmulCall.of(x, w, BF16, bias=bias), tile).stored
    run = jax.jit(lambda x, w, b: matmul(x, w, b, BF16, tile))
    got = run(x, w, bias)
    assert error(got, product(x, w, bias)) < 4e-3
    np.testing.assert_array_equal(floats(run(x, w, bias)), floats(got))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [I8, F8])
def test_split_pair_values(dtype):
    x, w, bias = pair(50, 9000, 1024, dtype)
    tile = PairTile(64, 64, stages=5, cluster=1, split=2, promote=2 * (dtype == F8))
    run = jax.jit(lambda x, w, b: matmul(x, w, b, F32, tile))
    assert error(run(x, w, bias), product(x, w, bias)) < (1e-6 if dtype == I8 else 5e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case,dtype,split",
    pairwise([(x,) for x in (*LOW_RANKS, ((4096, 1024, 1024), 128))], [I8, F8], [1, 2]),
)
def test_low_rank_values(case, dtype, split):
    """Also where K is split; a row whose inner products are zeros has the bits of a product without
    any."""
    sources, ranks = case
    n = sum(sources)
    x, w, bias = pair(50, n, 1024, dtype)
    inner, second = low_rank(50, sources, ranks)
    inner = inner.at[3].set(0)
    tile = PairTile(64, 64, stages=5, cluster=1, split=split, promote=2 * (dtype == F8))
    words = x.q, w.q, x.scale[:, 0], w.scale[:, 0], bias
    run = jax.jit(lambda low, out: pair_matmul(*words, out, tile, low_rank=low), static_argnums=1)
    want = with_low_rank(product(x, w, bias), inner, second)
    assert error(run((inner, second), F32), want) < (1e-6 if dtype == I8 else 5e-4)
    got, plain_ = run((inner, second), BF16), pair_matmul(*words, BF16, tile)
    assert error(got, want) < 4e-3
    np.testing.assert_array_equal(floats(got[3]), floats(plain_[3]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", list(dict.fromkeys(tiles_of("pair int8", PairTile) + tiles_of("pair float8", PairTile)))
)
def test_int8_sum_is_exact(tile):
    x, w, _ = pair(300, 1000, 4096, I8)
    ones = [jnp.ones(r, F32) for r in (300, 1000)]
    small = PairTile(**{**vars(tile), "stages": 3})
    got = jax.jit(lambda x, w: pair_matmul(x, w, *ones, None, F32, small))(x.q, w.q)
    want = np.asarray(x.q, np.int64) @ np.asarray(w.q, np.int64).T  # below 2^24: f32 holds it
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype,group,zeros,x_dtype",
    pairwise(
        [(I4, 32), (I4, 128), (I4, 512), (I8, 64), (I8, 512)], [None, "int", "float"], [BF16, F16]
    ),
)
def test_weight_only_values(dtype, group, zeros, x_dtype):
    for m, n in ((3, 264), (259, 1160)):
        x, w, bias = weight_only(m, n, 512, dtype, group, zeros, x_dtype)
        run = jax.jit(lambda x, w, b: matmul(x, w, b, x_dtype))
        assert error(run(x, w, bias), product(x, w, bias)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("k", [320, 1024])
@pytest.mark.parametrize("tile", WEIGHT_TILES)
def test_every_weight_tile(tile, k):
    """Also with five slots, which an unrolled step does not divide."""
    if not tile.divides(k):
        pytest.skip("the tile is not for this K")
    x, w, bias = weight_only(3 * tile.tokens - 5, 1160, k, I4, 64, "int")
    run = jax.jit(lambda x, w, b: matmul(x, w, b, BF16, tile))
    assert error(run(x, w, bias), product(x, w, bias)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8", "fp8", "w4", "w4_zeros", "w8"])
def test_hostile_values(scheme):
    """Scales of 1e-8 and 1e4, rows of zeros, one huge outlier, zeros at both ends."""
    m, n, k = 300, 512, 1024
    rng = np.random.default_rng(7)
    if scheme in ("int8", "fp8"):
        x, w, _ = pair(m, n, k, I8 if scheme == "int8" else F8)
        sx, sw = (np.asarray(t.scale).copy() for t in (x, w))
        sx[::5], sx[1::5], sw[::7], sw[1::7] = 1e-8, 1e4, 1e-8, 1e4
        xq = x.q.at[3].set(jnp.zeros(k, x.dtype)).at[4, 5].set(as_jax(127, x.dtype))
        x = QTensor(xq, as_jax(sx))
        w = QTensor(w.q.at[9].set(jnp.zeros(k, w.dtype)), as_jax(sw))
        run = jax.jit(lambda x, w: matmul(x, w, None, BF16))
    else:
        zeros = "int" if scheme == "w4_zeros" else None
        dtype, group = (I8, k) if scheme == "w8" else (I4, 128)
        x, w, _ = weight_only(m, n, k, dtype, group, zeros)
        s = floats(w.scale)
        s[::5], s[1::5] = 1e-8, 1e4
        zero = w.zero
        if zeros:
            zero = as_jax(np.where(rng.random(s.shape) < 0.5, -8, 7), I8)
        x = x.at[3].set(jnp.zeros(k, BF16)).at[4, 5].set(as_jax(1e4, BF16))
        w = QTensor(w.q.at[9].set(jnp.zeros(k, w.dtype)), as_jax(s, BF16), zero)
        run = jax.jit(lambda x, w: matmul(x, w, None, BF16))
    got, want = floats(run(x, w)), product(x, w)
    assert np.isfinite(got).all() and not got[3].any()
    # Column by column: the scales' magnitudes differ by 1e12, so one norm would hide most.
    norms = np.linalg.norm(want, axis=0)
    errors = np.linalg.norm(got - want, axis=0)[norms > 0] / norms[norms > 0]
    assert errors.max() < 8e-3
    assert np.sqrt(np.mean(errors**2)) < 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["int8", "fp8", "w4"])
def test_rows_are_independent_and_runs_repeat(scheme):
    m, n, k = 700, 2048, 1024
    if scheme == "w4":
        x, w, bias = weight_only(m, n, k, I4, 128)
        run = jax.jit(lambda x, w, b: matmul(x, w, b, BF16))
        other = jnp.full_like(x, 1e30).at[::3].set(x[::3])
    else:
        x, w, bias = pair(m, n, k, I8 if scheme == "int8" else F8)
        run = jax.jit(lambda x, w, b: matmul(x, w, b, BF16))
        other = QTensor(jnp.full_like(x.q, 100).at[::3].set(x.q[::3]), x.scale)
    first = floats(run(x, w, bias))
    for _ in range(3):
        np.testing.assert_array_equal(floats(run(x, w, bias)), first)
    np.testing.assert_array_equal(floats(run(other, w, bias))[::3], first[::3])


@pytest.mark.gpu
def test_int4_weight_is_never_unpacked_in_memory():
    n, k = 14336, 4096
    w = quantize(jax.random.normal(jax.random.key(0), (n, k), BF16), "int4", group_size=128)
    x = jax.random.normal(jax.random.key(1), (256, k), BF16)
    compiled = jax.jit(lambda x, w: matmul(x, w, None, BF16)).lower(x, w)
    stats = compiled.compile().memory_analysis()
    assert stats.argument_size_in_bytes <= n * k // 2 + w.scale.nbytes + x.nbytes + 4096
    assert stats.temp_size_in_bytes <= 2 * w.scale.nbytes + (1 << 20)
