"""An even share of a product for every cluster (``many_rows.shares``): the division anywhere, the
kernel lowered at real shapes, and on a GPU its values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul.call import MatmulCall
from pallas_kernels.matmul.many_rows import kernel
from pallas_kernels.matmul.many_rows import plan as planning
from pallas_kernels.matmul.many_rows.exchange import slot_of
from pallas_kernels.matmul.many_rows.plan import WeightTile
from pallas_kernels.matmul.many_rows.shares import Shares
from tests.helpers.matmul_cases import error, newest, product
from tests.kernels.matmul.test_int4_pair import call_of, operands

BF16 = jnp.bfloat16
EVEN = WeightTile(64, 128, stages=12, store=16, parts=2, even=True)


@pytest.mark.parametrize(
    "tiles,clusters,steps,unit,longest",
    [
        (56, 66, 32, 4, 28),
        (112, 66, 64, 4, 112),
        (96, 132, 32, 2, 24),
        (100, 132, 32, 1, 26),
        (67, 132, 8, 4, 8),
    ],
)
def test_every_step_is_computed_once(tiles, clusters, steps, unit, longest):
    """Each tile is finished by one cluster; a cluster sends first and receives last, and waits for
    the one behind it alone."""
    shares, every = Shares(tiles, clusters, steps, unit), jnp.arange(clusters)
    counts, totals, _ = shares.segments(every, 0)
    computed, finished = np.zeros((tiles, steps), int), np.zeros(tiles, int)
    begun, sender, receiver = np.zeros(clusters, int), {}, {}
    for t in range(int(counts.max())):
        segment = dataclasses.asdict(shares.segments(every, t)[2])
        for cluster in np.flatnonzero(np.asarray(counts) > t):
            s = {k: int(np.broadcast_to(v, clusters)[cluster]) for k, v in segment.items()}
            assert s["begun"] == begun[cluster] and s["steps"] > 0
            assert s["steps"] % unit == s["first"] % unit == 0
            begun[cluster] += s["steps"]
            computed[s["tile"], s["first"] : s["first"] + s["steps"]] += 1
            if s["sends"]:
                assert t == 0
                sender[s["shared"]] = cluster
            else:
                finished[s["tile"]] += 1
            if s["receives"]:
                assert t == counts[cluster] - 1 and not s["sends"]
                receiver[s["shared"]] = cluster
    assert (computed == 1).all() and (finished == 1).all() and (begun == totals).all()
    assert {tile: c + 1 for tile, c in receiver.items()} == sender
    assert begun.max() == shares.longest == longest


@pytest.mark.parametrize(
    "rows,parts,unroll",
    [(128, 1, 1), (128, 1, 2), (256, 1, 2), (64, 2, 1), (128, 2, 1), (128, 2, 2)],
)
def test_sums_come_in_the_slots_of_those_who_add_them(rows, parts, unroll):
    tile, across = WeightTile(64, rows, parts=parts, unroll=unroll), rows // 64
    slots = [[slot_of(piece, half, tile, unroll) for half in range(across)] for piece in range(2)]
    assert sorted(sum(slots, [])) == list(range(2 * across))
    for piece, mine in enumerate(slots):
        assert parts == 1 or all(slot // unroll % parts == piece for slot in mine)


def of(call, x, w, tile):
    planned = planning.int4_plan if call.quantized_x else planning.weight_plan
    plan = planned(call, tile)
    return jax.jit(lambda x, w, bias: kernel.matmul(x, w, bias, BF16, plan))


@newest
@pytest.mark.parametrize("n,k,rows", [(14336, 4096, 128), (6144, 4096, 64)])
def test_lowers_at_real_shapes(n, k, rows):
    x, w, call = call_of(64, n, k)
    tile = dataclasses.replace(EVEN, rows=rows, unroll=rows // 64)
    f = of(call, x, w, tile)
    text = f.trace(x, w, None).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("codes", ["int8", "bfloat16"])
@pytest.mark.parametrize("n,k,rows", [(14336, 4096, 128), (28672, 2048, 128), (6144, 4096, 64)])
def test_values_on_the_gpu(n, k, rows, codes):
    """The same bits in every call; of int8 those of undivided tiles."""
    x, w, bias = operands(64, n, k, seed=1)
    if codes == "bfloat16":
        x = (x.q * x.scale).astype(BF16)
        w = w.in_one_level
        w = dataclasses.replace(w, scale=w.scale.astype(BF16))
    call = MatmulCall.of(x, w, BF16)
    tile = dataclasses.replace(EVEN, rows=rows, unroll=rows // 64)
    first = of(call, x, w, tile)(x, w, bias)
    assert error(first, product(x, w, bias)) < 2.5e-3
    for _ in range(3):
        assert (of(call, x, w, tile)(x, w, bias) == first).all()
    if codes == "int8":
        whole = dataclasses.replace(tile, even=False)
        assert (of(call, x, w, whole)(x, w, bias) == first).all()
