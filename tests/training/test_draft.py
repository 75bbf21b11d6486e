"""Training a head that drafts: its test-time steps are inference's, and a run writes the folder."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllama as jl
from jaxllama.errors import JaxLlamaError
from jaxllama.model import decoder, eagle3
from jaxllama.model.cache import init_cache
from jaxllama.model.records import Hidden
from jaxllama.training import draft, train
from jaxllama.training.batch import Batch
from jaxllama.training.estimate import estimate
from jaxllama.training.start import open_data
from tests.helpers.chat_cases import chat_model, chat_run, check_resumes, prompt_file
from tests.helpers.eagle_cases import CONFIG, drafter, model

WEIGHTS = "model.safetensors"


def config_of(folder, **changes):
    chat_model(folder, n_layers=3, layer_types=("attention",) * 3)  # with which the run begins
    lines = [{"prompt": f"say {n} and {n + 1}"} for n in range(12)]
    table = {
        "steps": 6,
        "microbatches": 1,
        "learning_rate": 0.01,
        "objective": {"kind": "draft"},
        "draft": {"vocab_size": 200, "depth": 3, "max_new_tokens": 12, "temperatures": [0.0]},
        "data": {"prompts": prompt_file(folder, lines), "validation_prompts": 2},
    }
    return chat_run(folder, **table | changes)


def test_a_test_time_step_is_a_step_of_inference(folder) -> None:
    """At each place of two packed sequences, of a random head beside a random model."""
    head = drafter().head
    config, own = config_of(folder), drafter().params
    rng = np.random.default_rng(0)
    tokens, begin = rng.integers(3, 256, (1, 14)).astype(np.int32), 8
    segments = (np.arange(14) >= begin).astype(np.int32)[None] + 1
    embedding = model().params["embed"]["weight"]
    params = {"embed": {"weight": embedding}, **own}
    cfg, depth = CONFIG.replace(taps=head.taps), config.drafting.depth

    @jax.jit
    def states(part):
        length = jnp.full((1,), part.shape[1], jnp.int32)
        return decoder.forward(cfg, model().params, part, length)[0]

    parts = [tokens[:, :begin], tokens[:, begin:]]
    hidden = [states(part) for part in parts]
    taps = jnp.concatenate([part.taps for part in hidden], axis=1)
    read = functools.partial(decoder.rows_of_table, embedding, dtype=jnp.float32)
    got = jax.jit(lambda: list(draft.unrolled(head, config, own, taps, tokens, segments, read)))()
    one = jnp.ones((1,), jnp.int32)

    @jax.jit
    def drafted(taps, following, n, after):
        """The outputs ``[depth, D]`` behind ``n`` read tokens and the true ones that follow."""
        cache = init_cache(head.layer_config, 1, 24, jnp.float32)
        before = Hidden(jnp.zeros((*following.shape, CONFIG.d_model)), taps)
        x, cache = head.forward(params, following, before, n, cache, is_prompt=True, fresh=True)
        last, found = x.last(n), []
        for step in range(depth):
            found.append(last.x[0])
            if step < depth - 1:
                x, cache = head.forward(
                    params, after[:, step][:, None], last[:, None], one, cache, is_own=True
                )
                last = x[:, 0]
        return jnp.stack(found)

    for first, part, state in zip((0, begin), parts, hidden, strict=True):
        length = part.shape[1]
        padded = np.pad(part, ((0, 0), (0, 12)))
        wide = jnp.pad(state.taps, ((0, 0), (0, 8 - length), (0, 0)))
        for t in range(length - depth):
            n = jnp.full((1,), t + 1, jnp.int32)
            after = padded[:, t + 2 : t + 2 + depth]
            want = np.asarray(drafted(wide, padded[:, 1:9], n, after))
            mine = np.stack([x[0, first + t] for x in got])
            np.testing.assert_allclose(mine, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_the_loss_is_its_formula(folder) -> None:
    """In float64, of one step: the divergence over the head's tokens where they hold the best."""
    head, own = drafter().head, drafter().params
    config = config_of(folder, draft={"depth": 1, "max_new_tokens": 12})
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, 256, (2, 9)).astype(np.int32)
    weights = np.ones((2, 8), np.float32)
    fixed = {"target": model().params, eagle3.TARGETS: own[eagle3.TARGETS]}
    batch = Batch(tokens, None, weights)
    loss, parts = draft.objective(head, CONFIG, config, own, fixed, batch)
    lengths = jnp.full((2,), 8, jnp.int32)
    hidden, _ = decoder.forward(
        CONFIG.replace(taps=head.taps), model().params, tokens[:, :-1], lengths
    )
    scores = np.asarray(decoder.logits(CONFIG, model().params, hidden), np.float64)
    targets = np.asarray(own[eagle3.TARGETS])
    read = functools.partial(
        decoder.rows_of_table, model().params["embed"]["weight"], dtype=jnp.float32
    )
    segments = np.ones((2, 8), np.int32)
    (x,) = draft.unrolled(
        head, config, own, hidden.taps, jnp.asarray(tokens[:, :-1]), segments, read
    )
    mine = np.asarray(head.scores(own, Hidden(x)).logits, np.float64)[:, :-1]
    theirs = scores[:, 1:][..., targets]
    counts = np.isin(scores[:, 1:].argmax(-1), targets)

    def log_softmax(x):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(theirs), log_softmax(mine)
    divergence = (np.exp(p) * (p - q)).sum(-1)
    assert counts.any() and not counts.all()
    np.testing.assert_allclose(loss, (divergence * counts).sum() / 16, rtol=1e-4)
    right = ((mine.argmax(-1) == theirs.argmax(-1)) & counts).sum() / 16
    np.testing.assert_allclose(parts["right_1"], right, rtol=1e-6)
    np.testing.assert_allclose(parts["tokens_a_pass"], 1 + right, rtol=1e-6)


@pytest.mark.slow
def test_a_run_learns_resumes_to_the_bit_and_its_head_drafts(folder) -> None:
    """Packed rows of the model's own answers, killed after step 3."""
    config = config_of(folder, validate_every=3, checkpoint_every=3, keep_checkpoints=2)
    whole = train(config, folder / "whole")
    losses = [row["loss"] for row in whole.metrics]
    assert losses[-1] < losses[0] and len(whole.validation) == 2
    assert {"right_1", "right_3", "tokens_a_pass"} <= whole.metrics[0].keys()
    again = check_resumes(config, whole, "model.safetensors", "checkpoints/6")
    assert [row["loss"] for row in again.metrics] == losses
    lm, head = jl.load(config.init_from), jl.load_drafter(whole.model)
    prompts = [f"say {n} and {n + 1}" for n in range(3)]
    want = lm.generate(prompts, 16)
    got = lm.generate(prompts, 16, draft=head, draft_tokens=3)
    assert [one.tokens for one in got] == [one.tokens for one in want]
    assert sum(one.accepted for one in got) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": {"rank": 2}}, "lora .* excludes objective.kind = draft"),
        ({"draft": {"depth": 0}}, "draft.depth = 0: must be at least 1"),
        ({"draft": {"temperatures": [1.0, -1.0]}}, "draft.temperatures .* must not be negative"),
        ({"draft": {"max_new_tokens": 64}}, "leaves no room for prompts"),
        ({"objective": {"kind": "grpo"}}, "draft .* is for objective.kind = draft"),
        ({"data": {"tokens": "x"}}, "'draft': needs data.prompts"),
    ],
)
def test_refusals_name_the_key(folder, change, message) -> None:
    with pytest.raises(JaxLlamaError, match=message):
        config_of(folder, **change)


def test_a_dry_run_answers_a_few_prompts(folder) -> None:
    config = config_of(folder)
    found = estimate(config, open_data(config))
    head = draft.head_of(config, "head", jl.load(config.init_from).config)
    weights = sum(int(np.prod(spec.shape)) for spec in eagle3.table(head).values())
    assert found.parameters == weights and head.model.vocab_size == 200
    assert found.state_bytes > 12 * weights and found.seconds > found.start_seconds > 0
