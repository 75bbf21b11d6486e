"""Programs that children lower are those of the process itself, and a child's end loses none."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.engine import lowering
from jaxllama.engine.engine import Engine
from jaxllama.engine.lowering import Children
from jaxllama.engine.programs import Programs
from jaxllama.engine.request import Request
from jaxllama.kept import Wanted
from tests.helpers.engine_cases import OPTIONS, PROMPTS, SAMPLINGS, model, written


def updated(state: dict[str, jax.Array], unused: jax.Array, x: jax.Array, *, factor: int):
    """The state is donated, an argument is unused, and a function is called twice."""
    twice = jax.jit(lambda x: x * factor)
    return {name: value + twice(twice(x)) for name, value in state.items()}, (x.sum(),)


def wanted(factors: list[int]) -> dict[str, Wanted]:
    jitted = jax.jit(updated, static_argnames="factor", donate_argnums=0)
    return {
        f"times {factor}": Wanted(
            jitted,
            ({"a": jnp.ones(3), "b": jnp.zeros(3)}, jnp.zeros(2), np.arange(3.0, dtype=np.float32)),
            static={"factor": factor},
        )
        for factor in factors
    }


def test_a_program_that_a_child_lowers_computes_and_donates_the_same():
    ours = wanted([2, 3, 4])
    ours["times 2"].lower()  # starts threads of MLIR, which a fork has not
    children = Children({key: program.lower for key, program in ours.items()}, 2)
    for (key, program), factor in zip(ours.items(), (2, 3, 4), strict=True):
        lowered = children.lowered(key, program.arguments)
        assert lowered is not None
        assert "tf.aliasing_output = 0" in lowered.as_text()
        assert "module @jit_updated" in lowered.as_text()
        compiled = lowered.compile()
        state, [total] = compiled(*program.arguments)
        want = factor**2 * np.arange(3.0)
        np.testing.assert_array_equal(state["a"], 1 + want)
        np.testing.assert_array_equal(state["b"], want)
        assert total == 3
        assert program.arguments[0]["a"].is_deleted()
    assert children.lowered("another", ()) is None


@pytest.mark.parametrize("end", ["killed", "silent", "failed"])
def test_a_program_that_no_child_lowers_is_lowered_by_the_process_itself(end, monkeypatch):
    here = os.getpid()

    def fails():
        if os.getpid() == here:
            return
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "silent":
            signal.pause()
        raise ValueError("this child cannot")

    jitted = jax.jit(lambda x: (fails(), x + 1)[1])
    ours = {key: Wanted(jitted, (jnp.zeros(3),)) for key in range(4)}
    monkeypatch.setattr(lowering, "PATIENCE", 0.5)
    made = Programs(None, jax.devices()[:1])
    made._n_children = 2
    made.add(ours)
    assert [made.call(key, ours[key]).tolist() for key in ours] == [[1, 1, 1]] * 4


@pytest.mark.slow
def test_an_engine_whose_programs_children_lower_gives_the_same_tokens(monkeypatch):
    options = {**OPTIONS, "max_slots": 2, "max_len": 32}
    requests = [Request(f"r{i}", PROMPTS[i][:8], 6, SAMPLINGS[i], ignore_eos=True) for i in (0, 2)]
    want = Engine(model("llama"), **options).generate(requests)

    received = []
    receive = lowering.LoweredModule.lower
    monkeypatch.setattr(
        lowering.LoweredModule, "lower", lambda *args: [received.append(1), receive(*args)][1]
    )
    engine = Engine(model("llama"), **options)
    programs = engine.runner._programs
    programs._folder, programs._n_children = None, 2
    engine.warm_up()
    assert len(received) == len(programs) - 1, "all but the first"
    got = engine.generate(requests)
    assert engine.stats().compilations == 0
    for request in requests:
        assert written(got[request.id])[0] == written(want[request.id])[0]
