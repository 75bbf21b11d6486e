"""Experts that a device lets the CPU compute: both sides of the mail; experts that lie apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.offload.store import Store
from pallas_kernels import dispatch
from pallas_kernels.cpu import experts as handler
from pallas_kernels.cpu import prepare_tree
from pallas_kernels.cpu.mail import ANSWERED, EXPERTS, POSTED, MailLayout, answered, awaited
from pallas_kernels.experts import mail, mail_kernel
from tests.helpers.warp_emulator import emulated
from tests.kernels.experts.test_fetch import FIRST, experts_of

SIZES = MailLayout(rows=3, width=20, pairs=6)
X = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((6, 20)).astype(np.float32)
CHOSEN = np.array([4, 0, 2, 5, 1, 3], np.int32)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "int4 zeros", "int8"])
def test_experts_that_lie_apart_have_the_bits_of_those_behind_one_another(scheme, swiglu):
    weight, _, offsets, packed = experts_of(scheme)
    weight = jax.tree.map(jnp.asarray, prepare_tree(jax.tree.map(np.asarray, weight)))
    x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    starts = np.array([0, 2, 2, 5], np.int32)
    plan = handler.plan(weight, 5, swiglu)
    want = np.asarray(jax.jit(lambda x, w: handler.run(plan, x, w, starts))(x, weight))
    # The experts 2 and 0 in this order. Experts without pairs are listed too.
    order, own = np.array([2, 3, 4, 0, 1]), np.array([0, 3, 3, 5, 5], np.int32)
    addresses = [[packed[e].ctypes.data + at for at in offsets] for e in (2, 1, 0, 0)]
    table = np.array(addresses, np.int64).view(np.int32).reshape(4, len(offsets), 2)
    one = jax.tree.map(lambda leaf: leaf[:1], weight)
    program = jax.jit(lambda x, w, table: handler.run_apart(x, w, own, table, 3, swiglu)[0])
    np.testing.assert_array_equal(np.asarray(program(x[order], one, table)), want[order])


def test_a_turn_passes_from_the_device_to_the_cpu_and_back(tmp_path):
    """Where no kernel runs, the device's side is Python's."""
    memory = Store(tmp_path).pin(np.zeros(SIZES.nbytes, np.uint8))
    start = memory.unsafe_buffer_pointer()
    address = mail.words_of(start)
    for turn in (1, 2):
        posted = mail.post(address, jnp.array([turn], jnp.int32), X * turn, CHOSEN, SIZES)
        x, experts = jax.jit(awaited, static_argnums=2)(address, mail.words_of(turn), SIZES)
        np.testing.assert_array_equal(x, X * turn)
        np.testing.assert_array_equal(experts, CHOSEN)
        assert mail.turn_at(start + ANSWERED).value == turn - 1
        program = jax.jit(answered, static_argnums=2)
        program(address, mail.words_of(turn), SIZES, Y * turn).block_until_ready()
        wanted = np.ones(6, np.int32)
        np.testing.assert_array_equal(mail.collect(address, posted, wanted, SIZES), Y * turn)


def test_the_kernels_write_what_the_cpu_reads_and_read_its_answer(monkeypatch):
    """The mail stands behind its address."""
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    memory = np.zeros(128 + SIZES.nbytes, np.uint8)
    memory[:8] = np.array([FIRST + 128]).view(np.uint8)
    memory, own = memory.view(np.int32), memory[128:]
    turn = jnp.array([7], jnp.int32)
    with emulated(mail_kernel):
        posted = mail.post(memory, turn, jnp.asarray(X), jnp.asarray(CHOSEN), SIZES)
    assert posted.tolist() == [7] and own[POSTED : POSTED + 8].view(np.int64) == 7
    np.testing.assert_array_equal(own[EXPERTS:][: 4 * 6].view(np.int32), CHOSEN)
    np.testing.assert_array_equal(own[SIZES.x :][: X.nbytes].view(np.float32), X.reshape(-1))
    own[ANSWERED] = 7
    own[SIZES.y :][: Y.nbytes] = Y.reshape(-1).view(np.uint8)
    wanted = np.array([1, 0, 1, 1, 0, 1], np.int32)
    with emulated(mail_kernel):
        y = mail.collect(memory, posted, jnp.asarray(wanted), SIZES)
    np.testing.assert_array_equal(np.asarray(y)[wanted > 0], Y[wanted > 0])
    assert np.isnan(np.asarray(y)[wanted == 0]).all()
