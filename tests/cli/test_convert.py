"""``jaxllama convert``: a GGUF file as a directory that transformers loads to the same model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

import jaxllama as jl
from jaxllama.cli.main import main
from tests.checkpoints.test_gguf import Tiny

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MESSAGES = [{"role": "user", "content": " ab aab "}, {"role": "assistant", "content": "b a"}]
TEXTS = ["ab a ab", "  b", "caf\u00e9 \U0001f642", "<s>a</s>b", ""]
IDS = np.asarray([[1, 3, 5, 7, 100, 9], [1, 260, 4, 4, 6, 3]])


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, Path]:
    """(a Q8_0 file, the directory that it becomes)."""
    folder = tmp_path_factory.mktemp("convert")
    file, out = folder / "tiny.gguf", folder / "out"
    keys = {"tokenizer.chat_template": TEMPLATE}
    Tiny(vocab=264, type=Type.Q8_0, tokenizer="llama", keys=keys).write(file)
    words = ["convert", "--model", str(file), "--out", str(out), "--dtype", "float32"]
    assert main(words) == 0
    return file, out


@pytest.mark.core
def test_the_directory_is_the_file(converted):
    file, out = converted
    ours, back = jl.load(file, exact=True), jl.load(out, "float32")
    want = np.asarray(ours.logits(IDS, [6, 6]))
    np.testing.assert_array_equal(back.logits(IDS, [6, 6]), want)
    assert list(ours.config.eos_token_ids) == list(back.config.eos_token_ids) == [2]
    prompt = ours.tokenizer.apply_chat_template(MESSAGES)
    assert prompt == "<s><user>ab aab</s><assistant>b a</s><a>"
    assert back.tokenizer.apply_chat_template(MESSAGES) == prompt
    for text in [*TEXTS, prompt]:
        ids = ours.tokenizer.encode(text)
        assert ids == back.tokenizer.encode(text)
        assert ours.tokenizer.decode(ids) == back.tokenizer.decode(ids)


@pytest.mark.slow
def test_transformers_loads_the_same(converted):
    file, out = converted
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours, lm = jl.Tokenizer.from_gguf(file), jl.load(file, exact=True)
    want = np.asarray(lm.logits(IDS, [6, 6]))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        got = model(torch.from_numpy(IDS)).logits.numpy()
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert model.generation_config.eos_token_id == 2 and model.generation_config.bos_token_id == 1
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    prompt = ours.apply_chat_template(MESSAGES)
    for text in [*TEXTS, prompt]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert rendered == prompt
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, *ours.eos_ids)


def test_it_says_what_it_wrote_and_overwrites_nothing(converted, tmp_path, capsys):
    file, out = converted
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert main(["convert", "--model", str(file), "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert (
        said.out == "" and said.err.startswith("error: --out = ") and "already exists" in said.err
    )
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    words = ["convert", "--model", str(out), "--out", str(tmp_path / "half"), "--json"]
    assert main([*words, "--dtype", "bfloat16"]) == 0
    report = json.loads(capsys.readouterr().out)
    files = {path.name for path in (tmp_path / "half").iterdir()}
    assert files == set(report["files"].split(", ")) and len(files) == 6
    half, whole = (f / "model.safetensors" for f in (tmp_path / "half", out))
    assert 0.5 < half.stat().st_size / whole.stat().st_size < 0.55
