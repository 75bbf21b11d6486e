"""Parts of an engine: which part a request goes to, and plans that read prompts together."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxllama.engine.divided import DividedScheduler
from jaxllama.engine.pages import KVPages
from jaxllama.engine.request import Request
from jaxllama.engine.scheduler import Scheduler, Sequence
from jaxllama.engine.slots import _Rows


class Engine:
    """Two parts of two slots and eight pages, whose rows write 1 each step."""

    def __init__(self) -> None:
        self.parts = [
            Scheduler(
                max_slots=2, pages=KVPages(8, 4), chunk=8, token_budget=8, first_slot=2 * part
            )
            for part in range(2)
        ]
        self.whole = DividedScheduler(self.parts)
        self.n = 0

    def add(self, prompt: int = 5, new: int = 4) -> Sequence:
        tokens = tuple(range(3 + self.n, 3 + self.n + prompt))
        sequence = Sequence(Request(str(self.n), tokens, new), self.n, 0.0)
        self.n += 1
        self.whole.add(sequence)
        return sequence

    def step(self) -> list[Sequence]:
        """Return the sequences that the step reads tokens of."""
        plan = self.whole.plan()
        for sequence, budget in plan.budgets.items():
            plan.settle(sequence)
            sequence.output += [1] * budget
            if not sequence.remaining:
                self.whole.finish(sequence)
        return [fill.sequence for fill in plan.fills]


def test_each_part_has_slots_and_pages_of_its_own():
    engine = Engine()
    sequences = [engine.add() for _ in range(4)]
    engine.step()
    engine.step()
    assert sorted(sequence.own_slot for sequence in sequences) == [0, 1, 2, 3]
    for sequence in sequences:
        assert all(page < 8 for page in sequence.held.pages)
    assert [sequence.own_slot // 2 for sequence in sequences] == [0, 1, 0, 1]
    assert [pool.used for pool in engine.whole.pools] == [4, 4]


def test_a_waiting_request_moves_to_a_part_with_a_free_slot():
    engine = Engine()
    first = [engine.add(new=2 if index % 2 else 12) for index in range(4)]
    late = engine.add(new=12)
    assert late in engine.parts[0].waiting
    for _ in range(6):
        engine.step()
    assert [sequence.slot for sequence in first[1::2]] == [None, None]  # part 1 has ended
    assert late.own_slot // 2 == 1


def test_a_lone_prompt_waits_for_one_plan():
    engine = Engine()
    alone = engine.add(new=12)
    assert engine.step() == [alone]  # no row runs that it could keep waiting
    second = engine.add(new=12)
    assert engine.step() == []
    third = engine.add(new=12)
    assert set(engine.step()) == {second, third}
    assert {second.own_slot // 2, third.own_slot // 2} == {0, 1}
    fourth = engine.add(new=12)
    assert [engine.step(), engine.step()] == [[], [fourth]]
    while engine.whole.running:
        engine.step()
    assert [len(row.output) for row in (alone, second, third, fourth)] == [12] * 4


def test_parts_of_rows_take_and_put_their_own():
    rng = np.random.default_rng(0)
    old = {"a": jnp.asarray(rng.normal(size=(8, 3))), "b": jnp.arange(8)}
    index = jnp.asarray([1, 2**30, 3, 0, 6, 2**30, 2**30, 4])  # two parts, of slots 0-3 and 4-7
    new = {"a": jnp.asarray(rng.normal(size=(8, 3))), "b": 100 + jnp.arange(8)}
    whole, parted = _Rows(index), _Rows(index, 2)
    used = np.asarray(index) < 8
    for name in old:
        a, b = (np.asarray(rows.take(old)[name]) for rows in (whole, parted))
        assert np.array_equal(a[used], b[used])
        a, b = (np.asarray(rows.put(old, new)[name]) for rows in (whole, parted))
        assert np.array_equal(a, b)
        assert np.array_equal(b[3], np.asarray(new[name])[2])
