"""DPO, ORPO and KTO against their formulas in torch, and a run of each on tiny pairs."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.training import loss as loss_module
from jaxllama.training import train
from jaxllama.training.conversations import read
from jaxllama.training.loss import token_logprobs
from jaxllama.training.packing import PackedRows
from jaxllama.training.preference import objective, sequence_sums
from jaxllama.training.tuning import ObjectiveConfig
from tests.helpers.chat_cases import END, chat_run, check_resumes, say, tokenizer
from tests.helpers.models import relative_error

WEIGHTS = "adapter_model.safetensors"


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_formula(goal, sums, tokens, reference, labels):
    """The mean loss of the units, in float64, from the papers' equations."""
    losses, weights = [], []
    z = [s[1] - r[1] for s, r, label in zip(sums, reference, labels, strict=True) if label]
    z = max(0.0, float(np.mean(z)))
    for pair, (n_w, n_l), (r_w, r_l), label in zip(sums, tokens, reference, labels, strict=True):
        if not label:
            continue
        w, other = map(float, pair)
        if goal.kind == "dpo":
            value = -math.log(sigmoid(goal.beta * ((w - r_w) - (other - r_l))))
        elif goal.kind == "orpo":
            odds = [math.exp(m) / (1 - math.exp(m)) for m in (w / n_w, other / n_l)]
            value = -w / n_w - goal.beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
        elif label > 0:
            value = goal.desirable_weight * (1 - sigmoid(goal.beta * (w - r_w - z)))
        else:
            value = goal.undesirable_weight * (1 - sigmoid(goal.beta * (z - w + r_w)))
        losses.append(value)
        weights.append(abs(label))
    return np.dot(losses, weights) / len(labels)


@pytest.mark.parametrize("kind", ["dpo", "orpo", "kto"])
def test_losses_are_the_papers(kind):
    goal = ObjectiveConfig(kind, beta=0.3, desirable_weight=0.8, undesirable_weight=1.3)
    rng = np.random.default_rng(0)
    sums, reference = -rng.uniform(2, 9, (2, 6, 2)).astype(np.float32)
    tokens = rng.integers(2, 6, (6, 2)).astype(np.float32)
    labels = np.array([1.2, -1.2, 1.2, 0, -1.2, 1.2], np.float32)
    sums[3] = tokens[3] = reference[3] = 0  # a place without a unit
    operands = [x[None] for x in (sums, tokens, reference, labels)]
    (got, parts), grads = jax.jit(jax.value_and_grad(lambda *x: objective(goal, *x), has_aux=True))(
        *operands
    )
    assert got == pytest.approx(by_formula(goal, sums, tokens, reference, labels), rel=2e-6)
    assert np.isfinite(grads).all() and not np.any(grads[0, 3]) and np.any(grads[0, 0])
    assert 0 <= parts["accuracy"] <= 1


def test_log_probabilities_and_gradients_by_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK", 5)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 4, 8)).astype(np.float32)
    w = rng.normal(size=(11, 8)).astype(np.float32)
    targets = rng.integers(0, 11, (3, 4)).astype(np.int32)
    weights = rng.normal(size=(3, 4)).astype(np.float32)

    def plain(x, w):
        logits = 2 * jnp.tanh(x @ w.T / 2)
        found = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(found, targets[..., None], axis=-1)[..., 0]

    @jax.jit
    def both(x, w):
        chunked = lambda x, w: token_logprobs(x, w, targets, 2.0)  # noqa: E731
        of = [jax.vjp(f, x, w) for f in (chunked, plain)]
        return [(value, pull(weights)) for value, pull in of]

    (got, grads), (want, want_grads) = both(x, w)
    assert relative_error(got, want) < 1e-6
    for one, other in zip(grads, want_grads, strict=True):
        assert relative_error(one, other) < 2e-6


def test_sums_of_packed_pairs():
    segments = np.array([[1, 1, 2, 2, 2, 3, 4, 0]], np.int32)
    weights = np.array([[0, 1, 0, 1, 1, 1, 1, 0]], np.float32)
    logprobs = -np.arange(8, dtype=np.float32)[None]
    sums, tokens = sequence_sums(logprobs, weights, segments, 6)
    assert sums[0].tolist() == [[-1, -7], [-5, -6], [0, 0]]
    assert tokens[0].tolist() == [[1, 2], [1, 1], [0, 0]]


def pairs_file(folder, kind):
    lines = []
    for n in range(6):
        prompt = say(f"say {n}", "")["messages"][:1]
        good, bad = ([{"role": "assistant", "content": text}] for text in (f"{n}", "no"))
        if kind == "kto":
            lines += [
                {"prompt": prompt, "completion": good, "label": True},
                {"prompt": prompt, "completion": bad, "label": False},
            ]
        elif n % 2:
            lines.append({"chosen": prompt + good, "rejected": prompt + bad})
        else:
            lines.append({"prompt": prompt, "chosen": good, "rejected": bad})
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_pairs_of_a_file(tmp_path):
    words = tokenizer()
    units = [unit for line in read(pairs_file(tmp_path, "dpo"), words, "dpo") for unit in line]

    def answers(unit):
        return [
            words.decode(one.tokens[one.answers].tolist(), skip_special=False)
            for one in unit.examples
        ]

    assert [answers(unit) for unit in units] == [[f"{n}{END}", f"no{END}"] for n in range(6)]
    kto = [unit for line in read(pairs_file(tmp_path, "kto"), words, "kto") for unit in line]
    assert [unit.label for unit in kto] == [1.0, -1.0] * 6
    assert answers(kto[0]) == [f"0{END}", f"no{END}"]  # the other answer is the line before's
    rows = PackedRows.of(units, 2 * len(units[0]) + 3)
    batch = rows.batch(0, 2, rows.length - 1, seed=0)
    assert batch.labels.shape == (2, 2) and batch.reference.shape == (2, 2, 2)
    assert np.mean(batch.labels) == 1
    assert set(np.unique(batch.weights)) == {0, 1}
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(JaxLlamaError, match="line 1: expected chosen and rejected"):
        read(tmp_path / "wrong.jsonl", words, "dpo")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "orpo", "kto"])
def test_a_run_prefers_what_was_chosen_and_resumes_to_the_bit(kind, tmp_path):
    pairs = str(pairs_file(tmp_path, kind))
    config = chat_run(
        tmp_path,
        steps=12,
        sequence_length=128,
        learning_rate=0.02,
        validate_every=6,
        checkpoint_every=6,
        keep_checkpoints=2,
        lora={"rank": 4},
        objective={"kind": kind},
        data={"conversations": pairs, "validation_conversations": 2},
    )
    whole = train(config, tmp_path / "run")
    rows = whole.metrics
    if kind != "orpo":  # the first model is the reference itself
        assert rows[0]["loss"] == pytest.approx(math.log(2) if kind == "dpo" else 0.5, rel=1e-6)
        assert rows[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["margin"] > rows[0]["margin"] + 0.05
    assert rows[-1]["loss"] < rows[0]["loss"]
    again = check_resumes(config, whole, WEIGHTS, "checkpoints/12")
    for name in ("loss", "margin", "grad_norm"):
        assert [row[name] for row in again.metrics] == [row[name] for row in rows]
