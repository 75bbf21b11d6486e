"""A decode step on Hopper as one program: which kernels a layer is, read off the lowered text."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxllama as jl
from jaxllama import compiler_options
from jaxllama.checkpoints.hf.tables import tensor_table
from jaxllama.config import DeltaConfig, ExpertsConfig, ModelConfig
from jaxllama.decoding.forward import verify
from jaxllama.decoding.sampling import Sampling, SamplingParams
from jaxllama.executors import resident
from jaxllama.executors.prompts import PromptBatch, start
from jaxllama.executors.resident import advance
from jaxllama.generation import init_params
from jaxllama.model import verification
from jaxllama.model.cache import cache_specs
from jaxllama.model.lora import attach, for_rows
from jaxllama.model.shardings import specs
from jaxllama.parallel import mesh as parallel
from pallas_kernels import dispatch
from pallas_kernels.rows import greedy
from tests.helpers import lora_cases
from tests.helpers.arrays import as_jax
from tests.helpers.models import GLA, LLAMA

pytestmark = pytest.mark.newer  # CI runs these on the newest jax too
CFG = LLAMA.replace(
    vocab_size=1024,
    d_model=1024,
    n_layers=3,
    layer_types=("attention",) * 3,
    n_heads=8,
    n_kv_heads=2,
    head_dim=128,
    d_ff=2048,
)
GLA_CFG = CFG.replace(layer_types=("gla",) * 3, gla=GLA)


def kernels_of(
    batch: int,
    scheme: str | None,
    kv_dtype: str,
    cfg: ModelConfig = CFG,
    adapt: Callable[[Any], Any] = lambda params: params,
    width: int | None = None,
) -> Counter[str]:
    """Calls of Mosaic kernels in the whole step, by the jitted function that holds one, and of
    XLA's products; width: of a pass that verifies so many tokens a row and keeps some."""

    def params():
        drawn = init_params(cfg, jax.random.key(0), jnp.bfloat16)
        return adapt(drawn if scheme is None else jl.quantize_params(drawn, scheme))

    cache = jax.eval_shape(lambda: jl.init_cache(cfg, batch, 256, kv_dtype))
    tokens = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if width is None:
        step = jl.decode_step.trace(cfg, jax.eval_shape(params), tokens, cache)
    else:
        tokens = jax.ShapeDtypeStruct((batch, width), jnp.int32)
        count = jax.ShapeDtypeStruct((batch,), jnp.int32)
        turn = jax.jit(functools.partial(verify_and_commit, cfg))
        step = turn.trace(jax.eval_shape(params), tokens, count, cache)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"\n  func\.func \w+ @(\w+)(.*?)(?=\n  func\.func |\Z)", text, re.DOTALL)
    functions = dict(found)

    @functools.cache
    def executed(name: str) -> Counter[str]:
        """By a call of this function: layers that are alike call the same one."""
        body = functions[name]
        counts = Counter({"dot_general": body.count("stablehlo.dot_general")})
        if "@mosaic_gpu" in body:
            counts[re.sub(r"^_|_\d+$", "", name)] += 1
        for callee in re.findall(r"(?<!_)call @(\w+)\(", body):
            counts += executed(callee)
        return counts

    return +executed("main")


def verify_and_commit(cfg, params, tokens, count, cache):
    scores, proposal = verify(cfg, params, tokens, count, cache)
    return scores, verification.commit(proposal, count)


@pytest.fixture
def on_hopper(monkeypatch):
    if tuple(int(v) for v in jax.__version__.split(".")[:3]) < (0, 11, 2):
        pytest.skip(f"jax {jax.__version__}: the kernels need 0.11.2")
    jax.clear_caches()
    monkeypatch.setattr(dispatch, "hopper_reason", lambda *_: None)
    # not the CPU's handlers
    monkeypatch.setattr(dispatch, "_own_answer", lambda find, *_: find())
    yield
    jax.clear_caches()


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", None])
def test_a_llama_layer_of_one_row_is_five_kernels(on_hopper, scheme):
    """norm + qkv, RoPE + cache + attention, o + residual, norm + gate/up + SwiGLU, down + residual;
    after the layers last norm + head."""
    calls = kernels_of(1, scheme, "bfloat16")
    assert calls == {"matmul": 4 * CFG.n_layers + 1, "attend": CFG.n_layers}


def test_a_qwen3_layer_of_one_row_is_five_kernels(on_hopper):
    """The norm of q's and k's heads is in the kernel that rotates them."""
    calls = kernels_of(1, None, "bfloat16", CFG.replace(qk_norm="head"))
    assert calls == kernels_of(1, None, "bfloat16")


def test_a_layer_of_experts_of_one_row_is_six_kernels(on_hopper):
    """Llama's first three, norm + router + choice, gate and up, down + sum; the next norm adds."""
    experts = ExpertsConfig(n_experts=8, n_active=2, d_ff=1024)
    cfg = CFG.replace(n_layers=1, layer_types=("attention",), experts=experts)
    calls = kernels_of(1, "w4a16", "bfloat16", cfg)
    kernels = {"grouped_rows": 1, "grouped_sum": 1, "route_tokens": 1}
    assert calls == {"matmul": 3, "attend": 1, **kernels}


def test_a_latent_layer_with_a_shared_expert_of_one_row_is_nine_kernels(on_hopper):
    """GLM-4.7-Flash's: norm + q's latent + the other, norm + q, up_k + RoPE + cache, attention,
    merge + up_v, o + residual, norm + router + choice, gate and up, down + sum + residual."""
    flash = jl.load_config("glm-4.7-flash")
    cfg = dataclasses.replace(flash, layers=flash.layers[1:2])
    calls = kernels_of(1, "w4a16", "bfloat16", cfg)
    latent = {"heads_and_entries": 1, "attended_chunks": 1, "lifted_chunks": 1}
    experts = {"route_tokens": 1, "grouped_rows": 1, "grouped_sum": 1}
    assert calls == {"matmul": 3 + 1, **latent, **experts}


def test_a_gemma3_layer_of_one_row_is_seven_kernels(on_hopper):
    """Llama's five, with GELU's gate, and the norms behind o and down, which the products that read
    their sum add up."""
    cfg = CFG.replace(qk_norm="head", post_norms=True, activation="gelu_tanh")
    calls = kernels_of(1, None, "bfloat16", cfg)
    layers = CFG.n_layers
    calls["matmul"] += calls.pop("dot_general", 0)  # of so small a plain weight alone, XLA's
    assert calls == {"matmul": 4 * layers + 1, "attend": layers, "run": 2 * layers}


@pytest.mark.parametrize("scheme", ["w4a16", None])
@pytest.mark.parametrize("rows", [1, 16])
def test_a_gla_layer_of_few_rows_is_five_kernels(on_hopper, rows, scheme):
    """norm + projections, everything up to the gated norm, o + residual, and Llama's feed-forward;
    also where the projections are quantized and the gate's low-rank one is not."""
    calls = kernels_of(rows, scheme, "bfloat16", GLA_CFG)
    layers = GLA_CFG.n_layers
    assert calls == {"matmul": 4 * layers + 1, "gla_token": layers}


def test_a_gla_layer_of_many_rows_has_one_kernel_between_its_products(on_hopper):
    calls = kernels_of(64, None, "bfloat16", GLA_CFG)
    norms = 2 * GLA_CFG.n_layers + 1
    products = 8 * GLA_CFG.n_layers + 1
    assert calls == {"pair_matmul": products, "gla_token": GLA_CFG.n_layers, "run": norms}


@pytest.mark.parametrize("scheme", ["w4a16", None])
def test_a_gla_layer_that_verifies_a_draft_is_five_kernels(on_hopper, scheme):
    """As in a decode step, and one more for all layers takes the tokens that stay."""
    calls = kernels_of(2, scheme, "bfloat16", GLA_CFG, width=5)
    layers = GLA_CFG.n_layers
    assert calls == {"matmul": 4 * layers + 1, "gla_token": layers, "gla_commit": 1}


@pytest.mark.parametrize("scheme", ["w4a16", None])
def test_a_gated_delta_layer_of_few_rows_is_five_kernels(on_hopper, scheme):
    """The convolution, the gates and the gated norm are in the step's kernel; where it verifies a
    draft, too, and one more for all layers takes the tokens that stay."""
    delta = DeltaConfig(n_heads=8, n_k_heads=4, d_k=128, d_v=128, norm_eps=1e-6)
    cfg = CFG.replace(layer_types=("delta",) * 3, delta=delta)
    calls, layers = kernels_of(1, scheme, "bfloat16", cfg), CFG.n_layers
    assert calls == {"matmul": 4 * layers + 1, "gated_delta_token": layers}
    assert kernels_of(2, scheme, "bfloat16", cfg, width=5) == calls | {"gated_delta_commit": 1}


@pytest.mark.parametrize("rows", [8, 64])
def test_adapters_beside_quantized_weights_cost_no_kernel(on_hopper, rows):
    """First factors ride where rows are quantized, second ones in the products."""
    adapter = lora_cases.factors(CFG, 1, rank=16)

    def adapt(params):
        return for_rows(
            attach(tensor_table(CFG), params, [adapter] * 2), jnp.ones((rows,), jnp.int32)
        )

    def products_of(**more):
        calls = kernels_of(rows, "w8a8", "int8", **more)
        calls["pair_matmul"] += calls.pop("dot_general", 0)  # of the smallest alone, XLA's
        return calls

    base = products_of()
    assert products_of(adapt=adapt) == base
    assert base["pair_matmul"] == 4 * CFG.n_layers + 1


def parts(cache):
    return cache.layers, cache.lengths


def loop_of(sampling: Sampling, batch: int = 2) -> Counter[str]:
    """How often the decode loop has an operation that costs more than what it computes: loops, and
    of the sampler's the passes over the logits."""
    vocab = CFG.vocab_size

    def params_and_state():
        params = init_params(CFG, jax.random.key(0), jnp.bfloat16)
        cache = jl.init_cache(CFG, batch, 256, "bfloat16")
        prompt, lengths = jnp.ones((batch, 4), jnp.int32), jnp.full((batch,), 4, jnp.int32)
        rows = SamplingParams.stack([sampling] * batch, vocab)
        stops = jnp.zeros((2,), jnp.int32)
        prompts = PromptBatch(prompt, lengths, rows, stops)
        state = start(CFG, params, prompts, *parts(cache), max_new_tokens=8)
        return params, state, rows, stops

    loop = advance.trace(CFG, *jax.eval_shape(params_and_state), 8)
    text = loop.lower(lowering_platforms=("cuda",)).as_text()
    over_logits = rf"stablehlo\.(reduce)\(.* across dimensions = \[1\] : \(tensor<{batch}x{vocab}x"
    found = re.findall(r"stablehlo\.(while|sort|dynamic_update_slice)", text)
    return Counter(found + re.findall(over_logits, text))


def test_a_greedy_step_reads_its_logits_once_and_writes_once(on_hopper):
    """Token and log-probability are one reduction; both go into one array.  Of one row all that
    follows the head is a kernel."""
    assert loop_of(Sampling()) == {"while": 1, "reduce": 1, "dynamic_update_slice": 1}
    assert loop_of(Sampling(), batch=1) == {"while": 1}


def test_a_step_that_ends_in_one_kernel_ends_as_any(monkeypatch):
    """The loop with the kernel's op, which is its XLA form here, leaves what the loop without it
    leaves: to its end, to a stop token, in a cache without room."""
    cfg = LLAMA.replace(n_layers=1, layer_types=("attention",))
    params = init_params(cfg, jax.random.key(0))
    prompt, lengths, n = as_jax([[5, 9, 2]], jnp.int32), as_jax([3], jnp.int32), 6
    sampling = SamplingParams.stack([Sampling()], cfg.vocab_size)
    loops = [jax.jit(functools.partial(advance.__wrapped__, cfg)) for _ in range(2)]

    def run(ends_in_one, stop=-1, room=16):
        plan = greedy.GreedyPlan() if ends_in_one else None
        monkeypatch.setattr(resident, "_own_end", lambda *_: plan)
        cache, stops = jl.init_cache(cfg, 1, room), as_jax([stop], jnp.int32)
        prompts = PromptBatch(prompt, lengths, sampling, stops)
        state = start(cfg, params, prompts, *parts(cache), max_new_tokens=n)
        return loops[ends_in_one](params, state, sampling, stops, n)[0]

    fourth = int(run(False).tokens[0, 3])
    for stop, room in ((-1, 16), (fourth, 16), (-1, 5)):
        want, got = run(False, stop, room), run(True, stop, room)
        for name in ("tokens", "counts", "done", "step"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        np.testing.assert_array_equal(got.cache.lengths, want.cache.lengths)
        np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-5)
        assert want.done[0] == (stop == fourth) and np.isnan(want.logprobs).any() == (room == 5)


def test_a_drawn_step_has_no_loop_of_its_own(on_hopper):
    """A loop inside the step would wait for the host at each of its turns."""
    found = loop_of(Sampling(temperature=0.8, top_k=20, top_p=0.9))
    # Eight a cutoff; best score, mass, the pick's two, the logits' sum and the chosen one.
    assert found == {"while": 1, "reduce": 22, "dynamic_update_slice": 1}


def test_a_loop_as_one_graph_is_tried_before_it_is_used():
    """A backend that refuses the options, or knows no such graphs, gets none."""
    options = [{}, compiler_options._WHOLE_LOOP, {"xla_gpu_no_such_option": True}]
    assert [compiler_options._counts(each) for each in options] == [True, True, False]
    assert (compiler_options.for_device() is None) == (jax.default_backend() != "gpu")


def test_the_products_of_a_step_add_what_the_devices_summed(on_hopper, monkeypatch):
    """On a mesh nothing stands between a sum and the product that reads it."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    axes = parallel.DATA_AXIS, parallel.MODEL_AXIS
    mesh = AbstractMesh((1, 2), axes, axis_types=(AxisType.Auto,) * 2)
    cfg = LLAMA.replace(d_model=512, n_heads=8, n_kv_heads=4, head_dim=64, d_ff=1024)
    cfg = cfg.replace(vocab_size=512)

    def on_mesh(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    shapes = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0), "bfloat16"))
    params = jax.tree.map(on_mesh, shapes, specs(shapes))
    cache = jax.eval_shape(lambda: jl.init_cache(cfg, 1, 64, "bfloat16"))
    cache = jax.tree.map(on_mesh, cache, cache_specs(cache, None))
    tokens = on_mesh(jax.ShapeDtypeStruct((1,), "int32"), PartitionSpec())
    step = jl.decode_step.trace(cfg, params, tokens, cache)
    text = step.lower(lowering_platforms=("cuda",)).as_text()
    adds = [line for line in text.splitlines() if "stablehlo.add" in line]
    assert len([line for line in adds if "x512xbf16>" in line]) == 1  # the last, before the head
    assert text.count('"stablehlo.all_reduce"') == 2 * cfg.n_layers + 1
