"""Offloading on a GPU: the resident model's tokens, and of every policy the same bits.

A whole program and its units are compiled apart, with products that add up in other orders, so a
resident model's float32 logprobs differ in the last bits (seen: 1.4e-5; logits are of size 10).
Left out: bfloat16 weights, with which a resident model's tokens differ at near-ties.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.config import ExpertsConfig
from jaxllama.executors.offloaded import experts as room
from jaxllama.executors.offloaded.executor import SCHEME
from jaxllama.executors.offloaded.experts import streams
from jaxllama.executors.offloaded.mailbox import Mailbox
from jaxllama.language_model import LanguageModel
from jaxllama.offload.experts import fetched, layout_of, pack
from jaxllama.offload.policy import Policy
from jaxllama.offload.store import Store
from jaxllama.placement import Placement
from jaxllama.quantization.quantize import quantize_params
from pallas_kernels.cpu import prepare_tree
from pallas_kernels.experts import fetch
from tests.helpers.models import FAMILIES, params_of

# As wide as the native kernels want it.
CFG = FAMILIES["gqa"].replace(d_model=256, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=512)
PROMPTS = [[5, 6, 7], list(range(3, 24))]
NEW = 12
RESIDENT, MIXED, DISK = "100 0 100 0 100 0", "30 40 30 40 30 40", "0 0 0 0 0 0"
COMPRESSED = "compress_weight=true compress_cache=true"


def written(params, dtype: str, words: str) -> list:
    """(tokens, logprobs) of every row."""
    place = Placement(Policy.parse(words), jnp.dtype(dtype))
    model = place.model(CFG, place.tree(jax.tree.map(lambda leaf: leaf, params)), None)
    return [(out.tokens, out.logprobs) for out in model.generate(PROMPTS, NEW)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, options, policies",
    [("float32", "", (MIXED, DISK)), ("bfloat16", COMPRESSED, (MIXED,))],
    ids=["float32", "4-bit"],
)
def test_every_policy_s_bits_and_the_resident_model_s_tokens(
    tmp_path, monkeypatch, dtype, options, policies
):
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    params = params_of(CFG, dtype=dtype)
    expected = written(params, dtype, f"{RESIDENT} {options}")
    assert len({token for tokens, _ in expected for token in tokens}) > 6  # it says something
    for policy in policies:
        assert written(params, dtype, f"{policy} {options}") == expected, policy
    weights = quantize_params(params, SCHEME) if options else params
    whole = LanguageModel(CFG, weights, None).generate(
        PROMPTS, NEW, kv_dtype="int4" if options else None
    )
    assert [out.tokens for out in whole] == [tokens for tokens, _ in expected]
    if dtype == "float32":
        for (_, got), want in zip(expected, whole, strict=True):
            np.testing.assert_allclose(got, want.logprobs, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("sparsity", [1.0, 0.3], ids=["dense", "sparse"])
def test_attention_beside_the_cache(tmp_path, monkeypatch, sparsity):
    """Half of the rows attend on the CPU, which rounds unlike the GPU (1e-4 of logits of size 10);
    and of a cache in host memory a sparse step moves what it reads."""
    monkeypatch.setenv("JAXLLAMA_OFFLOAD_DIR", str(tmp_path))
    params = params_of(CFG)
    sparse = f"attn_sparsity={sparsity}"
    policies = [f"100 0 50 50 100 0 cpu_attention=true {sparse}", f"0 100 0 100 100 0 {sparse}"]
    whole = LanguageModel(CFG.replace(attn_sparsity=sparsity), params, None).generate(PROMPTS, NEW)
    for policy in policies:
        for (tokens, logprobs), want in zip(written(params, "float32", policy), whole, strict=True):
            assert tokens == want.tokens, policy
            np.testing.assert_allclose(logprobs, want.logprobs, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, "mxfp4", "w4a16-g32", "w4a16-g32-zero"])
def test_experts_that_the_gpu_reads_from_the_host(tmp_path, scheme):
    experts = ExpertsConfig(16, 2, 256, bias=True, router_bias=True)
    cfg = CFG.first_layers(1).replace(experts=experts)
    params = params_of(cfg, dtype="float32")
    params = params if scheme is None else quantize_params(params, scheme)
    expected = None
    for text in ("100/0", "25/75"):
        policy = Policy.parse(f"{RESIDENT} experts={text}")
        place = Placement(policy, jnp.float32, directory=tmp_path)
        assert place.store.fetches
        model = place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)
        found = [out.tokens for out in model.generate(PROMPTS, NEW)]
        expected = expected or found
        assert found == expected, text
    laid_out = prepare_tree(jax.tree.map(np.asarray, params["layer_0"]["mlp"]["experts_down"]))
    weight = laid_out["weight"]
    store, (parts, structure) = Store(tmp_path), jax.tree.flatten(weight)
    layout = layout_of(parts, structure, "gpu")
    pinned = {
        expert: store.pin(pack(layout, [np.asarray(part)[expert : expert + 1] for part in parts]))
        for expert in (3, 1)
    }
    table = jnp.asarray(fetch.addresses_of(pinned, 16))
    got = jax.jit(fetched, static_argnums=0)(layout, table, jnp.asarray([1, 16, 3]))
    want = params["layer_0"]["mlp"]["experts_down"]["weight"]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = (np.asarray(x.astype(jnp.float32)) for x in (one, other))
        np.testing.assert_array_equal(one[[0, 2]], other[[1, 3]])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_experts_by_mail_give_what_the_host_s_calls_give(tmp_path, monkeypatch, rows):
    """The CPU computes all of them either way."""
    cfg = CFG.replace(experts=ExpertsConfig(16, 2, 256, bias=True, router_bias=True))
    params = quantize_params(params_of(cfg, dtype="float32"), "mxfp4")
    place = Placement(
        Policy.parse(f"{RESIDENT} experts=0/100 cpu_expert=1e-6"), jnp.float32, directory=tmp_path
    )
    model = place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)
    turns, serving = [], Mailbox.serving
    monkeypatch.setattr(
        Mailbox, "serving", lambda box, *args: turns.append(args[-1]) or serving(box, *args)
    )
    prompts = [PROMPTS[0], PROMPTS[0][::-1], [9]][:rows]
    found = [model.generate(prompts, NEW) for _ in range(2)]
    assert len(turns) >= 2 * (NEW - 1)  # one for both layers, which are a span
    monkeypatch.setattr(room, "CPU_PAIRS", 0)
    for want in model.generate(prompts, NEW):
        for one in (generation.pop(0) for generation in found):
            assert one.tokens == want.tokens
            np.testing.assert_allclose(one.logprobs, want.logprobs, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["mxfp4,experts_*=none", "mxfp4"])
def test_slots_that_learn_and_streamed_prompts_change_no_tokens(tmp_path, scheme):
    cfg = CFG.replace(experts=ExpertsConfig(16, 2, 256, bias=True, router_bias=True))
    params = quantize_params(params_of(cfg, dtype="float32"), scheme)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, cfg.vocab_size, n).tolist() for n in (3, 20, 20)]
    assert streams(cfg.layers[0], 20) and not streams(cfg.layers[0], 3)

    def found(text: str) -> list[list[list[int]]]:
        """Return the rows' tokens of three calls, which find three states of the slots."""
        policy = Policy.parse(f"{RESIDENT} experts={text}")
        place = Placement(policy, jnp.float32, directory=tmp_path)
        model = place.model(cfg, place.tree(jax.tree.map(np.asarray, params)), None)
        return [[out.tokens for out in model.generate(rows, NEW)] for _ in range(3)]

    policies = ("100/0", "25/75", "0/100", "25/75 gpu_batch_size=2 num_gpu_batches=2")
    with ThreadPoolExecutor() as threads:  # compiling takes most of the time
        first, *others = threads.map(found, policies)
    assert first == first[:1] * 3
    for text, own in zip(policies[1:], others, strict=True):
        assert own == first, text
