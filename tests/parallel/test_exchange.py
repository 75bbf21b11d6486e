"""Mixtures whose experts and rows are divided over a mesh's "expert" axis, against one device.

The comparisons run in a child process with 8 CPU devices (``exchange_child``).
"""

from __future__ import annotations

import pytest

from jaxllama.config import ExpertsConfig
from jaxllama.errors import JaxLlamaError
from jaxllama.model.split import check_groups, local_config
from tests.helpers.compiling import results_of
from tests.helpers.models import LLAMA

MIXTURE = LLAMA.replace(experts=ExpertsConfig(6, 2, 32))
FULL = [
    "float32:1x8x1:8",
    "float32:2x2x2:4",
    "float32:2x4x1:2",  # rows over "data" alone, so tokens are not exchanged
    "float32:1x4x1:3",  # rows that no axis divides
    "w8a16:1x4x2:4",
    "w4a16:2x4x1:8",
]


def result_of(name: str) -> dict:
    [result] = results_of("exchange_child", name)
    return result


def check(name: str) -> None:
    result = result_of(name)
    assert result["same"], result
    assert result["distinct"] > 5, f"{name}: the tokens say nothing"
    assert result["logprob"] < 1e-3, result
    assert result["share"] == pytest.approx(1), "a device holds more than its experts"
    assert result["gathered"], "gather_params is not the inverse of shard_params"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32:1x4x1:4", *FULL])
def test_rows_that_exchange_tokens_give_the_tokens_of_one_device(name):
    check(name)


def test_what_the_expert_axis_does_not_divide_is_named():
    with pytest.raises(JaxLlamaError, match="expert=2: tiny has no experts; allowed: 1"):
        check_groups(LLAMA, 1, 2)
    with pytest.raises(JaxLlamaError, match="expert=2,model=2 does not divide the 6 experts"):
        check_groups(MIXTURE, 2, 2)


def test_a_group_has_its_own_experts_and_all_else():
    local = local_config(MIXTURE, 1, 3, own_rows=True)
    assert local.experts.shards == 3
    assert local.experts.exchanges
    assert local.n_heads == MIXTURE.n_heads
    assert not local_config(MIXTURE, 1, 3).experts.exchanges


def test_blocks_of_fp8_are_split_over_devices_with_their_scales():
    """Two blocks a device have codes in groups, as one device has. One has a token's whole scale,
    so it differs by FP8's rounding, 2 ** -4, alone."""
    one, two = results_of("fp8_mesh_child", n_devices=2)
    assert one["off"][0] == one["off"][1] < 2**-4
    assert two["off"][0] == two["off"][1] < 1e-5
