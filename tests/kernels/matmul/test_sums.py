"""Sums over devices that products post: the kernels' code on numpy, and the order of the slots."""

import dataclasses
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.launch import launch
from pallas_kernels.matmul.call import EMPTY, Around
from pallas_kernels.matmul.few_rows import kernel, posted
from pallas_kernels.matmul.few_rows.plan import divide_row
from pallas_kernels.matmul.sums import SLOTS, tables
from tests.helpers.few_rows import few_rows
from tests.helpers.matmul_cases import activations, weight
from tests.helpers.warp_emulator import to_bytes


def starts(*arrays):
    """Return the emulator's address of each array, and of the first result."""
    sizes = [(len(to_bytes(array)) + 255) // 128 * 128 for array in arrays]
    return np.cumsum([128, *sizes]).tolist()


def table_of(*addresses):
    return jnp.asarray(np.array(addresses, np.int64).view(np.int32).reshape(1, -1, 2))


@pytest.mark.parametrize("name,k,swiglu", [("plain", 1024, False), ("w4-g128", 2048, True)])
def test_a_posted_sum_is_read_as_a_pending_one(name, k, swiglu):
    peers, index, dtype = 3, 2, jnp.bfloat16
    w, x = weight(name, 96, k, dtype), activations((1, k), dtype)
    rows = np.full((SLOTS, peers, k), EMPTY, np.uint32).view(np.float32)
    rows[index] = activations((peers, k), jnp.float32, 3)
    gamma = activations((k,), dtype, 5)
    around = Around(jnp.dtype(dtype), gamma=gamma, eps=1e-5, swiglu=swiglu)
    total = sum(rows[index], np.zeros(k, np.float32))[None]
    plan, mailbox = divide_row(w, swiglu), jnp.asarray(rows)
    before = [x, *(part for part in kernel.parts_of(w).values() if part is not None), gamma]
    slot = starts(*before)[-1] + 4 * peers * k * index
    with few_rows():
        want = kernel.matmul(x, w, replace(around, pending=jnp.asarray(total)), plan)
        table = table_of(*[0] * peers, slot, 0)
        got = kernel.matmul(x, w, replace(around, pending=mailbox, posted=table), plan)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name,n,k,sms", [("plain", 80, 1024, 2), ("w4-g128", 96, 4096, 2)])
def test_a_product_is_posted_to_a_place(name, n, k, sms):
    """In several rounds, of which the last one leaves warps without a row."""
    w, x = weight(name, n, k, jnp.bfloat16), activations((1, k), jnp.bfloat16)
    plan = dataclasses.replace(divide_row(w), sms=sms)
    around = Around(jnp.dtype(jnp.float32))
    assert plan.rounds > 1
    parts = [part for part in kernel.parts_of(w).values() if part is not None]
    out = starts(x, *parts, np.zeros((1, 3, 2), np.int32))[-1]
    with few_rows():
        want = kernel.matmul(x, w, around, plan)
        got = kernel.matmul(x, w, replace(around, post=table_of(out, out, out)), plan)
    np.testing.assert_array_equal(got, want)


def test_a_slot_is_emptied_and_no_more():
    posts, table = posted.Posts(2, 96), np.zeros((1, 4, 2), np.int32)
    box = jax.new_ref(jnp.ones((3, 192), jnp.uint32))

    def body(gmem, smem):
        posts.empty(posted.p.address(gmem.table), posted.p.register("tid.x"), 128)

    with few_rows():
        operands = {"table": table_of(0, 0, 0, starts(table)[-1] + 4 * 192), "box": box}
        out = {"out": jax.ShapeDtypeStruct((1,), jnp.uint32)}
        launch(body, operands, out, name="empty", grid=1, warpgroups=1, registers=True)
    np.testing.assert_array_equal(box[...], np.array([[1], [EMPTY], [1]]) * np.ones((1, 192)))


def test_a_posted_sum_becomes_an_array():
    row = activations((1, 1536), jnp.float32, 7)
    with few_rows():
        got = posted.collect(row, table_of(0, 128, 0))
    np.testing.assert_array_equal(got, np.asarray(row))


@pytest.mark.parametrize("peers,n_sums", [(2, 4), (3, 8), (4, 12)])
def test_no_word_is_lost_in_any_order_of_the_devices(peers, n_sums):
    """Each device posts and reads its sums in order; which one goes on is drawn."""
    boxes = [1000 * (device + 1) for device in range(peers)]
    words = tables(boxes, 1, n_sums).view(np.int64)[..., 0]
    memory = {box + 4 * i: EMPTY for box in boxes for i in range(SLOTS * peers)}
    draw, done, steps = np.random.default_rng(peers), [0] * peers, 6 * n_sums
    while min(done) < 2 * steps:
        device = int(draw.integers(peers))
        number, is_read = divmod(done[device], 2)
        if number == steps:
            continue
        table = words[number % n_sums, device].tolist()
        here, older = ([slot + 4 * peer for peer in range(peers)] for slot in table[peers:])
        if is_read:
            values = [memory[at] for at in here]
            if EMPTY in values:
                continue
            assert values == [(number, peer) for peer in range(peers)]
        else:
            for at in older:
                memory[at] = EMPTY
            for at in table[:peers]:
                assert memory[at] == EMPTY
                memory[at] = number, device
        done[device] += 1


def test_sums_that_do_not_fill_the_slots_are_refused():
    with pytest.raises(ValueError, match="6 sums a step: not a multiple of 4"):
        tables([0, 1], 8, 6)
