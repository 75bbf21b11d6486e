"""Copies that a GPU refuses, found where a kernel is lowered; plans that ask for none."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import QTensor, quantized_matmul
from pallas_kernels.launch import Views, launch
from pallas_kernels.matmul.many_rows import plan as planning
from pallas_kernels.primitives.refused import refuse
from tests.helpers.lowering import kernels_in, lowered
from tests.helpers.matmul_cases import newest

SIZE = 16  # columns of a copy
# Where the j-th of four copies begins, in columns of float32, by a loop or a condition, and whether
# all of these are multiples of 16 bytes.
OFFSETS = {
    "j * 4": (lambda j, part: j * 4, True),
    "j * 2": (lambda j, part: j * 2, False),
    "j * 8 + 2": (lambda j, part: j * 8 + 2, False),
    "part * 6": (lambda j, part: part * 6, False),
    "part * 12": (lambda j, part: part * 12 + 4 * j, True),
    "alone * 3": (lambda j, part: lax.axis_index("alone") * 3 + 4 * j, True),
    "of eight": (lambda j, part: 8 * (j // 8), True),
    "chosen": (lambda j, part: jnp.where(part == 0, 4 * j, 8 * j + 4), True),
    "badly chosen": (lambda j, part: jnp.where(part == 0, 4 * j, 8 * j + 6), False),
}


def traced(offset, columns: int = 256):
    """The jaxpr of a program that launches a kernel of such copies, there and back."""

    def body(gmem, smem, barrier) -> None:
        part = lax.axis_index("part")

        def step(j, count):
            at = pl.ds(offset(j, part), SIZE)
            plgpu.copy_gmem_to_smem(gmem.x.at[pl.ds(0, 8), at], smem.x, barrier.full)
            plgpu.barrier_wait(barrier.full)
            back = pl.ds(offset(count, part), SIZE)
            pl.when(part == 0)(
                lambda: plgpu.copy_smem_to_gmem(smem.x, gmem.out.at[pl.ds(0, 8), back])
            )
            plgpu.wait_smem_to_gmem(0)
            return count + 1

        lax.fori_loop(0, 4, step, jnp.int32(0))

    x = jax.ShapeDtypeStruct((8, columns), jnp.float32)

    def program(x):
        return launch(
            body,
            {"x": x},
            {"out": x},
            name="copies",
            grid={"block": 2},
            cluster={"part": 2, "alone": 1},
            scratch={"x": plgpu.SMEM((8, SIZE), jnp.float32), "full": plgpu.Barrier()},
        )

    return jax.make_jaxpr(program)(x).jaxpr


@newest
@pytest.mark.parametrize("name", OFFSETS)
def test_a_copy_begins_at_whole_16_bytes(name) -> None:
    offset, is_aligned = OFFSETS[name]
    if is_aligned:
        return refuse("copies", traced(offset))
    with pytest.raises(
        NotImplementedError, match=r"copies: its kernel copies float32\[8,256\] from"
    ):
        refuse("copies", traced(offset))
    return None


@newest
def test_rows_have_whole_16_bytes() -> None:
    with pytest.raises(NotImplementedError, match="whose rows have 1032 bytes"):
        refuse("copies", traced(OFFSETS["j * 4"][0], columns=258))


def taking(arrays: dict, barriers: int):
    """The jaxpr of a program that launches a kernel with such scratch memory."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    scratch = {**arrays, "full": plgpu.Barrier(num_barriers=barriers)}

    def program(x):
        return launch(lambda *_: None, {"x": x}, {"out": x}, name="full", grid=1, scratch=scratch)

    return jax.make_jaxpr(program)(x).jaxpr


@newest
def test_a_block_s_memory_is_counted_to_the_byte() -> None:
    """227 KiB: arrays begin at multiples of 1,024 bytes, and a barrier has 8."""
    views = Views(words=plgpu.SMEM((128, 256), jnp.float32), codes=plgpu.SMEM((64,), jnp.int8))
    arrays = {"views": views, "short": plgpu.SMEM((1,), jnp.float32), "half": 24832}
    refuse("full", taking(arrays, 128))
    with pytest.raises(NotImplementedError, match="takes 232,456 bytes of shared memory"):
        refuse("full", taking(arrays, 129))


def block_scaled(m: int, n: int, k: int, dtype) -> tuple[QTensor, QTensor]:
    f8, shape = jnp.float8_e4m3fn, jax.ShapeDtypeStruct
    x = QTensor(shape((m, k), f8), shape((m, k // 128), jnp.float32))
    scale = shape((n, k // 128), dtype)
    return x, QTensor(shape((n, k), f8), scale, blocked=n)


def product(x, w):
    return quantized_matmul(x, w, implementation="mosaic", out_dtype=jnp.bfloat16)


@newest
def test_halves_of_k_begin_at_whole_16_bytes_of_scales(monkeypatch) -> None:
    """With 28 groups of float32 a half has 56 bytes: a GPU stopped the process."""
    operands = block_scaled(5, 640, 3584, jnp.float32)
    assert kernels_in(lowered(product, *operands)) == ["quantized_matmul_fp8_block"]
    monkeypatch.setattr(planning, "UNIT", 1)
    jax.clear_caches()
    with pytest.raises(NotImplementedError, match=r"copies float32\[5,28\] from multiples of 8"):
        lowered(product, *operands)
    jax.clear_caches()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_no_plan_splits_a_unit_of_scales(dtype) -> None:
    """Every K of 128 columns to 32,768, for a few rows of x and products of several widths."""
    splits = set()
    for groups, n, m in itertools.product(range(1, 257, 3), (128, 640, 4096, 8192), (1, 13, 64)):
        tile = planning.pair_tile(
            m, n, 128 * groups, jnp.float8_e4m3fn, scales=groups * jnp.dtype(dtype).itemsize
        )
        assert tile.split == 1 or groups // 2 * jnp.dtype(dtype).itemsize % 16 == 0, (groups, n, m)
        assert groups % tile.split == 0
        splits.add(tile.split)
    assert splits == {1, 2}


@newest
@pytest.mark.parametrize("most, is_given", [(232, True), (240, False)])
def test_warpgroups_ask_for_registers_that_the_launch_has(most, is_given) -> None:
    """Three warpgroups have 3 * 168; two that wait for more than the third gives back hang.

    A kernel beside it, with more warpgroups, asks for nothing.
    """

    def body(gmem, smem, barrier) -> None:
        is_feeder = lax.axis_index("warpgroup") == 2
        pl.when(is_feeder)(lambda: plgpu.set_max_registers(40, action="decrease"))
        pl.when(~is_feeder)(lambda: plgpu.set_max_registers(most, action="increase"))

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def program(x):
        how = {"operands": {"x": x}, "out": {"out": x}, "grid": 1}
        beside = launch(lambda *_: None, **how, name="beside", warpgroups=8)
        return launch(body, **how, name="asks", warpgroups=3), beside

    jaxpr = jax.make_jaxpr(program)(x).jaxpr
    if is_given:
        return refuse("asks", jaxpr)
    with pytest.raises(NotImplementedError, match="asks for 520 registers in 3 warpgroups, and ha"):
        refuse("asks", jaxpr)
