"""Snapshots and replays of an engine, and its cache operations for every cache dtype."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES
from test_engine import OPTIONS, PROMPTS, SAMPLINGS, check_answer, engine, model, run_schedule

import jaxllama as jl
from jaxllama.cache import init_cache
from jaxllama.serving import pool
from jaxllama.serving import slots as device
from jaxllama.serving.engine import Engine
from jaxllama.serving.request import Event, Grammar, Request
from jaxllama.serving.rows import Newcomer, make_rows, pack
from jaxllama.serving.snapshot import read_log, replay

FAMILY = "hybrid"


def requests_of(n: int) -> list[Request]:
    return [
        Request(
            f"s{index}", PROMPTS[(3 * index) % len(PROMPTS)], 8 + index % 9, SAMPLINGS[index % 5],
            priority=index % 2, logprobs=2,
        )
        for index in range(n)
    ]  # fmt: skip


def run(eng: Engine, requests: list[Request], until: int | None = None) -> dict[str, list[Event]]:
    """Two requests arrive a step, the third is cancelled; stops after ``until`` steps."""
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    step = 0
    while until is None or step < until:
        for request in requests[2 * step : 2 * step + 2]:
            eng.submit(request, events[request.id].append)
        if step == 4:
            eng.cancel("s2")
        if not eng.step() and 2 * step >= len(requests):
            break
        step += 1
    return events


def written(events: list[Event]) -> tuple[list[int], list[float]]:
    """Tokens, and logprobs to the last bit."""
    return (
        [token for event in events for token in event.tokens],
        [value for event in events for value in event.logprobs],
    )


def arrays(eng: Engine) -> list[bytes]:
    leaves = jax.tree.leaves((eng.runner.slots, eng.runner.pool))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def test_requests_survive_json():
    request = dataclasses.replace(
        requests_of(5)[4], grammar=Grammar("regex", "a"), stop=("x",), deadline=2.0
    )
    assert request.sampling.logit_bias
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_a_log_replays_bit_for_bit(tmp_path):
    log = tmp_path / "requests.jsonl"
    eng = Engine(model(FAMILY), log=log, **OPTIONS)
    events = run(eng, requests_of(9))
    eng.stop()
    again: dict[str, list[Event]] = {}
    other = replay(log, model(FAMILY), lambda event: again.setdefault(event.id, []).append(event))
    assert {key: written(value) for key, value in again.items()} == {
        key: written(value) for key, value in events.items()
    }
    assert again["s2"][-1].finish_reason == "cancelled"
    assert other.steps == eng.steps
    assert arrays(other) == arrays(eng)


def test_a_killed_engine_goes_on_from_its_snapshot_and_log(tmp_path):
    log, snapshot = tmp_path / "requests.jsonl", tmp_path / "state.npz"
    requests = requests_of(14)
    whole = Engine(model(FAMILY), **OPTIONS)
    want = run(whole, requests)

    killed = Engine(model(FAMILY), log=log, **OPTIONS)
    events: dict[str, list[Event]] = {request.id: [] for request in requests}
    for step in range(7):
        for request in requests[2 * step : 2 * step + 2]:
            killed.submit(request, events[request.id].append)
        if step == 4:
            killed.cancel("s2")
        if step == 3:
            killed.save(snapshot)
            assert killed.scheduler.prefilling and killed.scheduler.running
        killed.step()
    with open(log, "a") as file:  # the kill came in the middle of a line
        file.write('{"step": 8, "subm')
    killed.log.close()

    after: dict[str, list[Event]] = {}
    eng = Engine.restore(
        snapshot, model(FAMILY), lambda event: after.setdefault(event.id, []).append(event), log=log
    )
    while eng.step():
        pass
    ended_before = {key for key, value in events.items() if value and value[-1].finish_reason}
    for request in requests:
        if request.id not in after:
            assert request.id in ended_before
            continue
        assert written(after[request.id]) == written(want[request.id])
        assert after[request.id][-1].finish_reason == want[request.id][-1].finish_reason
    eng.stop()
    assert len(after) > 8
    assert arrays(eng) == arrays(whole)
    assert read_log(log)[-1]["step"] <= 7  # the cut line is gone, and nothing was logged twice
    assert len(read_log(log)) == 1 + 14 + 1


def test_a_snapshot_alone_finishes_the_same_tokens(tmp_path):
    eng, events = Engine(model(FAMILY), **OPTIONS), []
    request = Request("one", PROMPTS[8], 20, SAMPLINGS[2])
    eng.submit(request, events.append)
    for _ in range(4):
        eng.step()
    eng.save(tmp_path / "state.npz")
    after: list[Event] = []
    other = Engine.restore(tmp_path / "state.npz", model(FAMILY), after.append)
    assert after[0].tokens == tuple(written(events)[0])  # what was written before comes first
    while other.step():
        pass
    check_answer(FAMILY, request, after)


def test_files_that_are_none_are_refused(tmp_path):
    path = tmp_path / "state.npz"
    with pytest.raises(jl.JaxLlamaError, match="not an engine's snapshot"):
        Engine.restore(path, model("llama"))
    path.write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(jl.JaxLlamaError, match="not an engine's snapshot"):
        Engine.restore(path, model("llama"))
    Engine(model(FAMILY), **OPTIONS).save(path)
    with pytest.raises(jl.JaxLlamaError, match="of another model than tiny-bytes"):
        Engine.restore(path, model("llama"))
    log = tmp_path / "log"
    log.write_text('{"step": 0}\n')
    with pytest.raises(jl.JaxLlamaError, match="not a request log"):
        replay(log, model("llama"))


DTYPES = ("float32", "bfloat16", "int8", "int4", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_rows_and_blocks_move_unchanged(dtype):
    """A row's cache through insertion, growth, shrinking, the pool and back: the same bits."""
    cfg, block = FAMILIES["hybrid"].replace(head_dim=64), 8

    def noise(cache, seed: int):
        rng = np.random.default_rng(seed)

        def fill(leaf: jax.Array) -> jax.Array:
            values = rng.integers(-7, 8, leaf.shape)
            return jnp.asarray(values).astype(jnp.int32).astype(leaf.dtype)

        return jax.tree.map(fill, cache)

    source = noise(init_cache(cfg, 2, 24, dtype=dtype), 1)
    slots = device.init_slots(cfg, init_cache(cfg, 2, 24, dtype=dtype))
    newcomer = Newcomer(1, jl.Sampling(), [5, 6], [], 4, False)
    rows = pack(make_rows({0: newcomer}, 2, 24, cfg.vocab_size))
    slots = device.insert(slots, source, rows)
    slots = device.resize(slots, np.array([-1, 1, -1, -1], np.int32))
    slots = device.resize(slots, np.array([1], np.int32))
    assert bool(slots.active[0]) and int(slots.token[0]) == 6

    def bits(tree, where) -> list[bytes]:
        return [np.asarray(leaf)[where].tobytes() for leaf in jax.tree.leaves(tree)]

    assert bits(slots.cache, 0) == bits(source, 0)

    blocks = init_cache(cfg, 4, block, dtype=dtype)
    rows = np.array([[4, 4], [2, 0]], np.int32)  # nothing of row 0, tokens 8 .. 23 of row 1
    states = np.array([4, 0], np.int32)
    blocks = pool.store_blocks(blocks, source, np.int32(8), rows, states)
    rows = np.array([2, 0, 3], np.int32)
    loaded = pool.load_blocks(blocks, rows, np.int32(2), np.int32(16))
    gla, attention = loaded.layers
    assert bits(attention, (0, slice(0, 16))) == bits(source.layers[1], (1, slice(8, 24)))
    assert bits(gla, 0) == bits(source.layers[0], 1)
    assert loaded.lengths.tolist() == [16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_cache_dtype_gives_the_tokens_of_the_request_alone(dtype):
    schedule = [(index, index % 5, 20, index, 0, None) for index in range(10)]
    run_schedule(FAMILY, engine(FAMILY, kv_dtype=dtype), schedule, kv_dtype=dtype)
