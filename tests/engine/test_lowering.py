"""Programs that children lower are those of the process itself, and a child's end loses none."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.engine import lowering, programs
from jaxllama.engine.lowering import Children
from jaxllama.engine.programs import Programs, Wanted


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
    monkeypatch.setattr(programs, "CHILDREN", 2)
    made = Programs(None, jax.devices()[:1])
    made._n_children = 2
    made.add(ours)
    assert [made.call(key, ours[key]).tolist() for key in ours] == [[1, 1, 1]] * 4
    assert not made._children._sources or end == "silent"
