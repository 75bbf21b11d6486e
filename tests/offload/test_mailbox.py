"""The mailbox of experts that the CPU computes, where something raises."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from jaxllama.executors.offloaded import mailbox
from jaxllama.executors.offloaded.mailbox import Mailbox
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from pallas_kernels.cpu.mail import ANSWERED, POSTED
from pallas_kernels.experts.mail import turn_at

LAYERS = SimpleNamespace(tables=[np.zeros((2, 1))])  # two turns


@pytest.fixture
def box(tmp_path):
    return Mailbox(Store(tmp_path), Policy.parse("100 0 100 0 100 0 experts=0/100"), 8)


def turn(box: Mailbox, field: int):
    return turn_at(box._memory.unsafe_buffer_pointer() + field)


def waits_until(condition) -> bool:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(1e-3)
    return condition()


def test_turns_of_a_body_that_raises_are_not_waited_for(box, monkeypatch):
    """The device posts earlier turns late, over the turn that the host posts in its place."""

    def served(kind, sizes, start, first, experts):
        time.sleep(0.2)
        for own in range(int(first.view(np.int64)[0]), int(first.view(np.int64)[0]) + 2):
            assert waits_until(lambda own=own: turn(box, POSTED).value >= own)
            turn(box, ANSWERED).value = own
        return SimpleNamespace(block_until_ready=lambda: None)

    monkeypatch.setattr(mailbox.programs, "served", served)

    def post() -> None:
        for own in (1, 2):
            time.sleep(0.05)
            turn(box, POSTED).value = own

    with box.serving(None, None, LAYERS):
        device = threading.Thread(target=post)
    with pytest.raises(MemoryError), box.serving(None, None, LAYERS):
        device.start()
        raise MemoryError
    device.join()
    assert waits_until(lambda: turn(box, ANSWERED).value == 4)
    box.check()


def test_what_a_turn_raises_is_raised_where_its_results_are_read(box, monkeypatch):
    def served(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(mailbox.programs, "served", served)
    with box.serving(None, None, LAYERS):
        pass
    assert waits_until(lambda: turn(box, ANSWERED).value == 2)  # the device goes on
    with pytest.raises(MemoryError, match="no room"):
        box.check()
