"""Scheduler and prefix index, without a model: a simulated engine checks every plan."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.engine.prefix import PrefixCache
from jaxllama.serving.engine.request import Grammar, Request
from jaxllama.serving.engine.scheduler import Plan, Scheduler, Sequence


def make(n_prompt: int, n_new: int = 4, order: int = 0, **options) -> Sequence:
    request = Request(f"r{order}", tuple(range(1, n_prompt + 1)), n_new, **options)
    return Sequence(request, order, submitted=0.0)


def scheduler(**options) -> Scheduler:
    sizes = {"max_slots": 2, "cache_tokens": 100, "chunk": 8, "token_budget": 10}
    return Scheduler(**{**sizes, **options})


def write(plan: Plan, sch: Scheduler, steps: int | None = None) -> None:
    """What the engine does after a plan: every running row writes, and ends at its limit."""
    for sequence in list(sch.running.values()):
        for _ in range(min(plan.steps if steps is None else steps, sequence.remaining)):
            sequence.output.append(0)
        if not sequence.remaining:
            sch.finish(sequence)


def spans(plan: Plan) -> list[tuple[str, int, int]]:
    return [(fill.sequence.request.id, fill.begin, fill.end) for fill in plan.fills]


def test_prefill_stops_before_the_last_token():
    sch = scheduler()
    sch.add(make(5))
    plan = sch.plan()
    assert spans(plan) == [("r0", 0, 4)]
    assert [sequence.slot for sequence in plan.started] == [0]
    assert plan.steps == 1


def test_a_prompt_of_one_token_needs_no_prefill():
    sch = scheduler()
    sch.add(make(1))
    plan = sch.plan()
    assert plan.fills == [] and len(plan.started) == 1


def test_a_long_prompt_goes_in_chunks_while_rows_run():
    sch = scheduler()
    sch.add(make(3, 50, order=0))
    write(sch.plan(), sch)
    sch.add(make(30, order=1))
    seen = []
    for _ in range(4):
        plan = sch.plan()
        seen.append(spans(plan))
        assert plan.steps == 1  # the running row writes in every step
        write(plan, sch)
    # Chunks end at multiples of 8, and no two of them are within the budget of 10.
    assert seen == [[("r1", 0, 8)], [("r1", 8, 16)], [("r1", 16, 24)], [("r1", 24, 29)]]


def test_short_prompts_count_as_wide_as_their_prefill_call():
    sch = scheduler(max_slots=8, token_budget=16, widths=(4, 8))
    for order, n_prompt in enumerate((3, 6, 5, 2, 9)):  # one token less each: 2, 5, 4, 1, 8
        sch.add(make(n_prompt, order=order))
    assert [name for name, *_ in spans(sch.plan())] == ["r0", "r1", "r2"]  # 4 + 8 + 4
    assert [name for name, *_ in spans(sch.plan())] == ["r3", "r4"]  # 4 + 8


def test_budget_is_one_chunk_when_it_is_no_larger():
    sch = scheduler(token_budget=8)
    sch.add(make(20, order=0))
    sch.add(make(3, order=1))
    assert spans(sch.plan()) == [("r0", 0, 8)]
    assert spans(sch.plan()) == [("r0", 8, 16)]
    assert spans(sch.plan()) == [("r0", 16, 19), ("r1", 0, 2)]


def test_several_steps_when_nobody_waits_for_prefill():
    sch = scheduler(steps_per_call=4)
    sch.add(make(3, 10))
    assert sch.plan().steps == 4
    sch.add(make(40, order=1))
    assert sch.plan().steps == 1  # r1 is in the middle of its prompt


def test_a_plan_says_how_many_wait_for_a_slot():
    sch = scheduler(steps_per_call=4)
    for order in range(3):
        sch.add(make(3, 10, order=order))
    plan = sch.plan()
    assert (plan.steps, plan.wanted, len(plan.started)) == (4, 1, 2)


def test_constrained_rows_go_token_by_token():
    sch = scheduler(steps_per_call=4)
    sch.add(make(3, 10, grammar=Grammar("regex", "a*")))
    assert sch.plan().steps == 1


def test_steps_do_not_pass_the_last_token():
    sch = scheduler(steps_per_call=4)
    sch.add(make(3, 2))
    assert sch.plan().steps == 2


def test_order_of_arrival_and_priority():
    sch = scheduler(max_slots=1)
    for order, priority in enumerate([0, 0, 5, 5]):
        sch.add(make(3, 1, order=order, priority=priority))
    ended = []
    while sch.in_flight:
        plan = sch.plan()
        ended += [sequence.request.id for sequence in plan.started]
        write(plan, sch)
    assert ended == ["r2", "r3", "r0", "r1"]


def test_urgent_request_preempts_the_last_of_the_least_urgent():
    sch = scheduler()
    first, second = make(3, 9, order=0), make(3, 9, order=1)
    sch.add(first)
    sch.add(second)
    write(sch.plan(), sch)
    sch.add(make(3, 2, order=2, priority=1))
    plan = sch.plan()
    assert plan.preempted == [second]
    assert [sequence.request.id for sequence in plan.started] == ["r2"]
    assert second.slot is None and second.output == [0]
    write(plan, sch)
    write(sch.plan(), sch)
    plan = sch.plan()
    assert plan.started == [second]
    assert spans(plan) == [("r1", 0, 3)]  # prompt and output, but for the newest token


def test_equal_priority_never_preempts():
    sch = scheduler(max_slots=1)
    sch.add(make(3, 9, order=0))
    sch.plan()
    sch.add(make(3, 9, order=1))
    assert sch.plan().preempted == []


def test_urgent_long_prompt_takes_a_lane():
    sch = scheduler(max_slots=4, lanes=1, token_budget=8)
    slow = make(40, order=0)
    sch.add(slow)
    sch.plan()
    sch.add(make(20, order=1, priority=1))
    plan = sch.plan()
    assert plan.preempted == [slow] and slow.filled == 0
    assert spans(plan) == [("r1", 0, 8)]


def test_short_cache_preempts_the_latest_and_resumes_it():
    sch = scheduler(cache_tokens=12)
    first, second = make(3, 8, order=0), make(3, 8, order=1)
    sch.add(first)
    sch.add(second)
    preempted = []
    for _ in range(40):
        if not sch.in_flight:
            break
        plan = sch.plan()
        preempted += plan.preempted
        assert sch.used_tokens + len(sch.running) * plan.steps <= 12
        write(plan, sch)
    assert not sch.in_flight
    assert set(preempted) == {second}
    assert len(first.output) == len(second.output) == 8


def test_newcomers_are_numbered_by_arrival():
    """An earlier number that comes later would stand before the one whose lane it waits for."""
    sch = scheduler(lanes=1)
    sch.add(make(40, order=5))
    sch.plan()
    with pytest.raises(JaxLlamaError, match="'r3' is number 3, after number 5: newcomers must be"):
        sch.add(make(40, order=3))
    with pytest.raises(JaxLlamaError, match="'r5' is number 5, after number 5"):
        sch.add(make(40, order=5))


def test_what_can_never_run_is_refused():
    sch = scheduler(cache_tokens=10)
    with pytest.raises(
        JaxLlamaError, match="8 prompt tokens and 3 new ones exceed the cache of 10"
    ):
        sch.add(make(8, 3))
    sch.add(make(8, 2))


def test_deadlines_and_cancellation_free_what_they_held():
    sch = scheduler(max_slots=1)
    running = make(3, 9, order=0, deadline=5.0)
    waiting = make(3, 9, order=1)
    sch.add(running)
    sch.plan()
    sch.add(waiting)
    assert list(sch.overdue(4.9)) == []
    assert list(sch.overdue(5.0)) == [(running, "deadline")]
    sch.finish(waiting)
    sch.finish(running)
    assert not sch.in_flight and sch.used_tokens == 0


def test_prefix_hits_shorten_the_prefill():
    sch = scheduler(lookup=lambda sequence: 4)
    sch.add(make(11))
    assert spans(sch.plan()) == [("r0", 4, 8), ("r0", 8, 10)]


def test_continuous_batching_takes_a_third_of_static_batchings_steps():
    """Answers of log-normal length (sigma 1.5: mean 3.1 medians), 16 slots.  Static batching goes
    on with each batch of 16 until its longest answer is complete."""
    rng = random.Random(0)
    lengths = [max(1, min(round(20 * rng.lognormvariate(0, 1.5)), 800)) for _ in range(600)]
    sch = scheduler(max_slots=16, cache_tokens=10**6, chunk=64, token_budget=80, steps_per_call=1)
    for order, length in enumerate(lengths):
        sch.add(make(32, length, order=order))
    steps = 0
    while sch.in_flight:
        plan = sch.plan()
        steps += plan.steps
        write(plan, sch)
    static = sum(max(lengths[begin : begin + 16]) for begin in range(0, len(lengths), 16))
    assert static / steps >= 3
    # No schedule of 16 slots takes fewer steps than full ones; the rest is the last answers.
    assert steps <= sum(lengths) / 16 + 2 * max(lengths)


arrivals = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt
        st.integers(1, 12),  # new tokens
        st.integers(0, 2),  # priority
        st.integers(0, 20),  # arrival
        st.one_of(st.none(), st.integers(0, 25)),  # cancellation
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(arrivals, st.integers(1, 4), st.integers(42, 90), st.integers(1, 3), st.integers(1, 4))
def test_every_load_is_served_within_the_limits(load, slots, cache, lanes, steps_per_call):
    sch = scheduler(max_slots=slots, cache_tokens=cache, lanes=lanes, steps_per_call=steps_per_call)
    load = sorted(load, key=lambda entry: entry[3])  # the engine numbers by arrival
    sequences = [
        make(n_prompt, n_new, order=order, priority=priority)
        for order, (n_prompt, n_new, priority, _, _) in enumerate(load)
    ]
    filled = dict.fromkeys(sequences, 0)
    cancelled = set()
    for step in range(1000):
        for sequence, (*_, arrival, cancel) in zip(sequences, load, strict=True):
            if arrival == step:
                sch.add(sequence)
            if cancel == step and sequence in sch.in_flight:
                sch.finish(sequence)
                cancelled.add(sequence)
        if step > 25 and not sch.in_flight:
            break
        running = list(sch.running.values())
        plan = sch.plan()
        for sequence in plan.preempted:
            filled[sequence] = 0
        assert sum(fill.end - fill.begin for fill in plan.fills) <= 10 + 8
        for fill in plan.fills:
            assert fill.begin == filled[fill.sequence] and fill.sequence not in plan.preempted
            filled[fill.sequence] = fill.end
        assert len(sch.admitted) <= slots and len(sch.prefilling) <= lanes
        assert sorted(sch.running) == sorted(s.slot for s in sch.running.values())
        for sequence in sch.running.values():
            if sequence in plan.started:
                assert filled[sequence] == sequence.to_fill
            else:
                assert sequence in running
        growth = sum(min(plan.steps, s.remaining) for s in sch.running.values())
        assert sch.used_tokens + growth <= cache
        # Nobody starts before somebody who goes first.
        for waiting in sch.waiting:
            for other in plan.started:
                assert other.urgency < waiting.urgency
        assert plan.steps >= bool(sch.running)
        write(plan, sch)
    assert not sch.in_flight
    for sequence in sequences:
        assert sequence in cancelled or not sequence.remaining


def test_prefix_index_matches_extends_and_evicts():
    index = PrefixCache(rows=3, block=2)
    assert index.match([1, 2, 3, 4]) == []
    a, is_new = index.extend([], (1, 2))
    b, _ = index.extend([a], (3, 4))
    assert is_new and index.used == 2
    assert index.extend([a], (3, 4)) == (b, False)  # known already
    index.release([a, b, b])
    assert index.match([1, 2, 3, 4, 5]) == [a, b]
    assert index.match([1, 2, 9, 9]) == [a]
    index.release([a, b])
    c, _ = index.extend([a], (5, 6))  # a is still held by the second match
    assert index.used == 3
    d, _ = index.extend([a], (7, 8))  # evicts b, the only idle leaf
    assert index.match([1, 2, 3, 4]) == [a]
    assert index.extend([a], (9, 9)) is None  # all in use
    index.release([a, a, c, d])
    # Of what was released together the last goes first.
    index.extend([], (4, 4))
    assert index.match([1, 2, 7, 8]) == [a]
    assert index.match([1, 2, 5, 6]) == [a, c]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=30), st.integers(1, 6))
def test_prefix_index_never_loses_or_doubles_a_row(prompts, rows):
    index = PrefixCache(rows, block=2)
    held = []
    for turn, prompt in enumerate(prompts):
        nodes = index.match(prompt)
        for begin in range(2 * len(nodes), len(prompt) - 1, 2):
            found = index.extend(nodes, prompt[begin : begin + 2])
            if found is None:
                break
            nodes.append(found[0])
        assert [token for node in nodes for token in node.tokens] == prompt[: 2 * len(nodes)]
        in_use = {node.row for other in [*held, nodes] for node in other}
        assert all(0 <= row < rows for row in in_use)
        by_row = {node.row: node for other in [*held, nodes] for node in other}
        assert len(by_row) == len(in_use) <= index.used <= rows
        held.append(nodes)
        if turn % 3 == 2:
            index.release(held.pop(0))
    for nodes in held:
        index.release(nodes)
    assert len(index._idle) <= index.used
