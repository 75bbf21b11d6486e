"""Calls in tags: Qwen3-Coder and Qwen3.5, Seed-OSS, GLM, MiniMax M2, DeepSeek from V3.2 on.

    <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>

Strings stand in the tags as they are, other values as JSON. So the type that a tool's schema gives
an argument decides what a value is: a string, or the JSON that it spells. A value of no type is
JSON if it spells some. A value ends at the closing tag that another argument, or the call's end,
follows. So a value may contain tags, except that sequence.

Sources: the chat templates of Qwen3-Coder, GLM-4.5 and 4.7, MiniMax-M2; DeepSeek-V3.2's encoding.
"""

from __future__ import annotations

import dataclasses
import json
import re

from jaxllama.serving.tools.format import Functions
from jaxllama.serving.tools.lark import LarkRules, quoted, regex_terminal, tight
from jaxllama.serving.tools.parts import begun
from jaxllama.serving.tools.written import (
    LONGEST_NAME,
    Parse,
    Source,
    WrittenFormat,
    json_text,
    properties,
    required,
    resolved,
    spelt,
    types_of,
)
from jaxllama.typing import JsonObject

_BETWEEN_TAGS = re.compile(r"(?<=>)\s*(?=<)")
_NAME = "/[A-Za-z0-9_.-]{1,64}/"


@dataclasses.dataclass(frozen=True)
class MarkupFormat(WrittenFormat):
    """A format in tags.

    head, key: the text before and after a call's and an argument's name. close: after a value.
    tail: after the last argument. has_types: the key's tag says whether a value is a string.
    """

    head: tuple[str, str] = ("", "")
    key: tuple[str, str] = ("", "")
    close: str = ""
    tail: str = ""
    has_types: bool = False

    @property
    def spelling(self) -> str:
        return " ".join((super().spelling, *self.head, *self.key, self.close, self.tail))

    @property
    def bare_mark(self) -> str:
        return self.head[0].strip()

    # Reading

    def read(self, source: Source, functions: Functions) -> Parse[bool]:
        if not (yield from source.skip(self.head[0].strip())):
            return False
        yield from source.blanks()
        name = yield from source.name()
        if name not in functions or not (yield from source.skip(self.head[1].strip())):
            return False
        key = self.key[0].strip()
        ends = tuple(filter(None, (self.tail.strip(), self.end.strip())))
        yield from source.blanks()
        found = yield from source.next_of(key, *ends)
        if found is None:
            return False
        yield "call", name
        yield "arguments", "{"
        schema = functions[name]
        separator = ""
        end, *opening = _BETWEEN_TAGS.split(self.key[1].strip())
        while found == key:
            source.take(len(key))
            written = yield from source.up_to(end, LONGEST_NAME)
            if written is None or (opening and not (yield from source.skip(opening[0]))):
                break
            written = written.strip()
            yield "arguments", f"{separator}{json.dumps(written, ensure_ascii=False)}: "
            separator = ", "
            kinds = types_of(properties(schema).get(written, {}), schema)
            if self.has_types:
                kinds = yield from self._type(source, kinds)
            yield from self._value(source, kinds, (key, *ends))
            yield from source.blanks()
            found = yield from source.next_of(key, *ends)
        yield "arguments", "}"
        if self.tail.strip() and found is not None:
            yield from source.skip(self.tail.strip())
        return True

    def _type(self, source: Source, kinds: frozenset[str]) -> Parse[frozenset[str]]:
        """Read the rest of a tag that says whether the value is a string."""
        for text, found in ((' string="true">', {"string"}), (' string="false">', set())):
            if (yield from source.next_of(text)):
                source.take(len(text))
                return frozenset(found)
        yield from source.skip(">")
        return kinds

    def _value(self, source: Source, kinds: frozenset[str], behind: tuple[str, ...]) -> Parse[None]:
        """Read a value and its closing tag. behind: what may follow the tag."""
        lead = "\n" if self.key[1].endswith("\n") or self.close.startswith("\n") else ""
        if lead and (yield from source.next_of(lead)):
            source.take(1)
        is_text = kinds == frozenset(("string",))
        close, held = self.close.strip(), ""
        if is_text:
            yield "arguments", '"'
        while True:
            at = source.text.find(close)
            n = at if at >= 0 else len(source.text) - begun(source.text, (close,))
            said = held + source.take(n)
            held = ""
            if at >= 0:
                tag = source.take(len(close))
                blanks = yield from self._blanks_behind(source, behind)
                if blanks is None:
                    held = said + tag
                    if not is_text:
                        continue
                    said, held = held, ""
                else:
                    said = said.removesuffix("\n") if lead else said
                    text = json_text(said) if is_text else spelt(said, kinds)
                    yield "arguments", f'{text}"' if is_text else text
                    return
            if is_text:
                n_held = 1 if lead and said.endswith("\n") else 0
                held = said[len(said) - n_held :]
                yield "arguments", json_text(said[: len(said) - n_held])
            else:
                held = said
            if at < 0:
                yield from source.more()

    def _blanks_behind(self, source: Source, behind: tuple[str, ...]) -> Parse[str | None]:
        """Return the blanks behind a closing tag; None if what follows is part of the value."""
        n = 0
        while True:
            rest = source.text[n:]
            blanks = len(rest) - len(rest.lstrip())
            n, rest = n + blanks, rest[blanks:]
            if any(rest.startswith(text) for text in behind) or (source.is_over and not rest):
                return source.text[:n]
            if rest and not any(text.startswith(rest) for text in behind) or source.is_over:
                return None
            yield None

    # Grammar

    def rule(self, name: str, schema: JsonObject, is_lenient: bool, lark: LarkRules) -> str:
        parts = [lark.literal(f"{self.head[0]}{name}{self.head[1]}")]
        for key, value_schema in properties(schema).items():
            argument = self._argument(key, value_schema, schema, is_lenient, lark)
            parts.append(argument if key in required(schema) else f"{argument}?")
        if not properties(schema) and schema.get("additionalProperties") is not False:
            free = f"{lark.literal(self.key[0])} {_NAME} {lark.literal(self._key_end(True))}"
            parts.append(f"{lark.new(f'{free} {lark.text_before(self.close)}')}*")
        parts.append(lark.literal(self.tail))
        return " ".join(filter(None, parts))

    def _key_end(self, is_text: bool) -> str:
        return f'{self.key[1]} string="{str(is_text).lower()}">' if self.has_types else self.key[1]

    def _argument(
        self,
        key: str,
        value_schema: JsonObject,
        root: JsonObject,
        is_lenient: bool,
        lark: LarkRules,
    ) -> str:
        kinds = types_of(value_schema, root)
        is_text = "string" in kinds or not kinds
        head = lark.literal(f"{self.key[0]}{key}{self._key_end(is_text)}")
        schema = resolved(value_schema, root)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if is_text and isinstance(choices, list):
            texts = [c if isinstance(c, str) else json.dumps(c) for c in choices]
            value = lark.new(" | ".join(quoted(text) for text in texts))
            return lark.new(f"{head} {value} {lark.literal(self.close)}")
        if is_text:
            pattern = text_pattern(schema, is_lenient) if kinds == frozenset(("string",)) else None
            text = "TEXT" if pattern is None else lark.terminal(pattern)
            return lark.new(f"{head} {lark.text_before(self.close, text)}")
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        value = "%json " + json.dumps(tight({**shared, **value_schema}, is_lenient))
        return lark.new(f"{head} {value} {lark.literal(self.close)}")


def text_pattern(schema: JsonObject, is_lenient: bool) -> str | None:
    """Return a terminal for a string's pattern or length; None for any string.

    is_lenient: patterns, which may be beyond the library, are left out.
    """
    regex = schema.get("pattern")
    if isinstance(regex, str) and not is_lenient:
        begin = "" if regex.startswith("^") else "(.|\\n)*"
        end = "" if regex.endswith("$") and not regex.endswith("\\$") else "(.|\\n)*"
        body = regex.removeprefix("^")
        body = body if end else body.removesuffix("$")
        return regex_terminal(f"{begin}({body}){end}")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"/(.|\\n){{{least},{most}}}/" if least or most != "" else None


QWEN = MarkupFormat(
    "qwen-xml",
    ("<function=",),
    "<tool_call>\n",
    "\n</tool_call>",
    head=("<function=", ">\n"),
    key=("<parameter=", ">\n"),
    close="\n</parameter>\n",
    tail="</function>",
)
SEED = dataclasses.replace(
    QWEN,
    name="seed",
    marks=("<seed:tool_call>",),
    begin="<seed:tool_call>\n",
    end="\n</seed:tool_call>",
    key=("<parameter=", ">"),
    close="</parameter>\n",
)
_GLM = ("<tool_call>", "</tool_call>")
GLM_47 = MarkupFormat(
    "glm-4.7",
    ("</arg_key><arg_value>",),
    *_GLM,
    separator="",
    key=("<arg_key>", "</arg_key><arg_value>"),
    close="</arg_value>",
)
GLM = MarkupFormat(
    "glm",
    ("<arg_key>",),
    *_GLM,
    head=("", "\n"),
    key=("<arg_key>", "</arg_key>\n<arg_value>"),
    close="</arg_value>\n",
)
MINIMAX = MarkupFormat(
    "minimax",
    ("<minimax:tool_call>",),
    section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
    separator="",
    head=('<invoke name="', '">\n'),
    key=('<parameter name="', '">'),
    close="</parameter>\n",
    tail="</invoke>\n",
)


def _dsml(name: str, section: str) -> MarkupFormat:
    return MarkupFormat(
        name,
        (f"DSML｜{section}",),
        section=(f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>"),
        separator="",
        head=('<｜DSML｜invoke name="', '">\n'),
        key=('<｜DSML｜parameter name="', '"'),
        close="</｜DSML｜parameter>\n",
        tail="</｜DSML｜invoke>\n",
        has_types=True,
    )


DEEPSEEK_V32 = _dsml("deepseek-v3.2", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek-v4", "tool_calls")
