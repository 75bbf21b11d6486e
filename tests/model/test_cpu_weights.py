"""Models whose weights are laid out for the CPU's handlers: the same functions and answers."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.engine.engine import Engine
from jaxllama.engine.request import Request
from jaxllama.language_model import LanguageModel
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from pallas_kernels.cpu import CpuWeight, prepare_tree, restore_tree
from pallas_kernels.dispatch import choices
from tests.helpers.arrays import as_jax
from tests.helpers.cases import each_once, slow
from tests.helpers.models import FAMILIES, IDENTITIES, params_of, relative_error, tokens_of

pytestmark = pytest.mark.usefixtures("engines_of_one_size")
SCHEMES = ("w8a16", "w4a16-g16-zero", "w8a8")
PROMPTS = [[5, 9, 3], [8, 4], [11, 3, 7, 20, 6]]


@functools.cache
def model(family: str, scheme: str = "w8a16") -> tuple[LanguageModel, LanguageModel]:
    """(as it was quantized, laid out for the CPU)."""
    cfg = IDENTITIES[family]
    params = jl.quantize_params(params_of(cfg), f"{scheme},embed={scheme}")
    return LanguageModel(cfg, params, None, exact=True), LanguageModel(cfg, params, None)


def quantized(params) -> list[CpuWeight]:
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, CpuWeight))
    return [leaf for leaf in leaves if isinstance(leaf, CpuWeight)]


@pytest.mark.parametrize(
    ("family", "scheme"),
    each_once(["gqa", "hybrid"], SCHEMES[:2])
    + slow(*itertools.product(["mha-tied-bias", "gla-conv-groups"], SCHEMES))
    + slow(("gqa", "w8a8"), ("hybrid", "w8a8")),
)
def test_logits_are_the_exact_models_but_for_8_bits(family, scheme):
    exact, prepared = model(family, scheme)
    assert quantized(prepared.params)
    tokens = tokens_of(exact.config, 2, 9)
    lengths = as_jax([9, 6])
    found, wanted = (lm.logits(tokens, lengths) for lm in (prepared, exact))
    assert 0 < relative_error(found[0], wanted[0]) < 0.1


def test_every_product_of_a_step_is_the_handlers():
    _, lm = model("gqa")
    cache = jl.init_cache(lm.config, 1, 16, dtype=jnp.float32)
    step = functools.partial(jl.decode_step.__wrapped__, lm.config)
    made = choices(step, lm.params, jnp.zeros(1, jnp.int32), cache)
    products = [choice for choice in made if choice.op == "quantized_matmul"]
    assert [choice.implementation for choice in products] == ["cpu"] * 9
    # A layer is four: norm and qkv, o and residual, norm, gate, up and SwiGLU, down and residual.
    # Behind them is the last norm and head: no norm is left alone.
    assert not [choice for choice in made if choice.op in ("rms_norm", "swiglu")]


def test_a_batch_is_its_rows_and_a_prompt_its_tokens():
    _, lm = model("gqa")
    together = lm.generate(PROMPTS, 8)
    alone = [lm.generate([prompt], 8)[0] for prompt in PROMPTS]
    assert [out.tokens for out in together] == [out.tokens for out in alone]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gqa", "gla-conv-groups"])
def test_the_engine_gives_what_generate_gives(family):
    _, lm = model(family)
    engine = Engine(lm, max_slots=2, max_len=64, prefill_chunk=16)
    found: list[list[int]] = [[] for _ in PROMPTS]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        request = Request(str(prompt), tuple(prompt), 8)
        engine.submit(request, lambda event, tokens=tokens: tokens.extend(event.tokens))
    while engine.step():
        pass
    assert found == [out.tokens for out in lm.generate(PROMPTS, 8)]


@pytest.mark.parametrize(
    "policy",
    [
        *slow("40 30 100 0 100 0", "100 0 100 0 100 0", "0 100 100 0 100 0"),
    ],
)
def test_offloading_gives_what_generate_gives(policy, tmp_path):
    _, lm = model("gqa")
    place = Placement(Policy.parse(policy), jnp.float32, directory=tmp_path)
    off = place.model(lm.config, place.tree(jax.tree.map(np.asarray, lm.params)), None)
    found = [out.tokens for out in off.generate(PROMPTS, 8)]
    assert found == [out.tokens for out in lm.generate(PROMPTS, 8)]


def test_a_saved_model_is_the_quantized_one(tmp_path):
    exact, lm = model("gqa")
    lm.save(tmp_path / "model")
    back = jl.load(tmp_path / "model")
    flat = jax.tree.leaves(restore_tree(jax.tree.map(np.asarray, back.params)))
    for found, wanted in zip(flat, jax.tree.leaves(exact.params), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_repr_names_the_layout():
    assert "layer_*.mixer.qkv.weight CpuWeight(q=uint8[" in repr(model("gqa")[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "n_layers", "draft_tokens"),
    [("int8", 1, 3), ("float32", 2, 7), ("int8", 2, 7)],
)
def test_a_draft_changes_no_bit(kv_dtype, n_layers, draft_tokens):
    """Products, attention and the cache's write are a step's for each token of a pass."""
    cfg = FAMILIES["gqa"].replace(head_dim=32)
    params = prepare_tree(jl.quantize_params(params_of(cfg), "w8a16,embed=w8a16"))
    lm = LanguageModel(cfg, params, None)
    sampling = [jl.Sampling(), jl.Sampling(temperature=0.8), jl.Sampling(repetition_penalty=1.3)]
    options = {"sampling": sampling, "seed": [0, 1, 2], "kv_dtype": kv_dtype}
    want = lm.generate(PROMPTS, 24, **options)
    draft = lm.first_layers(n_layers)
    got = lm.generate(PROMPTS, 24, **options, draft=draft, draft_tokens=draft_tokens)
    assert [(out.tokens, out.logprobs) for out in got] == [
        (out.tokens, out.logprobs) for out in want
    ]
    assert sum(out.accepted for out in got) > 0
