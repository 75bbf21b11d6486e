"""Models on meshes against the same models on one device.

The comparisons run in child processes with 8 CPU devices (``parallel_child``), so that this one
keeps its single device.  Tokens must be equal; log-probabilities may differ by what reordered
float32 sums (16-bit activations: a rounding that falls the other way) leave.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllama.checkpoints.hf import load as hf
from jaxllama.config import GLAConfig, load_config, preset_names
from jaxllama.errors import JaxLlamaError
from jaxllama.evaluation.speed.trace import step_parts
from jaxllama.language_model import LanguageModel
from jaxllama.model import shardings
from jaxllama.model.params import param_table
from jaxllama.model.split import (
    check_shards,
    local_config,
    natural_rows,
    row_order,
    split_axis,
)
from jaxllama.parallel import mesh as parallel
from jaxllama.parallel.hosts import join
from pallas_kernels.qtensor import QTensor
from tests.helpers.compiling import environment, results_of
from tests.helpers.models import FAMILIES, LLAMA
from tests.helpers.seeded import seeded_params

ROOT = Path(__file__).parents[2]
LATENT = ("q_a", "kv_a", "kv_norm")  # what all heads share
GEMMA4 = ("table", "project", "gate", "out", "scale", "mixer_out_norm", "mlp_out_norm")
LOGPROB_BOUND = {"bfloat16": 0.1, "w8a8": 1e-4, "w4a8": 1e-4}
CORE = "gqa:float32:2x4:sampled"
QUICK = ("delta:w8a8:2x2:greedy:int8", "experts:w4a16:2x4:greedy")
FULL = [
    *(
        f"{family}:float32:all:sampled"
        for family in (
            "gqa",
            "mha-tied-bias",
            "mqa-window",
            "llama3-rope-even",
            "gla",
            "gla-variant",
            "hybrid",
            "delta",
            "kda",
            "qwen3.5",
            "experts",
            "latent",
            "gemma4",
        )
    ),
    *(
        f"{family}:{scheme}:all:greedy"
        for family in ("gqa", "hybrid", "mha-tied-bias", "gla")
        for scheme in ("bfloat16", "w8a16", "w4a16", "w8a8", "fp8", "w4a8")
    ),
    *(f"experts:{scheme}:all:greedy" for scheme in ("bfloat16", "w8a16", "w4a16")),
    *(f"delta:{scheme}:all:greedy" for scheme in ("w8a16", "w4a16", "w8a8", "fp8")),
    "experts-ungated:float32:2x2+2x4:sampled",
    "side-by-side:float32:2x2+2x4:sampled",
    "short-conv:float32:all:sampled",
    "short-conv:w8a16:all:greedy",
    *(f"gqa:float32:2x4+1x8:greedy:{kv}" for kv in ("int8", "int4", "float8_e4m3fn")),
    "mqa-window:w4a16:all:greedy",
    "mha-tied-bias:w8a8:2x2+1x4:greedy:int8",
]


def child(*names: str) -> dict[str, dict]:
    """The results of a child process by case."""
    results = results_of("parallel_child", *names)
    return {result.pop("case"): result for result in results}


def check_tokens(case: str, result: dict) -> None:
    assert result["same"], case
    assert result["distinct"] >= 3, f"{case}: the tokens say nothing"
    scheme, mesh = case.rsplit("-", 2)[1:]
    assert result["logprob"] < LOGPROB_BOUND.get(scheme, 1e-3), case
    # A device has 1/n of every matrix; norms, first factors of gates, and of o and down biases and
    # scales of rows, are whole.
    share, whole = result["share"]
    assert share * int(mesh.split("x")[1]) == pytest.approx(1), case
    norms = {"norm", "mixer_norm", "mlp_norm", "g_norm", "o_norm", "q_norm", "k_norm"}
    assert set(whole) <= norms | {
        "gk_0",
        "f_0",
        "g_0",
        "o",
        "down",
        "router",
        "shared_gate",
        *LATENT,
        *GEMMA4,
    }, case
    if result["collectives"] is not None:
        check_collectives(case, result["collectives"], result["layers"])


def check_collectives(case: str, found: dict[str, list[str]], n_layers: int) -> None:
    """Two sums of activations a layer and one for the embedding; nothing gathers logits."""
    activations = [shape for shape in found["all-reduce"] if ",64]" in shape or ",1,64]" in shape]
    assert len(activations) == 2 * n_layers + 1, (case, activations)
    assert set(found) <= {"all-reduce", "all-gather"}, case
    for shape in found.get("all-gather", []):
        # Penalties' counts are, where the vocabulary has no even shares.
        assert shape.startswith("s32"), (case, shape)


@pytest.fixture(scope="module")
def quick() -> dict[str, dict]:
    """All default cases by one process, whose start is dearer than most of them."""
    return child(CORE, *QUICK, "one-row", "random", "gradients", "sizes", "sequence")


@pytest.mark.parametrize(
    "path,d_ff,blocked", [("gate_up", 512, 512), ("gate_up", 384, None), ("up", 512, 128)]
)
def test_a_shard_knows_that_128_rows_share_scales(path, d_ff, blocked):
    """Two shards, of interleaved gate and up or of rows in their order."""
    cfg, path = LLAMA.replace(d_ff=d_ff), ("layer_0", "mlp", path, "weight")
    leaf = QTensor(np.zeros((2 * d_ff if path[2] == "gate_up" else 256, 256), "int8"), np.ones(1))
    leaf = dataclasses.replace(leaf, blocked=leaf.shape[0])
    order = row_order(cfg, path, 2) if path[2] == "gate_up" else None
    assert shardings._with_shards_blocks(path, leaf, leaf, order, 2).blocked == blocked


@pytest.mark.core
def test_rows_and_heads_of_a_mesh_give_the_tokens_of_one_device(quick):
    """Sampled with every option."""
    check_tokens("gqa-float32-2x4", quick["gqa-float32-2x4"])


@pytest.mark.parametrize("name", QUICK)
def test_tokens_do_not_depend_on_the_mesh(quick, name):
    family, scheme, mesh = name.split(":")[:3]
    check_tokens(f"{family}-{scheme}-{mesh}", quick[f"{family}-{scheme}-{mesh}"])


def test_random_weights_do_not_depend_on_the_mesh(quick):
    """Words, scales and floats are those of one device to the bit, each where it belongs."""
    assert quick["random"]["worst"] == 0


def test_nothing_gathers_the_logits_of_one_row(quick):
    """Where a gather of the chosen token's logit would be cheapest as a gather of all of them."""
    assert set(quick["one-row"]["collectives"]) == {"all-reduce"}


def test_devices_that_share_a_prompt_give_the_logits_and_the_cache_of_one(quick):
    """``test_sequence`` has every mixer."""
    result = quick["gqa:4x1:prompt"]
    assert result["is_cut"], "the devices did not share the prompt"
    assert max(result["logits"], result["cache"]) < 1e-5


def test_every_token_reaches_its_experts_whatever_they_are(quick):
    """Also where all tokens want one device's, which no fixed capacity below all of them holds;
    ``test_exchange`` has whole models."""
    result = quick["sizes"]
    assert max(result["worst"].values()) < 1e-5
    assert "all-to-all" in result["kinds"]
    assert result["sizes"] == [64, 128, 256]


def test_options_that_the_backend_refuses_are_not_taken(quick):
    """And CPUs have none of their own."""
    assert quick["one-row"]["adds_up"] == [True, False]
    assert quick["one-row"]["is_default"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_tokens_do_not_depend_on_the_mesh_in_every_combination(name):
    results = child(name)
    assert len(results) == (5 if ":all:" in name else 2)
    for case, result in results.items():
        check_tokens(case, result)


def test_gradients_pass_through_a_mesh(quick):
    for name in ("gradients-2x4", "gradients-4x1"):
        assert quick[name]["loss"] < 1e-5
        assert quick[name]["worst"] < 1e-4  # of each parameter's largest gradient


@pytest.mark.slow
def test_packed_weights_pass_through_a_mesh():
    packed = child("packed")["packed"]
    assert packed["error"] < 1e-5  # float32 sums in another order
    assert packed["same"], "gather_params is not the inverse of shard_params"


def check_training(result: dict) -> None:
    """Sums in another order stay within 1e-4 over a run this short, as against torch's
    (test_training)."""
    assert max(result["off"].values()) < 1e-4
    assert result["fell"] < 0.95  # it learns


@pytest.mark.slow
@pytest.mark.parametrize("name", ["training", "parts"])
def test_training_on_a_mesh_follows_one_device_s_curve(name):
    """Loss, gradient norm and validation of every step, where the run is moved to another mesh
    midway; with whole weights on each device, and with parts of them."""
    result = child(name)["training"]
    assert set(result["off"]) == {"one", "moved", *(["wider"] if name == "parts" else [])}
    check_training(result)


@pytest.mark.slow
def test_devices_share_weights_and_moments():
    """A device of four has a quarter of the state, but for vectors. Losses and norms of gradients
    follow those of one device: float32 up to the order of sums. In FP8 a column of activations has
    a scale on each device, so its loss follows up to rounding."""
    for name, result in child("divided").items():
        assert result["share"] < 0.3, name
        off = result["off"][:1] if name == "fp8" else result["off"]
        assert max(off) < (2e-3 if name == "fp8" else 2e-6), name


@pytest.mark.slow
def test_a_resume_on_the_same_mesh_is_the_same_to_the_bit():
    result = child("resumed")["training"]
    assert set(result["off"]) == {"one", "data=4", "again"}
    assert result["same"]
    check_training(result)
    alone, on_mesh = result["scores"]  # `eval` of the model that came out
    assert on_mesh == pytest.approx(alone, rel=1e-5)


def test_the_parts_of_a_step_are_those_of_a_device_s_kernels(tmp_path):
    """Not of the host's rows, which have the same names, nor of gaps that are the host's."""

    def named(kind, pid, name, **more):
        return {"ph": "M", "name": kind, "pid": pid, "args": {"name": name}, **more}

    events = [
        named("process_name", 1, "/device:GPU:0"),
        named("thread_name", 1, "Stream #5", tid=7),
        named("thread_name", 1, "XLA Ops", tid=8),
        named("process_name", 2, "/host:CPU"),
        named("thread_name", 2, "Stream-like", tid=7),
        *(
            {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": 10.0}
            for pid, tid, begin, name in (
                (1, 7, 0.0, "void stream_executor::gpu::AllReduceKernelImpl<float>"),
                (1, 7, 12.0, "ncclDevKernel_AllGather_RING_LL"),
                (1, 7, 25.0, "loop_fusion_12"),
                (1, 7, 2e6, "loop_fusion_3"),
                (1, 7, 2e6 + 5, "psum_457_0_fusion"),
                (1, 8, 0.0, "all-reduce.3"),
                (2, 7, 0.0, "ncclGroupEnd"),
                (2, 9, 0.0, "nccl"),
            )
        ),
    ]
    trace = gzip.compress(json.dumps({"traceEvents": events}).encode())
    (tmp_path / "host.trace.json.gz").write_bytes(trace)
    parts = step_parts(tmp_path, 2)
    assert parts.pop("sums") == 1.5
    assert parts.pop("longest")["loop_fusion"] == pytest.approx({"launches": 1, "seconds": 10e-6})
    assert parts == pytest.approx({"collectives": 15e-6, "kernels": 10e-6, "gaps": 2.5e-6})
    none = gzip.compress(json.dumps({"traceEvents": events[:-8]}).encode())
    (tmp_path / "host.trace.json.gz").write_bytes(none)
    assert step_parts(tmp_path, 2) is None


# Layout


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shard_holds_its_own_heads_and_the_way_back_is_the_identity(family):
    cfg = FAMILIES[family]
    params = seeded_params(cfg)
    for n in (1, 2):
        local = local_config(cfg, n)
        sizes = jax.tree.leaves_with_path(seeded_params(local))
        shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in sizes}
        for keys, leaf in jax.tree.leaves_with_path(params):
            path = tuple(key.key for key in keys)
            order, axis = row_order(cfg, path, n), split_axis(path)
            stored = leaf
            if order is not None:
                stored = np.where(
                    (order >= 0)[:, None] if leaf.ndim > 1 else order >= 0,
                    leaf[np.maximum(order, 0)],
                    0,
                )
                np.testing.assert_array_equal(stored[natural_rows(order)], leaf)
            shard = stored if axis is None else np.split(stored, n, axis)[0]
            assert shard.shape == shapes[path], path


def test_fused_rows_are_regrouped_head_by_head():
    cfg = LLAMA.replace(n_heads=4, n_kv_heads=2, head_dim=2, d_ff=4)
    order = row_order(cfg, ("layer_0", "mixer", "qkv", "weight"), 2)
    # q 0-7, k 8-11, v 12-15: shard 0 has two heads of q and one of k and v.
    assert order.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    order = row_order(cfg, ("layer_0", "mixer", "qkv", "weight"), 4)
    assert order[:6].tolist() == [0, 1, 8, 9, 12, 13]
    assert order[6:12].tolist() == [2, 3, 8, 9, 12, 13]  # the same kv head again
    order = row_order(cfg, ("layer_0", "mlp", "gate_up", "weight"), 2)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert row_order(cfg, ("embed", "weight"), 2).tolist() == [*range(97), -1]


def test_decays_of_few_kv_heads_are_repeated_as_their_keys_are():
    gla = GLAConfig(n_heads=4, n_kv_heads=2, expand_k=1.0, expand_v=1.0, decay="channel")
    cfg = LLAMA.replace(layer_types=("gla",) * LLAMA.n_layers, gla=gla)
    wanted = param_table(shardings.replicated_config(cfg, 4))
    for path in param_table(cfg):
        order = row_order(cfg, path, 4)
        if order is not None and path[1:2] == ("mixer",):
            assert len(order) == wanted[path].shape[0], path


def test_presets_name_the_meshes_that_divide_them():
    for name in preset_names():
        cfg = load_config(name)
        check_shards(cfg, 1)
        local = local_config(cfg, 1)
        assert (local.n_heads, local.d_ff, local.gla) == (cfg.n_heads, cfg.d_ff, cfg.gla)
    for n in (2, 4, 8, 16, 32, 64):
        check_shards(load_config("llama-3.1-70b"), n)
    with pytest.raises(JaxLlamaError, match=r"model=4 .* the 9 heads of .*; allowed: 1, 3"):
        check_shards(load_config("smollm2-135m"), 4)


@pytest.mark.parametrize(
    "mesh, message",
    [
        ("model=64", "mesh data=1,model=64: needs 64 devices, and jax sees"),
        ("tensor=2", "axis 'tensor' is not one of data, expert, model"),
        ("expert=64", "mesh data=1,expert=64,model=1: needs 64 devices, and jax sees"),
        ("model=2,model=2", "expected data=N,expert=N,model=N, each at most once"),
        ("model=-1", "expected data=N,expert=N,model=N"),
        ("", "expected data=N,expert=N,model=N"),
        ({"model": 0}, "model = 0: must be a whole number from 1 on"),
    ],
)
def test_meshes_that_cannot_be_are_named(mesh, message):
    with pytest.raises(JaxLlamaError, match=message):
        parallel.make_mesh(mesh)


# Loading and several processes


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A checkpoint of a model of 8 heads."""
    cfg = LLAMA.first_layers(1).replace(
        d_model=64, n_heads=8, n_kv_heads=2, head_dim=8, d_ff=128, eos_token_ids=(2,)
    )
    where = tmp_path_factory.mktemp("parallel") / "model"
    hf.save(where, cfg, seeded_params(cfg))
    return where


@pytest.mark.slow
def test_two_processes_of_four_devices_are_one_mesh(directory):
    """Loaded from disk, each process its part; the same texts as one device gives, on both."""
    port = _free_port()
    program = f"""
import json, sys
from jaxllama.parallel.hosts import join
index = join("127.0.0.1:{port},2," + sys.argv[1], timeout=300)
import jax, jaxllama as jl
from jaxllama.checkpoints.safetensors import SafetensorsFile
read, whole = [0], SafetensorsFile.read_into
def counted(self, info, out):
    read[0] += out.nbytes
    return whole(self, info, out)
SafetensorsFile.read_into = counted
lm = jl.load({str(directory)!r}, dtype="float32", mesh="data=1,model=8")
outs = lm.generate([[5, 6, 7], [8]], max_new_tokens=8)
own = sum(s.data.nbytes for x in jax.tree.leaves(lm.params) for s in x.addressable_shards
          if s.device == jax.local_devices()[0])
print(json.dumps([jax.device_count(), [o.tokens for o in outs], read[0], own]))
"""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(index)],
            cwd=ROOT,
            env=environment(4),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    cfg, params = hf.load(directory)
    want = LanguageModel(cfg, jax.device_put(params), None).generate(
        [[5, 6, 7], [8]], max_new_tokens=8
    )
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for run in runs:
        out, errors = run.communicate(timeout=600)
        assert run.returncode == 0, errors[-4000:]
        devices, tokens, read, own = json.loads(out.splitlines()[-1])
        assert devices == 8
        assert tokens == [row.tokens for row in want]
        assert own < 0.16 * total  # 1/8, the norms, and the kv heads that are repeated
        assert read < 0.6 * total  # a process reads its half, and kv heads once a device


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
def test_who_waits_in_vain_or_expects_others_is_told():
    """Processes that join at once: one of three, one whose coordinator is not there, and two that
    disagree about their number."""
    program = """
import sys
from jaxllama.errors import JaxLlamaError
from jaxllama.parallel.hosts import join
try:
    join(sys.argv[1], timeout=float(sys.argv[2]))
except JaxLlamaError as error:
    sys.exit(f"error: {error}")
"""
    late, alone, torn = _free_port(), _free_port(), _free_port()
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"127.0.0.1:{spec}", timeout],
            cwd=ROOT,
            env=environment(1),
            text=True,
            stderr=subprocess.PIPE,
        )
        for spec, timeout in (
            (f"{late},3,0", "2"),
            (f"{alone},2,1", "0.5"),
            (f"{torn},2,0", "300"),
            (f"{torn},3,1", "300"),
        )
    ]
    told = [(run.communicate(timeout=300)[1].splitlines()[-1], run.returncode) for run in runs]
    for (line, status), process, seconds, count, port in (
        (told[0], 0, 2, 3, late),
        (told[1], 1, 0.5, 2, alone),
    ):
        assert line == (
            f"error: hosts: process {process} waited {seconds} s, and not all {count} came to "
            f"127.0.0.1:{port}"
        )
        assert status == 2
    assert told[2:] == [("error: hosts: process 1 expects 3, not 2", 1)] * 2


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(JaxLlamaError, match=f"cannot listen at 127.0.0.1:{port}: Address"):
            join(f"127.0.0.1:{port},2,0")


@pytest.mark.parametrize(
    "hosts, message",
    [
        ("nonsense", "expected ADDRESS:PORT,COUNT,INDEX"),
        ("a:99999,2,0", "port 99999 is not from 1 to 65535"),
        ("a:1234,2,2", "index 2 is not below the count, 2"),
    ],
)
def test_hosts_that_make_no_sense_are_named(hosts, message):
    with pytest.raises(JaxLlamaError, match=message):
        join(hosts)


@pytest.mark.parametrize(
    "version,before,after",
    [
        ((0, 12, 0), None, "--xla_gpu_experimental_use_collective_kernels="),
        ((0, 12, 0), "--a=1", "--a=1 --xla_gpu_experimental_use_collective_kernels="),
        (
            (0, 12, 0),
            "--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE",
            "--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE",
        ),
        ((0, 11, 2), None, None),
    ],
)
def test_a_mesh_keeps_collective_kernels_off(monkeypatch, version, before, after):
    """Earlier versions end the process at a flag that they do not know."""
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if before is not None:
        monkeypatch.setenv("XLA_FLAGS", before)
    parallel.make_mesh("model=1")
    parallel.make_mesh("model=1")
    assert os.environ.get("XLA_FLAGS") == after
