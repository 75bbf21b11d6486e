"""A kernel's tables: references by name and place; a module's text, without locations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.launch import launch
from tests.helpers.matmul_cases import newest


@newest
def test_a_body_gets_references_by_name_and_place(interpreter):
    seen = {}

    def body(gmem, smem, barrier):
        seen.update(gmem=vars(gmem).keys(), smem=vars(smem).keys(), barrier=vars(barrier).keys())
        assert gmem.absent is None and smem.absent is None
        assert len(gmem.pair) == len(smem.pair) == 2
        for source, to in zip(gmem.pair, smem.pair, strict=True):
            plgpu.copy_gmem_to_smem(source, to, barrier.full)
        plgpu.barrier_wait(barrier.full)
        smem.total[...] = smem.pair[0][...] + smem.pair[1][...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem.total, gmem.total)
        plgpu.wait_smem_to_gmem(0)

    x = jnp.arange(128, dtype=jnp.float32)
    row = plgpu.SMEM((128,), jnp.float32)
    with interpreter():
        total, absent = launch(
            body,
            {"absent": None, "pair": [x, 2 * x]},
            {"total": jax.ShapeDtypeStruct(x.shape, x.dtype), "no_result": None},
            name="sums",
            grid=1,
            scratch={
                "full": plgpu.Barrier(num_arrivals=2),
                "pair": [row, row],
                "absent": None,
                "total": 128,
            },
        )
    np.testing.assert_array_equal(total, 3 * np.arange(128))
    assert absent is None
    assert seen["gmem"] == {"absent", "pair", "total", "no_result"}
    assert seen["smem"] == {"pair", "absent", "total"}
    assert seen["barrier"] == {"full"}


def test_two_tables_may_not_share_a_name():
    x = jnp.zeros((128,), jnp.float32)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'x'"):
        launch(lambda *_: None, {"x": x}, {"x": x}, name="twice", grid=1)


@newest
def test_a_module_s_text_is_that_of_the_kernel_alone():
    from tests.helpers.kernel_modules import modules

    (name, text), *others = modules("tokens to int8").items()
    assert name == "copy_to_s8 0" and not others
    assert "loc(" not in text
    assert modules("tokens to int8") == {name: text}
    assert text not in modules("gate to int8").values()
