"""Fill in the middle: the prompt that a code model reads between a text and its ``suffix``.

    rows = infill(tokenizer, before, after)      token ids, or None without such tokens

A model that was trained to fill in has three special tokens. The table has them by family, from
the model cards. Codestral reads the suffix first; the others read the prefix first.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxllama.text.tokenizer import Tokenizer

# Prefix, suffix, middle: "prefix TEXT suffix SUFFIX middle".
PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral: "[SUFFIX] SUFFIX [PREFIX] TEXT"


def infill(tokenizer: Tokenizer, before: Sequence[int], after: Sequence[int]) -> list[int] | None:
    """Return the prompt for the text between two others, None without tokens to fill in with.

    before, after: token ids of the two texts, without special tokens.
    """
    begin = tokenizer.encode("")  # special tokens that every prompt begins with
    for names in PREFIX_FIRST:
        marks = [tokenizer.id(name) for name in names]
        if None not in marks:
            prefix, suffix, middle = (mark for mark in marks if mark is not None)
            return [*begin, prefix, *before, suffix, *after, middle]
    last, first = (tokenizer.id(name) for name in SUFFIX_FIRST)
    if last is None or first is None:
        return None
    return [*begin, last, *after, first, *before]
