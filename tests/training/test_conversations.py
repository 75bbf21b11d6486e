"""Conversations as tokens: which of them are answers, and how rows are packed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.training import prompts
from jaxllama.training.conversations import Example, Unit, examples_of, read
from jaxllama.training.packing import Conversations, PackedRows, pack
from jaxllama.training.prompts import Prompt
from tests.helpers.chat_cases import END, FORGETFUL, TEMPLATE, say, tokenizer


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


CALLING = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for c in message.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% endfor %}",
)
QUESTION = {"role": "user", "content": "q"}
CALL = '{"name": "f", "arguments": {"a": 1}}'


def test_messages_in_openais_form_teach_what_the_server_shows():
    words = tokenizer(CALLING)
    for arguments in ('{"a": 1}', {"a": 1}):
        function = {"name": "f", "arguments": arguments}
        for call in (function, {"function": function}, {"id": "c", "function": function}):
            for content in ("", None):
                answer = {"role": "assistant", "content": content, "tool_calls": [call]}
                (example,) = examples_of({"messages": [QUESTION, answer]}, words)
                assert learned(example, words) == CALL + END
    for content in ("yes", [{"type": "text", "text": "yes"}], ["y", "es"]):
        answer = {"role": "assistant", "content": content, "tool_calls": None, "name": None}
        (example,) = examples_of({"messages": [QUESTION, answer]}, words)
        assert learned(example, words) == f"yes{END}"
    with pytest.raises(JaxLlamaError, match="does not show calls of tools, so none is learned"):
        list(
            examples_of({"messages": [QUESTION, {**answer, "tool_calls": [function]}]}, tokenizer())
        )


def test_a_prompt_for_a_reward_is_shown_with_its_tools():
    words, parts = tokenizer(), [{"type": "text", "text": "q"}]
    line = {"prompt": [{"role": "user", "content": parts}], "tools": [{"name": "f"}]}
    prompt = Prompt(prompts._tokens(line, words, 999), line)
    assert list(prompt.tokens) == words.encode_chat([QUESTION], tools=[{"name": "f"}])
    assert '"function": {"name": "f"}' in words.decode(prompt.tokens) and prompt.text == "q"


BARE = (  # as GLM's: the next role's token ends an answer
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{{ m.tool_calls[0].function.name if m.tool_calls }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ROLES = ["<|user|>", "<|tool|>", "<|assistant|>", "<|endoftext|>"]
TWO_ENDS = TEMPLATE.replace(
    "{% if add_gen", "{% if not add_generation_prompt %}<|endoftext|>{% endif %}{% if add_gen"
)


@pytest.mark.parametrize(
    ("ends", "after_text", "after_call"),
    [
        (["<|endoftext|>", "<|user|>", "<|tool|>"], "<|user|>", "<|tool|>"),
        (["<|endoftext|>", "<|user|>"], "<|user|>", "<|endoftext|>"),
        (["<|endoftext|>"], "<|endoftext|>", "<|endoftext|>"),
    ],
)
def test_an_answer_ends_with_a_stop_token_where_the_template_writes_none(
    ends, after_text, after_call
):
    words = tokenizer(BARE, ROLES, ends)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    result, said = {"role": "tool", "content": "1"}, {"role": "assistant", "content": "b"}
    found = list(examples_of({"messages": [QUESTION, call, result, said, QUESTION, said]}, words))
    texts = "".join(learned(example, words) for example in found)
    if len(ends) == 3:  # the conversation goes on with the token that ended the answer
        assert len(found) == 1
    assert f"f{after_call}" in texts and texts.count(f"b{after_text}") >= 2
    for example in found:
        text = words.decode(example.tokens.tolist(), skip_special=False)
        assert text.startswith("<|user|>\nq<|assistant|>\nf")


def test_an_answer_ends_with_its_first_stop_token():
    words = tokenizer(TWO_ENDS, ["<|endoftext|>"], [END, "<|endoftext|>"])
    line = say("a", "1")
    line["messages"] += say("b", "2")["messages"]
    (example,) = examples_of(line, words)
    assert learned(example, words) == f"1{END}2{END}"


def test_a_prompt_is_the_one_of_inference_though_the_template_rewrites_it_behind_an_answer():
    # As gpt-oss's: an earlier call's reasoning is dropped once the answer is there.
    later = "{% set last = messages[-1].role == 'assistant' %}"
    template = later + CALLING.replace(
        "{{ message.content }}",
        "{{ '' if last and message.tool_calls else message.thinking }}{{ message.content }}",
    )
    words = tokenizer(template)
    call = {"role": "assistant", "thinking": "hm", "tool_calls": [{"name": "f"}]}
    messages = [QUESTION, call, {"role": "tool", "content": "1"}]
    answer = {"role": "assistant", "content": "b"}
    *_, example = examples_of({"messages": [*messages, answer]}, words)
    prompt = words.encode_chat(messages)
    assert "hm" in words.decode(prompt)
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert words.decode(example.tokens[len(prompt) :].tolist(), skip_special=False) == f"b{END}"


def test_an_answer_that_the_template_begins_in_another_way():
    # As Nemotron's: an answer without reasoning follows the prompt without reasoning.
    begin = "{{ '<think>\n' if enable_thinking | default(true) else '<think></think>' }}{% endif %}"
    empty = "{{ '<think></think>' if message.role == 'assistant' }}{{ message.content }}"
    template = TEMPLATE.removesuffix("{% endif %}") + begin
    words = tokenizer(template.replace("{{ message.content }}", empty))
    (example,) = examples_of(say("q", "a"), words)
    assert learned(example, words) == f"a{END}"
    head = words.decode(example.tokens[~example.answers].tolist(), skip_special=False)
    assert head == words.apply_chat_template([QUESTION], enable_thinking=False)
    # As DeepSeek's: it always begins with <think>, and writes an answer without it.
    always = tokenizer(TEMPLATE.removesuffix("{% endif %}") + "<think>\n{% endif %}")
    for text in ("a", "<thi", "<think>"):
        (example,) = examples_of(say("q", text), always)
        assert learned(example, always) == f"{text}{END}"
    with pytest.raises(JaxLlamaError, match="does not write an answer behind its own prompt"):
        list(examples_of(say("q", "a"), tokenizer("{{ messages | length }}")))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: not JSON"),
        ('{"messages": [{"role": "user"}], "tools": [1]}', "line 2: tools: expected a list of obj"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], '
            '"completion": [{"role": "assistant"}]}',
            "line 2: content: a part of type 'image': only text is read",
        ),
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


def test_a_batch_does_not_walk_through_all_sequences():
    class Counted(list):
        walks = 0

        def __iter__(self):
            Counted.walks += 1
            return super().__iter__()

    units = Counted(Unit((Example.of(range(1, 4), range(100, 104)),)) for _ in range(64))
    rows = PackedRows(units, [[index] for index in range(64)], 17, 0)
    rows.batch(0, 8, 16, seed=3)
    walks = Counted.walks
    rows.batch(1, 8, 16, seed=3)
    assert walks == Counted.walks <= 2


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
