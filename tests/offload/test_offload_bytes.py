"""The accounts of bytes are exact, predictions bound what is held, and the solver obeys limits."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxllama.config import load_config
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.plan import measure
from jaxllama.executors.offloaded.room import cache_bytes, hidden_bytes
from jaxllama.offload.policy import PERCENTAGES, Policy
from jaxllama.offload.store import RowTable, is_stored
from jaxllama.placement import Placement
from jaxllama.planner.accounting import footprint, model_bytes
from jaxllama.planner.cost import (
    MemoryLimits,
    PlannerSettings,
    Task,
    need_of,
    predict,
    program_bytes,
)
from jaxllama.planner.fitting import Calibration, Moving, nnls
from jaxllama.planner.solve import check_fits, solve
from tests.helpers.cases import slow
from tests.helpers.models import FAMILIES
from tests.helpers.seeded import seeded_params

CFG = FAMILIES["gqa"].replace(d_model=64, head_dim=16, d_ff=96, vocab_size=512)


def test_bytes_are_flexgen_s_formulas_on_llama():
    """Document 2 and FlexGen count two bytes a number; the cache here has the kv heads' width."""
    cfg = load_config("llama-3.1-8b")
    h, i, v, layers = 4096, 14336, 128256, 32
    weights = 2 * (v * h + layers * (2 * h * h + 2 * h * h // 4 + 3 * h * i + 2 * h) + h + v * h)
    assert model_bytes(cfg, jnp.bfloat16) == weights
    assert cache_bytes(cfg, 144, 544, jnp.bfloat16) == 2 * 144 * 544 * (h // 4) * layers * 2
    assert hidden_bytes(cfg, 144, 512, jnp.bfloat16) == 2 * 144 * 512 * h


@pytest.mark.core
@pytest.mark.parametrize("scheme, bits", [("w4a16", 4), ("w8a16", 8), ("fp8", 8)])
def test_quantized_bytes_count_words_and_scales(scheme, bits):
    d, f, n = 64, 96, (4 + 2 * 2) * 16
    rows, words = n + d + 2 * f + d, n * d + d * 64 + 2 * f * d + d * f
    head_rows, head = 512, 512 * 64
    if scheme == "w4a16":  # groups of 32 or 64: scales in the weights' dtype, zeros of a byte
        scales = 3 * (n + d + 2 * f + d * 3)
        head_scales = 3 * head_rows
    else:
        scales, head_scales = 4 * rows, 4 * head_rows
    layer = words * bits // 8 + scales + 2 * 2 * d
    want = 2 * 512 * 64 + 2 * layer + 2 * d + head * bits // 8 + head_scales
    assert model_bytes(CFG, jnp.bfloat16, scheme) == want


@pytest.mark.parametrize(
    "dtype, width",
    [
        ("float32", 64),
        ("bfloat16", 32),
        ("int8", 16 + 4),
        ("float8_e4m3fn", 16 + 4),
        ("int4", 8 + 4),
    ],
)
def test_cache_bytes_of_every_dtype(dtype, width):
    assert cache_bytes(CFG, 3, 10, dtype) == 2 * 2 * 3 * 10 * 2 * width  # layers, k v, rows, ...


@pytest.mark.parametrize(
    ("text", "scheme", "tied"),
    [
        ("13 55 100 0 100 0", None, False),
        ("13 55 100 0 100 0", "w4a16", True),
        *slow(("100 0 100 0 100 0", None, True), ("0 40 100 0 100 0", "w4a16", False)),
    ],
)
def test_the_footprint_of_weights_is_what_the_store_holds(tmp_path, text, scheme, tied):
    cfg, policy = CFG.replace(tie_embeddings=tied), Policy.parse(text)
    # A CPU's layout divides a weight by tiles of 16 rows, which the prediction leaves out.
    place = Placement(policy, jnp.float32, scheme, directory=tmp_path, exact=True)
    lm = place.model(cfg, place.tree(seeded_params(cfg)), None)
    held = [0, 0, 0]
    for leaf in jax.tree.leaves(
        lm.params, is_leaf=lambda x: is_stored(x) or isinstance(x, RowTable)
    ):
        own = leaf.nbytes if is_stored(leaf) or isinstance(leaf, RowTable) else (leaf.nbytes, 0, 0)
        held = [total + part for total, part in zip(held, own, strict=True)]
    need = footprint(
        cfg,
        policy,
        rows=2,
        width=8,
        capacity=16,
        dtype=jnp.float32,
        kv_dtype=jnp.float32,
        scheme=scheme,
        compile_programs=False,
    )
    assert dataclasses.astuple(need.weights) == tuple(held)
    assert sum(held) == model_bytes(cfg, jnp.float32, scheme)


@pytest.mark.parametrize(
    "text", ["0 100 0 100 0 100 gpu_batch_size=2 num_gpu_batches=2", *slow("40 30 50 50 100 0")]
)
def test_live_device_bytes_stay_within_the_prediction(tmp_path, text):
    """Live arrays of the whole process, those of other tests subtracted."""
    task, settings = Task(4, 16, 8), PlannerSettings(jnp.float32, jnp.float32)
    policy = Policy.parse(text)
    before = sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == "device")
    place = Placement(policy, jnp.float32, directory=tmp_path)
    lm = place.model(CFG, place.tree(seeded_params(CFG)), None)
    found, events = measure(lm, task, settings, steps=2)
    assert found["device_bytes"] - before <= need_of(CFG, policy, task, settings).device
    assert {event.lane for event in events} >= {"load weights", "compute"}


COSTS = Calibration(
    load_weights=Moving(1e-5, 2e-11, 4e-10, 0.0),
    join=(1e-5, 1e-12),
    load_cache=Moving(1e-5, 2e-11, 4e-10, 1e-12),
    store_cache=Moving(1e-5, 2e-11, 4e-10, 1e-12),
    push_cache=1e-5,
    load_hidden=Moving(1e-5, 2e-11, 4e-10, 1e-12),
    store_hidden=Moving(1e-5, 2e-11, 4e-10, 1e-12),
    decode=(2e-4, 1e-6, 1e-9),
    prefill=(0.0, 1e-7, 0.0),
    head=(5e-4, 1e-6),
    look_up=(1e-4, 1e-8),
    contention=(0.0,) * 4,
    disk_cold=4e-10,
    cpu=(1e-3, 5e-6, 5e-9),
    fetch=Moving(1e-4, 1e-10, 4e-10, 0.0),
)
LLAMA = load_config("llama-3.1-8b")
HALF = PlannerSettings(jnp.bfloat16, jnp.bfloat16)
TASK = Task(64, 512, 32)


def test_predictions_follow_the_lanes():
    """Everything on the host: a step takes the link's time; serial takes the sum of the lanes."""
    policy = Policy.parse("0 100 100 0 100 0 gpu_batch_size=8 num_gpu_batches=8")
    found = predict(LLAMA, policy, COSTS, TASK, HALF)
    streamed = model_bytes(LLAMA, jnp.bfloat16) - 2 * LLAMA.vocab_size * LLAMA.d_model
    assert found.lanes["load weights"] == pytest.approx(streamed * 2e-11, rel=0.01)
    assert found.step == pytest.approx(found.lanes["load weights"], rel=0.1)
    serial = predict(LLAMA, dataclasses.replace(policy, overlap=False), COSTS, TASK, HALF)
    assert serial.step == pytest.approx(sum(serial.lanes.values()), rel=1e-6)
    one = predict(LLAMA, dataclasses.replace(policy, num_gpu_batches=1), COSTS, TASK, HALF)
    assert found.tokens_per_second > 4 * one.tokens_per_second  # the zig-zag's gain


def test_what_shares_a_link_or_the_disk_adds_up_and_they_do_not():
    """A step's time is at least its bytes' on the link, and its bytes' on the disk."""
    both = Policy.parse("0 100 0 100 100 0 gpu_batch_size=8 num_gpu_batches=8")
    found = predict(LLAMA, both, COSTS, TASK, HALF)
    weights = model_bytes(LLAMA, jnp.bfloat16) - 2 * LLAMA.vocab_size * LLAMA.d_model
    cache = cache_bytes(LLAMA, 64, TASK.capacity, jnp.bfloat16)
    assert found.links[0] == pytest.approx((weights + cache) * 2e-11, rel=0.01)
    assert found.step >= found.links[0]
    split = predict(LLAMA, dataclasses.replace(both, weights_host=95.0), COSTS, TASK, HALF)
    assert split.links[2] == pytest.approx(0.05 * weights * 4e-10, rel=0.01)
    assert max(split.links) <= split.step < sum(split.links)


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [80, 12])
def test_the_solver_s_policy_fits_and_nothing_in_a_coarse_grid_beats_it(gigabytes):
    limits = MemoryLimits(int(gigabytes * 1e9), int(40e9), int(100e9))
    task = Task(8, 512, 32)
    policy = solve(LLAMA, COSTS, task, limits, HALF)

    def fits(policy):
        programs = program_bytes(LLAMA, policy, task, HALF)
        return limits.allow(need_of(LLAMA, policy, task, HALF, programs))

    assert fits(policy)
    rate = predict(LLAMA, policy, COSTS, task, HALF).tokens_per_second
    pairs = [(100, 0), (60, 40), (20, 80), (0, 100), (0, 50)]
    for shares in itertools.product(pairs, pairs, [(100, 0)]):
        for size, count in ((8, 1), (2, 4)):
            values = dict(zip(PERCENTAGES, itertools.chain(*shares), strict=True))
            other = Policy(**values, gpu_batch_size=size, num_gpu_batches=count)
            if fits(other):
                assert predict(LLAMA, other, COSTS, task, HALF).tokens_per_second <= 1.1 * rate


def test_attention_on_the_cpu_costs_what_it_costs():
    """Serially: its own coefficients for the host's rows, those of the device for the others, and
    no cache moves."""
    policy = Policy.parse("100 0 25 75 100 0 gpu_batch_size=8 overlap=false cpu_attention=true")
    found = predict(LLAMA, policy, COSTS, TASK, HALF)
    context = TASK.prompt + TASK.new // 2
    layer = 1e-3 + 2 * (1e-6 + 1e-9 * context) + 6 * (5e-6 + 5e-9 * context)
    assert found.lanes["compute"] == pytest.approx(32 * layer + 5e-4 + 8e-6)
    assert found.lanes["load cache"] == found.lanes["store cache"] == 0


def test_a_sparse_step_loads_keys_and_fetches_what_it_keeps():
    policy = Policy.parse("100 0 0 100 100 0 gpu_batch_size=8 overlap=false")
    few = LLAMA.replace(attn_sparsity=0.1)
    dense, sparse = (predict(cfg, policy, COSTS, TASK, HALF) for cfg in (LLAMA, few))
    latency = 32 * 1e-5
    keys = (dense.lanes["load cache"] - latency) / 2
    assert sparse.lanes["load cache"] == pytest.approx(keys + latency)
    kept = (1 - 0.9**4) * keys / 2e-11 * 1e-10  # of as many bytes, at the rate of fetching
    fetched = sparse.lanes["compute"] - dense.lanes["compute"]
    assert fetched == pytest.approx(32 * 1e-4 + kept)


def test_the_solver_attends_on_the_cpu_where_that_is_faster():
    """A cache that does not fit, behind a slow link."""
    slow = dataclasses.replace(COSTS, load_cache=Moving(1e-5, 1e-9, 4e-10, 1e-12))
    limits = MemoryLimits(int(6e9), int(60e9), 0)
    task = Task(4, 32768, 32)
    assert solve(LLAMA, slow, task, limits, HALF).cpu_attention
    slower = dataclasses.replace(slow, cpu=(1.0, 1.0, 1e-3))
    assert not solve(LLAMA, slower, task, limits, HALF).cpu_attention


def test_what_is_read_from_disk_passes_through_host_memory():
    need = {
        share: need_of(LLAMA, Policy.parse(f"{share} 100 0 100 0"), TASK, HALF, 0)
        for share in ("0 0", "0 50", "0 100")
    }
    head = 2 * LLAMA.vocab_size * LLAMA.d_model  # the largest tensor
    assert need["0 0"].host == need["0 0"].reading == 3 * head
    assert need["0 50"].reading == 3 * head // 2 and need["0 100"].reading == 0


def test_no_policy_is_one_line():
    with pytest.raises(JaxLlamaError, match="no policy fits: even one row"):
        solve(LLAMA, COSTS, Task(1, 512, 32), MemoryLimits(10**8, 10**9, 10**9), HALF)
    on_disk = Policy.parse("0 0 0 0 100 0 gpu_batch_size=1")
    arrays = need_of(LLAMA, on_disk, TASK, HALF, 0).device
    with pytest.raises(JaxLlamaError, match=r"the limit is"):  # programs need some too
        check_fits(LLAMA, None, TASK, MemoryLimits(device=arrays), HALF)


def test_fit_recovers_rates():
    rows = [(1.0, b, 0.0) for b in (1e6, 5e6)] + [(1.0, 0.0, b) for b in (1e6, 5e6)]
    truth = (1e-4, 1e-10, 5e-10)
    seconds = [sum(a * b for a, b in zip(row, truth, strict=True)) for row in rows]
    assert nnls(rows, seconds) == pytest.approx(truth, rel=1e-6)
