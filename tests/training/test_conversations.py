"""Conversations as tokens: which of them are answers, and how rows are packed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.training.conversations import Example, Unit, examples_of, read
from jaxllama.training.packing import Conversations, PackedRows, pack
from tests.helpers.chat_cases import END, FORGETFUL, say, tokenizer


def learned(example: Example, words) -> str:
    return words.decode(example.tokens[example.answers].tolist(), skip_special=False)


def test_only_answers_are_learned_and_the_prompt_is_that_of_inference():
    words = tokenizer()
    line = say("hi", "hello")
    line["messages"] += say("and?", f"no {END} here")["messages"]
    (example,) = examples_of({**line, "tools": [{"name": "f"}]}, words)
    assert learned(example, words) == f"hello{END}no {END} here{END}"
    assert np.sum(example.tokens[example.answers] == 257) == 2  # what a message spells is text
    prompt = words.encode_chat(line["messages"][:3], tools=[{"name": "f"}])
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert not example.answers[: len(words.encode_chat(line["messages"][:1]))].any()


def test_a_template_that_forgets_gives_an_example_for_each_answer():
    words = tokenizer(FORGETFUL)
    line = say("a", "x</think>1")
    line["messages"] += say("b", "y</think>2")["messages"]
    first, second = examples_of(line, words)
    assert learned(first, words) == f"x</think>1{END}"
    assert learned(second, words) == f"y</think>2{END}"
    assert "x</think>" not in words.decode(second.tokens.tolist())


def test_prompts_with_completions():
    words = tokenizer()
    (plain,) = examples_of({"prompt": "2 + 2 =", "completion": " 4"}, words)
    assert learned(plain, words) == f" 4{END}"
    messages = say("a", "no")["messages"]
    line = {"prompt": messages, "completion": say("b", "yes")["messages"]}
    (example,) = examples_of(line, words)
    assert learned(example, words) == f"yes{END}"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object"),
        ("{}", "line 2: expected messages, or prompt and completion"),
        ('{"messages": [1]}', "line 2: messages: expected objects with a role, not '1'"),
        ('{"messages": [{"role": "user", "content": ""}]}', "line 2: no message of the assistant"),
    ],
)
def test_a_wrong_line_is_named(line, why, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps(say("a", "b")) + "\n" + line + "\n")
    with pytest.raises(JaxLlamaError, match=why):
        read(path, tokenizer())


def test_rows_are_filled_by_best_fit():
    assert pack([3, 7, 5, 2, 4], 10) == [[1, 0], [2, 4], [3]]
    sizes = np.random.default_rng(0).integers(1, 30, 300).tolist()
    rows = pack(sizes, 64)
    assert sorted(index for row in rows for index in row) == list(range(300))
    assert all(sum(sizes[index] for index in row) <= 64 for row in rows)
    assert sum(sizes) / (64 * len(rows)) > 0.97


def test_rows_too_short_for_every_answer_are_named():
    words = tokenizer()
    units = list(examples_of(say("a long question", "yes"), words))
    data = Conversations(words, [[Unit((one,))] for one in units], "", length=9)
    with pytest.raises(JaxLlamaError, match="sequence_length = 8: no answer of the 1 lines"):
        data.split(0)


def test_a_batch_has_every_answer_once_an_epoch_and_weights_of_mean_one():
    examples = [Example.of(range(1, n), range(100, 100 + n)) for n in range(2, 9)]
    units = [Unit((example,)) for example in examples]
    rows = PackedRows.of(units, 17)
    seen = np.zeros(200, int)
    for step in range(len(rows)):
        batch = rows.batch(step, 1, 16, seed=3)
        assert np.mean(batch.weights) == pytest.approx(1)
        assert np.array_equal(batch.weights > 0, (batch.tokens[:, 1:] >= 100))
        np.add.at(seen, batch.tokens[:, 1:][batch.weights > 0], 1)
        ends = batch.segments[:, 1:] != batch.segments[:, :-1]
        assert not (batch.weights[ends] > 0).any()
        begins = batch.begins[batch.begins >= 0]
        assert begins.tolist() == [0, *(np.nonzero(ends[0])[0] + 1)]
    want = [sum(len(example.answers.nonzero()[0]) > n for example in examples) for n in range(8)]
    assert seen[100:108].tolist() == want
    again = rows.batch(len(rows) + 1, 2, 16, seed=3)
    assert np.array_equal(again.tokens, rows.batch(len(rows) + 1, 2, 16, seed=3).tokens)
    (held, last) = list(rows.validation(len(rows) - 1, 16))
    assert held.tokens.shape == last.tokens.shape
    assert last.weights[1:].sum() == 0
    alone = PackedRows.of(units, 5, is_packed=False)  # longer ones lose their end
    assert len(alone) == 4 and alone.cut == 5
