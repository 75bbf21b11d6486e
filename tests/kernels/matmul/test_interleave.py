"""W4A8 with its columns in the order of the kernel: the layout and its inverse, the XLA form, the
unpacking and the plans."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dequantize, quantize
from pallas_kernels.matmul import choice, op
from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.interleave import in_order, in_order_tree, interleaved, interleaved_tree
from pallas_kernels.matmul.many_rows import unpack
from pallas_kernels.matmul.op import product_plan, quantized_matmul
from pallas_kernels.qtensor import RowBlocks, take_columns
from tests.helpers import warp_emulator
from tests.helpers.arrays import as_jax
from tests.helpers.matmul_cases import lowered, newest, shaped
from tests.kernels.matmul.test_int4_pair import BF16, F32, I8, ZEROS, call_of, operands

K = 2048  # 16 groups, the least of which the kernel's copies have whole units


@pytest.fixture
def emulated():
    with contextlib.ExitStack() as patches:
        yield patches


def weight(n=8, k=K, activations="int8", **options):
    _, w, _ = operands(1, n, k, **options)
    return dataclasses.replace(w, activations=activations)


@pytest.mark.core
def test_the_order_and_its_inverse():
    w = weight()
    made = interleaved(w)
    assert made.interleaved and made.columns.shape == (K,)
    np.testing.assert_array_equal(np.sort(made.columns), np.arange(K))
    np.testing.assert_array_equal(made.q, w.q[:, made.columns])
    np.testing.assert_array_equal(dequantize(made), dequantize(w))
    # A word of eight codes: four neighbours in its low nibbles, and those 16 columns on.
    np.testing.assert_array_equal(made.columns[8:16], [4, 20, 5, 21, 6, 22, 7, 23])
    assert (made.columns // 32 == np.arange(K) // 32).all()  # so no group changes its columns
    assert interleaved(made) is made and in_order(w) is w
    back = in_order(made)
    assert back.columns is None and not back.interleaved
    np.testing.assert_array_equal(back.q, w.q)


def test_trees_and_what_the_kernel_does_not_take():
    others = {
        "floats": jnp.ones((8, K)),
        "of floats": weight(activations=None),
        "one level": weight(levels=1),
        "fp8": weight(activations="float8_e4m3fn"),
        "8 groups": weight(k=1024),
        "groups of 64": weight(group=64),
        "12 rows": weight(n=12),
        "act-order": dataclasses.replace(weight(), columns=jnp.arange(K)),
        "W8A8": dataclasses.replace(quantize(jnp.ones((8, K)), "int8"), activations="int8"),
    }
    tree = {"others": others, "w": weight(), "blocks": RowBlocks((weight(), others["floats"]))}
    made = interleaved_tree(tree)
    assert all(made["others"][name] is leaf for name, leaf in others.items())
    assert made["w"].interleaved and made["blocks"].blocks[0].interleaved
    back = in_order_tree(made)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.core
def test_products_have_the_same_bits():
    """Of codes, also with a low-rank term.  Floats' sums are in another order."""
    x, w, bias = operands(3, 16, K)
    w = dataclasses.replace(w, activations="int8")
    made = interleaved(w)
    second = (as_jax(np.ones((16, 8)), BF16),)
    for rows, more in (
        (x, {"bias": bias}),
        (x, {"low_rank": (as_jax(np.ones((3, 8)), BF16), second)}),
    ):
        got, want = (quantized_matmul(rows, v, out_dtype=F32, **more) for v in (made, w))
        np.testing.assert_array_equal(got, want)
    # Whoever has moved x forgets the columns, and need not know the note.
    moved = take_columns(x, made.columns), dataclasses.replace(made, columns=None)
    np.testing.assert_array_equal(quantized_matmul(*moved), quantized_matmul(x, w))
    assert not op._keeps_order(*moved) and op._keeps_order(x, made)
    got, want = (quantized_matmul(dequantize(x), v) for v in (made, w))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_a_threads_words_are_those_of_the_plain_order(emulated):
    """All lanes of a quad, with a multiple and every zero."""
    w = weight(n=256, k=128 * 16)
    laid_out = interleaved(w)
    plain, moved = (
        np.asarray(jax.lax.bitcast_convert_type(q[:, :128].reshape(256, 64, 2), jnp.uint8))
        for q in (w.q, laid_out.q)
    )
    emulated.enter_context(warp_emulator.running_on(warp_emulator.Block(256, 0), unpack))
    multiple = np.full(256, 7, np.uint32)
    for zero in ZEROS:
        held = None if zero is None else np.full(256, zero & 0xFFFFFFFF, np.uint32)
        with np.errstate(over="ignore"):
            widen = unpack.multiplied(held, multiple)
            for quad in range(4):

                def half(chunk, part, quad=quad):
                    at = 16 * chunk + 8 * part + 2 * quad
                    return plain[:, at : at + 2].copy().view(np.uint16)[:, 0].astype(np.uint32)

                words = [
                    moved[:, at : at + 4].copy().view(np.uint32)[:, 0]
                    for at in range(4 * quad, 64, 16)
                ]
                got = unpack.interleaved_words(words, widen)
                np.testing.assert_array_equal(got, unpack.row_words(half, widen))


def test_the_plan_is_that_of_the_plain_order():
    for m in (1, 17, 64, 300):
        x, w, call = call_of(m, 14336, 4096)
        columns = shaped((4096,), jnp.int32)
        made = dataclasses.replace(w, columns=columns, interleaved=True)
        assert choice.plan(MatmulCall.of(x, made, BF16)) == choice.plan(call)
        assert product_plan(x, made, out_dtype=BF16) == product_plan(x, w, out_dtype=BF16)
        # Floats of x, and columns in any other order, are moved before.
        for rows, other in (
            (shaped((m, 4096), BF16), made),
            (x, dataclasses.replace(made, interleaved=False)),
        ):
            assert "columns" in choice.plan(MatmulCall.of(rows, other, BF16)).text


@newest
def test_lowers_at_a_real_shape():
    x, w, _ = call_of(64, 14336, 4096)
    w = dataclasses.replace(w, columns=shaped((4096,), jnp.int32), interleaved=True)
    text = lowered(
        lambda x, w: quantized_matmul(x, w, out_dtype=BF16, implementation="mosaic"), x, w
    )
    assert "mosaic_gpu" in text and "gather" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m,n,k", [(1, 4096, 4096), (17, 1000, 2048), (64, 14336, 4096), (300, 4096, 14336)]
)
def test_the_same_bits_on_the_gpu(m, n, k):
    x, w, bias = operands(m, n, k, seed=m)
    w = dataclasses.replace(w, activations="int8")
    made = interleaved(w)
    assert made.interleaved
    np.testing.assert_array_equal(in_order(made).q.astype(I8), w.q.astype(I8))
    call = jax.jit(
        lambda x, w, b: quantized_matmul(x, w, bias=b, out_dtype=BF16, implementation="mosaic")
    )
    np.testing.assert_array_equal(call(x, made, bias), call(x, w, bias))
