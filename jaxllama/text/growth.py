"""Bounds on what a stranger's tokenizer may do to a text.

    check_growth(raw, source)             of tokenizer.json, before the library reads it
    check_markers(spellings, source)      of the tokens that structure conversations

A few lines of JSON can ask for a text that no machine holds: twelve replacements of one letter by
ten, or a template that repeats the text. ``check_growth`` computes how many letters may come of
one, and refuses a file whose bound is above ``GROWTH``. The file is scanned for the four keys with
such steps and not parsed, since a vocabulary is large.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable

from jaxllama.errors import JaxLlamaError
from jaxllama.files import parse_object, short
from jaxllama.typing import JsonObject

# Letters of one letter. The strongest in use, SentencePiece's NFKC table, makes 18.
GROWTH = 256
LONGEST = 200  # letters of a marker; those in use have some 30
_MARKERS = 1 << 21  # letters of all markers together; the most in use are some 600,000
_KEYS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_NESTED = ("normalizers", "pretokenizers", "processors", "decoders")
_UTF8_BYTES = 4  # of a letter, which byte-level steps write as so many letters


def check_growth(raw: bytes, source: str) -> None:
    """Raise JaxLlamaError if a text could grow beyond measure; other faults are left to others."""
    text = raw.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    for match in _KEY.finditer(text):
        if text[match.end() : match.end() + 1] != "{":
            continue
        try:
            end = decoder.raw_decode(text, match.end())[1]
        except (ValueError, RecursionError) as error:
            raise JaxLlamaError(f"{source}: not a tokenizer: {error}") from None
        step = parse_object(text[match.end() : end].encode("utf-8", "replace"), source)
        growth = _growth(step)
        if growth > GROWTH:
            key = json.loads(match[0][: match[0].rindex(":")])
            raise JaxLlamaError(
                f"{source}: its {key} may make {growth:.0e} letters of one; "
                f"at most {GROWTH} are supported"
            )


def check_markers(spellings: Iterable[str], source: str) -> None:
    """Raise JaxLlamaError if the spellings are too long to look for in every message."""
    total = 0
    for spelling in spellings:
        total += len(spelling)
        if len(spelling) > LONGEST or total > _MARKERS:
            raise JaxLlamaError(
                f"{source}: the special token {short(spelling)} has {len(spelling)} letters, "
                f"at most {LONGEST} are supported, and {_MARKERS} of all tokens together"
            )


def _spelled(key: str) -> str:
    """Return a pattern for a key whose letters JSON may write as escapes."""
    return "".join(rf"(?:{letter}|\\u(?i:{ord(letter):04x}))" for letter in key)


_KEY = re.compile(rf'"({"|".join(map(_spelled, _KEYS))})"\s*:\s*')


def _growth(step: JsonObject) -> float:
    """Return a bound on the letters, or copies of a text, that one becomes."""
    steps = next((step[key] for key in _NESTED if isinstance(step.get(key), list)), None)
    if steps is None:
        return _growth_of_one(step)
    total, written, may_be_any = 1.0, "", False  # letters that have grown
    for inner in (inner for inner in steps if isinstance(inner, dict)):
        factor, pattern = _growth(inner), _replaced(inner)
        # A replacement of letters that have not grown makes no more of those that have.
        is_apart = pattern is not None and not may_be_any and not set(pattern) & set(written)
        total = max(total, factor) if is_apart else total * factor
        if pattern is not None:
            written += str(inner.get("content"))
        elif total > 1:
            may_be_any = True
    return total


def _replaced(step: JsonObject) -> str | None:
    """Return the text that a step replaces; None for a step of another kind."""
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return text if step.get("type") == "Replace" and isinstance(text, str) and text else None


def _growth_of_one(step: JsonObject) -> float:
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = _replaced(step), len(str(step.get("content")))
        # A regular expression may match between any two letters.
        return 1 + content if pattern is None else max(1, content / len(pattern))
    if kind == "Prepend":  # to every piece between two special tokens
        return 1 + len(str(step.get("prepend")))
    if kind == "Precompiled":
        return _longest_piece(str(step.get("precompiled_charsmap")))
    if kind == "ByteLevel":
        return _UTF8_BYTES
    if kind == "TemplateProcessing":
        return max(_pieces(step, "single"), _pieces(step, "pair"))
    return 1


def _longest_piece(charsmap: str) -> int:
    """Return the letters of the longest text in SentencePiece's table of replacements.

    The table is the size of an index in 4 bytes, the index, and texts that end with a zero byte.
    """
    try:
        table = base64.b64decode(charsmap)
    except ValueError:
        return len(charsmap)
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))


def _pieces(step: JsonObject, key: str) -> int:
    """Return how many texts and special tokens a template joins."""
    template, tokens = step.get(key), step.get("special_tokens")
    if not isinstance(template, list) or not isinstance(tokens, dict):
        return 1
    sizes = {
        name: len(token["ids"])
        for name, token in tokens.items()
        if isinstance(token, dict) and isinstance(token.get("ids"), list)
    }
    total = 0
    for piece in template:
        special = piece.get("SpecialToken") if isinstance(piece, dict) else None
        total += sizes.get(str(special.get("id")), 1) if isinstance(special, dict) else 1
    return total
