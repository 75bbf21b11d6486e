"""Every file that a model's folder may hold, with another thing in its place."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllama import files
from jaxllama.checkpoints import peft, pooling
from jaxllama.checkpoints.gguf.file import GGUFFile
from jaxllama.checkpoints.hf import load as hf
from jaxllama.errors import JaxLlamaError
from jaxllama.text.tokenizer import Tokenizer
from tests.helpers import lora_cases
from tests.helpers.models import LLAMA
from tests.helpers.seeded import seeded_params

MODULES = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling")]
MODULES[1]["path"] = "1_Pooling"
# Each file, and the reader that must refuse it.
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": hf.load,
    "generation_config.json": hf.read_sampling,
    "hf_quant_config.json": hf.load,
    "model.safetensors": hf.load,
    "model.safetensors.index.json": hf.load,
    "modules.json": pooling.read,
    "1_Pooling/config.json": pooling.read,
    "tokenizer.json": Tokenizer.from_file,
    "tokenizer_config.json": Tokenizer.from_file,
    "special_tokens_map.json": Tokenizer.from_file,
    "chat_template.jinja": Tokenizer.from_file,
    "adapter_config.json": lambda folder: peft.read(folder, LLAMA),
    "adapter_model.safetensors": lambda folder: peft.read(folder, LLAMA),
    "model.gguf": lambda folder: GGUFFile(folder / "model.gguf"),
}
NESTED = "[" * 100_000 + "]" * 100_000
TEXTS = {
    "nested": '{"a": ' + NESTED + "}",
    "nested within Python's bound": '{"a": ' + "[" * 300 + "]" * 300 + "}",
    "digits": '{"a": ' + "9" * 10_000 + "}",
    "fewer digits": '{"a": ' + "9" * 400 + "}",
    "surrogate": '{"a": "\\ud800"}',
    "list": "[" * 3 + "]" * 3,
    "not JSON": "{",
    "not UTF-8": b'{"a": "\xff"}',
}


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":  # it takes no room on the disk
        path.touch()
        os.truncate(path, 3 << 30)
    else:
        text = TEXTS[kind]
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file but an index and a GGUF file."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    hf.save(folder, LLAMA, seeded_params(LLAMA))
    Tokenizer.byte_level().save(folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    lora_cases.write(folder, lora_cases.tensors(LLAMA, 1, only="layers.0.*q_proj"))
    return folder


@pytest.fixture
def in_time() -> Iterator[None]:
    """A call that waits for ever fails instead."""

    def late(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_of_its_size_is_refused_by_name(
    name: str, whole: Path, tmp_path: Path, in_time: None
) -> None:
    is_json = name.endswith(".json")
    kinds = ["pipe", "device", "folder", "large", *(TEXTS if is_json else ())]
    if name == "modules.json":
        kinds.remove("list")
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number)
        folder.mkdir()
        for path in whole.rglob("*.*"):
            if path.is_file():
                (folder / path.relative_to(whole)).parent.mkdir(exist_ok=True)
                (folder / path.relative_to(whole)).symlink_to(path)
        if "index" in name:
            (folder / "model.safetensors").unlink()
        put(folder / name, kind)
        with pytest.raises(JaxLlamaError) as caught:
            READERS[name](folder)
        said = str(caught.value)
        assert said.startswith(str(folder)) and "\n" not in said, (kind, said)
        assert len(said) < len(str(folder)) + 400, (kind, said[:1000])


def test_a_whole_folder_of_links_is_read(whole: Path, tmp_path: Path) -> None:
    """The hub's cache holds links to files elsewhere."""
    (tmp_path / "1_Pooling").mkdir()
    for path in whole.rglob("*.*"):
        if path.is_file():
            (tmp_path / path.relative_to(whole)).symlink_to(path)
    assert hf.load(tmp_path)[0].replace(name="tiny") == LLAMA
    assert Tokenizer.from_file(tmp_path).vocab_size == 256
    assert pooling.read(tmp_path) == pooling.Pooling("mean", False)
    assert len(peft.read(tmp_path, LLAMA)) == 1


def test_values_of_json() -> None:
    assert files.parse_json(b'{"a": [1, 2.5, "\\ud83d\\ude00", NaN]}', "x") != {}
    deepest = "[" * files.DEPTH + "]" * files.DEPTH
    assert files.parse_json(deepest.encode(), "x") is not None
    for text, said in (
        (f"[{deepest}]", "x: not JSON: nested deeper than 64 levels"),
        ('{"a": 1, "a": 2}', "x: the key 'a' is there twice"),
        ("9" * 41, "x: not JSON: a number of 41 digits"),
    ):
        with pytest.raises(JaxLlamaError) as caught:
            files.parse_json(text.encode(), "x")
        assert str(caught.value) == said


def test_a_file_s_name_may_be_anything(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 5000):
        assert not files.exists(tmp_path / name)
        with pytest.raises(JaxLlamaError, match="null byte|too long"):
            files.read(tmp_path / name, 10)


def test_a_file_and_a_folder_appear_whole_or_not_at_all(tmp_path):
    files.write_text(tmp_path / "a", "old")
    with pytest.raises(KeyError), files.whole_file(tmp_path / "a") as file:
        file.write(b"new")
        raise KeyError
    with pytest.raises(KeyError), files.whole_folder(tmp_path / "b" / "c") as scratch:
        (scratch / "d").write_text("e")
        raise KeyError
    assert (tmp_path / "a").read_text() == "old"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]
    with files.whole_folder(tmp_path / "b" / "c") as scratch:
        files.write_text(scratch / "d", "e")
    assert (tmp_path / "b" / "c" / "d").read_text() == "e"
