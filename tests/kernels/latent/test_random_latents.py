"""Latent attention at random shapes beside float64, in the emulator or on a GPU.

Rows and lists of keys, some without any, in pages or not, 1 to 16 tokens a row, also of codes; and
prompts, whose heads have 192 and 128 features.  What no token attends to is NaN.  On a GPU a seed
has 240 shapes:

    pytest -m gpu -n 12 --dist=load --seeds 1 --runs FOLDER THIS_FILE
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxllama.model.mixers.attention.chunk import has_cudnn
from pallas_kernels.device import planned_for
from pallas_kernels.dispatch import named_plan
from pallas_kernels.latent import chosen, plan
from tests.helpers.emulator.launch import emulated
from tests.helpers.matmul_cases import newest
from tests.helpers.op_calls import OpCall
from tests.helpers.random_calls import draw_latent_codes, draw_latent_prompt, draw_latents
from tests.helpers.random_runs import run_calls

TESTS, CALLS = 40, 6  # of a seed, and of a test
Drawer = Callable[[random.Random], OpCall]
draw_lists = functools.partial(draw_latents, chosen=True)


def drawn(draw: random.Random, drawers: Sequence[Drawer], most: int) -> Iterator[OpCall]:
    """Yield a call by each drawer; most: values of its operands."""
    for drawer in drawers:
        calls = (drawer(draw) for _ in itertools.count())
        call = next(call for call in calls if call.size <= most)
        yield call if draw.random() < 1 / 3 else in_chunks(call, draw.random())


def in_chunks(call: OpCall, place: float) -> OpCall:
    """Return the call in other chunks than the planned ones; place: among all, from 0 to 1."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            pick = lambda plans, *_: plans[int(place * len(plans))]  # noqa: E731
            with mock.patch.object(plan, "shortest", pick):
                with mock.patch.object(chosen, "shortest", pick):
                    return function(*args, **named)

        return run

    return dataclasses.replace(call, find=within(call.find), function=within(call.function))


@newest
@pytest.mark.parametrize(
    "number", [1, 2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, *range(4, 20)))]
)
def test_random_calls_in_any_order(number):
    draw, rng = random.Random(number), np.random.default_rng(number)
    # More than 16 query rows take the emulator long.
    drawer, few = (draw_lists, draw_latents)[number % 2], number % 4 > 0
    drawer = draw_latent_codes if number % 5 == 2 else drawer
    while True:
        [call] = drawn(draw, [drawer], 60_000)
        if call.operands[0].shape[0] < 4:
            with planned_for("NVIDIA H200"):
                found = named_plan(call.find())
            found = getattr(found, "over_list", found)
            assert found is not None
            if bool(found.few) == few:
                break
    operands = call.values(rng)
    with planned_for("NVIDIA H200"), emulated(number):
        out = call.kernel(*operands)
    call.check(out, operands, rng)


def test_a_random_prompt():
    [call] = drawn(random.Random(0), [draw_latent_prompt], 1 << 20)
    rng = np.random.default_rng(0)
    operands = call.values(rng)
    call.check(call.kernel(*operands), operands, rng)


@pytest.mark.gpu
def test_random_calls_on_a_gpu(seed_and_part, request):
    """Two calls over rows, two over lists, one over codes and a prompt."""
    draw = random.Random(str(seed_and_part))
    drawers = [draw_latents, draw_lists, draw_latents, draw_lists, draw_latent_codes]
    calls = list(drawn(draw, [*drawers, draw_latent_prompt], 1 << 24))
    assert len(calls) == CALLS and all(named_plan(call.find()) for call in calls[:-1])
    assert has_cudnn(*calls[-1].operands[1:])
    run_calls(request, seed_and_part, calls)
