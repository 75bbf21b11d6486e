"""Learning from rewards: what a reward is, the losses' formulas, runs that learn and resume."""

from __future__ import annotations

import numpy as np
import pytest

import jaxllama as jl
from jaxllama.errors import JaxLlamaError
from jaxllama.training import train
from jaxllama.training.policy import Answers, advantages, coefficients, gap
from jaxllama.training.rewards import reward_of
from jaxllama.training.tuning import ObjectiveConfig, RewardConfig
from tests.helpers.chat_cases import chat_run, check_resumes, prompt_file

SCHEMA = {"type": "object", "required": ["sum"], "properties": {"sum": {"type": "integer"}}}


def even(answer: str, line: dict) -> float:
    """Share of the answer's bytes that are even."""
    data = answer.encode()
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)


@pytest.mark.core
@pytest.mark.parametrize(
    ("config", "line", "right", "wrong"),
    [
        ({"kind": "exact"}, {"answer": "46"}, [" 46\n"], ["46.", "4 6", ""]),
        ({"kind": "regex", "pattern": r"\d+ ships"}, {}, ["two, no: 2 ships"], ["ships"]),
        (
            {"kind": "regex", "pattern": r"<answer>(.*?)</answer>"},
            {"answer": 46},
            ["I think\n<answer> 46 </answer>"],
            ["46", "<answer>47</answer>"],
        ),
        (
            {"kind": "arithmetic"},
            {"answer": "12 + 34 * (1/4) - -0.5"},
            ["It is 21.0", "20, no, 21"],
            ["21 or 22", "", "x", "1" * 5000],
        ),
        ({"kind": "arithmetic"}, {"answer": "1,234"}, ["1,234 or so", "1234.0"], ["1.234"]),
        ({"kind": "json_schema"}, {"schema": SCHEMA}, ['{"sum": 3}'], ['{"sum": "3"}', "{", "3"]),
        (
            {"kind": "function", "function": "tests.training.test_rewards:even"},
            {},
            ["bdf"],
            ["ace", ""],
        ),
    ],
)
def test_rewards(config, line, right, wrong):
    reward = reward_of(RewardConfig(**config))
    assert [reward(text, line) for text in right] == [1.0] * len(right)
    assert [reward(text, line) for text in wrong] == [0.0] * len(wrong)


def test_wrong_rewards_are_refused(tmp_path):
    (tmp_path / "bad.json").write_text('{"type": 3}')
    for config, message in (
        ({"kind": "regex", "pattern": "("}, "reward.pattern"),
        ({"kind": "json_schema", "schema": str(tmp_path / "bad.json")}, "bad.json.*not valid"),
        ({"kind": "json_schema", "schema": str(tmp_path / "no.json")}, "No such file"),
        ({"kind": "function", "function": "tests"}, 'expected "module:function"'),
        ({"kind": "function", "function": "tests:none"}, "has no attribute 'none'"),
    ):
        with pytest.raises(JaxLlamaError, match=message):
            reward_of(RewardConfig(**config))
    exact, sums = reward_of(RewardConfig("exact")), reward_of(RewardConfig("arithmetic"))
    with pytest.raises(JaxLlamaError, match="the line of 'x' has no 'answer'"):
        exact("1", {"prompt": "x"})
    for text in ("2**9", "f(1)", "1/0"):
        with pytest.raises(JaxLlamaError, match="no arithmetic"):
            sums("1", {"answer": text})
    mine = reward_of(RewardConfig("function", function="builtins:print"))
    with pytest.raises(JaxLlamaError, match="returned None, not a finite number"):
        mine("", {})


def some_answers(seed=0, rows=6, length=7):
    rng = np.random.default_rng(seed)
    begin, end = rng.integers(0, 3, rows), rng.integers(4, length + 1, rows)
    place = np.arange(length)
    own = ((place >= begin[:, None]) & (place < end[:, None])).astype(np.float32)
    old = (-rng.exponential(1.0, (rows, length))).astype(np.float32)
    near = lambda size: (old + rng.normal(0, size, old.shape)).astype(np.float32)  # noqa: E731
    rewards = rng.normal(size=rows).astype(np.float32)
    return near(0.2), Answers(own, old, near(0.3), near(0.4), rewards)


def by_formula(goal, samples, cap, new, answers):
    """The loss in float64, from the papers' equations, one answer and token after the other."""
    rows, total, count = len(new), 0.0, 0.0
    masks = [np.flatnonzero(row) for row in answers.is_answer]
    new, old, ref, sampled, reward = (
        np.asarray(part, np.float64)
        for part in (new, answers.old, answers.reference, answers.sampled, answers.rewards)
    )
    drift = old - ref
    if goal.kind == "reinforce++":
        values = [
            [reward[i] - goal.beta * sum(drift[i, s] for s in masks[i] if s >= t) for t in masks[i]]
            for i in range(rows)
        ]
        flat = np.concatenate(values)
        gains = [[(v - flat.mean()) / np.sqrt(flat.var() + 1e-8) for v in row] for row in values]
    else:
        gains = []
        for i in range(rows):
            first = i // samples * samples
            group = list(range(first, first + samples))
            if goal.kind == "grpo":
                spread = np.std(reward[group], ddof=1) + 1e-4
                gain = (reward[i] - reward[group].mean()) / spread
            else:
                whole = [reward[j] - goal.beta * drift[j][masks[j]].sum() for j in group]
                others = [value for j, value in zip(group, whole, strict=True) if j != i]
                gain = whole[i - first] - np.mean(others)
            gains.append([gain] * len(masks[i]))
    for i in range(rows):
        mine = 0.0
        for gain, t in zip(gains[i], masks[i], strict=True):
            ratio = np.exp(new[i, t] - old[i, t])
            if goal.kind == "rloo":
                ratio = np.exp((new[i] - old[i])[masks[i]].sum())
            inside = min(max(ratio, 1 - goal.clip), 1 + goal.clip)
            value = min(ratio * gain, inside * gain)
            value *= min(np.exp(old[i, t] - sampled[i, t]), cap) if cap else 1
            if goal.kind == "grpo":
                above = ref[i, t] - new[i, t]
                value -= goal.beta * (np.exp(above) - above - 1)
            mine += value
        n = len(masks[i])
        total, count = (
            (total + mine, count + n) if goal.kind == "reinforce++" else (total + mine / n, rows)
        )
    return -total / count


@pytest.mark.parametrize("cap", [0.0, 1.3])
@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce++"])
def test_losses_are_the_papers(kind, cap):
    goal, samples = ObjectiveConfig(kind, beta=0.3, clip=0.1), 3
    new, answers = some_answers()
    change, parts = coefficients(goal, samples, cap, new, answers)
    want = by_formula(goal, samples, cap, new, answers)
    np.testing.assert_allclose(parts["loss"], want, rtol=2e-6)
    assert parts["clipped"] > 0
    # The derivative along a direction, by differences.
    rng = np.random.default_rng(1)
    step = 1e-5 * rng.normal(size=new.shape)
    ends = [by_formula(goal, samples, cap, new + sign * step, answers) for sign in (1, -1)]
    np.testing.assert_allclose(np.sum(change * step), (ends[0] - ends[1]) / 2, rtol=2e-4)
    assert not np.any(np.asarray(change)[answers.is_answer == 0])


def test_the_first_update_is_the_policy_gradient():
    """With new = old and no reference, a token's coefficient is its advantage's share."""
    new, answers = some_answers()
    answers = answers._replace(reference=None)
    goal = ObjectiveConfig("grpo", beta=0.0)
    change, parts = coefficients(goal, 3, 0.0, answers.old, answers)
    gains = np.asarray(advantages(goal, 3, answers))
    own = answers.is_answer
    np.testing.assert_allclose(change, -gains * own / own.sum(1, keepdims=True) / 6, rtol=1e-6)
    assert parts["clipped"] == parts["kl"] == 0
    measured = gap(answers)
    difference = (answers.old - answers.sampled)[own > 0].astype(np.float64)
    np.testing.assert_allclose(measured["gap_max"], np.abs(difference).max(), rtol=1e-6)
    want = np.mean(np.exp(difference) - 1 - difference)
    np.testing.assert_allclose(measured["gap_kl"], want, rtol=1e-5)


def config_of(folder, **changes):
    lines = [{"prompt": f"{n:02}"} for n in range(12)]
    lines[0] = {"prompt": [{"role": "user", "content": "a|b"}]}
    table = {
        "steps": 4,
        "batch_size": 8,
        "learning_rate": 0.01,
        "objective": {"kind": "grpo", "beta": 0.01},
        "data": {"prompts": prompt_file(folder, lines), "validation_prompts": 3},
        "rollout": {"samples": 4, "max_new_tokens": 6},
        "reward": {"kind": "function", "function": "tests.training.test_rewards:even"},
    }
    return chat_run(folder, **table | changes)


UNTIMED = ("loss", "reward", "length", "kl", "entropy", "gap_max", "gap_kl", "grad_norm")


def numbers(result):
    return [[row[key] for key in UNTIMED] for row in result.metrics]


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(folder):
    """Killed after step 2, in the middle of answers that are used for two updates each."""
    options = {"samples": 4, "max_new_tokens": 6, "updates": 2}
    config = config_of(
        folder, validate_every=2, checkpoint_every=2, keep_checkpoints=2, rollout=options
    )
    whole = train(config, folder / "whole")
    assert [row["step"] for row in whole.validation] == [0, 2, 4]
    assert all(row["gap_max"] < 1e-4 and row["entropy"] > 0 for row in whole.metrics)
    page = (folder / "whole/samples.md").read_text()
    assert "| 0 |" in page and "| 4 |" in page
    again = check_resumes(config, whole, "model.safetensors", "checkpoints/4")
    assert numbers(again) == numbers(whole)
    assert (again.directory / "samples.md").read_text() == page
    assert jl.load(again.model).config.n_layers == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("grpo", {}),
        ("rloo", {}),
        ("reinforce++", {"scan": True}),
    ],
)
def test_a_run_learns(kind, changes, folder):
    """More even bytes, from rewards alone; with stacked layers too."""
    config = config_of(
        folder, steps=30, objective={"kind": kind, "beta": 0.001}, batch_size=32, **changes
    )
    result = train(config, folder / f"learn-{kind}")
    rewards = [row["reward"] for row in result.metrics]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert result.metrics[-1]["kl"] > 0 == pytest.approx(result.metrics[0]["kl"], abs=1e-9)


@pytest.mark.slow
def test_the_engine_samples_with_the_trained_adapters(folder):
    config = config_of(folder, lora={"rank": 4, "alpha": 8.0, "base": "w4a16-g16"})
    result = train(config, folder / "lora")
    assert result.metrics[-1]["kl"] > 1e-4
    assert all(row["gap_max"] < 1e-4 for row in result.metrics)
    assert result.model.name == "adapter"


@pytest.mark.slow
def test_the_deterministic_policy_is_the_engine(folder):
    """The old log-probabilities are the sampled ones, and those after an update the engine's."""
    options = {"samples": 4, "max_new_tokens": 6, "updates": 2, "deterministic": True}
    result = train(config_of(folder, rollout=options), folder / "deterministic")
    options["sleep"] = True
    assert numbers(train(config_of(folder, rollout=options), folder / "slept")) == numbers(result)
    few = {**options, "slots": 3}
    assert numbers(train(config_of(folder, rollout=few), folder / "few")) == numbers(result)
    assert all(row["gap_max"] == row["gap_kl"] == 0 for row in result.metrics)
    assert all(np.isfinite(row["loss"]) for row in result.metrics)
