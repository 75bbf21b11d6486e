"""An engine answers once a first request's programs exist; a thread compiles the others."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxllama import compiler_options
from jaxllama.config import ExpertsConfig
from jaxllama.engine import programs, runner
from jaxllama.engine.engine import Engine
from jaxllama.engine.programs import Programs
from jaxllama.engine.request import Event, Request
from jaxllama.kept import Wanted
from jaxllama.language_model import LanguageModel
from jaxllama.quantization.quantize import quantize_params
from jaxllama.text.tokenizer import Tokenizer
from pallas_kernels.cpu.weight import CpuWeight
from pallas_kernels.qtensor import QTensor
from tests.helpers.engine_cases import (
    OPTIONS,
    PROMPTS,
    SAMPLINGS,
    check_answer,
    engine,
    model,
    written,
)
from tests.helpers.models import LLAMA, params_of


def wait_until(condition) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def wanted(n: int) -> dict[int, Wanted]:
    """Programs that add 0, 1, ..., n - 1."""
    return {i: Wanted(jax.jit(lambda x, i=i: x + i), (jnp.zeros(3),)) for i in range(n)}


@pytest.mark.core
def test_an_engine_answers_before_all_programs_exist(tmp_path, monkeypatch):
    # An earlier run of this test kept its programs in the cache.
    monkeypatch.setattr(runner, "folder", lambda _: tmp_path)
    small = model("llama")
    requests = [
        Request(f"r{i}", PROMPTS[i], 6, SAMPLINGS[i % 5], ignore_eos=True) for i in range(5)
    ]
    alone, *together = requests
    options = {**OPTIONS, "max_slots": 5, "max_len": 64}
    want = Engine(small, **options).generate(requests)

    held, add_rest = [], Programs.add_rest
    monkeypatch.setattr(Programs, "add_rest", lambda *arguments: held.append(arguments))
    eng, events = Engine(small, **options), {request.id: [] for request in requests}
    everything = len(eng.runner._wanted())
    eng.start()
    made = eng.runner._programs
    first = len(made)
    assert first < everything and first <= 8

    def ask(*some: Request) -> None:
        for request in some:
            eng.submit(request, events[request.id].append)
        wait_until(lambda: all(_is_answered(events[request.id]) for request in some))

    ask(alone)
    assert len(made) == first, "a first request needs no other program"
    assert eng.stats().programs_missing == everything - first
    calls = dict(zip(eng.runner._wanted(), eng.runner._idle_calls(), strict=True))
    largest = list(calls)[first]
    eng.runner._thread.submit(eng.runner._run_idle, calls[largest]).result()
    ask(*together[:3])
    ahead = len(made)
    assert first < ahead < everything, "the others wait for their own programs alone"
    _, rows, context = largest
    assert rows == 5 and made.first_made([("decode", 4, context), largest]) == largest
    ask(*together[3:])
    assert len(made) == ahead, "a larger program serves in place of a missing one"
    for arguments in held:
        add_rest(*arguments)
    wait_until(lambda: len(made) == everything)
    again = Request("again", PROMPTS[0], 6, SAMPLINGS[0], ignore_eos=True)
    events["again"] = []
    ask(again)
    eng.stop()
    assert eng.stats().compilations == 0
    for request in requests:
        assert written(events[request.id])[0] == written(want[request.id])[0]
    assert written(events["again"])[0] == written(want["r0"])[0]


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gla"])
def test_a_wider_program_reads_prompts_until_their_own_exists(family, monkeypatch):
    monkeypatch.setattr(Programs, "first_made", lambda _, keys: keys[-1])
    eng = engine(family, prefill_chunk=64)
    ours, call, called = eng.runner._programs, eng.runner._programs.call, set()
    monkeypatch.setattr(ours, "call", lambda key, *more: called.add(key) or call(key, *more))
    requests = [Request(f"r{i}", PROMPTS[i], 3, ignore_eos=True) for i in range(2)]
    for request in requests:
        check_answer(family, request, eng.generate([request])[request.id])
    assert {key[2] for key in called if key[0] == "fill"} == {eng.options.widths[-1]}


def _is_answered(events: list[Event]) -> bool:
    return bool(events) and events[-1].finish_reason is not None


@pytest.mark.core
def test_the_thread_yields_to_requests_and_keeps_all_programs(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "PATIENCE", 1000.0)
    made, ran, busy = Programs(tmp_path, jax.devices()[:1]), [], threading.Event()
    busy.set()
    ours = wanted(6)
    made.add_first(ours, 2)
    made.add_rest(ours, 2, busy.is_set, ran.append)
    assert made.call(4, ours[4]).tolist() == [4, 4, 4], "a call makes its own program"
    time.sleep(5 * programs.LOOK)
    assert len(made) == 3 and ran == [] and not list(tmp_path.iterdir())
    busy.clear()
    wait_until(lambda: list(tmp_path.glob("engine-*")))
    assert sorted(ran) == [2, 3, 4, 5]
    again = Programs(tmp_path, jax.devices()[:1])
    monkeypatch.setattr(Wanted, "lower", None)
    again.add_first(wanted(6), 2)
    wait_until(lambda: len(again) == 6)  # the next engine reads them all

    ran.clear()

    def run(key: int) -> None:
        ran.append(key)
        busy.set()

    again.add_rest(wanted(6), 2, busy.is_set, run)
    wait_until(lambda: ran)
    time.sleep(5 * programs.LOOK)
    assert ran == [2], "a request does not wait for the first runs of all of them"
    busy.clear()
    wait_until(lambda: ran == [2, 3])
    again.stop()


@pytest.mark.core
def test_a_program_that_cannot_be_compiled_fails_the_call_that_needs_it(caplog):
    def wrong(x):
        raise TypeError("no such program")

    ours = {**wanted(2), "wrong": Wanted(jax.jit(wrong), (jnp.zeros(3),))}
    made = Programs(None, jax.devices()[:1])
    made.add_first(ours, 1)
    made.add_rest(ours, 1, lambda: False, lambda key: None)
    wait_until(lambda: "a program cannot be compiled" in caplog.text)
    with pytest.raises(TypeError, match="no such program"):
        made.call("wrong", ours["wrong"])
    assert made.call(1, ours[1]).tolist() == [1, 1, 1]


def test_a_stopped_engine_compiles_no_more():
    made, ours = Programs(None, jax.devices()[:1]), wanted(4)
    made.add_first(ours, 1)
    made.stop()
    made.add_rest(ours, 1, lambda: False, lambda key: None)
    time.sleep(5 * programs.LOOK)
    assert len(made) == 1


def test_xla_tunes_no_product_of_a_router_beside_codes(monkeypatch):
    """It would time dozens of forms of it in every program. Few tokens are routed by a kernel."""
    own = {"own": True}
    found = []

    def compiled_with(options, program, **_):
        found.append((program.__name__, options))
        return program

    monkeypatch.setattr(compiler_options, "for_device", lambda: own)
    monkeypatch.setattr(compiler_options, "compiled_with", compiled_with)
    cfg = LLAMA.replace(vocab_size=256, n_layers=1, experts=ExpertsConfig(8, 2, 32))
    floats = params_of(cfg)
    codes = quantize_params(floats, "w8a16")
    monkeypatch.setattr(runner, "QTensor", (QTensor, CpuWeight))  # the layout of a CPU
    untuned = own | {"xla_gpu_enable_triton_gemm": False}
    fixed = own | {"xla_allow_excess_precision": False}
    for params, deterministic, few, many in (
        (codes, False, own, untuned),
        (floats, False, own, own),
        (codes, True, fixed, fixed),
    ):
        found.clear()
        options = {**OPTIONS, "deterministic": deterministic, "cache_tokens": None}
        Engine(LanguageModel(cfg, params, Tokenizer.byte_level()), **options)
        assert found == [("fill", many), ("decode", few), ("decode", many)]
