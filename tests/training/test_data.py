"""Token files: what is written, what a batch is, what is refused."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer
from jaxllama.training import data
from jaxllama.training.data import TokenFile, pieces, run_tokenizer, tokenize

TEXT = "In the beginning\n\n  was the word.\nÄnd  \n\n\n so on.\n" * 30


@pytest.fixture
def book(tmp_path):
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    return tokenize([tmp_path / "book.txt"], tmp_path / "book", Tokenizer.byte_level())


@pytest.mark.core
def test_a_token_file_holds_the_text_and_says_what_it_is(book, tmp_path):
    want = TEXT.encode()
    assert bytes(book.ids.astype(np.uint8)) == want and len(book) == len(want)
    assert book.ids.dtype == np.uint16 and isinstance(book.ids, np.memmap)
    meta = json.loads((book.directory / "meta.json").read_text())
    assert meta["tokens"] == len(want) and meta["vocab_size"] == 256
    assert book.sha256 == meta["sha256"] == hashlib.sha256(book.ids.tobytes()).hexdigest()
    assert {path.name for path in book.tokenizer_files} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert Tokenizer.from_file(book.directory).encode("ab") == [97, 98]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("size", [1, 7, 50, 10**6])
def test_pieces_are_the_text_cut_before_line_ends(size):
    parts = list(pieces(TEXT, size))
    assert "".join(parts) == TEXT
    assert all(part[0] == "\n" for part in parts[1:])
    assert not any(part[-1].isspace() for part in parts[:-1])
    assert all(len(part) >= size for part in parts[:-1])


def test_documents_end_with_the_end_of_text_token_and_pieces_change_nothing(tmp_path, monkeypatch):
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<end>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = Tokenizer(backend, "trained", eos_ids=[0], special_tokens={"eos_token": "<end>"})
    whole = tokenizer.encode(TEXT, add_special=False)
    assert max(whole) > 260  # merges happened
    paths = []
    for name in ("a", "b"):
        paths.append(tmp_path / f"{name}.txt")
        paths[-1].write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(data, "PIECE", 64)
    made = tokenize(paths, tmp_path / "out", tokenizer)
    np.testing.assert_array_equal(made.ids, [*whole, 0, *whole, 0])
    assert Tokenizer.from_file(made.directory).eos_ids == (0,)


@pytest.mark.core
def test_an_epoch_is_every_window_once_in_an_order_of_its_own(book):
    length, size = 16, 4
    count = book.windows(length)
    assert count == (len(book) - 1) // length and count % size
    flat = np.asarray(book.ids, np.int32)
    steps = -(-3 * count // size)
    rows = np.concatenate([book.batch(step, size, length, seed=3) for step in range(steps)])
    assert rows.dtype == np.int32 and rows.shape == (steps * size, length + 1)
    index = {flat[i * length : (i + 1) * length + 1].tobytes() for i in range(count)}
    orders = []
    for epoch in range(3):
        seen = rows[epoch * count : (epoch + 1) * count]
        assert {row.tobytes() for row in seen} == index
        orders.append(seen.tobytes())
    assert len(set(orders)) == 3
    again = book.batch(5, size, length, seed=3)
    np.testing.assert_array_equal(again, rows[5 * size : 6 * size])
    assert not np.array_equal(again, book.batch(5, size, length, seed=4))


def test_split_holds_the_end_out(book):
    training, held_out = book.split(100)
    np.testing.assert_array_equal(held_out.ids, book.ids[-100:])
    assert len(training) == len(book) - 100
    assert len(book.split(0)[1]) == 0


def test_bad_texts_are_named_and_leave_nothing(tmp_path):
    tokenizer = Tokenizer.byte_level()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    for name, message in (("latin", "not UTF-8"), ("empty", "empty"), ("gone", "No such file")):
        with pytest.raises(JaxLlamaError, match=f"{name}.txt: {message}"):
            tokenize([tmp_path / f"{name}.txt"], tmp_path / "out", tokenizer)
    assert {path.name for path in tmp_path.iterdir()} == {"latin.txt", "empty.txt"}
    (tmp_path / "out").mkdir()
    with pytest.raises(JaxLlamaError, match="out: exists already"):
        tokenize([tmp_path / "latin.txt"], tmp_path / "out", tokenizer)


def test_a_folder_that_is_no_token_file_is_refused(book, tmp_path):
    with pytest.raises(JaxLlamaError, match="nowhere.*jaxllama tokenize"):
        TokenFile.open(tmp_path / "nowhere")
    np.save(book.directory / "tokens.npy", book.ids[:10])
    with pytest.raises(JaxLlamaError, match=r"uint16\[10\]"):
        TokenFile.open(book.directory)
    (book.directory / "meta.json").write_text("{}")
    with pytest.raises(JaxLlamaError, match="not a token file: 'vocab_size'"):
        TokenFile.open(book.directory)
    (book.directory / "tokens.npy").write_bytes(b"rubbish")
    with pytest.raises(JaxLlamaError, match="not a token file"):
        TokenFile.open(book.directory)


@pytest.mark.parametrize(
    ("own", "first", "key"), [(None, "smolm2", "init_from"), ("smolm2", None, "data.tokenizer")]
)
def test_a_tokenizer_that_is_missing_is_named_by_its_key(own, first, key):
    with pytest.raises(JaxLlamaError, match=f"^{key} = 'smolm2': unknown model 'smolm2'"):
        run_tokenizer(own, first)
