"""Scheduler and prefix index, without a model: a simulated engine checks every plan."""

from __future__ import annotations

import random
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxllama.engine.pages import Held, KVPages
from jaxllama.engine.request import Grammar, Request
from jaxllama.engine.scheduler import AGE, Prefix, Scheduler, Sequence, TurnPlan
from jaxllama.errors import JaxLlamaError


def make(n_prompt: int, n_new: int = 4, order: int = 0, **options) -> Sequence:
    request = Request(f"r{order}", tuple(range(1, n_prompt + 1)), n_new, **options)
    return Sequence(request, order, submitted=0.0)


def scheduler(cache_tokens: int = 100, page: int = 1, share: bool = False, **options) -> Scheduler:
    pages = KVPages(cache_tokens // page, page, share=share)
    return Scheduler(**{"max_slots": 2, "pages": pages, "chunk": 8, "token_budget": 10, **options})


def write(plan: TurnPlan, sch: Scheduler, steps: int | None = None) -> None:
    """What the engine does after a plan: every running row writes, and ends at its limit."""
    for sequence, budget in plan.budgets.items():
        sequence.ahead -= budget
        sequence.output += [0] * min(budget if steps is None else steps, sequence.remaining)
        if not sequence.remaining:
            sch.finish(sequence)


def spans(plan: TurnPlan) -> list[tuple[str, int, int]]:
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


def test_a_slot_is_given_on_before_its_last_tokens_have_been_read():
    sch = scheduler(max_slots=1, steps_per_call=4)
    first, second = make(3, 4), make(3, 4, order=1)
    sch.add(first)
    sch.add(second)
    last = sch.plan()
    assert last.budgets == {first: 4}
    # The device writes all four, or ends earlier: either way the slot is free behind that call.
    following = sch.plan()
    assert (following.admitted, following.budgets) == ([second], {second: 4})
    assert sch.in_flight == [second, first] and len(first.held.pages) == 7
    write(last, sch)
    assert sch.in_flight == [second] and not first.held.pages


def test_constrained_rows_go_token_by_token_and_only_they_wait():
    sch = scheduler(steps_per_call=4)
    bound, free = make(3, 10, grammar=Grammar("regex", "a*")), make(3, 10, order=1)
    sch.add(bound)
    sch.add(free)
    first = sch.plan()
    assert first.budgets == {bound: 1, free: 4}
    assert sch.plan().budgets == {free: 4}  # what bound has written is not known yet
    write(first, sch)
    assert sch.plan().budgets == {bound: 1, free: 2}
    assert sch.plan().budgets == {}


@pytest.mark.core
def test_pages_are_there_for_what_may_have_been_written():
    sch = scheduler(steps_per_call=4, page=2)
    sequence = make(3, 10)
    sch.add(sequence)
    plans = [sch.plan(), sch.plan()]
    assert [plan.steps for plan in plans] == [4, 4] and sequence.ahead == 8
    assert len(sequence.held.pages) == 6  # 3 + 8 tokens
    write(plans[0], sch, steps=1)  # it was called back early
    assert sequence.ahead == 4 and sch.plan().steps == 4


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


@pytest.mark.core
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


def test_who_has_waited_for_long_goes_before_higher_priorities():
    sch = scheduler(max_slots=1)
    sch.add(make(3, 1, order=0))
    sch.add(make(3, 1, order=AGE - 1, priority=1))  # a little later
    sch.add(make(3, 1, order=AGE + 1, priority=1))  # much later
    names = []
    while sch.in_flight:
        plan = sch.plan()
        names += [sequence.request.id for sequence in plan.started]
        write(plan, sch)
    assert names == [f"r{AGE - 1}", "r0", f"r{AGE + 1}"]


def test_tokens_on_their_way_count_as_generated():
    """A deterministic engine preempts no row that has some: another program would compute them."""
    sch = scheduler(max_slots=1, recompute=False, steps_per_call=4)
    low, urgent = make(3, 8, order=0), make(3, 8, order=1, priority=1)
    sch.add(low)
    assert sch.plan().budgets == {low: 4}
    sch.add(urgent)
    plan = sch.plan()
    assert not low.output and plan.preempted == [] and urgent.slot is None


@pytest.mark.parametrize("snapshot", [3, None])
def test_a_preempted_newcomers_state_still_goes_to_a_snapshot_that_others_know(snapshot):
    sch, given_back = scheduler(), []
    sch._transfers = SimpleNamespace(placed=lambda: given_back.append(True))
    sequence = make(30)
    sch.add(sequence)
    sch._transfers, transfers = None, sch._transfers
    sch.plan()
    sch._transfers, prefix = transfers, Prefix(8, snapshot, state=object())
    sch._newcomers[sequence] = prefix
    sch._preempt([sequence])
    assert (sch._orphans, given_back) == (([], [True]) if snapshot is None else ([prefix], []))


def test_equal_priority_never_preempts():
    sch = scheduler(max_slots=1)
    sch.add(make(3, 9, order=0))
    sch.plan()
    sch.add(make(3, 9, order=1))
    assert sch.plan().preempted == []


def test_urgent_long_prompt_takes_a_slot():
    sch = scheduler(max_slots=1, token_budget=8)
    slow = make(40, order=0)
    sch.add(slow)
    sch.plan()
    sch.add(make(20, order=1, priority=1))
    plan = sch.plan()
    assert plan.preempted == [slow] and slow.filled == 0 and not slow.held.pages
    assert spans(plan) == [("r1", 0, 8)] and [new.slot for new in plan.admitted] == [0]


def test_what_was_preempted_is_known_when_it_comes_again():
    sch = scheduler(max_slots=1, page=2, share=True)
    slow = make(3, 9, order=0)
    sch.add(slow)
    for _ in range(4):
        write(sch.plan(), sch)
    sch.add(make(3, 1, order=1, priority=1))
    plan = sch.plan()
    assert plan.preempted == [slow]
    assert spans(plan) == []  # its prompt is the other's beginning
    write(plan, sch)
    assert spans(sch.plan()) == []  # 3 + 4 tokens, of which 6 are in the cache: three pages
    assert slow.filled == 6 and slow.cached == 0


@pytest.mark.core
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
        assert sch.pages.used <= 12
        write(plan, sch)
    assert not sch.in_flight
    assert set(preempted) == {second}
    assert len(first.output) == len(second.output) == 8


def test_newcomers_are_numbered_by_arrival():
    """An earlier number that comes later would stand before the one whose slot it waits for."""
    sch = scheduler(max_slots=1)
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
    assert not sch.in_flight and sch.pages.used == 0


@pytest.mark.core
def test_prefix_hits_shorten_the_prefill():
    sch = scheduler(page=4, share=True)
    sch.add(make(6))
    sch.plan()
    sch.add(make(11, order=1))
    assert spans(sch.plan()) == [("r1", 4, 8), ("r1", 8, 10)]
    assert sch.pages.used == 2 + 3 - 1  # 6 and 11 tokens, with one more each, share a page


@pytest.mark.core
def test_only_requests_of_one_salt_and_adapter_share_prefixes():
    """``cached`` is what an answer tells of other requests' prompts."""
    sch = scheduler(share=True)
    keys = [("", None), ("a", None), ("b", None), ("", "x"), ("a", "x")]
    for turn in range(2):
        for number, (salt, adapter) in enumerate(keys):
            sequence = make(5, 1, order=turn * 10 + number, cache_salt=salt, adapter=adapter)
            sch.add(sequence)
            write(sch.plan(), sch)
            assert sequence.cached == (0, 4)[turn], (salt, adapter)


def test_prefixes_of_forgotten_keys_take_no_memory():
    """Clients choose the salts: what is left of one is evicted like everything else."""
    pages = KVPages(4, 2)
    for salt in range(50):
        key = (None, str(salt))
        for n_known in (0, 2):
            held = pages.begin([1, 2, 3, 4], key)
            assert len(held.pages) == n_known
            assert pages.grow(held, 2 - n_known)
            pages.publish(held, [1, 2, 3, 4], key)
            pages.release(held)
    assert len(pages._roots) == 2 and pages.available == 4


def test_pages_are_those_that_tokens_take():
    """A thousand short requests run where rows of the longest length would hold ten."""
    sch = scheduler(max_slots=1000, cache_tokens=10_240, page=4, token_budget=10**6)
    for order in range(1000):
        sch.add(make(5, 4, order=order))
    assert len(sch.plan().started) == 1000 and sch.pages.used == 2000


@pytest.mark.slow
def test_six_times_the_requests_run_where_rows_were_as_long_as_the_longest():
    """Log-normal lengths, of mean 1,000 and such a spread that the longest of 1,500 is 8,192, half
    prompt, half answer, in the memory of 64 rows of 8,192 tokens."""
    rng, sch = (
        random.Random(0),
        scheduler(max_slots=2048, cache_tokens=64 * 8192, page=64, chunk=2048, token_budget=8192),
    )
    at_once = []
    for order in range(1500):
        total = max(2, min(round(rng.lognormvariate(6.627, 0.75)), 8192))
        sch.add(make(total // 2, total - total // 2, order=order))
    while len(sch.waiting):
        write(sch.plan(), sch)
        at_once.append(len(sch.running))
    assert sorted(at_once)[len(at_once) // 2] >= 6 * 64


def test_few_are_preempted_where_lengths_are_not_known():
    """Answers of log-normal length, more of them at once than there are pages for.  Each newcomer
    that takes the last page is preempted: without a reserve 31% would be read again, not 4."""
    rng, sch = (
        random.Random(0),
        scheduler(
            max_slots=256,
            cache_tokens=64 * 2000,
            page=64,
            chunk=512,
            token_budget=1024,
            steps_per_call=4,
        ),
    )
    for order in range(600):
        sch.add(make(500, max(1, round(rng.lognormvariate(5.8, 0.5))), order=order))
    read = 0
    while sch.in_flight:
        plan = sch.plan()
        read += sum(fill.size for fill in plan.fills)
        write(plan, sch)
    assert read < 1.05 * 600 * 499


def test_nobody_waits_for_pages_that_nobody_can_take():
    sch = scheduler(max_slots=4, cache_tokens=400, chunk=100, token_budget=400)
    for order in range(4):
        sch.add(make(99, 1, order=order))
    assert len(sch.plan().started) == 4


def test_talks_of_eight_turns_are_read_once():
    """Of the tokens of a turn's prompt that were in the talk before, 95% are known."""
    rng, sch = (
        random.Random(1),
        scheduler(
            max_slots=8, cache_tokens=64 * 1024, page=16, share=True, chunk=512, token_budget=512
        ),
    )
    talks = [[rng.randrange(10**6) for _ in range(rng.randrange(50, 400))] for _ in range(20)]
    order = before = known = 0
    for turn in range(8):
        sequences = []
        for talk in talks:
            request = Request(f"r{order}", tuple(talk), rng.randrange(50, 300))
            sequences.append(Sequence(request, order, submitted=0.0))
            sch.add(sequences[-1])
            order += 1
        while sch.in_flight:
            plan = sch.plan()
            for sequence, budget in plan.budgets.items():
                sequence.ahead -= budget
                sequence.output += [rng.randrange(10**6) for _ in range(budget)]
                if not sequence.remaining:
                    sch.finish(sequence)
        for talk, sequence in zip(talks, sequences, strict=True):
            known += sequence.cached
            talk += sequence.output
            before += len(talk) if turn < 7 else 0
            talk += [rng.randrange(10**6) for _ in range(rng.randrange(10, 100))]
    assert sch.pages.used == 0
    assert known >= 0.95 * before


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


@pytest.mark.core
@settings(max_examples=150, deadline=None, derandomize=True)
@given(arrivals, st.integers(1, 4), st.integers(42, 90), st.integers(1, 3), st.integers(1, 4))
def test_every_load_is_served_within_the_limits(load, slots, cache, page, steps_per_call):
    sch = scheduler(
        max_slots=slots, cache_tokens=cache + page, page=page, steps_per_call=steps_per_call
    )
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
        assert len(sch.admitted) <= slots
        assert sorted(sch.running) == sorted(s.slot for s in sch.running.values())
        for sequence in sch.running.values():
            if sequence in plan.started:
                assert filled[sequence] == sequence.to_fill
            else:
                assert sequence in running
        held = [page for s in sch.admitted for page in s.held.pages]
        assert len(held) == len(set(held)) == sch.pages.used <= sch.pages.count
        for sequence, budget in plan.budgets.items():
            assert len(sequence.held.pages) * page >= sequence.length + budget
        # Nobody starts before somebody who goes first.
        for waiting in sch.waiting:
            for other in plan.started:
                assert other.urgency < waiting.urgency
        assert plan.steps >= bool(sch.running)
        write(plan, sch)
    assert not sch.in_flight
    for sequence in sequences:
        assert sequence in cancelled or not sequence.remaining


@pytest.mark.core
def test_known_prefixes_are_found_shared_and_evicted():
    pages = KVPages(4, 2)

    def hold(tokens, model=None) -> Held:
        held = pages.begin(tokens, model)
        assert pages.grow(held, pages.need(len(tokens)) - len(held.pages))
        pages.publish(held, tokens, model)
        return held

    first = hold([1, 2, 3, 4, 5])
    assert len(first.pages) == 3 and pages.used == 3 and pages.known == 2
    second = hold([1, 2, 3, 4])
    assert second.pages == first.pages[:2] and pages.used == 3
    assert pages.begin([1, 2, 3, 4], "other").pages == []  # another model's keys and values
    pages.release(first)
    assert pages.used == 2 and pages.available == 2
    third = hold([1, 2, 9, 9])
    assert third.pages[0] == second.pages[0] and pages.used == 3
    assert not pages.grow(third, 2) and len(third.pages) == 2  # nothing has happened
    assert pages.gain([third]) == 1 and pages.gain([second, third]) == 3
    pages.release(second)
    assert pages.grow(third, 2) and pages.known == 2  # 3, 4 is evicted
    pages.release(third)
    assert pages.used == 0 and pages.available == 4
    assert pages.begin([1, 2, 3, 4]).pages == third.pages or pages.begin([1, 2, 9, 9]).nodes


def test_the_same_tokens_written_twice_are_known_once():
    pages = KVPages(4, 2)
    one, two = pages.begin([1, 2, 3]), pages.begin([1, 2, 3])
    assert pages.grow(one, 2) and pages.grow(two, 2)
    pages.publish(one, [1, 2])
    pages.publish(two, [1, 2])
    assert pages.known == 1
    assert list(two.unshared) == two.pages and list(one.unshared) == one.pages[1:]
    pages.release(two)
    assert pages.used == 2 and pages.begin([1, 2]).pages == one.pages[:1]


def test_states_are_kept_at_the_ends_of_units():
    pages = KVPages(8, 2, states=range(1), unit=4)
    held = pages.begin(range(9))
    assert pages.grow(held, 5)
    pages.publish(held, range(7))
    assert pages.known == 2 and pages.snapshot(held, 6) is None
    row = pages.snapshot(held, 4)
    assert row == 0 and pages.snapshot(held, 4) is None  # taken already
    pages.publish(held, range(9))
    assert pages.snapshot(held, 8) is None  # no room: the other's is in use
    again = pages.begin(range(9))
    assert len(again.pages) == 2 and again.nodes[-1].state == row
    pages.release(again)
    pages.release(held)
    other = pages.begin([9] * 4)
    assert pages.grow(other, 2)
    pages.publish(other, [9] * 4)
    assert pages.snapshot(other, 4) == row  # the idle one's
    assert pages.begin(range(9)).pages == []


def test_an_evicted_page_gives_its_state_back():
    pages = KVPages(2, 2, states=range(1), unit=2)
    first = pages.begin([1, 2, 3])
    assert pages.grow(first, 2)
    pages.publish(first, [1, 2])
    row = pages.snapshot(first, 2)
    assert row is not None
    pages.release(first)
    second = pages.begin([9, 9, 9, 9])
    assert pages.grow(second, 2) and pages.known == 0
    pages.publish(second, [9, 9, 9, 9])
    assert pages.snapshot(second, 2) == row


def test_the_rest_of_a_whole_prompt_is_found_by_the_same_prompt_alone():
    """Units of four tokens in pages of two: nine tokens are two units and half a page."""
    pages = KVPages(12, 2, unit=4)
    held = pages.begin(range(9))
    assert pages.grow(held, 5)
    pages.publish(held, range(9), is_whole=True)
    assert pages.known == 5
    again = pages.begin(range(9))
    assert again.pages == held.pages[:4] and again.source == held.pages[4]
    assert pages.grow(again, 1) and again.pages[4] != again.source
    shorter, longer = pages.begin(range(8)), pages.begin(range(11))
    assert shorter.pages == longer.pages == held.pages[:4]
    assert shorter.source is longer.source is None
    other = pages.begin([0, 1, 2, 3, 9, 9, 9])
    assert other.pages == held.pages[:2] and pages.grow(other, 2)
    pages.publish(other, [0, 1, 2, 3, 9, 9, 9], is_whole=True)
    found = pages.begin([0, 1, 2, 3, 9, 9, 9])  # a whole page of a rest is shared, not copied
    assert found.pages == other.pages[:3] and found.source == other.pages[3]
    for one in (held, again, shorter, longer, other, found):
        pages.release(one)
    assert pages.used == 0 and pages.known == 7


@pytest.mark.core
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 1), max_size=8), max_size=30),
    st.integers(1, 9),
    st.sampled_from([1, 4]),
)
def test_no_page_is_lost_or_anybody_elses(prompts, count, unit):
    pages, running = KVPages(count, 2, unit=unit), []
    written: dict[int, tuple[int, ...]] = {}
    for turn, prompt in enumerate(prompts):
        held, content = pages.begin(prompt), [tuple(prompt[at : at + 2]) for at in range(0, 8, 2)]
        for index, page in enumerate(held.pages):  # what is known is what was written
            assert written[page] == content[index]
        known = len(held.pages)
        source = None if held.source is None else written[held.source]
        if pages.grow(held, pages.need(len(prompt)) - known):
            mine = set(held.pages[known:])
            assert not mine & {page for other, _ in running for page in other.pages}
            assert source is None or source == content[known]
            for index in range(known, len(held.pages)):
                written[held.pages[index]] = content[index]
            pages.publish(held, prompt, is_whole=turn % 2 == 0)
            running.append((held, prompt))
        else:
            pages.release(held)
        in_use = {page for other, _ in running for page in other.pages}
        in_use |= {node.page for other, _ in running for node in other.nodes}
        assert pages.used == len(in_use) and not in_use & set(pages.free)
        if turn % 3 == 2 and running:
            pages.release(running.pop(0)[0])
    for held, _ in running:
        pages.release(held)
    assert pages.used == 0 and len(pages.free) + pages.known == count
