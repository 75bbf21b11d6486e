"""Tokenizers that multiply a text, and those that do so within measure."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.text.growth import GROWTH, check_growth
from jaxllama.text.tokenizer import Tokenizer


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def sequence(*steps: Any, key: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", key: list(steps)}


def precompiled(*texts: str) -> dict[str, Any]:
    table = (8).to_bytes(4, "little") + bytes(8) + "\0".join(texts).encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def template(pieces: int, ids: int = 1) -> dict[str, Any]:
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokens = {"<s>": {"id": "<s>", "ids": [0] * ids, "tokens": ["<s>"] * ids}}
    return {"type": "TemplateProcessing", "single": [start, *[text] * pieces], "pair": [],
            "special_tokens": tokens}  # fmt: skip


REFUSED = [
    ("normalizer", sequence(*[replace("a", "a" * 10)] * 12), "1e+12"),
    ("normalizer", sequence(*[sequence(replace("a", "bb")), replace("b", "aa")] * 5), "1e+03"),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "a" * 300}, "3e+02"),
    ("normalizer", {"type": "Prepend", "prepend": "a" * 1000}, "1e+03"),
    ("normalizer", precompiled("b" * 2000), "2e+03"),
    ("normalizer", sequence(*[{"type": "ByteLevel"}] * 9), "3e+05"),
    ("pre_tokenizer", sequence(*[{"type": "ByteLevel"}] * 9, key="pretokenizers"), "3e+05"),
    ("post_processor", template(1000), "1e+03"),
    ("post_processor", template(1, ids=500), "5e+02"),
    ("post_processor", sequence(*[template(4)] * 6, key="processors"), "2e+04"),
    ("decoder", sequence(*[replace("a", "a" * 10)] * 12, key="decoders"), "1e+12"),
]


@pytest.mark.parametrize(("key", "step", "growth"), REFUSED)
def test_a_tokenizer_without_measure_is_refused(
    key: str, step: Any, growth: str, tmp_path: Path
) -> None:
    """Also where JSON spells its key with an escape, or names the key a second time."""
    Tokenizer.byte_level().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    plain = path.read_text()
    escaped = f'"\\u{ord(key[0]):04X}{key[1:]}"'
    last = plain.rstrip()[:-1] + f", {escaped} :\n {json.dumps(step)}}}"
    for text in (json.dumps({**json.loads(plain), key: step}), last):
        path.write_text(text)
        with pytest.raises(
            JaxLlamaError, match=f"its {key} may make {growth[:2]}.* of one"
        ) as caught:
            Tokenizer.from_file(path)
        assert growth in str(caught.value)


@pytest.mark.parametrize(
    "step",
    [
        None,
        sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),  # Llama 2
        sequence(precompiled("ab", "c" * 18), {"type": "Replace", "pattern": {"Regex": " {2,}"},
                 "content": "▁"}),  # XLM-RoBERTa
        sequence({"type": "NFKC"}, *[replace(c, "1/2") for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙"]),
    ],
)  # fmt: skip
def test_those_in_use_are_not(step: Any) -> None:
    check_growth(
        json.dumps({"normalizer": step, "model": {"vocab": {"normalizer": 1}}}).encode(), "x"
    )


def test_the_bound_is_no_less_than_what_comes_of_a_text(tmp_path: Path) -> None:
    """The library's own normalizer makes as many letters as the bound says, or fewer."""
    import tokenizers

    steps = sequence(replace("a", "bbb"), replace("bb", "cac"), replace("c", "aa"))
    data = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": steps}
    backend = tokenizers.Tokenizer.from_str(json.dumps({"added_tokens": [], **data}))
    made = len(backend.normalizer.normalize_str("a" * 100)) / 100
    assert 3 < made <= 3 * 1.5 * 2 < GROWTH
    check_growth(json.dumps(data).encode(), "x")


def test_long_special_tokens_are_refused(tmp_path: Path) -> None:
    for spelling, said in (
        ("<" + "a" * 2998 + ">", "has 3000 letters, at most 200"),
        ("<x>", None),
    ):
        backend = Tokenizer.byte_level()._backend
        backend.add_special_tokens([spelling])
        backend.save(str(tmp_path / "tokenizer.json"))
        if said is None:
            assert Tokenizer.from_file(tmp_path).encode("<x>a") == [256, 97]
            continue
        with pytest.raises(JaxLlamaError, match=said):
            Tokenizer.from_file(tmp_path)


def test_markers_of_the_longest_kind_are_found() -> None:
    """Each longer by a letter, the worst for the tree in which they are looked for."""
    backend = Tokenizer.byte_level()._backend
    backend.add_special_tokens(["a" * size for size in range(2, 201)])
    tokenizer = Tokenizer(backend, "test", chat_template="{{ messages[0].content }}")
    text = "b" + "a" * 7
    assert tokenizer.encode_chat([{"role": "user", "content": text}]) == list(text.encode())
