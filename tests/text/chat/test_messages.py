"""Messages in all the forms that clients and files have, as templates get them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.text.chat.prompt_text import MARKS
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers.chat_cases import END, START, tokenizer

USER = {"role": "user", "content": "q"}
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}(ARGUMENTS){% endfor %}{% endfor %}"
)
LISTED = CALLS.replace(
    "ARGUMENTS", "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
)
AS_JSON = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
JOINED = CALLS.replace("ARGUMENTS", "{{ 'f' + c.function.arguments }}")
TILDE = CALLS.replace("ARGUMENTS", "{{ 'f' ~ c.function.arguments }}")


def shown(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return tokenizer(template).apply_chat_template(messages, **more)


def called(arguments: object, **more: Any) -> list[dict[str, Any]]:
    function = {"name": "now", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function, **more}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("arguments", ["", "null", " ", "{}", {}, None])
def test_a_call_without_arguments_has_an_empty_object(arguments: object) -> None:
    assert shown(LISTED, called(arguments)) == "now()"
    assert shown(AS_JSON, called(arguments)) == "now({})"
    assert shown(JOINED, called(arguments)) == shown(TILDE, called(arguments)) == "now(f{})"


def test_arguments_are_an_object_or_text_as_the_template_takes_them() -> None:
    for arguments in ('{"a": "é"}', {"a": "é"}):
        assert shown(LISTED, called(arguments)) == "now(a=é)"
        assert shown(AS_JSON, called(arguments)) == 'now({"a": "é"})'
        assert shown(JOINED, called(arguments)) == shown(TILDE, called(arguments))
        assert shown(JOINED, called(arguments)) == 'now(f{"a": "é"})'
    assert shown(JOINED, called('{"a":1 }')) == 'now(f{"a":1 })'  # the client's own spelling
    assert shown(AS_JSON, called("{half")) == 'now("{half")'
    with pytest.raises(JaxLlamaError, match="Can only get item pairs from a mapping"):
        shown(LISTED, called("{half"))


def test_calls_in_other_forms() -> None:
    flat = [USER, {"role": "assistant", "tool_calls": [{"name": "now", "arguments": '{"a": 1}'}]}]
    assert shown(AS_JSON, flat) == 'now({"a": 1})'
    assert shown("{{ messages[1].tool_calls[0].type }}", flat) == "function"
    assert shown("{{ 'tool_calls' in messages[1] }}", [USER, {**USER, "tool_calls": []}]) == "False"
    with pytest.raises(JaxLlamaError, match="a call needs a function with a name"):
        shown(AS_JSON, [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}])
    with pytest.raises(JaxLlamaError, match="tool_calls: expected a list"):
        shown(AS_JSON, [USER, {"role": "assistant", "tool_calls": "now"}])


def test_a_result_has_the_name_of_its_function() -> None:
    results = [*called("{}"), {"role": "tool", "tool_call_id": "c1", "content": {"a": [1, "é"]}}]
    assert shown("{{ messages[2].name }}: {{ messages[2].content }}", results) == (
        'now: {"a": [1, "é"]}'
    )
    named = [*results[:2], {**results[2], "name": "own"}]
    assert shown("{{ messages[2].name }}", named) == "own"


LAST = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
EACH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for p in m.content %}{{ p.text | trim }}{{ '\n' if not loop.last }}{% endfor %}"
    "{% endif %}|{% endfor %}"
)


def test_parts_are_listed_for_a_template_that_shows_them_and_joined_for_others() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert shown(LAST, [{"role": "user", "content": parts}]) == "[a b]"
    assert shown(EACH, [{"role": "user", "content": parts}]) == "a\nb|"
    assert shown(LAST, [{"role": "user", "content": parts[1:]}, {"role": "assistant"}]) == "[b][]"
    assert shown(LAST, [{"role": "user", "content": ["a", "b"]}]) == "[ab]"
    dropped = "{% for m in messages %}{{ m.content if m.content is string }}{% endfor %}"
    assert shown(dropped, [{"role": "user", "content": parts}]) == "a b"
    for content, why in (
        ([{"type": "image_url", "image_url": {}}], "a part of type 'image_url': only text is read"),
        ([{"type": "text"}], "a part of type 'text' needs a text"),
        (5, "content = '5': expected text or a list of parts"),
    ):
        with pytest.raises(JaxLlamaError, match=why):
            shown(LAST, [{"role": "user", "content": content}])


@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_name(sent: str, read: str) -> None:
    messages = [USER, {"role": "assistant", "content": "a", sent: "why"}]
    assert shown(f"{{{{ messages[1].{read} }}}}", messages) == "why"
    assert shown(f"{{{{ messages[0].{read} is defined }}}}", messages) == "False"


def test_the_role_developer_is_shown_as_the_template_knows_it() -> None:
    roles = "{% for m in messages %}{{ m.role }}{% endfor %}"
    messages = [{"role": "developer", "content": "x"}]
    assert shown(roles, messages) == "system"
    assert shown(roles + "{{ messages[0].role == 'developer' }}", messages) == "developerTrue"


def test_what_a_template_shows_is_found_by_small_chats() -> None:
    tools = "{% if tools %}{{ tools | tojson }}{% endif %}"
    system = "{% if messages[0].role == 'system' %}" + tools + "{% endif %}"
    refusing = "{{ raise_exception('no') }}"
    alternating = "{% if messages[0].role != 'user' %}" + refusing + "{% endif %}"
    for template, shows in (
        (tools, True),
        (system, True),
        (alternating + tools, True),
        (refusing, True),  # the template itself says why
        (LAST, False),
        (alternating, False),
    ):
        assert tokenizer(template).compiled_template(True).shows_tools == shows, template
    for template, shows in ((LAST, False), (AS_JSON, True), (JOINED, True), (refusing, True)):
        assert tokenizer(template).compiled_template(True).shows_calls == shows, template


def test_tools_in_any_form() -> None:
    function = {"name": "f", "description": None, "parameters": {"default": None}}
    for tools in ([function], [{"type": "function", "function": function, "strict": None}]):
        assert json.loads(shown("{{ tools[0] | tojson }}", [USER], tools=tools)) == {
            "type": "function",
            "function": {"name": "f", "parameters": {"default": None}},
        }
    assert shown("{{ tools is none }}", [USER], tools=[]) == "True"
    sorted_keys = {"description": "d", "name": "f", "parameters": {}, "return": {"type": "string"}}
    text = shown("{{ tools[0] | tojson }}", [USER], tools=[{"function": sorted_keys, "x": 1}])
    assert text == json.dumps(
        {
            "type": "function",
            "function": {"name": "f", **{k: sorted_keys[k] for k in ("description", "parameters")}}
            | {"return": {"type": "string"}},
        }
    )


JSON_CASES = [
    ("ensure_ascii=False", '{"b": "é<", "a": 1}'),
    ("ensure_ascii=True", '{"b": "\\u00e9<", "a": 1}'),
    ("sort_keys=True", '{"a": 1, "b": "é<"}'),
    ("separators=(',', ':')", '{"b":"é<","a":1}'),
    ("indent=1", '{\n "b": "é<",\n "a": 1\n}'),
    ("ensure_ascii=False, indent=None", '{"b": "é<", "a": 1}'),
]


@pytest.mark.parametrize(("keywords", "text"), JSON_CASES)
def test_keywords_of_tojson(keywords: str, text: str) -> None:
    template = "{{ messages[0].value | tojson(KEYWORDS) }}".replace("KEYWORDS", keywords)
    assert shown(template, [{**USER, "value": {"b": "é<", "a": 1}}]) == text


def test_what_a_message_spells_stays_text_in_escaped_json() -> None:
    own = tokenizer(START + "{{ messages[0] | tojson(ensure_ascii=True) }}" + END)
    ids = own.encode_chat([{"role": "user", "content": f"é{END}🐍"}])
    assert [token for token in ids if token in (256, 257)] == [256, 257]
    text = own.decode(ids, skip_special=False)
    assert json.loads(text.removeprefix(START).removesuffix(END))["content"] == f"é{END}🐍"


def test_a_generation_block_is_a_scope_of_its_own() -> None:
    block = "{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}"
    assert shown("{% set x = 1 %}" + block + "{{ x }}", [USER]) == "21"


def test_a_text_with_every_mark_is_refused_in_words() -> None:
    with pytest.raises(JaxLlamaError, match="every character with which a prompt could be marked"):
        tokenizer(LAST).encode_chat([{"role": "user", "content": "".join(MARKS) + END}])


TWICE = "{% for m in messages %}{{ m.content | trim }};{{ m.content }}{% endfor %}" + END


@pytest.mark.parametrize("text", ["", "<", "im", END, START, " a ", "a" * 3, "\ufdd0", ";"])
def test_a_message_is_continued_whatever_it_says(text: str) -> None:
    own = tokenizer()
    messages = [USER, {"role": "assistant", "content": text}]
    prompt = own.chat_prompt(messages, continue_final_message=True)
    head = f"{START}user\nq{END}\n{START}assistant\n"
    assert prompt.text == head + text
    ids = own.encode_prompt(prompt)
    assert sum(token in (256, 257) for token in ids) == 3, "what the text spells is text"
    twice = tokenizer(TWICE).chat_prompt(messages[1:], continue_final_message=True)
    assert twice.text == f"{text.strip()};{text}"
    hidden = tokenizer("{{ messages[0].content }}")
    with pytest.raises(JaxLlamaError, match="does not show the last message's text"):
        hidden.chat_prompt(messages, continue_final_message=True)
    with pytest.raises(JaxLlamaError, match="does not show the last message's text"):
        own.chat_prompt([], continue_final_message=True)


def test_a_trimmed_text_is_continued_without_its_last_blanks() -> None:
    trimmed = "{% for m in messages %}" + START + "\n{{ m.content | trim }}" + END + "{% endfor %}"
    own = tokenizer(trimmed)
    for text, shown in ((" a b \n", "a b"), ("", ""), ("  ", "")):
        messages = [{"role": "assistant", "content": text}]
        assert own.chat_prompt(messages, continue_final_message=True).text == f"{START}\n{shown}"


def test_an_error_names_no_folder() -> None:
    own = Tokenizer(
        Tokenizer.byte_level()._backend,
        "/srv/models/secret/tokenizer.json",
        chat_template="{{ raise_exception('Roles must alternate') }}",
    )
    with pytest.raises(JaxLlamaError) as caught:
        own.encode_chat([USER])
    assert str(caught.value) == "tokenizer.json: chat template: Roles must alternate"
