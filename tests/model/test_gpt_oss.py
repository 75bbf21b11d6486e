"""gpt-oss beyond a text scored at once: steps, drafts, pages, codes, offloading, training.

That it computes what transformers does is in ``test_parity``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.config import CheckpointForm
from jaxllama.errors import JaxLlamaError
from jaxllama.offload.policy import Policy
from jaxllama.placement import Placement
from tests.helpers.parity_cases import CASES
from tests.helpers.parity_cases import params_of as parity_params

# Heads of 32 features, which the CPU's handlers take.
CFG = CASES["gpt_oss"].replace(
    head_dim=32, name="tiny", stored=CheckpointForm(family="gpt_oss"), eos_token_ids=()
)


@functools.cache
def model() -> tuple[jl.LanguageModel, np.ndarray, np.ndarray]:
    """(the model, tokens, teacher-forced logits)."""
    from tests.helpers.seeded import seeded_params

    lm = jl.LanguageModel(CFG, jax.device_put(seeded_params(CFG)), None)
    tokens = np.random.default_rng(0).integers(0, CFG.vocab_size, (2, 40)).astype(np.int32)
    return lm, tokens, np.asarray(lm.logits(tokens, np.full(2, 40, np.int32)))


def test_sinks_count() -> None:
    """The golden case's sinks change its logits, and sparse attention with sinks is refused."""
    cfg, params = CASES["gpt_oss"], parity_params("gpt_oss")
    assert np.abs(params["layer_0"]["mixer"]["sinks"]["weight"]).max() > 0.1
    with pytest.raises(JaxLlamaError, match="attn_sparsity = 0.5: must be 1 where .* sinks"):
        cfg.replace(attn_sparsity=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_prompt_steps_and_a_draft_are_the_whole_sequence(dtype) -> None:
    """A ragged prompt in chunks, past the window of 9, then steps, then a draft."""
    lm, tokens, want = model()
    atol = 2e-5 if dtype == "float32" else 0.05 * np.abs(want).max()
    cache = jl.init_cache(CFG, 2, 48, dtype=dtype)
    lengths = jnp.asarray([25, 14])
    scores, cache = jl.prefill(CFG, lm.params, tokens[:, :25], lengths, cache, chunk=6)
    np.testing.assert_allclose(scores, want[[0, 1], [24, 13]], atol=atol)
    for step in range(2):
        newest = jnp.asarray([tokens[0, 25 + step], tokens[1, 14 + step]])
        scores, cache = jl.decode_step(CFG, lm.params, newest, cache)
        np.testing.assert_allclose(scores, want[[0, 1], [25 + step, 14 + step]], atol=atol)
    drafted = jnp.asarray([tokens[0, 27:30], tokens[1, 16:19]])
    scores, proposal = jl.verify_step(CFG, lm.params, drafted, jnp.asarray([3, 3]), cache)
    np.testing.assert_allclose(scores, [want[0, 27:30], want[1, 16:19]], atol=atol)
    cache = jl.commit(proposal, jnp.asarray([1, 2]))
    newest = jnp.asarray([tokens[0, 29], tokens[1, 19]])
    scores, _ = jl.decode_step(CFG, lm.params, newest, cache)
    np.testing.assert_allclose(scores, want[[0, 1], [29, 19]], atol=atol)


@pytest.mark.slow
@pytest.mark.usefixtures("engines_of_one_size")
def test_engine_drafts_and_offloading_give_generates_answers() -> None:
    lm, tokens, _ = model()
    prompts = [tokens[0, :20].tolist(), tokens[1, :4].tolist(), tokens[0, 2:15].tolist()]
    plain = [one.tokens for one in lm.generate(prompts, max_new_tokens=12)]
    drafted = lm.generate(prompts, max_new_tokens=12, draft="ngram", draft_tokens=2)
    assert [one.tokens for one in drafted] == plain
    engine, found = jl.Engine(lm, max_slots=2, max_len=48), {}
    for index, prompt in enumerate(prompts):
        found[str(index)] = []
        request = jl.Request(str(index), prompt, max_new_tokens=12)
        engine.submit(request, lambda event: found[event.id].extend(event.tokens))
    while engine.step():
        pass
    assert [found[str(index)] for index in range(3)] == plain
    place = Placement(Policy.parse("0 50 0 50 0 50"), jnp.float32)
    off = place.model(CFG, place.tree(jax.tree.map(lambda leaf: leaf, lm.params)), None)
    assert [one.tokens for one in off.generate(prompts, 12)] == plain


@pytest.mark.slow
def test_gradients_reach_every_parameter() -> None:
    lm, tokens, _ = model()
    lengths = jnp.full(2, 12, jnp.int32)
    loss = lambda p: jnp.mean(jl.logits(CFG, p, tokens[:, :12], lengths) ** 2)  # noqa: E731
    found = jax.jit(jax.grad(loss))(lm.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        assert np.isfinite(leaf).all() and np.any(leaf), path
