"""Experts that a device lets the CPU compute: both sides of the mail; experts that lie apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.offload.store import Store
from pallas_kernels import dispatch, quantize
from pallas_kernels.cpu import experts as handler
from pallas_kernels.cpu import prepare_tree
from pallas_kernels.cpu.mail import (
    ANSWERED,
    EXPERTS,
    POSTED,
    Clamped,
    MailedProduct,
    MailLayout,
    served,
)
from pallas_kernels.experts import mail, mail_kernel
from pallas_kernels.experts.gate import ClampedGate, apply_gate
from tests.helpers.cases import each_once, slow
from tests.helpers.warp_emulator import emulated
from tests.kernels.experts.test_fetch import FIRST, SCHEMES, experts_of

SIZES = MailLayout(rows=3, width=20, pairs=6)
X = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((6, 20)).astype(np.float32)
CHOSEN = np.array([4, 0, 2, 5, 1, 3], np.int32)
CPU_SCHEMES = ["mxfp4", "nvfp4", "int4 zeros", "int8", "fp8"]


@pytest.mark.parametrize(("scheme", "swiglu"), each_once(CPU_SCHEMES, [False, True]))
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


@pytest.mark.parametrize(("scheme", "gate"), each_once(CPU_SCHEMES, ["silu", "relu2", "clamped"]))
@pytest.mark.parametrize("rows", [3, *slow(1, 9)])
def test_layers_are_served_a_turn_each(scheme, rows, gate, tmp_path):
    """Where no kernel runs, the device's side is Python's. A pair's expert may be the device's."""
    gate = Clamped(7.0, 1.702) if gate == "clamped" else gate
    layers, n_experts, width, a_token = 3, 3, 64, 2
    sizes = MailLayout(rows, width, rows * a_token)
    rng, kept, products = np.random.default_rng(rows), [], []
    for n_out, k in ((2 * 96, width), (width, 96 if gate != "relu2" else 2 * 96)):
        weights = jnp.asarray(rng.standard_normal((layers * n_experts, n_out, k)), jnp.float32)
        own = [
            prepare_tree(jax.tree.map(np.asarray, quantize(w[None], **SCHEMES[scheme])))
            for w in weights
        ]
        kept.append([[np.asarray(part) for part in jax.tree.leaves(w)] for w in own])
        table = np.array([[part.ctypes.data for part in parts] for parts in kept[-1]], np.int64)
        table = jnp.asarray(table.view(np.int32).reshape(layers, n_experts, -1, 2))
        bias = rng.standard_normal((layers, n_experts, n_out)).astype(np.float32)
        products.append(MailedProduct(own[0], table, None if gate == "silu" else jnp.asarray(bias)))
    memory = Store(tmp_path).pin(np.zeros(sizes.nbytes, np.uint8))
    start = memory.unsafe_buffer_pointer()
    program = jax.jit(served, static_argnums=(2, 5))
    operands = mail.words_of(start), mail.words_of(5), sizes, *products, gate
    with ThreadPoolExecutor() as threads:
        last = threads.submit(lambda: np.asarray(program(*operands)))
        check_turns(products, gate, sizes, start, rng)
    assert last.result().view(np.int64) == 5 + layers


def check_turns(products, gate, sizes, start, rng, layers=3, n_experts=3):
    a_token = sizes.pairs // sizes.rows
    for layer in range(layers):
        x = rng.standard_normal((sizes.rows, sizes.width)).astype(np.float32)
        chosen = rng.integers(0, n_experts + 1, sizes.pairs).astype(np.int32)
        turn = jnp.array([5 + layer], jnp.int32)
        posted = mail.post(mail.words_of(start), turn, x, chosen, sizes)
        is_sent = (chosen < n_experts).astype(np.int32)
        found = np.asarray(mail.collect(mail.words_of(start), posted, is_sent, sizes))
        for pair in np.flatnonzero(is_sent):
            want = computed_alone(products, gate, layer, chosen[pair], x[pair // a_token])
            if isinstance(gate, Clamped):  # one code of an inner value may be another
                np.testing.assert_allclose(found[pair], want, atol=0.02 * np.abs(want).max())
            else:
                np.testing.assert_array_equal(found[pair], want)


def computed_alone(products, gate, layer, expert, x):
    """The results of one token's expert by ``run_apart`` and jax."""
    y, starts = jnp.asarray(x[None]), np.array([0, 1], np.int32)
    for number, (like, table, bias) in enumerate(products):
        where = table[layer, expert][None]
        y, is_gated = handler.run_apart(y, like, starts, where, 3, not number and gate == "silu")
        y = y if bias is None else y + bias[layer, expert]
        if not number and gate == "relu2":
            y = jnp.square(jax.nn.relu(y))
        elif not number and not is_gated:
            y = apply_gate(y, ClampedGate(*gate))
    return np.asarray(y[0])


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
