"""Chat templates as published: the server and training show what transformers shows, answers end
with a stop token, and a call that a template writes is read back.

The templates are data beside the project. ``JAXLLAMA_CHAT_TEMPLATES`` names another folder.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.serving.api.bodies import Chat
from jaxllama.serving.api.calls import Prompts
from jaxllama.serving.api.reading import answer_reader, reading
from jaxllama.serving.api.schemas import ApiError
from jaxllama.serving.api.tools import offered
from jaxllama.serving.tools.formats import format_of
from jaxllama.text.chat.answers import answer_of
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training.conversations import examples_of

FOLDER = Path(
    os.environ.get("JAXLLAMA_CHAT_TEMPLATES")
    or Path(__file__).parents[3].parent / "shared" / "chat_templates"
)
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} has the templates")
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja")) if FOLDER.is_dir() else []
# Stop tokens of the families (their generation_config.json), the end of text first.
ENDS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "glm": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|endoftext|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "llama": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    "nemotron": ["<|im_end|>"],
    "phi": ["<|endoftext|>", "<|assistant|>", "<|end|>"],
    "qwen": ["<|im_end|>", "<|endoftext|>"],
}
MARK = re.compile(r"<\|\w+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>")


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "é", "parameters": parameters}
    return {"type": "function", "function": function}


def call(name: str, arguments: str | None, id: str = "call00001") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def calls(*made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made), **more}


def parts(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


TYPES = ("string", "integer", "boolean", "object", "array", "number")
FIELDS = {f"a_{kind}": {"type": kind} for kind in TYPES}
TOOLS = [tool("weather", {"city": {"type": "string"}, **FIELDS}), tool("now", {})]
SYSTEM = {"role": "system", "content": "Be brief."}
USER, THEN = {"role": "user", "content": "hi <b>"}, {"role": "user", "content": "and?"}
SAID = {"role": "assistant", "content": "Hello é"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "12"}
WEATHER = call("weather", '{"city": "Oslo", "a_integer": 2}')
THOUGHT = {"reasoning_content": "well"}
HISTORIES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "turns": ([SYSTEM, USER, SAID, THEN, SAID], False),
    "no system": ([USER, SAID], False),
    "developer": ([{**SYSTEM, "role": "developer"}, USER, SAID], False),
    "tools": ([SYSTEM, USER, SAID], True),
    "call": ([USER, calls(WEATHER), RESULT, SAID], True),
    "call after text": ([USER, {**calls(WEATHER), "content": "Let me see."}, RESULT, SAID], True),
    "no arguments": ([USER, calls(call("now", "{}")), RESULT, SAID], True),
    "blank arguments": ([USER, calls(call("now", "")), RESULT, SAID], True),
    "null arguments": ([USER, calls(call("now", "null")), RESULT, SAID], True),
    "nothing as arguments": ([USER, calls(call("now", None)), RESULT, SAID], True),
    "two calls": (
        [USER, calls(WEATHER, call("now", "{}", "call00002")), RESULT]
        + [{**RESULT, "tool_call_id": "call00002"}, SAID, THEN, SAID],
        True,
    ),
    "parts": (
        [parts("user", "hi"), parts("assistant", "yes"), parts("user", "a", "b"), SAID],
        False,
    ),
    "reasoning": ([USER, {**SAID, **THOUGHT}, THEN, {**SAID, **THOUGHT}], False),
    "reasoning and a call": ([USER, calls(WEATHER, **THOUGHT), RESULT, {**SAID, **THOUGHT}], True),
}


def tokenizer(name: str) -> Tokenizer:
    """Bytes, and the special tokens that the template spells."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    ends = next(ends for family, ends in ENDS.items() if name.startswith(family))
    backend = Tokenizer.byte_level()._backend
    backend.add_special_tokens(sorted({*MARK.findall(source), *ends, "<bos>"}))
    return Tokenizer(
        backend,
        f"folder/{name}.json",
        eos_ids=[backend.token_to_id(end) for end in ends],
        special_tokens={"bos_token": "<bos>", "eos_token": ends[0]},
        chat_template=source,
    )


class Model:
    """What ``Prompts`` needs of a model."""

    sampling = pooling = None
    adapters, n_classes = (), 0

    def __init__(self, own: Tokenizer) -> None:
        self.tokenizer = own
        self.config: Any = type("Config", (), {"vocab_size": own.vocab_size, "eos_token_ids": (0,)})


def served(own: Tokenizer, messages: list[dict[str, Any]], tools: bool, **more: Any) -> str:
    """The prompt of /v1/chat/completions, or why it is refused."""
    source = own.chat_template or ""
    more = {"tools": TOOLS, **more} if tools else more
    try:
        body = Chat.model_validate_json(json.dumps({"model": "m", "messages": messages, **more}))
        shown = offered(body, source)
        prompts = Prompts(Model(own), "m", 9999, 8)
        return prompts.chat_prompt(body, list(shown.shown) if shown else None).text
    except (ApiError, JaxLlamaError) as error:
        return f"400 {error}"


def expected(own: Tokenizer, messages: list[dict[str, Any]], tools: bool, **more: Any) -> list[str]:
    """What transformers makes of the messages in the template's own form, parts listed and joined.

    If the template refuses them, the reason.
    """
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    template = own.compiled_template(tools)
    found = []
    for joins in (False, True):
        plain = json.loads(json.dumps(messages))
        for message in plain:
            message["content"] = message["content"] or ""
            if message["role"] == "developer" and '"developer"' not in template.source:
                message["role"] = "system"
            if joins and isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
            for made in message.get("tool_calls", ()):
                arguments = json.loads(made["function"]["arguments"] or "{}") or {}
                is_text = template.takes_text_arguments
                made["function"]["arguments"] = json.dumps(arguments) if is_text else arguments
        more = {"add_generation_prompt": True, **more}
        try:
            [text], _ = utils.render_jinja_template(
                [plain],
                tools=TOOLS if tools else None,
                chat_template=own.chat_template,
                **own.special_tokens,
                **more,
            )
            found.append(text)
        except Exception as error:
            found.append(f"400 {own.name}: chat template: {error}")
    return found


def is_refused(own: Tokenizer) -> bool:
    """Whether the server refuses tools: the template shows none, or its calls are unknown."""
    return not own.compiled_template(True).shows_tools or format_of(own.chat_template or "") is None


@pytest.mark.parametrize("name", NAMES)
def test_the_server_shows_what_transformers_shows(name: str) -> None:
    own = tokenizer(name)
    for history, (messages, tools) in HISTORIES.items():
        tools = tools and not is_refused(own)
        for count in range(1, len(messages) + 1):
            asked = messages[:count]
            wants = expected(own, asked, tools)
            got = served(own, asked, tools)
            assert got in wants or got.startswith("400") and got in wants[1:], history
            assert str(FOLDER) not in got and "folder/" not in got
            if not got.startswith("400"):
                assert "None" not in got and "[{'" not in got and '\\"' not in got, history


@pytest.mark.parametrize("name", NAMES)
def test_any_text_is_continued(name: str) -> None:
    own = tokenizer(name)
    for text in (
        "Hello",
        "<",
        "im",
        "end",
        ">",
        "|",
        "I think ",
        " x\n",
        "hi <b>",
        "user",
        "<bos>",
    ):
        messages = [USER, SAID, THEN, {"role": "assistant", "content": text}]
        more = {"add_generation_prompt": False, "continue_final_message": True}
        [want, _] = expected(own, messages, False, **more)
        assert served(own, messages, False, continue_final_message=True) == want
    empty = served(own, [USER, {"role": "assistant", "content": ""}], False, **more)
    begun = served(own, [USER, {"role": "assistant", "content": "x"}], False, **more)
    assert begun == f"{empty}x"


@pytest.mark.parametrize("name", NAMES)
def test_training_learns_answers_behind_the_prompt_that_the_server_shows(name: str) -> None:
    own = tokenizer(name)
    switches = [{}, *({"chat_template_kwargs": {"enable_thinking": on}} for on in (True, False))]
    for history, (messages, tools) in HISTORIES.items():
        given = TOOLS if tools else None
        tools = tools and not is_refused(own)
        whole = expected(own, messages, tools)[-1]
        has_calls = any("tool_calls" in message for message in messages)
        if whole.startswith("400") or (has_calls and not own.compiled_template(tools).shows_calls):
            with pytest.raises(JaxLlamaError):
                list(examples_of({"messages": messages, "tools": given}, own))
            continue
        for count, message in enumerate(messages, start=1):
            if message["role"] != "assistant":
                continue
            head, answer = answer_of(messages[:count], own, given)
            learned = own.decode(answer, skip_special=False)
            assert answer[-1] in own.eos_ids, history
            assert not any(token in own.eos_ids for token in answer[:-1])
            assert "None" not in learned and "[{'" not in learned and '\\"' not in learned
            prompt = own.decode(head, skip_special=False)
            shown = [served(own, messages[: count - 1], tools, **more) for more in switches]
            # DeepSeek's template begins an answer with <think>, and writes it without.
            shown += [shown[0].removesuffix("<think>\n")] if name == "deepseekv3" else []
            assert prompt in shown, history


TEXTS = (
    *("Oslo", "a\nb", "\"a\" 'b'", "back\\slash", "{a: [1", "<b> < &", "é ☃ 🐍", "3"),
    *("true", " a ", ""),
)
ROUND = [name for name in NAMES if name not in ("lfm2", "llama3", "qwen2_5_vl")]


@pytest.mark.parametrize("name", ROUND)
def test_a_call_that_the_template_writes_is_read_back(name: str) -> None:
    own, draw = tokenizer(name), random.Random(name)
    source = own.chat_template or ""
    form = format_of(source)
    if form is None:
        assert not own.compiled_template(True).shows_calls
        return
    for text in TEXTS:
        values = (text, draw.randint(-9, 9), True, {"k": text, "n": None}, [1, text, False], 1.5)
        arguments = dict(zip(FIELDS, values, strict=True))
        for given, thought in ((arguments, {}), ({"city": text}, THOUGHT), ({}, {})):
            made = calls(call("weather", json.dumps(given)), **thought)
            head, answer = answer_of([USER, made], own, TOOLS)
            written = own.decode(answer[:-1], skip_special=False)
            body = Chat(model="m", messages=[USER], tools=TOOLS)
            tools = offered(body, source)
            assert tools is not None
            how = reading(source, own.decode(head, skip_special=False), tools)
            reader = answer_reader(how)
            read, place = [], 0
            while place < len(written):
                size = draw.randint(1, 9)
                read += reader.feed(written[place : place + size])
                place += size
            read += reader.close()
            of_kind = {
                kind: "".join(part.text for part in read if part.kind == kind)
                for kind in ("call", "arguments", "content", "reasoning")
            }
            assert of_kind["call"] == "weather", written
            assert json.loads(of_kind["arguments"]) == given, written
            assert not of_kind["content"].strip()
            assert of_kind["reasoning"] in ("", "well")
