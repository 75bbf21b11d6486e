"""Text before a suffix, for tokenizers with tokens for it."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn")

from jaxllama.serving.api.bodies import Completion
from jaxllama.serving.api.calls import Prompts
from jaxllama.serving.api.infill import PREFIX_FIRST, SUFFIX_FIRST
from jaxllama.serving.api.schemas import ApiError
from tests.helpers.http_server import NAME, byte_tokenizer, tiny_model


def row(special, **fields) -> list[int]:
    prompts = Prompts(tiny_model(byte_tokenizer(special=special)), NAME, 96, 8)
    fields = {"prompt": "ab", "suffix": "yz", "max_tokens": 4, **fields}
    [request] = prompts.completion(Completion(model=NAME, **fields), "cmpl-1").requests
    return list(request.prompt)


@pytest.mark.parametrize("names", PREFIX_FIRST)
def test_the_prefix_comes_first(names):
    assert row(names) == [256, *b"ab", 257, *b"yz", 258]
    assert row(names, prompt=[97]) == [256, 97, 257, *b"yz", 258]
    assert row(names, suffix=None) == list(b"ab")


def test_codestral_reads_the_suffix_first():
    assert row(SUFFIX_FIRST) == [256, *b"yz", 257, *b"ab"]


def test_what_cannot_be_filled_in():
    for special, fields, said in (
        ((), {}, "tiny has no tokens to fill in the middle"),
        (PREFIX_FIRST[0][:2], {}, "has no tokens"),
        (PREFIX_FIRST[0], {"echo": True}, "excludes echo"),
        (PREFIX_FIRST[0], {"suffix": "y" * 97}, "more than 96 tokens"),
        (PREFIX_FIRST[0], {"suffix": "y" * 92}, "more than 96 tokens"),
    ):
        with pytest.raises(ApiError, match=said) as refused:
            row(special, **fields)
        assert refused.value.status == 400 and refused.value.param == "suffix"
