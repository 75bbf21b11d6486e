"""Rules of a grammar in Lark, as ``llguidance`` reads it, for a tokenizer.

    LarkRules(tokenizer).literal(text)     a text; special tokens in it are token ids
    LarkRules.up_to(rule, mark)            a rule: free text up to a mark, the mark included
    special_id(tokenizer, text)            the id of the special token with this spelling

A tokenizer's special tokens are no text to a grammar, so a mark that is one is written as its id.
"""

from __future__ import annotations

import json
import re

from jaxllama.text.tokenizer import Tokenizer
from jaxllama.typing import JsonObject

ANYTHING = r"/(.|\n)*/"
# Texts that may be special tokens: <|x|>, <x>, </x>, <|x>, <x|>, <|"|>, [X], and DeepSeek's bars.
_MARKS = re.compile(r'(</?\|?["\w:]+\|?>|<｜[^｜<>\s]+｜>|｜[^｜<>\s]+｜|\[/?[A-Z_]+\])')


def special_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of the special token with this spelling, or None."""
    index = tokenizer.id(text) if text else None
    return index if index is not None and not tokenizer.token_bytes(index) else None


def special_marks(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the special tokens that a text spells."""
    return [mark for mark in _MARKS.findall(text) if special_id(tokenizer, mark) is not None]


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_SLASH = re.compile(r"\\.|[/\n]", re.DOTALL)
_SPELT = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def regex_terminal(regex: str) -> str:
    """Return a terminal for a regular expression, which may have slashes, escaped or not."""
    return f"/{_SLASH.sub(lambda found: _SPELT.get(found[0], found[0]), regex)}/"


def tight(schema: JsonObject, is_lenient: bool = False) -> JsonObject:
    """Return a schema with at most one blank between tokens: a weak model would repeat blanks.

    is_lenient: the library ignores what it cannot enforce, instead of refusing it.
    """
    return {**schema, "x-guidance": {"whitespace_pattern": " ?", "lenient": is_lenient}}


class LarkRules:
    """Rules that refer to each other. The terminal TEXT is any text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: dict[str, str] = {}
        self._reserved = 0

    def __str__(self) -> str:
        rules = [f"{head}: {rule}" for head, rule in self._rules.items()]
        return "\n".join([*rules, f"TEXT: {ANYTHING}"])

    def add(self, name: str, rule: str) -> str:
        """Add a rule. Returns its name, which may have options in brackets."""
        self._rules[name] = rule
        return name.partition("[")[0]

    def new(self, rule: str, options: str = "") -> str:
        """Add a rule under a name of its own. Returns the name."""
        return self.add(f"r{len(self._rules)}{options}", rule)

    def reserve(self) -> str:
        """Return a name for a rule that is added later, so that rules may refer to themselves."""
        self._reserved += 1
        return f"v{self._reserved}"

    def terminal(self, pattern: str) -> str:
        """Add a terminal. Returns its name."""
        return self.add(f"T{len(self._rules)}", pattern)

    def literal(self, text: str) -> str:
        """Return a text; "" for none."""
        parts = []
        for part in _MARKS.split(text):
            index = special_id(self._tokenizer, part) if _MARKS.fullmatch(part) else None
            if index is not None:
                parts.append(f"<[{index}]>")
            elif part and parts and parts[-1].startswith('"'):
                parts[-1] = quoted(json.loads(parts[-1]) + part)
            elif part:
                parts.append(quoted(part))
        return " ".join(parts)

    def up_to(self, rule: str, mark: str) -> str:
        """Add a rule for text up to a mark, the mark included. Returns the rule's name."""
        if special_marks(self._tokenizer, mark):
            return self.add(rule, self.text_before(mark))
        return self.add(f"{rule}[lazy]", f"TEXT {quoted(mark)}")

    def text_before(self, end: str, text: str = "TEXT") -> str:
        """Return the text of a terminal that ends at the first ``end``, with that end."""
        special = special_marks(self._tokenizer, end)
        if not special:
            return self.new(f"{text} {quoted(end)}", "[lazy]")
        head, mark, tail = end.partition(special[0])
        if (
            head.strip()
        ):  # a terminal is as long as it can be, and what begins the end is part of it
            text = self.terminal(f"{text} {quoted(head)}")
        return f"{text} {self.literal(mark)} {self.literal(tail)}"
